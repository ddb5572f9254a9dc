r"""Lightning's averages of the model's weights (EMA, SWA), made equal on all ranks at every sync point.

Between sync points, each rank updates an average of its own replica's weights, :math:`e_i`. Such an average is linear
in the weights. So the mean of all ranks' averages equals the average that one would get from the mean of the replicas:

.. math:: \bar e = \sum_i w_i e_i, \qquad w_i \propto \text{updates of rank } i \text{ since the last sync point}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.replica import persistent_buffers
from lightning_async.trainer.namespace import callbacks_of


def averaged_models_of(trainer: Any) -> AveragedModels | None:
    """Return the weight averages (EMA, SWA) of the present training.

    Returns None for synchronous replicas, whose averages are equal anyway.
    """
    return vars(trainer.strategy).get("averaged_models")


def averages_of(trainer: Any) -> list[Any]:
    """Return the averaged models of the Trainer's `WeightAveraging` callbacks (EMA and others).

    The list is empty before Lightning 2.6, which has added these callbacks.
    """
    return [callback._average_model for callback in callbacks_of(trainer, "WeightAveraging")]


class AveragedModels:
    """The averages of `WeightAveraging` (EMA and others) and `StochasticWeightAveraging`, and what makes them equal.

    All ranks get equal averages when training begins, and at each sync point.
    """

    def __init__(self, trainer: Any, world: LightningCollectives) -> None:
        self._trainer = trainer
        self._world = world
        self._averages = averages_of(trainer)
        self._swa = callbacks_of(trainer, "StochasticWeightAveraging")
        self._agreed = [int(average.n_averaged) for average in self._averages]

    def make_equal(self, restored: bool) -> None:
        """Copy rank 0's averages to all ranks when training begins. All ranks call this together.

        The callbacks have made the averages from models that were not equal yet. ``restored`` says whether this rank
        has restored averages from a checkpoint. If any rank has, nothing is copied: all ranks have then restored their
        own averages, and keep them until the next sync point.
        """
        if not self._averages or any(self._world.gather_objects(restored)):
            return
        for average in self._averages:
            self._world.make_equal_([*average.parameters(), *persistent_buffers(average).values()])

    def updates(self) -> list[int]:
        """Return each average's number of updates on this rank since the last sync point.

        The number is the weight of this rank's average at the next sync point.
        """
        return [int(average.n_averaged) - agreed for average, agreed in zip(self._averages, self._agreed, strict=True)]

    def go_on(self, updates: list[int]) -> None:
        """Continue with averages that a checkpoint has restored.

        ``updates`` has each average's number of updates since the last sync point. If its length differs from the
        number of averages, all these numbers count as zero.
        """
        known = updates if len(updates) == len(self._averages) else [0] * len(self._averages)
        self._agreed = [int(average.n_averaged) - count for average, count in zip(self._averages, known, strict=True)]

    def before_sync_point(self) -> Callable[[], None]:
        """Prepare for a sync point; return a function that makes the averages equal once all ranks have arrived.

        All ranks call the returned function together.
        """
        # Copy the statistics now: the sync point's averaging of buffers may change them.
        own = [_batch_norms(callback) for callback in self._swa if self._updates_batch_norm(callback)]

        def at_sync_point() -> None:
            for layers in own:
                self._share_statistics(layers)
            for i, average in enumerate(self._averages):
                self._share(i, average)

        return at_sync_point

    def _share(self, index: int, average: Any) -> None:
        updates = float(average.n_averaged) - self._agreed[index]
        buffers = persistent_buffers(average.module).values() if average.use_buffers else ()
        tensors = [*average.module.parameters(), *buffers]
        if self._mean_(tensors, updates):
            self._largest_([average.n_averaged, *tensors])
        self._agreed[index] = int(average.n_averaged)

    def _updates_batch_norm(self, callback: Any) -> bool:
        """Return whether this is the epoch after the last averaged one, which only computes BatchNorm's statistics."""
        return bool(callback.momenta) and self._trainer.current_epoch == callback.swa_end + 1

    def _share_statistics(self, layers: list[tuple[Any, Tensor, Tensor, Tensor]]) -> None:
        """Replace BatchNorm's statistics over this replica's batches by the statistics over all replicas' batches."""
        for layer, mean, var, batches in layers:
            self._mean_([mean, var], float(batches))
            self._largest_([batches])
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
            layer.num_batches_tracked.copy_(batches)

    @torch.no_grad()
    def _mean_(self, tensors: list[Tensor], weight: float) -> bool:
        """Set floating-point tensors to their weighted mean over all ranks; return False if all weights are zero.

        All ranks call this together. ``weight`` is this rank's weight.
        """
        total = float(self._world.reduce(torch.tensor(weight, dtype=torch.float64), "sum"))
        if total == 0.0:
            return False
        share = weight / total
        for wide, group in _by_dtype([t for t in tensors if t.is_floating_point() or t.is_complex()]):
            flat = torch.cat([t.detach().reshape(-1).to(wide) for t in group])
            _scatter(self._world.reduce(flat * share if share else torch.zeros_like(flat), "sum"), group)
        return True

    @torch.no_grad()
    def _largest_(self, tensors: list[Tensor]) -> None:
        """Set each element of the integer tensors to its maximum over all ranks. All ranks call this together."""
        group = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
        if group:
            flat = torch.cat([t.detach().reshape(-1).to(torch.int64) for t in group])
            _scatter(self._world.reduce(flat, "max"), group)


def _batch_norms(callback: Any) -> list[tuple[Any, Tensor, Tensor, Tensor]]:
    """Return (layer, mean, variance, number of batches) for each BatchNorm layer that ``callback`` updates.

    The last three are copies of the layer's tensors on this rank.
    """
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return [(layer, *(getattr(layer, name).clone() for name in statistics)) for layer in callback.momenta]


def _by_dtype(tensors: list[Tensor]) -> Iterator[tuple[torch.dtype, list[Tensor]]]:
    """Group tensors by the type in which they are summed over ranks, which is at least fp32."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(torch.promote_types(tensor.dtype, torch.float32), []).append(tensor)
    yield from groups.items()


def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))
