"""Reports of single rounds, and the totals of a run, for loggers, the callbacks' metrics and the summary at the end."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from lightning_async.engine.buckets import ModelRound
from lightning_async.engine.consensus import AgreedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundReport:
    """A report of one committed round, as this replica saw it; times are in seconds, sizes in bytes."""

    id: int  # number of the round
    is_consensus: bool  # whether the exchange was a consensus, not an averaging round
    share: float  # this replica's weight in the mean; 0 if it was absent
    num_present: int  # number of replicas with a weight
    staleness_steps: int  # local steps between the snapshot and the merge
    payload_bytes: int  # size of this replica's message on the wire
    header_s: float  # time of waiting for the slowest replica's header, while this one trains on
    exchange_s: float  # time of moving and committing the payload
    blocked_s: float  # the part of these times that the training thread waited for
    merge_s: float  # time of packing and merging on the training thread
    spread: float  # root of the work-weighted mean squared distance of messages from their mean
    healed: bool = False  # whether this replica was not finite and took over the others' model


class Totals(Protocol):
    """An interface for counters of exchanges other than averaging rounds, such as windows of gradients.

    An implementation is a dataclass, whose numbers are saved in checkpoints.
    """

    title: ClassVar[str]  # first line of the summary
    prefix: ClassVar[str]  # beginning of the metrics' names
    shown: ClassVar[tuple[str, ...]]  # metrics that callbacks see, too

    @property
    def number(self) -> int: ...  # number of exchanges so far

    @property
    def each_s(self) -> float: ...  # mean time of an exchange; 0.0 before the first

    @property
    def hidden_share(self) -> float: ...  # share of that time in which training went on; 1.0 before the first

    @property
    def sent_bytes(self) -> int: ...  # bytes that this replica has sent; 0 where they are not counted

    def rows(self) -> dict[str, str]: ...  # lines of the summary

    def metrics(self) -> dict[str, float]: ...  # values for loggers, by name


@dataclass
class RunSummary:
    """The totals of one replica's training run, to which `Reports` adds the report of every round."""

    rank: int = 0
    world_size: int = 1
    lost: int = 0
    rounds: int = 0
    consensuses: int = 0
    synchronous_steps: int = 0
    failed_rounds: int = 0
    absent_rounds: int = 0
    healed: int = 0
    dropped_gradients: int = 0
    samples: float = 0.0
    lost_samples: float = 0.0  # of processes that were lost
    steps: int = 0
    payload_bytes: int = 0
    exchange_s: float = 0.0
    sync_point_exchange_s: float = 0.0
    blocked_s: float = 0.0
    merge_s: float = 0.0
    idle_s: float = 0.0
    staleness_steps: int = 0
    spread: float = 0.0
    elapsed_s: float = 0.0
    samples_by_rank: list[float] = field(default_factory=list)
    paces: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of each replica, by stable id; see `Header`
    straggler: str = ""  # the rank that was much slower than the others, in words; "" if paces are unknown
    settings: dict[str, float] = field(default_factory=dict)  # of the last round: its period, and what the rule chose
    fragments: int = 1  # number of fragments of the parameters: each has a round in a period
    automatic: tuple[str, ...] = ()  # arguments of the strategy that are set by measurements
    totals: Totals | None = None  # totals of the exchanges that take the place of averaging rounds

    def add(self, report: RoundReport) -> None:
        if report.is_consensus:
            self.consensuses += 1
            self.sync_point_exchange_s += report.exchange_s
        else:
            self.rounds += 1
            self.absent_rounds += report.share == 0.0
            self.exchange_s += report.exchange_s
            self.blocked_s += report.blocked_s
            self.staleness_steps += report.staleness_steps
            self.spread = report.spread
        self.healed += report.healed
        self.merge_s += report.merge_s
        self.payload_bytes += report.payload_bytes

    def add_unmerged(self, unmerged: ModelRound) -> None:
        """Count a committed round that was not merged on its own, and has no report.

        So all ranks count the same number of rounds.
        """
        self.rounds += 1
        self.absent_rounds += unmerged.share == 0.0
        self.exchange_s += unmerged.exchange_s
        self.payload_bytes += unmerged.message_bytes

    def drop(self) -> None:
        """Count a message of this replica whose gradients were dropped; log a warning at the first one."""
        self.dropped_gradients += 1
        if self.dropped_gradients == 1:
            log.warning(
                "Rank %d: its gradients are not finite (NaN or infinite) after %d steps. They are dropped: no step is "
                "taken with them, and the other ranks' gradients count as usual. This warning comes once; the "
                "metric `dropped_gradients` and the summary count all cases. Look at this rank's data, lower the "
                "learning rate, or clip gradients.",
                self.rank, self.steps,
            )  # fmt: skip

    @property
    def hidden_share(self) -> float:
        """The part of the rounds' communication time in which the replica trained on; 1.0 before the first round."""
        if self.totals is not None:
            return self.totals.hidden_share
        if self.exchange_s <= 0.0:
            return 1.0
        return max(0.0, 1.0 - self.blocked_s / self.exchange_s)

    @property
    def mean_staleness_steps(self) -> float:
        return self.staleness_steps / self.rounds if self.rounds else 0.0

    @property
    def title(self) -> str:
        return "Asynchronous averaging" if self.totals is None else self.totals.title

    @property
    def exchanges(self) -> int:
        return self.rounds if self.totals is None else self.totals.number

    @property
    def each_s(self) -> float:
        return self.exchange_s / max(1, self.rounds) if self.totals is None else self.totals.each_s

    @property
    def sent_bytes(self) -> int:
        return self.payload_bytes + (0 if self.totals is None else self.totals.sent_bytes)

    @property
    def _prefix(self) -> str:
        return "averaging" if self.totals is None else self.totals.prefix

    def shown(self) -> dict[str, float]:
        names = ("rounds", "hidden_share") if self.totals is None else self.totals.shown
        wanted = {f"{self._prefix}/{name}" for name in names}
        return {name: value for name, value in self.metrics().items() if name in wanted}

    def metrics(self) -> dict[str, float]:
        """Return the totals so far, by their names for loggers.

        Before the first round, the number of rounds is the only total about rounds.
        """
        own = self._of_rounds() if self.totals is None else self.totals.metrics()
        found = {
            **own,
            "bytes": float(self.sent_bytes),
            # "samples/own", not "samples": loggers that keep a file for each name need "samples" as a folder.
            "samples/own": self.samples,
            **{f"samples/rank_{rank}": samples for rank, samples in enumerate(self.samples_by_rank)},
            "idle_s": self.idle_s,
            "failed_rounds": float(self.failed_rounds),
            "dropped_gradients": float(self.dropped_gradients),
        }
        return {f"{self._prefix}/{name}": value for name, value in found.items()}

    def _of_rounds(self) -> dict[str, float]:
        if not self.rounds:
            return {"rounds": 0.0}
        return {
            "rounds": float(self.rounds), "staleness_steps": self.mean_staleness_steps,
            "hidden_share": self.hidden_share, "spread": self.spread, "round_s": self.each_s, **self.settings,
        }  # fmt: skip

    def in_words(self) -> str:
        """Return the settings of the last round as a phrase.

        >>> RunSummary(settings={"period_steps": 16.0, "step_s": 0.05, "outer_lr": 1.0}).in_words()
        'a round every 16 steps of 50 ms, outer_lr 1'
        >>> RunSummary(settings={"period_steps": 16.0, "step_s": 0.05}, fragments=4).in_words()
        'a round of each of 4 fragments every 16 steps of 50 ms'
        """
        chosen = {name: value for name, value in self.settings.items() if name not in ("period_steps", "step_s")}
        what = "a round" if self.fragments == 1 else f"a round of each of {self.fragments} fragments"
        every = f"{what} every {self.settings['period_steps']:.0f} steps of {1e3 * self.settings['step_s']:.0f} ms"
        return ", ".join([every, *(f"{name} {value:.3g}" for name, value in chosen.items())])

    def advice(self, schedule: object) -> str:
        """Return advice to the user of a run in which ``schedule`` asked for no averaging round; "" for other runs.

        There is no advice about an automatic schedule. It asks for a round within 8 steps, so a run without a round was
        merely short.
        """
        if self.rounds or self.synchronous_steps or not self.steps or "schedule" in self.automatic:
            return ""
        return (
            f"No averaging round took place in {self.steps} steps, as `schedule={schedule!r}` did not ask for one: the "
            f"replicas became one model at sync points only ({self.consensuses} times). Shorten the period."
        )

    def state_dict(self) -> dict[str, float]:
        totals = {} if self.totals is None else vars(self.totals)
        counted = {**vars(self), **{f"{self._prefix}.{name}": value for name, value in totals.items()}}
        return {name: value for name, value in counted.items() if isinstance(value, (int, float))}

    def load_state_dict(self, saved: Mapping[str, float]) -> None:
        """Load the totals that a checkpoint has saved, and continue counting from there.

        Counters of exchanges that this run does not have (windows of gradients, or pushes to servers) are skipped.
        """
        for name, value in saved.items():
            prefix, dot, own = name.rpartition(".")
            if dot:
                if self.totals is not None and prefix == self.totals.prefix:
                    setattr(self.totals, own, value)
            elif name not in ("rank", "world_size", "lost", "fragments"):
                setattr(self, name, value)

    def __str__(self) -> str:
        replicas = f"{self.world_size}" + (f", {self.lost} lost" if self.lost else "")
        others = {
            **({"gradients dropped": f"{self.dropped_gradients}, not finite"} if self.dropped_gradients else {}),
            "waiting at sync points": f"{self.idle_s:.2f} s of {self.elapsed_s:.1f} s",
            **({"straggler": self.straggler} if self.straggler else {}),
        }
        samples = f"{self.samples:.0f}"
        if self.samples_by_rank:
            samples += f" of {sum(self.samples_by_rank) + self.lost_samples:.0f}"
        if self.lost_samples:
            samples += f", {self.lost_samples:.0f} of them by lost processes"
        if self.totals is not None:
            sent = {"sent": f"{self.sent_bytes / 2**20:.1f} MiB"} if self.totals.sent_bytes else {}
            return _table({"replicas": replicas, "samples": samples, **self.totals.rows(), **sent, **others})
        in_rounds = "no round"
        if self.rounds:
            in_rounds = f"in rounds {self.exchange_s:.2f} s, {100 * self.hidden_share:.1f}% hidden"
        return _table(
            {
                "replicas": replicas,
                "averaging rounds": f"{self.rounds}"
                + (f", absent in {self.absent_rounds}" if self.absent_rounds else "")
                + (f", healed {self.healed} times" if self.healed else "")
                + (f", {self.failed_rounds} failed and repeated" if self.failed_rounds else ""),
                "consensuses": f"{self.consensuses}",
                "synchronous steps": f"{self.synchronous_steps}",
                "samples": samples,
                "sent": f"{self.payload_bytes / 2**20:.1f} MiB",
                "communication": f"{in_rounds}; at sync points {self.sync_point_exchange_s:.2f} s",
                "staleness": f"{self.mean_staleness_steps:.1f} steps" if self.rounds else "no round",
                **({"set at last": self.in_words()} if self.settings else {}),
                "packing and merging": f"{self.merge_s:.2f} s",
                **others,
            }
        )


class Reports:
    """A maker of reports, on the training thread.

    It makes a `RoundReport` of each merged round, and adds the report to the summary.
    """

    def __init__(self, summary: RunSummary) -> None:
        self.summary = summary
        self.merge_s = 0.0  # time of packing and merging since the last report
        self.blocked_s = 0.0  # time for which the training thread has waited for the round under way
        self._exchanges_s: deque[float] = deque(maxlen=2)

    def add(self, arrived: ModelRound, step: int, failed_rounds: int, samples_by_rank: Iterable[float]) -> RoundReport:
        report = RoundReport(
            id=arrived.id,
            is_consensus=isinstance(arrived, AgreedModel),
            share=arrived.share,
            num_present=sum(weight > 0.0 for weight in arrived.plan.weights),
            staleness_steps=step - arrived.message.step if arrived.message is not None else 0,
            payload_bytes=arrived.message_bytes,
            header_s=arrived.header_s,
            exchange_s=arrived.exchange_s,
            blocked_s=min(self.blocked_s, arrived.exchange_s),
            merge_s=self.merge_s,
            spread=math.sqrt(arrived.tally),
            healed=arrived.healed,
        )
        if report.healed:
            self._warn_of_healing(step, report.id)
        self.blocked_s = self.merge_s = 0.0
        if not report.is_consensus:  # a consensus moves all parameters as fp32, so its time says nothing of rounds
            self._exchanges_s.append(arrived.exchange_s)
        self.summary.add(report)
        self.summary.failed_rounds = failed_rounds
        self.summary.samples_by_rank = list(samples_by_rank)
        return report

    @property
    def round_s(self) -> float:
        """The time of a round's exchange in seconds; 0.0 before two rounds.

        It is the shorter time of the last two rounds, because one round may be slow by chance.
        """
        return min(self._exchanges_s) if len(self._exchanges_s) == 2 else 0.0

    def _warn_of_healing(self, step: int, round_id: int) -> None:
        """Log that this replica takes over the other replicas' model: the first time as a warning, then as an error."""
        again = self.summary.healed
        log.log(
            logging.ERROR if again else logging.WARNING,
            "Rank %d: its parameters, buffers or optimizer state are not finite at step %d; it takes part in round %d "
            "with weight zero, takes over the other replicas' model, and its optimizer state begins anew.%s Lower its "
            "learning rate or clip its gradients.",
            self.summary.rank, step, round_id,
            f" That was needed {again} time(s) before: the cause goes on." if again else "",
        )  # fmt: skip


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
