"""What is to be done when something happens: pure functions from a state and an event to a state and what to do.

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
from dataclasses import replace

from lightning_async.launch.state import (
    STORE_LOST,
    TRY_AGAIN,
    Action,
    Announce,
    Ended,
    Event,
    Finish,
    Phase,
    Policy,
    Rejoin,
    Send,
    Signalled,
    Start,
    State,
    StoreLost,
    Told,
    Wait,
)

__all__ = ["begin", "decide"]

_SAME_S = 0.2
"""Launchers send a signal to a process and to its group: what comes so soon after the first is no second one."""
_KILLED_S = 10.0
"""What lives so long after SIGKILL is left alone."""
_STOPS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
"""Signals that end the job, and what the ranks get of them."""

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
    if isinstance(event, Told):
        return _told(policy, state, event)
    if isinstance(event, Signalled):
        return _signalled(policy, state, event)
    if isinstance(event, StoreLost):
        return _store_lost(policy, state)
    return _due(policy, state) if event.rank is None else _pause_is_over(state, event.rank)


def _due(policy: Policy, state: State) -> Decision:
    if state.phase is Phase.BACKING_OFF:
        again = State(living=policy.all, restarts=state.restarts + 1, anew=state.anew + 1)
        return again, [Start(policy.all)]
    if state.phase is Phase.RUNNING:  # the others have gone on since
        return state, []
    if state.phase is Phase.REGROUPING:
        return _stop(policy, state)
    if state.killed:  # it waits for a disk or a device that does not answer: the system keeps it until then
        return replace(state, phase=Phase.FINISHED), [Finish(_exit_code(state))]
    return _kill(state)


def _stop(policy: Policy, state: State) -> Decision:
    return replace(state, phase=Phase.STOPPING), [Send(signal.SIGTERM, state.living), Wait(policy.patience_s)]


def _kill(state: State) -> Decision:
    return replace(state, killed=True), [Send(signal.SIGKILL, state.living), Wait(_KILLED_S)]


def _told(policy: Policy, state: State, event: Told) -> Decision:
    if event.rank in state.living & state.lost and not event.generation.members:  # it serves those who train, again
        in_vain = {rank: times for rank, times in state.in_vain.items() if rank != event.rank}
        return replace(state, lost=state.lost - {event.rank}, in_vain=in_vain), []
    if event.rank not in state.living or event.rank not in event.generation.members:
        return state, []
    state = _without_the_lost(replace(state, told={**state.told, event.rank: event.generation}))
    return _bring_back(policy, state)


def _without_the_lost(state: State) -> State:
    """Who has died is lost, once the others go on; too late when they have been told to end because of it."""
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


def _bring_back(policy: Policy, state: State) -> Decision:
    """Those that are lost are started again, each after a pause of its own."""
    actions: list[Action] = []
    for rank in sorted(state.lost - state.living - state.pausing):
        ended = state.statuses[rank] in (0, TRY_AGAIN)  # it had nothing to join, or was told to go
        used_up = state.restarts + len(state.pausing) >= policy.max_restarts
        if ended or used_up or state.phase is not Phase.RUNNING:
            continue
        before, rejoins = state.in_vain.get(rank, 0), {**state.rejoins, rank: state.rejoins.get(rank, 0) + 1}
        in_vain = {**state.in_vain, rank: before + 1}
        state = replace(state, rejoins=rejoins, in_vain=in_vain, pausing=state.pausing | {rank})
        actions.append(Wait(policy.pause_alone_s(before), rank))
    return state, actions


def _pause_is_over(state: State, rank: int) -> Decision:
    if rank not in state.pausing or not state.trains:
        return state, []
    told = {other: generation for other, generation in state.told.items() if other != rank}
    statuses = {other: status for other, status in state.statuses.items() if other != rank}
    living, pausing, restarts = state.living | {rank}, state.pausing - {rank}, state.restarts + 1
    state = replace(state, living=living, pausing=pausing, told=told, statuses=statuses, restarts=restarts)
    return state, [Rejoin(rank, state.rejoins[rank])]


def _ended(policy: Policy, state: State, event: Ended) -> Decision:
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


def _all_ended(policy: Policy, state: State) -> Decision:
    code = _exit_code(state)
    again = state.asked is None and code not in (0, TRY_AGAIN) and state.restarts < policy.max_restarts
    if again:
        return replace(state, phase=Phase.BACKING_OFF), [Wait(policy.pause_s(state.anew))]
    return replace(state, phase=Phase.FINISHED), [Finish(code)]


def _exit_code(state: State) -> int:
    """Of the launcher, when all ranks have ended."""
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


def _signalled(policy: Policy, state: State, event: Signalled) -> Decision:
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


def _store_lost(policy: Policy, state: State) -> Decision:
    if not state.trains:
        return state, []
    state = replace(state, phase=Phase.STOPPING, store_lost=True)
    return state, [Send(signal.SIGTERM, state.living), Wait(policy.grace_s)]
