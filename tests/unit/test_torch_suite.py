"""tests/torch_suite compares outcomes of torch's own tests with fsdp_c and with torch's FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "torch_suite" / "compare_suite.py"
sys.path.insert(0, str(SCRIPT.parent))

import compare_suite  # noqa: E402

SUITE = """
import os
import torch
from fsdp_c_autoload.redirect import is_redirected
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

@skip_if_lt_x_gpu(4)
def test_passes_with_fsdp_c():
    assert torch.cpu.device_count() == 4
    assert is_redirected(fully_shard) == (os.environ["FSDP_C"] == "1")

def test_fails_with_both():
    raise ValueError

def test_passes_with_torch_alone():
    assert os.environ["FSDP_C"] == "0"
"""


def run_suite(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    tests = folder / "test" / "distributed" / "_composable" / "fsdp"
    tests.mkdir(parents=True)
    (tests / "test_fully_shard_example.py").write_text(text)
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.xdist_group("torch_suite")  # begins before shorter tests
def test_torch_suite_comparison_exits_1_if_a_test_passes_with_torch_alone(tmp_path: Path) -> None:
    completed = run_suite(tmp_path, SUITE)
    assert completed.returncode == 1, completed.stderr
    row = next(
        line for line in completed.stdout.splitlines() if line.startswith("test_fully_shard")
    )
    assert row.split() == ["test_fully_shard_example", "1", "1", "1"]
    assert "test_fully_shard_example::test_passes_with_torch_alone" in completed.stdout


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, with_fsdp_c: str, with_torch: str
) -> int:
    """Compares a file with one test. The last arguments are its outcomes, "" if there is none."""
    outcomes = {True: with_fsdp_c, False: with_torch}

    def run_tests(path: Path, tests: list[str], use_fsdp_c: bool, seconds: int) -> dict[str, str]:
        return {"test": outcomes[use_fsdp_c]} if outcomes[use_fsdp_c] else {}

    monkeypatch.setattr(compare_suite, "run_tests", run_tests)
    monkeypatch.setattr(compare_suite, "find_files", lambda *_: [Path("test_file.py")])
    return compare_suite.main([str(folder)])


def test_torch_suite_comparison_exits_1_if_a_test_passes_only_with_torch_or_none_with_fsdp_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_main(monkeypatch, tmp_path, "passed", "") == 0
    assert run_main(monkeypatch, tmp_path, "failed", "passed") == 1
    assert run_main(monkeypatch, tmp_path, "failed", "failed") == 1
    assert run_main(monkeypatch, tmp_path, "", "") == 1
