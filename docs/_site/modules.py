"""A table for each folder of the package: what each module holds, by the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = "<!-- modules -->"


def tables() -> str:
    """Return the tables as Markdown, without modules that have no docstring."""
    found = []
    for folder in sorted({path.parent for path in (ROOT / "lightning_async").rglob("*.py")}):
        rows = []
        for path in sorted(folder.glob("*.py")):
            words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if words and path.name != "__init__.py":
                first = re.split(r"(?<=[.]) |\n\n", " ".join(words.split("\n\n")[0].split()))[0]
                rows.append(f"| `{path.name}` | {first.rstrip('.')} |")
        if rows:
            name = folder.relative_to(ROOT).as_posix()
            found.append("\n".join([f"| in `{name}/` | what it holds |", "| --- | --- |", *rows]))
    return "\n\n".join(found)


def fill(page: str) -> str:
    """Return a page with ``<!-- modules -->`` filled by the tables."""
    return page.replace(PLACE, tables()) if PLACE in page else page
