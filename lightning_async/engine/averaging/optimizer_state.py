"""The optimizers' state as tensors that can be averaged or reset, and BatchNorm statistics recomputed.

Optimizers create their state at the first step that has a gradient. To be averaged over replicas, the state must exist
on every replica from the start, also on a replica without data. Its first values must be those that the optimizer
itself would create. Trial steps find out these values, and which tensors of the state are running means over time: a
stand-in of the optimizer, of the same class and options, takes the steps with a parameter of a few elements. Read
`AveragedState` first.

`recompute_batch_norm` computes BatchNorm statistics anew for an averaged model (precise BatchNorm, Wu and Johnson,
2021), because the average of the replicas' statistics does not describe the averaged model.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.fingerprint import real
from lightning_async.engine.replica import with_statistics
from lightning_async.engine.running_means import RunningMean

log = logging.getLogger(__name__)
RECENT_BATCHES = 16


def recompute_batch_norm(module: nn.Module, batches: list[Any], world: LightningCollectives) -> None:
    """Compute every BatchNorm's statistics anew, as the mean over the batches of all replicas.

    All replicas call this together. The input of each batch (its first element, if the batch is a tuple or list) passes
    through ``module.forward`` in training mode without gradients. Ranks may have unequal numbers of batches, or none.
    """
    if not (layers := with_statistics(module)):
        return
    momenta = [layer.momentum for layer in layers]
    modes = {m: m.training for m in module.modules()}
    counters = [
        layer.num_batches_tracked.clone() if layer.num_batches_tracked is not None else None for layer in layers
    ]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative mean
    module.train()
    with torch.no_grad():
        for batch in batches:
            module(batch[0] if isinstance(batch, (tuple, list)) else batch)
    for mode_of, mode in modes.items():
        mode_of.training = mode
    weight = torch.tensor(float(len(batches)))
    total = world.reduce(weight, "sum").clamp(min=1.0)
    for layer, momentum, counter in zip(layers, momenta, counters, strict=True):
        layer.momentum = momentum
        for statistic in (layer.running_mean, layer.running_var):
            assert statistic is not None
            statistic.copy_(world.reduce(statistic * weight.to(statistic), "sum") / total.to(statistic))
        if counter is not None and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.copy_(counter)


Group = dict[str, Any]


def materialise(optimizers: Iterable[Optimizer]) -> None:
    """Create the optimizer state of every trained parameter that has none, with the optimizer's own first values.

    Raises ValueError for an optimizer that would take other steps if its state existed before its first step.
    """
    for optimizer in optimizers:
        checked = set()
        for group, param in _params(optimizer):
            if not param.requires_grad or optimizer.state.get(param):
                continue
            if (kind := _kind(group, param)) not in checked:
                _check(optimizer, group, param)
                checked.add(kind)
            optimizer.state[param] = _begun(optimizer, group, param)


class AveragedState:
    """The optimizers' state that is averaged: all its tensors of more than one number, such as moments.

    Step counts are not among these tensors. Calling the object creates missing state, and returns the present tensors
    of all trained parameters; complex tensors are returned as real views. A call raises ValueError as `materialise`
    does.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._known: dict[Any, list[str]] = {}
        self._laws: dict[Any, tuple[Any, dict[str, _Law]]] = {}
        self._hooks: dict[int, RemovableHandle] = {}  # by an optimizer's `id`, where nothing else counts its updates
        self._steps: Counter[int] = Counter()  # steps of each parameter of such optimizers, by its `id`

    def __call__(self) -> list[Tensor]:
        materialise(self._optimizers)
        return [real(state[name]) for *_, state, name in self._each()]

    def running_means(self) -> list[RunningMean]:
        """Return, for each tensor that is averaged, its `RunningMean`: its decay, and the number of its updates so far.

        The decays follow from the optimizers' present options, such as Adam's betas. If nothing counts an optimizer's
        updates, a hook that counts them is registered; `close` removes it.
        """
        laws: dict[Any, dict[str, _Law]] = {}
        found = []
        for optimizer, group, param, state, name in self._each():
            kind = (id(optimizer), *_kind(group, param))
            if kind not in laws:
                laws[kind] = self._laws_of(kind, optimizer, group, param)
            law = laws[kind].get(name, _Law())
            if not law.is_counted and id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = optimizer.register_step_post_hook(self._count)
            found.append(law.of(state, name, float(self._steps[id(param)])))
        return found

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step of ``optimizer``; a hook of those optimizers whose fused kernels keep no count in the state."""
        self._steps.update(id(param) for _, param in _params(optimizer) if param.grad is not None)

    def _each(self) -> Iterator[tuple[Optimizer, Group, Tensor, dict[str, Any], str]]:
        for optimizer in self._optimizers:
            for group, param in _params(optimizer):
                if not (state := optimizer.state.get(param)):
                    continue
                kind = (id(optimizer), *_kind(group, param))
                if kind not in self._known:
                    self._known[kind] = _names(optimizer, group, param)
                for name in self._known[kind]:
                    if name in state:
                        yield optimizer, group, param, state, name

    def _laws_of(self, kind: Any, optimizer: Optimizer, group: Group, param: Tensor) -> dict[str, _Law]:
        """Return, by name, the `_Law` of each state tensor that the optimizer keeps for parameters of this ``kind``.

        Trial steps find the laws. The steps are repeated only if an option in ``group``, other than the learning rate,
        has changed.
        """
        options = {key: value for key, value in group.items() if key not in ("params", "lr")}
        before = self._laws.get(kind)
        shown = repr(options)
        if before is None or before[0] != shown:
            self._laws[kind] = before = (shown, _laws(optimizer, group, param, self._known[kind]))
        return before[1]


class _Law(NamedTuple):
    """The law by which a tensor of optimizer state changes at each update, such as a running mean's constant decay."""

    decay: float = 1.0  # see `RunningMean`; 1 where it is unknown
    counter: str | None = None  # name of the state's entry that counts updates, if one does
    writes: int = 0  # number of writes to the tensor that torch counts for an update
    positive: bool = False  # see `RunningMean`

    def of(self, state: Mapping[str, Any], name: str, steps: float) -> RunningMean:
        """Return the `RunningMean` of the tensor ``name`` in ``state``: its decay and its number of updates so far.

        ``steps``, the number of steps with a gradient, is used if neither the state nor torch counts updates.
        """
        if self.counter is not None and self.counter in state:
            return RunningMean(self.decay, state[self.counter], positive=self.positive)
        if self.writes:
            return RunningMean(self.decay, float(state[name]._version), self.writes, self.positive)
        return RunningMean(self.decay, steps, positive=self.positive)

    @property
    def is_counted(self) -> bool:
        """Whether the number of the tensor's updates is known, or does not matter because the decay is 1.

        The number is unknown for fused SGD, whose kernels count no updates.
        """
        return self.decay == 1.0 or self.counter is not None or self.writes > 0


def every_tensor(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    # `dict.values`: a `HeldState` of servers refuses other readers.
    states = [state for optimizer in optimizers for state in dict.values(optimizer.state)]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def reset(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.state.clear()


def _params(optimizer: Optimizer) -> Iterator[tuple[Group, nn.Parameter]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield group, param


def _begun(optimizer: Optimizer, group: Group, param: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer would create for ``param`` at its first step; ``param`` does not change."""
    twin = nn.Parameter(param.detach().clone())
    twin.grad = torch.zeros_like(twin)
    stand_in = _stand_in(optimizer, group, twin)
    begin: Any = getattr(stand_in, "_init_group", None)  # torch's own optimizers create the state here, without a step
    if begin is not None:
        lists = [[] for _ in list(inspect.signature(begin).parameters)[1:]]
        with _own_random_numbers(twin):
            begin(stand_in.param_groups[0], *lists)
    if not stand_in.state.get(twin):  # a state that does not begin with zeros is refused by `_check`
        stand_in.param_groups[0]["lr"] = 0.0
        with _own_random_numbers(twin):
            type(optimizer).step(stand_in)
        for name, value in stand_in.state[twin].items():
            if isinstance(value, Tensor):
                value.zero_()
            elif type(value) in (int, float):
                stand_in.state[twin][name] = type(value)(0)
    return stand_in.state[twin]


def _check(optimizer: Optimizer, group: Group, param: Tensor) -> None:
    """Raise ValueError if the optimizer does not work with a state that `_begun` creates before the first step.

    Trial steps must give the same bits with such a state as without any, and must update the state's tensors in place.
    """
    why = ""
    try:
        alone, _ = _trained(optimizer, group, param, begun=False)
        averaged, replaced = _trained(optimizer, group, param, begun=True)
        if not torch.equal(alone, averaged):
            why = "it makes its state of the first gradient, so there is none yet for all replicas to share"
        elif replaced:
            why = f"it replaces {replaced} at every step, where tensors are to be averaged in place"
    except Exception as error:
        why = f"its state cannot be made before its first step ({error})"
    if why:
        options = ", ".join(f"{key}={value!r}" for key, value in group.items() if key != "params")
        raise ValueError(
            f"`AsyncAveragingStrategy(optimizer_state='average')` cannot be used with `{type(optimizer).__name__}"
            f"({options})`: {why}. Pass `optimizer_state='keep'` or `'reset'`, or another optimizer."
        )


def _trained(optimizer: Optimizer, group: Group, param: Tensor, begun: bool) -> tuple[Tensor, list[str]]:
    """Take three trial steps; return the small parameter after them, and the names of replaced state tensors.

    With ``begun``, the steps start from a state that `_begun` creates; otherwise, without any state. A state tensor is
    replaced if the optimizer assigns a new tensor instead of changing the tensor in place.
    """
    small = _small(param)
    stand_in = _stand_in(optimizer, group, small)
    if begun:
        stand_in.state[small] = _begun(optimizer, group, small)
    before = dict(stand_in.state[small])
    with _own_random_numbers(small):
        for _ in range(3):
            small.grad = torch.randn(small.shape).to(small)
            type(optimizer).step(stand_in)
    after = stand_in.state[small]
    replaced = [n for n, old in before.items() if isinstance(old, Tensor) and old.numel() > 1 and after[n] is not old]
    return small.detach(), replaced


def _names(optimizer: Optimizer, group: Group, param: Tensor) -> list[str]:
    """Return the names of those tensors in the optimizer's state that hold more than one number.

    A small parameter of the same kind as ``param`` is used to find them.
    """
    state = _begun(optimizer, group, _small(param))
    return sorted(
        name
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and (value.is_floating_point() or value.is_complex())
    )


def _laws(optimizer: Optimizer, group: Group, param: Tensor, names: list[str]) -> dict[str, _Law]:
    """Find the law of each state tensor in ``names`` by trial steps; return an empty dict if these fail.

    For each tensor, a step is taken from two states that differ by 1 in this tensor only. The difference that remains
    after the step is the decay, if it is the same for all elements and in all trials. The trials have different
    gradients, begin early or later in training, and have different factors in the state (see `_halved`). Tensors such
    as a running maximum, an adaptive step size, or ASGD's average have no constant decay. Steps are in fp64, so that
    the decay has more digits than the optimizer's options.
    """
    small = nn.Parameter(_small(param.detach().real).detach().double())
    signs = torch.ones_like(small)
    signs.view(-1)[::2] = -1.0
    large = signs * torch.arange(1, small.numel() + 1).view(small.shape).to(signs)
    try:
        begun = later = _begun(optimizer, group, small)
        for gradient in (large, signs, large, signs):
            later, _ = _stepped(optimizer, group, small, later, gradient)
        states = (begun, later, _halved(later))
        runs = [(state, gradient) for state in states for gradient in (large, 0.1 * signs)]
        return {name: _law(optimizer, group, small, runs, name) for name in names}
    except Exception as error:
        log.warning(
            "It is unknown how the state of `%s` averages over time (%s). A mean that arrives late changes the state "
            "by the difference between this mean and what was sent.", type(optimizer).__name__, error,
        )  # fmt: skip
        return {}


def _halved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state in which each number in (0, 1] is halved.

    The copy represents a state later in training, when a factor such as ASGD's ``mu`` has become smaller. Trial steps
    from it show whether a tensor's decay depends on such a factor.
    """
    halved = dict(state)
    for name, value in state.items():
        is_number = isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and 0.0 < float(value) <= 1.0:  # a count is larger after a few steps
            halved[name] = value / 2
    return halved


def _law(
    optimizer: Optimizer, group: Group, small: Tensor, runs: list[tuple[dict[str, Any], Tensor]], name: str
) -> _Law:
    left = []
    positive = True
    counters = set(runs[0][0])
    num_writes = set()
    for state, gradient in runs:
        after, writes = _stepped(optimizer, group, small, state, gradient)
        other, _ = _stepped(optimizer, group, small, {**state, name: state[name] + 1.0}, gradient)
        left.append(other[name] - after[name])
        positive = positive and bool((after[name] >= 0.0).all())
        counters &= {key for key in counters if _counts(state[key], after[key])}
        num_writes.add(writes[name])
    decay = torch.stack(left).min().item()
    if torch.stack(left).max().item() - decay > 1e-9 or not -1e-9 < decay < 1.0 + 1e-9:
        return _Law(positive=positive)
    counter = min(counters, default=None)
    return _Law(abs(round(decay, 9)), counter, num_writes.pop() if len(num_writes) == 1 else 0, positive)


def _counts(before: Any, after: Any) -> bool:
    """Return whether an entry of the state is a number that has grown by one, from ``before`` to ``after`` a step."""
    scalars = [value for value in (before, after) if isinstance(value, Tensor | int | float)]
    if len(scalars) < 2 or any(isinstance(value, Tensor) and value.numel() != 1 for value in scalars):
        return False
    return float(after) == float(before) + 1.0


def _stepped(
    optimizer: Optimizer, group: Group, small: Tensor, state: Mapping[str, Any], gradient: Tensor
) -> tuple[dict[str, Any], dict[str, int]]:
    """Take one trial step from ``state``; return the new state, and how often the step wrote to each state tensor.

    The step uses a copy of the parameter ``small``. The writes are counted by torch (a tensor's version counter).
    """
    twin = nn.Parameter(small.detach().clone())
    twin.grad = gradient.clone()
    stand_in = _stand_in(optimizer, group, twin)
    stand_in.state[twin] = copy.deepcopy(dict(state))
    tensors = {name: value for name, value in stand_in.state[twin].items() if isinstance(value, Tensor)}
    before = {name: tensor._version for name, tensor in tensors.items()}
    with _own_random_numbers(twin):
        type(optimizer).step(stand_in)
    return stand_in.state[twin], {name: tensor._version - before[name] for name, tensor in tensors.items()}


@contextmanager
def _own_random_numbers(param: Tensor) -> Iterator[None]:
    """Let random numbers come from a fixed seed in this context, on the CPU and on the device of ``param``.

    Trial steps of an optimizer then always draw the same numbers. The random numbers of training do not change.
    """
    with torch.random.fork_rng([param.device] if param.is_cuda else []):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed all GPUs, too
        if param.is_cuda:
            torch.cuda.default_generators[param.device.index].manual_seed(0)
        yield


def _kind(group: Group, param: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for all parameters that their optimizer treats alike."""
    return id(group), max(param.ndim, 1), param.dtype, param.device


def _small(param: Tensor) -> nn.Parameter:
    shape = (3,) if param.ndim < 2 else (3, 2, *(1 for _ in range(param.ndim - 2)))
    return nn.Parameter(torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape).to(param))


def _stand_in(optimizer: Optimizer, group: Group, param: nn.Parameter) -> Any:
    stand_in: Any = copy.copy(optimizer)
    vars(stand_in).pop("step", None)  # a learning-rate scheduler's wrapper, which is bound to the real optimizer
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**group, "params": [param]}]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(stand_in, name, OrderedDict())
    return stand_in
