"""Lightning's collectives over all ranks: real where all ranks stand, local while they drift apart."""

from __future__ import annotations

import logging
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lightning_async.comm.frames import decode, encode, make_room, take_apart, unflatten
from lightning_async.comm.protocols import Collectives, Pending, ReduceOp
from lightning_async.comm.reductions import as_bytes, sum_rows
from lightning_async.engine.calls import Calls
from lightning_async.errors import CollectiveError, GateMismatch
from lightning_async.flat import FlatLayout

__all__ = ["Packed", "World", "packed"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_ROW_BYTES, _TEXT_BYTES, _DATA_AT = 2048, 128, 160
"""What each rank shows of an operation: which one it is, three numbers, and the first bytes of its data."""
_ROOM = _ROW_BYTES - _DATA_AT
_NOTHING = torch.empty(0, dtype=torch.uint8)
_PART_BYTES, _SMALL_BYTES, _AHEAD = 8 << 20, 1 << 18, 4
"""Of what is handed over: how much travels at once, what goes along with others, and how many parts are under way."""


class Packed(NamedTuple):
    """An object as it was, to be handed over.

    Args:
        text: see `frames.take_apart`.
        tensors: that go with it, contiguous, on the CPU, and nobody else's.
        is_pickle: the one tensor is the object, pickled.
    """

    text: str
    tensors: list[Tensor]
    is_pickle: bool


class World:
    """Reduce, gather and broadcast for a strategy.

    While ``drifting``, replicas run at their own pace and any wait for all of them would be a lockstep, or a
    deadlock where they take unequal numbers of steps. Then every operation answers with this rank's own value
    and says so once.

    With each operation the ranks compare what they are about to do: where one came for something else (it logged
    other metrics, say), all get an error that names both, instead of a hang. What is short goes along with that, in one
    exchange.

    Args:
        collectives: a communicator of its own, for CPU tensors.
        check: raises if a peer was lost; called while waiting.
        deadline: for each operation.
        blame: how long it may take until a dead rank is known.
    """

    def __init__(
        self,
        collectives: Collectives,
        check: Callable[[], None] = lambda: None,
        deadline: timedelta = timedelta(minutes=30),
        blame: timedelta = timedelta(seconds=3),
    ) -> None:
        self.drifting = False
        self._collectives = collectives
        self.calls = Calls(collectives, check, deadline, blame)
        self._warned: set[str] = set()

    def follow(self, before: World) -> None:
        """This rank had that one until now: what it was warned of there it has heard."""
        self._warned = before._warned

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._collectives.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._collectives.world_size

    def in_one_generation(self, operation: Callable[[], T]) -> T:
        """The answer to an operation of several calls, all of which were answered by the same ranks.

        Who has answered which call is known alike on all ranks, so all repeat it, or none. It may hold others of these,
        and leaves what it works on as it is.
        """
        while True:
            with self.calls.recorded() as generations:
                try:
                    answer = operation()
                except Exception:
                    if len(generations) > 1:
                        continue  # it took answers of more ranks, or of others, for those of these
                    raise
            if len(generations) <= 1:
                return answer

    def generation(self) -> int:
        """The generation in which all have met here; while drifting, the one that this rank is in."""
        if self.drifting:
            return self.calls.generation
        self._compare("who is left")
        return self.calls.last.generation

    def fork(self, name: str, timeout: timedelta) -> Collectives:
        """A communicator over the same ranks with an order of its own; it closes with this one."""
        return self._collectives.fork(name, timeout)

    def barrier(self, name: str = "") -> None:
        """Wait for all ranks; nothing while drifting."""
        if self._is_local(f"barrier({name!r})", "does not wait for the other replicas"):
            return
        self._compare(f"barrier({name!r})")

    def reduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        """The reduction of ``tensor`` over all ranks: "mean" ("avg"), "sum", "min", "max" or "product"."""
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
            if kind == "product":
                return self._tell_rows(what, buffer).prod(dim=0)
            if buffer.nbytes <= _ROOM:
                out = sum_rows(self._tell_rows(what, buffer), op_)
            else:
                self._compare(what)
                out = self.calls(f"reduce({kind})", lambda c: c.all_reduce(buffer.clone(), op_))
            return out / self.calls.last.world_size if mean else out

        out = self.in_one_generation(reduce)
        return (out if tensor.is_floating_point() or not mean else out.to(torch.get_default_dtype())).to(tensor.device)

    def all_gather(self, tensor: Tensor, sync_grads: bool = False) -> Tensor:
        """Every rank's tensor (equal shapes), stacked along a new first dimension."""
        if self.drifting and self.world_size > 1:
            raise RuntimeError(
                f"Rank {self.rank}: all_gather between two rendezvous would wait for replicas that run at their own "
                "pace. Gather in validation or at the end of an epoch, or train with `schedule=Synchronous()`."
            )
        if sync_grads and tensor.requires_grad:
            return _GatherWithGrad.apply(tensor, self)
        mine, what = _to_cpu(tensor), f"all_gather of shape {tuple(tensor.shape)}, {tensor.dtype}"
        return self.in_one_generation(lambda: self._tell_rows(what, mine)).to(tensor.device)

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; shapes may differ in size, not in number of dimensions."""
        if self.world_size == 1 or self.drifting:
            return [tensor]
        mine, sizes = _to_cpu(tensor), torch.tensor([*tensor.shape], dtype=torch.int64)
        data, behind = torch.cat([as_bytes(sizes), as_bytes(mine)]), sizes.nbytes
        what = f"gather of {tensor.ndim} dimensions, {tensor.dtype}"
        rows = self.in_one_generation(lambda: self._tell(what, data))
        shapes = [row[:behind].clone().view(torch.int64).tolist() for row in rows]
        values = [row[behind:].clone().view(tensor.dtype) for row in rows]
        return [row.view(shape).to(tensor.device) for row, shape in zip(values, shapes, strict=True)]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s object: plain values and tensors as they are, others of Lightning's and the user's pickled.

        Args:
            obj: it.
            src: whose it is.

        Raises:
            CollectiveError: other bytes have come than were sent.
        """
        if self._is_local("broadcast", "returns this replica's own object"):
            return obj

        def broadcast() -> tuple[Tensor, bool]:
            is_source, data, pickled = self.rank == src, _NOTHING, False
            if is_source:
                data, pickled = _encoded(obj)
            numbers, rows = self._compare(f"broadcast from rank {src}", data, _checksum(data), pickled)
            size, checksum, pickled = numbers[src]
            came = rows[src, :size].clone()
            if size > _ROOM:
                room = data if is_source else torch.empty(size, dtype=torch.uint8)
                came = self.calls("broadcast", lambda c: c.broadcast(room.clone(), src))
            if _checksum(came) != checksum:
                raise self._damaged(size, src, "broadcast")
            return came, bool(pickled)

        data, pickled = self.in_one_generation(broadcast)
        return cast(T, pickle.loads(data.numpy().tobytes()) if pickled else decode(data))

    def hand_over(self, state: Packed | None, src: int = 0) -> Any:
        """Rank ``src``'s object, as `broadcast` gives it; None on that rank, which has it.

        For what is large: its tensors go from memory straight to memory, part by part. So nothing of it is kept, and it
        is not repeated where groups are formed anew.

        Args:
            state: it, on rank ``src``.
            src: whose it is.

        Raises:
            CollectiveError: other bytes have come than were sent.
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

    def gather_objects(self, obj: T) -> list[T]:
        """Every rank's object: plain values and tensors, see `comm.frames`.

        Raises:
            TypeError: there is something else in it.
        """
        return [decode(row) for row in self.gather_uneven(encode(obj))]

    def make_equal_(self, tensors: list[Tensor], src: int = 0) -> None:
        """Overwrite ``tensors`` with rank ``src``'s; all travel at once."""
        under_way = [(tensor, self._collectives.broadcast(_to_cpu(tensor), src)) for tensor in tensors]
        with torch.no_grad():
            for tensor, pending in under_way:
                tensor.copy_(self.calls("the broadcast of the model", lambda c, pending=pending: pending))

    def _is_local(self, what: str, instead: str) -> bool:
        if self.world_size == 1:
            return True
        if self.drifting and what not in self._warned:
            self._warned.add(what)
            log.warning(
                "Rank %d: %s was called between two rendezvous, where replicas run at their own pace: it %s.",
                self.rank, what, instead,
            )  # fmt: skip
        return self.drifting

    def _compare(
        self, what: str, data: Tensor = _NOTHING, checksum: int = 0, pickled: bool = False
    ) -> tuple[list[list[int]], Tensor]:
        """Of every rank its number of bytes, the other numbers, and as many of the bytes as go along.

        Raises:
            GateMismatch: on every rank, where they came for different things.
        """
        row, text = torch.zeros(_ROW_BYTES, dtype=torch.uint8), bytearray(what.encode()[:_TEXT_BYTES])
        row[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
        row[_TEXT_BYTES:_DATA_AT].view(torch.int64)[:3] = torch.tensor([data.numel(), checksum, pickled])
        row[_DATA_AT : _DATA_AT + data.numel()] = data[:_ROOM]
        rows = self.calls(what, lambda c: c.all_gather(row))
        texts = rows[:, :_TEXT_BYTES]
        if (texts == texts[0]).all():
            return rows[:, _TEXT_BYTES:_DATA_AT].clone().view(torch.int64)[:, :3].tolist(), rows[:, _DATA_AT:]
        calls = [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in texts]
        raise GateMismatch(
            f"Rank {self.rank}: the ranks came together for different operations: "
            + ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            + ". Do all of them log the same metrics with `sync_dist=True`, and call the same hooks?"
        )

    def _tell(self, what: str, data: Tensor) -> list[Tensor]:
        """Every rank's bytes."""
        numbers, rows = self._compare(what, data)
        sizes = [size for size, *_ in numbers]
        if (longest := max(sizes)) > _ROOM:
            padded = data if len(data) == longest else torch.cat([data, data.new_zeros(longest - len(data))])
            rows = self.calls("all_gather", lambda c: c.all_gather(padded))
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _tell_rows(self, what: str, tensor: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape, as rows of one."""
        rows = self._tell(what, as_bytes(tensor))
        return torch.cat(rows).view(tensor.dtype).view(len(rows), *tensor.shape)


class _GatherWithGrad(torch.autograd.Function):
    """`World.all_gather` whose gradient is the sum of all ranks' gradients of this rank's row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, world: World) -> Tensor:
        gathered = world.all_gather(tensor.detach())
        ctx.world, ctx.row = world, world.calls.rank_then()  # ranks may be lost before the backward pass
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.world.reduce(grad.contiguous(), "sum")[ctx.row], None


def packed(obj: object, copies: Callable[[list[Tensor]], list[Tensor]] | None = None) -> Packed:
    """As it is now, to be handed over later.

    Args:
        obj: plain values and tensors; others are pickled.
        copies: makes copies of tensors, contiguous and on the CPU. Default: each in memory of its own.
    """
    try:
        text, tensors = take_apart(obj)
    except TypeError:
        memory = _pickled(obj)
        return Packed(take_apart(memory)[0], [memory], True)
    return Packed(text, [_to_cpu(tensor) for tensor in tensors] if copies is None else copies(tensors), False)


def _encoded(obj: object) -> tuple[Tensor, bool]:
    """As bytes, and whether these are a pickle."""
    try:
        return encode(obj), False
    except TypeError:
        return _pickled(obj), True


def _pickled(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of these, each of them once: a part of a large tensor, or several small ones whole."""
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
            small, size = [], 0
    if small:
        yield small


def _checksum(data: Tensor, before: int = 0) -> int:
    values: Any = data.numpy()
    return zlib.crc32(values, before)


def _to_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy to send."""
    return tensor.detach().to("cpu", copy=True).contiguous()
