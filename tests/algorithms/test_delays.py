"""Corrections for the delay of gradients, each against its equation in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lightning_async import AsyncGradientStrategy
from lightning_async.algorithms import DelayCompensation, WeightPrediction
from tests.algorithms.replicas import fill

SEEDS = st.integers(0, 2**31)
LAW = settings(max_examples=30, deadline=None)
N = 33


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


@LAW
@given(seed=SEEDS, strength=st.floats(0, 2))
def test_a_gradient_that_is_not_late_is_not_corrected(seed, strength) -> None:
    gradient = fill(N, seed)
    before = gradient.clone()
    DelayCompensation(strength).correct_(gradient, torch.zeros(N))
    assert torch.equal(gradient, before)


@LAW
@given(seed=SEEDS, strength=st.floats(0, 2))
def test_compensation_is_exact_where_the_hessian_is_the_square(seed, strength) -> None:
    gradient, moved = fill(N, seed), fill(N, seed + 1)
    expected = gradient.double() * (1 + strength * gradient.double() * moved.double())
    DelayCompensation(strength).correct_(gradient, moved)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


@LAW
@given(seed=SEEDS, steps=st.floats(0, 4))
def test_where_nothing_moved_the_prediction_is_here(seed, steps) -> None:
    now = fill(N, seed)
    there = now.clone()
    WeightPrediction(steps).predict_(there, now)
    assert bits(there) == bits(now)


@LAW
@given(seed=SEEDS, steps=st.floats(0, 4))
def test_predictions_go_on_as_the_last_step_went(seed, steps) -> None:
    before, now = fill(N, seed), fill(N, seed + 1)
    expected, here = now.double() + steps * (now.double() - before.double()), now.clone()
    WeightPrediction(steps).predict_(before, now)
    torch.testing.assert_close(before.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(now, here)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_predictions_have_the_precision_of_parameters(dtype) -> None:
    there = torch.tensor([1.0, 2.0], dtype=dtype)
    WeightPrediction().predict_(there, torch.tensor([2.0, 1.0], dtype=dtype))
    assert there.dtype == dtype and there.real.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("make", [DelayCompensation, WeightPrediction])
@pytest.mark.parametrize(("value", "error"), [("1", TypeError), (True, TypeError), (-0.5, ValueError)])
def test_arguments_that_cannot_be(make, value, error) -> None:
    with pytest.raises(error, match=f"{make.__name__}\\(st"):
        make(value)


@pytest.mark.parametrize("name", ["DelayCompensation", "WeightPrediction"])
def test_a_command_line_takes_a_correction_by_its_short_name(name) -> None:
    for value in (name, {"class_path": name}):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--strategy", type=AsyncGradientStrategy)
        given = {"class_path": "AsyncGradientStrategy", "init_args": {"correction": value}}
        parsed = parser.parse_object({"strategy": given}).strategy
        assert parsed.init_args.correction.class_path == f"lightning_async.{name}"
