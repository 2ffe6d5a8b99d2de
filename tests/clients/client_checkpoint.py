"""``torch.distributed.checkpoint`` and its state-dict functions on models sharded by FSDP2."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from client_job import Report, main, rank, seed_everything
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Net(nn.Module):
    """A model with uneven shards (7 and 5 rows on two ranks), a buffer, tied weights and a frozen
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) * self.frozen.sum()
        return self.head(self.norm(x))


def build(seed: int = 5, shard: bool = True, **settings: Any) -> tuple[nn.Module, Any]:
    seed_everything(seed)
    model = Net()
    if shard:
        for block in model.blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=0.05)


def train_steps(
    report: Report, model: nn.Module, optimizer: Any, count: int, seed: int = 0
) -> None:
    data = torch.Generator().manual_seed(10 * seed + rank())
    for _ in range(count):
        x = torch.randint(7, (8,), generator=data)
        loss = nn.functional.cross_entropy(model(x).float(), (x + 1) % 7)
        loss.backward()
        report.record("loss", loss)
        report.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_shards(model: nn.Module, restored: nn.Module) -> None:
    for left, right in zip(model.parameters(), restored.parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local())


class App(Stateful):
    """Model and optimizer as one Stateful item of a checkpoint, as in torch's DCP tutorial."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def case_sharded(report: Report) -> None:
    """Saves and continues to train. A new model loads the checkpoint and trains the same steps."""
    model, optimizer = build()
    train_steps(report, model, optimizer, 2)
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=report.files / "sharded")
    train_steps(report, model, optimizer, 2, seed=1)
    restored, restored_optimizer = build(seed=6)
    dcp.load({"app": App(restored, restored_optimizer)}, checkpoint_id=report.files / "sharded")
    train_steps(report, restored, restored_optimizer, 2, seed=1)
    assert_equal_shards(model, restored)
    report.record_model(restored)


def case_async(report: Report) -> None:
    """An asynchronous save between steps holds the values at the time of the call."""
    model, optimizer = build()
    train_steps(report, model, optimizer, 1)
    # The saving thread needs its own gloo group, because the steps use the default group.
    future = dcp.async_save(
        {"app": App(model, optimizer)},
        checkpoint_id=report.files / "async",
        process_group=dist.new_group(),
    )
    train_steps(report, model, optimizer, 1, seed=1)
    future.result()
    restored, restored_optimizer = build(seed=6)
    dcp.load({"app": App(restored, restored_optimizer)}, checkpoint_id=report.files / "async")
    train_steps(report, restored, restored_optimizer, 1, seed=1)
    assert_equal_shards(model, restored)
    report.record_model(restored)


def case_full(report: Report) -> None:
    """Saves full state dicts on rank 0 with torch.save, and loads them by broadcast from rank 0."""
    model, optimizer = build()
    train_steps(report, model, optimizer, 2)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimizer_state = get_state_dict(model, optimizer, options=full)
    loaded: dict[str, Any] = {"model": {}, "optim": {}}
    if rank() == 0:
        torch.save({"model": weights, "optim": optimizer_state}, report.files / "full.pt")
        report.record("model", weights)
        # Not the saved objects: these share the step counts of ``optimizer``.
        loaded = torch.load(report.files / "full.pt")
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    restored, restored_optimizer = build(seed=6)
    set_model_state_dict(restored, loaded["model"], options=broadcast)
    set_optimizer_state_dict(restored, restored_optimizer, loaded["optim"], options=broadcast)
    train_steps(report, model, optimizer, 2, seed=1)
    train_steps(report, restored, restored_optimizer, 2, seed=1)
    assert_equal_shards(model, restored)
    report.record_model(restored)


def case_options(report: Report) -> None:
    """Uses the options for offload, for frozen parameters and for flattened optimizer state."""
    model, optimizer = build(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    train_steps(report, model, optimizer, 2)
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    report.record("offloaded", offloaded)
    trained = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    report.record("trained", get_model_state_dict(model, options=trained))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    report.record("moments", get_optimizer_state_dict(model, optimizer, options=flat))
    plain, _ = build(seed=6, shard=False)
    target_state = copy.deepcopy(plain.state_dict())
    loaded = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, target_state, options=loaded)
    train_steps(report, model, optimizer, 1)
    report.record_model(model)


def case_formats(report: Report) -> None:
    """Converts a DCP folder to a torch.save file and back."""
    model, optimizer = build()
    train_steps(report, model, optimizer, 1)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=report.files / "dcp")
    if rank() == 0:
        dcp_to_torch_save(report.files / "dcp", report.files / "from_dcp.pt")
        torch_save_to_dcp(report.files / "from_dcp.pt", report.files / "to_dcp")
        report.record("file", torch.load(report.files / "from_dcp.pt")["model"])
    report.record_model(model)


if __name__ == "__main__":
    main(globals())
