"""The CUDA kernels as nvcc compiles them: no register is spilled, moves use 128-bit accesses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc")

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not found")


def compile_kernels(tmp_path: Path, architecture: int, *options: str) -> str:
    """Compiles for one architecture. Returns the output of the compiler."""
    source = str(ROOT / "csrc/kernels/kernels_cuda.cu")
    command = [str(NVCC), "-std=c++17", "-O2", f"-arch=sm_{architecture}", f"-I{ROOT / 'csrc'}"]
    command += [*options, "--Werror", "all-warnings", source, "-o", str(tmp_path / "kernels")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_kernels_spill_no_registers(tmp_path: Path, architecture: int) -> None:
    output = compile_kernels(tmp_path, architecture, "-Xptxas", "-v", "-cubin")
    release = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True).stdout
    count = 3 if "release 12." in release else 5  # CUDA 13 has two kernels with large arguments
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert spills == [("0", "0")] * count
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", output)]
    assert len(registers) == count
    assert max(registers) <= 64


def test_kernels_load_and_store_128_bits(tmp_path: Path) -> None:
    compile_kernels(tmp_path, 90, "-ptx")
    code = (tmp_path / "kernels").read_text()
    for operation in ("ld", "st"):
        for vector in ("v4.u32", "v4.f32"):
            assert f"{operation}.global.{vector}" in code, (operation, vector)
