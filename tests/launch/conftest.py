"""The launcher as its users start it, with real processes for ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT, Process, shell_environment, start_script

SCRIPT = str(Path(__file__).with_name("ranks.py"))
CONSOLE = str(ROOT / "lightning_async/cli/bin/lightning-async")


def _shells(environment: Mapping[str, str]) -> dict[str, str]:
    """What Lightning sets in whoever imports it, as pytest has, is not there in a shell."""
    return {name: value for name, value in environment.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}


class Launched:
    """A launcher that runs.

    Args:
        arguments: of the command.
        folder: where it runs.
        prefix: the command that starts it.
        forks: see `launch`.
        more: environment variables.
    """

    def __init__(
        self, arguments: tuple[str, ...], folder: Path, prefix: Sequence[str], forks: bool, **more: str
    ) -> None:
        self.folder, self._until = folder, time.monotonic() + 150
        self._out, self._err = folder / "out", folder / "err"
        command = [CONSOLE, "launch", *arguments]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if forks and not prefix:
                environment = _shells(shell_environment(more))
                self.process: Process = start_script(command, environment, folder, out, err)
            else:
                environment = {**_shells(os.environ), "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1", **more}
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, *command],
                    cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True,
                )  # fmt: skip

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def allow(self, seconds: float) -> None:
        """So much more time in all."""
        self._until += seconds

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has been written so often."""
        while (self.out + self.err).count(text) < times:
            ended = self.process.poll() is not None and (self.out + self.err).count(text) < times
            assert not ended, f"ended without {text!r}\n{self.out[-3000:]}\n{self.err[-3000:]}"
            self._check(f"{text!r} was not written")
            time.sleep(0.01)

    def until(self, true: Callable[[], object], what: str) -> None:
        while not true():
            self._check(what)
            time.sleep(0.01)

    def _check(self, what: str) -> None:
        assert time.monotonic() < self._until, f"{what}\n{self.out[-3000:]}\n{self.err[-3000:]}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(max(0.0, self._until - time.monotonic()))

    def keeper(self) -> int | None:
        """The process that keeps its store."""
        named = f"keeps the store of launcher {self.process.pid}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if named in (folder / "cmdline").read_bytes():
                    return int(folder.name)
        return None


def with_variable(name: str, value: str) -> list[str]:
    """The command lines of all processes that live and have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text()[-100:])
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """``launch("-n", "2", SCRIPT, ...)``; at the end there is no launcher any more, nor a store.

    With ``forks`` the launcher is forked, and so are its ranks, see `tests.nursery`: for those that
    import what takes seconds.
    """
    started: list[Launched] = []

    def start(
        *arguments: str,
        descriptors: int | None = None,
        prefix: Sequence[str] = (),
        forks: bool = False,
        **environment: str,
    ) -> Launched:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        limit = [] if descriptors is None else ["bash", "-c", f'ulimit -S -n {descriptors}; exec "$@"', "-"]
        started.append(Launched(arguments, folder, [*prefix, *limit], forks, **environment))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
    for each in started:
        each.until(lambda each=each: each.keeper() is None, "the store outlives all")
