"""How two processes come to have a channel over Gloo: over one connection, made for that.

    who dials                                     who answers, at a port that is known
                                   <------------- a nonce
    whom I look for, my memory     ------------->
                                   <------------- who I am, or why not
    both form a group of two: what torch would have a store for goes over this connection, which then ends

All but the nonce is sealed with it. So a stranger gets no further than this; whoever dies in between, the other one
hears of it; and who has been started again answers the calls that have come meanwhile.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.membership.signing import SECRET, Seal
from lightning_async.comm.membership.stores import Store
from lightning_async.comm.operation import Where
from lightning_async.comm.parcels import Line
from lightning_async.comm.torch.forming import Terms, form
from lightning_async.comm.torch.groups import Group
from lightning_async.comm.torch.pairs import PairChannel
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, CollectiveTimeout, PeerLost

__all__ = ["PairDial", "answer_pair", "ask", "shown"]

_ANSWERS, _DIALS = 0, 1  # ranks
_FORMING_S = 10.0


class PairDial:
    """Where a peer of any host listens, and the memory for talking to it; see `Dial`.

    Args:
        host, port: that it listens at.
        name: that it answers under; None for whoever listens there.
        outgoing_bytes, incoming_bytes: of each direction.
        seal: as it has it. Default: without a secret.
    """

    def __init__(
        self, host: str, port: int, name: str | None, outgoing_bytes: int, incoming_bytes: int, seal: Seal | None = None
    ) -> None:
        self.host, self.port, self.name = host, port, name
        self._seal = seal or Seal()
        self.outgoing = torch.zeros(outgoing_bytes, dtype=torch.uint8)
        self.incoming = torch.zeros(incoming_bytes, dtype=torch.uint8)

    def connect(self, timeout_s: float) -> PairChannel:
        sizes = [self.outgoing.numel(), self.incoming.numel()]
        until = time.monotonic() + timeout_s
        with _called(self.host, self.port, self._seal, timeout_s, name=self.name, sizes=sizes) as (line, host, _):
            left = max(until - time.monotonic(), 0.001)
            group = _formed(line, host, _DIALS, left)
        return PairChannel(group, _DIALS, shown(self.host, self.port), self.outgoing, self.incoming)

    def close(self) -> None:
        self.outgoing = self.incoming = torch.empty(0, dtype=torch.uint8)


def ask(host: str, port: int, seal: Seal | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """What a peer that listens there says of itself, see `answer_pair`.

    Raises:
        PeerLost, ChannelTimeout: nobody is there, not in time, or one who has another secret.
    """
    with _called(host, port, seal or Seal(), timeout_s, name=None) as (_, _, told):
        return told


def answer_pair(sock: socket.socket, peer: str, seal: Seal, told: Mapping[str, Any]) -> PairChannel | None:
    """The channel that somebody has dialled, over a socket that a listening one has accepted.

    Args:
        sock: accepted; closed at the end.
        peer: what it is to be called in messages.
        seal: of whoever dials.
        told: what is said to whoever calls: ``name``, by which a dial knows this peer; of JSON's terms.

    Returns:
        None for one who has only asked.

    Raises:
        PeerLost: it is none of this job's, looks for another one, or is gone.
    """
    try:
        line = Line(sock, _scoped(seal))
        try:
            host = _own_address(sock)
            line.greet()
            heard = line.hear()
            if (name := heard.get("name")) not in (None, told["name"]):
                line.say({"refused": f"{told['name']} listens there now, and not {name}"})
                raise PeerLost(f"{peer} looks for {name}.")
            if (sizes := heard.get("sizes")) is None:
                line.say(told)
                return None
            try:
                memory = _memory(sizes)
            except (ValueError, MemoryError) as error:
                line.say({"refused": str(error)})
                raise
            line.say(told)
            group = _formed(line, host, _ANSWERS, _FORMING_S)
            return PairChannel(group, _ANSWERS, peer, *reversed(memory))
        finally:
            line.close()
    except (OSError, ValueError, TypeError, MemoryError) as error:
        raise PeerLost(f"{peer} has dialled and is not answered: {error}.") from error


def _memory(sizes: Any) -> list[Tensor]:
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"memory of {sizes!r} bytes is none")
    first, second = sizes
    try:
        return [torch.zeros(size, dtype=torch.uint8) for size in (first, second)]
    except RuntimeError as error:
        raise MemoryError(f"there is no memory for {first + second} bytes") from error


@contextlib.contextmanager
def _called(host: str, port: int, seal: Seal, timeout_s: float, **words: Any) -> Any:
    """A line that was taken up, this host's address on it, and what was told."""
    try:
        line = Line(socket.create_connection((host, port), timeout_s), _scoped(seal), timeout_s)
        try:
            line.hear_greeting()
            line.say(words)
            told = line.hear()
            if (why := told.get("refused")) is not None:
                raise PeerLost(f"{shown(host, port)}: {why}.")
            yield line, _own_address(line.socket), told
        finally:
            line.close()
    except OSError as error:
        kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
        raise kind(
            f"nobody answers at {shown(host, port)} ({error}): see the log there; {SECRET} must be the same on all "
            "hosts."
        ) from error


def _formed(line: Line, host: str, rank: int, timeout_s: float) -> Group:
    store = _LineStore(line)
    where = Where("channel", Generation(0, ("answers", "dials"), rank))
    terms = Terms(check=store.still_there, host=host)
    try:
        return form(store, where, "gloo", timedelta(seconds=timeout_s), None, 0, lambda: False, terms)
    except PeerLost:
        raise
    except (AsyncTrainingError, RuntimeError) as error:
        kind = ChannelTimeout if isinstance(error, CollectiveTimeout) else PeerLost
        raise kind(f"no channel comes about: {error}") from error


class _LineStore(Store):
    """What two that form a group have to say to each other, over one line, as torch's store has it."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._ended = ""  # why; not the error, which holds on to all that is under way

    def still_there(self) -> None:
        """Whether more may come of the other one.

        Raises:
            PeerLost: it may not.
        """
        if self._ended:
            why = f"the connection by which a channel was to be made has ended ({self._ended})"
            raise PeerLost(f"{why}.")

    def set(self, key: str, value: Any) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = value
        try:
            self._line.say({"key": key, "value": value.decode("latin-1")})
        except OSError as error:
            self._ended = repr(error)
            self.still_there()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def add(self, key: str, value: int) -> int:  # pyright: ignore
        """Of this side alone."""
        self._counts[key] = self._counts.get(key, 0) + value
        return self._counts[key]

    def check(self, keys: list[str]) -> bool:  # pyright: ignore
        poll = select.poll()
        poll.register(self._line.socket, select.POLLIN)
        try:
            while not self._ended and poll.poll(0):
                heard = self._line.hear()
                self._values[str(heard["key"])] = str(heard["value"]).encode("latin-1")
        except (OSError, KeyError, UnicodeError) as error:
            self._ended = repr(error)  # what it has said before is heard: it may have been all
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False


def _scoped(seal: Seal) -> Seal:
    return seal.within("dialling")


def _own_address(sock: socket.socket) -> str:
    """By which the peer can reach this host: it has, or has been."""
    return sock.getsockname()[0]


def shown(host: str, port: int) -> str:
    """As it is written.

    >>> shown("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
