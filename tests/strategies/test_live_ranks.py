"""Ranks are killed, and the others go on to the end: real processes, over Gloo, the store in a process of its own."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.utils.data import DistributedSampler

from lightning_async.trainer.data.samplers import SamplerResize
from tests.strategies.live_rank_workers import SAMPLES
from tests.strategies.test_failures import ended
from tests.support import RankGroup, RankResult, start_ranks

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("live_rank_workers.py")
SURVIVE = "tests.strategies.live_rank_workers:survive"


def test_a_sampler_that_was_made_for_those_that_are_lost_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where it is for more than have ever been there: others are numbered anew."""
    loaders = SimpleNamespace(flattened=[SimpleNamespace(sampler=DistributedSampler(range(6), 3, 0))])  # pyright: ignore
    loop: Any = SimpleNamespace(_combined_loader=None)
    strategy: Any = SimpleNamespace(shrinks=True, world=None, world_size=2, live_ranks=None)
    deal = SamplerResize(strategy, SimpleNamespace(strategy=strategy))._setup_data(
        lambda: setattr(loop, "_combined_loader", loaders), loop
    )
    deal()
    assert "is for 3 replicas, and 2 are left" in caplog.text


def test_a_loss_while_loaders_are_made_deals_once_more_on_all() -> None:
    """Numbers are read between two meetings: where these were of different ranks, all read them again."""
    generations = iter([0, 1, 1, 1])
    sampler = DistributedSampler(range(6), 3, 0)  # pyright: ignore[reportArgumentType]
    loop: Any = SimpleNamespace(_combined_loader=None)
    strategy: Any = SimpleNamespace(world_size=3, live_ranks=None, shrinks=True)
    strategy.world = SimpleNamespace(generation=lambda: next(generations), asynchronous=False)
    made: list[int] = []

    def make() -> None:
        if loop._combined_loader is None:
            made.append(strategy.world_size)
            loop._combined_loader = SimpleNamespace(flattened=[SimpleNamespace(sampler=sampler)])
            strategy.world_size, strategy.distributed_sampler_kwargs = 2, {"num_replicas": 2, "rank": 1}

    SamplerResize(strategy, SimpleNamespace(strategy=strategy))._setup_data(make, loop)()
    assert made == [3, 2] and (sampler.num_replicas, sampler.rank, sampler.num_samples) == (2, 1, 3)
    assert not list(generations)


@contextmanager
def three_ranks(folder: Path, deaths: dict[str, Any], **kwargs: Any) -> Iterator[RankGroup]:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), "deaths": deaths, **kwargs}
    with start_ranks(SURVIVE, 3, kwargs=arguments, env=env, timeout=150) as group:
        yield group


def live_ranks(results: list[RankResult], dead: Collection[int]) -> list[dict[str, Any]]:
    """What those say that are left; all of them end with 0."""
    told = []
    for number, result in enumerate(results):
        if number in dead:
            assert result.returncode, result
        else:
            assert result.returncode == 0 and not result.timed_out, "\n".join(map(str, results))
            told.append(ended(result))
    assert len({each["digest"] for each in told}) == 1, told
    return told


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", [("step", 0, 4), ("validation", 0, 2), ("epoch end", 1, 0)], ids=lambda p: p[0])
def test_the_others_go_on_with_all_samples_from_the_next_epoch_on(victim: int, place: Any, tmp_path: Path) -> None:
    with three_ranks(tmp_path, {str(victim): place}) as group:
        told = live_ranks(group.join(), [victim])
    assert [(each["rank"], each["world_size"], each["lost"]) for each in told] == [(0, 2, 1), (1, 2, 1)]
    for what in ("trained", "validated"):
        seen = sorted(sample for each in told for sample in each[what]["2"])
        assert seen == list(range(SAMPLES)), what
    assert {path.name for path in tmp_path.glob("*.ckpt")} >= {"epoch=2.ckpt"}
    for name in ("log", "other"):
        assert epochs_logged(tmp_path / name) == ["0", "1", "2"]
    if place[0] != "step":  # all ranks have heard how many samples the lost one had seen when it died
        lost = SAMPLES // 3 * (1 + place[1])
        own = [int(re.findall(r"samples +(\d+) of", each["summary"])[0]) for each in told]
        assert all(f" of {sum(own) + lost}, {lost} of them by lost processes" in each["summary"] for each in told)


def logged(folder: Path) -> list[dict[str, str]]:
    """The rows of the one file that is there."""
    (file,) = folder.glob("*/metrics.csv")
    assert file.parent.name == "version_0"
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert all(None not in row and None not in row.values() for row in rows), "each has all columns"
    return rows


def epochs_logged(folder: Path) -> list[str]:
    """Those whose validation is in it."""
    return [row["epoch"] for row in logged(folder) if row["val_loss"]]


def test_rank_0_is_lost_twice_and_all_that_it_had_logged_shown_and_kept_goes_on(tmp_path: Path) -> None:
    """The best checkpoint is the first one's, here."""
    deaths = {"0": ("step", 1, 3), "1": ("validation", 1, 2)}
    with three_ranks(tmp_path, deaths, shown=True) as group:
        results = group.join()
    (told,) = live_ranks(results, [0, 1])
    assert (told["rank"], told["world_size"], told["lost"]) == (0, 1, 2)
    for left in (2, 1):
        assert f"{left} of 3 replicas are left, and training goes on down to the last one. Steps" in results[2].stderr
    for name in ("log", "other"):
        assert epochs_logged(tmp_path / name) == ["0", "1", "2"]
    assert told["log_dir"] == str(tmp_path / "log" / "version_0")
    for result, first, last in zip(results, (0, 1, 2), (1, 1, 2), strict=True):
        shown = [int(number) for number in re.findall(r"Epoch (\d+):", result.stdout)]
        assert (shown[0], shown[-1]) == (first, last)
    assert re.search(r"Epoch 1:[^\r\n]* [1-9]\d*/\d+ ", results[1].stdout)
    rows = logged(tmp_path / "log")
    assert sum(bool(row["lr-SGD"]) for row in rows) >= 8 + 3 + SAMPLES // 2
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert losses == sorted(losses, reverse=True)
    (path,) = (tmp_path / "best").iterdir()
    assert told["best"] == [str(path), pytest.approx(losses[0]), pytest.approx(losses[0]), 2]
    assert path.name == "epoch=0.ckpt"


def test_a_synchronous_step_in_whose_backward_pass_a_rank_dies_is_taken_by_the_others(tmp_path: Path) -> None:
    with three_ranks(tmp_path, {"1": ("backward", 0, 4)}, synchronous=True, epochs=2) as group:
        told = live_ranks(group.join(), [1])
    assert [(each["rank"], each["world_size"], each["lost"]) for each in told] == [(0, 2, 1), (1, 2, 1)]
    trained = [sample for each in told for sample in each["trained"]["0"]]
    assert len(trained) == len(set(trained))
    mine = list(DistributedSampler(range(SAMPLES), 3, 1))  # pyright: ignore[reportArgumentType]
    assert set(range(SAMPLES)) - set(trained) == set(mine[:8]), "of its five batches four are in a step"
    for what in ("trained", "validated"):
        assert sorted(sample for each in told for sample in each[what]["1"]) == list(range(SAMPLES)), what


@pytest.mark.parametrize(
    ("windows", "settings"),
    [
        (2, {"correction": "DelayCompensation"}),
        ("until_reduced", {"correction": "WeightPrediction"}),
        (2, {"compression": "topk"}),
        ("balanced", {"compression": "powersgd"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_windows_of_gradients_are_reduced_again_by_those_that_are_left(
    windows: Any, settings: dict[str, str], tmp_path: Path
) -> None:
    """Rank 1 is lost in its third window of two batches of two samples: the others train on what it had not shared."""
    with three_ranks(tmp_path, {"1": ("step", 0, 5)}, windows=windows, epochs=2, **settings) as group:
        told = live_ranks(group.join(), [1])
    assert [(each["rank"], each["world_size"], each["lost"]) for each in told] == [(0, 2, 1), (1, 2, 1)]
    trained = [sample for each in told for sample in each["trained"]["0"]]
    assert len(trained) == len(set(trained))
    mine = list(DistributedSampler(range(SAMPLES), 3, 1))  # pyright: ignore[reportArgumentType]
    shared = set(range(SAMPLES)) - set(trained)
    assert shared == set(mine[: len(shared)])
    assert len(shared) <= 10 and len(shared) % (4 if windows == 2 else 2) == 0
    for what in ("trained", "validated"):
        assert sorted(sample for each in told for sample in each[what]["1"]) == list(range(SAMPLES)), what


def test_a_rank_that_was_stopped_is_done_without_and_hears_so_when_it_wakes(tmp_path: Path) -> None:
    with three_ranks(tmp_path, {}, pause_s=0.1, epochs=4) as group:
        group.wait_for(1, "step 2\n")
        group.signal(1, signal.SIGSTOP)
        group.wait_for(0, "ENDED")
        group.signal(1, signal.SIGCONT)
        results = group.join()
    live_ranks(results, [1])
    assert "Evicted" in ended(results[1])["error"]
    assert "have gone on without it in generation 1" in ended(results[1])["error"]


def test_a_users_own_sampler_and_loaders_with_workers_are_dealt_anew(tmp_path: Path) -> None:
    with three_ranks(tmp_path, {"2": ("step", 0, 1)}, own_sampler=True, num_workers=2) as group:
        told = live_ranks(group.join(), [2])
    assert sorted(sample for each in told for sample in each["trained"]["2"]) == list(range(SAMPLES))


def test_half_of_the_ranks_go_on_by_default(tmp_path: Path) -> None:
    """Of three that is two: one of them ends, too, when the other one is lost."""
    deaths = {"2": ("step", 0, 4), "1": ("validation", 1, 1)}
    with three_ranks(tmp_path, deaths, min_replicas=None) as group:
        results = group.join()
    told = ended(results[0])
    assert told["error"].startswith("PeerLost") and "rank 1" in told["error"]
    assert (told["world_size"], sorted(map(int, told["validated"]))) == (2, [0, 1])
    assert "2 of 3 replicas are left, and fewer than 2 do not go on" in results[0].stderr


@pytest.mark.parametrize("dies", [0, 1])
def test_under_plain_python_the_others_end_in_order(tmp_path: Path, dies: int) -> None:
    """Rank 0's death, too: the store outlives it. The command is rank 0, so it says that this one died."""
    arguments = [str(tmp_path), f'{{"{dies}": ["step", 0, 2]}}', "3"]
    with start_ranks(SCRIPT, 1, args=arguments, launched=False, forks=True, timeout=200) as group:
        assert group.processes[0].wait(150.0) == (0 if dies else -9)
        until = time.monotonic() + 100.0
        while (said := group.output(0)).count("ENDED ") < 2 and time.monotonic() < until:
            time.sleep(0.1)  # the others are no children of this process
    told = [json.loads(line.partition("ENDED ")[2]) for line in said.splitlines() if "ENDED " in line]
    assert sorted(each["name"] for each in told) == sorted({"0", "1", "2"} - {str(dies)})
    assert sorted(sample for each in told for sample in each["trained"]["0"]) == list(range(SAMPLES))
    assert {each["test_mean"] for each in told} == {(SAMPLES - 1) / 2}
    assert len({each["digest"] for each in told}) == 1
    assert sorted(sample for each in told for sample in each["tested"]) == list(range(SAMPLES))
