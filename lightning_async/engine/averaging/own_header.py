"""What one rank says in a header: its message, where it stands, and at a gate what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_async.engine.averaging.agreed import Commits
from lightning_async.engine.averaging.ballot import UNLIKE, Header, Kind
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.mailbox import Mailbox, Message
from lightning_async.engine.averaging.payload import mask_of
from lightning_async.engine.header import Gate
from lightning_async.engine.replica import Replica
from lightning_async.rules.averaging.protocol import AveragingRule

__all__ = ["OwnHeader"]


class OwnHeader:
    """Writes this rank's headers, on the engine's thread.

    Args:
        replica: the tensors and buckets.
        rule: turns a snapshot into a message.
        mailbox: what is shared with the training thread.
        commits: holds the rule's state.
        config: weights and deadlines.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        replica: Replica,
        rule: AveragingRule,
        mailbox: Mailbox,
        commits: Commits,
        config: AveragerConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica, self._rule, self._mailbox, self._commits = replica, rule, mailbox, commits
        self._config, self._grace_s, self._now = config, config.deadlines.grace.total_seconds(), now

    def is_stalled(self) -> bool:
        """Whether the training thread has been silent for so long that nobody need wait for it."""
        box = self._mailbox
        silent_s = self._now() - box.last_seen
        return not box.synchronous and not box.fresh and silent_s > self._grace_s

    def composed(self) -> tuple[Header, Message | None]:
        """This rank's header, but for its message, and that message. Under the lock."""
        box = self._mailbox
        header = Header(
            round=self._commits.next_round,
            length=self._replica.numel,
            layout=self._replica.fingerprint,
            version=self._replica.version,
            unreported=self._config.weigh_at_gate(box.work, box.reported),
            excused=box.gate is not Gate.NONE or self.is_stalled(),
            gate=box.gate if box.arrived is None else Gate.NONE,
            gate_index=box.gate_index,
            stop=box.asked.stop,
            end=box.asked.end,
            clock=box.total.steps,
            samples=box.total.samples,
            fresh=box.fresh,
            opened=box.opened_gates,
            last_gate=box.last_gate,
            last_moved=box.moved,
            last_clock=box.last_clock,
            last_round=box.last_round,
            scalars=(0.0,) * self._rule.num_scalars,
        )
        return header, box.message if box.arrived is None else None

    def announced(self, header: Header, message: Message) -> Header:
        """The header with its message, which becomes the rule's on its first header."""
        if message.kind is Kind.ROUND and not message.announced and not header.fresh:
            sent, message.announced = self._replica.sent, True
            message.healthy, message.sound = self._replica.judge(sent)
            message.healthy = message.healthy and message.state_is_finite()
            if message.healthy:  # else the rule's state would learn of it
                message.scalars = self._rule.message_(self._replica.of_rule(sent), self._commits.rule_state)
        healthy = message.healthy
        return header._replace(
            kind=message.kind,
            due=message.due,
            work=self._config.weigh(message.work) if healthy else 0.0,
            steps=message.steps if healthy else 0.0,
            healthy=healthy,
            sound=message.sound,
            mask=mask_of(message.used),
            lr=message.lr,
            scalars=message.scalars or header.scalars,
        )

    def compared(self, header: Header) -> Header:
        """The header with what this replica holds, for the gate at which all ranks stand."""
        whole, rest = self._replica.digests()
        if self._rule.restores_local and not self._mailbox.showing:
            whole = UNLIKE  # a replica's own model, in place of the one that the gate shows
        healthy, sound = self._replica.judge()
        return header._replace(digest=whole, digest_rest=rest, healthy=healthy, sound=sound)
