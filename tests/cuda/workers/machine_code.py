"""Counts the 128-bit accesses in the kernels that NVRTC and nvcc compile.

``python machine_code.py`` prints a JSON object: for each compiler, architecture and kernel the
number of 128-bit loads and stores of global memory, or the reason why no code can be read.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURES = (80, 90, 100)


def find_disassembler() -> str | None:
    """Returns the path of nvdisasm: of the package nvidia-cuda-nvdisasm, or on the PATH."""
    packages = (Path(folder) for folder in sys.path if folder.endswith("-packages"))
    found = [path for folder in packages for path in folder.glob("nvidia/*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def find_compilers() -> dict[str, Callable[[int], bytes]]:
    """Returns the compilers by name. Each takes an architecture and returns a cubin."""
    from fsdp_c._runtime.nvrtc import Nvrtc, find_libraries

    result: dict[str, Callable[[int], bytes]] = {}
    if libraries := find_libraries():
        result["NVRTC"] = Nvrtc(libraries[0]).compile
    if nvcc := shutil.which("nvcc"):
        result["nvcc"] = lambda architecture: compile_with_nvcc(nvcc, architecture)
    return result


def compile_with_nvcc(nvcc: str, architecture: int) -> bytes:
    source = str(ROOT / "csrc/kernels/kernels_cuda.cu")
    options = ["-std=c++17", "-O2", f"-arch=sm_{architecture}", f"-I{ROOT / 'csrc'}", "-cubin"]
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([nvcc, *options, source, "-o", file.name], check=True)
        return Path(file.name).read_bytes()


def count_accesses(disassembler: str, cubin: bytes) -> dict[str, dict[str, int]]:
    """Returns by kernel the number of 128-bit loads ("LDG") and stores ("STG")."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler, "-c", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    counts: dict[str, dict[str, int]] = {}
    for part in re.split(r"^\.text\.(?=\w+:)", text, flags=re.MULTILINE)[1:]:
        accesses = re.findall(r"\b(LDG|STG)\.E\.(?:\w+\.)*128\b", part)
        counts[part.partition(":")[0]] = dict(collections.Counter(accesses))
    return counts


def main() -> dict[str, Any]:
    disassembler = find_disassembler()
    if disassembler is None:
        return {"skipped": "nvdisasm is missing: install nvidia-cuda-nvdisasm"}
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        cubins = {
            name: [executor.submit(compile_kernels, number) for number in ARCHITECTURES]
            for name, compile_kernels in find_compilers().items()
        }
    return {
        name: {
            f"sm_{number}": count_accesses(disassembler, cubin.result())
            for number, cubin in zip(ARCHITECTURES, by_architecture, strict=True)
        }
        for name, by_architecture in cubins.items()
    }


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
