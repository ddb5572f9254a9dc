"""`fit_elastic` under a real `horovodrun` with two loopback "hosts", one of which dies and may come back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_async.strategies.horovod_elastic import ElasticSampler
from tests.horovod import needs_horovod
from tests.strategies.elastic_script import SAMPLES
from tests.support import ROOT, shell_environment

SCRIPT = ROOT / "tests/strategies/elastic_script.py"


class Step(NamedTuple):
    pid: int
    rank: int
    world_size: int
    epoch: int
    step: int
    at: float
    samples: tuple[int, ...]


def steps(text: str) -> list[Step]:
    found = []
    for line in text.splitlines():
        _, mark, rest = line.partition("STEP ")
        fields = rest.split()
        if mark and len(fields) == 7:
            pid, rank, world_size, epoch, step = map(int, fields[:5])
            samples = tuple(map(int, fields[6].split(",")))
            found.append(Step(pid, rank, world_size, epoch, step, float(fields[5]), samples))
    return found


def name_hosts(folder: Path, *hosts: str) -> None:
    """What the discovery script says from now on."""
    script = folder / "new.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in hosts))
    script.chmod(0o755)
    script.replace(folder / "hosts.sh")


def run(folder: Path, watch: Callable[[list[Step]], None], how: str, limit_s: float = 200.0) -> str:
    """Start on the hosts that `name_hosts` named, let ``watch`` act on the steps so far, and wait for the end."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", "1", "--min-np", "1", "--max-np", "2"]
    command = [*launcher, "--host-discovery-script", str(folder / "hosts.sh"), "--network-interface", "lo"]
    log = folder / "log"
    deadline = time.monotonic() + limit_s
    with log.open("wb") as out:
        job = subprocess.Popen(
            [*command, sys.executable, str(SCRIPT), how], cwd=folder, env=shell_environment(), stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    pids: set[int] = set()
    try:
        while job.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            so_far = steps(log.read_text(errors="replace"))
            pids = {step.pid for step in so_far}
            watch(so_far)
            time.sleep(0.02)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return log.read_text(errors="replace")


def dealt(taken: Sequence[Step], epoch: int) -> list[int]:
    return sorted(sample for step in taken if step.epoch == epoch for sample in step.samples)


@pytest.mark.alone
@needs_horovod
def test_the_survivor_goes_on_soon_and_takes_the_rest_of_the_samples(tmp_path: Path) -> None:
    killed: dict[int, float] = {}

    def kill_the_second_at_its_20th_step(so_far: list[Step]) -> None:
        late = [step for step in so_far if step.rank == 1 and step.step >= 20]
        if late and not killed:
            killed[late[0].pid] = time.time()
            os.kill(late[0].pid, signal.SIGKILL)

    name_hosts(tmp_path, "localhost", "127.0.0.1")
    text = run(tmp_path, kill_the_second_at_its_20th_step, "holds")
    all_steps = steps(text)
    ((victim, killed_at),) = killed.items()
    together = [step for step in all_steps if step.world_size == 2]
    after = [step for step in all_steps if step.world_size == 1 and step.at > killed_at]
    assert after, text[-6000:]
    assert victim not in {step.pid for step in after}
    back_s = after[0].at - killed_at
    print(f"back in training {back_s:.2f} s after the kill")
    assert back_s < 15.0, "on a quiet machine it is a second; what ends the wait of a rank that hears nothing is longer"
    # It goes on from the last commit, which is a multiple of 5.
    begun = after[0].step
    assert begun % 5 == 0 and 15 <= begun <= 25
    kept = [step for step in together if step.step < begun]
    assert dealt([*kept, *after], 0) == list(range(SAMPLES)), "each sample once, in spite of the loss"
    assert dealt(after, 1) == list(range(SAMPLES)), "the next epoch is whole"
    (done,) = [line for line in text.splitlines() if "DONE " in line]
    assert done.split()[-3:-1] == [str(begun + (SAMPLES - 4 * begun) // 2 + SAMPLES // 2), "2"]


@pytest.mark.alone
@needs_horovod
def test_a_host_that_comes_takes_its_share_of_the_rest(tmp_path: Path) -> None:
    def announce_it_at_the_10th_step(so_far: list[Step]) -> None:
        if any(step.step >= 10 for step in so_far):
            name_hosts(tmp_path, "localhost", "127.0.0.1")

    name_hosts(tmp_path, "localhost")
    text = run(tmp_path, announce_it_at_the_10th_step, "slow")
    all_steps = steps(text)
    alone = [step for step in all_steps if step.world_size == 1]
    together = [step for step in all_steps if step.world_size == 2]
    assert alone and together, text[-6000:]
    (first,) = {step.pid for step in alone}
    assert {step.pid for step in together if step.rank == 0} == {first}
    assert len({step.pid for step in together}) == 2
    begun = together[0].step
    assert begun == alone[-1].step + 1 and begun % 5 == 0, "between a commit and the next step, so that no step is lost"
    assert dealt(all_steps, 0) == list(range(SAMPLES)), "each sample once, in spite of the change"
    assert dealt(all_steps, 1) == list(range(SAMPLES))
    weights = [line.split()[-3:] for line in text.splitlines() if "DONE " in line]
    assert len(weights) == 2 and weights[0] == weights[1], "equal steps, epochs and weights"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "ranks", "skipped"), [(10, 2, 0), (10, 3, 4), (7, 2, 7), (9, 4, 8), (5, 1, 3)])
def test_the_sampler_deals_out_the_rest(size: int, ranks: int, skipped: int, shuffle: bool) -> None:
    def deal(samples: int) -> list[list[int]]:
        samplers = [
            ElasticSampler(range(size), num_replicas=ranks, rank=rank, shuffle=shuffle, epoch=3, samples=samples)
            for rank in range(ranks)
        ]
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        assert len({len(part) for part in parts}) == 1
        return parts

    order = list(ElasticSampler(range(size), num_replicas=1, rank=0, shuffle=shuffle, epoch=3, samples=0))
    assert set().union(*deal(skipped)) == set(order[skipped:])
    later = ElasticSampler(range(size), num_replicas=ranks, rank=0, shuffle=shuffle, epoch=3, samples=skipped)
    later.set_epoch(4)
    assert later.skipped == 0
