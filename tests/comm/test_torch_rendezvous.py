"""Members that meet hear of deaths, and of nobody but members."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.comm import torch_collectives as module
from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.comm.torch_rendezvous import MeetingOptions
from lightning_async.errors import CollectiveError, CollectiveTimeout, PeerLost
from lightning_async.membership.generation import Generation
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import HashStore
from tests.membership.test_membership import in_thread, running, until

LIMIT = timedelta(seconds=60)


def collectives(store: Any, rank: int, world_size: int = 2, **kwargs: Any) -> TorchCollectives:
    return TorchCollectives(
        store, rank, world_size, form_timeout=LIMIT, meeting_options=MeetingOptions(host="127.0.0.1", **kwargs)
    )


def test_a_peer_that_fails_while_groups_form_is_named_at_once() -> None:
    store = HashStore()
    with running(2, store=store) as ranks:
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        comm = collectives(store, 0, check=ranks[0].check)
        join = in_thread(comm.open)
        time.sleep(0.2)
        started = time.monotonic()
        ranks[1].fail("out of memory")
        with pytest.raises(PeerLost, match="rank 1 failed: out of memory"):
            join()
        assert time.monotonic() - started < LIMIT.total_seconds() / 2
        with pytest.raises(CollectiveError, match="rank 1 failed: out of memory"):
            comm.barrier()
        comm.close()


def test_a_peer_that_dies_while_groups_form_anew_is_named_after_dead_after() -> None:
    store = HashStore()
    with running(2, store=store, dead_after=timedelta(seconds=0.5)) as ranks:
        until(lambda: all(rank._failure_detector.peers[str(1 - i)].confirmed for i, rank in enumerate(ranks)))
        comms = [collectives(store, i, check=rank.check) for i, rank in enumerate(ranks)]
        join = in_thread(comms[1].open)
        comms[0].open()
        join()
        fork = comms[0].fork  # takes the terms along: a fork of the new generation is left by its peer too
        ranks[1]._heartbeat_thread.stop()  # killed: no goodbye
        started = time.monotonic()
        with pytest.raises(PeerLost, match=r"rank 1 was last seen \d+\.\d s ago"):
            fork("payload")
        with pytest.raises(PeerLost, match="rank 1 was last seen"):
            comms[0].reconfigure(Generation(1, ("0", "1"), 0))
        assert time.monotonic() - started < LIMIT.total_seconds() / 2
        for comm in comms:
            comm.close()


def form_two(store: Any, seal: Seal, between_s: float = 0.0) -> list[TorchCollectives]:
    comms = [collectives(store, i, seal=seal) for i in range(2)]
    joins = [in_thread(comms[0].open)]
    time.sleep(between_s)
    joins.append(in_thread(comms[1].open))
    for join in joins:
        join()
    return comms


def test_a_strangers_addresses_are_not_taken_for_a_members(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    for phase in ("ready", "formed"):
        store.set(f"lightning_async/0/world/1/{phase}/1", '{"ports": null}')  # "rank 1 failed to connect"
    for comm in form_two(store, Seal("of the job"), between_s=0.1):
        comm.close()
    assert "lightning_async/0/world/1/ready/1" in caplog.text and "is ignored" in caplog.text


def test_signed_groups_work_like_others() -> None:
    comms = form_two(HashStore(), Seal("of the job"))
    joins = [in_thread(lambda comm=comm: comm.all_reduce(torch.ones(3)).result().tolist()) for comm in comms]
    assert [join() for join in joins] == [[2.0] * 3] * 2
    for comm in comms:
        comm.close()


# By a stranger: no JSON, other values, ports and ranks that there are not, and numbers that torch or Python refuses.
NO_MEMBERS = [
    "no", "{}", "[]", "null", "[[], null, 1]", '[{"a": 1}, null]', '["ab", null]', "[[1], null]", '[[["::1"]], null]',
    '[[["::1", "80"]], null]', '[[["::1", 80.5]], null]', '[[["::1", true]], null]', '[[["::1", 1e999]], null]',
    '[[["::1", 0]], null]', '[[["::1", 65536]], null]', '[[[1, 80]], null]', "[[], 1]", "[[], [2]]", "[[], [-1]]",
    '[[], ["0"]]', "[[], [0.5]]", "[[], [1e999]]", "[[], [true]]",
]  # fmt: skip


@pytest.mark.parametrize("value", NO_MEMBERS)
def test_what_no_member_says_is_waited_over(value: str) -> None:
    store = HashStore()
    for phase in ("ready", "formed"):
        store.set(f"lightning_async/0/world/1/{phase}/1", value)
    for comm in form_two(store, Seal(), between_s=0.02):
        comm.close()


def test_a_member_that_says_nothing_right_is_named() -> None:
    store = HashStore()
    store.set("lightning_async/0/world/1/ready/1", "[[], [1e999]]")
    options = MeetingOptions(host="127.0.0.1")
    comm = TorchCollectives(store, 0, 2, form_timeout=timedelta(seconds=0.5), meeting_options=options)
    with pytest.raises(CollectiveTimeout, match=r"still without rank\(s\) \[1\]"):
        comm.open()
    comm.close()


def test_reforming_mpi_names_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own builds have no MPI, so no group of it is formed here."""
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    comm = TorchCollectives(HashStore(), 0, 2, backend="mpi")
    comm._fail(CollectiveError("rank 1 closed its connection"))
    with pytest.raises(CollectiveError, match=r"MPI only once. It failed by: rank 1 closed its connection"):
        comm.reconfigure(Generation(1, ("0", "1"), 0))
    comm.close()


def test_members_find_each_other_by_the_memberships_word() -> None:
    """Terms may be given their check after the communicator was made, and its forks."""
    store, meeting_options = HashStore(), MeetingOptions(host="127.0.0.1")
    comm = TorchCollectives(store, 0, 2, form_timeout=LIMIT, meeting_options=meeting_options)
    fork = comm.fork("payload")
    with running(2, store=store) as ranks:
        meeting_options.check = ranks[0].check
        until(lambda: ranks[0]._failure_detector.peers["1"].confirmed)
        ranks[1].fail("disk full")
        until(lambda: ranks[0].lost() == ("1",))
        with pytest.raises(PeerLost, match="disk full"):
            fork.open()
    comm.close()


def test_groups_that_go_while_an_operation_begins_fail_that_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = collectives(HashStore(), 0, 1)
    comm.open()

    class Late(module.Operation):
        """Another thread forms the groups anew in the instant before this one begins."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            monkeypatch.undo()
            in_thread(lambda: comm.reconfigure(Generation(1, ("0",), 0)))()

    monkeypatch.setattr(module, "Operation", Late)
    with pytest.raises(CollectiveError, match="was broken off"):
        comm.all_reduce(torch.ones(3)).result(LIMIT)
    assert comm.all_reduce(torch.ones(3)).result(LIMIT).tolist() == [1.0] * 3
    comm.close()
