"""Ranks whose data of one collective is corrupted, with the guard mode "hash"."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from error_messages import error_message
from torch._C._distributed_c10d import Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c

SIZE = 5
BLOCKS = 3
OPERATIONS = {"all-gather": "c10d._allgather_base_", "all-reduce": "c10d.allreduce_"}
PER_STEP = {"all-gather": 2 * BLOCKS, "all-reduce": BLOCKS}
"""Number of collectives in a step: each block is gathered in forward and in backward."""


class BitFlip(TorchDispatchMode):
    """Flips one bit of the output of a collective, after the collective and before its use."""

    def __init__(self, operation: str, index: int, seed: int) -> None:
        super().__init__()
        self.name = OPERATIONS[operation]
        self.index = index
        """Number of the collective in the step; -1: none."""
        self.random = random.Random(seed)
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(self.name):
            if self.seen == self.index:
                Work.unbox(result[-1]).wait()
                output = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
                bits = output.view(torch.uint8)
                bits[self.random.randrange(bits.numel())] ^= 1 << self.random.randrange(8)
            self.seen += 1
        return result


def make_model(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(BLOCKS)))
    for block in model:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def run_step(model: Any) -> str:
    """Runs forward and backward. Returns the error's message, or ""."""
    return error_message(lambda: model(torch.ones(2, SIZE)).sum().backward())


def read_gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.to_local().clone() for p in model.parameters()]


def flip_bits(rank: int, world_size: int, flips: int) -> tuple[list[tuple[str, str]], bool]:
    """Flips a bit on one rank in each of ``flips`` steps. Four ranks: HSDP, two replicas.

    Returns, for each step, the collective with the rank, and the exception's text. Also returns
    whether a step after them has the gradients of a step before them.
    """
    is_hsdp = world_size == 4
    sizes, names = ((2, 2), ("replicate", "shard")) if is_hsdp else ((world_size,), ("shard",))
    model = make_model(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    for _ in range(2):
        model.zero_grad()
        run_step(model)
    expected = read_gradients(model)
    outcomes = []
    for seed in range(flips):
        choice = random.Random(seed)
        operation = "all-reduce" if is_hsdp and seed % 2 == 1 else "all-gather"
        index, changed = choice.randrange(PER_STEP[operation]), choice.randrange(world_size)
        model.zero_grad()
        with BitFlip(operation, index if rank == changed else -1, seed):
            text = run_step(model)
        outcomes.append((f"{operation} of rank {changed}", text))
        model.reset_iter_state()
        dist.barrier()
    model.zero_grad()
    text = run_step(model)
    equal = [torch.equal(a, b) for a, b in zip(read_gradients(model), expected)]
    return outcomes, text == "" and all(equal)


def flip_bit_of_message(data: bytes) -> None:
    """Flips a bit of a message with these bytes, in the shared memory of this rank."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            is_ring = "memfd:" in os.readlink(link)
        except FileNotFoundError:
            continue
        if not is_ring:
            continue
        with mmap.mmap(int(link.name), 0) as memory:
            at = memory.find(data)
            if at >= 0:
                memory[at + len(data) // 2] ^= 4
                found += 1
    assert found == 1


def corrupt_message(rank: int, world_size: int) -> list[str]:
    """Rank 1 corrupts a message after it has sent it. The parameter has its own
    chunk, so the message consists of the bytes of its shard.

    Returns the exceptions of this step and of the next one.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    mesh = init_device_mesh("cpu", (world_size,))
    fsdp_c.fully_shard(model[0], mesh=mesh)
    fsdp_c.fully_shard(model, mesh=mesh)
    x = torch.ones(2, 512)
    texts = []
    for step in range(4):
        if step == 2:
            shard = model[0].weight.to_local().detach()
            if rank != 1:
                dist.barrier()
            model[0].unshard(async_op=True)
            if rank == 1:
                flip_bit_of_message(shard.numpy().tobytes())
                dist.barrier()
        texts.append(error_message(lambda: model(x).sum().backward()))
        if texts[-1]:
            model.reset_iter_state()
        model.zero_grad()
        dist.barrier()
    assert texts[:2] == ["", ""]
    return texts[2:]


def train_with_modes(rank: int, world_size: int, modes: tuple[Any, ...]) -> str:
    """Runs two steps; ``modes`` is the guard mode of each rank."""
    fsdp_c.set_guard(modes[rank])
    model = make_model(DeviceMesh.from_group(dist.new_group(), "cpu"))
    return run_step(model) or run_step(model)


def reset_after_different_waits(rank: int, world_size: int) -> str:
    """All ranks gather a block, but only rank 1 waits for it, before all ranks reset."""
    model = make_model(DeviceMesh.from_group(dist.new_group(), "cpu"))
    text = run_step(model)
    handle = model[1].unshard(async_op=True)
    if rank == 1:
        handle.wait()
    model.reset_iter_state()
    model.zero_grad()
    return text or run_step(model) or run_step(model)


def fall_back_on_one_rank(rank: int, world_size: int, mode: Any, steps_before: int) -> str:
    """Rank 0 replaces one of torch's collectives after ``steps_before`` steps. From then on,
    functions of torch issue the collectives of this rank. Returns the messages of all steps."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    fsdp_c.set_guard(mode)
    model = make_model(DeviceMesh.from_group(dist.new_group(), "cpu"))
    texts = [run_step(model) for _ in range(steps_before)]
    original = _fsdp_param_group.foreach_all_gather
    if rank == 0:
        _fsdp_param_group.foreach_all_gather = lambda *args, **kwargs: original(*args, **kwargs)
    return "".join([*texts, run_step(model), run_step(model)])
