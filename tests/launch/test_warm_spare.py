"""Processes that stand by: real ones, which import a library of seconds that waits for a file here."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_async.launch import warm_spare
from lightning_async.launch.environment import LaunchedJob
from tests.launch.conftest import Launched, lives
from tests.launch.test_live_ranks import SCRIPT, Ranks, said
from tests.support import ROOT

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux"),
]

LIBRARY = """
import os, pathlib, time
from lightning_utilities.core.rank_zero import rank_zero_only
rank_zero_only.rank = int(os.environ.get("RANK", 0))  # as Lightning does
here = pathlib.Path(__file__).parent
(here / f"importing-{os.getpid()}").touch()
while (here / "closed").exists():
    time.sleep(0.01)
if (here / "broken").exists():
    raise ImportError("it is broken")
(here / f"imported-{os.getpid()}").touch()
"""


class Prepared(Ranks):
    """Ranks whose program has imported a library, so that others stand by."""

    def __init__(self, job: Launched, count: int, library: Path, *sync_points: str) -> None:
        super().__init__(job, count)
        self._library, self._known = library, set[int]()
        for rank in self.everybody:
            self.do(rank, "imports", "pytorch_lightning")
        job.wait_for("imported", count)
        for sync_point in sync_points:
            (library / sync_point).touch()
        self.tell(1, *self.everybody)  # and what they have imported

    def one_that(self, does: str = "imported") -> int:
        """The next process that is no rank and does so."""
        self._known |= set(self.pids.values())
        seen = lambda: {int(path.name.partition("-")[2]) for path in self._library.glob(f"{does}-*")} - self._known  # noqa: E731
        self.job.until(seen, f"nobody has {does}")
        pid = min(seen())
        self._known.add(pid)
        return pid

    def open(self, sync_point: str) -> None:
        (self._library / sync_point).unlink()

    def lose(self, rank: int, generation: int) -> None:
        """It is killed, and the others go on."""
        self.kill(rank)
        self.tell(generation, *(each for each in self.everybody if each != rank))
        self.job.wait_for(f"Rank {rank} starts again in 0.1 s")

    def describe(self, rank: int) -> dict[str, object]:
        """What it knows of how it was started."""
        before = self.job.out.count(" described ")
        self.do(rank, "describe")
        self.job.wait_for(" described ", before + 1)
        return json.loads(re.findall(r" described (.+)\n", self.job.out)[-1])


Prepare = Callable[..., Prepared]


@pytest.fixture
def prepare(launch: Callable[..., Launched], tmp_path: Path) -> Iterator[Prepare]:
    """``prepare(3, *options)``: ranks that train, and a process that begins to import."""
    started: list[Prepared] = []

    def start(
        count: int, *options: str, program: tuple[str, ...] = (SCRIPT,), sync_points: tuple[str, ...] = ()
    ) -> Prepared:
        library = tmp_path / f"library-{len(started)}"
        library.mkdir()
        (library / "pytorch_lightning.py").write_text(LIBRARY)
        path = os.pathsep.join([str(ROOT), str(library)])
        job = launch("-n", str(count), "--max-restarts", "3", *options, *program, PYTHONPATH=path)
        started.append(Prepared(job, count, library, *sync_points))
        return started[-1]

    yield start
    for each in started:
        each.close()


def niceness(process: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, process)


@pytest.mark.parametrize("program", [(SCRIPT, "some", "-m words"), ("-m", "tests.launch.live_ranks", "--n", "2")])
def test_who_has_stood_by_is_as_one_that_was_started_anew(prepare: Prepare, program: tuple[str, ...]):
    ranks = prepare(2, "--log-dir", "logs", program=program)
    waiting = ranks.one_that()
    nicer = warm_spare._NICER if warm_spare._may_come_back() else 0
    ranks.job.until(
        lambda: niceness(waiting) == niceness(ranks.pids[1]) + nicer, "it takes the cores of those who train"
    )
    anew = ranks.describe(1)
    assert anew["number"] == 1
    ranks.lose(1, 2)
    ranks.meet(1, 1)
    assert ranks.pids[1] == waiting
    assert ranks.describe(1) == anew
    assert re.search(r"start 0, alone 1, stood by, process", (ranks.job.folder / "logs/rank-1.log").read_text())
    ranks.tell(3, 0, 1)
    ranks.job.wait_for("rank 1 has joined the others: training goes on with 2 of 2 ranks.")
    following = ranks.one_that()  # not before
    for rank in (0, 1):
        ranks.end(rank, 0)
    assert ranks.job.end() == 0
    assert not lives(following)


def test_one_that_still_imports_is_taken_and_the_next_death_has_none(prepare: Prepare):
    ranks = prepare(3, sync_points=("closed",))
    importing = ranks.one_that("importing")
    for rank, left in ((0, (1, 2)), (1, (2,))):
        ranks.kill(rank)
        ranks.tell(2 + rank, *left)
        ranks.job.wait_for(f"Rank {rank} starts again in 0.1 s")
    ranks.meet(1, 1)  # from the beginning: its program has imported nothing yet
    ranks.open("closed")
    ranks.meet(0, 1)
    assert ranks.pids[0] == importing
    assert ranks.pids[1] != importing
    assert ranks.describe(0)["priority"] == ranks.describe(2)["priority"]
    for rank in range(3):
        ranks.end(rank, 0)
    assert ranks.job.end() == 0


NOBODY = "There is no warm spare any more: {}. Ranks that are started again have to import first."


def test_one_that_cannot_import_or_dies_is_said_once_and_the_rank_comes_back_all_the_same(prepare: Prepare):
    broken, killed = prepare(2, sync_points=("broken",)), prepare(2)
    failing, waiting = broken.one_that("importing"), killed.one_that()
    broken.open("broken")  # once it is not what it was when they began
    os.kill(waiting, signal.SIGKILL)
    killed.job.until(lambda: not lives(waiting), "it lives")
    for ranks, why in (
        (broken, "cannot import pytorch_lightning: ImportError: it is broken"),
        (killed, "one has ended with -9"),
    ):
        ranks.lose(1, 2)
        ranks.meet(1, 1)
        ranks.tell(3, 0, 1)
        ranks.job.wait_for("rank 1 has joined")
        ranks.lose(0, 4)
        ranks.meet(0, 1)
        ranks.tell(5, 0, 1)
        for rank in (0, 1):
            ranks.end(rank, 0)
        assert ranks.job.end() == 0
        assert [line for line in said(ranks.job) if "warm spare" in line] == [NOBODY.format(why)]
    assert broken.pids[1] == failing  # it has begun anew
    assert killed.pids[1] != waiting


def test_who_stands_by_ends_with_the_launcher_and_with_the_training(prepare: Prepare):
    killed, ended = prepare(1, "--standby", "2"), prepare(1)
    waiting = [killed.one_that(), killed.one_that(), ended.one_that()]
    killed.job.signal(signal.SIGKILL)
    killed.job.end()
    ended.end(0, 0)
    assert ended.job.end() == 0
    killed.job.until(lambda: not any(map(lives, [*waiting, killed.pids[0]])), "they outlive the launcher")


def test_nobody_stands_by_where_it_would_be_of_no_use_or_not_the_same(prepare: Prepare, tmp_path: Path):
    off, itself = prepare(1, "--standby", "0"), prepare(1, "--max-restarts", "0", "--standby", "1")
    for job in (off, itself):
        job.end(0, 0)
        assert job.job.end() == 0
    assert {path.name for path in tmp_path.glob("library-*/importing-*")} == {
        f"importing-{ranks.pids[0]}" for ranks in (off, itself)
    }
    sets = prepare(2, sync_points=("closed",))
    sets.one_that("importing")
    sets.do(0, "sets", "OMP_NUM_THREADS", "7")
    sets.tell(2, 0, 1)
    sets.job.wait_for(NOBODY.format("the program sets OMP_NUM_THREADS itself, which is read at imports"))
    waited = sets.pids[1]
    sets.lose(1, 3)
    sets.meet(1, 1)
    assert sets.pids[1] != waited
    for rank in (0, 1):
        sets.end(rank, 0)
    assert sets.job.end() == 0


@pytest.mark.parametrize(
    ("program", "can"),
    [
        (["train.py"], True),
        (["-m", "package.zip"], True),
        (["train.zip"], False),
        (["train.pyc"], False),
        (["/"], False),
    ],
)
def test_what_another_process_can_become(program: list[str], can: bool):
    assert warm_spare.can_stand_by(LaunchedJob.of(program, 1, 1, {}, cores=1)) == can
