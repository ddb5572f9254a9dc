"""Moving one round's payload: what goes into the sum, where it arrives, part by part."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.protocols import Collectives, Pending, ReduceOp
from lightning_async.engine.averaging.ballot import Decision, Header, Kind, able_to_share
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.mailbox import Mailbox, Message
from lightning_async.engine.averaging.waiting import Waiter
from lightning_async.engine.codes import CompressedMean
from lightning_async.engine.digest import digests
from lightning_async.engine.replica import Replica
from lightning_async.errors import AsyncTrainingError
from lightning_async.flat import FlatLayout
from lightning_async.rules.averaging.protocol import Round

__all__ = ["Exchange", "Payload", "mask_of"]


@dataclass
class Exchange:
    """A payload that has moved and awaits its commit.

    Args:
        id: of the round.
        decision: what the headers decided.
        message: this rank's; None if it is absent.
        landing: the bucket that the sum arrived in.
        round: what the rule gets to know.
        has_source: whether a rank took part whose buffers are broadcast.
        spread: this rank's part of the replicas' squared spread; after the commit the root of the sum.
        used: of gradients, which parameters any replica used.
        apart: of a consensus, what moved beside the bucket, by name.
        healthy: whether what this rank holds may be shared, see `able_to_share`.
        message_bytes: what this rank's message takes on the wire.
        owed: of compressed messages, see `CompressedMean.owed`.
    """

    id: int
    decision: Decision
    message: Message | None
    landing: Tensor
    round: Round
    has_source: bool
    spread: float = 0.0
    header_s: float = 0.0
    exchange_s: float = 0.0
    used: Tensor | None = None
    apart: dict[str, Tensor] = field(default_factory=dict)
    healthy: bool = True
    message_bytes: int = 0
    owed: Tensor | None = None


class Payload:
    """Moves payloads; waits for each part with a deadline, and knows which bucket is free.

    Args:
        small: communicator for CPU tensors of a few numbers.
        large: communicator for the buckets.
        replica: the tensors and buckets.
        mailbox: says whether the buckets still hold something that is needed.
        config: the parts' size and deadline.
        waiter: waits for the operations.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        small: Collectives,
        large: Collectives,
        replica: Replica,
        mailbox: Mailbox,
        config: AveragerConfig,
        waiter: Waiter,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._small, self._large = small, large
        self._replica, self._mailbox = replica, mailbox
        self._config, self._waiter, self._now = config, waiter, now
        self._rank = small.rank
        # Moves the rule's messages, where they are compressed.
        self._compressed: CompressedMean | None = None
        self.follow_layout()

    def follow_layout(self) -> None:
        """Make room for messages of the replica's layout."""
        config = self._config
        if config.compression != "none":
            numel = self._replica.layout.numel
            self._compressed = CompressedMean(
                self._large, self._result, config.compression, numel, config.part_bytes, self._replica.device
            )

    def move(self, id: int, decision: Decision, message: Message | None, headers: Sequence[Header]) -> Exchange:
        """Exchange what the headers decided on."""
        kind, started = decision.kind, self._now()
        if kind is Kind.CONSENSUS:
            # Should the consensus fail, the bucket no longer holds what the message said: the message goes first.
            message = None
            with self._mailbox.changed:
                self._mailbox.message = None
            self._replica.pack_(self._replica.sent)
        elif message is not None and message.kind is not kind:
            message = None  # ready for an averaging round, while others are at a synchronous step
        exchange = Exchange(
            id=id,
            decision=decision,
            message=message,
            landing=self._landing(kind, message),
            round=Round(
                id=id,
                rank=self._rank,
                work=tuple(h.work if h.kind is kind else 0.0 for h in headers),
                steps=tuple(h.steps for h in headers),
                scalars=tuple(h.scalars for h in headers),
                lr=tuple(h.lr for h in headers),
            ),
            has_source=decision.source is not None,
            message_bytes=4 * self._replica.numel,
            healthy=able_to_share(headers)[self._rank],
        )
        if kind is Kind.START:
            self._broadcast(exchange)
        elif kind is Kind.GRADIENTS:
            self._reduce_gradients(exchange, {h.mask for h in headers if h.kind is kind})
        else:
            self._reduce_parameters(exchange)
        exchange.exchange_s = self._now() - started
        return exchange

    def _landing(self, kind: Kind, message: Message | None) -> Tensor:
        """The bucket in which the mean arrives; must not hold anything that is still needed."""
        replica, box = self._replica, self._mailbox
        if message is not None or kind in (Kind.CONSENSUS, Kind.START):
            return replica.received
        with box.changed:
            sent_is_free = box.message is None and box.arrived is None
        # An absent replica keeps the last target in `received`: it moves from there. If `sent` is taken too
        # (by a round that it has yet to merge), a third bucket is borrowed until its training thread is back.
        return replica.sent if sent_is_free else torch.zeros_like(replica.sent)

    def _reduce_parameters(self, exchange: Exchange) -> None:
        replica, landing, decision = self._replica, exchange.landing, exchange.decision
        share, consensus = decision.weights[self._rank], decision.kind is Kind.CONSENSUS
        compressed = None if consensus else self._compressed
        of_rule = compressed is None and not decision.alike
        if consensus or exchange.message is not None:
            replica.scale_(landing, replica.sent, share, self._rank == decision.source, of_rule=of_rule)
        else:
            landing.zero_()
        if of_rule:
            self._all_reduce(landing)
        else:
            self._all_reduce(replica.beyond_rule(landing))
        if decision.alike:
            replica.of_rule(landing).copy_(replica.of_rule(replica.sent))
            exchange.message_bytes -= 4 * replica.layout.numel
        elif compressed is not None:
            part, message = replica.of_rule(landing), replica.of_rule(replica.sent) if share > 0.0 else None
            exchange.owed = compressed.move_(part, message, decision.weights)
            exchange.message_bytes += compressed.message_bytes - 4 * part.numel()
        if consensus:
            self._move_apart(exchange, share)
        elif share > 0.0:
            exchange.spread = share * ops.sq_distance(replica.of_rule(replica.sent), replica.of_rule(landing))

    def _move_apart(self, exchange: Exchange, share: float) -> None:
        """What does not travel in the bucket, where replicas differ in it."""
        apart = self._replica.tensors.apart
        if not apart:
            return
        table = self._result(self._small.all_gather(torch.tensor(digests(apart.values()))))
        unlike = (table != table[0]).any(dim=0).tolist()
        for (name, tensor), differs in zip(apart.items(), unlike, strict=True):
            if differs:
                exchange.apart[name] = self._agree_on(name, tensor, share)
                exchange.message_bytes += tensor.nbytes
            elif tensor.dtype is torch.float64:  # the bucket has cut it
                exchange.apart[name] = tensor.detach().clone()

    def _agree_on(self, name: str, tensor: Tensor, share: float) -> Tensor:
        """The largest of integers and bools, the mean of others."""
        if not tensor.is_floating_point():
            flat = tensor.to("cpu", torch.int64, copy=True).reshape(-1)
            for part in FlatLayout.parts(flat, self._config.part_bytes):
                self._result(self._small.all_reduce(part, ReduceOp.MAX))
            return flat.view(tensor.shape)
        if tensor.element_size() < 2:
            raise AsyncTrainingError(
                f"Rank {self._rank}: the frozen parameter '{name}' ({tensor.dtype}) has changed on some ranks only, "
                "and 8-bit floating numbers cannot be averaged. Keep it as it is, or as another type."
            )
        wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        flat = tensor.detach().to(self._replica.device, wide, copy=True).reshape(-1)
        flat = flat.zero_() if share == 0.0 else flat.mul_(share)
        self._all_reduce(flat)
        return flat.view(tensor.shape)

    def _broadcast(self, exchange: Exchange) -> None:
        """Where one rank came from when it left synchronous training; that rank's bucket still holds it."""
        source = exchange.decision.weights.index(1.0)
        for part in FlatLayout.parts(self._replica.of_rule(exchange.landing), self._config.part_bytes):
            self._result(self._large.broadcast(part, source))

    def _reduce_gradients(self, exchange: Exchange, masks: set[int]) -> None:
        replica, message = self._replica, exchange.message
        exchange.used = torch.zeros(len(replica.layout))
        if message is not None and message.used is not None:
            exchange.used.copy_(message.used)
        if len(masks) > 1:  # replicas used different parameters
            self._waiter.result(self._small.all_reduce(exchange.used, ReduceOp.MAX))
        landing = replica.of_rule(exchange.landing)
        share = exchange.decision.weights[self._rank] if message is not None else 0.0
        replica.scaled_(landing, replica.of_rule(replica.sent), share)
        self._all_reduce(landing)

    def _all_reduce(self, bucket: Tensor) -> None:
        """Sum ``bucket`` over all ranks, part by part, each with the payload's deadline."""
        for part in FlatLayout.parts(bucket, self._config.part_bytes):
            self._result(self._large.all_reduce(part))

    def _result(self, pending: Pending[Tensor]) -> Tensor:
        return self._waiter.result(pending, self._config.deadlines.payload)

    def registered(self, buffer: Tensor) -> Tensor:
        """A copy of a bucket in memory that the transport moves best, or the bucket itself."""
        return self._large.registered(buffer)

    def committed(self, exchange: Exchange) -> None:
        """The round is applied."""
        if self._compressed is not None and exchange.owed is not None:
            self._compressed.owed = exchange.owed
        elif exchange.decision.kind is not Kind.GRADIENTS:  # what averages are averages of has moved itself
            self.forget_debts()

    def forget_debts(self) -> None:
        """All replicas hold one model: nothing is owed."""
        if self._compressed is not None:
            self._compressed.owed.zero_()


def mask_of(used: Tensor | None) -> int:
    """A hash of which parameters have a gradient that a float64 holds exactly; 0 for none."""
    if used is None:
        return 0
    return int.from_bytes(hashlib.sha256(bytes(used.to(torch.uint8).tolist())).digest()[:6], "big")
