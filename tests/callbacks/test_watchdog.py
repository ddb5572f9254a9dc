"""A rank that hangs ends, and says where."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_async.callbacks import watchdog
from lightning_async.callbacks.watchdog import HangWatchdog
from tests.support import run_ranks, start_ranks

pytestmark = pytest.mark.processes


def test_a_hang_ends_with_stacks_and_a_code_of_its_own(tmp_path: Path):
    (result,) = run_ranks(
        "tests.callbacks.hangs:hangs", 1, kwargs={"folder": str(tmp_path), "how": "python"}, timeout=150, check=False
    )
    assert result.returncode == 71, str(result)
    written = (tmp_path / "hang-rank-0.txt").read_text()
    for text in (written, result.stderr):
        assert "Rank 0 hangs: no progress for" in text
        assert "in a step, number 20 (limit 0.5 s" in text
        assert "in a_sleep" in text


def test_a_hang_in_c_that_holds_the_interpreter_ends_too(tmp_path: Path):
    (result,) = run_ranks(
        "tests.callbacks.hangs:hangs", 1, kwargs={"folder": str(tmp_path), "how": "C"}, timeout=150, check=False
    )
    assert result.returncode == 1, str(result)
    assert "in a_sleep_with_the_interpreter" in result.stderr


def test_what_is_no_step_may_take_its_time(tmp_path: Path):
    (result,) = run_ranks("tests.callbacks.hangs:is_slow_elsewhere", 1, kwargs={"folder": str(tmp_path)}, timeout=150)
    assert result.value == "30 []"
    assert list(tmp_path.iterdir()) == []


def test_time_in_which_the_process_was_stopped_does_not_count(tmp_path: Path):
    target = "tests.callbacks.hangs:steps"
    with start_ranks(target, 1, kwargs={"folder": str(tmp_path)}, timeout=150) as ranks:
        ranks.wait_for(0, "now")
        ranks.signal(0, signal.SIGSTOP)
        time.sleep(1.3)  # more than the limit, and by far less than twice that: then a timer in C may end it
        ranks.signal(0, signal.SIGCONT)
        (result,) = ranks.join()
    assert result.value == 100, str(result)


def test_the_others_are_told(tmp_path: Path):
    first, second = run_ranks(
        "tests.callbacks.hangs:one_of_two", 2, kwargs={"folder": str(tmp_path)}, timeout=150, check=False
    )
    assert second.returncode == 70, str(second)
    assert "Rank 1 hangs" in first.value
    assert "hang-rank-1.txt" in first.value


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"k": 1.0}, ValueError, "HangWatchdog(k=1.0)` must be > 1"),
        ({"min_s": 0}, ValueError, "min_s=0"),
        ({"other_s": -1.0}, ValueError, "other_s=-1.0"),
        ({"warmup": 1}, ValueError, "warmup=1"),
        ({"exit_code": 0}, ValueError, "exit_code=0"),
        ({"exit_code": 256}, ValueError, "exit_code=256"),
        ({"exit_code": 1.0}, TypeError, "exit_code=1.0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str):
    with pytest.raises(error) as raised:
        HangWatchdog(**arguments)
    assert text in str(raised.value)


def test_the_limit_follows_the_median_of_recent_steps():
    watchdog = HangWatchdog(k=10, min_s=1.0, warmup=3)
    assert watchdog.limit_s is None
    watchdog._steps.extend([0.2, 0.2, 50.0])
    assert watchdog.limit_s == 2.0
    watchdog._steps.extend([0.01] * 10)
    assert watchdog.limit_s == 1.0
    assert HangWatchdog(other_s=300.0).limit_s == 300.0


def test_a_hang_is_told_by_the_rank_that_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended: list[int] = []
    trainer = SimpleNamespace(global_rank=2, strategy=object(), default_root_dir=str(tmp_path))
    watches = HangWatchdog(min_s=0.05, other_s=0.5, exit_code=7)

    def end(code: int) -> None:
        ended.append(code)
        assert watches._stop is not None
        watches._stop.set()

    monkeypatch.setattr(watchdog, "_arm", lambda limit_s, file: None)
    monkeypatch.setattr(os, "_exit", end)
    watches.on_train_start(trainer, None)
    trainer.global_rank = 1  # another rank is lost
    until = time.monotonic() + 30
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    watches.on_train_end(trainer, None)
    assert ended == [7]
    assert "Rank 1 hangs:" in (tmp_path / "hang-rank-2.txt").read_text()


def test_after_training_it_keeps_nothing_of_it(tmp_path: Path):
    strategy = SimpleNamespace(of_no_pickle=threading.Lock())
    trainer = SimpleNamespace(global_rank=0, strategy=strategy, default_root_dir=str(tmp_path))
    watches = HangWatchdog()
    watches.on_train_start(trainer, None)
    watches.on_train_end(trainer, None)
    assert pickle.loads(pickle.dumps(watches)).k == watches.k
