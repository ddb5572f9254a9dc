"""What is measured: step times on one link, and samples per second of replicas of unequal speed.

Within a repeat all peers run one after the other, so that a change of the machine's mood meets all of them; numbers
are medians over the repeats, ratios medians of the ratios within a repeat.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.benchmarks.link import Link
from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.model import BATCH
from tests.benchmarks.peers import PEERS, samples_in
from tests.benchmarks.ranks import RankFailed, run_ranks
from tests.benchmarks.report import Row, Section, Target, load_average

__all__ = ["QUICK", "RELATIVE_STEP_TIMES", "Plan", "measure_gradients", "measure_speed", "measure_stragglers", "say"]

RELATIVE_STEP_TIMES = (0.58, 0.75, 1.51, 3.33)
WARM_STEPS = 2
"""The first steps of a rank, which are slower: samples per second are of those after."""
START_S = 90.0
"""What starting the processes of one peer may take on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure.

    Args:
        repeats: how often each peer runs.
        warmup: steps before the measurement: some periods and a bit, for the measured part must not begin on a round.
        steps: steps measured, a multiple of every period.
        short_warmup: warm-up of peers that communicate at every step.
        short_steps: steps measured of them.
        slot_s: padded step time; None to choose it by measuring.
        straggler_s: how long the replicas of unequal speed train.
        straggler_slot_s: step time of a replica with relative step time 1.
        gradient_steps: steps of peers that are bound by their gradients.
    """

    repeats: int = 3
    warmup: int = 72
    steps: int = 192
    short_warmup: int = 4
    short_steps: int = 20
    slot_s: float | None = None
    straggler_s: float = 40.0
    straggler_slot_s: float = 0.1
    gradient_steps: int = 60


QUICK = Plan(repeats=1, warmup=10, steps=32, short_warmup=2, short_steps=6, straggler_s=10.0, gradient_steps=10)


@dataclass(kw_only=True)
class Outcome:
    """The repeats of one peer: the job that its ranks did, and what each of them measured."""

    job: Job
    repeats: list[list[RankResult]] = field(default_factory=list)
    error: str | None = None

    def claims(self) -> dict[str, float]:
        """What the strategy said of itself, on rank 0 in the last repeat."""
        return self.repeats[-1][0].claims if self.repeats else {}


def say(text: str) -> None:
    """Progress, to standard error: standard output is for the report."""
    print(text, file=sys.stderr, flush=True)


def interleave(
    jobs: Sequence[Job],
    repeats: int,
    run: Callable[[Job], list[RankResult]],
    figure: Callable[[Job, list[RankResult]], str],
) -> tuple[dict[str, Outcome], list[str]]:
    """Run all jobs, ``repeats`` times in turn; a peer that fails is not run again.

    Returns the outcome of each peer, and the load average before, between and after the repeats.
    """
    outcomes = {job.peer: Outcome(job=job) for job in jobs}
    load = [load_average()]
    for repeat in range(repeats):
        for outcome in outcomes.values():
            if outcome.error is not None:
                continue
            try:
                outcome.repeats.append(run(outcome.job))
            except RankFailed as error:
                outcome.error = str(error)
                say(f"  {error}")
                continue
            result = figure(outcome.job, outcome.repeats[-1])
            say(f"  repeat {repeat + 1}/{repeats} {outcome.job.peer}: {result}")
        load.append(load_average())
    return outcomes, load


def paired(top: Sequence[float], bottom: Sequence[float], how: Callable[[float, float], float]) -> float | None:
    """Median of what ``how`` makes of the two peers' numbers within each repeat; None where there are none."""
    pairs = list(zip(top, bottom, strict=False))
    return statistics.median(how(a, b) for a, b in pairs) if pairs else None


def ratio(top: Sequence[float], bottom: Sequence[float]) -> float | None:
    return paired(top, bottom, lambda a, b: a / b)


def job_on(link: Link, peer: str, num_replicas: int, *, warmup: int, steps: int) -> Job:
    """A job for all replicas, not padded."""
    return Job(
        peer=peer,
        rank=0,
        num_replicas=num_replicas,
        interface=link.places[0].interface,
        warmup=warmup,
        steps=steps,
        pace_mbit=link.rate_mbit if link.paced else None,
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def choose_slot(
    link: Link, num_replicas: int, slot_s: float | None, probe: str = "probe compute", steps: int = 40
) -> tuple[float, float]:
    """Padded step time and its part for backward and optimizer, such that the real compute of all replicas fits."""
    job = job_on(link, probe, num_replicas, warmup=steps // 4, steps=steps)
    compute = [times for rank in run_ranks(link, job, timeout_s=START_S) for times in rank.compute_s[job.warmup :]]
    if slot_s is None:
        needed_s = 1.1 * _percentile([sum(times) for times in compute], 0.9)
        slot_s = max(0.02 + 0.015 * num_replicas, math.ceil(200 * needed_s) / 200)
    return slot_s, min(1.1 * _percentile([tail for _, tail in compute], 0.9), slot_s / 2)


def round_time(link: Link, num_replicas: int, num_rounds: int) -> float:
    """Seconds of a blocking all-reduce of the model, between barriers: median over rounds, slowest rank."""
    job = job_on(link, "probe round", num_replicas, warmup=2, steps=num_rounds)
    ranks = [rank.round_s[job.warmup :] for rank in run_ranks(link, job, timeout_s=START_S)]
    return statistics.median(max(times) for times in zip(*ranks, strict=True))


def step_time(job: Job, ranks: Sequence[RankResult]) -> float:
    """Seconds per step over the measured part, of the slowest rank."""
    return max((rank.ends[-1] - rank.ends[job.warmup - 1]) / job.steps for rank in ranks)


def mb_per_step(job: Job, link: Link, ranks: Sequence[RankResult]) -> float | None:
    """What one replica sent per measured step, by the interface's counter; None where others use the interface."""
    if not link.private or any(len(rank.sent) != 2 for rank in ranks):
        return None
    # On one loopback every rank reads the sum of all.
    share = len(ranks) if link.rate_mbit is None else 1
    return statistics.mean(rank.sent[1][1] - rank.sent[0][1] for rank in ranks) / share / job.steps / 1e6


def measure_speed(link: Link, num_replicas: int, peers: Sequence[str], plan: Plan) -> Section:
    """Step times of all peers on one link."""
    raw_mbit = link.measured_mbit()
    slot_s, tail_s = choose_slot(link, num_replicas, plan.slot_s)
    round_s = round_time(link, num_replicas, num_rounds=5 if plan.repeats > 1 else 3)
    notes = [
        f"link: {link.kind}; raw TCP throughput measured: {raw_mbit:.1f} Mbit/s",
        f"compute padded to {slot_s * 1e3:.0f} ms, {tail_s * 1e3:.0f} ms of it for backward and optimizer",
        f"t_comm, a blocking all-reduce of the model: {round_s * 1e3:.0f} ms, measured before the repeats",
        "hidden: 1 - (step - step without communication) * H / t_comm, without communication being `apart`, "
        "or `single` where that is left out; claimed: what the strategy says of itself",
        f"repeats: {plan.repeats}, peers interleaved; {BATCH} samples per step and replica",
    ]
    for note in notes:
        say(f"  {note}")
    jobs = []
    for peer in peers:
        short = PEERS[peer].sync_every == 1
        warmup, steps = (plan.short_warmup, plan.short_steps) if short else (plan.warmup, plan.steps)
        job = job_on(link, peer, num_replicas, warmup=warmup, steps=steps)
        jobs.append(replace(job, step_s=slot_s, tail_s=tail_s))

    def run(job: Job) -> list[RankResult]:
        step_s = slot_s + 0.02 + (round_s if PEERS[job.peer].sync_every else 0.0)
        return run_ranks(link, job, timeout_s=START_S + 2 * (job.warmup + job.steps) * step_s)

    outcomes, load = interleave(jobs, plan.repeats, run, lambda *done: f"{step_time(*done) * 1e3:.1f} ms/step")
    seconds = {peer: [step_time(done.job, ranks) for ranks in done.repeats] for peer, done in outcomes.items()}
    rows = [_speed_row(done, seconds, link, round_s) for done in outcomes.values()]
    kind = "unshaped loopback" if link.rate_mbit is None else f"{link.rate_mbit:g} Mbit/s"
    targets = _speed_targets(rows, slot_s, round_s, link)
    return Section(title=f"{num_replicas} replicas, {kind}", notes=notes, rows=rows, targets=targets, load=load)


def _speed_row(done: Outcome, seconds: dict[str, list[float]], link: Link, round_s: float) -> Row:
    peer = PEERS[done.job.peer]
    own = seconds[done.job.peer]
    row = Row(peer=done.job.peer, about=peer.about, error=done.error, claims=done.claims())
    if not own:
        return row
    row.repeats_ms = [value * 1e3 for value in own]
    row.ms_per_step = statistics.median(row.repeats_ms)
    row.spread_ms = max(row.repeats_ms) - min(row.repeats_ms)
    row.to_single = ratio(own, seconds.get("single", []))
    row.ddp_to_it = ratio(seconds.get("ddp", []), own)
    traffic = [mb for ranks in done.repeats if (mb := mb_per_step(done.job, link, ranks)) is not None]
    row.mb_per_step = statistics.median(traffic) if traffic else None
    # `apart` and not `single`: that the replicas of one machine share its cores is not communication.
    silent = seconds.get("apart") or seconds.get("single", [])
    # Where nothing limits the link there is next to nothing to hide.
    if peer.sync_every and link.rate_mbit is not None and not peer.compressed:
        row.hidden = paired(own, silent, lambda a, b: 1.0 - (a - b) * peer.sync_every / round_s)
    row.claimed_hidden = row.claims.get("hidden_share")
    replicas = 1 if peer.alone else done.job.num_replicas
    row.samples_per_s = replicas * BATCH / row.ms_per_step * 1e3
    return row


def _speed_targets(rows: Sequence[Row], slot_s: float, round_s: float, link: Link) -> list[Target]:
    """The lines that our overlapped peers must hold on this link."""
    targets = []
    with_ddp = any(row.peer == "ddp" for row in rows)
    for row in rows:
        peer = PEERS[row.peer]
        if not peer.ours or row.peer == "blocking":
            continue
        if with_ddp:
            limit = 1.0 if link.rate_mbit is None else 10.0
            targets.append(Target(about=f"{row.peer}: DDP's step time over its own", value=row.ddp_to_it, limit=limit))
        if link.rate_mbit is None:
            continue
        about = f"{row.peer}: step time over that of one process"
        targets.append(Target(about=about, value=row.to_single, limit=1.03, at_most=True))
        if round_s <= peer.sync_every * slot_s and not peer.compressed:
            targets.append(
                Target(about=f"{row.peer}: hidden share", value=row.hidden, limit=0.9 if peer.horovod else 0.95)
            )
        plain = next((r.round_ms for r in rows if PEERS[r.peer].sync_every == peer.sync_every and r is not row), None)
        if peer.compressed and plain is not None and row.round_ms is not None:
            about = f"{row.peer}: time of a round over that of an uncompressed one"
            targets.append(Target(about=about, value=row.round_ms / plain, limit=0.35, at_most=True))
    return targets


def samples_per_s(job: Job, ranks: Sequence[RankResult]) -> float:
    """Samples of all ranks per second, from when the last rank is warm until the first one ends."""
    start, stop = max(rank.ends[WARM_STEPS] for rank in ranks), min(rank.ends[-1] for rank in ranks)
    return sum(samples_in(job.peer, rank.ends, start, stop) for rank in ranks) / (stop - start)


def measure_stragglers(link: Link, peers: Sequence[str], plan: Plan) -> Section:
    """Samples per second of four replicas of unequal speed."""
    num_replicas, slowest = len(RELATIVE_STEP_TIMES), max(RELATIVE_STEP_TIMES)
    slots = [plan.straggler_slot_s * relative for relative in RELATIVE_STEP_TIMES]
    _, tail_s = choose_slot(link, num_replicas, min(slots))
    ceiling = statistics.mean(slowest / relative for relative in RELATIVE_STEP_TIMES)
    ideal = num_replicas * BATCH / max(slots)
    notes = [
        f"link: {link.kind}",
        f"compute padded to {', '.join(f'{slot * 1e3:.0f}' for slot in slots)} ms",
        f"ceiling: {ceiling:.2f} times synchronous training, which gets at most {ideal:.1f} samples/s",
        f"repeats: {plan.repeats}, peers interleaved, {plan.straggler_s:.0f} s each",
    ]
    for note in notes:
        say(f"  {note}")
    steps = max(6, int(plan.straggler_s / max(slots)))
    jobs = []
    for peer in peers:
        seconds = plan.straggler_s if PEERS[peer].sync_every != 1 else None
        job = job_on(link, peer, num_replicas, warmup=3, steps=steps)
        jobs.append(replace(job, tail_s=tail_s, seconds=seconds))
    timeout_s = START_S + 2 * plan.straggler_s
    outcomes, load = interleave(
        jobs,
        plan.repeats,
        lambda job: run_ranks(link, job, timeout_s=timeout_s, step_s=slots),
        lambda *done: f"{samples_per_s(*done):.1f} samples/s",
    )
    rates = {peer: [samples_per_s(done.job, ranks) for ranks in done.repeats] for peer, done in outcomes.items()}
    rows = []
    for peer, done in outcomes.items():
        row = Row(peer=peer, about=PEERS[peer].about, error=done.error, claims=done.claims())
        row.samples_per_s = statistics.median(rates[peer]) if rates[peer] else None
        row.claimed_hidden = row.claims.get("hidden_share")
        rows.append(row)
    targets = [
        Target(
            about=f"ours timed: samples/s over that of `{peer}`",
            value=ratio(rates["ours timed"], rates[peer]),
            limit=3.0,
        )
        for peer in peers
        if "ours timed" in peers and PEERS[peer].sync_every == 1
    ]
    return Section(
        title=f"{num_replicas} replicas of unequal speed", notes=notes, rows=rows, targets=targets, load=load
    )


def measure_gradients(link: Link, num_replicas: int, peers: Sequence[str], plan: Plan) -> Section:
    """Step times of synchronous training that is bound by its gradients."""
    notes = [
        f"link: {link.kind}",
        "25.2 million parameters in 48 tensors (100 MB of gradients), 2 samples per step and replica, not padded",
        f"repeats: {plan.repeats}, peers interleaved, {plan.gradient_steps} steps each",
    ]
    for note in notes:
        say(f"  {note}")
    jobs = [job_on(link, peer, num_replicas, warmup=5, steps=plan.gradient_steps) for peer in peers]
    outcomes, load = interleave(
        jobs,
        plan.repeats,
        lambda job: run_ranks(link, job, timeout_s=START_S + job.steps),
        lambda *done: f"{step_time(*done) * 1e3:.1f} ms/step",
    )
    seconds = {peer: [step_time(done.job, ranks) for ranks in done.repeats] for peer, done in outcomes.items()}
    rows = []
    for peer, done in outcomes.items():
        row = Row(peer=peer, about=PEERS[peer].about, error=done.error, repeats_ms=[s * 1e3 for s in seconds[peer]])
        if row.repeats_ms:
            row.ms_per_step = statistics.median(row.repeats_ms)
            row.spread_ms = max(row.repeats_ms) - min(row.repeats_ms)
            row.ddp_to_it = ratio(seconds.get("wide ddp", []), seconds[peer])
        rows.append(row)
    targets = [
        Target(
            about=f"wide ours: step time of `{peer}` over its own",
            value=ratio(seconds[peer], seconds["wide ours"]),
            limit=1.1,
        )
        for peer in peers
        if peer.startswith("wide hvd") and "wide ours" in peers
    ]
    return Section(title=f"{num_replicas} replicas, gradients", notes=notes, rows=rows, targets=targets, load=load)
