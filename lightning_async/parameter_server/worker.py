"""A worker's model as a table of its servers: gradients or changes go to them, weights come back.

With a `StreamingPush` gradients leave while the backward pass still makes others: parts are sent to servers that share
no memory, which keep them, and the push at the step sends the rest, and what has changed since. `ExternalWrites` finds
what others write to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.backward import Backward, LayoutSpan
from lightning_async.engine.fingerprint import real, strided
from lightning_async.flat import FlatLayout
from lightning_async.parameter_server.client import Client, ServerAnswer
from lightning_async.parameter_server.partition import ServerPartition

Send = Callable[[Callable[[], Any]], Any]
"""Runs a function on another thread, in order."""
Parts = list[tuple[slice, Tensor]]
"""Slices of a parameter, and the parts of shards that hold them."""


class Worker:
    """The model of one worker, as a table of its servers. Used by one thread at a time, but for `give_up`.

    Args:
        named: the parameters, on any device, of any floating-point type of 32 bits or fewer.
        plan: see `plan_of`.
        client: of servers with this plan; closed with the worker.
    """

    def __init__(self, named: Mapping[str, Tensor], plan: ServerPartition, client: Client) -> None:
        self.plan = plan
        self.params = list(named.values())
        self.client = client
        self.ahead = StreamingPush(self.params, plan, self.client, self._put_gradients)
        self._written = ExternalWrites(list(named), self.params)
        self.versions: tuple[int, ...] = (0,) * plan.num_servers
        """Versions of the weights that were pulled last."""
        self.restored = 0
        """`ServerAnswer.restored` of these versions."""
        self._laid_out: dict[str, tuple[list[int], list[Parts]]] = {}
        self.pulled = False
        """Whether the last request has brought weights."""
        self._taken: tuple[int, ...] | None = None  # versions: in the parameters,
        self._at: tuple[int, ...] | None = None  # of the backward pass,
        self._bases: tuple[int, ...] | None = None  # and of the next push
        self.in_step = False
        """Whether the next version is made of a push of each worker, as far as this one knows."""

    def start(
        self,
        optimizer: str,
        arguments: Mapping[str, Any],
        state: tuple[Mapping[str, Sequence[Tensor | None]], Mapping[str, float]] = ({}, {}),
        **how: Any,
    ) -> None:
        """Join, and pull, see `Client.start`; servers without weights take the parameters.

        Args:
            state: of the optimizer: fields, with a tensor for each parameter, and scalars.
        """
        fields, scalars = state
        for name, tensors in fields.items():
            self._fill(tensors)
            self.client.bring(name)
        self._fill([p.detach() for p in self.params])
        self._took(self.client.start(optimizer, arguments, fields, scalars, **how))
        self.take_()

    def close(self) -> None:
        self.ahead.close()
        self.client.close()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of a push, as it travels, and of a pull, to and from all servers."""
        feedback = self.client.feedback
        pushed = [each.message_bytes for each in feedback] or [each.nbytes for each in self.client.gradients]
        return sum(pushed), sum(each.nbytes for each in self.client.weights)

    def begin_gradients(self) -> None:
        """Note the versions in the parameters, as a backward pass begins."""
        self._at = self._taken

    def fill_gradients(self) -> None:
        """Fill the next push with the gradients; zeros for a parameter without one."""
        self._bases = self._at
        self._at = None
        if self.ahead.under_way:
            self.ahead.finish()
        else:
            self._put_gradients(range(len(self.params)))

    @property
    def is_finite(self) -> bool:
        """Whether all elements of the next push are."""
        return all(ops.all_finite(outgoing) for outgoing in self.client.gradients)

    def fill_change(self) -> None:
        """Fill the next push with the change of the parameters since `take_`."""
        self._bases = None
        self._fill([p.detach() for p in self.params])
        for outgoing, base in zip(self.client.gradients, self.client.weights, strict=True):
            outgoing.sub_(base)
        self._written.end("pushed")

    @property
    def has_change(self) -> bool:
        return any(bool(outgoing.any()) for outgoing in self.client.gradients)

    def written(self, coming: bool, every: bool) -> list[str]:
        """Return `ExternalWrites.since`; ``coming``: newer weights are under way."""
        return self._written.since(None if coming else self._incoming, every)

    def push(self, **how: Any) -> ServerAnswer:
        answer = self.client.push(**how, bases=self._bases)
        self.pulled = how.get("pull", True)
        if self.pulled:
            self._took(answer)
        return answer

    def push_change(self, **how: Any) -> ServerAnswer:
        answer = self.push(**how)
        if not self.pulled:  # the next change begins where this one has ended
            for outgoing, base in zip(self.client.gradients, self.client.weights, strict=True):
                base.add_(outgoing)
        return answer

    def pull(self, field: str | None = None) -> ServerAnswer:
        answer = self.client.pull(field)
        self._took(answer)
        return answer

    def meet(self) -> ServerAnswer:
        """Pull the servers' weights, also where workers compute gradients at others."""
        return self.pull("params")

    @torch.no_grad()
    def take_(self) -> None:
        """Write what was pulled to the parameters.

        The base of `fill_change` is then what they hold: half precision holds less than the servers' weights.
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
        """Read a field of the optimizer's state; return a server's reply, and an fp32 tensor for each parameter."""
        self._written.base = "gone"  # it comes where weights do
        reply, *_ = self.client.read(field)
        return reply, self._whole(self.client.weights)

    def carried_residual(self) -> dict[str, Tensor]:
        """Return a copy of compression's residual, fp32, by parameters' names; empty without compression."""
        feedback = self.client.feedback
        whole = self._whole([each.residual for each in feedback]) if feedback else ()
        return dict(zip(self.plan.names, whole, strict=bool(feedback)))

    def load_residual(self, carried_residual: Mapping[str, Tensor]) -> None:
        """Add this residual to the next push, as far as it is of parameters that are here, in their size."""
        if not (feedback := self.client.feedback):
            return
        shards = [each.residual for each in feedback]
        names = zip(self.plan.names, self.plan.shapes, self._parts(shards), strict=True)
        for name, shape, parts in names:
            if name in carried_residual and tuple(carried_residual[name].shape) == shape:
                for part, piece in parts:
                    piece.copy_(carried_residual[name].reshape(-1)[part])

    @property
    def _outgoing(self) -> list[Parts]:
        return self._known_parts("gradients", self.client.gradients)

    @property
    def _incoming(self) -> list[Parts]:
        return self._known_parts("weights", self.client.weights)

    def _known_parts(self, what: str, shards: Sequence[Tensor]) -> list[Parts]:
        """Return the parts of shards; their memory moves where a connection is made anew."""
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
        """Return an fp32 tensor for each parameter, from shards."""
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

    def _took(self, answer: ServerAnswer) -> None:
        self.versions = answer.versions
        self.pulled = True
        self.in_step = answer.in_step
        self.restored = answer.restored


def plan_of(named: Mapping[str, Tensor], num_servers: int, bigarray_bound: int) -> ServerPartition:
    """Return the plan of a model's parameters; complex ones are pairs of real numbers.

    Raises:
        ValueError: one has more than 32 bits, which servers do not hold.
    """
    found = {name: real(p.detach()) for name, p in named.items()}
    if wide := [name for name, t in found.items() if t.dtype.itemsize > torch.float32.itemsize]:
        raise ValueError(
            f"{wide} have 64 bits, and parameter servers hold fp32: convert them, or use another strategy."
        )
    return ServerPartition.of(found, num_servers, bigarray_bound)


class StreamingPush:
    """Gradients that are sent within the backward pass, on the training thread; on GPUs they are sent after it.

    Where most of them change after they were sent (they are clipped), nothing is sent within the pass any more.

    Args:
        params: of the model, in the plan's order.
        put: puts the gradients of these parameters, by number, into the client's memory.
    """

    def __init__(
        self, params: Sequence[Any], plan: ServerPartition, client: Client, put: Callable[[Sequence[int]], None]
    ) -> None:
        self._params = list(params)
        self._plan = plan
        self._client = client
        self._put = put
        self._backward: Backward | None = None
        self._send: Send = lambda do: do()
        self._wasted = False

    @property
    def under_way(self) -> bool:
        return self._backward is not None and self._backward.under_way

    def begin(self, send: Send) -> None:
        """Begin a backward pass, with no push under way."""
        if self._wasted or any(p.device.type != "cpu" for p in self._params):
            return
        if self._backward is None:
            self._backward = Backward(self._params, FlatLayout(self._params), self._take)
        self._send = send
        send(self._client.begin_parts)
        self._backward.begin()

    def finish(self) -> None:
        """End it: send again what has changed since it was sent."""
        assert self._backward is not None
        if changed := self._backward.finish():
            self._put(changed)
            sizes = [p.numel() for p in self._params]
            self._wasted = 2 * sum(sizes[i] for i in changed) > sum(sizes)
            if self._wasted:
                self._send(self._client.begin_parts)
                return
            for i in changed:
                self._send(partial(self._client.leave, self._parts(i, i + 1)))

    def give_up(self) -> None:
        if self._backward is not None:
            self._backward.give_up()

    def close(self) -> None:
        if self._backward is not None:
            self._backward.close()

    def _take(self, whole: Sequence[LayoutSpan]) -> None:
        first = whole[-1].first
        last = whole[0].last
        self._put(range(first, last))
        self._send(partial(self._client.leave, self._parts(first, last)))

    def _parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the range of these parameters in each server's shard."""
        found = []
        for pieces, size in zip(self._plan.pieces, self._plan.sizes, strict=True):
            offsets = [next((p.offset for p in pieces if p.key >= key), size) for key in (first, last)]
            found.append((offsets[0], offsets[1]))
        return found


class ExternalWrites:
    """Writes to parameters since weights were pulled, beside the optimizer's step: by a callback, say."""

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._seen = self._versions()
        self._overwritten: set[int] = set()
        self.base: Literal["pulled", "pushed", "gone"] = "gone"
        """What the parameters held last; ``"gone"``: the memory of pulls holds something else now."""

    def begin(self) -> None:
        """Note that weights are about to overwrite the parameters."""
        self._overwritten |= self._changed()

    def end(self, base: Literal["pulled", "pushed"]) -> None:
        """Note that the parameters hold what was pulled, or pushed."""
        self._seen = self._versions()
        self.base = base

    def since(self, pulled: Sequence[Sequence[tuple[slice, Tensor]]] | None, every: bool) -> list[str]:
        """Return the names of parameters that others have written to, also where a pull has overwritten that.

        Args:
            pulled: the pieces of each parameter, to compare values; None while newer ones are coming.
            every: compare all, and not only those with a new version in autograd: writes to ``.data`` have none.
        """
        found = self._changed()
        if pulled is not None and self.base != "pushed":
            looked_at = set(range(len(self._params))) if every else found
            found = {i for i in looked_at if self.base == "pulled" and not _same(self._params[i], pulled[i])}
            self._seen = self._versions()
        found |= self._overwritten
        self._overwritten = set()
        return [self._names[i] for i in sorted(found)]

    def _changed(self) -> set[int]:
        pairs = zip(self._versions(), self._seen, strict=True)
        return {i for i, (now, seen) in enumerate(pairs) if now != seen}

    def _versions(self) -> list[int]:
        return [p._version for p in self._params]


def _same(param: Tensor, pieces: Sequence[tuple[slice, Tensor]]) -> bool:
    """Compare to the bit, also NaN."""
    flat = real(param.detach()).reshape(-1).to("cpu", torch.float32)
    return all(torch.equal(flat[part].view(torch.int32), piece.view(torch.int32)) for part, piece in pieces)


@torch.no_grad()
def _put(tensors: Sequence[Tensor | None], places: Sequence[Parts]) -> None:
    """Copy the elements of tensors to their places; zeros for None."""
    given = [(t, parts) for t, parts in zip(tensors, places, strict=True) if t is not None]
    flat = [real(strided(t)).reshape(-1) for t, _ in given]
    elements, pieces = _paired(flat, [parts for _, parts in given])
    if pieces:
        torch._foreach_copy_(pieces, elements)
    for tensor, parts in zip(tensors, places, strict=True):
        if tensor is None:
            for _, piece in parts:
                piece.zero_()


def _paired(flat: Sequence[Tensor], places: Sequence[Parts]) -> tuple[list[Tensor], list[Tensor]]:
    """Return views of the elements, and of their places in shards."""
    elements = []
    pieces = []
    for tensor, parts in zip(flat, places, strict=True):
        elements += [tensor] if len(parts) == 1 else [tensor[part] for part, _ in parts]
        pieces += [piece for _, piece in parts]
    return elements, pieces
