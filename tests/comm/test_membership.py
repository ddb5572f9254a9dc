"""Membership: who is alive, by a clock that the tests turn themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.membership.stores import HashStore, PrefixStore
from lightning_async.comm.protocols import Quorum
from lightning_async.errors import CollectiveTimeout, GenerationChanged, PeerLost

DEAD = timedelta(seconds=20)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Hand:
    """Ranks whose heart beats only when the test says so."""

    def __init__(self, world_size: int, **kwargs: Any) -> None:
        self.clock, self.store = Clock(), HashStore()
        self.ranks = [Membership(self.store, r, world_size, clock=self.clock, **kwargs) for r in range(world_size)]

    def beat(self, *ranks: int, times: int = 1, seconds: float = 0.0) -> None:
        for _ in range(times):
            self.clock.now += seconds
            for rank in ranks:
                self.ranks[rank].beat()

    def everybody_is_seen(self) -> None:
        for other in range(len(self.ranks)):
            self.store.compare_set(f"lightning_async/membership/{other}", "", "{}")
        self.beat(*range(len(self.ranks)), times=3)


@contextmanager
def running(world_size: int, **kwargs: Any) -> Iterator[list[Membership]]:
    store = kwargs.pop("store", None) or HashStore()
    ranks = [Membership(store, r, world_size, interval=timedelta(seconds=0.01), **kwargs) for r in range(world_size)]
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.close)
            rank.start()
        yield ranks


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    event = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("in vain")


def in_thread(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``fn``; the returned function joins it, and returns or raises what it did."""
    box: list[Any] = []

    def body() -> None:
        try:
            box.append((True, fn()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=body)
    thread.start()

    def join() -> Any:
        thread.join(10)
        good, value = box[0]
        if not good:
            raise value
        return value

    return join


def test_silence_is_death_only_after_dead_after() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()
    hand.beat(0, 1, times=19, seconds=1.0)
    hand.ranks[0].check()
    hand.beat(0, 1, times=2, seconds=1.0)
    with pytest.raises(PeerLost, match=r"rank 0, generation 0: rank 2 was last seen 2\d\.\d s ago") as caught:
        hand.ranks[0].check()
    assert caught.value.ranks == (2,) == hand.ranks[1].lost()


def test_a_peer_stopped_for_a_while_comes_back() -> None:
    hand = Hand(2)
    hand.everybody_is_seen()
    hand.beat(0, times=6, seconds=1.0)
    hand.beat(0, 1, seconds=1.0)
    hand.beat(0, times=19, seconds=1.0)
    hand.ranks[0].check()


def test_being_stopped_oneself_is_not_the_peers_death() -> None:
    hand = Hand(2)
    hand.everybody_is_seen()
    hand.beat(0, seconds=300.0)  # nobody beat: the whole machine was stopped
    hand.ranks[0].check()
    hand.beat(1, 0, seconds=0.2)
    hand.ranks[0].check()


def test_a_peer_that_never_came_has_longer() -> None:
    hand = Hand(2, start_timeout=timedelta(seconds=100))
    hand.store.compare_set("lightning_async/membership/1", "", "{}")
    hand.beat(0, times=24, seconds=4.0)
    hand.ranks[0].check()
    hand.beat(0, times=2, seconds=4.0)
    with pytest.raises(PeerLost, match="rank 1 has not come within 100 s"):
        hand.ranks[0].check()


def test_a_record_of_an_earlier_life_is_nobody() -> None:
    hand = Hand(2)
    hand.store.set("lightning_async/membership/0", "{}")
    hand.beat(1)  # then it dies, before rank 0 starts
    hand.beat(0, times=10, seconds=4.0)
    hand.ranks[0].check()  # the grace of the start holds


def test_goodbye_is_no_death() -> None:
    with running(2, dead_after=timedelta(seconds=0.1)) as ranks:
        until(lambda: ranks[0]._peers[1].confirmed)
        ranks[1].close()
        ranks[1].close()
        until(lambda: ranks[0]._peers[1].record.state == "left")
        threading.Event().wait(0.3)
        ranks[0].check()
        assert ranks[0].left() == {1} and ranks[0].lost() == ()
        assert ranks[0].next_generation(timedelta(seconds=5)) == Quorum(1, (0,))


def test_a_failure_is_told() -> None:
    with running(2) as ranks:
        until(lambda: ranks[0]._peers[1].confirmed)
        ranks[1].fail("ValueError: no such label")
        until(lambda: ranks[0].lost() == (1,))
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError: no such label") as caught:
            ranks[0].check()
        assert caught.value.ranks == (1,)


def test_bells_are_heard_at_once() -> None:
    heard = threading.Event()
    with running(2, on_change=heard.set) as ranks:
        until(lambda: all(rank._peers[1 - i].confirmed for i, rank in enumerate(ranks)))
        heard.clear()
        ranks[1].ring(7)
        assert ranks[1].bell == 7
        until(lambda: ranks[0].bell == 7)
        assert heard.wait(5)
        ranks[1].ring(3)  # never back
        assert ranks[1].bell == 7


def test_nothing_changes_without_a_change() -> None:
    calls: list[int] = []
    hand = Hand(2)
    hand.everybody_is_seen()
    hand.ranks[0].on_change = lambda: calls.append(1)
    hand.beat(1, 0, times=5)
    assert not calls
    hand.ranks[1].ring(1)
    hand.beat(1, 0, times=5)
    assert len(calls) == 1


def test_a_bad_listener_does_not_stop_the_heart(caplog: pytest.LogCaptureFixture) -> None:
    hand = Hand(2)
    hand.everybody_is_seen()
    hand.ranks[0].on_change = lambda: 1 / 0  # type: ignore[assignment, return-value]
    hand.ranks[1].ring(1)
    hand.beat(1, 0)
    assert "the heartbeat goes on" in caplog.text


def test_all_enter_the_next_generation_together() -> None:
    with running(3) as ranks:
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=5)))
        until(lambda: ranks[1]._peers[0].record.wanted == 1)
        with pytest.raises(GenerationChanged, match=r"rank\(s\) \[0\] left generation 0"):
            ranks[1].check()
        others = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=5))) for r in (1, 2)]
        assert [join(), *(other() for other in others)] == [Quorum(1, (0, 1, 2))] * 3
        for rank in ranks:
            assert rank.generation == 1
            rank.check()


def test_a_lost_rank_is_left_out_and_comes_back() -> None:
    with running(3, dead_after=timedelta(seconds=0.3)) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._peers.values()))
        asleep = threading.Event()
        real, ranks[2].beat = ranks[2].beat, lambda: void(asleep.wait(10))  # type: ignore[method-assign]
        until(lambda: ranks[0].lost() == (2,) == ranks[1].lost())
        joins = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=5))) for r in (0, 1)]
        assert [join() for join in joins] == [Quorum(1, (0, 1))] * 2
        ranks[0].check()  # it is no member any more
        ranks[2].beat = real  # type: ignore[method-assign]
        asleep.set()
        with pytest.raises(GenerationChanged):
            until(lambda: bool(ranks[2].check()))
        joins = [in_thread(lambda: ranks[2].next_generation(timedelta(seconds=5)))]
        for r in (0, 1):
            with pytest.raises(GenerationChanged):
                until(lambda r=r: bool(ranks[r].check()))
            joins.append(in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=5))))
        assert [join() for join in joins] == [Quorum(2, (0, 1, 2))] * 3


def void(_: object) -> None:
    return None


def test_a_rank_that_fails_meanwhile_is_named_and_then_left_out() -> None:
    with running(3) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._peers.values()))
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=5)))
        until(lambda: ranks[1]._peers[0].record.wanted == 1)
        ranks[2].fail("out of memory")
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            join()
        until(lambda: ranks[1].lost() == (2,))
        joins = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=5))) for r in (0, 1)]
        assert [join() for join in joins] == [Quorum(1, (0, 1))] * 2


def test_a_rank_that_lives_but_does_not_come_is_a_timeout() -> None:
    with running(2) as ranks:
        until(lambda: ranks[0]._peers[1].confirmed)
        with pytest.raises(CollectiveTimeout, match=r"rank\(s\) \[1\] live but have not left"):
            ranks[0].next_generation(timedelta(seconds=0.1))


def test_a_restarted_rank_is_lost_to_its_generation_and_taken_into_the_next() -> None:
    store = HashStore()
    with running(2, store=store) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._peers.values()))
        ranks[1]._stop = True  # killed: no goodbye
        assert ranks[1]._thread is not None
        ranks[1]._thread.join()
        again = Membership(store, 1, 2, interval=timedelta(seconds=0.01))
        again.start()
        with pytest.raises(PeerLost, match="rank 1 was restarted"):
            until(lambda: bool(ranks[0].check()))
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=5)))
        with pytest.raises(GenerationChanged):
            until(lambda: bool(again.check()))
        assert again.next_generation(timedelta(seconds=5)) == join() == Quorum(1, (0, 1))
        ranks[0].check()
        again.close()


def test_two_memberships_on_one_store_need_a_prefix() -> None:
    store = HashStore()
    for i in range(2):
        with running(2, store=PrefixStore(f"fit{i}", store)) as ranks:
            joins = [in_thread(lambda r=r: r.next_generation(timedelta(seconds=5))) for r in ranks]
            assert [join() for join in joins] == [Quorum(1, (0, 1))] * 2


class DeadStore:
    """A store whose host can be switched off."""

    def __init__(self, store: Any) -> None:
        self.store, self.dead = store, False

    def clone(self) -> DeadStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


def test_a_store_that_is_gone_is_named() -> None:
    store = DeadStore(HashStore())
    with running(2, store=store, dead_after=timedelta(seconds=1)) as ranks:
        until(lambda: ranks[1]._peers[0].confirmed)
        store.dead = True
        with pytest.raises(PeerLost, match=r"the store has not answered for .*Connection reset") as caught:
            until(lambda: bool(ranks[1].check()))
        assert caught.value.ranks == (0,)
        store.dead = False  # only out of reach for a while
        until(lambda: ranks[1]._contact.refusals == 0)
        ranks[1].check()


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="rank=2"):
        Membership(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="four intervals"):
        Membership(HashStore(), 0, 2, interval=timedelta(seconds=6), dead_after=DEAD)
