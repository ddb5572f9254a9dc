r"""Tensors that are running means, such as statistics of BatchNorm and Adam's moments, and the merge of a late mean.

Each update :math:`x \leftarrow d\,x + u` keeps a part :math:`d` of the value. After :math:`k` updates since a snapshot
:math:`s`, the value is :math:`d^k s` plus what the updates have added. If the replica had held the mean :math:`m` of
all replicas at the snapshot, its value would be :math:`x + d^k (m - s)` now. This is the value that the merge gives: no
update is lost, and a variance stays positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 20  # elements that are merged at a time; a merge needs a few times as much memory beside the buckets


@dataclass(frozen=True)
class RunningMean:
    """A description of a tensor that is a running mean: its decay, and how often it was updated.

    The defaults are for a tensor of which nothing is known.
    """

    decay: float | None = 1.0  # the part of its value that stays at an update; None: the mean of all updates so far
    updates: Tensor | float = 0.0  # number of updates so far; a tensor where a module or optimizer counts them
    per_update: int = 1  # by how much ``updates`` grows with each update
    positive: bool = False  # a mean of values that are never negative, which must not become negative


def count(means: Sequence[RunningMean]) -> list[Tensor]:
    """Return a copy of each running mean's number of updates, on its counter's device, without waiting for a GPU."""
    counted = []
    for key, indices in _by_counter(means).items():
        updates = [means[i].updates for i in indices]
        if key is None:
            counted.append(torch.tensor(updates, dtype=torch.float64))
        else:
            counted.append(torch.stack([u.detach().reshape(()) for u in updates if isinstance(u, Tensor)]))
    return counted


def _by_counter(means: Sequence[RunningMean]) -> dict[tuple[torch.device, torch.dtype] | None, list[int]]:
    """Return the indices of running means in groups whose counters can be stacked.

    The key is the device and the type of the group's counters; it is None for means whose counter is no tensor.
    """
    found: dict[tuple[torch.device, torch.dtype] | None, list[int]] = {}
    for i, mean in enumerate(means):
        key = (mean.updates.device, mean.updates.dtype) if isinstance(mean.updates, Tensor) else None
        found.setdefault(key, []).append(i)
    return found


def remaining(means: Sequence[RunningMean], then: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the weight that the value at the snapshot still has in each running mean, after the updates since then.

    Returns a row of fp64 for each tensor: this weight, and 1 if updates have reduced it, else 0. The weight is
    :math:`d^k` after :math:`k` updates with decay :math:`d`. It is :math:`n / (n + k)` for a mean of all
    :math:`n + k` updates so far. It is 0 if a counter went back, because the mean has started over. ``then`` is the
    result of `count` at the snapshot.
    """
    rows: list[Tensor] = []
    order: list[int] = []
    for indices, before, after in zip(_by_counter(means).values(), then, count(means), strict=True):
        before = before.double()
        after = after.double()
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
    """Return a copy of a small tensor on a device, without waiting for a GPU."""
    return values.to(device, non_blocking=device.type == "cuda")


def late_mean(
    now: Tensor, mean: Tensor, snapshot: Tensor, part: Tensor, gone: Tensor, positive: Tensor, reference: Tensor
) -> Tensor:
    r"""Return :math:`x + p\,(m - s)`: the present value :math:`x`, moved to the mean :math:`m` of all replicas.

    :math:`s` is this replica's value at the snapshot, and :math:`p` is the weight that it still has in :math:`x`. Where
    the value has not changed since the snapshot, the result is :math:`m` to the bit. Where :math:`m = s`, it is
    :math:`x`. A ``positive`` value stays positive. Its result is at least :math:`p\,m`, because the updates since the
    snapshot were positive. If the updates are unknown, it is at least the smaller of :math:`x` and :math:`m`.

    Args:
        now: Present values :math:`x`.
        mean: Mean :math:`m`, minus ``reference``.
        snapshot: Values :math:`s`, minus ``reference``.
        part: Weight :math:`p`.
        gone: Whether updates are known to have reduced the weight. Where this is False, ``part`` is 1.
        positive: Whether the value is never negative.
        reference: Values that were subtracted from ``mean`` and ``snapshot``.

    >>> now, mean, snapshot, part = (torch.tensor([each]) for each in (5.0, 4.0, 2.0, 0.5))
    >>> yes, zero = torch.tensor([True]), torch.tensor([0.0])
    >>> late_mean(now, mean, snapshot, part, yes, yes, zero)
    tensor([6.])
    """
    whole = mean + reference
    moved = now + torch.where(mean == snapshot, 0.0, part * (mean - snapshot))  # infinite values (masks) stay
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
    """Move running means to the mean of all replicas' snapshots, and keep their updates since the snapshot.

    See `late_mean`.

    Args:
        tensors: The running means.
        mean: Flat bucket with the mean of all replicas' snapshots.
        snapshot: Flat bucket with this replica's snapshot.
        means: Description of each running mean.
        then: Result of `count` at the snapshot.
        reference: Bucket that was subtracted from ``mean`` and ``snapshot``. Default: None, nothing was subtracted.
    """
    left = remaining(means, then, mean.device)
    device = mean.device
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
    """Yield lists of about `PIECE` elements: tensors, or parts of a large one, each with its tensor's index."""
    group: list[tuple[int, Tensor]] = []
    size = 0
    for i, tensor in enumerate(tensors):
        large = tensor.numel() > PIECE and tensor.is_contiguous()
        for part in tensor.view(-1).split(PIECE) if large else (tensor,):
            unlike = group and (group[0][1].dtype is torch.float64) != (part.dtype is torch.float64)
            if group and (unlike or size + part.numel() > PIECE):
                yield group
                group = []
                size = 0
            group.append((i, part))
            size += part.numel()
    yield group
