"""Policies that say when to save a checkpoint and which checkpoints to keep, as pure functions.

A `KeepPolicy` chooses among the existing checkpoints. A `SavePolicy` sees the progress of training. Whatever a policy
chooses, the newest checkpoint, the last good one, and the one from which training was resumed are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, runtime_checkable

from lightning_async._checks import check_choice, check_int, check_protocol, check_real, check_time


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, as a keep policy sees it.

    Args:
        number: Number of the save in its directory; a later save has a larger number.
        step: Number of optimizer steps taken before it.
        metrics: Values logged before it, by name. Default: none.
        good: Whether it was marked as good later, because training went on well. Default: False.
    """

    number: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    good: bool = False


@runtime_checkable
class KeepPolicy(Protocol):
    """An interface for the choice of checkpoints to keep. A policy of your own needs only the method `keep`."""

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        """Return the numbers of the checkpoints to keep, given all that exist."""
        ...


@dataclass(frozen=True)
class Latest:
    r"""A policy that keeps the ``n`` newest checkpoints.

    .. math:: \{i : i \text{ is one of the } n \text{ largest numbers}\}

    Args:
        n: Number of checkpoints. Default: 1.

    Raises:
        TypeError: If ``n`` is no int.
        ValueError: If ``n`` is less than 1.

    Source: ``LatestN`` of Orbax, https://orbax.readthedocs.io

    >>> sorted(Latest(2).keep([Saved(1, 10), Saved(2, 20), Saved(3, 30)]))
    [2, 3]
    """

    n: int = 1

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        return set(sorted((each.number for each in saved), reverse=True)[: self.n])


@dataclass(frozen=True)
class Best:
    r"""A policy that keeps the ``n`` best checkpoints by a logged metric; of equally good ones, it prefers the newer.

    .. math:: \{i : m_i \text{ is one of the } n \text{ smallest (or largest) finite values}\}

    Args:
        monitor: Name of the metric. A checkpoint without a finite value of it is never among the best.
        n: Number of checkpoints. Default: 1.
        mode: ``"min"`` if small values are best, or ``"max"``. Default: ``"min"``.

    Raises:
        TypeError: If ``n`` is no int, or ``monitor`` is no str.
        ValueError: If ``n`` is less than 1, ``monitor`` is empty, or ``mode`` is neither of the two.

    Source: ``ModelCheckpoint(monitor=, save_top_k=)`` of Lightning, https://lightning.ai/docs

    >>> sorted(Best("loss").keep([Saved(1, 10, {"loss": 0.5}), Saved(2, 20, {"loss": 0.4}), Saved(3, 30)]))
    [2]
    """

    monitor: str
    n: int = 1
    mode: str = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str):
            raise TypeError(f"`Best(monitor={self.monitor!r})` must be the name of a metric.")
        if not self.monitor:
            raise ValueError("`Best(monitor='')` must be the name of a metric.")
        check_int(self, "n", at_least=1)
        check_choice("Best", "mode", self.mode, ("min", "max"))

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        return {each.number for each in self.ranked(saved)[: self.n]}

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """Return the checkpoints that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = [each for each in saved if math.isfinite(each.metrics.get(self.monitor, math.nan))]
        return sorted(known, key=lambda each: (sign * each.metrics[self.monitor], -each.number))


@dataclass(frozen=True)
class EveryNth:
    r"""A policy that keeps every ``n``-th save for ever.

    .. math:: \{i : i \equiv 0 \pmod n\}

    Args:
        n: Number of saves from one that is kept to the next.

    Raises:
        TypeError: If ``n`` is no int.
        ValueError: If ``n`` is less than 1.

    Source: ``EveryNSteps`` of Orbax' preservation policies, https://orbax.readthedocs.io

    >>> sorted(EveryNth(2).keep([Saved(1, 10), Saved(2, 20), Saved(3, 30), Saved(4, 40)]))
    [2, 4]
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        return {each.number for each in saved if each.number % self.n == 0}


@dataclass(frozen=True)
class LastGood:
    r"""A policy that keeps the newest checkpoint that was marked as good, because training went on well from it.

    .. math:: \{\max \{i : i \text{ is good}\}\}

    Source: going back to before a spike of the loss, Chowdhery et al., "PaLM", section 5.1,
    https://arxiv.org/abs/2204.02311

    >>> LastGood().keep([Saved(1, 10, good=True), Saved(2, 20, good=True), Saved(3, 30)])
    {2}
    """

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        return set(sorted(each.number for each in saved if each.good)[-1:])


class KeepAny:
    r"""A policy that keeps each checkpoint that any of several policies keeps.

    .. math:: K_1 \cup K_2 \cup \dots

    Args:
        *policies: Keep policies, at least one.

    Raises:
        TypeError: If one of them is no policy.
        ValueError: If none is given.

    Source: ``AnyPreservationPolicy`` of Orbax, https://orbax.readthedocs.io

    >>> sorted(KeepAny(Latest(), EveryNth(2)).keep([Saved(1, 10), Saved(2, 20), Saved(3, 30)]))
    [2, 3]
    """

    def __init__(self, *policies: KeepPolicy) -> None:
        if not policies:
            raise ValueError("`KeepAny()` needs at least one policy.")
        for policy in policies:
            check_protocol("KeepAny", "policies", policy, KeepPolicy, "a policy such as `Latest(3)`")
        self.policies = policies

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        return set().union(*(policy.keep(saved) for policy in self.policies))

    def __repr__(self) -> str:
        return f"KeepAny({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True)
class SaveProgress:
    """The state of training, as a save policy sees it after a step.

    Args:
        step: Number of optimizer steps taken; the mean over all replicas while these are asynchronous.
        saved_step: Step of the newest save, or the step at which training was resumed or rolled back.
        seconds_since_save: Seconds since the newest save, or since the start.
        save_cost_s: Seconds that a save costs, by stalls and slower steps; None while unknown.
        epoch_end: Whether an epoch has just ended.
    """

    step: int
    saved_step: int = 0
    seconds_since_save: float = 0.0
    save_cost_s: float | None = None
    epoch_end: bool = False


@runtime_checkable
class SavePolicy(Protocol):
    """An interface for the choice of moments to save. A policy of your own needs only the method `due`."""

    def due(self, progress: SaveProgress) -> bool:
        """Return whether to save a checkpoint after the step that ``progress`` describes."""
        ...


@dataclass(frozen=True)
class EveryNTrainSteps:
    r"""A policy that saves whenever the steps have reached or passed a multiple of ``n``.

    .. math:: \lfloor s / n \rfloor > \lfloor s_\text{saved} / n \rfloor

    If the step count jumps over a multiple of ``n``, or no checkpoint could be saved at the multiple, a save is due at
    the next step at which it is possible.

    Args:
        n: Number of optimizer steps from one save to the next.

    Raises:
        TypeError: If ``n`` is no int.
        ValueError: If ``n`` is less than 1.

    Source: ``ModelCheckpoint(every_n_train_steps=)`` of Lightning, https://lightning.ai/docs

    >>> [step for step in range(1, 10) if EveryNTrainSteps(4).due(SaveProgress(step, saved_step=step - 1))]
    [4, 8]
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def due(self, progress: SaveProgress) -> bool:
        return progress.step // self.n > progress.saved_step // self.n


@dataclass(frozen=True)
class EveryInterval:
    r"""A policy that saves whenever a given time has passed since the newest save.

    .. math:: t \ge T

    Args:
        interval: :math:`T`, time from one save to the next.

    Raises:
        TypeError: If ``interval`` is no `timedelta`.
        ValueError: If ``interval`` is not positive.

    Source: ``ModelCheckpoint(train_time_interval=)`` of Lightning, https://lightning.ai/docs

    >>> EveryInterval(timedelta(minutes=5)).due(SaveProgress(step=7, seconds_since_save=301.0))
    True
    """

    interval: timedelta

    def __post_init__(self) -> None:
        check_time("EveryInterval", "interval", self.interval)

    def due(self, progress: SaveProgress) -> bool:
        return progress.seconds_since_save >= self.interval.total_seconds()


@dataclass(frozen=True)
class AtEpochEnd:
    r"""A policy that saves at the end of each epoch.

    .. math:: \text{due} \iff \text{an epoch has ended}

    Source: the default of ``ModelCheckpoint`` of Lightning, https://lightning.ai/docs

    >>> AtEpochEnd().due(SaveProgress(step=7, epoch_end=True))
    True
    """

    def due(self, progress: SaveProgress) -> bool:
        return progress.epoch_end


@dataclass(frozen=True)
class Adaptive:
    r"""A policy that saves as often as possible, while saves cost at most a given share of the training time.

    .. math:: c \le \mathit{share} \cdot t

    :math:`c` is the cost of a save in seconds, which includes slower steps while it is written, and :math:`t` is the
    time since the newest save. The cost is measured at each save, so the interval follows the size of the state and the
    speed of the disk. The first save is due after the first step, before any cost is known.

    Args:
        share: Largest share of the training time that saves may cost. Default: 0.05.

    Raises:
        TypeError: If ``share`` is not a number.
        ValueError: If ``share`` is not between 0 and 1.

    Source: Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021,
    https://www.usenix.org/conference/fast21/presentation/mohan

    >>> policy = Adaptive(share=0.05)
    >>> [policy.due(SaveProgress(step=9, seconds_since_save=seconds, save_cost_s=0.5)) for seconds in (9.0, 10.0)]
    [False, True]
    """

    share: float = 0.05

    def __post_init__(self) -> None:
        check_real(self, "share", above=0, below=1)

    def due(self, progress: SaveProgress) -> bool:
        if progress.save_cost_s is None:
            return progress.step > progress.saved_step
        # The factor makes a save due where both sides are equal but for rounding: 0.05 is not exactly 1/20.
        return progress.save_cost_s <= self.share * progress.seconds_since_save * (1 + 1e-9)


class AnySave:
    r"""A policy that saves whenever at least one of several policies would save.

    .. math:: \text{due} = \text{due}_1 \lor \text{due}_2 \lor \dots

    Args:
        *policies: Save policies, at least one.

    Raises:
        TypeError: If one of them is no policy.
        ValueError: If none is given.

    Source: ``AnySavePolicy`` of Orbax, https://orbax.readthedocs.io

    >>> policy = AnySave(AtEpochEnd(), EveryNTrainSteps(4))
    >>> policy.due(SaveProgress(step=3)), policy.due(SaveProgress(step=3, epoch_end=True))
    (False, True)
    >>> policy.due(SaveProgress(step=4))
    True
    """

    def __init__(self, *policies: SavePolicy) -> None:
        if not policies:
            raise ValueError("`AnySave()` needs at least one policy.")
        for policy in policies:
            check_protocol("AnySave", "policies", policy, SavePolicy, "a policy such as `EveryNTrainSteps(100)`")
        self.policies = policies

    def due(self, progress: SaveProgress) -> bool:
        return any(policy.due(progress) for policy in self.policies)

    def __repr__(self) -> str:
        return f"AnySave({', '.join(map(repr, self.policies))})"
