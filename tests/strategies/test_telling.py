"""What users are told: names that clash with none of theirs, a summary of what happened, short errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.engine.report import RunSummary
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.telling"


def test_metrics_of_the_users_keep_their_names(ranks: Outcomes) -> None:
    for told in ranks("names"):
        assert told["metrics"]["rounds"] == 3.0
        assert told["metrics"]["hidden"] == told["metrics"]["hidden_epoch"] == 128.0
        assert told["metrics"]["averaging/rounds"] == 4.0
        assert 0.0 <= told["metrics"]["averaging/hidden_share"] <= 1.0
        assert not any(name.startswith(("rounds/", "hidden/")) for name in told["metrics"])


def test_the_monitor_that_the_strategy_adds_leaves_with_the_fit(ranks: Outcomes) -> None:
    for told in ranks("monitors"):
        assert told == [[], [], ["AveragingMonitor"]]


def test_lightning_calls_the_monitor_that_the_strategy_adds_once_a_step() -> None:
    trainer = SimpleNamespace(callbacks=[])
    undo = AveragingMonitor().attach(trainer)
    (monitor,) = trainer.callbacks
    hooks = (
        "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end",
    )  # fmt: skip
    assert [hook for hook in hooks if callable(getattr(monitor, hook))] == ["on_train_batch_end"]
    undo()
    assert trainer.callbacks == []


def test_a_summary_says_what_happened(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("summaries")):
        rounds, none, synchronous = told["rounds"], told["no round"], told["synchronous"]
        assert rounds["rows"]["averaging rounds"].strip() == "3"
        assert "% hidden" in rounds["rows"]["communication"]
        assert rounds["metrics"]["averaging/hidden_share"] <= 1.0
        assert none["rows"]["averaging rounds"].strip() == "0"
        for row in ("communication", "staleness"):
            assert none["rows"][row].strip().startswith("no round")
        assert none["gate_s"] > 0.0 and f"at sync points {none['gate_s']:.2f} s" in none["rows"]["communication"]
        assert not {"averaging/hidden_share", "averaging/round_s", "averaging/spread"} & set(none["metrics"])
        assert none["metrics"]["averaging/bytes"] == 2 * 4 * 65
        assert told["trial"]["rows"]["averaging rounds"].strip() == "0"
        for quiet in (rounds, synchronous, told["trial"]):
            assert quiet["hints"] == []
        assert len(none["hints"]) == (rank == 0)
        if rank == 0:
            assert "in 12 steps" in none["hints"][0] and "EveryNSteps(n=32)" in none["hints"][0]


def test_what_sets_itself_is_told_and_is_in_summary_and_metrics(ranks: Outcomes) -> None:
    """20 rounds of two fragments in turn, of 8 steps each: momentum has grown to 0.7 with the eighth."""
    for rank, found in enumerate(ranks("automatic")):
        metrics = found["metrics"]
        assert metrics["averaging/period_steps"] == 8.0 and metrics["averaging/step_s"] > 0.0
        assert (metrics["averaging/outer_lr"], metrics["averaging/outer_momentum"]) == (0.5, 0.7)
        assert "outer_lr 0.5, outer_momentum 0.7" in found["summary"]
        begin = "Set from measurements (rule): a round of each of 2 fragments every 8 steps of "
        assert all(line.startswith(begin) for line in found["told"])
        assert (len(found["told"]) > 0) == (rank == 0)


def test_models_that_train_against_each_other_are_told_of_momentum(ranks: Outcomes) -> None:
    begin = "Set from measurements (the plain mean as rule for 2 optimizers that step manually): a round every 2 steps"
    for rank, found in enumerate(ranks("adversaries")):
        assert [line.startswith(begin) for line in found["auto"]["told"]] == [True] * (rank == 0)
        assert [len(found[name]["warnings"]) for name in ("auto", "DiLoCo")] == [0, int(rank == 0)]


def test_a_period_that_goes_by_losses_is_told_them(ranks: Outcomes) -> None:
    """Four times as long as the first ones."""
    assert ranks("adaptive") == [16.0, 16.0]


@pytest.mark.parametrize(
    ("periods", "told"),
    [
        ([16.0, 18.0] * 20, [2]),  # measured times vary
        ([4.0, 8.0, 12.0, 16.0, 16.0, 16.0], [4]),
        ([16.0] * 20 + [32.0] * 20, [2, 22]),
        ([16.0, 16.0, 32.0, 32.0, 64.0, 64.0, 64.0, 64.0], [2, 4, 8]),  # the next comes after twice as many rounds
        ([16.0, 32.0] * 20, []),
    ],
)
def test_what_sets_itself_is_told_when_it_has_settled(periods: list[float], told: list[int]) -> None:
    monitor = AveragingMonitor()
    summaries = [
        RunSummary(rounds=number, settings={"period_steps": period, "step_s": 0.01})
        for number, period in enumerate(periods, 1)
    ]
    assert [summary.rounds for summary in summaries if monitor.is_news(summary)] == told


def test_windows_of_gradients_are_told_as_such(ranks: Outcomes) -> None:
    """Three windows of two batches, of 65 parameters: nothing is hidden without a delay."""
    for rank, of_all in enumerate(ranks("other_words")):
        told = of_all["windows"]
        rows, metrics = told["rows"], told["metrics"]
        assert rows["windows reduced"].strip() == "3" and rows["batches in a window"].strip() == "2.0"
        assert rows["a window travels"].strip().endswith(f"{100 * metrics['gradients/hidden_share']:.1f}% hidden")
        assert metrics["gradients/windows"] == 3.0 and metrics["gradients/batches_in_window"] == 2.0
        assert metrics["gradients/bytes"] == 3 * 4 * 65
        assert metrics["gradients/window_s"] > 0.0 and 0.0 <= metrics["gradients/hidden_share"] < 0.5
        assert told["shown"]["gradients/windows"] == 3.0
        assert told["titles"] == ["Windows of gradients, as rank 0 saw it:"][rank:]
        assert told["saved"]["gradients.number"] == 3 and told["saved"]["gradients.batches"] == 6
        assert of_all["compressed"]["metrics"]["gradients/bytes"] < metrics["gradients/bytes"] / 2
        until = of_all["until reduced"]["metrics"]
        assert until["gradients/windows"] >= 1.0 and until["gradients/batches_in_window"] >= 1.0


def test_servers_are_told_as_such(ranks: Outcomes) -> None:
    for rank, of_all in enumerate(ranks("other_words")):
        told = of_all["servers"]
        rows, metrics = told["rows"], told["metrics"]
        assert rows["versions"].strip() == "6, of 6 pushes of rank 0's" and "lag, in updates" in rows
        assert metrics["servers/version"] == metrics["servers/pushes"] == 6.0 and metrics["servers/pulls"] >= 6.0
        assert told["shown"]["servers/version"] >= 1.0
        assert told["titles"] == ["Parameter servers, as rank 0 saw it:"][rank:]


def test_nothing_that_is_no_averaging_is_called_so(ranks: Outcomes) -> None:
    for of_all in ranks("other_words"):
        for told in of_all.values():
            names = [*told["rows"], *told["metrics"], *told["shown"]]
            assert not [name for name in names if "averaging" in name]


def test_a_search_for_a_learning_rate_warns_of_nothing(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("search_for_a_learning_rate")):
        assert told == {"warnings": [], "summaries": int(rank == 0), "caught": []}


def test_an_error_on_one_rank_is_one_short_error_on_the_others(ranks: Outcomes) -> None:
    survivor, culprit = ranks("errors")
    assert survivor["error"].startswith("PeerLost: ") and "ValueError: a bad sample" in survivor["error"]
    assert survivor["causes"] == []
    assert survivor["lines"] <= 12
    assert culprit["error"] == "ValueError: a bad sample"


def test_an_interruption_is_told_as_one(ranks: Outcomes) -> None:
    survivor, interrupted = ranks("interruptions")
    assert "interrupted by hand (KeyboardInterrupt)" in survivor["error"]
    assert interrupted["error"] == "SystemExit: 1"
