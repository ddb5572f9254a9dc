"""Settings as texts: ranks that were started with different arguments have different texts."""

from __future__ import annotations

import inspect
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import lightning_async
from lightning_async import algorithms
from lightning_async.algorithms import compression, schedules
from lightning_async.engine.timeouts import Timeouts
from lightning_async.trainer.environment.settings import _text, text_of_code

AVERAGING = lightning_async.AsyncAveragingStrategy
GRADIENTS = lightning_async.AsyncGradientStrategy
SERVERS = lightning_async.ParameterServerStrategy
OPTIONS = lightning_async.ServerOptions
DILOCO = algorithms.DiLoCo


def sgd(lr: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr)


COMMON: dict[str, tuple[Any, Any]] = {
    "buffers": ("average", {"*": "average"}), "min_replicas": (1, 2), "max_replicas": (3, 4),
    "timeouts": (Timeouts(), Timeouts(replicas=timedelta(seconds=5))), "transport": ("torch", "horovod"),
}  # fmt: skip
ARGUMENTS: dict[Any, dict[str, tuple[Any, Any]]] = {
    AVERAGING: {
        **COMMON, "rule": (DILOCO(), algorithms.DeltaMean()), "overlap": (True, False), "part_mb": (16.0, 1.0),
        "schedule": (schedules.EveryNSteps(2), schedules.EveryNSteps(3)), "fragments": (1, 2),
        "weighting": (lambda batch: 1.0, lambda batch: 1000.0), "optimizer_state": ("keep", "average"),
        "lr_clock": ("samples", "local"), "compression": ("int8", "fp8"),
    },
    GRADIENTS: {
        **COMMON, "accumulate": (1, 2), "delay": (0, 1), "warmup_steps": (0, 1), "part_mb": (16.0, 1.0),
        "correction": (None, lightning_async.DelayCompensation()), "compression": ("int8", "fp8"),
    },
    SERVERS: {
        **COMMON, "mode": ("async", "sync"), "num_servers": (1, 2), "placement": ("colocated", "dedicated"),
        "update_on_server": (True, False), "staleness": ("none", "gap_aware"), "warmup_steps": (0, 1),
        "max_staleness": ({"mode": "ssp", "max_staleness": 3}, {"mode": "ssp", "max_staleness": 4}),
        "pull_every": (1, 2), "compression": ("none", "int8"), "overlap": (False, True),
        "options": (OPTIONS(), OPTIONS(bigarray_bound=7)),
    },
    OPTIONS: {
        "wait_for_workers": ("all", 1), "server_address": (None, "a:1"), "bigarray_bound": (1, 2),
        "snapshots": (None, "/tmp/a"), "lr_clock": ("samples", "local"),
        "snapshot_every": ({"snapshots": "/tmp/a"}, {"snapshots": "/tmp/a", "snapshot_every": 3.0}),
        "update_frequency": (1, {"update_on_server": False, "update_frequency": 2}),
    },
    DILOCO: {
        "outer_lr": (0.1, 0.2), "outer_momentum": (0.1, 0.2), "nesterov": (True, False), "mixing": (0.1, 0.2),
        "outer_optimizer": (sgd(0.1), sgd(0.2)),
    },
}  # fmt: skip


def texts(owner: Any, name: str, value: Any) -> dict[str, str]:
    given = value if isinstance(value, dict) and name in (*value, "snapshot_every") else {name: value}
    if owner is OPTIONS:
        outer = {key: given[key] for key in ("update_on_server",) if key in given}
        inner = {key: given[key] for key in given if key not in outer}
        options: Any = OPTIONS
        owner, given = SERVERS, {**outer, "options": options(**inner)}
    elif owner is DILOCO:
        rule: Any = DILOCO
        owner, given = AVERAGING, {"rule": rule(**given)}
    with mock.patch.object(owner, "root_device", torch.device("cpu")):
        return {key: _text(setting) for key, setting in owner(**given).settings().items()}


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner in ARGUMENTS for name in inspect.signature(owner).parameters]
)
def test_every_argument_is_compared_between_ranks(owner: Any, name: str) -> None:
    first, second = ARGUMENTS[owner][name]
    if name == "transport":  # ranks with other transports never meet: only what follows from it is compared
        assert texts(owner, "min_replicas", 1)["backend"] == "gloo"
        return
    assert texts(owner, name, first) == texts(owner, name, first)
    assert texts(owner, name, first) != texts(owner, name, second)


def _public_values() -> list[tuple[Any, str]]:
    rules: list[Any] = [getattr(algorithms, name) for name in algorithms.__all__]
    found = []
    kinds: list[Any] = [*rules, compression.TwoBit]
    for kind in kinds:
        fields = getattr(kind, "__dataclass_fields__", {}) if inspect.isclass(kind) else {}
        found += [(kind, name) for name in fields]
    return found


@pytest.mark.parametrize(("kind", "name"), _public_values())
def test_the_text_of_a_value_shows_each_of_its_fields(kind: Any, name: str) -> None:
    values = [object.__new__(kind) for _ in range(2)]
    for number, value in enumerate(values):
        for field in kind.__dataclass_fields__:
            object.__setattr__(value, field, number if field == name else 0)
    assert _text(values[0]) != _text(values[1])


class Weigh:
    """Weighs batches; its text says nothing of it."""

    def __init__(self, factor: float) -> None:
        self.count = lambda batch: factor

    def __call__(self, batch: Any) -> float:
        return self.count(batch)


def inner(factor: float) -> Any:
    def weigh(batch: Any) -> float:
        return sum(factor * part for part in batch)

    return weigh


def test_functions_are_equal_if_their_code_and_values_are() -> None:
    for make in (sgd, inner, Weigh, lambda value: partial(inner(value), value), lambda value: {"a": [inner(value)]}):
        assert _text(make(0.1)) == _text(make(0.1))
        assert _text(make(0.1)) != _text(make(0.2))
    for make in (sgd, inner, Weigh, lambda value: partial(inner(value), value)):
        assert text_of_code(make(0.1)) == text_of_code(make(0.2)), "as of a function that uses the rank"
    assert _text(lambda batch: len(batch)) != _text(lambda batch: sum(batch))
    assert text_of_code(lambda batch: len(batch)) != text_of_code(lambda batch: sum(batch))
    assert _text(print) == _text(print)
