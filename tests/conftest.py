"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def environment_left_as_found() -> Iterator[None]:
    """What a test, or torch's own test helpers under it, set in the environment ends with it:
    child processes of later tests must not see it (TORCH_SHOW_CPP_STACKTRACES changes messages)."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value
