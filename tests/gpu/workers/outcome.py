"""The check's device, and the result of a step: PASS, FAIL or SKIP with a line and numbers."""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "build/gpu"
DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
"""Device type: cuda, sim (tests/accelerator) or cpu."""

ON_CUDA = DEVICE == "cuda"
SMALL = not ON_CUDA or "GPU_CHECK_SMALL" in os.environ
"""Whether sizes are those of a test of the scripts, and not of a check of a GPU."""
SKIPPED = 77
"""Exit status of a skipped step."""

# gpu_check.sh sends SIGTERM at the time limit; the handler prints the stacks of all threads.
faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


def wait_for_threads() -> None:
    """Waits for torch's threads: a thread that requests the GIL during shutdown aborts Python."""
    runpy.run_path(str(ROOT / "fsdp_c/_compat/shutdown.py"))["wait_for_threads"]()


def _write(line: str, figures: dict[str, Any]) -> None:
    """Prints the result, and writes it for summary.py if gpu_check.sh runs the step."""
    print(json.dumps(figures, indent=1, default=str))
    print(line, flush=True)
    if "GPU_CHECK_WORK" in os.environ:
        path = Path(os.environ["GPU_CHECK_WORK"], f"{os.environ['GPU_CHECK_STEP']}.json")
        path.write_text(json.dumps({"line": line, "figures": figures}, default=str))


def conclude(passed: bool, line: str, **figures: Any) -> NoReturn:
    """Ends the step with PASS or FAIL.

    ``line`` is the step's text in summary.txt. ``figures`` are its values in results.json.
    """
    _write(line, figures)
    wait_for_threads()
    sys.exit(0 if passed else 1)


def skip(reason: str) -> NoReturn:
    """Ends the step with SKIP."""
    _write(reason, {})
    sys.exit(SKIPPED)


def out_file(name: str) -> Path:
    """Returns the path of a file in OUT, the folder that is kept after the run."""
    folder = Path(os.environ.get("OUT", BUILT / "out"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def start_device() -> Any:
    """Initializes the device of the GPU check and returns it as a torch.device."""
    import torch

    if DEVICE == "sim":
        import simulated

        simulated.start()
        simulated.use_kernels(True)
    elif ON_CUDA:
        torch.cuda.set_device(0)
    return torch.device(DEVICE) if DEVICE == "cpu" else torch.device(DEVICE, 0)


if __name__ == "__main__":
    skip(sys.argv[1])
