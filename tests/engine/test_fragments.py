"""Rounds that move one fragment of the parameters at a time: each has an anchor, a momentum and counts of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.algorithms import EASGD, DeltaMean, DiLoCo, EveryNSteps, PseudoGradientPenalty, Warmup
from lightning_async.algorithms.schedules import Action
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.membership import Membership
from tests.comm.faulty import Fail, Fault, Kill
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import HEADER, NEVER, PAYLOAD, FaultyRank, Turnstile, outcomes, values
from tests.engine.ranks import assemble, bits
from tests.engine.test_live_ranks import SOON, survivors_of

SIZES = (5, 6, 4, 2, 3)
PLACES = {1: [slice(0, 20)], 3: [slice(0, 5), slice(5, 15), slice(15, 20)]}
"""Where fragments of these parameters lie, by their number."""
OFFSETS = torch.linspace(-1.0, 1.0, sum(SIZES))
LR = 0.1


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.ones(size) for size in SIZES])


def parts_of(rank: FaultyRank) -> list[Any]:
    return list(rank.module.parameters())


def flat(rank: FaultyRank) -> Tensor:
    return torch.cat([p.detach() for p in parts_of(rank)])


@torch.no_grad()
def fill(rank: FaultyRank, value: float) -> None:
    for p in parts_of(rank):
        p.fill_(value)


@torch.no_grad()
def learn(rank: FaultyRank) -> None:
    """A step of SGD on the squared distance from this rank's goal."""
    for p, offset in zip(parts_of(rank), OFFSETS.split(SIZES), strict=True):
        p -= LR * (p - rank.goal - offset)


def learned(x: Tensor, rank: int, steps: int) -> Tensor:
    """The same, in float64."""
    for _ in range(steps):
        x = x - LR * (x - rank - OFFSETS.double())
    return x


def step(rank: FaultyRank, action: Action = Action.LOCAL) -> Any:
    learn(rank)
    return rank.averager.tick(action, 1.0)


def train(rank: FaultyRank, steps: int) -> None:
    for _ in range(steps):
        action = rank.averager.plan()
        if action is Action.GRADIENTS:
            for p, offset in zip(parts_of(rank), OFFSETS.split(SIZES), strict=True):
                p.grad = (p - rank.goal - offset).detach()
            rank.gradients.reduce_(1.0)
            with torch.no_grad():
                for p in parts_of(rank):
                    p -= LR * p.grad
            rank.averager.tick(action, 1.0)
        else:
            step(rank, action)


def take_when_there(rank: FaultyRank) -> Any:
    buckets = rank.averager.control.buckets
    rank.averager.sync_points.wait(lambda: buckets.arrived is not None)
    return rank.averager.tick(Action.LOCAL, 0.0, stepped=False)


# ---- whose turn it is ----


@pytest.mark.parametrize("fragments", [1, 2, 3, 5])
def test_each_fragment_has_a_round_in_a_period_of_the_schedule(fragments: int) -> None:
    """Each round ends the difference of one fragment, in order, and begins so many steps after the one before."""

    def body(rank: FaultyRank) -> list[list[int]]:
        fill(rank, float(rank.number))
        replica = rank.averager.replica
        seen = []
        for _ in range(30):
            rank.averager.tick(rank.averager.plan(), 1.0)
            seen.append([f for f in range(fragments) if bool((replica.of_rule(flat(rank), f) == 0.5).all())])
        return seen

    every = 30 // fragments
    for seen in values(2, body, module=Parts, fragments=fragments, schedule=EveryNSteps(30)):
        assert seen == [list(range((i + 1) // every)) for i in range(30)]


# ---- what a round is ----


def streamed(rank: FaultyRank, turn: Turnstile, rounds: int, steps: Sequence[int], late: int) -> Any:
    """Rounds in a fixed order of events: in turn, one rank goes on after its snapshot until the other has sent its own.

    Returns for each round the parameters before its merge, its report, and those after; then those of a sync point.
    """
    told = []
    for number in range(rounds):
        for _ in range(steps[rank.number] - 1):
            step(rank)
        if number % 2 == rank.number:
            step(rank, Action.ROUND)
            for _ in range(late):
                step(rank)
            turn.set(f"{number}")
        else:
            turn.wait(f"{number}")
            step(rank, Action.ROUND)
        before = flat(rank)
        told.append((before, take_when_there(rank), flat(rank)))
    assert rank.meet() is Arrival.OPEN
    return told, flat(rank)


def reference(
    places: list[slice], rounds: int, steps: Sequence[int], late: int, outer_lr: float, outer_momentum: float
) -> tuple[list[Tensor], Tensor]:
    """Streaming DiLoCo of two replicas, in float64: their parameters after all rounds, and their mean by work."""
    x = [torch.ones(sum(SIZES), dtype=torch.float64)] * 2
    anchor = x[0].clone()
    momentum = torch.zeros_like(anchor)
    taken = [[0] * len(places), [0] * len(places)]  # steps that no round of a fragment holds
    for number in range(rounds):
        fragment = number % len(places)
        here = places[fragment]
        sent: list[Tensor] = []
        work: list[int] = []
        for rank in (0, 1):
            x[rank] = learned(x[rank], rank, steps[rank])
            sent.append(x[rank][here])
            work.append(taken[rank][fragment] + steps[rank])
            more = late if number % 2 == rank else 0
            x[rank] = learned(x[rank], rank, more)
            taken[rank] = [t + steps[rank] + more for t in taken[rank]]
            taken[rank][fragment] = more
        mean = (work[0] * sent[0] + work[1] * sent[1]) / sum(work)
        gradient = anchor[here] - mean
        momentum[here] = outer_momentum * momentum[here] + gradient
        anchor[here] -= outer_lr * (gradient + outer_momentum * momentum[here])
        for rank in (0, 1):
            x[rank][here] += anchor[here] - sent[rank]
    agreed = torch.zeros_like(anchor)
    for here, *work in zip(places, *taken, strict=True):
        shares = [w / sum(work) for w in work] if any(work) else [0.5, 0.5]
        agreed[here] = shares[0] * x[0][here] + shares[1] * x[1][here]
    return x, agreed


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    ("rule", "outer"), [(DeltaMean(), (1.0, 0.0)), (DiLoCo(outer_lr=0.7, outer_momentum=0.5), (0.7, 0.5))]
)
def test_it_is_streaming_diloco(rule: Any, outer: tuple[float, float], fragments: int) -> None:
    turn = Turnstile()
    rounds, steps, late = 7, (2, 4), 3
    places = PLACES[fragments]
    found = values(
        2, lambda rank: streamed(rank, turn, rounds, steps, late),
        module=Parts, fragments=fragments, rule=rule, schedule=NEVER, overlap=True,
    )  # fmt: skip
    x, agreed = reference(places, rounds, steps, late, *outer)
    for (told, end), expected in zip(found, x, strict=True):
        torch.testing.assert_close(told[-1][-1].double(), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(end.double(), agreed, rtol=0, atol=2e-5)
    for number, both in enumerate(zip(*(told for told, _ in found), strict=True)):
        here = places[number % fragments]
        for before, report, after in both:
            assert report.payload_bytes == 4 * (here.stop - here.start)
            others = torch.ones(len(before), dtype=torch.bool)
            others[here] = False
            assert torch.equal(bits(before)[others], bits(after)[others]), "only this fragment moves"
        if isinstance(rule, DeltaMean):
            means = [sum(each[i][here].double() * each[1].share for each in both) for i in (0, 2)]
            torch.testing.assert_close(*means, rtol=0, atol=1e-6)


def test_buffers_travel_with_the_last_fragment() -> None:
    class Counting(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

    def body(rank: FaultyRank) -> Any:
        seen: Any = rank.module.seen
        seen.fill_(float(rank.number))
        found = []
        for _ in range(6):
            learn(rank)
            report = rank.averager.tick(rank.averager.plan(), 1.0)
            assert report is not None
            found.append((seen.tolist(), report.payload_bytes))
        return found

    for number, found in enumerate(values(2, body, module=Counting, fragments=3, schedule=EveryNSteps(3))):
        own, mean = [float(number)] * 2, [0.5, 0.5]
        assert found == [(own, 20), (own, 40), (mean, 28), (mean, 20), (mean, 40), (mean, 28)]


# ---- ranks that are late, lost, or not finite ----


@pytest.mark.parametrize(("missed", "steps"), [(1, 0), (1, 1), (3, 1), (4, 0)])
@pytest.mark.parametrize("before", ["absent from all", "its result waits", "it has taken its result"])
def test_an_absent_replica_moves_by_what_each_fragment_did_meanwhile(missed: int, steps: int, before: str) -> None:
    """Its own steps stay, those after its last snapshot, and of other fragments those before it."""
    sent_before = before != "absent from all"
    turn = Turnstile()
    timeouts = Timeouts(grace=timedelta(seconds=1), reform=timedelta(seconds=60))
    committed: list[int] = []

    def body(rank: FaultyRank) -> Any:
        if sent_before:
            step(rank, Action.ROUND)
        if rank.number == 0:
            if sent_before:
                take_when_there(rank)
                turn.wait("the other is silent")
            for _ in range(missed):
                step(rank, Action.ROUND)
                committed.append(take_when_there(rank).id)
            turn.set("the other went on")
            turn.wait("the other follows")  # else what it has left over would go on without that one
        else:
            buckets = rank.averager.control.buckets
            if before == "it has taken its result":
                take_when_there(rank)
            turn.set("the other is silent")
            turn.wait("the other went on")
            rank.averager.sync_points.wait(lambda: buckets.arrived is not None and buckets.arrived.id == committed[-1])
            for _ in range(steps):
                learn(rank)
            rank.averager.tick(Action.LOCAL, float(steps), stepped=steps > 0)
            turn.set("the other follows")
        own = flat(rank)
        assert rank.meet() is Arrival.OPEN
        return own, flat(rank), rank.rule_state

    found = values(2, body, module=Parts, fragments=3, schedule=NEVER, overlap=True, timeouts=timeouts)
    x = [torch.ones(sum(SIZES), dtype=torch.float64)] * 2
    base = x[1].clone()
    target = x[1].clone()
    if sent_before:
        here = PLACES[3][0]
        x = [learned(each, rank, 1) for rank, each in enumerate(x)]
        base[here] = x[1][here]
        target[here] = x[0][here] = (x[0][here] + x[1][here]) / 2
        if before == "it has taken its result":
            x[1] = torch.cat([target[here], x[1][here.stop :]])
            base[here] = target[here]
    for number in range(missed):
        here = PLACES[3][(number + sent_before) % 3]
        x[0] = learned(x[0], 0, 1)
        target[here] = x[0][here]
    x[1] = learned(x[1], 1, steps) + target - base
    for (own, _, _), expected in zip(found, x, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(bits(found[0][1]), bits(found[1][1]))


def train_and_meet(rank: FaultyRank) -> dict[str, Any]:
    train(rank, 12)
    assert rank.meet() is Arrival.OPEN
    return {"x": flat(rank), "state": rank.rule_state, "summary": rank.averager.summary}


STREAMS: dict[str, Any] = {"module": Parts, "fragments": 3, "rule": DiLoCo(), "schedule": EveryNSteps(6)}


@pytest.mark.parametrize(
    ("op", "nth", "after", "name"),
    [
        ("all_reduce", 2, False, PAYLOAD),
        ("all_reduce", 5, True, PAYLOAD),
        ("all_gather", 3, False, HEADER),
        ("all_gather", 4, True, HEADER),
    ],
)
def test_a_round_that_fails_is_repeated_and_changes_nothing(op: str, nth: int, after: bool, name: str) -> None:
    smooth = values(3, train_and_meet, **STREAMS)
    rough = values(
        3, train_and_meet, **STREAMS, scripts={1: [Fault(op=op, nth=nth, action=Fail(after=after), name=name)]}
    )
    for each, other in zip(smooth, rough, strict=True):
        assert each["summary"].rounds == other["summary"].rounds == 6
        for one, same in ((each["x"], other["x"]), *zip(each["state"].values(), other["state"].values(), strict=True)):
            assert torch.equal(bits(one), bits(same))


def test_the_others_go_on_where_one_is_lost() -> None:
    script = [Fault(op="all_reduce", nth=4, action=Kill(), name=PAYLOAD)]
    left = survivors_of(
        outcomes(3, train_and_meet, scripts={0: script}, dead_after=SOON, min_replicas=2, **STREAMS), [0]
    )
    for each in left:
        assert each["summary"].rounds == 6
        assert torch.equal(bits(each["x"]), bits(left[0]["x"]))
        assert torch.equal(each["state"]["momentum"], left[0]["state"]["momentum"])


def test_a_replica_that_is_not_finite_takes_over_all_fragments_at_once() -> None:
    def body(rank: FaultyRank) -> Any:
        train(rank, 3)
        if rank.number == 1:
            fill(rank, float("nan"))
        train(rank, 1)
        healed = flat(rank)
        work = [work.steps for work in rank.averager.ledger.work]
        train(rank, 4)
        rank.meet()
        return healed, flat(rank), work, rank.averager.summary.healed

    found = values(3, body, **STREAMS)
    assert [healed for *_, healed in found] == [0, 1, 0]
    assert [work for *_, work, _ in found] == [[2.0, 0.0, 4.0], [0.0] * 3, [2.0, 0.0, 4.0]]
    for healed, end, *_ in found:
        assert torch.isfinite(healed).all()
        assert torch.equal(bits(end), bits(found[0][1]))


# ---- sync points and synchronous steps ----


@pytest.mark.parametrize("rule", [
    DeltaMean(), DiLoCo(), DiLoCo(mixing=0.5), EASGD(), PseudoGradientPenalty(DiLoCo()),
], ids=repr)  # fmt: skip
def test_a_sync_point_twice_in_a_row_changes_no_bit(rule: Any) -> None:
    def body(rank: FaultyRank) -> Any:
        train(rank, 5)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        first, state = flat(rank), rank.rule_state
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        second = flat(rank)
        rank.averager.sync_points.resume()
        train(rank, 1)
        return first, second, state, rank.rule_state, rank.averager.agreed.num_rounds

    left, right = values(2, body, **{**STREAMS, "rule": rule})
    assert torch.equal(bits(left[0]), bits(right[0]))
    assert torch.equal(bits(left[0]), bits(left[1])) and torch.equal(bits(right[0]), bits(right[1]))
    assert left[-1] == right[-1] == 3, "a sync point is no round: the third fragment is next"
    for name, tensor in left[2].items():
        here = PLACES[3][2]
        same = torch.ones(len(tensor), dtype=torch.bool)
        same[here] = False
        assert torch.equal(bits(tensor)[same], bits(left[3][name])[same]), "only the third round has changed it"


def test_a_warm_up_ends_in_rounds_of_fragments() -> None:
    def body(rank: FaultyRank) -> Any:
        train(rank, 20)
        rank.meet()
        return flat(rank), rank.rule_state, rank.averager.summary

    options = {**STREAMS, "schedule": Warmup(EveryNSteps(6), steps=8)}
    (a, state, left), (b, other, _) = values(2, body, **options)
    assert torch.equal(bits(a), bits(b))
    assert torch.equal(state["anchor"], other["anchor"])
    assert (left.synchronous_steps, left.rounds) == (8, 6)


# ---- compression ----


@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_is_lost_where_fragments_are_compressed(world_size: int) -> None:
    """SGD on squares is linear: however replicas drift apart, their mean moves as one replica with the mean goal."""

    def body(rank: FaultyRank) -> Any:
        train(rank, 36)
        residuals = [each.carried_residual.numel() for each in rank.averager.component.average._compressed]
        rank.meet()
        return flat(rank), residuals, rank.averager.summary

    rule = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
    found = values(world_size, body, module=Parts, fragments=3, rule=rule, schedule=EveryNSteps(6), compression="int8")
    expected = learned(torch.ones(sum(SIZES), dtype=torch.float64), (world_size - 1) / 2, 36)  # pyright: ignore[reportArgumentType]
    for x, residuals, summary in found:
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=2e-6 if world_size <= 4 else 2e-2)
        assert torch.equal(bits(x), bits(found[0][0]))
        assert [numel > 0 for numel in residuals] == [world_size > 4] * 3, "each fragment has its own"
        assert summary.payload_bytes - 80 * summary.consensuses == 18 * 4 + 6 * 20  # scales and codes


# ---- checkpoints ----


def alone(fragments: int, rule: Any, module: nn.Module | None = None) -> BackgroundAverager:
    """An averager in a world of one, before it starts."""
    world, found = InProcessWorld(1), []

    def body(collectives: Any) -> None:
        replica = Replica(module or Parts(), fragments=fragments)
        config = AveragerConfig(overlap=False, fragments=fragments)
        found.append(assemble(collectives, Membership(world.store, 0, 1), replica, rule, EveryNSteps(6), config)[0])

    world.run(body)
    return found[0]


def saved_with(fragments: int, rule: Any) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """The state after some rounds; of all ranks, and rank 0's; and the shares of three ranks in a marked round."""

    def body(rank: FaultyRank) -> Any:
        train(rank, 9)
        averager = rank.averager
        with averager._box.committing:
            shares = [averager.agreed.share(averager.control.buckets.received, mine, 3) for mine in range(3)]
        return averager.state_dict(), averager.clocks(), shares

    options = {**STREAMS, "fragments": fragments, "rule": rule}
    return values(2, body, **options)[0]


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_checkpoint_goes_on_with_another_number_of_fragments(after: int) -> None:
    saved, clocks, shares = saved_with(3, DiLoCo())
    state = saved["rule_state"]
    assert {name: tensor.shape for name, tensor in state.items()} == {"anchor": (20,), "momentum": (20,)}
    for name, tensor in state.items():
        assert torch.equal(torch.cat([share["flat"][name] for share in shares]), tensor)
    averager = alone(after, DiLoCo())
    averager.load_state_dict(saved, clocks)
    again = averager.state_dict()
    for name, tensor in state.items():
        assert torch.equal(bits(again["rule_state"][name]), bits(tensor))
    assert (again["num_rounds"], averager.rule_state.next_fragment) == (4, 4 % after)
    # Of the nine steps, the rounds at the eighth, the fourth and the sixth hold all but so many.
    assert averager.ledger.since_round == ([1.0, 5.0, 3.0] if after == 3 else [5.0] * after)


def test_what_belongs_to_whole_fragments_goes_on_with_the_same_ones_only() -> None:
    rule = DiLoCo(outer_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
    saved, clocks, _ = saved_with(3, rule)
    averager = alone(3, rule)
    averager.load_state_dict(saved, clocks)
    momenta = [
        [state["momentum_buffer"] for state in each["state"].values()]
        for each in averager.state_dict()["rule_state"]["optimizer"]["fragments"]
    ]
    assert [sum(buffer.numel() for buffer in each) for each in momenta] == [5, 10, 5]
    with pytest.raises(ValueError, match=r"`fragments=2` cannot go on .* `fragments=3`: `optimizer` of .*DiLoCo"):
        alone(2, rule).load_state_dict(saved, clocks)
    rule = PseudoGradientPenalty(DiLoCo())  # the norms of a fragment's messages are those of no other one's
    with pytest.raises(ValueError, match=r"`fragments=3` cannot go on .* `fragments=1`: `norms` of "):
        alone(3, rule).load_state_dict(*saved_with(1, rule)[:2])


def test_parameters_that_are_unfrozen_join_the_fragments() -> None:
    class Frozen(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.parts[1].requires_grad_(False)

    def body(rank: FaultyRank) -> Any:
        trained = [p for i, p in enumerate(parts_of(rank)) if i != 1]
        for _ in range(6):
            action = rank.averager.plan()
            with torch.no_grad():
                for p in trained:
                    p -= LR * (p - rank.goal)
            rank.averager.tick(action, 1.0)
        assert rank.meet(SyncPointKind.EPOCH_END) is Arrival.OPEN
        before = rank.rule_state
        parts_of(rank)[1].requires_grad_(True)
        rank.averager.sync_points.resume()
        carried = rank.rule_state
        train(rank, 6)
        assert rank.meet(SyncPointKind.EPOCH_END, 1) is Arrival.OPEN
        return before, carried, flat(rank)

    options = {**STREAMS, "module": Frozen}
    (before, carried, left), (_, _, right) = values(2, body, **options)
    assert torch.equal(bits(left), bits(right))
    assert not torch.equal(left[5:11], torch.ones(6))
    for name in ("anchor", "momentum"):
        assert torch.equal(torch.cat([carried[name][:5], carried[name][11:]]), before[name])
    assert carried["anchor"][5:11].tolist() == [1.0] * 6


# ---- arguments ----


def test_a_fragment_holds_at_least_one_parameter() -> None:
    Replica(Parts(), fragments=5)
    with pytest.raises(ValueError, match=r"`fragments=6` must be at most the number of parameters .*, 5"):
        Replica(Parts(), fragments=6)


@pytest.mark.parametrize(
    ("fragments", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_a_number_of_fragments_that_cannot_be(fragments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"`fragments={fragments}`"):
        AveragerConfig(fragments=fragments)
    assert AveragerConfig(fragments=4).settings()["fragments"] == 4


def test_parameters_of_any_kind_lie_in_their_fragments() -> None:
    """Complex ones, and those of 16 bits with what they lack of fp32."""
    tensors = [torch.ones(3, dtype=torch.complex64), torch.ones(4, dtype=torch.bfloat16)]
    module = nn.Module()
    module.parts = nn.ParameterList([*tensors, torch.full((5,), 1.0 + 2.0**-40, dtype=torch.float64)])
    replica = Replica(module, fragments=3)
    bucket = torch.zeros(replica.numel)
    for fragment, numel in enumerate((6, 4, 5)):
        assert bucket.count_nonzero() == (0, 3, 7)[fragment], "of a complex one, the imaginary part is 0"
        replica.pack_(bucket, fragment)
        assert replica.of_rule(bucket, fragment).numel() == numel
    assert bucket.tolist() == [1.0, 0.0] * 3 + [1.0] * 9
    target = torch.full_like(bucket, 1.0 + 2.0**-12)
    for fragment in range(3):
        replica.merge_(target, None, with_state=False, fragments=(fragment,))
    again = torch.zeros_like(bucket)
    replica.pack_(again)
    assert torch.equal(again, target), "16 bits and their remainder hold it"
