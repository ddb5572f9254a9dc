"""A server is killed again and again while workers push: what each of them pushed is there, once.

All elements but the first few grow by 1 with each push of anybody, so that they are equal to each other and to the
version wherever an update is whole. The first ones are each worker's own: how many of its pushes, and which, are in it.
With a momentum of each worker's own (`MOMENTA`) they are what its pushes, each taken once and in order, make of them,
to the bit.

Workers are killed, too (`kill_workers`): of each, the pushes that were answered are in the weights, in order and once,
and at most the one that was under way.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lightning_async.algorithms import Dana, TwoBit
from lightning_async.comm.p2p_gloo import dial
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.process import ServerProcess

__all__ = ["MOMENTA", "Found", "kill_servers", "kill_workers", "work"]

MOMENTA = WorkerRules(staleness=Dana())
_MU = 0.5
_SGD = {"lr": 1.0, "momentum": _MU}

_PRIME = 97  # what a push adds beside 1 says which one it was, and stays a small number


@dataclass
class Found:
    """What a run has shown; times in seconds."""

    kills: int = 0
    kills_in_start: int = 0
    pushes: list[int] = field(default_factory=list)
    resent: int = 0
    resumed_s: list[float] = field(default_factory=list)
    memory_before: int = 0
    memory_after: int = 0


class Stop(Protocol):
    """An event, of threads or of processes."""

    def is_set(self) -> bool: ...


class Counted:
    """What a worker expects of what it pulls: its pushes are added."""

    optimizer: tuple[str, dict[str, float]] = ("delta", {})

    def __init__(self, place: int, workers: int) -> None:
        self.place, self.workers, self.number, self.sum = place, workers, 0, 0.0

    def push(self, number: int, step: float) -> None:
        self.number, self.sum = number, self.sum + step

    def check(self, weights: torch.Tensor, version: int) -> None:
        bulk = weights[2 * self.workers :]
        assert bulk.min() == bulk.max() == version, (self.number, version, bulk.min(), bulk.max())
        assert weights[: self.workers].sum() == version, (self.number, version, weights[: self.workers])
        assert weights[self.place] == self.number, (self.number, version, weights[self.place])
        assert weights[self.workers + self.place] == self.sum, (self.number, version)


class WithMomentum(Counted):
    """They are steps of SGD with its own momentum, and what is pulled is ahead of them: `ops.server_dana_`, in fp32."""

    optimizer = ("SGD", _SGD)

    def __init__(self, place: int, workers: int) -> None:
        super().__init__(place, workers)
        self.x, self.momentum, self.total = (torch.zeros(2) for _ in range(3))

    def push(self, number: int, step: float) -> None:
        super().push(number, step)
        new = self.momentum * _MU + torch.tensor([1.0, step])
        self.total = self.total + (new - self.momentum)
        self.momentum, self.x = new, self.x - new

    def check(self, weights: torch.Tensor, version: int) -> None:
        bulk, mine = weights[2 * self.workers :], weights[self.place :: self.workers][:2]
        assert bulk.min() == bulk.max(), (self.number, version, bulk.min(), bulk.max())
        assert torch.equal(mine, self.x - self.total * _MU), (self.number, version, mine, self.x)


def work(
    name: str, place: int, workers: int, server: Mapping[str, Any], numel: int, stop: Stop, seen: MutableSequence[int],
    via: str | None = None, momenta: bool = False, compression: TwoBit | None = None,
) -> int:  # fmt: skip
    """Push until told to stop, looking at all that is pulled; how often was asked again.

    Args:
        name, place, workers: who of how many.
        server: its address.
        numel: of the shard.
        seen: filled with the number of this worker's pushes, in its place.
        via: see `dial`.
        momenta: whether the server's terms are `MOMENTA`. Default: the usual ones.
        compression: of pushes, with a threshold of 1: of the number that says which push it was 1 arrives with each,
            and the rest stays here. Default: none.
    """
    client = Client(name, [dial(server, 4 * numel, 4 * numel, via)], timeout_s=90, compression=compression)
    expected = WithMomentum(place, workers) if momenta else Counted(place, workers)
    client.gradients[0].zero_()
    client.start(*expected.optimizer)
    number = resent = pushed = 0
    while not stop.is_set():
        number += 1
        gradient = client.gradients[0]
        gradient[: 2 * workers] = 0
        gradient[2 * workers :] = 1
        gradient[place], gradient[workers + place] = 1, number % _PRIME
        pushed += number % _PRIME
        expected.push(number, float(number % _PRIME) if compression is None else 1.0)
        answer = client.push()
        resent += answer.resent
        seen[place] = number
        expected.check(client.weights[0], answer.versions[0])
        for feedback in client.feedback:
            assert feedback.residual.sum() == feedback.residual[workers + place] == pushed - number
    client.close()
    return resent


def kill_servers(
    server: ServerProcess, seen: Sequence[int], kills: int, seed: int, failed: Callable[[], bool], found: Found
) -> None:
    """Kill the server so often: at random moments of its work, and every fourth time of its start.

    Args:
        server: that workers push to.
        seen: how many pushes of each worker were answered; another thread, or memory shared with processes.
        kills: how often.
        seed: of the moments.
        failed: whether to give up.
    """
    chance = random.Random(seed)
    began = time.monotonic()
    for kill in range(kills):
        if kill % 4 == 3:
            time.sleep(chance.uniform(0.0, 1.0))
            found.kills_in_start += 1
        else:
            before = list(seen)
            while any(now <= then for now, then in zip(seen, before, strict=True)):
                assert not failed() and time.monotonic() - began < 120, "the server does not go on"
                time.sleep(0.001)
            found.resumed_s.append(time.monotonic() - began)
            time.sleep(chance.uniform(0.0, 0.1))
        while (pid := server.pid) is None:
            assert time.monotonic() - began < 120, "the server is not started again"
            time.sleep(0.001)
        found.memory_before = found.memory_before or memory_of(pid, server.supervisor)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        found.kills += 1
        while server.pid == pid:
            time.sleep(0.001)
    before = list(seen)
    while any(now <= then for now, then in zip(seen, before, strict=True)):
        assert not failed() and time.monotonic() - began < 120, "the server does not go on"
        time.sleep(0.001)
    found.resumed_s.append(time.monotonic() - began)
    pid = server.pid
    assert pid is not None
    found.memory_after = memory_of(pid, server.supervisor)


class Killable(Protocol):
    """A process."""

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


def kill_workers(
    begin: Callable[[int], Killable], seen: Sequence[int], workers: int, kills: int, seed: int, found: Found
) -> dict[int, Killable]:
    """Kill workers so often, at random moments of their work; another one comes for each. Those that are left.

    Args:
        begin: starts one that does `work`, in a place of its own.
        seen: how many pushes of each place were answered, in memory shared with processes.
        workers: that there are at a time.
        kills: how often.
        seed: of the moments.
    """
    chance, living = random.Random(seed), {place: begin(place) for place in range(workers)}
    for kill in range(kills):
        _wait_for(seen, dict.fromkeys(living, 1))
        victim = chance.choice(sorted(living))
        time.sleep(chance.uniform(0.0, 0.05))
        living[victim].kill()
        began = time.monotonic()
        living.pop(victim).join()
        _wait_for(seen, {place: seen[place] + 2 for place in living})  # the second one has begun since
        found.resumed_s.append(time.monotonic() - began)
        found.kills += 1
        living[workers + kill] = begin(workers + kill)
    _wait_for(seen, dict.fromkeys(living, 1))
    return living


def _wait_for(seen: Sequence[int], numbers: Mapping[int, int]) -> None:
    until = time.monotonic() + 120
    while behind := [place for place, number in numbers.items() if seen[place] < number]:
        assert time.monotonic() < until, f"workers {behind} do not go on"
        time.sleep(0.001)


def check_pushes(weights: torch.Tensor, version: int, seen: Sequence[int], killed: Callable[[int], bool]) -> None:
    """All that was answered is there, once and in order; of those that were killed one more may be."""
    places, total = len(seen), 0
    for place, number in enumerate(seen):
        applied = int(weights[place])
        assert number <= applied <= number + killed(place), (place, number, applied)
        assert weights[places + place] == sum(each % _PRIME for each in range(1, applied + 1)), (place, applied)
        total += applied
    assert version == total == weights[2 * places], (version, total)


def memory_of(*pids: int) -> int:
    """Bytes that processes have resident, by their proportion of what is shared where the system tells."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            (line,) = [line for line in file if line.startswith("Pss:")]
        total += int(line.split()[1]) << 10
    return total


def final_weights(server: Mapping[str, Any], numel: int, momenta: bool = False) -> tuple[torch.Tensor, int]:
    """What is there at the end, and its version."""
    client = Client("who looks", [dial(server, 4 * numel, 4 * numel)], timeout_s=90)
    answer = client.start(*(WithMomentum if momenta else Counted).optimizer)
    weights = client.weights[0].clone()
    client.close()
    return weights, answer.versions[0]
