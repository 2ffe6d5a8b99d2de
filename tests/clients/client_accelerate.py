"""Trains with accelerate's FSDP2 plugin as a training script does."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ParallelismConfig, TorchDynamoPlugin
from client_job import Report, batches, finite, force_accelerate, gpt2, llama, main, rows
from torch.utils.data import DataLoader


def reset_state() -> None:
    """Resets accelerate's singletons and environment variables, and enables FSDP on the CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")) and name != "FSDP_C":
            del os.environ[name]
    force_accelerate()


class Job:
    """An accelerator with a prepared model, optimizer, scheduler and data loader."""

    def __init__(self, model: Any = None, accelerator: dict[str, Any] | None = None, **plugin: Any):
        settings = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"} | plugin
        self.accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(**settings), **(accelerator or {})
        )
        assert self.accelerator.is_fsdp2
        model = llama() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(rows(40), batch_size=2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def steps(self, report: Report, first: int = 0, last: int = 3) -> None:
        """Trains on the batches of the loader from ``first`` to ``last - 1``."""
        for batch in list(self.loader)[first:last]:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                report.record("loss", self.accelerator.gather(loss.detach()))
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    report.record("norm", norm)
                    assert finite([norm.item()])
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()


def case_plain(report: Report) -> None:
    job = Job()
    job.steps(report)
    report.record_model(job.model)
    report.record("full state dict", job.accelerator.get_state_dict(job.model))


def case_tied(report: Report) -> None:
    """GPT-2 ties its embedding and head. accelerate shards both and the last norm as one unit."""
    job = Job(gpt2())
    job.steps(report)
    report.record_model(job.model)


def case_accumulation(report: Report) -> None:
    job = Job(accelerator={"gradient_accumulation_steps": 2})
    job.steps(report, last=4)
    report.record_model(job.model)


def case_no_sync(report: Report) -> None:
    job = Job()
    with job.accelerator.no_sync(job.model):
        for batch in batches(2):
            job.accelerator.backward(job.model(**batch).loss)
    job.steps(report)
    report.record_model(job.model)


def case_no_reshard(report: Report) -> None:
    job = Job(reshard_after_forward=False)
    job.steps(report)
    report.record_model(job.model)


def case_no_wrap(report: Report) -> None:
    """Without a wrap policy only the embedding, the tail and the root are units."""
    job = Job(auto_wrap_policy="no_wrap")
    job.steps(report)
    report.record_model(job.model)


def checkpoint(report: Report, kind: str, **settings: Any) -> None:
    """Saves after two steps and continues to train. A new job loads the checkpoint and trains the
    same steps. Both models must have equal parameters."""
    job = Job(state_dict_type=kind)
    job.steps(report, last=2)
    job.accelerator.save_state(str(report.files / "state"), **settings)
    job.accelerator.save_model(job.model, str(report.files / "model"))
    job.steps(report, 2, 4)
    report.record_model(job.model)
    reset_state()
    restored = Job(llama(initializer_range=0.5), state_dict_type=kind)
    restored.accelerator.load_state(str(report.files / "state"), **settings)
    restored.steps(report, 2, 4)
    for left, right in zip(job.model.parameters(), restored.model.parameters()):
        assert torch.equal(left.to_local(), right.to_local())
    report.record_sharded_modules(restored.model)


def case_sharded_checkpoint(report: Report) -> None:
    checkpoint(report, "SHARDED_STATE_DICT")


def case_full_checkpoint(report: Report) -> None:
    checkpoint(report, "FULL_STATE_DICT")


def case_activation_checkpointing(report: Report) -> None:
    job = Job(activation_checkpointing=True)
    job.steps(report)
    report.record_model(job.model)


def case_bf16(report: Report) -> None:
    job = Job(accelerator={"mixed_precision": "bf16"})
    job.steps(report)
    report.record_model(job.model)


def case_fp16(report: Report) -> None:
    job = Job(accelerator={"mixed_precision": "fp16"})
    job.steps(report)
    report.record_model(job.model)


def case_ram_efficient(report: Report) -> None:
    """accelerate moves the model to the meta device, shards it and broadcasts rank 0's weights."""
    job = Job(cpu_ram_efficient_loading=True)
    job.steps(report)
    report.record_model(job.model)


def case_ram_efficient_tied(report: Report) -> None:
    job = Job(gpt2(), cpu_ram_efficient_loading=True)
    job.steps(report)
    report.record_model(job.model)


def case_ignored(report: Report) -> None:
    job = Job(ignored_modules=".*input_layernorm")
    job.steps(report)
    report.record_model(job.model)


def case_hybrid(report: Report) -> None:
    """Trains with HSDP on four ranks: two replicas with two shards each."""
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    job = Job(accelerator={"parallelism_config": mesh})
    job.steps(report)
    report.record_model(job.model)


def case_compile(report: Report) -> None:
    job = Job(accelerator={"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager")})
    job.steps(report)
    report.record_model(job.model)


def case_compile_regions(report: Report) -> None:
    """Compiles each layer separately, with activation checkpointing and bf16."""
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    job = Job(
        accelerator={"dynamo_plugin": plugin, "mixed_precision": "bf16"},
        activation_checkpointing=True,
    )
    job.steps(report)
    report.record_model(job.model)


if __name__ == "__main__":
    main(globals(), before=reset_state)
