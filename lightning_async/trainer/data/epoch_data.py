"""The batches of the epoch under way that each rank has, and who trains on those of lost ranks.

`EpochAssignment` holds what each rank has of the epoch, and how far it is. With it `LostRankData` has the live ranks
train, at the end of the epoch, on what lost ranks had left of it, and `JoinerData` deals out the rest of the epoch when
a rank joins. `EmptyShards` keeps a rank without data in every epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from lightning_async.data.redistribution import (
    DataShard,
    Joined,
    before,
    inherited,
    joined,
    stream_of,
    streamed,
    told_of,
    unheard,
)
from lightning_async.data.stateful_loader import Source, sources_of
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.shared_state import Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.trainer.data.join import end_as_others, how_it_ended
from lightning_async.trainer.loops.loop_state import LoggedValues
from lightning_async.trainer.loops.lr_schedules import LearningRates
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    override,
    set_for_now,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)

_PHASES = 2**9
_BATCHES = 2**28
"""Bounds of a place's parts: how often an epoch is dealt out anew, and its batches; with its number, 53 bits."""


class EpochAssignment:
    """The part that each rank has of the epoch under way, and how far it is, as this rank knows; by stable ids."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.phase = 0
        self.first: DataShard | None = None
        """Part that this rank begins with, if it joins within an epoch."""
        self.begins = False
        """This rank comes within an epoch of streams, and begins its own."""
        self.at_end = False
        self.called: Callable[[str], str] = str
        """Returns the stable id of a rank, by the name that headers have for it."""
        self.forget()

    def forget(self) -> None:
        self.known = False
        """This rank was there when the epoch began, or was told since; else the rest says nothing."""
        self.shares: Mapping[str, DataShard] = {}
        self.places: dict[str, float] = {}
        self.dealt: list[int] = []
        """Number of this rank's part since one joined within the epoch, and of all parts."""
        self.came = False
        self.has_none = False
        """This rank has joined within the epoch, and has no part of it."""
        self._gone: set[str] = set()
        self._sync_points: SyncPoints | None = None

    def deal(self, shares: Mapping[str, DataShard]) -> None:
        self.shares = shares
        self.phase += 1
        self._gone = set()

    def take_part(self, name: str) -> None:
        """Note this rank's part of what was dealt, as checkpoints say; or none, where that was short."""
        names = list(self.shares)
        self.has_none = not self.known or name not in names
        self.dealt = [] if self.has_none else [names.index(name), len(names)]

    def plain(self) -> dict[str, list[Any]]:
        return {name: list(share) for name, share in self.shares.items()}

    def gone(self) -> list[str]:
        """Return those that were lost since it was dealt out, whoever has come back by their names."""
        self._gone |= self.shares.keys() - set(self._trainer.strategy.live_ranks.names)
        return sorted(self._gone & self.shares.keys())

    def place(self, batch: int) -> float:
        """Return the place of a rank at this batch, which grows over phases and epochs."""
        return self._now() * _BATCHES + batch

    def number(self, name: str) -> int:
        """Return the number of the first batch that a rank has not committed, of what it has now."""
        now, number = divmod(int(self.places.get(name, 0.0)), _BATCHES)
        return number if now == self._now() else 0

    def _now(self) -> int:
        return self._trainer.current_epoch * _PHASES + min(self.phase, _PHASES - 1)

    def learn_from(self, sync_points: SyncPoints) -> None:
        """Learn the places that headers tell; where averaging goes on with joining ranks, other sync points do."""
        if self._sync_points is not None:
            self.learn({self.called(name): place for name, place in self._sync_points.places.items()})
        if sync_points is not self._sync_points:
            self._sync_points = sync_points
            self.called = self._trainer.strategy.live_ranks.called
            self.learn({self.called(name): place for name, place in sync_points.places.items()})

    def learn(self, places: Mapping[str, float]) -> None:
        for name, place in places.items():
            self.places[name] = max(place, self.places.get(name, 0.0))

    @property
    def streams(self) -> bool:
        """Whether this rank's loaders have streams, of which nobody can tell what is left."""
        loaders = self._trainer.fit_loop._combined_loader.flattened
        return all(isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)

    def whole(self) -> DataShard:
        loaders = self._trainer.fit_loop._combined_loader.flattened
        return DataShard(0, 0, 0, False, [told_of(loader) for loader in loaders])

    def mine(self) -> DataShard:
        trainer = self._trainer
        fit = trainer.fit_loop
        first = fit.epoch_loop.batch_progress.current.ready
        anew = trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting  # as in Lightning
        skipped = 0
        loaders = []
        own = 0
        for loader in fit._combined_loader.flattened:
            told, count = told_of(loader)
            source = follower(loader) if count else None
            if source is not None and not anew:
                position = source.position(before=False, ended=False)
                told = position.get("share")
                skipped = position.get("taken", 0)
                if told is not None and told["kind"] == "given":
                    own = count = -(-len(told["indices"]) // told["batch_size"])
            elif told is None and math.isinf(fit.max_batches) and (told := stream_of(loader)) is not None:
                found = None if anew else follower(loader)
                position = {} if found is None else found.position(before=True, ended=False)  # one is held
                told = position.get("share") or told
                skipped = position.get("taken", 0)
            loaders.append((told, count))
        # How much there is, nobody knows; or there is none.
        unsized = first + any(told is None or told["kind"] == "stream" for told, _ in loaders)
        end = unsized if math.isinf(fit.max_batches) else fit.max_batches
        if own and trainer.limit_train_batches == 1.0:  # smaller batches may be more than a loader's own
            end = max(end, first + own - skipped)
        return DataShard(first, max(first, end), skipped, fit._combined_loader._mode == "max_size_cycle", loaders)


def lost_rank_data_of(trainer: Any) -> LostRankData | None:
    return vars(trainer.strategy).get("lost_rank_data")


class LostRankData:
    """Trains on each sample of an epoch once, in work that a round has merged, whoever is lost meanwhile.

    At the start of an epoch all ranks tell each other what they have of it, and with each message how far they are. At
    its end, at the sync point, those that are there deal out what the lost had not shared, and go on with the epoch;
    joining ranks that have had nothing of it, too.
    """

    def __init__(self, strategy: StrategyView, trainer: Any, rates: LearningRates) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._rates = rates
        self.epoch = EpochAssignment(trainer)
        self.taken_up: list[Any] = []
        """The value of `left` for the epoch that begins next, where this fit goes on from a checkpoint."""

    def install(self) -> list[Undo]:
        if not self._strategy.shrinks:
            return []
        vars(self._trainer.strategy)["lost_rank_data"] = self  # for checkpoints
        return [
            override(self._trainer.fit_loop.epoch_loop, "on_run_start", self._begin),
            override(self._trainer.strategy, "on_train_batch_start", self._begin_batch),
            lambda: vars(self._trainer.strategy).pop("lost_rank_data", None),
        ]

    def start_over(self) -> None:
        self.epoch.forget()

    def left(self) -> list[Any]:
        epoch = self.epoch
        return [[name, list(epoch.shares[name]), epoch.number(name)] for name in epoch.gone()] if epoch.known else []

    def rest(self) -> bool:
        """Train on what the lost have left of the epoch, at the sync point that ends it; return whether any was."""
        world = self._strategy.world
        sync_points = self._strategy.sync_points
        epoch = self._trainer.fit_loop.epoch_loop
        if not self._strategy.shrinks or world is None or sync_points is None:
            return False
        self.epoch.learn_from(sync_points)
        stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        goes_on = not stops and epoch.global_step != epoch.max_steps
        name = self.epoch.called(sync_points.name)
        ready = epoch.batch_progress.current.ready
        came = self.epoch.came
        mine: list[Any] = [name, self.epoch.known, goes_on, ready, came, self.epoch.places]
        told = world.gather_objects(mine)
        self._log_alike(world, [came for *_, came, _ in told])
        there = [each for each, knows, *_ in told if knows]
        if not there:
            return False
        takers = {each: ready for each, knows, goes_on, ready, *_ in told if goes_on}
        if len(there) < len(told) and not self._introduce(world, is_first=name == there[0] and self.epoch.known):
            takers = {each: ready for each, ready in takers.items() if each in there}
        for *_, places in told:
            self.epoch.learn(places)
        lost = {each: share for each, share in self.epoch.shares.items() if each not in there}
        self._tell(lost)
        left = [(share, self.epoch.number(each)) for each, share in lost.items()]
        held = {each: (self.epoch.shares[each], ready) for each, ready in takers.items() if each in self.epoch.shares}
        self.epoch.deal((inherited(left, takers) or streamed(left, held)) if takers else {})
        if not self.epoch.shares:
            return False
        self.epoch.take_part(name)
        log.info(
            "Epoch %d goes on with what %s had not shared of it: %s batches.",
            self._trainer.current_epoch, ", ".join(f"rank {each}" for each in lost),
            " and ".join(
                "a stream's" if math.isinf(share.end) else str(share.end - share.first)
                for share in self.epoch.shares.values()
            ),
        )  # fmt: skip
        if self.epoch.known and name in self.epoch.shares:
            self.epoch.at_end = True
            try:
                train_on(self._trainer, self.epoch.shares[name])
            finally:
                self.epoch.at_end = False
        return True

    def _log_alike(self, world: LightningCollectives, came: list[bool]) -> None:
        """Tell those that joined within the epoch what their part of it was too short to log."""
        if any(came) and not all(came):
            first = came.index(False)
            values = LoggedValues(self._trainer)
            logged = world.broadcast(values.take() if world.rank == first else None, first)
            if self.epoch.came and logged is not None:
                values.put_missing(logged)

    def _introduce(self, world: LightningCollectives, is_first: bool) -> bool:
        """Tell ranks that do not know it what each has of this epoch; return whether any rank could."""
        mine: list[Any] = [self.epoch.phase, self.epoch.plain()] if is_first else []
        everyones = world.gather_objects(mine)
        told = next((each for each in everyones if each), None)
        if told is None:
            return False
        own_end = how_it_ended(self._trainer, self._rates.stepped) if mine else None
        ended = world.broadcast(own_end, everyones.index(told))
        if not self.epoch.known:
            self.epoch.phase = told[0]
            self.epoch.known = True
            self.epoch.shares = {each: DataShard(*share) for each, share in told[1].items()}
            if ended is not None:
                end_as_others(self._trainer, ended)
                self._rates.stepped.update(ended["stepped"])
        return True

    def _begin(self, original: Any, data_fetcher: Any) -> None:
        world = self._strategy.world
        sync_points = self._strategy.sync_points
        if self.epoch.first is None and not self.epoch.begins:  # else it is under way, and this rank has been told
            self.epoch.forget()
            if world is not None and sync_points is not None and not world.asynchronous:
                self._tell_all(world, sync_points)
        original(data_fetcher)

    def _tell_all(self, world: LightningCollectives, sync_points: SyncPoints) -> None:
        epoch = self.epoch
        epoch.learn_from(sync_points)
        mine: list[Any] = [epoch.called(sync_points.name), list(epoch.mine()), self.taken_up]
        told = world.gather_objects(mine)
        self.taken_up = []
        shares = {name: DataShard(*each) for name, each, _ in told}
        for number, each in enumerate(unheard(shares.values())):
            shares[f"(lost as the epoch began, {number})"] = each
        there = [DataShard(*each) for _, each, _ in told]
        left_at: dict[str, int] = {}
        for name, each, begin in (left for *_, of_rank in told for left in of_rank):
            lost = f"{name}, lost before a checkpoint"
            shares[lost] = before(DataShard(*each), there)
            left_at[lost] = begin
        epoch.known = True
        epoch.phase = 0
        epoch.shares = shares  # whole at once: other threads read it
        epoch.places |= {lost: epoch.place(begin) for lost, begin in left_at.items()}

    def _begin_batch(self, original: Any, batch: Any, batch_idx: int) -> None:
        original(batch, batch_idx)
        sync_points = self._strategy.sync_points
        # Where it accumulates, its gradients are yet to be stepped with.
        if sync_points is not None and not self._trainer.fit_loop.epoch_loop._should_accumulate():
            self.tell_place(sync_points)

    def tell_place(self, sync_points: SyncPoints) -> None:
        """Tell that what is sent next holds all that this rank has done, the batch under way included."""
        self.epoch.learn_from(sync_points)
        self.epoch.gone()
        sync_points.tell_place(self.epoch.place(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready))

    def _tell(self, lost: dict[str, DataShard]) -> None:
        for name, each in lost.items():
            if not each.is_known and not each.is_of_stream and each.first < each.end:
                log.warning(
                    "What rank %s had of epoch %d and did not train on is missing in it, from its batch %d on: with a "
                    "DataLoader of a map-style dataset and a DistributedSampler, Lightning's or torch's, or of a "
                    "PartitionedStream itself without a limit of batches, others could tell which samples these are.",
                    name, self._trainer.current_epoch, self.epoch.number(name),
                )  # fmt: skip


class _Place(NamedTuple):
    """The place of a rank, by stable id, as another one joins; ``comes`` says that it is the joining one.

    Args:
        is_within: it can go on with another part of the epoch.
        ready: the number of its next batch.
        lengths: of the datasets of the joining rank's loaders.
        streams: these are streams, see `EpochAssignment`.
        stepped: of each scheduler that follows all ranks' steps, those that it has taken.
    """

    name: str
    comes: bool
    is_within: bool
    epoch: int
    ready: int
    lengths: list[int]
    streams: bool
    places: dict[str, float]
    stepped: dict[int, int]


class JoinerData:
    """Deals out the rest of an epoch among all ranks when one joins within it."""

    def __init__(self, strategy: StrategyView, trainer: Any, epoch: EpochAssignment, rates: LearningRates) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._epoch = epoch
        self._rates = rates
        self._until_end: list[Undo] = []
        self._joined: Joined = {}
        self._follows = False
        """This rank has joined within an epoch of streams, and ends it with the others."""

    def install(self) -> list[Undo]:
        if not self._strategy.shrinks:
            return []
        loop = self._trainer.fit_loop.epoch_loop
        return [
            override(loop, "on_run_start", self._begin),
            override(loop, "on_advance_end", self._after_batch),
            override(loop, "run", self._run),
        ]

    def prepare_for(self) -> None:
        self._joined = joined(list(self._epoch.shares.values()))

    def told(self) -> list[Any]:
        return [self._epoch.phase, self._epoch.plain()]

    def place(self, name: str, comes: bool) -> list[Any]:
        """Return where this rank is, which may be joining: all stand at a sync point, and it holds until that opens."""
        if (sync_points := self._strategy.sync_points) is not None:
            self._epoch.learn_from(sync_points)
        return list(self._place(name, comes))

    def deal(self, name: str, places: list[list[Any]], told: list[Any] | None) -> None:
        """Deal out what each has left, which is known to the batch, now that one has joined.

        Where a rank is not between two steps of the epoch, or it cannot be told what is left, the joining rank has its
        part from the next epoch on; of streams it begins its own, until the others' end. It is ``told`` what a live
        rank knows.
        """
        sync_points = self._strategy.sync_points
        epoch = self._epoch
        if not self._strategy.shrinks or sync_points is None:
            return
        epoch.learn_from(sync_points)
        epoch.has_none |= told is not None
        all_ = [_Place(*each) for each in places]
        there = [each for each in all_ if not each.comes]
        lengths = [each.lengths for each in all_ if each.comes]
        if there and told is not None and all(each.streams for each in all_):
            epoch.phase = told[0]
            epoch.shares = _shares(told[1])
            epoch.known = True
            epoch.begins = True
            epoch.came = True
            epoch.has_none = False
            self._rates.stepped.update(there[0].stepped)
        epochs = {each.epoch for each in there}
        if len(epochs) != 1 or not lengths or not all(each.is_within for each in all_):
            return
        phase, shares = (epoch.phase, epoch.shares) if told is None else (told[0], _shares(told[1]))
        if not all(share.is_known and share.lengths == lengths[0] for share in shares.values()):
            return
        epoch.phase = phase
        for each in all_:
            epoch.learn(each.places)
        at = {each.name: each.ready for each in there}
        left = [(share, at.get(of, epoch.number(of))) for of, share in shares.items()]
        dealt = inherited(left, {each.name: each.ready for each in all_}, self._joined)
        self._joined = {}
        if len(dealt) < len(all_):  # there is not one batch for each
            return
        epoch.deal(dealt)
        epoch.known = True
        epoch.take_part(name)
        log.info("The rest of epoch %d is dealt out among %d ranks.", *epochs, len(all_))
        if told is not None:
            epoch.first = epoch.shares[name]
            epoch.came = True
            self._rates.stepped.update(there[0].stepped)
        else:
            self._until_end += go_on_with(self._trainer, epoch.shares[name])

    def _place(self, name: str, comes: bool) -> _Place:
        number = self._trainer.current_epoch
        epoch = self._epoch
        if comes:
            own = epoch.whole()
            return _Place(name, True, own.is_known, number, 0, own.lengths, epoch.streams, {}, {})
        fit = self._trainer.fit_loop
        count = fit.epoch_loop.batch_progress.current
        ends = epoch.at_end or fit.epoch_loop.done
        by_batch = type(fit._data_fetcher).__name__ != "_DataLoaderIterDataFetcher"
        is_within = epoch.known and by_batch and not is_in_step(self._strategy, fit) and not ends
        lengths: list[int] = []
        return _Place(
            name, False, is_within, number, count.ready, lengths, epoch.streams, epoch.places, self._rates.stepped
        )

    def _begin(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        if self._epoch.first is not None:
            self._until_end += go_on_with(self._trainer, self._epoch.first)
            self._epoch.first = None
        self._follows = self._epoch.begins
        self._epoch.begins = False

    def _after_batch(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        sync_points = self._strategy.sync_points
        ended = self._follows and sync_points is not None and Vote.EPOCH in sync_points.agreed
        # Its stream goes on, and the others' have come to an end.
        if ended and not accumulates(self._strategy, self._trainer.fit_loop):
            self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def _run(self, original: Any, data_fetcher: Any) -> None:
        try:
            original(data_fetcher)
        finally:
            take_back(self._until_end)


def _shares(plain: dict[str, list[Any]]) -> dict[str, DataShard]:
    return {name: DataShard(*share) for name, share in plain.items()}


def accumulates(strategy: StrategyView, fit: Any) -> bool:
    """Return whether there are gradients of batches that are in no step, and not on their way to one."""
    told = strategy.step_runner.accumulates
    return fit.epoch_loop._should_accumulate() if told is None else told


def is_in_step(strategy: StrategyView, fit: Any) -> bool:
    """Return whether a batch is under way, or gradients of batches before are in no step yet."""
    count = fit.epoch_loop.batch_progress.current
    return count.ready != count.completed or (count.ready > 0 and accumulates(strategy, fit))


def follower(loader: Any) -> Source | None:
    owner = getattr(vars(loader).get("_get_iterator"), "source", None)
    return owner if isinstance(owner, Source) else None


def go_on_with(trainer: Any, share: DataShard, steps: int | None = None) -> list[Undo]:
    """Give Lightning's loop these batches from here on; return what undoes it, last first, at the epoch's end.

    ``steps`` is the number behind the last batch of all ranks, which have begun the epoch together; None where this
    one has joined within it.
    """
    fit = trainer.fit_loop
    epoch = fit.epoch_loop
    fetcher = fit._data_fetcher
    combined = fit._combined_loader
    undo = end_at(trainer, share.end)
    interval = validation_interval(trainer)
    is_sized = not math.isinf(share.end)
    if is_sized and isinstance(interval, float):  # of an epoch; who comes within it leaves those on the way to others
        at_end = interval == 1.0 if steps is not None else share.first == 0
        every = share.end if at_end else max(1, int((steps or share.end) * interval))
        undo.append(set_for_now(trainer, "val_check_batch", every))
    for loader, (told, _) in zip(combined.flattened, share.loaders, strict=True):
        if (source := follower(loader)) is None:
            source = sources_of([loader])[0]
            undo += [source.detach, lambda loader=loader: setattr(loader, "_iterator", None)]
        loader._iterator = None  # of workers that persist
        if not is_sized:  # they have a copy of a stream, as it is for now
            undo.append(lambda loader=loader: setattr(loader, "_iterator", None))
        source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": told})
    iter(fetcher)
    fetcher.length = share.end - share.first if is_sized else None
    fetcher.done = False
    epoch.batch_progress.is_last_batch = False
    return undo


def end_at(trainer: Any, end: float) -> list[Undo]:
    total = None if math.isinf(end) else end
    for bar in callbacks_of(trainer, "TQDMProgressBar"):
        bar.train_progress_bar.total = total
    for bar in callbacks_of(trainer, "RichProgressBar"):
        if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=total)
    return [set_for_now(trainer.fit_loop, "max_batches", end)]


def train_on(trainer: Any, share: DataShard) -> None:
    epoch = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    undo = [override(epoch, "update_lr_schedulers", _within_epoch), *go_on_with(trainer, share)]
    try:
        while not epoch.done:
            try:
                epoch.advance(fetcher)
                epoch.on_advance_end(fetcher)
            except StopIteration:
                break
            finally:
                epoch.on_iteration_done()
    finally:
        take_back(undo)
    epoch.batch_progress.is_last_batch = True


def _within_epoch(original: Any, interval: str, update_plateau_schedulers: bool) -> None:
    """Leave out schedulers of epochs, which have stepped with the last batch of this rank's own."""
    if interval != "epoch" or update_plateau_schedulers:
        original(interval, update_plateau_schedulers)


class EmptyShards:
    """Patches that have a rank without data go through every epoch, and its callbacks take part in sync points."""

    def __init__(self, strategy: StrategyView, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._seen_loader: Any = None

    def install(self) -> list[Undo]:
        return [
            override(self._trainer.fit_loop, "setup_data", self._setup_data),
            set_for_now(self._trainer.lightning_module, "allow_zero_length_dataloader_with_multiple_devices", True),
        ]

    def _setup_data(self, original: Any) -> None:
        original()
        trainer = self._trainer
        fit = trainer.fit_loop
        world = self._strategy.world
        loader = fit._combined_loader
        if loader is None or loader is self._seen_loader or world is None:
            return
        self._seen_loader = loader
        lengths = world.gather_objects(fit.max_batches)
        if fit.max_batches == 0 and any(lengths):
            fit.max_batches = float("inf")
            trainer.val_check_batch = float("inf")
            fit._last_train_dl_reload_epoch = trainer.current_epoch
