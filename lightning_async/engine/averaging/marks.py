"""Checkpoints of replicas that drift: what all have agreed on is copied with the round that was marked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_async.engine.averaging.agreed import Agreed, Ledger, Work
from lightning_async.engine.averaging.records import Merge
from lightning_async.engine.buckets import Exchange
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.header import Mark, Vote

__all__ = ["Marked", "Marks"]


class Marked(NamedTuple):
    """A round that a checkpoint belongs to, as this rank has it.

    Args:
        mark: names the checkpoint, and who takes part.
        share: `Agreed.share` after it; None after synchronous steps, where every replica is what all agree on.
    """

    mark: Mark
    share: dict[str, Any] | None


class Marks:
    """Asks for marked rounds, and hands them to the training thread; the last one only.

    Args:
        control: the control plane.
        agreed: what is copied.
        ledger: this replica's work.
    """

    def __init__(self, control: ControlPlane, agreed: Agreed, ledger: Ledger) -> None:
        self._box, self._control, self._agreed, self._ledger = control.mailbox, control, agreed, ledger
        self._name = control.membership.generation.name
        self.settle: Callable[[], None] = lambda: None
        """Called where a gate comes: what is due is taken now, as this replica is."""
        control.on_mark(self._copy)

    # ---- the training thread ----

    def ask(self) -> None:
        """Have the next round marked. Rings for nobody: it goes with the next header."""
        with self._box.changed:
            self._box.asked |= Vote.SAVE

    def begin(self, saved: int) -> None:
        """Saves up to this number are known to all ranks; before the control plane starts, or at a gate."""
        with self._box.changed:
            self._box.saved = max(self._box.saved, saved)

    def replica(self) -> dict[str, Any]:
        """What this replica is beside what all have agreed on, but for its tensors.

        Its work that no agreement holds, whether it is the last target, to the bit, what buffers are sent against, and
        what parameters of 16 bits lack.
        """
        with self._box.changed:
            work = [self._ledger.work.samples, self._ledger.work.steps]
            buckets = self._control.buckets
            return {
                "work": work,
                "at_target": buckets.at_target,
                "reference": buckets.replica.reference,
                "remainders": buckets.replica.remainders,
            }

    def part(self, replica: Mapping[str, Any], tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """All replicas hold what was agreed on: go on from this one's own parameters and buffers, and its `replica`."""
        buckets = self._control.buckets
        with buckets.alone(self._control.see), torch.no_grad():
            for name, value in module.state_dict().items():
                if isinstance(value, Tensor) and name in tensors:
                    value.copy_(tensors[name])
            if buckets.replica.reference.shape == replica["reference"].shape:  # buffers may be kept now, or not
                buckets.replica.reference.copy_(replica["reference"])
            remainders = replica.get("remainders", {})
            for name in buckets.replica.remainders.keys() & remainders.keys():
                buckets.replica.remainders[name].copy_(remainders[name])
            if replica["at_target"]:
                buckets.replica.pack_(buckets.received)
        with self._box.changed:
            self._ledger.work, buckets.at_target = Work(*replica["work"]), replica["at_target"]

    @property
    def saved(self) -> int:
        """The last save, by number."""
        return self._box.saved

    @property
    def due(self) -> bool:
        """A round was marked that this rank takes part in, and is not taken yet."""
        with self._box.changed:
            marked = self._box.marked
        return marked is not None and self._name in marked.mark.members

    def take(self) -> Marked | None:
        """The round that was marked, once this replica has merged it and before another one is handed over.

        None where this rank takes no part.
        """
        with self._box.changed:
            if self._control.buckets.arrived is not None:
                return None
            marked, self._box.marked = self._box.marked, None
        return marked if marked is not None and self._name in marked.mark.members else None

    def lost(self, all: bool = False) -> list[Mark]:
        """The marks that this rank was to take part in, and has come too late for; ``all``: also for the last one."""
        with self._box.changed:
            lost, self._box.lost = self._box.lost, []
            if all and self._box.marked is not None:
                lost, self._box.marked = [*lost, self._box.marked], None
        return [marked.mark for marked in lost if self._name in marked.mark.members]

    # ---- the engine's thread ----

    def _copy(self, exchange: Exchange) -> Marked:
        """Under `Mailbox.committing`."""
        mark, share = exchange.mark, None
        assert mark is not None
        if isinstance(exchange, Merge) and self._name in mark.members:
            share = self._agreed.share(exchange.target, mark.members.index(self._name), len(mark.members))
        if not isinstance(exchange, Merge):  # gradients: the step that they are for comes with them
            mark = mark._replace(step=mark.step + 1)
        return Marked(mark, share)
