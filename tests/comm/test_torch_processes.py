"""Real processes that are killed, stopped, and that end in order."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.membership.store import HashStore
from tests.support import run_ranks, start_ranks

pytestmark = pytest.mark.processes

LIMIT_S = 150.0
"""For the ranks of one test."""
SOON_S = 20.0
"""Half of what an operation waits for."""


@pytest.mark.parametrize("apart", [False, True], ids=["on one host", "on several"])
def test_killed_in_an_all_reduce_while_its_fork_lives(apart: bool) -> None:
    kwargs = {"dead_after": 60.0, "apart": apart}
    with start_ranks("tests.comm.workers:lose_a_rank", 3, kwargs=kwargs, timeout=LIMIT_S) as group:
        for rank in range(3):
            group.wait_for(rank, "training")
            group.wait_for(rank, "a fork holds []")
        time.sleep(0.3)  # well inside the loop of all-reduces
        killed_at = time.time()
        group.signal(2, signal.SIGKILL)
        results = group.join()
    assert [result.returncode for result in results] == [0, 0, -9], "\n".join(map(str, results))
    for result in results[:2]:
        told = result.value
        assert told["noticed"] - killed_at < SOON_S
        assert "all_reduce(sum) #" in told["message"] and "generation 0" in told["message"]
        assert told["lost"] == [2] and "rank 2 failed: its process has ended without notice" in told["text"]
        assert told["named"] - killed_at < SOON_S, "it was known by its silence only"
        assert told["members"] == ["0", "1"] and told["total"] == 2.0


def test_the_stores_host_killed() -> None:
    with start_ranks("tests.comm.workers:lose_the_store", 2, kwargs={"dead_after": 4.0}, timeout=LIMIT_S) as group:
        for rank in range(2):
            group.wait_for(rank, "training")
        killed_at = time.time()
        group.signal(0, signal.SIGKILL)
        results = group.join()
    told = results[1].value
    assert results[1].returncode == 0, results[1]
    assert told["ranks"] == [0] and "the store has not answered" in told["text"]
    assert told["at"] - killed_at < SOON_S


def test_stopped_for_a_while_is_no_death(tmp_path: Path) -> None:
    kwargs = {"dead_after": 12.0, "folder": str(tmp_path)}
    with start_ranks("tests.comm.workers:survive_stops", 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        for stopped in range(2):  # rank 0 hosts the store
            group.wait_for(1 - stopped, f"waiting for {stopped}")
            group.wait_for(stopped, f"stop {stopped}")
            group.signal(stopped, signal.SIGSTOP)
            time.sleep(2.5)
            (tmp_path / f"{stopped} was stopped").touch()
            group.signal(stopped, signal.SIGCONT)
        results = group.join()
    assert [result.returncode for result in results] == [0, 0], "\n".join(map(str, results))
    assert all(results[1 - stopped].value[stopped] > 2.0 for stopped in range(2))


@pytest.mark.parametrize("again", range(2))
def test_ends_in_order(again: int) -> None:
    for result in run_ranks("tests.comm.workers:exit_in_order", 2, kwargs={"times": 4}, timeout=LIMIT_S):
        assert result.value == 4
        assert "Traceback" not in result.stderr and "terminate" not in result.stderr, result


def test_wrong_arguments_raise_before_any_io() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="backend='mpi'"):
        TorchCollectives(store, 0, 2, backend="mpi")
    with pytest.raises(ValueError, match="backend='horovod'"):
        TorchCollectives(store, 0, 2, backend="horovod")
    with pytest.raises(ValueError, match="rank=2"):
        TorchCollectives(store, 2, 2)
    comm = TorchCollectives(store, 0, 2)
    assert store.num_keys() <= 1  # the store's own
    comm.close()


def test_a_fork_that_leaves_takes_nothing_along_and_does_not_wait() -> None:
    for result in run_ranks("tests.comm.workers:fork_within", 2, timeout=LIMIT_S):
        told = result.value
        assert told["ended"] and told["status"] == 0, result
        assert told["took_s"] < SOON_S
        assert told["total"] == 2.0 and told["left"] == []
