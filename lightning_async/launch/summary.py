"""Who has died of what, in words."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_async.launch.state import TRY_AGAIN

__all__ = ["HUNG", "Ending", "goes_on", "how", "report", "signal_name"]

HUNG = 70
"""The exit code of `HangWatchdog`."""


@dataclass(frozen=True)
class Ending:
    """What became of one rank.

    Args:
        rank, pid: which one; 0 for a process that was never there.
        status: its exit status, or minus the signal that has killed it.
        seconds: that it lived.
        told: the signal by which the launcher has told it to end; None where it has not.
        tail: the last lines of its stderr.
        error: the exception that it has written down, see `ErrorFiles`.
    """

    rank: int
    pid: int
    status: int
    seconds: float
    told: int | None = None
    tail: Sequence[bytes] = ()
    error: str = ""

    @property
    def process(self) -> str:
        """Its number in brackets; nothing where it has not been started."""
        return f" (process {self.pid})" if self.pid else ""


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how(ending: Ending) -> str:
    """One rank's end, as the rest of a sentence."""
    if ending.status == 0:
        text = "ended in order"
    elif ending.status == TRY_AGAIN:
        text = f"has saved and ended with exit code {TRY_AGAIN} (preempted)"
    elif ending.status == HUNG:
        text = f"ended with exit code {HUNG} (of a watchdog: it has hung)"
    elif ending.status > 0:
        text = f"ended with exit code {ending.status}" + (f" ({ending.error})" if ending.error else "")
    else:
        text = f"was killed by {signal_name(-ending.status)}"
    text += f" after {ending.seconds:.1f} s"
    if ending.told is not None and ending.status == -ending.told:
        return f"{text}, by the launcher"
    if ending.told is not None:
        return f"{text}, told by {signal_name(ending.told)}"
    if ending.status == -signal.SIGKILL:
        return f"{text} (by hand, or by the system for want of memory)"
    return text


def goes_on(lost: Sequence[Ending], left: int, ranks: int) -> str:
    """These have died, and so many of all train without them."""
    return f"{report(lost, None, None)}: training goes on with {left} of {ranks} ranks."


def report(endings: Sequence[Ending], first: int | None, code: int | None, lost: Collection[int] = frozenset()) -> str:
    """All ranks in the order of their ends, and the last lines of those that died by themselves.

    Args:
        endings: in this order.
        first: the rank that died first, of those that are not lost.
        code: the launcher's exit code; None where the ranks are started again.
        lost: the ranks without which training went on.
    """
    last = {ending.rank: ending for ending in endings}
    lines = []
    for ending in endings:
        lives = "; it was started again" if last[ending.rank] is not ending else ""
        without = "; training went on without it" if not lives and ending.rank in lost else ""
        lines.append(f"rank {ending.rank}{ending.process} {how(ending)}{lives}{without}")
    for ending in last.values():
        died = ending.rank in (first, *lost) and ending.told is None and ending.status != TRY_AGAIN
        if died and ending.tail:
            lines.append(f"the last that rank {ending.rank} has written to stderr:")
            lines += [f"    {line.decode(errors='replace')}" for line in ending.tail]
    if lost or len(last) < len(endings):
        in_order = sum(ending.status == 0 for ending in last.values())
        lines.append(f"{in_order} of {len(last)} ranks have ended in order")
    if code is not None:
        lines.append(f"exit code {code}")
    return "\n".join(lines)
