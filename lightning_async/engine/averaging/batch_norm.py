"""BatchNorm statistics of an averaged model, recomputed from recent batches.

The statistics of an average are not the average of statistics (as with `torch.optim.swa_utils.update_bn`; precise
BatchNorm, Wu and Johnson, 2021).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_async.engine.tensors import with_statistics
from lightning_async.engine.world import World

__all__ = ["RECENT_BATCHES", "recompute_batch_norm"]

RECENT_BATCHES = 16


def recompute_batch_norm(module: nn.Module, batches: list[Any], world: World) -> None:
    r"""Set every BatchNorm's statistics to the mean over the batches of all replicas.

    Each batch's input (its first element, where it is a tuple or list) passes through ``module.forward`` in training
    mode without gradients.

    Args:
        module: the model, equal on all ranks.
        batches: this rank's; other ranks may have more, fewer, or none.
        world: of all ranks, which call this together.
    """
    if not (layers := with_statistics(module)):
        return
    momenta, modes = [layer.momentum for layer in layers], {m: m.training for m in module.modules()}
    counters = [
        layer.num_batches_tracked.clone() if layer.num_batches_tracked is not None else None for layer in layers
    ]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative mean
    module.train()
    with torch.no_grad():
        for batch in batches:
            module(batch[0] if isinstance(batch, (tuple, list)) else batch)
    for mode_of, mode in modes.items():
        mode_of.training = mode
    weight = torch.tensor(float(len(batches)))
    total = world.reduce(weight, "sum").clamp(min=1.0)
    for layer, momentum, counter in zip(layers, momenta, counters, strict=True):
        layer.momentum = momentum
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            statistic.copy_(world.reduce(statistic * weight.to(statistic), "sum") / total.to(statistic))
        if counter is not None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.copy_(counter)
