"""The loop of the launcher: one thread waits for descriptors, times and signals, and calls a function for each.

The loop polls nothing, and no function that it calls may wait.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Hashable, Iterator, Mapping

from lightning_async.launch.output import Outputs

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class EventLoop:
    """A loop over descriptors, times and signals."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._dues: dict[Hashable, tuple[float, Callable[[], object]]] = {}

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call a function whenever the descriptor is readable."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds: float, key: Hashable, call: Callable[[], object]) -> None:
        """Call a function once, after ``seconds``; it replaces a function that waits under the same key."""
        self._dues[key] = time.monotonic() + seconds, call

    def cancel(self, key: Hashable) -> None:
        self._dues.pop(key, None)

    def step(self, outputs: Outputs) -> None:
        """Wait until a descriptor, a time or an output of ``outputs`` is ready, and call the functions for it."""
        outputs.watch(self._selector)
        dues = [due for due, _ in self._dues.values()]
        for key, _ in self._selector.select(max(0.0, min(dues) - time.monotonic()) if dues else None):
            if self._selector.get_map().get(key.fd) == key:  # an earlier call of this step may have closed it
                key.data()
        for name in [name for name, (due, _) in self._dues.items() if time.monotonic() >= due]:
            due, call = self._dues.get(name, (float("inf"), None))
            if call is not None and time.monotonic() >= due:  # an earlier call may have cancelled it
                del self._dues[name]
                call()

    def close(self) -> None:
        self._selector.close()

    @contextlib.contextmanager
    def signals(self, hear: Callable[[int], object]) -> Iterator[None]:
        """Call ``hear`` with the number of each signal during the block; ignored signals (nohup) stay ignored."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        before: Mapping[int, Callable[..., object] | int | None] = {
            number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        }

        def read() -> None:
            for number in reader.recv(1024):
                hear(number)

        # Python writes the number of each signal to this socket, so that the loop sees signals as it sees descriptors.
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            for number in before:
                signal.signal(number, lambda number, frame: None)
            self.watch(reader.fileno(), read)
            yield
        finally:
            self.forget(reader.fileno())
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
            reader.close()
            writer.close()
