"""Discovery: workers and servers that are ranks find each other, and servers know which workers are there.

    the first worker                          each server, from start to end
    call: training 3 wants servers  ------->  starts a server process
                                    <-------  answer: training 3, addresses of server 0
    all workers connect, and train
    call: training 3 is over        ------->  ends the process, once no worker is connected
    (the workers' processes end)              receives no worker's heartbeat any more: ends

`JobBoard` writes these calls and answers to the job's store, and reads them. `DedicatedServer` carries out the calls on
a rank that is a server. `Attendance` finds out when the workers have ended. With `Agreement`, workers at a sync point
wait until all of them have the same weights.
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
"""Name of the group of heartbeats of workers and servers, see `Membership`."""
_WORKER = "worker"
# Seconds between two readings of the entries in the store.
_LOOK_S = 0.1
# Longest time for which workers of a training that is over may stay connected.
_DRAIN_S = 30.0


class JobBoard:
    """The entries of one job in its store by which workers and servers find each other.

    A call, written by the first worker, asks the servers to start or to end. An answer, written by a server, holds its
    addresses or an error.
    """

    def __init__(self, store: JoinBoard) -> None:
        self._store = store

    def call(self, run: int, num_servers: int, worker_rules: WorkerRules, shelving: Shelving | None = None) -> None:
        """Write the workers' call for servers.

        Args:
            run: Number of the training.
            num_servers: Number of servers that the training wants.
            worker_rules: Rules by which servers treat workers.
            shelving: Folder of snapshots, and how often they are taken. Default: None, servers take no snapshots.
        """
        call = {
            "run": run, "servers": num_servers, "terms": worker_rules.plain(),
            "snapshots": (shelving or Shelving())._asdict(), "over": False,
        }  # fmt: skip
        self._store.write("call", call)

    def dismiss(self, run: int) -> None:
        """Write that training number ``run`` is over, so that its servers end."""
        self._store.write("call", {"run": run, "over": True})

    def answers(self, run: int, num_servers: int, patience: WaitWithLog) -> list[dict[str, Any]]:
        """Wait for the addresses of all servers, and return them.

        Args:
            run: Number of the training.
            num_servers: Number of servers.
            patience: Wait with a limit, and with a log line for each server that has not answered.

        Raises:
            AsyncTrainingError: A server has answered with an error; the message has the server's number and its reason.
            CollectiveTimeout: A server has not answered in time.
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
        """Return a server's answer to the call for training number ``run``, with its ``addresses``.

        The answer is empty if the server has not answered. Raises AsyncTrainingError if the server has answered with an
        error.
        """
        note = self.answered(run, server)
        if "error" in note:
            raise AsyncTrainingError(f"server {server} cannot go on: {note['error']}")
        return note

    def called(self) -> dict[str, Any]:
        """Return the workers' latest call, which asks servers to start or to end; empty if there was no call."""
        return self._store.read("call")

    def answer(self, run: int, server: int, note: Mapping[str, Any]) -> None:
        """Write a server's answer to the call for training number ``run``: its ``addresses``, or an ``error``."""
        self._store.write(f"answer/{run}/{server}", note)

    def answered(self, run: int, server: int) -> dict[str, Any]:
        """Return a server's answer to the call for training number ``run``, with its ``addresses`` or an ``error``.

        The answer is empty if the server has not answered.
        """
        return self._store.read(f"answer/{run}/{server}")


class DedicatedServer:
    """A rank that is a server. It starts a server process for each training of the workers, and ends it afterwards.

    If this rank's process dies, the server processes continue. If the rank is started again, workers continue with the
    same server processes.

    Args:
        board: The job's entries in the store, by which workers and servers find each other.
        number: Number of the server.
        host: Address of this host for workers on other hosts. Default: None, only workers of this host can connect.
    """

    def __init__(self, board: JobBoard, number: int, host: str | None = None) -> None:
        self._board = board
        self.number = number
        self._host = host
        self._own: dict[int, ServerProcess] = {}
        """Server processes, by a descriptor of the supervisor that becomes readable once the supervisor has ended."""
        self._adopted: list[dict[str, Any]] = []
        """Addresses of server processes that an earlier process of this rank has started."""
        self._run: int | None = None
        self._how = ServerStart(WorkerRules())

    @property
    def serves(self) -> bool:
        """Whether a training of the workers is under way, for which this rank has started a server."""
        return self._run is not None

    def follow(self) -> None:
        """Start or end server processes, as the workers' latest call on the board asks.

        Does nothing if the call is carried out already. Raises AsyncTrainingError if a server process cannot be
        started.
        """
        call = self._board.called()
        # Nothing has changed: there is no call, an unknown training is over, or this one is being served.
        if not call or (call["over"] and call["run"] != self._run) or (not call["over"] and call["run"] == self._run):
            return
        self.end()
        if not call["over"] and self.number < call["servers"]:
            self._begin(call)

    def wait(self, woken: int) -> None:
        """Wait for a moment, or until descriptor ``woken`` is readable.

        Replaces each server process whose supervisor has ended meanwhile.
        """
        for descriptor in self._own.keys() & connection.wait([woken, *self._own], _LOOK_S):
            self._restart(descriptor)

    def drain(self, is_enough: Callable[[], bool], woken: int) -> None:
        """Tell the server processes to end once no worker is connected, and wait until they have ended.

        No server process is replaced from then on.

        Args:
            is_enough: Function that returns whether to stop waiting early.
            woken: Descriptor that interrupts the wait when it becomes readable; ``is_enough`` is then called.
        """
        # Copies, because `_let_go` closes the originals.
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
        """End the server processes of a training that is over, once no worker is connected, or after 30 s.

        Server processes that an earlier process of this rank has started are told to end, and are not waited for.
        """
        while self._adopted:
            # An adopted server is no child of this process, so it is told by a message.
            tell_over(dial(self._adopted.pop(), 0, 0))
        self._let_go(lambda server: server.close(_DRAIN_S))

    def fail(self, why: str) -> None:
        """Write ``why`` to the board as this server's error. The server processes end once no worker is connected."""
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
        # An answer that is there already was written by an earlier process of this rank.
        before = self._board.answered(self._run, self.number).get("addresses", [None])
        try:
            # A server that answers was started by an earlier process of this rank, and has its own supervisor.
            self._adopted = [at for at in before if at and answers(at)]
            addresses = [at if at in self._adopted else self._start(at) for at in before]
        except (AsyncTrainingError, OSError) as error:
            self.fail(str(error))
            raise
        self._board.answer(self._run, self.number, {"addresses": addresses})

    def _start(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Start a server process, and return its address.

        Args:
            before: Address of a server process that is gone. The new one takes over this address, and begins with the
                newest snapshot. Without a snapshot, workers learn that the weights are lost. None: there was no server
                process before.
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
    """The heartbeats of a server's workers, which say whether all workers have ended.

    Args:
        beats: Heartbeats of workers and servers.
        num_workers: Number of workers that are expected.
        dead_after_s: Seconds of silence after which a worker is dead.
        now: Clock, in seconds. Default: `time.monotonic`.
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
        """The number of seconds since the last heartbeat of any worker."""
        return self._now() - max(self._seen_at.values(), default=self._began)

    @property
    def came(self) -> int:
        """The number of workers whose heartbeats were ever seen."""
        return len(self._seen_at)

    def over(self) -> bool:
        """Return whether the workers have ended.

        True if all expected workers have joined, and each has left or is silent for too long; or if all workers that
        have joined are silent for too long.
        """
        now = self._now()
        left = {name for name in self._beats.left() if name.startswith(_WORKER)}
        self._seen_at |= {name: self._seen_at.get(name, now) for name in left}
        self._seen_at |= {name: now for name in self._beats.visitors() if name.startswith(_WORKER)}
        # Workers may take long to start.
        if not self.came:
            return False
        if self.silent_s > self._dead_after_s:
            return True
        # Workers that have not come yet may still come, so all of them are counted below.
        gone = left | {name for name, at in self._seen_at.items() if now - at > self._dead_after_s}
        return self.came >= self._num_workers and gone >= self._seen_at.keys()


class WorkerVersion(NamedTuple):
    """The version of a worker's weights, as the worker's headers report it.

    Fields are compared from the first to the last.

    Args:
        restored: `ServerAnswer.restored` of the worker's weights. Default: 0.
        version: Sum of the servers' versions of these weights. Default: 0.
    """

    restored: float = 0.0
    version: float = 0.0


class Agreement(EngineComponent):
    """The engine component that opens a sync point once all workers have the weights of the last push.

    At a sync point, each worker pulls after its last push, and pushes nothing more. The worker that arrives last
    therefore pulls weights that contain all pushes, on every server. Its version is the highest. The others pull until
    they have this version. Equal versions mean weights that are equal to the bit.
    """

    blank = WorkerVersion()

    def __init__(self, control: ControlPlane) -> None:
        self._shared_state = control.shared_state
        self._mine = self._newest = WorkerVersion()
        control.register(self)

    def pulled(self, versions: Sequence[int], restored: int = 0) -> None:
        """Record the versions of the weights that this worker has pulled. Runs on the training thread.

        Args:
            versions: Version of each server's shard.
            restored: `ServerAnswer.restored` of the weights. Default: 0.
        """
        with self._shared_state.changed:
            self._mine = WorkerVersion(float(restored), float(sum(versions)))

    @property
    def behind(self) -> bool:
        """Whether another worker has newer weights. Used on the training thread."""
        with self._shared_state.changed:
            return self._newest > self._mine

    def compose(self) -> WorkerVersion:
        return self._mine

    def is_due(self, parts: Sequence[WorkerVersion]) -> bool:
        with self._shared_state.changed:
            self._newest = max(parts)
        return any(part < self._newest for part in parts)
