"""A rank that serves: a server for each training of the workers, from start to end."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from typing import Any

from lightning_async.comm.reach import answers, dial
from lightning_async.engine.server.line import tell_over
from lightning_async.engine.server.process import ServerProcess
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.rendezvous import Board
from lightning_async.engine.server.replacing import Shelving, Start
from lightning_async.errors import AsyncTrainingError

__all__ = ["DedicatedServer"]

_LOOK_S = 0.1
_DRAIN_S = 30.0


class DedicatedServer:
    """Its servers are processes beside it, which outlive it: where it is started again, workers go on with them.

    Args:
        board: of the job.
        number: of this server.
        host: at which workers on other hosts reach it, see `ServerProcess`. Default: on this host only.
    """

    def __init__(self, board: Board, number: int, host: str | None = None) -> None:
        self._board, self.number, self._host = board, number, host
        self._own: dict[int, ServerProcess] = {}
        """By the descriptor of the supervisor's process, readable at its end."""
        self._adopted: list[dict[str, Any]] = []
        """The addresses of those that one before this process has started."""
        self._run: int | None = None
        self._how = Start(Terms())

    @property
    def serves(self) -> bool:
        """Whether a training is under way."""
        return self._run is not None

    def follow(self) -> None:
        """Do what was called for last.

        Raises:
            AsyncTrainingError: the system does not let a server start.
        """
        call = self._board.called()
        if not call or (call["over"] and call["run"] != self._run) or (not call["over"] and call["run"] == self._run):
            return
        self.end()
        if not call["over"] and self.number < call["servers"]:
            self._begin(call)

    def wait(self, woken: int) -> None:
        """Until there may be something to do: `follow` looks.

        Args:
            woken: a descriptor that is readable when there is.
        """
        poll = select.poll()
        for descriptor in (woken, *self._own):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * _LOOK_S):
            if descriptor in self._own:
                self._restart(descriptor)

    def drain(self, is_enough: Callable[[], bool], woken: int) -> None:
        """Serve until nobody is connected any more, or it ``is_enough``; begin nothing new."""
        waited = {os.dup(descriptor) for descriptor in self._own}
        try:
            self._let_go(lambda server: server.leave(0.0))
            while waited and not is_enough():
                poll = select.poll()
                for descriptor in (woken, *waited):
                    poll.register(descriptor, select.POLLIN)
                for descriptor in {found for found, _ in poll.poll(1000 * _LOOK_S)} & waited:
                    waited.remove(descriptor)
                    os.close(descriptor)
        finally:
            for descriptor in waited:
                os.close(descriptor)

    def end(self) -> None:
        """The training is over: end its servers, once nobody is connected any more."""
        while self._adopted:
            tell_over(dial(self._adopted.pop(), 0, 0))
        self._let_go(lambda server: server.close(_DRAIN_S))

    def fail(self, why: str) -> None:
        """This cannot go on. Workers go on with its servers, as long as they last, and then hear why none follows."""
        if self._run is not None:
            self._board.answer(self._run, self.number, {"error": why})
        self._let_go(lambda server: server.leave())

    def _let_go(self, how: Callable[[ServerProcess], Any]) -> None:
        self._run = None
        while self._own:
            descriptor, server = self._own.popitem()
            os.close(descriptor)
            how(server)

    def _begin(self, call: dict[str, Any]) -> None:
        self._run = int(call["run"])
        self._how = Start(Terms(**call["terms"]), self._host, Shelving(**call.get("snapshots", {})))
        before = self._board.answered(self._run, self.number).get("addresses", [None])
        try:
            # Of one that was here before this process: its supervisor sees to it.
            self._adopted = [at for at in before if at and answers(at)]
            told = [at if at in self._adopted else self._start(at) for at in before]
        except (AsyncTrainingError, OSError) as error:
            self.fail(str(error))
            raise
        self._board.answer(self._run, self.number, {"addresses": told})

    def _start(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """The address; in the place of one that has lost its weights, so that it says so to those who look for it, or
        has the newest of its snapshots."""
        if before is None:
            server = self._how.begin(self.number)
        else:
            server = self._how.again(self.number, before)
        self._own[os.pidfd_open(server.supervisor)] = server
        return server.address

    def _restart(self, descriptor: int) -> None:
        server = self._own.pop(descriptor)
        os.close(descriptor)
        server.close()
        self._start(server.address)
