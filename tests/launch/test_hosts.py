"""Two nodes in network namespaces of their own, as two hosts with a cable between them, which can be pulled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_async.launch.state import STORE_LOST
from lightning_async.launch.wire import SILENCE_S
from tests.benchmarks.link import Link, shaped, shaping_problem
from tests.launch.conftest import Launched
from tests.launch.test_survivors import ENVIRONMENT, SCRIPT, Ranks
from tests.strategies.problem import adam, batches, distance, flat, joined, train_alone
from tests.strategies.served import BATCHES

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux")

COMES_BACK = str(Path(__file__).with_name("comes_back.py"))
SERVED = str(Path(__file__).with_name("served.py"))
PORT = 29400
Start = Callable[..., tuple[Launched, Launched]]


@pytest.fixture
def link() -> Iterator[Link]:
    if (problem := shaping_problem()) is not None:
        pytest.skip(f"no network namespaces: {problem}")
    with shaped(2, 1000.0) as made:
        yield made


@pytest.fixture
def start(launch: Callable[..., Launched], link: Link) -> Start:
    """``start("--max-restarts", "1", SCRIPT)``: one rank on each host."""

    def both(*command: str, **environment: str) -> tuple[Launched, Launched]:
        options = ("-n", "1", "--nnodes", "2", "--rdzv", f"{link.places[0].address}:{PORT}", *command)
        more = {"LIGHTNING_ASYNC_SECRET": "a secret of these tests alone", **environment}
        first, second = (launch(*options, prefix=place.prefix, **more) for place in link.places)
        return first, second

    return both


def pull(link: Link) -> None:
    """The cable of the second host."""
    namespace = link.places[0].prefix[-1].rpartition("-")[0] + "-switch"
    subprocess.run(["ip", "-n", namespace, "link", "set", "port1", "down"], check=True, timeout=30)


def test_after_a_partition_the_side_of_the_first_node_goes_on_and_the_other_one_ends(start: Start, link: Link):
    first, second = start(SCRIPT, **ENVIRONMENT)
    ranks = Ranks({0: first, 1: second})
    try:
        ranks.do(1, "saves")
        second.wait_for("saves")
        pull(link)
        began = time.monotonic()
        second.wait_for(f"The first node is lost (no word for {SILENCE_S:g} s)")
        assert second.end() == STORE_LOST
        assert "[launch] exit code 69" in second.err
        ranks.tell(1, 0)
        first.wait_for("training goes on with 1 of 2 ranks")
        assert time.monotonic() - began > SILENCE_S / 2
        assert re.search(r"rank 1 on node 1 .* was lost with its node \(no word for 10 s\)", first.err)
        ranks.end(0, 0)
        assert first.end() == 0
    finally:
        ranks.close()


def test_a_rank_of_the_other_host_is_killed_and_started_again_there_and_training_ends_in_order(
    start: Start, link: Link
):
    interface = link.places[0].interface
    first, second = start("--max-restarts", "1", "--standby", "0", COMES_BACK, DIES="1", GLOO_SOCKET_IFNAME=interface)
    for each in (first, second):
        each.allow(60)  # its ranks import all that there is, one after the other
    assert (first.end(), second.end()) == (0, 0), first.err + second.err
    assert "rank 1 has joined the others: training goes on with 2 of 2 ranks." in first.err
    assert "2 of 2 ranks have ended in order" in second.err
    ended = re.findall(r"ENDED (\d) (\d) (\S+)", first.out + second.out)
    assert [each[:2] for each in ended] == [("0", "2"), ("1", "2")]
    assert ended[0][2] == ended[1][2]


def test_after_a_partition_one_half_of_a_training_goes_on_to_its_end_and_the_other_one_ends(start: Start, link: Link):
    """Real ranks, which have gradients under way between the hosts as the cable is pulled."""
    interface = link.places[0].interface
    first, second = start(COMES_BACK, DIES="nobody", ALONE="1", GLOO_SOCKET_IFNAME=interface)
    for each in (first, second):
        each.allow(60)
        each.wait_for("TEN")
    pull(link)
    assert second.end() == STORE_LOST, first.err + second.err
    assert first.end() == 0, first.err + second.err
    assert re.search(r"rank 1 on node 1 .* was lost with its node \(no word for 10 s\): training goes on", first.err)
    assert "Rank 0 goes on as rank 0 of 1: " in first.err
    assert re.findall(r"ENDED (\d) (\d)", first.out) == [("0", "1")]
    assert f"The first node is lost (no word for {SILENCE_S:g} s)" in second.err
    assert "goes on as rank" not in second.err  # nor has it ended in order: one half trains at most
    assert "ENDED" not in second.out


def test_each_host_has_a_server_and_both_train_as_one_process(start: Start, link: Link):
    """One worker's own is behind shared memory, the other one's behind Gloo."""
    first, second = start(SERVED, GLOO_SOCKET_IFNAME=link.places[0].interface)
    for each in (first, second):
        each.allow(120)
    assert (first.end(), second.end()) == (0, 0), first.err + second.err
    ended = re.findall(r"ENDED (\{.*\})", first.out + second.out)
    told = sorted(map(json.loads, ended), key=lambda each: each["rank"])
    assert [each["here"] for each in told] == [[True, False], [False, True]]
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for each in told:
        assert distance(each["values"], alone) < 1e-6
    assert "4 keys on 2 server(s)" in first.err and "in part" in first.err
