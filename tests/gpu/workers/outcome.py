"""What a step of a visit says of itself: one line, and numbers; and what device it runs on."""

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
DEVICE = os.environ.get("VISIT_DEVICE", "cuda")
"""cuda, sim (tests/accelerator) or cpu."""

ON_CUDA = DEVICE == "cuda"
SKIPPED = 77
"""The exit status of a step that cannot run here."""

# A step that is stopped says where it was.
faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


def _let_threads_finish() -> None:
    """Before the interpreter ends: threads that want the GIL then would abort it."""
    runpy.run_path(str(ROOT / "fsdp_c/ending.py"))["wait_for_threads"]()


def _write(line: str, figures: dict[str, Any]) -> None:
    """Where summary.py finds it; on the screen where a step is run by hand."""
    print(json.dumps(figures, indent=1, default=str))
    print(line, flush=True)
    if "VISIT_WORK" in os.environ:
        path = Path(os.environ["VISIT_WORK"], f"{os.environ['VISIT_STEP']}.json")
        path.write_text(json.dumps({"line": line, "figures": figures}, default=str))


def conclude(good: bool, line: str, **figures: Any) -> NoReturn:
    """Ends the step: PASS or FAIL with this line."""
    _write(line, figures)
    _let_threads_finish()
    sys.exit(0 if good else 1)


def skip(reason: str) -> NoReturn:
    """Ends the step: SKIP."""
    _write(reason, {})
    sys.exit(SKIPPED)


def out_file(name: str) -> Path:
    """A file that is taken home."""
    folder = Path(os.environ.get("OUT", BUILT / "out"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def start_device() -> Any:
    """Makes the device of the visit there, and returns it as a torch.device."""
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
