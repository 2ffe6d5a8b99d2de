"""Builds csrc/kernels as a separate shared library and calls it through ctypes, without torch.

nvcc compiles it for the GPU. Elsewhere a host compiler compiles the same source against
tests/c/fake_cuda, so that the callers are tested without a GPU. kernels.h defines the structs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import BUILT, ON_CUDA, ROOT

KERNELS = ROOT / "csrc/kernels"
MEMORY = Path(__file__).with_name("kernel_memory.cu")
HEADER = (KERNELS / "kernels.h").read_text()
ARCH = os.environ.get("FSDP_C_CUDA_ARCH", "sm_90")

C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "fck_dtype": ctypes.c_int32,
    "size_t": ctypes.c_size_t,
}


def _type_of(declaration: str) -> Any:
    return ctypes.c_void_p if "*" in declaration else C_TYPES[declaration.split()[-2]]


def _name_of(declaration: str) -> str:
    match = re.search(r"(\w+)$", declaration)
    assert match is not None, declaration
    return match[1]


def struct(name: str) -> Any:
    """Returns a ctypes struct with the fields that kernels.h declares."""
    match = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.S)
    assert match is not None, name
    lines = [line.strip() for line in match[1].split(";") if line.strip()]
    fields = [(_name_of(line), _type_of(line)) for line in lines]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Segment, Slot, Gradient, Range = (
    struct(f"fck_{name}") for name in ("segment", "slot", "gradient", "range")
)


def _backend_members() -> list[tuple[str, list[Any]]]:
    """Returns the functions of fck_backend with their argument types."""
    match = re.search(r"typedef struct fck_backend \{(.*?)\} fck_backend;", HEADER, re.S)
    assert match is not None
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.S)
    members = re.findall(r"\(\*(\w+)\)\((.*?)\);", body, re.S)
    return [
        (name, [_type_of(declaration) for declaration in arguments.split(",")])
        for name, arguments in members
    ]


class Backend:
    """The kernels of one fck_backend. A failed launch raises RuntimeError."""

    def __init__(self, address: int) -> None:
        members = _backend_members()
        table = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        for index, (name, arguments) in enumerate(members, 1):  # the first member is the name
            if table[index]:
                function = ctypes.CFUNCTYPE(ctypes.c_char_p, *arguments)(table[index])
                setattr(self, f"_{name}", function)

    def _call(self, name: str, *arguments: Any) -> None:
        failure = getattr(self, f"_{name}")(*arguments)
        if failure is not None:
            raise RuntimeError(f"{name}: {failure.decode()}")

    def pack(self, segments: Sequence[Any], stream: int = 0) -> None:
        self._call("pack", _array(Segment, segments), len(segments), stream)

    def unpack(
        self, gathered: int, rank_bytes: int, world: int, slots: Sequence[Any], stream: int = 0
    ) -> None:
        table = _array(Slot, slots)
        self._call("unpack", gathered, rank_bytes, world, table, len(slots), stream)

    def pack_gradients(
        self,
        gradients: Sequence[Any],
        world: int,
        to: int,
        rank_numel: int,
        dtype: int,
        stream: int = 0,
    ) -> None:
        table, count = _array(Gradient, gradients), len(gradients)
        self._call("pack_gradients", table, count, world, to, rank_numel, dtype, stream)

    def add_checksums(self, ranges: Sequence[Any], total: int, stream: int = 0) -> None:
        """Adds to the 64-bit sum at the address ``total``."""
        self._call("add_checksums", _array(Range, ranges), len(ranges), total, stream)


def _array(kind: Any, items: Sequence[Any]) -> Any:
    descriptors = items if isinstance(items, ctypes.Array) else array(kind, items)
    return ctypes.cast(descriptors, ctypes.c_void_p)


def array(kind: Any, items: Sequence[Any]) -> Any:
    """Returns an array of descriptors that several launches can share."""
    return (kind * len(items))(*items)


# ---- the library ---------------------------------------------------------------------------------


def _commands(target: Path) -> list[list[str]]:
    """Returns the commands that compile the library."""
    objects = {name: target.with_suffix(f".{name}.o") for name in ("kernels_cpu", "checksum_cpu")}
    c_compiler = shlex.split(os.environ.get("CC") or "gcc")
    sources = [str(KERNELS / "kernels_cuda.cu"), str(KERNELS / "kernels_jit.cpp"), str(MEMORY)]
    if ON_CUDA:
        options = [f"-arch={ARCH}", "-Xcompiler", "-fPIC"]
        cuda = ["nvcc", "-shared", "-O3", "-DNDEBUG", "-lineinfo", *options]
    else:
        fake = ["-Wno-unknown-pragmas", f"-I{ROOT}/tests/c/fake_cuda", "-DGPU_CHECK_ON_HOST"]
        cuda = ["g++", "-shared", "-O1", "-fPIC", *fake, "-x", "c++"]
    include = f"-I{ROOT}/csrc"
    linked = [*([] if ON_CUDA else ["-x", "none"]), *map(str, objects.values())]
    c_options = ["-std=c11", "-O2", "-fPIC", include]
    return [
        *(
            [*c_compiler, *c_options, "-c", f"{KERNELS}/{name}.c", "-o", str(path)]
            for name, path in objects.items()
        ),
        [*cuda, "-std=c++17", include, *sources, *linked, "-o", str(target.with_suffix(".new"))],
    ]


def build_library() -> Path:
    """Returns the path of the library. Compiles it if a source or a command changed."""
    files = [*sorted(KERNELS.iterdir()), MEMORY]
    text = "".join(path.read_text() for path in files) + str(_commands(Path("any.so")))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    target = BUILT / f"kernels-{'cuda' if ON_CUDA else 'host'}-{digest}.so"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        for command in _commands(target):
            print(shlex.join(command), flush=True)
            subprocess.run(command, check=True)
        target.with_suffix(".new").rename(target)
    return target


@functools.cache
def load() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build_library()))
    loaded.device_allocate.restype = ctypes.c_void_p
    for function in (loaded.fck_cpu, loaded.fck_cuda, loaded.fck_jit):
        function.restype = ctypes.c_void_p
    return loaded


@functools.cache
def cpu() -> Backend:
    return Backend(load().fck_cpu())


@functools.cache
def cuda() -> Backend:
    return Backend(load().fck_cuda())


def jit(functions: dict[str, int]) -> tuple[Backend, int]:
    """Returns a Backend of kernels that NVRTC compiled, and the address of its fck_backend.

    ``functions``: the result of ``fsdp_c._runtime.jit.build_kernels``, whose keys are the fields of
    fck_jit_functions.
    """
    header = (KERNELS / "kernels_jit.h").read_text()
    text = header.partition("typedef struct fck_jit_functions {")[2].partition("}")[0]
    fields = re.findall(r"(\w+);", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    assert sorted(fields) == sorted(functions), (fields, functions)
    values = (ctypes.c_void_p * len(fields))(*(functions[field] for field in fields))
    address = load().fck_jit(values)
    return Backend(address), address
