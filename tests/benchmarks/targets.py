"""Measure asynchronous averaging by the steps and the time to a loss: ``python -m tests.benchmarks.targets --out DIR``.

All peers train a new model of the language, one after the other within each pass, with the same padded compute. What is
judged is the mean of the replicas on text that is held out: each rank keeps copies of its parameters, and they are
averaged and judged once training has ended. A model is at the target when the mean of three looks in a row is.

The steps of DDP, with its hooks too, do not depend on the link: it trains where nothing limits it, and its time per
step is then taken on the link. The row "ddp free" has the same steps, in the time that they take without a limit.

With ``--falls-to`` the link has another rate from half of ``--steps`` on; the seconds of those who wait for each step
are then taken at the first rate.

The first seed tries all learning rates, for every peer alike; the other seeds repeat each peer's best one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch.nn.utils import vector_to_parameters

from tests.benchmarks.averaging import RATE_MBIT, make_link, termination_as_exception
from tests.benchmarks.language import WARMUP, Copies, LanguageModule, held_out
from tests.benchmarks.link import Link, shaping_problem
from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.model import Slot
from tests.benchmarks.peers import PEERS
from tests.benchmarks.ranks import forking, run_ranks
from tests.benchmarks.report import load_average, machine
from tests.benchmarks.scenarios import START_S, choose_slot, interleave, job_on, mb_per_step, ratio, say, step_time
from tests.benchmarks.target_peers import missing

__all__ = ["Means", "Measurement", "Run", "best_rate", "main", "markdown", "parse"]

MODULE = "tests.benchmarks.targets"
PREFIX = "target "
TARGETS = [name.removeprefix(PREFIX) for name in PEERS if name.startswith(PREFIX)]
PLAIN, FREE = "ddp", "ddp free"
QUICK_PEERS = ["ddp", "ours DeltaMean H=32"]
MEMORY = Path("/dev/shm")  # a disk would take the ranks' cores


class Means:
    """The means of the replicas' parameters at moments of their training, which a job's copies tell.

    Args:
        folder: of the copies.
        ranks: what the ranks measured.
    """

    def __init__(self, folder: Path, ranks: Sequence[RankResult]) -> None:
        start = max(rank.ends[0] for rank in ranks)
        files = [Copies.files(folder, rank) for rank in range(len(ranks))]
        lines = [[line.split() for line in numbers.read_text().splitlines()] for numbers, _ in files]
        steps = [[int(line[0]) for line in each] for each in lines]
        moments = [[float(line[1]) - start for line in each] for each in lines]
        flat = [torch.from_file(str(values), size=values.stat().st_size // 4) for _, values in files]
        self._copies = [values.view(len(each), -1) for values, each in zip(flat, steps, strict=True)]
        self.seconds = moments[-1]
        # what the others had at the moment of the last rank's copy, which is the slowest
        self._rows = [[_nearest(moment, each) for each in moments] for moment in self.seconds]
        self.steps = [statistics.mean(steps[rank][i] for rank, i in enumerate(row)) for row in self._rows]
        self._module = LanguageModule(Slot(), 1e-3, 1)
        self._losses: dict[int, float] = {}

    @torch.no_grad()
    def loss(self, look: int) -> float:
        """Held out."""
        if look not in self._losses:
            mean = torch.stack([copies[i] for copies, i in zip(self._copies, self._rows[look], strict=True)]).mean(0)
            vector_to_parameters(mean, self._module.parameters())
            self._losses[look] = held_out(self._module)
        return self._losses[look]

    def around(self, look: int) -> float:
        """The mean loss of a look and those beside it; a negative one counts from the end."""
        look %= len(self.steps)
        return statistics.mean(self.loss(i) for i in range(max(0, look - 1), min(look + 2, len(self.steps))))

    def reach(self, target: float) -> tuple[float, float] | None:
        """Steps and seconds at which the loss is at the target, in a line between two looks; None where it never is."""
        before, after = min(1, len(self.steps) - 1), max(0, len(self.steps) - 2)
        if _number(self.around(after)) > target:
            return None
        if self.around(before) <= target:
            return self.steps[before], self.seconds[before]
        while after - before > 1:
            middle = (before + after) // 2
            if self.around(middle) <= target:
                after = middle
            else:
                before = middle
        higher, lower = self.around(before), self.around(after)
        part = (higher - target) / (higher - lower)
        steps, seconds = (each[before] + part * (each[after] - each[before]) for each in (self.steps, self.seconds))
        return steps, seconds

    def curve(self, points: int = 12) -> list[tuple[float, float, float]]:
        """Steps, seconds and loss at some looks, evenly apart."""
        last = len(self.steps) - 1
        looks = sorted({round(last * point / (points - 1)) for point in range(points)})
        return [(self.steps[look], self.seconds[look], self.loss(look)) for look in looks]


def _nearest(moment: float, moments: Sequence[float]) -> int:
    return min(range(len(moments)), key=lambda i: abs(moments[i] - moment))


@dataclass(kw_only=True)
class Run:
    """One training of one peer.

    Args:
        lr: the learning rate.
        seed: of the model, and of the batches.
        steps: to the target; None where it was never there.
        seconds: likewise.
        step_ms: what a step took.
        mb_per_step: what a replica sent; None where that is unknown.
        last_loss: of the mean model, at the end.
        curve: steps, seconds and the loss of the mean model, from half of ``--steps`` on.
    """

    lr: float
    seed: int
    steps: float | None
    seconds: float | None
    step_ms: float
    mb_per_step: float | None
    last_loss: float
    curve: list[tuple[float, float, float]] = field(default_factory=list)

    def at(self, step_s: float, mb_per_step: float | None) -> Run:
        """The same steps, were each of them to take that long and to send so much."""
        seconds = None if self.steps is None else self.steps * step_s
        curve = [(steps, steps * step_s, loss) for steps, _, loss in self.curve]
        return replace(self, seconds=seconds, step_ms=step_s * 1e3, mb_per_step=mb_per_step, curve=curve)


def best_rate(runs: Sequence[Run], seed: int) -> float:
    """The learning rate that took the fewest steps to the target; where none was there, that of the smallest loss."""
    tried = [run for run in runs if run.seed == seed]
    return min(tried, key=lambda run: (_number(run.steps), _number(run.last_loss))).lr


def _number(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


@dataclass(kw_only=True)
class Measurement:
    """All peers' runs.

    Args:
        link: between the replicas.
        free: where nothing limits them.
        options: the command line.
        slots: padded compute of each rank's step.
        tail_s: see `Slot`.
        target: the held-out loss that counts.
        runs: by peer.
        errors: by peer; who has one is not run again.
        load: averages, before and after each pass.
    """

    link: Link
    free: Link
    options: argparse.Namespace
    slots: list[float]
    tail_s: float
    target: float = math.nan
    runs: dict[str, list[Run]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    load: list[str] = field(default_factory=list)

    def job(self, peer: str, lr: float, seed: int, steps: int) -> Job:
        job = job_on(self.link, PREFIX + peer, self.options.replicas, warmup=2, steps=steps - 2)
        return replace(job, tail_s=self.tail_s, seed=seed, rates=(lr, 0.0, 1.0))

    def ranks(self, link: Link, job: Job) -> list[RankResult]:
        job = replace(job, interface=link.places[0].interface, pace_mbit=link.rate_mbit if link.paced else None)
        timeout_s = START_S + 4 * (job.warmup + job.steps) * max(self.slots)
        return run_ranks(link, job, timeout_s=timeout_s, step_s=self.slots)

    @contextlib.contextmanager
    def falling(self, link: Link, folder: Path) -> Iterator[None]:
        """Give the link its second rate when the first rank has begun its copies, as it does at half of the steps."""
        if self.options.falls_to is None or link is not self.link:
            yield
            return
        over = threading.Event()

        def fall() -> None:
            numbers, _ = Copies.files(folder, 0)
            while not numbers.exists():
                if over.wait(0.05):
                    return
            link.set_rate(self.options.falls_to)

        thread = threading.Thread(target=fall)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            link.set_rate(self.options.rate_mbit)

    @contextlib.contextmanager
    def trained(self, link: Link, job: Job, first: int) -> Iterator[tuple[list[RankResult], Means]]:
        """A run, and its mean models from so many steps on; what they are made of goes when the context ends."""
        place = MEMORY if MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="labench-", dir=place) as folder:
            with self.falling(link, Path(folder)):
                ranks = self.ranks(link, replace(job, copies=folder, copy_from=first, copy_every=self.options.every))
            yield ranks, Means(Path(folder), ranks)

    def find_target(self) -> float:
        """The loss that DDP has after ``--steps`` steps at its best rate: the median over the seeds."""
        options = self.options

        def loss_of(lr: float, seed: int) -> float:
            job = self.job(PLAIN, lr, seed, options.steps + options.every + 1)
            with self.trained(self.free, job, options.steps - options.every) as (_, means):
                loss = means.around(1)
            say(f"  {PLAIN}, rate {lr:g}, seed {seed}: {loss:.4f} after {options.steps} steps")
            return loss

        first, *others = options.seeds
        losses = {lr: loss_of(lr, first) for lr in options.lrs}
        best = min(losses, key=lambda lr: _number(losses[lr]))
        return statistics.median([losses[best], *(loss_of(best, seed) for seed in others)])

    def measure(self, job: Job) -> list[RankResult]:
        """Train until well behind the target, and note when the mean model was there."""
        peer, name = PEERS[job.peer], job.peer.removeprefix(PREFIX)
        if self.options.slowest > 1.0 and peer.timed:
            job = replace(job, seconds=(job.warmup + job.steps) * max(self.slots))
        synchronous = peer.sync_every == 1
        with self.trained(self.free if synchronous else self.link, job, self.options.steps // 2) as (ranks, means):
            steps, seconds = means.reach(self.target) or (None, None)
            run = Run(
                lr=job.rates[0], seed=job.seed, steps=steps, seconds=seconds, last_loss=means.around(-2),
                curve=means.curve(),
                step_ms=1e3 * (means.seconds[-1] - means.seconds[0]) / (means.steps[-1] - means.steps[0]),
                mb_per_step=None if job.seconds is not None else mb_per_step(job, self.link, ranks),
            )  # fmt: skip
        if synchronous:
            if name == PLAIN:
                self.runs.setdefault(FREE, []).append(run.at(step_time(job, ranks), 0.0))
            timed = replace(job, warmup=self.options.warm, steps=self.options.timed)
            on_link = self.ranks(self.link, timed)
            run = run.at(step_time(timed, on_link), mb_per_step(timed, self.link, on_link))
        self.runs.setdefault(name, []).append(run)
        return ranks

    def one_pass(self, seed: int, rates: Sequence[tuple[str, float]]) -> None:
        """All peers in turn, each at its rate."""
        total = round(self.options.most * self.options.steps)
        jobs = [self.job(peer, lr, seed, total) for peer, lr in rates if peer not in self.errors]
        outcomes, load = interleave(jobs, 1, self.measure, self.figure)
        self.load += load
        self.errors |= {peer.removeprefix(PREFIX): done.error for peer, done in outcomes.items() if done.error}

    def figure(self, job: Job, ranks: Sequence[RankResult]) -> str:
        run = self.runs[job.peer.removeprefix(PREFIX)][-1]
        where = "never at the target" if run.steps is None else f"{run.steps:.0f} steps, {run.seconds:.1f} s"
        return f"rate {run.lr:g}, seed {run.seed}: {where}; {run.step_ms:.1f} ms a step, at last {run.last_loss:.4f}"

    def all_passes(self) -> None:
        self.target = self.options.target or self.find_target()
        say(f"  target {self.target:.4f}")
        first, *others = self.options.seeds
        for lr in self.options.lrs:
            self.one_pass(first, [(name, lr) for name in self.options.peers])
        for seed in others:
            whole = [name for name in self.options.peers if name not in self.errors]
            self.one_pass(seed, [(name, best_rate(self.runs[name], first)) for name in whole])


def markdown(runs: dict[str, list[Run]], errors: dict[str, str], seed: int) -> str:
    """A table: medians over the seeds, and the medians of the ratios of the same seed; ``seed``: the first."""
    lines = [
        "| peer | best lr | steps | of DDP free's | seconds | of DDP free's | ms a step | kB a step | last loss |",
        "| --- " + "| ---: " * 8 + "|",
    ]
    best = {peer: best_rate(each, seed) for peer, each in runs.items()}
    chosen = {peer: [run for run in each if run.lr == best[peer]] for peer, each in runs.items()}
    for peer, each in chosen.items():
        cells = [f"{best[peer]:g}"]
        for name, digits in (("steps", 0), ("seconds", 1)):
            own = [_number(getattr(run, name)) for run in each]
            median = statistics.median(own)
            share = ratio(own, [_number(getattr(run, name)) for run in chosen.get(FREE, [])])
            cells.append(f"{median:.{digits}f}" if math.isfinite(median) else "never")
            cells.append(f"{share:.2f}" if share is not None and math.isfinite(share) else "")
        sent = [run.mb_per_step for run in each if run.mb_per_step is not None]
        cells.append(f"{statistics.median(run.step_ms for run in each):.1f}")
        cells.append(f"{statistics.median(sent) * 1e3:.1f}" if sent else "")
        cells.append(f"{statistics.median(run.last_loss for run in each):.4f}")
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    lines += [f"| {peer} | failed: {error.splitlines()[0]} |" + " |" * 7 for peer, error in errors.items()]
    return "\n".join(lines)


def draw(runs: dict[str, list[Run]], seed: int, target: float, path: Path) -> None:
    """Draw the loss of each peer's first run at its best learning rate over the seconds that it took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for peer, each in runs.items():
        best = best_rate(each, seed)
        run = next(run for run in each if run.seed == seed and run.lr == best)
        _, seconds, losses = zip(*run.curve, strict=True)
        ours = peer.startswith("ours")
        axes.plot(seconds, losses, label=peer, linewidth=2.2 if ours else 1.2, linestyle="-" if ours else "--")
    axes.axhline(target, color="#444444", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss of the mean model")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Steps and time to a held-out loss.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    parser.add_argument("--peers", nargs="+", choices=TARGETS, help=f"beside {PLAIN!r} (default: all installed)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="tried for every peer")
    parser.add_argument("--steps", type=int, default=600, help="of DDP, whose loss then is the target")
    parser.add_argument("--most", type=float, default=1.5, help="of these steps, that every peer trains")
    parser.add_argument("--target", type=float, help="the held-out loss that counts, instead")
    parser.add_argument("--every", type=int, default=5, help="steps from one copy to the next, after half of --steps")
    parser.add_argument("--slot-ms", type=float, help="padded compute of a step (default: what it needs)")
    parser.add_argument("--slowest", type=float, default=1.0, help="how much longer the last rank's steps take")
    parser.add_argument("--rate-mbit", type=float, default=RATE_MBIT)
    parser.add_argument("--falls-to", type=float, help="rate of the link, in Mbit/s, from half of --steps on")
    parser.add_argument("--loopback", action="store_true", help="nothing limits the link")
    parser.add_argument("--quick", action="store_true", help="a functional check: few peers, unshaped, seconds")
    options = parser.parse_args(arguments)
    options.probes, options.warm, options.timed = 40, 12, 20  # PowerSGD begins after 10
    if options.quick:
        options.probes, options.warm, options.timed = 4, 2, 2
        options.peers, options.seeds, options.lrs = QUICK_PEERS, options.seeds[:1], options.lrs[1:2]
        options.steps, options.every, options.loopback, options.slot_ms = WARMUP, 4, True, 5.0
    options.left_out = {peer: missing(PREFIX + peer) for peer in TARGETS if missing(PREFIX + peer)}
    if options.peers is None:
        options.peers = [peer for peer in TARGETS if peer not in options.left_out]
    if PLAIN not in options.peers:
        options.peers.insert(0, PLAIN)
    if options.steps < WARMUP or min(options.lrs) <= 0.0:
        parser.error(f"arguments --steps, --lrs: {options.steps}, {options.lrs} must be at least {WARMUP}, and above 0")
    if options.falls_to is not None and (options.loopback or shaping_problem() is not None):
        parser.error("argument --falls-to: only a shaped link, which needs root, has a rate that changes")
    return options


def measure(options: argparse.Namespace) -> tuple[Measurement, list[str]]:
    """All of it, and notes."""
    wire = (options.replicas, options.rate_mbit)
    with contextlib.ExitStack() as open_:
        open_.enter_context(termination_as_exception())
        free = open_.enter_context(make_link("loopback", *wire))
        if options.quick:
            free = open_.enter_context(forking(free))
        link = free if options.loopback else open_.enter_context(make_link("speed", *wire))
        given_s = None if options.slot_ms is None else options.slot_ms / 1e3
        slot_s, tail_s = choose_slot(link, options.replicas, given_s, "probe language", options.probes)
        slots = [slot_s] * (options.replicas - 1) + [slot_s * options.slowest]
        done = Measurement(link=link, free=free, options=options, slots=slots, tail_s=tail_s)
        done.all_passes()
    falls = "" if options.falls_to is None else f", from step {options.steps // 2} on {options.falls_to:g} Mbit/s"
    notes = [
        f"{options.replicas} replicas; link: {link.kind}{falls}; slots of {[round(each * 1e3) for each in slots]} ms",
        f"target: a held-out loss of {done.target:.4f}; seeds {options.seeds}, rates {options.lrs}",
        f"load averages: {done.load}",
        *(f"left out: {peer}, as {package} is not installed" for peer, package in options.left_out.items()),
    ]
    return done, notes


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(f"{machine()}\nload average {load_average()}\nrepeat with `{command}`\n", flush=True)
    done, notes = measure(options)
    table = markdown(done.runs, done.errors, options.seeds[0])
    text = "\n".join([table, "", *(f"- {note}" for note in [f"`{command}`", *notes])])
    runs = {peer: [asdict(run) for run in each] for peer, each in done.runs.items()}
    told = {"command": command, "machine": machine(), "target": done.target, "notes": notes, "runs": runs}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "targets.md").write_text(text + "\n")
    (options.out / "targets.json").write_text(json.dumps({**told, "errors": done.errors}, indent=1))
    draw(done.runs, options.seeds[0], done.target, options.out / "targets.svg")
    print(text, flush=True)
    return int(bool(done.errors))


if __name__ == "__main__":
    sys.exit(main())
