"""What ranks of the launcher's tests do: ``ranks.py WHAT ARGUMENTS...``. It imports little, to be there in no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

RANK = int(os.environ.get("RANK", "0"))  # none where doctests are looked for


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # at once: several threads have something to say


def sleep() -> NoReturn:
    say("ready", os.getpid())
    while True:
        time.sleep(60)


def meet() -> None:
    """All ranks of this start have come to this."""
    here = [Path(f"here-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}") for rank in range(2)]
    here[RANK].touch()
    while not all(path.exists() for path in here):
        time.sleep(0.01)


def environment(*arguments: str) -> None:
    say(json.dumps({"arguments": arguments, **os.environ}))


def end(*statuses: str) -> None:
    """Each rank by its own status, or minus a signal; those with "-" wait."""
    status = statuses[RANK]
    print(f"rank {RANK} has had enough", file=sys.stderr)
    if status == "-":
        sleep()
    if int(status) < 0:
        os.kill(os.getpid(), -int(status))
    sys.exit(int(status))


def hears(rank: str) -> None:
    """The other says when it hears of this one's death."""

    def heard(number: int, frame: Any) -> None:
        say("at", time.monotonic())
        sys.exit()

    signal.signal(signal.SIGTERM, heard)
    meet()
    if int(rank) == RANK:
        say("at", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    sleep()


def with_child(status: str) -> None:
    """The first rank ends, and leaves a process behind, as does the other."""
    child = subprocess.Popen(["sleep", "600"])
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    say("children", child.pid, own.pid)
    meet()
    if RANK == 0:
        end(status)
    sleep()


def saves(seconds: str) -> None:
    """SIGTERM: some output, then exit code 75; its child would die of one."""
    heard = (
        "import signal, time; signal.signal(15, lambda n, f: print('child heard', n)); print('child'); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-u", "-c", heard], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()

    def save(number: int, frame: Any) -> None:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            say("saving", "x" * 2000)  # more than a pipe holds
            time.sleep(0.005)
        os.set_blocking(child.stdout.fileno(), False)  # type: ignore[union-attr]
        say("saved", RANK, child.poll(), os.environ["MASTER_PORT"])
        os._exit(75)

    signal.signal(signal.SIGTERM, save)
    sleep()


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleep()


def signals() -> None:
    """Says which signals come; SIGINT ends it, and SIGUSR2 rank 0."""

    def heard(number: int, frame: Any) -> None:
        say("heard", signal.Signals(number).name)
        if number == signal.SIGUSR2 and RANK == 0:
            end("5")

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    try:
        sleep()
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(4)


def lines(count: str) -> None:
    """Lines in pieces, to both streams, with a pause within each."""
    for number in range(int(count)):
        for fd in (1, 2):
            text = f"<{RANK} {fd} {number} {'é' * (number * 7 % 3000)}>\n".encode()
            cut = len(text) // 2 + 1
            os.write(fd, text[:cut])
            os.write(fd, text[cut:])
    os.write(1, b"no end of line")


def floods() -> None:
    """More than anybody reads."""
    say("ready")
    while True:
        os.write(1, b"x" * 10_000 + b"\n")


def second_time(status: str) -> None:
    """Rank 1 dies in the first start; in the second all is well."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    say("start", count, os.environ["MASTER_PORT"], time.monotonic())
    if count != "0":
        return
    meet()
    if RANK == 1:
        end("", status)
    sleep()


def hangs_at_first() -> None:
    """In the first start nobody ever trains."""
    say("start", os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sleep()


def in_container() -> None:
    """What the launcher is PID 1 for: orphans. Each rank leaves one that ends at once, and rank 0 one that outlives the
    launcher by a moment. Then it sends SIGTERM to PID 1, upon which the ranks save."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    while lives(orphan(lambda: None)):
        time.sleep(0.01)
    say("reaped")
    meet()
    if RANK == 0:
        orphan(outlive)
        os.kill(1, signal.SIGTERM)
    sleep()


def outlive() -> None:
    """The launcher; its number is the first one after PID 1."""
    while lives(2):
        time.sleep(0.01)
    time.sleep(0.3)
    Path("outlived").touch()


def orphan(do: Callable[[], object]) -> int:
    """A process in a session of its own, whose parent has ended."""
    read, write = os.pipe()
    if parent := os.fork():
        os.waitpid(parent, 0)
        return int(os.read(read, 20))
    os.setsid()
    if child := os.fork():
        os.write(write, str(child).encode())
        os._exit(0)
    do()
    os._exit(0)


def lives(pid: int) -> bool:
    """Or nobody has asked for its status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def group() -> None:
    """Torch's own default group, by the environment alone; where the store listens."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1) * (RANK + 1)
    dist.all_reduce(value)
    say("sum", float(value))
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()]
    say("listens", *[row[1].removesuffix(port) for row in rows if row[1].endswith(port) and row[3] == "0A"])
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
