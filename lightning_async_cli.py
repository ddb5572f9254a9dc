"""The console script. It runs a command without the package's ``__init__``, which imports torch and Lightning.

Commands import what they need from the modules that define it, so that ``launch`` is there in a tenth of a second, and
takes 20 MB for as long as the training runs.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]


def main() -> int:
    """See ``lightning_async.commands.main``."""
    spec = importlib.util.find_spec("lightning_async")
    assert spec is not None, "this module is installed together with the package"
    sys.modules["lightning_async"] = importlib.util.module_from_spec(spec)  # a bare name, and where its modules are
    from lightning_async.commands.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
