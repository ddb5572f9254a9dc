"""Averages over time that take up a mean which is some updates old: every update since the snapshot is kept."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from lightning_async.algorithms.schedules import Action
from lightning_async.engine.replica import Replica
from lightning_async.engine.running_means import PIECE, RunningMean, count, late_mean, merge_late_, remaining
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import NEVER
from tests.engine.ranks import Rank, rank_of
from tests.engine.test_merge import Half

# ---- the law ----

values = st.floats(0.0, 100.0)
decays = st.one_of(st.just(0.0), st.floats(0.001, 1.0))


def late(now: float, mean: float, snapshot: float, part: float, gone: bool, positive: bool) -> float:
    x, m, s, p, zero = (torch.tensor([each], dtype=torch.float64) for each in (now, mean, snapshot, part, 0.0))
    return late_mean(x, m, s, p, torch.tensor([gone]), torch.tensor([positive]), zero).item()


@given(decays, st.lists(st.floats(-100.0, 100.0), max_size=20), st.floats(-100.0, 100.0), st.floats(-100.0, 100.0))
def test_it_is_what_updates_from_the_mean_would_have_made(
    decay: float, updates: list[float], snapshot: float, mean: float
) -> None:
    mine, other = snapshot, mean
    for update in updates:
        mine = decay * mine + (1.0 - decay) * update
        other = decay * other + (1.0 - decay) * update
    found = late(mine, mean, snapshot, decay ** len(updates), bool(updates) and decay != 1.0, False)
    assert math.isclose(found, other, rel_tol=1e-12, abs_tol=1e-11)


@given(st.floats(0.0, 1.0), values, values, values)
def test_what_is_positive_stays_so(part: float, update: float, snapshot: float, mean: float) -> None:
    now = torch.tensor(part * snapshot + update, dtype=torch.bfloat16).double().item()  # as far as 16 bits tell
    assert late(now, mean, snapshot, part, True, True) >= part * mean
    assert late(now, mean, snapshot, 1.0, False, True) >= min(now, mean)


def test_a_variance_that_differences_have_rounded_below_zero_is_none() -> None:
    x, m, s, p, one = (torch.tensor([each]) for each in (1e-9, -1.0000001, -1.0, 1.0, 1.0))
    assert late_mean(x, m, s, p, torch.tensor([False]), torch.tensor([True]), one).item() == 0.0


@given(values, values)
def test_what_has_not_changed_takes_the_mean_to_the_bit(now: float, mean: float) -> None:
    assert late(now, mean, now, 1.0, False, False) == mean
    assert late(now + 1.0, mean, mean, 1.0, False, False) == now + 1.0


def test_infinite_elements_that_are_meant_stay() -> None:
    assert late(-math.inf, -math.inf, -math.inf, 1.0, False, False) == -math.inf
    assert late(0.0, -math.inf, -math.inf, 1.0, False, False) == 0.0, "one that has changed since"


@given(st.integers(0, 50), st.integers(0, 50))
def test_of_a_mean_of_all_updates_so_far_the_share_of_the_old_ones_is_left(before: int, since: int) -> None:
    counter = torch.tensor(before)
    means = [RunningMean(None, counter), RunningMean(0.5, counter), RunningMean(0.5, float(3 * before), 3)]
    then = count(means)
    counter += since
    means[2] = RunningMean(0.5, float(3 * (before + since)), 3)
    left = remaining(means, then, torch.device("cpu"))
    assert left[0].tolist() == [before / (before + since) if since else 1.0, float(since > 0)]
    assert left[1].tolist() == left[2].tolist() == [0.5**since, float(since > 0)]


def test_an_average_that_has_begun_anew_is_left_alone() -> None:
    counter = torch.tensor(4)
    x, means = torch.tensor([7.0]), [RunningMean(0.5, counter)]
    then = count(means)
    counter.fill_(1)
    merge_late_([x], torch.tensor([3.0]), torch.tensor([1.0]), means, then)
    assert x.item() == 7.0


def test_tensors_of_any_size_and_kind() -> None:
    """Large ones go in parts; fp64 keeps its digits, 16 bits are rounded once."""
    large = torch.arange(2.5 * PIECE).remainder(64.0)
    tensors = [
        torch.tensor(1 / 3, dtype=torch.float64), torch.zeros(0), large.clone(),
        torch.ones(3, 4, dtype=torch.bfloat16).t(), torch.tensor([[2.0]]),
    ]  # fmt: skip
    counters = [torch.tensor(5.0), torch.tensor(5), torch.tensor(5.0), torch.tensor(5), torch.tensor(5)]
    means = [RunningMean(0.5, counter) for counter in counters]
    then, snapshot = count(means), torch.cat([t.reshape(-1).float() for t in tensors])
    for counter in counters:
        counter += 1
    merge_late_(tensors, snapshot + 2.0, snapshot, means, then)
    assert tensors[0].item() == 1 / 3 + 0.5 * (float(snapshot[0] + 2.0) - float(snapshot[0]))
    assert torch.equal(tensors[2], large + 1.0)
    assert tensors[3].tolist() == [[2.0] * 3] * 4
    assert tensors[4].tolist() == [[3.0]]


# ---- layers ----


class Statistics(nn.Module):
    """A weight that averaging needs, and a layer with running statistics."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8))
        self.norm = layer

    def see(self, *batches: float) -> None:
        """Each a batch of this mean, and of twice the variance 1 (unbiased)."""
        for mean in batches:
            batch = torch.tensor([[mean - 1.0], [mean + 1.0]])
            self.norm(batch.view(1, 1, 2) if isinstance(self.norm, nn.InstanceNorm1d) else batch)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "momentum 0.5": lambda: nn.BatchNorm1d(1, momentum=0.5, affine=False),
    "momentum 0.75": lambda: nn.BatchNorm1d(1, momentum=0.75, affine=False),
    "momentum 1": lambda: nn.BatchNorm1d(1, momentum=1.0, affine=False),
    "momentum 0": lambda: nn.BatchNorm1d(1, momentum=0.0, affine=False),
    "cumulative": lambda: nn.BatchNorm1d(1, momentum=None, affine=False),
    "instance": lambda: nn.InstanceNorm1d(1, momentum=0.5, track_running_stats=True),
    "instance, momentum None": lambda: nn.InstanceNorm1d(1, momentum=None, track_running_stats=True),  # pyright: ignore
}


@pytest.mark.parametrize("batches", [(), (8.0,), (8.0, 16.0), (8.0, -4.0, 2.0)], ids=len)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_ends_where_its_batches_would_have_led_from_the_mean(name: str, batches: tuple[float, ...]) -> None:
    module = Statistics(LAYERS[name]())
    replica = Replica(module)
    module.see(4.0)
    snapshot = torch.zeros(replica.numel)
    replica.pack_(snapshot, fragment=0)
    updates = replica.updates()
    oracle = copy.deepcopy(module)
    target = snapshot.clone()
    target[8:] += torch.tensor([6.0, 3.0])
    for buffer in (oracle.norm.running_mean, oracle.norm.running_var):
        buffer += 6.0 if buffer is oracle.norm.running_mean else 3.0  # pyright: ignore
    for each in (module, oracle):
        each.see(*batches)
        if isinstance(each.norm, nn.BatchNorm1d):  # InstanceNorm writes to its buffers then, too
            each.norm.eval()
            each.see(100.0)  # which is no update
    replica.merge_late_(target, snapshot, updates)
    for mine, expected in zip(module.norm.buffers(), oracle.norm.buffers(), strict=True):
        if name == "cumulative" and len(batches) > 1:  # thirds
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=0.0)
        else:
            assert torch.equal(mine, expected)


def test_forward_passes_are_counted_and_not_steps() -> None:
    """BatchNorm in a loop, and one that is frozen: `num_batches_tracked` tells."""
    module = Statistics(nn.BatchNorm1d(1, momentum=0.5, affine=False))
    replica, snapshot = Replica(module), torch.zeros(10)
    replica.pack_(snapshot, fragment=0)
    updates, target = replica.updates(), torch.full((10,), 16.0)
    module.see(0.0, 0.0, 0.0)
    replica.merge_late_(target, snapshot.clone(), updates)
    assert module.norm.running_mean.item() == 16.0 * 0.125  # pyright: ignore
    module.norm.eval()
    updates = replica.updates()
    replica.pack_(snapshot, fragment=0)
    module.see(0.0, 0.0)
    replica.merge_late_(target, snapshot, updates)
    assert module.norm.running_mean.item() == 16.0  # pyright: ignore


# ---- replicas ----


def in_flight(rank: Rank, meanwhile: Callable[[], None]) -> None:
    """One round, whose result this replica takes after ``meanwhile``."""
    averager = rank.averager
    averager.tick(Action.ROUND, 1.0)
    meanwhile()
    buckets, changed = averager.control.buckets, averager.control.shared_state.changed
    with changed:
        assert changed.wait_for(lambda: buckets.arrived is not None, timeout=60.0)
    averager.tick(Action.LOCAL, 1.0)


def on_ranks(body: Callable[[Rank, Any, int], Any], make: Callable[[], nn.Module], **kwargs: Any) -> list[Any]:
    world = InProcessWorld(2)

    def on_rank(collectives: Any) -> Any:
        module = make()
        with rank_of(collectives, world.store, 0.0, module=module, schedule=NEVER, **kwargs) as rank:
            return body(rank, module, collectives.rank)

    return world.run(on_rank)


def cumulative_then(value: float, before: int, since: list[float]) -> float:
    for i, update in enumerate(since):
        value += (update - value) / (before + i + 1)
    return value


@pytest.mark.parametrize("mixes", [False, True], ids=["DeltaMean", "a rule that mixes"])
@pytest.mark.parametrize("momentum", [0.5, None])
@pytest.mark.parametrize("policy", ["average", "broadcast", "recompute", "keep"])
def test_replicas_that_see_unequally_many_batches_while_rounds_are_in_flight(
    policy: Any, momentum: float | None, mixes: bool
) -> None:
    seen = ([1.0] * 4, [5.0] * 2)
    later = ([3.0] * 4, [9.0] * 6)

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.see(*seen[number])
        in_flight(rank, lambda: module.see(*later[number]))
        after = module.norm.running_mean.item()
        in_flight(rank, lambda: None)  # nobody has changed since
        same = module.norm.running_mean.item()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return after, same, module.norm.running_mean.item(), module.norm.num_batches_tracked.item()

    made = on_ranks(
        body,
        lambda: Statistics(nn.BatchNorm1d(1, momentum=momentum, affine=False)),
        buffers=policy,
        rule=Half() if mixes else None,
    )

    def ends(rank: int, value: float) -> float:
        if momentum is None:
            return cumulative_then(value, len(seen[rank]), later[rank])
        for batch in later[rank]:
            value = 0.5 * value + 0.5 * batch
        return value

    snapshots = [seen[0][0], seen[1][0]] if momentum is None else [1.0 - 2.0**-4, 5.0 * (1.0 - 2.0**-2)]
    mean = {"broadcast": snapshots[0]}.get(policy, sum(snapshots) / 2)
    expected = [ends(rank, snapshots[rank] if policy == "keep" else mean) for rank in (0, 1)]
    second = {"broadcast": expected[0]}.get(policy, sum(expected) / 2)
    for rank, (after, same, agreed, tracked) in enumerate(made):
        assert after == pytest.approx(expected[rank], rel=1e-6)
        assert same == pytest.approx(expected[rank] if policy == "keep" else second, rel=1e-6)
        assert tracked == 8, "the largest"
        assert policy == "keep" or agreed == made[0][2], "to the bit"


def test_an_absent_replica_keeps_its_statistics_and_is_in_the_next_mean() -> None:
    done = threading.Event()
    soon = Timeouts(payload=timedelta(seconds=30), grace=timedelta(seconds=0.2), reform=timedelta(seconds=60))

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.see(*([8.0, 8.0] if number else [16.0]))
        if number == 0:
            in_flight(rank, lambda: module.see(0.0))
            done.set()
        assert done.wait(60.0)
        alone = module.norm.running_mean.item()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return alone, module.norm.running_mean.item()

    (first, agreed), (second, agreed2) = on_ranks(
        body, lambda: Statistics(nn.BatchNorm1d(1, momentum=0.5, affine=False)), config={"timeouts": soon}
    )
    assert (first, second) == (4.0, 6.0)
    assert agreed == agreed2


def test_a_buffer_of_which_nothing_is_known_moves_as_parameters_do() -> None:
    def make() -> nn.Module:
        module = Statistics(nn.Identity())
        module.register_buffer("codebook", torch.tensor([2.0, 2.0]))
        return module

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.codebook += float(2 * number)

        def meanwhile() -> None:
            module.codebook[0] += 8.0 * (1 + number)

        in_flight(rank, meanwhile)
        return module.codebook.tolist()

    assert on_ranks(body, make) == [[3.0 + 8.0, 3.0], [3.0 + 16.0, 3.0]]


def test_a_replica_that_is_healed_takes_over_what_it_gets() -> None:
    """It has no snapshot to move from, and its updates since came from what was not finite."""

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.see(8.0)
        if number == 1:
            rank.x.fill_(float("nan"))
        in_flight(rank, lambda: module.see(64.0))
        return module.norm.running_mean.item()

    assert on_ranks(body, lambda: Statistics(nn.BatchNorm1d(1, momentum=0.5, affine=False))) == [34.0, 4.0]
