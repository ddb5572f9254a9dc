"""The fixture that fails careless tests must itself be able to fail, once for each kind of thing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.processes

CARELESS = {
    "thread": ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
    "process": ("kept.append(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1))", "processes"),
    "variable": ("os.environ['CARELESS'] = '1'", "environment variables: CARELESS"),
    "directory": ("os.chdir('sub')", "working directory to"),
    "file": ("open('stray.txt', 'w').close()", "files in the working directory: stray.txt"),
    "group": (
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "default process group",
    ),
}
"""What a careless test does, and what the fixture says about it."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints for careless and careful tests in turn, under this project's conftest.py."""
    folder = tmp_path_factory.mktemp("careless")
    (folder / "sub").mkdir()
    conftest = (ROOT / "tests/conftest.py").read_text()
    assert "GRACE_S = 30.0" in conftest
    (folder / "conftest.py").write_text(conftest.replace("GRACE_S = 30.0", "GRACE_S = 0.2"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = processes\n")
    tests = ["import os, subprocess, sys, threading", "import pytest", "import torch.distributed as dist", "kept = []"]
    for kind, (body, _) in CARELESS.items():
        mark = ["@pytest.mark.processes"] if kind == "process" else []
        tests += [*mark, f"def test_{kind}():", f"    {body}", f"def test_careful_after_{kind}():", "    pass"]
    tests += ["def test_unmarked():", f"    {CARELESS['process'][0]}"]
    (folder / "test_it.py").write_text("\n".join(tests))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "test_it.py"]
    run = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize("kind", CARELESS)
def test_what_is_left_behind_fails_the_test(kind: str, report: str):
    section = re.search(rf"ERROR at teardown of test_{kind} __.*?(?=\n___|\n===)", report, flags=re.DOTALL)
    assert section, report
    assert CARELESS[kind][1] in section[0]


def test_the_tests_after_it_are_not_blamed(report: str):
    assert f"1 failed, {2 * len(CARELESS)} passed, {len(CARELESS)} errors" in report
    assert "ERROR at teardown of test_careful" not in report


def test_one_that_starts_a_process_unmarked_fails(report: str):
    assert "RuntimeError: test_it.py::test_unmarked starts a process: mark it `@pytest.mark.processes`" in report


def test_a_module_that_does_its_work_when_it_is_imported_is_refused(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    plugin: Any = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    monkeypatch.setattr(plugin, "BEFORE_COLLECTION", (set(threading.enumerate()), plugin.children()))
    finish = plugin.pytest_collection_finish
    finish(request.session)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="works at once")
    thread.start()
    try:
        with pytest.raises(pytest.UsageError, match="works at once"):
            finish(request.session)
    finally:
        end.set()
        thread.join()
