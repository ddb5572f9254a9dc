"""cuda.cu without a GPU: as C++ under the emulator with the address sanitizer, and what nvcc makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SOURCES = ROOT / "cuda_ext" / "csrc"
GXX, NVCC = shutil.which("g++"), shutil.which("nvcc")

pytestmark = pytest.mark.timeout(300)  # compiling it takes a while on few cores


@pytest.mark.skipif(GXX is None, reason="no g++")
def test_every_kernel_is_the_cpu_library_under_the_address_sanitizer(tmp_path: Path):
    program = tmp_path / "emulated"
    command = [
        str(GXX), "-std=c++17", "-O0", "-g1", "-fsanitize=address", "-ffp-contract=off", "-fopenmp", "-DLA_EMULATOR",
        "-DLA_LEVEL=portable", "-Wno-psabi", f"-I{ROOT / 'cuda_ext' / 'emulator'}", f"-I{SOURCES}", "-w",
        "-x", "c++", str(ROOT / "cuda_ext" / "emulator" / "compare.cpp"), str(SOURCES / "cpu_kernels.cpp"),
        str(SOURCES / "cuda.cu"), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr[-5000:]
    assert re.search(r"^\d{3,} comparisons agree$", run.stdout, flags=re.MULTILINE), run.stdout
    broken = subprocess.run([str(program), "overrun"], capture_output=True, text=True, timeout=100)
    assert "heap-buffer-overflow" in broken.stderr  # the sanitizer sees what kernels do


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(sys.platform != "linux", reason="nvcc of Linux")
def test_nvcc_spills_no_registers_and_reads_16_bytes_at_a_time(tmp_path: Path):
    command = [
        str(NVCC), "-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v", "--keep", f"--keep-dir={tmp_path}", "-cubin",
        "-gencode=arch=compute_90,code=sm_90",
        str(SOURCES / "cuda.cu"), "-o", str(tmp_path / "cuda.cubin"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(spills) > 200
    assert set(spills) == {("0", "0")}
    assembly = next(tmp_path.glob("*.ptx")).read_text()
    kernels = re.split(r"^\.visible \.entry |^\.entry |^// \.globl", assembly, flags=re.MULTILINE)
    elementwise = [kernel for kernel in kernels if re.match(r"\s*_Z\S*(flat|list)_kernel", kernel)]
    assert len(elementwise) > 200
    narrow = [
        kernel[:120] for kernel in elementwise if not re.search(r"ld(\.global)?\.(v4\.[bfu]32|v2\.[bfu]64)", kernel)
    ]
    assert not narrow
    assert "atom." not in assembly and "fma.rn.f32" not in assembly
