"""Source package -> wheel -> an environment of its own; what is built where, and what a failed build says."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.processes

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
LOAD = """
import ctypes, sys
ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
library = ctypes.CDLL(sys.argv[1])
assert library.la_abi_version() == 4
x = (ctypes.c_float * 3)(1, 2, 3)
y = (ctypes.c_float * 3)(3, 2, 1)
scalars = (ctypes.c_float * 8)(0.5)
arrays = (ctypes.c_void_p * 2)(ctypes.addressof(x), ctypes.addressof(y))
norms = (ctypes.c_double * 2)()
count, whole = ctypes.c_int64(3), ctypes.c_int64(0)
status = library.la_cpu_flat(library.la_find(b"accumulate"), 0, arrays, count, whole, scalars, norms, 2)
assert status == 0 and list(y) == [3.5, 3.0, 2.5] and norms[0] == 27.5, (status, list(y), list(norms))
assert "torch" not in sys.modules
"""


def setuptools_build(kind: str, source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Ask the build backend for an sdist or a wheel of `source`."""
    return subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=source,
        env={**os.environ, "LIGHTNING_ASYNC_BUILD": "", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def built(kind: str, source: Path, target: Path, **environment: str) -> Path:
    done = setuptools_build(kind, source, target, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source package."""
    folder = tmp_path_factory.mktemp("sdist")
    clone = folder / "clone"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    for name in tracked.stdout.splitlines():
        if name.startswith(("tests/", "docs/", "examples/")) or not (ROOT / name).exists():
            continue
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    with tarfile.open(built("sdist", clone, folder)) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("lightning_async-*/"))


def quick_compiler(folder: Path) -> str:
    """The path with a C++ compiler before all others that optimises nothing, in a tenth of the time.

    What is built is the same but for its speed. A `CXX` would do too, but the CUDA library has it in its digest.
    """
    script, path = folder / "bin" / "g++", os.environ["PATH"]
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shutil.which("g++") or "c++"} "$@" -O0\n')
    script.chmod(0o755)
    return f"{script.parent}{os.pathsep}{path}"


def take_the_cuda_library(source: Path) -> dict[str, object]:
    """nvcc takes minutes. What an install has built is taken, as `setup.py` does if the sources have its digest."""
    there, target = ROOT / "lightning_async/ops/lib", source / "build/native"
    target.mkdir(parents=True)
    shutil.copy(there / "liblightning_async_cuda.so", target)
    record = json.loads((there / "build.json").read_text())["cuda"]
    (target / "build.json").write_text(json.dumps({"cuda": record}))
    return record


class Wheel(NamedTuple):
    """A wheel of the source package.

    Args:
        path: of the file.
        demand: the libraries that were to be built, "cpu" or "cuda".
        cuda: the record of the CUDA library that was taken, if one was.
    """

    path: Path
    demand: str
    cuda: dict[str, object] | None


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    folder = tmp_path_factory.mktemp("wheel")
    demand = os.environ.get("LIGHTNING_ASYNC_BUILD") or "cpu"  # the CI sets it
    toolkit = {} if demand == "cuda" else {"CUDA_HOME": "/nonexistent"}
    taken = take_the_cuda_library(source) if demand == "cuda" else None
    path = built("wheel", source, folder, LIGHTNING_ASYNC_BUILD=demand, PATH=quick_compiler(folder), **toolkit)
    return Wheel(path, demand, taken)


@pytest.mark.timeout(300)  # a compiler on few cores
def test_source_package_wheel_and_a_clean_place(source: Path, wheel: Wheel, tmp_path: Path):
    assert (source / "cuda_ext/csrc/cuda.cu").exists()
    assert (source / "cuda_ext/build.py").exists()
    path, demand, taken = wheel
    assert path.name.startswith("lightning_async-") and "-py3-none-linux_" in path.name
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    libraries = tmp_path / "site/lightning_async/ops/lib"
    expected = ["build.json", "liblightning_async_cpu.so", "liblightning_async_cuda.so"]
    assert sorted(path.name for path in libraries.iterdir()) == expected[: 3 if demand == "cuda" else 2]
    assert not [name for name in names if name.startswith(("cuda_ext", "tests"))]
    record = json.loads((libraries / "build.json").read_text())
    assert record["cpu"]["built"] and not record["cpu"]["error"]
    if demand == "cuda":
        assert record["cuda"] == taken, "another library than the installed one: make native"
        assert record["cuda"]["built"] and record["cuda"]["driver"]
        ctypes.CDLL(str(libraries / "liblightning_async_cuda.so"))  # without a GPU and a driver, too
    else:
        assert "CUDA_HOME=/nonexistent holds no bin/nvcc" in record["cuda"]["error"]
    command = [sys.executable, "-I", "-S", "-c", LOAD, str(libraries / "liblightning_async_cpu.so")]
    subprocess.run(command, check=True, timeout=30)


@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_environment_of_its_own(wheel: Wheel, tmp_path: Path):
    """Torch and Lightning come from the environment around it: installing them takes minutes."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = ("-m", "pip", "--disable-pip-version-check", "--python", python)
    run(sys.executable, *pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel.path)
    # Plain paths, so that the editable install in there stays out; after the install, which would take it for done.
    around = "\n".join(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "around.pth").write_text(around)
    where = run(python, "-c", "import importlib.util as util; print(util.find_spec('lightning_async').origin)")
    assert where.strip() == str(packages / "lightning_async" / "__init__.py")
    assert "ops on cpu      native" in run(tmp_path / "venv/bin/lightning-async", "doctor")


def test_without_a_compiler_the_wheel_is_pure_and_says_why(source: Path, tmp_path: Path):
    environment = {"CXX": "/nonexistent/c++", "CUDA_HOME": "/nonexistent"}
    wheel = built("wheel", source, tmp_path, **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        record = json.loads(archive.read("lightning_async/ops/lib/build.json"))
    assert "/nonexistent/c++" in record["cpu"]["error"]
    for demand in ("cpu", "cuda"):
        failed = setuptools_build("wheel", source, tmp_path, LIGHTNING_ASYNC_BUILD=demand, **environment)
        assert failed.returncode != 0
        assert f"LIGHTNING_ASYNC_BUILD={demand} asks for what could not be built" in failed.stderr
    wrong = setuptools_build("wheel", source, tmp_path, LIGHTNING_ASYNC_BUILD="gpu")
    assert wrong.returncode != 0
    assert "must be 'cpu', 'cuda'" in wrong.stderr


def test_the_list_of_packages_is_complete():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = sorted(".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("lightning_async/**/__init__.py"))
    assert settings["packages"] == folders
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert not [each for each in requires if each.startswith("torch")]
