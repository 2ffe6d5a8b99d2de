"""Loading and launching of CUDA kernels that NVRTC compiled, without a GPU.

tests/c/fake_cuda/driver.cpp replaces the CUDA driver: it runs the kernels' source on the CPU and
counts launches.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_launches import CASES, train_case
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c import _C
from fsdp_c._runtime import jit, kernels, nvrtc
from fsdp_c._runtime.nvrtc import Nvrtc, find_libraries, get_cache_folder

ROOT = Path(__file__).resolve().parents[2]
CODE = b"\x7fELF placeholder"  # the fake driver checks only the first four bytes

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compiles the fake driver and loads it."""
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    folder = ROOT / "tests/c/fake_cuda"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{folder}", f"-I{ROOT}/csrc"]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    completed = subprocess.run(
        [*command, "-Wno-unknown-pragmas", str(folder / "driver.cpp"), "-o", str(library)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture
def jit_driver(driver: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Makes fsdp_c use the NVRTC kernels, run by the fake driver, for CPU tensors."""
    if _C.CUDA_KERNELS:
        pytest.skip("built with nvcc, whose kernels take precedence")
    _C.use_jit(**jit.load_kernels(driver, CODE))
    _C._testing.simulate_kernels(_C._testing.kernels(1))  # 1: DeviceType.CUDA
    _C._testing.hide_kernels(True)
    driver.take_launches()
    try:
        yield driver
    finally:
        _C._testing.hide_kernels(False)
        _C._testing.simulate_kernels(None)
        _C.use_jit()


@pytest.mark.torch("2.13")  # the fake group of older releases does not write reduced tensors
@pytest.mark.parametrize("name", CASES)
def test_nvrtc_kernels_give_gradients_bit_equal_to_torch(
    name: str, fake_group: int, jit_driver: ctypes.CDLL
) -> None:
    _, expected = train_case(torch_fully_shard, name)
    assert jit_driver.take_launches() == 0
    operators, grads = train_case(fsdp_c.fully_shard, name)
    assert jit_driver.take_launches() > 0
    assert operators["aten::_foreach_copy_"] == 0
    for grad, torch_grad in zip(grads, expected, strict=True):
        assert torch.equal(grad, torch_grad)


def test_shards_on_dim_1_need_as_many_kernel_launches_as_on_dim_0(
    fake_group: int, jit_driver: ctypes.CDLL
) -> None:
    counts = {}
    for name in ("Shard(0)", "Shard(1)"):
        train_case(fsdp_c.fully_shard, name)
        counts[name] = jit_driver.take_launches()
    assert counts["Shard(0)"] == counts["Shard(1)"] == 3 * 3 * 5  # steps, blocks, kernels per block


def train_many_parameters(driver: ctypes.CDLL) -> tuple[int, torch.Tensor]:
    """Trains a unit of 100 parameters. Returns the launches and a gradient."""
    torch.manual_seed(1)
    model = fsdp_c.fully_shard(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(50))))
    driver.take_launches()
    model(torch.ones(2, 4)).sum().backward()
    grad = model[49].weight.grad
    assert isinstance(grad, DTensor)
    return driver.take_launches(), grad.to_local()


@pytest.mark.torch("2.13")  # the fake group of older releases does not write reduced tensors
def test_kernels_without_large_arguments_launch_in_parts(
    fake_group: int, jit_driver: ctypes.CDLL
) -> None:
    counts, grads = [], []
    for omits in (0, 1, 0):
        jit_driver.omit_large_kernels(omits)
        _C.use_jit(**jit.load_kernels(jit_driver, CODE))
        train_many_parameters(jit_driver)  # the first launch is always small
        launches, grad = train_many_parameters(jit_driver)
        counts.append(launches)
        grads.append(grad)
    assert counts == [counts[0], 2 * counts[0], counts[0]]
    assert torch.equal(grads[0], grads[1])


def test_jit_launch_that_the_driver_rejects_raises(
    fake_group: int, jit_driver: ctypes.CDLL
) -> None:
    model = fsdp_c.fully_shard(torch.nn.Linear(16, 16))
    jit_driver.refuse_next()
    with pytest.raises(RuntimeError, match="the driver rejected a launch"):
        model(torch.randn(2, 16))
    model.reset_iter_state()
    model(torch.randn(2, 16)).sum().backward()


def test_jit_launch_in_thread_without_context_binds_the_context(
    fake_group: int, jit_driver: ctypes.CDLL
) -> None:
    model = fsdp_c.fully_shard(torch.nn.Linear(16, 16))
    jit_driver.unbind()
    model(torch.randn(2, 16)).sum().backward()
    assert jit_driver.take_launches() > 0


class CompilerStub(Nvrtc):
    """NVRTC without a library: counts compilations."""

    def __init__(self, version: str = "13.0") -> None:
        self.version, self.compilations = version, 0

    def compile(self, arch: int) -> bytes:
        self.compilations += 1
        return f"code {arch}\nfor {self.version}".encode()


def test_compiled_kernels_are_cached_by_architecture_and_nvrtc_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = CompilerStub()
    assert first.compile_cached(90) == first.compile_cached(90) == b"code 90\nfor 13.0"
    assert first.compilations == 1
    assert first.compile_cached(80) == b"code 80\nfor 13.0"
    other = CompilerStub("12.8")
    assert other.compile_cached(90) == b"code 90\nfor 12.8"
    assert len(list((tmp_path / "fsdp_c").glob("*.cubin"))) == 3


def test_kernels_of_damaged_cache_file_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = CompilerStub()
    code = compiler.compile_cached(90)
    (path,) = (tmp_path / "fsdp_c").glob("*.cubin")
    path.write_bytes(path.read_bytes()[:-1])
    assert compiler.compile_cached(90) == code
    assert compiler.compilations == 2


def test_kernel_cache_that_cannot_be_written_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert CompilerStub().compile_cached(90) == b"code 90\nfor 13.0"


def test_user_without_home_has_no_kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert get_cache_folder() is None
    compiler = CompilerStub()
    for _ in range(2):
        assert compiler.compile_cached(90) == b"code 90\nfor 13.0"
    assert compiler.compilations == 2


def start_cache_jobs(count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Starts processes that get kernels from the cache at the same time."""
    script = Path(__file__).with_name("cache_job.py")
    command = [sys.executable, str(script), str(nvrtc.__file__), *arguments]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(command, **pipes) for _ in range(count)]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("start\n")
        job.stdin.flush()
    return jobs


def read_cached(path: Path) -> bytes:
    """Returns the SHA-256 of the kernels in a file of the cache, which must be complete."""
    digest, code = path.read_bytes().split(b"\n", 1)
    assert hashlib.sha256(code).hexdigest().encode() == digest
    return digest


def test_processes_that_compile_at_once_get_and_store_complete_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, seen = tmp_path / "fsdp_c", set()
    jobs = start_cache_jobs(4)
    while any(job.poll() is None for job in jobs):
        seen.update(map(read_cached, folder.glob("*.cubin")))
    [path] = folder.iterdir()
    results = {job.communicate()[0].strip().encode() for job in jobs}
    assert seen <= results == {read_cached(path)}
    assert all(job.returncode == 0 for job in jobs)


def test_process_killed_before_it_stores_kernels_does_not_affect_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for killed in start_cache_jobs(2, "--die"):
        assert killed.communicate()[0] == "" and killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "fsdp_c").iterdir())) == 2  # each wrote a file of its own
    assert not list(tmp_path.glob("fsdp_c/*.cubin"))
    [job] = start_cache_jobs(1)
    result = job.communicate()[0].strip().encode()
    [path] = tmp_path.glob("fsdp_c/*.cubin")
    assert read_cached(path) == result


def test_file_of_kernels_that_cannot_be_renamed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "replace", fail)
    assert CompilerStub().compile_cached(90) == b"code 90\nfor 13.0"
    assert not list((tmp_path / "fsdp_c").iterdir())


def test_nvrtc_of_torchs_cuda_release_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True)
        (tmp_path / "nvidia" / name).touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch/__init__.py"))
    for release in ("13.2", "12.8"):
        monkeypatch.setattr(torch.version, "cuda", release)
        assert find_libraries()[0].name == f"libnvrtc.so.{release[:2]}"


def test_jit_code_that_the_driver_rejects_raises_and_keeps_kernels(
    jit_driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(device: torch.device) -> Any:
        return jit.load_kernels(jit_driver, b"no code")

    _C._testing.hide_kernels(False)  # kernels_of() then reads the loaded kernels of CUDA
    monkeypatch.setattr(jit, "build_kernels", build)
    with pytest.raises(RuntimeError, match="cuLibraryLoadData failed with CUresult 200"):
        jit.install_kernels(torch.device("cuda"))
    assert _C.kernels_of(torch.device("cuda")) == "nvrtc"


def test_jit_driver_without_current_context_raises(driver: ctypes.CDLL) -> None:
    driver.remove_context(1)
    try:
        with pytest.raises(RuntimeError, match="cuCtxGetCurrent returned no context"):
            jit.load_kernels(driver, CODE)
    finally:
        driver.remove_context(0)


# ---- selection -----------------------------------------------------------------------------------


@pytest.fixture
def installations(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[torch.device]]:
    """Makes the fake driver install kernels. The list has the devices of the installations."""
    if _C.CUDA_KERNELS:
        pytest.skip("built with nvcc, whose kernels take precedence")
    devices: list[torch.device] = []

    def install(device: torch.device) -> None:
        devices.append(device)
        _C.use_jit(**jit.load_kernels(driver, CODE))

    monkeypatch.setattr(jit, "install_kernels", install)
    monkeypatch.setattr(kernels, "_logged_device_types", set())
    monkeypatch.delenv("FSDP_C_JIT", raising=False)
    try:
        yield devices
    finally:
        _C.use_jit()


def log_kernels(device: str, caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Returns the level and the text of the only log record for ``device``."""
    with caplog.at_level("INFO", logger=kernels.logger.name):
        for _ in range(2):
            kernels.log_kernels(torch.device(device))
    [record] = caplog.records
    return record.levelname, record.getMessage()


@pytest.mark.parametrize("value", [None, "1"])
def test_build_without_nvcc_compiles_kernels_for_cuda_with_nvrtc(
    value: str | None,
    installations: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if value is not None:
        monkeypatch.setenv("FSDP_C_JIT", value)
    text = "fsdp_c: memory is packed and unpacked on cuda by fsdp_c's nvrtc kernels"
    assert log_kernels("cuda", caplog) == ("INFO", text)
    assert installations == [torch.device("cuda")]


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_fsdp_c_jit_off_leaves_cuda_to_torch_with_one_warning(
    value: str,
    installations: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FSDP_C_JIT", value)
    level, text = log_kernels("cuda", caplog)
    assert level == "WARNING" and text.endswith("and FSDP_C_JIT is off")
    assert "on cuda by torch's foreach operations" in text
    assert installations == []


@pytest.mark.parametrize(
    "error", [RuntimeError("no GPU"), OSError("no libcuda.so.1"), AssertionError("not compiled")]
)
def test_failed_nvrtc_falls_back_to_torch_with_one_warning(
    error: Exception,
    installations: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(jit, "install_kernels", fail)
    level, text = log_kernels("cuda", caplog)
    assert level == "WARNING" and text.endswith(f"and NVRTC did not compile kernels ({error})")
    assert "on cuda by torch's foreach operations" in text


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_devices_without_cuda_do_not_use_nvrtc(
    device: str, installations: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    assert log_kernels(device, caplog)[0] == "INFO"
    assert installations == []


def test_rocm_does_not_use_nvrtc(
    installations: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert log_kernels("cuda", caplog)[0] == "INFO"
    assert installations == []


def test_missing_nvrtc_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "find_libraries", list)
    with pytest.raises(RuntimeError, match=r"found no libnvrtc .*; install the package nvidia-"):
        jit.install_kernels(torch.device("cuda"))
