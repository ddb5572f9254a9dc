"""Learning rates that follow the steps of all replicas, and optimizer states that are made equal at sync points."""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.fingerprint import digest, strided
from lightning_async.trainer.namespace import Undo, override
from lightning_async.trainer.strategy_view import StrategyView


class LearningRates:
    """Patches of learning-rate schedulers, by which a scheduler follows the mean number of steps over all replicas.

    Without the patches, a scheduler follows this rank's own steps.
    """

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        self.stepped: dict[int, int] = {}
        """The number of steps that each scheduler has taken."""

    def install(self) -> list[Undo]:
        return [override(self._trainer.fit_loop.epoch_loop, "_update_learning_rates", self._update)]

    def start_over(self) -> None:
        """Reset the counts of steps, because training begins again within this fit."""
        self.stepped.clear()

    def _update(self, original: Any, interval: str, update_plateau_schedulers: bool) -> None:
        if self._view.shared_steps is None or interval != "step" or update_plateau_schedulers:
            original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
        else:
            self.follow()

    def follow(self) -> None:
        """Bring the schedulers with interval "step" up to date with the replicas' mean number of steps.

        Each scheduler is stepped until it has taken all steps that are due at this number.
        """
        steps = self._view.shared_steps
        if steps is None:
            return
        first, now = steps
        for i, config in enumerate(self._trainer.lr_scheduler_configs):
            if config.interval != "step" or config.reduce_on_plateau:
                continue
            every = config.frequency or 1
            taken = self.stepped.get(i, first // every)
            due = now // every
            for _ in range(taken, due):
                self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
            # The mean may fall when ranks change. Steps are not taken back then.
            self.stepped[i] = max(taken, due)


class StepState:
    """The state of optimizers and schedulers, made equal on all replicas, as synchronous steps need.

    A rank without data takes no part in the other ranks' steps, and a rank that has taken steps alone has other
    momentum. At the next sync point, or when training begins, such a rank takes over the state of another rank.
    """

    def __init__(self, view: StrategyView, trainer: Any, rates: LearningRates) -> None:
        self._view = view
        self._trainer = trainer
        self._rates = rates

    def make_equal(self, world: LightningCollectives) -> None:
        """Copy the state of the rank that missed the fewest steps to all ranks that take synchronous steps.

        All ranks call this together.
        """
        missed = self._view.step_runner.missed_steps
        mine = 0 if missed is None else self._digest()
        # Ranks may be lost between the two collectives, and then another rank may be the source.
        if (state := world.in_one_generation(lambda: self._others(world, missed, mine))) is not None:
            self._put(state)
        if missed is not None:
            self._view.step_runner.missed_steps = 0

    def _others(self, world: LightningCollectives, missed: int | None, mine: int) -> dict[str, Any] | None:
        """Return the state of the rank that missed the fewest steps; None if this rank does not need it.

        A rank does not need it if its own state is equal, or if it takes no synchronous steps.
        """
        # Digests are small. The state itself travels only if a rank has another one.
        told = world.gather_objects([missed is not None, missed or 0, mine])
        source = min(range(len(told)), key=lambda rank: (told[rank][1], not told[rank][0]))
        held = told[source][2]
        if not any(steps and others != held for steps, _, others in told):
            return None
        state = world.broadcast(self._take() if world.rank == source else None, source)
        return None if missed is None or mine == held else state

    def _digest(self) -> int:
        leaves = tree_leaves(self._take())
        plain = repr([leaf for leaf in leaves if not isinstance(leaf, Tensor)]).encode()
        return digest([strided(leaf.detach()) for leaf in leaves if isinstance(leaf, Tensor)]) ^ zlib.crc32(plain)

    def _take(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self._trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self._trainer.lr_scheduler_configs],
            "stepped": self._rates.stepped,
        }

    def _put(self, state: dict[str, Any]) -> None:
        for optimizer, theirs in zip(self._trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(theirs)
        for config, theirs in zip(self._trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(theirs)
        self._rates.stepped.update(state["stepped"])
