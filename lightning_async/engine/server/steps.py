"""A server's steps: from one bank of memory, which stays as it is, to another one, piece by piece, in any order.

A fused op reads a piece once, and writes what becomes of it once: the new weights and state, and the reply to the
worker that has pushed. How much a late push counts is a factor of the rate, or of the gradient (`Rates`); factors of 1
change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.ops.define import eager

__all__ = ["Adam", "Bank", "Dana", "Delta", "Rates", "Scalars", "ServerOptimizer", "Sgd", "Span"]

Bank = Mapping[str, Tensor]
"""``params`` and the optimizer's fields: flat, fp32, of one size."""
Scalars = dict[str, float]
"""An optimizer's state besides the fields, such as ``step``; empty before the first one."""

_add_: Callable[..., None] = eager(ops.server_add_)
_sgd_: Callable[..., None] = eager(ops.server_sgd_)
_dana_: Callable[..., None] = eager(ops.server_dana_)
_adam_: Callable[..., None] = eager(ops.server_adam_)
_TOGETHER = "together"  # what there is of momentum is of workers together


class Rates(NamedTuple):
    """What a step is taken with.

    Args:
        lr: in place of the optimizer's own. Default: that one.
        factor: of the rate.
        scale: of the gradient.
    """

    lr: float | None = None
    factor: float = 1.0
    scale: float = 1.0

    def of(self, own: float) -> float:
        """The rate, for an optimizer with this one."""
        return (own if self.lr is None else self.lr) * self.factor


class Span(NamedTuple):
    """A piece of a shard in a step.

    Args:
        old: read.
        new: overwritten, all of it.
        gradient: fp32, bf16 or fp16.
        reply: overwritten with what workers are to have: the new weights, or what is ahead of them. None: nobody pulls.
        whole: elements of the arrays that it is a piece of.
    """

    old: Bank
    new: Bank
    gradient: Tensor
    reply: Tensor | None
    whole: int

    def before(self, *names: str) -> list[Tensor]:
        return [self.old[name] for name in names]

    def after(self, *names: str) -> list[Tensor]:
        return [self.new[name] for name in names]


class ServerOptimizer(Protocol):
    """A step on a piece of a shard; by several threads at once."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the state that is as large as the parameters; zeros before the first step."""
        ...

    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        """Fill what is new; the new scalars, the same for every piece.

        Args:
            span: the piece.
            scalars: that go with what is old.
            rates: see there.
        """
        ...


class Delta:
    r"""What is pushed is a change of the weights: :math:`x \leftarrow x + d`."""

    fields = ()

    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        _add(span, rates.factor * rates.scale)
        return {}


class Sgd:
    """As `torch.optim.SGD`, by `ops.server_sgd_`; without momentum, by `ops.server_add_`.

    Args:
        lr: > 0.
        momentum: in [0, 1).
        nesterov, weight_decay, maximize: see there. Default: none of it.
    """

    def __init__(
        self, lr: float, momentum: float, nesterov: bool, weight_decay: float = 0.0, maximize: bool = False
    ) -> None:
        self._lr, self._momentum, self._nesterov = float(lr), float(momentum), bool(nesterov)
        self._weight_decay, self._sign = float(weight_decay), -1.0 if maximize else 1.0
        self.fields = ("momentum_buffer",) if momentum else ()

    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        rate, scale, names = rates.of(self._lr), self._sign * rates.scale, ("params", *self.fields)
        if self._momentum:
            how = rate, self._momentum, self._nesterov, scale, self._weight_decay, span.whole
            _sgd_(*span.after(*names), span.reply, *span.before(*names), span.gradient, *how)
        else:
            _add(span, -rate * scale, rate * self._weight_decay)
        return {}


class Dana:
    """SGD with a momentum for each worker, by `ops.server_dana_`; see `rules.staleness.Dana`.

    The field ``momentum_buffer`` is the sum of all momenta: with one worker that of SGD. ``ahead`` is what workers
    pull. Banks hold for a step what the worker has of its own, too: ``momentum``. Of a step that several workers take
    together it is nobody's, and given up with the first step that is somebody's. Arguments are as of torch's SGD.
    """

    fields = ("momentum_buffer", "ahead")

    def __init__(self, lr: float, momentum: float, weight_decay: float, maximize: bool) -> None:
        self._lr, self._momentum = float(lr), float(momentum)
        self._weight_decay, self._sign = float(weight_decay), -1.0 if maximize else 1.0

    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        rate = rates._replace(factor=1.0).of(self._lr)  # or what is ahead would be nearer after a late push
        names, gradient, mu = ("params", "momentum", "momentum_buffer"), span.gradient, self._momentum
        if self._weight_decay or self._sign < 0:
            gradient = torch.add(gradient.float() * self._sign, span.old["params"], alpha=self._weight_decay)
        if "momentum" not in span.new:
            both = "params", "momentum_buffer"
            how = rate, mu, False, rates.scale, 0.0, span.whole
            _sgd_(*span.after(*both), None, *span.before(*both), gradient, *how)
            torch.sub(span.new["params"], span.new["momentum_buffer"], alpha=rate * mu, out=span.new["ahead"])
            if span.reply is not None:
                span.reply.copy_(span.new["ahead"])
            return {"reach": rate * mu, _TOGETHER: 1.0}
        old, own, total = span.before(*names)
        if _TOGETHER in scalars:
            total = torch.zeros_like(total)
        how = rate, mu, rates.factor * rates.scale, span.whole
        _dana_(*span.after(*names, "ahead"), span.reply, old, own, total, gradient, *how)
        return {"reach": rate * mu}

    def without(self, old: Bank, new: Bank, momenta: Sequence[Tensor], scalars: Scalars) -> None:
        """Fill ``new`` with what ``old`` is without these workers' momenta."""
        for name in old.keys() - {"ahead"}:
            new[name].copy_(old[name])
        for momentum in momenta:
            new["momentum_buffer"].sub_(momentum)
        torch.sub(new["params"], new["momentum_buffer"], alpha=scalars.get("reach", 0.0), out=new["ahead"])


class Adam:
    """As `torch.optim.Adam`, by `ops.server_adam_`; with ``decoupled`` decay, as `torch.optim.AdamW`.

    Args:
        lr: > 0.
        beta1, beta2: in [0, 1).
        eps: >= 0.
        weight_decay, maximize: see there. Default: none of it.
        decoupled: the decay is no part of the gradient. Default: it is L2.
    """

    fields = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        maximize: bool = False,
    ) -> None:
        self._lr, self._betas, self._eps = float(lr), (float(beta1), float(beta2)), float(eps)
        self._decay, self._sign = (float(weight_decay), bool(decoupled)), -1.0 if maximize else 1.0

    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        step, rate, names = int(scalars.get("step", 0)) + 1, rates.of(self._lr), ("params", *self.fields)
        how = step, rate, *self._betas, self._eps, self._sign * rates.scale, *self._decay, span.whole
        _adam_(*span.after(*names), span.reply, *span.before(*names), span.gradient, *how)
        return {"step": step}


def _add(span: Span, weight: float, decay: float = 0.0) -> None:
    _add_(span.new["params"], span.reply, span.old["params"], span.gradient, weight, decay, span.whole)
