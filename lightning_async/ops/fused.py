"""The flat ops on parameters and their state; what each one computes stands in its reference."""

from __future__ import annotations

from torch import Tensor

from lightning_async.ops import calls
from lightning_async.ops.checks import PARAMETERS
from lightning_async.ops.define import Arguments, fused
from lightning_async.ops.reference import averaging, outer, server

__all__ = ["accumulate_", "outer_merge_", "server_adam_", "server_add_", "server_dana_", "server_sgd_"]


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


def _server(name: str, arrays: list[Tensor], reply: Tensor | None, scalars: list[float], whole: int) -> None:
    calls.flat(name if reply is None else f"{name}_reply", [*arrays, *_present(reply)], scalars, whole)


def _server_add(
    params: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    gradient: Tensor,
    weight: float,
    decay: float,
    whole: int,
) -> None:
    _server("server_add", [gradient, old_params, params], reply, [weight, -decay], whole)


def _server_sgd(
    params: Tensor,
    momentum: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_momentum: Tensor,
    gradient: Tensor,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float,
    weight_decay: float,
    whole: int,
) -> None:
    arrays = [gradient, old_params, old_momentum, params, momentum]
    _server("server_sgd", arrays, reply, [lr, mu, float(nesterov), scale, weight_decay], whole)


def _server_dana(
    params: Tensor,
    momentum: Tensor,
    total: Tensor,
    ahead: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_momentum: Tensor,
    old_total: Tensor,
    gradient: Tensor,
    lr: float,
    mu: float,
    scale: float,
    whole: int,
) -> None:
    arrays = [gradient, old_params, old_momentum, old_total, params, momentum, total, ahead]
    _server("server_dana", arrays, reply, [lr, mu, lr * mu, scale], whole)


def _server_adam(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_first: Tensor,
    old_second: Tensor,
    gradient: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    weight_decay: float,
    decoupled: bool,
    whole: int,
) -> None:
    size, rest1, rest2, root = server.adam_scalars(step, lr, beta1, beta2)
    arrays = [gradient, old_params, old_first, old_second, params, first, second]
    scalars = [size, beta1, rest1, beta2, rest2, root, eps, scale, *server.decay_scalars(lr, weight_decay, decoupled)]
    _server("server_adam", arrays, reply, scalars, whole)


def _check_step(op: str, given: Arguments) -> None:
    if given["step"] < 1:
        raise ValueError(f"`{op}(step={given['step']})` counts from 1.")


_GRADIENT = {"gradient": PARAMETERS}
server_add_ = fused(
    server.server_add_,
    "(Tensor(a!) params, Tensor(b!)? reply, Tensor old_params, Tensor gradient, float weight, float decay=0.0, "
    "int whole=0) -> ()",
    _server_add,
    dtypes=_GRADIENT,
)
server_sgd_ = fused(
    server.server_sgd_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!)? reply, Tensor old_params, Tensor old_momentum, "
    "Tensor gradient, float lr, float mu, bool nesterov, float scale=1.0, float weight_decay=0.0, "
    "int whole=0) -> ()",
    _server_sgd,
    dtypes=_GRADIENT,
)
server_dana_ = fused(
    server.server_dana_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!) total, Tensor(d!) ahead, Tensor(e!)? reply, "
    "Tensor old_params, Tensor old_momentum, Tensor old_total, Tensor gradient, float lr, float mu, float scale=1.0, "
    "int whole=0) -> ()",
    _server_dana,
    dtypes=_GRADIENT,
)
server_adam_ = fused(
    server.server_adam_,
    "(Tensor(a!) params, Tensor(b!) first, Tensor(c!) second, Tensor(d!)? reply, Tensor old_params, Tensor old_first, "
    "Tensor old_second, Tensor gradient, int step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
    "float scale=1.0, float weight_decay=0.0, bool decoupled=False, int whole=0) -> ()",
    _server_adam,
    dtypes=_GRADIENT,
    check=_check_step,
)
