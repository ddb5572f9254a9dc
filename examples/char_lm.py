"""Train a character-level transformer on the text that CPython ships, on several replicas.

Everything here is plain Lightning. The strategy is the one line that makes training asynchronous::

    python examples/char_lm.py --strategy async_averaging --devices 2
    horovodrun -np 2 python examples/char_lm.py --strategy horovod
    mpirun -np 2 python examples/char_lm.py --strategy async_averaging --transport horovod

The model and the data can be imported without side effects, as tests and benchmarks do.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl  # or: import pytorch_lightning as pl
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

MODULES = (
    "argparse", "ast", "inspect", "ipaddress", "statistics", "subprocess", "tarfile", "threading", "typing",
)  # fmt: skip
"""Standard modules whose source is added to the text of the language reference."""


def read_text() -> str:
    """Return the texts of `help("...")` and source of the standard library: about 1.1 MB of English and Python."""
    from pydoc_data.topics import topics

    pieces = [topics[name] for name in sorted(topics)]
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            pieces.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n\n".join(pieces)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of windows of ``context`` characters, one every ``stride``, with the characters that follow."""

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self.tokens, self.context, self.stride = tokens, context, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class CharData(pl.LightningDataModule):
    """The text as training and validation data: every tenth block is held out.

    Lightning's sampler gives each replica a shard of its own.
    """

    BLOCK = 8192

    def __init__(self, context: int = 128, batch_size: int = 4, val_windows: int = 256) -> None:
        super().__init__()
        text = read_text()
        self.alphabet = "".join(sorted(set(text)))
        self.context, self.batch_size, self.val_windows = context, batch_size, val_windows
        code = {char: index for index, char in enumerate(self.alphabet)}
        blocks = torch.tensor([code[char] for char in text], dtype=torch.int16).split(self.BLOCK)
        self.train_tokens = torch.cat([block for i, block in enumerate(blocks) if i % 10])
        self.val_tokens = torch.cat(blocks[::10])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        windows = Windows(self.train_tokens, self.context, stride=self.context // 2)
        return DataLoader(windows, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        stride = max(self.context, (len(self.val_tokens) - self.context - 1) // self.val_windows)
        return DataLoader(Windows(self.val_tokens, self.context, stride), batch_size=32)


class Block(nn.Module):
    """A transformer block: causal attention, then a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        down = nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), down)
        nn.init.zeros_(self.out.weight)  # each block starts as the identity
        nn.init.zeros_(down.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharLM(pl.LightningModule):
    """A decoder-only transformer over characters, with learned positions and tied embeddings.

    Args:
        vocab_size: Number of characters in the alphabet.
        context: Length of the longest window.
        width: Size of the residual stream. The default sizes make about 1.2 million parameters.
        depth: Number of blocks.
        heads: Number of attention heads.
        lr: Peak learning rate, which warms up and decays over ``total_steps``.
        total_steps: Number of optimizer steps of each replica.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        width: int = 160,
        depth: int = 4,
        heads: int = 5,
        lr: float = 2e-3,
        total_steps: int = 800,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.total_steps = lr, total_steps
        self.embedding = nn.Embedding(vocab_size, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        # The last few characters contribute to each one. Attention would learn that too, but only after a long plateau.
        self.recent = nn.Parameter(torch.zeros(3, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.recent, std=0.5)
        self.train_accuracy = MulticlassAccuracy(vocab_size, average="micro", validate_args=False)
        self.val_accuracy = MulticlassAccuracy(vocab_size, average="micro", validate_args=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        embedded = self.embedding(tokens)
        x = embedded + self.position[: tokens.shape[1]]
        for distance, weight in enumerate(self.recent, start=1):
            x = x + weight * F.pad(embedded[:, :-distance], (0, 0, distance, 0))
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self(batch[0]).flatten(0, 1), batch[1].flatten()
        loss = F.cross_entropy(logits, targets)
        self.train_accuracy(logits.detach(), targets)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits, targets = self(batch[0]).flatten(0, 1), batch[1].flatten()
        self.val_accuracy(logits, targets)
        self.log("val/loss", F.cross_entropy(logits, targets), sync_dist=True)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.05)
        warmup = max(1, self.total_steps // 10)

        def share(step: int) -> float:  # of the peak: up in a line, down to a twentieth in half a cosine
            done = min(1.0, step / self.total_steps)
            return min((step + 1) / warmup, 0.05 + 0.475 * (1 + math.cos(math.pi * done)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clock(Callback):
    """A callback that logs, with every validation, the seconds since training began."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            pl_module.log("val/seconds", time.perf_counter() - self.start)


def train_alone(options: argparse.Namespace) -> Path:
    """Train in one process, with as many steps as each replica has taken; return the file of its metrics."""
    out = options.out / "alone"
    command = ["--strategy=auto", "--devices=1", f"--max-steps={options.max_steps}", f"--out={out}"]
    # A launcher's variables would make this process one of its ranks.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOROVOD_", "OMPI_", "PMI", "PMIX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    subprocess.run([sys.executable, __file__, *command], check=True, env=environment)
    return max(out.glob("version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)


def draw_over_time(runs: dict[str, Path], out: Path) -> Path:
    """Draw validation loss and accuracy of each run over the seconds of its training; ``runs`` are files by name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lightning_async.monitor.plot import read_metrics

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = {"val/loss": "validation loss", "val/accuracy": "next characters right"}
    for index, (metric, title) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), index)
        for name, path in runs.items():
            series = read_metrics(path)
            axes.plot(series["val/seconds"][1], series[metric][1], label=name, marker="o", markersize=4)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("seconds of training")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=110)
    return out


def make_strategy(options: Any) -> Any:
    """Return the strategy's name, or for "async_averaging" the strategy with its options."""
    from lightning_async import AsyncAveragingStrategy, DeltaMean, DiLoCo, EveryNSteps, Mean

    if options.strategy != "async_averaging":
        return options.strategy

    rules = {"auto": lambda: "auto", "mean": Mean, "delta_mean": DeltaMean, "diloco": DiLoCo}
    return AsyncAveragingStrategy(
        rules[options.rule](),
        "auto" if options.sync_every is None else EveryNSteps(options.sync_every),
        overlap=options.rule != "mean",  # Mean overwrites the parameters, so its rounds block
        compression=options.compression,
        transport=options.transport,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="async_averaging", help='or "horovod", "ddp", ...')
    parser.add_argument("--devices", type=int, default=2, help="number of replicas")
    parser.add_argument("--rule", choices=["auto", "mean", "delta_mean", "diloco"], default="auto")
    parser.add_argument("--sync-every", type=int, metavar="STEPS", help="a replica's steps per round (default: auto)")
    parser.add_argument(
        "--compression", choices=["auto", "none", "bf16", "fp8", "int8"], default="auto", help="of messages"
    )
    parser.add_argument("--transport", choices=["auto", "torch", "horovod"], default="auto", help="of averaging")
    parser.add_argument("--max-steps", type=int, default=800, metavar="STEPS", help="a replica's steps in all")
    parser.add_argument("--beside-one", action="store_true", help="train one process, too, and draw both over time")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="FOLDER", help="metrics and picture")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)  # one core per replica
    pl.seed_everything(1, verbose=False)

    data = CharData()
    model = CharLM(len(data.alphabet), data.context, total_steps=options.max_steps)
    logger = CSVLogger(options.out, name="")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=make_strategy(options),
        max_steps=options.max_steps,
        val_check_interval=max(options.max_steps // 8, min(options.max_steps, 40)),  # a short run: once, at its end
        check_val_every_n_epoch=None,
        log_every_n_steps=5,
        logger=logger,
        callbacks=[Clock(), TQDMProgressBar(refresh_rate=10 if sys.stdout.isatty() else 100)],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    size = sum(p.numel() for p in model.parameters())
    if trainer.is_global_zero:
        text = (len(data.train_tokens) + len(data.val_tokens)) / 1e6
        print(f"{size / 1e6:.2f} M parameters, {text:.2f} M characters, {options.devices} replicas, {options.strategy}")
    start = time.perf_counter()
    trainer.fit(model, data)

    if trainer.is_global_zero:
        from lightning_async.monitor.plot import plot_run

        metrics = Path(logger.log_dir) / "metrics.csv"
        pictures = [plot_run(metrics, options.out / "rounds.png")]
        loss, accuracy = (float(trainer.callback_metrics[name]) for name in ("val/loss", "val/accuracy"))
        print(f"Next character right: {accuracy:.1%} (validation loss {loss:.3f}), {time.perf_counter() - start:.0f} s")
        if options.beside_one:
            print("The same model in one process:")
            runs = {f"{options.devices} replicas": metrics, "one process": train_alone(options)}
            pictures.insert(0, draw_over_time(runs, options.out / "run.png"))
        print(f"Metrics: {metrics}\nPictures: {', '.join(map(str, pictures))}")


if __name__ == "__main__":
    main()
