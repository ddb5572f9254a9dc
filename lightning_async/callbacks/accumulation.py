"""How many samples an optimizer step has: fixed, by schedule, or by what training shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_async.callbacks.probes import NoiseProbe, Probe, probe_of
from lightning_async.callbacks.steps import (
    Rates,
    ask,
    check_arguments,
    check_target,
    check_trainer,
    in_lockstep,
    mean_of,
    ranks_of,
    show,
    told_of,
)
from lightning_async.rules.accumulation import AccumulationPolicy, LrScaling, Noise, Progress, Times, lr_factor
from lightning_async.trainer.batch import batch_size
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import replace, set_for_now, take_back
from lightning_async.trainer.pieces import Pieces
from lightning_async.trainer.windows import Plan, Windows

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = pytorch("callbacks").Callback

__all__ = ["AdaptiveGradientAccumulation"]

_SEEN: dict[str, Any] = {"noise": Noise, "times": Times}


class AdaptiveGradientAccumulation(Callback):
    r"""Accumulates gradients over windows that may change from one to the next, with any strategy.

    .. math:: g = \frac{\sum_j n_j g_j}{\sum_j n_j}, \qquad \eta = \eta_0 \, f\Big(\frac{\sum_j n_j}{n_0}\Big)

    :math:`g_j` is the gradient of batch :math:`j` and :math:`n_j` its samples; :math:`n_0` are those of a step without
    accumulation, for which the learning rate :math:`\eta_0` is right. Where ranks average their gradients (DDP,
    Horovod, `Synchronous()`) the sums are over all of them; where replicas drift, over each one's own, which step by
    themselves. So the last window of an epoch, which has fewer batches or a smaller one, has the mean of what it has;
    Lightning divides it by the length of a full one.

    A window begins when the last one has ended: whatever changes, no gradient is lost, counted twice, or late. All
    that counts optimizer steps (``max_steps``, `EveryNSteps`, schedulers by step) counts windows.

    Args:
        accumulation_steps: batches of each rank in a window: a number, `ByEpoch`, `ByStep`, `CommunicationShare`, or a
            policy of your own.
        base_batch_size: samples in a batch of one rank, as the loader has them; with ``target_batch_size`` only.
        target_batch_size: samples behind an optimizer step, over all ranks that average their gradients: a number,
            `ByEpoch`, `ByStep`, `NoiseScale`, or a policy of your own. What is fixed must be a multiple of
            ``base_batch_size`` times these ranks; what is measured is rounded to one.
        lr_scaling: :math:`f`: "linear", "sqrt", or None (default): learning rates stay as they are. Schedulers go on
            from the unscaled ones; the scaled ones exist while the optimizer steps.
        count: what a batch counts, such as its tokens, as a number >= 0 of the batch. Default: samples, as Lightning
            tells.
        split_on_oom: where there is not enough memory for a batch, train on halves from then on, or less, each by a
            `training_step` of its own. Gradients stay means over samples. Not with DDP and Horovod. Default False.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, out of range, or does not go with the others. When
            training begins: with manual optimization, another `AdaptiveGradientAccumulation`, Lightning's
            `GradientAccumulationScheduler`, ``Trainer(accumulate_grad_batches=...)``, a strategy that accumulates by
            itself, servers in step with ``lr_scaling``, or a target that cannot be met to the sample.

    Source: Goyal et al., 2017, https://arxiv.org/abs/1706.02677; McCandlish et al., 2018,
    https://arxiv.org/abs/1812.06162
    """

    of_all_ranks = True

    def __init__(
        self,
        accumulation_steps: int | AccumulationPolicy | None = None,
        *,
        base_batch_size: int | None = None,
        target_batch_size: int | AccumulationPolicy | None = None,
        lr_scaling: LrScaling | None = None,
        count: Callable[[Any], float] | None = None,
        split_on_oom: bool = False,
    ) -> None:
        self.accumulation_steps, self.target_batch_size = accumulation_steps, target_batch_size
        self.base_batch_size, self.count, self.split_on_oom = base_batch_size, count, split_on_oom
        self.lr_scaling: LrScaling | None = lr_scaling
        self._by_samples = target_batch_size is not None
        self.policy = check_arguments(self)
        self._trainer: Any = None
        self._windows: Windows | None = None
        self._rates = Rates()
        self._undo: list[Callable[[], None]] = []
        self._probe: Probe | None = None
        self._start_over()

    @property
    def compared(self) -> str:
        """What ranks compare before they train together."""
        return repr(self)

    def _start_over(self) -> None:
        self._size, self._age, self._base, self._wanted = 0, 0, 0.0, 0
        self._seen: dict[str, Any] = {}
        """What was measured, when that was last asked for."""
        self._before: tuple[int, Callable[[], dict[str, Any]]] = (0, dict)
        """The state before the batch that was begun last, and its number."""
        self._shown, self._ranks = 0, 0

    # ---- life ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()
        self._windows = self._probe = self._trainer = None
        if stage != "fit":
            return
        check_trainer(self, trainer, pl_module)
        self._start_over()
        self._trainer, self._base = trainer, float(self.base_batch_size or 0)
        self._windows = windows = Windows(
            trainer, self._plan, partial(mean_of, trainer.strategy), self.count or batch_size
        )
        windows.pieces = Pieces(trainer.global_rank) if self.split_on_oom else None
        if (probe := probe_of(self.policy)) is not None:
            self._probe = probe
            windows.before_backward = lambda scale: probe.before_backward(trainer, scale)
            windows.after_backward = lambda ends: probe.after_backward(trainer, ends)
        if (count := self.count) is not None and ranks_of(trainer.strategy) > 1 and hasattr(trainer.strategy, "count"):
            self._undo.append(set_for_now(trainer.strategy, "count", lambda batch: float(count(batch))))
        self._undo += [
            *windows.install(),
            *self._rates.install(trainer),
            replace(trainer, "_teardown", self._tear_down),
        ]
        first = self._batches(self.policy.size(Progress(0, 0, 0, self._unit())))
        trainer.accumulate_grad_batches = first  # for who asks how many steps there will be

    def _end(self) -> None:
        take_back(self._undo)
        if self._probe is not None:
            self._probe.close()

    def _tear_down(self, original: Any) -> Any:
        def teardown() -> None:
            """Of the Trainer, however training has ended: who saves what there was when it failed has done so."""
            self._end()
            original()

        return teardown

    def state_dict(self) -> dict[str, Any]:
        if self._windows is None:
            return {}
        number, before = self._before
        # A batch that went wrong comes again: Lightning's counters are then set back to where they were before it.
        return (before if self._trainer.fit_loop.epoch_loop.batch_progress.total.ready < number else self._keep())()

    def _keep(self) -> Callable[[], dict[str, Any]]:
        """The state now, put together when it is asked for."""
        assert self._windows is not None
        probe = dict if self._probe is None else self._probe.keep()
        state = {
            "size": self._size, "age": self._age, "base": self._base, "ranks": self._ranks, "wanted": self._wanted,
            "windows": self._windows.state_dict(),
            "seen": {name: list(value) for name, value in self._seen.items() if value is not None},
        }  # fmt: skip
        return lambda: {**state, "probe": probe()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._windows is None or not state_dict:
            return
        self._size, self._age, self._base = state_dict["size"], state_dict["age"], state_dict["base"]
        self._ranks, self._before = state_dict["ranks"], (0, dict)
        self._wanted = state_dict.get("wanted", self._size)
        self._windows.load_state_dict(state_dict["windows"])
        self._seen = {name: _SEEN[name](*value) for name, value in state_dict["seen"].items()}
        if self._probe is not None and state_dict["probe"]:
            self._probe.load_state_dict(state_dict["probe"])
        if self._windows.is_open:
            self._windows.show()

    # ---- training ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._probe is not None:
            self._probe.begin_period(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._windows is None or self._windows.away:
            return
        self._before = trainer.fit_loop.epoch_loop.batch_progress.total.ready, self._keep()
        self._windows.begin_batch(batch)
        ask(trainer.strategy, self._base, self._wanted)
        if self._probe is not None:
            self._probe.begin_batch(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._windows is None or self._windows.away:
            return
        if self._probe is not None:
            self._probe.before_step(trainer)
        if (told := told_of(trainer.strategy)) is not None and told.size:
            self._base = told.base
            if self._probe is not None and ranks_of(trainer.strategy) > 1:
                self._size = int(told.size)
        if self.lr_scaling is not None:
            self._rates.multiply(optimizer, self.lr_factor)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        windows = self._windows
        if windows is None or not windows.end_batch():
            return
        planned = windows.planned
        if self._probe is not None:
            ranks = ranks_of(trainer.strategy) if in_lockstep(trainer.strategy) else 1
            is_full = (windows.samples, windows.batches) == (planned.samples, planned.batches) and windows.whole
            self._probe.end_window(is_full, planned.samples / planned.batches, planned.samples * ranks)
        if planned.batches != self._shown:
            self._show(trainer, pl_module)

    @property
    def lr_factor(self) -> float:
        """What learning rates are multiplied by in the step that is taken now."""
        windows = self._windows
        if windows is None or not self._base:
            return 1.0
        if (told := told_of(self._trainer.strategy)) is None:
            return lr_factor(self.lr_scaling, windows.samples, self._base)
        return lr_factor(self.lr_scaling, told.samples, told.base * told.ranks) if told.base else 1.0

    def _plan(self, samples: float) -> Plan:
        """The window that begins, with a batch of so many samples."""
        strategy = self._trainer.strategy
        together = in_lockstep(strategy)
        if not self._base:
            self._base = float(strategy.broadcast(samples)) if together else samples
        if self._by_samples and not self._size and self.count is None and samples != self._base:
            raise ValueError(
                f"Rank {self._trainer.global_rank}: `AdaptiveGradientAccumulation(base_batch_size="
                f"{self.base_batch_size})`, but the first batch has {samples:g} samples: give the loader's batch size."
            )
        self._wanted = self._size
        if self._age % max(1, self.policy.every) == 0 or not self._size:
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
            self._seen |= self._probe.end_period(partial(mean_of, self._trainer.strategy))
            self._probe.begin_period(self._trainer)
        trainer = self._trainer
        size = self.policy.size(
            Progress(trainer.global_step, trainer.current_epoch, self._size, self._unit(), **self._seen)
        )
        if type(size) is not int or size < 1:
            raise ValueError(f"`{self.policy!r}` said {size!r}: the size of a window is an int, at least 1.")
        if self._probe is not None and together:
            size = int(trainer.strategy.broadcast(size))  # of numbers that may differ in the last bit
        before, self._ranks = self._ranks, ranks_of(trainer.strategy)
        if self._by_samples and self._probe is None and self.count is None:
            check_target(self, trainer, size, self._ranks, began=before in (0, self._ranks))
        self._wanted = size
        if self._probe is None or not self._size or together or self._ranks == 1:
            self._size = size  # else one window later, as the first rank would have it: all hear that with this one

    def _unit(self) -> float:
        """Samples in one batch of each rank, where the policy counts samples."""
        return self._base * ranks_of(self._trainer.strategy) if self._by_samples else 1.0

    def _batches(self, size: int) -> int:
        least = 2 if isinstance(self._probe, NoiseProbe) and not in_lockstep(self._trainer.strategy) else 1
        return max(least, math.floor(size / self._unit() + 0.5))

    def _show(self, trainer: Any, pl_module: Any) -> None:
        """In loggers and in the progress bar, where it is another one."""
        assert self._windows is not None
        self._shown = self._windows.planned.batches
        metrics = {"accumulation/batches": float(self._shown), "accumulation/lr_factor": self.lr_factor}
        if (noise := self._seen.get("noise")) is not None and math.isfinite(noise.scale):
            metrics["accumulation/noise_scale"] = noise.scale
        show(trainer, pl_module, metrics)

    def __repr__(self) -> str:
        names = ("accumulation_steps", "base_batch_size", "target_batch_size", "lr_scaling", "count", "split_on_oom")
        given = [f"{name}={value!r}" for name in names if (value := getattr(self, name))]
        return f"{type(self).__name__}({', '.join(given)})"
