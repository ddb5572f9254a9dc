"""Wrong arguments of public classes, of the kinds that all have."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

import lightning_async
from lightning_async import algorithms
from lightning_async._checks import check_choice

NEEDED = {
    "AdaptiveGradientAccumulation": {"accumulation_steps": 2},
    "FaultTolerantCheckpoint": {"dirpath": "checkpoints"},
}
OF_THE_PACKAGE = {"SaveProgress", "Saved"}
"""What policies are told, and nobody else makes."""


def arguments_that_are_bools() -> list[Any]:
    found = []
    for module in (lightning_async, algorithms):
        for name in module.__all__:
            public = getattr(module, name)
            if not inspect.isclass(public) or issubclass(public, BaseException) or name in OF_THE_PACKAGE:
                continue
            signature = inspect.signature(public)
            found += [(public, each.name) for each in signature.parameters.values() if isinstance(each.default, bool)]
    return sorted({*found}, key=lambda each: (each[0].__name__, each[1]))


BOOLS = arguments_that_are_bools()


def test_the_arguments_that_are_bools_are_found() -> None:
    assert {f"{public.__name__}({argument})" for public, argument in BOOLS} >= {
        "DiLoCo(nesterov)",
        "FaultTolerantCheckpoint(save_on_exception)",
        "ParameterServerStrategy(overlap)",
        "ServerOptions(consistent_pull)",
    }


@pytest.mark.parametrize(
    "value", [np.array([1, 0]), np.array([True]), torch.ones(2), torch.tensor(True), np.True_, "no", 1, None], ids=repr
)
@pytest.mark.parametrize(("public", "argument"), BOOLS, ids=lambda each: getattr(each, "__name__", each))
def test_what_is_no_bool_is_refused_by_name(public: type, argument: str, value: object) -> None:
    expected = f"`{public.__name__}({argument}={value!r})` must be True or False."
    with pytest.raises(TypeError, match=re.escape(expected)):
        public(**NEEDED.get(public.__name__, {}), **{argument: value})


@pytest.mark.parametrize("value", [np.array([1, 2]), torch.ones(2), np.array(["sync"])], ids=repr)
def test_an_array_is_no_choice(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`Owner\(argument=.*\)` must be one of \(1, 'sync'\)\."):
        check_choice("Owner", "argument", value, (1, "sync"))
