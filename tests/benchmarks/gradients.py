"""Measure gradients in the background against DDP: ``python -m tests.benchmarks.gradients --out DIR``.

What counts is the time to a training loss on one link, at one rule for the learning rate (`peers.rate_for`): DDP with
1 to 16 batches accumulated, and windows of gradients. Peers run one after the other within each repeat.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.averaging import RATE_MBIT, make_link, termination_as_exception
from tests.benchmarks.link import Link
from tests.benchmarks.measured import RankResult
from tests.benchmarks.peers import PEERS
from tests.benchmarks.ranks import run_ranks
from tests.benchmarks.report import load_average, machine
from tests.benchmarks.scenarios import START_S, choose_slot, interleave, job_on, round_time, samples_per_s, say

MODULE = "tests.benchmarks.gradients"
TARGETS = [peer for peer in PEERS if peer.startswith(("ddp accumulate", "windows"))]
QUICK_PEERS = ["ddp accumulate=4", "windows of 8", "windows until reduced, compensated"]
SMOOTH = 200
"""Losses of all ranks, in the order of time, that a mean is taken over."""


def curve(ranks: Sequence[RankResult], smooth: int = SMOOTH) -> list[tuple[float, float]]:
    """Seconds since the first step of the last rank, and the mean of the losses until then."""
    start = max(rank.ends[0] for rank in ranks)
    seen = sorted((end, loss) for rank in ranks for end, loss in zip(rank.ends, rank.losses, strict=False))
    losses = [loss for _, loss in seen]
    return [(seen[i][0] - start, statistics.mean(losses[i + 1 - smooth : i + 1])) for i in range(smooth - 1, len(seen))]


def time_to(target: float, ranks: Sequence[RankResult], smooth: int = SMOOTH) -> float | None:
    """Seconds until the smoothed loss is at the target; None where it never is."""
    return next((seconds for seconds, loss in curve(ranks, smooth) if loss <= target), None)


def measure(link: Link, options: argparse.Namespace) -> dict[str, object]:
    """All peers on one link; what is told of each: seconds to the target, the last loss, samples per second."""
    slot_s, tail_s = choose_slot(link, options.replicas, options.slot_ms / 1e3)
    round_s = round_time(link, options.replicas, num_rounds=3)
    jobs = []
    for peer in options.peers:
        batches = PEERS[peer].accumulates  # of DDP, whose ranks cannot end by a clock
        steps = max(2, round(options.seconds / (batches * slot_s + round_s)))
        job = job_on(link, peer, options.replicas, warmup=2, steps=steps)
        jobs.append(replace(job, step_s=slot_s, tail_s=tail_s, seconds=None if batches else options.seconds))
    smooth = 20 if options.quick else SMOOTH
    outcomes, load = interleave(
        jobs,
        options.repeats,
        lambda job: run_ranks(link, job, timeout_s=START_S + 3 * options.seconds),
        lambda job, ranks: f"{time_to(options.target, ranks, smooth)} s to {options.target}",
    )
    told = {}
    for peer, done in outcomes.items():
        told[peer] = {
            "about": PEERS[peer].about,
            "error": done.error,
            "seconds": [time_to(options.target, ranks, smooth) for ranks in done.repeats],
            "last_loss": [curve(ranks, smooth)[-1][1] for ranks in done.repeats],
            "samples_per_s": [samples_per_s(done.job, ranks) for ranks in done.repeats],
            "steps": done.claims().get("steps"),
        }
    return {
        "link": link.kind,
        "slot_ms": slot_s * 1e3,
        "round_ms": round_s * 1e3,
        "target": options.target,
        "load": load,
        "peers": told,
    }


def markdown(told: dict[str, object]) -> str:
    """A table of it."""
    lines = ["| peer | seconds to the target | last loss | samples/s |", "| --- | ---: | ---: | ---: |"]
    peers = told["peers"]
    assert isinstance(peers, dict)
    for peer, row in peers.items():
        reached = [seconds for seconds in row["seconds"] if seconds is not None]
        seconds = f"{statistics.median(reached):.1f}" if len(reached) == len(row["seconds"]) > 0 else "never"
        rest = [statistics.median(row[name]) if row[name] else float("nan") for name in ("last_loss", "samples_per_s")]
        lines.append(f"| {peer} | {row['error'] or seconds} | {rest[0]:.3f} | {rest[1]:.1f} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Gradients in the background against DDP.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="how often each peer runs")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long each peer trains")
    parser.add_argument("--target", type=float, default=2.6, help="the training loss that counts")
    parser.add_argument("--slot-ms", type=float, default=50.0, help="padded compute of a batch")
    parser.add_argument("--rate-mbit", type=float, default=RATE_MBIT)
    parser.add_argument("--peers", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--quick", action="store_true", help="a functional check: few peers, unshaped, seconds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.seconds, options.peers, options.target = 1, 4.0, QUICK_PEERS, 4.2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(f"{machine()}\nload average {load_average()}\nrepeat with `{command}`\n", flush=True)
    scenario = "loopback" if options.quick else "speed"
    with termination_as_exception(), make_link(scenario, options.replicas, options.rate_mbit) as link:
        told = measure(link, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gradients.json").write_text(json.dumps({"command": command, **told}, indent=1))
    (options.out / "gradients.md").write_text(markdown(told) + "\n")
    say(f"  wrote {options.out}")
    print(markdown(told), flush=True)
    peers = told["peers"]
    assert isinstance(peers, dict)
    return int(any(row["error"] for row in peers.values()))


if __name__ == "__main__":
    sys.exit(main())
