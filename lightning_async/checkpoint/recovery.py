"""Which checkpoint training goes on from: candidates in order, one that all ranks can read, verified before it is used.

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
"""One plain value of every rank, known to all ranks when it returns."""


@dataclass(frozen=True)
class Recovered:
    """What `recover` found.

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
    """Those that a strategy may take, in order, the newest first unless it is ``"best"``.

    Args:
        entries: all that the store has, the newest first.
        strategy: one of `STRATEGIES`, or ``"step=N"``. Default: ``"auto"``.
        best: what the best one is, for ``"best"``.

    Raises:
        ValueError: the strategy is none of these, or ``best`` is missing.
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
    """The number to try next: the first that every rank has, in the first rank's order; None where there is none.

    >>> agree([[7, 6, 5], [6, 5], [7, 6, 4]])
    6
    """
    common = set(rows[0]).intersection(*rows[1:])
    return next((number for number in rows[0] if number in common), None)


def recover(
    store: CheckpointStore,
    strategy: str = "auto",
    best: Best | None = None,
    gather: Gather = lambda value: [value],
) -> Recovered:
    """The first candidate that is whole on all ranks. All ranks call this, each with its own view of the directory.

    Args:
        store: the checkpoints; the ranks' directories may be one or apart.
        strategy: see `candidates`. Default: ``"auto"``.
        best: what the best one is, for ``"best"``. Default: None.
        gather: one plain value of every rank, to all. Default: this process is the only rank.

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
    """Which directory this rank sees, which share of its files to read, of how many: those who see one divide it."""
    identity = store.files.identity(store.dirpath)
    me = uuid.uuid4().hex
    together = [each for place, each in gather([identity, me]) if place == identity]
    return identity, (together.index(me), len(together))


def _judge(store: CheckpointStore, entry: CheckpointEntry, error: Exception | None, found: Recovered) -> bool:
    """Whether nothing is wrong with this rank's files; where another rank found damage, they may be another copy."""
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
    """What there is. Where one rank cannot go on, all hear of it: none waits for it.

    A newer format is such a case: to go on from an older checkpoint would throw away what was trained since.
    """
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
    """Where all was damaged, nothing is left to resume from. But what is there is not passed over."""
    told = [f"rank {rank}: {path}: {why}" for rank, paths in enumerate(unreadable) for path, why in paths.items()]
    if told or any(whole):
        raise CheckpointError(
            f"`recover={strategy!r}` finds no checkpoint in {store.dirpath} that all ranks can read. There are "
            f"{list(whole)} others, by rank; {'; '.join(told) or 'none is unreadable'}. `lightning-async checkpoint "
            f"list {store.dirpath}` shows them; `recover='latest'` takes the newest; another `dirpath` begins anew."
        )
