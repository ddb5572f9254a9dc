"""Helper processes of this package, which import no more than they need."""

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
"""The helper's program. It puts an empty module in place of the package, because the package's ``__init__`` imports
torch and Lightning, which takes seconds and hundreds of megabytes."""


def status_of(process: int) -> list[str]:
    """Return the fields behind the name in /proc/PID/stat, the first of which is the state; OSError at its end."""
    return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()


def boot_id() -> str:
    """Return an id of this host since it was started, because two hosts may have the same name; raise OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def bare_command(module: str, arguments: list[Any], title: str) -> list[str]:
    """Return the command line of a process that calls the function ``main`` of a module.

    Args:
        module: Full name of the module.
        arguments: Arguments of ``main``; values that JSON can hold.
        title: Last word of the command line, by which people recognise the process in ``ps``.
    """
    folder = str(Path(__file__).resolve().parent)
    call = json.dumps([folder, [os.path.abspath(path) for path in sys.path if path], module, arguments])
    # Isolated (-I), so that a file beside the user's script cannot replace a module that the helper imports.
    return [sys.executable, "-I", "-S", "-c", _BOOT, call, title]


class HelperProcess:
    """A helper process that calls the function ``main`` of a module. A socket pair connects it with this process.

    The helper runs in a POSIX session of its own, so signals to this process's group do not reach it. ``main`` gets the
    descriptor of the helper's socket as its first argument. Forks of this process do not keep this process's socket
    open, so the helper notices when this process ends.

    Args:
        module: Full name of the module.
        arguments: Further arguments of ``main``; values that JSON can hold.
        title: Name of the helper in ``ps``.
        descriptors: File descriptors that the helper inherits. Default: none.
        kind: Type of the socket. Default: a stream.
        stdout: Output of the helper, as for `subprocess.Popen`. Default: dropped.
        stderr: Error output of the helper, as for `subprocess.Popen`. Default: that of this process.
        env: Environment variables of the helper. Default: None, those of this process.

    Raises:
        OSError: The system does not start the helper.
    """

    _left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(
        self, module: str, arguments: Sequence[Any], title: str, *, descriptors: Sequence[int] = (),
        kind: int = socket.SOCK_STREAM, stdout: int | None = subprocess.DEVNULL, stderr: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, kind)
        unshared(self.channel)  # Before the start, which takes milliseconds: another thread may fork meanwhile.
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
        """Wait for the end of the helper, and return its exit status.

        If a signal has killed the helper, the status is minus the signal's number.

        Args:
            within_s: Time limit in seconds. If the helper still runs after it, return None. Default: None, no limit.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(within_s)
        return None

    def leave(self) -> None:
        """Stop managing the helper: it ends by itself, and nobody waits for it.

        Each call also collects the exit statuses of helpers that were left earlier and have ended since. Without this,
        they would stay zombies.
        """
        self._left[:] = [self.popen, *(each for each in self._left if each.poll() is None)]


def in_words(status: int) -> str:
    """Return how a process has ended, in words, from its exit status.

    >>> in_words(-9), in_words(1)
    ('signal 9', 'exit status 1')
    """
    return f"signal {-status}" if status < 0 else f"exit status {status}"
