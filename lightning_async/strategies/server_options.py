"""What a parameter server can be asked for: its modes, and settings that contradict each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, get_args

from lightning_async._checks import check_choice, check_int, check_real
from lightning_async.algorithms.staleness import (
    AdaptiveLr,
    Bounded,
    Buffered,
    NoCorrection,
    StalenessPolicy,
    make_policy,
)
from lightning_async.checkpoint.storage import files_at
from lightning_async.comm.p2p_gloo import places_of
from lightning_async.trainer.configuration_checks import LrClock

if TYPE_CHECKING:
    from lightning_async.strategies.parameter_server import ParameterServerStrategy

_SSP_BOUND = 3
_POLICIES = {
    "max_staleness": ("bounded",), "staleness_lr_factor": ("adaptive_lr",), "buffer_size": ("fedbuff", "rennala"),
}  # fmt: skip
"""Of each argument, the short names of policies that it is for."""


def resolve_staleness(
    strategy: ParameterServerStrategy, staleness: str | StalenessPolicy
) -> tuple[str | StalenessPolicy, int | None]:
    """Return the policy, with the arguments that are for it, and the bound of mode ``"ssp"``, None in other modes.

    ``"auto"`` stays so until the optimizer is known, where the server has one.

    Raises:
        TypeError, ValueError: there is no such policy, or an argument is out of range, or for another one.
    """
    for name in _POLICIES:
        if getattr(strategy, name) is not None:
            _check(strategy, name, staleness)
    policy = _policy(strategy, staleness)
    if strategy.mode != "ssp":
        return policy, None
    return policy, _SSP_BOUND if strategy.max_staleness is None else strategy.max_staleness


def ahead(strategy: ParameterServerStrategy) -> int:
    """Return how many pushes a worker may be ahead of the slowest one.

    The weights that it computes at then lack at most ``max_staleness`` of any worker's pushes: the pushes that it makes
    before it has the next weights count.
    """
    return (strategy.max_staleness or 0) - (strategy.pull_every - 1) - strategy.overlap


def _check(strategy: ParameterServerStrategy, name: str, staleness: str | StalenessPolicy) -> None:
    owner = type(strategy).__name__
    value = getattr(strategy, name)
    policies = _POLICIES[name]
    if name == "staleness_lr_factor":
        check_real(strategy, name, above=0)
        if value > 1:
            raise ValueError(f"`{owner}({name}={value!r})` must be <= 1.")
    else:
        check_int(strategy, name, at_least=int(staleness in policies))
    of_mode = name == "max_staleness" and strategy.mode == "ssp"
    of_policy = staleness in policies
    wanted = " or ".join(f'`staleness="{policy}"`' for policy in policies)
    if of_mode and of_policy:
        raise ValueError(
            f"`{owner}(mode='ssp', staleness={staleness!r}, max_staleness={value})`: both have a bound. Pass "
            f"`staleness=Bounded(...)` of `lightning_async.algorithms` beside `max_staleness` of the mode."
        )
    if not of_mode and not of_policy:
        wanted = f'`mode="ssp"` or {wanted}' if name == "max_staleness" else wanted
        raise ValueError(
            f"`{owner}({name}={value!r}, mode={strategy.mode!r}, staleness={staleness!r})`: it is for {wanted}. Pass "
            "that, or leave it out; policies that are passed as such have arguments of their own."
        )


def _policy(strategy: ParameterServerStrategy, staleness: str | StalenessPolicy) -> str | StalenessPolicy:
    bound = strategy.max_staleness
    factor = strategy.staleness_lr_factor
    size = strategy.buffer_size
    if staleness == "auto":
        return staleness if strategy.update_on_server else NoCorrection()
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


Mode = Literal["async", "sync", "ssp"]
_ALIASES: dict[str, Mode] = {
    "dist": "sync", "dist_async": "async", "dist_async_device": "async", "dist_device_async": "async",
    "dist_sync": "sync", "dist_sync_device": "sync", "dist_device_sync": "sync",
}  # fmt: skip
"""MXNet's names."""
_ALIKE = (
    "mode", "num_servers", "server_address", "update_on_server", "overlap", "max_staleness", "staleness", "lr_clock",
    "warmup_steps", "update_frequency", "pull_every", "compression", "consistent_pull", "bigarray_bound",
    "snapshot_every",
)  # fmt: skip
"""What must be equal on all ranks."""


def folder_of(owner: str, snapshots: str | os.PathLike[str] | None) -> str | None:
    """Return the absolute path, or the URL, of the folder of snapshots."""
    if snapshots is None:
        return None
    if not isinstance(snapshots, str | os.PathLike) or not isinstance(os.fspath(snapshots), str):
        kind = type(snapshots).__name__
        raise TypeError(f"`{owner}(snapshots={snapshots!r})` must be a folder, a str or a Path, got {kind}.")
    if not os.fspath(snapshots):
        raise ValueError(f"`{owner}(snapshots={snapshots!r})` must be a folder: a path, or what fsspec knows.")
    _, folder = files_at(snapshots)
    return folder


def mode_of(owner: str, mode: str) -> Mode:
    """Return the mode of this name, ours or MXNet's.

    >>> mode_of("Strategy", "dist_sync_device"), mode_of("Strategy", "dist")
    ('sync', 'sync')
    """
    check_choice(owner, "mode", mode, (*get_args(Mode), *_ALIASES))
    return _ALIASES.get(mode, mode)  # pyright: ignore


def clock_of(strategy: ParameterServerStrategy, lr_clock: LrClock | None) -> LrClock:
    """Return the clock of learning rates. Default: the servers' versions, unless all step together or the optimizer is
    the worker's."""
    owner = type(strategy).__name__
    check_choice(owner, "lr_clock", lr_clock, (*get_args(LrClock), None))
    if lr_clock == "global" and not strategy.update_on_server:
        raise ValueError(
            f"`{owner}(lr_clock='global', update_on_server=False)`: the optimizer is the worker's then, and its rate "
            "follows the steps that it takes. Leave one of them out."
        )
    return lr_clock or ("global" if strategy.update_on_server and strategy.mode != "sync" else "local")


def check_service(strategy: ParameterServerStrategy) -> None:
    """Raise TypeError or ValueError where a setting is out of range, or two contradict each other."""
    owner = type(strategy).__name__
    least = {"bigarray_bound": 1, "warmup_steps": 0, "update_frequency": 1, "pull_every": 1}
    for name, minimum in least.items():
        check_int(strategy, name, at_least=minimum)
    for name in ("update_on_server", "consistent_pull", "overlap"):
        check_choice(owner, name, getattr(strategy, name), (True, False))
    if strategy.server_address is not None:
        _check_address(owner, strategy.server_address)
    if strategy.snapshot_every is not None:
        check_real(strategy, "snapshot_every", above=0)
    _check_snapshots(owner, strategy)
    if strategy.num_servers is not None:
        check_int(strategy, "num_servers", at_least=1)
        if strategy.server_address is not None:
            raise ValueError(
                f"`{owner}(num_servers={strategy.num_servers}, server_address={strategy.server_address!r})`: servers "
                "started on their own are as many as their addresses. Leave `num_servers` out."
            )
    frequency = strategy.update_frequency
    if strategy.update_on_server and frequency > 1:
        raise ValueError(
            f"`{owner}(update_frequency={frequency})` is of local steps: pass `update_on_server=False`, or "
            f"`Trainer(accumulate_grad_batches={frequency})` for gradients of several batches in one push."
        )
    if strategy.overlap and not strategy.update_on_server:
        raise ValueError(
            f"`{owner}(overlap=True, update_on_server=False)`: local steps go on from what a push brings. "
            "Leave `overlap` out, and take more local steps between pushes (`update_frequency`)."
        )
    if strategy.mode == "sync" and (strategy.pull_every > 1 or strategy.overlap):
        raise ValueError(
            f"`{owner}(mode='sync', pull_every={strategy.pull_every}, overlap={strategy.overlap})`: all workers have "
            'the same weights after each step, so each pulls after each push. Leave both out, or use `mode="async"`.'
        )
    if strategy.mode == "ssp" and (over := -ahead(strategy)) > 0:
        bound = strategy.max_staleness
        every = strategy.pull_every
        raise ValueError(
            f"`{owner}(mode='ssp', max_staleness={bound}, pull_every={every}, overlap={strategy.overlap})`: before "
            f"newer weights come, a worker makes {every + strategy.overlap} pushes, so that its weights lack more than "
            f"{bound} of another's. Take `max_staleness={(bound or 0) + over}` or more, or pull more often."
        )
    if strategy.mode == "sync" and strategy.warmup_steps:
        raise ValueError(
            f"`{owner}(mode='sync', warmup_steps={strategy.warmup_steps})`: all steps are synchronous. Leave "
            '`warmup_steps` out, or use `mode="async"`.'
        )
    if strategy.mode == "sync" and not (strategy.staleness == "auto" or isinstance(strategy.staleness, NoCorrection)):
        raise ValueError(
            f"`{owner}(mode='sync', staleness={strategy.staleness!r})`: pushes of one round are not late. Leave "
            '`staleness` out, or use `mode="async"`.'
        )


def settings_of(strategy: ParameterServerStrategy) -> dict[str, object]:
    return {**{name: getattr(strategy, name) for name in _ALIKE}, "snapshots": strategy.snapshots is not None}


def _check_address(owner: str, address: object) -> None:
    if not isinstance(address, str):
        raise TypeError(f"`{owner}(server_address={address!r})` must be a str, got {type(address).__name__}.")
    try:
        places_of(address)
    except ValueError as error:
        raise ValueError(
            f'`{owner}(server_address={address!r})` must be "HOST:PORT", or several with commas between: {error}'
        ) from None


def _check_snapshots(owner: str, strategy: ParameterServerStrategy) -> None:
    every = strategy.snapshot_every
    folder = strategy.snapshots
    if folder is None and every is not None:
        raise ValueError(
            f"`{owner}(snapshot_every={every!r})`: no snapshots are taken. Pass their folder, too (`snapshots=`), or "
            "leave it out."
        )
    if folder is not None and strategy.server_address is not None:
        raise ValueError(
            f"`{owner}(snapshots={folder!r}, server_address={strategy.server_address!r})`: servers that were started "
            "on their own have snapshots of their own (`lightning-async serve --snapshots`). Leave one out."
        )
