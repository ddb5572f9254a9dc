"""The rule `SparseLoCo`: DiLoCo with each replica's own residual in place of outer momentum, for sparse messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async._checks import check_real
from lightning_async.algorithms.averaging import Round, RuleBase
from lightning_async.flat import FlatLayout


class SparseLoCoState(NamedTuple):
    """The memory of SparseLoCo between rounds."""

    anchor: Tensor  # the last agreed parameters, flat fp32
    error: Tensor  # what this replica's messages have lacked so far, times the decay: the next one begins with it
    snapshot: Tensor  # of the message under way


@dataclass(frozen=True)
class SparseLoCo(RuleBase[SparseLoCoState]):
    r"""DiLoCo for messages of which little travels: what a message lacked is its replica's momentum.

    .. math::
        e_i &\leftarrow \beta e_i + (a - s_i), \qquad q_i = \mathrm{C}(e_i), \qquad e_i \leftarrow e_i - q_i \\
        a &\leftarrow a - \eta \sum_j w_j q_j \\
        x_i &\leftarrow x_i + (a - s_i)

    :math:`a` is the anchor (the last agreed parameters), :math:`s_i` replica :math:`i`'s snapshot, and :math:`C` the
    strategy's ``compression``, by default ``TopK(0.02, bits=2)``. Between rounds replicas are at the anchor, but for
    what they have learned since the snapshot: what is yet to come is not in the parameters, but in :math:`e_i`, which
    is each replica's own, and in its checkpoints. One that joins, or whose residual is lost, begins with zeros. Without
    compression :math:`q_i = a - s_i` and :math:`e_i = 0`. A replica whose message had no weight keeps its
    :math:`e_i` as it is.

    Args:
        outer_lr: :math:`\eta`. Default: 1.0.
        decay: :math:`\beta`, of the residual from one round to the next. Default: 0.95.

    Raises:
        TypeError: an argument is no number.
        ValueError: ``outer_lr`` is not positive, or ``decay`` not in [0, 1].

    Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    https://arxiv.org/abs/2508.15706

    >>> rule = SparseLoCo(decay=0.5)
    >>> params = torch.tensor([1.0, 1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([0.0, 0.5])  # one replica, and where its local steps have moved it
    >>> _ = rule.message_(sent, state)
    >>> sent[1] = 0.0  # of [1.0, 0.5] the largest element travels
    >>> received = sent.clone()
    >>> state = rule.merge_(sent, received, state, Round(id=0, rank=0, work=(1.0,)))
    >>> sent, received, state.error
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
        # The residual changes in `merge_` only: a message that is abandoned has taken nothing from it.
        state.snapshot.copy_(out)
        torch.sub(state.anchor, out, out=out)
        out.add_(state.error)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: SparseLoCoState, round: Round) -> SparseLoCoState:
        anchor = state.anchor
        received.mul_(self.outer_lr)
        torch.sub(anchor, received, out=received)
        if sent is not None:
            if self.weights(round)[round.rank] > 0.0:  # else nothing of the message has travelled
                # By the operations of `message_`, in the anchor's room: without compression nothing is left, exactly.
                torch.sub(anchor.sub_(state.snapshot).add_(state.error), sent, out=state.error)
                state.error.mul_(self.decay)
            sent.copy_(state.snapshot)
        anchor.copy_(received)
        return state

    def state_dict(self, state: SparseLoCoState) -> dict[str, Any]:
        """Return anchor and residual by name; no message is under way where training goes on from them."""
        return {"anchor": state.anchor, "error": state.error}
