"""What a policy of accumulation must answer. No I/O, no threads, no clocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from lightning_async.rules.accumulation.noise import Noise

__all__ = ["AccumulationPolicy", "Measured", "Progress", "Times", "Unit"]

Unit = Literal["batches", "samples", "any"]
Measured = Literal["nothing", "noise", "times"]


class Times(NamedTuple):
    """What the batches of recent windows took.

    Args:
        batch_s: seconds of a batch up to the end of its backward pass, without a step.
        step_s: seconds that the last batch of a window takes more than that until gradients are ready to step with:
            the part of communication that nothing hides.
    """

    batch_s: float
    step_s: float


class Progress(NamedTuple):
    """Where training is when a window begins.

    Args:
        step: optimizer steps taken.
        epoch: epochs completed.
        size: of the last window as it was planned; 0 where there was none.
        unit: samples in one unit of ``size``, over all ranks whose gradients become one: 1.0 where it counts samples.
        noise: the noise of gradients; None while unknown.
        times: None while unknown.
    """

    step: int
    epoch: int
    size: int = 0
    unit: float = 1.0
    noise: Noise | None = None
    times: Times | None = None


@runtime_checkable
class AccumulationPolicy(Protocol):
    """How large a window is: a pure function of where training is."""

    unit: Unit = "any"
    """What `size` counts: "batches", "samples", or "any": what the argument counts that the policy is given to."""
    measures: Measured = "nothing"
    """What it needs to know."""
    every: int = 1
    """Windows from one decision to the next."""

    @abstractmethod
    def size(self, progress: Progress) -> int:
        """Of the window that begins, and of those up to the next decision."""
        ...
