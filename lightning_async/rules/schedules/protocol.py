"""What a schedule must answer. No I/O, no threads, no clocks."""

from __future__ import annotations

import enum
from abc import abstractmethod
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["Action", "Clock", "Schedule", "Step"]


class Action(enum.Enum):
    """What a replica does with the optimizer step that it is about to take."""

    LOCAL = "local"
    """Step alone."""
    GRADIENTS = "gradients"
    """Step with gradients averaged over all replicas (synchronous training)."""
    ROUND = "round"
    """Step alone, then start an averaging round."""


class Step(NamedTuple):
    """What a schedule says of one step.

    Args:
        action: what the replica does.
        fragment: of a round, which part of the parameters it carries; replicas have one part, number 0, so far.
    """

    action: Action
    fragment: int = 0

    @classmethod
    def of(cls, said: object, schedule: object, num_fragments: int | None = None) -> Step:
        """What a schedule has said; an action alone is one of the first fragment.

        Raises:
            TypeError: it is neither.
            ValueError: there is no such fragment.

        >>> Step.of(Action.ROUND, None)
        Step(action=<Action.ROUND: 'round'>, fragment=0)
        """
        step = cls(said) if isinstance(said, Action) else said
        if not isinstance(step, cls):
            raise TypeError(f"`schedule={schedule!r}` said {said!r}; `next` must return a `Step`, or an `Action`.")
        if step.fragment < 0 or (num_fragments is not None and step.fragment >= num_fragments):
            raise ValueError(f"`schedule={schedule!r}` asks for fragment {step.fragment} of {num_fragments}.")
        return step


class Clock(NamedTuple):
    """One replica's own facts, before it takes its next optimizer step.

    Args:
        step: optimizer steps that this replica has completed.
        epoch: epochs that it has completed.
        steps_since_round: completed steps that no round's snapshot holds yet.
        seconds_since_round: seconds since the last round was committed (or since training began).
        step_s: measured seconds per local step, 0.0 while unknown.
        round_s: measured seconds of one round's exchange, 0.0 while unknown.
        speed: this replica's steps per second, over those of the fastest; 1.0 while unknown.
    """

    step: int
    epoch: int
    steps_since_round: int
    seconds_since_round: float
    step_s: float = 0.0
    round_s: float = 0.0
    speed: float = 1.0


@runtime_checkable
class Schedule(Protocol):
    """When replicas talk: a pure function of one replica's clock."""

    @abstractmethod
    def next(self, clock: Clock) -> Step:
        """What to do with the step that comes after ``clock``."""
        ...
