"""What a forked rank starts may be forked, too: launchers and Lightning start ranks as interpreters of their own.

`open_nursery` forks a process beside the rank, which has imported what the rank found imported, and puts a function of
its own in the place of the one by which Python starts programs, ``_posixsubprocess.fork_exec``. A command that is a
program of Python comes out of that process, all others are started as ever. Each is the rank's own child, with the
session, descriptors, environment and folder that were asked for; what a fork cannot give is in `tests.forking`.
A helper process of the package's is no rank: `fork_from_here` forks what it starts from itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

__all__ = ["Program", "fork_from_here", "is_isolated", "open_nursery", "run_as_main"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_HIGH = 512
"""Descriptors from here on are those of the nurseries."""
_ANSWER_S = 60.0
_ISOLATED = ("-I", "-S")
_OPTIONS = ("-u", "-B", *_ISOLATED)
"""The first two are as the process has them that forks programs: it writes at once, byte code where the tests do."""
_DEAR = ("lightning_async.parameter_server.", "lightning_async.membership.store_process")
"""The helper processes of the package's that import torch, or start what does."""
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)
_fork_exec: Any = importlib.import_module("_posixsubprocess").fork_exec
_lock = threading.Lock()


class Program(NamedTuple):
    """What one program is started with.

    Args:
        arguments: those behind the interpreter.
        cwd, environment: of the program.
        descriptors: their numbers in it.
        leads: whether it leads a session.
        dies: whether the death of who has started it is a SIGTERM to it.
    """

    arguments: list[str]
    cwd: str
    environment: dict[str, str]
    descriptors: list[int]
    leads: bool
    dies: bool


CanFork = Callable[[Mapping[str, str], Mapping[str, str]], bool]
ForkExec = Callable[[list[int], Program], int]


def is_isolated(arguments: Sequence[str]) -> bool:
    """Whether a program finds the standard library only, as helper processes of the package's do."""
    return {*_ISOLATED} <= {*itertools.takewhile(_OPTIONS.__contains__, arguments)}


def open_nursery(can_fork: CanFork) -> Program | None:
    """Fork the process that programs come out of; it ends with this one.

    Args:
        can_fork: whether a program with one environment may come out of a process that has another one.

    Returns:
        None in this process; in each program, what it is to run.
    """
    mine, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = os.getpid()
    if os.fork() == 0:
        mine.close()
        group = os.getpgrp()
        os.setpgid(0, 0)  # signals to the rank's group are for the rank, and for what it has started
        return _serve(control, rank, group)
    control.close()
    mine = socket.socket(fileno=_move(mine.detach()))
    _start_programs_by(can_fork, lambda places, program: _ask(mine, program, places))
    return None


def fork_from_here(can_fork: CanFork, become: Callable[[Program], None]) -> None:
    """Fork the programs that this process starts from itself, while it has one thread and nothing to lose.

    Args:
        can_fork: see `open_nursery`.
        become: gives a process the program's folder and environment.
    """

    def fork(places: list[int], program: Program) -> int:
        if pid := os.fork():
            return pid
        status = 1
        try:
            _keep_only(places, program.descriptors)
            if program.leads:
                os.setsid()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            become(program)
            run_as_main(program.arguments)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, int | None):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        _end(status)

    _start_programs_by(can_fork, fork)


def _start_programs_by(can_fork: CanFork, start: ForkExec) -> None:
    before = dict(os.environ)
    here = os.getpid()

    def fork_exec(*given: Any) -> int:
        program, places = _read(given)
        of_a_fork = os.getpid() != here  # whose children the nursery's are not
        if program is None or of_a_fork or not can_fork(program.environment, before):
            return _fork_exec(*given)
        return start(places, program)

    for module in (subprocess, importlib.import_module("_posixsubprocess")):
        for name in ("fork_exec", "_fork_exec"):
            if hasattr(module, name):
                setattr(module, name, fork_exec)


def _keep_only(places: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open descriptors other numbers, and close all others but the standard ones."""
    moved = [fcntl.fcntl(place, fcntl.F_DUPFD_CLOEXEC, _HIGH) for place in places]
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in moved:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(number)
    _put(moved, numbers)


def _put(moved: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors that `_move` has moved the numbers that a program looks for."""
    for place, number in zip(moved, numbers, strict=True):
        os.dup2(place, number)
        os.close(place)


def _end(status: int) -> NoReturn:
    """End as an interpreter ends, whatever is below on the stack."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _move(descriptor: int) -> int:
    """Its new number, one that no program looks for."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return moved


def _read(given: Sequence[Any]) -> tuple[Program | None, list[int]]:
    """The program, and the descriptors for it; None where the command is no program of Python as anybody starts it."""
    args, executables, close_fds, keep, cwd, env, *pipes, restore, leads = given[:16]
    del restore  # Python ignores SIGPIPE as it starts, whatever it was
    before = next((each for each in given[16:] if callable(each)), None)
    usual = all(each is before or each in (None, -1, False, True) for each in given[16:])
    dies = getattr(before, "__name__", "") == "die_with_the_launcher"  # of the package's launcher
    arguments = [os.fsdecode(each) for each in args][1:]
    first = next(itertools.dropwhile(_OPTIONS.__contains__, arguments), "-")
    is_python = os.fsencode(sys.executable) in [os.fsencode(each) for each in executables]
    is_program = first in ("-c", "-m") or not first.startswith("-")
    is_cheap = is_isolated(arguments) and not any(dear in each for dear in _DEAR for each in arguments)
    if not (usual and close_fds and is_python and is_program and not is_cheap and (before is None or dies)):
        return None, []
    read, _, _, write, _, error, _, problem = pipes
    streams = {number: place for number, place in enumerate((read, write, error)) if place != -1}
    streams |= {number: number for number in map(int, keep) if number != problem}
    environment = dict(os.environ) if env is None else dict(os.fsdecode(each).split("=", 1) for each in env)
    folder = os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd))
    return Program(arguments, folder, environment, [*streams], bool(leads), dies), [*streams.values()]


def _ask(nursery: socket.socket, program: Program, places: Sequence[int]) -> int:
    """The number of the process, a child of this one: who has forked it has ended, and this is the next above."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _lock, ours:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with theirs:
            socket.send_fds(nursery, [json.dumps(program).encode()], [theirs.fileno(), *places])
        ours.settimeout(_ANSWER_S)
        pid = ours.recv(64)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not pid:
        raise OSError("the process that forks programs has ended")
    return int(pid)


def _serve(control: socket.socket, rank: int, group: int) -> Program:
    """Fork a program for each request. Returns in a program."""
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1 << 20, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            program = Program(*json.loads(message))
            _begin(program, control, descriptors, rank, group)
            return program
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(program: Program, control: socket.socket, descriptors: Sequence[int], rank: int, group: int) -> None:
    """Be the rank's child, and have what the program was given."""
    until = time.monotonic() + _ANSWER_S
    while os.getppid() != rank:
        if time.monotonic() > until:
            os._exit(128 + signal.SIGTERM)
        time.sleep(0.0005)
    if program.dies:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != rank:
            os._exit(128 + signal.SIGTERM)
    if program.leads:
        os.setsid()
    else:
        os.setpgid(0, group)
    control.close()
    asked_by, *moved = [_move(each) for each in descriptors]
    _put(moved, program.descriptors)
    os.chdir(program.cwd)
    with socket.socket(fileno=asked_by) as asker:
        asker.send(str(os.getpid()).encode())


def run_as_main(arguments: Sequence[str]) -> None:
    """As ``python ARGUMENTS``: a script, a module or a text, and what it is given."""
    sys.orig_argv[:] = [sys.executable, *arguments]
    kind, *rest = itertools.dropwhile(_OPTIONS.__contains__, arguments)
    if kind == "-m":
        sys.path[0], sys.argv[:] = os.getcwd(), ["-m", *rest[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *rest[1:]]
        if is_isolated(arguments):
            library = os.path.dirname(sysconfig.get_path("stdlib"))
            sys.path[:] = [each for each in sys.path if each.startswith(library) and "site-packages" not in each]
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
    else:
        path = os.path.join(os.getcwd(), kind)
        sys.path[0], sys.argv[:] = os.path.dirname(os.path.realpath(path)), [kind, *rest]
        main.__dict__.update(__file__=path, __cached__=None)
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)
