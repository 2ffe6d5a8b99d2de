"""Parity on a CUDA device: trainings give torch's bits.

Four processes run over gloo, and share devices if there are fewer than four. NCCL runs on one rank,
and on two if there are two devices. tests/gpu tests for races, with a process group that never
waits on the host.
"""

from __future__ import annotations

import features
import gpu_jobs
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.xdist_group("gpu")]

Runs = dict[str, list[dict[str, gpu_jobs.Record]]]


def run_both(launch: str) -> Runs:
    return {name: gpu_jobs.launch(launch, name) for name in ("torch", "fsdp_c")}


@pytest.fixture(scope="module")
def gloo_four_ranks() -> Runs:
    return run_both("gloo4")


@pytest.fixture(scope="module")
def nccl_one_rank() -> Runs:
    return run_both("nccl1")


@pytest.fixture(scope="module")
def nccl_two_ranks() -> Runs:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return run_both("nccl2")


def assert_same(runs: Runs, name: str) -> None:
    assert not gpu_jobs.find_exceptions(runs, name)
    features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)


@pytest.mark.parametrize("name", [*gpu_jobs.CASES, *gpu_jobs.MANY_RANKS])
def test_gpu_case_over_gloo_with_four_ranks_matches_torch(gloo_four_ranks: Runs, name: str) -> None:
    assert_same(gloo_four_ranks, name)


@pytest.mark.parametrize("name", [*gpu_jobs.CASES, *gpu_jobs.ALL_GATHERS])
def test_gpu_case_over_nccl_with_one_rank_matches_torch(nccl_one_rank: Runs, name: str) -> None:
    assert_same(nccl_one_rank, name)


@pytest.mark.parametrize("name", [*gpu_jobs.CASES, *gpu_jobs.ALL_GATHERS])
def test_gpu_case_over_nccl_with_two_ranks_matches_torch(nccl_two_ranks: Runs, name: str) -> None:
    assert_same(nccl_two_ranks, name)


def test_extension_contains_cuda_kernels() -> None:
    """A build with CUDA torch and nvcc contains the kernels. Without them every group would use
    torch's operations."""
    from fsdp_c import _C

    assert _C.CUDA_KERNELS
