"""Plain values and tensors as JSON and raw memory. Whatever arrives is read, never executed.

For files, `flatten` converts a value to JSON values and a list of its tensors, without copying them, and `unflatten`
converts back. For messages, `encode` makes one tensor of bytes of a value, and `decode` reads it; `take_apart` makes a
text, and `make_room` memory into which the tensors are received one by one. A value that JSON lacks becomes an object
whose first entry is a tag: ``{"tuple": [1, 2]}``.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_async.comm.collectives import as_bytes
from lightning_async.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool",
        "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}  # fmt: skip
"""Dtypes of tensors that can travel, by name."""
_ALL_DTYPES = {str(each)[6:]: each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LENGTH = 8
_LARGEST = 1 << 63  # integers below this are kept whole by every reader of JSON
_MALFORMED = (RuntimeError, KeyError, TypeError, IndexError, ValueError, RecursionError, OverflowError, AttributeError)

_Path = tuple[Any, ...]
"""Place in a tree, as ``(path of the container, key)``; put into words only for an error."""


def flatten(
    value: object, *, exact: bool = False, dump: Callable[[object], bytes] | None = None
) -> tuple[Any, list[Tensor]]:
    """Return ``value`` as JSON values, and a list of its tensors, not copied: ``unflatten(*flatten(value))`` equals it.

    A tensor that occurs twice, or another one over the same memory, is listed once and comes back as one.

    Args:
        value: None, bools, numbers (also nan, inf and complex ones), strings, bytes, dense tensors (parameters come
            back as tensors), arrays and scalars of numpy; lists, tuples, sets and dicts of these, with any keys except
            tensors (a defaultdict comes back as a dict); sizes, dtypes, devices, timedeltas, datetimes and paths. A
            subclass of int, float or str comes back as its base.
        exact: Whether to refuse values that would come back as another type. Default: False.
        dump: Function that makes bytes of any other object; `unflatten` then needs a ``load``. Default: None, other
            objects are refused.

    Raises:
        TypeError: The value holds an object that cannot be converted, or for which ``dump`` fails; the message names
            the object's type and its place.
        ValueError: The value contains itself.

    >>> flatten({"steps": (3, None), "x": torch.tensor([1.5])})
    ({'dict': [['steps', {'tuple': [3, None]}], ['x', {'tensor': 0}]]}, [tensor([1.5000])])
    """
    flattening = _Flattening(exact, dump)
    try:
        return flattening.plain(value, ()), flattening.tensors
    except RecursionError:
        raise ValueError(f"a {type(value).__name__} cannot travel: it is nested too deeply, or in itself.") from None


def unflatten(plain: Any, tensors: Sequence[Tensor], load: Callable[[bytes], Any] | None = None) -> Any:
    """Return the value that was given to `flatten`; it contains ``tensors`` themselves, not copies.

    Args:
        plain: The value as JSON values.
        tensors: Its tensors.
        load: Function that makes an object of the bytes that `flatten`'s ``dump`` has made. Default: None, such objects
            are refused.

    Raises:
        CheckpointError: ``load`` has raised it.
        ValueError: The arguments are no result of `flatten`, or contain objects that need a ``load``.
    """
    try:
        return _value(plain, tensors, load)
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise ValueError(f"this is no flattened value: {error}") from error


def encode(value: object) -> Tensor:
    """Return a flat uint8 tensor that `decode` turns back into ``value``, with exactly the same types.

    Raises:
        TypeError: The value holds an object that cannot be converted; the message names its type and its place.

    >>> decode(encode({"steps": (3, None), "x": torch.tensor([1.5])}))
    {'steps': (3, None), 'x': tensor([1.5000])}
    """
    text, tensors = take_apart(value)
    head = text.encode()
    length = torch.tensor([len(head)], dtype=torch.int64).view(torch.uint8)
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([length, front, *(as_bytes(tensor.cpu().contiguous()) for tensor in tensors)])


def decode(data: Tensor) -> Any:
    """Return the value that `encode` was given; raise ValueError if these bytes are not a result of `encode`."""
    try:
        length = int(data[:_LENGTH].clone().view(torch.int64))
        at = _LENGTH + length
        plain, kinds = json.loads(bytes(data[_LENGTH:at].tolist()))
        tensors = []
        for name, sizes in kinds:
            dtype = DTYPES[name]
            shape = torch.Size(sizes)
            end = at + shape.numel() * dtype.itemsize
            if end > data.numel():
                raise IndexError(f"a tensor ends after {end} bytes")
            tensors.append(data[at:end].clone().view(dtype).view(shape))
            at = end
        value = _value(plain, tensors)
    except _MALFORMED as error:
        raise ValueError(f"{data.numel()} bytes are no encoded value: {error}") from error
    # Bytes that are left over show that sender and receiver disagree.
    if at != data.numel():
        raise ValueError(f"{data.numel()} bytes are no encoded value: it ends after {at}.")
    return value


def take_apart(value: object) -> tuple[str, list[Tensor]]:
    """Return ``value`` as a JSON text and a list of its tensors, not copied; accepts the same values as `encode`.

    >>> take_apart({"x": torch.tensor([1.5])})
    ('[{"dict": [["x", {"tensor": 0}]]}, [["float32", [1]]]]', [tensor([1.5000])])
    """
    plain, tensors = flatten(value, exact=True)
    return json.dumps([plain, [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in tensors]]), tensors


def make_room(text: str) -> tuple[Any, list[Tensor]]:
    """Read a text of `take_apart`: return the value's JSON part, and empty tensors into which its tensors are received.

    Then `unflatten` makes the value from both.

    Args:
        text: Text of `take_apart`.

    Raises:
        ValueError: The text is not a result of `take_apart`.

    >>> plain, tensors = make_room(take_apart({"x": torch.tensor([1.5])})[0])
    >>> _ = tensors[0].fill_(2.0)
    >>> unflatten(plain, tensors)
    {'x': tensor([2.])}
    """
    try:
        plain, kinds = json.loads(text)
        return plain, [torch.empty(sizes, dtype=DTYPES[name]) for name, sizes in kinds]
    except _MALFORMED as error:
        raise ValueError(f"this is no value taken apart: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `DTYPES`: ``dtype_name(torch.bfloat16)`` is ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class _Flattening:
    """One call of `flatten`: it converts a value, and lists the tensors."""

    def __init__(self, exact: bool, dump: Callable[[object], bytes] | None) -> None:
        self.tensors: list[Tensor] = []
        self._exact = exact
        self._dump = dump
        self._numbers: dict[object, int] = {}

    def plain(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        # Exact types only: a bool is an int, too, and a subclass may carry more than its value.
        if kind is int:
            return value if -_LARGEST <= value < _LARGEST else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            if self._dump is not None and not self._is_plain(value):
                return {"object": self._of_object(value, path, self._dump)}
            return {"tensor": self._tensor(value, path)}
        if kind is list:
            return self._all(value, path)
        if kind is dict or kind is OrderedDict or (kind is defaultdict and not self._exact):
            return self._dict(value, path)
        if kind is tuple or kind is torch.Size:
            return {"tuple" if kind is tuple else "size": self._all(value, path)}
        if kind is set or kind is frozenset:
            return {kind.__name__: sorted(self._all(value, path), key=json.dumps)}  # equal in every process
        if (write := _WRITERS.get(kind)) is not None:
            return {write[0]: write[1](value)}
        return self._rarer(value, path)

    def _all(self, values: Iterable[Any], path: _Path) -> list[Any]:
        return [self.plain(value, (path, i)) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: _Path) -> dict[str, Any]:
        pairs = []
        for key, each in value.items():
            if isinstance(key, Tensor):
                raise TypeError(f"a key of {_shown(path)} is a tensor, and cannot travel.")
            pairs.append([self.plain(key, (path, key)), self.plain(each, (path, key))])
        if not isinstance(value, OrderedDict):
            return {"dict": pairs}
        versions = getattr(value, "_metadata", None)  # a module's `state_dict` has it for `load_state_dict`
        return {"ordered": pairs} if versions is None else {"ordered": pairs, "metadata": self.plain(versions, path)}

    def _is_plain(self, tensor: Tensor) -> bool:
        kinds = (Tensor,) if self._exact else (Tensor, Parameter)
        dense = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        return type(tensor) in kinds and dense and dtype_name(tensor.dtype) in DTYPES

    def _tensor(self, tensor: Tensor, path: _Path) -> int:
        if not self._is_plain(tensor):
            what = f"a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise TypeError(f"{_shown(path)} is {what}, and cannot travel: only dense tensors, and no subclasses, can.")
        whole = tensor.detach().resolve_conj().resolve_neg()
        # Tensors over the same memory are one tensor. Empty ones have no memory, so they are told apart by identity.
        same = (whole.device, whole.dtype, whole.shape, whole.stride(), whole.data_ptr() or id(whole))
        if same not in self._numbers:
            self._numbers[same] = len(self.tensors)
            self.tensors.append(whole)
        return self._numbers[same]

    def _rarer(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if issubclass(kind, Path) and (not self._exact or kind is type(Path())):
            return {"path": str(value)}
        numpy: Any = sys.modules.get("numpy")  # if numpy is not imported, the value cannot be of it
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            if (kind is numpy.ndarray or isinstance(value, numpy.generic)) and _is_flat(value.dtype):
                return self._of_numpy(value, numpy)
        elif not self._exact and not isinstance(value, Enum) and not getattr(value, "__dict__", None):
            for base in (int, float, str):
                if isinstance(value, base):
                    return self.plain(_BASES[base](value), path)
        if self._dump is not None:
            return {"object": self._of_object(value, path, self._dump)}
        raise TypeError(
            f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}, and cannot travel: only plain "
            "values, tensors, arrays, lists, tuples, sets and dicts can."
        )

    def _of_object(self, value: object, path: _Path, dump: Callable[[object], bytes]) -> int:
        try:
            data = dump(value)
        except Exception as error:  # the object's class may raise anything
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(f"{_shown(path)} is a {kind}, and cannot be pickled: {error}") from error
        return self._tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), ())

    def _of_numpy(self, value: Any, numpy: Any) -> Any:
        if isinstance(value, numpy.generic):
            return {"scalar": [value.dtype.str, _base64(value.tobytes())]}
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        # torch warns of memory that must not be written to.
        memory = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        return {"array": [value.dtype.str, list(value.shape), self._tensor(memory, ())]}


def _is_flat(dtype: Any) -> bool:
    return not dtype.hasobject and dtype.names is None and dtype.subdtype is None and dtype.itemsize > 0


def _shown(path: _Path) -> str:
    if not path:
        return "the value"
    above, key = path
    if above:
        return f"{_shown(above)}[{key!r}]"
    return key if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_BASES: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}

_WRITERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _base64),
    complex: ("complex", lambda value: [str(value.real), str(value.imag)]),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    datetime: ("datetime", lambda value: [value.isoformat(), value.fold]),
}
"""Types that hold no other values: for each, its tag, and a function that returns the text behind the tag."""


def _value(plain: Any, tensors: Sequence[Tensor], load: Callable[[bytes], Any] | None = None) -> Any:
    if isinstance(plain, list):
        return [_value(each, tensors, load) for each in plain]
    if not isinstance(plain, dict):
        return plain
    tag, body = next(iter(plain.items()), ("", []))
    if tag == "tensor":
        return tensors[_index(body)]
    if tag == "array":
        return _array(body[0], body[1], tensors[_index(body[2])])
    if tag in _HOLDERS:
        value = _HOLDERS[tag](_value(body, tensors, load))
        if "metadata" in plain:
            value._metadata = _value(plain["metadata"], tensors, load)
        return value
    if tag == "object":
        if load is None:
            raise ValueError("there is a pickled object in it, which is not to be loaded")
        return load(tensors[_index(body)].numpy().tobytes())
    return _READERS[tag](body)


def _index(number: Any) -> int:
    # A negative number would silently take a tensor from the end.
    if not isinstance(number, int) or number < 0:
        raise IndexError(f"no tensor has the number {number!r}")
    return number


def _array(dtype: str, shape: list[int], memory: Tensor) -> Any:
    import numpy

    return memory.numpy().view(numpy.dtype(dtype)).reshape(shape)


def _scalar(body: list[str]) -> Any:
    import numpy

    return numpy.frombuffer(base64.b64decode(body[1]), dtype=numpy.dtype(body[0]))[0]


_HOLDERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "size": torch.Size, "dict": dict, "ordered": OrderedDict, "set": set, "frozenset": frozenset
}  # fmt: skip

_READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda body: int(body, 16),
    "float": float,
    "bytes": base64.b64decode,
    "complex": lambda body: complex(*map(float, body)),
    "scalar": _scalar,
    "dtype": _ALL_DTYPES.__getitem__,
    "device": torch.device,
    "timedelta": lambda body: timedelta(*body),
    "datetime": lambda body: datetime.fromisoformat(body[0]).replace(fold=body[1]),
    "path": Path,
}
