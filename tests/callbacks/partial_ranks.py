"""Modules whose `state_dict` is not their tensors by name, on two ranks that are interrupted and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async import DiLoCo, EveryNSteps
from lightning_async.algorithms import Latest
from tests.callbacks.checkpoint_ranks import Noisy, goes_on
from tests.callbacks.served_ranks import servers
from tests.callbacks.window_ranks import windows
from tests.strategies.workers import scenario, together


class Adapted(Noisy):
    """A frozen base with an adapter, a norm, and a teacher that is a mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.lora = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        x = self.lora(self.base(batch[0])) - self.teacher(batch[0])
        return loss + x.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for mean, new in zip(self.teacher.parameters(), self.lora.parameters(), strict=True):
            mean.data.lerp_(new.data, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Prefixed(Adapted):
    """Each key has a prefix, as in a wrapped model."""

    strict_loading = False  # type: ignore[assignment]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"base_model.model.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        bare = {name.removeprefix("base_model.model."): value for name, value in state_dict.items()}
        return super().load_state_dict(bare, strict, assign)


class AdapterOnly(Adapted):
    """Saves the adapter, and neither the frozen base nor what else it trains."""

    strict_loading = False  # type: ignore[assignment]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {n: value for n, value in super().state_dict(*args, **kwargs).items() if n.startswith("lora")}


class Hooked(Adapted):
    """Drops the frozen base, renames the adapter, and halves what it trains besides."""

    strict_loading = False  # type: ignore[assignment]

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        new = {name.replace("lora", "adapter"): value for name, value in state.items() if name.startswith("lora")}
        checkpoint["state_dict"] = new | {name: state[name].half() for name in state if name.startswith("net.0")}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["state_dict"] = {n.replace("adapter", "lora"): v for n, v in checkpoint["state_dict"].items()}


KINDS = {"prefixed": Prefixed, "adapter_only": AdapterOnly, "hooked": Hooked, "trainable_only": Adapted}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "averaging": lambda: together(DiLoCo(), EveryNSteps(4), overlap=False),
    "gradients": windows,
    "servers": servers,
}


def _scenario(kind: str, strategy: str) -> None:
    def run(folder: Path) -> Any:
        settings = {"keep": Latest(9), "trainable_only": kind == "trainable_only"}
        return goes_on(folder, STRATEGIES[strategy], KINDS.get(kind, Adapted), **settings)

    run.__name__ = f"{strategy}_{kind}"
    scenario(run)


for kind in KINDS:
    for strategy in STRATEGIES:
        _scenario(kind, strategy)
_scenario("ordinary", "averaging")
