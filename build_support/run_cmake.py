"""Runs CMake, and ninja or make, for setup.py.

Each combination of Python, torch and build type has its own directory under ``build/``. So a change
of the settings does not recompile all files, and builds for several releases of torch coexist.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .find_cuda import WITHOUT_CUDA, Cuda, print_banner

CACHED_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
"""Environment variables that CMake reads only when it configures a directory for the first time."""

# C functions by prefix, and mangled C++ names with the namespace fct or a type fct_*. shm_open and
# shm_unlink belong to the C library.
OWN_SYMBOL = re.compile(
    r"\bU ((?:(?:fc|fcd|fct|fck|fcpy|op|progress)_|shm_(?!open\b|unlink\b))\w+|_Z\w*\dfct\w*)"
)


def count_jobs() -> int:
    """Returns ``MAX_JOBS``, or else the number of processors that this process may use.

    Raises:
        SystemExit: ``MAX_JOBS`` is not a positive number.
    """
    text = os.environ.get("MAX_JOBS")
    if text:
        if not text.isdecimal() or int(text) == 0:
            raise SystemExit(f"fsdp_c: MAX_JOBS={text} is not a positive number")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def lock_build(build: Path) -> Iterator[None]:
    """Locks the folder ``build`` against a second build of the same tree."""
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"fsdp_c: waiting for another build in {build}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_program(*names: str) -> str:
    """Returns the path of the first of the programs that exists.

    ``cmake`` and ``ninja`` are scripts of the Python environment, which may not be activated.

    Raises:
        SystemExit: No program is found. The message names the remedy.
    """
    folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    for name in names:
        path = shutil.which(name, path=folders)
        if path is not None:
            return path
    raise SystemExit(
        f"fsdp_c: {names[0]} is not found: run  {sys.executable} -m pip install cmake ninja  "
        "or build with pip's build isolation"
    )


def find_compilers() -> dict[str, str]:
    """Returns ``CC`` and ``CXX``, by default gcc and g++.

    Raises:
        SystemExit: A compiler is not found. The message names the remedy.
    """
    compilers = {}
    for variable, default, language in (("CC", "gcc", "C"), ("CXX", "g++", "C++")):
        command = os.environ.get(variable) or default
        if shutil.which(shlex.split(command)[0]) is None:
            raise SystemExit(
                f"fsdp_c: the {language} compiler {command!r} is not found: install gcc and g++, "
                "or name compilers in CC and CXX"
            )
        compilers[variable] = command
    return compilers


def find_launcher(variable: str, compiler: str) -> str:
    """Returns the program that CMake starts a compiler with: the value of ``variable``, or ccache.

    A compiler that is a link to ccache, or a command with ccache, needs no launcher.
    """
    if variable in os.environ:
        return os.environ[variable]
    ccache = shutil.which("ccache")
    program = os.path.realpath(shutil.which(shlex.split(compiler)[0]) or "")
    return ccache if ccache and os.path.basename(program) != "ccache" else ""


def configure(source: Path, directory: Path, definitions: Mapping[str, str]) -> None:
    """Runs CMake, which writes build files for ninja, or for make if ninja is not installed.

    Deletes ``directory`` first if the last run of CMake failed. Also deletes it if the compilers,
    their flags, the generator or the path of the checkout have changed.

    Raises:
        SystemExit: CMake failed and has printed the reason.
    """
    compilers = find_compilers()
    environment = os.environ | compilers
    program = find_program("ninja", "make")
    generator = "Ninja" if Path(program).name == "ninja" else "Unix Makefiles"
    cached = {name: environment.get(name) for name in CACHED_VARIABLES}
    paths = {"source": str(source.resolve()), "directory": str(directory.resolve())}
    compiler_settings = json.dumps({**cached, **paths, "generator": generator})
    record = directory / "compilers.json"
    if not record.is_file() or record.read_text() != compiler_settings:
        shutil.rmtree(directory, ignore_errors=True)
    settings = {
        **definitions,
        "CMAKE_MAKE_PROGRAM": program,
        "CMAKE_C_COMPILER_LAUNCHER": find_launcher("CMAKE_C_COMPILER_LAUNCHER", compilers["CC"]),
        "CMAKE_CXX_COMPILER_LAUNCHER": find_launcher(
            "CMAKE_CXX_COMPILER_LAUNCHER", compilers["CXX"]
        ),
    }
    command = [find_program("cmake"), "-S", str(source), "-B", str(directory), "-G", generator]
    command += [f"-D{name}={value}" for name, value in settings.items()]
    if subprocess.run(command, env=environment).returncode:
        record.unlink(missing_ok=True)
        raise SystemExit("fsdp_c: CMake failed; its messages are above")
    record.write_text(compiler_settings)


def compile_targets(
    directory: Path, targets: Sequence[str], jobs: int, *, keep_going: bool = False
) -> bool:
    """Builds ``targets``. Returns whether the build succeeded; the program prints the errors.

    ``keep_going``: also builds what does not depend on a file that failed.
    """
    command = [find_program("cmake"), "--build", str(directory), "--parallel", str(jobs)]
    command += ["--target", *targets]
    if keep_going:
        command += ["--", "-k", *(["0"] if (directory / "build.ninja").exists() else [])]
    return subprocess.run(command).returncode == 0


def build(
    source: Path,
    directory: Path,
    targets: Sequence[str],
    definitions: Mapping[str, str],
    cuda: Cuda | None,
    jobs: int,
) -> bool:
    """Builds the targets in ``directory``. Returns whether they contain CUDA kernels.

    If nvcc fails, the function prints a warning and builds without CUDA kernels.

    Raises:
        SystemExit: A file does not compile. The compiler has printed the reason.
    """
    if cuda is not None:
        try:
            configure(source, directory, {**definitions, **cuda.definitions()})
            if compile_targets(directory, targets, jobs, keep_going=True):
                return True
            nvcc_failed = not (directory / "kernels_cuda.o").exists()
        except (OSError, RuntimeError) as error:
            print(f"fsdp_c: {error}", flush=True)
            nvcc_failed = True
        if not nvcc_failed:
            raise SystemExit("fsdp_c: does not compile; the messages of the compiler are above")
        print_banner(
            f"{cuda.nvcc} does not compile the CUDA kernels (its messages are above). fsdp_c is "
            "built without them: on a GPU, NVRTC compiles them at the first use. To build them "
            "now, use an nvcc that works, or name architectures in TORCH_CUDA_ARCH_LIST."
        )
    configure(source, directory, {**definitions, **WITHOUT_CUDA})
    if not compile_targets(directory, targets, jobs):
        raise SystemExit("fsdp_c: does not compile; the messages of the compiler are above")
    return False


def check_resolved(library: Path) -> None:
    """Fails the build if a function of fsdp_c is used but not defined, or if nm fails.

    The linker accepts undefined symbols in a shared object. They would fail at import or at the
    first call.

    Raises:
        SystemExit: The message has the symbols, or the output of nm.
    """
    nm = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
    if nm.returncode != 0:
        raise SystemExit(f"fsdp_c: nm cannot read the symbols of {library}: {nm.stderr.strip()}")
    missing = sorted(set(OWN_SYMBOL.findall(nm.stdout)))
    if missing:
        library.unlink()
        raise SystemExit(f"fsdp_c: used but not defined: {', '.join(missing)}")


def write_compile_commands(directory: Path, path: Path) -> None:
    """Writes the compile commands of a build to ``path``, for editors.

    CMake lists a file that includes several sources (``UNITY_BUILD``). Each of these sources gets
    an entry.
    """
    entries = []
    for entry in json.loads((directory / "compile_commands.json").read_text()):
        file = Path(entry["file"])
        sources = [entry["file"]]
        if file.parent.name == "Unity":
            sources = re.findall(r'^#include "(.+)"$', file.read_text(), re.M)
        entries += [
            {**entry, "file": source, "command": entry["command"].replace(entry["file"], source)}
            for source in sources
        ]
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(entries, indent=1))
