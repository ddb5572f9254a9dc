"""The helper that starts ranks: it must never hang, hide a failure, or leave a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import run_ranks, start_ranks

pytestmark = pytest.mark.processes


def whoami(greeting: str) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return {"greeting": greeting, "cwd": os.getcwd()} | {name: os.environ[name] for name in names}


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has a reason")


def hang_with_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_every_rank_knows_its_place_and_its_value_comes_back():
    results = run_ranks("tests.test_support:whoami", 3, kwargs={"greeting": "hello"})
    assert [result.value["RANK"] for result in results] == ["0", "1", "2"]
    assert {result.value["WORLD_SIZE"] for result in results} == {"3"}
    assert {result.value["greeting"] for result in results} == {"hello"}
    assert {result.value["MASTER_ADDR"] for result in results} == {"127.0.0.1"}
    assert not Path(results[0].value["cwd"]).exists()


def test_a_script_gets_its_command_line_and_environment(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1], os.environ['RANK'], os.environ['EXTRA'])")
    (result,) = run_ranks(script, 1, args=["argument"], env={"EXTRA": "more"})
    assert (result.stdout, result.value) == ("argument 0 more\n", None)


def test_a_failure_shows_what_every_rank_wrote():
    with pytest.raises(AssertionError, match=r"(?s)rank 0: exit status 0.*rank 1: exit status 1.*rank 1 has a reason"):
        run_ranks("tests.test_support:fail_on_rank_1", 2)
    results = run_ranks("tests.test_support:fail_on_rank_1", 2, check=False)
    assert [result.returncode for result in results] == [0, 1]


def test_a_hang_ends_at_the_deadline_with_stacks_and_without_orphans():
    with start_ranks("tests.test_support:hang_with_a_child", 2) as group:
        for rank in range(2):
            group.wait_for(rank, "child")
        start = time.monotonic()
        group.deadline = start + 1.0
        results = group.join()
    assert time.monotonic() - start < 60
    assert all(result.timed_out and "hang_with_a_child" in result.stderr for result in results)
    deadline = time.monotonic() + 60
    while any(alive(int(result.stdout.split()[1])) for result in results):
        assert time.monotonic() < deadline, "a rank's child process outlived it"
        time.sleep(0.01)


def test_signals_reach_one_rank_only():
    with start_ranks("tests.test_support:hang_with_a_child", 2) as group:
        for rank in range(2):
            group.wait_for(rank, "child")
        group.signal(1, signal.SIGKILL)
        assert group.processes[1].wait(60) == -signal.SIGKILL
        assert group.processes[0].poll() is None


def test_waiting_for_a_line_that_never_comes_is_a_failure():
    with (
        start_ranks("tests.test_support:fail_on_rank_1", 2) as group,
        pytest.raises(AssertionError, match="ended without printing 'never'"),
    ):
        group.wait_for(1, "never")
