"""Parameters with types of the optional package ``spmd_types`` (docs/torch-releases.md)."""

from __future__ import annotations

import pytest
from behavior import assert_same
from behavior_spmd_types import HAS_SPMD_TYPES

pytestmark = [
    pytest.mark.torch("2.15"),
    pytest.mark.skipif(not HAS_SPMD_TYPES, reason="needs the package spmd_types"),
]


def test_parameters_with_spmd_types_train_as_in_torch() -> None:
    for result in assert_same("typed_parameters_train", world=4):
        for seen in result.values():
            assert any(
                "Parameter" in param for params in seen["local parameters"] for param in params
            )
        assert result["checked"]["outputs"][0] != "{}"


def test_spmd_types_that_fit_no_mesh_raise_errors_of_torch() -> None:
    for messages in assert_same("typed_parameters_refused", world=4):
        assert len(messages) == 4
        assert "Expected spmd.R on FSDP DP axis" in messages["partial on dp"]
