"""Ranks of which a checkpoint holds no state of their own: they go on beside one of which it does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_async.data.random_states import of_another

__all__ = ["among", "beside", "completed", "has_none", "without_own"]

log = logging.getLogger(__name__)


def beside(states: Mapping[int, dict[str, Any]], rank: int, path: str) -> dict[str, Any] | None:
    """The state from which ``rank`` goes on; None where no rank has one, and the data begins again.

    It takes as many batches of its own data for read as the first rank that was there had. Where its sampler draws an
    order by chance, that order is another one now.

    Args:
        states: what `Resume` has of each rank that was there, by its name.
        rank: that was not.
        path: of the checkpoint, for the warning.
    """
    if not states:
        log.warning("Rank %d: %s does not hold where any rank stood in its data: the epoch's begins again.", rank, path)
        return None
    there = min(states)
    log.warning(
        "Rank %d has no state of its own in %s: it goes on from the model that all agreed on, at the place of rank %d "
        "in its data, with other random numbers.", rank, path, there,
    )  # fmt: skip
    return _moved(states[there], rank, _free(states, rank))


def _free(states: Mapping[int, dict[str, Any]], rank: int) -> int:
    """The part of the epoch that nobody who was there has: one for each that was not, in order."""
    parts = range(among(states[min(states)], 0))
    free = sorted({*parts}.difference(state.get("dealt", (name,))[0] for name, state in states.items()))
    absent = [name for name in parts if name not in states]
    return free[absent.index(rank)] if rank in absent and len(free) == len(absent) else rank


def without_own(clocks: Mapping[str, Any]) -> dict[str, Any]:
    """Of another rank's clocks what one that comes in its place, or beside it, goes on from."""
    return {**clocks, "rule_state": {}, "gathered": None}


def has_none(state: Mapping[str, Any] | None) -> bool:
    """Whether a rank had come within the epoch, and had no part of it: what it has is nowhere in the epoch."""
    return state is not None and not state.get("dealt", (0, 1))


def among(state: dict[str, Any], world_size: int) -> int:
    """How many ranks the data of the epoch under way was dealt out to; ``world_size`` where the state is too old."""
    return state.get("dealt", (0, world_size))[1]


def completed(states: Mapping[int, dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states of all ranks that the epoch's data was dealt out to, those included that have none.

    Args:
        states: what `Resume` has of each rank that was there, by its name.
        world_size: of the training.
    """
    first = states[min(states)]
    places = {state.get("dealt", (name,))[0]: state for name, state in sorted(states.items())}
    return [places.get(place) or _moved(first, place, place) for place in range(among(first, world_size))]


def _moved(state: dict[str, Any], rank: int, part: int) -> dict[str, Any]:
    random = of_another(state["random"], rank)
    return {**state, "random": random, "loaders": [_place(position, part) for position in state["loaders"]]}


def _place(position: dict[str, Any], part: int) -> dict[str, Any]:
    """As many batches further on. What a dataset, a loader or a worker says of itself is of the other rank's data."""
    if "taken" not in position:
        return {**position, "dataset": None, "state": None}
    told = position.get("share")
    if told is not None:
        told = {"distributed": {**told, "rank": part}, "sequential": told}.get(told["kind"])
    of_the_rank = {"drawn": {}, "random": None, "seed": None, "workers": {}, "first": {}}
    return {**position, **of_the_rank, "share": told, "dataset": None, "state": None}
