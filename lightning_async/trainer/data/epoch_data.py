"""The assignment of the epoch's batches to ranks, and the redistribution of lost ranks' batches.

`EpochAssignment` holds each rank's part of the epoch and its position in it. If ranks were lost, `LostRankData` has the
live ranks train, at the end of the epoch, on those batches of lost ranks that no round has merged. `JoinerData` divides
the rest of the epoch again when a rank joins. `EmptyShards` lets a rank without data pass through every epoch.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed import DistError
from torch.utils.data import IterableDataset

from lightning_async.data.redistribution import (
    DataShard,
    Joined,
    before,
    inherited,
    joined,
    share,
    stream_of,
    streamed,
    told_of,
    unheard,
)
from lightning_async.data.stateful_loader import Source, sources_of
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.shared_state import Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.launcher_channel import Failure, tell_failure
from lightning_async.trainer.loops.loop_state import LoggedValues
from lightning_async.trainer.loops.lr_schedules import LearningRates
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    in_words,
    override,
    set_for_now,
    take_back,
    validation_interval,
)
from lightning_async.trainer.strategy_view import StrategyView

log = logging.getLogger(__name__)

_PHASES = 2**9
_BATCHES = 2**28
"""Bounds of what `EpochAssignment.place` encodes in a number: divisions of an epoch, and batches of an epoch.

With the epoch's number, the encoded position has 53 bits, as many as a float keeps exactly.
"""


class EpochAssignment:
    """Each rank's part of the epoch, and its position in this part, by stable id, as far as this rank knows them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.phase = 0
        self.first: DataShard | None = None
        # The part with which this rank begins if it joins within an epoch.
        self.begins = False
        self.follows = False
        self.at_end = False
        self.called: Callable[[str], str] = str
        """Returns the stable id of a rank, given its name in headers."""
        self.logged: dict[str, Any] | None = None
        """The values that live ranks had logged when this rank joined within the epoch; None once it has begun."""
        self._until_end: list[Undo] = []
        self._without_part: list[Undo] = []
        self.forget()

    @property
    def strategy(self) -> StrategyView:
        return self.trainer.strategy

    def forget(self) -> None:
        """Reset everything that is known about the epoch, because the next epoch begins."""
        self.known = False
        """Whether this rank knows the epoch's division, which the attributes below describe."""
        self.shares: Mapping[str, DataShard] = {}
        self.places: dict[str, float] = {}
        self.dealt: list[int] = []
        """The index of this rank's part, then the number of parts; empty if the epoch was not divided again."""
        self.came = False
        self.has_none = False
        """Whether this rank has joined within the epoch, and has no part of it."""
        self._gone: set[str] = set()
        self._sync_points: SyncPoints | None = None

    def deal(self, shares: Mapping[str, DataShard]) -> None:
        """Store ``shares``, a new division of the epoch: each rank's part, by stable id.

        The epoch's next phase begins with this division.
        """
        self.shares = shares
        self.phase += 1
        self._gone = set()

    def take_part(self, name: str) -> None:
        """Record, for checkpoints, the part that rank ``name`` got at the last division of the epoch, if it got one."""
        names = list(self.shares)
        self.has_none = not self.known or name not in names
        self.dealt = [] if self.has_none else [names.index(name), len(names)]

    def plain(self) -> dict[str, list[Any]]:
        return {name: list(share) for name, share in self.shares.items()}

    def gone(self) -> list[str]:
        """Return the ids of ranks that were lost since the last division of the epoch, also if they joined again."""
        self._gone |= self.shares.keys() - set(self.strategy.live_ranks.names)
        return sorted(self._gone & self.shares.keys())

    def place(self, batch: int) -> float:
        """Return this rank's position at ``batch`` as one number, which grows over batches, phases and epochs.

        A phase is the part of an epoch between two divisions of its data.
        """
        return self._now() * _BATCHES + batch

    def number(self, name: str) -> int:
        """Return the number of rank ``name``'s first uncommitted batch since the epoch's data was last divided.

        Returns 0 if no position of the rank is known since that division.
        """
        now, number = divmod(int(self.places.get(name, 0.0)), _BATCHES)
        return number if now == self._now() else 0

    def _now(self) -> int:
        return self.trainer.current_epoch * _PHASES + min(self.phase, _PHASES - 1)

    def learn_from(self, sync_points: SyncPoints) -> None:
        """Update the known positions of all ranks from the headers that ``sync_points`` has received.

        After a rank has joined, the caller passes a new ``sync_points`` object. This method then reads the old object a
        last time.
        """
        if self._sync_points is not None:
            self.learn({self.called(name): place for name, place in self._sync_points.places.items()})
        # Read the old object once more before it is replaced, or its last places would be lost.
        if sync_points is not self._sync_points:
            self._sync_points = sync_points
            self.called = self.strategy.live_ranks.called
            self.learn({self.called(name): place for name, place in sync_points.places.items()})

    # Places only grow, so messages may arrive in any order.
    def learn(self, places: Mapping[str, float]) -> None:
        for name, place in places.items():
            self.places[name] = max(place, self.places.get(name, 0.0))

    @property
    def streams(self) -> bool:
        """Whether all loaders of this rank read streams, so that their remaining samples are unknown."""
        loaders = self.trainer.fit_loop._combined_loader.flattened
        return all(isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)

    def whole(self) -> DataShard:
        """Return this rank's part of a whole epoch."""
        loaders = self.trainer.fit_loop._combined_loader.flattened
        return DataShard(0, 0, 0, False, [told_of(loader) for loader in loaders])

    def mine(self) -> DataShard:
        """Return this rank's part of the epoch, from its next batch on."""
        trainer = self.trainer
        fit = trainer.fit_loop
        first = fit.epoch_loop.batch_progress.current.ready
        # The same condition as in Lightning: loaders then begin from their start.
        anew = trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting
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
                # The fetcher holds one batch ahead that was not trained on.
                found = None if anew else follower(loader)
                position = {} if found is None else found.position(before=True, ended=False)
                told = position.get("share") or told
                skipped = position.get("taken", 0)
            loaders.append((told, count))
        # Of a stream, or of an unknown source, the length is unknown. The end is then no more than the next batch.
        unsized = first + any(told is None or told["kind"] == "stream" for told, _ in loaders)
        end = unsized if math.isinf(fit.max_batches) else fit.max_batches
        # Smaller batches after a division may be more than the loader has of its own.
        if own and trainer.limit_train_batches == 1.0:
            end = max(end, first + own - skipped)
        return DataShard(first, max(first, end), skipped, fit._combined_loader._mode == "max_size_cycle", loaders)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of trained batches still wait for an optimizer step that has not begun."""
        told = self.strategy.step_runner.accumulates
        return self.trainer.fit_loop.epoch_loop._should_accumulate() if told is None else told

    @property
    def is_in_step(self) -> bool:
        """Whether a batch is being trained on, or gradients of earlier batches have not reached an optimizer step."""
        count = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return count.ready != count.completed or (count.ready > 0 and self.accumulates)

    @property
    def is_ending(self) -> bool:
        return self.at_end or self.trainer.fit_loop.epoch_loop.done

    @property
    def has_part(self) -> bool:
        """Whether this rank, which has joined within the epoch, takes part in the rest of it."""
        return self.first is not None or self.begins

    def end(self) -> None:
        take_back(self._without_part)

    def begin_joined(self) -> None:
        """Start training on the part that this rank received when it joined, if it joined within this epoch."""
        if self.first is not None:
            self.go_on_with(self.first)
            self.first = None
        self.follows = self.begins
        self.begins = False

    def run(self, original: Any, data_fetcher: Any) -> None:
        """Run the epoch loop by ``original``, Lightning's method; afterwards undo this epoch's changes of the loop.

        A rank that joined within the epoch and received no part of it skips to the epoch's end.
        """
        logged = self.logged
        self.logged = None
        if logged is not None:
            LoggedValues(self.trainer).put_blank(logged)
            if not self.has_part:
                # With no batches left, the schedulers of learning rates see an end of the epoch.
                self._without_part.append(set_for_now(self.trainer.fit_loop, "max_batches", 0))
                return
        try:
            original(data_fetcher)
        finally:
            take_back(self._until_end)

    def go_on_with(self, share: DataShard) -> None:
        """Make Lightning's loop train on a share of this rank, from now on the rest of its epoch, until the end."""
        fit = self.trainer.fit_loop
        fetcher = fit._data_fetcher
        undo = self._until_end
        self._end_at(share.end)
        interval = validation_interval(self.trainer)
        is_sized = not math.isinf(share.end)
        # The interval is a part of an epoch. A rank that joins within one leaves validations on the way to the others.
        if is_sized and isinstance(interval, float):
            every = share.end if share.first == 0 else max(1, int(share.end * interval))
            undo.append(set_for_now(self.trainer, "val_check_batch", every))
        for loader, (told, _) in zip(fit._combined_loader.flattened, share.loaders, strict=True):
            if (source := follower(loader)) is None:
                source = sources_of([loader])[0]
                undo += [source.detach, lambda loader=loader: setattr(loader, "_iterator", None)]
            # Workers that persist would go on with the old part, or with the copy of a stream that they have now.
            loader._iterator = None
            if not is_sized:
                undo.append(lambda loader=loader: setattr(loader, "_iterator", None))
            source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": told})
        iter(fetcher)
        fetcher.length = share.end - share.first if is_sized else None
        fetcher.done = False
        fit.epoch_loop.batch_progress.is_last_batch = False

    def _end_at(self, end: float) -> None:
        """Make the epoch end after ``end`` batches, also in progress bars; infinite if the end is unknown."""
        total = None if math.isinf(end) else end
        for bar in callbacks_of(self.trainer, "TQDMProgressBar"):
            bar.train_progress_bar.total = total
        for bar in callbacks_of(self.trainer, "RichProgressBar"):
            if bar.progress is not None and bar.train_progress_bar_id is not None:
                bar.progress.update(bar.train_progress_bar_id, total=total)
        self._until_end.append(set_for_now(self.trainer.fit_loop, "max_batches", end))

    def train_on(self, share: DataShard) -> None:
        """Train on ``share``, a further part of the epoch, after this rank has finished its own part."""
        epoch = self.trainer.fit_loop.epoch_loop
        fetcher = self.trainer.fit_loop._data_fetcher
        # Validations and ranks that join must see the epoch as at its end.
        self.at_end = True
        self._until_end.append(override(epoch, "update_lr_schedulers", _within_epoch))
        try:
            self.go_on_with(share)
            while not epoch.done:
                try:
                    epoch.advance(fetcher)
                    epoch.on_advance_end(fetcher)
                except StopIteration:
                    # A stream has ended before its announced length, which ends the part.
                    break
                finally:
                    epoch.on_iteration_done()
        finally:
            take_back(self._until_end)
            self.at_end = False
        epoch.batch_progress.is_last_batch = True


def _within_epoch(original: Any, interval: str, update_plateau_schedulers: bool) -> None:
    """Step schedulers by ``original``, Lightning's method, unless they have stepped already.

    Schedulers with interval "epoch" have stepped at the last batch of this rank's own part of the epoch, except those
    that watch a metric.
    """
    if interval != "epoch" or update_plateau_schedulers:
        original(interval, update_plateau_schedulers)


def follower(loader: Any) -> Source | None:
    """Return the `Source` from which a loader takes its batches instead of its own iterator; None without one."""
    owner = getattr(vars(loader).get("_get_iterator"), "source", None)
    return owner if isinstance(owner, Source) else None


def report_failure(trainer: Any, exception: BaseException) -> None:
    """Tell the launcher of an exception within training, and of the batch and the samples at which it was raised.

    Errors of this package, of connections, of time limits, of torch.distributed, and of a full accelerator may have
    causes outside of the program, and are not reported.
    """
    fit = trainer.fit_loop
    outside = AsyncTrainingError | ConnectionError | TimeoutError | DistError | torch.OutOfMemoryError
    if not isinstance(exception, Exception) or isinstance(exception, outside) or not fit.epoch_progress.current.started:
        return
    # The first of several callers is nearest to the batch.
    if "_is_reported" in vars(exception):
        return
    vars(exception)["_is_reported"] = True
    progress = fit.epoch_loop.batch_progress.current
    samples: list[int] = []
    # Without samples the report is still of use, and nothing may hide the exception of the program.
    with contextlib.suppress(Exception):
        (loader,) = fit._combined_loader.flattened
        position = {"share": told_of(loader)[0], "taken": fit._data_fetcher.fetched, "drawn": {}}
        if (source := follower(loader)) is not None:
            position = source.position(before=False, ended=False)
        told = position["share"]
        # A shuffled order needs the random numbers that were drawn, which a follower knows.
        if told["kind"] != "random" or position["drawn"]:
            # A fetch that fails is not counted. Batches that are fetched ahead are.
            ahead = len(getattr(fit._data_fetcher, "batches", ())) + progress.ready - progress.completed
            begin = (position["taken"] - ahead) * told["batch_size"]
            samples = share(position)[begin : begin + told["batch_size"]]
    first, *_, last = [line for line in in_words(exception).splitlines() if line.strip()] * 2
    text = first if first == last else f"{first.partition(':')[0]}: {last}"
    tell_failure(Failure(text, fit.epoch_progress.current.processed, progress.completed, samples))


class LostRankData:
    """The redistribution of lost ranks' samples at the end of an epoch.

    With it, every sample of the epoch is trained on once, whichever ranks are lost. A batch counts as trained on if a
    round has merged its result into the common model.

    At the start of an epoch all ranks tell each other their parts. From then on, each rank's headers contain its
    position. At the sync point that ends the epoch, the live ranks divide the batches of lost ranks that no round has
    merged, and continue the epoch with them. Ranks that have joined, and have no part of the epoch, also get some of
    these batches.
    """

    def __init__(self, epoch: EpochAssignment, rates: LearningRates) -> None:
        self.epoch = epoch
        self._strategy = epoch.strategy
        self._trainer = epoch.trainer
        self._rates = rates
        self.taken_up: list[Any] = []
        """Lost ranks' shares of the epoch that begins next, as `left` returned them when a checkpoint was saved."""

    def install(self) -> list[Undo]:
        if not self._strategy.shrinks:
            return []
        loop = self._trainer.fit_loop.epoch_loop
        return [
            set_for_now(self._strategy, "lost_rank_data", self),
            override(loop, "on_run_start", self._begin),
            override(loop, "run", self.epoch.run),
        ]

    def start_over(self) -> None:
        self.epoch.forget()

    def left(self) -> list[Any]:
        """Return, for each lost rank, a list of its stable id, its share and its first uncommitted batch's number."""
        epoch = self.epoch
        return [[name, list(epoch.shares[name]), epoch.number(name)] for name in epoch.gone()] if epoch.known else []

    def rest(self) -> bool:
        """Train on lost ranks' remaining batches, at the epoch's last sync point; return whether there were any.

        All ranks call this together.
        """
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
        # Logged values are collectives at the end of the epoch, so all ranks must have the same ones.
        self._log_alike(world, [came for *_, came, _ in told])
        there = [each for each, knows, *_ in told if knows]
        if not there:
            return False
        takers = {each: ready for each, knows, goes_on, ready, *_ in told if goes_on}
        # A rank that has just joined may take a share only if somebody can tell it about the epoch.
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
            "Epoch %d continues with what %s had not shared of it: %s batches.",
            self._trainer.current_epoch, ", ".join(f"rank {each}" for each in lost),
            " and ".join(
                "a stream's" if math.isinf(share.end) else str(share.end - share.first)
                for share in self.epoch.shares.values()
            ),
        )  # fmt: skip
        if self.epoch.known and name in self.epoch.shares:
            self.epoch.train_on(self.epoch.shares[name])
        return True

    def _log_alike(self, world: LightningCollectives, came: list[bool]) -> None:
        """Make ranks that joined within the epoch log all keys that the other ranks have logged, with empty values.

        Logging at the end of an epoch is collective, and a joined rank's part may be too short to log every key. All
        ranks call this together.

        Args:
            world: Collectives over all ranks.
            came: For each rank, whether it joined within the epoch.
        """
        if any(came) and not all(came):
            first = came.index(False)
            values = LoggedValues(self._trainer)
            # The keys of one rank that has logged all of them, in its order.
            logged = world.broadcast(values.take() if world.rank == first else None, first)
            if self.epoch.came and logged is not None:
                values.put_missing(logged)

    def _introduce(self, world: LightningCollectives, is_first: bool) -> bool:
        """Tell ranks that have joined how this epoch's data is divided; return False if no rank knows the division.

        All ranks call this together.

        Args:
            world: Collectives over all ranks.
            is_first: Whether this rank is the first of those that know the division. This rank sends it.
        """
        mine: list[Any] = [self.epoch.phase, self.epoch.plain()] if is_first else []
        everyones = world.gather_objects(mine)
        told = next((each for each in everyones if each), None)
        if told is None:
            return False
        own_end = self._how_it_ended() if mine else None
        ended = world.broadcast(own_end, everyones.index(told))
        if not self.epoch.known:
            self.epoch.phase = told[0]
            self.epoch.known = True
            self.epoch.shares = {each: DataShard(*share) for each, share in told[1].items()}
            if ended is not None:
                self._end_as_others(ended)
        return True

    def _how_it_ended(self) -> dict[str, Any]:
        """Return this rank's numbers of steps, learning rates and logged values at the end of its epoch.

        A rank that joined, and has no part of the epoch, takes over these values by `_end_as_others`.
        """
        trainer = self._trainer
        return {
            "steps": [(count.ready, count.completed) for count in self._steps()],
            "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
                for optimizer in trainer.optimizers
            ],
            "stepped": self._rates.stepped,
            "metrics": LoggedValues(trainer).take(),
        }

    def _end_as_others(self, ended: dict[str, Any]) -> None:
        """Take over ``ended``, another rank's state at the end of the epoch, as `_how_it_ended` returned it there."""
        trainer = self._trainer
        LoggedValues(trainer).put_blank(ended["metrics"])
        for count, (ready, completed) in zip(self._steps(), ended["steps"], strict=True):
            count.ready = ready
            count.completed = completed
        trainer.fit_loop.epoch_loop._batches_that_stepped = ended["logged"]
        for config, state in zip(trainer.lr_scheduler_configs, ended["schedulers"], strict=False):
            config.scheduler.load_state_dict(state)
        for optimizer, groups in zip(trainer.optimizers, ended["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        self._rates.stepped.update(ended["stepped"])

    def _steps(self) -> list[Any]:
        epoch = self._trainer.fit_loop.epoch_loop
        automatic = epoch.automatic_optimization.optim_progress.optimizer.step
        return [automatic.total, epoch.manual_optimization.optim_step_progress.total]

    def _begin(self, original: Any, data_fetcher: Any) -> None:
        world = self._strategy.world
        sync_points = self._strategy.sync_points
        # Otherwise the epoch is under way, and this rank was told about it when it joined.
        if not self.epoch.has_part:
            self.epoch.forget()
            if world is not None and sync_points is not None and not world.asynchronous:
                self._tell_all(world, sync_points)
        original(data_fetcher)
        self.epoch.begin_joined()

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
        # Assign the complete dict at once, because other threads read this attribute.
        epoch.shares = shares
        epoch.places |= {lost: epoch.place(begin) for lost, begin in left_at.items()}

    def tell_place(self, sync_points: SyncPoints) -> None:
        """Record, for the other ranks, that this rank has used all batches of its part up to the current one.

        The next header carries this position.
        """
        self.epoch.learn_from(sync_points)
        self.epoch.gone()
        sync_points.tell_place(self.epoch.place(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready))

    def _tell(self, lost: dict[str, DataShard]) -> None:
        """Warn of lost ranks whose remaining samples are unknown."""
        for name, each in lost.items():
            if not each.is_known and not each.is_of_stream and each.first < each.end:
                log.warning(
                    "Batches of rank %s are missing in epoch %d, from its batch %d on, because the other ranks do not "
                    "know which samples these are. They do with a DataLoader of a map-style dataset and Lightning's "
                    "or torch's DistributedSampler, or of a PartitionedStream without a limit of batches.",
                    name, self._trainer.current_epoch, self.epoch.number(name),
                )  # fmt: skip


class _Place(NamedTuple):
    """The situation of one rank when another rank joins. All ranks exchange their situations.

    Args:
        name: Stable id of the rank.
        comes: Whether this is the joining rank.
        is_within: Whether the rank is between two steps of the epoch, so that it can change to another part of the
            epoch's data.
        epoch: Number of the epoch.
        ready: Number of the rank's next batch.
        lengths: Lengths of the datasets of the joining rank's loaders; empty on live ranks.
        streams: Whether the rank's loaders read streams; see `EpochAssignment`.
        places: Positions of all ranks in the epoch, by stable id, as far as the rank knows them.
        stepped: How far the rank's schedules are, see `LearningRates.stepped`.
    """

    name: str
    comes: bool
    is_within: bool
    epoch: int
    ready: int
    lengths: list[int]
    streams: bool
    places: dict[str, float]
    stepped: dict[Any, Any]


class JoinerData:
    """The division of the rest of an epoch among all ranks when a rank joins within it."""

    def __init__(self, epoch: EpochAssignment, rates: LearningRates) -> None:
        self._epoch = epoch
        self._strategy = epoch.strategy
        self._rates = rates
        self._joined: Joined = {}

    def install(self) -> list[Undo]:
        if not self._strategy.shrinks:
            return []
        return [override(self._epoch.trainer.fit_loop.epoch_loop, "on_advance_end", self._after_batch)]

    def begin_within_epoch(self, logged: dict[str, Any]) -> None:
        """Record the values that live ranks have logged in the present epoch, in which this joining rank begins."""
        self._epoch.logged = logged

    # Computed while training goes on, because all ranks wait during the division itself.
    def prepare_for(self) -> None:
        self._joined = joined(list(self._epoch.shares.values()))

    def told(self) -> list[Any]:
        return [self._epoch.phase, self._epoch.plain()]

    def place(self, name: str, comes: bool) -> list[Any]:
        """Return this rank's situation, as a list of the fields of `_Place`.

        `deal` divides the rest of the epoch by all ranks' situations. All ranks wait at a sync point, so the situation
        does not change before the division.

        Args:
            name: Stable id of this rank.
            comes: Whether this is the joining rank.
        """
        if (sync_points := self._strategy.sync_points) is not None:
            self._epoch.learn_from(sync_points)
        return list(self._place(name, comes))

    def deal(self, name: str, places: list[list[Any]], told: list[Any] | None) -> None:
        """Divide the rest of the epoch among all ranks, including the joining one.

        Nothing is divided if a rank is not between two steps of the same epoch, if the remaining samples are unknown,
        or if there is not one batch for each rank. The joining rank then gets its first samples in the next epoch.
        Nothing is divided either if the loaders of all ranks read streams: the joining rank reads its own stream until
        the other ranks end the epoch.

        Args:
            name: Stable id of this rank.
            places: Each rank's situation, as `place` returned it.
            told: On a joining rank, the result of `told` on a live rank: how often the epoch was divided, and each
                rank's share. None on live ranks.
        """
        sync_points = self._strategy.sync_points
        epoch = self._epoch
        if not self._strategy.shrinks or sync_points is None:
            return
        epoch.learn_from(sync_points)
        epoch.has_none |= told is not None
        all_ = [_Place(*each) for each in places]
        there = [each for each in all_ if not each.comes]
        if there and told is not None:
            self._rates.stepped.update(there[0].stepped)
        lengths = [each.lengths for each in all_ if each.comes]
        if there and told is not None and all(each.streams for each in all_):
            epoch.phase = told[0]
            epoch.shares = _shares(told[1])
            epoch.known = True
            epoch.begins = True
            epoch.came = True
            epoch.has_none = False
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
        # The rest has not one batch for each rank.
        if len(dealt) < len(all_):
            return
        epoch.deal(dealt)
        epoch.known = True
        epoch.take_part(name)
        log.info("The rest of epoch %d is divided among %d ranks.", *epochs, len(all_))
        if told is not None:
            epoch.first = epoch.shares[name]
            epoch.came = True
        else:
            epoch.go_on_with(epoch.shares[name])

    def _place(self, name: str, comes: bool) -> _Place:
        epoch = self._epoch
        number = epoch.trainer.current_epoch
        if comes:
            own = epoch.whole()
            return _Place(name, True, own.is_known, number, 0, own.lengths, epoch.streams, {}, {})
        fit = epoch.trainer.fit_loop
        ready = fit.epoch_loop.batch_progress.current.ready
        by_batch = type(fit._data_fetcher).__name__ != "_DataLoaderIterDataFetcher"
        is_within = epoch.known and by_batch and not epoch.is_in_step and not epoch.is_ending
        return _Place(name, False, is_within, number, ready, [], epoch.streams, epoch.places, self._rates.stepped)

    def _after_batch(self, original: Any, data_fetcher: Any) -> None:
        original(data_fetcher)
        sync_points = self._strategy.sync_points
        ended = self._epoch.follows and sync_points is not None and Vote.EPOCH in sync_points.agreed
        # This rank's stream could go on, but the other ranks have come to the end of theirs.
        if ended and not self._epoch.accumulates:
            self._epoch.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def _shares(plain: dict[str, list[Any]]) -> dict[str, DataShard]:
    return {name: DataShard(*share) for name, share in plain.items()}


class EmptyShards:
    """Patches that let a rank without data go through every epoch.

    The callbacks of such a rank then take part in the other ranks' sync points.
    """

    def __init__(self, trainer: Any) -> None:
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
        world = trainer.strategy.world
        loader = fit._combined_loader
        if loader is None or loader is self._seen_loader or world is None:
            return
        self._seen_loader = loader
        lengths = world.gather_objects(fit.max_batches)
        # Lightning skips a fit without batches. With an unknown number of batches the loop begins and finds none.
        if fit.max_batches == 0 and any(lengths):
            fit.max_batches = float("inf")
            trainer.val_check_batch = float("inf")
            fit._last_train_dl_reload_epoch = trainer.current_epoch
