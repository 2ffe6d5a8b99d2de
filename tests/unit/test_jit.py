"""CUDA kernels by NVRTC: what happens with them after they are compiled, under a stand-in for the
driver that runs their source on this processor (tests/c/fake_cuda/driver.cpp).

The same stand-in counts launches: as many for a matrix that is cut on dim 1 as for one cut on
dim 0.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_launches import CASES, trained
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_c
from fsdp_c import _C, jit, kernels

ROOT = Path(__file__).resolve().parents[2]
CODE = b"\x7fELF of no machine"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    folder = ROOT / "tests/c/fake_cuda"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{folder}", f"-I{ROOT}/csrc"]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [*command, "-Wno-unknown-pragmas", str(folder / "driver.cpp"), "-o", str(library)],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture
def on_the_driver(driver: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The compiled kernels serve the CPU."""
    if _C.CUDA_KERNELS:
        pytest.skip("built with nvcc, whose kernels come first")
    _C.use_jit(*jit.load(driver, CODE))
    _C._testing.simulate_kernels(_C._testing.kernels(1))
    _C._testing.hide_kernels(True)
    driver.take_launches()
    try:
        yield driver
    finally:
        _C._testing.hide_kernels(False)
        _C._testing.simulate_kernels(None)
        _C.use_jit(0, 0, 0)


@pytest.mark.torch("2.13")  # fake groups of before leave what is reduced unwritten
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernels_train_to_the_same_bits(
    name: str, fake_group: int, on_the_driver: ctypes.CDLL
) -> None:
    _, expected = trained(torch_fully_shard, name)
    assert on_the_driver.take_launches() == 0
    launches, gradients = trained(fsdp_c.fully_shard, name)
    assert on_the_driver.take_launches() > 0
    assert launches["aten::_foreach_copy_"] == 0
    for mine, stock in zip(gradients, expected, strict=True):
        assert torch.equal(mine, stock)


def test_another_dim_takes_as_many_launches(fake_group: int, on_the_driver: ctypes.CDLL) -> None:
    counts = {}
    for name in ("Shard(0)", "Shard(1)"):
        trained(fsdp_c.fully_shard, name)
        counts[name] = on_the_driver.take_launches()
    assert counts["Shard(0)"] == counts["Shard(1)"] == 3 * 3 * 5  # steps, blocks, packs and unpacks


def test_a_launch_that_the_driver_refuses_raises(
    fake_group: int, on_the_driver: ctypes.CDLL
) -> None:
    model = fsdp_c.fully_shard(torch.nn.Linear(16, 16))
    on_the_driver.refuse_next()
    with pytest.raises(RuntimeError, match="the driver did not take a launch"):
        model(torch.randn(2, 16))
    model.reset_iter_state()
    model(torch.randn(2, 16)).sum().backward()


def test_what_the_driver_does_not_load_is_said(driver: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match="cuLibraryLoadData failed with CUresult 200"):
        jit.load(driver, b"no code")
    assert _C.kernels_of(torch.device("cuda")) == ("cuda" if _C.CUDA_KERNELS else "torch")


@pytest.mark.skipif(bool(_C.CUDA_KERNELS), reason="built with nvcc")
def test_a_device_gets_them_where_the_environment_asks(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_for(device: torch.device) -> None:
        _C.use_jit(*jit.load(driver, CODE))

    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(jit, "compile_for", compile_for)
    monkeypatch.setenv("FSDP_C_JIT", "1")
    try:
        with caplog.at_level("INFO", logger=kernels.logger.name):
            kernels.say(torch.device("cuda"))
        assert "packed and unpacked on cuda by fsdp_c's nvrtc kernels" in caplog.text
    finally:
        _C.use_jit(0, 0, 0)


def test_without_a_library_there_is_a_warning_and_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(jit, "installed", list)
    monkeypatch.setenv("FSDP_C_JIT", "1")
    _C._testing.hide_kernels(True)
    try:
        kernels.say(torch.device("cuda"))
    finally:
        _C._testing.hide_kernels(False)
    assert "NVRTC has made no kernels: no libnvrtc beside torch" in caplog.text
    assert "torch's foreach operations" in caplog.text
