"""How one replica averages, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_args

from lightning_async.comm.membership.membership import HEARTBEAT
from lightning_async.engine.averaging.mailbox import Work
from lightning_async.engine.codes import Compression
from lightning_async.rules.averaging.protocol import AllMean, AveragingRule

__all__ = ["AveragerConfig", "Deadlines", "Weighting"]

_REST = 1e-6
Weighting = Literal["samples", "steps", "equal"]


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the engine waits for what.

    Args:
        payload: for each part of a payload. Default 60 s; the header before it has no deadline, because a late
            rank is no failure.
        grace: after this long without a step, a rank's engine answers rounds without it. Default 10 s.
        dead_after: a rank that sent no heartbeat for so long is lost; at least four heartbeats. Default 30 s.
        reform: for all ranks to meet again after a failure. Default 300 s.
        attempts: failed rounds in a row before training ends with an error. Default 10.

    Raises:
        TypeError: a time that is no timedelta.
        ValueError: a time that is not positive, or a `dead_after` that is too short.
    """

    payload: timedelta = timedelta(seconds=60)
    grace: timedelta = timedelta(seconds=10)
    dead_after: timedelta = timedelta(seconds=30)
    reform: timedelta = timedelta(seconds=300)
    attempts: int = 10

    def __post_init__(self) -> None:
        for name in ("payload", "grace", "dead_after", "reform"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise TypeError(f"`Deadlines({name}={value!r})` must be a datetime.timedelta.")
            if value <= timedelta(0):
                raise ValueError(f"`Deadlines({name}={value!r})` must be longer than zero.")
        if self.dead_after < 4 * HEARTBEAT:
            raise ValueError(
                f"`Deadlines(dead_after={self.dead_after!r})` must be at least {4 * HEARTBEAT!r}: four heartbeats."
            )
        if self.attempts < 1:
            raise ValueError(f"`Deadlines(attempts={self.attempts})` must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """How one replica averages, apart from its rule and its schedule.

    Args:
        overlap: rounds run while training goes on; False: training stands still for each.
        weighting: a message's weight: the samples or the steps behind it, or 1 for each.
        compression: of the rule's messages, see `CompressedMean`. Default "none".
        part_bytes: payloads move in parts of at most this size. Default 16 MiB.
        deadlines: how long to wait for what.

    Raises:
        ValueError: an unknown weighting or compression, or a part smaller than one element.
    """

    overlap: bool = True
    weighting: Weighting = "samples"
    compression: Compression = "none"
    part_bytes: int = 16 << 20
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

    def weigh_at_gate(self, work: Work, reported: Work) -> float:
        """The weight of a replica at a consensus: its ``work`` since the last round.

        A compressed message leaves a bit of what it ``reported`` in the replica's parameters. That weighs next to
        nothing beside new work, and decides where there is none.
        """
        rest = _REST * self.weigh(reported) if self.compression != "none" else 0.0
        return self.weigh(work) + rest

    def weigh(self, work: Work) -> float:
        """The weight of an amount of work."""
        if self.weighting == "equal":
            return float(work.steps > 0 or work.samples > 0)
        return work.steps if self.weighting == "steps" else work.samples
