"""Trains a small byte-level GPT with fully sharded parameters, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py --out demo_out
    torchrun --nproc-per-node 2 examples/train_gpt.py --out demo_out --resume

The text is the source of Python's standard library. With ``--impl torch``, ``losses.json`` is equal
bit by bit. The folder also gets summary.json, checkpoints, and a plot of the losses and times.
Unless ``--compare 0`` is passed, more plots compare steps and timelines of both implementations.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import job
import torch
import torch.distributed as dist
from arguments import make_gpt, make_gpt_parser, natural, positive
from checkpoint import Checkpoints
from compare import compare_implementations
from gpt import GPT, generate, next_byte_loss
from optimizer import make_optimizer, set_learning_rate
from progress import Progress, gather_full_tensor, mean_over_ranks
from text import Windows, load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


def make_run(args: argparse.Namespace, device: torch.device, impl: str) -> tuple[GPT, Any]:
    """Returns a sharded model, which has equal weights on every rank at first, and an optimizer."""
    fully_shard = job.select_fully_shard(impl)
    torch.manual_seed(args.seed)
    model = make_gpt(args).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.manual_seed(args.seed + 1 + job.RANK)  # dropout differs from rank to rank
    return model, make_optimizer(model, args.lr)


def train_step(
    model: GPT, optimizer: Any, inputs: Tensor, targets: Tensor, phase: Any = nullcontext
) -> tuple[Tensor, Tensor]:
    """Trains for one step. Returns this rank's loss, and the gradient norm of all ranks."""
    with phase("forward"):
        loss = next_byte_loss(model(inputs), targets)
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        norm = gather_full_tensor(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def validate(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the mean loss of all ranks in nats per byte."""
    model.eval()
    losses = torch.stack([next_byte_loss(model(inputs), targets) for inputs, targets in batches])
    model.train()
    return mean_over_ranks(losses.mean())


def train(args: argparse.Namespace) -> None:
    """Trains, with validations and checkpoints; then samples, reports and compares."""
    device, ranks = job.init_processes(args.device), dist.get_world_size()
    job.prepare_out(args.out)
    corpus = load_corpus(args.text_bytes)
    windows = Windows(corpus.train, args.context, args.seed)
    held_out = Windows(corpus.validation, args.context, args.seed)

    def get_batch(source: Windows, step: int) -> tuple[Tensor, Tensor]:
        return source.batch((step * ranks + job.RANK) * args.batch, args.batch, device)

    model, optimizer = make_run(args, device, args.impl)
    checkpoints = Checkpoints(args, device, corpus.digest, model, optimizer)
    first, history = checkpoints.restore()
    job.print_on_rank_0(f"Training with {args.impl} on {ranks} x {device.type}.")
    progress = Progress(args.steps, device, "tokens", first)
    for step in progress.iterate_steps():
        with history.phase("data"):
            inputs, targets = get_batch(windows, step)
        set_learning_rate(optimizer, step, args.steps, args.lr)
        loss, norm = train_step(model, optimizer, inputs, targets, history.phase)
        progress.add_loss(loss, inputs.numel())
        history.add_step(progress.loss, norm.item())
        if checkpoints.is_due(args.validate_every, step):
            history.add_validation(step, validate(model, [get_batch(held_out, i) for i in (0, 1)]))
        if checkpoints.is_due(args.save_every, step):
            checkpoints.save(step, history)
    sample = generate(model, b"class Parser:\n    def ", args.sample_bytes, seed=args.seed)
    job.print_on_rank_0("Sample:", *(f"  | {line}" for line in sample.splitlines()))
    history.write(args.out, args.impl, progress.report(model))
    if args.compare > 0:
        make = partial(make_run, args, device)
        compare_implementations(make, train_step, (inputs, targets), args.compare, args.out)


if __name__ == "__main__":
    parser = make_gpt_parser("Train a byte-level GPT on Python's source.", steps=340)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo_out"), help="folder for all results")
    add("--resume", nargs="?", type=Path, const="newest", help="continue from a checkpoint")
    add("--bf16", action="store_true", help="compute in bf16, reduce gradients in fp32")
    add("--batch", type=positive, default=8, help="sequences per rank and step")
    add("--validate-every", type=positive, default=50, help="steps between validations")
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--sample-bytes", type=natural, default=300, help="length of the generated sample")
    add("--compare", type=natural, default=6, help="steps to compare implementations in")
    job.run(partial(train, parser.parse_args()))
