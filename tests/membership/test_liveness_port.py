"""Whom a host refuses for has ended; who does not answer, or was never reached, is not known to have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from lightning_async.membership.failure_detector import UP, Record
from lightning_async.membership.process_liveness import LivenessPort, LivenessProbes
from tests.membership.test_membership import until


@pytest.fixture
def calls() -> Iterator[LivenessProbes]:
    calls = LivenessProbes()
    yield calls
    calls.close()


def at(line: str, beat: int = 0, life: str = "x") -> Record:
    return Record(life=life, line=line, beat=beat, state=UP)


def silent(calls: LivenessProbes, record: Record, readings: int) -> list[list[str]]:
    return [calls.refused({"1": record}) for _ in range(readings)]


def reach(calls: LivenessProbes, record: Record) -> None:
    """Until it has answered once; each reading is of another beat."""
    beats = iter(range(1, 1_000_000))
    until(lambda: not calls.refused({"1": replace(record, beat=next(beats))}) and calls._callees["1"].reached)


def test_one_that_is_quiet_and_refused_is_gone_and_one_that_is_answered_for_is_not(calls: LivenessProbes) -> None:
    lifeline = LivenessPort("127.0.0.1")
    record = at(lifeline.place, beat=1_000_000)
    reach(calls, record)
    assert silent(calls, record, 50) == [[]] * 50, "it listens, and says nothing, as one that is stopped"
    lifeline.close()
    assert calls.refused({"1": replace(record, beat=record.beat + 1)}) == [], "it has just spoken"
    found = silent(calls, replace(record, beat=record.beat + 1), 20)
    assert found[:1] == [[]] and ["1"] in found[1:]


def test_one_that_was_never_reached_is_not_gone_and_is_called_some_times_only(calls: LivenessProbes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1 {server.getsockname()[1]}"
    assert silent(calls, at(nobody), 100) == [[]] * 100
    assert calls._callees["1"].tries == 10
    for strange in ("", "x", "127.0.0.1 x", "127.0.0.1 70000", "no.such.host. 80", ":: 1 2"):
        assert silent(calls, at(strange, life=strange), 5) == [[]] * 5


def test_one_that_lives_again_is_reached_anew(calls: LivenessProbes) -> None:
    first, second = LivenessPort("127.0.0.1"), LivenessPort("127.0.0.1")
    reach(calls, at(first.place))
    first.close()
    after = at(second.place, life="y")
    calls.refused({"1": after})
    reach(calls, after)
    assert silent(calls, replace(after, beat=2_000_000), 10) == [[]] * 10
    second.close()
    assert ["1"] in silent(calls, replace(after, beat=2_000_000), 20)


def test_one_that_leaves_is_called_no_more(calls: LivenessProbes) -> None:
    lifeline = LivenessPort("127.0.0.1")
    calls.refused({"1": at(lifeline.place)})
    call = calls._callees["1"].call
    assert calls.refused({}) == [] and not calls._callees
    assert call is None or call.fileno() == -1
    lifeline.close()


def test_calls_do_not_pile_up_where_one_hangs_up() -> None:
    lifeline = LivenessPort("127.0.0.1")
    host, port = lifeline.place.split()
    with ExitStack() as stack:
        called = [stack.enter_context(socket.create_connection((host, int(port)), 50.0)) for _ in range(5)]
        lifeline.hang_up()
        assert [each.recv(1) for each in called] == [b""] * 5
    lifeline.close()
