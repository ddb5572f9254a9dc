"""The tables of one worker on its servers: one for each group of parameters with settings of its own.

A table holds the weights and the optimizer state of a group. `ParameterGroups` makes requests for all tables. Functions
of this module describe the optimizers of a training to servers, and move the optimizers' state.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_async.parameter_server.client import ServerAnswer
from lightning_async.parameter_server.metrics import PushTotals
from lightning_async.parameter_server.optimizers import Scalars, begun, make_optimizer
from lightning_async.parameter_server.partition import TABLES
from lightning_async.parameter_server.worker import OptimizerState, Send, Worker

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # arguments that do not change results
_OF_SERVERS = {"begun", "reach"}  # scalars of servers' optimizers that torch does not have


class ParameterGroups:
    """The tables of one worker on its servers, each with a `Worker`.

    Used by one thread at a time, except for `give_up`.

    Args:
        workers: One `Worker` for each table.
        totals: Totals of the requests. Default: new ones.
    """

    def __init__(self, workers: Sequence[Worker], totals: PushTotals | None = None) -> None:
        self.workers = list(workers)
        self._totals = totals or PushTotals()
        self._asked: Sequence[int] = ()
        self.called = False
        """`ServerAnswer.called` of the last push."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the weights that were pulled last: for each table in turn, one version for each server."""
        return tuple(version for worker in self.workers for version in worker.versions)

    @property
    def restored(self) -> int:
        return sum(worker.restored for worker in self.workers)

    def updates(self, groups: Sequence[ParameterGroup]) -> int:
        """Return how many optimizer steps, summed over all optimizers, the weights that were pulled last contain.

        Args:
            groups: Group of parameters of each table.

        >>> from types import SimpleNamespace as Table
        >>> tables = ParameterGroups([Table(versions=(3, 2)), Table(versions=(3, 3)), Table(versions=(5,))])
        >>> first, second = ParameterGroup(0, 0, "SGD", {}), ParameterGroup(0, 1, "SGD", {})
        >>> tables.updates([first, second, ParameterGroup(1, 0, "Adam", {})])
        8
        """
        most: dict[int, int] = {}
        for group, worker in zip(groups, self.workers, strict=True):
            # An optimizer's groups step together, so they count once.
            most[group.optimizer] = max(most.get(group.optimizer, 0), *worker.versions)
        return sum(most.values())

    @property
    def in_step(self) -> bool:
        return any(worker.in_step for worker in self.workers)

    @property
    def pulled(self) -> bool:
        """Whether the last request has pulled weights."""
        return any(self.workers[table].pulled for table in self._asked)

    def take_(self) -> None:
        """Write the weights that the last request has pulled into the parameters of the tables that it asked for."""
        for table in self._asked:
            if self.workers[table].pulled:
                self.workers[table].take_()

    def written(self, coming: bool, every: bool) -> list[str]:
        return [name for worker in self.workers for name in worker.written(coming, every)]

    @contextmanager
    def backward(self, send: Send | None) -> Iterator[None]:
        """Send gradients during the block's backward pass, see `StreamingPush`.

        Args:
            send: Function that runs the requests on another thread. None: nothing is sent in the block, and the next
                push sends all gradients.
        """
        for worker in self.workers:
            worker.begin_gradients()
            if send is not None:
                worker.ahead.begin(send)
        try:
            yield
        # Parts that were sent must not be taken for the next pass's gradients.
        except BaseException:
            for worker in self.workers:
                worker.ahead.give_up()
            raise

    def fill_gradients(self, tables: Sequence[int]) -> None:
        for table in tables:
            self.workers[table].fill_gradients()

    def has_gradients(self, tables: Sequence[int]) -> bool:
        return any(p.grad is not None for table in tables for p in self.workers[table].params)

    def is_finite(self, tables: Sequence[int]) -> bool:
        return all(self.workers[table].is_finite for table in tables)

    def push(self, rates: Mapping[int, float | None], **how: Any) -> None:
        """Push the gradients of some tables.

        Args:
            rates: Learning rate of the push, by the number of the table; None: the rate of the servers' optimizer.
            **how: Further arguments of `Worker.push`, for all these tables.
        """
        self._asked = list(rates)
        self._count([self.workers[table].push(lr=lr, **how) for table, lr in rates.items()], how["weight"] > 0.0)

    def fill_change(self) -> None:
        for worker in self.workers:
            worker.fill_change()

    @property
    def has_change(self) -> bool:
        return any(worker.has_change for worker in self.workers)

    def push_change(self, **how: Any) -> None:
        """Push the change of all tables' parameters that `fill_change` has computed.

        ``how`` is passed to `Worker.push_change`.
        """
        self._asked = range(len(self.workers))
        self._count([worker.push_change(**how) for worker in self.workers], how["weight"] > 0.0)

    def meet(self) -> None:
        """Pull the servers' actual weights of all tables, even if workers compute gradients at predicted weights."""
        self._asked = range(len(self.workers))
        for worker in self.workers:
            worker.meet()
            self._totals.moved(0, worker.traffic[1])

    def rest(self, sync_point: int) -> None:
        for worker in self.workers:
            worker.client.rest(sync_point)

    def lags(self) -> list[dict[str, Any]]:
        self._asked = ()
        return [lags for worker in self.workers for lags in worker.client.lags()]

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint: the residual of compression. Return None if there is none."""
        residual = {name: each for worker in self.workers for name, each in worker.carried_residual().items()}
        return {"carried_residual": residual} if residual else None

    def load_residual(self, saved: Mapping[str, Any]) -> None:
        for worker in self.workers:
            worker.load_residual(saved.get("carried_residual", {}))

    def fill_state(self, optimizer: Optimizer, tables: Sequence[int]) -> None:
        self._asked = ()
        for table in tables:
            fill_state(optimizer, self.workers[table])

    def _count(self, answers: Sequence[ServerAnswer], filled: bool) -> None:
        """Add the answers to the last request to the totals; ``filled`` says whether its pushes had contents."""
        self.called = any(answer.called for answer in answers)
        for table in self._asked:
            pushed, pulled = self.workers[table].traffic
            self._totals.moved(pushed * filled, pulled * self.workers[table].pulled)
        if filled:
            # One lag for each push: the worst over tables and servers.
            self._totals.late(max(lag for answer in answers for lag in answer.lags))

    def give_up(self) -> None:
        for worker in self.workers:
            worker.client.give_up()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class ParameterGroup(NamedTuple):
    """A group of parameters of one optimizer, which has a table on the servers.

    Args:
        optimizer: Index of the optimizer in the training.
        group: Index of the group in the optimizer.
        name: Name of the optimizer for `make_optimizer`.
        arguments: Arguments of the optimizer for `make_optimizer`.
    """

    optimizer: int
    group: int
    name: str
    arguments: dict[str, Any]


def described(owner: str, optimizers: Sequence[Optimizer]) -> list[ParameterGroup]:
    """Return, for each parameter group, the name and the arguments with which servers create its optimizer.

    The learning rate among the arguments is only the first one, because each push has its own learning rate.

    Args:
        owner: Name of the strategy, for messages.
        optimizers: The optimizers of the training.

    Raises:
        ValueError: Servers cannot have one of the optimizers.

    >>> described("Strategy", [torch.optim.Adagrad([torch.zeros(1)], lr=0.1)])[0].arguments
    {'eps': 1e-10, 'initial_accumulator_value': 0, 'lr': 0.1, 'lr_decay': 0, 'maximize': False, 'weight_decay': 0}
    """
    rest = f"Pass `{owner}(update_on_server=False)`: the optimizer is the worker's then."
    found = [group for number, optimizer in enumerate(optimizers) for group in _groups(number, optimizer, rest)]
    if len(found) > TABLES:
        raise ValueError(f"{len(found)} groups of parameters: servers have {TABLES} at most, each with its own. {rest}")
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if twice := len(params) - len({id(p) for p in params}):
        raise ValueError(
            f"{twice} parameters are in two optimizers, and servers of one do not hear of the other's steps. {rest}"
        )
    return found


def described_again(
    owner: str, optimizers: Sequence[Optimizer], before: Sequence[ParameterGroup]
) -> list[ParameterGroup]:
    """Return the descriptions of the parameter groups, as `described`, of optimizers that have loaded a checkpoint.

    Args:
        owner: Name of the strategy, for messages.
        optimizers: The optimizers of the training.
        before: Descriptions from before the load. Their learning rates are kept in place of the loaded ones.
    """
    found = described(owner, optimizers)
    rates = [{key: was.arguments[key] for key in ("lr",) if key in was.arguments} for was in before]
    return [now._replace(arguments={**now.arguments, **rate}) for now, rate in zip(found, rates, strict=True)]


def rates_of(optimizer: Optimizer, groups: Sequence[ParameterGroup], tables: Sequence[int]) -> dict[int, float | None]:
    """Return the learning rate of each of these tables for a push, by the number of the table.

    Raises ValueError if a setting other than the learning rate has changed since training began.
    """
    rates: dict[int, float | None] = {}
    for table in tables:
        now = optimizer.param_groups[groups[table].group]
        sent = groups[table].arguments
        for name in sent.keys() - {"lr"}:
            if (value := _plain(now[name])) != sent[name]:
                raise ValueError(
                    f"{groups[table].name}'s `{name}` was {sent[name]!r} as training began, and is {value!r} now: of "
                    "all settings servers hear of new learning rates only. Leave it as it is (of a `OneCycleLR` or "
                    "`CyclicLR`, `cycle_momentum=False`), or pass `update_on_server=False`."
                )
        rates[table] = float(now["lr"])
    return rates


def _reader(name: str) -> Any:
    """Return a method of `HeldState` that reads entries as `dict` does, and refuses to if they were never fetched."""

    def read(state: HeldState, *args: Any) -> Any:
        state.check_fetched()
        return getattr(dict, name)(state, *args)

    return read


class HeldState(defaultdict[Any, Any]):
    """The state of an optimizer that servers hold, as it was fetched last. Users' changes of it raise an error.

    During training, it replaces the attribute ``state`` of the optimizer. While nothing was fetched it is empty, and a
    loop over it that is to change entries would change nothing. So reading it raises an error, too, after a first step.

    Args:
        optimizer: The optimizer.
        fetches: Whether this worker fetches the state before a checkpoint reads it, as rank 0 does. Without this, an
            empty state may be read. Default: True.
    """

    def __init__(self, optimizer: Optimizer, fetches: bool = True) -> None:
        super().__init__(dict, optimizer.state)
        self._optimizer = optimizer
        self._lacks_state = False
        """Whether servers may have a state by now of which nothing was fetched."""
        self._fetches = fetches
        self._fetched = self._marks()
        optimizer.state = self

    def release(self) -> None:
        """Give the optimizer a plain state again, unless another one was loaded."""
        if self._optimizer.state is self:
            self._optimizer.state = defaultdict(dict, dict.items(self))

    def drop(self) -> None:
        """Empty the state, which was fetched for a moment only."""
        dict.clear(self)
        self.mark_fetched()

    def mark_fetched(self) -> None:
        """Record that the state is as it was fetched, so that `check_unchanged` finds later changes."""
        self._fetched = self._marks()
        self._fetches = False
        self._lacks_state = False

    def check_unchanged(self) -> None:
        """Raise ValueError if other code has replaced the state or its tensors, or changed these in place."""
        if self._optimizer.state is not self or self._marks() != self._fetched:
            self._refuse()
        self._lacks_state = self._fetches and not len(self)

    def check_fetched(self) -> None:
        """Raise ValueError if the servers have a state by now, and nothing of it was fetched."""
        if self._lacks_state:
            raise ValueError(
                f"The state of {type(self._optimizer).__name__} was read in training. Servers hold it, and this worker "
                "has none. Use `ParameterServerStrategy(update_on_server=False)`: the optimizer is the worker's then."
            )

    def _marks(self) -> list[tuple[int, int]]:
        tensors = (value for state in dict.values(self) for value in state.values() if isinstance(value, Tensor))
        return [(id(tensor), tensor._version) for tensor in tensors]

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(dict.items(self))  # copies are plain

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"The state of {type(self._optimizer).__name__} was changed in training (reset, replaced or written to). "
            "Servers hold it and would not hear of it. Use `ParameterServerStrategy(update_on_server=False)`: the "
            "optimizer is the worker's then."
        )

    __iter__ = _reader("__iter__")
    __contains__ = _reader("__contains__")
    get = _reader("get")
    keys = _reader("keys")
    values = _reader("values")
    items = _reader("items")
    __setitem__ = __delitem__ = __missing__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]


def refuse_groups(param_group: Mapping[str, Any]) -> None:
    """Raise ValueError. During training, this function replaces an optimizer's ``add_param_group``."""
    raise ValueError(
        "`add_param_group` in training: parameter servers have those parameters that optimizers have as training "
        "begins. Give the optimizer all of them then, frozen ones, too (`requires_grad_(False)`): servers do not step "
        "a parameter without a gradient."
    )


def _groups(number: int, optimizer: Optimizer, rest: str) -> list[ParameterGroup]:
    kind = type(optimizer)
    name = kind.__name__
    # Servers make the optimizer by its name in torch.optim, and a subclass may share that name.
    if getattr(torch.optim, name, None) is not kind:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is no class of torch.optim, and servers run no code of others. "
            f"{rest}"
        )
    known = set(inspect.signature(kind).parameters) - _IMPLEMENTATION - {"params"}
    found = []
    for i, group in enumerate(optimizer.param_groups):
        arguments = {key: _plain(group[key]) for key in sorted(known & group.keys())}
        try:
            # Arguments travel as JSON.
            json.dumps(arguments)
        except TypeError as error:
            raise ValueError(f"{name}'s arguments cannot be sent to servers ({error}). {rest}") from error
        try:
            make_optimizer(name, arguments, known=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} {rest}") from error
        found.append(ParameterGroup(number, i, name, arguments))
    return found


def keys_of(module: nn.Module, groups: Sequence[Mapping[str, Any]]) -> dict[str, nn.Parameter]:
    """Return the groups' parameters by name, in the module's order; raise ValueError if some are not the module's."""
    theirs = {id(p) for group in groups for p in group["params"]}
    found = {name: p for name, p in module.named_parameters() if id(p) in theirs}
    if len(found) < len(theirs):
        raise ValueError(
            f"An optimizer has {len(theirs) - len(found)} parameters that are not the module's, and servers have no "
            "others. Make what they belong to an attribute of the module."
        )
    return found


def state_of(optimizer: Optimizer, params: Sequence[Tensor]) -> OptimizerState:
    """Return an optimizer's state for servers."""
    fields: dict[str, list[Tensor | None]] = {}
    scalars: list[Scalars] = []
    for number, p in enumerate(params):
        values = {name: value for name, value in optimizer.state.get(p, {}).items() if value is not None}
        plain = {}
        for name, value in sorted(values.items()):
            if isinstance(value, Tensor) and (value.dim() or value.numel() != 1):
                fields.setdefault(name, [None] * len(params))[number] = value
            else:
                plain[name] = float(value)
        scalars.append(begun(plain) if values else {})  # a parameter that was never stepped has no state
    return dict(sorted(fields.items())), scalars


def fill_state(optimizer: Optimizer, worker: Worker) -> None:
    """Copy the servers' optimizer state of a worker's parameters into torch's optimizer."""
    replies, _ = worker.read("params")
    fields = {name: worker.read(name)[1] for name in replies[0]["fields"] if name != "params"}
    for number, (p, of_servers) in enumerate(zip(worker.params, worker.scalars_of(replies), strict=True)):
        scalars = {name: torch.tensor(float(value)) for name, value in of_servers.items() if name not in _OF_SERVERS}
        found = {name: tensors[number].to(p.device) for name, tensors in fields.items()}
        # Before a parameter's first step, torch's optimizers have no state of it either.
        if not (of_servers or any(bool(tensor.any()) for tensor in found.values())):
            continue
        if p.is_complex():  # servers hold pairs of real numbers, torch's state is complex
            found = {name: torch.view_as_complex(tensor) for name, tensor in found.items()}
        if found or scalars:
            dict.__setitem__(optimizer.state, p, {**scalars, **found})  # a `HeldState` refuses others' changes
    if isinstance(optimizer.state, HeldState):
        optimizer.state.mark_fetched()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
