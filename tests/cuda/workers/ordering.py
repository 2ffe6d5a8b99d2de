"""Checks that every access of a training step is ordered after the last conflicting access.

``python ordering.py IMPLEMENTATION`` prints a JSON object: for each job of ``jobs.py`` the findings
of the device, and the number of operators' launches and fsdp_c's launches that were observed. It
also has the calls of fsdp_c that order streams and that ``cuda_bugs.py`` does not break.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from typing import Any

import stub_runtime
from cuda_bugs import is_covered

STEPS = 3


def check(implementation: str) -> dict[str, Any]:
    """Trains each job for a few steps with checked accesses."""
    device = stub_runtime.start()
    import jobs

    jobs.join_group()
    results = {}
    library = ""
    if implementation == "fsdp_c":
        import fsdp_c._C as _C

        library = str(_C.__file__)
    for name, job in (jobs.JOBS | jobs.FURTHER_JOBS).items():
        training = jobs.Training(implementation, job)
        training.step()
        gc.collect()  # the calls of the next steps do not free the previous job's memory
        device.reset()
        if library:
            device.log_calls(library)
        device.observe()
        for _ in range(STEPS):
            training.step()
        device.observe(False)
        counts = device.counts()
        calls = device.calls(library) if library else []
        results[name] = {
            "findings": device.findings(),
            "launches": counts.get("launch", 0),
            "own launches": counts.get("launch of fsdp_c", 0),
            "collectives": counts.get("collective", 0),
            "not in cuda_bugs.py": sorted({str(c.stack) for c in calls if not is_covered(c)}),
            "without context": counts.get("launch without context", 0),
        }
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(check(sys.argv[1])), flush=True)
    os._exit(0)
