"""Leaks over many steps and after deletion of a model, and errors when a peer dies."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import lifetime
import pytest
import resource_slopes
from launch import RanksFailed, run_ranks

pytestmark = pytest.mark.xdist_group("lifetime")  # tests share launches


@functools.cache
def deletions() -> list[dict[str, Any]]:
    return run_ranks(lifetime.delete_after_each_usage, 2)


def test_fifty_steps_leak_no_objects_or_memory() -> None:
    # torch's flight recorder keeps the last 2000 collectives, which would count as a leak.
    no_flight_recorder = {"TORCH_FR_BUFFER_SIZE": "0"}
    for early, late in run_ranks(
        lifetime.census_before_and_after_50_steps, 2, env=no_flight_recorder
    ):
        buffer = 4 * lifetime.WIDTH**2
        assert late.pop("bytes") - early.pop("bytes") < 2 * buffer
        assert late == early


@functools.cache
def slopes(implementation: str = "fsdp_c") -> dict[str, dict[str, float]]:
    """Returns the slopes of 40 repetitions. ``workers/resource_slopes.py`` has up to 2,000."""
    return resource_slopes.find_slopes(implementation, dict.fromkeys(resource_slopes.JOBS, 40))


@pytest.mark.parametrize("job", resource_slopes.JOBS)
def test_repeated_job_keeps_the_number_of_objects_threads_files_and_mappings(job: str) -> None:
    print(slopes()[job])
    assert slopes()[job]["tensors"] == 0
    # Single new objects of caches are no leak. torch keeps one object of each process group, and
    # torch 2.11 keeps objects of each step.
    objects = slopes()[job]["objects"]
    assert objects < 0.5 or objects < slopes("torch")[job]["objects"] + 0.5
    assert max(slopes()[job][key] for key in ("threads", "files", "mappings")) < 0.5


@pytest.mark.parametrize("usage", lifetime.USAGES)
def test_deleted_model_frees_all_parts(usage: str) -> None:
    for result in deletions():
        assert result[f"{usage}, parts"] > 20
        assert result[usage] == []


def test_deleted_model_is_freed_without_garbage_collection_unlike_in_torch() -> None:
    for result in run_ranks(lifetime.delete_without_collection, 2):
        assert result["fsdp_c"] == [True, True]
        assert result["torch"] == [False, True]


def test_deleted_models_leak_no_threads() -> None:
    for result in deletions():
        assert result["more threads"] <= 0


@functools.cache
def reports_after_peer_death(report_folder: Path) -> dict[str, list[str]]:
    with pytest.raises(RanksFailed) as raised:
        # A collective times out after 600 s, the launch after 90 s: ranks must detect the death.
        run_ranks(
            lifetime.run_with_peer_death,
            4,
            (str(report_folder),),
            timeout=90,
            collective_timeout=600,
        )
    assert raised.value.reports[3].status == "killed by SIGKILL"
    return {path.name: path.read_text().splitlines() for path in report_folder.iterdir()}


@pytest.fixture(scope="module")
def report_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports_after_peer_death")


@pytest.mark.parametrize(
    ("place", "operation", "group", "pass_name"),
    [
        ("gather in forward", "all-gather", "the root's parameter group", "forward"),
        ("gather in backward", "all-gather", "parameter group '0'", "backward"),
        ("reduction", "reduce-scatter", "the root's parameter group", "backward"),
    ],
)
def test_killed_peer_raises_error_with_operation_group_pass_and_rank(
    place: str, operation: str, group: str, pass_name: str, report_folder: Path
) -> None:
    kind, message, *_, cause = reports_after_peer_death(report_folder)[place]
    assert kind == "RuntimeError"
    assert message.startswith(
        f"{operation} of {group} (step 2, {pass_name}) failed on rank 0 of 2 of process group '"
    )
    assert len(message.partition("': ")[2]) > 10  # the backend's message
    assert cause == "cause: RuntimeError"


def test_missing_peer_raises_error_at_group_timeout(report_folder: Path) -> None:
    kind, message, *_ = reports_after_peer_death(report_folder)["missing peer"]
    assert kind == "RuntimeError"
    assert message.startswith(
        "all-gather of the root's parameter group (step 0, outside of a pass) failed on rank 0 of 2"
    )
    # The limit of this group is 1.5 s. That of the other groups is longer than the launch.
    assert re.search("(?i)timed out|timeout", message.partition("': ")[2])
