"""A script that ends while its heartbeat waits for a store whose host stands still, and goes on just then."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time

HOST = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def main() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdout is not None
    # Registered first, so called last: when all that could have ended the heartbeat has been called.
    atexit.register(lambda: os.kill(host.pid, signal.SIGCONT))

    from datetime import timedelta

    from torch.distributed import TCPStore

    from lightning_async.membership.membership import Membership

    port = int(host.stdout.readline())
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    Membership(store, 0, 2).start()
    os.kill(host.pid, signal.SIGSTOP)
    time.sleep(0.5)


if __name__ == "__main__":
    main()
