"""A program that a forked rank starts is, for all that either can see, one that has started by itself."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_ranks

pytestmark = pytest.mark.processes

LOOKS = """
import json, os, signal, sys

def looks():
    main = sys.modules["__main__"]
    numbers = sorted(number for number in map(int, os.listdir("/proc/self/fd")) if number < 512)
    return {
        "mine": looks.__globals__ is vars(main),
        "main": [str(vars(main).get(f"__{name}__")) for name in ("name", "file", "package", "cached", "doc")],
        "arguments": [sys.argv, sys.orig_argv[1:], sys.path[:2]],
        "environment": dict(os.environ),
        "place": [os.getcwd(), os.umask(0o22)],
        "of": os.getppid() == int(os.environ["SCENARIO_STARTER"]),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "descriptors": [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")],
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE)],
        "rank": os.environ.get("RANK"),
    }

if __name__ == "__main__":
    given = sys.stdin.read()
    was = "torch" in sys.modules
    print(json.dumps([was, given, looks()]))
    print("an error", file=sys.stderr)
    if sys.argv[-1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
"""

STARTER = """
import json, multiprocessing, os, subprocess, sys
os.environ["SCENARIO_STARTER"] = str(os.getpid())
sys.path.insert(0, os.getcwd())
import looks
text = open("looks.py").read()

def start(*words, **options):
    os.dup2(1, 77)
    done = subprocess.run(
        [sys.executable, *words], input="a line", capture_output=True, text=True, pass_fds=[77], **options
    )
    return [done.returncode, done.stdout, done.stderr]

def spawned():
    return ["torch" in sys.modules, os.getppid() == int(os.environ["SCENARIO_STARTER"]), sys.argv]

if __name__ == "__main__":
    told = [
        start("looks.py", "an", "-option"),
        start("-u", os.path.abspath("looks.py"), "killed", cwd="elsewhere", start_new_session=True),
        start("-m", "looks", "--an", "option", env={**os.environ, "RANK": "5", "PYTHONPATH": os.environ["PYTHONPATH"]}),
        start("-c", text, "an option"),
        start("looks.py", env={**os.environ, "OMP_NUM_THREADS": "3"}),
    ]
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            told.append([0, json.dumps(pool.apply(spawned)), ""])
    print(json.dumps(told))
"""

BY_LIGHTNING, BY_TORCH = "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"  # as they are imported


@pytest.mark.skipif(sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="where ranks are forked")
def test_a_forked_program_looks_like_a_fresh_one(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "elsewhere").mkdir()
    (script := tmp_path / "starter.py").write_text(STARTER)
    ran = [run_ranks(script, 1, cwd=tmp_path, launched=False, forks=forks)[0] for forks in (True, False)]
    forked, fresh = (json.loads(each.stdout) for each in ran)
    assert [each[0] for each in forked] == [each[0] for each in fresh] == [3, -signal.SIGKILL, 3, 3, 3, 0, 0]
    for mine, other in zip(forked[:5], fresh[:5], strict=True):
        assert mine[2] == other[2] == "an error\n"
        (was, *seen), (_, *expected) = json.loads(mine[1]), json.loads(other[1])
        assert was == (mine is not forked[4]), "which has another number of threads"
        assert BY_LIGHTNING in seen[1]["environment"] or not was
        for each in (seen, expected):
            for name in ("SCENARIO_STARTER", "RANK_ANSWER", BY_LIGHTNING, BY_TORCH):
                each[1]["environment"].pop(name, None)
        for name, value in expected[1].items():
            assert seen[1][name] == value, name
        assert seen == expected
    spawned: list[Any] = [json.loads(each[1]) for each in forked[5:]]
    assert [each[0] for each in spawned] == [True, True]
    assert [each[1:] for each in spawned] == [json.loads(each[1])[1:] for each in fresh[5:]]


HELPERS = """
import subprocess, sys
print("torch" in sys.modules, flush=True)
if sys.argv[-1] == "supervises":
    done = subprocess.run([*sys.orig_argv[:-1], "serves"], capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr)
else:
    sys.exit("no room at the inn")
"""

STARTS_HELPERS = """
import subprocess, sys
of_the_package = "lightning_async.parameter_server."
command = [sys.executable, "-I", "-S", "-c", open("helpers.py").read(), of_the_package, "supervises"]
print(subprocess.run(command, capture_output=True, text=True).stdout)
"""


@pytest.mark.skipif(sys.platform != "linux" or Path("/dev/nvidiactl").exists(), reason="where ranks are forked")
@pytest.mark.parametrize("forks", [True, False])
def test_a_helper_of_a_helper_ends_with_a_text_as_an_interpreter_does(forks: bool, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(HELPERS)
    (script := tmp_path / "starter.py").write_text(STARTS_HELPERS)
    (rank,) = run_ranks(script, 1, cwd=tmp_path, launched=False, forks=forks)
    assert rank.stdout.split("\n") == [f"{forks}", f"1 {forks}", " no room at the inn", "", "", ""]
