"""What the documentation shows is true: its commands run somewhere, its Python runs here, its links lead somewhere.

Conventions, for README.md and all Markdown files below docs/:

- A block of commands is fenced as ``console``; a line ``$ command`` is a command, other lines are its output. Each
  command stands in `COMMANDS` with the test, or the line of .ci/run, that runs it.
- A block fenced as ``python`` is complete and is executed, in a fresh process and an empty folder. A fragment that
  cannot stand alone is fenced as ``py`` and is only compiled; what it calls of the package's must take those arguments.
- Other fences (``text``, ``yaml``, ``toml``) are not commands. A ``mermaid`` fence is a state diagram that the site can
  draw. A fence without a word is refused.
- docs/specification/failures.yaml names tests that exist, and docs/reference/api.md every public name.

Doctests of the package run with the other tests (`--doctest-modules` in pyproject.toml).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import lightning_async
from lightning_async import algorithms
from lightning_async.algorithms import divergence
from lightning_async.data import partition
from tests.support import ROOT, run_ranks
from tests.test_layers import ALLOWED

COMMANDS = {
    "make test": ".ci/run",
    "make check": ".ci/run",
    "make demo": "tests/examples/test_char_lm.py::test_a_short_run_ends_with_numbers_and_a_picture",
    "make horovod": ".ci/run",
    "make native": ".ci/run",
    "make gpu": "tests/ops/test_gpu_script.py::test_without_a_gpu_it_says_so_and_fails",
    "lightning-async doctor": "tests/cli/test_doctor.py::test_it_says_what_runs_and_how_it_was_built",
    "LIGHTNING_ASYNC_BUILD=cuda pip install .": (
        "tests/test_packaging.py::test_without_a_compiler_the_wheel_is_pure_and_says_why"
    ),
    "python -m tests.benchmarks.checkpoints --out runs/bench": "tests/benchmarks/test_benchmarks.py",
    "python -m tests.benchmarks.ops --out runs/ops": "tests/benchmarks/test_ops.py::test_it_measures_and_writes",
    "horovodrun --gloo -np 2 python examples/char_lm.py --strategy horovod --max-steps 20": (
        "tests/examples/test_horovod.py::test_char_lm_under_horovodrun"
    ),
    "horovodrun --gloo -np 2 python examples/char_lm.py --strategy async_averaging --max-steps 100": (
        "tests/strategies/test_horovod_averaging.py::test_horovodrun"
    ),
    "horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic.py": (
        "tests/examples/test_horovod.py::test_elastic"
    ),
    "mpirun -np 2 python examples/char_lm.py --strategy horovod --max-steps 20": (
        "tests/strategies/test_horovod_mpi.py::test_synchronous_training_is_that_of_one_process"
    ),
    "mpirun -np 2 python examples/char_lm.py --strategy async_averaging --transport horovod --max-steps 100": (
        "tests/examples/test_horovod.py::test_char_lm_under_mpirun"
    ),
    "python examples/parameter_server.py --mode async --max-steps 200": (
        "tests/examples/test_parameter_server.py::test_a_short_run_learns"
    ),
    "python examples/char_lm.py --rule diloco --sync-every 16 --max-steps 320 --compression int8": (
        "tests/examples/test_char_lm.py::test_a_short_run_ends_with_numbers_and_a_picture"
    ),
    "python -m tests.benchmarks.averaging --out runs/int8 --scenario speed --replicas 2 --slot-ms 75 "
    '--peers single apart "ours DiLoCo H=8" "ours int8 H=8"': "tests/benchmarks/test_benchmarks.py",
    "python -m tests.benchmarks.targets --out runs/targets --slot-ms 120 --rate-mbit 50 --lrs 1e-3 --seeds 0 1": (
        "tests/benchmarks/test_targets.py"
    ),
    "export LIGHTNING_ASYNC_SECRET=$(openssl rand -hex 32)": (
        "tests/strategies/test_failures.py::test_a_second_rank_1_and_a_stranger_do_not_disturb_a_run"
    ),
    "python examples/fault_tolerance.py": (
        "tests/examples/test_fault_tolerance.py::test_a_training_that_is_killed_is_equal_with_one_that_is_not"
    ),
    "torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend static --node-rank $i --master-addr host0 "
    "--master-port 29500 --max-restarts 3 train.py": (
        "tests/launch/test_torchrun.py::test_rank_0_is_killed_and_its_agent_starts_it_again_beside_the_others"
    ),
    "lightning-async serve --listen 10.0.0.1:29600 --num-servers 2 --secret-file secret --snapshots runs/servers": (
        "tests/cli/test_serve.py::test_servers_are_found_serve_and_come_back_with_their_last_snapshots"
    ),
    "lightning-async checkpoint list runs/checkpoints": (
        "tests/cli/test_checkpoint.py::test_list_shows_all_that_is_there"
    ),
    "lightning-async checkpoint verify runs/checkpoints": (
        "tests/cli/test_checkpoint.py::test_verify_reads_all_and_fails_where_one_is_damaged"
    ),
    "lightning-async checkpoint export runs/checkpoints model.ckpt": (
        "tests/cli/test_checkpoint.py::test_export_is_an_ordinary_checkpoint"
    ),
    "lightning-async checkpoint prune runs/checkpoints --latest 3 --dry-run": (
        "tests/cli/test_checkpoint.py::test_prune_keeps_what_it_is_told_and_what_is_needed"
    ),
    "lightning-async launch -n 2 --max-restarts 3 train.py": (
        "tests/launch/test_training.py::test_a_rank_is_killed_then_the_launcher_then_the_store_and_training_goes_on"
    ),
    "lightning-async launch -n 4 --dry-run train.py": (
        "tests/cli/test_launch.py::test_a_dry_run_shows_what_would_be_started"
    ),
    "lightning-async status": "tests/launch/test_registry.py::test_a_job_is_found_while_it_runs",
    "lightning-async status 10.0.0.5:29500 --watch": (
        "tests/cli/test_status.py::test_it_watches_until_the_store_is_gone"
    ),
    "lightning-async status --prometheus 9400": (
        "tests/cli/test_status.py::test_it_serves_prometheus_until_a_signal_comes"
    ),
    "make kills KILLS=100": "tests/benchmarks/test_elastic.py",
    "make soak": "tests/benchmarks/test_elastic.py",
    "make bench": "tests/benchmarks/test_benchmarks.py",
    "python examples/char_lm.py --strategy async_averaging --devices 2": (
        "tests/examples/test_char_lm.py::test_a_short_run_ends_with_numbers_and_a_picture"
    ),
}
"""Every command of the documentation, and what runs it."""

PUBLIC = (lightning_async, algorithms, divergence, partition)
"""Whose public names are called in fragments with arguments that these take."""
KNOWN_FENCES = {"console", "python", "py", "text", "yaml", "toml", "mermaid"}
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


class Fence(NamedTuple):
    page: str
    line: int
    kind: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences(text: str, page: str = "page") -> list[Fence]:
    found: list[Fence] = []
    open_: Fence | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("```"):
            body.append(line)
        elif open_ is None:
            open_, body = Fence(page, number, line[3:].strip(), ""), []
        else:
            found.append(open_._replace(body="\n".join(body)))
            open_ = None
    if open_ is not None:
        raise ValueError(f"{open_}: this fence has no end")
    return found


def commands(fence: Fence) -> list[str]:
    return [line[2:].strip() for line in fence.body.splitlines() if line.startswith("$ ")]


def problems(fence: Fence) -> list[str]:
    if fence.kind not in KNOWN_FENCES:
        return [f"{fence}: a fence must be one of {sorted(KNOWN_FENCES)}, not {fence.kind!r}"]
    if fence.kind == "console":
        if not commands(fence):
            return [f"{fence}: a console block shows at least one command, as `$ command`"]
        return [f"{fence}: nothing runs `{c}`: add it to COMMANDS" for c in commands(fence) if c not in COMMANDS]
    if fence.kind == "mermaid":
        try:
            diagrams.svg(fence.body)
        except ValueError as error:
            return [f"{fence}: {error}"]
    if fence.kind in ("python", "py"):
        try:
            tree = ast.parse(fence.body)
        except SyntaxError as error:
            return [f"{fence}: {error}"]
        return [f"{fence}: {error}" for call in ast.walk(tree) if isinstance(call, ast.Call) for error in refused(call)]
    return []


def refused(call: ast.Call) -> list[str]:
    """What the package's public names of that name, all of them, would not take of the arguments that are shown."""
    name = ast.unparse(call.func)
    names = [keyword.arg for keyword in call.keywords if keyword.arg]
    errors: list[str] = []
    if len(names) < len(call.keywords) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return errors
    for public in {vars(module)[name] for module in PUBLIC if name in module.__all__}:
        try:
            inspect.signature(public).bind_partial(*call.args, **dict.fromkeys(names))
        except TypeError as error:
            errors.append(f"{ast.unparse(call)}: {error}")
        else:
            return []
    return errors


def dead_links(text: str, folder: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if "://" not in target and not (folder / target).exists()]


def of_the_site(name: str) -> ModuleType:
    """Return a module of docs/_site, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "_site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


diagrams = of_the_site("diagrams")
failures = of_the_site("failures")
modules = of_the_site("modules")
ALL = [fence for page in PAGES for fence in fences(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_of_a_known_kind_and_every_command_is_run_by_something(page: Path):
    here = [fence for fence in ALL if fence.page == str(page.relative_to(ROOT))]
    assert not [problem for fence in here for problem in problems(fence)]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_said_to_run_a_command_exists(command: str):
    runner, _, name = COMMANDS[command].partition("::")
    source = (ROOT / runner).read_text(encoding="utf-8")
    if runner == ".ci/run":
        assert re.search(rf"^\s*{re.escape(command)}$", source, flags=re.MULTILINE)
    if name:
        assert re.search(rf"^def {name}\(", source, flags=re.MULTILINE)
    if command.startswith("make "):
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


TARGETS = {
    **dict.fromkeys(("test", "check", "horovod", "native", "docs"), ".ci/run"),
    **dict.fromkeys(("lint", "types"), "make check"),
    "venv": "make test",
    "ask": "a prerequisite of the environment, without a recipe",
    "demo": "tests/examples/test_char_lm.py",
    "gpu": "tests/ops/test_gpu_script.py",
    "dist": "tests/test_packaging.py",
    "projects": "tests/projects",
    **dict.fromkeys(("bench", "kills", "soak", "servers"), "test_a_recipe_has_arguments_that_its_module_takes"),
    **dict.fromkeys(("help", "format", "docs-serve", "clean"), "test_a_target_expands"),
}
"""Every target of the Makefile, and what runs it. The last two rows are expanded here, and not run: they take minutes,
have no end, or change the clone."""


def recipe(target: str) -> str:
    """Return the commands of a target, as `make` would run them in an environment that is complete."""
    ready = [f"--assume-old=.venv/{name}" for name in (".torch", *map(".ready-{}".format, ("test", "soak", "docs")))]
    command = ["make", "-n", "--no-print-directory", *ready, target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_every_target_of_the_makefile_is_run_by_something() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, flags=re.MULTILINE)
    assert sorted(TARGETS) == sorted(phony.split())
    for target, runner in TARGETS.items():
        if runner == ".ci/run":
            assert re.search(rf"^make {target}$", (ROOT / runner).read_text(encoding="utf-8"), flags=re.MULTILINE)
        elif runner.startswith("tests/"):
            assert (ROOT / runner).exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    "target", [target for target, runner in TARGETS.items() if target != "ask" and runner != ".ci/run"]
)
def test_a_target_expands(target: str) -> None:
    """Of `check`, which .ci/run runs, make would run the tests even so: its recipe calls make."""
    assert recipe(target)


@pytest.mark.processes
@pytest.mark.parametrize("target", ["bench", "kills", "soak", "servers"])
def test_a_recipe_has_arguments_that_its_module_takes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parsed(Exception):
        pass

    def parse(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> Any:
        _, unknown = parser.parse_known_args(arguments, namespace)
        raise Parsed(unknown)

    commands = [shlex.split(line) for line in recipe(target).splitlines() if " -m tests.benchmarks." in line]
    assert commands
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for command in commands:
        module = command[command.index("-m") + 1]
        with pytest.raises(Parsed, match=r"^\[\]$"):
            importlib.import_module(module).main(command[command.index(module) + 1 :])


@pytest.mark.processes
@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.kind == "python"], ids=str)
def test_python_runs_as_it_stands(fence: Fence, tmp_path: Path):
    script = tmp_path / "block.py"
    script.write_text(fence.body, encoding="utf-8")
    run_ranks(script, 1, timeout=100, launched=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path):
    assert not dead_links(page.read_text(encoding="utf-8"), page.parent)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```\nmake\n```", "a fence must be one of"),
        ("```console\nmake demo\n```", "at least one command"),
        ("```console\n$ rm -rf runs\n```", "nothing runs `rm -rf runs`"),
        ("```python\nprint(\n```", "never closed"),
        ("```mermaid\nflowchart LR\n```", "must begin with stateDiagram-v2"),
        ("```py\nf(ByEpoch({0: 1}), CommunicationShare(0.1))\n```", "CommunicationShare(0.1): too many positional"),
        ("```py\nTrainer(strategy=AsyncGradientStrategy(acumulate=2))\n```", "unexpected keyword argument 'acumulate'"),
    ],
)
def test_the_checks_can_fail(page: str, message: str):
    (fence,) = fences(page)
    assert message in "\n".join(problems(fence))


def test_an_open_fence_and_a_dead_link_are_found(tmp_path: Path):
    with pytest.raises(ValueError, match="page:1: this fence has no end"):
        fences("```python\n")
    (tmp_path / "there.md").touch()
    assert dead_links("[a](there.md#x) [b](https://example.org) [c](absent.md)", tmp_path) == ["absent.md"]


def test_every_row_of_the_failure_tables_names_tests_that_exist() -> None:
    tables = failures.read()
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert sum(map(len, tables.values())) > 150
    for row in itertools.chain(*tables.values()):
        assert row["tests"], f"no test holds: {row}"
        missing = [name for name in row["tests"] if f"def {name}(" not in sources]
        assert not missing, f"{missing} are no tests: {row}"


def test_the_page_on_failures_shows_every_table() -> None:
    page = (DOCS / "specification" / "failures.md").read_text(encoding="utf-8")
    assert sorted(failures.PLACE.findall(page)) == sorted(failures.read())
    shown = failures.fill(page)
    assert not failures.PLACE.search(shown)
    assert shown.count('<small class="tests">`test_') == sum(map(len, failures.read().values()))


def test_a_state_diagram_is_drawn_with_all_that_it_says() -> None:
    text = "stateDiagram-v2\n[*] --> A\nA --> B: x < 1\nB --> A: back\nA --> A: again\nB --> [*]: end\nB: the second"
    drawn = diagrams.svg(text)
    for words in ("x &lt; 1", "back", "again", "end", "the second"):
        assert f">{words}</text>" in drawn
    assert (drawn.count('class="arrow"'), drawn.count('class="state"'), drawn.count('class="dot"')) == (5, 2, 2)
    for wrong in ("flowchart LR", "stateDiagram-v2\nA -> B", ""):
        with pytest.raises(ValueError, match="a diagram"):
            diagrams.svg(wrong)


def test_the_reference_names_all_that_is_public() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: lightning_async\.(\w+)$", page, flags=re.MULTILINE))
    assert named == set(lightning_async.__all__)


def test_the_architecture_names_every_folder() -> None:
    text = (DOCS / "contributing" / "architecture.md").read_text(encoding="utf-8")
    law = text[text.index("## The law of imports") : text.index("## One round")]
    cells = re.findall(r"^\| (`.+?) \|", law, re.MULTILINE)
    assert {folder for cell in cells for folder in re.findall(r"`([\w/]+)`", cell)} == set(ALLOWED)


def test_the_page_on_the_architecture_shows_every_module() -> None:
    page = (DOCS / "contributing" / "architecture.md").read_text(encoding="utf-8")
    shown = modules.fill(page)
    assert modules.PLACE in page and modules.PLACE not in shown
    for path in (ROOT / "lightning_async").rglob("*.py"):
        assert path.name == "__init__.py" or f"| `{path.name}` | " in shown, path
