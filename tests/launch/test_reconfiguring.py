"""What the launcher decides when ranks die and others go on: a table of what happens, and of what it comes to."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from lightning_async.launch.process import Ending, report
from lightning_async.launch.state_machine import (
    STORE_LOST,
    TRY_AGAIN,
    Action,
    Announce,
    Due,
    Ended,
    Event,
    Finish,
    LaunchGeneration,
    LaunchState,
    Phase,
    Policy,
    RankReported,
    Send,
    Signalled,
    StartRanks,
    StoreEnded,
    Wait,
    begin,
    decide,
)

TERM, KILL = signal.SIGTERM, signal.SIGKILL
PLAIN = Policy(ranks=3, grace_s=30.0, patience_s=5.0)
AGAIN = replace(PLAIN, max_restarts=1)
ALL = frozenset({0, 1, 2})


def tell(number: int, *members: int, by: tuple[int, ...] | None = None) -> list[Event]:
    """These ranks, or all members, tell that they are in this generation."""
    return [
        RankReported(rank, LaunchGeneration(number, frozenset(members))) for rank in (members if by is None else by)
    ]


def dies(rank: int, status: int = -KILL) -> list[Event]:
    return [Ended(rank, status)]


def done(*ranks: int, status: int = 0) -> list[Event]:
    return [Ended(rank, status) for rank in ranks]


def run(policy: Policy, *steps: list[Event]) -> tuple[LaunchState, list[Action]]:
    """The state after all, and what was to be done after the last event."""
    state, actions = begin(policy)
    for event in [event for step in steps for event in step]:
        state, actions = decide(policy, state, event)
    return state, actions


FIRST = tell(0, 0, 1, 2)
TOLD_TO_END: list[Event] = [Signalled(TERM, 0.0)]
DUE: list[Event] = [Due()]


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_the_others_are_waited_for_and_go_on(dead: int):
    left = sorted(ALL - {dead})
    state, actions = run(PLAIN, FIRST, dies(dead))
    assert actions == [Announce(dead, frozenset(left)), Wait(5.0)]
    assert state.phase is Phase.REGROUPING
    state, actions = run(PLAIN, FIRST, dies(dead), tell(1, *left, by=(left[0],)))
    assert state.phase is Phase.REGROUPING  # the other may still do something else
    state, actions = run(PLAIN, FIRST, dies(dead), tell(1, *left))
    assert (state.phase, state.lost, actions) == (Phase.RUNNING, {dead}, [])
    assert decide(PLAIN, state, Due()) == (state, [])  # what was waited for has happened
    state, actions = run(PLAIN, FIRST, dies(dead), tell(1, *left), DUE, done(*left))
    assert actions == [Finish(0)]


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        pytest.param([FIRST, dies(2), tell(1, 0, 1)], {2}, id="told after the death was heard"),
        pytest.param([FIRST, tell(1, 0, 1), dies(2)], {2}, id="told before"),
        pytest.param([FIRST, tell(1, 0, 1, by=(0,)), dies(2), tell(1, 0, 1, by=(1,))], {2}, id="told around it"),
        pytest.param([FIRST, dies(2), tell(1, 0, 1), dies(0), tell(2, 1)], {0, 2}, id="two in turn"),
        pytest.param([FIRST, dies(2), dies(0), tell(1, 1)], {0, 2}, id="two at once"),
        pytest.param([FIRST, dies(2), tell(1, 0, 1, by=(0,)), dies(0), tell(2, 1)], {0, 2}, id="one while regrouping"),
        pytest.param(
            [FIRST, dies(2), tell(1, 0, 1, by=(0,)), dies(0), tell(1, 1)], {0, 2}, id="what the dead told is void"
        ),
        pytest.param([FIRST, done(0), dies(2), tell(1, 1)], {2}, id="one was done before"),
        pytest.param([FIRST, dies(2), tell(1, 0, 1, by=(0,)), done(0), tell(1, 0, 1, by=(1,))], {2}, id="one is done"),
        pytest.param([FIRST, dies(2), done(0), tell(1, 1)], {2}, id="one is done meanwhile"),
        pytest.param([tell(0, 0, 1, 2, by=(0,)), dies(2), tell(1, 0, 1)], {2}, id="not all had told the first"),
        pytest.param([FIRST, tell(1, 0, 1), dies(2, 1)], {2}, id="one that was left behind, and ends because of it"),
        pytest.param([FIRST, dies(2), tell(1, 0), dies(1, 1)], {1, 2}, id="which ends because of it"),
        pytest.param([tell(7, 0, 1, 2), tell(0, 0, 1, 2), dies(2), tell(1, 0, 1)], {2}, id="another fit counts anew"),
    ],
)
def test_who_is_lost(steps: list[list[Event]], lost: set[int]):
    state, _ = run(PLAIN, *steps)
    assert (state.phase, state.lost, state.first) == (Phase.RUNNING, lost, None)
    state, actions = run(PLAIN, *steps, done(*state.living))
    assert actions == [Finish(0)]
    assert state.lost == lost


STOPPED = [FIRST, tell(1, 0, 1)]
"""Rank 2 is stopped, and the others have gone on without it."""
ENDS = [Send(TERM, frozenset({2})), Wait(30.0)]


@pytest.mark.parametrize(
    ("steps", "actions", "lost"),
    [
        pytest.param([], [], set(), id="while others train it may wake, and end by itself"),
        pytest.param([done(0)], [], set(), id="one of them is done"),
        pytest.param([done(0, 1)], ENDS, {2}, id="all others are done"),
        pytest.param([done(1, 0)], ENDS, {2}, id="in another order"),
        pytest.param([dies(1), tell(2, 0), done(0)], ENDS, {1, 2}, id="one has died, the last one is done"),
        pytest.param([done(0, status=75)], ENDS, {2}, id="the others save: it is not waited for any longer"),
        pytest.param([done(0, 1), DUE], [Send(KILL, frozenset({2})), Wait(10.0)], {2}, id="it does not end"),
        pytest.param([TOLD_TO_END], [Send(TERM, ALL), Wait(30.0)], {2}, id="told to end"),
        pytest.param([tell(2, 0), done(0)], [Send(TERM, frozenset({1, 2})), Wait(30.0)], {1, 2}, id="two of them"),
        pytest.param([tell(2, 0, 1, 2), done(0, 1)], [], set(), id="it is among them again: its script goes on"),
        pytest.param([tell(2, 0, 1, 2, by=(0,)), done(0)], [], set(), id="not all say the same"),
    ],
)
def test_who_is_left_behind_is_not_waited_for(steps: list[list[Event]], actions: list[Action], lost: set[int]):
    state, taken = run(PLAIN, *STOPPED, *steps)
    assert (taken, state.lost) == (actions, lost)


def test_who_has_never_trained_with_the_others_is_not_left_behind():
    """A rank that serves them is in none of their generations, and ends by itself."""
    assert run(PLAIN, tell(0, 0, 1), tell(1, 0), dies(1), done(0))[1] == []


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="nobody has told anything"),
        pytest.param([FIRST, dies(2)], id="nobody goes on"),
        pytest.param([FIRST, dies(2), tell(1, 0, 1, 2, by=(0, 1))], id="they count on the dead"),
        pytest.param([FIRST, dies(2), tell(1, 0, 1, by=(0,))], id="one does not go on"),
        pytest.param([FIRST, tell(1, 0), tell(1, 1), dies(2)], id="they do not agree"),
        pytest.param([FIRST, dies(2), tell(1, 1, by=(0,)), tell(1, 0, by=(1,))], id="each speaks of the other"),
    ],
)
def test_who_does_not_go_on_in_time_ends(steps: list[list[Event]]):
    state, _ = run(PLAIN, *steps)
    if steps:
        assert state.phase is Phase.REGROUPING
        state, actions = decide(PLAIN, state, Due())
        assert actions == [Send(TERM, frozenset({0, 1})), Wait(5.0)]
        for late in tell(5, 0, 1):
            state, actions = decide(PLAIN, state, late)
        assert (state.phase, state.lost, actions) == (Phase.STOPPING, frozenset(), [])
        for end in done(0, 1):
            state, actions = decide(PLAIN, state, end)
        assert actions == [Finish(137)]
    else:
        _, actions = run(PLAIN, dies(2))
        assert actions == [Send(TERM, frozenset({0, 1})), Wait(5.0)]


def test_each_death_is_given_its_time():
    _, actions = run(PLAIN, FIRST, dies(2), dies(0, 1))
    assert actions == [Announce(0, frozenset({1})), Wait(5.0)]


LOST = [FIRST, dies(2), tell(1, 0, 1)]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        pytest.param([*LOST, dies(0, 3), done(1, status=4)], 3, id="the survivors fail, the first of them counts"),
        pytest.param([*LOST, dies(0), done(1)], 137, id="one dies, the other is done without going on"),
        pytest.param([FIRST, dies(2), done(0, 1, status=1)], 137, id="the survivors fail at once"),
        pytest.param([FIRST, dies(2), done(0, 1)], 137, id="nobody has told how it went on"),
        pytest.param([*LOST, dies(0), dies(1)], 137, id="all die"),
        pytest.param([*LOST, done(0, 1, status=75)], TRY_AGAIN, id="those that live are preempted"),
        pytest.param([*LOST, TOLD_TO_END, done(0, 1, status=75)], TRY_AGAIN, id="told to end, those that live save"),
        pytest.param([*LOST, TOLD_TO_END, done(0, 1)], 143, id="told to end, and nobody knows"),
        pytest.param([*LOST, TOLD_TO_END, dies(0), done(1, status=75)], 143, id="told to end, one has not saved"),
        pytest.param(
            [FIRST, dies(2), TOLD_TO_END, tell(1, 0, 1), done(0, 1, status=75)], TRY_AGAIN, id="told while regrouping"
        ),
        pytest.param([FIRST, dies(2), TOLD_TO_END, done(0, 1, status=75)], 143, id="told, and they do not regroup"),
        pytest.param([*LOST, [StoreEnded()], done(0, 1, status=75)], STORE_LOST, id="the store is lost"),
        pytest.param([FIRST, dies(2), [StoreEnded()], done(0, 1)], STORE_LOST, id="the store is lost while regrouping"),
        pytest.param([*LOST, tell(2, 0), done(0), dies(1)], 0, id="who was left behind ends when the others are done"),
        pytest.param([*STOPPED, done(0, 1), DUE, dies(2)], 0, id="or is killed"),
        pytest.param([*STOPPED, done(0, 1), DUE, DUE], 0, id="or cannot be"),
        pytest.param([*STOPPED, done(0, 1, status=75), dies(2)], TRY_AGAIN, id="the others are preempted"),
        pytest.param([*STOPPED, TOLD_TO_END, done(0, 1, status=75), DUE, dies(2)], TRY_AGAIN, id="told, they save"),
        pytest.param(
            [FIRST, dies(1), TOLD_TO_END, tell(1, 0), done(0, status=75), DUE, dies(2)],
            TRY_AGAIN,
            id="told while regrouping, and one is left behind",
        ),
        pytest.param([*STOPPED, done(0), dies(1, 3), DUE, dies(2)], 3, id="the last of the others fails"),
        pytest.param([FIRST, *[done(rank) for rank in (0, 1)], dies(2)], 137, id="one dies when the others are done"),
    ],
)
def test_exit_codes(steps: list[list[Event]], code: int):
    state, actions = run(PLAIN, *steps)
    assert (state.phase, actions) == (Phase.FINISHED, [Finish(code)])


@pytest.mark.parametrize(
    ("steps", "actions"),
    [
        pytest.param([*LOST, TOLD_TO_END], [Send(TERM, frozenset({0, 1})), Wait(30.0)], id="told to end"),
        pytest.param([FIRST, dies(2), TOLD_TO_END], [Send(TERM, frozenset({0, 1})), Wait(30.0)], id="regrouping"),
        pytest.param([*LOST, dies(0, 75)], [Wait(30.0)], id="preempted"),
        pytest.param([FIRST, dies(2), dies(0, 75)], [Wait(30.0)], id="preempted while regrouping"),
        pytest.param([FIRST, dies(2, 75)], [Wait(30.0)], id="preempted: all save together"),
        pytest.param([*LOST, dies(0)], [Announce(0, frozenset({1})), Wait(5.0)], id="the next one dies"),
        pytest.param([FIRST, tell(1, 0, 1), dies(2)], [Announce(2, frozenset({0, 1}))], id="they have gone on before"),
        pytest.param(
            [FIRST, tell(1, 0, 1, by=(0,)), dies(2)], [Announce(2, frozenset({0, 1})), Wait(5.0)], id="one of them has"
        ),
        pytest.param([*LOST, [StoreEnded()]], [Send(TERM, frozenset({0, 1})), Wait(30.0)], id="the store is lost"),
        pytest.param(
            [*LOST, [RankReported(1, LaunchGeneration(9, frozenset({0})))]], [], id="of others one tells nothing"
        ),
        pytest.param([*LOST, dies(0), [*DUE, *DUE]], [Send(KILL, frozenset({1})), Wait(10.0)], id="patience is over"),
    ],
)
def test_what_follows(steps: list[list[Event]], actions: list[Action]):
    assert run(PLAIN, *steps)[1] == actions


def test_a_restart_begins_with_all_and_knows_of_nobody_lost():
    state, actions = run(AGAIN, *LOST, done(0, 1, status=1))
    assert (state.phase, actions) == (Phase.BACKING_OFF, [Wait(1.0)])
    state, actions = decide(AGAIN, state, Due())
    assert (state, actions) == (LaunchState(living=ALL, restarts=1, anew=1), [StartRanks(ALL)])
    assert decide(AGAIN, state, Ended(2, 1))[1] == [Send(TERM, frozenset({0, 1})), Wait(5.0)]


def test_a_job_that_goes_on_with_nobody_lost_is_not_changed_by_what_is_told():
    state, actions = run(PLAIN, FIRST, tell(1, 0, 1), tell(2, 0, 1, 2))
    assert (state.phase, state.lost, actions) == (Phase.RUNNING, frozenset(), [])


def test_words_say_who_is_lost_and_of_what():
    lost = [Ending(2, 12, -9, 1.0, None, (b"its last",)), Ending(0, 10, 3, 2.0)]
    assert report(lost, None, None).splitlines() == [
        "rank 2 (process 12) was killed by SIGKILL after 1.0 s (by hand, or by the system for want of memory)",
        "rank 0 (process 10) ended with exit code 3 after 2.0 s",
    ]
    assert report([*lost, Ending(1, 11, 0, 3.0)], None, 0, {0, 2}).splitlines() == [
        "rank 2 (process 12) was killed by SIGKILL after 1.0 s (by hand, or by the system for want of memory); "
        "training went on without it",
        "rank 0 (process 10) ended with exit code 3 after 2.0 s; training went on without it",
        "rank 1 (process 11) ended in order after 3.0 s",
        "the last that rank 2 has written to stderr:",
        "    its last",
        "1 of 3 ranks have ended in order",
        "exit code 0",
    ]
