"""A work queue for operations on large memory, because one thread alone does not use the whole memory bandwidth.

Each thread takes the next piece of one queue when it is free. The threads of torch's own operations meet at barriers
instead, where all wait for the one thread that the operating system has suspended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Piece = TypeVar("Piece")
T = TypeVar("T")


def share_out(do: Callable[[Piece], T], pieces: Iterable[Piece], threads: int) -> list[T]:
    """Call ``do`` with every piece on several threads, the calling one included; return the results in any order.

    ``do`` should be mostly native code that releases the interpreter's lock. If ``do`` raises an error, no further
    piece is begun, and the first error is raised here.

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
            except IndexError:  # another thread took the last piece after `while` had looked
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
