"""Synchronous gradients in buckets, on in-process ranks, against plain means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.horovod.reducer import GradientReducer
from tests.comm.simulated import InProcessWorld


class Branches(nn.Module):
    """Ranks use different branches; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.ones(3))
        self.first = nn.Parameter(torch.ones(3))
        self.second = nn.Parameter(torch.ones(3))
        self.third = nn.Parameter(torch.ones(3))

    def forward(self, x: float, branch: Tensor) -> Tensor:
        return x * (self.common.sum() + 2.0 * branch.sum())


def on_ranks(world_size: int, body: Any, **options: Any) -> list[Any]:
    world = InProcessWorld(world_size)

    def on_rank(collectives: Any) -> Any:
        module = Branches()
        reducer = GradientReducer(list(module.parameters()), collectives, **options)
        try:
            return body(module, reducer, collectives.rank)
        finally:
            reducer.close()

    return world.run(on_rank, timedelta(seconds=20))


def grads(module: Branches) -> list[float | None]:
    return [None if p.grad is None else p.grad[0].item() for p in module.parameters()]


@pytest.mark.parametrize("bucket_bytes", [0, 16, 25 << 20])
def test_means_over_all_replicas_with_zeros_for_those_that_used_a_parameter_not(bucket_bytes: int) -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        module(1.0 + rank, module.second if rank else module.first).backward()
        assert reducer.begun
        reducer.finish()
        assert not reducer.begun
        return grads(module)

    for found in on_ranks(2, body, bucket_bytes=bucket_bytes):
        assert found == [1.5, 1.0, 2.0, None]


def test_steps_follow_each_other_and_forget_the_last() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        seen = []
        for scale in (1.0, 10.0):
            module.zero_grad(set_to_none=True)
            module(scale * (1.0 + rank), module.first).backward()
            reducer.finish()
            seen.append(grads(module))
        return seen

    for found in on_ranks(3, body):
        assert found == [[2.0, 4.0, None, None], [20.0, 40.0, None, None]]


def test_accumulated_gradients_are_reduced_once() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        reducer.enabled = False
        module(1.0 + rank, module.first).backward()
        reducer.finish()
        assert grads(module) == [1.0 + rank, 2.0 + 2 * rank, None, None], "they stay where they are"
        reducer.enabled = True
        module(1.0 + rank, module.second).backward()
        reducer.finish()
        return grads(module)

    for found in on_ranks(2, body):
        assert found == [3.0, 3.0, 3.0, None]


def test_two_backward_passes_before_a_step_add_up() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        for branch in (module.first, module.second):
            module(1.0 + rank, branch).backward()
        reducer.finish()
        return grads(module)

    for found in on_ranks(2, body, bucket_bytes=0):
        assert found == [3.0, 3.0, 3.0, None]


@pytest.mark.parametrize("bucket_bytes", [0, 16, 25 << 20])
def test_what_comes_after_a_bucket_has_left_is_averaged_with_it(bucket_bytes: int) -> None:
    """A second pass on one rank only; a parameter that was not used before; one that was, and is not."""

    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        seen = []
        for uses in ([("first",), ("second",)], [("first",)], [("first", "third"), ("first",)], [(), ("second",)]):
            module.zero_grad(set_to_none=True)
            for branch in uses[rank % len(uses)]:
                module(1.0 + rank, getattr(module, branch)).backward()
            reducer.finish()
            seen.append(grads(module))
        return seen

    for found in on_ranks(2, body, bucket_bytes=bucket_bytes):
        assert found == [[1.5, 1.0, 2.0, None], [1.5, 3.0, None, None], [2.0, 3.0, None, 1.0], [1.0, None, 2.0, None]]


def test_a_bucket_leaves_while_the_pass_runs_though_some_parameter_is_never_used() -> None:
    """From the second step on, when it is known what a pass uses; the common parameter's gradient comes last."""

    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        begun: list[int] = []
        left: list[int] = []

        def reduce(collectives: Any, flat: Tensor) -> Any:
            begun.append(1)
            return collectives.all_reduce(flat)

        reducer._all_reduce = reduce
        module.common.register_hook(lambda grad: left.append(len(begun)))
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            begun.clear()
            ((1.0 + rank) * (module.common.exp() + module.first)).sum().backward()
            reducer.finish()
            assert len(begun) == 4
        return left

    assert on_ranks(2, body, bucket_bytes=0) == [[0, 3, 3]] * 2


def test_passes_before_and_after_those_that_are_accumulated_add_up() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        module(1.0 + rank, module.first).backward()
        reducer.enabled = False
        module(1.0 + rank, module.second).backward()
        reducer.enabled = True
        module(1.0 + rank, module.second).backward()
        reducer.finish()
        return grads(module)

    for found in on_ranks(2, body):
        assert found == [4.5, 3.0, 6.0, None]


def test_neighbours_of_another_type_travel_apart() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.plain = nn.Parameter(torch.ones(3))
            self.other = nn.Parameter(torch.ones(3))

    def on_rank(collectives: Any) -> Any:
        module, sent = Mixed(), []

        def reduce(collectives: Any, flat: Tensor) -> Any:
            sent.append((flat.dtype, flat.numel()))
            return collectives.all_reduce(flat)

        reducer = GradientReducer(list(module.parameters()), collectives, all_reduce=reduce)
        ((1.0 + collectives.rank) * (module.wide.sum() + module.plain.sum() + module.other.sum())).backward()
        reducer.finish()
        reducer.close()
        return sent, [p.grad.tolist() for p in module.parameters() if p.grad is not None]

    for sent, found in InProcessWorld(2).run(on_rank, timedelta(seconds=20)):
        assert sent == [(torch.float32, 6), (torch.float64, 2)]
        assert found == [[1.5] * 2, [1.5] * 3, [1.5] * 3]


def test_half_of_the_bytes_and_a_sum() -> None:
    sizes: list[torch.dtype] = []

    def reduce(collectives: Any, flat: Tensor) -> Any:
        sizes.append(flat.dtype)
        return collectives.all_reduce(flat)

    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        module(1.0 + rank, module.first).backward()
        reducer.finish()
        return grads(module), module.common.grad.dtype  # type: ignore[union-attr]

    for found, dtype in on_ranks(2, body, wire=torch.float16, mean=False, all_reduce=reduce):
        assert found == [3.0, 6.0, None, None]
        assert dtype is torch.float32
    assert set(sizes) == {torch.float16}


def test_after_closing_gradients_stay_each_replicas_own() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        reducer.close()
        module(1.0 + rank, module.first).backward()
        return grads(module)

    assert on_ranks(2, body) == [[1.0, 2.0, None, None], [2.0, 4.0, None, None]]


@pytest.mark.parametrize("bucket_bytes", [0, 25 << 20])
def test_a_replica_without_a_pass_does_not_count(bucket_bytes: int) -> None:
    """Three replicas of unequal weights, which add up to three; then one of them has no pass, then nobody."""

    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        found, weight = [], (0.5, 1.5, 1.0)[rank]
        for absent in ((), (1,), (0, 1, 2)):
            module.zero_grad(set_to_none=True)
            if rank in absent:
                reducer.finish(absent=weight)
            else:
                (module(1.0 + rank, module.first) * weight).backward()
                reducer.finish()
            found.append(grads(module))
        return found

    for found in on_ranks(3, body, bucket_bytes=bucket_bytes):
        assert found == [
            [pytest.approx((0.5 + 3.0 + 3.0) / 3.0), pytest.approx(13.0 / 3.0), None, None],
            [pytest.approx((0.5 + 3.0) / 1.5), pytest.approx(7.0 / 1.5), None, None],
            [None] * 4,
        ]


@pytest.mark.parametrize("wire", [None, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_mean_that_is_not_finite_is_dropped_on_all(bad: float, wire: Any) -> None:
    """Also where it has overflowed on its way only. The steps before and after it are as always."""
    told: list[int] = []

    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        found = []
        for number in range(3):
            module.zero_grad(set_to_none=True)
            module(bad if number == 1 and rank else 1.0, module.first).backward()
            reducer.finish()
            found.append(grads(module))
        return found

    fits = bad == 1e30 and wire is None
    for found in on_ranks(2, body, wire=wire, on_drop=lambda: told.append(1)):
        assert found[0] == found[2] == [1.0, 2.0, None, None]
        assert found[1] == ([pytest.approx(5e29), pytest.approx(1e30), None, None] if fits else [None] * 4)
    assert len(told) == (0 if fits else 2)


def test_without_anybody_to_tell_it_reaches_the_scaler() -> None:
    def body(module: Branches, reducer: GradientReducer, rank: int) -> Any:
        module(float("inf") if rank else 1.0, module.first).backward()
        reducer.finish()
        return grads(module)

    assert on_ranks(2, body) == [[float("inf"), float("inf"), None, None]] * 2
