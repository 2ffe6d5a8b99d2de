"""Sequences of calls with invalid arguments raise exceptions and never crash the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/faults/workers/fuzz.py"
EXAMPLES = int(os.environ.get("FSDP_C_FUZZ", "30"))
"""Number of generated programs. They are the same in each run; run ``fuzz.py`` for other seeds."""


@pytest.mark.timeout(300 + 4 * EXAMPLES)
def test_extension_types_with_random_calls_do_not_crash() -> None:
    env = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(EXAMPLES)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240 + 4 * EXAMPLES,  # 30 programs take 15 s of CPU time; machines may be loaded
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
