"""A worker's connections to its servers: pushes, pulls, and what happens when a server dies.

    push n: fill `gradients`, send to all servers, wait for all answers
    a server dies: connect again, send hello with the same life, repeat the request; it knows whether n was applied

What was pushed stays in this process's memory, unchanged, until it is answered. `Client` sends to all servers at once,
by one `ShardConnection` for each. `PushResiduals` and `Arrived` are the two ends of a compressed push.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms.compression import PushCompression, described, from_description
from lightning_async.algorithms.staleness import StalenessPolicy
from lightning_async.comm.p2p import Dial, PeerChannel
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, Evicted, PeerLost, SettingsMismatch
from lightning_async.parameter_server import consistency
from lightning_async.parameter_server.consistency import stated_staleness

_log = logging.getLogger(__name__)
_PAUSE_S = 0.02
_DIAL_S = 5.0
_PART_S = 60.0
_REFUSALS: dict[str, type[AsyncTrainingError]] = {
    "evicted": Evicted, "settings": SettingsMismatch, "missing": PeerLost, "uninitialised": PeerLost,
}  # fmt: skip


@dataclass(frozen=True)
class ServerAnswer:
    """The servers' answer to a push or a pull.

    Args:
        versions: of each server's shard.
        lags: for each server, updates since the weights that the push was computed at.
        resent: number of servers that were asked again.
        dropped: for each server, whether the push was dropped as too late.
        durable: version of each server's newest snapshot, which survives the loss of its host; -1: there is none.
        lost: acknowledged pushes of this worker that were lost with a server's host.
        in_step: the next version is made of a push of each worker.
        restored: grows whenever a server has begun with a snapshot: versions go back with it.
        called: in sync mode, whether a worker has called all with this round; all get it with the same one.
    """

    versions: tuple[int, ...]
    lags: tuple[int, ...] = ()
    resent: int = 0
    dropped: tuple[bool, ...] = ()
    durable: tuple[int, ...] = ()
    lost: int = 0
    in_step: bool = False
    called: bool = False
    restored: int = 0


class Client:
    """One worker's client of all servers; used by one thread at a time. After an error only `close` may be called.

    Args:
        worker: its name.
        dials: one for each server, in the plan's order; closed by the client.
        fingerprint: of the plan: servers take part in one only.
        timeout_s: for each request, over all servers; longer than their ``dead_after_s``, so that they first evict a
            worker that all wait for.
        absent_s: seconds after which a server that cannot be reached is lost.
        compression: of pushes. Default: none, they are fp32.
        consistent: whether a pull is of one version of all servers, see `consistency`.
        table: number of the servers' table.
        overlap: see `ShardConnection`.
    """

    def __init__(
        self,
        worker: str,
        dials: Sequence[Dial],
        fingerprint: str = "",
        timeout_s: float = 180.0,
        absent_s: float = 180.0,
        compression: PushCompression | None = None,
        consistent: bool = False,
        table: int = 0,
        overlap: bool = False,
    ) -> None:
        self.worker = worker
        self._timeout_s = timeout_s
        hello = {"worker": worker, "client": secrets.token_hex(3), "fingerprint": fingerprint, "table": table}
        self._lines = [ShardConnection(server, dial, hello, absent_s, overlap) for server, dial in enumerate(dials)]
        self._fingerprint = fingerprint
        self._compression = compression
        self._at_a_cut = consistent and len(dials) > 1
        self.feedback: list[PushResiduals] = []
        """The residuals of compressed pushes, one for each server; empty without compression."""
        if compression is not None:
            self.feedback = [PushResiduals(compression, _floats(line.dial.outgoing).numel()) for line in self._lines]

    @property
    def gradients(self) -> list[Tensor]:
        """fp32 memory for the next push, one for each server; not to be touched during a push."""
        return [each.source for each in self.feedback] or [_floats(line.dial.outgoing) for line in self._lines]

    @property
    def weights(self) -> list[Tensor]:
        """fp32 weights that were pulled last, one for each server; valid until the next request."""
        return [_floats(line.dial.incoming) for line in self._lines]

    def bring(self, field: str) -> None:
        """Send what is in `gradients` as a field of the optimizer's state, for `start`."""
        self._ask_with_all({"do": "bring", "field": field})

    def start(
        self,
        optimizer: str = "delta",
        arguments: Mapping[str, Any] | None = None,
        fields: Iterable[str] = (),
        scalars: Mapping[str, float] | None = None,
        staleness: str | StalenessPolicy | None = None,
        anew: bool = False,
        warmup_steps: int | None = None,
    ) -> ServerAnswer:
        """Join, and pull; servers without weights take those that are in `gradients`.

        Args:
            optimizer, arguments: see `make_optimizer`. Default: what is pushed is added.
            fields, scalars: of the optimizer's state; `bring` has sent the fields. Default: it is new.
            staleness: what the servers' `WorkerRules` must have. Default: any.
            anew: servers that have weights take these in their place; other workers are evicted.
            warmup_steps: of these weights, in place of the servers'.

        Raises:
            PeerLost: a server is not there in time.
            SettingsMismatch: a server has another optimizer, policy of staleness or plan, or cannot have this one.
        """
        header = {
            "do": "initialise", "optimizer": optimizer, "arguments": dict(arguments or {}),
            "fingerprint": self._fingerprint, "staleness": stated_staleness(staleness), "fields": list(fields),
            "scalars": dict(scalars or {}), "anew": anew, "warmup_steps": warmup_steps,
        }  # fmt: skip
        self._ask_with_all(header)
        for line in self._lines:
            line.began = True
        return self.pull()

    def pull(self, field: str | None = None) -> ServerAnswer:
        """Pull the newest weights into `weights`, or a ``field`` of the servers' state of the same version.

        Raises:
            PeerLost: a server has not answered in time, or has lost its weights.
            Evicted: the others have gone on without this worker.
        """
        if self._at_a_cut:
            return self._answer(consistency.pull(self._ask_all, field, self._timeout_s, self.worker))
        return self._answer(self._ask_all({"do": "pull", "field": field}))

    def push(
        self,
        *,
        lr: float | None = None,
        weight: float = 1.0,
        pull: bool = True,
        sync_point: int = 0,
        call: bool = False,
        bases: Sequence[int] | None = None,
    ) -> ServerAnswer:
        """Push what is in `gradients`, which is applied once, and pull. Servers' deaths cannot lose it afterwards.

        Args:
            lr: in place of the optimizer's own.
            weight: samples that it is the mean of, for sync mode. 0: the push is empty, and the residual stays here.
            pull: whether to pull the weights, too.
            sync_point: number of sync points that this worker has passed, see `rest`.
            call: in sync mode, whether to call all workers with this round, see `ServerAnswer.called`.
            bases: versions of each server that it was computed at. Default: those that were pulled last.

        Raises:
            ValueError: ``weight`` is below 0.
            PeerLost, Evicted: as of `pull`.
        """
        if not weight >= 0:
            raise ValueError(f"`push(weight={weight!r})` must be >= 0.")
        apart = pull and self._at_a_cut
        header = {
            "do": "push", "compression": described(self._compression), "lr": lr, "weight": weight,
            "pull": pull and not apart, "sync_point": sync_point, "call": call,
        }  # fmt: skip
        requests = []
        for server, line in enumerate(self._lines):
            base = line.base if bases is None else min(line.base, bases[server])
            outgoing = line.dial.outgoing
            size = 0
            if weight:
                size = self.feedback[server].encode_(outgoing) if self.feedback else outgoing.numel()
            requests.append(({**header, "number": line.pushed + 1, "base": base}, size))
        answer = self._answer(self._ask(requests), pulled=pull and not apart)
        if not apart:
            return answer
        pulled = self.pull()
        how: Any = {name: getattr(answer, name) for name in ("lags", "dropped", "called")}
        return replace(pulled, **how, resent=answer.resent + pulled.resent)

    def begin_parts(self) -> None:
        """Note that `gradients` are filled anew, from the end on."""
        for line in self._lines:
            line.begin_part()

    def leave(self, parts: Sequence[tuple[int, int]]) -> None:
        """Send a part of the next push ahead of it to servers that share no memory; not with compression.

        Args:
            parts: range of each server's `gradients`: the tail, the part before those that were sent, or one again.
        """
        itemsize = torch.float32.itemsize
        for line, (start, end) in zip(self._lines, parts, strict=True):
            if end > start and not self.feedback:
                line.leave(start * itemsize, (end - start) * itemsize)

    def snapshot(self) -> ServerAnswer:
        """Have all servers take a snapshot, and wait until it is durable; AsyncTrainingError where one cannot."""
        return self._answer(self._ask_all({"do": "snapshot"}), pulled=False)

    def read(self, field: str) -> tuple[dict[str, Any], ...]:
        """Read a field of all servers' state into `weights`; return their ``fields``, ``scalars`` and ``version``."""
        return tuple(self._ask_all({"do": "read", "field": field}))

    def rest(self, sync_point: int) -> None:
        """Have no worker wait for this one until a push comes from beyond that sync point, by number."""
        self._ask_all({"do": "rest", "sync_point": sync_point})

    def give_up(self) -> None:
        """Fail the request that is under way, and make no other one; callable from any thread."""
        for line in self._lines:
            line.give_up()

    def lags(self) -> tuple[dict[str, Any], ...]:
        """Return each server's histogram of lag, see `in_words`, with the ``mean`` of recent lags."""
        lags = [reply["lags"] for reply in self._ask_all({"do": "lags"})]
        return tuple({**each, "counts": {int(key): count for key, count in each["counts"].items()}} for each in lags)

    def close(self, leave: bool = True) -> None:
        """Leave, so that no worker waits for this one, and free the memory; idempotent."""
        for line in self._lines:
            line.close(leave)

    def _ask_with_all(self, header: Mapping[str, Any]) -> None:
        """Send a request to all servers, with what is in `gradients`, uncompressed."""
        for server, each in enumerate(self.feedback):
            _floats(self._lines[server].dial.outgoing).copy_(each.source)
        self._ask([(header, line.dial.outgoing.numel()) for line in self._lines])

    def _answer(self, replies: Sequence[Mapping[str, Any]], pulled: bool = True) -> ServerAnswer:
        versions = tuple(reply["version"] for reply in replies)
        if pulled:
            for line, version in zip(self._lines, versions, strict=True):
                line.pulled(version)
        return ServerAnswer(
            versions,
            lags=tuple(reply.get("lag", 0) for reply in replies),
            resent=sum(line.resent for line in self._lines),
            dropped=tuple(reply.get("dropped", False) for reply in replies),
            durable=tuple(reply.get("durable", -1) for reply in replies),
            lost=sum(line.lost for line in self._lines),
            in_step=any(reply.get("in_step", False) for reply in replies),
            called=any(reply.get("called", False) for reply in replies),
            restored=sum(reply.get("restored", 0) for reply in replies),
        )

    def _ask_all(self, header: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._ask([(header, 0)] * len(self._lines))

    def _ask(self, requests: Sequence[tuple[Mapping[str, Any], int]]) -> list[dict[str, Any]]:
        until = time.monotonic() + self._timeout_s
        for line, (header, size) in zip(self._lines, requests, strict=True):
            line.ask(header, size)
        return [line.reply(until) for line in self._lines]


class ShardConnection:
    """A worker's connection to one server, whichever process that is; used by one thread, but for `give_up`.

    A request without an answer is repeated.

    Args:
        server: its number, for messages.
        dial: closed by the connection.
        hello: the first message: the ``worker``, and what else identifies it.
        absent_s: seconds after which a server that cannot be reached is lost.
        overlap: gradients may be of weights before the last pull: the server keeps two places for those.
    """

    def __init__(
        self, server: int, dial: Dial, hello: Mapping[str, Any], absent_s: float, overlap: bool = False
    ) -> None:
        self.dial = dial
        self.base = 0
        self.began = False
        """The server had weights: one without has lost them."""
        self._overlap = overlap
        self._spare = False
        self._pushed_then = 0  # where the last pull is, and when that was
        self.resent = self.pushed = 0
        self._missing: list[tuple[int, int]] = []
        """Ranges of pushes that were answered, and lost since: first excluded, last included."""
        self._server = server
        self._worker = hello["worker"]
        self._hello = hello
        self._channel: PeerChannel | None = None
        self._life: int | None = None
        self._incarnation: str | None = None
        self._request: tuple[Mapping[str, Any], int] = {}, 0
        self._asked_at = 0.0
        self._why = "it was not reached."
        self._given_up = False
        self._absent_s = absent_s
        self._left: int | None = None
        """Offset from which on the server has the next push already; None: it has nothing of it."""
        self._away_since: float | None = None
        """When the server was last reached; None while there is a channel."""

    def ask(self, header: Mapping[str, Any], size: int) -> None:
        """Send a request, if there is a channel; `reply` connects and repeats it otherwise."""
        pushes = header["do"] == "push"
        before = header.get("base", self.base) < self.base
        flips = pushes or self.pushed > self._pushed_then  # a pull after a pull is in its place: nothing is of that one
        places = {"of": self._spare ^ (self._overlap and before), "to": self._spare ^ (self._overlap and flips)}
        self._request = ({**header, **places}, size)
        self._asked_at = time.monotonic()
        self.resent = 0
        if self._channel is not None:
            self._try(self._channel)

    def pulled(self, version: int) -> None:
        """Note the version of weights that the last request has brought."""
        self.base = version
        self._spare = self._request[0]["to"]
        self._pushed_then = self.pushed

    @property
    def lost(self) -> int:
        """Number of pushes that were answered, and lost since."""
        return sum(end - start for start, end in self._missing)

    def begin_part(self) -> None:
        self._left = None

    def leave(self, at: int, size: int) -> None:
        """Send a part of the next push ahead of it; where that fails, it goes with the push."""
        channel = self._channel
        if channel is None or channel.shares_memory:
            return
        try:
            channel.send({"do": "part", "at": at}, size)
            channel.receive(_PART_S)
        except PeerLost as error:
            self._drop(error)
        else:
            self._left = at if self._left is None else min(self._left, at)

    def reply(self, until: float) -> dict[str, Any]:
        """Return the answer, by whichever process gives it."""
        while True:
            now = time.monotonic()
            left = until - now
            if self._given_up:
                raise PeerLost(f"worker {self._worker!r} has given up on server {self._server}.")
            if self._channel is None:
                self._away_since = self._away_since or now
                left = min(left, self._away_since + self._absent_s - now)
                if left > 0 and not self._dial(left):
                    time.sleep(min(_PAUSE_S, left))
                    continue
                left = until - now
            if self._channel is None:
                raise ChannelTimeout(
                    f"worker {self._worker!r}: server {self._server} has not answered "
                    f"{self._request[0].get('do')!r} for {time.monotonic() - self._asked_at:.1f} s: {self._why} "
                    "See its log; it may need more time than `timeout`."
                )
            try:
                reply, _ = self._channel.receive(max(left, 0.001))
            except PeerLost as error:
                self._drop(error)
            else:
                if self._request[0].get("do") == "push":
                    self._left = None  # nothing of the next one is there
                self._accept(reply)
                return reply

    def give_up(self) -> None:
        self._given_up = True
        if (channel := self._channel) is not None:
            channel.break_off()

    def close(self, leave: bool) -> None:
        if self._channel is not None and leave:
            try:
                self._channel.send({"do": "leave"}, 0, 1.0)
                self._channel.receive(1.0)
            except PeerLost:
                pass  # it is gone, or busy: it sees the connection's end
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self.dial.close()

    def _dial(self, timeout_s: float) -> bool:
        """Connect, and send the request; return whether there is a channel."""
        try:
            channel = self._channel = self.dial.connect(min(timeout_s, _DIAL_S))
            now = {"life": self._life, "incarnation": self._incarnation, "said": self.pushed}
            channel.send({"do": "hello", **self._hello, **now}, 0, timeout_s)
            reply, _ = channel.receive(timeout_s)
        except PeerLost as error:
            self._drop(error)
            return False
        known = self._incarnation
        self._accept(reply)
        self._life = reply["life"]
        if self.began and reply["version"] is None:
            raise PeerLost(
                f"worker {self._worker!r}: server {self._server} has lost its weights, of version {self.base} or "
                "later: its memory is gone, with its supervisor or its host. Start again from the last checkpoint."
            )
        if None not in (known, reply["version"]) and reply["incarnation"] != known:
            self._go_back(reply)
        self.resent += 1
        self._away_since = None
        self._try(channel)
        return self._channel is not None

    def _go_back(self, reply: Mapping[str, Any]) -> None:
        """Go back to the snapshot of a server that has lost its memory, with fewer pushes than were answered."""
        kept = reply["push"]
        known = [(start, min(end, kept)) for start, end in self._missing if start < kept]
        self._missing = [*known, (kept, max(kept, self.pushed))]
        header, size = self._request
        self.base = min(self.base, reply["version"])
        if "base" in header:
            header = {**header, "base": self.base}
        self._request = header, size
        _log.warning(
            "Worker %r: server %d has come back with a snapshot, of version %d. %d pushes of this worker's are lost in "
            "all.", self._worker, self._server, reply["version"], self.lost,
        )  # fmt: skip

    def _try(self, channel: PeerChannel) -> None:
        header, size = self._request
        try:
            if self._left is not None and header["do"] == "push":
                channel.send({**header, "size": size}, min(self._left, size))
            else:
                channel.send(header, size)
        except PeerLost as error:
            self._drop(error)

    def _drop(self, error: PeerLost) -> None:
        self._why = str(error)
        self._left = None
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _accept(self, reply: Mapping[str, Any]) -> None:
        if (kind := reply.get("refused")) is not None:
            error = _REFUSALS.get(kind, AsyncTrainingError)
            raise error(f"worker {self._worker!r}: server {self._server} refuses: {reply['why']}")
        self._incarnation = reply.get("incarnation", self._incarnation)
        self.pushed = reply.get("number", self.pushed)


class PushResiduals:
    r"""The residual of one worker's compressed pushes to one server.

    .. math:: v_n = g_n + r_{n-1}, \qquad q_n = \mathrm{C}(v_n), \qquad r_n = v_n - q_n

    So :math:`\sum_n q_n + r_n = \sum_n g_n`, whatever the compression. A message is made once: sent again, it is the
    same to the bit. Takes the memory of two fp32 copies of the shard.

    Args:
        compression: C.
        numel: of the shard.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self, compression: PushCompression, numel: int) -> None:
        self._compression = compression
        self.source = torch.zeros(numel)
        self.residual = torch.zeros(numel)

    def encode_(self, memory: Tensor) -> int:
        """Encode `source` to the beginning of ``memory``, uint8; return the message's bytes."""
        size = self.message_bytes
        self._compression.encode_(memory[:size], self.source, self.residual)
        return size

    @property
    def message_bytes(self) -> int:
        return self._compression.message_bytes(self.source.numel())


@dataclass(frozen=True)
class Arrived:
    """A push as a server got it, in memory that the worker does not touch before the answer.

    Args:
        message: uint8.
        compression: of the message; None: it is fp32.
        numel: of the shard; ValueError where the message has another size.
    """

    message: Tensor
    compression: PushCompression | None
    numel: int

    def __post_init__(self) -> None:
        itemsize = torch.float32.itemsize
        size = self.numel * itemsize if self.compression is None else self.compression.message_bytes(self.numel)
        if self.message.numel() != size:
            raise ValueError(
                f"a push has {self.message.numel()} bytes, and is to have {size} for {self.numel} elements"
            )

    @classmethod
    def of(cls, message: Tensor, header: Mapping[str, Any], numel: int) -> Arrived:
        """Return what came with a header; raise TypeError or ValueError where the two do not fit."""
        return cls(message, from_description(header["compression"]), numel)

    def floats(self, room: Tensor) -> Tensor:
        """Return the gradient, flat and fp32; a compressed one is decoded into ``room``."""
        if self.compression is None:
            return self._plain
        self.compression.decode_(room, self.message)
        return room

    @cached_property
    def _plain(self) -> Tensor:
        return self.message.view(torch.float32)


def forget(dial: Dial, workers: Sequence[str], timeout_s: float = 10.0) -> None:
    """Tell a server that these workers are lost; raise PeerLost where it does not answer in time."""
    _tell(dial, {"do": "forget", "workers": list(workers)}, timeout_s)


def tell_over(dial: Dial, timeout_s: float = 5.0) -> None:
    """Tell a server that training is over: it ends when nobody is connected; without an answer it ends anyway."""
    with contextlib.suppress(PeerLost), contextlib.closing(dial):
        _tell(dial, {"do": "over"}, timeout_s)


def _tell(dial: Dial, header: Mapping[str, Any], timeout_s: float) -> None:
    channel = dial.connect(timeout_s)
    try:
        channel.send(header, 0, timeout_s)
        channel.receive(timeout_s)
    finally:
        channel.close()


def _floats(memory: Tensor) -> Tensor:
    return memory.view(torch.float32)
