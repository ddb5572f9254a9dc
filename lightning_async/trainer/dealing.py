"""Ranks are lost: from the next epoch on those that are left have all samples among them."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

from torch.utils.data import DistributedSampler

from lightning_async.data.partitioned import PartitionedSampler, PartitionedStream, yet_to_be_numbered
from lightning_async.trainer.patches import Undo, replace, set_for_now, take_back, validation_interval
from lightning_async.trainer.protocols import Drifting

__all__ = ["Dealing"]

log = logging.getLogger(__name__)


class Dealing:
    """Loaders are made again where they are asked for and the number of ranks is another one.

    Lightning then gives each its part as at the start. A `DistributedSampler` of the user's is numbered anew.

    Args:
        strategy: where all ranks meet.
        trainer: its loops are patched.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._undo: list[Undo] = []

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        fit = self._trainer.fit_loop
        loops, wrap = (fit, fit.epoch_loop.val_loop), self._setup_data if self._strategy.shrinks else self._number_new
        return [
            *(replace(loop, "setup_data", lambda own, loop=loop: wrap(own, loop)) for loop in loops),
            partial(take_back, self._undo),
        ]

    def _setup_data(self, original: Any, loop: Any) -> Any:
        dealt_in = "", 0

        def setup_data() -> None:
            nonlocal dealt_in
            while True:
                now = self._division(dealt_in)
                if now != dealt_in:
                    for sampler in _distributed_samplers(loop):
                        _number(sampler, **self._trainer.strategy.distributed_sampler_kwargs)
                    self._number_partitions(loop)
                    loop._combined_loader = None
                dealt_in = now
                self._load(original, loop)
                if self._number_left_over(loop) | self._is_new(loop):
                    loop._combined_loader = None
                    self._load(original, loop)
                if self._division(now) == now:
                    break  # else ranks were lost meanwhile, and it is not known which numbers were read
            self._warn_of_others(loop)

        return setup_data

    def _number_new(self, original: Any, loop: Any) -> Any:
        """Where no rank can be lost, only samplers that were not told which part is theirs."""

        def setup_data() -> None:
            with yet_to_be_numbered():
                original()
            if self._is_new(loop):
                loop._combined_loader = None
                original()

        return setup_data

    def _load(self, original: Any, loop: Any) -> None:
        """More ranks may have fewer batches each than an epoch's validation by numbers of batches asks for."""
        try:
            with yet_to_be_numbered():
                original()
        except ValueError:
            trainer, survivors = self._trainer, self._strategy.survivors
            interval, batches = validation_interval(trainer), loop.max_batches
            grown = survivors is not None and trainer.world_size > survivors.started
            if loop is not trainer.fit_loop or not grown or not isinstance(interval, int) or interval <= batches:
                raise
            log.warning(
                "With %d ranks an epoch has %d batches for each: `val_check_interval=%d` is %d from here on.",
                trainer.world_size, batches, interval, batches,
            )  # fmt: skip
            self._undo.append(set_for_now(trainer, "val_check_interval", batches))
            loop._combined_loader = None
            original()

    def _division(self, before: tuple[str, int]) -> tuple[str, int]:
        """Differs where other ranks are there than ``before``. One that has just come deals with all, next time."""
        world = self._strategy.world
        if world is None or world.drifting:
            return before
        generation, survivors = world.generation(), self._strategy.survivors
        return "" if survivors is None else survivors.room, generation

    def _number_left_over(self, loop: Any) -> bool:
        """Samplers for all the ranks that this job began with, of whom some were lost in an earlier run."""
        strategy = self._trainer.strategy
        survivors = strategy.survivors
        began = 0 if survivors is None or not survivors.lost else survivors.started
        found = [each for each in _distributed_samplers(loop) if each.num_replicas == began]
        for sampler in found:
            _number(sampler, **strategy.distributed_sampler_kwargs)
        return len(found) > 0

    def _is_new(self, loop: Any) -> bool:
        """Whether there are partitions that did not know yet which part is this rank's; they do now."""
        found = any(not each.is_numbered for _, each in _partitions(loop))
        if found:
            self._number_partitions(loop)
        return found

    def _number_partitions(self, loop: Any) -> None:
        """By the numbers that ranks have for life, so that keys stay where they are."""
        kwargs, survivors = self._trainer.strategy.distributed_sampler_kwargs, self._strategy.survivors
        names = tuple(map(str, range(kwargs["num_replicas"]))) if survivors is None else survivors.names
        for loader, each in _partitions(loop):
            each.number(names, kwargs["rank"])
            loader._iterator = None  # of workers that stay: they have a copy of a stream as it was

    def _warn_of_others(self, loop: Any) -> None:
        """A sampler that was made for other ranks than these has parts that nobody takes."""
        world_size = self._trainer.strategy.world_size
        for sampler in _distributed_samplers(loop):
            if sampler.num_replicas > world_size:
                log.warning(
                    "A DistributedSampler is for %d replicas, and %d are left: nobody takes the other parts. Make it "
                    "with `num_replicas=trainer.world_size, rank=trainer.global_rank`, or leave it to Lightning.",
                    sampler.num_replicas, world_size,
                )  # fmt: skip


def _distributed_samplers(loop: Any) -> list[DistributedSampler[Any]]:
    """The user's own, each once, of the loaders that a loop has: of samples, or within one of batches."""
    loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
    of_loaders = [getattr(loader, name, None) for loader in loaders for name in ("sampler", "batch_sampler")]
    found = {id(sampler): sampler for sampler in (getattr(each, "sampler", each) for each in of_loaders)}
    return [sampler for sampler in found.values() if type(sampler) is DistributedSampler]


def _partitions(loop: Any) -> list[tuple[Any, PartitionedSampler | PartitionedStream]]:
    """Of the loaders that a loop has, each with its loader; one within a sampler of batches, or a dataset, too."""
    loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
    names = ("sampler", "batch_sampler", "dataset")
    of_loaders = [(loader, getattr(loader, name, None)) for loader in loaders for name in names]
    inner = [(loader, each) for loader, owner in of_loaders for each in getattr(owner, "__dict__", {}).values()]
    found = {id(each): (loader, each) for loader, each in (*of_loaders, *inner)}.values()
    return [(loader, each) for loader, each in found if isinstance(each, PartitionedSampler | PartitionedStream)]


def _number(sampler: DistributedSampler[Any], num_replicas: int, rank: int) -> None:
    if sampler.num_replicas == num_replicas:
        return
    whole: Any = sampler.dataset
    rest = len(whole) % num_replicas if sampler.drop_last else 0
    sampler.num_replicas, sampler.rank = num_replicas, rank
    sampler.num_samples = math.ceil((len(whole) - rest) / num_replicas)
    sampler.total_size = sampler.num_samples * num_replicas
