"""Gradients through the engine, in step or in the background: averaged by weight, with late and empty replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.buckets import Message
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.gates import Gates
from lightning_async.engine.gradients.feedback import Feedback, GradientCompression
from lightning_async.engine.gradients.overlap import Overlap
from lightning_async.engine.gradients.packing import Plans, gradients_of, mask_of, pack_, unpack_, used_by
from lightning_async.engine.gradients.parts import Outgoing
from lightning_async.engine.gradients.records import (
    GRADIENTS,
    Before,
    GradientMessage,
    GradientPlan,
    Part,
    Reduction,
    Told,
)
from lightning_async.engine.gradients.rounds import GradientRounds
from lightning_async.engine.header import Header
from lightning_async.engine.replica import Replica

__all__ = ["SynchronousGradients"]


class SynchronousGradients:
    """A wing, see `Wing`; what it moves is a round, see `GradientRounds`.

    Args:
        control: the control plane; this registers with it.
        gates: by which the training thread waits.
        on_step: called under the lock where a step is committed, on all ranks, with this one's samples, or None where
            it was without gradients.
        weigh: the weight of gradients, of so many samples. Default: the samples.
    """

    blank = Part()

    def __init__(
        self,
        control: ControlPlane,
        gates: Gates,
        on_step: Callable[[float | None], None],
        weigh: Callable[[float], float] = lambda samples: samples,
    ) -> None:
        self._buckets, self._transfer, self._box = control.buckets, control.transfer, control.mailbox
        self.replica: Replica = control.buckets.replica
        self._control, self._gates, self._weigh = control, gates, weigh
        self.rounds = GradientRounds(control, on_step)
        self._overlap = Overlap(self.replica)
        self.asks = (0.0, 0.0)
        """Of the next gradients that leave, see `GradientMessage`."""
        self.told: Told | None = None
        """What all have told with the mean that was taken last, until steps are others again."""
        self._there, self._back = Plans(), Plans()  # the engine's thread's; the training thread's
        self._taken = False  # what has arrived is with the optimizer: nobody looks at the parameters meanwhile
        control.register(self)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self._overlap.close()

    def compress(self, compression: GradientCompression) -> None:
        """Let gradients travel like this, on all ranks; before the engine starts."""
        if compression != "none":
            self.rounds.feedback = Feedback(compression, self.replica, self._transfer)

    def owed(self) -> dict[str, Any] | None:
        """For a checkpoint: what compressed messages have lacked so far, copied; None where they are not compressed."""
        with self._box.committing:
            return None if self.rounds.feedback is None else self.rounds.feedback.state_dict()

    # ---- the training thread ----

    def begin_backward(self, samples: float, scale: float = 1.0) -> None:
        """A backward pass begins: let its gradients leave as it makes them, where that can be; `reduce_` follows.

        Args:
            samples, scale: as for `reduce_`.
        """
        if not self._overlap.under_way and self._can_overlap:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            message = GradientMessage(GRADIENTS, self._step, samples, self._expected, self._step, keeps=True)
            self._begin(message, 1.0 / scale)

    def begin_last(self, before: Before, samples: float, weight: float) -> bool:
        """The last of several backward passes begins: its gradients leave as it makes them, and with them what those
        before have made; `finish_last` follows, or `withdraw`. Whether that can be, and the buckets are free.

        Args:
            before: what was gathered.
            samples: behind all of it.
            weight: what the gradients of this pass are multiplied by.
        """
        if not self._can_overlap or not self._take_free():
            return False
        self._begin(GradientMessage(GRADIENTS, self._step, samples, self._expected, before.since), weight, before)
        return True

    def finish_last(self) -> None:
        """The last backward pass is over. Gradients stay with the parameters until their mean replaces them."""
        self._overlap.finish()

    @property
    def _can_overlap(self) -> bool:
        return self.rounds.feedback is None and self._overlap.possible

    @property
    def _expected(self) -> Tensor:
        count = len(self.replica.layout)
        return self.rounds.used if len(self.rounds.used) == count else torch.zeros(count)

    def _begin(self, message: GradientMessage, weight: float, before: Before | None = None) -> None:
        """The buckets were taken: the message is that of a backward pass that begins."""
        patience_s = self._control.deadlines.payload.total_seconds() / 2
        base = None if before is None or before.pack is None else self.replica.of_rule(self._buckets.sent)
        message.out = out = Outgoing(self._box.changed, patience_s, len(self.replica.layout), self._there, weight)
        message.asks = self.asks
        if before is not None:
            out.base, out.used = base, before.used
        with self._buckets.used(message):
            if before is not None and before.pack is not None and base is not None:
                before.pack(base)
            self._overlap.begin(out)

    def withdraw(self) -> None:
        """The backward pass has failed: nobody waits for its gradients."""
        self._overlap.give_up()
        with self._box.changed:
            message = self._buckets.message
            if isinstance(message, GradientMessage) and message.out is not None:
                if self._buckets.announced:
                    message.out.withdraw()  # all hear of it
                else:
                    self._buckets.message = None

    def reduce_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their weighted mean over all replicas; stands still until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        :math:`n_i` is the weight of replica :math:`i`: its samples, unless ``weigh`` says otherwise.

        Args:
            samples: samples behind the gradients of this replica.
            scale: this replica's loss scale (mixed precision); replicas may have different ones.
        """
        out = self._overlap.finish() if self._overlap.under_way else None
        if out is None:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            trained = list(self.replica.tensors.trained.values())
            message = GradientMessage(GRADIENTS, self._step, samples, used_by(trained), self._step)
            self._post(lambda part: pack_(gradients_of(trained), part, 1.0 / scale), message)
        self.wait()
        self.take_(scale)
        if out is not None:
            out.gradients.clear()  # the next message lets go of this one, and forward passes need the memory
        self.stepped()

    def post(
        self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int, behind: Tensor | None = None
    ) -> bool:
        """Have gradients averaged with all replicas', if the buckets are free; whether they are on their way.

        Args:
            pack: puts them into the parameters' part of a bucket.
            samples, used, since, behind: see `GradientMessage`.
        """
        if not self._take_free():
            return False
        self._post(pack, GradientMessage(GRADIENTS, self._step, samples, used, since, behind))
        return True

    def _take_free(self) -> bool:
        """Take the buckets, if they are free."""
        with self._box.changed:
            self._control.see()
            if not self._buckets.can_pack():
                return False
            self._buckets.take()
        return True

    def _post(self, pack: Callable[[Tensor], None], message: GradientMessage) -> None:
        message.asks = self.asks
        with self._buckets.used(message):
            pack(self.replica.of_rule(self._buckets.sent))

    @property
    def _step(self) -> int:
        return int(self._box.steps)

    def wait_until_free(self) -> None:
        """Stand still until gradients can be posted, or a mean has arrived that must be taken first."""
        self._gates.wait(lambda: self._buckets.can_pack() or self.arrived is not None)

    @property
    def free(self) -> bool:
        """Whether gradients can be posted, as things stand."""
        with self._box.changed:
            return self._buckets.can_pack()

    @property
    def in_flight(self) -> bool:
        """Gradients of this replica are on their way."""
        return isinstance(self._buckets.message, GradientMessage)

    @property
    def arrived(self) -> Reduction | None:
        """What `take_` finds: a mean, if one has arrived."""
        return arrived if isinstance(arrived := self._buckets.arrived, Reduction) and not self._taken else None

    def unstepped(self) -> tuple[GradientMessage, Tensor] | None:
        """Gradients of this replica that have left, with no step taken with them, and what they are."""
        with self._box.changed:
            message = self._buckets.arrived.message if self.arrived else self._buckets.message
        if not isinstance(message, GradientMessage):
            return None
        if (out := message.out) is None:
            return message, self.replica.of_rule(self._buckets.sent)
        return None if out.flags is None else (replace(message, used=out.has(), out=None), out.all())

    def wait(self) -> None:
        """Stand still until nothing is in flight, or others' step, that this replica was late for, comes first."""
        buckets = self._buckets
        self._gates.wait(lambda: buckets.message is None or buckets.arrived is not None)
        message = buckets.message
        if isinstance(message, GradientMessage) and message.out is not None and message.out.flags is not None:
            # No header speaks of it before that step is taken, which needs the gradients' place.
            self.replica.of_rule(buckets.sent).copy_(message.out.all())
            message.used, message.out = message.out.has(), None

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, Reduction], None] | None = None) -> None:
        """The mean that has arrived, if one has, becomes the gradients; `stepped` follows.

        Args:
            scale: they are multiplied by it.
            change: called with the flat mean first, and with how it came about.
        """
        buckets, self.told = self._buckets, Told()
        if isinstance(arrived := buckets.arrived, Reduction):  # else no replica had a weight
            buckets.to_training.take()
            self.told = arrived.told
            mean, changes = self.replica.of_rule(arrived.target), scale != 1.0 or change is not None
            mean = mean.clone() if changes and arrived.at_once else mean  # others may need it as it is
            if change is not None:
                change(mean, arrived)
            unpack_(self.replica, mean, arrived.used, scale, self._back)
        elif buckets.arrived is None:  # what is left here was dropped, or is of no samples
            for p in self.replica.tensors.trained.values():
                p.grad = None
        self._taken = True

    def stepped(self) -> None:
        """What was taken is in the parameters: where this replica stands at a gate, that may open from now on."""
        with self._box.changed:
            self._buckets.arrived, self._taken = None, False
            self._box.changed.notify_all()

    # ---- headers ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> Part:
        return self.blank

    def complete(self, part: Part, message: Message | None, compare: bool) -> Part:
        if not isinstance(message, GradientMessage):
            return part
        out, weight = int(message.out is not None), self._weigh(message.samples)
        used, since, samples = mask_of(message.used), message.since, message.samples
        return Part(weight, used, since, out, samples, *message.asks, int(message.keeps), there=1)

    def is_due(self, parts: Sequence[Part]) -> bool:
        return any(p.there for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[Part]) -> GradientPlan | None:
        if priority != GRADIENTS:
            return None
        total = sum(p.weight for p in parts)
        return GradientPlan(self.rounds, tuple(p.weight / total for p in parts)) if total > 0.0 else GradientPlan(None)

    def settle(self, headers: Sequence[Header], parts: Sequence[Part]) -> tuple[bool, None]:
        return True, None

    def opened(self, here: bool) -> None:
        """Nothing is left over: a rank with gradients waits for them."""

    def drop(self) -> None:
        """No replica has a weight."""
        if isinstance(self._buckets.message, GradientMessage):
            self._buckets.message = None
