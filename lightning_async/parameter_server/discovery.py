"""Where workers and servers that are ranks find each other, and who of the workers is there.

the first worker                          each server, from start to end
call: training 3 wants servers  ------->  starts its own
                                <-------  answer: training 3, server 0: they are here
all workers dial, and train
call: training 3 is over        ------->  ends them, once nobody is connected any more
(the workers' processes end)              hears no worker any more: ends

`JobBoard` holds these notes in the store, `DedicatedServer` follows them on a rank that serves, and `Attendance` knows
when its workers have ended. `Agreement` is the workers' part in sync points: they open once all have pulled what the
last push has made.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from lightning_async.comm.p2p_gloo import answers, dial
from lightning_async.engine.buckets import Message
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.shared_state import Header
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.startup import WaitWithLog
from lightning_async.parameter_server.client import tell_over
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.process import ServerProcess, ServerStart, Shelving

ROOM = "lightning_async/attendance"
"""Where workers and servers beat, by names of their own, see `Membership`."""
_WORKER = "worker"
_LOOK_S = 0.1
_DRAIN_S = 30.0


class JobBoard:
    """The notes of one job.

    Args:
        door: the job's board in the store.
    """

    def __init__(self, door: JoinBoard) -> None:
        self._door = door

    # ---- the workers ----

    def call(self, run: int, num_servers: int, worker_rules: WorkerRules, shelving: Shelving | None = None) -> None:
        """Call for so many servers for this run, by these rules; with snapshots, where ``shelving`` says so."""
        numbers = {"run": run, "servers": num_servers}
        kept = (shelving or Shelving())._asdict()
        self._door.write("call", {**numbers, "terms": worker_rules.plain(), "snapshots": kept, "over": False})

    def dismiss(self, run: int) -> None:
        """Note that this run is over."""
        self._door.write("call", {"run": run, "over": True})

    def answers(self, run: int, num_servers: int, patience: WaitWithLog) -> list[dict[str, Any]]:
        """Wait for the addresses of all servers.

        Raises:
            AsyncTrainingError: one of them cannot serve; names it, and says why.
            CollectiveTimeout: one of them has not answered in time.
        """
        told: dict[int, dict[str, Any]] = {}
        while missing := [server for server in range(num_servers) if server not in told]:
            for server in missing:
                if note := self.check(run, server):
                    told[server] = note
            if len(told) < num_servers:
                patience.wait(lambda: f"waiting for server(s) {missing} of {num_servers}")
        return [address for server in range(num_servers) for address in told[server]["addresses"]]

    def check(self, run: int, server: int) -> dict[str, Any]:
        """Return what a server has answered; empty where it has not.

        Raises:
            AsyncTrainingError: that it cannot serve.
        """
        note = self.answered(run, server)
        if "error" in note:
            raise AsyncTrainingError(f"server {server} cannot go on: {note['error']}")
        return note

    # ---- a server ----

    def called(self) -> dict[str, Any]:
        """Return the last call; empty where there was none."""
        return self._door.read("call")

    def answer(self, run: int, server: int, note: Mapping[str, Any]) -> None:
        """Write a server's ``addresses``, or an ``error``."""
        self._door.write(f"answer/{run}/{server}", note)

    def answered(self, run: int, server: int) -> dict[str, Any]:
        """Return what a server has answered; empty where it has not."""
        return self._door.read(f"answer/{run}/{server}")


class DedicatedServer:
    """A rank that serves: a server for each training of the workers, from start to end.

    Its servers are processes beside it, which outlive it: where it is started again, workers go on with them.

    Args:
        board: of the job.
        number: of this server.
        host: at which workers on other hosts reach it, see `ServerProcess`. Default: on this host only.
    """

    def __init__(self, board: JobBoard, number: int, host: str | None = None) -> None:
        self._board = board
        self.number = number
        self._host = host
        self._own: dict[int, ServerProcess] = {}
        """By the descriptor of the supervisor's process, readable at its end."""
        self._adopted: list[dict[str, Any]] = []
        """The addresses of those that one before this process has started."""
        self._run: int | None = None
        self._how = ServerStart(WorkerRules())

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
        """Wait until there may be something to do: `follow` looks.

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
        """End the servers of a training that is over, once nobody is connected any more."""
        while self._adopted:
            tell_over(dial(self._adopted.pop(), 0, 0))
        self._let_go(lambda server: server.close(_DRAIN_S))

    def fail(self, why: str) -> None:
        """Give up. Workers go on with its servers, as long as they last, and then hear why none follows."""
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
        self._how = ServerStart(WorkerRules(**call["terms"]), self._host, Shelving(**call.get("snapshots", {})))
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
        """Start a server and return its address; in the place of one that has lost its weights, so that it says so to
        those who look for it, or has the newest of its snapshots."""
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


class Attendance:
    """What a process has heard of the workers that it serves: whether they have ended.

    Args:
        beats: of all that are there.
        num_workers: that are to come.
        dead_after_s: who says nothing for so long has died.
        now: seconds. Default: the system's clock.
    """

    def __init__(
        self, beats: Beats, num_workers: int, dead_after_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._beats = beats
        self._num_workers = num_workers
        self._dead_after_s = dead_after_s
        self._now = now
        self._heard: dict[str, float] = {}
        """Of each worker that ever was there, when it last was."""
        self._began = now()

    @property
    def silent_s(self) -> float:
        """For how long no worker has been there."""
        return self._now() - max(self._heard.values(), default=self._began)

    @property
    def came(self) -> int:
        """Workers that ever were there."""
        return len(self._heard)

    def over(self) -> bool:
        """Return whether all have come, and ended since; or some, and nobody was heard of for too long."""
        now = self._now()
        left = {name for name in self._beats.left() if name.startswith(_WORKER)}
        self._heard |= {name: self._heard.get(name, now) for name in left}
        self._heard |= {name: now for name in self._beats.visitors() if name.startswith(_WORKER)}
        if not self.came:
            return False
        if self.silent_s > self._dead_after_s:
            return True
        gone = left | {name for name, at in self._heard.items() if now - at > self._dead_after_s}
        return self.came >= self._num_workers and gone >= self._heard.keys()


class Beats(Protocol):
    """The part of a `Membership` that `Attendance` reads."""

    def visitors(self) -> Iterable[str]: ...

    def left(self) -> Iterable[str]: ...


def joining_rank_name(role: str, number: int, restarts: int = 0) -> str:
    """Return the name by which a process beats there.

    >>> joining_rank_name("server", 1)
    'server-1.0'
    """
    return f"{role}-{number}.{restarts}"


class WorkerVersion(NamedTuple):
    """A worker's part of headers.

    Args:
        restored: grows whenever a server has begun with a snapshot, see `ServerAnswer`: what was before is no newer
            then, whatever its version.
        version: of the weights that it has, the sum over all servers.
    """

    restored: float = 0.0
    version: float = 0.0


class Agreement:
    """An `EngineComponent` that moves nothing itself: weights come from the servers.

    Whoever comes to a sync point has no push under way, and pulls after its last one. So the last of them has what all
    pushes have made, on every server; it is the one with the highest version, and who has the same has the same bits.
    Where a server has lost what it had and begun with a snapshot, versions that are lost with it count no more.

    Args:
        control: the control plane; this registers with it.
    """

    blank = WorkerVersion()

    def __init__(self, control: ControlPlane) -> None:
        self._shared_state = control.shared_state
        self._mine = self._newest = WorkerVersion()
        control.register(self)

    # ---- the training thread ----

    def pulled(self, versions: Sequence[int], restored: int = 0) -> None:
        """Note that this worker has these weights now."""
        with self._shared_state.changed:
            self._mine = WorkerVersion(float(restored), float(sum(versions)))

    @property
    def behind(self) -> bool:
        """Whether another worker has said that it has newer weights."""
        with self._shared_state.changed:
            return self._newest > self._mine

    # ---- the engine's thread, see `EngineComponent` ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> WorkerVersion:
        return self._mine

    def complete(self, part: WorkerVersion, message: Message | None, compare: bool) -> WorkerVersion:
        return part

    def is_due(self, parts: Sequence[WorkerVersion]) -> bool:
        """Return whether weights are to be pulled before a sync point can open."""
        with self._shared_state.changed:
            self._newest = max(parts)
        return any(part < self._newest for part in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[WorkerVersion]) -> None: ...

    def settle(self, headers: Sequence[Header], parts: Sequence[WorkerVersion]) -> tuple[bool, Any]:
        return True, None

    def opened(self, here: bool) -> None: ...

    def drop(self) -> None: ...
