"""Checkpoints that ranks save together without waiting for each other, and the state that all replicas agree on.

`ModelState` is the part of a checkpoint that is equal on all replicas. `CheckpointMarkers` asks for a round to be
marked, and returns this rank's copy of that state after the round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_async.engine.buckets import Buckets, InFlightRound, ModelRound
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.replica import tensors_of
from lightning_async.engine.shared_state import Mark, SharedState, Vote
from lightning_async.engine.work_ledger import WorkLedger
from lightning_async.flat import FlatLayout

BY_FRAGMENT = "fragments"


class ModelState:
    """The state that all replicas agree on, beside the model: here only counts of exchanges.

    Averaging adds the state of its rule. The lock `SharedState.committing` protects the state.
    """

    @property
    def name(self) -> str:
        """The name of what the state belongs to, such as an averaging rule."""
        return ""

    def __init__(self, buckets: Buckets, shared_state: SharedState) -> None:
        self.num_rounds = 0
        """The number of committed averaging rounds, equal on all replicas; it determines the next round's fragment."""
        self._replica = buckets.replica
        self._buckets = buckets
        self._shared_state = shared_state
        self.begin(buckets.received)

    def begin(self, target: Tensor) -> None:
        """Initialise the state from the parameters in the bucket ``target``, which are equal on all replicas."""
        replica = self._replica
        self._sizes = [replica.layout_of(fragment).numel for fragment in range(replica.num_fragments)]

    def follow_layout(self, before: FlatLayout) -> None:
        """Initialise the state for a new layout of the parameters; ``before`` is the old layout."""
        self.begin(self._buckets.received)

    def nbytes(self) -> int:
        """Return the size of the state's tensors; any thread may call this."""
        return 0

    def share(self, target: Tensor, mine: int, num_shares: int) -> dict[str, Any]:
        """Copy this rank's share of the model and of this state, for a checkpoint after a round.

        ``target`` is the bucket with the round's result. Each flat tensor is divided into ``num_shares`` parts of about
        equal size, of which part ``mine`` is copied. Other values are copied completely. The share has only values that
        are equal on all replicas. The caller holds `SharedState.committing`.
        """
        state = self._by_name(own=False)
        tensors = {
            "model": self._models(target),
            **{name: parts for name, parts in state.items() if self._is_joined(parts)},
        }
        return {
            **self._origin(),
            "flat": {name: _share(parts, mine, num_shares) for name, parts in tensors.items()},
            "shapes": {
                name: list(parts[0].shape) if len(parts) == 1 else [sum(self._sizes)] for name, parts in tensors.items()
            },
            "plain": {name: _copied(parts) for name, parts in state.items() if name not in tensors},
        }

    def _models(self, target: Tensor) -> list[Tensor]:
        """Return the model that replicas have in common after the round with this ``target``, by fragment."""
        return [self._replica.of_rule(target, fragment) for fragment in range(self._replica.num_fragments)]

    def state_dict(self) -> dict[str, Any]:
        with self._shared_state.committing:
            return {**self._origin(), "rule_state": self._whole(own=False)}

    def _origin(self) -> dict[str, Any]:
        layout = self._replica.layout
        return {
            "round": self._shared_state.next_exchange,
            "num_rounds": self.num_rounds,
            "rule": self.name,
            "parameters": [[name, size] for name, size in zip(layout.names, layout.sizes, strict=True)],
        }

    def rule_state_dict(self, own: bool) -> dict[str, Any]:
        """Copy fields of the rule's state for a checkpoint.

        With ``own``, these are the fields that differ between replicas; otherwise, the fields that are equal on all.
        """
        with self._shared_state.committing:
            return self._whole(own)

    def load_state_dict(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Load ``saved``, a result of `state_dict`, and ``own``, a result of ``rule_state_dict(own=True)``."""
        self._shared_state.next_exchange = int(saved["round"])
        self.num_rounds = int(saved["num_rounds"])

    def _by_name(self, own: bool) -> dict[str, list[Any]]:
        """Return fields of the state by name, each as a list of the field's values by fragment.

        ``own`` selects the fields as in `rule_state_dict`.
        """
        return {}

    def _whole(self, own: bool) -> dict[str, Any]:
        """Copy the fields that ``own`` selects (see `rule_state_dict`), and join the fragments of each flat field.

        So the copy can be loaded with another number of fragments.
        """
        state = self._by_name(own)
        return {k: torch.cat(parts) if self._is_flat(parts) else _copied(parts) for k, parts in state.items()}

    def _is_flat(self, parts: Sequence[Any]) -> bool:
        sizes = zip(parts, self._sizes, strict=True)
        return all(isinstance(p, Tensor) and p.dtype is torch.float32 and p.shape == (size,) for p, size in sizes)

    def _is_joined(self, parts: Sequence[Any]) -> bool:
        return self._is_flat(parts) or (len(parts) == 1 and isinstance(parts[0], Tensor))


class Residuals(Protocol):
    """An interface of what keeps compression errors for this rank's later messages."""

    def residuals(self) -> dict[str, Any]: ...

    def load_residuals(self, saved: Mapping[str, Any]) -> None: ...


class MarkedRound(NamedTuple):
    """A marked round, with this rank's copy of the state after it; the ranks save a checkpoint of that state."""

    mark: Mark  # the checkpoint and its members
    share: dict[str, Any] | None  # the result of `ModelState.share` after the round; None after a synchronous step


class CheckpointMarkers:
    """The marks by which asynchronous replicas save one checkpoint together, without waiting for each other.

    A rank whose checkpoint is due calls `ask`; then all ranks mark the next round. When that round commits, the
    engine's thread copies this rank's share of the model and of the rule's state. The training thread gets this copy
    from `take`, and saves it. If another exchange commits first, the copy is lost, and `lost` returns the mark. All
    public methods are for the training thread.
    """

    def __init__(
        self, control: ControlPlane, agreed: ModelState, ledger: WorkLedger, residuals: Residuals | None = None
    ) -> None:
        self._box = control.shared_state
        self._control = control
        self._agreed = agreed
        self._residuals = residuals
        self._ledger = ledger
        self._name = control.membership.generation.name
        self.settle: Callable[[], None] = lambda: None
        """A function that saves this rank's part of a marked round; called before this replica changes again."""
        control.on_mark(self._copy)

    def ask(self) -> None:
        """Ask all ranks to mark the next round; the request travels with the next header, and does not cause one."""
        with self._box.changed:
            self._box.asked |= Vote.SAVE

    def begin(self, saved: int) -> None:
        """Set the number of the newest checkpoint that this rank knows of, unless it knows of a newer one.

        Call this before the control plane starts, or at a sync point.
        """
        with self._box.changed:
            self._box.saved = max(self._box.saved, saved)

    def replica(self) -> dict[str, Any]:
        """Return this replica's own state of averaging for a checkpoint: its work, its residuals, and similar values.

        The result does not include the rule's state and the module's tensors.
        """
        with self._box.changed:
            buckets = self._control.buckets
            return {
                "work": self._ledger.work_dict(),
                "reported": self._ledger.reported_dict(),
                "at_target": buckets.at_target,
                "reference": buckets.replica.reference,
                "remainders": buckets.replica.remainders,
                "residuals": None if self._residuals is None else self._residuals.residuals(),
            }

    def part(self, replica: Mapping[str, Any], tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Load this replica's own part of a checkpoint, after all replicas have loaded the rule's state.

        Args:
            replica: Result of the method `replica`.
            tensors: This replica's own tensors, by name.
            module: Module into which the tensors are copied.
        """
        buckets = self._control.buckets
        with buckets.alone(self._control.see), torch.no_grad():
            for name, value in tensors_of(module).items():
                if name in tensors:
                    value.copy_(tensors[name])
            if buckets.replica.reference.shape == replica["reference"].shape:  # buffers may be kept now, or not
                buckets.replica.reference.copy_(replica["reference"])
            remainders = replica["remainders"]
            for name in buckets.replica.remainders.keys() & remainders.keys():
                buckets.replica.remainders[name].copy_(remainders[name])
            if replica["at_target"]:
                buckets.replica.pack_(buckets.received)
        with self._box.changed:
            if self._residuals is not None and replica["residuals"] is not None:
                self._residuals.load_residuals(replica["residuals"])
            self._ledger.load_work(replica["work"], replica["reported"])
            buckets.at_target = replica["at_target"]

    @property
    def saved(self) -> int:
        return self._box.saved

    @property
    def due(self) -> bool:
        with self._box.changed:
            marked = self._box.marked
        return marked is not None and self._name in marked.mark.members

    def take(self) -> MarkedRound | None:
        """Return the marked round whose checkpoint this rank must save now; each marked round is returned once.

        Return None if there is none, if this rank has yet to merge a result, or if this rank is not among the
        checkpoint's members.
        """
        with self._box.changed:
            if self._control.buckets.arrived is not None:
                return None
            marked = self._box.marked
            self._box.marked = None
        return marked if marked is not None and self._name in marked.mark.members else None

    def lost(self, all: bool = False) -> list[Mark]:
        """Return the marks of checkpoints for which this rank's part is lost; each mark is returned once.

        A part is lost if the next exchange has committed before `take` returned the marked round. With ``all``, the
        marked round that `take` could still return is dropped, and its mark is returned, too.
        """
        with self._box.changed:
            lost = self._box.lost
            self._box.lost = []
            if all and self._box.marked is not None:
                lost = [*lost, self._box.marked]
                self._box.marked = None
        return [marked.mark for marked in lost if self._name in marked.mark.members]

    def _copy(self, exchange: InFlightRound) -> MarkedRound:
        mark = exchange.mark
        share = None
        assert mark is not None
        if isinstance(exchange, ModelRound) and self._name in mark.members:
            share = self._agreed.share(exchange.target, mark.members.index(self._name), len(mark.members))
        if not isinstance(exchange, ModelRound):  # gradients: the checkpoint holds the step that follows them
            mark = mark._replace(step=mark.step + 1)
        return MarkedRound(mark, share)


def _share(parts: Sequence[Tensor], mine: int, num_shares: int) -> Tensor:
    """Copy part number ``mine`` of ``num_shares`` about equal parts of the tensors, joined as one flat tensor."""
    size, rest = divmod(sum(part.numel() for part in parts), num_shares)
    start = mine * size + min(mine, rest)
    end = start + size + (mine < rest)
    found = []
    for part in parts:
        found.append(part.reshape(-1)[max(0, start) : max(0, end)])
        start -= part.numel()
        end -= part.numel()
    return torch.cat(found)


def _copied(parts: Sequence[Any]) -> Any:
    return copy.deepcopy(parts[0] if len(parts) == 1 else {BY_FRAGMENT: list(parts)})
