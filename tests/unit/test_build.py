"""setup.py, CMakeLists.txt and build_support/run_cmake.py, on a tree with one small file per layer.

Shell scripts stand in for nvcc, so these tests need no CUDA toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import c_sources
import fork_server
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Appended, because under the sanitizers fsdp_c must not be imported from this checkout.
sys.path.append(str(ROOT))

from build_support import find_torch, run_cmake  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("build"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

COPIED = [
    *("setup.py", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "build_support"),
    "fsdp_c/_compat/abi.py",
]
# Compilers must not run under the sanitizer that `make sanitize` preloads into this process.
TOOL_ENV = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
MODULE = "_C" + str(sysconfig.get_config_var("EXT_SUFFIX"))
FILES = {
    "fsdp_c/version.py": '__version__ = "1.0"\n',
    "csrc/core/core.h": "#define FC_VALUE 1\nint fc_value(void);\n",
    "csrc/core/core.c": '#include "core/core.h"\nint fc_value(void) { return FC_VALUE; }\n',
    "csrc/core/other.c": "int fc_other(void);\nint fc_other(void) { return 0; }\n",
    "csrc/transport/ring.c": "int shm_ring_size(void);\nint shm_ring_size(void) { return 2; }\n",
    "csrc/kernels/kernels_none.c": "int fck_built(void);\nint fck_built(void) { return 0; }\n",
    "csrc/kernels/cast_cpu.c": "int fck_cast(void);\nint fck_cast(void) { return 0; }\n",
    "csrc/kernels/kernels_cuda.cu": """
        extern "C" int cudaRuntime(void);
        extern "C" int fck_built(void) { return cudaRuntime(); }
    """,
    "csrc/dry_run/dry_run.c": """
        #include <Python.h>
        int fc_value(void);
        static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "_dry_run", 0, 0, 0, 0, 0, 0, 0};
        PyMODINIT_FUNC PyInit__dry_run(void);
        PyMODINIT_FUNC PyInit__dry_run(void) { return fc_value() ? PyModule_Create(&def) : NULL; }
    """,
    "csrc/bridge/bridge.cpp": """
        #include <c10/core/Device.h>
        extern "C" int fct_devices(void) {
        #ifdef NDEBUG
            return c10::Device("cpu").is_cpu() ? 10 : 0;
        #else
            return 20;
        #endif
        }
    """,
    "csrc/python/module.c": """
        #include <Python.h>
        #include "core/core.h"
        int shm_ring_size(void);
        int fck_built(void);
        int fct_devices(void);
        static PyObject *values(PyObject *self, PyObject *unused) {
            int asserts = 1;
        #ifdef NDEBUG
            asserts = 0;
        #endif
            (void)self, (void)unused;
            return Py_BuildValue("iiiii", fc_value(), shm_ring_size(), fck_built(), fct_devices(),
                                 asserts);
        }
        static PyMethodDef methods[] = {{"values", values, METH_NOARGS, ""}, {0, 0, 0, 0}};
        static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "_C", 0, 0, methods, 0, 0, 0, 0};
        PyMODINIT_FUNC PyInit__C(void);
        PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&def); }
    """,
}
RELEASE_VALUES = [1, 2, 0, 10, 0]


@dataclass(frozen=True)
class Run:
    """A process of a tree, and the file with its output."""

    process: fork_server.ForkedProcess
    output: Path


class Tree:
    """A source tree with the build files of this repository and the sources of FILES."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = 0
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, root / name)
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def start(self, script: str, *arguments: str, **variables: str) -> Run:
        """Starts Python code in the root of the tree, in a process that has imported torch."""
        self.runs += 1
        path = self.root / f"run{self.runs}.py"
        path.write_text(f"import os, sys; os.chdir({str(self.root)!r})\n{script}")
        removed = ("CC", "CXX", "TORCH_CUDA_ARCH_LIST")
        kept = {
            name: value
            for name, value in TOOL_ENV.items()
            if name not in removed and not name.startswith("FSDP_C")
        }
        kept |= {"CCACHE_BASEDIR": str(self.root), "CCACHE_NOHASHDIR": "1"}  # trees share objects
        env = {**kept, "FSDP_C_NO_CUDA": "1", **variables}  # also with nvcc and a CUDA torch
        output = path.with_suffix(".txt")
        return Run(fork_server.start_script(path, [*arguments], env, output), output)

    def start_build(self, *arguments: str, code: str = "", **variables: str) -> Run:
        """Starts setup.py. ``code`` runs in the same process before it."""
        setup = f"sys.argv[0] = 'setup.py'; {code}\n"
        setup += "import runpy; runpy.run_path('setup.py', run_name='__main__')"
        return self.start(setup, *(arguments or ("build_ext", "--inplace")), **variables)

    def build(self, *arguments: str, fails: bool = False, code: str = "", **variables: str) -> str:
        """Runs setup.py, by default ``build_ext --inplace``. Returns its output."""
        run = self.start_build(*arguments, code=code, **variables)
        assert (run.process.wait() != 0) == fails, run.output.read_text()
        return run.output.read_text()

    def values(self, folder: str = "fsdp_c") -> list[int]:
        """Returns the results of the built module's functions."""
        run = self.start(
            f"sys.path.insert(0, {folder!r}); import _C; print('values:', *_C.values())"
        )
        assert run.process.wait() == 0, run.output.read_text()
        # Libraries of torch may print lines at the end of the process.
        line = re.search(r"^values: (.*)$", run.output.read_text(), re.M)
        assert line is not None, run.output.read_text()
        return [int(word) for word in line[1].split()]

    def record(self) -> dict[str, Any]:
        """Returns the record of the built module, with the fields of its only build."""
        record = json.loads((self.root / "fsdp_c/_C.json").read_text())
        [build] = record["builds"]
        return {**record, **build}


def compiled_files(output: str) -> list[str]:
    """Returns the names of the files that a build compiled, sorted."""
    return sorted(re.findall(r"^\[\d+/\d+\] Building \w+ object .*/(\S+)\.o$", output, re.M))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Returns a tree with a finished release build. Tests restore the sources that they change."""
    tree = Tree(tmp_path_factory.mktemp("tree"))
    tree.build()
    return tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Returns a new tree without a build."""
    return Tree(tmp_path)


def test_build_links_all_layers_and_records_torch(built: Tree) -> None:
    assert built.values() == RELEASE_VALUES
    record = built.record()
    assert (record["torch"], record["kernels"]) == (torch.__version__, "CPU")
    assert record["sizes"]["torch._C.TensorBase"] == torch._C.TensorBase.__basicsize__
    assert record["source"] == str(built.root)
    for name in ("_C", "_dry_run"):
        library = f"{built.root}/fsdp_c/{MODULE.replace('_C', name)}"
        command = ["nm", "-D", "--defined-only", library]
        symbols = subprocess.run(command, env=TOOL_ENV, capture_output=True, text=True).stdout
        assert [line.split()[-1] for line in symbols.splitlines()] == [f"PyInit_{name}"]
    commands = json.loads((built.root / "build/compile_commands.json").read_text())
    source = str(built.root / "csrc/bridge/bridge.cpp")
    entries = [entry for entry in commands if entry["file"] == source]
    assert entries and all(source in entry["command"] for entry in entries)


def test_build_compiles_only_files_that_a_change_affects(built: Tree) -> None:
    assert compiled_files(built.build()) == []
    built.write("csrc/core/core.h", FILES["csrc/core/core.h"].replace("1", "7"))
    built.write("csrc/core/new.c", FILES["csrc/core/other.c"].replace("other", "new"))
    assert compiled_files(built.build()) == ["core.c", "module.c", "new.c"]
    assert built.values() == [7, *RELEASE_VALUES[1:]]
    (built.root / "csrc/core/new.c").unlink()
    built.write("csrc/core/core.h", FILES["csrc/core/core.h"])
    assert compiled_files(built.build()) == ["core.c", "module.c"]
    assert built.values() == RELEASE_VALUES


def test_build_with_assertions_compiles_c_files_and_reuses_the_bridge_of_the_release_build(
    built: Tree,
) -> None:
    folder = "build/assert-lib"
    output = built.build("build_ext", "--build-lib", folder, FSDP_C_ASSERT="1")
    assert compiled_files(output) == sorted(
        Path(name).name for name in FILES if name.endswith(".c")
    )
    assert built.values(f"{folder}/fsdp_c") == [*RELEASE_VALUES[:4], 1]


def test_debug_build_leaves_release_build_in_place(built: Tree) -> None:
    folder = "build/debug-lib"
    output = built.build("build_ext", "--build-lib", folder, FSDP_C_DEBUG="1")
    assert "unity_0_cxx.cxx" in compiled_files(output)  # includes bridge.cpp
    assert built.values(f"{folder}/fsdp_c") == [*RELEASE_VALUES[:3], 20, 1]
    assert built.values() == RELEASE_VALUES


def test_bridge_is_compiled_in_two_translation_units(tree: Tree) -> None:
    for name in ("a", "b", "c"):
        tree.write(f"csrc/bridge/{name}.cpp", f"int fct_{name}() {{ return 0; }}\n")
    units = [name for name in compiled_files(tree.build()) if name.endswith(".cxx")]
    assert units == ["unity_0_cxx.cxx", "unity_1_cxx.cxx"]


def test_warning_fails_the_build_unless_lenient(tree: Tree) -> None:
    tree.write("csrc/core/other.c", "int fc_other(void) { return 0; }\n")
    output = tree.build(fails=True)
    assert "-Werror=missing-prototypes" in output
    assert "fsdp_c: does not compile; the messages of the compiler are above" in output
    assert "Traceback" not in output
    tree.build(FSDP_C_LENIENT="1")


def test_undefined_function_fails_each_build(tree: Tree) -> None:
    declaration = '#include "core/core.h"\nint fc_missing(void);\n'
    tree.write("csrc/core/core.c", f"{declaration}int fc_value(void) {{ return fc_missing(); }}\n")
    for _ in range(2):
        assert "fsdp_c: used but not defined: fc_missing" in tree.build(fails=True)


def test_every_c_function_of_csrc_is_checked_after_the_link() -> None:
    headers = [path for path in c_sources.list_files() if path.suffix == ".h"]
    names = {name for header in headers for name in c_sources.list_exported(header)}
    names -= {"PyInit__C", "PyInit__dry_run"}
    assert len(names) > 500
    assert [name for name in sorted(names) if not run_cmake.OWN_SYMBOL.search(f" U {name}\n")] == []
    of_others = ["shm_open", "shm_unlink", "PyLong_AsLong", "_ZN3c106DeviceC1Ev"]
    assert not run_cmake.OWN_SYMBOL.findall("".join(f" U {name}\n" for name in of_others))


def test_undefined_functions_of_transport_and_bridge_fail_the_build(tmp_path: Path) -> None:
    source, library = tmp_path / "part.cpp", tmp_path / "part.so"
    source.write_text("""
        namespace fct { int missing(int value); }
        extern "C" int op_missing(void), progress_missing(void), shm_tag_missing(void);
        int total() { return fct::missing(op_missing()) + progress_missing() + shm_tag_missing(); }
    """)
    command = ["g++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, env=TOOL_ENV)
    expected = "not defined: _ZN3fct7missingEi, op_missing, progress_missing, shm_tag_missing"
    with pytest.raises(SystemExit, match=expected):
        run_cmake.check_resolved(library)
    assert not library.exists()
    with pytest.raises(SystemExit, match="nm cannot read the symbols of"):
        run_cmake.check_resolved(library)


def test_missing_library_of_torch_is_reported_with_its_folders(tmp_path: Path) -> None:
    (tmp_path / "libc10.so").touch()
    folders = [tmp_path / "absent", tmp_path]
    assert find_torch.find_library("c10", folders) == str(tmp_path / "libc10.so")
    with pytest.raises(
        SystemExit, match=r"libtorch\.so of torch is in none of the folders .*absent"
    ):
        find_torch.find_library("torch", folders)


def test_parallel_builds_of_one_tree_succeed(tree: Tree) -> None:
    runs = [tree.start_build() for _ in range(2)]
    statuses = [run.process.wait() for run in runs]
    outputs = [run.output.read_text() for run in runs]
    assert statuses == [0, 0], outputs
    assert sorted(compiled_files(output) != [] for output in outputs) == [False, True]
    assert tree.values() == RELEASE_VALUES


def test_changed_compiler_recompiles_everything(tree: Tree) -> None:
    tree.build()
    wrapper = tree.root / "my-gcc"
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {tree.root}/runs\nexec gcc "$@"\n')
    wrapper.chmod(0o755)
    output = tree.build(CC=str(wrapper), CMAKE_C_COMPILER_LAUNCHER="")
    assert len(compiled_files(output)) == sum(name.endswith((".c", ".cpp")) for name in FILES)
    assert "core/core.c" in (tree.root / "runs").read_text()


def test_moved_checkout_is_configured_again(tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    first.mkdir()
    (first / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.21)\nproject(x NONE)\n")
    run_cmake.configure(first, first / "build", {})
    first.rename(moved)
    run_cmake.configure(moved, moved / "build", {})
    assert f"HOME_DIRECTORY:INTERNAL={moved}" in (moved / "build" / "CMakeCache.txt").read_text()


def test_build_jobs_are_max_jobs_or_the_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    for value, count in (("", 3), ("2", 2)):
        monkeypatch.setenv("MAX_JOBS", value)
        assert run_cmake.count_jobs() == count
    for value in ("auto", "0", "-1"):
        monkeypatch.setenv("MAX_JOBS", value)
        with pytest.raises(SystemExit, match=f"MAX_JOBS={value} is not a positive number"):
            run_cmake.count_jobs()


def test_missing_compiler_is_reported_with_remedy(tree: Tree) -> None:
    output = tree.build(fails=True, CXX="no-such-compiler -m64")
    assert "the C++ compiler 'no-such-compiler -m64' is not found: install gcc and g++" in output
    assert "Traceback" not in output


def test_missing_cmake_is_reported_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(SystemExit, match=r"cmake is not found: run .* pip install cmake ninja"):
        run_cmake.find_program("cmake")
    with pytest.raises(SystemExit, match=r"ninja is not found"):
        run_cmake.find_program("ninja", "make")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_build_without_ninja_uses_make(tree: Tree) -> None:
    without_ninja = (
        "import shutil; which = shutil.which; "
        "shutil.which = lambda name, **k: None if name == 'ninja' else which(name, **k)"
    )
    tree.build(code=without_ninja)
    assert tree.values() == RELEASE_VALUES
    tree.write("csrc/core/other.c", "int fc_other(void) { return 0; }\n")
    output = tree.build(fails=True, code=without_ninja)
    assert "-Werror=missing-prototypes" in output and "Traceback" not in output
    tree.write("csrc/core/other.c", FILES["csrc/core/other.c"])
    assert compiled_files(tree.build()) != []  # ninja, in a new folder


def test_ccache_is_launcher_of_compilers_that_are_not_ccache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, links = tmp_path / "bin", tmp_path / "links"
    for folder in (programs, links):
        folder.mkdir()
    for program in ("ccache", "gcc"):
        (programs / program).touch(mode=0o755)
    (links / "gcc").symlink_to(programs / "ccache")
    name = "CMAKE_C_COMPILER_LAUNCHER"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(programs))
    assert run_cmake.find_launcher(name, "gcc") == str(programs / "ccache")
    assert run_cmake.find_launcher(name, "ccache gcc") == ""
    monkeypatch.setenv("PATH", f"{links}:{programs}")
    assert run_cmake.find_launcher(name, "gcc") == ""
    monkeypatch.setenv(name, "sccache")
    assert run_cmake.find_launcher(name, "gcc") == "sccache"


# ---- CUDA ----------------------------------------------------------------------------------------

CUDA_TORCH = (
    "import torch; torch.version.cuda = '12.4'; "
    "torch._C._cuda_getArchFlags = lambda: 'sm_50 sm_60 sm_70 sm_80'"
)


def build_with_nvcc(tree: Tree, compile_script: str, fails: bool = False) -> str:
    """Builds for a torch of CUDA 12.4, with an nvcc that runs ``compile_script``."""
    toolkit = tree.root / "toolkit"
    for folder in ("bin", "lib64"):
        (toolkit / folder).mkdir(parents=True, exist_ok=True)
    runtime = toolkit / "lib64/libcudart.so.12"
    tree.write("toolkit/cudart.c", "int cudaRuntime(void) { return 1; }\n")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcudart.so.12", "-o", str(runtime)]
    subprocess.run([*command, f"{toolkit}/cudart.c"], check=True, env=TOOL_ENV)
    nvcc = toolkit / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 'release 12.4, V12.4.131';; "
        "--list-gpu-code) echo sm_50 sm_60 sm_70 sm_80 sm_90;; "
        f'*) echo "ran: $*" >> {tree.root}/runs; {compile_script};; esac\n'
    )
    nvcc.chmod(0o755)
    path = os.pathsep.join([str(toolkit / "bin"), os.environ["PATH"]])
    return tree.build(code=CUDA_TORCH, PATH=path, fails=fails, FSDP_C_NO_CUDA="0")


def linked_libraries(tree: Tree) -> str:
    command = ["readelf", "-d", str(tree.root / "fsdp_c" / MODULE)]
    return subprocess.run(command, capture_output=True, text=True, env=TOOL_ENV).stdout


NVCC_WITH_GXX = (
    'exec g++ -x c++ $(echo "$*" | sed "s/-gencode=[^ ]*//g; s/-Xcompiler [^ ]*/-fPIC/")'
)


def test_build_with_failing_nvcc_omits_kernels_and_prints_warning(tree: Tree) -> None:
    output = build_with_nvcc(tree, "echo 'error: unknown architecture' >&2; exit 1")
    assert tree.values() == RELEASE_VALUES
    assert "libc10.so" in linked_libraries(tree)
    assert "libcudart" not in linked_libraries(tree)
    assert tree.record()["kernels"] == "CPU"
    assert "error: unknown architecture" in output
    assert "!! fsdp_c:" in output and "does not compile the CUDA kernels" in output
    runs = (tree.root / "runs").read_text()
    assert "code=sm_70" in runs and "code=sm_80" in runs
    assert "sm_50" not in runs and "sm_60" not in runs
    # The next build tries nvcc again, which works now.
    output = build_with_nvcc(tree, NVCC_WITH_GXX)
    assert "!!" not in output
    assert tree.record()["kernels"] == "CPU and CUDA 12.4"
    assert "libcudart.so.12" in linked_libraries(tree)
    assert compiled_files(output) == []  # only nvcc and the linker run


def test_error_in_a_c_file_is_not_reported_as_nvcc_error(tree: Tree) -> None:
    tree.write("csrc/core/other.c", "does not compile\n")
    output = build_with_nvcc(tree, NVCC_WITH_GXX, fails=True)
    assert "fsdp_c: does not compile" in output and "!!" not in output
    assert "kernels_none.c" not in compiled_files(output)
