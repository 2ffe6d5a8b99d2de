"""TRL's supervised fine-tuning and preference tuning with FSDP2."""

from __future__ import annotations

from typing import Any

from client_job import VOCABULARY, Report, llama, main, tokens
from client_transformers import record_history, reset_state
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Creates a tokenizer with one word per token id."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def sentences(count: int, seed: int = 0) -> list[str]:
    """Generates sentences of different lengths."""
    rows = enumerate(tokens(count, seed))
    return [" ".join(WORDS[token] for token in row[: 6 + index % 9]) for index, row in rows]


def settings(report: Report, **overrides: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": str(report.files / "run"),
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"},
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return common | overrides


def tune(report: Report, data: Dataset, peft: LoraConfig | None = None, **overrides: Any) -> None:
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(**settings(report, max_length=24, **overrides)),
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft,
    )
    trainer.train()
    record_history(report, trainer)
    report.record_model(trainer.model)
    trainer.save_model(str(report.files / "model"))


def case_sft(report: Report) -> None:
    tune(report, Dataset.from_dict({"text": sentences(24)}))


def case_sft_packed_bf16(report: Report) -> None:
    data = Dataset.from_dict({"text": sentences(64)})
    tune(report, data, packing=True, packing_strategy="wrapped", bf16=True)


def case_sft_completions(report: Report) -> None:
    """Computes the loss on completions only, with accumulation and gradient checkpointing."""
    prompts, answers = sentences(24), sentences(24, seed=1)
    data = Dataset.from_dict({"prompt": prompts, "completion": [" " + text for text in answers]})
    tune(report, data, gradient_accumulation_steps=2, gradient_checkpointing=True)


def case_sft_lora(report: Report) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    tune(report, Dataset.from_dict({"text": sentences(24)}), adapter)


def case_dpo(report: Report) -> None:
    """DPO also shards a second, frozen reference model."""
    data = Dataset.from_dict(
        {
            "prompt": sentences(24),
            "chosen": [" " + text for text in sentences(24, seed=1)],
            "rejected": [" " + text for text in sentences(24, seed=2)],
        }
    )
    trainer = DPOTrainer(
        model=llama(),
        ref_model=llama(initializer_range=0.05),
        args=DPOConfig(**settings(report, max_length=32)),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    record_history(report, trainer)
    report.record_model(trainer.model)
    report.record_sharded_modules(trainer.ref_model)


if __name__ == "__main__":
    main(globals(), before=reset_state)
