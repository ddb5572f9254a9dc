"""A worker's access to one table on its servers: gradients or changes are sent, and weights are pulled.

`Worker` copies between the model's parameters and the buffers of a `Client`. `StreamingPush` sends gradients to servers
that share no memory with the worker, while the backward pass still computes others. The push at the optimizer step then
sends the rest, and parts that have changed since. `ExternalWrites` finds writes to parameters by other code than the
optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
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
from lightning_async.parameter_server.optimizers import Scalars, joined_runs
from lightning_async.parameter_server.partition import ServerPartition

Send = Callable[[Callable[[], Any]], Any]
"""A function that runs its argument, a request to servers, on another thread; requests run one after another."""
Parts = list[tuple[slice, Tensor]]
"""Slices of a flat parameter, each with the view of a shard that holds these elements."""
OptimizerState = tuple[Mapping[str, Sequence[Tensor | None]], Sequence[Scalars]]
"""State of an optimizer: its fields by name, each with a tensor for each parameter; and each parameter's scalars."""


class Worker:
    """One worker's access to a model on servers: it pulls weights into parameters, and pushes gradients.

    The servers hold the weights of these parameters, and the optimizer's state, as one table. Used by one thread at a
    time.

    Args:
        named: The parameters by name, on any device, of any floating-point type of at most 32 bits.
        plan: Partition of the parameters among servers, see `plan_of`.
        client: Client of servers with this plan; closed with the worker.
    """

    def __init__(self, named: Mapping[str, Tensor], plan: ServerPartition, client: Client) -> None:
        self.plan = plan
        self.params = list(named.values())
        self.client = client
        self.ahead = StreamingPush(self.params, plan, self.client, self._put_gradients)
        self._written = ExternalWrites(list(named), self.params)
        self.versions: tuple[int, ...] = (0,) * plan.num_servers
        """Versions of the weights that were pulled last, one for each server."""
        self.restored = 0
        """`ServerAnswer.restored` of the weights that were pulled last."""
        self._laid_out: dict[str, tuple[list[int], list[Parts]]] = {}
        self.pulled = False
        """Whether the last request has pulled weights."""
        # Versions of the weights in the parameters, of the last backward pass, and of the next push.
        self._taken: tuple[int, ...] | None = None
        self._at: tuple[int, ...] | None = None
        self._bases: tuple[int, ...] | None = None
        self._skips: list[list[tuple[int, int]]] = []
        self.in_step = False
        """Whether the next update combines one push of each worker, as the last answer says."""

    def start(
        self,
        optimizer: str,
        arguments: Mapping[str, Any],
        state: OptimizerState = ({}, ()),
        **how: Any,
    ) -> None:
        """Join the servers and pull the weights, see `Client.start`. Servers that have no weights take the parameters.

        Args:
            optimizer: Name of the servers' optimizer.
            arguments: Arguments of the optimizer.
            state: State of the optimizer. Default: none, the state is new.
            **how: Other arguments of `Client.start`.
        """
        fields, scalars = state
        for name, tensors in fields.items():
            self._fill(tensors)
            self.client.bring(name)
        self._fill([p.detach() for p in self.params])
        runs = [
            joined_runs((piece.offset + piece.stop - piece.start, scalars[piece.key]) for piece in pieces)
            for pieces in (self.plan.pieces if scalars else ())
        ]
        self._took(self.client.start(optimizer, arguments, fields, runs, **how))
        self.take_()

    def close(self) -> None:
        self.ahead.close()
        self.client.close()

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes of one push, after compression, and of one pull, each summed over all servers."""
        feedback = self.client.feedback
        pushed = [each.message_bytes for each in feedback] or [each.nbytes for each in self.client.gradients]
        return sum(pushed), sum(each.nbytes for each in self.client.weights)

    def begin_gradients(self) -> None:
        """Record the versions of the weights in the parameters, at the beginning of a backward pass.

        The next push tells the servers these versions, because its gradients are computed at these weights.
        """
        self._at = self._taken

    def fill_gradients(self) -> None:
        """Copy the gradients into the next push. Parameters without a gradient get zeros, and will not be stepped."""
        self._bases = self._at
        self._at = None
        if self.ahead.under_way:
            self.ahead.finish()
        else:
            self._put_gradients(range(len(self.params)))
        without = {number for number, p in enumerate(self.params) if p.grad is None}
        servers = range(self.plan.num_servers if without else 0)
        self._skips = [self.plan.spans_of(server, without) for server in servers]

    @property
    def is_finite(self) -> bool:
        """Whether all elements of the next push are finite."""
        return all(ops.all_finite(outgoing) for outgoing in self.client.gradients)

    def fill_change(self) -> None:
        """Write the change of the parameters since the last `take_` into the next push."""
        # A change is computed from the weights of the last pull, which is the client's default.
        self._bases = None
        self._skips = []
        self._fill([p.detach() for p in self.params])
        for outgoing, base in zip(self.client.gradients, self.client.weights, strict=True):
            outgoing.sub_(base)
        self._written.end("pushed")

    @property
    def has_change(self) -> bool:
        """Whether any element of the next push differs from zero."""
        return any(bool(outgoing.any()) for outgoing in self.client.gradients)

    def written(self, coming: bool, every: bool) -> list[str]:
        """Return the names of parameters that other code has written to, see `ExternalWrites.since`.

        Args:
            coming: Whether newer weights are being pulled now, so that values cannot be compared with pulled ones.
            every: Whether to compare the values of all parameters.
        """
        return self._written.since(None if coming else self._incoming, every)

    def push(self, **how: Any) -> ServerAnswer:
        """Make a push, see `Client.push`, and record the versions of the weights that it pulls."""
        answer = self.client.push(**how, bases=self._bases, skips=self._skips)
        # A push without a pull leaves the memory of pulled weights as it is.
        self.pulled = how.get("pull", True)
        if self.pulled:
            self._took(answer)
        return answer

    def push_change(self, **how: Any) -> ServerAnswer:
        """Push the change of the parameters that `fill_change` has computed. ``how`` is passed to `push`."""
        answer = self.push(**how)
        if not self.pulled:  # nothing newer was pulled, so the next change begins where this one ends
            for outgoing, base in zip(self.client.gradients, self.client.weights, strict=True):
                base.add_(outgoing)
        return answer

    def pull(self, field: str | None = None) -> ServerAnswer:
        """Pull the weights, or the array ``field`` of the servers' state, see `Client.pull`; record the versions."""
        answer = self.client.pull(field)
        self._took(answer)
        return answer

    def meet(self) -> ServerAnswer:
        """Pull the servers' actual weights, even if workers compute gradients at predicted weights."""
        return self.pull("params")

    @torch.no_grad()
    def take_(self) -> None:
        """Write the pulled weights to the parameters.

        Parameters of half precision round the weights. The rounded values then replace the pulled ones in the client's
        memory, so that `fill_change` does not push the rounding as a change.
        """
        self._written.begin()
        self._taken = self.versions
        params = [real(p.detach()) for p in self.params]
        flat = [p.reshape(-1) for p in params]  # views if the elements lie in order, else copies
        into, pieces = _paired(flat, self._incoming)
        torch._foreach_copy_(into, pieces)
        for param, its in zip(params, flat, strict=True):
            # The flat tensor was a copy, because the parameter's elements do not lie in order.
            if its.data_ptr() != param.data_ptr():
                param.copy_(its.view(param.shape))
        if half := [number for number, its in enumerate(into) if its.dtype is not torch.float32]:
            # Without this, the rounding to half precision would be pushed as a change.
            torch._foreach_copy_([pieces[number] for number in half], [into[number] for number in half])
        self._written.end("pulled")

    def read(self, field: str) -> tuple[tuple[dict[str, Any], ...], list[Tensor]]:
        """Read a field of the optimizer's state from the servers, over the pulled weights in the client's memory.

        Returns the reply of each server, and the field as an fp32 tensor for each parameter.
        """
        self._written.base = "gone"  # the field overwrites the memory of pulled weights
        replies = self.client.read(field)
        return replies, self._whole(self.client.weights)

    def scalars_of(self, replies: Sequence[Mapping[str, Any]]) -> list[Scalars]:
        """Return the scalars of the servers' optimizer for each parameter, from the replies to `read`."""
        found: list[Scalars] = [{} for _ in self.params]
        for pieces, reply in zip(self.plan.pieces, replies, strict=True):
            stops = [stop for stop, _ in reply["scalars"]]
            for piece in pieces:
                found[piece.key] = reply["scalars"][bisect_right(stops, piece.offset)][1]
        return found

    def carried_residual(self) -> dict[str, Tensor]:
        """Return a copy of the residual of compression, fp32, by parameter name; empty without compression."""
        feedback = self.client.feedback
        whole = self._whole([each.residual for each in feedback]) if feedback else ()
        return dict(zip(self.plan.names, whole, strict=bool(feedback)))

    def load_residual(self, carried_residual: Mapping[str, Tensor]) -> None:
        """Load a residual of compression for the next push; skip parameters whose name or shape this worker lacks."""
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
        """Return each parameter's parts in the shards, cached under ``what`` until the shards' memory moves."""
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
        """Return an fp32 tensor for each parameter, put together from the shards."""
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
    """Return the partition of a model's parameters among servers; complex parameters are pairs of real numbers.

    Args:
        named: The parameters by name.
        num_servers: Number of servers.
        bigarray_bound: Number of elements from which a parameter is split, see `ServerPartition`.

    Raises:
        ValueError: A parameter's elements have more than 32 bits, which servers do not support.
    """
    found = {name: real(p.detach()) for name, p in named.items()}
    # fp32 on servers would lose bits silently.
    if wide := [name for name, t in found.items() if t.dtype.itemsize > torch.float32.itemsize]:
        raise ValueError(
            f"{wide} have 64 bits, and parameter servers hold fp32: convert them, or use another strategy."
        )
    return ServerPartition.of(found, num_servers, bigarray_bound)


class StreamingPush:
    """A push that sends gradients while the backward pass runs on the training thread.

    Nothing is sent during the pass if parameters are on a GPU, or if in an earlier pass more than half of the elements
    changed after they were sent, for example by clipping.

    Args:
        params: Parameters of the model, in the plan's order.
        plan: Partition of the parameters among servers.
        client: Client of the servers.
        put: Function that copies the gradients of the parameters with these indices into the client's memory for the
            next push.
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
        """Whether `begin` was called for a backward pass, and `finish` or `give_up` was not."""
        return self._backward is not None and self._backward.under_way

    def begin(self, send: Send) -> None:
        """Start to send the gradients of a backward pass, as the pass computes them. No push may be under way.

        Args:
            send: Function that runs requests to servers on another thread, one after another.
        """
        if self._wasted or any(p.device.type != "cpu" for p in self._params):
            return
        # Made with the first pass: a worker that never streams needs no hooks on its parameters.
        if self._backward is None:
            self._backward = Backward(self._params, FlatLayout(self._params), self._take)
        self._send = send
        send(self._client.begin_parts)
        self._backward.begin()

    def finish(self) -> None:
        """Send the gradients that were not sent during the backward pass, and again those that have changed since.

        If more than half of all elements have changed, the next push sends everything, and later passes send nothing
        early.
        """
        assert self._backward is not None
        # A second backward pass, a hook or clipping may change a gradient after it was sent.
        if changed := self._backward.finish():
            self._put(changed)
            sizes = [p.numel() for p in self._params]
            self._wasted = 2 * sum(sizes[i] for i in changed) > sum(sizes)
            if self._wasted:
                self._send(self._client.begin_parts)
                return
            # Sent again one by one: a server takes the tail, the part before it, or a part that it has already.
            for i in changed:
                self._send(partial(self._client.leave, self._parts(i, i + 1)))

    def give_up(self) -> None:
        """Abandon the sending of the backward pass under way, if any."""
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
        """Return the range of the parameters ``first`` to ``last - 1`` in each server's shard, in elements."""
        found = []
        for pieces, size in zip(self._plan.pieces, self._plan.sizes, strict=True):
            offsets = [next((p.offset for p in pieces if p.key >= key), size) for key in (first, last)]
            found.append((offsets[0], offsets[1]))
        return found


class ExternalWrites:
    """Writes to parameters by code other than the optimizer, such as a callback, since the last pull or push.

    Args:
        names: Names of the parameters.
        params: The parameters, in the sequence of ``names``.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._seen = self._versions()
        self._overwritten: set[int] = set()
        self.base: Literal["pulled", "pushed", "gone"] = "gone"
        """The weights that the parameters were last equal to; ``"gone"``: the pulled weights were overwritten."""

    def begin(self) -> None:
        """Record which parameters other code has written to, before pulled weights overwrite the parameters."""
        self._overwritten |= self._changed()

    def end(self, base: Literal["pulled", "pushed"]) -> None:
        """Record that the parameters equal the weights that were pulled or pushed. Later writes count as external."""
        self._seen = self._versions()
        self.base = base

    def since(self, pulled: Sequence[Sequence[tuple[slice, Tensor]]] | None, every: bool) -> list[str]:
        """Return the names of parameters that other code has written to since the last pull or push.

        Writes that pulled weights have overwritten are included. Each write is returned once.

        Args:
            pulled: For each parameter, the pieces of the pulled weights, with which its values are compared. None:
                newer weights are being pulled now, and values are not compared.
            every: Whether to compare all parameters, and not only those whose version in autograd has changed. Writes
                to ``.data`` change no version.
        """
        found = self._changed()
        if pulled is not None and self.base != "pushed":
            looked_at = set(range(len(self._params))) if every else found
            found = {i for i in looked_at if self.base == "pulled" and not _same(self._params[i], pulled[i])}
            self._seen = self._versions()
        # Writes that a pull has overwritten cannot be seen any more, but are not to be missed.
        found |= self._overwritten
        self._overwritten = set()
        return [self._names[i] for i in sorted(found)]

    def _changed(self) -> set[int]:
        pairs = zip(self._versions(), self._seen, strict=True)
        return {i for i, (now, seen) in enumerate(pairs) if now != seen}

    def _versions(self) -> list[int]:
        return [p._version for p in self._params]


def _same(param: Tensor, pieces: Sequence[tuple[slice, Tensor]]) -> bool:
    """Return whether a parameter equals the pulled pieces to the bit, NaN included."""
    flat = real(param.detach()).reshape(-1).to("cpu", torch.float32)
    return all(torch.equal(flat[part].view(torch.int32), piece.view(torch.int32)) for part, piece in pieces)


@torch.no_grad()
def _put(tensors: Sequence[Tensor | None], places: Sequence[Parts]) -> None:
    """Copy the elements of each tensor to their places in the shards; write zeros to the places of None."""
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
    """Return two lists of equal length: pieces of the flat tensors, and the views of shards that they fill."""
    elements = []
    pieces = []
    for tensor, parts in zip(flat, places, strict=True):
        elements += [tensor] if len(parts) == 1 else [tensor[part] for part, _ in parts]
        pieces += [piece for _, piece in parts]
    return elements, pieces
