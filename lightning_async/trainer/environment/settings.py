"""Comparisons of all ranks' settings before the first round, which name each difference.

Settings decide what a message means and how large it is. If they differ, the model would be silently wrong, or the
transport would abort the process because of unequal sizes. They are therefore compared as texts, before anything that
depends on them. Every comparison raises `SettingsMismatch` on every rank, with each setting that differs and its
values.
"""

from __future__ import annotations

import importlib
import logging
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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
"""Arguments of optimizers that only select a kernel for the same computation. They may differ between devices."""
_COLLECTIVE = ("Checkpoint", "EarlyStopping", "LearningRateFinder", "StochasticWeightAveraging", "WeightAveraging")
_WHOSE = ("params", "param_names")

Settings = dict[str, str]


class TrainerSettings:
    """The settings of this rank's Trainer and strategy, as texts, so that ranks can compare them."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def check(self, world: LightningCollectives) -> None:
        """Compare the settings of all ranks. All ranks call this together, before any other exchange.

        Raises:
            SettingsMismatch: A setting differs that must be equal, or the ranks run different methods of the Trainer.
        """
        stage = self._trainer.state.fn.value
        same = self.of_fit() if stage == "fit" else self._everywhere()
        usual = self._usual() if stage == "fit" else {}
        # One exchange for everything, so that ranks with other settings cannot wait in a different one.
        told = world.gather_objects({"stage": stage, "same": same, "usual": usual})
        others = [
            rank for rank, settings in enumerate(told) if not isinstance(settings, dict) or "same" not in settings
        ]
        if others:
            raise SettingsMismatch(
                f"Rank {world.rank}: ranks {others} run a version of lightning_async that does not compare settings; "
                f"this is version {version()}. Install the same version on every host."
            )
        stages = [settings["stage"] for settings in told]
        if len(set(stages)) > 1:
            calls = ", ".join(f"rank {rank} calls `trainer.{stage}`" for rank, stage in enumerate(stages))
            raise SettingsMismatch(f"Rank {world.rank}: {calls}. All ranks must call the same, in the same order.")
        _refuse(world, [settings["same"] for settings in told])
        _warn(world, [settings["usual"] for settings in told])

    def of_fit(self) -> Settings:
        """Return the settings that must be equal on all ranks in a fit, as texts."""
        trainer = self._trainer
        same = self._everywhere() | self._texts(trainer.strategy.settings(), _PRECISION)
        if callbacks_of(trainer, "GradientAccumulationScheduler") or any(
            hasattr(each, "accumulation_steps") for each in trainer.callbacks
        ):
            # Such callbacks change the value during training, so a rank that comes back may see another one.
            same.pop("accumulate_grad_batches")
        return same

    def _everywhere(self) -> Settings:
        """Return the settings that must be equal on all ranks in a fit and also in evaluation.

        An example is the list of callbacks that call collectives: if it differed, these collectives would hang.
        """
        kinds = tuple(getattr(pytorch("callbacks"), kind, ()) for kind in _COLLECTIVE)
        together = sorted(
            getattr(callback, "compared", type(callback).__name__)
            for callback in self._trainer.callbacks
            if isinstance(callback, kinds) or getattr(callback, "of_all_ranks", False)
        )
        values: dict[str, object] = {
            "version of lightning_async": version(),
            "version of torch": ".".join(torch.__version__.split(".")[:2]),
            "namespace of Lightning": namespace,
            "callbacks of all ranks": together,
        }
        return self._texts(values, ())

    def _usual(self) -> Settings:
        """Return the settings that are usually the same on all ranks, but need not be.

        If they differ, rank 0 logs a warning.
        """
        trainer = self._trainer
        values: dict[str, object] = {
            "version of Lightning": ".".join(pl.__version__.split(".")[:2]),
            "callbacks": sorted(type(callback).__name__ for callback in trainer.callbacks),
            "val_check_interval": validation_interval(trainer),
            **trainer.strategy.usual_settings(),
        }
        return self._texts(values, _LIMITS)

    def _texts(self, values: dict[str, object], arguments: tuple[str, ...]) -> Settings:
        values = values | {name: getattr(self._trainer, name) for name in arguments}
        return {name: _text(value) for name, value in values.items()}


def check_joining(theirs: Settings, mine: Settings) -> None:
    """Raise SettingsMismatch, on the joining rank only, if its settings differ from those of the live ranks."""
    if different := _differences([theirs, mine]):
        raise SettingsMismatch(
            f"This rank joins a running job, and was started with other settings: {different} (rank 0: the job; "
            "rank 1: this rank). Start it with the same versions and arguments."
        )


def check_equal(world: LightningCollectives, settings: Settings) -> None:
    """Raise SettingsMismatch on all ranks if ``settings`` differ between ranks. All ranks call this together.

    These settings are known only after the model is set up, and so are not compared with the other settings.
    """
    _refuse(world, world.gather_objects(settings))


_NEWER = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
"""Arguments that torch's optimizers have gained. Torch adds them to the groups of older checkpoints."""


def check_optimizers(
    world: LightningCollectives,
    module: Any,
    optimizers: Sequence[Optimizer],
    usual: bool = False,
    settled: Mapping[str, object] | None = None,
) -> None:
    """Raise SettingsMismatch if optimizers or schedulers differ between replicas, whose models would diverge silently.

    All ranks call this together.

    Args:
        world: Collectives over all ranks.
        module: The LightningModule.
        optimizers: Optimizers of this rank.
        usual: Whether optimizers and schedulers need not be the same. Then only warn of a difference, unless it is in
            the number of optimizers.
        settled: Settings that follow from the module and its optimizers, and must be equal on all ranks. Default: none.
    """
    kinds = []
    for each in optimizers:
        defaults = _plain(each.defaults)
        sizes = [len(group["params"]) for group in each.param_groups]
        kinds.append(f"{type(each).__name__}({_arguments(defaults)}) of {sizes}")
        groups = [_plain(group) for group in each.param_groups]
        others = [_arguments({n: v for n, v in group.items() if v != defaults.get(n)}) for group in groups]
        # A group may have a learning rate of its own, or the one with which a scheduler begins.
        if any(others):
            kinds[-1] += f" with {others}"
    schedulers = [
        f"{type(each.scheduler).__name__} by {each.frequency} {each.interval}"
        for each in module.trainer.lr_scheduler_configs
    ]
    number = {"number of optimizers": len(optimizers), **(settled or {})}
    values = {
        "automatic_optimization": module.automatic_optimization,
        "optimizers": "; ".join(kinds),
        "schedulers": schedulers,
    }
    told = world.gather_objects({name: _text(value) for name, value in {**values, **number}.items()})
    # `rule="auto"` follows from the number: replicas with different rules would be no replicas.
    _refuse(world, [{name: each.pop(name) for name in number} for each in told])
    _warn(world, told) if usual else _refuse(world, told)


def check_saved(optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if a checkpoint's states lack entries of these optimizers, as after a change of their class.

    torch would fail on a missing entry later, with an error that does not name the cause.
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


def text_of_code(function: Callable[..., Any]) -> str:
    """Return a function's name with a checksum of its code, without the values from outside that it uses.

    It is for functions whose results may differ between ranks, such as the weight of a rank's batch, which may depend
    on the rank. The settings of other functions, such as an optimizer's learning rate, must be equal: see `_text`.
    """
    codes = "".join(_codes(function, set(), values=False))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} (code {zlib.crc32(codes.encode()):08x})"


def _text(value: object) -> str:
    """Return the value as text, without memory addresses, which differ between ranks.

    If the value is a function, or contains one, the text has a checksum of the function's code.
    """
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", value if isinstance(value, str) else repr(value))
    codes = "".join(_codes(value, set()))
    return f"{text} (code {zlib.crc32(codes.encode()):08x})" if codes else text


def _codes(value: Any, seen: set[int], values: bool = True) -> Iterator[str]:
    """Yield a text of the code of each function in a value; with ``values``, also the plain values that it uses."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, types.CodeType):
        constants = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in value.co_consts]
        inner = [constant for constant in constants if isinstance(constant, types.CodeType)]
        yield repr((value.co_code, value.co_names, [constant for constant in constants if constant not in inner]))
    elif isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]  # an empty one has no contents
        taken = [*(value.__defaults__ or ()), *(cell.cell_contents for cell in cells)]
        inner = [value.__code__, *(each for each in taken if isinstance(each, types.FunctionType | partial))]
        if values:
            yield repr([each for each in taken if isinstance(each, str | bytes | int | float | None)])
    elif isinstance(value, types.MethodType):
        inner = (value.__func__,)
    elif isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif not isinstance(value, str | bytes | int | float | None | type | torch.Tensor | torch.nn.Module):
        inner = (type(value).__call__ if callable(value) else None, *getattr(value, "__dict__", {}).values())
    for each in inner:
        yield from _codes(each, seen, values)


def _plain(values: Mapping[str, object]) -> dict[str, str]:
    told = {name: value for name, value in values.items() if name not in (*_HOW, *_WHOSE)}
    return {name: repr(v.tolist() if isinstance(v, torch.Tensor) else v) for name, v in told.items()}


def _arguments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _differences(told: list[Settings]) -> str:
    """Return the name of each setting that differs, with its values and their ranks; "" if none differs."""
    found = []
    for name in dict.fromkeys(name for settings in told for name in settings):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(told):
            ranks.setdefault(settings.get(name, "unknown"), []).append(rank)
        if len(ranks) > 1:
            values = (
                f"{value} on {'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}"
                for value, who in ranks.items()
            )
            found.append(f"`{name}` is {', '.join(values)}")
    return "; ".join(found)


def version() -> str:
    return importlib.import_module(__name__.partition(".")[0]).__version__
