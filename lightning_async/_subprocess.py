"""The start of a process of this package's that imports no more than it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_BOOT = """
import importlib, json, sys, types
folder, path, module, arguments = json.loads(sys.argv[1])
sys.path += path
package = sys.modules["lightning_async"] = types.ModuleType("lightning_async")
package.__path__ = [folder]
importlib.import_module(module).main(*arguments)
"""
"""The package is a bare name there: what its ``__init__`` imports takes seconds, and hundreds of megabytes."""


def bare_command(module: str, arguments: list[Any], title: str) -> list[str]:
    """Return the command line of a process that calls ``main`` of a module with ``arguments``, in JSON's terms.

    The system's tools show ``title``.
    """
    folder = str(Path(__file__).resolve().parent)
    call = json.dumps([folder, [os.path.abspath(path) for path in sys.path if path], module, arguments])
    # Isolated (-I): a module beside the user's script cannot take the place of one that it imports.
    return [sys.executable, "-I", "-S", "-c", _BOOT, call, title]
