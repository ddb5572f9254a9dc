"""What a rank has died of, for who has started it: in a file, as torch.distributed.elastic has it; and by its code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType

from lightning_async.errors import PeerLost, StoreLost
from lightning_async.trainer.patches import shorten

__all__ = ["STORE_LOST", "ended_in_order", "note_end"]

STORE_LOST = 69
"""The exit code of a script that ends with `StoreLost`: EX_UNAVAILABLE of sysexits.h, as of our launcher."""

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_ends: list[str] = []  # of runs of this process, by an exception


def note_end(exception: BaseException) -> None:
    """The Trainer ends with this exception: it is written down. Of `PeerLost` the message alone is shown.

    A program whose main function is under torch's ``@record`` writes it once more, over this.
    """
    if type(exception) is not SystemExit or exception.code:  # what serves ends by that; a signal is a class below it
        _ends.append(type(exception).__name__)
    if isinstance(exception, Exception) and _VARIABLE in os.environ:
        with contextlib.suppress(Exception):  # it cannot be written, has no words, or no file can be opened any more
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exception)
    if isinstance(exception, PeerLost):  # who lost it is not to blame, and where it stood says nothing
        shorten(exception)
    if isinstance(exception, StoreLost) and not isinstance(sys.excepthook, _Codes):
        sys.excepthook = _Codes(sys.excepthook)


def ended_in_order() -> bool:
    """Whether no run of this process has ended by an exception or a signal: it has nothing left to do."""
    return not _ends


class _Codes:
    """Of a script that nobody has kept from ending: the exception is shown as before, and has a code of its own.

    Args:
        before: shows it.
    """

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._before(kind, value, traceback)
        # Who calls this from a hook that came later may have more to show; and a prompt is no script.
        if isinstance(value, StoreLost) and sys.excepthook is self and not hasattr(sys, "ps1"):
            raise SystemExit(STORE_LOST)
