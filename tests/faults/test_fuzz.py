"""No sequence of calls with wrong arguments takes the process down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/faults/workers/fuzz.py"
EXAMPLES = int(os.environ.get("FSDP_C_FUZZ", "30"))
"""Programs to run; always the same ones. Another seed: ``fuzz.py`` by hand."""


def test_the_process_survives_random_programs() -> None:
    env = {**os.environ, "PYTHONMALLOC": "debug", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(EXAMPLES)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240 + 4 * EXAMPLES,  # 15 s of CPU time, on machines that have other work
    )
    assert ran.returncode == 0, ran.stdout[-8000:]
