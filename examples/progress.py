"""The steps of an example: progress bar, losses, and the same closing lines for each example."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from job import RANK, print_on_rank_0
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm  # type: ignore[import-untyped]


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
        full = gather_full_tensor(value).cpu().flatten()
        digest.update(full.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16
    return digest.hexdigest()


def peak_memory(device: torch.device) -> list[float]:
    """Returns each rank's peak memory in MiB: of the GPU if there is one, else of the process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return peaks


class Progress:
    """The steps of a run.

    Args:
        steps: The number of steps of the whole run.
        device: The device of training.
        unit: The name of the items that the throughput counts: ``tokens``, ``images``.
        first: The number of steps that earlier runs made.
    """

    def __init__(self, steps: int, device: torch.device, unit: str, first: int = 0) -> None:
        self.steps = range(first, steps)
        self.device = device
        self.unit = unit
        self.started = self._begin = time.perf_counter()
        self.loss = float("nan")
        self.seconds = 0.0  # from the begin of each step to its add_loss()
        self._items = 0.0

    def iterate_steps(self) -> Iterator[int]:
        """Yields the steps with a progress bar on rank 0. Call ``add_loss`` in each step."""
        interval = 0.3 if sys.stderr.isatty() else 10.0
        with tqdm(
            total=self.steps.stop,
            initial=self.steps.start,
            desc="Training",
            unit="step",
            disable=RANK != 0,
            mininterval=interval,
        ) as bar:
            for step in self.steps:
                self._begin = time.perf_counter()
                yield step
                bar.set_postfix_str(f"loss {self.loss:.3f}", refresh=False)
                bar.update()

    def add_loss(self, loss: Tensor, items: float) -> None:
        """Ends a step with this rank's loss and share of ``items``. Every rank must call this."""
        self.loss = mean_over_ranks(loss)  # waits for the device
        self.seconds += time.perf_counter() - self._begin
        self._items += items * dist.get_world_size()

    def report(self, model: nn.Module) -> dict[str, Any]:
        """Prints the closing lines on rank 0. Returns their values. Every rank must call this."""
        result = {
            "final_loss": self.loss,
            f"{self.unit}_per_second": self._items / self.seconds,
            "peak_memory_mib": (peaks := peak_memory(self.device)),
            "training_seconds": self.seconds,
            "total_seconds": time.perf_counter() - self.started,
            "weights_sha256": (digest := weights_digest(model)),
        }
        ranks = "1 rank" if len(peaks) == 1 else f"{len(peaks)} ranks"
        print_on_rank_0(
            f"Final loss        {self.loss:.4f}",
            f"Throughput        {self._items / self.seconds:,.0f} {self.unit}/s on {ranks} "
            f"({1e3 * self.seconds / len(self.steps):.0f} ms per step)",
            f"Peak memory       {', '.join(f'{peak:.0f}' for peak in peaks)} MiB "
            f"({'GPU' if self.device.type == 'cuda' else 'resident'}, by rank)",
            f"Time              {self.seconds:.1f} s in training steps, "
            f"{result['total_seconds']:.1f} s from start to end",
            f"Weights           sha256 {digest[:16]}",
        )
        return result
