"""Schedules, which decide when averaging rounds begin, as pure functions of one replica's clock.

A `Schedule` returns an `Action` for each `ReplicaClock`. `Pace` holds the time of a replica's batch, and `straggler`
finds the slowest replica and the reason why it is slow.
"""

from __future__ import annotations

import enum
import statistics
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lightning_async._checks import check_int, check_protocol, check_real

Reason = Literal["data", "compute", "communication"]
_REASONS: tuple[Reason, ...] = ("data", "compute", "communication")


class Pace(NamedTuple):
    """The time that a batch takes on one replica, without waiting for other replicas."""

    data_s: float = 0.0  # time until the loader has the batch
    compute_s: float = 0.0  # time of training on it
    communication_s: float = 0.0  # time of packing and merging on the training thread
    samples: float = 0.0  # number of samples in the batch; 0.0 while unknown

    @property
    def batch_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s

    @property
    def is_known(self) -> bool:
        return self.samples > 0.0 and self.batch_s > 0.0

    def per_sample(self) -> Pace:
        return Pace(self.data_s / self.samples, self.compute_s / self.samples, self.communication_s / self.samples, 1.0)


class Straggler(NamedTuple):
    """The slowest replica, and why it is slow.

    >>> str(Straggler("2", 3.0, "data", 0.9))
    'Rank 2 takes 3.0 times as long for a sample as the others do, 90% of it for data'
    """

    name: str  # its stable rank id
    slower: float  # its time for a sample, divided by the median of the others
    reason: Reason  # the part of a batch with the largest difference
    share: float  # share of that part in the whole difference

    def __str__(self) -> str:
        return (
            f"Rank {self.name} takes {self.slower:.1f} times as long for a sample as the others do, "
            f"{100 * self.share:.0f}% of it for {self.reason}"
        )


def straggler(paces: Mapping[str, Pace], factor: float = 1.5) -> Straggler | None:
    r"""Return the slowest replica if its time per sample is much longer than the others' median; else None.

    .. math:: t_i > f\, \operatorname{median}_{j \ne i} t_j

    Args:
        paces: Pace of each replica by its stable rank id. Replicas whose pace is unknown are ignored.
        factor: :math:`f`, ratio to the others' median that the time per sample must exceed. Default 1.5.

    >>> found = straggler({"0": Pace(0.0, 0.1, 0.0, 4), "1": Pace(0.2, 0.1, 0.0, 4)})
    >>> found.name, found.reason, round(found.slower, 3)
    ('1', 'data', 3.0)
    >>> straggler({"0": Pace(0.0, 0.1, 0.0, 4), "1": Pace(0.0, 0.2, 0.0, 8)}) is None
    True
    """
    known = {name: pace.per_sample() for name, pace in paces.items() if pace.is_known}
    if len(known) < 2:
        return None
    name = max(known, key=lambda each: known[each].batch_s)
    mine = known[name]
    others = [pace for other, pace in known.items() if other != name]
    usual_s = statistics.median(pace.batch_s for pace in others)
    if mine.batch_s <= factor * usual_s:
        return None
    longer = {
        reason: getattr(mine, f"{reason}_s") - statistics.median(getattr(pace, f"{reason}_s") for pace in others)
        for reason in _REASONS
    }
    reason = max(_REASONS, key=lambda each: longer[each])
    whole = sum(max(0.0, each) for each in longer.values())
    return Straggler(name, mine.batch_s / usual_s, reason, longer[reason] / whole if whole > 0.0 else 1.0)


class Action(enum.Enum):
    """The way in which a replica takes its next optimizer step.

    It takes a local step (``LOCAL``), or a step with gradients averaged over all replicas (``GRADIENTS``), or a local
    step after which an averaging round starts (``ROUND``).
    """

    LOCAL = "local"  # a local step
    GRADIENTS = "gradients"  # a step with gradients averaged over all replicas (synchronous training)
    ROUND = "round"  # a local step, after which an averaging round starts


class ReplicaClock(NamedTuple):
    """The facts that one replica knows before it takes its next optimizer step.

    Args:
        step: Number of optimizer steps that this replica has completed.
        epoch: Number of epochs that this replica has completed.
        steps_since_round: Number of completed steps since the last round's snapshot.
        seconds_since_round: Seconds since the last round was committed, or since training began.
        step_s: Measured seconds of a local step; 0.0 while unknown.
        round_s: Measured seconds of a round's exchange, the shorter of the last two; 0.0 before two rounds.
        speed: Steps per second of this replica, divided by those of the fastest; 1.0 while unknown.
        relative_spread: Squared distance between replicas per local step: its mean in recent rounds, divided by its
            mean in the first rounds; 1.0 while unknown.
        relative_loss_variance: Variance of the training loss over replicas: its mean in recent rounds, divided by its
            mean in the first rounds; 1.0 while unknown.
    """

    step: int
    epoch: int
    steps_since_round: int
    seconds_since_round: float
    step_s: float = 0.0
    round_s: float = 0.0
    speed: float = 1.0
    relative_spread: float = 1.0
    relative_loss_variance: float = 1.0


@runtime_checkable
class Schedule(Protocol):
    """An interface for the choice of a replica's next step: a local step, a synchronous step, or a step with a round.

    A schedule is a pure function of one replica's clock: its counts of steps, epochs and seconds.
    """

    @abstractmethod
    def next(self, clock: ReplicaClock) -> Action:
        """Return the action with which the replica takes its next step.

        ``clock`` is the replica's clock before this step.
        """
        ...


class PeriodicSchedule(Schedule):
    """A base of schedules that begin a round when a number of steps has passed since the last round."""

    @abstractmethod
    def period(self, clock: ReplicaClock) -> int:
        """Return the number of steps from one round to the next, as it follows from ``clock``."""
        ...

    def next(self, clock: ReplicaClock) -> Action:
        return Action.ROUND if clock.steps_since_round + 1 >= self.period(clock) else Action.LOCAL


@dataclass(frozen=True)
class DyLU(PeriodicSchedule):
    r"""Dynamic local updates: a schedule whose number of local steps per round is proportional to a replica's speed.

    .. math:: \text{round} \iff h + 1 \ge \max\big(n_{\min}, [\, n\, v / v_{\max} ]\big)

    :math:`h` is the number of completed steps since the last round's snapshot, :math:`v` is the recent speed of this
    replica, and :math:`v_{\max}` is that of the fastest replica. A slow replica takes fewer steps, so all replicas
    are ready for the round at about the same time.

    Args:
        n: Number of local steps per round on the fastest replica.
        minimum: :math:`n_{\min}`, smallest number of local steps per round. Default 1.

    Raises:
        TypeError: If an argument is no int.
        ValueError: If ``minimum`` is less than 1, or ``n`` is less than ``minimum``.

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, https://arxiv.org/abs/2401.09135

    >>> clock = ReplicaClock(step=9, epoch=0, steps_since_round=9, seconds_since_round=0.0)
    >>> DyLU(32).next(clock), DyLU(32).next(clock._replace(speed=0.3))
    (<Action.LOCAL: 'local'>, <Action.ROUND: 'round'>)
    """

    n: int
    minimum: int = 1

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "n", at_least=self.minimum)

    def period(self, clock: ReplicaClock) -> int:
        return max(self.minimum, round(self.n * clock.speed))


@dataclass(frozen=True)
class Denser(Schedule):
    r"""A schedule that has rounds ``times`` times as often as another schedule.

    .. math:: \text{next}(h, t) = \text{schedule.next}(k h + k - 1, k t)

    :math:`h` and :math:`t` are the steps and the seconds since the last round, and :math:`k` is ``times``. The clock's
    counts since the beginning of training are passed on unchanged.

    Args:
        schedule: Schedule whose rounds become more frequent.
        times: Factor by which rounds are more frequent. Default 2.

    Raises:
        TypeError: If ``schedule`` is no schedule, or ``times`` is no int.
        ValueError: If ``times`` is less than 1.

    >>> clock = ReplicaClock(step=15, epoch=0, steps_since_round=15, seconds_since_round=0.0)
    >>> EveryNSteps(32).next(clock).name, Denser(EveryNSteps(32)).next(clock).name
    ('LOCAL', 'ROUND')
    """

    schedule: Schedule
    times: int = 2

    def __post_init__(self) -> None:
        check_protocol("Denser", "schedule", self.schedule, Schedule, "a schedule")
        check_int(self, "times", at_least=1)

    def next(self, clock: ReplicaClock) -> Action:
        return self.schedule.next(
            clock._replace(
                steps_since_round=self.times * clock.steps_since_round + self.times - 1,
                seconds_since_round=self.times * clock.seconds_since_round,
            )
        )


@dataclass(frozen=True)
class EveryNSteps(PeriodicSchedule):
    r"""A schedule with a round after every ``n`` local steps of a replica.

    .. math:: \text{round} \iff h + 1 \ge n

    :math:`h` is the number of completed steps since the last round's snapshot. The slowest replica determines when a
    round begins. Until then a faster replica takes more steps, and has a larger weight in the mean.

    Args:
        n: Number of local steps per round.

    Raises:
        TypeError: If ``n`` is no int.
        ValueError: If ``n`` is less than 1.

    Source: the synchronisation interval H of local SGD, https://arxiv.org/abs/1805.09767

    >>> clock = ReplicaClock(step=1, epoch=0, steps_since_round=1, seconds_since_round=0.0)
    >>> EveryNSteps(2).next(clock), EveryNSteps(3).next(clock)
    (<Action.ROUND: 'round'>, <Action.LOCAL: 'local'>)
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def period(self, clock: ReplicaClock) -> int:
        return self.n


@dataclass(frozen=True)
class EverySeconds(Schedule):
    r"""A schedule with a round whenever a given time has passed since the last one, however many steps were taken.

    .. math:: \text{round} \iff t \ge T

    :math:`t` is the time since the last committed round. This suits replicas of unequal speed, because no replica's
    number of steps determines when a round begins.

    Args:
        seconds: :math:`T`, seconds from one round to the next.

    Raises:
        TypeError: If ``seconds`` is not a number.
        ValueError: If ``seconds`` is not positive and finite.

    Source: the time-triggered averaging of Bagua's asynchronous model averaging, https://github.com/BaguaSys/bagua

    >>> clock = ReplicaClock(step=9, epoch=0, steps_since_round=9, seconds_since_round=0.4)
    >>> EverySeconds(0.3).next(clock), EverySeconds(0.5).next(clock)
    (<Action.ROUND: 'round'>, <Action.LOCAL: 'local'>)
    """

    seconds: float

    def __post_init__(self) -> None:
        check_real(self, "seconds", above=0)

    def next(self, clock: ReplicaClock) -> Action:
        return Action.ROUND if clock.seconds_since_round >= self.seconds else Action.LOCAL


@dataclass(frozen=True)
class Synchronous(Schedule):
    r"""Ordinary data-parallel training: a schedule in which every step uses gradients averaged over all replicas.

    .. math:: \text{gradients, always}

    Source: minibatch SGD over replicas, as in `torch.nn.parallel.DistributedDataParallel`,
    https://arxiv.org/abs/2006.15704

    >>> Synchronous().next(ReplicaClock(step=0, epoch=0, steps_since_round=0, seconds_since_round=0.0))
    <Action.GRADIENTS: 'gradients'>
    """

    def next(self, clock: ReplicaClock) -> Action:
        return Action.GRADIENTS


@dataclass(frozen=True)
class Warmup(Schedule):
    r"""Post-local SGD: a schedule with synchronous training or frequent rounds at first, then another schedule.

    .. math::
        \text{gradients (or a round every } k \text{ steps)} \quad &\text{while } \mathit{step} < \mathit{steps}
            \;\text{ or }\; \mathit{epoch} < \mathit{epochs} \\
        \text{schedule} \quad &\text{afterwards}

    For averaged gradients, all replicas must be at the same step. Where replicas have unequal amounts of data, set
    ``steps`` rather than ``epochs``, because their epochs end at different steps.

    Args:
        schedule: Schedule after the warm-up.
        steps: Length of the warm-up in optimizer steps. Default: None.
        epochs: Length of the warm-up in epochs. Default: None. Exactly one of ``steps`` and ``epochs`` must be given.
        warmup_sync_every: :math:`k`, number of local steps from one round to the next during the warm-up. Default:
            None, which means synchronous steps in place of rounds.

    Raises:
        TypeError: If ``schedule`` is no schedule, or a number is no int.
        ValueError: If not exactly one of ``steps`` and ``epochs`` is given, or a number is less than 1.

    Source: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, https://arxiv.org/abs/1808.07217

    >>> clock = ReplicaClock(step=99, epoch=0, steps_since_round=0, seconds_since_round=0.0)
    >>> Warmup(EveryNSteps(8), steps=100).next(clock), Warmup(EveryNSteps(8), steps=99).next(clock)
    (<Action.GRADIENTS: 'gradients'>, <Action.LOCAL: 'local'>)
    """

    schedule: Schedule
    steps: int | None = None
    epochs: int | None = None
    warmup_sync_every: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, type) or not isinstance(self.schedule, Schedule):
            raise TypeError(f"`Warmup(schedule={self.schedule!r})` must be a schedule such as `EveryNSteps(8)`.")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"`Warmup(steps={self.steps}, epochs={self.epochs})` needs exactly one of the two.")
        for argument in ("steps", "epochs", "warmup_sync_every"):
            if getattr(self, argument) is not None:
                check_int(self, argument, at_least=1)

    def next(self, clock: ReplicaClock) -> Action:
        if self.steps is not None:
            warm = clock.step >= self.steps
        else:
            assert self.epochs is not None  # exactly one is given
            warm = clock.epoch >= self.epochs
        if warm:
            return self.schedule.next(clock)
        if self.warmup_sync_every is None:
            return Action.GRADIENTS
        return EveryNSteps(self.warmup_sync_every).next(clock)
