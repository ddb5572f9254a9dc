"""Finished calls of the Trainer: their results, for a rank that was started again and makes these calls once more.

A script with several calls (``fit``, ``validate``, ...), such as a cross-validation, begins anew on a rank that was
started again. Each rank publishes the results of its calls in the store. The returning rank takes them from there,
without running these calls, until it comes to a ``fit`` that the others have not finished.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_async.comm.serialization import decode, encode, take_apart
from lightning_async.engine.fingerprint import digests
from lightning_async.errors import AsyncTrainingError
from lightning_async.membership.join_protocol import JoinBoard, JoinBoardWithTimeout
from lightning_async.membership.startup import WaitWithLog, naming_the_stores_host
from lightning_async.strategies.rank_mapping import begin_call, count_run, next_call
from lightning_async.trainer.data.join import copy_tensors, parameters_and_buffers
from lightning_async.trainer.namespace import pytorch
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
_LARGE_BYTES = 1 << 20
_MANY = 1 << 22
_room = [1 << 26]  # bytes that this process may still publish in values of more than `_LARGE_BYTES`
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_STATE = "state of "
_REMEDY = (
    "Each start of a script must make the same calls with the same data: it must not leave out what was done before, "
    "and random splits need a seed."
)


class CallIsOver(Exception):
    """The other ranks have finished the call of the Trainer that this returning rank makes, so that it leaves the call.

    Args:
        parts: What was published of the call's end, see `FinishedCalls`.
    """

    def __init__(self, parts: dict[str, Any]) -> None:
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
        self._call = ""
        self._hparams: list[Any] = []

    def _open_board(self) -> JoinBoard:
        strategy = self._strategy
        door = cast(TorchTransport, strategy.transport).door(strategy.cluster_environment)
        return JoinBoardWithTimeout(door, int(strategy.stable_id), strategy.config.timeouts.dead_after, lambda: None)

    def begin(self, trainer: Any, data: Any) -> None:
        """Note the call that begins: its kind, and the loaders and data modules in ``data``."""
        self._call = trainer.state.fn.value
        self._hparams = []
        with contextlib.suppress(Exception):  # users' objects may have attributes that cannot be read
            self._call += f"({describe_data(data)})"
            self._hparams = [_plain(source.hparams) for source in tree_leaves(data) if hasattr(source, "hparams")]

    def publish(self, trainer: Any, result: Any) -> None:
        """Publish the end of the call that this rank has just finished."""
        call = next_call() - 1
        changed = trainer.state.fn == "fit" or trainer.ckpt_path is not None
        parts = {
            "call": self._call,
            "hparams": self._hparams,
            "result": result,
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},
            "progress": {path: counts.state_dict() for path, counts in _progress_of(trainer.fit_loop)},
            "changed": changed,
        }
        for callback in trainer.callbacks:
            with contextlib.suppress(Exception):  # a user's callback may have no state outside of a call
                parts[_STATE + callback.state_key] = callback.state_dict()
        encoded = {name: data for name, value in parts.items() if (data := _encode(value)) is not None}
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the next call says so
            board = self._open_board()
            if changed and self._strategy.global_rank == 0:
                weights = _encode(parameters_and_buffers(trainer.lightning_module))
                board.write_bytes(f"weights/{call}", b"" if weights is None else weights.numpy().tobytes())
            board.write_bytes(f"call/{call}/{self._strategy.stable_id}", encode(encoded).numpy().tobytes())

    def wait(self, trainer: Any) -> None:
        """Wait until the other ranks have finished the call that this returning rank makes, and raise `CallIsOver`.

        Return at once if the call is a fit that the others have not finished: this rank can join it.

        Raises:
            AsyncTrainingError: see `leave_if_over`; or the processes of all other ranks have ended.
        """
        rank = int(self._strategy.stable_id)
        transport = cast(TorchTransport, self._strategy.transport)

        def check() -> None:
            transport.check_others(self._strategy.cluster_environment, self._strategy.config.timeouts.dead_after)

        # An evaluation may be long: as long as another rank lives, this rank waits.
        patience = WaitWithLog(rank, None, check)
        with naming_the_stores_host(rank):
            board = self._open_board()
            self.leave_if_over(board)
            while trainer.state.fn != "fit":
                try:
                    patience.wait(lambda: f"waiting for the other ranks to finish `{trainer.state.fn.value}`")
                finally:  # also when the last of them has ended, which may have published just before
                    self.leave_if_over(board)

    def leave_if_over(self, board: JoinBoard) -> None:
        """Raise `CallIsOver` if the other ranks have finished the call that this returning rank makes.

        The result is that of the process that this one replaces; if that has not finished the call, of another rank.

        Raises:
            AsyncTrainingError: the call has no result, or the others have made another call.
        """
        call = next_call()
        stable_id = self._strategy.stable_id
        told = f"rank {stable_id}, which was started again: call {call} of the Trainer"
        began, goes_on = (board.read(f"roll/{number}").get("members") for number in (call, call + 1))
        for name in (stable_id, *(began or map(str, range(self._strategy.num_started))), *(goes_on or ())):
            if (data := board.read_bytes(f"call/{call}/{name}")) is None:
                continue
            parts = {part: decode(encoded) for part, encoded in _decode(data).items()}
            if parts["call"] != self._call:
                raise AsyncTrainingError(f"{told} is {self._call}, and was {parts['call']} on rank {name}. {_REMEDY}")
            # Times, temporary directories and such differ between starts that are equal otherwise.
            if (before := parts.get("hparams", self._hparams)) != self._hparams:
                log.warning("%s has data with hparams %s, and rank %s had %s.", told, self._hparams, name, before)
            if name != stable_id and self._call.startswith("predict"):
                parts["result"] = []  # the others have predicted this rank's samples, too
            weights = board.read_bytes(f"weights/{call}")  # of rank 0, which may be later than the rank of the result
            if goes_on or weights is not None or not parts["changed"]:
                raise CallIsOver({**parts, "weights": _decode(weights) if weights else {}})
        if goes_on:
            begin_call(call)
            count_run()
            raise AsyncTrainingError(
                f"{told} has ended without a result, by an exception or as a search of the Tuner, and this rank cannot "
                "make it alone."
            )

    def take_over(self, trainer: Any, parts: dict[str, Any]) -> Any:
        """Leave the call under way, set the Trainer's state to that at the end of the call, and return its result."""
        call = next_call()
        if self._strategy.fit_sessions is not None:  # the setup hooks were called
            pytorch("trainer.call")._call_teardown_hook(trainer)
        trainer._teardown()
        begin_call(call)
        count_run()
        stable_id = self._strategy.stable_id
        told = f"call {call} of the Trainer (`{trainer.state.fn.value}`)"
        if "result" not in parts:
            raise AsyncTrainingError(
                f"rank {stable_id}: {told} is over, and its result was not kept: it is too large (64 MiB of a rank), "
                "or holds objects that are no plain data. Write it to files within the call "
                "(`BasePredictionWriter`), and pass `return_predictions=False`."
            )
        log.warning("Rank %s: %s is over on the other ranks, and their result is taken.", stable_id, told)
        for attribute, values in parts["metrics"].items():
            setattr(trainer._logger_connector, attribute, values)
        for path, counts in _progress_of(trainer.fit_loop):
            counts.load_state_dict(parts["progress"][path])
        for callback in trainer.callbacks:
            if state := parts.get(_STATE + callback.state_key):
                if "dirpath" in state:  # a callback ignores a state that was saved with another directory
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)
        module = trainer.lightning_module
        weights = parts["weights"]
        copy_tensors(parameters_and_buffers(module), weights)
        complete = all(n in weights and weights[n].shape == p.shape for n, p in module.named_parameters())
        if parts["changed"] and not complete:
            log.warning(
                "Rank %s: the model of %s cannot be had, because it is larger than 64 MiB together with earlier ones. "
                "`%s` keeps the weights that it had before the call. What your program computes with it outside of the "
                "Trainer differs from other ranks; load a checkpoint of that call first.",
                stable_id, told, type(module).__name__,
            )  # fmt: skip
        trainer.state.status = pytorch("trainer.states").TrainerStatus.FINISHED
        trainer.state.stage = None
        return parts["result"]


def describe_data(data: Any) -> str:
    """Return a text of the loaders and data modules in ``data``, which differs between the folds of a cross-validation.

    >>> describe_data([torch.utils.data.DataLoader([1, 2, 3]), None, "best"])
    'DataLoader of 3, 78adb9ea'
    """
    texts = []
    for source in tree_leaves(data):
        dataset = getattr(source, "dataset", None)
        if dataset is not None or hasattr(source, "hparams"):
            owners = (dataset, getattr(source, "sampler", None))
            values = [_plain(getattr(owner, name, None)) for owner in owners for name in ("indices", "tensors")]
            size = f" of {len(dataset)}" if hasattr(dataset, "__len__") else ""  # pyright: ignore[reportArgumentType]
            texts.append(f"{type(source).__name__}{size}, {zlib.crc32(repr(values).encode()):08x}")
    return "; ".join(texts)


def _plain(value: Any) -> Any:
    """Return plain values that are equal in all processes that make ``value``: digests of numbers, the parts of others.

    Of more than 4 million numbers, some are compared. Objects that are no plain data have their type alone.
    """
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return sorted(([str(name), _plain(each)] for name, each in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        numbers = torch.as_tensor(value)
        part = numbers.reshape(-1)[:: max(1, numbers.numel() // _MANY)]
        return [str(numbers.dtype), list(numbers.shape), digests([part])[0]]
    return list(map(_plain, value)) if isinstance(value, list | tuple) else type(value).__name__


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


def _progress_of(loop: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the counts of a loop and its inner loops, with their paths; the loops' own states belong to checkpoints."""
    for name, value in vars(loop).items():
        if isinstance(value, pytorch("loops.progress")._BaseProgress):
            yield path + name, value
        elif isinstance(value, pytorch("loops.loop")._Loop):
            yield from _progress_of(value, f"{path}{name}.")
