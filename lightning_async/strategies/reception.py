"""Those who train connect with a newcomer beside training, on a thread of each rank, before they stand still for it.

    waits for guests --(one beats)--> invites it (rank 0), or finds the invitation --> all connect, and form all groups
           ^                                                                                  |
           |<--(somebody does not come, is lost, or fails: it is answered, and released)------|
           |                                                                                  v
           '<-----------------(the same, until it is taken)-------------------------- ready, calls to a gate --> taken

A guest is prepared once: one that could not be comes again by another name.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning_async.comm.membership.door import Door
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout
from lightning_async.events import tell
from lightning_async.strategies.connecting import Connected, Ready, connect, release
from lightning_async.strategies.survivors import next_run, run_name
from lightning_async.transports.transport import Connection

__all__ = ["Reception", "for_life", "tell_failed"]

log = logging.getLogger(__name__)
_LOOK_S, _END_S = 0.02, 5.0


def for_life(guest: str) -> str:
    """What a guest was called when it was started."""
    return guest.partition(".")[0]


def tell_failed(rank: int, guest: str, why: str) -> None:
    """A newcomer could not be taken in."""
    words = f"Rank {rank}: rank {for_life(guest)} could not be taken in, and training goes on without: {why}"
    tell("join_failed", logging.WARNING, words, rank=rank)


class Reception:
    """Of one run; closed by `close`.

    Args:
        strategy: of a rank that trains.
        door: where newcomers ask.
        most: so many replicas there may be.
        on_coming: called when one is about to come, before all connect, on that thread.
        on_ready: called when a newcomer can be taken, on a thread of its own.
    """

    def __init__(
        self, strategy: Connected, door: Door, most: int, on_coming: Callable[[], None], on_ready: Callable[[], None]
    ) -> None:
        assert strategy.connection is not None
        self._strategy, self._door, self._most = strategy, door, most
        self._on_coming, self._on_ready = on_coming, on_ready
        self._connection = strategy.connection
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: set[str] = set()
        """Those that have been prepared, whatever became of them."""
        self._ready: Ready | None = None
        self._held = False
        """All are about to agree on who is ready."""
        self._making: Connection | None = None

    def look(self) -> None:
        """Something is new among those who train, or wait: from any thread, and never blocks."""
        with self._lock:
            if self._thread is None and (self._broken() or self._waiting()):
                self._thread = threading.Thread(target=self._run, name="lightning_async reception", daemon=True)
                self._thread.start()

    def hold(self) -> Ready | None:
        """Who can be taken by this rank, if all others can, too: that stays so until `take` or `let_go`, whoever is
        lost meanwhile. None for nobody yet."""
        with self._lock:
            self._held = self._ready is not None and not self._broken()
            return self._ready if self._held else None

    def let_go(self) -> None:
        """Others cannot take it, or cannot yet."""
        with self._lock:
            self._held = False
        self.look()

    def take(self) -> None:
        """Who was held is the caller's now."""
        with self._lock:
            self._ready, self._held = None, False

    def answer(self, guest: str, admitted: bool, again: bool = False) -> None:
        """Without a word a newcomer ends: it is not to train alone what the others train without it."""
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.answer(guest, admitted, again)

    def drop(self, ready: Ready, why: str) -> None:
        """Who was taken cannot stay: it is released beside training."""
        threading.Thread(target=release, args=(ready.connection, why), name="lightning_async goodbye").start()
        self.look()

    def close(self) -> None:
        """Nobody is prepared any more."""
        self._ends.set()
        with self._lock:
            thread, making, ready, self._ready = self._thread, self._making, self._ready, None
        if making is not None:
            making.root.close()
            making.payload.close()
        if ready is not None:
            self._send_again(ready.guest)
            release(ready.connection, "training has ended, or begins anew")
        if thread is not None:
            thread.join(_END_S)

    # ---- under the lock ----

    def _waiting(self) -> list[str]:
        """Those who wait, and are not taken for one who is there; nobody while one is ready."""
        survivors = self._strategy.survivors
        if self._ends.is_set() or self._ready is not None or survivors is None:
            return []
        waiting = self._connection.membership.guests() if survivors.generation.world_size < self._most else ()
        return [guest for guest in waiting if guest not in self._seen and for_life(guest) not in survivors.names]

    def _broken(self) -> bool:
        """Whether who is ready cannot be taken, as somebody is lost."""
        try:
            if self._ready is not None and not self._held:
                self._ready.connection.membership.check()
                self._check_names(self._ready.names)
        except AsyncTrainingError:
            return True
        return False

    def _check_names(self, names: Sequence[str]) -> None:
        there = () if self._strategy.survivors is None else self._strategy.survivors.names
        if tuple(names[:-1]) != there:
            lost = ", ".join({*names[:-1]} - {*there})
            raise CollectiveTimeout(f"Meanwhile rank(s) {lost} were lost.")

    # ---- on a thread of its own ----

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception(
                "Who waits to join was not looked at; the next change among the ranks has it looked at again."
            )
            with self._lock:
                self._thread = None

    def _serve(self) -> None:
        while True:
            with self._lock:
                broken, waiting = self._ready if self._broken() else None, self._waiting()
                if broken is not None:
                    self._ready = None
                elif not waiting:
                    self._thread = None
                    return
            if broken is not None:
                self._refuse(broken.guest, "a rank was lost before it could be taken in")
                release(broken.connection, "a rank was lost")
            elif (found := self._invitation(waiting)) is None:
                self._ends.wait(_LOOK_S)
            elif self._prepare(*found):
                self._on_ready()

    def _invitation(self, waiting: list[str]) -> tuple[str, dict[str, Any]] | None:
        """Of one of these: rank 0 decides of whom, one by one, as what becomes of one is nothing to another."""
        survivors = self._strategy.survivors
        assert survivors is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            if survivors.generation.rank == 0:
                guest, run = waiting[0], next_run()
                names = [*survivors.names, for_life(guest)]
                place = {"run": run, "room": f"{run_name(run)}.{guest}", "rank": len(names) - 1, "names": names}
                place |= {"started": survivors.started, "ever": sorted(survivors.ever)}
                self._door.invite(guest, place)
                return guest, place
            return next(((guest, place) for guest in waiting if (place := self._door.read_invitation(guest))), None)
        return None

    def _prepare(self, guest: str, place: dict[str, Any]) -> bool:
        survivors, membership = self._strategy.survivors, self._connection.membership
        assert survivors is not None
        self._seen.add(guest)

        def check() -> None:
            membership.check()
            self._check_names(place["names"])
            if guest not in membership.guests() and guest not in membership.left():
                raise CollectiveTimeout(f"{guest} is gone.")
            if self._ends.is_set() or self._door.read_answer(guest):
                raise CollectiveError("Training has ended, or another rank could not.")

        def made(connection: Connection) -> None:
            self._making = connection
            check()

        try:
            check()
            self._on_coming()
            ready = connect(self._strategy, survivors.generation.rank, guest, place, check, made)
        except Exception as error:
            self._refuse(guest, f"{type(error).__name__}: {error}")
            return False
        finally:
            self._making = None
        with self._lock:
            if not self._ends.is_set():
                self._ready = ready
                ready.connection.membership.on_change = self.look
                return True
        self._send_again(guest)
        release(ready.connection, "training has ended, or begins anew")
        return False

    def _refuse(self, guest: str, why: str) -> None:
        self._send_again(guest)
        survivors = self._strategy.survivors
        if self._ends.is_set() or survivors is None:
            return
        tell_failed(survivors.generation.rank, guest, why)

    def _send_again(self, guest: str) -> None:
        """It is to come again; told before it hears that its connection is gone."""
        self.answer(guest, admitted=False, again=True)
