"""Accesses of device memory, on torch's CUDA build over the simulated device.

Torch and fsdp_c order all accesses of a step; each seeded bug of ``cuda_bugs.py`` is reported.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("implementation", ["torch", "fsdp_c"])
def test_step_under_torch_and_fsdp_c_has_no_race_on_device_memory(
    run_worker: Any, implementation: str
) -> None:
    jobs = run_worker("ordering", implementation)
    assert len(jobs) in (14, 17)  # torch 2.15 has more methods
    findings = {name: job["findings"] for name, job in jobs.items() if job["findings"]}
    assert not findings
    for job in jobs.values():
        assert job["launches"] > 100
        assert job["collectives"] > 0
        assert (job["own launches"] > 0) == (implementation == "fsdp_c")
        assert job["without context"] == 0


def test_every_seeded_bug_of_a_step_is_reported(run_worker: Any) -> None:
    findings = run_worker("cuda_bugs")
    assert len(findings) >= 15
    missed = {name: text for name, text in findings.items() if not text.startswith("race")}
    assert not missed
