"""How the parameters move by what has arrived, case by case, against plain arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.algorithms import DeltaMean
from lightning_async.algorithms.averaging import Round
from lightning_async.engine.averaging.rounds import ROUND, AveragingPlan, AveragingRound, LocalMessage, Merge
from lightning_async.engine.averaging.rule_state import AveragerConfig, RuleState
from lightning_async.engine.buckets import Buckets
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import SharedState
from lightning_async.engine.work_ledger import Work, WorkLedger

START, SNAPSHOT, TARGET = 1.0, 3.0, 5.0


class Half(DeltaMean):
    """Half of the progress made meanwhile is kept."""

    mixes = True

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: Any, round: Round) -> Any:
        live.sub_(base).mul_(0.5).add_(target)
        return state


def merged(
    now: float,
    *,
    base: float | None,
    step: int = 4,
    message_step: int | None = 4,
    rule: Any = None,
) -> tuple[float, Buckets]:
    """Where a replica stands after a merge, that stood at ``now``."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.constant_(module.weight, START)
    shared_state = SharedState()
    buckets = Buckets(Replica(module), shared_state)
    rule_state = RuleState(rule or DeltaMean(), buckets, shared_state)
    control: Any = SimpleNamespace(buckets=buckets, shared_state=shared_state, transfer=None)
    kind = AveragingRound(control, rule_state, WorkLedger(), AveragerConfig())
    nn.init.constant_(module.weight, now)
    buckets.at_target = message_step is None and now == START
    message = None if message_step is None else LocalMessage(ROUND, message_step, Work(1.0, 1.0), 1.0, True)
    arrived = Merge(
        id=1, kind=kind, message=message, target=torch.full((2,), TARGET), plan=AveragingPlan(kind, (1.0,), source=0),
        round=Round(1, 0, (1.0,)), share=1.0, message_bytes=8, fragments=(0,),
        base=None if base is None else torch.full((2,), base)
    )  # fmt: skip
    kind.merge(arrived, step)
    return module.weight[0, 0].item(), buckets


def test_without_a_step_since_the_snapshot_it_is_a_copy() -> None:
    x, buckets = merged(SNAPSHOT, base=SNAPSHOT)
    assert (x, buckets.at_target) == (TARGET, True)


def test_progress_since_the_snapshot_is_kept() -> None:
    x, buckets = merged(SNAPSHOT + 0.5, base=SNAPSHOT, step=6)
    assert (x, buckets.at_target) == (TARGET + 0.5, False)


def test_an_absent_replica_moves_from_the_last_target_to_the_new_one() -> None:
    assert merged(START + 0.5, base=START, message_step=None)[0] == TARGET + 0.5
    x, buckets = merged(START, base=START, message_step=None)
    assert (x, buckets.at_target) == (TARGET, True)


def test_without_a_base_the_target_is_taken_over() -> None:
    assert merged(float("nan"), base=None, step=9)[0] == TARGET


@pytest.mark.parametrize(("now", "step", "expected"), [(SNAPSHOT + 0.5, 6, TARGET + 0.25), (SNAPSHOT, 4, TARGET)])
def test_the_rule_may_say_what_becomes_of_progress(now: float, step: int, expected: float) -> None:
    assert merged(now, base=SNAPSHOT, step=step, rule=Half())[0] == expected
