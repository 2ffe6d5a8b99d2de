"""Interface to NVRTC, NVIDIA's compiler library, which torch's CUDA wheels contain.

NVRTC compiles the device code of the CUDA kernels on systems without nvcc.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "kernel_sources"
SOURCE_FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "csrc/kernels"
"""The folder of the kernel sources: in the installed package, or else in the repository."""
FIRST_ARCH = 70
"""The oldest supported architecture: sm_70."""
STANDARD_HEADERS = ("stdint.h", "stddef.h", "string.h", "cuda_fp16.h", "cuda_bf16.h")
"""Headers that rtc.cuh replaces when NVRTC compiles."""
KERNEL_SOURCES = ("kernels.h", "index.h", "cast.h", "batch.cuh", "lines.cuh", "checksums.cuh")
DEVICE_CODE = ("lines.cuh", "checksums.cuh")
"""The files that define kernels."""
KERNELS = ("fck_move_lines", "fck_cast_lines", "fck_add_checksums")
LARGE_BATCH_KERNELS = ("fck_move_many_lines", "fck_cast_many_lines")
"""Kernels for large batches (``batch.cuh``). Only NVRTC 13 and later compile them."""


class Nvrtc:
    """A loaded NVRTC library, such as ``libnvrtc.so.12``."""

    def __init__(self, library: str | Path) -> None:
        # NVRTC loads its builtins library by name. The folder of the wheel is not on the loader's
        # search path.
        for builtins in Path(library).parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins))
        self.lib = ctypes.CDLL(str(library))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def _check(self, code: int) -> None:
        if code != 0:
            self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(self.lib.nvrtcGetErrorString(code).decode())

    def list_architectures(self) -> list[int]:
        """Returns the architectures that this NVRTC supports, such as 90."""
        count = ctypes.c_int()
        self._check(self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self.lib.nvrtcGetSupportedArchs(numbers))
        return sorted(numbers)

    def compile(self, arch: int) -> bytes:
        """Compiles the kernels for sm_``arch`` to a cubin.

        Raises:
            RuntimeError: The compilation failed. The message is the compiler's log.
        """
        names = [*STANDARD_HEADERS, *KERNEL_SOURCES]
        texts = [
            (SOURCE_FOLDER / ("rtc.cuh" if n in STANDARD_HEADERS else n)).read_bytes()
            for n in names
        ]
        headers = (ctypes.c_char_p * len(names))(*texts)
        includes = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        program = ctypes.c_void_p()
        source = "".join(f'#include "{name}"\n' for name in DEVICE_CODE).encode()
        self._check(
            self.lib.nvrtcCreateProgram(
                ctypes.byref(program), source, b"kernels.cu", len(names), headers, includes
            )
        )
        try:
            # The headers also declare host functions, which the kernels do not call.
            options = [b"--std=c++17", b"--device-as-default-execution-space"]
            options += [f"--gpu-architecture=sm_{arch}".encode()]
            option_array = (ctypes.c_char_p * len(options))(*options)
            if self.lib.nvrtcCompileProgram(program, len(options), option_array) != 0:
                raise RuntimeError(self._get_log(program))
            return self._get_output(program, "CUBIN")
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))

    def compile_cached(self, arch: int) -> bytes:
        """Returns the cubin for sm_``arch`` from the user's cache, or compiles and stores it.

        Several processes and threads may call it at once.
        """
        texts = [(SOURCE_FOLDER / name).read_bytes() for name in ("rtc.cuh", *KERNEL_SOURCES)]
        key = hashlib.sha256(b"\0".join([*texts, f"{self.version} {arch}".encode()])).hexdigest()
        folder = get_cache_folder()
        if folder is None:
            return self.compile(arch)
        path = folder / f"sm_{arch}-{key[:32]}.cubin"
        try:
            digest, code = path.read_bytes().split(b"\n", 1)
            if digest == hashlib.sha256(code).hexdigest().encode():
                return code
        except (OSError, ValueError):
            pass  # the file is missing or incomplete
        code = self.compile(arch)
        with contextlib.suppress(OSError):  # a cache that cannot be written is not used
            _write_file(path, hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
        return code

    def _get_output(self, program: ctypes.c_void_p, output: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.lib, f"nvrtcGet{output}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.lib, f"nvrtcGet{output}")(program, text))
        return text.raw

    def _get_log(self, program: ctypes.c_void_p) -> str:
        return self._get_output(program, "ProgramLog").rstrip(b"\0").decode()


def _write_file(path: Path, content: bytes) -> None:
    """Writes a temporary file with a random name, then renames it to ``path``.

    Readers therefore find a complete file. Processes in containers that share the folder may have
    equal process ids and host names.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def get_cache_folder() -> Path | None:
    """Returns the folder of compiled kernels: fsdp_c in XDG_CACHE_HOME or in ~/.cache.

    Returns None for a user without a home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "fsdp_c" if not base.startswith("~") else None


def find_libraries() -> list[Path]:
    """Returns the NVRTC libraries that pip has installed beside torch.

    Libraries of the CUDA release of torch come first.
    """
    import torch

    packages = Path(torch.__file__).resolve().parents[1] / "nvidia"
    paths = [*packages.glob("*/lib/libnvrtc.so.*"), *packages.glob("*/*/lib/libnvrtc.so.*")]
    paths = sorted(path for path in paths if re.search(r"\.so\.\d+$", path.name))
    release = f".so.{(torch.version.cuda or '').split('.')[0]}"
    return sorted(paths, key=lambda path: not path.name.endswith(release))
