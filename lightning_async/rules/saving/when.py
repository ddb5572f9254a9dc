"""When to save a checkpoint: policies as pure functions of where training stands."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

from lightning_async.arguments import check_int, check_protocol, check_real, check_time

__all__ = ["Adaptive", "AnySave", "AtEpochEnd", "EveryInterval", "EveryNTrainSteps", "Progress", "SavePolicy"]


@dataclass(frozen=True)
class Progress:
    """Where training stands, as a save policy sees it after a step.

    Args:
        step: optimizer steps taken, their mean over the replicas while these drift.
        saved_step: the step of the newest save, or that which training was resumed from or rolled back to. Default: 0.
        seconds_since_save: since the newest save, or since the start. Default: 0.
        save_cost_s: what one save costs training, stall and slower steps together. Default: None, not known yet.
        epoch_end: whether an epoch has just ended. Default: False.
    """

    step: int
    saved_step: int = 0
    seconds_since_save: float = 0.0
    save_cost_s: float | None = None
    epoch_end: bool = False


@runtime_checkable
class SavePolicy(Protocol):
    """When to save. A policy of your own needs this one method."""

    def due(self, progress: Progress) -> bool:
        """Whether to save now."""
        ...


@dataclass(frozen=True)
class EveryNTrainSteps:
    r"""A save whenever the steps have reached or passed a multiple of ``n``.

    .. math:: \lfloor s / n \rfloor > \lfloor s_\text{saved} / n \rfloor

    So none is left out where steps come several at once, or where a save was not possible at the multiple itself.

    Args:
        n: optimizer steps.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is less than 1.

    Source: ``ModelCheckpoint(every_n_train_steps=)`` of Lightning, https://lightning.ai/docs

    >>> [step for step in range(1, 10) if EveryNTrainSteps(4).due(Progress(step, saved_step=step - 1))]
    [4, 8]
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def due(self, progress: Progress) -> bool:
        """Whether a multiple was reached since the newest save."""
        return progress.step // self.n > progress.saved_step // self.n


@dataclass(frozen=True)
class EveryInterval:
    r"""A save whenever a time has passed since the newest one.

    .. math:: t \ge T

    Args:
        interval: :math:`T`.

    Raises:
        TypeError: ``interval`` is not a `timedelta`.
        ValueError: ``interval`` is not positive.

    Source: ``ModelCheckpoint(train_time_interval=)`` of Lightning, https://lightning.ai/docs

    >>> EveryInterval(timedelta(minutes=5)).due(Progress(step=7, seconds_since_save=301.0))
    True
    """

    interval: timedelta

    def __post_init__(self) -> None:
        check_time("EveryInterval", "interval", self.interval)

    def due(self, progress: Progress) -> bool:
        """Whether the time is up."""
        return progress.seconds_since_save >= self.interval.total_seconds()


@dataclass(frozen=True)
class AtEpochEnd:
    r"""A save at the end of each epoch.

    .. math:: \text{due} \iff \text{an epoch has ended}

    Source: the default of ``ModelCheckpoint`` of Lightning, https://lightning.ai/docs

    >>> AtEpochEnd().due(Progress(step=7, epoch_end=True))
    True
    """

    def due(self, progress: Progress) -> bool:
        """Whether an epoch has just ended."""
        return progress.epoch_end


@dataclass(frozen=True)
class Adaptive:
    r"""As many saves as a share of training time pays for.

    .. math:: c \le \mathit{share} \cdot t

    :math:`c` is the cost of a save, slower steps while it is written included, :math:`t` the time since the newest one.
    The cost is measured again with each save, so the interval follows the size of the state and the speed of the disk.
    The first save, before anything is measured, is due after the first step.

    Args:
        share: of the training time, at most. Default: 0.05.

    Raises:
        TypeError: ``share`` is not a number.
        ValueError: ``share`` is not between 0 and 1.

    Source: Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021,
    https://www.usenix.org/conference/fast21/presentation/mohan

    >>> policy = Adaptive(share=0.05)
    >>> [policy.due(Progress(step=9, seconds_since_save=seconds, save_cost_s=0.5)) for seconds in (9.0, 10.0)]
    [False, True]
    """

    share: float = 0.05

    def __post_init__(self) -> None:
        check_real(self, "share", above=0, below=1)

    def due(self, progress: Progress) -> bool:
        """Whether the time since the newest save has paid for another one."""
        if progress.save_cost_s is None:
            return progress.step > progress.saved_step
        # 0.05 is not 1/20 to the bit, nor are clocks: what is equal but for rounding is due
        return progress.save_cost_s <= self.share * progress.seconds_since_save * (1 + 1e-9)


class AnySave:
    r"""A save whenever one of several policies asks for it.

    .. math:: \text{due} = \text{due}_1 \lor \text{due}_2 \lor \dots

    Args:
        policies: at least one.

    Raises:
        TypeError: one of them is no policy.
        ValueError: none is given.

    Source: ``AnySavePolicy`` of Orbax, https://orbax.readthedocs.io

    >>> policy = AnySave(AtEpochEnd(), EveryNTrainSteps(4))
    >>> policy.due(Progress(step=3)), policy.due(Progress(step=3, epoch_end=True)), policy.due(Progress(step=4))
    (False, True, True)
    """

    def __init__(self, *policies: SavePolicy) -> None:
        if not policies:
            raise ValueError("`AnySave()` needs at least one policy.")
        for policy in policies:
            check_protocol("AnySave", "policies", policy, SavePolicy, "a policy such as `EveryNTrainSteps(100)`")
        self.policies = policies

    def due(self, progress: Progress) -> bool:
        """Whether one of the policies asks for it."""
        return any(policy.due(progress) for policy in self.policies)

    def __repr__(self) -> str:
        return f"AnySave({', '.join(map(repr, self.policies))})"
