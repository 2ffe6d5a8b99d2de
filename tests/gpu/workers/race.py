"""Trains all variants under one implementation with several seeds of pauses. races.py runs it.

    race.py IMPLEMENTATION FILE [--seeds 0 1 2] [--seconds 100] [--native] [--variants mixed]

The script writes ``{"digests": {variant: {seed: digest}}, "findings": {variant: [...]}}`` to FILE.
With ``--native`` the collectives are those of one_rank_group.cpp. The key "inner" then has the
number of its calls of NCCL. A variant that raised has its exception instead of a digest. The
simulated device reports findings.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loop_group
import torch
import variants
from outcome import DEVICE, SMALL, start_device, wait_for_threads
from variants import Tools


def make_tools(implementation: str, device: torch.device) -> Tools:
    if SMALL:
        return Tools(implementation, device, width=16, layers=2, rows=4, steps=2)
    return Tools(implementation, device)


def simulated() -> Any:
    """Returns the simulated device's module, or None on other devices."""
    if DEVICE != "sim":
        return None
    import simulated

    return simulated.start()


def run(name: str, tools: Tools, seed: int) -> tuple[str, list[str]]:
    """Trains one variant. Returns its digest and the simulated device's findings."""
    print(f"{tools.implementation}, seed {seed}: {name}", flush=True)
    loop_group.DELAYS.seed(seed)
    device = simulated()
    if device is not None:
        device.reset()
    try:
        digest = variants.digest(variants.VARIANTS[name](tools))
    except Exception as error:
        traceback.print_exc()
        digest = f"{type(error).__name__}: {error}"[:300]
    return digest, device.findings() if device is not None else []


def run_all(
    implementation: str,
    device: Any,
    seeds: list[int],
    deadline: float,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains the variants, by default all, for each seed. The outer loop runs over seeds, so that
    all variants have about as many seeds if the time limit ends the loop."""
    tools = make_tools(implementation, device)
    digests: dict[str, dict[int, str]] = {name: {} for name in names or variants.names(device)}
    findings: dict[str, list[str]] = {}
    for seed in seeds:
        for name, digest in digests.items():
            if time.monotonic() > deadline:
                break
            digest[seed], reported = run(name, tools, seed)
            if reported:
                findings[name] = reported
    return {"digests": digests, "findings": findings}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation", choices=("torch", "fsdp_c"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--variants", nargs="+", default=())
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device, options.native)
    result = run_all(options.implementation, device, options.seeds, deadline, options.variants)
    if options.native:
        result["inner"] = loop_group.DELAYS.native.inner_collectives()
    options.file.write_text(json.dumps(result))
    wait_for_threads()


if __name__ == "__main__":
    main()
