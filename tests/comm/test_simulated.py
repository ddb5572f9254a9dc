"""Scripted faults strike where the script says, and look like the real thing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.errors import CollectiveError, CollectiveTimeout
from lightning_async.membership.generation import Generation
from tests.comm.faulty import Corrupt, Delay, Fail, Fault, FaultyCollectives, Hang, Kill
from tests.comm.simulated import InProcessWorld

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=30)


def run(script: Sequence[Fault], fn: Callable[[Any], Any], timeout: timedelta = LONG, **kw: Any) -> Any:
    """Two ranks; the script is rank 0's."""
    world = InProcessWorld(2, timeout)
    return world.run(lambda comm: fn(FaultyCollectives(comm, script if comm.rank == 0 else (), **kw)))


def outcomes(comm: Any, count: int = 3) -> list[str]:
    told = []
    for _ in range(count):
        try:
            told.append(str(comm.all_reduce(torch.ones(1)).result().item()))
        except CollectiveError as error:
            told.append(type(error).__name__)
    return told


def test_the_nth_call_fails_for_everybody_and_the_failure_sticks() -> None:
    first, second = run([Fault(op="all_reduce", nth=2)], outcomes)
    assert first == second == ["2.0", "CollectiveError", "CollectiveError"]


def test_fail_after_the_data_moved_fails_here_only() -> None:
    mine, theirs = run([Fault(op="all_reduce", nth=2, action=Fail(after=True))], lambda comm: outcomes(comm, 2))
    assert mine == ["2.0", "CollectiveError"]
    assert theirs == ["2.0", "2.0"]


def test_fail_after_leaves_the_data_in_place() -> None:
    def body(comm: Any) -> float:
        buffer = torch.ones(1)
        pending = comm.all_reduce(buffer)
        assert pending.wait(timedelta(seconds=30))
        return buffer.item()

    assert run([Fault(op="*", action=Fail(after=True))], body) == [2.0, 2.0]


def test_a_script_reaches_into_forks_by_name() -> None:
    def body(comm: Any) -> list[list[str]]:
        header, payload = comm.fork("header"), comm.fork("payload")
        return [outcomes(header, 2), outcomes(payload, 2), outcomes(header, 1)]

    for told in run([Fault(op="all_reduce", nth=2, name="world/payload")], body):
        assert told == [["2.0", "2.0"], ["2.0", "CollectiveError"], ["2.0"]]


def test_calls_are_counted_over_forks_where_no_name_is_given() -> None:
    def body(comm: Any) -> list[list[str]]:
        a, b = comm.fork("a"), comm.fork("b")
        return [outcomes(a, 1), outcomes(b, 1)]

    for told in run([Fault(op="all_reduce", nth=2)], body):
        assert told == [["2.0"], ["CollectiveError"]]


def test_hang_ends_by_the_deadline() -> None:
    def body(comm: Any) -> str:
        started = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            comm.barrier().result()
        assert time.monotonic() - started >= SHORT.total_seconds() - 0.05
        return caught.type.__name__

    assert "CollectiveTimeout" in run([Fault(op="barrier", action=Hang())], body, SHORT)


def test_hang_ends_by_abort() -> None:
    comm = FaultyCollectives(InProcessWorld(2).collectives(0), [Fault(op="barrier", action=Hang())])
    pending = comm.barrier()
    assert not pending.done()
    comm.abort()
    with pytest.raises(CollectiveError, match="aborted"):
        pending.result(timedelta(0))


def test_delay_waits_for_the_event_and_keeps_the_order() -> None:
    event, asked = threading.Event(), threading.Event()

    def body(comm: Any) -> list[float]:
        if comm.rank == 1:
            first = comm.all_reduce(torch.ones(1))
            assert asked.wait(30)
            assert not first.wait(timedelta(seconds=0.05))
            event.set()
            return [first.result().item(), comm.all_reduce(torch.full((1,), 5.0)).result().item()]
        first = comm.all_reduce(torch.ones(1))
        assert not first.done()
        asked.set()
        second = comm.all_reduce(torch.full((1,), 5.0))  # must not overtake
        return [first.result().item(), second.result().item()]

    assert run([Fault(op="all_reduce", action=Delay(event))], body) == [[2.0, 10.0], [2.0, 10.0]]


def test_delay_by_seconds_and_past_the_deadline() -> None:
    assert run([Fault(op="all_reduce", action=Delay(0.05))], lambda c: outcomes(c, 1)) == [["2.0"], ["2.0"]]
    never = threading.Event()
    mine, theirs = run([Fault(op="all_reduce", action=Delay(never))], lambda c: outcomes(c, 1), SHORT)
    assert {mine[0], theirs[0]} <= {"CollectiveTimeout", "CollectiveError"}


def test_corrupt_changes_the_result_once() -> None:
    def body(comm: Any) -> list[bool]:
        return [comm.all_gather(torch.ones(2)).result().eq(1).all().item() for _ in range(2)]

    assert run([Fault(op="all_gather", action=Corrupt())], body) == [[False, True], [True, True]]
    fill = Corrupt(lambda tensor: void(tensor.fill_(7)))
    mine, theirs = run([Fault(op="broadcast", action=fill)], lambda c: c.broadcast(torch.ones(2)).result().tolist())
    assert (mine, theirs) == ([7.0, 7.0], [1.0, 1.0])


def void(_: object) -> None:
    return None


def test_kill_calls_the_function_and_takes_the_peers_along() -> None:
    killed = []
    mine, theirs = run([Fault(op="all_reduce", nth=2, action=Kill())], outcomes, kill=lambda: killed.append(1))
    assert killed  # both wrappers got the function, only one had the script
    assert mine == theirs == ["2.0", "CollectiveError", "CollectiveError"]


def test_reconfigure_heals() -> None:
    def body(comm: Any) -> list[str]:
        fork = comm.fork("payload")
        told = outcomes(fork, 2)
        comm.reconfigure(Generation(1, ("0", "1"), comm.rank))
        return told + outcomes(fork, 1)

    for told in run([Fault(op="all_reduce", nth=2, name="world/payload")], body):
        assert told == ["2.0", "CollectiveError", "2.0"]


def test_wrong_faults_raise() -> None:
    with pytest.raises(ValueError, match="op='allreduce'"):
        Fault(op="allreduce")
    with pytest.raises(ValueError, match="nth=0"):
        Fault(op="barrier", nth=0)


def test_strict_world_names_both_ranks() -> None:
    def body(comm: Any) -> None:
        (comm.barrier() if comm.rank == 0 else comm.all_reduce(torch.ones(2))).result()

    with pytest.raises(CollectiveError, match=r"rank \d called .*rank \d called"):
        InProcessWorld(2).run(body)


def test_run_never_hangs() -> None:
    release = threading.Event()
    with pytest.raises(CollectiveTimeout, match="rank 1 still running"):
        InProcessWorld(2).run(lambda comm: release.wait(60) if comm.rank == 1 else None, SHORT)
    release.set()
