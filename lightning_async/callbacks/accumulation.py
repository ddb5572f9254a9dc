"""How many samples an optimizer step has: fixed, by schedule, or by what training shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_async.callbacks.probes import Probe, probe_of
from lightning_async.callbacks.sizes import Sizes
from lightning_async.callbacks.steps import (
    Rates,
    check_arguments,
    check_trainer,
    in_lockstep,
    lends,
    mean_of,
    ranks_of,
    show,
)
from lightning_async.rules.accumulation import AccumulationPolicy, LrScaling
from lightning_async.trainer.batch import batch_size
from lightning_async.trainer.lent_windows import LentWindows
from lightning_async.trainer.namespace import check_object, pytorch
from lightning_async.trainer.patches import replace, set_for_now, take_back
from lightning_async.trainer.pieces import Pieces
from lightning_async.trainer.windows import Windows

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = pytorch("callbacks").Callback

__all__ = ["AdaptiveGradientAccumulation"]


class AdaptiveGradientAccumulation(Callback):
    r"""Accumulates gradients over windows that may change from one to the next, with any strategy.

    .. math:: g = \frac{\sum_j n_j g_j}{\sum_j n_j}, \qquad \eta = \eta_0 \, f\Big(\frac{\sum_j n_j}{n_0}\Big)

    :math:`g_j` is the gradient of batch :math:`j` and :math:`n_j` its samples; :math:`n_0` are those of a step without
    accumulation, for which the learning rate :math:`\eta_0` is right. Where ranks average their gradients (DDP,
    Horovod, `Synchronous()`, windows in the background) the sums are over all of them; where replicas drift, over each
    one's own, which step by themselves. So the last window of an epoch, which has fewer batches or a smaller one, has
    the mean of what it has; Lightning divides it by the length of a full one.

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
        self.policy = check_arguments(self)
        self._trainer: Any = None
        self._windows: Windows | None = None
        self._rates = Rates()
        self._undo: list[Callable[[], None]] = []
        self._probe: Probe | None = None
        self._sizes: Sizes | Any = None
        self._lent = False
        """Windows are gathered by the strategy."""
        self._start_over()

    @property
    def compared(self) -> str:
        """What ranks compare before they train together."""
        return repr(self)

    def _start_over(self) -> None:
        self._before: tuple[int, Callable[[], dict[str, Any]]] = (0, dict)
        """The state before the batch that was begun last, and its number."""
        self._shown = 0

    # ---- life ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        self._end()
        self._windows = self._probe = self._trainer = None
        if stage != "fit":
            return
        check_trainer(self, trainer, pl_module)
        self._start_over()
        self._trainer, self._lent = trainer, lends(trainer.strategy)
        self._probe = probe = probe_of(self.policy, self._lent)
        self._sizes = sizes = Sizes(self, trainer, probe)
        kind = LentWindows if self._lent else Windows
        self._windows = windows = kind(
            trainer, sizes.plan, partial(mean_of, trainer.strategy), self.count or batch_size
        )
        windows.pieces = Pieces(trainer.global_rank) if self.split_on_oom else None
        if probe is not None:
            windows.before_backward = lambda scale: probe.before_backward(trainer, scale)
            windows.after_backward = lambda ends: probe.after_backward(trainer, ends)
        if (count := self.count) is not None and ranks_of(trainer.strategy) > 1 and hasattr(trainer.strategy, "count"):
            self._undo.append(set_for_now(trainer.strategy, "count", lambda batch: float(count(batch))))
        self._undo += [
            *windows.install(),
            *self._rates.install(trainer),
            replace(trainer, "_teardown", self._tear_down),
        ]
        if hasattr(trainer.strategy, "accumulate"):
            self._undo.append(set_for_now(trainer.strategy, "lent", True))
        windows.planned = windows.planned._replace(batches=sizes.first)
        windows.show()  # for who asks how many steps there will be

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
            **self._sizes.state_dict(),
            "windows": self._windows.state_dict(),
        }
        return lambda: {**state, "probe": probe()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._windows is None or not state_dict:
            return
        self._sizes.load_state_dict(state_dict)
        self._before = 0, dict
        self._windows.load_state_dict(state_dict["windows"])
        if self._probe is not None and state_dict["probe"]:
            self._probe.load_state_dict(state_dict["probe"])
        if self._windows.is_open or self._lent:
            self._windows.show()

    # ---- training ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._probe is not None:
            self._probe.begin_period(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._windows is None or self._windows.away:
            return
        self._before = trainer.fit_loop.epoch_loop.batch_progress.total.ready, self._keep()
        held = self._lent and trainer.strategy.gathers and trainer.strategy.between_windows
        if held:  # the window that was full leaves now, with what was to be heard with it
            self._sizes.tell()
        self._windows.begin_batch(batch)
        if not held:
            self._sizes.tell()
        if self._probe is not None:
            self._probe.begin_batch(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._windows is None or self._windows.away:
            return
        if self._probe is not None:
            self._probe.before_step(trainer)
        self._sizes.hear()
        if self.lr_scaling is not None:
            self._rates.multiply(optimizer, self.lr_factor)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        windows = self._windows
        if windows is None or not windows.end_batch():
            return
        planned = windows.planned
        if self._probe is not None:
            ranks = ranks_of(trainer.strategy) if self._lent or in_lockstep(trainer.strategy) else 1
            is_full = (windows.samples, windows.batches) == (planned.samples, planned.batches) and windows.whole
            if self._lent:  # the mean that has arrived is of windows as large as this one
                is_full &= self._sizes.arrived == planned.samples * ranks
            self._probe.end_window(is_full, planned.samples / planned.batches, planned.samples * ranks)
        if planned.batches != self._shown:
            self._show(trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not self._lent or self._windows is None or self._windows.away:
            return
        self._sizes.tell()
        if self._probe is not None:
            self._probe.before_backward(trainer, 1.0 / trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._lent and self._probe is not None and self._windows is not None and not self._windows.away:
            self._probe.after_backward(trainer, self._windows.ends)

    @property
    def lr_factor(self) -> float:
        """What learning rates are multiplied by in the step that is taken now."""
        return 1.0 if self._windows is None else self._sizes.lr_factor(self._windows.samples)

    def _show(self, trainer: Any, pl_module: Any) -> None:
        """In loggers and in the progress bar, where it is another one."""
        assert self._windows is not None
        self._shown = self._windows.planned.batches
        metrics = {"accumulation/batches": float(self._shown), "accumulation/lr_factor": self.lr_factor}
        if (noise := self._sizes.seen.get("noise")) is not None and math.isfinite(noise.scale):
            metrics["accumulation/noise_scale"] = noise.scale
        show(trainer, pl_module, metrics)

    def __repr__(self) -> str:
        names = ("accumulation_steps", "base_batch_size", "target_batch_size", "lr_scaling", "count", "split_on_oom")
        given = [f"{name}={value!r}" for name in names if (value := getattr(self, name))]
        return f"{type(self).__name__}({', '.join(given)})"
