"""Tests of the client tests: all cases are listed, scripts do not import fsdp_c, and
client_compare.py detects differences. They need no client library and run with all other tests.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from client_compare import differences, value_differences
from test_clients import CLIENTS, HERE

SCRIPTS = sorted({client.script for client in CLIENTS.values()})


def case_names(script: str) -> list[str]:
    tree = ast.parse((HERE / script).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name.removeprefix("case_") for name in names if name.startswith("case_")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_case_of_script_is_listed_by_exactly_one_client(script: str) -> None:
    cases = [
        case for client in CLIENTS.values() if client.script == script for case in client.cases
    ]
    assert sorted(cases) == sorted(case_names(script))


@pytest.mark.parametrize("script", [*SCRIPTS, "client_job.py"])
def test_client_scripts_do_not_import_fsdp_c(script: str) -> None:
    for node in ast.walk(ast.parse((HERE / script).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("fsdp_c") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("fsdp_c")


# ---- client_compare.py --------------------------------------------------------------------------


@pytest.fixture
def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    return tmp_path / "left", tmp_path / "right"


def test_differences_of_folders_with_missing_files_names_the_files(
    two_folders: tuple[Path, Path],
) -> None:
    (two_folders[0] / "a").write_text("a")
    (two_folders[1] / "sub").mkdir()
    (two_folders[1] / "sub" / "b").write_text("a")
    assert list(differences(*two_folders)) == ["a: only in the first", "sub/b: only in the second"]


def test_differences_of_unknown_file_type_compares_bytes(two_folders: tuple[Path, Path]) -> None:
    for folder, text in zip(two_folders, ("a", "b")):
        (folder / "weights.safetensors").write_text(text)
        (folder / "same").write_text("same")
    assert list(differences(*two_folders)) == ["weights.safetensors: the bytes differ"]


def write_json(path: Path, value: object) -> None:
    path.with_suffix(".json").write_text(json.dumps(value))


def write_torch(path: Path, value: object) -> None:
    torch.save(value, path.with_suffix(".pt"))


@pytest.mark.parametrize("write", [write_json, write_torch])
def test_differences_of_client_results_ignores_timing_keys_only(
    two_folders: tuple[Path, Path], write: Callable[[Path, object], None]
) -> None:
    for index, folder in enumerate(two_folders):
        write(folder / "same", {"runtime": index, "list": [{"total_time": index, "loss": 0.5}]})
        write(folder / "other", {"list": [{"loss": 0.5 + index}]})
    (line,) = differences(*two_folders)
    assert line.startswith("other.") and line.endswith(".list[0].loss: 0.5 and 1.5")


def test_value_differences_of_tensors_compares_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert not list(value_differences("x", nan, nan.clone()))
    for other in (
        torch.tensor([float("nan"), -1.0]),
        nan.double(),
        nan.view(1, 2),
        torch.tensor([float("nan"), 1.0 + 2.0**-23]),
        torch.nn.Parameter(nan),
    ):
        assert list(value_differences("x", nan, other))
    assert list(value_differences("x", torch.tensor(0.0), torch.tensor(-0.0)))


def test_value_differences_detects_key_order_length_and_type() -> None:
    assert list(value_differences("x", {"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert list(value_differences("x", [1, 2], [1]))
    assert list(value_differences("x", [1], (1,)))
    assert list(value_differences("x", 1, 1.0))
    assert not list(value_differences("x", {"a": (1, [2.0])}, {"a": (1, [2.0])}))
