"""The loop of the launcher: one thread waits for descriptors, times and signals, and calls what each is for.

Nothing is looked at again and again, and nothing that is called may wait.
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
    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._dues: dict[Hashable, tuple[float, Callable[[], object]]] = {}

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, call)

    def forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds: float, key: Hashable, call: Callable[[], object]) -> None:
        """Call this once, so much later, in place of what was to be called for the same key."""
        self._dues[key] = time.monotonic() + seconds, call

    def cancel(self, key: Hashable) -> None:
        self._dues.pop(key, None)

    def step(self, outputs: Outputs) -> None:
        """Wait for the next thing to happen, and do what follows; meanwhile pass on what ranks write."""
        outputs.watch(self._selector)
        dues = [due for due, _ in self._dues.values()]
        for key, _ in self._selector.select(max(0.0, min(dues) - time.monotonic()) if dues else None):
            if self._selector.get_map().get(key.fd) == key:  # what came before may have closed it
                key.data()
        for name in [name for name, (due, _) in self._dues.items() if time.monotonic() >= due]:
            due, call = self._dues.get(name, (float("inf"), None))
            if call is not None and time.monotonic() >= due:  # what came before may have ended the wait
                del self._dues[name]
                call()

    def close(self) -> None:
        self._selector.close()

    @contextlib.contextmanager
    def signals(self, hear: Callable[[int], object]) -> Iterator[None]:
        """Call this with the number of each signal that comes; ignored ones (nohup) stay ignored."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        before: Mapping[int, Callable[..., object] | int | None] = {
            number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        }

        def read() -> None:
            for number in reader.recv(1024):
                hear(number)

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
