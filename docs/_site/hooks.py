"""Hooks of mkdocs: failure tables come from their data file, module tables from docstrings; equations become MathML,
state diagrams SVG.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import diagrams
import failures
import modules


def equation(source: str, *_: Any, **__: Any) -> str:
    """Return an equation of several lines or columns, or of one, as a block."""
    aligned = source.replace("\n", " ").strip()
    if "&" in aligned or r"\\" in aligned:
        aligned = rf"\begin{{align*}} {aligned} \end{{align*}}"
    return f'<div class="equation">{convert(aligned, display="block")}</div>'


def inline(source: str, *_: Any, **__: Any) -> str:
    """Return an equation within a line."""
    return convert(source)


def diagram(source: str, *_: Any, **__: Any) -> str:
    """Return a state diagram; its source is what a screen reader reads."""
    return f'<div class="diagram" aria-label="{escape(source, quote=True)}">{diagrams.svg(source)}</div>'


def on_config(config: Any) -> Any:
    """Give the fences ``math`` and ``mermaid`` to the Markdown extensions, and the package's version to the footer."""
    package = Path(__file__).parents[2] / "lightning_async" / "__init__.py"
    (version,) = re.findall(r'^__version__ = "(.+)"$', package.read_text(encoding="utf-8"), flags=re.MULTILINE)
    config.copyright = f"lightning_async {version}"
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [
            {"name": "math", "class": "math", "format": equation},
            {"name": "mermaid", "class": "mermaid", "format": diagram},
        ]
    }
    config.mdx_configs["pymdownx.inlinehilite"] = {
        "custom_inline": [{"name": "math", "class": "math", "format": inline}]
    }
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables of failures and modules, and mark the equations of a page, which LaTeX puts in brackets."""
    # The site has what a page says to be missing on a code host.
    markdown = re.sub(r"^(On a code host|The tables below are empty) .*\n\n", "", markdown, flags=re.MULTILINE)
    parts = re.split(r"(^```.*?^```$)", modules.fill(failures.fill(markdown)), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else marked(part) for part in parts)


def marked(text: str) -> str:
    """Return text without fences with its equations as fences and as code of the kind ``math``."""
    text = re.sub(r"\\\[(.+?)\\\]", r"\n```math\n\1\n```\n", text, flags=re.DOTALL)
    return re.sub(r"\\\((.+?)\\\)", r"`#!math \1`", text)
