"""Decisions of the launcher: pure functions from a state and an event to a state and what to do.

    RUNNING ----- a rank dies ------------------------------> REGROUPING
    REGROUPING -- all who live tell that they go on --------> RUNNING, the rank is lost, and started again after a pause
    RUNNING ----- they tell that it is with them again -----> RUNNING, the rank is lost no more
    REGROUPING -- they do not, in time ---------------------> STOPPING
    both -------- the store dies, a signal -----------------> STOPPING
    STOPPING ---- the last has ended -----------------------> BACKING_OFF, or FINISHED
    BACKING_OFF - the pause is over ------------------------> RUNNING

A death before anybody has told a generation ends the others at once. What becomes of a rank that is lost and started
again changes nothing for those who train, until it has joined them; where they have ended, it is told to end. So is a
rank that is left behind: the others went on without it, and its process lives (it is stopped, or cut off).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from lightning_async._checks import check_int, check_real

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a rank that was told to go has saved, and can be started again
STORE_LOST = 69  # EX_UNAVAILABLE: the store, in which ranks meet, has died
CANNOT_START = 71  # EX_OSERR: the system did not let a rank or the store start, or a file be written

_LONGEST_PAUSE_S = 60.0
_LONGEST_START_S = 1800.0
"""Until a first step: imports, downloads and compilation have taken half an hour at most, unless somebody says more."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The settings of the launcher; one that is out of range raises TypeError or ValueError."""

    ranks: int
    max_restarts: int = 0  # of all ranks, or of one rank where the others go on
    grace_s: float = 30.0  # that ranks have to save and to end when the job is told to end
    patience_s: float = 5.0  # that they have when one of them has died, to go on without it, and then to end
    first_pause_s: float = 1.0  # before the first restart of all ranks; it doubles each time, up to a minute
    standbys: int = 0  # processes that have imported what the program does, and are the next ranks to be started again
    # Without a step of any rank for so long all are killed, as if each had died. None: never.
    hang_after_s: float | None = None
    # The same, before the first step of a training. None: half an hour, or `hang_after_s` where that is longer.
    hang_after_start_s: float | None = None

    def __post_init__(self) -> None:
        check_int(self, "ranks", at_least=1)
        check_int(self, "max_restarts", at_least=0)
        check_int(self, "standbys", at_least=0)
        for name in ("grace_s", "patience_s", "first_pause_s"):
            check_real(self, name, at_least=0.0)
        if self.hang_after_s is not None:
            check_real(self, "hang_after_s", above=0.0)
        if self.hang_after_start_s is not None:
            check_real(self, "hang_after_start_s", above=0.0)
            if self.hang_after_s is None:
                raise ValueError(
                    f"`Policy(hang_after_start_s={self.hang_after_start_s:g})` needs `hang_after_s`: without it nobody "
                    "looks for hangs (--hang-after)."
                )

    @property
    def all(self) -> frozenset[int]:
        return frozenset(range(self.ranks))

    @property
    def hang_limits(self) -> tuple[float, float] | None:
        """Seconds without a step that are a hang: before the first one of a training, and then; None for no limit."""
        if self.hang_after_s is None:
            return None
        return self.hang_after_start_s or max(_LONGEST_START_S, self.hang_after_s), self.hang_after_s

    def pause_s(self, before: int) -> float:
        """Return the pause before all ranks are started again, when they have been so often before."""
        return min(self.first_pause_s * 2.0 ** min(before, 60), _LONGEST_PAUSE_S)

    def pause_alone_s(self, in_vain: int) -> float:
        """Return the pause before a rank starts again alone, by its starts since it last trained with others."""
        return self.pause_s(in_vain - 1) if in_vain else self.first_pause_s / 10.0


class Phase(Enum):
    RUNNING = "running"
    REGROUPING = "regrouping"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    FINISHED = "finished"


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit status, or minus the number of the signal that has killed it."""

    rank: int
    status: int


@dataclass(frozen=True)
class LaunchGeneration:
    """Ranks that train together: the first, of all, is 0; later ones are without those that have died, and with those
    that have joined again."""

    number: int
    members: frozenset[int]


@dataclass(frozen=True)
class RankReported:
    """A rank has told that it is in this generation."""

    rank: int
    generation: LaunchGeneration


@dataclass(frozen=True)
class StoreEnded:
    """The process that holds the store has ended."""


@dataclass(frozen=True)
class Signalled:
    """The launcher was sent a signal, at that many monotonic seconds."""

    number: int
    at: float


@dataclass(frozen=True)
class Due:
    """The last `Wait` is over, and what it waited for has not happened; of a rank: its pause is over."""

    rank: int | None = None


Event = Ended | RankReported | StoreEnded | Signalled | Due


@dataclass(frozen=True)
class StartRanks:
    """Start these ranks, with a store of their own."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Rejoin:
    """Start this rank alone, for the so manyeth time, that it may join those who train."""

    rank: int
    count: int


@dataclass(frozen=True)
class Send:
    """Send these ranks a signal."""

    number: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Announce:
    """Tell these ranks that one has died."""

    dead: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """Be `Due` after so many seconds, in place of what was waited for before, by all or for this rank alone."""

    seconds: float
    rank: int | None = None


@dataclass(frozen=True)
class Finish:
    """End with this exit code."""

    code: int


Action = StartRanks | Rejoin | Send | Announce | Wait | Finish


@dataclass(frozen=True)
class LaunchState:
    """The launcher's knowledge."""

    phase: Phase = Phase.RUNNING  # where the job stands
    living: frozenset[int] = frozenset()  # ranks whose processes live
    # Of the ranks of this start that have ended, in this order.
    statuses: Mapping[int, int] = field(default_factory=dict)
    # The last generation that each rank has told, in its present life.
    told: Mapping[int, LaunchGeneration] = field(default_factory=dict)
    # Ranks that have died, and without which training goes on. Those of them that live have been started again, and
    # have not joined yet; or they were left behind by others, who have ended or are told to end.
    lost: frozenset[int] = frozenset()
    # How often each rank was to be started again alone, in this start.
    rejoins: Mapping[int, int] = field(default_factory=dict)
    in_vain: Mapping[int, int] = field(default_factory=dict)  # the same, since it last trained with the others
    pausing: frozenset[int] = frozenset()  # ranks that will be
    store_lost: bool = False  # the store has died first
    asked: int | None = None  # the signal by which the job was told to end, if it was
    asked_at: float = 0.0  # when that was
    killed: bool = False  # those that live have been sent SIGKILL
    restarts: int = 0  # so far, of all ranks and of single ones
    anew: int = 0  # those of all ranks

    @property
    def trains(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.REGROUPING)

    @property
    def settled(self) -> bool:
        """Whether all who live train together, and nobody is to be started again."""
        return self.phase is Phase.RUNNING and self.agreed is not None and not self.pausing | self.lost & self.living

    @property
    def first(self) -> int | None:
        """The rank that died first in this start, of those that are not lost; None where none has."""
        if self.store_lost:
            return None
        return next((rank for rank, status in self.statuses.items() if status != 0 and rank not in self.lost), None)

    @property
    def agreed(self) -> LaunchGeneration | None:
        """The newest generation, if all of its members that live are in it.

        What the dead have told is void, and who is to join does not say with whom the others train.
        """
        told = {
            rank: generation
            for rank, generation in self.told.items()
            if self.statuses.get(rank, 0) == 0 and rank not in self.lost
        }
        number = max((generation.number for generation in told.values()), default=-1)
        newest = {generation for generation in told.values() if generation.number == number}
        if len(newest) != 1:
            return None
        (generation,) = newest
        here = all(self.told.get(rank) == generation for rank in generation.members & self.living)
        return generation if here else None

    @property
    def left_behind(self) -> frozenset[int]:
        """Ranks that trained with the others and live, and without which the others have told that they went on."""
        agreed = self.agreed
        if agreed is None:
            return frozenset()
        return (self.living & self.told.keys()) - agreed.members - self.lost


_SAME_S = 0.2
"""Launchers send a signal to a process and to its group: what comes so soon after the first is no second one."""
_KILLED_S = 10.0  # what lives so long after SIGKILL is left alone
_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals that end the job, and what the ranks get of them."""

Decision = tuple[LaunchState, list[Action]]


def begin(policy: Policy) -> Decision:
    return LaunchState(living=policy.all), [StartRanks(policy.all)]


def decide(policy: Policy, state: LaunchState, event: Event) -> Decision:
    if state.phase is Phase.FINISHED:
        return state, []
    if isinstance(event, Ended):
        return _ended(policy, state, event)
    if isinstance(event, RankReported):
        return _told(policy, state, event)
    if isinstance(event, Signalled):
        return _signalled(policy, state, event)
    if isinstance(event, StoreEnded):
        return _store_lost(policy, state)
    return _due(policy, state) if event.rank is None else _pause_is_over(state, event.rank)


def _due(policy: Policy, state: LaunchState) -> Decision:
    if state.phase is Phase.BACKING_OFF:
        again = LaunchState(living=policy.all, restarts=state.restarts + 1, anew=state.anew + 1)
        return again, [StartRanks(policy.all)]
    if state.phase is Phase.RUNNING:  # the others have gone on since
        return state, []
    if state.phase is Phase.REGROUPING:
        return _stop(policy, state)
    if state.killed:  # it waits for a disk or a device that does not answer: the system keeps it until then
        return replace(state, phase=Phase.FINISHED), [Finish(_exit_code(state))]
    return _kill(state)


def _stop(policy: Policy, state: LaunchState) -> Decision:
    return replace(state, phase=Phase.STOPPING), [Send(signal.SIGTERM, state.living), Wait(policy.patience_s)]


def _kill(state: LaunchState) -> Decision:
    return replace(state, killed=True), [Send(signal.SIGKILL, state.living), Wait(_KILLED_S)]


def _told(policy: Policy, state: LaunchState, event: RankReported) -> Decision:
    if event.rank in state.living & state.lost and not event.generation.members:  # it serves those who train, again
        in_vain = {rank: times for rank, times in state.in_vain.items() if rank != event.rank}
        return replace(state, lost=state.lost - {event.rank}, in_vain=in_vain), []
    if event.rank not in state.living or event.rank not in event.generation.members:
        return state, []
    state = _without_the_lost(replace(state, told={**state.told, event.rank: event.generation}))
    return _bring_back(policy, state)


def _without_the_lost(state: LaunchState) -> LaunchState:
    """Count the dead as lost once the others go on; too late when they were told to end because of it."""
    agreed = state.agreed if state.trains or state.asked is not None else None
    if agreed is None:
        return state
    if state.asked is not None:
        state = replace(state, lost=state.lost | state.left_behind)
    dead = {rank for rank, status in state.statuses.items() if status not in (0, TRY_AGAIN)}
    joined = state.lost & state.living & agreed.members
    in_vain = {rank: times for rank, times in state.in_vain.items() if rank not in joined}
    state = replace(state, lost=(state.lost - joined) | (dead - agreed.members), in_vain=in_vain)
    return replace(state, phase=Phase.RUNNING) if state.trains and state.first is None else state


def _bring_back(policy: Policy, state: LaunchState) -> Decision:
    actions: list[Action] = []
    for rank in sorted(state.lost - state.living - state.pausing):
        ended = state.statuses[rank] in (0, TRY_AGAIN)  # it had nothing to join, or was told to go
        used_up = state.restarts + len(state.pausing) >= policy.max_restarts
        if ended or used_up or state.phase is not Phase.RUNNING:
            continue
        before = state.in_vain.get(rank, 0)
        rejoins = {**state.rejoins, rank: state.rejoins.get(rank, 0) + 1}
        in_vain = {**state.in_vain, rank: before + 1}
        state = replace(state, rejoins=rejoins, in_vain=in_vain, pausing=state.pausing | {rank})
        actions.append(Wait(policy.pause_alone_s(before), rank))
    return state, actions


def _pause_is_over(state: LaunchState, rank: int) -> Decision:
    if rank not in state.pausing or not state.trains:
        return state, []
    told = {other: generation for other, generation in state.told.items() if other != rank}
    statuses = {other: status for other, status in state.statuses.items() if other != rank}
    living = state.living | {rank}
    pausing = state.pausing - {rank}
    restarts = state.restarts + 1
    state = replace(state, living=living, pausing=pausing, told=told, statuses=statuses, restarts=restarts)
    return state, [Rejoin(rank, state.rejoins[rank])]


def _ended(policy: Policy, state: LaunchState, event: Ended) -> Decision:
    left_behind = state.left_behind - {event.rank}  # as all have told who lived until now
    statuses = {**state.statuses, event.rank: event.status}
    state = _without_the_lost(replace(state, living=state.living - {event.rank}, statuses=statuses))
    if not state.living:
        return _all_ended(policy, state)
    if not state.trains:
        return state, []
    if event.status == 0 and state.living <= state.lost | left_behind:
        state = replace(state, lost=state.lost | left_behind)
    if state.living <= state.lost:  # nobody trains any more whom these could join
        return replace(state, phase=Phase.STOPPING), [Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
    if event.status == 0:
        return state, []
    told: list[Action] = [Announce(event.rank, state.living)] if state.told else []
    if event.rank in state.lost:
        state, actions = _bring_back(policy, state)
        return state, [*told, *actions]
    if event.status == TRY_AGAIN:
        # All ranks save together. A second SIGTERM would end those that are still at it.
        state = replace(state, lost=state.lost | left_behind)
        joining = [Send(signal.SIGTERM, state.living & state.lost)] if state.living & state.lost else []
        return replace(state, phase=Phase.STOPPING), [*joining, Wait(policy.grace_s)]
    if told:
        return replace(state, phase=Phase.REGROUPING), [*told, Wait(policy.patience_s)]
    return _stop(policy, state)


def _all_ended(policy: Policy, state: LaunchState) -> Decision:
    code = _exit_code(state)
    again = state.asked is None and code not in (0, TRY_AGAIN) and state.restarts < policy.max_restarts
    if again:
        return replace(state, phase=Phase.BACKING_OFF), [Wait(policy.pause_s(state.anew))]
    return replace(state, phase=Phase.FINISHED), [Finish(code)]


def _exit_code(state: LaunchState) -> int:
    if state.store_lost and state.asked is None:
        return STORE_LOST
    statuses = {status for rank, status in state.statuses.items() if rank not in state.lost}
    if TRY_AGAIN in statuses and statuses <= {0, TRY_AGAIN}:
        return TRY_AGAIN
    if state.asked is not None:
        return 128 + state.asked  # also where all ended with 0: it is not known whether they had come to their end
    if state.first is None:
        return 0
    status = state.statuses[state.first]
    return status if status > 0 else 128 - status


def _signalled(policy: Policy, state: LaunchState, event: Signalled) -> Decision:
    if event.number not in _STOPS:
        return state, [Send(event.number, state.living)] if state.living else []
    if state.asked is not None:
        if event.at - state.asked_at < _SAME_S or not state.living:
            return state, []
        # The second Ctrl-C kills. A second SIGTERM goes on to the ranks, which end at once.
        return _kill(state) if event.number == signal.SIGINT else (state, [Send(signal.SIGTERM, state.living)])
    lost = state.lost | (state.left_behind if state.trains else frozenset())  # the others' saves count without them
    state = replace(state, asked=event.number, asked_at=event.at, lost=lost)
    if not state.living:  # between two starts
        return replace(state, phase=Phase.FINISHED), [Finish(128 + event.number)]
    sent = [Send(_STOPS[signal.Signals(event.number)], state.living)] if state.trains else []
    return replace(state, phase=Phase.STOPPING), [*sent, Wait(policy.grace_s)] if sent else []


def _store_lost(policy: Policy, state: LaunchState) -> Decision:
    if not state.trains:
        return state, []
    state = replace(state, phase=Phase.STOPPING, store_lost=True)
    return state, [Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
