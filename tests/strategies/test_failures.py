"""Ranks that die, stop, pause, raise, or are told to go: real processes, over Gloo."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.membership.signing import SECRET
from tests.support import RankGroup, RankResult, free_port, start_ranks

pytestmark = pytest.mark.processes

TRAIN = "tests.strategies.failure_workers:train"
ENDLESS = 100_000
LIMIT_S = 150.0
"""For the ranks of one test; on an idle machine none takes a quarter of it."""
SOON_S = 25.0
"""Long for a machine that has other work, and shorter than whatever would end a wait where nobody hears of its cause:
`Timeouts` by default, but for the grace, and the patience with a rank that has just started."""


def ended(result: RankResult) -> dict[str, Any]:
    """What the rank said when it ended."""
    lines = [line for line in result.stdout.splitlines() if line.startswith("ENDED ")]
    assert len(lines) == 1, f"the rank did not end by itself\n{result}"
    return json.loads(lines[0].removeprefix("ENDED "))


def wait_for_step(group: RankGroup, step: int, ranks: int) -> None:
    for rank in range(ranks):
        group.wait_for(rank, f"step {step}\n")


def survivor_of_two(kwargs: dict[str, Any], env: Any = None) -> dict[str, Any]:
    """What rank 0 says after rank 1 was killed: it ends by itself with an error, soon, and its model is finite."""
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S, env=env) as group:
        wait_for_step(group, 30, 2)
        killed_at = time.time()
        group.signal(1, signal.SIGKILL)
        survivor, _ = group.join()
    assert not survivor.timed_out and survivor.returncode == 1, survivor
    told = ended(survivor)
    assert told["at"] - killed_at < SOON_S
    assert told["finite"]
    return told


def stop(group: RankGroup, victim: int, seconds: float) -> None:
    group.signal(victim, signal.SIGSTOP)
    threading.Event().wait(seconds)
    group.signal(victim, signal.SIGCONT)


def all_well(results: list[RankResult]) -> list[dict[str, Any]]:
    for result in results:
        assert not result.timed_out and result.returncode == 0, "\n".join(map(str, results))
    told = [ended(result) for result in results]
    assert len({each["digest"] for each in told}) == 1, told
    assert all(each["finite"] for each in told)
    return told


# ---- a rank that dies ----


def test_the_next_training_of_one_that_is_left_alone_begins_with_a_warning() -> None:
    with start_ranks("tests.strategies.failure_workers:left_alone", 2, timeout=LIMIT_S) as group:
        first, second = group.join()
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), first
    told = ended(first)
    (said,) = [each for each in told["said"] if "trains on alone" in each]
    assert "with all of the data: 1 of 2 ranks were lost" in said and "`min_replicas=2` ends training" in said
    assert told["taken"] == 8


@pytest.mark.parametrize(
    ("victim", "world_size", "overlap"),
    [
        pytest.param(1, 2, True, id="rank 1"),
        pytest.param(0, 2, True, id="rank 0"),
        pytest.param(1, 3, False, id="of 3"),
    ],
)
def test_a_killed_rank_ends_all_others_with_its_name(victim: int, world_size: int, overlap: bool) -> None:
    dead_after = 3.0
    kwargs = {"batches": [ENDLESS] * world_size, "overlap": overlap, "timeouts": {"dead_after": dead_after}}
    with start_ranks(TRAIN, world_size, kwargs=kwargs, timeout=LIMIT_S) as group:
        wait_for_step(group, 30, world_size)
        killed_at = time.time()
        group.signal(victim, signal.SIGKILL)
        results = group.join()
    exits = time.time() - killed_at
    for result in results:
        if result.rank == victim:
            assert result.returncode == -signal.SIGKILL
            continue
        assert not result.timed_out, result
        assert result.returncode == 1, result
        told = ended(result)
        print(f"rank {result.rank}: {told['at'] - killed_at:.2f} s, exit {exits:.2f} s: {told['error']}")
        assert told["error"].startswith("PeerLost"), told
        assert f"rank {victim}" in told["error"]
        assert told["at"] - killed_at < SOON_S
        assert told["finite"]
    assert exits < dead_after + SOON_S


def test_only_the_dead_rank_is_blamed() -> None:
    kwargs = {"batches": [ENDLESS] * 4, "timeouts": {"dead_after": 3.0}}
    with start_ranks(TRAIN, 4, kwargs=kwargs, timeout=LIMIT_S) as group:
        wait_for_step(group, 20, 4)
        group.signal(2, signal.SIGKILL)
        results = group.join()
    assert [ended(result)["ranks"] for result in results if result.rank != 2] == [[2]] * 3


def test_a_rank_killed_while_others_wait_at_the_end_ends_them() -> None:
    kwargs = {"batches": [20, ENDLESS], "timeouts": {"dead_after": 3.0}}
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        wait_for_step(group, 20, 1)
        group.wait_for(1, "step 40\n")
        killed_at = time.time()
        group.signal(1, signal.SIGKILL)
        results = group.join()
    told = ended(results[0])
    assert not results[0].timed_out
    assert "rank 1" in told["error"]
    assert told["at"] - killed_at < SOON_S


@pytest.mark.parametrize(("then", "how"), [("fit", "dies"), ("test", "leaves"), ("save", "dies"), ("save", "is late")])
def test_a_rank_that_is_gone_between_two_runs_is_named_and_one_that_is_late_is_waited_for(
    then: str, how: str, tmp_path: Path
) -> None:
    dead_after = 2.0
    kwargs = {"then": then, "how": how, "dead_after": dead_after, "folder": str(tmp_path)}
    with start_ranks("tests.strategies.failure_workers:between_runs", 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        results = group.join()
    if how == "is late":
        assert [ended(result)["error"] for result in results] == ["", ""]
        return
    told = ended(results[0])
    assert told["error"].startswith("PeerLost: rank 0") and "rank 1" in told["error"].replace("rank(s) [1]", "rank 1")
    assert told["took_s"] < SOON_S


def test_a_rank_that_dies_at_its_second_step_is_named_after_dead_after() -> None:
    """Nobody has seen its heartbeat change yet; its process somebody may."""
    kwargs = {"batches": [ENDLESS] * 2, "at": [1, 2, "die"], "timeouts": {"dead_after": 3.0}}
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        group.processes[1].wait(LIMIT_S)
        died_at = time.time()
        results = group.join()
    told = ended(results[0])
    assert results[1].returncode == -signal.SIGKILL
    assert re.search(r"rank 1 (was last seen|failed: its process has ended)", told["error"]) and told["ranks"] == [1]
    assert told["at"] - died_at < SOON_S


@pytest.mark.parametrize("where", ["ProcessHeartbeat", "Membership"])
def test_the_first_rank_dies_while_the_others_start(where: str, tmp_path: Path) -> None:
    """The store has gone with it: torch would try to reach that for 30 minutes."""
    kwargs = {"where": where, "folder": str(tmp_path)}
    with start_ranks("tests.strategies.failure_workers:without_the_first", 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        results = group.join()
    told = ended(results[1])
    # Its thread of heartbeats or its training thread may be the first to miss the store: they say the same.
    assert results[1].returncode == 69 and told["error"].startswith("StoreLost: rank 1: ")
    assert "rank 0 or the launcher, is gone" in told["error"]
    assert told["ranks"] == [0]


@pytest.mark.parametrize("windows", [None, 2])
def test_the_store_of_a_job_without_our_launcher_is_lost_and_each_rank_ends_with_69(
    windows: int | None, tmp_path: Path
) -> None:
    """It is in this process. Who catches the error has it as it is; the ranks wait for each other before they end."""
    store: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    kwargs = {"batches": [ENDLESS] * 2, "windows": windows, "timeouts": {"dead_after": 3.0}}
    worker, sync_point = "tests.strategies.failure_workers:without_the_store", tmp_path / "sync_point"
    with start_ranks(worker, 2, kwargs=kwargs | {"sync_point": str(sync_point)}, timeout=LIMIT_S, env=env) as group:
        wait_for_step(group, 30, 2)
        killed_at = time.time()
        del store
        for rank in range(2):
            group.wait_for(rank, "ENDED ")
        sync_point.touch()
        results = group.join()
    for result in results:
        assert not result.timed_out and result.returncode == 69, result
        told = ended(result)
        print(f"rank {result.rank}: {told['at'] - killed_at:.2f} s: {told['error']}")
        assert told["error"].startswith(f"StoreLost: rank {result.rank}: the store has not answered for")
        assert told["at"] - killed_at < SOON_S and told["finite"]
        assert result.stderr.count("StoreLost: rank") == 1


# ---- who does not belong ----


@pytest.mark.alone
@pytest.mark.timeout(170)
def test_a_second_rank_1_and_a_stranger_do_not_disturb_a_run() -> None:
    port = free_port()
    env = {"MASTER_PORT": str(port), SECRET: "of the job"}
    kwargs = {"batches": [ENDLESS] * 2, "timeouts": {"dead_after": 30.0}}  # beats are overwritten meanwhile
    second = env | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S, env=env) as group:
        wait_for_step(group, 20, 2)
        store: Any = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
        names = [key for key in store.list_keys() if key.endswith("membership/1")]
        assert len(names) == 2, "of the process, and of its run"
        record = {"life": "x", "beat": 10**6, "wanted": 0, "bell": 0, "state": "failed", "text": "I am a stranger"}
        with start_ranks(TRAIN, 1, kwargs=kwargs, timeout=100.0, env=second) as joining:
            for forged in (json.dumps(record), json.dumps(record | {"state": "left"}), "garbage", "[" * 5000):
                for _ in range(100):
                    for name in names:
                        store.set(name, forged)
                    time.sleep(0.005)
            (refused,) = joining.join()
        assert "rank 1 is taken: process" in refused.stderr
        assert refused.returncode == 1
        steps = [group.output(rank).count("step") for rank in range(2)]
        for rank in range(2):
            group.wait_for(rank, f"step {steps[rank] + 200}\n")
        since = time.time()
        group.signal(0, signal.SIGTERM)
        results = group.join()
    terminated(results, since)
    for result in results:
        assert result.stderr.count("is ignored: it is not signed with this job's secret") <= len(names)


# ---- a rank that raises ----


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_in_validation_ends_the_others_with_its_text(culprit: int) -> None:
    """They wait in a collective of Lightning's."""
    kwargs = {"batches": [20, 20], "at": [culprit, 0, "raise in validation"]}
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        results = group.join()
    for result in results:
        assert not result.timed_out and result.returncode == 1, result
    assert ended(results[culprit])["error"] == "ValueError: the data ran dry"
    error = ended(results[1 - culprit])["error"]
    assert error.startswith("PeerLost")
    assert f"rank {culprit} failed: ValueError: the data ran dry" in error


@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_on_one_rank_ends_the_others_with_its_text(overlap: bool) -> None:
    kwargs = {"batches": [ENDLESS] * 3, "at": [1, 25, "raise"], "overlap": overlap}
    with start_ranks(TRAIN, 3, kwargs=kwargs, timeout=LIMIT_S) as group:
        results = group.join()
    for result in results:
        assert not result.timed_out and result.returncode == 1, result
    assert ended(results[1])["error"] == "ValueError: the data ran dry"
    for rank in (0, 2):
        error = ended(results[rank])["error"]
        assert error.startswith("PeerLost")
        assert "rank 1 failed: ValueError: the data ran dry" in error
        assert ended(results[rank])["at"] - ended(results[1])["at"] < SOON_S


# ---- a rank that is late ----


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stopped_rank_is_waited_for(overlap: bool) -> None:
    """SIGSTOP for 6 s, with payloads that may take 2 s; the other one has steps for longer."""
    kwargs = {
        "batches": [450, 450],
        "overlap": overlap,
        "timeouts": {"payload": 2.0, "dead_after": 30.0},
        "pause_s": 0.02,
    }
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        wait_for_step(group, 50, 2)
        stop(group, 1, 6.0)
        results = group.join()
    told = all_well(results)
    print([(each["failed"], each["rounds"]) for each in told])
    assert [each["taken"] for each in told] == [450, 450]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pause_in_training_is_no_failure_at_all(overlap: bool, tmp_path: Path) -> None:
    """Longer than a payload may take; with overlap, the other rank takes all of its steps meanwhile."""
    sync_point, pause_s = tmp_path / "go on", 7.0
    kwargs = {
        "batches": [300, 300],
        "overlap": overlap,
        "timeouts": {"payload": 5.0, "dead_after": 30.0, "grace": 1000.0},
        "at": [1, 50, "wait"],
        "sync_point": str(sync_point),
    }
    with start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S) as group:
        group.wait_for(1, "step 50\n")
        time.sleep(pause_s)
        if overlap:
            group.wait_for(0, "step 300\n")
        sync_point.touch()
        results = group.join()
    told = all_well(results)
    assert [each["failed"] for each in told] == [0, 0]
    assert [each["taken"] for each in told] == [300, 300]


# ---- a rank that is told to go ----

TO_GO = {"timeouts": {"grace": 60.0}}  # nobody goes on because another one was silent for long


def terminated(results: list[RankResult], since: float) -> list[dict[str, Any]]:
    for result in results:
        assert not result.timed_out, "\n".join(map(str, results))
    told = [ended(result) for result in results]
    assert all(each["error"].startswith("SIGTERMException") for each in told), told
    assert len({each["digest"] for each in told}) == 1, told
    print([round(each["at"] - since, 2) for each in told], [result.returncode for result in results])
    return told


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_to_one_rank_stops_all_with_one_model(victim: int, overlap: bool) -> None:
    with start_ranks(
        TRAIN, 2, kwargs={**TO_GO, "batches": [ENDLESS] * 2, "overlap": overlap}, timeout=LIMIT_S
    ) as group:
        wait_for_step(group, 30, 2)
        since = time.time()
        group.signal(victim, signal.SIGTERM)
        results = group.join()
    for each in terminated(results, since):
        assert each["at"] - since < SOON_S


def test_sigterm_to_all_ranks_at_once() -> None:
    with start_ranks(TRAIN, 2, kwargs={**TO_GO, "batches": [ENDLESS] * 2}, timeout=LIMIT_S) as group:
        wait_for_step(group, 30, 2)
        since = time.time()
        for rank in range(2):
            group.signal(rank, signal.SIGTERM)
        results = group.join()
    terminated(results, since)


@pytest.mark.parametrize("victim", [0, 1], ids=["the waiting rank", "the training rank"])
def test_sigterm_while_a_rank_waits_at_the_end_of_its_epoch(victim: int) -> None:
    with start_ranks(TRAIN, 2, kwargs={**TO_GO, "batches": [20, ENDLESS]}, timeout=LIMIT_S) as group:
        wait_for_step(group, 20, 2)
        group.wait_for(1, "step 60\n")
        since = time.time()
        group.signal(victim, signal.SIGTERM)
        results = group.join()
    for each in terminated(results, since):
        assert each["at"] - since < SOON_S


def test_sigterm_to_a_waiting_rank_while_the_next_round_is_far() -> None:
    with start_ranks(TRAIN, 2, kwargs={**TO_GO, "batches": [20, ENDLESS], "period": 100_000}, timeout=LIMIT_S) as group:
        wait_for_step(group, 20, 2)
        group.wait_for(1, "step 60\n")
        since = time.time()
        group.signal(0, signal.SIGTERM)
        results = group.join()
    for each in terminated(results, since):
        assert each["at"] - since < SOON_S
