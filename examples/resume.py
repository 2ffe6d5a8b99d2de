"""Saves a checkpoint and resumes it, also on another number of ranks.

    torchrun --nproc-per-node 4 examples/resume.py --out run --steps 30
    torchrun --nproc-per-node 2 examples/resume.py --out run --steps 60

The second command continues after step 30. torch.distributed.checkpoint (DCP) writes each rank's
shards and reads them for the new number of ranks. The global batch does not depend on the number of
ranks, so the losses of a resumed run differ only by rounding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import make_gpt, make_gpt_parser, positive
from gpt import next_byte_loss
from job import (
    RANK,
    UsageError,
    find_newest,
    init_processes,
    prepare_out,
    print_on_rank_0,
    run,
    select_fully_shard,
)
from progress import Progress, weights_digest
from text import Windows, load_corpus
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

SETTINGS_FILE = "settings.json"
NOT_RECORDED = ("impl", "device", "out", "steps")  # a resumed run may have other values


def get_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns the state that a checkpoint contains."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}


def load(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint below ``--out``, if any. Returns its number of steps, else 0.

    Every rank must call this.
    """
    newest = find_newest(path.parent for path in args.out.glob("step_*/.metadata"))  # written last
    if newest is None:
        return 0
    for name, value in json.loads((newest / SETTINGS_FILE).read_text()).items():
        if value != getattr(args, name):
            option = f"--{name.replace('_', '-')} {value}"
            raise UsageError(f"{newest} is of a run with {option}: pass it, or another --out")
    state = get_state(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def train(args: argparse.Namespace) -> None:
    """Resumes, trains, saves and reports."""
    device = init_processes(args.device)
    ranks = dist.get_world_size()
    if args.batch % ranks:
        raise UsageError(f"--batch {args.batch} cannot be divided by {ranks} ranks")
    prepare_out(args.out)
    fully_shard = select_fully_shard(args.impl)
    torch.manual_seed(args.seed)
    model = make_gpt(args).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    begin = load(args, model, optimizer)
    if begin > 0:
        digest = weights_digest(model)[:16]
        print_on_rank_0(f"Resumed on {ranks} ranks after step {begin}: weights sha256 {digest}")
    if begin >= args.steps:
        raise UsageError(f"{args.out} has {begin} steps already: increase --steps")

    windows = Windows(load_corpus(args.text_bytes).train, args.context, args.seed)
    share = args.batch // ranks
    progress = Progress(args.steps, device, "tokens", begin)
    for step in progress.iterate_steps():
        position = step * args.batch + RANK * share
        inputs, targets = windows.batch(position, share, device)
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.add_loss(loss, inputs.numel())
    folder = args.out / f"step_{args.steps:06d}"
    if RANK == 0:
        folder.mkdir(exist_ok=True)
        settings = {name: value for name, value in vars(args).items() if name not in NOT_RECORDED}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings))
    dcp.save(get_state(model, optimizer, args.steps), checkpoint_id=folder)
    progress.report(model)
    print_on_rank_0(f"Written to        {folder}")


if __name__ == "__main__":
    parser = make_gpt_parser("Train a GPT, save a checkpoint, and resume it on other ranks.")
    parser.add_argument("--out", type=Path, default=Path("resume_out"), help="folder")
    parser.add_argument("--batch", type=positive, default=16, help="sequences of all ranks")
    arguments = parser.parse_args()
    run(lambda: train(arguments))
