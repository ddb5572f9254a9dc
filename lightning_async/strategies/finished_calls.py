"""Finished calls of the Trainer: their results, for a rank that was started again and makes these calls once more.

A script with several calls (``fit``, ``validate``, ...), such as a cross-validation, begins anew on a rank that was
started again. Each rank publishes the results of its calls in the store. The returning rank takes them from there,
without running these calls, until it comes to a ``fit`` that the others have not finished.
"""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_async.comm.serialization import decode, encode, take_apart
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.startup import WaitWithLog
from lightning_async.strategies.rank_mapping import begin_call, count_run, next_call
from lightning_async.trainer.data.join import copy_tensors, tensors_of
from lightning_async.trainer.namespace import pytorch

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
PATIENCE = timedelta(minutes=30)
"""Longest time that a returning rank waits until the other ranks finish an evaluation, or begin a fit."""
_WEIGHTS_S = 10.0
_LARGE_BYTES = 1 << 20
_room = [1 << 26]  # bytes that this process may still publish in values of more than `_LARGE_BYTES`
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_STATE = "state of "


class CallIsOver(Exception):
    """The other ranks have finished the call of the Trainer that this returning rank makes; it leaves the call, too.

    Args:
        parts: What was published of the call's end, see `FinishedCalls`.
    """

    def __init__(self, parts: dict[str, Tensor]) -> None:
        super().__init__("the other ranks have finished this call of the Trainer")
        self.parts = parts


class FinishedCalls:
    """The finished calls of the Trainer, as ranks publish them in the store.

        call/<number>/<stable id>   result of this rank, its metrics, progress, and states of callbacks
        weights/<number>            the model, from rank 0, after a call that has changed it; empty if it is too large

    A part of more than 1 MiB is published as long as this process has published less than 64 MiB of such parts, because
    the store keeps them in memory. What is no plain data or tensor is not published.

    Args:
        strategy: Strategy of this rank.
    """

    def __init__(self, strategy: AsyncStrategy) -> None:
        self._strategy = strategy

    @property
    def _name(self) -> str:
        environment = self._strategy.cluster_environment
        return str(getattr(environment, "launchers", environment).global_rank())

    def publish(self, board: JoinBoard, trainer: Any, result: Any) -> None:
        """Publish the end of the call that this rank has just finished."""
        call = next_call() - 1
        changed = trainer.state.fn == "fit" or trainer.ckpt_path is not None
        parts = {
            "call": trainer.state.fn.value,
            "result": result,
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},
            "progress": trainer.fit_loop.state_dict(),
            "changed": changed,
        }
        for callback in trainer.callbacks:
            with contextlib.suppress(Exception):  # a user's callback may have no state outside of a call
                parts[_STATE + callback.state_key] = callback.state_dict()
        encoded = {name: data for name, value in parts.items() if (data := _encode(value)) is not None}
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the next call says so
            if changed and self._strategy.global_rank == 0:
                weights = _encode(tensors_of(trainer.lightning_module))
                board.write_bytes(f"weights/{call}", b"" if weights is None else weights.numpy().tobytes())
            board.write_bytes(f"call/{call}/{self._name}", encode(encoded).numpy().tobytes())

    def leave_if_over(self, board: JoinBoard) -> None:
        """Raise `CallIsOver` if the other ranks have finished the call that this returning rank makes.

        The result is that of the process that this one replaces; if that has not finished the call, of another rank.

        Raises:
            AsyncTrainingError: the call has no result.
        """
        call = next_call()
        began, goes_on = (board.read(f"roll/{number}").get("members") for number in (call, call + 1))
        for name in (self._name, *(began or map(str, range(self._strategy.num_started))), *(goes_on or ())):
            if data := board.read_bytes(f"call/{call}/{name}"):
                parts = _decode(data)
                if name != self._name and decode(parts["call"]) == "predict":
                    parts["result"] = encode([])  # the others have predicted this rank's samples, too
                raise CallIsOver(parts)
        if goes_on:
            _count(call)
            raise AsyncTrainingError(
                f"rank {self._name}: the other ranks' call {call} of the Trainer has ended without a result, by an "
                "exception or as a search of the Tuner, and this rank, which was started again, cannot make it alone."
            )

    def wait(self, board: JoinBoard, trainer: Any) -> None:
        """Wait until the other ranks have finished the call that this returning rank makes, and raise `CallIsOver`.

        Return at once if the call is a fit that others have not finished: this rank can join it.

        Raises:
            CollectiveTimeout: the call is not over after 30 minutes.
        """
        call = next_call()
        patience = WaitWithLog(int(self._name), PATIENCE, lambda: None)
        while True:
            self.leave_if_over(board)
            if trainer.state.fn == "fit":
                return
            patience.wait(lambda: f"waiting for the other ranks to end call {call} (`{trainer.state.fn}`)")

    def take_over(self, board: JoinBoard, trainer: Any, parts: dict[str, Tensor]) -> Any:
        """Leave the call under way, set the Trainer's state to that at the end of the call, and return its result."""
        call = next_call()
        name = trainer.state.fn.value
        if self._strategy.fit_sessions is not None:  # the setup hooks were called
            pytorch("trainer.call")._call_teardown_hook(trainer)
        trainer._teardown()
        _count(call)
        told = f"rank {self._name}: call {call} of the Trainer (`{name}`)"
        if (theirs := decode(parts["call"])) != name:
            raise AsyncTrainingError(
                f"{told} was `{theirs}` on the other ranks. A script must make the same calls each time that it is "
                "started; it must not leave out what was done before."
            )
        if "result" not in parts:
            raise AsyncTrainingError(
                f"{told} is over, and its result was not kept, because it is too large (64 MiB on a rank) or holds "
                "objects that are no plain data. Write it to files within the call (`BasePredictionWriter`), and pass "
                "`return_predictions=False`."
            )
        log.warning("R%s is over on the other ranks: their result is taken.", told[1:])
        for attribute, values in decode(parts["metrics"]).items():
            setattr(trainer._logger_connector, attribute, values)
        if "progress" in parts:
            _load_progress(trainer.fit_loop, decode(parts["progress"]))
        for callback in trainer.callbacks:
            if state := decode(parts.get(_STATE + callback.state_key, encode(None))):
                if "dirpath" in state:  # a callback ignores a state that was saved with another directory
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)
        if decode(parts["changed"]) and not self._load_weights(board, call, trainer.lightning_module):
            log.warning(
                "R%s has trained a model that cannot be had here: it is larger than 64 MiB together with earlier ones, "
                "or its layers are made in a hook. `%s` keeps the weights that it had before the call. What your "
                "program computes with it outside of the Trainer is not what other ranks compute; load a checkpoint of "
                "that call.", told[1:], type(trainer.lightning_module).__name__,
            )  # fmt: skip
        trainer.state.status = pytorch("trainer.states").TrainerStatus.FINISHED
        trainer.state.stage = None
        return decode(parts["result"])

    def _load_weights(self, board: JoinBoard, call: int, module: Any) -> bool:
        """Load the weights that rank 0 has published after a call; return whether all of them are there."""
        until = time.monotonic() + _WEIGHTS_S  # rank 0 may be a little later than the rank whose result was read
        while (data := board.read_bytes(f"weights/{call}")) is None and time.monotonic() < until:
            time.sleep(0.05)
        weights = _decode(data) if data else {}
        own = tensors_of(module)
        if alike := {name: t.shape for name, t in own.items()} == {name: t.shape for name, t in weights.items()}:
            copy_tensors(own, weights)
        return alike


def _encode(value: object) -> Tensor | None:
    """Return the bytes of a value; None if it holds objects that are no plain data, or is too large to be published."""
    try:
        text, tensors = take_apart(value)
    except TypeError:
        return None
    size = len(text) + sum(tensor.nbytes for tensor in tensors)
    if size > _LARGE_BYTES:
        if size > _room[0]:
            return None
        _room[0] -= size
    return encode(value)


def _decode(data: bytes) -> Any:
    return decode(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _count(call: int) -> None:
    begin_call(call)
    count_run()


def _load_progress(loop: Any, state: dict[str, Any], prefix: str = "") -> None:
    """Load the counts of a loop and its inner loops, without marking them as loops that a checkpoint resumes."""
    loop._load_from_state_dict(state, prefix)
    for name, inner in vars(loop).items():
        if isinstance(inner, pytorch("loops.loop")._Loop):
            _load_progress(inner, state, f"{prefix}{name}.")
