"""The control plane with a wing that averages nothing, and how many rooms a round goes through."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import lightning_async.engine
from lightning_async.algorithms import EveryNSteps
from lightning_async.engine.buckets import Buckets, InFlightRound, Message, RoundType
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import ComponentPlan, EngineComponent
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, Header, SharedState, SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.membership.membership import Membership
from tests.comm.faulty import Fail, Fault, FaultyCollectives
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import DEADLINES
from tests.engine.ranks import Rank, run

TALLY = 1


class Part(NamedTuple):
    number: float = 0.0


@dataclass
class Number(Message):
    number: float


class Tally(EngineComponent, RoundType):
    """A wing that adds up a number of every rank's, with no tensor at all: what a vote with a value would be."""

    blank = Part()
    priority = TALLY

    def __init__(self, control: ControlPlane) -> None:
        self.control, self.gates_opened, self.moved = control, 0, 0.0
        self.sums: list[float] = []
        control.register(self)

    def announce(self, part: Part, message: Number) -> Part:
        return Part(message.number)

    def is_due(self, parts: Sequence[Part]) -> bool:
        return any(part.number for part in parts)

    def plan(self, headers: Sequence[Header], parts: Sequence[Part]) -> ComponentPlan:
        return ComponentPlan(self)

    def opened(self, here: bool) -> None:
        self.gates_opened += here

    def drop(self) -> None:
        self.control.buckets.message = None

    def begin(self, plan: ComponentPlan, id: int, parts: Sequence[Part]) -> InFlightRound:
        return InFlightRound(id, self, self.control.buckets.message, self.control.buckets.received)

    def move(self, exchange: InFlightRound) -> None:
        mine = exchange.message.number if isinstance(exchange.message, Number) else 0.0
        exchange.tally = mine
        self.moved = self.control.transfer.gather(torch.tensor([mine])).sum().item()

    def commit(self, exchange: InFlightRound) -> None:
        self.sums.append(self.moved)

    def hand_over(self, exchange: InFlightRound) -> None:
        self.control.buckets.message = None


def tally(collectives: Any, store: Any, script: Sequence[Fault]) -> Any:
    membership = Membership(store, collectives.rank, collectives.world_size, interval=timedelta(seconds=0.02))
    membership.start()
    faulty: Any = FaultyCollectives(collectives, script)
    control = ControlPlane(faulty, membership, Replica(nn.Module()), DEADLINES)
    membership.on_change = control.wake
    component, sync_points = Tally(control), SyncPoints(control)
    try:
        control.start()
        for number in (1.0, 10.0, 100.0):
            with control.shared_state.changed:
                control.buckets.take()
            with control.buckets.used(Number(TALLY, 0, number * (1 + collectives.rank))):
                pass
            sync_points.wait(lambda: control.buckets.message is None)
        if collectives.rank == 1:
            sync_points.vote(Vote.END)
        arrival = sync_points.rendezvous(SyncPointKind.TRAIN_END)
        return (
            component.sums,
            arrival,
            Vote.END in sync_points.agreed,
            component.gates_opened,
            control.shared_state.failed,
        )
    finally:
        assert control.close(timedelta(seconds=5))
        membership.close()


def test_a_wing_that_averages_nothing_has_rounds_sync_points_votes_and_recovery() -> None:
    script = [Fault(op="all_gather", nth=4, action=Fail(after=True), name="world/header")]  # the second commit's answer
    for faults in ([], script):
        world = InProcessWorld(3)

        def body(collectives: Any, world: Any = world, faults: Any = faults) -> Any:
            return tally(collectives, world.store, faults if collectives.rank == 2 else ())

        for sums, arrival, ends, opened, failed in world.run(body, timedelta(seconds=40)):
            assert sums == [6.0, 60.0, 600.0]
            assert (arrival, ends, opened) == (Arrival.OPEN, True, 1)
            assert failed == len(faults)


def test_buckets_that_are_laid_out_anew_never_lie_beside_the_old_ones() -> None:
    buckets = Buckets(Replica(nn.Linear(4, 2)), SharedState())
    old, seen = [weakref.ref(buckets.sent), weakref.ref(buckets.received)], []
    buckets.lay_out(lambda bucket: seen.append([each() for each in old]) or bucket)
    assert seen == [[None, None]] * 2
    assert torch.equal(buckets.received, torch.cat([p.detach().flatten() for p in buckets.replica.parameters]))


def test_a_round_enters_few_modules_and_none_of_gradients() -> None:
    folder = str(Path(lightning_async.engine.__file__).parent)
    entered: dict[str, set[str]] = defaultdict(set)
    watching, training, together = threading.Event(), set[int](), threading.Barrier(2, timeout=60.0)

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and watching.is_set() and frame.f_code.co_filename.startswith(folder):
            mine = threading.get_ident() in training
            thread = "training" if mine else "engine" if "rounds" in threading.current_thread().name else "other"
            entered[thread].add(frame.f_code.co_filename[len(folder) + 1 :])

    def body(rank: Rank) -> int:
        sys.setprofile(note)
        summary, deadline = rank.averager.summary, time.monotonic() + 60
        training.add(threading.get_ident())
        rank.train(4)
        together.wait()  # neither makes ready, nor comes to its last sync point, while the other one is watched
        watching.set()
        while summary.rounds < 4 and time.monotonic() < deadline:
            rank.train(1)
        rounds = summary.rounds
        together.wait()
        watching.clear()
        together.wait()
        sys.setprofile(None)
        rank.meet()
        return rounds

    threading.setprofile(note)
    try:
        rounds = run(2, body, schedule=EveryNSteps(2), config={"overlap": True})
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert min(rounds) >= 4
    assert len(entered["engine"]) <= 9, sorted(entered["engine"])
    assert len(entered["training"]) <= 10, sorted(entered["training"])
    assert not any(name.startswith("gradients/") for names in entered.values() for name in names), entered
    # What both enter is what they share, and pure functions.
    assert entered["engine"] & entered["training"] <= {
        "averaging/rounds.py", "averaging/rule_state.py", "buckets.py", "control_plane.py", "fingerprint.py",
        "replica.py", "work_ledger.py",
    }  # fmt: skip
