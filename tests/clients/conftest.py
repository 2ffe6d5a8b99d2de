"""Skips the client tests outside of ``make test-clients``, which installs their libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SWITCH = "FSDP_C_TEST_CLIENTS"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips test_clients.py, with a reason, unless FSDP_C_TEST_CLIENTS is on."""
    if os.environ.get(SWITCH, "") not in ("", "0"):
        return
    for item in items:
        if item.path == Path(__file__).with_name("test_clients.py"):
            item.add_marker(pytest.mark.skip(reason="needs libraries: run make test-clients"))
