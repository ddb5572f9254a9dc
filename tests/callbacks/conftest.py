"""Scenarios of two processes, as strategies have them."""

from __future__ import annotations

from tests.strategies.conftest import alone, ranks

__all__ = ["alone", "ranks"]
