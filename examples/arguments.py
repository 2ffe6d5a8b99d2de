"""Command lines: the arguments that examples share, and the model with their sizes."""

from __future__ import annotations

import argparse
from typing import NoReturn

from gpt import GPT, GPTConfig
from job import UsageError, exit_with_error


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
