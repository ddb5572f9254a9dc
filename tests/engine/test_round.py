"""What headers decide, by table: pure functions, the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_async.engine.averaging.ballot import NOT_COMPARED, UNLIKE, Decision, Header, Kind, decide, shares
from lightning_async.engine.header import Gate
from lightning_async.errors import CollectiveError, GateMismatch, LayoutMismatch

TRAINS = Header(round=3)
READY = TRAINS._replace(kind=Kind.ROUND, due=True, work=4.0, steps=4.0)
LEFT_OVER = READY._replace(due=False, excused=True)
STEPS = TRAINS._replace(kind=Kind.GRADIENTS, work=2.0, steps=1.0)
START_OF_RUN = {"last_round": 3, "clock": 5.0}


def at(gate: Gate, **fields: Any) -> Header:
    return TRAINS._replace(**{"gate": gate, "excused": True, "unreported": 2.0, **START_OF_RUN, **fields})


def held(digest: int, rest: int = 7, gate: Gate = Gate.VALIDATE, **fields: Any) -> Header:
    return at(gate, digest=digest, digest_rest=rest, **fields)


CASES: dict[str, tuple[list[Header], dict[str, Any]]] = {
    "nobody is ready": ([TRAINS, TRAINS], {}),
    "one is ready": ([READY, TRAINS], {}),
    "all are ready": ([READY, READY._replace(work=12.0)], {"kind": Kind.ROUND, "weights": (0.25, 0.75), "source": 0}),
    "one is excused": ([TRAINS._replace(excused=True), READY], {"kind": Kind.ROUND, "weights": (0, 1), "source": 1}),
    "one is not finite": (
        [READY._replace(work=0.0, steps=0.0, healthy=False), READY],
        {"kind": Kind.ROUND, "weights": (0, 1), "source": 1},
    ),
    "none is finite": ([READY._replace(work=0.0, steps=0.0, healthy=False)] * 2, {"void": True}),
    "no work since the agreement, but since the round": (
        [READY._replace(work=0.0, steps=0.0), READY._replace(work=0.0)],
        {"kind": Kind.ROUND, "weights": (0, 1), "source": 0},
    ),
    "one has yet to follow a new layout": ([READY._replace(version=1, layout=9), LEFT_OVER], {}),
    "synchronous steps": ([STEPS, STEPS], {"kind": Kind.GRADIENTS, "weights": (0.5, 0.5), "source": 0}),
    "a synchronous step beside a message": ([STEPS, READY], {"kind": Kind.GRADIENTS, "weights": (1, 0), "source": 0}),
    "a synchronous step without samples": ([STEPS._replace(work=0.0)] * 2, {"void": True}),
    "after synchronous steps": (
        [READY._replace(fresh=True), READY._replace(work=9.0)],
        {"kind": Kind.START, "weights": (0, 1), "fresh": True, "source": 0},
    ),
    "a vote to stop": ([TRAINS._replace(stop=True), TRAINS], {"stop": True}),
    "a vote to end": ([TRAINS._replace(end=True), READY], {"end": True}),
    "one at a gate": ([at(Gate.VALIDATE), TRAINS], {"validate": True}),
    "all at a gate": ([at(Gate.VALIDATE)] * 2, {"validate": True, "compare": True}),
    "a message is due at a gate": (
        [at(Gate.EPOCH_END, kind=Kind.ROUND, due=True, work=4.0, steps=4.0), at(Gate.EPOCH_END)],
        {"kind": Kind.ROUND, "weights": (1, 0), "source": 0},
    ),
    "a message left over at a gate": (
        [at(Gate.EPOCH_END, kind=Kind.ROUND, work=4.0, steps=4.0), at(Gate.EPOCH_END)],
        {"compare": True},
    ),
    "one has not compared": ([held(5), at(Gate.VALIDATE)], {"validate": True, "compare": True}),
    "all hold the same, and it is new": (
        [held(5), held(5)],
        {"validate": True, "opens": Gate.VALIDATE, "moved": True, "clock": 10.0},
    ),
    "all hold the same, as at the last gate": (
        [held(5, last_clock=10.0)] * 2,
        {"validate": True, "opens": Gate.VALIDATE, "moved": False, "clock": 10.0},
    ),
    "they hold different parameters": (
        [held(5), held(6, unreported=6.0)],
        {"validate": True, "kind": Kind.CONSENSUS, "weights": (0.25, 0.75), "compare": True, "source": 0},
    ),
    "they hold different buffers": (
        [held(5), held(5, 8)],
        {"validate": True, "kind": Kind.CONSENSUS, "weights": (0.5, 0.5), "compare": True, "source": 0, "alike": True},
    ),
    "moved without a step": (
        [held(5, unreported=0.0), held(5, 8, unreported=0.0), held(5, 9, unreported=0.0, healthy=False)],
        {
            "validate": True,
            "kind": Kind.CONSENSUS,
            "weights": (0.5, 0.5, 0),
            "compare": True,
            "source": 0,
            "alike": True,
        },
    ),
    "replicas with models of their own": (
        [held(UNLIKE), held(UNLIKE)],
        {"validate": True, "kind": Kind.CONSENSUS, "weights": (0.5, 0.5), "compare": True, "source": 0},
    ),
    "one at a gate is not finite": (
        [held(5, healthy=False), held(6)],
        {"validate": True, "kind": Kind.CONSENSUS, "weights": (0, 1), "compare": True, "source": 1},
    ),
    "told to stop at a gate": ([held(5, stop=True), held(5)], {"validate": True, "stop": True}),
    "told to stop, at the gate for that": (
        [held(5, gate=Gate.STOP), held(5, gate=Gate.STOP)],
        {"stop": True, "opens": Gate.STOP, "moved": True, "clock": 10.0},
    ),
    "one validates, the other is done": ([held(5), held(5, gate=Gate.TRAIN_END)], {"validate": True}),
    "back to synchronous steps, while one is done": (
        [held(5, gate=Gate.SYNCHRONISE), held(5, gate=Gate.TRAIN_END)],
        {"opens": Gate.SYNCHRONISE, "moved": True, "clock": 10.0, "synchronise": True},
    ),
    "one lost the answer that opened a gate": (
        [TRAINS._replace(opened=2, last_gate=Gate.VALIDATE, last_moved=True, last_clock=9.0), held(5, opened=1)],
        {"late": True, "opens": Gate.VALIDATE, "moved": True, "clock": 9.0},
    ),
    "one lost the last answer of a round": (
        [TRAINS._replace(stop=True), READY._replace(round=4)],
        {"catch_up": 3, "stop": True},
    ),
    "one waits for the others at synchronous steps": (
        [STEPS, at(Gate.SYNCHRONISE)],
        {
            "kind": Kind.GRADIENTS,
            "weights": (1, 0),
            "source": 0,
            "synchronise": True,
        },
    ),
    "one's buffers are not finite": (
        [READY._replace(sound=False), READY],
        {"kind": Kind.ROUND, "weights": (0, 1), "source": 1},
    ),
    "nobody's buffers are finite: they are meant so": (
        [READY._replace(sound=False)] * 2,
        {"kind": Kind.ROUND, "weights": (0.5, 0.5), "source": 0},
    ),
    "none at a gate is finite": (
        [held(5, healthy=False), held(6, healthy=False)],
        {"validate": True, "kind": Kind.CONSENSUS, "weights": (0.5, 0.5), "compare": True, "source": 0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decide(name: str) -> None:
    headers, expected = CASES[name]
    assert decide([Header.unpack(header.pack().tolist()) for header in headers]) == Decision(**expected)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ([TRAINS, TRAINS._replace(round=5)], CollectiveError),
        ([READY, READY._replace(layout=9)], LayoutMismatch),
        ([held(5, version=1, layout=9), held(5)], LayoutMismatch),
        (
            [
                held(5, version=1, layout=9, gate=Gate.EPOCH_END, kind=Kind.ROUND, due=True),
                held(5, gate=Gate.EPOCH_END),
            ],
            LayoutMismatch,
        ),
        ([held(5, gate=Gate.EPOCH_END), held(5, gate=Gate.TRAIN_END)], GateMismatch),
        ([held(5, gate=Gate.EPOCH_END), held(5, gate=Gate.EPOCH_END, gate_index=1)], GateMismatch),
    ],
)
def test_what_cannot_be_is_an_error(headers, error) -> None:
    with pytest.raises(error):
        decide(headers)


def test_a_header_survives_its_row() -> None:
    header = Header(
        7, Kind.ROUND, True, 10, 2**52 - 1, 1, 0.1, 2.0, 0.3, True, Gate.EPOCH_END, 4, False, True, 1e9, 0.7, 1e-3,
        2**48, False, True, True, 3, Gate.STOP, True, 5.0, 6, 2**52 - 1, NOT_COMPARED, (0.5, -1.0),
    )  # fmt: skip
    assert Header.unpack(header.pack().tolist()) == header


def test_shares_add_up() -> None:
    assert shares([0.0, 0.0, 0.0], stand_in=1) == (0.0, 1.0, 0.0)
    assert sum(shares([1.0, 2.0, 4.0])) == pytest.approx(1.0)
