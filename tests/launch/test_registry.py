"""Launchers can be found while they run: real launchers, real ranks without torch."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_async.cli import status
from lightning_async.launch.registry import running
from lightning_async.membership.signing import SECRET
from tests.launch.conftest import SCRIPT, Launched

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux"),
]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for what runs, which no other launcher uses."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder / "lightning_async"


def test_a_job_is_found_while_it_runs(
    launch: Callable[..., Launched], runtime: Path, capfd: pytest.CaptureFixture[str]
):
    assert status.main([]) == 1
    assert "no job of `lightning-async launch` runs here" in capfd.readouterr().err
    job = launch("-n", "2", SCRIPT, "sleep", **{SECRET: "of this job"})
    job.wait_for("ready", 2)
    (entry,) = running()
    assert (entry.launcher, entry.secret) == (job.process.pid, "of this job")
    assert entry.program == (SCRIPT, "sleep")
    (path,) = runtime.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert status.main([]) == 0
    assert f"127.0.0.1:{entry.port}: no replica has trained yet" in capfd.readouterr().out
    assert status.main([f"127.0.0.1:{entry.port}", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["replicas"] == []
    job.signal(signal.SIGTERM)
    job.end()
    assert list(runtime.iterdir()) == []
    assert status.main([f"127.0.0.1:{entry.port}"]) == 1
    assert "does not answer" in capfd.readouterr().err


def test_what_a_killed_launcher_has_left_is_deleted(launch: Callable[..., Launched], runtime: Path):
    job = launch("-n", "1", SCRIPT, "sleep")
    job.wait_for("ready")
    job.process.kill()
    job.process.wait()
    assert len(list(runtime.iterdir())) == 1
    assert running() == []
    assert list(runtime.iterdir()) == []


def test_what_is_no_entry_is_passed_over(runtime: Path):
    runtime.mkdir(mode=0o700)
    for number, text in enumerate(["", "[]", "{}", '{"program": 3}', '{"launcher": 1}']):
        (runtime / f"{number}.json").write_text(text)
    assert running() == []
    assert len(list(runtime.iterdir())) == 5


def test_a_folder_that_others_can_write_into_is_not_used(launch: Callable[..., Launched], runtime: Path):
    runtime.mkdir()
    runtime.chmod(0o777)
    job = launch("-n", "1", SCRIPT, "sleep")
    job.wait_for("ready")
    assert list(runtime.iterdir()) == []
    assert running() == []
