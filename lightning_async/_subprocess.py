"""Helper processes of this package's, which import no more than they need."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning_async._sockets import unshared

_BOOT = """
import importlib, json, sys, types
folder, path, module, arguments = json.loads(sys.argv[1])
sys.path += path
package = sys.modules["lightning_async"] = types.ModuleType("lightning_async")
package.__path__ = [folder]
importlib.import_module(module).main(*arguments)
"""
"""The package is a bare name there: what its ``__init__`` imports takes seconds, and hundreds of megabytes."""


def bare_command(module: str, arguments: list[Any], title: str) -> list[str]:
    """Return the command line of a process that calls ``main`` of a module with ``arguments``, in JSON's terms.

    The system's tools show ``title``.
    """
    folder = str(Path(__file__).resolve().parent)
    call = json.dumps([folder, [os.path.abspath(path) for path in sys.path if path], module, arguments])
    # Isolated (-I): a module beside the user's script cannot take the place of one that it imports.
    return [sys.executable, "-I", "-S", "-c", _BOOT, call, title]


class HelperProcess:
    """A process that calls ``main`` of a module, in a session of its own, and a socket to it: its first argument.

    The ``kind`` is the socket's; the process inherits ``descriptors``. Forks of this process do not have the socket, so
    that the helper hears of this one's end. Raises OSError where the system does not let it start.
    """

    _left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(
        self, module: str, arguments: Sequence[Any], title: str, *, descriptors: Sequence[int] = (),
        kind: int = socket.SOCK_STREAM, stdout: int | None = subprocess.DEVNULL, stderr: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
        unshared(self.channel)  # at once: the start takes milliseconds, in which another thread may fork
        try:
            with theirs:
                self.popen = subprocess.Popen(
                    bare_command(module, [theirs.fileno(), *arguments], title),
                    stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env,
                    pass_fds=[theirs.fileno(), *descriptors], start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self.channel.close()
            raise

    def wait(self, within_s: float | None = None) -> int | None:
        """Return its exit status, or minus the signal that has killed it; None where it has not ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(within_s)
        return None

    def leave(self) -> None:
        """Let it end by itself; its status is taken when the next one is left, as without that it stays a zombie."""
        self._left[:] = [self.popen, *(each for each in self._left if each.poll() is None)]


def in_words(status: int) -> str:
    """Say how a process has ended.

    >>> in_words(-9), in_words(1)
    ('signal 9', 'exit status 1')
    """
    return f"signal {-status}" if status < 0 else f"exit status {status}"
