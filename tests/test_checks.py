"""Wrong arguments of public classes, of the kinds that all have."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

import lightning_async
from lightning_async import algorithms
from lightning_async._checks import check_choice

NEEDED: dict[str, dict[str, Any]] = {
    "AdaptiveGradientAccumulation": {"accumulation_steps": 2},
    "Best": {"monitor": "val_loss"},
    "Denser": {"schedule": lightning_async.EveryNSteps(2)},
    "DyLU": {"n": 8},
    "FaultTolerantCheckpoint": {"dirpath": "checkpoints"},
    "NoiseScale": {"minimum": 1, "maximum": 4},
}
OF_THE_PACKAGE = {"SaveProgress", "Saved"}
"""What policies are told, and nobody else makes."""


def arguments_that_are(kind: type) -> list[Any]:
    """Those whose default is one."""
    found = []
    for module in (lightning_async, algorithms):
        for name in module.__all__:
            public = getattr(module, name)
            is_class = inspect.isclass(public)
            if not is_class or issubclass(public, (BaseException, Enum, tuple)) or name in OF_THE_PACKAGE:
                continue
            signature = inspect.signature(public)
            found += [(public, each.name) for each in signature.parameters.values() if type(each.default) is kind]
    return sorted({*found}, key=lambda each: (each[0].__name__, each[1]))


BOOLS = arguments_that_are(bool)
INTS = arguments_that_are(int)


def test_the_arguments_that_are_bools_are_found() -> None:
    assert {f"{public.__name__}({argument})" for public, argument in BOOLS} >= {
        "DiLoCo(nesterov)",
        "FaultTolerantCheckpoint(save_on_exception)",
        "ParameterServerStrategy(overlap)",
    }


@pytest.mark.parametrize(
    "value", [np.array([1, 0]), np.array([True]), torch.ones(2), torch.tensor(True), np.True_, "no", 1, None], ids=repr
)
@pytest.mark.parametrize(("public", "argument"), BOOLS, ids=lambda each: getattr(each, "__name__", each))
def test_what_is_no_bool_is_refused_by_name(public: type, argument: str, value: object) -> None:
    expected = f"`{public.__name__}({argument}={value!r})` must be True or False."
    with pytest.raises(TypeError, match=re.escape(expected)):
        public(**NEEDED.get(public.__name__, {}), **{argument: value})


def test_the_arguments_that_are_ints_are_found() -> None:
    assert {f"{public.__name__}({argument})" for public, argument in INTS} >= {
        "AsyncGradientStrategy(delay)",
        "FaultTolerantCheckpoint(buffers)",
        "MatchCommunication(minimum)",
        "Timeouts(attempts)",
    }


@pytest.mark.parametrize("value", [1.0, True, np.int64(1), np.float64(1.0)], ids=repr)
@pytest.mark.parametrize(("public", "argument"), INTS, ids=lambda each: getattr(each, "__name__", each))
def test_what_is_no_int_is_refused_by_name(public: type, argument: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(f"`{public.__name__}({argument}={value!r})` must be ")):
        public(**{**NEEDED.get(public.__name__, {}), argument: value})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lightning_async.TopK(0.1, bits=2.0), "`TopK(bits=2.0)` must be one of (None, 2)."),  # pyright: ignore
        (
            lambda: lightning_async.PartitionedSampler(range(4), num_replicas=2.0, rank=0),  # pyright: ignore
            "`PartitionedSampler(num_replicas=2.0)` must be an int",
        ),
        (
            lambda: lightning_async.PartitionedStream(range(4), num_replicas=2, rank=True),
            "`PartitionedStream(rank=True)` must be an int",
        ),
    ],
)
def test_optional_ints_are_ints(make: Any, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(named)):
        make()


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.ones(2), np.array(["sync"])], ids=repr)
def test_an_array_is_no_choice(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`Owner\(argument=.*\)` must be one of \(1, 'sync'\)\."):
        check_choice("Owner", "argument", value, (1, "sync"))
