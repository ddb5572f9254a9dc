"""The older namespace, in processes of its own. Nothing is imported before a rank asks for it."""

from __future__ import annotations

from typing import Any


def train() -> dict[str, Any]:
    """A fit by `pytorch_lightning` alone."""
    import sys

    import pytorch_lightning as pl

    from lightning_async.trainer import namespace
    from tests.strategies.workers import Net, Recorder, loader, make_trainer, report, shard

    module, recorder = Net(), Recorder()
    assert isinstance(module, pl.LightningModule)
    trainer = make_trainer("async_averaging", callbacks=[recorder], max_epochs=2)
    assert isinstance(trainer, pl.Trainer)
    trainer.fit(module, loader(shard((5, 9))), loader(shard((2, 2))))
    return report(trainer, module, recorder) | {
        "namespace": namespace.name,
        "other": "lightning.pytorch" in sys.modules,
    }


def both(first: str, second: str) -> dict[str, Any]:
    """Import both namespaces, then the package; what the Trainers of both say."""
    import importlib

    trainers = [importlib.import_module(each).Trainer for each in (first, second)]
    import lightning_async
    from lightning_async.trainer import namespace

    def say(trainer: Any, **options: Any) -> str:
        try:
            trainer(accelerator="cpu", devices=1, logger=False, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    given = ["async_averaging", "async_gradients_fork", "horovod", lightning_async.ParameterServerStrategy()]
    return {
        "namespace": namespace.name,
        "first": [say(trainers[0], strategy=each) for each in given[:2]],
        "second": [say(trainers[1], strategy=each) for each in given],
    }
