"""What every `Collectives` promises, and every `ElasticCollectives`, as checks that all ranks of a world run together.

A check gets this rank's `Stage` and raises where a promise is broken. Each check has a fork of its own, so that the
failures it causes harm no other. Its tensors are on torch's default device: run it under ``torch.device("cuda")`` for
a transport of CUDA tensors.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.comm.collectives import ReduceOp
from lightning_async.errors import CollectiveError, CollectiveTimeout
from lightning_async.membership.generation import Generation

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
SHORT = timedelta(seconds=0.4)
LONG = timedelta(seconds=20)
"""What passes before has not waited for it, however busy the machine is."""


@dataclass
class Stage:
    """One rank's part in a check.

    Args:
        comm: what is checked.
        meet: a barrier that no failure of the collectives can harm.
        timings: seconds, for tests to look at.
        peers_hear: whether peers that wait for a rank fail when it breaks off; else by their own deadline.
    """

    comm: Any
    meet: Callable[[str], None]
    timings: dict[str, float] = field(default_factory=dict)
    peers_hear: bool = True


Check = Callable[[Stage], None]
CHECKS: dict[str, Check] = {}
"""Of all collectives."""
LAST_CHECKS: dict[str, Check] = {}
"""Of all collectives, too; but one whose failures nothing can undo goes through only one of them in its life."""
ELASTIC_CHECKS: dict[str, Check] = {}
"""Of those that can be formed anew."""


def check(fn: Check) -> Check:
    CHECKS[fn.__name__] = fn
    return fn


def last_check(fn: Check) -> Check:
    LAST_CHECKS[fn.__name__] = fn
    return fn


def elastic_check(fn: Check) -> Check:
    ELASTIC_CHECKS[fn.__name__] = fn
    return fn


def input_of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers, exact in every type, different on every rank."""
    values = torch.arange(torch.Size(shape).numel()).view(shape) % 5 + rank
    return values % 2 == 0 if dtype is torch.bool else values.to(dtype)


def reduced(world_size: int, dtype: torch.dtype, op: ReduceOp, *shape: int) -> torch.Tensor:
    every = torch.stack([input_of(rank, dtype, *shape) for rank in range(world_size)])
    if dtype is torch.bool:
        return every.all(0) if op is ReduceOp.MIN else every.any(0)
    wide = every.double() if dtype.is_floating_point else every.long()
    return {ReduceOp.SUM: wide.sum(0), ReduceOp.MIN: wide.amin(0), ReduceOp.MAX: wide.amax(0)}[op].to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype} {a.shape} is not {b.dtype} {b.shape}"
    assert torch.equal(a, b), f"{a} is not {b}"


def noise(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Equal numbers on every device, other ones on every rank."""
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(rank), device="cpu").to(dtype)
    return torch.empty_like(values, device=torch.get_default_device()).copy_(values)


def use_connections(comm: Any) -> None:
    """Some transports connect at the first use, which waits for the peer: what a rank begins alone comes later."""
    comm.barrier().result()


def renumbered(comm: Any, order: Sequence[int], later: int = 1) -> Generation:
    """The present members of these numbers, in this order, in a later generation."""
    members = tuple(comm.generation.name_of(rank) for rank in order)
    return Generation(comm.generation.number + later, members, members.index(comm.generation.name))


@check
def all_reduce_values(stage: Stage) -> None:
    comm = stage.comm
    for dtype in DTYPES:
        for op in ReduceOp:
            buffer = input_of(comm.rank, dtype, 3, 7)
            result = comm.all_reduce(buffer, op).result()
            assert result is buffer
            equal(buffer, reduced(comm.world_size, dtype, op, 3, 7))
            if dtype is torch.bool:  # not a 2 in disguise
                assert int(buffer.view(torch.uint8).max()) <= 1


@check
def all_reduce_same_bits(stage: Stage) -> None:
    comm = stage.comm
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        buffer = noise(comm.rank, dtype)
        expected = torch.stack([noise(rank, dtype).double() for rank in range(comm.world_size)]).sum(0)
        comm.all_reduce(buffer).result()
        # One rounding for each addition, at most.
        bound = comm.world_size * torch.finfo(dtype).eps * (expected.abs() + 4)
        assert bool(((buffer.double() - expected).abs() <= bound).all()), dtype
        everyones = comm.all_gather(buffer).result()
        for row in everyones:
            equal(row.view(torch.uint8), buffer.view(torch.uint8))


@check
def all_gather_values(stage: Stage) -> None:
    comm = stage.comm
    for dtype in DTYPES:
        result = comm.all_gather(input_of(comm.rank, dtype, 2, 3)).result()
        equal(result, torch.stack([input_of(rank, dtype, 2, 3) for rank in range(comm.world_size)]))
    equal(comm.all_gather(torch.tensor(comm.rank)).result(), torch.arange(comm.world_size))
    assert comm.all_gather(torch.empty(0)).result().shape == (comm.world_size, 0)


@check
def types_that_nobody_can_add_up_move(stage: Stage) -> None:
    comm = stage.comm
    mine = torch.arange(comm.world_size * 4, dtype=torch.float32).view(comm.world_size, 4).add(comm.rank)
    codes = mine.to(torch.float8_e4m3fn)
    for moved, plain in (
        (comm.all_gather(codes[0]), comm.all_gather(codes[0].float())),
        (comm.all_to_all(codes), comm.all_to_all(codes.float())),
        (comm.broadcast(codes.clone(), 1), comm.broadcast(codes.float(), 1)),
    ):
        result = moved.result()
        assert result.dtype is torch.float8_e4m3fn
        equal(result.float(), plain.result())


@check
def results_go_where_they_are_told_to(stage: Stage) -> None:
    comm = stage.comm
    for numel in (5, 40_000):  # some transports move large ones in another way
        mine = torch.arange(numel, dtype=torch.float32).add(comm.rank)
        out = torch.full((comm.world_size, numel), torch.nan)
        assert comm.all_gather(mine, out).result().data_ptr() == out.data_ptr()
        equal(out, torch.stack([torch.arange(numel, dtype=torch.float32).add(rank) for rank in range(comm.world_size)]))
        equal(comm.all_gather(mine).result(), out)
        rows = torch.arange(comm.world_size, dtype=torch.float32)[:, None].repeat(1, numel).add(10 * comm.rank)
        assert comm.all_to_all(rows, out).result().data_ptr() == out.data_ptr()
        equal(out, (10 * torch.arange(comm.world_size)[:, None] + comm.rank).float().repeat(1, numel))
    for wrong in (torch.empty(comm.world_size, 4), torch.empty(comm.world_size, 5, dtype=torch.float64)):
        with pytest.raises(ValueError, match="`out` must be"):
            comm.all_gather(torch.empty(5), wrong)
        with pytest.raises(ValueError, match="`out` must be"):
            comm.all_to_all(torch.empty(comm.world_size, 5), wrong)


@check
def registered_memory_holds_the_same(stage: Stage) -> None:
    comm = stage.comm
    buffers = [comm.registered(torch.full((n,), float(comm.rank))) for n in (1000, 70_000)]
    for buffer in buffers:
        equal(buffer, torch.full_like(buffer, comm.rank))
        equal(comm.all_reduce(buffer).result(), torch.full_like(buffer, sum(range(comm.world_size))))


@check
def all_to_all_values(stage: Stage) -> None:
    comm = stage.comm
    for dtype in DTYPES:
        result = comm.all_to_all(input_of(comm.rank, dtype, comm.world_size, 3)).result()
        rows = [input_of(rank, dtype, comm.world_size, 3)[comm.rank] for rank in range(comm.world_size)]
        equal(result, torch.stack(rows))


@check
def broadcast_values(stage: Stage) -> None:
    comm = stage.comm
    for dtype in DTYPES:
        for src in range(comm.world_size):
            buffer = input_of(comm.rank, dtype, 5)
            assert comm.broadcast(buffer, src).result() is buffer
            equal(buffer, input_of(src, dtype, 5))


@check
def wrong_arguments_raise(stage: Stage) -> None:
    comm = stage.comm
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_reduce(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="world_size"):
        comm.all_to_all(torch.zeros(comm.world_size + 1, 2))
    with pytest.raises(ValueError, match="src=99"):
        comm.broadcast(torch.zeros(1), 99)
    comm.barrier().result()  # nothing of this harms the communicator


@elastic_check
def wrong_quorums_raise(stage: Stage) -> None:
    comm = stage.comm
    with pytest.raises(ValueError, match="not for this member"):
        comm.reconfigure(Generation(comm.generation.number + 1, ("97", "98"), 0))
    with pytest.raises(ValueError, match="not newer"):
        comm.reconfigure(comm.generation)
    comm.barrier().result()


@check
def operations_keep_their_order(stage: Stage) -> None:
    comm = stage.comm
    pending = [comm.all_gather(torch.tensor([10 * i + comm.rank])) for i in range(20)]
    for i, operation in reversed(list(enumerate(pending))):
        equal(operation.result().view(-1), 10 * i + torch.arange(comm.world_size))
    assert all(operation.done() for operation in pending)


@check
def forks_are_independent(stage: Stage) -> None:
    waiting, other = stage.comm.fork("waiting"), stage.comm.fork("other", timedelta(seconds=9))
    assert waiting.name == f"{stage.comm.name}/waiting" and other.timeout == timedelta(seconds=9)
    waits = None
    if stage.comm.rank == 0:
        waits = waiting.barrier()
        assert not waits.wait(timedelta(seconds=0.05))
    equal(other.all_reduce(torch.ones(2)).result(), torch.full((2,), float(stage.comm.world_size)))
    assert waits is None or not waits.done()
    stage.meet("the other fork went on")
    if waits is None:
        waits = waiting.barrier()
    assert waits.result() is None
    with pytest.raises(ValueError, match="already"):
        stage.comm.fork("other")


@elastic_check
def a_split_is_of_some_ranks(stage: Stage) -> None:
    """All but the first, and the first alone; each numbered from 0, each with every operation."""
    comm, size = stage.comm, stage.comm.world_size
    rest = comm.split(range(1, size), "rest", timedelta(seconds=9))
    alone = comm.split([0], "alone")
    assert (rest is None) is (comm.rank == 0) and (alone is None) is (comm.rank != 0)
    mine = rest if rest is not None else alone
    assert mine.name == f"{comm.name}/{'alone' if rest is None else 'rest'}"
    equal(comm.all_gather(torch.tensor([mine.rank])).result().view(-1), torch.tensor([0, *range(size - 1)]))
    first = 0 if rest is None else 1  # the number, in the whole, of the first in it
    everyones = torch.arange(mine.world_size) + first
    one = torch.tensor([comm.rank])
    equal(mine.all_gather(one).result().view(-1), everyones)
    equal(mine.all_reduce(one.clone()).result().view(-1), everyones.sum()[None])
    equal(mine.broadcast(one.clone(), mine.world_size - 1).result(), everyones[-1:])
    rows = one.repeat(mine.world_size)[:, None]
    equal(mine.all_to_all(rows).result().view(-1), everyones)
    fork = mine.fork("fork")
    assert fork.world_size == mine.world_size
    fork.barrier().result()
    mine.barrier().result()
    if rest is not None:
        assert rest.timeout == timedelta(seconds=9) and fork.timeout == timedelta(seconds=9)
    comm.barrier().result()


@elastic_check
def a_split_of_all_is_a_fork(stage: Stage) -> None:
    comm = stage.comm
    both = comm.split({*range(comm.world_size)}, "both")
    assert both.rank == comm.rank and both.world_size == comm.world_size
    equal(both.all_gather(torch.tensor([both.rank])).result().view(-1), torch.arange(both.world_size))
    for wrong in ([], [comm.world_size], [-1, 0]):
        with pytest.raises(ValueError, match=r"split\(ranks=.*\)` must name"):
            comm.split(wrong, "wrong")
    for again in (comm.split, lambda ranks, name: comm.fork(name)):
        with pytest.raises(ValueError, match="already"):
            again([0], "both")
    comm.barrier().result()


@elastic_check
def a_split_goes_on_with_those_of_its_ranks_that_are_left(stage: Stage) -> None:
    comm, size = stage.comm, stage.comm.world_size
    first, before = comm.generation.name == comm.generation.name_of(0), comm.generation
    rest: Any = comm.split(range(1, size), "rest")
    both, fork = comm.split(range(size), "both"), rest and rest.fork("fork")
    stage.meet("made")
    if first:
        comm.abort()
        with pytest.raises(CollectiveError):
            both.barrier().result()
    else:
        comm.reconfigure(renumbered(comm, range(1, size)))  # the first rank is lost: all numbers change
        for each in (rest, fork, both):
            assert each.rank == comm.rank and each.world_size == size - 1
            assert each.generation == comm.generation
            equal(each.all_reduce(torch.ones(2)).result(), torch.full((2,), size - 1.0))
    stage.meet("went on")
    members = (*before.members[1:], before.members[0])  # it comes back, as the last
    comm.reconfigure(Generation(before.number + 2, members, members.index(before.name)))
    if first:
        assert rest is None and both.rank == size - 1
    else:
        equal(rest.all_reduce(torch.ones(2)).result(), torch.full((2,), size - 1.0))
        equal(fork.all_gather(torch.tensor([fork.rank])).result().view(-1), torch.arange(size - 1))
    equal(both.all_reduce(torch.ones(2)).result(), torch.full((2,), float(size)))


@last_check
def a_late_peer_is_a_timeout(stage: Stage) -> None:
    comm = stage.comm.fork("late", SHORT)
    if comm.rank == 0:
        started = time.monotonic()
        first, second = comm.all_reduce(torch.ones(4)), comm.barrier()
        with pytest.raises(CollectiveTimeout) as caught:
            first.result()
        waited = time.monotonic() - started
        assert SHORT.total_seconds() <= waited < LONG.total_seconds() / 2, waited
        for part in (
            f"rank 0 of {comm.world_size}",
            "late'",
            f"generation {comm.generation.number}",
            "all_reduce",
            "#1",
        ):
            assert part in str(caught.value)
        with pytest.raises(CollectiveError):
            second.result()
        with pytest.raises(CollectiveError, match="earlier failure"):  # it sticks, and nobody waits for a result
            comm.barrier()
    stage.meet("timed out")


@elastic_check
def a_late_peer_harms_no_other_fork(stage: Stage) -> None:
    patience = SHORT if stage.comm.rank == 0 or not stage.peers_hear else LONG
    comm, sibling = stage.comm.fork("late", patience), stage.comm.fork("sibling")
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout):
            comm.barrier().result()
    stage.meet("timed out")
    if comm.rank != 0:  # nobody will ever come
        started = time.monotonic()
        with pytest.raises(CollectiveError):
            comm.barrier().result()
        assert time.monotonic() - started < LONG.total_seconds() / 2
    sibling.barrier().result()


@last_check
def result_may_have_a_shorter_deadline(stage: Stage) -> None:
    comm = stage.comm.fork("short")
    if comm.rank == 0:
        pending = comm.barrier()
        assert not pending.wait(timedelta(seconds=0.05))  # waiting is no failure
        with pytest.raises(CollectiveTimeout, match=r"0\.1 s"):
            pending.result(timedelta(seconds=0.1))
        assert pending.done()
        with pytest.raises(CollectiveTimeout):  # each time again
            pending.result()
    stage.meet("gave up")


@elastic_check
def abort_wakes_and_reconfigure_renews(stage: Stage) -> None:
    comm, member = stage.comm, stage.comm.rank
    members = comm.generation.members
    fork = comm.fork("payload")
    use_connections(fork)
    known = fork.registered(torch.zeros(3000))
    if comm.rank == 0:
        pending = [comm.all_reduce(torch.ones(1000)), fork.all_reduce(torch.ones(3))]
        waker = threading.Timer(0.1, comm.abort)
        started = time.monotonic()
        waker.start()
        for operation in pending:
            with pytest.raises(CollectiveError, match="abort"):
                operation.result(LONG)
        stage.timings["abort_s"] = time.monotonic() - started - 0.1
        waker.join()
        assert stage.timings["abort_s"] < LONG.total_seconds() / 2
        with pytest.raises(CollectiveError):
            fork.barrier().result()
    stage.meet("aborted")
    number = comm.generation.number + 3
    order = tuple(reversed(range(comm.world_size)))
    started = time.monotonic()
    comm.reconfigure(renumbered(comm, order, 3))
    stage.timings["reconfigure_s"] = time.monotonic() - started
    assert comm.generation.number == fork.generation.number == number
    assert comm.generation.members == tuple(reversed(members))
    assert comm.rank == fork.rank == order.index(member)
    for each in (comm, fork):
        equal(each.all_gather(torch.tensor([each.rank])).result().view(-1), torch.arange(comm.world_size))
    comm.reconfigure(renumbered(comm, order))
    fork.barrier().result()
    assert comm.rank == member
    equal(fork.all_reduce(known.fill_(1.0)).result(), torch.full_like(known, comm.world_size))


@elastic_check
def abort_in_the_middle_of_large_messages(stage: Stage) -> None:
    """Gloo does not tell a half-sent message that its connection has ended; the operation must not wait for it."""
    comm = stage.comm
    keeps_s = 6.0  # so long torch keeps what is stuck
    fork = comm.fork("payload", timedelta(seconds=keeps_s))
    stage.meet("forked")
    ranks = tuple(range(comm.world_size))
    for generation in range(1, 6):
        started = time.monotonic()
        with contextlib.suppress(CollectiveError):
            pending = [fork.all_reduce(torch.ones(1_000_000)), fork.broadcast(torch.ones(1_000_000), 0), comm.barrier()]
            if comm.rank == generation % comm.world_size:
                comm.abort()
            for operation in pending:
                operation.result()
        assert time.monotonic() - started < 0.75 * keeps_s
        comm.reconfigure(renumbered(comm, ranks))
        equal(fork.all_reduce(torch.ones(3)).result(), torch.full((3,), float(comm.world_size)))


@elastic_check
def a_large_gather_that_is_broken_off_lets_go(stage: Stage) -> None:
    """However many messages of it are half moved, nothing of it is left after the operation's own timeout."""
    comm = stage.comm
    fork = comm.fork("payload", timedelta(seconds=1))
    stage.meet("forked")
    with contextlib.suppress(CollectiveError):
        pending = [fork.all_gather(torch.ones(4_000_000)), fork.all_gather(torch.ones(4_000_000))]
        if comm.rank == 0:
            comm.abort()
        for operation in pending:
            operation.result()
    until = time.monotonic() + LONG.total_seconds()
    while any("all_gather" in thread.name for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [thread.name for thread in threading.enumerate() if "all_gather" in thread.name]
    comm.reconfigure(renumbered(comm, range(comm.world_size)))
    equal(fork.all_reduce(torch.ones(3)).result(), torch.full((3,), float(comm.world_size)))


@elastic_check
def a_smaller_quorum_goes_on(stage: Stage) -> None:
    comm = stage.comm
    if comm.world_size < 2:
        return
    last, before = comm.world_size - 1, comm.generation
    if comm.rank == last:
        comm.abort()
    else:
        comm.reconfigure(renumbered(comm, range(last)))
        assert comm.world_size == last
        equal(comm.all_reduce(torch.ones(2)).result(), torch.full((2,), float(last)))
    stage.meet("went on")
    comm.reconfigure(replace(before, number=before.number + 2))  # and it comes back
    equal(comm.all_reduce(torch.ones(2)).result(), torch.full((2,), last + 1.0))


@last_check
def close_is_idempotent_and_blocks_on_nobody(stage: Stage) -> None:
    comm = stage.comm.fork("closing")
    use_connections(comm)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("lightning_async")}
    pending = [comm.all_reduce(torch.ones(1000)), comm.all_reduce(torch.ones(2))] if comm.rank == 0 else []
    stage.meet("under way")
    started = time.monotonic()
    comm.close()
    comm.close()
    stage.timings["close_s"] = time.monotonic() - started
    assert stage.timings["close_s"] < LONG.total_seconds() / 2
    for operation in pending:
        with pytest.raises(CollectiveError):
            operation.result()
    with pytest.raises(CollectiveError, match="closed"):
        comm.barrier()
    after = {thread for thread in threading.enumerate() if thread.name.startswith("lightning_async")}
    assert after <= before, after - before


ALL_CHECKS = {**CHECKS, **LAST_CHECKS, **ELASTIC_CHECKS}
