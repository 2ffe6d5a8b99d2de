"""Runs ``gpu_check.sh --device cuda`` on the simulated CUDA device.

``python check_in_copy.py STEP...`` runs these steps in a copy of the tests, with fsdp_c for the
torch of this Python. Each process of the check loads the device (``startup/sitecustomize.py``). A
script in place of nvcc compiles the kernels for the host. Prints a JSON object: the lines of the
summary, the results, the error output, and the findings of the device. The object also has the
names of the written files and, if a step failed, the log.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import stub_build

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "build_support", "csrc", "examples", "tests")
FILES = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "setup.py")
WITHOUT_NVCC = "tests/parity/test_gpu.py::test_extension_contains_cuda_kernels"
"""The test of the step parity that requires kernels of nvcc."""
NVCC = """#!/bin/bash
# Compiles CUDA sources for the host. The memory is that of the simulated device.
set -eu
case "$*" in
*--version*) echo "the host's compiler in place of nvcc, release {release}" && exit ;;
*--list-gpu-code*) echo sm_90 && exit ;;
esac
memory={folder}/kernel_memory.o
g++ -c -O1 -fPIC -w {includes} -x c++ {root}/tests/gpu/workers/kernel_memory.cu -o "$memory"
options=$(echo "-x c++ $*" | sed "s#-lineinfo##; s#-arch=[^ ]*##; s#-O3#-O1 -w#
    s#-Xcompiler [^ ]*#-fPIC#; s#[^ ]*kernel_memory.cu#-x none $memory#")
g++ $options \\
    -I{root}/tests/c/fake_cuda -x none {libraries}
"""


def write_nvcc(folder: Path, device_folder: Path) -> None:
    site = stub_build.find_site()
    assert site is not None
    includes = [f"-isystem {path}" for path in stub_build.include_folders(site)]
    runtime = next(device_folder.glob("libcudart.so.*"))
    folder.mkdir()
    nvcc = folder / "nvcc"
    libraries = f"-Wl,-rpath,{device_folder} {runtime}"
    text = NVCC.format(
        folder=folder,
        includes=" ".join(includes),
        root=ROOT,
        libraries=libraries,
        release=f"{runtime.name.rpartition('.')[2]}.0",
    )
    nvcc.write_text(text)
    nvcc.chmod(0o755)


def make_copy(root: Path, builds: bool) -> None:
    """Copies the files that the check needs to ``root``, and fsdp_c of this Python.

    With ``builds``, omits the extension, which the step ``build`` then builds.
    """
    spec = importlib.util.find_spec("fsdp_c")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    ignored = shutil.ignore_patterns("__pycache__", *(["*.so"] if builds else []))
    packages = (package, package.with_name("fsdp_c_autoload"))
    for folder in (*packages, *map(ROOT.joinpath, FOLDERS)):
        shutil.copytree(folder, root / folder.name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, root)


def add_group(root: Path) -> None:
    """Adds the C++ group, which the step ``build`` builds on a GPU."""
    command = [sys.executable, str(ROOT / "tests/gpu/workers/one_rank_group.py")]
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    library = Path(built.stdout.splitlines()[-1])
    target = root / library.relative_to(ROOT)
    target.parent.mkdir(parents=True)
    shutil.copy(library, target)


def main(steps: list[str]) -> dict[str, Any]:
    device_folder = stub_build.build()
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder, "copy"), Path(folder, "out")
        findings = Path(folder, "findings")
        findings.touch()
        make_copy(root, builds="build" in steps)
        if "build" not in steps:
            add_group(root)
        write_nvcc(Path(folder, "bin"), device_folder)
        environment = os.environ | {
            "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "tests/cuda/startup"),
            "PYTHON": sys.executable,
            "OUT": str(out),
            "FSDP_C_CUDA_SIM": str(device_folder),
            "FSDP_C_CUDA_FINDINGS": str(findings),
            "FSDP_C_CUDA_SEED": "1",
            "GPU_CHECK_SMALL": "1",
            "GPU_CHECK_LIMIT": "300",
            "MAX_JOBS": "2",
            "XDG_CACHE_HOME": folder,  # kernels of NVRTC
            "PYTEST_ADDOPTS": f"-p no:cacheprovider --deselect {WITHOUT_NVCC}",
        }
        command = [str(root / "tests/gpu/gpu_check.sh"), "--only", " ".join(steps)]
        checked = subprocess.run(command, env=environment, capture_output=True, text=True)
        return {
            "lines": (out / "summary.txt").read_text().splitlines(),
            "results": json.loads((out / "results.json").read_text()),
            "errors": checked.stderr,
            "log": (out / "log.txt").read_text() if checked.returncode else "",
            "files": sorted(path.name for path in out.iterdir() if path.stat().st_size > 0),
            "findings": findings.read_text().splitlines(),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])), flush=True)
