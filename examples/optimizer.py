"""The optimizer and the learning rate of train_gpt.py."""

from __future__ import annotations

import math

import torch
from torch import nn


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Creates AdamW with weight decay for matrices, and none for biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """Sets the rate: linear warm-up over 5 % of the steps, cosine decay to ``peak / 10``."""
    warm_up = max(1, steps // 20)
    progress = (step - warm_up) / max(1, steps - warm_up)
    decay = 0.55 + 0.45 * math.cos(math.pi * progress)
    for group in optimizer.param_groups:
        group["lr"] = peak * ((step + 1) / warm_up if step < warm_up else decay)
