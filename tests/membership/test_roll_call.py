"""The roll call before each call of the Trainer: ranks agree in the store on those that begin it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from lightning_async.membership.failure_detector import FAILED, Peer, Record
from lightning_async.membership.signing import Seal
from lightning_async.membership.startup import ProcessHeartbeat

REPLACED = Peer(restarted=True, confirmed=True)
ENDED = Peer(Record(state=FAILED, text="its process has ended"), confirmed=True, lost=True)


def presence(
    store: HashStore,
    name: str,
    peers: dict[str, Peer],
    joined: tuple[str, ...] = (),
    called: tuple[str, ...] = ("0", "1", "2"),
) -> ProcessHeartbeat:
    """The heartbeat of a process that has made a call with ranks 0, 1 and 2, without its thread."""
    heartbeat: Any = object.__new__(ProcessHeartbeat)
    membership = SimpleNamespace(
        ended=lambda: dict(peers), dead_after=timedelta(seconds=30), accept_new_processes=lambda: None
    )
    vars(heartbeat).update(
        _store=store, name=name, _membership=membership, _called=called, _joined=frozenset(joined),
        _reported={"1"} & peers.keys(), _names=("0", "1", "2"),
    )  # fmt: skip
    return heartbeat


def test_a_failed_rank_waits_for_one_that_has_joined() -> None:
    """Rank 1 was started again, and has joined rank 0 after rank 2 has failed. It comes later than ends are known."""
    store = HashStore()
    peers = {"1": REPLACED}

    def call_roll(heartbeat: ProcessHeartbeat, names: tuple[str, ...], failed: bool, later_s: float) -> list[str]:
        time.sleep(later_s)
        return heartbeat.call_roll(5, names, failed, Seal(), timedelta(seconds=60))

    with ThreadPoolExecutor() as pool:
        members = [
            pool.submit(call_roll, presence(store, "0", peers, ("1",)), ("0", "1"), False, 0.0),
            pool.submit(call_roll, presence(store, "2", peers), ("0", "2"), True, 0.2),
            pool.submit(call_roll, presence(store, "1", {}), ("0", "1"), False, 4.0),
        ]
        assert [future.result() for future in members] == [["0", "1", "2"]] * 3


def test_a_call_begins_once_a_new_process_is_known() -> None:
    """The end of rank 1's old process is all that rank 0 has read so far."""
    store = HashStore()
    peers = {"1": ENDED}
    both = ("0", "1")
    one = presence(store, "1", {}, called=both)
    zero = presence(store, "0", peers, ("1",), both)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(zero.call_roll, 2, both, False, Seal(), timedelta(seconds=60))
        second = pool.submit(one.call_roll, 2, both, False, Seal(), timedelta(seconds=60))
        time.sleep(0.5)
        assert not first.done(), "a check would raise now"
        peers["1"] = REPLACED
        assert first.result() == second.result() == ["0", "1"]
