"""Scenarios of ranks that were started with different settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lightning_async
from lightning_async import (
    DeltaMean,
    DiLoCo,
    DivergenceMonitor,
    EveryNSteps,
    EverySeconds,
    PeerMemory,
    Synchronous,
    Warmup,
)
from lightning_async.errors import AsyncTrainingError
from lightning_async.trainer.environment.settings import TrainerSettings
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.workers import Net, fit, loader, logged, make_trainer, rank, scenario, shard, together

STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rule": ({"rule": DeltaMean()}, {"rule": DiLoCo()}),
    "outer_lr": ({"rule": DiLoCo(outer_lr=0.7)}, {"rule": DiLoCo(outer_lr=0.1)}),
    "schedule": ({"schedule": EveryNSteps(4)}, {"schedule": EverySeconds(0.5)}),
    "synchronous": ({"schedule": EveryNSteps(4)}, {"schedule": Synchronous()}),
    "warm-up": ({"schedule": EveryNSteps(4)}, {"schedule": Warmup(EveryNSteps(4), steps=3)}),
    "overlap": ({"overlap": True, "fragments": 1}, {"overlap": False}),
    "weighting": ({"weighting": "samples"}, {"weighting": "equal"}),
    "buffers": ({"buffers": "average"}, {"buffers": "recompute"}),
    "optimizer_state": ({"optimizer_state": "keep"}, {"optimizer_state": "average"}),
    "lr_clock": ({"lr_clock": "local"}, {"lr_clock": "global"}),
    "compression": (
        {"rule": DiLoCo(), "compression": "int8"},
        {"rule": DiLoCo(), "compression": "fp8"},
    ),
    "one compresses": ({"compression": "none"}, {"compression": "bf16"}),
    "part_mb": ({"part_mb": 16.0}, {"part_mb": 0.25}),
}
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "precision": ({}, {"precision": "bf16-mixed"}),
    "accumulate_grad_batches": ({}, {"accumulate_grad_batches": 2}),
    "gradient_clip_val": ({"gradient_clip_val": 1.0}, {"gradient_clip_val": 2.0}),
}


class Evaluated(Net):
    """A network for every stage."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass

    predict_step = test_step


WIDE = 60_000
"""Parameters enough that half of them are more than a quarter of a MiB."""


def _refused(strategy: dict[str, Any], **options: Any) -> str:
    try:
        fit(
            together(**strategy),
            loader(shard((6, 6))),
            Net(network=lambda: problem.network(WIDE)),
            **options,
        )
    except AsyncTrainingError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@scenario
def settings() -> Any:
    told = {name: _refused(values[rank()]) for name, values in STRATEGIES.items()}
    return told | {name: _refused({}, **values[rank()]) for name, values in TRAINERS.items()}


class Manual(Net):
    """Takes its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Scheduled(Net):
    """A network with a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Several(Manual):
    """Has two optimizers on rank 0 and one on rank 1."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05) for _ in range(2 - rank())]


class Pair(Manual):
    """Has two optimizers."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05) for _ in range(2)]


@scenario
def optimizers() -> Any:
    """Of windows of gradients, and of synchronous steps: what would make replicas part that step with the same ones."""
    modules = {
        "kind": lambda: Net(optimizer=lambda ps: torch.optim.Adam(ps, lr=0.05)),
        "rate": lambda: Net(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.25)),
        "groups": lambda: Net(optimizer=lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.05)),
        "own rate": lambda: Net(optimizer=lambda ps: torch.optim.SGD([{"params": [*ps], "lr": 0.25}], lr=0.05)),
        "scheduler": Scheduled,
        "manual": Manual,
    }
    told, in_step = {}, lightning_async.Synchronous()
    for name, other in [*modules.items(), ("synchronous", modules["rate"])]:
        strategy = lightning_async.AsyncGradientStrategy(2, min_replicas=2)
        if name == "synchronous":
            strategy = lightning_async.AsyncAveragingStrategy(
                rule=lightning_async.DeltaMean(), schedule=in_step, min_replicas=2
            )
        told[name] = _error(make_trainer(strategy).fit, other() if rank() else Net(), loader(shard((4, 4))))
    averaging = lightning_async.AsyncAveragingStrategy(min_replicas=2)  # whose rule follows from it
    told["number"] = _error(make_trainer(averaging).fit, Several(), loader(shard((4, 4))))
    rule = lightning_async.AdaptiveDiLoCo() if rank() else "auto"
    settled = lightning_async.AsyncAveragingStrategy(rule, min_replicas=2)
    told["settled"] = _error(make_trainer(settled).fit, Pair(), loader(shard((4, 4))))
    fused = Net(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, fused=rank() == 0))
    return told | {
        "kernels": _error(make_trainer(lightning_async.AsyncGradientStrategy(2)).fit, fused, loader(shard((4, 4))))
    }


@scenario
def versions() -> Any:
    """Another version of this package, and of torch, on rank 1; only torch's major and minor numbers count."""
    told = {}
    for name, module, others in (
        ("lightning_async", lightning_async, "99.0.0"),
        ("torch", torch, "1.0.0"),
        ("patch of torch", torch, ".".join(torch.__version__.split(".")[:2]) + ".99"),
    ):
        with mock.patch.object(module, "__version__", others if rank() else module.__version__):
            told[name] = _refused({})
    return told


@scenario
def a_version_without_this_check() -> Any:
    """Rank 1 begins a fit as earlier versions did: with the lines that describe its model."""

    def describe(settings: Any, world: Any) -> None:
        world.gather_objects(["net.0.weight: 8, 6"])

    with mock.patch.object(TrainerSettings, "check", describe) if rank() else nullcontext():
        return _refused({})


def _error(call: Callable[..., Any], *args: Any) -> str:
    try:
        call(*args)
    except AsyncTrainingError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@scenario
def stages() -> Any:
    """What each rank calls; the errors that say so are cut to the rank that told them."""
    told = {}
    for calls in (("fit", "validate"), ("validate", "fit"), ("test", "predict"), ("validate", "validate")):
        module, trainer = Evaluated(), make_trainer()
        said = _error(getattr(trainer, calls[rank()]), module, loader(shard((2, 2))))
        told[", ".join(calls)] = said.removeprefix("SettingsMismatch: ").removesuffix(
            f": rank 0 calls `trainer.{calls[0]}`, rank 1 calls `trainer.{calls[1]}`. All ranks must call the same, in "
            "the same order."
        )
    return told


@scenario
def callbacks_of_all_ranks(folder: Path) -> Any:
    told = {}
    for stage in ("fit", "validate"):
        callbacks: list[Any] = [pl.callbacks.EarlyStopping("val_loss")]
        if rank() == 0:
            callbacks += [pl.callbacks.ModelCheckpoint(dirpath=folder), PeerMemory(), DivergenceMonitor()]
        trainer = make_trainer(callbacks=callbacks, enable_checkpointing=rank() == 0)
        told[stage] = _error(getattr(trainer, stage), Evaluated(), loader(shard((2, 2))))
    return told


@scenario
def validation_on_one_rank() -> Any:
    """It may fail, where it works on all ranks together; what differs was told before."""
    with logged() as messages:
        _error(make_trainer().fit, Net(), loader(shard((2, 2))), loader(shard((1, 1))) if rank() == 0 else None)
    return [m for m in messages if "different settings" in m]


@scenario
def rules_without_a_text_of_their_own() -> Any:
    """Objects that say no more of themselves than their address are equal if their kind is."""

    class Own:
        def next(self, clock: Any) -> Any:
            return EveryNSteps(2).next(clock)

    elsewhere = [Own() for _ in range(1 + rank())]
    return fit(together(schedule=elsewhere[-1]), loader(shard((6, 6))))


@scenario
def usual_settings() -> Any:
    """What may differ: it trains, and rank 0 says what does."""
    options: tuple[dict[str, Any], ...] = ({}, {"limit_train_batches": 3, "callbacks": [pl.callbacks.Timer()]})
    with logged() as messages:
        module = Net(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.25)) if rank() else Net()
        told = fit(None, loader(shard((6, 6))), module, **options[rank()])
    return told | {"warnings": [m for m in messages if "different settings" in m]}


@scenario
def checkpoints(folder: Path) -> Any:
    """Rank 1 goes on from none, from an earlier one, or from one of another run that is as far; then all from one."""
    for seed in range(2):
        checkpoint = pl.callbacks.ModelCheckpoint(dirpath=folder / str(seed), filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(
            together(DiLoCo(), EveryNSteps(2)), callbacks=[checkpoint], max_epochs=2,
            enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(Net(), loader(problem.batches(rank(), 4, offset=10 * seed)))
    mine, told = folder / "0" / "epoch=1.ckpt", {}
    for name, theirs in (
        ("none", None),
        ("earlier", folder / "0" / "epoch=0.ckpt"),
        ("another run", folder / "1" / "epoch=1.ckpt"),
        ("same", mine),
    ):
        trainer = make_trainer(together(DiLoCo(), EveryNSteps(2)), max_epochs=3)
        try:
            trainer.fit(Net(), loader(shard((4, 4))), ckpt_path=theirs if rank() else mine)
            told[name] = "trained"
        except AsyncTrainingError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told
