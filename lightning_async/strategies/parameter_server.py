"""`ParameterServerStrategy`: workers push gradients to servers, which hold the weights, and pull weights from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

from torch.optim import Optimizer

from lightning_async.algorithms.compression import Bf16, Fp8, Int8, PushCompressionName, TopK, TwoBit, make_compression
from lightning_async.algorithms.staleness import StalenessPolicy
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.replica import BufferPolicies
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.generation import Generation
from lightning_async.membership.launcher_channel import REJOIN
from lightning_async.membership.startup import naming_the_stores_host
from lightning_async.parameter_server.metrics import PushTotals
from lightning_async.parameter_server.tables import ParameterGroups
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.strategies.rank_mapping import RankMap, next_run, numbered_last
from lightning_async.strategies.server_lifecycle import JobRanks, Servers
from lightning_async.strategies.server_options import (
    Mode,
    Placement,
    ServerOptions,
    ServiceSettings,
    mode_of,
    policy_of,
)
from lightning_async.strategies.server_placement import ServerHandle, ServerRoles
from lightning_async.strategies.server_steps import PushSteps
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.checkpoint.checkpoint_state import ALIKE, REPLICAS
from lightning_async.trainer.environment.settings import check_equal
from lightning_async.trainer.namespace import name as namespace
from lightning_async.trainer.namespace import pytorch
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName


class ParameterServerStrategy(AsyncStrategy):
    r"""A strategy in which workers push gradients to servers that hold weights and optimizer, and pull weights.

    Ranks are workers. Servers are further processes on the workers' hosts, or the last ranks; each server holds a shard
    of every parameter group. In asynchronous mode a push of worker :math:`i`, computed at version :math:`b` of the
    weights, makes the next version

    .. math:: x_{v+1} = x_v - \eta\, u(g_i(x_b)), \qquad \text{lag } \tau = v - b

    where :math:`u` is the optimizer's update, with the correction of the lag that ``staleness`` names. In synchronous
    mode one push of each worker, of :math:`n_i` samples, makes the next version

    .. math:: x_{v+1} = x_v - \eta\, u\Big(\frac{\sum_i n_i\, g_i(x_v)}{\sum_i n_i}\Big)

    as training in one process on the joined batch would. When all ranks wait for one another (validation, the end of an
    epoch, checkpoints), all have the same version. Servers make the optimizers of ``configure_optimizers`` by their
    names; learning rates go with every push, and checkpoints hold the optimizers' state in torch's form. Gradients are
    clipped before they are pushed. A parameter without a gradient counts as one whose gradient is zero.

    Training does not wait for a worker that has died. A server that has died is started again with all of its state,
    and every push that it had acknowledged is in the weights exactly once.

    Args:
        mode: ``"async"`` (default): each push is applied when it arrives. ``"sync"``: pushes are applied together, see
            above. ``"ssp"``: each push is applied when it arrives, and a worker waits if its weights would lack more
            than ``max_staleness`` of the slowest worker's pushes. Pushes are counted from the last sync point. MXNet's
            names ("dist_async", "dist_sync", "dist_sync_device" and others) are allowed, too.
        num_servers: Number of servers. None (default): one on each host; with dedicated servers, one.
        placement: ``"colocated"`` (default): servers are further processes on the workers' hosts. ``"dedicated"``: the
            last ``num_servers`` ranks are servers. They load no data and never train. Their first call of a Trainer
            method runs the server until all workers have ended, and then ends the process with exit code 0.
        update_on_server: True (default): the optimizer is on the servers, see above. False: each worker has its own
            optimizer, of any class, and pushes the changes of its weights. Servers add these changes; in sync mode they
            add their mean, in which all workers weigh the same.
        staleness: Correction of the lag. ``"auto"`` (default): `Dana` with `GapAware` for SGD with momentum, and
            `GapAware` rates for other optimizers. ``"none"``, another short name, or a policy of
            `algorithms.staleness`.
        max_staleness: Largest number of the slowest worker's pushes that weights may lack; only for ``mode="ssp"``.
            Default 3.
        warmup_steps: Number of first steps that are taken as in mode ``"sync"``; only for the other modes. Momentum
            that each worker keeps for itself (`Dana`) begins after these steps. Default 0.
        pull_every: Number of pushes between pulls. Default 1.
        compression: Compression of pushes: ``"bf16"``, ``"fp8"``, ``"int8"``, ``"2bit"``, ``"topk"``, or a value of
            `algorithms` with its own arguments. What compression drops from a push is added to the next push. Default
            ``"none"``.
        overlap: Whether the next batch is computed while a push is under way, at weights that lack this push. Default
            False.
        buffers: Treatment of floating-point buffers (BatchNorm statistics) at sync points, see
            `AsyncAveragingStrategy`. Default ``"average"``.
        min_replicas: Smallest number of workers with which training goes on, see `AsyncAveragingStrategy`.
        max_replicas: Largest number of workers up to which joining ranks are admitted, see `AsyncAveragingStrategy`.
        timeouts: Time limits of waits, see `Timeouts`. Default: those of `Timeouts()`.
        transport: Starts the ranks and moves the workers' bytes, see `AsyncAveragingStrategy`. Default ``"auto"``.
        options: Rarer settings: snapshots, servers started with ``lightning-async serve``, and more. Default
            `ServerOptions()`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or two arguments contradict each other; when training begins, there are
            more servers than ranks, or servers do not support the optimizer.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the key-value store
    of MXNet; Ho et al., 2013, for ``"ssp"``.

    >>> ParameterServerStrategy("dist_sync")
    <ParameterServerStrategy for `lightning.pytorch`: mode='sync'>
    """

    def __init__(
        self,
        mode: str = "async",
        *,
        num_servers: int | None = None,
        placement: Placement = "colocated",
        update_on_server: bool = True,
        staleness: str | StalenessPolicy = "auto",
        max_staleness: int | None = None,
        warmup_steps: int = 0,
        pull_every: int = 1,
        compression: PushCompressionName | Bf16 | Fp8 | Int8 | TwoBit | TopK = "none",
        overlap: bool = False,
        buffers: BufferPolicies = "average",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        timeouts: Timeouts | None = None,
        transport: Transport | TransportName = "auto",
        options: ServerOptions | None = None,
    ) -> None:
        owner = type(self).__name__
        self.service = ServiceSettings(
            owner=owner, mode=mode_of(owner, mode), num_servers=num_servers, placement=placement,
            update_on_server=update_on_server,
            staleness=policy_of(staleness, update_on_server), max_staleness=max_staleness, warmup_steps=warmup_steps,
            pull_every=pull_every, compression=make_compression(owner, compression), overlap=overlap,
            options=ServerOptions() if options is None else options,
        )  # fmt: skip
        self.mode: Mode = self.service.mode
        self.update_on_server = update_on_server
        self.warmup_steps = warmup_steps
        self.quorum = self.service.options.quorum
        configuration_checks.check_policies(owner, buffers, "keep", "samples", 1.0)
        config = AveragerConfig(
            timeouts=Timeouts.or_default(timeouts), min_replicas=min_replicas, max_replicas=max_replicas
        )
        roles = ServerRoles(self.service)
        self.roles: ServerRoles = roles  # pyright: ignore[reportIncompatibleVariableOverride]
        super().__init__(
            config, buffers=buffers, lr_clock=self.service.options.lr_clock, transport=roles.transport(transport)
        )
        self.roles.check_transport(self.transport)
        self.quorum.check_transport(self.transport)
        # Unlike a lambda, this can be pickled with the strategy for ranks that are spawned.
        self.job = JobRanks(self.transport, partial(getattr, self, "place"), config.timeouts.dead_after)
        self.handle = ServerHandle(self.service, roles, self.job)

    strategy_name = "parameter_server"
    alone = "without servers: nothing is pushed, and the optimizer is its own"
    make_step_runner = PushSteps
    served = True

    def make_engine(self, control: ControlPlane, meet: Callable[[SyncPointKind], Arrival]) -> ReplicaEngine:
        return ReplicaEngine(control, PushTotals())

    @property
    def servers(self) -> Servers | None:
        """The servers of the training under way; None before and after it."""
        return self.handle.servers

    def connect_ranks(self) -> None:
        if not self.quorum.is_all and self.live_ranks is None and not self.joining:
            self._join_or_start()
        try:
            super().connect_ranks()
        finally:
            # Also after a failure: servers that are ranks end when they have seen each worker come and end.
            if self.roles.dedicated:
                self.job.register(*self.roles.of(self.cluster_environment))
        if self.roles.dedicated and self.connection is not None:
            # The store must last until these servers have seen the workers' end.
            self.connection.on_end = lambda: None

    def _join_or_start(self) -> None:
        """Wait until enough workers have started for training to begin.

        A worker that starts later becomes a joining rank.

        Raises:
            ValueError: the quorum is larger than the number of workers, or smaller than ``min_replicas`` allows.
            CollectiveTimeout: too few workers have started within 30 minutes.
        """
        rank = self.place.global_rank()
        world_size = self.place.world_size()
        fewest = self.config.survives(world_size)
        self.quorum.check_workers(world_size, fewest)
        with naming_the_stores_host(rank):
            workers = self.quorum.first_workers(self.job.store(early=True), rank, world_size)
        if rank not in workers:
            os.environ[REJOIN] = "1"
            self._environment = numbered_last(self._environment)
        elif len(workers) < world_size:
            run = next_run()
            wanted = self.config.fewest(world_size)
            started = RankMap(Generation.first(0, world_size), run, fewest, wanted=wanted)
            self.live_ranks = started.begun_by(workers.index(rank), [str(number) for number in workers], run)
            self.roles.expects_more = True

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.update_on_server:
            self.handle.describe(self.optimizers)
            if self.world is not None:
                check_equal(self.world, {"optimizers": repr([tuple(group) for group in self.handle.groups])})
            if self.world_size > 1:
                configuration_checks.check_momentum_stays(type(self).__name__, trainer.lr_scheduler_configs)
            if self.global_rank == 0:
                self.handle.warn_of_momentum()

    def join_servers(self, averager: ReplicaEngine) -> ParameterGroups:
        """Find or start the servers, and connect this worker's model with them; all workers call this together.

        A joining rank calls it alone, and connects with the servers whose addresses it has received from rank 0.
        """
        connection = self.connection
        assert connection is not None
        handle = self.handle
        handle.describe(self.optimizers, again=True)
        if handle.servers is not None:
            return handle.join(self.module, self.optimizers, averager)
        handle.brings |= self.saved.origin != "none"
        handle.find(averager, connection, self.num_runs, self.num_nodes, self.cluster_environment)
        return handle.join(self.module, self.optimizers, averager, connection.world)

    def go_on_without(self, names: Sequence[str], rank: int) -> None:
        if rank == 0 and self.servers is not None:  # so that servers do not wait for pushes of lost workers
            self.servers.forget(names)

    def handed_over(self) -> dict[str, Any]:
        return self.handle.handed_over()

    def take_handed_over(self, told: dict[str, Any]) -> None:
        self.handle.take_handed_over(told)

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        by_version = self.lr_clock == "samples" and self.update_on_server and self.mode != "sync"
        return self.handle.progress.steps if by_version and self._session is not None else None

    def start_over(self) -> None:
        super().start_over()
        self.handle.end(in_order=True, first=self.global_rank == 0)
        # The restored weights must replace those of the servers.
        self.handle.brings = True

    def teardown(self) -> None:
        failed = self.failed
        super().teardown()
        self.handle.end(in_order=not failed, first=self.global_rank == 0)

    @property
    def averages_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mode == "sync" and self.update_on_server

    @property
    def alike(self) -> frozenset[str]:
        """Names of the parts of a checkpoint that are equal on all ranks."""
        return ALIKE if self.update_on_server else REPLICAS

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._fetch_states([optimizer])
        return super().optimizer_state(optimizer)

    def states_here(self, alone_s: float | None = None) -> AbstractContextManager[None]:
        pusher = self._pusher
        return nullcontext() if pusher is None else pusher.states_here(alone_s)

    @property
    def _pusher(self) -> PushSteps | None:
        """The step runner of the present fit if it fetches optimizer state from servers, else None."""
        session = self._session
        return cast(PushSteps, session.step_runner) if self.update_on_server and session is not None else None

    def _fetch_states(self, optimizers: Iterable[Optimizer]) -> None:
        if self._pusher is not None:
            self._pusher.fetch_states(optimizers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.saved.leave_rule("")
        return checkpoint

    def summarise(self) -> None:
        super().summarise()
        # For a checkpoint that is saved after the servers have ended.
        self._fetch_states(self.optimizers)

    def settings(self) -> dict[str, object]:
        return {**super().settings(), **self.service.compared()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: mode={self.mode!r}>"


ParameterServerStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
