"""The doctor says what runs and why, and fails where something must be repaired."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from lightning_async.cli import doctor
from lightning_async.ops import native


def test_it_says_what_runs_and_how_it_was_built(capsys: pytest.CaptureFixture[str]):
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said
    for kind in ("cpu", "cuda"):
        backend = native.backend(kind)
        assert f"ops on {kind:<8} {backend.name}" in said
        assert backend.reason in said
    for outcome in native.build_record().values():
        assert (outcome["compiler"] if outcome["built"] else outcome["error"]) in said


def test_without_a_library_it_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_loaded", native._Loaded())
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert "there is no liblightning_async_cpu.so" in native.backend("cpu").reason
    (tmp_path / "build.json").write_text('{"cpu": {"built": false, "error": "no compiler at all", "commands": []}}')
    monkeypatch.setattr(native, "_loaded", native._Loaded())
    assert native.backend("cpu").reason == "the cpu library was not built: no compiler at all"
    assert any("not built: no compiler at all" in line for line in doctor.report())


def test_it_fails_where_two_nccl_packages_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        folder = tmp_path / f"{name.replace('-', '_')}-2.28.9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.28.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert doctor.main([]) == 1
    assert "nvidia-nccl-cu12 and nvidia-nccl-cu13 are both installed" in capsys.readouterr().err
