"""A model as its servers' keys: gradients or changes go to them, weights come back into the parameters.

`Worker` does this for one table. With a `StreamingPush` gradients leave while the backward pass still makes others:

    the training thread                         the thread that pushes                   a server
    a hook: the last parameters' are there
    put where they leave -------------------->  sent, where memory is not shared -->     kept in the channel's memory
    a hook: those before them --------------->  ...
    a step: the rest, and what has changed
    since, and a push ----------------------->  a push, as any other

`Written` notices what others write to parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.algorithms.compression import PushCompression
from lightning_async.algorithms.staleness import StalenessPolicy
from lightning_async.comm.p2p import Dial
from lightning_async.engine.backward import Backward, LayoutSpan
from lightning_async.engine.fingerprint import real, strided
from lightning_async.flat import FlatLayout
from lightning_async.parameter_server.client import Client, ServerAnswer
from lightning_async.parameter_server.partition import ServerPartition

Send = Callable[[Callable[[], Any]], Any]
"""Has another thread do something, one after the other."""
Parts = list[tuple[slice, Tensor]]
"""Of a parameter: which of its elements, and the part of a shard that has them."""


class Worker:
    """The model of one worker, as a table of its servers. Used by one thread at a time, but for `give_up`.

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
        plan: ServerPartition,
        dials: Sequence[Dial],
        timeout_s: float = 180.0,
        compression: PushCompression | None = None,
        consistent: bool = False,
        table: int = 0,
        overlap: bool = False,
    ) -> None:
        self.plan = plan
        self.params = list(named.values())
        self._client = Client(
            name, dials, plan.fingerprint(), timeout_s, compression=compression, consistent=consistent, table=table,
            overlap=overlap,
        )  # fmt: skip
        self.ahead = StreamingPush(self.params, plan, self._client, self._put_gradients)
        """Gradients that leave while the backward pass makes others."""
        self._written = Written(list(named), self.params)
        self.versions: tuple[int, ...] = (0,) * plan.num_servers
        """Of the weights that were pulled last."""
        self.restored = 0
        """`ServerAnswer.restored` of these."""
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

    def rest(self, sync_point: int) -> None:
        self._client.rest(sync_point)

    def lags(self) -> tuple[dict[str, Any], ...]:
        return self._client.lags()

    def give_up(self) -> None:
        """Fail the request that is under way; callable from any thread."""
        self._client.give_up()

    # ---- what goes ----

    def begin_gradients(self) -> None:
        """Begin a backward pass: it is at the versions that are in the parameters."""
        self._at = self._taken

    def fill_gradients(self) -> None:
        """Have the gradients leave with the next push; zeros for a parameter that has none."""
        self._bases = self._at
        self._at = None
        if self.ahead.under_way:
            self.ahead.finish()
        else:
            self._put_gradients(range(len(self.params)))

    @property
    def is_finite(self) -> bool:
        """Whether all is that leaves with the next push. It is fp32, in memory of the host."""
        return all(ops.all_finite(outgoing) for outgoing in self._client.gradients)

    def fill_change(self) -> None:
        """Have the change of the parameters since `take_` leave with the next push."""
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
        """Return parameters that hold other values than were pulled, see `Written`; ``coming``: more is under way."""
        return self._written.since(None if coming else self._incoming, every)

    def push(self, **how: Any) -> ServerAnswer:
        answer = self._client.push(**how, bases=self._bases)
        self.pulled = how.get("pull", True)
        if self.pulled:
            self._took(answer)
        return answer

    def push_change(self, **how: Any) -> ServerAnswer:
        """Push what `fill_change` has put there."""
        answer = self.push(**how)
        if not self.pulled:  # the next change begins where this one has ended
            for outgoing, base in zip(self._client.gradients, self._client.weights, strict=True):
                base.add_(outgoing)
        return answer

    def pull(self, field: str | None = None) -> ServerAnswer:
        answer = self._client.pull(field)
        self._took(answer)
        return answer

    def meet(self) -> ServerAnswer:
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
        """Read what the servers' optimizer holds: what they say of it, and a tensor for each parameter, fp32."""
        self._written.base = "gone"  # it comes where weights do
        told, *_ = self._client.read(field)
        return told, self._whole(self._client.weights)

    # ---- the residual of compression ----

    def carried_residual(self) -> dict[str, Tensor]:
        """Return what pushes have lacked so far, fp32, copied, by the parameters' names; empty without compression."""
        feedback = self._client.feedback
        whole = self._whole([each.residual for each in feedback]) if feedback else ()
        return dict(zip(self.plan.names, whole, strict=bool(feedback)))

    def load_residual(self, carried_residual: Mapping[str, Tensor]) -> None:
        """Have the next push bring this, too, as far as it is of parameters that are here, in their size."""
        if not (feedback := self._client.feedback):
            return
        shards = [each.residual for each in feedback]
        names = zip(self.plan.names, self.plan.shapes, self._parts(shards), strict=True)
        for name, shape, parts in names:
            if name in carried_residual and tuple(carried_residual[name].shape) == shape:
                for part, piece in parts:
                    piece.copy_(carried_residual[name].reshape(-1)[part])

    # ---- where it lies ----

    @property
    def _outgoing(self) -> list[Parts]:
        return self._known_parts("gradients", self._client.gradients)

    @property
    def _incoming(self) -> list[Parts]:
        return self._known_parts("weights", self._client.weights)

    def _known_parts(self, what: str, shards: Sequence[Tensor]) -> list[Parts]:
        """Return where shards lie: elsewhere, once another server has one."""
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
        """Return a tensor for each parameter, fp32, of what shards hold."""
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
        ValueError: one has more than 32 bits, which servers do not hold; names it.
    """
    found = {name: real(p.detach()) for name, p in named.items()}
    if wide := [name for name, t in found.items() if t.dtype.itemsize > torch.float32.itemsize]:
        raise ValueError(
            f"{wide} have 64 bits, and parameter servers hold fp32: convert them, or use another strategy."
        )
    return ServerPartition.of(found, num_servers, bigarray_bound)


class StreamingPush:
    """The gradients of one worker's model that leave within the backward pass; on the training thread. On GPUs they
    leave after it.

    Where most of what has left changes behind the backward pass (it is clipped), nothing leaves within it any more.

    Args:
        params: of the model, in the plan's order.
        plan: which server has what.
        client: by which it leaves.
        put: puts the gradients of these parameters, by number, where they leave.
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
        """`begin` was called, and not `finish`."""
        return self._backward is not None and self._backward.under_way

    def begin(self, send: Send) -> None:
        """Begin a backward pass, with no push under way: `finish` follows."""
        if self._wasted or any(p.device.type != "cpu" for p in self._params):
            return
        if self._backward is None:
            self._backward = Backward(self._params, FlatLayout(self._params), self._take)
        self._send = send
        send(self._client.begin_parts)
        self._backward.begin()

    def finish(self) -> None:
        """Put the gradients that are pushed."""
        assert self._backward is not None
        if changed := self._backward.finish():
            self._put(changed)
            sizes = [p.numel() for p in self._params]
            self._wasted = 2 * sum(sizes[i] for i in changed) > sum(sizes)
            for i in () if self._wasted else changed:
                self._send(partial(self._client.leave, self._parts(i, i + 1)))
            if self._wasted:
                self._send(self._client.begin_parts)

    def give_up(self) -> None:
        """Take back a backward pass that has failed."""
        if self._backward is not None:
            self._backward.give_up()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        if self._backward is not None:
            self._backward.close()

    def _take(self, whole: Sequence[LayoutSpan]) -> None:
        first = whole[-1].first
        last = whole[0].last
        self._put(range(first, last))
        self._send(partial(self._client.leave, self._parts(first, last)))

    def _parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return, of each server, where in its shard these parameters lie."""
        found = []
        for pieces, size in zip(self._plan.pieces, self._plan.sizes, strict=True):
            offsets = [next((p.offset for p in pieces if p.key >= key), size) for key in (first, last)]
            found.append((offsets[0], offsets[1]))
        return found


class Written:
    """The writes to one worker's parameters, since weights were pulled, that others make: a callback, say.

    Servers do not hear of these.

    Args:
        names: of the parameters.
        params: themselves.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._names = names
        self._params = params
        self._seen = self._versions()
        self._overwritten: set[int] = set()
        self.base: Literal["pulled", "pushed", "gone"] = "gone"
        """What the parameters held last, and what is where it came: something else, where it is ``"gone"``."""

    def begin(self) -> None:
        """Note that weights are about to be written to the parameters: what others wrote is lost by that."""
        self._overwritten |= self._changed()

    def end(self, base: Literal["pulled", "pushed"]) -> None:
        """Note that the parameters hold what was pulled, or pushed."""
        self._seen = self._versions()
        self.base = base

    def since(self, pulled: Sequence[Sequence[tuple[slice, Tensor]]] | None, every: bool) -> list[str]:
        """Return the names of parameters that hold something else than was pulled, or did, and were overwritten since.

        Args:
            pulled: the pieces of each parameter, where they came; None while newer ones are coming. A parameter that
                was written to, and back again, counts as one that was not; where nothing can be compared, too.
            every: look at all, and not only at those that autograd has seen a change of: ``.data`` hides it.
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
    """Compare to the bit: what is not a number is equal to itself."""
    flat = real(param.detach()).reshape(-1).to("cpu", torch.float32)
    return all(torch.equal(flat[part].view(torch.int32), piece.view(torch.int32)) for part, piece in pieces)


@torch.no_grad()
def _put(tensors: Sequence[Tensor | None], places: Sequence[Parts]) -> None:
    """Put the elements of parameters where they belong; zeros for none."""
    given = [(t, parts) for t, parts in zip(tensors, places, strict=True) if t is not None]
    flat = [real(strided(t)).reshape(-1) for t, _ in given]
    elements, pieces = _paired(flat, [parts for _, parts in given])
    if pieces:
        torch._foreach_copy_(pieces, elements)
    for tensor, parts in zip(tensors, places, strict=True):
        for _, piece in parts if tensor is None else ():
            piece.zero_()


def _paired(flat: Sequence[Tensor], places: Sequence[Parts]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what belongs together: views of the elements, and of shards."""
    elements = []
    pieces = []
    for tensor, parts in zip(flat, places, strict=True):
        elements += [tensor] if len(parts) == 1 else [tensor[part] for part, _ in parts]
        pieces += [piece for _, piece in parts]
    return elements, pieces
