"""Ranks are lost: the others train, at the end of the epoch, on what those had not shared of it."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning_async.data.shares import Share, before, inherited, streamed, unheard
from lightning_async.engine.gates import Gates
from lightning_async.engine.world import World
from lightning_async.trainer.epoch_shares import EpochShares
from lightning_async.trainer.latecomer import end_as_others, how_it_ended
from lightning_async.trainer.learning_rates import LearningRates
from lightning_async.trainer.logged import put_missing, take_logged
from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.redealt import train_on

__all__ = ["Inheritance", "inheritance_of"]

log = logging.getLogger(__name__)


def inheritance_of(trainer: Any) -> Inheritance | None:
    """That of the fit under way; None where ranks cannot be lost."""
    return vars(trainer.strategy).get("inheritance")


class Inheritance:
    """Each sample of an epoch is trained on once, in work that a round has merged, whoever is lost meanwhile.

    At the start of an epoch all ranks tell each other what they have of it, and with each message how far they are. At
    its end, at the gate, those that are there deal out what the lost had not shared, and go on with the epoch;
    newcomers that have had nothing of it, too.

    Args:
        strategy: has the gates, and is where all ranks meet.
        trainer: its loops are patched.
        rates: what schedulers have taken.
    """

    def __init__(self, strategy: Drifting, trainer: Any, rates: LearningRates) -> None:
        self._strategy, self._trainer, self._rates = strategy, trainer, rates
        self.epoch = EpochShares(trainer)
        self._taken_up: list[Any] = []
        """What `left` was where this fit goes on."""

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
        self.epoch.forget()

    def left(self) -> list[Any]:
        """What the lost have left of this epoch by now: plain values, for a checkpoint."""
        epoch = self.epoch
        return [[name, list(epoch.shares[name]), epoch.number(name)] for name in epoch.gone()] if epoch.known else []

    def take_up(self, left: list[Any]) -> None:
        """The epoch that begins next is gone on with, and that is `left` of it."""
        self._taken_up = left

    def rest(self) -> bool:
        """At the gate that ends an epoch: train on what the lost have left of it; whether there was something."""
        world, gates, epoch = self._strategy.world, self._strategy.gates, self._trainer.fit_loop.epoch_loop
        if not self._strategy.shrinks or world is None or gates is None:
            return False
        self.epoch.hear(gates)
        stops = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        goes_on = not stops and epoch.global_step != epoch.max_steps
        name = self.epoch.called(gates.name)
        ready, came = epoch.batch_progress.current.ready, self.epoch.came
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

    def _log_alike(self, world: World, came: list[bool]) -> None:
        """One that came within the epoch has logged what its part of it was long enough for: another tells it the
        rest."""
        if any(came) and not all(came):
            first = came.index(False)
            logged = world.broadcast(take_logged(self._trainer) if world.rank == first else None, first)
            if self.epoch.came and logged is not None:
                put_missing(self._trainer, logged)

    def _introduce(self, world: World, is_first: bool) -> bool:
        """One that knows tells those that do not what each has of this epoch, and where schedulers and steps are with
        its own part of it; whether it has come to that."""
        mine: list[Any] = [self.epoch.phase, self.epoch.plain()] if is_first else []
        everyones = world.gather_objects(mine)
        told = next((each for each in everyones if each), None)
        if told is None:
            return False
        ended = world.broadcast(
            how_it_ended(self._trainer, self._rates.stepped) if mine else None, everyones.index(told)
        )
        if not self.epoch.known:
            self.epoch.phase, self.epoch.known = told[0], True
            self.epoch.shares = {each: Share(*share) for each, share in told[1].items()}
            if ended is not None:
                end_as_others(self._trainer, ended)
                self._rates.stepped.update(ended["stepped"])
        return True

    # ---- what each rank has, and how far it is ----

    def _begin(self, original: Any) -> Any:
        def on_run_start(data_fetcher: Any) -> None:
            world, gates = self._strategy.world, self._strategy.gates
            if self.epoch.first is None and not self.epoch.begins:  # else it is under way, and this rank has been told
                self.epoch.forget()
                if world is not None and gates is not None and not world.drifting:
                    self._tell_all(world, gates)
            original(data_fetcher)

        return on_run_start

    def _tell_all(self, world: World, gates: Gates) -> None:
        epoch = self.epoch
        epoch.hear(gates)
        mine: list[Any] = [epoch.called(gates.name), list(epoch.mine()), self._taken_up]
        told, self._taken_up = world.gather_objects(mine), []
        shares = {name: Share(*each) for name, each, _ in told}
        for number, each in enumerate(unheard(shares.values())):
            shares[f"(lost as the epoch began, {number})"] = each
        there = [Share(*each) for _, each, _ in told]
        left_at: dict[str, int] = {}
        for name, each, begin in (left for *_, of_rank in told for left in of_rank):
            lost = f"{name}, lost before a checkpoint"
            shares[lost] = before(Share(*each), there)
            left_at[lost] = begin
        epoch.known, epoch.phase, epoch.shares = True, 0, shares  # whole at once: other threads read it
        epoch.places |= {lost: epoch.place(begin) for lost, begin in left_at.items()}

    def _begin_batch(self, original: Any) -> Any:
        def on_train_batch_start(batch: Any, batch_idx: int) -> None:
            original(batch, batch_idx)
            gates, epoch = self._strategy.gates, self._trainer.fit_loop.epoch_loop
            if gates is not None and not epoch._should_accumulate():  # else its gradients are yet to be stepped with
                self.tell_place(gates)

        return on_train_batch_start

    def tell_place(self, gates: Gates) -> None:
        """What is sent next holds all that this rank has done, the batch under way included."""
        self.epoch.hear(gates)
        self.epoch.gone()
        gates.tell_place(self.epoch.place(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready))

    def _tell(self, lost: dict[str, Share]) -> None:
        for name, each in lost.items():
            if not each.is_known and not each.is_of_stream and each.first < each.end:
                log.warning(
                    "What rank %s had of epoch %d and did not train on is missing in it, from its batch %d on: with a "
                    "DataLoader of a map-style dataset and a DistributedSampler, Lightning's or torch's, or of a "
                    "PartitionedStream itself without a limit of batches, others could tell which samples these are.",
                    name, self._trainer.current_epoch, self.epoch.number(name),
                )  # fmt: skip
