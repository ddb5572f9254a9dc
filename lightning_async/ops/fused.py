"""The flat ops on parameters and their state; what each one computes stands in its reference."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_async.ops import calls
from lightning_async.ops.checks import PARAMETERS
from lightning_async.ops.define import Arguments, fused, num_peers, pair_like, scalar_like
from lightning_async.ops.reference import averaging, outer, server

__all__ = [
    "accumulate_", "delta_merge_", "delta_merge_norm_", "elastic_", "lerp_norm_", "mean_and_spread_",
    "nesterov_merge_", "outer_merge_", "outer_nesterov_", "server_adam_", "server_dana_", "server_sgd_",
    "slowmo_merge_",
]  # fmt: skip


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


# Averaging


def _delta(params: Tensor, mean: Tensor, snapshot: Tensor, renew: bool, norms: bool) -> Tensor | None:
    return calls.flat("move_snapshot" if renew else "move", [params, mean, snapshot], norms=norms)


def _lerp(params: Tensor, target: Tensor, weight: float) -> Tensor:
    sums = calls.flat("lerp", [params, target], [weight], norms=True)
    assert sums is not None
    return sums[0].clone()


def _check_replicas(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    out, replicas = given["out"], given["replicas"]
    peers = num_peers(op, replicas)
    return {"out": (out.numel(),), "replicas": (peers, out.numel()), "weights": (peers,)}


def _spread(out: Tensor, replicas: Tensor, weights: Tensor) -> Tensor:
    total = calls.average(replicas, None, weights, out.numel(), out=out, spread=True)
    assert total is not None
    return total


_PARAMS = {"params": PARAMETERS}
_DELTA = "(Tensor(a!) params, Tensor mean, Tensor(b!) snapshot, bool renew=False)"
delta_merge_ = fused(
    averaging.delta_merge_, f"{_DELTA} -> ()", lambda **given: _delta(**given, norms=False) and None, dtypes=_PARAMS
)
delta_merge_norm_ = fused(
    averaging.delta_merge_norm_,
    f"{_DELTA} -> Tensor",
    functools.partial(_delta, norms=True),
    dtypes=_PARAMS,
    fake=pair_like,
)
lerp_norm_ = fused(
    averaging.lerp_norm_,
    "(Tensor(a!) params, Tensor target, float weight) -> Tensor",
    _lerp,
    dtypes=_PARAMS,
    fake=scalar_like,
)
accumulate_ = fused(
    averaging.accumulate_,
    "(Tensor(a!) total, Tensor source, float weight) -> ()",
    lambda total, source, weight: calls.flat("accumulate", [source, total], [weight]),
    dtypes={"source": PARAMETERS},
)
elastic_ = fused(
    averaging.elastic_,
    "(Tensor(a!) params, Tensor(b!) center, float alpha) -> ()",
    lambda params, center, alpha: calls.flat("elastic", [params, center], [alpha]),
    dtypes=_PARAMS,
)
mean_and_spread_ = fused(
    averaging.mean_and_spread_,
    "(Tensor(a!) out, Tensor replicas, Tensor weights) -> Tensor",
    _spread,
    check=_check_replicas,
    fake=scalar_like,
)

# Outer optimizers: lr, mu, factor of the gradient, nesterov


def _outer(
    params: Tensor,
    mean: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    snapshot: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float = 1.0,
) -> None:
    name = "outer" if snapshot is None else "outer_overlapped"
    calls.flat(name, _present(params, mean, anchor, momentum, snapshot), [lr, mu, scale, float(nesterov)])


def _slowmo(*, inner_lr: float, outer_lr: float, beta: float, **tensors: Any) -> None:
    _outer(**tensors, lr=outer_lr * inner_lr, mu=beta, nesterov=False, scale=1.0 / inner_lr)


def _check_inner_lr(op: str, given: Arguments) -> None:
    if not given["inner_lr"] > 0:
        raise ValueError(f"`{op}(inner_lr={given['inner_lr']})` must be positive.")


def _outer_step(
    anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, lr: float, mu: float, nesterov: bool
) -> None:
    calls.flat("outer_step", [pseudo_gradient, anchor, momentum], [lr, mu, 1.0, float(nesterov)])


def _outer_merge(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    name = "outer_merge" if sent is None else "outer_merge_sent"
    calls.flat(name, _present(received, anchor, momentum, sent), [lr, mu, 1.0, float(nesterov)])


_MERGE = "(Tensor(a!) params, Tensor mean, Tensor(b!) anchor, Tensor(c!) momentum, Tensor? snapshot"
outer_nesterov_ = fused(
    outer.outer_nesterov_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor pseudo_gradient, float lr, float mu, bool nesterov) -> ()",
    _outer_step,
)
outer_merge_ = fused(
    outer.outer_merge_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor(c!) received, Tensor(d!)? sent, float lr, float mu, "
    "bool nesterov) -> ()",
    _outer_merge,
)
nesterov_merge_ = fused(
    outer.nesterov_merge_, f"{_MERGE}, float lr, float mu, bool nesterov=True) -> ()", _outer, dtypes=_PARAMS
)
slowmo_merge_ = fused(
    outer.slowmo_merge_,
    f"{_MERGE}, float inner_lr, float outer_lr, float beta) -> ()",
    _slowmo,
    dtypes=_PARAMS,
    check=_check_inner_lr,
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
    _server("server_sgd", [gradient, params, momentum], backup, [lr, mu, 1.0, float(nesterov), scale, delay])


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
