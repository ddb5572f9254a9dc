"""Recovery: find the checkpoint to resume from. Candidates are tried in order and verified before use.

The ranks that see the same directory share the work: each file of a candidate is read by one of them. A damaged
checkpoint is put into quarantine and reported, and the next one is tried. A checkpoint that cannot be read for another
reason, such as a disk or a network that fails, stays where it is, because it may be whole.
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
"""Names of strategies; ``"auto"`` takes the newest whole checkpoint. ``"step=1200"`` is allowed, too."""

Gather = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Recovered:
    """The result of `recover`.

    Args:
        entry: The checkpoint, whole on every rank; None if there is none.
        damaged: Path of each checkpoint that this rank has put into quarantine, with its damage.
        unreadable: Path of each checkpoint that this rank could not read, with the reason.
    """

    entry: CheckpointEntry | None
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def candidates(
    entries: Sequence[CheckpointEntry], strategy: str = "auto", best: Best | None = None
) -> list[CheckpointEntry]:
    """Return the checkpoints that a strategy may take, in order: the newest first, except for ``"best"``.

    Args:
        entries: All checkpoints of the store, the newest first.
        strategy: One of `STRATEGIES`, or ``"step=N"``. Default: ``"auto"``.
        best: Metric that ranks checkpoints, for ``"best"``. Default: None.

    Raises:
        ValueError: The strategy is unknown, or ``best`` is missing.
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
    """Return the number to try next: the first number of ``rows[0]`` that is in every row; None if there is none.

    >>> agree([[7, 6, 5], [6, 5], [7, 6, 4]])
    6
    """
    # Ranks with directories of their own may have different checkpoints.
    common = set(rows[0]).intersection(*rows[1:])
    return next((number for number in rows[0] if number in common), None)


def recover(
    store: CheckpointStore, strategy: str = "auto", best: Best | None = None, gather: Gather = lambda value: [value]
) -> Recovered:
    """Return the first candidate that every rank finds whole; all ranks must call this together.

    Ranks may see different directories under the same path, for example on local disks.

    Args:
        store: The checkpoints.
        strategy: One of `STRATEGIES`, or ``"step=N"``. Default: ``"auto"``.
        best: Metric that ranks checkpoints, for ``"best"``. Default: None.
        gather: Gathers a value of each rank. Default: for a single rank.

    Raises:
        CheckpointError: There are checkpoints, but none of them is a candidate that all ranks can read; or a newer
            version of this package wrote one.
        ValueError: The strategy is unknown.
    """
    # Before the first gather, so that a wrong argument raises on every rank at once.
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
        # Each rank has read a share of the files: one bad share makes the checkpoint bad for all ranks of a directory.
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
    """Return the identity of this rank's directory, and the share of files to read: index and number of shares."""
    identity = store.files.identity(store.dirpath)
    # Processes of one directory are told apart by random texts: ranks may be unknown here.
    me = uuid.uuid4().hex
    together = [each for place, each in gather([identity, me]) if place == identity]
    return identity, (together.index(me), len(together))


def _judge(store: CheckpointStore, entry: CheckpointEntry, error: Exception | None, found: Recovered) -> bool:
    """Return whether ``error`` is None; put a damaged checkpoint into quarantine, and note the error in ``found``."""
    if isinstance(error, DamagedCheckpoint):
        try:
            store.quarantine(entry)
            found.damaged[entry.path] = str(error)
        except OSError as refused:  # the directory may be read-only
            found.damaged[entry.path] = f"{error} It keeps its name: {refused}"
    elif error is not None:
        found.unreadable[entry.path] = str(error)
    return error is None


def _entries(store: CheckpointStore, gather: Gather) -> list[CheckpointEntry]:
    """Return all entries; raise on all ranks if any rank cannot read them, or finds one of a newer format."""
    entries = []
    words = ""
    try:
        entries = store.entries()
    except OSError as error:
        words = str(error)
    for entry in entries:
        if isinstance(entry.error, CheckpointError) and not isinstance(entry.error, DamagedCheckpoint):
            words = str(entry.error)
    # Gathered, so that all ranks raise together: the others would wait for one that has raised alone.
    if told := [f"rank {rank}: {said}" for rank, said in enumerate(gather(words)) if said]:
        raise CheckpointError(f"Training cannot be resumed. {'; '.join(told)}")
    return entries


def _refuse_to_begin_anew(
    store: CheckpointStore, strategy: str, whole: Sequence[int], unreadable: Sequence[dict[str, str]]
) -> None:
    """Raise on all ranks if any checkpoint may be whole; if all are damaged, training may start from the beginning."""
    told = [f"rank {rank}: {path}: {why}" for rank, paths in enumerate(unreadable) for path, why in paths.items()]
    # Training from the start would overwrite, or hide, checkpoints that may be needed.
    if told or any(whole):
        raise CheckpointError(
            f"`recover={strategy!r}` finds no checkpoint in {store.dirpath} that all ranks can read. There are "
            f"{list(whole)} others, by rank; {'; '.join(told) or 'none is unreadable'}. `lightning-async checkpoint "
            f"list {store.dirpath}` shows them; `recover='latest'` takes the newest; another `dirpath` begins anew."
        )
