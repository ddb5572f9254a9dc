"""Work on large memory by several threads: one alone does not use what the memory could move.

Each thread takes the next piece of one queue when it is free. Threads that meet at barriers, as those of torch's own
operations do, wait for whichever the system does not let run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Piece = TypeVar("Piece")
T = TypeVar("T")


def share_out(do: Callable[[Piece], T], pieces: Iterable[Piece], threads: int) -> list[T]:
    """Return what ``do`` makes of all pieces, in no order; the calling thread works, too.

    ``do`` should be native code without the interpreter's lock, mostly. Its first error is raised; pieces that were not
    begun are left.

    >>> sorted(share_out(lambda piece: piece * piece, range(4), threads=2))
    [0, 1, 4, 9]
    """
    left = deque(pieces)
    results = []
    errors = []
    if threads <= 1 or len(left) <= 1:
        return [do(piece) for piece in left]

    def work() -> None:
        while left and not errors:
            try:
                piece = left.popleft()
            except IndexError:  # another one was quicker
                return
            try:
                results.append(do(piece))
            except BaseException as error:
                errors.append(error)

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(left)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return results
