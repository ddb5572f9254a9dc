r"""Averages over time (statistics of BatchNorm, Adam's moments) where the mean of all replicas arrives late.

An average over time keeps a part of its value at each update: :math:`x \leftarrow d\,x + u`. After :math:`k` updates
since a snapshot :math:`s` it is :math:`d^k s + U`. Had the replica held the mean :math:`m` of all at the snapshot, it
would be :math:`d^k m + U` now, which is :math:`x + d^k (m - s)`: no update is lost, and a variance stays positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RunningMean", "count", "late_mean", "merge_late_", "remaining"]

PIECE = 1 << 20
"""Elements that are merged at a time: what a merge needs beside the buckets is a few times as much."""


@dataclass(frozen=True)
class RunningMean:
    """How a tensor averages over time; the default is of one of which nothing is known.

    Args:
        decay: the part of its value that is left after an update; None: it is the mean of all updates so far.
        updates: the number of updates so far: a tensor of one element where a module or an optimizer counts them.
        per_update: by how much ``updates`` grows with each.
        positive: nothing negative goes into it, so that it must not become negative.
    """

    decay: float | None = 1.0
    updates: Tensor | float = 0.0
    per_update: int = 1
    positive: bool = False


def count(means: Sequence[RunningMean]) -> list[Tensor]:
    """Return the numbers of updates so far, copied to where they are: no GPU is waited for."""
    counted = []
    for key, indices in _by_counter(means).items():
        updates = [means[i].updates for i in indices]
        if key is None:
            counted.append(torch.tensor(updates, dtype=torch.float64))
        else:
            counted.append(torch.stack([u.detach().reshape(()) for u in updates if isinstance(u, Tensor)]))
    return counted


def _by_counter(means: Sequence[RunningMean]) -> dict[tuple[torch.device, torch.dtype] | None, list[int]]:
    """The places of those whose counters can be stacked."""
    found: dict[tuple[torch.device, torch.dtype] | None, list[int]] = {}
    for i, mean in enumerate(means):
        key = (mean.updates.device, mean.updates.dtype) if isinstance(mean.updates, Tensor) else None
        found.setdefault(key, []).append(i)
    return found


def remaining(means: Sequence[RunningMean], then: Sequence[Tensor], device: torch.device) -> Tensor:
    r"""Return for each tensor what is left of its value at the snapshot, and whether any of it has gone.

    That is :math:`d^k` after :math:`k` updates; :math:`n / (n + k)` of a mean of all :math:`n + k` updates so far.
    Nothing is left where a counter went back: the average has begun anew.

    Args:
        means: as they are now.
        then: what `count` said at the snapshot.
        device: of the result.

    Returns:
        fp64, one row for each tensor: the part, and 1 or 0.
    """
    rows: list[Tensor] = []
    order: list[int] = []
    for indices, before, after in zip(_by_counter(means).values(), then, count(means), strict=True):
        before, after = before.double(), after.double()
        lists = (
            [1.0 if means[i].decay is None else means[i].decay for i in indices],
            [means[i].decay is None for i in indices],
            [means[i].per_update for i in indices],
        )
        decay, cumulative, per_update = (_moved(torch.tensor(x, dtype=torch.float64), after.device) for x in lists)
        updates = torch.ceil((after - before) / per_update)
        part = torch.where(cumulative > 0, before / after.clamp(min=1.0), decay**updates)
        part = torch.where(updates == 0, 1.0, torch.where(updates < 0, 0.0, part))
        gone = (updates != 0) & ((decay != 1.0) | (cumulative > 0) | (updates < 0))
        rows.append(_moved(torch.stack([part, gone.double()], dim=1), device))
        order += indices
    return torch.cat(rows)[_moved(torch.tensor(order).argsort(), device)]


def _moved(values: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor on a device; on the way to a GPU nobody waits for what that has yet to do."""
    return values.to(device, non_blocking=device.type == "cuda")


def late_mean(
    now: Tensor, mean: Tensor, snapshot: Tensor, part: Tensor, gone: Tensor, positive: Tensor, reference: Tensor
) -> Tensor:
    r"""Return :math:`x + p\,(m - s)`, where :math:`p` is the part of :math:`s` that is left in :math:`x`.

    Where nothing has changed since the snapshot it is :math:`m`, to the bit; where :math:`m = s` it is :math:`x`.
    What is positive stays so: the updates since the snapshot were, so that at least :math:`p\,m` is left; of one
    whose updates are not known, at least the smaller one of :math:`x` and :math:`m`.

    Args:
        now: :math:`x`.
        mean: :math:`m`, as its difference from ``reference``.
        snapshot: :math:`s`, as its difference from ``reference``.
        part: :math:`p`.
        gone: bool: :math:`p` tells what was lost by updates; else 1 stands for not knowing.
        positive: bool: nothing negative goes into it.
        reference: what is subtracted from means and snapshots as they travel.

    >>> now, mean, snapshot, part = (torch.tensor([each]) for each in (5.0, 4.0, 2.0, 0.5))
    >>> yes, zero = torch.tensor([True]), torch.tensor([0.0])
    >>> late_mean(now, mean, snapshot, part, yes, yes, zero)
    tensor([6.])
    """
    whole = mean + reference
    moved = now + torch.where(mean == snapshot, 0.0, part * (mean - snapshot))  # infinite ones (masks) stay
    moved = torch.where(~gone & (now - reference == snapshot), whole, moved)
    least = torch.where(gone, part * whole, torch.minimum(now, whole)).clamp(min=0.0)  # differences are rounded
    return torch.where(positive, torch.maximum(moved, least), moved)


@torch.no_grad()
def merge_late_(
    tensors: Sequence[Tensor],
    mean: Tensor,
    snapshot: Tensor,
    means: Sequence[RunningMean],
    then: Sequence[Tensor],
    reference: Tensor | None = None,
) -> None:
    """Let tensors take up the mean of all replicas' snapshots, and keep their updates since; see `late_mean`.

    Args:
        tensors: of one replica, as they lie in the buckets.
        mean: of all replicas' snapshots; a flat bucket.
        snapshot: this replica's.
        means: how each of the tensors averages.
        then: what `count` said at the snapshot.
        reference: what was subtracted from the snapshots. Default: nothing.
    """
    left, device = remaining(means, then, mean.device), mean.device
    start = 0
    for group in _groups(tensors):
        sizes = [part.numel() for _, part in group]
        place = slice(start, start + sum(sizes))
        start = place.stop
        wide = torch.float64 if group[0][1].dtype is torch.float64 else torch.float32
        now = torch.cat([part.detach().reshape(-1).to(device, wide) for _, part in group])
        times = _moved(torch.tensor(sizes), device)
        rows = left[group[0][0] : group[-1][0] + 1].repeat_interleave(times, dim=0, output_size=sum(sizes))
        positive = _moved(torch.tensor([means[i].positive for i, _ in group]), device)
        origin = torch.zeros((), device=device) if reference is None else reference[place]
        merged = late_mean(
            now, mean[place].to(wide), snapshot[place].to(wide), rows[:, 0].to(wide), rows[:, 1] > 0,
            positive.repeat_interleave(times, output_size=sum(sizes)), origin.to(wide),
        )  # fmt: skip
        parts = [part for _, part in group]
        torch._foreach_copy_(parts, [v.view(p.shape) for v, p in zip(merged.split(sizes), parts, strict=True)])


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[tuple[int, Tensor]]]:
    """Runs of tensors, or parts of a large one, of about `PIECE` elements, each with its tensor's number."""
    group: list[tuple[int, Tensor]] = []
    size = 0
    for i, tensor in enumerate(tensors):
        large = tensor.numel() > PIECE and tensor.is_contiguous()
        for part in tensor.view(-1).split(PIECE) if large else (tensor,):
            unlike = group and (group[0][1].dtype is torch.float64) != (part.dtype is torch.float64)
            if group and (unlike or size + part.numel() > PIECE):
                yield group
                group, size = [], 0
            group.append((i, part))
            size += part.numel()
    yield group
