"""Builds the extension modules of fsdp_c with CMake (CMakeLists.txt), and ninja or make.

csrc is C11, and the bridge to torch is C++. nvcc compiles csrc/kernels/kernels_cuda.cu, if nvcc is
found and torch is a CUDA build. Otherwise, or if nvcc fails, kernels_none.c replaces that file.
build_support/ finds torch and the CUDA compiler, and runs CMake. Editors find the compile commands
in build/compile_commands.json.

Environment:
    FSDP_C_DEBUG=1        -O0 -g and assertions
    FSDP_C_ASSERT=1       assertions in the C files. The C++ files are those of the release build.
                          After a release build this takes seconds (`make test-assert`)
    FSDP_C_SANITIZE=1     AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`)
    FSDP_C_NO_CUDA=1      no CUDA kernels
    FSDP_C_LENIENT=1      compiler warnings are not errors, for untested compilers
    TORCH_CUDA_ARCH_LIST  architectures, as for torch's own extensions: "8.0;9.0" (default: the
                          architectures of torch)
    FSDP_C_CUDA_ARCH      nvcc's -arch; replaces TORCH_CUDA_ARCH_LIST
    CC, CXX               the compilers (default: gcc and g++; with ccache, if it is on the PATH)
    MAX_JOBS=n            parallel compilers (default: the processors that the build may use)
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not have this folder on sys.path

from build_support import find_cuda, find_torch, run_cmake  # noqa: E402

BUILD = ROOT / "build"
MODULES = ["fsdp_c._C", "fsdp_c._dry_run"]


def is_on(name: str) -> bool:
    """Whether the environment variable `name` is set and neither empty nor "0"."""
    return os.environ.get(name, "") not in ("", "0")


class BuildWithoutStaleFiles(build):
    """Deletes the files of earlier builds, which setuptools would add to the wheel."""

    def run(self) -> None:
        if BUILD in Path(self.build_lib).resolve().parents:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildWithCMake(build_ext):
    """Builds all extension modules with one run of CMake."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # the existing module may be newer, from a build with other settings
        self.kernels = "CPU"

    def run(self) -> None:
        find_torch.add_to_path()
        begin = time.monotonic()
        with run_cmake.lock_build(BUILD):
            super().run()
        print(f"fsdp_c: built in {time.monotonic() - begin:.0f} s", flush=True)

    def build_extensions(self) -> None:
        import torch

        sanitize, debug = is_on("FSDP_C_SANITIZE"), is_on("FSDP_C_DEBUG")
        build_type = "Sanitize" if sanitize else "Debug" if debug else "Release"
        variant = "_assert" if is_on("FSDP_C_ASSERT") and build_type == "Release" else ""
        jobs = run_cmake.count_jobs()
        cuda = find_cuda.find()
        release = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
        directory = BUILD / f"{release}-{build_type.lower()}-{'cuda' if cuda else 'nocuda'}"
        definitions = {
            **find_torch.definitions(),
            "CMAKE_BUILD_TYPE": build_type,
            "FSDP_C_LENIENT": "ON" if is_on("FSDP_C_LENIENT") else "OFF",
        }
        self.kernels = f"CPU and CUDA {torch.version.cuda}" if cuda else "CPU"
        files = len([*ROOT.glob("csrc/*/*.c"), *ROOT.glob("csrc/*/*.cpp")])
        print(find_torch.describe_build(files, self.kernels, jobs), flush=True)

        targets = [ext.name.rpartition(".")[2] + variant for ext in self.extensions]
        if not run_cmake.build(ROOT, directory, targets, definitions, cuda, jobs):
            self.kernels = "CPU"
        run_cmake.write_compile_commands(directory, BUILD / "compile_commands.json")
        for ext, target in zip(self.extensions, targets):
            library = Path(self.get_ext_fullpath(ext.name))
            built = directory / target / library.name
            run_cmake.check_resolved(built)
            library.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(built), str(library))
        find_torch.write_record(Path(self.build_lib) / "fsdp_c", self.kernels, ROOT)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        find_torch.write_record(ROOT / "fsdp_c", self.kernels, ROOT)


setup(
    ext_modules=[Extension(name, []) for name in MODULES],
    cmdclass={"build": BuildWithoutStaleFiles, "build_ext": BuildWithCMake},
)
