"""Settings that every test shares."""

from __future__ import annotations

import os

# Before torch is imported, by anybody, child processes included: tests run several ranks on few
# processors, and a pool of threads per rank would spend its time on handing work around.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu`, with a reason in the summary, where CUDA cannot be used."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
