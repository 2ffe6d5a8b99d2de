"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from unittest import mock

# Set before torch is imported, and inherited by child processes. Tests run several ranks on few
# processors, where a thread pool per rank costs more than it gains.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables garbage collection while tests and torch are imported.

    Collections took a third of that CPU time in each pytest-xdist worker.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` without CUDA, and tests marked `torch("2.13")` on older releases.

    Makes one pytest-xdist worker run all behavior scenarios. Moves the groups of pytest-xdist to
    the front: a group takes up to a minute, and the last one would run alone on the machine.
    """
    import torch
    from releases import has

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.name.startswith("test_behavior_"):
            item.add_marker(pytest.mark.xdist_group("behavior"))  # the tests share launches
        for marker in item.iter_markers("torch"):
            (release,) = marker.args
            if not has(release):
                reason = f"needs torch {release}; this is torch {torch.__version__}"
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fails the run if pytest-xdist ignores groups although ``--dist loadgroup`` is given.

    Without groups each worker would start the shared fixtures of a group itself, which doubles the
    duration of the run.
    """
    gc.freeze()  # excludes torch's objects, which saves 0.2 s per garbage collection
    if not getattr(session.config.option, "loadgroup", False):
        return
    ungrouped = [
        item.nodeid
        for item in session.items
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
    ]
    if ungrouped:
        raise pytest.UsageError(
            f"pytest-xdist does not group {ungrouped[0]} (pytest {pytest.__version__}): "
            "install the versions in the extra `test` of pyproject.toml"
        )


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Restores ``os.environ`` after each test.

    Tests and torch's test helpers set variables that would affect the child processes of later
    tests. For example, TORCH_SHOW_CPP_STACKTRACES changes messages.
    """
    with mock.patch.dict(os.environ):
        yield
