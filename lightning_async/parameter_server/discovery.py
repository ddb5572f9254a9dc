"""How workers and servers that are ranks find each other, and which workers are there.

the first worker                          each server, from start to end
call: training 3 wants servers  ------->  starts its own
                                <-------  answer: training 3, server 0: they are here
all workers dial, and train
call: training 3 is over        ------->  ends them, once nobody is connected any more
(the workers' processes end)              receives no worker's heartbeat any more: ends

`JobBoard` holds these notes in the store, `DedicatedServer` follows them on a rank that serves, and `Attendance` knows
when its workers have ended. `Agreement` is the workers' component at sync points.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

from lightning_async.comm.p2p_gloo import answers, dial
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import EngineComponent
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.membership import Membership
from lightning_async.membership.startup import WaitWithLog
from lightning_async.parameter_server.client import tell_over
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.process import ServerProcess, ServerStart, Shelving

ROOM = "lightning_async/attendance"
"""Name of the heartbeats of workers and servers, see `Membership`."""
_WORKER = "worker"
_LOOK_S = 0.1
_DRAIN_S = 30.0


class JobBoard:
    """The notes of one job in its store."""

    def __init__(self, store: JoinBoard) -> None:
        self._store = store

    def call(self, run: int, num_servers: int, worker_rules: WorkerRules, shelving: Shelving | None = None) -> None:
        call = {
            "run": run, "servers": num_servers, "terms": worker_rules.plain(),
            "snapshots": (shelving or Shelving())._asdict(), "over": False,
        }  # fmt: skip
        self._store.write("call", call)

    def dismiss(self, run: int) -> None:
        self._store.write("call", {"run": run, "over": True})

    def answers(self, run: int, num_servers: int, patience: WaitWithLog) -> list[dict[str, Any]]:
        """Wait for the addresses of all servers.

        Raises:
            AsyncTrainingError: one of them cannot serve; names it, and says why.
            CollectiveTimeout: one of them has not answered in time.
        """
        notes: dict[int, dict[str, Any]] = {}
        while missing := [server for server in range(num_servers) if server not in notes]:
            for server in missing:
                if note := self.check(run, server):
                    notes[server] = note
            if len(notes) < num_servers:
                patience.wait(lambda: f"waiting for server(s) {missing} of {num_servers}")
        return [address for server in range(num_servers) for address in notes[server]["addresses"]]

    def check(self, run: int, server: int) -> dict[str, Any]:
        """Return a server's answer, empty where there is none; raise AsyncTrainingError where it cannot serve."""
        note = self.answered(run, server)
        if "error" in note:
            raise AsyncTrainingError(f"server {server} cannot go on: {note['error']}")
        return note

    def called(self) -> dict[str, Any]:
        """Return the last call; empty where there was none."""
        return self._store.read("call")

    def answer(self, run: int, server: int, note: Mapping[str, Any]) -> None:
        """Write a server's ``addresses``, or an ``error``."""
        self._store.write(f"answer/{run}/{server}", note)

    def answered(self, run: int, server: int) -> dict[str, Any]:
        """Return a server's answer; empty where there is none."""
        return self._store.read(f"answer/{run}/{server}")


class DedicatedServer:
    """A rank that serves: a server for each training of the workers, from start to end.

    Its servers are processes beside it, which outlive it: where it is started again, workers go on with them.
    """

    def __init__(self, board: JobBoard, number: int, host: str | None = None) -> None:
        self._board = board
        self.number = number
        self._host = host
        self._own: dict[int, ServerProcess] = {}
        """Servers by the descriptor of the supervisor's process, readable at its end."""
        self._adopted: list[dict[str, Any]] = []
        """Addresses of servers that a process before this one has started."""
        self._run: int | None = None
        self._how = ServerStart(WorkerRules())

    @property
    def serves(self) -> bool:
        """Whether a training is under way."""
        return self._run is not None

    def follow(self) -> None:
        """Follow the last call; raise AsyncTrainingError where the system does not let a server start."""
        call = self._board.called()
        if not call or (call["over"] and call["run"] != self._run) or (not call["over"] and call["run"] == self._run):
            return
        self.end()
        if not call["over"] and self.number < call["servers"]:
            self._begin(call)

    def wait(self, woken: int) -> None:
        """Wait for a moment, or until the descriptor ``woken`` is readable; start servers again that have ended."""
        for descriptor in self._own.keys() & connection.wait([woken, *self._own], _LOOK_S):
            self._restart(descriptor)

    def drain(self, is_enough: Callable[[], bool], woken: int) -> None:
        """Serve until no worker is connected, or it ``is_enough``; begin nothing new."""
        waited = {os.dup(descriptor) for descriptor in self._own}
        try:
            self._let_go(lambda server: server.leave(0.0))
            while waited and not is_enough():
                for descriptor in waited.intersection(connection.wait([woken, *waited], _LOOK_S)):
                    waited.remove(descriptor)
                    os.close(descriptor)
        finally:
            for descriptor in waited:
                os.close(descriptor)

    def end(self) -> None:
        """End the servers of a training that is over, once no worker is connected."""
        while self._adopted:
            tell_over(dial(self._adopted.pop(), 0, 0))
        self._let_go(lambda server: server.close(_DRAIN_S))

    def fail(self, why: str) -> None:
        """Give up. Workers go on with its servers as long as they last, and then get this text."""
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
            addresses = [at if at in self._adopted else self._start(at) for at in before]
        except (AsyncTrainingError, OSError) as error:
            self.fail(str(error))
            raise
        self._board.answer(self._run, self.number, {"addresses": addresses})

    def _start(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Start a server and return its address.

        One in the place of a server that is gone has its newest snapshot, or tells workers that the weights are lost.
        """
        server = self._how.begin(self.number) if before is None else self._how.again(self.number, before)
        self._own[os.pidfd_open(server.supervisor)] = server
        return server.address

    def _restart(self, descriptor: int) -> None:
        server = self._own.pop(descriptor)
        os.close(descriptor)
        server.close()
        self._start(server.address)


class Attendance:
    """Heartbeats of the workers of a server, which say whether all have ended.

    Args:
        num_workers: that are to come.
        dead_after_s: seconds of silence after which a worker is dead.
    """

    def __init__(
        self, beats: Membership, num_workers: int, dead_after_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._beats = beats
        self._num_workers = num_workers
        self._dead_after_s = dead_after_s
        self._now = now
        self._seen_at: dict[str, float] = {}
        """Time of each worker's last heartbeat."""
        self._began = now()

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of any worker."""
        return self._now() - max(self._seen_at.values(), default=self._began)

    @property
    def came(self) -> int:
        """Number of workers that have ever been there."""
        return len(self._seen_at)

    def over(self) -> bool:
        """Return whether all have come and ended since, or all that have come are silent."""
        now = self._now()
        left = {name for name in self._beats.left() if name.startswith(_WORKER)}
        self._seen_at |= {name: self._seen_at.get(name, now) for name in left}
        self._seen_at |= {name: now for name in self._beats.visitors() if name.startswith(_WORKER)}
        if not self.came:
            return False
        if self.silent_s > self._dead_after_s:
            return True
        gone = left | {name for name, at in self._seen_at.items() if now - at > self._dead_after_s}
        return self.came >= self._num_workers and gone >= self._seen_at.keys()


class WorkerVersion(NamedTuple):
    """A worker's part of headers, compared in this order: `ServerAnswer.restored`, and the sum of servers' versions."""

    restored: float = 0.0
    version: float = 0.0


class Agreement(EngineComponent):
    """The component by which a sync point opens once all workers have the weights that the last push has made.

    A worker at a sync point has no push under way, and pulls after its last one. So the last one to come has what all
    pushes have made, on every server; it has the highest version, and equal versions are equal bits.
    """

    blank = WorkerVersion()

    def __init__(self, control: ControlPlane) -> None:
        self._shared_state = control.shared_state
        self._mine = self._newest = WorkerVersion()
        control.register(self)

    def pulled(self, versions: Sequence[int], restored: int = 0) -> None:
        """Note the versions that this worker has; on the training thread."""
        with self._shared_state.changed:
            self._mine = WorkerVersion(float(restored), float(sum(versions)))

    @property
    def behind(self) -> bool:
        """Whether another worker has newer weights; on the training thread."""
        with self._shared_state.changed:
            return self._newest > self._mine

    def compose(self) -> WorkerVersion:
        return self._mine

    def is_due(self, parts: Sequence[WorkerVersion]) -> bool:
        with self._shared_state.changed:
            self._newest = max(parts)
        return any(part < self._newest for part in parts)
