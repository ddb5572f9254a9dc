"""Several launchers as several nodes, on one host over loopback: real launchers, real ranks, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_async.launch.state import NODE_LOST, STORE_LOST
from tests.launch.conftest import SCRIPT as PLAIN
from tests.launch.conftest import Launched, lives
from tests.launch.test_survivors import ENVIRONMENT, SCRIPT, Ranks, said
from tests.support import free_port

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux")

SECRET = "a secret of these tests alone"
KILLED = "was killed by SIGKILL (by hand, or by the system for want of memory)"


class Nodes:
    """Launchers of one job, the first of which is there before the others."""

    def __init__(self, launch: Callable[..., Launched]) -> None:
        self._launch, self.port = launch, free_port()
        self.jobs: list[Launched] = []

    def add(self, ranks: int, *command: str, nodes: str = "2", secret: str = SECRET) -> Launched:
        """One more."""
        options = ("-n", str(ranks), "--nnodes", nodes, "--rdzv", f"127.0.0.1:{self.port}")
        job = self._launch(*options, *command, **ENVIRONMENT, LIGHTNING_ASYNC_SECRET=secret)
        if not self.jobs:
            job.wait_for("nodes are there")
        self.jobs.append(job)
        return job

    def start(self, counts: Sequence[int], *command: str) -> list[Launched]:
        """One for each number of ranks."""
        return [self.add(count, *command, nodes=str(len(counts))) for count in counts]


@pytest.fixture
def nodes(launch: Callable[..., Launched]) -> Nodes:
    return Nodes(launch)


@pytest.fixture
def begin(nodes: Nodes) -> Iterator[Callable[..., Ranks]]:
    """``begin((2, 1), "--max-restarts", "1")``: ranks of two nodes that are in the first generation."""
    with contextlib.ExitStack() as stack:

        def start(counts: Sequence[int], *options: str) -> Ranks:
            jobs = nodes.start(counts, *options, SCRIPT)
            of = [job for job, count in zip(jobs, counts, strict=True) for _ in range(count)]
            ranks = Ranks(dict(enumerate(of)))
            stack.callback(ranks.close)
            return ranks

        yield start


def words(job: Launched) -> list[str]:
    """What a launcher has said, without the name of this host, too."""
    return [line.replace(f" ({socket.gethostname()})", "") for line in said(job)]


def test_ranks_of_all_nodes_have_the_variables_of_torchrun(nodes: Nodes, tmp_path: Path):
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(f"{SECRET}\n")
    options = ("--log-dir", str(tmp_path / "logs"), PLAIN, "environment", "a b")
    first = nodes.add(2, *options)
    second = nodes.add(1, "--secret-file", str(file), *options, secret="")
    command = Path(f"/proc/{second.process.pid}/cmdline").read_bytes()
    assert (first.end(), second.end()) == (0, 0)
    assert SECRET.encode() not in command
    told = [json.loads(line[4:]) for line in sorted((first.out + second.out).splitlines())]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [[int(each[name]) for name in names] for each in told] == [
        [0, 0, 0, 0, 3, 2, 2],
        [1, 1, 0, 0, 3, 2, 2],
        [2, 0, 1, 1, 3, 1, 2],
    ]
    same = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "LIGHTNING_ASYNC_SECRET", "arguments")
    assert all(told[0][name] == each[name] for name in same for each in told)
    assert told[0]["LIGHTNING_ASYNC_SECRET"] == SECRET
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(3)]
    assert words(second) == [
        f"Looks for the first node at 127.0.0.1, port {nodes.port}.", "This is node 1 of 2, with rank 2.",
    ]  # fmt: skip


def test_a_death_ends_all_nodes_which_say_the_same_of_it(nodes: Nodes):
    first, second = nodes.start((1, 2), PLAIN, "end", "-", "-", "3")
    assert (first.end(), second.end()) == (3, 3)
    assert words(first)[1:] == words(second)[2:]
    assert words(second)[2:] == [
        "rank 2 on node 1 ended with exit code 3: the others end too.",
        *words(second)[3:-3],
        "the last that rank 2 on node 1 has written to stderr:",
        "    rank 2 has had enough",
        "exit code 3",
    ]
    assert sorted(words(second)[3:-3]) == [
        "rank 0 on node 0 was killed by SIGTERM, by the launcher",
        "rank 1 on node 1 was killed by SIGTERM, by the launcher",
        "rank 2 on node 1 ended with exit code 3",
    ]


def test_who_has_another_secret_or_other_settings_is_refused_and_strangers_disturb_nobody(nodes: Nodes):
    first = nodes.add(1, "--max-restarts", "1", PLAIN, "environment")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", nodes.port))) for _ in range(60)]
        for number, stranger in enumerate(strangers[1:]):
            with contextlib.suppress(OSError):
                stranger.sendall(
                    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200_000, b'{"lightning_async": 1, "nonce": "'][number % 3]
                )
        same = ("--max-restarts", "1", PLAIN, "environment")
        refused = [
            (nodes.add(1, PLAIN, "environment"), "--max-restarts is 0 here, and 1 on the first node"),
            (nodes.add(1, "--max-restarts", "1", PLAIN, "end"), "the program is "),
            (nodes.add(1, *same, nodes="1:2"), "--nnodes is '1:2' here, and '2' on the first node"),
            (nodes.add(1, *same, secret=f"{SECRET}, not"), "The first node's secret is another one"),
        ]
        for job, why in refused:
            assert job.end() == 2
            assert why in job.err
        assert first.process.poll() is None
        assert "RANK" not in first.out
        second = nodes.add(2, *same)
        assert (first.end(), second.end()) == (0, 0)
    assert "Somebody at 127.0.0.1 is not listened to" in first.err


def test_a_launcher_is_killed_and_the_others_are_told_that_its_ranks_are_lost(begin: Callable[..., Ranks]):
    ranks = begin((2, 2))
    first, second = ranks.job, ranks.jobs[2]
    for rank in (0, 1):
        ranks.do(rank, "listens")
    first.wait_for("listens", 2)
    second.signal(signal.SIGKILL)
    first.wait_for("dead 2 ", 2)
    first.wait_for("dead 3 ", 2)
    assert f"[0] dead 3 {ranks.pids[3]} died: its process was lost with its node (the connection " in first.out
    ranks.tell(1, 0, 1)
    first.wait_for("training goes on with 2 of 4 ranks")
    ranks.end(0, 0)
    ranks.end(1, 0)
    assert first.end() == 0
    assert re.search(
        r"rank 2 on node 1 was lost with its node \(the connection .*\); training went on", words(first)[-6]
    )
    first.until(lambda: not any(lives(ranks.pids[rank]) for rank in (2, 3)), "they outlive their launcher")


def test_without_survivors_a_lost_node_ends_the_others(nodes: Nodes):
    first, second = nodes.start((1, 1), PLAIN, "end", "-", "-")
    first.wait_for("ready")
    second.wait_for("ready")
    second.signal(signal.SIGKILL)
    assert first.end() == NODE_LOST
    assert "rank 0 on node 0 was killed by SIGTERM, by the launcher" in words(first)


def test_a_node_that_cannot_start_its_ranks_says_why_at_the_first_one(nodes: Nodes):
    first = nodes.add(1, PLAIN, "end", "-", "-")
    second = nodes.add(1, "--log-dir", "/proc/nowhere", PLAIN, "end", "-", "-")
    assert (first.end(), second.end()) == (NODE_LOST, 71)
    (why,) = re.findall(
        r"rank 1 on node 1 was lost with its node \((.+)\): the others end too", "\n".join(words(first))
    )
    assert "/proc/nowhere" in why
    assert "/proc/nowhere" in second.err


def test_without_survivors_all_wait_for_a_node_that_is_lost_and_start_again_with_it(nodes: Nodes):
    options = ("--max-restarts", "1", PLAIN, "end", "-", "-")
    first, second = nodes.start((1, 1), *options)
    first.wait_for("[0] ready")
    second.signal(signal.SIGKILL)
    second.end()
    again = nodes.add(1, *options)  # at once: it comes while the others end, in the pause or after it
    again.wait_for("[1] ready")
    first.wait_for("[0] ready", 2)
    again.signal(signal.SIGTERM)
    assert (first.end(), again.end()) == (143, 143)


def test_the_first_launcher_is_killed_and_the_ranks_elsewhere_save_and_end(nodes: Nodes):
    jobs = [nodes.add(1, PLAIN, *what, nodes="3") for what in (["saves", "0"],) * 3]
    for job in jobs:
        job.wait_for("ready")
    jobs[0].signal(signal.SIGKILL)
    assert [job.end() for job in jobs[1:]] == [STORE_LOST] * 2
    assert [len(re.findall(r"saved \d None", job.out)) for job in jobs[1:]] == [1, 1]
    assert all("The first node is lost (the connection " in job.err for job in jobs[1:])


def test_the_keeper_of_a_node_is_replaced_and_its_ranks_save_when_the_launcher_is_killed_later(nodes: Nodes):
    """That of the first node has the store, and is the end of the job; another one only reads and waits."""
    first, second = nodes.start((1, 1), PLAIN, "saves", "0.3")
    first.wait_for("ready")
    second.wait_for("ready")
    keeper = second.keeper()
    assert keeper is not None
    second.until(lambda: time.time() - Path(f"/proc/{keeper}").stat().st_ctime > 2, "it is not so old")
    os.kill(keeper, signal.SIGKILL)
    second.wait_for("has ended (signal 9)")
    assert first.process.poll() is None
    assert second.keeper() not in (None, keeper)
    second.signal(signal.SIGKILL)
    second.until(lambda: "The launcher was killed. Its ranks have 30 s" in second.err, "nobody sees to its ranks")
    second.until(lambda: "[1] saved 1 " in second.out, "nobody reads what they write")
    assert first.end() == NODE_LOST


def test_who_does_not_save_in_time_is_killed_when_the_first_node_is_lost(nodes: Nodes):
    first, second = nodes.start((1, 1), "--grace", "1", PLAIN, "stubborn")
    first.wait_for("ready")
    second.wait_for("ready")
    began = time.monotonic()
    first.signal(signal.SIGKILL)
    assert second.end() == STORE_LOST
    assert time.monotonic() - began > 1
    assert "have 1 s to save and to end" in second.err


@pytest.mark.parametrize("at", [0, 1])
def test_a_signal_to_one_launcher_ends_all(nodes: Nodes, at: int):
    jobs = nodes.start((1, 1), PLAIN, "saves", "0")
    for job in jobs:
        job.wait_for("ready")
    jobs[at].signal(signal.SIGTERM)
    assert [job.end() for job in jobs] == [75, 75]
    assert all(re.search(r"SIGTERM has come( to node 1 .+)?\.", job.err) for job in jobs)
    assert [job.out.count("saved") for job in jobs] == [1, 1]


def test_a_signal_to_all_launchers_is_one_signal_however_late_it_comes_to_some(nodes: Nodes):
    first, second = nodes.start((1, 1), PLAIN, "saves_once")
    for times, told in enumerate((second, first), start=1):
        for job in (first, second):
            job.wait_for("ready" if times == 1 else "saving")
        time.sleep(0.3)  # what comes sooner is none of its own in any case
        told.signal(signal.SIGTERM)
        for job in (first, second):
            job.wait_for("SIGTERM has come", times)
    first.signal(signal.SIGUSR1)
    assert (first.end(), second.end()) == (75, 75)


def test_a_signal_before_all_are_there_ends_the_wait(nodes: Nodes):
    first, second = nodes.add(1, PLAIN, "stubborn", nodes="3"), nodes.add(1, PLAIN, "stubborn", nodes="3")
    first.wait_for("2 of 3 nodes are there")
    second.signal(signal.SIGINT)
    assert second.end() == 130
    first.wait_for("is there no more")
    first.wait_for("1 of 3 nodes are there", 2)
    first.signal(signal.SIGTERM)
    assert first.end() == 143


def test_all_start_again_on_all_nodes(begin: Callable[..., Ranks]):
    ranks = begin((1, 2), "--max-restarts", "1")
    for rank in (2, 0, 1):
        ranks.end(rank, 3)
    assert [job.end() for job in (ranks.jobs[0], ranks.jobs[1])] == [0, 0]
    assert [job.out.count("again") for job in (ranks.jobs[0], ranks.jobs[1])] == [1, 2]
    assert "All ranks start again in 1 s (restart 1 of 1)." in words(ranks.jobs[1])


def test_a_rank_starts_again_at_its_node_beside_the_others(begin: Callable[..., Ranks]):
    ranks = begin((1, 2), "--max-restarts", "1")
    first, second = ranks.jobs[0], ranks.jobs[2]
    ranks.kill(2)
    ranks.tell(1, 0, 1)
    given = ranks.meet(2, 1).split()
    assert given[0] == "3"
    ranks.tell(2, 0, 1, 2)
    first.wait_for("rank 2 has joined the others")
    for rank in (0, 1, 2):
        ranks.end(rank, 0)
    assert (first.end(), second.end()) == (0, 0)
    assert f"rank 2 on node 1 {KILLED}: training goes on with 2 of 3 ranks." in words(first)
    assert "3 of 3 ranks have ended in order" in words(second)


def test_a_node_that_was_lost_comes_back_and_its_ranks_join_the_others(begin: Callable[..., Ranks], nodes: Nodes):
    ranks = begin((1, 2), "--max-restarts", "2")
    first, second = ranks.jobs[0], ranks.jobs[2]
    second.signal(signal.SIGKILL)
    ranks.tell(1, 0)
    first.wait_for("training goes on with 1 of 3 ranks")
    again = nodes.add(2, "--max-restarts", "2", SCRIPT)
    for rank in (1, 2):
        ranks.jobs[rank] = again
        ranks.meet(rank, 1)
    ranks.tell(2, 0, 1, 2)
    first.wait_for("training goes on with 3 of 3 ranks")
    for rank in (0, 1, 2):
        ranks.end(rank, 0)
    assert (first.end(), again.end()) == (0, 0)
    assert "node 1 is there again." in words(first)
    assert "3 of 3 ranks have ended in order" in words(first)


def test_a_node_that_waits_takes_the_place_of_one_that_is_lost(begin: Callable[..., Ranks], nodes: Nodes):
    """As does one that comes back before its end was noticed. Who has another size is told what is empty."""
    options = ("--max-restarts", "3")
    ranks = begin((1, 1), *options)
    first, second = ranks.jobs[0], ranks.jobs[1]
    wrong, spare = nodes.add(2, *options, SCRIPT), nodes.add(1, *options, SCRIPT)
    for job in (wrong, spare):
        job.wait_for("All places are taken: this node waits until it is needed.")
    refused = nodes.add(1, *options, SCRIPT)
    assert refused.end() == 2
    assert "2 nodes wait already" in refused.err
    second.signal(signal.SIGKILL)
    ranks.tell(1, 0)
    ranks.jobs[1] = spare
    ranks.meet(1, 1)
    ranks.tell(2, 0, 1)
    first.wait_for("training goes on with 2 of 2 ranks")
    spare.signal(signal.SIGKILL)
    wrong.wait_for("The place of node 1 is empty, for -n 1. This one has -n 2, and waits until it is needed.")
    late = nodes.add(3, *options, SCRIPT)
    late.wait_for("The place of node 1 is empty, for -n 1. This one has -n 3, and waits until it is needed.")
    ranks.tell(3, 0)
    ranks.end(0, 0)
    assert (first.end(), wrong.end(), late.end()) == (0, 0, 0)
    assert spare.err.count("This is node 1 of 2, with rank 1.") == 1


def test_a_node_that_is_told_to_go_leaves_and_another_one_takes_its_place(nodes: Nodes):
    """As long as MIN are left; the same signal to the first node is one to all."""
    options = ("--max-restarts", "9", SCRIPT)
    first = nodes.add(1, *options, nodes="1:2")
    with contextlib.closing(two_more(nodes, options, first)) as ranks:
        second = ranks.jobs[1]
        for times in (1, 2):
            for rank in (1, 2):
                ranks.do(rank, "goes")
            second.wait_for("goes\n", 2)
            second.signal(signal.SIGTERM)
            ranks.tell(3 * times, 0)
            assert second.end() == 72
            first.wait_for("training goes on with 1 of 3 ranks.", times)
            second = nodes.add(2, *options, nodes="1:2")
            for rank in (1, 2):
                ranks.jobs[rank] = second
                ranks.meet(rank, times)
            ranks.tell(3 * times + 1, 0, 1, 2)
            first.wait_for("training goes on with 3 of 3 ranks.", times)
        for rank in (0, 1, 2):
            ranks.do(rank, "saves")
        first.wait_for("saves")
        second.wait_for("saves", 2)
        first.signal(signal.SIGTERM)
        assert (first.end(), second.end()) == (75, 75)
    lines = words(first)
    for text in ("SIGTERM has come to node 1.", "node 1 goes, and the others train on.", "node 1 is there again."):
        assert lines.count(text) == 2, text
    assert "rank 2 on node 1 has left with its node; it was started again" in lines


def test_who_does_not_go_in_time_is_killed_and_so_is_who_is_told_twice(nodes: Nodes):
    """What the ranks say is nothing to the others, who train on."""
    for again in (False, True):
        nodes = Nodes(nodes._launch)
        options = ("--grace", "30" if again else "0.5", SCRIPT)
        first = nodes.add(1, *options, nodes="1:2")
        with contextlib.closing(two_more(nodes, options, first)) as ranks:
            second = ranks.jobs[1]
            second.signal(signal.SIGTERM)
            first.wait_for("node 1 ")
            if again:
                time.sleep(0.3)  # what comes sooner is none of its own
                second.signal(signal.SIGTERM)
            ranks.tell(1, 0)
            assert second.end() == 143
            first.wait_for("training goes on with 1 of 3 ranks.")
            ranks.end(0, 0)
            assert first.end() == 0


def two_more(nodes: Nodes, options: Sequence[str], first: Launched) -> Ranks:
    """A second node with two ranks, which train with the first one's."""
    second = nodes.add(2, *options, nodes="1:2")
    return Ranks({0: first, 1: second, 2: second})


def test_who_cannot_be_of_use_is_refused(begin: Callable[..., Ranks], nodes: Nodes):
    ranks = begin((1, 1))
    ranks.jobs[1].signal(signal.SIGKILL)
    ranks.tell(1, 0)
    ranks.job.wait_for("training goes on with 1 of 2 ranks")
    late = nodes.add(1, SCRIPT)
    assert late.end() == 2
    assert "no restarts are left with which it could be joined" in late.err
    ranks.end(0, 0)
    assert ranks.job.end() == 0


def test_nodes_that_come_late_wait_until_all_start_again_and_one_that_is_lost_is_not_waited_for(nodes: Nodes):
    options = ("--max-restarts", "2", "--last-call", "0.5", PLAIN, "end", "-", "-", "-")
    first = nodes.add(1, *options, nodes="1:3")
    first.wait_for("[0] ready")
    late = []
    for _ in range(2):
        late.append(nodes.add(1, *options, nodes="1:3"))
        late[-1].wait_for("All places are taken: this node waits until it is needed.")
    second, third = late
    (rank,) = map(int, re.findall(r"ready (\d+)", first.out))
    os.kill(rank, signal.SIGKILL)
    second.wait_for("[1] ready")
    third.wait_for("[2] ready")
    first.wait_for("[0] ready", 2)
    assert "This is node 2 of 3, with rank 2." in words(third)
    second.signal(signal.SIGKILL)
    third.wait_for("[1] ready")
    first.wait_for("[0] ready", 3)
    assert "This is node 1 of 2, with rank 1." in words(third)
    assert words(first)[-2:] == [
        "All ranks start again in 2 s (restart 2 of 2).",
        "2 of 1:3 nodes are there; others have 0.5 s to come.",
    ]
    third.signal(signal.SIGTERM)
    assert (first.end(), third.end()) == (143, 143)
    assert re.search(r"rank 1 on node 1 .* was killed by SIGTERM", third.err)
