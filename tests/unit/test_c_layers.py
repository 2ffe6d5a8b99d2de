"""Modules of csrc: layers, tables, dependencies, C tests, attributes that only torch uses."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import c_dependencies
import pytest
from torch.distributed.fsdp import _fully_shard

ROOT = Path(__file__).resolve().parents[2]

COVERED_BY = {"state": ("test_train", "test_reset")}
"""Modules without a test file of their own, mapped to the tests of whole steps that cover them."""


def test_each_core_module_has_a_c_test() -> None:
    modules = {path.stem for path in (ROOT / "csrc/core").glob("*.c")}
    tests = {path.stem for path in (ROOT / "tests/c").glob("test_*.c")}
    assert len(modules) > 10, "found too few modules: the test would check nothing"
    assert COVERED_BY.keys() <= modules
    expected = {module: COVERED_BY.get(module, (f"test_{module}",)) for module in modules}
    missing = {module: names for module, names in expected.items() if not tests.issuperset(names)}
    assert missing == {}


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", c_dependencies.LAYERS)
def test_layer_table_lists_each_c_module_once(folder: str) -> None:
    listed = [module for layer in c_dependencies.LAYERS[folder] for module in layer]
    assert sorted(listed) == sorted(c_dependencies.list_modules(folder))


@pytest.mark.parametrize("folder", c_dependencies.LAYERS)
def test_includes_and_calls_point_to_lower_layers(folder: str) -> None:
    dependencies = c_dependencies.find_dependencies(c_dependencies.list_modules(folder))
    expected = 50 if folder in ("core", "python") else len(dependencies)
    assert sum(map(len, dependencies.values())) > expected, (
        "found too few dependencies: the test would check nothing"
    )
    assert c_dependencies.find_upward(dependencies, c_dependencies.LAYERS[folder]) == {}
    assert c_dependencies.find_cycles(dependencies) == []


def test_include_table_lists_each_folder_of_csrc() -> None:
    folders = {path.name for path in c_dependencies.CSRC.iterdir() if path.is_dir()}
    assert set(c_dependencies.INCLUDES) == folders


@pytest.mark.parametrize("folder", c_dependencies.INCLUDES)
def test_folder_includes_only_allowed_headers_of_other_folders(folder: str) -> None:
    allowed = c_dependencies.INCLUDES[folder]
    found = c_dependencies.find_other_folders(folder)
    forbidden = {
        header: files
        for header, files in found.items()
        if not any(fnmatch(header, pattern) for pattern in allowed)
    }
    assert forbidden == {}
    unused = {p for p in allowed if not any(fnmatch(header, p) for header in found)}
    unused -= set(c_dependencies.BOUNDARY)
    assert unused == set(), f"remove the headers from INCLUDES: no file of {folder} includes them"


def test_boundary_headers_do_not_reach_python_objects() -> None:
    """A file that includes the headers of the core's boundary cannot use Python objects."""
    bridge = c_dependencies.CSRC / "bridge"
    for header in c_dependencies.BOUNDARY:
        text = c_dependencies.strip_comments(c_dependencies.CSRC / header)
        included = re.findall(r'#include "([^"]+)"', text)
        assert {f"bridge/{name}" for name in included} <= set(c_dependencies.BOUNDARY)
        assert not re.search(r"\b(_object|PyObject|fct_py_\w+)\b", text), header
    others = {f"bridge/{path.name}" for path in bridge.glob("*.h")} - set(c_dependencies.BOUNDARY)
    assert others == {"bridge/progress.h", "bridge/pyobject.h", "bridge/shm_methods.h"}


def test_python_modules_declare_their_functions_in_their_own_headers() -> None:
    """objects.h declares the types; callers of a module include the header of that module."""
    modules = c_dependencies.list_modules("python")
    assert {module for module, files in modules.items() if len(files) < 2} == {
        "version_cache",
        "module",
    }
    dependencies = c_dependencies.find_dependencies(modules)
    assert set(dependencies["objects"]) == {"version_cache"}


def test_find_upward_returns_dependency_on_higher_layer(tmp_path: Path) -> None:
    low, high = tmp_path / "low.c", tmp_path / "high.c"
    low.write_text("int fc_low(void) {\n    return fc_high(); /* not fc_never() */\n}\n")
    high.write_text('#include "low.h"\n\nint fc_high(void) {\n    return fc_low();\n}\n')
    dependencies = c_dependencies.find_dependencies({"low": [low], "high": [high]})
    assert c_dependencies.find_upward(dependencies, ({"low"}, {"high"})) == {
        "low -> high": {"fc_high"}
    }
    assert c_dependencies.find_cycles(dependencies) == [{"low", "high"}]


def test_only_state_machine_modules_take_fc_group() -> None:
    assert set(c_dependencies.count_functions_taking("fc_group")) <= {"group", "order", "state"}
    fields = c_dependencies.list_fields("fc_group", c_dependencies.CSRC / "core/group.h")
    assert len(fields) <= 16
    assert sum(field.startswith("bool ") for field in fields) <= 6


# ---- tables of modules ---------------------------------------------------------------------------

CODE = {".c", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
_FILE = re.compile(rf"`(\w+)(?:{'|'.join(map(re.escape, sorted(CODE)))})`")


def read_tables(document: str, heading: str) -> str:
    """Returns the table rows between a heading of a document of csrc and the next heading."""
    _, found, rest = (c_dependencies.CSRC / document).read_text().partition(f"\n## {heading}\n")
    assert found, f"{document} lacks the heading {heading}"
    return "\n".join(row for row in rest.split("\n## ")[0].splitlines() if row.startswith("|"))


@pytest.mark.parametrize("folder", ["core", "python", "dry_run"])
def test_module_table_lists_each_module_in_its_layer(folder: str) -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([^|]+) \|", read_tables("MODULES.md", f"`csrc/{folder}`"), re.M
    )
    listed = [(int(layer), module) for layer, names in rows for module in re.findall(r"\w+", names)]
    layers = enumerate(c_dependencies.LAYERS[folder], 1)
    assert sorted(listed) == sorted((layer, module) for layer, names in layers for module in names)


@pytest.mark.parametrize(
    ("folder", "document", "heading"),
    [
        ("bridge", "MODULES.md", "`csrc/bridge`"),
        ("kernels", "MODULES.md", "`csrc/kernels`"),
        ("transport", "transport/README.md", "Files"),
    ],
)
def test_file_table_lists_each_module(folder: str, document: str, heading: str) -> None:
    files = (c_dependencies.CSRC / folder).iterdir()
    modules = {path.stem for path in files if path.suffix in CODE}
    assert set(_FILE.findall(read_tables(document, heading))) == modules


# ---- attributes that exist for torch only --------------------------------------------------------

DIVIDER = "/* ---- names of torch's private interface;"
FOR_TESTS = {"_buckets", "_check", "deferred_collectives"}
"""Attributes that neither fsdp_c's Python code nor torch reads: tests read them."""
SIMULATIONS = {
    "dry_run.py",
    "advice.py",
    "fake_step.py",
    "step_advice.py",
    "step_memory.py",
    "trace_spans.py",
}
"""Files that simulate a step. Some of their own attributes have names of torch's attributes."""
_TABLE = re.compile(r"^(?:static )?Py(?:GetSet|Method)Def \w+\[\] = .*?^};", re.M | re.S)
_ENTRY = re.compile(r'^    (?:\{|GROUP_FLAG\()"(\w+)",', re.M)


@pytest.mark.torch("2.13")  # the tables list the attributes of this release
def test_attribute_tables_separate_attributes_that_only_torch_uses() -> None:
    """Attributes that no file of fsdp_c uses exist for torch only, and stand below the divider."""
    files = [
        path for path in sorted((ROOT / "fsdp_c").rglob("*.py")) if path.name not in SIMULATIONS
    ]
    fsdp_c_source = "\n".join(path.read_text() for path in files)
    torch_source = "\n".join(path.read_text() for path in Path(*_fully_shard.__path__).glob("*.py"))
    used, torch_only = set(), set()
    for path in sorted((c_dependencies.CSRC / "python").glob("*_*.c")) + [
        c_dependencies.CSRC / "python/param.c",
        c_dependencies.CSRC / "python/state.c",
    ]:
        for table in _TABLE.findall(path.read_text()):
            above, _, below = table.partition(DIVIDER)
            used.update(_ENTRY.findall(above))
            torch_only.update(_ENTRY.findall(below))
    assert len(used) > 40, "found too few attributes: the test would check nothing"
    unused = {name for name in used | torch_only if not re.search(rf"\b{name}\b", fsdp_c_source)}
    assert unused - FOR_TESTS == torch_only
    assert {name for name in torch_only if re.search(rf"\b{name}\b", torch_source)} == torch_only
