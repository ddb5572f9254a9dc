"""Which checkpoints to keep: policies as pure functions of those that there are.

Whatever a policy says, the newest one, the last good one and the one resumed from are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from lightning_async.arguments import check_choice, check_int, check_protocol

__all__ = ["Best", "EveryNth", "KeepAny", "KeepPolicy", "LastGood", "Latest", "Saved"]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, as a keep policy sees it.

    Args:
        number: counts the saves of a directory.
        step: optimizer steps taken by then.
        metrics: what was logged by then. Default: none.
        good: whether it was marked as good afterwards. Default: False.
    """

    number: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    good: bool = False


@runtime_checkable
class KeepPolicy(Protocol):
    """Which checkpoints to keep. A policy of your own needs this one method."""

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        """The numbers of those to keep, out of all that there are."""
        ...


@dataclass(frozen=True)
class Latest:
    r"""The ``n`` newest.

    .. math:: \{i : i \text{ is one of the } n \text{ largest numbers}\}

    Args:
        n: how many. Default: 1.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is less than 1.

    Source: ``LatestN`` of Orbax, https://orbax.readthedocs.io

    >>> sorted(Latest(2).keep([Saved(1, 10), Saved(2, 20), Saved(3, 30)]))
    [2, 3]
    """

    n: int = 1

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        """The largest numbers."""
        return set(sorted((each.number for each in saved), reverse=True)[: self.n])


@dataclass(frozen=True)
class Best:
    r"""The ``n`` best by a logged metric; of equal ones, the newer.

    .. math:: \{i : m_i \text{ is one of the } n \text{ smallest (or largest) finite values}\}

    Args:
        monitor: name of the metric. A checkpoint without it, or with one that is not finite, is never among the best.
        n: how many. Default: 1.
        mode: ``"min"`` or ``"max"``. Default: ``"min"``.

    Raises:
        TypeError: ``n`` is not an int, or ``monitor`` not a str.
        ValueError: ``n`` is less than 1, ``monitor`` is empty, or ``mode`` is neither of the two.

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
        """The best of those that have the metric."""
        return {each.number for each in self.ranked(saved)[: self.n]}

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """Those that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        known = [each for each in saved if math.isfinite(each.metrics.get(self.monitor, math.nan))]
        return sorted(known, key=lambda each: (sign * each.metrics[self.monitor], -each.number))


@dataclass(frozen=True)
class EveryNth:
    r"""Every ``n``-th save, for good.

    .. math:: \{i : i \equiv 0 \pmod n\}

    Args:
        n: saves.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is less than 1.

    Source: ``EveryNSteps`` of Orbax' preservation policies, https://orbax.readthedocs.io

    >>> sorted(EveryNth(2).keep([Saved(1, 10), Saved(2, 20), Saved(3, 30), Saved(4, 40)]))
    [2, 4]
    """

    n: int

    def __post_init__(self) -> None:
        check_int(self, "n", at_least=1)

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        """The multiples, counted over the life of the directory."""
        return {each.number for each in saved if each.number % self.n == 0}


@dataclass(frozen=True)
class LastGood:
    r"""The newest one that was marked as good: training went on from it without harm.

    .. math:: \{\max \{i : i \text{ is good}\}\}

    Source: going back to before a spike of the loss, Chowdhery et al., "PaLM", section 5.1,
    https://arxiv.org/abs/2204.02311

    >>> LastGood().keep([Saved(1, 10, good=True), Saved(2, 20, good=True), Saved(3, 30)])
    {2}
    """

    def keep(self, saved: Sequence[Saved]) -> set[int]:
        """The newest good one, if there is any."""
        return set(sorted(each.number for each in saved if each.good)[-1:])


class KeepAny:
    r"""What one of several policies keeps.

    .. math:: K_1 \cup K_2 \cup \dots

    Args:
        policies: at least one.

    Raises:
        TypeError: one of them is no policy.
        ValueError: none is given.

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
        """The union."""
        return set().union(*(policy.keep(saved) for policy in self.policies))

    def __repr__(self) -> str:
        return f"KeepAny({', '.join(map(repr, self.policies))})"
