"""What an averaging rule must answer. No I/O, no threads, no clocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from lightning_async.flat import FlatLayout

__all__ = ["AllMean", "AveragingRule", "Round", "Topology"]

S = TypeVar("S")


class Topology:
    r"""How messages travel: replica :math:`i` receives :math:`\sum_j W_{ij} u_j` of the messages :math:`u_j`.

    One subclass per choice of weights :math:`W`. The engine refuses a rule with one that it cannot serve.
    """

    def row(self, round: Round) -> tuple[float, ...]:
        r""":math:`W_{i\cdot}`: the weight, for the replica ``round.rank``, of every replica's message."""
        raise NotImplementedError


@dataclass(frozen=True)
class AllMean(Topology):
    r"""Every replica receives the work-weighted mean of all replicas' messages.

    .. math:: W_{ij} = w_j = \frac{n_j}{\sum_k n_k}

    :math:`n_j` is replica :math:`j`'s work. Where nobody has any, the first that brings steps stands for all.

    >>> AllMean().row(Round(id=1, rank=0, work=(1.0, 3.0)))
    (0.25, 0.75)
    >>> AllMean().row(Round(id=1, rank=0, work=(0.0, 0.0), steps=(0.0, 2.0)))
    (0.0, 1.0)
    """

    def row(self, round: Round) -> tuple[float, ...]:
        total = sum(round.work)
        if total > 0.0:
            return tuple(work / total for work in round.work)
        owing = [rank for rank, steps in enumerate(round.steps) if steps > 0.0]
        return tuple(float(rank == (owing or [0])[0]) for rank in range(len(round.work)))


class Round(NamedTuple):
    """What every replica knows about one averaging round before its payload moves.

    Args:
        id: number of this round; committed rounds count up by one on all replicas.
        rank: this replica.
        work: every replica's work since its last round (samples, or steps); zero for one that is absent.
        steps: every replica's optimizer steps since its last round.
        scalars: what every replica's `AveragingRule.message_` returned.
        lr: every replica's inner learning rate; 0 where it is absent. Replicas may differ, so a rule that needs one
            must derive a common value.
        fragment: which part of the parameters this round carries.
    """

    id: int
    rank: int
    work: tuple[float, ...]
    steps: tuple[float, ...] = ()
    scalars: tuple[tuple[float, ...], ...] = ()
    lr: tuple[float, ...] = ()
    fragment: int = 0


@runtime_checkable
class AveragingRule(Protocol[S]):
    r"""How replicas become one model again: a value without state of its own.

    One round, seen from one replica. The engine packs the parameters into a flat fp32 bucket, the *snapshot*
    :math:`s`. `message_` turns it into the message :math:`u`. All replicas exchange messages, and
    :math:`\bar u = \sum_i w_i u_i` arrives, :math:`w_i` being replica :math:`i`'s share of the work. `merge_`
    turns :math:`\bar u` into the *target* :math:`t`, where this replica would stand had it done nothing
    meanwhile, and :math:`u` back into the snapshot. The engine then moves the parameters by displacement,
    :math:`x \leftarrow x + (t - s)`, so that progress made since the snapshot is kept; where there was none it
    copies :math:`t`. A replica that is absent (weight zero) moves from the last target to the new one.

    The state is a ``NamedTuple`` of flat fp32 tensors, equal on all replicas between rounds but for the fields in
    `per_replica`. A rule treats every element, or every tensor of the layout, alike: so it may be given a part of the
    parameters (a fragment) as if that were all, with a state for each part.

    Any class that has all of this will do. One that inherits it gets the defaults; `RuleBase` has more of them.
    """

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """How the messages travel."""
        ...

    num_scalars: int
    """How many scalars `message_` returns, to ride in the round's header."""
    overlappable: bool
    """Whether `merge_` may happen while local steps go on. False for rules that overwrite."""
    per_replica: frozenset[str]
    """Fields of the state that differ between replicas (what a compression still owes, the weight of push-sum)."""
    absent_follow: bool
    """Whether an absent replica moves with the target. False where replicas keep models of their own."""
    restores_local: bool
    """Whether a rendezvous only shows `agree`'s model: each replica then goes on from the parameters that it had.
    That costs an fp32 copy of them meanwhile. False: all go on from the agreed model."""
    mixes: bool
    """Whether `mix_` says what becomes of the progress since the snapshot, instead of keeping all of it. That costs
    an fp32 copy of the parameters during a merge."""

    sends_difference: bool
    """Whether messages are differences from what all replicas share: small, so that 8 bits per element hold them."""

    @abstractmethod
    def init(self, params: Tensor, layout: FlatLayout) -> S:
        """The state at a point where all replicas hold ``params`` (flat fp32; ``layout`` knows the shapes)."""
        ...

    @abstractmethod
    def message_(self, out: Tensor, state: S) -> tuple[float, ...]:
        """Turn the snapshot in ``out`` into this replica's message, in place; return scalars for the header."""
        ...

    @abstractmethod
    def merge_(self, sent: Tensor | None, received: Tensor, state: S, round: Round) -> S:
        """Turn ``received`` (the mean message) into the target and ``sent`` back into the snapshot, in place.

        ``sent`` is None on a replica that was absent, or whose parameters were not finite: that one takes over what is
        in ``received``. Returns the state after the round.
        """
        ...

    def abandon_(self, sent: Tensor, state: S) -> S:
        """This replica's message, in ``sent``, goes nowhere: no round will hold it.

        Returns the state, of which only the fields in `per_replica` may have changed. Default: nothing was noted of the
        message that would have to be undone.
        """
        return state

    def mix_(self, live: Tensor, base: Tensor, target: Tensor, state: S, round: Round) -> S:
        """Turn ``live``, the parameters now, into what they shall be, in place; called where `mixes`.

        ``base`` is the snapshot (of an absent replica, the last target) and may be used up; ``target`` stays. Not
        called where there was no progress: then the target is copied. Returns the state, of which only the fields in
        `per_replica` may have changed. Default: all progress is kept, ``live + (target - base)``.
        """
        live.sub_(base.sub_(target))
        return state

    def agree(self, mean: Tensor, state: S) -> Tensor:
        """The model a rendezvous shows, given the work-weighted ``mean`` of the parameters. Default: the mean."""
        return mean

    @abstractmethod
    def state_dict(self, state: S) -> dict[str, Any]:
        """The state as a plain dict of tensors and numbers, for a checkpoint."""
        ...

    @abstractmethod
    def load_state_dict(self, state: S, saved: dict[str, Any]) -> S:
        """``state`` with the content of ``saved``."""
        ...
