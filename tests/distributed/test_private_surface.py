"""Parts of FSDP2 that torch does not document and that libraries use: docs/private-surface.md.

Each row of the document is a scenario. All scenarios run in one launch for each implementation.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from behavior import differences, get_results

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "private-surface.md"
MODULES = ("private_hooks", "private_states", "private_groups", "private_params")
DIFFERENT = {"group_prefetches_replaced", "group_parameters_replaced"}
"""Rows that the document lists as different from torch."""

pytestmark = [pytest.mark.torch("2.13"), pytest.mark.xdist_group("private surface")]


def is_scenario(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "scenario"
        for mark in node.decorator_list
    )


def scenarios() -> list[str]:
    """Returns the names of all scenarios in the worker modules."""
    folder = Path(__file__).parent / "workers"
    trees = [ast.parse((folder / f"{module}.py").read_text()) for module in MODULES]
    return [node.name for tree in trees for node in tree.body if is_scenario(node)]  # type: ignore[attr-defined]


def rows(section: str) -> list[list[str]]:
    """Returns the cells of the table rows in ``section``, without the head of each table."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if not set(row[0]) <= {"-"} and "`" in "".join(row)]


def results_of(name: str) -> tuple[list[Any], list[Any]]:
    """Returns the results of a scenario on each rank, under torch and under fsdp_c."""
    return get_results(name, "torch", 2, MODULES), get_results(name, "fsdp_c", 2, MODULES)


def test_private_surface_document_has_one_row_per_scenario() -> None:
    scenario_section, difference_section = DOCUMENT.read_text().split("## Differences")
    found = [row[-1].strip("`") for row in rows(scenario_section)]
    assert sorted(found) == sorted(scenarios())
    assert len(found) == len(set(found)) >= 30
    assert {row[0].strip("`") for row in rows(difference_section)} == DIFFERENT


@pytest.mark.parametrize("name", [name for name in scenarios() if name not in DIFFERENT])
def test_private_surface_scenario_matches_torch(name: str) -> None:
    from_torch, from_fsdp_c = results_of(name)
    found = differences(from_torch, from_fsdp_c, name)
    assert not found, "torch and fsdp_c differ:\n" + "\n".join(found[:20])


def test_replaced_prefetch_method_is_called_by_torch_only() -> None:
    for from_torch, from_fsdp_c in zip(*results_of("group_prefetches_replaced")):
        (trained, calls, trained_without_prefetch), torch_calls = from_fsdp_c, from_torch[1]
        assert set(torch_calls) == {"forward", "backward"} and calls == []
        assert differences(from_torch, [trained, torch_calls, trained_without_prefetch]) == []


def test_assigned_parameter_list_is_refused_by_fsdp_c_only() -> None:
    for from_torch, from_fsdp_c in zip(*results_of("group_parameters_replaced")):
        assert from_torch == ["list", "no exception", 3]
        assert from_fsdp_c == ["list", "AttributeError", 4]


def test_functions_of_registered_hooks_have_fsdp2s_module_name() -> None:
    for observed in results_of("hooks_removed_by_module_name")[1]:
        counts = [pair for pair in observed if isinstance(pair, list) and pair == [1, 0]]
        assert len(counts) == 2 * (4 + 3)  # both hooks of each sharded module, in two models
