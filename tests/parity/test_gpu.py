"""On a CUDA device: what is trained has torch's bits, with launches that do not block.

Four processes share the device, and gloo makes the collectives on CUDA tensors; NCCL runs on one
rank, and with two devices on two. Races show in tests/gpu, by way of a group that never waits.
"""

from __future__ import annotations

import features
import gpu_jobs
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.xdist_group("gpu")]

Runs = dict[str, list[dict[str, gpu_jobs.Record]]]


def runs(launch: str) -> Runs:
    return {name: gpu_jobs.launch(launch, name) for name in ("torch", "fsdp_c")}


@pytest.fixture(scope="module")
def gloo() -> Runs:
    return runs("gloo4")


@pytest.fixture(scope="module")
def solo() -> Runs:
    return runs("nccl1")


@pytest.fixture(scope="module")
def nccl() -> Runs:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return runs("nccl2")


def assert_same(runs: Runs, name: str) -> None:
    features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)


@pytest.mark.parametrize("name", [*gpu_jobs.CASES, *gpu_jobs.MANY_RANKS])
def test_four_processes_on_one_device(gloo: Runs, name: str) -> None:
    assert_same(gloo, name)


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
