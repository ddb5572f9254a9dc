"""What was logged in the epoch under way, and torchmetrics' counts: monitors and schedulers ask for them."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any

import torch

from lightning_async.trainer.namespace import pytorch

__all__ = ["Known", "put_blank", "put_logged", "put_missing", "show", "take_logged"]

_FIELDS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
_STATE = ("value", "cumulated_batch_size", "_forward_cache", "_update_count")


class Known:
    """What was taken before.

    Args:
        trainer: in a fit; its metrics are looked for now.
    """

    def __init__(self, trainer: Any) -> None:
        self.metrics = _metrics(trainer)
        self.copies: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        """Of each metric: its state, by reference, and a copy."""


def take_logged(trainer: Any, known: Known | None = None) -> dict[str, Any]:
    """Values of this epoch so far, and the last of each; copies.

    Args:
        trainer: in a fit.
        known: filled here: metrics that were not updated since the last call with it are not copied again. Default:
            nothing is.
    """
    connector, known = trainer._logger_connector, known or Known(trainer)
    modules = known.metrics
    names = {id(metric): name for name, metric in modules.items()}
    results = trainer.fit_loop.epoch_loop._results
    return {
        "callback": dict(connector._callback_metrics),
        "logged": dict(connector._logged_metrics),
        "progress_bar": dict(connector._progress_bar_metrics),
        "first": connector._first_loop_iter,
        "fx": connector._current_fx,
        "results": {key: _take_result(result, names) for key, result in results.items() if not result.has_reset},
        "metrics": {name: _take_metric(name, metric, known) for name, metric in modules.items()},
    }


def show(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Put values into the progress bar and the callbacks' metrics, where they stay until others take their places.

    `LightningModule.log` does so, too, and computes them again at every step until the end of the epoch.
    """
    connector = trainer._logger_connector
    connector._progress_bar_metrics.update(metrics)
    connector._callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})


def put_logged(trainer: Any, state: dict[str, Any]) -> None:
    """As it was when ``state`` was taken."""
    connector, modules = trainer._logger_connector, _metrics(trainer)
    device = trainer.strategy.root_device
    connector._callback_metrics = _on(device, state["callback"])
    connector._logged_metrics = _on(device, state["logged"])
    connector._progress_bar_metrics = dict(state["progress_bar"])
    connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]
    for name, saved in state["metrics"].items():
        if name in modules:
            vars(modules[name]).update(_on(device, saved), _computed=None)
    results = trainer.fit_loop.epoch_loop._results
    for key, saved in state["results"].items():
        result = _make_result(trainer, saved, modules)
        if result is not None:
            results[key] = result.to(device)


def put_blank(trainer: Any, state: dict[str, Any]) -> None:
    """As if this rank had logged the same in the epoch under way, of no samples: ends of epochs are collectives."""
    put_logged(trainer, state)
    for key in state["results"]:
        result = trainer.fit_loop.epoch_loop._results.get(key)
        if result is not None:
            _blank(result)


def put_missing(trainer: Any, state: dict[str, Any]) -> None:
    """As if this rank had logged, of no samples, what another one has in the epoch under way, and in the same order."""
    results, modules = trainer.fit_loop.epoch_loop._results, _metrics(trainer)
    own = dict(results)
    results.clear()
    for key, saved in state["results"].items():
        result = own.pop(key, None)
        if result is None and (result := _make_result(trainer, saved, modules)) is not None:
            result = _blank(result.to(trainer.strategy.root_device))
        if result is not None:
            results[key] = result
    results.update(own)


def _blank(result: Any) -> Any:
    result.reset()
    result.has_reset = False
    result._update_count = 1
    return result


def _metrics(trainer: Any) -> dict[str, Any]:
    from torchmetrics import Metric

    return {name: child for name, child in trainer.lightning_module.named_modules() if isinstance(child, Metric)}


def _take_metric(name: str, metric: Any, known: Known) -> dict[str, Any]:
    states = {state: getattr(metric, state) for state in [*metric._defaults, "_update_count", "_forward_cache"]}
    marks = [_mark(value) for value in states.values()]
    before, copies = known.copies.get(name, ([], {}))
    if copies.keys() != states.keys() or any(old is not new for old, new in zip(before, marks, strict=True)):
        copies = {state: _copy(value) for state, value in states.items()}
        known.copies[name] = marks, copies
    return copies


def _mark(state: Any) -> Any:
    """Another object after each update: of a list, which only grows or begins anew, its last entry.

    What is updated in place, the count of updates tells.
    """
    return (state[-1] if state else None) if isinstance(state, list) else state


def _take_result(result: Any, names: dict[int, str]) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    saved: dict[str, Any] = {"meta": {field: getattr(meta, field) for field in _FIELDS}}
    saved["reduce"] = (meta.reduce_fx.__name__, meta.reduce_fx is getattr(builtins, meta.reduce_fx.__name__, None))
    saved["sync"] = (sync.should, sync.rank_zero_only, sync.group is None)
    saved["state"] = {name: _copy(getattr(result, name)) for name in _STATE if hasattr(result, name)}
    if not result.is_tensor:
        saved["state"].pop("value")
        saved["metric"] = names.get(id(result.value))
    return saved


def _make_result(trainer: Any, saved: dict[str, Any], modules: dict[str, Any]) -> Any:
    """None where it cannot be made anew: a group of the user's own, or a metric that is no part of the module."""
    made = pytorch("trainer.connectors.logger_connector.result")
    name, builtin = saved["reduce"]
    should, rank_zero_only, whole_world = saved["sync"]
    is_tensor = "metric" not in saved
    if not whole_world or (not is_tensor and saved["metric"] not in modules):
        return None
    meta = made._Metadata(**saved["meta"], reduce_fx=getattr(builtins if builtin else torch, name))
    meta.sync = made._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = made._ResultMetric(meta, is_tensor)
    vars(result).update(saved["state"])
    if not is_tensor:
        result.value = modules[saved["metric"]]
    return result


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
