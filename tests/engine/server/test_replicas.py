"""A shard has a copy on another server: what was acknowledged is there once, whichever of them is lost, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_async.comm.shm import ShmChannel
from lightning_async.engine.server import copies as copies_of_shards
from lightning_async.engine.server.client import Client
from lightning_async.engine.server.line import forget
from lightning_async.engine.server.store import Store
from lightning_async.engine.server.views import View
from lightning_async.errors import ChannelTimeout, Evicted, PeerLost
from tests.engine.server.replicated import Two, two
from tests.engine.server.running import push

SGD = ("SGD", {"lr": 1.0, "momentum": 0.5})


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.01)


def copy_of(servers: Two, table: int = 0) -> Store:
    """What server 1 has of server 0's shard."""
    hosting = servers.hosts[1].hosting
    assert hosting is not None
    found = hosting._seat(False, table)._copy
    assert found is not None
    return found


def assert_equal_stores(one: Store, other: Store) -> None:
    own = ("standby", "filled")
    for store, its in ((one, other), (other, one)):
        for name in store.record.keys() - set(own):
            assert list_of(store.record[name]) == list_of(its.record[name]), name
    assert one.parts.keys() == other.parts.keys()
    for name, part in one.parts.items():
        assert torch.equal(part, other.parts[name]), name


def list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("optimizer", "terms"),
    [
        (("delta", {}), {}),
        (SGD, {}),
        (SGD, {"staleness": "dana_gap_aware"}),
        (("Adam", {"lr": 0.1}), {"staleness": "gap_aware"}),
        (("Adagrad", {"lr": 0.1}), {}),
        (("SGD", {"lr": 0.1}), {"staleness": "fedbuff"}),
    ],
    ids=str,
)
def test_the_copy_is_the_store_to_the_bit_after_each_answer(optimizer: Any, terms: dict[str, Any]):
    with two(numel=33, **terms) as servers:
        a, b = (servers.started(name, *optimizer) for name in "ab")
        values = torch.Generator().manual_seed(0)
        for number in range(12):
            worker = a if number % 3 else b
            worker.gradients[0].copy_(torch.randn(33, generator=values))
            answer = worker.push(pull=number % 2 == 0)
            assert answer.survives == "replica"
            assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))
        b.close()
        a.pull()
        until(lambda: "b" not in copy_of(servers).known)
        assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
def test_a_lost_server_is_replaced_by_its_copy_and_each_push_is_in_once(mode: str):
    with two(mode=mode, num_workers=2) as servers, ThreadPoolExecutor(2) as pool:
        workers = [servers.started(name) for name in "ab"]

        def pushes(worker: Client, count: int) -> list[Any]:
            answers = []
            for _ in range(count):
                worker.gradients[0].fill_(1.0)
                answers.append(worker.push())
            return answers

        made = [pool.submit(pushes, worker, 4) for worker in workers]
        before = [answer for each in made for answer in each.result(30)]
        assert {answer.survives for answer in before} == {"replica"}
        servers.hosts[0].lose()
        made = [pool.submit(pushes, worker, 3) for worker in workers]
        after = [answer for each in made for answer in each.result(30)]
        assert {answer.survives for answer in after} == {"process"}
        assert all(answer.lost == 0 for answer in after)
        total = 7 if mode == "sync" else 14
        assert workers[0].pull().versions == (total,)
        assert workers[0].weights[0].tolist() == [float(total)] * 8
        assert servers.views().newest(None) == View(1, 1)


def kills_before_it_is_told(servers: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_in(servers, monkeypatch, "_tell", before=True)


def kills_when_the_copy_has_it(servers: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_in(servers, monkeypatch, "_hear", before=False)


def kills_when_the_copy_is_told(servers: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_in(servers, monkeypatch, "_tell", before=False)


def lose_in(servers: Two, monkeypatch: pytest.MonkeyPatch, name: str, before: bool) -> None:
    """Server 0 is lost in the next push: it neither goes on, nor answers."""
    copies = servers.hosts[0].server()._copies
    original = getattr(copies, name)

    def lost(*told: Any) -> Any:
        if name == "_tell" and told[0] != "push":
            return original(*told)
        found = None if before else original(*told)
        monkeypatch.undo()
        servers.hosts[0].lose()
        raise PeerLost("killed") if found is None else PeerLost("killed, and the copy has it")

    monkeypatch.setattr(copies, name, lost)


@pytest.mark.parametrize("kill", [kills_before_it_is_told, kills_when_the_copy_is_told, kills_when_the_copy_has_it])
def test_a_push_under_way_is_in_once_wherever_its_server_is_lost(
    kill: Callable[[Two, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    with two() as servers:
        a = servers.started("a", *SGD)
        wanted, momentum = torch.zeros(8), torch.zeros(8)
        for number in range(1, 7):
            if number == 4:
                kill(servers, monkeypatch)
            found = push(a, float(number))
            momentum = momentum * 0.5 + number
            wanted = wanted - momentum
            assert torch.equal(found, wanted), number
        assert servers.views().newest(None) == View(1, 1)
        assert servers.hosts[1].server(home=False)._store.version == 6


def test_a_server_whose_process_is_killed_comes_back_and_fills_its_copy_anew():
    """Also where it was killed with an update that its copy had not: that was answered to nobody."""
    with two() as servers:
        a = servers.started("a")
        push(a, 1.0)
        store = servers.hosts[0].server()._store
        copies, store.copies = store.copies, None
        store.push("a", 2, torch.ones(8), 0)
        store.copies = copies
        servers.hosts[0].kill()
        assert copy_of(servers).version == 1
        assert push(a, 1.0).tolist() == [2.0] * 8  # said again: it was applied
        assert copy_of(servers).version == 2
        assert servers.views().newest(None) == View(0, 0)
        assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))


def test_a_copy_whose_process_is_killed_is_filled_anew():
    with two() as servers:
        a = servers.started("a", *SGD)
        for number in range(1, 6):
            if number == 3:
                servers.hosts[1].kill()
            push(a, 1.0)
            assert copy_of(servers).version == number
            assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))
        assert servers.views().newest(None) == View(0, 0)


def test_a_lost_copy_is_done_without_and_had_again(caplog: pytest.LogCaptureFixture):
    with two() as servers:
        a, b = servers.started("a"), servers.started("b")
        push(a, 1.0)
        servers.hosts[1].lose()
        a.gradients[0].fill_(1.0)
        answer = a.push()
        assert (answer.versions, answer.survives) == ((2,), "process")
        assert push(b, 1.0).tolist() == [3.0] * 8
        assert servers.views().newest(None) == View(1, 0)
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("Shard 0, which server 0 had: the copy on server 1 is lost (worker 'a': ")
        servers.hosts[1].begin()
        until(lambda: a.pull().survives == "replica")
        assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))
        push(b, 1.0)
        servers.hosts[0].lose()
        assert push(a, 1.0).tolist() == [5.0] * 8
        assert servers.views().newest(None) == View(2, 1)


@pytest.mark.parametrize("lost", [0, 1], ids=["primary", "copy"])
def test_rounds_are_of_all_workers_whichever_server_is_lost(lost: int):
    """Whoever is sent to look for the next generation is waited for."""
    with two(mode="sync", num_workers=2) as servers, ThreadPoolExecutor(2) as pool:
        workers = [servers.started(name) for name in "ab"]
        for round_ in range(1, 16):
            if round_ % 5 == 0:
                servers.hosts[lost].lose()
            pushed = [pool.submit(push, *each) for each in zip(workers, (1.0, 3.0), strict=True)]
            assert [each.result(30)[0].item() for each in pushed] == [2.0 * round_] * 2
            if round_ % 5 == 0:
                servers.hosts[lost].begin()
                until(lambda: workers[0].pull().survives == "replica")
                lost = 1 - lost


def test_places_change_as_often_as_servers_are_lost_and_come_back():
    with two() as servers:
        a = servers.started("a", *SGD)
        wanted, momentum, lost = torch.zeros(8), torch.zeros(8), 0
        for number in range(1, 13):
            if number % 3 == 0:
                servers.hosts[lost].lose()
            found = push(a, 1.0)
            momentum = momentum * 0.5 + 1.0
            wanted = wanted - momentum
            assert torch.equal(found, wanted), number
            if number % 3 == 0:
                servers.hosts[lost].begin()
                until(lambda: a.pull().survives == "replica")
                lost = 1 - lost
        assert servers.views().newest(None) == View(4, 0)


def test_a_worker_that_is_lost_with_a_server_is_waited_for_until_the_replica_hears_of_it():
    """It hears that also where it takes the server's place for that."""
    with two(mode="sync", num_workers=2) as servers, ThreadPoolExecutor(2) as pool:
        a, b = servers.started("a"), servers.started("b")
        for each in [pool.submit(push, worker, 1.0) for worker in (a, b)]:
            each.result(30)
        servers.hosts[0].lose()
        b._lines[0]._drop(PeerLost("it is lost, too"))
        places = servers.places()
        with pytest.raises(PeerLost, match="nobody answers"):
            forget(places, ["b"])
        assert servers.views().claim(View(1, 1), "a") == (View(1, 1), True)
        places.close()
        forget(places := servers.places(), ["b"])
        places.close()
        assert push(a, 1.0).tolist() == [2.0] * 8
        with pytest.raises(Evicted):
            push(b, 1.0)


def test_where_both_are_lost_workers_say_so():
    with two() as servers:
        a = servers.worker("a", timeout_s=2.0)
        a.start()
        for host in servers.hosts:
            host.lose()
        with pytest.raises(ChannelTimeout, match="server 0 has not answered 'push'"):
            push(a, 1.0)


def test_an_old_primary_that_wakes_is_refused_and_answers_nobody(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It stood still with a push applied and not answered, and another worker still holds its connection."""
    with two(lost_after_s=1.0) as servers:
        a, b = servers.started("a"), servers.started("b")
        push(a, 1.0)
        push(b, 1.0)
        old = servers.hosts[0].server()
        stopped, wakes, tell = threading.Event(), servers.hosts[0].awake, old._copies._tell

        def stands_still(*told: Any) -> Any:
            wakes.clear()
            stopped.set()
            assert wakes.wait(60)
            return tell(*told)

        monkeypatch.setattr(old._copies, "_tell", stands_still)
        with ThreadPoolExecutor(1) as pool:
            pushed = pool.submit(push, a, 1.0)
            assert stopped.wait(10)
            assert pushed.result(20).tolist() == [3.0] * 8  # its lock is held: nobody else hears of it, either
            assert servers.views().newest(None) == View(1, 1)
            monkeypatch.undo()
            wakes.set()
            assert push(b, 1.0).tolist() == [4.0] * 8
        until(lambda: old._copies._fenced)
        assert "has lost its shard: another one has it, since generation 1" in capfd.readouterr().err
        until(lambda: a.pull().survives == "replica")  # it has the copy now
        assert servers.hosts[1].server(home=False)._store.version == 4
        assert a.weights[0].tolist() == [4.0] * 8


def test_a_server_that_stands_still_while_a_part_leaves_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ShmChannel, "shares_memory", False)
    with two(lost_after_s=1.0) as servers:
        a = servers.started("a")
        push(a, 1.0)
        a.gradients[0].fill_(1.0)
        servers.hosts[0].awake.clear()
        with servers.hosts[0].server()._changed:
            began = time.monotonic()
            a.leave([(4, 8)])
            assert time.monotonic() - began < 20.0
            assert a.push().versions == (2,)
        servers.hosts[0].awake.set()
        assert a.weights[0].tolist() == [2.0] * 8
        assert servers.views().newest(None) == View(1, 1)


def test_two_that_are_cut_off_from_each_other_do_not_both_go_on(monkeypatch: pytest.MonkeyPatch):
    """The primary reaches no copy, and worker b no primary: one of both has its way, and the other one follows."""
    with two(lost_after_s=1.0) as servers:
        a, b = servers.started("a"), servers.started("b")
        push(a, 1.0)
        copies = servers.hosts[0].server()._copies

        def cut_off() -> Any:
            raise PeerLost("no way there")

        monkeypatch.setattr(copies, "_connect", cut_off)
        copies._drop()
        places = b._lines[0]._places
        assert places is not None
        connect = places.connect

        def only_the_copy(timeout_s: float) -> Any:
            if places.view.primary == 0 and places.view.generation == 0:
                raise PeerLost("no way there")
            return connect(timeout_s)

        monkeypatch.setattr(places, "connect", only_the_copy)
        channel = b._lines[0]._channel
        assert channel is not None
        channel.break_off()
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(push, each, 1.0) for each in (a, b)]
            totals = sorted(each.result(30)[0].item() for each in found)
        assert totals[1] == 3.0
        view = servers.views().newest(None)
        assert view is not None and view.generation == 1
        assert a.pull().versions == b.pull().versions == (3,)


def test_whoever_comes_to_a_server_in_the_place_of_a_lost_one_finds_the_copy():
    """And does not bring it weights of its own."""
    with two() as servers:
        a = servers.started("a")
        push(a, 1.0)
        servers.hosts[0].lose()
        servers.hosts[0].begin()
        late = servers.worker("late")
        late.gradients[0].fill_(100.0)
        late.start()
        assert late.weights[0].tolist() == [1.0] * 8
        assert push(a, 1.0).tolist() == [2.0] * 8


def test_a_stale_word_leaves_no_empty_server_where_the_copy_comes_to_be(monkeypatch: pytest.MonkeyPatch):
    """It comes while the server is filled that has lost its shard, and the copy is to take its place again."""
    with two() as servers:
        a = servers.started("a")
        servers.hosts[0].lose()
        push(a, 1.0)
        copies, heard = servers.hosts[1].server(home=False)._copies, []
        fill = copies._fill

        def and_somebody_comes(channel: Any) -> None:
            late = servers.places()
            late._known = View(0, 0)
            called = late.connect(10)
            hello = {"do": "hello", "worker": "b", "client": "b", "fingerprint": "plan", "life": 1, "said": 0}
            called.send({**hello, **late.told()})
            heard.append(called.receive(10)[0].get("refused"))
            called.close()
            late.close()
            fill(channel)

        monkeypatch.setattr(copies, "_fill", and_somebody_comes)
        servers.hosts[0].begin()
        until(lambda: a.pull().survives == "replica")
        assert heard == ["copy"]
        servers.hosts[1].lose()
        assert push(a, 1.0).tolist() == [2.0] * 8
        assert servers.views().newest(None) == View(2, 0)


def test_a_copy_that_stands_still_holds_nobody_up_once_it_is_done_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies_of_shards, "_AGAIN_S", 0.1)
    with two(lost_after_s=2.0) as servers:
        a = servers.started("a")
        servers.hosts[1].awake.clear()
        servers.hosts[0].server()._copies._drop()
        push(a, 1.0)
        assert servers.views().newest(None) == View(1, 0)
        began, took = time.monotonic(), []
        while time.monotonic() - began < 1.0:
            then = time.monotonic()
            push(a, 1.0)
            took.append(time.monotonic() - then)
        servers.hosts[1].awake.set()
        assert max(took) < 1.0
        until(lambda: a.pull().survives == "replica")


def test_a_copy_that_is_filled_when_its_primary_is_lost_is_the_one_before(monkeypatch: pytest.MonkeyPatch):
    """Half a copy is none: what was there whole counts."""
    with two() as servers:
        a = servers.started("a", *SGD)
        wanted = push(a, 1.0)
        copies = servers.hosts[0].server()._copies
        send = ShmChannel.send

        def dies(self: ShmChannel, header: Any, *rest: Any) -> None:
            if header.get("do") == "part" and header["name"] == "momentum_buffer":
                monkeypatch.undo()
                servers.hosts[0].lose()
                raise PeerLost("killed")
            send(self, header, *rest)

        copies._drop()
        monkeypatch.setattr(ShmChannel, "send", dies)
        found = push(a, 2.0)
        assert torch.equal(found, wanted - (2.0 + 0.5))
        assert servers.views().newest(None) == View(1, 1)


def test_a_change_that_fails_on_one_side_is_made_good(monkeypatch: pytest.MonkeyPatch):
    with two(staleness="gap_aware") as servers:
        a = servers.started("a", *SGD)
        push(a, 1.0)

        def no_memory(**rest: Any) -> Any:
            monkeypatch.undo()
            raise OSError("no memory")

        monkeypatch.setattr(copy_of(servers), "push", no_memory)
        push(a, 1.0)
        assert_equal_stores(servers.hosts[0].server()._store, copy_of(servers))
        assert servers.views().newest(None) == View(0, 0)


def test_weights_that_are_brought_anew_are_in_the_copy():
    """And generations go on: what was claimed before is claimed."""
    with two() as servers:
        a = servers.started("a", *SGD)
        push(a, 1.0)
        servers.hosts[1].lose()
        push(a, 1.0)
        servers.hosts[1].begin()
        a.gradients[0].fill_(7.0)
        a.start(*SGD, anew=True)
        assert a.weights[0].tolist() == [7.0] * 8
        until(lambda: a.pull().survives == "replica")
        assert copy_of(servers).params.tolist() == [7.0] * 8
        servers.hosts[0].lose()
        assert push(a, 1.0).tolist() == [6.0] * 8
        assert servers.views().newest(None) == View(2, 1)


def test_each_table_has_a_view_of_its_own():
    with two() as servers:
        first, second = servers.started("a"), servers.worker("a", table=1)
        second.gradients[0].fill_(10.0)
        second.start()
        push(first, 1.0)
        push(second, 1.0)
        servers.hosts[0].lose()
        assert push(first, 1.0).tolist() == [2.0] * 8
        assert push(second, 1.0).tolist() == [12.0] * 8
        assert servers.views(0).newest(None) == servers.views(1).newest(None) == View(1, 1)


def test_a_generation_is_claimed_once():
    with two() as servers:
        views = servers.views()
        assert views.newest(None) is None
        assert views.claim(View(), "a") == (View(), True)
        assert views.claim(View(1, 1), "a") == (View(1, 1), True)
        assert views.claim(View(1, 0), "b") == (View(1, 1), False)
        assert views.newest(None) == views.newest(View()) == View(1, 1)
