"""``python -m tests.rendezvous NUM_RANKS``: Horovod's rendezvous server, as horovodrun runs it.

It says its port. It imports neither torch nor pytest: ranks wait until it is there.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any


def serve(num_ranks: int) -> None:
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    server: Any = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0)
    # Its plan says how many ranks there are; by which names they come is the ranks' own business.
    plan = hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{num_ranks}"), num_ranks)
    port = server.start()
    server.init(plan)
    print(port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
