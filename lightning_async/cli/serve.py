"""The command that serves parameters to workers started elsewhere: ``lightning-async serve --listen HOST:PORT``."""

from __future__ import annotations

import argparse
import ipaddress
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_async.comm.p2p_gloo import shown
from lightning_async.errors import AsyncTrainingError
from lightning_async.launch.state_machine import CANNOT_START
from lightning_async.membership.signing import SECRET
from lightning_async.membership.startup import is_loopback
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.process import ServerProcess

# Exit codes, see `_EPILOG`.
_LOST = 70
_NOT_WRITTEN = 74
_SHORTEST_SECRET = 16
_EPILOG = """exit codes:
  0     told to end (SIGTERM, SIGINT, SIGHUP), and all last snapshots, if any, are written
  70    a server cannot go on, for a reason printed before; the other servers were told to end
  71    the system does not let a server start, or the address is in use
  74    told to end, and a last snapshot could not be written
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the servers until a signal comes, or until one of them fails for good; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        host, port = _address(options.listen)
        last = port + options.num_servers - 1
        if options.num_servers < 1 or last >= 1 << 16:
            raise ValueError(f"--num-servers {options.num_servers}: at least 1, and ports up to 65535.")
        worker_rules = WorkerRules(
            mode=options.mode, num_workers=options.num_workers, max_staleness=options.max_staleness,
            dead_after_s=options.dead_after, staleness=options.staleness, warmup_steps=options.warmup_steps,
        )  # fmt: skip
        if not options.snapshot_every > 0:
            raise ValueError(f"--snapshot-every {options.snapshot_every}: must be > 0 seconds.")
        # Other hosts can reach an address that is not loopback, so servers there need a secret.
        if options.secret_file is not None or not (is_loopback(host) or os.environ.get(SECRET)):
            os.environ[SECRET] = _secret_of(options.secret_file, os.environ)  # the servers inherit the variable
    except (TypeError, ValueError, OSError) as error:
        parser.error(str(error))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    # Python writes a byte there for each signal, so that one `poll` waits for signals and servers.
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    servers: list[ServerProcess] = []
    try:
        for server in range(options.num_servers):
            # A fixed name: workers of this host find a server that is started in place of this one.
            name = f"lightning_async-serve-{os.getuid()}-{port + server}"
            snapshots = None if options.snapshots is None else str(options.snapshots)
            servers.append(
                ServerProcess(
                    worker_rules, host=host, port=port + server, server=server, name=name, snapshots=snapshots,
                    snapshot_every=options.snapshot_every,
                )
            )  # fmt: skip
    except (AsyncTrainingError, ValueError) as error:
        print(f"lightning-async serve: {error}", file=sys.stderr)
        _end(servers, 0.0)
        return CANNOT_START
    print(",".join(shown(host, port + server) for server in range(options.num_servers)), flush=True)
    lost = _wait(servers, woken)
    unwritten = _end(servers, options.grace)
    if lost:
        print(f"lightning-async serve: server {lost[0]} cannot go on; the others are ended.", file=sys.stderr)
        return _LOST
    if unwritten:
        print(f"lightning-async serve: servers {unwritten} could not write their last snapshot.", file=sys.stderr)
        return _NOT_WRITTEN
    return 0


def _address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; raise ValueError if they are malformed, or the host is 0.0.0.0 or ::.

    >>> _address("10.0.0.1:29400"), _address("[fd00::1]:29400")
    (('10.0.0.1', 29400), ('fd00::1', 29400))
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{text!r} must be HOST:PORT, with a port from 1 to 65535.")
    if _is_unspecified(host):
        raise ValueError(f"{text!r}: {host} is on every host; give an address of this one.")
    return host, int(port)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _secret_of(file: Path | None, environment: Mapping[str, str]) -> str:
    """Return the job's secret, from the file or, without a file, from the environment.

    Raises:
        ValueError: There is no secret, it is too short, or other users can read the file.
        OSError: The file cannot be read.
    """
    if file is None:
        secret = environment.get(SECRET, "")
        where = SECRET
    else:
        with file.open() as opened:
            found = os.fstat(opened.fileno())
            if found.st_mode & 0o077 or found.st_uid not in (os.getuid(), 0):
                raise ValueError(f"--secret-file {file}: others can read it, or it is another user's; chmod 600.")
            secret = opened.read().strip()
            where = f"--secret-file {file}"
    if not secret:
        raise ValueError(f"--listen asks for a secret, the same on all hosts: --secret-file, or the variable {SECRET}.")
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"{where}: the secret is shorter than {_SHORTEST_SECRET} characters (`openssl rand -hex 32`).")
    return secret


def _wait(servers: Sequence[ServerProcess], woken: int) -> list[int]:
    """Wait until a signal comes or a server ends; return the numbers of the ended servers, none after a signal."""
    watched = {os.pidfd_open(server.supervisor): number for number, server in enumerate(servers)}
    poll = select.poll()
    for descriptor in (woken, *watched):
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll()]
    for descriptor in watched:
        os.close(descriptor)
    return [] if woken in ready else [watched[descriptor] for descriptor in ready]


def _end(servers: Sequence[ServerProcess], grace_s: float) -> list[int]:
    """End all servers; return the numbers of those that could not write their last snapshot."""
    for server in servers:
        # All are told before the first is awaited, so that they write their snapshots at the same time.
        server.tell_to_end()
    return [number for number, server in enumerate(servers) if server.close(snapshot_s=grace_s)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-async serve",
        description="Serve parameters to workers that are started elsewhere. Prints the servers' addresses, for "
        "ServerOptions(server_address=...). A server that is killed is started again, with all its weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--listen", required=True, metavar="HOST:PORT",
        help="an address of this host that workers can reach; several servers use this port and the next ones",
    )  # fmt: skip
    parser.add_argument("--num-servers", type=int, default=1, metavar="N", help="number of servers (default: 1)")
    parser.add_argument(
        "--mode", default="async", choices=("async", "sync", "ssp"), help="mode of the workers (default: async)"
    )
    parser.add_argument(
        "--num-workers", type=int, default=1, metavar="N",
        help="number of workers that the first round of mode sync waits for (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-staleness", type=int, default=3, metavar="N",
        help="number of pushes that a worker may be ahead of the slowest one in mode ssp (default: 3)",
    )  # fmt: skip
    parser.add_argument(
        "--warmup-steps", type=int, default=0, metavar="N",
        help="number of first versions that are made as in mode sync (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--staleness", default="auto", metavar="NAME",
        help="policy for late pushes, by its name in algorithms.staleness (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--dead-after", type=float, default=1800.0, metavar="S",
        help="seconds for which workers wait for a connected worker that pushes nothing; must be longer than any batch "
        "takes. Nobody waits for a worker that has died (default: 1800)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshots", type=Path, metavar="DIR",
        help="folder of snapshots: begin with the newest, take new ones, and a last one at the end (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshot-every", type=float, default=60.0, metavar="S", help="seconds between two snapshots (default: 60)"
    )
    parser.add_argument(
        "--grace", type=float, default=60.0, metavar="S", help="seconds that a last snapshot may take (default: 60)"
    )
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE",
        help=f"file with the secret that workers have in {SECRET} (default: that variable; none is needed on loopback)",
    )  # fmt: skip
    return parser
