"""What the ranks of test_moving_in.py do: the recipes of the README's "Moving in", as they stand.

Each trains with the old wrapper, saves model and optimizer as its jobs do, trains on; then loads
the files into a model of ours, trains on, and compares losses and weights. Each asserts by itself.
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

import fsdp_c

DIM = 6
SAVED, STEPS = 3, 6
"""Steps before the checkpoint, and in all."""

Losses = list[float]


class Block(nn.Module):
    """(batch, DIM) -> (batch, DIM)"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width)
        self.down = nn.Linear(width, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(DIM, DIM), Block(5), Block(8), nn.LayerNorm(DIM))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups of options, as many jobs have them."""
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


def assert_goes_on(
    expected: Losses,
    weights: dict[str, torch.Tensor] | None,
    model: Any,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Losses and, on rank 0, the weights of the remaining steps."""
    found = train(model, optimizer, range(SAVED, STEPS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    if weights is not None:
        torch.testing.assert_close(full, weights)


def load_optimizer(model: Any, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """The recipe's last step; ``saved`` is empty but on rank 0."""
    for one in saved.get("state", {}).values():  # FSDP1 shares "step" among parameters
        one.update({key: copy.deepcopy(value) for key, value in one.items()})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, saved, options=options)


# ---- FSDP1 ----


def fsdp1(rank: int, world: int, folder: str) -> None:
    """A full checkpoint of a job with flat parameters, and of one with the original ones."""
    _fsdp1(Path(folder) / "flat.pt", False, _adamw_of_all)
    _fsdp1(Path(folder) / "original.pt", True, _sgd)


def _adamw_of_all(model: nn.Module) -> torch.optim.Optimizer:
    """Flat parameters mix weights and biases: no groups by name."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD has one state tensor per parameter. FSDP1 loses AdamW's ``exp_avg``; see
    ``fsdp1_saves_exp_avg_aliased_to_exp_avg_sq``."""
    groups = adamw(model).param_groups
    return torch.optim.SGD(
        [{key: one[key] for key in ("params", "weight_decay")} for one in groups],
        lr=0.05,
        momentum=0.9,
    )


def _wrap_fsdp1(use_orig_params: bool) -> FSDP:
    return FSDP(
        net(0),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
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

    model = fsdp_c.auto_shard(net(1), ModuleWrapPolicy({Block}))
    optimizer = make(model)
    saved = torch.load(path) if rank == 0 else {"model": None, "optim": {}}
    fsdp_c.load_full_state_dict(model, saved["model"])
    load_optimizer(model, optimizer, saved["optim"])
    assert_goes_on(losses, weights if rank == 0 else None, model, optimizer)


def fsdp1_saves_exp_avg_aliased_to_exp_avg_sq(rank: int, world: int, folder: str) -> None:
    """Stock alone: on the CPU the gathered ``exp_avg`` of original parameters has the memory of
    ``exp_avg_sq``, so that such a checkpoint has lost the former. The recipe cannot bring it back.
    """
    old = _wrap_fsdp1(use_orig_params=True)
    optimizer = adamw(old)
    train(old, optimizer, range(SAVED))
    state = FSDP.full_optim_state_dict(old, optimizer)
    if rank == 0:
        for one in state["state"].values():
            assert one["exp_avg"].data_ptr() == one["exp_avg_sq"].data_ptr()


# ---- DDP ----


def ddp(rank: int, world: int, folder: str) -> None:
    """A checkpoint of the wrapper's state dict and of the optimizer's own, which has numbers for
    parameters."""
    path = Path(folder) / "ddp.pt"
    old = DistributedDataParallel(net(0))
    optimizer = adamw(old)
    train(old, optimizer, range(SAVED))
    if rank == 0:
        torch.save({"model": old.state_dict(), "optim": optimizer.state_dict()}, path)
    losses = train(old, optimizer, range(SAVED, STEPS))
    weights = {name: p.detach() for name, p in old.module.named_parameters()}
    for wrap in (fsdp_c.auto_shard, fsdp_c.replicate):
        model = wrap(net(1))
        optimizer = adamw(model)
        clean = functools.partial(fsdp_c.names.clean_tensor_name, ddp=True)
        saved = torch.load(path) if rank == 0 else {"model": None, "optim": {}}
        fsdp_c.load_full_state_dict(model, saved["model"], rename=clean)
        load_optimizer(model, optimizer, named_optimizer_state(model, optimizer, saved["optim"]))
        assert_goes_on(losses, weights, model, optimizer)


def named_optimizer_state(
    model: Any, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> dict[str, Any]:
    """The recipe's renaming; ``optimizer`` was made as the old one was."""
    names = {param: name for name, param in model.named_parameters()}
    order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    if saved:
        saved["state"] = {order[i]: one for i, one in saved["state"].items()}
        for group in saved["param_groups"]:
            group["params"] = [order[i] for i in group["params"]]
    return saved
