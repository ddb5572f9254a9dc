"""The counts of one replica's work: the samples and steps that no committed round includes yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T", float, tuple[float, ...])
Weighting = Literal["samples", "steps", "equal"]


@dataclass(frozen=True)
class Work:
    """An amount of work of one replica: samples and optimizer steps."""

    samples: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.samples + other.samples, self.steps + other.steps)

    def __sub__(self, other: Work) -> Work:
        return Work(self.samples - other.samples, self.steps - other.steps)

    def weight(self, weighting: Weighting) -> float:
        if weighting == "equal":
            return float(self.steps > 0 or self.samples > 0)
        return self.steps if weighting == "steps" else self.samples


@dataclass
class WorkLedger:
    """The counts of one replica's work: a step adds to them, a committed round subtracts the work in its message.

    Each fragment of the parameters has two counts. ``work`` determines this replica's weight in the next mean, and is
    set to zero when replicas agree, which means that all of them hold one model. ``since_round`` counts the steps since
    the fragment's last round, whether or not replicas have agreed since then. The lock `SharedState.changed` protects
    all fields.
    """

    now: Callable[[], float] = time.monotonic
    num_fragments: int = 1
    weighting: Weighting = "samples"
    weight_of_reported: float = 0.0
    """The factor with which work that a round has averaged already counts in `weights`."""
    has_own_model: bool = False
    """Whether the averaging rule lets each replica keep a model of its own; then all averaged work counts there."""
    work: list[Work] = field(init=False)  # by fragment, work since replicas last agreed that no round includes
    since_round: list[float] = field(init=False)  # by fragment, steps since its last round
    reported: list[Work] = field(init=False)
    """By fragment, the work in the last message that was committed since replicas agreed; or in all of them, with
    `has_own_model`."""
    last_round: float = 0.0  # when a round was last committed
    fresh: bool = False
    """Whether synchronous steps were taken since the rule's state was initialised.

    If so, the next round initialises the rule's state anew.
    """
    synchronous: bool = False
    """Whether this replica takes synchronous steps; then all other replicas wait for it, however slow it is."""
    missed: int = 0
    """The number of synchronous steps that the other replicas took, but this replica's optimizers did not."""

    before_s: float = 0.0  # seconds between the last round and the checkpoint that was loaded

    def __post_init__(self) -> None:
        self.agree()
        self.since_round = [0.0] * self.num_fragments

    def weights(self) -> tuple[float, ...]:
        """Return, by fragment, this replica's weight in a consensus: its work since replicas last agreed."""
        pairs = zip(self.work, self.reported, strict=True)
        return tuple(
            work.weight(self.weighting) + self.weight_of_reported * reported.weight(self.weighting)
            for work, reported in pairs
        )

    def weigh_step(self, samples: float) -> float:
        """Return the weight of this replica's gradients in the mean of a synchronous step.

        It is the weight that the work of a local step on ``samples`` samples has in a round; 0 without samples.
        """
        return Work(samples, 1.0).weight(self.weighting) if samples > 0.0 else 0.0

    def start(self) -> None:
        self.last_round = self.now() - self.before_s

    def step(self, samples: float) -> None:
        self.work = [Work(work.samples + samples, work.steps + 1) for work in self.work]
        self.since_round = [steps + 1 for steps in self.since_round]

    def agree(self) -> None:
        """Set this replica's work to zero, as one model includes the work of all replicas; keep ``since_round``."""
        self.work = [Work()] * self.num_fragments
        self.reported = [Work()] * self.num_fragments

    def round(self, work: Work | None, steps: float = 0.0, fragment: int = 0) -> None:
        """Count a committed round of ``fragment``: subtract the ``work`` and ``steps`` of this replica's message.

        ``work`` is None if this replica had no message in the round.
        """
        self.last_round = self.now()
        if work is not None:
            self.work[fragment] -= work
            self.reported[fragment] = self.reported[fragment] + work if self.has_own_model else work
            self.since_round[fragment] -= steps

    def synchronous_step(self, work: Work | None) -> None:
        """Count a step with averaged gradients; ``work`` is None if this replica had no gradients in that step.

        If this replica takes synchronous steps, a step without its gradients also counts as missed. If it takes local
        steps already, the step does not change its work.
        """
        self.fresh = True
        self.last_round = self.now()
        self.missed += work is None and self.synchronous
        if work is not None or self.synchronous:
            # All replicas share this work already. It only tells which rank has the newest model if a sync point comes.
            self.agree()
            self.work = [work or Work()] * self.num_fragments
            self.since_round = [0.0] * self.num_fragments

    def begin(self) -> None:
        if self.fresh:
            self.fresh = False
            self.since_round = [0.0] * self.num_fragments
            self.last_round = self.now()

    def part(self) -> None:
        self.work = [Work()] * self.num_fragments
        self.since_round = [0.0] * self.num_fragments
        self.missed = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "synchronous": self.synchronous,
            "fresh": self.fresh,
            "missed": self.missed,
            "steps_since_round": list(self.since_round),
            "seconds_since_round": self.now() - self.last_round,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.synchronous = bool(saved["synchronous"])
        self.fresh = bool(saved["fresh"])
        self.missed = int(saved["missed"])
        self.since_round = self._of_cut(saved["steps_since_round"])
        self.before_s = float(saved["seconds_since_round"])

    def work_dict(self) -> list[list[float]]:
        return [[work.samples, work.steps] for work in self.work]

    def reported_dict(self) -> list[list[float]]:
        return [[work.samples, work.steps] for work in self.reported]

    def load_work(self, work: Sequence[Any], reported: Sequence[Any]) -> None:
        self.work = [Work(*pair) for pair in self._of_cut([tuple(pair) for pair in work])]
        self.reported = [Work(*pair) for pair in self._of_cut([tuple(pair) for pair in reported])]

    def _of_cut(self, counts: list[T]) -> list[T]:
        """Return saved ``counts`` by fragment, for the present number of fragments.

        If the number of fragments has changed, every fragment gets the largest saved count.
        """
        return list(counts) if len(counts) == self.num_fragments else [max(counts)] * self.num_fragments
