"""Random generators: their states as plain values, calls that draw from them, and what runs in a loader's workers."""

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
"""State by the generator's name: bytes, numbers, and tuples and dicts of them."""

DEPTH = 5
WIDTH = 100
OBJECTS = 1000
"""Bounds of `generators_in`: attributes of attributes, entries of one collection, objects in all."""

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_USUAL = {"python": random, "numpy": np.random, "torch": torch.default_generator}
_PLAIN = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, np.generic, type, types.ModuleType)


class Generators:
    """Python's, NumPy's and torch's generators of this process, CUDA ``devices``', and others by name."""

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
        """Return the same, made plain values only when they are asked for, which takes longer than to hold them."""
        held = [(name, _held(generator)) for name, generator in self._usual.items()]
        if self._devices and torch.cuda.is_available() and torch.cuda.is_initialized():
            held += [(f"cuda:{i}", torch.cuda.get_rng_state(i)) for i in range(torch.cuda.device_count())]
        held += [(f"own:{name}", _held(generator)) for name, generator in self.named.items()]
        return lambda: {name: _plain(state) for name, state in held}

    def put(self, states: States) -> list[str]:
        """Set what ``states`` names; return the names of which there is no generator here."""
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
        """Put the states back behind the block."""
        states = self.take()
        try:
            yield
        finally:
            self.put(states)


def reseed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def of_another(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return what a rank without random states begins with, beside one that has these: to be taken by `put`."""
    return {"seed": zlib.crc32(states["torch"]) + rank}


def generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators that objects hold in their attributes, by path: ``{"sampler.generator": ...}``."""
    return {path: value for path, value in objects_in(roots) if isinstance(value, _KINDS)}


def objects_in(roots: Mapping[str, Any], depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield the objects that objects hold in their attributes, with their paths; those of generators are left out."""
    seen: set[int] = set()
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
    except ValueError:  # not assigned yet
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
    """Make NumPy's states comparable with ``==``, which arrays are not."""
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
    """The states of the generators from which a sequence of calls drew, so that another process can make them again.

    A call that draws nothing leaves no trace, nor one that goes on where the last one stopped. So a sampler that draws
    a seed at the start leaves one entry, whatever training draws between its batches. ``drawn`` is of an earlier tape.
    """

    def __init__(self, generators: Generators, drawn: dict[int, States] | None = None) -> None:
        self.made = 0
        self._generators = generators
        self._known = dict(drawn or {})
        self._drawn: dict[int, States] = {}
        self._left: States = {}

    def call(self, function: Callable[[], T]) -> T:
        """Make the next call; from the states that an earlier tape remembers, if it does."""
        if self.made in self._known:
            self._generators.put(self._known[self.made])
        before = self._generators.take()
        try:
            return function()
        finally:
            after = self._generators.take()
            moved = {name for name, state in before.items() if after[name] != state}
            if drew := {name: before[name] for name in moved if before[name] != self._left.get(name)}:
                self._drawn[self.made] = drew
            self._left |= {name: after[name] for name in moved}
            self.made += 1

    def drawn(self, made: int) -> dict[int, States]:
        return {call: states for call, states in self._drawn.items() if call < made}


class Indices:
    """Stands for a sampler in an iteration over a loader; may begin behind what was taken already.

    The sampler, which ``sampler`` makes, is then asked for the indices before again, but nothing is fetched for them:
    ``skip`` indices were taken, and ``made`` calls had been made, for what was fetched ahead too.
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
        self._skip = self._made = 0

    def _behind(self, tape: Tape, skip: int, made: int) -> Iterator[Any]:
        with self._generators.kept():
            indices = tape.call(lambda: iter(self._sampler()))
            again = []
            while tape.made < made:
                again.append(tape.call(lambda: next(indices, _END)))
        yield from (index for index in again[skip:] if index is not _END)
        yield from self._rest(tape, indices)

    def _rest(self, tape: Tape, indices: Iterator[Any]) -> Iterator[Any]:
        while (index := tape.call(lambda: next(indices, _END))) is not _END:
            yield index


_END = object()


_CHAIN = 50
_LOSE = ("BufferShuffledExamplesIterable", "InterleavedShardsExamplesIterable")


def stateful(value: Any) -> bool:
    """Return whether it saves and loads its state as torchdata's datasets do, by methods of no other arguments.

    litdata's dataset, whose ``state_dict`` is for its own loader, wants to be told what that has taken.
    """
    save = getattr(value, "state_dict", None)
    load = getattr(value, "load_state_dict", None)
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
    """Return whether it goes on from its state with the sample that follows.

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
        self.iterable = iterable
        self._ended = ended
        self._idle = idle
        self._follows = False
        self._fresh: Any = None
        self._replaced: dict[str, Any] = {}
        self._first: tuple[bool, Any] | None = None
        """Whether the iteration at the loaded state had a sample, and the state behind it."""

    def __getattr__(self, name: str) -> Any:
        if name == "iterable":  # not there yet, as where it is being unpickled
            raise AttributeError(name)
        return getattr(self.iterable, name)

    def __len__(self) -> int:
        return len(self.iterable)

    def state_dict(self) -> Any:
        return self.iterable.state_dict()

    def load_ended(self, state: Any) -> None:
        """Begin the next iteration behind one of which nothing more is read, and which has left ``state``."""
        self._ended = True
        self.load_state_dict(state)

    def load_state_dict(self, state: Any) -> None:
        self._fresh = copy.deepcopy(self.iterable.state_dict())
        before = dict(getattr(self.iterable, "__dict__", {}))
        self.iterable.load_state_dict(state)
        after = getattr(self.iterable, "__dict__", {})
        self._replaced = {n: before.get(n, _END) for n, value in after.items() if value is not before.get(n, _END)}
        self._follows = not _same(state, self._fresh)
        self._first = None
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
    """A batch, and what has changed in its worker since the last one: random states, the dataset's state."""

    def __init__(self, batch: Any, worker: int, state: dict[str, Any]) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> Carried:
        self.batch = pin_memory(self.batch)
        return self


class Carrier:
    """A loader's ``collate_fn``, which is the last that happens to a batch in a worker."""

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


class WorkerStart:
    """A loader's ``worker_init_fn``, which then puts the worker where it was, if ``states`` say so."""

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
            object.__setattr__(info, "dataset", dataset)  # it is frozen, and the program looks for its own there
        if state is None:
            return
        if "dataset" in state and stateful(dataset):
            load = resumed.load_ended if state.get("ended") and resumed is not dataset else resumed.load_state_dict
            load(state["dataset"])
        _generators(dataset, self._collate).put(state["random"])


def _generators(dataset: Any, collate: Any) -> Generators:
    return Generators(generators_in({"dataset": dataset, "collate_fn": collate}))
