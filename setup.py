"""Puts the native libraries of cuda_ext into wheels and into editable installs. All else stands in pyproject.toml.

They are built where a compiler is found, and left out, with a record that says why, where not; the install fails only
if LIGHTNING_ASYNC_BUILD=cpu or =cuda demands them. A wheel without libraries fits any platform, one with them Linux.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PLACE = Path("lightning_async", "ops", "lib")


@functools.cache
def builder() -> ModuleType:
    """cuda_ext/build.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("lightning_async_cuda_ext_build", HERE / "cuda_ext" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@functools.cache
def libraries() -> Path:
    """The folder with what could be built, built once per process."""
    folder = HERE / "build" / "native"
    try:
        outcomes = builder().build(folder, builder().demanded())
    except builder().BuildError as error:
        raise SystemExit(f"error: {error}") from None
    for kind, outcome in outcomes.items():
        print(f"lightning_async: {kind} library {'built' if outcome.built else f'left out: {outcome.error}'}")
    return folder


def files() -> list[Path]:
    """What goes into the package: libraries and the record."""
    return sorted(path for path in libraries().iterdir() if path.suffix in (".so", ".json"))


class BuildWithLibraries(build_py):
    """Copies the libraries into the build, or into the sources of an editable install."""

    def run(self) -> None:
        super().run()
        root = HERE if self.editable_mode else Path(self.build_lib)
        target = root / PLACE
        target.mkdir(parents=True, exist_ok=True)
        for path in files():
            shutil.copyfile(path, target / path.name)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return (
            outputs if self.editable_mode else [*outputs, *(str(Path(self.build_lib, PLACE, p.name)) for p in files())]
        )


class PlatformWheel(bdist_wheel):
    """One wheel for all Pythons, tagged for the platform if libraries are in it."""

    def finalize_options(self) -> None:
        if any(path.suffix == ".so" for path in files()):
            self.distribution.has_ext_modules = lambda: True  # else the files land beside the wheel's root
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
