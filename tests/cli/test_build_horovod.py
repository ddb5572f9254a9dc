"""What the build of Horovod installs is what it says: pinned, and compared with its checksum."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_async.horovod import build as build_horovod
from lightning_async.horovod.build import Build, BuildError, build, keep, kept

NAME = "horovod-0.28.1+torch2.13.0.cpu.gloo.p1-cp311-cp311-linux_x86_64.whl"
PATTERN = "horovod-*.whl"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder that holds a wheel."""
    wheel = tmp_path / NAME
    wheel.write_bytes(b"a wheel")
    keep(tmp_path / "cache", wheel)
    return tmp_path / "cache"


def test_a_kept_wheel_is_found(cache: Path) -> None:
    found = kept(cache, PATTERN)
    assert found is not None and found.read_bytes() == b"a wheel"
    assert kept(cache, "horovod-0.27*.whl") is None
    assert kept(cache / "nowhere", PATTERN) is None


def test_a_wheel_that_is_not_what_was_kept_is_not_installed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / NAME).write_bytes(b"another wheel")
    assert kept(cache, PATTERN) is None
    assert "is not what was kept there" in capsys.readouterr().out


def test_a_wheel_without_a_checksum_is_not_installed(cache: Path) -> None:
    (cache / f"{NAME}.sha256").unlink()
    assert kept(cache, PATTERN) is None


def test_a_folder_that_others_may_write_into_is_refused(cache: Path) -> None:
    assert cache.stat().st_mode & 0o077 == 0  # as it was made
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="other users may write into"):
        build(Build(torch="2.13.0", cxx=17), cache, jobs=1)


def test_what_builds_it_is_pinned() -> None:
    for tool in (*build_horovod.TOOLS, build_horovod.CMAKE):
        assert re.fullmatch(r"[a-z]+==[\d.]+", tool), tool
    assert re.fullmatch(r"[0-9a-f]{64}", build_horovod.SHA256)
