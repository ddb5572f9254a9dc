"""What a user of Lightning expects to go on working, on drifting replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_async.strategies.local_steps import learning_rate
from tests.strategies import problem
from tests.strategies.features import Gan, Odd
from tests.strategies.problem import batches, distance, flat, joined, train_alone
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.features"
EIGHT = joined(batches(0, 8), batches(1, 8))


def assert_equal_models(told: list[Any]) -> None:
    assert told[0]["digest"] == told[1]["digest"]


# ---- manual optimization ----


def test_a_plain_backward_in_synchronous_training_is_an_error(ranks: Outcomes) -> None:
    errors = ranks.errors("plain_backward_synchronous")
    assert any(error.startswith("RuntimeError: Rank") for error in errors)
    for error in errors:  # its own, or that of the other, which was quicker
        assert "`schedule=Synchronous()` asks for a step on averaged" in error
        assert "`self.manual_backward(loss)` is what averages them" in error


def test_gradients_may_be_averaged_in_an_earlier_batch_than_the_step(ranks: Outcomes) -> None:
    first, second = ranks("accumulated_synchronous")
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == 2


def test_gradients_leave_within_the_backward_pass(ranks: Outcomes) -> None:
    told = [rank["plain"] for rank in ranks("within_the_backward_pass")]
    assert_equal_models(told)
    assert [rank["begun"] for rank in told] == [8, 8]
    assert distance(told[0]["flat"], flat(train_alone(EIGHT))) < 1e-6


def test_gradients_that_a_hook_may_change_without_a_trace_leave_behind_it(ranks: Outcomes) -> None:
    told = [rank["halved"] for rank in ranks("within_the_backward_pass")]
    assert_equal_models(told)
    assert [rank["begun"] for rank in told] == [0, 0]
    expected = train_alone(EIGHT, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.025))
    assert distance(told[0]["flat"], flat(expected)) < 1e-6


def test_a_backward_pass_that_fails_and_is_caught_is_no_part_of_a_step(ranks: Outcomes) -> None:
    """Rank 1 passes over its second batch; the step is taken with its third, whose weight is its own."""
    told = [rank["caught"] for rank in ranks("within_the_backward_pass")]
    assert_equal_models(told)
    assert [(rank["failed"], rank["steps"], rank["begun"]) for rank in told] == [(0, 8, 8), (1, 8, 9)]
    module, mine = problem.network(), [batch for i, batch in enumerate(batches(1, 9)) if i != 1]
    for a, b in zip(batches(0, 8), mine, strict=True):
        module.zero_grad()
        (0.5 * problem.loss_of(module, a) + 0.5 * problem.loss_of(module, b)).backward()
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.05)  # pyright: ignore
    assert distance(told[0]["flat"], flat(module)) < 1e-6


@pytest.mark.parametrize("name", ["gan", "gan_with_raw_optimizers", "gan_synchronous", "gan_synchronous_raw"])
def test_two_optimizers_equal_one_process_on_the_joined_batch(ranks: Outcomes, name: str) -> None:
    module = Gan()
    for batch in EIGHT:
        losses, nets = module.losses(batch), (module.a, module.b)
        grads = [
            torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
            for loss, net in zip(losses, nets, strict=True)
        ]
        with torch.no_grad():
            for net, gs in zip(nets, grads, strict=True):
                for p, g in zip(net.parameters(), gs, strict=True):
                    p -= 0.05 * g
    for told in ranks(name):
        assert distance(told["flat"], flat(module)) < 1e-6
        assert told["samples_by_rank"] == [8 * 4, 8 * 4]


@pytest.mark.parametrize("name", ["gan", "gan_with_raw_optimizers"])
def test_a_round_of_two_optimizers_averages_everything_once(ranks: Outcomes, name: str) -> None:
    for told in ranks(name):
        assert told["rounds"] == 8
        assert told["moved_by_others"] < 1e-6


def test_overlapped_rounds_merge_between_batches_only(ranks: Outcomes) -> None:
    told = ranks("gan_overlapped")
    assert_equal_models(told)
    for rank in told:
        assert rank["rounds"] >= 3
        assert rank["moved_by_others"] < 1e-6
        assert rank["samples_by_rank"] == [10 * 4, 15 * 4]


def test_toggled_optimizers(ranks: Outcomes) -> None:
    told = ranks("gan_toggled")
    assert_equal_models(told)
    assert told[0]["samples_by_rank"] == [8 * 4, 14 * 4]
    assert distance(told[0]["flat"], flat(Gan())) > 1e-2


# ---- precision ----


@pytest.mark.parametrize("kind", ["mean", "synchronous"])
def test_bf16_mixed(ranks: Outcomes, kind: str) -> None:
    told = [rank[f"bf16-mixed {kind}"] for rank in ranks("precisions")]
    assert_equal_models(told)
    assert distance(told[0]["flat"], flat(train_alone(EIGHT))) < 1e-2


def test_float64(ranks: Outcomes) -> None:
    told = [rank["64-true mean"] for rank in ranks("precisions")]
    assert_equal_models(told)
    expected = train_alone([(x.double(), y.double()) for x, y in EIGHT], module=problem.network().double())
    assert distance(told[0]["flat"], flat(expected)) < 1e-6


def test_displacements_smaller_than_bf16_accumulate(ranks: Outcomes) -> None:
    """Each round moves the mean by 1/16 of a unit in the last place; 32 of them are two units."""
    for told in ranks("bf16_true"):
        assert told["rounds"] == 32
        assert told["flat"] == [1.0 + 2 * 2.0**-7] * 3


def test_skipped_steps_are_no_work(ranks: Outcomes) -> None:
    told = ranks("half_mixed")
    assert_equal_models(told)
    assert [rank["steps"] for rank in told] == [10, 8]
    assert told[0]["samples_by_rank"] == [10 * 4, 8 * 4]
    assert [rank["scale"] for rank in told] == [1024.0, 256.0]
    assert distance(told[0]["flat"], flat(problem.network())) > 1e-2


def test_synchronous_steps_are_skipped_by_all(ranks: Outcomes) -> None:
    told = ranks("half_mixed_synchronous")
    assert_equal_models(told)
    assert [rank["steps"] for rank in told] == [8, 8]
    assert [rank["scale"] for rank in told] == [256.0, 256.0]
    good = [batch for i, batch in enumerate(joined(batches(0, 10), batches(1, 10))) if i not in (2, 5)]
    assert distance(told[0]["flat"], flat(train_alone(good))) < 5e-3


def test_compiled_module(ranks: Outcomes) -> None:
    for told in ranks("compiled"):
        assert distance(told["flat"], flat(train_alone(EIGHT))) < 1e-6


# ---- learning rates ----


@pytest.mark.parametrize("clock", ["samples", "local"])
def test_with_all_ranks_schedules_follow_own_steps(ranks: Outcomes, clock: str) -> None:
    for told in ranks("lr_clocks"):
        assert told[clock]["last_epoch"] == 24
        assert told[clock]["rates"] == pytest.approx([0.05 / (2 + i) for i in range(24)])


def test_lr_clock_global_follows_the_mean(ranks: Outcomes) -> None:
    fast, slow = (told["global"] for told in ranks("lr_clocks"))
    assert 10 <= fast["last_epoch"] <= 21, "rank 1 takes a step while rank 0 takes about four"
    assert 21 <= slow["last_epoch"] <= 25
    assert fast["lr"] == pytest.approx(0.05 / (1 + fast["last_epoch"]))
    assert fast["rates"] == sorted(fast["rates"], reverse=True)


def test_schedulers_per_epoch_and_on_plateau(ranks: Outcomes) -> None:
    for told in ranks("lr_per_epoch"):
        assert (told["last_epoch"], told["lr"]) == (3, pytest.approx(0.05 / 4))
    for told in ranks("lr_on_plateau"):
        assert told["lr"] == pytest.approx(0.05 / 4), "the first of three validations is the best"


# ---- parameters and buffers ----


@pytest.mark.parametrize("kind", ["mean", "synchronous"])
def test_unused_frozen_and_shared_parameters(ranks: Outcomes, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, lr, decay = Odd(), 0.05, 0.1
    trained = [module.once, module.tied[0].weight, *module.net.parameters()]
    for parts in zip(batches(0, 6), batches(1, 6), strict=True):
        grads = []
        for rank, batch in enumerate(parts):
            monkeypatch.setenv("RANK", str(rank))
            grads.append(torch.autograd.grad(problem.loss_of(module, batch), trained, allow_unused=True))
        with torch.no_grad():
            for p, first, second in zip(trained, *grads, strict=True):
                if first is None and kind == "mean":  # rank 0 does not use it: only rank 1 takes a step
                    p -= lr * (second + decay * p) / 2
                else:
                    p -= lr * ((0.0 if first is None else first) + second) / 2 + lr * decay * p
    told = [rank[kind] for rank in ranks("odd_parameters")]
    assert_equal_models(told)
    for rank in told:
        assert distance(rank["flat"], flat(module)) < 1e-6
        assert rank["once"] == pytest.approx(module.once.item(), abs=1e-6)
        assert rank["unused"] == module.unused.tolist()
        assert rank["frozen"] == module.frozen.tolist()
        assert rank["tied"] is True
        assert rank["without_gradient"] is True
    assert module.once.item() != 1.0


def _told(ranks: Outcomes, scenario: str, policy: str) -> list[Any]:
    return [rank[policy] for rank in ranks(scenario)]


def test_buffers_averaged_by_work(ranks: Outcomes) -> None:
    first, second = _told(ranks, "buffers", "average")
    mean = [(15 * a + 45 * b) / 60 for a, b in zip(first["local"], second["local"], strict=True)]
    assert distance(first["local"], second["local"]) > 1e-2
    assert distance(first["mean"], mean) < 1e-6
    assert first["digest"] == second["digest"]


def test_buffers_kept(ranks: Outcomes) -> None:
    for told in _told(ranks, "buffers", "keep"):
        assert told["mean"] == told["local"]


def test_buffers_broadcast_from_rank_0(ranks: Outcomes) -> None:
    first, second = _told(ranks, "buffers", "broadcast")
    assert first["mean"] == first["local"] == second["mean"] != second["local"]
    assert first["digest"] == second["digest"]


def test_buffers_recomputed_from_the_batches_of_all_ranks(ranks: Outcomes) -> None:
    data = [x for x, _ in [*batches(0, 5, 3), *batches(1, 9, 5)]]
    mean = torch.stack([x.double().mean(0) for x in data]).mean(0).tolist()
    var = torch.stack([x.double().var(0) for x in data]).mean(0).tolist()
    first, second = _told(ranks, "buffers", "recompute")
    for told in (first, second):
        assert distance(told["mean"], mean) < 1e-5
        assert distance(told["var"], var) < 1e-5
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize("policy", ["average", "keep", "broadcast", "recompute"])
def test_integer_buffers_take_the_largest(ranks: Outcomes, policy: str) -> None:
    for told in _told(ranks, "buffers", policy):
        assert told["tracked"] == 9
        assert told["training"] is True


def test_optimizer_state_policies(ranks: Outcomes) -> None:
    keep, average, reset = (_told(ranks, "optimizer_states", policy) for policy in ("keep", "average", "reset"))
    assert distance(keep[0]["exp_avg"], keep[1]["exp_avg"]) > 1e-4
    assert average[0]["exp_avg"] == average[1]["exp_avg"]
    assert len(average[0]["exp_avg"]) == len(flat(problem.network()))
    for told in (*keep, *average):
        assert told["step"] == [6.0] * 4
        assert told["sizes"] == [4] * 6
    for told in reset:
        assert told["sizes"] == [4, 0] * 3
    for told in (keep, average, reset):
        assert_equal_models(told)


def test_optimizer_state_of_all_kinds_is_averaged(ranks: Outcomes) -> None:
    first, second = ranks("optimizer_states_of_all_kinds")
    for name, averaged, own in (
        ("Adafactor", {"row_var", "col_var", "variance"}, {"step"}),
        ("momentum", {"momentum_buffer"}, set()),
        ("NAdam", {"exp_avg", "exp_avg_sq"}, {"mu_product", "step"}),
        ("Rprop", {"prev", "step_size"}, {"step"}),
    ):
        assert set(first[name]) == set(second[name]) == averaged | own
        for key in averaged:
            assert first[name][key] == second[name][key]
            assert max(map(abs, first[name][key])) > 0.0
        for key in own:
            assert first[name][key] != second[name][key]


# ---- entry points and data ----


def test_validate_test_predict_with_a_distributed_sampler(ranks: Outcomes) -> None:
    first, second = ranks("evaluation")
    for told in (first, second):
        assert told["validate"] == told["test"] == told["after"] == [{"value": 5.5}]
        assert told["strategy"] == "AsyncAveragingStrategy"
    assert sorted(first["predict"] + second["predict"]) == [2.0 * i for i in range(12)]
    assert len(first["predict"]) == 6
    assert sorted(first["seen"] + second["seen"]) == [float(i) for i in range(12)]


def test_data_module_with_and_without_distributed_sampler(ranks: Outcomes) -> None:
    first, second = ranks("data_modules")
    everything = [float(i) for i in range(12)]
    assert sorted(first["True"] + second["True"]) == sorted(everything * 2)
    assert first["False"] == second["False"] == sorted(everything * 2)


def test_iterable_datasets_of_unknown_length(ranks: Outcomes) -> None:
    told = ranks("iterable")
    assert_equal_models(told)
    for rank, number in zip(told, (5, 11), strict=True):
        assert rank["samples_by_rank"] == [2 * 5, 2 * 11]
        assert sorted(rank["seen"]) == sorted(2 * [float(i) for i in range(number)])


def test_reloaded_loaders(ranks: Outcomes) -> None:
    told = ranks("reloaded")
    assert_equal_models(told)
    assert told[0]["samples_by_rank"] == [(3 + 4 + 5) * 4, 15 * 4]


# ---- ways to end ----


def test_fast_dev_run(ranks: Outcomes) -> None:
    told = ranks("fast_dev_run")
    assert_equal_models(told)
    assert [(rank["global_step"], len(rank["validations"])) for rank in told] == [(1, 1), (1, 1)]


def test_max_steps(ranks: Outcomes) -> None:
    told = ranks("max_steps")
    assert_equal_models(told)
    assert [rank["global_step"] for rank in told] == [10, 10]


def test_max_time_ends_all_ranks(ranks: Outcomes) -> None:
    told = ranks("max_time")
    assert_equal_models(told)
    assert told[0]["end"] == told[1]["end"] == told[0]["digest"]
    for rank in told:
        assert rank["seconds"] >= 1.0
        assert rank["steps"] < 10_000, "of the first epoch, which takes a minute or more"
        assert rank["samples"] == 4 * rank["steps"]


def test_one_rank_that_should_stop_stops_all(ranks: Outcomes) -> None:
    told = ranks("one_rank_stops")
    assert_equal_models(told)
    for rank in told:
        assert 5 < rank["global_step"] < 3000
        assert len(rank["epochs"]) == 1


# ---- calls between sync points ----


def test_collectives_between_sync_points_are_local_and_warn_once(ranks: Outcomes) -> None:
    told = ranks("calls_between_gates")
    assert_equal_models(told)
    for rank, (outcome, number) in enumerate(zip(told, (5, 20), strict=True)):
        assert outcome["seen"] == [float(rank)] * number
        assert len(outcome["warnings"]) == 2
        assert sum("barrier" in w for w in outcome["warnings"]) == 1
        assert sum("reduce(mean)" in w for w in outcome["warnings"]) == 1


def test_all_gather_between_sync_points_is_an_error_that_says_why(ranks: Outcomes) -> None:
    for error in ranks.errors("gather_between_gates"):
        assert "all_gather between two sync points" in error


# ---- telemetry ----


def test_metrics_reach_the_logger(ranks: Outcomes) -> None:
    first, _ = ranks("telemetry")
    rows = [row for row in first["rows"] if row.get("averaging/rounds")]
    rounds = [float(row["averaging/rounds"]) for row in rows]
    assert len(rounds) >= 3
    assert rounds == sorted(rounds)
    assert 0 < rounds[-1] <= first["rounds"]
    for row in rows:
        for name in ("staleness_steps", "bytes", "hidden_share", "spread", "samples/own", "round_s", "idle_s"):
            assert float(row[f"averaging/{name}"]) >= 0.0
        assert float(row["averaging/hidden_share"]) <= 1.0
    samples = [float(row["averaging/samples/own"]) for row in rows]
    assert samples == sorted(samples)
    assert 0 < samples[-1] <= 30 * 4
    assert float(rows[-1]["averaging/bytes"]) == 4 * len(flat(problem.network())) * rounds[-1]
    assert max(float(row["averaging/spread"]) for row in rows) > 0.0  # a round with one contributor has none


def test_a_validation_at_the_end_of_an_epoch_is_shown_with_its_last_step(ranks: Outcomes) -> None:
    """As Lightning shows it."""
    assert [row["step"] for row in ranks("telemetry")[0]["rows"] if row["val_loss"]] == ["29"]


def test_one_summary_and_nothing_in_the_progress_bar(ranks: Outcomes) -> None:
    first, second = ranks("telemetry")
    assert len(first["summaries"]) == 1
    assert second["summaries"] == []
    assert "samples" in first["summaries"][0] and "of 240" in first["summaries"][0]
    for told in (first, second):
        assert {"averaging/rounds", "averaging/hidden_share"} <= set(told["shown"])
        assert [name for name in told["in_bar"] if name.startswith("averaging")] == []


def test_memory_is_two_buckets_and_the_rules_state(ranks: Outcomes) -> None:
    for told in ranks("memory"):
        assert 2.0 <= max(told["DeltaMean"]) < 2.01
        assert 2.0 <= max(told["DiLoCo"]) < 4.01


class _Without(torch.optim.SGD):
    """An optimizer whose groups are set by hand."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(1, requires_grad=True)], lr=0.5)
        self.param_groups = groups


@pytest.mark.parametrize(
    ("optimizers", "lr"),
    [
        ([], 0.0),
        ([_Without([])], 0.0),
        ([_Without([{"params": []}])], 0.0),
        ([_Without([{"params": [], "lr": None}])], 0.0),
        ([_Without([{"lr": torch.tensor(0.25)}]), _Without([{"lr": 1.0}])], 0.25),
    ],
)
def test_an_optimizer_may_have_no_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    assert learning_rate(optimizers) == lr


def test_a_module_without_optimizers_trains(ranks: Outcomes) -> None:
    first, second = ranks("no_optimizer")
    assert first["digest"] == second["digest"]
