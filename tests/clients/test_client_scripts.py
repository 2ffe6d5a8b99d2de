"""The client tests' own tools: cases are complete, scripts know nothing of us, and comparing works.

These need no library and run with all other tests.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from client_compare import differences, unequal
from test_clients import CLIENTS, HERE

SCRIPTS = sorted({client.script for client in CLIENTS.values()})


def functions(script: str) -> list[str]:
    tree = ast.parse((HERE / script).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("case_") for name in names if name.startswith("case_")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_case_of_a_script_is_run_and_by_one_client(script: str) -> None:
    cases = [case for one in CLIENTS.values() if one.script == script for case in one.cases]
    assert sorted(cases) == sorted(functions(script))


@pytest.mark.parametrize("script", [*SCRIPTS, "client_job.py"])
def test_scripts_import_nothing_of_ours(script: str) -> None:
    for node in ast.walk(ast.parse((HERE / script).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fsdp_c") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("fsdp_c")


# ---- comparing -----------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    return tmp_path / "left", tmp_path / "right"


def test_missing_files_are_seen(two: tuple[Path, Path]) -> None:
    (two[0] / "a").write_text("a")
    (two[1] / "sub").mkdir()
    (two[1] / "sub" / "b").write_text("a")
    assert list(differences(*two)) == ["a: only in the first", "sub/b: only in the second"]


def test_unknown_files_are_compared_by_their_bytes(two: tuple[Path, Path]) -> None:
    for folder, text in zip(two, ("a", "b")):
        (folder / "weights.safetensors").write_text(text)
        (folder / "same").write_text("same")
    assert list(differences(*two)) == ["weights.safetensors: the bytes differ"]


def write_json(path: Path, value: object) -> None:
    path.with_suffix(".json").write_text(json.dumps(value))


def write_torch(path: Path, value: object) -> None:
    torch.save(value, path.with_suffix(".pt"))


@pytest.mark.parametrize("write", [write_json, write_torch])
def test_only_volatile_entries_may_differ(
    two: tuple[Path, Path], write: Callable[[Path, object], None]
) -> None:
    for index, folder in enumerate(two):
        write(folder / "same", {"runtime": index, "list": [{"total_time": index, "loss": 0.5}]})
        write(folder / "other", {"list": [{"loss": 0.5 + index}]})
    (found,) = differences(*two)
    assert found.startswith("other.") and found.endswith(".list[0].loss: 0.5 and 1.5")


def test_tensors_are_compared_to_the_bit() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert not list(unequal("x", nan, nan.clone()))
    for other in (
        torch.tensor([float("nan"), -1.0]),
        nan.double(),
        nan.view(1, 2),
        torch.tensor([float("nan"), 1.0 + 2.0**-23]),
        torch.nn.Parameter(nan),
    ):
        assert list(unequal("x", nan, other))
    assert list(unequal("x", torch.tensor(0.0), torch.tensor(-0.0)))


def test_shape_of_trees_counts() -> None:
    assert list(unequal("x", {"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert list(unequal("x", [1, 2], [1]))
    assert list(unequal("x", [1], (1,)))
    assert list(unequal("x", 1, 1.0))
    assert not list(unequal("x", {"a": (1, [2.0])}, {"a": (1, [2.0])}))
