"""The operations against plain float64 arithmetic, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_async import ops
from lightning_async.flat import FlatLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TENSORS = st.lists(
    st.tuples(st.sampled_from([(), (0,), (1,), (5,), (2, 3), (3, 0), (2, 2, 2), (130,)]), st.sampled_from(DTYPES)),
    max_size=6,
)
SEEDS = st.integers(0, 2**31)


def build(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in kinds]


def half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def rests_for(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [torch.zeros(x.shape) if half(x) else None for x in tensors]


def same_bits(a: Tensor, b: Tensor) -> bool:
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(ints), b.view(ints))


@settings(deadline=None)
@given(kinds=TENSORS, seed=SEEDS, with_rests=st.booleans(), with_base=st.booleans())
def test_pack_then_apply_is_the_identity(kinds, seed, with_rests, with_base) -> None:
    tensors = build(kinds, seed)
    if not with_base:  # a copy passes through fp32
        tensors = [x.float().to(x.dtype) for x in tensors]
    before, layout = [x.clone() for x in tensors], FlatLayout(tensors)
    rests = rests_for(tensors) if with_rests else None
    bucket = layout.empty().fill_(math.nan)
    ops.pack_(bucket, layout, tensors, rests)
    ops.apply_(tensors, layout, bucket, bucket.clone() if with_base else None, rests)
    assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True))


@settings(deadline=None)
@given(kinds=TENSORS, seed=SEEDS)
def test_pack_writes_each_value_into_its_place(kinds, seed) -> None:
    tensors = build(kinds, seed)
    layout = FlatLayout(tensors)
    bucket = layout.empty().fill_(math.nan)
    ops.pack_(bucket, layout, tensors)
    assert bucket.tolist() == [value for x in tensors for value in x.float().flatten().tolist()]


@settings(deadline=None)
@given(kinds=TENSORS, seed=SEEDS, data=st.data())
def test_apply_moves_by_the_displacement(kinds, seed, data) -> None:
    tensors = build(kinds, seed)
    before, layout = [x.clone() for x in tensors], FlatLayout(tensors)
    generator = torch.Generator().manual_seed(seed + 1)
    target, base = (torch.randn(layout.numel, generator=generator) for _ in range(2))
    kept, displacement = target.clone(), target - base
    rests = data.draw(st.sampled_from([None, rests_for(tensors)]))
    ops.apply_(tensors, layout, target, base, rests)
    assert torch.equal(target, kept)
    for x, old, d in zip(tensors, before, layout.views(displacement), strict=True):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        assert torch.equal(x, (old.to(wide) + d.to(wide)).to(x.dtype))


@settings(deadline=None)
@given(kinds=TENSORS, seed=SEEDS, with_base=st.booleans())
def test_tensor_and_remainder_together_hold_the_fp32_value_exactly(kinds, seed, with_base) -> None:
    tensors = [x for x in build(kinds, seed) if half(x)]
    rests, layout = rests_for(tensors), FlatLayout(tensors)
    generator = torch.Generator().manual_seed(seed + 1)
    expected = layout.empty()
    ops.pack_(expected, layout, tensors, rests)
    for _ in range(3):
        target, base = (torch.randn(layout.numel, generator=generator) for _ in range(2))
        expected = expected + (target - base) if with_base else target
        ops.apply_(tensors, layout, target, base.clone() if with_base else None, rests)
        packed = layout.empty()
        ops.pack_(packed, layout, tensors, rests)
        assert torch.equal(packed, expected)
        for x, part in zip(tensors, layout.views(expected), strict=True):
            assert torch.equal(x, part.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_small_displacements_move_a_half_precision_one_only_with_a_remainder(dtype) -> None:
    step = 1e-3 if dtype == torch.bfloat16 else 1e-4
    plain, kept, rest = (torch.ones(2, dtype=d) for d in (dtype, dtype, torch.float32))
    rest.zero_()
    layout = FlatLayout([plain])
    for _ in range(100):
        ops.apply_([plain], layout, torch.full((2,), step), torch.zeros(2))
        ops.apply_([kept], layout, torch.full((2,), step), torch.zeros(2), [rest])
    assert plain.tolist() == [1.0, 1.0]
    torch.testing.assert_close(
        kept.double() + rest.double(), torch.full((2,), 1 + 100 * step).double(), rtol=0, atol=1e-5
    )
    assert kept.tolist() == torch.full((2,), 1 + 100 * step).to(dtype).tolist()


def test_float64_keeps_its_own_digits_under_a_displacement() -> None:
    x = torch.tensor([1.0 + 2.0**-50], dtype=torch.float64)
    ops.apply_([x], FlatLayout([x]), torch.tensor([0.5]), torch.tensor([0.25]))
    assert x.item() == 1.25 + 2.0**-50


def test_strided_tensors_keep_their_strides_and_neighbours() -> None:
    whole = torch.zeros(4, 4)
    x = whole[:, ::2].t()
    layout = FlatLayout([x])
    ops.apply_([x], layout, torch.arange(8.0), None)
    bucket = layout.empty()
    ops.pack_(bucket, layout, [x])
    assert bucket.tolist() == list(range(8))
    assert whole[:, 1::2].abs().sum() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("with_rest", [False, True])
def test_a_backward_pass_over_moved_parameters_fails_loudly(dtype, with_base, with_rest) -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    if with_rest and not half(p):
        return
    loss = (p * p).sum()
    rest = [torch.zeros(2)] if with_rest else None
    ops.apply_([p], FlatLayout([p]), torch.ones(2), torch.zeros(2) if with_base else None, rest)
    assert p.requires_grad
    assert p.grad_fn is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_carry_no_graph_and_move_the_version() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    bucket, out = torch.zeros(2), torch.zeros(2)
    anchor, momentum = torch.zeros(2), torch.zeros(2)
    tensors = (bucket, out, anchor, momentum)
    versions = [t._version for t in tensors]
    ops.pack_(bucket, FlatLayout([p]), [p])
    ops.scale_(out, bucket, 2.0)
    ops.outer_merge_(anchor, momentum, out.clone(), None, 0.1, 0.9, True)
    for t, version in zip(tensors, versions, strict=True):
        assert not t.requires_grad
        assert t._version > version


@given(seed=SEEDS, weight=st.floats(-4, 4))
def test_scale(seed, weight) -> None:
    source = build([((33,), torch.float32)], seed)[0]
    out, kept = torch.full((33,), math.nan), source.clone()
    ops.scale_(out, source, weight)
    assert torch.equal(out, torch.tensor(weight, dtype=torch.float32) * kept)
    assert torch.equal(source, kept)
    ops.scale_(source, source, weight)
    assert torch.equal(source, out)


@settings(deadline=None)
@given(seed=SEEDS, size=st.integers(0, 300), dtype=st.sampled_from(DTYPES))
def test_squares(seed, size, dtype) -> None:
    a, b = build([((size,), dtype), ((size,), dtype)], seed)
    pairs = list(zip(a.double().tolist(), b.double().tolist(), strict=True))
    assert ops.sq_norm(a) == pytest.approx(math.fsum(x * x for x, _ in pairs), rel=1e-12)
    assert ops.sq_distance(a, b) == pytest.approx(math.fsum((x - y) ** 2 for x, y in pairs), rel=1e-12)
    assert ops.sq_distance(a, a) == 0.0


def test_squares_over_several_chunks_lose_nothing() -> None:
    size = (1 << 21) + 7
    a = torch.full((size,), 1e-4)
    a[0] = 1e4  # in fp32, 1e8 would swallow every 1e-8
    one = float(a[1].double()) ** 2
    assert ops.sq_norm(a) == pytest.approx(1e8 + (size - 1) * one, abs=1e-3)  # of 2e-2
    assert ops.sq_distance(a, torch.zeros_like(a)) == ops.sq_norm(a)
    assert ops.sq_norm(torch.full((4,), 1e30)) == pytest.approx(4e60)
    assert math.isnan(ops.sq_norm(torch.tensor([math.nan, 1.0])))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite_finds_one_bad_element_anywhere(bad, dtype) -> None:
    a = torch.full((1001,), torch.finfo(dtype).max, dtype=dtype)  # the sum overflows, the elements are finite
    assert ops.all_finite(a)
    assert ops.all_finite(-a)
    for place in (0, 500, 1000):
        a[place] = bad
        assert not ops.all_finite(a)
        a[place] = 0.0
    assert ops.all_finite(torch.empty(0, dtype=dtype))


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS, size=st.integers(1, 200), lr=st.floats(1e-3, 2), mu=st.floats(0.01, 0.99), nesterov=st.booleans())
def test_an_outer_step_is_one_of_torch_sgd(seed, size, lr, mu, nesterov) -> None:
    """Not to the bit: on processors with a fused multiply-add, torch rounds a product and a sum together."""
    anchor, *gradients = build([((size,), torch.float32)] * 6, seed)
    momentum, reference = torch.zeros(size), torch.nn.Parameter(anchor.double())
    optimizer = torch.optim.SGD([reference], lr=lr, momentum=mu, nesterov=nesterov)
    for gradient in gradients:
        reference.grad = gradient.double()
        optimizer.step()
        ops.outer_merge_(anchor, momentum, gradient.clone(), None, lr, mu, nesterov)
    ulp = 2.0**-23
    torch.testing.assert_close(anchor.double(), reference.detach(), rtol=4 * ulp, atol=40 * ulp * max(1.0, lr))
    buffer = optimizer.state[reference]["momentum_buffer"]
    torch.testing.assert_close(momentum.double(), buffer, rtol=4 * ulp, atol=10 * ulp)


TWO = FlatLayout([torch.zeros(2), torch.zeros(3)], ["weight", "bias"])
GOOD = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.pack_(torch.zeros(5), TWO, GOOD[:1]), ValueError, "has 1 entries, the layout 2"),
        (lambda: ops.pack_(torch.zeros(4), TWO, GOOD), ValueError, "hold 5 elements"),
        (lambda: ops.pack_(torch.zeros(10)[::2], TWO, GOOD), ValueError, "contiguous"),
        (lambda: ops.pack_(torch.zeros(5).double(), TWO, GOOD), TypeError, "must be float32, got torch.float64"),
        (lambda: ops.pack_(torch.zeros(5), TWO, GOOD[::-1]), ValueError, r"weight has shape \(3,\), the layout \(2,\)"),
        (lambda: ops.pack_(torch.zeros(5), TWO, [GOOD[0], torch.zeros(3).long()]), TypeError, "bias is torch.int64"),
        (lambda: ops.pack_(torch.zeros(5), TWO, GOOD, [None]), ValueError, "remainders.* has 1 entries"),
        (lambda: ops.pack_(torch.zeros(5), TWO, GOOD, [None, GOOD[1]]), TypeError, "belongs to a bfloat16"),
        (lambda: ops.apply_(GOOD, TWO, torch.zeros(6), None), ValueError, "hold 5 elements"),
        (lambda: ops.apply_(GOOD, TWO, torch.zeros(5), torch.zeros(6)), ValueError, "`apply_.base"),
        (
            lambda: ops.apply_([GOOD[0].half(), GOOD[1]], TWO, torch.zeros(5), None, [GOOD[1], None]),
            ValueError,
            "shape",
        ),
        (
            lambda: ops.apply_([GOOD[1], GOOD[1]], FlatLayout([GOOD[1]] * 2), torch.zeros(6), None),
            ValueError,
            "the same memory twice",
        ),
        (lambda: ops.scale_(torch.zeros(2), torch.zeros(3), 1.0), ValueError, "equal shapes"),
        (lambda: ops.scale_(torch.zeros(2).half(), torch.zeros(2), 1.0), TypeError, "float16"),
        (lambda: ops.sq_distance(torch.zeros(2), torch.zeros(3)), ValueError, "equal shapes"),
        (
            lambda: ops.outer_merge_(torch.zeros(2), torch.zeros(0), torch.zeros(2), None, 1.0, 0.0, True),
            ValueError,
            "equal shapes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_target_cannot_be_its_own_base() -> None:
    bucket = torch.ones(2)
    with pytest.raises(ValueError, match="must not be `target`"):
        ops.apply_([torch.zeros(2)], FlatLayout([torch.zeros(2)]), bucket, bucket)
    assert bucket.tolist() == [1.0, 1.0]
