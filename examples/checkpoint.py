"""Checkpoints of a run: sharded tensors through DCP, and settings and history as JSON.

A checkpoint is the folder ``step_NNNNNN``. DCP writes the model, the optimizer, the step, the data
position and each rank's random state there. ``run.json`` has the settings on which the losses
depend, and the history so far. The folder gets its final name when it is complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

RUN_FILE = "run.json"


class CheckpointError(Exception):
    """A checkpoint to resume from does not exist, or belongs to a different run."""


def find_newest(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step in ``folder``, or None."""
    complete = [p for p in folder.glob("step_" + 6 * "[0-9]") if (p / RUN_FILE).is_file()]
    return max(complete, default=None, key=lambda p: p.name)


def discard_all(folder: Path) -> None:
    """Deletes the checkpoints in ``folder``, unfinished ones included, and nothing else."""
    for path in folder.glob("step_*"):
        shutil.rmtree(path)


def read_run(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the history stored in the checkpoint ``path``.

    Raises CheckpointError if ``path`` is not a checkpoint. Also raises if ``settings`` differ from
    the stored settings, since the resumed run would then have other losses.
    """
    try:
        run = json.loads((path / RUN_FILE).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint (it has no {RUN_FILE})") from None
    except ValueError as error:
        raise CheckpointError(f"{path / RUN_FILE} cannot be read: {error}") from None
    stored = run["settings"]
    different = [
        f"{name} was {stored.get(name)}, now {settings.get(name)}"
        for name in sorted(stored.keys() | settings.keys())
        if stored.get(name) != settings.get(name)
    ]
    if different:
        raise CheckpointError(f"{path} belongs to a different run: " + "; ".join(different))
    return run["history"]


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    position: int,
    settings: dict[str, Any],
    history: dict[str, Any],
) -> Path:
    """Writes ``folder/step_NNNNNN``; every rank must call this. Returns the path."""
    path = folder / f"step_{step:06d}"
    unfinished = folder / f"{path.name}.unfinished"
    rank = dist.get_rank()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (path, unfinished):
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    dcp.save(_state(model, optimizer, step, position), checkpoint_id=unfinished)
    if rank == 0:
        run = {"settings": settings, "history": history}
        (unfinished / RUN_FILE).write_text(json.dumps(run))
        unfinished.rename(path)
    dist.barrier()
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Restores model, optimizer and random state in place; returns the step and data position.

    Every rank must call this. The number of ranks must be that of the saving run.
    """
    state = _state(model, optimizer, step=0, position=0)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    random = state["random"][f"rank{dist.get_rank()}"]
    torch.set_rng_state(random["cpu"])
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return int(state["step"]), int(state["position"])


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, position: int
) -> dict[str, Any]:
    """Returns the state dict that DCP saves or loads."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    random = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        random["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "step": torch.tensor(step),
        "position": torch.tensor(position),
        # Each rank has its own random state and needs its own key: DCP stores equal keys once.
        "random": {f"rank{dist.get_rank()}": random},
    }
