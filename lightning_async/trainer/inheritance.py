"""Ranks are lost: the others train, at the end of the epoch, on what those had not shared of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_async.data.shares import Share, before, inherited, told_of, unheard
from lightning_async.data.source import Source, sources_of
from lightning_async.engine.gates import Gates
from lightning_async.engine.world import World
from lightning_async.trainer.latecomer import end_as_others, how_it_ended
from lightning_async.trainer.learning_rates import LearningRates
from lightning_async.trainer.patches import Undo, callbacks_of, replace, set_for_now
from lightning_async.trainer.protocols import Drifting

__all__ = ["Inheritance"]

log = logging.getLogger(__name__)
_PHASES, _BATCHES = 2**5, 2**32
"""Of a place: how often an epoch was gone on with, at most, and how many batches it has."""


class Inheritance:
    """Each sample of an epoch is trained on once, in work that a round has merged, whoever is lost meanwhile.

    At the start of an epoch all ranks tell each other what they have of it, and with each message how far they are. At
    its end, at the gate, those that are there deal out what the lost had not shared, and go on with the epoch;
    newcomers too, who have had nothing of it so far.

    Args:
        strategy: has the gates, and is where all ranks meet.
        trainer: its loops are patched.
        rates: what schedulers have taken.
    """

    def __init__(self, strategy: Drifting, trainer: Any, rates: LearningRates) -> None:
        self._strategy, self._trainer, self._rates = strategy, trainer, rates
        self._knows = False
        """This rank was there when the epoch began, or was told since; else `_shares` say nothing."""
        self._shares: dict[str, Share] = {}
        """What each has of the epoch since it began, or was last gone on with; by the name for life."""
        self._phase = 0
        """How often the epoch was gone on with."""
        self._places: dict[str, float] = {}
        """How far each was with what all have committed, by that name."""
        self._gone: set[str] = set()
        """Those that were lost since, whoever comes back by their names."""
        self._taken_up: list[Any] = []
        """What `left` was where this fit goes on."""
        self._gates: Gates | None = None
        self._called: Callable[[str], str] = str
        """Those that places are heard of from, and what they mean by a name."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        if not self._strategy.shrinks:
            return []
        vars(self._trainer.strategy)["inheritance"] = self  # for checkpoints
        return [
            replace(self._trainer.fit_loop.epoch_loop, "on_run_start", self._begin),
            replace(self._trainer.strategy, "on_train_batch_start", self._begin_batch),
            lambda: vars(self._trainer.strategy).pop("inheritance", None),
        ]

    def start_over(self) -> None:
        """Training begins anew within this fit: who has had what of the epoch does not count any more."""
        self._knows, self._shares, self._places, self._gates, self._gone = False, {}, {}, None, set()

    def left(self) -> list[Any]:
        """What the lost have left of this epoch by now: plain values, for a checkpoint."""
        if not self._knows:
            return []
        self._gone |= self._shares.keys() - set(self._trainer.strategy.survivors.names)
        return [
            [name, list(self._shares[name]), self._number(name)] for name in sorted(self._gone & self._shares.keys())
        ]

    def take_up(self, left: list[Any]) -> None:
        """The epoch that begins next is gone on with, and that is `left` of it."""
        self._taken_up = left

    def rest(self) -> bool:
        """At the gate that ends an epoch: train on what the lost have left of it; whether there was something."""
        world, gates, epoch = self._strategy.world, self._strategy.gates, self._trainer.fit_loop.epoch_loop
        if not self._strategy.shrinks or world is None or gates is None:
            return False
        self._hear(gates)
        stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        goes_on = not stops and epoch.global_step != epoch.max_steps
        name = self._called(gates.name)
        mine: list[Any] = [name, self._knows, goes_on, epoch.batch_progress.current.ready, self._places]
        told = world.gather_objects(mine)
        there = [each for each, knows, *_ in told if knows]
        if not there:
            return False
        takers = {each: ready for each, knows, goes_on, ready, _ in told if goes_on}
        if len(there) < len(told) and not self._introduce(world, is_first=name == there[0] and self._knows):
            takers = {each: ready for each, ready in takers.items() if each in there}
        for *_, places in told:
            self._learn(places)
        lost = {each: share for each, share in self._shares.items() if each not in there}
        self._gone = set()
        self._tell(lost)
        left = [(share, self._number(each)) for each, share in lost.items()]
        self._shares, self._phase = inherited(left, takers) if takers else {}, self._phase + 1
        if not self._shares:
            return False
        log.info(
            "Epoch %d goes on with what %s had not shared of it: %s batches.",
            self._trainer.current_epoch, ", ".join(f"rank {each}" for each in lost),
            " and ".join(str(share.end - share.first) for share in self._shares.values()),
        )  # fmt: skip
        if self._knows and name in self._shares:
            self._train(self._shares[name])
        return True

    def _introduce(self, world: World, is_first: bool) -> bool:
        """One that knows tells those that do not what each has of this epoch, and where schedulers and steps are with
        its own part of it; whether it has come to that."""
        mine: list[Any] = [self._phase, {each: list(share) for each, share in self._shares.items()}] if is_first else []
        everyones = world.gather_objects(mine)
        told = next((each for each in everyones if each), None)
        if told is None:
            return False
        ended = world.broadcast(
            how_it_ended(self._trainer, self._rates.stepped) if mine else None, everyones.index(told)
        )
        if not self._knows:
            self._phase, self._knows = told[0], True
            self._shares = {each: Share(*share) for each, share in told[1].items()}
            if ended is not None:
                end_as_others(self._trainer, ended)
                self._rates.stepped.update(ended["stepped"])
        return True

    # ---- what each rank has, and how far it is ----

    def _begin(self, original: Any) -> Any:
        def on_run_start(data_fetcher: Any) -> None:
            world, gates = self._strategy.world, self._strategy.gates
            self.start_over()
            if world is not None and gates is not None and not world.drifting:
                self._hear(gates)
                mine: list[Any] = [self._called(gates.name), list(self._mine()), self._taken_up]
                told, self._taken_up = world.gather_objects(mine), []
                self._knows, self._phase, self._shares = True, 0, {name: Share(*each) for name, each, _ in told}
                for number, each in enumerate(unheard(self._shares.values())):
                    self._shares[f"(lost as the epoch began, {number})"] = each
                there = [Share(*each) for _, each, _ in told]
                for name, each, begin in (left for *_, of_rank in told for left in of_rank):
                    lost = f"{name}, lost before a checkpoint"
                    self._shares[lost] = before(Share(*each), there)
                    self._places[lost] = self._now() * _BATCHES + begin
            original(data_fetcher)

        return on_run_start

    def _mine(self) -> Share:
        fit, trainer = self._trainer.fit_loop, self._trainer
        first = fit.epoch_loop.batch_progress.current.ready
        anew = (
            trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting
        )  # as Lightning has it
        skipped, loaders = 0, []
        for loader in fit._combined_loader.flattened:
            told, count = told_of(loader)
            source = _follower(loader) if count else None
            if source is not None and not anew:
                position = source.position(before=False, ended=False)
                told, skipped = position.get("share"), position.get("taken", 0)
                if told is not None and told["kind"] == "given":
                    count = -(-len(told["indices"]) // told["batch_size"])
            loaders.append((told, count))
        unsized = first + any(told is None for told, _ in loaders)  # how much there is, nobody knows; or there is none
        end = unsized if math.isinf(fit.max_batches) else fit.max_batches
        return Share(first, max(first, end), skipped, fit._combined_loader._mode == "max_size_cycle", loaders)

    def _begin_batch(self, original: Any) -> Any:
        def on_train_batch_start(batch: Any, batch_idx: int) -> None:
            original(batch, batch_idx)
            gates, epoch = self._strategy.gates, self._trainer.fit_loop.epoch_loop
            if gates is not None and not epoch._should_accumulate():  # else its gradients are yet to be stepped with
                self._hear(gates)
                self._gone |= self._shares.keys() - set(self._trainer.strategy.survivors.names)
                gates.tell_place(self._now() * _BATCHES + epoch.batch_progress.current.ready)

        return on_train_batch_start

    def _now(self) -> int:
        return self._trainer.current_epoch * _PHASES + min(self._phase, _PHASES - 1)

    def _number(self, name: str) -> int:
        """Of the first batch that a rank has not committed, of what it has now."""
        now, number = divmod(int(self._places.get(name, 0.0)), _BATCHES)
        return number if now == self._now() else 0

    def _hear(self, gates: Gates) -> None:
        """Where averaging goes on with newcomers there are other gates, with other names: what the last told counts."""
        if self._gates is not None:
            self._learn({self._called(name): place for name, place in self._gates.places.items()})
        if gates is not self._gates:
            self._gates, self._called = gates, self._trainer.strategy.survivors.called
            self._learn({self._called(name): place for name, place in gates.places.items()})

    def _learn(self, places: Mapping[str, float]) -> None:
        for name, place in places.items():
            self._places[name] = max(place, self._places.get(name, 0.0))

    def _tell(self, lost: dict[str, Share]) -> None:
        for name, each in lost.items():
            if not each.is_known and each.first < each.end:
                log.warning(
                    "What rank %s had of epoch %d and did not train on is missing in it: with a DataLoader of a "
                    "map-style dataset and a DistributedSampler, Lightning's or torch's, others could tell which "
                    "samples these are.", name, self._trainer.current_epoch,
                )  # fmt: skip

    # ---- training on it ----

    def _train(self, share: Share) -> None:
        """The epoch goes on, by Lightning's own loop, with these batches."""
        fit, trainer = self._trainer.fit_loop, self._trainer
        epoch, fetcher, combined = fit.epoch_loop, fit._data_fetcher, fit._combined_loader
        undo = [
            set_for_now(fit, "max_batches", share.end),
            replace(epoch, "update_lr_schedulers", _within_epoch),
        ]
        if trainer.val_check_interval == 1.0 and isinstance(trainer.val_check_interval, float):
            undo.append(set_for_now(trainer, "val_check_batch", share.end))
        _show(trainer, share.end)
        made = []
        for loader, (told, _) in zip(combined.flattened, share.loaders, strict=True):
            if (source := _follower(loader)) is None:
                source = sources_of([loader])[0]
                made.append(source)
            loader._iterator = None  # of workers that persist
            source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": told})
        try:
            iter(fetcher)
            fetcher.length, fetcher.done = share.end - share.first, False
            epoch.batch_progress.is_last_batch = False
            while not epoch.done:
                try:
                    epoch.advance(fetcher)
                    epoch.on_advance_end(fetcher)
                except StopIteration:
                    break
                finally:
                    epoch.on_iteration_done()
        finally:
            for each in undo:
                each()
            for source in made:
                source.detach()
                source.loader._iterator = None
        epoch.batch_progress.is_last_batch = True


def _show(trainer: Any, batches: int) -> None:
    """The epoch has so many batches now."""
    for bar in callbacks_of(trainer, "TQDMProgressBar"):
        bar.train_progress_bar.total = batches
    for bar in callbacks_of(trainer, "RichProgressBar"):
        if bar.progress is not None and bar.train_progress_bar_id is not None:
            bar.progress.update(bar.train_progress_bar_id, total=batches)


def _within_epoch(original: Any) -> Any:
    """Schedulers that step with an epoch have done so with the last batch of this rank's own."""

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "epoch" or update_plateau_schedulers:
            original(interval, update_plateau_schedulers)

    return update_lr_schedulers


def _follower(loader: Any) -> Source | None:
    """What follows a loader's position, for checkpoints."""
    owner = getattr(vars(loader).get("_get_iterator"), "__self__", None)
    return owner if isinstance(owner, Source) else None
