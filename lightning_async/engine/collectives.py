"""Lightning's collectives over all ranks: real at sync points, local while replicas are asynchronous.

Read `LightningCollectives` first. The training thread makes its collective calls through `ReplayableCalls`, which
numbers them and repeats them when groups fail. The engine may form new groups at any time. Then some ranks may have the
answer to a call, which is its result, and others may have lost it. Therefore each rank keeps its last answers. After
new groups are formed, the ranks compare their call numbers: a rank that is ahead sends its answers to the others. If
no rank is ahead, all repeat the call.
"""

from __future__ import annotations

import logging
import math
import pickle
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightning_async.comm.collectives import Collectives, Pending, ReduceOp, as_bytes, sum_rows
from lightning_async.comm.serialization import decode, encode, make_room, take_apart, unflatten
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, GateMismatch, PeerLost
from lightning_async.flat import FlatLayout

log = logging.getLogger(__name__)
T = TypeVar("T")
_ROW_BYTES = 2048  # what each rank says of an operation: its name, three numbers, and the first bytes of its data
_TEXT_BYTES = 128
_DATA_AT = 160
_ROOM = _ROW_BYTES - _DATA_AT
_NOTHING = torch.empty(0, dtype=torch.uint8)
_PART_BYTES = 8 << 20  # of one broadcast when a state is handed over
_SMALL_BYTES = 1 << 18  # tensors up to this size share a broadcast
_AHEAD = 4  # broadcasts under way at a time
_BEAT = timedelta(seconds=0.2)
_FIRST_WORD_S = 60.0  # a wait of this time is logged, and again after each doubling of it
_STEPS = 1  # this rank takes evaluation steps, of which other ranks may have fewer
_FINISHED = 2  # this rank has no more of these steps
_INTERRUPTS = 3  # this rank ends the steps of all ranks
_KEPT = 3  # answers: the source of a broadcast may be done while others still wait for the call before


class Packed(NamedTuple):
    """A copy of an object, ready to be sent to other ranks by `LightningCollectives.hand_over`."""

    text: str  # see `serialization.take_apart`
    tensors: list[Tensor]  # contiguous copies on the CPU that nothing else uses
    is_pickle: bool  # whether the only tensor is the pickled object


class StepsInterrupted(BaseException):
    """Evaluation steps end on all ranks before their data does. No ``Exception``, so that users' code lets it pass."""


class LightningCollectives:
    """The collectives of a strategy (reduce, gather, broadcast), over a communicator of their own for CPU tensors.

    While ``asynchronous`` is set, waiting for all replicas would force them into lockstep, and would deadlock where
    they take unequal numbers of steps. Then operations return this rank's own value, and most of them log one warning;
    `all_gather` raises RuntimeError.

    Before each operation the ranks compare its name and shape. If one rank calls something else (for other metrics,
    say), all ranks get an error that names all calls, instead of a hang. Short data is sent in that same exchange.

    Ranks may have unequal numbers of evaluation steps. Between `begin_steps` and `finish_steps`, an operation is of
    those ranks that still have steps: means and gathered rows are of these ranks only.

    Args:
        collectives: Communicator for CPU tensors that only this object uses.
        check: Function that is called during every wait; it raises if a peer was lost.
        deadline: Longest time for one operation. Default 30 minutes.
        blame: Time to wait, after a call has failed, until it is known which rank was lost. Default 3 s.
        behind: Function that returns the names of ranks that have not come to the call with a number. Default: none
            are known.
    """

    def __init__(
        self,
        collectives: Collectives,
        check: Callable[[], None] = lambda: None,
        deadline: timedelta = timedelta(minutes=30),
        blame: timedelta = timedelta(seconds=3),
        behind: Callable[[int], Sequence[str]] = lambda call: (),
    ) -> None:
        self.asynchronous = False
        self._collectives = collectives
        self.calls = ReplayableCalls(collectives, check, deadline, blame, behind)
        self._warned: set[str] = set()
        self._phase = 0
        """Whether this rank takes evaluation steps (`_STEPS`), has finished them, or interrupts them; 0 elsewhere."""
        self._present = [0]
        """The ranks that took part in the last operation, and not only in its transport."""

    def follow(self, before: LightningCollectives) -> None:
        """Copy the record of logged warnings from ``before``, an earlier run's object, so that none is logged again."""
        self._warned = before._warned

    @property
    def rank(self) -> int:
        return self._collectives.rank

    @property
    def world_size(self) -> int:
        return self._collectives.world_size

    def in_one_generation(self, operation: Callable[[], T]) -> T:
        """Call ``operation`` until all of its collective calls are completed by the same ranks; return its result.

        If new groups are formed between two of these calls, ``operation`` is repeated. All ranks know in which
        generation a call was completed, so either all of them repeat ``operation``, or none does. ``operation`` must
        leave its inputs as they are.
        """
        while True:
            with self.calls.recorded() as generations:
                try:
                    answer = operation()
                except Exception:
                    if len(generations) > 1:
                        continue  # the error may come from mixing the answers of two sets of ranks
                    raise
            if len(generations) <= 1:
                return answer

    def generation(self) -> int:
        """Wait for all ranks, and return the generation of the process groups in which they meet.

        While replicas train asynchronously (`asynchronous`), return this rank's generation without waiting.
        """
        if self.asynchronous:
            return self.calls.generation
        self._compare("who is left")
        return self.calls.last.generation

    def fork(self, name: str, timeout: timedelta) -> Collectives:
        return self._collectives.fork(name, timeout)

    def barrier(self, name: str = "") -> None:
        """Wait for all ranks; do nothing while replicas are asynchronous."""
        if self._is_local(f"barrier({name!r})", "does not wait for the other replicas"):
            return
        self._compare(f"barrier({name!r})")

    def reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        """Reduce ``tensor`` over all ranks: "mean" ("avg"), "sum", "min", "max" or "product"."""
        kind = "mean" if op is None else str(op).rpartition(".")[2].lower()
        if kind not in ("mean", "avg", "sum", "min", "max", "product"):
            raise ValueError(f"`reduce_op={op!r}` must be one of 'mean', 'avg', 'sum', 'min', 'max', 'product'.")
        own = "returns this replica's own value (`on_epoch=True` logs that of all, at the end of the epoch)"
        if self._is_local(f"reduce({kind})", own):
            return tensor
        buffer = _to_cpu(tensor)
        mean = kind in ("mean", "avg")
        if mean and not buffer.is_floating_point():
            buffer = buffer.to(torch.float64)
        op_ = {"min": ReduceOp.MIN, "max": ReduceOp.MAX}.get(kind, ReduceOp.SUM)
        what = f"reduce({kind}) of shape {tuple(tensor.shape)}, {tensor.dtype}"

        def reduce() -> Tensor:
            data = as_bytes(buffer)
            sizes, rows = self._compare(what, data)
            if kind != "product" and buffer.nbytes > _ROOM and len(self._present) == len(rows):
                out = self.calls(f"reduce({kind})", lambda c: c.all_reduce(buffer.clone(), op_))
            else:
                parts = self._rest(sizes, rows, data)
                stacked = torch.cat(parts).view(buffer.dtype).view(len(parts), *buffer.shape)
                out = stacked.prod(dim=0) if kind == "product" else sum_rows(stacked, op_)
            return out / len(self._present) if mean else out

        out = self.in_one_generation(reduce)
        return (out if tensor.is_floating_point() or not mean else out.to(torch.get_default_dtype())).to(tensor.device)

    def all_gather(
        self, tensor: Tensor, sync_grads: bool = False, sum_later: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Stack every rank's tensor (equal shapes) along a new first dimension, see also `finish_steps`.

        With ``sync_grads``, the result has a gradient. ``sum_later`` sums gradients over all ranks in the backward
        pass, when this object may be closed. Default: this object sums them.
        """
        if self.asynchronous and self.world_size > 1:
            raise RuntimeError(
                f"Rank {self.rank}: all_gather between two sync points would wait for replicas that run at their own "
                "pace. Gather in validation or at the end of an epoch, or train with `schedule=Synchronous()`."
            )
        if sync_grads and tensor.requires_grad:
            return _GatherWithGrad.apply(tensor, self, sum_later or (lambda grad: self.reduce(grad, "sum")))
        mine = _to_cpu(tensor)
        what = f"all_gather of shape {tuple(tensor.shape)}, {tensor.dtype}"
        return self.in_one_generation(lambda: self._gather_rows(what, mine)).to(tensor.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank ``src``'s object; objects other than plain values and tensors are pickled.

        Raises CollectiveError where the bytes that arrived are not those that were sent.
        """
        if self._is_local("broadcast", "returns this replica's own object"):
            return obj

        def broadcast() -> tuple[Tensor, bool]:
            is_source = self.rank == src
            data = _NOTHING
            pickled = False
            if is_source:
                data, pickled = _encoded(obj)
            sizes, rows = self._compare(f"broadcast from rank {src}", data, _checksum(data), pickled)
            if src not in self._present:
                raise CollectiveError(
                    f"Rank {self.rank}: broadcast from rank {src}, which has fewer evaluation steps than this rank, "
                    "and takes no part in this one. Broadcast after the steps, or gather."
                )
            size, checksum, pickled, _ = sizes[src]
            if size > _ROOM and len(self._present) == len(rows):
                room = data if is_source else torch.empty(size, dtype=torch.uint8)
                came = self.calls("broadcast", lambda c: c.broadcast(room.clone(), src))
            else:
                came = self._rest(sizes, rows, data)[self._present.index(src)].clone()
            if _checksum(came) != checksum:
                raise self._damaged(size, src, "broadcast")
            return came, bool(pickled)

        data, pickled = self.in_one_generation(broadcast)
        return cast(T, pickle.loads(data.numpy().tobytes()) if pickled else decode(data))

    def hand_over(self, state: Packed | None, src: int = 0) -> Any:
        """Send the packed ``state`` of rank ``src`` to all others, which get the object; rank ``src`` gets None.

        This is for large objects: large tensors are sent in parts, straight into the memory of the receiver. Unlike
        `broadcast`, it is not repeated when new groups are formed: it fails if a rank is lost meanwhile.
        """
        text, is_pickle = self.broadcast(("", False) if state is None else (state.text, state.is_pickle), src)
        plain, tensors = (None, state.tensors) if state is not None else make_room(text)
        under_way: deque[tuple[list[Tensor], Tensor, Pending[Tensor]]] = deque()
        checksum = 0

        def land() -> None:
            nonlocal checksum
            part, data, pending = under_way.popleft()
            self.calls.wait(f"the state of rank {src}", pending)
            if state is None:
                checksum = _checksum(data, checksum)
                for tensor, bytes_ in zip(part, data.split([len(each) for each in part]), strict=True):
                    if len(part) > 1:
                        tensor.copy_(bytes_)

        for part in _parts(tensors):
            # Several parts are under way at a time, so that copies and checksums overlap with the transport.
            data = part[0] if len(part) == 1 else torch.cat(part)
            if state is not None:
                checksum = _checksum(data, checksum)
            under_way.append((part, data, self._collectives.broadcast(data, src)))
            if len(under_way) == _AHEAD:
                land()
        while under_way:
            land()
        if self.broadcast(checksum, src) != checksum:
            raise self._damaged(sum(tensor.nbytes for tensor in tensors), src, "handed over")
        if state is not None:
            return None
        return pickle.loads(tensors[0].numpy().tobytes()) if is_pickle else unflatten(plain, tensors)

    def _damaged(self, size: int, src: int, how: str) -> CollectiveError:
        return CollectiveError(
            f"Rank {self.rank}: of {size} bytes that rank {src} has {how} others have come than were sent. "
            "Its memory, this one's or the network between them has changed some: see the hosts' logs."
        )

    def gather_objects(self, obj: T, what: str = "gather") -> list[T]:
        """Gather every rank's object; raise TypeError for objects other than plain values and tensors.

        Shapes and dtypes of tensors may differ between ranks. While replicas are asynchronous, return a list of this
        rank's object only.

        Args:
            obj: This rank's object.
            what: Name of the operation, for the error if ranks call different operations. Default: ``"gather"``.
        """
        data = encode(obj)
        if self.world_size == 1 or self.asynchronous:
            return [decode(data)]
        return [decode(row) for row in self.in_one_generation(lambda: self._gather(what, data))]

    def begin_steps(self) -> None:
        """Begin evaluation steps, of which other ranks may have more or fewer."""
        self._phase = _STEPS

    def finish_steps(self) -> None:
        """Wait until all ranks have taken their evaluation steps. Meanwhile, let ranks with more steps do theirs.

        Without an answer of this rank, a collective operation within their steps would wait for ever.
        """
        self._phase = _FINISHED
        while self.world_size > 1 and not self.asynchronous:
            sizes, rows = self._compare("no more evaluation steps")
            if not self._present:
                break
            self._rest(sizes, rows, _NOTHING)
        self._phase = 0

    def interrupt_steps(self) -> None:
        """End the evaluation steps of all ranks: this call, and each other rank's next operation, raise an exception.

        Raises:
            StepsInterrupted: Always.
        """
        self._phase = _INTERRUPTS
        self._compare("no further evaluation step")

    def make_equal_(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors of all ranks by those of rank 0."""
        under_way = [(tensor, self._collectives.broadcast(_to_cpu(tensor), 0)) for tensor in tensors]
        with torch.no_grad():
            for tensor, pending in under_way:
                tensor.copy_(self.calls("the broadcast of the model", lambda c, pending=pending: pending))

    def _is_local(self, what: str, instead: str) -> bool:
        if self.world_size == 1:
            return True
        if self.asynchronous and what not in self._warned:
            self._warned.add(what)
            log.warning(
                "Rank %d: %s was called between two sync points, where replicas run at their own pace: it %s.",
                self.rank, what, instead,
            )  # fmt: skip
        return self.asynchronous

    def _compare(
        self, what: str, data: Tensor = _NOTHING, checksum: int = 0, pickled: bool = False
    ) -> tuple[list[list[int]], Tensor]:
        """Check that all ranks are about to call the same operation, and exchange the start of their data.

        Ranks that have finished their evaluation steps call none, and are not among `_present`.

        Returns, for each rank, the numbers (size of the data, its checksum, whether it is pickled, the rank's phase),
        and the first bytes of its data, up to `_ROOM`. Raises GateMismatch on every rank if the ranks call different
        operations.
        """
        row = torch.zeros(_ROW_BYTES, dtype=torch.uint8)
        text = bytearray(what.encode()[:_TEXT_BYTES])
        row[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        row[_TEXT_BYTES:_DATA_AT].view(torch.int64)[:] = torch.tensor([data.numel(), checksum, pickled, self._phase])
        row[_DATA_AT : _DATA_AT + data.numel()] = data[:_ROOM]
        rows = self.calls(what, lambda c: c.all_gather(row))
        numbers = rows[:, _TEXT_BYTES:_DATA_AT].clone().view(torch.int64).tolist()
        phases = [phase for *_, phase in numbers]
        if _INTERRUPTS in phases:
            self._phase = 0
            raise StepsInterrupted
        self._present = [rank for rank, phase in enumerate(phases) if phase != _FINISHED]
        texts = rows[self._present, :_TEXT_BYTES]
        if (texts == texts[:1]).all() and not (_FINISHED in phases and 0 in phases):
            return numbers, rows[:, _DATA_AT:]
        calls = [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in rows[:, :_TEXT_BYTES]]
        raise GateMismatch(
            f"Rank {self.rank}: the ranks came together for different operations: "
            + ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            + ". Do all of them log the same metrics with `sync_dist=True`, and call the same hooks?"
        )

    def _gather(self, what: str, data: Tensor) -> list[Tensor]:
        return self._rest(*self._compare(what, data), data)

    def _rest(self, numbers: list[list[int]], rows: Tensor, data: Tensor) -> list[Tensor]:
        """Return the whole data of each present rank, of which `_compare` has returned ``numbers`` and ``rows``."""
        present = self._present
        if (longest := max(size for size, *_ in numbers)) > _ROOM:
            padded = data if len(data) == longest else torch.cat([data, data.new_zeros(longest - len(data))])
            rows = self.calls("all_gather", lambda c: c.all_gather(padded))
        # After a loss of ranks between the two calls, the caller drops these rows and repeats both.
        return [rows[rank, : numbers[rank][0]] for rank in present if rank < len(rows)]

    def _gather_rows(self, what: str, tensor: Tensor) -> Tensor:
        """Gather every rank's tensor, all of one shape, as rows of one tensor."""
        rows = self._gather(what, as_bytes(tensor))
        return torch.cat(rows).view(tensor.dtype).view(len(rows), *tensor.shape)


class _GatherWithGrad(torch.autograd.Function):
    """A `LightningCollectives.all_gather` with a gradient: the sum of all ranks' gradients of this rank's row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: LightningCollectives, sum_later: Callable[[Tensor], Tensor]) -> Tensor:
        gathered = world.all_gather(tensor.detach())
        ctx.sum_later = sum_later
        ctx.row = world._present.index(world.calls.rank_then())  # ranks may be lost before the backward pass
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.sum_later(grad.contiguous())[ctx.row], None, None


def packed(obj: object, copies: Callable[[list[Tensor]], list[Tensor]] | None = None) -> Packed:
    """Return a copy of an object as it is now, for `LightningCollectives.hand_over` later.

    Objects that hold other values than plain ones and tensors are pickled. ``copies`` returns contiguous copies of
    tensors on the CPU. Default: a copy of each in new memory.
    """
    try:
        text, tensors = take_apart(obj)
    except TypeError:
        memory = _pickled(obj)
        return Packed(take_apart(memory)[0], [memory], True)
    return Packed(text, [_to_cpu(tensor) for tensor in tensors] if copies is None else copies(tensors), False)


def _encoded(obj: object) -> tuple[Tensor, bool]:
    try:
        return encode(obj), False
    except TypeError:
        return _pickled(obj), True


def _pickled(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of byte tensors to send together: one part of a large tensor, or several small tensors whole."""
    small: list[Tensor] = []
    size = 0
    for data in map(as_bytes, tensors):
        if len(data) > _SMALL_BYTES:
            yield from ([part] for part in FlatLayout.parts(data, _PART_BYTES))
        elif len(data):
            small.append(data)
            size += len(data)
        if size > _PART_BYTES - _SMALL_BYTES:
            yield small
            small = []
            size = 0
    if small:
        yield small


def _checksum(data: Tensor, before: int = 0) -> int:
    values: Any = data.numpy()
    return zlib.crc32(values, before)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class CallRecovery(NamedTuple):
    """The engine's functions that a failed collective call uses: to ask for new groups, or to learn why it failed."""

    report: Callable[[PeerLost | CollectiveError], None]  # asks for new groups, because of this error
    check: Callable[[], None]  # raises if the engine has failed itself
    survives: Callable[[PeerLost], bool]
    """Returns whether the live ranks go on without the lost ones; then new groups are formed, too."""


class CallAnswer(NamedTuple):
    """The result of one collective call, as it is kept for ranks that have not received it; equal on all ranks."""

    value: Tensor | None
    generation: int  # the generation in which all ranks took part
    world_size: int


class ReplayableCalls:
    """The training thread's collective calls: one at a time, numbered, in the same order on all ranks.

    The answer (result) of a call is equal on all ranks. A call that fails is repeated in the next generation, unless a
    rank has the answer already: that rank sends it to the others. The training thread makes the calls and waits on
    `_changed`; the engine's thread calls `suspend`, `settle` and `abandon`.
    """

    def __init__(
        self,
        collectives: Collectives,
        check: Callable[[], None],
        deadline: timedelta,
        blame: timedelta,
        behind: Callable[[int], Sequence[str]],
    ) -> None:
        self._collectives = collectives
        self._check = check
        self._behind = behind
        self.deadline: timedelta | None = deadline
        """Longest time for one call; None: as long as no rank is known to be lost."""
        self._blame = blame
        self.recovery: CallRecovery | None = None  # set while an engine runs that can form new groups
        self._changed = threading.Condition()
        self._begun = self._done = 0
        self._answers: dict[int, CallAnswer] = {}  # the last ones, by number
        self.last = CallAnswer(None, 0, collectives.world_size)  # what the last call returned
        self._seen: set[int] = set()
        self._forming = False
        self._formed = self.generation = 0
        """The number of times that new groups were formed, and the number of their generation."""
        self._ranks = {0: collectives.rank}  # this rank's number, by generation

    def __call__(self, what: str, start: Callable[[Collectives], Pending[Any]]) -> Any:
        """Make the call that ``start`` begins, and return its answer; ``what`` names the call in messages.

        The call may be repeated, so ``start`` must leave its tensors as they are. Raises PeerLost, which names the rank
        that is lost, or CollectiveError where no rank is known to be lost.
        """
        started = time.monotonic()
        with self._changed:
            self._begun += 1
        while True:
            formed = self._usable(started)
            if self._done >= self._begun:
                return self._returned(self._answers[self._begun])
            try:
                value = self._wait(what, start(self._collectives), started)
            except (PeerLost, CollectiveError) as error:
                self._explain(what, error, started, formed)
                continue
            with self._changed:
                if not self._forming and self._formed == formed:
                    answer = CallAnswer(_copy(value), self.generation, self._collectives.world_size)
                    self._keep({self._begun: answer})
                    return self._returned(answer)
                # New groups are formed meanwhile. The answer does not count, as other ranks may not have it and
                # this one has not reported it.

    def wait(self, what: str, pending: Pending[Any]) -> None:
        """Wait for an operation that is none of the numbered calls, so that it is not repeated after a failure.

        Raises the same errors as a call does.
        """
        started = time.monotonic()
        formed = self._formed
        try:
            self._wait(what, pending, started)
        except (PeerLost, CollectiveError) as error:
            self._explain(what, error, started, formed)
            raise

    @contextmanager
    def recorded(self) -> Iterator[set[int]]:
        """Yield a set, to which each call made in the block adds the generation in which it was completed.

        The set is empty at first. Calls in nested blocks count, too.
        """
        outer = self._seen
        self._seen = set()
        try:
            yield self._seen
        finally:
            outer |= self._seen
            self._seen = outer

    def rank_then(self) -> int:
        """Return this rank's number in the generation in which the last call was answered."""
        return self._ranks[self.last.generation]

    def _returned(self, answer: CallAnswer) -> Any:
        self.last = answer
        self._seen.add(answer.generation)
        return _copy(answer.value)

    def _keep(self, answers: dict[int, CallAnswer]) -> None:
        self._answers.update(answers)
        self._done = max(self._answers)
        for number in [number for number in self._answers if number <= self._done - _KEPT]:
            del self._answers[number]

    def _usable(self, started: float) -> int:
        """Wait while new groups are being formed; return the number of times that groups were formed so far."""
        recovery = self.recovery
        with self._changed:
            while self._forming:
                self._changed.wait(_BEAT.total_seconds())
                self._recheck(recovery, started)
            return self._formed

    def _recheck(self, recovery: CallRecovery | None, started: float) -> None:
        if recovery is not None:  # of an engine that has ended meanwhile, too: its failure is the cause
            recovery.check()
        if self.deadline is not None and time.monotonic() - started > self.deadline.total_seconds():
            raise CollectiveTimeout(f"rank {self._collectives.rank}: no answer within {self.deadline}.")

    def _wait(self, what: str, pending: Pending[Any], started: float) -> Any:
        limit_s = math.inf if self.deadline is None else self.deadline.total_seconds()
        word_s = _FIRST_WORD_S
        while not pending.wait(_BEAT) and (waited_s := time.monotonic() - started) < limit_s:
            self._check()
            missing = self._behind(self._begun)
            if waited_s >= word_s:
                word_s *= 2
                log.warning(
                    "Rank %d has waited %.0f s in %s for %s. It waits as long as that process lives, or "
                    "`Timeouts(sync_point=)` allows.",
                    self._collectives.rank, waited_s, what,
                    "rank " + ", rank ".join(missing) if missing else "other ranks",
                )  # fmt: skip
        return pending.result(timedelta(0))

    def _explain(self, what: str, error: PeerLost | CollectiveError, started: float, formed: int) -> None:
        """Raise the cause of a call's failure; if new groups were formed, return: the caller then repeats the call."""
        recovery = self.recovery
        if isinstance(error, PeerLost) and (recovery is None or not recovery.survives(error)):
            raise error
        if recovery is not None and not isinstance(error, CollectiveTimeout):
            with self._changed:
                if self._formed == formed and not self._forming:
                    recovery.report(error)
                while self._formed == formed and self.recovery is not None:
                    self._changed.wait(_BEAT.total_seconds())
                    self._recheck(recovery, started)
            recovery.check()
            return
        # The connections of a dead peer close some time before its death is known: wait for its name.
        until = time.monotonic() + self._blame.total_seconds()
        while time.monotonic() < until:
            try:
                self._check()
            except PeerLost:
                raise
            except CollectiveError:
                pass
            time.sleep(_BEAT.total_seconds())
        raise type(error)(
            f"Rank {self._collectives.rank}: {what} failed {time.monotonic() - started:.1f} s after it began, and no "
            f"rank is known to be lost. {error}"
        ) from error

    def suspend(self) -> None:
        """Record that new groups are being formed. Answers to calls under way are ignored from now on."""
        with self._changed:
            self._forming = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Record that the engine has ended. Calls that fail from now on are not repeated."""
        with self._changed:
            self.recovery = None
            self._forming = False
            self._changed.notify_all()

    def settle(
        self, gather: Callable[[Tensor], Tensor], broadcast: Callable[[Tensor, int], Tensor], generation: int
    ) -> None:
        """Compare, in a new generation, how many collective calls each rank has completed.

        A rank that has completed more calls sends the results to the others. The engine's threads of all ranks call
        this together. Raises AsyncTrainingError if the numbers differ by more than they can on ranks that run the same
        program.
        """
        with self._changed:
            done = self._done
            answer = encode([[number, *each] for number, each in self._answers.items()])
        table = gather(torch.tensor([done, answer.numel()]))
        counts = table[:, 0].tolist()
        newest = max(counts)
        if min(counts) < newest - _KEPT:
            raise AsyncTrainingError(f"The ranks have the answers to {counts} calls: they are too far apart.")
        if min(counts) < newest:
            source = counts.index(newest)
            data = answer if done == newest else torch.empty(int(table[source, 1]), dtype=torch.uint8)
            data = broadcast(data, source)
            if done < newest:
                with self._changed:
                    self._keep({number: CallAnswer(*each) for number, *each in decode(data)})
        with self._changed:
            self._forming = False
            self._formed += 1
            self.generation = generation
            self._ranks[generation] = self._collectives.rank
            self._changed.notify_all()


def _copy(answer: Any) -> Any:
    return answer.clone() if isinstance(answer, Tensor) else answer
