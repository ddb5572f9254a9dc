"""What is measured of windows of accumulation: the noise of their gradients, and the time that their steps add."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_async.callbacks.readings import norm
from lightning_async.rules.accumulation import AccumulationPolicy, Noise, Times, estimate
from lightning_async.trainer.windows import gradients_of

__all__ = ["NoiseProbe", "Probe", "TimesProbe", "probe_of"]


class Probe(Protocol):
    """Looks on while windows accumulate; what it has seen is plain values."""

    def begin_period(self, trainer: Any) -> None:
        """Another decision is to be made of what comes."""
        ...

    def begin_batch(self, trainer: Any) -> None: ...

    def before_backward(self, trainer: Any, scale: float) -> None: ...

    def after_backward(self, trainer: Any, ends: bool) -> None: ...

    def before_step(self, trainer: Any) -> None: ...

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        """Args:
        is_full: it is a window as it was meant to be, of equal batches.
        small_size: samples in one batch.
        big_size: samples in the window, over all ranks whose gradients are averaged.
        """
        ...

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        """What is known now, as fields of `Progress`.

        Args:
            mean: over the ranks that step together.
        """
        ...

    def close(self) -> None: ...

    def keep(self) -> Callable[[], dict[str, Any]]:
        """The state now, put together when it is asked for: what is on a GPU is then waited for."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoiseProbe:
    """Squared norms of the gradients of single batches, and of whole windows, see `estimate`.

    A hook of each parameter's sees the gradient of a batch before it is added to the others': no copy is kept.

    Args:
        decay: of the means over periods.
        arrive: windows are gathered apart from the parameters, and seen when their mean arrives, maybe one late.
    """

    def __init__(self, decay: float, arrive: bool = False) -> None:
        self._decay, self._arrive = decay, arrive
        self.noise = Noise()
        self._hooks: dict[int, Any] = {}
        self._parts: list[Tensor] = []
        self._scale = 0.0
        """What the gradients at hand are multiplied by; 0 where none is looked at."""
        self._window = 0.0
        """Sum of squared norms of the batches of this window, but for those in `_norms`."""
        self._batches = 0
        self._norms: tuple[tuple[Tensor, float], ...] = ()
        """Of batches, each with what it was multiplied by: on a GPU nothing is waited for until the window ends."""
        self._big: tuple[Tensor, float] | None = None
        self._sums = [0.0, 0.0, 0.0]
        """Of this period: squared norms of batches, squared norms of windows, windows."""
        self._sizes = (0.0, 0.0)

    def begin_period(self, trainer: Any) -> None:
        """Parameters may have been unfrozen since."""
        for optimizer in trainer.optimizers:
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if param.requires_grad and id(param) not in self._hooks:
                    self._hooks[id(param)] = param.register_hook(self._see)

    def begin_batch(self, trainer: Any) -> None:
        """Nothing is asked for here."""

    def before_backward(self, trainer: Any, scale: float) -> None:
        self._scale, self._parts = scale * loss_scale(trainer), []

    def after_backward(self, trainer: Any, ends: bool) -> None:
        if self._scale:
            self._batches += 1
            if (found := norm(self._parts)) is not None:
                self._norms = (*self._norms, (found, self._scale))
        self._scale, self._parts = 0.0, []
        if ends and not self._arrive:
            self._see_window(trainer)

    def before_step(self, trainer: Any) -> None:
        """Gradients were looked at before, where they were there then."""
        if self._arrive:
            self._see_window(trainer)

    def _see_window(self, trainer: Any) -> None:
        if (found := norm(gradients_of(trainer.optimizers))) is not None:
            self._big = found, loss_scale(trainer)

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        window, batches, big = _sum(self._window, self._norms), self._batches, self._big
        self._window, self._batches, self._norms, self._big = 0.0, 0, (), None
        sizes = (small_size, big_size)
        if not is_full or not batches or big is None or not small_size < big_size:
            return
        if sizes != self._sizes:  # norms of unlike batches have no mean
            self._sums, self._sizes = [0.0, 0.0, 0.0], sizes
        for place, value in enumerate((window / batches, _sum(0.0, (big,)), 1.0)):
            self._sums[place] += value

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        sums, self._sums = [mean(each) for each in self._sums], [0.0, 0.0, 0.0]
        if sums[2]:
            found = estimate(sums[0] / sums[2], sums[1] / sums[2], *self._sizes)
            self.noise = self.noise.add(found, self._decay)
        return {"noise": self.noise if self.noise.weight else None}

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def keep(self) -> Callable[[], dict[str, Any]]:
        noise, window, norms, batches = self.noise, self._window, self._norms, self._batches
        sums, sizes, big = list(self._sums), list(self._sizes), self._big
        return lambda: {
            "noise": list(noise), "window": _sum(window, norms), "batches": batches, "sums": sums, "sizes": sizes,
            "big": None if big is None else [float(big[0]), big[1]],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise, self._window, self._batches = Noise(*state["noise"]), state["window"], state["batches"]
        self._norms, self._sums, self._sizes = (), list(state["sums"]), (state["sizes"][0], state["sizes"][1])
        if (big := state.get("big")) is not None:
            self._big = torch.tensor(big[0], dtype=torch.float64), big[1]

    def _see(self, gradient: Tensor) -> None:
        if self._scale and (found := norm([gradient])) is not None:
            self._parts.append(found)


class TimesProbe:
    """How long batches take up to the end of their backward pass, and the last ones of windows until their step.

    A GPU is waited for at each of these moments.
    """

    def __init__(self) -> None:
        self._batches: list[float] = []
        self._lasts: list[float] = []
        self._began: float | None = None

    def begin_period(self, trainer: Any) -> None:
        """Times are of now."""

    def begin_batch(self, trainer: Any) -> None:
        self._began = _now(trainer)

    def before_backward(self, trainer: Any, scale: float) -> None:
        """Not of interest."""

    def after_backward(self, trainer: Any, ends: bool) -> None:
        if self._began is not None and not ends:
            self._batches.append(_now(trainer) - self._began)

    def before_step(self, trainer: Any) -> None:
        if self._began is not None:
            self._lasts.append(_now(trainer) - self._began)

    def end_window(self, is_full: bool, small_size: float, big_size: float) -> None:
        self._began = None

    def end_period(self, mean: Callable[[float], float]) -> dict[str, Any]:
        batches, lasts, self._batches, self._lasts = self._batches, self._lasts, [], []
        if not batches or not lasts:
            return {}
        batch_s = statistics.median(batches)  # what one batch had to wait for is no batch's time
        return {"times": Times(batch_s, statistics.median(lasts) - batch_s)}

    def close(self) -> None:
        """Nothing is held."""

    def keep(self) -> Callable[[], dict[str, Any]]:
        state = {"batches": list(self._batches), "lasts": list(self._lasts)}
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches, self._lasts = list(state["batches"]), list(state["lasts"])


def probe_of(policy: AccumulationPolicy, arrive: bool) -> Probe | None:
    """What measures what a policy asks for; ``arrive``: see `NoiseProbe`."""
    measures = getattr(policy, "measures", "nothing")
    if measures == "noise":
        return NoiseProbe(getattr(policy, "decay", 0.9), arrive)
    return TimesProbe() if measures == "times" else None


def loss_scale(trainer: Any) -> float:
    """What a gradient scaler multiplies losses by."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def _sum(first: float, norms: tuple[tuple[Tensor, float], ...]) -> float:
    """With the squares of these."""
    for found, scale in norms:
        first += (float(found) / scale) ** 2
    return first


def _now(trainer: Any) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
