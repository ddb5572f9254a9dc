"""Calls of the training thread's over all ranks go on when the groups are formed anew."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async.algorithms import DeltaMean
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.collectives import LightningCollectives, packed
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.errors import AsyncTrainingError, CollectiveError, PeerLost
from lightning_async.membership.membership import Membership
from lightning_async.trainer.data.samplers import ConsistentMetrics
from lightning_async.trainer.namespace import pytorch
from tests.comm.faulty import Fail, Fault, FaultyCollectives
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import DEADLINES, HEADER, NEVER
from tests.engine.ranks import assemble

LIGHTNING = "world/lightning"
LONG = 600
"""So many numbers do not go along with the question."""


class Caller:
    """A rank with an engine, and Lightning's collectives beside it."""

    def __init__(self, collectives: Any, store: Any, script: Sequence[Fault], min_replicas: int | None = None) -> None:
        self.number = collectives.rank
        self.membership = Membership(
            store, collectives.rank, collectives.world_size, interval=timedelta(seconds=0.02)
        )  # fmt: skip
        self.membership.start()
        faulty: Any = FaultyCollectives(collectives, script)
        self.world = LightningCollectives(faulty.fork("lightning"), self.membership.check, timedelta(seconds=20))
        self.module = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(self.module.weight, float(self.number))
        config = AveragerConfig(timeouts=DEADLINES)
        self.averager, _ = assemble(
            faulty, self.membership, Replica(self.module), DeltaMean(), NEVER, config, calls=self.world.calls,
            min_replicas=min_replicas,
        )  # fmt: skip

    def close(self) -> None:
        self.averager.close()
        self.membership.close()


def call(
    world_size: int, body: Any, scripts: dict[int, Sequence[Fault]] | None = None, min_replicas: int | None = None
) -> list[Any]:
    world = InProcessWorld(world_size)

    def on_rank(collectives: Any) -> Any:
        caller = Caller(collectives, world.store, (scripts or {}).get(collectives.rank, ()), min_replicas)
        try:
            caller.averager.start()
            return body(caller)
        except BaseException as error:
            caller.membership.fail(f"{type(error).__name__}: {error}")
            return error
        finally:
            caller.close()

    return world.run(on_rank, timedelta(seconds=40))


def gate_and_calls(caller: Caller) -> Any:
    """What a validation does: a sync point, and then Lightning's collectives, one after the other."""
    caller.averager.tick(caller.averager.plan(), 1.0)
    assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
    world, number = caller.world, caller.number
    found = [
        float(world.reduce(torch.tensor(float(number)), "sum")),
        world.broadcast({"path": "a", "scores": (1.5, None)} if number == 0 else None),
        world.broadcast([*range(LONG)] if number == 1 else None, src=1),
        world.gather_objects({"rank": number, "x": torch.full((LONG * number + 1,), 2.0)}),
        world.reduce(torch.full((LONG,), float(number)), "max").tolist(),
        world.broadcast("b" * 9 * LONG if number == 0 else None),
    ]
    world.barrier("last")
    return found, caller.averager.summary


def expected(world_size: int) -> list[Any]:
    return [
        float(sum(range(world_size))),
        {"path": "a", "scores": (1.5, None)},
        [*range(LONG)],
        [{"rank": rank, "x": [2.0] * (LONG * rank + 1)} for rank in range(world_size)],
        [float(world_size - 1)] * LONG,
        "b" * 9 * LONG,
    ]


def plain(found: list[Any]) -> list[Any]:
    *before, gathered, reduced, last = found
    return [*before, [{**each, "x": each["x"].tolist()} for each in gathered], reduced, last]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("nth", range(1, 9))
def test_losing_the_answer_that_opens_a_sync_point_costs_no_call(world_size, nth) -> None:
    script = [Fault(op="all_gather", nth=nth, action=Fail(after=True), name=HEADER)]
    for found, _ in call(world_size, gate_and_calls, {1: script}):
        assert plain(found) == expected(world_size)


@pytest.mark.parametrize("after", [False, True], ids=["nobody has it", "others have it"])
@pytest.mark.parametrize(
    ("op", "nth"), [*(("all_gather", n) for n in range(1, 8)), ("all_reduce", 1), ("broadcast", 1), ("broadcast", 2)]
)
def test_a_call_that_fails_is_repeated_or_its_answer_handed_over(op, nth, after) -> None:
    script = [Fault(op=op, nth=nth, action=Fail(after=after), name=LIGHTNING)]
    ended = call(3, gate_and_calls, {1: script})
    for found, _ in ended:
        assert plain(found) == expected(3)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_broadcast_whose_source_is_ahead_reaches_the_others(nth, culprit) -> None:
    for after in (False, True):
        script = [Fault(op="broadcast", nth=nth, action=Fail(after=after), name=LIGHTNING)]
        for found, _ in call(2, gate_and_calls, {culprit: script}):
            assert plain(found) == expected(2)


def test_a_rank_that_fails_in_a_call_is_named_with_its_cause() -> None:
    def body(caller: Caller) -> Any:
        caller.world.barrier("each has seen the other")  # a failure found at the first look may be an earlier run's
        if caller.number == 1:
            raise OSError(28, "No space left on device")
        return caller.world.gather_objects(caller.number)

    left, right = call(2, body)
    assert isinstance(right, OSError)
    assert isinstance(left, PeerLost)
    assert "rank 1 failed" in str(left) and "No space left on device" in str(left)


def test_without_an_engine_a_failure_names_the_rank_that_is_gone() -> None:
    world, known = InProcessWorld(2), threading.Event()

    def on_rank(collectives: Any) -> Any:
        membership = Membership(world.store, collectives.rank, 2, interval=timedelta(seconds=0.02))
        membership.start()
        lightning = LightningCollectives(collectives.fork("lightning"), membership.check, timedelta(seconds=20))
        try:
            lightning.barrier("both are here")
            if collectives.rank == 1:
                collectives.abort()  # its connections close first
                known.wait(0.5)
                membership.fail("MemoryError: 3 GiB")
                return None
            return lightning.reduce(torch.ones(1))
        except AsyncTrainingError as error:
            return error
        finally:
            known.set()
            membership.close()

    error, _ = world.run(on_rank)
    assert isinstance(error, PeerLost)
    assert "rank 1 failed: MemoryError: 3 GiB" in str(error)


@pytest.mark.parametrize("goes", ["source", "joining"])
def test_who_hands_a_state_over_and_who_waits_for_it_hear_that_the_other_one_is_gone(goes: str) -> None:
    """Between two parts, while the others wait on."""
    world = InProcessWorld(2)

    def on_rank(collectives: Any) -> Any:
        membership = Membership(world.store, collectives.rank, 2, interval=timedelta(seconds=0.02))
        membership.start()
        source = collectives.rank == 0
        moving: Any = collectives.fork("joining")
        pair = LightningCollectives(moving, membership.check, timedelta(seconds=20))
        broadcast, moved = moving.broadcast, []

        def leaving(buffer: torch.Tensor, src: int) -> Any:
            moved.append(buffer)
            if len(moved) == 3 and source == (goes == "source"):
                membership.fail("MemoryError: 3 GiB")
                raise EOFError
            return broadcast(buffer, src)

        moving.broadcast = leaving
        try:
            return pair.hand_over(packed([torch.ones(9 << 18) for _ in range(9)]) if source else None)
        except (AsyncTrainingError, EOFError) as error:
            return error
        finally:
            membership.close()

    errors = world.run(on_rank)
    gone, left = errors if goes == "source" else reversed(errors)
    assert isinstance(gone, EOFError)
    assert isinstance(left, PeerLost)
    assert "failed: MemoryError: 3 GiB" in str(left)


def test_a_failure_that_nobody_is_to_blame_for_names_the_call() -> None:
    world = InProcessWorld(2)

    def on_rank(collectives: Any) -> Any:
        script = [Fault(op="all_reduce", nth=1)] if collectives.rank == 0 else []
        faulty: Any = FaultyCollectives(collectives, script)
        try:
            return LightningCollectives(faulty.fork("lightning")).reduce(torch.ones(LONG))
        except CollectiveError as error:
            return str(error)

    for text in world.run(on_rank):
        assert "reduce(mean) failed" in text and "no rank is known to be lost" in text


class Damaging:
    """Calls, of which a broadcast changes one bit on the way."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def __call__(self, what: str, start: Any) -> Any:
        answer = self._calls(what, start)
        if what == "broadcast":
            answer[-1] ^= 1
        return answer


@pytest.mark.parametrize(
    "sent", [{"x": torch.zeros(LONG)}, SimpleNamespace(x="x" * 9 * LONG)], ids=["plain", "pickled"]
)
def test_a_broadcast_that_has_changed_on_the_way_is_an_error(sent: Any) -> None:
    def on_rank(collectives: Any) -> Any:
        world = LightningCollectives(collectives.fork("lightning"))
        if collectives.rank == 1:
            world.calls = Damaging(world.calls)  # type: ignore[assignment]
            with pytest.raises(CollectiveError, match=r"Rank 1: of [0-9]+ bytes that rank 0 has broadcast others have"):
                world.broadcast(None)
            return None
        return world.broadcast(sent)

    assert InProcessWorld(2).run(on_rank)[0] is not None


def test_only_plain_values_are_gathered() -> None:
    with pytest.raises(TypeError, match=r"the value is a builtins\.object, and cannot travel"):
        LightningCollectives(InProcessWorld(1).collectives(0)).gather_objects(object())


class Crash(RuntimeError):
    """What a rank raises."""


def test_what_is_computed_of_several_answers_is_of_the_same_ranks() -> None:
    def body(caller: Caller) -> Any:
        assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
        world = caller.world

        def mean() -> float:
            total = world.reduce(torch.tensor(float(caller.number + 1)), "sum")
            if caller.number == 2:
                raise Crash
            return float(total / world.reduce(torch.tensor(1.0), "sum"))

        return world.in_one_generation(mean)

    first, second, dead = call(3, body, min_replicas=1)
    assert isinstance(dead, Crash)
    assert (first, second) == (1.5, 1.5)


def test_what_is_logged_is_a_mean_of_the_same_ranks() -> None:
    made: Any = pytorch("trainer.connectors.logger_connector.result")

    def body(caller: Caller) -> Any:
        results, sums = made._ResultCollection(training=False), []

        def reduce(tensor: Any, reduce_op: Any = None, group: Any = None) -> Any:
            if caller.number == 2 and sums:
                raise Crash
            sums.append(caller.world.reduce(tensor, reduce_op))
            return sums[-1]

        caller.world.asynchronous = True
        results.log(
            "validation_step", "val_loss", torch.tensor(float(caller.number + 1)), on_step=False, on_epoch=True,
            sync_dist=True, sync_dist_fn=reduce, batch_size=1,
        )  # fmt: skip
        assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
        caller.world.asynchronous = False
        loop: Any = SimpleNamespace(_results=results, val_loop=SimpleNamespace(_results=made._ResultCollection(False)))
        trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), lightning_module=caller.module)
        strategy: Any = SimpleNamespace(world=caller.world, shrinks=True)
        for _ in ConsistentMetrics(strategy, trainer).install():
            pass
        return float(results.metrics(on_step=False)["callback"]["val_loss"])

    first, second, dead = call(3, body, min_replicas=1)
    assert isinstance(dead, Crash)
    assert (first, second) == (1.5, 1.5)


def test_what_torchmetrics_computes_is_of_the_same_ranks() -> None:
    from torchmetrics.aggregation import MeanMetric

    def body(caller: Caller) -> Any:
        caller.module.mean = MeanMetric()
        caller.module.mean.update(float(caller.number + 1))
        gathered: list[Any] = []

        def gather(tensor: Any, group: Any = None) -> Any:
            if caller.number == 2 and gathered:
                raise Crash
            gathered.append(caller.world.gather_objects(tensor))
            return gathered[-1]

        caller.module.mean.dist_sync_fn = gather
        caller.module.mean.distributed_available_fn = lambda: True
        loop = SimpleNamespace(_results=SimpleNamespace(_get_cache=None), val_loop=None)
        loop.val_loop = loop
        strategy: Any = SimpleNamespace(world=caller.world, shrinks=True)
        trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), lightning_module=caller.module)
        undo = ConsistentMetrics(strategy, trainer).install()
        assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
        found = [float(caller.module.mean.compute()) for _ in range(2)]
        for each in undo:
            each()
        return found, float(caller.module.mean.mean_value)

    first, second, dead = call(3, body, min_replicas=1)
    assert isinstance(dead, Crash)
    assert first == ([1.5, 1.5], 1.0) and second == ([1.5, 1.5], 2.0)


def test_gradients_of_what_was_gathered_reach_the_rows_of_before_a_loss() -> None:
    def body(caller: Caller) -> Any:
        assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
        x, factors = torch.ones(1, requires_grad=True), torch.tensor([[10.0], [20.0], [30.0]])
        loss = (caller.world.all_gather(x, sync_grads=True) * factors).sum()
        caller.world.barrier("all have gathered")
        if caller.number == 0:
            raise Crash
        caller.world.barrier("among those that are left")
        loss.backward()
        assert x.grad is not None
        return float(x.grad), caller.world.rank

    dead, first, second = call(3, body, min_replicas=1)
    assert isinstance(dead, Crash)
    assert (first, second) == ((40.0, 0), (60.0, 1))
