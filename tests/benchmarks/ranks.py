"""Starts the ranks of a peer in their places and brings back what they measured; leaves no process behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from tests.benchmarks.link import Link, free_port
from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.peers import PEERS
from tests.forking import ForkedRank, ForkServer
from tests.horovod import rendezvous, variables

__all__ = ["RankFailed", "forking", "run_ranks"]

Process = subprocess.Popen[bytes] | ForkedRank

ROOT = Path(__file__).resolve().parents[2]
_ports = itertools.count(29500)


class RankFailed(RuntimeError):
    """A rank of a peer failed, or did not end in time; the message holds the end of its output."""


@contextlib.contextmanager
def forking(link: Link) -> Iterator[Link]:
    """The link, whose ranks are forked: that costs a tenth of the time in which they start anew."""
    server = ForkServer(_environment(link, 0, {}), ROOT)
    try:
        yield replace(link, forks=server)
    finally:
        server.close()


def _environment(link: Link, rank: int, launched: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment: of this process, of its place, and what its launcher says."""
    interface = link.places[rank].interface
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        **launched,
    }


def _torchrun(link: Link, job: Job, port: int) -> dict[str, str]:
    """What torchrun would set for this rank, each rank being a node of its own."""
    rank, size = str(job.rank), str(job.num_replicas)
    return {
        "MASTER_ADDR": link.places[0].address,
        "MASTER_PORT": str(port),
        "RANK": rank,
        "GROUP_RANK": rank,
        "NODE_RANK": rank,
        "LOCAL_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _horovodrun(link: Link, job: Job, port: int) -> dict[str, str]:
    """What horovodrun would set for this rank, each rank being a host of its own."""
    place, address = link.places[job.rank], link.places[0].address
    return variables(
        job.rank, job.num_replicas, port,
        address=address, host=place.address, interface=place.interface, one_host=False,
    )  # fmt: skip


def run_ranks(link: Link, job: Job, *, timeout_s: float, step_s: Sequence[float] | None = None) -> list[RankResult]:
    """Run ``job`` on all ranks of its peer.

    Args:
        link: where the ranks run.
        job: what they do; its rank is replaced.
        timeout_s: all ranks are killed when they take longer.
        step_s: padded step time of each rank, where they differ.

    Raises:
        RankFailed: a rank failed or took too long. No rank is left running.
    """
    num_ranks = 1 if PEERS[job.peer].alone else job.num_replicas
    horovod = PEERS[job.peer].horovod
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="labench-") as folder, contextlib.ExitStack() as open_:
        if horovod:
            port = open_.enter_context(rendezvous(num_ranks, link.places[0].prefix))
        else:
            port = next(_ports) if link.private else free_port()
        children: list[Process] = []
        logs = [Path(folder, f"rank{rank}.log") for rank in range(num_ranks)]
        results = [Path(folder, f"rank{rank}.json") for rank in range(num_ranks)]
        try:
            for rank in range(num_ranks):
                mine = replace(job, rank=rank, step_s=job.step_s if step_s is None else step_s[rank])
                environment = _environment(link, rank, (_horovodrun if horovod else _torchrun)(link, mine, port))
                with logs[rank].open("wb") as log, _signals_wait():
                    children.append(_start(link, mine, environment, results[rank], log))
            _wait(job.peer, children, logs, deadline, timeout_s)
            return [RankResult.load(result) for result in results]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()


def _start(link: Link, job: Job, environment: dict[str, str], result: Path, log: IO[bytes]) -> Process:
    """One rank, which leads a session: Ctrl-C reaches the benchmark only, which then ends its ranks."""
    if link.forks is not None:
        environment["RANK_ANSWER"] = str(result)
        kwargs = json.dumps({"job": asdict(job)})
        return link.forks.start(
            "tests.benchmarks.worker:work", [kwargs], cwd=ROOT, environment=environment, out=log, err=log
        )
    arguments = [job.to_json(), str(result), str(os.getpid())]
    return subprocess.Popen(
        [*link.places[job.rank].prefix, sys.executable, "-m", "tests.benchmarks.worker", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold signals back until the block is done: what they raise would part a process from the list that it is for."""
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held:
            signal.raise_signal(number)


def _wait(peer: str, children: Sequence[Process], logs: list[Path], deadline: float, timeout_s: float) -> None:
    """Until all have ended well, one has failed, or time is up."""
    while True:
        codes = [child.poll() for child in children]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            reason = f"rank {failed[0]} of `{peer}` ended with status {codes[failed[0]]}"
            raise RankFailed(f"{reason}:\n{_tail(logs[failed[0]])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            slow = codes.index(None)
            raise RankFailed(f"rank {slow} of `{peer}` took longer than {timeout_s:.0f} s:\n{_tail(logs[slow])}")
        time.sleep(0.02)


def _tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
