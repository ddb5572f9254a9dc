"""Every way in which the ranks can be started, and clean exits."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed.run

from lightning_async.trainer.environment.subprocess_launcher import _Watch
from tests.support import ROOT, RankResult, free_port, run_ranks, shell_environment, start_ranks

pytestmark = pytest.mark.processes

SCRIPT = str(ROOT / "tests/strategies/launch_script.py")
LIMIT_S = 180.0
"""For one launch; on an idle machine none takes 20 s."""
CLEAN_EXITS = int(os.environ.get("CLEAN_EXITS", "2"))
"""Runs of `test_exits_are_clean`: ``CLEAN_EXITS=20 make test`` for all that was promised."""


def launch(command: Sequence[str], cwd: Path) -> str:
    """Run the command; what it and its processes wrote, if it ended well and in time."""
    log = cwd / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, env=shell_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    assert code == 0, f"{code}\n{text[-6000:]}"
    assert "Traceback" not in text, text[-6000:]
    return text


def run(*what: str, cwd: Path, script: str = SCRIPT, env: Mapping[str, str] | None = None) -> RankResult:
    """The script as a user's one process, without the seconds in which it, and those it starts, import Lightning."""
    (result,) = run_ranks(
        Path(script), 1, args=what, cwd=cwd, env=env, launched=False, forks=True, timeout=LIMIT_S, check=False
    )
    return result


def launch_forked(*what: str, cwd: Path, script: str = SCRIPT) -> str:
    """`launch` for the script alone."""
    result = run(*what, cwd=cwd, script=script)
    text = result.stdout + result.stderr
    assert result.returncode == 0 and "Traceback" not in text, result
    return text


def lines(text: str, kind: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in text.splitlines() if line.startswith(kind + " "))


def assert_two_ranks_fitted(text: str, times: int = 1) -> None:
    fits = lines(text, "FIT")
    assert [fit[0] for fit in fits] == ["0"] * times + ["1"] * times, text[-4000:]
    for _, world_size, rounds, _, is_finite in fits:
        assert world_size == "2"
        assert int(rounds) >= 1
        assert is_finite == "True"
    half = len(fits) // 2
    assert sorted(fit[3] for fit in fits[:half]) == sorted(fit[3] for fit in fits[half:])


def assert_one_test_result(text: str) -> None:
    (zero, left), (one, right) = lines(text, "TEST")
    assert (zero, one) == ("0", "1")
    assert left == right


def test_plain_python_with_two_fits_and_a_test_in_a_row(tmp_path: Path) -> None:
    text = launch_forked("popen", "2", "fit", "refit", "test", cwd=tmp_path)
    assert_two_ranks_fitted(text, times=2)
    assert_one_test_result(text)
    assert text.count("DONE") == 2
    assert lines(text, "SIGNED") == [["0", "True"]] * 2 + [["1", "True"]] * 2
    heard = lines(text, "LISTENS")
    assert [each[0] for each in heard] == ["0", "0", "1", "1"]
    assert {address for each in heard for address in each[1:]} == {"127.0.0.1"}  # the store, and Gloo
    assert all(len(each) > 2 for each in heard)


def test_plain_python_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Lightning's own launcher would kill the others before they can say why."""
    with start_ranks(
        Path(SCRIPT), 1, args=["popen", "3", "killed"], cwd=tmp_path, launched=False, forks=True, timeout=LIMIT_S
    ) as group:
        (process,) = group.processes
        assert process.wait(LIMIT_S) == 1
        wait_for_group_to_end(process.pid, LIMIT_S / 4)
        (result,) = group.join()
    text = result.stdout + result.stderr
    assert "rank 1 failed: its process ended with status -9" in text, text[-4000:]
    assert re.search(r"PeerLost: [Rr]ank 0\b.* rank 1 failed", text), text[-4000:]


def wait_for_group_to_end(group: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        raise AssertionError(f"processes of group {group} are left after {seconds} s")


@pytest.mark.parametrize(
    ("method", "what"),
    [("fork", ["fit", "refit", "test", "saves"]), ("spawn", ["saves", "test"]), ("forkserver", ["fit"])],
)
def test_start_methods(method: str, what: list[str], tmp_path: Path) -> None:
    text = launch_forked(method, "2", *what, cwd=tmp_path)
    assert_two_ranks_fitted(text, times=sum(each != "test" for each in what))
    if "test" in what:
        assert_one_test_result(text)
    assert {signed for _, signed in lines(text, "SIGNED")} == {"True"}
    # The process that has started them knows what rank 0 knew.
    ((rounds, samples), *_) = lines(text, "SUMMARY")
    assert rounds == lines(text, "FIT")[0][2] and float(samples) == 40.0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_exception_on_one_rank_ends_all_at_once_whatever_started_them(method: str, tmp_path: Path) -> None:
    """In processes that Lightning starts so, it calls no hook after an exception."""
    result = run(method, "2", "fails", cwd=tmp_path)
    assert result.returncode == 1 and not result.timed_out, result
    text = result.stdout + result.stderr
    # The launcher's error is that of the rank that failed, and the other one has not waited until it was killed.
    assert re.search(
        r"ProcessRaisedException: \s*-- Process 1 terminated.*ValueError: the data ran dry", text, re.DOTALL
    ), text
    assert "forcefully exiting via SIGKILL" not in text, text


@pytest.mark.parametrize("users_port", [False, True])
def test_a_fit_after_a_failed_one_trains_and_finds_nothing_of_it(users_port: bool, tmp_path: Path) -> None:
    """Notebooks, sweeps and retries do this. The store of a failed run serves for a moment longer."""
    env = {"MASTER_PORT": str(free_port())} if users_port else {}
    result = run("fork", "2", "caught", "fit", "variables", cwd=tmp_path, env=env)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text[-4000:]
    assert lines(text, "CAUGHT") == [["ProcessRaisedException"]]
    assert_two_ranks_fitted(text)
    assert lines(text, "VARIABLES") == [[]], "fit leaves none that the user has not set"


def test_a_watcher_goes_on_although_the_others_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    """The store may be gone with the rank that died."""

    def on_death(local_rank: int, status: int) -> timedelta:
        raise RuntimeError("Connection reset by peer")

    died, other, main = (
        subprocess.Popen([sys.executable, "-S", "-c", code])
        for code in ("raise SystemExit(3)", *["import time; time.sleep(200)"] * 2)
    )
    watch = _Watch([died, other], on_death)
    watch._main_pid = main.pid  # in this process's place
    died.wait(50.0)
    assert watch._run()
    assert [other.wait(50.0), main.wait(50.0)] == [-signal.SIGKILL] * 2
    assert "could not be informed" in caplog.text and "Connection reset by peer" in caplog.text


@pytest.mark.parametrize("tells", [True, False], ids=["the system tells", "it does not"])
def test_a_process_that_ends_is_seen_by_no_look_of_every_so_often(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    if not tells:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    children = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for child in children:
            stack.callback(child.__exit__, None, None, None)
            stack.callback(child.kill)
        children[2].kill()
        children[2].wait(50.0)  # before anybody looks
        watch = _Watch(children, lambda rank, status: ends.put((rank, status)))
        watch._sleep_period = 3600 if tells else 1
        watch.start()
        assert ends.get(timeout=50.0) == (3, -signal.SIGKILL)
        children[0].communicate(b"in order\n")
        children[1].kill()
        assert ends.get(timeout=50.0) == (2, -signal.SIGKILL)
        watch.join(50.0)
        assert not watch.is_alive() and ends.empty()


def test_a_launcher_that_is_killed_while_it_starts_the_others_leaves_none(tmp_path: Path) -> None:
    with start_ranks(
        Path(SCRIPT), 1, args=["popen", "2", "fit"], cwd=tmp_path, launched=False, timeout=LIMIT_S
    ) as group:
        (process,) = group.processes
        deadline = time.monotonic() + LIMIT_S / 3
        while len(group_members(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(group_members(process.pid)) >= 2  # a process that keeps the store may be there, too
        process.kill()
        process.wait()
        wait_for_group_to_end(process.pid, LIMIT_S / 2)
        (result,) = group.join()
    text = result.stdout + result.stderr
    assert f"the process that started this rank ({process.pid}) has died" in text, text[-4000:]


def group_members(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def test_torchrun(tmp_path: Path) -> None:
    command = ["--nproc-per-node=2", f"--master-port={free_port()}", SCRIPT, "popen", "2", "fit", "test"]
    text = launch_forked(*command, cwd=tmp_path, script=torch.distributed.run.__file__)
    assert_two_ranks_fitted(text)
    assert text.count("DONE") == 2


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (apt-get install openmpi-bin)")
def test_mpirun(tmp_path: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, SCRIPT]
    text = launch([*command, "popen", "2", "one too many", "fit", "test"], tmp_path)
    assert_two_ranks_fitted(text)
    assert text.count("DONE") == 2
    refusals = [line for line in text.splitlines() if line.startswith("REFUSED ")]
    assert len(refusals) == 2 and all("mpirun started 2: set `devices` to 2" in line for line in refusals), refusals


def test_slurm(tmp_path: Path) -> None:
    """The variables that ``srun`` sets."""
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOBID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    own = [common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    args = ["popen", "2", "fit", "test"]
    results = run_ranks(Path(SCRIPT), 2, args=args, env=own.__getitem__, cwd=tmp_path, launched=False, timeout=LIMIT_S)
    assert_two_ranks_fitted("".join(result.stdout for result in results))


def test_a_world_of_one(tmp_path: Path) -> None:
    assert "nothing to average" in launch_forked("popen", "1", "fit", "test", cwd=tmp_path)


@pytest.mark.timeout(100 + 60 * CLEAN_EXITS)
def test_exits_are_clean(tmp_path: Path) -> None:
    for _ in range(CLEAN_EXITS):
        assert_two_ranks_fitted(launch_forked("popen", "2", "fit", cwd=tmp_path))
