"""The base of every strategy of this package: ranks and their launch, one model at the start, collectives.

`ReplicatedStrategy` is the base class. `Roles` tells which ranks are replicas. Some launchers do not tell a process
whether it was restarted while other ranks train. `asks_the_store` returns whether the process must find this out from
the store.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async.comm.default_group import Numbering, default_group
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import PeerLost
from lightning_async.membership.generation import Generation
from lightning_async.membership.launcher_channel import CHANNEL, REJOIN, came_back
from lightning_async.membership.startup import AGENTS_STORE, naming_the_stores_host
from lightning_async.strategies.rank_mapping import (
    RankMap,
    among,
    begin_call,
    count_run,
    has_failed,
    keep_map,
    left_here,
    name_in_run,
    next_call,
    next_run,
    number_rank,
    numbered_last,
    run_name,
)
from lightning_async.trainer.configuration_checks import check_shareable
from lightning_async.trainer.data.samplers import split_evaluations
from lightning_async.trainer.environment.environments import JoiningEnvironment
from lightning_async.trainer.environment.settings import check_saved
from lightning_async.trainer.namespace import (
    CompiledMark,
    OwnSteps,
    Undo,
    check_object,
    fabric,
    make_equal,
    pytorch,
    rank_zero_info,
    refuse_elsewhere,
    set_for_now,
    sync_metrics_through,
    take_back,
)
from lightning_async.trainer.strategy_view import StrategyView
from lightning_async.transports.base import Connection, Transport
from lightning_async.transports.resolve import REGISTERED, TransportName, choose_transport

log = logging.getLogger(__name__)


_AUTO = "auto"


def asks_the_store(variables: Mapping[str, str]) -> bool:
    """Return whether this rank must ask the store whether it was restarted while the other ranks train.

    It must if ``LIGHTNING_ASYNC_REJOIN`` is "auto". It must also if this variable is not set and each of several ranks
    has its own torchrun agent: such an agent counts only the starts of its own rank, and does not know whether the
    other ranks were restarted, too. Any other value already tells whether this rank was restarted alone. With
    "torchrun", every restart that the agent counts is a restart of this rank alone.

    Args:
        variables: Environment variables of the rank.

    Raises:
        ValueError: the variable is "auto", but the store ends with rank 0.

    >>> agents = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}
    >>> asks_the_store({**agents, "WORLD_SIZE": "3"}), asks_the_store({**agents, "WORLD_SIZE": "1"})
    (True, False)
    >>> asks_the_store({**agents, "WORLD_SIZE": "3", "LIGHTNING_ASYNC_REJOIN": "torchrun"})
    False
    """
    outlives = variables.get(AGENTS_STORE) == "True"
    told = variables.get(REJOIN)
    if told == _AUTO and not outlives:
        raise ValueError(
            f"{REJOIN}={_AUTO} needs a store that outlives rank 0: start one at MASTER_ADDR and MASTER_PORT, as "
            f"examples/kubernetes.yaml does, and export {AGENTS_STORE}=True."
        )
    by_torchrun = outlives and "TORCHELASTIC_RUN_ID" in variables and CHANNEL not in variables
    several = variables.get("WORLD_SIZE", "1") != "1"
    return told == _AUTO or (told is None and by_torchrun and several and variables.get("LOCAL_WORLD_SIZE") == "1")


class Roles:
    """The roles of a strategy's ranks; in this base class, all ranks are replicas."""

    num_serving = 0
    """The number of ranks that are no replicas; these have the highest ranks."""
    begin_together = True
    """Whether training begins only when all ranks have started."""

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError if this transport does not support these roles."""

    def check_ranks(self, started: int) -> None:
        """Raise ValueError if these roles do not fit the number of ranks that were started."""

    def is_alone(self, world_size: int) -> bool:
        """Return whether a replica trains without any other process, given the number of live replicas."""
        return world_size == 1

    def take_part(self, strategy: Any) -> None:
        """Return at once on a replica; on another rank, do this rank's work and end the process."""


if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = pytorch("strategies.parallel").ParallelStrategy

T = TypeVar("T")


class ReplicatedStrategy(ParallelStrategy, StrategyView):
    """A strategy with one whole replica per rank, on the device of its local rank.

    Args:
        transport: Starts the ranks and moves their bytes; a `Transport`, or a short name, see `choose_transport`.
            Default ``"auto"``.
        timeouts: Time limits of waits; None for no heartbeats.
        gloo_timeout: Time after which Gloo inside Horovod gives up on a silent peer. It is used only if ``transport``
            is a short name that stands for Horovod. Default 30 s.

    Raises:
        TypeError: ``transport`` is no transport.
        ValueError: the name is unknown, or ``transport`` says how to start ranks that horovodrun has started already.
        ModuleNotFoundError: Horovod is requested, but not installed.
        RuntimeError: both torchrun and horovodrun have set this process's rank.
    """

    is_distributed = True
    replicated = True
    averages_gradients = True
    strategy_name: str
    roles = Roles()

    def __init__(
        self,
        *,
        transport: Transport | TransportName = "auto",
        timeouts: Timeouts | None,
        gloo_timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        self.transport = choose_transport(type(self).__name__, transport, gloo_timeout)
        self._environment: Any = None
        self._compiled = CompiledMark()
        super().__init__()
        self._timeouts = timeouts
        self._num_nodes = 1
        self._connection: Connection | None = None
        self.num_runs = self._operations = 0
        self.live_ranks: RankMap | None = left_here()
        """The `RankMap` of live ranks; None where no rank may be lost, and before the first session."""
        self.own_steps = OwnSteps()
        self._replica_undo: list[Undo] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy this strategy; while it is connected, objects of this package, such as the connection, are shared."""
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            shared = self._connection is not None and type(value).__module__.startswith("lightning_async.")
            vars(made)[name] = value if shared else copy.deepcopy(value, memo)
        return made

    @property
    def cluster_environment(self) -> Any:
        """Lightning's cluster environment of this rank, replaced if this process turns out to be a joining rank."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, environment: Any
    ) -> None:
        check_object(self, environment)
        self._environment = numbered_last(self.transport.environment(environment))
        self.roles.check_transport(self.transport)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.transport.root_device(self.parallel_devices, self.local_rank)

    @property
    def num_nodes(self) -> int:
        """Number of hosts that take part; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the rank and the number of ranks in the cluster environment, and the rank in Lightning's logging."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
            self.roles.check_ranks(environment.world_size())
        number_rank(self.global_rank)

    @property
    def global_rank(self) -> int:
        """Current rank; it may change when other ranks are lost and training goes on without them."""
        if self.live_ranks is not None:
            return self.live_ranks.generation.rank
        # The environment of a joining rank gives it the last number of all ranks, dedicated servers included.
        return min(super().global_rank, self.world_size - 1) if self.joining else super().global_rank

    @property
    def world_size(self) -> int:
        """Number of live replicas: lost ranks and dedicated servers do not count."""
        if self.live_ranks is not None:
            return self.live_ranks.generation.world_size
        return super().world_size - self.roles.num_serving

    @property
    def stable_id(self) -> str:
        """The number with which this rank was started."""
        return str(getattr(self.cluster_environment, "launchers", self.cluster_environment).global_rank())

    @property
    def joining(self) -> bool:
        return isinstance(self._environment, JoiningEnvironment) and self.live_ranks is None

    @property
    def num_averaged(self) -> int:
        return self.world_size if self.averages_gradients else 1

    @property
    def num_started(self) -> int:
        """Number of replicas at the start of the job, including those that were lost later."""
        return self.world_size if self.live_ranks is None else self.live_ranks.started

    def _configure_launcher(self) -> None:
        self._launcher = self.transport.launcher(self, self.num_processes, self.num_nodes, self._child_died)

    def run_call(self, trainer: Any, call: partial[Any]) -> Any:
        """Run a call of the Trainer, such as ``fit``, in this process, and return its result."""
        return call()

    def _child_died(self, local_rank: int, returncode: int) -> timedelta | None:
        """Report to the other ranks that a process of this host has ended.

        Args:
            local_rank: Local rank of the process.
            returncode: Exit status of the process.

        Returns:
            Time after which the launcher kills the other processes of this host; None if they train on.
        """
        rank = self.node_rank * self.num_processes + local_rank
        live_ranks = self.live_ranks
        # The others may have gone on without this rank already; its end changes nothing then.
        if live_ranks is not None and live_ranks.does_without(rank):
            return None
        # Without heartbeats the other ranks cannot learn of the death, so they are ended at once.
        if self._connection is None or self._timeouts is None:
            return timedelta(0)
        self._connection.report_death(rank, f"its process ended with status {returncode}")
        return None if live_ranks is not None and live_ranks.can_lose_one else self._timeouts.dead_after

    def setup_environment(self) -> None:
        # A process that was forked learns its number here.
        self.set_world_ranks()
        if self._comes_late():
            self._environment = numbered_last(self._environment)
        # Before the ranks connect, because dedicated servers are in no group of the workers.
        self.roles.take_part(self)
        super().setup_environment()
        if self.host is not None and self.num_started > 1 and not self.joining:
            self._begin_call()
        self.connect_ranks()
        # Lightning waits over torch's default group for ever, also for ranks that die, and ours know of them.
        connector = pytorch("trainer.connectors.data_connector")
        self._replica_undo.append(set_for_now(connector, "_InfiniteBarrier", self._prepare_data))

    @contextmanager
    def _prepare_data(self) -> Iterator[None]:
        yield
        self.barrier("prepare_data")

    def _begin_call(self) -> None:
        """Agree with all ranks whose processes live on those that begin this call of the Trainer.

        Ranks that were lost in an earlier call only because of an exception, which their script has caught, come back.

        Raises:
            PeerLost: too few ranks live; or a rank has died since the last call.
            StoreLost: the store is lost.
            CollectiveTimeout: live ranks do not make this call within 30 minutes.
            Evicted: the others have begun this call without this rank.
        """
        call = next_call()
        if call == 1:
            begin_call(call)
            return
        place = self.place
        before = list(getattr(place, "names", map(str, range(place.world_size()))))
        failed = has_failed()
        with naming_the_stores_host(self.global_rank):
            names = cast(Any, self.transport).call_roll(place, call, failed)
        begin_call(call)
        started = self.num_started
        lowest = cast(Any, self).fewest
        fewest = max(lowest, 2 if failed and len(before) > 1 else 1)
        if len(names) < min(fewest, started):  # `min_replicas` of more ranks is refused later, by its name
            raise PeerLost(
                f"rank {self.global_rank}: {len(names)} of {started} replicas are left for this call of the Trainer, "
                f"and fewer than {fewest} do not go on: the processes of the others have ended. See their logs, and "
                "start all ranks again."
            )
        stable_id = self.stable_id
        if (group := default_group()) is not None:
            # Also where no rank is new or lost for this rank: others may have gone on without it in the last call.
            group.begin_step()
            group.settle()
            group.stage = next_run(), 0
            group.renumber(Numbering(names.index(stable_id), len(names), group.stage))
        if names == before:
            if self.live_ranks is not None:
                self.live_ranks.joined = frozenset()
            return
        everyone = RankMap(Generation.first(0, started), 0, lowest, wanted=lowest)
        if names == list(everyone.names) and came_back() is None:
            self.live_ranks = None
            number_rank(int(stable_id))
        else:
            ever = () if self.live_ranks is None else self.live_ranks.ever
            run = next_run()
            self.live_ranks = everyone.with_joining_ranks(names.index(stable_id), names, run, ever)
            self.live_ranks.joined = frozenset()
        keep_map(self.live_ranks)
        log.warning(
            "Rank %s: this call of the Trainer begins with %d of %d ranks, %s in this sequence.",
            stable_id, len(names), started, ", ".join(names),
        )  # fmt: skip

    def _comes_late(self) -> bool:
        """Return whether the other ranks train already, as the store says; False if this rank need not ask the store.

        If ranks must ask the store, all of them call this in their first run.

        Raises:
            ValueError: an environment variable says that ranks must ask the store, but ``wait_for_workers`` lets
                training begin without some ranks.
            CollectiveTimeout: other ranks do not start, and no training is under way.
        """
        if self.host is None or not asks_the_store(os.environ):
            return False
        if not self.roles.begin_together:
            if os.environ.get(REJOIN) == _AUTO:
                raise ValueError(
                    f"{REJOIN}={_AUTO}: all ranks begin together, and `wait_for_workers` says that some come later. "
                    'Leave it at "all".'
                )
            return False
        rank = self.global_rank
        with naming_the_stores_host(rank):
            found = cast(Any, self.transport).assemble(self.cluster_environment)
        # As a launcher would set it, for `came_back` in this process and its forks.
        os.environ[REJOIN] = f"{found.again}@{found.attempt}"
        if found.again:
            log.warning("Rank %d was started again while others train.", rank)
        elif found.attempt:
            log.info("Rank %d begins with all others, which were started again, too.", rank)
        return bool(found.again)

    def connect_ranks(self) -> None:
        """Connect with the other ranks, if there are any; all ranks call this together."""
        if self.joining:
            if self.host is not None:
                cast(Any, self.transport).number_joining_rank(self.place, self.root_device, self.world_size)
        elif not self.roles.is_alone(self.world_size):
            run = count_run()
            elastic = {} if self.host is None else {"elastic": True}
            self.use(
                self.transport.connect(self.place, self.root_device, run_name(run), self._timeouts, **elastic), run
            )

    @property
    def place(self) -> Any:
        """The cluster environment of this process, with its current rank and the number of live replicas."""
        return among(self.live_ranks, self.cluster_environment, self.roles.num_serving)

    def use(self, connection: Connection, run: int) -> None:
        """Use this connection, which all ranks share, for run number ``run``."""
        self._connection = connection
        self.num_runs = run
        self._operations = 0
        connection.hear_deaths(partial(name_in_run, names=() if self.live_ranks is None else self.live_ranks.names))

    @property
    def connection(self) -> Connection | None:
        return self._connection

    @property
    def bucket_device(self) -> torch.device:
        """The device that holds the buckets in which payloads are sent and received."""
        return self.transport.bucket_device(self.root_device)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers' state as Lightning does, after checking that these optimizers can take it."""
        check_saved(self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name, and the names with a suffix for each way to start ranks from a notebook."""
        names = {cls.strategy_name + suffix: transport for suffix, transport in REGISTERED.items()}
        refuse_elsewhere(cls, names)
        for name, transport in names.items():
            description = f"{cls.__name__}(transport={transport!r})"
            strategy_registry.register(name, cls, description=description, override=True, transport=transport)

    @property
    def module(self) -> LightningModule:
        """The user's module; available once the Trainer has called `connect`."""
        return cast("LightningModule", self._users_module)

    @property
    def lightning_module(self) -> LightningModule | None:
        module = self._users_module
        # The test is here, not in `hide_from_trainer`, because Lightning reads this property fifty times a step.
        if module is not None and module._compiler_ctx is not None:
            self._compiled.hide_from_trainer(module)
        return module

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._users_module

    @_lightning_module.setter
    def _lightning_module(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, module: LightningModule | None
    ) -> None:
        """Store the module, and hide that it is compiled until the Trainer reads `launcher` or calls `connect`.

        Otherwise the Trainer would refuse a compiled module before it knows whether this strategy can train it.
        """
        self._users_module = module
        self._compiled.hide(module)

    @property
    def launcher(self) -> Any:
        self._compiled.show()
        return super().launcher

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._compiled.show()

    def setup_replica(self, trainer: Any) -> None:
        """Set up the replica: its precision, its device, the same model on all ranks and, in a fit, the optimizers.

        Evaluations and metrics are prepared in every stage.
        """
        fitting = trainer.state.fn == "fit"
        cast(Any, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(self.module)
        self.model_to_device()
        self.make_equal()
        self._replica_undo += split_evaluations(self, trainer)
        self._replica_undo += sync_metrics_through(lambda: self.world, self.module)
        if fitting:
            self.setup_optimizers(trainer)
            if self.world_size > 1 or self.shrinks:  # else no other rank can miss anything
                check_shareable(type(self).__name__, self.module, self.optimizers, self.averages_gradients)
            self._replica_undo += self.own_steps.install(trainer)
        self.setup_precision_plugin()
        if fitting:
            fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, self.root_device)

    def teardown(self) -> None:
        take_back(self._replica_undo)
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        self.own_steps.skipped = output is None
        if output is None and self.module.automatic_optimization:
            self.skip_batch()
        return output

    def skip_batch(self) -> None:
        """Leave the current batch uncounted, because `training_step` returned None in automatic optimization."""

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.own_steps.taking(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    def make_equal(self) -> None:
        if self.world is not None:
            make_equal(self.world, self.module)

    def tell_alone(self, why: str = "") -> None:
        """Log that there is only one rank, which trains as with a single device.

        Args:
            why: Consequence to add to the line, such as "so there is nothing to average". Default: none.
        """
        what = f"there is one rank only, and it trains as with a single device{why and ', '}{why}"
        rank_zero_info(f"{type(self).__name__}: {what}.")

    def disconnect(self, in_order: bool) -> None:
        """Close the connection.

        Args:
            in_order: Whether to wait until all ranks close it, so that no rank ends while another still uses it.
        """
        if self._connection is not None:
            self._connection.close(in_order)
            self._connection = None

    @property
    def world(self) -> LightningCollectives | None:
        """Collectives over all ranks; None before the ranks connect, after the run, and if this rank trains alone."""
        return self._connection.world if self._connection is not None else None

    def _together(self) -> AbstractContextManager[LightningCollectives | None]:
        """Return a context with collectives over all ranks; with None if this rank trains alone.

        During a run, these are the collectives of `world`. After a run, the ranks connect again for the duration of the
        context, for one operation such as ``trainer.save_checkpoint`` after ``fit``. A rank that has failed does not
        connect again.
        """
        # A rank that has failed must not wait for the others.
        if self._connection is not None or self.num_runs == 0 or self.failed or self.roles.is_alone(self.world_size):
            return nullcontext(self.world)
        # Each operation has a name of its own, so that ranks do not meet in the store entries of an earlier one.
        self._operations += 1
        return self.transport.short_world(self.place, f"{run_name(self.num_runs)}.{self._operations}")

    def barrier(self, name: str | None = None) -> None:
        with self._together() as world:
            if world is not None:
                world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._together() as world:
            return obj if world is None else world.broadcast(obj, src)

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        with self._together() as world:
            return tensor if world is None or not isinstance(tensor, Tensor) else world.reduce(tensor, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.reduce(torch.tensor(float(decision)), reduce_op="min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._together() as world:
            if world is None:
                return tensor.unsqueeze(0)
            # After a run, the collectives end with this call, before the backward pass.
            later = None if world is self.world else partial(self.reduce, reduce_op="sum")
            return world.all_gather(tensor, sync_grads, later)
