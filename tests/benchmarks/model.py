"""The workload: the example's char-level transformer, its compute padded to a fixed step time."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from examples.char_lm import CharLM, Windows, read_text

__all__ = ["BATCH", "CONTEXT", "CharModule", "CharStream", "Slot", "loader"]

BATCH = 2
CONTEXT = 32


@functools.cache
def text() -> tuple[Tensor, int]:
    """The text as a vector of character indices, and the size of its alphabet."""
    chars = read_text()
    index = {char: place for place, char in enumerate(sorted(set(chars)))}
    return torch.tensor([index[char] for char in chars]), len(index)


class CharStream(IterableDataset[tuple[Tensor, Tensor]]):
    """Windows of the text, each with the characters that follow: without end, or until some seconds after the first.

    Args:
        seed: another seed is another stream; give each replica its own.
        seconds: when the stream ends, counted from its first window; None for never.
        windows: those that there are; by default all of the text's.
    """

    def __init__(self, seed: int, seconds: float | None = None, windows: Windows | None = None) -> None:
        self.seed = seed
        self.seconds = seconds
        self.windows = Windows(text()[0], CONTEXT, stride=1) if windows is None else windows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        end = None if self.seconds is None else time.monotonic() + self.seconds
        while end is None or time.monotonic() < end:
            yield self.windows[int(torch.randint(len(self.windows) - 1, (1,), generator=generator))]


def loader(seed: int, seconds: float | None = None) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches of `CharStream`, made in the training process."""
    return DataLoader(CharStream(seed, seconds), batch_size=BATCH, drop_last=True)


class Slot:
    """Pads a step's compute to ``step_s`` by sleeping, as if an accelerator computed at a fixed speed.

    The slot holds forward, backward and the optimizer's own step; it ends before anything that a strategy does after
    the optimizer, so that packing, merging and waiting on the training thread show in the step time. The pad lies
    before the backward, ``tail_s`` before the slot's end, so that a peer that communicates during the backward (DDP)
    cannot hide its communication in the pad; only what the tail leaves over is slept off at the end.

    Args:
        step_s: length of the slot, in seconds; 0.0 for no padding.
        tail_s: what backward and optimizer need of it.
    """

    def __init__(self, step_s: float = 0.0, tail_s: float = 0.0) -> None:
        self.step_s = step_s
        self.tail_s = tail_s
        self._begin = 0.0

    def begin(self) -> None:
        """The forward starts."""
        self._begin = time.monotonic()

    def before_backward(self) -> None:
        """Sleep until the backward should start."""
        self._sleep_until(self._begin + self.step_s - self.tail_s)

    def finish(self) -> None:
        """The optimizer has stepped: sleep until the slot's end."""
        self._sleep_until(self._begin + self.step_s)

    @staticmethod
    def _sleep_until(moment: float) -> None:
        left = moment - time.monotonic()
        if left > 0.0:
            time.sleep(left)


class CharModule(CharLM):
    """The example's model with 1.65 million parameters (6.6 MB in fp32), trained with AdamW in padded steps."""

    def __init__(self, slot: Slot, context: int = CONTEXT) -> None:
        super().__init__(vocab_size=text()[1], context=context, width=184, depth=4, heads=4)
        self.slot = slot
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.slot.begin()
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.losses.append(loss.item())
        self.slot.before_backward()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        # Inside the optimizer's `step`: before the strategy goes on.
        optimizer.register_step_post_hook(lambda *_: self.slot.finish())
        return optimizer
