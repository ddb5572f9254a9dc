"""The state that Lightning saves, divided into two trees: one equal on all ranks, and one of each rank.

A Lightning checkpoint is one dict, which rank 0 writes. `TrainerState` divides this dict into the two trees, and
restores the Trainer from such a dict. `joined` and `whole` merge the two trees into a Lightning checkpoint again.
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
from lightning_async.engine.replica import kept_buffers
from lightning_async.trainer.environment.environments import StableIds
from lightning_async.trainer.loops.averaged_models import averaged_models_of
from lightning_async.trainer.loops.loop_state import has_none, without_own
from lightning_async.trainer.namespace import callbacks_of

REPLICAS = frozenset({"parameters"})
"""The parts of the state that are equal on all ranks at a sync point, if each rank has its own optimizer state."""
ALIKE = frozenset({"parameters", "optimizer_states"})
"""The parts of the state that are equal on all ranks if the ranks take every step together."""
_CHECKPOINT = {"epoch": int, "global_step": int, "loops": dict, "callbacks": dict, "state_dict": dict}
_RESUME = {
    "where": str, "loaders": list, "unsaved": dict, "random": dict, "modes": dict, "combined": dict, "dealt": list,
}  # fmt: skip
_MOST_RANKS = 1 << 20
_HPARAMS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}


class TrainerState:
    """The state of one rank's Trainer: the contents of Lightning's checkpoint, and state that only this replica has.

    Args:
        trainer: The Trainer.
        pickles: Whether hyper-parameters are saved that can be saved only by pickling. Default: False.
    """

    def __init__(self, trainer: Any, pickles: bool = False) -> None:
        self._trainer = trainer
        self._pickles = pickles

    def capture(
        self, alike: frozenset[str], callbacks: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return ``(shared, own)``, the two parts of Lightning's checkpoint; tensors by reference.

        Args:
            alike: Names of the parts that are equal on all ranks and go into ``shared``: ``"parameters"``,
                ``"optimizer_states"`` or both. Buffers always go into ``own``, because BatchNorm's statistics differ
                between ranks.
            callbacks: States of the callbacks to save instead of the present ones. Default: None, the present ones.
        """
        own = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if callbacks is not None:
            own["callbacks"] = callbacks
        for key, type_key in _HPARAMS.items():
            # The type is a class, such as OmegaConf's, and cannot be saved as a plain value. The values can.
            own.pop(type_key, None)
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
        """Restore model, optimizers, schedulers and scaler from a checkpoint; loops and data keep their position.

        Args:
            checkpoint: This rank's Lightning checkpoint, as `whole` returns it.
            resume: This rank's state for `Resume`, as `whole` returns it. Of this state, only the numbers of updates of
                averaged models (such as EMA) since the last sync point are used. None: they are not known.
        """
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_model()
            # The callback must move the averages out of the place in which it saved them, where the model's weights
            # belong.
            for callback in callbacks_of(trainer, "WeightAveraging"):
                callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
            if (averages := averaged_models_of(trainer)) is not None:
                averages.go_on([] if resume is None else resume["unsaved"]["averaged"])
            connector.restore_precision_plugin_state()
            connector.restore_optimizers()
            connector.restore_lr_schedulers()
        finally:
            # Lightning would take a checkpoint that stays here for one of its own resume.
            connector._loaded_checkpoint = {}

    def capture_own(self) -> dict[str, Any]:
        """Return the state that differs between this replica and the others, after a step; tensors by reference.

        This always includes the states of random generators. For asynchronous replicas it also includes the gradient
        scale in fp16, the optimizer state with ``optimizer_state="keep"``, and the buffers that it keeps:
        with these policies replicas differ in them. It never includes weights, the averaging rule's state, optimizer
        options, schedulers, callbacks and loops. With parameter servers that run the optimizer, it includes only the
        states of random generators.
        """
        trainer = self._trainer
        strategy = trainer.strategy
        own: dict[str, Any] = {"random": self._generators.take()}
        # Servers hold weights and optimizer state.
        if strategy.served and strategy.update_on_server:
            return own
        # With synchronous steps all ranks have one optimizer state, which belongs to the run.
        if strategy.averager.ledger.synchronous and not strategy.served:
            return own
        module = trainer.lightning_module
        if strategy.optimizer_state_policy == "keep":
            own["optimizers"] = [_by_name(optimizer, _names(module)) for optimizer in strategy.optimizers]
        if kept := kept_buffers(module, strategy.buffers):
            own["buffers"] = {name: buffer.detach() for name, buffer in kept.items()}
        if scaler := trainer.precision_plugin.state_dict():
            own["scaler"] = scaler
        return own

    def restore_own(self, own: dict[str, Any]) -> list[str]:
        """Replace state that was received from another rank by this rank's ``own``, a result of `capture_own`.

        Optimizer states and buffers whose shape or dtype has changed are not restored.

        Returns:
            Descriptions of the restored parts, for a log line.
        """
        trainer = self._trainer
        strategy = trainer.strategy
        module = trainer.lightning_module
        done: list[str] = []
        if "optimizers" in own and strategy.optimizer_state_policy == "keep":
            count = _put_optimizers(strategy.optimizers, own["optimizers"], _names(module))
            done.append(f"optimizer state of {count} parameters")
        if "buffers" in own and (mine := kept_buffers(module, strategy.buffers)):
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
    """Merge the two trees of `TrainerState.capture`, and return them as one Lightning checkpoint."""
    checkpoint = dict(own)
    if "optimizer_states" in shared:
        checkpoint["optimizer_states"] = shared["optimizer_states"]
    if "parameters" in shared:
        key = _model_in(own)
        checkpoint[key] = _like(own[key], {**shared["parameters"], **own[key]})
    return checkpoint


def _model_in(checkpoint: dict[str, Any]) -> str:
    """Return the key under which a checkpoint holds the model's weights.

    With `WeightAveraging`, the usual key ``"state_dict"`` holds the averaged weights instead.
    """
    return "current_model_state" if "current_model_state" in checkpoint else "state_dict"


def whole(
    store: CheckpointStore, entry: CheckpointEntry, names: StableIds, mapped: bool = False, pickles: bool = False
) -> tuple[dict[str, Any], Any]:
    """Return ``(checkpoint, resume)``: Lightning's checkpoint for this rank, and this rank's state for `Resume`.

    A rank that took no part in the save, or had no part of the epoch's data, gets the model on which all ranks had
    agreed, and the loop progress of the first saved rank that had a part of the data. If the job was started with
    another number of ranks, every rank gets the agreed model. In both cases ``resume`` is None.

    Args:
        store: The checkpoints.
        entry: The checkpoint. If ``pickles`` is True, the caller must have verified it.
        names: Stable ids of the ranks, among them this rank's.
        mapped: Whether tensors are views of local files, see `shards.load`. Default: False.
        pickles: Whether to load pickled objects, see `shards.load`. Default: False.
    """
    loaded = load(store, entry, names.mine, mapped, pickles)
    ranks = loaded.manifest.ranks
    own: Any = loaded.own
    # Begin from the first rank that had a part of the epoch.
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
    # Each rank has saved a share of the agreed state, and all shares together replace this rank's weights.
    if own.get("agreed") is not None:
        shares: list[Any] = [load_own(store, entry, each, "agreed", mapped=mapped, pickles=pickles) for each in ranks]
        averaging, model = _assembled(shares)
        for name, value in model.items():
            target = torch.view_as_real(state[name]) if state[name].is_complex() else state[name]
            target.copy_(value.view(target.shape))
    # The strategy reads this entry when Lightning restores the checkpoint.
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


def check_state(checkpoint: dict[str, Any], resume: Any, loops: dict[str, Any]) -> None:
    """Raise ValueError unless the result of `whole` has entries, types and counts that a save can have written.

    ``loops`` is the present state of the Trainer's loops, with which those of the checkpoint are compared.
    """
    wrong = [name for name, kind in _CHECKPOINT.items() if not isinstance(checkpoint.get(name), kind)]
    if not wrong and not _is_like(loops, checkpoint["loops"]):
        wrong = ["loops"]
    if resume is not None:
        wrong += [name for name, kind in _RESUME.items() if not isinstance(resume.get(name), kind)]
        if any(type(count) is not int or not 0 <= count <= _MOST_RANKS for count in resume.get("dealt", ())):
            wrong.append("dealt")
    if wrong:
        raise ValueError(f"{wrong} are not what a save writes there")


def _is_like(template: Any, value: Any) -> bool:
    """Return whether a value has the dictionaries and counts of a template; it may lack some, and have others."""
    if isinstance(template, dict):
        return isinstance(value, dict) and all(_is_like(each, value.get(k, each)) for k, each in template.items())
    return type(template) is not int or (type(value) is int and value >= 0)


def _assembled(shares: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the averaging state and the agreed parameters, joined from every rank's result of `RuleState.share`."""
    first = shares[0]
    flat = {
        name: torch.cat([share["flat"][name] for share in shares]).view(shape)
        for name, shape in first["shapes"].items()
    }
    names, sizes = zip(*first["parameters"], strict=True)
    model = dict(zip(names, flat.pop("model").split(list(sizes)), strict=True))
    averaging = {key: first[key] for key in ("round", "num_rounds", "rule", "parameters")}
    return {**averaging, "rule_state": {**flat, **first["plain"]}}, model


def left_out(module: nn.Module, datamodule: Any) -> list[str]:
    """Return the names of hyper-parameters that a checkpoint without pickles leaves out.

    They can be saved only by pickling, and reading a pickle executes code.
    """
    return [
        name
        for each in (module, datamodule)
        for name, value in dict(getattr(each, "hparams", None) or {}).items()
        if not _travels(value)
    ]


def _like(state: Any, values: dict[str, Any]) -> Any:
    """Return ``values`` as a dict of ``state``'s type and with its ``_metadata``.

    The metadata holds the modules' versions, which ``load_state_dict`` reads.
    """
    new = type(state)(values)
    if hasattr(state, "_metadata"):
        new._metadata = state._metadata
    return new


def _travels(value: object) -> bool:
    """Return whether a value can be saved without pickling."""
    try:
        flatten(value)
    except (TypeError, ValueError):
        return False
    return True


def _names(module: Any) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _numbered(optimizer: Optimizer, state: dict[str, Any], names: dict[int, str]) -> dict[Any, str]:
    """Return the parameter name for each number by which the optimizer's ``state`` refers to a parameter.

    Args:
        optimizer: The optimizer.
        state: Result of ``optimizer.state_dict()``.
        names: Name of each parameter, by the ``id`` of the parameter.
    """
    found = {}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            if id(parameter) in names:
                found[number] = names[id(parameter)]
    return found


def _by_name(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Any]:
    """Return an optimizer's state by parameter name.

    Names, unlike the optimizer's numbers, stay valid if the parameter groups change before the state is restored.
    """
    state = optimizer.state_dict()
    called = _numbered(optimizer, state, names)
    return {called[number]: each for number, each in state["state"].items() if number in called}


def _put_optimizers(optimizers: list[Optimizer], own: list[dict[str, Any]], names: dict[int, str]) -> int:
    """Load this rank's ``own`` states into the optimizers, for parameters whose state has the same shapes and dtypes.

    After an error, all optimizers have their previous states.

    Args:
        optimizers: The optimizers.
        own: For each optimizer, its state by parameter name.
        names: Name of each parameter, by the ``id`` of the parameter.

    Returns:
        The number of parameters whose state was loaded.
    """
    count = 0
    before = [copy.copy(optimizer.state_dict()) for optimizer in optimizers]
    try:
        for optimizer, state, mine in zip(optimizers, before, own, strict=True):
            called = _numbered(optimizer, state, names)
            fits = {n: mine[name] for n, name in called.items() if _fits(state["state"].get(n), mine.get(name))}
            optimizer.load_state_dict({**state, "state": {**state["state"], **fits}})
            count += len(fits)
    except BaseException:
        # Restore the states, so that a failure leaves no optimizer half replaced.
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
