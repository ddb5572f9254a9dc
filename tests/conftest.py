"""Every test leaves the process as it found it, or fails.

Threads, child processes, environment variables, the working directory and its files, and the default process group
are looked at before and after each test. What is left behind is put right where that is possible, so that one
careless test does not fail those after it.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes says what else the machine does

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that has started this in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start is interrupted as from a terminal

GRACE_S = 30.0
"""How long threads and processes that are already ending may take to do so."""

HARMLESS_THREADS = (
    "pytest_timeout",  # the plugin's timer
    "pytest-watcher",
    "tqdm_monitor",
    "QueueFeederThread",  # ends with its queue, at garbage collection
    "InductorSubproc",  # torch.compile keeps its pool of compilers
    "SubprocPool",
)
HARMLESS_THREAD_CLASSES = ("TMonitor", "_DummyThread", "TimerThread")  # tqdm's monitor, threads that C started
HARMLESS_COMMANDS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    "tests.forking",  # ranks come out of it; `tests.support` looks after them
)
HARMLESS_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",  # Lightning's `seed_everything` hands the seed to the processes it starts
    "PL_SEED_WORKERS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "CUDA_MODULE_LOADING",
    "COLUMNS",
    "LINES",
}


def leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Names of living threads that were not there before, without those known to be harmless."""
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread not in before
        and not thread.name.startswith(HARMLESS_THREADS)
        and type(thread).__name__ not in HARMLESS_THREAD_CLASSES
    )


def children() -> dict[int, str]:
    """Living child processes with their command lines."""
    tasks = Path("/proc/self/task")
    if not (tasks / str(threading.get_native_id()) / "children").exists():  # not Linux
        return {child.pid: child.name for child in multiprocessing.active_children() if child.pid is not None}
    found = {}
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                        found[int(pid)] = command.decode(errors="replace")
    return found


def leaked_processes(before: dict[int, str]) -> dict[int, str]:
    return {
        pid: command
        for pid, command in children().items()
        if pid not in before and not any(part in command for part in HARMLESS_COMMANDS)
    }


def restore_variables(before: dict[str, str]) -> list[str]:
    """Put the environment right, harmless changes too; the names of the others."""
    names = sorted(name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name))
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [name for name in names if name not in HARMLESS_VARIABLES]


def files_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(".") and name != "__pycache__"}


def _wait_until_empty(look: Callable[..., T], *args: object) -> T:
    """What ``look`` finds once that is nothing, or once the grace is over."""
    deadline = time.monotonic() + GRACE_S
    while (found := look(*args)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def leaks_since(
    threads: set[threading.Thread],
    processes: dict[int, str],
    environment: dict[str, str],
    cwd: Path,
    files: set[str],
) -> list[str]:
    """One line for each thing left behind; puts right what it can."""
    leaks = []
    if names := restore_variables(environment):
        leaks.append(f"changed environment variables: {', '.join(names)}")

    if Path.cwd() != cwd:
        leaks.append(f"changed the working directory to {Path.cwd()}")
        os.chdir(cwd)
    if stray := sorted(files_in(cwd) - files):
        leaks.append(f"left files in the working directory: {', '.join(stray)}")

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        leaks.append("left the default process group initialised")
        distributed.destroy_process_group()

    if names := _wait_until_empty(leaked_threads, threads):
        leaks.append(f"left threads running: {names}")
    if found := _wait_until_empty(leaked_processes, processes):
        leaks.append(f"left processes running: {found}")
        for child in multiprocessing.active_children():
            child.kill()
    return leaks


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    before = (set(threading.enumerate()), children(), dict(os.environ), Path.cwd(), files_in(Path.cwd()))
    yield
    if leaks := leaks_since(*before):
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


LONGEST = (
    "strategies/test_failures.py",
    "callbacks/test_checkpoint_losses.py",
    "strategies/test_live_ranks.py",
    "examples/test_horovod.py",
    "strategies/test_redistribution.py",
    "strategies/test_launch.py",
    "strategies/test_horovod_mpi.py",
    "strategies/test_joining.py",
    "examples/test_char_lm.py",
    "strategies/test_odd_joining.py",
    "callbacks/test_checkpoint_unusual_ranks.py",
    "launch/test_hosts.py",
    "launch/test_training.py",
    "strategies/test_horovod_averaging.py",
    "strategies/test_unsupported.py",
    "benchmarks/test_benchmarks.py",
    "callbacks/test_checkpoint_ranks.py",
    "strategies/test_features.py",
    "strategies/test_left_as_it_was.py",
    "membership/test_heartbeat_store.py",
    "test_extending.py",
)
"""Files that take half a minute or more: where processes share the files, these go first, so that all end together."""


ALONE = "alone and not benchmark"
"""As `make test` asks for them."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look for garbage in it meanwhile, or ever after, takes a second in eight."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "tests.start_rank")
"""Audit events by which a process starts; the last one is of `tests.forking`."""

_no_processes: list[str] = []
"""The test that runs now, unless it is marked: that one may start none."""


def _refuse_processes(event: str, arguments: object) -> None:
    if event in STARTS and _no_processes:
        raise RuntimeError(f"{_no_processes[0]} starts a process: mark it `@pytest.mark.processes`")


platform.platform()  # has `uname -p` run, once in a process: the code under test may ask too
sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _no_processes[:] = [] if item.get_closest_marker("processes") else [item.nodeid]
    try:
        return (yield)
    finally:
        _no_processes.clear()


BEFORE_COLLECTION = set(threading.enumerate()), children()


def pytest_collection_finish(session: pytest.Session) -> None:
    """`--doctest-modules` imports every module, scripts too: one that does its work then does it in each process."""
    threads, processes = BEFORE_COLLECTION
    if found := [*leaked_threads(threads), *leaked_processes(processes).values()]:
        raise pytest.UsageError(f"importing the tests has started {found}")
    if found := [item.nodeid for item in session.items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"processes that share the tests cannot agree on what these are called: {found[:3]}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The few tests that run alone are asked for by their mark: no other file is imported for that."""
    if config.option.markexpr == ALONE and collection_path.suffix == ".py" and collection_path.name != "conftest.py":
        return "pytest.mark.alone" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # see `make test`
        first = {str(Path(__file__).parent / name): place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: first.get(str(item.path), len(first)))
