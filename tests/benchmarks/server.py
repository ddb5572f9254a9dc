"""Measure parameter servers by shared memory and Gloo, and kill them: ``python -m tests.benchmarks.server --out DIR``.

First, what a push, its update and a pull take between a worker and a server, for a large and a small shard, and what
two bare processes take for the same; then what a worker's death costs (`server_costs`). Then the server is killed at
random moments while worker processes push; each of them looks at all that it pulls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_async.comm.p2p_gloo import dial
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.process import ServerProcess
from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.report import Target, load_average, machine
from tests.benchmarks.server_costs import floor, messages, noticed, rates_of_others
from tests.benchmarks.server_peers import OPTIMIZERS, PEERS, seconds_of
from tests.parameter_server.kills import (
    MOMENTA,
    Found,
    check_pushes,
    final_weights,
    kill_servers,
    kill_workers,
    work,
)  # fmt: skip

MODULE = "tests.benchmarks.server"
LIMITS_MS = {
    ("SGD", "large", "shm"): 20.0, ("Adam", "large", "shm"): 20.0, ("SGD", "small", "shm"): 0.2,
    ("Adam", "small", "shm"): 0.3, ("SGD", "large", "gloo"): 60.0, ("Adam", "large", "gloo"): 60.0,
    ("SGD", "small", "gloo"): 0.6, ("Adam", "small", "gloo"): 0.6,
}  # fmt: skip
_WARM = 3


@dataclass
class Measured:
    """One optimizer, size and transport; times in seconds."""

    optimizer: str
    shard: str
    via: str
    numel: int
    seconds: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1000


def exchange(optimizer: str, shard: str, via: str, numel: int, repeats: int) -> Measured:
    """Push, have it applied, and pull, so often."""
    server = ServerProcess(host="127.0.0.1")
    client = Client("worker", [dial(server.address, 4 * numel, 4 * numel, via)])
    try:
        client.gradients[0].zero_()
        client.start(optimizer, OPTIMIZERS[optimizer])
        gradient, weights = torch.full((numel,), 1e-3), torch.empty(numel)
        seconds = []
        for _ in range(repeats + _WARM):
            began = time.perf_counter()
            client.gradients[0].copy_(gradient)
            client.push()
            weights.copy_(client.weights[0])
            seconds.append(time.perf_counter() - began)
        return Measured(optimizer, shard, via, numel, seconds[_WARM:])
    finally:
        client.close()
        server.close()


def _worker(
    place: int, workers: int, server: dict[str, Any], numel: int, stop: Any, seen: Any, resent: Any, momenta: bool
) -> None:
    resent[place] = work(f"worker {place}", place, workers, server, numel, stop, seen, momenta=momenta)


def killed(kills: int, workers: int, numel: int, seed: int, momenta: bool = False) -> tuple[Found, int, bool]:
    """Kill the server so often; what was found, its version at the end, and whether all pushes are in it, once."""
    found, spawn = Found(), multiprocessing.get_context("spawn")
    stop = spawn.Event()
    seen, resent = spawn.Array("q", workers, lock=False), spawn.Array("q", workers, lock=False)
    server = ServerProcess(MOMENTA if momenta else None)
    arguments = (workers, server.address, numel, stop, seen, resent, momenta)
    processes = [spawn.Process(target=_worker, args=(place, *arguments)) for place in range(workers)]
    try:
        for process in processes:
            process.start()
        while not all(seen):
            time.sleep(0.01)
            if any(process.exitcode for process in processes):
                raise RuntimeError("a worker has failed before the first kill: see its error above.")
        kill_servers(server, seen, kills, seed, lambda: any(process.exitcode for process in processes), found)
        stop.set()
        for process in processes:
            process.join(120)
        found.pushes, found.resent = list(seen), sum(resent)
        weights, version = final_weights(server.address, numel, momenta)
        counted = momenta or weights[:workers].tolist() == [float(each) for each in found.pushes]
        exact = counted and version == sum(found.pushes)
        return found, version, exact and not any(process.exitcode for process in processes)
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.join()
        server.close()


def workers_killed(kills: int, workers: int, numel: int, seed: int) -> tuple[Found, bool]:
    """Kill workers so often, of which there are so many at a time; what was found, and whether all pushes are right."""
    found, quick = Found(), multiprocessing.get_context("forkserver")
    quick.set_forkserver_preload(["tests.parameter_server.kills"])
    places, stop = workers + kills, quick.Event()
    seen, resent = quick.Array("q", places, lock=False), quick.Array("q", places, lock=False)
    server, begun = ServerProcess(), []

    def begin(place: int) -> Any:
        arguments = (place, places, server.address, numel, stop, seen, resent, False)
        begun.append(quick.Process(target=_worker, args=arguments))
        begun[-1].start()
        return begun[-1]

    try:
        living = kill_workers(begin, seen, workers, kills, seed, found)
        stop.set()
        for process in living.values():
            process.join(120)
        found.pushes = list(seen)
        weights, version = final_weights(server.address, numel)
        try:
            check_pushes(weights, version, found.pushes, lambda place: place not in living)
        except AssertionError as error:
            print(f"pushes are lost, or were applied twice: {error}", file=sys.stderr)
            return found, False
        return found, not any(begun[place].exitcode for place in living)
    finally:
        stop.set()
        for process in begun:
            process.kill()
            process.join()
        server.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--large-bytes", type=int, default=64 << 20, help="of the large shard (default: %(default)s)")
    parser.add_argument("--small-bytes", type=int, default=1 << 20, help="of the small shard (default: %(default)s)")
    parser.add_argument(
        "--held-bytes", type=int, default=1 << 30, help="of a worker that is killed (default: %(default)s)"
    )
    parser.add_argument(
        "--window-s", type=float, default=3.0, help="in which the others' pushes are counted (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=50, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=30, help="of the server (default: %(default)s)")
    parser.add_argument("--worker-kills", type=int, default=100, help="of workers (default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="measure other servers beside it, see `server_peers`")
    parser.add_argument("--workers", type=int, default=3, help="that push meanwhile (default: %(default)s)")
    parser.add_argument("--momenta", action="store_true", help="while it is killed, each of them has its own (DANA)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    with termination_as_exception():
        return measure(
            options, shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
        )


def measure(options: argparse.Namespace, command: str) -> int:
    """All of it; the exit status."""
    loads = [load_average()]
    sizes = {"large": options.large_bytes // 4, "small": options.small_bytes // 4}
    measured, floors = list[Measured](), list[float]()
    for name, shard, via in LIMITS_MS:  # one after the other: the machine is used by others, too
        measured.append(exchange(name, shard, via, sizes[shard], options.repeats))
        floors.append(1000 * floor(name, via, sizes[shard], options.repeats))
    targets = [
        Target(
            about=f"push, apply, pull by {each.via}, {each.optimizer}, {each.numel * 4} bytes, median ms",
            value=each.median_ms, limit=limit, at_most=True,
        )
        for each, limit in zip(measured, LIMITS_MS.values(), strict=True)
    ]  # fmt: skip
    loads.append(load_average())
    costs, rates = _costs(options, sizes["small"])
    targets += costs
    loads.append(load_average())
    peers = {
        (peer, name, shard): seconds_of(peer, name, sizes[shard], options.repeats)
        for shard in (sizes if options.peers else ())
        for name in OPTIMIZERS
        for peer in PEERS
    }
    loads.append(load_average())
    found, version, exact = killed(options.kills, options.workers, sizes["small"], options.seed, options.momenta)
    loads.append(load_average())
    lost, whole = workers_killed(options.worker_kills, options.workers, sizes["small"], options.seed)
    loads.append(load_average())
    pushes, grown = sum(found.pushes), found.memory_after / found.memory_before
    targets += [
        Target(about=f"kills, {found.kills_in_start} of them in a start", value=found.kills, limit=options.kills),
        Target(about="share of the pushes that are in the weights once", value=version / pushes * exact, limit=1.0),
        Target(about="kills of workers", value=lost.kills, limit=options.worker_kills),
        Target(about="whether all that they pushed is in the weights once", value=float(whole), limit=1.0),
        Target(about="memory after the last kill over that before", value=grown, limit=1.2, at_most=True),
    ]
    resumed = f"{statistics.median(found.resumed_s):.1f} s, at most {max(found.resumed_s):.1f} s"
    lines = [
        f"# The parameter server\n\n- {machine()}",
        f"- load average (1, 5, 15 min): {'; '.join(loads)}",
        f"- {options.workers} workers, {pushes} pushes, {found.resent} of them asked again; all workers go on {resumed}"
        " after a kill",
        f"- {sum(lost.pushes)} pushes of workers that are killed; the others go on, each with two pushes more, "
        f"{1000 * statistics.median(lost.resumed_s):.0f} ms after a kill, at most {max(lost.resumed_s):.1f} s",
        *[
            f"- two bare processes by {each.via}, {each.optimizer}, {4 * each.numel} bytes: {bare:.3f} ms; ours takes "
            f"{each.median_ms / bare:.2f} times as long"
            for each, bare in zip(measured, floors, strict=True)
        ],
        f"- the others' pushes in a second: {rates[0]:.0f}, and {rates[1]:.0f} after a worker's death",
        *[
            f"- {peer}, {name}, {4 * sizes[shard]} bytes: "
            + (told if isinstance(told, str) else f"{1000 * statistics.median(told):.3f} ms")
            for (peer, name, shard), told in peers.items()
        ],
        f"- repeat with `{command}`\n",
        *[target.line() for target in targets],
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "server.md").write_text(text)
    numbers = {
        "exchanges": [asdict(each) for each in measured],
        "bare_ms": floors,
        "rates_of_others": rates,
        "peers": {" ".join(key): told for key, told in peers.items()},
        "kills": asdict(found),
        "exact": exact,
        "worker_kills": asdict(lost),
        "worker_pushes_once": whole,
    }
    (options.out / "server.json").write_text(json.dumps(numbers, indent=1))
    return int(options.strict and not all(target.held for target in targets))


def _costs(options: argparse.Namespace, numel: int) -> tuple[list[Target], tuple[float, float]]:
    """What a push is in messages, and a worker's death to the server and to the others."""
    held, rates = options.held_bytes, rates_of_others(numel, options.window_s)
    limit_s = 0.05 + 0.1 * held / (1 << 30)
    return [
        Target(about="messages of a push and pull of 160 small tensors", value=messages(), limit=1.0, at_most=True),
        Target(
            about=f"a killed worker that held {held} bytes is noticed, s", value=noticed(held), limit=limit_s,
            at_most=True,
        ),
        Target(about="the others' rate after a worker's death over that before", value=rates[1] / rates[0], limit=0.95),
    ], rates  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
