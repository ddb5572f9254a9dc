"""The process beside the launcher that holds the store, also while ranks save after the launcher was killed.

It runs in a session of its own, and starts without this package's ``__init__``. Each restart of all ranks gets a new
store. The import of torch does not delay the ranks: this process imports torch while the ranks import torch, too. The
ranks can connect at once, because the launcher opens the listening socket and passes it to this process, the keeper.

    launcher --- a message with a descriptor ---> keeper: open a store on this socket; a rank has started or ended
             <-- text -------------------------- keeper: no rank takes steps, if hang detection is on
             --- the channel ends -------------> keeper: the launcher was killed

A launcher that ends normally kills the keeper. When the launcher is killed, the system sends its ranks a SIGTERM, and
they save. For that they need the store, and a process that reads their output. Ranks that have not ended after the
grace time are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_async.launch.output import Outputs

_LONGEST_MESSAGE = 1 << 10
# Seconds between two looks at the ranks' progress.
_LOOKS_S = 0.5
_stores: list[Any] = []  # one for each start of the ranks; nobody uses the earlier ones


def main(
    channel: int, readers: Sequence[int], logs: str | None, grace_s: float, limits: Sequence[float] | None = None
) -> None:
    """Keep the store until the launcher and its ranks have ended.

    Args:
        channel: Descriptor of a socket to the launcher.
        readers: Descriptors of the ranks' pipes, see `Outputs`; read here once the launcher was killed.
        logs: Directory of the ranks' files, or None.
        grace_s: Seconds in which ranks must end once the launcher was killed.
        limits: Limits of hang detection, see `ReportedProgress`. Default: None, hangs are not detected.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the launcher, which tells the ranks
    ranks: dict[int, int] = {}
    with socket.socket(fileno=channel) as launcher:
        while (message := _next(launcher)) is not None:
            said, descriptors = message
            if said["what"] == "store":
                # On a thread, because imports take seconds, in which the launcher may be killed.
                threading.Thread(
                    target=_open, args=(said["host"], said["port"], *descriptors, launcher, len(readers) // 2, limits),
                    daemon=True,
                ).start()  # fmt: skip
            elif said["what"] == "started":
                ranks[said["pid"]] = descriptors[0]
            else:
                os.close(ranks.pop(said["pid"]))
    _see_to_the_end(ranks, Outputs(readers, Path(logs) if logs else None), grace_s)
    os._exit(0)  # without waiting for torch's threads


def _next(launcher: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    data, descriptors, *_ = socket.recv_fds(launcher, _LONGEST_MESSAGE, 1)
    return (json.loads(data), descriptors) if data else None


def _open(
    host: str, port: int, listener: int, launcher: socket.socket, world_size: int, limits: Sequence[float] | None
) -> None:
    listening: Any = {"master_listen_fd": listener}
    try:
        from torch._C._distributed_c10d import TCPStore

        _stores.append(TCPStore(host, port, None, True, wait_for_workers=False, **listening))
        if limits is not None:
            _look_for_progress(_stores[-1], launcher, port, world_size, limits)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _look_for_progress(
    store: Any, launcher: socket.socket, port: int, world_size: int, limits: Sequence[float]
) -> None:
    """Report hangs to the launcher, until all ranks are started again with another store.

    Reports are repeated, because the launcher ignores them while it handles a death.
    """
    from lightning_async.launch.hang_detection import ReportedProgress, Watched
    from lightning_async.membership.status import read_standings

    clock = Watched(time.monotonic())
    progress = ReportedProgress(limits, world_size, clock.now)
    while _stores[-1] is store:
        standings = read_standings(store, None)
        if (words := progress.look(standings, clock.tick(time.monotonic()))) is not None:
            with contextlib.suppress(OSError):  # the launcher was killed
                launcher.send(f"{port} {words}".encode())
        time.sleep(_LOOKS_S)


def _see_to_the_end(living: dict[int, int], outputs: Outputs, grace_s: float) -> None:
    """Pass on the output of a killed launcher's ranks until they end; kill those that live after the grace time."""
    outputs.say(f"The launcher was killed. Its ranks have {grace_s:g} s to save and to end.")
    until = time.monotonic() + grace_s
    selector = selectors.PollSelector()

    def ended(pid: int) -> None:
        selector.unregister(living.pop(pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that the rank has left behind

    for pid, pidfd in living.items():
        selector.register(pidfd, selectors.EVENT_READ, lambda pid=pid: ended(pid))
    while living:
        outputs.watch(selector)
        left = until - time.monotonic()
        if left <= 0:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            until = float("inf")
        for key, _ in selector.select(left if 0 < left < float("inf") else None):
            key.data()
    for pair in outputs.streams:
        for stream in pair:
            stream.drain()
    outputs.flush()
