"""The layer contract (docs/architecture.md), held by reading the source of every module.

Each rule is a function from a module's place and syntax tree to the lines that break it, or from all trees to what
breaks it, and each is shown to fail.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = "lightning_async"
MAX_LINES = 800

GROUND = {"errors", "flat", "arguments", "events", "bare"}
HALL = {"engine", "comm", "ops", *GROUND}
ALLOWED = {
    "errors": set(),
    "flat": {"errors"},
    "arguments": set(),
    "bare": set(),
    "events": set(),
    "ops": {"flat", "errors"},
    "rules": {"ops", *GROUND},
    "comm": {*GROUND},
    "engine": {"comm", "ops", *GROUND},  # the hall: no rules, no wing
    "engine/averaging": {*HALL, "rules"},
    "engine/gradients": {*HALL, "rules"},
    "engine/checkpoint": {*HALL, "rules"},
    "engine/server": {*HALL, "rules"},
    "monitor": {"engine", "comm"},
    "data": set(GROUND),
    "trainer": {"data", "engine/checkpoint", "engine", "comm", "rules", *GROUND},
    "transports": {"trainer", "engine", "comm", *GROUND},
    "callbacks": {"trainer", "monitor", "engine/checkpoint", "rules", *HALL},
    "strategies": {
        "transports",
        "trainer",
        "callbacks",
        "engine/averaging",
        "engine/gradients",
        "engine/server",
        "rules",
        *HALL,
    },
    "launch": {"comm", *GROUND},
    "commands": {"trainer", "monitor", "engine/checkpoint", "engine/server", "launch", "rules", *HALL},
}
"""Which rooms a room may import from, besides itself. A wing, `engine/<wing>`, is a stranger to the other wings.
`lightning_async/__init__.py` may import them all."""

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


def room_of(place: tuple[str, ...]) -> str | None:
    """The innermost room that a module is in."""
    around = [room for room in ALLOWED if tuple(room.split("/")) == place[: room.count("/") + 1]]
    return max(around, key=len, default=None)


def imports_go_down(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    here = room_of(place)
    if place == ("__init__",):
        return
    for line, name, _ in imports(place, tree):
        top, *rest = name.split(".")
        if top == PACKAGE:
            room = room_of(tuple(rest))
            if room is None:
                yield line, f"{here} imports `{name}`: import the module that defines it, not the package"
            elif room != here and room not in ALLOWED.get(here or "", set()):
                yield line, f"{here} imports {room}"


def lightning_stays_on_top(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    if place[0] not in ("strategies", "callbacks", "trainer", "transports"):
        for line, name, _ in imports(place, tree):
            if name.partition(".")[0] in LIGHTNING:
                yield line, f"{place[0]} imports {name}"


def collectives_stay_in_comm(place: tuple[str, ...], tree: ast.Module) -> Iterator[Breach]:
    if place[0] == "comm":
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
    if place[0] in ("rules", "ops"):
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


WHOLE = {
    "AveragingRule": "the interface: a rule of the user's need not inherit `RuleBase`",
    **dict.fromkeys(
        ("GradientCorrection", "Prediction"),
        "an interface that a correction of the user's has, too; one that inherits it has a short name on command lines",
    ),
    "Topology": "one subclass per choice of weights; the engine serves one so far",
}
"""Classes with one heir in their room that are not one class cut in two, and why."""


def circles(trees: Mapping[str, ast.Module]) -> list[str]:
    """Modules that import each other at run time, directly or by others; imports for type checking do not count."""
    below = {name: run_time_imports(name, trees) for name in trees}
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


def cut_in_two(trees: Mapping[str, ast.Module]) -> list[str]:
    """Classes that nobody makes, and that one class of their own room extends: the two are one.

    An interface that asks for more than another one is no such class: it says what its user needs.
    """
    rooms, heirs, made = {}, defaultdict(list), set()
    for name, tree in trees.items():
        room = room_of(place_of(name))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                rooms[node.name] = room
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                names = [ast.unparse(base).rpartition(".")[2] for base in bases]
                for base in names if "Protocol" not in names else ():
                    heirs[base].append((node.name, room))
            elif isinstance(node, ast.Call):
                made.add(ast.unparse(node.func).rpartition(".")[2])
    return [
        f"`{name}` has one heir, `{heir}`, in {room}: make them one class, or compose them"
        for name, room in rooms.items()
        if name not in made and len(heirs[name]) == 1
        for heir, where in heirs[name]
        if where == room and heir != name and name not in WHOLE
    ]


def modules() -> dict[str, Path]:
    folder = ROOT / PACKAGE
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.py"))}


def place_of(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".py").split("/"))


@pytest.mark.parametrize("name", modules())
def test_module_keeps_the_contract(name: str):
    path, place = modules()[name], place_of(name)
    assert room_of(place) or place == ("__init__",), f"{name} is in no room: give it one in ALLOWED"
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    breaches = [f"{path}:{line}: {what}" for check in CHECKS for line, what in check(place, tree)]
    assert not breaches, "\n".join(breaches)
    lines = len(source.splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines; at most {MAX_LINES}: split it"


def test_the_layers_have_no_cycle_and_rules_and_comm_are_strangers():
    done: set[str] = set()
    waiting = dict(ALLOWED)
    while waiting:
        ready = [part for part, below in waiting.items() if below <= done]
        assert ready, f"a cycle among {sorted(waiting)}"
        for part in ready:
            done.add(part)
            del waiting[part]
    assert "comm" not in ALLOWED["rules"]
    assert "rules" not in ALLOWED["comm"]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}


def test_no_modules_import_each_other(trees: dict[str, ast.Module]):
    assert not circles(trees)


def test_no_class_is_cut_in_two_by_inheritance(trees: dict[str, ast.Module]):
    assert not cut_in_two(trees)
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert set(WHOLE) <= classes, "a class that is excused is gone"


def test_circles_and_classes_cut_in_two_are_found():
    names = ("rules/__init__.py", "rules/a.py", "rules/b.py", "rules/c.py", "comm/a.py")

    def trees(*sources: str) -> dict[str, ast.Module]:
        return {name: ast.parse(source) for name, source in zip(names, sources, strict=False)}

    up = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_async.algorithms.b import B"
    assert not circles(
        trees("from lightning_async.algorithms.a import A", up, "from lightning_async.algorithms.a import A")
    )
    late = "def f():\n    from . import b"
    found = circles(
        trees("", late, "from lightning_async.algorithms.c import C", "import lightning_async.algorithms.a")
    )
    assert found == ["rules/a.py", "rules/b.py", "rules/c.py"]
    assert circles(trees("from .a import A", "from lightning_async.algorithms import B")) == [
        "rules/__init__.py",
        "rules/a.py",
    ]

    base, one, other = "class Base: ...", "class One(a.Base): ...", "class Other(Base[int]): ..."
    (found,) = cut_in_two(trees("", base, one))
    assert "`Base` has one heir, `One`, in rules" in found
    assert not cut_in_two(trees("", base, one, other))
    assert not cut_in_two(trees("", base, f"{one}\nx = Base()"))
    assert not cut_in_two(trees("", base, "", "", one))
    assert not cut_in_two(trees("", base, "class More(Base, Protocol): ..."))


BAD = [
    (imports_go_down, "rules/a.py", "from lightning_async.comm import protocols"),
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
    (algorithms_have_no_clock_or_thread, "rules/a.py", "import time"),
    (algorithms_have_no_clock_or_thread, "rules/a.py", "from threading import Lock"),
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
    ("comm/torch/collectives.py", "import torch.distributed as dist\ndist.all_reduce(x)\nimport time, threading, os"),
    ("strategies/a.py", "import lightning.pytorch\nimport torch.distributed as dist\ndist.is_initialized()"),
    ("rules/a.py", "from datetime import timedelta"),
    ("ops/a.py", "p.detach().copy_(x)\ny = p.data_ptr()\nz = p.data.norm()"),
    ("__init__.py", "from lightning_async.strategies.averaging import AsyncAveragingStrategy"),
]


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_no_check_fails_without_reason(name: str, source: str):
    place, tree = place_of(name), ast.parse(source)
    assert [what for check in CHECKS for _, what in check(place, tree)] == []
