"""Runs the step csan of the GPU check on the simulated CUDA device. Prints its result."""

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
