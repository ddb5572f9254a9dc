"""Where a rank that comes back asks those that train to take it in: notes in the store, beside those of their runs.

those that train              the newcomer
pin(notice of their run)
                              read_notice, compares, beats beside their hearts as a guest, see `Membership.guests`
all stand at a gate:
invite(guest, to a new run)
                              read_invitation, and connects with all of them
answer(guest, admitted)
                              read_answer: it is one of them, or ends, or comes again
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.stores import PrefixStore, Store, TCPStore, base_of, connect
from lightning_async.comm.torch.sockets import shut_down

__all__ = ["Door"]

_NOTICE, _KEEPERS = "notice", "keepers"


class Door:
    """Notes are small, of JSON's terms, and signed where the job has a secret. Reading never waits for one.

    Args:
        store: of the job; never blocked in, so that any number of threads may share it.
        seal: of the job.
    """

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store: Any = PrefixStore("lightning_async/door", store)
        self.seal = seal.within("door")

    def pin(self, notice: Mapping[str, Any]) -> None:
        """Say which run goes on, and what a newcomer must have in common with it. Empty: none that takes anybody in."""
        self.write(_NOTICE, notice)

    def read_notice(self) -> dict[str, Any]:
        """What was pinned last; empty where nothing is."""
        return self.read(_NOTICE)

    def invite(self, guest: str, invitation: Mapping[str, Any]) -> None:
        """Say to which run a guest is invited, and as which rank."""
        self.write(f"invitation/{guest}", invitation)

    def read_invitation(self, guest: str) -> dict[str, Any]:
        """The invitation of this guest; empty where there is none yet."""
        return self.read(f"invitation/{guest}")

    def answer(self, guest: str, admitted: bool, again: bool = False) -> None:
        """Say whether a guest is one of those who train from now on, or else, whether it may come ``again``: where
        nobody has stood still for it. All of them do."""
        self.write(f"answer/{guest}", {"admitted": admitted, "again": again})

    def read_answer(self, guest: str) -> dict[str, Any]:
        """The answer to this guest; empty where there is none yet."""
        return self.read(f"answer/{guest}")

    def keep_at(self, name: str, note: Mapping[str, Any]) -> None:
        """Say where a rank keeps what others leave with it, see `Keeper`; by its name for life."""
        self.write(f"keeper/{name}", note)
        self._store.append(_KEEPERS, "\n" + self.seal.sign(_KEEPERS, name.encode()).decode() + "\n")

    def keepers(self) -> list[str]:
        """The names of all that have ever said so."""
        lines = self._store.get(_KEEPERS).split(b"\n") if self._store.check([_KEEPERS]) else []
        names = [self.seal.open(_KEEPERS, line) for line in lines if line]
        return sorted({name.decode(errors="replace") for name in names if name is not None})

    def read_keeper(self, name: str) -> dict[str, Any]:
        """Where a rank has said that it keeps things; empty where it has not."""
        return self.read(f"keeper/{name}")

    @property
    def host(self) -> tuple[str, int]:
        """Address and port of the store; those of loopback where it is in this process."""
        base = base_of(self._store)
        return (base.host, base.port) if isinstance(base, TCPStore) else ("127.0.0.1", 1)

    def connect(self, timeout: timedelta) -> tuple[Store, Callable[[], None]]:
        """A client of the store for the calling thread alone, and what ends a request of it that hangs."""
        store, sockets = connect(self._store, timeout)
        return store, lambda: shut_down(sockets)

    def write(self, key: str, note: Mapping[str, Any]) -> None:
        """Any other note."""
        self._store.set(key, self.seal.sign(key, json.dumps(dict(note)).encode()))

    def read(self, key: str) -> dict[str, Any]:
        """The note that is there; empty where there is none."""
        if not self._store.check([key]):
            return {}
        value = self.seal.open(key, self._store.get(key))
        try:
            note = {} if value is None else json.loads(value)
        except (ValueError, RecursionError):
            note = {}
        return note if isinstance(note, dict) else {}
