"""Training on servers whose shards have replicas: real processes, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async import HorovodTransport, ParameterServerStrategy
from lightning_async.strategies.finding import _replicas
from tests.horovod import needs_horovod
from tests.strategies import problem
from tests.strategies.problem import adam, batches, distance, flat, joined, train_alone
from tests.strategies.served import BATCHES
from tests.strategies.served_replicas import FEWER, STEP
from tests.strategies.survivor_workers import SAMPLES
from tests.strategies.test_survivors import survivors, three_ranks
from tests.strategies.workers import Outcomes, make_trainer


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_replicas", tmp_path_factory.mktemp("replicas"))


def test_a_server_that_is_lost_with_its_memory_changes_no_bit_of_synchronous_training(outcomes: Outcomes) -> None:
    told = outcomes("sync_lost")
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    assert told[0]["lost"] == 1
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6
        assert rank["step"] == 2 * BATCHES
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["served"]["shards with a replica"] == "0 of 2"


def test_a_server_that_is_lost_with_its_memory_has_each_push_in_once(outcomes: Outcomes) -> None:
    told = outcomes("async_lost")
    assert told[0]["lost"] == 1
    weights = torch.tensor(flat(problem.network()))
    for _ in range(2 * 2 * BATCHES):
        weights = weights - STEP
    for rank in told:
        assert torch.equal(torch.tensor(rank["values"]), weights)


def test_a_server_that_is_lost_with_its_memory_begins_with_its_snapshot_and_all_go_on(outcomes: Outcomes) -> None:
    """Also who stands at a gate, with weights that are lost: it has said a version that nobody comes to again."""
    told, gone = outcomes("snapshot_lost"), [BATCHES - 1, FEWER]
    assert [rank["lost"] for rank in told] == gone
    assert told[0]["served"]["acknowledged pushes lost"] == str(sum(gone))
    assert told[0]["served"]["versions in snapshots"] == "0"
    weights = torch.tensor(flat(problem.network()))
    for _ in range(2 * (BATCHES + FEWER) - sum(gone)):
        weights = weights - STEP
    for rank in told:
        assert torch.equal(torch.tensor(rank["values"]), weights)
    assert len(list((outcomes.folder("snapshot_lost") / "kept").iterdir())) == 1


@pytest.mark.parametrize(("mode", "victim"), [("sync", 1), ("async", 0)])
def test_a_host_is_lost_with_its_worker_and_its_server(mode: str, victim: int, tmp_path: Path) -> None:
    """The others hear of both, and wait for neither."""
    with three_ranks(tmp_path, {str(victim): ("step", 0, 4)}, served=mode, replicas=True) as group:
        told = survivors(group.join(), [victim])
    assert {each["world_size"] for each in told} == {2}
    for what in ("trained", "validated"):
        seen = sorted(sample for each in told for sample in each[what]["2"])
        assert seen == list(range(SAMPLES)), what


def test_workers_end_in_order_where_nothing_is_lost(outcomes: Outcomes) -> None:
    told = outcomes("kept")
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shard_replicas": 2}, "shard_replicas=2"),
        ({"shard_replicas": 1, "num_servers": 1}, "(shard_replicas=1, num_servers=1)"),
        ({"shard_replicas": 1, "server_address": "a:1,b:1"}, "server_address='a:1,b:1'"),
        ({"snapshots": "/a", "server_address": "a:1"}, "snapshots='/a', server_address='a:1'"),
        ({"snapshots": "/a", "shard_replicas": 1}, "snapshots='/a', shard_replicas=1"),
        ({"snapshots": ""}, "snapshots=''"),
        ({"snapshots": 3}, "snapshots=3"),
        ({"snapshots": b"/a"}, "snapshots=b'/a'"),
        ({"snapshots": "/a", "snapshot_every": 0}, "snapshot_every=0"),
        ({"snapshots": "/a", "snapshot_every": float("inf")}, "snapshot_every=inf"),
        ({"snapshots": "/a", "snapshot_every": "often"}, "snapshot_every='often'"),
        ({"snapshot_every": 5.0}, "snapshot_every=5.0"),
    ],
)
def test_replicas_and_snapshots_that_cannot_be_are_named_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        ParameterServerStrategy(**arguments)


def test_it_is_said_where_replicas_are() -> None:
    plan: Any = SimpleNamespace(num_servers=3)
    told: Any = SimpleNamespace(shard_replicas=1)
    words = "that of server 0 on server 1, that of server 1 on server 2, that of server 2 on server 0"
    assert _replicas(told, plan) == f"\nreplicas of shards: {words}"
    assert _replicas(ParameterServerStrategy(), plan) == ""


@needs_horovod
def test_replicas_need_a_store() -> None:
    with pytest.raises(ValueError, match="decided in the store"):
        ParameterServerStrategy(shard_replicas=1, transport=HorovodTransport())


def test_one_server_has_no_other_one_for_a_replica(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are 1 servers; the replica of a shard is on another server"):
        make_trainer(ParameterServerStrategy(placement="dedicated", shard_replicas=1), devices=2)
