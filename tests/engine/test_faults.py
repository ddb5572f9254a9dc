"""The engine under scripted faults, on in-process ranks."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.algorithms import DeltaMean, DiLoCo, EveryNSteps, Synchronous, Warmup
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import AsyncTrainingError, CollectiveError, GateMismatch, LayoutMismatch, PeerLost
from tests.comm.faulty import Delay, Fail, Fault, Hang, Kill
from tests.engine.fault_ranks import HEADER, LIMIT_S, NEVER, PAYLOAD, FaultyRank, Turnstile, outcomes, values

RULES = [pytest.param(DeltaMean(), id="DeltaMean"), pytest.param(DiLoCo(), id="DiLoCo")]


def train_and_meet(rank: FaultyRank, steps: int = 12) -> dict[str, Any]:
    rank.train(steps)
    assert rank.meet() is Arrival.OPEN
    return {"x": rank.x.clone(), "state": rank.rule_state, "summary": rank.averager.summary}


def assert_alike(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    """Weights and rule state of all ranks, to the bit."""
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a["x"], b["x"]), (a["x"], b["x"])
        assert a["state"].keys() == b["state"].keys()
        for name, tensor in a["state"].items():
            assert torch.equal(tensor, b["state"][name]), name


# ---- a round that fails ----


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("world_size", "culprit", "nth"), [(2, 0, 1), (2, 1, 2), (3, 1, 2)])
def test_a_failed_payload_is_repeated_and_changes_nothing(rule, after, world_size, culprit, nth) -> None:
    smooth = values(world_size, train_and_meet, rule=rule)
    script = [Fault(op="all_reduce", nth=nth, action=Fail(after=after), name=PAYLOAD)]
    rough = values(world_size, train_and_meet, rule=rule, scripts={culprit: script})
    for each in rough:
        assert each["summary"].failed_rounds == 1
        assert each["summary"].rounds == 3
    assert_alike(rough, smooth)


@pytest.mark.parametrize("rule", RULES)
def test_a_header_that_fails_is_repeated(rule) -> None:
    smooth = values(2, train_and_meet, rule=rule)
    for after in (False, True):
        script = [Fault(op="all_gather", nth=3, action=Fail(after=after), name=HEADER)]
        rough = values(2, train_and_meet, rule=rule, scripts={1: script})
        assert [each["summary"].failed_rounds for each in rough] == [1, 1]
        assert_alike(rough, smooth)


def test_a_header_that_fails_keeps_no_rank_from_packing_that_had_nothing_to_send() -> None:
    """It was rung for. Where that header fails, the next one is served at once, and not after `grace`, which is longer
    than what these ranks wait for."""

    turn = Turnstile()

    def body(rank: FaultyRank) -> Any:
        if rank.number == 0:
            rank.train(4)
            rank.averager.control._loop._ring_for_this()  # as for a training thread that is silent for long
            turn.wait("trained")
        else:
            rank.averager.sync_points.wait(lambda: rank.averager._box.failed > 0)
            rank.train(4)
            turn.set("trained")
        rank.meet()
        return rank.averager.summary.failed_rounds

    script = [Fault(op="all_gather", nth=1, name=HEADER)]
    assert values(2, body, scripts={1: script}, each={0: {"overlap": True}}) == [1, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_loses_the_last_answer_catches_up(rule, culprit, caplog) -> None:
    smooth = values(3, train_and_meet, rule=rule)
    caplog.set_level(logging.WARNING, "lightning_async")
    script = [Fault(op="all_gather", nth=4, action=Fail(after=True), name=HEADER)]  # the second round's commit
    rough = values(3, train_and_meet, rule=rule, scripts={culprit: script})
    assert f"Rank {culprit}: round 2 was committed elsewhere" in caplog.text
    assert_alike(rough, smooth)
    assert [each["summary"].rounds for each in rough] == [3, 3, 3]


def test_a_round_that_is_caught_up_with_tells_what_it_took() -> None:
    def body(rank: FaultyRank) -> list[float]:
        summary, after = rank.averager.summary, [0.0]

        def note(step: int) -> None:
            if summary.rounds == len(after):
                after.append(summary.exchange_s)

        rank.train(12, each=note)
        assert rank.meet() is Arrival.OPEN
        return after

    script = [Fault(op="all_gather", nth=4, action=Fail(after=True), name=HEADER)]  # the second round's commit
    for after in values(2, body, scripts={1: script}):
        assert len(after) == 4
        assert after == sorted(set(after)), after


def test_a_lost_commit_while_training_goes_on_keeps_all_replicas_equal() -> None:
    def body(rank: FaultyRank) -> Any:
        rank.train(40)
        rank.meet()
        return rank.x.clone(), rank.ledger.work()

    for nth in (2, 4, 5):
        script = [Fault(op="all_gather", nth=nth, action=Fail(after=True), name=HEADER)]
        (a, _), (b, _), (c, _) = values(3, body, scripts={2: script}, overlap=True, schedule=EveryNSteps(3))
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_consensus_that_fails_is_repeated() -> None:
    smooth = values(2, train_and_meet, schedule=NEVER)
    for after in (False, True):
        script = [Fault(op="all_reduce", nth=1, action=Fail(after=after), name=PAYLOAD)]
        rough = values(2, train_and_meet, schedule=NEVER, scripts={1: script})
        assert_alike(rough, smooth)
        assert [each["summary"].failed_rounds for each in rough] == [1, 1]


def test_synchronous_gradients_that_fail_are_repeated() -> None:
    smooth = values(2, train_and_meet, schedule=Synchronous())
    for op, name in (("all_reduce", PAYLOAD), ("all_gather", HEADER)):
        for nth in (3, 4):
            script = [Fault(op=op, nth=nth, action=Fail(after=True), name=name)]
            assert_alike(values(2, train_and_meet, schedule=Synchronous(), scripts={0: script}), smooth)


def test_a_payload_in_parts_that_fails_half_way_is_repeated() -> None:
    smooth = values(2, train_and_meet, numel=64, part_bytes=64)
    script = [Fault(op="all_reduce", nth=6, action=Fail(after=True), name=PAYLOAD)]  # of four parts the second
    assert_alike(values(2, train_and_meet, numel=64, part_bytes=64, scripts={0: script}), smooth)


def test_a_payload_that_hangs_is_repeated_after_its_deadline() -> None:
    timeouts = Timeouts(payload=timedelta(seconds=1), reform=timedelta(seconds=60))
    smooth = values(2, train_and_meet)
    script = [Fault(op="all_reduce", nth=2, action=Hang(), name=PAYLOAD)]
    started = time.monotonic()
    rough = values(2, train_and_meet, timeouts=timeouts, scripts={1: script})
    assert time.monotonic() - started < 30, "half of all other deadlines"
    assert_alike(rough, smooth)
    assert [each["summary"].failed_rounds for each in rough] == [1, 1]


def test_failure_after_failure_ends_with_one_clear_error() -> None:
    timeouts = Timeouts(payload=timedelta(seconds=30), reform=timedelta(seconds=60), attempts=3)
    script = [Fault(op="all_reduce", nth=n, action=Fail(text="no route"), name=PAYLOAD) for n in range(1, 9)]
    ended = outcomes(3, train_and_meet, timeouts=timeouts, scripts={1: script})
    for outcome in ended:
        assert isinstance(outcome.error, AsyncTrainingError), outcome
    assert isinstance(ended[1].error, CollectiveError)
    for part in ("Rank 1: round 1 failed 3 times in a row", "no route", "Timeouts"):
        assert part in str(ended[1].error)


def test_failures_far_apart_do_not_add_up() -> None:
    timeouts = Timeouts(payload=timedelta(seconds=30), reform=timedelta(seconds=60), attempts=2)
    script = [Fault(op="all_reduce", nth=n, action=Fail(), name=PAYLOAD) for n in (1, 3, 5)]
    ended = values(2, train_and_meet, timeouts=timeouts, scripts={0: script})
    assert [each["summary"].failed_rounds for each in ended] == [3, 3]
    assert_alike(ended, values(2, train_and_meet))


# ---- a rank that fails ----


@pytest.mark.parametrize("where", ["tick", "blocking round", "sync_point", "gradients"])
def test_a_rank_that_raises_ends_all_others_with_its_name_and_text(where: str) -> None:
    turn = Turnstile()

    def body(rank: FaultyRank) -> None:
        rank.train(8)
        if rank.number == 1:
            turn.wait("others go on")
            raise ValueError("the data ran dry")
        turn.set("others go on")
        if where == "sync_point":
            rank.meet()
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            rank.train(1)
        raise AssertionError("went on without rank 1")

    schedule = Synchronous() if where == "gradients" else NEVER if where in ("tick", "sync_point") else EveryNSteps(4)
    ended = outcomes(3, body, schedule=schedule, overlap=where == "tick")
    for number in (0, 2):
        error = ended[number].error
        assert isinstance(error, PeerLost), error
        assert "rank 1 failed: ValueError: the data ran dry" in str(error)
        assert 1 in error.ranks


def test_a_silent_rank_is_named_by_all_others() -> None:
    """Its heartbeats end without a word, as after kill -9."""
    turn = Turnstile()

    def body(rank: FaultyRank) -> None:
        rank.train(4)
        if rank.number == 1:
            rank.membership._heartbeat_thread._stop = True  # the heartbeat thread ends
            turn.wait("the others know")
            return
        try:
            rank.meet()
        finally:
            turn.set("the others know")

    ended = outcomes(3, body, dead_after=timedelta(seconds=1.5))
    for number in (0, 2):
        error = ended[number].error
        assert isinstance(error, PeerLost), error
        assert "rank 1 was last seen" in str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_whose_connections_break_and_whose_heartbeats_end_is_lost(world_size: int) -> None:
    """As after kill -9: nobody goes on without it."""

    def body(rank: FaultyRank) -> None:
        for _ in range(4000):
            rank.train(1)

    script = [Fault(op="all_reduce", nth=2, action=Kill(), name=PAYLOAD)]
    ended = outcomes(world_size, body, scripts={1: script}, dead_after=timedelta(seconds=1.5))
    for number in {0, world_size - 1} - {1}:
        error = ended[number].error
        assert isinstance(error, PeerLost), error
        assert "rank 1" in str(error)


def test_a_layout_that_differs_raises_on_every_rank() -> None:
    for schedule in (EveryNSteps(4), NEVER, Synchronous()):
        ended = outcomes(3, train_and_meet, schedule=schedule, each={2: {"numel": 9}})
        for outcome in ended:
            assert isinstance(outcome.error, LayoutMismatch), outcome.error


def test_closing_while_the_groups_are_re_formed_does_not_wait() -> None:
    turn = Turnstile()

    class Failure(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "round 1 failed" in record.getMessage():
                turn.set("a round has failed")

    def body(rank: FaultyRank) -> float:
        if rank.number == 1:
            rank.averager.close()  # lives, but serves no more
            turn.wait("rank 0 has closed")
            return 0.0
        rank.train(1)
        turn.wait("a round has failed")
        started = time.monotonic()
        rank.averager.close(timedelta(seconds=20))
        turn.set("rank 0 has closed")
        return time.monotonic() - started

    log, handler = logging.getLogger("lightning_async"), Failure()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        script = [Fault(op="all_gather", nth=1, action=Fail(), name=HEADER)]
        timeouts = Timeouts(reform=timedelta(seconds=40), attempts=1000)
        took, _ = values(2, body, schedule=EveryNSteps(1), overlap=True, scripts={0: script}, timeouts=timeouts)
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
    assert took < 10.0, "half of what it may wait"


# ---- late and absent ranks ----


def test_a_rank_that_is_late_for_the_header_is_no_failure() -> None:
    timeouts = Timeouts(payload=timedelta(seconds=1), reform=timedelta(seconds=60))

    def begin_late(rank: FaultyRank) -> dict[str, Any]:
        time.sleep(2.5 * rank.number)
        return train_and_meet(rank)

    smooth = values(2, train_and_meet)
    rough = values(2, begin_late, timeouts=timeouts)
    assert [value["summary"].failed_rounds for value in rough] == [0, 0]
    assert_alike(rough, smooth)


def test_an_answer_to_the_commit_may_take_longer_than_a_part_of_the_payload() -> None:
    """A rank may be behind by the last part, which has a deadline of its own."""
    script = [Fault(op="all_gather", nth=2, action=Delay(3.0), name=HEADER)]
    smooth = values(2, train_and_meet)
    rough = values(2, train_and_meet, timeouts=Timeouts(payload=timedelta(seconds=2)), scripts={1: script})
    assert [value["summary"].failed_rounds for value in rough] == [0, 0]
    assert_alike(rough, smooth)


def stalling(steps_before: int, rounds_missed: int, turn: Turnstile, times: list[float]):
    """Rank 2 stalls after some steps of two per round, and comes back when the others have gone on."""

    def body(rank: FaultyRank) -> dict[str, Any]:
        if rank.number == 2:
            rank.train(steps_before)
            turn.wait("the others went on")
            rank.train(2 - steps_before % 2)
        else:
            for _ in range(rounds_missed):
                started = time.monotonic()
                rank.train(2)
                times.append(time.monotonic() - started)
            turn.set("the others went on")
            rank.train(2)
        rank.meet()
        return {"x": rank.x.clone(), "work": rank.ledger.work(), "summary": rank.averager.summary}

    return body


@pytest.mark.parametrize("rounds_missed", [1, 3])
def test_rounds_go_on_without_a_stalled_rank_and_it_keeps_its_progress(rounds_missed: int) -> None:
    timeouts = Timeouts(grace=timedelta(seconds=3), reform=timedelta(seconds=60))
    ended = values(3, stalling(1, rounds_missed, Turnstile(), []), schedule=EveryNSteps(2), timeouts=timeouts)
    lr, first, x, stalled = 0.1, 1.0, [1.0, 1.0], 1.0
    stalled -= lr * (stalled - 2.0)
    for _ in range(rounds_missed):
        for rank in (0, 1):
            for _ in range(2):
                x[rank] -= lr * (x[rank] - rank)
        x = [sum(x) / 2] * 2
    stalled -= lr * (stalled - 2.0)
    stalled += x[0] - first
    for rank in (0, 1):
        for _ in range(2):
            x[rank] -= lr * (x[rank] - rank)
    agreed = (sum(x) + stalled) / 3
    for each in ended:
        torch.testing.assert_close(each["x"], torch.full((1, 8), agreed), rtol=0, atol=1e-6)
        assert torch.equal(each["x"], ended[0]["x"])
        assert each["work"] == 4 * (rounds_missed + 1) + 2
        assert each["summary"].failed_rounds == 0


def test_a_stalled_rank_holds_the_others_up_once_not_every_round() -> None:
    timeouts = Timeouts(grace=timedelta(seconds=3), reform=timedelta(seconds=60))
    times: list[float] = []
    values(3, stalling(1, 4, Turnstile(), times), schedule=EveryNSteps(2), timeouts=timeouts)
    assert sorted(times)[len(times) // 2] < 1.5, times  # half the grace


# ---- numbers that are not finite ----


def poisoned(sync_point: SyncPointKind, at: int, who: tuple[int, ...], steps: int = 8):
    def body(rank: FaultyRank) -> Any:
        rank.train(at)
        if rank.number in who:
            rank.x.fill_(float("nan"))
        rank.train(steps - at)
        assert rank.meet(sync_point) is Arrival.OPEN
        return rank.x.clone()

    return body


def test_a_replica_that_is_not_finite_is_left_out_and_healed(caplog) -> None:
    caplog.set_level(logging.WARNING, "lightning_async")
    a, b, c = values(3, poisoned(SyncPointKind.TRAIN_END, 5, (1,)))
    assert torch.isfinite(a).all()
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    warning = (
        "Rank 1: its parameters, buffers or optimizer state are not finite at step 8; it takes part in round 2 with"
    )
    assert caplog.text.count(warning) == 1


def test_a_replica_that_is_not_finite_does_not_poison_a_consensus() -> None:
    a, b, c = values(3, poisoned(SyncPointKind.VALIDATE, 5, (1,)), schedule=NEVER)
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    assert torch.isfinite(a).all()


@pytest.mark.parametrize("rule", RULES)
def test_replicas_of_which_none_is_finite_do_not_hang(rule) -> None:
    """No message of before is under way, from which one would be healed by the other, and that one by it."""
    for overlap in (False, True):
        turnstile = Turnstile()

        def body(rank: FaultyRank, turnstile: Turnstile = turnstile) -> Any:
            rank.train(5)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            rank.x.fill_(float("nan"))
            turnstile.set(f"poisoned {rank.number}")
            turnstile.wait(f"poisoned {1 - rank.number}")
            rank.train(15)
            assert rank.meet(SyncPointKind.TRAIN_END) is Arrival.OPEN
            return rank.x.clone()

        ended = values(2, body, rule=rule, overlap=overlap)
        assert all(x.isnan().all() for x in ended)


# ---- sync points ----


def test_a_validation_that_one_rank_asks_for_opens_on_all() -> None:
    def body(rank: FaultyRank) -> Any:
        averager, seen = rank.averager, []
        if rank.number == 0:
            rank.train(5)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            seen.append(rank.x.clone())
            rank.train(3)
        elif rank.number == 1:
            deadline = time.monotonic() + LIMIT_S
            while Vote.VALIDATE not in averager.sync_points.agreed and time.monotonic() < deadline:
                rank.train(1)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            seen.append(rank.x.clone())
            rank.train(3)
        else:  # it has no data
            while rank.meet(SyncPointKind.TRAIN_END) is Arrival.VALIDATE:
                assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
                seen.append(rank.x.clone())
            return seen, rank.x.clone()
        assert rank.meet(SyncPointKind.TRAIN_END) is Arrival.OPEN
        return seen, rank.x.clone()

    for overlap in (False, True):
        ended = values(3, body, overlap=overlap, schedule=NEVER)
        for seen, x in ended:
            assert len(seen) == 1
            assert torch.equal(seen[0], ended[0][0][0])
            assert torch.equal(x, ended[0][1])


def test_ranks_that_leave_early_do_so_with_one_model_although_one_has_asked_for_a_validation() -> None:
    def body(rank: FaultyRank) -> torch.Tensor:
        sync_points = rank.averager.sync_points
        rank.train(3)
        if rank.number == 1:
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.STOP
        else:
            sync_points.wait(lambda: Vote.VALIDATE in sync_points.agreed)
            sync_points.vote(Vote.STOP)
        assert rank.meet(SyncPointKind.STOP) is Arrival.OPEN
        return rank.x.clone()

    left, right = values(2, body, schedule=NEVER)
    assert torch.equal(left, right)


@pytest.mark.parametrize("sync_point", [SyncPointKind.EPOCH_END, SyncPointKind.TRAIN_END])
def test_a_rank_that_waits_joins_every_validation(sync_point: SyncPointKind) -> None:
    def body(rank: FaultyRank) -> int:
        joined = 0
        if rank.number == 0:
            rank.train(4)
            while (arrival := rank.meet(sync_point)) is not Arrival.OPEN:
                assert arrival is Arrival.VALIDATE
                assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
                joined += 1
            return joined
        for _ in range(5):
            rank.train(6)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        assert rank.meet(sync_point) is Arrival.OPEN
        return 5

    for overlap in (False, True):
        assert values(2, body, overlap=overlap) == [5, 5]


def test_the_first_round_of_a_vote_stops_all_ranks() -> None:
    turn = Turnstile()

    def body(rank: FaultyRank) -> Any:
        averager = rank.averager
        if rank.number == 0:
            rank.train(5)
            averager.sync_points.request_stop()
        deadline = time.monotonic() + LIMIT_S
        while Vote.STOP not in averager.sync_points.agreed and time.monotonic() < deadline:
            rank.train(1)
        assert rank.meet(SyncPointKind.STOP) is Arrival.OPEN
        turn.set(str(rank.number))
        return rank.x.clone(), averager.step

    for overlap in (False, True):
        (a, _), (b, _) = values(2, body, overlap=overlap, schedule=NEVER)
        assert torch.equal(a, b)


def test_a_vote_for_the_end_reaches_all_ranks() -> None:
    def body(rank: FaultyRank) -> Any:
        if rank.number == 0:
            rank.train(3)
            rank.averager.sync_points.vote(Vote.END)
        deadline = time.monotonic() + LIMIT_S
        while Vote.END not in rank.averager.sync_points.agreed and time.monotonic() < deadline:
            rank.train(1)
        assert Vote.END in rank.averager.sync_points.agreed
        assert rank.meet(SyncPointKind.TRAIN_END) is Arrival.OPEN
        return rank.x.clone()

    for overlap in (False, True):
        a, b, c = values(3, body, overlap=overlap, schedule=NEVER)
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("vote", [Vote.STOP, Vote.END])
def test_ranks_in_step_act_on_a_vote_behind_the_same_step(vote: Vote) -> None:
    """A bell calls for a header between two steps: rank 0 has yet to look, rank 1 has looked and goes on."""
    turn = Turnstile()

    def body(rank: FaultyRank) -> Any:
        sync_points, loop, name = rank.averager.sync_points, rank.averager.control._loop, str(rank.number)
        rank.train(3)
        before = loop.seq
        turn.set(f"stepped {name}")
        turn.wait(f"stepped {1 - rank.number}")
        if rank.number == 0:
            sync_points.request_stop() if vote is Vote.STOP else sync_points.vote(vote)
            sync_points.resume()  # passes a signal's vote on
        deadline = time.monotonic() + LIMIT_S
        while loop.seq == before:  # until the header is served
            assert time.monotonic() < deadline
            turn.event("never").wait(0.001)
        turn.set(f"heard {name}")
        turn.wait(f"heard {1 - rank.number}")
        if rank.number == 1:
            rank.train(1)
        while vote not in sync_points.agreed:
            rank.train(1)
        sync_point = SyncPointKind.STOP if vote is Vote.STOP else SyncPointKind.TRAIN_END
        own = rank.x.clone()
        assert rank.meet(sync_point) is Arrival.OPEN
        return rank.averager.step, own, rank.x.clone()

    (steps, own, met), (steps_1, own_1, met_1) = values(2, body, schedule=Synchronous())
    assert (steps, steps_1) == (4, 4)
    for each in (own_1, met, met_1):
        assert torch.equal(own, each)


def test_a_header_without_a_round_leaves_a_waiting_message_as_it_is() -> None:
    """Nothing fails here: one rank rings (a vote, a sync point) while the other's message waits."""

    def run(votes: bool) -> list[torch.Tensor]:
        turn, ready = Turnstile(), []

        def body(rank: FaultyRank) -> Any:
            if rank.number == 0:
                ready.append(rank.ledger.message_sent)
                turn.set("here")
                rank.train(4)
            else:
                turn.wait("here")
                rank.train(1)
                assert ready[0].wait(LIMIT_S)
                if votes:
                    rank.averager.sync_points.vote(Vote.END)
                    deadline = time.monotonic() + LIMIT_S
                    while Vote.END not in rank.averager.sync_points.agreed and time.monotonic() < deadline:
                        rank.averager.sync_points.resume()
                rank.train(3)
            return rank.rule_state["anchor"].clone()

        return values(2, body, rule=DiLoCo(), schedule=EveryNSteps(4))

    for quiet, rung in zip(run(False), run(True), strict=True):
        assert torch.equal(quiet, rung)


lost_bell = (
    "RoundServer.ring rings for the header that is under way, which was composed before the vote; nobody rings for "
    "the next one, which carries it"
)


def test_a_rank_at_the_end_of_its_epoch_that_is_told_to_stop_stops_all() -> None:
    """SIGTERM comes while this rank waits and the other one trains, with its next round far away."""
    turn = Turnstile()

    def body(rank: FaultyRank) -> bool:
        averager = rank.averager
        if rank.number == 0:
            rank.train(2)
            threading.Timer(0.5, averager.sync_points.request_stop).start()
            arrival = rank.meet(SyncPointKind.EPOCH_END)
            while arrival is not Arrival.OPEN:
                arrival = rank.meet(SyncPointKind.STOP)
            return Vote.STOP in averager.sync_points.agreed
        rank.train(2)
        deadline = time.monotonic() + LIMIT_S
        while Vote.STOP not in averager.sync_points.agreed and time.monotonic() < deadline:
            rank.train(1)
            turn.event("never").wait(0.001)
        in_time = Vote.STOP in averager.sync_points.agreed
        rank.meet(SyncPointKind.STOP)
        return in_time

    assert values(2, body, schedule=NEVER, overlap=True) == [True, True]


def test_a_validation_is_heard_of_while_the_asking_ranks_message_waits() -> None:
    """The usual case of a fast replica: it has had a message ready for long when its clock says to validate."""
    turn = Turnstile()

    def body(rank: FaultyRank) -> bool:
        averager = rank.averager
        if rank.number == 0:
            rank.train(6)
            turn.set("ready")
            turn.event("never").wait(0.3)  # its header is under way
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            return True
        turn.wait("ready")
        deadline = time.monotonic() + LIMIT_S
        while Vote.VALIDATE not in averager.sync_points.agreed and time.monotonic() < deadline:
            averager.sync_points.resume()  # trains a long step
            turn.event("never").wait(0.01)
        in_time = Vote.VALIDATE in averager.sync_points.agreed
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return in_time

    assert values(2, body, schedule=EveryNSteps(4), overlap=True) == [True, True]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((SyncPointKind.EPOCH_END, 0), (SyncPointKind.TRAIN_END, 0)),
        ((SyncPointKind.EPOCH_END, 0), (SyncPointKind.EPOCH_END, 1)),
    ],
)
def test_sync_points_that_do_not_match_raise_on_every_rank(left, right) -> None:
    def body(rank: FaultyRank) -> None:
        rank.train(5)
        rank.meet(*(left if rank.number == 0 else right))

    ended = outcomes(3, body)
    for outcome in ended:
        assert isinstance(outcome.error, GateMismatch), outcome.error
        for part in (f"rank 0 at {left[0].name}", f"rank 1 at {right[0].name}"):
            assert part in str(outcome.error)


# ---- warm-up and unequal replicas ----

gradient_base = (
    "RoundServer._base: a rank that was absent moves from what `received` holds, after synchronous steps the last "
    "gradients, not a model"
)


def test_a_rank_that_finished_during_the_warm_up_follows_the_others() -> None:
    def body(rank: FaultyRank) -> Any:
        rank.train(4 if rank.number == 0 else 14)
        mine = rank.x.clone()
        rank.meet()
        return mine, rank.x.clone()

    (_, a), (mine, b) = values(2, body, schedule=Warmup(EveryNSteps(3), steps=8))
    assert torch.equal(a, b)
    torch.testing.assert_close(b, mine)  # nobody else has done anything since the last synchronous step


def test_anchors_are_equal_after_a_warm_up_with_unequal_epochs() -> None:
    def body(rank: FaultyRank) -> Any:
        for epoch in range(2):
            rank.train(6 if rank.number == 0 else 15)
            rank.meet(SyncPointKind.EPOCH_END, epoch)
        return rank.x.clone(), rank.rule_state

    (a, left), (b, right) = values(2, body, rule=DiLoCo(), schedule=Warmup(EveryNSteps(3), steps=8))
    assert torch.equal(a, b)
    assert torch.equal(left["anchor"], right["anchor"])
    assert torch.equal(left["momentum"], right["momentum"])
