"""Rank functions of test_readme.py: run the Python blocks of documents.

A block can use the names of a usual job, such as ``model`` and ``optimizer``. They are created at
their first use. After each block its model must still train.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors_writer import write
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import fsdp_c

FENCE = re.compile(r"^([ ]*)```python\n(.*?)^\1```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: ([^>]+) -->\n\Z")
"""A comment directly before a block that cannot run here, with the reason."""


def blocks(text: str) -> list[tuple[int, str]]:
    """Returns the first line number and the code of each fenced Python block."""
    results = []
    for match in FENCE.finditer(text):
        indent, code = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        results.append((line, "".join(part[len(indent) :] for part in code.splitlines(True))))
    return results


def reason_not_to_run(text: str, line: int) -> str:
    """Returns the reason of the comment before the block at ``line``, or an empty string."""
    before = "".join(text.splitlines(True)[: line - 2])
    match = NOT_RUN.search(before)
    return match[1] if match else ""


def needs_matplotlib(code: str) -> bool:
    """Returns whether the block needs matplotlib."""
    return ".plot(" in code


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class LanguageModel(nn.Module):
    """Int (batch, length) -> (batch, length, 16). Embedding and head are in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, prompt: object) -> torch.Tensor:
        """Ignores ``prompt``, because the documents pass ``...``."""
        return self(TOKENS).argmax(-1)


class VisionModel(nn.Module):
    """(batch, 3, 8, 8) -> (batch, 4)."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


class LoraLinear(nn.Linear):
    """A linear layer with a LoRA adapter."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.lora_a = nn.Parameter(torch.randn(2, width))
        self.lora_b = nn.Parameter(torch.zeros(width, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_a.t() @ self.lora_b.t()


TOKENS = torch.arange(12).view(2, 6)


def loss_of(model: Any) -> torch.Tensor:
    inputs = torch.randn(2, 3, 8, 8) if isinstance(model, VisionModel) else TOKENS
    return model(inputs).float().square().mean()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()


class Names(dict[str, Any]):
    """The globals of one block. A missing name is created by the method ``make_<name>``."""

    def __init__(self, code: str) -> None:
        super().__init__(torch=torch, fsdp_c=fsdp_c, rank=dist.get_rank(), Block=Block)
        self.update(LanguageModel=LanguageModel, VisionModel=VisionModel, tokens=TOKENS)
        self.shards_itself = "_shard(" in code or "replicate(" in code

    def __missing__(self, name: str) -> Any:
        maker: Callable[[], Any] | None = getattr(self, f"make_{name}", None)
        if maker is None:
            raise KeyError(name)
        self[name] = maker()
        return self[name]

    def make_model(self) -> nn.Module:
        model = LanguageModel()
        return model if self.shards_itself else fsdp_c.auto_shard(model, "blocks")

    def make_lora_model(self) -> nn.Module:
        model = LanguageModel()
        for block in model.blocks:
            block.linear = LoraLinear(8)  # type: ignore[assignment]
        return model

    def make_loader(self) -> list[torch.Tensor]:
        return [TOKENS, TOKENS]

    def make_image_loader(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(2, 3, 8, 8), torch.tensor([0, 3]))] * 2

    def make_policy(self) -> Any:
        return fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(self["model"])

    def make_loss(self) -> torch.Tensor:
        return loss_of(self["model"])

    def make_evaluate(self) -> Callable[[nn.Module], None]:
        return torch.no_grad()(lambda model: loss_of(model.eval()))

    def make_saved(self) -> dict[str, Any]:
        """Returns a full FSDP1 checkpoint on rank 0, and an empty one elsewhere."""
        old = FullyShardedDataParallel(LanguageModel(), device_id=torch.device("cpu"))
        optimizer = adamw(old)
        train(old, optimizer)
        state = FullyShardedDataParallel.full_optim_state_dict(old, optimizer)
        return {"optim": state if dist.get_rank() == 0 else {}}


def write_files() -> None:
    """Writes the files that blocks read into the current folder."""
    old = DistributedDataParallel(LanguageModel())
    optimizer = adamw(old)
    train(old, optimizer)
    if dist.get_rank() == 0:
        write(Path("model.safetensors"), dict(LanguageModel().state_dict()))
        torch.save({"model": old.state_dict(), "optim": optimizer.state_dict()}, "ddp.pt")
    dist.barrier()


def run_blocks(
    rank: int, world: int, texts: dict[str, str], folder: str, draw: bool = False
) -> list[str]:
    """Runs the blocks that draw, or all others; returns `file:line` and traceback of failures."""
    os.chdir(folder)
    write_files()
    failures = []
    for file, text in texts.items():
        for line, code in blocks(text):
            if reason_not_to_run(text, line) or needs_matplotlib(code) != draw:
                continue
            torch.manual_seed(0)
            names = Names(code)
            try:
                exec(compile("\n" * (line - 1) + code, file, "exec"), names)
                if "model" in names and not next(names["model"].parameters()).is_meta:
                    names["model"].train()
                    train(names["model"], adamw(names["model"]))
            except Exception:
                failures.append(f"{file}:{line}: {traceback.format_exc()}")
    return failures
