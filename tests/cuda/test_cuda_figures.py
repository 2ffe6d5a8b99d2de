"""Launches, events, collectives and memory of one step, on torch's CUDA build."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]
JOBS = ["fsdp", "hsdp", "hsdp, 4 microbatches without all-reduce", "replicate"]
JOBS += ["replicate, 4 microbatches without all-reduce"]
JOBS += ["fsdp, checkpointing", "fsdp, 4 microbatches without sync"]
CASES = [*((job, "SMALL") for job in JOBS), ("fsdp", "SMALL_MOE"), ("fsdp", "SMALL_VIT")]
FIGURES = ["launch", "record", "wait", "collective", "memcpy", "peak MiB", "reserved MiB"]
FIGURES += ["launch with GIL", "malloc with GIL", "allocations"]


@pytest.mark.parametrize(("job", "size"), CASES)
def test_step_needs_at_most_torchs_launches_events_and_memory(
    run_pair: Any, job: str, size: str
) -> None:
    options = ("--size", size, "--blocks", "4", "--steps", "2")
    torchs, own = run_pair("figures", job, *options, before=("--measure",)).values()
    assert own["not supported"] == []
    higher = {name: (torchs[name], own[name]) for name in FIGURES if own[name] > torchs[name]}
    assert not higher


def test_step_of_real_size_runs_on_emulated_ranks(run_worker: Any) -> None:
    """Its messages exceed the memory through which ranks exchange data."""
    options = ("--size", "LLAMA_8B", "--blocks", "1", "--steps", "1")
    assert run_worker("figures", "--measure", "fsdp_c", "fsdp", *options)["peak MiB"] > 1000
