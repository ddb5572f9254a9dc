"""A save where all replicas stand at a gate, with one model: all that is equal on them is there once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from lightning_async.engine.checkpoint.process import SaveBusy
from lightning_async.engine.checkpoint.saver import Saver
from lightning_async.trainer.due import manifest_of
from lightning_async.trainer.names import names_of
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.saves import finish
from lightning_async.trainer.whole_state import REPLICAS, collect

__all__ = ["Met", "end", "save"]

log = logging.getLogger(__name__)


class Met(NamedTuple):
    """Who saves.

    Args:
        trainer: its replica.
        saver: of this rank.
        resume: knows this rank's place.
        group: the ranks that see this rank's directory.
    """

    trainer: Any
    saver: Saver
    resume: Resume
    group: Sequence[int]


def save(met: Met, reason: str, wanted: bool = True, queue: bool = False) -> tuple[int, int, list[int]] | None:
    """All ranks call this together; the number, the step and the ranks of the save, where any has ``wanted`` it.

    Args:
        reason: for the manifest.
        queue: leave this rank's part out where the saves before it are not written yet, rather than wait for them.
    """
    trainer, saver = met.trainer, met.saver
    strategy, averager, names = trainer.strategy, trainer.strategy.averager, names_of(trainer)
    mine = [wanted, averager.marks.saved, int(averager.global_step()), names.mine]
    wishes, known, steps, ranks = zip(*strategy.world.gather_objects(mine), strict=True)
    if not any(wishes):
        return None
    alone = len(ranks) < names.started  # one that is lost may have saved alone, as the next number, at this very step
    number, step = max(known) + 1 + alone, max(steps)
    averager.marks.begin(number)
    ranks = [rank for rank in sorted(ranks) if rank in met.group]
    strategy.world.drifting, before = True, strategy.world.drifting  # metrics are this rank's: no other computes them
    try:
        states = strategy.states_here() if strategy.served else nullcontext()
        with met.resume.as_it_was() as state, states:
            alike = strategy.alike if strategy.served else REPLICAS
            shared, checkpoint = collect(trainer, alike, state.callbacks, saver.pickles)
            shared["averaging"] = averager.state_dict()
            own = {"checkpoint": checkpoint, "resume": state.resume, "clocks": averager.clocks()}
            saver.save(number, step, ranks, shared, own, manifest_of(trainer, reason), queue)
    except SaveBusy as error:
        log.warning("Rank %d leaves out its part of save %d: %s", names.mine, number, error)
    finally:
        strategy.world.drifting = before
    return number, step, ranks


def end(met: Met, reason: str) -> None:
    """The last save, by all ranks; one whose ranks are not left is repeated by those that are."""
    while not _is_whole(met, reason):
        log.warning("Rank %d: the last save was one with ranks that are lost: those that are left save once more.",
                    names_of(met.trainer).mine)  # fmt: skip


def _is_whole(met: Met, reason: str) -> bool:
    """Whether nobody was lost on the way, or what was saved is whole all the same; the answer is that of all."""
    saved = save(met, reason)
    assert saved is not None
    number, _, ranks = saved
    finish(met.trainer, met.saver)
    whole = met.saver.is_committed(number) or not names_of(met.trainer).lost.intersection(ranks)
    return all(met.trainer.strategy.world.gather_objects(whole))
