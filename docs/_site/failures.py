"""The tables of docs/specification/failures.yaml as Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict

import yaml

DATA = Path(__file__).parent.parent / "specification" / "failures.yaml"
PLACE = re.compile(r"<!-- failures: ([\w-]+) -->")


class Row(TypedDict):
    """What happens, what follows, and the names of the tests that hold it."""

    what: str
    follows: str
    tests: list[str]


def read() -> dict[str, list[Row]]:
    """Return the rows of each table, by the table's name."""
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))


def table(rows: list[Row]) -> str:
    """Return rows as a table; the tests of each stand below what follows."""
    lines = ["| what happens | what follows |", "| --- | --- |"]
    for row in rows:
        tests = " ".join(f"`{name}`" for name in row["tests"])
        lines.append(f'| {row["what"]} | {row["follows"]}<br><small class="tests">{tests}</small> |')
    return "\n".join(lines)


def fill(page: str) -> str:
    """Return a page with each place ``<!-- failures: NAME -->`` filled by the table of that name."""
    tables = read()
    return PLACE.sub(lambda match: table(tables[match[1]]), page)
