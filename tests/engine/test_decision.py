"""What headers decide, by table: pure functions, the same on every rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from lightning_async.algorithms import DeltaMean, EveryNSteps
from lightning_async.engine.averaging.rounds import NOT_COMPARED, ROUND, AveragingPart
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.decision import RoundDecision, decide, from_rows, to_row
from lightning_async.engine.gradients import reduction
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Header, SyncPointKind, Vote
from lightning_async.errors import CollectiveError, GateMismatch, LayoutMismatch
from lightning_async.membership.membership import Membership
from tests.comm.simulated import InProcessWorld
from tests.engine.ranks import assemble


class Row(NamedTuple):
    """One rank's header, with the parts of the two wings."""

    common: Header = Header()
    averaging: AveragingPart = AveragingPart()
    gradients: reduction.GradientPart = reduction.GradientPart()

    def but(self, **fields: Any) -> Row:
        parts: Any = [part._replace(**{k: v for k, v in fields.items() if k in part._fields}) for part in self]
        return Row(*parts)


@pytest.fixture(scope="module")
def components() -> list[Any]:
    """As an averager has them, in a world of one."""
    world, found = InProcessWorld(1), []

    def body(collectives: Any) -> None:
        from torch import nn

        membership = Membership(world.store, 0, 1)
        averager, _ = assemble(
            collectives, membership, Replica(nn.Linear(1, 1)), DeltaMean(), EveryNSteps(1), AveragerConfig()
        )
        found.extend(averager.control.components)

    world.run(body)
    return found


def round_decision(rows: list[Row], components: list[Any]) -> RoundDecision:
    headers, averaging, gradients = (list(column) for column in zip(*rows, strict=True))
    return decide(headers, [averaging, gradients], components)


TRAINS = Row(Header(exchange=3))
READY = TRAINS.but(ready=ROUND, due=True, work=4.0, steps=4.0)
LEFT_OVER = READY.but(due=False, excused=True)
STEPS = TRAINS.but(ready=reduction.GRADIENTS, weight=2.0, mask=5)
START_OF_RUN = {"last_exchange": 3, "clock": 5.0}


def at(sync_point: SyncPointKind, **fields: Any) -> Row:
    return TRAINS.but(**{"sync_point": sync_point, "excused": True, "unreported": (2.0,), **START_OF_RUN, **fields})


def held(digest: int, rest: int = 7, sync_point: SyncPointKind = SyncPointKind.VALIDATE, **fields: Any) -> Row:
    return at(sync_point, digest=digest, digest_rest=rest, **fields)


VALIDATE = {"votes": Vote.VALIDATE}
CASES: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "nobody is ready": ([TRAINS, TRAINS], {}),
    "one is ready": ([READY, TRAINS], {}),
    "all are ready": ([READY, READY.but(work=12.0)], {"kind": "AveragingRound", "weights": (0.25, 0.75), "source": 0}),
    "one is excused": ([TRAINS.but(excused=True), READY], {"kind": "AveragingRound", "weights": (0, 1), "source": 1}),
    "one is not finite": (
        [READY.but(work=0.0, steps=0.0, healthy=False), READY],
        {"kind": "AveragingRound", "weights": (0, 1), "source": 1, "able": (False, True)},
    ),
    "none is finite": ([READY.but(work=0.0, steps=0.0, healthy=False)] * 2, {"void": True}),
    "no work since the agreement, but since the round": (
        [READY.but(work=0.0, steps=0.0), READY.but(work=0.0)],
        {"kind": "AveragingRound", "weights": (0, 1), "source": 0},
    ),
    "one has yet to follow a new layout": ([READY.but(version=1, layout=9), LEFT_OVER], {}),
    "synchronous steps": ([STEPS, STEPS], {"kind": "GradientRounds", "weights": (0.5, 0.5)}),
    "a synchronous step beside a message": ([STEPS, READY], {"kind": "GradientRounds", "weights": (1, 0)}),
    "a synchronous step without samples": ([STEPS.but(weight=0.0)] * 2, {"void": True}),
    "a synchronous step without a peer": ([STEPS, TRAINS], {}),
    "after synchronous steps": (
        [READY.but(fresh=True), READY.but(work=9.0)],
        {"kind": "AnchorRound", "weights": (0, 1), "fresh": True, "source": 0},
    ),
    "a vote to stop": ([TRAINS.but(votes=Vote.STOP), TRAINS], {"votes": Vote.STOP}),
    "a vote to end": ([TRAINS.but(votes=Vote.END), READY], {"votes": Vote.END}),
    "two votes": ([TRAINS.but(votes=Vote.END), TRAINS.but(votes=Vote.STOP)], {"votes": Vote.END | Vote.STOP}),
    "one at a gate": ([at(SyncPointKind.VALIDATE), TRAINS], VALIDATE),
    "all at a gate": ([at(SyncPointKind.VALIDATE)] * 2, {**VALIDATE, "compare": True}),
    "a message is due at a gate": (
        [at(SyncPointKind.EPOCH_END, ready=ROUND, due=True, work=4.0, steps=4.0), at(SyncPointKind.EPOCH_END)],
        {"kind": "AveragingRound", "weights": (1, 0), "source": 0, "votes": Vote.EPOCH},
    ),
    "a message left over at a gate": (
        [at(SyncPointKind.EPOCH_END, ready=ROUND, work=4.0, steps=4.0), at(SyncPointKind.EPOCH_END)],
        {"compare": True, "votes": Vote.EPOCH},
    ),
    "one has not compared": ([held(5), at(SyncPointKind.VALIDATE)], {**VALIDATE, "compare": True}),
    "all hold the same, and it is new": (
        [held(5), held(5)],
        {**VALIDATE, "opens": SyncPointKind.VALIDATE, "moved": True, "clock": 10.0},
    ),
    "all hold the same, as at the last gate": (
        [held(5, last_clock=10.0)] * 2,
        {**VALIDATE, "opens": SyncPointKind.VALIDATE, "moved": False, "clock": 10.0},
    ),
    "they hold different parameters": (
        [held(5), held(6, unreported=(6.0,))],
        {**VALIDATE, "kind": "ConsensusRound", "weights": (0.25, 0.75), "compare": True, "source": 0},
    ),
    "they hold different buffers": (
        [held(5), held(5, 8)],
        {**VALIDATE, "kind": "ConsensusRound", "weights": (0.5, 0.5), "compare": True, "source": 0, "alike": True},
    ),
    "moved without a step": (
        [held(5, unreported=(0.0,)), held(5, 8, unreported=(0.0,)), held(5, 9, unreported=(0.0,), healthy=False)],
        {**VALIDATE, "kind": "ConsensusRound", "weights": (0.5, 0.5, 0), "compare": True, "source": 0, "alike": True},
    ),
    "one at a gate is not finite": (
        [held(5, healthy=False), held(6)],
        {**VALIDATE, "kind": "ConsensusRound", "weights": (0, 1), "compare": True, "source": 1},
    ),
    "told to stop at a gate": ([held(5, votes=Vote.STOP), held(5)], {"votes": Vote.VALIDATE | Vote.STOP}),
    "told to stop, at the gate for that": (
        [held(5, sync_point=SyncPointKind.STOP), held(5, sync_point=SyncPointKind.STOP)],
        {"votes": Vote.STOP, "opens": SyncPointKind.STOP, "moved": True, "clock": 10.0},
    ),
    "one validates, the other is done": ([held(5), held(5, sync_point=SyncPointKind.TRAIN_END)], VALIDATE),
    "one has called all together, and the others are elsewhere": (
        [
            held(5, sync_point=SyncPointKind.DECIDE),
            held(5),
            held(5, sync_point=SyncPointKind.EPOCH_END),
            at(SyncPointKind.SYNCHRONISE),
        ],
        {"votes": Vote.DECIDE | Vote.VALIDATE | Vote.SYNCHRONISE | Vote.EPOCH},
    ),
    "all have come to decide": (
        [held(5, sync_point=SyncPointKind.DECIDE), held(6, sync_point=SyncPointKind.DECIDE, healthy=False)],
        {
            "votes": Vote.DECIDE,
            "kind": "ConsensusRound",
            "weights": (1, 0),
            "compare": True,
            "source": 0,
            "able": (True, False),
        },
    ),
    "back to synchronous steps, while one is done": (
        [held(5, sync_point=SyncPointKind.SYNCHRONISE), held(5, sync_point=SyncPointKind.TRAIN_END)],
        {"votes": Vote.SYNCHRONISE, "opens": SyncPointKind.SYNCHRONISE, "moved": True, "clock": 10.0},
    ),
    "one lost the answer that opened a gate": (
        [
            TRAINS.but(opened=2, last_sync_point=SyncPointKind.VALIDATE, last_moved=True, last_clock=9.0),
            held(5, opened=1),
        ],
        {"late": True, "opens": SyncPointKind.VALIDATE, "moved": True, "clock": 9.0},
    ),
    "one lost the last answer of a round": (
        [TRAINS.but(votes=Vote.STOP), READY.but(exchange=4)],
        {"catch_up": 3, "votes": Vote.STOP},
    ),
    "one waits for the others at synchronous steps": (
        [STEPS, at(SyncPointKind.SYNCHRONISE)],
        {"kind": "GradientRounds", "weights": (1, 0), "votes": Vote.SYNCHRONISE},
    ),
    "one's buffers are not finite": (
        [READY.but(sound=False), READY],
        {"kind": "AveragingRound", "weights": (0, 1), "source": 1, "able": (False, True)},
    ),
    "nobody's buffers are finite: they are meant so": (
        [READY.but(sound=False)] * 2,
        {"kind": "AveragingRound", "weights": (0.5, 0.5), "source": 0},
    ),
    "none at a gate is finite: nobody is healed": (
        [held(5, healthy=False), held(6, healthy=False)],
        {
            **VALIDATE,
            "kind": "ConsensusRound",
            "weights": (0.5, 0.5),
            "compare": True,
            "source": 0,
            "able": (True, True),
        },
    ),
}


def described(round_decision: RoundDecision) -> dict[str, Any]:
    """What a verdict says beyond the usual."""
    common, plan, said = round_decision.common, round_decision.plan, dict[str, Any]()
    if common.votes:
        said["votes"] = common.votes
    if common.catch_up is not None:
        said["catch_up"] = common.catch_up
    if round_decision.opens or common.late:
        said |= {"opens": common.place, "moved": common.moved, "clock": common.clock}
    if plan is not None and plan.kind is None:
        said["void"] = True
    elif plan is not None:
        said |= vars(plan) | {"kind": type(plan.kind).__name__}
    said |= {name: True for name, is_so in {"compare": round_decision.compare, "late": common.late}.items() if is_so}
    return said


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str, components: list[Any]) -> None:
    rows, expected = CASES[name]
    found = described(round_decision(rows, components))
    usual = (
        {"fresh": False, "alike": False, "fragment": 0, "changed": ()}
        if expected.get("kind") not in (None, "GradientRounds")
        else {}
    )
    if usual:
        assert found.pop("shares") == ((expected["weights"],) if expected["kind"] == "ConsensusRound" else ())
    if usual and "able" not in expected:
        found.pop("able")
    assert found == {**usual, **expected}


def test_a_consensus_weighs_each_fragment_by_its_own_work(components: list[Any]) -> None:
    plan = round_decision([held(5, unreported=(2.0, 0.0)), held(6, unreported=(6.0, 3.0))], components).plan
    assert plan is not None
    assert vars(plan)["shares"] == ((0.25, 0.75), (0.0, 1.0))


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([TRAINS, READY.but(exchange=5)], CollectiveError),
        ([READY, READY.but(layout=9)], LayoutMismatch),
        ([held(5, version=1, layout=9), held(5)], LayoutMismatch),
        (
            [
                held(5, version=1, layout=9, sync_point=SyncPointKind.EPOCH_END, ready=ROUND, due=True),
                held(5, sync_point=SyncPointKind.EPOCH_END),
            ],
            LayoutMismatch,
        ),
        ([held(5, sync_point=SyncPointKind.EPOCH_END), held(5, sync_point=SyncPointKind.TRAIN_END)], GateMismatch),
        (
            [
                held(5, sync_point=SyncPointKind.EPOCH_END),
                held(5, sync_point=SyncPointKind.EPOCH_END, sync_point_index=1),
            ],
            GateMismatch,
        ),
    ],
)
def test_what_cannot_be_is_an_error(rows: list[Row], error: type[Exception], components: list[Any]) -> None:
    with pytest.raises(error):
        round_decision(rows, components)


def test_a_header_survives_its_row() -> None:
    row = Row(
        Header(
            7, ROUND, Vote.END | Vote.STOP, True, SyncPointKind.EPOCH_END, 4, 2**52 - 1, 1, 1e9, 0.7, 3,
            SyncPointKind.STOP, True, 5.0, 6
        ),
        AveragingPart(
            True, 0.1, 2.0, (0.3, 0.2), 1e-3, False, True, True, 2**52 - 1, NOT_COMPARED, 2, 3.0, 0.25, (0.5, -1.0)
        ),
        reduction.GradientPart(3.0, 2**48 - 1, 3),
    )  # fmt: skip
    blanks = [Header(), AveragingPart(unreported=(0.0, 0.0), scalars=(0.0, 0.0)), reduction.GradientPart()]
    assert [part for (part,) in from_rows(blanks, [to_row(row)])] == list(row)
