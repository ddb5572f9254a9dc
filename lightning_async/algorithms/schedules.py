"""Schedules: when replicas talk, as pure functions of one replica's own clock.

A `Schedule` answers each `ReplicaClock` with an `Action`. `Pace` is the speed of a replica, and `straggler` finds the
slow one, and why.
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
    """The time that a batch takes of one replica; waiting for others is in no pace."""

    data_s: float = 0.0  # until the loader has it
    compute_s: float = 0.0  # training on it
    communication_s: float = 0.0  # packing and merging, on the training thread
    samples: float = 0.0  # in it; 0.0 while nothing is known

    @property
    def batch_s(self) -> float:
        return self.data_s + self.compute_s + self.communication_s

    @property
    def is_known(self) -> bool:
        return self.samples > 0.0 and self.batch_s > 0.0

    def per_sample(self) -> Pace:
        return Pace(self.data_s / self.samples, self.compute_s / self.samples, self.communication_s / self.samples, 1.0)


class Straggler(NamedTuple):
    """The slowest replica.

    >>> str(Straggler("2", 3.0, "data", 0.9))
    'Rank 2 takes 3.0 times as long for a sample as the others do, 90% of it for data'
    """

    name: str  # its stable rank id
    slower: float  # its time for a sample, over the others' (median)
    reason: Reason  # the largest part of the difference
    share: float  # of that part in the difference

    def __str__(self) -> str:
        return (
            f"Rank {self.name} takes {self.slower:.1f} times as long for a sample as the others do, "
            f"{100 * self.share:.0f}% of it for {self.reason}"
        )


def straggler(paces: Mapping[str, Pace], factor: float = 1.5) -> Straggler | None:
    r"""Return the replica that takes much longer for a sample than the others do; None where none does.

    .. math:: t_i > f\, \operatorname{median}_{j \ne i} t_j

    Args:
        paces: by name; those that are not known are left out.
        factor: :math:`f`. Default 1.5.

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
    """A replica's way to take the coming optimizer step."""

    LOCAL = "local"  # step alone
    GRADIENTS = "gradients"  # step with gradients averaged over all replicas (synchronous training)
    ROUND = "round"  # step alone, then start an averaging round


class ReplicaClock(NamedTuple):
    """One replica's own facts, before it takes its next optimizer step.

    Args:
        step: optimizer steps that this replica has completed.
        epoch: epochs that it has completed.
        steps_since_round: completed steps that no round's snapshot holds yet.
        seconds_since_round: seconds since the last round was committed (or since training began).
        step_s: measured seconds per local step, 0.0 while unknown.
        round_s: measured seconds of one round's exchange, the shorter of the last two; 0.0 while there were fewer.
        speed: this replica's steps per second, over those of the fastest; 1.0 while unknown.
        relative_spread: squared distance between replicas over the steps that made it, in recent rounds, over the same
            in the first rounds; 1.0 while unknown.
        relative_loss_variance: variance of the training loss over replicas, in recent rounds, over the same in the
            first rounds; 1.0 while unknown.
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
    """A choice of steps with rounds: a pure function of one replica's clock."""

    @abstractmethod
    def next(self, clock: ReplicaClock) -> Action:
        """Return what to do with the step that comes after ``clock``."""
        ...


@dataclass(frozen=True)
class DyLU(Schedule):
    r"""Dynamic local updates: steps per round in proportion to speed.

    .. math:: \text{round} \iff h + 1 \ge \max\big(n_{\min}, [\, n\, v / v_{\max} ]\big)

    :math:`h` counts the completed steps that no round holds yet, :math:`v` is this replica's speed, as measured of
    late, and :math:`v_{\max}` that of the fastest. So a slow replica takes fewer steps, and no snapshot waits for long.

    Args:
        n: local steps per round of the fastest replica.
        minimum: :math:`n_{\min}`, of the slowest. Default 1.

    Raises:
        TypeError, ValueError: an argument is not an int of at least 1, or ``n`` less than ``minimum``.

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

    def next(self, clock: ReplicaClock) -> Action:
        share = max(self.minimum, round(self.n * clock.speed))
        return Action.ROUND if clock.steps_since_round + 1 >= share else Action.LOCAL


@dataclass(frozen=True)
class Denser(Schedule):
    r"""Rounds ``times`` as often as another schedule has them.

    .. math:: \text{next}(h, t) = \text{schedule.next}(k h + k - 1, k t)

    :math:`h` and :math:`t` are the steps and the seconds since the last round, :math:`k` is ``times``. What is counted
    over the whole of training is left as it is.

    Args:
        schedule: the other one.
        times: how many times as often. Default 2.

    Raises:
        TypeError, ValueError: ``schedule`` is no schedule, or ``times`` no int of at least 1.

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
class EveryNSteps(Schedule):
    r"""A round after every ``n`` steps of a replica's own.

    .. math:: \text{round} \iff h + 1 \ge n

    :math:`h` counts the completed steps that no round holds yet. The slowest replica sets the pace of the
    rounds; a faster one takes more steps, which its share of the work repays.

    Args:
        n: local steps per round.

    Raises:
        TypeError, ValueError: ``n`` is not an int of at least 1.

    Source: the synchronisation interval H of local SGD, https://arxiv.org/abs/1805.09767

    >>> clock = ReplicaClock(step=1, epoch=0, steps_since_round=1, seconds_since_round=0.0)
    >>> EveryNSteps(2).next(clock), EveryNSteps(3).next(clock)
    (<Action.ROUND: 'round'>, <Action.LOCAL: 'local'>)
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def next(self, clock: ReplicaClock) -> Action:
        return Action.ROUND if clock.steps_since_round + 1 >= self.n else Action.LOCAL


@dataclass(frozen=True)
class EverySeconds(Schedule):
    r"""A round whenever a time has passed since the last committed one, however many steps each replica took.

    .. math:: \text{round} \iff t \ge T

    :math:`t` counts the seconds since the last committed round; the coming step always is work to send. Right for
    replicas of unequal speed: none sets the pace.

    Args:
        seconds: :math:`T`.

    Raises:
        TypeError, ValueError: ``seconds`` is not a positive and finite number.

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
    r"""Every step on gradients averaged over all replicas: ordinary data-parallel training.

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
    r"""Synchronous training at first (or frequent rounds), then another schedule: post-local SGD.

    .. math::
        \text{gradients (or a round every } k \text{ steps)} \quad &\text{while } \mathit{step} < \mathit{steps}
            \;\text{ or }\; \mathit{epoch} < \mathit{epochs} \\
        \text{schedule} \quad &\text{afterwards}

    Averaging gradients needs all replicas at the same step. Where they have unequal amounts of data, give ``steps``
    rather than ``epochs``: epochs would end at different steps.

    Args:
        schedule: what follows.
        steps: length of the warm-up in optimizer steps. Default: None.
        epochs: length of the warm-up in epochs. Default: None. Exactly one of the two must be given.
        warmup_sync_every: :math:`k`, a round after every so many local steps in place of averaged gradients.
            Default: None, averaged gradients.

    Raises:
        TypeError: ``schedule`` has no ``next``, or a number is not an int.
        ValueError: not exactly one of ``steps`` and ``epochs`` is given, or a number is less than 1.

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
