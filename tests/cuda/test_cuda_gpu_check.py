"""Steps of the GPU check (tests/gpu) over the simulated CUDA device, which executes the work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda checks"), pytest.mark.timeout(900)]

IMPLEMENTATIONS = ("torch", "fsdp_c")


VERDICTS = {
    "facts": "PASS",
    "races": "PASS",
    "parity": "PASS",
    "kernels": "PASS",
    "jit": "PASS",
    "csan": "PASS",
    "graphs": "PASS",
    "scripts": "PASS",
    "compiled": "PASS",
    "memcheck": "SKIP",
    "initcheck": "SKIP",
    "bandwidth": "PASS",
    "host": "PASS",
    "gpt": "PASS",
    "traces": "PASS",
}
"""The steps that ``gpu_check.sh --device cuda`` runs after the step ``build``."""
LIMITS = {
    "kernels": "the script in place of nvcc compiles for the host",
    "memcheck": "compute-sanitizer is not installed",
    "initcheck": "compute-sanitizer is not installed",
    "races": "4 of the variants, see below; an order of execution replaces the pauses",
    "scripts": "no job of a library",
    "compiled": "aot_eager, because the device does not execute the code of Triton",
    "bandwidth": "the time has no meaning",
    "host": "the time has no goal",
    "gpt": "the time has no goal; attention consists of matrix products",
    "traces": "no events of the device, because CUPTI's substitute records nothing",
}
"""Limits of the steps on the simulated device."""


@pytest.fixture(scope="module")
def check(run_worker: Any) -> Any:
    return run_worker("check_in_copy", *VERDICTS)


def test_check_with_device_cuda_passes_on_the_simulated_device(check: dict[str, Any]) -> None:
    *lines, last = check["lines"]
    verdicts = {line.split()[1]: line.split()[0] for line in lines}
    assert verdicts == VERDICTS, check["log"]
    assert check["errors"] == ""
    assert check["findings"] == []
    assert last.startswith("13 PASS, 0 FAIL, 2 SKIP")
    gpu = check["results"]["facts"]["gpu"]
    assert (gpu["sms"], gpu["capability"]) == (132, "9.0")
    outcomes = check["results"]["graphs"]
    for implementation in IMPLEMENTATIONS:
        assert list(outcomes[implementation].values()) == ["equal"] * 6
    assert len(check["results"]["bandwidth"]["kernels"]) == 10


def test_measurements_on_the_simulated_device_are_complete(check: dict[str, Any]) -> None:
    """Times have no goal there."""
    results = check["results"]
    for times in results["host"]["us_per_group_step"].values():
        assert set(times) == {"bare", *IMPLEMENTATIONS} and times["bare"] > 0
    gpt = results["gpt"]["sizes"]["small"]
    assert all(gpt["ms"][name] > 0 for name in IMPLEMENTATIONS)
    assert gpt["losses"]["fsdp_c"] == gpt["losses"]["torch"]
    assert 0 < gpt["peak_bytes"]["fsdp_c"] <= gpt["peak_bytes"]["torch"]
    for name in IMPLEMENTATIONS:
        assert results["traces"]["events"][name]["cpu_op"] > 100
        assert {f"trace-{name}.json.gz", f"memory-{name}.pickle.gz"} <= set(check["files"])
    scripts = results["scripts"]
    assert set(scripts["comparisons"]) == {"lora.py", "train_gpt.py", "vision.py"}
    assert any("nvrtc kernels" in line for line in scripts["outputs"]["--check"])


def test_negative_controls_on_the_simulated_device_are_detected(check: dict[str, Any]) -> None:
    controls = check["results"]["races"]["controls"]
    assert len(controls) == 3
    assert all(control["detected"] for control in controls.values())
    csan = check["results"]["csan"]
    for implementation in IMPLEMENTATIONS:
        assert len(csan["errors"][implementation]) == 5
        assert not any(csan["errors"][implementation].values())
        assert csan["operations"][implementation] > 1000
    assert csan["waits"]["observed"] > 20
    assert csan["waits"]["detected"] > csan["waits"]["dropped"] / 2


def test_step_build_builds_kernels_with_a_script_in_place_of_nvcc(run_worker: Any) -> None:
    check = run_worker("check_in_copy", "build")
    assert check["lines"][0].startswith("PASS build"), check["log"]
    assert check["results"]["build"]["extension"].startswith("kernels ")


def test_each_step_of_the_gpu_check_runs() -> None:
    script = (Path(__file__).parents[1] / "gpu/gpu_check.sh").read_text()
    steps = re.search('^ALL="(.*)"$', script, re.MULTILINE)
    assert steps is not None
    assert sorted([*VERDICTS, "build"]) == sorted(steps[1].split())
    assert set(LIMITS) < set(VERDICTS)


def run_step(run_worker: Any, seed: int, script: str, *arguments: str) -> list[str]:
    """Returns the lines that a step has printed."""
    result = run_worker("gpu_step", str(seed), script, *arguments)
    assert result["status"] == 0, result["lines"][-20:]
    assert result["findings"] == []
    return list(result["lines"])


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
