"""Calls that may draw random numbers, so that another process can make them again with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from lightning_async.data.random_states import Generators, States

__all__ = ["Indices", "Tape"]

T = TypeVar("T")


class Tape:
    """Remembers from which states of the generators a sequence of calls drew.

    A call that draws nothing leaves no trace, nor one that goes on where the last one stopped. So a sampler that draws
    a seed at the start leaves one entry, whatever training draws between its batches.

    Args:
        generators: those that a call may draw from.
        drawn: what an earlier tape remembers of the same calls.
    """

    def __init__(self, generators: Generators, drawn: dict[int, States] | None = None) -> None:
        self.made = 0
        """Calls so far."""
        self._generators, self._known = generators, dict(drawn or {})
        self._drawn: dict[int, States] = {}
        self._left: States = {}

    def call(self, function: Callable[[], T]) -> T:
        """Make the next call; from the states that an earlier tape remembers, if it does."""
        if self.made in self._known:
            self._generators.put(self._known[self.made])
        before = self._generators.take()
        try:
            return function()
        finally:
            after = self._generators.take()
            moved = {name for name, state in before.items() if after[name] != state}
            if drew := {name: before[name] for name in moved if before[name] != self._left.get(name)}:
                self._drawn[self.made] = drew
            self._left |= {name: after[name] for name in moved}
            self.made += 1

    def drawn(self, made: int) -> dict[int, States]:
        """The states from which the first ``made`` calls drew, by the number of the call."""
        return {call: states for call, states in self._drawn.items() if call < made}


class Indices:
    """Stands for a sampler in an iteration over a loader; may begin behind what was taken already.

    The sampler is then asked for the indices before again, but nothing is fetched for them.

    Args:
        sampler: answers with a sampler, of batches or of single indices, for each iteration.
        begin: makes the tape of an iteration: of ``iter``, then of each ``next``.
        generators: keep their states while calls are made again.
        skip: indices that were taken.
        made: calls that had been made, for what was fetched ahead too.
    """

    def __init__(
        self,
        sampler: Callable[[], Iterable[Any]],
        begin: Callable[[], Tape],
        generators: Generators,
        skip: int = 0,
        made: int = 0,
    ) -> None:
        self._sampler, self._begin, self._generators = sampler, begin, generators
        self._skip, self._made = skip, made

    def __len__(self) -> int:
        return len(self._sampler())  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Any]:
        tape = self._begin()
        if self._made:
            return self._behind(tape, self._skip, self._made)
        indices = tape.call(lambda: iter(self._sampler()))
        return self._rest(tape, indices)

    def start_over(self) -> None:
        """The next iteration begins at the beginning."""
        self._skip = self._made = 0

    def _behind(self, tape: Tape, skip: int, made: int) -> Iterator[Any]:
        with self._generators.kept():
            indices = tape.call(lambda: iter(self._sampler()))
            again = []
            while tape.made < made:
                again.append(tape.call(lambda: next(indices, _END)))
        yield from (index for index in again[skip:] if index is not _END)
        yield from self._rest(tape, indices)

    def _rest(self, tape: Tape, indices: Iterator[Any]) -> Iterator[Any]:
        while (index := tape.call(lambda: next(indices, _END))) is not _END:
            yield index


_END = object()
