"""Trains a convolutional network with batch norms on generated images.

    torchrun --nproc-per-node 2 examples/vision.py --bf16

Each class has a pattern, and an image is its pattern plus noise. Replace ``ImageStream`` by your
data. With ``--bf16``, all layers compute in bf16 except the batch norms. These are units of their
own, whose policy keeps fp32 parameters. Their running statistics are buffers, which are neither
sharded nor averaged.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from arguments import make_parser, positive
from job import RANK, init_processes, print_on_rank_0, run, select_fully_shard
from progress import Progress, mean_over_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class ImageStream:
    """Generates images of shape (batch, 3, size, size) and their labels."""

    def __init__(self, classes: int, size: int, seed: int, device: torch.device) -> None:
        shared = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(classes, 3, size, size, generator=shared)
        self.generator = torch.Generator().manual_seed(seed + 1 + RANK)  # other images on each rank
        self.device = device

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(len(self.patterns), (count,), generator=self.generator)
        noise = torch.randn(count, *self.patterns.shape[1:], generator=self.generator)
        images = self.patterns[labels] + 2.0 * noise
        return images.to(self.device), labels.to(self.device)


class Residual(nn.Module):
    """Two convolutions with batch norms, and a shortcut that halves the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_model(width: int, classes: int) -> nn.Sequential:
    """Returns a stem, three residual blocks and a linear classifier."""
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
    blocks = (Residual(width << i, width << (i + 1)) for i in range(3))
    head = nn.Linear(width << 3, classes)
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def shard_model(model: nn.Module, args: argparse.Namespace) -> None:
    """Shards the blocks and the root. With ``--bf16``, batch norms are units in full precision."""
    fully_shard = select_fully_shard(args.impl)
    policy, full = MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        full = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    for block in model.children():
        if isinstance(block, Residual):
            if args.bf16:
                # One unit for both norms; their small gathers are shared.
                fully_shard([block.norm1, block.norm2], mp_policy=full)
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def train(args: argparse.Namespace) -> None:
    """Trains and reports."""
    device = init_processes(args.device)
    torch.manual_seed(args.seed)
    model = make_model(args.width, args.classes).to(device)
    shard_model(model, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    data = ImageStream(args.classes, args.size, args.seed, device)
    progress = Progress(args.steps, device, "images")
    for _ in progress.iterate_steps():
        images, labels = data.batch(args.batch)
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        progress.add_loss(loss, len(images))
    progress.report(model)
    model.eval()
    with torch.no_grad():
        images, labels = data.batch(args.batch)
        accuracy = mean_over_ranks((model(images).argmax(1) == labels).float().mean())
    print_on_rank_0(f"Accuracy          {accuracy:.0%} of new images")


if __name__ == "__main__":
    parser = make_parser("Train a convolutional network on generated images.", lr=0.02)
    parser.add_argument("--bf16", action="store_true", help="compute convolutions in bf16")
    parser.add_argument("--batch", type=positive, default=32, help="images per rank and step")
    parser.add_argument("--classes", type=positive, default=10, help="classes of images")
    parser.add_argument("--size", type=positive, default=32, help="pixels of each side")
    parser.add_argument("--width", type=positive, default=16, help="channels of the first layer")
    arguments = parser.parse_args()
    run(lambda: train(arguments))
