"""Scenarios that must end with an error on every rank, and ways to name the strategy."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_async import AsyncAveragingStrategy, DiLoCo, EveryNSteps, TorchTransport
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.workers import Net, fit, loader, make_trainer, rank, scenario, shard


def _fit(module: Any = None, **options: Any) -> Any:
    return fit(None, loader(shard((2, 2))), module, **options)


@scenario
def sync_batchnorm_argument() -> Any:
    return _fit(Net(network=problem.normalised), sync_batchnorm=True)


class Bare(Net):
    """All is in `training_step`."""

    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return problem.loss_of(self.net, batch)


@scenario
def recomputed_without_forward() -> Any:
    module = Bare(network=problem.normalised)
    return fit(AsyncAveragingStrategy(buffers="recompute"), loader(shard((2, 2))), module)


@scenario
def nothing_to_recompute() -> Any:
    """There are no statistics, and nothing is passed on."""
    return fit(AsyncAveragingStrategy(buffers="recompute"), loader(shard((2, 2))), Bare())


@scenario
def more_survivors_than_ranks() -> Any:
    return fit(AsyncAveragingStrategy(min_replicas=3), loader(shard((2, 2))))


@scenario
def more_ranks_than_at_most() -> Any:
    return fit(AsyncAveragingStrategy(max_replicas=1), loader(shard((2, 2))))


@scenario
def sync_batchnorm_module() -> Any:
    return _fit(Net(network=lambda: nn.Sequential(nn.SyncBatchNorm(problem.FEATURES), problem.network())))


@scenario
def metric_on_step() -> Any:
    module = Net()
    module.metric = MeanMetric(dist_sync_on_step=True)
    return _fit(module)


@scenario
def pruning() -> Any:
    return _fit(callbacks=[pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)])


@scenario
def batch_size_finder() -> Any:
    return _fit(callbacks=[pl.callbacks.BatchSizeFinder()])


@scenario
def lazy() -> Any:
    return _fit(Net(network=lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))))


@scenario
def different_shapes() -> Any:
    return _fit(Net(network=lambda: problem.network(8 + rank())))


@scenario
def different_dtypes() -> Any:
    return _fit(Net(network=lambda: problem.network().to(torch.bfloat16 if rank() else torch.float32)))


@scenario
def different_order() -> Any:
    module = Net()
    for name in ("b", "a") if rank() else ("a", "b"):
        setattr(module, name, nn.Linear(2, 3))
    return _fit(module)


@scenario
def different_numbers() -> Any:
    module = Net()
    if rank():
        module.extra = nn.Parameter(torch.zeros(2))
    return _fit(module)


@scenario
def different_trainability() -> Any:
    module = Net()
    next(module.net.parameters()).requires_grad_(rank() == 0)
    return _fit(module)


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  use_distributed_sampler: false
  strategy:
    class_path: lightning_async.AsyncAveragingStrategy
    init_args:
      rule:
        class_path: lightning_async.DiLoCo
        init_args:
          outer_lr: 0.5
          outer_momentum: 0.8
      schedule:
        class_path: lightning_async.Warmup
        init_args:
          schedule:
            class_path: lightning_async.EveryNSteps
            init_args:
              n: 3
          steps: 2
      overlap: false
      buffers: keep
      transport:
        class_path: lightning_async.TorchTransport
        init_args: {backend: gloo}
      timeouts: {dead_after: "0:00:12", attempts: 3}
"""


class FromYaml(Net):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return loader(shard((8, 8)))


def _cli(folder: Path, config: str, *arguments: str) -> Any:
    file = folder / f"{rank()}.yaml"
    file.write_text(config)
    before, sys.argv = sys.argv, ["train.py"]
    try:
        made = pytorch("cli").LightningCLI(
            FromYaml,
            args=["fit", "--config", str(file), *arguments],
            save_config_callback=None,
            seed_everything_default=False,
        )
    finally:
        sys.argv = before
    strategy = made.trainer.strategy
    assert isinstance(strategy, AsyncAveragingStrategy)
    return {
        "rule": repr(strategy.rule),
        "is_diloco": isinstance(strategy.rule, DiLoCo),
        "schedule": repr(strategy.schedule),
        "synchronous_steps": strategy.summary.synchronous_steps,
        "rounds": strategy.summary.rounds,
        "timeouts": [strategy.config.timeouts.dead_after.total_seconds(), strategy.config.timeouts.attempts],
        "transport": repr(strategy.transport),
        "digest": problem.digest(made.model),
    }


@scenario
def cli(folder: Path) -> Any:
    return _cli(folder, CONFIG)


@scenario
def cli_with_short_names(folder: Path) -> Any:
    return _cli(folder, CONFIG.replace("lightning_async.", ""))


@scenario
def cli_with_arguments(folder: Path) -> Any:
    """A rule by its name alone, and another value on the command line."""
    config = CONFIG[: CONFIG.index("        class_path: lightning_async.DiLoCo")].rstrip() + " DiLoCo\n"
    config += CONFIG[CONFIG.index("      schedule:") :].replace("lightning_async.", "")
    values = {"rule.outer_lr": "0.5", "rule.outer_momentum": "0.8", "timeouts.dead_after": "0:00:20"}
    return _cli(folder, config, *(f"--trainer.strategy.{name}={value}" for name, value in values.items()))


@scenario
def cli_with_wrong_values(folder: Path) -> Any:
    told = {}
    for right, wrong in (("outer_lr: 0.5", "outer_lr: -1.0"), ("n: 3", "n: 0"), ("buffers: keep", "buffers: some")):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
                _cli(folder, CONFIG.replace("lightning_async.", "").replace(right, wrong))
        except ValueError as error:
            said.write(str(error))
        told[wrong] = said.getvalue()
    return told


@scenario
def a_shared_transport() -> Any:
    """Two strategies, one transport: it holds nothing of either's run."""
    transport = TorchTransport(backend="gloo")
    # The default schedule has a round earlier on a rank that a busy machine slows down.
    settings = {"rule": DiLoCo(), "schedule": EveryNSteps(2), "overlap": False}
    strategies = [AsyncAveragingStrategy(transport=transport, **settings) for _ in range(2)]
    modules = [Net() for _ in strategies]
    for strategy, module in zip(strategies, modules, strict=True):
        fit(strategy, loader(shard((4, 4))), module)
    return {
        "one": strategies[0].transport is strategies[1].transport,
        "alike": problem.digest(modules[0]) == problem.digest(modules[1]),
    }


@scenario
def a_registered_variant() -> Any:
    """Settings under a name of the user's: two trainers take it at once, and one has objects of its own."""
    registry = pytorch("strategies").StrategyRegistry
    settings = {"overlap": False, "compression": "int8", "min_replicas": 2}
    for _ in range(2):  # as where a notebook's cell runs again
        registry.register(
            "averaging_int8", AsyncAveragingStrategy, override=True, rule=DiLoCo(), schedule=EveryNSteps(2), **settings
        )
    strategies = ["averaging_int8", "averaging_int8", AsyncAveragingStrategy(DiLoCo(), EveryNSteps(2), **settings)]
    trainers = [make_trainer(strategy) for strategy in strategies]
    told = []
    for trainer in trainers:
        module = Net()
        trainer.fit(module, loader(shard((4, 4))))
        told.append({"digest": problem.digest(module), "rounds": trainer.strategy.summary.rounds})
    rules = [trainer.strategy.rule for trainer in trainers]
    return {"told": told, "shared": [rule is rules[0] for rule in rules], "rule": repr(rules[1])}


@scenario
def after_all_these_errors() -> Any:
    """The processes are still able to train."""
    return fit("async_averaging", loader(shard((4, 4))))
