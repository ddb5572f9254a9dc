"""What the launcher decides: tables of what happens, and of what is to be done."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from lightning_async.launch.state_machine import (
    STORE_LOST,
    TRY_AGAIN,
    Action,
    Due,
    Ended,
    Event,
    Finish,
    LaunchState,
    Phase,
    Policy,
    Send,
    Signalled,
    StartRanks,
    StoreEnded,
    Wait,
    begin,
    decide,
)
from lightning_async.membership.launcher_channel import Failure

TERM, INT, HUP, KILL, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGUSR1
PLAIN = Policy(ranks=3, grace_s=30.0, patience_s=5.0)
AGAIN = replace(PLAIN, max_restarts=2)
ALL = frozenset({0, 1, 2})


def run(policy: Policy, *events: Event) -> tuple[LaunchState, list[list[Action]]]:
    """The state after the events, and what was to be done after each."""
    state, actions = begin(policy)
    assert actions == [StartRanks(policy.all)]
    taken = []
    for event in events:
        state, actions = decide(policy, state, event)
        taken.append(actions)
    return state, taken


def all_end(*statuses: int) -> list[Event]:
    return [Ended(rank, status) for rank, status in enumerate(statuses)]


def told(number: int, at: float = 0.0) -> Event:
    return Signalled(number, at)


def term(*ranks: int, seconds: float) -> list[Action]:
    return [Send(TERM, frozenset(ranks)), Wait(seconds)]


@pytest.mark.parametrize(
    ("policy", "events", "code"),
    [
        pytest.param(PLAIN, all_end(0, 0, 0), 0, id="all in order"),
        pytest.param(PLAIN, all_end(3, -TERM, -TERM), 3, id="the first that died counts"),
        pytest.param(PLAIN, all_end(0, -KILL, 1), 137, id="a signal is 128 and its number"),
        pytest.param(PLAIN, all_end(70, 1, 1), 70, id="the watchdog of hangs"),
        pytest.param(PLAIN, all_end(75, 75, 75), TRY_AGAIN, id="preempted"),
        pytest.param(PLAIN, all_end(75, 0, 75), TRY_AGAIN, id="preempted, one was done"),
        pytest.param(PLAIN, all_end(75, 1, 75), TRY_AGAIN, id="preempted, and one has failed at it"),
        pytest.param(AGAIN, all_end(75, 75, 75), TRY_AGAIN, id="the machine goes: no restart"),
        pytest.param(PLAIN, [told(TERM), *all_end(75, 75, 75)], TRY_AGAIN, id="told to end, all have saved"),
        pytest.param(PLAIN, [told(TERM), *all_end(0, 0, 0)], 143, id="told to end: nobody knows whether all was done"),
        pytest.param(PLAIN, [told(TERM), *all_end(75, 1, 75)], 143, id="told to end, one has not saved"),
        pytest.param(PLAIN, [told(INT), *all_end(1, 1, 1)], 130, id="Ctrl-C"),
        pytest.param(PLAIN, [told(HUP), *all_end(-TERM, 75, 75)], 129, id="the terminal is gone"),
        pytest.param(AGAIN, [told(TERM), *all_end(-TERM, -TERM, -TERM)], 143, id="told to end: no restart"),
        pytest.param(PLAIN, [StoreEnded(), *all_end(1, -TERM, -TERM)], STORE_LOST, id="the store is lost"),
        pytest.param(PLAIN, [StoreEnded(), *all_end(75, 75, 75)], STORE_LOST, id="the store is lost, all have saved"),
    ],
)
def test_exit_codes(policy: Policy, events: list[Any], code: int):
    state, taken = run(policy, *events)
    assert taken[-1] == [Finish(code)]
    assert state.phase is Phase.FINISHED
    assert decide(policy, state, told(TERM, 100.0)) == (state, [])


@pytest.mark.parametrize(
    ("events", "action"),
    [
        pytest.param([Ended(1, 0)], [], id="one is done, the others go on"),
        pytest.param([Ended(1, 1)], term(0, 2, seconds=5.0), id="a death ends the others"),
        pytest.param([Ended(0, 0), Ended(1, -KILL)], term(2, seconds=5.0), id="a death ends those that are left"),
        pytest.param([Ended(1, 1), Ended(2, 1)], [], id="the second death changes nothing"),
        pytest.param([Ended(1, TRY_AGAIN)], [Wait(30.0)], id="preempted: a SIGTERM would end those that still save"),
        pytest.param([Ended(1, 1), Due()], [Send(KILL, frozenset({0, 2})), Wait(10.0)], id="patience is over"),
        pytest.param([told(TERM)], term(0, 1, 2, seconds=30.0), id="SIGTERM goes on"),
        pytest.param([told(HUP)], term(0, 1, 2, seconds=30.0), id="a terminal that is gone is a SIGTERM"),
        pytest.param([told(INT)], [Send(INT, ALL), Wait(30.0)], id="Ctrl-C goes on"),
        pytest.param([told(TERM), Due()], [Send(KILL, ALL), Wait(10.0)], id="the grace is over"),
        pytest.param([told(USR1)], [Send(USR1, ALL)], id="others go on and change nothing"),
        pytest.param([told(TERM), told(USR1, 5.0)], [Send(USR1, ALL)], id="also while all end"),
        pytest.param([told(INT), told(INT, 0.1)], [], id="the same, once more at once: `timeout` sends two"),
        pytest.param([told(INT), told(INT, 1.0)], [Send(KILL, ALL), Wait(10.0)], id="the second Ctrl-C kills"),
        pytest.param([told(TERM), told(INT, 1.0)], [Send(KILL, ALL), Wait(10.0)], id="Ctrl-C after SIGTERM, too"),
        pytest.param([told(TERM), told(TERM, 1.0)], [Send(TERM, ALL)], id="the second SIGTERM goes on"),
        pytest.param([Ended(1, 1), told(TERM, 1.0)], [], id="the others have a SIGTERM already"),
        pytest.param([told(TERM), Ended(1, 1)], [], id="told to end: a death sends nothing more"),
        pytest.param([StoreEnded()], term(0, 1, 2, seconds=30.0), id="without a store ranks save and end"),
        pytest.param([Ended(1, 1), StoreEnded()], [], id="the store is lost while all end"),
        pytest.param([told(TERM), Due(), Due()], [Finish(143)], id="what cannot be killed is left alone"),
        pytest.param([Ended(1, 3), Due(), Due()], [Finish(3)], id="the same after a death"),
        pytest.param([Due()], [], id="a deadline that nobody has set"),
    ],
)
def test_what_follows(events: list[Any], action: list[Action]):
    _, taken = run(PLAIN, *events)
    assert taken[-1] == action


def test_all_start_again_after_growing_pauses_until_there_were_enough():
    events = [*all_end(1, -TERM, -TERM), Due()] * 2 + all_end(-KILL, -TERM, -TERM)
    state, taken = run(AGAIN, *events)
    assert [actions for actions in taken if actions not in ([], term(1, 2, seconds=5.0))] == [
        [Wait(1.0)], [StartRanks(ALL)], [Wait(2.0)], [StartRanks(ALL)], [Finish(137)],
    ]  # fmt: skip
    assert state.restarts == 2
    assert state.first == 0


def test_a_new_start_knows_nothing_of_the_one_before():
    state, _ = run(AGAIN, StoreEnded(), *all_end(1, -TERM, -TERM), Due())
    assert state == LaunchState(living=ALL, restarts=1, anew=1)


def test_an_exception_that_repeats_ends_the_job():
    bad = Failure("ValueError: bad", epoch=0, batch=4, samples=[36, 37])
    moved = bad._replace(batch=9, samples=[37, 99])
    others = [bad._replace(text="KeyError: 3"), moved._replace(samples=[99]), bad._replace(batch=5, samples=[])]
    others += [bad._replace(epoch=1), moved._replace(epoch=7)]
    for failure, ends in [(bad, True), (moved, True), *((other, False) for other in others)]:
        _, taken = run(AGAIN, Ended(1, 1, bad), *all_end(-TERM, 0, -TERM)[::2], Due(), Ended(1, 1, failure))
        assert taken[-1] == term(0, 2, seconds=30.0 if ends else 5.0)
    same_batch = bad._replace(samples=[])
    for rank, last in [(1, Finish(1)), (0, Wait(2.0))]:
        first, second = Ended(1, 1, same_batch), Ended(rank, 1, same_batch)
        rest = [Ended(other, -TERM) for other in sorted(ALL - {rank})]
        _, taken = run(AGAIN, first, Ended(0, -TERM), Ended(2, -TERM), Due(), second, *rest)
        assert taken[-1] == [last]
    for status in (1, -TERM):
        _, taken = run(AGAIN, Ended(1, 1, bad), Ended(2, status, moved), Ended(0, TRY_AGAIN))
        assert taken[-1] == [Finish(1)]


@pytest.mark.parametrize("status", [TRY_AGAIN, 3, -TERM])
def test_a_repeat_ends_with_its_own_code(status: int):
    bad = Failure("ValueError: bad", epoch=0, batch=4, samples=[36, 37])
    other = Failure("KeyError: 3", epoch=1, batch=1, samples=[5])
    state, taken = run(AGAIN, Ended(1, 1, bad), Ended(2, 9, bad), Ended(0, status, other))
    assert taken[-1] == [Finish(9)]
    assert state.repeated == (Ended(2, 9, bad), Ended(1, 1, bad))


def test_an_end_with_75_is_no_repeat():
    bad = Failure("ValueError: bad", epoch=0, batch=4, samples=[36, 37])
    _, taken = run(AGAIN, Ended(1, TRY_AGAIN, bad), Ended(2, TRY_AGAIN, bad), Ended(0, TRY_AGAIN, bad))
    assert taken[-1] == [Finish(TRY_AGAIN)]


def test_failures_of_earlier_epochs_are_forgotten():
    failures = [Failure("ValueError: bad", epoch, batch=4) for epoch in (0, 2, 1)]
    rest = [Ended(0, -TERM), Ended(2, -TERM), Due()]
    events = [event for failure in failures for event in (Ended(1, 1, failure), *rest)]
    state, _ = run(replace(AGAIN, max_restarts=9), *events)
    assert [failure.epoch for _, failure in state.failures] == [2, 1]


def test_pauses_grow_to_a_minute():
    assert [PLAIN.pause_s(n) for n in (0, 1, 2, 5, 6, 7, 10_000)] == [1, 2, 4, 32, 60, 60, 60]


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_told_to_end_between_two_starts(number: int):
    _, taken = run(AGAIN, *all_end(1, 1, 1), told(number))
    assert taken[-1] == [Finish(128 + number)]


def test_another_signal_between_two_starts_has_nobody_to_go_to():
    _, taken = run(AGAIN, *all_end(1, 1, 1), told(USR1))
    assert taken[-1] == []


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("ranks", 0, ValueError),
        ("ranks", 2.0, TypeError),
        ("max_restarts", -1, ValueError),
        ("grace_s", -1.0, ValueError),
        ("grace_s", float("nan"), ValueError),
        ("patience_s", "5", TypeError),
    ],
)
def test_wrong_arguments_are_named(argument: str, value: Any, error: type[Exception]):
    with pytest.raises(error, match=rf"`Policy\({argument}="):
        Policy(**{"ranks": 2, argument: value})
