"""What a server's push has to cost, and does in messages, and what a worker's death costs the server and others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from lightning_async.comm.p2p import PeerChannel, ShmDial
from lightning_async.comm.p2p_gloo import dial
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.optimizers import ServerRates, ShardSpan, make_optimizer
from lightning_async.parameter_server.process import ServerProcess
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.benchmarks.server_peers import OPTIMIZERS
from tests.parameter_server.kills import work

__all__ = ["floor", "messages", "noticed", "rates_of_others"]

_WARM, _LIMIT_S = 3, 120.0
_LIMIT = timedelta(seconds=_LIMIT_S)


def floor(optimizer: str, via: str, numel: int, repeats: int) -> float:
    """Seconds, the median, of two bare processes that do the same, with nothing around it.

    Args:
        via: "shm": a copy, a byte, the same op, a byte, a copy; "gloo": torch's send, the same op, torch's send.
    """
    spawn = torch.multiprocessing.get_context("spawn")
    memories = [torch.zeros(numel).share_memory_() for _ in range(2)] if via == "shm" else None
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawn.Pipe()  # a pair of sockets
        given = (theirs, optimizer, numel, memories, f"{folder}/meet", repeats + _WARM)
        process = spawn.Process(target=_bare, args=given, daemon=True)
        process.start()
        theirs.close()
        try:
            gradient, weights, seconds = torch.full((numel,), 1e-3), torch.zeros(numel), []
            group = None if memories else _pair(f"{folder}/meet", 0)
            for _ in range(repeats + _WARM):
                began = time.perf_counter()
                if group is not None:
                    coming, sent = group.recv([weights], 1, 0), group.send([gradient], 1, 0)
                    coming.wait(_LIMIT)
                    sent.wait(_LIMIT)
                elif memories is not None:
                    memories[0].copy_(gradient)
                    _call(ours)
                    weights.copy_(memories[1])
                seconds.append(time.perf_counter() - began)
            assert weights.any(), "the other process has answered with nothing"
            return statistics.median(seconds[_WARM:])
        finally:
            ours.close()
            process.join(_LIMIT_S)


def _call(line: Any) -> None:
    line.send_bytes(b"1")
    assert line.poll(_LIMIT_S), "the other process does not answer"
    line.recv_bytes()


def _pair(path: str, rank: int) -> Any:
    return torch.distributed.ProcessGroupGloo(torch.distributed.FileStore(path, 2), rank, 2, _LIMIT)


def _bare(line: Any, optimizer: str, numel: int, memories: list[torch.Tensor] | None, path: str, rounds: int) -> None:
    torch.set_num_threads(1)
    how = make_optimizer(optimizer, OPTIMIZERS[optimizer])
    banks = [{name: torch.zeros(numel) for name in ("params", *how.fields)} for _ in range(2)]
    gradient, reply = memories or (torch.zeros(numel), torch.zeros(numel))
    group = None if memories else _pair(path, 1)
    scalars: dict[str, float] = {}
    for _ in range(rounds):
        if group is None:
            line.recv_bytes()
        else:
            group.recv([gradient], 0, 0).wait(_LIMIT)
        scalars = how.step(ShardSpan(banks[0], banks[1], gradient, reply, numel), scalars, ServerRates())
        banks.reverse()
        if group is None:
            line.send_bytes(b"1")
        else:
            group.send([reply], 0, 0).wait(_LIMIT)


class _Counting:
    """A dial whose channels count what is sent."""

    def __init__(self, way: ShmDial) -> None:
        self._way, self.sent = way, 0
        self.outgoing, self.incoming, self.close = way.outgoing, way.incoming, way.close

    def connect(self, timeout_s: float) -> PeerChannel:
        channel = self._way.connect(timeout_s)
        send = channel.send

        def counted(header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
            self.sent += 1
            send(header, size, timeout_s)

        channel.send = counted
        return channel


def messages(tensors: int = 160, pushes: int = 5) -> float:
    """That a worker sends for each push and pull of so many small tensors."""
    named = {f"{place}": torch.full((place % 7 + 1,), 1.0) for place in range(tensors)}
    plan = plan_of(named, 1, 1_000_000)
    server = ServerProcess()
    way = _Counting(ShmDial(server.name, *(4 * size for size in 2 * plan.sizes)))
    worker = Worker(named, plan, Client("worker", [way], plan.fingerprint()))
    try:
        worker.start("SGD", {"lr": 1.0})
        for each in worker.params:
            each.grad = torch.ones_like(each)
        before = way.sent
        for _ in range(pushes):
            worker.push()
            worker.take_()
        assert all((each == 1.0 - pushes).all() for each in worker.params), "not all of them have travelled"
        return (way.sent - before) / pushes
    finally:
        worker.close()
        server.close()


def noticed(held_bytes: int) -> float:
    """Seconds from the kill of a worker that holds so much until a server in sync mode goes on without it."""
    spawn = multiprocessing.get_context("spawn")
    server, there = ServerProcess(WorkerRules(mode="sync", num_workers=2)), spawn.Event()
    process = spawn.Process(target=_hold, args=(server.address, held_bytes, there), daemon=True)
    client = Client("a", [dial(server.address, 64, 64)], timeout_s=_LIMIT_S)
    try:
        process.start()
        client.gradients[0].zero_()
        client.start()
        assert there.wait(_LIMIT_S), "the other worker does not come"
        client.push()  # of both
        waits = threading.Thread(target=client.push, daemon=True)
        waits.start()
        waits.join(0.2)
        assert waits.is_alive(), "nobody waits for the worker that is to die"
        assert process.pid is not None
        began = time.perf_counter()
        os.kill(process.pid, signal.SIGKILL)
        waits.join(_LIMIT_S)
        assert not waits.is_alive(), "its death is not noticed"
        return time.perf_counter() - began
    finally:
        process.kill()
        process.join()
        client.close()
        server.close()


def _hold(address: dict[str, Any], held_bytes: int, there: Any) -> None:
    held = torch.ones(held_bytes, dtype=torch.uint8)  # every page of it
    client = Client("b", [dial(address, 64, 64)], timeout_s=_LIMIT_S)
    client.start()
    there.set()
    client.push()
    time.sleep(_LIMIT_S + int(held[0]))


def rates_of_others(numel: int, window_s: float, workers: int = 3) -> tuple[float, float]:
    """Pushes in a second of all workers but one, in asynchronous mode: while that one is there, and from its death."""
    quick = multiprocessing.get_context("forkserver")
    quick.set_forkserver_preload(["tests.parameter_server.kills"])
    seen, stop, server = quick.Array("q", workers, lock=False), quick.Event(), ServerProcess()
    arguments = [(f"worker {place}", place, workers, server.address, numel, stop, seen) for place in range(workers)]
    processes = [quick.Process(target=work, args=each) for each in arguments]

    def rate() -> float:
        before, began = sum(seen[1:]), time.monotonic()
        stop.wait(window_s)
        return (sum(seen[1:]) - before) / (time.monotonic() - began)

    try:
        for process in processes:
            process.start()
        until = time.monotonic() + _LIMIT_S
        while not all(pushed > _WARM for pushed in seen):
            assert time.monotonic() < until and not any(process.exitcode for process in processes)
            stop.wait(0.01)
        before = rate()
        processes[0].kill()
        after = rate()
        stop.set()
        for process in processes[1:]:
            process.join(_LIMIT_S)
        assert [process.exitcode for process in processes[1:]] == [0] * (workers - 1), "one of the others has failed"
        return before, after
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.join()
        server.close()
