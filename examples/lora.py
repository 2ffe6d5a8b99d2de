"""Fine-tunes a model with LoRA: frozen sharded weights, and small trained adapters.

    torchrun --nproc-per-node 2 examples/lora.py --out adapters.pt

The model is the byte-level GPT of gpt.py with random weights. Replace ``make_model`` and the text
by your own. Each unit has frozen and trained parameters: the frozen ones are gathered and never
reduced, and only the adapters have gradients and optimizer states.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import make_gpt, make_gpt_parser, positive
from gpt import GPT, next_byte_loss
from job import RANK, init_processes, prepare_out, print_on_rank_0, run, select_fully_shard
from progress import Progress, gather_full_tensor
from text import Windows, load_corpus
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear layer plus the trained product of two matrices of rank ``rank``."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def make_model(args: argparse.Namespace) -> GPT:
    """Returns the frozen model with adapters in the linear layers of its blocks."""
    model = make_gpt(args)
    model.requires_grad_(False)
    for parent in [*model.blocks.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, args.rank))
    return model


def save_adapters(model: nn.Module, path: Path) -> None:
    """Writes the adapters as full tensors. Every rank must call this."""
    adapters = {
        name: gather_full_tensor(value).cpu()
        for name, value in model.state_dict().items()
        if "lora_" in name
    }
    if RANK == 0:
        torch.save(adapters, path)
        print_on_rank_0(f"Written to        {path}: {len(adapters)} tensors")


def train(args: argparse.Namespace) -> None:
    """Trains the adapters, saves and reports."""
    device = init_processes(args.device)
    if args.out is not None:
        prepare_out(args.out.parent, args.out.name)
    fully_shard = select_fully_shard(args.impl)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=args.lr)
    trained = sum(param.numel() for param in adapters)
    total = sum(param.numel() for param in model.parameters())
    print_on_rank_0(f"Training {trained:,} of {total:,} parameters with {args.impl}.")

    windows = Windows(load_corpus(args.text_bytes).train, args.context, args.seed)
    ranks = dist.get_world_size()
    progress = Progress(args.steps, device, "tokens")
    for step in progress.iterate_steps():
        position = (step * ranks + RANK) * args.batch
        inputs, targets = windows.batch(position, args.batch, device)
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.add_loss(loss, inputs.numel())
    if args.out is not None:
        save_adapters(model, args.out)
    progress.report(model)


if __name__ == "__main__":
    parser = make_gpt_parser("Fine-tune a frozen GPT with LoRA adapters.", lr=1e-2)
    parser.add_argument("--out", type=Path, help="file for the trained adapters")
    parser.add_argument("--rank", type=positive, default=8, help="rank of the adapters")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per rank and step")
    arguments = parser.parse_args()
    run(lambda: train(arguments))
