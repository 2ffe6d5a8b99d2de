"""``python -m fsdp_c plan``: prints the estimated memory of a model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from .._runtime.mixed_precision import MixedPrecisionPolicy
from ..plan import plan
from .byte_format import parse_bytes
from .model_source import USAGE, make_model
from .report import parse_dtype


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Returns 1 if the peak exceeds ``--memory``, else 0.

    Raises:
        SystemExit: An argument is invalid. The exit status is 2, and stderr has a message.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # as python -m does for modules
    try:
        explanation = plan(
            make_model(options.model),
            options.policy if not options.policy[:1].isdigit() else parse_bytes(options.policy),
            mesh=_parse_ranks(options.ranks),
            batch=_parse_batch(options.batch),
            memory=options.memory,
            microbatches=options.microbatches,
            ranks_per_node=options.ranks_per_node,
            optimizer=options.optimizer,
            device=options.device,
            max_transient=None
            if options.max_transient is None
            else parse_bytes(options.max_transient),
            **_make_settings(options),
        )
        if options.plot is not None:
            explanation.plot(options.plot)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    return int(explanation.fits is False)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c plan",
        description="Estimates the memory of a model on each rank. Needs no ranks.",
    )
    add = parser.add_argument
    add("model", help=f"package.module:name of a class or function; {USAGE}")
    add("ranks", help="ranks to shard over: 8, or replicas x ranks to shard over: 2x4")
    add(
        "--batch",
        nargs="+",
        default=[],
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="2x2048:int64, 8x3x224x224, labels=2x2048:int64",
    )
    add("--microbatches", type=int, default=1, help="backwards of an optimizer step, for advice")
    add("--ranks-per-node", type=int, default=8, help="ranks of one node, for advice")
    add("--memory", help="memory of one rank, to compare with the peak: 80GiB")
    add("--policy", default="blocks", help='"blocks" (the default), or bytes of a unit: 512MiB')
    add("--max-transient", help="maximum of temporary memory of one unit: 2GiB")
    add("--param-dtype", type=_parse_dtype, help="dtype of computation: bfloat16")
    add("--reduce-dtype", type=_parse_dtype, help="dtype of gradient reductions: float32")
    add("--optimizer", default="AdamW", help="a class of torch.optim")
    add("--no-reshard", action="store_true", help="reshard_after_forward=False")
    add("--offload", action="store_true", help="shards and states in CPU memory")
    add("--device", default="cuda", help="device type of training: cuda (the default) or cpu")
    add("--plot", help="file for a plot of the step's memory: memory.png")
    return parser


def _parse_dtype(name: str) -> torch.dtype:
    try:
        return parse_dtype(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise ValueError(
            f"ranks are a number, 8, or replicas by ranks to shard over, 2x4, not {text!r}"
        ) from None


def _parse_batch(texts: Sequence[str]) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor] | None:
    """Returns the arguments of forward: by position, or by name as in ``labels=2x8:int64``."""
    if not any("=" in text for text in texts):
        return tuple(map(_parse_tensor, texts)) or None
    pairs = [text.partition("=") for text in texts]
    unnamed = [name for name, separator, _ in pairs if not separator]
    if unnamed:
        raise ValueError(f"either all tensors of a batch have names or none, not {unnamed[0]!r}")
    names = [name for name, _, _ in pairs]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise ValueError(f"two tensors of the batch have the name {repeated[0]!r}")
    return {name: _parse_tensor(text) for name, _, text in pairs}


def _parse_tensor(text: str) -> torch.Tensor:
    shape, _, dtype = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split("x")]
        if min(sizes) < 0:
            raise ValueError
    except ValueError:
        raise ValueError(f"a batch is SHAPE[:DTYPE], as in 2x2048:int64, not {text!r}") from None
    try:
        return torch.empty(sizes, dtype=parse_dtype(dtype or "float32"), device="meta")
    except RuntimeError as error:  # too many elements, or a dtype without tensors on this device
        raise ValueError(f"cannot make a tensor {text!r} of the batch: {error}") from error


def _make_settings(options: argparse.Namespace) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if options.param_dtype is not None or options.reduce_dtype is not None:
        kwargs["mp_policy"] = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    if options.no_reshard:
        kwargs["reshard_after_forward"] = False
    if options.offload:
        kwargs["offload_policy"] = CPUOffloadPolicy()
    return kwargs
