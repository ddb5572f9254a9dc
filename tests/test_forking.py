"""A rank that is forked is, for all that a test can see, one that has started by itself."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.forking import can_fork
from tests.support import run_ranks

pytestmark = pytest.mark.processes

LATE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "LIGHTNING_ASYNC_TEST", "PYTHONPATH")


def looks() -> dict[str, Any]:
    imported = [name for name in ("torch", "lightning.pytorch", "lightning_async") if name in sys.modules]
    import numpy
    import torch
    from lightning.pytorch.utilities import rank_zero_only

    from lightning_async._sockets import snapshot

    return {
        "imported": imported,
        "seen": {
            "cwd": os.getcwd(),
            "arguments": sys.argv[1:],
            "environment": {name: os.environ.get(name) for name in LATE},
            "path": sys.path[1:],
            "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
            "rank": getattr(rank_zero_only, "rank"),  # noqa: B009  # a function, for the type checker
            "threads": (torch.get_num_threads(), threading.active_count()),
            "sockets": len(snapshot()),
            "signals": [str(signal.getsignal(each)) for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)],
        },
        "chance": [hash("a string"), random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item()],
    }


def end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(3)
    elif how == "raises":
        raise ValueError("a reason")
    elif how == "a thread is left":  # an interpreter waits for it, and then calls what was registered
        import atexit

        atexit.register(print, "at exit")
        threading.Timer(0.2, print, ["the thread has ended"]).start()


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
def test_a_forked_rank_looks_like_a_fresh_one(tmp_path: Path) -> None:
    env = {"LIGHTNING_ASYNC_TEST": "x", "WORLD_SIZE": "3"}
    forked = run_ranks("tests.test_forking:looks", 3, env=env, cwd=tmp_path)
    fresh = run_ranks("tests.test_forking:looks", 2, env=env, cwd=tmp_path, fresh=True)
    for rank in range(2):
        assert forked[rank].value["seen"] == fresh[rank].value["seen"]
        assert forked[rank].value["seen"]["rank"] == rank
        assert fresh[rank].value["imported"] == []
        assert forked[rank].value["imported"] == ["torch", "lightning.pytorch"]
    for mine, other in itertools.combinations([rank.value["chance"] for rank in (*forked, *fresh)], 2):
        assert not {*mine[1:]} & {*other[1:]}
    assert forked[0].value["chance"][0] != forked[1].value["chance"][0], "ranks must not agree on a set's order"


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("killed", -signal.SIGKILL, ""),
        ("exit", 3, ""),
        ("raises", 1, "ValueError: a reason"),
        ("a thread is left", 0, "the thread has ended\nat exit\n"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
def test_it_ends_as_an_interpreter_ends(fresh: bool, how: str, status: int, text: str) -> None:
    (result,) = run_ranks("tests.test_forking:end", 1, kwargs={"how": how}, check=False, fresh=fresh)
    assert result.returncode == status and not result.timed_out
    assert text in result.stdout + result.stderr


SCRIPT = """
import __main__, inspect, json, os, pickle, sys

class Kept:
    many: int = 1

print(json.dumps([
    __name__, __file__, __main__.__file__, str(__main__.__spec__), sys.argv, sys.path[:2], os.getcwd(),
    [name for name in os.environ if name.startswith(("RANK", "WORLD", "MASTER"))],
    pickle.loads(pickle.dumps(Kept())).__class__ is Kept, inspect.getsource(Kept), str(Kept.__annotations__),
    sorted(vars(__main__)),
]))
sys.exit(4)
"""


def test_a_forked_script_looks_like_a_fresh_one(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    (cwd := tmp_path / "cwd").mkdir()
    forked, fresh = (
        run_ranks(script, 1, args=["--an", "option"], cwd=cwd, fresh=fresh, launched=False, check=False)[0]
        for fresh in (False, True)
    )
    assert forked.stdout == fresh.stdout != "", forked
    assert forked.returncode == fresh.returncode == 4


def test_what_is_read_at_the_start_needs_an_interpreter_of_its_own() -> None:
    start = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    linux = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
    assert can_fork(start | {"RANK": "1", "MASTER_PORT": "1234", "HOROVOD_SIZE": "2"}, start) == linux
    assert not can_fork(start | {"OMP_NUM_THREADS": "2"}, start)
    assert not can_fork(start | {"TORCH_LOGS": "inductor"}, start)
    assert not can_fork({"OMP_NUM_THREADS": "1"}, start)
