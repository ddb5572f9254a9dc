"""PID 1 of a container: the console script forks there, and the child does its work.

    PID 1 --- forks ---> the command, as anywhere else
    PID 1 <-- signals --- passed on to the command, from the first moment on: the kernel drops those to a PID 1 without
                          a handler
    PID 1 <-- ends ------ of processes whose parents are dead: nobody else asks for their status, and each would stay a
                          zombie. A launcher that did so itself would take the exit codes of its own ranks.

Only the standard library is imported, and little of it: this comes before all else.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_HEARD = {*_PASSED_ON, signal.SIGCHLD}
_LEFT_S = 10.0
"""What the command has left may take so long to end: a checkpoint that is being written, above all. With PID 1 the
kernel kills all others of its namespace."""
_grace: mmap.mmap | None = None  # what the command has told PID 1; None where there is no PID 1 of this module's


def allow(seconds: float) -> None:
    """Tell PID 1 how long what the command has started may take to end, should the command be killed."""
    if _grace is not None:
        _grace[:8] = struct.pack("d", seconds)


def stand_aside() -> None:
    """Go on in a child where this process is PID 1, and end with the child's exit code; else do nothing."""
    global _grace
    if os.getpid() != 1:
        return
    _grace = mmap.mmap(-1, 8)  # shared with the child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, there is no status to ask for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # before the fork: no end of the child is missed
    command = os.fork()
    if command:
        os._exit(_serve(command, _grace))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(command: int, grace: mmap.mmap) -> int:
    """Pass signals on to the command, and ask for the status of all that end; return the exit code."""
    code = None
    others = True
    while code is None:
        number = signal.sigwait(_HEARD)
        if number == signal.SIGCHLD:
            code, others = _reap(command)
        else:
            os.kill(command, number)
    left_s = _LEFT_S
    if code < 0:  # killed: whoever sees to the end of what it has started gives that its time first
        left_s += struct.unpack("d", grace[:8])[0]
    until = time.monotonic() + left_s
    while others and (left_s := until - time.monotonic()) > 0.0:
        heard = signal.sigtimedwait(_HEARD, left_s)
        if heard is None or heard.si_signo != signal.SIGCHLD:  # it is told to end: nothing passes that on any more
            break
        _, others = _reap(command)
    return code if code >= 0 else 128 - code


def _reap(command: int) -> tuple[int | None, bool]:
    """Ask for the status of all that have ended.

    Returns:
        the exit code of the command, if it has, negative where a signal has killed it; and whether there are others.
    """
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if not pid:
            return code, True
        if pid == command:
            code = os.waitstatus_to_exitcode(status)
