"""Ranks that were started with different settings are refused before the first round, by name and with the values.

Settings decide what a message means and how large it is. Where they differ the model comes out silently wrong,
or the transport aborts the process because of unequal sizes. So they are compared by text, ahead of all that depends
on them.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import SettingsMismatch
from lightning_async.trainer.namespace import callbacks_of, pl, pytorch, validation_interval
from lightning_async.trainer.namespace import name as namespace

log = logging.getLogger(__name__)


_PRECISION = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_LIMITS = (
    "max_epochs", "max_steps", "min_epochs", "min_steps", "limit_train_batches", "limit_val_batches", "overfit_batches",
    "check_val_every_n_epoch", "reload_dataloaders_every_n_epochs", "num_sanity_val_steps",
    "enable_validation",
)  # fmt: skip

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of optimizers that decide by which kernels the same numbers are made: devices may differ."""
_COLLECTIVE = ("Checkpoint", "EarlyStopping", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")
_WHOSE = ("params", "param_names")

Settings = dict[str, str]


class Compared(Protocol):
    """A strategy that says which of its settings the ranks compare."""

    def settings(self) -> dict[str, object]:
        """What must be equal on all ranks in a fit."""
        ...

    def usual_settings(self) -> dict[str, object]:
        """What need not be equal, but commonly is."""
        ...


def check_settings(strategy: Compared, trainer: Any, world: LightningCollectives) -> None:
    """Compare what the ranks were started with; all call this together, before anything else of a run.

    Raises:
        SettingsMismatch: on every rank; names each setting that differs, and its values.
    """
    stage = trainer.state.fn.value
    same = _everywhere(trainer)
    usual = {}
    if stage == "fit":
        same = settings_of(strategy, trainer)
        usual = _usual(strategy, trainer)
    told = world.gather_objects({"stage": stage, "same": same, "usual": usual})
    strangers = [rank for rank, settings in enumerate(told) if not isinstance(settings, dict) or "same" not in settings]
    if strangers:
        raise SettingsMismatch(
            f"Rank {world.rank}: ranks {strangers} run a version of lightning_async that does not compare settings; "
            f"this is version {version()}. Install the same version on every host."
        )
    stages = [settings["stage"] for settings in told]
    if len(set(stages)) > 1:
        calls = ", ".join(f"rank {rank} calls `trainer.{stage}`" for rank, stage in enumerate(stages))
        raise SettingsMismatch(f"Rank {world.rank}: {calls}. All ranks must call the same, in the same order.")
    _refuse(world, [settings["same"] for settings in told])
    _warn(world, [settings["usual"] for settings in told])


def settings_of(strategy: Compared, trainer: Any) -> Settings:
    """What must be equal on all ranks in a fit, as texts."""
    same = _everywhere(trainer) | _texts(strategy.settings(), trainer, _PRECISION)
    if callbacks_of(trainer, "GradientAccumulationScheduler") or any(
        hasattr(each, "accumulation_steps") for each in trainer.callbacks
    ):
        same.pop("accumulate_grad_batches")  # which such callbacks change while others train
    return same


def check_joining(theirs: Settings, mine: Settings) -> None:
    """Compare what a joining rank was started with to what those have who train.

    Raises:
        SettingsMismatch: names each setting that differs, and its values.
    """
    if different := _differences([theirs, mine]):
        raise SettingsMismatch(
            f"This rank comes to a training of others, and was started with other settings: {different} (rank 0: they; "
            "rank 1: this one). Start it with the same versions and arguments."
        )


def check_checkpoint(world: LightningCollectives, checkpoint: str) -> None:
    """Compare the checkpoints that the ranks go on from, as soon as they are read.

    Raises:
        SettingsMismatch: on every rank; says what each rank has read.
    """
    check_equal(world, {"ckpt_path": checkpoint})


def check_equal(world: LightningCollectives, settings: Settings) -> None:
    """Compare what is known only once the model is there.

    Raises:
        SettingsMismatch: on every rank; names each setting that differs, and its values.
    """
    _refuse(world, world.gather_objects(settings))


_NEWER = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
"""Arguments that torch's optimizers have come to have, and add to the groups of older checkpoints."""


def check_optimizers(
    world: LightningCollectives, module: Any, optimizers: Sequence[Optimizer], usual: bool = False
) -> None:
    """Compare them: where each rank steps with the gradients of all, replicas would else part silently.

    Args:
        usual: they need not be equal, but commonly are: a warning says where they are not.

    Raises:
        SettingsMismatch: on every rank; names each setting that differs, and its values.
    """
    kinds = []
    for each in optimizers:
        defaults = _plain(each.defaults)
        sizes = [len(group["params"]) for group in each.param_groups]
        kinds.append(f"{type(each).__name__}({_arguments(defaults)}) of {sizes}")
        groups = [_plain(group) for group in each.param_groups]
        others = [_arguments({n: v for n, v in group.items() if v != defaults.get(n)}) for group in groups]
        if any(others):  # a rate of its own, say, and that which a scheduler begins with
            kinds[-1] += f" with {others}"
    schedulers = [
        f"{type(each.scheduler).__name__} by {each.frequency} {each.interval}"
        for each in module.trainer.lr_scheduler_configs
    ]
    values = {
        "automatic_optimization": module.automatic_optimization,
        "optimizers": "; ".join(kinds),
        "schedulers": schedulers,
    }
    told = world.gather_objects({name: _text(value) for name, value in values.items()})
    _warn(world, told) if usual else _refuse(world, told)


def check_saved(optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Refuse a checkpoint of other optimizers than training has now, before torch fails on what they lack.

    Raises:
        ValueError: names the optimizer, what its groups need, and what the saved ones have.
    """
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=False)):
        for saved in state["param_groups"]:
            if lacks := sorted(set(optimizer.defaults) - set(saved) - _NEWER):
                own = sorted(set(saved) - set(optimizer.defaults) - {"params", "initial_lr"})
                raise ValueError(
                    f"`configure_optimizers` returns {type(optimizer).__name__} as optimizer {index}, and the "
                    f"checkpoint holds the state of another one: its groups lack {', '.join(lacks)}, and have "
                    f"{', '.join(own)}. Return the optimizer that the checkpoint was saved with, or begin from its "
                    "weights only."
                )


def _warn(world: LightningCollectives, told: list[Settings]) -> None:
    if world.rank == 0 and (different := _differences(told)):
        log.warning("The ranks were started with different settings: %s. Is that meant?", different)


def _refuse(world: LightningCollectives, told: list[Settings]) -> None:
    if different := _differences(told):
        raise SettingsMismatch(
            f"Rank {world.rank}: the ranks were started with different settings: {different}. Replicas that become one "
            "model must agree on these: start every rank with the same versions and arguments, and to go on, with the "
            "same checkpoint."
        )


def _everywhere(trainer: Any) -> Settings:
    """What must be equal in evaluation too: callbacks that work on all ranks together would wait for one another."""
    kinds = tuple(getattr(pytorch("callbacks"), kind, ()) for kind in _COLLECTIVE)
    together = sorted(
        getattr(callback, "compared", type(callback).__name__)
        for callback in trainer.callbacks
        if isinstance(callback, kinds) or getattr(callback, "of_all_ranks", False)
    )
    values = {
        "version of lightning_async": version(),
        "version of torch": ".".join(torch.__version__.split(".")[:2]),
        "namespace of Lightning": namespace,
        "callbacks of all ranks": together,
    }
    return {name: _text(value) for name, value in values.items()}


def _usual(strategy: Compared, trainer: Any) -> Settings:
    """What need not be equal, but commonly is."""
    values: dict[str, object] = {
        "version of Lightning": ".".join(pl.__version__.split(".")[:2]),
        "callbacks": sorted(type(callback).__name__ for callback in trainer.callbacks),
        "val_check_interval": validation_interval(trainer),
        **strategy.usual_settings(),
    }
    return _texts(values, trainer, _LIMITS)


def _texts(values: dict[str, object], trainer: Any, arguments: tuple[str, ...]) -> Settings:
    """These values and those arguments of the Trainer, as texts."""
    values = values | {name: getattr(trainer, name) for name in arguments}
    return {name: _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    """The value as it was written; without the address in memory of an object that has no text of its own."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", value if isinstance(value, str) else repr(value))


def _plain(values: Mapping[str, object]) -> dict[str, str]:
    told = {name: value for name, value in values.items() if name not in (*_HOW, *_WHOSE)}
    return {name: repr(v.tolist() if isinstance(v, torch.Tensor) else v) for name, v in told.items()}


def _arguments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _differences(told: list[Settings]) -> str:
    """Each setting that is not equal on all ranks, with the ranks that have each value; "" if all are."""
    found = []
    for name in dict.fromkeys(name for settings in told for name in settings):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(told):
            ranks.setdefault(settings.get(name, "unknown"), []).append(rank)
        if len(ranks) > 1:
            found.append(f"`{name}` is " + ", ".join(f"{value} on {_those(who)}" for value, who in ranks.items()))
    return "; ".join(found)


def _those(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def version() -> str:
    """Of this package."""
    return importlib.import_module(__name__.partition(".")[0]).__version__
