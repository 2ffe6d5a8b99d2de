"""``run_ranks`` returns results in rank order and reports failures with rank and cause."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import RanksFailed, run_ranks


def sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return rank, total.item()


def raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def die_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        os.abort()


def sleep_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_run_ranks_returns_results_in_rank_order(world_size: int) -> None:
    total = float(sum(rank + 10 for rank in range(world_size)))
    expected = [(rank, total) for rank in range(world_size)]
    assert run_ranks(sum_of_ranks, world_size, (10,)) == expected


def test_run_ranks_reports_an_exception_with_its_rank() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)--- rank 1: exit status 1.*ValueError: the reason"):
        run_ranks(raise_on_rank_one, 2, timeout=60)


def test_run_ranks_reports_a_killed_rank_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 0: killed by SIGABRT"):
        run_ranks(die_on_rank_zero, 2, timeout=60)


def test_run_ranks_reports_the_stack_of_a_hang_at_the_time_limit() -> None:
    # A launch that ignored its limit would exceed the time limit of this test.
    match = r"(?s)\[1\] still running after 12 s.*in sleep_on_rank_one"
    with pytest.raises(RanksFailed, match=match):
        run_ranks(sleep_on_rank_one, 2, timeout=12)


def test_run_ranks_rejects_a_function_without_an_importable_name() -> None:
    with pytest.raises(ValueError, match="cannot be imported by name"):
        run_ranks(lambda rank, world_size: None, 2)


def test_run_ranks_runs_a_script_as_torchrun_does(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print(sys.argv[1], int(total))\n"
        "dist.destroy_process_group()\n"
    )
    for text in run_ranks(script, 2, ["word"]):  # packages may print other lines
        printed = [line for line in text.splitlines() if line.startswith("word")]
        assert printed == ["word 3"], text
