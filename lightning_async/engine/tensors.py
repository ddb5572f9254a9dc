"""Which tensors a replica's module holds, and what becomes of each kind when replicas meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_async.engine.digest import is_finite, real
from lightning_async.engine.running_means import RunningMean
from lightning_async.errors import AsyncTrainingError
from lightning_async.flat import FlatLayout

__all__ = ["BufferPolicy", "ModuleTensors", "alike", "describe", "same", "with_statistics"]

BufferPolicy = Literal["average", "keep", "broadcast", "recompute"]
_KINDS = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    }
)  # fmt: skip


class ModuleTensors:
    """The parameters and buffers of a module, by name, as they are now.

    Args:
        module: shared tensors count once.
        policy: what happens to floating-point buffers.

    Raises:
        ValueError: an unknown policy, tensors that are not materialised yet (lazy modules), or of a kind that can be
            neither averaged nor compared; names them.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicy) -> None:
        if policy not in get_args(BufferPolicy):
            raise ValueError(f"`buffers={policy!r}` must be one of {get_args(BufferPolicy)}.")
        _check_materialised(module)
        _check_kinds(module, policy)
        self._module, self._policy = module, policy
        self.parameters, self._buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._layers = _with_running_means(module)
        self._shapes = {name: p.shape for name, p in self.parameters.items()}
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        """What the rule applies to."""
        self._infinite: frozenset[str] = frozenset()

    @property
    def averaged(self) -> dict[str, Tensor]:
        """The buffers that take the mean."""
        return {name: b for name, b in self._buffers.items() if self._takes_mean(b)}

    def running_means(self) -> list[RunningMean]:
        """How each of `averaged` averages over time, with the number of its updates as it is now."""
        found: dict[int, RunningMean] = {}
        for layer in self._layers:
            for buffer, positive in ((layer.running_mean, False), (layer.running_var, True)):
                if buffer is not None:
                    found[id(buffer)] = _running_mean(layer, buffer, positive)
        return [found.get(id(buffer), RunningMean()) for buffer in self.averaged.values()]

    def _takes_mean(self, buffer: Tensor) -> bool:
        return self._policy != "keep" and (buffer.is_floating_point() or buffer.is_complex())

    @property
    def apart(self) -> dict[str, Tensor]:
        """What moves at a consensus only, in its own precision: frozen parameters, integers, and what is float64."""
        frozen = {name: p for name, p in self.parameters.items() if name not in self.trained}
        counters = {n: b for n, b in self._buffers.items() if not (b.is_floating_point() or b.is_complex())}
        wide = {n: t for n, t in {**self.trained, **self.averaged}.items() if real(t).dtype is torch.float64}
        return {name: real(t) for name, t in {**frozen, **counters, **wide}.items()}

    @torch.no_grad()
    def set_apart(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite some of what stands `apart`."""
        mine = self.apart if values else {}
        for name, value in values.items():
            mine[name].copy_(value)

    def follow_buffers(self) -> bool:
        """Take up buffers that were assigned anew; whether there were any.

        Raises:
            AsyncTrainingError: one has another shape or type than before, or buffers were added or removed.
        """
        known, now = self._buffers, dict(self._module.named_buffers())
        if known.keys() == now.keys() and same(known.values(), now.values()):
            return False
        wrong = [name for name in {**known, **now} if not self._fits(known.get(name), now.get(name))]
        if wrong:
            keep = "" if self._policy == "keep" else ', or pass `buffers="keep"` if they are floating-point ones'
            raise AsyncTrainingError(
                f"Buffers {wrong} were added or removed, or changed their shape or type, after training began, so "
                f"replicas cannot be compared. Register them in `__init__` with the shape that they keep{keep}."
            )
        odd = [name for name, b in now.items() if b is not known.get(name) and _is_odd(b) and self._policy != "keep"]
        if odd:
            raise AsyncTrainingError(
                f"Buffers {odd} were assigned tensors that cannot be written in place (expanded, sparse, conjugated, "
                "or made in inference mode). Assign a copy: `self.name = tensor.clone()`."
            )
        self._buffers = {name: now[name] for name in (*known, *now) if name in now}  # as they lie in the bucket
        return True

    def _fits(self, before: Tensor | None, now: Tensor | None) -> bool:
        if before is not None and now is not None and alike(before, now):
            return True
        present = [b for b in (before, now) if b is not None]
        return self._policy == "keep" and all(b.is_floating_point() for b in present)

    def check_unchanged(self, thawed_too: bool = True) -> None:
        """Whether the module still has the parameters that it had when training began.

        Raises:
            AsyncTrainingError: parameters were added, removed, replaced or resized, or (``thawed_too``) frozen ones are
                trained now.
        """
        now = dict(self._module.named_parameters())
        changed = [n for n in {**now, **self.parameters} if now.get(n) is not self.parameters.get(n)]
        changed += [n for n, p in now.items() if n not in changed and p.shape != self._shapes[n]]
        if changed:
            raise AsyncTrainingError(
                f"Parameters {changed} were added, removed, replaced or resized after training began, so they are not "
                "averaged. Create all parameters in `__init__`, `configure_model` or `setup`."
            )
        if thawed_too and (thawed := self.thawed()):
            raise AsyncTrainingError(
                f"Parameters {thawed} were frozen at the last gate, so they are not averaged, and require gradients "
                "now. Unfreeze parameters where an epoch starts (`on_train_epoch_start`), on all ranks alike."
            )

    def thawed(self) -> list[str]:
        """Parameters that were frozen at the last gate and are trained now."""
        return [name for name, p in self.parameters.items() if p.requires_grad and name not in self.trained]

    def take_thawed(self) -> None:
        """Train them from now on, with the others."""
        names = {*self.trained, *self.thawed()}
        self.trained = {name: p for name, p in self.parameters.items() if name in names}

    @property
    def _frozen(self) -> dict[str, Tensor]:
        real_ones = {n: p for n, p in self.parameters.items() if p.is_floating_point() or p.is_complex()}
        return {n: p for n, p in real_ones.items() if n not in self.trained and p.dtype in _KINDS}

    def accept_infinite(self) -> None:
        """All replicas agree: infinite elements that a buffer or a frozen parameter has now (a mask) are meant."""
        fp32 = {name: b.float() if b.dtype is torch.float64 else b for name, b in self.averaged.items()}
        self._infinite = frozenset(name for name, t in {**fp32, **self._frozen}.items() if not is_finite([t]))

    @property
    def judged_frozen(self) -> list[Tensor]:
        """The frozen parameters that must be finite."""
        return [p for name, p in self._frozen.items() if name not in self._infinite]

    @property
    def judged(self) -> list[bool]:
        """For each of `averaged` whether it must be finite."""
        return [name not in self._infinite for name in self.averaged]


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Whether both hold the same objects, in the same order."""
    return [id(each) for each in left] == [id(each) for each in right]


def alike(left: Tensor, right: Tensor) -> bool:
    """Whether one tensor can stand in the other's place."""
    return left.shape == right.shape and left.dtype == right.dtype and left.device == right.device


def with_statistics(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def _with_running_means(module: nn.Module) -> list[_BatchNorm | _InstanceNorm]:
    """Return the layers of which it is known how their statistics average over time."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm | _InstanceNorm)]
    return [layer for layer in layers if layer.track_running_stats]


def _running_mean(layer: _BatchNorm | _InstanceNorm, buffer: Tensor, positive: bool) -> RunningMean:
    """Return how a statistic of a layer averages over time."""
    if isinstance(layer, _InstanceNorm):
        # It does not count its updates; torch counts the writes to the buffer, one for each.
        return RunningMean(1.0 - (layer.momentum or 0.0), float(buffer._version), positive=positive)
    if layer.num_batches_tracked is None:
        return RunningMean(positive=positive)
    decay = None if layer.momentum is None else 1.0 - layer.momentum
    return RunningMean(decay, layer.num_batches_tracked, positive=positive)


def _check_kinds(module: nn.Module, policy: BufferPolicy) -> None:
    """Refuse what can be neither averaged, by mean or maximum, nor compared."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    sparse = [n for n, t in tensors if _is_odd(t)]
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    kept = [name for name, b in module.named_buffers() if b.is_floating_point() and policy == "keep"]
    odd = [f"{n} ({t.dtype})" for n, t in tensors if t.dtype not in _KINDS and n not in {*sparse, *frozen, *kept}]
    if sparse or odd:
        raise ValueError(
            f"{[*sparse, *odd]}: a replica holds dense tensors of real, complex, integer or bool numbers; sparse, "
            "quantised, expanded, lazily conjugated and 8-bit floating ones can be neither averaged nor compared. Keep "
            "them as plain attributes of the module, or convert them."
        )


def _is_odd(t: Tensor) -> bool:
    """Whether its elements cannot all be written in place."""
    if t.layout is not torch.strided or t.is_quantized or t.is_conj() or t.is_neg() or t.is_inference():
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True))


def _check_materialised(module: nn.Module) -> None:
    """Refuse lazy parameters and buffers: without a shape they can be neither compared nor averaged."""
    lazy = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))
    ]
    if lazy:
        raise ValueError(
            f"{lazy} are lazy: they have no shape yet, so replicas cannot be compared or averaged. Run one batch "
            "through the module in `configure_model` or `setup` to materialise them."
        )


def describe(module: nn.Module) -> list[str]:
    """One line per parameter and buffer, frozen ones included; equal on replicas of one model."""
    _check_materialised(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    lines = FlatLayout([t for _, t in named], [n for n, _ in named]).describe()
    return [
        f"{line}, {'trained' if t.requires_grad else 'not trained'}" for line, (_, t) in zip(lines, named, strict=True)
    ]
