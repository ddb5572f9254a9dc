"""Synchronous averaging of gradients without the engine, while the backward pass still runs.

`Backward` notices when a part of a backward pass is complete, as for gradients through the engine. There is no header
and no commit: Horovod negotiates each operation by itself, and can cancel none. So all ranks take every step, from the
first to the last one, and a failed step ends training on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async.comm.collectives import Collectives, Pending
from lightning_async.engine.backward import Backward, LayoutSpan, spans
from lightning_async.engine.fingerprint import is_finite, strided
from lightning_async.flat import FlatLayout

AllReduce = Callable[[Collectives, Tensor], Pending[Tensor]]


@dataclass
class _Bucket:
    """The gradients that travel in one operation."""

    params: list[nn.Parameter]  # consecutive parameters
    places: range  # their numbers
    flat: Tensor  # the buffer that travels
    views: list[Tensor]  # each gradient's place in the buffer
    # A fork of the bucket's own, because ranks may complete their buckets in different orders.
    collectives: Collectives
    pending: Pending[Tensor] | None = None  # the operation under way

    def wait(self) -> None:
        assert self.pending is not None
        self.pending.result()
        self.pending = None


class GradientReducer:
    r"""A replacement of gradients by their mean over all replicas.

    .. math:: g \leftarrow \frac{1}{n} \sum_i g_i

    Gradients move into flat buckets as the backward pass computes them. The reduction of a bucket begins as soon as
    the bucket is complete, while the backward pass continues. `finish` waits for all reductions. While a bucket is
    reduced, the gradients of its parameters are ``None``, so that the rest of the pass can use their memory.

    After a second backward pass, the sum of the earlier mean and the new gradients is averaged. The earlier mean is
    equal on all replicas, so averaging does not change it. A parameter that no replica used keeps ``None``. If only
    some replicas used a parameter, its gradient counts as zero on the others. If a mean is not finite, the gradients
    of all parameters are set to ``None`` on all replicas.

    Args:
        params: Parameters to train, in the order of the forward pass.
        collectives: Communicator, which is forked for each bucket, so forks must be cheap.
        bucket_bytes: Size of a bucket; 0 for one parameter in each.
        wire: Type in which gradients are sent (``torch.float16`` halves the bytes). Default: their own type.
        mean: Whether gradients are divided by the number of replicas before they are sent.
        all_reduce: Function that reduces a bucket. Default: a sum.
        on_drop: Function that is called when gradients were set to ``None`` because a mean was not finite. None: such
            gradients are kept, because a gradient scaler needs to see them.
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
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        self._params = list(params)
        self._mean = mean
        self._collectives = collectives
        self._all_reduce = all_reduce
        self._on_drop = on_drop
        self._used: set[int] = set()
        self._mask = collectives.fork("used")
        layout = FlatLayout(self._params)
        kinds = tuple((p.dtype, p.device) for p in self._params)
        parts = spans(layout, bucket_bytes, kinds) if self._params else []
        self._buckets = [
            self._bucket(span, collectives.fork(f"bucket{number}"), wire) for number, span in enumerate(parts)
        ]
        self._backward = Backward(self._params, layout, self._take, parts)
        self.enabled = True

    @property
    def enabled(self) -> bool:
        """Whether gradients are averaged. While False, this rank accumulates them in its parameters."""
        return self._backward.under_way

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        if not enabled:
            # Finish the part that has left. Averaging it again with later gradients returns it unchanged.
            if self.begun:
                self.finish()
            self._backward.give_up()
        elif not self._backward.under_way:
            # Nothing announces a pass: if users call `loss.backward()`, the hooks are the first to know.
            self._backward.begin()

    @property
    def _scale(self) -> float:
        return 1.0 / self._collectives.world_size if self._mean else 1.0

    def close(self) -> None:
        """Remove all hooks from the parameters."""
        self._backward.close()

    @property
    def begun(self) -> bool:
        return self._backward.begun

    def finish(self, absent: float = 0.0) -> None:
        """Wait until all gradients of the backward pass are averaged, and set the parameters' gradients to the means.

        If this replica had no backward pass, ``absent`` is the weight that it would have had in the mean, and the means
        are over the other replicas.
        Raises CollectiveError if an operation failed or was late.
        """
        if not self.enabled:
            return
        late = {i for i in self._backward.finish() if self._params[i].requires_grad}
        self._used |= late
        # One small sum tells all ranks which parameters any rank used, which buckets have late gradients, and what is
        # absent.
        mask = torch.zeros(len(self._params) + len(self._buckets) + 1)
        mask[-1] = 0.0 if self._used else absent
        mask[list(self._used)] = 1.0
        for number, bucket in enumerate(self._buckets, start=len(self._params)):
            mask[number] = float(not late.isdisjoint(bucket.places))
        everyones = self._mask.all_reduce(mask)
        for bucket in self._buckets:
            # Operations must end before their buffers are read, in the order in which they were submitted.
            bucket.wait()
        told = everyones.result().tolist()
        again = told[len(self._params) : -1]
        missing = told[-1]
        self._average_again([bucket for bucket, late in zip(self._buckets, again, strict=True) if late])
        if self._mean and 0.0 < missing < self._collectives.world_size:
            for bucket in self._buckets:
                bucket.flat.mul_(self._collectives.world_size / (self._collectives.world_size - missing))
        if self._on_drop is not None and not is_finite(bucket.flat for bucket in self._buckets):
            told = [0.0] * len(told)
            self._on_drop()
        for bucket in self._buckets:
            for place, param, view in zip(bucket.places, bucket.params, bucket.views, strict=True):
                if told[place]:
                    param.grad = view.to(param.dtype)
        self._used.clear()
        self._backward.begin()

    def _take(self, whole: Sequence[LayoutSpan]) -> None:
        first = self._backward.filled - len(whole)
        for bucket in self._buckets[first : self._backward.filled]:
            for i, (place, param) in enumerate(zip(bucket.places, bucket.params, strict=True)):
                if param.grad is not None and param.requires_grad:
                    self._put(bucket, i, add=False)
                    self._used.add(place)
                else:
                    bucket.views[i].zero_()
            bucket.pending = self._all_reduce(bucket.collectives, bucket.flat)

    def _average_again(self, buckets: Sequence[_Bucket]) -> None:
        """Average these buckets again, with gradients that any replica computed after the buckets were sent."""
        for bucket in buckets:
            # The mean is equal on all ranks, so averaging it once more returns it unchanged (also by Adasum).
            bucket.flat.mul_(self._scale)
            for i, param in enumerate(bucket.params):
                if param.grad is not None and param.requires_grad:
                    self._put(bucket, i, add=True)
            bucket.pending = self._all_reduce(bucket.collectives, bucket.flat)
        for bucket in buckets:
            bucket.wait()

    @torch.no_grad()
    def _put(self, bucket: _Bucket, i: int, add: bool) -> None:
        param = bucket.params[i]
        view = bucket.views[i]
        assert param.grad is not None
        gradient = strided(param.grad)
        if add:
            view.add_(gradient, alpha=self._scale)
        elif view.dtype == gradient.dtype:
            torch.mul(gradient, self._scale, out=view)
        else:
            view.copy_(gradient * self._scale)
        param.grad = None

    def _bucket(self, span: LayoutSpan, collectives: Collectives, wire: torch.dtype | None) -> _Bucket:
        params = self._params[span.first : span.last]
        flat = torch.zeros(span.end - span.start, dtype=wire or params[0].dtype, device=params[0].device)
        parts: Any = flat.split([param.numel() for param in params])
        views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        return _Bucket(params, range(span.first, span.last), flat, views, collectives)
