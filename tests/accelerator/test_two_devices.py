"""A process group with a backend for the CPU and one for the simulated device serves both."""

from __future__ import annotations

import device_ranks
import pytest
import two_devices
from launch import run_ranks


@pytest.mark.parametrize("transport", ["direct", "gloo"])
def test_models_on_two_devices_train_over_one_process_group(transport: str) -> None:
    """Over gloo, ranks compare the sizes of collectives. On a device they may lack the GIL then."""
    env = {"FSDP_C_PARITY_DEVICE": "sim", "FSDP_C_TRANSPORT": transport}
    results = run_ranks(two_devices.train_on_both, 2, env=env, backend=device_ranks.BACKEND)
    assert results == [[True] * 6] * 2
