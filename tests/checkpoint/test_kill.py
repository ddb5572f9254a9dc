"""kill -9 at random moments of saving: no committed checkpoint is lost, and the newest one is what was saved."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_ranks

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("KILLS", "40"))
"""Kills of a trainer that saves: ``KILLS=200 make test`` for all that was promised."""
BATCH = 40


def run(function: str, timeout: float = 60.0, **arguments: Any) -> Any:
    (result,) = run_ranks(f"tests.checkpoint.workers:{function}", 1, kwargs=arguments, timeout=timeout)
    assert result.returncode == 0 and not result.timed_out, str(result)
    return result.value


@pytest.mark.timeout(200)
@pytest.mark.parametrize("batch", range(KILLS // BATCH))
def test_a_trainer_that_is_killed_while_it_saves(tmp_path: Path, batch: int):
    seen = run("kill_often", 180, folder=str(tmp_path), kills=BATCH, seed=batch)
    print(seen)
    assert seen["committed"] > BATCH / 4  # else nothing was tried
    assert seen["left"] and seen["after"]


@pytest.mark.timeout(150)
def test_two_ranks_that_are_killed_while_they_save(tmp_path: Path):
    """Where one of them is killed before it has written its part, nothing is committed."""
    seen = run("kill_often", 120, folder=str(tmp_path), kills=12, seed=2, ranks=2)
    print(seen)
    assert seen["committed"] and seen["left"]


def test_temporary_files_elsewhere(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as other:
        seen = run("kill_often", folder=str(tmp_path), kills=5, seed=3, tmpdir=other)
        assert seen["newest"] and not os.listdir(other)


@pytest.mark.parametrize("fork", [False, True])
def test_a_writer_outlives_its_trainer_and_not_for_long(tmp_path: Path, fork: bool):
    assert run("save_once_and_die", folder=str(tmp_path), fork=fork) == 1


def test_what_a_dying_writer_holds_is_left_until_it_is_dead(tmp_path: Path):
    """That it has no command line any more is no proof of that."""
    assert run("die_slowly", folder=str(tmp_path)) == {"held": True, "cleaned": True, "left": False}
