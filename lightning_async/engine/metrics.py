"""Totals of a run whose replicas exchange something else than averaging rounds."""

from __future__ import annotations

from typing import Protocol


class Totals(Protocol):
    """Totals of one replica, which grow while it trains: a dataclass, whose numbers are in checkpoints."""

    @property
    def title(self) -> str: ...  # first line of the summary

    @property
    def prefix(self) -> str: ...  # beginning of the metrics' names

    @property
    def shown(self) -> tuple[str, ...]: ...  # metrics that are in the progress bar, too

    @property
    def number(self) -> int: ...  # exchanges so far

    @property
    def each_s(self) -> float: ...  # mean time of one; 0.0 while there was none

    @property
    def hidden_share(self) -> float: ...  # share of that during which training went on; 1.0 while there was none

    @property
    def sent_bytes(self) -> int: ...  # bytes sent by this replica; 0 where they are not counted

    def rows(self) -> dict[str, str]: ...  # lines of the summary

    def metrics(self) -> dict[str, float]: ...  # for loggers
