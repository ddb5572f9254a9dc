"""A model as its servers' keys: gradients or changes go to them, weights come back into the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.channel import Dial
from lightning_async.engine.digest import real, strided
from lightning_async.engine.server.ahead import Ahead
from lightning_async.engine.server.client import Answer, Client
from lightning_async.engine.server.plan import Plan
from lightning_async.engine.server.written import Written
from lightning_async.rules.compression import PushCompression
from lightning_async.rules.staleness.protocol import StalenessPolicy

__all__ = ["Worker", "plan_of"]

Parts = list[tuple[slice, Tensor]]
"""Of a parameter: which of its elements, and the part of a shard that has them."""


class Worker:
    """One worker's model. Used by one thread at a time, but for `give_up`.

    Args:
        name: this worker's.
        named: the parameters, on any device, of any floating-point type of 32 bits or fewer.
        plan: see `plan_of`.
        dials: one for each server.
        timeout_s: for each request. Default: 180.
        compression, consistent, table, overlap: see `Client`. Default: none, no, the first, and no.
    """

    def __init__(
        self,
        name: str,
        named: Mapping[str, Tensor],
        plan: Plan,
        dials: Sequence[Dial],
        timeout_s: float = 180.0,
        compression: PushCompression | None = None,
        consistent: bool = False,
        table: int = 0,
        overlap: bool = False,
    ) -> None:
        self.plan, self.params = plan, list(named.values())
        self._client = Client(
            name, dials, plan.fingerprint(), timeout_s, compression=compression, consistent=consistent, table=table,
            overlap=overlap,
        )  # fmt: skip
        self.ahead = Ahead(self.params, plan, self._client, self._put_gradients)
        """Gradients that leave while the backward pass makes others."""
        self._written = Written(list(named), self.params)
        self.versions: tuple[int, ...] = (0,) * plan.num_servers
        """Of the weights that were pulled last."""
        self.restored = 0
        """See `Answer`; of these."""
        self._laid_out: dict[str, tuple[list[int], list[Parts]]] = {}
        self.pulled = False
        """The last request has brought weights."""
        self._taken: tuple[int, ...] | None = None  # versions: in the parameters,
        self._at: tuple[int, ...] | None = None  # that the backward pass is at,
        self._bases: tuple[int, ...] | None = None  # and that the next push was computed at
        self.in_step = False
        """The next version is made of a push of each worker, as far as this one knows."""

    def start(
        self,
        optimizer: str,
        arguments: Mapping[str, Any],
        state: tuple[Mapping[str, Sequence[Tensor | None]], Mapping[str, float]] = ({}, {}),
        staleness: str | StalenessPolicy | None = None,
        anew: bool = False,
        warmup_steps: int | None = None,
    ) -> None:
        """Join; servers without weights take the parameters as they are. Pull.

        Args:
            optimizer, arguments: see `make_optimizer`.
            state: that it begins with: fields, with a tensor for each parameter, and scalars. Default: none.
            staleness, anew, warmup_steps: see `Client.start`.
        """
        fields, scalars = state
        for name, tensors in fields.items():
            self._fill(tensors)
            self._client.bring(name)
        self._fill([p.detach() for p in self.params])
        self._took(self._client.start(optimizer, arguments, fields, scalars, staleness, anew, warmup_steps))
        self.take_()

    def close(self) -> None:
        """Say goodbye; idempotent."""
        self.ahead.close()
        self._client.close()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of a push, as it travels, and of what is pulled; of all servers."""
        feedback = self._client.feedback
        pushed = [each.message_bytes for each in feedback] or [each.nbytes for each in self._client.gradients]
        return sum(pushed), sum(each.nbytes for each in self._client.weights)

    def rest(self, gate: int) -> None:
        """See `Client.rest`."""
        self._client.rest(gate)

    def lags(self) -> tuple[dict[str, Any], ...]:
        """See `Client.lags`."""
        return self._client.lags()

    def give_up(self) -> None:
        """From any thread: a request that is under way fails now."""
        self._client.give_up()

    # ---- what goes ----

    def begin_gradients(self) -> None:
        """A backward pass begins: the versions that are in the parameters are those that it is at."""
        self._at = self._taken

    def fill_gradients(self) -> None:
        """The gradients leave with the next push; zeros for a parameter that has none."""
        self._bases, self._at = self._at, None
        if self.ahead.under_way:
            self.ahead.finish()
        else:
            self._put_gradients(range(len(self.params)))

    @property
    def is_finite(self) -> bool:
        """Whether all is that leaves with the next push. It is fp32, in memory of the host."""
        return all(ops.all_finite(outgoing) for outgoing in self._client.gradients)

    def fill_change(self) -> None:
        """What has become of the parameters since `take_` leaves with the next push."""
        self._bases = None
        self._fill([p.detach() for p in self.params])
        for outgoing, base in zip(self._client.gradients, self._client.weights, strict=True):
            outgoing.sub_(base)
        self._written.end("pushed")

    @property
    def has_change(self) -> bool:
        """Whether `fill_change` has found any."""
        return any(bool(outgoing.any()) for outgoing in self._client.gradients)

    def written(self, coming: bool, every: bool) -> list[str]:
        """Names of parameters that hold other values than were pulled, see `Written`; ``coming``: more is under way."""
        return self._written.since(None if coming else self._incoming, every)

    def push(self, **how: Any) -> Answer:
        """See `Client.push`."""
        answer = self._client.push(**how, bases=self._bases)
        self.pulled = how.get("pull", True)
        if self.pulled:
            self._took(answer)
        return answer

    def push_change(self, **how: Any) -> Answer:
        """The same for what `fill_change` has put there."""
        answer = self.push(**how)
        if not self.pulled:  # the next change begins where this one has ended
            for outgoing, base in zip(self._client.gradients, self._client.weights, strict=True):
                base.add_(outgoing)
        return answer

    def pull(self, field: str | None = None) -> Answer:
        """See `Client.pull`."""
        answer = self._client.pull(field)
        self._took(answer)
        return answer

    def meet(self) -> Answer:
        """Pull the servers' weights as they are, also where workers have others to compute gradients at."""
        return self.pull("params")

    # ---- what comes ----

    @torch.no_grad()
    def take_(self) -> None:
        """Write what was pulled to the parameters.

        What `fill_change` compares with is what they hold then, and not what the servers hold: parameters of half
        precision hold less.
        """
        self._written.begin()
        self._taken = self.versions
        params = [real(p.detach()) for p in self.params]
        flat = [p.reshape(-1) for p in params]  # the same memory, where they lie in order
        into, pieces = _paired(flat, self._incoming)
        torch._foreach_copy_(into, pieces)
        for param, its in zip(params, flat, strict=True):
            if its.data_ptr() != param.data_ptr():
                param.copy_(its.view(param.shape))
        if half := [number for number, its in enumerate(into) if its.dtype is not torch.float32]:
            torch._foreach_copy_([pieces[number] for number in half], [into[number] for number in half])
        self._written.end("pulled")

    def read(self, field: str) -> tuple[dict[str, Any], list[Tensor]]:
        """What the servers' optimizer holds: what they say of it, and a tensor for each parameter, fp32."""
        self._written.base = "gone"  # it comes where weights do
        told, *_ = self._client.read(field)
        return told, self._whole(self._client.weights)

    # ---- what compression has yet to deliver ----

    def owed(self) -> dict[str, Tensor]:
        """What pushes have lacked so far, fp32, copied, by the parameters' names; empty without compression."""
        feedback = self._client.feedback
        whole = self._whole([each.residual for each in feedback]) if feedback else ()
        return dict(zip(self.plan.names, whole, strict=bool(feedback)))

    def owe(self, owed: Mapping[str, Tensor]) -> None:
        """The next push is to bring this, too, as far as it is of parameters that are here, in their size."""
        if not (feedback := self._client.feedback):
            return
        shards = [each.residual for each in feedback]
        names = zip(self.plan.names, self.plan.shapes, self._parts(shards), strict=True)
        for name, shape, parts in names:
            if name in owed and tuple(owed[name].shape) == shape:
                for part, piece in parts:
                    piece.copy_(owed[name].reshape(-1)[part])

    # ---- where it lies ----

    @property
    def _outgoing(self) -> list[Parts]:
        return self._known_parts("gradients", self._client.gradients)

    @property
    def _incoming(self) -> list[Parts]:
        return self._known_parts("weights", self._client.weights)

    def _known_parts(self, what: str, shards: Sequence[Tensor]) -> list[Parts]:
        """They lie elsewhere once another server has a shard."""
        at = [shard.data_ptr() for shard in shards]
        if self._laid_out.get(what, ([], []))[0] != at:
            self._laid_out[what] = at, self._parts(shards)
        return self._laid_out[what][1]

    def _fill(self, tensors: Sequence[Tensor | None]) -> None:
        _put(tensors, self._outgoing)

    def _put_gradients(self, numbers: Sequence[int]) -> None:
        outgoing = self._outgoing
        _put([self.params[i].grad for i in numbers], [outgoing[i] for i in numbers])

    def _whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """A tensor for each parameter, fp32, of what shards hold."""
        found = [torch.empty(shape) for shape in self.plan.shapes]
        for tensor, parts in zip(found, self._parts(shards), strict=True):
            for part, piece in parts:
                tensor.view(-1)[part].copy_(piece)
        return found

    def _parts(self, shards: Sequence[Tensor]) -> list[Parts]:
        found: list[Parts] = [[] for _ in self.params]
        for pieces, shard in zip(self.plan.pieces, shards, strict=True):
            for piece in pieces:
                size = piece.stop - piece.start
                found[piece.key].append((slice(piece.start, piece.stop), shard[piece.offset : piece.offset + size]))
        return found

    def _took(self, answer: Answer) -> None:
        self.versions, self.pulled, self.in_step = answer.versions, True, answer.in_step
        self.restored = answer.restored


@torch.no_grad()
def _put(tensors: Sequence[Tensor | None], places: Sequence[Parts]) -> None:
    """The elements of parameters where they belong; zeros for none."""
    given = [(t, parts) for t, parts in zip(tensors, places, strict=True) if t is not None]
    flat = [real(strided(t)).reshape(-1) for t, _ in given]
    elements, pieces = _paired(flat, [parts for _, parts in given])
    if pieces:
        torch._foreach_copy_(pieces, elements)
    for tensor, parts in zip(tensors, places, strict=True):
        for _, piece in parts if tensor is None else ():
            piece.zero_()


def _paired(flat: Sequence[Tensor], places: Sequence[Parts]) -> tuple[list[Tensor], list[Tensor]]:
    """What belongs together: views of the elements, and of shards."""
    elements, pieces = [], []
    for tensor, parts in zip(flat, places, strict=True):
        elements += [tensor] if len(parts) == 1 else [tensor[part] for part, _ in parts]
        pieces += [piece for _, piece in parts]
    return elements, pieces


def plan_of(named: Mapping[str, Tensor], num_servers: int, bigarray_bound: int) -> Plan:
    """Of a model's parameters; complex ones are pairs of real numbers.

    Raises:
        ValueError: one has more than 32 bits, which servers do not hold; names it.
    """
    found = {name: real(p.detach()) for name, p in named.items()}
    if wide := [name for name, t in found.items() if t.dtype.itemsize > torch.float32.itemsize]:
        raise ValueError(
            f"{wide} have 64 bits, and parameter servers hold fp32: convert them, or use another strategy."
        )
    return Plan.of(found, num_servers, bigarray_bound)
