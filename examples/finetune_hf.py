"""Fine-tunes a causal language model of transformers.

    torchrun --nproc-per-node 2 examples/finetune_hf.py --out finetuned
    torchrun --nproc-per-node 8 examples/finetune_hf.py --model path/to/model --bf16

Without ``--model`` the script creates a small Llama with random weights. The text is the source of
Python's standard library, one token per byte; replace ``Windows`` by your tokenized data.
``--out`` writes full weights, which ``from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arguments import make_parser, positive
from gpt import VOCABULARY
from job import (
    RANK,
    UsageError,
    init_processes,
    prepare_out,
    print_on_rank_0,
    run,
    select_fully_shard,
)
from progress import Progress
from text import Windows, load_corpus
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy


def make_model(name: str | None, width: int) -> Any:
    """Returns the model of a folder or a name, or a small Llama with random weights."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        raise UsageError("transformers is not installed: pip install transformers") from None
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


def shard_model(model: Any, args: argparse.Namespace) -> None:
    """Shards each decoder layer, then the root with embedding and head."""
    fully_shard = select_fully_shard(args.impl)
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def save(model: Any, folder: Path) -> None:
    """Writes full weights on rank 0. Every rank must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # empty except on rank 0
    if RANK == 0:
        model.save_pretrained(folder, state_dict=state)
    print_on_rank_0(f"Written to        {folder}")


def train(args: argparse.Namespace) -> None:
    """Trains, saves and reports."""
    device = init_processes(args.device)
    if args.out is not None:
        prepare_out(args.out)
    torch.manual_seed(args.seed)
    model = make_model(args.model, args.width).to(device)
    model.config.use_cache = False  # generation needs the cache, training does not
    shard_model(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    windows = Windows(load_corpus(args.text_bytes).train, args.context, args.seed)
    ranks = dist.get_world_size()
    progress = Progress(args.steps, device, "tokens")
    model.train()
    for step in progress.iterate_steps():
        position = (step * ranks + RANK) * args.batch
        tokens, _ = windows.batch(position, args.batch, device)
        loss = model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels itself
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.add_loss(loss, tokens.numel())
    if args.out is not None:
        save(model, args.out)
    progress.report(model)


if __name__ == "__main__":
    parser = make_parser("Fine-tune a causal language model of transformers.")
    parser.add_argument("--model", help="folder or name of a model; default: a small Llama")
    parser.add_argument("--out", type=Path, help="folder for the full weights")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, reduce in fp32")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per rank and step")
    parser.add_argument("--context", type=positive, default=128, help="tokens per sequence")
    parser.add_argument("--width", type=positive, default=64, help="hidden size of the small Llama")
    parser.add_argument("--text-bytes", type=positive, default=2 << 20, help="bytes of text")
    arguments = parser.parse_args()
    run(lambda: train(arguments))
