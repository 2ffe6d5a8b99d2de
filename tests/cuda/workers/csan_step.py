"""Runs the step ``csan`` of tests/gpu/gpu_check.sh on the simulated CUDA device.

The step trains under torch's CUDA sanitizer. Prints its result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import stub_runtime


def main() -> None:
    stub_runtime.start()
    sys.path.append(str(Path(__file__).resolve().parents[2] / "gpu/workers"))
    import csan

    print(json.dumps(csan.run()), flush=True)
    os._exit(0)  # without the destructors of the process group, which wait for the device


if __name__ == "__main__":
    main()
