"""A worker's connections to its servers: pushes, pulls, and recovery when a server dies.

    push n: fill `gradients`, send them to all servers, wait for all answers
    a server dies: connect again, repeat the request; the server knows by n whether it has applied the push

A push stays in the worker's memory, unchanged, until all servers have answered. `Client` sends each request to all
servers at once, through one `ShardConnection` for each server. `PushResiduals` compresses a push on the worker. On the
server, `Arrived` decompresses it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms.compression import PushCompression, described, from_description
from lightning_async.algorithms.staleness import StalenessPolicy
from lightning_async.comm.p2p import LONGEST, Dial, PeerChannel
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, Evicted, PeerLost, SettingsMismatch
from lightning_async.parameter_server.consistency import stated_staleness
from lightning_async.parameter_server.optimizers import ScalarRuns
from lightning_async.parameter_server.partition import Spans

_log = logging.getLogger(__name__)
# Seconds between two attempts to connect to a server that does not answer.
_PAUSE_S = 0.02
# Longest single attempt to connect.
_DIAL_S = 5.0
# Longest wait until a server has received a part of a push.
_PART_S = 60.0
# Bytes of a push's header that may name parameters without gradients; the rest of it is small.
_MOST_BYTES_OF_SPANS = LONGEST - 4096
_REFUSALS: dict[str, type[AsyncTrainingError]] = {
    "evicted": Evicted, "settings": SettingsMismatch, "missing": PeerLost, "uninitialised": PeerLost,
}  # fmt: skip


@dataclass(frozen=True)
class ServerAnswer:
    """The servers' answer to a push or a pull.

    Args:
        versions: Version of each server's shard: the number of its updates.
        lags: For each server, the number of updates since the weights at which the push was computed.
        resent: Number of times that the request was sent on a new connection to a server.
        dropped: For each server, whether the push was dropped, because it was too late or not finite.
        durable: Version of each server's newest snapshot, which survives the loss of the server's host; -1: there is no
            snapshot.
        lost: Number of this worker's pushes that a server had answered, and then lost with its memory.
        in_step: Whether the next update combines one push of each worker.
        called: In the mode ``"sync"``, whether any worker asked for a sync point by a push with ``call=True`` in this
            round. All workers get the same value for a round.
        restored: Sum over the servers of a number that grows when the server is restored from a snapshot. A restore
            sets versions back, so versions can be compared only between answers with the same ``restored``.
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
    """One worker's client of all servers.

    Used by one thread at a time, except for `give_up`. After an error only `close` may be called.

    Args:
        worker: Name of the worker.
        dials: One dial for each server, which opens connections to it, in the plan's order; the client closes the
            dials.
        fingerprint: Fingerprint of the plan, which divides the weights into shards. A server refuses workers with
            another plan.
        timeout_s: Longest time for each request, over all servers, in seconds. Must exceed the servers'
            ``dead_after_s``, so that servers first evict a worker for which all others wait.
        absent_s: Seconds after which a server that cannot be reached is lost.
        compression: Compression of pushes. Default: None, pushes are fp32.
        table: Index of the worker's table on the servers; there is one table of weights for each group of parameters.
        overlap: Whether gradients may be computed at weights older than the last pull, see `ShardConnection`.
    """

    def __init__(
        self,
        worker: str,
        dials: Sequence[Dial],
        fingerprint: str = "",
        timeout_s: float = 180.0,
        absent_s: float = 180.0,
        compression: PushCompression | None = None,
        table: int = 0,
        overlap: bool = False,
    ) -> None:
        self.worker = worker
        self._timeout_s = timeout_s
        hello = {"worker": worker, "fingerprint": fingerprint, "table": table}
        self._lines = [ShardConnection(server, dial, hello, absent_s, overlap) for server, dial in enumerate(dials)]
        self._fingerprint = fingerprint
        self._compression = compression
        self.feedback: list[PushResiduals] = []
        """The residuals of compressed pushes, one for each server; empty without compression."""
        if compression is not None:
            self.feedback = [PushResiduals(compression, _floats(line.dial.outgoing).numel()) for line in self._lines]

    @property
    def gradients(self) -> list[Tensor]:
        """The fp32 memory for the next push, one tensor for each server; must not be changed during a push."""
        return [each.source for each in self.feedback] or [_floats(line.dial.outgoing) for line in self._lines]

    @property
    def weights(self) -> list[Tensor]:
        """The fp32 weights of the last pull, one tensor for each server; valid until the next request."""
        return [_floats(line.dial.incoming) for line in self._lines]

    def bring(self, field: str) -> None:
        """Send the field ``field`` of a restored optimizer state, such as a momentum, to the servers.

        The caller has written the field into the send buffer `gradients`. Call this before `start`, once for each
        field.
        """
        self._ask_with_all({"do": "bring", "field": field}, [{}] * len(self._lines))

    def start(
        self,
        optimizer: str = "delta",
        arguments: Mapping[str, Any] | None = None,
        fields: Iterable[str] = (),
        scalars: Sequence[ScalarRuns] = (),
        staleness: str | StalenessPolicy | None = None,
        anew: bool = False,
        warmup_steps: int | None = None,
    ) -> ServerAnswer:
        """Join the servers as a worker, and pull the weights.

        Servers that have no weights yet take the initial weights, which the caller has written into `gradients`.

        Args:
            optimizer: Name of the optimizer, see `make_optimizer`. Default: ``"delta"``, pushes are added to the
                weights.
            arguments: Arguments of the optimizer. Default: none.
            fields: Names of the optimizer state's fields that `bring` has sent. Default: none, the state is new.
            scalars: Scalars of the optimizer's state, for each server. Default: none.
            staleness: Staleness policy that the servers' `WorkerRules` must have. Default: None, any policy.
            anew: Whether servers that have weights replace them by the contents of `gradients`, too, and evict all
                other workers. Default: False.
            warmup_steps: Number of warm-up steps, see `WorkerRules`. Default: None, the number in the servers' rules.

        Raises:
            PeerLost: A server does not answer in time.
            SettingsMismatch: A server has another optimizer, staleness policy or plan, or does not support this one.
        """
        header = {
            "do": "initialise", "optimizer": optimizer, "arguments": dict(arguments or {}),
            "fingerprint": self._fingerprint, "staleness": stated_staleness(staleness), "fields": list(fields),
            "anew": anew, "warmup_steps": warmup_steps,
        }  # fmt: skip
        self._ask_with_all(header, [{"scalars": runs} for runs in scalars or [()] * len(self._lines)])
        for line in self._lines:
            line.began = True
        return self.pull()

    def pull(self, field: str | None = None) -> ServerAnswer:
        """Pull the newest weights into the buffer `weights`.

        Args:
            field: Name of an array of the servers' state to pull in place of the weights. Default: None, the weights.
                ``"params"``: the actual weights, even if workers compute gradients at predicted ones.

        Raises:
            PeerLost: A server has not answered in time, or has lost its weights.
            Evicted: The servers have evicted this worker, and the other workers have continued without it.
        """
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
        skips: Sequence[Spans] = (),
    ) -> ServerAnswer:
        """Push the contents of `gradients`, and pull; each server applies the push once, even if servers die meanwhile.

        Args:
            lr: Learning rate in place of the optimizer's own. Default: None, the optimizer's own.
            weight: Number of samples of which `gradients` is the mean. The mode ``"sync"`` weights the mean over
                workers by this number. With 0 the push is empty, and the residual of compression is not sent.
            pull: Whether to pull the weights, too.
            sync_point: Number of sync points that this worker has passed, see `rest`.
            call: In the mode ``"sync"``, whether to set `ServerAnswer.called` for all workers in this round.
            bases: Version of each server's weights at which the push was computed. Default: the versions of the last
                pull.
            skips: For each server, the spans of parameters that have no gradient, where `gradients` is zero. The
                optimizer does not step them, and their residual of compression stays. Default: none.

        Raises:
            ValueError: ``weight`` is below 0.
            PeerLost: A server has not answered in time, or has lost its weights.
            Evicted: The servers have evicted this worker, and the other workers have continued without it.
        """
        if not weight >= 0:
            raise ValueError(f"`push(weight={weight!r})` must be >= 0.")
        header = {
            "do": "push", "compression": described(self._compression), "lr": lr, "weight": weight,
            "pull": pull, "sync_point": sync_point, "call": call,
        }  # fmt: skip
        requests = []
        for server, line in enumerate(self._lines):
            # A server that went back to a snapshot is at an earlier version than the gradient's.
            base = line.base if bases is None else min(line.base, bases[server])
            outgoing = line.dial.outgoing
            without = skips[server] if skips else ()
            if (length := len(json.dumps(without))) > _MOST_BYTES_OF_SPANS:
                raise ValueError(
                    f"Parameters without gradients are in {len(without)} places of server {server}'s shard, which "
                    f"take {length} bytes of a message, of {_MOST_BYTES_OF_SPANS} at most. Use more servers, or pass "
                    "`update_on_server=False`: the optimizer is the worker's then."
                )
            size = 0
            if weight:
                size = self.feedback[server].encode_(outgoing, without) if self.feedback else outgoing.numel()
            requests.append(({**header, "number": line.pushed + 1, "base": base, "skips": without}, size))
        return self._answer(self._ask(requests), pulled=pull)

    def begin_parts(self) -> None:
        """Begin a push that is sent in parts.

        The caller then fills `gradients` from the end to the beginning, calls `leave` for each part that is filled, and
        completes the push with `push`.
        """
        for line in self._lines:
            line.begin_part()

    def leave(self, parts: Sequence[tuple[int, int]]) -> None:
        """Send a part of the next push early, to servers that share no memory with this worker.

        Does nothing with compression.

        Args:
            parts: For each server, the start and the end of the part in its tensor of `gradients`, in elements. Parts
                are sent from the end of `gradients` to the beginning. A part that has changed since it was sent may be
                sent again.
        """
        itemsize = torch.float32.itemsize
        for line, (start, end) in zip(self._lines, parts, strict=True):
            if end > start and not self.feedback:
                line.leave(start * itemsize, (end - start) * itemsize)

    def snapshot(self) -> ServerAnswer:
        """Take a snapshot on all servers, and wait until all snapshots are durable.

        Raises AsyncTrainingError if a server cannot take one.
        """
        return self._answer(self._ask_all({"do": "snapshot"}), pulled=False)

    def read(self, field: str) -> tuple[dict[str, Any], ...]:
        """Read one field of all servers' state into the buffer `weights`.

        Returns the answer of each server: the names of all its ``fields``, the ``scalars`` of its optimizer, and its
        ``version``.
        """
        return tuple(self._ask_all({"do": "read", "field": field}))

    def rest(self, sync_point: int) -> None:
        """Tell the servers that other workers' pushes need not wait for this worker until the coming sync point opens.

        Pushes of workers that have passed this sync point wait for this worker again.

        Args:
            sync_point: Number of sync points that this worker has passed, without the coming one.
        """
        self._ask_all({"do": "rest", "sync_point": sync_point})

    def give_up(self) -> None:
        """Make the request under way, and all later ones, raise PeerLost. Any thread may call this."""
        for line in self._lines:
            line.give_up()

    def lags(self) -> tuple[dict[str, Any], ...]:
        """Return how late pushes were, for each server: a histogram of lags, and the ``mean`` of recent lags.

        `store.in_words` describes the form of each dict.
        """
        lags = [reply["lags"] for reply in self._ask_all({"do": "lags"})]
        return tuple({**each, "counts": {int(key): count for key, count in each["counts"].items()}} for each in lags)

    def close(self, leave: bool = True) -> None:
        """Close all connections; idempotent.

        Args:
            leave: Whether to tell the servers first that other workers need not wait for this one any more. Default:
                True.
        """
        for line in self._lines:
            line.close(leave)

    def _ask_with_all(self, header: Mapping[str, Any], more: Sequence[Mapping[str, Any]]) -> None:
        """Send a request to all servers, with the contents of `gradients`, uncompressed; ``more`` is for each one."""
        for server, each in enumerate(self.feedback):
            # With compression, `gradients` is other memory than the channel's.
            _floats(self._lines[server].dial.outgoing).copy_(each.source)
        pairs = zip(self._lines, more, strict=True)
        self._ask([({**header, **fields}, line.dial.outgoing.numel()) for line, fields in pairs])

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
            # All servers get the request before the first answer is awaited, so that they work at the same time.
            line.ask(header, size)
        return [line.reply(until) for line in self._lines]


class ShardConnection:
    """A worker's connection to one server. It outlives the server's process, if another process replaces it.

    Used by one thread at a time, except for `give_up`. When the server's process dies, the connection is made again,
    and a request without an answer is repeated.

    Args:
        server: Number of the server, for messages.
        dial: Dial of the server, which opens channels to it; the connection closes the dial.
        hello: Fields of the first message on each new channel, such as the name of the ``worker`` and its ``table``.
        absent_s: Seconds after which a server that cannot be reached is lost.
        overlap: Whether gradients may be computed at weights older than the last pull. The server then has two places
            for the weights that this worker has pulled.
    """

    def __init__(
        self, server: int, dial: Dial, hello: Mapping[str, Any], absent_s: float, overlap: bool = False
    ) -> None:
        self.dial = dial
        self.base = 0
        self.began = False
        """Whether the server had weights. A server that has none when it is reached again has lost them."""
        self._overlap = overlap
        self._spare = False
        self._pushed_then = 0  # number of the last push before the last pull
        self.resent = self.pushed = 0
        self._missing: list[tuple[int, int]] = []
        """Ranges of answered pushes that the server has lost, by number: the first is excluded, the last included."""
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
        """Byte offset from which the server has the rest of the next push already; None: it has no part of the push."""
        self._away_since: float | None = None
        """Time since which the connection has had no channel; None while it has one."""

    def ask(self, header: Mapping[str, Any], size: int) -> None:
        """Send a request if there is a channel; otherwise `reply` connects and sends it."""
        pushes = header["do"] == "push"
        before = header.get("base", self.base) < self.base
        # A pull right after a pull may overwrite it: no gradient is computed at the first one.
        flips = pushes or self.pushed > self._pushed_then
        places = {"of": self._spare ^ (self._overlap and before), "to": self._spare ^ (self._overlap and flips)}
        self._request = ({**header, **places}, size)
        self._asked_at = time.monotonic()
        self.resent = 0
        if self._channel is not None:
            # A failure here drops the channel, and `reply` connects again.
            self._try(self._channel)

    def pulled(self, version: int) -> None:
        """Record the version of the weights that the last request has pulled."""
        self.base = version
        self._spare = self._request[0]["to"]
        self._pushed_then = self.pushed

    @property
    def lost(self) -> int:
        """The number of this worker's pushes that the server had answered, and then lost with its memory."""
        return sum(end - start for start, end in self._missing)

    def begin_part(self) -> None:
        self._left = None

    def leave(self, at: int, size: int) -> None:
        """Send a part of the next push early; if that fails, the push itself sends the part.

        Args:
            at: First byte of the part.
            size: Number of bytes of the part.
        """
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
        """Return the answer to the last request; connect again and repeat the request if the server has died.

        Args:
            until: Time of `time.monotonic` until which to wait.

        Raises:
            PeerLost: The server has not answered in time, has lost its weights, or `give_up` was called.
            AsyncTrainingError: The server refuses the request.
        """
        while True:
            now = time.monotonic()
            left = until - now
            # Checked in every turn, because `give_up` comes from another thread.
            if self._given_up:
                raise PeerLost(f"worker {self._worker!r} has given up on server {self._server}.")
            if self._channel is None:
                self._away_since = self._away_since or now
                # Two limits: that of the whole request, and that of the server's absence.
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
                    self._left = None  # the server has nothing of the next push yet
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
                pass  # the server is gone, or busy: it will see the end of the connection
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self.dial.close()

    def _dial(self, timeout_s: float) -> bool:
        """Connect, and send the request that has no answer yet; return whether there is a channel."""
        try:
            channel = self._channel = self.dial.connect(min(timeout_s, _DIAL_S))
            now = {"life": self._life, "incarnation": self._incarnation, "said": self.pushed}
            channel.send({"do": "hello", **self._hello, **now}, 0, timeout_s)
            reply, _ = channel.receive(timeout_s)
        except PeerLost as error:
            self._drop(error)
            return False
        # Kept before `_accept` replaces it: the comparison below shows whether the server has lost its memory.
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
        # The request may have been lost with the last connection: the server answers a push twice, but applies it once.
        self.resent += 1
        self._away_since = None
        self._try(channel)
        return self._channel is not None

    def _go_back(self, reply: Mapping[str, Any]) -> None:
        """Record which pushes a server has lost with its memory, because it has restored an earlier snapshot."""
        kept = reply["push"]
        known = [(start, min(end, kept)) for start, end in self._missing if start < kept]
        self._missing = [*known, (kept, max(kept, self.pushed))]
        header, size = self._request
        self.base = min(self.base, reply["version"])
        if "base" in header:
            # The version of the request's base does not exist on the server any more.
            header = {**header, "base": self.base}
        self._request = header, size
        _log.warning(
            "Worker %r: server %d has come back with a snapshot, of version %d. %d pushes of this worker's are lost in "
            "all.", self._worker, self._server, reply["version"], self.lost,
        )  # fmt: skip

    def _try(self, channel: PeerChannel) -> None:
        header, size = self._request
        try:
            # The server has the rest of this push already, see `leave`.
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

    So :math:`\sum_n q_n + r_n = \sum_n g_n` for every compression. Each message is encoded once; a repeated message is
    equal to the bit. The residuals need the memory of two fp32 copies of the shard.

    Args:
        compression: Compression C of the pushes.
        numel: Number of elements of the shard.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self, compression: PushCompression, numel: int) -> None:
        self._compression = compression
        self.source = torch.zeros(numel)
        self.residual = torch.zeros(numel)

    def encode_(self, memory: Tensor, skips: Spans = ()) -> int:
        """Encode `source` plus the residual into the beginning of ``memory``, uint8; return the number of bytes.

        In the spans ``skips`` zeros are sent, and the residual stays for a later push.
        """
        size = self.message_bytes
        kept = [self.residual[start:stop].clone() for start, stop in skips]
        for start, stop in skips:
            self.residual[start:stop].zero_()
        self._compression.encode_(memory[:size], self.source, self.residual)
        for (start, stop), residual in zip(skips, kept, strict=True):
            self.residual[start:stop].copy_(residual)
        return size

    @property
    def message_bytes(self) -> int:
        return self._compression.message_bytes(self.source.numel())


@dataclass(frozen=True)
class Arrived:
    """A push as a server has received it, in memory that the worker does not change before it has the answer.

    Args:
        message: Bytes of the push, uint8.
        compression: Compression of the message. None: the message is fp32.
        numel: Number of elements of the shard.

    Raises:
        ValueError: The message has another size than ``compression`` and ``numel`` give.
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
        """Return the push that arrived as ``message`` with this header, for a shard of ``numel`` elements.

        Raises TypeError or ValueError if the message and the header do not fit together.
        """
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
    """Tell a server that these workers have died, so that other workers do not wait for them.

    Raises PeerLost if the server does not answer in time.
    """
    _tell(dial, {"do": "forget", "workers": list(workers)}, timeout_s)


def tell_over(dial: Dial, timeout_s: float = 5.0) -> None:
    """Tell a server that training is over, so that it ends once no worker is connected.

    Does not raise if the server does not answer. Closes ``dial``.
    """
    # A server that does not hear this ends later, once the workers' processes are gone.
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
