"""Builds the simulated CUDA device for the torch of this interpreter: ``make cuda-sim``.

The substitutes of libcudart, libcuda, libnccl, libcublas and libcublasLt have the names, versions
and symbols of the libraries that pip has installed with torch. Functions that tests/cuda/runtime
does not implement are generated: they return "not supported" or, in libraries of computations,
success. ``stub_runtime.py`` loads the libraries in place of NVIDIA's.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests/cuda/runtime"
KERNEL_HEADERS = tuple(
    ROOT / "csrc/kernels" / name
    for name in ("batch.cuh", "cast.h", "checksums.cuh", "index.h", "kernels.h", "lines.cuh")
)
HEADERS = (
    *sorted(SOURCES.glob("*.h")),
    *sorted((ROOT / "tests/harness/simulation").glob("*.h")),
    ROOT / "tests/c/fake_cuda/cuda_runtime.h",
)
STATE = ("clock", "stream", "executor", "capture", "memory", "control")
"""Sources of the library that the substitutes share."""
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra")
GENERATED_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


@dataclass(frozen=True)
class Substitute:
    """A library of NVIDIA, and how its substitute is built."""

    name: str
    """File name without "lib" and version."""
    sources: tuple[str, ...]
    """Sources in tests/cuda/runtime."""
    fallback: str = "sim_not_supported"
    """Function that the generated functions call."""


SUBSTITUTES = (
    Substitute("cudart", ("cudart", "graphs")),
    Substitute("cuda", ("driver", "kernels_on_host")),
    Substitute("nccl", ("nccl", "communicator", "reduction")),
    Substitute("cublas", ("cublas",), "sim_without_effect"),
    Substitute("cublasLt", ("cublas",), "sim_without_effect"),
    Substitute("cupti", ("cupti",)),
)


def find_site() -> Path | None:
    """Returns the folder that contains torch, or None if torch is missing or has no CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    torch = Path(spec.origin).parent
    return torch.parent if (torch / "lib/libtorch_cuda.so").exists() else None


def missing() -> str | None:
    """Returns the reason why the device cannot be built here, or None."""
    site = find_site()
    if site is None:
        return "torch was built without CUDA: run  make env-releases RELEASES=2.15.0"
    if not include_folders(site):
        return "the headers of CUDA are missing: install nvcc"
    if not find_library(site, "cudart"):
        return "the CUDA libraries of torch's wheel are not installed"
    return None


def find_library(site: Path, name: str) -> Path | None:
    """Returns NVIDIA's library of this name that pip has installed."""
    pattern = f"lib{name}.so.*"
    found = [*site.glob(f"nvidia/*/lib/{pattern}"), *site.glob(f"nvidia/*/*/lib/{pattern}")]
    return next((path for path in sorted(found) if re.search(r"\.so\.\d+$", path.name)), None)


def include_folders(site: Path) -> list[Path]:
    """Returns the folders of CUDA headers: of the wheels, and of nvcc, which has `crt`."""
    nvcc = shutil.which("nvcc")
    toolkits = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    toolkits.append(Path("/usr/local/cuda/include"))
    toolkits = [path for path in toolkits if (path / "crt/host_defines.h").exists()]
    wheels = [path.parent for path in site.glob("nvidia/**/cuda_runtime_api.h")]
    if not any((path / "crt/host_defines.h").exists() for path in [*wheels, *toolkits]):
        return []
    # The wheels of CUDA 12 have a folder for each library.
    libraries = [
        path.parent
        for name in ("nccl.h", "cublasLt.h", "cupti.h")
        for path in site.glob(f"nvidia/**/{name}")
    ]
    return [*dict.fromkeys([*wheels, *libraries]), *toolkits[:1]]


def build() -> Path:
    """Returns the folder with the built libraries. Rebuilds after a change of sources or torch."""
    reason = missing()
    if reason is not None:
        raise RuntimeError(f"cuda-sim: {reason}")
    site = find_site()
    assert site is not None
    folder = ROOT / "build/cuda-sim" / _digest(str(site) + (site / "torch/version.py").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build_all(site, folder)
    return folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_current(target: Path, *sources: Path) -> bool:
    """Returns whether ``target`` was built from ``sources``.

    If not, removes it and stores the digest of ``sources``. The caller must then build it.
    """
    texts = [*FLAGS, *(path.read_text() for path in (*sources, *HEADERS))]
    stamp, digest = target.with_name(f".{target.name}.digest"), _digest("".join(texts))
    if target.exists() and stamp.exists() and stamp.read_text() == digest:
        return True
    target.unlink(missing_ok=True)
    stamp.write_text(digest)
    return False


def _build_all(site: Path, folder: Path) -> None:
    includes = [f"-I{path}" for path in (SOURCES, ROOT / "csrc")]
    includes += [word for path in include_folders(site) for word in ("-isystem", str(path))]
    state = folder / "libcuda_sim.so"
    sources = [SOURCES / f"{name}.cpp" for name in STATE]
    if not _is_current(state, *sources):
        _compile(*FLAGS, *includes, "-shared", *map(str, sources), "-ldl", "-o", str(state))
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or 2)) as pool:
        jobs = [pool.submit(_build_substitute, site, folder, s, includes) for s in SUBSTITUTES]
        jobs.append(pool.submit(_build_observer, site, folder))
        for job in jobs:
            job.result()


def _build_substitute(site: Path, folder: Path, library: Substitute, includes: list[str]) -> None:
    real = find_library(site, library.name)
    file = real.name if real is not None else f"lib{library.name}.so.1"
    sources = [SOURCES / f"{name}.cpp" for name in library.sources]
    if _is_current(folder / file, *sources, *KERNEL_HEADERS):
        return
    names, version = _symbols(real) if real is not None else (_driver_functions(site), "")
    objects = [folder / f"{library.name}-{path.stem}.o" for path in sources]
    for source, compiled in zip(sources, objects, strict=True):
        _compile(*FLAGS, *includes, "-c", str(source), "-o", str(compiled))
    symbols = [pair for path in objects for pair in _read_symbols(path, "--defined-only")]
    implemented = {name for name, _ in symbols}
    generated = folder / f"{library.name}_generated.cpp"
    lines = [
        f'long {n}() {{ return {library.fallback}("{n}"); }}' for n in sorted(names - implemented)
    ]
    declaration = f"int {library.fallback}(const char *);"
    generated.write_text("\n".join(['extern "C" {', declaration, *lines, "}", ""]))
    options = ["-shared", f"-Wl,-soname,{file}", f"-L{folder}", "-Wl,-rpath,$ORIGIN"]
    if version:
        script = folder / f"{library.name}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    inputs = [*map(str, objects), str(generated)]
    _compile(*GENERATED_FLAGS, *inputs, *options, "-lcuda_sim", "-ldl", "-o", str(folder / file))


def _build_observer(site: Path, folder: Path) -> None:
    torch = site / "torch"
    options = [f"-I{SOURCES}", "-isystem", str(torch / "include"), f"-L{folder}"]
    options += ["-Wl,-rpath,$ORIGIN", f"-L{torch / 'lib'}", "-shared"]
    options.append("-Wl,--unresolved-symbols=ignore-all")
    sources = [SOURCES / "operators.cpp", SOURCES / "operators_on_host.cpp"]
    target = folder / "libcuda_sim_operators.so"
    libraries = ["-lcuda_sim", "-lc10", "-ltorch_cpu"]
    if not _is_current(target, *sources):
        _compile(*FLAGS, "-O1", *map(str, sources), *options, *libraries, "-o", str(target))


def _read_symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Returns the name and kind of the symbols of a library (with -D) or object."""
    output = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True)
    fields = [line.split() for line in output.stdout.splitlines()]
    return [(f[-1], f[-2]) for f in fields if len(f) >= 2]


def _symbols(real: Path) -> tuple[set[str], str]:
    """Returns the functions of a library, and the version of its symbols or an empty string."""
    names, version = set(), ""
    for symbol, kind in _read_symbols(real, "-D", "--defined-only"):
        name, _, suffix = symbol.partition("@@")
        if kind in "TWi":
            names.add(name)
            version = suffix or version
    return names, version


def _driver_functions(site: Path) -> set[str]:
    """Returns the functions of the driver, which no wheel contains, from its header."""
    header = next(site.glob("nvidia/**/cuda.h"), None) or include_folders(site)[-1] / "cuda.h"
    text = header.read_text()
    names = set(re.findall(r"^CUresult CUDAAPI (cu\w+)\(", text, re.MULTILINE))
    return names | set(re.findall(r"#define cu\w+\s+(cu\w+)$", text, re.MULTILINE))


def _compile(*arguments: str) -> None:
    result = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(arguments)}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    if (why := missing()) is not None:
        print(f"cuda-sim: skipped, {why}")
        sys.exit(0)
    begin = time.perf_counter()
    print(f"cuda-sim: {build()}, after {time.perf_counter() - begin:.1f} s")
