"""An extension of griffe that turns the docstrings' reStructuredText into Markdown: equations and doctests."""

from __future__ import annotations

import re
from typing import Any

import griffe

BLOCK = re.compile(r"^( *)\.\. math::(.*)\n((?:(?:\1 +\S.*| *)\n)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*\n)*", re.MULTILINE)


def markdown(text: str) -> str:
    """Return a docstring with its equations and doctests as fences."""

    def equation(match: re.Match[str]) -> str:
        indent, first, rest = match.groups()
        lines = [first.strip(), *(line.strip() for line in rest.splitlines())]
        body = "\n".join(indent + line for line in lines if line)
        return f"{indent}```math\n{body}\n{indent}```\n\n"

    def doctest(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}{match[1]}```\n"

    text = BLOCK.sub(equation, text + "\n")
    text = INLINE.sub(lambda match: "`#!math " + " ".join(match[1].split()) + "`", text)
    return DOCTEST.sub(doctest, text)


class Markdown(griffe.Extension):
    """The extension, as griffe finds it in this file."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a loaded object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
