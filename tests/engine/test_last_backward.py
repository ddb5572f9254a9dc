"""Windows whose last backward pass sends as it goes, on in-process ranks, against plain means in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_async.algorithms import Synchronous
from lightning_async.algorithms.schedules import Action
from lightning_async.engine import backward
from lightning_async.engine.gradients import overlap
from lightning_async.engine.gradients.window import Window
from lightning_async.engine.shared_state import Arrival
from lightning_async.engine.timeouts import Timeouts
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, LIMIT_S, NEVER, PAYLOAD, FaultyRank, Turnstile, outcomes, values
from tests.engine.test_overlap import SHAPES, Crash, Net, every, few, grads

Batch = tuple[float, dict[int, float]]
"""Samples, and each parameter's gradient."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_FIRST_BYTES", 8)
    monkeypatch.setattr(backward, "_PART_BYTES", 48)
    monkeypatch.setattr(overlap, "_LINE", 1)


def on_ranks(world_size: int, body: Callable[[FaultyRank, Any, Window], Any], **options: Any) -> list[Any]:
    options = {"schedule": Synchronous(), **options}
    return values(world_size, lambda rank: begin(rank, body), module=Net, **options)


def begin(rank: FaultyRank, body: Callable[[FaultyRank, Any, Window], Any]) -> Any:
    rank.gradients.rounds.follows = True
    return body(rank, rank.module, Window(rank.gradients))


def passes(net: Any, factors: dict[int, float], scale: float = 1.0) -> None:
    if factors:
        net.loss(factors).mul(scale).backward()


def gather(net: Any, window: Window, batches: Sequence[Batch], scale: float = 1.0) -> None:
    for samples, factors in batches:
        passes(net, factors, scale)
        window.add_(samples, scale)


def leave_with(rank: FaultyRank, window: Window, batch: Batch, scale: float = 1.0) -> None:
    """The last batch: its pass sends as it goes."""
    samples, factors = batch
    assert window.leave_with(samples, scale)
    passes(rank.module, factors, scale)
    window.clear()
    rank.gradients.finish_last()


def take(rank: FaultyRank, net: Any, scale: float = 1.0) -> list[float | None]:
    """The gradients of the step that has arrived; they are none behind it."""
    rank.gradients.wait()
    rank.gradients.take_(scale)
    found = [None if g is None else g / scale for g in grads(net)]
    for p in net.p:
        p.grad = None
    rank.averager.tick(Action.GRADIENTS, 1.0)
    rank.gradients.stepped()
    return found


def mean_of(every: Sequence[Sequence[Batch]]) -> list[float | None]:
    """Over all samples of all ranks' windows."""
    batches = [batch for window in every for batch in window]
    total = sum(samples for samples, _ in batches)
    return [
        sum(n * factors.get(i, 0.0) for n, factors in batches) / total
        if any(i in factors for _, factors in batches)
        else None
        for i in range(len(SHAPES))
    ]


uses = st.dictionaries(st.integers(0, 4), st.integers(-3, 3).map(float), max_size=5)
windows = st.tuples(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 6.0]), uses), min_size=1, max_size=3), st.booleans()
)  # of each rank: its batches, and whether the last one's pass sends as it goes


@few
@given(steps=st.lists(st.tuples(windows, windows), min_size=1, max_size=4))
def test_whatever_windows_there_are_their_step_has_the_mean_over_all_samples(steps: Any) -> None:
    """Windows of unequal length and batches, with other parameters in each, some of which leave when they are full."""

    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        told, scale = [], 2.0**rank.number
        for both in steps:
            batches, early = both[rank.number]
            gather(net, window, batches[:-1] if early else batches, scale)
            if early:
                leave_with(rank, window, batches[-1], scale)
            else:
                rank.gradients.wait_until_free()
                assert window.leave()
            assert (window.batches, window.samples) == (0, 0.0)
            told.append(take(rank, net, scale))
        return told

    for found in on_ranks(2, body):
        for both, mine in zip(steps, found, strict=True):
            for gradient, mean in zip(mine, mean_of([batches for batches, _ in both]), strict=True):
                assert gradient == (None if mean is None else pytest.approx(mean, abs=1e-6))


@pytest.mark.parametrize(
    ("op", "name", "most"), [("all_reduce", PAYLOAD, 6), ("all_reduce", HEADER, 2), ("all_gather", HEADER, 8)]
)
def test_a_reduction_that_fails_within_the_last_pass_is_repeated(op: str, name: str, most: int) -> None:
    """After each of its operations; what the window has held goes with the pass again, as often as it must."""
    every_step = [[[(1.0, every(1.0 + r)), (3.0, {0: 2.0, 4: 5.0 + i})] for r in range(2)] for i in range(3)]

    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        told = []
        for both in every_step:
            gather(net, window, both[rank.number][:-1])
            leave_with(rank, window, both[rank.number][-1])
            told.append(take(rank, net))
        assert rank.meet() is Arrival.OPEN
        return told

    for nth in range(1, most + 1):
        script = [Fault(op=op, nth=nth, action=Fail(after=True), name=name)]
        for told in on_ranks(2, body, scripts={0: script}):
            assert told == [pytest.approx(mean_of(both)) for both in every_step], nth


def test_one_that_dies_within_the_last_pass_is_done_without() -> None:
    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        gather(net, window, [(1.0, every(1.0 + rank.number))])
        if rank.number == 1:

            def crash(_: Tensor) -> None:
                raise Crash

            net.p[1].register_hook(crash)
        leave_with(rank, window, (1.0, every(4.0)))
        found = take(rank, net)
        assert rank.meet() is Arrival.OPEN
        return found

    ended = outcomes(3, lambda rank: begin(rank, body), module=Net, min_replicas=1, schedule=Synchronous())
    assert isinstance(ended[1].error, Crash), ended[1].error
    for number in (0, 2):
        assert ended[number].error is None, ended[number].error
        assert ended[number].value == [3.0] * len(SHAPES)


def test_a_last_pass_that_fails_and_is_caught_leaves_the_window_as_it_was() -> None:
    """The same batch comes again, and the window is that of before and of this batch, once."""

    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        gather(net, window, [(1.0, every(1.0))])
        if rank.number == 1:

            def crash(_: Tensor) -> None:
                raise Crash

            hook = net.p[1].register_hook(crash)
            assert window.leave_with(1.0)
            with pytest.raises(Crash):
                passes(net, every(100.0))
            rank.gradients.withdraw()
            hook.remove()
            net.zero_grad(set_to_none=True)
            rank.gradients.wait()
            assert (window.batches, window.samples) == (1, 1.0)
        leave_with(rank, window, (3.0, every(2.0 + rank.number)))
        return take(rank, net)

    assert on_ranks(2, body) == [pytest.approx([(1.0 + 1.0 + 6.0 + 9.0) / 8] * len(SHAPES))] * 2


def test_a_checkpoint_holds_a_window_that_has_left_with_its_last_pass() -> None:
    """As of one that has left when it was full; and while the pass is under way, what there was before it."""
    turn = Turnstile()

    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        gather(net, window, [(1.0, every(1.0))])
        if rank.number == 1:  # it comes when rank 0 has told
            turn.wait("told")
            leave_with(rank, window, (1.0, every(1.0)))
            return take(rank, net)
        assert window.leave_with(3.0)
        passes(net, {0: 2.0})
        within = window.state_dict()
        window.clear()
        rank.gradients.finish_last()
        behind = window.state_dict()
        turn.set("told")
        take(rank, net)
        empty = window.state_dict()
        return [[each["samples"], each["sum"].tolist(), each["used"].tolist()] for each in (within, behind, empty)]

    told, _ = on_ranks(2, body)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    ones, rest = [1.0] * sum(sizes), sum(sizes) - sizes[0]
    assert told[0] == [1.0, ones, [1.0] * 5]
    assert told[1] == [4.0, [7.0] * sizes[0] + [1.0] * rest, [1.0] * 5]
    assert told[2] == [0.0, [0.0] * sum(sizes), [0.0] * 5]


def test_who_is_late_within_the_last_pass_takes_the_step_of_the_others_first() -> None:
    """Its own gradients, which lie where that step's are to be, wait in the bucket, and go with the next step; of a
    parameter that only it has used there is none in that step."""
    timeouts = Timeouts(payload=timedelta(seconds=2), grace=timedelta(seconds=1), reform=timedelta(seconds=60))
    turn = Turnstile()

    def body(rank: FaultyRank, net: Any, window: Window) -> Any:
        others = dict.fromkeys(range(1, 5), 1.0)
        gather(net, window, [(1.0, every(1.0) if rank.number else others)])
        if rank.number == 0:
            leave_with(rank, window, (1.0, dict.fromkeys(others, 3.0)))
            first = take(rank, net)
            turn.set("without rank 1")
            leave_with(rank, window, (2.0, every(7.0)))
            return first, take(rank, net)
        buckets = rank.averager.control.buckets

        def wait(_: Tensor) -> None:
            turn.wait("without rank 1")
            with rank.averager.control.shared_state.changed:
                assert rank.averager.control.shared_state.changed.wait_for(lambda: buckets.arrived is not None, LIMIT_S)

        net.p[1].register_hook(wait)
        leave_with(rank, window, (1.0, {0: 5.0, 1: 5.0}))
        return take(rank, net), take(rank, net)

    zero, one = on_ranks(2, body, timeouts=timeouts, schedule=NEVER)
    assert zero == one
    assert zero[0] == [None, 2.0, 2.0, 2.0, 2.0]
    assert zero[1] == pytest.approx([(2 * 7.0 + 1.0 + 5.0) / 4] * 2 + [(2 * 7.0 + 1.0) / 4] * 3)
