"""Programs that train into one directory: one at a time, and one right after another that was killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async.algorithms import Latest
from lightning_async.checkpoint import writer_process
from lightning_async.errors import CheckpointError
from tests.callbacks.checkpoint_ranks import At
from tests.callbacks.test_checkpoint import every, steps_in, train
from tests.checkpoint.test_directory_lock import once_said

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(writer_process, "GRACE_S", 0.2)
    monkeypatch.setattr(writer_process, "QUIET_S", 0.3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started(body: Callable[[int], Any]) -> tuple[int, bytes]:
    """A process of its own, and what it has written to the descriptor that it was given."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            body(write)
        os._exit(1)
    os.close(write)
    said = os.read(read, 100)
    os.close(read)
    assert said, "it has failed"
    return pid, said


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.timeout(150)
def test_a_second_training_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """As the first one takes its newest checkpoint from there, too: no number comes twice."""

    def train_and_stop(said: int) -> None:
        saved = every(tmp_path, 4)

        def stop() -> None:
            saved._now.saver.wait(20.0)  # pyright: ignore
            os.write(said, b".")
            os.kill(os.getpid(), signal.SIGSTOP)

        train(saved, At(9, stop))
        os._exit(7)

    pid, _ = started(train_and_stop)
    try:
        with pytest.raises(CheckpointError, match=f"is in use: process {pid} on host .* trains into it, since 20"):
            train(every(tmp_path, 4))
        assert steps_in(tmp_path) == [8, 4]
        assert train(every(tmp_path / "another", 50), max_epochs=1).losses
        os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert steps_in(tmp_path)[0] == 24
    assert train(every(tmp_path, 4)).losses == {}, "it has let go, and what it has saved is complete"


@pytest.mark.timeout(150)
def test_killed_while_a_slow_disk_writes_and_started_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The process that writes is stopped, as a disk would do it, with two saves in hand."""

    def train_and_hang(said: int) -> None:
        saved = every(tmp_path, 4, busy="latest")

        def stop() -> None:
            saved._now.saver.wait(20.0)  # pyright: ignore
            os.kill(saved._now.saver._writer.pid, signal.SIGSTOP)  # pyright: ignore

        def tell() -> None:
            os.write(said, b"%d" % saved._now.saver._writer.pid)  # pyright: ignore
            signal.pause()

        # The memory that grows with the optimizer's state is there before the first one is due.
        train(saved, At(3, lambda: saved._now.saver.wait(20.0)), At(7, stop), At(10, tell))  # pyright: ignore

    pid, writer = started(train_and_hang)
    kill(pid)
    assert steps_in(tmp_path) == [4]
    with caplog.at_level(logging.WARNING, "lightning_async"), once_said(lambda: os.kill(int(writer), signal.SIGCONT)):
        module = train(every(tmp_path, 4))
    assert min(module.losses) == 8, "what had been handed over is not lost"
    assert "still writing something" in caplog.text or "still writing 000002-step-8" in caplog.text
    assert steps_in(tmp_path)[0] == 24


def test_what_a_fit_has_taken_it_gives_back(tmp_path: Path) -> None:
    """However it has ended, and to another program."""

    def fail() -> None:
        raise KeyError("user")

    class Failing(Latest):
        def keep(self, saved: Any) -> Any:
            raise KeyError("the user's policy")

    with pytest.raises(KeyError, match="user"):
        train(every(tmp_path, 4), At(9, fail))
    with pytest.raises(KeyError, match="policy"):
        train(every(tmp_path, 4, keep=Failing(2)))
    pid, _ = started(lambda said: (train(every(tmp_path, 4)), os.write(said, b".")))
    os.waitpid(pid, 0)
    assert steps_in(tmp_path)[0] == 24
