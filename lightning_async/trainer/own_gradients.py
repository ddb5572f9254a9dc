"""Whether a program has a say in its gradients after the backward pass."""

from __future__ import annotations

from typing import Any

from lightning_async.trainer.namespace import pytorch

__all__ = ["changes_gradients"]


def changes_gradients(module: Any, until_step: bool = False) -> bool:
    """Whether a hook of the module's, or of a callback, may change gradients behind the backward pass, in a way that
    leaves no trace (``p.grad.data``): these can only leave when it is over.

    Args:
        until_step: or later, before the optimizer's step. Default: by the end of the pass.
    """
    is_overridden = pytorch("utilities.model_helpers").is_overridden
    hooks = ("on_after_backward", *(("on_before_optimizer_step",) if until_step else ()))
    own = ("backward", *(("optimizer_step", "configure_gradient_clipping") if until_step else ()))
    return any(is_overridden(name, module) for name in own) or any(
        is_overridden(name, each) for name in hooks for each in (module, *module.trainer.callbacks)
    )
