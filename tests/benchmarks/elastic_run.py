"""A training under the launcher that is watched by what its ranks write down, and whose ranks can be told to die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.benchmarks.elastic_trace import Life, Traces
from tests.benchmarks.ranks import ROOT, RankFailed

__all__ = ["DEATH_S", "START_S", "Run", "training"]

CONSOLE = str(ROOT / "lightning_async/cli/bin/lightning-async")
SETTLED = 3
START_S, DEATH_S = 180.0, 90.0


class Run:
    """A training under the launcher.

    Args:
        folder: of its traces and logs.
        ranks: how many there are at first.
        max_restarts: of the launcher.
        program: what ranks run, a module and its arguments. Default: `elastic_rank`, with the job.
        job: of the ranks, beside the folder; see `elastic_rank.Job`.
    """

    def __init__(
        self, folder: Path, ranks: int, max_restarts: int = 0, program: Sequence[str] | None = None, **job: object
    ) -> None:
        self.folder, self.ranks, self.traces = folder, ranks, Traces(folder)
        self._out = (folder / "launcher.out").open("wb")
        options = ["-n", str(ranks), "--log-dir", str(folder / "logs"), "--max-restarts", str(max_restarts)]
        if program is None:
            program = ["tests.benchmarks.elastic_rank", json.dumps({"folder": str(folder), **job})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, CONSOLE, "launch", *options, "-m", *program], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait(self, what: str, done: Callable[[list[Life]], bool], timeout_s: float = DEATH_S) -> list[Life]:
        """Until that is so; all lives.

        Raises:
            RankFailed: it has not become so, or all have ended.
        """
        until = time.monotonic() + timeout_s
        while not done(all_ := self.traces.read()):
            ended = self.process.poll() is not None and not done(all_ := self.traces.read())
            if ended or time.monotonic() > until:
                raise RankFailed(f"{'ended' if ended else 'in vain'} while waiting {what}\n{self.said()}")
            time.sleep(0.02)
        return all_

    def living(self) -> dict[str, Life]:
        """Those that train, by name."""
        return {life.name: life for life in self.traces.read() if life.alive and not life.ended}

    def settled(self, without: Sequence[Life] = ()) -> Callable[[list[Life]], bool]:
        """Whether all that live have committed some rounds together."""
        gone = {life.process for life in without}

        def done(all_: list[Life]) -> bool:
            here = [each for each in all_ if each.process not in gone and each.alive and not each.ended]
            names = {life.name for life in here}
            return bool(here) and all(
                len(last := life.commits[-SETTLED:]) == SETTLED and all(set(c["members"]) == names for c in last)
                for life in here
            )

        return done

    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def said(self) -> str:
        self._out.flush()
        return (self.folder / "launcher.out").read_text(errors="replace")[-6000:]

    def order(self, life: Life, place: str) -> None:
        """Have a rank die there."""
        part = self.folder / f"order-{life.name}"
        part.write_text(place)
        part.rename(self.folder / f"die-{life.name}")

    def kill(self, life: Life, place: str) -> float:
        """Have it die there, or at once; when it did."""
        if place == "anywhere":
            at = time.monotonic()
            os.kill(life.process, signal.SIGKILL)
        else:
            self.order(life, place)
            self.wait(f"for rank {life.name} to die in {place}", lambda _: not life.alive)
            (self.folder / f"die-{life.name}").unlink(missing_ok=True)
            self.traces.read()
            at = next((event["t"] for event in life.of("die")), time.monotonic())
        return at

    def end(self) -> int:
        """All end in order; the launcher's exit code."""
        (self.folder / "stop").touch()
        try:
            code = self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            raise RankFailed(f"the launcher did not end\n{self.said()}") from None
        self.traces.read()
        return code

    def close(self) -> None:
        for life in self.traces.read():
            with contextlib.suppress(OSError):
                os.kill(life.process, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15.0)
        if self.process.poll() is None:
            for life in self.traces.read():
                with contextlib.suppress(OSError):
                    os.killpg(life.process, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self._out.close()


@contextlib.contextmanager
def training(out: Path, ranks: int, **job: object) -> Iterator[Run]:
    """A run in a folder of its own, in which all have begun to commit rounds; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="elastic-", dir=out) as folder:
        run = Run(Path(folder), ranks, **job)  # pyright: ignore[reportArgumentType]
        try:
            run.wait("for all to begin", lambda all_: len(all_) >= ranks and run.settled()(all_), START_S)
            yield run
        finally:
            run.close()
