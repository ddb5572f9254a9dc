"""Scenarios of what users are told: metrics, the summary, and short errors."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from pathlib import Path
from typing import Any

from lightning_async import (
    AdaptivePeriod,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    AveragingMonitor,
    DiLoCo,
    EveryNSteps,
    ParameterServerStrategy,
    Synchronous,
)
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies.callbacks import Tuned
from tests.strategies.features import Gan
from tests.strategies.workers import PATIENT, Net, loader, logged, make_trainer, rank, scenario, shard, together


class Logging(Net):
    """Has metrics of its own with short names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rounds", 7.0, prog_bar=True, on_step=True)
        self.log("hidden", 128.0, on_step=True, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)


class LoggingToo(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("rounds", 3.0, on_step=False, on_epoch=True)


@scenario
def names() -> Any:
    trainer = make_trainer(together(schedule=EveryNSteps(2), overlap=False), callbacks=[LoggingToo()])
    module = Logging()
    trainer.fit(module, loader(shard((8, 8))))
    told = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"metrics": told, "callbacks": [type(c).__name__ for c in trainer.callbacks]}


@scenario
def monitors() -> Any:
    """The strategy's own leaves with the fit, also one that failed; the user's stays."""

    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    told = []
    for module, callbacks in ((Net(), []), (Broken(), []), (Net(), [AveragingMonitor()])):
        trainer = make_trainer(callbacks=callbacks)
        with contextlib.suppress(RuntimeError):
            trainer.fit(module, loader(shard((2, 2))))
        told.append([type(callback).__name__ for callback in trainer.callbacks])
    return told


def _summary(schedule: Any, **options: Any) -> Any:
    trainer = make_trainer(together(schedule=schedule, overlap=False), **options)
    with logged() as messages:
        trainer.fit(Net(), loader(shard((6, 6))))
    summary = trainer.strategy.summary
    return {
        "rows": dict(line.strip().split("  ", 1) for line in str(summary).splitlines()),
        "metrics": summary.metrics(),
        "hints": [m for m in messages if "No averaging round" in m],
        "gate_s": summary.sync_point_exchange_s,
    }


@scenario
def summaries() -> Any:
    return {
        "rounds": _summary(EveryNSteps(2)),
        "no round": _summary(EveryNSteps(32), max_epochs=2),
        "synchronous": _summary(Synchronous()),
        "trial": _summary(EveryNSteps(32), fast_dev_run=2),
    }


@scenario
def automatic() -> Any:
    """A rule that is left as it is sets itself; without overlap, so that periods do not vary."""
    trainer = make_trainer(AsyncAveragingStrategy(min_replicas=2, schedule=EveryNSteps(8), fragments=2, overlap=False))
    with logged() as messages:
        trainer.fit(Net(), loader(shard((160, 160))))
    return {
        "told": [m for m in messages if m.startswith("Set from measurements")],
        "metrics": trainer.strategy.summary.metrics(),
        "summary": str(trainer.strategy.summary),
    }


@scenario
def adversaries() -> Any:
    """A GAN under the rule that is taken for it, and under one with momentum."""
    found = {}
    for rule in ("auto", DiLoCo()):
        strategy = AsyncAveragingStrategy(rule, EveryNSteps(2), overlap=False, min_replicas=2, timeouts=PATIENT)
        trainer = make_trainer(strategy)
        with logged() as messages:
            trainer.fit(Gan(), loader(shard((8, 8))))
        found[str(rule)[:6]] = {
            "warnings": [m for m in messages if "is an outer optimizer with momentum" in m],
            "told": [m for m in messages if m.startswith("Set from measurements")],
        }
    return found


@scenario
def adaptive() -> Any:
    """Losses of the two ranks part by a quarter of what they did in the first four rounds."""

    class Parting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + rank() * (100.0 if batch_idx < 16 else 25.0)

    trainer = make_trainer(together(schedule=AdaptivePeriod(4, 40, metric="loss_variance"), overlap=False))
    trainer.fit(Parting(), loader(shard((400, 400))))
    return trainer.strategy.summary.metrics()["averaging/period_steps"]


def _words(strategy: Any) -> Any:
    trainer = make_trainer(strategy, log_every_n_steps=1)
    with logged() as messages:
        trainer.fit(Net(), loader(shard((6, 6))))
    summary = trainer.strategy.summary
    return {
        "rows": dict(line.strip().split("  ", 1) for line in str(summary).splitlines()),
        "metrics": summary.metrics(),
        "shown": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "titles": [m.splitlines()[0] for m in messages if "as rank 0 saw it" in m],
        "saved": {name: value for name, value in summary.state_dict().items() if "." in name},
    }


@scenario
def other_words() -> Any:
    """What is no averaging is not told as averaging."""
    return {
        "windows": _words(AsyncGradientStrategy(2, delay=0, min_replicas=2)),
        "until reduced": _words(AsyncGradientStrategy("until_reduced", min_replicas=2)),
        "compressed": _words(AsyncGradientStrategy(2, compression="int8", min_replicas=2)),
        "servers": _words(ParameterServerStrategy("sync", min_replicas=2)),
    }


@scenario
def search_for_a_learning_rate(folder: Path) -> Any:
    finder = pytorch("callbacks").LearningRateFinder(num_training_steps=20)
    trainer = make_trainer(together(schedule=EveryNSteps(2)), callbacks=[finder], default_root_dir=folder)
    with logged() as messages, warnings.catch_warnings(record=True) as caught:
        trainer.fit(Tuned(), loader(shard((6, 6))))
    ours = [m for m in messages if "between two sync points" in m]
    return {"warnings": ours, "summaries": sum(m.startswith("Asynchronous averaging") for m in messages),
            "caught": [str(w.message) for w in caught if "lightning_async" in w.filename]}  # fmt: skip


def _ends(error: BaseException) -> Any:
    class Ends(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank() == 1 and batch_idx == 5:
                raise error
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(together(schedule=EveryNSteps(2)))
    try:
        trainer.fit(Ends(), loader(shard((2000, 2000), 1)))
    except BaseException as raised:
        return {
            "error": f"{type(raised).__name__}: {raised}",
            "lines": sum(text.count("\n") for text in traceback.format_exception(raised)),
            "causes": [type(cause).__name__ for cause in (raised.__cause__, raised.__context__) if cause is not None],
        }


@scenario
def errors() -> Any:
    return _ends(ValueError("a bad sample"))


@scenario
def interruptions() -> Any:
    return _ends(KeyboardInterrupt())
