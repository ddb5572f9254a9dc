"""The command line of the launcher; what it starts is in tests/launch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from lightning_async.cli import launch
from lightning_async.membership.launcher_channel import REJOIN
from lightning_async.membership.signing import SECRET
from tests.support import ROOT

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux")


def test_a_dry_run_shows_what_would_be_started(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(REJOIN, "7")  # a rank's that starts a job of its own, which is not that job's
    before = dict(os.environ)
    assert launch.main(["-n", "4", "--max-restarts", "2", "--dry-run", "train.py", "--lr", "a b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert REJOIN in lines.pop()
    assert len(lines) == 4
    for rank, line in enumerate(lines):
        prefix, command, *words = shlex.split(line)
        assert (prefix, command) == (f"[{rank}]", "env")
        assert words[-5:] == [sys.executable, "-u", "train.py", "--lr", "a b"]
        assert {
            f"RANK={rank}",
            "WORLD_SIZE=4",
            "TORCHELASTIC_MAX_RESTARTS=2",
            f"{SECRET}=...",
            "TORCHELASTIC_ERROR_FILE=<own>",
        } <= set(words)
        assert "OMP_NUM_THREADS=1" not in words  # the shell has it already
        assert REJOIN not in line
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "which program"),
        (["-n", "2", "-m"], "which program"),
        (["train.py"], "required: -n"),
        (["-n", "0", "train.py"], r"`Policy(ranks=0)` must be >= 1"),
        (["-n", "1000", "train.py"], "at most 128 ranks"),
        (["-n", "2", "--max-restarts", "-1", "train.py"], "`Policy(max_restarts=-1)` must be >= 0"),
        (["-n", "2", "--grace", "nan", "train.py"], "`Policy(grace_s=nan)` must be finite"),
        (["-n", "2", "--nnodes", "2", "train.py"], "unrecognized arguments: --nnodes"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.processes
def test_the_console_script_is_there_without_torch():
    """It runs commands without what the package imports for its users."""
    script = ROOT / "lightning_async/cli/bin/lightning-async"
    command = [sys.executable, "-X", "importtime", str(script), "launch", "-n", "1", "--dry-run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "lightning_async.launch.state_machine" in imported
    assert not imported & {"torch", "lightning", "numpy"}
