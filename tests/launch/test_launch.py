"""`lightning-async launch`: real launchers, real ranks, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_async.launch.environment import LaunchedJob
from tests.launch.conftest import CONSOLE, SCRIPT, Launched, lives, with_variable
from tests.support import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux"),
]
Launch = Callable[..., Launched]


def numbers(text: str, after: str) -> list[int]:
    return [int(number) for line in re.findall(rf"{after} ([\d ]+)", text) for number in line.split()]


def test_ranks_have_the_variables_of_torchrun(launch: Launch):
    job = launch("-n", "2", SCRIPT, "environment", "--max-restarts", "-m", "a b", OMP_NUM_THREADS="", RANK="7")
    module = launch("-n", "1", "-m", "tests.launch.ranks", "environment", "-n", "3")
    assert (job.end(), module.end()) == (0, 0)
    assert not job.err
    told = [json.loads(line[4:]) for line in sorted(job.out.splitlines())]
    for rank, variables in enumerate(told):
        assert variables["arguments"] == ["--max-restarts", "-m", "a b"]
        assert (variables["RANK"], variables["LOCAL_RANK"], variables["ROLE_RANK"]) == (str(rank),) * 3
        assert [variables[f"{of}WORLD_SIZE"] for of in ("", "LOCAL_", "ROLE_", "GROUP_")] == ["2", "2", "2", "1"]
        assert variables["GROUP_RANK"] == "0"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert int(variables["MASTER_PORT"]) > 0
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert variables["TORCHELASTIC_RESTART_COUNT"] == variables["TORCHELASTIC_MAX_RESTARTS"] == "0"
        assert len(variables["LIGHTNING_ASYNC_SECRET"]) == 64
        assert variables["OMP_NUM_THREADS"] == ""  # it is the user's
    same = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "LIGHTNING_ASYNC_SECRET")
    assert all(told[0][name] == told[1][name] for name in same)
    assert json.loads(module.out[4:])["arguments"] == ["-n", "3"]


def test_what_torchrun_sets_is_set():
    """Names from torch's own source, so that a new one is noticed."""
    agent = next(Path(path, "torch/distributed/elastic/agent/server/local_elastic_agent.py") for path in sys.path
                 if Path(path, "torch/distributed").is_dir())  # fmt: skip
    source = agent.read_text()
    block = source[source.index("worker_env = {") :]
    names = set(re.findall(r'"([A-Z_]+)":', block[: block.index("}")]))
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= names
    ours = LaunchedJob.of(["x"], 2, 0, {}, cores=4)
    # What torch's NCCL is told, it takes as a default.
    assert names - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"} <= ours.environment(0, 1, 0).keys()


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 4, "4"), (2, 4, "2"), (3, 4, "1"), (8, 4, "1")])
def test_ranks_share_the_cores(ranks: int, cores: int, threads: str):
    assert LaunchedJob.of(["x"], ranks, 0, {}, cores).base["OMP_NUM_THREADS"] == threads
    assert LaunchedJob.of(["x"], ranks, 0, {"OMP_NUM_THREADS": "5"}, cores).base["OMP_NUM_THREADS"] == "5"


def test_exit_codes_and_words_say_what_has_happened(launch: Launch):
    expected = {
        ("0", "0"): (0, ""),
        ("-", "3"): (3, "rank 1 (process {}) ended with exit code 3 after"),
        ("-9", "-"): (137, "rank 0 (process {}) was killed by SIGKILL after"),
        ("75", "75"): (75, "rank 0 (process {}) has saved and ended with exit code 75 (preempted) after"),
    }
    jobs = {statuses: launch("-n", "2", SCRIPT, "end", *statuses) for statuses in expected}
    for statuses, job in jobs.items():
        code, words = expected[statuses]
        assert job.end() == code, job.err
        said = [line for line in job.err.splitlines() if line.startswith("[launch]")]
        assert bool(said) == bool(code)
        assert words.replace("(process {})", "") in re.sub(r"\(process \d+\)", "", job.err)
        if code:
            assert said[-1] == f"[launch] exit code {code}"
    died = jobs["-", "3"].err
    assert "[launch] the last that rank 1 has written to stderr:\n[launch]     rank 1 has had enough\n" in died
    assert re.search(r"rank 0 \(process \d+\) was killed by SIGTERM after [\d.]+ s, by the launcher", died)


def test_a_death_is_heard_at_once(launch: Launch):
    took = []
    for _ in range(3):  # the quickest counts: some milliseconds, but where others have the cores
        job = launch("-n", "2", SCRIPT, "hears", "1")
        assert job.end() == 137
        died, heard = sorted(map(float, re.findall(r"at ([\d.]+)", job.out)))
        took.append(heard - died)
    assert min(took) < 0.5


def test_what_a_rank_leaves_behind_ends_with_it_and_a_session_of_its_own_does_not(launch: Launch):
    job = launch("-n", "2", SCRIPT, "with_child", "1")
    assert job.end() == 1
    (mine, other), (mine_too, other_too) = (
        numbers(line, "children") for line in job.out.splitlines() if "child" in line
    )
    try:
        assert [lives(pid) for pid in (other, other_too)] == [True, True]
        job.until(lambda: not lives(mine) and not lives(mine_too), "they live")
    finally:
        for pid in (other, other_too):
            os.kill(pid, signal.SIGKILL)


def test_signals_go_on_to_the_ranks_and_ctrl_c_ends_all(launch: Launch):
    job, dies = launch("-n", "2", SCRIPT, "signals"), launch("-n", "2", SCRIPT, "signals")
    for each in (job, dies):
        each.wait_for("ready", 2)
        each.signal(signal.SIGUSR1)
        each.wait_for("heard SIGUSR1", 2)
    job.signal(signal.SIGINT)
    dies.signal(signal.SIGUSR2)
    assert job.end() == 130
    assert job.out.count("interrupted") == 2
    assert "SIGINT has come." in job.err
    assert dies.end() == 5
    assert re.search(r"rank 0 \(process \d+\) ended with exit code 5 after [\d.]+ s\n", dies.err)  # of itself
    assert "[launch]     rank 0 has had enough" in dies.err


def test_sigterm_has_the_ranks_save_and_not_their_workers_die(launch: Launch):
    job = launch("-n", "2", SCRIPT, "saves", "0.2")
    job.wait_for("ready", 2)
    job.signal(signal.SIGTERM)
    assert job.end() == 75
    assert sorted(re.findall(r"saved (\d) (\w+)", job.out)) == [("0", "None"), ("1", "None")]  # the workers lived
    assert "told by SIGTERM" in job.err


def test_the_second_ctrl_c_kills_and_so_does_the_end_of_the_grace(launch: Launch):
    impatient = launch("-n", "2", SCRIPT, "stubborn")
    graceful = launch("-n", "2", "--grace", "1", SCRIPT, "stubborn")
    for job in (impatient, graceful):
        job.wait_for("ready", 2)
    began = time.monotonic()
    graceful.signal(signal.SIGTERM)
    impatient.signal(signal.SIGINT)
    impatient.wait_for("SIGINT has come")
    time.sleep(0.3)  # at once it would be taken for the same
    impatient.signal(signal.SIGINT)
    assert impatient.end() == 130
    assert graceful.end() == 143
    assert time.monotonic() - began >= 1.0
    assert "was killed by SIGKILL after" in graceful.err


def test_ranks_do_not_outlive_a_launcher_that_is_killed_but_they_save(launch: Launch):
    job = launch("-n", "2", "--log-dir", "logs", SCRIPT, "saves", "1")
    job.wait_for("ready", 2)
    ranks, keeper = numbers(job.out, "ready"), job.keeper()
    assert keeper is not None
    job.signal(signal.SIGKILL)
    job.end()
    job.until(lambda: not any(map(lives, [*ranks, keeper])), "they outlive the launcher")
    # They wrote more than a pipe holds, and somebody has read it, to the last line.
    assert sorted(re.findall(r"saved (\d) None", job.out)) == ["0", "1"]
    assert "The launcher was killed. Its ranks have 30 s" in job.err
    assert "saved 1 None" in (job.folder / "logs/rank-1.log").read_text()


def test_a_rank_that_does_not_hear_is_killed_when_the_launcher_was(launch: Launch):
    job = launch("-n", "2", "--grace", "1", SCRIPT, "stubborn")
    job.wait_for("ready", 2)
    ranks = numbers(job.out, "ready")
    job.signal(signal.SIGKILL)
    job.end()
    job.until(lambda: not any(map(lives, ranks)), "they outlive the launcher")


def test_lines_are_never_torn(launch: Launch):
    count, ranks = 100, 3
    job = launch("-n", str(ranks), "--log-dir", "deep/logs", SCRIPT, "lines", str(count))
    assert job.end() == 0
    streams = {1: job.out, 2: job.err}
    for fd, text in streams.items():
        found = text.splitlines()
        for rank in range(ranks):
            mine = [line[4:] for line in found if line.startswith(f"[{rank}] ")]
            expected = [f"<{rank} {fd} {number} {'é' * (number * 7 % 3000)}>" for number in range(count)]
            assert mine == expected + ["no end of line"] * (fd == 1)
        assert len(found) == ranks * (count + (fd == 1))
    start, *log = (job.folder / "deep/logs/rank-2.log").read_text().splitlines()
    assert re.fullmatch(r"\[launch\] [\d-]+ [\d:]+ start 0, process \d+", start)
    assert sorted(log) == sorted(line[4:] for line in (job.out + job.err).splitlines() if line.startswith("[2] "))


def test_nobody_who_reads_keeps_no_signal_from_being_heard():
    """The launcher's stdout is a pipe that is full: the ranks wait, the launcher does not."""
    command = [sys.executable, CONSOLE, "launch", "-n", "2", SCRIPT, "floods"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reader, writer = os.pipe()
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE,
                          start_new_session=True) as job:  # fmt: skip
        os.close(writer)
        try:
            while b"ready" not in os.read(reader, 100):
                pass
            time.sleep(0.5)
            rss = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{job.pid}/status").read_text())[0])
            assert rss < 60_000, f"{rss} kB"
            began = time.monotonic()
            job.send_signal(signal.SIGTERM)
            # What is left in the pipe is waited for, but not for ever.
            assert job.wait(30) == 143
            assert time.monotonic() - began < 20
        finally:
            job.kill()
            os.close(reader)


def test_ranks_go_on_where_nobody_reads_any_more():
    command = [sys.executable, CONSOLE, "launch", "-n", "1", SCRIPT, "lines", "300"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, start_new_session=True) as job:  # fmt: skip
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.readline()
        job.stdout.close()
        job.stderr.close()
        assert job.wait(30) == 0


def test_all_start_again_with_another_store(launch: Launch):
    job = launch("-n", "2", "--max-restarts", "2", SCRIPT, "second_time", "-9")
    assert job.end() == 0
    starts = re.findall(r"\[(\d)\] start (\d) (\d+) ([\d.]+)", job.out)
    assert sorted(start[:2] for start in starts) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    ports = [{port for _, count, port, _ in starts if count == number} for number in "01"]
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
    assert "All ranks start again in 1 s (restart 1 of 2)." in job.err
    assert "exit code" not in job.err
    times = sorted(float(start[3]) for start in starts)
    assert times[2] - times[1] >= 1.0


def test_the_store_is_lost_and_the_ranks_save(launch: Launch):
    job = launch("-n", "2", SCRIPT, "saves", "0.1")
    again = launch("-n", "2", "--max-restarts", "1", SCRIPT, "second_time", "0")
    for each in (job, again):
        each.wait_for("ready", 2 if each is job else 1)
        keeper = each.keeper()
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
    assert job.end() == 69
    assert sorted(re.findall(r"saved (\d) None", job.out)) == ["0", "1"]
    assert "The process that keeps the store has ended (signal 9)." in job.err
    assert again.end() == 0
    assert re.findall(r"start (\d)", again.out).count("1") == 2


def test_another_process_reads_what_ranks_write_when_the_one_that_kept_the_store_was_killed_and_then_the_launcher(
    launch: Launch,
):
    job = launch("-n", "1", SCRIPT, "saves", "3")
    job.wait_for("ready")
    keeper = job.keeper()
    assert keeper is not None
    job.until(lambda: time.time() - Path(f"/proc/{keeper}").stat().st_ctime > 2, "it is not so old")
    os.kill(keeper, signal.SIGKILL)
    job.wait_for("saving")
    assert job.keeper() not in (None, keeper)
    job.signal(signal.SIGKILL)
    job.until(lambda: "The launcher was killed. Its ranks have 30 s" in job.err, "nobody sees to its ranks")
    job.until(lambda: "[0] saved 0 " in job.out, "nobody reads what they write")


def test_torchs_own_group_meets_in_the_store(launch: Launch):
    job = launch("-n", "2", SCRIPT, "group")
    assert job.end() == 0, job.err
    assert re.findall(r"sum ([\d.]+)", job.out) == ["3.0", "3.0"]
    assert re.findall(r"listens (.*)", job.out) == ["0100007F", "0100007F"]  # on 127.0.0.1 only


def test_the_launcher_imports_no_torch(launch: Launch):
    job = launch("-n", "1", SCRIPT, "signals")
    job.wait_for("ready")
    assert "libtorch" not in Path(f"/proc/{job.process.pid}/maps").read_text()
    job.signal(signal.SIGINT)
    assert job.end() == 130


@pytest.fixture
def first_process() -> list[str]:
    """A command that has another one be PID 1, as it is in a container."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("only root can make a namespace of processes")
    return command


def test_a_launcher_that_is_the_first_process_reaps_orphans_and_its_own_ranks_are_its_own(
    launch: Launch, first_process: list[str]
):
    job = launch("-n", "2", SCRIPT, "in_container", prefix=first_process)
    assert job.end() == 75, job.out + job.err
    assert job.out.count("reaped") == 2
    assert job.err.count("has saved and ended with exit code 75") == 2
    assert (job.folder / "outlived").exists()


def test_a_launcher_that_is_the_first_process_hears_signals_before_it_has_handlers(
    tmp_path: Path, first_process: list[str]
):
    early = tmp_path / "lightning-async"
    source, last = Path(CONSOLE).read_text(), "sys.exit(main())"
    assert last in source
    early.write_text(source.replace(last, "import os, signal, time\nos.kill(1, signal.SIGTERM)\ntime.sleep(60.0)"))
    began = time.monotonic()
    ended = subprocess.run([*first_process, sys.executable, early], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 50.0, "it was not heard"


def test_the_first_process_leaves_ranks_their_grace_where_the_launcher_is_killed(
    tmp_path: Path, first_process: list[str]
):
    script = tmp_path / "killed.py"
    script.write_text(
        f"""
import os, pathlib, signal, subprocess, sys
sys.path.insert(0, {str(ROOT / "lightning_async" / "cli")!r})
import first_process
first_process._LEFT_S = 0.0
first_process.stand_aside()
first_process.allow(60.0)
subprocess.Popen(["sh", "-c", "sleep 0.5; touch {tmp_path}/saved"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    ended = subprocess.run([*first_process, sys.executable, script], timeout=120.0)
    assert ended.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "saved").exists()


def test_what_the_system_refuses_is_said(launch: Launch, tmp_path: Path):
    nowhere = launch("-n", "2", "--log-dir", "/proc/nowhere", SCRIPT, "stubborn")
    assert nowhere.end() == 71
    assert "/proc/nowhere" in nowhere.err
    # With each descriptor more it comes a little further, and leaves nothing behind.
    refused = 0
    for descriptors in range(14, 30, 2):
        few = launch("-n", "2", "--grace", "0", SCRIPT, "stubborn", descriptors=descriptors, JOB=str(tmp_path))
        few.until(lambda few=few: few.process.poll() is not None or few.out.count("ready") == 2, "it hangs")
        if few.process.poll() is None:
            break
        refused += 1
        assert few.end() == 71
        assert "Too many open files" in few.err
        few.until(lambda: not with_variable("JOB", str(tmp_path)), "something is left")
    few.signal(signal.SIGTERM)  # pyright: ignore[reportPossiblyUnboundVariable]
    assert few.end() == 143  # pyright: ignore[reportPossiblyUnboundVariable]
    assert refused >= 2


def test_a_program_that_is_not_there(launch: Launch):
    job = launch("-n", "2", "--max-restarts", "0", "nothing.py")
    assert job.end() == 2
    assert "can't open file" in job.err
