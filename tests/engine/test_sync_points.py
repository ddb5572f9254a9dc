"""Sync points more often than rounds: a consensus is no outer step, and the clock of rounds goes on over it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_async.algorithms import EASGD, DeltaMean, DiLoCo, EveryNSteps
from lightning_async.algorithms.schedules import Action, ReplicaClock
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, LIMIT_S, NEVER, PAYLOAD, FaultyRank, Turnstile, values
from tests.engine.ranks import Rank, bits, run


def in_stretches(steps: int, every: int | None):
    """Train ``steps`` steps, with a sync point after every so many of them."""

    def body(rank: Rank) -> Any:
        for i in range(steps):
            rank.train(1)
            if every and (i + 1) % every == 0:
                assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
                rank.averager.sync_points.resume()
        summary = rank.averager.summary
        return rank.x.clone(), rank.averager.state_dict()["rule_state"], summary.rounds, summary.consensuses

    return body


@pytest.mark.parametrize("rule", [DiLoCo(), DeltaMean()], ids=["DiLoCo", "DeltaMean"])
@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapped"])
@pytest.mark.parametrize("every", [1, 5, 6, 8])
def test_sync_points_neither_take_nor_add_rounds(rule, overlap, every) -> None:
    left, right = run(2, in_stretches(72, every), rule=rule, schedule=EveryNSteps(8), config={"overlap": overlap})
    for _, _, rounds, _ in (left, right):
        if not overlap or every == 8:  # else the last round may still be under way
            assert rounds == 9
        assert rounds in (8, 9)
    if not overlap or every == 8:
        assert torch.equal(left[0], right[0])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("every", [5, 6])
def test_replicas_that_agree_end_where_they_end_without_sync_points(world_size, every) -> None:
    goals, config = [0.2] * world_size, {"overlap": False}
    options: dict[str, Any] = {"rule": DiLoCo(), "schedule": EveryNSteps(8), "goals": goals, "config": config}
    without = run(world_size, in_stretches(72, None), **options)
    gated = run(world_size, in_stretches(72, every), **options)
    for (x, state, rounds, _), (x2, state2, rounds2, consensuses) in zip(without, gated, strict=True):
        assert rounds == rounds2 == 9
        assert torch.equal(bits(x), bits(x2))
        for name, tensor in state.items():
            assert torch.equal(bits(tensor), bits(state2[name])), name
        assert consensuses == 0, "where all hold the same bits, nothing is exchanged"


def test_a_round_after_a_sync_point_weighs_the_work_since_and_learns_all_the_anchor_lacks() -> None:
    """Anchor 1; A .88 after 6 steps and B .94 after 3; the sync point shows .90; two steps each: .86 and .88."""
    expected = {"DiLoCo": 1 - 0.7 * (0.13 + 0.9 * 0.13), "DeltaMean": 0.87}
    for rule in (DiLoCo(), DeltaMean()):

        def body(rank: Rank) -> Any:
            steps, speed = ((6, 0.02), (3, 0.02))[rank.averager.summary.rank]
            move(rank, steps, speed)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            shown = rank.x.clone()
            rank.averager.sync_points.resume()
            move(rank, 2, (0.02, 0.01)[rank.averager.summary.rank], last=Action.ROUND)
            return shown, rank.x.clone()

        for shown, after in run(2, body, rule=rule, schedule=NEVER, config={"overlap": False}):
            torch.testing.assert_close(shown, torch.full((1, 8), 0.90), atol=1e-6, rtol=0)
            torch.testing.assert_close(after, torch.full((1, 8), expected[type(rule).__name__]), atol=1e-6, rtol=0)


def move(rank: Rank, steps: int, by: float, last: Action = Action.LOCAL) -> None:
    for i in range(steps):
        rank.averager.plan()
        rank.x.sub_(by)
        rank.averager.tick(last if i == steps - 1 else Action.LOCAL, 1.0)


def test_what_no_work_is_counted_for_is_brought_by_one_for_all() -> None:
    """A round that is due right after a sync point: replicas agree, the anchor has yet to learn of it."""

    def body(rank: Rank) -> Any:
        move(rank, 4, 0.1)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        rank.averager.sync_points.resume()
        rank.averager.tick(Action.ROUND, 1.0, stepped=False)  # mixed precision skips a step
        return rank.x.clone(), rank.averager.summary.rounds

    for x, rounds in run(2, body, rule=DiLoCo(), schedule=NEVER, config={"overlap": False}):
        assert rounds == 1
        torch.testing.assert_close(x, torch.full((1, 8), 1 - 0.7 * 0.4 * 1.9))


def test_seconds_go_on_over_sync_points() -> None:
    class Noted:
        seconds: list[float]

        def __init__(self) -> None:
            self.seconds = []

        def next(self, clock: ReplicaClock) -> Action:
            self.seconds.append(clock.seconds_since_round)
            return Action.LOCAL

    schedules = [Noted(), Noted()]

    def body(rank: Rank) -> None:
        rank.averager.schedule = schedules[rank.averager.summary.rank]
        for _ in range(5):
            rank.train(2)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN

    run(2, body)
    for each in schedules:
        assert each.seconds == sorted(each.seconds), "a gate sets the time since the last round back"


@pytest.mark.parametrize("stops", [False, True])
def test_a_consensus_that_fails_leaves_no_message_behind(stops) -> None:
    """What a replica had packed on its way to it does not go out with what the consensus left in the bucket."""

    turn, sent = Turnstile(), []

    def body(rank: FaultyRank) -> Any:
        server, averager = rank.averager.control._loop, rank.averager
        recover = server._recover

        def recover_and_stop(error: Any) -> None:
            if stops:
                averager.sync_points.request_stop()
                averager.sync_points.vote(Vote.STOP)
            recover(error)

        server._recover = recover_and_stop
        rank.train(3)
        mine = rank.x.clone()
        if rank.number == 0:
            sent.append(rank.ledger.message_sent)
            turn.set("here")
        else:  # the other one waits at the sync point, and has said what it brings along
            turn.wait("here")
            rank.averager.sync_points.vote(Vote.END)
            assert sent[0].wait(LIMIT_S)
        arrival = rank.meet(SyncPointKind.EPOCH_END)
        if arrival is Arrival.STOP:
            turn.event("never").wait(0.3)  # as long as a large model takes
            assert rank.meet(SyncPointKind.STOP) is Arrival.OPEN
        return mine, rank.x.clone(), rank.rule_state["anchor"].clone(), averager.summary.rounds

    script = [Fault(op="all_reduce", nth=1, action=Fail(after=True), name=PAYLOAD)]
    ended = values(2, body, scripts={1: script}, rule=DiLoCo(outer_lr=0.7), schedule=NEVER, overlap=True)
    mean = (ended[0][0] + ended[1][0]) / 2
    for _, x, anchor, rounds in ended:
        assert rounds == 0
        assert torch.equal(anchor, torch.ones(8)), "a gate is no outer step"
        torch.testing.assert_close(x, mean)


def test_the_bell_of_a_vote_outlives_the_header_that_failed() -> None:
    """No sync point, no round: nothing else would ask the other rank for a header."""

    def body(rank: FaultyRank) -> bool:
        averager = rank.averager
        if rank.number == 0:
            averager.sync_points.request_stop()
        deadline = time.monotonic() + LIMIT_S
        while Vote.STOP not in averager.sync_points.agreed and time.monotonic() < deadline:
            rank.train(1)
            never.wait(0.001)  # a step takes time
        agreed = Vote.STOP in averager.sync_points.agreed
        rank.meet(SyncPointKind.STOP)
        return agreed

    never = threading.Event()
    for after in (False, True):
        script = [Fault(op="all_gather", nth=1, action=Fail(after=after), name=HEADER)]
        assert values(2, body, scripts={1: script}, schedule=NEVER) == [True, True]


def test_what_was_packed_is_what_is_sent(monkeypatch) -> None:
    """A round in which this replica is absent does not land in a bucket that it has just packed."""
    from lightning_async.engine.averaging.rounds import AveragingComponent
    from lightning_async.engine.buckets import Buckets

    packed: dict[int, float] = {}
    announced: list[bool] = []
    used, announce = Buckets.used, AveragingComponent._announce

    @contextmanager
    def noted_use(self: Buckets, message: Any = None) -> Iterator[None]:
        with used(self, message):
            yield
            if message is not None:
                packed[id(self)] = self.sent[0].item()

    def noted_announce(self: AveragingComponent, message: Any) -> None:
        announced.append(self._buckets.sent[0].item() == packed[id(self._buckets)])
        announce(self, message)

    monkeypatch.setattr(Buckets, "used", noted_use)
    monkeypatch.setattr(AveragingComponent, "_announce", noted_announce)

    def body(rank: FaultyRank) -> None:
        for epoch in range(20):
            rank.train(3 if rank.number else 12)
            while rank.meet(SyncPointKind.EPOCH_END, epoch) is not Arrival.OPEN:
                pass

    values(2, body, schedule=EveryNSteps(2), overlap=True, rule=DiLoCo(outer_lr=0.7, outer_momentum=0.0))
    assert len(announced) > 20
    assert all(announced)


class TwoOfEight:
    """Six local steps with a round after every second one, then two synchronous steps."""

    def next(self, clock: ReplicaClock) -> Action:
        if clock.step % 8 >= 6:
            return Action.GRADIENTS
        return Action.ROUND if clock.steps_since_round >= 1 else Action.LOCAL


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", [DeltaMean(), DiLoCo(), EASGD()], ids=["DeltaMean", "DiLoCo", "EASGD"])
def test_a_schedule_may_go_back_to_synchronous_steps(rule, overlap) -> None:
    def body(rank: Rank) -> Any:
        seen = []
        for i in range(64):
            rank.train(1)
            if i % 8 >= 6:
                seen.append(rank.x.clone())
        assert rank.meet() is Arrival.OPEN
        return seen, rank.x.clone(), rank.averager.summary.synchronous_steps

    (seen, x, steps), (seen2, x2, steps2) = run(2, body, schedule=TwoOfEight(), rule=rule, config={"overlap": overlap})
    assert steps == steps2 == 16
    assert torch.equal(x, x2)
    for mine, theirs in zip(seen, seen2, strict=True):
        assert torch.equal(mine, theirs), "synchronous steps are taken from one model"


def test_going_back_to_synchronous_steps_while_others_wait_or_validate() -> None:
    def body(rank: FaultyRank) -> Any:
        validations = 0
        for _ in range(16 if rank.number else 5):
            rank.train(1)
            if Vote.VALIDATE in rank.averager.sync_points.agreed or (rank.number and rank.averager.step == 5):
                assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
                rank.averager.sync_points.resume()
                validations += 1
        while (arrival := rank.meet(SyncPointKind.TRAIN_END)) is not Arrival.OPEN:
            assert arrival is Arrival.VALIDATE
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            validations += 1
        return rank.x.clone(), validations

    (a, left), (b, right), (c, third) = values(3, body, schedule=TwoOfEight())
    assert left == right == third >= 1
    assert torch.equal(a, b)
    assert torch.equal(a, c)
