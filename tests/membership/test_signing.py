"""Signatures of the values in the store."""

from __future__ import annotations

import os

import pytest

from lightning_async.membership.signing import SECRET, Seal


def test_a_secret_of_bytes_that_are_no_text_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, os.fsdecode(b"\xff\xfe key"))
    signed = Seal.of_job().sign("a", b"value")
    assert Seal.of_job().open("a", signed) == b"value"
    monkeypatch.setenv(SECRET, os.fsdecode(b"\xff\xfd key"))
    assert Seal.of_job().open("a", signed) is None
