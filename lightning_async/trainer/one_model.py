"""All replicas begin with one model."""

from __future__ import annotations

from typing import Any

from lightning_async.engine.tensors import describe
from lightning_async.engine.world import World
from lightning_async.errors import LayoutMismatch
from lightning_async.flat import FlatLayout

__all__ = ["make_equal"]


def make_equal(world: World, module: Any) -> None:
    """Compare the replicas' models, and start them all from rank 0's.

    Raises:
        LayoutMismatch: they differ; names the first difference.
    """
    mine = describe(module)
    for rank, theirs in enumerate(world.gather_objects(mine)):
        difference = FlatLayout.first_difference(mine, theirs)
        if difference is not None:
            raise LayoutMismatch(
                f"Rank {world.rank} and rank {rank} hold different models; the first difference is "
                f"{difference} (rank {world.rank} | rank {rank}). Build the same model on every rank."
            )
    world.make_equal_([*module.parameters(), *module.buffers()])
