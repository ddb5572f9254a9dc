"""Measure gradients in the background against DDP: ``python -m tests.benchmarks.gradients --out DIR``.

What counts is the time to a loss on text that is held out (that which plain DDP has at its end, unless it is given) on
one link, at one rule for the learning rate (`language.rate_for`): DDP with 1 to 16 batches accumulated, and windows of
gradients. Peers run one after the other within each repeat.

With ``--seeds 0 1 2`` all of it is done with each of these. The table has every peer's loss at one time, when the
shortest run has ended, how far that is spread over the seeds, and how far it is above that of DDP's best.

With ``--slowest 3`` the last rank's batches take three times as long, and what counts is samples per second: peers of
servers end by time then, and those that are asynchronous are compared with what is possible.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.averaging import RATE_MBIT, make_link, termination_as_exception
from tests.benchmarks.gradient_peers import PEERS as GRADIENT_PEERS
from tests.benchmarks.language import BEGIN, RATES, rule
from tests.benchmarks.link import Link
from tests.benchmarks.measured import RankResult
from tests.benchmarks.peers import PEERS
from tests.benchmarks.ranks import forking, run_ranks
from tests.benchmarks.report import load_average, machine
from tests.benchmarks.scenarios import (
    START_S,
    WARM_STEPS,
    choose_slot,
    interleave,
    job_on,
    round_time,
    samples_per_s,
    say,
)

MODULE = "tests.benchmarks.gradients"
TARGETS = list(GRADIENT_PEERS)
QUICK_PEERS = ["ddp accumulate=4", "windows until reduced, predicted"]
PLAIN = "ddp accumulate=1"
OTHERS = 0.45
"""Of the time that plain DDP trains: who has its loss by then is fast enough."""
LOOKS = 50
"""At the held-out loss, by all ranks together in the time that a peer trains."""


def curve(ranks: Sequence[RankResult]) -> list[tuple[float, float]]:
    """Seconds since the first step of the last rank, and the held-out loss then."""
    start = max(rank.ends[0] for rank in ranks)
    return sorted((moment - start, loss) for rank in ranks for moment, loss in rank.held_out)


def time_to(target: float, ranks: Sequence[RankResult]) -> float | None:
    """Seconds until the held-out loss is at the target, in a line between two looks; None where it never is."""
    points = curve(ranks)
    for (before, higher), (after, lower) in zip(points[:1] + points, points, strict=False):
        if lower <= target:
            return after if higher <= target else before + (higher - target) / (higher - lower) * (after - before)
    return None


def loss_at(moment: float, points: Sequence[tuple[float, float]]) -> float:
    """The held-out loss of a `curve` then, in a line between two looks."""
    for (before, higher), (after, lower) in itertools.pairwise(points):
        if moment <= after:
            part = (moment - before) / (after - before) if after > before else 1.0
            return higher + max(0.0, part) * (lower - higher)
    return points[-1][1]


def measure(link: Link, options: argparse.Namespace) -> dict[str, Any]:
    """All peers on one link; what is told of each: seconds to the target, the last loss, samples per second."""
    told = together([(seed, _measure_seed(link, options, seed)) for seed in options.seeds])
    at_equal_time(told)
    return told


def together(each: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """What was told of each seed, as of one run: lists have its repeats one after the other."""
    (_, told), *others = each
    for row in told["peers"].values():
        row["seeds"] = [each[0][0]] * len(row["curves"])
    told["targets"] = [told["target"]]
    for seed, more in others:
        told["targets"].append(more["target"])
        told["load"] = [*told["load"], *more["load"]]
        for peer, row in more["peers"].items():
            mine = told["peers"][peer]
            mine["error"] = mine["error"] or row["error"]
            mine["seeds"] += [seed] * len(row["curves"])
            for name in ("seconds", "last_loss", "samples_per_s", "curves"):
                mine[name] += row[name]
    return told


def at_equal_time(told: dict[str, Any]) -> None:
    """Add every peer's losses, by seed, at the moment when the shortest run of all has ended."""
    rows = [row for row in told["peers"].values() if row["curves"]]
    if not rows:
        return
    told["equal_s"] = moment = min(points[-1][0] for row in rows for points in row["curves"])
    for row in rows:
        by_seed: dict[int, list[float]] = {}
        for seed, points in zip(row["seeds"], row["curves"], strict=True):
            by_seed.setdefault(seed, []).append(loss_at(moment, points))
        row["equal_loss"] = {str(seed): statistics.median(losses) for seed, losses in by_seed.items()}


def _measure_seed(link: Link, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="labench-") as folder:
        begin = str(Path(folder, "begin.pt"))
        job = job_on(link, "beginning of gradients", options.replicas, warmup=0, steps=options.begin_steps)
        run_ranks(
            link,
            replace(job, seed=seed, begin=begin, rates=options.rates),
            timeout_s=START_S + options.begin_steps,
        )
        return _measure(link, options, begin, seed)


def _measure(link: Link, options: argparse.Namespace, begin: str, seed: int) -> dict[str, Any]:
    slot_s = None if options.slot_ms is None else options.slot_ms / 1e3
    slot_s, tail_s = choose_slot(link, options.replicas, slot_s, "probe language", options.probes)
    round_s = round_time(link, options.replicas, num_rounds=3)
    slots = [slot_s] * (options.replicas - 1) + [slot_s * options.slowest]
    say(f"  a batch {slot_s * 1e3:.0f} ms, {tail_s * 1e3:.0f} ms of it at its end; an exchange {round_s * 1e3:.0f} ms")
    jobs = []
    for peer in options.peers:
        seconds = options.seconds * (1.0 if peer == PLAIN else OTHERS)
        update_s = PEERS[peer].update_s
        assert update_s is not None
        steps = max(WARM_STEPS, round(seconds / update_s(slots[-1], round_s)))
        job = job_on(link, peer, options.replicas, warmup=2, steps=steps)
        ends = seconds if options.slowest > 1.0 and PEERS[peer].timed else None
        job = replace(job, step_s=slot_s, tail_s=tail_s, seed=seed, begin=begin, seconds=ends)
        jobs.append(replace(job, look_s=seconds / options.looks, rates=options.rates))
    outcomes, load = interleave(
        jobs,
        options.repeats,
        lambda job: run_ranks(link, job, timeout_s=START_S + 3 * options.seconds, step_s=slots),
        lambda job, ranks: f"held-out loss {curve(ranks)[-1][1]:.3f}, {samples_per_s(job, ranks):.1f} samples/s",
    )
    target = options.target
    if target is None and PLAIN in outcomes:
        ends = [curve(ranks)[-1][1] for ranks in outcomes[PLAIN].repeats]
        target = statistics.median(ends) if ends else None
    told = {}
    for peer, done in outcomes.items():
        told[peer] = {
            "about": PEERS[peer].about,
            "error": done.error,
            "seconds": [None if target is None else time_to(target, ranks) for ranks in done.repeats],
            "last_loss": [curve(ranks)[-1][1] for ranks in done.repeats],
            "samples_per_s": [samples_per_s(done.job, ranks) for ranks in done.repeats],
            "steps": done.claims().get("steps"),
            "curves": [curve(ranks) for ranks in done.repeats],
        }
    return {
        "link": link.kind,
        "slot_ms": [each * 1e3 for each in slots],
        "round_ms": round_s * 1e3,
        "rule": rule(options.rates),
        "target": target,
        "load": load,
        "peers": told,
    }


def markdown(told: dict[str, Any]) -> str:
    """A table of it."""
    peers = told["peers"]
    targets = sorted({f"{target:.3f}" for target in told.get("targets", [told.get("target")]) if target is not None})
    what = f"seconds to {', '.join(targets)}" if targets else "no target"
    lines = [f"| peer | {what} | of plain DDP's | last loss | samples/s |", "| --- | ---: | ---: | ---: | ---: |"]
    of_seeds = {peer: row.get("equal_loss", {}) for peer, row in peers.items()}
    best = _best_of_ddp(of_seeds)
    if best is not None:
        lines[0] += f" loss at {told['equal_s']:.0f} s | spread over seeds | above DDP's best |"
        lines[1] += " ---: | ---: | ---: |"
    plain = _seconds(peers[PLAIN]) if PLAIN in peers else None
    for peer, row in peers.items():
        seconds = _seconds(row)
        took = "never" if seconds is None else f"{seconds:.1f}"
        share = "" if seconds is None or plain is None else f"{seconds / plain:.2f}"
        rest = [statistics.median(row[name]) if row[name] else float("nan") for name in ("last_loss", "samples_per_s")]
        lines.append(f"| {peer} | {row['error'] or took} | {share} | {rest[0]:.3f} | {rest[1]:.1f} |")
        if best is not None:
            lines[-1] += _of_seeds(of_seeds[peer], of_seeds[best])
    slots = ", ".join(f"{each:.0f}" for each in told["slot_ms"])
    if best is not None:
        lines += ["", f"DDP's best at that time is {best!r}: what is above it by no more than its spread is as good."]
    if (share := of_the_ideal(told)) is not None:
        lines += ["", f"Asynchronous over synchronous servers: {share:.2f} of what is possible."]
    return "\n".join([*lines, "", f"Batches of {slots} ms, {told['round_ms']:.0f} ms an exchange; {told['rule']}."])


def _best_of_ddp(of_seeds: dict[str, dict[str, float]]) -> str | None:
    """The way of DDP that has the smallest loss at equal time; None where there is but one seed, or no DDP."""
    ddp = {peer: losses for peer, losses in of_seeds.items() if peer.startswith("ddp") and len(losses) > 1}
    return min(ddp, key=lambda peer: statistics.mean(ddp[peer].values())) if ddp else None


def _of_seeds(mine: dict[str, float], best: dict[str, float]) -> str:
    """Cells: the mean over seeds, their largest less the smallest, and the mean of what is above the best's."""
    if not mine:
        return " | | |"
    losses, above = mine.values(), [mine[seed] - best[seed] for seed in mine if seed in best]
    return f" {statistics.mean(losses):.3f} | {max(losses) - min(losses):.3f} | {statistics.mean(above):+.3f} |"


def of_the_ideal(told: dict[str, Any]) -> float | None:
    """By how much asynchronous servers are faster than synchronous ones, over the sum of all ranks' rates times the
    slowest one's time over their number; None where not both were measured."""
    slots, peers = told["slot_ms"], told["peers"]
    rates = [peers[peer]["samples_per_s"] for peer in ("servers, async", "servers, sync") if peer in peers]
    if len(rates) < 2 or not all(rates):
        return None
    ideal = sum(1.0 / slot for slot in slots) * max(slots) / len(slots)
    return statistics.median(rates[0]) / statistics.median(rates[1]) / ideal


def _seconds(row: dict[str, Any]) -> float | None:
    """The median over the repeats, where all have got there."""
    reached = [seconds for seconds in row["seconds"] if seconds is not None]
    return statistics.median(reached) if len(reached) == len(row["seconds"]) > 0 else None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Gradients in the background against DDP.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="how often each peer runs")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help=f"how long plain DDP trains, and others {OTHERS:g} of it"
    )
    parser.add_argument("--target", type=float, help="the held-out loss that counts (default: plain DDP's last one)")
    parser.add_argument("--slot-ms", type=float, help="padded compute of a batch (default: what it needs)")
    parser.add_argument(
        "--begin-steps", type=int, default=BEGIN, help="of one batch, of the model that all peers go on from"
    )
    parser.add_argument(
        "--rates", type=float, nargs=3, default=RATES, metavar=("RATE", "POWER", "LATE"),
        help="of learning, of a step of a batch; x batches^POWER; x LATE where gradients are late",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the model, and of the batches; each is a comparison"
    )
    parser.add_argument("--slowest", type=float, default=1.0, help="how much longer the last rank's batches take")
    parser.add_argument("--rate-mbit", type=float, default=RATE_MBIT)
    parser.add_argument("--peers", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--quick", action="store_true", help="a functional check: few peers, unshaped, seconds")
    options = parser.parse_args(arguments)
    options.looks, options.probes = LOOKS, 40
    if options.quick:
        options.looks, options.probes, options.begin_steps = 4, 4, 2
        options.repeats, options.seconds, options.peers, options.target = 1, 6.0, QUICK_PEERS, 4.2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(f"{machine()}\nload average {load_average()}\nrepeat with `{command}`\n", flush=True)
    scenario = "loopback" if options.quick or options.slowest > 1.0 else "speed"
    with (
        termination_as_exception(),
        make_link(scenario, options.replicas, options.rate_mbit) as link,
        forking(link) if options.quick else nullcontext(link) as link,
    ):
        told = measure(link, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gradients.json").write_text(json.dumps({"command": command, **told}, indent=1))
    (options.out / "gradients.md").write_text(markdown(told) + "\n")
    say(f"  wrote {options.out}")
    print(markdown(told), flush=True)
    return int(any(row["error"] for row in told["peers"].values()))


if __name__ == "__main__":
    sys.exit(main())
