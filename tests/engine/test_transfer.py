"""Waiting for an operation: it ends with the result, the deadline, a death, a newer generation, or with closing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.comm.collectives import Pending
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.transfer import Closed, Transfer
from lightning_async.errors import CollectiveError, CollectiveTimeout, GenerationChanged, PeerLost
from tests.comm.simulated import InProcessWorld


class Script(Pending[str]):
    """Done after so many looks; each moves the clock by a second."""

    def __init__(self, clock: list[float], after: int) -> None:
        self.clock, self.left = clock, after

    def done(self) -> bool:
        return self.left <= 0

    def wait(self, timeout: timedelta) -> bool:
        self.clock[0] += 1.0
        self.left -= 1
        return self.done()

    def result(self, timeout: timedelta | None = None) -> str:
        if not self.done():
            raise CollectiveTimeout("not there")
        return "here"


class Members:
    """A membership that has something to say, or not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.looks = error, 0
        self.header = 0
        self.all_sent = False

    def behind(self, kind: str, number: int) -> tuple[str, ...]:
        assert kind == "header"
        self.header = number
        return () if self.all_sent else ("1",)

    def check(self) -> None:
        self.looks += 1
        if self.error is not None and self.looks >= 3:
            raise self.error


def transfer(members: Any, deadline: float = 5.0) -> tuple[Transfer, SharedState, list[float]]:
    box, clock = SharedState(), [0.0]
    unused: Any = None
    made = Transfer(
        unused,
        unused,
        box,
        members,
        timedelta(seconds=deadline),
        16,
        now=lambda: clock[0],
    )
    return made, box, clock


def test_the_result() -> None:
    members = Members()
    made, _, clock = transfer(members)
    assert made.result(Script(clock, 4)) == "here"
    assert members.looks == 3


def test_the_deadline() -> None:
    made, _, clock = transfer(Members(), deadline=5.0)
    with pytest.raises(CollectiveTimeout):
        made.result(Script(clock, 100))
    assert clock[0] == 6.0


@pytest.mark.parametrize("error", [PeerLost("rank 1 is gone", (1,)), GenerationChanged("rank 1 has left")])
def test_what_the_membership_says(error: Exception) -> None:
    made, _, clock = transfer(Members(error))
    with pytest.raises(type(error), match="rank 1"):
        made.result(Script(clock, 100))
    assert clock[0] == 3.0


def test_a_call_of_the_training_threads_that_failed() -> None:
    made, box, clock = transfer(Members())
    box.trouble = CollectiveError("broken")
    with pytest.raises(CollectiveError, match="broken"):
        made.result(Script(clock, 100))


def test_closing() -> None:
    made, box, clock = transfer(Members(PeerLost("rank 1 is gone", (1,))))
    box.closing = True
    with pytest.raises(Closed):
        made.result(Script(clock, 100))


def test_headers_wait_for_as_long_as_all_live_and_ring_meanwhile() -> None:
    made, _, clock = transfer(Members(), deadline=1.0)
    rings: list[float] = []

    class Small:
        def all_gather(self, row: Any) -> Any:
            return Script(clock, 30)

    made.small = Small()  # type: ignore[assignment]
    assert made.meet(torch.zeros(1), 7, (timedelta(seconds=9), lambda: rings.append(clock[0]))) == "here"
    assert rings == [10.0, 20.0]


def test_a_header_that_all_have_sent_has_a_deadline() -> None:
    """Of the time since all have sent it: the links between them are broken, although all heartbeats arrive."""
    members = Members()
    made, _, clock = transfer(members, deadline=5.0)
    script = Script(clock, 100)

    class Small:
        def all_gather(self, row: Any) -> Any:
            return script

    def note_that_all_have_sent() -> None:
        members.all_sent = True

    made.small = Small()  # type: ignore[assignment]
    with pytest.raises(CollectiveTimeout):
        made.meet(torch.zeros(1), 7, (timedelta(seconds=9), note_that_all_have_sent))
    assert clock[0] == 15.0 and members.header == 7


def test_payloads_move_in_parts_and_end_alike_everywhere() -> None:
    world = InProcessWorld(3)

    def body(collectives: Any) -> Any:
        alive: Any = Members()
        made = Transfer(
            collectives.fork("small"), collectives.fork("large"), SharedState(), alive,
            timedelta(seconds=10), part_bytes=8,
        )  # fmt: skip
        rank = float(collectives.rank)
        total, largest, copied = torch.full((5,), 1.0 + rank), torch.tensor([rank, -rank]), torch.full((5,), rank)
        made.sum_(total)
        made.largest_(largest)
        made.broadcast_(copied, 2)
        gathered = made.gather(torch.tensor([rank]))
        return total.tolist(), largest.tolist(), copied.tolist(), gathered.flatten().tolist()

    for found in world.run(body, timedelta(seconds=20)):
        assert found == ([6.0] * 5, [2.0, 0.0], [2.0] * 5, [0.0, 1.0, 2.0])


def test_all_have_a_payload_where_none_has_doubts() -> None:
    """With the sum of what they say; else all hear that somebody has."""

    def body(comm: Any) -> Any:
        box, unused = SharedState(), Members()
        made: Any = Transfer(comm, comm, box, unused, timedelta(seconds=60), 16)  # pyright: ignore[reportArgumentType]
        return made.all_have(1.5 + comm.rank, False), made.all_have(1.0, comm.rank == 1), made.all_have(0.0, False)

    assert InProcessWorld(3).run(body, timedelta(seconds=60)) == [(7.5, None, 0.0)] * 3
