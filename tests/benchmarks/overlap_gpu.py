"""What averaging costs a training on a GPU: ``python -m tests.benchmarks.overlap_gpu --out DIR``.

Rank 0 trains about 1 B parameters in bf16 (AdamW, some hundreds of milliseconds a step) on the GPU and averages them
with `DeltaMean`, in the background, with rank 1: a process on the same machine that holds as many parameters on the
CPU and does nothing but average. Rank 0's buckets lie on the GPU; payloads go through pinned memory of the host, over
Gloo and the loopback interface. Blocks of steps alone and blocks of steps beside one round take turns, and each block
is timed as a whole, its snapshot and its merge included, from an idle device to an idle device.

Needs, for 1 B parameters: on the GPU 48 GB (2 of parameters, 2 of gradients, 4 of AdamW's state, 4 of remainders, 8 of
buckets, the rest activations), in the host's memory 16 GB (two buckets of 4 GB and 6 GB of the peer's replica).

``--device cpu --numel 60000`` runs the same on any machine, to try out everything but the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.benchmarks.overlap_ranks import Job
from tests.benchmarks.report import Target, load_average, machine
from tests.support import run_ranks

SPARE_S = 5.0
"""How much longer than planned the ranks may live."""


def environment(rank: int) -> dict[str, str]:
    """Half of the cores for each rank; the peer sees no GPU."""
    cores = len(os.sched_getaffinity(0))
    own = {"OMP_NUM_THREADS": str(max(1, cores // 2)), "GLOO_SOCKET_IFNAME": "lo"}
    return own | ({"CUDA_VISIBLE_DEVICES": ""} if rank else {})


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start both ranks; what they found."""
    until = time.monotonic() + options.seconds
    store: Any = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    job = Job(
        device=options.device,
        numel=options.numel,
        tokens=options.tokens or (32768 if options.device == "cuda" else 16),
        steps=options.steps,
        blocks=options.blocks,
        until=until,
        port=store.port,
        parent=os.getpid(),
    )
    target, timeout = "tests.benchmarks.overlap_ranks:measure", options.seconds + SPARE_S
    trained, peer = run_ranks(target, 2, kwargs=asdict(job), timeout=timeout, env=environment)
    return {"tokens": job.tokens, "trained": trained.value, "peer": peer.value}


def numbers(told: dict[str, Any]) -> dict[str, float]:
    """What the blocks amount to: medians over blocks, over steps, and over rounds."""
    pairs = told["trained"]["pairs"]
    alone, beside = ([pair[k] for pair in pairs] for k in (0, 1))

    def per_step(block: dict[str, Any]) -> float:
        return block["seconds"] / block["steps"]

    def total(blocks: list[dict[str, Any]], name: str) -> float:
        return float(sum(block[name] for block in blocks))

    # A round that is quicker than a step has only the step of its merge.
    in_flight = [s for b in beside for s in b["step_s"][b["snapshot"] + 1 : b["merge"]] or b["step_s"][b["merge"] :]]
    step_s = statistics.median(s for block in alone for s in block["step_s"])
    flying_s = statistics.median(in_flight)
    return {
        "slowdown": statistics.median(per_step(b) / per_step(a) for a, b in pairs),
        "slowdown_of_all": (total(beside, "seconds") / total(beside, "steps"))
        / (total(alone, "seconds") / total(alone, "steps")),
        "slowdown_in_flight": flying_s / step_s,
        "alone_s": statistics.median(map(per_step, alone)),
        "beside_s": statistics.median(map(per_step, beside)),
        "alone_step_s": step_s,
        "in_flight_step_s": flying_s,
        "snapshot_s": statistics.median(b["step_s"][b["snapshot"]] - step_s for b in beside),
        "merge_s": statistics.median(b["step_s"][b["merge"]] - step_s for b in beside),
        "alone_steps": total(alone, "steps"),
        "beside_steps": total(beside, "steps"),
        "rounds": float(len(beside)),
        "round_s": statistics.median(b["in_flight_s"] for b in beside),
        "exchange_s": statistics.median(b["exchange_s"] for b in beside),
        "in_flight_share": total(beside, "in_flight_s") / total(beside, "seconds"),
        "sent_gb": total(beside, "sent_bytes") / 1e9,
    }


def markdown(told: dict[str, Any], found: dict[str, float], target: Target, device: str) -> str:
    """The report."""
    trained, peer = told["trained"], told["peer"]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"""# Averaging beside a training

- {where}; {machine()}; load average {load_average()}
- {trained["numel"]:,} parameters in bf16, {told["tokens"]:,} tokens a step, AdamW; a message of \
{trained["numel"] * 4 / 1e9:.2f} GB in fp32, over Gloo and the loopback interface
- the host's arithmetic: {trained["ops"]} with {trained["threads"]} threads, at the peer {peer["ops"]} with \
{peer["threads"]}

| blocks | number | steps | ms per step, wall time of blocks | ms, median step |
|---|---:|---:|---:|---:|
| alone | {found["rounds"]:.0f} | {found["alone_steps"]:.0f} | {1e3 * found["alone_s"]:.2f} | \
{1e3 * found["alone_step_s"]:.2f} |
| with a round | {found["rounds"]:.0f} | {found["beside_steps"]:.0f} | {1e3 * found["beside_s"]:.2f} | \
{1e3 * found["in_flight_step_s"]:.2f} (in flight) |

| rounds | s in flight | of that, s of exchange | of the time in flight | snapshot, ms | merge, ms | GB sent |
|---:|---:|---:|---:|---:|---:|---:|
| {found["rounds"]:.0f} | {found["round_s"]:.2f} | {found["exchange_s"]:.2f} | {found["in_flight_share"]:.0%} | \
{1e3 * found["snapshot_s"]:.1f} | {1e3 * found["merge_s"]:.1f} | {found["sent_gb"]:.2f} |

- {target.line()}
- over all blocks together {found["slowdown_of_all"]:.3f}; of a step in flight, without snapshot and merge \
{found["slowdown_in_flight"]:.3f}
- snapshot and merge: what their steps took beyond a median step alone; wall times are medians over blocks
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overlap_gpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where rank 0 trains")
    parser.add_argument("--numel", type=int, default=1_000_000_000, help="about so many parameters")
    parser.add_argument("--tokens", type=int, help="rows of a batch (default: 32768 on a GPU, 16 on the CPU)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block without averaging")
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks, at most")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long all of it may take")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that this torch can use; `--device cpu` tries it out without", file=sys.stderr)
        return 2
    told = run(options)
    found = numbers(told)
    target = Target(about="slowdown of a step", value=found["slowdown"], limit=1.02, at_most=True)
    text = markdown(told, found, target, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overlap_gpu.md").write_text(text)
    (options.out / "overlap_gpu.json").write_text(json.dumps({"found": found, "held": target.held, **told}, indent=1))
    print(text)
    return int(not target.held)


if __name__ == "__main__":
    sys.exit(main())
