"""Rules that the package does not have yet, but that its interface must carry: the laws and the engine run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async.algorithms import AveragingRule, Round
from lightning_async.algorithms.averaging import RuleBase, copy_saved_
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


class CompressedState(NamedTuple):
    inner: Any
    carried_residual: Tensor
    """What compression has taken away so far; each replica's own."""
    taken: Tensor
    """What it took away from the message under way, net."""


@dataclass(frozen=True)
class Compressed(RuleBase[CompressedState]):
    """Another rule, its messages rounded to bfloat16 with error feedback; https://arxiv.org/abs/1901.09847."""

    inner: AveragingRule[Any]

    per_replica = frozenset({"carried_residual", "taken"})

    def init(self, params: Tensor, layout: FlatLayout) -> CompressedState:
        zeros = torch.zeros_like(params)
        return CompressedState(self.inner.init(params, layout), zeros, zeros.clone())

    def message_(self, out: Tensor, state: CompressedState) -> tuple[float, ...]:
        scalars = self.inner.message_(out, state.inner)
        wire = (out + state.carried_residual).bfloat16().float()
        torch.sub(out, wire, out=state.taken)
        state.carried_residual.add_(state.taken)
        out.copy_(wire)
        return scalars

    def merge_(self, sent: Tensor | None, received: Tensor, state: CompressedState, round: Round) -> CompressedState:
        if sent is not None:
            sent.add_(state.taken)
        return state._replace(inner=self.inner.merge_(sent, received, state.inner, round))

    def agree(self, mean: Tensor, state: CompressedState) -> Tensor:
        return self.inner.agree(mean, state.inner)

    def state_dict(self, state: CompressedState) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(state.inner),
            "carried_residual": state.carried_residual,
            "taken": state.taken,
        }

    def load_state_dict(self, state: CompressedState, saved: dict[str, Any]) -> CompressedState:
        own = {"carried_residual": state.carried_residual, "taken": state.taken}
        copy_saved_(self, own, {key: value for key, value in saved.items() if key != "inner"})
        return state._replace(inner=self.inner.load_state_dict(state.inner, saved["inner"]))
