"""The build of Horovod for the installed torch: ``lightning-async build-horovod [--mpi] [--nccl]``.

Horovod 0.28.1, its last release, is published as a source package that compiles for the torch that it finds, but not
for torch 2.1 or newer. This script downloads the package, compares its checksum, sets the C++ standard that torch's
headers need, and makes the library look for torch relative to its own place. It builds a wheel, keeps it in a folder
outside the project for the next environment with the same torch, and installs it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """An error that prevents a build; its message has the remedy."""


def kept(cache: Path, pattern: str) -> Path | None:
    """Return the wheel in the cache whose name matches ``pattern``, if its checksum is right; else None.

    Raises:
        BuildError: Other users may write into ``cache``, and could put another wheel there.
    """
    if not cache.is_dir():
        return None
    status = cache.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise BuildError(
            f"other users may write into {cache}: `chmod go-w` it, or pass `--cache` a folder of your own."
        )
    for wheel in cache.glob(pattern):
        note = wheel.with_name(f"{wheel.name}.sha256")
        if note.is_file() and note.read_text() == checksum(wheel):
            return wheel
        print(f"{wheel} is not what was kept there, and is built again", flush=True)
    return None


def keep(cache: Path, wheel: Path) -> Path:
    """Copy a wheel, with its checksum, into the cache, where the next build with the same features finds it."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = cache / wheel.name
    # Write under temporary names first, because builds may run at the same time.
    half, note = (cache / f".{os.getpid()}-{wheel.name}{kind}" for kind in ("", ".sha256"))
    shutil.copyfile(wheel, half)
    note.write_text(checksum(half))
    half.replace(place)
    note.replace(cache / f"{wheel.name}.sha256")
    return place


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Increase this with every change of `patch`. It is part of a kept wheel's version.
PATCHES = 1
TOOLS = ("setuptools==84.2.1", "wheel==0.48.0")
CMAKE = "cmake==4.4.4"
RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")


@dataclass(frozen=True, kw_only=True)
class Build:
    """The features that a Horovod wheel is built with, such as NCCL and MPI."""

    torch: str  # version of torch, such as ``"2.13.0+cpu"``
    cxx: int  # the C++ standard of torch's headers
    mpi: bool = False  # MPI beside Gloo; needs ``mpicxx``
    nccl: bool = False  # NCCL; needs a CUDA build of torch, and a toolkit in ``cuda_home``
    cuda_home: Path | None = None  # the CUDA toolkit
    cuda_arch: str = "80,90"  # compute capabilities without a dot, ``"80,90"``

    @property
    def local_version(self) -> str:
        parts = ["torch" + self.torch.replace("+", "."), "gloo"]
        parts += [name for name in ("mpi", "nccl") if getattr(self, name)]
        return ".".join([*parts, f"p{PATCHES}"])

    def environment(self, nccl_home: Path | None, jobs: int) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        own = {
            "HOROVOD_LOCAL_VERSION": self.local_version,
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # cmake 4 refuses the version that Gloo requires
            "LDFLAGS": "-s",
            "MAKEFLAGS": f"-j{jobs}",
        }
        if self.nccl:
            own |= {
                "HOROVOD_GPU_OPERATIONS": "NCCL",
                "HOROVOD_CUDA_HOME": str(self.cuda_home),
                "HOROVOD_BUILD_CUDA_CC_LIST": self.cuda_arch,
                "HOROVOD_NCCL_HOME": str(nccl_home),
                "HOROVOD_NCCL_LINK": "SHARED",
            }
        return inherited | own


def cxx_standard(torch_folder: Path) -> int:
    found = re.search(r"C\+\+(\d+) or later", (torch_folder / "include/ATen/ATen.h").read_text())
    return int(found.group(1)) if found else 17


def nccl_package() -> str:
    """Return the name of the package with NCCL that the installed torch depends on.

    Raises:
        BuildError: torch depends on none, or another one is installed, too: they overwrite each other's files.
    """
    needed = [re.match(r"nvidia-nccl-cu\d+", each) for each in importlib.metadata.requires("torch") or []]
    names = sorted({match.group() for match in needed if match})
    installed = sorted(
        name
        for each in importlib.metadata.distributions()
        if re.fullmatch(r"nvidia-nccl-cu\d+", name := each.metadata["Name"])
    )
    if not names:
        raise BuildError("`--nccl`: the installed torch has no NCCL; install a CUDA build of torch first.")
    if len(installed) > 1:
        others = " ".join(name for name in installed if name != names[0])
        raise BuildError(
            f"{' and '.join(installed)} are both installed; they overwrite each other's files. "
            f"`pip uninstall -y {others}`, then `pip install --force-reinstall --no-deps {names[0]}`."
        )
    if names[0] not in installed:
        raise BuildError(f"`--nccl`: torch needs {names[0]}, which is not installed: `pip install {names[0]}`.")
    return names[0]


def prepare_nccl(folder: Path) -> Path:
    distribution = importlib.metadata.distribution(nccl_package())
    home = Path(str(distribution.locate_file("nvidia/nccl")))
    library = next(home.glob("lib/libnccl.so.*"), None)
    if library is None:
        raise BuildError(f"{home}/lib holds no libnccl.so: reinstall {distribution.metadata['Name']}.")
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/libnccl.so").symlink_to(library)
    (folder / "include").symlink_to(home / "include")
    return folder


def patch(source: Path, cxx: int) -> None:
    def edit(name: str, old: str, new: str) -> None:
        path = source / name
        text = path.read_text()
        if text.count(old) != 1:
            raise BuildError(f"{name} of Horovod {VERSION} is not what it was.")
        path.write_text(text.replace(old, new))

    old = "set(CMAKE_CXX_STANDARD 14)"
    new = f"set(CMAKE_CXX_STANDARD {cxx})"
    edit("horovod/torch/CMakeLists.txt", old, new)
    # The library must find torch and NCCL beside itself, wherever the environment is.
    rpath = r"\$ORIGIN/../../torch/lib;\$ORIGIN/../../nvidia/nccl/lib"
    new += f'\nset(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\nset(CMAKE_INSTALL_RPATH "{rpath}")'
    edit("CMakeLists.txt", old, new)
    # A process set, even that of all ranks, ignores the requested network interface, and uses the address of the host's
    # name, which is 127.0.1.1 on many hosts. The context from which the set is made knows the interface.
    edit(
        "horovod/common/gloo/gloo_context.cc",
        "assert(global_context.IsEnabled());",
        "assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;",
    )


def pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    print("$", shlex.join(command), flush=True)
    if subprocess.run(command, env=env).returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed; see above.")


def download(folder: Path) -> Path:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    pip("download", "--quiet", "--no-deps", "--no-binary=horovod", "--no-build-isolation", "--require-hashes",
        f"--dest={folder}", f"--requirement={wanted}")  # fmt: skip
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:
            # Older Pythons have no filter. The checksum of the archive is known.
            archive.extractall(folder)
    return folder / f"horovod-{VERSION}"


def build(spec: Build, cache: Path, jobs: int) -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"horovod-{VERSION}+{spec.local_version}-{tag}-*.whl"
    if found := kept(cache, pattern):
        print(f"found {found}", flush=True)
        return found
    with tempfile.TemporaryDirectory(prefix="horovod-") as name:
        folder = Path(name)
        pip("install", "--quiet", *TOOLS)
        source = download(folder)
        patch(source, spec.cxx)
        env = spec.environment(prepare_nccl(folder / "nccl") if spec.nccl else None, jobs)
        if shutil.which("cmake") is None:
            pip("install", "--quiet", CMAKE)
            env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
        print(f"building for torch {spec.torch} with C++{spec.cxx}: some minutes", flush=True)
        # pip would look for a relative folder within the sources.
        pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder / 'wheel'}", str(source),
            env=env)  # fmt: skip
        wheel = next((folder / "wheel").glob("*.whl"))
        return keep(cache, wheel)


def _finds_mpi_headers() -> bool:
    """Return whether MPI's headers are installed; some packages install ``mpicxx`` without them."""
    command = ["mpicxx", "-E", "-x", "c++", "-include", "mpi.h", os.devnull]
    return shutil.which("mpicxx") is not None and subprocess.run(command, capture_output=True).returncode == 0


def specify(options: argparse.Namespace) -> Build:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise BuildError("torch is not installed; Horovod is compiled for the torch it will run with.")
    if options.mpi and not _finds_mpi_headers():
        raise BuildError("`--mpi` needs mpicxx and mpi.h: install MPI's development files (Debian: libopenmpi-dev).")
    if options.nccl and not (options.cuda_home / "bin/nvcc").exists():
        raise BuildError(f"`--nccl` needs a CUDA toolkit; there is none in --cuda-home={options.cuda_home}.")
    if shutil.which("c++") is None and "CXX" not in os.environ:
        raise BuildError("no C++ compiler: install g++ (Debian: g++ make).")
    return Build(
        torch=importlib.metadata.version("torch"),
        cxx=cxx_standard(Path(found.submodule_search_locations[0])),
        mpi=options.mpi,
        nccl=options.nccl,
        cuda_home=options.cuda_home,
        cuda_arch=options.cuda_arch,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    about = "Build Horovod for the installed torch."
    parser = argparse.ArgumentParser(prog="lightning-async build-horovod", description=about)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_async/wheels"
    cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    parser.add_argument("--mpi", action="store_true", help="with MPI beside Gloo")
    parser.add_argument("--nccl", action="store_true", help="with NCCL, of the package that torch depends on")
    parser.add_argument(
        "--cuda-home", type=Path, default=cuda, help="the CUDA toolkit, for --nccl (default: %(default)s)"
    )
    parser.add_argument("--cuda-arch", default="80,90", help="compute capabilities, for --nccl (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=cache, help="folder that keeps wheels (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        spec = specify(options)
        # Install these first, because Horovod's build needs some of them.
        pip("install", "--quiet", *RUNTIME)
        wheel = build(spec, options.cache, options.jobs)
        # With --no-deps, because pip must not replace the torch for which Horovod was built.
        pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    check = "import horovod.torch as hvd; hvd.init(); assert hvd.size() == 1"
    return subprocess.run([sys.executable, "-c", check], cwd="/").returncode


if __name__ == "__main__":
    sys.exit(main())
