"""The choice of the checkpoint to resume from: candidates are verified one after the other.

The ranks that see the same directory share the work: each file of a candidate is read by one of them. A damaged
checkpoint is put into quarantine and reported, and the next candidate is verified. A checkpoint that cannot be read for
another reason, such as a failing disk or network, keeps its name, because it may be undamaged.
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
"""Names of recovery strategies. ``"auto"`` is the newest undamaged checkpoint. ``"step=1200"`` is allowed, too."""

Gather = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Recovered:
    """The result of `recover`.

    Args:
        entry: The checkpoint, which every rank has found undamaged; None if no such checkpoint exists.
        damaged: By path, a description of the damage of each checkpoint that this rank has put into quarantine.
        unreadable: By path, the reason why this rank could not read a checkpoint.
    """

    entry: CheckpointEntry | None
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def candidates(
    entries: Sequence[CheckpointEntry], strategy: str = "auto", best: Best | None = None
) -> list[CheckpointEntry]:
    """Return the checkpoints from which a strategy allows to resume, in the order in which to try them.

    The newest comes first, except for ``"best"``, which puts the best first. Checkpoints without a readable manifest
    are left out.

    Args:
        entries: All checkpoints of the store, the newest first.
        strategy: One of `STRATEGIES`, or ``"step=N"``. Default: ``"auto"``.
        best: Policy that ranks checkpoints by a metric, for ``"best"``. Default: None.

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
    """Return the number of the checkpoint to try next: the first number of ``rows[0]`` that is in every row, or None.

    ``rows`` has one row for each rank: the numbers of its candidates, in the order in which to try them.

    >>> agree([[7, 6, 5], [6, 5], [7, 6, 4]])
    6
    """
    # Ranks with directories of their own may have different checkpoints.
    common = set(rows[0]).intersection(*rows[1:])
    return next((number for number in rows[0] if number in common), None)


def recover(
    store: CheckpointStore,
    strategy: str = "auto",
    best: Best | None = None,
    gather: Gather = lambda value: [value],
    load: Callable[[CheckpointEntry], object] = lambda entry: None,
) -> Recovered:
    """Return the first checkpoint, in the order of `candidates`, that every rank finds undamaged.

    All ranks must call this together. Ranks may see different directories under the same path, for example on local
    disks. A damaged checkpoint is put into quarantine. One whose bytes are right, but whose contents make no sense to
    this program, keeps its name.

    Args:
        store: The checkpoints.
        strategy: One of `STRATEGIES`, or ``"step=N"``. Default: ``"auto"``.
        best: Policy that ranks checkpoints by a metric, for ``"best"``. Default: None.
        gather: Function that returns a value of each rank, in rank order. Default: for a single rank.
        load: Function that loads this rank's part of a verified checkpoint. It raises DamagedCheckpoint or ValueError
            if the contents make no sense, and the next checkpoint is tried. Default: nothing is loaded.

    Raises:
        CheckpointError: No candidate can be read by all ranks, but the directory has checkpoints that may be undamaged;
            or a newer version of this package wrote one of the checkpoints.
        ValueError: The strategy is unknown, or ``best`` is missing.
    """
    # Before the first gather, so that a wrong argument raises on every rank at once.
    _parsed(strategy, best)
    entries = _entries(store, gather)
    order = candidates(entries, strategy, best)
    found = Recovered(None)
    identity, share = _share(store, gather)
    whole = [entry for entry in entries if _judge(store, entry, entry.error, found)]
    while (number := agree(gather([entry.number for entry in order]))) is not None:
        (entry,) = (entry for entry in order if entry.number == number)
        order.remove(entry)
        error: Exception | None = store.trouble(entry, *share)
        # Each rank has read a share of the files: one bad share makes the checkpoint bad for all ranks of a directory.
        if not (bad := {place for place, wrong in gather([identity, error is not None]) if wrong}):
            try:  # only now, when all bytes are known to be right
                load(entry)
            except (DamagedCheckpoint, OSError, ValueError) as malformed:
                error = malformed
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
    """Return the identity of this rank's directory, and which files of a checkpoint this rank reads.

    The ranks that see the same directory divide the files of a checkpoint among them. The second result is a tuple: the
    index of this rank's share of the files, and the number of shares. All ranks call this together.
    """
    identity = store.files.identity(store.dirpath)
    # Processes of one directory are told apart by random texts: ranks may be unknown here.
    me = uuid.uuid4().hex
    together = [each for place, each in gather([identity, me]) if place == identity]
    return identity, (together.index(me), len(together))


def _judge(store: CheckpointStore, entry: CheckpointEntry, error: Exception | None, found: Recovered) -> bool:
    """Return whether ``error`` is None; otherwise record the error of this checkpoint in ``found``.

    A damaged checkpoint is also put into quarantine.
    """
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
    """Return all checkpoints of the store; raise CheckpointError if that fails on any rank.

    It fails on a rank that cannot read the directory, or that finds a checkpoint of a newer format. The error is raised
    on all ranks, which call this together.
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
    # Gathered, so that all ranks raise together: the others would wait for one that has raised alone.
    if told := [f"rank {rank}: {said}" for rank, said in enumerate(gather(words)) if said]:
        raise CheckpointError(f"Training cannot be resumed. {'; '.join(told)}")
    return entries


def _refuse_to_begin_anew(
    store: CheckpointStore, strategy: str, whole: Sequence[int], unreadable: Sequence[dict[str, str]]
) -> None:
    """Raise an error if no checkpoint could be loaded, although some checkpoint may be undamaged.

    Otherwise training would begin from scratch, and would overwrite or hide such a checkpoint. If all checkpoints are
    damaged, return: training may begin from scratch. All ranks raise or return together.

    Args:
        store: The checkpoints.
        strategy: Strategy of the recovery, for the error message.
        whole: For each rank, its number of checkpoints without a known error.
        unreadable: For each rank, the reasons why it could not read checkpoints, by path.

    Raises:
        CheckpointError: A rank has a checkpoint that may be undamaged.
    """
    told = [f"rank {rank}: {path}: {why}" for rank, paths in enumerate(unreadable) for path, why in paths.items()]
    # Training from the start would overwrite, or hide, checkpoints that may be needed.
    if told or any(whole):
        raise CheckpointError(
            f"`recover={strategy!r}` finds no checkpoint in {store.dirpath} that all ranks can read. There are "
            f"{list(whole)} others, by rank; {'; '.join(told) or 'none is unreadable'}. `lightning-async checkpoint "
            f"list {store.dirpath}` shows them; `recover='latest'` takes the newest; another `dirpath` begins anew."
        )
