"""What lies in the store is judged before it is believed, and a store that is slow is waited for."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.errors import AsyncTrainingError, PeerLost
from lightning_async.membership.failure_detector import PREFIX, Record, dump, key, load
from lightning_async.membership.heartbeat_store import HeartbeatStore
from lightning_async.membership.membership import Membership
from lightning_async.membership.process_liveness import place_of
from lightning_async.membership.signing import SECRET, Seal
from lightning_async.membership.store import HashStore, TCPStore, connect
from tests.comm.proxy import Proxy
from tests.membership.test_membership import Hand, running, until
from tests.support import ROOT, run_ranks

ALIVE = {"life": "x", "beat": 1, "wanted": 0, "bell": 0, "state": "up", "text": ""}
NO_RECORDS = [
    b"not json",
    b"",
    b"\xff\xfe",
    b"[1, 2]",
    b"null",
    b"[" * 5_000,
    b'{"text": "' + b"x" * 100_000 + b'"}',
    json.dumps({"extra": 1}).encode(),
    json.dumps(ALIVE | {"bell": "x"}).encode(),
    json.dumps(ALIVE | {"beat": True}).encode(),
    json.dumps(ALIVE | {"beat": -1}).encode(),
    json.dumps(ALIVE | {"wanted": 1.5}).encode(),
    json.dumps(ALIVE | {"state": "asleep"}).encode(),
]


@pytest.mark.parametrize("value", NO_RECORDS, ids=lambda value: repr(value[:24]))
def test_what_is_no_record_is_none(value: bytes) -> None:
    assert load(value) is None


def test_a_record_comes_back_as_it_was() -> None:
    record = Record(**ALIVE)
    assert load(dump(record)) == record


# ---- who is dead, from the first reading on ----


def test_a_peer_that_died_before_it_was_seen_to_change_is_lost_after_dead_after() -> None:
    hand = Hand(2, fresh=True, dead_after=timedelta(seconds=20), start_timeout=timedelta(seconds=300))
    hand.store.compare_set(key("0"), "", "{}")
    hand.beat(1)  # once; then it dies
    hand.beat(0, times=20, seconds=1.0)
    hand.ranks[0].check()
    hand.beat(0, times=2, seconds=1.0)
    with pytest.raises(PeerLost, match=r"rank 1 was last seen 2\d\.\d s ago"):
        hand.ranks[0].check()


@pytest.mark.parametrize("how", ["fails", "leaves"])
def test_a_peer_that_ended_before_the_first_reading_is_believed(how: str) -> None:
    hand = Hand(2, fresh=True)
    hand.store.compare_set(key("0"), "", "{}")
    (hand.ranks[1].fail if how == "fails" else lambda text: hand.ranks[1].close())("out of memory")
    hand.beat(1, 0)
    if how == "fails":
        with pytest.raises(PeerLost, match="rank 1 failed: out of memory"):
            hand.ranks[0].check()
    else:
        assert hand.ranks[0].left() == {"1"}


# ---- strangers ----


@pytest.mark.parametrize("value", NO_RECORDS, ids=lambda value: repr(value[:24]))
def test_a_heartbeat_goes_on_over_what_is_no_record(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    hand = Hand(2)
    hand.everybody_is_seen()
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        hand.store.set(key("1"), value)  # type: ignore[arg-type]
        hand.beat(0, seconds=1.0)
    hand.ranks[0].check()
    assert len([record for record in caplog.records if key("1") in record.getMessage()]) == 1
    hand.ranks[1].ring(3)
    hand.beat(1, 0)
    assert hand.ranks[0].bell == 3


def test_the_heartbeat_thread_survives_garbage_and_hears_the_peer_again() -> None:
    store = HashStore()
    with running(2, store=store) as ranks:
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        for _ in range(50):
            store.set(key("1"), "not json")
            threading.Event().wait(0.002)
        ranks[1].ring(5)
        until(lambda: ranks[0].bell == 5)
        ranks[0].check()


@pytest.mark.parametrize(
    "record",
    [
        Record(life="stranger", state="failed", text="I am a stranger", beat=1),
        Record(life="stranger", state="left", beat=10**6),
        Record(life="stranger", state="up", wanted=7, beat=10**6),
    ],
    ids=lambda record: record.state,
)
@pytest.mark.parametrize("forged", ["unsigned", "another secret", "moved"])
def test_only_signed_records_are_believed(record: Record, forged: str, caplog: pytest.LogCaptureFixture) -> None:
    seal = Seal("of the job", "run 1")
    hand = Hand(2, seal=seal)
    for rank in range(2):
        hand.store.set(key(str(rank)), seal.sign(key(str(rank)), dump(Record())))  # type: ignore[arg-type]
    hand.beat(0, 1, times=3, seconds=0.2)
    values = {
        "unsigned": dump(record),
        "another secret": Seal("guessed", "run 1").sign(key("1"), dump(record)),
        "moved": seal.sign(key("0"), dump(record)),
    }
    for _ in range(5):
        hand.store.set(key("1"), values[forged])  # type: ignore[arg-type]
        hand.beat(0, seconds=0.2)
    hand.ranks[0].check()
    assert hand.ranks[0]._failure_detector.peers["1"].record.life != "stranger" and hand.ranks[0].left() == frozenset()
    warnings = [each.getMessage() for each in caplog.records if key("1") in each.getMessage()]
    assert len(warnings) == 1 and SECRET in warnings[0]


def test_a_record_written_again_does_not_raise_the_dead() -> None:
    hand = Hand(2, dead_after=timedelta(seconds=20))
    hand.everybody_is_seen()
    old = hand.store.get(key("1"))
    hand.beat(1, 0, times=3, seconds=0.2)
    new = hand.store.get(key("1"))
    for i in range(22):  # by a stranger that recorded both
        hand.store.set(key("1"), (old, new)[i % 2])  # type: ignore[arg-type]
        hand.beat(0, seconds=1.0)
    with pytest.raises(PeerLost, match="rank 1 was last seen"):
        hand.ranks[0].check()


def test_a_forged_decision_is_replaced() -> None:
    store, seal = HashStore(), Seal("of the job")
    board = HeartbeatStore(store, "0", "012", seal, timedelta(seconds=2))
    store.set(f"{PREFIX}/generation/1", '["0"]')
    assert board.decide(1, None) is None
    assert board.decide(1, ["0", "1", "2"]) == ("0", "1", "2")
    assert HeartbeatStore(store, "1", "012", seal, timedelta(seconds=2)).decide(1, ["1"]) == ("0", "1", "2")


@pytest.mark.parametrize("value", ["no", "{}", "[]", '["0", "7"]', '["0", "0"]', "[0]", "[[0]]", "[" * 5_000])
def test_a_decision_that_is_none_is_replaced(value: str) -> None:
    store = HashStore()
    store.set(f"{PREFIX}/generation/1", value)
    assert HeartbeatStore(store, "0", "012", Seal(), timedelta(seconds=2)).decide(1, ["0", "1", "2"]) == ("0", "1", "2")


# ---- a rank that is taken ----


def test_a_second_process_with_a_taken_rank_ends_and_the_others_go_on() -> None:
    store = HashStore()
    with running(2, store=store) as ranks:
        until(lambda: all(rank._failure_detector.peers[str(1 - i)].confirmed for i, rank in enumerate(ranks)))
        for i in range(4):  # each looks for up to five of its intervals, in which the others beat
            joining = Membership(store, i % 2, 2, interval=timedelta(seconds=1))
            with pytest.raises(AsyncTrainingError, match=rf"rank {i % 2} is taken: process \d+ on .* goes on"):
                joining.start()
            for rank in ranks:
                rank.check()


# ---- a store that is slow ----


@contextmanager
def over_proxy(dead_after: float) -> Iterator[tuple[Proxy, list[Membership]]]:
    limit = timedelta(seconds=20)
    server: Any = torch.distributed.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    with Proxy(server.port) as proxy:
        ranks = []
        for rank in range(2):
            client = torch.distributed.TCPStore("127.0.0.1", proxy.port, None, False, limit, wait_for_workers=False)
            ranks.append(Membership(client, rank, 2, dead_after=timedelta(seconds=dead_after), fresh=True))
        try:
            for rank in ranks:
                rank.start()
            until(lambda: all(rank._failure_detector.peers[str(1 - i)].confirmed for i, rank in enumerate(ranks)))
            yield proxy, ranks
        finally:
            proxy.flow()
            for rank in ranks:
                rank.close()


def beats(ranks: list[Membership]) -> list[int]:
    return [rank._published.beat for rank in ranks]


def check_all(ranks: list[Membership]) -> None:
    for rank in ranks:
        rank.check()
    threading.Event().wait(0.02)


def until_all_beat(ranks: list[Membership], beaten: list[int]) -> None:
    """Several times more, while nobody is taken for lost."""
    deadline = time.monotonic() + 60.0
    while not all(now - then > 3 for now, then in zip(beats(ranks), beaten, strict=True)):
        assert time.monotonic() < deadline
        check_all(ranks)


def test_a_store_that_stalls_for_each_new_client_is_given_none() -> None:
    """Torch's store looks up the name of each new client, and answers nobody meanwhile."""
    with over_proxy(dead_after=40.0) as (proxy, ranks):
        proxy.lookup_s = 2.0
        before, beaten = proxy.connections, beats(ranks)
        with socket.create_connection(("127.0.0.1", proxy.port)):
            until(lambda: proxy.connections == before + 1 and not proxy.flows)
            until(lambda: proxy.flows)
            until_all_beat(ranks, beaten)
        assert proxy.connections == before + 1


def test_a_stall_longer_than_an_answer_may_take_is_recovered_from() -> None:
    with over_proxy(dead_after=12.0) as (proxy, ranks):
        before, until_s = proxy.connections, time.monotonic() + 4.5  # an answer may take a quarter of `dead_after`
        proxy.stall()
        while time.monotonic() < until_s:
            check_all(ranks)
        proxy.flow()
        until_all_beat(ranks, beats(ranks))
        assert before < proxy.connections <= before + 4  # for each rank: is somebody there, and a client


@pytest.mark.alone
def test_stalls_shorter_than_dead_after_are_survived() -> None:
    """An eighth of it may pass before the next attempt; what is left must do on a machine that is slow for a while."""
    dead_after, parts = 12.0, (0.5, 0.7, 0.8)
    with ExitStack() as stack:
        worlds = [stack.enter_context(over_proxy(dead_after=dead_after)) for _ in parts]
        all_ranks = [rank for _, ranks in worlds for rank in ranks]
        until(lambda: min(beats(all_ranks)) > 2)
        for proxy, _ in worlds:
            proxy.stall()
        beaten, since = beats(all_ranks), time.monotonic()
        for part, (proxy, _) in zip(parts, worlds, strict=True):
            while time.monotonic() < since + part * dead_after:
                check_all(all_ranks)
            proxy.flow()
        until_all_beat(all_ranks, beaten)


@pytest.mark.processes
def test_a_store_that_is_gone_is_not_called_for_as_long_as_its_requests_may_take() -> None:
    """It may go in the moment after it was seen to be there."""
    usual = timedelta(seconds=600)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    code = (
        f"from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)"
    )
    command = [sys.executable, "-c", f"{code}; print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None and host.stdin is not None
        assert host.stdout.readline()
        store: Any = TCPStore("127.0.0.1", port, None, False, usual, wait_for_workers=False)
        host.kill()
    with pytest.raises(RuntimeError, match="timed out"):
        connect(store, timedelta(seconds=0.5))
    assert store.timeout == usual


@pytest.mark.processes
def test_a_process_that_ends_within_a_request_ends_in_order() -> None:
    """As left behind, the heartbeat's thread would come back to an interpreter that shuts down: SIGABRT."""
    (result,) = run_ranks(ROOT / "tests/comm/end_within_a_request.py", 1, fresh=True)
    assert "terminate called" not in result.stderr


def test_attempts_of_torchrun_sign_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "of the job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = Seal.of_job().within("run 1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = Seal.of_job().within("run 1")
    assert second.open("rank 1", first.sign("rank 1", b"failed")) is None
    assert second.open("rank 1", second.sign("rank 1", b"up")) == b"up"


# ---- names that appear ----


class Counting:
    """A store that counts requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name != "has_extended_api"
        return getattr(self.store, name)


def boards(store: Any, *names: str, seal: Seal | None = None, elastic: bool = True) -> list[HeartbeatStore]:
    made = [HeartbeatStore(store, name, names, seal or Seal(), timedelta(seconds=2), elastic) for name in names]
    for board in made:
        board._make_room(names)
        store.compare_set(f"{PREFIX}/names/all", "", "\n")
    return made


@pytest.mark.parametrize("elastic", [False, True])
def test_a_beat_is_two_requests(elastic: bool) -> None:
    store = Counting(HashStore())
    for board in boards(store, "0", "1", "2", elastic=elastic):
        board.exchange(Record())
        store.requests = 0
        board.exchange(Record())
        assert store.requests == 2


def test_all_hear_of_a_name_that_is_signed_and_of_no_other(caplog: pytest.LogCaptureFixture) -> None:
    store, seal = HashStore(), Seal("of the job")
    first, second = boards(store, "0", "1", seal=seal)
    for board in (first, second):
        board.exchange(Record(state="up"))
    (late,) = boards(store, "late", seal=seal)
    (stranger,) = boards(store, "stranger", seal=Seal("guessed"))
    stranger.exchange(Record(state="up"))
    store.append(f"{PREFIX}/names/all", "no line, no end")  # type: ignore[attr-defined]
    late.exchange(Record(state="up"))
    assert late.exchange(Record(state="up")).keys() == {"0", "1"}
    for board, other in ((first, "1"), (second, "0")):
        records = board.exchange(Record(state="up"))
        assert records.keys() == {other, "late"}
        assert records["late"] == Record(state="up", place=place_of(os.getpid()))
    assert any(SECRET in record.getMessage() for record in caplog.records)


def test_names_that_somebody_overwrites_come_back() -> None:
    store = HashStore()
    for board in boards(store, "0", "1"):
        board.exchange(Record())
    store.set(f"{PREFIX}/names/all", "\n../../x\n")
    for board in boards(store, "0", "1"):
        board.exchange(Record())
    (late,) = boards(store, "late")
    late.exchange(Record())
    assert late.exchange(Record()).keys() == {"0", "1"}
