"""One averaging round as plain values: its header, what all headers together decide, its stages.

Everything here is a pure function of the headers, so every rank decides alike.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async.engine.header import Gate
from lightning_async.errors import CollectiveError, GateMismatch, LayoutMismatch

__all__ = ["NOT_COMPARED", "UNLIKE", "Decision", "Header", "Kind", "Stage", "able_to_share", "decide", "shares"]

NOT_COMPARED, UNLIKE = -1, -2
"""In place of a digest: this rank has not looked yet; its replica shows what no other one does."""


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
        due: its schedule asked for the message; else it only sends along what it had when it came to a gate.
        length: elements of its message.
        layout: fingerprint of its parameters' layout.
        version: how often that layout has changed since training began.
        work: work in its message that no agreement holds: its weight.
        steps: optimizer steps in its message that no round holds.
        unreported: its weight in a consensus: all its work since replicas last agreed.
        excused: nobody need wait for its message: it stands at a gate, is done, or has been silent for long.
        gate: where its training thread stands.
        gate_index: which of the gates of that kind (the epoch).
        stop: it was told to stop.
        end: it wants training to end as it does after the last epoch (a time limit, `trainer.should_stop`).
        clock: optimizer steps that it has taken in all.
        samples: samples that it has seen in all.
        lr: its inner learning rate.
        mask: of gradients, a hash of which parameters have one.
        healthy: its parameters and its optimizers' state are finite.
        sound: its buffers and frozen parameters are; looked at where some rank's are.
        fresh: it has taken synchronous steps since the rule's state was begun: that begins anew with the next round.
        opened: gates that have opened for it.
        last_gate: the last of them.
        last_moved: whether the model had changed when that one opened.
        last_clock: steps of all ranks at that time.
        last_round: its `round` at that time.
        digest: of the parameters that the rule applies to, see `engine.digest`; compared at gates.
        digest_rest: of all else that replicas share.
        scalars: the rule's.
    """

    round: int
    kind: Kind = Kind.NONE
    due: bool = False
    length: int = 0
    layout: int = 0
    version: int = 0
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
    sound: bool = True
    fresh: bool = False
    opened: int = 0
    last_gate: Gate = Gate.NONE
    last_moved: bool = False
    last_clock: float = 0.0
    last_round: int = 1
    digest: int = NOT_COMPARED
    digest_rest: int = NOT_COMPARED
    scalars: tuple[float, ...] = ()

    def pack(self) -> Tensor:
        """The row to gather."""
        return torch.tensor([*map(float, self[:-1]), *self.scalars], dtype=torch.float64)

    @classmethod
    def unpack(cls, row: Sequence[float]) -> Header:
        """The header in a gathered row."""
        fixed = len(cls._fields) - 1
        named = zip(_TYPES, cls._fields[:-1], row[:fixed], strict=True)
        values: dict[str, Any] = {name: kind(value) for kind, name, value in named}
        return cls(**values, scalars=tuple(row[fixed:]))


_TYPES = [type(default) for default in (0, *Header._field_defaults.values())][:-1]


class Decision(NamedTuple):
    """What all headers together mean, the same on every rank.

    Args:
        kind: what is exchanged now; NONE if nothing.
        weights: every rank's share in the mean; they add up to 1, a rank that is absent has 0.
        source: the rank whose buffers are broadcast: the first that takes part; None where none does.
        void: all were ready for an averaging round, but nobody has work for it: the messages are dropped.
        fresh: some rank has taken synchronous steps since the rule's state was begun.
        alike: of a consensus, all hold the same parameters, to the bit, and only the rest differs.
        compare: all ranks stand at one gate and shall say in their next header what they hold.
        late: some ranks have seen the last gate open and others lost the answer; it opens for these now.
        catch_up: the round that some rank committed and others did not; those that did not commit it now.
        opens: the gate at which every rank stands in agreement; of ``late``, the one that has opened.
        moved: whether the model has changed, on any rank, since the gate before that.
        clock: steps of all ranks when that gate opens.
        validate: every rank is to validate.
        synchronise: some rank waits for the others to be equal, before it takes synchronous steps with them.
        stop: every rank is to leave training at its next batch boundary.
        end: every rank is to end training as after its last epoch.
    """

    kind: Kind = Kind.NONE
    weights: tuple[float, ...] = ()
    source: int | None = None
    void: bool = False
    fresh: bool = False
    alike: bool = False
    compare: bool = False
    late: bool = False
    catch_up: int | None = None
    opens: Gate = Gate.NONE
    moved: bool = False
    clock: float = 0.0
    validate: bool = False
    synchronise: bool = False
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
    votes = Decision(
        stop=any(h.stop or h.gate is Gate.STOP for h in headers),
        end=any(h.end for h in headers),
        validate=any(h.gate is Gate.VALIDATE for h in headers),
        synchronise=any(h.gate is Gate.SYNCHRONISE for h in headers),
        fresh=any(h.fresh for h in headers),
    )
    newest = max(h.round for h in headers)
    behind = [rank for rank, h in enumerate(headers) if h.round < newest]
    if behind:
        if any(headers[rank].round != newest - 1 for rank in behind):
            raise CollectiveError(f"Ranks {behind} have missed more than one round (newest is {newest - 1}).")
        return Decision(catch_up=newest - 1, stop=votes.stop, end=votes.end)
    if len({h.opened for h in headers}) > 1:
        last = max(headers, key=lambda h: h.opened)
        opening = Decision(late=True, opens=last.last_gate, moved=last.last_moved, clock=last.last_clock)
        return opening._replace(stop=votes.stop, end=votes.end)
    if all(h.gate is not Gate.NONE for h in headers):
        _check_layouts(headers)
        if not any(h.kind is Kind.ROUND and h.due for h in headers):
            return _at_gates(headers, votes)

    gradients = any(h.kind is Kind.GRADIENTS for h in headers)
    kind = Kind.GRADIENTS if gradients else Kind.ROUND
    # A rank that is ready for an averaging round, where others are at a synchronous step, need not be waited for.
    everyone = all(h.kind is kind or h.excused or (gradients and h.kind is Kind.ROUND) for h in headers)
    if not everyone or len({h.version for h in headers}) > 1:  # some have yet to follow a change of the layout
        return votes
    present = [rank for rank, able in enumerate(able_to_share(headers)) if able and headers[rank].kind is kind]
    work = [h.work if rank in present else 0.0 for rank, h in enumerate(headers)]
    # At an agreement all stood where no work is counted since; what the anchor has yet to learn, one brings for all.
    owing = [rank for rank in present if kind is Kind.ROUND and headers[rank].steps > 0.0]
    if sum(work) <= 0.0 and not owing:
        return votes._replace(void=True)
    _check_layouts(headers)
    if kind is Kind.ROUND and votes.fresh:
        first = max(present, key=lambda rank: work[rank])
        kind, work = Kind.START, [float(rank == first) for rank in range(len(work))]
    return votes._replace(kind=kind, weights=shares(work, owing[0] if owing else 0), source=min(present, default=None))


def _at_gates(headers: Sequence[Header], votes: Decision) -> Decision:
    """Every rank stands at a gate, and no message is due: make one model if there is more than one, else open."""
    places = {(h.gate, h.gate_index if h.gate is Gate.EPOCH_END else 0) for h in headers}
    gate = Gate.SYNCHRONISE if any(h.gate is Gate.SYNCHRONISE for h in headers) else headers[0].gate
    if len(places) > 1 and (votes.validate or votes.stop):
        return votes  # the others join that one and come back
    if len(places) > 1 and gate is not Gate.SYNCHRONISE:  # that opens while others wait elsewhere
        where = ", ".join(f"rank {rank} at {h.gate.name} {h.gate_index}" for rank, h in enumerate(headers))
        raise GateMismatch(
            f"Ranks came to a rendezvous for different things: {where}. Epoch-end work (checkpoints, metrics, early "
            "stopping) needs the same number of epochs on every rank: limit training by `max_epochs` rather than by "
            "`max_steps`, or validate with `val_check_interval` instead of at the end of epochs."
        )
    if votes.stop and gate is not Gate.STOP:
        return votes  # all leave together, by that one
    held = [(h.digest, h.digest_rest) for h in headers]
    if any(h.digest == NOT_COMPARED for h in headers):
        return votes._replace(compare=True)
    unlike = any(h.digest == UNLIKE for h in headers)
    if len(set(held)) == 1 and not unlike:
        clock = sum(h.clock for h in headers)
        moved = clock != headers[0].last_clock or headers[0].round != headers[0].last_round
        return votes._replace(opens=gate, moved=moved, clock=clock)
    able = able_to_share(headers)
    work = [h.unreported if ok else 0.0 for h, ok in zip(headers, able, strict=True)]
    if sum(work) <= 0.0:  # something has moved without a step
        work = [float(ok) for ok in able]
    alike = len({h.digest for h in headers}) == 1 and not unlike
    return votes._replace(kind=Kind.CONSENSUS, weights=shares(work), source=able.index(True), alike=alike, compare=True)


def able_to_share(headers: Sequence[Header]) -> list[bool]:
    """Which ranks hold what others may take over. Where none does at a gate, nobody is to be healed: all do."""
    some_sound = any(h.sound and h.healthy for h in headers)
    able = [h.healthy and (h.sound or not some_sound) for h in headers]
    at_gates = all(h.gate is not Gate.NONE for h in headers)
    return able if any(able) or not at_gates else [True] * len(headers)


def _check_layouts(headers: Sequence[Header]) -> None:
    """Unequal sizes would abort the process inside the transport."""
    layouts = {h.layout for h in headers}
    if len(layouts) > 1:
        raise LayoutMismatch(
            f"The replicas' parameters differ: layout fingerprints by rank are {[h.layout for h in headers]}. Were "
            "parameters added, removed, resized, frozen or unfrozen after training began, on some ranks only?"
        )
