"""Which checkpoints go: those that a policy does not keep, but never one that may still be needed."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.rules.saving.keep import KeepPolicy, Saved

__all__ = ["doomed", "prune", "saved"]


def saved(entries: Sequence[Entry]) -> list[Saved]:
    """Those that can be read, as policies see them."""
    return [Saved(entry.number, entry.step, entry.manifest.metrics, entry.good) for entry in entries if entry.manifest]


def doomed(entries: Sequence[Entry], keep: KeepPolicy, resumed_from: int | None = None) -> list[Entry]:
    """What ``keep`` does not keep, the oldest first.

    The newest, the last good one and the one resumed from stay, and so does what cannot be read: whether that is of no
    more use is for `recovery` to find out.

    Args:
        entries: all that the store has.
        keep: the policy.
        resumed_from: number of the checkpoint that training began from. Default: none.
    """
    all_ = saved(entries)
    kept = keep.keep(all_) | {resumed_from}
    kept |= {max((each.number for each in some), default=None) for some in (all_, [each for each in all_ if each.good])}
    return [entry for entry in reversed(entries) if entry.manifest and entry.number not in kept]


def prune(store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None) -> list[Entry]:
    """Delete what is doomed, and say what that was."""
    gone = doomed(store.entries(), keep, resumed_from)
    for entry in gone:
        store.remove(entry)
    return gone
