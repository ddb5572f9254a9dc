"""The heartbeats in the store: the records of all ranks, and the decisions on generations.

If ranks may join, one more key lists the names of all ranks, one a line; each rank appends its own name.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from lightning_async._checks import parse_json
from lightning_async._sockets import own_address, shut_down
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.failure_detector import FAILED, LEFT, PREFIX, UP, Record, dump, key, load
from lightning_async.membership.generation import in_order, is_name
from lightning_async.membership.process_liveness import LocalProcessWatch
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import Store, connect, own_client, reachable, read_all, settle

# Number of beats to watch for another process under this rank's name.
_LOOKS = 5
# The name of a rank has no slash, so this key is no rank's record.
_NAMES = f"{PREFIX}/names/all"
# Time to try whether the store's host answers, before a client would try for longer.
_PROBE = timedelta(seconds=2)


class Waiting(Exception):
    """An exception: a request is not sent, because the store has not answered the last one and a pause is not over."""


class HeartbeatStore:
    """The records of all ranks, read and written through one client.

    For every new client, the store's server looks up the client's host name, and answers nobody meanwhile. Therefore a
    slow answer is waited for, and a new client is made only after a request has failed. If the request had timed out,
    a pause comes first, which grows with each timeout and differs between ranks. ``names`` are the ranks that are known
    at the start; if ``elastic``, other ranks may join.
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
        # This host's address, as seen from the store's host.
        self._host: str | None = None

    def open(self, interval: timedelta) -> bool:
        """Connect, create the records that are missing, and return whether an earlier process had this rank's name.

        Raises:
            AsyncTrainingError: Another live process has this rank's name.
            RuntimeError: The store cannot be reached.
            ConnectionError: The store cannot be reached.
        """
        # torch would try to connect for as long as a request may block.
        if not reachable(self._store, self._patience):
            raise ConnectionError("connection refused")
        self._connect()
        self._make_room([self._me, *self._peers])
        if self._elastic:
            self._store.compare_set(_NAMES, "", "\n")  # type: ignore[arg-type]
        found = self._read([self._me])[0]
        for _ in range(_LOOKS):
            if found is None or found.state != UP:
                break
            # A live process beats within an interval, so a record that does not change is of a dead one.
            threading.Event().wait(interval.total_seconds())
            again = self._read([self._me])[0]
            if again is not None and again.state == UP and again != found:
                raise AsyncTrainingError(
                    f"rank {self._me} is taken: {again.life} lives under it, and goes on. Were two processes given "
                    "the same rank, or do two jobs use one address and port (MASTER_ADDR, MASTER_PORT)?"
                )
            found = again or found  # its peers may have written meanwhile that it has ended
        return found is not None and found.life != ""

    def exchange(self, mine: Record) -> dict[str, Record | None]:
        """Publish this rank's record, and return the records of all other ranks by name; None for an invalid record.

        Ranks that have joined meanwhile are included. If the process of a peer on this host has ended, this rank writes
        that into the peer's record, for all ranks to see.

        Raises:
            Waiting: The pause after a timeout of the store is not over.
            RuntimeError: The store cannot be reached.
            OSError: The store cannot be reached.
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
            # The client must not be used again: a late answer to this request would be taken for the next one's.
            self._broken = True
            self._pause(time.monotonic() - asked)
            raise
        self._timeouts = 0
        return found

    def decide(self, wanted: int, proposal: Sequence[str] | None) -> tuple[str, ...] | None:
        """Return the members of generation ``wanted``, or None if they are not decided yet.

        A ``proposal`` decides them, unless another rank has proposed members before.
        """
        name = f"{PREFIX}/generation/{wanted}"
        if proposal is not None:
            mine = json.dumps(list(proposal)).encode()
            return settle(self._store, name, mine, self._seal, lambda value: self._members(name, value))
        value = self._seal.open(name, self._store.get(name)) if self._store.check([name]) else None
        return None if value is None else self._members(name, value)

    def report(self, name: str, text: str) -> None:
        # Any thread may call this, and the heartbeat's client serves one thread only.
        """Write into the rank's record that it has failed, unless the record says that it has left or failed."""
        client = own_client(self._store, self._patience)
        value = self._seal.open(key(name), client.get(key(name)))
        record = (None if value is None else load(value)) or Record()
        if record.state not in (LEFT, FAILED):
            record = replace(record, state=FAILED, text=text)
            client.set(key(name), self._seal.sign(key(name), dump(record)))  # type: ignore[arg-type]

    def close(self) -> None:
        self._neighbours.close()

    def hang_up(self) -> None:
        """End a request that hangs; any thread may call this. No other request is possible afterwards."""
        shut_down(self._sockets)

    def _speak_for(self, name: str, record: Record | None) -> Record:
        """Write into a dead rank's record that it has failed, and return the record.

        If the store has a newer record than ``record``, that one stays and is returned: since the last reading, the
        rank may have left normally, or may have been restarted.
        """
        assert record is not None
        failed = replace(record, state=FAILED, text="its process has ended without notice")
        before, after = (self._seal.sign(key(name), dump(each)) for each in (record, failed))
        found = self._parse(key(name), self._store.compare_set(key(name), before, after))  # type: ignore[arg-type]
        return failed if found is None or found == record else found

    def _make_room(self, names: Iterable[str]) -> None:
        # Reading many keys in one request blocks for missing ones. This creates only those that are missing.
        for name in names:
            self._store.compare_set(key(name), "", self._seal.sign(key(name), dump(Record())))  # type: ignore[arg-type]

    def _read(self, names: Sequence[str]) -> list[Record | None]:
        keys = [key(name) for name in names]
        return [self._parse(name, value) for name, value in zip(keys, read_all(self._store, keys), strict=True)]

    def _read_with_names(self) -> list[Record | None]:
        """Return the records of all peers, read in one request together with the list of names.

        If the list has new names, their records are read by further requests. A record is None if it is missing or
        invalid.
        """
        keys = [key(name) for name in self._peers]
        *values, lines = read_all(self._store, [*keys, _NAMES])
        records = [self._parse(name, value) for name, value in zip(keys, values, strict=True)]
        names = [name for name in map(self._name, lines.split(b"\n")) if name is not None]
        # This is the first beat, or a stranger has overwritten the names.
        if self._me not in names:
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

    def _members(self, key_: str, value: bytes) -> tuple[str, ...] | None:
        names = parse_json(value)
        valid = isinstance(names, list) and names and all(isinstance(name, str) and is_name(name) for name in names)
        if not valid or len(set(names)) < len(names) or not (self._elastic or {*names} <= {*self._peers, self._me}):
            self._seal.ignore(key_, "names no members of a generation of these ranks")
            return None
        return tuple(names)

    def _connect(self) -> None:
        # A clone inherits the timeout, so later clones of this one do not try to connect for minutes.
        self._store, self._sockets = connect(self._store, self._patience)
        self._host = next(filter(None, map(own_address, self._sockets)), None)

    def _reconnect(self) -> None:
        if time.monotonic() < self._next_try:
            raise Waiting
        # A refused probe costs the store nothing, unlike a new client.
        if not reachable(self._store, min(_PROBE, self._patience)):
            raise ConnectionError("connection refused")
        asked = time.monotonic()
        try:
            self._connect()
        except (RuntimeError, OSError):
            self._pause(time.monotonic() - asked)
            raise
        self._broken = False

    def _pause(self, waited_s: float) -> None:
        patience_s = self._patience.total_seconds()
        # The store does not refuse, it is slow, and more attempts would make it slower.
        if waited_s >= patience_s / 2:
            self._timeouts += 1
            # An attempt must be under way, or begin, shortly before the store counts as lost.
            pause_s = min(patience_s * 2.0 ** (self._timeouts - 3), patience_s / 2)
            self._next_try = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
