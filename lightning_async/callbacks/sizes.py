"""How large the window of accumulation is that begins, and what its step's learning rate is multiplied by."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from lightning_async.callbacks.probes import NoiseProbe, Probe
from lightning_async.callbacks.steps import ask, check_target, in_lockstep, mean_of, ranks_of, told_of
from lightning_async.rules.accumulation import AccumulationPolicy, Noise, Progress, Times, lr_factor
from lightning_async.trainer.windows import Plan

__all__ = ["Sizes"]

_SEEN: dict[str, Any] = {"noise": Noise, "times": Times}


class Sizes:
    """Of the windows of one fit.

    Where ranks average their gradients by the engine they agree with these: learning rates are by the samples of all,
    and a size that is measured is that of the first rank, one window later.

    Args:
        callback: an `AdaptiveGradientAccumulation`.
        trainer: in a fit.
        probe: measures what the policy asks for, if it does.
    """

    def __init__(self, callback: Any, trainer: Any, probe: Probe | None) -> None:
        self._callback, self._trainer, self._probe = callback, trainer, probe
        self._policy: AccumulationPolicy = callback.policy
        self._by_samples = callback.target_batch_size is not None
        self._size, self._age, self._wanted, self._ranks = 0, 0, 0, 0
        self._base = float(callback.base_batch_size or 0)
        self.seen: dict[str, Any] = {}
        """What was measured, when that was last asked for."""
        self.arrived = 0.0
        """Samples behind the gradients of the last step, of all ranks: of an earlier window, with a delay."""

    @property
    def first(self) -> int:
        """Batches in the first window."""
        return self._batches(self._policy.size(Progress(0, 0, 0, self._unit())))

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self._size, "age": self._age, "base": self._base, "ranks": self._ranks, "wanted": self._wanted,
            "arrived": self.arrived,
            "seen": {name: list(value) for name, value in self.seen.items() if value is not None},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._size, self._age, self._base = state["size"], state["age"], state["base"]
        self._ranks, self._wanted = state["ranks"], state.get("wanted", state["size"])
        self.arrived = state.get("arrived", 0.0)
        self.seen = {name: _SEEN[name](*value) for name, value in state["seen"].items()}

    # ---- with other ranks ----

    def tell(self) -> None:
        """What others are to hear with the next gradients."""
        ask(self._trainer.strategy, self._base, self._wanted)

    def hear(self) -> None:
        """Of a step that is taken now: what all have told with its gradients."""
        told = told_of(self._trainer.strategy)
        self.arrived = 0.0 if told is None else told.samples
        if told is not None and told.size:
            self._base = told.base
            if self._probe is not None and ranks_of(self._trainer.strategy) > 1:
                self._size = int(told.size)

    def lr_factor(self, samples: float) -> float:
        """What learning rates are multiplied by in the step that is taken now, of so many samples of this rank's."""
        if not self._base:
            return 1.0
        scaling = self._callback.lr_scaling
        if (told := told_of(self._trainer.strategy)) is None:
            return lr_factor(scaling, samples, self._base)
        return lr_factor(scaling, told.samples, told.base * told.ranks) if told.base else 1.0

    # ---- sizes ----

    def plan(self, samples: float) -> Plan:
        """The window that begins, with a batch of so many samples."""
        callback, strategy = self._callback, self._trainer.strategy
        together = in_lockstep(strategy)
        if not self._base:
            self._base = mean_of(strategy, samples)
        if self._by_samples and not self._size and callback.count is None and samples != self._base:
            raise ValueError(
                f"Rank {self._trainer.global_rank}: `AdaptiveGradientAccumulation(base_batch_size="
                f"{callback.base_batch_size})`, but the first batch has {samples:g} samples: give the loader's batch "
                "size."
            )
        self._wanted = self._size
        if self._age % max(1, self._policy.every) == 0 or not self._size:
            self._decide(together)
        self._age += 1
        batches = self._batches(self._size)
        if together:
            return Plan(batches, batches * (self._base or 1.0))
        if self._by_samples:
            target = self._size / (self._unit() / self._base)
            return Plan(batches, batches * self._base if self._probe is not None else target, by_samples=True)
        return Plan(batches, batches * (samples or self._base or 1.0))

    def _decide(self, together: bool) -> None:
        if self._probe is not None:
            self.seen |= self._probe.end_period(partial(mean_of, self._trainer.strategy))
            self._probe.begin_period(self._trainer)
        trainer, policy = self._trainer, self._policy
        size = policy.size(Progress(trainer.global_step, trainer.current_epoch, self._size, self._unit(), **self.seen))
        if type(size) is not int or size < 1:
            raise ValueError(f"`{policy!r}` said {size!r}: the size of a window is an int, at least 1.")
        if self._probe is not None and together:
            size = int(trainer.strategy.broadcast(size))  # of numbers that may differ in the last bit
        before, self._ranks = self._ranks, ranks_of(trainer.strategy)
        if self._by_samples and self._probe is None and self._callback.count is None:
            check_target(self._callback, trainer, size, self._ranks, began=before in (0, self._ranks))
        self._wanted = size
        if self._probe is None or not self._size or together or self._ranks == 1:
            self._size = size  # else one window later, as the first rank would have it: all hear that with this one

    def _unit(self) -> float:
        """Samples in one batch of each rank, where the policy counts samples."""
        return self._base * ranks_of(self._trainer.strategy) if self._by_samples else 1.0

    def _batches(self, size: int) -> int:
        least = 2 if isinstance(self._probe, NoiseProbe) and not in_lockstep(self._trainer.strategy) else 1
        return max(least, math.floor(size / self._unit() + 0.5))
