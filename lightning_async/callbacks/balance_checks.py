"""What unequal batches cannot go together with is refused, by name."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_async.data.partitioned import PartitionedSampler
from lightning_async.rules import Synchronous
from lightning_async.trainer.epoch_shares import EpochShares

__all__ = ["check_bounds", "check_loaders", "check_trainer", "steps_together"]


def steps_together(strategy: Any) -> bool:
    """Whether each rank comes to each step after as many batches of its own as all others."""
    return strategy.in_step if hasattr(strategy, "accumulate") else isinstance(strategy.schedule, Synchronous)


def check_trainer(callback: Any, trainer: Any) -> None:
    """Whether batches may be of unequal size.

    Raises:
        ValueError: they may not; says why, and what to do.
    """
    owner, strategy = type(callback).__name__, trainer.strategy
    name = type(strategy).__name__
    if not hasattr(type(strategy), "averager") or getattr(strategy, "served", False):
        raise ValueError(
            f"`{owner}` is for strategies that weight what ranks exchange by samples, and `{name}` does not: use "
            "`AsyncAveragingStrategy(schedule=Synchronous())`, which steps as DDP does, or `AsyncGradientStrategy`."
        )
    if (weighting := strategy.config.weighting) != "samples":
        raise ValueError(f"`{name}(weighting={weighting!r})` beside `{owner}`: take 'samples', or leave `{owner}` out.")
    if any(hasattr(each, "accumulation_steps") for each in trainer.callbacks):
        raise ValueError(
            f"`AdaptiveGradientAccumulation` beside `{owner}`: both say how many samples a step has. Leave it out, and "
            f"take `{owner}(global_batch_size=...)`."
        )
    if trainer.overfit_batches:
        raise ValueError(f"`Trainer(overfit_batches={trainer.overfit_batches})` beside `{owner}`: leave one out.")


def check_loaders(owner: str, trainer: Any) -> None:
    """Whether the samples of this rank's loaders can be dealt out anew, before the first batch.

    Raises:
        ValueError: they cannot; says why.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    loader, why = loaders[0], ""
    if len(loaders) != 1:
        why = f"there are {len(loaders)} train dataloaders"
    elif type(trainer.fit_loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        why = "`training_step(dataloader_iter)` fetches batches itself"
    elif not isinstance(loader, DataLoader):
        why = f"the train dataloader is a {type(loader).__name__}, and no DataLoader"
    elif loader.batch_sampler is None:
        why = "the train dataloader makes no batches (`batch_size=None`)"
    elif type(loader.batch_sampler) is not BatchSampler:
        why = f"its batches are made by a {type(loader.batch_sampler).__name__}"
    elif isinstance(loader.sampler, PartitionedSampler):
        why = "a PartitionedSampler says which samples are whose"
    elif not EpochShares(trainer).mine().is_known:
        source = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
        why = f"which samples a {type(source).__name__} gives to which rank is not known"
    if why:
        raise ValueError(
            f"`{owner}`: {why}. It deals out the samples of one torch DataLoader of a map-style dataset, with the "
            "DistributedSampler that Lightning gives it. `BalancedWindows` and `DyLU` balance by batches instead."
        )


def check_bounds(callback: Any, ranks: int, total: int) -> None:
    """Whether there is room for the samples of a step.

    Raises:
        ValueError: there is not.
    """
    least, most = callback.minimum * ranks, None if callback.maximum is None else callback.maximum * ranks
    if least > total or (most is not None and most < total):
        raise ValueError(
            f"`{type(callback).__name__}(minimum={callback.minimum}, maximum={callback.maximum})`: {ranks} ranks are "
            f"to take {total} samples in a step, {total / ranks:g} each on average."
        )
