"""The command line and the environment of a rank; the variables are those of ``torchrun``.

Lightning, torch and scripts read these variables, so that a program for torchrun runs here unchanged.
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

ADDRESS = "127.0.0.1"  # the address at which the store listens


@dataclass(frozen=True)
class LaunchedJob:
    """A program to run, the same on all ranks."""

    program: Sequence[str]  # arguments of Python: a script, or ``-m`` and a module, then its arguments
    ranks: int  # number of ranks
    max_restarts: int  # number of restarts, which ranks can read in their environment
    base: Mapping[str, str]  # the environment of all ranks
    name: str  # name of the job, unique on this host

    @classmethod
    def of(
        cls, program: Sequence[str], ranks: int, max_restarts: int, shell: Mapping[str, str], cores: int
    ) -> LaunchedJob:
        """Return a job with this shell's environment; add a secret and ``OMP_NUM_THREADS`` if they are not set.

        Args:
            program: Arguments of Python.
            ranks: Number of ranks.
            max_restarts: Number of restarts.
            shell: Environment of this process.
            cores: Number of cores, which the ranks share.
        """
        base = {name: value for name, value in shell.items() if name != REJOIN}
        base.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        if not base.get(SECRET):
            base[SECRET] = new_secret()  # all ranks are on this host, so no other host needs to know it
        return cls(tuple(program), ranks, max_restarts, base, f"launch-{os.getpid()}")

    def command(self) -> list[str]:
        """Return a rank's command line; its output is unbuffered, so that it is seen at once and survives a kill."""
        return [sys.executable, "-u", *self.program]

    def variables(self, rank: int, port: int | str, restarts: int) -> dict[str, str]:
        """Return the environment variables that a rank gets in addition to the launcher's own."""
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
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 would open a second store
        }

    def environment(self, rank: int, port: int, restarts: int, rejoins: int = 0) -> dict[str, str]:
        """Return all variables of a rank.

        Args:
            rank: The rank.
            port: Port of the store.
            restarts: Number of restarts of all ranks so far.
            rejoins: Number of times that this rank was started alone, to join the others. Default: 0.
        """
        alone = {REJOIN: str(rejoins)} if rejoins else {}
        return {**self.base, **self.variables(rank, port, restarts), **alone}


def shown(job: LaunchedJob, shell: Mapping[str, str]) -> list[str]:
    """Return the lines that show a job before it runs: a shell command for each rank, with the secret hidden."""
    added = {name: value for name, value in job.base.items() if shell.get(name) != value}
    if SECRET in added:
        added[SECRET] = "..."
    lines = []
    for rank in range(job.ranks):
        variables = {**added, **job.variables(rank, "<free>", 0), ERROR_FILE: "<own>"}
        told = [f"{name}={value}" for name, value in variables.items()]
        lines.append(f"[{rank}] {shlex.join(['env', *told, *job.command()])}")
    if job.max_restarts:
        lines.append(f"# a rank that is started again alone, to join the others, also has {REJOIN}=1, then 2, ...")
    return lines
