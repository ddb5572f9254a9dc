"""The end of a neighbour's process is seen; of others nothing is known, however like one they look."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from lightning_async.errors import PeerLost
from lightning_async.membership.failure_detector import FAILED, LEFT, UP, VISITING, Record, key
from lightning_async.membership.process_liveness import STARTER, LocalProcessWatch, place_of
from tests.membership.test_membership import Clock, Hand

pytestmark = pytest.mark.processes

Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that do nothing until the end of the test."""
    with ExitStack() as stack:

        def begin() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(["sleep", "600"])
            stack.callback(end, process)
            return process

        yield begin


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def there(process: subprocess.Popen[bytes], state: str = UP) -> Record:
    place = place_of(process.pid)
    assert place
    return Record(life=f"process {process.pid} on it", place=place, state=state)


def test_one_that_has_ended_is_gone_and_one_that_is_stopped_is_not(start: Start) -> None:
    neighbours, process = LocalProcessWatch(0.0), start()
    records = {"1": there(process), "2": None, "3": Record()}
    assert neighbours.gone(records) == []
    process.send_signal(signal.SIGSTOP)
    assert neighbours.gone(records) == []
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert neighbours.gone(records) == ["1"], "nobody has asked for its status yet"
    process.wait()
    assert neighbours.gone(records) == ["1"]
    for state, gone in ((LEFT, []), (FAILED, []), (VISITING, ["1"])):
        assert neighbours.gone({"1": replace(records["1"], state=state)}) == gone
    neighbours.close()
    neighbours.close()
    assert neighbours.gone(records) == [], "there is nothing to find any more"


def test_of_one_that_is_not_found_nothing_is_known(start: Start) -> None:
    process = start()
    good = there(process).place
    boot, namespace, number, began = good.split()
    strange = {
        "another host": f"{boot[::-1]} {namespace} {number} {began}",
        "another namespace": f"{boot} pid:[1] {number} {began}",
        "another one of this number": f"{boot} {namespace} {number} {int(began) - 1}",
        "nobody": f"{boot} {namespace} {2**22 + 1} {began}",
        "this process": place_of(os.getpid()),
        "nowhere": "",
        "no place": "here",
        "no numbers": "a b c d",
    }
    neighbours = LocalProcessWatch(0.0)
    records = {name: Record(place=place, state=UP) for name, place in strange.items()} | {"good": there(process)}
    assert neighbours.gone(records) == []
    assert list(neighbours._held) == ["good"]
    end(process)
    late = LocalProcessWatch(0.0)
    assert late.gone({"good": records["good"]}) == [], "it was never seen alive"
    assert neighbours.gone(records) == ["good"]
    neighbours.close()


def test_one_that_lives_again_is_another_one(start: Start) -> None:
    neighbours, first, second = LocalProcessWatch(0.0), start(), start()
    before, after = there(first), there(second)
    neighbours.gone({"1": before})
    end(first)
    assert neighbours.gone({"1": before}) == ["1"]
    assert neighbours.gone({"1": after}) == []
    end(second)
    assert neighbours.gone({"1": after}) == ["1"]
    neighbours.close()


def test_whoever_has_started_it_may_tell_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, process = Clock(), start()
    monkeypatch.setenv(STARTER, "1")
    neighbours, records = LocalProcessWatch(now=clock), {"1": there(process)}
    monkeypatch.delenv(STARTER)
    at_once = LocalProcessWatch(now=clock)
    assert neighbours.gone(records) == at_once.gone(records) == []
    end(process)
    assert (neighbours.gone(records), at_once.gone(records)) == ([], ["1"])
    clock.now += 1.9
    assert neighbours.gone(records) == []
    clock.now += 0.2
    assert neighbours.gone(records) == ["1"]
    neighbours.close()
    at_once.close()


def test_one_neighbour_is_enough_for_all_to_know(start: Start) -> None:
    process, hand = start(), Hand(3)
    hand.ranks[2]._board._neighbours._place = place_of(process.pid)
    hand.ranks[1]._board._neighbours._look_for = lambda name, record: None  # it is on another host
    hand.everybody_is_seen()
    end(process)
    hand.beat(1)
    hand.ranks[1].check()
    last = hand.store.get(key("2"))
    hand.beat(0, 1)
    for rank in hand.ranks[:2]:
        with pytest.raises(PeerLost, match="rank 2 failed: its process has ended without notice") as caught:
            rank.check()
        assert caught.value.ranks == (2,)
    hand.store.set(key("2"), last.decode())  # its own last word arrives later than that
    hand.beat(0, 1)
    assert hand.ranks[1].lost() == ("2",)
    hand.ranks[0]._board.close()


def test_nobody_speaks_for_one_that_lives_again(start: Start) -> None:
    process, again, hand = start(), start(), Hand(2)
    hand.ranks[1]._board._neighbours._place = place_of(process.pid)
    hand.everybody_is_seen()
    gone = hand.ranks[0]._board._neighbours.gone

    def slowly(records: Mapping[str, Record | None]) -> list[str]:
        found = gone(records)
        hand.ranks[1]._board._neighbours._place = place_of(again.pid)
        hand.ranks[1]._mine = replace(hand.ranks[1]._mine, life="another one")
        hand.beat(1)  # between a look and the word about it
        return found

    end(process)
    hand.ranks[0]._board._neighbours.gone = slowly
    hand.beat(0)
    hand.ranks[0]._board._neighbours.gone = gone
    hand.beat(0)
    assert hand.ranks[0].lost() == ()
    with pytest.raises(PeerLost, match="rank 1 was restarted"):
        hand.ranks[0].check()
    hand.ranks[0]._board.close()


def test_one_that_says_goodbye_and_ends_between_two_looks_is_not_blamed(start: Start) -> None:
    process, hand = start(), Hand(3)
    hand.ranks[1]._board._neighbours._place = place_of(process.pid)
    hand.everybody_is_seen()
    gone = hand.ranks[0]._board._neighbours.gone

    def slowly(records: Mapping[str, Record | None]) -> list[str]:
        assert records["1"] is not None and records["1"].state == UP
        hand.ranks[1].leave()  # because it has lost rank 2, say
        hand.beat(1)
        end(process)
        return gone(records)

    hand.ranks[0]._board._neighbours.gone = slowly
    hand.beat(0)
    hand.ranks[0].check()
    assert hand.ranks[0].lost() == () and hand.ranks[0].left() == {"1"}
    hand.ranks[0]._board.close()
