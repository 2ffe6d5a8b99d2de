"""torchao's tensor subclasses: weights with all-gather extensions, and quantized optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from client_job import Report, main, rank, seed_everything
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(width: int = WIDTH) -> nn.Sequential:
    seed_everything(4)
    return nn.Sequential(*(Block(width) for _ in range(2)))


def shard(model: nn.Sequential, **settings: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def train(
    report: Report,
    model: nn.Sequential,
    optimizer: Any,
    after: Callable[[nn.Module], None] = lambda model: None,
    steps: int = 3,
    accumulate: int = 1,
    width: int = WIDTH,
) -> None:
    data = torch.Generator().manual_seed(rank())
    for _ in range(steps):
        for part in range(accumulate):
            model.set_requires_gradient_sync(part == accumulate - 1)
            x = torch.randn(16, width, generator=data)
            loss = (model(x) - x.flip(-1)).square().float().mean()
            loss.backward()
            report.record("loss", loss)
        report.record_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    with torch.no_grad():
        report.record("evaluation", model(torch.randn(4, width, generator=data)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01)


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def train_float8(report: Report, after: Callable[[nn.Module], None], **settings: Any) -> None:
    """All-gathers weights in float8: torchao implements the cast as an all-gather extension."""
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = shard(convert_to_float8_training(build(), config=config), **settings)
    train(report, model, adamw(model), after)
    report.record_model(model)


def case_float8(report: Report) -> None:
    train_float8(report, lambda model: None)


def case_float8_precomputed(report: Report) -> None:
    train_float8(report, precompute_float8_dynamic_scale_for_fsdp, mp_policy=BF16)


def case_float8_no_reshard(report: Report) -> None:
    train_float8(report, precompute_float8_dynamic_scale_for_fsdp, reshard_after_forward=False)


def train_quantized(
    report: Report, config: Any, after: Any = lambda model: None, **overrides: Any
) -> None:
    settings = {
        key: overrides.pop(key)
        for key in ("mp_policy", "reshard_after_forward")
        if key in overrides
    }
    model = build()
    quantize_(model, config)
    model = shard(model, **settings)
    train(report, model, adamw(model), after, **overrides)
    report.record_model(model)


def case_int8_mixed(report: Report) -> None:
    """The extension gathers one input, whose dtype differs from the parameter's."""
    train_quantized(report, int8_mixed_precision_training(), mp_policy=BF16)


def case_int8_mixed_module(report: Report) -> None:
    config = Int8MixedPrecisionTrainingConfig(output=True, grad_input=False, grad_weight=False)
    train_quantized(report, config, mp_policy=BF16, accumulate=2)


def case_int8_weights(report: Report) -> None:
    """The extension gathers two inputs, int8 data and a scale; the quantized weight is trained."""
    model = build()
    quantize_(model, int8_weight_only_quantized_training())
    model = shard(model, mp_policy=BF16)
    seed_everything(rank())  # stochastic rounding in the optimizer's copy
    train(report, model, torch.optim.SGD(model.parameters(), lr=0.05))
    report.record_model(model)


def case_bitnet(report: Report) -> None:
    train_quantized(report, bitnet_training(), mp_policy=BF16)


def case_bitnet_precomputed(report: Report) -> None:
    """With precomputed scales the all-gather moves two bits per weight, packed into bytes."""
    train_quantized(report, bitnet_training(), precompute_bitnet_scale_for_fsdp)


class Adapted(nn.Module):
    """A QLoRA layer: a frozen NF4 weight and a trained low-rank update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = to_nf4(torch.randn(width, width) / width**0.5, 16, 8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + linear_nf4(x, self.weight) + self.up(self.down(x))


def train_nf4(report: Report, **settings: Any) -> None:
    seed_everything(4)
    model = shard(nn.Sequential(Adapted(WIDTH), Adapted(WIDTH)), **settings)
    train(report, model, adamw(model))
    report.record_model(model)


def case_nf4(report: Report) -> None:
    train_nf4(report)


def case_nf4_no_reshard(report: Report) -> None:
    train_nf4(report, reshard_after_forward=False)


def train_with_quantized_optimizer(report: Report, kind: Any) -> None:
    """Trains with quantized optimizer states, DTensors of subclasses; saves and resumes once."""
    torch.compiler.set_stance("force_eager")
    model = shard(build(96))
    optimizer = kind(model.parameters(), lr=0.01)
    train(report, model, optimizer, steps=2, width=96)
    moments = [list(state.values()) for state in optimizer.state.values()]
    assert any(type(m.to_local()) is not torch.Tensor for _, m, _ in moments), "not quantized"
    report.record("moments", moments)
    weights, state = get_state_dict(model, optimizer)
    report.record("optimizer", list(state["state"]))
    save({"model": weights}, checkpoint_id=report.files / "model")
    restored = shard(build(96))
    restored_optimizer = kind(restored.parameters(), lr=0.01)
    train(report, restored, restored_optimizer, steps=1, width=96)
    loaded = get_state_dict(restored, restored_optimizer)[0]
    load({"model": loaded}, checkpoint_id=report.files / "model")
    set_state_dict(restored, restored_optimizer, model_state_dict=loaded, optim_state_dict=state)
    train(report, restored, restored_optimizer, steps=1, width=96)
    report.record_model(restored)


def case_adamw8bit(report: Report) -> None:
    train_with_quantized_optimizer(report, AdamW8bit)


def case_adamw4bit(report: Report) -> None:
    train_with_quantized_optimizer(report, AdamW4bit)


def case_adamwfp8(report: Report) -> None:
    train_with_quantized_optimizer(report, AdamWFp8)


def case_adamw8bit_uneven(report: Report) -> None:
    """A weight of 63 rows on two ranks: moments are quantized on one rank only.

    torchao quantizes a moment if the rank's shard is large enough. Steps and sharded checkpoints
    work. ``full_tensor()`` of such a moment does not: the ranks gather messages of different sizes.
    """
    torch.compiler.set_stance("force_eager")

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        seed_everything(4)
        model = nn.Sequential(nn.Linear(128, 63, bias=False), nn.Linear(63, 128, bias=False))
        return shard(model), AdamW8bit(model.parameters(), lr=0.01)

    model, optimizer = make()
    train(report, model, optimizer, steps=2, width=128)
    moments = [list(state.values()) for state in optimizer.state.values()]
    report.record("moments", moments)
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, [type(moment.to_local()).__name__ for _, moment, _ in moments])
    report.record("kinds", kinds)
    assert kinds == [["OptimState8bit", "Tensor"], ["Tensor", "Tensor"]]
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=report.files / "uneven")
    fresh, other = make()
    train(report, fresh, other, steps=1, width=128)
    weights, state = get_state_dict(fresh, other)
    load({"model": weights, "optimizer": state}, checkpoint_id=report.files / "uneven")
    set_state_dict(fresh, other, model_state_dict=weights, optim_state_dict=state)
    report.record("loaded", [list(state.values()) for state in other.state.values()])
    train(report, fresh, other, steps=1, width=128)
    report.record_model(fresh)


if __name__ == "__main__":
    main(globals())
