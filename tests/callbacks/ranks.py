"""Trainings of two ranks that go wrong on one of them."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_async import AsyncAveragingStrategy, EveryNSteps
from lightning_async.algorithms.divergence import History
from lightning_async.callbacks.divergence import DivergenceMonitor
from lightning_async.engine.timeouts import Timeouts
from lightning_async.trainer.namespace import pl, pytorch
from tests.callbacks.checkpoint_ranks import until
from tests.callbacks.problem import Keeper, Line, batches, finite, values
from tests.strategies.workers import logged, rank, scenario, together

NAN = math.nan
NONE: dict[int, float] = {}
HISTORY = History(window=30, warmup=5, cooldown=2)
LONG = Timeouts(dead_after=timedelta(seconds=50), grace=timedelta(seconds=40))
"""What waits for one of these is not done at once."""


class Paced(Line):
    """Takes a while for each step, so that replicas drift little.

    Args:
        poison: at the end of this step, on this rank, what becomes of the optimizer's state and the parameters.
        ready: the file that is there once the other rank is ready for that. Default: it always is.
    """

    def __init__(self, wrong: Any = None, poison: int = 0, pause_s: float = 0.003, ready: Path | None = None) -> None:
        super().__init__(wrong)
        self.poison, self.pause_s, self.ready = poison, pause_s, ready

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.steps == self.poison > 0:
            if self.ready is not None:
                until(self.ready.exists, "the other rank is ready")
            with torch.no_grad():
                self.layer.weight[0, 0] = NAN
            self.poison = 0


def fit(strategy: Any, module: Line, *callbacks: Any, n: int = 40, **options: Any) -> dict[str, Any]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "enable_model_summary": False}
    defaults |= {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    with logged() as said:
        trainer = pl.Trainer(strategy=strategy, callbacks=list(callbacks), **(quiet | defaults | options))
        error = ""
        try:
            trainer.fit(module, batches(n, seed=rank()), batches(1) if "val_check_interval" in options else None)
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "values": values(module),
        "finite": finite(module),
        "history": module.history,
        "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
        "said": said,
        "error": error,
        "step": trainer.global_step,
    }


def on_rank_1(wrong: dict[int, float]) -> dict[int, float]:
    return wrong if rank() == 1 else NONE


def ddp() -> Any:
    return pytorch("strategies").DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20))


def asynchronous(**options: Any) -> AsyncAveragingStrategy:
    return together(schedule=options.pop("schedule", EveryNSteps(8)), timeouts=LONG, **options)


# ---- DDP ----


@scenario
def ddp_skips_a_gradient_of_one_rank_on_all() -> Any:
    return fit(ddp(), Line(on_rank_1({9: NAN})), DivergenceMonitor(), n=20)


@scenario
def ddp_cuts_learning_rates_together() -> Any:
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "cut_lr"], history=HISTORY)
    return fit(ddp(), Line(on_rank_1({15: 1e3, 21: 1e3})), monitor, n=30)


@scenario
def ddp_rolls_back_together() -> Any:
    monitor = DivergenceMonitor(remedies=["log", "roll_back", "stop"])
    keeper = Keeper(monitor)
    told = fit(ddp(), Line(on_rank_1({23: NAN})), monitor, keeper)
    return told | {"rolled": keeper.rolled}


@scenario
def ddp_stops_together() -> Any:
    return fit(ddp(), Line(on_rank_1({5: NAN})), DivergenceMonitor(remedies=["stop"]))


@scenario
def ddp_notices_losses_that_part() -> Any:
    monitor = DivergenceMonitor(signals=["loss_variance"], remedies=["log"], history=HISTORY)
    return fit(ddp(), Line(on_rank_1({15: 30.0})), monitor, n=25)


# ---- replicas that drift ----


@scenario
def drifting_skips_alone() -> Any:
    """No round comes in between: what a step changes is the step's own."""
    return fit(asynchronous(schedule=EveryNSteps(1000)), Paced(on_rank_1({9: NAN})), DivergenceMonitor())


@scenario
def drifting_resets_the_replica_that_is_broken() -> Any:
    """Its parameters are not finite, long before the next round."""
    seen: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if not finite(pl_module):
                seen.setdefault("broken", time.monotonic())
                seen["at"] = pl_module.steps
            elif "broken" in seen:
                seen.setdefault("mended_s", time.monotonic() - seen["broken"])

    module = Paced(poison=20 if rank() == 1 else 0)
    told = fit(asynchronous(schedule=EveryNSteps(1000)), module, DivergenceMonitor(), Watch(), n=60)
    return told | {"mended_s": seen.get("mended_s"), "at": seen.get("at")}


@scenario
def drifting_leaves_out_a_replica_whose_loss_has_gone_off() -> Any:
    """Finite, and asked for in the end: the others' model is not the mean with it."""
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "reset"], history=HISTORY)

    class Breaks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if rank() == 1 and pl_module.steps == 20:
                with torch.no_grad():
                    pl_module.layer.weight.add_(1e4)

    return fit(asynchronous(schedule=EveryNSteps(1000)), Paced(), Breaks(), monitor, n=60)


@scenario
def drifting_rolls_back_together(folder: Path) -> Any:
    monitor = DivergenceMonitor(remedies=["log", "roll_back", "stop"])
    keeper, ready = Keeper(monitor), folder / "rank 0 has a good state"
    after: list[list[float]] = []

    class Tells(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if rank() == 0 and keeper.good is not None:
                ready.touch()

    class Recorded(AsyncAveragingStrategy):
        def start_over(self) -> None:
            after.append(values(self.module))
            super().start_over()

    module = Paced(poison=33 if rank() == 1 else 0, ready=ready)
    validated: list[int] = []
    module.validation_step = lambda batch, batch_idx: validated.append(module.steps)  # type: ignore[method-assign]
    begun = time.monotonic()
    told = fit(
        Recorded(schedule=EveryNSteps(8), timeouts=LONG), module, monitor, keeper, Tells(), n=80, val_check_interval=7
    )
    took_s = time.monotonic() - begun
    return told | {"rolled": keeper.rolled, "took_s": took_s, "after": after, "validated": len(validated)}


@scenario
def drifting_cuts_syncs_and_stops_together() -> Any:
    monitor = DivergenceMonitor(
        signals=["loss"], remedies=["sync_more", "sync", "cut_lr", "stop"], history=HISTORY, alert_threshold=1e6
    )
    wrong = on_rank_1(dict.fromkeys((10, 20, 30, 40), 1e9))
    return fit(asynchronous(), Paced(wrong), monitor, n=200) | {"rollbacks": monitor.rollbacks}


@scenario
def drifting_with_unequal_shards_decides_with_one_that_has_finished() -> Any:
    monitor = DivergenceMonitor(remedies=["log", "reset", "stop"])
    module = Paced(poison=60 if rank() == 1 else 0)
    return fit(asynchronous(), module, monitor, n=80 if rank() == 1 else 10)


@scenario
def drifting_notices_losses_that_part() -> Any:
    monitor = DivergenceMonitor(signals=["loss_variance", "replica_spread"], remedies=["log"], history=HISTORY)
    module = Paced(on_rank_1(dict.fromkeys(range(60, 90), 30.0)))
    return fit(asynchronous(schedule=EveryNSteps(2)), module, monitor, n=100)
