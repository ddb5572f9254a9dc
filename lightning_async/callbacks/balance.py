"""Batches of unequal size, for ranks of unequal speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_async._checks import check_int
from lightning_async.callbacks.accumulation_steps import show
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.configuration_checks import check_loaders
from lightning_async.trainer.data.batch_balancing import Balancing, Bounds
from lightning_async.trainer.loops.accumulation import AccumulationWindows, OomMicrobatches, WindowPlan
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Callback, batch_size, callbacks_of, check_object, override, take_back
from lightning_async.trainer.strategy_view import view_of


def check_trainer(callback: Any, trainer: Any) -> None:
    """Raise ValueError if the strategy or another setting does not allow batches of unequal size."""
    owner = type(callback).__name__
    strategy = trainer.strategy
    name = type(strategy).__name__
    if not view_of(strategy).asynchronous or strategy.served:
        raise ValueError(
            f"`{owner}` is for strategies that weight what ranks exchange by samples, and `{name}` does not: use "
            "`AsyncAveragingStrategy(schedule=Synchronous())`, which steps as DDP does, or `AsyncGradientStrategy`."
        )
    if (weighting := strategy.config.weighting) != "samples":
        raise ValueError(f"`{name}(weighting={weighting!r})` beside `{owner}`: take 'samples', or leave `{owner}` out.")
    if any(hasattr(each, "accumulation_steps") for each in trainer.callbacks):
        raise ValueError(
            f"`AdaptiveGradientAccumulation` beside `{owner}`: both say how many samples a step has. Leave it out, and "
            f"take `{owner}(global_batch_size=...)`."
        )
    if callbacks_of(trainer, "GradientAccumulationScheduler"):
        raise ValueError(
            f"The Trainer has a `GradientAccumulationScheduler` beside `{owner}`: leave it out, and take "
            "`Trainer(accumulate_grad_batches=...)`, which stays."
        )
    if trainer.overfit_batches:
        raise ValueError(f"`Trainer(overfit_batches={trainer.overfit_batches})` beside `{owner}`: leave one out.")


# Largest factor by which ranks in lockstep lengthen the interval between checks while sizes stay right.
_PATIENCE = 16


class BalancedBatchSizes(CollectiveCallback, Callback):
    r"""A callback that sizes each rank's batches by its speed, so that all ranks take equally long for a batch.

    .. math:: n_i = \operatorname{clip}\Big(\lambda v_i,\; n_{\min},\; n_{\max}\Big), \qquad \sum_i n_i = n

    :math:`v_i` is the recent speed of rank :math:`i` in samples per second. :math:`n` is the number of samples in a
    step over all ranks, and stays the same. The factor :math:`\lambda` makes the sizes add up to :math:`n`. Suppose
    that one of four ranks is 3 times slower than the others: it gets 1 sample of a step while each other rank gets 3.
    Such a step of 10 samples takes as long as a step of 4 samples with equal batches. Each sample is trained on once in
    an epoch, without a sampler's padding, and has the same weight.

    The first epoch begins with equal batches. Sizes change at the beginning of an epoch, and within it at a sync
    point, if a step would become at least 5% shorter. The remaining samples of the epoch are then distributed again.
    The callback is for `AsyncGradientStrategy` and `AsyncAveragingStrategy`, including `Synchronous()`, with one
    DataLoader of a map-style dataset, whose sampler Lightning makes. The loader's ``batch_size`` is the first size. A
    rank that runs out of memory trains on that batch in pieces, and gets smaller batches from then on (not with manual
    optimization). On GPUs the host waits for each backward pass, because otherwise it could not measure the speed.

    Args:
        minimum: :math:`n_{\min}`. Default: 1.
        maximum: :math:`n_{\max}`. Default: limited by memory only.
        every: Number of a rank's batches between two checks whether other sizes would make a step shorter. None: sizes
            change only at the beginning of an epoch. Ranks in lockstep need a sync point for each check, so their
            interval doubles after a check without a change, up to 16 times ``every``. Default: 50.
        global_batch_size: :math:`n`. Default: the sum of the batch sizes of all ranks' loaders when training begins.
            It stays the same when ranks are lost or join.

    Raises:
        TypeError: An argument is not an int.
        ValueError: A number is less than 1, or ``maximum`` is less than ``minimum``. When training begins: the bounds
            do not allow the number of samples in a step, or a strategy, loader or other callback is not supported.

    Source: dynamic local updates of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
    https://arxiv.org/abs/2401.09135, for the size of batches
    """

    of_all_ranks = True

    def __init__(
        self,
        minimum: int = 1,
        maximum: int | None = None,
        *,
        every: int | None = 50,
        global_batch_size: int | None = None,
    ) -> None:
        self.minimum = minimum
        self.maximum = maximum
        self.every = every
        self.global_batch_size = global_batch_size
        check_int(self, "minimum", at_least=1)
        for name, least in (("maximum", minimum), ("every", 1), ("global_batch_size", 1)):
            if getattr(self, name) is not None:
                check_int(self, name, at_least=least)
        self._balancing: Balancing | None = None
        self._windows: AccumulationWindows | None = None
        self._undo: list[Callable[[], None]] = []
        self._start_over()

    def _start_over(self) -> None:
        self._since = 0
        self._shown: dict[str, int] = {}
        self._total = self.global_batch_size or 0
        self._base = 0
        # Whether this rank has called for a sync point because it ran out of memory. It calls only once, because the
        # other ranks may not have memory for larger batches, either.
        self._told_namespace = False
        # The sizes that a checkpoint has restored.
        self._sizes: dict[str, int] = {}
        # Factor of the interval between checks of ranks in lockstep; doubles after each check that changes nothing.
        self._patience = 1

    @property
    def compared(self) -> str:
        return repr(self)

    @property
    def batch_sizes(self) -> dict[str, int]:
        """The number of samples in each rank's batch, by the rank's stable id; empty with a single rank."""
        return {} if self._balancing is None else dict(self._balancing.sizes)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        take_back(self._undo)
        self._balancing = self._windows = None
        if stage != "fit":
            return
        check_trainer(self, trainer)
        self._start_over()
        self._undo.append(override(trainer, "_teardown", self._tear_down))
        # With manual optimization the module decides on its steps, and batches cannot be trained on in pieces.
        if pl_module.automatic_optimization:
            parts = 1 if trainer.strategy.in_windows else trainer.accumulate_grad_batches
            self._windows = AccumulationWindows(
                trainer, lambda n: WindowPlan(parts, parts * (n or 1.0)), lambda mean: mean, batch_size
            )
            self._windows.pieces = OomMicrobatches(trainer.global_rank)
            self._windows.after_backward = lambda ends: _wait_for(pl_module.device)
            self._undo += self._windows.install()

    def _tear_down(self, original: Any) -> None:
        take_back(self._undo)
        original()

    def state_dict(self) -> dict[str, Any]:
        if self._balancing is None:
            return {}
        windows = None if self._windows is None else self._windows.state_dict()
        return {
            "total": self._balancing.total, "base": self._balancing.base, "sizes": dict(self._balancing.sizes),
            "windows": windows, "since": self._since, "patience": self._patience,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._total = self.global_batch_size or state_dict["total"]
            self._base = state_dict["base"]
            self._since = state_dict["since"]
            self._patience = state_dict["patience"]
            self._sizes = dict(state_dict["sizes"])
            # `on_train_start` has run already on a rank that joins a running fit.
            if self._balancing is not None:
                self._balancing.total = self._total
                self._balancing.sizes = self._sizes
            if self._windows is not None and state_dict["windows"] is not None:
                self._windows.load_state_dict(state_dict["windows"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._balancing is not None:
            return
        ranks = trainer.world_size
        base = getattr(trainer.fit_loop._combined_loader.flattened[0], "batch_size", None)
        if trainer.strategy.world is None and not trainer.strategy.joining:
            if self.global_batch_size not in (None, base):
                raise ValueError(
                    f"`{type(self).__name__}(global_batch_size={self.global_batch_size})` with one rank: that is the "
                    f"`batch_size` of its loader, which is {base}."
                )
            return
        check_loaders(type(self).__name__, trainer)
        total = self._total or base * ranks
        if self.minimum * ranks > total or (self.maximum is not None and self.maximum * ranks < total):
            raise ValueError(
                f"`{type(self).__name__}(minimum={self.minimum}, maximum={self.maximum})`: {ranks} ranks are to take "
                f"{total} samples in a step, {total / ranks:g} each on average."
            )
        self._balancing = Balancing(trainer, Bounds(self.minimum, self.maximum), self._total, lambda: self._room)
        self._balancing.base = 0 if self.global_batch_size else self._base
        self._balancing.sizes = self._sizes
        self._undo += self._balancing.install()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._windows is not None:
            self._windows.begin_batch(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._windows is not None:
            self._windows.end_batch()
        balancing = self._balancing
        if balancing is None or self.call_together is None or not balancing.sizes:
            return
        if balancing.sizes != self._shown:
            self._shown = dict(balancing.sizes)
            show(pl_module, {f"batch_size/rank_{name}": float(size) for name, size in self._shown.items()})
        self._since += 1
        if self.every is not None and self._looks(self.every, trainer, balancing):
            balancing.wants = True
            self.call_together()

    def _looks(self, every: int, trainer: Any, balancing: Balancing) -> bool:
        """Return whether this rank requests a sync point at which all ranks choose batch sizes.

        Ranks in lockstep all request it after the same number of batches, so every rank takes part in each step. Among
        asynchronous replicas, rank 0 requests it if other sizes would shorten a step. Any other rank requests it once,
        after it ran out of memory. ``every`` is the number of batches between two checks.
        """
        strategy = trainer.strategy
        if strategy.in_step if strategy.in_windows else strategy.averages_gradients:
            return self._since >= every * self._patience or balancing.is_off
        if 0 < (self._room or 0) < balancing.sizes.get(balancing.name, 0) and not self._told_namespace:
            self._told_namespace = True
            return True
        looks = self._since % every == 0 and balancing.would_gain()
        return not trainer.global_rank and (looks or balancing.is_off)

    @property
    def _room(self) -> int | None:
        """The largest number of samples that this rank trains on at once after it ran out of memory; None before."""
        return None if self._windows is None or self._windows.pieces is None else self._windows.pieces.most

    def decide(self, world: LightningCollectives) -> bool:
        """Choose batch sizes together with all other ranks. Always returns False, because the model does not change."""
        if self._balancing is not None and (has_changed := self._balancing.decide(world)) is not None:
            self._since = 0
            self._told_namespace = self._told_namespace and not has_changed
            self._patience = 1 if has_changed else min(2 * self._patience, _PATIENCE)
        return False

    def __repr__(self) -> str:
        names = ("minimum", "maximum", "every", "global_batch_size")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _wait_for(device: torch.device) -> None:
    """Wait until the GPU has done a batch's work, so the measured time of the batch includes this work.

    The time of the collective that follows is then only the time in which this rank waits for other ranks.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
