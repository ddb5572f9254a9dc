"""Parts of the loops' state that Lightning's checkpoint lacks: modes of modules, logged values, and metrics.

If a checkpoint has no state of a rank, functions of this module make one from another rank's state.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_async.data.random_states import of_another
from lightning_async.trainer.namespace import pytorch

log = logging.getLogger(__name__)


def beside(states: Mapping[int, dict[str, Any]], rank: int, path: str) -> dict[str, Any] | None:
    """Return a resume state for a rank without one in the checkpoint, made from another rank's state.

    The new state skips as many batches of this rank's own data as the rank with the lowest number has read. A sampler
    that shuffles has another order than before. If no rank has a state, the result is None: the epoch's data begins
    again.

    Args:
        states: Saved states of `Resume`, by stable id.
        rank: The rank that has no state.
        path: The checkpoint, for the warning.
    """
    if not states:
        log.warning("Rank %d: %s holds no rank's position in its data: the epoch's data begins again.", rank, path)
        return None
    there = min(states)
    log.warning(
        "Rank %d has no state of its own in %s: it continues from the agreed model, at the position of rank %d "
        "in its data, with other random numbers.", rank, path, there,
    )  # fmt: skip
    return _moved(states[there], rank, _free(states, rank))


def _free(states: Mapping[int, dict[str, Any]], rank: int) -> int:
    """Return the index of the part of the epoch that ``rank``, a rank without a saved state, gets.

    The ranks without a state get, by ascending id, the parts that no saved rank has.
    """
    parts = range(among(states[min(states)]))
    free = sorted({*parts}.difference(state["dealt"][0] for state in states.values()))
    absent = [name for name in parts if name not in states]
    return free[absent.index(rank)] if rank in absent and len(free) == len(absent) else rank


def without_own(clocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return another rank's averaging state (``clocks``) without the entries that only that rank's replica may use."""
    return {**clocks, "rule_state": {}, "gathered": None, "losses": (0.0, 0)}


def has_none(state: Mapping[str, Any] | None) -> bool:
    """Return whether ``state`` is of a rank that had joined within an epoch and had no part of the epoch's data."""
    return state is not None and not state["dealt"]


def among(state: dict[str, Any]) -> int:
    """Return the number of parts into which the epoch's data was divided."""
    return state["dealt"][1]


def completed(states: Mapping[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a state for each part of the epoch's data: the saved state, or else one made from another rank's state.

    ``states`` are the saved states, by stable id; one at least.
    """
    first = states[min(states)]
    places = {state["dealt"][0]: state for _, state in sorted(states.items())}
    return [places.get(place) or _moved(first, place, place) for place in range(among(first))]


def _moved(state: dict[str, Any], rank: int, part: int) -> dict[str, Any]:
    """Return a copy of another rank's state, changed so that ``rank`` can resume from it.

    The copy has part ``part`` of the epoch, and random states that differ from the other rank's.
    """
    random = of_another(state["random"], rank)
    return {**state, "random": random, "loaders": [_place(position, part) for position in state["loaders"]]}


def _place(position: dict[str, Any], part: int) -> dict[str, Any]:
    """Return a loader's position in part ``part`` of the data, made from another rank's ``position``.

    The number of batches that were read stays. States that belong to the other rank's own data are removed.
    """
    if "taken" not in position:
        return {**position, "dataset": None, "state": None}
    share = position.get("share")
    if share is not None:
        share = {"distributed": {**share, "rank": part}, "sequential": share}.get(share["kind"])
    of_the_rank = {"drawn": {}, "random": None, "seed": None, "workers": {}, "first": {}}
    return {**position, **of_the_rank, "share": share, "dataset": None, "state": None}


def names_in(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, str | None]:
    """Return, for each key of a ``state_dict``, the name of the module's tensor that it holds; None for other values.

    Args:
        state: The ``state_dict``, which refers to the module's tensors. Copies count as other values.
        tensors: The module's tensors, by name.
    """
    names = {_memory_of(tensor): name for name, tensor in tensors.items()}
    return {key: names.get(_memory_of(value)) if isinstance(value, Tensor) else None for key, value in state.items()}


def tensors_left_out(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's tensors that a ``state_dict`` renames, copies or leaves out, by name; see `names_in`."""
    names = names_in(state, tensors)
    return {name: tensor for name, tensor in tensors.items() if names.get(name) != name}


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:  # its values have no address
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Modes:
    """The changes of parameters' `requires_grad` and of submodules' training modes since training began.

    What has not changed keeps the value that the program gives it, which may differ after a restart.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first: dict[str, bool] = {}
        self._changed: set[str] = set()

    def begin(self) -> None:
        """Record the training modes of submodules and the `requires_grad` of parameters when training begins."""
        self._first = _modes(self._trainer.lightning_module)

    def take(self) -> dict[str, bool]:
        """Return the present values of the modes that have changed since training began, by name."""
        now = _modes(self._trainer.lightning_module)
        return {name: on for name, on in now.items() if name in self._changed or on is not self._first.get(name, on)}

    def put_trained(self, state: dict[str, bool]) -> None:
        """Restore only `requires_grad`, because a strategy reads it before training begins.

        `put` restores the rest later.
        """
        self.put({name: on for name, on in state.items() if name.endswith(".requires_grad")})

    def put(self, state: dict[str, bool]) -> None:
        """Set the modes of submodules and parameters to those in ``state``, which `take` has returned."""
        self._changed = set(state)
        module = self._trainer.lightning_module
        owners: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters())}
        for name, on in state.items():
            path, _, mode = name.rpartition(".")
            if path in owners:
                setattr(owners[path], mode, on)


def _modes(module: nn.Module) -> dict[str, bool]:
    modes = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, child in module.named_modules():
        modes[f"{name}.training"] = child.training
        if isinstance(child, nn.modules.batchnorm._NormBase):
            modes[f"{name}.track_running_stats"] = child.track_running_stats
    return modes


_FIELDS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_STATE = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")


class LoggedValues:
    """The values that this epoch has logged so far, and the states of the module's metrics.

    Metrics that were not updated since the last `take` of the same object are not copied again.

    Args:
        trainer: The Trainer.
        results: The values that a loop has logged. Default: those of the training loop.
    """

    def __init__(self, trainer: Any, results: Any = None) -> None:
        self._trainer = trainer
        self._evaluated = results
        self._connector = trainer._logger_connector
        self._metrics = {
            name: child for name, child in trainer.lightning_module.named_modules() if isinstance(child, Metric)
        }
        self._copies: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        """For each metric, references to the state that was copied last, and the copies."""

    @property
    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results if self._evaluated is None else self._evaluated

    def take(self) -> dict[str, Any]:
        """Return copies of the values that this epoch has logged so far, and of the metrics' states."""
        connector = self._connector
        return {
            "callback": dict(connector._callback_metrics),
            "logged": dict(connector._logged_metrics),
            "progress_bar": dict(connector._progress_bar_metrics),
            "first": connector._first_loop_iter,
            "fx": connector._current_fx,
            "results": self.take_results(),
            "metrics": {name: self._take_metric(name, metric) for name, metric in self._metrics.items()},
        }

    def take_results(self) -> dict[str, Any]:
        """Return copies of the values that this epoch has logged so far, by key."""
        names = {id(metric): name for name, metric in self._metrics.items()}
        results = self._results
        return {key: _take_result(result, names) for key, result in results.items() if not result.has_reset}

    def _take_metric(self, name: str, metric: Any) -> dict[str, Any]:
        states = {state: getattr(metric, state) for state in [*metric._defaults, "_update_count", "_forward_cache"]}
        marks = [_mark(value) for value in states.values()]
        before, copies = self._copies.get(name, ([], {}))
        if copies.keys() != states.keys() or any(old is not new for old, new in zip(before, marks, strict=True)):
            copies = {state: _copy(value) for state, value in states.items()}
            self._copies[name] = marks, copies
        return copies

    def put(self, state: dict[str, Any]) -> None:
        """Restore the logged values and the metrics' states of ``state``, which `take` has returned."""
        connector = self._connector
        device = self._trainer.strategy.root_device
        connector._callback_metrics = _on(device, state["callback"])
        connector._logged_metrics = _on(device, state["logged"])
        connector._progress_bar_metrics = dict(state["progress_bar"])
        connector._first_loop_iter = state["first"]
        connector._current_fx = state["fx"]
        for name, saved in state["metrics"].items():
            if name in self._metrics:
                # A cached result would be of the values before.
                vars(self._metrics[name]).update(_on(device, saved), _computed=None)
        results = self._results
        for key, saved in state["results"].items():
            result = self._make_result(saved)
            if result is not None:
                results[key] = result.to(device)

    def put_blank(self, state: dict[str, Any]) -> None:
        """Log the keys of another rank's ``state`` with empty values that count no samples.

        Logging at the end of an epoch is collective, so all ranks must have the same keys.
        """
        self.put(state)
        results = self._results
        for key in state["results"].keys() & results.keys():
            _blank(results[key])

    def put_missing(self, state: dict[str, Any]) -> None:
        """Log the keys of another rank's ``state`` that this rank lacks, with empty values that count no samples.

        Afterwards the keys have the other rank's order.
        """
        results = self._results
        own = {key: result for key, result in results.items() if not result.has_reset}
        # Collectives go through the keys in order, so all ranks need one order.
        results.clear()
        for key, saved in state["results"].items():
            result = own.pop(key, None)
            if result is None and (result := self._make_result(saved)) is not None:
                result.to(self._trainer.strategy.root_device)
                # A metric keeps what this rank has updated it with, logged or not.
                result = _blank(result) if result.is_tensor else result
            if result is not None:
                results[key] = result
        results.update(own)

    def _make_result(self, saved: dict[str, Any]) -> Any:
        """Return the logged result that ``saved`` describes.

        Returns None if the user logged the value with a process group of his own, or if its metric is not in the
        module.
        """
        made = pytorch("trainer.connectors.logger_connector.result")
        name, builtin = saved["reduce"]
        should, rank_zero_only, whole_world = saved["sync"]
        is_tensor = "metric" not in saved
        if not whole_world or (not is_tensor and saved["metric"] not in self._metrics):
            return None
        meta = made._Metadata(**saved["meta"], reduce_fx=getattr(builtins if builtin else torch, name))
        reduce = self._trainer.strategy.reduce
        meta.sync = made._Sync(_should=should, fn=reduce, rank_zero_only=rank_zero_only)
        result = made._ResultMetric(meta, is_tensor)
        vars(result).update(saved["state"])
        if not is_tensor:
            result.value = self._metrics[saved["metric"]]
        return result


def show(connector: Any, metrics: Mapping[str, float]) -> None:
    """Show values in the callbacks' metrics until newer ones replace them.

    `LightningModule.log` does so, too, but reduces the values again at every step until the end of the epoch.
    """
    connector._callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})


def _blank(result: Any) -> Any:
    """Empty a logged result, so that it counts no samples and still takes part in the epoch's reduction; return it."""
    kind = result.value.dtype if result.is_tensor else None
    result.reset()
    if kind is not None:
        # Ranks reduce values of one type.
        result.value = result.value.to(kind)
    result.has_reset = False
    result._update_count = 1
    return result


def _mark(state: Any) -> Any:
    """Return an object by whose identity one can tell that a metric's state was replaced.

    The object is the state itself, or the last entry of a list. If the state was changed in place, the object is the
    same, and only the metric's count of updates differs.
    """
    # A list state only grows or is replaced, so its last entry identifies it.
    return (state[-1] if state else None) if isinstance(state, list) else state


def _take_result(result: Any, names: dict[int, str]) -> dict[str, Any]:
    meta = result.meta
    sync = result.meta.sync
    saved: dict[str, Any] = {"meta": {field: getattr(meta, field) for field in _FIELDS}}
    saved["reduce"] = (meta.reduce_fx.__name__, meta.reduce_fx is getattr(builtins, meta.reduce_fx.__name__, None))
    saved["sync"] = (sync.should, sync.rank_zero_only, sync.group is None)
    saved["state"] = {name: _copy(getattr(result, name)) for name in _STATE if hasattr(result, name)}
    if not result.is_tensor:
        saved["state"].pop("value")
        saved["metric"] = names.get(id(result.value))
    return saved


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_copy(entry) for entry in value)
    return {name: _copy(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _on(device: torch.device, values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    if isinstance(values, list):
        return [_on(device, entry) for entry in values]
    return {name: _on(device, entry) for name, entry in values.items()} if isinstance(values, dict) else values
