"""Scenarios of Lightning's own callbacks beside `ParameterServerStrategy`."""

from __future__ import annotations

from typing import Any

import torch

from lightning_async import AsyncAveragingStrategy, ParameterServerStrategy, Synchronous
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import momentum
from tests.strategies.served import BATCHES, fit
from tests.strategies.workers import Net, loader, make_trainer, scenario, shard

DECAY = 0.8
BOUND = 0.05
"""Of all parameters; most begin beyond it."""
WINDOWS = {0: 1, 1: 2}
"""Batches in a step, by the first epoch that has so many."""


@scenario
def averaged() -> Any:
    net, average = Net(optimizer=momentum), pl.callbacks.EMAWeightAveraging(decay=DECAY)
    trainer = make_trainer(ParameterServerStrategy("sync"), callbacks=[average], max_epochs=2)
    trainer.fit(net, loader(shard([BATCHES] * 2)))
    return {"values": problem.flat(net), "step": trainer.global_step}


@scenario
def averaged_with_validations() -> Any:
    """The average takes the model's place in a validation, and the weights are back afterwards."""
    net, average = Net(optimizer=momentum), pl.callbacks.EMAWeightAveraging(decay=DECAY)
    trainer = make_trainer(ParameterServerStrategy("async", overlap=True), callbacks=[average], val_check_interval=2)
    trainer.fit(net, loader(shard([BATCHES] * 2)), loader(shard((1, 1))))
    return {"step": trainer.global_step, "digest": problem.digest(net)}


def _averaged_at_the_end(strategy: Any) -> list[float]:
    net, average = Net(optimizer=momentum), pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    trainer = make_trainer(strategy, callbacks=[average], max_epochs=4)
    trainer.fit(net, loader(shard([BATCHES] * 2)))
    return problem.flat(net)


@scenario
def averaged_at_the_end() -> Any:
    every_step = _averaged_at_the_end(AsyncAveragingStrategy(schedule=Synchronous()))
    own = _averaged_at_the_end(ParameterServerStrategy("sync", update_on_server=False))
    return {"served": _averaged_at_the_end(ParameterServerStrategy("sync")), "own": own, "every_step": every_step}


@scenario
def averaged_at_the_end_with_norms() -> Any:
    """Lightning has an epoch more then, for the norms, and takes one step in it."""

    def trained(strategy: Any) -> tuple[list[float], Any]:
        network = torch.nn.Sequential
        net = Net(optimizer=momentum, network=lambda: network(problem.network(), torch.nn.BatchNorm1d(1)))
        average = pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
        make_trainer(strategy, callbacks=[average], max_epochs=4).fit(net, loader(problem.batches(0, BATCHES)))
        return problem.flat(net), strategy.summary

    every_step, _ = trained(AsyncAveragingStrategy(schedule=Synchronous()))
    served, summary = trained(ParameterServerStrategy("sync"))
    told = {"steps": summary.steps, "versions": summary.totals.rows()["versions"], "samples": summary.samples_by_rank}
    return {"served": served, "every_step": every_step, "told": told}


class Clips(pl.Callback):
    """Keeps all parameters small, as the critic of a Wasserstein GAN needs it."""

    def __init__(self, hidden: bool = False) -> None:
        self.hidden = hidden

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            with torch.no_grad():
                (parameter.data if self.hidden else parameter).clamp_(-BOUND, BOUND)


@scenario
def clipped() -> Any:
    return fit(ParameterServerStrategy("async", min_replicas=2), callbacks=[Clips()])


@scenario
def clipped_while_a_push_is_under_way() -> Any:
    return fit(ParameterServerStrategy("async", overlap=True, min_replicas=2), callbacks=[Clips()])


@scenario
def clipped_unseen() -> Any:
    return fit(ParameterServerStrategy("async", min_replicas=2), callbacks=[Clips(hidden=True)])


@scenario
def clipped_and_pushed() -> Any:
    return fit(ParameterServerStrategy("sync", update_on_server=False), callbacks=[Clips(hidden=True)])


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
