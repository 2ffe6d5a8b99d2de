"""Functions that all examples share: arguments, processes, progress bar and closing lines.

``run`` runs an example to its end. ``Progress`` counts steps and prints the same closing lines for
each of them. No function of this file depends on the implementation of ``fully_shard``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm  # type: ignore[import-untyped]

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


def positive(text: str) -> int:
    """Parses an integer above zero for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


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
    """Runs an example. A ``UsageError`` prints one line. The process group is destroyed."""
    try:
        train()
    except UsageError as error:
        exit_with_error(str(error))
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may still need the GIL to release their tensors, and an interpreter that
    # exits meanwhile aborts. fsdp_c waits for these threads at exit, torch does not.
    time.sleep(0.05)


# --------------------------------------------------------------------------------------------------
# Results


def gather_full_tensor(value: Tensor) -> Tensor:
    """Returns the full tensor of a tensor that may be sharded. Every rank must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over_ranks(value: Tensor) -> float:
    """Returns the mean of one number per rank. Every rank must call this."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def weights_digest(model: nn.Module) -> str:
    """Returns a SHA-256 of all full parameters and buffers. Every rank must call this."""
    digest = hashlib.sha256()
    # named_parameters() would return the root's unsharded parameters in the compute dtype after a
    # forward without backward. state_dict() always returns the sharded parameters.
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(gather_full_tensor(value).cpu().numpy().tobytes())
    return digest.hexdigest()


def peak_memory(device: torch.device) -> list[float]:
    """Returns each rank's peak memory in MiB: of the GPU if there is one, else of the process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return peaks


def format_closing_lines(
    loss: str,
    rate: float,
    unit: str,
    steps: int,
    seconds: float,
    started: float,
    peaks: list[float],
    device: torch.device,
    digest: str,
) -> list[str]:
    """Returns the closing lines of a run.

    Args:
        loss: The final loss with its unit.
        rate: Items per second of all ranks, in ``unit``, such as ``tokens``.
        steps, seconds: The steps of this run, and the seconds in them.
        started: The value of ``time.perf_counter()`` at the start of the script.
        peaks: The peak memory of each rank in MiB, of ``device``.
        digest: The digest of the weights.
    """
    ranks = "1 rank" if len(peaks) == 1 else f"{len(peaks)} ranks"
    return [
        f"Final loss        {loss}",
        f"Throughput        {rate:,.0f} {unit}/s on {ranks} ({1e3 * seconds / steps:.0f} ms per "
        "step)",
        f"Peak memory       {', '.join(f'{peak:.0f}' for peak in peaks)} MiB "
        f"({'GPU' if device.type == 'cuda' else 'resident'}, by rank)",
        f"Time              {seconds:.1f} s in training steps, "
        f"{time.perf_counter() - started:.1f} s from start to end",
        f"Weights           sha256 {digest[:16]}",
    ]


class Progress:
    """The steps of a run: progress bar, losses, and the closing lines.

    Args:
        steps: The number of steps.
        device: The device of training.
        unit: The name of the items that the throughput counts: ``tokens``, ``images``.
    """

    def __init__(self, steps: int, device: torch.device, unit: str) -> None:
        self.total = steps
        self.device = device
        self.unit = unit
        self.started = time.perf_counter()
        self.loss = float("nan")
        self._items = 0

    def iterate_steps(self) -> Iterator[int]:
        """Yields the steps with a progress bar on rank 0. Call ``add_loss`` in each step."""
        begin = time.perf_counter()
        interval = 0.3 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=self.total, desc="Training", unit="step", disable=RANK != 0, mininterval=interval
        ) as bar:
            for step in range(self.total):
                yield step
                bar.set_postfix_str(f"loss {self.loss:.3f}", refresh=False)
                bar.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - begin

    def add_loss(self, loss: Tensor, items: int) -> None:
        """Adds the loss of this rank's ``items``. Every rank must call this in each step."""
        self.loss = mean_over_ranks(loss)
        self._items += items * dist.get_world_size()

    def report(self, model: nn.Module) -> None:
        """Prints the closing lines on rank 0. Every rank must call this."""
        print_on_rank_0(
            *format_closing_lines(
                f"{self.loss:.4f}",
                self._items / self.seconds,
                self.unit,
                self.total,
                self.seconds,
                self.started,
                peak_memory(self.device),
                self.device,
                weights_digest(model),
            )
        )
