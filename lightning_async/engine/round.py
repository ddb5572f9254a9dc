"""One averaging round as plain values: its header, what all headers together decide, its stages.

Everything here is a pure function of the headers, so every rank decides alike.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_async.errors import CollectiveError, GateMismatch, LayoutMismatch

__all__ = ["Decision", "Gate", "Header", "Kind", "Stage", "decide", "shares"]


class Kind(enum.IntEnum):
    """What a rank has ready to exchange, and what a round exchanges."""

    NONE = 0
    ROUND = 1
    """The rule's message."""
    GRADIENTS = 2
    """Gradients of one synchronous step."""
    CONSENSUS = 3
    """The parameters themselves, at a gate that every rank has reached."""
    START = 4
    """The parameters with which the rule's state begins, after synchronous steps: one rank's, for all."""


class Gate(enum.IntEnum):
    """Where a rank's training thread stands."""

    NONE = 0
    """Nowhere: it trains."""
    VALIDATE = 1
    EPOCH_END = 2
    TRAIN_END = 3
    STOP = 4
    """It leaves training early, because a rank was told to."""


class Stage(enum.Enum):
    """Where the round in flight stands on this rank; `NEXT` is the transition table."""

    IDLE = "idle"
    HEADER = "header"
    PAYLOAD = "payload"
    COMMIT = "commit"
    MERGE = "merge"
    """Committed; the training thread has yet to move the parameters."""
    FAILED = "failed"

    @property
    def next(self) -> frozenset[Stage]:
        """The stages that may follow this one."""
        return _NEXT[self]


_NEXT = {
    Stage.IDLE: frozenset({Stage.HEADER}),
    Stage.HEADER: frozenset({Stage.IDLE, Stage.PAYLOAD, Stage.MERGE, Stage.FAILED}),
    Stage.PAYLOAD: frozenset({Stage.COMMIT, Stage.FAILED}),
    Stage.COMMIT: frozenset({Stage.MERGE, Stage.FAILED}),
    Stage.MERGE: frozenset({Stage.IDLE}),
    Stage.FAILED: frozenset({Stage.IDLE}),
}


class Header(NamedTuple):
    """What one rank says before a round; rides as one float64 row (exact for integers below 2**53).

    Args:
        round: id of the round this rank would commit next.
        kind: what it has ready.
        length: elements of its message.
        layout: fingerprint of its parameters' layout.
        work: work in its message.
        steps: optimizer steps in its message.
        unreported: its weight in a consensus: all its work that no committed round holds.
        excused: nobody need wait for its message: it stands at a gate, is done, or has been silent for long.
        gate: where its training thread stands.
        gate_index: which of the gates of that kind (the epoch).
        stop: it was told to stop.
        end: it wants training to end as it does after the last epoch (a time limit, `trainer.should_stop`).
        clock: optimizer steps that it has taken in all.
        samples: samples that it has seen in all.
        lr: its inner learning rate.
        mask: of gradients, a hash of which parameters have one.
        healthy: its parameters are finite.
        fresh: it has taken synchronous steps since the rule's state was begun: that begins anew with the next round.
        opened: gates that have opened for it.
        agreed: round id of the consensus it holds unchanged; -1 if it has moved since.
        scalars: the rule's.
    """

    round: int
    kind: Kind = Kind.NONE
    length: int = 0
    layout: int = 0
    work: float = 0.0
    steps: float = 0.0
    unreported: float = 0.0
    excused: bool = False
    gate: Gate = Gate.NONE
    gate_index: int = 0
    stop: bool = False
    end: bool = False
    clock: float = 0.0
    samples: float = 0.0
    lr: float = 0.0
    mask: int = 0
    healthy: bool = True
    fresh: bool = False
    opened: int = 0
    agreed: int = -1
    scalars: tuple[float, ...] = ()

    def pack(self) -> Tensor:
        """The row to gather."""
        return torch.tensor([*map(float, self[:-1]), *self.scalars], dtype=torch.float64)

    @classmethod
    def unpack(cls, row: Sequence[float]) -> Header:
        """The header in a gathered row."""
        fixed = len(cls._fields) - 1
        names = dict(zip(cls._fields[:-1], row[:fixed], strict=True))
        return cls(
            round=int(names["round"]),
            kind=Kind(int(names["kind"])),
            length=int(names["length"]),
            layout=int(names["layout"]),
            work=names["work"],
            steps=names["steps"],
            unreported=names["unreported"],
            excused=bool(names["excused"]),
            gate=Gate(int(names["gate"])),
            gate_index=int(names["gate_index"]),
            stop=bool(names["stop"]),
            end=bool(names["end"]),
            clock=names["clock"],
            samples=names["samples"],
            lr=names["lr"],
            mask=int(names["mask"]),
            healthy=bool(names["healthy"]),
            fresh=bool(names["fresh"]),
            opened=int(names["opened"]),
            agreed=int(names["agreed"]),
            scalars=tuple(row[fixed:]),
        )


class Decision(NamedTuple):
    """What all headers together mean, the same on every rank.

    Args:
        kind: what is exchanged now; NONE if nothing.
        weights: every rank's share in the mean; they add up to 1, a rank that is absent has 0.
        void: all were ready for an averaging round, but nobody has work for it: the messages are dropped.
        fresh: some rank has taken synchronous steps since the rule's state was begun.
        late: some ranks have seen the last gate open and others lost the answer; it opens for these now.
        catch_up: the round that some rank committed and others did not; those that did not commit it now.
        opens: the gate at which every rank stands in agreement.
        validate: every rank is to validate.
        stop: every rank is to leave training at its next batch boundary.
        end: every rank is to end training as after its last epoch.
    """

    kind: Kind = Kind.NONE
    weights: tuple[float, ...] = ()
    void: bool = False
    fresh: bool = False
    late: bool = False
    catch_up: int | None = None
    opens: Gate = Gate.NONE
    validate: bool = False
    stop: bool = False
    end: bool = False


def shares(work: Sequence[float], stand_in: int = 0) -> tuple[float, ...]:
    """Each rank's share of the work. Without any work at all one rank stands for all.

    >>> shares([1.0, 3.0])
    (0.25, 0.75)
    """
    total = sum(work)
    if total <= 0.0:
        return tuple(float(rank == stand_in) for rank in range(len(work)))
    return tuple(w / total for w in work)


def decide(headers: Sequence[Header]) -> Decision:
    """What these headers, one per rank, mean.

    Raises:
        GateMismatch: all ranks stand at gates, at different ones.
        LayoutMismatch: the messages differ in layout.
        CollectiveError: the ranks' round ids differ by more than one.
    """
    newest = max(h.round for h in headers)
    behind = [rank for rank, h in enumerate(headers) if h.round < newest]
    if behind:
        if any(headers[rank].round != newest - 1 for rank in behind):
            raise CollectiveError(f"Ranks {behind} have missed more than one round (newest is {newest - 1}).")
        return Decision(catch_up=newest - 1)

    votes = Decision(
        stop=any(h.stop or h.gate is Gate.STOP for h in headers),
        end=any(h.end for h in headers),
        validate=any(h.gate is Gate.VALIDATE for h in headers),
        fresh=any(h.fresh for h in headers),
    )
    if len({h.opened for h in headers}) > 1:
        return Decision(late=True, stop=votes.stop, end=votes.end)
    if all(h.gate is not Gate.NONE for h in headers):
        return _at_gates(headers, votes)

    gradients = any(h.kind is Kind.GRADIENTS for h in headers)
    kind = Kind.GRADIENTS if gradients else Kind.ROUND
    work = [h.work if h.kind is kind else 0.0 for h in headers]
    # A rank that is ready for an averaging round, where others are at a synchronous step, need not be waited for.
    everyone = all(h.kind is kind or h.excused or (gradients and h.kind is Kind.ROUND) for h in headers)
    if not everyone:
        return votes
    if sum(work) <= 0.0:
        return votes._replace(void=True)
    _check_layouts(headers)
    if kind is Kind.ROUND and votes.fresh:
        kind, work = Kind.START, [float(rank == work.index(max(work))) for rank in range(len(work))]
    return votes._replace(kind=kind, weights=shares(work))


def _at_gates(headers: Sequence[Header], votes: Decision) -> Decision:
    """Every rank stands at a gate: make one model if there is more than one, else open."""
    places = {(h.gate, h.gate_index if h.gate is Gate.EPOCH_END else 0) for h in headers}
    if len(places) > 1:
        if votes.validate or votes.stop:
            return votes  # the others join that one and come back
        where = ", ".join(f"rank {rank} at {h.gate.name} {h.gate_index}" for rank, h in enumerate(headers))
        raise GateMismatch(
            f"Ranks came to a rendezvous for different things: {where}. Epoch-end work (checkpoints, metrics, early "
            "stopping) needs the same number of epochs on every rank: limit training by `max_epochs` rather than by "
            "`max_steps`, or validate with `val_check_interval` instead of at the end of epochs."
        )
    ((gate, _),) = places
    if votes.stop and gate is not Gate.STOP:
        return votes  # all leave together, by that one
    if headers[0].agreed >= 0 and len({h.agreed for h in headers}) == 1:
        return votes._replace(opens=gate)
    _check_layouts(headers)
    work = [h.unreported if h.healthy else 0.0 for h in headers]
    stand_in = next((rank for rank, h in enumerate(headers) if h.healthy), 0)
    return votes._replace(kind=Kind.CONSENSUS, weights=shares(work, stand_in))


def _check_layouts(headers: Sequence[Header]) -> None:
    """Unequal sizes would abort the process inside the transport."""
    layouts = {h.layout for h in headers}
    if len(layouts) > 1:
        raise LayoutMismatch(
            f"The replicas' parameters differ: layout fingerprints by rank are {[h.layout for h in headers]}. Were "
            "parameters added, removed or resized after training began?"
        )
