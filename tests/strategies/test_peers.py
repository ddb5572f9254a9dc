"""What was a dead rank's own comes back from another rank's memory: real processes, over Gloo and TCP."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async import AsyncAveragingStrategy, PeerMemory
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies.test_failures import ended
from tests.strategies.test_joining import told
from tests.strategies.workers import Outcomes
from tests.support import RankResult, start_ranks

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.own_states"
BoringModel = pytorch("demos.boring_classes").BoringModel
TRAIN = "tests.strategies.peer_workers:train"


def own(result: RankResult) -> dict[int, list[Any]]:
    """What was a rank's own after each of its steps."""
    said = [json.loads(line[4:]) for line in result.stdout.splitlines() if line.startswith("OWN ")]
    return {step: rest for step, *rest in said}


def test_it_comes_back_from_the_next_rank_and_is_rank_0s_where_there_was_no_copy(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def env(number: int) -> dict[str, str]:
        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        if number > 2:
            shared |= {"RANK": str(number - 3), "LOCAL_RANK": str(number - 3)}
            shared |= {"LIGHTNING_ASYNC_REJOIN": str(number - 2)}
        return shared

    with start_ranks(TRAIN, 5, kwargs={"folder": str(tmp_path)}, env=env, timeout=150) as group:
        for number in (1, 0):
            group.processes[number].wait(150.0)
        for start in (1, 2):
            (tmp_path / f"start {start}").touch()
        results = group.join()
    told(results, [2, *sorted((3, 4), key=lambda number: ended(results[number])["rank"])])
    assert all(ended(results[number])["asked"] for number in (3, 4))  # while nobody waited for them
    dead, stays = own(results[0]), own(results[2])
    zero, one = (ended(results[number])["own"] for number in (3, 4))
    assert zero == dead[max(dead)]
    assert zero[0] not in [momentum for momentum, _ in stays.values()]
    assert f"Rank 0 goes on with its own of step {max(dead)}, while the run is at step" in results[3].stderr
    assert "optimizer state of 2 parameters, random states" in results[3].stderr
    assert "Rank 1 joins, and no rank has a copy of its own state: it begins with rank 0's" in results[4].stderr
    assert one[0] in [momentum for momentum, _ in stays.values()]  # rank 0 by then
    assert "Peer memory, as rank 0 saw it: " in results[2].stderr


def test_the_own_is_put_over_the_runs_by_name_where_it_fits(ranks: Outcomes) -> None:
    for said in ranks("put_back"):
        assert said["done"] == [
            "optimizer state of 5 parameters",
            "2 buffers",
            "the scale of gradients",
            "random states",
        ]
        assert said["names"] == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight", "norm.bias", "norm.weight"]
        assert said["own"] and said["kept"] and said["late"] == 2 and said["buffers"] and said["draw"]
        assert said["scale"] == 64.0
        assert said["lr"] == [0.25, 0.5]  # the run's


def test_what_is_own_where_replicas_drift_and_where_they_do_not(ranks: Outcomes) -> None:
    asynchronous, alike = ["optimizers", "random"], ["random"]
    for said in ranks("what_is_own"):
        assert said == {
            "asynchronous": [asynchronous] * 4, "buffers": [["buffers", *asynchronous]] * 4, "averaged": [alike] * 4,
            "synchronous": [alike] * 4, "warm-up": [*[alike] * 2, *[asynchronous] * 2],
        }  # fmt: skip


def test_nothing_of_it_is_left(ranks: Outcomes) -> None:
    for said in ranks("nothing_is_left"):
        assert said["left"][:2] == [True, True]
        assert said["left"][2] in ("ValueError", "PeerLost") and said["left"][3]
        assert {"lightning_async keeper"} <= {*said["within"]}


def test_training_goes_on_where_nothing_can_be_kept(ranks: Outcomes) -> None:
    for said in ranks("a_state_that_cannot_travel"):
        (odd, odd_steps), (needs_all, steps) = said["odd"], said["needs all"]
        assert odd_steps == steps == 4
        assert len(odd) == 1 and "no more copies of its own state are sent" in odd[0] and "sparse" in odd[0]
        assert needs_all == [
            "`PeerMemory`: the first rank that is lost ends training here (`min_replicas=`), so nothing is kept."
        ]


def test_it_is_for_ranks_that_come_back(alone: None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_steps": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"which those of `SingleDeviceStrategy` cannot: use `AsyncAveragingStrategy`"):
        pl.Trainer(**options, callbacks=[PeerMemory()]).fit(BoringModel())
    pl.Trainer(**options, strategy=AsyncAveragingStrategy(), callbacks=[PeerMemory()]).fit(BoringModel())
    assert not [each for each in threading.enumerate() if "keeper" in each.name]


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"`PeerMemory\(save="):
        PeerMemory(save=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`PeerMemory\(every_n_train_steps=0\)`"):
        PeerMemory(0)
    assert repr(PeerMemory()) == "PeerMemory(save=Adaptive(share=0.05))"
