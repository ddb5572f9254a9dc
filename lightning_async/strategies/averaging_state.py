"""Averaging's state in checkpoints: it goes with the weights that it belongs to, and with no others.

`SavedState` holds what a checkpoint has said, and writes the next one; `state_of` asks the engine for it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rule_state import RuleState
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.loops.loop_state import without_own

log = logging.getLogger(__name__)


class SavedState:
    """The state of averaging in a checkpoint: loaded by this run, or left by the last one.

    Args:
        key: under which a checkpoint holds it.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._is_read = False
        """What there is to go on from is a checkpoint's, and not handed over by those who train."""
        self._last: dict[str, Any] | None = None
        self._owner: Any = None
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run: what an earlier one has loaded is not its own."""
        self.origin = "none"
        """Says which checkpoint this run goes on from; equal on all ranks that go on from the same one."""
        self.own = False
        """What was read is this rank's own, and not what one rank has written for all."""
        self._has_loaded = False
        self._loaded: dict[str, Any] | None = None
        self._replica: dict[str, Any] | None = None
        self._gathered: Any = None
        self._alike: Any = None

    def begin_stage(self, module: Any, fitting: bool) -> None:
        """Begin a stage of the run: a fit goes on from its checkpoint, evaluation leaves it with the weights."""
        if fitting:
            self._last = None
        elif self._has_loaded:
            self._last = self._loaded
            self._loaded = None
        elif module is not self._owner:
            self._last = None
        self._owner = module

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take what averaging has in a checkpoint that was read."""
        self._has_loaded = True
        self._loaded = checkpoint.get(self._key)
        self._last = None
        self._is_read = True
        self.own = bool((self._loaded or {}).get("own"))
        self.origin = (self._loaded or {}).get("origin") or _describe(checkpoint, self._loaded)

    def leave_rule(self, rule: str) -> None:
        """Go on as with this rule, which has no state, whatever wrote the checkpoint: replicas are one model."""
        if self._loaded is not None:
            begins = {"alike": None, "synchronous": True, "fresh": True}
            alone = [
                {**without_own(each), **begins, "gathered": each.get("gathered")} for each in self._loaded["replicas"]
            ]
            self._loaded = {**self._loaded, "rule": rule, "rule_state": {}, "replicas": alone, "replica": None}

    def take_replica(self) -> dict[str, Any] | None:
        """Return, once, this replica's own parameters, where they differed from what all had agreed on."""
        replica = self._replica
        self._replica = None
        return replica

    def take_gathered(self) -> tuple[Any, Any]:
        """Return, once, what this rank had gathered towards a step, and what all have alike beside the rule's state."""
        taken = self._gathered, self._alike
        self._gathered = self._alike = None
        return taken

    def take(self) -> dict[str, Any] | None:
        """Return, once, what the fit goes on from."""
        loaded = self._loaded
        self._loaded = None
        return loaded

    def go_on(self, state: dict[str, Any], gathered: Any = None) -> None:
        """Go on from this state as if it had been loaded, with what this rank has ``gathered``."""
        self._loaded = state
        self._gathered = gathered
        self._is_read = False

    def keep(self, state: dict[str, Any]) -> None:
        """Keep the state at the end of a fit, for checkpoints that are saved after it."""
        self._last = state

    def write(self, checkpoint: dict[str, Any], now: dict[str, Any] | None, origin: str = "") -> None:
        """Write into a checkpoint the state ``now``; before a fit's start and after its end what goes with the weights.

        Args:
            checkpoint: what it is written into.
            now: the state.
            origin: says which checkpoint this is, where those of ranks differ. Default: what it holds says so.
        """
        state = now or self._loaded or self._last
        if state is not None:
            checkpoint[self._key] = {**state, "origin": origin} if origin else state

    def leave_behind(self) -> None:
        """Drop the state: a world of one goes on from the weights alone."""
        if (saved := self.take()) is not None:
            self._warn_of_windows(saved)

    def resume(self, averager: BackgroundAverager, rank: int, world_size: int) -> None:
        """Let the averager go on from what was loaded, if anything was. Of another number of ranks: from rank 0's."""
        saved = self.take()
        if saved is not None:
            replicas = saved["replicas"]
            own = replicas[rank] if len(replicas) == world_size else without_own(replicas[0])
            if rank == 0 and len(replicas) != world_size:
                self._warn_of_windows(saved)
            if "mean_steps" in saved:
                own = {**own, "mean_steps": saved["mean_steps"]}
            averager.load_state_dict(saved, own)
            if rank == 0:
                self._warn_of_rule(saved, averager.agreed)
            self._replica = saved.get("replica")
            self._alike = replicas[0].get("alike")
            self._gathered = own.get("gathered") or self._gathered

    def _warn_of_rule(self, saved: dict[str, Any], agreed: RuleState) -> None:
        """Warn of a rule that begins where another one was, which had nothing that it could not go on from."""
        if self._is_read and saved["rule"] != agreed.name and agreed.nbytes():
            log.warning(
                "The checkpoint of %s holds no state of a rule: that of `rule=%r` begins there.",
                self.origin, agreed.rule,
            )  # fmt: skip

    def _warn_of_windows(self, saved: dict[str, Any]) -> None:
        """Warn of windows that nobody goes on with: each belongs to a rank, and these are other ranks."""
        windows = [(each.get("gathered") or {}).get("window") for each in saved["replicas"]]
        samples = [float(window["samples"]) for window in windows if window is not None]
        if not self._is_read or not any(samples):
            return
        alone = len(windows) == 1  # it was saved between sync points, where a rank knows of itself
        log.warning(
            "The checkpoint of %s was saved within windows of gradients: %g samples that %s had gathered are in no "
            "step%s, and are dropped. `FaultTolerantCheckpoint` keeps them for the same number of ranks; so does "
            "`trainer.save_checkpoint` where all ranks meet, as in `on_validation_end`.",
            self.origin, sum(samples), "the rank that saved it" if alone else f"its {len(windows)} ranks",
            ", nor is what the others had, which it does not hold" if alone else "",
        )  # fmt: skip


def state_of(averager: BackgroundAverager, world: LightningCollectives | None) -> dict[str, Any]:
    """Return the engine's state: at a sync point with every replica's clocks, else with this one's for all."""
    if world is None or world.asynchronous:
        replicas = [averager.clocks()]
    else:
        replicas = world.gather_objects(clocks_of(averager, world.rank))
    return {**averager.state_dict(), "replicas": replicas}


def clocks_of(averager: BackgroundAverager, rank: int) -> dict[str, Any]:
    """Return the clocks of a rank; what all ranks have alike, rank 0 has for all."""
    return averager.clocks() if rank == 0 else {**averager.clocks(), "alike": None}


def _describe(checkpoint: dict[str, Any], state: dict[str, Any] | None) -> str:
    """Progress and a checksum of the weights and of what all replicas share of the rule's state."""
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
            data: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            start = zlib.crc32(data, start)
    return start
