"""Parity of scripts: unusual things that users do around FSDP2, bit by bit beside torch.

What each script saw on two ranks, losses, gradients and weights above all, must be equal, or both
implementations raise the same. `make parity` runs all of them, `make test` those that are cheap.
workers/scripts.py says how to write one.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import scripts
from behaviour import Raised, differences, outcomes

WORLD_SIZE = 2
WHOLE = os.environ.get("FSDP_C_PARITY_WHOLE", "0") != "0"

# The first test runs all scripts, the others read what came out: keep them on one worker.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("parity_scripts")]

for module in scripts.MODULES:
    importlib.import_module(module)

ALL = (*scripts.CHEAP, *scripts.COSTLY)
NAMES = ALL if WHOLE else tuple(scripts.CHEAP)

SINCE = {"dual_numbers": "2.13", "dual_numbers_of_a_transform": "2.13"}
"""Scripts that need a later torch than 2.11."""

REFUSED = {
    "a_copy_before_the_first_step": ("AssertionError", "FSDP does not support deepcopy"),
    "a_learning_rate_that_is_a_tensor": ("ValueError", "lr as a Tensor is not supported"),
    "a_parameter_as_output": ("RuntimeError", "The tensor has a non-zero number of elements"),
    "a_parameter_as_output_wide": ("RuntimeError", "The tensor has a non-zero number of elements"),
    "an_averaged_model": ("AssertionError", "FSDP does not support deepcopy"),
    "batch_norm_of_mixed_dtypes": ("RuntimeError", "expected scalar type BFloat16"),
    "convolutions_with_channels_last": ("NotImplementedError", "FSDP does not support non-cont"),
    "embedding_with_sparse_gradients": ("NotImplementedError", "Could not run 'fsdp::chunk_cat'"),
    "lazy_modules_at_once": ("RuntimeError", "Can't access the shape of an uninitialized"),
    "parameters_that_are_not_contiguous": ("NotImplementedError", "FSDP does not support non-con"),
    "zero_redundancy": ("NotImplementedError", "Operator c10d.broadcast_.default does not"),
}
"""What both implementations raise."""

BETTER = {
    "dual_numbers": (
        "dual_numbers_of_a_transform",
        ("RuntimeError", "A custom Function's forward is returning a view"),
    ),
    "parameters_without_elements": (
        "parameters_of_odd_shapes",
        ("RuntimeError", "_chunk_cat expects non-empty tensor"),
    ),
}
"""Where ours is better: another script, under torch, that finds what is right, and what torch
raises in this one."""


def seen(name: str) -> tuple[list[Any], list[Any]]:
    """What the script returned or raised on each rank, under torch and under fsdp_c."""
    stock, ours = (
        outcomes(implementation, WORLD_SIZE, scripts.MODULES, NAMES, timeout=900)
        for implementation in ("torch", "fsdp_c")
    )
    return [rank[name] for rank in stock], [rank[name] for rank in ours]


def assert_raised(outcome: Any, kind: str, beginning: str) -> None:
    assert isinstance(outcome, Raised), f"no exception but {outcome!r}"
    assert outcome.kind == kind and outcome.text.startswith(beginning), outcome


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(SINCE.get(name, "2.11")))
        for name in NAMES
        if name not in BETTER
    ],
)
def test_same_bits(name: str) -> None:
    for stock, ours in zip(*seen(name)):
        found = differences(stock, ours, name)
        assert not found, "torch's and ours differ:\n" + "\n".join(found[:20])
        if name in REFUSED:
            assert_raised(ours, *REFUSED[name])
        else:
            assert not isinstance(ours, Raised), ours


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(SINCE.get(name, "2.11")))
        for name in NAMES
        if name in BETTER
    ],
)
def test_stock_raises_and_ours_is_right(name: str) -> None:
    other, raised = BETTER[name]
    right, _ = seen(other)
    for expected, stock, ours in zip(right, *seen(name)):
        assert_raised(stock, *raised)
        assert not isinstance(expected, Raised)
        assert differences(expected, ours, name) == []


def test_all_names_are_those_of_scripts() -> None:
    for named in (SINCE, REFUSED, BETTER):
        assert set(named) <= set(ALL)
