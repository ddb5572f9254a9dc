"""The rule `SparseLoCo`: DiLoCo for sparse messages, with a residual on each replica in place of outer momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async._checks import check_real
from lightning_async.algorithms.averaging import Round, RuleBase
from lightning_async.flat import FlatLayout


class SparseLoCoState(NamedTuple):
    """The state of `SparseLoCo` between rounds: the anchor, the residual, and the snapshot."""

    anchor: Tensor  # the last agreed parameters, flat fp32
    error: Tensor  # residual: decayed sum of what this replica's messages did not send
    snapshot: Tensor  # the snapshot of the message under way


@dataclass(frozen=True)
class SparseLoCo(RuleBase[SparseLoCoState]):
    r"""A `DiLoCo` for sparse messages: the residual of compression takes the place of outer momentum.

    .. math::
        e_i &\leftarrow \beta e_i + (a - s_i), \qquad q_i = \mathrm{C}(e_i), \qquad e_i \leftarrow e_i - q_i \\
        a &\leftarrow a - \eta \sum_j w_j q_j \\
        x_i &\leftarrow x_i + (a - s_i)

    :math:`a` is the anchor (the last agreed parameters), :math:`s_i` is the snapshot of replica :math:`i`, and
    :math:`C` is the strategy's ``compression``, by default ``TopK(0.02, bits=2)``. After a round, parameters
    are the anchor plus the progress since the snapshot. The residual :math:`e_i` is the part of the earlier progress
    that was not sent; it differs between replicas, and checkpoints hold it. The residual of a replica that joins, or
    that has lost its residual, starts at zero. Without compression, :math:`q_i = a - s_i` and :math:`e_i = 0`. If the
    message of a replica had the weight 0 in a round, its :math:`e_i` does not change.

    Args:
        outer_lr: :math:`\eta`, the outer learning rate. Default: 1.0.
        decay: :math:`\beta`, the factor of the residual from one round to the next. Default: 0.95.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If ``outer_lr`` is not positive, or ``decay`` is not in [0, 1].

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    https://arxiv.org/abs/2508.15706

    >>> rule = SparseLoCo(decay=0.5)
    >>> params = torch.tensor([1.0, 1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([0.0, 0.5])  # the parameters of the only replica, after its local steps
    >>> _ = rule.message_(sent, state)  # sent is now [1.0, 0.5]
    >>> sent[1] = 0.0  # compression sends only the largest element
    >>> received = sent.clone()
    >>> state = rule.merge_(sent, received, state, Round(id=0, rank=0, work=(1.0,)))
    >>> sent, received, state.error  # the snapshot, the target, and the unsent 0.5 times decay
    (tensor([0.0000, 0.5000]), tensor([0., 1.]), tensor([0.0000, 0.2500]))
    """

    outer_lr: float = 1.0
    decay: float = 0.95

    sends_difference = True
    keeps_residual = True
    per_replica = frozenset({"error", "snapshot"})

    def __post_init__(self) -> None:
        check_real(self, "outer_lr", above=0)
        check_real(self, "decay", at_least=0)
        if self.decay > 1:
            raise ValueError(f"`SparseLoCo(decay={self.decay!r})` must be <= 1.")

    def init(self, params: Tensor, layout: FlatLayout) -> SparseLoCoState:
        anchor = params.detach().clone()
        return SparseLoCoState(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor))

    def message_(self, out: Tensor, state: SparseLoCoState) -> tuple[float, ...]:
        # The residual changes in `merge_` only, so that a dropped message leaves it as it is.
        state.snapshot.copy_(out)
        torch.sub(state.anchor, out, out=out)
        out.add_(state.error)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: SparseLoCoState, round: Round) -> SparseLoCoState:
        anchor = state.anchor
        received.mul_(self.outer_lr)
        torch.sub(anchor, received, out=received)
        if sent is not None:
            if self.weights(round)[round.rank] > 0.0:  # else nothing of the message was used
                # The operations are those of `message_`, in the memory of the anchor, so that without compression the
                # residual is exactly zero.
                torch.sub(anchor.sub_(state.snapshot).add_(state.error), sent, out=state.error)
                state.error.mul_(self.decay)
            sent.copy_(state.snapshot)
        anchor.copy_(received)
        return state

    def state_dict(self, state: SparseLoCoState) -> dict[str, Any]:
        """Return the anchor and the residual by name.

        The snapshot is not saved, because a resumed run takes a new one.
        """
        return {"anchor": state.anchor, "error": state.error}
