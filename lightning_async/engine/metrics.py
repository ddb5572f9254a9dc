"""What a run adds up to where replicas exchange something else than averaging rounds."""

from __future__ import annotations

from typing import Protocol


class Totals(Protocol):
    """Of one replica; grows while it trains. A dataclass, whose numbers are in checkpoints."""

    @property
    def title(self) -> str:
        """What the summary begins with."""
        ...

    @property
    def prefix(self) -> str:
        """Of the metrics' names."""
        ...

    @property
    def shown(self) -> tuple[str, ...]:
        """Metrics that are in the progress bar, too."""
        ...

    @property
    def number(self) -> int:
        """Exchanges so far."""
        ...

    @property
    def each_s(self) -> float:
        """What one took, on average; 0.0 while there was none."""
        ...

    @property
    def hidden_share(self) -> float:
        """Share of that during which training went on; 1.0 while there was none."""
        ...

    @property
    def sent_bytes(self) -> int:
        """By this replica; 0 where that is not counted."""
        ...

    def rows(self) -> dict[str, str]:
        """For the summary."""
        ...

    def metrics(self) -> dict[str, float]:
        """For loggers."""
        ...
