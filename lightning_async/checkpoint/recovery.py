"""The checkpoint that training goes on from: candidates in order, one that all ranks can read, verified before use.

Every file of a candidate is read, by one of the ranks that see the same directory. What is damaged is put into
quarantine and named, and the next one is tried. What cannot be read for another reason (a disk or a network that
fails) is left where it is: it may be whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_async.algorithms.checkpoint_policies import Best
from lightning_async.checkpoint.retention import saved
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.errors import CheckpointError, DamagedCheckpoint

STRATEGIES = ("auto", "latest", "best", "last_good")
"""``"auto"`` is the newest one that is whole; ``"step=1200"`` is allowed, too."""

Gather = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Recovered:
    """The result of `recover`.

    Args:
        entry: whole on every rank; None where there is none.
        damaged: paths of those that this rank has put into quarantine, and what is wrong with them.
        unreadable: paths of those left alone, and why this rank could not read them.
    """

    entry: CheckpointEntry | None
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def candidates(
    entries: Sequence[CheckpointEntry], strategy: str = "auto", best: Best | None = None
) -> list[CheckpointEntry]:
    """Return those that a strategy may take, in order, the newest first unless it is ``"best"``.

    ``entries`` are all that the store has, the newest first.

    Raises:
        ValueError: the strategy is neither one of `STRATEGIES` nor ``"step=N"``, or ``best`` is missing.
    """
    kind, step = _parsed(strategy, best)
    readable = [entry for entry in entries if entry.manifest]
    if kind == "best":
        assert best is not None
        by_number = {entry.number: entry for entry in readable}
        return [by_number[each.number] for each in best.ranked(saved(readable))]
    if kind == "last_good":
        return [entry for entry in readable if entry.good]
    if kind == "step":
        return [entry for entry in readable if entry.step == step]
    return readable


def agree(rows: Sequence[Sequence[int]]) -> int | None:
    """Return the number to try next: the first that every rank has, in the first one's order; None where none is.

    >>> agree([[7, 6, 5], [6, 5], [7, 6, 4]])
    6
    """
    common = set(rows[0]).intersection(*rows[1:])
    return next((number for number in rows[0] if number in common), None)


def recover(
    store: CheckpointStore, strategy: str = "auto", best: Best | None = None, gather: Gather = lambda value: [value]
) -> Recovered:
    """Return the first candidate that is whole on all ranks, which call this together, each with its own directory.

    Raises:
        CheckpointError: there are checkpoints, but none that the strategy asks for and all ranks can read; or a newer
            version of this package wrote one.
        ValueError: the strategy is unknown.
    """
    _parsed(strategy, best)
    entries = _entries(store, gather)
    order = candidates(entries, strategy, best)
    found = Recovered(None)
    identity, share = _share(store, gather)
    whole = [entry for entry in entries if _judge(store, entry, entry.error, found)]
    while (number := agree(gather([entry.number for entry in order]))) is not None:
        entry = next(entry for entry in order if entry.number == number)
        order.remove(entry)
        error = store.trouble(entry, *share)
        if not (bad := {place for place, wrong in gather([identity, error is not None]) if wrong}):
            return replace(found, entry=entry)
        _judge(store, entry, error, found)
        if identity in bad:
            whole.remove(entry)
    _refuse_to_begin_anew(store, strategy, gather(len(whole)), gather(found.unreadable))
    return found


def _parsed(strategy: str, best: Best | None) -> tuple[str, int]:
    kind, equals, step = strategy.partition("=")
    if kind == "step" and equals and step.isdecimal():
        return kind, int(step)
    if strategy not in STRATEGIES:
        raise ValueError(f"`recover={strategy!r}` must be one of {STRATEGIES} or 'step=N'.")
    if strategy == "best" and best is None:
        raise ValueError("`recover='best'` needs a metric: keep with `Best(monitor=...)`.")
    return strategy, -1


def _share(store: CheckpointStore, gather: Gather) -> tuple[str, tuple[int, int]]:
    """Return which directory this rank sees, which share of its files to read, and of how many."""
    identity = store.files.identity(store.dirpath)
    me = uuid.uuid4().hex
    together = [each for place, each in gather([identity, me]) if place == identity]
    return identity, (together.index(me), len(together))


def _judge(store: CheckpointStore, entry: CheckpointEntry, error: Exception | None, found: Recovered) -> bool:
    """Return whether nothing is wrong with this rank's files; put damaged ones into quarantine."""
    if isinstance(error, DamagedCheckpoint):
        try:
            store.quarantine(entry)
            found.damaged[entry.path] = str(error)
        except OSError as refused:  # a directory that is read-only, say
            found.damaged[entry.path] = f"{error} It keeps its name: {refused}"
    elif error is not None:
        found.unreadable[entry.path] = str(error)
    return error is None


def _entries(store: CheckpointStore, gather: Gather) -> list[CheckpointEntry]:
    """Return all entries; raise on all ranks where one cannot read them, or finds one of a newer format."""
    entries = []
    words = ""
    try:
        entries = store.entries()
    except OSError as error:
        words = str(error)
    for entry in entries:
        if isinstance(entry.error, CheckpointError) and not isinstance(entry.error, DamagedCheckpoint):
            words = str(entry.error)
    if told := [f"rank {rank}: {said}" for rank, said in enumerate(gather(words)) if said]:
        raise CheckpointError(f"Training cannot be resumed. {'; '.join(told)}")
    return entries


def _refuse_to_begin_anew(
    store: CheckpointStore, strategy: str, whole: Sequence[int], unreadable: Sequence[dict[str, str]]
) -> None:
    """Raise where there are checkpoints; where all were damaged, nothing is left to resume from."""
    told = [f"rank {rank}: {path}: {why}" for rank, paths in enumerate(unreadable) for path, why in paths.items()]
    if told or any(whole):
        raise CheckpointError(
            f"`recover={strategy!r}` finds no checkpoint in {store.dirpath} that all ranks can read. There are "
            f"{list(whole)} others, by rank; {'; '.join(told) or 'none is unreadable'}. `lightning-async checkpoint "
            f"list {store.dirpath}` shows them; `recover='latest'` takes the newest; another `dirpath` begins anew."
        )
