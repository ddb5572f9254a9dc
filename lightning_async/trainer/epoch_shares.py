"""Who has which batches of the epoch under way, and how far each is, as far as this rank has been told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from lightning_async.data.shares import Share, stream_of, told_of
from lightning_async.engine.gates import Gates
from lightning_async.trainer.redealt import follower

__all__ = ["EpochShares"]

_PHASES, _BATCHES = 2**9, 2**28
"""Of a place: how often an epoch was dealt out anew, at most, and how many batches it has; with the epoch, 53 bits."""


class EpochShares:
    """Of all ranks, by the names that they have for life.

    Args:
        trainer: in a fit; its strategy has `Survivors`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.known = False
        """This rank was there when the epoch began, or was told since; else the rest says nothing."""
        self.shares: Mapping[str, Share] = {}
        """What each has of the epoch since it began, or was last dealt out."""
        self.phase = 0
        """How often the epoch was dealt out anew."""
        self.places: dict[str, float] = {}
        """How far each was with what all have committed."""
        self.first: Share | None = None
        """What this rank, which comes within an epoch, begins with."""
        self.begins = False
        """This rank comes within an epoch of streams, and begins its own."""
        self.dealt: list[int] = []
        """Of how many parts this rank has which, ``[part, parts]``, since one came within the epoch."""
        self.came = False
        """This rank has come within the epoch, and has a part of it."""
        self.has_none = False
        """This rank has come within the epoch, and has no part of it."""
        self.at_end = False
        """This rank trains on what others have left at the end of the epoch."""
        self._gone: set[str] = set()
        self._gates: Gates | None = None
        self.called: Callable[[str], str] = str
        """What those that places are heard of from mean by a name."""

    def forget(self) -> None:
        """Another epoch begins, or another training."""
        self.known, self.shares, self.places, self._gates, self._gone = False, {}, {}, None, set()
        self.dealt, self.came, self.has_none = [], False, False

    def deal(self, shares: Mapping[str, Share]) -> None:
        """From here on this is what each has."""
        self.shares, self.phase, self._gone = shares, self.phase + 1, set()

    def take_part(self, name: str) -> None:
        """This rank, by its name, has its part of what was dealt, as checkpoints say; or none, where that was short."""
        names = list(self.shares)
        self.has_none = not self.known or name not in names
        self.dealt = [] if self.has_none else [names.index(name), len(names)]

    def plain(self) -> dict[str, list[Any]]:
        """The shares, to be told."""
        return {name: list(share) for name, share in self.shares.items()}

    def gone(self) -> list[str]:
        """Those that were lost since it was dealt out, whoever has come back by their names."""
        self._gone |= self.shares.keys() - set(self._trainer.strategy.survivors.names)
        return sorted(self._gone & self.shares.keys())

    def place(self, batch: int) -> float:
        """What is told of a rank that comes to this batch: grows over phases and epochs."""
        return self._now() * _BATCHES + batch

    def number(self, name: str) -> int:
        """Of the first batch that a rank has not committed, of what it has now."""
        now, number = divmod(int(self.places.get(name, 0.0)), _BATCHES)
        return number if now == self._now() else 0

    def _now(self) -> int:
        return self._trainer.current_epoch * _PHASES + min(self.phase, _PHASES - 1)

    def hear(self, gates: Gates) -> None:
        """Where averaging goes on with newcomers there are other gates, with other names: what the last told counts."""
        if self._gates is not None:
            self.learn({self.called(name): place for name, place in self._gates.places.items()})
        if gates is not self._gates:
            self._gates, self.called = gates, self._trainer.strategy.survivors.called
            self.learn({self.called(name): place for name, place in gates.places.items()})

    def learn(self, places: Mapping[str, float]) -> None:
        """Somebody knows that these are, at least, so far."""
        for name, place in places.items():
            self.places[name] = max(place, self.places.get(name, 0.0))

    @property
    def streams(self) -> bool:
        """Whether this rank's loaders have streams, of which nobody can tell what is left."""
        loaders = self._trainer.fit_loop._combined_loader.flattened
        return all(isinstance(getattr(each, "dataset", None), IterableDataset) for each in loaders)

    def whole(self) -> Share:
        """What this rank's loaders have of any epoch that begins."""
        return Share(0, 0, 0, False, [told_of(loader) for loader in self._trainer.fit_loop._combined_loader.flattened])

    def mine(self) -> Share:
        """What this rank's loaders have of the epoch that begins."""
        fit, trainer = self._trainer.fit_loop, self._trainer
        first = fit.epoch_loop.batch_progress.current.ready
        anew = (
            trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting
        )  # as Lightning has it
        skipped, loaders, own = 0, [], 0
        for loader in fit._combined_loader.flattened:
            told, count = told_of(loader)
            source = follower(loader) if count else None
            if source is not None and not anew:
                position = source.position(before=False, ended=False)
                told, skipped = position.get("share"), position.get("taken", 0)
                if told is not None and told["kind"] == "given":
                    own = count = -(-len(told["indices"]) // told["batch_size"])
            elif told is None and math.isinf(fit.max_batches) and (told := stream_of(loader)) is not None:
                found = None if anew else follower(loader)
                position = {} if found is None else found.position(before=True, ended=False)  # one is held
                told, skipped = position.get("share") or told, position.get("taken", 0)
            loaders.append((told, count))
        # How much there is, nobody knows; or there is none.
        unsized = first + any(told is None or told["kind"] == "stream" for told, _ in loaders)
        end = unsized if math.isinf(fit.max_batches) else fit.max_batches
        if own and trainer.limit_train_batches == 1.0:  # smaller batches may be more than a loader's own
            end = max(end, first + own - skipped)
        return Share(first, max(first, end), skipped, fit._combined_loader._mode == "max_size_cycle", loaders)
