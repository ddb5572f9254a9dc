"""Who died of what, in words."""

from __future__ import annotations

import signal

import pytest

from lightning_async.callbacks.watchdog import HangWatchdog
from lightning_async.launch.process import HUNG, Ending, how, report
from lightning_async.launch.state_machine import TRY_AGAIN
from lightning_async.trainer.loops import preemption


@pytest.mark.parametrize(
    ("status", "told", "text"),
    [
        (0, None, "ended in order after 1.5 s"),
        (3, None, "ended with exit code 3 after 1.5 s"),
        (70, None, "ended with exit code 70 (of a watchdog: it has hung) after 1.5 s"),
        (75, None, "has saved and ended with exit code 75 (preempted) after 1.5 s"),
        (75, 15, "has saved and ended with exit code 75 (preempted) after 1.5 s, told by SIGTERM"),
        (-9, None, "was killed by SIGKILL after 1.5 s (by hand, or by the system for want of memory)"),
        (-9, 9, "was killed by SIGKILL after 1.5 s, by the launcher"),
        (-11, None, "was killed by SIGSEGV after 1.5 s"),
        (-11, 15, "was killed by SIGSEGV after 1.5 s, told by SIGTERM"),
        (-signal.SIGRTMIN - 1, None, f"was killed by signal {signal.SIGRTMIN + 1} after 1.5 s"),
        (1, 2, "ended with exit code 1 after 1.5 s, told by SIGINT"),
    ],
)
def test_the_end_of_a_rank(status: int, told: int | None, text: str):
    assert how(Ending(0, 10, status, 1.52, told)) == text


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "ended with exit code 1 (ValueError: no more) after 1.5 s"),
        (0, "ended in order after 1.5 s"),  # it was caught
        (75, "has saved and ended with exit code 75 (preempted) after 1.5 s"),
        (-11, "was killed by SIGSEGV after 1.5 s"),
    ],
)
def test_an_exception_is_named_where_it_was_the_end(status: int, text: str):
    assert how(Ending(0, 10, status, 1.52, error="ValueError: no more")) == text


def test_a_report_names_all_and_shows_the_first_ones_last_lines():
    endings = [Ending(2, 12, 1, 1.0, None, (b"Traceback", b"\xff")), Ending(0, 10, -15, 1.1, 15, (b"not shown",))]
    assert report(endings, 2, 1).splitlines() == [
        "rank 2 (process 12) ended with exit code 1 after 1.0 s",
        "rank 0 (process 10) was killed by SIGTERM after 1.1 s, by the launcher",
        "the last that rank 2 has written to stderr:",
        "    Traceback",
        "    \N{REPLACEMENT CHARACTER}",
        "exit code 1",
    ]


def test_the_codes_are_those_of_the_callbacks():
    assert HangWatchdog().exit_code == HUNG
    assert preemption.TRY_AGAIN == TRY_AGAIN
