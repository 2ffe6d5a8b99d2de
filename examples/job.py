"""Functions that all examples share: processes, errors, and the selection of ``fully_shard``.

Only ``select_fully_shard`` depends on the implementation of ``fully_shard``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", "0"))


class UsageError(Exception):
    """The arguments are wrong, or require something that this machine does not have."""


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


def select_fully_shard(impl: str) -> Callable[..., Any]:
    """Returns the ``fully_shard`` of an implementation."""
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        redirect = sys.modules.get("fsdp_c_autoload.redirect")
        is_redirected = redirect is not None and redirect.is_redirected(torch_fully_shard)
        # `python -m fsdp_c compare` runs a script under both implementations.
        if is_redirected and "_fsdp_c_compare_observer" not in sys.modules:
            raise UsageError("--impl torch: fsdp_c replaces torch's fully_shard: unset FSDP_C")
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


def prepare_out(folder: Path, file: str = "") -> None:
    """Creates the folder of ``--out``. Every rank must call this, before it trains.

    Raises:
        UsageError: The folder, or ``file`` in it, cannot be written.
    """
    errors = [""]
    if RANK == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK) or (file and (folder / file).is_dir()):
                errors = ["cannot be written"]
        except OSError as error:
            errors = [error.strerror or str(error)]
    dist.broadcast_object_list(errors)
    if errors[0]:
        raise UsageError(f"--out {folder / file}: {errors[0]}")


def find_newest(folders: Iterable[Path]) -> Path | None:
    """Returns the folder ``step_N`` with the largest number N; None if there is none."""
    numbers = {int(f.name[5:]): f for f in folders if f.name[5:].isdecimal()}
    return numbers[max(numbers)] if numbers else None


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
