"""A rank comes within an epoch: what is left of that is dealt out among all, it included."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from lightning_async.data.shares import Joined, Share, inherited, joined
from lightning_async.engine.header import Vote
from lightning_async.trainer.epoch_shares import EpochShares
from lightning_async.trainer.learning_rates import LearningRates
from lightning_async.trainer.patches import Undo, replace, take_back
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.redealt import go_on_with

__all__ = ["Newcomers"]

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a rank is as another one comes, which may be this one.

    Args:
        name: for life.
        comes: it is the newcomer.
        is_within: it can go on with another part of the epoch.
        epoch: its number.
        ready: the number of its next batch.
        lengths: of the datasets of the newcomer's loaders.
        streams: these are streams, see `EpochShares`.
        places: see `EpochShares`.
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


class Newcomers:
    """Deals out the rest of an epoch.

    Args:
        strategy: where all ranks meet.
        trainer: its loops are patched.
        epoch: who has what.
        rates: what schedulers have taken.
    """

    def __init__(self, strategy: Drifting, trainer: Any, epoch: EpochShares, rates: LearningRates) -> None:
        self._strategy, self._trainer, self._epoch, self._rates = strategy, trainer, epoch, rates
        self._until_end: list[Undo] = []
        """What holds for the rest of the epoch."""
        self._joined: Joined = {}
        """What was foreseen."""
        self._follows = False
        """This rank has come within an epoch of streams, and ends it with the others."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        if not self._strategy.shrinks:
            return []
        loop = self._trainer.fit_loop.epoch_loop
        return [
            replace(loop, "on_run_start", self._begin),
            replace(loop, "on_advance_end", self._after_batch),
            replace(loop, "run", self._run),
        ]

    def foresee(self) -> None:
        """One is about to come, and will be waited for: have at hand what takes time; from any thread."""
        self._joined = joined(list(self._epoch.shares.values()))

    def told(self) -> list[Any]:
        """What the newcomer must know of the epoch under way."""
        return [self._epoch.phase, self._epoch.plain()]

    def place(self, name: str, comes: bool) -> list[Any]:
        """Where this rank is: all stand at a gate, so that holds until it opens.

        Args:
            name: for life.
            comes: it is the newcomer, and does not know yet which epoch that will be.
        """
        if (gates := self._strategy.gates) is not None:
            self._epoch.hear(gates)
        return list(self._place(name, comes))

    def deal(self, name: str, places: list[list[Any]], told: list[Any] | None) -> None:
        """One has come, and it is known to the batch what each has left.

        Where somebody is not between two steps of the epoch, or it cannot be told what is left, the newcomer has its
        part from the next epoch on; of streams it begins its own, until the others' end.

        Args:
            name: of this rank, for life.
            places: of all.
            told: of the newcomer: what one of those that are there knows of the epoch.
        """
        gates, epoch = self._strategy.gates, self._epoch
        if not self._strategy.shrinks or gates is None:
            return
        epoch.hear(gates)
        epoch.has_none |= told is not None
        all_ = [_Place(*each) for each in places]
        there, lengths = [each for each in all_ if not each.comes], [each.lengths for each in all_ if each.comes]
        if there and told is not None and all(each.streams for each in all_):
            epoch.phase, epoch.shares, epoch.known = told[0], _shares(told[1]), True
            epoch.begins, epoch.came, epoch.has_none = True, True, False
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
        dealt, self._joined = inherited(left, {each.name: each.ready for each in all_}, self._joined), {}
        if len(dealt) < len(all_):  # there is not one batch for each
            return
        epoch.deal(dealt)
        epoch.known = True
        epoch.take_part(name)
        log.info("The rest of epoch %d is dealt out among %d ranks.", *epochs, len(all_))
        if told is not None:
            epoch.first, epoch.came = epoch.shares[name], True
            self._rates.stepped.update(there[0].stepped)
        else:
            self._until_end += go_on_with(self._trainer, epoch.shares[name])

    def _place(self, name: str, comes: bool) -> _Place:
        number, epoch = self._trainer.current_epoch, self._epoch
        if comes:
            own = epoch.whole()
            return _Place(name, True, own.is_known, number, 0, own.lengths, epoch.streams, {}, {})
        fit = self._trainer.fit_loop
        count, ends = fit.epoch_loop.batch_progress.current, epoch.at_end or fit.epoch_loop.done
        by_batch = type(fit._data_fetcher).__name__ != "_DataLoaderIterDataFetcher"
        in_step = count.ready != count.completed or (count.ready > 0 and self._strategy.gathers)
        is_within = epoch.known and by_batch and not in_step and not ends
        lengths: list[int] = []
        return _Place(
            name, False, is_within, number, count.ready, lengths, epoch.streams, epoch.places, self._rates.stepped
        )

    def _begin(self, original: Any) -> Any:
        def on_run_start(data_fetcher: Any) -> None:
            original(data_fetcher)
            if self._epoch.first is not None:
                self._until_end += go_on_with(self._trainer, self._epoch.first)
                self._epoch.first = None
            self._follows, self._epoch.begins = self._epoch.begins, False

        return on_run_start

    def _after_batch(self, original: Any) -> Any:
        def on_advance_end(data_fetcher: Any) -> None:
            original(data_fetcher)
            gates, loop = self._strategy.gates, self._trainer.fit_loop.epoch_loop
            ended = self._follows and gates is not None and Vote.EPOCH in gates.agreed
            if ended and not self._strategy.gathers:  # its stream goes on, and the others' have come to an end
                loop.batch_progress.is_last_batch = True

        return on_advance_end

    def _run(self, original: Any) -> Any:
        def run(data_fetcher: Any) -> None:
            try:
                original(data_fetcher)
            finally:
                take_back(self._until_end)

        return run


def _shares(plain: dict[str, list[Any]]) -> dict[str, Share]:
    return {name: Share(*share) for name, share in plain.items()}
