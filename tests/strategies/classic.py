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
