"""Gradients that travel compressed, with error feedback: what a message lacks is in the next one."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.codes import CompressedMean, Compression
from lightning_async.engine.gradients.power import PowerSum
from lightning_async.engine.gradients.topk import TopKSum
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.rules.compression import PowerSGD, TopK

__all__ = ["CompressedSum", "Feedback", "GradientCompression"]

GradientCompression = Literal["none", "bf16", "fp8", "int8"] | TopK | PowerSGD
"""How gradients travel."""


class CompressedSum(Protocol):
    """One way to add up what all ranks bring. All calls come on the engine's thread."""

    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        """The sum of all ranks' ``out + residual``, as far as it is delivered, into ``out``: the same bits everywhere.

        Not finite, where what a rank brings is not.

        Args:
            out: flat fp32; overwritten.
            present: this rank brings something; else its ``out`` counts as zero, and its ``residual`` stays here.
            residual: becomes what is yet to be delivered of this rank's.
        """
        ...

    def commit(self) -> None:
        """All ranks have the sum: keep what it has changed."""
        ...

    @property
    def message_bytes(self) -> int:
        """What this rank sends."""
        ...


class _CodedSum:
    """See `CompressedSum`: as codes of 8 or 16 bits."""

    def __init__(self, compression: Compression, numel: int, transfer: Transfer, device: torch.device) -> None:
        large = transfer.large
        self._weights = [1.0] * large.world_size
        self._mean = CompressedMean(large, transfer.result, compression, numel, transfer.part_bytes, device)

    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        self._mean.move_(out, out if present else None, self._weights, residual)

    def commit(self) -> None: ...

    @property
    def message_bytes(self) -> int:
        return self._mean.message_bytes


class Feedback:
    r"""What compression has yet to deliver of this replica's gradients.

    .. math:: v_i = w_i g_i + r_i, \qquad \bar g = \sum_i \mathrm{C}(v_i), \qquad r_i \leftarrow v_i - \mathrm{C}(v_i)

    :math:`w_i` is the replica's share in the mean, which goes in ahead of the compression :math:`C`. So whatever
    shares are, and whoever is absent, the means that were delivered and the residuals add up to the exact means.

    A residual changes when a reduction commits: one that fails, and is repeated, leaves it as it is, and so does one
    whose mean is not finite, with which no replica steps. It is each replica's own, and in its checkpoints. It takes
    the room of two fp32 copies of the parameters.

    Args:
        compression: how gradients travel.
        replica: says which there are.
        transfer: moves them.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self, compression: GradientCompression, replica: Replica, transfer: Transfer) -> None:
        self._compression: GradientCompression = compression
        self._replica, self._transfer = replica, transfer
        self._layout = replica.layout
        self.residual, self._spare = (self._layout.empty(replica.device) for _ in range(2))
        self._sum, self._of = self._make(), transfer.large.world_size

    def _make(self) -> CompressedSum:
        compression, layout = self._compression, self._layout
        if isinstance(compression, TopK):
            return TopKSum(compression.fraction, layout.numel, self._transfer)
        if isinstance(compression, PowerSGD):
            return PowerSum(compression.rank, layout, self._transfer, self._replica.device)
        return _CodedSum(compression, layout.numel, self._transfer, self._replica.device)

    def move_(self, out: Tensor, present: bool, used: Tensor) -> Tensor | None:
        """See `CompressedSum`.

        Args:
            used: 1.0 for every parameter that any rank has a gradient of. Nothing is delivered to the others: they
                get no gradient.

        Returns:
            What the residual becomes with `commit`; None, for as it is, where the sum is not finite.
        """
        self._follow()
        residual = self._spare.copy_(self.residual)
        views = zip(self._layout.views(residual), used.tolist(), strict=True)
        unused = [(view, view.clone()) for view, any_used in views if not any_used]
        for view, _ in unused:
            view.zero_()
        self._sum.move_(out, present, residual)
        for view, before in unused:
            view.copy_(before)
        return residual if ops.all_finite(out) else None

    @property
    def message_bytes(self) -> int:
        """What this replica's gradients are on the wire."""
        return self._sum.message_bytes

    def commit(self, residual: Tensor) -> None:
        """All ranks have the sum."""
        self.residual, self._spare = residual, self.residual
        self._sum.commit()

    def _follow(self) -> None:
        """Parameters were frozen or unfrozen at a gate, or the groups are formed anew, of another size."""
        before, size = self._layout, self._transfer.large.world_size
        if before is not self._replica.layout:
            self._layout = self._replica.layout
            self.residual = before.moved(self.residual, self._layout)
            self._spare = torch.empty_like(self.residual)
        elif isinstance(self._sum, PowerSum) or self._of == size:
            return
        self._sum, self._of = self._make(), size

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """What is yet to be delivered, by the parameters' names, copied."""
        views = self._layout.views(self.residual)
        named = {name: view.cpu().clone() for name, view in zip(self._layout.names, views, strict=True)}
        return {"residual": named, "basis": self._sum.basis.cpu().clone() if isinstance(self._sum, PowerSum) else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there, with what there is of parameters that are trained now, in their size."""
        self._follow()
        for name, view in zip(self._layout.names, self._layout.views(self.residual), strict=True):
            if name in saved["residual"] and saved["residual"][name].shape == view.shape:
                view.copy_(saved["residual"][name])
        if isinstance(self._sum, PowerSum) and saved["basis"] is not None:
            self._sum.load(saved["basis"])
