"""Training of which the last rank serves: real processes, three ranks, or two."""

from __future__ import annotations

import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async import HorovodTransport, ParameterServerStrategy, ServerOptions, TorchTransport
from lightning_async.strategies.server_lifecycle import StartQuorum
from tests.horovod import needs_horovod
from tests.strategies.dedicated import BATCHES
from tests.strategies.problem import adam, batches, distance, flat, joined, train_alone
from tests.strategies.workers import make_trainer
from tests.support import RankResult, run_ranks

HOUR = timedelta(hours=1)


def ranks(what: str, nprocs: int, folder: Path, **kwargs: Any) -> list[RankResult]:
    arguments = {"folder": str(folder), **kwargs}
    return run_ranks(f"tests.strategies.dedicated:{what}", nprocs, kwargs=arguments, check=False)


def assert_served(result: RankResult) -> None:
    """It has ended in order, with the script, within its first run."""
    assert result.returncode == 0 and not result.timed_out, result
    assert result.value is None and "EXCEPTION" not in result.stdout, result


@pytest.mark.processes
def test_workers_are_a_world_of_their_own_and_their_server_serves_every_fit(tmp_path: Path) -> None:
    *workers, server = ranks("trainings", 3, tmp_path)
    assert_served(server)
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for rank, worker in enumerate(workers):
        assert worker.value is not None, worker
        first, second = worker.value
        assert distance(first["values"], alone) < 1e-6
        assert [each["step"] for each in (first, second)] == [2 * BATCHES] * 2
        assert {each["world_size"] for each in (first, second)} == {2}
        assert first["sampler"] == {"num_replicas": 2, "rank": rank}
        assert first["validations"] == 2
    assert len({worker.value[1]["digest"] for worker in workers}) == 1
    assert not list(tmp_path.glob("*.2")), "who serves asks for no data"
    assert {path.name for path in tmp_path.iterdir()} >= {"prepare_data.0", "train_dataloader.0", "train_dataloader.1"}


@pytest.mark.processes
def test_one_worker_and_one_server(tmp_path: Path) -> None:
    worker, server = ranks("alone_with_a_server", 2, tmp_path)
    assert_served(server)
    assert worker.value is not None, worker
    assert distance(worker.value["values"], flat(train_alone(batches(0, BATCHES), epochs=2, optimizer=adam))) < 1e-6
    assert worker.value["world_size"] == 1


@pytest.mark.processes
def test_where_the_rank_is_killed_its_server_goes_on(tmp_path: Path) -> None:
    *workers, server = ranks("server_rank_killed", 3, tmp_path)
    assert server.returncode == -signal.SIGKILL
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for worker in workers:
        assert worker.value is not None, worker
        assert distance(worker.value["values"], alone) < 1e-6


@pytest.mark.processes
def test_where_the_memory_is_lost_workers_say_which_server_has_lost_it(tmp_path: Path) -> None:
    *workers, server = ranks("memory_lost", 3, tmp_path)
    assert_served(server)
    told = [str(worker.value) for worker in workers]
    assert all(each.startswith("PeerLost") for each in told), told
    assert any("server 0 has lost its weights" in each for each in told), told


@pytest.mark.processes
def test_where_the_memory_is_lost_and_was_in_a_snapshot_a_server_begins_with_that(tmp_path: Path) -> None:
    *workers, server = ranks("memory_comes_back", 3, tmp_path)
    assert_served(server)
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for worker in workers:
        assert worker.value is not None, worker
        assert distance(worker.value["values"], alone) < 1e-6
    assert workers[0].value["served"]["acknowledged pushes lost"] == "0"
    assert int(workers[0].value["served"]["versions in snapshots"]) >= 3


@pytest.mark.processes
@pytest.mark.parametrize("dedicated", [False, True])
def test_training_begins_with_enough_workers_and_one_that_comes_late_joins(dedicated: bool, tmp_path: Path) -> None:
    first, late, third, *servers = ranks("comes_late", 3 + dedicated, tmp_path, dedicated=dedicated, wait_for_workers=2)
    for server in servers:
        assert_served(server)
    told = [worker.value for worker in (first, third, late)]
    assert None not in told, [first, late, third]
    assert [each["sampler"]["rank"] for each in told] == [0, 1, 2]
    assert {each["world_size"] for each in told} == {3}
    assert len({each["digest"] for each in told}) == 1
    assert told[0]["sizes"][0] == 2 and told[0]["sizes"][-3:] == [3, 3, 3]
    assert told[2]["sizes"] == [3, 3, 3]


@pytest.mark.processes
def test_one_worker_begins_alone_and_takes_in_the_one_that_comes_late(tmp_path: Path) -> None:
    first, late = ranks("comes_late", 2, tmp_path, dedicated=False, wait_for_workers=1, workers=2)
    assert first.value is not None and late.value is not None, [first, late]
    assert first.value["sizes"][0] == 1 and first.value["sizes"][-1] == late.value["sizes"][0] == 2
    assert first.value["digest"] == late.value["digest"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("placement", "waits", "otherwise", "nprocs"),
    [
        ("colocated", 2, 0, 2),
        ("colocated", 2, 1, 2),
        ("dedicated", "all", 1, 2),
        ("dedicated", "all", 0, 3),
        ("dedicated", 2, 2, 3),
    ],
)
def test_ranks_that_are_to_begin_in_different_ways_do_not_wait_for_each_other(
    placement: str, waits: Any, otherwise: int, nprocs: int, tmp_path: Path
) -> None:
    """Each ends within seconds and says which rank was told what."""
    began = time.monotonic()
    told = ranks("begins_otherwise", nprocs, tmp_path, otherwise=f"{otherwise}", placement=placement, waits=waits)
    assert time.monotonic() - began < 60.0
    servers = ", num_servers=1" * (placement == "dedicated")
    for rank in told:
        assert rank.value is None and not rank.timed_out, rank
        said = rank.stderr.splitlines()[-1]
        assert f"rank {otherwise} has `placement='colocated'` and `wait_for_workers='all'`" in said, rank
        assert re.search(rf"rank [012] has `placement='{placement}'{servers}` and `wait_for_workers=('all'|<)", said)


@pytest.mark.processes
def test_workers_begin_without_one_that_has_not_come_in_time(tmp_path: Path) -> None:
    first, _, third = ranks("never_comes", 3, tmp_path)
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for rank, worker in enumerate((first, third)):
        assert worker.value is not None, worker
        assert distance(worker.value["values"], alone) < 1e-6
        assert worker.value["sampler"] == {"num_replicas": 2, "rank": rank}


@pytest.mark.parametrize(
    ("number", "within_s", "begins"),
    [
        (None, 0, {3: None, 4: 0}),
        (2, 0, {1: None, 2: 0, 3: 0, 4: 0}),
        (2, 9, {1: None, 2: 9, 3: 9, 4: 0}),
    ],
)
def test_when_workers_begin(number: int | None, within_s: float, begins: dict[int, float | None]) -> None:
    """So many have come of four; after how long they begin."""
    quorum = StartQuorum(number, timedelta(seconds=within_s))
    for come, after_s in begins.items():
        for waited_s in (0.0, 8.9, 9.0, 1e9):
            expected = after_s is not None and waited_s >= after_s
            assert quorum.begins(list(range(come)), 4, waited_s) == expected


@pytest.mark.parametrize("told", [0, -1, True, "two", 1.5, None, (2,), (2, 5), (2, timedelta(seconds=-1)), (0, HOUR)])
def test_numbers_of_workers_that_cannot_be(told: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(f"wait_for_workers={told!r}")):
        ParameterServerStrategy(options=ServerOptions(wait_for_workers=told))


@pytest.mark.parametrize("told", ["all", 2, (2, HOUR)])
def test_a_number_of_workers_is_shown_as_it_is_written(told: Any) -> None:
    assert repr(StartQuorum.of(told)) == repr(told)


def test_a_folder_that_fsspec_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match=r"`ServerOptions\(snapshots='nosuch://a'\)` must be a folder: .*nosuch"):
        ServerOptions(snapshots="nosuch://a")


@pytest.mark.parametrize(
    ("quorum", "words"), [(3, "there are 2 workers"), (1, "fewer than 2 of 2 workers do not go on")]
)
def test_numbers_of_workers_that_do_not_suit_the_job(quorum: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StartQuorum(quorum).check_workers(world_size=2, fewest=2)


@needs_horovod
def test_over_horovod_nobody_comes_later() -> None:
    with pytest.raises(ValueError, match="nobody comes later"):
        ParameterServerStrategy(transport=HorovodTransport(), options=ServerOptions(wait_for_workers=1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"placement": "elsewhere"}, "placement='elsewhere'"),
        ({"placement": "dedicated", "options": {"server_address": "a:1"}}, "server_address='a:1'"),
        ({"placement": "dedicated", "options": {"update_frequency": 2}}, "accumulate_grad_batches=2"),
    ],
)
def test_wrong_arguments_are_named_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ParameterServerStrategy(**{**arguments, "options": ServerOptions(**arguments.get("options", {}))})


@needs_horovod
def test_a_transport_whose_groups_are_of_all_ranks() -> None:
    with pytest.raises(ValueError, match='placement="colocated"'):
        ParameterServerStrategy(placement="dedicated", transport=HorovodTransport())


@pytest.mark.skipif(not torch.distributed.is_mpi_available(), reason="this torch has no MPI")
def test_mpis_groups_are_of_all_ranks() -> None:
    with pytest.raises(ValueError, match='placement="colocated"'):
        ParameterServerStrategy(placement="dedicated", transport=TorchTransport(backend="mpi"))


def test_more_servers_than_ranks() -> None:
    with pytest.raises(ValueError, match="there are 2 ranks, and one at least must train"):
        make_trainer(ParameterServerStrategy(placement="dedicated", num_servers=2))
