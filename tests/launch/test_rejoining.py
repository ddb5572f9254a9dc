"""What the launcher decides of a rank that is started again alone: a table of what happens, and of what follows."""

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
    Event,
    Finish,
    LaunchState,
    Phase,
    Policy,
    Rejoin,
    Send,
    Signalled,
    StartRanks,
    StoreEnded,
    Wait,
    begin,
    decide,
)
from tests.launch.test_reconfiguring import ALL, FIRST, dies, done, tell

TERM = signal.SIGTERM
ONCE = Policy(ranks=3, max_restarts=1, grace_s=30.0, patience_s=5.0)
OFTEN = replace(ONCE, max_restarts=9)


def run(policy: Policy, *steps: list[Event]) -> tuple[LaunchState, list[Action]]:
    """The state after all, and what was to be done after the last event."""
    state, actions = begin(policy)
    for event in [event for step in steps for event in step]:
        state, actions = decide(policy, state, event)
    return state, actions


def pause_is_over(rank: int) -> list[Event]:
    return [Due(rank)]


LOST = [FIRST, dies(2), tell(1, 0, 1)]
BACK = [*LOST, pause_is_over(2)]
JOINED = [*BACK, tell(2, 0, 1, 2)]
SERVES = [*BACK, tell(0, by=(2,))]


@pytest.mark.parametrize(
    ("steps", "actions"),
    [
        pytest.param([FIRST, dies(2)], [Announce(2, frozenset({0, 1})), Wait(5.0)], id="not before the others go on"),
        pytest.param(LOST, [Wait(0.1, 2)], id="they do"),
        pytest.param([FIRST, tell(1, 0, 1), dies(2)], [Announce(2, frozenset({0, 1})), Wait(0.1, 2)], id="they did"),
        pytest.param(BACK, [Rejoin(2, 1)], id="the pause is over"),
        pytest.param([*LOST, dies(1), pause_is_over(2)], [Rejoin(2, 1)], id="while another one is missed"),
        pytest.param(
            [*BACK, dies(2, 1)], [Announce(2, frozenset({0, 1})), Wait(1.0, 2)], id="it fails before it joins"
        ),
        pytest.param([*BACK, done(2)], [], id="it found nothing to join"),
        pytest.param([*BACK, done(2, status=75)], [Announce(2, frozenset({0, 1}))], id="it was told to go"),
        pytest.param([*JOINED, dies(2), tell(3, 0, 1)], [Wait(0.1, 2)], id="it dies after it has joined"),
        pytest.param([*JOINED, dies(0), tell(3, 1, 2)], [Wait(0.1, 0)], id="another one does: its pause is its own"),
        pytest.param([FIRST, dies(2), dies(0), tell(1, 1)], [Wait(0.1, 0), Wait(0.1, 2)], id="two at once"),
        pytest.param([*BACK, done(0, 1)], [Send(TERM, frozenset({2})), Wait(30.0)], id="the others are done"),
        pytest.param([*BACK, done(0), dies(1)], [Send(TERM, frozenset({2})), Wait(30.0)], id="or dead"),
        pytest.param([*BACK, done(0, status=75)], [Send(TERM, frozenset({2})), Wait(30.0)], id="the others save"),
        pytest.param([*BACK, [Signalled(TERM, 0.0)]], [Send(TERM, ALL), Wait(30.0)], id="told to end"),
        pytest.param([*BACK, [StoreEnded()]], [Send(TERM, ALL), Wait(30.0)], id="the store is lost"),
        pytest.param([*BACK, dies(0), [Due()]], [Send(TERM, frozenset({1, 2})), Wait(5.0)], id="they do not go on"),
        pytest.param([*LOST, [Signalled(TERM, 0.0)], pause_is_over(2)], [], id="told to end before its pause is over"),
        pytest.param([*LOST, [StoreEnded()], pause_is_over(2)], [], id="the store is lost before"),
        pytest.param([*LOST, pause_is_over(1)], [], id="nobody is paused"),
        pytest.param([*LOST, done(0, 1)], [Finish(0)], id="the others are done before its pause is over"),
        pytest.param([*SERVES, done(0, 1)], [], id="one that serves the others hears by itself that they are done"),
        pytest.param([*SERVES, dies(2)], [Announce(2, frozenset({0, 1})), Wait(0.1, 2)], id="it dies once more"),
    ],
)
def test_what_follows(steps: list[list[Event]], actions: list[Action]):
    assert run(OFTEN, *steps)[1] == actions


def test_without_restarts_it_stays_lost():
    assert run(Policy(ranks=3), *LOST)[1] == []
    state, actions = run(ONCE, *JOINED, dies(2), tell(3, 0, 1))
    assert (state.phase, state.lost, state.restarts, actions) == (Phase.RUNNING, {2}, 1, [])
    assert run(ONCE, *JOINED, dies(2), tell(3, 0, 1), done(0, 1))[1] == [Finish(0)]


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        pytest.param(BACK, {2}, id="it lives, and has not joined"),
        pytest.param([*BACK, tell(2, 0, 1, 2, by=(0, 1))], {2}, id="it has not said so itself"),
        pytest.param([*BACK, tell(2, 0, 1, 2, by=(2, 0))], {2}, id="not all others have"),
        pytest.param([*BACK, tell(2, 0, 1, 2, by=(2,))], {2}, id="it says so alone"),
        pytest.param([*BACK, tell(9, 2)], {2}, id="it trains alone, whatever it says"),
        pytest.param([*BACK, tell(9, 2), tell(2, 0, 1), dies(1), tell(3, 0)], {1, 2}, id="which changes nothing else"),
        pytest.param(JOINED, set(), id="all say so"),
        pytest.param(SERVES, set(), id="it is in no generation, and serves"),
        pytest.param([*BACK, tell(2, 0, 1, 2, by=(2, 1, 0))], set(), id="in another order"),
        pytest.param([*JOINED, dies(2), tell(3, 0, 1)], {2}, id="it dies again"),
        pytest.param([*BACK, tell(2, 0, 1, 2, by=(0, 1)), dies(2)], {2}, id="it dies when the others have taken it in"),
        pytest.param(
            [*BACK, tell(2, 0, 1, 2, by=(2,)), dies(2), pause_is_over(2), tell(2, 0, 1, 2, by=(0, 1))], {2},
            id="what it told in an earlier life is void",
        ),
        pytest.param([*JOINED, dies(0), tell(3, 1, 2), pause_is_over(0), tell(4, 0, 1, 2)], set(), id="two in turn"),
    ],
)  # fmt: skip
def test_who_is_lost(steps: list[list[Event]], lost: set[int]):
    state, _ = run(OFTEN, *steps)
    assert (state.phase, state.lost) == (Phase.RUNNING, lost)
    for _ in range(2):  # those that train, then those that do not
        for rank in sorted(state.living - state.lost or state.living):
            state, actions = decide(OFTEN, state, *done(rank))
    assert actions == [Finish(0)]  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        pytest.param([*BACK, done(0, 1), done(2, status=-TERM)], 0, id="the others are done"),
        pytest.param([*BACK, done(0, 1), done(2, status=3)], 0, id="and how it has ended is nothing to them"),
        pytest.param([*BACK, done(0, 1), [Due(), Due()]], 0, id="nor when"),
        pytest.param([*BACK, done(0, 1, status=75), done(2, status=-TERM)], TRY_AGAIN, id="the others are preempted"),
        pytest.param([*BACK, [Signalled(TERM, 0.0)], done(0, 1, status=75), done(2, status=1)], TRY_AGAIN, id="told"),
        pytest.param([*BACK, [StoreEnded()], done(0, 1, status=75), done(2, status=1)], STORE_LOST, id="no store"),
        pytest.param([*BACK, dies(0, 3), dies(1, 4), done(2, status=-TERM)], 3, id="the others die"),
        pytest.param([*JOINED, done(2), done(0), done(1)], 0, id="it has joined, and is done"),
        pytest.param([*SERVES, done(0, 1), done(2)], 0, id="it has served, and is done"),
        pytest.param([*JOINED, dies(2, 7), done(0, 1)], 7, id="it has joined and dies, and the others do not go on"),
    ],
)
def test_exit_codes(steps: list[list[Event]], code: int):
    state, actions = run(ONCE, *steps)
    assert (state.phase, actions) == (Phase.FINISHED, [Finish(code)])


def test_all_start_again_when_the_others_die_as_long_as_restarts_are_left():
    dead = [*BACK, dies(0, 3), dies(1, 4)]
    state, actions = run(OFTEN, *dead)
    assert actions == [Send(TERM, frozenset({2})), Wait(30.0)]
    state, actions = run(OFTEN, *dead, done(2, status=-TERM))
    assert (state.phase, actions) == (Phase.BACKING_OFF, [Wait(1.0)])  # those of single ranks went well
    state, actions = decide(OFTEN, state, Due())
    assert (state, actions) == (LaunchState(living=ALL, restarts=2, anew=1), [StartRanks(ALL)])
    assert decide(OFTEN, state, Due(2)) == (state, [])


def test_words_say_that_all_are_there_again():
    endings = [Ending(0, 10, -9, 1.0), Ending(0, 12, 0, 2.0), Ending(1, 11, 0, 3.0)]
    assert report(endings, None, 0).splitlines()[1:] == [
        "rank 0 (process 12) ended in order after 2.0 s",
        "rank 1 (process 11) ended in order after 3.0 s",
        "2 of 2 ranks have ended in order",
        "exit code 0",
    ]


def test_words_say_who_was_started_again():
    killed = [Ending(2, 12, -9, 1.0, None, (b"its first",)), Ending(2, 13, 3, 2.0, None, (b"its last",))]
    assert report([*killed, Ending(1, 11, 0, 3.0)], None, 0, {2}).splitlines() == [
        "rank 2 (process 12) was killed by SIGKILL after 1.0 s (by hand, or by the system for want of memory); "
        "it was started again",
        "rank 2 (process 13) ended with exit code 3 after 2.0 s; training went on without it",
        "rank 1 (process 11) ended in order after 3.0 s",
        "the last that rank 2 has written to stderr:",
        "    its last",
        "1 of 2 ranks have ended in order",
        "exit code 0",
    ]
