"""Averaging rules: what replicas send, and what the mean of all messages means.

`AveragingRule` is what a rule must answer, without I/O, threads or clocks; `RuleBase` is what most rules share, so that
a rule is little more than its equations. The messages of `Mean` and `DeltaMean` are the parameters themselves; with
`EASGD` replicas keep models of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from lightning_async._checks import check_real
from lightning_async.flat import FlatLayout

S = TypeVar("S")


class Round(NamedTuple):
    """The facts of one averaging round that every replica knows before its payload moves.

    Args:
        id: number of this round; committed rounds count up by one on all replicas.
        rank: this replica.
        work: every replica's work since its last round of this fragment (samples, or steps); zero for an absent one.
        steps: every replica's optimizer steps since its last round of this fragment.
        scalars: every replica's, from `AveragingRule.message_`.
        lr: every replica's inner learning rate, 0 if absent; a rule must derive a common one.
        fragment: number of the part of the parameters in this round.
        past: rounds of this fragment that were committed before this one.
    """

    id: int
    rank: int
    work: tuple[float, ...]
    steps: tuple[float, ...] = ()
    scalars: tuple[tuple[float, ...], ...] = ()
    lr: tuple[float, ...] = ()
    fragment: int = 0
    past: int = 0

    def is_absent(self) -> bool:
        """Return whether no message of this replica is in the round.

        >>> Round(id=1, rank=0, work=(0.0, 2.0), steps=(0.0, 1.0)).is_absent()
        True
        """
        return not (self.work[self.rank] or any(self.steps[self.rank : self.rank + 1]))


@runtime_checkable
class AveragingRule(Protocol[S]):
    r"""The way in which replicas become one model again: a value without state of its own.

    One round, seen from one replica. The engine packs the parameters into a flat fp32 bucket, the *snapshot* :math:`s`.
    `message_` turns it into the message :math:`u`. All replicas exchange messages, and :math:`\bar u = \sum_i w_i u_i`
    arrives, with the `weights` :math:`w_i`. `merge_` turns :math:`\bar u` into the *target* :math:`t`, where this
    replica would stand had it done nothing meanwhile, and :math:`u` back into the snapshot. The engine then moves the
    parameters by displacement, :math:`x \leftarrow x + (t - s)`, so that progress made since the snapshot is kept;
    where there was none it copies :math:`t`. A replica that is absent (it has no work) moves from the last target to
    the new one.

    The state is a ``NamedTuple`` of flat fp32 tensors, equal on all replicas between rounds but for the fields in
    `per_replica`. A rule treats every element, or every tensor of the layout, alike: a part of the parameters (a
    fragment) has a state of its own.

    Any class that has all of this will do. One that inherits it gets the defaults; `RuleBase` has more of them.
    """

    num_scalars: int = 0  # how many scalars `message_` returns, to ride in the round's header
    overlappable: bool = True  # whether `merge_` may happen while local steps go on. False for rules that overwrite.
    per_replica: frozenset[str] = frozenset()
    """Fields of the state that differ between replicas (the residual of a compression, the weight of push-sum)."""
    absent_follow: bool = True
    """Whether an absent replica moves with the target. False where replicas keep models of their own."""
    restores_local: bool = False
    """Whether a sync point only shows `agree`'s model, and each replica goes on from a copy of its own."""
    mixes: bool = False
    """Whether `mix_` decides on the progress since the snapshot, at the cost of a copy; else all of it is kept."""
    sends_difference: bool = False
    """Whether messages are differences from what all replicas share: small, so that 8 bits per element hold them."""
    keeps_residual: bool = False
    """Whether what compression takes from a message, so that ``sent`` lacks it, stays with the rule, whose ``sent`` is
    the snapshot again in any case; else it stays in the parameters."""

    @abstractmethod
    def init(self, params: Tensor, layout: FlatLayout) -> S:
        """Return the state where all replicas hold ``params`` (flat fp32; ``layout`` knows the shapes)."""
        ...

    @abstractmethod
    def message_(self, out: Tensor, state: S) -> tuple[float, ...]:
        """Turn the snapshot in ``out`` into this replica's message, in place; return scalars for the header.

        A message may be dropped, and made anew: what the rule learns from it, it learns in `merge_`.
        """
        ...

    @abstractmethod
    def merge_(self, sent: Tensor | None, received: Tensor, state: S, round: Round) -> S:
        """Turn ``received`` (the mean message) into the target and ``sent`` back into the snapshot, in place.

        ``sent`` is None on a replica that was absent, or not finite: that one takes over ``received``. Returns the
        state after the round.
        """
        ...

    def weights(self, round: Round) -> tuple[float, ...]:
        r"""Return the weight of every replica's message; they add up to 1, and are the same on every replica.

        Asked before the payload moves: of ``round`` work, steps and scalars are known, and of an absent replica none.
        Default: the shares of the work, :math:`w_i = n_i / \sum_j n_j`. Where nobody has any, the first replica that
        brings steps stands for all.

        >>> DeltaMean().weights(Round(id=1, rank=0, work=(1.0, 3.0)))
        (0.25, 0.75)
        >>> DeltaMean().weights(Round(id=1, rank=0, work=(0.0, 0.0), steps=(0.0, 2.0)))
        (0.0, 1.0)
        """
        total = sum(round.work)
        if total > 0.0:
            return tuple(work / total for work in round.work)
        owing = [rank for rank, steps in enumerate(round.steps) if steps > 0.0]
        return tuple(float(rank == (owing or [0])[0]) for rank in range(len(round.work)))

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: S, round: Round) -> S:
        """Turn ``live``, the parameters now, into what they shall be, in place; called where `mixes`.

        ``base`` is the snapshot (of an absent replica, the last target) and may be used up; ``target`` stays. Not
        called where there was no progress: then the target is copied. Returns the state, of which only the fields in
        `per_replica` may change. Default: all progress is kept, ``live + (target - base)``.
        """
        live.sub_(base.sub_(target))
        return state

    def agree(self, mean: Tensor, state: S) -> Tensor:
        """Return the model of a sync point, by the work-weighted ``mean`` of the parameters. Default: the mean."""
        return mean

    def chosen(self, round: Round) -> dict[str, float]:
        """Return the numbers that the rule has chosen by itself for a round, by name. Default: none."""
        return {}

    @abstractmethod
    def state_dict(self, state: S) -> dict[str, Any]:
        """Return the state as a plain dict of tensors and numbers, for a checkpoint."""
        ...

    @abstractmethod
    def load_state_dict(self, state: S, saved: dict[str, Any]) -> S:
        """Return ``state`` with the content of ``saved``."""
        ...


RuleS = TypeVar("RuleS", bound=NamedTuple)


class AveragingState(NamedTuple):
    """The memory of a rule that has none between rounds."""


class RuleBase(AveragingRule[RuleS], ABC):
    """An averaging rule without scalars, whose state is a ``NamedTuple`` of flat tensors.

    A rule states `message_` and `merge_`; `init` too, where it remembers anything.
    """

    saved_as: str = ""
    """The name of another rule, whose state in checkpoints is this one's, too: each goes on from the other's."""

    def init(self, params: Tensor, layout: FlatLayout) -> RuleS:
        return cast(RuleS, AveragingState())

    def state_dict(self, state: RuleS) -> dict[str, Any]:
        """Return the state's tensors by name; references, not copies, as in torch."""
        return dict(state._asdict())

    def load_state_dict(self, state: RuleS, saved: dict[str, Any]) -> RuleS:
        """Overwrite in place the fields that `state_dict` names; raise ValueError where ``saved`` does not fit."""
        named = self.state_dict(state)
        copy_saved_(self, {name: value for name, value in state._asdict().items() if name in named}, saved)
        return state


class RuleWrapper(RuleBase[Any]):
    """A rule around another one, its ``rule``, whose state is the field ``inner`` of its own.

    It answers as that rule does where it does not say otherwise. A wrapper states `init`.
    """

    rule: AveragingRule

    def message_(self, out: Tensor, state: Any) -> tuple[float, ...]:
        return self.rule.message_(out, state.inner)

    def merge_(self, sent: Tensor | None, received: Tensor, state: Any, round: Round) -> Any:
        return state._replace(inner=self.rule.merge_(sent, received, state.inner, round))

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: Any, round: Round) -> Any:
        return state._replace(inner=self.rule.mix_(live, base, target, state.inner, round))

    def agree(self, mean: Tensor, state: Any) -> Tensor:
        return self.rule.agree(mean, state.inner)

    def state_dict(self, state: Any) -> dict[str, Any]:
        """Return the rule's state, and the wrapper's beside it."""
        return {**self.rule.state_dict(state.inner), **_beside_inner(state)}

    def load_state_dict(self, state: Any, saved: dict[str, Any]) -> Any:
        own = _beside_inner(state)
        inner = self.rule.load_state_dict(state.inner, {k: v for k, v in saved.items() if k not in own})
        copy_saved_(self, own, {k: v for k, v in saved.items() if k in own})
        return state._replace(inner=inner)


for _name in (*AveragingRule.__annotations__, "weights", "chosen"):  # all that knows no state
    setattr(RuleWrapper, _name, property(attrgetter(f"rule.{_name}")))


def _beside_inner(state: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state._asdict().items() if name != "inner"}


def copy_saved_(rule: object, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Copy ``saved`` into ``tensors`` in place, after a check that all of it fits."""
    name = type(rule).__name__
    if set(saved) != set(tensors):
        raise ValueError(f"The saved state of `{name}` holds {sorted(saved)}, this one {sorted(tensors)}.")
    for key, tensor in tensors.items():
        if saved[key].shape != tensor.shape:
            raise ValueError(
                f"The saved state of `{name}` has {tuple(saved[key].shape)} as the shape of {key}, "
                f"this model {tuple(tensor.shape)}."
            )
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(saved[key])


class _ParameterMean(RuleBase[AveragingState]):
    """A rule whose message is the snapshot, and whose target is the mean message."""

    def message_(self, out: Tensor, state: AveragingState) -> tuple[float, ...]:
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: AveragingState, round: Round) -> AveragingState:
        return state


@dataclass(frozen=True)
class Mean(_ParameterMean):
    r"""Local SGD: every replica waits for the round and takes the work-weighted mean of the parameters.

    .. math:: x_i \leftarrow \bar x = \sum_j w_j x_j

    A round stands between two steps; use `DeltaMean` to go on training while it travels.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, https://arxiv.org/abs/1805.09767

    >>> rule = Mean()
    >>> received = torch.tensor([2.0])
    >>> rule.merge_(torch.tensor([1.0]), received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    AveragingState()
    >>> received, rule.overlappable
    (tensor([2.]), False)
    """

    overlappable = False


@dataclass(frozen=True)
class DeltaMean(_ParameterMean):
    r"""Averaging that overlaps with training: parameters move by what the others did, and keep their own progress.

    .. math:: x_i \leftarrow x_i + (\bar s - s_i), \qquad \bar s = \sum_j w_j s_j

    :math:`s_i` is the snapshot that replica :math:`i` sent. With no step since the snapshot this is the plain
    mean; with steps it conserves the work-weighted mean of the replicas.

    Source: delayed parameter averaging with the delta rule, as in Bagua's asynchronous model averaging,
    https://github.com/BaguaSys/bagua, and in hivemind, https://github.com/learning-at-home/hivemind

    >>> rule, x, sent = DeltaMean(), torch.tensor([1.5]), torch.tensor([1.0])  # 0.5 was learned meanwhile
    >>> received = torch.tensor([2.0])
    >>> _ = rule.merge_(sent, received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    >>> x + (received - sent)
    tensor([2.5000])
    """


class EASGDState(NamedTuple):
    """The memory of elastic averaging between rounds."""

    center: Tensor  # equal on all replicas, flat fp32


@dataclass(frozen=True)
class EASGD(RuleBase[EASGDState]):
    r"""Elastic averaging: replicas keep models of their own, and each is tied to a common center by a spring.

    .. math::
        \alpha_i &= \beta\, \frac{n}{p}\, w_i \\
        x_i &\leftarrow x_i - \alpha_i (s_i - c) \\
        c &\leftarrow c + \sum_j \alpha_j (s_j - c)

    :math:`c` is the center, :math:`s_i` replica :math:`i`'s snapshot, :math:`n` of :math:`p` replicas are in the round.
    With equal work :math:`\alpha_i = \beta / p`, as in the paper: the center moves to the mean by :math:`\beta`. What
    the center gains the replicas lose, however unequal their work is. Sync points, and with them validations and
    checkpoints, show the center; training goes on from each replica's own model, which a checkpoint holds beside it.

    Args:
        beta: :math:`\beta`, the part of its way to the replicas' mean that the center goes in a round of all. Default:
            0.9.

    Raises:
        TypeError: ``beta`` is not a number.
        ValueError: ``beta`` is not in (0, 1).

    Source: Zhang et al., "Deep learning with Elastic Averaging SGD", NeurIPS 2015, https://arxiv.org/abs/1412.6651

    >>> rule = EASGD(beta=0.5)
    >>> params = torch.tensor([1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([2.0])  # the other replica stands at 1.0 still
    >>> _ = rule.message_(sent, state)
    >>> received = torch.tensor([0.5])
    >>> state = rule.merge_(sent, received, state, Round(id=0, rank=0, work=(1.0, 1.0)))
    >>> sent, received, state.center
    (tensor([2.]), tensor([1.7500]), tensor([1.2500]))
    """

    beta: float = 0.9

    absent_follow = False
    restores_local = True
    sends_difference = True

    def __post_init__(self) -> None:
        check_real(self, "beta", above=0, below=1)

    def init(self, params: Tensor, layout: FlatLayout) -> EASGDState:
        return EASGDState(params.detach().clone())

    def message_(self, out: Tensor, state: EASGDState) -> tuple[float, ...]:
        out.sub_(state.center)
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: EASGDState, round: Round) -> EASGDState:
        weights = self.weights(round)
        pull = self.beta * sum(weight > 0.0 for weight in weights) / len(weights)
        moved = received.mul_(pull)
        if sent is None:
            state.center.add_(moved)
            received.copy_(state.center)
            return state
        sent.add_(state.center)
        state.center.add_(moved)  # the same operations as above: it is the same to the bit everywhere
        before = torch.sub(state.center, moved, out=moved)
        torch.lerp(sent, before, pull * weights[round.rank], out=received)
        return state

    def agree(self, mean: Tensor, state: EASGDState) -> Tensor:
        return state.center
