"""Measure the CPU ops against chains of eager torch operations: ``python -m tests.benchmarks.ops --out DIR``.

One thread, buffers beyond the last cache. All ways of all ops run in turn, again and again; the minimum counts. Bytes
are those that the memory must move; what is only written counts once, since such stores go around the caches.

The quickest chains write into memory that is there already, as few users' code does. Where there is one, the table also
names the plain way, which allocates what it computes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.flat import FlatLayout
from lightning_async.ops import native
from tests.benchmarks.report import Target, load_average, machine

MODULE = "tests.benchmarks.ops"
Way = Callable[[], object]


@dataclass(kw_only=True)
class Measured:
    """One op: its fused way, and the eager chains that it competes with.

    Args:
        name: what it does.
        streams: arrays of fp32 that are read or written, as memory sees it.
        plain: the chain that allocates, as one would write it. Default: none is measured.
        speedup: how much faster than the quickest chain it must be. Default: no target.
        bandwidth: which share of `torch._foreach_lerp_`'s bandwidth it must reach. Default: no target.
    """

    name: str
    streams: float
    plain: str | None = None
    speedup: float | None = None
    bandwidth: float | None = None
    fused: Way = field(repr=False)
    chains: Mapping[str, Way] = field(repr=False)
    seconds: dict[str, float] = field(default_factory=dict)

    def record(self, way: str, seconds: float) -> None:
        self.seconds[way] = min(seconds, self.seconds.get(way, float("inf")))

    @property
    def quickest(self) -> str:
        return min(self.chains, key=self.seconds.__getitem__)

    @property
    def faster(self) -> float:
        return self.seconds[self.quickest] / self.seconds["fused"]

    @property
    def faster_than_plain(self) -> float | None:
        return self.seconds[self.plain] / self.seconds["fused"] if self.plain is not None else None


def cases(n: int) -> list[Measured]:
    """All ops over shared buffers of ``n`` elements; values do not matter, and stay finite."""
    x, y, s, a, m, tmp = (torch.randn(n) * 1e-3 for _ in range(6))
    second, other = torch.rand(n), torch.rand(n)
    codes, scales = torch.zeros(n, dtype=torch.int8), torch.zeros(-(-n // 256))
    padded = n // 256 * 256
    quantized = (codes[:padded].view(-1, 256), scales[: padded // 256].view(-1, 1))

    layout = FlatLayout([x])
    plan = ops.Plan(layout, [x])

    def move_out() -> None:
        x.add_(torch.sub(y, s, out=tmp))

    def move_two() -> None:
        x.add_(y).sub_(s)

    def move_plain() -> None:
        x.add_(y - s)

    def outer_fused_sgd() -> None:
        torch.sub(a, s, out=s)
        torch._fused_sgd_(
            [a], [y], [m], lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.0, dampening=0.0, maximize=False,
            is_first_step=False,
        )  # fmt: skip
        y.copy_(a)

    def outer_eager() -> None:
        torch.sub(a, s, out=s)
        m.mul_(0.9).add_(y)
        a.add_(torch.add(y, m, alpha=0.9, out=tmp), alpha=-0.7)
        y.copy_(a)

    def pack_norm() -> float:
        torch.mul(x, 0.5, out=y)
        return torch.linalg.vector_norm(x).item()

    def int8() -> None:
        torch.add(x, s, out=s)
        blocks = s[:padded].view(-1, 256)
        torch.div(blocks.abs().amax(1, keepdim=True), 127.0, out=quantized[1])
        quantized[0].copy_(torch.round(torch.div(blocks, quantized[1], out=tmp[:padded].view(-1, 256))))
        blocks.sub_(quantized[0] * quantized[1])

    def int8_aminmax() -> None:
        torch.add(x, s, out=s)
        blocks = s[:padded].view(-1, 256)
        low, high = blocks.aminmax(dim=1, keepdim=True)
        torch.div(torch.maximum(high, low.neg_()), 127.0, out=quantized[1])
        scaled = torch.div(blocks, quantized[1], out=tmp[:padded].view(-1, 256)).round_()
        quantized[0].copy_(scaled)
        blocks.sub_(scaled.mul_(quantized[1]))

    return [
        Measured(
            name="apply", streams=4, plain="x.add_(y - s)", speedup=1.45, bandwidth=0.9,
            fused=lambda: plan.apply_(y, s),
            chains={"sub, add": move_out, "add, sub": move_two, "x.add_(y - s)": move_plain},
        ),
        Measured(
            name="pack, norm", streams=2, speedup=1.3,
            fused=lambda: plan.pack_(y, weight=0.5, norm=True), chains={"mul, norm": pack_norm},
        ),
        Measured(
            name="outer step on buckets", streams=8, speedup=1.3, bandwidth=0.9,
            fused=lambda: ops.outer_merge_(a, m, y, s, 0.7, 0.9, True),
            chains={"sub, _fused_sgd_, copy": outer_fused_sgd, "eager": outer_eager},
        ),
        Measured(
            name="int8, error feedback", streams=3.5, speedup=8.0, bandwidth=0.75,
            fused=lambda: ops.quantize_(codes, scales, x, s), chains={"amax": int8, "aminmax": int8_aminmax},
        ),
        Measured(
            name="server Adam", streams=7,
            fused=lambda: ops.server_adam_(a, m, second, None, y, s, other, x, 3, 1e-3),
            chains={"_fused_adam_": adam(a, m, second, x)},
        ),
    ]  # fmt: skip


def adam(params: Tensor, first: Tensor, second: Tensor, gradient: Tensor) -> Way:
    """torch's fused step."""
    step = torch.tensor(3.0)
    return lambda: torch._fused_adam_(
        [params], [gradient], [first], [second], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.0,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def once(way: Way) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


@torch.no_grad()
def measure(n: int, repeats: int) -> tuple[list[Measured], float]:
    """Every op, and the seconds of `torch._foreach_lerp_`, which moves three arrays."""
    found = cases(n)
    x, y = torch.randn(n), torch.randn(n)
    lerp = float("inf")
    for _ in range(repeats):
        lerp = min(lerp, once(lambda: torch._foreach_lerp_([x], [y], 0.1)))
        for op in found:
            for way, run in {"fused": op.fused, **op.chains}.items():
                op.record(way, once(run))
    return found, lerp


def table(found: Sequence[Measured], lerp_s: float, n: int) -> tuple[str, list[Target]]:
    """A markdown table, and what must hold."""
    reference = 3 * 4 * n / lerp_s
    lines = [
        "| op | ms | quickest eager chain | ms | faster | plain, allocating chain | ms | faster | GB/s | of lerp's |",
        "|---|---:|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    lines.append(f"| torch._foreach_lerp_ | {1e3 * lerp_s:.2f} | | | | | | | {reference / 1e9:.1f} | 100% |")
    targets = []
    for op in found:
        rate = op.streams * 4 * n / op.seconds["fused"]
        plain = "| |"
        if op.plain is not None:
            plain = f"{op.plain} | {1e3 * op.seconds[op.plain]:.2f} | {op.faster_than_plain:.2f}"
        lines.append(
            f"| {op.name} | {1e3 * op.seconds['fused']:.2f} | {op.quickest} | {1e3 * op.seconds[op.quickest]:.2f} "
            f"| {op.faster:.2f} | {plain} | {rate / 1e9:.1f} | {rate / reference:.0%} |"
        )
        if op.speedup is not None:
            targets.append(Target(about=f"{op.name}: times faster", value=op.faster, limit=op.speedup))
        if op.bandwidth is not None:
            targets.append(Target(about=f"{op.name}: share of bandwidth", value=rate / reference, limit=op.bandwidth))
    return "\n".join([*lines, "", *(f"- {target.line()}" for target in targets), ""]), targets


def draw(found: Sequence[Measured], path: Path) -> None:
    """Bars: how many times faster than the quickest eager chain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.5 * len(found) + 1), layout="constrained")
    bars = axes.barh([op.name for op in found], [op.faster for op in found], color="#2a6fbb", height=0.6)
    axes.bar_label(bars, [f"{op.faster:.2f}" for op in found], padding=4)
    goals = [(op.speedup, place) for place, op in enumerate(found) if op.speedup is not None]
    axes.plot(*zip(*goals, strict=True), "|", color="#c03030", markersize=18, label="target")
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the quickest eager chain")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="of which the minimum counts (default: %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    backend = native.backend("cpu").name
    head = f"# Speed of the ops\n\n- {machine()}\n- backend: {backend}, 1 thread, {options.numel} elements"
    print(head, f"- load average {load_average()}", f"- repeat with `{command}`\n", sep="\n", flush=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, lerp_s = measure(options.numel, options.repeats)
    finally:
        torch.set_num_threads(before)
    text, targets = table(found, lerp_s, options.numel)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ops.md").write_text(f"{head}\n- load average {load_average()}\n- repeat with `{command}`\n\n{text}")
    numbers = [numbers_of(op) for op in found]
    (options.out / "ops.json").write_text(json.dumps({"lerp_s": lerp_s, "ops": numbers}, indent=1))
    draw(found, options.out / "ops.png")
    return int(options.strict and not all(target.held for target in targets))


def numbers_of(op: Measured) -> dict[str, object]:
    """Its numbers, without the functions."""
    return {
        "name": op.name,
        "streams": op.streams,
        "seconds": op.seconds,
        "faster": op.faster,
        "faster_than_plain": op.faster_than_plain,
    }


if __name__ == "__main__":
    sys.exit(main())
