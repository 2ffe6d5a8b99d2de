"""The process group of tests/gpu/workers/one_rank_group.cpp over NCCL, on torch's CUDA build.

On a GPU, the step ``races`` of the GPU check compares the results of this group. Here no kernel
runs, so the test compares the order of operations and the calls of NCCL.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]


def test_collectives_over_one_rank_of_nccl_are_ordered_and_counts_equal_torch(
    run_worker: Any,
) -> None:
    torchs, own = (run_worker("one_rank", name) for name in ("torch", "fsdp_c"))
    assert len(own) == 4
    for name, variant in own.items():
        assert torchs[name]["findings"] == variant["findings"] == [], name
        assert variant["NCCL"]["ncclAllGather"] > 0, name
        # In torch before 2.15, a group of one rank copies instead of a reduce-scatter.
        assert ("ncclReduceScatter" in variant["NCCL"]) == variant["scatters"], name
        assert variant["NCCL"] == torchs[name]["NCCL"], name
    assert own["hsdp_partial"]["NCCL"]["ncclAllReduce"] > 0
