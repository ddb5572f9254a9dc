"""`ServerOptions` and `ServiceSettings`: the settings of a `ParameterServerStrategy`, checked against each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, cast, get_args

from lightning_async._checks import check_bool, check_choice, check_int, check_number, check_real
from lightning_async.algorithms.compression import PushCompression
from lightning_async.algorithms.staleness import AUTO, NoCorrection, StalenessPolicy, make_policy
from lightning_async.checkpoint.storage import files_at
from lightning_async.comm.p2p_gloo import places_of
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.strategies.server_lifecycle import StartQuorum, WaitForWorkers

Placement = Literal["colocated", "dedicated"]
_SSP_BOUND = 3
REQUEST_S = 1800.0  # As long as torch's process groups wait. Lost ranks are found by heartbeats, much earlier.
Mode = Literal["async", "sync", "ssp"]
_ALIASES: dict[str, Mode] = {
    "dist": "sync", "dist_async": "async", "dist_async_device": "async", "dist_device_async": "async",
    "dist_sync": "sync", "dist_sync_device": "sync", "dist_device_sync": "sync",
}  # fmt: skip
"""Modes by MXNet's names."""


def mode_of(owner: str, mode: str) -> Mode:
    """Return the mode that ``mode`` names, by this package's name or by MXNet's.

    ``owner`` is the name of the strategy's class, for error messages.

    >>> mode_of("Strategy", "dist_sync_device"), mode_of("Strategy", "dist")
    ('sync', 'sync')
    """
    check_choice(owner, "mode", mode, (*get_args(Mode), *_ALIASES))
    return _ALIASES.get(mode, mode)  # pyright: ignore


def policy_of(staleness: str | StalenessPolicy, update_on_server: bool) -> str | StalenessPolicy:
    """Return the policy for staleness.

    ``"auto"`` is returned unchanged if the servers have the optimizer, because it depends on the optimizer's class,
    which is not known yet. If workers have the optimizers, ``"auto"`` gives `NoCorrection`.

    Args:
        staleness: A policy, or its short name.
        update_on_server: Whether servers have the optimizer.

    Raises:
        TypeError: ``staleness`` is no policy.
        ValueError: there is no policy of this name.
    """
    if staleness == AUTO:
        # Only False, because `ServiceSettings` has not checked yet that this is a bool.
        return NoCorrection() if update_on_server is False else AUTO
    return make_policy(staleness)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings of a `ParameterServerStrategy` that most trainings do not change.

    Args:
        wait_for_workers: Workers with which training begins. ``"all"`` (default): all of them. A number: training
            begins as soon as this number of workers has started, rank 0 among them. A tuple of a number and a
            timedelta: training begins when all workers have started; once the time is over, the number of workers is
            enough. Workers that start later join.
        server_address: Addresses ``"HOST:PORT,HOST:PORT"`` of servers that ``lightning-async serve`` has started. These
            servers keep their weights from one training to the next; the first training sends them its weights.
            Default: the strategy starts servers.
        snapshots: Folder for snapshots of servers that the strategy starts. If a server is lost, and its memory with
            it, a new server loads the newest snapshot. Default: no snapshots are taken.
        snapshot_every: Seconds between two snapshots. Default 60.
        bigarray_bound: Parameters with at least this number of elements are split evenly over the servers. Default
            1,000,000.
        lr_clock: What a learning-rate scheduler with interval ``"step"`` counts. ``"samples"`` (default): the pushes of
            all workers, divided by the number of workers when training began; in mode ``"sync"`` and with
            ``update_on_server=False`` the worker's own steps, see `AsyncAveragingStrategy`. ``"local"``: the worker's
            own steps, whoever is left.
        update_frequency: Number of local steps between two pushes, if each worker has its own optimizer
            (``update_on_server=False``). Default 1.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or two arguments contradict each other.

    >>> ServerOptions(wait_for_workers=2).quorum.is_all
    False
    """

    wait_for_workers: WaitForWorkers = "all"
    server_address: str | None = None
    snapshots: str | os.PathLike[str] | None = None
    snapshot_every: float | None = None
    bigarray_bound: int = 1_000_000
    lr_clock: Literal["samples", "local"] = "samples"
    update_frequency: int = 1

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_int(self, "bigarray_bound", at_least=1)
        check_int(self, "update_frequency", at_least=1)
        check_choice(owner, "lr_clock", self.lr_clock, ("samples", "local"))
        if self.snapshot_every is not None:
            check_real(self, "snapshot_every", above=0)
        self._check_address()
        # An absolute path, because the program may change its working directory.
        object.__setattr__(self, "snapshots", self._find_folder())
        if self.folder is None and self.snapshot_every is not None:
            raise ValueError(
                f"`{owner}(snapshot_every={self.snapshot_every!r})`: no snapshots are taken. Pass their folder, too "
                "(`snapshots=`), or leave it out."
            )
        if self.folder is not None and self.server_address is not None:
            raise ValueError(
                f"`{owner}(snapshots={self.snapshots!r}, server_address={self.server_address!r})`: servers that were "
                "started on their own have snapshots of their own (`lightning-async serve --snapshots`). Leave one out."
            )
        StartQuorum.of(self.wait_for_workers)

    @property
    def quorum(self) -> StartQuorum:
        """The value of ``wait_for_workers`` as a `StartQuorum`, which decides when training begins."""
        return StartQuorum.of(self.wait_for_workers)

    @property
    def folder(self) -> str | None:
        """Absolute path or URL of the folder of snapshots; None if none are taken."""
        return cast("str | None", self.snapshots)

    def _find_folder(self) -> str | None:
        folder = self.snapshots
        if folder is None:
            return None
        shown = f"`{type(self).__name__}(snapshots={folder!r})` must be a folder"
        if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
            raise TypeError(f"{shown}, a str or a Path, got {type(folder).__name__}.")
        if not os.fspath(folder):
            raise ValueError(f"{shown}: a path, or what fsspec knows.")
        try:
            return files_at(folder)[1]
        except (ImportError, ValueError) as error:  # of fsspec's
            raise type(error)(f"{shown}: {error}.") from error

    def _check_address(self) -> None:
        address = self.server_address
        shown = f"`{type(self).__name__}(server_address={address!r})` must be"
        if address is None:
            return
        if not isinstance(address, str):
            raise TypeError(f"{shown} a str, got {type(address).__name__}.")
        try:
            places_of(address)
        except ValueError as error:
            raise ValueError(f'{shown} "HOST:PORT", or several with commas between: {error}') from None


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The arguments of a `ParameterServerStrategy` that concern servers, checked against each other.

    The fields are named after the strategy's arguments. ``owner``, the name of the strategy's class, is for messages.

    Raises:
        TypeError: a setting has a wrong type.
        ValueError: a setting is out of range, or two settings contradict each other.
    """

    owner: str
    mode: Mode
    num_servers: int | None
    placement: Placement
    update_on_server: bool
    staleness: str | StalenessPolicy
    max_staleness: int | None
    warmup_steps: int
    pull_every: int
    compression: PushCompression | None
    overlap: bool
    options: ServerOptions

    def __post_init__(self) -> None:
        owner = self.owner
        if not isinstance(self.options, ServerOptions):
            raise TypeError(f"`{owner}(options={self.options!r})` must be a ServerOptions.")
        check_number(owner, "warmup_steps", self.warmup_steps, at_least=0)
        check_number(owner, "pull_every", self.pull_every, at_least=1)
        check_choice(owner, "placement", self.placement, get_args(Placement))
        for name in ("update_on_server", "overlap"):
            check_bool(owner, name, getattr(self, name))
        if self.num_servers is not None:
            check_number(owner, "num_servers", self.num_servers, at_least=1)
        if self.max_staleness is not None:
            check_number(owner, "max_staleness", self.max_staleness, at_least=0)
        self._check_options()
        self._check_mode()

    @property
    def bound(self) -> int | None:
        """The staleness bound in mode ``"ssp"``: how many pushes of another worker a worker's weights may lack.

        None in other modes.
        """
        if self.mode != "ssp":
            return None
        return _SSP_BOUND if self.max_staleness is None else self.max_staleness

    @property
    def ahead(self) -> int:
        """Number of pushes by which a worker may be ahead of the slowest worker, in mode ``"ssp"``.

        A worker that makes :math:`p` pushes with the same weights may be ahead by `bound` - (p - 1) pushes only, so
        that its weights never lack more than `bound` pushes of another worker.
        """
        return (self.bound or 0) - (self.pull_every - 1) - self.overlap

    def worker_rules(self, num_workers: int) -> WorkerRules:
        bound = {"max_staleness": self.ahead} if self.mode == "ssp" else {}
        return WorkerRules(
            mode=self.mode, num_workers=num_workers, **bound, dead_after_s=REQUEST_S, staleness=self.staleness,
            warmup_steps=self.warmup_steps,
        )  # fmt: skip

    def compared(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks."""
        own = {name: value for name, value in vars(self).items() if name not in ("owner", "options")}
        return {
            **own, **vars(self.options), "max_staleness": self.bound, "wait_for_workers": self.options.quorum,
            "snapshots": self.options.folder is not None,
        }  # fmt: skip

    def _check_options(self) -> None:
        owner = self.owner
        options = self.options
        if self.num_servers is not None and options.server_address is not None:
            raise ValueError(
                f"`{owner}(num_servers={self.num_servers}, options=ServerOptions(server_address="
                f"{options.server_address!r}))`: servers started on their own are as many as their addresses. Leave "
                "`num_servers` out."
            )
        if self.placement == "dedicated" and options.server_address is not None:
            raise ValueError(
                f"`{owner}(placement='dedicated', options=ServerOptions(server_address={options.server_address!r}))`: "
                "servers that were started on their own are no ranks. Leave one of them out."
            )
        if self.update_on_server and options.update_frequency > 1:
            raise ValueError(
                f"`ServerOptions(update_frequency={options.update_frequency})` is of local steps: pass "
                f"`{owner}(update_on_server=False)`, or `Trainer(accumulate_grad_batches={options.update_frequency})` "
                "for gradients of several batches in one push."
            )
        if self.overlap and not self.update_on_server:
            raise ValueError(
                f"`{owner}(overlap=True, update_on_server=False)`: local steps go on from what a push brings. Leave "
                "`overlap` out, and take more local steps between pushes (`ServerOptions(update_frequency=...)`)."
            )

    def _check_mode(self) -> None:
        shown = f"`{self.owner}(mode={self.mode!r}"
        rest = 'or use `mode="async"`.'
        if self.max_staleness is not None and self.mode != "ssp":
            raise ValueError(
                f'{shown}, max_staleness={self.max_staleness})`: it is for `mode="ssp"`. Pass that, or leave it out; a '
                f"bound of the lag is the policy's: `staleness=Bounded({max(1, self.max_staleness)})` of "
                "`lightning_async.algorithms`."
            )
        if self.mode == "ssp" and self.ahead < 0:
            bound = self.bound or 0
            raise ValueError(
                f"{shown}, max_staleness={bound}, pull_every={self.pull_every}, overlap={self.overlap})`: before newer "
                f"weights come, a worker makes {self.pull_every + self.overlap} pushes, so that its weights lack more "
                f"than {bound} of another's. Take `max_staleness={bound - self.ahead}` or more, or pull more often."
            )
        if self.mode != "sync":
            return
        if self.pull_every > 1 or self.overlap:
            raise ValueError(
                f"{shown}, pull_every={self.pull_every}, overlap={self.overlap})`: all workers have the same weights "
                f"after each step, so each pulls after each push. Leave both out, {rest}"
            )
        if self.warmup_steps:
            raise ValueError(
                f"{shown}, warmup_steps={self.warmup_steps})`: all steps are synchronous. Leave `warmup_steps` out, "
                f"{rest}"
            )
        if self.staleness != AUTO and not isinstance(self.staleness, NoCorrection):
            raise ValueError(
                f"{shown}, staleness={self.staleness!r})`: pushes of one round are not late. Leave `staleness` out, "
                f"{rest}"
            )
