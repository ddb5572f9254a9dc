"""The duties of PID 1 in a container: the console script forks, and its child runs the command.

    PID 1 --- forks ---> the command, as anywhere else
    PID 1 <-- signals --- passed on to the command, from the first moment on: the kernel drops signals to a PID 1
                          without a handler
    PID 1 <-- exits ----- of processes whose parents have ended: PID 1 must collect their exit status, else they stay
                          zombies. A launcher that did this itself would also collect the status of its own ranks.

This module runs before everything else, so it imports little, and only the standard library.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_HEARD = {*_PASSED_ON, signal.SIGCHLD}
# Seconds that other processes get to end after the command, above all to write a checkpoint. When PID 1 ends, the
# kernel kills all processes of its namespace.
_LEFT_S = 10.0
_grace: mmap.mmap | None = None  # additional seconds, written by the command; None if this module is not PID 1


def allow(seconds: float) -> None:
    """Add seconds to the time for which PID 1 waits for the command's children if the command is killed."""
    if _grace is not None:
        _grace[:8] = struct.pack("d", seconds)


def stand_aside() -> None:
    """Fork if this process is PID 1: the child returns, and PID 1 ends with the child's exit code; else do nothing."""
    global _grace
    # Anywhere else, the system's own first process has these duties.
    if os.getpid() != 1:
        return
    _grace = mmap.mmap(-1, 8)  # shared with the child
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, the kernel keeps no exit status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # before the fork, so that no signal is missed
    command = os.fork()
    if command:
        os._exit(_serve(command, _grace))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(command: int, grace: mmap.mmap) -> int:
    """Forward signals to the command, and reap all processes that end; return the exit code.

    Args:
        command: Process id of the command.
        grace: Shared memory in which the command has written the seconds that its children get if it is killed.
    """
    code = None
    others = True
    while code is None:
        number = signal.sigwait(_HEARD)
        if number == signal.SIGCHLD:
            code, others = _reap(command)
        else:
            os.kill(command, number)
    left_s = _LEFT_S
    if code < 0:  # killed: its children first get the time that the command has promised them
        left_s += struct.unpack("d", grace[:8])[0]
    until = time.monotonic() + left_s
    while others and (left_s := until - time.monotonic()) > 0.0:
        heard = signal.sigtimedwait(_HEARD, left_s)
        if heard is None or heard.si_signo != signal.SIGCHLD:  # the time is over, or a signal tells PID 1 to end
            break
        _, others = _reap(command)
    return code if code >= 0 else 128 - code


def _reap(command: int) -> tuple[int | None, bool]:
    """Collect the status of all processes that have ended.

    Returns:
        The exit code of the command (negative if a signal has killed it, None if it still runs), and whether there are
        other processes.
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
