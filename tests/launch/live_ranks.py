"""What ranks of the tests of survivors do: what they are told, line by line, by a pipe beside them named after them.

It imports little, to be there in no time. When all have been started again it ends in order at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
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
