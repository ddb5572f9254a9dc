"""Gradients that are not finite: dropped on the rank that has them, however they leave, and the others go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_async.algorithms import PowerSGD, Synchronous, TopK
from lightning_async.algorithms.schedules import Action
from lightning_async.engine.gradients.window import Window
from tests.engine.fault_ranks import FaultyRank, values
from tests.engine.test_last_backward import gather, leave_with, take
from tests.engine.test_overlap import Net, every, grads, small_parts, step

__all__ = ["small_parts"]  # as there: small parameters leave in three parts

WAYS = ["whole", "in parts", "window", "last pass", "in parts on rank 0 only"]
BAD = [math.nan, math.inf, -math.inf]


def take_step(rank: FaultyRank, window: Window, way: str, factors: dict[int, float], samples: float) -> Any:
    """One synchronous step with such gradients: what the optimizer would see."""
    net: Any = rank.module
    if way == "window":
        gather(net, window, [(samples / 2, factors), (samples / 2, factors)])
        rank.gradients.wait_until_free()
        assert window.leave()
        return take(rank, net)
    if way == "last pass":
        gather(net, window, [(samples / 2, factors)])
        leave_with(rank, window, (samples / 2, factors))
        return take(rank, net)
    if way == "in parts" or (way == "in parts on rank 0 only" and rank.number == 0):
        step(rank, net, factors, samples=samples)
        return grads(net)
    net.zero_grad(set_to_none=True)
    net.loss(factors).backward()
    rank.gradients.reduce_(samples)
    rank.averager.tick(Action.GRADIENTS, samples)
    return grads(net)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [{1}, {0, 2}, {0, 1, 2}], ids=str)
def test_the_mean_is_over_those_that_are_finite(way: str, bad: set[int]) -> None:
    """Three steps of three ranks, with weights 1, 2 and 4; some are not finite in the second step."""

    def body(rank: FaultyRank) -> Any:
        rank.gradients.rounds.follows = "window" in way or "last" in way
        window, told = Window(rank.gradients), []
        rank.gradients.rounds.on_drop = lambda: told.append(len(found))
        found: list[Any] = []
        for number in range(3):
            factors = every(1.0 + rank.number)
            if number == 1 and rank.number in bad:
                factors[1 + rank.number] = BAD[rank.number]
            found.append(take_step(rank, window, way, factors, 2.0**rank.number))
        window_is_clean = bool(window._sum.isfinite().all())
        return found, told, rank.gradients.rounds.dropped, window_is_clean

    good = [rank for rank in range(3) if rank not in bad]
    mean = sum(2.0**r * (1.0 + r) for r in good) / sum(2.0**r for r in good) if good else None
    of_all = pytest.approx([(1.0 + 4.0 + 12.0) / 7.0] * 5, rel=1e-6)
    for number, (found, told, dropped, window_is_clean) in enumerate(
        values(3, body, module=Net, schedule=Synchronous())
    ):
        assert found[0] == of_all
        assert found[1] == ([None] * 5 if mean is None else pytest.approx([mean] * 5, rel=1e-6))
        assert found[2] == of_all
        assert told == ([1] if number in bad else [])
        assert dropped == (number in bad)
        assert window_is_clean


@pytest.mark.parametrize("compression", ["bf16", "fp8", "int8", TopK(0.5), PowerSGD(1)], ids=str)
def test_compressed_ones_leave_no_trace_in_what_is_owed(compression: Any) -> None:
    """With the spoilt step between, all else is the same to the bit as without the rank's part in it."""

    def body(rank: FaultyRank, spoilt: bool) -> Any:
        window, found = Window(rank.gradients), []
        rank.gradients.rounds.follows = True
        for number in range(4):
            factors = {i: (1.0 + i) / (2.0 + number + rank.number) for i in range(5)}
            samples = 2.0
            if number == 1 and rank.number == 1:
                samples = 2.0 if spoilt else 0.0
                factors[3] = math.nan if spoilt else factors[3]
            gather(rank.module, window, [(samples, factors)])
            rank.gradients.wait_until_free()
            assert window.leave()
            found.append(take(rank, rank.module))
        feedback = rank.gradients.rounds.feedback
        assert feedback is not None
        return found, feedback.residual.clone(), rank.gradients.rounds.dropped

    options: Any = {"module": Net, "schedule": Synchronous(), "gradients": compression}
    spoilt = values(2, lambda rank: body(rank, spoilt=True), **options)
    without = values(2, lambda rank: body(rank, spoilt=False), **options)
    for mine, other in zip(spoilt, without, strict=True):
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1])
        assert mine[1].isfinite().all()
        assert mine[1].any() or isinstance(compression, PowerSGD), "there was something to owe"
    assert [dropped for *_, dropped in spoilt] == [0, 1]
    assert [dropped for *_, dropped in without] == [0, 0]


def test_a_sum_that_is_not_finite_of_gradients_that_are_is_dropped_by_all() -> None:
    """Nobody is to blame: nobody takes the step, and the next one is as always."""

    def body(rank: FaultyRank) -> Any:
        large, found = rank.averager.control.transfer.large, []

        def overflows(buffer: Any, *args: Any) -> Any:
            if len(found) == 1:
                buffer.fill_(math.inf)
            return all_reduce(buffer, *args)

        all_reduce = large.all_reduce
        large.all_reduce = overflows  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(3):
            found.append(take_step(rank, Window(rank.gradients), "whole", every(1.0 + rank.number), 1.0))
        return found, rank.gradients.rounds.dropped

    for found, dropped in values(2, body, module=Net, schedule=Synchronous()):
        assert found == [[1.5] * 5, [None] * 5, [1.5] * 5]
        assert dropped == 1


def test_a_scaler_sees_them() -> None:
    """Where one looks after gradients, it hears of them on all ranks, and lowers its scale."""

    def body(rank: FaultyRank) -> Any:
        rank.gradients.rounds.drops = False
        factors = every(math.inf if rank.number else 1.0)
        return take_step(rank, Window(rank.gradients), "in parts", factors, 1.0), rank.gradients.rounds.dropped

    assert values(2, body, module=Net, schedule=Synchronous()) == [([math.inf] * 5, 0)] * 2
