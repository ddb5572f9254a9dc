"""cuda.cu without a GPU: as C++ under the emulator with the address sanitizer, and what nvcc makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.compiled import compiled

GXX, NVCC = shutil.which("g++"), shutil.which("nvcc")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]  # compiling it takes a while on few cores


@pytest.mark.skipif(GXX is None, reason="no g++")
def test_every_kernel_is_the_cpu_library_under_the_address_sanitizer():
    command = [
        str(GXX), "-std=c++17", "-O0", "-g1", "-fsanitize=address", "-ffp-contract=off", "-fopenmp", "-DLA_EMULATOR",
        "-DLA_LEVEL=portable", "-Wno-psabi", "-Iemulator", "-Icsrc", "-w",
        "-x", "c++", "emulator/compare.cpp", "csrc/cpu_kernels.cpp", "csrc/cuda.cu", "-o", "OUT/emulated",
    ]  # fmt: skip
    program = compiled("emulated", command) / "emulated"
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr[-5000:]
    assert re.search(r"^\d{3,} comparisons agree$", run.stdout, flags=re.MULTILINE), run.stdout
    broken = subprocess.run([str(program), "overrun"], capture_output=True, text=True, timeout=100)
    assert "heap-buffer-overflow" in broken.stderr  # the sanitizer sees what kernels do


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of Linux")
def test_nvcc_spills_no_registers_and_reads_16_bytes_at_a_time():
    command = [
        str(NVCC), "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "-cubin",
        "-gencode=arch=compute_90,code=sm_90", "--keep", "--keep-dir=OUT", "csrc/cuda.cu", "-o", "OUT/cuda.cubin",
    ]  # fmt: skip
    made = compiled("sm_90", command)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", (made / "log").read_text())
    assert len(spills) > 200
    assert set(spills) == {("0", "0")}
    assembly = next(made.glob("*.ptx")).read_text()
    kernels = re.split(r"^\.visible \.entry |^\.entry |^// \.globl", assembly, flags=re.MULTILINE)
    elementwise = [kernel for kernel in kernels if re.match(r"\s*_Z\S*(flat|list)_kernel", kernel)]
    assert len(elementwise) > 200
    narrow = [
        kernel[:120] for kernel in elementwise if not re.search(r"ld(\.global)?\.(v4\.[bfu]32|v2\.[bfu]64)", kernel)
    ]
    assert not narrow
    assert "atom." not in assembly and "fma.rn.f32" not in assembly


def test_what_is_compiled_is_kept_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In another clone, whose byte code is its own, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    count = "import pathlib, sys; open(sys.argv[1], 'a').write('x'); pathlib.Path(sys.argv[2], 'made').touch()"
    command = [sys.executable, "-c", count, str(tmp_path / "times"), "OUT"]
    places = []
    for number, text in enumerate(("source", "source", "other")):
        clone = tmp_path / str(number)
        (clone / "__pycache__").mkdir(parents=True)
        (clone / "__pycache__" / "build.pyc").write_text(str(number))
        (clone / "kernels.cu").write_text(text)
        places.append(compiled("it", command, clone))
    assert places[0] == places[1] != places[2]
    assert (tmp_path / "times").read_text() == "xx"
    assert (places[2] / "made").exists() and not places[0].exists()
