"""Random models with shared parts.

Weights may be tied, blocks may run twice, and the head may be called several times in one forward.
A model trains under torch and under fsdp_c in the same ranks, with microbatches without
synchronization. All gradients and parameters must be equal bit by bit.

    PYTHONPATH=tests/harness python tests/parity/workers/shared_models.py --count 60 --world 4
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
from typing import Any

import torch
import torch.nn as nn
from launch import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, STEPS = 13, 5, 2


class Block(nn.Module):
    """A residual block; ``recomputes`` runs it under activation checkpointing."""

    def __init__(self, width: int, recomputes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.recomputes = recomputes

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            result: torch.Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return result
        return self.compute(x)


class LanguageModel(nn.Module):
    """Embedding, blocks in the given order, and a head whose weight may be the embedding's."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice((6, 8, 11))
        count = rng.randint(1, 3)
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, rng.random() < 0.3) for _ in range(count))
        self.order = [*range(count), *(rng.randrange(count) for _ in range(rng.randint(0, 2)))]
        rng.shuffle(self.order)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.is_tied = rng.random() < 0.7
        if self.is_tied:
            self.head.weight = self.embedding.weight
        self.head_calls = rng.choice((1, 1, 2, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for index in self.order:
            x = self.blocks[index](x)
        parts = x.tensor_split(self.head_calls)  # chunk() may return fewer parts
        assert len(parts) == self.head_calls
        return torch.cat([self.head(part) for part in parts])


def draw_settings(rng: random.Random, world: int) -> dict[str, Any]:
    dtypes = (None, torch.bfloat16, torch.float32)
    return {
        "param_dtype": rng.choice(dtypes),
        "reduce_dtype": rng.choice((*dtypes, torch.float64)),
        "reshard": rng.choice((True, False, None)),
        "microbatches": rng.randint(1, 3),
        "keeps_unsharded": rng.random() < 0.3,
        "is_replicated": world == 4 and rng.random() < 0.3,
        "dtype": rng.choice((torch.float32, torch.float32, torch.bfloat16)),
        "splits_root": rng.random() < 0.3,
    }


def train(fully_shard: Any, seed: int, rank: int, world: int) -> list[torch.Tensor]:
    """Returns all local gradients and parameters after each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = LanguageModel(rng)
    settings = draw_settings(rng, world)
    model.to(settings["dtype"])
    shape, names = (
        ((2, 2), ("replicate", "shard")) if settings["is_replicated"] else ((world,), None)
    )
    arguments = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=names),
        "reshard_after_forward": settings["reshard"],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=settings["param_dtype"], reduce_dtype=settings["reduce_dtype"]
        ),
    }
    for block in model.blocks:
        fully_shard(block, **arguments)
    if settings["splits_root"]:
        fully_shard([model.embedding, model.head], **arguments)
    fully_shard(model, **arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(STEPS):
        for microbatch in range(settings["microbatches"]):
            is_last = microbatch == settings["microbatches"] - 1
            model.set_requires_gradient_sync(is_last)
            if settings["keeps_unsharded"]:
                model.set_reshard_after_backward(is_last)
            words = torch.randint(WORDS, (4, LENGTH), generator=generator)
            logits = model(words).float()
            nn.functional.cross_entropy(logits.flatten(0, -2), words.flatten()).backward()
        results += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        results += [p.to_local().detach().clone() for p in model.parameters()]
    return results


def attempt(fully_shard: Any, seed: int, rank: int, world: int) -> list[torch.Tensor] | str:
    try:
        return train(fully_shard, seed, rank, world)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"{type(error).__name__}: {first_line}"


def compare_models(rank: int, world: int, seeds: list[int]) -> tuple[int, dict[int, str]]:
    """Returns the number of models that both train, and the seeds that differ.

    A model for which fsdp_c raises alone, or raises another exception than torch's, differs, too.
    """
    import fsdp_c

    found: dict[int, str] = {}
    trained = 0
    for seed in seeds:
        expected = attempt(torch_fully_shard, seed, rank, world)
        actual = attempt(fsdp_c.fully_shard, seed, rank, world)
        if isinstance(expected, str) or isinstance(actual, str):
            if isinstance(actual, str) and actual != expected:
                found[seed] = (
                    f"torch: {expected if isinstance(expected, str) else 'trains'}; {actual}"
                )
            continue
        trained += 1
        unequal = [
            index
            for index, (a, b) in enumerate(zip(expected, actual, strict=True))
            if a.dtype != b.dtype or not torch.equal(a, b)
        ]
        if unequal:
            found[seed] = f"{len(unequal)} of {len(expected)} tensors differ, first {unequal[0]}"
    return trained, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    arguments = parser.parse_args()
    seeds = list(range(arguments.seed, arguments.seed + arguments.count))
    target = importlib.import_module("shared_models").compare_models  # importable in the ranks
    results = run_ranks(target, arguments.world, (seeds,), timeout=1200)
    for rank, (trained, found) in enumerate(results):
        print(f"rank {rank}: {trained} of {len(seeds)} models trained, {len(found)} differ {found}")
    sys.exit(any(found for _, found in results))


if __name__ == "__main__":
    main()
