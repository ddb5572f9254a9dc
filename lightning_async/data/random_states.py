"""Random generators: their states as plain values, and calls that are repeated with the same random numbers.

The module also has the code that saves and restores the generators of a loader's worker processes.
"""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import inspect
import random
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

States = dict[str, Any]
"""State of each generator by name, as bytes, numbers, tuples and dictionaries."""

# Bounds of `generators_in`, so that it ends soon whatever the objects hold.
DEPTH = 5
"""Largest depth of attributes of attributes."""
WIDTH = 100
"""Largest number of entries of a collection that is searched."""
OBJECTS = 1000
"""Largest number of objects in all."""

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_USUAL = {"python": random, "numpy": np.random, "torch": torch.default_generator}
_PLAIN = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, np.generic, type, types.ModuleType)


class Generators:
    """The random generators of this process: Python's, NumPy's, torch's, and further ones by name.

    Args:
        named: Further generators by name. Default: none.
        devices: Whether to include the generators of CUDA devices. Default: False.
        usual: Which of Python's, NumPy's and torch's generators to include. Default: all.
    """

    def __init__(
        self,
        named: Mapping[str, Any] | None = None,
        devices: bool = False,
        usual: Sequence[str] = ("python", "numpy", "torch"),
    ) -> None:
        self.named = dict(named or {})
        self._usual = {name: _USUAL[name] for name in usual}
        self._devices = devices

    def take(self) -> States:
        return self.hold()()

    def hold(self) -> Callable[[], States]:
        """Return a function that, whenever it is called, returns the states as they were when `hold` was called.

        The states are converted to plain values only when the function is called.
        """
        held = [(name, _held(generator)) for name, generator in self._usual.items()]
        if self._devices and torch.cuda.is_available() and torch.cuda.is_initialized():
            held += [(f"cuda:{i}", torch.cuda.get_rng_state(i)) for i in range(torch.cuda.device_count())]
        held += [(f"own:{name}", _held(generator)) for name, generator in self.named.items()]
        return lambda: {name: _plain(state) for name, state in held}

    def put(self, states: States) -> list[str]:
        """Set the generators to these states; return the names of those states for which there is no generator."""
        missing = []
        for name, state in states.items():
            kind, _, rest = name.partition(":")
            if kind == "cuda":
                if int(rest) < torch.cuda.device_count():
                    torch.cuda.set_rng_state(_tensor(state), int(rest))
            elif kind == "own" and rest not in self.named:
                missing.append(rest)
            else:
                _set_state(self.named[rest] if kind == "own" else _USUAL[kind], state)
        return missing

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the present states of the generators after the block."""
        states = self.take()
        try:
            yield
        finally:
            self.put(states)


def reseed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def of_another(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return a seed for a rank that has no saved states, as ``{"seed": ...}``.

    The seed is computed from another rank's states and ``rank``. The caller passes this number to `reseed`.
    """
    return {"seed": zlib.crc32(states["torch"]) + rank}


def generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random generators in the attributes of objects, by path, such as ``{"sampler.generator": ...}``."""
    return {path: value for path, value in objects_in(roots) if isinstance(value, _KINDS)}


def objects_in(roots: Mapping[str, Any], depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield ``roots`` and all objects that are found in their attributes, each with its path.

    Random generators are yielded, but their attributes are not searched. ``depth`` is the largest number of attributes
    in a path.
    """
    seen: set[int] = set()
    # Breadth first: the bound on objects then leaves out the deepest ones.
    queue = deque((name, value, 0) for name, value in roots.items())
    while queue and len(seen) < OBJECTS:
        path, value, at = queue.popleft()
        if value is None or isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if at < depth and not isinstance(value, _KINDS):
            queue.extend((f"{path}.{name}", child, at + 1) for name, child in _children(value))


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items()) if len(value) <= WIDTH else []
    # Large collections hold data, and not generators.
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(value)) if len(value) <= WIDTH else []
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if inspect.isfunction(value):
        cells = [(i, cell.cell_contents) for i, cell in enumerate(value.__closure__ or ()) if _filled(cell)]
        return [(f"closure.{i}", content) for i, content in cells]
    return list(getattr(value, "__dict__", {}).items())


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable is not assigned yet
        return False


def _held(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        return generator.get_state(legacy=False)
    return generator.getstate()


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return _freeze(state)
    version, internal, gauss = state
    return (version, array.array("I", internal).tobytes(), gauss)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _thaw(state)
    elif isinstance(generator, np.random.RandomState) or generator is np.random:
        generator.set_state(_thaw(state))
    else:
        version, internal, gauss = state
        unpacked = array.array("I")
        unpacked.frombytes(internal)
        generator.setstate((version, tuple(unpacked), gauss))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _freeze(value: Any) -> Any:
    """Return NumPy's states with their arrays replaced by tuples, because ``==`` on arrays does not return one bool."""
    if isinstance(value, dict):
        return {name: _freeze(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.tobytes())
    return value.item() if isinstance(value, np.generic) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _thaw(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list) and len(value) == 3 and value[0] == "array":
        return np.frombuffer(value[2], dtype=value[1]).copy()
    return value


T = TypeVar("T")


class Tape:
    """A record of the random states from which a sequence of calls drew, so that another process can repeat the calls.

    A call has no entry if it draws nothing, or if it draws from the states in which the previous call stopped. For
    example, a sampler that draws only a seed at the start makes one entry, whatever training draws between batches.

    Args:
        generators: Generators whose states are recorded.
        drawn: Entries of an earlier tape, whose calls are repeated. Default: None, there are none.
    """

    def __init__(self, generators: Generators, drawn: dict[int, States] | None = None) -> None:
        self.made = 0
        self._generators = generators
        self._known = dict(drawn or {})
        self._drawn: dict[int, States] = {}
        self._left: States = {}

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function``, record from which random states it draws, and return its result.

        If the earlier tape has an entry for this call, the generators are first set to the states of that entry.
        """
        if self.made in self._known:
            self._generators.put(self._known[self.made])
        # States before and after show what the call drew from, whatever training draws between calls.
        before = self._generators.take()
        try:
            return function()
        finally:
            after = self._generators.take()
            moved = {name for name, state in before.items() if after[name] != state}
            # A call that continues where the last one stopped needs no entry of its own.
            if drew := {name: before[name] for name in moved if before[name] != self._left.get(name)}:
                self._drawn[self.made] = drew
            self._left |= {name: after[name] for name in moved}
            self.made += 1

    def drawn(self, made: int) -> dict[int, States]:
        """Return the recorded random states of the first ``made`` calls, by the number of the call.

        A call without an entry is left out.
        """
        return {call: states for call, states in self._drawn.items() if call < made}


class Indices:
    """An iterable that replaces a loader's sampler, and that can resume after the indices that were taken already.

    To resume, it repeats the earlier calls of the sampler with the same random numbers. The samples of the repeated
    indices are not fetched.

    Args:
        sampler: Function that makes the sampler.
        begin: Function that begins a `Tape`, the record of the sampler's calls, and returns it.
        generators: Generators that are restored after the repeated calls.
        skip: Number of indices that were taken. Default: 0.
        made: Number of calls of the sampler to repeat, including calls for batches that were fetched ahead. Default: 0.
    """

    def __init__(
        self,
        sampler: Callable[[], Iterable[Any]],
        begin: Callable[[], Tape],
        generators: Generators,
        skip: int = 0,
        made: int = 0,
    ) -> None:
        self._sampler = sampler
        self._begin = begin
        self._generators = generators
        self._skip = skip
        self._made = made

    def __len__(self) -> int:
        return len(self._sampler())  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Any]:
        tape = self._begin()
        if self._made:
            return self._behind(tape, self._skip, self._made)
        indices = tape.call(lambda: iter(self._sampler()))
        return self._rest(tape, indices)

    def start_over(self) -> None:
        """Make later iterations begin at the first index."""
        self._skip = self._made = 0

    def _behind(self, tape: Tape, skip: int, made: int) -> Iterator[Any]:
        # Repeated calls must not change the generators: training continues with their present states.
        with self._generators.kept():
            indices = tape.call(lambda: iter(self._sampler()))
            again = []
            while tape.made < made:
                again.append(tape.call(lambda: next(indices, _END)))
        # Indices that were fetched ahead, and not taken, come first.
        yield from (index for index in again[skip:] if index is not _END)
        yield from self._rest(tape, indices)

    def _rest(self, tape: Tape, indices: Iterator[Any]) -> Iterator[Any]:
        while (index := tape.call(lambda: next(indices, _END))) is not _END:
            yield index


_END = object()


# Datasets of Hugging Face are chains of objects, one for each operation.
_CHAIN = 50
# Classes of Hugging Face whose state loses samples, or cannot be loaded in a worker, see `resumable`.
_LOSE = ("BufferShuffledExamplesIterable", "InterleavedShardsExamplesIterable")


def stateful(value: Any) -> bool:
    """Return whether an object has ``state_dict()`` and ``load_state_dict(state)``, like torchdata's datasets.

    litdata's dataset does not count: its ``state_dict`` has arguments, because litdata's own loader calls it.
    """
    save = getattr(value, "state_dict", None)
    load = getattr(value, "load_state_dict", None)
    return callable(save) and callable(load) and _takes(save, 0) and _takes(load, 1)


def _takes(method: Callable[..., Any], number: int) -> bool:
    try:
        inspect.signature(method).bind(*range(number))
    except TypeError:
        return False
    except ValueError:  # a compiled method has no signature
        return True
    return True


def resumable(dataset: Any) -> bool:
    """Return whether a dataset continues from its state with exactly the next sample.

    A Hugging Face dataset with a shuffle buffer does not: its state leaves out the samples in the buffer, which would
    be lost. A dataset that interleaves shards does not, either: its state cannot be loaded in a worker, which has fewer
    shards.
    """
    return stateful(dataset) and not any(
        type(value).__name__ in _LOSE for _, value in objects_in({"dataset": dataset}, depth=_CHAIN)
    )


class Resumed(IterableDataset[Any]):
    """A dataset that begins one iteration at a saved state, and later ones as if no state had been loaded.

    Some datasets behave so without this class. Others, such as Hugging Face's, begin every iteration at the loaded
    state while their epoch number is the same, so all samples before that state would be missing in all later
    iterations. The second iteration shows which kind a dataset is. If the dataset's state after the first sample equals
    that in the first iteration, the dataset has begun at the loaded state again. Then the load is undone, and the
    iteration begins again.

    Args:
        iterable: Dataset with ``state_dict`` and ``load_state_dict``.
        ended: Whether the state belongs to an iteration that has ended, so a new one begins next. Default: False.
        idle: Whether nobody reads the first iteration. Then it yields nothing and does not start the dataset. Default:
            False.
    """

    def __init__(self, iterable: Any, ended: bool = False, idle: bool = False) -> None:
        self.iterable = iterable
        self._ended = ended
        self._idle = idle
        self._follows = False
        self._fresh: Any = None
        self._replaced: dict[str, Any] = {}
        self._first: tuple[bool, Any] | None = None
        """Whether the iteration at the loaded state had a sample, and the state after that sample."""

    def __getattr__(self, name: str) -> Any:
        if name == "iterable":  # unpickling asks for attributes before there are any
            raise AttributeError(name)
        return getattr(self.iterable, name)

    def __len__(self) -> int:
        return len(self.iterable)

    def state_dict(self) -> Any:
        return self.iterable.state_dict()

    def load_ended(self, state: Any) -> None:
        """Load the state of an iteration that has ended; the next iteration is the one that follows it."""
        self._ended = True
        self.load_state_dict(state)

    def load_state_dict(self, state: Any) -> None:
        """Load a state, and keep what is needed to undo the load."""
        # Kept for `_undo`, which loads it again.
        self._fresh = copy.deepcopy(self.iterable.state_dict())
        before = dict(getattr(self.iterable, "__dict__", {}))
        self.iterable.load_state_dict(state)
        after = getattr(self.iterable, "__dict__", {})
        self._replaced = {n: before.get(n, _END) for n, value in after.items() if value is not before.get(n, _END)}
        self._follows = not _same(state, self._fresh)
        self._first = None
        keeps_apart = self._follows and _same(self.iterable.state_dict(), self._fresh)
        if self._ended and keeps_apart:
            # The next iteration would begin at the end of the last one. That iteration is begun here and dropped: a
            # dataset that counts epochs has counted it then, and the next one shows whether it begins there again.
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
        # An ended iteration has no sample left: this is its end, and the iteration that is wanted comes next.
        if sample is _END and self._ended and self._follows and self._first is None:
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
        # After the load, because the fresh state may not be that of this worker's share.
        for name, value in self._replaced.items():
            if value is _END:
                vars(self.iterable).pop(name, None)
            else:
                vars(self.iterable)[name] = value
        self._follows = False


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, including their tensors and arrays."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


class Carried:
    """A batch on its way from a worker to the loader's process, with the states that have changed in the worker.

    Args:
        batch: The batch.
        worker: Number of the worker.
        state: Random states that have changed since the worker's last batch, and the state of the dataset.
    """

    def __init__(self, batch: Any, worker: int, state: dict[str, Any]) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> Carried:
        self.batch = pin_memory(self.batch)
        return self


class Carrier:
    """A function that replaces a loader's ``collate_fn``, and adds the worker's state to each batch.

    The collate function is the last call for a batch in a worker, so the state at its end is the state after the batch.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._generators: Generators | None = None
        self._is_stateful = False
        self._sent: dict[str, Any] = {}

    def __call__(self, samples: Any) -> Carried:
        batch = self._collate(samples)
        info = get_worker_info()
        assert info is not None, "runs in workers"
        dataset: Any = info.dataset
        # Searched once in each worker, because a search through objects takes long.
        if self._generators is None:
            self._generators = _generators(dataset, self._collate)
            self._is_stateful = stateful(dataset)
        states = self._generators.take()
        # Only changes, because NumPy's state alone has 2.5 kB, and travels with every batch.
        changed = {name: state for name, state in states.items() if self._sent.get(name) != state}
        self._sent = states
        state: dict[str, Any] = {"random": changed}
        if self._is_stateful:
            # A copy, because the queue pickles the state later, on a thread, when the dataset has moved on.
            state["dataset"] = copy.deepcopy(dataset.state_dict())
        return Carried(batch, info.id, state)


class WorkerStart:
    """A function that replaces a loader's ``worker_init_fn``, calls it, and then restores the worker's state.

    Args:
        init: The loader's own function. None: the loader has none.
        states: State of each worker, by the worker's number. A worker without a state begins at the start.
        collate: The loader's ``collate_fn``, whose random generators are restored, too.
    """

    def __init__(
        self, init: Callable[[int], Any] | None, states: dict[int, dict[str, Any]], collate: Callable[[Any], Any]
    ) -> None:
        self._init = init
        self._states = states
        self._collate = collate

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        state = self._states.get(worker)
        if info is None:
            return
        dataset: Any = info.dataset
        resumed = dataset
        if isinstance(resumed, Resumed):
            dataset = resumed.iterable
            object.__setattr__(info, "dataset", dataset)  # frozen; user code expects its own dataset there
        if state is None:
            return
        if "dataset" in state and stateful(dataset):
            load = resumed.load_ended if state.get("ended") and resumed is not dataset else resumed.load_state_dict
            load(state["dataset"])
        _generators(dataset, self._collate).put(state["random"])


def _generators(dataset: Any, collate: Any) -> Generators:
    return Generators(generators_in({"dataset": dataset, "collate_fn": collate}))
