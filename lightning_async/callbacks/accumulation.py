"""Adaptive gradient accumulation: the number of samples in an optimizer step is fixed, scheduled or measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms import AccumulationPolicy, LrScaling, Noise, Times, WindowProgress, estimate, lr_factor
from lightning_async.callbacks.accumulation_steps import (
    TemporaryRates,
    check_arguments,
    check_target,
    check_trainer,
    show,
)
from lightning_async.callbacks.divergence_signals import norm
from lightning_async.trainer.loops.accumulation import AccumulationWindows, OomMicrobatches, WindowPlan, gradients_of
from lightning_async.trainer.loops.updates import ExternalWindowSize
from lightning_async.trainer.namespace import (
    Callback,
    batch_size,
    check_object,
    loss_scale,
    override,
    set_for_now,
    take_back,
)
from lightning_async.trainer.strategy_view import StrategyView, view_of


class Probe:
    """A base of measurements during accumulation windows, for policies that choose by a measurement.

    This base measures nothing.
    """

    measures = False

    def begin_period(self, optimizers: Sequence[Any]) -> None:
        """Begin the measurement on which the policy's next decision will be based."""

    def begin_batch(self) -> None:
        """Record that the training step of a batch begins."""

    def before_backward(self, scale: float) -> None:
        """Record that a backward pass begins; its loss is a batch's mean loss, multiplied by ``scale``."""

    def after_backward(self, ends: bool) -> None:
        """Record that a backward pass has ended; ``ends`` says whether it was the last one before an optimizer step."""

    def before_step(self) -> None:
        """Record that an optimizer step begins; the parameters' ``.grad`` has the gradients that the step uses."""

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        """Record that an accumulation window has ended.

        Args:
            is_full: Whether the window had its planned size, and batches of equal size.
            small_size: Number of samples in one batch of this rank.
            big_size: Number of samples in the window, over all ranks whose gradients are averaged.
        """

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        """Return the measurements since `begin_period`, as fields of `WindowProgress`.

        ``mean`` is a function that averages a number over all ranks. If ranks are not in lockstep, it returns the
        number itself.
        """
        return {}

    def close(self) -> None:
        """Remove the probe's hooks from the parameters."""

    def keep(self) -> Callable[[], dict[str, Any]]:
        """Return a function that, whenever it is called, returns the probe's state as it was when `keep` was called.

        The function may wait for a GPU; `keep` itself does not wait.
        """
        return dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that was returned by the function that `keep` returned."""


class NoiseProbe(Probe):
    """A measurement of squared gradient norms, of single batches and of whole windows.

    `estimate` computes the noise of gradients from the two. A hook of each parameter measures a batch's gradient before
    autograd adds it to the gradients of earlier batches, so no copy is kept.

    Args:
        decay: Decay of the running means in the noise scale.
        precision: Precision plugin, whose factor of the loss is divided out.
        arrive: Whether the strategy averages a window's gradients over ranks in the background. Then a window's mean
            gradient is measured when the strategy puts it into ``.grad``, which may be one window later. Default:
            False.
    """

    measures = True

    def __init__(self, decay: float, precision: Any, arrive: bool = False) -> None:
        self._decay = decay
        self._precision = precision
        self._arrive = arrive
        self._optimizers: Sequence[Any] = ()
        self.noise = Noise()
        self._hooks: dict[int, Any] = {}
        self._parts: list[Tensor] = []
        # Factor of the gradients that are computed now; 0 if this batch is not measured.
        self._scale = 0.0
        # Sum of squared norms of this window's batches, without those that are still in `_norms`.
        self._window = 0.0
        self._batches = 0
        self._norms: tuple[tuple[Tensor, float], ...] = ()
        """The norm of each batch, with its factor. On a GPU reading them waits, so that is done at a window's end."""
        self._big: tuple[Tensor, float] | None = None
        # Sums over this period: squared norms of batches, squared norms of windows, number of windows.
        self._sums = [0.0, 0.0, 0.0]
        self._sizes = (0.0, 0.0)

    def begin_period(self, optimizers: Sequence[Any]) -> None:
        """Begin a measurement, and register hooks of parameters that were unfrozen since the last one began."""
        self._optimizers = optimizers
        for optimizer in optimizers:
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if param.requires_grad and id(param) not in self._hooks:
                    self._hooks[id(param)] = param.register_hook(self._see)

    def before_backward(self, scale: float) -> None:
        self._scale = scale * loss_scale(self._precision)
        self._parts = []

    def after_backward(self, ends: bool) -> None:
        if self._scale:
            self._batches += 1
            if (found := norm(self._parts)) is not None:
                self._norms = (*self._norms, (found, self._scale))
        self._scale = 0.0
        self._parts = []
        if ends and not self._arrive:
            self._see_window()

    def before_step(self) -> None:
        """Measure the squared norm of the window's mean gradient, which the strategy has just put into ``.grad``."""
        if self._arrive:
            self._see_window()

    def _see_window(self) -> None:
        if (found := norm(gradients_of(self._optimizers))) is not None:
            self._big = found, loss_scale(self._precision)

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        window = _sum(self._window, self._norms)
        batches = self._batches
        big = self._big
        self._window = 0.0
        self._batches = 0
        self._norms = ()
        self._big = None
        sizes = (small_size, big_size)
        if not is_full or not batches or big is None or not small_size < big_size:
            return
        # Norms of batches of different sizes have no common mean.
        if sizes != self._sizes:
            self._sums = [0.0, 0.0, 0.0]
            self._sizes = sizes
        for place, value in enumerate((window / batches, _sum(0.0, (big,)), 1.0)):
            self._sums[place] += value

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        sums = [mean(each) for each in self._sums]
        self._sums = [0.0, 0.0, 0.0]
        if sums[2]:
            found = estimate(sums[0] / sums[2], sums[1] / sums[2], *self._sizes)
            self.noise = self.noise.add(found, self._decay)
        return {"noise": self.noise if self.noise.weight else None}

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def keep(self) -> Callable[[], dict[str, Any]]:
        noise = self.noise
        window = self._window
        norms = self._norms
        batches = self._batches
        sums = list(self._sums)
        sizes = list(self._sizes)
        big = self._big
        return lambda: {
            "noise": list(noise), "window": _sum(window, norms), "batches": batches, "sums": sums, "sizes": sizes,
            "big": None if big is None else [float(big[0]), big[1]],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise = Noise(*state["noise"])
        self._window = state["window"]
        self._batches = state["batches"]
        self._norms = ()
        self._sums = list(state["sums"])
        self._sizes = (state["sizes"][0], state["sizes"][1])
        if (big := state.get("big")) is not None:
            self._big = torch.tensor(big[0], dtype=torch.float64), big[1]

    def _see(self, gradient: Tensor) -> None:
        if self._scale and (found := norm([gradient])) is not None:
            self._parts.append(found)


class TimesProbe(Probe):
    """A measurement of the time of a batch's training, and of the time between backward pass and optimizer step.

    A window's last batch is timed until the optimizer step begins. All other batches are timed until their backward
    pass has ended. The difference of the two medians is the time between backward pass and step.
    """

    measures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batches: list[float] = []
        self._lasts: list[float] = []
        self._began: float | None = None

    def begin_batch(self) -> None:
        self._began = self._now()

    def after_backward(self, ends: bool) -> None:
        if self._began is not None and not ends:
            self._batches.append(self._now() - self._began)

    def before_step(self) -> None:
        if self._began is not None:
            self._lasts.append(self._now() - self._began)

    def _now(self) -> float:
        # Without this wait, the host's clock would only measure how fast kernels are launched.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        self._began = None

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        batches = self._batches
        lasts = self._lasts
        self._batches = []
        self._lasts = []
        if not batches or not lasts:
            return {}
        # The median is robust against a single batch that had to wait for something.
        batch_s = statistics.median(batches)
        return {"times": Times(batch_s, statistics.median(lasts) - batch_s)}

    def keep(self) -> Callable[[], dict[str, Any]]:
        state = {"batches": list(self._batches), "lasts": list(self._lasts)}
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = list(state["batches"])
        self._lasts = list(state["lasts"])


def probe_of(policy: AccumulationPolicy, strategy: Any, arrive: bool) -> Probe:
    """Return the probe that measures what ``policy`` needs.

    ``arrive`` says whether the strategy averages gradients in the background; see `NoiseProbe`.
    """
    measures = getattr(policy, "measures", "nothing")
    if measures == "noise":
        return NoiseProbe(getattr(policy, "decay", 0.9), strategy.precision_plugin, arrive)
    return TimesProbe(strategy.root_device) if measures == "times" else Probe()


def _sum(first: float, norms: tuple[tuple[Tensor, float], ...]) -> float:
    for found, scale in norms:
        first += (float(found) / scale) ** 2
    return first


_SEEN: dict[str, Any] = {"noise": Noise, "times": Times}


class Sizes:
    """The sizes of the accumulation windows of one fit, as the callback's policy chooses them.

    If the engine averages the gradients, each rank sends its window size with them, and the factor of learning rates
    depends on the number of samples on all ranks. If the policy also chooses a size from measurements, all ranks use
    the size that the first rank has chosen, one window later. ``probe`` measures what the policy needs.
    """

    def __init__(self, callback: Any, trainer: Any, probe: Probe) -> None:
        self._callback = callback
        self._trainer = trainer
        self._probe = probe
        self._strategy: StrategyView = view_of(trainer.strategy)
        self._policy: AccumulationPolicy = callback.policy
        self._by_samples = callback.target_batch_size is not None
        self._size = 0
        self._age = 0
        self._wanted = 0
        self._ranks = 0
        self._base = float(callback.base_batch_size or 0)
        # The results of the last measurement.
        self.seen: dict[str, Any] = {}
        self.arrived = 0.0
        """Number of samples in the last step's gradients, over all ranks. With a delay it is of an earlier window."""

    @property
    def first(self) -> int:
        return self._batches(self._policy.size(WindowProgress(0, 0, 0, self._unit())))

    def state_dict(self) -> dict[str, Any]:
        return {
            "size": self._size, "age": self._age, "base": self._base, "ranks": self._ranks, "wanted": self._wanted,
            "arrived": self.arrived,
            "seen": {name: list(value) for name, value in self.seen.items() if value is not None},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._size = state["size"]
        self._age = state["age"]
        self._base = state["base"]
        self._ranks = state["ranks"]
        self._wanted = state["wanted"]
        self.arrived = state["arrived"]
        self.seen = {name: _SEEN[name](*value) for name, value in state["seen"].items()}

    def tell(self) -> None:
        """Send this rank's window size to all ranks with its next gradients, if the engine averages gradients."""
        if (gradients := self._strategy.gradients) is not None:
            gradients.asks = self._base, self._wanted

    @property
    def _told(self) -> Any:
        """The values that ranks have sent with the gradients of the current step; see `GradientsMean`.

        None if the step uses this rank's gradients only, or if DDP or Horovod averages the gradients, and not the
        engine.
        """
        gradients = self._strategy.gradients
        return None if gradients is None else gradients.told

    def hear(self) -> None:
        """Take over the window size and the number of samples that arrived with the current step's gradients.

        They are the same on all ranks.
        """
        told = self._told
        self.arrived = 0.0 if told is None else told.samples
        if told is not None and told.size:
            self._base = told.base
            if self._probe.measures and self._strategy.num_averaged > 1:
                self._size = int(told.size)

    def lr_factor(self, samples: float) -> float:
        """Return the factor by which learning rates are multiplied in the current step.

        ``samples`` is the number of samples of this rank in the step.
        """
        if not self._base:
            return 1.0
        scaling = self._callback.lr_scaling
        if (told := self._told) is None:
            return lr_factor(scaling, samples, self._base)
        return lr_factor(scaling, told.samples, told.base * told.ranks) if told.base else 1.0

    def plan(self, samples: float) -> WindowPlan:
        """Return the plan of the window that begins now; its first batch has ``samples`` samples."""
        callback = self._callback
        together = self._strategy.in_lockstep
        # Without `base_batch_size`, the first batch is the unit of learning rates, on average over the ranks.
        if not self._base:
            self._base = self.mean(samples)
        if self._by_samples and not self._size and callback.count is None and samples != self._base:
            raise ValueError(
                f"Rank {self._trainer.global_rank}: `AdaptiveGradientAccumulation(base_batch_size="
                f"{callback.base_batch_size})`, but the first batch has {samples:g} samples: give the loader's batch "
                "size."
            )
        self._wanted = self._size
        # Measuring policies decide every few windows, because measurements need several.
        if self._age % max(1, self._policy.every) == 0 or not self._size:
            self._decide(together)
        self._age += 1
        batches = self._batches(self._size)
        # Ranks in lockstep need equal numbers of batches. Others may fill a window by samples.
        if together:
            return WindowPlan(batches, batches * (self._base or 1.0))
        if self._by_samples:
            target = self._size / (self._unit() / self._base)
            return WindowPlan(batches, batches * self._base if self._probe.measures else target, by_samples=True)
        return WindowPlan(batches, batches * (samples or self._base or 1.0))

    def mean(self, value: float) -> float:
        """Return the mean of ``value`` over all ranks if they are in lockstep; otherwise return ``value``."""
        if not self._strategy.in_lockstep:
            return value
        strategy = self._trainer.strategy
        tensor = torch.tensor(value, dtype=torch.float64, device=strategy.root_device)
        return float(strategy.reduce(tensor, reduce_op="sum")) / strategy.world_size

    def _decide(self, together: bool) -> None:
        trainer = self._trainer
        self.seen |= self._probe.end_period(self.mean)
        self._probe.begin_period(trainer.optimizers)
        policy = self._policy
        size = policy.size(
            WindowProgress(trainer.global_step, trainer.current_epoch, self._size, self._unit(), **self.seen)
        )
        if type(size) is not int or size < 1:
            raise ValueError(f"`{policy!r}` said {size!r}: the size of a window is an int, at least 1.")
        if self._probe.measures and together:
            # Measurements may differ between ranks in the last bit, and rounding would then give different sizes.
            size = int(trainer.strategy.broadcast(size))
        before = self._ranks
        self._ranks = self._strategy.num_averaged
        if self._by_samples and not self._probe.measures and self._callback.count is None:
            check_target(self._callback, trainer.global_rank, size, self._ranks, began=before in (0, self._ranks))
        self._wanted = size
        # Otherwise the size follows one window later, as the first rank measured it: `hear` sets it.
        if not self._probe.measures or not self._size or together or self._ranks == 1:
            self._size = size

    def _unit(self) -> float:
        """Return the number of samples in one batch of all ranks that average their gradients.

        If the policy counts batches, return 1.
        """
        return self._base * self._strategy.num_averaged if self._by_samples else 1.0

    def _batches(self, size: int) -> int:
        # Noise is estimated from batches that are smaller than their window.
        least = 2 if isinstance(self._probe, NoiseProbe) and not self._strategy.in_lockstep else 1
        return max(least, math.floor(size / self._unit() + 0.5))


class AdaptiveGradientAccumulation(Callback):
    r"""A callback that accumulates gradients over windows of changing size, with any strategy.

    .. math:: g = \frac{\sum_j n_j g_j}{\sum_j n_j}, \qquad \eta = \eta_0 \, f\Big(\frac{\sum_j n_j}{n_0}\Big)

    :math:`g_j` is the gradient of batch :math:`j`, and :math:`n_j` its number of samples. :math:`n_0` is the number of
    samples in a step without accumulation, for which the learning rate :math:`\eta_0` was chosen. If ranks average
    their gradients (DDP, Horovod, `Synchronous()`, `AsyncGradientStrategy`), the sums are over the batches of all
    ranks. For asynchronous replicas, they are over the replica's own batches. The last window of an epoch may be
    smaller. Its gradient is the mean over its own samples, while Lightning would divide by the length of a full window.
    A window begins when the previous one has ended. Therefore a change of size loses no gradient, counts none twice,
    and delays none. Everything that counts optimizer steps (``max_steps``, `EveryNSteps`, schedulers by step) counts
    windows.

    Args:
        accumulation_steps: Number of batches in each rank's window: an int, `ByEpoch`, `ByStep`, `CommunicationShare`,
            or a policy of your own.
        base_batch_size: Number of samples in one rank's batch, equal to the ``batch_size`` of its loader. Only with
            ``target_batch_size``.
        target_batch_size: Number of samples in an optimizer step, over all ranks that average their gradients: an int,
            `ByEpoch`, `ByStep`, `NoiseScale`, or a policy of your own. It must be a multiple of ``base_batch_size``
            times the number of these ranks. A number that a policy measures is rounded to such a multiple.
        lr_scaling: :math:`f`, which is "linear", "sqrt", or None (default) to leave learning rates as they are.
            Schedulers continue from the unscaled rates; the scaled ones exist only during the optimizer's step.
        count: Function that returns the weight of a batch as a number >= 0, such as its number of tokens. Default:
            samples.
        split_on_oom: If there is not enough memory for a batch, train on halves of batches from then on, or on smaller
            parts, each with its own `training_step`. Gradients stay means over samples. Not with DDP and Horovod.
            Default: False.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range, or cannot be combined with another one. Also raised when training
            begins, if there is manual optimization, another `AdaptiveGradientAccumulation`, Lightning's
            `GradientAccumulationScheduler`, ``Trainer(accumulate_grad_batches=...)``, a strategy that accumulates
            itself, synchronous servers with ``lr_scaling``, or a ``target_batch_size`` that is no such multiple.

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
        self.accumulation_steps = accumulation_steps
        self.target_batch_size = target_batch_size
        self.base_batch_size = base_batch_size
        self.count = count
        self.split_on_oom = split_on_oom
        self.lr_scaling: LrScaling | None = lr_scaling
        self.policy = check_arguments(self)
        self._trainer: Any = None
        self._windows: AccumulationWindows | None = None
        self._rates = TemporaryRates()
        self._undo: list[Callable[[], None]] = []
        self._probe = Probe()
        self._sizes: Sizes | Any = None
        # Whether the strategy gathers the windows, which this callback only plans.
        self._lent = False
        self._start_over()

    @property
    def compared(self) -> str:
        return repr(self)

    def _start_over(self) -> None:
        self._before: tuple[int, Callable[[], dict[str, Any]]] = (0, dict)
        """The number of the batch that was begun last, and a function that returns the state before it."""
        self._shown = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        self._end()
        self._probe = Probe()
        self._windows = self._trainer = None
        if stage != "fit":
            return
        check_trainer(self, trainer, pl_module)
        self._start_over()
        self._trainer = trainer
        strategy: StrategyView = view_of(trainer.strategy)
        self._lent = strategy.in_windows and (trainer.world_size > 1 or strategy.joining)
        self._probe = probe = probe_of(self.policy, trainer.strategy, self._lent)
        self._sizes = sizes = Sizes(self, trainer, probe)
        kind = ExternalWindowSize if self._lent else AccumulationWindows
        self._windows = windows = kind(trainer, sizes.plan, sizes.mean, self.count or batch_size)
        windows.pieces = OomMicrobatches(trainer.global_rank) if self.split_on_oom else None
        windows.before_backward = probe.before_backward
        windows.after_backward = probe.after_backward
        if (count := self.count) is not None and strategy.asynchronous and strategy.num_averaged > 1:
            self._undo.append(set_for_now(trainer.strategy, "count", lambda batch: float(count(batch))))
        self._undo += [
            *windows.install(),
            *self._rates.install(trainer),
            override(trainer, "_teardown", self._tear_down),
        ]
        if strategy.in_windows:
            self._undo.append(set_for_now(strategy, "lent", True))
        windows.planned = windows.planned._replace(batches=sizes.first)
        # `trainer.estimated_stepping_batches` divides by this number.
        windows.show()

    def _end(self) -> None:
        take_back(self._undo)
        self._probe.close()

    def _tear_down(self, original: Any) -> None:
        self._end()
        original()

    def state_dict(self) -> dict[str, Any]:
        if self._windows is None:
            return {}
        number, before = self._before
        # A failed batch is repeated, and Lightning's counters are then set back to their values before it.
        return (before if self._trainer.fit_loop.epoch_loop.batch_progress.total.ready < number else self._keep())()

    def _keep(self) -> Callable[[], dict[str, Any]]:
        """Return a function that, whenever it is called, returns the callback's state as it is now.

        The function may wait for a GPU, see `Probe.keep`.
        """
        assert self._windows is not None
        probe = self._probe.keep()
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
        if state_dict["probe"]:
            self._probe.load_state_dict(state_dict["probe"])
        if self._windows.is_open or self._lent:
            self._windows.show()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._probe.begin_period(trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._windows is None or self._windows.away:
            return
        self._before = trainer.fit_loop.epoch_loop.batch_progress.total.ready, self._keep()
        runner = view_of(trainer.strategy).step_runner
        held = self._lent and runner.accumulates and runner.between_windows
        # A full window leaves now, and takes the sizes along that were known before this batch.
        if held:
            self._sizes.tell()
        self._windows.begin_batch(batch)
        if not held:
            self._sizes.tell()
        self._probe.begin_batch()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._windows is None or self._windows.away:
            return
        self._probe.before_step()
        self._sizes.hear()
        if self.lr_scaling is not None:
            self._rates.multiply(optimizer, self.lr_factor)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        windows = self._windows
        if windows is None or not windows.end_batch():
            return
        planned = windows.planned
        strategy = view_of(trainer.strategy)
        ranks = strategy.num_averaged if self._lent or strategy.in_lockstep else 1
        is_full = (windows.samples, windows.batches) == (planned.samples, planned.batches) and windows.whole
        # A late mean is of an earlier window, and only windows of equal size may be compared.
        if self._lent:
            is_full &= self._sizes.arrived == planned.samples * ranks
        self._probe.end_window(is_full, planned.samples / planned.batches, planned.samples * ranks)
        if planned.batches != self._shown:
            self._show(pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if not self._lent or self._windows is None or self._windows.away:
            return
        self._sizes.tell()
        self._probe.before_backward(1.0 / trainer.accumulate_grad_batches)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._lent and self._windows is not None and not self._windows.away:
            self._probe.after_backward(self._windows.ends)

    @property
    def lr_factor(self) -> float:
        return 1.0 if self._windows is None else self._sizes.lr_factor(self._windows.samples)

    def _show(self, pl_module: Any) -> None:
        assert self._windows is not None
        self._shown = self._windows.planned.batches
        metrics = {"accumulation/batches": float(self._shown), "accumulation/lr_factor": self.lr_factor}
        if (noise := self._sizes.seen.get("noise")) is not None and math.isfinite(noise.scale):
            metrics["accumulation/noise_scale"] = noise.scale
        show(pl_module, metrics)

    def __repr__(self) -> str:
        names = ("accumulation_steps", "base_batch_size", "target_batch_size", "lr_scaling", "count", "split_on_oom")
        given = [f"{name}={value!r}" for name in names if (value := getattr(self, name))]
        return f"{type(self).__name__}({', '.join(given)})"
