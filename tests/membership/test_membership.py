"""Membership: who is alive, by a clock that the tests turn themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from lightning_async.errors import CollectiveTimeout, Evicted, GenerationChanged, PeerLost
from lightning_async.membership import failure_detector
from lightning_async.membership.generation import Generation
from lightning_async.membership.membership import Membership
from lightning_async.membership.store import Contact, HashStore, PrefixStore

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


def test_all_have_ended_once_the_last_one_has() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()
    hand.ranks[1].leave()
    hand.beat(0, 2)
    assert hand.ranks[0].all_ended() == {}
    hand.beat(0, times=30, seconds=1.0)
    assert set(hand.ranks[0].all_ended()) == {"1", "2"}


@contextmanager
def running(world_size: int, **kwargs: Any) -> Iterator[list[Membership]]:
    store = kwargs.pop("store", None) or HashStore()
    ranks = [Membership(store, r, world_size, interval=timedelta(seconds=0.01), **kwargs) for r in range(world_size)]
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.close)
            rank.start()
        yield ranks


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
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
        thread.join(60)
        assert box, "it has not come back"
        good, value = box[0]
        if not good:
            raise value
        return value

    return join


def agreed(generations: list[Generation]) -> tuple[int, tuple[str, ...]]:
    """What all members' views have in common."""
    ((number, members),) = {(each.number, each.members) for each in generations}
    assert {each.name for each in generations} == {*members} and len(generations) == len(members)
    return number, members


def test_silence_is_death_only_after_dead_after() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()
    hand.beat(0, 1, times=19, seconds=1.0)
    hand.ranks[0].check()
    hand.beat(0, 1, times=2, seconds=1.0)
    with pytest.raises(PeerLost, match=r"rank 0, generation 0: rank 2 was last seen 2\d\.\d s ago") as caught:
        hand.ranks[0].check()
    assert caught.value.ranks == (2,) and hand.ranks[1].lost() == ("2",)


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
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        ranks[1].close()
        ranks[1].close()
        until(lambda: ranks[0]._failure_detector.peers["1"].record.state == "left")
        threading.Event().wait(0.3)
        ranks[0].check()
        assert ranks[0].left() == {"1"} and ranks[0].lost() == ()
        assert ranks[0].next_generation(timedelta(seconds=30)) == Generation(1, ("0",), 0)


def test_a_failure_is_told() -> None:
    with running(2) as ranks:
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        ranks[1].fail("ValueError: no such label")
        until(lambda: ranks[0].lost() == ("1",))
        with pytest.raises(PeerLost, match="rank 1 failed: ValueError: no such label") as caught:
            ranks[0].check()
        assert caught.value.ranks == (1,)


def test_a_process_that_is_told_to_have_died_is_lost_at_once_and_not_one_that_follows_it() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()
    life = hand.ranks[2]._mine.life
    assert life.startswith(f"process {os.getpid()} on ")
    me = hand.ranks[0]
    me.hear_death("2", os.getpid() + 1, "died: another one")
    me.hear_death("7", os.getpid(), "died: nobody knows it")
    hand.beat(0)
    me.check()
    me.hear_death("2", os.getpid(), "died: its process was killed")
    hand.beat(2)  # what it may have written last
    hand.beat(0)
    with pytest.raises(PeerLost, match=r"rank 2 died: its process was killed\. See the log") as error:
        me.check()
    assert error.value.ranks == (2,)
    hand.beat(1)
    hand.ranks[1].check()  # it was told nothing
    hand.ranks[2]._mine = replace(hand.ranks[2]._mine, life=f"process {os.getpid() + 1} on it")
    hand.beat(2)
    hand.beat(0)
    assert me.lost() == ()


def test_one_that_was_never_seen_and_has_died_is_lost_and_one_that_left_is_not() -> None:
    hand = Hand(3)
    hand.store.compare_set("lightning_async/membership/1", "", "{}")
    hand.store.compare_set("lightning_async/membership/2", "", "{}")
    me = hand.ranks[0]
    me.hear_death("1", 4711, "died")
    hand.beat(0, times=2)
    assert me.lost() == ("1",)
    hand.beat(2, 0, 2, 0)
    hand.ranks[2].leave()
    hand.beat(2)
    me.hear_death("2", os.getpid(), "died: after its goodbye")
    hand.beat(0)
    assert me.lost() == ("1",)
    assert me.left() == {"2"}


def test_a_death_before_the_first_record_is_kept_for_its_name() -> None:
    """A process may end before anybody has read its heartbeat, and its name is then in no record."""
    hand = Hand(1, member="7")
    me = hand.ranks[0]
    me._board.open(timedelta(0))
    me.hear_death("9", 4711, "died: its process was killed")
    hand.beat(0)
    assert me.ended()["9"].describe("9") == "rank 9 died: its process was killed"
    assert me.lost() == (), "it is no member of this generation"
    for process, lost in ((4711, {"9"}), (4712, set[str]())):
        record = failure_detector.Record(life=f"process {process} on it", state=failure_detector.UP, beat=process)
        me._failure_detector.judge({"9": record}, 0.1)
        assert me._failure_detector.lost() == lost


def test_one_that_says_goodbye_while_the_store_is_read_and_has_ended_is_not_lost() -> None:
    hand = Hand(2)
    hand.everybody_is_seen()
    me, peer = hand.ranks
    exchange = me._board.exchange

    def slowly(mine: Any) -> Any:
        records = exchange(mine)
        peer.leave()
        peer.beat()
        me.hear_death("1", os.getpid(), "died: after its goodbye")
        return records

    me._board.exchange = slowly
    hand.beat(0)
    assert me.lost() == ()
    me._board.exchange = exchange
    hand.beat(0)
    assert me.lost() == () and me.left() == {"1"}


def test_bells_are_heard_at_once() -> None:
    heard = threading.Event()
    with running(2, on_change=heard.set) as ranks:
        until(lambda: all(rank._failure_detector.peers[str(1 - i)].confirmed for i, rank in enumerate(ranks)))
        heard.clear()
        ranks[1].ring(7)
        assert ranks[1].bell == 7
        until(lambda: ranks[0].bell == 7)
        assert heard.wait(30)
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
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=30)))
        until(lambda: ranks[1]._failure_detector.peers["0"].record.wanted == 1)
        with pytest.raises(GenerationChanged, match=r"rank\(s\) \[0\] left generation 0"):
            ranks[1].check()
        others = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=30))) for r in (1, 2)]
        assert agreed([join(), *(other() for other in others)]) == (1, ("0", "1", "2"))
        for rank in ranks:
            assert rank.generation.number == 1
            rank.check()


def test_a_lost_rank_is_left_out_and_comes_back() -> None:
    with running(3, dead_after=timedelta(seconds=1)) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._failure_detector.peers.values()))
        asleep = threading.Event()
        real, ranks[2].beat = ranks[2].beat, lambda: void(asleep.wait(60))  # type: ignore[method-assign]
        until(lambda: ranks[0].lost() == ("2",) == ranks[1].lost())
        joins = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=30))) for r in (0, 1)]
        assert agreed([join() for join in joins]) == (1, ("0", "1"))
        ranks[0].check()  # it is no member any more
        ranks[2].beat = real  # type: ignore[method-assign]
        asleep.set()
        with pytest.raises(GenerationChanged):
            until(lambda: bool(ranks[2].check()))
        joins = [in_thread(lambda: ranks[2].next_generation(timedelta(seconds=30)))]
        for r in (0, 1):
            with pytest.raises(GenerationChanged):
                until(lambda r=r: bool(ranks[r].check()))
            joins.append(in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=30))))
        assert agreed([join() for join in joins]) == (2, ("0", "1", "2"))


def void(_: object) -> None:
    return None


def test_a_rank_that_fails_meanwhile_is_named_and_then_left_out() -> None:
    with running(3) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._failure_detector.peers.values()))
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=30)))
        until(lambda: ranks[1]._failure_detector.peers["0"].record.wanted == 1)
        ranks[2].fail("out of memory")
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            join()
        until(lambda: ranks[1].lost() == ("2",))
        joins = [in_thread(lambda r=r: ranks[r].next_generation(timedelta(seconds=30))) for r in (0, 1)]
        assert agreed([join() for join in joins]) == (1, ("0", "1"))


def test_a_rank_that_lives_but_does_not_come_is_a_timeout() -> None:
    with running(2) as ranks:
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        with pytest.raises(CollectiveTimeout, match=r"rank\(s\) \[1\] live but have not left"):
            ranks[0].next_generation(timedelta(seconds=0.1))


def test_a_restarted_rank_is_lost_to_its_generation_and_taken_into_the_next() -> None:
    store = HashStore()
    with running(2, store=store) as ranks:
        until(lambda: all(peer.confirmed for rank in ranks for peer in rank._failure_detector.peers.values()))
        ranks[1]._heartbeat_thread.stop()  # killed: no goodbye
        again = Membership(store, 1, 2, interval=timedelta(seconds=0.01))
        again.start()
        with pytest.raises(PeerLost, match="rank 1 was restarted"):
            until(lambda: bool(ranks[0].check()))
        join = in_thread(lambda: ranks[0].next_generation(timedelta(seconds=30)))
        with pytest.raises(GenerationChanged):
            until(lambda: bool(again.check()))
        assert agreed([again.next_generation(timedelta(seconds=30)), join()]) == (1, ("0", "1"))
        ranks[0].check()
        again.close()


def test_two_memberships_on_one_store_need_a_prefix() -> None:
    store = HashStore()
    for i in range(2):
        with running(2, store=PrefixStore(f"fit{i}", store)) as ranks:
            joins = [in_thread(lambda r=r: r.next_generation(timedelta(seconds=30))) for r in ranks]
            assert agreed([join() for join in joins]) == (1, ("0", "1"))


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
        until(lambda: ranks[1]._failure_detector.peers["0"].confirmed)
        store.dead = True
        with pytest.raises(PeerLost, match=r"the store has not answered for .*Connection reset") as caught:
            until(lambda: bool(ranks[1].check()))
        assert caught.value.ranks == (0,)
        store.dead = False  # only out of reach for a while
        until(lambda: ranks[1]._contact.refusals == 0)
        ranks[1].check()


def test_a_store_that_says_nothing_at_all_is_named_so() -> None:
    contact, said = Contact(0.0, dead_s=4.0), None
    for now in range(1, 9):
        said = said or contact.lost(float(now))
    assert said is not None and said.startswith("the store has not answered for 4.0 s (no answer, and no error). ")


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ValueError, match="rank=2"):
        Membership(HashStore(), 2, 2)
    with pytest.raises(ValueError, match="four intervals"):
        Membership(HashStore(), 0, 2, interval=timedelta(seconds=6), dead_after=DEAD)


# ---- ranks that come and go ----


class Growing(Hand):
    """Ranks by name, some of which may join later."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, elastic=True)
        self.names = {str(number): rank for number, rank in enumerate(self.ranks)}
        self.open(*self.names)
        self.everybody(times=3)

    def open(self, *names: str) -> None:
        for name in names:
            self.names[name]._board.open(timedelta(0))

    def everybody(self, times: int = 1, seconds: float = 0.2) -> None:
        for _ in range(times):
            self.clock.now += seconds
            for rank in self.names.values():
                rank.beat()

    def come(self, name: str) -> Membership:
        self.names[name] = joining = Membership(self.store, 0, 1, member=name, clock=self.clock)
        self.open(name)
        self.everybody(times=3)
        return joining

    def die(self, name: str) -> Membership:
        dead = self.names.pop(name)
        self.everybody(times=110)
        return dead

    def meet(self) -> list[Generation]:
        """All that live enter the next generation; nobody waits, as each asks again after every beat."""
        entered: dict[str, Generation] = {}
        for _ in range(8):
            for name, rank in self.names.items():
                if name not in entered:
                    with suppress(CollectiveTimeout):
                        entered[name] = rank.next_generation(timedelta(0))
            self.everybody()
        return [entered[name] for name in self.names]


def test_names_are_for_life_and_numbers_for_a_generation() -> None:
    hand = Growing(3)
    hand.die("1")
    assert agreed(hand.meet()) == (1, ("0", "2"))
    assert [rank.generation.rank for rank in hand.names.values()] == [0, 1]
    late = hand.come("host-7:4")
    for rank in list(hand.names.values())[:2]:
        rank.check()  # it has not asked yet
    for _ in range(2):  # it hears that the present one is decided
        with suppress(CollectiveTimeout):
            late.next_generation(timedelta(0))
        hand.everybody(times=2)
    with pytest.raises(GenerationChanged, match=r"rank 0: rank\(s\) \[host-7:4\] left generation 1"):
        hand.names["0"].check()
    number, members = agreed(hand.meet())
    assert number > 1 and members == ("0", "2", "host-7:4")
    hand.everybody()
    for rank in hand.names.values():
        rank.check()
    assert late.generation.rank_of("2") == 1 and late.generation.name_of(2) == "host-7:4"


def test_a_joining_rank_is_seen_and_is_in_no_generation_until_it_is_silent_for_a_moment() -> None:
    hand = Growing(3)
    joining_rank = hand.names["1.1.1"] = Membership(hand.store, 0, 1, member="1.1.1", visits=True, clock=hand.clock)
    hand.open("1.1.1")
    hand.everybody(times=3)
    assert hand.names["0"].visitors() == ("1.1.1",)
    hand.die("1")
    del hand.names["1.1.1"]
    assert agreed(hand.meet()) == (1, ("0", "2"))
    hand.everybody(times=10)
    assert hand.names["0"].visitors() == ()  # a tenth of what is death elsewhere
    joining_rank.beat()
    hand.everybody()
    assert hand.names["2"].visitors() == ("1.1.1",)
    joining_rank._mine = replace(joining_rank._mine, state="left")  # as `close` does
    joining_rank.beat()
    hand.everybody()
    assert hand.names["0"].visitors() == ()
    assert "1.1.1" in hand.names["0"].left()


def test_rank_0_may_be_lost_and_comes_back_as_the_last() -> None:
    hand = Growing(3)
    hand.die("0")
    with pytest.raises(PeerLost, match="rank 0 was last seen") as caught:
        hand.names["1"].check()
    assert caught.value.ranks == (0,)
    assert agreed(hand.meet()) == (1, ("1", "2"))
    hand.come("3")
    number, members = agreed(hand.meet())
    assert members == ("1", "2", "3")
    hand.names["0"] = Membership(hand.store, 0, 3, elastic=True, clock=hand.clock)
    assert hand.names["0"]._board.open(timedelta(0))  # there was one before
    hand.names["0"]._mine = replace(hand.names["0"]._mine, since=-1)  # as `start` does
    hand.everybody(times=3)
    later, members = agreed(hand.meet())
    assert later > number and members == ("1", "2", "3", "0")  # whoever has been in longest is first
    hand.die("1")
    with pytest.raises(PeerLost, match="rank 1 was last seen") as caught:
        hand.names["3"].check()
    assert caught.value.ranks == (0,)  # its number in that generation
    assert agreed(hand.meet())[1] == ("2", "3", "0")


def test_a_rank_that_misses_a_generation_keeps_its_number_where_none_may_join() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()

    def ask(*ranks: int) -> list[Generation]:
        entered = []
        for rank in ranks:
            with suppress(CollectiveTimeout):
                entered.append(hand.ranks[rank].next_generation(timedelta(0)))
        return entered

    ask(0, 1, 2)
    hand.beat(0, 1, 2)
    hand.beat(1, 2)
    assert [each.number for each in ask(1, 2)] == [1, 1]  # rank 0 has yet to hear that it is decided
    ask(1, 2)  # and it has failed: they want another one
    hand.beat(1, 2)
    decide = hand.ranks[0]._board.decide

    def slowly(wanted: int, proposal: Any) -> Any:
        ask(0)  # its training thread looks meanwhile, and finds that the others want more
        return decide(wanted, proposal)

    hand.ranks[0]._board.decide = slowly
    hand.beat(0)
    hand.ranks[0]._board.decide = decide
    for number in (2, 3):
        for _ in range(4):
            ask(*(r for r in range(3) if hand.ranks[r].generation.number < number))
            hand.beat(0, 1, 2)
        assert [rank.generation.number for rank in hand.ranks] == [number] * 3
        assert [rank.generation.rank for rank in hand.ranks] == [0, 1, 2]


def look(rank: Membership) -> Any:
    """What the next generation is, or why there is none yet."""
    try:
        return rank.next_generation(timedelta(0))
    except (CollectiveTimeout, PeerLost) as error:
        return error


def test_one_that_was_left_out_does_not_propose_itself_for_a_later_generation() -> None:
    hand = Hand(4, readmit=False, fresh=True)
    hand.everybody_is_seen()
    hand.beat(0, 1, 3, times=25, seconds=1.0)  # rank 2 is stopped
    found: list[Any] = []
    for times in (2, 0):
        found = [look(hand.ranks[r]) for r in (0, 1, 3)]
        hand.beat(0, 1, 3, times=times, seconds=0.1)
    assert agreed(found) == (1, ("0", "1", "3"))
    for r in (0, 1):  # rank 3 is silent, and they wait for it as long as they wait for any
        assert isinstance(look(hand.ranks[r]), CollectiveTimeout)
    hand.beat(0, 1, 2, times=2, seconds=0.1)
    hand.ranks[2].suspect()  # it wakes up, and takes rank 3 for lost sooner
    found = [look(hand.ranks[2])]
    while isinstance(found[-1], CollectiveTimeout) and len(found) < 60:
        hand.beat(2, 0, 1, seconds=0.1)
        found.append(look(hand.ranks[2]))
    assert isinstance(found[-1], Evicted), found[-1]
    hand.beat(0, 1, times=25, seconds=1.0)
    assert agreed([look(hand.ranks[r]) for r in (0, 1)]) == (2, ("0", "1"))


def test_where_something_broke_a_tenth_of_the_silence_from_then_on_is_death() -> None:
    hand = Hand(2, readmit=False, fresh=True, dead_after=timedelta(seconds=30))
    hand.everybody_is_seen()
    hand.beat(0, times=10, seconds=0.5)  # rank 1 is busy
    hand.ranks[0].suspect()
    hand.beat(0, times=5, seconds=0.5)
    assert hand.ranks[0].lost() == (), "it has had 2.5 s to say that it has heard of it"
    hand.beat(0, times=2, seconds=0.5)
    assert hand.ranks[0].lost() == ("1",)


def test_one_that_alone_does_not_go_on_decides_nothing_for_the_others() -> None:
    hand = Hand(3, readmit=False, fresh=True)
    for rank in hand.ranks:
        rank.keep(2)
    hand.everybody_is_seen()
    hand.ranks[0].suspect()
    look(hand.ranks[0])
    hand.beat(0, times=25, seconds=0.1)  # the others do not reach the store for a while
    with pytest.raises(PeerLost, match=r"rank 1 was last seen .* ago; rank 2 was last seen"):
        hand.ranks[0].next_generation(timedelta(0))
    hand.ranks[0].leave()
    hand.ranks[0].beat()
    found: list[Any] = []
    for times in (3, 0):
        found = [look(hand.ranks[r]) for r in (1, 2)]
        hand.beat(1, 2, times=times, seconds=0.1)
    assert agreed(found) == (1, ("1", "2"))


def test_one_that_leaves_in_order_is_in_no_later_generation() -> None:
    hand = Growing(3)
    leaving = hand.names.pop("0")
    leaving.close()
    leaving.beat()
    hand.everybody(times=2)
    hand.names["1"].check()
    assert hand.names["1"].left() == {"0"}
    assert agreed(hand.meet()) == (1, ("1", "2"))


def test_joining_ranks_alone_are_no_generation() -> None:
    hand = Growing(2)
    first = hand.come("a")
    del hand.names["0"], hand.names["1"]
    second = hand.come("b")
    hand.everybody(times=110)
    for joining in (first, second):
        with pytest.raises(CollectiveTimeout):
            joining.next_generation(timedelta(0))
    hand.everybody(times=5)
    assert first.generation == Generation.joining("a") and not hand.store.check(
        ["lightning_async/membership/generation/1"]
    )


def test_a_smaller_part_sees_that_it_is_one() -> None:
    """Of whom a rank saw in its last generation, it can tell who is missing in the next."""
    hand = Growing(5)
    before = hand.names["4"].generation
    for name in ("0", "1", "2"):
        del hand.names[name]
    hand.everybody(times=110)
    _, members = agreed(hand.meet())
    assert 2 * len(set(members) & set(before.members)) < before.world_size


def test_a_world_that_is_not_elastic_hears_of_nobody() -> None:
    hand = Hand(2)
    for rank in hand.ranks:
        rank._board.open(timedelta(0))
    hand.beat(0, 1, times=2)
    late = Membership(hand.store, 0, 1, member="late", clock=hand.clock)
    late._board.open(timedelta(0))
    with suppress(CollectiveTimeout):
        late.next_generation(timedelta(0))
    for _ in range(5):
        late.beat()
        hand.beat(0, 1, seconds=0.2)
    assert not hand.ranks[0]._failure_detector.peers.keys() & {"late"}
    hand.ranks[0].check()


def test_a_joining_ranks_name_is_a_name() -> None:
    for name in ("", "a/b", "ü", "x" * 101):
        with pytest.raises(ValueError, match="letters, digits"):
            Membership(HashStore(), 0, 1, member=name)
    with pytest.raises(ValueError, match="a joining rank is alone"):
        Membership(HashStore(), 0, 2, member="late")


def test_who_was_given_up_by_another_rank_is_described_by_when_it_was_seen_here() -> None:
    """This rank would have waited for longer, and has no limit of its own to tell of."""
    peer = failure_detector.Peer(confirmed=True, silent_s=0.94, limit_s=10.0)
    assert peer.describe("1") == "rank 1 was last seen 0.9 s ago, and another rank has given it up"


def test_a_waiting_rank_knows_who_has_not_come() -> None:
    hand = Hand(3)
    hand.everybody_is_seen()
    (first, second, third) = hand.ranks
    assert first.behind("call", 4) == ("1", "2")
    assert third.behind("call", 3) == ("0", "1"), "before the next heartbeats"
    assert third.behind("header", 9) == ("0", "1")
    hand.beat(0, 2, 0, 1)
    assert first.behind("call", 4) == ("1", "2"), "rank 2 waits in an earlier call"
    assert third.behind("call", 4) == ("1",)
    hand.beat(2, 0)
    assert first.behind("call", 4) == ("1",)
    hand.beat(1)
    assert second.behind("call", 4) == ()
    assert second.behind("header", 9) == ("0",), "each kind has numbers of its own"
