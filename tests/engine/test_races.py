"""Replicas at their own pace: random schedules, and orders of events that are rare."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import DeltaMean, DiLoCo, EveryNSteps, Synchronous, Warmup
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, NEVER, PAYLOAD, FaultyRank, values

few = settings(
    max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)  # fmt: skip


@pytest.fixture(params=[5e-3, 1e-5], ids=["usual", "eager"])
def switching(request: pytest.FixtureRequest) -> Iterator[None]:
    """How often the interpreter changes threads: 1e-5 s finds orders that are rare otherwise."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


def own_pace(plans: list[tuple[int, int]]):
    """Every rank takes its number of steps, asks for a validation every so many of them (0: never), and ends."""

    def body(rank: FaultyRank) -> dict[str, Any]:
        steps, every = plans[rank.number]
        samples, seen, averager = 0.0, [], rank.averager

        def validate() -> None:
            arrival = rank.meet(SyncPointKind.VALIDATE)
            assert arrival is Arrival.OPEN, arrival
            seen.append(rank.x.clone())

        for i in range(steps):
            size = 1.0 + (i + rank.number) % 3
            rank.train(1, samples=size)
            samples += size
            if Vote.VALIDATE in averager.sync_points.agreed or (every and (i + 1) % every == 0):
                validate()
        while (arrival := rank.meet(SyncPointKind.TRAIN_END)) is not Arrival.OPEN:
            assert arrival is Arrival.VALIDATE, arrival
            validate()
        return {
            "x": rank.x.clone(),
            "seen": seen,
            "samples": samples,
            "work": rank.ledger.work(),
            "state": {name: t.clone() for name, t in rank.rule_state.items()},
        }

    return body


def assert_one_model(ended: list[dict[str, Any]], validations: bool = True) -> None:
    first = ended[0]
    for each in ended[1:]:
        assert torch.equal(each["x"], first["x"])
        if validations:
            assert len(each["seen"]) == len(first["seen"])
            for mine, theirs in zip(each["seen"], first["seen"], strict=True):
                assert torch.equal(mine, theirs)
        for name, tensor in first["state"].items():
            assert torch.equal(tensor, each["state"][name]), name
    assert torch.isfinite(first["x"]).all()


plans = st.lists(st.tuples(st.integers(0, 25), st.sampled_from([0, 0, 3, 7])), min_size=1, max_size=4)


@few
@given(plans=plans, period=st.integers(1, 6), overlap=st.booleans(), rule=st.sampled_from([DeltaMean(), DiLoCo()]))
def test_any_pace_ends_in_one_model_and_counts_every_sample_once(switching, plans, period, overlap, rule) -> None:
    ended = values(len(plans), own_pace(plans), schedule=EveryNSteps(period), overlap=overlap, rule=rule)
    assert_one_model(ended)
    total = sum(each["samples"] for each in ended)
    assert [each["work"] for each in ended] == [total] * len(plans)


@few
@given(
    plans=st.lists(st.tuples(st.integers(0, 25), st.sampled_from([0, 5])), min_size=2, max_size=4),
    overlap=st.booleans(),
    culprit=st.integers(0, 1),
    faults=st.lists(
        st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=3,
    ),
)
def test_failed_rounds_at_any_pace_end_in_one_model(switching, plans, overlap, culprit, faults) -> None:
    script = [
        Fault(op=op, nth=nth, action=Fail(after=after), name=PAYLOAD if op == "all_reduce" else HEADER)
        for op, nth, after in faults
    ]
    ended = values(len(plans), own_pace(plans), schedule=EveryNSteps(3), overlap=overlap, scripts={culprit: script})
    assert_one_model(ended, validations=False)  # see the next test


def test_a_sync_point_opens_on_all_ranks_or_on_none() -> None:
    def body(rank: FaultyRank) -> list[Arrival]:
        rank.train(3)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        arrivals = []
        while not arrivals or arrivals[-1] is not Arrival.OPEN:
            arrivals.append(rank.meet(SyncPointKind.TRAIN_END))
            if arrivals[-1] is Arrival.VALIDATE:
                rank.meet(SyncPointKind.VALIDATE)
        return arrivals

    for nth in (3, 4, 5):  # which header opens the sync point depends on who came first
        script = [Fault(op="all_gather", nth=nth, action=Fail(after=True), name=HEADER)]
        assert values(2, body, schedule=NEVER, scripts={1: script}) == [[Arrival.OPEN]] * 2


@few
@given(plans=st.lists(st.tuples(st.integers(0, 15), st.sampled_from([0, 4])), min_size=2, max_size=3))
def test_synchronous_steps_with_unequal_replicas_end_in_one_model(switching, plans) -> None:
    assert_one_model(values(len(plans), own_pace(plans), schedule=Synchronous()))


@few
@given(
    steps=st.integers(0, 20),
    world_size=st.integers(1, 3),
    warm=st.integers(1, 8),
    rule=st.sampled_from([DeltaMean(), DiLoCo()]),
)
def test_a_warm_up_on_equal_replicas_ends_in_one_model(switching, steps, world_size, warm, rule) -> None:
    schedule = Warmup(EveryNSteps(3), steps=warm)
    assert_one_model(
        values(world_size, own_pace([(steps, 0)] * world_size), schedule=schedule, overlap=True, rule=rule)
    )


@few
@given(
    plans=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0, 0, 5])), min_size=2, max_size=3),
    warm=st.integers(1, 8),
    overlap=st.booleans(),
    rule=st.sampled_from([DeltaMean(), DiLoCo()]),
    faults=st.lists(st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 20)), max_size=2),
)
def test_a_warm_up_on_unequal_replicas_ends_in_one_model(switching, plans, warm, overlap, rule, faults) -> None:
    names = {"all_reduce": PAYLOAD, "all_gather": HEADER}
    script = [Fault(op=op, nth=nth, action=Fail(after=True), name=names[op]) for op, nth in faults]
    schedule = Warmup(EveryNSteps(3), steps=warm)
    ended = values(len(plans), own_pace(plans), schedule=schedule, overlap=overlap, rule=rule, scripts={0: script})
    assert_one_model(ended, validations=not faults)


@few
@given(steps=st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_a_consensus_is_the_mean_weighted_by_work(switching, steps) -> None:
    def body(rank: FaultyRank) -> Any:
        samples = 1.0 + rank.number
        rank.train(steps[rank.number], samples=samples)
        mine = rank.x.double().clone()
        assert rank.meet() is Arrival.OPEN
        return steps[rank.number] * samples, mine, rank.x.clone()

    ended = values(len(steps), body, schedule=NEVER)
    total = sum(work for work, _, _ in ended)
    expected = sum(work * x for work, x, _ in ended) / total if total else ended[0][1]
    for _, _, x in ended:
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-6)


def test_many_sync_points_in_a_row(switching) -> None:
    def body(rank: FaultyRank) -> Any:
        seen = []
        for epoch in range(25):
            rank.train(1 + (epoch + rank.number) % 3)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            assert rank.meet(SyncPointKind.EPOCH_END, epoch) is Arrival.OPEN
            seen.append(rank.x.clone())
        return seen

    for overlap in (False, True):
        first, *others = values(3, body, schedule=EveryNSteps(2), overlap=overlap)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_vote_at_the_last_sync_point_is_the_same_for_all(switching) -> None:
    """Told to stop in the instant in which training ends: all leave by the same sync point."""

    def body(rank: FaultyRank) -> Any:
        rank.train(3)
        if rank.number == 0:
            rank.averager.sync_points.request_stop()
        arrival = rank.meet(SyncPointKind.TRAIN_END)
        if arrival is Arrival.STOP:
            assert rank.meet(SyncPointKind.STOP) is Arrival.OPEN
        return arrival, rank.x.clone()

    for _ in range(15):
        (first, a), (second, b), (third, c) = values(3, body, schedule=NEVER)
        assert first is second is third
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_nothing_is_left_behind() -> None:
    before = {thread.name for thread in threading.enumerate()}
    values(3, own_pace([(9, 0), (4, 0), (0, 0)]), overlap=True)
    names = {thread.name for thread in threading.enumerate()} - before
    assert not any("rounds" in name or "heartbeat" in name for name in names), names
