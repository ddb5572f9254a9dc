"""Gradients that travel compressed, with error feedback: each message includes the error of the one before.

`GradientResiduals` keeps the errors, and adds all ranks' messages up by a `CompressedSum`: `PowerSum` (products of two
thin matrices, by power iteration) or `_MeanSum` (codes of 8 or 16 bits, or the elements of largest magnitude).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_async import ops
from lightning_async.algorithms.compression import PowerSGD, TopK
from lightning_async.engine.compressed_mean import Compression, mean_of
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

GradientCompression = Literal["none", "bf16", "fp8", "int8"] | TopK | PowerSGD  # how gradients travel


class GradientResiduals:
    r"""The residual of this replica's gradients: what compression did not send, and later messages will.

    .. math:: v_i = w_i g_i + r_i, \qquad \bar g = \sum_i \mathrm{C}(v_i), \qquad r_i \leftarrow v_i - \mathrm{C}(v_i)

    :math:`w_i` is the replica's share in the mean, which multiplies the gradient before the compression :math:`C`.
    Therefore the delivered means and the residuals always add up to the exact means, whatever the shares are and
    whichever replicas are absent.

    A residual changes only when a reduction commits: neither a failed reduction nor one whose mean is not finite has an
    effect. Each replica has its own, which its checkpoints hold. It takes the memory of two fp32 copies of the
    parameters.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self, compression: GradientCompression, replica: Replica, transfer: Transfer) -> None:
        self._compression: GradientCompression = compression
        self._replica = replica
        self._transfer = transfer
        self._layout = replica.layout
        self.residual, self._spare = (self._layout.empty(replica.device) for _ in range(2))
        self._sum = self._make()
        self._of = transfer.large.world_size

    def _make(self) -> CompressedSum:
        compression = self._compression
        layout = self._layout
        if isinstance(compression, PowerSGD):
            return PowerSum(compression.rank, layout, self._transfer, self._replica.device)
        return _MeanSum(compression, layout.numel, self._transfer, self._replica.device)

    def move_(self, out: Tensor, present: bool, used: Tensor) -> Tensor | None:
        """Sum as `CompressedSum.move_` does; return the residual for `commit`, or None where the sum is not finite.

        ``used`` is 1.0 for every parameter of which any rank has a gradient; the residuals of all others do not change.
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
        return self._sum.message_bytes

    def commit(self, residual: Tensor) -> None:
        self.residual, self._spare = residual, self.residual
        self._sum.commit()

    def _follow(self) -> None:
        """Adapt residual and sum to parameters that were frozen or unfrozen, and to another number of ranks."""
        before = self._layout
        size = self._transfer.large.world_size
        if before is not self._replica.layout:
            self._layout = self._replica.layout
            self.residual = before.moved(self.residual, self._layout)
            self._spare = torch.empty_like(self.residual)
        elif isinstance(self._sum, PowerSum) or self._of == size:
            return
        self._sum = self._make()
        self._of = size

    def state_dict(self) -> dict[str, Any]:
        views = self._layout.views(self.residual)
        named = {name: view.cpu().clone() for name, view in zip(self._layout.names, views, strict=True)}
        return {"residual": named, "basis": self._sum.basis.cpu().clone() if isinstance(self._sum, PowerSum) else None}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._follow()
        for name, view in zip(self._layout.names, self._layout.views(self.residual), strict=True):
            if name in saved["residual"] and saved["residual"][name].shape == view.shape:
                view.copy_(saved["residual"][name])
        if isinstance(self._sum, PowerSum) and saved["basis"] is not None:
            self._sum.load(saved["basis"])


class CompressedSum(ABC):
    """A way to add up compressed messages of all ranks. All methods are called on the engine's thread."""

    @abstractmethod
    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        """Sum the compressed ``out + residual`` of all ranks into ``out``, with the same bits on every rank.

        The sum is not finite where a rank's term is not. ``residual`` becomes this rank's compression error. A rank
        that is not ``present`` adds nothing, and its ``residual`` stays.
        """

    def commit(self) -> None:  # noqa: B027
        """Keep what the last sum has found for the next sum; called once all ranks have it. Default: keep nothing."""

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """The number of bytes that this rank sends for one sum."""
        ...


class PowerSum(CompressedSum):
    r"""A sum of matrices, each sent as two thin matrices of ``rank`` columns; see `PowerSGD` for the equations.

    The residual of a rank is the part of its matrix outside the common columns, :math:`M_i - P (M_i^\top P)^\top`.
    These parts add up to the error of the sum. Every sum finds a new basis, the same on all ranks.
    """

    def __init__(self, rank: int, layout: FlatLayout, transfer: Transfer, device: torch.device) -> None:
        self._transfer = transfer
        self._matrices: list[_Matrix] = []
        self._plain: list[tuple[slice, slice]] = []
        start = left = right = 0
        for shape, numel in zip(layout.shapes, layout.sizes, strict=True):
            rows = shape[0] if len(shape) > 1 and numel else 0
            columns = numel // rows if rows else 0
            width = min(rank, rows, columns)
            if width and width * (rows + columns) < numel:
                self._matrices.append(_Matrix(start, rows, columns, width, left, right))
                left = left + rows * width
                right = right + columns * width
            else:
                self._plain.append((slice(start, start + numel), slice(left, left + numel)))
                left += numel
            start += numel
        self._first = torch.zeros(left, device=device)
        self.basis = torch.randn(right, generator=torch.Generator().manual_seed(0)).to(device)
        """The columns of all matrices, one after the other; equal on all ranks except one that has just joined."""
        self._next = torch.zeros(right, device=device)

    @torch.no_grad()
    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        first = self._first.zero_()
        second = self._next.zero_()
        if present:
            residual.add_(out)
            for each in self._matrices:
                torch.mm(each.of(residual), each.right_of(self.basis), out=each.left_of(first))
            for here, there in self._plain:
                first[there] = residual[here]
                residual[here] = 0.0
        self._transfer.sum_(first)
        if not ops.all_finite(first):
            out.fill_(torch.nan)  # all ranks have the same sum, so all of them stop here
            return
        for each in self._matrices:
            left = each.left_of(first)
            left.copy_(torch.linalg.qr(left).Q)
            if present:
                own = torch.mm(each.of(residual).T, left, out=each.right_of(second))
                each.of(residual).addmm_(left, own.T, alpha=-1.0)
        self._transfer.sum_(second)
        for here, there in self._plain:
            out[here] = first[there]
        for each in self._matrices:
            right = each.right_of(second)
            torch.mm(each.left_of(first), right.T, out=each.of(out))
            found = right.norm(dim=0) > 0.0  # no rank used the others, whose columns stay
            right.copy_(torch.where(found, normalize(right, dim=0), each.right_of(self.basis)))

    @property
    def message_bytes(self) -> int:
        return 4 * (self._first.numel() + self.basis.numel())

    def commit(self) -> None:
        """Begin the next power iteration with the columns that this one has found."""
        self.basis, self._next = self._next, self.basis

    def load(self, basis: Tensor) -> None:
        if basis.shape == self.basis.shape:
            self.basis.copy_(basis)


class _Matrix(NamedTuple):
    """The place of one tensor's matrix in the bucket, and of its thin matrices in theirs."""

    start: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    def of(self, bucket: Tensor) -> Tensor:
        return bucket[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def left_of(self, thin: Tensor) -> Tensor:
        return thin[self.left : self.left + self.rows * self.rank].view(self.rows, self.rank)

    def right_of(self, thin: Tensor) -> Tensor:
        return thin[self.right : self.right + self.columns * self.rank].view(self.columns, self.rank)


class _MeanSum(CompressedSum):
    """A sum of codes, or of the largest elements, of all ranks: a `CompressedMean` in which every weight is 1."""

    def __init__(self, compression: Compression | TopK, numel: int, transfer: Transfer, device: torch.device) -> None:
        large = transfer.large
        self._weights = [1.0] * large.world_size
        self._mean = mean_of(large, transfer.result, compression, numel, transfer.part_bytes, device)

    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        self._mean.move_(out, out if present else None, self._weights, residual)

    @property
    def message_bytes(self) -> int:
        return self._mean.message_bytes
