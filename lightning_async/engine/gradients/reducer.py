"""Synchronous gradients: averaged over all replicas while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async.comm.protocols import Collectives, Pending

__all__ = ["GradientReducer"]

AllReduce = Callable[[Collectives, Tensor], Pending[Tensor]]


@dataclass
class _Bucket:
    """Gradients that travel together.

    Args:
        params: in the order in which their gradients are expected.
        flat: what travels.
        views: each gradient's place in it.
        collectives: a fork of the bucket's own: ranks need not be ready with their buckets in the same order.
        ready: gradients that are in ``flat``.
        reduced: ``flat`` holds the result of an earlier backward pass, to which this one adds.
        pending: the operation under way.
    """

    params: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    collectives: Collectives
    ready: set[int] = field(default_factory=set)
    reduced: bool = False
    pending: Pending[Tensor] | None = None


class GradientReducer:
    r"""Replaces gradients by their mean over all replicas.

    .. math:: g \leftarrow \frac{1}{n} \sum_i g_i

    Gradients move into flat buckets as the backward pass makes them, and a bucket leaves as soon as it is full, while
    the rest of the backward pass runs. `finish` waits for all; until then the parameters have no gradients, so that
    their memory serves the rest of the pass. A parameter that no replica used keeps ``None``; one that some used counts
    as zero on the others.

    Args:
        params: what is trained, in the order of the forward pass.
        collectives: a communicator off which many forks cost nothing.
        bucket_bytes: size of a bucket; 0 for one parameter in each.
        wire: the type that travels (``torch.float16`` halves the bytes). Default: that of the gradients.
        mean: whether gradients are scaled by one over the number of replicas, before they travel.
        all_reduce: how a bucket is reduced. Default: a sum.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        collectives: Collectives,
        *,
        bucket_bytes: int = 25 << 20,
        wire: torch.dtype | None = None,
        mean: bool = True,
        all_reduce: AllReduce = lambda collectives, flat: collectives.all_reduce(flat),
    ) -> None:
        self.enabled = True
        """False while gradients are accumulated: they stay where they are."""
        self._mean, self._collectives = mean, collectives
        self._all_reduce = all_reduce
        self._used: set[int] = set()
        self._place = {param: place for place, param in enumerate(params)}
        self._mask = collectives.fork("used")
        self._buckets = [
            self._bucket(group, collectives.fork(f"bucket{i}"), wire)
            for i, group in enumerate(_groups(list(reversed(params)), bucket_bytes))
        ]
        self._home = {param: (bucket, i) for bucket in self._buckets for i, param in enumerate(bucket.params)}
        self._hooks = [param.register_post_accumulate_grad_hook(self._take) for param in params]

    @property
    def _scale(self) -> float:
        return 1.0 / self._collectives.world_size if self._mean else 1.0

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def begun(self) -> bool:
        """Whether there are gradients that `finish` has yet to average."""
        return bool(self._used)

    def finish(self) -> None:
        """The backward pass is over: wait for the gradients, and give them to the parameters.

        Raises:
            CollectiveError: an operation failed or was late.
        """
        if not self.enabled:
            return
        for bucket in self._buckets:
            self._fill(bucket)
            if bucket.pending is None:
                bucket.pending = self._all_reduce(bucket.collectives, bucket.flat)
        mask = torch.zeros(len(self._place))
        mask[list(self._used)] = 1.0
        everyones = self._mask.all_reduce(mask)
        for bucket in self._buckets:
            self._wait(bucket)
        used = everyones.result().tolist()
        for bucket in self._buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if used[self._place[param]]:
                    param.grad = view.to(param.dtype)  # the view itself, where that is its type
            bucket.ready.clear()
            bucket.reduced = False
        self._used.clear()

    def _take(self, param: Tensor) -> None:
        """A gradient is complete."""
        if not self.enabled:
            return
        bucket, i = self._home[param]  # type: ignore[index]
        if bucket.pending is not None:  # a second backward pass before `finish`
            self._wait(bucket)
            bucket.flat.mul_(self._scale)  # equal on all ranks, it comes out again as it is now (by Adasum, too)
            bucket.ready.clear()
            bucket.reduced = True
        self._put(bucket, i)
        if len(bucket.ready) == len(bucket.params):
            bucket.pending = self._all_reduce(bucket.collectives, bucket.flat)

    def _put(self, bucket: _Bucket, i: int) -> None:
        param, view = bucket.params[i], bucket.views[i]
        assert param.grad is not None
        with torch.no_grad():
            if bucket.reduced or i in bucket.ready:
                view.add_(param.grad, alpha=self._scale)
            elif view.dtype == param.grad.dtype:
                torch.mul(param.grad, self._scale, out=view)
            else:
                view.copy_(param.grad * self._scale)
        param.grad = None
        bucket.ready.add(i)
        self._used.add(self._place[param])

    def _fill(self, bucket: _Bucket) -> None:
        """The parameters that this backward pass has not come to."""
        for i, param in enumerate(bucket.params):
            if i in bucket.ready:
                continue
            if param.grad is not None and param.requires_grad:  # of an earlier pass of this step
                self._put(bucket, i)
            elif not bucket.reduced:
                bucket.views[i].zero_()

    def _wait(self, bucket: _Bucket) -> None:
        assert bucket.pending is not None
        bucket.pending.result()
        bucket.pending = None

    @staticmethod
    def _bucket(params: list[nn.Parameter], collectives: Collectives, wire: torch.dtype | None) -> _Bucket:
        numel = sum(param.numel() for param in params)
        flat = torch.zeros(numel, dtype=wire or params[0].dtype, device=params[0].device)
        parts = flat.split([param.numel() for param in params])
        views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        return _Bucket(params, flat, views, collectives)


def _groups(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one type and device, up to the size; the first group is small, so that it leaves early."""
    groups: list[list[nn.Parameter]] = []
    size, limit = 0, min(bucket_bytes, 1 << 20)
    kind: Any = None
    for param in params:
        param_bytes = param.numel() * param.element_size()
        if groups and (param.dtype, param.device) == kind and size + param_bytes <= limit:
            groups[-1].append(param)
            size += param_bytes
        else:
            limit = bucket_bytes if groups else limit
            groups.append([param])
            kind, size = (param.dtype, param.device), param_bytes
    return groups
