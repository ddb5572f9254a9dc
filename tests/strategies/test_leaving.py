"""A rank is told to go while the others train on, or, where they are too few, to have all end."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lightning_async.comm.membership.generation import Generation
from lightning_async.engine.checkpoint.store import CheckpointStore
from lightning_async.strategies.survivors import Survivors
from tests.strategies.survivor_workers import SAMPLES
from tests.strategies.test_failures import ended
from tests.support import RankResult, start_ranks

TRAIN = "tests.strategies.leaving_workers:train"


def results(folder: Path, fewest: int, served: bool = False) -> list[RankResult]:
    """Of three ranks, with one store."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    arguments = {"folder": str(folder), "fewest": fewest, "served": served}
    with start_ranks(TRAIN, 3, kwargs=arguments, env=lambda number: shared, timeout=60) as group:
        group.processes[1].wait(40.0)
        (folder / "1 has gone").touch()
        return group.join()


@pytest.mark.parametrize("served", [False, True], ids=["averaging", "served"])
def test_who_is_told_to_go_leaves_between_two_batches_or_at_a_gate_and_the_others_train_on(
    served: bool, tmp_path: Path
) -> None:
    ranks = results(tmp_path, fewest=1, served=served)
    assert [each.returncode for each in ranks] == [0, 72, 72], "\n".join(map(str, ranks))
    first, second, third = map(ended, ranks)
    assert (third["steps"], first["lost"]) == (4, 2)
    assert first["kept"]["2"] == 4  # its last copy, at its last batch
    assert "rank 2 failed: Dismissed: its node was told to go" in ranks[0].stderr
    assert "rank 1 failed: Dismissed: its node was told to go" in ranks[0].stderr
    for epoch in ("0", "1"):
        assert {*first["trained"][epoch], *second["trained"].get(epoch, []), *third["trained"].get(epoch, [])} == {
            *range(SAMPLES)
        }
    entries = [entry for entry in CheckpointStore(tmp_path / "saved").entries() if entry.manifest is not None]
    assert entries
    assert {entry.manifest.reason for entry in entries if entry.manifest} <= {"due", "the end"}  # none of an exception


@pytest.mark.parametrize(("fewest", "last"), [(3, 75), (2, 72)], ids=["one goes", "two go at one moment"])
def test_where_too_few_would_be_left_all_save_and_end(fewest: int, last: int, tmp_path: Path) -> None:
    """Of two that go at one moment the second one to be told counts both."""
    ranks = results(tmp_path, fewest)
    assert [each.returncode for each in ranks] == [75, 75, last], "\n".join(map(str, ranks))


@pytest.mark.parametrize(("ranks", "spared"), [([2, 3], True), ([0], True), ([1, 2, 3], False), ([9], True)])
def test_whether_others_go_on_without_a_node(ranks: list[int], spared: bool) -> None:
    assert Survivors(Generation.first(0, 4), 1, 2).spares(ranks) is spared
