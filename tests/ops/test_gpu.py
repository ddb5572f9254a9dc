"""The CUDA library on a GPU: the same laws as on the CPU. Left out where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from lightning_async import ops
from lightning_async.flat import FlatLayout
from lightning_async.ops import native
from tests.ops.cases import ROWS, Case, cloned, difference, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture(autouse=True)
def library() -> None:
    assert native.backend("cuda").name == "native (CUDA)", native.backend("cuda").reason


@pytest.mark.parametrize(("case", "dtype"), ROWS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 300, 2049, native.CHUNK + 13])
def test_the_gpu_is_the_reference_to_the_bit(case: Case, dtype: torch.dtype, n: int, offset: int):
    arguments = case.make(values(n, offset=offset), n, dtype)
    expected, mine = cloned(arguments), cloned(arguments, "cuda")
    case.reference(*expected)
    case.op(*mine)
    assert not difference(mine, expected)


@pytest.mark.parametrize("rests", [True, False])
def test_a_plan_on_the_gpu_is_one_on_the_cpu(rests: bool):
    make = values(7)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [make(70_000 + k, dtype=dtype) for k, dtype in enumerate(dtypes)]
    remainders = [make(x.numel()) if rests and x.element_size() == 2 else None for x in tensors]
    layout = FlatLayout(tensors)
    there = [x.cuda() for x in tensors], [None if r is None else r.cuda() for r in remainders]
    plans = ops.Plan(layout, tensors, remainders), ops.Plan(layout, *there)
    packed = layout.empty(), layout.empty("cuda")
    norms = [plan.pack_(bucket, weight=0.5, norm=True) for plan, bucket in zip(plans, packed, strict=True)]
    assert not difference([packed[1]], [packed[0]])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12, nan_ok=True)
    target, base = make(layout.numel), make(layout.numel)
    plans[1].apply_(target.cuda(), base.cuda())
    plans[0].apply_(target, base)
    assert not difference([*there[0], *there[1]], [*tensors, *remainders])


def test_more_than_two_to_the_31_elements_on_the_gpu():
    numel = 2**31 + 5
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB")
    x, y = (torch.zeros(numel, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float32))
    x[-1], y[-1] = 2.0, 4.0
    ops.accumulate_(y, x, 0.5)
    assert y[-1].item() == 5.0 and not y[:-1].any()
    assert ops.sq_norm(y) == 25.0


def test_an_op_can_be_captured_in_a_graph():
    x, y = (torch.randn(100_000, device="cuda") for _ in range(2))
    expected = x + y * 0.5 + y * 0.5
    start = x.clone()
    ops.accumulate_(x, y, 0.5)
    x.copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.accumulate_(x, y, 0.5)
    x.copy_(start)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, expected)
