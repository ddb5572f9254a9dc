"""What is written to parameters beside the optimizer's step: servers hear of it, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from lightning_async.engine.server.tables import Tables
from lightning_async.errors import AsyncTrainingError
from lightning_async.trainer.patches import Undo, callbacks_of, replace_for_users

__all__ = ["Writes"]

_ALWAYS = 2  # pushes before which all values are looked at


class Writing(Protocol):
    """What a strategy has whose parameters these are."""

    update_on_server: bool

    @property
    def module(self) -> Any: ...

    @property
    def global_rank(self) -> int: ...

    def start_over(self) -> None: ...


class Writes:
    """Looks at a worker's parameters before each push, and before a gate.

    A change of the weights is pushed; beside gradients there is no way for it, and it would be lost with the next pull.

    Args:
        strategy: whose worker this is.
        tables: its servers.
    """

    def __init__(self, strategy: Writing, tables: Tables) -> None:
        self._strategy, self._tables, self._pushes = strategy, tables, 0

    def refuse(self, coming: bool) -> None:
        """Before gradients are pushed; ``coming``: weights may be on their way from an earlier push.

        Raises:
            AsyncTrainingError: a parameter was written to since weights were pulled.
        """
        self._pushes += 1
        self._refuse(self._tables.written(coming, every=self._pushes <= _ALWAYS))

    def at_gate(self) -> bool:
        """Nothing is under way; whether there is a change to be pushed.

        Raises:
            AsyncTrainingError: as above.
        """
        written = self._tables.written(coming=False, every=True)
        if self._strategy.update_on_server:
            self._refuse(written)
        return bool(written)

    def _refuse(self, written: list[str]) -> None:
        if written:
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise AsyncTrainingError(
                f"Rank {self._strategy.global_rank}: {', '.join(written[:3])}{more} changed beside the optimizer's "
                "step (a callback, or the module, writes to parameters). Servers hold the weights and would not hear "
                "of it. Use `ParameterServerStrategy(update_on_server=False)`, which pushes all changes, or leave "
                "parameters that are not trained out of the optimizer."
            )

    def install(self) -> list[Undo]:
        """`StochasticWeightAveraging` ends with another model: servers are given it, and go on with all else as it is.
        Returns what takes that back."""
        swas = callbacks_of(self._strategy.module.trainer, "StochasticWeightAveraging")
        return [
            replace_for_users(swa, "on_train_epoch_start", lambda original, swa=swa: self._after(swa, original))
            for swa in swas
        ]

    def _after(self, swa: Any, original: Callable[..., None]) -> Callable[..., None]:
        def on_train_epoch_start(trainer: Any, module: Any) -> None:
            original(trainer, module)
            if trainer.current_epoch == swa.swa_end + 1:
                strategy: Any = self._strategy
                averager = strategy.averager
                strategy.states.fetch(strategy.optimizers)  # of the servers that end
                clocks = {**averager.state_dict(), "replicas": [averager.clocks()] * strategy.world_size}
                strategy.saved.go_on(clocks, averager.gathered())
                self._strategy.start_over()

        return on_train_epoch_start
