"""Compressed gradients with error feedback: each message includes the compression error of the message before.

`GradientResiduals` keeps the errors of this replica, and adds up the messages of all ranks by a `CompressedSum`. There
are two of these. `PowerSum` sends each matrix as two thin matrices, which it finds by power iteration. `_MeanSum` sends
codes of 8 or 16 bits, or the elements of largest magnitude.
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
    r"""The residual of this replica's gradients: the part that compression has not sent, and later messages send.

    .. math:: v_i = w_i g_i + r_i, \qquad \bar g = \sum_i \mathrm{C}(v_i), \qquad r_i \leftarrow v_i - \mathrm{C}(v_i)

    :math:`w_i` is the replica's share in the mean. The gradient is multiplied by it before the compression :math:`C`.
    Therefore the delivered means and the residuals always add up to the exact means, whatever the shares are and
    whichever replicas are absent.

    A residual changes only when a reduction commits. A reduction that fails, or whose mean is not finite, does not
    change it. Each replica has its own residual, and saves it in its checkpoints. The residual takes the memory of two
    fp32 copies of the parameters.

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
        """Sum the compressed gradients and residuals of all ranks into ``out``; return this rank's new residual.

        All ranks call this together. The caller passes the new residual to `commit`.

        Args:
            out: Flat gradients of this rank, times its share; overwritten by the sum, see `CompressedSum.move_`.
            present: Whether this rank has gradients.
            used: 1.0 for every parameter of which any rank has a gradient, else 0.0. Residuals change only where 1.0.

        Returns:
            The new residual, or None if the sum is not finite.
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
        """Adapt the residual and the `CompressedSum` to frozen or unfrozen parameters, and to the number of ranks."""
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
    """An interface for adding up the compressed messages of all ranks; its methods run on the engine's thread."""

    @abstractmethod
    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        """Compress ``out + residual`` of each rank, and write the sum over all ranks into ``out``.

        All ranks call this together, and get the same bits. ``residual`` is overwritten by this rank's compression
        error. A rank that is not ``present`` adds nothing to the sum, and its ``residual`` does not change. If a rank's
        values are not finite, the sum is not finite either.
        """

    def commit(self) -> None:  # noqa: B027
        """Keep values that the last sum computed, for use in the next sum. Default: keep nothing.

        This is called once all ranks have the last sum.
        """

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """The number of bytes that this rank sends for one sum."""
        ...


class PowerSum(CompressedSum):
    r"""A sum of matrices, each sent as two thin matrices of ``rank`` columns; see `PowerSGD` for the equations.

    The residual of process :math:`i` is :math:`M_i - P (M_i^\top P)^\top`: the part of its matrix :math:`M_i` that the
    columns of :math:`P`, which all processes share, cannot express. The residuals of all processes add up to the error
    of the sum. Every sum computes a new basis :math:`Q` for the next sum, the same on all processes.
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
        """The basis of each matrix, one after the other; equal on all processes except one that has just joined."""
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
        """Use the basis that the last sum has computed as the start of the next power iteration."""
        self.basis, self._next = self._next, self.basis

    def load(self, basis: Tensor) -> None:
        if basis.shape == self.basis.shape:
            self.basis.copy_(basis)


class _Matrix(NamedTuple):
    """The place of one gradient, viewed as a matrix, in the flat gradients; and the places of its two thin matrices.

    ``start`` is the first element in the flat gradients. ``left`` is the first element of the thin matrix :math:`P` in
    the flat tensor of all :math:`P`, and ``right`` that of :math:`Q` in the flat tensor of all :math:`Q`.
    """

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
    """A sum of all ranks' codes, or of their largest elements: a `CompressedMean` in which every weight is 1."""

    def __init__(self, compression: Compression | TopK, numel: int, transfer: Transfer, device: torch.device) -> None:
        large = transfer.large
        self._weights = [1.0] * large.world_size
        self._mean = mean_of(large, transfer.result, compression, numel, transfer.part_bytes, device)

    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        self._mean.move_(out, out if present else None, self._weights, residual)

    @property
    def message_bytes(self) -> int:
        return self._mean.message_bytes
