"""A rank that serves is killed under the launcher."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Launched

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).with_name("dedicated.py"))


def test_workers_train_on_with_its_server_and_the_launcher_starts_the_rank_again(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    run = launch("-n", "3", "--max-restarts", "1", SCRIPT, str(tmp_path), forks=True)
    run.allow(60)  # its ranks import all that there is, one after the other
    assert run.end() == 0, run.out + run.err
    assert "rank 2 (process" in run.err and "training goes on with 2 of 3 ranks" in run.err
    assert "Rank 2 starts again" in run.err
    fits = sorted(re.findall(r"FIT (\d) (\d) (\S+)", run.out))
    assert [fit[:2] for fit in fits] == [("0", "2"), ("1", "2")]
    assert fits[0][2] == fits[1][2]
    assert "3 of 3 ranks have ended in order" in run.err and "All others are done" not in run.err
    names, until = set(re.findall(r"SERVER (\S+)", run.out)), time.monotonic() + 10.0
    while any(name in Path("/proc/net/unix").read_text() for name in names):
        assert time.monotonic() < until, "the server waits for workers, though the training is over"
        time.sleep(0.05)
    assert len(names) == 1


def test_told_to_end_it_serves_until_the_workers_have_ended(launch: Callable[..., Launched], tmp_path: Path) -> None:
    run = launch("-n", "3", SCRIPT, str(tmp_path), "endless", forks=True)
    run.wait_for("TRAINS", 2)
    run.signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.out + run.err
    for rank in range(3):
        assert re.search(rf"rank {rank} \(process \d+\) ended in order after [\d.]+ s, told by SIGTERM", run.err), (
            run.err
        )
    assert "PeerLost" not in run.out + run.err
