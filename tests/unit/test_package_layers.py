"""Modules of fsdp_c: fsdp_c/README.md lists all of them. Imports point to allowed layers.

The package and its metadata have one version.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fsdp_c"
AUTOLOAD = ROOT / "fsdp_c_autoload"
"""The package of the entry point, which torch imports without fsdp_c."""


def listed_files() -> list[str]:
    """Returns the files listed in fsdp_c/README.md."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", (PACKAGE / "README.md").read_text(), re.M)


def source_files() -> list[Path]:
    return [*PACKAGE.rglob("*.py"), *AUTOLOAD.rglob("*.py")]


def listed_name(path: Path) -> str:
    """Returns the name of a file in the list: its path in fsdp_c, or else in the repository."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def imported_modules(node: ast.AST, folder: Path) -> Iterator[str]:
    """Yields the dotted names that an import statement of a file in ``folder`` may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = list(folder.relative_to(ROOT).parts)
        base = package[: len(package) - node.level + 1] if node.level else []
        base += [node.module] if node.module else []
        yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_files(text: str, folder: Path) -> set[str]:
    """Returns the files of fsdp_c that a source text imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for name in imported_modules(node, folder):
            top, _, inner = name.partition(".")
            if top in (AUTOLOAD.name, PACKAGE.name) and not inner.startswith("_C"):
                found.add(listed_name(file_of(name)))
    return found


def file_of(name: str) -> Path:
    """Returns the file that defines a dotted name below ``fsdp_c`` or ``fsdp_c_autoload``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise AssertionError(name)


def test_package_and_metadata_have_one_version() -> None:
    import fsdp_c

    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert re.findall(r"^version = (.*)", project, re.M) == [
        '{ attr = "fsdp_c.version.__version__" }'
    ]
    assert (PACKAGE / "version.py").read_text().count(f'__version__ = "{fsdp_c.__version__}"') == 1


def test_readme_lists_each_file_once() -> None:
    assert sorted(listed_files()) == sorted(map(listed_name, source_files()))


TOOL_FEATURES = {"__init__.py", "__main__.py", "plan.py", "explain.py", "trace.py"}
"""Public files that may import ``_tools``."""

LEAVES = {"names.py", "version.py"}
"""Public files that import no folder of the package, so that every folder may import them."""

ALLOWED = {
    "public": {"public", "_auto_shard", "_checkpoint", "_runtime", "_compat"},
    "tool features": {"public", "tool features", "_tools", "_runtime"},
    "_tools": {"public", "tool features", "_tools", "_auto_shard", "_runtime", "_compat"},
    "_auto_shard": {"_auto_shard", "_runtime", "_compat"},
    "_checkpoint": {"_checkpoint", "_runtime"},
    "_runtime": {"_runtime", "_compat"},
    "_compat": {"_compat"},
    "leaves": set(),
    "fsdp_c_autoload": {"fsdp_c_autoload", "public"},
}
"""Maps a layer to the layers that it may import. All may import leaves and fsdp_c_autoload."""


def layer_of(name: str) -> str:
    """Returns the layer of a file: its folder, or the group of a file at the top."""
    folder, _, file = name.rpartition("/")
    if folder:
        return folder
    for layer, files in (
        ("leaves", LEAVES),
        ("tool features", TOOL_FEATURES),
    ):
        if file in files:
            return layer
    return "public"


def imports_by_file() -> dict[str, set[str]]:
    return {
        listed_name(path): imported_files(path.read_text(), path.parent) for path in source_files()
    }


def find_forbidden(imports: dict[str, set[str]]) -> list[str]:
    """Returns the imports that :data:`ALLOWED` does not contain, as ``importer -> imported``."""
    found = []
    for importer, names in imports.items():
        allowed = ALLOWED[layer_of(importer)] | {"leaves", AUTOLOAD.name}
        if importer == "__init__.py":
            allowed = set(ALLOWED)
        found += [
            f"{importer} -> {name}" for name in sorted(names) if layer_of(name) not in allowed
        ]
    return found


def test_folders_import_only_allowed_folders() -> None:
    imports = imports_by_file()
    assert {layer_of(name) for name in imports} == set(ALLOWED)
    assert find_forbidden(imports) == []


def test_find_forbidden_returns_imports_of_higher_layers() -> None:
    imports = {"_compat/a.py": {"_runtime/b.py"}, "clip.py": {"_tools/c.py", "names.py"}}
    assert find_forbidden(imports) == ["_compat/a.py -> _runtime/b.py", "clip.py -> _tools/c.py"]


def test_package_has_no_import_cycle() -> None:
    """Excludes imports of names from ``fsdp_c/__init__.py``, which run after their definition.

    ``fsdp_c_autoload`` is excluded, because it imports fsdp_c only in functions.
    """
    graph = {name: found - {"__init__.py", name} for name, found in imports_by_file().items()}
    autoload_files = {name for name in graph if layer_of(name) == AUTOLOAD.name}
    graph = {
        name: found - autoload_files for name, found in graph.items() if name not in autoload_files
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)


# ---- sizes ---------------------------------------------------------------------------------------

FILE_LINES = 400
CLASS_LINES = 300
FUNCTION_LINES = 60
"""Lines of a function's body, without its docstring."""


def find_long_classes(text: str, limit: int) -> list[str]:
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno + 1 > limit
    ]


def test_files_have_at_most_400_lines() -> None:
    lengths = {listed_name(path): len(path.read_text().splitlines()) for path in source_files()}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_classes_have_at_most_300_lines() -> None:
    found = {listed_name(p): find_long_classes(p.read_text(), CLASS_LINES) for p in source_files()}
    assert {name: classes for name, classes in found.items() if classes} == {}


def find_long_functions(text: str, limit: int) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_docstring = ast.get_docstring(node) is not None
            begin = (first.end_lineno or 0) + 1 if has_docstring else first.lineno
            if (node.end_lineno or 0) - begin + 1 > limit:
                found.append(node.name)
    return found


def test_functions_have_at_most_60_lines() -> None:
    paths = source_files()
    found = {listed_name(p): find_long_functions(p.read_text(), FUNCTION_LINES) for p in paths}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_find_long_functions_counts_bodies_without_docstrings() -> None:
    text = """
def long(
    a,
):
    '''Counts neither

    these lines nor the signature.'''
    b = 1
    return b
class A:
    async def inner(self):
        def short(): return 1
        x = 2
        return x
"""
    assert find_long_functions(text, 2) == ["inner"]
    assert find_long_functions(text, 1) == ["long", "inner"]


def test_find_long_classes_returns_classes_above_limit() -> None:
    text = "class A:\n    x = 1\n    y = 2\nclass B:\n    x = 1\n"
    assert find_long_classes(text, 2) == ["A"]


# ---- the parser of imports -----------------------------------------------------------------------


def test_imported_files_finds_every_kind_of_import() -> None:
    text = """
from . import _C, param
from .state import State
from .._compat import patches
from ..clip import clip_grad_norm_
import fsdp_c._C as _C, fsdp_c_autoload.redirect
from fsdp_c_autoload import ENVIRONMENT_SWITCH, redirect
def f():
    from fsdp_c.install import install
    from fsdp_c import fully_shard, __version__
"""
    assert imported_files(text, PACKAGE / "_runtime") == {
        *("_runtime/__init__.py", "_runtime/param.py", "_runtime/state.py", "_compat/patches.py"),
        *("fsdp_c_autoload/__init__.py", "fsdp_c_autoload/redirect.py"),
        *("clip.py", "install.py", "fully_shard.py", "__init__.py"),
    }


# ---- modules that are imported on first use ------------------------------------------------------

LAZY = [
    "_auto_shard",
    "_checkpoint",
    "_tools",
    "auto_shard",
    "checkpoint",
    "ema",
    "explain",
    "plan",
    "policies",
    "trace",
    "wrap",
]
"""Modules and folders that the first step does not import."""

FIRST_USE = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
before = set(sys.modules)
from fsdp_c import MixedPrecisionPolicy, fully_shard
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.SGD(fully_shard(model).parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(*sorted(set(sys.modules) - before))
"""


def run_after_torch(code: str) -> list[str]:
    """Runs ``code`` in a process that has imported torch. Returns the words that it prints."""
    completed = fork_server.run_code(code)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split()


def test_first_training_step_does_not_import_lazy_modules() -> None:
    """Modules for estimates, diagrams and checkpoint files are imported by the first call."""
    paths = [PACKAGE / name for name in LAZY]
    assert all(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
    found = run_after_torch(FIRST_USE)
    assert "fsdp_c._runtime.param_group" in found
    lazy_modules = {f"fsdp_c.{name}" for name in LAZY} | {"matplotlib", "safetensors"}
    assert [m for m in found if ".".join(m.split(".")[:2]) in lazy_modules] == []


@pytest.mark.parametrize("feature", ["fully_shard", "replicate", "install", "checkpoint"])
def test_features_that_train_import_nothing_of_tools(feature: str) -> None:
    code = (
        f"import sys, importlib; importlib.import_module('fsdp_c.{feature}'); print(*sys.modules)"
    )
    found = run_after_torch(code)
    assert f"fsdp_c.{feature}" in found
    assert [name for name in found if name.startswith("fsdp_c._tools")] == []


def test_lazily_imported_names_resolve_to_functions_and_modules() -> None:
    code = """
import importlib, fsdp_c
importlib.import_module("fsdp_c._tools.plan_command")  # imports the modules of two functions
assert set(fsdp_c.__all__) <= set(dir(fsdp_c))
functions = [fsdp_c.plan, fsdp_c.explain, fsdp_c.auto_shard, fsdp_c.trace]
print(*(type(function).__name__ for function in functions))
print(*(function.__module__ for function in functions))
print(fsdp_c.wrap.__name__, fsdp_c.wrap.plan.__name__, hasattr(fsdp_c, "nothing"))
from fsdp_c import *
print(all(globals()[name] is getattr(fsdp_c, name) for name in fsdp_c.__all__))
"""
    assert run_after_torch(code) == [
        *["function"] * 4,
        *["fsdp_c.plan", "fsdp_c.explain", "fsdp_c.auto_shard", "fsdp_c.trace"],
        *["fsdp_c.wrap", "plan", "False"],
        "True",
    ]
