"""What ranks are called in checkpoints: the numbers that they were started with, which stay where others are lost."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_async.trainer.environments import Newcomer

__all__ = ["NOBODY", "Names", "is_newcomer", "names_of"]


class Names(NamedTuple):
    """Of the ranks of a run, as things stand.

    Args:
        mine: this rank's.
        left: of all that are left, in order.
        started: how many there were at first; where more came since, their names are below this number.
        lost: of those without which training goes on.
    """

    mine: int
    left: tuple[int, ...]
    started: int
    lost: frozenset[int] = frozenset()


NOBODY = Names(-1, (0,), 1)
"""One who takes no part in training, and only reads."""


def names_of(trainer: Any) -> Names:
    """Numbers, where nobody can be lost.

    Args:
        trainer: its strategy may have `Survivors`.
    """
    survivors = getattr(trainer.strategy, "survivors", None)
    if is_newcomer(trainer.strategy):
        others = frozenset(range(trainer.world_size))
        return Names(trainer.strategy.cluster_environment.started_as, (), trainer.world_size, others)
    if survivors is None:
        return Names(trainer.global_rank, tuple(range(trainer.world_size)), trainer.world_size)
    generation, left = survivors.generation, tuple(map(int, survivors.names))
    ever = survivors.ever
    return Names(int(survivors.called(generation.name)), left, 1 + max(ever), ever.difference(left))


def is_newcomer(strategy: Any) -> bool:
    """Whether this rank was started while others train, and is not among them yet."""
    return isinstance(getattr(strategy, "cluster_environment", None), Newcomer) and strategy.survivors is None
