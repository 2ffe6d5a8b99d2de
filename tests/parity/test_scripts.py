"""Parity of scripts: unusual user code around FSDP2 gives torch's results.

Results on two ranks (losses, gradients and weights) must be equal, or both implementations must
raise the same error. `make parity` runs all scripts, `make test` the cheap ones. workers/scripts.py
documents how to write a script.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import scripts
from behavior import Raised, differences, outcomes
from releases import has

WORLD_SIZE = 2
WHOLE = os.environ.get("FSDP_C_PARITY_WHOLE", "") not in ("", "0")

# The first test runs all scripts and the others read its results, so one worker runs all of them.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("parity_scripts")]

for module in scripts.MODULES:
    importlib.import_module(module)

ALL = (*scripts.CHEAP, *scripts.COSTLY)
NAMES = ALL if WHOLE else tuple(scripts.CHEAP)

SINCE = {"forward_ad_dual_level": "2.13", "func_jvp": "2.13"}
"""Scripts that need a torch release after 2.11."""

REFUSED = {
    "deepcopy_before_first_step": ("AssertionError", "FSDP does not support deepcopy"),
    "tensor_learning_rate": ("ValueError", "lr as a Tensor is not supported"),
    "parameter_as_output": ("RuntimeError", "The tensor has a non-zero number of elements"),
    "parameter_as_output_wide": ("RuntimeError", "The tensor has a non-zero number of elements"),
    "swa_averaged_model": ("AssertionError", "FSDP does not support deepcopy"),
    "batch_norm_with_mixed_precision": ("RuntimeError", "expected scalar type BFloat16"),
    "convolutions_with_channels_last": ("NotImplementedError", "FSDP does not support non-cont"),
    "embedding_with_sparse_gradients": ("NotImplementedError", "Could not run 'fsdp::chunk_cat'"),
    "lazy_modules_sharded_before_first_call": (
        "RuntimeError",
        "Can't access the shape of an uninitialized",
    ),
    "non_contiguous_parameters": ("NotImplementedError", "FSDP does not support non-con"),
    "zero_redundancy_optimizer": (
        "NotImplementedError",
        "Operator c10d.broadcast_.default does not",
    ),
}
"""The exceptions that both implementations raise, by script."""
if has("2.15"):
    REFUSED |= {
        "embedding_with_sparse_gradients": ("RuntimeError", "reshape is not implemented for spars"),
        "functional_call_with_scaled_parameters": ("RuntimeError", "_has_grad_dtype_override is"),
    }

FIXED = {
    "forward_ad_dual_level": (
        "func_jvp",
        ("RuntimeError", "A custom Function's forward is returning a view"),
    ),
    "parameters_with_zero_elements": (
        "parameters_with_uneven_shapes",
        ("RuntimeError", "_chunk_cat expects non-empty tensor"),
    ),
}
"""Scripts in which torch raises and fsdp_c does not. Each has the script that gives the expected
results under torch, and torch's exception."""


def outcomes_of(name: str) -> tuple[list[Any], list[Any]]:
    """Returns each rank's result or exception of the script, under torch and under fsdp_c."""
    torch_outcome, fsdp_c_outcome = (
        outcomes(implementation, WORLD_SIZE, scripts.MODULES, NAMES, timeout=900)
        for implementation in ("torch", "fsdp_c")
    )
    return [rank[name] for rank in torch_outcome], [rank[name] for rank in fsdp_c_outcome]


def assert_raised(outcome: Any, kind: str, beginning: str) -> None:
    assert isinstance(outcome, Raised), f"expected an exception, got {outcome!r}"
    assert outcome.kind == kind and outcome.text.startswith(beginning), outcome


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(SINCE.get(name, "2.11")))
        for name in NAMES
        if name not in FIXED
    ],
)
def test_script_results_match_torch(name: str) -> None:
    for torch_outcome, fsdp_c_outcome in zip(*outcomes_of(name)):
        lines = differences(torch_outcome, fsdp_c_outcome, name)
        assert not lines, "torch and fsdp_c differ:\n" + "\n".join(lines[:20])
        if name in REFUSED:
            assert_raised(fsdp_c_outcome, *REFUSED[name])
        else:
            assert not isinstance(fsdp_c_outcome, Raised), fsdp_c_outcome


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(SINCE.get(name, "2.11")))
        for name in NAMES
        if name in FIXED
    ],
)
def test_script_that_torch_rejects_gives_expected_results(name: str) -> None:
    reference_script, torch_exception = FIXED[name]
    expected_outcomes, _ = outcomes_of(reference_script)
    for expected, torch_outcome, fsdp_c_outcome in zip(expected_outcomes, *outcomes_of(name)):
        assert_raised(torch_outcome, *torch_exception)
        assert not isinstance(expected, Raised)
        assert differences(expected, fsdp_c_outcome, name) == []


def test_tables_of_differing_scripts_name_existing_scripts() -> None:
    for names in (SINCE, REFUSED, FIXED):
        assert set(names) <= set(ALL)
