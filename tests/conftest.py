"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from unittest import mock

# Before torch is imported, by anybody, child processes included: tests run several ranks on few
# processors, and a pool of threads per rank would spend its time on handing work around.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with a reason in the summary, tests marked `gpu` where CUDA cannot be used, and tests
    marked `torch("2.13")` on older releases."""
    import torch
    from releases import has

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        for marker in item.iter_markers("torch"):
            (release,) = marker.args
            if not has(release):
                reason = f"needs torch {release}; this is torch {torch.__version__}"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses to go on where ``--dist loadgroup`` does not keep groups together: every worker
    would launch for itself what the tests of a group share, and the run take twice as long."""
    gc.freeze()  # torch's objects stay: collections need not look at them, which takes 0.2 s each
    if not getattr(session.config.option, "loadgroup", False):
        return
    parted = [
        item.nodeid
        for item in session.items
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
    ]
    if parted:
        raise pytest.UsageError(
            f"pytest-xdist does not group {parted[0]} (pytest {pytest.__version__}): "
            "install what the extra `test` of pyproject.toml asks for"
        )


@pytest.fixture(autouse=True)
def environment_left_as_found() -> Iterator[None]:
    """What a test, or torch's own test helpers under it, set in the environment ends with it:
    child processes of later tests must not see it (TORCH_SHOW_CPP_STACKTRACES changes messages)."""
    with mock.patch.dict(os.environ):
        yield
