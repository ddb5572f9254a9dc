"""The launcher of a node that is not the first: its ranks are started and told as the first node's launcher decides.

looks for the first node ---> shows that it knows the secret, joins ---> waits for its place ---> has ranks
the connection ends, or nothing is heard on it: the first node is lost, and the store with it. The ranks get SIGTERM,
and shortly after it SIGKILL; nobody is looked for again, so that of two halves of a network one trains at most
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_async.comm.launched import Death
from lightning_async.launch.environment import Job
from lightning_async.launch.loop import Loop
from lightning_async.launch.node import Node, cannot_start
from lightning_async.launch.output import Outputs
from lightning_async.launch.places import Place, Wanted
from lightning_async.launch.state import LEFT, NODE_LOST, STORE_LOST, TRY_AGAIN, Policy
from lightning_async.launch.summary import Ending, signal_name
from lightning_async.launch.wire import UNKNOWN, Wire

__all__ = ["REFUSED", "Agent"]

REFUSED = 2
"""As where the command line is wrong: the first node does not take this one."""
_ENDS_S = 8.0
"""At most, that ranks have to save when the first node is lost: all is over ten seconds after this was noticed."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S, _CONNECTS_S = 0.5, 1.0
_LONGEST_LINE = 1000


class Agent:
    """Starts the ranks of this host as it is told, and sees to their end.

    Args:
        job: what to run here.
        policy: what is asked of the launcher.
        logs: a directory for a file for each rank; None for none.
        wanted: how long to look for the first node.
        address: of it, and the port.
        settings: which have to be the same on all nodes.
    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        logs: Path | None,
        wanted: Wanted,
        address: tuple[str, int],
        settings: Mapping[str, object],
    ) -> None:
        self._job, self._policy, self._logs, self._wanted = job, policy, logs, wanted
        self._address, self._settings = address, dict(settings)
        self._loop = Loop()
        self._outputs = Outputs([])
        self._node: Node | None = None
        self._wire: Wire | None = None
        self._code: int | None = None
        self._lost = False
        self._goes: list[int] | None = None
        """How its ranks have ended since they were told to go, while the others train on; None: they were not."""
        self._until = time.monotonic() + wanted.timeout_s

    def run(self) -> int:
        """Until the job has ended; the exit code."""
        try:
            with self._loop.signals(self._signalled):
                self._outputs.say(f"Looks for the first node at {self._address[0]}, port {self._address[1]}.")
                self._connect()
                try:
                    while self._code is None:
                        self._loop.step(self._outputs)
                except OSError as error:
                    self._leave(f"{error}")
                    raise
                if self._node is not None:
                    self._node.leave()
                else:
                    self._outputs.flush()
            return self._code
        finally:
            if self._wire is not None:
                self._wire.close()
            if self._node is not None:
                self._node.close()
            self._loop.close()

    # ---- the first node ----

    def _connect(self) -> None:
        try:
            channel = socket.create_connection(self._address, _CONNECTS_S)
        except OSError as error:
            self._look_again(str(error))
            return
        self._wire = Wire(self._loop, channel, self._job.secret, False, self._hear, self._unheard)
        self._wire.send("join", host=socket.gethostname(), ranks=self._job.place.ranks, settings=self._settings)

    def _look_again(self, why: str) -> None:
        if time.monotonic() < self._until:
            self._loop.after(_AGAIN_S, (self, "connect"), self._connect)
        else:
            self._end(
                NODE_LOST,
                f"No first node was found at {self._address[0]}, port {self._address[1]} within "
                f"{self._wanted.timeout_s:g} s ({why}): does its launcher run, and is --rdzv the same there?",
            )

    def _unheard(self, why: str) -> None:
        wire, self._wire = self._wire, None
        if wire is None or self._code is not None:
            return
        if wire.known:
            self._lose(why)
        elif why == UNKNOWN:
            self._end(REFUSED, "The first node's secret is another one. Give all nodes the same.")
        else:
            self._look_again(why)

    def _lose(self, why: str) -> None:
        """Nothing is decided any more, and the store is gone: the ranks save and end."""
        self._lost, seconds = True, min(_ENDS_S, self._policy.grace_s)
        self._outputs.say(
            f"The first node is lost ({why}): the ranks of this one have {seconds:g} s to save and to end."
        )
        if self._node is None or not self._node.living:
            self._end(STORE_LOST, f"exit code {STORE_LOST}")
            return
        self._node.send(signal.SIGTERM, self._node.living)
        self._loop.after(seconds, (self, "kill"), lambda: self._end(STORE_LOST, f"exit code {STORE_LOST}"))

    def _leave(self, why: str) -> None:
        """The first node is to know why this one ends."""
        if self._wire is not None:
            self._wire.send("leave", why=why)
            self._wire.conclude(_CONNECTS_S)

    def _end(self, code: int, text: str = "") -> None:
        self._outputs.say(text)
        self._code = code

    def _signalled(self, number: int) -> None:
        if self._wire is not None and self._node is not None:
            self._wire.send("signal", number=number)
        elif number in _ENDS and not self._lost:
            self._end(128 + number, f"{signal_name(number)} has come.")
        elif number == signal.SIGINT:
            self._end(STORE_LOST, f"exit code {STORE_LOST}")  # what lives is killed

    # ---- what it says ----

    def _hear(self, said: dict[str, Any]) -> None:
        try:
            told = self._read(said)
        except (LookupError, TypeError, ValueError) as error:
            if self._wire is not None:
                self._wire.end(f"it has sent what is no message ({type(error).__name__}: {error})")
        else:
            told()

    def _read(self, said: dict[str, Any]) -> Callable[[], object]:
        """What to call because of a message."""
        what = said["what"]
        if what == "say":
            text = str(said["text"])
            return lambda: self._outputs.say(text)
        if what == "refused":
            why = str(said["why"])
            return lambda: self._end(REFUSED, f"The first node does not take this one: {why}.")
        if what == "finish":
            code = int(said["code"])
            return lambda: self._end(code)
        if what == "place":
            job = self._job.at(Place(**said["place"]), str(said["address"]), str(said["job"]))
            return lambda: self._settle(job)
        node = self._node
        if node is None:
            raise ValueError(f"{what!r} before there was a place")
        if what == "start":
            rank, port, attempt, rejoins = (int(said[name]) for name in ("rank", "port", "attempt", "rejoins"))
            if rank not in self._job.place.all:
                raise ValueError(f"rank {rank} is not of this node")
            return lambda: self._start(node, rank, port, attempt, rejoins)
        if what == "prepare":
            wanted = int(said["wanted"])
            return lambda: node.prepare(wanted)
        ranks = [int(rank) for rank in said["ranks"]]
        if what == "go":
            return lambda: self._go(node, ranks)
        if what == "send":
            number = int(said["number"])
            return lambda: node.send(number, ranks)
        if what == "dead":
            rank, process, text = said["death"]
            death = Death(int(rank), int(process), str(text))
            return lambda: node.tell(death, ranks)
        raise ValueError(f"{what!r}")

    def _settle(self, job: Job) -> None:
        """This node has a place, perhaps not the one it had: its ranks have new numbers then."""
        before, self._job = self._job.place, job
        if self._node is not None and (before.first, before.ranks) == (job.place.first, job.place.ranks):
            self._node.at(job)
            return
        self._outputs.flush()
        self._loop.forget_all(self._outputs)
        if self._node is not None:
            self._node.leave()
            self._node.close()
        self._node = node = Node(job, self._policy, self._logs, self._loop, self)
        self._outputs = node.outputs
        self._outputs.say(f"This is node {job.place.node} of {job.place.nodes}, with {_span(job.place)}.")

    def _start(self, node: Node, rank: int, port: int, attempt: int, rejoins: int) -> None:
        try:
            node.start(rank, port, attempt, rejoins)
        except OSError as error:
            self._outputs.say(f"rank {rank} cannot be started: {error}")
            self.ended(cannot_start(rank, error))

    def _go(self, node: Node, going: list[int]) -> None:
        """This node was told to go, and the others train on."""
        if self._goes is None:
            self._goes, seconds = [], self._policy.grace_s
            node.dismiss(going)
            self._loop.after(seconds, (self, "grace"), lambda: node.send(signal.SIGKILL, node.living))
            self._leave_when_done(node)

    def _leave_when_done(self, node: Node) -> None:
        if self._goes is None or node.living:
            return
        if TRY_AGAIN not in self._goes:
            self._depart(self._goes)
            return
        # The others were too few, and all save: the first node says when to end. Else it had yet to join them.
        self._loop.after(self._policy.grace_s, (self, "grace"), lambda ended=self._goes: self._depart(ended))

    def _depart(self, ended: list[int]) -> None:
        code = LEFT if {*ended} <= {0, LEFT, TRY_AGAIN} else 128 + signal.SIGTERM
        self._leave("it was told to go")
        self._end(code, f"This node has left.\nexit code {code}")

    # ---- what is said of the ranks ----

    def started(self, rank: int, pid: int) -> None:
        """See `Hears`."""
        self._say("started", rank=rank, pid=pid)

    def told(self, rank: int, number: int, members: tuple[str, ...]) -> None:
        """See `Hears`."""
        self._say("told", rank=rank, number=number, members=members)

    def ended(self, ending: Ending) -> None:
        """See `Hears`."""
        tail = [line[:_LONGEST_LINE].decode(errors="replace") for line in ending.tail]
        how = {"status": ending.status, "seconds": ending.seconds, "tail": tail, "error": ending.error}
        self._say("ended", rank=ending.rank, pid=ending.pid, **how)
        if self._lost and self._node is not None and not self._node.living:
            self._end(STORE_LOST, f"exit code {STORE_LOST}")
        elif self._goes is not None and self._node is not None:
            self._goes.append(ending.status)
            self._leave_when_done(self._node)

    def unkept(self, how: str) -> None:
        """See `Hears`; the store is with the first node, and another such process stands by."""
        self._outputs.say(f"The process that reads what ranks write when the launcher is killed has ended ({how}).")

    def hung(self, words: str) -> None:
        """See `Hears`; who decides sees it, as the store is there."""

    def _say(self, what: str, **more: object) -> None:
        if self._wire is not None:
            self._wire.send(what, **more)


def _span(place: Place) -> str:
    return f"rank {place.first}" if place.ranks == 1 else f"ranks {place.first} to {place.all[-1]}"
