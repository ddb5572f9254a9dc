"""One rank of one peer: ``python -m tests.benchmarks.worker JOB RESULT``; started by `ranks`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the benchmark ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the benchmark that started this worker is gone")


def main() -> None:
    job_json, result_path, parent = sys.argv[1:4]
    die_with_parent(int(parent))
    # Only now, for the import takes seconds.
    from tests.benchmarks.peers import Job, run

    run(Job(**json.loads(job_json))).save(Path(result_path))


if __name__ == "__main__":
    main()
