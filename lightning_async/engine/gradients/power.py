"""Sums of matrices as products of two thin ones, by power iteration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_async import ops
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

__all__ = ["PowerSum"]


class _Matrix(NamedTuple):
    """A tensor's place in the bucket, and in the thin matrices of all."""

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


class PowerSum:
    r"""See `CompressedSum`, and `PowerSGD` for the equations.

    A rank keeps what its own matrix has beyond the common columns, :math:`M_i - P (M_i^\top P)^\top`; these add up to
    what the sum lacks. The basis is found anew by every sum, on all ranks alike: one that comes with another one makes
    no more than one sum worse.

    Args:
        rank: columns of the thin matrices.
        layout: of the bucket.
        transfer: moves them.
        device: of the bucket.
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
                left, right = left + rows * width, right + columns * width
            else:
                self._plain.append((slice(start, start + numel), slice(left, left + numel)))
                left += numel
            start += numel
        self._first = torch.zeros(left, device=device)
        self.basis = torch.randn(right, generator=torch.Generator().manual_seed(0)).to(device)
        """Of all matrices, one after the other; the same on all ranks, but for one that has just come."""
        self._next = torch.zeros(right, device=device)

    @torch.no_grad()
    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        first, second = self._first.zero_(), self._next.zero_()
        if present:
            residual.add_(out)
            for each in self._matrices:
                torch.mm(each.of(residual), each.right_of(self.basis), out=each.left_of(first))
            for here, there in self._plain:
                first[there] = residual[here]
                residual[here] = 0.0
        self._transfer.sum_(first)
        if not ops.all_finite(first):
            out.fill_(torch.nan)  # as all ranks see
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
            found = right.norm(dim=0) > 0.0  # nobody has used it else: its columns stay
            right.copy_(torch.where(found, normalize(right, dim=0), each.right_of(self.basis)))

    @property
    def message_bytes(self) -> int:
        """The thin matrices, and what is not worth any."""
        return 4 * (self._first.numel() + self.basis.numel())

    def commit(self) -> None:
        """The columns that were found are where the next search begins."""
        self.basis, self._next = self._next, self.basis

    def load(self, basis: Tensor) -> None:
        """Go on from there, if it fits."""
        if basis.shape == self.basis.shape:
            self.basis.copy_(basis)
