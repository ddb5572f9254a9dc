"""Random generators: finding them, and their states as plain values that compare with ``==``."""

from __future__ import annotations

import array
import contextlib
import functools
import inspect
import random
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["Generators", "States", "generators_in", "objects_in", "of_another", "reseed"]

States = dict[str, Any]
"""State by the generator's name: bytes, numbers, and tuples and dicts of them."""

DEPTH, WIDTH, OBJECTS = 5, 100, 1000
"""How far `generators_in` looks: attributes of attributes, entries of one collection, objects in all."""

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_USUAL = {"python": random, "numpy": np.random, "torch": torch.default_generator}
_PLAIN = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, np.generic, type, types.ModuleType)


class Generators:
    """Python's, NumPy's and torch's random generators of this process, and others by name.

    Args:
        named: generators of the program's own, as `generators_in` finds them.
        devices: whether each CUDA device's generator belongs to them.
        usual: those of this process that belong to them.
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
        """The states as they are now."""
        return self.hold()()

    def hold(self) -> Callable[[], States]:
        """The same, made plain values only when they are asked for, which takes longer than to hold them."""
        held = [(name, _held(generator)) for name, generator in self._usual.items()]
        if self._devices and torch.cuda.is_available() and torch.cuda.is_initialized():
            held += [(f"cuda:{i}", torch.cuda.get_rng_state(i)) for i in range(torch.cuda.device_count())]
        held += [(f"own:{name}", _held(generator)) for name, generator in self.named.items()]
        return lambda: {name: _plain(state) for name, state in held}

    def put(self, states: States) -> list[str]:
        """Set what ``states`` names; returns the names of which there is no generator here."""
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
        """What is drawn inside is not missed outside."""
        states = self.take()
        try:
            yield
        finally:
            self.put(states)


def reseed(seed: int) -> None:
    """Begin all of this process's generators at ``seed``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def of_another(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a rank that has no random states of its own begins with, beside one that has these: to be taken by `put`."""
    return {"seed": zlib.crc32(states["torch"]) + rank}


def generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that objects hold in their attributes, by path: ``{"sampler.generator": ...}``."""
    return {path: value for path, value in objects_in(roots) if isinstance(value, _KINDS)}


def objects_in(roots: Mapping[str, Any], depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """The objects that objects hold in their attributes, with their paths; those of generators are left out.

    Args:
        depth: attributes of attributes.
    """
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
    """Its state, in the generator's own terms."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState) or generator is np.random:
        return generator.get_state(legacy=False)
    return generator.getstate()


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return _bytes(state)
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


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _freeze(value: Any) -> Any:
    """NumPy's states hold arrays, which do not compare with ``==``."""
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
