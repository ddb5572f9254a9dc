"""Loads the libraries that cuda_ext builds, after torch, and says which backend runs and why not a better one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["Backend", "available", "backend", "build_record", "library", "use"]

log = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent / "lib"
ABI_VERSION = 4

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What runs the ops on one kind of device.

    Args:
        name: ``"torch"``, or the library's kernels: ``"native (x86-64-v3)"``.
        reason: why it is not a better one; empty where it is the best.
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
    count, driver = ctypes.c_int(), ctypes.c_int()
    status = library.la_cuda_devices(ctypes.byref(count), ctypes.byref(driver))
    if status or not count.value:
        what = "no driver" if driver.value == 0 else f"a driver for CUDA {driver.value // 1000}"
        raise OSError(f"no GPU can be used: {what}, {count.value} devices, status {status} of the CUDA runtime")
    return library


def _open_openmp() -> None:
    """The OpenMP runtime that torch uses, for what the library leaves open: a second one would double the threads."""
    beside = Path(torch.__file__).parent
    found = [*beside.glob("lib/libgomp*.so*"), *beside.parent.glob("torch.libs/libgomp*.so*")]
    for name in [*map(str, found), "libgomp.so.1", "libomp.so.5", "libiomp5.so"]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return
    raise OSError("there is no OpenMP runtime: neither torch's own libgomp nor libgomp.so.1 can be loaded")


_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
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
    """How the libraries were built, or why they were not; empty where nobody tried."""
    path = FOLDER / "build.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def available(device: torch.device) -> bool:
    """Whether the library for this device runs."""
    return (device.type == "cpu" or device.type == "cuda") and _loaded.get(device.type) is not None


def backend(kind: Kind) -> Backend:
    """What runs the ops on this kind of device, and why not something better."""
    library = _loaded.get(kind)
    if library is None:
        return Backend(name="torch", reason=_loaded.reasons.get(kind, "switched off by `use`"))
    if kind == "cuda":
        return Backend(name="native (CUDA)")
    level = library.la_cpu_level().decode()
    return Backend(name=f"native ({level})")


@contextlib.contextmanager
def use(level: str) -> Iterator[None]:
    """Run the ops in another way than the best: ``"torch"``, or a level of the CPU library (``"portable"``, ...).

    For tests and comparisons; it holds for the whole process.

    Raises:
        ValueError: this processor or this build lacks the level.
    """
    library = _loaded.get("cpu")
    before = library.la_cpu_level() if library is not None else b""
    if level != "torch" and (library is None or library.la_cpu_use_level(level.encode())):
        raise ValueError(f"`use({level!r})`: the CPU library has no such level, or this processor lacks it.")
    disabled, _loaded.disabled = _loaded.disabled, level == "torch"
    try:
        yield
    finally:
        _loaded.disabled = disabled
        if library is not None:
            library.la_cpu_use_level(before)


def library(kind: str) -> ctypes.CDLL:
    """The library for this kind of device; `available` has said that there is one."""
    found = _loaded.get("cuda" if kind == "cuda" else "cpu")
    assert found is not None
    return found
