"""A batch for which there is not enough memory is trained on in pieces, as a part of the same window."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pieces", "cut", "rows_of"]

log = logging.getLogger(__name__)


class Pieces:
    """Runs a batch, whole as long as there is memory for it; from the first time on that there is not, in pieces.

    Args:
        rank: for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.most: int | None = None
        """Rows in a piece; None: as many as there are."""

    def run(
        self,
        batch: Any,
        train: Callable[[Any], Any],
        spoilt: Callable[[], bool],
        begin_again: Callable[[], None],
    ) -> list[tuple[int, Any]]:
        """Of each piece, its rows and what ``train`` made of it.

        Args:
            batch: on its device.
            train: forward and backward of a piece.
            spoilt: whether a backward pass has begun in vain, which may have added a part of a gradient.
            begin_again: gradients are made none; all pieces of the batch come again.

        Raises:
            torch.OutOfMemoryError: there is no memory for a single row, or the batch is of a kind that cannot be cut.
        """
        rows = rows_of(batch)
        if rows is None:
            return [(1, train(batch))]
        ends, done = self._cuts(0, rows), []
        while ends:
            begin, end = ends[0]
            result, error = self._try(batch if (begin, end) == (0, rows) else cut(batch, rows, begin, end), train)
            if error is None:
                done.append((end - begin, result))
                ends = ends[1:]
                continue
            if end - begin == 1:
                raise error
            self.most = (end - begin + 1) // 2
            log.warning(
                "Rank %d: there was not enough memory for %d of the %d samples of a batch: it is trained on in pieces "
                "of at most %d from here on.", self._rank, end - begin, rows, self.most,
            )  # fmt: skip
            if spoilt():
                begin_again()
                begin, done = 0, []
            ends = self._cuts(begin, rows)
        return done

    def _cuts(self, begin: int, rows: int) -> list[tuple[int, int]]:
        most = self.most or rows
        return [(first, min(first + most, rows)) for first in range(begin, rows, most)]

    def _try(self, batch: Any, train: Callable[[Any], Any]) -> tuple[Any, Exception | None]:
        """The error without its places, which hold what the memory is full of."""
        try:
            return train(batch), None
        except torch.OutOfMemoryError as error:
            found = error.with_traceback(None)
            found.__context__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None, found


def rows_of(batch: Any) -> int | None:
    """The common length of all tensors of a batch along their first dimension; None where there is none.

    >>> rows_of({"x": torch.zeros(3, 2), "y": [torch.zeros(3)], "name": "a"}), rows_of([torch.zeros(3), torch.zeros(2)])
    (3, None)
    """
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in _tensors(batch)}
    return lengths.pop() if len(lengths) == 1 and 0 not in lengths else None


def cut(batch: Any, rows: int, begin: int, end: int) -> Any:
    """These rows of a batch; what is no tensor and no sequence of so many values stays whole.

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
