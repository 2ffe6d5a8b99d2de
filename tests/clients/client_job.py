"""Shared by the client scripts: reports, small models and data. Does not import fsdp_c.

A script defines functions ``case_<name>(report)`` and calls :func:`main`. ``main`` runs the cases
named on the command line, in that order, in one process per rank:

    torchrun --nproc-per-node 2 client_x.py FOLDER name ...

Each case writes ``FOLDER/<name>/rank<r>.json``, its report, and the library's files under
``FOLDER/<name>/files``. The test compares both between two runs of the same script.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

# Tests run without network access, so models and data are generated instead of downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

VOCABULARY = 64
SEQUENCE = 16


def bits(value: Any) -> Any:
    """Converts ``value`` to JSON without loss: floats in hex, tensors as dtype, shape and hash."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, DTensor):
        return ["DTensor", str(value.placements), list(value.shape), bits(value.to_local())]
    if isinstance(value, torch.Tensor):
        return _tensor_bits(value.detach())
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    raise TypeError(f"cannot record a {type(value)}")


def _tensor_bits(tensor: torch.Tensor) -> Any:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [type(tensor).__name__, {name: bits(getattr(tensor, name)) for name in inner}]
    if tensor.numel() == 1 and tensor.is_floating_point():
        return [str(tensor.dtype), list(tensor.shape), float(tensor).hex()]
    # Clones first: numpy() makes a storage non-resizable, and FSDP2 resizes unsharded storages.
    raw = tensor.cpu().contiguous().clone().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()[:16]]


class Report:
    """The values that one rank recorded in one case, in order, and the folder for its files."""

    def __init__(self, folder: Path) -> None:
        self.files = folder / "files"
        self.files.mkdir(parents=True, exist_ok=True)
        self.entries: list[tuple[str, Any]] = []
        self.states: set[str] = set()

    def record(self, label: str, value: Any) -> None:
        """Records a number, a tensor or a nested structure of them under ``label``."""
        self.entries.append((label, bits(value)))

    def record_model(self, model: nn.Module) -> None:
        """Records the sharded modules of ``model`` and all its parameters."""
        self.record_sharded_modules(model)
        for name, parameter in model.named_parameters():
            self.record(f"parameter {name}", parameter)

    def record_sharded_modules(self, model: nn.Module) -> None:
        """Records which modules are sharded, and the modules that define their FSDP states."""
        names = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                names.append(name)
                self.states.add(type(module._get_fsdp_state()).__module__)
        assert names, "no module is sharded: the client did not call fully_shard"
        self.record("sharded modules", names)

    def record_gradients(self, model: nn.Module) -> None:
        """Records the gradients of all parameters, None included."""
        for name, parameter in model.named_parameters():
            self.record(f"gradient {name}", parameter.grad)


def rank() -> int:
    return int(os.environ["RANK"])


def seed_everything(seed: int = 0) -> None:
    """Seeds all random number generators equally on every rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def tokens(count: int, seed: int = 0) -> list[list[int]]:
    """Returns ``count`` rows of SEQUENCE token ids with a pattern that a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    return ((start + step * torch.arange(SEQUENCE)) % VOCABULARY).tolist()


def rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Returns :func:`tokens` as items of a data set for causal language models."""
    token_rows = [torch.tensor(row) for row in tokens(count, seed)]
    return [{"input_ids": row, "labels": row.clone()} for row in token_rows]


def batches(count: int, size: int = 2, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Yields ``count`` batches of ``size`` rows for this rank."""
    world = dist.get_world_size()
    own_rows = rows(world * count * size, seed)[rank() :: world]
    for first in range(0, count * size, size):
        batch = own_rows[first : first + size]
        yield {key: torch.stack([row[key] for row in batch]) for key in batch[0]}


def llama(**overrides: Any) -> nn.Module:
    """Creates a Llama with two layers, and with untied embeddings unless overridden."""
    from transformers import LlamaConfig, LlamaForCausalLM

    seed_everything(1)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4 * SEQUENCE,
        "attn_implementation": "eager",
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | overrides)))


def gpt2(**overrides: Any) -> nn.Module:
    """Creates a GPT-2 with two layers, tied embeddings and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    seed_everything(2)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": 4 * SEQUENCE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | overrides)))


def force_accelerate() -> None:
    """Makes accelerate treat the CPU with gloo as an accelerator with NCCL.

    On a CPU host, accelerate classifies the job as MULTI_CPU and silently disables FSDP.
    """
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def finite(values: Iterable[float]) -> bool:
    return all(torch.isfinite(torch.tensor(float(value))) for value in values)


def _run_case(case: Callable[[Report], None], folder: Path) -> None:
    report = Report(folder)
    seed_everything()
    case(report)
    assert report.states, "the case recorded no sharded modules"
    text = json.dumps({"states": sorted(report.states), "entries": report.entries}, indent=1)
    (folder / f"rank{rank()}.json").write_text(text)


def main(namespace: dict[str, Any], *, before: Callable[[], None] = lambda: None) -> None:
    """Runs the cases of ``namespace`` that the command line names, and ``before`` before each.

    A case that raises writes its traceback instead of a report, and the next case runs. If a case
    raises on some ranks only, the others wait until the caller's time limit.
    """
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[2:]:
        case_folder = folder / name
        case_folder.mkdir(exist_ok=True)
        try:
            before()
            _run_case(namespace[f"case_{name}"], case_folder)
        except Exception:
            (case_folder / f"rank{rank()}.error.txt").write_text(traceback.format_exc())
            traceback.print_exc()
        gc.collect()
        torch._dynamo.reset()
        dist.barrier()
    dist.destroy_process_group()
