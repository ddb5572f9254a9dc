"""Gradients that leave during the backward pass, on in-process ranks, against plain means in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_async.algorithms import EveryNSteps, Synchronous, Warmup
from lightning_async.engine import backward
from lightning_async.engine.backward import spans
from lightning_async.engine.gradients import overlap
from lightning_async.engine.gradients.window import Window
from lightning_async.engine.shared_state import Arrival
from lightning_async.engine.timeouts import Timeouts
from lightning_async.flat import ROOM, FlatLayout
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, LIMIT_S, PAYLOAD, FaultyRank, Turnstile, outcomes, values

SHAPES = ((3, 2), (5,), (2, 2), (7,), ())


class Net(nn.Module):
    """Its loss uses the parameters that it is told to, with a gradient that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.full(shape, 1.0 + i)) for i, shape in enumerate(SHAPES)])

    def loss(self, factors: dict[int, float]) -> Tensor:
        """Each parameter in ``factors`` gets that as its gradient, everywhere."""
        return torch.stack([factor * self.p[i].sum() for i, factor in factors.items()]).sum()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that five small parameters leave in three parts."""
    monkeypatch.setattr(backward, "_FIRST_BYTES", 8)
    monkeypatch.setattr(backward, "_PART_BYTES", 48)
    monkeypatch.setattr(overlap, "_LINE", 1)


def grads(net: Any) -> list[float | None]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in net.p]


def on_ranks(world_size: int, body: Callable[[FaultyRank, Any], Any], **options: Any) -> list[Any]:
    return values(world_size, lambda rank: body(rank, rank.module), module=Net, schedule=Synchronous(), **options)


def step(rank: FaultyRank, net: Any, *losses: dict[int, float], samples: float = 1.0, scale: float = 1.0) -> None:
    """One synchronous step, whose backward passes are of these losses."""
    planned = rank.averager.plan()
    net.zero_grad(set_to_none=True)
    rank.gradients.begin_backward(samples, scale)
    for factors in losses:
        net.loss(factors).mul(scale).backward()
    rank.gradients.reduce_(samples, scale)
    rank.averager.tick(planned, samples)


def every(factor: float) -> dict[int, float]:
    return dict.fromkeys(range(len(SHAPES)), factor)


@given(sizes=st.lists(st.integers(0, 40), max_size=12))
def test_parts_cover_a_layout_from_its_tail_by_whole_tensors(sizes: list[int]) -> None:
    layout = FlatLayout([torch.empty(size) for size in sizes])
    found = spans(layout)
    assert [i for span in found[::-1] for i in range(span.first, span.last)] == list(range(len(sizes)))
    assert [x for span in found[::-1] for x in range(span.start, span.end)] == list(range(layout.numel))
    for span in found:
        assert sum(layout.sizes[span.first : span.last]) == span.end - span.start
        assert 4 * (span.end - span.start) <= 48 or sum(1 for n in layout.sizes[span.first : span.last] if n) == 1


def test_the_first_parts_sum_is_there_before_the_backward_pass_is_over() -> None:
    """A hook of the first parameter waits for it: with a sum after the pass it would wait for ever."""
    turn = Turnstile()

    def body(rank: FaultyRank, net: Any) -> Any:
        large, seen = rank.averager.control.transfer.large, []

        def told(buffer: Tensor, *args: Any) -> Any:
            pending = all_reduce(buffer, *args)
            turn.set(f"{rank.number} has begun a sum")
            return pending

        all_reduce = large.all_reduce
        large.all_reduce = told  # pyright: ignore[reportAttributeAccessIssue]
        net.p[0].register_hook(lambda grad: seen.append(turn.wait(f"{rank.number} has begun a sum")))
        step(rank, net, every(1.0 + rank.number))
        return grads(net), len(seen)

    for found, seen in on_ranks(2, body):
        assert (found, seen) == ([1.5] * len(SHAPES), 1)


@pytest.mark.parametrize("line", [4, 16, 64])
def test_parts_begin_on_lines_and_what_lies_before_goes_with_the_next(line: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(overlap, "_LINE", line)

    def body(rank: FaultyRank, net: Any) -> Any:
        large, starts = rank.averager.control.transfer.large, []

        def told(buffer: Tensor, *args: Any) -> Any:
            starts.append(buffer.storage_offset() - ROOM)
            return all_reduce(buffer, *args)

        all_reduce = large.all_reduce
        large.all_reduce = told  # pyright: ignore[reportAttributeAccessIssue]
        step(rank, net, {i: i + rank.number for i in range(len(SHAPES))})
        starts.clear()
        step(rank, net, {i: 2.0 * i + rank.number for i in range(len(SHAPES))})
        return grads(net), starts

    for found, starts in on_ranks(2, body):
        assert found == [2.0 * i + 0.5 for i in range(len(SHAPES))]
        assert [start % line for start in starts[:-1]] == [0] * (len(starts) - 1)
        assert starts[-1] == -ROOM  # with the tag


few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
losses = st.lists(st.dictionaries(st.integers(0, 4), st.integers(-3, 3).map(float), max_size=5), max_size=3)


@few
@given(
    steps=st.lists(st.tuples(losses, losses), min_size=1, max_size=4),
    samples=st.tuples(st.sampled_from([1.0, 2.0, 6.0]), st.sampled_from([1.0, 3.0])),
)
def test_whatever_backward_passes_a_step_has_its_gradients_are_the_weighted_mean(steps: Any, samples: Any) -> None:
    """Passes that use other parameters than those before, none at all, or the same ones again, unlike on each rank."""

    def body(rank: FaultyRank, net: Any) -> Any:
        told = []
        for both in steps:
            step(rank, net, *filter(None, both[rank.number]), samples=samples[rank.number], scale=2.0**rank.number)
            told.append([None if g is None else g / 2.0**rank.number for g in grads(net)])
        return told

    for found in on_ranks(2, body):
        for both, mine in zip(steps, found, strict=True):
            for i, gradient in enumerate(mine):
                own = [[f[i] for f in passes if i in f] for passes in both]
                if not any(own):
                    assert gradient is None
                    continue
                mean = sum(n * sum(each) for n, each in zip(samples, own, strict=True)) / sum(samples)
                assert gradient == pytest.approx(mean, abs=1e-6)


def test_gradients_that_are_changed_behind_the_backward_pass_are_seen() -> None:
    def body(rank: FaultyRank, net: Any) -> Any:
        told = []
        for way in ("in place", "another", "none", "sparse"):
            planned = rank.averager.plan()
            net.zero_grad(set_to_none=True)
            rank.gradients.begin_backward(1.0)
            net.loss(every(1.0)).backward()
            if rank.number == 1:
                p = net.p[4 if way != "sparse" else 3]
                if way == "in place":
                    p.grad.mul_(5.0)
                else:
                    p.grad = {"another": p.grad * 3.0, "none": None, "sparse": (p.grad * 7.0).to_sparse()}[way]
            rank.gradients.reduce_(1.0)
            rank.averager.tick(planned, 1.0)
            told.append(grads(net))
        return told

    for found in on_ranks(2, body):
        assert found == [[1, 1, 1, 1, 3], [1, 1, 1, 1, 2], [1, 1, 1, 1, 0.5], [1, 1, 1, 4, 1]]


class Odd(nn.Module):
    """Autograd gives two parameters one gradient, and a third one that is conjugated when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def loss(self, factor: float) -> Tensor:
        phase = torch.view_as_real(self.phase.conj().resolve_conj()) * torch.tensor([1.0, 2.0])
        return factor * ((torch.stack([*self.same]).sum(0) * torch.arange(3)).sum() + phase.sum())


@pytest.mark.parametrize("early", [True, False])
def test_gradients_that_share_memory_or_are_yet_to_be_conjugated(early: bool) -> None:
    def body(rank: FaultyRank) -> Any:
        net: Any = rank.module
        planned, window = rank.averager.plan(), Window(rank.gradients)
        if early:
            rank.gradients.begin_backward(1.0)
        net.loss(1.0 + 2.0 * rank.number).backward()
        first, second = (p.grad for p in net.same)
        assert first.data_ptr() == second.data_ptr()
        assert net.phase.grad.is_conj()
        if early:
            rank.gradients.reduce_(1.0)
        else:
            window.add_(1.0)
            rank.gradients.wait_until_free()
            assert window.leave()
            rank.gradients.wait()
            rank.gradients.take_()
            rank.gradients.stepped()
        rank.averager.tick(planned, 1.0)
        found = (p.grad.resolve_conj() for p in net.parameters())
        return [(torch.view_as_real(g) if g.is_complex() else g).tolist() for g in found]

    for found in values(2, body, module=Odd, schedule=Synchronous()):
        assert found == [[[2.0, -4.0], [2.0, -4.0]], [0.0, 2.0, 4.0], [0.0, 2.0, 4.0]]


@pytest.mark.parametrize(
    ("op", "name", "most"), [("all_reduce", PAYLOAD, 6), ("all_reduce", HEADER, 4), ("all_gather", HEADER, 12)]
)
def test_a_reduction_that_fails_within_the_backward_pass_is_repeated(op: str, name: str, most: int) -> None:
    """After each of its operations: parts, the header, the commit, and what is settled before it where there are
    doubts: in the first step, where nobody knows what is used, and where that is not as in the step before."""
    uses = [every(1.0), {0: 1.0, 3: 1.0}, every(1.0), every(1.0)]

    def body(rank: FaultyRank, net: Any) -> Any:
        told = []
        for i, used in enumerate(uses):
            step(rank, net, {k: factor + rank.number + i for k, factor in used.items()})
            told.append(grads(net))
        assert rank.meet() is Arrival.OPEN
        return told, rank.averager.summary.synchronous_steps

    for nth in range(2, most + 1):
        script = [Fault(op=op, nth=nth, action=Fail(after=True), name=name)]
        for found, steps in on_ranks(2, body, scripts={0: script}):
            assert found == [[1.5 + i if k in used else None for k in range(5)] for i, used in enumerate(uses)], nth
            assert steps == 4


def test_ranks_meet_once_in_a_step_that_is_like_the_one_before() -> None:
    """For the header; twice more to commit, and to say which, where what they use is another."""

    def body(rank: FaultyRank, net: Any) -> Any:
        small, counts = rank.averager.control.transfer.small, []

        def counted(operation: Any, kind: str) -> Any:
            def count(*args: Any) -> Any:
                counts[-1][kind] += 1
                return operation(*args)

            return count

        for kind in ("all_gather", "all_reduce"):
            setattr(small, kind, counted(getattr(small, kind), kind))
        for used in (every(1.0), every(2.0), {1: 1.0} if rank.number else every(1.0), {1: 1.0}, {1: 3.0}):
            counts.append({"all_gather": 0, "all_reduce": 0})
            step(rank, net, used)
        return [tuple(each.values()) for each in counts], grads(net)

    for counts, last in on_ranks(2, body):
        assert counts == [(3, 1), (1, 0), (3, 1), (3, 1), (1, 0)]
        assert last == [None, 3.0, None, None, None]


class Crash(RuntimeError):
    pass


def last_part_of_the_second_step() -> Sequence[Fault]:
    """It fails on the way back."""
    count = len(spans(FlatLayout(list(Net().p))))
    return [Fault(op="all_reduce", nth=2 * count, action=Fail(after=True), name=PAYLOAD)]


@pytest.mark.parametrize("lack", [(0,), (2,), (0, 2), (1, 2)])
def test_a_mean_that_some_have_and_others_lost_is_given_to_these(lack: tuple[int, ...], caplog: Any) -> None:
    """In the second step, whose mean nobody waits for all to have: those that have it step with it, at most."""

    def body(rank: FaultyRank, net: Any) -> Any:
        told = []
        for i in range(4):
            step(rank, net, every(float(rank.number + i)), scale=2.0**rank.number)
            told.append([g / 2.0**rank.number for g in grads(net) if g is not None])
        assert rank.meet() is Arrival.OPEN
        return told, rank.averager.summary.synchronous_steps

    for told, steps in on_ranks(3, body, scripts=dict.fromkeys(lack, last_part_of_the_second_step())):
        assert told == [[1.0 + i] * len(SHAPES) for i in range(4)]
        assert steps == 4
    for rank in lack:
        assert f"Rank {rank}: round 2 was committed elsewhere" in caplog.text
    assert caplog.text.count("committed elsewhere") == len(lack)


places = st.tuples(
    st.integers(0, 2),
    st.sampled_from([("all_reduce", PAYLOAD), ("all_gather", HEADER), ("broadcast", PAYLOAD)]),
    st.integers(1, 16),
    st.booleans(),
)


@few
@given(faults=st.lists(places, min_size=1, max_size=4, unique_by=lambda fault: fault[:3]))
def test_wherever_steps_fail_each_is_taken_once_with_the_mean_of_all(faults: Any) -> None:
    """In sums, in headers, and as a mean is given to those that lack it."""

    def body(rank: FaultyRank, net: Any) -> Any:
        told = []
        for i in range(5):
            step(rank, net, every(float(rank.number + i)))
            told.append(grads(net))
        assert rank.meet() is Arrival.OPEN
        return told, rank.averager.summary.synchronous_steps

    scripts: dict[int, Sequence[Fault]] = {
        rank: [
            Fault(op=op, nth=nth, action=Fail(after=after), name=name)
            for r, (op, name), nth, after in faults
            if r == rank
        ]
        for rank in range(3)
    }
    for told, steps in on_ranks(3, body, scripts=scripts):
        assert (told, steps) == ([[1.0 + i] * len(SHAPES) for i in range(5)], 5)


def test_a_mean_that_some_lack_is_there_still_when_others_have_left_synchronous_steps() -> None:
    """What these begin their local steps from is written where it was."""
    turn = Turnstile()

    def body(rank: FaultyRank, net: Any) -> Any:
        def after(error: Any) -> int:
            if rank.number == 2:
                turn.wait("0 has left")
                turn.wait("1 has left")
            return reform(error)

        regroup = rank.averager.control.regroup
        reform, regroup.after = regroup.after, after
        told = []
        for i in range(2):
            step(rank, net, every(float(rank.number + i)))
            told.append(grads(net))
        rank.averager.tick(rank.averager.plan(), 1.0)
        turn.set(f"{rank.number} has left")
        assert rank.meet() is Arrival.OPEN
        return told

    schedule, scripts = Warmup(EveryNSteps(10), steps=2), {2: last_part_of_the_second_step()}
    for told in values(3, lambda rank: body(rank, rank.module), module=Net, schedule=schedule, scripts=scripts):
        assert told == [[1.0] * len(SHAPES), [2.0] * len(SHAPES)]


@pytest.mark.parametrize(("lack", "mean"), [((1,), 2.0), ((1, 2), 2.5)])
def test_whoever_has_a_mean_gives_it_after_another_one_has_died_with_it(lack: tuple[int, ...], mean: float) -> None:
    """Where nobody that is left has it, these take the step by themselves."""

    def body(rank: FaultyRank) -> Any:
        net: Any = rank.module
        step(rank, net, every(1.0))
        step(rank, net, every(1.0 + rank.number))
        if rank.number == 0:
            raise Crash
        told = grads(net)
        step(rank, net, every(1.0))
        assert rank.meet() is Arrival.OPEN
        return told, grads(net)

    scripts = dict.fromkeys(lack, last_part_of_the_second_step())
    ended = outcomes(3, body, module=Net, min_replicas=1, schedule=Synchronous(), scripts=scripts)
    assert isinstance(ended[0].error, Crash), ended[0].error
    for number in (1, 2):
        assert ended[number].error is None, ended[number].error
        assert ended[number].value == ([mean] * len(SHAPES), [1.0] * len(SHAPES))


def test_one_that_dies_within_the_backward_pass_is_done_without() -> None:
    def body(rank: FaultyRank) -> Any:
        net: Any = rank.module
        step(rank, net, every(float(rank.number)))
        before = grads(net)
        if rank.number == 1:
            planned = rank.averager.plan()

            def crash(_: Tensor) -> None:
                raise Crash

            net.p[1].register_hook(crash)
            net.zero_grad(set_to_none=True)
            rank.gradients.begin_backward(1.0)
            net.loss(every(1.0)).backward()
            rank.averager.tick(planned, 1.0)
        step(rank, net, every(float(rank.number)))
        assert rank.meet() is Arrival.OPEN
        return before, grads(net)

    ended = outcomes(3, body, module=Net, min_replicas=1, schedule=Synchronous())
    assert isinstance(ended[1].error, Crash), ended[1].error
    for number in (0, 2):
        assert ended[number].error is None, ended[number].error
        assert ended[number].value == ([1.0] * len(SHAPES), [1.0] * len(SHAPES))


def test_a_backward_pass_that_fails_and_is_caught_is_taken_back() -> None:
    """The step is taken with the next one's gradients, and with nothing of those that were half on their way."""

    def body(rank: FaultyRank, net: Any) -> Any:
        planned = rank.averager.plan()
        if rank.number == 1:

            def crash(_: Tensor) -> None:
                raise Crash

            hook = net.p[1].register_hook(crash)
            rank.gradients.begin_backward(1.0)
            with pytest.raises(Crash):
                net.loss(every(100.0)).backward()
            rank.gradients.withdraw()
            hook.remove()
            net.zero_grad(set_to_none=True)
        rank.gradients.begin_backward(1.0)
        net.loss(every(1.0 + rank.number)).backward()
        rank.gradients.reduce_(1.0)
        rank.averager.tick(planned, 1.0)
        return grads(net), rank.averager.summary.synchronous_steps

    for found in on_ranks(2, body):
        assert found == ([1.5] * len(SHAPES), 1)


def test_a_backward_pass_that_takes_long_is_waited_for_without_a_payload_under_way() -> None:
    """A late rank is no failure, and payloads have a deadline."""
    timeouts = Timeouts(payload=timedelta(seconds=2), grace=timedelta(seconds=90), reform=timedelta(seconds=60))

    def body(rank: FaultyRank, net: Any) -> Any:
        control, planned = rank.averager.control, rank.averager.plan()
        offered = []

        def wait(_: Tensor) -> None:
            with control.shared_state.changed:
                assert control.shared_state.changed.wait_for(lambda: not control.buckets.has_message, LIMIT_S)
                offered.append(control.buckets.announced)

        if rank.number == 1:
            net.p[1].register_hook(wait)
        rank.gradients.begin_backward(1.0)
        net.loss(every(1.0 + rank.number)).backward()
        rank.gradients.reduce_(1.0)
        rank.averager.tick(planned, 1.0)
        assert rank.meet() is Arrival.OPEN
        return grads(net), control.shared_state.failed, len(offered)

    assert on_ranks(2, body, timeouts=timeouts) == [([1.5] * len(SHAPES), 0, 0), ([1.5] * len(SHAPES), 0, 1)]
