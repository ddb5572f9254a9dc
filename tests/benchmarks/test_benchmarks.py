"""The benchmark runs, writes what it promises, and leaves nothing behind. Its timings are not judged here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks import averaging, checkpoint_run, link, ranks, report
from tests.benchmarks.checkpoint_peers import PEERS
from tests.benchmarks.checkpoint_peers import Job as Training
from tests.benchmarks.link import Link, Place
from tests.benchmarks.measured import Job
from tests.support import run_ranks, start_ranks

pytestmark = pytest.mark.processes

MAIN = "tests.benchmarks.averaging:main"
CHECKPOINTS = "tests.benchmarks.checkpoints:main"


def namespaces(pid: int) -> list[str]:
    """Network namespaces that the process ``pid`` has made."""
    if link.shaping_problem() is not None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"{link.PREFIX}-{pid}-")]


def workers_of(pid: int) -> list[int]:
    """Ranks that the benchmark ``pid`` has started."""
    with contextlib.suppress(OSError):
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in started if b"benchmarks.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return []


def living(pids: Sequence[int], seconds: float) -> list[int]:
    """Those that are there after ``seconds``; who has ended and waits to be asked for its status is gone."""
    deadline, left = time.monotonic() + seconds, list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if state(pid) not in ("", "Z", "X")]
        time.sleep(0.02)
    return left


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.timeout(300)
def test_quick_run_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    options = ["--quick", "--scenario", "loopback", "--replicas", "2", "--out", str(tmp_path)]
    (done,) = run_ranks(MAIN, 1, kwargs={"arguments": options}, timeout=280, launched=False)
    assert done.value == 0, done
    assert "load average" in done.stdout
    assert f"repeat with `python -m tests.benchmarks.averaging {' '.join(options)}`" in done.stdout

    table = (tmp_path / "averaging.md").read_text()
    assert "| peer | ms/step |" in table
    assert "DDP's step time over its own" in table
    assert (tmp_path / "averaging.png").read_bytes().startswith(b"\x89PNG")
    (section,) = json.loads((tmp_path / "averaging.json").read_text())["sections"]
    assert [row["peer"] for row in section["rows"]] == ["single", "ddp", "ours", "ours int8 H=8"]
    for row in section["rows"]:
        for name in ("ms_per_step", "to_single", "ddp_to_it", "samples_per_s"):
            assert math.isfinite(row[name]), (row["peer"], name)
            assert row[name] > 0.0, (row["peer"], name)


@pytest.mark.timeout(240)
def test_quick_run_of_checkpoints_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    options = ["--quick", "--out", str(tmp_path)]
    (done,) = run_ranks(CHECKPOINTS, 1, kwargs={"arguments": options}, timeout=220, launched=False, forks=True)
    assert done.value == 0, done
    said = done.stdout
    assert f"repeat with `python -m tests.benchmarks.checkpoints --quick --out {tmp_path}`" in said
    assert (tmp_path / "checkpoints.md").read_text() in said
    assert "load average (1, 5, 15 min)" in (tmp_path / "checkpoints.md").read_text()
    assert (tmp_path / "checkpoints.png").read_bytes().startswith(b"\x89PNG")
    nothing, ours = json.loads((tmp_path / "checkpoints.json").read_text())["rows"]
    assert nothing["step_ms"] > 0.0
    assert nothing["stall_ms"] is None
    assert ours["peer"] == "ours"
    assert ours["worst_ms"] >= ours["first_ms"]
    if ours["stall_ms"] is not None:  # where writing the first one took all of these few steps, there is no second
        assert ours["worst_ms"] >= ours["stall_ms"] and ours["work_ms"] > 0.0
    assert math.isfinite(ours["slowdown"])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]  # no checkpoints are left


@pytest.mark.filterwarnings("ignore")  # of the tools that it compares
@pytest.mark.parametrize("peer", [name for name in PEERS if name not in ("nothing", "DCP process")])
def test_peers_save_the_whole_state_at_each_interval(tmp_path: Path, peer: str) -> None:
    job = Training(peer=peer, folder=str(tmp_path), width=16, batch=2, every=6, saves=2)
    measured = checkpoint_run.run(job)
    assert measured.bytes >= 384 * 16 * 17
    made = len([path for path in tmp_path.iterdir() if not path.name.startswith(".")])
    if (
        "ours" in peer
    ):  # where writing takes longer than from one save to the next, there are fewer; it saves at the end
        assert made >= 1 and measured.stalls_s
    else:
        assert measured.saves == len(measured.stalls_s) == made == 2


def check_rate(made: link.Link, most: float) -> None:
    """Of 100 Mbit/s: a slow machine only slows it, so the best of some counts."""
    rates: list[float] = []
    while not rates or (rates[-1] <= 50.0 and len(rates) < 5):
        rates.append(made.measured_mbit(8_000_000))
    assert rates[-1] > 50.0 and max(rates) < most, rates


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_shaped_link_holds_its_rate_and_goes() -> None:
    if problem := link.shaping_problem():
        pytest.skip(f"no shaped link here: {problem}")

    def fail_on_the_link() -> None:
        with link.shaped(2, 100.0) as made:
            check_rate(made, 105.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_on_the_link()
    assert namespaces(os.getpid()) == []


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_paced_link_holds_its_rate() -> None:
    with link.paced(2, 100.0) as made:
        check_rate(made, 130.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["interrupt", "terminate"])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--scenario", "loopback", "--replicas", "2", "--peers", "single", "--out", str(tmp_path)]
    with start_ranks(MAIN, 1, kwargs={"arguments": options}, timeout=100, launched=False) as group:
        (process,) = group.processes
        workers: list[int] = []
        while not workers and process.poll() is None:
            time.sleep(0.02)
            workers = workers_of(process.pid)
        group.signal(0, number)
        process.wait(timeout=60)
    assert process.returncode != 0
    assert workers
    assert living(workers, 30.0) == []
    assert namespaces(process.pid) == []


def start_peers(scripts: Sequence[str]) -> None:
    """Ranks that run these scripts of the shell, as the benchmark starts its own."""
    places = [Place(prefix=("sh", "-c", script), address="127.0.0.1", interface="lo") for script in scripts]
    job = Job(peer="ddp", rank=0, num_replicas=len(places), interface="lo", warmup=0, steps=1)
    with averaging.termination_as_exception():
        ranks.run_ranks(Link(kind="none", places=tuple(places), rate_mbit=None, private=False), job, timeout_s=60.0)


@pytest.mark.parametrize(("name", "status"), [("INT", -signal.SIGINT), ("TERM", 128 + signal.SIGTERM)])
def test_nothing_is_left_after_a_signal_that_comes_while_ranks_start(tmp_path: Path, name: str, status: int) -> None:
    """The first rank sends it while the next ones start; one that is in no list yet would live on."""
    (marker := tmp_path / "marker").touch()
    rank = f"exec tail -f {marker}"
    kwargs = {"scripts": [f"kill -{name} $PPID; {rank}", *[rank] * 7]}
    try:
        (done,) = run_ranks("tests.benchmarks.test_benchmarks:start_peers", 1, kwargs=kwargs, timeout=150, check=False)
        assert done.returncode == status, done
        assert living(running(str(marker)), 30.0) == []
    finally:
        for pid in running(str(marker)):
            os.kill(pid, signal.SIGKILL)


def running(argument: str) -> list[int]:
    """Processes with ``argument`` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_a_target_without_a_number_is_missed() -> None:
    assert not report.Target(about="", value=None, limit=1.0).held
    assert not report.Target(about="", value=math.nan, limit=1.0, at_most=True).held
    assert report.Target(about="", value=1.0, limit=1.03, at_most=True).held


def test_stale_namespaces_are_removed() -> None:
    if problem := link.shaping_problem():
        pytest.skip(f"no namespaces here: {problem}")
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, stale = f"{link.PREFIX}-{os.getpid()}-test", f"{link.PREFIX}-{gone.pid}-test"
    try:
        for name in (mine, stale):
            subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
        assert stale in link.remove_stale()
        assert namespaces(os.getpid()) == [mine]
        assert namespaces(gone.pid) == []
    finally:
        for name in (mine, stale):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
