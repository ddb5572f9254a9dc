"""Status records of all replicas in the store, about once a second, for tools that watch a run.

Training never depends on these records. Each process that trains gets a slot, which is never reused, so the process of
a restarted rank is distinct from the one that died. The records are at the root of the store, so its address is enough
to find them.

    status/lives     number of slots so far
    status/<slot>    the record of one process, signed with the job's secret
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

from lightning_async._checks import parse_json
from lightning_async._sockets import shut_down
from lightning_async.membership.membership import HeartbeatThread
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import Store, TCPStore, base_of, connect, reachable

ENDED = "ended"
FAILED = "failed"
INTERVAL = timedelta(seconds=1)
_log = logging.getLogger(__name__)
_ROOM = "lightning_async/status"
_LIVES = f"{_ROOM}/lives"
_PATIENCE = timedelta(seconds=5)
_MAX_BYTES = 1 << 14
_MAX_LIVES = 1 << 12
_WINDOW = 6
# The publisher of this process, if any.
_here: list[StatusPublisher] = []
_LONGEST_PAUSE = 32
_SIGNATURE = re.compile(rb"\A[0-9a-f]{64}:")


@dataclass(frozen=True, kw_only=True)
class StatusRecord:
    """The status of one replica, as it sees itself."""

    name: str = ""  # its stable name, which is its number at the start of the job
    rank: int = 0  # its current rank
    members: tuple[str, ...] = ()  # the names of its generation's members
    run: int = 0  # number of calls of the Trainer
    generation: int = 0  # number of reconfigurations in this run
    state: str = ""  # what it does, in one or two words
    epoch: int = 0
    step: int = 0
    samples: float = 0.0
    steps_per_s: float = 0.0  # over the last seconds
    rounds: int = 0  # number of rounds that it has seen committed
    round_ago_s: float = -1.0  # seconds since the last round; -1 if there was none
    round_s: float = 0.0  # mean duration of a round's exchange
    failed_rounds: int = 0  # number of rounds that were repeated
    hidden_share: float = 1.0  # share of communication that is hidden behind training
    idle_s: float = 0.0  # seconds of waiting at sync points
    slow: str = ""  # if it takes much longer per sample than the others: how much, and why
    sent_bytes: int = 0  # total number of bytes
    restarts: int = 0  # of all ranks together
    process: int = 0
    host: str = ""
    at: float = 0.0  # time of this record, in seconds since 1970, by its host's clock

    def dump(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def load(cls, value: bytes) -> StatusRecord | None:
        """Return the record that ``value`` encodes, without fields of newer versions; None if it is no record.

        >>> StatusRecord.load(StatusRecord(name="2", step=7).dump()).step
        7
        >>> StatusRecord.load(b'{"name": 2}') is None
        True
        """
        said = parse_json(value if len(value) <= _MAX_BYTES else None)
        if not isinstance(said, dict):
            return None
        # Ignore entries of newer versions, and check the types of all others.
        known = {field.name: said[field.name] for field in fields(cls) if field.name in said}
        members = known.pop("members", [])
        if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
            return None
        defaults = cls()
        for name, given in known.items():
            wanted = type(getattr(defaults, name))
            if type(given) is not wanted and not (wanted is float and type(given) is int):
                return None
        return cls(members=tuple(members), **known)


class StatusPublisher:
    """A thread that publishes this process's status from its first run to its end, with a client of its own.

    If the store does not answer, nothing is published, and training continues undisturbed.
    """

    def __init__(self, store: Store, secret: str | None, interval: timedelta = INTERVAL) -> None:
        self._store = store
        self._seal = Seal(secret, "status")
        self._client: Any = None
        self._sockets: dict[int, int] = {}
        self._slot = 0
        self._look: Callable[[], StatusRecord] | None = None
        self._last: StatusRecord | None = None
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._skip = self._pause = 0
        self._heartbeat_thread = HeartbeatThread(self._beat, interval.total_seconds(), lambda: shut_down(self._sockets))

    def serves(self, store: Store) -> bool:
        """Return whether this publisher is alive in this process, and its records are in ``store``."""
        mine = base_of(self._store)
        other = base_of(store)
        alike = mine is other or (isinstance(mine, TCPStore) and isinstance(other, TCPStore)
                                  and (mine.host, mine.port) == (other.host, other.port))  # fmt: skip
        return alike and self._heartbeat_thread.beats

    def follow(self, look: Callable[[], StatusRecord]) -> None:
        """Publish the results of ``look`` from now on; called as a run begins.

        The thread calls ``look`` at each interval, and adds process, host, speed and time to its result.
        """
        self._look = look
        self._last = None
        self._steps.clear()
        if self._heartbeat_thread.started:
            self._heartbeat_thread.wake()
        else:
            self._heartbeat_thread.start()

    def end(self, state: str = ENDED) -> None:
        """Publish once that the run has ended, and nothing more until another run follows."""
        if self._look is not None:
            self._last = replace(self._look(), state=state)
            self._look = None
            self._heartbeat_thread.wake()

    def close(self) -> None:
        self._heartbeat_thread.stop()

    def _beat(self) -> None:
        look = self._look
        last = self._last
        if self._skip:
            self._skip -= 1
        elif look is not None:
            self._try(look())
        elif last is not None and self._try(last) and self._last is last:
            self._last = None

    def _try(self, standing: StatusRecord) -> bool:
        now = time.monotonic()
        self._steps.append((now, standing.step))
        then, before = self._steps[0]
        standing = replace(
            standing, steps_per_s=(standing.step - before) / max(now - then, 1e-9),
            process=os.getpid(), host=socket.gethostname(), at=time.time(),
        )  # fmt: skip
        try:
            self._publish(standing)
        except (RuntimeError, OSError) as error:
            # The client is not used again: a late answer to this request would be taken for the next one's.
            self._client = None
            self._sockets = {}
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._skip = self._pause
            _log.debug("The status of this rank cannot be published: %s", error)
            return False
        self._pause = 0
        return True

    def _publish(self, standing: StatusRecord) -> None:
        if self._client is None:
            if not reachable(self._store, _PATIENCE):
                raise ConnectionError("connection refused")
            client, self._sockets = connect(self._store, _PATIENCE)
            self._client = base_of(client)
        if not self._slot:
            self._slot = int(self._client.add(_LIVES, 1))
        key = f"{_ROOM}/{self._slot}"
        value = standing.dump()
        if len(value) <= _MAX_BYTES:
            self._client.set(key, self._seal.sign(key, value))


def publish(store: Store, look: Callable[[], StatusRecord], secret: str | None) -> StatusPublisher:
    if _here and not _here[0].serves(store):
        _here.pop().close()
    if not _here:
        _here.append(StatusPublisher(store, secret))
    _here[0].follow(look)
    return _here[0]


def read_standings(store: Store, secret: str | None) -> list[StatusRecord]:
    """Return the last records of all processes that ever trained, in the order of their start.

    Without a secret, signatures are not checked. Raises RuntimeError if the store does not answer.
    """
    client: Any = base_of(store)
    seal = Seal(secret, "status")
    found = []
    # A stranger may have set a huge number.
    for slot in range(1, min(int(client.add(_LIVES, 0)), _MAX_LIVES) + 1):
        key = f"{_ROOM}/{slot}"
        if not client.check([key]):
            continue
        sealed: bytes = client.get(key)
        value = seal.open(key, sealed) if seal.signs else _SIGNATURE.sub(b"", sealed, count=1)
        standing = None if value is None else StatusRecord.load(value)
        if standing is not None:
            found.append(standing)
    return found
