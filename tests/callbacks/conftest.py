"""Scenarios of two processes, as strategies have them."""

from __future__ import annotations

from tests.strategies.conftest import ranks

__all__ = ["ranks"]
