"""The state that Lightning saves, divided into two trees: one equal on all ranks, and one of each rank.

A Lightning checkpoint is one dict, which rank 0 writes. `TrainerState` divides this dict into the two trees, and
restores the Trainer from such a dict. `whole` merges the two trees into a Lightning checkpoint again.

A user's ``state_dict`` may have other keys than the module has tensors: with a prefix, or of an adapter only. So the
module's tensors are saved by their own names, and each key of the ``state_dict`` refers to a name. What was trained is
always saved. What the ``state_dict`` leaves out is restored by name, after Lightning has restored the rest.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_async.checkpoint.shards import load, load_own
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.comm.serialization import flatten
from lightning_async.data.random_states import Generators
from lightning_async.engine.fingerprint import digests
from lightning_async.engine.replica import kept_buffers, tensors_of
from lightning_async.errors import CheckpointError
from lightning_async.trainer.environment.environments import StableIds
from lightning_async.trainer.loops.averaged_models import averaged_models_of
from lightning_async.trainer.loops.loop_state import has_none, names_in, tensors_left_out, without_own
from lightning_async.trainer.namespace import callbacks_of

log = logging.getLogger(__name__)

REPLICAS = frozenset({"parameters"})
"""The parts of the state that are equal on all ranks at a sync point, if each rank has its own optimizer state."""
ALIKE = frozenset({"parameters", "optimizer_states"})
"""The parts of the state that are equal on all ranks if the ranks take every step together."""
_CHECKPOINT = {"epoch": int, "global_step": int, "loops": dict, "callbacks": dict, "state_dict": dict}
_RESUME = {
    "where": str, "loaders": list, "unsaved": dict, "random": dict, "modes": dict, "combined": dict, "dealt": list,
}  # fmt: skip
_OPTIMIZER = {"state": dict, "param_groups": list}
_AVERAGING = {"round": int, "num_rounds": int, "rule": str, "rule_state": dict, "parameters": list, "replicas": list}
_CLOCKS = {"step": int, "epoch": int, "summary": dict, "rule_state": dict}
_MOST_RANKS = 1 << 20
# The entry of a checkpoint with the module's tensors by name. Exported files do not have it.
_MODEL = "lightning_async_model"
# At most twice this number of elements, evenly spaced, identify the values of a frozen parameter.
_SAMPLE = 4096
_HPARAMS = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}


class TrainerState:
    """The state of one rank's Trainer: the contents of Lightning's checkpoint, and state that only this replica has.

    Args:
        trainer: The Trainer.
        pickles: Whether hyper-parameters are saved that can be saved only by pickling. Default: False.
        trainable_only: Whether parameters that training has never changed are left out. Default: False, they are left
            out only if the module's ``state_dict`` leaves them out.
    """

    def __init__(self, trainer: Any, pickles: bool = False, trainable_only: bool = False) -> None:
        self._trainer = trainer
        self._pickles = pickles
        self._trainable_only = trainable_only
        self.trained: set[str] = set()
        """The names of parameters that this training has changed, before a resume as well."""
        self._frozen: dict[str, int] = {}
        """Digests of the parameters that are left out, as they were when training began."""
        self._written: dict[str, tuple[int, int]] = {}
        """For each of these parameters: torch's count of its changes in place, and a digest of all elements then."""
        self._loaded: dict[str, Any] | None = None

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
        parameters = self._divide_model(own)
        if "parameters" in alike:
            shared["parameters"] = parameters
        else:
            own[_MODEL]["tensors"] |= parameters
        return shared, own

    def _divide_model(self, own: dict[str, Any]) -> dict[str, Tensor]:
        """Return the parameters to save; replace the ``state_dict`` in ``own`` by its keys and the buffers by name."""
        module = self._trainer.lightning_module
        tensors = tensors_of(module)
        parameters = dict(module.named_parameters())
        key = _model_in(own)
        keys = names_in(own[key], tensors)
        trains = sorted(name for name, parameter in parameters.items() if parameter.requires_grad)
        self.trained.update(trains)
        listed = set() if self._trainable_only else set(keys.values())
        # A frozen parameter may be changed otherwise than by an optimizer, as a teacher's are, which are means.
        rest = {name: p for name, p in parameters.items() if name not in self.trained and name not in listed}
        now = _sampled(rest)
        self.trained.update(name for name, value in now.items() if self._frozen.setdefault(name, value) != value)
        self.trained.update(name for name, parameter in rest.items() if self._is_changed(name, parameter))
        own[key] = _like(own[key], {name: value for name, value in own[key].items() if keys[name] is None})
        own[_MODEL] = {
            "keys": keys,
            "tensors": {name: tensor for name, tensor in tensors.items() if name not in parameters},
            "trains": trains,
            "trained": sorted(self.trained),
            "frozen": {name: value for name, value in now.items() if name not in self.trained},
        }
        return {name: tensors[name] for name in parameters if name in listed or name in self.trained}

    def _is_changed(self, name: str, parameter: Tensor) -> bool:
        """Return whether any element of a parameter has changed, such as a row between the sampled elements.

        All elements are read, about 1 GB/s on a core, at the first save and after the parameter was written to.
        """
        count = 0 if parameter.is_inference() else parameter._version
        before = self._written.get(name)
        if before is None or before[0] != count:
            self._written[name] = (count, digests([parameter])[0])
        return before is not None and before[1] != self._written[name][1]

    def add_left_out(self, checkpoint: dict[str, Any]) -> None:
        """Add the tensors that the ``state_dict`` of a Lightning checkpoint leaves out, for `load_model`."""
        rest = tensors_left_out(checkpoint[_model_in(checkpoint)], tensors_of(self._trainer.lightning_module))
        checkpoint[_MODEL] = {"tensors": rest, "trained": sorted(self.trained), "frozen": {}}

    def load_model(self, original: Callable[..., None], checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Load the model as Lightning does; then load the tensors that the module's ``state_dict`` leaves out.

        ``original`` is the strategy's method ``load_model_state_dict``, which this one patches.
        """
        original(checkpoint, strict=strict)
        if (loaded := checkpoint.get(_MODEL)) is None:
            return
        tensors = tensors_of(self._trainer.lightning_module)
        saved: dict[str, Tensor] = loaded["tensors"]
        if wrong := [n for n, value in saved.items() if n not in tensors or tensors[n].shape != value.shape]:
            raise CheckpointError(f"The module has no parameters or buffers {wrong} of the shapes in the checkpoint.")
        for name, value in saved.items():
            tensors[name].copy_(value)
        self.trained.update(loaded["trained"])
        self._loaded = loaded
        # In a fit, ranks become equal first.
        if self._trainer.state.fn != "fit":
            self.check_frozen()

    def check_frozen(self) -> None:
        """Compare the parameters that the loaded checkpoint leaves out with those of the training that saved it.

        Log a warning if this training trains other parameters, or if the ``state_dict`` leaves out parameters which
        differ.

        Raises:
            CheckpointError: Parameters differ that ``trainable_only`` has left out.
        """
        if self._loaded is None or not (frozen := self._loaded["frozen"]):
            return
        parameters = dict(self._trainer.lightning_module.named_parameters())
        now = _sampled({name: parameters[name] for name in frozen.keys() & parameters.keys()})
        unlike = [name for name, value in frozen.items() if now.get(name) != value]
        if unlike and set(unlike) & set(self._loaded["keys"].values()):
            raise CheckpointError(
                f"The checkpoint holds only what was trained, and parameters {unlike} of this module are missing, or "
                "have other values than in the training that saved it. Build the module with the same pretrained "
                "weights; a new training needs a directory of its own, or `recover=None`."
            )
        trains = {name for name, parameter in parameters.items() if parameter.requires_grad}
        for names, what in (
            (unlike, "are left out by `state_dict`, and differ from those of the training that saved the checkpoint"),
            (sorted(trains.difference(self._loaded["trains"])), "are trained, and were frozen in the checkpoint"),
            (sorted(set(self._loaded["trains"]) - trains), "are frozen, and were trained in the checkpoint"),
        ):
            if names:
                log.warning("Rank %d: parameters %s %s.", self._trainer.global_rank, names, what)

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


def _model_in(checkpoint: dict[str, Any]) -> str:
    """Return the key under which a checkpoint holds the model's weights.

    With `WeightAveraging`, the usual key ``"state_dict"`` holds the averaged weights instead.
    """
    return "current_model_state" if "current_model_state" in checkpoint else "state_dict"


def whole(
    store: CheckpointStore,
    entry: CheckpointEntry,
    names: StableIds,
    module: nn.Module | None = None,
    mapped: bool = False,
    pickles: bool = False,
) -> tuple[dict[str, Any], Any]:
    """Return ``(checkpoint, resume)``: Lightning's checkpoint for this rank, and this rank's state for `Resume`.

    A rank that took no part in the save, or had no part of the epoch's data, gets the model on which all ranks had
    agreed, and the loop progress of the first saved rank that had a part of the data. If the job was started with
    another number of ranks, every rank gets the agreed model. In both cases ``resume`` is None.

    Args:
        store: The checkpoints.
        entry: The checkpoint. If ``pickles`` is True, the caller must have verified it.
        names: Stable ids of the ranks, among them this rank's.
        module: The module to restore. Parameters that were not saved get the values that they have in it. Default:
            None, these parameters are left out, and the checkpoint has only the keys that Lightning would save.
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
    checkpoint: dict[str, Any] = dict(own["checkpoint"])
    if "optimizer_states" in loaded.shared:
        checkpoint["optimizer_states"] = loaded.shared["optimizer_states"]
    model = checkpoint.pop(_MODEL)
    tensors: dict[str, Tensor] = {**loaded.shared.get("parameters", {}), **model["tensors"]}
    averaging: Any = loaded.shared.get("averaging") or own.get("averaging")
    replica = None
    if took_part and "replica" in own:
        replica = {**own["replica"], "tensors": {name: value.clone() for name, value in tensors.items()}}
    # Each rank has saved a share of the agreed state, and all shares together replace this rank's weights.
    if own.get("agreed") is not None:
        shares: list[Any] = [load_own(store, entry, each, "agreed", mapped=mapped, pickles=pickles) for each in ranks]
        averaging, agreed = _assembled(shares)
        for name, value in agreed.items():
            target = torch.view_as_real(tensors[name]) if tensors[name].is_complex() else tensors[name]
            target.copy_(value.view(target.shape))
    key = _model_in(checkpoint)
    present = {**({} if module is None else tensors_of(module)), **tensors}
    places = {place: name for place, name in model["keys"].items() if name is None or name in present}
    state = checkpoint[key]
    checkpoint[key] = _like(state, {k: state[k] if name is None else present[name] for k, name in places.items()})
    if module is not None:
        rest = {name: value for name, value in tensors.items() if places.get(name) != name}
        checkpoint[_MODEL] = {**model, "tensors": rest}
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
    wrong = _wrong_in(checkpoint, _CHECKPOINT)
    if not wrong and not _is_like(loops, checkpoint["loops"]):
        wrong = ["loops"]
    if resume is not None:
        wrong += _wrong_in(resume, _RESUME)
        if any(type(count) is not int or not 0 <= count <= _MOST_RANKS for count in resume.get("dealt", ())):
            wrong.append("dealt")
    wrong += [name for state in checkpoint.get("optimizer_states", ()) for name in _wrong_in(state, _OPTIMIZER)]
    if (averaging := checkpoint.get("lightning_async")) is not None:
        wrong += _wrong_in(averaging, _AVERAGING)
        wrong += [name for clocks in averaging["replicas"] for name in _wrong_in(clocks, _CLOCKS)]
    if wrong:
        raise ValueError(f"{wrong} are not what a save writes there")


def _wrong_in(value: Any, kinds: dict[str, type]) -> list[str]:
    entries = value if isinstance(value, dict) else {}
    return [name for name, kind in kinds.items() if not isinstance(entries.get(name), kind)]


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


def _sampled(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return a digest of some elements of each tensor; a change of all elements gives another one."""
    parts = (each.detach().reshape(-1)[:: max(1, each.numel() // _SAMPLE)] for each in tensors.values())
    return dict(zip(tensors, digests(parts), strict=True))


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
