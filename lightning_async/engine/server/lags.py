"""A histogram of lag that stays small: single lags as far as they are common, then powers of two.

A lag counts all updates between a pull and a push, whoever has pushed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["counted", "in_words", "least"]

_SINGLE = 32


def least(lag: int) -> int:
    """The smallest lag that is counted with this one.

    >>> [least(lag) for lag in (0, 5, 31, 32, 63, 64, 100)]
    [0, 5, 31, 32, 32, 64, 64]
    """
    return lag if lag < _SINGLE else 1 << (lag.bit_length() - 1)


def counted(lags: Mapping[str, Any], lag: int, dropped: bool = False) -> dict[str, Any]:
    """The histogram with one push more; its keys are strings, as JSON's are.

    >>> counted(counted({"counts": {}, "dropped": 0}, 3), 40, dropped=True)
    {'counts': {'3': 1, '32': 1}, 'dropped': 1}
    """
    counts, key = lags["counts"], str(least(lag))
    return {"counts": {**counts, key: counts.get(key, 0) + 1}, "dropped": lags["dropped"] + dropped}


def in_words(lags: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How late pushes were, over several servers, how many were dropped, and what is in snapshots, or was lost.

    Args:
        lags: of each server: its ``counts``, by numbers, and ``dropped``; the ``durable`` version, and how many
            acknowledged pushes of all workers it has ``lost``, if it takes snapshots.

    >>> in_words([{"counts": {0: 1, 1: 3}, "dropped": 1}, {"counts": {0: 2, 1: 2}, "dropped": 0}])
    {'lag, in updates': '0: 38%, 1: 62%', 'dropped': '1'}
    >>> in_words([{"counts": {0: 9}, "dropped": 0, "durable": 7, "lost": 2}])["versions in snapshots"]
    '7'
    """
    counts: Counter[int] = Counter()
    for each in lags:
        counts.update(each["counts"])
    pushes, dropped = sum(counts.values()) // len(lags), sum(each["dropped"] for each in lags)
    shares = ", ".join(f"{lag}: {100 * count / counts.total():.0f}%" for lag, count in sorted(counts.items()))
    kept = [each for each in lags if "durable" in each]
    durable = ["none" if each["durable"] < 0 else str(each["durable"]) for each in kept]
    return {
        "lag, in updates": (shares or "none") if pushes else "none, in step",
        "dropped": f"{dropped}",
        **({"versions in snapshots": ", ".join(durable)} if kept else {}),
        **({"acknowledged pushes lost": ", ".join(str(each["lost"]) for each in kept)} if kept else {}),
    }
