"""Plain values and tensors as bytes for the wire: JSON and raw memory. What arrives is read, never executed."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.reductions import as_bytes

__all__ = ["decode", "encode"]

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
_LENGTH = 8


def encode(value: object) -> Tensor:
    """One flat uint8 tensor that `decode` turns back into ``value``.

    Args:
        value: None, bools, numbers, strings, dense tensors, and lists, tuples and dicts (with string keys) of such.

    Raises:
        TypeError: there is something else in it; names its type.

    >>> decode(encode({"steps": (3, None), "x": torch.tensor([1.5])}))
    {'steps': (3, None), 'x': tensor([1.5000])}
    """
    tensors: list[Tensor] = []
    head = json.dumps(_plain(value, tensors)).encode()
    length = torch.tensor([len(head)], dtype=torch.int64).view(torch.uint8)
    text = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([length, text, *(as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors)])


def decode(data: Tensor) -> Any:
    """The value that `encode` was given.

    Raises:
        ValueError: these bytes are not what `encode` makes.
    """
    try:
        length = int(data[:_LENGTH].clone().view(torch.int64))
        start = _LENGTH + length
        body = json.loads(bytes(data[_LENGTH:start].tolist()))
        value, end = _value(body, data, start)
    except (RuntimeError, KeyError, TypeError, IndexError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{data.numel()} bytes are no encoded value: {error}") from error
    if end != data.numel():
        raise ValueError(f"{data.numel()} bytes are no encoded value: it ends after {end}.")
    return value


def _plain(value: object, tensors: list[Tensor]) -> Any:
    """``value`` in JSON's terms; its tensors are listed beside it."""
    if value is None or type(value) in (bool, int, float, str):  # exactly: a subclass would come back as its base
        return value
    if type(value) is Tensor:
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout is not torch.strided:
            raise TypeError(f"a tensor of {value.dtype}, {value.layout} cannot be sent.")
        tensors.append(value)
        return {"tensor": name, "shape": list(value.shape)}
    if type(value) is list:
        return [_plain(each, tensors) for each in value]
    if type(value) is tuple:
        return {"tuple": [_plain(each, tensors) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _plain(each, tensors)] for key, each in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be sent: only plain values, tensors, lists, tuples and dicts.")


def _value(plain: Any, data: Tensor, at: int) -> tuple[Any, int]:
    """The value, and where in ``data`` its tensors end, which begin ``at``."""
    if isinstance(plain, list):
        values = []
        for each in plain:
            value, at = _value(each, data, at)
            values.append(value)
        return values, at
    if not isinstance(plain, dict):
        return plain, at
    if "tensor" in plain:
        dtype, shape = _DTYPES[plain["tensor"]], torch.Size(plain["shape"])
        end = at + shape.numel() * dtype.itemsize
        if end > data.numel():
            raise IndexError(f"a tensor ends after {end} bytes")
        return data[at:end].clone().view(dtype).view(shape), end
    if "tuple" in plain:
        values, at = _value(plain["tuple"], data, at)
        return tuple(values), at
    pairs, at = _value(plain["dict"], data, at)
    return dict(pairs), at
