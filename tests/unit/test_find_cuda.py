"""``build_support.find_cuda`` selects the CUDA compiler and the GPU architectures of the kernels.

Shell scripts stand in for nvcc, so these tests need no CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from fsdp_c._runtime.nvrtc import (
    FIRST_ARCH,
    KERNEL_SOURCES,
    KERNELS,
    LARGE_BATCH_KERNELS,
    STANDARD_HEADERS,
    Nvrtc,
    find_libraries,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from build_support import find_cuda  # noqa: E402

CUDA_12_4 = """sm_50
sm_52
sm_53
sm_60
sm_61
sm_62
sm_70
sm_72
sm_75
sm_80
sm_86
sm_87
sm_89
sm_90
"""
CUDA_13_0 = "sm_75\nsm_80\nsm_86\nsm_87\nsm_88\nsm_89\nsm_90\nsm_90a\nsm_100\nsm_110\nsm_120\n"
# torch._C._cuda_getArchFlags() of 2.11.0+cu130 and of 2.6.0+cu124.
TORCH_CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
TORCH_CU124 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


@pytest.fixture
def no_arch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsets the environment variables that choose architectures."""
    monkeypatch.delenv("FSDP_C_CUDA_ARCH", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)


def write_nvcc(folder: Path, script: str) -> str:
    """Writes an executable shell script ``nvcc``. Returns its path."""
    folder.mkdir(exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}")
    nvcc.chmod(0o755)
    return str(nvcc)


def write_nvcc_with_archs(folder: Path, codes: str) -> str:
    """Writes an ``nvcc`` that prints these architectures."""
    return write_nvcc(folder, "".join(f"echo {code}\n" for code in codes.split()))


@pytest.mark.parametrize(
    "text, archs",
    [
        ("8.0", [80]),
        ("7.0;7.5;8.0+PTX", [70, 75, 80]),
        ("8.0 8.6 9.0a", [80, 86, 90]),
        ("Volta;Ampere", [70, 80, 86]),
        ("Hopper 10.0f 12.0+PTX", [90, 100, 120]),
        ("Volta+Tegra;Ampere+Tegra Blackwell+Tegra", [72, 87, 110]),
        ("Ampere+Tegra;Ampere", [80, 86, 87]),
        ("5.2;6.1", [52, 61]),
        ("Maxwell", []),
        ("native", []),
    ],
)
def test_parse_arch_list_parses_torch_cuda_arch_list(text: str, archs: list[int]) -> None:
    assert find_cuda.parse_arch_list(text) == archs


def test_arch_flags_of_torch_and_gpu_codes_of_nvcc_are_parsed() -> None:
    assert find_cuda.parse_arch_flags(TORCH_CU130) == [75, 80, 86, 90, 100, 120]
    assert find_cuda.parse_arch_flags("") == []
    assert find_cuda.parse_gpu_codes(CUDA_13_0) == [75, 80, 86, 87, 88, 89, 90, 100, 110, 120]


def test_choose_archs_keeps_archs_of_torch_that_nvcc_and_kernels_support() -> None:
    choose, parse = find_cuda.choose_archs, find_cuda.parse_gpu_codes
    cu124 = find_cuda.parse_arch_flags(TORCH_CU124)
    assert choose(cu124, parse(CUDA_12_4)) == [70, 75, 80, 86, 90]  # the kernels need 70
    assert choose(find_cuda.parse_arch_flags(TORCH_CU130), parse(CUDA_12_4)) == [75, 80, 86, 90]
    assert choose(cu124, parse(CUDA_13_0)) == [75, 80, 86, 90]  # CUDA 13 dropped 70


def test_choose_archs_without_usable_requested_arch_returns_first_of_each_generation() -> None:
    assert find_cuda.choose_archs([], find_cuda.parse_gpu_codes(CUDA_12_4)) == [70, 80, 90]
    assert find_cuda.choose_archs([50], find_cuda.parse_gpu_codes(CUDA_13_0)) == [
        75,
        80,
        90,
        100,
        110,
        120,
    ]


def test_choose_archs_without_usable_arch_returns_empty_list() -> None:
    assert find_cuda.choose_archs([80], [50, 60]) == []


def test_nvcc_options_add_ptx_of_newest_arch() -> None:
    assert find_cuda.format_options([70, 90]) == [
        "-gencode=arch=compute_70,code=sm_70",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_arch_variables_take_precedence_over_archs_of_torch(
    tmp_path: Path,
    no_arch_variables: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvcc = write_nvcc_with_archs(tmp_path, CUDA_12_4)
    assert find_cuda.find_options(nvcc, TORCH_CU130) == find_cuda.format_options([75, 80, 86, 90])
    output = capsys.readouterr()
    assert "no CUDA kernels for sm_100, sm_120" in output.err and output.out == ""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    assert find_cuda.find_options(nvcc, TORCH_CU130) == find_cuda.format_options([80, 90])
    monkeypatch.setenv("FSDP_C_CUDA_ARCH", "native")
    assert find_cuda.find_options(nvcc, TORCH_CU130) == ["-arch=native"]


def test_nvcc_without_supported_arch_raises(tmp_path: Path, no_arch_variables: None) -> None:
    with pytest.raises(RuntimeError, match="supports no architecture from sm_70 on"):
        find_cuda.find_options(write_nvcc_with_archs(tmp_path, "sm_50 sm_60"), TORCH_CU124)


def test_nvcc_of_cuda_home_is_found_if_that_of_path_has_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FSDP_C_NO_CUDA", raising=False)
    for name, release in (("path", "11.5"), ("home/bin", "12.8")):
        (tmp_path / name).mkdir(parents=True)
        write_nvcc(tmp_path / name, f"echo 'Cuda compilation tools, release {release}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin:/bin")
    home = str(tmp_path / "home")
    assert find_cuda.find_nvcc("12.8", home) == f"{home}/bin/nvcc"
    assert capsys.readouterr().err == ""
    assert find_cuda.find_nvcc("13.0", home) is None
    assert "is not for CUDA 13.0" in capsys.readouterr().err


def test_find_nvcc_accepts_only_major_release_of_torch_unless_cuda_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FSDP_C_NO_CUDA", raising=False)
    nvcc = write_nvcc(tmp_path, "echo 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    assert find_cuda.find_nvcc("12.8", None) == nvcc
    assert find_cuda.find_nvcc(None, None) is None  # torch is built without CUDA
    assert capsys.readouterr().err == ""
    assert find_cuda.find_nvcc("13.0", None) is None
    assert "is not for CUDA 13.0" in capsys.readouterr().err
    monkeypatch.setenv("FSDP_C_NO_CUDA", "1")
    assert find_cuda.find_nvcc("12.8", None) is None


def test_find_nvcc_ignores_nvcc_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FSDP_C_NO_CUDA", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin:/bin")
    nvcc = Path(write_nvcc(tmp_path, "exit 1\n"))
    for script in (nvcc.read_text(), "#!/missing/interpreter\n"):
        nvcc.write_text(script)
        assert find_cuda.find_nvcc("12.8", None) is None
        assert "is not for CUDA 12.8" in capsys.readouterr().err


# ---- NVRTC ---------------------------------------------------------------------------------------

LIBRARIES = [Path(path) for path in os.environ.get("FSDP_C_NVRTC", "").split(":") if path]


@pytest.mark.skipif(
    not (LIBRARIES or find_libraries()), reason="no NVRTC: set FSDP_C_NVRTC=LIBRARY:..."
)
def test_device_code_compiles_with_nvrtc_for_first_and_newest_arch() -> None:
    """pip's packages of CUDA 12 contain NVRTC, the device compiler as a library, but no nvcc."""
    for library in LIBRARIES or find_libraries():
        nvrtc = Nvrtc(library)
        archs = nvrtc.list_architectures()
        supported = [arch for arch in archs if arch >= FIRST_ARCH]
        for arch in {supported[0], supported[-1]}:
            code = nvrtc.compile(arch)
            assert all(name.encode() in code for name in KERNELS)
            large = [name.encode() in code for name in LARGE_BATCH_KERNELS]
            assert large == [int(nvrtc.version.split(".")[0]) >= 13] * 2
        if archs[0] < FIRST_ARCH:  # nvcc -arch=all-major fails for the same reason
            with pytest.raises(RuntimeError, match="__grid_constant__ annotation is only allowed"):
                nvrtc.compile(archs[0])


def test_nvrtc_sources_contain_all_included_headers() -> None:
    included = set()
    for name in [*KERNEL_SOURCES, "rtc.cuh"]:
        text = (ROOT / "csrc/kernels" / name).read_text()
        included |= set(re.findall(r'^ *#include [<"](.+)[>"]', text, re.M))
    assert included <= {*KERNEL_SOURCES, *STANDARD_HEADERS}


def test_first_arch_of_nvcc_and_nvrtc_is_the_same() -> None:
    assert FIRST_ARCH == find_cuda.FIRST_ARCH
