"""Nothing stays behind: not over many steps, not of a deleted model; and a dead peer is no hang."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lifetime
import pytest
from launch import RanksFailed, run_ranks

pytestmark = pytest.mark.xdist_group("lifetime")  # they share launches


@functools.cache
def deletions() -> list[dict[str, Any]]:
    return run_ranks(lifetime.deletions, 2)


def test_fifty_steps_leave_nothing_behind() -> None:
    # torch's flight recorder remembers the last 2000 collectives.
    unrecorded = {"TORCH_FR_BUFFER_SIZE": "0"}
    for early, late in run_ranks(lifetime.steps, 2, env=unrecorded):
        buffer = 4 * lifetime.WIDTH**2
        assert late.pop("bytes") - early.pop("bytes") < 2 * buffer
        assert late == early


@pytest.mark.parametrize("life", lifetime.LIVES)
def test_a_deleted_model_is_gone(life: str) -> None:
    for found in deletions():
        assert found[f"{life}, parts"] > 20
        assert found[life] == []


def test_deleted_models_leave_no_threads() -> None:
    for found in deletions():
        assert found["more threads"] <= 0


@functools.cache
def witnesses(folder: Path) -> dict[str, list[str]]:
    with pytest.raises(RanksFailed) as raised:
        # A rank that noticed its dead peer only by the time limit of collectives would miss 90 s.
        run_ranks(lifetime.lose_a_peer, 4, (str(folder),), timeout=90, collective_timeout=600)
    assert raised.value.reports[3].status == "killed by SIGKILL"
    return {path.name: path.read_text().splitlines() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("witnesses")


@pytest.mark.parametrize(
    ("place", "operation", "group"),
    [
        ("gather in forward", "all-gather", "the root's parameter group"),
        ("gather in backward", "all-gather", "parameter group '0'"),
        ("reduction", "reduce-scatter", "the root's parameter group"),
    ],
)
def test_a_killed_peer_is_an_error_that_names_rank_group_and_operation(
    place: str, operation: str, group: str, folder: Path
) -> None:
    kind, _, message, *_, cause = witnesses(folder)[place]
    assert kind == "RuntimeError"
    assert message.startswith(f"{operation} of {group} failed on rank 0 of 2 of process group '")
    assert len(message.partition("': ")[2]) > 10  # what the backend said
    assert cause == "cause: RuntimeError"


def test_a_peer_that_does_not_come_is_an_error_at_the_groups_time_limit(folder: Path) -> None:
    kind, seconds, message, *_ = witnesses(folder)["nobody comes"]
    assert kind == "RuntimeError"
    assert float(seconds) > 1  # the group's limit is 1.5 s, that of other groups 600 s
    assert message.startswith("all-gather of the root's parameter group failed on rank 0 of 2")
