"""What a rank has died of, for whoever has started it: in a file, as torch.distributed.elastic has it."""

from __future__ import annotations

import contextlib
import os

from lightning_async.errors import PeerLost
from lightning_async.trainer.patches import shorten

__all__ = ["note_end"]

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def note_end(exception: BaseException) -> None:
    """The Trainer ends with this exception: it is written down. Of `PeerLost` the message alone is shown.

    A program whose main function is under torch's ``@record`` writes it once more, over this.
    """
    if isinstance(exception, Exception) and _VARIABLE in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(Exception):  # it cannot be written, or has no words
            get_error_handler().record_exception(exception)
    if isinstance(exception, PeerLost):  # who lost it is not to blame, and where it stood says nothing
        shorten(exception)
