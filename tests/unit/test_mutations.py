"""Mutation tests of the C code: each seeded bug must fail the named assertion of a C test.

A mutation is one replacement in one file of csrc. The test compiles the file with the mutation,
links the unmodified objects of ``make test-c``, and runs one C test. The C tests of the
shared-memory rings include the mutated source instead of linking objects.

``make mutate`` runs all mutations (FSDP_C_MUTATIONS_WHOLE=1), ``make test`` runs a part.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_mutations import DRY_RUN_MUTATIONS, MUTATIONS, Mutation
from transport_mutations import KERNEL_MUTATIONS, RING_MUTATIONS, TRANSPORT_MUTATIONS

pytestmark = pytest.mark.xdist_group("mutations")  # one worker builds the C tests
ROOT = Path(__file__).resolve().parents[2]
C_TESTS = ROOT / "tests/c"
BUILD = ROOT / "build/tests-c/address,undefined"
FLAGS = ["-std=c11", "-g", "-O0", "-fsanitize=address,undefined", f"-I{ROOT / 'csrc'}"]
WRAPS = [f"-Wl,--wrap={name}" for name in ("fck_cpu", "malloc", "calloc", "realloc")]
LIBRARIES = ["-lcmocka", "-lpthread", "-lm"]
# Compilers must not run under the sanitizer that `make sanitize` preloads into this process.
TOOL_ENV = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
WHOLE = os.environ.get("FSDP_C_MUTATIONS_WHOLE") == "1"
STRIDE = 1 if WHOLE else 5
"""``make test`` runs every fifth mutation of a table."""

TABLES = {
    "core": MUTATIONS,
    "dry_run": DRY_RUN_MUTATIONS,
    "kernels": KERNEL_MUTATIONS,
    "transport": RING_MUTATIONS | TRANSPORT_MUTATIONS,
}
"""Mutations by the folder of csrc; ``transport`` has those of bridge/progress.c, too."""

detected: list[str] = []


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=C_TESTS, env=TOOL_ENV, capture_output=True, text=True
    )


def select(table: dict[str, Mutation]) -> list[str]:
    return list(table)[::STRIDE]


@pytest.fixture(scope="module")
def objects() -> Path:
    """Returns the folder of the object files of the C tests, built without mutations.

    ``make mutate`` also runs these C tests, which must pass. ``make test`` runs them elsewhere.
    """
    tables = (MUTATIONS, DRY_RUN_MUTATIONS, KERNEL_MUTATIONS, TRANSPORT_MUTATIONS)
    tests = sorted({table[name].test for table in tables for name in select(table)})
    targets = ["run", f"TESTS={' '.join(tests)}"] if WHOLE else [BUILD / test for test in tests]
    made = run("make", "-s", "-C", C_TESTS, *targets)
    assert made.returncode == 0, made.stdout + made.stderr
    return BUILD


@pytest.fixture(scope="module", autouse=True)
def print_score() -> Iterator[None]:
    yield
    count = sum(map(len, TABLES.values()))
    print(f"\n{len(detected)} mutations of {count} were run and detected")


def find_source(mutation: Mutation, folder: str) -> Path:
    return (
        ROOT
        / "csrc"
        / ("bridge" if mutation.module == "progress" else folder)
        / f"{mutation.module}.c"
    )


def mutate(mutation: Mutation, source: Path, to: Path) -> Path:
    """Writes the mutated source of a module to folder ``to`` and returns its path."""
    text = source.read_text()
    assert text.count(mutation.original) == 1, "the mutation no longer fits the code"
    mutated = to / source.name
    mutated.write_text(text.replace(mutation.original, mutation.replacement))
    return mutated


def check_failure(mutation: Mutation, folder: Path, *sources: str | Path) -> None:
    """Compiles and links ``sources``, which also contain compiler options and object files.

    The program must fail and print ``mutation.message``.
    """
    program = folder / "mutated"
    linked = run("gcc", *sources, *LIBRARIES, "-o", program)
    assert linked.returncode == 0, linked.stderr
    completed = run(program)
    assert completed.returncode != 0
    assert mutation.message in completed.stdout + completed.stderr
    detected.append(mutation.message)


def test_every_mutation_fits_the_code() -> None:
    for folder, table in TABLES.items():
        for name, mutation in table.items():
            text = find_source(mutation, folder).read_text()
            assert text.count(mutation.original) == 1, f"{name}: the code has changed"


@pytest.mark.parametrize("name", select(MUTATIONS))
def test_mutation_of_the_core_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = MUTATIONS[name]
    mutated = mutate(mutation, find_source(mutation, "core"), tmp_path)
    core = [path for path in sorted((objects / "core").glob("*.o")) if path.stem != mutation.module]
    core = [path for path in core if (ROOT / "csrc/core" / f"{path.stem}.c").exists()]
    simulation = [objects / "tests" / f"{path.stem}.o" for path in sorted(C_TESTS.glob("sim*.c"))]
    labels = [objects / "transport/op_label.o"] if mutation.test == "test_core_ranks" else []
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc/core'}", *WRAPS, mutated, *core, *simulation, *labels),
        *(objects / f"kernels/{name}.o" for name in ("kernels_cpu", "backends", "checksum_cpu")),
        objects / "tests" / f"{mutation.test}.o",
    )


@pytest.mark.parametrize("name", select(DRY_RUN_MUTATIONS))
def test_mutation_of_the_dry_run_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = DRY_RUN_MUTATIONS[name]
    mutated = mutate(mutation, find_source(mutation, "dry_run"), tmp_path)
    core = [objects / f"core/{path.stem}.o" for path in (ROOT / "csrc/core").glob("*.c")]
    dry_run = [objects / f"dry_run/{path.stem}.o" for path in (ROOT / "csrc/dry_run").glob("*.c")]
    others = [path for path in dry_run if path.exists() and path.stem != mutation.module]
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc/dry_run'}", mutated, *core, *others),
        objects / "tests" / f"{mutation.test}.o",
    )


@pytest.mark.parametrize("name", select(TRANSPORT_MUTATIONS))
def test_mutation_of_the_transport_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = TRANSPORT_MUTATIONS[name]
    source = find_source(mutation, "transport")
    mutated = mutate(mutation, source, tmp_path)
    others = [
        path
        for path in sorted((objects / "transport").glob("*.o"))
        if source.parent.name == "transport"
        and path.stem != mutation.module
        and (ROOT / f"csrc/transport/{path.stem}.c").exists()
        # Only these tests define the functions of the bridge that these modules call.
        and (
            path.stem
            not in ("agreement", "capabilities", "checksums", "negotiation", "plans", "sequence")
            or mutation.test in ("test_agreement", "test_negotiation", "test_sequence")
        )
    ]
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{source.parent}", mutated, *others),
        *(
            objects / f"kernels/{name}.o"
            for name in ("kernels_cpu", "backends", "checksum_cpu", "ring_cpu")
        ),
        *(objects / "kernels/kernels_none.o", objects / "tests" / f"{mutation.test}.o"),
    )


@pytest.mark.parametrize("name", select(RING_MUTATIONS))
def test_mutation_of_the_shared_memory_ring_fails_the_named_assertion(
    name: str, tmp_path: Path
) -> None:
    mutation = RING_MUTATIONS[name]
    folder = tmp_path / "transport"
    folder.mkdir()
    for header in ("shm_ring.h", "op_tag.h"):
        (folder / header).write_text((ROOT / "csrc/transport" / header).read_text())
    (tmp_path / "bridge").symlink_to(ROOT / "csrc/bridge")
    mutate(mutation, find_source(mutation, "transport"), folder)
    check_failure(
        mutation,
        tmp_path,
        *(f"-I{tmp_path}", *FLAGS, C_TESTS / f"{mutation.test}.c"),
    )


@pytest.mark.parametrize("name", select(KERNEL_MUTATIONS))
def test_mutation_of_the_kernels_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = KERNEL_MUTATIONS[name]
    mutated = mutate(mutation, find_source(mutation, "kernels"), tmp_path)
    names = {"kernels_cpu", "backends", "checksum_cpu", "ring_cpu", "pool_cpu", "kernels_none"} - {
        mutation.module
    }
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc/kernels'}", mutated),
        *(objects / f"kernels/{name}.o" for name in sorted(names)),
        objects / "tests" / f"{mutation.test}.o",
    )
