"""The steps by which a server applies a push, as the staleness policy asks for them.

    measure    how far the weights have moved since the worker pulled them, and the gradient's norm
    weigh      the policy gives the push a weight, or drops it
    correct    the policy changes the gradient, in a copy of each piece
    gather     add the push to a buffer, until the buffer has as many pushes as the policy wants
    cut        split the shard where parameters have no gradient, and where the optimizer's scalars differ
    step       take an optimizer step, which reads one of the two banks (copies of the arrays) and writes the other
               one, and leave out parameters without a gradient; then predict the weights that workers pull, if the
               policy wants it

`ShardUpdates` does all of them, on a shard's pieces.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.algorithms.staleness import PushFacts, StalenessPolicy, Weight
from lightning_async.ops.flat_ops import eager
from lightning_async.parameter_server.optimizers import (
    Bank,
    ScalarRuns,
    Scalars,
    ServerOptimizer,
    ServerRates,
    ShardSpan,
    joined_runs,
)
from lightning_async.parameter_server.partition import Spans
from lightning_async.parameter_server.shared_memory import WHOLE, piece_of

_accumulate_ = eager(ops.accumulate_)
AHEAD = "ahead"
BUFFER = "buffer"
MOMENTUM = "momentum"
PULLED = "pulled"

Pieces = Callable[[Callable[[slice], Any]], list[Any]]
"""A function that calls its argument with each piece of a shard; it returns the results, in no particular order."""


class Means(NamedTuple):
    """Running means of a shard.

    Args:
        step: Mean norm of an update: the distance by which it moves the weights.
        steps: Number of updates so far.
        lag: Mean lag of a push: the number of updates since the weights at which it was computed.
        pushes: Number of pushes so far.
    """

    step: float = 0.0
    steps: int = 0
    lag: float = 0.0
    pushes: int = 0

    def with_step(self, norm: float, decay: float) -> Means:
        """Return the running means, updated with the ``norm`` of one more update.

        The first updates have equal weights. Later, each new update multiplies the weights of earlier ones by
        ``decay``.
        """
        part = max(1 - decay, 1 / (self.steps + 1))
        return self._replace(step=self.step + (norm - self.step) * part, steps=self.steps + 1)

    def with_lag(self, lag: int, decay: float) -> Means:
        """Return the running means, updated with the ``lag`` of one more push.

        The first pushes have equal weights. Later, each new push multiplies the weights of earlier ones by ``decay``.
        """
        part = max(1 - decay, 1 / (self.pushes + 1))
        return self._replace(lag=self.lag + (lag - self.lag) * part, pushes=self.pushes + 1)


class StateBeforePush(NamedTuple):
    """The state of a shard before a push.

    Args:
        old: The arrays to read: the shard's valid bank, and the arrays that the shard keeps for this worker.
        new: The arrays to write: the other bank, and the second copy of the worker's arrays.
        runs: Scalars of the optimizer.
        means: Running means of the lag and of the norm of updates.
        gathered: Number of pushes in the buffer of pushes that are applied together.
    """

    old: Bank
    new: Bank
    runs: ScalarRuns
    means: Means
    gathered: int


@dataclass(frozen=True)
class ShardUpdates:
    """The steps by which a push is applied to one shard.

    Args:
        policy: Staleness policy.
        optimizer: Optimizer of the server.
        pieces: Function that calls a given function with each piece of the shard.
    """

    policy: StalenessPolicy
    optimizer: ServerOptimizer
    pieces: Pieces

    def is_finite(self, gradient: Tensor) -> bool:
        return all(self.pieces(lambda here: ops.all_finite(piece_of(gradient, here))))

    def weigh(self, before: StateBeforePush, gradient: Tensor, lag: int) -> Weight | None:
        """Return the weight of a push, or None if the push is dropped, because it is too late or not finite."""
        # Checked first, so that one bad push of a worker cannot spoil the shard.
        if not self.is_finite(gradient):
            return None
        measures = self.policy.measures
        old = before.old
        moved = norm = 0.0
        if "moved" in measures and lag:
            moved = _norm(
                self.pieces(lambda here: _square(piece_of(old["params"], here) - piece_of(old[PULLED], here)))
            )
        if "norm" in measures:
            norm = _norm(self.pieces(lambda here: _square(piece_of(gradient, here).float())))
        return self.policy.weigh(PushFacts(lag, moved, before.means.step, norm))

    def gather(self, before: StateBeforePush, gradient: Tensor, weight: Weight) -> None:
        """Add a push, with its weight, to the buffer of pushes that are applied together."""
        old = before.old
        new = before.new

        def add(here: slice) -> None:
            into = piece_of(new[BUFFER], here)
            # The old buffer stays as it is until the record is written.
            into.copy_(piece_of(old[BUFFER], here)) if before.gathered else into.zero_()
            _accumulate_(into, self._adjusted(before, gradient, here), weight.rate * weight.gradient)

        self.pieces(add)

    def step(
        self,
        before: StateBeforePush,
        gradient: Tensor,
        weight: Weight,
        lr: float | None,
        late: bool = True,
        reply: Tensor | None = None,
        skips: Spans = (),
    ) -> tuple[ScalarRuns, Means]:
        """Take an optimizer step: read the arrays ``before.old``, and write the arrays ``before.new``.

        Args:
            before: State before the push.
            gradient: Gradient in fp32, bf16 or fp16.
            weight: Weight of the push, see `weigh`.
            lr: Learning rate in place of the optimizer's own; None: the optimizer's own.
            late: Whether the gradient is one worker's push, to which the staleness policy applies. False: it is the
                mean of several workers' pushes. Default: True.
            reply: Memory to fill with the weights that workers pull. Default: None, the weights are not wanted.
            skips: Spans of parameters without a gradient, which the step leaves as they are. Default: none.

        Returns:
            The optimizer's new scalars, and the running means after this update.
        """
        policy = self.policy
        old = before.old
        new = before.new
        # In a buffer, each push has its own weight already.
        rates = ServerRates(lr) if policy.buffer_size > 1 else ServerRates(lr, weight.rate, weight.gradient)
        names = ("params", *self.optimizer.fields, *(own_arrays(policy) if late else ()))
        # This push is the last one of the buffer.
        count = before.gathered + 1
        whole = gradient.numel()
        cuts = _cut(before.runs, skips)
        stops = [cut.stop for cut in cuts]

        def step(here: slice) -> tuple[dict[int, Scalars], float]:
            piece = self._adjusted(before, gradient, here) if late else piece_of(gradient, here)
            if policy.buffer_size > 1 and late:
                mean = torch.zeros_like(piece_of(new["params"], here))
                if before.gathered:
                    _accumulate_(mean, piece_of(old[BUFFER], here), 1 / count)
                _accumulate_(mean, piece, weight.rate * weight.gradient / count)
                piece = mean
            was = _at(old, names, here)
            now = _at(new, names, here)
            shown = None if reply is None else piece_of(reply, here)
            scalars: dict[int, Scalars] = {}
            for number, part in _parts(stops, here):
                cut = cuts[number]
                pulled = None if policy.predicts or shown is None else piece_of(shown, part)
                span = ShardSpan(_at(was, names, part), _at(now, names, part), piece_of(piece, part), pulled, whole)
                if cut.skipped:
                    scalars[number] = self.optimizer.skip(span, cut.scalars)
                else:
                    scalars[number] = self.optimizer.step(span, dict(cut.scalars), rates)
                # Only one worker's gradient changes the policy's state.
                for name in policy.fields if cut.skipped or not late else ():
                    piece_of(piece_of(new[name], here), part).copy_(piece_of(piece_of(old[name], here), part))
            length = _square(now["params"] - was["params"]) if "moved" in policy.measures else 0.0
            # Workers of such a policy pull predicted weights, in place of the new ones.
            if policy.predicts:
                ahead = piece_of(new[AHEAD], here).copy_(was["params"])
                policy.look_ahead_(ahead, now["params"], before.means.lag)
                if shown is not None:
                    shown.copy_(ahead)
            return scalars, length

        done = self.pieces(step)
        means = before.means
        if "moved" in policy.measures:
            means = means.with_step(_norm([length for _, length in done]), policy.decay)
        scalars = {number: of_cut for of_piece, _ in done for number, of_cut in of_piece.items()}
        return joined_runs((cut.stop, scalars[number]) for number, cut in enumerate(cuts)) or before.runs, means

    def _adjusted(self, before: StateBeforePush, gradient: Tensor, here: slice) -> Tensor:
        policy = self.policy
        piece = piece_of(gradient, here)
        if not policy.adjusts:
            return piece
        # A copy: the worker repeats the push from the same memory if its server dies.
        own = piece.float() if piece.dtype != torch.float32 else piece.clone()
        moved = piece_of(before.old["params"], here) - piece_of(before.old[PULLED], here)
        state = {
            name: piece_of(before.new[name], here).copy_(piece_of(before.old[name], here)) for name in policy.fields
        }
        policy.adjust_(own, moved, state)
        return own


def shared_arrays(policy: StalenessPolicy, optimizer: ServerOptimizer) -> tuple[str, ...]:
    """Return the names of the arrays that this policy and this optimizer need, and that all workers share.

    Each of these arrays exists twice, so that one copy stays valid while an update writes the other one.
    """
    ahead = (AHEAD,) if policy.predicts else ()
    buffer = (BUFFER,) if policy.buffer_size > 1 else ()
    return ("params", *optimizer.fields, *policy.fields, *ahead, *buffer)


def own_arrays(policy: StalenessPolicy) -> tuple[str, ...]:
    """Return the names of the arrays that the policy keeps for each worker, and that updates change."""
    return (MOMENTUM,) if policy.momentum_by_worker else ()


def kept_arrays(policy: StalenessPolicy) -> tuple[str, ...]:
    """Return the names of the arrays in which the policy keeps the weights that each worker has pulled."""
    return (PULLED,) if policy.adjusts or "moved" in policy.measures else ()


class _Cut(NamedTuple):
    """A run of a shard's elements that are all stepped or all skipped, and have the same scalars."""

    stop: int
    scalars: Scalars
    skipped: bool


def _cut(runs: ScalarRuns, skips: Spans) -> list[_Cut]:
    """Split a shard at the ends of its runs of scalars, and at the ends of the spans that a step skips.

    >>> [(cut.stop, cut.skipped) for cut in _cut([(4, {}), (9, {"step": 1})], [(2, 5)])]
    [(2, False), (4, True), (5, True), (9, False)]
    """
    stops = [stop for stop, _ in runs]
    starts = [start for start, _ in skips]
    found = []
    for start, stop in pairwise(sorted({0, *stops, *starts, *(stop for _, stop in skips)})):
        number = bisect_right(starts, start) - 1
        found.append(_Cut(stop, runs[bisect_left(stops, stop)][1], number >= 0 and start < skips[number][1]))
    return found


def _parts(stops: Sequence[int], here: slice) -> Iterator[tuple[int, slice]]:
    """Yield the index of each cut that has elements in a piece of the shard, and the slice of the piece with them."""
    first, last, _ = here.indices(stops[-1] if stops else 0)
    at = first
    for number in range(bisect_right(stops, first), len(stops)):
        if at == last:
            return
        stop = min(last, stops[number])
        yield number, WHOLE if (at, stop) == (first, last) else slice(at - first, stop - first)
        at = stop


def _at(bank: Bank, names: tuple[str, ...], here: slice) -> Mapping[str, Tensor]:
    return {name: piece_of(bank[name], here) for name in names}


def _square(piece: Tensor) -> float:
    return torch.linalg.vector_norm(piece, dtype=torch.float64).item() ** 2


def _norm(squares: list[float]) -> float:
    """Return the norm, from the sum of squares of each piece. The result does not depend on the order of the pieces."""
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
