"""Scenarios of Lightning's own callbacks beside `ParameterServerStrategy`."""

from __future__ import annotations

from typing import Any

from lightning_async import ParameterServerStrategy
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.served import BATCHES, fit, momentum
from tests.strategies.workers import Net, loader, make_trainer, scenario, shard

DECAY = 0.8
WINDOWS = {0: 1, 1: 2}
"""Batches in a step, by the first epoch that has so many."""


@scenario
def averaged() -> Any:
    net, average = Net(optimizer=momentum), pl.callbacks.EMAWeightAveraging(decay=DECAY)
    trainer = make_trainer(ParameterServerStrategy("sync"), callbacks=[average], max_epochs=2)
    trainer.fit(net, loader(shard([BATCHES] * 2)))
    return {"values": problem.flat(net), "step": trainer.global_step}


@scenario
def accumulated() -> Any:
    windows = pl.callbacks.GradientAccumulationScheduler(WINDOWS)
    return fit(ParameterServerStrategy("sync"), callbacks=[windows])


@scenario
def stopped_early() -> Any:
    """Each worker's loss is no reason to stop before all have validated."""
    stops = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    validate = loader(problem.batches(5, 3))
    return fit(ParameterServerStrategy("async"), callbacks=[stops], max_epochs=6, validate=validate)


@scenario
def sizes() -> Any:
    return fit(ParameterServerStrategy(), callbacks=[pl.callbacks.BatchSizeFinder()])
