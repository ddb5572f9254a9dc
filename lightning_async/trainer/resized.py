"""Going on with another number of ranks than saved: what is left of the epoch is divided anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lightning_async.data.random_states import of_another
from lightning_async.data.samplers import Division, deal, deal_steps, divide, in_the_last_step, rest
from lightning_async.data.shares import Share

__all__ = ["batches_left", "deal", "deal_steps", "of_another", "resized", "weight_of_the_last"]

log = logging.getLogger(__name__)


def resized(
    states: Sequence[dict[str, Any]],
    rank: int,
    world_size: int,
    own: dict[str, Any] | None = None,
    division: Division = divide,
) -> dict[str, Any]:
    """The state from which ``rank`` of ``world_size`` goes on, made of those of all ranks at the save.

    Each sample of the epoch is still seen once. Gradients in accumulation are left out, and so is the rest of an epoch
    of which nobody knows what the ranks took: its data begins again, with a warning.

    Args:
        states: by the rank that they were captured on.
        rank: among those that go on.
        world_size: how many go on.
        own: the state of this one at the save. Default: that of another rank, each of one as far as there are enough.
        division: how what is left is divided. Default: evenly, with some samples once more.
    """
    base = own or states[rank % len(states)]
    lost, left = _lost(base["unsaved"].get("left", []), len(states))
    loaders = [[lost[place]] if place in lost else state["loaders"] for place, state in enumerate(states)]
    positions = [
        _divided(list(of_ranks), rank, world_size, len(base["loaders"]), division)
        for of_ranks in zip(*loaders, strict=True)
    ]
    random = base["random"] if own or rank < len(states) else of_another(base["random"], rank)
    unsaved = {**base["unsaved"], "gradients": {}, "left": left}
    return {**base, "loaders": positions, "random": random, "unsaved": unsaved, "resized": True}


def _lost(left: list[Any], ranks: int) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Where lost ranks stood with what all had committed, by their place among these; and of whom it is not known."""
    known, others = {}, []
    for entry in left:
        share, begin = Share(*entry[1]), entry[2]
        told = share.loaders[0][0] if share.is_known and len(share.loaders) == 1 else None
        if told is None or told["kind"] != "distributed" or told["num_replicas"] != ranks:
            others.append(entry)
            continue
        taken = share.skipped + max(begin, share.first) - share.first
        known[told["rank"]] = {"taken": taken, "made": 0, "drawn": {}, "share": told}
    return known, others


def batches_left(state: dict[str, Any]) -> int | None:
    """How many batches follow in the epoch, where its data was divided anew, or inherited from ranks that were lost."""
    told = state["loaders"][0].get("share") if state["loaders"] else None
    if not told or told["kind"] != "given":
        return None
    return -(-len(told["indices"]) // told["batch_size"]) - state["loaders"][0]["taken"]


def weight_of_the_last(state: dict[str, Any], rank: int, world_size: int) -> float:
    """What this rank's last batch counts among those of all, where `deal_steps` has divided what is left: by its share
    of the samples in that step, so that the mean over ranks is that over samples."""
    told = state["loaders"][0].get("share") if state["loaders"] else None
    if not told or not told.get("left"):
        return 1.0
    counts = in_the_last_step(told["left"], world_size, told["batch_size"])
    return counts[rank] * world_size / sum(counts)


def _divided(
    positions: list[dict[str, Any]], rank: int, world_size: int, loaders: int, division: Division
) -> dict[str, Any]:
    positions = [each for each in positions if "taken" in each] or positions[:1]
    if "taken" not in positions[0]:  # the epoch's data is at its end, or not begun, on all
        return positions[0]
    kinds = {(position.get("share") or {}).get("kind") for position in positions}
    if loaders > 1 or kinds & {None, "stream"}:
        log.warning(
            "The checkpoint is of %d ranks, and %d go on, but it cannot be told which samples of this epoch were seen: "
            "its data begins again. One DataLoader of a map-style dataset with torch's samplers can go on.",
            len(positions), world_size,
        )  # fmt: skip
        return {"ended": False, "dataset": None}
    told, left = positions[0]["share"], rest(positions)
    sizes = [position["share"]["batch_size"] for position in positions]  # unequal ones, by `BalancedBatchSizes`
    size, full = -(-sum(sizes) // len(sizes)), told.get("full_batches", False)
    if full:  # `DataLoader(drop_last=True)`
        left = left[: len(left) - len(left) % (size * world_size)]
    indices = torch.tensor(division(left, rank, world_size, size), dtype=torch.int64)
    given = {
        "kind": "given", "length": told["length"], "batch_size": size, "full_batches": full, "indices": indices,
        "left": len(left),
    }  # fmt: skip
    sizes = {name: positions[0][name] for name in ("batch_size", "length") if name in positions[0]}
    return {"taken": 0, "made": 0, "drawn": {}, "share": given, **sizes}
