"""The build of the native libraries: ``python cuda_ext/build.py [cpu|cuda]``. It needs neither torch nor setuptools.

It makes two shared libraries, ``liblightning_async_cpu.so`` and ``liblightning_async_cuda.so``, and ``build.json`` with
the compilers, the flags, and the reason if a library is missing. The libraries are linked neither to torch nor to
Python, so one library serves every version of both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
TARGET = HERE.parent / "lightning_async" / "ops" / "lib"
RECORD = "build.json"
Kind = Literal["cpu", "cuda"]
KINDS: tuple[Kind, ...] = ("cpu", "cuda")

CXX_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp",
    "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    # Each operation is rounded once, so that all backends agree to the bit. The last two flags change no result: they
    # let
    # compilers vectorise square roots and selections.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Wno-psabi",
)  # fmt: skip
LEVELS = ("v2", "v3", "v4")
"""Instruction-set levels of x86-64 for which kernels are compiled, besides the compiler's default."""

CUDA_FLAGS = (
    "-std=c++17", "-O3", "-fmad=false", "-cudart=static", "-lineinfo", "--threads=0",
    "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)  # fmt: skip
MINIMUM_DRIVER = {12: "525", 13: "580"}
"""The oldest driver of each major version of CUDA, by NVIDIA's release notes."""


class BuildError(RuntimeError):
    """The reason why a library cannot be built."""


@dataclass(kw_only=True)
class Outcome:
    """The result of building one library.

    Args:
        digest: Digest of the sources and the flags. A library with the same digest is not built again.
        built: Whether the library exists.
        compiler: Version line of the compiler.
        commands: Shell commands that were run.
        error: Reason why there is no library.
        driver: Oldest driver on which the CUDA library runs.
    """

    digest: str = ""
    built: bool = False
    compiler: str | None = None
    commands: list[str] = field(default_factory=list)
    error: str | None = None
    driver: str | None = None


def library(kind: Kind) -> str:
    """Return the file name of a library."""
    return f"liblightning_async_{kind}.so"


def demanded(environment: Mapping[str, str] = os.environ) -> Kind | None:
    """Return the library that ``LIGHTNING_ASYNC_BUILD`` demands; None: a library that cannot be built is left out."""
    asked = environment.get("LIGHTNING_ASYNC_BUILD") or None
    if asked is not None and asked not in KINDS:
        raise BuildError(f"LIGHTNING_ASYNC_BUILD={asked!r} must be 'cpu', 'cuda' (both libraries) or unset.")
    return asked


def build(target: Path = TARGET, demand: Kind | None = None, kinds: Sequence[Kind] = KINDS) -> dict[Kind, Outcome]:
    """Build the libraries that can be built into ``target``, and write the record.

    Raises:
        BuildError: A library that ``demand`` requires (``"cuda"``: both) could not be built; the record is written.
    """
    target.mkdir(parents=True, exist_ok=True)
    outcomes = _recorded(target)
    for kind in kinds:
        before, outcome = outcomes.get(kind), Outcome(digest=_digest(kind))
        there = (target / library(kind)).exists()
        if there and before is not None and before.built and before.digest == outcome.digest:
            continue
        outcomes[kind] = outcome
        (target / library(kind)).unlink(missing_ok=True)
        try:
            (_build_cpu if kind == "cpu" else _build_cuda)(target / library(kind), outcome)
            outcome.built = True
        except (BuildError, OSError) as error:
            outcome.error = str(error)
    (target / RECORD).write_text(json.dumps({kind: asdict(outcome) for kind, outcome in outcomes.items()}, indent=1))
    needed = {None: (), "cpu": ("cpu",), "cuda": KINDS}[demand]
    failed = [f"{kind}: {outcome.error}" for kind, outcome in outcomes.items() if kind in needed and not outcome.built]
    if failed:
        raise BuildError(f"LIGHTNING_ASYNC_BUILD={demand} asks for what could not be built.\n" + "\n".join(failed))
    return outcomes


def _recorded(target: Path) -> dict[Kind, Outcome]:
    try:
        return {kind: Outcome(**fields) for kind, fields in json.loads((target / RECORD).read_text()).items()}
    # There is no record, or it is of another version.
    except (OSError, ValueError, TypeError):
        return {}


def _digest(kind: Kind) -> str:
    """Return a digest of the sources, the flags, and the variables that choose the compilers."""
    chosen = [os.environ.get(name, "") for name in (("CXX",) if kind == "cpu" else ("CXX", "CUDA_HOME"))]
    digest = hashlib.sha256(Path(__file__).read_bytes() + "\0".join(chosen).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _run(command: Sequence[str], outcome: Outcome) -> str:
    outcome.commands.append(shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BuildError(f"`{shlex.join(command)}` failed with status {done.returncode}:\n{tail}")
    return done.stdout + done.stderr


def compiler() -> list[str]:
    """Return the C++ compiler: ``$CXX``, or the first of the usual ones."""
    if sys.platform != "linux":
        raise BuildError(f"the native libraries are built on Linux only, not on {sys.platform}")
    if asked := os.environ.get("CXX"):
        return shlex.split(asked)
    found = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError("there is no C++ compiler (Debian: apt-get install g++)")
    return [found]


def _build_cpu(path: Path, outcome: Outcome) -> None:
    cxx = compiler()
    outcome.compiler = _run([*cxx, "--version"], outcome).splitlines()[0]
    levels = LEVELS if platform.machine() in ("x86_64", "AMD64") else ()
    with tempfile.TemporaryDirectory(prefix="lightning-async-") as name:
        folder = Path(name)
        jobs = [("cpu", ["-DLA_X86_64_LEVELS"] if levels else [], "cpu.cpp")]
        jobs += [("portable", ["-DLA_LEVEL=portable"], "cpu_kernels.cpp")]
        jobs += [(level, [f"-march=x86-64-{level}", f"-DLA_LEVEL={level}"], "cpu_kernels.cpp") for level in levels]
        objects = [str(folder / f"{name}.o") for name, _, _ in jobs]

        def compile_one(job: tuple[tuple[str, list[str], str], str]) -> None:
            (_, flags, source), made = job
            _run([*cxx, *CXX_FLAGS, *flags, "-c", str(SOURCES / source), "-o", made], outcome)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(compile_one, zip(jobs, objects, strict=True)))
        # OpenMP's runtime is not linked. At load time it is torch's, because a process needs only one.
        half = folder / path.name
        _run([*cxx, "-shared", "-Wl,-z,lazy", "-Wl,--as-needed", "-s", *objects, "-o", str(half)], outcome)
        shutil.copyfile(half, path)


def toolkit() -> tuple[Path, list[str]]:
    """Return nvcc, and the flags that it needs to find its own parts.

    The order is ``$CUDA_HOME``, then the path, then pip's nvidia-cuda-nvcc packages (-cu12, and 13's) on ``sys.path``.
    """
    if home := os.environ.get("CUDA_HOME"):
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.exists():
            raise BuildError(f"CUDA_HOME={home} holds no bin/nvcc")
        return nvcc, []
    if found := shutil.which("nvcc"):
        return Path(found), []
    for entry in filter(None, sys.path):
        for nvcc in sorted(Path(entry).glob("nvidia/*/bin/nvcc"), reverse=True):
            parts = nvcc.parents[2]
            includes = [f"-I{folder}" for folder in sorted(parts.glob("*/include"))]
            libraries = [f"-L{folder.parent}" for folder in sorted(parts.glob("*/lib*/libcudart_static.a"))]
            return nvcc, [*includes, *libraries]
    raise BuildError("there is no nvcc: set CUDA_HOME, or put it on the path")


def _build_cuda(path: Path, outcome: Outcome) -> None:
    nvcc, flags = toolkit()
    version = _run([str(nvcc), "--version"], outcome)
    outcome.compiler = next((line.strip() for line in version.splitlines() if "release" in line), version.strip())
    release = re.search(r"release (\d+)", version)
    outcome.driver = MINIMUM_DRIVER.get(int(release.group(1))) if release else None
    host = ["-ccbin", *compiler()[:1]]
    with tempfile.TemporaryDirectory(prefix="lightning-async-") as name:
        # Copy the finished library, so that a failed build leaves no half-written one.
        half = Path(name) / path.name
        _run(
            [str(nvcc), *CUDA_FLAGS, *flags, *host, "-Xcompiler=-fPIC,-fvisibility=hidden", "-shared",
             str(SOURCES / "cuda.cu"), "-o", str(half)],
            outcome,
        )  # fmt: skip
        shutil.copyfile(half, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: build into the source tree, and print the results."""
    parser = argparse.ArgumentParser(prog="python cuda_ext/build.py", description="Build the native libraries.")
    parser.add_argument(
        "demand", nargs="?", choices=KINDS,
        help="fail unless this is built (cuda: both libraries; default: $LIGHTNING_ASYNC_BUILD)",
    )  # fmt: skip
    parser.add_argument("--target", type=Path, default=TARGET, help="folder (default: %(default)s)")
    parser.add_argument("--only", choices=KINDS, help="leave the other library out")
    options = parser.parse_args(arguments)
    try:
        demand = options.demand or demanded()
        outcomes = build(options.target, demand, [options.only] if options.only else KINDS)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for kind, outcome in outcomes.items():
        print(f"{kind}: {options.target / library(kind) if outcome.built else f'not built: {outcome.error}'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
