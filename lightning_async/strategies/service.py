"""What a parameter server can be asked for: its modes, and settings that contradict each other."""

from __future__ import annotations

import os
from typing import Literal, Protocol, get_args

from lightning_async.arguments import check_choice, check_int, check_real
from lightning_async.comm.reach import places_of
from lightning_async.engine.files import files_at
from lightning_async.rules.staleness.protocol import StalenessPolicy, Uncorrected
from lightning_async.strategies.lateness import Late, check_bound
from lightning_async.trainer.refusals import LrClock

__all__ = ["Mode", "check_service", "clock_of", "folder_of", "mode_of", "settings_of"]

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


class _Service(Late, Protocol):
    mode: Mode
    num_servers: int | None
    server_address: str | None
    snapshots: str | None
    snapshot_every: float | None
    update_on_server: bool
    staleness: str | StalenessPolicy
    warmup_steps: int
    update_frequency: int
    consistent_pull: bool
    bigarray_bound: int


def folder_of(owner: str, snapshots: str | os.PathLike[str] | None) -> str | None:
    """The folder of snapshots, as it is named wherever this process goes.

    Raises:
        TypeError, ValueError: it is none.
    """
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
    """The mode of this name, ours or MXNet's.

    Raises:
        ValueError: there is none.

    >>> mode_of("Strategy", "dist_sync_device"), mode_of("Strategy", "dist")
    ('sync', 'sync')
    """
    check_choice(owner, "mode", mode, (*get_args(Mode), *_ALIASES))
    return _ALIASES.get(mode, mode)  # pyright: ignore


def clock_of(strategy: _Service, lr_clock: LrClock | None) -> LrClock:
    """Whose steps learning rates follow; where nothing is said, the servers' versions, unless all step together or the
    optimizer is the worker's.

    Raises:
        ValueError: there is no such clock, or not with this optimizer.
    """
    owner = type(strategy).__name__
    check_choice(owner, "lr_clock", lr_clock, (*get_args(LrClock), None))
    if lr_clock == "global" and not strategy.update_on_server:
        raise ValueError(
            f"`{owner}(lr_clock='global', update_on_server=False)`: the optimizer is the worker's then, and its rate "
            "follows the steps that it takes. Leave one of them out."
        )
    return lr_clock or ("global" if strategy.update_on_server and strategy.mode != "sync" else "local")


def check_service(strategy: _Service) -> None:
    """Whether its settings are in their ranges, and fit together.

    Raises:
        TypeError, ValueError: one is not, or two do not; names them.
    """
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
    check_bound(strategy)
    if strategy.mode == "sync" and strategy.warmup_steps:
        raise ValueError(
            f"`{owner}(mode='sync', warmup_steps={strategy.warmup_steps})`: all steps are synchronous. Leave "
            '`warmup_steps` out, or use `mode="async"`.'
        )
    if strategy.mode == "sync" and not (strategy.staleness == "auto" or isinstance(strategy.staleness, Uncorrected)):
        raise ValueError(
            f"`{owner}(mode='sync', staleness={strategy.staleness!r})`: pushes of one round are not late. Leave "
            '`staleness` out, or use `mode="async"`.'
        )


def settings_of(strategy: _Service) -> dict[str, object]:
    """What must be equal on all ranks."""
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


def _check_snapshots(owner: str, strategy: _Service) -> None:
    every, folder = strategy.snapshot_every, strategy.snapshots
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
