"""What ranks of the tests of survivors do: what they are told, line by line, by a pipe beside them named after them.

It imports little, to be there in no time. When all have been started again it ends in order at once.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.launch.ranks import say

SOURCE = Path(__file__).resolve().parents[2] / "lightning_async/membership/launcher_channel.py"


def load() -> ModuleType:
    """The module without its package, which imports torch."""
    spec = importlib.util.spec_from_file_location("launched", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end(status: str) -> NoReturn:
    print("it has had enough", file=sys.stderr)
    sys.exit(int(status))


def tell(number: str, *members: str) -> None:
    launched.tell_generation(int(number), members)
    say("told", number)


def listens() -> None:
    """Says of which deaths the launcher tells it."""
    launched.listen(lambda death: say("dead", *death))
    say("listens")


def saves() -> None:
    """SIGTERM: exit code 75."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    say("saves")


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("deaf")


def garbage() -> None:
    """All that may come out of a descriptor that others have inherited."""
    descriptor = int(os.environ[launched.CHANNEL].partition(":")[0])
    mine = {"process": os.getpid(), "generation": 9}
    for members in (None, [], ["0"], ["0", "1", "7"], ["0", "1", ["1"]], ["0", "1", "01"]):
        os.write(descriptor, json.dumps({**mine, "members": members}).encode())
    os.write(descriptor, json.dumps({**mine, "members": ["0", "1"], "process": 1}).encode())
    os.write(descriptor, json.dumps({**mine, "members": ["0", "1"], "generation": "9"}).encode())
    for raw in (b"\xff\0", b"\n", b"", b"[" * 10_000, b"1" * 10_000):
        os.write(descriptor, raw)
    say("garbage")


def fork() -> None:
    """A child in a session of its own keeps the rank's descriptors, and speaks as if it were the rank."""
    if os.fork():
        return
    os.setsid()
    signal.alarm(150)  # the test ends it, if it does not fail
    launched.tell_generation(9, ["0", "1"])
    say("child", os.getpid())
    while True:
        signal.pause()


def imports(name: str) -> None:
    importlib.import_module(name)
    say("imported")


def sets(name: str, value: str) -> None:
    os.environ[name] = value
    say("set")


def describe() -> None:
    """All that a program can know of how it was started, and that is the same at each start."""
    main, status = sys.modules["__main__"], Path("/proc/self/status").read_text().splitlines()
    descriptors = [os.readlink(f"/proc/self/fd/{number}") for number in range(256) if is_open(number)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(in_child)
    told = {
        "argv": [sys.argv, sys.orig_argv],
        "path": sys.path,
        "flags": str(sys.flags),
        "main": [str(vars(main).get(f"__{name}__")) for name in ("name", "file", "package", "cached", "doc")],
        "loader": [type(main.__loader__).__name__, main.__spec__ and main.__spec__.name],
        "mine": describe.__globals__ is vars(main),
        "names": sorted(name for name in vars(main) if name.startswith("__")),
        "child": child,
        "environment": {k: v for k, v in os.environ.items() if k not in (launched.REJOIN, launched.CHANNEL)},
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "threads": [line for line in status if line.startswith("Threads")],
        "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid(), os.getppid()],
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "streams": [
            repr(getattr(sys, name)) + repr(getattr(sys, name).line_buffering) for name in ("stdout", "stderr")
        ],
        "descriptors": [descriptors[:3], sorted(re.sub(r"\d+", "", link) for link in descriptors)],
        "number": sys.modules["pytorch_lightning"].rank_zero_only.rank,
        "place": [os.getcwd(), os.umask(0o22)],
    }
    say("described", json.dumps(told))


def is_open(number: int) -> bool:
    return Path(f"/proc/self/fd/{number}").is_symlink()


def in_child() -> list[object]:
    return [__name__, Path(__file__).name, sys.argv, sys.path]


if __name__ == "__main__":
    launched = load()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        say("again")
        sys.exit()
    alone = os.environ.get(launched.REJOIN, "0")
    pipe = Path(f"rank-{os.environ['RANK']}-{alone}")
    os.mkfifo(pipe)
    say("ready", os.getpid(), alone, *[os.environ[name] for name in ("WORLD_SIZE", "MASTER_PORT")])
    with pipe.open() as told:
        while line := told.readline():
            what, *arguments = line.split()
            globals()[what](*arguments)
