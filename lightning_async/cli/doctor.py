"""The command that reports what is installed, and which backend runs the arithmetic: ``lightning-async doctor``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Sequence

import torch
import torch.cuda.nccl

from lightning_async.ops import native


def nccl_packages() -> list[str]:
    """Return the installed packages that contain NCCL. If there are several, they overwrite each other's files."""
    names = (distribution.metadata["Name"] for distribution in importlib.metadata.distributions())
    return sorted({name for name in names if name and re.fullmatch(r"nvidia-nccl-cu\d+", name)})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _nccl() -> str:
    packages = ", ".join(f"{name} {_version(name)}" for name in nccl_packages()) or "no package"
    if not torch.cuda.is_available():
        return packages
    return f"{'.'.join(map(str, torch.cuda.nccl.version()))} in torch; {packages}"


def _horovod() -> str:
    return _version("horovod") if importlib.util.find_spec("horovod") is not None else "not installed"


def _driver() -> str:
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda} in torch; {', '.join(devices)}"


def report() -> list[str]:
    lines = [
        f"python          {platform.python_version()}, {platform.platform()}",
        f"lightning_async {_version('lightning-async')}",
        f"torch           {torch.__version__}",
        f"NCCL            {_nccl()}",
        f"Horovod         {_horovod()}",
        f"GPU             {_driver()}",
    ]
    for kind in ("cpu", "cuda"):
        backend = native.backend(kind)
        lines.append(f"ops on {kind:<8} {backend.name}{f': {backend.reason}' if backend.reason else ''}")
    record = native.build_record()
    if not record:
        lines.append("build           no record: neither an install nor `python cuda_ext/build.py` has built libraries")
    for kind, outcome in record.items():
        made = f"built by {outcome['compiler']}" if outcome["built"] else f"not built: {outcome['error']}"
        needs = f"; needs driver {outcome['driver']} or newer" if outcome["built"] and outcome["driver"] else ""
        lines.append(f"build of {kind:<6} {made}{needs}")
        lines += [f"    $ {command}" for command in outcome["commands"]]
    return lines


def problems() -> list[str]:
    """Return the problems of this installation, each with a remedy."""
    packages = nccl_packages()
    if len(packages) < 2:
        return []
    return [
        f"{' and '.join(packages)} are both installed and overwrite each other's files: uninstall all of them, then "
        "install again the one that torch depends on."
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if something must be repaired."""
    parser = argparse.ArgumentParser(
        prog="lightning-async doctor", description="Report what is installed and what runs."
    )
    parser.parse_args(arguments)
    print("\n".join(report()))
    found = problems()
    for problem in found:
        print(f"problem: {problem}", file=sys.stderr)
    return int(bool(found))
