"""Learning rates that follow the steps of all replicas, and optimizer states that are made equal at sync points."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.fingerprint import digest, strided
from lightning_async.trainer.namespace import Undo, callbacks_of, override, override_for_users, searches_lr
from lightning_async.trainer.strategy_view import StrategyView

SCHEDULES = "lightning_async_schedules"  # key of a checkpoint: what learning-rate schedules count
_ROUNDED = 1e-6  # a sum of shares of steps that lacks no more than this is a whole number


class LearningRates:
    """Patches by which schedulers with interval "step" count the samples of all ranks.

    A schedule's step is as many samples as all ranks trained on per optimizer step when training began. With other
    numbers of live ranks, an optimizer step is a part of it, or more. So a schedule ends with the data, whoever is
    left. A schedule counts optimizer steps where these, or a number of batches, end training or an epoch. If the
    strategy has `shared_steps`, the optimizer steps are the mean over all replicas, else this rank's own.
    """

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        self._original: Callable[..., None] = lambda *_: None
        self.stepped: dict[int | str, Any] = {}
        """How far schedules are. By number, the steps that a scheduler has taken, if it follows `shared_steps`; by
        number as text, its place and the steps that it has taken in this epoch. ``"ranks"`` and ``"steps"`` are the
        numbers of ranks, and of steps in an epoch (0: unknown), when training began. ``"place"`` is the last mean of
        steps and the place of schedules. ``"at"`` is that place in the checkpoint from which training goes on.
        ``"other"`` says that other ranks than at the start trained in this epoch."""
        self._searches = False
        # Lists of schedulers change: only the due ones may be shown to Lightning, and SWA replaces one.
        self._configs: list[Any] = []

    def install(self) -> list[Undo]:
        self._original = self._trainer.lightning_module.lr_scheduler_step
        return [
            override(self._trainer.fit_loop.epoch_loop, "_update_learning_rates", self._update),
            override_for_users(self._trainer.lightning_module, "lr_scheduler_step", self._step),
            override(self._trainer.fit_loop, "on_advance_end", self._end_epoch),
            override(self._trainer._checkpoint_connector, "dump_checkpoint", self._dump),
        ]

    def begin(self, world: LightningCollectives | None) -> None:
        """Record of what schedules count, unless a checkpoint has it already. All ranks call this together.

        Args:
            world: Collectives over all ranks; None if this rank trains alone.
        """
        trainer = self._trainer
        self._searches = searches_lr(trainer)
        self.number_schedulers()
        batches = trainer.fit_loop.max_batches
        varies = callbacks_of(trainer, "GradientAccumulationScheduler") or any(
            hasattr(callback, "accumulation_steps") for callback in trainer.callbacks
        )
        windows = self._view.updates is not None
        is_known = not math.isinf(batches) and not varies and (self._view.in_step or not windows)
        steps = math.ceil(batches / trainer.accumulate_grad_batches) if is_known else 0
        everyones = [steps] if world is None else world.gather_objects(steps)
        self.stepped.setdefault("ranks", len(everyones))
        self.stepped.setdefault("steps", max(everyones) if windows or self._view.in_step else steps)

    def number_schedulers(self) -> None:
        """Set the schedulers' numbers in this training: their places in the Trainer's present list."""
        self._configs = list(self._trainer.lr_scheduler_configs)

    def start_over(self) -> None:
        """Reset the counts of steps, because training begins again within this fit.

        With other ranks than at the start, schedules still end with the data, so they keep their places. The places of
        a search for a learning rate are not those of the training around it.
        """
        searches = self._searches or searches_lr(self._trainer)
        kept = {} if searches or self.share() == 1.0 else dict(self.state())
        self.stepped.clear()
        self.stepped.update(kept)

    def state(self) -> list[list[Any]]:
        """Return, for a checkpoint, what schedules count, and their places in the epoch."""
        rows = [[key, value] for key, value in self.stepped.items() if isinstance(key, str)]
        at = [["at", self.stepped["place"][1]]] if "place" in self.stepped else []
        return [row for row in rows if row[0] not in ("place", "at")] + at

    def _dump(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**original(*args, **kwargs), SCHEDULES: self.state()}

    def share(self) -> float:
        """Return how many steps of a schedule an optimizer step is: 1.0 with the ranks with which training began."""
        trainer = self._trainer
        ranks = self._view.num_sharing
        began = self.stepped.get("ranks", ranks)
        all_steps = self._epochs * self.stepped.get("steps", 0)
        ends_by_steps = trainer.max_steps != -1 and (all_steps <= 0 or trainer.max_steps <= all_steps)
        limit = trainer.limit_train_batches
        by_batches = isinstance(limit, int) and limit == trainer.fit_loop.max_batches
        return 1.0 if not ranks or ends_by_steps or by_batches else ranks / began

    def _update(self, original: Any, interval: str, update_plateau_schedulers: bool) -> None:
        if self._view.shared_steps is None or interval != "step" or update_plateau_schedulers:
            original(interval=interval, update_plateau_schedulers=update_plateau_schedulers)
        else:
            self.follow()

    def _step(self, original: Any, scheduler: Any, metric: Any) -> None:
        """Advance a scheduler by the share of an optimizer step, in place of a whole step."""
        for i, config in enumerate(self._configs):
            counts = config.interval == "step" and not config.reduce_on_plateau and self._view.shared_steps is None
            if config.scheduler is scheduler and counts:
                share = self.share()
                self.stepped["other"] = self.stepped.get("other", False) or share != 1.0
                return self._advance(i, config, share)
        original(scheduler, metric)
        return None

    def _advance(self, i: int, config: Any, share: float) -> None:
        place, taken = self.stepped.get(str(i), (0.0, 0))
        place += share
        # What a lost rank had not shared is trained on twice, and must not carry a schedule beyond the epoch.
        if self.stepped.get("other") and (planned := self._planned(config)):
            place = min(place, float(planned))
        due = int(place + _ROUNDED)
        for _ in range(taken, due):
            self._original(config.scheduler, None)
        self.stepped[str(i)] = [place, max(taken, due)]

    def _planned(self, config: Any) -> int:
        """Return a scheduler's number of steps in an epoch when training began; 0 if it is unknown.

        Lightning's ``frequency`` is a number of batches, and takes effect only with an optimizer step.
        """
        every = config.frequency or 1
        return self.stepped.get("steps", 0) // (every // math.gcd(every, self._trainer.accumulate_grad_batches))

    @property
    def _epochs(self) -> int:
        """The number of epochs of training; 0 if it has no limit."""
        return max(0, self._trainer.max_epochs or 0)

    def _end_epoch(self, original: Any) -> None:
        """Bring schedules to the end of the epoch, if other ranks than at the start trained in it."""
        settles = self.stepped.get("other") and not self._trainer.should_stop  # it may stop within the epoch
        used = {id(config.scheduler) for config in self._trainer.lr_scheduler_configs}
        for i, config in enumerate(self._configs):
            if str(i) in self.stepped and config.interval == "step" and id(config.scheduler) in used:
                if settles and self._planned(config):
                    self._advance(i, config, math.inf)
                place, taken = self.stepped[str(i)]
                self.stepped[str(i)] = [place - taken, 0]
        self.stepped.pop("other", None)
        original()

    def follow(self) -> None:
        """Bring the schedulers with interval "step" up to date with the replicas' mean number of steps.

        Each scheduler is stepped until it has taken all steps that are due at this number.
        """
        steps = self._view.shared_steps
        if steps is None:
            return
        first, now = steps
        # With other ranks than at the start, schedules have taken other numbers of steps than the replicas.
        at = self.stepped.get("at", float(first))
        seen, place = self.stepped.get("place", (first, at))
        # The mean may fall when ranks change. Steps are not taken back then.
        share = self.share()
        place += max(0, now - seen) * share
        self.stepped["place"] = [max(seen, now), place]
        for i, config in enumerate(self._trainer.lr_scheduler_configs):
            if config.interval != "step" or config.reduce_on_plateau:
                continue
            every = config.frequency or 1
            taken = self.stepped.get(i, int(at + _ROUNDED) // every)
            due = int(place + _ROUNDED) // every
            if share != 1.0 and (planned := self.stepped.get("steps", 0) // every * self._epochs):
                due = min(due, planned)
            for _ in range(taken, due):
                self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)
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
