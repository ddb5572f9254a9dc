"""The optimizers of servers, which `make_optimizer` creates from a name and arguments that JSON can hold.

A shard's arrays exist twice, in two banks. An optimizer step reads one bank, which stays as it is, and writes the other
one, piece by piece, in any order. SGD, Adam and AdamW run as fused ops, which read and write each piece once, and fill
the reply to the worker in the same pass. Other optimizers, and options that the fused ops lack, run by torch's own
classes. An optimizer is refused if its step for one element depends on other elements.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_async import ops
from lightning_async.ops.flat_ops import eager

Bank = Mapping[str, Tensor]
"""Arrays of a shard: ``params`` and the optimizer's fields, flat, fp32, of one size."""
Scalars = dict[str, float]
"""An optimizer's state apart from its fields, such as ``step``; empty before the first step."""
ScalarRuns = Sequence[tuple[int, Scalars]]
"""The scalars of a shard's elements: for each run of elements with equal scalars, the index after its last element, and
the scalars. They differ where parameters have had no gradient in some steps."""
MOST_RUNS = 1000
"""Largest number of runs of a shard."""

_add_: Callable[..., None] = eager(ops.server_add_)
_sgd_: Callable[..., None] = eager(ops.server_sgd_)
_dana_: Callable[..., None] = eager(ops.server_dana_)
_adam_: Callable[..., None] = eager(ops.server_adam_)
_BEGUN = "begun"  # scalar that says that the optimizer has taken a step
_TOGETHER = "together"  # scalar that says that the momentum comes from steps of all workers together


class ServerRates(NamedTuple):
    """The rates of one step.

    Args:
        lr: Learning rate in place of the optimizer's own. Default: None, the optimizer's own.
        factor: Factor of the learning rate. Default: 1.
        scale: Scale of the gradient. Default: 1.
    """

    lr: float | None = None
    factor: float = 1.0
    scale: float = 1.0

    def of(self, own: float) -> float:
        """Return the learning rate of the step: `lr`, or the optimizer's ``own`` rate without `lr`, times `factor`."""
        return (own if self.lr is None else self.lr) * self.factor


class ShardSpan(NamedTuple):
    """One piece of a shard, a range of its elements, in one optimizer step.

    Args:
        old: Arrays before the step; only read.
        new: Arrays after the step; overwritten completely.
        gradient: Gradient in fp32, bf16 or fp16.
        reply: Memory that the step fills with the weights that workers pull next, new or predicted ones. None: the
            weights are not wanted.
        whole: Number of elements of the whole shard.
    """

    old: Bank
    new: Bank
    gradient: Tensor
    reply: Tensor | None
    whole: int

    def before(self, *names: str) -> list[Tensor]:
        """Return the arrays of `old` with these names."""
        return [self.old[name] for name in names]

    def after(self, *names: str) -> list[Tensor]:
        """Return the arrays of `new` with these names, which the step writes."""
        return [self.new[name] for name in names]


class ServerOptimizer(ABC):
    """An optimizer that steps on pieces of a shard; several threads may use it at once."""

    fields: tuple[str, ...] = ()
    """Names of the state's tensors. Each tensor is as large as the parameters, and zero before the first step."""

    @abstractmethod
    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        """Take an optimizer step on one piece of the shard: read the arrays of ``span.old``, and write ``span.new``.

        Args:
            span: The piece of the shard.
            scalars: Scalars of the optimizer before the step, see `Scalars`.
            rates: Rates of the step.

        Returns:
            The optimizer's new scalars, such as its number of steps; they are the same for every piece.
        """

    def skip(self, span: ShardSpan, scalars: Scalars) -> Scalars:
        """Leave a piece of the shard as it is, because its parameters have no gradient; return its scalars.

        As in `step`, ``span.new`` and the reply are filled.
        """
        for name, new in span.new.items():
            new.copy_(span.old[name])
        if span.reply is not None:
            span.reply.copy_(span.old["params"])
        return scalars


class Delta(ServerOptimizer):
    r"""Optimizer for pushes that are changes of the weights: :math:`x \leftarrow x + d`."""

    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        _add(span, rates.factor * rates.scale)
        return {}


@dataclass(frozen=True)
class Sgd(ServerOptimizer):
    """SGD as `torch.optim.SGD`, by `ops.server_sgd_`; without momentum, by `ops.server_add_`."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float
    maximize: bool

    @property
    def fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("momentum_buffer",) if self.momentum else ()

    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        rate = rates.of(self.lr)
        scale = -rates.scale if self.maximize else rates.scale
        names = ("params", *self.fields)
        if self.momentum:
            how = rate, self.momentum, bool(self.nesterov), scale, self.weight_decay, span.whole
            _sgd_(*span.after(*names), span.reply, *span.before(*names), span.gradient, *how)
        else:
            _add(span, -rate * scale, rate * self.weight_decay)
        return {}


@dataclass(frozen=True)
class DanaStep(ServerOptimizer):
    """SGD with a momentum for each worker, by `ops.server_dana_`; see `algorithms.staleness.Dana`.

    The field ``momentum_buffer`` is the sum of all workers' momenta, and workers pull the field ``ahead``. A step with
    one worker's push also reads and writes that worker's ``momentum``.

    A step with all workers' pushes together, as in rounds, changes no worker's momentum. It uses ``momentum_buffer`` as
    the momentum of plain SGD. Then ``momentum_buffer`` is not the sum of the workers' momenta any more, so the next
    step with one worker's push starts it from zero.

    Args:
        lr: Learning rate, as in torch's SGD.
        momentum: Momentum, as in torch's SGD.
        weight_decay: Weight decay, as in torch's SGD.
        maximize: Whether to maximize, as in torch's SGD.
    """

    lr: float
    momentum: float
    weight_decay: float
    maximize: bool
    fields = ("momentum_buffer", "ahead")

    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        rate = rates._replace(factor=1.0).of(self.lr)  # else a late push would shorten the look ahead
        names = ("params", "momentum", "momentum_buffer")
        gradient = span.gradient
        mu = self.momentum
        if self.weight_decay or self.maximize:
            sign = -1.0 if self.maximize else 1.0
            gradient = torch.add(gradient.float() * sign, span.old["params"], alpha=self.weight_decay)
        # A step with all workers' pushes together: the arrays contain no worker's momentum.
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

    def skip(self, span: ShardSpan, scalars: Scalars) -> Scalars:
        super().skip(span, scalars)
        span.new["ahead"].copy_(span.old["params"])  # no look ahead: a parameter without gradients will not move
        return {**scalars, "reach": 0.0} if scalars else scalars

    def without(self, old: Bank, new: Bank, momenta: Sequence[Tensor], runs: ScalarRuns) -> None:
        """Subtract the momenta of workers that are gone from the sum of momenta.

        Args:
            old: Arrays before; only read.
            new: Arrays after; all are written. Arrays that do not change are copied from ``old``.
            momenta: Momenta of the workers that are gone.
            runs: Scalars of the optimizer.
        """
        # `ahead` follows from the other arrays, and is computed last.
        for name in old.keys() - {"ahead"}:
            new[name].copy_(old[name])
        for momentum in momenta:
            new["momentum_buffer"].sub_(momentum)
        start = 0
        for stop, scalars in runs:
            params, momentum, ahead = (new[name][start:stop] for name in ("params", "momentum_buffer", "ahead"))
            torch.sub(params, momentum, alpha=scalars.get("reach", 0.0), out=ahead)
            start = stop


@dataclass(frozen=True)
class Adam(ServerOptimizer):
    """Adam as `torch.optim.Adam`, by `ops.server_adam_`; with ``decoupled`` decay, as `torch.optim.AdamW`."""

    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    fields = ("exp_avg", "exp_avg_sq")

    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        step = int(scalars.get("step", 0)) + 1
        rate = rates.of(self.lr)
        scale = -rates.scale if self.maximize else rates.scale
        names = ("params", *self.fields)
        how = step, rate, *self.betas, self.eps, scale, self.weight_decay, self.decoupled, span.whole
        _adam_(*span.after(*names), span.reply, *span.before(*names), span.gradient, *how)
        return {"step": step}


def _add(span: ShardSpan, weight: float, decay: float = 0.0) -> None:
    _add_(span.new["params"], span.reply, span.old["params"], span.gradient, weight, decay, span.whole)


def make_optimizer(
    name: str, arguments: Mapping[str, Any], *, known: bool = False, momentum_by_worker: bool = False
) -> ServerOptimizer:
    """Return an optimizer by name.

    Args:
        name: Name of a class of torch.optim, or ``"delta"``: pushes are added to the weights.
        arguments: Arguments of the class's constructor, without the parameters.
        known: Whether these arguments were accepted before. An optimizer with a fused op then skips the check by
            torch's class, which takes about a second. Default: False.
        momentum_by_worker: Whether each worker has its own momentum. Default: False.

    Raises:
        ValueError: No optimizer has this name; or the optimizer cannot be sharded, or does not support
            ``momentum_by_worker``.
        TypeError: The optimizer does not take these arguments.

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


def _dana(options: Mapping[str, Any]) -> DanaStep:
    return DanaStep(*(options[field.name] for field in fields(DanaStep)))


def _fused(name: str, options: Mapping[str, Any]) -> ServerOptimizer | None:
    """Return the fused optimizer that equals torch's class with these options, or None."""
    # The fused ops lack these options, and tensors as arguments.
    plain = not any(options.get(each) for each in ("amsgrad", "dampening"))
    if not plain or any(isinstance(value, Tensor) for value in options.values()):
        return None
    if name == "SGD":
        return Sgd(*(options[field.name] for field in fields(Sgd)))
    if name in ("Adam", "AdamW"):
        decoupled = name == "AdamW" or bool(options.get("decoupled_weight_decay"))
        plain_options = {each: options[each] for each in ("lr", "betas", "eps", "weight_decay", "maximize")}
        return Adam(**plain_options, decoupled=decoupled)
    return None


class TooManyRuns(ValueError):
    """An error: parameters without gradients split the optimizer's state into more parts than a server can record."""


def begun(scalars: Scalars) -> Scalars:
    """Return the scalars of parameters that have been stepped before.

    One more scalar records this, so that the optimizer uses its fields and does not initialise them again.
    """
    return {_BEGUN: 1.0, **scalars}


def joined_runs(runs: Iterable[tuple[int, Scalars]]) -> list[tuple[int, Scalars]]:
    """Join adjacent runs of elements with equal scalars; raise TooManyRuns if more than `MOST_RUNS` remain.

    >>> joined_runs([(2, {"step": 1}), (5, {"step": 1}), (6, {})])
    [(5, {'step': 1}), (6, {})]
    """
    found: list[tuple[int, Scalars]] = []
    for stop, scalars in runs:
        if found and found[-1][1] == scalars:
            found.pop()
        found.append((stop, scalars))
    if len(found) > MOST_RUNS:
        raise TooManyRuns(
            f"parameters without gradients split the optimizer's state into {len(found)} parts, of {MOST_RUNS} at "
            "most. Pass `update_on_server=False`: the optimizer is the worker's then."
        )
    return found


class _Torch(ServerOptimizer):
    """An optimizer of torch.optim. The names of its state's fields are found by running it on three numbers.

    Raises:
        ValueError: The optimizer cannot be sharded.
    """

    def __init__(self, name: str, kind: type[Optimizer], arguments: Mapping[str, Any]) -> None:
        self._make: Callable[[Parameter], Optimizer] = lambda parameter: kind([parameter], **arguments)  # pyright: ignore
        start = torch.tensor([1.0, -2.0, 0.5])
        self.defaults = dict(self._make(Parameter(start.clone())).defaults)
        try:
            state, together = self._try(start)
            # An optimizer can be sharded if each element steps alone as it does beside the others.
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
        # Three steps of different gradients, so that momenta and second moments take part in the comparison.
        for scale in (0.5, -2.0, 1.0):
            parameter.grad = start * scale
            optimizer.step()
        return optimizer.state[parameter], parameter.detach()

    @torch.no_grad()  # torch's mode belongs to a thread, and pieces are stepped on several threads
    def step(self, span: ShardSpan, scalars: Scalars, rates: ServerRates) -> Scalars:
        new = span.new
        for name, tensor in span.old.items():
            # torch steps in place, and the old bank must stay as it is.
            new[name].copy_(tensor)
        parameter = Parameter(new["params"])  # shares the memory, so that the step fills the bank
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
            # Some classes replace their state tensors, while others write to them.
            if state[field] is not new[field]:
                new[field].copy_(state[field])
        if span.reply is not None:
            span.reply.copy_(new["params"])
        others = {key: value for key, value in state.items() if key not in self.fields and value is not None}
        return {_BEGUN: 1.0, **{key: float(value) for key, value in others.items()}}
