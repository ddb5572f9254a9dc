"""What was a dead rank's own comes back from another rank's memory: real processes, over Gloo and TCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.strategies.test_failures import ended
from tests.strategies.test_joining import told
from tests.support import RankResult, start_ranks

TRAIN = "tests.strategies.peer_workers:train"


def own(result: RankResult) -> dict[int, list[Any]]:
    """What was a rank's own after each of its steps."""
    said = [json.loads(line[4:]) for line in result.stdout.splitlines() if line.startswith("OWN ")]
    return {step: rest for step, *rest in said}


def test_it_comes_back_from_the_neighbour_and_is_rank_0s_where_that_died_too(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def env(number: int) -> dict[str, str]:
        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        rank = str(number - 2)
        return shared | ({"RANK": rank, "LOCAL_RANK": rank, "LIGHTNING_ASYNC_REJOIN": rank} if number > 2 else {})

    with start_ranks(TRAIN, 5, kwargs={"folder": str(tmp_path)}, env=env, timeout=150) as group:
        for number in (1, 2):
            group.processes[number].wait(150.0)
        for number in (1, 2):
            (tmp_path / f"start {number}").touch()
        results = group.join()
    told(results, [0, *sorted((3, 4), key=lambda number: ended(results[number])["rank"])])
    after, before = own(results[0]), own(results[2])
    back = [ended(results[number])["own"] for number in (3, 4)]
    assert back[0][0] in [momentum for momentum, _ in after.values()]  # rank 0's
    assert "Rank 1 came back, and nobody has kept what was its own" in results[3].stderr
    assert "rank 2 does not answer (ConnectionRefusedError" in results[3].stderr
    assert back[1] == before[max(before)]
    assert back[1][0] not in [momentum for momentum, _ in after.values()]
    assert f"Rank 2 goes on with its own of step {max(before)}, while the run is at step" in results[4].stderr
    assert "optimizer state of 2 parameters, random states" in results[4].stderr
    assert "Peer memory, as rank 0 saw it: " in results[0].stderr
