"""The state of averaging in checkpoints: the averaging rule's state, and the ranks' counts of steps and rounds.

`SavedState` holds the state that was loaded from a checkpoint, and writes the state into the next one. `state_of` gets
the present state from the engine.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.averaging.rule_state import RuleState
from lightning_async.engine.checkpoint_markers import ModelState
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.trainer.loops.loop_state import without_own

log = logging.getLogger(__name__)


class SavedState:
    """The state of averaging that this run has loaded from a checkpoint, or with which the last fit has ended."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._is_read = False
        """Whether the loaded state comes from a checkpoint, and not from another session or the ranks that train."""
        self._last: dict[str, Any] | None = None
        self._owner: Any = None
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: discard the state that an earlier run has loaded."""
        self.origin = "none"
        """Description of the checkpoint that this run goes on from; equal on all ranks that loaded the same one."""
        self.own = False
        """Whether the checkpoint was written by this rank for itself, and not by one rank for all."""
        self.schedules: list[Any] = []
        """The `LearningRates.state` of the loaded checkpoint, and after a fit that of the fit."""
        self._has_loaded = False
        self._loaded: dict[str, Any] | None = None
        self._replica: dict[str, Any] | None = None
        self._gathered: Any = None
        self._alike: Any = None

    def begin_stage(self, module: Any, fitting: bool) -> None:
        """Begin a stage of the run: a fit or an evaluation.

        In a fit, a loaded state stays until `take` returns it. In an evaluation, a loaded state is only kept for
        `write`: checkpoints that are saved later contain the state, as long as the module is the same.

        Args:
            module: The user's module.
            fitting: Whether the stage is a fit.
        """
        if fitting:
            self._last = None
        elif self._has_loaded:
            self._last = self._loaded
            self._loaded = None
        # The kept state belongs to the weights of another module.
        elif module is not self._owner:
            self._last = None
        self._owner = module

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the averaging state that a loaded checkpoint contains, until `resume` takes it.

        The checkpoint is not changed.
        """
        self._has_loaded = True
        self._loaded = checkpoint.get(self._key)
        self._last = None
        self._is_read = True
        self.own = bool((self._loaded or {}).get("own"))
        self.origin = (self._loaded or {}).get("origin") or _describe(checkpoint, self._loaded)

    def leave_rule(self, rule: str) -> None:
        """Discard the averaging rule's state that was loaded, and every replica's own weights.

        Averaging then goes on with another rule, ``rule``, whose state is empty, and all replicas have the checkpoint's
        weights. This is for a strategy that needs only the weights, whichever strategy wrote the checkpoint.

        Args:
            rule: Name of the rule with which averaging goes on.
        """
        if self._loaded is not None:
            begins = {"alike": None, "synchronous": True, "fresh": True}
            alone = [
                {**without_own(each), **begins, "gathered": each.get("gathered")} for each in self._loaded["replicas"]
            ]
            self._loaded = {**self._loaded, "rule": rule, "rule_state": {}, "replicas": alone, "replica": None}

    def take_replica(self) -> dict[str, Any] | None:
        """Return this replica's own parameters from the checkpoint, and clear them.

        Returns:
            The parameters; None if the checkpoint has the same parameters for all replicas, or at a second call.
        """
        replica = self._replica
        self._replica = None
        return replica

    def take_gathered(self) -> tuple[Any, Any]:
        """Return the step runner's saved state, and clear it.

        Returns:
            This rank's part, such as the gradients of an open window; and the part that is equal on all ranks. Each is
            None if nothing was saved.
        """
        taken = self._gathered, self._alike
        self._gathered = self._alike = None
        return taken

    def take(self) -> dict[str, Any] | None:
        """Return the loaded state, from which the fit goes on, and clear it; None if there is none."""
        loaded = self._loaded
        self._loaded = None
        return loaded

    def go_on(self, state: dict[str, Any], gathered: Any = None) -> None:
        """Use a state as if it had been loaded from a checkpoint.

        Args:
            state: State of averaging.
            gathered: This rank's part of the step runner's state, if ``state`` does not hold it. Default: none.
        """
        self._loaded = state
        self._gathered = gathered
        self._is_read = False

    def keep(self, state: dict[str, Any]) -> None:
        """Keep the state that a fit ended with, for checkpoints that are saved after the fit."""
        self._last = state

    def write(self, checkpoint: dict[str, Any], now: dict[str, Any] | None, origin: str = "") -> None:
        """Write the state into a checkpoint.

        Args:
            checkpoint: The checkpoint.
            now: Present state. None before a fit begins and after it has ended: then the loaded state is written, or
                the state that `keep` was called with.
            origin: Name by which ranks see that they load the same checkpoint, if each rank writes a file of its own.
                Default: a description is made from the content when the checkpoint is loaded.
        """
        state = now or self._loaded or self._last
        if state is not None:
            checkpoint[self._key] = {**state, "origin": origin} if origin else state

    def leave_behind(self) -> None:
        """Discard the loaded state, because a rank that trains alone uses only the checkpoint's weights."""
        if (saved := self.take()) is not None:
            self._warn_of_windows(saved)

    def resume(self, averager: ReplicaEngine, rank: int, world_size: int) -> None:
        """Load the saved averaging state, if there is one, into the averager.

        The state has each rank's clocks: its counts of steps, rounds and work. If the checkpoint was saved with another
        number of ranks, every rank takes rank 0's clocks, without the parts that belong to rank 0 alone.

        Args:
            averager: Averager of this session, not started yet.
            rank: Current rank.
            world_size: Number of ranks.
        """
        saved = self.take()
        if saved is not None:
            replicas = saved["replicas"]
            own = replicas[rank] if len(replicas) == world_size else without_own(replicas[0])
            if rank == 0 and len(replicas) != world_size:
                self._warn_of_windows(saved)
            # The state that a joining rank is given holds the mean of the others' steps.
            if "mean_steps" in saved:
                own = {**own, "mean_steps": saved["mean_steps"]}
            averager.load_state_dict(saved, own)
            if rank == 0:
                self._warn_of_rule(saved, averager.agreed)
            self._replica = saved.get("replica")
            # Only the clocks of rank 0 hold it, see `clocks_of`.
            self._alike = replicas[0]["alike"]
            self._gathered = own["gathered"] or self._gathered

    def _warn_of_rule(self, saved: dict[str, Any], agreed: ModelState) -> None:
        """Warn if the averager's rule needs a state, and the checkpoint was saved with another rule and lacks it."""
        if self._is_read and isinstance(agreed, RuleState) and saved["rule"] != agreed.name and agreed.nbytes():
            log.warning(
                "The checkpoint of %s holds no state of a rule: that of `rule=%r` begins there.",
                self.origin, agreed.rule,
            )  # fmt: skip

    def _warn_of_windows(self, saved: dict[str, Any]) -> None:
        """Warn that this run drops the gradients of open windows that the checkpoint holds.

        This run cannot use the gradients, because the checkpoint was saved with another number of ranks, or because
        this rank trains alone.
        """
        windows = [(each["gathered"] or {}).get("window") for each in saved["replicas"]]
        samples = [float(window["samples"]) for window in windows if window is not None]
        if not self._is_read or not any(samples):
            return
        alone = len(windows) == 1  # saved between sync points, when a rank only knows its own window
        log.warning(
            "The checkpoint of %s was saved within windows of gradients: %g samples that %s had gathered are in no "
            "step%s, and are dropped. `FaultTolerantCheckpoint` keeps them for the same number of ranks; so does "
            "`trainer.save_checkpoint` where all ranks meet, as in `on_validation_end`.",
            self.origin, sum(samples), "the rank that saved it" if alone else f"its {len(windows)} ranks",
            ", nor is what the others had, which it does not hold" if alone else "",
        )  # fmt: skip


def state_of(averager: ReplicaEngine, world: LightningCollectives | None) -> dict[str, Any]:
    """Return the engine's state for a checkpoint. It has the clocks (counts of steps, rounds and work) of replicas.

    At a sync point, all ranks call this together, and the state has the clocks of every replica. Between sync points a
    rank may call this alone, and the state has the clocks of this replica only.
    """
    if world is None or world.asynchronous:
        replicas = [averager.clocks()]
    else:
        replicas = world.gather_objects(clocks_of(averager, world.rank))
    return {**averager.state_dict(), "replicas": replicas}


def clocks_of(averager: ReplicaEngine, rank: int) -> dict[str, Any]:
    """Return a rank's clocks (counts of steps, rounds and work) for `state_of`.

    Values that are equal on all ranks are only in rank 0's clocks.
    """
    return averager.clocks() if rank == 0 else {**averager.clocks(), "alike": None}


def _describe(checkpoint: dict[str, Any], state: dict[str, Any] | None) -> str:
    """Return a description of a checkpoint: epoch, step, round, and a checksum of its weights and its rule's state."""
    steps = checkpoint.get("global_step")
    epochs = checkpoint.get("epoch")
    checksum = _checksum(checkpoint.get("state_dict", {}).values(), 0)
    if state is not None:
        checksum = _checksum(state["rule_state"].values(), checksum)
    rounds = f", round {state['round']} of {state['rule']}" if state is not None else ""
    return f"epoch {epochs}, step {steps}{rounds}, checksum {checksum:08x}"


def _checksum(values: Iterable[Any], start: int) -> int:
    for value in values:
        if isinstance(value, Tensor):
            # As bytes, because numpy lacks some of the dtypes, such as bfloat16.
            data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            start = zlib.crc32(data, start)
    return start
