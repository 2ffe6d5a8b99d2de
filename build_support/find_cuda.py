"""Selects the CUDA compiler of the kernels, the architectures and the CUDA runtime.

A missing compiler is not an error. ``find_nvcc`` prints the reason, and ``setup.py`` builds without
CUDA kernels. ``setup.py`` also builds without them if the compiler fails. On a GPU, fsdp_c then
compiles the kernels with NVRTC at the first use, or uses torch's foreach operations
(``csrc/core/foreach.c``).

``python -m build_support.find_cuda [NVCC]`` prints the architecture options for NVCC.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FIRST_ARCH = 70
"""The first architecture that supports ``__grid_constant__`` kernel parameters."""

FAMILIES = {
    "Volta+Tegra": "7.2",
    "Ampere+Tegra": "8.7",
    "Blackwell+Tegra": "11.0",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}
"""Names of architectures in ``TORCH_CUDA_ARCH_LIST``. Older families have no kernels.

The names with ``+`` are first, because the names are replaced in this order.
"""


def print_banner(text: str) -> None:
    """Prints a message between bars, to stand out from the output of compilers."""
    bar = "!" * 100
    print(f"{bar}\n!! fsdp_c: {text}\n{bar}", file=sys.stderr, flush=True)


def parse_gpu_codes(listing: str) -> list[int]:
    """Parses the output of ``nvcc --list-gpu-code``: 90 for sm_90. Ignores sm_90a."""
    return sorted({int(code) for code in re.findall(r"\bsm_(\d+)\b", listing)})


def parse_arch_list(text: str) -> list[int]:
    """Parses ``TORCH_CUDA_ARCH_LIST``: "7.0;8.6+PTX Hopper" is 70, 86, 90.

    ``+PTX`` is ignored: the newest architecture always gets PTX. The suffixes of 9.0a and 10.0f
    are ignored too.
    """
    for family, archs in FAMILIES.items():
        text = re.sub(rf"\b{re.escape(family)}\b", archs, text)
    return sorted({int(a + b) for a, b in re.findall(r"\b(\d+)\.(\d)[af]?(?:\+PTX)?(?!\w)", text)})


def parse_arch_flags(flags: str) -> list[int]:
    """Parses torch's architecture flags: 90 for sm_90 or compute_90."""
    return sorted({int(code) for code in re.findall(r"\b(?:sm|compute)_(\d+)[af]?\b", flags)})


def choose_archs(requested: Iterable[int], supported: Iterable[int]) -> list[int]:
    """Returns the requested architectures that both nvcc and the kernels support.

    If there are none, returns the first supported architecture of each generation.
    """
    usable = [arch for arch in sorted(set(supported)) if arch >= FIRST_ARCH]
    chosen = [arch for arch in usable if arch in set(requested)]
    return chosen or [
        arch for arch in usable if arch == min(a for a in usable if a // 10 == arch // 10)
    ]


def format_options(archs: list[int]) -> list[str]:
    """Returns nvcc's options: code for each architecture, and PTX for later architectures."""
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = archs[-1]
    return [*codes, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def find_options(nvcc: str, torch_flags: str) -> list[str]:
    """Returns the architecture options for this ``nvcc``.

    ``FSDP_C_CUDA_ARCH`` sets nvcc's ``-arch``. Without it, ``TORCH_CUDA_ARCH_LIST`` selects the
    architectures. Without both, torch's architecture flags select them.

    Raises:
        RuntimeError: ``nvcc`` supports no architecture that the kernels support.
        OSError: ``nvcc`` cannot be started.
    """
    if arch := os.environ.get("FSDP_C_CUDA_ARCH"):
        return [f"-arch={arch}"]
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    requested = parse_arch_list(arch_list) if arch_list else parse_arch_flags(torch_flags)
    run = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True)
    supported = parse_gpu_codes(run.stdout)
    chosen = choose_archs(requested, supported)
    if not chosen:
        raise RuntimeError(f"{nvcc} supports no architecture from sm_{FIRST_ARCH} on: {supported}")
    excluded = [f"sm_{arch}" for arch in requested if arch not in chosen]
    if excluded:
        print(
            f"fsdp_c: no CUDA kernels for {', '.join(excluded)}: {nvcc} or the kernels do not "
            "support them",
            file=sys.stderr,  # `make cuda-check` reads the options from standard output
        )
    return format_options(chosen)


def find_nvcc(torch_cuda: str | None, home: str | None) -> str | None:
    """Returns an nvcc that can build kernels for torch with CUDA ``torch_cuda``, or None.

    The extension links the CUDA runtime dynamically and uses the copy that torch has loaded.
    Therefore nvcc and torch need the same major version.
    """
    if torch_cuda is None or os.environ.get("FSDP_C_NO_CUDA", "") not in ("", "0"):
        return None
    candidates = (shutil.which("nvcc"), shutil.which(f"{home}/bin/nvcc") if home else None)
    found = [nvcc for nvcc in dict.fromkeys(candidates) if nvcc is not None]
    if not found:
        print_banner("torch has CUDA but nvcc is not found; building without CUDA kernels")
        return None
    for nvcc in found:
        try:
            run = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        except OSError:
            continue
        release = re.search(r"release (\d+)\.", run.stdout)
        major = release[1] if run.returncode == 0 and release is not None else ""
        if major == torch_cuda.split(".")[0]:
            return nvcc
    names = " and ".join(found)
    print_banner(f"{names} is not for CUDA {torch_cuda}; building without CUDA kernels")
    return None


def find_cudart(nvcc: str, torch_cuda: str, torch_file: str, home: str | None) -> str | None:
    """Returns the CUDA runtime to link with: the copy that torch loads, else one of a toolkit.

    The function searches for files, because the linker does not find torch's copy by a library
    name: the file name has a version. The function searches several toolkits, because ``nvcc`` may
    be a link or a script in a folder without libraries.
    """
    major = torch_cuda.split(".")[0]
    packages = Path(torch_file).resolve().parents[1] / "nvidia"
    toolkits = [str(Path(nvcc).resolve().parents[1]), home, "/usr/local/cuda"]
    folders = [*packages.glob("cu*/lib"), packages / "cuda_runtime/lib"]
    folders += [Path(kit) / lib for kit in toolkits if kit for lib in ("lib64", "lib")]
    for folder in folders:
        for library in sorted(folder.glob(f"libcudart.so.{major}*")):
            return str(library)
    print_banner(f"no libcudart.so.{major} found; building without CUDA kernels")
    return None


@dataclass(frozen=True)
class Cuda:
    """The compiler, the runtime and the architectures of the CUDA kernels.

    Attributes:
        nvcc: The path of the compiler.
        cudart: The path of the CUDA runtime.
        torch_flags: The architectures that torch was built for.
    """

    nvcc: str
    cudart: str
    torch_flags: str

    def definitions(self) -> dict[str, str]:
        """Returns CMake's definitions. Raises the exceptions of :func:`find_options`."""
        return {
            "FSDP_C_NVCC": self.nvcc,
            "FSDP_C_NVCC_OPTIONS": ";".join(find_options(self.nvcc, self.torch_flags)),
            "FSDP_C_CUDART": self.cudart,
        }


WITHOUT_CUDA = dict.fromkeys(["FSDP_C_NVCC", "FSDP_C_NVCC_OPTIONS", "FSDP_C_CUDART"], "")
"""CMake's definitions of a build without CUDA kernels."""


def find() -> Cuda | None:
    """Returns the compiler and the runtime for the installed torch, or None."""
    import torch
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    nvcc = find_nvcc(torch.version.cuda, home)
    if nvcc is None or torch.version.cuda is None:
        return None
    cudart = find_cudart(nvcc, torch.version.cuda, torch.__file__, home)
    return Cuda(nvcc, cudart, torch._C._cuda_getArchFlags() or "") if cudart else None


if __name__ == "__main__":
    print(*find_options(sys.argv[1] if len(sys.argv) > 1 else "nvcc", ""))
