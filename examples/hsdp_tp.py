"""Trains on a mesh of replicas, shards and tensor-parallel ranks.

    torchrun --nproc-per-node 4 examples/hsdp_tp.py --mesh 1x2x2    # tensor parallel
    torchrun --nproc-per-node 4 examples/hsdp_tp.py --mesh 2x2x1    # HSDP
    torchrun --nproc-per-node 8 examples/hsdp_tp.py --mesh 2x2x2    # both

Tensor parallelism splits the MLPs first, so their parameters are DTensors on the mesh dimension
"tensor". ``fully_shard`` then shards over "shard" and replicates over "replicate". Ranks that
differ only in "tensor" read the same data.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from arguments import make_gpt, make_gpt_parser, positive
from gpt import GPT, next_byte_loss
from job import UsageError, init_processes, print_on_rank_0, run, select_fully_shard
from progress import Progress
from text import Windows, load_corpus
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DIMENSIONS = ("replicate", "shard", "tensor")


def make_mesh(shape: str, device: torch.device) -> DeviceMesh:
    """Returns the mesh of ``shape``, such as ``1x2x2``."""
    parts = shape.split("x")
    if len(parts) != len(DIMENSIONS) or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--mesh is REPLICASxSHARDSxTENSOR, such as 1x2x2, not {shape}")
    sizes = tuple(int(part) for part in parts)
    ranks = dist.get_world_size()
    if sizes[0] * sizes[1] * sizes[2] != ranks:
        raise UsageError(f"--mesh {shape} does not have {ranks} ranks")
    return init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)


def shard_model(model: GPT, mesh: DeviceMesh, impl: str) -> None:
    """Splits the MLPs over "tensor", then shards the blocks and the root."""
    fully_shard = select_fully_shard(impl)
    # A mesh of one dimension shards. With two dimensions, the first one replicates.
    data_mesh = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)


def train(args: argparse.Namespace) -> None:
    """Trains and reports."""
    device = init_processes(args.device)
    mesh = make_mesh(args.mesh, device)
    torch.manual_seed(args.seed)
    model = make_gpt(args).to(device)
    shard_model(model, mesh, args.impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    print_on_rank_0(f"Training with {args.impl} on {args.mesh} ({', '.join(DIMENSIONS)}) ranks.")

    windows = Windows(load_corpus(args.text_bytes).train, args.context, args.seed)
    shards = mesh["shard"].size()
    reader = mesh.get_local_rank("replicate") * shards + mesh.get_local_rank("shard")
    readers = mesh["replicate"].size() * shards
    microbatches = args.microbatches
    # Ranks that differ only in "tensor" share the tokens of a step.
    tokens = args.batch * args.context * microbatches / mesh["tensor"].size()
    progress = Progress(args.steps, device, "tokens")
    for step in progress.iterate_steps():
        step_loss = torch.zeros((), device=device)
        for microbatch in range(microbatches):
            # Replicas all-reduce once per step, after the last microbatch.
            model.set_requires_all_reduce(microbatch == microbatches - 1)
            position = ((step * microbatches + microbatch) * readers + reader) * args.batch
            inputs, targets = windows.batch(position, args.batch, device)
            loss = next_byte_loss(model(inputs), targets) / microbatches
            loss.backward()
            step_loss += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        progress.add_loss(step_loss, tokens)
    progress.report(model)


if __name__ == "__main__":
    parser = make_gpt_parser("Train a GPT with HSDP and tensor parallelism.")
    parser.add_argument("--mesh", default="1x2x2", help="replicas x shards x tensor parallel")
    parser.add_argument("--microbatches", type=positive, default=2, help="backwards per step")
    parser.add_argument("--batch", type=positive, default=4, help="sequences per microbatch")
    arguments = parser.parse_args()
    run(lambda: train(arguments))
