"""Trains a GPT whose blocks are compiled by ``torch.compile``, on one rank.

On CUDA the group is NCCL, and inductor compiles. The losses of torch's FSDP2 and of fsdp_c must
have equal bits. Each implementation runs in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from gpt import GPT, GPTConfig, next_byte_loss
from outcome import ON_CUDA, SMALL, conclude, wait_for_threads
from torch.nn.attention import SDPBackend, sdpa_kernel
from variants import MIXED

DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
CONFIG = (
    GPTConfig(layers=2, width=32, heads=2, context=16)
    if SMALL
    else GPTConfig(layers=12, width=768, heads=12, context=512)
)
STEPS = 2 if SMALL else 14
BACKEND = "aot_eager" if SMALL else "inductor"


def train(implementation: str) -> dict[str, Any]:
    """Returns the losses, in hexadecimal digits, and the milliseconds of the fastest step."""
    package = importlib.import_module("fsdp_c") if implementation == "fsdp_c" else fsdp
    torch.manual_seed(0)
    with DEVICE:
        model = GPT(CONFIG)
    for block in model.blocks:
        block.compile(backend=BACKEND)
        package.fully_shard(block, mp_policy=MIXED)
    package.fully_shard(model, mp_policy=MIXED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randint(0, 256, (4, CONFIG.context + 1)).to(DEVICE)
    losses, seconds = [], []
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels are not deterministic
        for _ in range(STEPS):
            begin = time.perf_counter()
            loss = next_byte_loss(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            seconds.append(time.perf_counter() - begin)
    return {"losses": losses, "ms": 1000 * min(seconds)}


def run_process(implementation: str) -> None:
    """Joins a group of one rank, trains, and prints the result."""
    if ON_CUDA:
        torch.cuda.set_device(0)
    backend = "nccl" if ON_CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    print(json.dumps(train(implementation)), flush=True)
    dist.destroy_process_group()
    wait_for_threads()


def main() -> None:
    if len(sys.argv) > 1:
        run_process(sys.argv[1])
        return
    names = ("torch", "fsdp_c")
    processes = {
        name: subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True)
        for name in names
    }
    outputs = {name: process.communicate()[0] for name, process in processes.items()}
    failed = [name for name, process in processes.items() if process.returncode]
    if failed:
        conclude(False, f"the process of {failed[0]} failed", failed=failed)
    results = {name: json.loads(output.splitlines()[-1]) for name, output in outputs.items()}
    is_equal = results["torch"]["losses"] == results["fsdp_c"]["losses"]
    times = "; ".join(f"{name} {result['ms']:.1f} ms" for name, result in results.items())
    line = f"{CONFIG.layers} compiled blocks, {STEPS} losses "
    line += f"{'equal' if is_equal else 'differ'}; fastest steps, both processes at once: {times}"
    conclude(is_equal, line, results=results)


if __name__ == "__main__":
    main()
