"""Two hosts, each with an agent of torchrun's: network namespaces of their own, with a cable between them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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


@pytest.fixture
def link() -> Iterator[Link]:
    if (problem := shaping_problem()) is not None:
        pytest.skip(f"no network namespaces: {problem}")
    with shaped(2, 1000.0) as made:
        yield made


def trained(link: Link, folder: Path, script: str) -> str:
    """What one rank on each host has written, once both have ended in order."""
    first, interface = link.places[0].address, link.places[0].interface
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": interface}
    environment |= {"LIGHTNING_ASYNC_SECRET": "a secret of these tests alone", "OMP_NUM_THREADS": "1"}
    agents, until = [], time.monotonic() + LIMIT_S
    try:
        for node, place in enumerate(link.places):
            command = [*place.prefix, sys.executable, torch.distributed.run.__file__, "--nnodes=2"]
            command += ["--nproc-per-node=1", "--rdzv-backend=static", f"--node-rank={node}"]
            command += [f"--master-addr={first}", f"--master-port={PORT}", script]
            with (folder / str(node)).open("wb") as out:
                agents.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out))
        codes = [agent.wait(max(0.0, until - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # it takes its rank along
        for agent in agents:
            agent.wait(60)
    text = "".join((folder / str(node)).read_text() for node in range(2))
    assert codes == [0, 0], text[-6000:]
    return text


@pytest.mark.processes
def test_each_host_has_a_server_and_both_train_as_one_process(link: Link, tmp_path: Path):
    """One worker's own is behind shared memory, the other one's behind Gloo."""
    text = trained(link, tmp_path, SERVED)
    told = sorted(map(json.loads, re.findall(r"ENDED (\{.*\})", text)), key=lambda each: each["rank"])
    assert [each["here"] for each in told] == [[True, False], [False, True]]
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for each in told:
        assert distance(each["values"], alone) < 1e-6
    assert "4 keys on 2 server(s)" in text and "in part" in text
