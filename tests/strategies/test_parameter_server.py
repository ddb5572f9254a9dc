"""Training with parameter servers: real processes, on two ranks."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.algorithms import AdaptiveLr, Bounded, Buffered, NoCorrection
from lightning_async.checkpoint.store import CheckpointStore
from tests.strategies import problem
from tests.strategies.live_rank_workers import SAMPLES
from tests.strategies.problem import adam, batches, distance, flat, joined, momentum, train_alone
from tests.strategies.served import BATCHES, two_optimizers
from tests.strategies.test_failures import ended
from tests.strategies.test_joining import assert_saved_by_all, ranks
from tests.strategies.test_joining import told as told_by
from tests.strategies.test_live_ranks import live_ranks, three_ranks
from tests.strategies.workers import SCENARIOS, Outcomes

pytestmark = pytest.mark.processes

FEATURES = (
    "sync", "sync_scaled", "sync_adam_two_servers", "sync_batches_taken", "sync_some_batches", "sync_uneven",
    "asynchronous", "overlapped", "bounded", "changes", "two_by_hand", "apart_by_hand", "server_killed",
    "server_stopped",
)  # fmt: skip
USERS = (
    "resumed", "as_users_do", "finds_a_rate", "other_settings", "fails", "several_fits",
    "on_their_own",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served", tmp_path_factory.mktemp("served"), only=FEATURES)


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served", tmp_path_factory.mktemp("users"), only=USERS)


def test_all_scenarios_are_run() -> None:
    assert sorted(SCENARIOS["tests.strategies.served"]) == sorted((*FEATURES, *USERS))


@pytest.mark.parametrize(
    ("name", "optimizer"), [("sync", momentum), ("sync_scaled", momentum), ("sync_adam_two_servers", adam)]
)
def test_synchronous_training_is_that_of_one_process(outcomes: Outcomes, name: str, optimizer: object) -> None:
    told = outcomes(name)
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=optimizer))  # pyright: ignore
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6
        assert rank["step"] == 2 * BATCHES
    assert told[0]["digest"] == told[1]["digest"]


def test_batches_that_a_module_takes_by_itself_count_their_samples(outcomes: Outcomes) -> None:
    data = joined(problem.uneven(0, BATCHES), problem.uneven(1, BATCHES))
    alone = flat(train_alone(data, epochs=2, optimizer=momentum))
    for rank in outcomes("sync_batches_taken"):
        assert distance(rank["values"], alone) < 1e-6


def test_batches_whose_gradients_were_dropped_count_in_no_step(outcomes: Outcomes) -> None:
    data = joined(problem.uneven(0, BATCHES), problem.uneven(1, BATCHES))[1:8:2]
    alone = flat(train_alone(data, epochs=2, optimizer=momentum))
    for rank in outcomes("sync_some_batches"):
        assert distance(rank["values"], alone) < 1e-6


@pytest.mark.parametrize("name", ["sync_uneven", "asynchronous", "overlapped", "bounded", "changes"])
def test_all_hold_one_model_at_sync_points(outcomes: Outcomes, name: str) -> None:
    told = outcomes(name)
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["epochs"] == told[1]["epochs"]
    assert all(torch.tensor(rank["values"]).isfinite().all() for rank in told)


def loss(values: list[float]) -> float:
    module = problem.network()
    torch.nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float32), module.parameters())
    data = [*batches(0, BATCHES), *batches(1, BATCHES)]
    with torch.no_grad():
        return sum(float(problem.loss_of(module, batch)) for batch in data) / len(data)


@pytest.mark.parametrize("name", ["asynchronous", "overlapped", "changes"])
def test_it_learns(outcomes: Outcomes, name: str) -> None:
    told, start = outcomes(name), loss(flat(problem.network()))
    assert loss(told[0]["values"]) < 0.6 * start


def test_servers_hear_that_an_overlapped_gradient_is_of_the_pull_before_the_last(outcomes: Outcomes) -> None:
    """But for the first one of an epoch, as all have met before it."""
    told = outcomes("overlapped")
    assert all(0 < rank["earlier"] <= 4 * 11 for rank in told), told


@pytest.mark.parametrize(("mode", "victim"), [("sync", 1), ("async", 0), ("ssp", 2)])
def test_workers_are_killed_and_the_others_go_on(mode: str, victim: int, tmp_path: Path) -> None:
    """Rank 0 has started the server, which goes on without it."""
    with three_ranks(tmp_path, {str(victim): ("step", 0, 4)}, served=mode) as group:
        results = group.join()
    told = live_ranks(results, [victim])
    said = "".join(result.stderr for result in results)
    assert "event=regrouped" in said and "start again" not in said
    assert {each["world_size"] for each in told} == {2}
    for what in ("trained", "validated"):
        seen = sorted(sample for each in told for sample in each[what]["2"])
        assert seen == list(range(SAMPLES)), what


@pytest.mark.parametrize(("mode", "dies"), [("async", 0), ("sync", 2)])
def test_a_worker_comes_back(mode: str, dies: int, tmp_path: Path) -> None:
    with ranks(tmp_path, dies, served=mode, saves=True) as group:
        results = group.join()
    said = told_by(results, [*({0, 1, 2} - {dies}), 3])
    later = range(said[-1]["came_at"] + 1, said[-1]["epochs"])
    assert len(later) == 2
    for epoch in map(str, later):
        assert sorted(sample for each in said for sample in each["trained"][epoch]) == list(range(SAMPLES))
    assert "event=own_state" in results[3].stderr  # of its own, or rank 0's where its copy had not arrived
    assert_saved_by_all(CheckpointStore(tmp_path / "saved"), dies)


def test_each_optimizer_and_each_group_has_its_own_settings(outcomes: Outcomes) -> None:
    told = outcomes("two_by_hand")
    net = problem.network()
    optimizers = two_optimizers(net)
    for _ in range(2):
        for batch in joined(batches(0, BATCHES), batches(1, BATCHES)):
            for optimizer in optimizers:
                optimizer.zero_grad()
                problem.loss_of(net, batch).backward()
                optimizer.step()
    for rank in told:
        assert distance(rank["values"], flat(net)) < 1e-6


def test_each_optimizer_has_the_samples_behind_its_own_gradients(outcomes: Outcomes) -> None:
    """Gradients are 1 on rank 0 and 2 on rank 1, in each batch: of both there are as many samples on either."""
    each = (6 * 1 + 2 * 2) / 8 + (2 * 1 + 6 * 2) / 8
    both, second = (8 * 2 + 8 * 4) / 16, (2 * 1 + 6 * 2) / 8
    for rank in outcomes("apart_by_hand"):
        assert rank["values"] == [-each, -both, -second]


def test_an_ordinary_checkpoint_holds_what_servers_have(users: Outcomes) -> None:
    """It goes on with another number of servers, and in one process without any."""
    told = users("resumed")
    data = joined(batches(0, BATCHES), batches(1, BATCHES))
    alone = flat(train_alone(data, epochs=4, optimizer=adam))
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6
        assert rank["step"] == 4 * BATCHES
        assert rank["steps"] == [2.0 * BATCHES] * 4
        assert rank["served"]["versions"] == f"{4 * BATCHES}, of {4 * BATCHES} pushes of rank 0's"
    after = torch.load(Path(told[0]["saved"]).with_name("after.ckpt"), weights_only=True)
    saved = torch.load(told[0]["saved"], weights_only=True)
    for one, other in zip(*(each["optimizer_states"][0]["state"].values() for each in (saved, after)), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    net = problem.network()
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    optimizer = adam(net.parameters())
    optimizer.load_state_dict(saved["optimizer_states"][0])
    assert distance(flat(train_alone(data, epochs=2, module=net, optimizer=lambda _: optimizer)), alone) < 1e-6


def test_servers_are_killed_and_each_push_is_applied_once(outcomes: Outcomes) -> None:
    told = outcomes("server_killed")
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    assert told[0]["killed"] == 2
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6


def test_a_server_that_stands_still_is_waited_for(outcomes: Outcomes) -> None:
    told = outcomes("server_stopped")
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    assert told[0]["killed"] == 2
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_stands_still_is_done_without(mode: str, tmp_path: Path) -> None:
    """And is fenced when it wakes: what it says then counts no more."""
    with three_ranks(tmp_path, {}, pause_s=0.1, epochs=4, served=mode) as group:
        group.wait_for(1, "step 2\n")
        group.signal(1, signal.SIGSTOP)
        group.wait_for(0, "ENDED")
        group.signal(1, signal.SIGCONT)
        results = group.join()
    live_ranks(results, [1])
    assert "Evicted" in ended(results[1])["error"]


def test_lightnings_own_callbacks_and_options(users: Outcomes) -> None:
    told = users("as_users_do")
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["validations"] == told[1]["validations"]
    assert len(told[0]["validations"]) == 2 * 5, "averages of weights take an epoch more"
    best, often = told[0]["saved"]
    assert len(best) == len(often) == 6
    assert min(best) >= 6 and min(often) >= 5, "steps of all workers"


def test_what_cannot_be_is_refused_on_all_ranks(users: Outcomes) -> None:
    for error in users.errors("other_settings"):
        assert "mode" in error and "sync" in error and "async" in error, error


def test_a_worker_that_fails_ends_the_one_that_waits_for_its_push(users: Outcomes) -> None:
    first, second = users.errors("fails")
    assert second.startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in first and first.startswith("PeerLost")


def test_the_trainer_may_fit_again(users: Outcomes) -> None:
    """As Lightning does: with another optimizer, which begins anew."""
    told = users("several_fits")
    data = joined(batches(0, BATCHES), batches(1, BATCHES))
    once = train_alone(data, optimizer=adam)
    alone = flat(train_alone(data, module=once, optimizer=adam))
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"mode": "dist_later"}, ValueError, "mode='dist_later'"),
        ({"options": {"server_address": ""}}, ValueError, "server_address=''"),
        ({"options": {"server_address": "abc"}}, ValueError, "server_address='abc'"),
        ({"options": {"server_address": 5}}, TypeError, "server_address=5"),
        ({"options": {"lr_clock": "mine"}}, ValueError, "lr_clock='mine'"),
        ({"update_on_server": False, "options": {"lr_clock": "global"}}, ValueError, "lr_clock='global'"),
        ({"num_servers": 0}, ValueError, "num_servers=0"),
        ({"num_servers": 1, "options": {"server_address": "a:1"}}, ValueError, "server_address='a:1'"),
        ({"max_staleness": -1}, ValueError, "max_staleness=-1"),
        ({"max_staleness": 4}, ValueError, 'it is for `mode="ssp"`'),
        ({"mode": "sync", "max_staleness": 4}, ValueError, "max_staleness=4"),
        ({"staleness": "bounded", "max_staleness": 4}, ValueError, "`staleness=Bounded(4)`"),
        ({"mode": "ssp", "max_staleness": 1, "pull_every": 5}, ValueError, "`max_staleness=4` or more"),
        ({"mode": "ssp", "pull_every": 4, "overlap": True}, ValueError, "`max_staleness=4` or more"),
        ({"mode": "ssp", "max_staleness": 0, "overlap": True}, ValueError, "max_staleness=0"),
        ({"pull_every": 1.5}, TypeError, "pull_every=1.5"),
        ({"options": {"update_frequency": 2}}, ValueError, "accumulate_grad_batches=2"),
        ({"overlap": True, "update_on_server": False}, ValueError, "overlap=True"),
        ({"mode": "sync", "overlap": True}, ValueError, "mode='sync'"),
        ({"mode": "sync", "staleness": "dana"}, ValueError, "staleness=Dana"),
        ({"staleness": "late"}, ValueError, "staleness='late'"),
        ({"staleness": 3}, TypeError, "staleness=3"),
    ],
)
def test_wrong_arguments_are_named_at_once(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        ParameterServerStrategy(**{**arguments, "options": ServerOptions(**arguments.get("options", {}))})


@pytest.mark.parametrize(
    ("arguments", "policy", "bound"),
    [
        ({"staleness": "bounded"}, Bounded(16), None),
        ({"mode": "ssp", "staleness": "none", "max_staleness": 4, "pull_every": 3}, NoCorrection(), 2),
        ({"mode": "ssp", "staleness": "none", "overlap": True}, NoCorrection(), 2),
        ({"mode": "ssp", "staleness": "bounded", "max_staleness": 4}, Bounded(16), 4),
        ({"mode": "ssp", "staleness": "none", "max_staleness": 0}, NoCorrection(), 0),
        ({"staleness": AdaptiveLr(0.5)}, AdaptiveLr(0.5), None),
        ({"staleness": "rennala"}, Buffered(10, Bounded(1)), None),
        ({"mode": "dist"}, "auto", None),
        ({"update_on_server": False}, NoCorrection(), None),
    ],
)
def test_arguments_reach_the_policy_and_the_bound(arguments: dict[str, Any], policy: Any, bound: int | None) -> None:
    """How far ahead servers let a worker be: what it does before it pulls counts, too."""
    service = ParameterServerStrategy(**arguments).service
    assert service.staleness == policy
    assert bound is None or service.ahead == bound
    assert (service.bound is not None) == (service.mode == "ssp")


def test_it_is_built_from_a_config_file(tmp_path: Path) -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=ParameterServerStrategy)
    bounded = {"class_path": "lightning_async.algorithms.Bounded", "init_args": {"max_staleness": 4}}
    options = {"wait_for_workers": [2, "0:01:00"], "snapshots": str(tmp_path), "snapshot_every": 5}
    how = {"mode": "dist_async", "staleness": bounded, "options": options}
    config = {"class_path": "lightning_async.ParameterServerStrategy", "init_args": how}
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    service = instantiate(parser.parse_object({"strategy": config})).strategy.service
    assert (service.mode, service.staleness) == ("async", Bounded(4))
    kept = {"snapshots": str(tmp_path), "snapshot_every": 5.0}
    assert service.options == ServerOptions(wait_for_workers=(2, timedelta(minutes=1)), **kept)


@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("dist", "sync"), ("dist_sync", "sync"), ("dist_sync_device", "sync"), ("dist_device_sync", "sync"),
        ("dist_async", "async"), ("dist_async_device", "async"), ("dist_device_async", "async"),
    ],
)  # fmt: skip
def test_mxnets_names_are_taken(mode: str, ours: str) -> None:
    assert ParameterServerStrategy(mode).mode == ours


def test_servers_may_be_started_on_their_own(users: Outcomes) -> None:
    """They keep their weights, unless a training goes on from a checkpoint: then these count."""
    told = users("on_their_own")
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=adam))
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6
        assert distance(rank["again"], alone) < 1e-6


def test_where_the_rank_fails_that_has_started_a_server_the_others_go_on_with_it(tmp_path: Path) -> None:
    answers = Outcomes("tests.strategies.served_alone", tmp_path)._answers("host_fails")
    assert answers[0]["error"].startswith("ZeroDivisionError")
    assert answers[1]["value"]["step"] >= 2 * BATCHES


def test_lightnings_search_for_a_rate(users: Outcomes) -> None:
    """It trains on servers of its own, and all go on from where they were."""
    told = users("finds_a_rate")
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["step"] == 2 * BATCHES
