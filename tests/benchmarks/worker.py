"""One rank of one peer: ``python -m tests.benchmarks.worker JOB RESULT PARENT``, or `work` in a fork; see `ranks`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the benchmark ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the benchmark that started this worker is gone")


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What a rank of this job measures."""
    # Only now, for the import takes seconds.
    from tests.benchmarks.peers import Job, run

    return asdict(run(Job(**job)))


def main() -> None:
    job_json, result_path, parent = sys.argv[1:4]
    die_with_parent(int(parent))
    Path(result_path).write_text(json.dumps(work(json.loads(job_json))))


if __name__ == "__main__":
    main()
