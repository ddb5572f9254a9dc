"""Laws that hold for every rule, each against a float64 oracle, over a small model of the engine's part."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import PseudoGradientPenalty, Round
from tests.algorithms.catalogue import COMING, RULES, RuleRow
from tests.algorithms.coming import Eager
from tests.algorithms.replicas import Replicas, fill

SHAPES = st.lists(st.sampled_from([(), (0,), (1,), (3,), (2, 3), (4, 1, 2), (17,)]), min_size=1, max_size=4).filter(
    lambda shapes: any(torch.Size(s).numel() for s in shapes)
)
SEEDS = st.integers(0, 2**31)
WORK = st.floats(0.125, 64)
LAW = settings(max_examples=20, deadline=None)
ALL = [*RULES, *COMING]
OVERLAPPING = [row for row in ALL if row.make().overlappable]
FOLLOWING = [row for row in ALL if row.make().absent_follow]


def every(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def start_of(shapes, seed):
    return [fill(torch.Size(s).numel(), seed + i).view(s) for i, s in enumerate(shapes)]


def tensors_of(state, but=frozenset()):
    """The state's tensors, those of a state within it too."""
    found = []
    for name, value in state._asdict().items():
        if isinstance(value, torch.Tensor) and name not in but:
            found.append(value)
        elif hasattr(value, "_asdict"):
            found += tensors_of(value)
    return found


def close(actual, expected, scale=8.0):
    """Equal up to a few roundings of fp32 numbers of this size."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=scale * 2e-6)


@every(ALL)
@LAW
@given(shapes=SHAPES, seed=SEEDS, count=st.sampled_from([1, 2, 4]), rounds=st.integers(1, 3))
def test_consensus_is_a_fixed_point_to_the_bit(row: RuleRow, shapes, seed, count, rounds) -> None:
    start = start_of(shapes, seed)
    world = Replicas(row.make(), start, count)
    for _ in range(rounds):
        for replica in world.all:
            replica.work = 1.0
        world.send()
        world.receive()
    for replica in world.all:
        for p, q in zip(replica.params, start, strict=True):
            assert torch.equal(p.view(torch.int32), q.view(torch.int32))


@every(ALL)
@LAW
@given(shapes=SHAPES, seed=SEEDS, work=st.lists(WORK | st.just(0.0), min_size=1, max_size=4).filter(any))
def test_a_merge_leaves_the_same_state_on_every_replica_and_the_same_target(row: RuleRow, shapes, seed, work) -> None:
    world = Replicas(row.make(), start_of(shapes, seed), len(work))
    for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
        replica.learn(fill(replica.layout.numel, seed + 100 + rank), amount)
    world.send()
    world.receive()
    first = world.all[0]
    for replica in world.all:
        if world.rule.absent_follow:
            assert torch.equal(replica.last_target, first.last_target)
        for mine, theirs in zip(*(tensors_of(r.state, world.rule.per_replica) for r in (replica, first)), strict=True):
            assert torch.equal(mine, theirs)


@every(ALL)
@LAW
@given(seed=SEEDS)
def test_sent_is_the_snapshot_again_after_the_merge(row: RuleRow, seed) -> None:
    rule, start = row.make(), fill(33, seed)
    layout = Replicas(rule, [start], 1).all[0].layout
    state = rule.init(start, layout)
    snapshot = start + fill(33, seed + 1)
    sent = snapshot.clone()
    scalars = rule.message_(sent, state)
    rule.merge_(sent, sent.clone(), state, Round(id=0, rank=0, work=(1.0,), scalars=(scalars,), lr=(0.1,)))
    close(sent, snapshot)


@every([row for row in RULES if row.is_mean])
@LAW
@given(shapes=SHAPES, seed=SEEDS, work=st.lists(WORK, min_size=1, max_size=5), rounds=st.integers(1, 3))
def test_with_zero_delay_all_take_the_exact_work_weighted_mean(row: RuleRow, shapes, seed, work, rounds) -> None:
    world = Replicas(row.make(), start_of(shapes, seed), len(work))
    for number in range(rounds):
        for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
            replica.learn(fill(replica.layout.numel, seed + 100 * number + rank + 1), amount)
        expected = world.weighted(work)
        world.send()
        world.receive()
        for replica in world.all:
            close(replica.flat(), expected)


@every([row for row in OVERLAPPING if row.is_mean])
@LAW
@given(shapes=SHAPES, seed=SEEDS, work=st.lists(WORK, min_size=1, max_size=5))
def test_an_overlapped_merge_conserves_the_work_weighted_mean(row: RuleRow, shapes, seed, work) -> None:
    world = Replicas(row.make(), start_of(shapes, seed), len(work))
    for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
        replica.learn(fill(replica.layout.numel, seed + rank + 1), amount)
    world.send()
    for rank, replica in enumerate(world.all):
        replica.learn(fill(replica.layout.numel, seed + rank + 50))
    before = world.weighted(work)
    world.receive()
    close(world.weighted(work), before)


@every([row for row in OVERLAPPING if not row.make().mixes])
@LAW
@given(seed=SEEDS, work=st.lists(WORK, min_size=2, max_size=4))
def test_progress_in_flight_is_added_to_the_target(row: RuleRow, seed, work) -> None:
    world = Replicas(row.make(), start_of([(9,)], seed), len(work))
    for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
        replica.learn(fill(9, seed + rank + 1), amount)
    world.send()
    progress = [fill(9, seed + rank + 50) for rank in range(len(work))]
    for replica, step in zip(world.all, progress, strict=True):
        replica.learn(step)
    world.receive()
    for replica, step in zip(world.all, progress, strict=True):
        close(replica.flat(), replica.last_target.double() + step.double())


@every([row for row in FOLLOWING if row.make().overlappable])
@LAW
@given(seed=SEEDS, rounds=st.integers(1, 3), gate_first=st.booleans())
def test_an_absent_replica_keeps_its_progress_and_follows_the_target(row: RuleRow, seed, rounds, gate_first) -> None:
    world = Replicas(row.make(), start_of([(9,)], seed), 3)
    if gate_first:  # the agreed model is the last target then, not the anchor
        for rank, replica in enumerate(world.all):
            replica.learn(fill(9, seed + rank + 70), 1.0)
        world.sync_point([1.0, 2.0, 3.0])
    absent, progress = world.all[1], fill(9, seed + 9)
    absent.learn(progress)
    for number in range(rounds):
        for rank in (0, 2):
            world.all[rank].learn(fill(9, seed + 10 * number + rank), rank + 1.0)
        world.send()
        assert absent.sent is None
        world.receive()
    for replica in world.all:
        assert torch.equal(replica.last_target, absent.last_target)
    close(absent.flat(), absent.last_target.double() + progress.double(), scale=16)


@every(ALL)
@LAW
@given(seed=SEEDS, work=st.lists(WORK, min_size=2, max_size=4))
def test_a_rendezvous_twice_in_a_row_changes_no_bit_and_no_state(row: RuleRow, seed, work) -> None:
    world = Replicas(row.make(), start_of([(9,), (2, 2)], seed), len(work))
    for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
        replica.learn(fill(13, seed + rank + 1), amount)
    before = [[t.clone() for t in tensors_of(r.state)] for r in world.all]
    world.sync_point(work)
    once = [r.flat() for r in world.all]
    states = before if world.rule.absent_follow else [[t.clone() for t in tensors_of(r.state)] for r in world.all]
    world.sync_point([1.0] * len(work))
    for replica, shown, state in zip(world.all, once, states, strict=True):
        assert torch.equal(replica.flat(), shown)
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(replica.state), state, strict=True))


@every(ALL)
@LAW
@given(seed=SEEDS, rounds=st.integers(0, 3))
def test_state_survives_a_checkpoint_and_training_goes_on_equally(row: RuleRow, seed, rounds) -> None:
    rule, start = row.make(), start_of([(2, 3), (5,)], seed)
    world = Replicas(rule, start, 2)

    def play(world: Replicas, first: int, last: int) -> None:
        for number in range(first, last):
            for rank, replica in enumerate(world.all):
                replica.learn(fill(11, seed + 10 * number + rank), rank + 1.0)
            world.send()
            world.receive()

    play(world, 0, rounds)
    file = io.BytesIO()
    torch.save([rule.state_dict(replica.state) for replica in world.all], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = Replicas(row.make(), [torch.zeros_like(p) for p in start], 2)
    for mine, theirs, state in zip(resumed.all, world.all, saved, strict=True):
        mine.state = rule.load_state_dict(mine.state, state)
        mine.params = [p.clone() for p in theirs.params]
    play(world, rounds, rounds + 2)
    play(resumed, rounds, rounds + 2)
    for mine, theirs in zip(resumed.all, world.all, strict=True):
        assert torch.equal(mine.flat(), theirs.flat())
        for a, b in zip(tensors_of(mine.state), tensors_of(theirs.state), strict=True):
            assert torch.equal(a, b)


@every(ALL)
def test_foreign_state_is_refused_and_changes_nothing(row: RuleRow) -> None:
    rule = row.make()
    replica = Replicas(rule, [fill(4, 0)], 1).all[0]
    before = [t.clone() for t in tensors_of(replica.state)]
    with pytest.raises(ValueError, match="saved state"):
        rule.load_state_dict(replica.state, {"something": torch.zeros(4)})
    larger = Replicas(rule, [fill(5, 0)], 1).all[0]
    if [t.shape for t in before] != [t.shape for t in tensors_of(larger.state)]:
        with pytest.raises(ValueError, match="shape of"):
            rule.load_state_dict(replica.state, rule.state_dict(larger.state))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(replica.state), before, strict=True))


@every([row for row in ALL if not isinstance(row.make(), PseudoGradientPenalty)])  # a norm is of all elements
@LAW
@given(seed=SEEDS, work=st.lists(WORK, min_size=1, max_size=3), rounds=st.integers(1, 3))
def test_fragments_with_states_of_their_own_make_the_whole(row: RuleRow, seed, work, rounds) -> None:
    start = start_of([(4,), (2, 3), (1,)], seed)
    parts = (start[:1], start[1:])
    whole, *fragments = (Replicas(row.make(), each, len(work)) for each in (start, *parts))
    for number in range(rounds):
        for rank, amount in enumerate(work):
            progress = fill(11, seed + 10 * number + rank)
            for world, mine in ((whole, progress), (fragments[0], progress[:4]), (fragments[1], progress[4:])):
                world.all[rank].learn(mine, amount)
        for world in (whole, *fragments):
            world.send()
            world.receive()
    for rank in range(len(work)):
        assert torch.equal(whole.all[rank].flat(), torch.cat([world.all[rank].flat() for world in fragments]))


@LAW
@given(seed=SEEDS, work=st.lists(WORK, min_size=1, max_size=3))
def test_eager_shows_fresh_progress_at_its_weight_and_reports_all_of_it(seed, work) -> None:
    world = Replicas(Eager(outer_lr=0.5), [fill(7, seed)], len(work))
    anchor, shares = fill(7, seed).double(), [w / sum(work) for w in work]
    before = [fill(7, seed + rank) for rank in range(len(work))]
    for number in range(1, 4):
        for replica, progress, amount in zip(world.all, before, work, strict=True):
            replica.learn(progress if number == 1 else torch.zeros(7), amount)
        world.send()
        fresh = [fill(7, seed + 10 * number + rank) for rank in range(len(work))]
        for replica, progress in zip(world.all, fresh, strict=True):
            replica.learn(progress)
        world.receive()
        anchor = anchor + 0.5 * sum(w * p.double() for w, p in zip(shares, before, strict=True))
        for replica, share, progress in zip(world.all, shares, fresh, strict=True):
            close(replica.last_target, anchor)
            close(replica.flat(), anchor + 0.5 * share * progress.double())
        before = fresh
