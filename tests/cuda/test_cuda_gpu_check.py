"""Steps of the GPU check (tests/gpu) over the simulated CUDA device, which executes the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]

IMPLEMENTATIONS = ("torch", "fsdp_c")


def run_step(run_worker: Any, seed: int, script: str, *arguments: str) -> list[str]:
    """Returns the lines that a step has printed."""
    result = run_worker("gpu_step", str(seed), script, *arguments)
    assert result["status"] == 0, result["lines"][-20:]
    assert result["findings"] == []
    return list(result["lines"])


def test_facts_describe_the_device(run_worker: Any) -> None:
    lines = run_step(run_worker, 0, "facts.py")
    facts = json.loads("\n".join(lines[:-1]))
    assert (facts["gpu"]["sms"], facts["gpu"]["capability"]) == (132, "9.0")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_graphs_replay_the_bits_of_eager_steps(run_worker: Any, implementation: str) -> None:
    lines = run_step(run_worker, 1, "graphs.py", implementation)
    outcomes = json.loads(lines[-1])
    assert outcomes == dict.fromkeys(outcomes, "equal") and len(outcomes) == 6


def test_trainings_of_race_py_have_torchs_bits(run_worker: Any, tmp_path: Path) -> None:
    digests = {}
    for seed, implementation in enumerate(IMPLEMENTATIONS):
        file = tmp_path / implementation
        run_step(run_worker, seed, "race.py", implementation, str(file))
        digests[implementation] = json.loads(file.read_text())["digests"]
    raised = [name for name, by_seed in digests["torch"].items() if ":" in by_seed["0"]]
    assert raised == []
    assert len(digests["torch"]) >= 25
    assert digests["fsdp_c"] == digests["torch"]
