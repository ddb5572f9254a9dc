"""The wire between replicas: a rate-limited link, or the unshaped loopback.

A `shaped` link is one network namespace per replica and one that holds a bridge, as a switch. Both ends of every cable
send through a token bucket (``tc tbf``), so each replica has a full-duplex port of the given rate. It needs root.
Namespaces carry the process id of the benchmark that made them, and are deleted when the context ends; those of a
benchmark that was killed go when the next one starts.

Without root, a `paced` link stands in: the kernel holds every TCP connection of the replicas to the rate. That is a
limit per connection and not per port, which is the same as long as a replica sends to one neighbour at a time, as in
a ring.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.forking import ForkServer

__all__ = [
    "Link",
    "Place",
    "loopback",
    "pace_sockets",
    "paced",
    "remove_stale",
    "sent_bytes",
    "shaped",
    "shaping_problem",
]

PREFIX = "labench"
SO_MAX_PACING_RATE = 47
"""Linux's number; Python names it only from 3.14 on."""
_BURST = "128kb"
"""10 ms at 100 Mbit/s. A bucket smaller than a segmentation-offload packet (64 KB) has the kernel cut it up, and the
cores that the replicas train on do what a network card does elsewhere: 80 ms of Gloo's thread per round, not 10."""
_QUEUE = "50ms"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one replica runs.

    Args:
        prefix: what to put before its command, to start it there.
        address: the IP address at which the others reach it.
        interface: the network interface with this address.
    """

    prefix: tuple[str, ...]
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Link:
    """The places of all replicas, and what lies between them.

    Args:
        kind: a few words for the report.
        places: one place per replica.
        rate_mbit: the nominal rate; None where nothing limits it.
        private: whether the ports and counters of the places belong to this benchmark alone.
        paced: whether the processes must hold their own connections to the rate (`pace_sockets`).
        forks: where the ranks come from, if they need not start anew.
        buckets: what shapes it: the namespace and the device of each token bucket.
    """

    kind: str
    places: tuple[Place, ...]
    rate_mbit: float | None
    private: bool
    paced: bool = False
    forks: ForkServer | None = None
    buckets: tuple[tuple[str, str], ...] = ()

    def cut(self, first: int, second: int) -> None:
        """Let nothing pass between two replicas of a shaped link, silently; each reaches all others as before."""
        for namespace, device in self.buckets:
            if device in (f"port{first}", f"port{second}"):
                _run("bridge", "-n", namespace, "link", "set", "dev", device, "isolated", "on")

    def set_rate(self, rate_mbit: float) -> None:
        """Change the rate of a shaped link at once, for all replicas."""
        for namespace, device in self.buckets:
            _run("tc", "-n", namespace, "qdisc", "change", "dev", device, *_bucket(rate_mbit))

    def measured_mbit(self, num_bytes: int | None = None) -> float:
        """Raw TCP throughput from the second place to the first, in Mbit/s."""
        if num_bytes is None:
            num_bytes = 200_000_000 if self.rate_mbit is None else int(self.rate_mbit * 1e6 / 8 * 1.5)
        receiver = subprocess.Popen(
            [*self.places[0].prefix, sys.executable, "-c", _RECEIVE, self.places[0].address],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            command = [*self.places[1].prefix, sys.executable, "-c", _SEND, self.places[0].address, port]
            rate = str(int(self.rate_mbit * 1e6 / 8)) if self.paced and self.rate_mbit else ""
            subprocess.run([*command, str(num_bytes), rate], check=True, timeout=60)
            received, seconds = receiver.communicate(timeout=60)[0].split()
        finally:
            receiver.kill()
            receiver.wait()
        return int(received) * 8 / 1e6 / float(seconds)


# The clock starts before the first bytes, which are not counted: the bucket is full then.
_RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
connection = listener.accept()[0]
start, count = time.monotonic(), 0
connection.sendall(b"!")  # else bytes would wait here already, for a receiver that is given no time
connection.recv(1 << 16)
while data := connection.recv(1 << 20):
    count += len(data)
print(count, time.monotonic() - start)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    if sys.argv[4]:
        connection.setsockopt(socket.SOL_SOCKET, 47, int(sys.argv[4]))
    connection.recv(1)
    connection.sendall(bytes(int(sys.argv[3])))
"""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _bucket(rate_mbit: float) -> tuple[str, ...]:
    return ("root", "tbf", "rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _QUEUE)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _delete(name: str) -> None:
    """End what still runs in a namespace of this benchmark, and remove it."""
    with contextlib.suppress(RuntimeError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove_stale() -> list[str]:
    """Delete the namespaces of benchmarks that no longer run; returns their names."""
    stale = [name for name in _namespaces() if not _alive(int(name.split("-")[1]))]
    for name in stale:
        _delete(name)
    return stale


@functools.cache
def shaping_problem() -> str | None:
    """Why this process cannot make a shaped link; None if it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with shaped(2, 100.0):
            return None
    except RuntimeError as error:
        return str(error)


@contextlib.contextmanager
def shaped(num_replicas: int, rate_mbit: float) -> Iterator[Link]:
    """Replicas in namespaces of their own, each with a port of ``rate_mbit`` on one switch."""
    remove_stale()
    run = f"{PREFIX}-{os.getpid()}"
    switch = f"{run}-switch"
    names = [f"{run}-{rank}" for rank in range(num_replicas)]
    buckets: list[tuple[str, str]] = []
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        places = []
        for rank, name in enumerate(names):
            port, address = f"port{rank}", f"10.77.0.{rank + 1}"
            _run("ip", "netns", "add", name)
            cable = ("type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "-n", switch, "link", "add", "eth0", "netns", name, *cable)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            for namespace, device in ((name, "eth0"), (switch, port)):
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *_bucket(rate_mbit))
                buckets.append((namespace, device))
            places.append(Place(prefix=("ip", "netns", "exec", name), address=address, interface="eth0"))
        kind = f"{rate_mbit:g} Mbit/s token bucket (tc tbf) between network namespaces"
        yield Link(kind=kind, places=tuple(places), rate_mbit=rate_mbit, private=True, buckets=tuple(buckets))
    finally:
        for name in (*names, switch):
            _delete(name)


@contextlib.contextmanager
def loopback(num_replicas: int) -> Iterator[Link]:
    """All replicas on one unshaped loopback: that of a namespace of their own for root, else the machine's."""
    kind = "unshaped loopback"
    if shaping_problem() is not None:
        place = Place(prefix=(), address="127.0.0.1", interface="lo")
        yield Link(kind=kind, places=(place,) * num_replicas, rate_mbit=None, private=False)
        return
    remove_stale()
    name = f"{PREFIX}-{os.getpid()}-lo"
    place = Place(prefix=("ip", "netns", "exec", name), address="127.0.0.1", interface="lo")
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        yield Link(kind=kind, places=(place,) * num_replicas, rate_mbit=None, private=True)
    finally:
        _delete(name)


@contextlib.contextmanager
def paced(num_replicas: int, rate_mbit: float) -> Iterator[Link]:
    """All replicas on the machine's loopback, each of their connections held to ``rate_mbit`` by the kernel."""
    place = Place(prefix=(), address="127.0.0.1", interface="lo")
    kind = f"{rate_mbit:g} Mbit/s per connection (kernel pacing) on loopback"
    yield Link(kind=kind, places=(place,) * num_replicas, rate_mbit=rate_mbit, private=False, paced=True)


def pace_sockets(rate_mbit: float, every_s: float = 0.1) -> None:
    """Hold all TCP connections of this process to ``rate_mbit``, those to come too (a thread looks for them)."""
    done: set[str] = set()
    rate = int(rate_mbit * 1e6 / 8)

    def look() -> None:
        while True:
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/self/fd/{fd}")
                    if not target.startswith("socket:") or target in done:
                        continue
                    done.add(target)
                    with socket.socket(fileno=os.dup(int(fd))) as connection:
                        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
            time.sleep(every_s)

    threading.Thread(target=look, name="pace", daemon=True).start()


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def sent_bytes(interface: str) -> int:
    """Bytes that ``interface`` of this process's network namespace has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"`interface={interface!r}` is not in this network namespace.")


if __name__ == "__main__":
    for _link in (shaped(2, 100.0), paced(2, 100.0), loopback(2)):
        with _link as _made:
            _start = time.monotonic()
            print(f"{_made.kind}: {_made.measured_mbit():.1f} Mbit/s ({time.monotonic() - _start:.1f} s)")
