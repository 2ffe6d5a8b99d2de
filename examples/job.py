"""Functions that all examples share: arguments, errors and processes.

Only ``select_fully_shard`` depends on the implementation of ``fully_shard``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig

RANK = int(os.environ.get("RANK", "0"))


class UsageError(Exception):
    """The command line requires something that this machine or installation does not have."""


# --------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    """An argument parser that prints errors on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        exit_with_error(f"{message} (see --help)")


def make_parser(description: str, *, steps: int = 60, lr: float = 1e-3) -> Parser:
    """Returns a parser with the arguments of all examples, with these default values."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--impl",
        choices=("fsdp_c", "torch"),
        default="fsdp_c",
        help="implementation of fully_shard",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--steps", type=positive, default=steps, help="optimizer steps")
    add("--lr", type=float, default=lr, help="learning rate")
    add("--seed", type=int, default=0, help="seed of weights and data")
    return parser


def make_gpt_parser(description: str, *, steps: int = 60, lr: float = 3e-3) -> Parser:
    """Returns a parser that also has the sizes of ``make_gpt`` and of the text."""
    parser = make_parser(description, steps=steps, lr=lr)
    add, sizes = parser.add_argument, GPTConfig()
    add("--layers", type=positive, default=sizes.layers, help="transformer blocks")
    add("--width", type=positive, default=sizes.width, help="size of the hidden state")
    add("--heads", type=positive, default=sizes.heads, help="attention heads")
    add("--context", type=positive, default=sizes.context, help="bytes per sequence")
    add("--dropout", type=float, default=sizes.dropout, help="dropout probability")
    add("--text-bytes", type=positive, default=2 << 20, help="bytes of text")
    return parser


def make_gpt(args: argparse.Namespace) -> GPT:
    """Returns the model with the sizes of the arguments."""
    if args.width % args.heads:
        raise UsageError(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if not 0.0 <= args.dropout < 1.0:
        raise UsageError(f"--dropout must be in [0, 1), not {args.dropout}")
    return GPT(GPTConfig(args.layers, args.width, args.heads, args.context, args.dropout))


def positive(text: str) -> int:
    """Parses an integer above zero for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def natural(text: str) -> int:
    """Parses an integer of at least zero for argparse."""
    return positive(text) if text != "0" else 0


def print_on_rank_0(*lines: str) -> None:
    """Prints lines on rank 0."""
    if RANK == 0:
        print(*lines, sep="\n", flush=True)


def exit_with_error(message: str) -> NoReturn:
    """Exits with one error message. All ranks call this, since all have the same arguments."""
    if RANK == 0:
        print(f"{Path(sys.argv[0]).stem}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun ends all ranks at the first exit: let rank 0 print before
    sys.exit(2)


# --------------------------------------------------------------------------------------------------
# Processes


def select_fully_shard(impl: str) -> Callable[..., Any]:
    """Returns the ``fully_shard`` of an implementation. No other code depends on ``--impl``."""
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        return torch_fully_shard
    try:
        from fsdp_c import fully_shard
    except ImportError as error:
        raise UsageError(f"fsdp_c cannot be imported ({error}); build it first") from error
    return fully_shard


def init_processes(device_option: str) -> torch.device:
    """Joins torchrun's process group or, without torchrun, creates one with a single rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if device_option == "cuda" and not enough_gpus:
        raise UsageError(f"--device cuda needs {local_ranks} GPUs, one for each rank")
    torch.set_num_threads(1)
    if enough_gpus and device_option != "cpu":
        # Bit-equal runs require kernels that sum in a fixed order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def run(train: Callable[[], None]) -> None:
    """Runs an example and destroys the process group. Expected errors and Ctrl-C print one line."""
    try:
        try:
            train()
        except UsageError as error:
            exit_with_error(str(error))
        except Exception:
            # After Ctrl-C, a rank's collective can fail before the rank gets its own signal.
            time.sleep(0.5)
            raise
        dist.barrier()
        dist.destroy_process_group()
        # gloo's threads may still need the GIL to release their tensors, and an interpreter that
        # exits meanwhile aborts. fsdp_c waits for these threads at exit, torch does not.
        time.sleep(0.05)
    except KeyboardInterrupt:
        print_on_rank_0("", "Interrupted.")
        sys.stdout.flush()
        os._exit(130)  # the usual shutdown would wait for interrupted collectives
