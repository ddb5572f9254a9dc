"""Every tensor of a replica has a policy: by its kind, and wherever the module keeps it now."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.algorithms import EASGD, DiLoCo, EveryNSteps, PseudoGradientPenalty
from lightning_async.algorithms.schedules import Action
from lightning_async.engine.fingerprint import digest
from lightning_async.engine.gradients.overlap import Plans, gradients_of, pack_, unpack_
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.errors import AsyncTrainingError
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import NEVER
from tests.engine.ranks import Rank, bits, rank_of

BLOCKING = {"overlap": False}


class Model(nn.Module):
    """One weight, and what a test adds."""

    def __init__(self, **tensors: Tensor | nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter | nn.Module):
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor)


def on_ranks(make: Any, body: Any, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Run ``body(rank, module, number)`` on every rank, with a module of its own."""
    world = InProcessWorld(world_size)

    def on_rank(collectives: Any) -> Any:
        module = make()
        with rank_of(collectives, world.store, float(collectives.rank), module=module, **kwargs) as rank:
            return body(rank, module, collectives.rank)

    return world.run(on_rank)


def test_kinds_of_buffers_at_a_sync_point() -> None:
    rotary = torch.polar(torch.ones(4), torch.tensor([0.1, 0.5, 1.0, 1.5]))

    def make() -> Model:
        return Model(
            rotary=rotary.clone(),
            phase=torch.zeros(2, dtype=torch.complex128),
            seen=torch.zeros(3, dtype=torch.bool),
            count=torch.zeros((), dtype=torch.int64),
            byte=torch.zeros(2, dtype=torch.uint8),
            fine=torch.full((3,), 1 / 3, dtype=torch.float64),
        )

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.phase += complex(number, 1 - number)
        module.seen[number] = True
        module.count += 5 + number
        module.byte[number] = 200
        module.fine += number
        rank.train(3)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return {name: b.clone() for name, b in module.named_buffers()}

    for found in on_ranks(make, body, schedule=NEVER):
        assert torch.equal(torch.view_as_real(found["rotary"]), torch.view_as_real(rotary)), "constant, to the bit"
        assert found["phase"].tolist() == [0.5 + 0.5j] * 2
        assert found["seen"].tolist() == [True, True, False]
        assert found["count"].item() == 6
        assert found["byte"].tolist() == [200, 200]
        torch.testing.assert_close(
            found["fine"], torch.full((3,), 1 / 3 + 0.5, dtype=torch.float64), rtol=0, atol=1e-15
        )


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def body(rank: Rank, module: Any, number: int) -> Any:
        with torch.no_grad():
            module.weight.add_(complex(number, 2 * number))
        rank.averager.tick(Action.ROUND, 1.0)
        return module.weight.detach().clone()

    for x in on_ranks(Complex, body, config=BLOCKING):
        assert x.tolist() == [1.5 + 1j] * 3
    module = Complex()
    module.weight.grad = torch.full((3,), 2 - 1j)
    replica, bucket = Replica(module), torch.zeros(6)
    pack_(gradients_of([module.weight]), bucket, 1.0)
    assert bucket.tolist() == [2.0, -1.0] * 3
    unpack_(replica, torch.arange(6.0), torch.ones(1), 1.0, Plans())
    assert module.weight.grad.tolist() == [1j, 2 + 3j, 4 + 5j]


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.float8_e4m3fn), torch.zeros(2, dtype=torch.uint64)],
    ids=["sparse", "float8", "uint64"],
)
def test_other_kinds_are_refused_by_name(tensor) -> None:
    with pytest.raises(ValueError, match="odd_one"):
        Replica(Model(odd_one=tensor))


def test_buffers_that_are_assigned_anew_are_followed() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        for _ in range(6):
            module.ema = module.ema * 0.5 + (1.0 + number)
            module.steps = module.steps + 1 + number
            rank.train(1)
        before = module.ema.clone()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return before, module.ema.clone(), module.steps.item()

    (a, ema, steps), (b, ema2, steps2) = on_ranks(
        lambda: Model(ema=torch.zeros(2), steps=torch.zeros((), dtype=torch.int32)), body, schedule=NEVER
    )
    assert a[0] == pytest.approx(1.96875) and b[0] == pytest.approx(3.9375)
    assert torch.equal(ema, ema2)
    torch.testing.assert_close(ema, (a + b) / 2)
    assert steps == steps2 == 12


def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    def body(rank: Rank, module: Any, number: int) -> None:
        module.cache = torch.zeros(5)
        rank.train(2)
        rank.meet(SyncPointKind.VALIDATE)

    with pytest.raises(AsyncTrainingError, match=r"Buffers \['cache'\]"):
        on_ranks(lambda: Model(cache=torch.zeros(2)), body, schedule=NEVER)
    on_ranks(lambda: Model(cache=torch.zeros(2)), body, schedule=NEVER, buffers="keep")


def test_buffers_outside_the_state_dict_may_grow() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        for length in range(3, 9):
            module.register_buffer("mask", torch.full((length + number,), float(number)), persistent=False)
            rank.train(1)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return module.mask.tolist(), rank.averager.replica.numel

    found = on_ranks(lambda: Model(mean=torch.zeros(2)), body, schedule=EveryNSteps(2), config=BLOCKING)
    assert found == [([0.0] * 8, 10), ([1.0] * 9, 10)]


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_rounds_send_only_buffers_that_have_changed(compression: Any) -> None:
    """50 buffers need two numbers of flags in a header; one is changed by all ranks, one by rank 1 only."""
    names = [f"b{i}" for i in range(50)]
    still = torch.full((10, 10), -math.inf).triu(1)

    def body(rank: Rank, module: Any, number: int) -> Any:
        sizes = []
        for _ in range(2):
            before = rank.averager.summary.sent_bytes
            rank.train(1)
            sizes.append(rank.averager.summary.sent_bytes - before)
            module.b3 += 1.0 + number
            if number:
                module.b49 -= 4.0
        rank.train(1)
        return sizes, module.b3.tolist(), module.b49.tolist(), module.mask

    def make() -> Model:
        return Model(**{name: torch.full((10,), 0.1) for name in names}, mask=still.clone())

    found = on_ranks(
        make, body, schedule=EveryNSteps(1), rule=DiLoCo(1.0, 0.0), config={**BLOCKING, "compression": compression}
    )
    for sizes, everywhere, on_one, mask in found:
        assert sizes[1] - sizes[0] == 2 * 10 * 4, "nothing before; then two buffers of ten numbers in fp32"
        assert everywhere == pytest.approx([0.1 + 1.5 + 1.5] * 10)
        assert on_one == pytest.approx([0.1 - 2.0 - 2.0] * 10)
        assert torch.equal(mask, still)


def test_patterns_of_names_give_buffers_policies_of_their_own() -> None:
    policies = {"queue*": "keep", "first": "broadcast"}

    def make() -> Model:
        count = torch.zeros((), dtype=torch.int64)
        return Model(queue=torch.zeros(2), queue_at=count.clone(), first=torch.zeros(2), seen=torch.zeros(2), n=count)

    def body(rank: Rank, module: Any, number: int) -> Any:
        for buffer in module.buffers():
            buffer += 1 + number
        module.queue = torch.full((3 + number,), 7.0)
        rank.train(2)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return {name: buffer.tolist() for name, buffer in module.named_buffers()}

    shared = {"first": [1.0, 1.0], "seen": [1.5, 1.5], "n": 2}
    for schedule in (NEVER, EveryNSteps(1)):
        found = on_ranks(make, body, schedule=schedule, buffers=policies, config=BLOCKING)
        assert found[0] == {"queue": [7.0] * 3, "queue_at": 1, **shared}
        assert found[1] == {"queue": [7.0] * 4, "queue_at": 2, **shared}


def test_a_pattern_that_matches_no_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['que\*'\] match no buffer.*There are \['seen'\]"):
        Replica(Model(seen=torch.zeros(2)), {"s*": "average", "que*": "keep"})


@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "new data"])
def test_frozen_parameters_that_the_user_moves_are_agreed_on(by_data) -> None:
    """A momentum teacher: it follows the student, which differs between replicas until they meet."""

    def make() -> Model:
        still = nn.Parameter(torch.full((4,), 0.1), requires_grad=False)
        return Model(teacher=nn.Parameter(torch.ones(1, 8), requires_grad=False), still=still)

    def body(rank: Rank, module: Any, number: int) -> Any:
        for _ in range(10):
            rank.train(1)
            if by_data:
                module.teacher.data = module.teacher.data * 0.9 + module.weight.data * 0.1
            else:
                with torch.no_grad():
                    module.teacher.lerp_(module.weight, 0.1)
        before = module.teacher.detach().clone()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return before, module.teacher.detach().clone(), module.still.detach().clone()

    (a, teacher, still), (b, teacher2, _) = on_ranks(make, body, schedule=NEVER)
    assert not torch.equal(a, b)
    assert torch.equal(teacher, teacher2)
    torch.testing.assert_close(teacher, (a + b) / 2)
    assert torch.equal(bits(still), bits(torch.full((4,), 0.1))), "what did not move keeps its bits"


@pytest.mark.parametrize("overlap", [False, True])
def test_float64_is_not_cut_at_sync_points_or_rounds(overlap) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1, 8), 1 / 3, dtype=torch.float64))

    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(8)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return rank.x.clone()

    a, b = on_ranks(Double, body, config={"overlap": overlap}, schedule=EveryNSteps(100))
    x = [1 / 3, 1 / 3]
    for _ in range(8):
        x = [each - 0.1 * (each - goal) for each, goal in zip(x, (0.0, 1.0), strict=True)]
    assert torch.equal(a, b)
    torch.testing.assert_close(a, torch.full((1, 8), sum(x) / 2, dtype=torch.float64), rtol=0, atol=1e-15)
    alone = on_ranks(Double, body, world_size=1, config=BLOCKING, schedule=EveryNSteps(1))[0]
    torch.testing.assert_close(alone, torch.full((1, 8), x[0], dtype=torch.float64), rtol=0, atol=1e-15)


def test_buffers_that_move_without_a_step_are_agreed_on() -> None:
    """Gradients are accumulated, or mixed precision skips the step, and BatchNorm goes on."""

    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(2)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        rank.averager.sync_points.resume()
        shown = rank.x.clone()
        module.norm.running_mean += number
        rank.averager.tick(Action.LOCAL, 1.0, stepped=False)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return shown, rank.x.clone(), module.norm.running_mean.clone(), rank.averager.sync_points.moved_at_sync_point

    for shown, x, mean, moved in on_ranks(lambda: Model(norm=nn.BatchNorm1d(3, affine=False)), body, 3, schedule=NEVER):
        torch.testing.assert_close(mean, torch.ones(3))
        assert torch.equal(bits(shown), bits(x)), "parameters that are alike keep their bits"
        assert moved


def test_a_variance_of_one_replica_that_is_not_finite_reaches_no_other(caplog) -> None:
    caplog.set_level(logging.WARNING, "lightning_async")

    def make() -> Model:
        return Model(norm=nn.BatchNorm1d(3, affine=False), mask=torch.full((2, 2), -torch.inf).triu(1))

    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(2)
        if number == 1:
            module.norm.running_var.fill_(float("nan"))
        rank.train(2)
        rank.meet(SyncPointKind.VALIDATE)
        return module.norm.running_var.clone(), module.mask.clone(), rank.averager.summary.healed

    for schedule in (EveryNSteps(2), NEVER):
        healed = []
        for variance, mask, count in on_ranks(make, body, schedule=schedule, config=BLOCKING):
            assert torch.equal(variance, torch.ones(3))
            assert torch.equal(mask, torch.full((2, 2), -torch.inf).triu(1)), "a mask is meant to be infinite"
            healed.append(count)
        assert healed == [0, 1]


def test_broadcast_buffers_come_from_a_replica_that_is_finite() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        module.norm.running_mean.fill_(float("nan") if number == 0 else number)
        rank.train(2)
        rank.meet(SyncPointKind.VALIDATE)
        return module.norm.running_mean.clone()

    found = on_ranks(lambda: Model(norm=nn.BatchNorm1d(3, affine=False)), body, 3, schedule=NEVER, buffers="broadcast")
    for mean in found:
        assert torch.equal(mean, torch.ones(3))


def test_one_gradient_that_is_not_finite_does_not_disable_a_replica(caplog) -> None:
    """Under Adam it stays in the moments for good, so they begin anew with the replica's parameters."""
    caplog.set_level(logging.WARNING, "lightning_async")

    def body(rank: Rank, module: Any, number: int) -> Any:
        optimizer, averager = torch.optim.Adam([module.weight], lr=0.05), rank.averager
        averager.on_healed = optimizer.state.clear  # as the strategy does
        averager.replica.watched = lambda: [v for s in optimizer.state.values() for v in s.values()]
        finite = 0
        for i in range(40):
            action = averager.plan()
            module.weight.grad = (module.weight - rank.goal).detach()
            if number == 1 and i == 5:
                module.weight.grad.fill_(float("nan"))
            optimizer.step()
            averager.tick(action, 1.0)
            finite += bool(torch.isfinite(module.weight).all())
        rank.meet()
        return finite, rank.x.clone(), averager.summary

    (all_, a, _), (most, b, summary) = on_ranks(Model, body, schedule=EveryNSteps(4), config=BLOCKING)
    assert (all_, most) == (40, 38)
    assert torch.equal(a, b)
    assert summary.healed == 1
    assert caplog.text.count("not finite") == 1


def test_healing_that_repeats_is_an_error_in_the_log(caplog) -> None:
    caplog.set_level(logging.WARNING, "lightning_async")

    def body(rank: Rank, module: Any, number: int) -> None:
        for _ in range(3):
            rank.train(1)
            if number == 1:
                rank.x.fill_(float("nan"))
            rank.train(1)
            rank.meet(SyncPointKind.VALIDATE)

    on_ranks(Model, body, schedule=NEVER)
    levels = [record.levelname for record in caplog.records if "not finite" in record.getMessage()]
    assert levels == ["WARNING", "ERROR", "ERROR"]
    assert "needed 2 time(s) before" in caplog.text


@pytest.mark.parametrize(
    "rule",
    [None, DiLoCo(), PseudoGradientPenalty(DiLoCo()), EASGD()],
    ids=["DeltaMean", "DiLoCo", "PseudoGradientPenalty", "EASGD"],
)
@pytest.mark.parametrize("again", [False, True], ids=["before a batch", "before another sync point"])
def test_parameters_that_are_unfrozen_at_a_sync_point_travel_from_then_on(rule, again: bool) -> None:
    def make() -> Model:
        return Model(backbone=nn.Parameter(torch.full((1, 8), 2.0), requires_grad=False))

    def agreed(rank: Rank) -> Any:
        state = rank.averager.state_dict()["rule_state"]
        return state.get("anchor", state.get("center"))

    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(5)
        assert rank.meet(SyncPointKind.EPOCH_END) is Arrival.OPEN
        anchor = agreed(rank)
        module.backbone.requires_grad_(True)
        if again:
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        rank.averager.sync_points.resume()
        carried = agreed(rank)
        with torch.no_grad():
            module.backbone.add_(number)
        rank.train(4)
        assert rank.meet(SyncPointKind.EPOCH_END, 1) is Arrival.OPEN
        return anchor, carried, module.backbone.detach().clone(), rank.x.clone()

    (anchor, carried, left, x), (_, _, right, x2) = on_ranks(make, body, rule=rule, schedule=EveryNSteps(4))
    assert torch.equal(left, right)
    assert torch.equal(x, x2)
    assert not torch.equal(left, torch.full((1, 8), 2.0))
    if rule is None:  # a mean of 2 and 3: by the steps of each until the round, of which one may have taken more
        assert left.min() == left.max() and 2.0 < float(left.min()) < 3.0
    else:
        assert torch.equal(carried[:8], anchor), "the state of the others goes on"
        assert carried[8:].tolist() == [2.0] * 8


def test_parameters_that_are_unfrozen_between_sync_points_are_refused_by_name() -> None:
    def body(rank: Rank, module: Any, number: int) -> None:
        rank.train(2)
        module.backbone.requires_grad_(True)
        rank.train(8)

    def make() -> Model:
        return Model(backbone=nn.Parameter(torch.ones(2), requires_grad=False))

    with pytest.raises(AsyncTrainingError, match=r"\['backbone'\] were frozen"):
        on_ranks(make, body)


def test_a_digest_is_of_every_word_of_every_block() -> None:
    """The same in all versions, so that ranks that have been updated one by one find each other equal."""
    words = torch.arange(5_000_000, dtype=torch.int32)  # 19 blocks, and a part of one
    assert digest([words, torch.arange(7, dtype=torch.float64), torch.tensor(True)]) == 4275038379251444
    for place in (0, 262_143, 262_144, 4_999_999):
        other = words.clone()
        other[place] += 1
        assert digest([other]) != digest([words])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([1j, 0]), torch.tensor([0, 1j])),
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0 + 2**-52], dtype=torch.float64)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 0, 1], dtype=torch.bfloat16)),
    ],
)
def test_digests_tell_tensors_apart_to_the_bit(left, right) -> None:
    assert digest([left]) != digest([right])
    assert digest([left, left]) == digest([left.clone(), left.clone()])
    assert digest([left.repeat(3)[::2]]) == digest([left.repeat(3)[::2].contiguous()])
