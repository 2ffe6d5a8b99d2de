"""tests/torch_suite compares outcomes of torch's own tests with fsdp_c and with torch's FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "torch_suite" / "compare_suite.py"
SUITE = """
import os
import torch
from fsdp_c_autoload.redirect import is_redirected
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

@skip_if_lt_x_gpu(4)
def test_passes_with_both():
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


def test_test_that_passes_with_torch_alone_fails_the_comparison(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE)
    assert done.returncode == 1, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("test_fully_shard"))
    assert row.split() == ["test_fully_shard_example", "1", "1", "1"]
    assert "test_fully_shard_example::test_passes_with_torch_alone: not expected" in done.stdout


def test_comparison_fails_if_no_test_passes(tmp_path: Path) -> None:
    done = run_suite(tmp_path, "a syntax error")
    assert done.returncode == 1, done.stderr
    assert "no test passed with fsdp_c" in done.stdout


def test_comparison_succeeds_if_the_same_tests_fail_with_both(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE.partition("def test_passes_with_torch_alone")[0])
    assert done.returncode == 0, done.stderr
