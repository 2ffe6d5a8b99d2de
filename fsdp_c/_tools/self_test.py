"""The program of each rank of ``python -m fsdp_c --check``: trains with torch and with fsdp_c.

    python -m fsdp_c._tools.self_test DEVICE RANK RANKS FILE

DEVICE is ``cpu`` (over gloo) or ``cuda`` (over NCCL, one device per rank). RANKS is the number of
ranks, and FILE their rendezvous file. The last line is ``same`` or the difference.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_c import MixedPrecisionPolicy, fully_shard, is_active
from fsdp_c_autoload import redirect


def train(shard: Any, mesh: DeviceMesh) -> tuple[bool, list[torch.Tensor]]:
    """Trains a small model for two steps. Returns whether fsdp_c ran; losses and parameters."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        shard(block, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.full((4, 9), float(dist.get_rank() + step), device=mesh.device_type)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tensors = [*losses, *(param.full_tensor() for param in model.parameters())]
    return is_active(model), [tensor.cpu() for tensor in tensors]


def main() -> None:
    device, rank, ranks, file = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{file}",
        rank=int(rank),
        world_size=int(ranks),
    )
    # Without a mesh, fully_shard would train on an accelerator if the machine has one.
    mesh = init_device_mesh(device, (int(ranks),))
    results = {}
    for name, shard in (
        ("torch", redirect.original(torch_fully_shard)),
        ("fsdp_c", fully_shard),
    ):
        is_fsdp_c_active, results[name] = train(shard, mesh)
        if is_fsdp_c_active != (name == "fsdp_c"):
            print(f"{name}'s fully_shard was run by another implementation")
            return
    is_equal = all(map(torch.equal, results["torch"], results["fsdp_c"]))
    print("same" if is_equal else "losses or parameters differ from torch's")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
