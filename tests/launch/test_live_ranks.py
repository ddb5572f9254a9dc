"""Ranks die and the others go on: real launchers, real ranks without torch, real kills."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch import conftest
from tests.launch.conftest import CONSOLE, Launched, lives

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux"),
]

SCRIPT = str(Path(__file__).with_name("live_ranks.py"))
ENVIRONMENT = {"PYTHONPATH": str(conftest.ROOT)}


class Ranks:
    """The ranks of a launcher, which do what they are told."""

    def __init__(self, job: Launched, count: int) -> None:
        self.job, self.everybody = job, tuple(range(count))
        self.pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        for rank in self.everybody:
            self.meet(rank, 0)
        self.tell(0, *self.everybody)

    def meet(self, rank: int, alone: int) -> str:
        """A rank is there, or back, where it was started alone, for that time. What it has been given."""
        job = self.job
        job.until(lambda: re.search(rf"\[{rank}\] ready \d+ {alone} .+\n", job.out), f"{rank} is not there")
        ((pid, given),) = re.findall(rf"\[{rank}\] ready (\d+) {alone} (.+)\n", job.out)
        self.pids[rank] = int(pid)
        # For reading, too: then this does not wait for a rank, nor fails without one.
        pipe, before = os.open(job.folder / f"rank-{rank}-{alone}", os.O_RDWR), self._pipes.get(rank)
        self._pipes[rank] = pipe
        if before is not None:
            os.close(before)
        return given

    def do(self, rank: int, *words: object) -> None:
        os.write(self._pipes[rank], " ".join(map(str, (*words, "\n"))).encode())

    def tell(self, number: int, *members: int) -> None:
        """All of them tell that they are in this generation, and their launcher has heard it."""
        for rank in members:
            self.do(rank, "tell", number, *members)
        for rank in members:
            self.job.wait_for(f"[{rank}] told {number}\n")

    def end(self, rank: int, status: int) -> None:
        self.do(rank, "end", status)
        self.job.until(lambda: not lives(self.pids[rank]), f"rank {rank} lives")

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)

    def close(self) -> None:
        for pipe in self._pipes.values():
            os.close(pipe)


Begin = Callable[..., Ranks]


@pytest.fixture
def begin(launch: Callable[..., Launched]) -> Iterator[Begin]:
    """``begin(3, "--max-restarts", "1")``: ranks that are in the first generation."""
    with contextlib.ExitStack() as stack:

        def start(count: int, *options: str) -> Ranks:
            ranks = Ranks(launch("-n", str(count), *options, SCRIPT, **ENVIRONMENT), count)
            stack.callback(ranks.close)
            return ranks

        yield start


def said(job: Launched) -> list[str]:
    """What the launcher has said, without the numbers of processes and times."""
    lines = [line.removeprefix("[launch] ") for line in job.err.splitlines() if line.startswith("[launch] ")]
    return [re.sub(r" \(process \d+\)| after [\d.]+ s", "", line) for line in lines]


KILLED = "was killed by SIGKILL (by hand, or by the system for want of memory)"


def test_ranks_die_in_turn_the_first_among_them_and_the_others_go_on(begin: Begin):
    ranks = begin(4)
    job = ranks.job
    ranks.kill(0)
    ranks.tell(1, 1, 2, 3)
    job.wait_for("training goes on with 3 of 4 ranks")
    ranks.end(1, 0)  # it is done early, which is no death
    ranks.kill(3)
    ranks.tell(2, 2)
    job.wait_for("training goes on with 1 of 4 ranks")
    ranks.end(2, 0)
    assert job.end() == 0
    assert said(job) == [
        f"rank 0 {KILLED}: training goes on with 3 of 4 ranks.",
        f"rank 3 {KILLED}: training goes on with 1 of 4 ranks.",
        f"rank 0 {KILLED}; training went on without it",
        "rank 1 ended in order",
        f"rank 3 {KILLED}; training went on without it",
        "rank 2 ended in order",
        "2 of 4 ranks have ended in order",
        "exit code 0",
    ]


def test_those_who_live_are_told_at_once_who_has_died_and_how(begin: Begin):
    ranks = begin(3)
    for rank in (0, 1):
        ranks.do(rank, "listens")
    ranks.job.wait_for("listens", 2)
    ranks.kill(2)
    ranks.job.wait_for("dead 2 ", 2)  # before they have told anything
    died = f"dead 2 {ranks.pids[2]} died: its process was killed by SIGKILL after"
    assert [f"[{rank}] {died}" in ranks.job.out for rank in (0, 1)] == [True, True]
    ranks.tell(1, 0, 1)
    ranks.job.wait_for("training goes on with 2 of 3 ranks")
    ranks.end(0, 3)
    ranks.job.wait_for("dead 0 ")
    ranks.tell(2, 1)
    ranks.end(1, 0)
    assert ranks.job.end() == 0
    assert ranks.job.out.count("dead ") == 3


def test_what_others_write_is_not_heard_and_who_inherits_a_descriptor_is_not_waited_for(begin: Begin):
    ranks = begin(2)
    job = ranks.job
    ranks.tell(1, 1)  # what is heard after this would have rank 0 among those who go on
    ranks.do(1, "garbage")
    job.wait_for("garbage")
    ranks.do(1, "fork")
    job.wait_for("child ")
    child = int(re.findall(r"child (\d+)", job.out)[0])
    try:
        ranks.kill(0)
        job.wait_for("training goes on with 1 of 2 ranks")
        ranks.end(1, 0)
        assert job.end() == 0
        assert lives(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("dead", [0, 1])
def test_who_tells_and_ends_at_once_has_gone_on(begin: Begin, dead: int):
    """The launcher is busy meanwhile, and hears of all together."""
    ranks, other = begin(2), 1 - dead
    ranks.job.signal(signal.SIGSTOP)
    ranks.kill(dead)
    ranks.do(other, "tell", 1, other)
    ranks.end(other, 0)
    ranks.job.signal(signal.SIGCONT)
    assert ranks.job.end() == 0
    assert "[launch] 1 of 2 ranks have ended in order\n" in ranks.job.err


def test_survivors_fail_later_and_all_start_again(begin: Begin):
    """Whether the one that is lost has been started again by then or not."""
    ranks = begin(3, "--max-restarts", "2")
    job = ranks.job
    ranks.kill(2)
    ranks.tell(1, 0, 1)
    job.wait_for("training goes on with 2 of 3 ranks")
    ranks.end(0, 3)
    ranks.end(1, 4)
    assert job.end() == 0
    assert job.out.count("again\n") == 3
    lines = said(job)
    where = [
        lines.index(line)
        for line in (
            f"rank 2 {KILLED}: training goes on with 2 of 3 ranks.",
            "Rank 2 starts again in 0.1 s, to join the others (restart 1 of 2).",
            "rank 0 ended with exit code 3",
            "rank 1 ended with exit code 4",
            "the last that rank 0 has written to stderr:",
            "    it has had enough",
            "0 of 3 ranks have ended in order",
        )
    ]
    assert where == sorted(where)
    assert "All ranks start again in" in lines[-1]


def test_one_that_has_died_is_started_again_alone_until_it_has_joined_and_restarts_are_used_up(begin: Begin):
    ranks = begin(3, "--max-restarts", "2")
    job = ranks.job
    given = re.findall(r"\[2\] ready \d+ 0 (.+)\n", job.out)
    for rank in (0, 1):
        ranks.do(rank, "listens")
    ranks.kill(2)
    ranks.tell(1, 0, 1)
    job.wait_for("Rank 2 starts again in 0.1 s")
    assert [ranks.meet(2, 1)] == given  # the same store
    ranks.end(2, 3)
    job.wait_for("dead 2 ", 4)  # both of both deaths
    job.wait_for("Rank 2 starts again in 1 s")
    assert [ranks.meet(2, 2)] == given
    ranks.tell(2, 0, 1, 2)
    job.wait_for("rank 2 has joined the others")
    ranks.kill(2)
    ranks.tell(3, 0, 1)
    job.wait_for("training goes on with 2 of 3 ranks", 2)
    ranks.end(0, 0)
    ranks.end(1, 0)
    assert job.end() == 0
    lost = f"rank 2 {KILLED}: training goes on with 2 of 3 ranks."
    assert said(job) == [
        lost,
        "Rank 2 starts again in 0.1 s, to join the others (restart 1 of 2).",
        "rank 2 ended with exit code 3, before it had joined the others.",
        "Rank 2 starts again in 1 s, to join the others (restart 2 of 2).",
        "rank 2 has joined the others: training goes on with 3 of 3 ranks.",
        lost,
        f"rank 2 {KILLED}; it was started again",
        "rank 2 ended with exit code 3; it was started again",
        f"rank 2 {KILLED}; training went on without it",
        "rank 0 ended in order",
        "rank 1 ended in order",
        "2 of 3 ranks have ended in order",
        "exit code 0",
    ]


def test_one_that_has_not_joined_when_all_others_are_done_is_told_to_end(begin: Begin):
    ranks = begin(2, "--max-restarts", "1")
    job = ranks.job
    ranks.kill(0)
    ranks.tell(1, 1)
    ranks.meet(0, 1)
    ranks.do(0, "saves")
    job.wait_for("saves")
    ranks.end(1, 0)
    assert job.end() == 0
    assert said(job)[2:] == [
        "All others are done: those that have not joined them end too.",
        f"rank 0 {KILLED}; it was started again",
        "rank 1 ended in order",
        "rank 0 has saved and ended with exit code 75 (preempted), told by SIGTERM; training went on without it",
        "1 of 2 ranks have ended in order",
        "exit code 0",
    ]


def test_one_that_is_stopped_and_was_left_behind_is_killed_when_all_others_are_done(begin: Begin):
    ranks = begin(3, "--grace", "0.5", "--max-restarts", "1")
    job = ranks.job
    os.kill(ranks.pids[0], signal.SIGSTOP)
    ranks.tell(1, 1, 2)
    ranks.end(2, 0)
    ranks.end(1, 0)
    assert job.end() == 0
    assert not lives(ranks.pids[0])
    assert said(job) == [
        "rank 0 lives, and the others went on without it: in 0.5 s it is killed.",
        "rank 2 ended in order",
        "rank 1 ended in order",
        "rank 0 was killed by SIGKILL, by the launcher; training went on without it",
        "2 of 3 ranks have ended in order",
        "exit code 0",
    ]


def test_told_to_end_after_a_loss_the_others_save(begin: Begin):
    ranks = begin(2)
    ranks.kill(0)
    ranks.tell(1, 1)
    ranks.do(1, "saves")
    ranks.job.wait_for("saves")
    ranks.job.wait_for("training goes on")
    ranks.job.signal(signal.SIGTERM)
    assert ranks.job.end() == 75


def test_too_late_is_as_if_nobody_went_on(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    impatient = tmp_path / "lightning-async"
    source, (last, before) = Path(CONSOLE).read_text(), ("sys.exit(main())", "\nimport functools\n")
    assert last in source
    patience = "from lightning_async.cli import launch\n"
    patience += "launch.Policy = functools.partial(launch.Policy, patience_s=0.5)\n"
    impatient.write_text(source.replace(last, before + patience + last))
    monkeypatch.setattr(conftest, "CONSOLE", str(impatient))
    ranks = begin(2, "--max-restarts", "1")
    ranks.kill(0)
    ranks.tell(1, 1)
    ranks.meet(0, 1)
    ranks.tell(2, 0, 1)
    ranks.job.wait_for("rank 0 has joined the others")
    ranks.do(1, "deaf")
    ranks.job.wait_for("deaf")
    ranks.kill(0)
    ranks.job.wait_for("the others end too.")
    ranks.do(1, "tell", 3, 1)
    assert ranks.job.end() == 137
    assert said(ranks.job)[3:] == [
        f"rank 0 {KILLED}: the others end too.",
        f"rank 0 {KILLED}; it was started again",
        f"rank 0 {KILLED}",
        "rank 1 was killed by SIGKILL, by the launcher",
        "0 of 2 ranks have ended in order",
        "exit code 137",
    ]
