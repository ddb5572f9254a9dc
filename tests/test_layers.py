"""The layer contract (docs/contributing/architecture.md), held by reading the source of every module.

Each rule is a function from a module's place and syntax tree to the lines that break it, or from all trees to what
breaks it, and each is shown to fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = "lightning_async"
MAX_LINES = 800

GROUND = {"errors", "events", "flat", "_checks", "_sockets", "_subprocess"}
BYTES = {"membership", "comm", *GROUND}
ENGINE = {"engine", "ops", *BYTES}
TRAINER = {
    "trainer", "trainer/checkpoint", "trainer/data", "trainer/environment", "trainer/loops",
    "algorithms", "checkpoint", "data", *ENGINE,
}  # fmt: skip
TRANSPORTS = {"transports", *TRAINER}
STRATEGIES = {
    "strategies", "callbacks", "monitor", "engine/averaging", "engine/gradients", "parameter_server", *TRANSPORTS,
}  # fmt: skip
ALLOWED = {
    "errors": set(),
    "events": set(),
    "flat": {"errors"},
    "_checks": set(),
    "_sockets": {"errors"},
    "_subprocess": {"_sockets"},
    "ops": set(GROUND),
    "algorithms": {"ops", *GROUND},
    "membership": set(GROUND),
    "comm": {"membership", *GROUND},
    "data": set(GROUND),
    "engine": {"ops", *BYTES},
    "engine/averaging": {"algorithms", *ENGINE},
    "engine/gradients": {"algorithms", *ENGINE},
    "checkpoint": {"algorithms", *ENGINE},
    "parameter_server": {"algorithms", "checkpoint", *ENGINE},
    "monitor": set(BYTES),
    "launch": set(BYTES),
    "trainer": TRAINER,
    "trainer/environment": {"trainer", *ENGINE},
    "trainer/loops": {"trainer", "trainer/environment", "algorithms", "data", *ENGINE},
    "trainer/data": TRAINER - {"trainer/checkpoint"},
    "trainer/checkpoint": TRAINER,
    "transports": TRAINER,
    "callbacks": {"monitor", *TRANSPORTS},
    "strategies": STRATEGIES - {"monitor"},
    "horovod": STRATEGIES,
    "cli": {"launch", "monitor", "parameter_server", *TRAINER},
}
"""The folders that each one may import, besides itself. `engine/averaging` and `engine/gradients` are strangers.
`trainer` names the modules in that folder itself, which may import its folders."""

START_FAST = (
    "checkpoint.writer_process",
    "cli.first_process",
    "cli.launch",
    "cli.main",
    "launch.store_main",
    "launch.supervisor",
    "membership.store_process",
    "parameter_server.supervisor",
)
"""Modules of processes that start in a tenth of a second: they import neither torch nor the package's `__init__`."""

NOT_IN_NAMES = {
    "attend", "ballot", "becoming", "behind", "bury", "census", "convening", "courier", "course", "dealing", "drifting",
    "foresee", "gathered", "guest", "hall", "heart", "host", "inheritance", "latecomer", "lateness", "mailbox",
    "muster", "newcomer", "newcomers", "owe", "owed", "parcels", "reception", "roster", "standing", "succession",
    "survivor", "survivors", "terms", "verdict", "whereabouts", "wing", "wings",
}  # fmt: skip
"""Words that no module and no class is called by: docs/contributing/architecture.md has the field's word for each."""

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "P2POp",
}  # fmt: skip
IMPURE = {"threading", "time", "os"}

Breach = tuple[int, str]
Check = Callable[[tuple[str, ...], ast.Module], Iterator[Breach]]


def imports(place: tuple[str, ...], tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, full dotted name and local name of everything that a module imports, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            # place[:-1] is the package of a module and of an `__init__` alike
            above = [PACKAGE, *place[:-1]][: len(place) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", alias.asname or alias.name


def folder_of(place: tuple[str, ...]) -> str | None:
    """The innermost folder that a module is in."""
    around = [folder for folder in ALLOWED if tuple(folder.split("/")) == place[: folder.count("/") + 1]]
    return max(around, key=len, default=None)


def imports_go_down(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    here = folder_of(place)
    if place == ("__init__",):
        return
    for line, name, _ in imports(place, tree):
        top, *rest = name.split(".")
        if top == PACKAGE:
            folder = folder_of(tuple(rest))
            if folder is None:
                yield line, f"{here} imports `{name}`: import the module that defines it, not the package"
            elif folder != here and folder not in ALLOWED.get(here or "", set()):
                yield line, f"{here} imports {folder}"


def lightning_stays_on_top(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    if place[0] not in ("strategies", "callbacks", "trainer", "transports", "horovod"):
        for line, name, _ in imports(place, tree):
            if name.partition(".")[0] in LIGHTNING:
                yield line, f"{place[0]} imports {name}"


def collectives_stay_in_comm(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    if place[0] in ("comm", "horovod"):
        return
    meaning = {}
    for line, name, local in imports(place, tree):
        meaning[local] = name if not name.startswith(f"{local}.") else local
        parts = name.split(".")
        if parts[0] == "horovod":
            yield line, f"{place[0]} imports {name}"
        if parts[:2] == ["torch", "distributed"] and parts[-1] in {*COLLECTIVES, "*"}:
            yield line, f"{place[0]} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            base = ast.unparse(node.value)
            head, _, rest = base.partition(".")
            full = ".".join(filter(None, [meaning.get(head, head), rest]))
            if full.startswith("torch.distributed"):
                yield node.lineno, f"{place[0]} uses {full}.{node.attr}"


def algorithms_have_no_clock_or_thread(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    if place[0] in ("algorithms", "ops"):
        for line, name, _ in imports(place, tree):
            if name.partition(".")[0] in IMPURE:
                yield line, f"{place[0]} imports {name}"


def nothing_writes_through_data(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    """A write through ``.data`` is hidden from autograd: gradients turn out wrong without an error."""
    for target in written(tree):
        if any(isinstance(part, ast.Attribute) and part.attr == "data" for part in ast.walk(target)):
            yield target.lineno, f"writes through `{ast.unparse(target)}`"


def written(tree: ast.Module) -> Iterator[ast.expr]:
    """What a module assigns to, and what its in-place calls work on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target
        elif isinstance(node, ast.Call):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "out")
            method = node.func
            if isinstance(method, ast.Attribute) and method.attr.endswith("_") and not method.attr.endswith("__"):
                yield method.value
                if method.attr.startswith("_foreach_"):
                    yield from node.args[:1]


CHECKS: tuple[Check, ...] = (
    imports_go_down,
    lightning_stays_on_top,
    collectives_stay_in_comm,
    algorithms_have_no_clock_or_thread,
    nothing_writes_through_data,
)


def circles(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules that import each other at run time, directly or by others; imports for type checking do not count."""
    return in_circles({name: run_time_imports(name, trees) for name in trees})


def in_circles(below: dict[str, set[str]]) -> list[str]:
    """Return the names of a graph that are on a circle, or between two."""
    while apart := [
        name
        for name, names in below.items()
        if not names & below.keys() or not any(name in others for others in below.values())
    ]:
        for name in apart:
            del below[name]
    return sorted(below)


def run_time_imports(name: str, trees: Mapping[str, ast.Module]) -> set[str]:
    tree = ast.Module([node for node in trees[name].body if not _is_type_checking(node)], [])
    found = set()
    for _, full, _ in imports(place_of(name), tree):
        path = full.split(".")[1:] if full.startswith(f"{PACKAGE}.") else []
        # What is named is a module or a package, or something in one of the two.
        stems = ["/".join(path), "/".join(path[:-1])]
        files = [file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py") if file in trees]
        found |= set(files[:1])
    return found - {name}


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def folder_cycles(trees: Mapping[str, ast.Module]) -> list[str]:
    """Folders that import each other, directly or by others, wherever in their modules; parents are no others."""
    below = defaultdict(set)
    for name, tree in trees.items():
        folder = Path(name).parent
        for _, full, _ in imports(place_of(name), tree):
            path = Path(*full.split(".")[1:-1]) if full.startswith(f"{PACKAGE}.") else Path()
            other = path.parent if f"{path}.py" in trees else path
            apart = other not in (folder, *folder.parents) and folder not in other.parents
            if apart and folder != Path():
                below[str(folder)].add(str(other))
    return in_circles(below)


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*", name)}


def classes(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node.name


def modules() -> dict[str, Path]:
    folder = ROOT / PACKAGE
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}


def place_of(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".py").split("/"))


@pytest.mark.parametrize("name", modules())
def test_module_keeps_the_contract(name: str):
    path, place = modules()[name], place_of(name)
    assert folder_of(place) or place == ("__init__",), f"{name} is in no folder: give it one in ALLOWED"
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    breaches = [f"{path}:{line}: {what}" for check in CHECKS for line, what in check(place, tree)]
    assert not breaches, "\n".join(breaches)
    lines = len(source.splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines; at most {MAX_LINES}: split it"


def test_the_layers_have_no_cycle():
    """Modules of `trainer` itself may import its folders, and these them; `folder_cycles` looks at the rest."""
    waiting = {part: {*below} for part, below in ALLOWED.items() if not part.startswith("trainer/")}
    done = {part for part in ALLOWED if part.startswith("trainer")}
    assert not (done - {"trainer"}) & waiting.keys()
    waiting["trainer"] -= done
    done = done - {"trainer"}
    while waiting:
        ready = [part for part, below in waiting.items() if below <= {*done, part}]
        assert ready, f"a cycle among {sorted(waiting)}"
        for part in ready:
            done.add(part)
            del waiting[part]
    assert "comm" not in ALLOWED["algorithms"]
    assert "algorithms" not in ALLOWED["comm"]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}


def test_no_modules_import_each_other(trees: dict[str, ast.Module]):
    assert not circles(trees)


def test_no_folders_import_each_other(trees: dict[str, ast.Module]):
    assert not folder_cycles(trees)


def test_names_are_the_fields_words(trees: dict[str, ast.Module]):
    files = {f"{name}": words_of(name.removesuffix(".py").replace("/", "_")) for name in trees}
    named = {f"{file}: {name}": words_of(name) for file, name in classes(trees)}
    assert not {name: words & NOT_IN_NAMES for name, words in (files | named).items() if words & NOT_IN_NAMES}


def test_a_class_name_is_used_once(trees: dict[str, ast.Module]):
    files = defaultdict(list)
    for file, name in classes(trees):
        if not name.startswith("_"):
            files[name].append(file)
    assert not {name: where for name, where in files.items() if len(where) > 1}


@pytest.mark.processes
@pytest.mark.parametrize("name", START_FAST)
def test_processes_that_start_fast_import_no_torch(name: str):
    program = (
        "import importlib, importlib.util, sys\n"
        f"spec = importlib.util.find_spec({PACKAGE!r})\n"
        f"sys.modules[{PACKAGE!r}] = importlib.util.module_from_spec(spec)\n"
        f"importlib.import_module({PACKAGE + '.' + name!r})\n"
        "assert not {'torch', 'lightning', 'pytorch_lightning'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_cycles_are_found():
    names = ("algorithms/__init__.py", "algorithms/a.py", "algorithms/b.py", "algorithms/c.py", "comm/a.py")

    def trees(*sources: str) -> dict[str, ast.Module]:
        return {name: ast.parse(source) for name, source in zip(names, sources, strict=False)}

    a = "from lightning_async.algorithms.a import A"
    up = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_async.algorithms.b import B"
    assert not circles(trees(a, up, a))
    late = "def f():\n    from . import b"
    found = circles(
        trees("", late, "from lightning_async.algorithms.c import C", "import lightning_async.algorithms.a")
    )
    assert found == ["algorithms/a.py", "algorithms/b.py", "algorithms/c.py"]
    assert circles(trees("from .a import A", "from lightning_async.algorithms import B")) == [
        "algorithms/__init__.py",
        "algorithms/a.py",
    ]
    comm = "from lightning_async.comm.a import A"
    assert not folder_cycles(trees("", comm, "", "", ""))
    assert folder_cycles(trees("", comm, "", "", f"def f():\n    {a}")) == ["algorithms", "comm"]


def test_words_of_names():
    assert words_of("NCCLOptions_of_aGuest") == {"nccl", "options", "of", "a", "guest"}


BAD = [
    (imports_go_down, "algorithms/a.py", "from lightning_async.comm import protocols"),
    (imports_go_down, "comm/a.py", "import lightning_async.algorithms.averaging"),
    (imports_go_down, "ops/a.py", "def f():\n    from ..engine import round"),
    (imports_go_down, "engine/averaging/a.py", "from ...strategies.averaging import AsyncAveragingStrategy"),
    (imports_go_down, "engine/a.py", "from lightning_async.algorithms import Mean"),
    (imports_go_down, "engine/a.py", "from lightning_async.engine.averaging import mailbox"),
    (imports_go_down, "engine/averaging/a.py", "from lightning_async.engine.gradients import reducer"),
    (imports_go_down, "engine/gradients/a.py", "from ..averaging.mailbox import Mailbox"),
    (imports_go_down, "trainer/a.py", "from lightning_async.engine.averaging.mailbox import Mailbox"),
    (imports_go_down, "engine/__init__.py", "from ..strategies import averaging"),
    (imports_go_down, "flat.py", "from .ops import fused"),
    (imports_go_down, "callbacks/a.py", "from lightning_async.strategies import averaging"),
    (imports_go_down, "engine/a.py", "from lightning_async import Mean"),
    (lightning_stays_on_top, "engine/a.py", "import lightning.pytorch as pl"),
    (lightning_stays_on_top, "comm/a.py", "from pytorch_lightning import Trainer"),
    (collectives_stay_in_comm, "engine/a.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (collectives_stay_in_comm, "strategies/a.py", "import torch\ntorch.distributed.barrier()"),
    (collectives_stay_in_comm, "strategies/a.py", "import torch.distributed\ntorch.distributed.barrier()"),
    (collectives_stay_in_comm, "engine/a.py", "from torch.distributed import broadcast"),
    (collectives_stay_in_comm, "engine/a.py", "from torch import distributed as d\nd.broadcast(x, 0)"),
    (collectives_stay_in_comm, "strategies/a.py", "def f():\n    import horovod.torch as hvd"),
    (algorithms_have_no_clock_or_thread, "algorithms/a.py", "import time"),
    (algorithms_have_no_clock_or_thread, "algorithms/a.py", "from threading import Lock"),
    (algorithms_have_no_clock_or_thread, "ops/a.py", "import os.path"),
    (nothing_writes_through_data, "ops/a.py", "p.data = x"),
    (nothing_writes_through_data, "ops/a.py", "p.data += x"),
    (nothing_writes_through_data, "ops/a.py", "p.data[0] = x"),
    (nothing_writes_through_data, "engine/a.py", "p.data.copy_(x)"),
    (nothing_writes_through_data, "engine/a.py", "p.data.view(-1).add_(x)"),
    (nothing_writes_through_data, "engine/a.py", "torch.add(a, b, out=p.data)"),
    (nothing_writes_through_data, "engine/a.py", "torch._foreach_add_([p.data for p in params], xs)"),
]


@pytest.mark.parametrize(("check", "name", "source"), BAD)
def test_every_check_can_fail(check: Check, name: str, source: str):
    assert list(check(place_of(name), ast.parse(source)))


GOOD = [
    (
        "engine/averaging/a.py",
        "from lightning_async.algorithms.averaging import Round\nfrom . import gate\nfrom ...comm import protocols",
    ),
    ("engine/averaging/a.py", "from lightning_async.engine.replica import Replica\nfrom .. import streams"),
    ("engine/a.py", "import torch.distributed.checkpoint as dcp\ndcp.save(x)"),
    ("engine/a.py", "self.world.all_reduce(x)\nself.world.broadcast(x)"),
    ("comm/torch_collectives.py", "import torch.distributed as dist\ndist.all_reduce(x)\nimport time, threading, os"),
    ("strategies/a.py", "import lightning.pytorch\nimport torch.distributed as dist\ndist.is_initialized()"),
    ("algorithms/a.py", "from datetime import timedelta"),
    ("ops/a.py", "p.detach().copy_(x)\ny = p.data_ptr()\nz = p.data.norm()"),
    ("__init__.py", "from lightning_async.strategies.averaging import AsyncAveragingStrategy"),
]


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_no_check_fails_without_reason(name: str, source: str):
    place, tree = place_of(name), ast.parse(source)
    assert [what for check in CHECKS for _, what in check(place, tree)] == []


COUNTERS = {
    "trainer/namespace.py": 1,  # at import
    "trainer/checkpoint/save_timing.py": 1,  # itertools.count
    "horovod/elastic.py": 1,  # itertools.count
    "comm/default_group.py": 1,  # itertools.count
    "strategies/window_steps.py": 1,  # itertools.count
    "horovod/build.py": 1,  # outside of training
    "data/iterators.py": 1,  # itertools.cycle of Lightning's loader
    "data/stateful_loader.py": 1,  # the user's loader has ended, as the loop must see
    "engine/decision.py": 1,  # in a generator, where it becomes a RuntimeError
    "parameter_server/store.py": 1,  # always finds one
    "checkpoint/store.py": 1,  # always finds one
    "ops/flat_ops.py": 2,  # of a dict that has elements
    "callbacks/accumulation_steps.py": 1,  # of a dict that has elements
}
"""Calls of `next` with one argument, by module. A StopIteration would end Lightning's loops as if data had run out."""


def test_no_call_of_next_can_end_an_epoch_of_lightning() -> None:
    found: dict[str, int] = {}
    for name, path in modules().items():
        if name.startswith(("monitor/", "launch/", "cli/", "comm/serialization")):
            continue  # they run in processes or on threads of their own
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next"
        ]
        if number := sum(len(call.args) == 1 for call in calls):
            found[name] = number
    assert found == COUNTERS
