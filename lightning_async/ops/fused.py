"""The flat ops on parameters and their state; what each one computes stands in its reference."""

from __future__ import annotations

from torch import Tensor

from lightning_async.ops import calls
from lightning_async.ops.checks import PARAMETERS
from lightning_async.ops.define import Arguments, fused
from lightning_async.ops.reference import averaging, outer, server

__all__ = ["accumulate_", "outer_merge_", "server_adam_", "server_dana_", "server_sgd_"]


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


accumulate_ = fused(
    averaging.accumulate_,
    "(Tensor(a!) total, Tensor source, float weight) -> ()",
    lambda total, source, weight: calls.flat("accumulate", [source, total], [weight]),
    dtypes={"source": PARAMETERS},
)


def _outer_merge(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    name = "outer_merge" if sent is None else "outer_merge_sent"
    calls.flat(name, _present(received, anchor, momentum, sent), [lr, mu, float(nesterov)])


outer_merge_ = fused(
    outer.outer_merge_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor(c!) received, Tensor(d!)? sent, float lr, float mu, "
    "bool nesterov) -> ()",
    _outer_merge,
)

# Server


def _server(name: str, arrays: list[Tensor], backup: Tensor | None, scalars: list[float]) -> None:
    calls.flat(name if backup is None else f"{name}_delay", [*arrays, *_present(backup)], scalars)


def _server_sgd(
    params: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float,
    delay: float,
) -> None:
    _server("server_sgd", [gradient, params, momentum], backup, [lr, mu, float(nesterov), scale, delay])


def _server_dana(
    params: Tensor,
    momentum: Tensor,
    total: Tensor,
    ahead: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    scale: float,
    delay: float,
) -> None:
    _server("server_dana", [gradient, params, momentum, total, ahead], backup, [lr, mu, lr * mu, 0.0, scale, delay])


def _server_adam(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    delay: float,
) -> None:
    size, rest1, rest2, root = server.adam_scalars(step, lr, beta1, beta2)
    scalars = [size, beta1, rest1, beta2, scale, delay, rest2, root, eps]
    _server("server_adam", [gradient, params, first, second], backup, scalars)


def _check_step(op: str, given: Arguments) -> None:
    if given["step"] < 1:
        raise ValueError(f"`{op}(step={given['step']})` counts from 1.")


_GRADIENT, _STALE = {"gradient": PARAMETERS}, "float scale=1.0, float delay=0.0) -> ()"
server_sgd_ = fused(
    server.server_sgd_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor gradient, Tensor? backup, float lr, float mu, bool nesterov, "
    + _STALE,
    _server_sgd,
    dtypes=_GRADIENT,
)
server_dana_ = fused(
    server.server_dana_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!) total, Tensor(d!) ahead, Tensor gradient, Tensor? backup, "
    "float lr, float mu, " + _STALE,
    _server_dana,
    dtypes=_GRADIENT,
)
server_adam_ = fused(
    server.server_adam_,
    "(Tensor(a!) params, Tensor(b!) first, Tensor(c!) second, Tensor gradient, Tensor? backup, int step, float lr, "
    "float beta1=0.9, float beta2=0.999, float eps=1e-08, " + _STALE,
    _server_adam,
    dtypes=_GRADIENT,
    check=_check_step,
)
