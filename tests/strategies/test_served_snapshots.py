"""Training on servers that are lost with all that held their memory: real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async import ServerOptions
from tests.strategies import problem
from tests.strategies.problem import flat
from tests.strategies.served import BATCHES
from tests.strategies.served_snapshots import FEWER, STEP
from tests.strategies.test_failures import ended
from tests.strategies.test_live_ranks import three_ranks
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_snapshots", tmp_path_factory.mktemp("snapshots"))


def test_a_server_that_is_lost_with_its_memory_begins_with_its_snapshot_and_all_go_on(outcomes: Outcomes) -> None:
    """Also who stands at a sync point, with weights that are lost, whose version nobody comes to again. Each worker
    logs how many of its pushes are lost."""
    told, gone = outcomes("snapshot_lost"), [BATCHES - 1, FEWER]
    assert [rank["lost"] for rank in told] == gone
    for number, (rank, count) in enumerate(zip(told, gone, strict=True)):
        (line,) = (line for line in rank["logged"] if "lost in all" in line)
        # The version is that of the moment: the other worker may have pushed to the new server already.
        assert re.fullmatch(
            rf"Worker '{number}': server 0 has come back with a snapshot, of version [0-9]+\. {count} pushes of this "
            r"worker's are lost in all\.",
            line,
        )
    assert told[0]["served"]["acknowledged pushes lost"] == str(sum(gone))
    assert told[0]["served"]["versions in snapshots"] == "0"
    weights = torch.tensor(flat(problem.network()))
    for _ in range(2 * (BATCHES + FEWER) - sum(gone)):
        weights = weights - STEP
    for rank in told:
        assert torch.equal(torch.tensor(rank["values"]), weights)
    assert len(list((outcomes.folder("snapshot_lost") / "kept").iterdir())) == 1


def test_a_host_is_lost_with_its_worker_and_its_server(tmp_path: Path) -> None:
    """Without a snapshot the others end, with an error that says what is lost, and what to do."""
    with three_ranks(tmp_path, {"0": ("step", 0, 4)}, served="async", host=True) as group:
        _, *others = group.join()
    for result in others:
        assert result.returncode == 1 and not result.timed_out, result
        error = ended(result)["error"]
        assert re.search(r"server 0 is gone for good, with its weights: .* Start again from the last checkpoint", error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"snapshots": "/a", "server_address": "a:1"}, "snapshots='/a', server_address='a:1'"),
        ({"snapshots": ""}, "snapshots=''"),
        ({"snapshots": 3}, "snapshots=3"),
        ({"snapshots": b"/a"}, "snapshots=b'/a'"),
        ({"snapshots": "/a", "snapshot_every": 0}, "snapshot_every=0"),
        ({"snapshots": "/a", "snapshot_every": float("inf")}, "snapshot_every=inf"),
        ({"snapshots": "/a", "snapshot_every": "often"}, "snapshot_every='often'"),
        ({"snapshot_every": 5.0}, "snapshot_every=5.0"),
    ],
)
def test_snapshots_that_cannot_be_are_named_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        ServerOptions(**arguments)
