"""torchrun with an agent for each replica, as docs/how-to/several-hosts.md says: real agents and a real kill."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch.distributed.run

from tests.support import free_port, shell_environment, start_script

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).with_name("comes_back.py"))


@pytest.mark.parametrize("told", [{"LIGHTNING_ASYNC_REJOIN": "torchrun", "LIGHTNING_ASYNC_SECRET": "known"}, {}])
def test_rank_0_is_killed_and_its_agent_starts_it_again_beside_the_others(told: dict[str, str], tmp_path: Path):
    """Told that each rank has an agent of its own, and by what its variables and the store say."""
    port, environment = free_port(), shell_environment(told)
    agents, until = [], time.monotonic() + 200
    try:
        for node in range(2):
            command = [torch.distributed.run.__file__, "--nnodes=2", "--nproc-per-node=1"]
            command += ["--rdzv-backend=static", f"--node-rank={node}", "--master-addr=127.0.0.1"]
            command += [f"--master-port={port}", "--max-restarts=1", SCRIPT]
            with (tmp_path / str(node)).open("wb") as out:
                agents.append(start_script(command, environment, tmp_path, out, out))
        codes = [agent.wait(max(0.0, until - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)  # it takes its rank along
        for agent in agents:
            agent.wait(60)
    text = "".join((tmp_path / str(node)).read_text() for node in range(2))
    assert codes == [0, 0], text[-6000:]
    ended = sorted(line.split()[1:] for line in text.splitlines() if line.startswith("ENDED"))
    assert [each[:2] for each in ended] == [["0", "2"], ["1", "2"]]
    assert ended[0][2] == ended[1][2]
    assert "rank 0 has joined, and 2 replicas train from here" in text
