"""transformers' Trainer with FSDP2, peft's LoRA, and models that transformers itself shards."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from client_job import Report, batches, force_accelerate, gpt2, llama, main, rank, rows
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.utils import clip_grad_norm_
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig


def reset_state() -> None:
    """Resets accelerate's singletons and enables FSDP on the CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    force_accelerate()


def arguments(report: Report, kind: type = TrainingArguments, **overrides: Any) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(report.files / "run"),
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    return kind(**(settings | overrides))


def train(report: Report, model: Any, **overrides: Any) -> Trainer:
    """Trains ``model`` for ``max_steps`` and records each logged loss and gradient norm."""
    trainer = Trainer(
        model=model,
        args=arguments(report, **overrides),
        train_dataset=rows(24),
        eval_dataset=rows(6, seed=1),
    )
    trainer.train()
    record_history(report, trainer)
    report.record_model(trainer.model)
    return trainer


def record_history(report: Report, trainer: Trainer) -> None:
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == trainer.state.max_steps
    for entry in trainer.state.log_history:
        recorded = {k: v for k, v in entry.items() if not k.endswith(("runtime", "_per_second"))}
        report.record("log", recorded)


def case_train(report: Report) -> None:
    trainer = train(report, llama())
    report.record("evaluation", trainer.evaluate()["eval_loss"])
    report.record("predictions", [torch.tensor(x) for x in trainer.predict(rows(4, 2))[:1]])
    trainer.save_model(str(report.files / "model"))


def case_tied(report: Report) -> None:
    train(report, gpt2(), gradient_accumulation_steps=2)


def case_bf16(report: Report) -> None:
    train(report, llama(), bf16=True, use_cpu=True)


def case_activation_checkpointing(report: Report) -> None:
    config = {"activation_checkpointing": True, "reshard_after_forward": False}
    train(report, llama(), fsdp_config=config)


def case_compile(report: Report) -> None:
    train(report, llama(), torch_compile=True, torch_compile_backend="aot_eager")


def resume(report: Report, model: Any, make_restored_model: Any, **overrides: Any) -> None:
    """Trains four steps, then repeats the last two from the checkpoint after the second. Both runs
    must end with equal parameters."""
    settings = {"save_strategy": "steps", "save_steps": 2} | overrides
    uninterrupted = train(report, model(), **settings)
    reset_state()
    trainer = Trainer(
        model=make_restored_model(), args=arguments(report, **settings), train_dataset=rows(24)
    )
    trainer.train(resume_from_checkpoint=str(report.files / "run" / "checkpoint-2"))
    record_history(report, trainer)
    report.record_sharded_modules(trainer.model)
    for left, right in zip(uninterrupted.model.parameters(), trainer.model.parameters()):
        assert torch.equal(left.to_local(), right.to_local())


def case_resume_full(report: Report) -> None:
    resume(report, llama, lambda: llama(initializer_range=0.5))


def case_resume_sharded(report: Report) -> None:
    config = {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": True}
    resume(report, llama, lambda: llama(initializer_range=0.5), fsdp_config=config)


def lora(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    model = get_peft_model(llama(), config)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # peft initializes these to zero, which would hide the seed
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def case_lora(report: Report) -> None:
    """Trains a model with frozen and trained parameters. Only the adapter is saved."""
    trainer = train(report, lora())
    trainer.save_model(str(report.files / "adapter"))
    if rank() == 0:
        loaded = PeftModel.from_pretrained(llama(), report.files / "adapter")
        recorded = {k: v for k, v in loaded.named_parameters() if "lora_" in k}
        assert recorded
        report.record("adapter", recorded)


def case_lora_resume(report: Report) -> None:
    resume(report, lora, lambda: lora(1))


def case_lora_bf16(report: Report) -> None:
    train(report, lora(), bf16=True, use_cpu=True, gradient_checkpointing=True)


def case_generate(report: Report) -> None:
    """Generates greedily and by sampling with the sharded model, between training steps."""
    trainer = Seq2SeqTrainer(
        model=llama(use_cache=True),
        args=arguments(
            report,
            Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=24,
            eval_strategy="steps",
            eval_steps=2,
        ),
        train_dataset=rows(24),
        eval_dataset=rows(6, seed=1),
    )
    trainer.train()
    record_history(report, trainer)
    prompt = torch.tensor([row["input_ids"].tolist()[:6] for row in rows(2, seed=3 + rank())])
    generated = trainer.model.generate(prompt, max_new_tokens=8 + 4 * rank(), synced_gpus=True)
    report.record("greedy", generated)
    torch.manual_seed(rank())
    report.record("sampled", trainer.model.generate(prompt, max_new_tokens=6, do_sample=True))
    report.record("generated", torch.tensor(trainer.predict(rows(4, seed=4)).predictions))
    report.record_model(trainer.model)


def case_sharded_at_load(report: Report) -> None:
    """Passes a DistributedConfig to ``from_pretrained``, so that transformers calls fully_shard."""
    if rank() == 0:
        llama().save_pretrained(report.files / "model")
    torch.distributed.barrier()
    config = DistributedConfig(fsdp_size=2)
    model = LlamaForCausalLM.from_pretrained(report.files / "model", distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(3):
        loss = model(**batch).loss
        loss.backward()
        report.record("loss", loss)
        report.record("norm", clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    report.record_model(model)
    model.save_pretrained(report.files / "trained")


if __name__ == "__main__":
    main(globals(), before=reset_state)
