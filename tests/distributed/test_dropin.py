"""An unmodified torchrun job has bit-equal losses on torch's FSDP2 and on fsdp_c."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import fork_server
import pytest
from launch import run_ranks
from shell_commands import find_command
from site_dir import installed_environment

pytestmark = pytest.mark.xdist_group("drop-in")  # the tests share launches
JOB = Path(__file__).with_name("workers") / "dropin_train.py"
TORCH_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
FSDP_C_STATE = "fsdp_c._runtime.state"

BY_VARIABLE = find_command("FSDP_C=1 torchrun")
BY_MODULE = find_command("-m fsdp_c train.py", "docs/migrate.md")
LAUNCHES: dict[str, tuple[dict[str, str], list[str]]] = {
    "FSDP_C=1": (BY_VARIABLE.variables, BY_VARIABLE.make_words(str(JOB))),
    "-m fsdp_c": ({}, BY_MODULE.make_words(str(JOB))),
}
"""The commands of the documents that run a job with fsdp_c: variables and words."""

FORKED = ("plain", "-m fsdp_c -m")
"""Launches that fork the ranks instead of calling torchrun: without fsdp_c, and as a module."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that runs the job on two ranks and returns their reports.

    Its argument is a name of LAUNCHES or of FORKED.
    """
    reports: dict[str, list[dict[str, Any]]] = {}

    def run(name: str) -> list[dict[str, Any]]:
        if name not in reports:
            folder = tmp_path_factory.mktemp("job")
            arguments = [str(folder), "--lr", "1 2"]
            if name == "plain":
                run_ranks(JOB, 2, arguments, timeout=280)
            elif name == "-m fsdp_c -m":
                script = folder / "run_module.py"
                script.write_text(fork_server.make_module_script("fsdp_c", JOB.parent))
                run_ranks(script, 2, ["-m", JOB.stem, *arguments], timeout=280)
            else:
                run_command(name, folder, arguments)
            paths = sorted(folder.glob("rank*.json"))
            reports[name] = [json.loads(path.read_text()) for path in paths]
        return reports[name]

    return run


def run_command(name: str, folder: Path, arguments: list[str]) -> None:
    extra, words = LAUNCHES[name]
    env = installed_environment(folder, **extra)
    completed = subprocess.run(
        [*words, *arguments], env=env, cwd=JOB.parent, capture_output=True, text=True, timeout=280
    )
    assert completed.returncode == 0, completed.stderr[-6000:]


@pytest.mark.parametrize("name", [*FORKED, *LAUNCHES])
def test_unmodified_job_has_torchs_losses(outcome: Any, name: str) -> None:
    found, plain = outcome(name), outcome("plain")
    assert len(found) == 2
    assert {report["state"] for report in plain} == {TORCH_STATE}
    assert {report["state"] for report in found} == {
        TORCH_STATE if name == "plain" else FSDP_C_STATE
    }
    assert {"fsdp_c" in report["clip"] for report in found} == {name != "plain"}
    assert [report["losses"] for report in found] == [report["losses"] for report in plain]
    assert all(report["argv"] == ["--lr", "1 2"] for report in found)
