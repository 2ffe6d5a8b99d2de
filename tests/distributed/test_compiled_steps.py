"""A compiled optimizer step has as many graph breaks under fsdp_c as under torch's FSDP2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fork_server
import pytest

WORKER = Path(__file__).with_name("workers") / "compiled_steps.py"


def run_worker(implementation: str) -> dict[str, Any]:
    """Runs the worker; returns its output: case -> breaks, graphs and bits."""
    env = {name: value for name, value in os.environ.items() if name != "FSDP_C"}
    completed = fork_server.run_script(WORKER, implementation, env=env)
    assert completed.returncode == 0, completed.stderr[-6000:]
    assert "does not know how to trace" not in completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


@pytest.mark.timeout(600)  # two processes compile steps
def test_compiled_step_has_torchs_graph_breaks_and_bits() -> None:
    by_torch, found = run_worker("torch"), run_worker("fsdp_c")
    assert sum(by_torch["AdamW: step"]["breaks"].values()) == 1
    for case, outcome in found.items():
        assert outcome == by_torch[case.removesuffix(", accelerated")], case
    assert found.keys() >= by_torch.keys()
