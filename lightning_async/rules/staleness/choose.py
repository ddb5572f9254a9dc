"""Policies by name, by what suits an optimizer, and in JSON's terms, as a server's process is told."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_async.rules.staleness.adaptive_lr import AdaptiveLr
from lightning_async.rules.staleness.bounded import Bounded
from lightning_async.rules.staleness.buffered import Buffered
from lightning_async.rules.staleness.clipping import Clipping
from lightning_async.rules.staleness.dana import Dana
from lightning_async.rules.staleness.delay_compensation import AdaptiveDelayCompensation, DelayCompensation
from lightning_async.rules.staleness.gap_aware import GapAware
from lightning_async.rules.staleness.protocol import StalenessPolicy, Uncorrected
from lightning_async.rules.staleness.weight_prediction import WeightPrediction

__all__ = ["AUTO", "NAMES", "auto", "described", "make_policy", "momentum_warning"]

AUTO = "auto"
NAMES: dict[str, Callable[[], StalenessPolicy]] = {
    "none": Uncorrected,
    "adaptive_lr": AdaptiveLr,
    "bounded": lambda: Bounded(16),
    "delay_compensation": DelayCompensation,
    "adaptive_delay_compensation": AdaptiveDelayCompensation,
    "gap_aware": GapAware,
    "dana": Dana,
    "dana_gap_aware": lambda: Dana(GapAware("gradient")),
    "fedbuff": lambda: Buffered(10, AdaptiveLr(form="sqrt")),
    "rennala": lambda: Buffered(10, Bounded(1)),
    "weight_prediction": WeightPrediction,
    "clipping": Clipping,
}
"""Short names, with each policy's defaults."""
_OWN: tuple[type[StalenessPolicy], ...] = (
    Uncorrected, AdaptiveLr, Bounded, DelayCompensation, AdaptiveDelayCompensation, GapAware, Dana, Buffered,
    WeightPrediction, Clipping,
)  # fmt: skip
_CLASSES = {cls.__name__: cls for cls in _OWN}


def auto(optimizer: str, arguments: Mapping[str, Any] | None = None) -> StalenessPolicy:
    """The policy that suits an optimizer: DANA with gap-awareness for SGD with momentum, gap-aware rates for others.

    Args:
        optimizer: the name of its class, or ``"delta"``.
        arguments: of its constructor. Default: none.

    >>> auto("SGD", {"lr": 0.1, "momentum": 0.9})
    Dana(policy=GapAware(scales='gradient', decay=0.99))
    >>> auto("Adam")
    GapAware(scales='rate', decay=0.99)
    """
    given = arguments or {}
    if optimizer == "SGD" and given.get("momentum") and not given.get("dampening"):
        return Dana(GapAware("gradient"))
    return GapAware("rate")


def momentum_warning(policy: StalenessPolicy, optimizer: str, arguments: Mapping[str, Any] | None = None) -> str | None:
    """What to say of momentum whose staleness nothing is done about; None: nothing.

    Args:
        policy: of the server.
        optimizer, arguments: as of `auto`.

    >>> momentum_warning(Uncorrected(), "SGD", {"momentum": 0.9})
    "`SGD(momentum=0.9)` with `staleness='none'`: ..."
    """
    momentum = (arguments or {}).get("momentum")
    if not momentum or type(policy) is not Uncorrected:
        return None
    return (
        f"`{optimizer}(momentum={momentum!r})` with `staleness='none'`: late gradients go on in the momentum, so that "
        "training with several workers is slower, or diverges. Take `staleness='auto'`, or no momentum."
    )


def make_policy(
    policy: str | StalenessPolicy | Mapping[str, Any],
    optimizer: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> StalenessPolicy:
    """A policy by its short name, as it is, or from what `described` says of it.

    Args:
        policy: one of `NAMES` or ``"auto"``, a policy, or a description.
        optimizer, arguments: what ``"auto"`` is for, see `auto`; the others need none.

    Raises:
        ValueError: there is none of this name.
        TypeError: it is none of these, or its arguments are wrong.

    >>> make_policy("fedbuff").buffer_size
    10
    >>> make_policy(described(Dana(GapAware("gradient"))))
    Dana(policy=GapAware(scales='gradient', decay=0.99))
    """
    if isinstance(policy, StalenessPolicy):
        return policy
    if isinstance(policy, Mapping):
        return _from_description(policy)
    if not isinstance(policy, str):
        raise TypeError(f"`staleness={policy!r}` must be a name, or a policy that extends `StalenessPolicy`.")
    if policy == AUTO and optimizer is not None:
        return auto(optimizer, arguments)
    if policy not in NAMES:
        raise ValueError(f"`staleness={policy!r}` must be a policy, or one of {(AUTO, *NAMES)}.")
    return NAMES[policy]()


def described(policy: StalenessPolicy) -> dict[str, Any]:
    """A policy in JSON's terms: its class and its arguments.

    Raises:
        TypeError: another process could not make it of that.

    >>> described(Bounded(8))
    {'policy': 'Bounded', 'arguments': {'max_staleness': 8}}
    """
    cls = type(policy)
    name = cls.__name__ if _CLASSES.get(cls.__name__) is cls else f"{cls.__module__}:{cls.__qualname__}"
    if not is_dataclass(policy) or cls.__module__ == "__main__" or "<locals>" in name:
        raise TypeError(
            f"`staleness={policy!r}` must be a frozen dataclass of a module that a server's process can import, which "
            f"{cls.__module__}:{cls.__qualname__} is not."
        )
    given = {field.name: getattr(policy, field.name) for field in fields(policy)}
    plain = {key: described(each) if isinstance(each, StalenessPolicy) else each for key, each in given.items()}
    try:
        told = {"policy": name, "arguments": json.loads(json.dumps(plain))}
        same = _from_description(told) == policy
    except (TypeError, ValueError) as error:
        raise TypeError(f"`staleness={policy!r}` has arguments that JSON does not hold: {error}.") from error
    if not same:
        raise TypeError(f"`staleness={policy!r}` is not what it was when made of its arguments in JSON's terms.")
    return told


def _from_description(told: Mapping[str, Any]) -> StalenessPolicy:
    name, given = told["policy"], told["arguments"]
    cls: Any = _CLASSES.get(name)
    if cls is None:
        module, _, path = name.partition(":")
        cls = importlib.import_module(module)
        for part in path.split("."):
            cls = getattr(cls, part)
        if not (isinstance(cls, type) and issubclass(cls, StalenessPolicy)):
            raise TypeError(f"{name} is no class that extends `StalenessPolicy`.")
    described_ = {key: isinstance(each, Mapping) and "policy" in each for key, each in given.items()}
    return cls(**{key: _from_description(each) if described_[key] else each for key, each in given.items()})
