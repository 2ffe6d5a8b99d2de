"""tests/parity/test_gpu.py, with launches that do not block: NCCL on one rank, and four processes
whose collectives gloo makes on CUDA tensors. Without pytest the same launches are compared here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

from outcome import ROOT, conclude

TEST = "tests/parity/test_gpu.py"
OPTIONS = ["-m", "gpu", "-p", "no:cacheprovider", "-q", "--tb=short", "-rfEs"]


def with_pytest() -> None:
    options = (
        OPTIONS if importlib.util.find_spec("pytest_timeout") else [*OPTIONS, "-o", "timeout="]
    )
    command = [sys.executable, "-m", "pytest", TEST, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-15000:], done.stderr[-2000:])
    last = (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1].strip("= ")
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.M)
    passed = re.search(r"(\d+) passed", last)
    line = last + (f"; first: {failed[0]}" if failed else "")
    conclude(done.returncode == 0 and passed is not None, line, failed=failed)


def without_pytest() -> None:
    import features
    import gpu_jobs

    failed, compared = [], 0
    for launch in gpu_jobs.LAUNCHES:
        runs = {name: gpu_jobs.launch(launch, name) for name in ("torch", "fsdp_c")}
        for name in runs["torch"][0]:
            compared += 1
            try:
                features.assert_same_bits(runs["torch"], runs["fsdp_c"], name)
            except AssertionError as error:
                failed.append(f"{launch}, {name}: {error}")
    line = f"{compared} cases (no pytest here), {len(failed)} differ"
    conclude(not failed, line, failed=failed)


def main() -> None:
    if importlib.util.find_spec("pytest") is not None:
        with_pytest()
    without_pytest()


if __name__ == "__main__":
    main()
