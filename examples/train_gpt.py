"""Trains a small byte-level GPT with fully sharded parameters, on two ranks or on any number.

    torchrun --nproc-per-node 2 examples/train_gpt.py --out demo_out
    torchrun --nproc-per-node 2 examples/train_gpt.py --out demo_out --resume

The text is the source of Python's standard library. ``--impl`` selects the ``fully_shard`` of
fsdp_c or of torch. No other setting depends on ``--impl``, and ``losses.json`` is equal bit by bit.
Without torchrun the script runs as one process. The script writes into the output folder:

    losses.json     loss and gradient norm of every step and validation losses as hexadecimal
                    floats, and a digest of the final weights; comparable with cmp
    summary.json    final losses, tokens/s, peak memory, seconds
    curve.png       loss curve and the time split of the steps
    steps.png       times of further steps with torch's FSDP2 and fsdp_c in turns, and a timeline
                    of one step of each (not with ``--compare 0``)
    step.json       the timeline of fsdp_c's step as a Chrome trace
    checkpoints/    step_NNNNNN folders for --resume
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkpoint
import compare
import plots
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, generate, next_byte_loss
from job import (
    RANK,
    Parser,
    UsageError,
    exit_with_error,
    format_closing_lines,
    gather_full_tensor,
    init_processes,
    mean_over_ranks,
    peak_memory,
    positive,
    print_on_rank_0,
    select_fully_shard,
    weights_digest,
)
from text import Corpus, TextError, Windows, load_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm  # type: ignore[import-untyped]

CHECKPOINTS = "checkpoints"  # folder below --out
PHASES = ("data", "forward", "backward", "optimizer")


# --------------------------------------------------------------------------------------------------
# Command line


def parse_arguments() -> argparse.Namespace:
    """Parses the command line, which is the same on every rank."""
    parser = Parser(
        description="Train a byte-level GPT on Python's own source with fully_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--impl",
        choices=("fsdp_c", "torch"),
        default="fsdp_c",
        help="implementation of fully_shard",
    )
    add("--out", type=Path, default=Path("demo_out"), help="folder for all results")
    add("--bf16", action="store_true", help="compute in bf16, reduce gradients in fp32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add(
        "--resume",
        nargs="?",
        type=Path,
        const="newest",
        metavar="CHECKPOINT",
        help="resume from the newest checkpoint in --out, or from the given one",
    )
    add("--text", type=Path, metavar="FOLDER", help="read *.py files below this folder instead")
    add("--text-bytes", type=positive, default=8 << 20, help="read at most this much text")
    add("--steps", type=positive, default=340, help="optimizer steps of the whole run")
    add("--batch", type=positive, default=8, help="sequences per rank and step")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0, help="seed of weights, data order, dropout and sample")
    add("--validate-every", type=positive, default=50, help="steps between validations")
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--sample-bytes", type=natural, default=300, help="length of the generated sample")
    add(
        "--compare",
        type=natural,
        default=6,
        help="steps to compare both implementations after training; 0: none",
    )
    add("--prompt", default="class Parser:\n    def ", help="beginning of the generated sample")
    defaults = GPTConfig()
    add("--layers", type=positive, default=defaults.layers, help="transformer blocks")
    add("--width", type=positive, default=defaults.width, help="size of the hidden state")
    add("--heads", type=positive, default=defaults.heads, help="attention heads")
    add("--context", type=positive, default=defaults.context, help="bytes per sequence")
    add("--dropout", type=float, default=defaults.dropout, help="dropout probability")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if not 0.0 <= args.dropout < 1.0:
        parser.error(f"--dropout must be in [0, 1), not {args.dropout}")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    return args


def natural(text: str) -> int:
    """Parses an integer of at least zero for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below zero")
    return value


# --------------------------------------------------------------------------------------------------
# Processes, model, optimizer


def build_model(args: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> GPT:
    """Creates the model with equal weights on every rank, then shards each block and the root."""
    fully_shard = select_fully_shard(args.impl)
    torch.manual_seed(args.seed)
    config = GPTConfig(args.layers, args.width, args.heads, args.context, args.dropout)
    model = GPT(config).to(device)
    policy = MixedPrecisionPolicy()
    if args.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    torch.manual_seed(args.seed + 1 + RANK)  # dropout differs from rank to rank
    return model


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Creates AdamW with weight decay for matrices, and none for biases and norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns the rate: linear warm-up over 5 % of the steps, cosine decay to ``peak / 10``."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


# --------------------------------------------------------------------------------------------------
# Results of a run


@dataclass
class History:
    """All measurements so far. Floats to compare bit by bit are stored as ``float.hex()``."""

    train: list[str] = field(default_factory=list)
    gradient_norm: list[str] = field(default_factory=list)
    validation: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})

    @contextmanager
    def measure_phase(self, phase: str, device: torch.device) -> Iterator[None]:
        """Appends the seconds of the block, including its device work, to ``seconds[phase]``."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[phase].append(time.perf_counter() - start)

    def total_seconds(self) -> float:
        """Returns the seconds in training steps, without validation and checkpoints."""
        return sum(map(sum, self.seconds.values()))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------
# The run


class Run:
    """One training run: its model, its data and its progress."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.corpus = load_corpus(args.text_bytes, args.text)
        self.windows = Windows(self.corpus.train, args.context, args.seed)
        self.held_out = Windows(self.corpus.validation, args.context, args.seed)
        self.device = init_processes(args.device)
        self.ranks = dist.get_world_size()
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))
        self.settings = self._settings(self.corpus)
        self.model = build_model(args, self.device, self.mesh)
        self.optimizer = build_optimizer(self.model, args.lr)
        self.history = History()
        self.step = 0
        self.position = 0  # windows consumed by all ranks together
        self.folder = args.out / CHECKPOINTS
        if args.resume:
            self._load_checkpoint(args.resume)
        elif RANK == 0:
            checkpoint.discard_all(self.folder)

    def _settings(self, corpus: Corpus) -> dict[str, Any]:
        """Returns the settings on which the losses depend. They do not include ``--impl``."""
        names = ["steps", "batch", "lr", "clip", "seed", "bf16", "validate_every"]
        training = {name: getattr(self.args, name) for name in names}
        model = {name: getattr(self.args, name) for name in asdict(GPTConfig())}
        environment = {"ranks": self.ranks, "device": self.device.type, "text": corpus.digest[:16]}
        return training | model | environment

    def _load_checkpoint(self, path: Path) -> None:
        if str(path) == "newest":
            newest = checkpoint.find_newest(self.folder)
            if newest is None:
                raise checkpoint.CheckpointError(f"no checkpoint to resume from in {self.folder}")
            path = newest
        self.history = History(**checkpoint.read_run(path, self.settings))
        self.step, self.position = checkpoint.load(path, self.model, self.optimizer)
        print_on_rank_0(f"Resumed {path} after step {self.step}.")

    def batch(self, windows: Windows, position: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's share of the global batch that starts at ``position``."""
        size = self.args.batch
        return windows.batch(position + RANK * size, size, self.device)

    def train(self) -> None:
        """Runs the remaining steps, with validations and checkpoints between and at the end."""
        args = self.args
        args.out.mkdir(parents=True, exist_ok=True)
        with tqdm(
            total=args.steps,
            initial=self.step,
            desc="Training",
            unit="step",
            disable=RANK != 0,
            mininterval=0.3 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        ) as bar:
            while self.step < args.steps:
                self._train_step()
                last = self.step == args.steps
                if last or self.step % args.validate_every == 0:
                    self.history.validation[str(self.step)] = self.validate().hex()
                if last or self.step % args.save_every == 0:
                    self._save()
                bar.set_postfix_str(self._format_losses(), refresh=False)
                bar.update()

    def _train_step(self) -> None:
        model, history, device = self.model, self.history, self.device
        with history.measure_phase("data", device):
            inputs, targets = self.batch(self.windows, self.position)
        model.train()
        with history.measure_phase("forward", device):
            loss = next_byte_loss(model(inputs), targets)
        with history.measure_phase("backward", device):
            loss.backward()
        with history.measure_phase("optimizer", device):
            norm = gather_full_tensor(nn.utils.clip_grad_norm_(model.parameters(), self.args.clip))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, self.args.steps, self.args.lr)
            self.optimizer.step()
            self.optimizer.zero_grad()
        history.train.append(mean_over_ranks(loss).hex())
        history.gradient_norm.append(float(norm.item()).hex())
        self.step += 1
        self.position += self.ranks * self.args.batch

    @torch.no_grad()
    def validate(self, batches: int = 2) -> float:
        """Returns the loss in nats per byte on held-out windows, the same at each call."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for index in range(batches):
            inputs, targets = self.batch(self.held_out, index * self.ranks * self.args.batch)
            total += next_byte_loss(self.model(inputs), targets)
        return mean_over_ranks(total / batches)

    def _save(self) -> None:
        checkpoint.save(
            self.folder,
            self.model,
            self.optimizer,
            step=self.step,
            position=self.position,
            settings=self.settings,
            history=asdict(self.history),
        )

    def _format_losses(self) -> str:
        text = f"loss {float.fromhex(self.history.train[-1]):.3f}"
        if self.history.validation:
            text += f", validation {self._get_last_validation():.3f}"
        return text

    def _get_last_validation(self) -> float:
        return float.fromhex(list(self.history.validation.values())[-1])

    def sample(self) -> str:
        """Returns the prompt and its continuation by the model, with undecodable bytes replaced."""
        prompt, length = self.args.prompt.encode(), self.args.sample_bytes
        generated = generate(
            self.model, prompt, length, temperature=0.8, seed=self.args.seed, device=self.device
        )
        return generated.decode(errors="replace")

    def compare(self) -> list[str]:
        """Compares step times of both implementations and plots them. Returns lines to print."""
        runs = {}
        for impl in ("torch", "fsdp_c"):
            args = argparse.Namespace(**vars(self.args) | {"impl": impl})
            try:
                model = build_model(args, self.device, self.mesh)
            except UsageError as error:
                return [f"Not compared      {error}"]
            runs[impl] = compare.ImplementationRun(model, self._make_step(model))
        compare.measure_in_turns(runs, self.args.compare)
        traces = {impl: run.trace for impl, run in runs.items()}
        traces["fsdp_c"].save(self.args.out / "step.json")
        if RANK == 0:
            seconds = {impl: run.seconds for impl, run in runs.items()}
            plots.draw_comparison(self.args.out / "steps.png", seconds=seconds, traces=traces)
        return [f"One step          {traces['fsdp_c'].summary()}"]

    def _make_step(self, model: GPT) -> Callable[[], None]:
        """Returns a function that trains ``model`` for one step, without entries in the history."""
        optimizer = build_optimizer(model, self.args.lr)
        inputs, targets = self.batch(self.windows, 0)

        def step() -> None:
            next_byte_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.args.clip)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def report(self, started: float) -> None:
        """Writes the result files and prints a summary."""
        args, history = self.args, self.history
        digest = weights_digest(self.model)
        peaks = peak_memory(self.device)
        comparison = self.compare() if args.compare > 0 else []
        if RANK != 0:
            return
        train = [float.fromhex(loss) for loss in history.train]
        validation = {int(s): float.fromhex(loss) for s, loss in history.validation.items()}
        seconds = history.total_seconds()
        tokens = len(train) * self.ranks * args.batch * args.context
        summary = {
            "impl": args.impl,
            "settings": self.settings,
            "final_loss": train[-1],
            "final_validation_loss": self._get_last_validation(),
            "tokens_per_second": tokens / seconds,
            "peak_memory_mib": peaks,
            "training_seconds": seconds,
            "total_seconds": time.perf_counter() - started,
        }
        losses = {
            "train": history.train,
            "gradient_norm": history.gradient_norm,
            "validation": history.validation,
            "weights_sha256": digest,
        }
        write_json(args.out / "losses.json", losses)
        write_json(args.out / "summary.json", summary)
        precision = "bf16 compute, fp32 reduction" if args.bf16 else "fp32"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        plots.draw_run(
            args.out / "curve.png",
            title=f"Byte-level GPT on Python's own source: {args.impl}, {ranks}, {precision}",
            train=train,
            validation=validation,
            phases=history.seconds,
        )
        print_on_rank_0(
            *format_closing_lines(
                f"{train[-1]:.4f} nats per byte "
                f"(validation {summary['final_validation_loss']:.4f})",
                summary["tokens_per_second"],
                "tokens",
                len(train),
                seconds,
                started,
                peaks,
                self.device,
                digest,
            ),
            *comparison,
            f"Written to        {args.out}/: losses.json, summary.json, curve.png, "
            f"{'steps.png, step.json, ' if args.compare > 0 else ''}checkpoints/",
        )


def execute(args: argparse.Namespace) -> None:
    """Trains, samples and reports."""
    started = time.perf_counter()
    run = Run(args)
    parameters = sum(p.numel() for p in run.model.parameters())
    print_on_rank_0(
        f"Training with {args.impl} on {run.ranks} x {run.device.type}: "
        f"{parameters:,} parameters, {args.steps} steps of "
        f"{run.ranks * args.batch * args.context:,} bytes, "
        f"{run.corpus.train.numel() / 2**20:.1f} MiB of text."
    )
    run.train()
    if args.sample_bytes > 0:
        print_on_rank_0("Sample:", *("  | " + line for line in run.sample().splitlines()))
    run.report(started)


def main() -> None:
    """Runs the script. Expected errors and Ctrl-C print one line."""
    args = parse_arguments()
    try:
        try:
            execute(args)
        except (UsageError, TextError, checkpoint.CheckpointError) as error:
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
        saved = checkpoint.find_newest(args.out / CHECKPOINTS)
        hint = f"Continue after {saved.name} with --resume." if saved else ""
        print_on_rank_0("", "Interrupted. " + hint)
        # Skip the usual shutdown, which would wait for interrupted collectives.
        sys.stdout.flush()
        os._exit(130)


if __name__ == "__main__":
    main()
