"""Checks that NVRTC compiles the device code of the CUDA kernels for each architecture from sm_70.

``python tests/harness/nvrtc_check.py LIBRARY...`` takes NVRTC libraries; `make cuda-check` runs it.
pip offers NVRTC for every CUDA release (nvidia-cuda-nvrtc-cu12, ...), and nvcc for some only.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    # Loads the file without the fsdp_c package, whose import needs torch.
    path = Path(__file__).resolve().parents[2] / "fsdp_c/_runtime/nvrtc.py"
    spec = importlib.util.spec_from_file_location("nvrtc", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for library in sys.argv[1:]:
        nvrtc = module.Nvrtc(library)
        archs = [arch for arch in nvrtc.list_architectures() if arch >= module.FIRST_ARCH]
        for arch in archs:
            code = nvrtc.compile(arch)
            assert all(name.encode() in code for name in module.KERNELS)
            large = [name.encode() in code for name in module.LARGE_BATCH_KERNELS]
            assert large == [int(nvrtc.version.split(".")[0]) >= 13] * 2
        print(f"cuda-check: lines.cuh compiles with NVRTC {nvrtc.version} for {archs}")


if __name__ == "__main__":
    main()
