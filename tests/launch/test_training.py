"""A training with Lightning under the launcher, which loses a rank, then its launcher, and comes to its end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Launched, lives
from tests.strategies.live_rank_workers import SAMPLES

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).with_name("train.py"))
BAD_SAMPLE = str(Path(__file__).with_name("bad_sample.py"))
COMES_BACK = str(Path(__file__).with_name("comes_back.py"))
BATCHES = 200
Launch = Callable[..., Launched]


def begins(text: str) -> list[dict[str, int]]:
    """For each start, the step with which each rank began."""
    found = re.findall(r"BEGINS (\d) (\d+)", text)
    return [{rank: int(step) for rank, step in found[at : at + 2]} for at in range(0, len(found), 2)]


def steps(folder: Path) -> dict[str, int]:
    """How many each rank has taken since it began for the last time."""
    return {rank: (folder / f"steps.{rank}").stat().st_size for rank in "01"}


def soon() -> float:
    """Within how many seconds ranks save and end: a third of what they have, where each has a core to itself."""
    return 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_a_rank_is_killed_then_the_launcher_then_the_store_and_training_goes_on(launch: Launch, tmp_path: Path):
    program = (SCRIPT, str(tmp_path / "checkpoints"), str(BATCHES))
    first = launch("-n", "2", "--max-restarts", "1", *program, forks=True, SCENARIO_KILL="1")
    first.wait_for("BEGINS", 4)
    assert first.out.count("KILLED at") == 1
    began, resumed = begins(first.out)
    assert began == {"0": 0, "1": 0}
    assert "Rank 0 saves what was trained until this: PeerLost" in first.err, "it was killed for waiting for rank 1"
    assert 8 < resumed["0"] == resumed["1"], "the one that was lost begins at the other one's place"
    assert "was killed by SIGKILL" in first.err
    first.until(lambda: min(steps(tmp_path).values()) > 8, "there are no steps")

    keeper = first.keeper()
    assert keeper is not None
    killed = time.monotonic()
    first.signal(signal.SIGKILL)
    first.end()
    first.until(lambda keeper=keeper: not lives(keeper), "somebody outlives the launcher")
    assert time.monotonic() - killed < soon()
    taken = steps(tmp_path)
    assert "ENDS" not in first.out, "the training was too short for this test"

    second = launch("-n", "2", *program, forks=True, SCENARIO_SLOW="1")
    second.wait_for("BEGINS", 2)
    (went_on,) = begins(second.out)
    # All steps are there, not only those up to the last save by the schedule.
    assert went_on == {rank: resumed[rank] + taken[rank] for rank in "01"}
    second.until(lambda: min(steps(tmp_path).values()) > 8, "there are no steps")
    seconds, killed = second.keeper(), time.monotonic()
    assert seconds is not None
    os.kill(seconds, signal.SIGKILL)
    assert second.end() == 69, second.err
    assert time.monotonic() - killed < soon()
    assert "The process that keeps the store has ended (signal 9)." in second.err
    assert "by the launcher" not in second.err, "ranks have not ended by themselves"
    assert "ENDS" not in second.out, "the training was too short for this test"
    taken = steps(tmp_path)

    third = launch("-n", "2", *program, forks=True)
    assert third.end() == 0, third.err
    (last,) = begins(third.out)
    assert last == {rank: went_on[rank] + taken[rank] for rank in "01"}
    ends = re.findall(r"ENDS (\d) (\d+) (\w+)", third.out)
    assert sorted(end[:2] for end in ends) == [("0", str(BATCHES)), ("1", str(BATCHES))]
    assert len({end[2] for end in ends}) == 1


def test_rank_0_is_killed_and_the_launcher_starts_it_again_beside_the_other(launch: Launch):
    run = launch("-n", "2", "--max-restarts", "1", "--log-dir", "logs", COMES_BACK, forks=True)
    run.allow(60)  # its ranks import all that there is, one after the other
    assert run.end() == 0, run.out + run.err
    assert "rank 0 has joined the others: training goes on with 2 of 2 ranks." in run.err
    assert "2 of 2 ranks have ended in order" in run.err
    assert re.search(r"Rank 0 goes on with its own of step ([1-9]|10), .* 2 parameters, random states", run.err)
    ended = sorted(re.findall(r"ENDED (\d) (\d) (\S+)", run.out))
    assert [each[:2] for each in ended] == [("0", "2"), ("1", "2")]
    assert ended[0][2] == ended[1][2]
    assert ", alone 1, process" in (run.folder / "logs/rank-0.log").read_text()


def test_rank_0_is_stopped_and_done_without_and_when_it_wakes_it_ends_by_name_and_joins_again(launch: Launch):
    """Stopped for longer than the 3 seconds after which the other one goes on."""
    run = launch(
        "-n", "2", "--max-restarts", "1", "--log-dir", "logs", COMES_BACK, forks=True, DIES="nobody", DEAD_AFTER="3"
    )
    run.allow(60)
    run.wait_for("TEN", 2)
    pid = int(re.findall(r"TEN 0 (\d+)", run.out)[0])
    os.kill(pid, signal.SIGSTOP)
    run.wait_for("Rank 1 goes on as rank 0 of 1: rank 0 was last seen")
    assert lives(pid)
    assert "training goes on with 1 of 2 ranks" not in run.err  # its process is there
    os.kill(pid, signal.SIGCONT)
    assert run.end() == 0, run.out + run.err
    ended = rf"rank 0 \(process {pid}\) ended with exit code 1 \(Evicted: .+\) after [\d.]+ s"
    assert re.search(rf"{ended}: training goes on with 1 of 2 ranks\.", run.err)
    assert re.search(rf"{ended}; it was started again", run.err)
    assert "rank 0 has joined the others: training goes on with 2 of 2 ranks." in run.err
    assert "2 of 2 ranks have ended in order" in run.err
    found = sorted(re.findall(r"ENDED (\d) (\d) (\S+)", run.out))
    assert [each[:2] for each in found] == [("0", "2"), ("1", "2")]
    assert found[0][2] == found[1][2]
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_rank_0_is_killed_then_rank_2_and_the_last_one_trains_and_tests(
    launch: Callable[..., Launched], tmp_path: Path
):
    """Of the deaths they are told: by silence alone they would have to wait for longer than the launcher waits."""
    deaths, silence = {"0": ["step", 0, 4], "2": ["validation", 1, 2]}, "200"
    program = ("-m", "tests.strategies.live_rank_workers", str(tmp_path / "run"), json.dumps(deaths), silence)
    run = launch("-n", "3", *program, forks=True)
    assert run.end() == 0, run.out + run.err
    assert re.search(r"goes on as rank 0 of 2: rank 0 died: its process was killed by SIGKILL after [\d.]+ s", run.err)
    assert "training goes on with 2 of 3 ranks" in run.err
    assert "training goes on with 1 of 3 ranks" in run.err
    told = [json.loads(line.partition("ENDED ")[2]) for line in run.out.splitlines() if "ENDED " in line]
    assert [(each["name"], each["rank"], each["world_size"], each["lost"]) for each in told] == [("1", 0, 1, 2)]
    assert sorted(told[0]["trained"]["0"]) == sorted(told[0]["tested"]) == list(range(SAMPLES))
    assert told[0]["test_mean"] == (SAMPLES - 1) / 2


@pytest.mark.timeout(200)
def test_a_bad_sample_ends_the_job_before_all_restarts(launch: Launch):
    job = launch("-n", "3", "--max-restarts", "3", BAD_SAMPLE, forks=True)
    assert job.end() == 1
    (words,) = [line for line in job.err.splitlines() if "by the same exception" in line]
    assert words.endswith("ValueError: it is no picture")
    assert "epoch 0, batch " in words
    assert 37 in map(int, words.partition("one of the samples [")[2].partition("]")[0].split(", "))
    assert any(f"{left} of 3 restarts are left" in job.err for left in (2, 3)), job.err


@pytest.mark.timeout(200)
def test_an_exception_that_comes_once_costs_one_restart(launch: Launch, tmp_path: Path):
    job = launch("-n", "3", "--max-restarts", "3", BAD_SAMPLE, str(tmp_path / "raised"), forks=True)
    assert job.end() == 0, job.err
    assert job.out.count("DONE") >= 2
    assert "by the same exception" not in job.err
