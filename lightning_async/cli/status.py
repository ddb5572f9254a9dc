"""The command that shows what a job's replicas do while it runs: ``lightning-async status [HOST:PORT]``."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_async.launch.environment import ADDRESS
from lightning_async.launch.registry import running
from lightning_async.membership.signing import SECRET
from lightning_async.membership.status import read_standings
from lightning_async.monitor.status import JobStatus, serve

_TIMEOUT = timedelta(seconds=5)
_EPILOG = f"""Without HOST:PORT, this shows all jobs that `lightning-async launch` runs for you on this host. HOST:PORT
is the address of any job's store, which is MASTER_ADDR and MASTER_PORT of its ranks. Records are checked with the
secret in {SECRET}, if it is set.

exit codes:
  0  each job was shown; or the watched jobs have ended
  1  there is no job, or its store does not answer
"""


@dataclass(frozen=True)
class StoreAddress:
    """The address of a store, and the secret of its job.

    Args:
        host: Host of the store.
        port: Port of the store.
        secret: Secret of the job; empty if it is unknown.
    """

    host: str
    port: int
    secret: str

    @classmethod
    def of(cls, address: str) -> StoreAddress:
        """Parse an address ``HOST:PORT``, and take the secret from the environment."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{address!r} is no HOST:PORT.")
        return cls(host.strip("[]"), int(port), os.environ.get(SECRET, ""))

    def look(self) -> JobStatus:
        try:
            # Tried first, because the store's own client would try for long, and print stack traces.
            socket.create_connection((self.host, self.port), _TIMEOUT.total_seconds()).close()
            standings = read_standings(_client(self.host, self.port), self.secret)
        except (OSError, RuntimeError):
            # The store may be gone, and another job may use its port later.
            _client.cache_clear()
            raise
        return JobStatus.of(f"{self.host}:{self.port}", standings, time.time())


@functools.cache
def _client(host: str, port: int) -> Any:
    """Return the client of a store.

    It is created only once, because a store answers nobody while it accepts a client.
    """
    from torch._C._distributed_c10d import TCPStore  # imported here, because it takes seconds

    return TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the given job, or all jobs of this user, once, repeatedly or over HTTP; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        given = [StoreAddress.of(options.address)] if options.address else None
        served = options.prometheus
        endpoint = None if served is None else StoreAddress.of(served if ":" in served else f"127.0.0.1:{served}")
    except ValueError as error:
        parser.error(str(error))
    if options.watch is not None and not options.watch > 0.0:
        parser.error(f"--watch {options.watch:g}: must be above 0.")

    def places() -> list[StoreAddress]:
        return [StoreAddress(ADDRESS, e.port, e.secret) for e in running()] if given is None else given

    try:
        if endpoint is not None:
            return _serve(places, endpoint.host, endpoint.port)
        shown = False
        while True:
            jobs, problems = _look(places())
            if shown and not jobs:
                return 0  # the watched jobs have ended
            _show(jobs, problems, options)
            if options.watch is None or not jobs:
                return 1 if problems else 0
            shown = True
            time.sleep(options.watch)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _show(jobs: Sequence[JobStatus], problems: Sequence[str], options: argparse.Namespace) -> None:
    if options.watch is not None and not options.json and sys.stdout.isatty():
        print("\033[H\033[2J", end="")  # clears the screen
    if jobs:
        print("\n\n".join(job.json() if options.json else job.table() for job in jobs), flush=True)
    for problem in problems:
        print(f"lightning-async status: {problem}", file=sys.stderr)


def _serve(places: Callable[[], Sequence[StoreAddress]], host: str, port: int) -> int:
    one = threading.Lock()

    def look() -> list[JobStatus]:
        with one:  # each request has a thread of its own, but they share one client of each store
            return _look(places())[0]

    ends = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # blocked for this thread and all that it starts
    try:
        port, close = serve(look, host, port)
        print(f"http://{host}:{port}/metrics", flush=True)
        signal.sigwait(ends)
        close()
    except (ImportError, OSError) as error:
        print(f"lightning-async status: {error}", file=sys.stderr)
        return 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


def _look(places: Sequence[StoreAddress]) -> tuple[list[JobStatus], list[str]]:
    jobs = []
    problems = []
    for place in places:
        try:
            jobs.append(place.look())
        except (OSError, RuntimeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"the store at {place.host}:{place.port} does not answer: {why}")
    if not places:
        problems.append("no job of `lightning-async launch` runs here for this user. Give the HOST:PORT of a store.")
    return jobs, problems


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-async status",
        description="Show what the replicas of a job do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="address of a job's store")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each job")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=1.0, metavar="S", help="repeat every S seconds (default: 1)"
    )
    parser.add_argument(
        "--prometheus", metavar="[HOST:]PORT",
        help="serve the same numbers to Prometheus until a signal comes (default host: 127.0.0.1)",
    )  # fmt: skip
    return parser
