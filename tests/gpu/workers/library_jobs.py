"""Trains a small model with a library that calls torch's FSDP2: library_jobs.py LIBRARY.

LIBRARY is accelerate, transformers (its Trainer) or lightning. scripts.py runs this file with
``compare``. The ranks must have CUDA devices: on the CPU accelerate shards only with the patch of
tests/clients/client_job.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS, BATCH, LENGTH, VOCABULARY = 8, 4, 32, 64


def make_rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (STEPS * BATCH, LENGTH)
    rows = torch.randint(VOCABULARY, shape, generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        attn_implementation="eager",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train_with_accelerate() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    assert accelerator.is_fsdp2
    model = make_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(make_rows(), BATCH),  # type: ignore[arg-type]
    )
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def train_with_transformers() -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            fsdp=True,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=0.01,
            bf16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(make_llama(), arguments, train_dataset=make_rows()).train()  # type: ignore[arg-type]


def train_with_lightning() -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        """A model whose layers are sharded by Lightning's hook."""

        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
            embedding, head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY)
            self.model = nn.Sequential(embedding, *layers, head)

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            output = self.model(batch["input_ids"])
            return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ModelParallelStrategy(tensor_parallel_size=1),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(make_rows(), BATCH))  # type: ignore[arg-type]


JOBS: dict[str, Callable[[], None]] = {
    "accelerate": train_with_accelerate,
    "transformers": train_with_transformers,
    "lightning": train_with_lightning,
}

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    JOBS[sys.argv[1]]()
