"""Rules for the sources: allowed includes, exported symbols, file lengths, build flags."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

C_FLAGS = [
    "-std=c11",
    "-fsyntax-only",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wc++-compat",
    "-Werror",
    f"-I{CSRC}",
]
# Compilers and nm must not run under the sanitizer that `make sanitize` preloads into this process.
TOOL_ENV = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
C_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
MAX_LINES = 600

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.M)
NVCC_ONLY = re.compile(r"^#ifdef __CUDACC__$(?:\n(?!#if|#el).*)*?\n#endif$", re.M)
TORCH_INCLUDE = re.compile(r"^(?:torch|ATen|c10|caffe2)/|\.hpp$")
"""Headers of libtorch, and the headers of the bridge that include them."""
PYTHON_INCLUDE = re.compile(r"^(?:Python|structmember|frameobject|pybind11/.*|cpython/.*)(?:\.h)?$")
CUDA_INCLUDE = re.compile(r"^(?:cuda|cub|thrust|nccl|cooperative_groups).*")


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a compiler or a tool of binutils in the repository; the caller checks the result."""
    return subprocess.run(command, cwd=ROOT, env=TOOL_ENV, capture_output=True, text=True)


def sources(*folders: str) -> list[Path]:
    """Returns all C, C++ and CUDA files in the given folders of csrc."""
    found = [p for f in folders for p in sorted((CSRC / f).rglob("*")) if p.suffix in C_SUFFIXES]
    assert found, f"no sources in {folders}: the test would check nothing"
    return found


def includes(path: Path) -> list[str]:
    """Returns the names in the #include lines of `path`."""
    return INCLUDE.findall(path.read_text())


def find_includes(paths: list[Path], forbidden: re.Pattern[str]) -> list[str]:
    """Returns `file: include` for every include that matches `forbidden`."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in includes(path)
        if forbidden.search(name)
    ]


BOUNDARY = [path for path in sources("bridge") if path.suffix == ".h"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [p for p in sources("core", "kernels", "transport", "bridge", "dry_run") if p.suffix == ".h"],
    ids=relative,
)
def test_header_compiles_alone_as_c11(header: Path, tmp_path: Path) -> None:
    unit = tmp_path / "alone.c"
    # The second include checks the include guard. ISO C requires a declaration, hence the typedef.
    unit.write_text(f'#include "{header}"\n#include "{header}"\ntypedef int fc_alone;\n')
    completed = run_tool("gcc", *C_FLAGS, str(unit))
    assert completed.returncode == 0, completed.stderr


# ---- allowed includes ----------------------------------------------------------------------------


def test_only_the_bridge_includes_torch() -> None:
    layers = ("core", "kernels", "transport", "python", "dry_run")
    assert find_includes(sources(*layers), TORCH_INCLUDE) == []
    # Only the .cpp and .hpp files of the bridge include torch. The .h files are C.
    assert find_includes(BOUNDARY, TORCH_INCLUDE) == []


def test_python_headers_are_included_only_in_csrc_python_bridge_and_dry_run_module() -> None:
    assert find_includes(sources("core", "kernels", "transport"), PYTHON_INCLUDE) == []
    others = [path for path in sources("dry_run") if path.name not in ("parse.c", "module.c")]
    assert find_includes(others, PYTHON_INCLUDE) == []
    assert find_includes(BOUNDARY, PYTHON_INCLUDE) == []


def test_only_cuda_sources_include_cuda_headers() -> None:
    unexpected = [
        f"{relative(path)}: {name}"
        for path in sources(".")
        if path.suffix not in (".cu", ".cuh")
        for name in INCLUDE.findall(re.sub(NVCC_ONLY, "", path.read_text()))
        if CUDA_INCLUDE.search(name)
    ]
    assert unexpected == []


def test_include_patterns_match_headers_of_their_libraries() -> None:
    for name in (
        "torch/extension.h",
        "ATen/ATen.h",
        "c10/core/Device.h",
        "torch/csrc/Exceptions.h",
        "bridge.hpp",
    ):
        assert TORCH_INCLUDE.search(name), name
    for name in ("../bridge/tensor.h", "bridge/pyobject.h", "kernels/kernels.h"):
        assert not TORCH_INCLUDE.search(name), name
    assert PYTHON_INCLUDE.search("Python.h") and PYTHON_INCLUDE.search("pybind11/pybind11.h")
    assert CUDA_INCLUDE.search("cuda_runtime.h") and not CUDA_INCLUDE.search("kernels.h")


# ---- the built module ----------------------------------------------------------------------------


MODULES = ("_C", "_dry_run")


def extension(module: str) -> Path:
    """Returns the extension module that tests run on, normal or sanitized."""
    import fsdp_c

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = list(Path(fsdp_c.__file__).parent.glob(f"{module}*{suffix}"))
    assert len(found) == 1, "run `make build`"
    return found[0]


def dynamic_symbols(module: str, *options: str) -> list[list[str]]:
    """Returns lines of `nm -D` on an extension: [address,] kind, name."""
    nm = run_tool("nm", "-D", *options, str(extension(module)))
    assert nm.returncode == 0, nm.stderr
    return [line.split() for line in nm.stdout.splitlines()]


@pytest.mark.parametrize("module", MODULES)
def test_extension_exports_only_its_init_function(module: str) -> None:
    defined = [(kind, name) for _, kind, name in dynamic_symbols(module, "--defined-only")]
    assert defined == [("T", f"PyInit_{module}")]


@pytest.mark.parametrize("module", MODULES)
def test_extension_defines_all_fsdp_c_symbols(module: str) -> None:
    undefined = [line[-1] for line in dynamic_symbols(module, "--undefined-only")]
    assert "PyModuleDef_Init" in undefined, "nm lists no symbols: the test would check nothing"
    own = re.compile(r"(?:fct?|fcd|fck|fcpy|shm|progress)_")
    assert [name for name in undefined if own.match(name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_extension_has_no_rpath_and_does_not_link_libpython(module: str) -> None:
    dynamic = run_tool("readelf", "-d", str(extension(module))).stdout
    # The bridge needs torch, which import torch has loaded. The dry run has no bridge.
    assert ("libtorch" in dynamic) is (module == "_C")
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert "libpython" not in dynamic


LOAD_IN_SUBINTERPRETER = """
import sys, torch, _interpreters
load = '''
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
try:
    module_from_spec(ModuleSpec("_C", ExtensionFileLoader("_C", PATH), origin=PATH))
except ImportError as error:
    print(error, flush=True)
'''
config = _interpreters.new_config("isolated", gil="shared")
_interpreters.run_string(_interpreters.create(config), load.replace("PATH", repr(sys.argv[1])))
"""


@pytest.mark.skipif(sys.version_info < (3, 13), reason="needs the module _interpreters")
def test_extension_is_not_loaded_in_subinterpreters() -> None:
    completed = run_tool(sys.executable, "-c", LOAD_IN_SUBINTERPRETER, str(extension("_C")))
    assert completed.stdout == "module _C does not support loading in subinterpreters\n", (
        completed.stderr
    )


# ---- files ---------------------------------------------------------------------------------------


def all_sources() -> list[Path]:
    """Returns all files written by hand: sources, tests, tools."""
    folders = ("csrc", "fsdp_c", "fsdp_c_autoload", "build_support")
    folders += ("tests", "benchmarks", "examples")
    suffixes = C_SUFFIXES | {".py", ".pyi"}
    found = [p for f in folders for p in sorted((ROOT / f).rglob("*")) if p.suffix in suffixes]
    return [*found, ROOT / "setup.py"]


def test_source_files_have_at_most_max_lines() -> None:
    lengths = {relative(p): len(p.read_text().splitlines()) for p in all_sources()}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize(
    "path", sources("core", "dry_run", "kernels", "python", "bridge", "transport"), ids=relative
)
def test_c_file_begins_with_a_comment(path: Path) -> None:
    assert re.match(r"/[*/]", path.read_text()), (
        "begin the file with a comment: what it owns, and its invariants"
    )


def test_build_and_c_tests_use_the_same_warning_flags() -> None:
    wanted = {flag for flag in C_FLAGS if flag.startswith("-W")}
    for path in (ROOT / "CMakeLists.txt", ROOT / "tests/c/Makefile"):
        assert wanted <= set(re.findall(r"-W[\w+-]+", path.read_text())), relative(path)


# ---- CUDA ----------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.xdist_group("nvcc")  # begins before shorter tests
def test_cuda_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_kernel_registers.py compiles for the other architectures of a build."""
    monkeypatch.setitem(TOOL_ENV, "TORCH_CUDA_ARCH_LIST", "7.5 11.0 12.0")
    completed = run_tool("make", "cuda-check")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "kernels_cuda.cu compiles" in completed.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_cuda_sim_runs_with_the_newest_environment_of_env_releases(tmp_path: Path) -> None:
    for release in ("2.14.1", "2.15.0"):
        python = tmp_path / f"torch-{release}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho cuda-sim: skipped, {release}\n")
        python.chmod(0o755)
        (tmp_path / f"torch-{release}/.fsdp_c-env").touch()
    completed = run_tool("make", "-s", "-o", "build", "cuda-sim", f"RELEASES_DIR={tmp_path}")
    assert completed.stdout == "cuda-sim: skipped, 2.15.0\n", completed.stderr
