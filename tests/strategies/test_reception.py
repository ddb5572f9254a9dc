"""The thread on which those who train connect with newcomers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_async.errors import PeerLost
from lightning_async.strategies import host as host_module
from lightning_async.strategies.host import Host
from lightning_async.strategies.reception import Reception


class Door:
    """Of one who waits, without an invitation; the first look fails."""

    def __init__(self) -> None:
        self.looks = 0
        self.looked = threading.Event()

    def read_invitation(self, guest: str) -> dict[str, Any]:
        self.looks += 1
        self.looked.set()
        if self.looks == 1:
            raise KeyError("an error that nobody thought of")
        return {}


def test_what_it_raises_is_logged_and_the_next_change_has_it_look_again(caplog: pytest.LogCaptureFixture) -> None:
    membership = SimpleNamespace(guests=lambda: ("2.1.1",))
    survivors = SimpleNamespace(names=("0", "1"), generation=SimpleNamespace(rank=1, world_size=2))
    strategy: Any = SimpleNamespace(connection=SimpleNamespace(membership=membership), survivors=survivors)
    door: Any = Door()
    reception = Reception(strategy, door, 3, lambda: None)
    reception.look()
    assert door.looked.wait(30.0)
    while (thread := reception._thread) is not None:
        thread.join(0.01)
    assert "Who waits to join was not looked at" in caplog.text
    door.looked.clear()
    reception.look()
    assert door.looked.wait(30.0) and door.looks >= 2
    reception.close()
    assert reception._thread is None


def test_where_the_vote_fails_what_was_made_for_a_newcomer_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its heart beats on, and the newcomer waits for as long as this process lives."""
    released: list[tuple[Any, str]] = []
    monkeypatch.setattr(host_module, "release", lambda *args: released.append(args))
    monkeypatch.setattr(host_module, "state_of", lambda averager, world: {"replicas": [{"step": 1}]})
    wide: Any = SimpleNamespace(world=SimpleNamespace(gather_objects=list))
    ready = SimpleNamespace(connection=wide, pair=None, name="0")

    def reduce(*args: Any) -> Any:
        raise PeerLost("rank 1 is gone", (1,))

    patches = SimpleNamespace(place=lambda name: [])
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(done=False), callbacks=[])
    strategy: Any = SimpleNamespace(
        course=SimpleNamespace(session=SimpleNamespace(averager=None), patches=patches),
        module=SimpleNamespace(trainer=trainer), connection=object(),
    )  # fmt: skip
    host = Host(strategy)
    host._reception = SimpleNamespace(offer="2.1.1", take=lambda: ready)  # pyright: ignore[reportAttributeAccessIssue]
    world: Any = SimpleNamespace(rank=0, gather_objects=lambda mine: [mine], reduce=reduce)
    with pytest.raises(PeerLost):
        host.decide(world)
    assert released == [(wide, "PeerLost: rank 1 is gone")]
