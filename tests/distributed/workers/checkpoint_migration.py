"""Rank functions of test_checkpoint_migration.py: recipes of docs/migrate.md for old checkpoints.

``fsdp1`` and ``ddp`` train, save model and optimizer, and continue. Then they load the files into a
model of fsdp_c, continue, and compare losses and weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from toy_models import MLPBlock

import fsdp_c

DIM = 6
SAVED, STEPS = 3, 6
"""Number of steps before the checkpoint, and number of all steps."""

Losses = list[float]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(DIM, DIM),
        MLPBlock(DIM, 5, bias=False),
        MLPBlock(DIM, 8, bias=False),
        nn.LayerNorm(DIM),
    )


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with two parameter groups."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ],
        lr=0.05,
    )


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> Losses:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, DIM, generator=generator)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_continues(
    expected: Losses,
    weights: dict[str, torch.Tensor] | None,
    model: Any,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Trains the remaining steps. Asserts equal losses and, if ``weights`` are given, weights."""
    losses = train(model, optimizer, range(SAVED, STEPS))
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if weights is not None:
        torch.testing.assert_close(full, weights, rtol=0, atol=0)


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Runs the recipe's last step: loads the optimizer state. ``saved`` is empty except on rank
    0."""
    for param_state in saved.get("state", {}).values():  # FSDP1 shares "step" among parameters
        param_state.update({key: copy.deepcopy(value) for key, value in param_state.items()})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, saved, options=options)


# ---- FSDP1 ----


def fsdp1(rank: int, world: int, folder: str) -> None:
    """Migrates full checkpoints with flat parameters and with ``use_orig_params``."""
    _fsdp1(Path(folder) / "flat.pt", False, _adamw_with_one_group)
    _fsdp1(Path(folder) / "original.pt", True, _sgd)


def _adamw_with_one_group(model: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with one group, because flat parameters contain weights and biases."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Returns SGD, which has one state tensor per parameter.

    FSDP1 loses AdamW's ``exp_avg``: see ``fsdp1_saves_exp_avg_aliased_to_exp_avg_sq``.
    """
    groups = make_adamw(model).param_groups
    return torch.optim.SGD(
        [{key: group[key] for key in ("params", "weight_decay")} for group in groups],
        lr=0.05,
        momentum=0.9,
    )


def _wrap_fsdp1(use_orig_params: bool) -> FSDP:
    return FSDP(
        net(0),
        auto_wrap_policy=ModuleWrapPolicy({MLPBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def _full_state(old: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.state_dict_type(old, StateDictType.FULL_STATE_DICT):
        return {name: tensor.clone() for name, tensor in old.state_dict().items()}


def _fsdp1(
    path: Path, use_orig_params: bool, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    rank = dist.get_rank()
    old = _wrap_fsdp1(use_orig_params)
    optimizer = make(old)
    train(old, optimizer, range(SAVED))
    state = {"model": _full_state(old), "optim": FSDP.full_optim_state_dict(old, optimizer)}
    if rank == 0:
        torch.save(state, path)
    losses = train(old, optimizer, range(SAVED, STEPS))
    weights = _full_state(old)

    model = fsdp_c.auto_shard(net(1), ModuleWrapPolicy({MLPBlock}))
    optimizer = make(model)
    saved = torch.load(path) if rank == 0 else {"model": None, "optim": {}}
    fsdp_c.load_full_state_dict(model, saved["model"])
    load_optimizer(model, optimizer, saved["optim"])
    assert_continues(losses, weights if rank == 0 else None, model, optimizer)


def fsdp1_saves_exp_avg_aliased_to_exp_avg_sq(rank: int, world: int, folder: str) -> None:
    """torch only: with ``use_orig_params`` on the CPU, gathered ``exp_avg`` aliases ``exp_avg_sq``.

    Such a checkpoint has lost ``exp_avg``, and the recipe cannot restore it.
    """
    old = _wrap_fsdp1(use_orig_params=True)
    optimizer = make_adamw(old)
    train(old, optimizer, range(SAVED))
    state = FSDP.full_optim_state_dict(old, optimizer)
    if rank == 0:
        for param_state in state["state"].values():
            assert param_state["exp_avg"].data_ptr() == param_state["exp_avg_sq"].data_ptr()


# ---- DDP ----


def ddp(rank: int, world: int, folder: str) -> None:
    """Migrates a DDP checkpoint, whose optimizer state numbers the parameters."""
    path = Path(folder) / "ddp.pt"
    old = DistributedDataParallel(net(0))
    optimizer = make_adamw(old)
    train(old, optimizer, range(SAVED))
    if rank == 0:
        torch.save({"model": old.state_dict(), "optim": optimizer.state_dict()}, path)
    losses = train(old, optimizer, range(SAVED, STEPS))
    weights = {name: p.detach() for name, p in old.module.named_parameters()}
    for wrap in (fsdp_c.auto_shard, fsdp_c.replicate):
        model = wrap(net(1))
        optimizer = make_adamw(model)
        clean = functools.partial(fsdp_c.names.clean_tensor_name, ddp=True)
        saved = torch.load(path) if rank == 0 else {"model": None, "optim": {}}
        fsdp_c.load_full_state_dict(model, saved["model"], rename=clean)
        load_optimizer(model, optimizer, named_optimizer_state(model, optimizer, saved["optim"]))
        assert_continues(losses, weights, model, optimizer)


def named_optimizer_state(
    model: Any, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> dict[str, Any]:
    """Renames parameter numbers to names. ``optimizer`` has the groups of the saved optimizer."""
    names = {param: name for name, param in model.named_parameters()}
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    if saved:
        saved["state"] = {order[i]: param_state for i, param_state in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [order[i] for i in group["params"]]
    return saved
