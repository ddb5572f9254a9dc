"""Bandwidth of the CUDA ops, replayed from CUDA graphs: ``python -m tests.benchmarks.ops_gpu --out DIR``.

Against the bandwidth that a copy of the same size reaches on the same card, over buffers beyond its L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_async import ops
from lightning_async.flat import FlatLayout
from lightning_async.ops import native
from tests.benchmarks.report import Target, machine


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The fastest replay of ``run``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    fastest = float("inf")
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        fastest = min(fastest, start.elapsed_time(end) / 1e3)
    return fastest


@torch.no_grad()
def measure() -> list[tuple[str, float, float, float]]:
    """Name, bytes moved, seconds, and the share of the copy's bandwidth that it must reach."""
    n = 250_000_000  # 1 GB
    x, y, a, m = (torch.randn(n, device="cuda") * 1e-3 for _ in range(4))
    codes, scales = torch.zeros(n, dtype=torch.int8, device="cuda"), torch.zeros(-(-n // 256), device="cuda")
    rows = [("copy", 8.0 * n, seconds(lambda: y.copy_(x)), 0.0)]
    flat = FlatLayout([x])
    one = ops.Plan(flat, [x])
    rows.append(("apply", 16.0 * n, seconds(lambda: one.apply_(y, a)), 0.85))
    rows.append(
        ("outer step on buckets", 32.0 * n, seconds(lambda: ops.outer_merge_(a, m, y, x, 0.7, 0.9, True)), 0.85)
    )
    rows.append(("int8, error feedback", 13.0 * n, seconds(lambda: ops.quantize_(codes, scales, x, y)), 0.75))
    tensors = [torch.randn(25_000_000 // 145 // 4 * 4, device="cuda") for _ in range(145)]
    layout = FlatLayout(tensors)
    plan, bucket, base = ops.Plan(layout, tensors), layout.empty("cuda"), layout.empty("cuda")
    rows.append(("pack, 145 tensors", 8.0 * layout.numel, seconds(lambda: plan.pack_(bucket)), 0.75))
    rows.append(("apply, 145 tensors", 16.0 * layout.numel, seconds(lambda: plan.apply_(bucket, base)), 0.75))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ops_gpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or native.backend("cuda").name == "torch":
        print(f"no GPU to measure: {native.backend('cuda').reason}", file=sys.stderr)
        return 2
    rows = measure()
    rates = {name: moved / time for name, moved, time, _ in rows}
    lines = [
        f"- {torch.cuda.get_device_name()}; {machine()}",
        "",
        "| op | ms | GB/s | of copy's |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {1e3 * time:.3f} | {rates[name] / 1e9:.0f} | {rates[name] / rates['copy']:.0%} |"
        for name, _, time, _ in rows
    ]
    targets = [Target(about=name, value=rates[name] / rates["copy"], limit=limit) for name, _, _, limit in rows[1:]]
    text = "\n".join([*lines, "", *(f"- {target.line()}" for target in targets), ""])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ops_gpu.md").write_text(text)
    print(text)
    return int(not all(target.held for target in targets))


if __name__ == "__main__":
    sys.exit(main())
