"""What runs in a DataLoader's worker processes: each batch brings the worker's random states along.

Everything here is pickled where workers are spawned.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_async.data.random_states import Generators, generators_in, objects_in

__all__ = ["Carried", "Carrier", "Resumed", "Start", "resumable", "stateful"]

_END = object()
_CHAIN = 50
"""How many datasets may be within each other."""
_LOSE = ("BufferShuffledExamplesIterable", "InterleavedShardsExamplesIterable")
"""Parts of a dataset of Hugging Face's that do not go on from its state."""


def stateful(value: Any) -> bool:
    """Whether it can save and load its state, as torchdata's datasets and loaders do: by methods of no other arguments.

    litdata's dataset, whose ``state_dict`` is for its own loader, wants to be told what that has taken.
    """
    save, load = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    return callable(save) and callable(load) and _takes(save, 0) and _takes(load, 1)


def _takes(method: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(method).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # of an extension, which says nothing
        return True
    return True


def resumable(dataset: Any) -> bool:
    """Whether it goes on from its state with the sample that follows.

    The state of a dataset of Hugging Face's leaves out what is in its shuffle buffer: those samples would be lost. The
    state of one that interleaves shards cannot be loaded in a worker, whose shards are fewer.
    """
    return stateful(dataset) and not any(
        type(value).__name__ in _LOSE for _, value in objects_in({"dataset": dataset}, depth=_CHAIN)
    )


class Resumed(IterableDataset[Any]):
    """A dataset that begins one iteration at a saved state, and later ones as if none had ever been loaded.

    Some go on from a loaded state by themselves, and begin anew at the end. Others keep it: Hugging Face's datasets
    begin every iteration at it while their epoch is the same, so that what was taken before would be missing for ever.
    The second iteration tells: if its first sample leads to the state to which the first sample behind the load has
    led, it has begun at the loaded state once more. Then the load is undone, and the iteration begins again.

    Args:
        iterable: has ``state_dict`` and ``load_state_dict``.
        ended: the state is that of an iteration of which nothing more is read.
        idle: the first iteration here is one that nobody reads, so it begins nothing.
    """

    def __init__(self, iterable: Any, ended: bool = False, idle: bool = False) -> None:
        self.iterable, self._ended, self._idle = iterable, ended, idle
        self._follows = False
        self._fresh: Any = None
        self._replaced: dict[str, Any] = {}
        """Attributes as they were before the load."""
        self._first: tuple[bool, Any] | None = None
        """Whether the iteration at the loaded state had a sample, and the state behind it."""

    def __getattr__(self, name: str) -> Any:
        if name == "iterable":  # not there yet, as where it is being unpickled
            raise AttributeError(name)
        return getattr(self.iterable, name)

    def __len__(self) -> int:
        return len(self.iterable)

    def state_dict(self) -> Any:
        """As it saves it by itself."""
        return self.iterable.state_dict()

    def load_ended(self, state: Any) -> None:
        """Begin the next iteration behind one of which nothing more is read, and which has left ``state``."""
        self._ended = True
        self.load_state_dict(state)

    def load_state_dict(self, state: Any) -> None:
        """Begin the next iteration at ``state``."""
        self._fresh = copy.deepcopy(self.iterable.state_dict())
        before = dict(getattr(self.iterable, "__dict__", {}))
        self.iterable.load_state_dict(state)
        after = getattr(self.iterable, "__dict__", {})
        self._replaced = {n: before.get(n, _END) for n, value in after.items() if value is not before.get(n, _END)}
        self._follows, self._first = not _same(state, self._fresh), None
        keeps_apart = self._follows and _same(self.iterable.state_dict(), self._fresh)
        if self._ended and keeps_apart:
            # It would begin at the end. That iteration is begun here, and dropped: one that counts its epochs as they
            # begin has counted it then, and the next iteration tells whether it begins there again.
            with Generators(generators_in({"dataset": self.iterable})).kept():
                first = next(iter(self.iterable), _END)
            self._first = first is not _END, copy.deepcopy(self.iterable.state_dict())

    def __iter__(self) -> Iterator[Any]:
        if self._idle:
            self._idle = False
            return iter(())
        return self._followed(iter(self.iterable)) if self._follows else iter(self.iterable)

    def _followed(self, samples: Iterator[Any]) -> Iterator[Any]:
        generators = Generators(generators_in({"dataset": self.iterable}))
        random = generators.take()
        sample = next(samples, _END)
        if sample is _END and self._ended and self._follows and self._first is None:  # it has begun behind its end
            self._first = False, copy.deepcopy(self.iterable.state_dict())
            samples = iter(self.iterable)
            sample = next(samples, _END)
        found = sample is not _END, copy.deepcopy(self.iterable.state_dict())
        again = _same(found, self._first) if self._first is not None else self._ended and not found[0]
        if again and self._follows:
            self._undo()
            generators.put(random)
            with generators.kept():
                samples = iter(self.iterable)
            sample = next(samples, _END)
        self._follows = self._follows and self._first is None
        self._first = found
        if sample is not _END:
            yield sample
            yield from samples

    def _undo(self) -> None:
        self.iterable.load_state_dict(self._fresh)
        # Behind the load, as the state before it need not be that of a worker's share.
        for name, value in self._replaced.items():
            if value is _END:
                vars(self.iterable).pop(name, None)
            else:
                vars(self.iterable)[name] = value
        self._follows = False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


class Carried:
    """A batch, and the state of the worker that made it.

    Args:
        batch: what the loader yields.
        worker: who made it.
        state: what has changed since the worker's last batch: its random states, its dataset's state.
    """

    def __init__(self, batch: Any, worker: int, state: dict[str, Any]) -> None:
        self.batch, self.worker, self.state = batch, worker, state

    def pin_memory(self) -> Carried:
        """As torch asks of batches of types that it does not know."""
        self.batch = pin_memory(self.batch)
        return self


class Carrier:
    """A loader's ``collate_fn``, which is the last that happens to a batch in a worker.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._generators: Generators | None = None
        self._is_stateful = False
        self._sent: dict[str, Any] = {}

    def __call__(self, samples: Any) -> Carried:
        batch, info = self._collate(samples), get_worker_info()
        assert info is not None, "runs in workers"
        dataset: Any = info.dataset
        if self._generators is None:
            self._generators = _generators(dataset, self._collate)
            self._is_stateful = stateful(dataset)
        states = self._generators.take()
        changed = {name: state for name, state in states.items() if self._sent.get(name) != state}
        self._sent = states
        state: dict[str, Any] = {"random": changed}
        if self._is_stateful:
            # The queue pickles it later, in a thread, when the dataset is elsewhere already.
            state["dataset"] = copy.deepcopy(dataset.state_dict())
        return Carried(batch, info.id, state)


class Start:
    """A loader's ``worker_init_fn``: then puts the worker where it was.

    Args:
        init: the loader's own.
        states: by worker; one that is not there begins as any new worker.
        collate: may hold generators.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: dict[int, dict[str, Any]], collate: Callable[[Any], Any]
    ) -> None:
        self._init, self._states, self._collate = init, states, collate

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info, state = get_worker_info(), self._states.get(worker)
        if info is None:
            return
        dataset: Any = info.dataset
        resumed = dataset
        if isinstance(resumed, Resumed):
            dataset = resumed.iterable
            object.__setattr__(info, "dataset", dataset)  # it is frozen, and the program looks for its own there
        if state is None:
            return
        if "dataset" in state and stateful(dataset):
            load = resumed.load_ended if state.get("ended") and resumed is not dataset else resumed.load_state_dict
            load(state["dataset"])
        _generators(dataset, self._collate).put(state["random"])


def _generators(dataset: Any, collate: Any) -> Generators:
    return Generators(generators_in({"dataset": dataset, "collate_fn": collate}))
