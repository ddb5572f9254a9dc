"""Accumulation of gradients in windows of any length, weighted by samples.

Lightning accumulates over multiples of a number of batches, counted from the start of an epoch. If that number changes
within the epoch, an optimizer step comes too late, or uses gradients twice. Lightning also divides the loss by that
number in an epoch's last window, which may be shorter. Here a window begins when the last one has ended, and ends when
it is full.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async.trainer.namespace import Undo, override, searches_lr, set_for_now
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


class OomMicrobatches:
    """The splitting of batches into pieces, after memory was too small for a whole batch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.most: int | None = None
        """Largest number of rows in a piece; None for whole batches."""

    def run(
        self,
        batch: Any,
        train: Callable[[Any], Any],
        spoilt: Callable[[], bool],
        begin_again: Callable[[], None],
    ) -> list[tuple[int, Any]]:
        """Train on a batch, in pieces if necessary; return for each piece its number of rows and its result.

        Args:
            batch: The batch, on its device.
            train: Function that runs the forward and backward pass of a piece, and returns the result.
            spoilt: Function that returns whether a backward pass was interrupted, which may have added a part of a
                gradient.
            begin_again: Function that resets the gradients, before all pieces of the batch are repeated.

        Raises:
            torch.OutOfMemoryError: There is no memory for a single row, or the batch cannot be cut.
        """
        rows = rows_of(batch)
        # The batch cannot be cut, so an error of memory goes to the user.
        if rows is None:
            return [(1, train(batch))]
        ends = self._cuts(0, rows)
        done = []
        while ends:
            begin, end = ends[0]
            result, error = self._try(batch if (begin, end) == (0, rows) else cut(batch, rows, begin, end), train)
            if error is None:
                done.append((end - begin, result))
                ends = ends[1:]
                continue
            # A single row does not fit, and there are no smaller pieces.
            if end - begin == 1:
                raise error
            self.most = (end - begin + 1) // 2
            log.warning(
                "Rank %d: there was not enough memory for %d of the %d samples of a batch: it is trained on in pieces "
                "of at most %d from here on.", self._rank, end - begin, rows, self.most,
            )  # fmt: skip
            # The interrupted pass may have added a part of its gradient, so all gradients of the window are invalid.
            if spoilt():
                begin_again()
                begin = 0
                done = []
            ends = self._cuts(begin, rows)
        return done

    def _cuts(self, begin: int, rows: int) -> list[tuple[int, int]]:
        most = self.most or rows
        return [(first, min(first + most, rows)) for first in range(begin, rows, most)]

    def _try(self, batch: Any, train: Callable[[Any], Any]) -> tuple[Any, Exception | None]:
        """Return the result, or the error without its traceback, because the traceback keeps tensors in memory."""
        try:
            return train(batch), None
        except torch.OutOfMemoryError as error:
            # The traceback refers to the tensors of the failed attempt, whose memory is needed now.
            found = error.with_traceback(None)
            found.__context__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None, found


def rows_of(batch: Any) -> int | None:
    """Return the length that all tensors of a batch have in their first dimension; None if they differ.

    >>> rows_of({"x": torch.zeros(3, 2), "y": [torch.zeros(3)], "name": "a"}), rows_of([torch.zeros(3), torch.zeros(2)])
    (3, None)
    """
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in _tensors(batch)}
    return lengths.pop() if len(lengths) == 1 and 0 not in lengths else None


def cut(batch: Any, rows: int, begin: int, end: int) -> Any:
    """Return rows ``begin`` to ``end`` of a batch that has ``rows`` rows.

    Values that are no tensor or sequence of this length stay as they are.

    >>> cut({"x": torch.arange(3), "names": ["a", "b", "c"], "mode": "train"}, 3, 1, 3)
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'mode': 'train'}
    """
    if isinstance(batch, Tensor):
        return batch[begin:end]
    if isinstance(batch, Mapping):
        return type(batch)({name: cut(value, rows, begin, end) for name, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        if len(batch) == rows and not any(True for _ in _tensors(batch)):
            return batch[begin:end]
        values = [cut(value, rows, begin, end) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)  # type: ignore[arg-type]
    return batch


def _tensors(batch: Any) -> Sequence[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


class WindowPlan(NamedTuple):
    """The planned size of an accumulation window. ``batches`` is its number of batches."""

    batches: int
    samples: float
    """Number of samples in all batches of the window; equal on ranks that step together."""
    by_samples: bool = False
    """Whether the window ends at this number of samples, whatever its number of batches."""


class AccumulationWindows:
    r"""The windows of one fit, for automatic optimization.

    .. math:: g = \frac{\sum_j n_j g_j}{\sum_j n_j}

    :math:`g_j` is the gradient of a batch of :math:`n_j` samples. If ranks step together, the sums are over the batches
    of all ranks. The result is bit-equal with Lightning's if all batches of a window have equally many samples and the
    window is full.

    Args:
        trainer: The Trainer, whose loops are patched.
        plan: Returns the plan of a window that begins, given the number of samples in its first batch.
        mean: Returns the mean of a number over the ranks that step together.
        count: Returns the number of samples in a batch.
    """

    def __init__(
        self,
        trainer: Any,
        plan: Callable[[float], WindowPlan],
        mean: Callable[[float], float],
        count: Callable[[Any], float],
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._mean = mean
        self._given = count
        self.pieces: OomMicrobatches | None = None
        """Trains on batches in pieces if memory is too small; None to train on whole batches only."""
        self.whole = True
        """Whether no batch of this window was cut into pieces."""
        self.before_backward: Callable[[float], None] = lambda scale: None
        """Function that is called with the factor of the gradient of this batch's mean loss."""
        self.after_backward: Callable[[bool], None] = lambda ends: None
        """Function that is called after a backward pass, with whether the optimizer steps now."""
        self.planned = WindowPlan(1, 1.0)
        self.is_open = False
        """Whether a window has begun and not ended."""
        self.batches = 0
        """Number of batches in this window, including the one under way."""
        self.samples = 0.0
        """Number of samples in this window's gradients; for a full one, the mean over the ranks that step together."""
        self._seen = self._now = self._before = 0.0
        self._spoilt = False
        """Whether a backward pass has begun and not ended."""
        self._ends_at = -1
        """The number of the batch that completes this window, counted over training; -1 for a later batch."""

    def install(self) -> list[Undo]:
        epoch = self._trainer.fit_loop.epoch_loop
        return [
            set_for_now(self._trainer, "accumulate_grad_batches", self._trainer.accumulate_grad_batches),
            override(epoch, "_accumulated_batches_reached", self._reached),
            override(epoch.automatic_optimization, "_make_closure", self._make_closure),
        ]

    @property
    def away(self) -> bool:
        """Whether the loop runs for something other than training.

        This is a search for a batch size or a learning rate, or an epoch without steps that computes BatchNorm's
        statistics.
        """
        trainer = self._trainer
        # A search for a batch size removes all callbacks.
        sizes = not trainer.callbacks
        return trainer.fit_loop._skip_backward or sizes or searches_lr(trainer)

    @property
    def ends(self) -> bool:
        """Whether the batch under way, or the last one if none is, completes a window."""
        return not self._trainer.fit_loop._should_accumulate()

    def _count(self, batch: Any) -> float:
        counted = float(self._given(batch))
        if not 0.0 <= counted < math.inf:
            raise ValueError(
                f"Rank {self._trainer.global_rank}: `count` said {counted!r} of a batch: it must be finite, and >= 0."
            )
        return counted

    def show(self) -> None:
        """Set the Trainer's number of accumulated batches, by which Lightning divides losses."""
        self._trainer.accumulate_grad_batches = self.planned.batches

    def begin_batch(self, batch: Any) -> None:
        """Count ``batch`` into the open window; begin a window first if none is open."""
        if self.away:
            return
        samples = self._count(batch)
        # The window's gradients may have been dropped: by a resume without them, or by a remedy for divergence.
        if not self.is_open or next(gradients_of(self._trainer.optimizers), None) is None:
            self.planned = self._plan(samples)
            self.batches = 0
            self.samples = 0.0
            self._seen = 0.0
            self._before = 0.0
            self.is_open = self.whole = True
        self.show()
        self.batches += 1
        self._seen = self._seen + samples
        self._now = samples
        self._before = self.samples
        if self.planned.by_samples:
            full = self._seen >= self.planned.samples
        else:
            full = self.batches >= self.planned.batches
        self._ends_at = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready if full else -1

    def end_batch(self) -> bool:
        """End a batch; return whether it has completed a window."""
        if self.away or not self.is_open or not self.ends:
            return False
        self.is_open = False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the window under way as plain values."""
        return {
            "planned": list(self.planned), "is_open": self.is_open, "batches": self.batches, "samples": self.samples,
            "seen": self._seen, "ends_at": self._ends_at, "whole": self.whole,
            "most": None if self.pieces is None else self.pieces.most,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.planned = WindowPlan(*state["planned"])
        self.is_open = state["is_open"]
        self.batches = state["batches"]
        self.samples = state["samples"]
        self._seen = state["seen"]
        self._ends_at = state["ends_at"]
        self.whole = state["whole"]
        if self.pieces is not None:
            self.pieces.most = state["most"]

    def _reached(self, original: Any) -> bool:
        if self.away:
            return original()
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._ends_at

    def _make_closure(self, original: Any, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure = original(kwargs, optimizer, batch_idx)
        if self.away:
            return closure
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization

        def zero_grad() -> None:
            automatic._on_before_zero_grad(optimizer)
            automatic._optimizer_zero_grad(batch_idx, optimizer)

        # Lightning zeroes by its own count of batches, which starts with the epoch and not with the window.
        closure._zero_grad_fn = zero_grad if self.batches == 1 else None
        closure._backward_fn = partial(self._backward, closure._backward_fn)
        whole = closure.closure
        if self.pieces is not None and "batch" in kwargs:
            whole = partial(self._in_pieces, closure, whole, kwargs, self.pieces, zero_grad)
        closure.closure = partial(self._complete, whole)
        return closure

    def _backward(self, backward: Any, loss: Any) -> None:
        strategy = self._trainer.strategy
        given = view_of(strategy).weight
        # `HorovodStrategy` weights by this rank's share of the step's samples, which are counted here anyway.
        if given != 1.0:
            self._now = self._now if given else 0.0
            strategy.weight = 1.0
        weight = self._now * self.planned.batches / self.planned.samples
        # Lightning has divided the loss by the number of batches.
        self.before_backward(weight / self.planned.batches)
        self._spoilt = True
        backward(loss if weight == 1.0 else loss * weight)
        self._spoilt = False
        self.samples = self._before + self._now

    def _in_pieces(
        self, closure: Any, whole: Any, inputs: Any, pieces: OomMicrobatches, zero_grad: Callable[[], None],
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        batch = inputs["batch"]
        samples = self._now
        earlier = self._before
        self._spoilt = False

        def train(piece: Any) -> Any:
            self._now = samples if piece is batch else self._count(piece)
            self.whole &= piece is batch
            inputs["batch"] = piece
            result = whole(*args, **kwargs)
            self._before = self.samples
            # Only the first piece may zero gradients, or it would drop those of the pieces before.
            closure._zero_grad_fn = None
            return result

        def begin_again() -> None:
            if earlier:
                log.warning(
                    "Rank %d: the gradients of %g samples that came before in this window are lost with it.",
                    self._trainer.global_rank, earlier,
                )  # fmt: skip
            zero_grad()
            self._before = 0.0
            self._spoilt = False
            closure._zero_grad_fn = None

        try:
            done = pieces.run(batch, train, lambda: self._spoilt, begin_again)
        finally:
            inputs["batch"] = batch
            self._now = samples
        result = done[-1][1]
        if len(done) > 1 and all(each.loss is not None for _, each in done):
            result.loss = sum(rows * each.loss for rows, each in done) / sum(rows for rows, _ in done)
        return result

    # With ranks that step together, the mean of the samples is a collective, once for each window.
    def _complete(self, closure: Any, *args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        if self.ends:
            self.samples = self._mean(self.samples)
            factor = self.planned.samples / self.samples if self.samples else 1.0
            if factor != 1.0 and math.isfinite(factor):
                with torch.no_grad():
                    for gradient in gradients_of(self._trainer.optimizers):
                        gradient.mul_(factor)
        self.after_backward(self.ends)
        return result


def gradients_of(optimizers: Any) -> Iterator[torch.Tensor]:
    """Yield all gradients that exist, of the parameters of all optimizers."""
    params = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return (p.grad for p in params if p.grad is not None)
