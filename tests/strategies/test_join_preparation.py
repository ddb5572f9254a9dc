"""The thread on which those who train connect with joining ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_async.errors import PeerLost
from lightning_async.strategies.join import JoinCoordinator, JoinPreparation, PreparedJoin


class Door:
    """Of one who waits, without an invitation; the first look fails."""

    def __init__(self) -> None:
        self.looks = 0
        self.looked = threading.Event()

    def read_invitation(self, joining_rank: str) -> dict[str, Any]:
        self.looks += 1
        self.looked.set()
        if self.looks == 1:
            raise KeyError("an error that nobody thought of")
        return {}


def test_what_it_raises_is_logged_and_the_next_change_has_it_look_again(caplog: pytest.LogCaptureFixture) -> None:
    membership = SimpleNamespace(visitors=lambda: ("2.1.1",))
    live_ranks = SimpleNamespace(names=("0", "1"), generation=SimpleNamespace(rank=1, world_size=2))
    strategy: Any = SimpleNamespace(connection=SimpleNamespace(membership=membership), live_ranks=live_ranks)
    door: Any = Door()
    join_preparation = JoinPreparation(strategy, cast(Any, None), door, 3, lambda: None, lambda: None)
    join_preparation.look()
    assert door.looked.wait(30.0)
    while (thread := join_preparation._thread) is not None:
        thread.join(0.01)
    assert "The preparation of a join has failed" in caplog.text
    door.looked.clear()
    join_preparation.look()
    assert door.looked.wait(30.0) and door.looks >= 2
    join_preparation.close()
    assert join_preparation._thread is None


class Members:
    """Who lives, of those who train and of the new connection alike."""

    on_change = None

    def __init__(self) -> None:
        self.lost: tuple[str, ...] = ()
        self.failed = ""

    def visitors(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        if self.lost:
            raise PeerLost(f"rank {self.lost[0]} is gone", tuple(map(int, self.lost)))

    def fail(self, why: str) -> None:
        self.failed = why


class Answers:
    """A door that keeps what is answered."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def answer(self, joining_rank: str, admitted: bool, again: bool = False) -> None:
        self.told.append({"joining_rank": joining_rank, "admitted": admitted, "again": again})


def received(names: tuple[str, ...] = ("0", "1")) -> tuple[JoinPreparation, Any, Answers]:
    """A reception with one who is ready, its connection's membership, and what is answered."""
    membership, door = Members(), Answers()
    connection: Any = SimpleNamespace(membership=membership, outlives=True, close=lambda in_order: None)
    live_ranks = SimpleNamespace(names=names, generation=SimpleNamespace(rank=0, world_size=len(names)))
    strategy: Any = SimpleNamespace(connection=SimpleNamespace(membership=Members()), live_ranks=live_ranks)
    join_preparation = JoinPreparation(strategy, cast(Any, None), cast(Any, door), 3, lambda: None, lambda: None)
    join_preparation._ready = PreparedJoin("2.1.1", (*names, "2"), 5, connection, None, [])
    return join_preparation, membership, door


def ended(join_preparation: JoinPreparation) -> None:
    while (thread := join_preparation._thread) is not None:
        thread.join(0.01)


def test_who_is_held_stays_whoever_is_lost_meanwhile() -> None:
    """Else this rank answers that it may come again, and the others that it is one of them."""
    join_preparation, membership, door = received()
    held = join_preparation.hold()
    assert held is not None and held.joining_rank == "2.1.1"
    membership.lost = ("1",)
    join_preparation.look()
    ended(join_preparation)
    assert door.told == [] and membership.failed == ""
    join_preparation.take()
    assert join_preparation.hold() is None
    join_preparation.look()
    ended(join_preparation)
    assert door.told == []  # it is the taker's
    join_preparation.close()


def test_who_is_let_go_comes_again_where_a_rank_was_lost_meanwhile() -> None:
    join_preparation, membership, door = received()
    assert join_preparation.hold() is not None
    membership.lost = ("1",)
    join_preparation.let_go()
    ended(join_preparation)
    assert door.told == [{"joining_rank": "2.1.1", "admitted": False, "again": True}]
    assert membership.failed == "a rank was lost"
    assert join_preparation.hold() is None
    join_preparation.close()


def hosted(
    monkeypatch: pytest.MonkeyPatch, told: Any, rank: int = 1, done: bool = False
) -> tuple[JoinCoordinator, Any, Answers]:
    """A host with one who is ready, at a sync point where all ranks tell this."""
    join_preparation, membership, door = received()
    averager = SimpleNamespace(clocks=lambda: {"step": 1}, state_dict=dict)
    live_ranks = SimpleNamespace(names=("0", "1"), generation=SimpleNamespace(rank=rank))
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(done=done), callbacks=[])
    strategy: Any = SimpleNamespace(
        fit_sessions=SimpleNamespace(
            session=SimpleNamespace(averager=averager),
            patches=SimpleNamespace(joiner_data=SimpleNamespace(place=lambda name, comes: [name])),
        ),
        module=SimpleNamespace(trainer=trainer), connection=object(), live_ranks=live_ranks,
    )  # fmt: skip
    host = JoinCoordinator(strategy)
    host._join_preparation = join_preparation
    world: Any = SimpleNamespace(rank=rank, gather_objects=told)
    assert host.decide(world) is False
    join_preparation._ends.set()
    return host, membership, door


READY, NOBODY = "2.1.1", ["", None, {}, []]


@pytest.mark.parametrize("others", [NOBODY, ["3.1.1", "", {}, []]], ids=["nobody", "another one"])
def test_it_is_taken_only_where_all_can_take_the_same(others: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, membership, door = hosted(monkeypatch, lambda mine: [others, mine])
    assert door.told == [] and membership.failed == ""
    assert host._join_preparation is not None and host._join_preparation._ready is not None


def test_rank_0_offers_nobody_where_it_has_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    hosted(monkeypatch, lambda mine: said.append(mine) or [mine, mine], rank=0, done=True)
    hosted(monkeypatch, lambda mine: said.append(mine) or [NOBODY, mine], rank=1, done=True)
    assert said == [NOBODY, [READY, None, {"step": 1, "alike": None, "gathered": None}, ["1"]]]


def test_who_all_stood_for_ends_where_rank_0_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_0 = [READY, "MemoryError: no room", {}, []]
    host, membership, door = hosted(monkeypatch, lambda mine: [rank_0, mine])
    assert door.told == [{"joining_rank": READY, "admitted": False, "again": False}]
    assert host._join_preparation is not None and host._join_preparation._ready is None
    for thread in threading.enumerate():
        if thread.name == "lightning_async goodbye":
            thread.join(30.0)
    assert membership.failed == "MemoryError: no room"


def test_it_comes_again_where_rank_0_is_lost_before_it_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has what it needs."""
    _, _, door = hosted(monkeypatch, lambda mine: [mine, mine])
    assert door.told == [{"joining_rank": READY, "admitted": False, "again": True}]


def test_where_all_fail_to_tell_what_was_made_for_a_joining_rank_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its heart beats on, and the joining rank waits for as long as this process lives."""
    kept: list[Any] = []

    def gather_objects(mine: Any) -> Any:
        raise PeerLost("rank 1 is gone", (1,))

    monkeypatch.setattr(
        JoinPreparation, "hold", lambda self, hold=JoinPreparation.hold: kept.append(self) or hold(self)
    )
    with pytest.raises(PeerLost):
        hosted(monkeypatch, gather_objects)
    (join_preparation,) = kept
    join_preparation.close()  # as the end of training does
    assert join_preparation._door.told == [{"joining_rank": READY, "admitted": False, "again": True}]
