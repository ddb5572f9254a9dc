"""One replica's tensors, and how they lie in a flat bucket.

The training thread packs and merges: it is the only writer of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_async import ops
from lightning_async.engine.digest import digest, is_finite, real
from lightning_async.engine.running_means import RunningMean, count, merge_late_
from lightning_async.engine.tensors import BufferPolicy, ModuleTensors, same
from lightning_async.errors import AsyncTrainingError
from lightning_async.flat import FlatLayout

__all__ = ["BufferPolicy", "OptimizerPolicy", "Replica", "Updates"]

OptimizerPolicy = Literal["keep", "average", "reset"]
Updates = tuple[Sequence[Tensor], Sequence[Tensor]]
"""How often buffers, and the optimizers' state, have been updated, see `running_means.count`."""


@dataclass
class _Section:
    """A run of tensors in the bucket that is treated alike."""

    plan: ops.Plan
    start: int

    @property
    def tensors(self) -> list[Tensor]:
        return self.plan.tensors

    @property
    def end(self) -> int:
        return self.start + self.plan.layout.numel

    def of(self, bucket: Tensor) -> Tensor:
        return bucket[self.start : self.end]


class Replica:
    """The parameters, and what travels with them, of one replica.

    The bucket holds, one after the other: the parameters, to which the rule applies; the floating-point
    buffers (unless they are kept); the optimizers' state (where it is averaged). The last two always take
    the plain work-weighted mean (``"broadcast"``: one replica's values), and keep their updates since the snapshot: see
    `RunningMean`. Complex numbers count as two real ones.

    What stands apart moves at a consensus only, in its own precision, and only where replicas differ: integer and bool
    buffers, by their maximum; frozen parameters, by their mean; and what a bucket of fp32 would cut: float64.

    Buffers and optimizer state may be assigned anew while training; the replica follows them. Memory: an fp32 remainder
    per bf16 or fp16 parameter.

    Args:
        module: the module whose parameters and buffers these are.
        buffers: what happens to floating-point buffers.
        device: where the buckets live: best where the parameters do, so that all arithmetic is there; on the CPU, for
            transports that see no other memory, they are pinned under CUDA.

    Raises:
        ValueError: see `ModuleTensors`.
    """

    def __init__(
        self, module: nn.Module, buffers: BufferPolicy = "average", device: torch.device | str = "cpu"
    ) -> None:
        self.tensors = ModuleTensors(module, buffers)
        self.policy: BufferPolicy = buffers
        self.device = torch.device(device)
        self.watched: Callable[[], Iterable[Tensor]] = tuple
        """Further tensors whose health is the replica's: the state that its optimizers keep."""
        self.version = 0
        """How often the layout has changed since training began."""
        self.remainders: dict[str, Tensor] = {}
        """What parameters of 16 bits lack of their fp32 values, by name."""
        self._state: Callable[[], Sequence[Tensor]] = tuple
        self._state_means: Callable[[], Sequence[RunningMean]] | None = None
        self.reference = torch.empty(0)
        """The buffers when replicas last agreed: in rounds they travel as differences from that, so that those that
        never change keep their bits."""
        self._sections: list[_Section] = []
        self.build()

    def build(
        self,
        optimizer_state: Callable[[], Sequence[Tensor]] | None = None,
        running_means: Callable[[], Sequence[RunningMean]] | None = None,
    ) -> None:
        """Lay out a bucket anew, with what ``optimizer_state`` returns (default: as before) behind the rest.

        Args:
            optimizer_state: returns tensors as they are now.
            running_means: returns how each of these averages over time. Default: nothing is known of them.
        """
        if optimizer_state is not None:
            self._state, self._state_means = optimizer_state, running_means
        names, tensors = list(self.tensors.trained), [real(p) for p in self.tensors.trained.values()]
        for name, x in zip(names, tensors, strict=True):
            if x.dtype in (torch.bfloat16, torch.float16) and name not in self.remainders:
                self.remainders[name] = torch.zeros_like(x, dtype=torch.float32)
        plan = ops.Plan(FlatLayout(tensors, names), tensors, [self.remainders.get(name) for name in names])
        self._sections = [_Section(plan, 0)]
        for extra in (self._mean_buffers(), list(self._state())):
            self._sections.append(_Section(ops.Plan(FlatLayout(extra), extra), self._sections[-1].end))
        self.note_agreed()
        described = [line for section in self._sections for line in section.plan.layout.describe()]
        self.fingerprint = FlatLayout([torch.empty(0)] * len(described), described).fingerprint()
        """Equal on all ranks whose messages have the same layout."""

    def note_agreed(self) -> None:
        """All replicas hold the same model now: what in its buffers is infinite is meant."""
        self.refresh()
        self.tensors.accept_infinite()
        buffers = self._sections[1]
        self.reference = torch.empty(buffers.plan.layout.numel, device=self.device)
        buffers.plan.pack_(self.reference)
        self.reference.nan_to_num_(0.0, 0.0, 0.0)

    def take_thawed(self) -> None:
        """Lay out a bucket with what is trained now. All replicas hold the same model, and do the same."""
        self.tensors.take_thawed()
        self.version += 1
        self.build()

    def refresh(self) -> None:
        """Follow buffers and optimizer state that were assigned anew.

        Raises:
            AsyncTrainingError: what was assigned does not fit in the old one's place.
        """
        parameters, buffers, state = self._sections
        if any(p.is_complex() for p in self.tensors.trained.values()):  # views do not follow new memory
            tensors = [real(p) for p in self.tensors.trained.values()]
            self._sections[0] = _Section(ops.Plan(parameters.plan.layout, tensors, parameters.plan.remainders), 0)
        if self.tensors.follow_buffers():
            mean = self._mean_buffers()
            self._sections[1] = _Section(ops.Plan(FlatLayout(mean), mean), parameters.end)
        if not same(now := list(self._state()), state.tensors):
            if [t.shape for t in now] != [t.shape for t in state.tensors]:
                raise AsyncTrainingError(
                    "The optimizers' state changed its shape after training began, so it cannot be averaged. Pass "
                    '`optimizer_state="keep"`.'
                )
            self._sections[2] = _Section(ops.Plan(FlatLayout(now), now), buffers.end)

    def _mean_buffers(self) -> list[Tensor]:
        return [real(b) for b in self.tensors.averaged.values()]

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters that travel."""
        return self._sections[0].plan.layout

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that travel, as real numbers: those that require gradients, each once."""
        return self._sections[0].tensors

    @property
    def numel(self) -> int:
        """Elements of a message."""
        return self._sections[-1].end

    # ---- comparing and judging ----

    def digests(self) -> tuple[int, int]:
        """Of the parameters that travel, and of all else that replicas share; see `engine.digest`."""
        self.refresh()
        _, buffers, state = self._sections
        rest = [*buffers.tensors, *state.tensors, *self.tensors.apart.values()]
        return digest([*self.parameters, *self.remainders.values()]), digest(rest)

    def judge(self) -> tuple[bool, bool]:
        """Whether parameters, and the optimizers' state with what is watched, are finite as they are now; and whether
        buffers and frozen parameters are, but for what was not when replicas agreed."""
        self.refresh()
        parameters, buffers, state = self._sections
        rest = [*self._judged(buffers.tensors), *self.tensors.judged_frozen]
        return is_finite([*parameters.tensors, *state.tensors, *self.watched()]), is_finite(rest)

    def judge_packed(self, bucket: Tensor) -> tuple[bool, bool]:
        """The same of what was packed in ``bucket``."""
        if ops.all_finite(bucket):
            return True, True
        parameters, buffers, state = self._sections
        views = buffers.plan.layout.views(buffers.of(bucket))
        return is_finite([parameters.of(bucket), state.of(bucket)]), is_finite(self._judged(views))

    def _judged(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        return [b for b, judged in zip(buffers, self.tensors.judged, strict=True) if judged]

    # ---- moving ----

    num_fragments = 1
    """Parts of the parameters that travel one at a time, each with a rule state of its own."""

    def of_rule(self, bucket: Tensor, fragment: int = 0) -> Tensor:
        """The part of a bucket that belongs to the rule: the parameters, or a fragment of them."""
        assert fragment < self.num_fragments
        return self._sections[0].of(bucket)

    def beyond_rule(self, bucket: Tensor) -> Tensor:
        """The rest of a bucket: buffers and optimizer state, which take the plain mean."""
        return bucket[self._sections[0].end :]

    def pack_(self, bucket: Tensor, for_round: bool = False) -> None:
        """Parameters, buffers and optimizer state into ``bucket``, as fp32; ``for_round``: buffers as differences."""
        self.refresh()
        self.pack_parameters_(self.of_rule(bucket))
        for section in self._sections[1:]:
            section.plan.pack_(section.of(bucket))
        if for_round:
            self._sections[1].of(bucket).sub_(self.reference)

    def updates(self) -> Updates:
        """Return how often buffers, and the optimizers' state, have been updated by now."""
        _, buffers, state = self._sections
        return (
            count(self.tensors.running_means()) if buffers.tensors else (),
            count(self._running_means_of_state()) if state.tensors else (),
        )

    def _running_means_of_state(self) -> Sequence[RunningMean]:
        known = () if self._state_means is None else self._state_means()
        return known or [RunningMean()] * len(self._sections[2].tensors)

    def pack_parameters_(self, part: Tensor) -> None:
        """The parameters into the rule's part of a bucket, as fp32."""
        self._sections[0].plan.pack_(part)

    def scale_(self, out: Tensor, source: Tensor, weight: float, is_source: bool, of_rule: bool = True) -> None:
        """This rank's part of the sum, ``out = weight * source``; broadcast buffers come from one rank alone.

        Args:
            is_source: that is this rank.
            of_rule: also of the rule's part.
        """
        start = 0 if of_rule else self._sections[0].end
        self.scaled_(out[start:], source[start:], weight)
        if self.policy == "broadcast":
            buffers = self._sections[1]
            self.scaled_(buffers.of(out), buffers.of(source), float(is_source))

    @staticmethod
    def scaled_(out: Tensor, source: Tensor, weight: float) -> None:
        """``out = weight * source``; weight zero gives zeros, whatever ``source`` holds (NaN too)."""
        if weight == 0.0:
            out.zero_()
        else:
            ops.scale_(out, source, weight)

    @torch.no_grad()
    def merge_(
        self,
        target: Tensor,
        base: Tensor | None,
        with_state: bool,
        buffers_too: bool = True,
        still: bool = False,
        of_round: bool = False,
    ) -> None:
        """Move the parameters by ``target - base`` (``base`` is used up), or copy ``target`` if ``base`` is None.

        Args:
            with_state: also overwrite buffers and optimizer state.
            buffers_too: False where no rank's buffers are in ``target`` (one rank broadcasts them and was absent).
            still: the parameters are what was packed: what fp32 does not hold of a float64 stays.
            of_round: buffers in ``target`` are differences.
        """
        self.refresh()
        if of_round and with_state and buffers_too and self.reference.numel():
            self._merge_buffers(self._sections[1].of(target) + self.reference)
            buffers_too = False
        finer = [(p, p - p.float()) for p in self.parameters if still and p.dtype is torch.float64]
        for i, section in enumerate(self._sections):
            if i == 0:
                part = section.of(base) if base is not None else None
                section.plan.apply_(section.of(target), part)
            elif with_state and section.tensors and (i != 1 or buffers_too):
                section.plan.apply_(section.of(target))
        for p, rest in finer:
            p.add_(rest)

    def merge_late_(self, target: Tensor, snapshot: Tensor, updates: Updates, buffers_too: bool = True) -> None:
        """Let buffers and optimizer state take up a round's mean, and keep their updates since the snapshot.

        Args:
            target: the bucket with the mean.
            snapshot: the bucket with what this replica packed.
            updates: what `updates` said then.
            buffers_too: see `merge_`.
        """
        self.refresh()
        _, buffers, state = self._sections
        if buffers.tensors and buffers_too:
            merge_late_(
                buffers.tensors, buffers.of(target), buffers.of(snapshot), self.tensors.running_means(), updates[0],
                self.reference,
            )  # fmt: skip
        if state.tensors:
            means = self._running_means_of_state()
            merge_late_(state.tensors, state.of(target), state.of(snapshot), means, updates[1])

    def _merge_buffers(self, mean: Tensor) -> None:
        section = self._sections[1]
        before = [(b, b.clone()) for b in section.tensors if b.dtype is torch.float64]
        section.plan.apply_(mean)
        for buffer, old in before:  # one that is the mean, as far as fp32 can tell, is not cut
            buffer.copy_(torch.where(buffer == old.float(), old, buffer))
