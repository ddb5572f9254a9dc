"""The command that shows and changes a directory of checkpoints: ``lightning-async checkpoint list``, and others.

The others are ``verify``, ``export`` and ``prune``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime

import torch

from lightning_async.algorithms.checkpoint_policies import Best, EveryNth, KeepAny, KeepPolicy, Latest
from lightning_async.checkpoint.retention import doomed
from lightning_async.checkpoint.storage import files_at
from lightning_async.checkpoint.store import MANIFEST, CheckpointStore, Manifest
from lightning_async.checkpoint.writer_process import DirectoryLock
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from lightning_async.trainer.checkpoint.checkpoint_state import whole
from lightning_async.trainer.environment.environments import NOBODY


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands; return 1 if a checkpoint is damaged, or the directory cannot be read."""
    options = _parser().parse_args(arguments)
    store = CheckpointStore(options.dirpath)
    try:
        # First, because all commands take a directory, and users often give the path of one checkpoint.
        store = _directory(store, options)
        if not store.files.exists(store.dirpath):
            raise FileNotFoundError(f"There is no directory {store.dirpath}.")
        return options.run(store, options)
    except (CheckpointError, OSError, ValueError) as error:
        print(f"lightning-async checkpoint: {error}", file=sys.stderr)
        return 1


def _directory(store: CheckpointStore, options: argparse.Namespace) -> CheckpointStore:
    """Return the directory of checkpoints; for the path of one checkpoint, select it in the directory that holds it."""
    path = store.dirpath.rstrip("/")
    if not store.files.exists(f"{path}/{MANIFEST}"):
        return store
    parent, _, name = path.rpartition("/")
    around = CheckpointStore(parent or ".")
    entry = next(iter(around.entries(name=name)), None)
    if entry is None:
        return store
    if not hasattr(options, "number"):
        raise ValueError(f"{store.dirpath} is one checkpoint: give the directory that it is in, {around.dirpath}.")
    options.number = entry.number
    return around


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-async checkpoint", description="Checkpoints of a directory.")
    commands = parser.add_subparsers(required=True, metavar="list | verify | export | prune")

    def command(name: str, run: object, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=what, description=what)
        made.add_argument(
            "dirpath",
            help="a directory, or a URL of fsspec; for verify and export, one checkpoint in it is possible, too",
        )
        made.set_defaults(run=run)
        return made

    command("list", _list, "List all checkpoints; reads their manifests only.")
    verify = command("verify", _verify, "Read every file of every checkpoint; the exit status is 1 if one is damaged.")
    verify.add_argument("--number", type=int, help="read only the checkpoint of this number")
    verify.add_argument(
        "--quarantine", action="store_true", help="rename damaged checkpoints, so that no training resumes from them"
    )
    export = command("export", _export, "Write an ordinary Lightning checkpoint, one file with the agreed model.")
    export.add_argument("output", help="the file, or a URL of fsspec")
    export.add_argument(
        "--number", type=int, help="export the checkpoint of this number (default: the newest whole one)"
    )
    export.add_argument(
        "--objects", choices=("refuse", "pickle"), default="refuse",
        help="whether to load pickled objects, which executes their code, and write them (default: refuse)",
    )  # fmt: skip
    prune = command("prune", _prune, "Delete old checkpoints, but never the newest one, nor the last good one.")
    prune.add_argument("--latest", type=int, metavar="N", help="keep the N newest")
    prune.add_argument("--every", type=int, metavar="N", help="keep every N-th checkpoint")
    prune.add_argument("--best", metavar="METRIC", help="keep the best checkpoint by this metric")
    prune.add_argument("--mode", choices=("min", "max"), default="min", help="which metric is best (default: min)")
    prune.add_argument("--damaged", action="store_true", help="delete checkpoints in quarantine, too")
    prune.add_argument("--dry-run", action="store_true", help="print what would be deleted, and delete nothing")
    return parser


def _list(store: CheckpointStore, options: argparse.Namespace) -> int:
    entries = store.entries()
    for entry in entries:
        print(f"{entry.name:<24} {_told(entry.manifest) if entry.manifest else _trouble(entry.error)}", end="")
        print("  good" if entry.good else "")
    named = {entry.name for entry in entries}
    rest = sorted(n for n in store.files.names(store.dirpath) if n not in named and not n.startswith("."))
    for name in rest:
        print(f"{name:<24} {_standing(store, name)}")
    if not entries and not rest:
        print(f"{store.dirpath} is empty.")
    return 0


def _told(manifest: Manifest) -> str:
    created = datetime.fromtimestamp(manifest.created).astimezone().isoformat(" ", "seconds")
    size = sum(record.size for record in manifest.files.values())
    metrics = "".join(f"  {name} {value:.4g}" for name, value in sorted(manifest.metrics.items()))
    absent = "" if len(manifest.ranks) == manifest.world_size else f" of {manifest.world_size}"
    ranks = f"{len(manifest.ranks)}{absent} rank{'s' * (len(manifest.ranks) != 1)}"
    pickles = "  with pickled objects" if manifest.pickles else ""
    return f"{created}  epoch {manifest.epoch}  {ranks}  {_bytes(size)}  {manifest.reason}{metrics}{pickles}"


def _standing(store: CheckpointStore, name: str) -> str:
    if ".damaged-" in name:
        return "in quarantine"
    if name in store.writing():
        return "being written"
    return "unfinished" if ".tmp-" in name or ".removed" in name else "not a checkpoint"


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _verify(store: CheckpointStore, options: argparse.Namespace) -> int:
    entries = store.entries(options.number)
    if options.number is not None and not entries:
        raise ValueError(f"{store.dirpath} has no checkpoint of number {options.number}.")
    bad = 0
    # To rename a checkpoint while a training resumes from it would fail the training.
    with _claimed(store, options.quarantine, "puts what is damaged aside"):
        for entry in entries:
            error = store.trouble(entry)
            bad += error is not None
            print(f"{entry.name:<24} {_trouble(error) if error else 'whole'}")
            if options.quarantine and isinstance(error, DamagedCheckpoint):
                print(f"{'':<24} renamed to {store.quarantine(entry)}")
    print(f"{len(entries) - bad} whole, {bad} not.")
    return 1 if bad else 0


def _trouble(error: Exception | None) -> str:
    return f"{'damaged' if isinstance(error, DamagedCheckpoint) else 'cannot be read'}: {error}"


def _export(store: CheckpointStore, options: argparse.Namespace) -> int:
    entries = store.entries(options.number)
    for entry in entries:
        if (error := store.trouble(entry)) is not None:
            print(f"{entry.name} {_trouble(error)}", file=sys.stderr)
            continue
        # The agreed model belongs to no single rank; counts of progress are those of the first rank.
        # Pickled objects are loaded only now, after `trouble` has verified every byte.
        pickles = options.objects == "pickle"
        checkpoint, _ = whole(store, entry, NOBODY, pickles=pickles)
        data = io.BytesIO()
        torch.save(checkpoint, data)
        data.seek(0)
        has_pickles = entry.manifest is not None and entry.manifest.pickles
        if not has_pickles:
            torch.load(data, weights_only=True)  # raises if a reader would need to trust the file
        files, output = files_at(options.output)
        written = f"{output}.part" if files.atomic else output
        files.write(written, [data.getbuffer()])
        if files.atomic:  # a program that waits for the file must not see a part of it
            files.rename(written, output)
        needs = " It holds pickled objects: to load it takes `weights_only=False`." if has_pickles else ""
        print(f"{entry.name} is in {options.output}, {_bytes(data.getbuffer().nbytes)}.{needs}")
        return 0
    raise ValueError(f"{store.dirpath} has no checkpoint to export that is whole.")


def _prune(store: CheckpointStore, options: argparse.Namespace) -> int:
    keeps: list[KeepPolicy] = []
    if options.latest is not None:
        keeps.append(Latest(options.latest))
    if options.every is not None:
        keeps.append(EveryNth(options.every))
    if options.best is not None:
        keeps.append(Best(options.best, mode=options.mode))
    if not keeps and not options.damaged:
        raise ValueError("`prune` needs to know what to keep: --latest, --every or --best; or --damaged alone.")
    # A training that writes there deletes old checkpoints itself.
    with _claimed(store, not options.dry_run, "deletes old checkpoints there"):
        gone = doomed(store.entries(), KeepAny(*keeps)) if keeps else []
        for entry in gone:
            print(f"{entry.name:<24} {'would be deleted' if options.dry_run else 'deleted'}")
            if not options.dry_run:
                store.remove(entry)
        leftovers = [] if options.dry_run else store.clean(damaged=options.damaged)
        for name in leftovers:
            print(f"{name:<24} deleted")
        if not gone and not leftovers:
            print("nothing to delete")
    return 0


@contextlib.contextmanager
def _claimed(store: CheckpointStore, changes: bool, does: str) -> Iterator[None]:
    """Lock the directory during the block, if the command ``changes`` it.

    ``does`` is written into the lock: it says to others what the command does.
    """
    claim = DirectoryLock(store, uuid.uuid4().hex, does)
    if changes:
        claim.take()
    try:
        yield
    finally:
        claim.release()
