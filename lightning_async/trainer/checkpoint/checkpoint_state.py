"""All that Lightning saves of a training, as two trees: what is equal on all ranks, and what is each rank's own.

A Lightning checkpoint is one dict, written by rank 0. `TrainerState` takes it apart and goes on from it; `joined` and
`whole` put it together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_async.checkpoint.shards import load, load_own
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.comm.serialization import flatten
from lightning_async.data.random_states import Generators
from lightning_async.trainer.environment.environments import StableIds
from lightning_async.trainer.loops.averaged_models import averaged_models_of
from lightning_async.trainer.loops.loop_state import has_none, without_own
from lightning_async.trainer.namespace import callbacks_of

REPLICAS = frozenset({"parameters"})
"""The state that is equal on all ranks at a sync point, where each has an optimizer state of its own."""
ALIKE = frozenset({"parameters", "optimizer_states"})
"""The state that is equal on all ranks where every step is taken together."""
_HPARAMS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}


class TrainerState:
    """The state of one rank's Trainer: what Lightning saves of it, and what is this replica's own and not the run's.

    Without ``pickles``, hyper-parameters that are objects are left out.
    """

    def __init__(self, trainer: Any, pickles: bool = False) -> None:
        self._trainer = trainer
        self._pickles = pickles

    def capture(
        self, alike: frozenset[str], callbacks: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return ``(shared, own)`` of the state that Lightning saves; tensors by reference.

        Shared is what ``alike`` names. Buffers never are: a BatchNorm's statistics differ between ranks.
        """
        own = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if callbacks is not None:
            own["callbacks"] = callbacks
        for key, type_key in _HPARAMS.items():
            own.pop(type_key, None)  # a class, such as OmegaConf's: the values are plain ones here
            if key in own:
                own[key] = {name: value for name, value in dict(own[key]).items() if self._pickles or _travels(value)}
        shared: dict[str, Any] = {}
        if "optimizer_states" in alike and "optimizer_states" in own:
            shared["optimizer_states"] = own.pop("optimizer_states")
        if "parameters" in alike:
            key = _model_in(own)
            state = own[key]
            names = {name for name, _ in self._trainer.lightning_module.named_parameters(remove_duplicate=False)}
            shared["parameters"] = {name: value for name, value in state.items() if name in names}
            own[key] = _like(state, {name: value for name, value in state.items() if name not in names})
        return shared, own

    def restore(self, checkpoint: dict[str, Any], resume: dict[str, Any] | None) -> None:
        """Put model, optimizers, schedulers and scaler of a checkpoint in place; loops and data go on where they are.

        ``checkpoint`` and ``resume`` are this rank's, of `whole`; the latter says how much averages over time weigh.
        """
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_model()
            for callback in callbacks_of(trainer, "WeightAveraging"):  # averages stand where the model was
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
            if (averages := averaged_models_of(trainer)) is not None:
                averages.go_on([] if resume is None else resume["unsaved"]["averaged"])
            connector.restore_precision_plugin_state()
            connector.restore_optimizers()
            connector.restore_lr_schedulers()
        finally:
            connector._loaded_checkpoint = {}

    def capture_own(self) -> dict[str, Any]:
        """Return, after a step, what is a replica's own and not the run's: plain values, and tensors by reference.

        These are random states; for asynchronous replicas also the scale of gradients in fp16, and what the policies
        ``optimizer_state="keep"`` and ``buffers="keep"`` leave to each. The run's are weights, rule, options of
        optimizers, schedulers, callbacks and loops. Workers of servers own the optimizers' state where optimizers are
        not the servers'.
        """
        trainer = self._trainer
        strategy = trainer.strategy
        own: dict[str, Any] = {"random": self._generators.take()}
        if strategy.served and strategy.update_on_server:
            return own
        if strategy.averager.ledger.synchronous and not strategy.served:
            return own
        module = trainer.lightning_module
        if strategy.optimizer_state_policy == "keep":
            own["optimizers"] = [_by_name(optimizer, _names(module)) for optimizer in strategy.optimizers]
        if strategy.buffers == "keep":
            own["buffers"] = _buffers(module)
        if scaler := trainer.precision_plugin.state_dict():
            own["scaler"] = scaler
        return own

    def restore_own(self, own: dict[str, Any]) -> list[str]:
        """Put it in the place of another rank's, and tell in words what there was; leave what does not fit."""
        trainer = self._trainer
        strategy = trainer.strategy
        module = trainer.lightning_module
        done: list[str] = []
        if "optimizers" in own and strategy.optimizer_state_policy == "keep":
            count = _put_optimizers(strategy.optimizers, own["optimizers"], _names(module))
            done.append(f"optimizer state of {count} parameters")
        if "buffers" in own and strategy.buffers == "keep":
            mine = _buffers(module)
            count = 0
            with torch.no_grad():
                for name, value in own["buffers"].items():
                    if name in mine and _alike(mine[name], value):
                        mine[name].copy_(value)
                        count += 1
            done.append(f"{count} buffers")
        if "scaler" in own:
            trainer.precision_plugin.load_state_dict(own["scaler"])
            done.append("the scale of gradients")
        self._generators.put(own["random"])
        return [*done, "random states"]

    @property
    def _generators(self) -> Generators:
        return Generators(devices=self._trainer.strategy.root_device.type == "cuda")


def joined(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    checkpoint = dict(own)
    if "optimizer_states" in shared:
        checkpoint["optimizer_states"] = shared["optimizer_states"]
    if "parameters" in shared:
        key = _model_in(own)
        checkpoint[key] = _like(own[key], {**shared["parameters"], **own[key]})
    return checkpoint


def _model_in(checkpoint: dict[str, Any]) -> str:
    """Return the key of the model's own values: `WeightAveraging` puts its averages in their usual place."""
    return "current_model_state" if "current_model_state" in checkpoint else "state_dict"


def whole(
    store: CheckpointStore, entry: CheckpointEntry, names: StableIds, mapped: bool = False, pickles: bool = False
) -> tuple[dict[str, Any], Any]:
    """Return ``(checkpoint, resume)``: Lightning's checkpoint for one rank, and what `Resume` is to restore.

    A rank that took no part in the save, or has none of the epoch, begins from what all agreed on, with the first one's
    progress; so do all where another number of ranks was started. With ``mapped``, tensors are read when they are used;
    with ``pickles``, pickled objects are loaded, and the checkpoint was verified before: see `shards.load`.
    """
    loaded = load(store, entry, names.mine, mapped, pickles)
    ranks = loaded.manifest.ranks
    own: Any = loaded.own
    if own is None or has_none(own["resume"]):
        resumes: dict[int, Any] = {
            rank: load_own(store, entry, rank, "resume", mapped=mapped, pickles=pickles) for rank in ranks
        }
        first = next((rank for rank in ranks if not has_none(resumes[rank])), ranks[0])
        own = load_own(store, entry, first, mapped=mapped, pickles=pickles)
    took_part = loaded.manifest.world_size == names.started and own is loaded.own
    checkpoint = joined(loaded.shared, own["checkpoint"])
    averaging: Any = loaded.shared.get("averaging") or own.get("averaging")
    replica = None
    state = checkpoint[_model_in(checkpoint)]
    if took_part and "replica" in own:
        tensors = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        replica = {**own["replica"], "state_dict": tensors}
    if own.get("agreed") is not None:
        shares: list[Any] = [load_own(store, entry, each, "agreed", mapped=mapped, pickles=pickles) for each in ranks]
        averaging, model = _assembled(shares)
        for name, value in model.items():
            target = torch.view_as_real(state[name]) if state[name].is_complex() else state[name]
            target.copy_(value.view(target.shape))
    if averaging is not None:
        clocks = own["clocks"] if took_part else without_own(own["clocks"])
        checkpoint["lightning_async"] = {
            **averaging,
            "replicas": [clocks] * len(names.left),
            "replica": replica,
            "own": took_part,
            "origin": f"save {entry.number} at step {entry.step}",
        }
    return checkpoint, own["resume"] if took_part else None


def _assembled(shares: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of averaging and the agreed parameters, of every rank's `RuleState.share`."""
    first = shares[0]
    flat = {
        name: torch.cat([share["flat"][name] for share in shares]).view(shape)
        for name, shape in first["shapes"].items()
    }
    names, sizes = zip(*first["parameters"], strict=True)
    model = dict(zip(names, flat.pop("model").split(list(sizes)), strict=True))
    averaging = {key: first[key] for key in ("round", "num_rounds", "rule", "parameters") if key in first}
    return {**averaging, "rule_state": {**flat, **first["plain"]}}, model


def left_out(module: nn.Module, datamodule: Any) -> list[str]:
    """Return the names of hyper-parameters that no checkpoint of ours holds: to read them would execute code."""
    return [
        name
        for each in (module, datamodule)
        for name, value in dict(getattr(each, "hparams", None) or {}).items()
        if not _travels(value)
    ]


def _like(state: Any, values: dict[str, Any]) -> Any:
    """Return ``values`` as a module's state of this kind; `load_state_dict` reads the versions in ``_metadata``."""
    new = type(state)(values)
    if hasattr(state, "_metadata"):
        new._metadata = state._metadata
    return new


def _travels(value: object) -> bool:
    try:
        flatten(value)
    except (TypeError, ValueError):
        return False
    return True


def _names(module: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _buffers(module: Any) -> dict[str, Tensor]:
    return {n: b.detach() for n, b in module.named_buffers() if b.is_floating_point() or b.is_complex()}


def _numbered(optimizer: Optimizer, state: dict[str, Any], names: dict[int, str]) -> dict[Any, str]:
    found = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if id(parameter) in names:
                found[number] = names[id(parameter)]
    return found


def _by_name(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return an optimizer's state of each parameter, by its name: groups may come and go."""
    state = optimizer.state_dict()
    called = _numbered(optimizer, state, names)
    return {called[number]: each for number, each in state["state"].items() if number in called}


def _put_optimizers(optimizers: list[Optimizer], own: list[dict[str, Any]], names: dict[int, str]) -> int:
    count = 0
    before = [copy.copy(optimizer.state_dict()) for optimizer in optimizers]
    try:
        for optimizer, state, mine in zip(optimizers, before, own, strict=True):
            called = _numbered(optimizer, state, names)
            fits = {n: mine[name] for n, name in called.items() if _fits(state["state"].get(n), mine.get(name))}
            optimizer.load_state_dict({**state, "state": {**state["state"], **fits}})
            count += len(fits)
    except BaseException:
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(state)
        raise
    return count


def _fits(theirs: Any, mine: Any) -> bool:
    if mine is None or theirs is None or not isinstance(mine, dict) or mine.keys() != theirs.keys():
        return False
    return all(_alike(theirs[name], value) for name, value in mine.items() if isinstance(value, Tensor))


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
