"""The optimizers of servers, by name and JSON's arguments.

Those with a fused op are in `steps`. Those without are torch's own: they copy a piece, and update it while it is in the
cache. What gives other numbers on several elements than on each alone cannot be sharded, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_async.engine.server.steps import Adam, Dana, Delta, Rates, Scalars, ServerOptimizer, Sgd, Span

__all__ = ["begun", "make_optimizer"]

_BEGUN = "begun"  # one that has fields only is known by this to have taken a step


def make_optimizer(
    name: str, arguments: Mapping[str, Any], *, known: bool = False, momentum_by_worker: bool = False
) -> ServerOptimizer:
    """An optimizer by name.

    Args:
        name: of a class of torch.optim, or ``"delta"``: what workers push is added to the weights.
        arguments: of its constructor, but for the parameters.
        known: they were taken before. To ask torch's class takes it a second; one with a fused op is then not asked.
        momentum_by_worker: each worker is to have its own. Default: no.

    Raises:
        ValueError: there is none of this name, or it cannot be sharded, or has no momentum that workers could have.
        TypeError, ValueError: it does not take these arguments.

    >>> make_optimizer("Adam", {"lr": 0.001}).fields
    ('exp_avg', 'exp_avg_sq')
    >>> make_optimizer("LBFGS", {})
    Traceback (most recent call last):
    ValueError: `optimizer='LBFGS'` cannot be sharded: ...
    """
    if momentum_by_worker and not (name == "SGD" and arguments.get("momentum") and not arguments.get("dampening")):
        raise ValueError(
            f"`optimizer={name!r}` with {dict(arguments)} has no momentum that each worker could have of its own, as "
            "`staleness=Dana(...)` asks for: it is for SGD with `momentum` above 0, without dampening."
        )
    if name == "delta":
        if arguments:
            raise TypeError(f"`optimizer='delta'` takes no arguments, got {sorted(arguments)}.")
        return Delta()
    kind = getattr(torch.optim, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer):
        raise ValueError(f"`optimizer={name!r}` must be 'delta', or the name of a class of torch.optim.")
    if known:
        options = {key: value.default for key, value in inspect.signature(kind).parameters.items()}
        if momentum_by_worker:
            return _dana({**options, **arguments})
        if (fused := _fused(name, {**options, **arguments})) is not None:
            return fused
    whole = _Torch(name, kind, arguments)
    if momentum_by_worker:
        return _dana(whole.defaults)
    return _fused(name, whole.defaults) or whole


def _dana(options: Mapping[str, Any]) -> Dana:
    return Dana(options["lr"], options["momentum"], options["weight_decay"], options["maximize"])


def _fused(name: str, options: Mapping[str, Any]) -> ServerOptimizer | None:
    """What the ops compute as torch's class does with these options; None where they do not."""
    plain = not any(options.get(each) for each in ("amsgrad", "dampening"))
    if not plain or any(isinstance(value, Tensor) for value in options.values()):
        return None
    if name == "SGD":
        how = options["nesterov"], options["weight_decay"], options["maximize"]
        return Sgd(options["lr"], options["momentum"], *how)
    if name in ("Adam", "AdamW"):
        decoupled = name == "AdamW" or options.get("decoupled_weight_decay", False)
        (beta1, beta2), eps = options["betas"], options["eps"]
        return Adam(options["lr"], beta1, beta2, eps, options["weight_decay"], decoupled, options["maximize"])
    return None


def begun(state: Mapping[str, Tensor] | None, scalars: Mapping[str, float] | None) -> Scalars:
    """The scalars of an optimizer that begins with such a state: one with fields has taken a step."""
    return {**({_BEGUN: 1.0} if state else {}), **(scalars or {})}


class _Torch:
    """A class of torch.optim as it is, with its own fields and scalars; they are found by trying it.

    Args:
        name: for messages.
        kind: the class.
        arguments: of its constructor.

    Raises:
        ValueError: it cannot be sharded.
    """

    def __init__(self, name: str, kind: type[Optimizer], arguments: Mapping[str, Any]) -> None:
        self._make: Callable[[Parameter], Optimizer] = lambda parameter: kind([parameter], **arguments)  # pyright: ignore
        start = torch.tensor([1.0, -2.0, 0.5])
        self.defaults = dict(self._make(Parameter(start.clone())).defaults)
        try:
            state, together = self._try(start)
            alone = torch.cat([self._try(start[i : i + 1])[1] for i in range(len(start))])
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"`optimizer={name!r}` cannot be sharded: {str(error).splitlines()[0]}") from error
        if not torch.equal(together, alone):
            raise ValueError(
                f"`optimizer={name!r}` cannot be sharded: what becomes of an element depends on others. Take another "
                "one, or `update_on_server=False`."
            )
        kept = {key: value for key, value in state.items() if value is not None}
        self.fields = tuple(key for key, value in kept.items() if isinstance(value, Tensor) and value.dim())
        self._tensors = {key for key, value in kept.items() if isinstance(value, Tensor) and not value.dim()}
        wrong = [key for key in self.fields if kept[key].shape != start.shape or kept[key].dtype != start.dtype]
        if wrong or any(not isinstance(value, Tensor | int | float) for value in kept.values()):
            raise ValueError(f"`optimizer={name!r}` cannot be sharded: its state is not as large as its parameters.")

    def _try(self, start: Tensor) -> tuple[dict[str, Any], Tensor]:
        parameter = Parameter(start.clone())
        optimizer = self._make(parameter)
        for scale in (0.5, -2.0, 1.0):
            parameter.grad = start * scale
            optimizer.step()
        return optimizer.state[parameter], parameter.detach()

    @torch.no_grad()  # of the thread that calls it
    def step(self, span: Span, scalars: Scalars, rates: Rates) -> Scalars:
        new = span.new
        for name, tensor in span.old.items():
            new[name].copy_(tensor)
        parameter = Parameter(new["params"])  # shares its memory
        parameter.grad = span.gradient.float() if rates.scale == 1 else span.gradient.float() * rates.scale
        optimizer = self._make(parameter)
        if rates.lr is not None or rates.factor != 1:
            for group in optimizer.param_groups:
                group["lr"] = rates.of(group["lr"])
        if scalars:
            kept = {key: value for key, value in scalars.items() if key != _BEGUN}
            held = {key: torch.tensor(value) if key in self._tensors else value for key, value in kept.items()}
            optimizer.state[parameter] = {**{field: new[field] for field in self.fields}, **held}
        optimizer.step()
        state = optimizer.state[parameter]
        for field in self.fields:
            if state[field] is not new[field]:
                new[field].copy_(state[field])
        if span.reply is not None:
            span.reply.copy_(new["params"])
        others = {key: value for key, value in state.items() if key not in self.fields and value is not None}
        return {_BEGUN: 1.0, **{key: float(value) for key, value in others.items()}}
