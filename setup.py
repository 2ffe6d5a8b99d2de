"""Builds the extension module fsdp_c._C: a C11 core and a C++ bridge to libtorch.

The compilers of the sources:

- csrc/core, csrc/python and the CPU kernels are C11. torch's BuildExtension passes `.c` files to
  the C++ compiler when it uses ninja. Therefore `BuildC` removes them from the extension's sources,
  compiles the changed ones itself, in parallel, and links the objects.
- BuildExtension and ninja compile csrc/bridge/*.cpp, with the C++ standard of the installed torch.
- nvcc compiles csrc/kernels/kernels_cuda.cu, if nvcc is found and torch is a CUDA build.
  cuda_build.py selects nvcc and the architectures. Otherwise kernels_none.c replaces the file: a
  CPU-only torch has no CUDA runtime to link with. `make cuda-check` still compiles the file.
  If nvcc fails, setup.py prints a warning and uses kernels_none.c too.

Environment:
    FSDP_C_DEBUG=1        -O0 -g and assertions
    FSDP_C_ASSERT=1       assertions in the C files only; csrc/bridge as in a release, so that the
                          build takes seconds after a release build (`make test-assert`)
    FSDP_C_SANITIZE=1     AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`)
    FSDP_C_NO_CUDA=1      no CUDA kernels
    FSDP_C_LENIENT=1      compiler warnings are not errors, for untested compilers
    TORCH_CUDA_ARCH_LIST  architectures, as for torch's own extensions: "8.0;9.0" (default: the
                          architectures of torch)
    FSDP_C_CUDA_ARCH      nvcc's -arch; replaces TORCH_CUDA_ARCH_LIST
    MAX_JOBS=n            parallel compilers (default: the number of processors)

Each combination of Python, torch and build settings has its own directory under build/. So a change
of the settings does not recompile everything.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from setuptools import setup

# A PEP 517 build does not have the folder of this file on sys.path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_torch  # must come first: it adds torch's folder to sys.path

# isort: split
import torch
from torch.utils import cpp_extension

import cuda_build

# ninja is a script of the Python environment, which may not be activated.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

C_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wc++-compat",
    "-Werror",
]
CXX_WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"]
# gcc's flow analysis is imprecise for instrumented code and warns about unset std::optional values.
SANITIZER_FALSE_ALARMS = ["-Wno-maybe-uninitialized"]


def switch(name: str) -> bool:
    """Whether the environment variable `name` is set and neither empty nor "0"."""
    return os.environ.get(name, "") not in ("", "0")


if switch("FSDP_C_LENIENT"):
    C_WARNINGS.remove("-Werror")
    CXX_WARNINGS.remove("-Werror")
DEBUG = switch("FSDP_C_DEBUG")
ASSERT = switch("FSDP_C_ASSERT")
SANITIZE = switch("FSDP_C_SANITIZE")


NVCC = cuda_build.find_nvcc(torch.version.cuda, cpp_extension.CUDA_HOME)
CUDART = None
if NVCC and torch.version.cuda:
    CUDART = cuda_build.find_cudart(
        NVCC, torch.version.cuda, torch.__file__, cpp_extension.CUDA_HOME
    )
CUDA_SOURCE = "csrc/kernels/kernels_cuda.cu"
NO_CUDA_SOURCE = "csrc/kernels/kernels_none.c"


def optimization_flags(cxx: bool = False) -> list[str]:
    """Returns the compiler flags of the build settings, for C or C++."""
    flags = ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O2", "-DNDEBUG"]
    if ASSERT and not cxx:
        flags = ["-O1", "-g", "-UNDEBUG"]
    if SANITIZE:
        instrument = ["-fno-omit-frame-pointer", *SANITIZERS, *SANITIZER_FALSE_ALARMS]
        flags = ["-O1", "-g", "-UNDEBUG", *instrument]
    return flags


def build_directory(cxx: bool = False) -> Path:
    """Returns the folder of the objects for this combination of Python, torch and settings."""
    kind = "sanitize" if SANITIZE else "debug" if DEBUG else "release"
    if ASSERT and not cxx:
        kind = "assert"
    cuda = "cuda" if CUDART else "nocuda"
    return ROOT / "build" / f"{sys.implementation.cache_tag}-torch{torch.__version__}-{kind}-{cuda}"


def headers() -> list[str]:
    """Returns all headers under csrc."""
    return sorted(str(path) for path in CSRC.rglob("*.h*"))


def c_sources() -> list[str]:
    """Returns the files that BuildC compiles itself, relative to the repository."""
    files = [*CSRC.glob("core/*.c"), *CSRC.glob("python/*.c"), *CSRC.glob("kernels/*_cpu.c")]
    files += [*CSRC.glob("transport/*.c")]
    files += [CSRC / "kernels/backends.c", CSRC / "kernels/kernels_jit.cpp"]
    files.append(ROOT / (CUDA_SOURCE if CUDART else NO_CUDA_SOURCE))
    return sorted(str(path.relative_to(ROOT)) for path in files)


def cxx_sources() -> list[str]:
    """Returns the files of the C++ bridge, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in CSRC.glob("bridge/*.cpp"))


def compile_command(source: str) -> list[str]:
    """Returns the command that compiles one of c_sources(), without the output options."""
    if source.endswith(".cu"):
        assert NVCC is not None
        arch = cuda_build.arch_options(NVCC, torch._C._cuda_getArchFlags() or "")
        level = ["-O0", "-g"] if DEBUG else ["-O3", "-DNDEBUG"]
        host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
        return [NVCC, "-std=c++17", *level, *arch, f"-I{CSRC}", *host]
    if source.endswith(".cpp"):
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        plain = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
        return [*compiler, *plain, *optimization_flags(), *CXX_WARNINGS, f"-I{CSRC}"]
    compiler = shlex.split(os.environ.get("CC") or "gcc")
    command = [
        *compiler,
        "-std=c11",
        "-fPIC",
        "-fvisibility=hidden",
        *optimization_flags(),
        *C_WARNINGS,
    ]
    # -isystem suppresses warnings about CPython's headers.
    return [*command, f"-I{CSRC}", "-isystem", sysconfig.get_paths()["include"]]


def is_current(target: Path, command: str) -> bool:
    """Whether this command made `target`, and none of its inputs has changed since."""
    record, depfile = target.with_suffix(".cmd"), target.with_suffix(".d")
    if not (target.exists() and record.exists() and depfile.exists()):
        return False
    if record.read_text() != command:
        return False
    made = target.stat().st_mtime_ns
    inputs = depfile.read_text().replace("\\\n", " ").partition(":")[2].split()
    return all(os.path.exists(path) and os.stat(path).st_mtime_ns <= made for path in inputs)


def compile_one(source: str, directory: Path) -> str | None:
    """Compiles `source` if needed. Returns its object file, or None on failure."""
    target = directory / Path(source).with_suffix(".o")
    target.parent.mkdir(parents=True, exist_ok=True)
    depfile = target.with_suffix(".d")
    outputs = ["-MMD", "-MF", str(depfile), "-c", source, "-o", str(target)]
    command = [*compile_command(source), *outputs]
    line = shlex.join(command)
    if is_current(target, line):
        return str(target)
    print(f"  CC {source}", flush=True)
    target.with_suffix(".cmd").unlink(missing_ok=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(f"{line}\n{done.stdout}{done.stderr}", end="", flush=True)
        return None
    target.with_suffix(".cmd").write_text(line)
    return str(target)


def compile_cuda(directory: Path) -> str | None:
    """Compiles the CUDA kernels. Returns their object file, or None after a warning."""
    try:
        made = compile_one(CUDA_SOURCE, directory)
    except (OSError, RuntimeError) as error:
        print(f"fsdp_c: {error}")
        made = None
    if made is None:
        cuda_build.shout(
            f"{NVCC} does not compile the CUDA kernels (its messages are above). fsdp_c is built "
            "without them: on a GPU it uses torch's foreach operations, which is slower. Rebuild "
            "with an nvcc that works, or name architectures in TORCH_CUDA_ARCH_LIST."
        )
    return made


def check_resolved(library: str) -> None:
    """Fails the build if a function of fsdp_c is used but not defined.

    The linker accepts undefined symbols in a shared object. They would fail at import or at the
    first call.
    """
    nm = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
    missing = sorted(set(re.findall(r"\bU ((?:fc|fct|fck|fcpy|shm|progress)_\w+)", nm.stdout)))
    if missing:
        os.unlink(library)
        raise SystemExit(f"fsdp_c: used but not defined: {', '.join(missing)}")


@contextmanager
def lock_build(directory: Path) -> Iterator[None]:
    """Locks `directory` against a second build of the same combination."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def jobs() -> int:
    """Returns the number of parallel compilers."""
    return int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)


def kernels() -> str:
    """Returns the devices for which kernels are built."""
    return "CPU" if NVCC is None else f"CPU and CUDA {torch.version.cuda}"


class BuildC(cpp_extension.BuildExtension):
    """A BuildExtension that compiles the C files with a C compiler."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip's editable build sets a temporary folder. A permanent one makes builds incremental.
        self.build_temp = str(build_directory(cxx=True))

    def run(self) -> None:
        begin = time.monotonic()
        print(build_torch.plan(self.extensions[0].sources, kernels(), jobs()), flush=True)
        with lock_build(build_directory(cxx=True)):
            super().run()
        print(f"fsdp_c: built in {time.monotonic() - begin:.0f} s", flush=True)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        build_torch.note(ROOT / "fsdp_c", kernels(), ROOT)

    def build_extension(self, ext: cpp_extension.CppExtension) -> None:
        directory = build_directory()
        with ThreadPoolExecutor(jobs()) as pool:
            cuda = pool.submit(compile_cuda, directory) if CUDA_SOURCE in ext.sources else None
            own = [s for s in ext.sources if s not in cxx_sources() and s != CUDA_SOURCE]
            objects = list(pool.map(lambda source: compile_one(source, directory), own))
        ext.sources = cxx_sources()
        failed = [source for source, made in zip(own, objects) if made is None]
        if failed:
            raise SystemExit(f"fsdp_c: does not compile: {', '.join(failed)}")
        if cuda is not None:
            gpu = cuda.result()
            runtime = [CUDART] if gpu else []
            ext.extra_link_args = [*ext.extra_link_args, *runtime]
            objects.append(gpu or compile_one(NO_CUDA_SOURCE, directory))
        ext.extra_objects = objects
        # Exports only the entry point. -fvisibility=hidden does not apply to the weak symbols of
        # templates of the standard library and torch; the version script does.
        script = directory / "exports.map"
        script.write_text("{ global: PyInit__C; local: *; };\n")
        ext.extra_link_args = [*ext.extra_link_args, f"-Wl,--version-script={script}"]
        try:
            super().build_extension(ext)
        except RuntimeError as error:  # ninja has printed the error; a traceback would hide it
            raise SystemExit(f"fsdp_c: {error}") from None
        library = self.get_ext_fullpath(ext.name)
        check_resolved(library)
        build_torch.note(Path(library).parent, kernels(), ROOT)


def extension() -> cpp_extension.CppExtension:
    """Returns the extension module."""
    compile_args = [
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        *optimization_flags(cxx=True),
        *CXX_WARNINGS,
    ]
    if not DEBUG and not SANITIZE:
        compile_args.append("-g0")
    # -isystem suppresses warnings about the headers of torch and CPython.
    for path in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]:
        compile_args += ["-isystem", path]
    link_args = ["-Wl,--exclude-libs,ALL", *(SANITIZERS if SANITIZE else [])]
    return cpp_extension.CppExtension(
        "fsdp_c._C",
        [*c_sources(), *cxx_sources()],
        include_dirs=[str(CSRC)],
        depends=headers(),
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    version=build_torch.version(ROOT / "fsdp_c/version.py"),
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildC},
)
