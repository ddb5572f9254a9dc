"""torchft beside the soak: its lighthouse, its replicas, and what starts those again that were killed, at once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.elastic_run import DEATH_S, START_S, alive
from tests.benchmarks.elastic_trace import Life, Traces
from tests.benchmarks.ranks import ROOT, RankFailed

__all__ = ["Torchft", "torchft_problem", "torchft_training"]

# Tuned to be quick on one host; the defaults are ten times as long.
_JOIN_MS, _TICK_MS, _HEARTBEAT_MS = 100, 20, 1000


def torchft_problem() -> str | None:
    """Why it cannot take part; None where it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed"
    try:
        import torchft  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"torchft cannot be imported: {error}"
    return None


class Torchft:
    """A training of torchft, as `elastic.Run` is one of this package.

    Args:
        folder: of its traces.
        ranks: how many replicas.
        job: see `torchft_rank`.
    """

    def __init__(self, folder: Path, ranks: int, **job: object) -> None:
        from torchft._torchft import LighthouseServer  # pyright: ignore[reportMissingImports]

        self.folder, self.ranks, self.traces = folder, ranks, Traces(folder)
        self._lighthouse: Any = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=_JOIN_MS, quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=_HEARTBEAT_MS,
        )  # fmt: skip
        self._job = json.dumps({"folder": str(folder), **job})
        self._said = (folder / "said").open("wb")
        self._processes = {str(rank): self._start(str(rank)) for rank in range(ranks)}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.torchft_rank", self._job, name, self._lighthouse.address()],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def tend(self) -> None:
        """Start those again that have died."""
        for name, process in self._processes.items():
            if process.poll() not in (None, 0):
                self._processes[name] = self._start(name)

    def ended(self) -> bool:
        """Whether nobody trains any more."""
        return all(process.poll() == 0 for process in self._processes.values())

    def living(self) -> dict[str, Life]:
        """Those that train, by name."""
        self.tend()
        return {life.name: life for life in self.traces.read() if life.commits and alive(life.process)}

    def wait(self, what: str, done: Callable[[list[Life]], bool], timeout_s: float = DEATH_S) -> list[Life]:
        """Until that is so; all lives.

        Raises:
            RankFailed: it has not become so.
        """
        until = time.monotonic() + timeout_s
        while not done(lives := self.traces.read()):
            self.tend()
            if time.monotonic() > until:
                raise RankFailed(f"torchft: in vain while waiting {what}\n{self.said()}")
            time.sleep(0.02)
        return lives

    def said(self) -> str:
        self._said.flush()
        return (self.folder / "said").read_text(errors="replace")[-4000:]

    def end(self) -> int:
        """All end; 0 where all have done so in order."""
        (self.folder / "stop").touch()
        codes = []
        for process in self._processes.values():
            try:
                codes.append(process.wait(30.0))
            except subprocess.TimeoutExpired:
                codes.append(-signal.SIGKILL)
        self.traces.read()
        return next((code for code in codes if code), 0)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._lighthouse.shutdown()
        self._said.close()


@contextlib.contextmanager
def torchft_training(out: Path, ranks: int, **job: object) -> Iterator[Torchft]:
    """A run in a folder of its own, in which all have begun to commit rounds; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="torchft-", dir=out) as folder:
        run = Torchft(Path(folder), ranks, **job)
        try:
            begun = lambda all_: len({life.name for life in all_ if len(life.commits) > 2}) == ranks  # noqa: E731
            run.wait("for all to begin", begun, START_S)
            yield run
        finally:
            run.close()
