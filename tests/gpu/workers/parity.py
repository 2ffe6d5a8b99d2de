"""tests/parity/test_gpu.py, with launches that do not block: NCCL on one rank, and four processes
whose collectives gloo makes on CUDA tensors. Without pytest the launches are compared here; without
CUDA too, on two ranks on the CPU, to see that they still run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import NoReturn

from outcome import ON_CUDA, ROOT, conclude

TEST = "tests/parity/test_gpu.py"
NEEDED = ("pytest", "pytest_timeout", "xdist")
OPTIONS = ("-m", "gpu", "-p", "no:cacheprovider", "-q", "--tb=short", "-rfEs")


def with_pytest() -> NoReturn:
    command = [sys.executable, "-m", "pytest", TEST, *OPTIONS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-15000:], done.stderr[-2000:])
    last = (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip("= ")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.M)
    passed = re.search(r"(\d+) passed", last)
    line = last + (f"; first: {failed[0]}" if failed else "")
    conclude(done.returncode == 0 and passed is not None, line, failed=failed)


def without_pytest(launches: tuple[str, ...]) -> NoReturn:
    import features
    import gpu_jobs

    failed, compared = [], 0
    for launch in launches:
        runs = {name: gpu_jobs.launch(launch, name) for name in ("torch", "fsdp_c")}
        for name in runs["torch"][0]:
            compared += 1
            try:
                features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)
            except AssertionError as error:
                failed.append(f"{launch}, {name}: {error}")
    where = "" if ON_CUDA else " on two ranks on the CPU"
    line = f"{compared} cases{where}, {len(failed)} differ"
    conclude(compared > 0 and not failed, line, failed=failed)


def main() -> None:
    if not ON_CUDA:
        os.environ["FSDP_C_GPU_JOBS_DEVICE"] = "cpu"
        without_pytest(("gloo2",))
    if all(importlib.util.find_spec(name) for name in NEEDED):
        with_pytest()
    without_pytest(("nccl1", "gloo4"))


if __name__ == "__main__":
    main()
