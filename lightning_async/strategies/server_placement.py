"""The placement of parameter servers.

`ServerHandle` is a worker's access to the servers: it finds or starts them, and connects to them. `ServerRoles` decides
which ranks are servers.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import DistNetworkError, DistStoreError
from torch.optim import Optimizer

from lightning_async.algorithms.staleness import make_policy, momentum_warning
from lightning_async.comm.p2p_gloo import machine_name
from lightning_async.comm.peer_storage import facing
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.membership.startup import WaitWithLog
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.discovery import JobBoard
from lightning_async.parameter_server.metrics import PushTotals, WorkerSteps
from lightning_async.parameter_server.process import ServerStart, Shelving
from lightning_async.parameter_server.tables import (
    ParameterGroup,
    ParameterGroups,
    described,
    described_again,
    keys_of,
    state_of,
)
from lightning_async.parameter_server.worker import Worker, plan_of
from lightning_async.strategies.base import Roles
from lightning_async.strategies.server_lifecycle import JobRanks, Servers
from lightning_async.strategies.server_options import REQUEST_S, ServiceSettings
from lightning_async.trainer.namespace import rank_zero_info
from lightning_async.transports.base import Connection, Transport
from lightning_async.transports.resolve import TransportName
from lightning_async.transports.torch import TorchTransport, check_start, start_is_over

log = logging.getLogger(__name__)

_ANSWERS = timedelta(minutes=30)  # as long as ranks wait for each other to start


class ServerRoles(Roles):
    """The roles of ranks with parameter servers: workers first and, with dedicated servers, servers last."""

    def __init__(self, service: ServiceSettings) -> None:
        self._service = service
        self.dedicated = service.placement == "dedicated"
        """Whether servers are ranks."""
        self.begin_together = service.options.quorum.is_all
        self.expects_more = False
        """Whether training has begun without some of the workers, which join later."""

    @property
    def num_servers(self) -> int:
        return self._service.num_servers or 1

    @property
    def num_serving(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_servers if self.dedicated else 0

    def of(self, environment: Any) -> tuple[str, int]:
        """Return this rank's role, ``"worker"`` or ``"server"``, and its number among the ranks of that role."""
        rank = getattr(environment, "started_as", None)
        rank = environment.global_rank() if rank is None else rank
        started = environment.world_size()
        first = started - self.num_serving
        # A rank with a larger number than were started is a new one, and a worker.
        return ("server", rank - first) if first <= rank < started else ("worker", rank)

    def reached_at(self, environment: Any, num_nodes: int) -> str | None:
        """Return the address at which other hosts reach this host; None if all ranks are on one host."""
        return facing(environment.main_address, environment.main_port) if num_nodes > 1 else None

    def transport(self, transport: Transport | TransportName) -> Transport | TransportName:
        """Return the workers' transport.

        With dedicated servers, "auto" means torch, because the workers then need groups without the servers. Otherwise
        ``transport`` is returned unchanged.
        """
        return "torch" if transport == "auto" and self.dedicated else transport

    def is_alone(self, world_size: int) -> bool:
        elsewhere = self._service.options.server_address is not None
        return world_size == 1 and not (self.expects_more or self.dedicated or elsewhere)

    def take_part(self, strategy: Any) -> None:
        """Return at once on a worker.

        On a dedicated server, run the server until the workers end, then end the process.
        """
        role, number = self.of(strategy.cluster_environment)
        if role != "worker":
            host = self.reached_at(strategy.cluster_environment, strategy.num_nodes)
            strategy.job.serve(number, host, early=not self.begin_together)
            trainer = strategy.module.trainer
            # The Trainer must not call callbacks, loggers and data about an end, because they have not begun.
            trainer.callbacks = []
            trainer.loggers = []
            trainer.datamodule = None
            raise SystemExit(0)

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError if some ranks are servers, and the transport cannot form groups of the workers alone."""
        if not self.dedicated:
            return
        mpi = isinstance(transport, TorchTransport) and transport.backend_on(torch.device("cpu")) == "mpi"
        if mpi or not isinstance(transport, TorchTransport):
            raise ValueError(
                f"`{self._service.owner}(transport={transport!r})`: its groups are of all ranks, and some of them "
                'serve. Use `transport="torch"`, under any launcher, or `placement="colocated"`.'
            )

    def check_ranks(self, started: int) -> None:
        """Raise ValueError if there are more servers than ranks, or if no rank is left to train."""
        owner = self._service.owner
        if not self.dedicated and (self._service.num_servers or 0) > started:
            raise ValueError(
                f"`{owner}(num_servers={self.num_servers})`: there are {started} ranks, and each has one server beside "
                "it at most."
            )
        if self.num_serving >= started:
            raise ValueError(
                f'`{owner}(placement="dedicated", num_servers={self.num_servers})`: there are {started} ranks, and one '
                "at least must train. Start more, or let servers be processes beside the workers: "
                '`placement="colocated"`.'
            )


class ServerHandle:
    """A worker's access to the servers: it finds or starts them for each training, and connects the model with them.

    Args:
        service: Settings of the servers.
        roles: Roles of the ranks.
        job: Access to the job's store, where workers find dedicated servers.
    """

    def __init__(self, service: ServiceSettings, roles: ServerRoles, job: JobRanks) -> None:
        self._service = service
        self._roles = roles
        self._job = job
        self.servers: Servers | None = None
        self._run: int | None = None
        """Number of the run for which dedicated servers were called; None without such servers."""
        self.brings = False
        """Whether servers must replace their weights by this training's weights, because a checkpoint was restored."""
        self._warmup_steps = 0
        """Number of warm-up steps that are left."""
        self.groups = [ParameterGroup(0, 0, "delta", {})]
        """The parameter groups; each has its own table on the servers."""
        self.progress = WorkerSteps()
        """The steps that learning-rate schedulers count."""

    def describe(self, optimizers: Sequence[Optimizer], again: bool = False) -> None:
        """Set `groups`: how the servers create each optimizer. Do nothing if workers have the optimizers.

        `join` sends these descriptions to the servers.

        Args:
            optimizers: The optimizers of the training.
            again: Whether these optimizers were described before; since then a checkpoint may have changed their
                settings. Default False.
        """
        owner = self._service.owner
        if self._service.update_on_server:
            self.groups = described_again(owner, optimizers, self.groups) if again else described(owner, optimizers)

    def warn_of_momentum(self) -> None:
        """Warn if the policy for staleness lets momentum amplify late gradients."""
        if self._service.mode == "sync":
            return
        for group in self.groups:
            policy = make_policy(self._service.staleness, group.name, group.arguments)
            if (warning := momentum_warning(policy, group.name, group.arguments)) is not None:
                log.warning(warning)

    def find(self, averager: ReplicaEngine, connection: Connection, run: int, num_nodes: int, environment: Any) -> None:
        """Find or start the servers; all workers call this together.

        Args:
            averager: Averager of this worker.
            connection: Connection of the workers.
            run: Number of the run.
            num_nodes: Number of hosts that take part.
            environment: Cluster environment of this rank, from which its address follows.

        Raises:
            ValueError: there are more servers than ranks, or servers at ``server_address`` have other settings than
                this training.
            AsyncTrainingError: a server cannot be started.
            PeerLost: another worker is lost while this one waits, or a server at ``server_address`` does not answer.
            CollectiveTimeout: a dedicated server has not answered within 30 minutes.
        """
        world = connection.world
        steps = world.gather_objects(averager.step)
        rules = self._service.worker_rules(world.world_size)
        address = self._service.options.server_address
        self._warmup_steps = rules.warmup_steps
        if self.brings or address is None:
            # Servers will have this training's weights, and steps of the checkpoint count for the warm-up.
            self._warmup_steps = max(0, rules.warmup_steps - max(steps))
        with_warmup = replace(rules, warmup_steps=self._warmup_steps)
        if address is not None:
            self.servers = Servers.at(address, rules)
        elif self._roles.dedicated:
            self._run = run
            self.servers = self._call(connection, run, with_warmup)
        else:
            # If all ranks are on one host, shared memory is enough, and servers need no address for other hosts.
            together = len({*world.gather_objects(machine_name())}) == 1
            start = ServerStart(with_warmup, None if together else _own_address(environment), self._shelving(world))
            self._roles.check_ranks(world.world_size)
            self.servers = Servers.start(world, self._service.num_servers or num_nodes, start)
        if rules.mode == "sync":
            self.progress = WorkerSteps(steps, sys.maxsize, 1)
        else:
            first, *_ = self.groups
            policy = make_policy(rules.staleness, first.name, first.arguments)
            self.progress = WorkerSteps(steps, self._warmup_steps, policy.buffer_size)
        _totals_of(averager).begin()

    def join(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        averager: ReplicaEngine,
        world: LightningCollectives | None = None,
    ) -> ParameterGroups:
        """Connect this worker's model with the servers.

        Rank 0 sends its weights to the servers; the other workers then pull these weights.

        Args:
            module: The user's module.
            optimizers: The module's optimizers.
            averager: Averager of this worker; it holds the worker's name and the totals of its pushes.
            world: Collectives over the workers, which all call this together. Default None: this worker calls it alone,
                and the servers have weights already.

        Returns:
            The tables by which this worker pushes and pulls, in the sequence of `groups`.

        Raises:
            AsyncTrainingError: a server has other settings or another model.
        """
        service = self._service
        servers = self.servers
        assert servers is not None
        name = servers.name_of(averager.sync_points.name)
        workers = []
        for number, group in enumerate(self.groups):
            named = keys_of(module, self._param_groups(optimizers, group))
            plan = plan_of(named, len(servers.addresses), service.options.bigarray_bound)
            if world is not None:
                rank_zero_info(f"{service.owner}, {group.name}: {plan}")
            client = Client(
                name, servers.dials(plan), plan.fingerprint(), 2 * REQUEST_S, compression=service.compression,
                table=number, overlap=service.overlap,
            )  # fmt: skip
            workers.append(Worker(named, plan, client))
        first = world is not None and world.rank == 0
        if first:  # rank 0 gives the servers its weights, and the optimizers' state of a checkpoint
            for group, worker in zip(self.groups, workers, strict=True):
                served = service.update_on_server
                state: Any = state_of(optimizers[group.optimizer], worker.params) if served else ({}, ())
                left = self._warmup_steps if self.brings else None
                how: Any = {"anew": self.brings, "warmup_steps": left}
                worker.start(group.name, group.arguments, state, staleness=service.staleness, **how)
        self.brings = False
        tables = ParameterGroups(workers, _totals_of(averager))
        if world is not None:
            # The exchange makes the other workers wait until the servers have rank 0's weights.
            version, *_ = world.gather_objects(tables.updates(self.groups))
            self.progress.begin(version)
        # The other workers join now that the servers have weights, because they pull these.
        if not first:
            for group, worker in zip(self.groups, workers, strict=True):
                worker.start(group.name, group.arguments, staleness=service.staleness)
        return tables

    def end(self, in_order: bool, first: bool) -> None:
        """End the servers once no worker needs them.

        Args:
            in_order: True: training is over. False: this rank has failed, and the others may go on with the servers.
            first: Whether this is the first worker, which tells the servers of other ranks that training is over.
        """
        servers = self.servers
        self.servers = None
        if servers is not None:
            servers.close(in_order, tells=first)
        run = self._run
        self._run = None
        if run is not None and in_order and first:
            try:
                JobBoard(self._job.store()).dismiss(run)
            except (DistNetworkError, DistStoreError, ConnectionError) as error:  # servers end with the store, too
                log.warning("Servers were not told that run %d is over: %s", run, error)

    def handed_over(self) -> dict[str, Any]:
        """Return the state with which a joining rank calls `take_handed_over`."""
        servers = self.servers
        return {
            "servers": [] if servers is None else servers.addresses, "run": self._run,
            "job": "" if servers is None else servers.job, "progress": self.progress.plain(),
        }  # fmt: skip

    def take_handed_over(self, told: dict[str, Any]) -> None:
        """Use the servers of the other workers, on a joining rank.

        ``told`` is the result of `handed_over` on rank 0.
        """
        self._run = told["run"]
        self.progress.take(told["progress"])
        self.servers = self._at(told["servers"])
        self.servers.job = told["job"]

    def _call(self, connection: Connection, run: int, rules: WorkerRules) -> Servers:
        """Ask the dedicated servers to start, wait until they have started, and return them.

        All workers call this together.
        """
        world = connection.world
        board = JobBoard(self._job.store())
        shelving = self._shelving(world)
        if world.rank == 0:
            board.call(run, self._roles.num_servers, rules, shelving)

        def check() -> None:
            connection.membership.check()
            check_start()

        return self._at(board.answers(run, self._roles.num_servers, WaitWithLog(world.rank, _ANSWERS, check)))

    def _at(self, addresses: Sequence[Mapping[str, Any]]) -> Servers:
        """Return the servers at these addresses.

        When a worker cannot reach a dedicated server later, it raises the error that this server has written to the
        store, if there is one.
        """
        start_is_over()
        options = self._service.options
        run = self._run
        if run is None:
            return Servers(addresses, of_this_run=options.server_address is None, come_back=options.folder is not None)
        board = JobBoard(self._job.store())

        def check(server: int) -> None:
            # A lost store is not the server's error, and heartbeats report it.
            with suppress(DistNetworkError, DistStoreError, ConnectionError):
                board.check(run, server)

        return Servers(addresses, check=check)

    def _shelving(self, world: LightningCollectives) -> Shelving:
        """Return the settings of snapshots, with a new folder for each training.

        A training must neither load the snapshots of another training, nor delete them.
        """
        folder = self._service.options.folder
        if folder is None:
            return Shelving()
        first, *_ = world.gather_objects(f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}")
        rank_zero_info(f"{self._service.owner}: snapshots of servers are in {folder}/{first}")
        return Shelving(f"{folder}/{first}", float(self._service.options.snapshot_every or Shelving().every_s))

    def _param_groups(self, optimizers: Sequence[Optimizer], group: ParameterGroup) -> list[Any]:
        """Return the optimizers' parameter groups that are in this table.

        With the optimizer on the servers, each group has its own table. Otherwise one table holds all groups.
        """
        if self._service.update_on_server:
            return [optimizers[group.optimizer].param_groups[group.group]]
        return [each for optimizer in optimizers for each in optimizer.param_groups]


def _totals_of(averager: ReplicaEngine) -> PushTotals:
    return cast(PushTotals, averager.summary.totals)


def _own_address(environment: Any) -> str:
    address = getattr(environment, "own_address", None)  # Horovod's ranks know no address of the first one
    return address or facing(environment.main_address, environment.main_port)
