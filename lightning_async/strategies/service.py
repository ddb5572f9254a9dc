"""What a parameter server can be asked for: its modes, and settings that contradict each other."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from lightning_async.arguments import check_choice, check_int
from lightning_async.rules.staleness.choose import make_policy
from lightning_async.rules.staleness.protocol import StalenessPolicy, Uncorrected

__all__ = ["Mode", "check_service", "mode_of", "one_of", "policy_of"]

Mode = Literal["async", "sync", "ssp"]
_ALIASES: dict[str, Mode] = {
    "dist_async": "async", "dist_async_device": "async", "dist_device_async": "async",
    "dist_sync": "sync", "dist_sync_device": "sync", "dist_device_sync": "sync",
}  # fmt: skip
"""MXNet's names."""


class _Service(Protocol):
    mode: Mode
    num_servers: int | None
    shard_replicas: int
    server_address: str | None
    update_on_server: bool
    staleness: str | StalenessPolicy
    max_staleness: int
    warmup_steps: int
    update_frequency: int
    pull_every: int
    consistent_pull: bool
    overlap: bool
    bigarray_bound: int


def mode_of(owner: str, mode: str) -> Mode:
    """The mode of this name, ours or MXNet's.

    Raises:
        ValueError: there is none.

    >>> mode_of("Strategy", "dist_sync_device")
    'sync'
    """
    check_choice(owner, "mode", mode, (*get_args(Mode), *_ALIASES))
    return _ALIASES.get(mode, mode)  # pyright: ignore


def one_of(owner: str, update_on_server: bool | None, update_on_kvstore: bool | None) -> bool:
    """What both names of one argument say; True where neither says anything.

    Raises:
        ValueError: they contradict each other, or one is neither True nor False.

    >>> one_of("Strategy", None, False)
    False
    """
    told = {"update_on_server": update_on_server, "update_on_kvstore": update_on_kvstore}
    for name, value in told.items():
        check_choice(owner, name, value, (True, False, None))
    if {*told.values()} >= {True, False}:
        raise ValueError(
            f"`{owner}(update_on_server={update_on_server}, update_on_kvstore={update_on_kvstore})`: one argument has "
            "these two names. Pass one of them."
        )
    return False not in told.values()


def policy_of(staleness: str | StalenessPolicy, update_on_server: bool) -> str | StalenessPolicy:
    """The policy; ``"auto"`` stays so until the optimizer is known, where the server has one.

    Raises:
        TypeError, ValueError: there is none of this name.
    """
    if staleness == "auto":
        return staleness if update_on_server else make_policy("none")
    return make_policy(staleness)


def check_service(strategy: _Service) -> None:
    """Whether its settings are in their ranges, and fit together.

    Raises:
        TypeError, ValueError: one is not, or two do not; names them.
    """
    owner = type(strategy).__name__
    least = {"bigarray_bound": 1, "max_staleness": 0, "warmup_steps": 0, "update_frequency": 1, "pull_every": 1}
    for name, minimum in least.items():
        check_int(strategy, name, at_least=minimum)
    check_choice(owner, "shard_replicas", strategy.shard_replicas, (0, 1))
    _check_replicas(owner, strategy)
    for name in ("consistent_pull", "overlap"):
        check_choice(owner, name, getattr(strategy, name), (True, False))
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


def _check_replicas(owner: str, strategy: _Service) -> None:
    if strategy.shard_replicas and strategy.num_servers == 1:
        raise ValueError(
            f"`{owner}(shard_replicas=1, num_servers=1)`: the replica of a shard is on another server. Take two "
            "servers or more, on as many hosts, or leave `shard_replicas` out."
        )
    if strategy.shard_replicas and strategy.server_address is not None:
        raise ValueError(
            f"`{owner}(shard_replicas=1, server_address={strategy.server_address!r})`: servers that were started on "
            "their own have snapshots for the loss of a host (`lightning-async serve --snapshots`). Leave one out."
        )
