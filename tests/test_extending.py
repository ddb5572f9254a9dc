"""docs/contributing/extending.md, word for word, in a copy of the source: its blocks go in, and their tests run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

import pytest

from tests.support import ROOT, shell_environment
from tests.test_docs import fences
from tests.test_layers import CHECKS, PACKAGE, folder_of, place_of

pytestmark = pytest.mark.processes

PAGE = ROOT / "docs" / "contributing" / "extending.md"


class Block(NamedTuple):
    """What goes where.

    Args:
        path: of a file.
        below: the line that it goes below; empty for a new file.
        code: the rest of the block.
    """

    path: str
    below: str
    code: str


def blocks(page: str) -> list[Block]:
    """The page's blocks of source, in its order; each block begins with ``# path`` or ``# path, below: line``."""
    found = []
    for fence in fences(page):
        if fence.kind in ("py", "text"):
            first, _, code = fence.body.partition("\n")
            assert first.startswith("# "), f"{fence}: a block begins with a comment that says where it goes"
            path, _, below = first[2:].partition(", below: ")
            found.append(Block(path, below, code + "\n"))
    return found


def put(tree: Path, block: Block) -> None:
    path = tree / block.path
    if not block.below:
        assert not path.exists(), f"{block.path} is there already"
        assert path.parent.is_dir(), f"{block.path}: there is no such folder"
        path.write_text(block.code, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == block.below]
    assert len(places) == 1, f"{block.path} has {len(places)} lines `{block.below}`, not one"
    before = lines[places[0]]
    depth = before[: len(before) - len(before.lstrip())]
    lines.insert(places[0] + 1, indent(block.code, depth))
    path.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, with all that the page adds."""
    tree = tmp_path_factory.mktemp("extended")
    unwanted = shutil.ignore_patterns("__pycache__", "lib")
    for folder in ("lightning_async", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tree)
    if (libraries := ROOT / "lightning_async" / "ops" / "lib").is_dir():
        (tree / "lightning_async" / "ops" / "lib").symlink_to(libraries)
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        put(tree, block)
    return tree


def run(tree: Path, *command: str) -> str:
    environment = shell_environment({"PYTHONPATH": str(tree)})
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=220,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(240)  # a pytest of its own, which starts ranks of its own
def test_its_rule_its_schedule_its_vote_its_policies_and_its_transport_work(extended: Path) -> None:
    """The rule and the schedule through the laws of the catalogue; all of the new tests."""
    laws = [f"tests/algorithms/{name}" for name in ("test_catalogue.py", "test_laws.py", "test_schedules.py")]
    new = [block.path for block in blocks(PAGE.read_text(encoding="utf-8")) if Path(block.path).name[:5] == "test_"]
    chosen = ["Damped", "damped", "Doubling", "doubling", "every_public", *(Path(path).stem for path in new)]
    told = run(extended, "pytest", "-q", "-p", "no:cacheprovider", "-k", " or ".join(chosen), *laws, *new)
    assert " passed" in told and " failed" not in told and " skipped" not in told, told[-3000:]


def test_it_keeps_the_law_of_imports_and_style(extended: Path) -> None:
    touched = sorted({block.path for block in blocks(PAGE.read_text(encoding="utf-8"))})
    assert len(touched) > 8
    for path in touched:
        if path.startswith(f"{PACKAGE}/"):
            place = place_of(path.removeprefix(f"{PACKAGE}/"))
            tree = ast.parse((extended / path).read_text(encoding="utf-8"))
            assert folder_of(place)
            assert not [what for check in CHECKS for _, what in check(place, tree)], path
    run(extended, "ruff", "check", *touched)
    run(extended, "ruff", "format", "--check", *touched)


def test_the_files_that_it_names_are_there(extended: Path) -> None:
    text = "\n".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("# "))
    named = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text)
    assert "tests/engine/test_control_plane.py" in named
    roots = (extended, extended / PACKAGE, ROOT)
    assert not [name for name in named if not any((root / name).exists() for root in roots)]
