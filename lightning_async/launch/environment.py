"""The command line and the environment of a rank; the variables are those of ``torchrun``.

Lightning, torch and scripts read these, so that what runs under torchrun runs here as it is.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_async.launch.process import ERROR_FILE
from lightning_async.membership.launcher_channel import REJOIN
from lightning_async.membership.signing import SECRET, new_secret

ADDRESS = "127.0.0.1"  # where the store listens


@dataclass(frozen=True)
class LaunchedJob:
    """A program to run, the same on all ranks."""

    program: Sequence[str]  # of Python: a script, or ``-m`` and a module, then arguments
    ranks: int  # how many there are
    max_restarts: int  # as the ranks are told
    base: Mapping[str, str]  # the environment of all ranks
    name: str  # of the job, unique on this host

    @classmethod
    def of(
        cls, program: Sequence[str], ranks: int, max_restarts: int, shell: Mapping[str, str], cores: int
    ) -> LaunchedJob:
        """Make a job with the environment of this shell; add what it lacks: a secret, threads of compute."""
        base = {name: value for name, value in shell.items() if name != REJOIN}
        base.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        if not base.get(SECRET):
            base[SECRET] = new_secret()  # all ranks are on this host: nobody else need know it
        return cls(tuple(program), ranks, max_restarts, base, f"launch-{os.getpid()}")

    def command(self) -> list[str]:
        """Return the command line, unbuffered: what a rank writes is seen, and not lost when it is killed."""
        return [sys.executable, "-u", *self.program]

    def variables(self, rank: int, port: int | str, restarts: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to open a store of its own
        }

    def environment(self, rank: int, port: int, restarts: int, rejoins: int = 0) -> dict[str, str]:
        """Return all variables of a rank that was started alone ``rejoins`` times, to join the others."""
        alone = {REJOIN: str(rejoins)} if rejoins else {}
        return {**self.base, **self.variables(rank, port, restarts), **alone}


def shown(job: LaunchedJob, shell: Mapping[str, str], standbys: int = 0) -> list[str]:
    """Return a shell command for each rank; of the secret it shows only that there is one."""
    added = {name: value for name, value in job.base.items() if shell.get(name) != value}
    if SECRET in added:
        added[SECRET] = "..."
    lines = []
    for rank in range(job.ranks):
        variables = {**added, **job.variables(rank, "<free>", 0), ERROR_FILE: "<own>"}
        told = [f"{name}={value}" for name, value in variables.items()]
        lines.append(f"[{rank}] {shlex.join(['env', *told, *job.command()])}")
    if job.max_restarts:
        lines.append(f"# one that is started again alone, to join the others, has {REJOIN}=1, too, then 2, ...")
    if standbys:
        lines.append(f"# once all train: {standbys} more, to be the next that is started again, with its imports done")
    return lines
