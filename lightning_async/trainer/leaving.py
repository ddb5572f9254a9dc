"""A process that has done its part ends its script in order, from within a run."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["leave"]


def leave(trainer: Any) -> NoReturn:
    """End with status 0. Callbacks, loggers and data hear of no exception, as they have not begun.

    Raises:
        SystemExit: which ends the script.
    """
    trainer.callbacks, trainer.loggers, trainer.datamodule = [], [], None
    raise SystemExit(0)
