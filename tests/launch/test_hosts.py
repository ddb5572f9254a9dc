"""Hosts, each with an agent of torchrun's: network namespaces of their own, with cables between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed.run

from tests.benchmarks.link import Link, shaped, shaping_problem
from tests.strategies.problem import adam, batches, distance, flat, joined, train_alone
from tests.strategies.served import BATCHES
from tests.support import ROOT

SERVED = str(Path(__file__).with_name("served.py"))
PORT = 29400
LIMIT_S = 270


@contextlib.contextmanager
def hosts(number: int) -> Iterator[Link]:
    if (problem := shaping_problem()) is not None:
        pytest.skip(f"no network namespaces: {problem}")
    with shaped(number, 1000.0) as link:
        yield link


@contextlib.contextmanager
def agents_of(link: Link, folder: Path, script: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One agent with one rank on each host; what they write goes to files that have the host's number."""
    first = link.places[0].address
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": link.places[0].interface}
    environment |= {"LIGHTNING_ASYNC_SECRET": "a secret of these tests alone", "OMP_NUM_THREADS": "1"}
    agents: list[subprocess.Popen[bytes]] = []
    try:
        for node, place in enumerate(link.places):
            command = [*place.prefix, sys.executable, torch.distributed.run.__file__, f"--nnodes={len(link.places)}"]
            command += ["--nproc-per-node=1", "--rdzv-backend=static", f"--node-rank={node}"]
            command += [f"--master-addr={first}", f"--master-port={PORT}", script]
            with (folder / str(node)).open("wb") as out:
                agents.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out))
        yield agents
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # it takes its rank along
        for agent in agents:
            agent.wait(60)


def wait_for(word: str, folder: Path, agents: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Wait until each of the first hosts has written ``word``."""
    while not all(word in text for text in texts(folder, len(agents))):
        alive = time.monotonic() < until and all(agent.poll() is None for agent in agents)
        assert alive, "\n".join(text[-3000:] for text in texts(folder, len(agents)))
        time.sleep(0.1)


def texts(folder: Path, number: int) -> list[str]:
    return [(folder / str(node)).read_text(errors="replace") for node in range(number)]


@pytest.mark.processes
def test_each_host_has_a_server_and_both_train_as_one_process(tmp_path: Path):
    """One worker's own is behind shared memory, the other one's behind Gloo."""
    until = time.monotonic() + LIMIT_S
    with hosts(2) as link, agents_of(link, tmp_path, SERVED) as agents:
        codes = [agent.wait(max(0.0, until - time.monotonic())) for agent in agents]
    text = "".join(texts(tmp_path, 2))
    assert codes == [0, 0], text[-6000:]
    told = sorted(map(json.loads, re.findall(r"ENDED (\{.*\})", text)), key=lambda each: each["rank"])
    assert [each["here"] for each in told] == [[True, False], [False, True]]
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for each in told:
        assert distance(each["values"], alone) < 1e-6
    assert "4 keys on 2 server(s)" in text and "in part" in text


CUT = str(Path(__file__).with_name("cut_link.py"))


@pytest.mark.processes
def test_one_of_two_hosts_that_are_cut_off_from_each_other_leaves(tmp_path: Path):
    """Silently: all heartbeats arrive, as the store is on the third host."""
    until = time.monotonic() + LIMIT_S
    with hosts(3) as link, agents_of(link, tmp_path, CUT) as agents:
        wait_for("TRAINING", tmp_path, agents, until)
        link.cut(1, 2)
        began = time.monotonic()
        code = agents[2].wait(max(0.0, until - time.monotonic()))
        left_after_s = time.monotonic() - began
        (tmp_path / "stop").touch()
        wait_for("ENDED", tmp_path, agents[:2], until)  # their agents wait for the third one's
    whole = texts(tmp_path, 3)
    assert code == 1, whole[2][-3000:]
    assert "no connection within 4 s between rank 1 (10.77.0.2) and rank 2 (10.77.0.3)" in whole[2]
    assert [re.findall(r"ENDED (.*)", text) for text in whole] == [["world size 2"], ["world size 2"], []]
    assert left_after_s < 60  # payload 3 s, then 4 s to connect and 3 s to look; the machine may be busy
