"""What launchers of one job tell each other, from host to host: signed lines of JSON.

    both ----- {"lightning_async": 1, "nonce": "..."} -----> as soon as they are connected
    both ----- <signature>:{"what": ...} ------------------> each one signed, numbered, and checked

A signature is HMAC-SHA256 by the job's secret. It covers both nonces, who speaks, and the number of the message, so
that nothing can be left out, sent twice or sent back within a connection, nor played again in another one. What is read
is never executed. Nothing is hidden: whoever sits between the hosts can read it, and can end the connection.

The connection is a plain socket in the launcher's own loop, where nobody waits for a peer. `multiprocessing.connection`
waits, without a limit, for whoever has connected and says nothing; and it checks who speaks only at the start, in
Python 3.11 by MD5.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from lightning_async.comm.membership.signing import Seal
from lightning_async.launch.loop import Loop

__all__ = ["UNKNOWN", "Wire"]

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
"""Without a word for so long, the other launcher is taken for dead."""
GREETING_S = 5.0
"""That a stranger has to show that it knows the secret."""
UNKNOWN = "it does not know this job's secret"
"""The reason for which a connection ends whose other side has another one."""
_LONGEST, _LONGEST_OF_STRANGERS = 1 << 20, 1 << 12
_UNREAD = 1 << 22
_PIECE = 1 << 16
_PROTOCOL = 1


class Wire:
    """One end of a connection. What it hears, and its end, are told by the loop, never from within a call.

    Args:
        loop: that reads and writes.
        channel: a connected socket, which is the wire's now.
        secret: of the job.
        answers: whether this is the side that was connected to.
        hear: called with each message.
        ended: called once, with the reason in words, when the connection is of no use any more; not after `close`.
    """

    def __init__(
        self,
        loop: Loop,
        channel: socket.socket,
        secret: str,
        answers: bool,
        hear: Callable[[dict[str, Any]], object],
        ended: Callable[[str], object],
    ) -> None:
        self._loop, self._channel, self._secret, self._answers = loop, channel, secret, answers
        self._hear, self._ended = hear, ended
        self._nonce = secrets.token_hex(16)
        self._seals: tuple[Seal, Seal] | None = None  # of what is said, and of what is heard
        self._said = self._heard = 0
        self._waiting: list[bytes] = []
        self._in, self._out = bytearray(), bytearray()
        self._open = True
        channel.setblocking(False)
        with contextlib.suppress(OSError):
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._put(json.dumps({"lightning_async": _PROTOCOL, "nonce": self._nonce}).encode())
        loop.after(GREETING_S, (self, "silence"), lambda: self.end(f"no greeting within {GREETING_S:g} s"))
        self._beat()

    @property
    def known(self) -> bool:
        """Whether the other side has shown that it knows the secret."""
        return self._heard > 0

    def send(self, what: str, **more: object) -> None:
        """Say something, when the other side can read it; it never waits."""
        message = json.dumps({"what": what, **more}, separators=(",", ":")).encode()
        if self._seals is None:
            self._waiting.append(message)
        else:
            self._put(self._seals[0].sign(str(self._said), message))
            self._said += 1

    def end(self, why: str) -> None:
        """It is of no use any more."""
        if self._open:
            self.close()
            self._loop.after(0.0, (self, "ended"), lambda: self._ended(why))

    def close(self) -> None:
        """Hear nothing more."""
        self._loop.cancel((self, "ended"))
        if self._open:
            self._open = False
            for what in ("silence", "beat"):
                self._loop.cancel((self, what))
            self._loop.forget(self._channel.fileno())
            self._channel.close()

    def conclude(self, seconds: float) -> None:
        """Before it is closed: wait until the other side has read all, and closes, but no longer than that."""
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while self._open and (left := until - time.monotonic()) > 0:
                self._channel.settimeout(left)
                if self._out:
                    del self._out[: self._channel.send(self._out)]
                    continue
                self._channel.shutdown(socket.SHUT_WR)
                if not self._channel.recv(_PIECE):
                    return

    def _beat(self) -> None:
        self._loop.after(HEARTBEAT_S, (self, "beat"), self._beat)
        if self._seals is not None:
            self.send("beat")

    def _put(self, line: bytes) -> None:
        if not self._open:
            return
        self._out += line + b"\n"
        if len(self._out) > _UNREAD:
            self.end("it does not read what it is told")
            return
        self._loop.watch(self._channel.fileno(), self._ready, writes=True)

    def _ready(self) -> None:
        try:
            if self._out:
                self._write()
            data = self._channel.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"the connection has failed ({error.strerror or error})")
            return
        if not data:
            self.end("the connection was closed")
            return
        self._in += data
        while self._open and (cut := self._in.find(b"\n")) >= 0:
            line = bytes(self._in[:cut])
            del self._in[: cut + 1]
            self._take(line)
        if self._open and len(self._in) > (_LONGEST if self.known else _LONGEST_OF_STRANGERS):
            self.end("what it sends is no message")

    def _write(self) -> None:
        try:
            del self._out[: self._channel.send(self._out[:_PIECE])]
        except BlockingIOError:
            return
        except OSError:  # what the other side has said before it went is still to be read, and then its end
            self._out.clear()
        if not self._out:
            self._loop.watch(self._channel.fileno(), self._ready)

    def _take(self, line: bytes) -> None:
        if self._seals is None:
            self._greeted(line)
            return
        _, _, message = line.partition(b":")
        if not hmac.compare_digest(self._seals[1].sign(str(self._heard), message), line):
            self.end("a message was changed on its way" if self._heard else UNKNOWN)
            return
        self._heard += 1
        self._loop.after(SILENCE_S, (self, "silence"), lambda: self.end(f"no word for {SILENCE_S:g} s"))
        said = _load(message)
        if said.get("what") != "beat":
            self._hear(said)

    def _greeted(self, line: bytes) -> None:
        said = _load(line)
        nonce = said.get("nonce") if said.get("lightning_async") == _PROTOCOL else None
        if not isinstance(nonce, str) or not re.fullmatch(r"[0-9a-f]{32}", nonce):
            self.end("what it sends is no greeting of a launcher's")
            return
        nonces = (self._nonce, nonce) if self._answers else (nonce, self._nonce)
        seal = Seal(self._secret, "launch").within("/".join(nonces))
        sides = ("answers", "asks") if self._answers else ("asks", "answers")
        self._seals = seal.within(sides[0]), seal.within(sides[1])
        waiting, self._waiting = self._waiting, []
        self.send("beat")  # it shows that the secret is known, before anything else is to be said
        for message in waiting:
            self._put(self._seals[0].sign(str(self._said), message))
            self._said += 1


def _load(text: bytes) -> dict[str, Any]:
    """Nothing where it is no object of JSON."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
