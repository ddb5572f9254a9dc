"""What the processes of these tests run; see `tests.support`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_async._sockets import snapshot
from lightning_async.comm import torch_groups
from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.errors import CollectiveError, PeerLost
from lightning_async.membership import startup
from lightning_async.membership.generation import Generation
from lightning_async.membership.membership import Membership
from lightning_async.membership.startup import WaitWithLog
from lightning_async.membership.store import PrefixStore
from tests.comm.contract import ALL_CHECKS, Check, Stage

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = timedelta(seconds=40)


def open_store() -> Any:
    patience = WaitWithLog(RANK, TIMEOUT, lambda: None)
    return startup.open_store("127.0.0.1", int(os.environ["MASTER_PORT"]), RANK == 0, patience, TIMEOUT)


def meet(store: Any, name: str) -> None:
    """A barrier over the store."""
    store.add(f"meet/{name}", 1)
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while store.add(f"meet/{name}", 0) < WORLD_SIZE:
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.002)


def end(store: Any) -> None:
    """Nobody needs the store after this: the rank that has it goes last."""
    store.add("end", 1)
    while RANK == 0 and store.add("end", 0) < WORLD_SIZE:  # until the test's deadline at the latest
        time.sleep(0.002)


def run_checks(
    checks: Mapping[str, Check],
    store: Any,
    collectives: Callable[[str], Any],
    device: str = "cpu",
    peers_hear: bool = True,
) -> dict[str, Any]:
    """Each check with new ``collectives``: what failed, with the traceback, and what it took.

    Each outcome is printed too, at once: it is not lost with the process.
    """
    failures, timings = {}, {}
    for name, check in checks.items():
        comm = collectives(name)
        stage = Stage(comm, lambda where, name=name: meet(store, f"{name}/{where}"), timings, peers_hear)
        comm.open()  # forks then open at once, so that a check finds them formed
        started = time.monotonic()
        try:
            with torch.device(device):
                check(stage)
        except BaseException:
            failures[name] = traceback.format_exc()
        meet(
            store, f"{name}/checked"
        )  # who has its answer may have it before the others, whose connections it would close
        comm.close()
        timings[name] = time.monotonic() - started
        print(f"{name}: " + (f"failed\n{failures[name]}" if name in failures else f"kept, {timings[name]:.2f} s"))
        meet(store, f"{name}/end")
    return {"failures": failures, "timings": timings}


def other_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


def contract(
    backend: str = "gloo", device: str = "cpu", peers_hear: bool = True, without: Sequence[str] = ()
) -> dict[str, Any]:
    """The checks of the contract over a backend of torch's, all but those that are named."""
    store = open_store()
    told = run_checks(
        {name: check for name, check in ALL_CHECKS.items() if name not in without},
        store,
        lambda name: TorchCollectives(
            PrefixStore(name, store), RANK, WORLD_SIZE, backend=backend, timeout=TIMEOUT, form_timeout=TIMEOUT
        ),
        device,
        peers_hear,
    )
    until = time.monotonic() + 20.0 * (backend == "gloo")  # what got stuck in a check ends by its own timeout
    while native_threads() >= 8 and time.monotonic() < until:
        time.sleep(0.05)
        torch_groups.sweep()
    left = {"threads": other_threads(), "native": native_threads()}
    end(store)
    return told | left


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def world(dead_after: float, apart: bool = False) -> Iterator[tuple[TorchCollectives, Membership]]:
    """A group and its heartbeat.

    Args:
        dead_after: of that, in seconds.
        apart: no rank finds another one's process, as on hosts of their own; each has been reached once.
    """
    store = open_store()
    comm = TorchCollectives(store, RANK, WORLD_SIZE, timeout=TIMEOUT, form_timeout=TIMEOUT)
    membership = Membership(
        store, RANK, WORLD_SIZE, interval=timedelta(seconds=0.1), dead_after=timedelta(seconds=dead_after)
    )
    neighbours = membership._board._neighbours
    if apart:
        neighbours._place = f"host {RANK}"
    membership.start()
    try:
        comm.open()
        while apart and [each.reached for each in neighbours._calls._callees.values()] != [True] * (WORLD_SIZE - 1):
            time.sleep(0.01)
        yield comm, membership
    finally:
        membership.close()
        comm.close()


@contextlib.contextmanager
def fork_that_stays(before: Mapping[int, int]) -> Iterator[None]:
    """One that outlives this rank, as a loader's worker may, and says what it holds of the rank's sockets."""
    pid = os.fork()
    if pid == 0:
        print(f"a fork holds {sorted({*snapshot().items()} - {*before.items()})}", flush=True)
        while True:  # until it is killed, with the rank's process group at the latest
            signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def lose_a_rank(dead_after: float, apart: bool) -> dict[str, Any]:
    """All-reduce until a peer is killed; then say what was noticed and when, and go on without it."""
    before = snapshot()
    with world(dead_after, apart) as (comm, membership), fork_that_stays(before):
        buffer = torch.ones(200_000)
        print("training", flush=True)
        try:
            while True:
                comm.all_reduce(buffer).result()
                last = time.time()
        except CollectiveError as error:
            noticed, message = time.time(), str(error)
        last = locals().get("last", noticed)
        lost: PeerLost | None = None
        while lost is None:
            try:
                membership.check()
            except PeerLost as caught:
                lost = caught
            time.sleep(0.01)
        named = time.time()
        generation = membership.next_generation(TIMEOUT)
        started = time.monotonic()
        comm.reconfigure(generation)
        reformed_s = time.monotonic() - started
        total = comm.all_reduce(torch.ones(1)).result().item()
        comm.barrier().result()
        return {
            "collective_s": noticed - last, "noticed": noticed, "named": named, "message": message,
            "lost": lost.ranks, "text": str(lost), "members": generation.members, "total": total,
            "reformed_s": reformed_s,
        }  # fmt: skip


def lose_the_store(dead_after: float) -> dict[str, Any]:
    """Rank 0, the store's host, is killed; the others' membership must say so."""
    with world(dead_after) as (_, membership):
        print("training", flush=True)
        while True:
            try:
                membership.check()
            except PeerLost as error:
                return {"ranks": error.ranks, "text": str(error), "at": time.time()}
            time.sleep(0.01)


def survive_stops(dead_after: float, folder: str) -> list[float]:
    """Each rank in turn is stopped for a while; the other waits for it in an all-reduce and checks all the time."""
    waited = []
    with world(dead_after) as (comm, membership):
        for stopped in range(WORLD_SIZE):
            if stopped == RANK:
                print(f"stop {stopped}", flush=True)
                while not Path(folder, f"{stopped} was stopped").exists():  # until the test's deadline at the latest
                    time.sleep(0.01)
            started = time.monotonic()
            pending = comm.all_reduce(torch.ones(4))
            print(f"waiting for {stopped}", flush=True)
            while not pending.wait(timedelta(seconds=0.02)):
                membership.check()
            membership.check()
            assert pending.result()[0].item() == WORLD_SIZE
            waited.append(time.monotonic() - started)
        comm.barrier().result()
        membership.check()
    return waited


def exit_in_order(times: int) -> int:
    """Groups used, closed at once by everybody, or not closed at all; the process must end with status 0."""
    store = open_store()
    for i in range(times):
        comm = TorchCollectives(store, RANK, WORLD_SIZE, timeout=TIMEOUT, form_timeout=TIMEOUT)
        fork = comm.fork("payload")
        comm.barrier().result()
        fork.all_reduce(torch.ones(10_000)).result()
        if i < times - 1:
            comm.close()
        else:
            comm.reconfigure(replace(Generation.first(RANK, WORLD_SIZE), number=1))
            fork.barrier().result()
    end(store)
    return times


def fork_within() -> dict[str, Any]:
    """A fork leaves by `sys.exit` while groups and heartbeats are up; then those are used again."""
    store = open_store()
    comm = TorchCollectives(store, RANK, WORLD_SIZE, timeout=TIMEOUT)
    membership = Membership(PrefixStore("fork", store), RANK, WORLD_SIZE)
    comm.open()
    membership.start()
    pid = os.fork()
    if pid == 0:
        torch_groups.keep_for_good(store)  # its server's thread is the parent's
        try:
            sys.exit(0)
        finally:
            membership.fail("a fork ended")
            membership.close()
            comm.close()
    began, ended, status = time.monotonic(), 0, 0
    while not ended and time.monotonic() - began < 60.0:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        return {"ended": False}
    took_s = time.monotonic() - began
    total = comm.all_reduce(torch.ones(1)).result().item()
    meet(store, "both")
    time.sleep(0.5)
    membership.check()
    left = sorted(membership.left())
    membership.close()
    comm.close()
    end(store)
    return {"ended": True, "status": status, "took_s": took_s, "total": total, "left": left}
