"""What a server answers, when, and to whom: each push is applied once, whatever connection it comes over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_async.comm.p2p import ShmChannel, ShmDial
from lightning_async.comm.p2p_gloo import PairChannel
from lightning_async.errors import ChannelTimeout, Evicted, PeerLost, SettingsMismatch
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from tests.parameter_server.running import Running, push, running


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.002)


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_async_pushes_are_applied_as_they_come_and_say_their_lag(gloo: bool):
    with running(gloo=gloo) as server:
        a, b = server.started("a"), server.started("b")
        assert push(a, 1.0).tolist() == [1.0] * 8
        a.gradients[0].fill_(2.0)
        answer = a.push(pull=False)
        assert (answer.versions, answer.lags) == ((2,), (0,))
        b.gradients[0].fill_(4.0)
        answer = b.push()  # it has pulled version 0, and two have come since
        assert (answer.versions, answer.lags, answer.resent) == ((3,), (2,), 0)
        assert b.weights[0].tolist() == [7.0] * 8
        a.gradients[0].zero_()
        assert a.push().lags == (2,)  # it has pulled with its first push, not with its second
        assert a.pull().versions == (4,)


def test_a_round_steps_what_any_worker_has_a_gradient_for():
    """With zeros for the workers that have none, as DDP; and a worker without any gradient is not asked."""
    with running(6, mode="sync", num_workers=3) as server:
        workers = [server.worker(name) for name in "abc"]
        for worker in workers:
            worker.gradients[0].fill_(1.0)
            worker.start("SGD", {"lr": 1.0, "weight_decay": 1.0})
        gradients = [[2.0, 2.0, 0.0, 0.0, 0.0, 0.0], [0.0, 6.0, 6.0, 0.0, 0.0, 0.0], [0.0] * 6]
        how: Any = [{"skips": [[(2, 6)]]}, {"skips": [[(0, 1), (3, 6)]], "weight": 3.0}, {"weight": 0.0}]

        def make(number: int) -> None:
            workers[number].gradients[0].copy_(torch.tensor(gradients[number]))
            workers[number].push(**how[number])

        on_threads(*(lambda n=n: make(n) for n in range(3)))
        expected = [1.0 - (0.5 + 1.0), 1.0 - (5.0 + 1.0), 1.0 - (4.5 + 1.0), 1.0, 1.0, 1.0]
        assert workers[2].weights[0].tolist() == expected


def test_a_push_with_too_many_places_without_gradients_is_refused():
    with running(20_000) as server:
        worker = server.worker("a")
        worker.start("SGD", {"lr": 1.0})
        skips = [[(at, at + 1) for at in range(0, 20_000, 2)]]
        with pytest.raises(
            ValueError, match=r"10000 places of server 0's shard.*126976 at most.*update_on_server=False"
        ):
            worker.push(skips=skips)
        worker.push(skips=[skips[0][:5_000]])
        assert worker.weights[0][:2].tolist() == [0.0, 0.0]


def test_the_first_weights_win_and_all_must_mean_the_same_optimizer_and_plan():
    with running() as server:
        a, b = server.worker("a"), server.worker("b")
        a.gradients[0].fill_(3.0)
        b.gradients[0].fill_(5.0)
        a.start("SGD", {"lr": 0.5})
        b.start("SGD", {"lr": 0.5})
        assert b.weights[0].tolist() == [3.0] * 8
        for optimizer, arguments in (("SGD", {"lr": 0.25}), ("Adam", {"lr": 0.5})):
            with pytest.raises(SettingsMismatch, match=r"worker 'c': server 0 refuses: `(arguments|optimizer)` is"):
                server.worker("c").start(optimizer, arguments)
        with pytest.raises(SettingsMismatch, match="comes with plan other, the server has plan"):
            server.worker("d", fingerprint="other").start("SGD", {"lr": 0.5})
        assert push(a, 2.0).tolist() == [2.0] * 8
        assert push(b, 2.0, lr=1.0).tolist() == [0.0] * 8


@pytest.mark.parametrize("arguments", [("LBFGS", {}), ("Adam", {"lr": -1.0}), ("Adam", {"speed": 1})], ids=str)
def test_an_optimizer_that_cannot_be_sharded_is_refused_and_the_server_lives(arguments: tuple[str, dict[str, Any]]):
    with running() as server:
        with pytest.raises(SettingsMismatch, match="server 0 refuses"):
            server.worker("a").start(*arguments)
        assert push(server.started("b"), 1.0).tolist() == [1.0] * 8


def test_a_server_without_weights_refuses_pushes():
    with running() as server, pytest.raises(PeerLost, match="refuses: the server has no weights"):
        server.worker("a").push()


def test_weights_that_are_lost_are_not_made_anew_of_whatever_comes():
    with running() as server, running() as empty:
        a = server.started("a")
        push(a, 1.0)
        a._lines[0].dial.name = empty.name  # type: ignore[attr-defined]  # as if its host had come back without its memory
        server.server.close()
        with pytest.raises(PeerLost, match="server 0 has lost its weights, of version 1 or later"):
            push(a, 1.0)


def lose_answer(server: Running, kind: type[Any], monkeypatch: pytest.MonkeyPatch, new_server: bool) -> None:
    """The next push is applied, and its answer lost, with the connection or with the server."""
    send = kind.send

    def lost(self: Any, header: Any, *rest: Any) -> None:
        if "lag" in header:  # of a push
            monkeypatch.undo()
            if new_server:
                server.begin()
            self.break_off()
            raise PeerLost("killed")
        send(self, header, *rest)

    monkeypatch.setattr(kind, "send", lost)


@pytest.mark.parametrize("new_server", [False, True], ids=["connection", "server"])
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("async", ShmChannel), ("sync", ShmChannel), ("ssp", ShmChannel), ("async", PairChannel), ("sync", PairChannel)],
)
def test_a_push_whose_answer_is_lost_is_applied_once(
    mode: str, kind: type[Any], new_server: bool, monkeypatch: pytest.MonkeyPatch
):
    with running(mode=mode, gloo=kind is PairChannel) as server:
        a = server.started("a")
        for number in range(1, 5):
            lose_answer(server, kind, monkeypatch, new_server)
            a.gradients[0].fill_(1.0)
            answer = a.push()
            assert (answer.versions, answer.resent) == ((number,), 1)
            assert a.weights[0].tolist() == [float(number)] * 8
        if not new_server:
            told = {"life": 1, "push": 4, "clock": 4, "live": True, "rests": -1, "lag": 0, "dropped": False}
            told |= {"called": False} if mode == "sync" else {}
            assert server.store.workers["a"] == told


def test_a_push_that_is_missing_is_noticed():
    with running() as server:
        a = server.started("a")
        a._lines[0].pushed = 3  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="push 4 of worker 'a' came after 0: one is missing"):
            a.push()


def test_a_push_of_another_size_is_refused():
    with running(numel=8) as server:
        server.started("a")
        server.numel = 6
        with pytest.raises(SettingsMismatch, match="asked for, with memory for fewer"):
            server.started("b")


def on_threads(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(call) for call in calls]]


def test_sync_is_the_mean_weighted_by_samples_and_all_have_one_version():
    with running(mode="sync", num_workers=3) as server:
        workers = [server.started(name, "SGD", {"lr": 1.0}) for name in "abc"]
        pulled: list[torch.Tensor] = []
        for _ in range(3):
            pulled = on_threads(
                lambda: push(workers[0], 1.0, weight=1), lambda: push(workers[1], 2.0, weight=2),
                lambda: push(workers[2], 6.0, weight=5),
            )  # fmt: skip
            assert all(torch.equal(each, pulled[0]) for each in pulled)
        assert pulled[0].tolist() == [-3 * (1 + 4 + 30) / 8] * 8
        assert server.store.version == 3


def test_sync_is_training_on_the_joined_batch():
    x, y = (torch.randn(12, n, generator=torch.Generator().manual_seed(n)) for n in (8, 1))
    model = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([model], lr=0.1, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        ((x @ model - y[:, 0]) ** 2).mean().backward()
        optimizer.step()

    def train(client: Client, rows: slice) -> None:
        for _ in range(10):
            own = client.weights[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(((x[rows] @ own - y[rows, 0]) ** 2).mean(), own)
            client.gradients[0].copy_(gradient)
            client.push(weight=len(x[rows]))

    with running(mode="sync", num_workers=3) as server:
        workers = [server.started(name, "SGD", {"lr": 0.1, "momentum": 0.9}) for name in "abc"]
        parts = (slice(0, 2), slice(2, 7), slice(7, 12))
        on_threads(*[lambda w=w, p=p: train(w, p) for w, p in zip(workers, parts, strict=True)])
        torch.testing.assert_close(workers[0].weights[0], model.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
@pytest.mark.parametrize("goes", ["killed", "leaves"])
def test_the_quorum_shrinks_when_a_worker_is_gone_and_grows_when_it_comes_back(goes: str, gloo: bool):
    with running(mode="sync", num_workers=2, gloo=gloo) as server:
        a, b = server.started("a"), server.started("b")
        on_threads(lambda: push(a, 1.0), lambda: push(b, 3.0))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(push, a, 1.0)
            until(lambda: "a" in server.server._rounds.waiting)
            assert not waits.done()
            b.close(leave=goes == "leaves")
            assert waits.result(5).tolist() == [3.0] * 8
            again = server.started("b")
            assert server.store.workers["b"]["life"] == 3
            waits = pool.submit(push, a, 1.0)
            until(lambda: "a" in server.server._rounds.waiting)
            assert not waits.done()
            assert push(again, 3.0).tolist() == [5.0] * 8 == waits.result(5).tolist()


def test_a_restarted_server_waits_for_those_that_were_there():
    with running(mode="sync", num_workers=2) as server:
        a, b = server.started("a"), server.started("b")
        on_threads(lambda: push(a, 1.0), lambda: push(b, 3.0))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(push, a, 1.0)
            until(lambda: "a" in server.server._rounds.waiting)
            before = server.server
            server.begin()
            before.close()
            until(lambda: "a" in server.server._rounds.waiting)
            assert not waits.done()
            assert push(b, 5.0).tolist() == [5.0] * 8 == waits.result(5).tolist()
        assert server.store.version == 2


def test_a_restarted_server_gives_up_those_that_do_not_come_back():
    with running(mode="sync", num_workers=2, dead_after_s=0.4) as server:
        a, b = server.started("a"), server.started("b")
        on_threads(lambda: push(a, 1.0), lambda: push(b, 3.0))
        before = server.server
        server.begin()
        before.close()
        assert push(a, 1.0).tolist() == [3.0] * 8


def test_a_worker_that_says_nothing_is_evicted_and_fenced():
    with running(mode="sync", num_workers=2, dead_after_s=0.3) as server:
        a, b = server.started("a"), server.started("b")
        began = time.monotonic()
        assert push(a, 1.0).tolist() == [1.0] * 8
        assert 0.3 <= time.monotonic() - began < 5
        with pytest.raises(Evicted, match="worker 'b' was taken for dead"):
            push(b, 1.0)
        assert push(a, 1.0).tolist() == [2.0] * 8


def test_a_second_process_under_a_name_fences_the_first():
    with running() as server:
        first = server.started("a")
        push(first, 1.0)
        second = server.started("a")
        with pytest.raises(Evicted):
            push(first, 1.0)
        assert push(second, 1.0).tolist() == [2.0] * 8


def test_those_that_never_come_are_named():
    with running(mode="sync", num_workers=3, dead_after_s=0.2) as server:
        a = server.started("a")
        with pytest.raises(PeerLost, match=r"1 of 3 workers have come within 0.2 s"):
            push(a, 1.0)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_lets_nobody_be_further_ahead_than_its_bound(bound: int):
    with running(mode="ssp", max_staleness=bound) as server:
        fast, slow = server.started("fast"), server.started("slow")
        for _ in range(bound):
            push(fast, 1.0)
        with ThreadPoolExecutor(1) as pool:
            for turn in range(3):
                waits = pool.submit(push, fast, 1.0)
                until(lambda turn=turn: server.store.workers["fast"]["clock"] == bound + 1 + turn)
                assert not waits.done()
                push(slow, 1.0)
                # what it pulls is of after the wait: it has seen the slow one's push
                assert waits.result(5).tolist() == [float(bound + 2 * (turn + 1))] * 8
            waits = pool.submit(push, fast, 1.0)
            until(lambda: server.store.workers["fast"]["clock"] == bound + 4)
            slow.close(leave=False)
            waits.result(5)


def test_beyond_a_sync_point_that_all_have_come_to_nobody_is_ahead_in_ssp():
    """A rank with fewer batches is behind by these when all begin the next epoch."""
    with running(mode="ssp", max_staleness=1) as server:
        many, few = server.started("many"), server.started("few")
        few.rest(0)
        for _ in range(7):
            push(many, 1.0)
        many.rest(0)
        push(many, 1.0, sync_point=1)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(push, many, 1.0, sync_point=1)
            until(lambda: server.store.workers["many"]["clock"] == 9)
            assert not waits.done()
            push(few, 1.0, sync_point=1)
            assert waits.result(5).tolist() == [10.0] * 8


def test_a_joining_rank_to_ssp_begins_where_the_slowest_is():
    with running(mode="ssp", max_staleness=2) as server:
        a = server.started("a")
        for _ in range(7):
            push(a, 1.0)
        b = server.started("b")
        assert server.store.workers["b"]["clock"] == 7
        push(a, 1.0)
        push(b, 1.0)


def test_a_server_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch):
    with running() as server:
        server.started("a")
        client = server.worker("b", timeout_s=0.3)
        client.start()
        release = threading.Event()
        monkeypatch.setattr(server.server, "_push", lambda *rest: (release.wait(10) and {}, 0))
        began = time.monotonic()
        with pytest.raises(ChannelTimeout, match=r"worker 'b': server 0 has not answered 'push' for 0\.3 s"):
            push(client, 1.0)
        assert time.monotonic() - began < 3
        release.set()


def test_state_can_be_read_for_a_checkpoint():
    with running() as server:
        a = server.started("a", "Adam", {"lr": 0.1})
        push(a, 2.0)
        (told,) = a.read("exp_avg")
        expected = {"version": 1, "fields": ["params", "exp_avg", "exp_avg_sq"], "scalars": [[8, {"step": 1}]]}
        assert {name: told[name] for name in expected} == expected
        torch.testing.assert_close(a.weights[0], torch.full((8,), 0.2))
        with pytest.raises(Exception, match="there is no 'momentum'; there are"):
            a.read("momentum")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mode": "dist"}, ValueError, r"mode='dist'.*one of"),
        ({"num_workers": 0}, ValueError, "num_workers=0"),
        ({"max_staleness": -1}, ValueError, "max_staleness=-1"),
        ({"dead_after_s": 0}, ValueError, "dead_after_s=0"),
        ({"dead_after_s": float("inf")}, ValueError, "finite"),
    ],
)
def test_terms_that_are_refused(arguments: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        WorkerRules(**arguments)


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_a_worker_that_reads_slowly_holds_up_nobody(gloo: bool):
    """It asks for 4 MB and takes none of it, while another one pushes and pulls."""
    with running(numel=1 << 20, gloo=gloo) as server:
        slow, quick = server.started("slow"), server.started("quick")
        line = slow._lines[0]  # type: ignore[attr-defined]
        line.ask({"do": "pull"}, 0)
        for number in range(1, 6):
            assert push(quick, 1.0)[-1] == number
        assert line.reply(time.monotonic() + 20)["version"] in range(6)
        assert slow.pull().versions == (5,)


def test_a_server_that_cannot_be_reached_is_lost_however_long_an_answer_may_take():
    client = Client("a", [ShmDial("lightning_async-nobody", 8, 8)], timeout_s=3600.0, absent_s=0.2)
    with pytest.raises(ChannelTimeout, match=r"server 0 has not answered 'initialise' for \d.\d s: nobody answers"):
        client.start()
    client.close()
