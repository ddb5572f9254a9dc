"""A worker's side: it pushes and pulls, and says again what a server has not answered, to whoever comes after it.

    push n: fill `gradients`, ask all servers, hear all answers
    a server dies: dial it again, say hello under the same life, ask the same again; it knows whether n was applied

What was pushed lies in this process's memory until it is answered, and is not touched before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.channel import Dial
from lightning_async.engine.server import cut
from lightning_async.engine.server.feedback import Feedback
from lightning_async.engine.server.line import Line
from lightning_async.engine.server.quorum import told_staleness
from lightning_async.rules.compression import PushCompression, described
from lightning_async.rules.staleness.protocol import StalenessPolicy

__all__ = ["Answer", "Client"]


@dataclass(frozen=True)
class Answer:
    """What servers say to a push or a pull.

    Args:
        versions: of each server's shard.
        lags: updates since the weights that the push was computed at, of each server; zeros where there was none.
        resent: servers that were asked again.
        dropped: of each server, whether the push was left out, as too late.
        durable: the version of each server's newest snapshot: this, and all before, survives the loss of its host;
            -1 where there is none.
        lost: pushes of this worker's that were acknowledged, and were lost since with a server's host.
        in_step: the next version is made of a push of each worker.
        restored: grows whenever a server has begun with a snapshot: versions go back with it.
        called: in sync mode, whether a worker has called all with this round; all hear it of the same one.
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

    @property
    def survives(self) -> str:
        """What was answered survives the servers' ``"process"``, or, as it is in a ``"snapshot"``, their hosts.

        >>> Answer((3, 4), durable=(3, 3)).survives, Answer((3, 4), durable=(3, 4)).survives
        ('process', 'snapshot')
        """
        held = len(self.durable) == len(self.versions) and all(map(int.__ge__, self.durable, self.versions))
        return "snapshot" if held else "process"


class Client:
    """One worker, as its servers know it; used by one thread at a time. An error leaves it of no use, but to `close`.

    Args:
        worker: its name.
        dials: one for each server, in the plan's order; the client's from now on.
        fingerprint: of the plan: servers take part in one only. Default: none.
        timeout_s: for each request, over all servers and all that becomes of them; longer than their ``dead_after_s``,
            so that they see first to a worker that all wait for. Default: 180.
        absent_s: for a server to be reached, when it is not; then it is lost. Default: 180.
        compression: of pushes. Default: none, they are fp32.
        consistent: whether all that is pulled is of one version of all servers, see `cut`. Default: each has its own.
        table, overlap: of those that each server has, by number; see `Line`. Default: the first, and no.
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
        self.worker, self._timeout_s = worker, timeout_s
        hello = {"worker": worker, "client": secrets.token_hex(3), "fingerprint": fingerprint, "table": table}
        self._lines = [Line(server, dial, hello, absent_s, overlap) for server, dial in enumerate(dials)]
        self._fingerprint, self._compression, self._at_a_cut = fingerprint, compression, consistent and len(dials) > 1
        self.feedback: list[Feedback] = []
        """What compression has yet to deliver, one for each server; empty without."""
        if compression is not None:
            self.feedback = [Feedback(compression, _floats(line.dial.outgoing).numel()) for line in self._lines]

    @property
    def gradients(self) -> list[Tensor]:
        """fp32 memory for what is pushed next, one for each server; this worker's, but during a push."""
        return [each.source for each in self.feedback] or [_floats(line.dial.outgoing) for line in self._lines]

    @property
    def weights(self) -> list[Tensor]:
        """fp32, what was pulled last, one for each server; this worker's until the next request."""
        return [_floats(line.dial.incoming) for line in self._lines]

    def bring(self, field: str) -> None:
        """What is in `gradients` is a field of the optimizer's state, for `start`."""
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
    ) -> Answer:
        """Join; servers that have no weights take those that are in `gradients`. Pull.

        Args:
            optimizer, arguments: of the servers; see `make_optimizer`. Default: what is pushed is added.
            fields, scalars: of the state that it begins with; the first were brought before. Default: it is new.
            staleness: that the servers' `Terms` are to have. Default: any.
            anew: servers that have weights take these in their place; other workers are fenced. Default: False.
            warmup_steps: of these weights, in place of the servers'. Default: theirs.

        Raises:
            PeerLost: a server is not there in time.
            SettingsMismatch: a server has another optimizer, policy of staleness or plan, or cannot have this one.
        """
        told: dict[str, Any] = {"optimizer": optimizer, "arguments": dict(arguments or {})}
        told |= {"fingerprint": self._fingerprint, "staleness": told_staleness(staleness)}
        told |= {"fields": list(fields), "scalars": dict(scalars or {}), "anew": anew, "warmup_steps": warmup_steps}
        self._ask_with_all({"do": "initialise", **told})
        for line in self._lines:
            line.began = True
        return self.pull()

    def pull(self, field: str | None = None) -> Answer:
        """The newest weights, in `weights`; or in their place a field of the servers' state, of the same version.

        Raises:
            PeerLost: a server has not answered in time, or has lost its weights.
            Evicted: the others have gone on without this worker.
        """
        if self._at_a_cut:
            return self._answer(cut.pull(self._ask_all, field, self._timeout_s, self.worker))
        return self._answer(self._ask_all({"do": "pull", "field": field}))

    def push(
        self,
        *,
        lr: float | None = None,
        weight: float = 1.0,
        pull: bool = True,
        gate: int = 0,
        call: bool = False,
        bases: Sequence[int] | None = None,
    ) -> Answer:
        """Have what is in `gradients` applied, once, and pull. It is safe from the servers' deaths when this returns.

        Args:
            lr: in place of the optimizer's own.
            weight: samples that it is the mean of; counts in sync mode. 0: there is nothing in it, and what compression
                has yet to deliver stays here. Default: 1.
            pull: whether to have the weights, too. Default: True.
            gate: gates that are behind this worker, see `rest`. Default: 0.
            call: in sync mode: all shall hear of it with the answer to this round, see `Answer.called`. Default: False.
            bases: the versions that it was computed at, of each server. Default: those that were pulled last.

        Raises:
            ValueError: ``weight`` is below 0.
            PeerLost, Evicted: as of `pull`.
        """
        if not weight >= 0:
            raise ValueError(f"`push(weight={weight!r})` must be >= 0.")
        apart = pull and self._at_a_cut
        header = {
            "do": "push", "compression": described(self._compression), "lr": lr, "weight": weight,
            "pull": pull and not apart, "gate": gate, "call": call,
        }  # fmt: skip
        requests = []
        for server, line in enumerate(self._lines):
            base = line.base if bases is None else min(line.base, bases[server])
            told = {**header, "number": line.pushed + 1, "base": base}
            requests.append((told, self._put(server, line) if weight else 0))
        answer = self._answer(self._ask(requests), pulled=pull and not apart)
        if not apart:
            return answer
        pulled = self.pull()
        how: Any = {name: getattr(answer, name) for name in ("lags", "dropped", "called")}
        return replace(pulled, **how, resent=answer.resent + pulled.resent)

    def begin_parts(self) -> None:
        """`gradients` are filled anew, from the end on."""
        for line in self._lines:
            line.begin_part()

    def leave(self, parts: Sequence[tuple[int, int]]) -> None:
        """A part of the next push leaves ahead of it, where something has to be moved; of all servers.

        Args:
            parts: of each server's `gradients`, from one element to another: the tail, what is in front of parts that
                have left, or one that has changed since. With compression all leaves with the push.
        """
        itemsize = torch.float32.itemsize
        for line, (start, end) in zip(self._lines, parts, strict=True):
            if end > start and not self.feedback:
                line.leave(start * itemsize, (end - start) * itemsize)

    def snapshot(self) -> Answer:
        """Have all servers take a snapshot now; when this returns, it survives their hosts.

        Raises:
            AsyncTrainingError: a server takes none, or cannot write it.
            PeerLost, Evicted: as of `pull`.
        """
        return self._answer(self._ask_all({"do": "snapshot"}), pulled=False)

    def read(self, field: str) -> tuple[dict[str, Any], ...]:
        """One field of all servers' state, in `weights`; what they say of it: ``fields``, ``scalars``, ``version``."""
        return tuple(self._ask_all({"do": "read", "field": field}))

    def rest(self, gate: int) -> None:
        """Nobody is to wait for this worker until a push of somebody's comes from beyond that gate, by number.

        Raises:
            PeerLost, Evicted: as of `pull`.
        """
        self._ask_all({"do": "rest", "gate": gate})

    def give_up(self) -> None:
        """From any thread: the request that is under way fails now, and no other one is made."""
        for line in self._lines:
            line.give_up()

    def lags(self) -> tuple[dict[str, Any], ...]:
        """How late pushes were, of each server: ``counts`` of pushes by lag, from which on one key stands for the lags
        up to the next one; the ``mean`` of recent ones; how many were ``dropped``; where snapshots are taken, what is
        ``durable``, and how many of all workers' were ``lost``."""
        told = [reply["lags"] for reply in self._ask_all({"do": "lags"})]
        return tuple({**each, "counts": {int(key): count for key, count in each["counts"].items()}} for each in told)

    def close(self, leave: bool = True) -> None:
        """Say goodbye, so that nobody waits for this worker, and give the memory back; idempotent."""
        for line in self._lines:
            line.close(leave)

    def _put(self, server: int, line: Line) -> int:
        """Have the next push in the line's memory; how many bytes it is."""
        outgoing = line.dial.outgoing
        return self.feedback[server].encode_(outgoing) if self.feedback else outgoing.numel()

    def _ask_with_all(self, header: Mapping[str, Any]) -> None:
        """With what is in `gradients`, as it is."""
        for server, each in enumerate(self.feedback):
            _floats(self._lines[server].dial.outgoing).copy_(each.source)
        self._ask([(header, line.dial.outgoing.numel()) for line in self._lines])

    def _answer(self, replies: Sequence[Mapping[str, Any]], pulled: bool = True) -> Answer:
        versions = tuple(reply["version"] for reply in replies)
        if pulled:
            for line, version in zip(self._lines, versions, strict=True):
                line.pulled(version)
        told = {"lag": 0, "dropped": False, "durable": -1, "restored": 0}
        lags, dropped, durable, restored = (tuple(reply.get(*each) for reply in replies) for each in told.items())
        lost, resent = (sum(getattr(line, name) for line in self._lines) for name in ("lost", "resent"))
        in_step, called = (any(reply.get(name, False) for reply in replies) for name in ("in_step", "called"))
        return Answer(versions, lags, resent, dropped, durable, lost, in_step, called, sum(restored))

    def _ask_all(self, header: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self._ask([(header, 0)] * len(self._lines))

    def _ask(self, requests: Sequence[tuple[Mapping[str, Any], int]]) -> list[dict[str, Any]]:
        until = time.monotonic() + self._timeout_s
        for line, (header, size) in zip(self._lines, requests, strict=True):
            line.ask(header, size)
        return [line.reply(until) for line in self._lines]


def _floats(memory: Tensor) -> Tensor:
    return memory.view(torch.float32)
