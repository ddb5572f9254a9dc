"""Who ends an operation: its transport, by itself or when it is polled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from lightning_async.comm.collectives import Operation, Where
from lightning_async.errors import CollectiveError
from lightning_async.membership.generation import at_start

LIMIT = timedelta(seconds=60)


def operation(poll: Callable[[], None], told: bool) -> Operation[str]:
    made: Operation[str] = Operation(Where("a", at_start("a", 0, 1, None)), "all_reduce", 1, LIMIT, lambda error: None)
    made.poll, made.poll_s, made.told = poll, 0.001, told
    return made


def test_one_that_its_transport_completes_is_not_polled() -> None:
    polls: list[int] = []
    made = operation(lambda: polls.append(1), told=True)
    made.poll_s = LIMIT.total_seconds()
    threading.Thread(target=made.complete, args=("here",)).start()
    assert made.wait(LIMIT) and made.result() == "here"
    assert polls == []


@pytest.mark.parametrize("told", [False, True])
def test_one_is_polled_until_it_ends(told: bool) -> None:
    made: Any = None
    polls: list[int] = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 3:
            made.complete("here")
        elif len(polls) > 3:
            made.fail(CollectiveError("polled once more"))

    made = operation(poll, told)
    assert made.wait(LIMIT) and made.result() == "here"
    assert len(polls) == 3


def test_a_librarys_error_is_told_without_places_in_its_source() -> None:
    made = operation(lambda: None, told=True)
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:59049\n#0"
    said = str(made.failure(RuntimeError(gloo)))
    assert "Connection closed by peer [::1]:59049. " in said
    assert "pair.cc" not in said and "#0" not in said
