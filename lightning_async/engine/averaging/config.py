"""How one replica averages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_async.engine.codes import Compression
from lightning_async.engine.deadlines import Deadlines
from lightning_async.rules.averaging.protocol import AllMean, AveragingRule

__all__ = ["REST", "AveragerConfig", "Weighting"]

REST = 1e-6
"""What a reported step weighs at a gate beside a new one: a compressed message leaves a bit of what it reported in the
replica's parameters. That weighs next to nothing beside new work, and decides where there is none."""
EXAMPLE = "Deadlines(dead_after=timedelta(seconds=12))"
Weighting = Literal["samples", "steps", "equal"]


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """How one replica averages, apart from its rule and its schedule.

    Args:
        overlap: rounds run while training goes on; False: training stands still for each.
        weighting: a message's weight: the samples or the steps behind it, or 1 for each.
        compression: of the rule's messages, see `CompressedMean`. Default "none".
        part_bytes: payloads move in parts of at most this size. Default 16 MiB.
        min_replicas: ranks that are lost are done without, as long as so many are left. Default: half of those that
            were started, rounded up, where the transport can form groups anew, else all.
        max_replicas: ranks that come are taken in until there are so many. Default: as many as were started.
        deadlines: how long to wait for what.

    Raises:
        TypeError: ``min_replicas`` or ``max_replicas`` is no number; ``deadlines`` are none.
        ValueError: they are below 1, or the first is above the second; an unknown weighting or compression, or a part
            smaller than one element.
    """

    overlap: bool = True
    weighting: Weighting = "samples"
    compression: Compression = "none"
    part_bytes: int = 16 << 20
    min_replicas: int | None = None
    max_replicas: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"`AveragerConfig(weighting={self.weighting!r})` must be one of {get_args(Weighting)}.")
        if self.compression not in get_args(Compression):
            raise ValueError(
                f"`AveragerConfig(compression={self.compression!r})` must be one of {get_args(Compression)}."
            )
        if self.part_bytes < 4:
            raise ValueError(f"`AveragerConfig(part_bytes={self.part_bytes})` must be at least 4.")

        if not isinstance(self.deadlines, Deadlines):
            raise TypeError(f"`deadlines={self.deadlines!r}` must be Deadlines(...), such as {EXAMPLE}.")
        for name, none in (("min_replicas", "half"), ("max_replicas", "as many as were started")):
            given = getattr(self, name)
            if not isinstance(given, int | None) or isinstance(given, bool):
                raise TypeError(f"`{name}={given!r}` must be a number of replicas, or None for {none}.")
            if given is not None and given < 1:
                raise ValueError(f"`{name}={given}` must be at least 1.")
        if (self.min_replicas or 1) > (self.max_replicas or math.inf):
            raise ValueError(f"`min_replicas={self.min_replicas}` must be at most `max_replicas={self.max_replicas}`.")

    def settings(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        names = ("overlap", "weighting", "compression", "min_replicas", "max_replicas")
        own = {name: getattr(self, name) for name in names}
        return {**own, "part_mb": self.part_bytes / 2**20, "deadlines.replicas": self.deadlines.replicas}

    def fewest(self, started: int, can_lose: bool = True) -> int:
        """So many replicas go on without those that are lost; the others end, too, where fewer are left.

        >>> [AveragerConfig().fewest(started) for started in (1, 2, 3, 8)]
        [1, 1, 2, 4]

        Args:
            started: how many there were at first.
            can_lose: whether the transport can form groups anew. Default: it can.
        """
        if self.min_replicas is not None:
            return self.min_replicas
        return (started + 1) // 2 if can_lose else started

    def survives(self, started: int, can_lose: bool = True) -> int:
        """So many form groups anew without those that are lost: one, where fewer than `fewest` wait for others."""
        return 1 if self.deadlines.replicas else self.fewest(started, can_lose)

    def check_rule(self, owner: str, rule: AveragingRule) -> None:
        """Raise ValueError, in the name of ``owner``, for a rule that this configuration cannot carry out."""
        if self.overlap and not rule.overlappable:
            raise ValueError(
                f"`{owner}(rule={rule!r}, overlap=True)`: this rule overwrites the parameters, so the steps taken "
                "during a round would be lost. Pass `overlap=False`, or `rule=DeltaMean()`."
            )
        if not isinstance(rule.topology, AllMean):
            raise ValueError(
                f"`{owner}(rule={rule!r})`: its topology is {rule.topology!r}; only AllMean() can be served."
            )
        if self.compression in ("fp8", "int8") and not rule.sends_difference:
            raise ValueError(
                f"`{owner}(rule={rule!r}, compression={self.compression!r})`: this rule sends the parameters "
                "themselves, which 8 bits hold too coarsely for replicas ever to agree. Use a rule that sends "
                "differences (`DiLoCo(outer_lr=1.0, outer_momentum=0.0)` averages as `DeltaMean()` does), or "
                '`compression="bf16"`.'
            )
