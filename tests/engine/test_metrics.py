"""What a run adds up to that exchanges no averaging rounds, and what of it a checkpoint brings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_async
from lightning_async.algorithms import EveryNSteps
from lightning_async.engine.gradients.window import WindowTotals
from lightning_async.engine.report import RunSummary, Totals
from lightning_async.parameter_server.metrics import PushTotals

WINDOWS = WindowTotals(number=3, own=2, batches=6, exchange_s=2.0, waited_s=1.0, sent_bytes=80)
PUSHES = PushTotals(pushes=6, pulls=7, version=12, asked_s=2.0, waited_s=1.0)


def loaded(saved: Totals, totals: Totals | None) -> RunSummary:
    summary = RunSummary(rank=1, world_size=2, totals=totals)
    summary.load_state_dict(RunSummary(rank=0, world_size=4, steps=5, totals=saved).state_dict())
    assert (summary.rank, summary.world_size, summary.steps) == (1, 2, 5)
    return summary


@pytest.mark.parametrize("saved", [WINDOWS, PUSHES])
def test_totals_go_on(saved: Totals) -> None:
    assert loaded(saved, type(saved)()).totals == saved


@pytest.mark.parametrize(("saved", "other"), [(WINDOWS, PushTotals), (PUSHES, WindowTotals)])
def test_what_was_exchanged_in_another_way_does_not_count(saved: Totals, other: type[Totals]) -> None:
    """A checkpoint goes from strategy to strategy."""
    totals = loaded(saved, other()).totals
    assert vars(totals) == vars(other())
    assert loaded(saved, None).totals is None


def test_steps_in_the_weights_are_those_of_a_checkpoint_and_those_since() -> None:
    """Servers that begin with a checkpoint's weights count from 0."""
    totals = PushTotals(version=12)
    totals.begin()
    for version in (1, 2):
        totals.pulled(version)
    assert (totals.version, totals.pulls) == (14, 2)


@pytest.mark.parametrize(("automatic", "advises"), [((), True), (("rule",), True), (("rule", "schedule"), False)])
def test_a_run_without_a_round_hears_what_to_do_where_the_user_has_set_the_period(
    automatic: tuple[str, ...], advises: bool
) -> None:
    advice = RunSummary(steps=12, consensuses=2, automatic=automatic).advice(EveryNSteps(32))
    assert ("Shorten the period" in advice) == advises
    assert not advises or "in 12 steps, as `schedule=EveryNSteps(n=32)`" in advice
    assert advises or advice == ""


def logged_by_callbacks() -> set[str]:
    """Names of metrics that stand in the source of the callbacks; any number stands for what is put into one."""
    names = set()
    for module in Path(lightning_async.__file__).parent.joinpath("callbacks").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            for key in node.keys if isinstance(node, ast.Dict) else [getattr(node, "key", None)]:
                parts = key.values if isinstance(key, ast.JoinedStr) else [key]
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in parts if part)
                names |= {text} if "/" in text else set()
    return names


def test_no_metrics_name_is_the_beginning_of_anothers() -> None:
    """A logger that keeps a file for each name, as MLflow's file store does, has no room for both."""
    ranks = [3.0, 4.0]
    kinds = [None, WINDOWS, PUSHES]
    summaries = [RunSummary(rounds=2, samples=3.0, samples_by_rank=ranks, totals=totals) for totals in kinds]
    names = {name for summary in summaries for name in summary.metrics()} | logged_by_callbacks()
    assert {
        f"{prefix}/samples/{of}" for prefix in ("averaging", "gradients", "servers") for of in ("own", "rank_1")
    } < names
    assert {
        "averaging/round_s",
        "accumulation/batches",
        "divergence/0",
        "divergence/remedy",
    } < names
    assert [(one, other) for one in names for other in names if other.startswith(f"{one}/")] == []
