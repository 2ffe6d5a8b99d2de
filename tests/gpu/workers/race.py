"""Trains all variants under one implementation, for some seeds of delays: a part of races.py.

    race.py IMPLEMENTATION FILE [--seeds 0 1 2] [--seconds 100]

FILE gets ``{"digests": {variant: {seed: digest}}, "findings": {variant: [...]}}``; a variant that
raises has the exception in the place of its digest. Findings are those of the simulated device.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import loop_group
import torch
import variants
from outcome import DEVICE, ON_CUDA, start_device
from variants import Stage


def make_stage(implementation: str, device: torch.device) -> Stage:
    if ON_CUDA:
        return Stage(implementation, device)
    return Stage(implementation, device, width=16, layers=2, rows=4, steps=2)


def simulated() -> Any:
    """The simulated device's module, or None on others."""
    if DEVICE != "sim":
        return None
    import simulated

    return simulated.start()


def run(name: str, stage: Stage, seed: int) -> tuple[str, list[str]]:
    """The digest of a variant, and what the simulated device has found."""
    print(f"{stage.implementation}, seed {seed}: {name}", flush=True)
    loop_group.DELAYS.seed(seed)
    device = simulated()
    if device is not None:
        device.forget()
    try:
        found = variants.digest(variants.VARIANTS[name](stage))
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"[:300]
    return found, device.findings() if device is not None else []


def run_all(implementation: str, device: Any, seeds: list[int], deadline: float) -> dict[str, Any]:
    """Seed by seed, so that all variants have as many where the time ends first."""
    stage = make_stage(implementation, device)
    digests: dict[str, dict[int, str]] = {name: {} for name in variants.names(device)}
    findings: dict[str, list[str]] = {}
    for seed in seeds:
        for name, found in digests.items():
            if time.monotonic() > deadline:
                break
            found[seed], noted = run(name, stage, seed)
            if noted:
                findings[name] = noted
    return {"digests": digests, "findings": findings}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation", choices=("torch", "fsdp_c"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device)
    found = run_all(options.implementation, device, options.seeds, deadline)
    options.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
