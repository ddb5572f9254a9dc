"""Batches of unequal size, so that ranks of unequal speed take equally long for each batch.

The batches of one step keep their total size. All ranks compute new batch sizes together, from the same numbers, at the
start of an epoch or at a sync point within it. Then they divide the remaining samples of the epoch anew, step by step:
each sample is trained on once, and each step has as many samples as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lightning_async.algorithms.accumulation import batch_sizes
from lightning_async.algorithms.schedules import Pace
from lightning_async.data.redistribution import DataShard, by_steps
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.events import tell
from lightning_async.trainer.data.epoch_data import EpochAssignment
from lightning_async.trainer.namespace import Undo, override
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)

_GAIN = 0.05
"""Smallest share of a step's time that new batch sizes must save, so that the sync point is worth its time."""
# Number of batches before a rank's speed counts as known, because the first ones are slow.
_MEASURED = 5


class Bounds(NamedTuple):
    """The smallest and largest number of samples in one rank's batch.

    If ``maximum`` is None, a batch may have all samples of a step.
    """

    minimum: int = 1
    maximum: int | None = None

    def sizes(self, total: int, speeds: Iterable[float], rooms: Iterable[int]) -> list[int]:
        """Return each rank's batch size for a step of ``total`` samples, as `batch_sizes` computes it from speeds.

        ``rooms`` are the numbers of samples that fit into each rank's memory; 0 if unknown. Batches fit into memory as
        long as all ranks together have memory for ``total``. Otherwise ``rooms`` are ignored, and a rank splits a batch
        that is too large for its memory.
        """
        v = list(speeds)
        rooms = list(rooms)
        most = min(total, self.maximum or total)
        within = [max(self.minimum, min(most, room or most)) for room in rooms]
        return batch_sizes(total, v, self.minimum, within if sum(within) >= total else [most] * len(v))


class _Said(NamedTuple):
    """The numbers that one rank contributes to a common decision on batch sizes.

    Args:
        name: Stable id of the rank.
        speed: Samples per second; 0.0 while unknown.
        room: Largest number of samples that fit into the rank's memory at once; 0 if unknown.
        wants: Whether the rank has asked all ranks to come to this sync point.
        ready: Number of the rank's next batch; -1 if the rank is not between two batches of an epoch that can be
            divided.
        base: Number of samples in a batch of the rank's loader.
        total: Number of samples in a step, over all ranks; 0 if unknown, as on a rank that has just joined.
        places: Position of each rank in the epoch, by stable id, as far as this rank knows.
    """

    name: str
    speed: float
    room: int
    wants: bool
    ready: int
    base: int
    total: int
    places: dict[str, float]


class Balancing:
    """The batch sizes of all ranks of one fit; replicas weight gradients and averages by their samples.

    Args:
        trainer: The Trainer.
        bounds: Bounds of each rank's batches.
        total: Number of samples in a step, over all ranks; 0: the sum of the loaders' batch sizes when training begins.
        room: Returns the number of samples that fit into this rank's memory at once, or None if unknown.
    """

    def __init__(self, trainer: Any, bounds: Bounds, total: int, room: Callable[[], int | None]) -> None:
        self._trainer = trainer
        self._bounds = bounds
        self.total = total
        self._room = room
        self.base = 0
        """The batch size of this rank's loader when ``total`` was summed."""
        self.sizes: dict[str, int] = {}
        self.wants = False
        self._shares: Mapping[str, DataShard] = {}
        self._phase = 0
        """The phase of the epoch (see `EpochAssignment`) when its data was last divided by batch sizes."""
        self._alone = EpochAssignment(trainer)

    def install(self) -> list[Undo]:
        """Patch the epoch loop; return functions that undo the patches.

        Call this after all other patches of the loop's ``on_run_start`` are installed.
        """
        loop = self._trainer.fit_loop.epoch_loop
        return [override(loop, "on_run_start", self._begin), override(loop, "run", self._alone.run)]

    @property
    def name(self) -> str:
        return self._epoch.called(self._trainer.strategy.sync_points.name)

    @property
    def is_off(self) -> bool:
        """Whether balanced batch sizes are out of use until the data is next divided by batch sizes.

        They are out of use after a rank has joined, because the rest of the epoch was then divided among all ranks.
        """
        return self._epoch.known and self._epoch.phase != self._phase

    def would_gain(self) -> bool:
        """Return whether new batch sizes would shorten a step enough to be worth a sync point.

        The ranks' speeds are those that they have sent in headers.
        """
        paces = self._trainer.strategy.sync_points.paces
        speeds = {self._epoch.called(name): _speed(Pace(*pace)) for name, pace in paces.items()}
        sizes = self._bounds.sizes(self.total, speeds.values(), [0] * len(speeds))
        return self._gains(dict(zip(speeds, sizes, strict=True)), speeds)

    def _begin(self, original: Any, data_fetcher: Any) -> None:
        epoch = self._epoch
        share = epoch.mine()
        # True on a rank that joins within the epoch, which was given its part already.
        comes = epoch.has_part
        original(data_fetcher)
        world = self._trainer.strategy.world
        if comes or world is None or world.asynchronous or self._trainer.strategy.sync_points is None:
            return
        self._begin_epoch(world, share)

    def _begin_epoch(self, world: LightningCollectives, share: DataShard) -> None:
        mine: list[Any] = [*self._say(share.first), list(share)]
        # All ranks compute the same division from the same numbers, so no rank has to decide.
        told = world.gather_objects(mine)
        said = [_Said(*each[:-1]) for each in told]
        self._phase = self._epoch.phase
        shares = {one.name: DataShard(*each[-1]) for one, each in zip(said, told, strict=True)}
        self._agree(said)
        given = {name: each.loaders[0][0] for name, each in shares.items()}
        sizes = {name: one["batch_size"] for name, one in given.items() if one is not None and one["kind"] == "given"}
        # A resume from a checkpoint has restored shares that are divided by sizes. They stay.
        if sizes.keys() == given.keys() and sum(sizes.values()) == self.total:
            self.sizes = sizes
            self._shares = shares
            self._end_at(share)
            return
        left = [(each, each.first) for each in shares.values()]
        if (epoch := self._epoch).known:
            left = [(each, max(each.first, epoch.number(name))) for name, each in epoch.shares.items()]
        if not self._deal(left, said, self._sizes(said)):
            self.sizes = {}
            self._shares = {}
            log.warning(
                "Rank %d: epoch %d has fewer samples than there are ranks, so its batches are not balanced.",
                self._trainer.global_rank, self._trainer.current_epoch,
            )  # fmt: skip

    def _agree(self, said: list[_Said]) -> None:
        self.total = next((each.total for each in said if each.total), 0) or sum(each.base for each in said)
        (self.base,) = (each.base for each in said if each.name == self.name)

    def _end_at(self, share: DataShard) -> None:
        end = share.first + share.loaders[0][1] - share.skipped
        self._epoch.end_at(end)
        fetcher = self._trainer.fit_loop._data_fetcher
        fetcher.length = fetcher.fetched + end - share.first

    def decide(self, world: LightningCollectives) -> bool | None:
        """Divide the rest of the epoch by new batch sizes if a rank has asked for it; return whether that was done.

        All ranks are at a sync point. The result is False if new sizes would gain too little, or too few samples are
        left. It is None if no rank has asked, if speeds are unknown, or if a rank is not between two batches, because
        the rest of the epoch is unknown then.
        """
        epoch = self._epoch
        if (sync_points := self._trainer.strategy.sync_points) is None:
            return None
        if epoch is not self._alone:
            epoch.learn_from(sync_points)
        mine: list[Any] = list(self._say(self._ready))
        said = [_Said(*each) for each in world.gather_objects(mine)]
        self._agree(said)
        self.wants = False
        shares = epoch.shares if epoch is not self._alone else self._shares
        if not any(each.wants for each in said):
            return None
        self._phase = epoch.phase
        if any(each.ready < 0 for each in said) or not shares:
            return None
        # Read the sizes from the present division, which a joining rank may have changed.
        self.sizes = {
            name: told["batch_size"] for name, each in shares.items() for told, _ in each.loaders if told is not None
        }
        if (sizes := self._sizes(said)) == self.sizes:
            return False if all(each.speed for each in said) else None
        for each in said:
            epoch.learn(each.places)
        at = {each.name: each.ready for each in said}
        return self._deal([(each, at.get(name, epoch.number(name))) for name, each in shares.items()], said, sizes)

    @property
    def _ready(self) -> int:
        epoch = self._epoch
        knows = epoch.known if epoch is not self._alone else bool(self._shares)
        is_between = knows and not epoch.is_in_step and not epoch.is_ending
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready if is_between else -1

    @property
    def _epoch(self) -> EpochAssignment:
        """This epoch's assignment of samples to ranks.

        If the strategy can lose ranks, this is the assignment that all ranks know. Otherwise it is one that only this
        rank keeps.
        """
        lost_rank_data = view_of(self._trainer.strategy).lost_rank_data
        return self._alone if lost_rank_data is None else lost_rank_data.epoch

    def _say(self, ready: int) -> _Said:
        pacing = self._trainer.strategy.pacing
        speed = _speed(pacing.pace) if pacing.batches >= _MEASURED else 0.0
        base = self._trainer.fit_loop._combined_loader.flattened[0].batch_size
        places = {} if self._epoch is self._alone else self._epoch.places
        # A reloaded loader may have another batch size, so the old total does not apply.
        total = 0 if self.base and self.base != base else self.total
        return _Said(self.name, speed, self._room() or 0, self.wants, ready, base, total, places)

    def _sizes(self, said: list[_Said]) -> dict[str, int]:
        """Return each rank's new batch size, in proportion to the ranks' speeds.

        Returns the present sizes if the new ones would gain little.
        """
        sizes = self._bounds.sizes(self.total, [each.speed for each in said], [each.room for each in said])
        found = {each.name: size for each, size in zip(said, sizes, strict=True)}
        speeds = {each.name: each.speed for each in said}
        bounds = self._bounds
        within = all(bounds.minimum <= size <= (bounds.maximum or size) for size in self.sizes.values())
        lacks_room = any(0 < each.room < self.sizes.get(each.name, 0) for each in said)
        changes = lacks_room or not within or sum(sizes) != sum(self.sizes.values()) or self._gains(found, speeds)
        return found if changes else self.sizes

    def _gains(self, sizes: Mapping[str, int], speeds: Mapping[str, float]) -> bool:
        if sizes.keys() != self.sizes.keys():
            return True
        if not all(speeds.values()):
            return False
        then_s, now_s = (max(each[name] / speeds[name] for name in sizes) for each in (sizes, self.sizes))
        return then_s < (1.0 - _GAIN) * now_s

    def _deal(self, left: list[tuple[DataShard, int]], said: list[_Said], sizes: dict[str, int]) -> bool:
        """Divide the remaining samples of the epoch in proportion to batch sizes, and begin this rank's part.

        Returns False, and changes nothing, if there are too few samples.

        Args:
            left: Each present share, with the number of its first batch that was not trained on.
            said: Numbers that each rank has sent.
            sizes: New batch size of each rank, by stable id.
        """
        epoch = self._epoch
        loader = self._trainer.fit_loop._combined_loader.flattened[0]
        dealt = by_steps(left, {each.name: each.ready for each in said}, sizes, loader.drop_last)
        if not dealt:
            return False
        # If ranks can be lost, the division must be known to those that take over their parts.
        if epoch.known:
            epoch.deal(dealt)
            epoch.take_part(self.name)
        self._shares = dealt
        self._phase = epoch.phase
        if sizes != self.sizes:
            self._tell(sizes)
        self.sizes = sizes
        steps = int(max(each.end for each in dealt.values()))
        epoch.go_on_with(dealt[self.name], steps)
        return True

    def _tell(self, sizes: Mapping[str, int]) -> None:
        if self._trainer.global_rank == 0:
            each = ", ".join(f"{size} on rank {name}" for name, size in sizes.items())
            words = f"Batches have {each}: {sum(sizes.values())} samples in a step."
            tell("balanced", logging.INFO, words, sizes=list(sizes.values()), names=list(sizes))
        if sum(sizes.values()) != self.total:
            log.warning(
                "Rank %d: a step has %d samples instead of %d, because `minimum` and `maximum` do not allow that.",
                self._trainer.global_rank, sum(sizes.values()), self.total,
            )  # fmt: skip


def _speed(pace: Pace) -> float:
    return pace.samples / pace.batch_s if pace.is_known else 0.0
