"""The training text: the source of Python's standard library, read as bytes.

Every machine that can run this example has this source. The file list is sorted and the size is
limited, so one Python release always gives the same text. Another release gives slightly different
losses.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from job import UsageError
from torch import Tensor

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
VALIDATION_EVERY = 20  # every 20th file is held out


def list_python_files(root: Path) -> Iterator[Path]:
    """Yields the ``.py`` files below ``root`` in a sorted, machine-independent order."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        folders = path.relative_to(root).parts[:-1]
        # _sysconfigdata_*.py describes the machine that built Python, so it is skipped.
        if SKIPPED_FOLDERS.isdisjoint(folders) and not path.name.startswith("_sysconfigdata"):
            yield path


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, each a 1-D uint8 tensor, and a digest of both."""

    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(max_bytes: int) -> Corpus:
    """Reads at most ``max_bytes`` of the source of the standard library.

    Raises UsageError if there is too little source, for instance because the library is zipped.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    for index, path in enumerate(list_python_files(root)):
        remaining = max_bytes - len(train) - len(validation)
        if remaining <= 0:
            break
        part = validation if index % VALIDATION_EVERY == VALIDATION_EVERY // 2 else train
        part += path.read_bytes()[:remaining]
    if not train or not validation:
        raise UsageError(f"too little Python source below {root} in {max_bytes} bytes")
    digest = hashlib.sha256(bytes(train) + b"\0" + bytes(validation)).hexdigest()
    return Corpus(
        torch.frombuffer(train, dtype=torch.uint8),
        torch.frombuffer(validation, dtype=torch.uint8),
        digest,
    )


class Windows:
    """Non-overlapping windows of a text in a shuffled order that depends only on the seed.

    The position in the data is one integer: the number of windows that all ranks have consumed. It
    follows from the number of steps, so a resumed run continues with the next batch.
    """

    def __init__(self, text: Tensor, context: int, seed: int) -> None:
        self.text = text
        self.context = context
        self.seed = seed
        self.count = (text.numel() - 1) // context  # targets are shifted by one byte
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        if self.count < 1:
            raise UsageError(f"the text has {text.numel()} bytes, fewer than one window needs")

    def batch(self, position: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns windows ``position`` to ``position + size``: inputs and next-byte targets.

        Both are int64 of shape ``(size, context)`` on ``device``.
        """
        starts = [self._start(position + i) for i in range(size)]
        rows = torch.stack([self.text[s : s + self.context + 1] for s in starts]).to(torch.int64)
        return rows[:, :-1].to(device), rows[:, 1:].to(device)

    def _start(self, position: int) -> int:
        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = torch.randperm(self.count, generator=generator)
            self._epoch = epoch
        return int(self._order[index]) * self.context
