"""One replica's tensors and the two flat buckets in which they travel.

The training thread packs and merges (it is the only writer of the parameters); the engine's thread touches
the buckets only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_async import ops
from lightning_async.engine.streams import Handover
from lightning_async.errors import AsyncTrainingError
from lightning_async.flat import FlatLayout

__all__ = ["BufferPolicy", "OptimizerPolicy", "Replica", "check_materialised", "describe"]

BufferPolicy = Literal["average", "keep", "broadcast", "recompute"]
OptimizerPolicy = Literal["keep", "average", "reset"]


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
    the plain work-weighted mean (``"broadcast"``: rank 0's values) and are overwritten by it, because sums of
    squares and variances must not be moved by a difference. Integer buffers follow by their maximum at
    every consensus. Memory: two fp32 copies of all that, and an fp32 remainder per bf16 or fp16 parameter.

    Args:
        module: the module whose parameters and buffers these are; shared ones count once, frozen ones do not
            travel.
        buffers: what happens to floating-point buffers.
        device: where the buckets live: best where the parameters do, so that all arithmetic is there; on the CPU, for
            transports that see no other memory, they are pinned under CUDA.

    Raises:
        ValueError: an unknown policy, or parameters that are not materialised yet (lazy modules).
    """

    def __init__(
        self, module: nn.Module, buffers: BufferPolicy = "average", device: torch.device | str = "cpu"
    ) -> None:
        if buffers not in get_args(BufferPolicy):
            raise ValueError(f"`buffers={buffers!r}` must be one of {get_args(BufferPolicy)}.")
        check_materialised(module)
        self.policy: BufferPolicy = buffers
        self.device = torch.device(device)
        self.to_engine, self.to_training = Handover(self.device), Handover(self.device)
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._module, self._known = module, dict(module.named_parameters())
        self._frozen = [name for name, p in self._known.items() if not p.requires_grad]
        floats = [(n, b) for n, b in module.named_buffers() if b.is_floating_point()]
        self.counters = [b for _, b in module.named_buffers() if not b.is_floating_point()]
        self._float_buffers = floats if buffers != "keep" else []
        self.remainders = [
            torch.zeros_like(p, dtype=torch.float32) if p.dtype in (torch.bfloat16, torch.float16) else None
            for _, p in self._named
        ]
        self._sections: list[_Section] = []
        self.build(())

    def build(self, optimizer_state: Sequence[Tensor]) -> None:
        """Lay out the buckets anew, with these tensors of the optimizers' state behind the rest."""
        names, tensors = zip(*self._named, strict=True) if self._named else ((), ())
        self._sections = [_Section(ops.Plan(FlatLayout(tensors, names), tensors, self.remainders), 0)]
        for extra in ([b for _, b in self._float_buffers], list(optimizer_state)):
            self._sections.append(_Section(ops.Plan(FlatLayout(extra), extra), self._sections[-1].end))
        whole = FlatLayout([torch.empty(self._sections[-1].end, device="meta")])
        pin = self.device.type == "cpu" and any(p.is_cuda for p in self.parameters)
        self.sent = whole.empty(self.device, pin_memory=pin)
        self.received = whole.empty(self.device, pin_memory=pin)
        described = [line for section in self._sections for line in section.plan.layout.describe()]
        self.fingerprint = FlatLayout([torch.empty(0)] * len(described), described).fingerprint()
        """Equal on all ranks whose messages have the same layout."""

    def settle(self, registered: Callable[[Tensor], Tensor]) -> None:
        """Put the buckets, with what they hold, where ``registered`` says."""
        self.sent, self.received = registered(self.sent), registered(self.received)

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters that travel."""
        return self._sections[0].plan.layout

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that travel: those that require gradients, each once."""
        return self._sections[0].tensors

    @property
    def numel(self) -> int:
        """Elements of a message."""
        return self.sent.numel()

    def is_finite(self) -> bool:
        """Whether all parameters that travel are finite."""
        return all(ops.all_finite(p) for p in self.parameters)

    def of_rule(self, bucket: Tensor) -> Tensor:
        """The part of a bucket that belongs to the rule: the parameters."""
        return self._sections[0].of(bucket)

    def beyond_rule(self, bucket: Tensor) -> Tensor:
        """The rest of a bucket: buffers and optimizer state, which take the plain mean."""
        return bucket[self._sections[0].end :]

    def check_unchanged(self) -> None:
        """Whether the module still has the parameters that it had when training began.

        Raises:
            AsyncTrainingError: parameters were added, removed or replaced, or frozen ones are trained now.
        """
        now = dict(self._module.named_parameters())
        if now.keys() != self._known.keys() or any(now[name] is not p for name, p in self._known.items()):
            changed = [n for n in {**now, **self._known} if now.get(n) is not self._known.get(n)]
            raise AsyncTrainingError(
                f"Parameters {changed} were added, removed or replaced after training began, so they are not averaged. "
                "Create all parameters in `__init__`, `configure_model` or `setup`."
            )
        thawed = [name for name in self._frozen if now[name].requires_grad]
        if thawed:
            raise AsyncTrainingError(
                f"Parameters {thawed} were frozen when training began, so they are not averaged, and require gradients "
                "now. Let them require gradients from the start, and keep them still by a learning rate of zero."
            )

    def pack_(self, bucket: Tensor) -> None:
        """Parameters, buffers and optimizer state into ``bucket``, as fp32."""
        self.pack_parameters_(self.of_rule(bucket))
        for section in self._sections[1:]:
            section.plan.pack_(section.of(bucket))

    def pack_parameters_(self, part: Tensor) -> None:
        """The parameters into the rule's part of a bucket, as fp32."""
        self._sections[0].plan.pack_(part)

    def scale_(self, out: Tensor, source: Tensor, weight: float, is_source: bool, of_rule: bool = True) -> None:
        """This rank's part of the sum, ``out = weight * source``; broadcast buffers come from rank 0 alone.

        Args:
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

    def merge_(self, target: Tensor, base: Tensor | None, with_state: bool, buffers_too: bool = True) -> None:
        """Move the parameters by ``target - base`` (``base`` is used up), or copy ``target`` if ``base`` is None.

        Args:
            with_state: also overwrite buffers and optimizer state.
            buffers_too: False where no rank's buffers are in ``target`` (rank 0 broadcasts them and was absent).
        """
        for i, section in enumerate(self._sections):
            if i == 0:
                part = section.of(base) if base is not None else None
                section.plan.apply_(section.of(target), part)
            elif with_state and section.tensors and (i != 1 or buffers_too):
                section.plan.apply_(section.of(target))

    @torch.no_grad()
    def pack_gradients_(self, bucket: Tensor, scale: float = 1.0) -> None:
        """Gradients times ``scale`` into ``bucket``; a parameter without one counts as zero."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        ops.Plan(self.layout, gradients).pack_(self.of_rule(bucket), weight=scale)

    @torch.no_grad()
    def used(self) -> Tensor:
        """1.0 for every parameter that has a gradient."""
        return torch.tensor([float(p.grad is not None) for p in self.parameters])

    @torch.no_grad()
    def unpack_gradients_(self, bucket: Tensor, used: Tensor, scale: float = 1.0) -> None:
        """Gradients from ``bucket`` times ``scale``; those that no replica used stay None."""
        part = self.of_rule(bucket)
        if scale != 1.0:
            part.mul_(scale)
        gradients = [torch.empty_like(p) if p.grad is None else p.grad for p in self.parameters]
        ops.Plan(self.layout, gradients).apply_(part)
        for p, gradient, any_used in zip(self.parameters, gradients, used.tolist(), strict=True):
            if p.grad is None and any_used:
                p.grad = gradient

    @torch.no_grad()
    def set_counters(self, counters: Sequence[Tensor]) -> None:
        """Overwrite the integer buffers."""
        for mine, new in zip(self.counters, counters, strict=True):
            mine.copy_(new)


def check_materialised(module: nn.Module) -> None:
    """Refuse lazy parameters and buffers: without a shape they can be neither compared nor averaged."""
    lazy = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    ]
    if lazy:
        raise ValueError(
            f"{lazy} are lazy: they have no shape yet, so replicas cannot be compared or averaged. Run one batch "
            "through the module in `configure_model` or `setup` to materialise them."
        )


def describe(module: nn.Module) -> list[str]:
    """One line per parameter and buffer, frozen ones included; equal on replicas of one model."""
    check_materialised(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    lines = FlatLayout([t for _, t in named], [n for n, _ in named]).describe()
    return [
        f"{line}, {'trained' if t.requires_grad else 'not trained'}" for line, (_, t) in zip(lines, named, strict=True)
    ]
