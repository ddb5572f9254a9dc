"""A rank is killed, and comes back as another process: real processes, over Gloo, the store in a process of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.comm.collectives import Collectives
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.loop_patches import Validation
from lightning_async.trainer.loops.updates import SharedLearningRates
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.strategy_view import StrategyView
from tests.comm.simulated import InProcessWorld
from tests.strategies.live_rank_workers import SAMPLES
from tests.strategies.test_failures import ended
from tests.strategies.test_live_ranks import epochs_logged
from tests.support import RankGroup, RankResult, start_ranks

pytestmark = pytest.mark.processes

TRAIN = "tests.strategies.joining_workers:train"


@contextmanager
def ranks(folder: Path, dies: int, newcomers: int = 1, **kwargs: Any) -> Iterator[RankGroup]:
    """Three, of which one dies in its fourth step, and those that are started in its place, one after another."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def env(number: int) -> dict[str, str]:
        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        shared |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        alone = {"RANK": str(dies), "LOCAL_RANK": str(dies), "LIGHTNING_ASYNC_REJOIN": str(number - 2)}
        return shared | (alone if number > 2 else {})

    arguments = {"folder": str(folder), "deaths": {str(dies): ("step", 0, 4)}, **kwargs}
    with start_ranks(TRAIN, 3 + newcomers, kwargs=arguments, env=env, timeout=150) as group:
        for before, start in [(dies, 1), *((2 + number, number + 1) for number in range(1, newcomers))]:
            group.processes[before].wait(150.0)
            (folder / f"start {start}").touch()
        yield group


def told(results: list[RankResult], numbers: list[int]) -> list[dict[str, Any]]:
    """What these say, which end in order, with one model."""
    for number in numbers:
        assert results[number].returncode == 0 and not results[number].timed_out, "\n".join(map(str, results))
    said = [ended(results[number]) for number in numbers]
    assert len({each["digest"] for each in said}) == 1, said
    assert [each["rank"] for each in said] == [0, 1, 2]  # who came last is the last
    assert {each["world_size"] for each in said} == {3}
    assert {each["lost"] for each in said} == {0}
    return said


@pytest.mark.parametrize(("dies", "rule", "workers"), [(0, "diloco", 2), (2, "mean", 0), (2, "easgd", 0)])
def test_it_takes_over_what_the_others_have_and_trains_with_them(
    dies: int, rule: str, workers: int, tmp_path: Path
) -> None:
    options = {"rule": rule, "then_test": True, "saves": True, "parts": rule == "mean", "num_workers": workers}
    with ranks(tmp_path, dies, **options) as group:
        results = group.join()
    said = told(results, [*({0, 1, 2} - {dies}), 3])
    joining = said[-1]
    assert all(each["momentum"] for each in said)
    for same in ("lr", "epochs", "best", "wait", "rule_state"):
        assert len({str(each[same]) for each in said}) == 1, (same, said)
    assert joining["lr"] == pytest.approx(0.01 * 0.99 ** joining["epochs"])
    later = range(joining["came_at"] + 1, joining["epochs"])
    assert len(later) == 2
    for epoch in map(str, later):
        for what in ("trained", "validated"):
            assert sorted(sample for each in said for sample in each[what][epoch]) == list(range(SAMPLES)), what
            assert joining[what][epoch]
    assert sorted(sample for each in said for sample in each["tested"]) == list(range(SAMPLES))
    assert f"rank {dies} has joined, and 3 replicas train from here" in results[1].stderr
    assert "event=own_state" in results[3].stderr  # of its own, or rank 0's where its copy had not arrived
    assert_saved_by_all(CheckpointStore(tmp_path / "saved"), dies)


def test_one_that_has_come_back_is_rank_0_at_last_and_logs_where_the_others_did(tmp_path: Path) -> None:
    with ranks(tmp_path, 1, leaves=True) as group:
        results = group.join()
    assert [result.returncode for result in results] == [-9, -9, -9, 0], "\n".join(map(str, results))
    joining = ended(results[3])
    assert (joining["rank"], joining["world_size"], joining["lost"]) == (0, 1, 2)
    assert joining["epochs"] == joining["came_at"] + 3
    assert epochs_logged(tmp_path / "log") == [str(epoch) for epoch in range(joining["epochs"])]
    shown = {int(number) for number in re.findall(r"Epoch (\d+):", results[3].stdout)}
    assert max(shown) == joining["epochs"] - 1
    assert joining["came_at"] not in shown


def assert_saved_by_all(store: CheckpointStore, dies: int) -> None:
    """By those that were left, then by all again while they trained, and at the end."""
    entries = list(reversed(store.entries()))
    for entry in entries:
        store.verify(entry)
    ranks = [entry.manifest.ranks for entry in entries if entry.manifest is not None]
    left = tuple(sorted({0, 1, 2} - {dies}))
    if left in ranks:  # else it was back before a save was due
        assert (0, 1, 2) in ranks[ranks.index(left) : -1]
    assert ranks[-1] == (0, 1, 2)
    assert not store.unfinished()


def test_ranks_that_step_together_take_it_in_too(tmp_path: Path) -> None:
    with ranks(tmp_path, 1, synchronous=True) as group:
        said = told(group.join(), [0, 2, 3])
    assert all(each["synchronous"] > 0 for each in said)


@pytest.mark.parametrize("windows", [2, "until_reduced"])
def test_windows_of_gradients_are_gathered_with_it(windows: Any, tmp_path: Path) -> None:
    """All have the same optimizer state and rates, its own included, and each sample of an epoch is in one window."""
    with ranks(tmp_path, 1, windows=windows, saves=True) as group:
        results = group.join()
    said = told(results, [0, 2, 3])
    assert all(each["momentum"] for each in said)
    for same in ("lr", "epochs", "best", "global_step"):
        assert len({str(each[same]) for each in said}) == 1, (same, said)
    joining = said[-1]
    for epoch in map(str, range(joining["came_at"] + 1, joining["epochs"])):
        assert sorted(sample for each in said for sample in each["trained"][epoch]) == list(range(SAMPLES))
        assert joining["trained"][epoch]
    assert_saved_by_all(CheckpointStore(tmp_path / "saved"), 1)


def test_one_that_comes_within_the_rest_of_an_epoch_ends_it_as_the_others_do() -> None:
    """What a lost rank had left is dealt out at the end of the epoch, and who comes meanwhile has not met before."""

    def on_rank(collectives: Collectives) -> list[str]:
        there, world = collectives.rank == 0, LightningCollectives(collectives, deadline=timedelta(seconds=20))
        stepped: list[str] = []
        epoch = SimpleNamespace(
            _update_learning_rates=lambda interval, watches: stepped.append(f"{interval}{', watching' * watches}"),
            _should_check_val_fx=None, val_loop=SimpleNamespace(run=None), global_step=1, max_steps=-1,
            on_run_start=None, advance=None,
        )  # fmt: skip
        progress = SimpleNamespace(current=SimpleNamespace(processed=0))
        fit = SimpleNamespace(epoch_loop=epoch, epoch_progress=progress, max_epochs=9, restarting=False)
        fit.on_advance_end = lambda: stepped.append("ended")
        strategy: Any = type("Strategy", (StrategyView,), {"sync_points": True, "shrinks": True, "world": None})()
        loggers = SimpleNamespace(log_eval_end_metrics=None)
        trainer = SimpleNamespace(
            fit_loop=fit, strategy=strategy, current_epoch=0, should_stop=False, _logger_connector=loggers
        )
        rates = SharedLearningRates(trainer)
        strategy.updates, strategy.world = (
            SimpleNamespace(rates=rates),
            LightningCollectives(InProcessWorld(1).collectives(0)),
        )
        rates.ends_epoch, left = there, [True, False] if there else [False]

        def rest() -> bool:
            """On the one that is there, alone at first, and with the joining rank behind what it trains on."""
            strategy.world.gather_objects([])
            found = left.pop(0)
            stepped.append("rest" if found else "none")
            return found

        def rendezvous(*_: Any) -> None:
            strategy.world = world if len(left) == 1 else strategy.world

        parts: Any = SimpleNamespace(rendezvous=rendezvous, rest=rest, epoch=SimpleNamespace(end=lambda: None))
        saving: Any = SimpleNamespace(catch_up=lambda: None)
        Validation(strategy, trainer, parts, parts, saving).install()
        fit.on_advance_end()
        return stepped

    told = InProcessWorld(2).run(on_rank, timedelta(seconds=40))
    assert told == [
        ["rest", "none", "epoch", "ended", "epoch, watching"],
        ["none", "epoch", "ended", "epoch, watching"],
    ]


def test_whatever_becomes_of_joining_ranks_the_others_go_on(tmp_path: Path) -> None:
    modes = {"1": "other settings", "2": "another model", "3": "fails", "4": "dies"}
    with ranks(tmp_path, 1, newcomers=5, modes=modes) as group:
        results = group.join()
    told(results, [0, 2, 7])
    errors = [ended(results[number])["error"] for number in (3, 4, 5)]
    assert errors[0].startswith("SettingsMismatch") and "EveryNSteps(n=5)" in errors[0]
    assert "with another model than those who train have" in errors[1]
    assert "no room for it" in errors[2]
    assert results[6].returncode == -9
    assert results[0].stderr.count("has joined, and 3 replicas train from here") == 3
    assert results[0].stderr.count("2 of 3 replicas are left") == 3  # the one that was killed at first, and these two


def environments() -> tuple[TCPStore, Callable[[int], dict[str, str]]]:
    """A store, to be kept, and what ranks find: two are started together, all further ones have numbers from 4 on."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def env(number: int) -> dict[str, str]:
        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        new = {"RANK": str(number + 2), "LOCAL_RANK": str(number - 2), "NODE_RANK": "2", "LIGHTNING_ASYNC_REJOIN": "1"}
        return shared | (new if number > 1 else {})

    return store, env


@pytest.mark.parametrize("how", [{}, {"windows": 2}, {"served": "async"}], ids=["averaging", "windows", "served"])
def test_new_ranks_are_taken_in_until_there_are_so_many(tmp_path: Path, how: dict[str, Any]) -> None:
    """Two train; of two more, which have numbers that nobody had, one finds room, and the other one waits.

    Two have 12 batches in an epoch, three have 8, and 10 are too many to validate after. No number 2 was ever lost.
    """
    _store, env = environments()
    arguments = {"folder": str(tmp_path), "deaths": {}, "most": 3, "fewest": 2, "saves": True, "then_test": True}
    arguments |= {"validates": 10, **how}
    with start_ranks(TRAIN, 4, kwargs=arguments, env=env, timeout=150) as group:
        (tmp_path / "start 1").touch()
        for number in (0, 1):
            group.processes[number].wait(150.0)
        waits = [number for number in (2, 3) if group.processes[number].poll() is None]
        while len(waits) > 1:  # the one that was taken in is about to end
            time.sleep(0.01)
            waits = [number for number in waits if group.processes[number].poll() is None]
        group.processes[waits[0]].kill()
        results = group.join()
    (came,) = {2, 3} - {*waits}
    said = told(results, [0, 1, came])
    for epoch in map(str, range(said[2]["came_at"], said[2]["epochs"])):
        trained = [sample for each in said for sample in each["trained"].get(epoch, [])]
        assert sorted(trained) == list(range(SAMPLES)), (epoch, said)
    assert sorted(sample for each in said for sample in each["tested"]) == list(range(SAMPLES))
    saved = [entry.manifest.ranks for entry in CheckpointStore(tmp_path / "saved").entries() if entry.manifest]
    assert saved[0] == (0, 1, came + 2)
    assert "an epoch has 8 batches for each: `val_check_interval=10` is 8 from here on" in results[0].stderr


@pytest.mark.parametrize("how", [{}, {"served": "async"}], ids=["averaging", "served"])
def test_two_new_ranks_save_with_all_others(tmp_path: Path, how: dict[str, Any]) -> None:
    _store, env = environments()
    arguments = {"folder": str(tmp_path), "deaths": {}, "most": 4, "fewest": 2, "saves": True, **how}
    with start_ranks(TRAIN, 4, kwargs=arguments, env=env, timeout=150) as group:
        (tmp_path / "start 1").touch()
        assert {ended(result)["world_size"] for result in group.join()} == {4}
    saved = [entry.manifest.ranks for entry in CheckpointStore(tmp_path / "saved").entries() if entry.manifest]
    assert saved[0] == (0, 1, 4, 5)


def test_a_frequency_goes_on_on_a_rank_that_joins() -> None:
    """After 8 steps of earlier epochs and 2 of this one, Lightning begins the epoch's count anew on this rank."""
    stepped: list[int] = []
    current = SimpleNamespace(completed=2)
    optimizer = SimpleNamespace(step=SimpleNamespace(current=current))
    automatic = SimpleNamespace(optim_progress=SimpleNamespace(optimizer=optimizer))
    schedule = pytorch("utilities.types").LRSchedulerConfig(None, interval="step", frequency=3)
    strategy = SimpleNamespace(lr_scheduler_configs=[schedule])

    def update(interval: str, watches: bool) -> None:
        stepped.extend([loop.global_step] * len(strategy.lr_scheduler_configs))

    loop: Any = SimpleNamespace(global_step=10, automatic_optimization=automatic, _update_learning_rates=update)
    trainer = SimpleNamespace(
        strategy=strategy, fit_loop=SimpleNamespace(epoch_loop=loop), accumulate_grad_batches=1
    )  # fmt: skip
    rates = SharedLearningRates(trainer)
    rates.install()
    rates.epochs_meet = lambda: True
    rates.join()
    current.completed = 0
    for step in range(11, 16):
        loop.global_step, current.completed = step, current.completed + 1
        loop._update_learning_rates("step", False)
    assert stepped == [11, 14]
