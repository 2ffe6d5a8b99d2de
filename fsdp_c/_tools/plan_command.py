"""``python -m fsdp_c plan``: prints the estimated memory of a model."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy

from .._runtime.mixed_precision import MixedPrecisionPolicy
from ..plan import plan
from .report import parse_bytes, parse_dtype


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
            _make_model(options.model),
            options.policy if not options.policy[:1].isdigit() else parse_bytes(options.policy),
            mesh=_parse_ranks(options.ranks),
            batch=tuple(_parse_tensor(text) for text in options.batch) or None,
            memory=options.memory,
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
    add("model", help="package.module:name of a class or function that makes the model")
    add("ranks", help="ranks to shard over: 8, or replicas x ranks to shard over: 2x4")
    add("--batch", nargs="+", default=[], metavar="SHAPE[:DTYPE]", help="2x2048:int64, 8x3x224x224")
    add("--memory", help="memory of one rank, to compare with the peak: 80GiB")
    add("--policy", default="blocks", help='"blocks" (the default), or bytes of a unit: 512MiB')
    add("--max-transient", help="maximum of temporary memory of one unit: 2GiB")
    add("--param-dtype", type=_parse_dtype, help="dtype of computation: bfloat16")
    add("--reduce-dtype", type=_parse_dtype, help="dtype of gradient reductions: float32")
    add("--optimizer", default="AdamW", help="a class of torch.optim")
    add("--no-reshard", action="store_true", help="reshard_after_forward=False")
    add("--offload", action="store_true", help="shards and states in CPU memory")
    add("--device", default="cuda")
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


def _make_model(name: str) -> nn.Module:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"the model is package.module:name, not {name!r}")
    make = getattr(importlib.import_module(module), attribute, None)
    if not callable(make):
        raise ValueError(f"{module} has no function or class '{attribute}'")
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise ValueError(f"{name}() raises {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} makes a {type(model).__name__}, not a module")
    return model


def _parse_tensor(text: str) -> torch.Tensor:
    shape, _, dtype = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split("x")]
    except ValueError:
        raise ValueError(f"a batch is SHAPE[:DTYPE], as in 2x2048:int64, not {text!r}") from None
    return torch.empty(sizes, dtype=parse_dtype(dtype or "float32"), device="meta")


def _make_settings(options: argparse.Namespace) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if options.param_dtype is not None or options.reduce_dtype is not None:
        kwargs["mp_policy"] = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype)
    if options.no_reshard:
        kwargs["reshard_after_forward"] = False
    if options.offload:
        kwargs["offload_policy"] = CPUOffloadPolicy()
    return kwargs
