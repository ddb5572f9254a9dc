"""Where a server is, in JSON's terms, and the way to it from here: shared memory on its own host, Gloo from others."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_async.comm.channel import Dial
from lightning_async.comm.membership.signing import SECRET, Seal
from lightning_async.comm.shm import ShmDial
from lightning_async.comm.torch.dialling import PairDial, ask
from lightning_async.errors import PeerLost

__all__ = ["address_of", "answers", "dial", "look_up", "look_up_all", "machine_name", "places_of", "seal_of_servers"]

_ANSWERS_S = 10.0


def dial(address: Mapping[str, Any], outgoing_bytes: int, incoming_bytes: int, via: str | None = None) -> Dial:
    """The way to a server, with memory for talking to it.

    Args:
        address: of the server; see `address_of` and `look_up`.
        outgoing_bytes, incoming_bytes: of each direction.
        via: ``"shm"`` or ``"gloo"``. Default: shared memory on the server's own host, Gloo from others.

    Raises:
        ValueError: there is no such way, or the address is none.
        OSError: there is no such memory.
    """
    try:
        machine, name, host, port = (address[key] for key in ("machine", "name", "host", "port"))
    except (KeyError, TypeError):
        raise ValueError(f"`dial(address={address!r})` must be a server's: machine, name, host and port.") from None
    if via not in (None, "shm", "gloo"):
        raise ValueError(f"`dial(via={via!r})` must be 'shm', 'gloo' or None.")
    here = machine == machine_name()
    if via == "shm" and not here:
        raise ValueError(f"`dial(via='shm')`: the server is not on this host, or is another user's: {address!r}.")
    if via != "gloo" and here:
        return ShmDial(name, outgoing_bytes, incoming_bytes)
    if host is None:
        raise ValueError(
            f"`dial(address={address!r})`: the server listens on its own host only; start it with an address that "
            "the others can reach, `ServerProcess(host=...)`."
        )
    return PairDial(host, port, name, outgoing_bytes, incoming_bytes, seal_of_servers())


def answers(address: Mapping[str, Any]) -> bool:
    """Whether somebody still is at the address of a server of this host."""
    if address["machine"] != machine_name():
        return False
    called = ShmDial(address["name"], 0, 0)
    try:
        called.connect(_ANSWERS_S).close()
    except (PeerLost, OSError):
        return False
    finally:
        called.close()
    return True


def look_up(host: str, port: int, timeout_s: float = 10.0) -> dict[str, Any]:
    """The address of a server that was started on its own and listens there, and what else it says of itself.

    Raises:
        PeerLost, ChannelTimeout: nobody is there, not in time, or one who has another secret.
    """
    return {**ask(host, port, seal_of_servers(), timeout_s), "host": host, "port": port}


def look_up_all(places: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """The addresses of servers that were started on their own, see `look_up`; in the order of their numbers.

    Args:
        places: ``"HOST:PORT,HOST:PORT"``, as ``lightning-async serve`` prints it.
        timeout_s: for each.

    Raises:
        ValueError: it is no such list, or a server is not the one whose place it has.
        PeerLost, ChannelTimeout: see `look_up`.
    """
    found = []
    for number, (host, port) in enumerate(places_of(places)):
        found.append(look_up(host, port, timeout_s))
        if (theirs := found[-1].get("server")) != number:
            at = places.split(",")[number].strip()
            raise ValueError(f"{places!r}: at {at!r} is server {theirs}, where server {number} is to be.")
    return found


def places_of(places: str) -> list[tuple[str, int]]:
    """Hosts and ports of ``"HOST:PORT,HOST:PORT"``.

    Raises:
        ValueError: it is no such list.

    >>> places_of("here:4000, [::1]:4001")
    [('here', 4000), ('::1', 4001)]
    """
    found = []
    for place in places.split(","):
        host, _, port = place.strip().rpartition(":")
        if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{place!r} in {places!r} must be HOST:PORT, with a port from 1 to 65535.")
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return found


def address_of(name: str, host: str | None = None, port: int | None = None) -> dict[str, Any]:
    """The address of a server of this host.

    Args:
        name: that it listens under, see `shm.listen`.
        host, port: at which others reach it. Default: they do not.
    """
    return {"machine": machine_name(), "name": name, "host": host, "port": port}


def seal_of_servers() -> Seal:
    """With the secret that the environment holds, if any; the same for all attempts at a job, and several jobs."""
    return Seal(os.environ.get(SECRET), "servers")


def machine_name() -> str:
    """Equal for processes that reach each other's names of sockets, and may."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # names of hosts need not differ
        return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"
    except OSError:
        return uuid.uuid4().hex
