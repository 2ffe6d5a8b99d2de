"""On a CUDA device: what is trained has torch's bits. With two devices, NCCL moves the data."""

from __future__ import annotations

import features
import gpu_jobs
import pytest
import torch
from launch import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.xdist_group("gpu")]

Runs = dict[str, list[dict[str, gpu_jobs.Record]]]
IMPLEMENTATIONS = ("torch", "fsdp_c")


def ranks(world_size: int, implementation: str, threads: int) -> list[dict[str, gpu_jobs.Record]]:
    backend = "nccl" if threads == 1 else "gloo"
    env = {"CUDA_LAUNCH_BLOCKING": "0" if threads == 1 else "1"}
    found = run_ranks(
        gpu_jobs.run,
        world_size,
        (implementation, threads),
        backend=backend,
        env=env,
        timeout=400,
        collective_timeout=120,
    )
    return [records for process in found for records in process]


@pytest.fixture(scope="module")
def threads() -> Runs:
    return {name: ranks(1, name, 4) for name in IMPLEMENTATIONS}


@pytest.fixture(scope="module")
def solo() -> Runs:
    return {name: ranks(1, name, 1) for name in IMPLEMENTATIONS}


@pytest.fixture(scope="module")
def nccl() -> Runs:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return {name: ranks(2, name, 1) for name in IMPLEMENTATIONS}


def assert_same(runs: Runs, name: str) -> None:
    features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)


@pytest.mark.parametrize("name", [*gpu_jobs.CASES, *gpu_jobs.MANY_RANKS])
def test_four_threads_on_one_device(threads: Runs, name: str) -> None:
    assert_same(threads, name)


@pytest.mark.parametrize("name", gpu_jobs.CASES)
def test_one_rank(solo: Runs, name: str) -> None:
    assert_same(solo, name)


@pytest.mark.parametrize("name", gpu_jobs.CASES)
def test_two_ranks_over_nccl(nccl: Runs, name: str) -> None:
    assert_same(nccl, name)


def test_the_extension_has_cuda_kernels() -> None:
    """A build beside a CUDA torch and nvcc has them; without, every group would use none."""
    from fsdp_c import _C

    assert _C.CUDA_KERNELS
