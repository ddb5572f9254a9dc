"""One replica of torchft beside the soak: ``-m tests.benchmarks.torchft_rank JOB LIGHTHOUSE``.

The same model, data and pace as `elastic_rank`, averaged every period by torchft's ``LocalSGD``. A step is written down
when the round that holds it is committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore

from tests.benchmarks.elastic_trace import BATCH, Writer

TIMEOUT = timedelta(seconds=2)


def main() -> None:
    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import LocalSGD  # pyright: ignore[reportMissingImports]

    job, name, lighthouse = json.loads(sys.argv[1]), os.environ["RANK"], sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trace, stop = Writer(job["folder"], name), Path(job["folder"], "stop")
    trace.note("start", process=os.getpid())
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    both = {"model": model, "optim": optimizer}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda saved: [both[name].load_state_dict(saved[name]) for name in both] and None,
        state_dict=lambda: {name: each.state_dict() for name, each in both.items()},
        min_replica_size=1, use_async_quorum=False, timeout=TIMEOUT, quorum_timeout=timedelta(seconds=20),
        connect_timeout=TIMEOUT, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=name, hostname="127.0.0.1",
    )  # fmt: skip
    taken: list[tuple[float, float]] = []
    rounds, ended = 0, time.monotonic()
    with LocalSGD(manager, model, optimizer, sync_every=job["period"]):
        while not stop.exists():
            started = time.monotonic()
            taken.append((started, started - ended))
            optimizer.zero_grad()
            batch = torch.rand(BATCH, 32)
            (model(batch) - batch.mean(1, keepdim=True)).pow(2).mean().backward()
            time.sleep(max(0.0, job["step_s"] - (time.monotonic() - started)))
            ended = time.monotonic()
            optimizer.step()
            if manager.current_step() != rounds:
                rounds = manager.current_step()
                for t, gap in taken:
                    trace.note("step", t=t, gap=gap, gated=False)
                taken.clear()
                trace.note("commit", id=rounds, run=1, members=[], failed=0, digest=None)
    trace.note("end", digest=None)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
