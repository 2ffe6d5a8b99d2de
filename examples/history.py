"""The measurements of train_gpt.py, step by step, and the files that it writes at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plots
import torch
from job import RANK, print_on_rank_0


@dataclass
class History:
    """All measurements so far. Floats to compare bit by bit are stored as ``float.hex()``."""

    train: list[str] = field(default_factory=list)
    gradient_norm: list[str] = field(default_factory=list)
    validation: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in plots.PHASE_COLORS}
    )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Appends the seconds of the block, including its device work, to ``seconds[name]``."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[name].append(time.perf_counter() - start)

    def add_step(self, loss: float, gradient_norm: float) -> None:
        self.train.append(loss.hex())
        self.gradient_norm.append(gradient_norm.hex())

    def add_validation(self, step: int, loss: float) -> None:
        """Adds the validation loss after the step with the index ``step``."""
        self.validation[str(step + 1)] = loss.hex()

    def write(self, folder: Path, impl: str, summary: dict[str, Any]) -> None:
        """Writes losses.json, which is comparable with cmp, summary.json and curve.png."""
        if RANK != 0:
            return
        validation = {int(s): float.fromhex(loss) for s, loss in self.validation.items()}
        names = ("train", "gradient_norm", "validation")
        losses = {name: getattr(self, name) for name in names}
        losses["weights_sha256"] = summary["weights_sha256"]
        summary = {"impl": impl, "final_validation_loss": validation[max(validation)], **summary}
        for name, content in (("losses", losses), ("summary", summary)):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        plots.draw_run(
            folder / "curve.png",
            title=f"Byte-level GPT on Python's own source: {impl}",
            train=[float.fromhex(loss) for loss in self.train],
            validation=validation,
            phases=self.seconds,
        )
        print_on_rank_0(f"Written to        {folder}/")
