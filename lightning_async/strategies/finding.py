"""A worker finds its servers, or starts them, and joins them with the model."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from lightning_async.comm.keeper import facing
from lightning_async.comm.reach import machine_name
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.server.optimizer_state import Group, described_again, keys_of, state_of
from lightning_async.engine.server.progress import Progress
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.replacing import Shelving, Start
from lightning_async.engine.server.tables import Tables
from lightning_async.engine.server.totals import PushTotals
from lightning_async.engine.server.worker import Worker, plan_of
from lightning_async.engine.world import World
from lightning_async.rules.compression import PushCompression
from lightning_async.rules.staleness.choose import make_policy, momentum_warning
from lightning_async.rules.staleness.protocol import StalenessPolicy
from lightning_async.strategies import dedicated
from lightning_async.strategies.lateness import Late, ahead
from lightning_async.strategies.placement import ServerRoles
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.servers import Servers
from lightning_async.strategies.service import Mode
from lightning_async.trainer.patches import rank_zero_info
from lightning_async.trainer.refusals import check_momentum_stays

__all__ = ["Finding", "check_momentum", "end", "handed_over", "join", "take_handed_over"]

log = logging.getLogger(__name__)
_REQUEST_S = 1800.0  # as long as torch's process groups wait: whoever is lost is told of by the ranks themselves


class Finding(dedicated.Served, Late, Protocol):
    """What a strategy has whose servers these are."""

    mode: Mode
    bigarray_bound: int
    compression: PushCompression | None
    consistent_pull: bool
    warmup_steps: int
    num_servers: int | None
    server_address: str | None
    snapshot_every: float | None
    staleness: str | StalenessPolicy
    groups: list[Group]
    num_runs: int
    servers: Servers | None
    progress: Progress
    served_run: int | None
    """For which servers that are ranks were called."""
    brings: bool
    """What this training has is to be on the servers, whatever they have."""
    saved: SavedState

    @property
    def module(self) -> Any: ...

    @property
    def optimizers(self) -> Sequence[Any]: ...

    @property
    def roles(self) -> ServerRoles: ...

    @property
    def world(self) -> World | None: ...

    @property
    def world_size(self) -> int: ...


def join(strategy: Finding, averager: BackgroundAverager) -> Tables:
    """All workers call this together; who comes to a training of others finds their servers in ``servers``.

    Raises:
        ValueError: there are more servers than ranks, or those of an address do not suit.
        AsyncTrainingError: no server can be started, or one has other settings or another model.
    """
    owner, world = type(strategy).__name__, strategy.world
    if strategy.update_on_server:
        strategy.groups = described_again(owner, strategy.optimizers, strategy.groups)
    totals, warmup = cast(PushTotals, averager.summary.totals), 0
    if begins := strategy.servers is None:
        assert world is not None
        steps = world.gather_objects(averager.step)  # before the checkpoint that training goes on from
        terms, elsewhere = _terms(strategy), strategy.server_address is not None
        strategy.brings |= strategy.saved.origin != "none"
        warmup = terms.warmup_steps if elsewhere and not strategy.brings else max(0, terms.warmup_steps - max(steps))
        strategy.servers = _find(strategy, world, terms if elsewhere else replace(terms, warmup_steps=warmup))
        strategy.progress = _progress(strategy, steps, replace(terms, warmup_steps=warmup))
        totals.begin()
    servers, workers = strategy.servers, []
    assert servers is not None
    name = servers.name_of(averager.gates.name)
    for number, group in enumerate(strategy.groups):
        named = keys_of(strategy.module, _groups_of(strategy, group))
        plan = plan_of(named, len(servers.addresses), strategy.bigarray_bound)
        if begins:
            rank_zero_info(f"{owner}, {group.name}: {plan}")
        dials = servers.dials(plan)
        how = strategy.compression, strategy.consistent_pull and strategy.mode != "sync"
        workers.append(Worker(name, named, plan, dials, 2 * _REQUEST_S, *how, number, strategy.overlap))
    if begins and strategy.global_rank == 0:  # the weights and the optimizers' state of a checkpoint are rank 0's
        for group, worker in zip(strategy.groups, workers, strict=True):
            state: Any = ({}, {})
            if strategy.update_on_server:
                state = state_of(strategy.optimizers[group.optimizer], worker.params)
            left = warmup if strategy.brings else None
            worker.start(group.name, group.arguments, state, strategy.staleness, strategy.brings, left)
    strategy.brings, tables = False, Tables(workers, totals)
    if begins and world is not None:  # servers have weights
        first, *_ = world.gather_objects(tables.updates(strategy.groups))
        strategy.progress.begin(first)
    if not begins or strategy.global_rank != 0:
        for group, worker in zip(strategy.groups, workers, strict=True):
            worker.start(group.name, group.arguments, staleness=strategy.staleness)
    return tables


def end(strategy: Finding, in_order: bool) -> None:
    """Nobody needs the servers any more; where this rank has failed, the others go on with them."""
    servers, strategy.servers = strategy.servers, None
    if servers is not None:
        servers.close(in_order, tells=strategy.global_rank == 0)
    run, strategy.served_run = strategy.served_run, None
    if run is not None and in_order and strategy.global_rank == 0:
        dedicated.dismiss(strategy, run)


def handed_over(strategy: Finding) -> dict[str, Any]:
    """What one that comes must know of the servers."""
    addresses = [] if strategy.servers is None else strategy.servers.addresses
    called = "" if strategy.servers is None else strategy.servers.job
    run = {"run": strategy.served_run, "job": called}
    return {"servers": addresses, **run, "progress": strategy.progress.plain()}


def take_handed_over(strategy: Finding, told: dict[str, Any]) -> None:
    """It comes, and has been told that."""
    strategy.served_run = told["run"]
    strategy.progress.take(told["progress"])
    strategy.servers = dedicated.found(strategy, strategy.served_run, told["servers"])
    strategy.servers.job = told["job"]


def _terms(strategy: Finding) -> Terms:
    """How servers treat workers."""
    bound = {"max_staleness": ahead(strategy)} if strategy.mode == "ssp" else {}
    return Terms(
        mode=strategy.mode, num_workers=strategy.world_size, **bound, dead_after_s=_REQUEST_S,
        staleness=strategy.staleness, warmup_steps=strategy.warmup_steps,
    )  # fmt: skip


def _progress(strategy: Finding, steps: Sequence[int], terms: Terms) -> Progress:
    """Of schedules that follow versions."""
    first, *_ = strategy.groups
    pushes = 1 if terms.mode == "sync" else make_policy(terms.staleness, first.name, first.arguments).buffer_size
    return Progress(steps, sys.maxsize if terms.mode == "sync" else terms.warmup_steps, pushes)


def _find(strategy: Finding, world: World, terms: Terms) -> Servers:
    if strategy.server_address is not None:
        return Servers.at(strategy.server_address, terms)
    if strategy.roles.dedicated:
        strategy.served_run = strategy.num_runs
        return dedicated.call(strategy, strategy.served_run, terms, _shelving(strategy, world))
    host = None if len({*world.gather_objects(machine_name())}) == 1 else _own_address(strategy.cluster_environment)
    return Servers.start(world, _count(strategy), Start(terms, host, _shelving(strategy, world)))


def _shelving(strategy: Finding, world: World) -> Shelving:
    """A folder of its own for each training: none begins with what another one had, or touches what is another's."""
    if strategy.snapshots is None:
        return Shelving()
    first, *_ = world.gather_objects(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
    rank_zero_info(f"{type(strategy).__name__}: snapshots of servers are in {strategy.snapshots}/{first}")
    return Shelving(f"{strategy.snapshots}/{first}", float(strategy.snapshot_every or Shelving().every_s))


def _own_address(environment: Any) -> str:
    """Of this host, as others reach it."""
    told = getattr(environment, "own_address", None)  # Horovod's ranks know no address of the first one
    return told or facing(environment.main_address, environment.main_port)


def _count(strategy: Finding) -> int:
    if strategy.num_servers is None:
        return strategy.num_nodes
    if strategy.num_servers > strategy.world_size:
        raise ValueError(
            f"`{type(strategy).__name__}(num_servers={strategy.num_servers})`: there are {strategy.world_size} ranks, "
            "and each has one server beside it at most."
        )
    return strategy.num_servers


def _groups_of(strategy: Finding, group: Group) -> list[Any]:
    """The groups of optimizers whose parameters are in its table: all, where they are the worker's."""
    if strategy.update_on_server:
        return [strategy.optimizers[group.optimizer].param_groups[group.group]]
    return [each for optimizer in strategy.optimizers for each in optimizer.param_groups]


def check_momentum(strategy: Finding, trainer: Any) -> None:
    """Refuse schedulers that change it, and warn where late gradients go on in it."""
    if strategy.world_size > 1:
        check_momentum_stays(trainer, type(strategy).__name__)
    for group in strategy.groups if strategy.mode != "sync" and strategy.global_rank == 0 else ():
        policy = make_policy(strategy.staleness, group.name, group.arguments)
        if (warning := momentum_warning(policy, group.name, group.arguments)) is not None:
            log.warning(warning)
