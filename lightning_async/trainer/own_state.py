"""What is a replica's own, and not the run's: taken while it trains, and put back over what another rank has given it.

| a replica's own | where |
| --- | --- |
| random states of Python, NumPy, torch and its devices | always |
| the optimizers' state of each parameter | replicas drift, and the policy is ``optimizer_state="keep"`` |
| the scale of gradients in fp16 | replicas drift |
| floating-point buffers | replicas drift, and the policy is ``buffers="keep"`` |

Of workers of servers it is, too, where optimizers are not the servers'.

The run's are weights, rule, options of optimizers (learning rates among them), schedulers, callbacks and loops.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async.data.random_states import Generators

__all__ = ["put", "take"]


def take(trainer: Any) -> dict[str, Any]:
    """Behind a step: plain values, and tensors by reference."""
    strategy = trainer.strategy
    own: dict[str, Any] = {"random": _generators(trainer).take()}
    if strategy.served and strategy.update_on_server:
        return own
    if strategy.averager.ledger.synchronous and not strategy.served:
        return own
    module = trainer.lightning_module
    if strategy.optimizer_state_policy == "keep":
        own["optimizers"] = [_by_name(optimizer, _names(module)) for optimizer in strategy.optimizers]
    if strategy.buffers == "keep":
        own["buffers"] = _buffers(module)
    if scaler := trainer.precision_plugin.state_dict():
        own["scaler"] = scaler
    return own


def put(trainer: Any, own: dict[str, Any]) -> list[str]:
    """Put it in the place of another rank's; in words, what there was of it. What does not fit is left as it is."""
    strategy, module = trainer.strategy, trainer.lightning_module
    done: list[str] = []
    if "optimizers" in own and strategy.optimizer_state_policy == "keep":
        count = _put_optimizers(strategy.optimizers, own["optimizers"], _names(module))
        done.append(f"optimizer state of {count} parameters")
    if "buffers" in own and strategy.buffers == "keep":
        mine, count = _buffers(module), 0
        with torch.no_grad():
            for name, value in own["buffers"].items():
                if name in mine and _alike(mine[name], value):
                    mine[name].copy_(value)
                    count += 1
        done.append(f"{count} buffers")
    if "scaler" in own:
        trainer.precision_plugin.load_state_dict(own["scaler"])
        done.append("the scale of gradients")
    _generators(trainer).put(own["random"])
    return [*done, "random states"]


def _generators(trainer: Any) -> Generators:
    return Generators(devices=trainer.strategy.root_device.type == "cuda")


def _names(module: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _buffers(module: Any) -> dict[str, Tensor]:
    return {n: b.detach() for n, b in module.named_buffers() if b.is_floating_point() or b.is_complex()}


def _numbered(optimizer: Optimizer, state: dict[str, Any], names: dict[int, str]) -> dict[Any, str]:
    """What the parameters are called that a state numbers; those that are not the module's are left out."""
    found = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if id(parameter) in names:
                found[number] = names[id(parameter)]
    return found


def _by_name(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """An optimizer's state of each parameter, by its name: groups may come and go."""
    state = optimizer.state_dict()
    called = _numbered(optimizer, state, names)
    return {called[number]: each for number, each in state["state"].items() if number in called}


def _put_optimizers(optimizers: list[Optimizer], own: list[dict[str, Any]], names: dict[int, str]) -> int:
    """For how many parameters; all optimizers, or none."""
    count, before = 0, [copy.copy(optimizer.state_dict()) for optimizer in optimizers]
    try:
        for optimizer, state, mine in zip(optimizers, before, own, strict=True):
            called = _numbered(optimizer, state, names)
            fits = {n: mine[name] for n, name in called.items() if _fits(state["state"].get(n), mine.get(name))}
            optimizer.load_state_dict({**state, "state": {**state["state"], **fits}})
            count += len(fits)
    except BaseException:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(state)
        raise
    return count


def _fits(theirs: Any, mine: Any) -> bool:
    """Whether this state is one of the same parameter, of the same optimizer."""
    if mine is None or theirs is None or not isinstance(mine, dict) or mine.keys() != theirs.keys():
        return False
    return all(_alike(theirs[name], value) for name, value in mine.items() if isinstance(value, Tensor))


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
