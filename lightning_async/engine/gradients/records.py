"""What is said of gradients in headers, and what is known of them on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_async.engine.buckets import Exchange, Kind, Message
from lightning_async.engine.gradients.parts import Outgoing

__all__ = ["GRADIENTS", "Before", "GradientMessage", "GradientPlan", "Part", "Reduction", "Told"]

GRADIENTS = 2
"""The priority of synchronous steps: others have messages too while one rank is at such a step, and go with it."""


class Part(NamedTuple):
    """What one rank says of its gradients in a header.

    Args:
        weight: what they count in the mean.
        mask: a hash of which parameters have one.
        since: steps that had been taken when the first of them was computed.
        in_parts: 1 where they leave while they are computed, so that the mask is what is expected.
        samples: behind them.
        base, size: see `Told`, as this rank would have it; 0 where it does not ask.
        keeps: 1 where their mean stays in its bucket as it is.
        there: 1 where there is a message, be its weight 0.
    """

    weight: float = 0.0
    mask: int = 0
    since: int = 0
    in_parts: int = 0
    samples: float = 0.0
    base: float = 0.0
    size: float = 0.0
    keeps: int = 0
    there: int = 0


class Told(NamedTuple):
    """What ranks have told with gradients that become one: alike on all who step with these.

    Args:
        weight: of all replicas' gradients.
        samples: behind them.
        ranks: how many replicas there are, those without gradients too.
        base: samples that learning rates are for, of one replica: the mean over those with gradients.
        size: of the window of gradients that comes, as the first replica with gradients would have it.
    """

    weight: float = 0.0
    samples: float = 0.0
    ranks: int = 0
    base: float = 0.0
    size: float = 0.0

    @classmethod
    def by(cls, parts: Sequence[Part]) -> Told:
        """What all have told."""
        if not (having := [p for p in parts if p.weight > 0.0]):
            return cls()
        weight, samples, base = (sum(getattr(p, name) for p in having) for name in ("weight", "samples", "base"))
        return cls(weight, samples, len(parts), base / len(having), having[0].size)


@dataclass
class GradientMessage(Message):
    """Gradients in the `sent` bucket.

    Args:
        samples: behind them.
        used: 1.0 for every parameter that has one, or is expected to have one.
        since: steps that had been taken when the first of them was computed.
        behind: of these samples, the part that each parameter's gradient is of; None: all. See `Window`.
        out: how far they are there, where they leave while they are computed.
        keeps: their mean stays in its bucket as it is, until other gradients are there.
        dropped: they are not finite, and have no weight; see `GradientRounds`.
        asks: `Told.base` and `Told.size`, as this replica would have them.
    """

    samples: float
    used: Tensor
    since: int
    behind: Tensor | None = None
    out: Outgoing | None = None
    keeps: bool = False
    dropped: bool = False
    asks: tuple[float, float] = (0.0, 0.0)

    @property
    def ready(self) -> bool:
        return self.out is None or self.out.ready


class Before(NamedTuple):
    """What backward passes before the last one of a message have made.

    Args:
        pack: puts their part of the message into the parameters' part of a bucket; None: there is none.
        used: 1.0 for every parameter that has a gradient of theirs.
        since: steps that had been taken when the first gradient was computed.
    """

    pack: Callable[[Tensor], None] | None
    used: Tensor
    since: int


class GradientPlan(NamedTuple):
    """Args:
    kind: of the round; None where no replica has a weight.
    weights: every rank's share in the mean.
    """

    kind: Kind | None
    weights: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Reduction(Exchange):
    """Gradients on their way.

    Args:
        share: this rank's share in the mean.
        used: which parameters any replica used.
        since: the smallest of all replicas', see `Part`.
        masks_differ: replicas used different ones, or one that follows has none to know them by.
        told: what all ranks have told with them.
        residual: what compression has yet to deliver once this is committed; None for what it had before.
        in_parts: some replica's leave while they are computed.
    """

    share: float
    used: Tensor
    since: int
    masks_differ: bool
    told: Told
    residual: Tensor | None = None
    in_parts: bool = False
