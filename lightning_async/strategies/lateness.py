"""What the arguments of a parameter server say of pushes that are late: a policy, and a bound."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_async.arguments import check_int, check_real
from lightning_async.rules.staleness.adaptive_lr import AdaptiveLr
from lightning_async.rules.staleness.bounded import Bounded
from lightning_async.rules.staleness.buffered import Buffered
from lightning_async.rules.staleness.choose import make_policy
from lightning_async.rules.staleness.protocol import StalenessPolicy, Uncorrected

__all__ = ["ahead", "check_bound", "lateness"]

_SSP_BOUND = 3
_POLICIES = {
    "max_staleness": ("bounded",), "staleness_lr_factor": ("adaptive_lr",), "buffer_size": ("fedbuff", "rennala"),
}  # fmt: skip
"""Of each argument, the short names of policies that it is for."""


class Late(Protocol):
    """What a strategy has that was asked for so."""

    mode: Any
    update_on_server: bool
    max_staleness: int | None
    staleness_lr_factor: float | None
    buffer_size: int | None
    pull_every: int
    overlap: bool


def lateness(strategy: Late, staleness: str | StalenessPolicy) -> tuple[str | StalenessPolicy, int | None]:
    """The policy, with the arguments that are for it, and the bound of mode ``"ssp"``, None in other modes.

    ``"auto"`` stays so until the optimizer is known, where the server has one.

    Raises:
        TypeError, ValueError: there is no such policy, or an argument is out of range, or for another one.
    """
    for name in _POLICIES:
        if getattr(strategy, name) is not None:
            _check(strategy, name, staleness)
    bound = strategy.max_staleness
    if strategy.mode == "ssp":
        return _policy(strategy, staleness), _SSP_BOUND if bound is None else bound
    return _policy(strategy, staleness), None


def ahead(strategy: Late) -> int:
    """Pushes that a worker may be ahead of the slowest one, so that the weights which it computes at lack at most
    ``max_staleness`` of any worker's pushes, of as many as it has made itself: those that it makes before it has the
    next weights count. Who is slow lacks what faster ones are ahead, too: one more than so many, as they wait behind a
    push."""
    return (strategy.max_staleness or 0) - (strategy.pull_every - 1) - strategy.overlap


def check_bound(strategy: Late) -> None:
    """Raise ValueError where weights would be older than the bound of ``"ssp"`` whoever waits."""
    if strategy.mode == "ssp" and (over := -ahead(strategy)) > 0:
        owner, bound, every = type(strategy).__name__, strategy.max_staleness, strategy.pull_every
        raise ValueError(
            f"`{owner}(mode='ssp', max_staleness={bound}, pull_every={every}, overlap={strategy.overlap})`: before "
            f"newer weights come, a worker makes {every + strategy.overlap} pushes, so that its weights lack more than "
            f"{bound} of another's. Take `max_staleness={(bound or 0) + over}` or more, or pull more often."
        )


def _check(strategy: Late, name: str, staleness: str | StalenessPolicy) -> None:
    owner, value, policies = type(strategy).__name__, getattr(strategy, name), _POLICIES[name]
    if name == "staleness_lr_factor":
        check_real(strategy, name, above=0)
        if value > 1:
            raise ValueError(f"`{owner}({name}={value!r})` must be <= 1.")
    else:
        check_int(strategy, name, at_least=int(staleness in policies))
    of_mode, of_policy = name == "max_staleness" and strategy.mode == "ssp", staleness in policies
    wanted = " or ".join(f'`staleness="{policy}"`' for policy in policies)
    if of_mode and of_policy:
        raise ValueError(
            f"`{owner}(mode='ssp', staleness={staleness!r}, max_staleness={value})`: both have a bound. Pass "
            f"`staleness=Bounded(...)` of `lightning_async.rules.staleness` beside `max_staleness` of the mode."
        )
    if not of_mode and not of_policy:
        wanted = f'`mode="ssp"` or {wanted}' if name == "max_staleness" else wanted
        raise ValueError(
            f"`{owner}({name}={value!r}, mode={strategy.mode!r}, staleness={staleness!r})`: it is for {wanted}. Pass "
            "that, or leave it out; policies that are passed as such have arguments of their own."
        )


def _policy(strategy: Late, staleness: str | StalenessPolicy) -> str | StalenessPolicy:
    bound, factor, size = strategy.max_staleness, strategy.staleness_lr_factor, strategy.buffer_size
    if staleness == "auto":
        return staleness if strategy.update_on_server else Uncorrected()
    policy = make_policy(staleness)
    if not isinstance(staleness, str):
        return policy
    if isinstance(policy, Bounded) and bound is not None and strategy.mode != "ssp":
        return Bounded(bound)
    if isinstance(policy, AdaptiveLr) and factor is not None:
        return AdaptiveLr(factor)
    if isinstance(policy, Buffered) and size is not None:
        return Buffered(size, policy.policy)
    return policy
