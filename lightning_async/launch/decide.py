"""What is to be done when something happens: pure functions from a state and an event to a state and what to do.

    RUNNING ----- a rank dies, the store dies, a signal ----> STOPPING
    STOPPING ---- the last has ended -----------------------> BACKING_OFF, or FINISHED
    BACKING_OFF - the pause is over ------------------------> RUNNING

There are no clocks, processes or signals in here. A rank's death ends the others, and all start again together, as none
of them can go on with fewer; to start one alone is another `Start`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from lightning_async.arguments import check_int, check_real

__all__ = [
    "CANNOT_START", "STORE_LOST", "TRY_AGAIN", "Action", "Due", "Ended", "Event", "Finish", "Phase", "Policy", "Send",
    "Signalled", "Start", "State", "StoreLost", "Wait", "begin", "decide",
]  # fmt: skip

TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: a rank that was told to go has saved, and can be started again."""
STORE_LOST = 69
"""EX_UNAVAILABLE: the store, in which ranks meet, has died."""
CANNOT_START = 71
"""EX_OSERR: the system did not let a rank or the store start, or a file be written."""

_SAME_S = 0.2
"""Launchers send a signal to a process and to its group: what comes so soon after the first is no second one."""
_LONGEST_PAUSE_S = 60.0
_KILLED_S = 10.0
"""What lives so long after SIGKILL is left alone."""
_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals that end the job, and what the ranks get of them."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is asked of the launcher.

    Args:
        ranks: how many there are.
        max_restarts: how often all ranks are started again after one has died. Default: 0.
        grace_s: seconds that ranks have to save and to end when the job is told to end. Default: 30.
        patience_s: seconds that they have when one of them has died. Default: 5.
        first_pause_s: before the first restart; each further pause is twice as long, up to a minute. Default: 1.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    ranks: int
    max_restarts: int = 0
    grace_s: float = 30.0
    patience_s: float = 5.0
    first_pause_s: float = 1.0

    def __post_init__(self) -> None:
        check_int(self, "ranks", at_least=1)
        check_int(self, "max_restarts", at_least=0)
        for name in ("grace_s", "patience_s", "first_pause_s"):
            check_real(self, name, at_least=0.0)

    @property
    def all(self) -> frozenset[int]:
        return frozenset(range(self.ranks))

    def pause_s(self, restarts: int) -> float:
        """Before the next restart, when there have been so many."""
        return min(self.first_pause_s * 2.0 ** min(restarts, 60), _LONGEST_PAUSE_S)


class Phase(Enum):
    """Where the job stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    FINISHED = "finished"


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit status, or minus the number of the signal that has killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class StoreLost:
    """The process that holds the store has ended."""


@dataclass(frozen=True)
class Signalled:
    """The launcher was sent a signal, at that many monotonic seconds."""

    number: int
    at: float


@dataclass(frozen=True)
class Due:
    """What the last `Wait` waited for has not happened in time."""


Event = Ended | StoreLost | Signalled | Due


@dataclass(frozen=True)
class Start:
    """Start these ranks, with a store of their own."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Send:
    """Send these ranks a signal."""

    number: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """Be `Due` after so many seconds, in place of what was waited for before."""

    seconds: float


@dataclass(frozen=True)
class Finish:
    """End with this exit code."""

    code: int


Action = Start | Send | Wait | Finish


@dataclass(frozen=True)
class State:
    """What is known.

    Args:
        phase: where the job stands.
        living: ranks whose processes live.
        statuses: of the ranks of this start that have ended.
        first: the rank that died first in this start; None where none has.
        store_lost: the store has died first.
        asked: the signal by which the job was told to end, if it was.
        asked_at: when.
        killed: those that live have been sent SIGKILL.
        restarts: so far.
    """

    phase: Phase = Phase.RUNNING
    living: frozenset[int] = frozenset()
    statuses: Mapping[int, int] = field(default_factory=dict)
    first: int | None = None
    store_lost: bool = False
    asked: int | None = None
    asked_at: float = 0.0
    killed: bool = False
    restarts: int = 0


Decision = tuple[State, list[Action]]


def begin(policy: Policy) -> Decision:
    """The first start."""
    return State(living=policy.all), [Start(policy.all)]


def decide(policy: Policy, state: State, event: Event) -> Decision:
    """What follows from an event."""
    if state.phase is Phase.FINISHED:
        return state, []
    if isinstance(event, Ended):
        return _ended(policy, state, event)
    if isinstance(event, Signalled):
        return _signalled(policy, state, event)
    if isinstance(event, StoreLost):
        return _store_lost(policy, state)
    if state.phase is Phase.BACKING_OFF:
        again = State(living=policy.all, restarts=state.restarts + 1)
        return again, [Start(policy.all)]
    if state.phase is Phase.RUNNING:
        return state, []
    if state.killed:  # it waits for a disk or a device that does not answer: the system keeps it until then
        return replace(state, phase=Phase.FINISHED), [Finish(_exit_code(state))]
    return _kill(state)


def _kill(state: State) -> Decision:
    return replace(state, killed=True), [Send(signal.SIGKILL, state.living), Wait(_KILLED_S)]


def _ended(policy: Policy, state: State, event: Ended) -> Decision:
    statuses = {**state.statuses, event.rank: event.status}
    died = event.status != 0 and state.first is None and not state.store_lost
    state = replace(
        state, living=state.living - {event.rank}, statuses=statuses, first=event.rank if died else state.first
    )
    if not state.living:
        return _all_ended(policy, state)
    if state.phase is Phase.RUNNING and died:
        state = replace(state, phase=Phase.STOPPING)
        if event.status == TRY_AGAIN:
            # All ranks save together. A second SIGTERM would end those that are still at it.
            return state, [Wait(policy.grace_s)]
        return state, [Send(signal.SIGTERM, state.living), Wait(policy.patience_s)]
    return state, []


def _all_ended(policy: Policy, state: State) -> Decision:
    code = _exit_code(state)
    again = state.asked is None and code not in (0, TRY_AGAIN) and state.restarts < policy.max_restarts
    if again:
        return replace(state, phase=Phase.BACKING_OFF), [Wait(policy.pause_s(state.restarts))]
    return replace(state, phase=Phase.FINISHED), [Finish(code)]


def _exit_code(state: State) -> int:
    """Of the launcher, when all ranks have ended."""
    if state.store_lost and state.asked is None:
        return STORE_LOST
    statuses = set(state.statuses.values())
    if TRY_AGAIN in statuses and statuses <= {0, TRY_AGAIN}:
        return TRY_AGAIN
    if state.asked is not None:
        return 128 + state.asked  # also where all ended with 0: it is not known whether they had come to their end
    if state.first is None:
        return 0
    status = state.statuses[state.first]
    return status if status > 0 else 128 - status


def _signalled(policy: Policy, state: State, event: Signalled) -> Decision:
    if event.number not in _STOPS:
        return state, [Send(event.number, state.living)] if state.living else []
    if state.asked is not None:
        if event.at - state.asked_at < _SAME_S or not state.living:
            return state, []
        # The second Ctrl-C kills. A second SIGTERM goes on to the ranks, which end at once.
        return _kill(state) if event.number == signal.SIGINT else (state, [Send(signal.SIGTERM, state.living)])
    state = replace(state, asked=event.number, asked_at=event.at)
    if not state.living:  # between two starts
        return replace(state, phase=Phase.FINISHED), [Finish(128 + event.number)]
    sent = [Send(_STOPS[signal.Signals(event.number)], state.living)] if state.phase is Phase.RUNNING else []
    return replace(state, phase=Phase.STOPPING), [*sent, Wait(policy.grace_s)] if sent else []


def _store_lost(policy: Policy, state: State) -> Decision:
    if state.phase is not Phase.RUNNING:
        return state, []
    state = replace(state, phase=Phase.STOPPING, store_lost=True)
    return state, [Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
