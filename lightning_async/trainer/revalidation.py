"""Ranks are lost within a validation: the others validate what was theirs, before anything is computed of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from lightning_async.data.shares import Share, inherited, told_of, unheard
from lightning_async.data.source import sources_of
from lightning_async.engine.world import World
from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.protocols import Drifting

__all__ = ["Revalidation"]

log = logging.getLogger(__name__)


class Revalidation:
    """Each sample of a validation is in its metrics once, whoever is lost before they are computed.

    What a lost rank had seen is gone with it: all of its part is dealt out among those that are left. Not where a step
    of the validation calls all ranks together, as these take unequal numbers of steps then.

    Args:
        strategy: where all ranks meet.
        trainer: its validation's loop is patched.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._loop: Any = trainer.fit_loop.epoch_loop.val_loop
        self._shares: dict[str, list[list[Share]]] = {}
        """What each rank has of each loader: at the start, and of others."""
        self._loader = 0
        """The one under way."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        if not self._strategy.shrinks:
            return []
        return [
            replace(self._loop, "on_run_start", self._begin),
            replace(self._loop, "_store_dataloader_outputs", self._end_loader),
        ]

    def _begin(self, original: Any) -> Any:
        def on_run_start() -> None:
            self._shares, self._loader = {}, 0
            world, gates = self._strategy.world, self._strategy.gates
            if world is not None and gates is not None and not world.drifting and self._loop._is_sequential:
                mine: list[Any] = [gates.name, [list(each) for each in self._mine()]]
                told = world.gather_objects(mine)
                self._shares = {name: [[Share(*each)] for each in shares] for name, shares in told}
                columns = zip(*([one for (one,) in each] for each in self._shares.values()), strict=True)
                for column in columns:
                    for number, each in enumerate(unheard(column)):
                        self._shares.setdefault(f"(unheard of, {number})", []).append([each])
            original()

        return on_run_start

    def _mine(self) -> Iterator[Share]:
        for loader, batches in zip(self._loop._combined_loader.flattened, self._loop.max_batches, strict=True):
            told, count = told_of(loader)
            known = count > 0 and batches != float("inf")
            yield Share(0, int(batches) if known else 0, 0, False, [(told if known else None, count)])

    def _end_loader(self, original: Any) -> Any:
        def store_dataloader_outputs() -> None:
            world, gates = self._strategy.world, self._strategy.gates
            while self._shares and world is not None and gates is not None and self._take_over(world, gates.name):
                pass
            self._loader += 1
            original()

        return store_dataloader_outputs

    def _take_over(self, world: World, name: str) -> bool:
        """Validate what the lost had of the loaders so far; whether there was something."""
        together = any(each.meta.on_step and each.meta.sync.should for each in self._loop._results.values())
        mine: list[Any] = [name, together]
        told = world.gather_objects(mine)
        there = dict.fromkeys((each for each, _ in told), 0)
        lost = [each for each in self._shares if each not in there]
        found = False
        for number in range(self._loader + 1):
            left = [(share, 0) for each in lost for share in self._shares[each][number]]
            for each in lost:
                self._shares[each][number] = []
            dealt = {} if any(alike for _, alike in told) else inherited(left, there)
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
            "What rank(s) %s had of a validation in epoch %d is missing in it: others can take it over where it is a "
            "DataLoader's of a map-style dataset with a DistributedSampler, Lightning's or torch's, and where nothing "
            "is logged with both `on_step=True` and `sync_dist=True`.", ", ".join(lost), self._trainer.current_epoch,
        )  # fmt: skip

    def _validate(self, share: Share, number: int, done: int) -> None:
        loader = self._loop._combined_loader.flattened[number]
        (source,) = sources_of([loader])
        source.begin_at({"taken": 0, "made": 0, "drawn": {}, "share": share.loaders[0][0]})
        try:
            for batch_idx, batch in enumerate(loader, done):
                self._loop._evaluation_step(batch, batch_idx, number, None)
        finally:
            source.detach()
            loader._iterator = None
