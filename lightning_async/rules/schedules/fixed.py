"""Schedules: when replicas talk, as pure functions of one replica's own clock."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_int, check_real
from lightning_async.rules.schedules.protocol import Action, Clock, Schedule, Step

__all__ = ["EveryNSteps", "EverySeconds", "Synchronous", "Warmup"]


@dataclass(frozen=True)
class EveryNSteps(Schedule):
    r"""A round after every ``n`` steps of a replica's own.

    .. math:: \text{round} \iff h + 1 \ge n

    :math:`h` counts the completed steps that no round holds yet. The slowest replica sets the pace of the
    rounds; a faster one takes more steps, which its share of the work repays.

    Args:
        n: local steps per round.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is less than 1.

    Source: the synchronisation interval H of local SGD, https://arxiv.org/abs/1805.09767

    >>> schedule = EveryNSteps(2)
    >>> schedule.next(Clock(step=0, epoch=0, steps_since_round=0, seconds_since_round=0.0))
    Step(action=<Action.LOCAL: 'local'>, fragment=0)
    >>> schedule.next(Clock(step=1, epoch=0, steps_since_round=1, seconds_since_round=0.0))
    Step(action=<Action.ROUND: 'round'>, fragment=0)
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def next(self, clock: Clock) -> Step:
        """A round if the coming step is the n-th or a later one."""
        return Step(Action.ROUND if clock.steps_since_round + 1 >= self.n else Action.LOCAL)


@dataclass(frozen=True)
class EverySeconds(Schedule):
    r"""A round whenever a time has passed since the last committed one, however many steps each replica took.

    .. math:: \text{round} \iff t \ge T

    :math:`t` counts the seconds since the last committed round; the coming step always is work to send. Right for
    replicas of unequal speed: none sets the pace.

    Args:
        seconds: :math:`T`.

    Raises:
        TypeError: ``seconds`` is not a number.
        ValueError: ``seconds`` is not positive and finite.

    Source: the time-triggered averaging of Bagua's asynchronous model averaging, https://github.com/BaguaSys/bagua

    >>> schedule = EverySeconds(0.5)
    >>> schedule.next(Clock(step=9, epoch=0, steps_since_round=9, seconds_since_round=0.4))
    Step(action=<Action.LOCAL: 'local'>, fragment=0)
    >>> schedule.next(Clock(step=0, epoch=0, steps_since_round=0, seconds_since_round=0.6))
    Step(action=<Action.ROUND: 'round'>, fragment=0)
    """

    seconds: float

    def __post_init__(self) -> None:
        check_real(self, "seconds", above=0)

    def next(self, clock: Clock) -> Step:
        """A round if the time is up."""
        return Step(Action.ROUND if clock.seconds_since_round >= self.seconds else Action.LOCAL)


@dataclass(frozen=True)
class Synchronous(Schedule):
    r"""Every step on gradients averaged over all replicas: ordinary data-parallel training.

    .. math:: \text{gradients, always}

    Source: minibatch SGD over replicas, as in `torch.nn.parallel.DistributedDataParallel`,
    https://arxiv.org/abs/2006.15704

    >>> Synchronous().next(Clock(step=0, epoch=0, steps_since_round=0, seconds_since_round=0.0))
    Step(action=<Action.GRADIENTS: 'gradients'>, fragment=0)
    """

    def next(self, clock: Clock) -> Step:
        """Average the gradients."""
        return Step(Action.GRADIENTS)


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

    >>> schedule = Warmup(EveryNSteps(8), steps=100)
    >>> schedule.next(Clock(step=99, epoch=0, steps_since_round=0, seconds_since_round=0.0))
    Step(action=<Action.GRADIENTS: 'gradients'>, fragment=0)
    >>> schedule.next(Clock(step=100, epoch=0, steps_since_round=0, seconds_since_round=0.0))
    Step(action=<Action.LOCAL: 'local'>, fragment=0)
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

    def next(self, clock: Clock) -> Step:
        """The warm-up's action until it is over, then the schedule's."""
        if self.steps is not None:
            warm = clock.step >= self.steps
        else:
            assert self.epochs is not None  # exactly one is given
            warm = clock.epoch >= self.epochs
        if warm:
            return Step.of(self.schedule.next(clock), self.schedule)
        if self.warmup_sync_every is None:
            return Step(Action.GRADIENTS)
        return EveryNSteps(self.warmup_sync_every).next(clock)
