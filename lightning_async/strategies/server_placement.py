"""A worker finds its servers, or starts them, and joins them with the model."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from lightning_async._checks import check_choice
from lightning_async.algorithms.staleness import make_policy, momentum_warning
from lightning_async.comm.p2p_gloo import machine_name
from lightning_async.comm.peer_storage import facing
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.metrics import PushTotals, WorkerSteps
from lightning_async.parameter_server.process import ServerStart, Shelving
from lightning_async.parameter_server.tables import ParameterGroup, ParameterGroups, described_again, keys_of, state_of
from lightning_async.parameter_server.worker import Worker, plan_of
from lightning_async.strategies import server_lifecycle
from lightning_async.strategies.base import Roles
from lightning_async.strategies.server_lifecycle import Servers, serve
from lightning_async.strategies.server_options import ahead
from lightning_async.trainer.configuration_checks import check_momentum_stays
from lightning_async.trainer.namespace import rank_zero_info
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.parameter_server import ParameterServerStrategy

log = logging.getLogger(__name__)

Placement = Literal["colocated", "dedicated"]


class ServerRoles(Roles):
    """The ranks that train, and the last ones, which serve where they are ``"dedicated"``."""

    def __init__(
        self,
        owner: str,
        placement: Placement,
        num_servers: int | None,
        server_address: str | None,
        begin_together: bool = True,
    ) -> None:
        check_choice(owner, "placement", placement, get_args(Placement))
        self._owner = owner
        self.placement = placement
        self._num_servers = num_servers
        self._elsewhere = server_address is not None
        if self._elsewhere and placement == "dedicated":
            raise ValueError(
                f'`{owner}(placement="dedicated", server_address={server_address!r})`: servers that were started on '
                "their own are no ranks. Leave one of them out."
            )
        self.begin_together = begin_together
        self.expects_more = False
        """Whether workers begin without others, which join later."""

    @property
    def dedicated(self) -> bool:
        """Whether servers are ranks."""
        return self.placement == "dedicated"

    @property
    def num_servers(self) -> int:
        """Number of servers that are ranks."""
        return self._num_servers or 1

    @property
    def num_serving(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_servers if self.dedicated else 0

    def of(self, environment: Any) -> tuple[str, int]:
        """Return ``"worker"`` or ``"server"``, and its number among these."""
        rank = getattr(environment, "started_as", None)
        rank = environment.global_rank() if rank is None else rank
        started = environment.world_size()
        first = started - self.num_serving
        return ("server", rank - first) if first <= rank < started else ("worker", rank)  # new ones train

    def reached_at(self, environment: Any, num_nodes: int) -> str | None:
        """Return this server's address for other hosts; None where all are on one host."""
        return facing(environment.main_address, environment.main_port) if num_nodes > 1 else None

    def transport(self, transport: Transport | TransportName) -> Transport | TransportName:
        """Return the transport by which workers meet: those that serve are in no group of theirs."""
        return "torch" if transport == "auto" and self.dedicated else transport

    def is_alone(self, world_size: int) -> bool:
        return world_size == 1 and not (self.expects_more or self.dedicated or self._elsewhere)

    def take_part(self, strategy: Any) -> None:
        role, number = self.of(strategy.cluster_environment)
        if role != "worker":
            serve(strategy, number)
            trainer = strategy.module.trainer
            # Callbacks, loggers and data do not see the end, as they have not begun.
            trainer.callbacks = []
            trainer.loggers = []
            trainer.datamodule = None
            raise SystemExit(0)

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError where the transport's groups are of all ranks, and some serve."""
        if not self.dedicated:
            return
        mpi = isinstance(transport, TorchTransport) and transport.backend_on(torch.device("cpu")) == "mpi"
        if mpi or not isinstance(transport, TorchTransport):
            raise ValueError(
                f"`{self._owner}(transport={transport!r})`: its groups are of all ranks, and some of them serve. Use "
                '`transport="torch"`, under any launcher, or `placement="colocated"`.'
            )

    def check_ranks(self, started: int) -> None:
        """Raise ValueError where there are more servers than ranks, or no rank is left to train."""
        if not self.dedicated and (self._num_servers or 0) > started:
            raise ValueError(
                f"`{self._owner}(num_servers={self._num_servers})`: there are {started} ranks, and each has one server "
                "beside it at most."
            )
        if self.num_serving >= started:
            raise ValueError(
                f'`{self._owner}(placement="dedicated", num_servers={self.num_servers})`: there are {started} ranks, '
                f"and one at least must train. Start more, or let servers be processes beside the workers: "
                '`placement="colocated"`.'
            )


_REQUEST_S = 1800.0  # as long as torch's process groups wait: the ranks themselves find lost ones


def join(strategy: ParameterServerStrategy, averager: BackgroundAverager) -> ParameterGroups:
    """Find or start the servers and join them; all workers call this together.

    A joining rank finds the others' servers in ``strategy.servers``.

    Raises:
        ValueError: there are more servers than ranks, or those of an address do not suit.
        AsyncTrainingError: no server can be started, or one has other settings or another model.
    """
    owner = type(strategy).__name__
    world = strategy.world
    if strategy.update_on_server:
        strategy.groups = described_again(owner, strategy.optimizers, strategy.groups)
    totals = cast(PushTotals, averager.summary.totals)
    warmup = 0
    if begins := strategy.servers is None:
        assert world is not None
        steps = world.gather_objects(averager.step)  # before the checkpoint that training goes on from
        worker_rules = _worker_rules(strategy)
        elsewhere = strategy.server_address is not None
        strategy.brings |= strategy.saved.origin != "none"
        warmup = worker_rules.warmup_steps
        if strategy.brings or not elsewhere:
            warmup = max(0, warmup - max(steps))
        with_warmup = replace(worker_rules, warmup_steps=warmup)
        strategy.servers = _find(strategy, world, worker_rules if elsewhere else with_warmup)
        strategy.progress = _progress(strategy, steps, with_warmup)
        totals.begin()
    servers = strategy.servers
    workers = []
    assert servers is not None
    name = servers.name_of(averager.sync_points.name)
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
    strategy.brings = False
    tables = ParameterGroups(workers, totals)
    if begins and world is not None:  # servers have weights
        first, *_ = world.gather_objects(tables.updates(strategy.groups))
        strategy.progress.begin(first)
    if not begins or strategy.global_rank != 0:
        for group, worker in zip(strategy.groups, workers, strict=True):
            worker.start(group.name, group.arguments, staleness=strategy.staleness)
    return tables


def end(strategy: ParameterServerStrategy, in_order: bool) -> None:
    """End the servers once nobody needs them; where this rank has failed, others go on with them."""
    servers = strategy.servers
    strategy.servers = None
    if servers is not None:
        servers.close(in_order, tells=strategy.global_rank == 0)
    run = strategy.served_run
    strategy.served_run = None
    if run is not None and in_order and strategy.global_rank == 0:
        server_lifecycle.dismiss(strategy, run)


def _worker_rules(strategy: ParameterServerStrategy) -> WorkerRules:
    bound = {"max_staleness": ahead(strategy)} if strategy.mode == "ssp" else {}
    return WorkerRules(
        mode=strategy.mode, num_workers=strategy.world_size, **bound, dead_after_s=_REQUEST_S,
        staleness=strategy.staleness, warmup_steps=strategy.warmup_steps,
    )  # fmt: skip


def _progress(strategy: ParameterServerStrategy, steps: Sequence[int], worker_rules: WorkerRules) -> WorkerSteps:
    """Return the progress of schedules that follow versions."""
    if worker_rules.mode == "sync":
        return WorkerSteps(steps, sys.maxsize, 1)
    first, *_ = strategy.groups
    policy = make_policy(worker_rules.staleness, first.name, first.arguments)
    return WorkerSteps(steps, worker_rules.warmup_steps, policy.buffer_size)


def _find(strategy: ParameterServerStrategy, world: LightningCollectives, worker_rules: WorkerRules) -> Servers:
    if strategy.server_address is not None:
        return Servers.at(strategy.server_address, worker_rules)
    if strategy.roles.dedicated:
        strategy.served_run = strategy.num_runs
        return server_lifecycle.call(strategy, strategy.served_run, worker_rules, _shelving(strategy, world))
    host = None if len({*world.gather_objects(machine_name())}) == 1 else _own_address(strategy.cluster_environment)
    return Servers.start(world, _count(strategy), ServerStart(worker_rules, host, _shelving(strategy, world)))


def _shelving(strategy: ParameterServerStrategy, world: LightningCollectives) -> Shelving:
    """Return a folder of its own for each training: none begins with another one's snapshots, or touches these."""
    if strategy.snapshots is None:
        return Shelving()
    first, *_ = world.gather_objects(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
    rank_zero_info(f"{type(strategy).__name__}: snapshots of servers are in {strategy.snapshots}/{first}")
    return Shelving(f"{strategy.snapshots}/{first}", float(strategy.snapshot_every or Shelving().every_s))


def _own_address(environment: Any) -> str:
    address = getattr(environment, "own_address", None)  # Horovod's ranks know no address of the first one
    return address or facing(environment.main_address, environment.main_port)


def _count(strategy: ParameterServerStrategy) -> int:
    if strategy.num_servers is None:
        return strategy.num_nodes
    if strategy.num_servers > strategy.world_size:
        raise ValueError(
            f"`{type(strategy).__name__}(num_servers={strategy.num_servers})`: there are {strategy.world_size} ranks, "
            "and each has one server beside it at most."
        )
    return strategy.num_servers


def _groups_of(strategy: ParameterServerStrategy, group: ParameterGroup) -> list[Any]:
    """Return the optimizers' groups whose parameters are in this table: all, where optimizers are the worker's."""
    if strategy.update_on_server:
        return [strategy.optimizers[group.optimizer].param_groups[group.group]]
    return [each for optimizer in strategy.optimizers for each in optimizer.param_groups]


def check_momentum(strategy: ParameterServerStrategy, trainer: Any) -> None:
    """Refuse schedulers that change momentum, and warn where late gradients go on in it."""
    if strategy.world_size > 1:
        check_momentum_stays(trainer, type(strategy).__name__)
    if strategy.mode == "sync" or strategy.global_rank != 0:
        return
    for group in strategy.groups:
        policy = make_policy(strategy.staleness, group.name, group.arguments)
        if (warning := momentum_warning(policy, group.name, group.arguments)) is not None:
            log.warning(warning)
