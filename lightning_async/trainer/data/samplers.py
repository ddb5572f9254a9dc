"""Samplers, validations and metrics when the number of ranks changes.

`SamplerResize` divides all samples among the live ranks from the next epoch on. `UnevenEvaluation` lets ranks have
unequal parts of an evaluation, and gives the live ranks a lost rank's part of a validation. `ConsistentMetrics`
computes each metric over the same ranks. `resized` divides the rest of an epoch again for a resume with another number
of ranks.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torchmetrics import Metric

from lightning_async.data.partition import PartitionedSampler, PartitionedStream, yet_to_be_numbered
from lightning_async.data.random_states import of_another
from lightning_async.data.redistribution import (
    DataShard,
    Division,
    EachOnce,
    divide,
    in_the_last_step,
    inherited,
    is_of_torch,
    rest,
    told_of,
    unheard,
)
from lightning_async.data.stateful_loader import sources_of
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.loops.loop_state import LoggedValues
from lightning_async.trainer.namespace import (
    Undo,
    fabric,
    override,
    pytorch,
    set_for_now,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)


class SamplerResize:
    """Patches that make a loop's loaders again, at the loop's next `setup_data`, after the number of ranks has changed.

    Lightning then gives each rank its part, as at the start of the fit. A `DistributedSampler` that the user has made
    gets the new rank and number of replicas.
    """

    def __init__(self, strategy: StrategyView, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._undo: list[Undo] = []
        self._logged: set[str] = set()

    def install(self) -> list[Undo]:
        loops = (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop)
        wrap = self._setup_data if self._strategy.shrinks else self._number_new
        return [
            *(set_for_now(loop, "setup_data", wrap(loop.setup_data, loop)) for loop in loops),
            override(self._trainer._data_connector, "_prepare_dataloader", self._prepare),
            partial(take_back, self._undo),
        ]

    def _prepare(self, original: Any, loader: Any, shuffle: bool, mode: Any) -> Any:
        """Have Lightning divide a loader's samples among the ranks; warn if the ranks get no equal parts of them.

        Args:
            original: Lightning's method, which puts a distributed sampler into the loader.
            loader: The loader.
            shuffle: Whether the distributed sampler shuffles.
            mode: Lightning's name of what the loader is for.
        """
        if self._trainer.world_size == 1 or not isinstance(loader, DataLoader):
            return original(loader, shuffle, mode)
        dataset: Any = loader.dataset
        sampler: Any = loader.sampler
        if is_of_torch(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset):
            # Lightning knows torch's class, not torchdata's, of which each rank would draw an order of its own.
            vars(loader)["sampler"] = RandomSampler(dataset, generator=sampler.generator)
        if type(dataset).__module__ == "datasets.iterable_dataset" and not dataset._distributed:
            self._warn_once(
                "A stream of Hugging Face's `datasets` is not split among the ranks: each rank reads all of it. Use "
                "`datasets.distributed.split_dataset_by_node(stream, trainer.global_rank, trainer.world_size)`."
            )
        if isinstance(sampler, BatchSampler) and type(loader) is not DataLoader:
            self._warn_once(
                f"The sampler of a {type(loader).__name__} yields batches. Lightning gives each rank a part of them, "
                "and makes the loader again. If batches then have a dimension too many, divide the data yourself, with "
                "`Trainer(use_distributed_sampler=False)`."
            )
        return original(loader, shuffle, mode)

    def _warn_once(self, message: str) -> None:
        if message not in self._logged and self._trainer.is_global_zero:
            log.warning(message)
        self._logged.add(message)

    def _setup_data(self, original: Any, loop: Any) -> Any:
        dealt_in = "", 0

        def setup_data() -> None:
            nonlocal dealt_in
            # Ranks may be lost while the loaders are made. Then the numbers may be of either world, so all is repeated.
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
                    break
            self._warn_of_others(loop)

        return setup_data

    def _number_new(self, original: Any, loop: Any) -> Any:
        """Return a ``setup_data`` that tells new partitioned samplers and streams this rank and the number of ranks.

        It is for strategies that cannot lose ranks, where these numbers never change.

        Args:
            original: Lightning's ``setup_data`` of the loop.
            loop: Loop whose loaders are set up.
        """

        def setup_data() -> None:
            with yet_to_be_numbered():
                original()
            if self._is_new(loop):
                loop._combined_loader = None
                original()

        return setup_data

    def _load(self, original: Any, loop: Any) -> None:
        """Set up the loaders of ``loop`` by ``original``, Lightning's ``setup_data``.

        With more ranks, an epoch has fewer batches for each rank. If ranks have joined, and ``val_check_interval`` is
        now longer than the epoch, shorten it to the epoch.
        """
        try:
            with yet_to_be_numbered():
                original()
        except ValueError:
            # Lightning refuses an interval that is longer than the epoch. Only joined ranks justify a shorter one.
            trainer = self._trainer
            live_ranks = self._strategy.live_ranks
            interval = validation_interval(trainer)
            batches = loop.max_batches
            grown = live_ranks is not None and trainer.world_size > live_ranks.started
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
        """Return a key that changes whenever the set of ranks changes; loaders are made again if the key has changed.

        While replicas are asynchronous, the key stays ``before``, the previous one. A replica must not make its loaders
        again alone, because the other ranks would keep theirs.
        """
        # While replicas are asynchronous, a rank alone must not load anew, because the others would not.
        world = self._strategy.world
        if world is None or world.asynchronous:
            return before
        generation = world.generation()
        live_ranks = self._strategy.live_ranks
        return "" if live_ranks is None else live_ranks.room, generation

    def _number_left_over(self, loop: Any) -> bool:
        """Set the present rank and number of ranks in samplers that the user made for the number of ranks at the start.

        Such samplers are wrong once ranks are lost. Returns whether there was such a sampler.
        """
        strategy = self._trainer.strategy
        live_ranks = strategy.live_ranks
        began = 0 if live_ranks is None or not live_ranks.lost else live_ranks.started
        found = [each for each in _distributed_samplers(loop) if each.num_replicas == began]
        for sampler in found:
            _number(sampler, **strategy.distributed_sampler_kwargs)
        return len(found) > 0

    def _is_new(self, loop: Any) -> bool:
        found = any(not each.is_numbered for _, each in _partitions(loop))
        if found:
            self._number_partitions(loop)
        return found

    def _number_partitions(self, loop: Any) -> None:
        """Tell each partitioned sampler or stream the stable ids of all ranks, and which of these ranks this one is.

        A partition assigns samples by a key. With stable ids, the samples of a key stay on the same rank.
        """
        kwargs = self._trainer.strategy.distributed_sampler_kwargs
        live_ranks = self._strategy.live_ranks
        names = tuple(map(str, range(kwargs["num_replicas"]))) if live_ranks is None else live_ranks.names
        for loader, each in _partitions(loop):
            each.number(names, kwargs["rank"])
            # Persistent workers hold a copy of the stream with its old number.
            loader._iterator = None

    def _warn_of_others(self, loop: Any) -> None:
        """Warn of samplers that were made for more ranks than there are: nobody reads the missing ranks' parts."""
        world_size = self._trainer.strategy.world_size
        for sampler in _distributed_samplers(loop):
            if sampler.num_replicas > world_size:
                log.warning(
                    "A DistributedSampler is for %d replicas, and %d are left: nobody reads the other parts. Make it "
                    "with `num_replicas=trainer.world_size, rank=trainer.global_rank`, or leave it to Lightning.",
                    sampler.num_replicas, world_size,
                )  # fmt: skip


def _distributed_samplers(loop: Any) -> list[DistributedSampler[Any]]:
    """Return the `DistributedSampler` objects of a loop's loaders, each once, also those within batch samplers."""
    loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
    of_loaders = [getattr(loader, name, None) for loader in loaders for name in ("sampler", "batch_sampler")]
    found = {id(sampler): sampler for sampler in (getattr(each, "sampler", each) for each in of_loaders)}
    return [sampler for sampler in found.values() if type(sampler) is DistributedSampler]


def _partitions(loop: Any) -> list[tuple[Any, PartitionedSampler | PartitionedStream]]:
    """Return pairs of a loader and its partitioned sampler or stream.

    The sampler or stream may be inside a batch sampler or a dataset.
    """
    loaders = () if loop._combined_loader is None else loop._combined_loader.flattened
    names = ("sampler", "batch_sampler", "dataset")
    of_loaders = [(loader, getattr(loader, name, None)) for loader in loaders for name in names]
    inner = [(loader, each) for loader, owner in of_loaders for each in getattr(owner, "__dict__", {}).values()]
    found = {id(each): (loader, each) for loader, each in (*of_loaders, *inner)}.values()
    return [(loader, each) for loader, each in found if isinstance(each, PartitionedSampler | PartitionedStream)]


def _number(sampler: DistributedSampler[Any], num_replicas: int, rank: int) -> None:
    """Set a sampler's rank and number of replicas, and the sizes that depend on them, as its constructor does."""
    if sampler.num_replicas == num_replicas:
        return
    whole: Any = sampler.dataset
    rest = len(whole) % num_replicas if sampler.drop_last else 0
    sampler.num_replicas = num_replicas
    sampler.rank = rank
    sampler.num_samples = math.ceil((len(whole) - rest) / num_replicas)
    sampler.total_size = sampler.num_samples * num_replicas


class ConsistentMetrics:
    """Patches that compute each metric over one set of ranks, even if a rank is lost meanwhile.

    `self.log` and torchmetrics use several collectives for one metric, for example for a sum and a count. If one of
    three ranks is lost between them, the sum is over three ranks and the count over two. The metric is then computed
    again.
    """

    def __init__(self, strategy: StrategyView, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer

    def install(self) -> list[Undo]:
        if not self._strategy.shrinks:
            return []
        loop = self._trainer.fit_loop.epoch_loop
        metrics = [child for child in self._trainer.lightning_module.modules() if isinstance(child, Metric)]
        return [
            *(override(results, "_get_cache", self._cache) for results in (loop._results, loop.val_loop._results)),
            *(override(metric, "compute", partial(self._compute, metric)) for metric in metrics),
        ]

    def _cache(self, original: Any, logged: Any, on_step: bool) -> Any:
        return whole(self._strategy.world, lambda: original(logged, on_step), logged)

    def _compute(self, metric: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        return whole(self._strategy.world, lambda: original(*args, **kwargs), metric)


def whole(world: LightningCollectives | None, compute: Callable[[], Any], metric: Any) -> Any:
    """Return the result of ``compute``, which computes ``metric`` by collectives.

    If a rank is lost during the call, repeat it, so that the result is of one set of ranks.
    """
    if world is None or world.asynchronous:
        return compute()
    again = False

    def operation() -> Any:
        nonlocal again
        # The metric keeps the result of the broken attempt, and would return that.
        if again:
            metric._computed = None
        again = True
        return compute()

    return world.in_one_generation(operation)


class EachOnceOf(EachOnce, fabric("utilities.distributed").DistributedSamplerWrapper):
    """A part of what another sampler yields, each sample in the part of one rank."""


def split_evaluations(strategy: Any, trainer: Any) -> list[Undo]:
    """Patch a Trainer so that validation, test and prediction have each sample once, on any number of ranks.

    Lightning gives each rank equally many samples, for which it repeats some of them. Returns functions that undo this.
    """

    def resolve(original: Any, dataloader: Any, shuffle: bool, mode: Any = None) -> Any:
        is_split = trainer._data_connector._requires_distributed_sampler(dataloader)
        if not is_split or mode is pytorch("trainer.states").RunningStage.TRAINING:
            return original(dataloader, shuffle=shuffle, mode=mode)
        seed = int(os.getenv("PL_GLOBAL_SEED", "0"))
        options = {"shuffle": shuffle and not trainer.overfit_batches, "seed": seed}
        # A random order must be the same on all ranks, so it is drawn from the seed.
        is_plain = isinstance(dataloader.sampler, RandomSampler | SequentialSampler) or is_of_torch(
            dataloader.sampler, RandomSampler, SequentialSampler
        )
        kind: Any = EachOnce if is_plain else EachOnceOf
        source = dataloader.dataset if is_plain else dataloader.sampler
        return kind(source, **options, **strategy.distributed_sampler_kwargs)

    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    return [
        override(trainer._data_connector, "_resolve_sampler", resolve),
        *(undo for loop in loops for undo in UnevenEvaluation(strategy, trainer, loop).install()),
    ]


class UnevenEvaluation:
    """Patches of an evaluation loop whose ranks may have unequal numbers of batches, or none, of each loader.

    At the end of each loader, all ranks wait for each other. Meanwhile, a rank without batches lets the others gather
    and reduce values within their steps. Then all ranks log the same keys, and compute their values together.

    In a fit, the live ranks also validate the parts of lost ranks before metrics are computed. A lost rank's results
    are lost with it, so its whole part is validated again.

    Args:
        strategy: The strategy.
        trainer: The Trainer.
        loop: Lightning's loop, of validation, test or prediction.
    """

    def __init__(self, strategy: StrategyView, trainer: Any, loop: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._loop = loop
        self._predicts = loop is trainer.predict_loop
        self._shares: dict[str, list[list[DataShard]]] = {}
        self._loader = 0
        """Number of the loader that is evaluated."""
        self._store: Callable[[], None] = lambda: None
        """Lightning's method that computes and stores the values that were logged of a loader."""

    def install(self) -> list[Undo]:
        loop = self._loop
        undo = [
            override(loop, "setup_data", self._set_up),
            override(loop, "on_run_start", self._begin),
            override(loop, "_predict_step" if self._predicts else "_evaluation_step", self._step),
            override(loop, "on_run_end", self._end),
        ]
        if not self._predicts:
            self._store = loop._store_dataloader_outputs
            # Lightning calls this once for each loader of which this rank has batches.
            undo.append(set_for_now(loop, "_store_dataloader_outputs", lambda: None))
        return undo

    def _set_up(self, original: Any) -> None:
        """Let a rank without any batch take part, if other ranks have some: Lightning would leave it out."""
        before = self._loop._combined_loader
        original()
        world = self._strategy.world
        if world is None or world.asynchronous or self._loop._combined_loader is before:
            return
        limits = self._loop.max_batches if self._predicts else self._loop._max_batches
        if any(world.gather_objects(sum(limits) > 0)) and not sum(limits):
            limits[:] = [1] * len(limits)  # as upper limits

    def _begin(self, original: Any) -> None:
        self._shares = {}
        self._loader = 0
        world = self._strategy.world
        sync_points = self._strategy.sync_points
        is_lasting = self._strategy.shrinks and sync_points is not None and self._loop._is_sequential
        if world is not None and sync_points is not None and is_lasting and not world.asynchronous:
            mine: list[Any] = [sync_points.name, [list(each) for each in self._mine()]]
            told = world.gather_objects(mine)
            self._shares = {name: [[DataShard(*each)] for each in shares] for name, shares in told}
            columns = zip(*([one for (one,) in each] for each in self._shares.values()), strict=True)
            for column in columns:
                for number, each in enumerate(unheard(column)):
                    self._shares.setdefault(f"(unheard of, {number})", []).append([each])
        original()

    def _step(self, original: Any, batch: Any, batch_idx: int, dataloader_idx: int, *args: Any) -> None:
        self._end_loaders(dataloader_idx)
        if self._strategy.world is not None:
            self._strategy.world.begin_steps()
        original(batch, batch_idx, dataloader_idx, *args)

    def _end(self, original: Any) -> Any:
        is_sequential = self._predicts or self._loop._is_sequential
        self._end_loaders(self._loop.num_dataloaders if is_sequential else 1)
        return original()

    def _end_loaders(self, number: int) -> None:
        """End all loaders before loader ``number`` together with the other ranks, also those without a batch here."""
        while self._loader < number:
            world = self._strategy.world
            if world is not None and not world.asynchronous:
                self._finish(world)
            if not self._predicts:
                several = self._loop._is_sequential and self._loop.num_dataloaders > 1
                self._loop._results.dataloader_idx = self._loader if several else None
                self._store()
            self._loader += 1

    def _finish(self, world: LightningCollectives) -> None:
        world.finish_steps()
        sync_points = self._strategy.sync_points
        # Repeat, because more ranks may be lost while the parts of others are validated.
        while self._shares and sync_points is not None and self._take_over(world, sync_points.name):
            world.finish_steps()
        results = {} if self._predicts else self._loop._results
        # Logged values are computed together, one after the other.
        keys = [key for key, result in results.items() if not result.has_reset]
        if len(set(map(tuple, world.gather_objects(keys)))) > 1:
            logged = LoggedValues(self._trainer, results)
            for state in world.gather_objects({"results": logged.take_results()}):
                logged.put_missing(state)

    def _mine(self) -> Iterator[DataShard]:
        """Return this rank's part of each validation loader."""
        for loader, batches in zip(self._loop._combined_loader.flattened, self._loop.max_batches, strict=True):
            told, count = told_of(loader)
            known = count > 0 and batches != float("inf")
            yield DataShard(0, int(batches) if known else 0, 0, False, [(told if known else None, count)])

    def _take_over(self, world: LightningCollectives, name: str) -> bool:
        """Validate lost ranks' parts of the loaders that were validated so far; return whether there were any.

        All ranks call this together. ``name`` is this rank's name in headers.
        """
        there = dict.fromkeys(world.gather_objects(name), 0)
        lost = [each for each in self._shares if each not in there]
        found = False
        for number in range(self._loader + 1):
            left = [(share, 0) for each in lost for share in self._shares[each][number]]
            for each in lost:
                self._shares[each][number] = []
            dealt = inherited(left, there)
            if left and not dealt and any(share.end for share, _ in left):
                self._tell(lost)
            if name in dealt:
                done = sum(int(share.end) - share.first for share in self._shares[name][number])
                self._validate(dealt[name], number, done)
            for each, share in dealt.items():
                self._shares[each][number].append(share)
            found |= bool(dealt)
        return found

    def _tell(self, lost: list[str]) -> None:
        log.warning(
            "The part of rank(s) %s is missing in a validation of epoch %d: others can take it over if it is a "
            "DataLoader's of a map-style dataset with a DistributedSampler, Lightning's or torch's.",
            ", ".join(lost), self._trainer.current_epoch,
        )  # fmt: skip

    def _validate(self, share: DataShard, number: int, done: int) -> None:
        loader = self._loop._combined_loader.flattened[number]
        (source,) = sources_of([loader])
        source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": share.loaders[0][0]})
        try:
            for batch_idx, batch in enumerate(loader, done):
                self._loop._evaluation_step(batch, batch_idx, number, None)
        finally:
            # The loader serves later validations, of which this rank has its usual part.
            source.detach()
            loader._iterator = None


def resized(
    states: Sequence[dict[str, Any]],
    rank: int,
    world_size: int,
    own: dict[str, Any] | None = None,
    division: Division = divide,
) -> dict[str, Any]:
    """Return the state from which ``rank`` of ``world_size`` resumes, made from the states of all ranks at the save.

    Each sample of the epoch is still trained on once. Accumulated gradients are dropped. If the ranks' positions are
    unknown, the epoch's data begins again, with a warning.

    Args:
        states: States of all ranks at the save, by rank.
        rank: This rank.
        world_size: Number of ranks that resume.
        own: State of this rank at the save. None: use another rank's state, a different one for each rank if there are
            enough.
        division: Function that divides the rest of the epoch. Default: evenly, with some samples repeated.
    """
    base = own or states[rank % len(states)]
    # Ranks that were lost before the save have no state, but their committed positions are known.
    lost, left = _lost(base["unsaved"].get("left", []), len(states))
    loaders = [[lost[place]] if place in lost else state["loaders"] for place, state in enumerate(states)]
    positions = [
        _divided(list(of_ranks), rank, world_size, len(base["loaders"]), division)
        for of_ranks in zip(*loaders, strict=True)
    ]
    random = base["random"] if own or rank < len(states) else of_another(base["random"], rank)
    unsaved = {**base["unsaved"], "gradients": {}, "unstepped": [], "left": left}
    return {**base, "loaders": positions, "random": random, "unsaved": unsaved, "resized": True}


def _lost(left: list[Any], ranks: int) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Split ``left`` into the lost ranks whose position is known, and all other entries.

    Returns the position of each such rank in its loader, by rank, and the list of the other entries.

    Args:
        left: For each rank that was lost within the epoch, a list of its stable id, its share, and the number of its
            first uncommitted batch.
        ranks: Number of ranks among which the data was divided.
    """
    known = {}
    others = []
    for entry in left:
        share = DataShard(*entry[1])
        begin = entry[2]
        told = share.loaders[0][0] if share.is_known and len(share.loaders) == 1 else None
        if told is None or told["kind"] != "distributed" or told["num_replicas"] != ranks:
            others.append(entry)
            continue
        taken = share.skipped + max(begin, share.first) - share.first
        known[told["rank"]] = {"taken": taken, "made": 0, "drawn": {}, "share": told}
    return known, others


def batches_left(state: dict[str, Any]) -> int | None:
    """Return the number of batches left in an epoch whose data was divided again; None for any other epoch."""
    told = state["loaders"][0].get("share") if state["loaders"] else None
    if not told or told["kind"] != "given":
        return None
    return -(-len(told["indices"]) // told["batch_size"]) - state["loaders"][0]["taken"]


def weight_of_the_last(state: dict[str, Any], rank: int, world_size: int) -> float:
    """Return the weight of a rank's last batch of the epoch: its number of samples, relative to the ranks' mean.

    The last batches may be unequal because `deal_steps` has divided the samples.
    """
    told = state["loaders"][0].get("share") if state["loaders"] else None
    if not told or not told.get("left"):
        return 1.0
    counts = in_the_last_step(told["left"], world_size, told["batch_size"])
    return counts[rank] * world_size / sum(counts)


def _divided(
    positions: list[dict[str, Any]], rank: int, world_size: int, loaders: int, division: Division
) -> dict[str, Any]:
    positions = [each for each in positions if "taken" in each] or positions[:1]
    # On all ranks the epoch's data is at its end, or has not begun.
    if "taken" not in positions[0]:
        return positions[0]
    kinds = {(position.get("share") or {}).get("kind") for position in positions}
    if loaders > 1 or kinds & {None, "stream"}:
        log.warning(
            "The checkpoint is of %d ranks, and %d go on, but it is unknown which samples of this epoch were seen: "
            "its data begins again. One DataLoader of a map-style dataset with torch's samplers can go on.",
            len(positions), world_size,
        )  # fmt: skip
        return {"ended": False, "dataset": None}
    told = positions[0]["share"]
    left = rest(positions)
    # The ranks' loaders may have unequal batch sizes; the mean keeps the number of steps.
    sizes = [position["share"]["batch_size"] for position in positions]
    size = -(-sum(sizes) // len(sizes))
    full = told.get("full_batches", False)
    # `DataLoader(drop_last=True)` keeps full batches only.
    if full:
        left = left[: len(left) - len(left) % (size * world_size)]
    indices = torch.tensor(division(left, rank, world_size, size), dtype=torch.int64)
    given = {
        "kind": "given", "length": told["length"], "batch_size": size, "full_batches": full, "indices": indices,
        "left": len(left),
    }  # fmt: skip
    sizes = {name: positions[0][name] for name in ("batch_size", "length") if name in positions[0]}
    return {"taken": 0, "made": 0, "drawn": {}, "share": given, **sizes}
