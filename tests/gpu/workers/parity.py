"""Compares the cases of gpu_jobs.py under torch and fsdp_c.

On CUDA the cases run with NCCL on one rank, and with gloo and CUDA tensors in four processes: under
pytest in tests/parity/test_gpu.py, or in this script if pytest is not installed. Without CUDA this
script runs two ranks on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import NoReturn

from outcome import ON_CUDA, ROOT, conclude

TEST = "tests/parity/test_gpu.py"
PYTEST_MODULES = ("pytest", "pytest_timeout", "xdist")
OPTIONS = ("-m", "gpu", "-p", "no:cacheprovider", "-q", "--tb=short", "-rfEs")


def run_with_pytest() -> NoReturn:
    command = [sys.executable, "-m", "pytest", TEST, *OPTIONS]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(completed.stdout[-15000:], completed.stderr[-2000:])
    last_line = (completed.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip(
        "= "
    )
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", completed.stdout, re.M)
    passed = re.search(r"(\d+) passed", last_line)
    line = last_line + (f"; first failure: {failed[0]}" if failed else "")
    conclude(completed.returncode == 0 and passed is not None, line, failed=failed)


def run_without_pytest(launches: tuple[str, ...]) -> NoReturn:
    import features
    import gpu_jobs

    failed, compared = [], 0
    for launch in launches:
        runs = {name: gpu_jobs.launch(launch, name) for name in ("torch", "fsdp_c")}
        for name in runs["torch"][0]:
            compared += 1
            try:
                features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)
                exceptions = gpu_jobs.find_exceptions(runs, name)
                assert not exceptions, exceptions[0]
            except AssertionError as error:
                failed.append(f"{launch}, {name}: {error}")
    where = "" if ON_CUDA else " on two ranks on the CPU"
    line = f"{compared} cases{where}, {len(failed)} differ"
    conclude(compared > 0 and not failed, line, failed=failed)


def main() -> None:
    if not ON_CUDA:
        os.environ["FSDP_C_GPU_JOBS_DEVICE"] = "cpu"
        run_without_pytest(("gloo2",))
    if all(importlib.util.find_spec(name) for name in PYTEST_MODULES):
        run_with_pytest()
    run_without_pytest(("nccl1", "gloo4"))


if __name__ == "__main__":
    main()
