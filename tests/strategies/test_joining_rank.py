"""A joining rank that waits to be admitted."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import TCPStore

from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import StoreLost
from lightning_async.membership import startup
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.signing import Seal
from lightning_async.strategies.finished_calls import FinishedCalls
from lightning_async.strategies.joining_rank import JoiningRank
from lightning_async.strategies.rank_mapping import next_call
from lightning_async.trainer.data.epoch_data import EpochAssignment, JoinerData
from lightning_async.trainer.step_runner import StepRunner
from lightning_async.transports.torch import TorchTransport
from tests.membership.test_membership import until


class Waits:
    """A joining rank that joins nobody, in a thread: with a client of the store, as it comes to one.

    Args:
        port: of the store.
        dead_after: seconds.
        notice: of those who train, whom it finds the same as itself.
    """

    def __init__(self, port: int, dead_after: float, notice: dict[str, Any] | None = None) -> None:
        client = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=600), wait_for_workers=False)
        if notice is not None:
            JoinBoard(client, Seal("")).pin({**notice, "call": next_call()})
        looks = self.looks = threading.Event()
        self.trainer = SimpleNamespace(received_sigterm=False)
        self._raised: list[BaseException] = []

        class Transport(TorchTransport):
            def door(self, environment: Any) -> JoinBoard:
                return JoinBoard(client, Seal(""))

            def visit(self, environment: Any, name: str, joining_rank: str, dead_after: timedelta) -> Any:
                return SimpleNamespace(start=lambda: None, close=lambda: None)

        class Same(JoiningRank):
            def _compare(self, notice: dict[str, Any]) -> None: ...

            def _wait(self, look: Callable[[], dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
                def first() -> dict[str, Any]:
                    found = look()
                    looks.set()
                    return found

                return super()._wait(first, *args, **kwargs)

        config = SimpleNamespace(timeouts=Timeouts(dead_after=timedelta(seconds=dead_after)))
        environment = SimpleNamespace(started_as=1)
        strategy: Any = SimpleNamespace(
            transport=Transport(), cluster_environment=environment, config=config, stable_id="1", num_started=2
        )
        strategy.finished_calls = FinishedCalls(strategy)
        self._guest = Same(strategy, self.trainer)
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        try:
            self._guest.join()
        except BaseException as error:
            self._raised.append(error)

    def ends(self) -> BaseException:
        """By this, within a minute."""
        self._thread.join(60.0)
        assert self._raised, "it still waits"
        return self._raised[0]


def test_one_that_waits_hears_that_the_store_is_lost_by_its_error() -> None:
    """As those who train do: a script that ends with it has 69 for its exit code."""
    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    joining = Waits(server.port, dead_after=600.0)
    assert joining.looks.wait(30.0)
    del server
    with pytest.raises(StoreLost, match="rank 1: while it waited to be admitted, the store failed"):
        raise joining.ends()


@contextmanager
def a_store() -> Iterator[tuple[int, int]]:
    """In a process of its own: its number, and the port."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(write, str(server.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(write)
        yield pid, int(os.read(read, 16))
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)  # which ends what hangs
        os.waitpid(pid, 0)


@pytest.mark.processes
@pytest.mark.parametrize("notice", [None, {"room": "a run"}], ids=["nobody", "those who train"])
def test_one_that_waits_does_not_hang_where_the_store_stands_still(notice: dict[str, Any] | None) -> None:
    """Its host has lost its power, or its process is stopped: nothing refuses, and no answer comes."""
    with a_store() as (pid, port):
        joining = Waits(port, dead_after=2.0, notice=notice)
        assert joining.looks.wait(30.0)
        os.kill(pid, signal.SIGSTOP)
        error = joining.ends()
        assert isinstance(error, StoreLost)
        said = re.match(r"rank 1: the store has not answered for ([\d.]+) s", str(error))
        assert said is not None and float(said[1]) >= 2.0  # shorter stalls are waited for


@pytest.mark.processes
def test_one_that_waits_hears_a_signal_while_the_store_stands_still() -> None:
    with a_store() as (pid, port):
        joining = Waits(port, dead_after=600.0)
        assert joining.looks.wait(30.0)
        os.kill(pid, signal.SIGSTOP)
        joining.trainer.received_sigterm = True
        with pytest.raises(SIGTERMException):
            raise joining.ends()


def test_one_that_waits_says_so_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "_FIRST_WARNING_S", 0.01)
    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    joining = Waits(server.port, dead_after=600.0)
    until(lambda: caplog.text.count("waiting to be admitted by the ranks that train. Are there any?") >= 2)
    joining.trainer.received_sigterm = True
    with pytest.raises(SIGTERMException):
        raise joining.ends()


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_strategy_that_does_not_say_whether_it_accumulates_does_so_as_the_loop_does(accumulates: bool) -> None:
    """Then a rank that joins here gets no part of the epoch: gradients of batches are in no step yet."""
    count = SimpleNamespace(ready=3, completed=3)
    loop = SimpleNamespace(
        batch_progress=SimpleNamespace(current=count), done=False, _should_accumulate=lambda: accumulates
    )
    data = SimpleNamespace(flattened=[[1, 2, 3, 4]])
    fit = SimpleNamespace(epoch_loop=loop, _data_fetcher=None, _combined_loader=data)
    strategy: Any = SimpleNamespace(sync_points=None, step_runner=StepRunner())
    trainer = SimpleNamespace(fit_loop=fit, current_epoch=0, strategy=strategy)
    rates: Any = SimpleNamespace(stepped={})
    epoch = EpochAssignment(trainer)
    epoch.known = True
    _, _, is_within, *_ = JoinerData(epoch, rates).place("0", comes=False)
    assert is_within is not accumulates
