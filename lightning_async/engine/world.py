"""Lightning's collectives over all ranks: real where all ranks stand, local while they drift apart."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_async.comm.frames import decode, encode
from lightning_async.comm.protocols import Collectives, ReduceOp
from lightning_async.engine.calls import Calls
from lightning_async.errors import GateMismatch

__all__ = ["World"]

log = logging.getLogger(__name__)
T = TypeVar("T")
_TEXT_BYTES = 128


class World:
    """Reduce, gather and broadcast for a strategy.

    While ``drifting``, replicas run at their own pace and any wait for all of them would be a lockstep, or a
    deadlock where they take unequal numbers of steps. Then every operation answers with this rank's own value
    and says so once.

    Before each operation the ranks compare what they are about to do: where one came for something else (it logged
    other metrics, say), all get an error that names both, instead of a hang.

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
        if self._is_local(f"reduce({kind})", "returns this replica's own value (log with `on_epoch=True` instead)"):
            return tensor
        buffer = _to_cpu(tensor)
        mean = kind in ("mean", "avg")
        if mean and not buffer.is_floating_point():
            buffer = buffer.to(torch.float64)
        op_ = {"min": ReduceOp.MIN, "max": ReduceOp.MAX}.get(kind, ReduceOp.SUM)

        def reduce() -> Tensor:
            self._compare(f"reduce({kind}) of shape {tuple(tensor.shape)}, {tensor.dtype}")
            if kind == "product":
                return self._gather(buffer).prod(dim=0)
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
        mine = _to_cpu(tensor)

        def gather() -> Tensor:
            self._compare(f"all_gather of shape {tuple(tensor.shape)}, {tensor.dtype}")
            return self._gather(mine)

        return self.in_one_generation(gather).to(tensor.device)

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor; shapes may differ in size, not in number of dimensions."""
        if self.world_size == 1 or self.drifting:
            return [tensor]
        mine = tensor.detach().cpu()

        def gather() -> list[Tensor]:
            self._compare(f"gather of {tensor.ndim} dimensions, {tensor.dtype}")
            shapes = self._gather(torch.tensor([*tensor.shape], dtype=torch.int64)).tolist() if tensor.ndim else []
            padded = torch.zeros([max(sizes) for sizes in zip(*shapes, strict=True)], dtype=tensor.dtype)
            padded[tuple(slice(n) for n in tensor.shape)] = mine
            rows = self._gather(padded)
            shapes = shapes or [[]] * len(rows)
            return [row[tuple(slice(n) for n in sizes)] for row, sizes in zip(rows, shapes, strict=True)]

        return [row.to(tensor.device) for row in self.in_one_generation(gather)]

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s object: plain values and tensors as they are, others of Lightning's and the user's pickled."""
        if self._is_local("broadcast", "returns this replica's own object"):
            return obj

        def broadcast() -> tuple[Tensor, bool]:
            self._compare(f"broadcast from rank {src}")
            is_source, data, pickled = self.rank == src, torch.empty(0, dtype=torch.uint8), False
            if is_source:
                data, pickled = _encoded(obj)
            size, pickled = self._gather(torch.tensor([data.numel(), pickled]))[src].tolist()
            room = data if is_source else torch.empty(size, dtype=torch.uint8)
            return self.calls("broadcast", lambda c: c.broadcast(room.clone(), src)), bool(pickled)

        data, pickled = self.in_one_generation(broadcast)
        return cast(T, pickle.loads(data.numpy().tobytes()) if pickled else decode(data))

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

    def _gather(self, tensor: Tensor) -> Tensor:
        return self.calls("all_gather", lambda c: c.all_gather(tensor))

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

    def _compare(self, what: str) -> None:
        """Raise on every rank if they came for different things."""
        text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        data = what.encode()[:_TEXT_BYTES]
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.calls(what, lambda c: c.all_gather(text))
        if (rows == rows[0]).all():
            return
        calls = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        raise GateMismatch(
            f"Rank {self.rank}: the ranks came together for different operations: "
            + ", ".join(f"rank {rank} calls {call}" for rank, call in enumerate(calls))
            + ". Do all of them log the same metrics with `sync_dist=True`, and call the same hooks?"
        )


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


def _encoded(obj: object) -> tuple[Tensor, bool]:
    """``obj`` as bytes, and whether these are a pickle."""
    try:
        return encode(obj), False
    except TypeError:
        return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8), True


def _to_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy to send."""
    return tensor.detach().to("cpu", copy=True).contiguous()
