"""Channels between two processes on any hosts: each is a Gloo group of its own, with two ranks; see `PairDial`.

    the end that sends                           the end that receives
                                    <----------  has memory ready for bytes and for a head, before they come
    bytes, head: at once, in order  ---------->  the head says what came, and how many bytes; they are there by then

Each process notices within milliseconds that the other one has died, with one exception: it does not notice while torch
has received only a part of a message, see `torch_groups`. The head is small and is received in one piece. Therefore a
message's bytes are sent first and its head last, and the receiver waits for the head. A message may also be sent in
parts. The head of a later part is sent before its bytes, because the head says where in the buffer they begin. Then an
`OrphanedWait` waits for the bytes if they are many.

`dial` returns the `Dial` that opens channels to a server: through shared memory if the server is on this host,
otherwise through Gloo.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async._subprocess import boot_id
from lightning_async.comm.collectives import Where
from lightning_async.comm.p2p import LONGEST, Dial, ShmDial, packed, unpacked
from lightning_async.comm.peer_storage import PeerStoreConnection
from lightning_async.comm.torch_groups import TorchGroup
from lightning_async.comm.torch_rendezvous import MeetingOptions, form
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, CollectiveTimeout, PeerLost
from lightning_async.membership.generation import Generation
from lightning_async.membership.signing import SECRET, Seal
from lightning_async.membership.store import Store

_LENGTH = struct.Struct("<I")
_HEAD = 2048  # bytes of the first message, in which most headers fit
_WATCHED = 1 << 15  # bytes from which a message may arrive by halves
# Stands for no deadline: torch needs a number.
_FOREVER_S = 30 * 24 * 3600.0
# A message that has begun to arrive must be whole within these seconds, and one second more for each of these bytes.
_PART_S = 60.0
_SLOWEST = 1 << 20
_LOOK_S = 0.05
_SETTLE = timedelta(seconds=1)
# Tags: with several connections, Gloo divides tags among them by remainder; all of these belong to the first one.
_HEADS = 0
_BYTES = 2520
_PARTS = 5040


class PairChannel:
    """One end of a channel over Gloo; a `PeerChannel`.

    Args:
        group: Group of the two processes.
        rank: Rank of this end in the group.
        peer: Name of the peer.
        outgoing: Memory of this end.
        incoming: Memory for the peer's bytes.
    """

    shares_memory = False

    def __init__(self, group: TorchGroup, rank: int, peer: str, outgoing: Tensor, incoming: Tensor) -> None:
        self._group = group
        self._other = 1 - rank
        self.peer = peer
        self.outgoing = outgoing
        self.incoming = incoming
        self._sent: list[Any] = []
        self._head: tuple[Any, Tensor] | None = None
        self._bytes: Any = None
        self._patience = OrphanedWait(group)
        self._broken = self._closed = False

    def send(self, header: Mapping[str, Any], size: int = 0, timeout_s: float = 60.0) -> None:
        data = packed(header, size, self.outgoing.numel())
        text = torch.frombuffer(bytearray(_LENGTH.pack(len(data)) + data), dtype=torch.uint8)
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        first = min(len(text), _HEAD)
        at = header.get("at", 0)
        head[:first] = text[:first]
        self._expect()
        heads = (head, _HEADS), (text[_HEAD:], _HEADS)
        bytes_ = self.outgoing[at : at + size], _PARTS if at else _BYTES
        # Bytes first, see the module's first lines; of a later part, the head must say where the bytes go.
        for tensor, tag in (*heads, bytes_) if at else (bytes_, *heads):
            if tensor.numel():
                self._sent.append(self._begin("send", tensor, tag))

    def receive(self, timeout_s: float | None = 60.0) -> tuple[dict[str, Any], int]:
        until = time.monotonic() + (_FOREVER_S if timeout_s is None else timeout_s)
        self._expect()
        assert self._head is not None
        (work, head) = self._head
        self._head = None
        self._wait(work, until, "has said nothing")
        self._settle()  # the peer has answered, so it has received the last message
        (length,) = _LENGTH.unpack(head[: _LENGTH.size].numpy().tobytes())
        text = head
        if (rest := min(max(0, _LENGTH.size + length - _HEAD), LONGEST)) > 0:
            text = torch.cat([head, torch.empty(rest, dtype=torch.uint8)])
            self._wait(self._begin("recv", text[_HEAD:], _HEADS), until, "has said nothing more")
        try:
            data = text[_LENGTH.size : _LENGTH.size + length].numpy().tobytes()
            header, size = unpacked(data, self.peer, self.incoming.numel())
        except PeerLost:
            self._break()
            raise
        if size:
            until = min(until, time.monotonic() + _PART_S + size / _SLOWEST)
            if at := header.get("at", 0):
                work = self._begin("recv", self.incoming[at : at + size], _PARTS)
                self._wait(work, until, "has sent only a part of a message", large=size >= _WATCHED)
            else:
                work = self._bytes
                self._bytes = None
                self._wait(work, until, "has sent only a part of a message")  # the bytes came before the head
        return header, size

    def break_off(self) -> None:
        self._group.break_off()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._break()
            self._head = self._bytes = None
            self._sent.clear()  # the connection is closed, so torch does not use this memory any more
            self._patience.close()
            self._group.dispose()
            self.outgoing = self.incoming = torch.empty(0, dtype=torch.uint8)

    def _expect(self) -> None:
        """Post torch's receives for the peer's next message: one for its bytes, and one for its head.

        The receive for the bytes is as long as `incoming`; the bytes may be fewer.
        """
        if self._bytes is None and self.incoming.numel():
            self._bytes = self._begin("recv", self.incoming, _BYTES)
        if self._head is None:  # second, or the peer might send the head before the bytes
            head = torch.empty(_HEAD, dtype=torch.uint8)
            self._head = self._begin("recv", head, _HEADS), head

    def _begin(self, kind: str, tensor: Tensor, tag: int) -> Any:
        try:
            if self._broken:
                raise RuntimeError("the channel is closed")
            return getattr(self._group.pg, kind)([tensor], self._other, tag)  # torch's work keeps the tensor
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any, until: float, late: str, large: bool = False) -> None:
        began = time.monotonic()
        left_s = max(until - began, 0.001)
        try:
            self._patience.wait(work, left_s) if large else work.wait(timedelta(seconds=left_s))
        except (RuntimeError, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
            # torch reports a timeout and a lost connection by the same type, so time and text decide.
            if time.monotonic() < until and not timed_out:
                raise self._lost(error) from error
            self._break()
            raise ChannelTimeout(
                f"{self.peer} {late} for {time.monotonic() - began:.1f} s: it is stopped, or busy. See its log."
            ) from error

    def _settle(self) -> None:
        """Wait until sent messages have arrived, so that torch does not use their memory any more."""
        for work in self._sent:
            with contextlib.suppress(RuntimeError):
                work.wait(_SETTLE)
        self._sent.clear()

    def _lost(self, error: Exception) -> PeerLost:
        self._break()
        return PeerLost(f"{self.peer} is gone ({str(error).splitlines()[0].rstrip('.')}).")

    def _break(self) -> None:
        self._broken = True
        self.break_off()


class OrphanedWait:
    """A helper thread that waits in torch for a message that may stay incomplete, so that the caller can give up."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, work: Any, timeout_s: float) -> None:
        """Wait until ``work``, an operation of torch, is done.

        Raises:
            RuntimeError: The connection is lost, so the work will never be done.
            TimeoutError: The work is not done in time.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_async arrivals", daemon=True)
            self._thread.start()
        self._group.helped_by(self._thread, timeout_s)
        self._works.put((work, timedelta(seconds=timeout_s)))
        until = time.monotonic() + timeout_s
        looks = 0
        while looks < 3:  # the work may be about to end: last bytes and the connection's end come together
            try:
                error = self._ends.get(timeout=min(_LOOK_S, max(0.001, until - time.monotonic())))
            except queue.Empty:
                looks += not self._group.connected
                if time.monotonic() > until:
                    raise TimeoutError from None
                continue
            if error is not None:
                raise error
            return
        raise RuntimeError("the connection to a peer was lost")

    def close(self) -> None:
        """Let the thread end once its present wait in torch is over."""
        self._works.put(None)

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            work, limit = given
            try:
                work.wait(limit)
                error = None
            except RuntimeError as raised:
                error = raised
            del work, given  # they keep the message's memory
            self._group.helpers.discard(threading.current_thread())
            self._ends.put(error)


_ANSWERS = 0
_DIALS = 1  # rank of the end that dials; the other end has rank `_ANSWERS`
# Longest time to form a group, for the end that answers.
_FORMING_S = 10.0
# Number of attempts of `ask`, and the pause between two of them.
_ATTEMPTS = 5
_AGAIN_S = 0.2


class PairDial:
    """A `Dial` for a peer on any host: it opens channels through Gloo.

    The two processes make a channel over one TCP connection:

        the end that dials                           the end that answers, at a known port
                                      <------------- a nonce
        name of the peer, memory      ------------->
                                      <------------- its own name, or a refusal
        both form a group of two; this connection replaces the store that torch needs for that, and then ends

    All messages except the nonce are signed together with the nonce, so that a process without the job's secret is
    refused. If one of the two processes dies meanwhile, the other one notices. A restarted peer listens before it is
    ready, so connections wait for it; it answers them as soon as it is ready.

    Args:
        host: Host of the peer.
        port: Port of the peer.
        name: Name of the peer; None: any process that listens there.
        outgoing_bytes: Size of the buffer for messages to the peer.
        incoming_bytes: Size of the buffer for messages from the peer.
        seal: Signer of the job's messages. Default: None, a signer without a secret.
    """

    def __init__(
        self, host: str, port: int, name: str | None, outgoing_bytes: int, incoming_bytes: int, seal: Seal | None = None
    ) -> None:
        self.host = host
        self.port = port
        self.name = name
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
    """Return the description that a peer gives of itself, see `answer_pair`.

    Args:
        host: Host of the peer.
        port: Port of the peer.
        seal: Seal of the job. Default: None, one without a secret.
        timeout_s: Longest wait of each attempt, in seconds. Default: 10.

    Raises:
        PeerLost: No process answers there, or one with another secret.
        ChannelTimeout: No process answers in time.
    """
    attempts = 1
    while True:
        try:
            with _called(host, port, seal or Seal(), timeout_s, name=None) as (_, _, told):
                return told
        except ChannelTimeout:
            raise
        except PeerLost:
            # A peer that has too many callers ends connections before it has heard them.
            if attempts == _ATTEMPTS:
                raise
            attempts += 1
            time.sleep(_AGAIN_S)


def answer_pair(
    sock: socket.socket, peer: str, seal: Seal, told: Mapping[str, Any], heard: Callable[[], object] = lambda: None
) -> PairChannel | None:
    """Answer a process that has connected: return the channel to it, or None if it asked only for a description.

    Args:
        sock: Connected socket, as returned by ``accept``.
        peer: Name of the process that has connected, for error messages.
        seal: Signer of the job's messages.
        told: Description of this process in JSON values. Its entry ``name`` must be the name that the other process
            connects to.
        heard: Called once the other process has shown that it has the job's secret. Default: nothing is called.

    Raises:
        PeerLost: The other process is not of this job, looks for another process, or has died.
    """
    try:
        line = PeerStoreConnection(sock, _scoped(seal))
        try:
            host = _own_address(sock)
            # The nonce comes first: whatever the caller sends has to be sealed with it, and cannot be a repetition.
            line.greet()
            words = line.hear()
            heard()
            if (name := words.get("name")) not in (None, told["name"]):
                line.say({"refused": f"{told['name']} listens there now, and not {name}"})
                raise PeerLost(f"{peer} looks for {name}.")
            if (sizes := words.get("sizes")) is None:
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
    """Connect to a peer and send a greeting with the fields ``words``.

    Yields the connection, this host's address, and the peer's description of itself.
    """
    said = False
    try:
        line = PeerStoreConnection(socket.create_connection((host, port), timeout_s), _scoped(seal), timeout_s)
        try:
            line.hear_greeting()
            line.say(words)
            said = True
            told = line.hear()
            if (why := told.get("refused")) is not None:
                raise PeerLost(f"{shown(host, port)}: {why}.")
            yield line, _own_address(line.socket), told
        finally:
            line.close()
    except OSError as error:
        kind = ChannelTimeout if isinstance(error, TimeoutError) else PeerLost
        # Only a peer that has heard this process may have ended the connection because of the secret.
        secret = f"; {SECRET} must be the same on all hosts" if said and kind is PeerLost else ""
        raise kind(f"nobody answers at {shown(host, port)} ({error}): see the log there{secret}.") from error


def _formed(line: PeerStoreConnection, host: str, rank: int, timeout_s: float) -> TorchGroup:
    # No store for two processes: the connection that they have carries torch's few entries.
    store = _LineStore(line)
    where = Where("channel", Generation(0, ("answers", "dials"), rank))
    meeting_options = MeetingOptions(check=store.still_there, host=host)
    try:
        return form(store, where, "gloo", timedelta(seconds=timeout_s), None, 0, lambda: False, meeting_options)
    except PeerLost:
        raise
    except (AsyncTrainingError, RuntimeError) as error:
        kind = ChannelTimeout if isinstance(error, CollectiveTimeout) else PeerLost
        raise kind(f"no channel can be made: {error}") from error


class _LineStore(Store):
    """A store of two processes, with which torch forms their group: each sends its entries to the other one."""

    def __init__(self, line: PeerStoreConnection) -> None:
        super().__init__()
        self._line = line
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._ended = ""  # reason as a text, because the error itself would keep objects alive

    def still_there(self) -> None:
        """Raise `PeerLost` if the connection to the other process has ended."""
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
            self._ended = repr(error)  # no error yet: the values that came before may be all that is needed
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False


def _scoped(seal: Seal) -> Seal:
    return seal.within("dialling")


def _own_address(sock: socket.socket) -> str:
    return sock.getsockname()[0]


def shown(host: str, port: int) -> str:
    """Return an address in its usual form.

    >>> shown("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_ANSWERS_S = 10.0


def dial(address: Mapping[str, Any], outgoing_bytes: int, incoming_bytes: int, via: str | None = None) -> Dial:
    """Return the `Dial` that opens channels to a parameter server, with buffers for its messages.

    Args:
        address: Address of the server; see `address_of` and `look_up`.
        outgoing_bytes: Size of the buffer for messages to the server.
        incoming_bytes: Size of the buffer for messages from the server.
        via: ``"shm"`` or ``"gloo"``. Default: None, shared memory on the server's own host, else Gloo.

    Raises:
        ValueError: The server cannot be reached in this way, or the address is malformed.
        OSError: The buffers cannot be allocated.
    """
    try:
        machine, name, host, port = (address[key] for key in ("machine", "name", "host", "port"))
    except (KeyError, TypeError):
        raise ValueError(f"`dial(address={address!r})` must be a server's: machine, name, host and port.") from None
    if via not in (None, "shm", "gloo"):
        raise ValueError(f"`dial(via={via!r})` must be 'shm', 'gloo' or None.")
    # Not by the host's address: containers of one host may not reach each other's sockets.
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
    """Return whether a server on this host answers at ``address``; False for a server on another host."""
    if address["machine"] != machine_name():
        return False
    # A channel without memory: it is only made to see whether the server accepts it.
    called = ShmDial(address["name"], 0, 0)
    try:
        called.connect(_ANSWERS_S).close()
    except (PeerLost, OSError):
        return False
    finally:
        called.close()
    return True


def look_up(host: str, port: int, timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask a separately started server for its description, and return it.

    The returned description includes ``host`` and ``port``, as `dial` needs them. Raises the errors of `ask`.
    """
    return {**ask(host, port, seal_of_servers(), timeout_s), "host": host, "port": port}


def look_up_all(places: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """Return the addresses of separately started servers, in the order of their numbers.

    Args:
        places: Addresses as ``"HOST:PORT,HOST:PORT"``, as ``lightning-async serve`` prints them.
        timeout_s: Longest wait for each server, in seconds. Default: 10.

    Raises:
        ValueError: The text is not such a list, or its servers are not in the order 0, 1, 2 and so on.
        PeerLost: No process answers at an address, or one with another secret.
        ChannelTimeout: No process answers in time.
    """
    found = []
    for number, (host, port) in enumerate(places_of(places)):
        # Asked one by one, so that an error names the server that does not answer.
        found.append(look_up(host, port, timeout_s))
        if (theirs := found[-1].get("server")) != number:
            at = places.split(",")[number].strip()
            raise ValueError(f"{places!r}: at {at!r} is server {theirs}, where server {number} is to be.")
    return found


def places_of(places: str) -> list[tuple[str, int]]:
    """Return hosts and ports of ``"HOST:PORT,HOST:PORT"``; raise ValueError if the text is not such a list.

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
    """Return the address of a server of this host, in JSON values.

    Args:
        name: Name under which the server listens for processes of this host.
        host: Host name or IP address at which the server listens for processes of other hosts. Default: None, it does
            not listen for them.
        port: Port at ``host``. Default: None.
    """
    return {"machine": machine_name(), "name": name, "host": host, "port": port}


def seal_of_servers() -> Seal:
    """Return the `Seal` that signs messages to and from parameter servers.

    It has the secret of the environment, if there is one. It does not depend on the job, so one server can serve
    several jobs one after another.
    """
    return Seal(os.environ.get(SECRET), "servers")


def machine_name() -> str:
    """Return a name that is equal for processes of one user, host and network namespace, which can share memory."""
    try:
        return f"{boot_id()}/{os.readlink('/proc/self/ns/net')}/{os.getuid()}"
    except OSError:
        return uuid.uuid4().hex
