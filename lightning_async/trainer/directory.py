"""The directory that the ranks of one fit save into: theirs alone, and who of them sees it."""

from __future__ import annotations

import logging
import re
import uuid
from functools import partial
from typing import Any

from lightning_async.engine.checkpoint.claim import Claim
from lightning_async.engine.checkpoint.losses import bury
from lightning_async.engine.checkpoint.saver import PATIENCE_S
from lightning_async.engine.checkpoint.store import CheckpointStore
from lightning_async.errors import SettingsMismatch
from lightning_async.trainer.names import is_newcomer, names_of
from lightning_async.trainer.recovery import gather

__all__ = ["Directory"]

log = logging.getLogger(__name__)

_MEETING = re.compile(r"\.[0-9a-f]{12}-\d+")


class Directory:
    """What one rank has of it, from before anything in it is chosen until `close`.

    Args:
        trainer: in a fit, when its ranks have met.
        store: the checkpoints in it.
        settings: what the user has asked for, in words.
    """

    def __init__(self, trainer: Any, store: CheckpointStore, settings: str) -> None:
        self._trainer, self._store, self._settings = trainer, store, settings
        self._gather = partial(gather, trainer)
        self.newcomer = is_newcomer(trainer.strategy)
        """This rank comes to a training that saves already."""
        self.program = ""
        """Names this training; the same on all ranks."""
        self.group: list[int] = []
        """The ranks that see the directory."""
        self._claim: Claim | None = None
        self._left = names_of(trainer).left

    def take(self) -> None:
        """Before anything in it is chosen or put into quarantine: it is ours, and what was handed over is there.

        Where others train into it already, this rank only waits for what its earlier life still writes. Idempotent.

        Raises:
            SettingsMismatch: the ranks were given different ones, and would not do the same.
            CheckpointError: another program trains into it, or nothing can be written there.
        """
        if self.newcomer:
            bury(self._store, names_of(self._trainer).mine, PATIENCE_S)
        elif self._claim is None:  # a search for a learning rate ends with a call of this, too
            programs, everyones = zip(*self._gather([uuid.uuid4().hex[:12], self._settings]), strict=True)
            if len(set(everyones)) > 1:
                raise SettingsMismatch(f"The ranks have different settings for checkpoints: {sorted(set(everyones))}.")
            self.program = programs[0]
            self._claim = Claim(self._store, self.program)
            self._claim.take(self._gather)
            self._claim.wait(self._gather)

    def meet(self) -> None:
        """Find out who sees it: each rank leaves a file there that the others look for. The first one tidies up.

        Raises:
            OSError: nothing can be written there.
        """
        store, strategy, rank = self._store, self._trainer.strategy, names_of(self._trainer).mine
        files, prefix = store.files, f".{self.program}-"
        path = f"{store.dirpath}/{prefix}{rank}"
        files.write(path, [b""])
        try:
            strategy.barrier("files are there")
            seen = [n.removeprefix(prefix) for n in files.names(store.dirpath) if n.startswith(prefix)]
            strategy.barrier("files were seen")
        finally:
            files.unlink(path)
        self.group = sorted(map(int, seen))
        if rank != self.group[0]:
            return
        for name in files.names(store.dirpath):  # what a program that was killed just here has left
            if _MEETING.fullmatch(name) and not name.startswith(prefix):
                files.unlink(f"{store.dirpath}/{name}")
        try:
            store.clean(self.program)
        except OSError as error:  # somebody else's, perhaps: that is no reason not to train
            log.warning("Rank %d: what was left unfinished cannot be deleted: %s", rank, error)

    def for_newcomers(self) -> dict[str, Any]:
        """What a rank must know that comes to this training."""
        return {"program": self.program, "group": self.group, "settings": self._settings}

    def join(self, told: dict[str, Any]) -> None:
        """Have it with those who train, who have told this in `for_newcomers`.

        Raises:
            SettingsMismatch: they were given other settings.
            CheckpointError: the directory is another one, on this host, or another program's.
        """
        if told["settings"] != self._settings:
            raise SettingsMismatch(
                f"This rank comes to a training of others, and has other settings for checkpoints: {self._settings}; "
                f"theirs are {told['settings']}."
            )
        self.program, self.group = told["program"], sorted({*told["group"], names_of(self._trainer).mine})
        self._claim = Claim(self._store, self.program)
        self._claim.join()

    def follow(self) -> None:
        """Ranks may be lost: where the one is among them that said who trains here, this one does."""
        left = names_of(self._trainer).left
        if self._claim is not None and left != self._left:
            self._left = left
            self._claim.keep()

    def close(self) -> None:
        """Let go. Idempotent."""
        if self._claim is not None:
            self._claim.release()
