"""Mutation tests of the Python package: each seeded bug must fail the named test.

A mutation is one replacement in one file of ``fsdp_c``. Each test runs in a copy of the package and
of its tests, with the mutation. ``make mutate`` runs all mutations (FSDP_C_MUTATIONS_WHOLE=1),
``make test`` runs a part.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import forked_python
import pytest
from python_mutations import PYTHON_MUTATIONS

pytestmark = pytest.mark.xdist_group("python_mutations")  # the tests write to one copy
ROOT = Path(__file__).resolve().parents[2]
STRIDE = 1 if os.environ.get("FSDP_C_MUTATIONS_WHOLE") == "1" else 6
"""``make test`` runs every sixth mutation."""


@pytest.fixture(scope="module")
def copied_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with copies of the packages, the tests and the settings of pytest."""
    copy = tmp_path_factory.mktemp("copied_root")
    for folder in ("fsdp_c", "fsdp_c_autoload", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def run_test(copied_root: Path, test: str) -> subprocess.CompletedProcess[str]:
    file, _, name = test.partition("::")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", name]
    return subprocess.run(
        [forked_python.make_program(), "-m", "pytest", *options, f"tests/{file}"],
        cwd=copied_root,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )


def test_every_python_mutation_fits_the_code() -> None:
    for name, mutation in PYTHON_MUTATIONS.items():
        text = (ROOT / "fsdp_c" / mutation.file).read_text()
        assert text.count(mutation.original) == 1, f"{name}: the code has changed"
        file, _, part = mutation.test.partition("::")
        assert part in (ROOT / "tests" / file).read_text(), f"{name}: the test was renamed"


@pytest.mark.parametrize("name", list(PYTHON_MUTATIONS)[::STRIDE])
def test_python_mutation_fails_the_named_test(name: str, copied_root: Path) -> None:
    mutation = PYTHON_MUTATIONS[name]
    source = copied_root / "fsdp_c" / mutation.file
    original = source.read_text()
    source.write_text(original.replace(mutation.original, mutation.replacement))
    try:
        completed = run_test(copied_root, mutation.test)
    finally:
        source.write_text(original)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert mutation.message in completed.stdout
