"""Host work and memory of a CUDA step, under torch's FSDP2 and fsdp_c, without a GPU.

Method. torch's CUDA build runs on the simulated device of tests/cuda, which runs no kernel. The
process is rank 0 of 8 NCCL ranks; the other ranks are emulated. Every implementation trains each
job in processes of its own, in turns. Launches, events, collectives, allocations and bytes are
exact. A time is the CPU time of the process minus that of the bare model, which is not sharded. It
is the minimum over rounds and steps. "CPU ms" is forward and backward.
``tests/cuda/workers/jobs.py`` has the models and jobs, ``figures.py`` beside it measures.

    python benchmarks/cuda_steps.py [--rounds N] [--steps N] [--json FILE]

The Python needs a CUDA build of torch, and fsdp_c for it (``make cuda-sim``).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "8 blocks of Llama 8B": (
        "LLAMA_8B",
        8,
        (
            "fsdp",
            "fsdp, checkpointing",
            "fsdp, 4 microbatches without sync",
            "hsdp",
            "hsdp, 4 microbatches without all-reduce",
            "replicate",
            "replicate, 4 microbatches without all-reduce",
        ),
    ),
    "ViT-L": ("VIT_L", 24, ("fsdp",)),
    "4 blocks of Qwen3-30B-A3B": ("QWEN3_MOE", 4, ("fsdp",)),
}
"""By model: its size in jobs.py, its blocks, and its jobs."""


def measure(rounds: int, steps: int) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Returns the figures of "torch" and "fsdp_c" by model and job."""
    import figures

    keys = [*figures.COUNTS, "allocations", "peak MiB", "reserved MiB"]
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for model, (size, blocks, names) in MODELS.items():
        options = argparse.Namespace(size=size, blocks=blocks, rounds=rounds, steps=steps)
        results[model] = {}
        for name in names:
            measured: dict[str, dict[str, Any]] = figures.run_rounds(name, options)
            bare = measured.pop("bare")
            results[model][name] = {
                implementation: {key: figure[key] for key in keys}
                | {key: figure[key] - bare[key] for key in figures.TIMES}
                for implementation, figure in measured.items()
            }
            print(model, name, results[model][name], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json")
    given = parser.parse_args()
    paths = [str(ROOT / "build/cuda-sim/package"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.append(str(ROOT / "tests/cuda/workers"))
    import report  # raises under FSDP_C=1

    models = measure(given.rounds, given.steps)
    report.write_json(given.json, "cuda_steps", {"models": models})


if __name__ == "__main__":
    main()
