"""Checkpoints of train_gpt.py: sharded tensors through DCP, settings and history as JSON.

A checkpoint is the folder ``step_NNNNNN``, with DCP's files of the model, the optimizer and each
rank's random state. ``run.json`` has the settings on which the losses depend, and the history.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from history import History
from job import RANK, UsageError, find_newest, print_on_rank_0
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

RUN_FILE = "run.json"
NOT_RECORDED = ("impl", "out", "resume", "text_bytes", "save_every", "sample_bytes", "compare")
"""Arguments on which the losses do not depend. A digest of the text replaces ``text_bytes``."""


class Checkpoints:
    """The checkpoints below ``args.out``. Every rank must call ``restore`` and ``save``."""

    def __init__(
        self,
        args: Namespace,
        device: torch.device,
        text_digest: str,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        self.args, self.model, self.optimizer = args, model, optimizer
        self.folder = args.out / "checkpoints"
        arguments = {name: value for name, value in vars(args).items() if name not in NOT_RECORDED}
        facts = {"ranks": dist.get_world_size(), "device": device.type, "text": text_digest[:16]}
        self.settings = arguments | facts

    def restore(self) -> tuple[int, History]:
        """Loads the checkpoint of ``--resume``, if any. Returns its number of steps and history.

        Raises:
            UsageError: The checkpoint does not exist, has other settings, or is of the last step;
                or without ``--resume``, there are checkpoints of an earlier run.
        """
        newest = find_newest(file.parent for file in self.folder.glob(f"step_*/{RUN_FILE}"))
        path = self.args.resume
        if not path:
            if newest:
                out = self.args.out
                raise UsageError(f"{out} has checkpoints: pass --resume or another --out")
            return 0, History()
        if path == Path("newest"):
            path = newest
            if path is None:
                raise UsageError(f"no checkpoint to resume from in {self.folder}")
        history = self._read_run(path)
        state = self._get_state()
        dcp.load(state, checkpoint_id=path)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        random = state["random"][f"rank{RANK}"]
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])
        print_on_rank_0(f"Resumed {path} after step {len(history.train)}.")
        return len(history.train), history

    def _read_run(self, path: Path) -> History:
        try:
            run = json.loads((path / RUN_FILE).read_text())
        except FileNotFoundError:
            raise UsageError(f"{path} is not a checkpoint (it has no {RUN_FILE})") from None
        stored, history = run["settings"], History(**run["history"])
        different = [
            f"{name} was {stored.get(name)}, now {value}"
            for name, value in sorted(self.settings.items())
            if stored.get(name) != value
        ]
        if different:
            raise UsageError(f"{path} belongs to a different run: " + "; ".join(different))
        if len(history.train) == self.args.steps:
            raise UsageError(f"{path} has all {self.args.steps} steps of its run")
        return history

    def is_due(self, every: int, step: int) -> bool:
        """Returns whether ``step`` is the last one, or the last one of ``every`` steps."""
        return step + 1 == self.args.steps or (step + 1) % every == 0

    def save(self, step: int, history: History) -> None:
        """Writes the checkpoint after the step with the index ``step``."""
        path = self.folder / f"step_{step + 1:06d}"
        unfinished = path.with_suffix(".unfinished")
        if RANK == 0:
            for old in (path, unfinished):
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()
        dcp.save(self._get_state(), checkpoint_id=unfinished)
        if RANK == 0:
            run = {"settings": self.settings, "history": asdict(history)}
            (unfinished / RUN_FILE).write_text(json.dumps(run))
            unfinished.rename(path)
        dist.barrier()

    def _get_state(self) -> dict[str, Any]:
        """Returns the state dict that DCP saves or loads."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            random["cuda"] = torch.cuda.get_rng_state()
        # Each rank has its own random state and needs its own key: DCP stores equal keys once.
        return {"model": model, "optimizer": optimizer, "random": {f"rank{RANK}": random}}
