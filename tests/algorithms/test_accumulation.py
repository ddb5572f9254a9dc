"""How long windows are: the noise scale against its definition, and policies by table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_async.algorithms import (
    ByEpoch,
    ByStep,
    CommunicationShare,
    Fixed,
    Noise,
    NoiseScale,
    Times,
    WindowProgress,
    estimate,
    lr_factor,
)


@pytest.mark.parametrize(("small", "big"), [(1, 64), (4, 8), (16, 256)])
def test_the_estimates_are_unbiased(small: int, big: int):
    generator = torch.Generator().manual_seed(small)
    mean = torch.linspace(-1, 1, 50, dtype=torch.float64)
    samples = mean + 3 * torch.randn(400, big, 50, dtype=torch.float64, generator=generator)
    found = []
    for each in samples:
        parts = each.view(-1, small, 50).mean(1).square().sum(1).mean()
        found.append(estimate(float(parts), float(each.mean(0).square().sum()), small, big))
    square, trace = (sum(values) / len(found) for values in zip(*found, strict=True))
    assert trace == pytest.approx(9 * 50, rel=0.05)
    assert square == pytest.approx(float(mean.square().sum()), rel=0.1)


def test_of_two_sizes_that_are_one_there_is_no_estimate():
    with pytest.raises(ValueError, match="small_size=4, big_size=4"):
        estimate(1.0, 1.0, 4, 4)


def test_means_are_of_each_by_itself_and_what_is_not_finite_is_left_out():
    noise = Noise()
    assert math.isnan(noise.scale)
    values = [(1.0, 10.0), (3.0, 2.0), (math.nan, 1.0), (2.0, 6.0)]
    for each in values:
        noise = noise.add(each, decay=0.5)
    weights = [0.125, 0.25, 0.5]
    kept = [each for each in values if math.isfinite(each[0])]
    square, trace = (sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*kept, strict=True))
    assert noise.scale == pytest.approx(trace / square)
    assert Noise(-1.0, 1.0, 1.0).scale == math.inf
    assert Noise(1.0, -1.0, 1.0).scale == 0.0
    assert math.isnan(Noise(-1.0, -1.0, 1.0).scale)


def test_the_noise_scale_decides_within_bounds():
    policy = NoiseScale(minimum=8, maximum=100, ratio=2.0, growth=3.0)
    assert policy.size(WindowProgress(0, 0)) == 8  # nothing is known
    assert policy.size(WindowProgress(0, 0, size=32)) == 32
    table = {0.0: 11, 10.0: 20, 40.0: 80, 49.0: 96, math.inf: 96}  # 32 / 3, 2 x 10, 2 x 40, 3 x 32
    for scale, size in table.items():
        noise = Noise(0.0, 1.0, 1.0) if scale == math.inf else Noise(1.0, scale, 1.0)
        assert policy.size(WindowProgress(9, 0, size=32, noise=noise)) == size
    assert policy.size(WindowProgress(9, 0, size=90, noise=Noise(0.0, 1.0, 1.0))) == 100


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("step_s", [0.0, 0.013, 0.62])
def test_communication_takes_its_share_at_most_and_one_batch_fewer_takes_more(share: float, step_s: float):
    batch_s, policy = 0.05, CommunicationShare(share=share, maximum=1000)
    n = policy.size(WindowProgress(0, 0, times=Times(batch_s, step_s)))
    assert step_s / (step_s + n * batch_s) <= share + 1e-6
    if n > 2:
        assert step_s / (step_s + (n - 1) * batch_s) > share
    assert CommunicationShare(maximum=4).size(WindowProgress(0, 0, times=Times(0.01, 1.0))) == 4
    assert CommunicationShare().size(WindowProgress(0, 0, size=7)) == 7


def test_linear_scaling_counts_each_sample_as_without_accumulation():
    assert lr_factor("linear", 96, 32) / 96 == lr_factor(None, 32, 32) / 32
    assert lr_factor("sqrt", 8, 2) == 2.0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Fixed(0), ValueError, "Fixed(n=0)` must be >= 1"),
        (lambda: ByEpoch({}), ValueError, "ByEpoch({})"),
        (lambda: ByEpoch({-1: 2}), ValueError, "ByEpoch({-1: 2})"),
        (lambda: ByStep({0: 0}), ValueError, "must have sizes >= 1"),
        (lambda: ByStep({0: 1.5}), TypeError, "must be a mapping of ints"),  # type: ignore[dict-item]
        (lambda: ByStep([1, 2]), TypeError, "must be a mapping of ints"),  # type: ignore[arg-type]
        (lambda: NoiseScale(minimum=8, maximum=4), ValueError, "maximum=4)` must be >= minimum=8"),
        (lambda: NoiseScale(minimum=8, maximum=16, growth=1.0), ValueError, "growth=1.0"),
        (lambda: NoiseScale(minimum=8, maximum=16, decay=1.0), ValueError, "decay=1.0"),
        (lambda: CommunicationShare(share=1.0), ValueError, "share=1.0"),
        (lambda: CommunicationShare(minimum=1), ValueError, "minimum=1)` must be >= 2"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], text: str):
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)
