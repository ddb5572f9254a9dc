"""The heartbeats' place in the store: the records of all ranks, and the decisions on generations.

Where ranks may join, their names lie beside the records, a line each, which is only ever appended to.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from lightning_async._sockets import own_address, shut_down
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.failure_detector import FAILED, LEFT, PREFIX, UP, Record, dump, key, load
from lightning_async.membership.generation import in_order, is_name
from lightning_async.membership.process_liveness import LocalProcessWatch
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import Store, connect, own_client, reachable, read_all

_LOOKS = 5
_NAMES = f"{PREFIX}/names/all"  # no name has a slash, so no record lies here
_PROBE = timedelta(seconds=2)


class Waiting(Exception):
    """Raised where it is too early to ask a store again that did not answer in time."""


class HeartbeatStore:
    """The records of all ranks, through one client that is kept for as long as it works.

    Every new client costs the store's server time, in which it answers nobody (it looks up the client's name). So one
    that is slow is waited for; when that fails, the pauses between attempts grow, and differ between ranks. ``names``
    are all ranks known at the start; where it is ``elastic`` others may join.
    """

    def __init__(
        self,
        store: Store,
        me: str,
        names: Iterable[str],
        seal: Seal,
        patience: timedelta,
        elastic: bool = False,
    ) -> None:
        self._store = store
        self._me = me
        self._seal = seal
        self._patience = patience
        self._elastic = elastic
        self._peers = [name for name in names if name != me]
        self._sockets: dict[int, int] = {}
        self._broken = False
        self._timeouts = 0
        self._next_try = 0.0
        self._neighbours = LocalProcessWatch()
        self._host: str | None = None  # this one's address, as the store's host sees it

    def open(self, interval: timedelta) -> bool:
        """Make a client, and a record for each rank that has none; return whether this name has had a life before.

        Raises:
            AsyncTrainingError: another process lives under this name.
            RuntimeError, ConnectionError: the store is out of reach.
        """
        if not reachable(self._store, self._patience):
            raise ConnectionError("connection refused")  # else torch tries for as long as a request may block
        self._connect()
        self._make_room([self._me, *self._peers])
        if self._elastic:
            self._store.compare_set(_NAMES, "", "\n")  # type: ignore[arg-type]
        found = self._read([self._me])[0]
        for _ in range(_LOOKS):
            if found is None or found.state != UP:
                break
            threading.Event().wait(interval.total_seconds())
            again = self._read([self._me])[0]
            if again is not None and again != found:
                raise AsyncTrainingError(
                    f"rank {self._me} is taken: {again.life} lives under it, and goes on. Were two processes given "
                    "the same rank, or do two jobs use one address and port (MASTER_ADDR, MASTER_PORT)?"
                )
        return found is not None and found.life != ""

    def exchange(self, mine: Record) -> dict[str, Record | None]:
        """Publish the own record, and read the others', those that have joined too; None for what is no record.

        For a peer of this host whose process has ended it says so, to all, in its place.

        Raises:
            Waiting: it is too early for another attempt.
            RuntimeError, OSError: the store is out of reach.
        """
        if self._broken:
            self._reconnect()
        asked = time.monotonic()
        try:
            pinned = dump(self._neighbours.introduce(mine, self._host))
            self._store.set(key(self._me), self._seal.sign(key(self._me), pinned))  # type: ignore[arg-type]
            records = self._read_with_names() if self._elastic else self._read(self._peers)
            found = dict(zip(self._peers, records, strict=True))
            for name in self._neighbours.gone(found):
                found[name] = self._speak_for(name, found[name])
        except (RuntimeError, OSError):
            # Not to be used again: a late answer to a request given up would be taken for the next one's.
            self._broken = True
            self._pause(time.monotonic() - asked)
            raise
        self._timeouts = 0
        return found

    def decide(self, wanted: int, proposal: Sequence[str] | None) -> tuple[str, ...] | None:
        name = f"{PREFIX}/generation/{wanted}"
        if proposal is not None:
            mine = self._seal.sign(name, json.dumps(list(proposal)).encode())
            value: bytes = self._store.compare_set(name, "", mine)  # type: ignore[arg-type, assignment]
            if (members := self._members(name, value)) is None:  # a stranger's
                members = self._members(name, self._store.compare_set(name, value, mine))  # type: ignore[arg-type]
            return members
        return self._members(name, self._store.get(name)) if self._store.check([name]) else None

    def report(self, name: str, text: str) -> None:
        client = own_client(self._store, self._patience)  # this may be another thread
        value = self._seal.open(key(name), client.get(key(name)))
        record = (None if value is None else load(value)) or Record()
        if record.state not in (LEFT, FAILED):
            record = replace(record, state=FAILED, text=text)
            client.set(key(name), self._seal.sign(key(name), dump(record)))  # type: ignore[arg-type]

    def close(self) -> None:
        self._neighbours.close()

    def hang_up(self) -> None:
        """End a request that hangs; any thread may call it. No other request is possible then."""
        shut_down(self._sockets)

    def _speak_for(self, name: str, record: Record | None) -> Record:
        """Publish a dead rank's end in its last record, and return it; a newer record is returned instead:
        since the records were read the rank may have said goodbye and ended, or have been started again.
        """
        assert record is not None
        failed = replace(record, state=FAILED, text="its process has ended, without a word")
        before, after = (self._seal.sign(key(name), dump(each)) for each in (record, failed))
        found = self._parse(key(name), self._store.compare_set(key(name), before, after))  # type: ignore[arg-type]
        return failed if found is None or found == record else found

    def _make_room(self, names: Iterable[str]) -> None:
        # Reading many keys in one request blocks for missing ones. This sets only those that are missing.
        for name in names:
            self._store.compare_set(key(name), "", self._seal.sign(key(name), dump(Record())))  # type: ignore[arg-type]

    def _read(self, names: Sequence[str]) -> list[Record | None]:
        keys = [key(name) for name in names]
        return [self._parse(name, value) for name, value in zip(keys, read_all(self._store, keys), strict=True)]

    def _read_with_names(self) -> list[Record | None]:
        """Read all peers' records, and who they are: in one request, unless there are new ones."""
        keys = [key(name) for name in self._peers]
        *values, lines = read_all(self._store, [*keys, _NAMES])
        records = [self._parse(name, value) for name, value in zip(keys, values, strict=True)]
        names = [name for name in map(self._name, lines.split(b"\n")) if name is not None]
        if self._me not in names:  # the first beat, or somebody has overwritten them
            self._store.append(_NAMES, "\n" + self._seal.sign(_NAMES, self._me.encode()).decode() + "\n")  # type: ignore[attr-defined]
        new = in_order({*names} - {*self._peers, self._me})
        if new:
            self._make_room(new)
            records += self._read(new)
            self._peers += new
        return records

    def _name(self, line: bytes) -> str | None:
        sealed = self._seal.open(_NAMES, line) if line else None
        name = "" if sealed is None else sealed.decode(errors="replace")
        if name and not is_name(name):
            self._seal.ignore(_NAMES, "has a line that is no name of a rank")
        return name if is_name(name) else None

    def _parse(self, name: str, sealed: bytes) -> Record | None:
        value = self._seal.open(name, sealed)
        if value is None:
            return None
        if (record := load(value)) is None:
            self._seal.ignore(name, "is no record of a rank, or one of another version of this package")
        return record

    def _members(self, key_: str, sealed: bytes) -> tuple[str, ...] | None:
        value = self._seal.open(key_, sealed)
        try:
            names = None if value is None else json.loads(value)
        except (ValueError, RecursionError):
            names = ()
        if names is None:
            return None
        valid = isinstance(names, list) and names and all(isinstance(name, str) and is_name(name) for name in names)
        if not valid or len(set(names)) < len(names) or not (self._elastic or {*names} <= {*self._peers, self._me}):
            self._seal.ignore(key_, "names no members of a generation of these ranks")
            return None
        return tuple(names)

    def _connect(self) -> None:
        # A clone takes over the timeout: later ones, made of this one, do not try to connect for minutes.
        self._store, self._sockets = connect(self._store, self._patience)
        self._host = next(filter(None, map(own_address, self._sockets)), None)

    def _reconnect(self) -> None:
        if time.monotonic() < self._next_try:
            raise Waiting
        if not reachable(self._store, min(_PROBE, self._patience)):
            raise ConnectionError("connection refused")  # which costs nobody anything
        asked = time.monotonic()
        try:
            self._connect()
        except (RuntimeError, OSError):
            self._pause(time.monotonic() - asked)
            raise
        self._broken = False

    def _pause(self, waited_s: float) -> None:
        patience_s = self._patience.total_seconds()
        if waited_s >= patience_s / 2:  # it does not refuse, it is slow
            self._timeouts += 1
            # An attempt must be under way, or begin, shortly before the store is taken for lost.
            pause_s = min(patience_s * 2.0 ** (self._timeouts - 3), patience_s / 2)
            self._next_try = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
