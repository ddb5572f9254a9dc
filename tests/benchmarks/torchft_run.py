"""torchft beside the soak: its lighthouse, its replicas, and what starts those again that were killed, at once."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_async.launch.environment import LaunchedJob
from lightning_async.launch.process import Process
from tests.benchmarks.elastic_run import DEATH_S, START_S
from tests.benchmarks.elastic_trace import Life, Traces
from tests.benchmarks.ranks import ROOT, RankFailed

__all__ = ["Torchft", "torchft_problem", "torchft_training"]

# Tuned to be quick on one host; the defaults are ten times as long.
END_S = 30.0
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

        self.folder, self.traces = folder, Traces(folder)
        self._lighthouse: Any = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=_JOIN_MS, quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=_HEARTBEAT_MS,
        )  # fmt: skip
        told = json.dumps({"folder": str(folder), **job})
        program = ["-m", "tests.benchmarks.torchft_rank", told, self._lighthouse.address()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._all = LaunchedJob(program, ranks, 0, environment, "torchft")
        self._codes: dict[str, int] = {}
        self._said = (folder / "said").open("wb")
        self._processes = {str(rank): self._start(str(rank)) for rank in range(ranks)}

    def _start(self, name: str) -> Process:
        environment = {**self._all.base, "RANK": name}
        said = self._said.fileno()
        return Process(self._all.command(), environment, said, said)

    def tend(self) -> None:
        """Start those again that have died."""
        for name, process in self._processes.items():
            if self._codes.get(name) is None and process.wait(0.0):
                code = process.end()
                if code:
                    self._processes[name] = self._start(name)
                else:
                    self._codes[name] = code

    def ended(self) -> bool:
        """Whether nobody trains any more."""
        return self._codes.keys() == self._processes.keys()

    def living(self) -> dict[str, Life]:
        """Those that train, by name."""
        self.tend()
        return {life.name: life for life in self.traces.read() if life.commits and life.alive}

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
        until = time.monotonic() + END_S
        for name, process in self._processes.items():
            if name not in self._codes and process.wait(max(0.0, until - time.monotonic())):
                self._codes[name] = process.end()
        self.traces.read()
        return next((code for code in self._codes.values() if code), 0 if self.ended() else -signal.SIGKILL)

    def close(self) -> None:
        for name, process in self._processes.items():
            if name not in self._codes:
                process.signal(signal.SIGKILL)
                process.end()
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
