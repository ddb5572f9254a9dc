"""Windows: the gradients of several batches of one replica, summed in one flat buffer and sent together.

    the open window --- full: the mean of its gradients ---> the `sent` bucket, which is reduced in the background
          ^                                                            |
          +--- zeroed: the next window fills the buffer                +---> `received`, then the optimizer's step

A window is sent as a whole: no gradient is in two windows, and none is lost when a reduction is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.fingerprint import real, strided
from lightning_async.engine.gradients.reduction import EarlierPasses, Reduction, SynchronousGradients
from lightning_async.engine.sync_points import SyncPoints


class Window:
    r"""A window: the sum of one replica's gradients over several batches; used by the training thread.

    .. math:: g_i = \frac{1}{n_i} \sum_b n_{i,b}\, g_{i,b}, \qquad n_i = \sum_b n_{i,b}

    The window of replica :math:`i` holds batches :math:`b` of :math:`n_{i,b}` samples each. The replicas' means are
    weighted by :math:`n_i`, so that each sample counts the same, however many batches the window of each replica holds.
    If several optimizers step apart, each with gradients of other batches, :math:`n_{i,b}` and :math:`n_i` are counted
    separately for the parameters of each optimizer.
    """

    def __init__(self, gradients: SynchronousGradients) -> None:
        self._gradients = gradients
        self._replica = gradients.replica
        self._layout = self._replica.layout
        self.samples = 0.0
        self.batches = 0
        self.since = 0
        self._used = torch.zeros(len(self._layout))
        self._behind = torch.zeros(len(self._layout), dtype=torch.float64)
        """For each parameter, the number of samples in its batches, whether these gave it a gradient or not."""
        self._sum = self._layout.empty(self._replica.device)

    @torch.no_grad()
    def add_(self, samples: float, scale: float = 1.0, step: int = 0, params: Collection[Tensor] | None = None) -> None:
        """Add the gradients of one batch to the window, and set the parameters' gradients to None.

        Args:
            samples: Number of samples of the batch, over which its gradients are a mean; if 0, they are dropped.
            scale: Divisor of the gradients: the loss scale of mixed precision, or the divisor of a divided loss.
                Default: 1.0.
            step: Number of optimizer steps taken so far. Default: 0.
            params: Parameters of one optimizer, if each optimizer steps on its own; the caller then counts the batch
                with `count`. Default: all parameters.
        """
        self._follow_layout()
        if not self.batches:
            self.since = step
        chosen = None if params is None else set(params)
        views: list[Tensor] = []
        moved: list[Tensor] = []
        trained = self._replica.tensors.trained.values()
        if chosen is None:
            self._behind += samples
            self.samples = self.samples + samples
            self.batches = self.batches + 1
        else:
            self._behind[torch.tensor([p in chosen for p in trained], dtype=torch.bool)] += samples
        for i, (p, view) in enumerate(zip(trained, self._layout.views(self._sum), strict=True)):
            if p.grad is not None and (chosen is None or p in chosen):
                views.append(view)
                moved.append(real(strided(p.grad)).to(self._sum.device))
                self._used[i] = 1.0
        if views and samples > 0.0:
            torch._foreach_add_(views, moved, alpha=samples / scale)
        for p in trained if chosen is None else chosen:
            p.grad = None

    def count(self, samples: float) -> None:
        self.samples = self.samples + samples
        self.batches = self.batches + 1

    def leave(self) -> bool:
        """Send the window and empty it, if the buckets are free; return whether the window was sent."""
        self._follow_layout()
        weight = 1.0 / self.samples if self.samples > 0.0 else 0.0
        if not self._gradients.post(
            lambda part: ops.scale_(part, self._sum, weight),
            self.samples,
            self._used.clone(),
            self.since,
            self._behind * weight,
        ):
            return False
        self.clear()
        return True

    def leave_with(self, samples: float, scale: float = 1.0, step: int = 0) -> bool:
        """Start to send the window before its last backward pass, so that gradients are sent during the pass.

        Return whether this was possible; if not, nothing was started. The caller calls `clear` after the pass. If the
        pass fails, the window stays as it was before. The arguments are those of `add_`, for the batch of the pass.
        """
        self._follow_layout()
        total = self.samples + samples
        held = self.batches > 0
        return self._gradients.begin_last(
            EarlierPasses(
                (lambda part: ops.scale_(part, self._sum, 1.0 / total)) if held else None,
                self._used.clone(),
                self.since if held else step,
            ),
            total,
            samples / (total * scale),
        )

    def clear(self) -> None:
        self._sum.zero_()
        self._used.zero_()
        self._behind.zero_()
        self.samples = 0.0
        self.batches = 0

    def _follow_layout(self) -> None:
        before = self._layout
        now = self._replica.layout
        if before is now:
            return
        used, behind = (dict(zip(before.names, part.tolist(), strict=True)) for part in (self._used, self._behind))
        self._layout, self._sum = now, before.moved(self._sum, now)
        self._used = torch.tensor([used.get(name, 0.0) for name in now.names])
        self._behind = self._behind.new_tensor([behind.get(name, 0.0) for name in now.names])

    def state_dict(self) -> dict[str, Any]:
        """Copy the window for a checkpoint.

        The copy also includes the gradients of the window before, if it was sent but not used in a step yet.
        """
        sum = self._sum.clone()
        samples = self.samples
        since = self.since
        used = self._used.clone()
        behind = self._behind.clone()
        if (left := self._gradients.unstepped()) is not None:
            message, mean = left
            sum.add_(mean, alpha=message.samples)
            behind += message.samples * (1.0 if message.behind is None else message.behind)
            samples = samples + message.samples
            since = message.since
            used = torch.maximum(used, message.used)
        return {
            "samples": samples,
            "behind": behind,
            "batches": self.batches,
            "since": since,
            "used": used,
            "sum": sum.cpu(),
            "names": list(self._layout.names),
            "sizes": list(self._layout.sizes),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._follow_layout()
        held = zip(saved["sum"].split(saved["sizes"]), saved["used"].tolist(), saved["behind"].tolist(), strict=True)
        parts = dict(zip(saved["names"], held, strict=True))
        for i, (name, view) in enumerate(zip(self._layout.names, self._layout.views(self._sum), strict=True)):
            if name in parts and parts[name][0].numel() == view.numel():
                view.copy_(parts[name][0].view(view.shape))
                self._used[i], self._behind[i] = parts[name][1:]
        self.samples = float(saved["samples"])
        self.batches = int(saved["batches"])
        self.since = int(saved["since"])


@dataclass
class WindowTotals:
    """The counts, times (in seconds) and bytes of one replica's windows of gradients, over a whole run."""

    number: int = 0  # number of reduced windows
    own: int = 0  # number of those with gradients of this replica
    batches: int = 0  # number of this replica's batches in them
    exchange_s: float = 0.0  # time of their exchanges
    waited_s: float = 0.0  # the part that the training thread waited for; at a sync point, all of it
    sent_bytes: int = 0  # bytes of this replica's windows on the wire
    left: tuple[int, float] = (0, 0.0)  # batches of the last window sent; waiting time until then

    title: ClassVar[str] = "Windows of gradients"
    prefix: ClassVar[str] = "gradients"
    shown: ClassVar[tuple[str, ...]] = ("windows", "hidden_share")

    def leave(self, batches: int, sync_points: SyncPoints) -> None:
        self.left = batches, sync_points.waited_s

    def arrive(self, arrived: Reduction, sync_points: SyncPoints, message_bytes: int) -> None:
        """Count a window that was reduced, before the optimizer's step with its mean."""
        self.number += 1
        self.exchange_s += arrived.exchange_s
        batches, before_s = self.left
        self.left = (0 if arrived.message is not None else batches), sync_points.waited_s
        standing_s = math.inf if sync_points.standing else sync_points.waited_s - before_s
        self.waited_s += min(standing_s, arrived.exchange_s)
        if arrived.message is not None:
            self.own = self.own + 1
            self.batches = self.batches + batches
            self.sent_bytes += message_bytes

    @property
    def each_s(self) -> float:
        return self.exchange_s / self.number if self.number else 0.0

    @property
    def hidden_share(self) -> float:
        return max(0.0, 1.0 - self.waited_s / self.exchange_s) if self.exchange_s > 0.0 else 1.0

    @property
    def batches_each(self) -> float:
        return self.batches / self.own if self.own else 0.0

    def rows(self) -> dict[str, str]:
        travels = f"{self.each_s:.3f} s, {100 * self.hidden_share:.1f}% hidden" if self.number else "no window"
        batches = f"{self.batches_each:.1f}"
        return {"windows reduced": f"{self.number}", "batches in a window": batches, "a window travels": travels}

    def metrics(self) -> dict[str, float]:
        """Return the totals for loggers; before the first window, only the number of windows."""
        of_windows = {
            "window_s": self.each_s, "hidden_share": self.hidden_share, "batches_in_window": self.batches_each,
        }  # fmt: skip
        return {"windows": float(self.number), **(of_windows if self.number else {})}
