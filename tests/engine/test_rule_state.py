"""The two counts of a replica's work, as laws; and the rule's state, which one class touches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_async.algorithms import (
    AdaptiveDiLoCo,
    DiLoCo,
    Mean,
    PseudoGradientPenalty,
    SlowMo,
    SparseLoCo,
)
from lightning_async.algorithms.averaging import Round
from lightning_async.engine.averaging.rule_state import RuleState
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.work_ledger import Work, WorkLedger
from lightning_async.strategies.averaging_state import SavedState

events = st.lists(st.sampled_from(["step", "pack", "commit", "sync_point", "absent"]), max_size=60)


class Replay:
    """One replica's ledger, driven by a script: a message is packed, and committed or dropped at a sync point."""

    def __init__(self) -> None:
        self.time = 0.0
        self.ledger = WorkLedger(now=lambda: self.time)
        self.message: tuple[Work, float] | None = None
        self.steps = self.committed = self.weighed = 0.0

    def play(self, event: str) -> None:
        ledger, self.time = self.ledger, self.time + 1.0
        if event == "step":
            self.steps += 1
            ledger.step(2.0)
        elif event == "pack" and self.message is None:
            self.message = (ledger.work[0], ledger.since_round[0])
        elif event == "commit" and self.message is not None:
            (work, steps), self.message = self.message, None
            self.committed += steps
            self.weighed += work.samples
            ledger.round(work, steps)
        elif event == "sync_point":  # a packed message is served before the consensus, or dropped with it
            self.message = None
            self.weighed += ledger.work[0].samples
            ledger.agree()
        elif event == "absent":
            ledger.round(None)


@given(events)
def test_every_step_is_in_one_round_and_every_sample_in_one_mean(script: list[str]) -> None:
    replay = Replay()
    for event in script:
        replay.play(event)
        ledger = replay.ledger
        assert ledger.since_round[0] == replay.steps - replay.committed, "the clock counts what no round holds"
        assert 2.0 * replay.steps == replay.weighed + ledger.work[0].samples, "each sample is weighed once"
        assert ledger.work[0].steps >= 0 and ledger.since_round[0] >= ledger.work[0].steps


@given(events)
def test_sync_points_do_not_move_the_clock_of_rounds(script: list[str]) -> None:
    """Without its sync points the script has as many steps since the round after each event, while nothing is open."""
    gated, plain = Replay(), Replay()
    for event in script:
        if event in ("pack", "commit"):
            continue
        gated.play(event)
        if event != "sync_point":
            plain.play(event)
        assert gated.ledger.since_round[0] == plain.ledger.since_round[0]


def test_an_agreement_ends_the_weight_alone() -> None:
    ledger = WorkLedger(now=lambda: 7.0)
    for _ in range(3):
        ledger.step(4.0)
    ledger.agree()
    assert (*ledger.work, *ledger.reported, *ledger.since_round, ledger.last_round) == (Work(), Work(), 3.0, 0.0)
    ledger.step(4.0)
    ledger.round(Work(4.0, 1.0), 4.0)
    assert (*ledger.work, *ledger.reported) == (Work(), Work(4.0, 1.0))
    assert (*ledger.since_round, ledger.last_round) == (0.0, 7.0)


@pytest.mark.parametrize(("mine", "synchronous", "work", "since"), [
    (6.0, True, Work(6.0, 1.0), 0.0), (None, True, Work(), 0.0), (None, False, Work(4.0, 1.0), 1.0),
])  # fmt: skip
def test_a_synchronous_step_counts_for_those_who_took_part(mine, synchronous, work, since) -> None:
    ledger = WorkLedger(now=lambda: 3.0, synchronous=synchronous)
    ledger.step(4.0)
    ledger.synchronous_step(None if mine is None else Work(mine, 1.0))
    assert (ledger.fresh, *ledger.work, *ledger.since_round, ledger.last_round) == (True, work, since, 3.0)
    ledger.begin()
    assert (ledger.fresh, *ledger.since_round) == (False, 0.0)


@pytest.mark.parametrize(("weighting", "weight"), [("samples", 6.0), ("steps", 2.0), ("equal", 1.0)])
def test_what_work_weighs(weighting: Any, weight: float) -> None:
    assert Work(6.0, 2.0).weight(weighting) == weight
    assert Work().weight(weighting) == 0.0


def agreed(rule: Any) -> tuple[RuleState, Buckets, SharedState]:
    module = nn.Linear(3, 1, bias=False)
    nn.init.ones_(module.weight)
    shared_state = SharedState()
    buckets = Buckets(Replica(module), shared_state)
    return RuleState(rule, buckets, shared_state), buckets, shared_state


def test_a_round_changes_the_state_as_the_rule_says() -> None:
    found, buckets, shared_state = agreed(DiLoCo(outer_lr=1.0, outer_momentum=0.0))
    buckets.sent.fill_(0.5)
    assert found.message_(buckets.sent, 0) == ()
    target = buckets.sent.clone()
    facts = Round(id=1, rank=0, work=(1.0,))
    with shared_state.committing:
        found.merge_(buckets.sent, target, facts)
    assert target.tolist() == [0.5] * 3
    assert found.state_dict()["rule_state"]["anchor"].tolist() == [0.5] * 3
    with shared_state.committing:
        found.begin(torch.full((3,), 0.25))
    assert found.state_dict()["rule_state"]["anchor"].tolist() == [0.25] * 3


def test_a_replicas_own_state_follows_parameters_by_name_and_begins_anew_where_it_is_lost() -> None:
    def of(thawed: bool) -> RuleState:
        module = nn.Linear(3, 1)
        module.bias.requires_grad_(thawed)
        shared_state = SharedState()
        return RuleState(SparseLoCo(), Buckets(Replica(module), shared_state), shared_state)

    saving = of(thawed=False)
    saving._states[0].error.copy_(torch.tensor([1.0, 2.0, 3.0]))
    shared, own = saving.state_dict(), saving.rule_state_dict(own=True)
    assert set(own) == {"error"} and set(shared["rule_state"]) == {"anchor"}
    for thawed, expected in ((False, [1.0, 2.0, 3.0]), (True, [1.0, 2.0, 3.0, 0.0])):
        resumed = of(thawed)
        resumed.load_state_dict(shared, own)
        assert resumed.rule_state_dict(own=True)["error"].tolist() == expected
        joined = of(thawed)
        joined.load_state_dict(shared, {})
        assert joined.rule_state_dict(own=True)["error"].tolist() == [0.0] * len(expected)


@pytest.mark.parametrize("wrap", [lambda rule: rule, PseudoGradientPenalty], ids=["alone", "wrapped"])
@pytest.mark.parametrize(("wrote", "reads"), [(AdaptiveDiLoCo(), DiLoCo()), (DiLoCo(), AdaptiveDiLoCo())])
def test_a_rule_that_sets_itself_and_one_that_is_set_go_on_from_each_other(
    wrote: Any, reads: Any, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (before, buckets, _), (after, *_) = agreed(wrap(wrote)), agreed(wrap(reads))
    buckets.received.fill_(0.25)
    before.merge_(None, buckets.received, Round(id=0, rank=0, work=(1.0,), steps=(16.0,), scalars=((0.5, 0.0),)))
    saved = before.state_dict()
    assert saved["rule_state"]["momentum"].tolist() == [0.25] * 3
    after.load_state_dict(saved, before.rule_state_dict(own=True))
    for name, value in after.state_dict()["rule_state"].items():
        assert torch.equal(value, saved["rule_state"][name]), name
    told = SavedState("averaging")
    told.load({"averaging": saved})
    told._warn_of_rule(saved, after)
    assert caplog.messages == []


def test_a_state_of_another_rule_is_refused() -> None:
    saved, own = agreed(DiLoCo())[0].state_dict(), {}
    with pytest.raises(ValueError, match=r"rule=Mean\(\).*`DiLoCo` wrote"):
        agreed(Mean())[0].load_state_dict(saved, own)
    penalised = agreed(PseudoGradientPenalty(SlowMo()))[0].state_dict()  # it has the fields that DiLoCo has
    with pytest.raises(ValueError, match=r"rule=PseudoGradientPenalty\(.*`PseudoGradientPenalty\(SlowMo\)` wrote"):
        agreed(PseudoGradientPenalty(DiLoCo()))[0].load_state_dict(penalised, own)


def test_work_of_all_rounds_counts_where_replicas_keep_own_models() -> None:
    """Of one round only where the mean takes the work over."""
    weights = {}
    for keeps in (True, False):
        ledger = WorkLedger(weight_of_reported=1.0, has_own_model=keeps)
        for _ in range(3):
            ledger.step(10.0)
            ledger.round(Work(10.0, 1.0), 1.0)
        weights[keeps] = ledger.weights()
        ledger.agree()
        assert ledger.weights() == (0.0,)
    assert weights == {True: (30.0,), False: (10.0,)}
