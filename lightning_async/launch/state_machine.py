"""Decisions of the launcher: pure functions from a state and an event to a new state and actions.

    RUNNING ----- a rank dies --------------------------------> REGROUPING
    REGROUPING -- all live ranks report that they continue ---> RUNNING; the rank is lost, and started again later
    RUNNING ----- they report that it is with them again -----> RUNNING; the rank is not lost any more
    REGROUPING -- they do not report this in time ------------> STOPPING
    RUNNING or REGROUPING: the store dies, or a signal comes -> STOPPING
    RUNNING or REGROUPING: an exception repeats ------------> STOPPING, and then FINISHED
    STOPPING ---- the last rank has ended --------------------> BACKING_OFF, or FINISHED
    BACKING_OFF - the pause is over --------------------------> RUNNING

If a rank dies before any rank has reported a generation, all others are ended at once. A rank that is lost and started
again changes nothing for the ranks that train, until it has joined them; when they have ended, it is told to end. The
same holds for a rank that is left behind: the others have continued without it, but its process lives (it is stopped,
or its network is cut off).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from lightning_async._checks import check_int, check_real
from lightning_async.membership.launcher_channel import Failure

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a rank that was told to end has saved, and can be started again
STORE_LOST = 69  # EX_UNAVAILABLE: the store, through which ranks meet, has died
CANNOT_START = 71  # EX_OSERR: the system refused to start a rank or the store, or to write a file

_LONGEST_PAUSE_S = 60.0
_LONGEST_START_S = 1800.0
"""Longest time until the first step, unless the user says more: imports, downloads and compilation may take long."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The settings of the launcher.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    ranks: int
    max_restarts: int = 0  # restarts of all ranks, and of single ranks while the others continue
    grace_s: float = 30.0  # seconds in which ranks save and end when the job is told to end
    patience_s: float = 5.0  # seconds to continue without a dead rank, and then to end
    first_pause_s: float = 1.0  # pause before the first restart of all ranks; doubles each time, up to a minute
    # Seconds without a step of any rank after which all are killed, as if each had died. None: never.
    hang_after_s: float | None = None
    # The same before the first step of a training. None: half an hour, or `hang_after_s` if that is longer.
    hang_after_start_s: float | None = None

    def __post_init__(self) -> None:
        check_int(self, "ranks", at_least=1)
        check_int(self, "max_restarts", at_least=0)
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
        """Seconds without a step that count as a hang, before the first step of a training and after it, or None."""
        if self.hang_after_s is None:
            return None
        return self.hang_after_start_s or max(_LONGEST_START_S, self.hang_after_s), self.hang_after_s

    def pause_s(self, before: int) -> float:
        """Return the pause before all ranks are started again; ``before`` is the number of earlier restarts."""
        return min(self.first_pause_s * 2.0 ** min(before, 60), _LONGEST_PAUSE_S)

    def pause_alone_s(self, in_vain: int) -> float:
        """Return the pause before a rank starts again alone; ``in_vain`` counts such starts since it last trained."""
        return self.pause_s(in_vain - 1) if in_vain else self.first_pause_s / 10.0


class Phase(Enum):
    """The phase of a job. The module's docstring shows the transitions between phases."""

    RUNNING = "running"
    REGROUPING = "regrouping"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    FINISHED = "finished"


@dataclass(frozen=True)
class Ended:
    """An event: a rank has ended, with an exit status, or with minus the signal that has killed it."""

    rank: int
    status: int
    failure: Failure | None = None  # the exception of its program, if it has reported one


@dataclass(frozen=True)
class LaunchGeneration:
    """Ranks that train together.

    Generation 0 holds all ranks. Later ones lack ranks that have died, and hold ranks that have joined again.
    """

    number: int
    members: frozenset[int]


@dataclass(frozen=True)
class RankReported:
    """An event: a rank has reported that it is in this generation of the process groups."""

    rank: int
    generation: LaunchGeneration


@dataclass(frozen=True)
class StoreEnded:
    """An event: the process that holds the store has ended."""


@dataclass(frozen=True)
class Signalled:
    """An event: the launcher got a signal, at this monotonic time in seconds."""

    number: int
    at: float


@dataclass(frozen=True)
class Due:
    """An event: the time of the newest `Wait` is over.

    If ``rank`` is set, it is the `Wait` of this rank, else of the job.
    """

    rank: int | None = None


Event = Ended | RankReported | StoreEnded | Signalled | Due


@dataclass(frozen=True)
class StartRanks:
    """An action: start these ranks, with a new store."""

    ranks: frozenset[int]


@dataclass(frozen=True)
class Rejoin:
    """An action: start this rank alone, so that it joins those that train, for the ``count``-th time."""

    rank: int
    count: int


@dataclass(frozen=True)
class Send:
    """An action: send a signal to these ranks."""

    number: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Announce:
    """An action: tell these ranks that another rank has died."""

    dead: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Wait:
    """An action: report `Due` after these seconds, for the job or for one rank; it replaces an earlier wait."""

    seconds: float
    rank: int | None = None


@dataclass(frozen=True)
class Finish:
    """An action: end with this exit code."""

    code: int


Action = StartRanks | Rejoin | Send | Announce | Wait | Finish


@dataclass(frozen=True)
class LaunchState:
    phase: Phase = Phase.RUNNING
    living: frozenset[int] = frozenset()  # ranks whose processes live
    # Exit statuses of the ranks of this start that have ended, in the order of their ends.
    statuses: Mapping[int, int] = field(default_factory=dict)
    # The last generation that each rank has reported, since its own last start.
    told: Mapping[int, LaunchGeneration] = field(default_factory=dict)
    # Ranks that have died, and without which training continues. Those of them that live were started again and have
    # not joined yet; or they were left behind by the others, which have ended or are told to end.
    lost: frozenset[int] = frozenset()
    # Number of times that each rank was to be started again alone, since the last start of all ranks.
    rejoins: Mapping[int, int] = field(default_factory=dict)
    in_vain: Mapping[int, int] = field(default_factory=dict)  # the same, since the rank last trained with the others
    pausing: frozenset[int] = frozenset()  # ranks that will be started again alone after a pause
    store_lost: bool = False  # whether the store has died first
    asked: int | None = None  # signal by which the job was told to end, if any
    asked_at: float = 0.0  # time of that signal
    killed: bool = False  # whether SIGKILL was sent to the ranks that live
    restarts: int = 0  # restarts so far, of all ranks and of single ranks
    anew: int = 0  # restarts of all ranks
    # Ends of ranks by an exception of the program, in the epoch of the last of these and in later ones.
    failures: Sequence[tuple[Ended, Failure]] = ()
    # The first of these ends that was the same as an earlier one, and the earlier one. No restart can help then.
    repeated: tuple[Ended, Ended] | None = None

    @property
    def trains(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.REGROUPING)

    @property
    def first(self) -> int | None:
        """The first rank that failed since all ranks were started; None if no rank failed, or if the store ended first.

        Lost ranks do not count, because the other ranks have continued without them.
        """
        if self.store_lost:
            return None
        return next((rank for rank, status in self.statuses.items() if status != 0 and rank not in self.lost), None)

    @property
    def agreed(self) -> LaunchGeneration | None:
        """The newest generation that a rank has reported, if all of its live members have reported it; else None.

        Reports of ranks that have died do not count, nor do those of lost ranks that have not joined again.
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
        """Live ranks that have trained, but are no members of the generation in which the other ranks continue."""
        agreed = self.agreed
        if agreed is None:
            return frozenset()
        return (self.living & self.told.keys()) - agreed.members - self.lost


_SAME_S = 0.2
"""Seconds within which a second signal counts as the first: launchers send one to a process and to its group."""
_KILLED_S = 10.0  # a process that lives this long after SIGKILL is left alone
_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals that end the job, each with the signal that ranks get."""

Decision = tuple[LaunchState, list[Action]]


def begin(policy: Policy) -> Decision:
    """Return the first state, and the actions that start the job."""
    return LaunchState(living=policy.all), [StartRanks(policy.all)]


def decide(policy: Policy, state: LaunchState, event: Event) -> Decision:
    """Return the state after an event, and the actions that follow."""
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
        counts = {"restarts": state.restarts + 1, "anew": state.anew + 1, "failures": state.failures}
        again = LaunchState(living=policy.all, **counts)
        return again, [StartRanks(policy.all)]
    if state.phase is Phase.RUNNING:  # the other ranks have continued since
        return state, []
    if state.phase is Phase.REGROUPING:
        return _stop(policy, state)
    if state.killed:  # the process waits for a disk or device that does not answer, and cannot end before
        return replace(state, phase=Phase.FINISHED), [Finish(_exit_code(state))]
    return _kill(state)


def _stop(policy: Policy, state: LaunchState) -> Decision:
    return replace(state, phase=Phase.STOPPING), [Send(signal.SIGTERM, state.living), Wait(policy.patience_s)]


def _kill(state: LaunchState) -> Decision:
    return replace(state, killed=True), [Send(signal.SIGKILL, state.living), Wait(_KILLED_S)]


def _told(policy: Policy, state: LaunchState, event: RankReported) -> Decision:
    if event.rank in state.living & state.lost and not event.generation.members:  # a server that serves again
        in_vain = {rank: times for rank, times in state.in_vain.items() if rank != event.rank}
        return replace(state, lost=state.lost - {event.rank}, in_vain=in_vain), []
    if event.rank not in state.living or event.rank not in event.generation.members:
        return state, []
    state = _without_the_lost(replace(state, told={**state.told, event.rank: event.generation}))
    return _bring_back(policy, state)


def _without_the_lost(state: LaunchState) -> LaunchState:
    """Add dead ranks to the lost ones once the live ranks continue without them, and remove those that have joined.

    Change nothing if the launcher has told the live ranks to end because of the death.
    """
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
        ended = state.statuses[rank] in (0, TRY_AGAIN)  # it found nothing to join, or was told to end
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
    left_behind = state.left_behind - {event.rank}  # computed before the rank's end changes the state
    statuses = {**state.statuses, event.rank: event.status}
    state = _without_the_lost(replace(state, living=state.living - {event.rank}, statuses=statuses))
    # A rank that was told to end may raise an exception because of that, and save.
    if (failure := event.failure) is not None and event.status not in (0, TRY_AGAIN):
        earlier = [(end, before) for end, before in state.failures if before.epoch >= failure.epoch]
        same = (end for end, before in earlier if failure.repeats(before, is_same_rank=end.rank == event.rank))
        repeated = state.repeated or next(((event, end) for end in same), None)
        state = replace(state, failures=(*earlier, (event, failure)), repeated=repeated)
    if not state.living:
        return _all_ended(policy, state)
    if not state.trains:
        return state, []
    if event.status == 0 and state.living <= state.lost | left_behind:
        state = replace(state, lost=state.lost | left_behind)
    if state.living <= state.lost:  # no rank trains any more that these could join
        return replace(state, phase=Phase.STOPPING), [Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
    if event.status == 0:
        return state, []
    told: list[Action] = [Announce(event.rank, state.living)] if state.told else []
    if state.repeated:
        return replace(state, phase=Phase.STOPPING), [*told, Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
    if event.rank in state.lost:
        state, actions = _bring_back(policy, state)
        return state, [*told, *actions]
    if event.status == TRY_AGAIN:
        # All ranks save together, and a second SIGTERM would end those that still save.
        state = replace(state, lost=state.lost | left_behind)
        joining = [Send(signal.SIGTERM, state.living & state.lost)] if state.living & state.lost else []
        return replace(state, phase=Phase.STOPPING), [*joining, Wait(policy.grace_s)]
    if told:
        return replace(state, phase=Phase.REGROUPING), [*told, Wait(policy.patience_s)]
    return _stop(policy, state)


def _all_ended(policy: Policy, state: LaunchState) -> Decision:
    code = _exit_code(state)
    can_heal = state.asked is None and code not in (0, TRY_AGAIN) and not state.repeated
    if can_heal and state.restarts < policy.max_restarts:
        return replace(state, phase=Phase.BACKING_OFF), [Wait(policy.pause_s(state.anew))]
    return replace(state, phase=Phase.FINISHED), [Finish(code)]


def _exit_code(state: LaunchState) -> int:
    if state.repeated and state.asked is None:
        # Not the others' codes: they may have gone on without this rank, and have saved. A signal may have ended it.
        return max(1, state.repeated[0].status)
    if state.store_lost and state.asked is None:
        return STORE_LOST
    statuses = {status for rank, status in state.statuses.items() if rank not in state.lost}
    if TRY_AGAIN in statuses and statuses <= {0, TRY_AGAIN}:
        return TRY_AGAIN
    if state.asked is not None:
        return 128 + state.asked  # even if all ended with 0: they may not have finished training
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
        # The second Ctrl-C kills. A second SIGTERM is passed on to the ranks, which then end at once.
        return _kill(state) if event.number == signal.SIGINT else (state, [Send(signal.SIGTERM, state.living)])
    # The exit code does not depend on ranks that were left behind.
    lost = state.lost | (state.left_behind if state.trains else frozenset())
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
