"""Averaging rules: what replicas send, and what each replica makes of the mean message.

`AveragingRule` is the interface of a rule, without I/O, threads or clocks. `RuleBase` implements what most rules share,
so a new rule needs little more than its equations. With `Mean` and `DeltaMean`, replicas send their parameters. With
`EASGD`, each replica keeps a model of its own between sync points.
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
    """The facts of one averaging round that every replica knows before the messages are exchanged.

    Args:
        id: Number of this round, equal on all replicas; it grows by one with each committed round.
        rank: Rank of this replica.
        work: Work of each replica (samples or steps) since its last round of this fragment; 0 for an absent replica.
        steps: Optimizer steps of each replica since its last round of this fragment.
        scalars: Scalars that `AveragingRule.message_` has returned on each replica.
        lr: Inner learning rate of each replica, 0 if absent. The rates may differ; a rule must derive one common rate.
        fragment: Number of the part of the parameters that this round moves.
        past: Number of committed rounds of this fragment before this one.
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
        """Return whether this replica has no message in the round.

        >>> Round(id=1, rank=0, work=(0.0, 2.0), steps=(0.0, 1.0)).is_absent()
        True
        """
        return not (self.work[self.rank] or any(self.steps[self.rank : self.rank + 1]))


@runtime_checkable
class AveragingRule(Protocol[S]):
    r"""An interface for rules by which replicas average their models; the rule itself keeps no state.

    This is a round, seen from one replica. The engine packs the parameters into a flat fp32 bucket, the *snapshot*
    :math:`s`. `message_` turns the snapshot into the message :math:`u`, in the same memory. All replicas exchange
    messages, and each gets their mean :math:`\bar u = \sum_i w_i u_i` with the `weights` :math:`w_i`. `merge_` turns
    :math:`\bar u` into the *target* :math:`t`: the parameters that this replica would have if it had taken no step
    since the snapshot. `merge_` also turns :math:`u` back into the snapshot. Then the engine adds the change to the
    parameters, :math:`x \leftarrow x + (t - s)`, so the progress since the snapshot stays. Without progress it copies
    :math:`t`. An absent replica (one without work) adds the difference between the new target and the last one.

    The state of a rule is a ``NamedTuple`` of flat fp32 tensors. It is equal on all replicas between rounds, except
    for the fields in `per_replica`. If the parameters are split into fragments, which have rounds of their own, then
    each fragment has its own state. So a rule must treat all elements alike, or all tensors alike.

    Any class with these attributes and methods is a rule. A class that inherits from this class gets the defaults; a
    class that inherits from `RuleBase` gets more of them.
    """

    num_scalars: int = 0  # number of scalars that `message_` returns for the round's header
    overlappable: bool = True  # whether local steps may go on during a round; False for rules that overwrite parameters
    per_replica: frozenset[str] = frozenset()
    """The names of the state's fields that differ between replicas, such as a residual of compression."""
    absent_follow: bool = True
    """Whether an absent replica moves with the target. False if replicas keep models of their own between sync points;
    the rule's state is then initialised anew at each sync point, from the mean of all replicas."""
    mixes: bool = False
    """Whether `mix_` decides how much progress since the snapshot is kept, at the cost of a copy. If False, all
    progress is kept."""
    sends_difference: bool = False
    """Whether messages are differences from a model that all replicas share, small enough for 8 bits per element."""
    keeps_residual: bool = False
    """Whether the rule itself keeps the compression error of its messages, and turns ``sent`` back into the exact
    snapshot. If False, the error stays in the parameters."""

    @abstractmethod
    def init(self, params: Tensor, layout: FlatLayout) -> S:
        """Return the initial state for replicas that all have ``params`` (flat fp32; ``layout`` has the shapes)."""
        ...

    @abstractmethod
    def message_(self, out: Tensor, state: S) -> tuple[float, ...]:
        """Turn the snapshot in ``out`` into this replica's message, in place; return scalars for the round's header.

        A message may be dropped. Then this method is called again, for a new message. Therefore a rule must change its
        state in `merge_` only.
        """
        ...

    @abstractmethod
    def merge_(self, sent: Tensor | None, received: Tensor, state: S, round: Round) -> S:
        """Turn the mean message into the target, and this replica's message back into the snapshot, both in place.

        Args:
            sent: This replica's message, which becomes the snapshot again. None if the replica was absent from the
                round, or if its message was not finite.
            received: The mean message, which becomes the target.
            state: State of the rule.
            round: Facts of the round.

        Returns:
            The state after the round.
        """
        ...

    def weights(self, round: Round) -> tuple[float, ...]:
        r"""Return the weight of each replica's message; the weights add up to 1, and are equal on all replicas.

        This method is called before the messages are exchanged. The work, steps and scalars in ``round`` are known
        then; those of an absent replica are zero. Default: the shares of the work, :math:`w_i = n_i / \sum_j n_j`. If
        no replica has work, the first replica that has taken steps gets all the weight.

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
        """Turn the present parameters ``live`` into the merged ones, in place; called only if `mixes` is True.

        ``base`` is the snapshot; on a replica that was absent from the round, it is the last target. ``base`` may be
        overwritten; ``target`` must not be changed. If a replica has made no progress since the snapshot, the engine
        copies the target and does not call this method. Returns the state, of which only the fields in `per_replica`
        may change. Default: all progress is kept, ``live + (target - base)``.
        """
        live.sub_(base.sub_(target))
        return state

    def common_model(self, target: Tensor, state: S) -> Tensor:
        """Return the model that a checkpoint of a round holds, equal on all replicas. Default: the round's ``target``.

        At a sync point, all replicas have their work-weighted mean, whatever the rule.
        """
        return target

    def chosen(self, round: Round) -> dict[str, float]:
        """Return the settings that the rule derives from measurements for this round, by name. Default: none."""
        return {}

    @abstractmethod
    def state_dict(self, state: S) -> dict[str, Any]:
        """Return the state as a plain dict of tensors and numbers, for a checkpoint."""
        ...

    @abstractmethod
    def load_state_dict(self, state: S, saved: dict[str, Any]) -> S:
        """Return ``state`` with the values of ``saved``, which `state_dict` returned."""
        ...


RuleS = TypeVar("RuleS", bound=NamedTuple)


class AveragingState(NamedTuple):
    """The empty state of a rule that keeps nothing from one round to the next."""


class RuleBase(AveragingRule[RuleS], ABC):
    """A base of averaging rules whose state is a ``NamedTuple`` of flat tensors, without single numbers.

    A subclass defines `message_` and `merge_`, and `init` if it has any state.
    """

    saved_as: str = ""
    """The name of another rule with the same state, so that each of the two can load the other's checkpoints."""

    def init(self, params: Tensor, layout: FlatLayout) -> RuleS:
        return cast(RuleS, AveragingState())

    def state_dict(self, state: RuleS) -> dict[str, Any]:
        """Return the state's tensors by name, as references, not copies, as in torch."""
        return dict(state._asdict())

    def load_state_dict(self, state: RuleS, saved: dict[str, Any]) -> RuleS:
        """Copy ``saved`` into the fields that `state_dict` returns; raise ValueError if names or shapes do not fit."""
        named = self.state_dict(state)
        copy_saved_(self, {name: value for name, value in state._asdict().items() if name in named}, saved)
        return state


class RuleWrapper(RuleBase[Any]):
    """A base for rules that wrap another rule, ``rule``.

    The field ``inner`` of the wrapper's state is the state of the wrapped rule. A method that a subclass does not
    override calls the same method of the wrapped rule. A subclass must define `init`.
    """

    rule: AveragingRule

    def message_(self, out: Tensor, state: Any) -> tuple[float, ...]:
        return self.rule.message_(out, state.inner)

    def merge_(self, sent: Tensor | None, received: Tensor, state: Any, round: Round) -> Any:
        return state._replace(inner=self.rule.merge_(sent, received, state.inner, round))

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: Any, round: Round) -> Any:
        return state._replace(inner=self.rule.mix_(live, base, target, state.inner, round))

    def common_model(self, target: Tensor, state: Any) -> Tensor:
        return self.rule.common_model(target, state.inner)

    def state_dict(self, state: Any) -> dict[str, Any]:
        """Return the wrapped rule's state and the wrapper's own fields in one dict."""
        return {**self.rule.state_dict(state.inner), **_beside_inner(state)}

    def load_state_dict(self, state: Any, saved: dict[str, Any]) -> Any:
        own = _beside_inner(state)
        inner = self.rule.load_state_dict(state.inner, {k: v for k, v in saved.items() if k not in own})
        copy_saved_(self, own, {k: v for k, v in saved.items() if k in own})
        return state._replace(inner=inner)


for _name in (*AveragingRule.__annotations__, "weights", "chosen"):  # all attributes and methods that take no state
    setattr(RuleWrapper, _name, property(attrgetter(f"rule.{_name}")))


def _beside_inner(state: Any) -> dict[str, Tensor]:
    return {name: value for name, value in state._asdict().items() if name != "inner"}


def copy_saved_(rule: object, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    """Copy ``saved`` into ``tensors`` in place, after checking names and shapes; raise ValueError if they differ."""
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
    """A base of rules whose replicas send their parameters and then move to the mean of all messages."""

    def message_(self, out: Tensor, state: AveragingState) -> tuple[float, ...]:
        return ()

    def merge_(self, sent: Tensor | None, received: Tensor, state: AveragingState, round: Round) -> AveragingState:
        return state


@dataclass(frozen=True)
class Mean(_ParameterMean):
    r"""Local SGD: every replica waits for the round and takes the work-weighted mean of the parameters.

    .. math:: x_i \leftarrow \bar x = \sum_j w_j x_j

    No step is taken during a round; use `DeltaMean` to continue training while messages are in flight.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, https://arxiv.org/abs/1805.09767

    >>> rule = Mean()
    >>> received = torch.tensor([2.0])  # the mean message, which is the target
    >>> rule.merge_(torch.tensor([1.0]), received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    AveragingState()
    >>> received, rule.overlappable
    (tensor([2.]), False)
    """

    overlappable = False


@dataclass(frozen=True)
class DeltaMean(_ParameterMean):
    r"""Averaging that overlaps with training: a replica moves to the mean, and keeps the steps that it took meanwhile.

    .. math:: x_i \leftarrow x_i + (\bar s - s_i), \qquad \bar s = \sum_j w_j s_j

    :math:`s_i` is the snapshot that replica :math:`i` has sent, and :math:`w_j` is the share of replica :math:`j` in
    the round's work. Without a step since the snapshot, the result is the plain mean; with steps, the work-weighted
    mean of all replicas is conserved.

    Source: delayed parameter averaging with the delta rule, as in Bagua's asynchronous model averaging,
    https://github.com/BaguaSys/bagua, and in hivemind, https://github.com/learning-at-home/hivemind

    >>> rule, x, sent = DeltaMean(), torch.tensor([1.5]), torch.tensor([1.0])  # local steps have added 0.5 since
    >>> received = torch.tensor([2.0])  # the mean of both snapshots
    >>> _ = rule.merge_(sent, received, AveragingState(), Round(id=0, rank=0, work=(1.0, 1.0)))
    >>> x + (received - sent)  # the engine adds the change
    tensor([2.5000])
    """


class EASGDState(NamedTuple):
    """The state of `EASGD` between rounds: the center."""

    center: Tensor  # the common center, flat fp32, equal on all replicas


@dataclass(frozen=True)
class EASGD(RuleBase[EASGDState]):
    r"""Elastic averaging: between sync points replicas keep models of their own, each tied to a center by a spring.

    .. math::
        \alpha_i &= \beta\, \frac{n}{p}\, w_i \\
        x_i &\leftarrow x_i - \alpha_i (s_i - c) \\
        c &\leftarrow c + \sum_j \alpha_j (s_j - c)

    :math:`c` is the center, :math:`s_i` is the snapshot of replica :math:`i`, and :math:`n` of :math:`p` replicas take
    part in the round. :math:`w_i` is the share of replica :math:`i` in the round's work, and :math:`x_i` are its
    parameters. With equal work, :math:`\alpha_i = \beta / p`, as in the paper: the center moves towards the mean by
    the part :math:`\beta` of the distance. The sum of center and replicas is conserved, even with unequal work. At a
    sync point, as for every rule, all replicas become their work-weighted mean, so no step is lost; the center becomes
    the same model, and the springs are slack. A checkpoint between sync points holds the center, and each replica's
    own model.

    Args:
        beta: :math:`\beta`, the part of the distance to the replicas' mean that the center moves in a round of all
            replicas. Default: 0.9.

    Raises:
        TypeError: If ``beta`` is not a number.
        ValueError: If ``beta`` is not in (0, 1).

    Source: Zhang et al., "Deep learning with Elastic Averaging SGD", NeurIPS 2015, https://arxiv.org/abs/1412.6651

    >>> rule = EASGD(beta=0.5)
    >>> params = torch.tensor([1.0])
    >>> state = rule.init(params, FlatLayout([params]))
    >>> sent = torch.tensor([2.0])  # the other replica is still at 1.0
    >>> _ = rule.message_(sent, state)
    >>> received = torch.tensor([0.5])
    >>> state = rule.merge_(sent, received, state, Round(id=0, rank=0, work=(1.0, 1.0)))
    >>> sent, received, state.center
    (tensor([2.]), tensor([1.7500]), tensor([1.2500]))
    """

    beta: float = 0.9

    absent_follow = False
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
        state.center.add_(moved)  # the same operation as on an absent replica, so that all get the same bits
        before = torch.sub(state.center, moved, out=moved)
        torch.lerp(sent, before, pull * weights[round.rank], out=received)
        return state

    def common_model(self, target: Tensor, state: EASGDState) -> Tensor:
        return state.center
