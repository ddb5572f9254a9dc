"""The optimizers' state of a training whose optimizers are on servers: brought here for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["States"]


class _Trained(Protocol):
    update_on_server: bool

    @property
    def optimizers(self) -> list[Any]: ...

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def _session(self) -> Any: ...


class States:
    """Rank 0's optimizers hold it wherever a checkpoint is made; those of others inside of `here`.

    Args:
        strategy: its optimizers, and its servers while it trains.
    """

    def __init__(self, strategy: _Trained) -> None:
        self._strategy = strategy
        self._are_here = False

    @property
    def _stepping(self) -> Any:
        """What asks the servers; None where there is nothing to ask for."""
        session = self._strategy._session
        return session.stepping if self._strategy.update_on_server and session is not None else None

    def fetch(self, optimizers: Iterable[Any]) -> None:
        """On rank 0, have the servers' state in these; it waits for no other rank."""
        if self._stepping is not None and self._strategy.is_global_zero and not self._are_here:
            for optimizer in optimizers:
                self._stepping.fetch_state(optimizer)

    @contextmanager
    def here(self, alone_s: float | None = None) -> Iterator[None]:
        """On each rank for itself: inside, its optimizers have it.

        Args:
            alone_s: training has failed: take the newest weights, too, and wait so long for each. Default: it has not.

        Raises:
            TimeoutError: a server does not answer in time.
        """
        optimizers, stepping = self._strategy.optimizers, self._stepping
        if stepping is None:
            yield
            return
        if alone_s is not None:
            stepping.rescue(optimizers, alone_s)
        else:
            for optimizer in optimizers:
                stepping.fetch_state(optimizer)
        self._are_here = True
        try:
            yield
        finally:
            self._are_here = False
            for optimizer in optimizers if not self._strategy.is_global_zero else ():
                optimizer.state.clear()
