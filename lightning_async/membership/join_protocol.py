"""Notes in the store by which live ranks admit a rank that comes back.

    live ranks                       the joining rank
    pin(notice of their run)
                                     read_notice, compare, send heartbeats; see `Membership.visitors`
    invite(rank, to a new run)
                                     read_invitation, and connect with all live ranks, which wait at a sync point
    answer(rank, admitted)
                                     read_answer: it is admitted, or ends, or tries again

`JoinBoard` writes and reads these notes. `JoinBoardWithTimeout` limits the time of each read: if the store's host is
stopped, torch waits in C, beyond every timeout and without handling signals.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from lightning_async._checks import parse_json
from lightning_async._sockets import shut_down
from lightning_async.errors import StoreLost
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import Contact, PrefixStore, Store, TCPStore, base_of, connect, settle

_NOTICE = "notice"
_KEEPERS = "keepers"
T = TypeVar("T")
_LOOK_S = 0.05
_GOODBYE_S = 2.0


class JoinBoard:
    """The board of small, signed notes of JSON values in the store.

    Reading never waits for a note, so threads may share a board.
    """

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store: Any = PrefixStore("lightning_async/door", store)
        self.seal = seal.within("door")

    def pin(self, notice: Mapping[str, Any]) -> None:
        """Publish a notice: the current run, and the values that a joining rank must have in common with it.

        An empty notice says that no rank may join.
        """
        self.write(_NOTICE, notice)

    def read_notice(self) -> dict[str, Any]:
        return self.read(_NOTICE)

    def invite(self, joining_rank: str, invitation: Mapping[str, Any]) -> None:
        self.write(f"invitation/{joining_rank}", invitation)

    def read_invitation(self, joining_rank: str) -> dict[str, Any]:
        return self.read(f"invitation/{joining_rank}")

    def answer(self, joining_rank: str, admitted: bool, again: bool = False) -> None:
        self.write(f"answer/{joining_rank}", {"admitted": admitted, "again": again})

    def read_answer(self, joining_rank: str) -> dict[str, Any]:
        return self.read(f"answer/{joining_rank}")

    def keep_at(self, name: str, note: Mapping[str, Any]) -> None:
        """Publish ``note``, the address of the `PeerStore` of the rank ``name``, which keeps other ranks' state."""
        self.write(f"keeper/{name}", note)
        self._store.append(_KEEPERS, "\n" + self.seal.sign(_KEEPERS, name.encode()).decode() + "\n")

    def keepers(self) -> list[str]:
        lines = self._store.get(_KEEPERS).split(b"\n") if self._store.check([_KEEPERS]) else []
        names = [self.seal.open(_KEEPERS, line) for line in lines if line]
        return sorted({name.decode(errors="replace") for name in names if name is not None})

    def read_keeper(self, name: str) -> dict[str, Any]:
        return self.read(f"keeper/{name}")

    @property
    def host(self) -> tuple[str, int]:
        """The address and port of the store; ``("127.0.0.1", 1)`` for a store in this process without a server."""
        base = base_of(self._store)
        return (base.host, base.port) if isinstance(base, TCPStore) else ("127.0.0.1", 1)

    def connect(self, timeout: timedelta) -> tuple[Store, Callable[[], None]]:
        """Return a client of the store for the calling thread alone, and a function that ends a request that hangs."""
        store, sockets = connect(self._store, timeout)
        return store, lambda: shut_down(sockets)

    def write(self, key: str, note: Mapping[str, Any]) -> None:
        self.write_bytes(key, json.dumps(dict(note)).encode())

    def write_bytes(self, key: str, value: bytes) -> None:
        self._store.set(key, self.seal.sign(key, value))

    def settle(self, key: str, note: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``note``, unless there is one already; return the note that is there, the same on all ranks."""
        return settle(self._store, key, json.dumps(dict(note)).encode(), self.seal, _parse) or {}

    def read_bytes(self, key: str) -> bytes | None:
        return self.seal.open(key, self._store.get(key)) if self._store.check([key]) else None

    def read(self, key: str) -> dict[str, Any]:
        return _parse(self.read_bytes(key)) or {}


def _parse(value: bytes | None) -> dict[str, Any] | None:
    note = parse_json(value)
    return note if isinstance(note, dict) else None


class JoinBoardWithTimeout(JoinBoard):
    """A `JoinBoard` that reads the store on another thread, with a client of its own, so that reading has a time limit.

    ``check`` is called repeatedly while the store is silent, and raises to end the reading. Reading raises StoreLost if
    the store is silent for ``dead_after``, and RuntimeError or ConnectionError if it cannot be reached.
    """

    def __init__(self, door: JoinBoard, rank: int, dead_after: timedelta, check: Callable[[], None]) -> None:
        self._rank = rank
        self._dead_s = dead_after.total_seconds()
        self._check = check
        self._hang_up: Callable[[], None] = lambda: None
        # The client's timeout must not decide: `ask` measures the silence itself.
        self._store, self._hang_up = self.ask(lambda: door.connect(2 * dead_after))
        self.seal = door.seal

    def read_bytes(self, key: str) -> bytes | None:
        read = super().read_bytes
        return self.ask(lambda: read(key))

    def write_bytes(self, key: str, value: bytes) -> None:
        write = super().write_bytes
        self.ask(lambda: write(key, value))

    def ask(self, question: Callable[[], T]) -> T:
        """Return the result of ``question``, which runs on another thread; raise if the store does not answer."""
        answer: Future[T] = Future()
        # The request runs on a thread, because a hanging one cannot be interrupted from Python.
        thread = threading.Thread(target=_answer, args=(question, answer), name="lightning_async asks", daemon=True)
        contact = Contact(time.monotonic(), self._dead_s)
        thread.start()
        try:
            while not wait([answer], _LOOK_S).done:
                self._check()
                if (silence := contact.lost(time.monotonic())) is not None:
                    raise StoreLost(f"rank {self._rank}: {silence}", () if self._rank == 0 else (0,))
        except BaseException:
            # A thread that returns from torch while the interpreter shuts down aborts the process, so the request ends
            # now.
            self._hang_up()
            thread.join(_GOODBYE_S)
            raise
        thread.join()
        return answer.result()


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)
