"""Rounds marked for a checkpoint: one model and one rule state, copied with the round, on all that take part."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import EASGD, DeltaMean, DiLoCo, EveryNSteps, Synchronous
from lightning_async.engine.checkpoint_markers import CheckpointMarkers, MarkedRound
from lightning_async.engine.shared_state import Arrival, Mark
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.engine.timeouts import Timeouts
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, NEVER, PAYLOAD, FaultyRank, Turnstile, values

RULES = [pytest.param(DeltaMean(), id="DeltaMean"), pytest.param(DiLoCo(), id="DiLoCo")]


def marks_of(rank: FaultyRank) -> CheckpointMarkers:
    return rank.averager.marks


def collect(marks: CheckpointMarkers, found: list[Any], rank: FaultyRank) -> Callable[[int], None]:
    """At every batch boundary: what was marked, with the replica as it is then."""

    def boundary(step: int) -> None:
        marked = marks.take()
        if marked is not None:
            found.append((step, marked, rank.x.clone()))

    return boundary


def joined(found: list[MarkedRound]) -> dict[str, Tensor]:
    """The flat tensors, of every rank's parts."""
    flats = [marked.share["flat"] for marked in found if marked.share is not None]
    return {name: torch.cat([flat[name] for flat in flats]) for name in flats[0]}


def save_in_round_2(rank: FaultyRank) -> Any:
    """Rounds after 4, 8 and 12 steps, with nothing overlapped; rank 1 asks during the sixth step."""
    marks, found = marks_of(rank), []
    boundary = collect(marks, found, rank)

    def each(step: int) -> None:
        if step == 5 and rank.number == 1:
            marks.ask()
        boundary(step)

    rank.train(12, each=each)
    rank.meet()
    return found, marks.saved, rank.rule_state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_take_part_in_the_round_that_was_marked(rule, world_size: int) -> None:
    told = values(world_size, save_in_round_2, rule=rule)
    assert [saved for _, saved, _ in told] == [1] * world_size
    assert [[step for step, _, _ in found] for found, _, _ in told] == [[7]] * world_size, "after the second round"
    marked = [found[0][1] for found, _, _ in told]
    assert [each.mark for each in marked] == [Mark(1, 8, tuple(map(str, range(world_size))))] * world_size
    whole = joined(marked)
    for found, _, _ in told:  # nothing was overlapped: each replica is what was agreed on
        assert torch.equal(found[0][2].flatten(), whole["model"])
    assert whole.keys() == {"model", *told[0][2]}


def test_a_rule_state_is_that_of_the_round() -> None:
    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []
        rank.train(2)
        marks.ask()
        rank.train(2, each=collect(marks, found, rank))
        state = rank.rule_state
        rank.train(4)
        rank.meet()
        return found[0][1], state

    told = values(2, body, rule=DiLoCo())
    whole = joined([marked for marked, _ in told])
    assert told[0][1].keys() == {"anchor", "momentum"}
    for name, tensor in told[0][1].items():
        assert torch.equal(whole[name], tensor), name


def test_where_replicas_keep_models_of_their_own_the_center_is_what_was_agreed_on() -> None:
    told = values(2, save_in_round_2, rule=EASGD())
    whole = joined([found[0][1] for found, _, _ in told])
    assert torch.equal(whole["model"], whole["center"])
    for found, _, _ in told:
        assert not torch.equal(found[0][2].flatten(), whole["model"])


@pytest.mark.parametrize(
    ("name", "op", "nth", "after"), [(PAYLOAD, "all_reduce", 2, False), (HEADER, "all_gather", 4, True)]
)
def test_a_mark_comes_again_with_the_round_that_failed(name: str, op: str, nth: int, after: bool) -> None:
    smooth = values(3, save_in_round_2)
    rough = values(3, save_in_round_2, scripts={2: [Fault(op=op, nth=nth, action=Fail(after=after), name=name)]})
    for told in (smooth, rough):
        assert [saved for _, saved, _ in told] == [1] * 3
        assert [len(found) for found, _, _ in told] == [1] * 3
    one, other = (joined([found[0][1] for found, _, _ in told]) for told in (smooth, rough))
    assert torch.equal(one["model"], other["model"])


def test_a_rank_that_is_absent_takes_no_part() -> None:
    turn, timeouts = Turnstile(), Timeouts(grace=timedelta(seconds=3), reform=timedelta(seconds=60))

    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []
        boundary = collect(marks, found, rank)
        if rank.number == 2:
            rank.train(1, each=boundary)
            turn.wait("the others went on")
            rank.train(1, each=boundary)
        else:
            marks.ask()
            rank.train(2, each=boundary)
            turn.set("the others went on")
        rank.meet()
        return [marked.mark for _, marked, _ in found], marks.saved

    told = values(3, body, schedule=EveryNSteps(2), timeouts=timeouts)
    assert [marks for marks, _ in told] == [[Mark(1, 1, ("0", "1"))]] * 2 + [[]]
    assert [saved for _, saved in told] == [1] * 3, "it knows of the save"


def test_numbers_go_on_where_ranks_know_of_different_saves() -> None:
    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []
        marks.begin(5 if rank.number == 0 else 3)
        marks.ask()
        rank.train(4, each=collect(marks, found, rank))
        rank.train(4, each=collect(marks, found, rank))
        rank.meet()
        return [marked.mark.number for _, marked, _ in found], marks.saved

    assert values(2, body) == [([6], 6)] * 2


def test_after_synchronous_steps_each_replica_is_the_model() -> None:
    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []
        if rank.number == 0:
            marks.ask()
        rank.train(3, each=collect(marks, found, rank))
        rank.meet()
        return found

    one, other = values(2, body, schedule=Synchronous())
    assert [step for step, _, _ in one] == [step for step, _, _ in other] == [0]
    assert one[0][1] == other[0][1] == MarkedRound(Mark(1, 1, ("0", "1")), None)
    assert torch.equal(one[0][2], other[0][2])


def test_what_waits_at_a_sync_point_takes_part() -> None:
    """Rank 0 has finished; rank 1 goes on, and its rounds are marked."""

    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []

        class AtSyncPoint(SyncPointParticipant):
            def at_sync_point(self) -> None:
                collect(marks, found, rank)(-1)

        rank.averager.sync_points.add(AtSyncPoint())
        if rank.number == 1:
            rank.train(6)
            marks.ask()
            rank.train(2, each=collect(marks, found, rank))
        assert rank.meet() is Arrival.OPEN
        return [marked.mark for _, marked, _ in found]

    assert values(2, body, schedule=EveryNSteps(4)) == [[Mark(1, 4, ("0", "1"))]] * 2


def test_a_vote_waits_for_the_next_round() -> None:
    def body(rank: FaultyRank) -> Any:
        marks = marks_of(rank)
        marks.ask()
        rank.train(3)
        nothing = marks.take()
        rank.meet()
        return nothing, marks.take() is not None, marks.saved

    assert values(2, body, schedule=NEVER) == [(None, True, 1)] * 2


def test_a_mark_that_another_round_has_overtaken_is_told() -> None:
    """Rank 1 looks too late: the round after the marked one has been handed over."""

    def body(rank: FaultyRank) -> Any:
        marks, found = marks_of(rank), []
        marks.ask()
        rank.train(8, each=collect(marks, found, rank) if rank.number == 0 else None)
        nothing, lost = (None, []) if rank.number == 0 else (marks.take(), marks.lost())
        again = marks.lost()
        rank.meet()
        return [marked.mark for _, marked, _ in found], nothing, lost, again

    first, second = values(2, body)
    assert first == ([Mark(1, 4, ("0", "1"))], None, [], [])
    assert second == ([], None, [Mark(1, 4, ("0", "1"))], [])
