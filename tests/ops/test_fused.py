"""The native libraries against the reference: elementwise to the bit, sums up to the order of their additions."""

from __future__ import annotations

import itertools
import math
import struct
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_async import ops
from lightning_async.flat import FlatLayout
from lightning_async.ops import native
from lightning_async.ops.flat_ops import eager
from lightning_async.ops.reference import buckets
from tests.ops.cases import CASES, ROWS, Case, cloned, difference, values

LEVELS = ("portable", "x86-64-v2", "x86-64-v3", "x86-64-v4")
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 2047, 2049, 4100]))
needs_library = pytest.mark.skipif(native.backend("cpu").name == "torch", reason=native.backend("cpu").reason)


def levels() -> list[str]:
    """What this processor can run."""
    found = []
    for level in LEVELS:
        try:
            with native.use(level):
                found.append(level)
        except ValueError:
            continue
    return found


def tensors(arguments: list[Any]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


@needs_library
@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=str)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**31), n=SIZES, offset=st.integers(0, 3))
def test_every_level_is_the_reference_to_the_bit(case: Case, dtype: torch.dtype, seed: int, n: int, offset: int):
    arguments = case.make(values(seed, offset=offset), n, dtype)
    expected = cloned(arguments)
    case.reference(*expected)
    for level in levels():
        mine = cloned(arguments)
        with native.use(level):
            case.op(*mine)
        assert not difference(mine, expected), level


@needs_library
@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=str)
def test_several_chunks_and_threads(case: Case, dtype: torch.dtype):
    arguments = case.make(values(0, special=False), 3 * native.CHUNK + 777, dtype)
    expected = cloned(arguments)
    case.reference(*expected)
    for threads in (1, 2, 3):
        mine, before = cloned(arguments), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            case.op(*mine)
        finally:
            torch.set_num_threads(before)
        assert not difference(mine, expected)


# a strip, a strip and its tail, several chunks
STRIPS = [1, 15, 16, 63, 64, 65, 128, 200, 3 * native.CHUNK + 777]


def norms(x: Tensor) -> tuple[float, float | None]:
    """The squared norm: alone, and of what a plan packs."""
    layout = FlatLayout([x])
    return ops.sq_norm(x), ops.Plan(layout, [x]).pack_(layout.empty(), norm=True)


def norm_everywhere(x: Tensor) -> float:
    """The squared norm; every level and number of threads must give the same, to the bit."""
    found, before = [], torch.get_num_threads()
    for level in levels():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                with native.use(level):
                    found.append(norms(x))
            finally:
                torch.set_num_threads(before)
    assert len({struct.pack("2d", *pair) for pair in found}) == 1 or all(map(math.isnan, sum(found, ())))
    alone, packed = found[0]
    assert packed == pytest.approx(alone, rel=1e-14, nan_ok=True)
    return alone


@needs_library
@pytest.mark.parametrize("n", STRIPS)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 1e-44])
def test_norms_are_float64_sums_at_every_level_and_number_of_threads(n: int, scale: float):
    """Squares of 1e30 and of 1e-30 are beyond fp32's range, and 1e-44 is subnormal."""
    target = values(n, special=False)(n) * scale
    exact = math.fsum(x * x for x in target.double().tolist())
    assert norm_everywhere(target) == pytest.approx(exact, rel=1e-14)


@needs_library
def test_small_elements_are_not_swallowed_by_a_large_one():
    target = torch.full((64,), 1e-4)
    target[7] = 1e4
    exact = math.fsum(x * x for x in target.double().tolist())
    assert norm_everywhere(target) == pytest.approx(exact, rel=1e-15)


@needs_library
@pytest.mark.parametrize("n", STRIPS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_is_finite_exactly_if_all_elements_are(n: int, bad: float):
    target = torch.full((n,), torch.finfo(torch.float32).max)
    assert math.isfinite(norm_everywhere(target))
    for place in {0, n // 2, n - 1}:
        target[place] = bad
        assert not math.isfinite(norm_everywhere(target))
        target[place] = 0.0


@needs_library
@pytest.mark.parametrize("case", [case for case in CASES if case.op.__name__.startswith("server_")], ids=str)
def test_outputs_that_are_written_around_the_caches(case: Case):
    n = 70_001
    for offset, level in itertools.product((0, 1), levels()):
        arguments = case.make(values(1, special=False, offset=offset), n, torch.float32)
        expected, mine = cloned(arguments), cloned(arguments)
        case.reference(*expected)
        with native.use(level):
            case.op(*mine, whole=1 << 40)  # a piece of arrays that no cache holds
        assert not difference(mine, expected), level


@needs_library
def test_a_plan_streams_what_it_only_writes_beyond_the_cache():
    x = values(2, special=False, offset=1)((8 << 20) + 5)
    layout = FlatLayout([x])
    plan, bucket, snapshot = ops.Plan(layout, [x]), layout.empty(), layout.empty()
    plan.pack_(bucket, snapshot=snapshot, weight=0.5)
    assert not difference([snapshot, bucket], [x, x * 0.5])
    before = x.clone()
    plan.apply_(bucket)
    assert not difference([x], [before * 0.5])


# opcheck does arithmetic on the arguments, which torch has not for fp8
@pytest.mark.parametrize(("case", "dtype"), [row for row in ROWS if row[1] != torch.float8_e4m3fn], ids=str)
def test_it_is_a_proper_custom_operator(case: Case, dtype: torch.dtype):
    operator = getattr(torch.ops.lightning_async, case.op.__name__)
    torch.library.opcheck(operator.default, tuple(case.make(values(0, special=False), 300, dtype)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_compile_traces_it_as_one_graph(case: Case):
    arguments = case.make(values(3, special=False), 40, case.dtypes[0])
    expected, mine = cloned(arguments), cloned(arguments)
    case.op(*expected)
    torch.compiler.reset()
    torch.compile(case.op, fullgraph=True, backend="aot_eager")(*mine)
    assert not difference(mine, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_versions_move_and_gradients_are_refused(case: Case):
    arguments = case.make(values(4, special=False), 40, case.dtypes[0])
    before, versions = cloned(arguments), [x._version for x in tensors(arguments)]
    case.op(*arguments)
    changed = [x for x, old in zip(tensors(arguments), tensors(before), strict=True) if not torch.equal(x, old)]
    moved = [x for x, version in zip(tensors(arguments), versions, strict=True) if x._version > version]
    assert changed
    assert all(any(x is y for y in moved) for x in changed)
    watched = next(x for x in moved if x.is_floating_point())
    watched.requires_grad_()
    with pytest.raises(ValueError, match="requires grad and would be overwritten in grad mode"):
        case.op(*arguments)
    with torch.no_grad():
        case.op(*arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_dtypes_strides_and_overlaps_are_refused(case: Case):
    name = case.op.__name__

    def make() -> list[Any]:
        return case.make(values(5, special=False), 600, case.dtypes[0])

    places = [k for k, x in enumerate(make()) if isinstance(x, Tensor)]
    for k in places:
        for change, error, message in (
            (lambda x: x.double(), TypeError, rf"`{name}\(.*must be .*, got torch.float64"),
            (lambda x: torch.stack([x, x], dim=-1)[..., 0], ValueError, "contiguous"),
            (lambda x: x.unsqueeze(0), ValueError, "shape|row per peer"),
        ):
            arguments = make()
            arguments[k] = change(arguments[k])
            with pytest.raises(error, match=message):
                case.op(*arguments)
    same = [k for k in places if k and make()[k].shape == make()[0].shape and make()[k].dtype == make()[0].dtype]
    for k in same[:1]:
        arguments = make()
        arguments[0] = arguments[k]
        with pytest.raises(ValueError, match="shares memory"):
            case.op(*arguments)


def test_what_was_refused_at_once_is_refused_again_and_what_is_alike_is_looked_at_anew():
    at_once = eager(ops.accumulate_)
    total, source, short, wrong = torch.zeros(4), torch.ones(4), torch.ones(3), torch.ones(4).double()
    for _ in range(3):
        at_once(total, source, 0.5)
        for other, error in ((short, ValueError), (wrong, TypeError), (total, ValueError)):
            with pytest.raises(error, match="accumulate_"):
                at_once(total, other, 0.5)
        with pytest.raises(ValueError, match="accumulate_"):
            at_once(short, source, 0.5)
    assert total.tolist() == [1.5] * 4
    for size in range(1, 200):  # memory of tensors that are gone, under the same numbers
        with pytest.raises(ValueError, match="equal shapes"):
            at_once(torch.zeros(size), torch.ones(size + 1), 1.0)
        made = torch.zeros(size)
        at_once(made, torch.ones(size), 1.0)
        assert made.sum() == size


def test_neighbours_in_one_allocation_are_no_overlap():
    memory = torch.zeros(8)
    ops.accumulate_(memory[:4], memory[4:], 0.5)
    with pytest.raises(ValueError, match="shares memory"):
        ops.accumulate_(memory[:5], memory[3:], 0.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda t: ops.server_adam_(t(), t(), t(), None, t(), t(), t(), t(), 0, 0.1),
            ValueError,
            r"step=0.*counts from 1",
        ),
        (lambda t: ops.quantize_(t().to(torch.int8), None, t(), t()), ValueError, "have scales"),
        (lambda t: ops.quantize_2bit_(t().byte()[:1], t(), t(), -1.0), ValueError, "threshold=-1.0.*positive"),
        (lambda t: ops.topk_(t(), torch.zeros(4).long(), t()[:3], t()[:3]), ValueError, "room for 4 elements of 3"),
        (lambda t: ops.topk_accumulate_(t(), t()[:1], torch.tensor([4]), 1.0), IndexError, r"must be in \[0, 4\)"),
    ],
)
def test_values_that_make_no_sense_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(lambda: torch.zeros(4))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), n=SIZES, dtype=st.sampled_from([torch.int8, torch.float8_e4m3fn, torch.bfloat16]))
def test_error_feedback_loses_nothing(seed: int, n: int, dtype: torch.dtype):
    make = values(seed, special=False)
    source, residual, out = make(n), make(n), torch.empty(n)
    wanted = residual + source
    codes = torch.empty(n, dtype=dtype)
    scales = None if dtype == torch.bfloat16 else torch.empty(-(-n // 256))
    ops.quantize_(codes, scales, source, residual)
    decoded = codes[None], None if scales is None else scales[None]
    ops.dequantize_average_(out, *decoded, torch.ones(1))
    assert torch.equal(out.double() + residual.double(), wanted.double())
    if dtype == torch.int8 and n:
        assert residual.abs().max() <= 0.5000001 * scales.max()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_bad_value_is_seen_by_the_receiver_and_forgotten_by_the_sender():
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16):
        for bad in (math.nan, math.inf):
            source, residual = torch.ones(600), torch.zeros(600)
            source[300] = bad
            codes = torch.empty(600, dtype=dtype)
            scales = None if dtype == torch.bfloat16 else torch.empty(3)
            ops.quantize_(codes, scales, source, residual)
            assert residual.isfinite().all()
            out = torch.empty(600)
            ops.dequantize_average_(out, codes[None], None if scales is None else scales[None], torch.ones(1))
            assert out[300].isnan()
            assert out[:256].isfinite().all() and out[512:].isfinite().all()


@needs_library
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), n=SIZES, rests=st.booleans(), weight=st.sampled_from([1.0, 0.25, -0.3]))
def test_a_plan_packs_and_applies_as_the_reference(seed: int, n: int, rests: bool, weight: float):
    make = values(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [make(n + k, dtype=dtype) for k, dtype in enumerate(dtypes)] + [make(2 * n).view(n, 2).t()]
    layout = FlatLayout(tensors)
    remainders = [make(x.numel()) if rests and x.element_size() == 2 else None for x in tensors]
    plan = ops.Plan(layout, tensors, remainders)
    expected, bucket, snapshot = layout.empty(), layout.empty(), layout.empty()
    buckets.pack_(expected, layout, tensors, remainders)
    norm = plan.pack_(bucket, snapshot=snapshot, weight=weight, norm=True)
    assert norm == pytest.approx(buckets.sq_norm(expected), rel=1e-12, nan_ok=True)
    assert not difference([snapshot, bucket], [expected, expected * weight])
    for based in (True, False):
        target, base = make(layout.numel), make(layout.numel) if based else None
        theirs, their_rests = cloned([x.clone() for x in tensors]), cloned(remainders)
        buckets.apply_(theirs, layout, target, None if base is None else base.clone(), their_rests)
        versions = [x._version for x in tensors]
        plan.apply_(target, base)
        assert not difference([*tensors, *remainders], [*theirs, *their_rests])
        assert all(x._version > v for x, v in zip(tensors, versions, strict=True) if x.numel())


def test_a_plan_notices_that_a_tensor_moved():
    module = torch.nn.Linear(3, 2)
    parameters = list(module.parameters())
    layout = FlatLayout(parameters)
    plan, bucket = ops.Plan(layout, parameters), layout.empty()
    plan.pack_(bucket)
    with torch.no_grad():
        parameters[0].set_(torch.full((2, 3), 7.0))  # pyright: ignore[reportArgumentType]
    plan.pack_(bucket)
    assert bucket[:6].tolist() == [7.0] * 6


def test_a_plan_follows_tensors_of_the_same_kinds():
    first = [torch.full((2, 3), 1.0), torch.full((4,), 2.0, dtype=torch.bfloat16), torch.full((), 3.0)]
    second = [x + 10 for x in first]
    plan, bucket = ops.Plan(FlatLayout(first), first), torch.zeros(11)
    plan.pack_(bucket)
    plan.apply_(bucket)
    for tensors in (second, first, [x.clone() for x in second]):
        assert plan.follow(tensors)
        versions = [x._version for x in tensors]
        plan.pack_(bucket)
        assert bucket.tolist() == [x for t in tensors for x in t.flatten().tolist()]
        plan.apply_(bucket + 1)
        assert [x.flatten()[0].item() for x in tensors] == [bucket[0] + 1, bucket[6] + 1, bucket[10] + 1]
        assert [x._version for x in tensors] == [v + 1 for v in versions]
    assert [x.flatten()[0].item() for x in (*first, *second)] == [2, 3, 4, 12, 13, 14]


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3).double(), torch.zeros(3, 2).t()])
def test_a_plan_follows_no_others(other: Tensor):
    x = torch.ones(2, 3)
    plan, bucket = ops.Plan(FlatLayout([x]), [x]), torch.zeros(6)
    assert not plan.follow([other])
    plan.pack_(bucket)
    assert bucket.tolist() == [1.0] * 6


def test_a_plan_follows_no_tensors_that_overlap_and_has_none_after_its_release():
    x, y, memory = torch.ones(4), torch.ones(4), torch.zeros(6)
    plan, bucket = ops.Plan(FlatLayout([x, y]), [x, y]), torch.zeros(8)
    plan.apply_(bucket)
    gone = weakref.ref(x)
    plan.release()
    del x
    assert gone() is None
    with pytest.raises(ValueError, match="name the same memory twice"):
        plan.follow([memory[:4], memory[2:]])


def test_a_plan_with_remainders_follows_none():
    x, rest = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4)
    assert not ops.Plan(FlatLayout([x]), [x], [rest]).follow([x.clone()])


def test_more_than_two_to_the_31_elements():
    numel = 2**31 + 5
    try:
        a = torch.empty(numel, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("4 GB of address space cannot be had")
    a[-1] = 3.0
    untouched = a[: 1 << 20]
    if untouched.count_nonzero():
        pytest.skip("the allocator does not return untouched memory")
    assert ops.sq_norm(a) == 9.0


def test_what_runs_is_known_and_can_be_switched_off():
    with native.use("torch"):
        assert native.backend("cpu") == native.Backend(name="torch", reason="switched off by `use`")
        assert ops.sq_norm(torch.tensor([2.0, 0.0])) == 4.0
    with pytest.raises(ValueError, match="no such level"), native.use("x86-64-v9"):
        pass


@needs_library
def test_the_best_level_is_used():
    assert native.backend("cpu").name == f"native ({levels()[-1]})"
