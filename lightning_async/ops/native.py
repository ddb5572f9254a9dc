"""The native libraries that cuda_ext builds: which one runs, the reason if none does, and calls of them.

The functions here do not check shapes, dtypes or overlaps; `flat_ops` and `plan` check them before they call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

log = logging.getLogger(__name__)
FOLDER = Path(__file__).resolve().parent / "lib"
ABI_VERSION = 4

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The backend of the ops on one kind of device.

    Args:
        name: ``"torch"``, or the native library with its kind of kernels, such as ``"native (x86-64-v3)"``.
        reason: Reason why the native library is not used; empty if it is.
    """

    name: str
    reason: str = ""


class _Loaded:
    def __init__(self) -> None:
        self.libraries: dict[Kind, ctypes.CDLL] = {}
        self.reasons: dict[Kind, str] = {}
        self.disabled = False

    def get(self, kind: Kind) -> ctypes.CDLL | None:
        if kind not in self.libraries and kind not in self.reasons:
            try:
                self.libraries[kind] = _open(kind)
            except (OSError, AttributeError) as error:
                self.reasons[kind] = str(error)
                log.info("Arithmetic on %s runs in plain torch, with equal results: %s.", kind, error)
        return None if self.disabled else self.libraries.get(kind)


_loaded = _Loaded()


def _open(kind: Kind) -> ctypes.CDLL:
    path = FOLDER / f"liblightning_async_{kind}.so"
    if not path.exists():
        why = build_record().get(kind, {}).get("error")
        raise OSError(f"the {kind} library was not built: {why}" if why else f"there is no {path.name} in {FOLDER}")
    if kind == "cpu":
        _open_openmp()
    library = ctypes.CDLL(str(path))
    if (version := library.la_abi_version()) != ABI_VERSION:
        raise OSError(f"{path.name} is of another version ({version}, not {ABI_VERSION}): build it again")
    for name, types in _SIGNATURES.items():
        if name.startswith(("la_find", f"la_{kind}_")):
            getattr(library, name).argtypes = types
    if kind == "cpu":
        library.la_cpu_level.restype = ctypes.c_char_p
        return library
    count = ctypes.c_int()
    driver = ctypes.c_int()
    status = library.la_cuda_devices(ctypes.byref(count), ctypes.byref(driver))
    if status or not count.value:
        what = "no driver" if driver.value == 0 else f"a driver for CUDA {driver.value // 1000}"
        raise OSError(f"no GPU can be used: {what}, {count.value} devices, status {status} of the CUDA runtime")
    return library


def _open_openmp() -> None:
    """Load torch's OpenMP runtime, which the library needs; a second runtime would double the threads."""
    beside = Path(torch.__file__).parent
    found = [*beside.glob("lib/libgomp*.so*"), *beside.parent.glob("torch.libs/libgomp*.so*")]
    for name in [*map(str, found), "libgomp.so.1", "libomp.so.5", "libiomp5.so"]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return
    raise OSError("there is no OpenMP runtime: neither torch's own libgomp nor libgomp.so.1 can be loaded")


_P = ctypes.c_void_p
_I = ctypes.c_int
_L = ctypes.c_int64
_F = ctypes.c_float
_AVERAGE = (_I, _P, _P, _P, _L, _L, _F, _P, _P, _P, _P)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "la_find": (ctypes.c_char_p,),
    "la_cpu_use_level": (ctypes.c_char_p,),
    "la_cpu_flat": (_I, _I, _P, _L, _L, _P, _P, _I),
    "la_cpu_list": (_P, _L, _P, _I, _P, _P, _I),
    "la_cpu_square": (_I, _P, _I, _P, _L, _P, _I),
    "la_cpu_quantize": (_I, _P, _P, _P, _P, _L, _F, _I),
    "la_cpu_average": (*_AVERAGE, _I),
    "la_cpu_topk": (_P, _P, _L, _L, _P, _P),
    "la_cpu_scatter": (_P, _L, _P, _P, _L, _F),
    "la_cuda_use_device": (_I,),
    "la_cuda_flat": (_I, _I, _P, _L, _P, _P, _P, _P),
    "la_cuda_list": (_I, _I, _P, _P, _L, _P, _I, _P, _P, _P),
    "la_cuda_sum": (_P, _L, _P, _P),
    "la_cuda_square": (_I, _P, _I, _P, _L, _P, _P, _P),
    "la_cuda_quantize": (_I, _P, _P, _P, _P, _L, _F, _P),
    "la_cuda_average": (*_AVERAGE, _P),
}


def build_record() -> dict[str, dict[str, Any]]:
    """Return the record of how the libraries were built, or why not; empty if there was no build."""
    path = FOLDER / "build.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def available(device: torch.device) -> bool:
    """Return whether the library for this device is loaded and runs."""
    return (device.type == "cpu" or device.type == "cuda") and _loaded.get(device.type) is not None


def backend(kind: Kind) -> Backend:
    library = _loaded.get(kind)
    if library is None:
        return Backend(name="torch", reason=_loaded.reasons.get(kind, "switched off by `use`"))
    if kind == "cuda":
        return Backend(name="native (CUDA)")
    level = library.la_cpu_level().decode()
    return Backend(name=f"native ({level})")


@contextlib.contextmanager
def use(level: str) -> Iterator[None]:
    """Run the ops in this context with ``"torch"``, or with a level of the CPU library such as ``"portable"``.

    This is for tests and comparisons. It affects all threads of the process. Raises ValueError if the level is not
    available.
    """
    library = _loaded.get("cpu")
    before = library.la_cpu_level() if library is not None else b""
    if level != "torch" and (library is None or library.la_cpu_use_level(level.encode())):
        raise ValueError(f"`use({level!r})`: the CPU library has no such level, or this processor lacks it.")
    disabled = _loaded.disabled
    _loaded.disabled = level == "torch"
    try:
        yield
    finally:
        _loaded.disabled = disabled
        if library is not None:
            library.la_cpu_use_level(before)


def library(kind: str) -> ctypes.CDLL:
    found = _loaded.get("cuda" if kind == "cuda" else "cpu")
    assert found is not None
    return found


# Formats of parameters. State is always fp32.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.bfloat16: 2, torch.uint8: 3}
"""Formats of messages. One uint8 holds four codes of 2 bits."""
# Number of elements of one unit of work, as in cuda_ext/csrc.
CHUNK = 65536
MAX_SCALARS = 10
MAX_NORMS = 2
# A thread with fewer elements would cost more than it saves.
_MIN_PER_THREAD = 1 << 16


class Segment(ctypes.Structure):
    """One tensor of a list, in the memory layout of the C struct `la_segment` (cuda_ext/csrc/abi.h)."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("op", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


@functools.cache
def find(kind: str, name: str) -> int:
    number = library(kind).la_find(name.encode())
    assert number >= 0, f"the {kind} library has no op {name!r}"
    return number


def _threads(numel: int) -> int:
    return 1 if numel < 2 * _MIN_PER_THREAD else min(torch.get_num_threads(), numel // _MIN_PER_THREAD)


def _ok(status: int) -> None:
    if status:
        raise RuntimeError(
            f"The native library failed with status {status}"
            + (" of the CUDA runtime." if status > 0 else ": wrong arguments or no memory.")
        )


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])


def _scalars(values: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * MAX_SCALARS)(*values)


def _on(device: torch.device) -> tuple[ctypes.CDLL, int]:
    """Return the CUDA library, set to the device, and torch's current stream on the device."""
    cuda = library("cuda")
    _ok(cuda.la_cuda_use_device(device.index if device.index is not None else torch.cuda.current_device()))
    return cuda, torch.cuda.current_stream(device).cuda_stream


def _chunks(numel: int) -> int:
    return -(-numel // CHUNK)


def flat(name: str, arrays: Sequence[Tensor], scalars: Sequence[float] = (), whole: int = 0) -> None:
    """Run an elementwise op of the native library on flat arrays, in place.

    Args:
        name: Name of the op.
        arrays: The arrays, in the order in which the library takes them.
        scalars: The op's scalars. Default: none.
        whole: If the arrays are pieces of larger arrays, the number of elements of a larger array. Default: 0, no
            pieces.
    """
    x = arrays[0]
    number = find(x.device.type, name)
    form = FORMATS[x.dtype]
    numel = x.numel()
    pointers = _pointers(arrays)
    values = _scalars(scalars)
    if x.is_cuda:
        cuda, stream = _on(x.device)
        _ok(cuda.la_cuda_flat(number, form, pointers, numel, values, None, None, stream))
    else:
        _ok(library("cpu").la_cpu_flat(number, form, pointers, numel, whole, values, None, _threads(numel)))


class SegmentTable:
    """The addresses and sizes of a list of tensors, as the native library reads them.

    The CPU needs one table. A GPU needs one table for each op and format.
    """

    def __init__(self, device: torch.device, segments: Sequence[Segment]) -> None:
        self.device = device
        self._count = len(segments)
        self.numel = sum(segment.numel for segment in segments)
        self._segments = (Segment * len(segments))(*segments)
        self._groups: list[tuple[int, int, Tensor, Tensor]] = []
        if device.type == "cuda":
            for key in sorted({(segment.op, segment.format) for segment in segments}):
                mine = [segment for segment in segments if (segment.op, segment.format) == key]
                raw = torch.frombuffer(bytearray((Segment * len(mine))(*mine)), dtype=torch.int64)
                chunks = [(i, c) for i, segment in enumerate(mine) for c in range(_chunks(segment.numel))]
                self._groups.append((*key, raw.to(device), torch.tensor(chunks, dtype=torch.int64, device=device)))

    def follow(self, pointers: Sequence[int]) -> bool:
        """Set the tensors' addresses to ``pointers``; return False on a GPU, where a new table is needed instead."""
        if self.device.type != "cpu":
            return False
        for segment, pointer in zip(self._segments, pointers, strict=True):
            segment.x = pointer
        return True

    def run(self, buckets: Sequence[Tensor], scalars: Sequence[float], norms: bool) -> Tensor | None:
        """Run each segment's op on its tensor and the tensor's place in each bucket.

        Args:
            buckets: Flat buckets.
            scalars: The ops' scalars.
            norms: Whether to return sums of squares.

        Returns:
            With ``norms``, the sums of squares that the ops compute, each over all tensors; otherwise None.
        """
        pointers = _pointers(buckets)
        values = _scalars(scalars)
        sums = torch.empty(MAX_NORMS, dtype=torch.float64, device=self.device) if norms else None
        if self.device.type == "cpu":
            _ok(
                library("cpu").la_cpu_list(
                    self._segments, self._count, pointers, len(buckets), values, _pointer(sums), _threads(self.numel)
                )
            )
            return sums
        cuda, stream = _on(self.device)
        num_chunks = sum(len(chunks) for *_, chunks in self._groups)
        work = sums.new_empty(num_chunks, MAX_NORMS) if sums is not None else None
        done = 0
        for op, form, table, chunks in self._groups:
            partial = None if work is None else work[done:].data_ptr()
            _ok(
                cuda.la_cuda_list(
                    op, form, table.data_ptr(), chunks.data_ptr(), len(chunks), pointers, len(buckets), values, partial,
                    stream,
                )
            )  # fmt: skip
            done += len(chunks)
        if sums is not None:
            _ok(cuda.la_cuda_sum(_pointer(work), num_chunks, sums.data_ptr(), stream))
        return sums


def square(a: Tensor, b: Tensor | None) -> Tensor:
    other = a if b is None else b
    total = torch.empty((), dtype=torch.float64, device=a.device)
    arguments = (FORMATS[a.dtype], a.data_ptr(), FORMATS[other.dtype], _pointer(b), a.numel(), total.data_ptr())
    if a.is_cuda:
        cuda, stream = _on(a.device)
        work = total.new_empty(max(1, _chunks(a.numel())))
        _ok(cuda.la_cuda_square(*arguments, work.data_ptr(), stream))
    else:
        _ok(library("cpu").la_cpu_square(*arguments, _threads(a.numel())))
    return total


def quantize(codes: Tensor, scales: Tensor | None, source: Tensor, residual: Tensor, threshold: float = 0.0) -> None:
    """Encode ``source + residual`` into ``codes`` and ``scales``, and write the encoding error into ``residual``.

    ``scales`` is None for 2-bit codes, which use ``threshold`` instead.
    """
    numel = source.numel()
    arguments = (CODES[codes.dtype], codes.data_ptr(), _pointer(scales), source.data_ptr(), residual.data_ptr(), numel)
    if source.is_cuda:
        cuda, stream = _on(source.device)
        _ok(cuda.la_cuda_quantize(*arguments, threshold, stream))
    else:
        _ok(library("cpu").la_cpu_quantize(*arguments, threshold, _threads(numel)))


def average(
    codes: Tensor,
    scales: Tensor | None,
    weights: Tensor,
    numel: int,
    *,
    threshold: float = 0.0,
    out: Tensor | None = None,
    again: tuple[Tensor, Tensor | None, Tensor] | None = None,
) -> None:
    """Compute the weighted sum of all peers' decoded messages, of ``numel`` elements each.

    The sum is written into ``out``; or it is encoded into ``again``, the tensors (codes, scales, residual).
    ``threshold`` is the one of 2-bit codes, which have no ``scales``.
    """
    out_codes, out_scales, residual = again if again is not None else (None, None, None)
    arguments = (
        CODES[codes.dtype], codes.data_ptr(), _pointer(scales), weights.data_ptr(), weights.numel(), numel, threshold,
        _pointer(out), _pointer(out_codes), _pointer(out_scales), _pointer(residual),
    )  # fmt: skip
    if codes.is_cuda:
        cuda, stream = _on(codes.device)
        _ok(cuda.la_cuda_average(*arguments, stream))
    else:
        _ok(library("cpu").la_cpu_average(*arguments, _threads(numel)))


def topk(values: Tensor, indices: Tensor, source: Tensor, residual: Tensor) -> None:
    _ok(
        library("cpu").la_cpu_topk(
            source.data_ptr(), residual.data_ptr(), source.numel(), values.numel(), values.data_ptr(),
            indices.data_ptr(),
        )
    )  # fmt: skip


def scatter(out: Tensor, values: Tensor, indices: Tensor, weight: float) -> None:
    """Add ``weight * values`` to the elements of ``out`` at ``indices``, on the CPU.

    If an index is out of range, raise IndexError and add nothing.
    """
    status = library("cpu").la_cpu_scatter(
        out.data_ptr(), out.numel(), values.data_ptr(), indices.data_ptr(), values.numel(), weight
    )
    if status == -2:
        raise IndexError(f"`indices` must be in [0, {out.numel()}).")
    _ok(status)
