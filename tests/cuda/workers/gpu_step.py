"""Runs a step of the GPU check on the simulated CUDA device.

``python gpu_step.py SEED SCRIPT [ARGUMENT...]`` runs a script of tests/gpu/workers as on a GPU. The
device executes operators, kernels, copies and graphs, in the order of SEED. The process prints a
JSON object: the exit status of the step, the lines that it printed, and the findings of the device.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import stub_runtime

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/gpu/workers", "tests/harness", "tests/parity/workers", "examples")


def main(seed: int, script: str, arguments: list[str]) -> dict[str, Any]:
    device = stub_runtime.start()
    import torch  # noqa: F401

    device.execute(seed)
    sys.path += [str(ROOT / folder) for folder in FOLDERS]
    sys.argv = [script, *arguments]
    status, printed = 0, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(ROOT / "tests/gpu/workers" / script), run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    lines = printed.getvalue().splitlines()
    return {"status": status, "lines": lines, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])), flush=True)
    os._exit(0)
