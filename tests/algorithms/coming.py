"""A rule that the package does not have yet, but that its interface must carry: the laws and the engine run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_async.algorithms import Round
from lightning_async.algorithms.averaging import RuleBase
from lightning_async.flat import FlatLayout


class EagerState(NamedTuple):
    anchor: Tensor
    hidden: Tensor
    """Progress that the parameters do not show: the next message reports it, as all of it was made."""


@dataclass(frozen=True)
class Eager(RuleBase[EagerState]):
    """An outer step that takes the replica's own fresh progress at once, at the weight that it will have in the mean.

    Eager updates, https://arxiv.org/abs/2502.12996, as displacement: of the progress since the snapshot, the
    parameters keep what the next outer step will.
    """

    outer_lr: float = 0.5

    sends_difference = True
    per_replica = frozenset({"hidden"})
    mixes = True

    def init(self, params: Tensor, layout: FlatLayout) -> EagerState:
        return EagerState(params.detach().clone(), torch.zeros_like(params))

    def message_(self, out: Tensor, state: EagerState) -> tuple[float, ...]:
        torch.sub(state.anchor, out, out=out).sub_(state.hidden)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: EagerState, round: Round) -> EagerState:
        if sent is not None:
            torch.sub(state.anchor, sent, out=sent).sub_(state.hidden)
            state.hidden.zero_()
        state.anchor.sub_(received, alpha=self.outer_lr)
        received.copy_(state.anchor)
        return state

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: EagerState, round: Round) -> EagerState:
        share = round.work[round.rank] / sum(round.work)
        if not share:
            return super().mix_(live, base, target, state, round)
        fresh = live.sub_(base)
        state.hidden.copy_(fresh).mul_(1 - self.outer_lr * share)
        live.mul_(self.outer_lr * share).add_(target)
        return state
