"""Writes the tables of docs/configuration.md from the environment variables that the code reads.

    python docs/configuration_table.py            # updates the page
    python docs/configuration_table.py --check    # fails if the page is out of date

``find_names`` finds the variables in the sources. The descriptions are below. The script fails for
a variable without a description, and for a description without a variable.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: configuration_table.py -->", "<!-- end: configuration_table.py -->"


class Variable(NamedTuple):
    """The values, the default and the effect of an environment variable, in Markdown."""

    values: str
    default: str
    effect: str


SWITCH = "off: empty, `0`, `no`, `off`, `false`; on: any other value"
NUMBER_SWITCH = "off: empty or `0`; on: any other value"

RUN = {
    "FSDP_C": Variable(
        SWITCH, "off", "torch's `fully_shard` runs fsdp_c: [migrate](migrate.md#from-fsdp2)"
    ),
    "FSDP_C_CLIP": Variable(
        SWITCH, "on", "After `FSDP_C=1` or `install()`, torch's clipping functions use the C path"
    ),
    "FSDP_C_GUARD": Variable(
        "`hash`; off: empty, `0`, `no`, `off`, `false`; on: `on`, `1`, `yes`, `true`, and any "
        "other value with a warning",
        "on",
        "Ranks compare their models and collectives, with `hash` also checksums of data: "
        "[reliability](reliability.md#ranks-diverge)",
    ),
    "FSDP_C_JIT": Variable(
        SWITCH,
        "on",
        "NVRTC compiles the CUDA kernels at first use, if the build has none: "
        "[installation](getting-started.md#install)",
    ),
    "FSDP_C_OPTIM": Variable(
        SWITCH, "on", "After `FSDP_C=1` or `install()`, optimizers step on local shards"
    ),
    "FSDP_C_STALL_DIR": Variable(
        "a folder",
        "`fsdp_c-<user id>` in the folder for temporary files",
        "Ranks that wait long write their last collectives there: "
        "[reliability](reliability.md#ranks-wait)",
    ),
    "FSDP_C_STALL_SECONDS": Variable(
        "seconds, `0`: no report",
        "10",
        "The wait for other ranks after which a rank logs where all ranks are",
    ),
    "FSDP_C_STALL_SIGNAL": Variable(
        "a name such as `SIGUSR2`",
        "none",
        "The signal on which a rank writes its last collectives. The signal's previous action "
        "follows, but `SIGUSR1` and `SIGUSR2` without a handler do not end the process",
    ),
    "FSDP_C_TRANSPORT": Variable(
        "`direct`, `gloo`",
        "`direct`",
        "`gloo` on any rank selects gloo's collectives for the whole group: "
        "[performance](performance.md#transport-on-the-cpu)",
    ),
}
"""Variables that the package and the extension read in a job."""

BUILD = {
    "FSDP_C_ASSERT": Variable(
        NUMBER_SWITCH, "off", "Assertions in the C files only (`make test-assert`)"
    ),
    "FSDP_C_CUDA_ARCH": Variable(
        "an architecture of nvcc, `sm_90`", "not set", "Replaces `TORCH_CUDA_ARCH_LIST`"
    ),
    "FSDP_C_DEBUG": Variable(NUMBER_SWITCH, "off", "Assertions, and no optimization"),
    "FSDP_C_LENIENT": Variable(NUMBER_SWITCH, "off", "Compiler warnings are not errors"),
    "FSDP_C_NO_CUDA": Variable(NUMBER_SWITCH, "off", "No CUDA kernels"),
    "FSDP_C_SANITIZE": Variable(
        NUMBER_SWITCH, "off", "AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`)"
    ),
}
"""Variables that the build reads."""

INTERNAL = Variable("", "", "Set by the tests for the processes that they start")
TESTS = {
    "FSDP_C_ACCELERATOR_WHOLE": Variable(
        NUMBER_SWITCH, "off", "The whole parity grid on the simulated accelerator"
    ),
    "FSDP_C_BENCH_ONE_PROCESS": Variable(
        "`1`", "not set", "Set by `benchmarks/replicate.py` for its processes"
    ),
    "FSDP_C_BENCH_STORE": Variable("a path", "not set", "Set by the benchmarks for their ranks"),
    "FSDP_C_FLIPS": Variable("a number", "100", "Flipped bits per case of `test_checksums.py`"),
    "FSDP_C_FUZZ": Variable("a number", "30", "Random programs of `tests/faults`"),
    "FSDP_C_GPU_JOBS_DEVICE": Variable(
        "a device", "`cuda`", "Device of the scripts of `test_gpu.py`"
    ),
    "FSDP_C_INTERRUPTS": Variable("a number, 0: all", "40", "Lines at which a call is interrupted"),
    "FSDP_C_CUDA_FINDINGS": INTERNAL,
    "FSDP_C_CUDA_SEED": INTERNAL,
    "FSDP_C_CUDA_SIM": INTERNAL,
    "FSDP_C_CUDA_PYTHON": Variable(
        "path",
        "`make cuda-sim`, `make bench`: an environment of `make env-releases`; pytest: this Python",
        "Python with a CUDA build of torch (`make cuda-sim`)",
    ),
    "FSDP_C_CUDA_PACKAGE": Variable(
        "path",
        "`build/cuda-sim/package`",
        "Folder with fsdp_c, built for the torch of `FSDP_C_CUDA_PYTHON`",
    ),
    "FSDP_C_MODEL_WHOLE": Variable("`1`", "off", "All searches of `tests/model` (`make model`)"),
    "FSDP_C_MUTATIONS_WHOLE": Variable("`1`", "off", "All seeded bugs (`make mutate`)"),
    "FSDP_C_NVRTC": Variable("paths", "not set", "NVRTC libraries that compile the kernels"),
    "FSDP_C_PARITY_COUNT": Variable("a number", "140", "Settings of the parity tests"),
    "FSDP_C_PARITY_DEVICE": INTERNAL,
    "FSDP_C_PARITY_FEATURES": Variable(
        "`all`, or names separated by commas",
        "not set",
        "Features that the wide grid tests although the installed torch does not support them",
    ),
    "FSDP_C_PARITY_IMPLEMENTATION": Variable(
        "a module", "`fsdp_c`", "The implementation to compare"
    ),
    "FSDP_C_PARITY_LAUNCHES": Variable(
        "names such as `gloo2`", "all", "The backends and numbers of ranks of the parity tests"
    ),
    "FSDP_C_PARITY_SEED": Variable("a number", "0", "Seed of the settings"),
    "FSDP_C_PARITY_WHOLE": Variable(
        NUMBER_SWITCH,
        "off",
        "The basic grid on two and four ranks, all scripts, and the full matrix of "
        "`test_checkpoint_resharding.py`",
    ),
    "FSDP_C_PATCH_SWEEP": Variable(
        "`single`", "groups", "`test_patch_sweep.py` wraps each function alone"
    ),
    "FSDP_C_PROGRAMS": Variable("a number", "40", "Random programs of the parity tests"),
    "FSDP_C_PROGRAMS_SEED": Variable("a number", "0", "Seed of the first program"),
    "FSDP_C_SIM_KERNELS": INTERNAL,
    "FSDP_C_SIM_TRACE": Variable(
        "a file", "not set", "C tests: the order of all calls that may fail"
    ),
    "FSDP_C_TEST_CLIENTS": Variable(
        NUMBER_SWITCH, "off", "Runs the jobs of libraries (`make test-clients`)"
    ),
    "FSDP_C_TORCH_OUTCOMES": Variable(
        "a folder", "not set", "Stores torch's results for the next run"
    ),
}
"""Variables of tests and benchmarks only."""

# Files that read the variables of each group.
RUN_SOURCES = (
    "fsdp_c/**/*.py",
    "fsdp_c_*/*.py",
    *(f"csrc/**/*.{suffix}" for suffix in ("c", "cpp")),
)
BUILD_SOURCES = ("*.py", "build_support/*.py", "CMakeLists.txt")
TEST_SOURCES = ("tests/**/*.py", "tests/**/*.c", "benchmarks/*.py")

NAME = r"FSDP_C(?:_[A-Z0-9]+)*"
READ = re.compile(rf"(?:\(|= |environ\[)[\"']({NAME})[\"'](?!:)|\$ENV\{{({NAME})\}}")
"""An argument, a constant or an index; not a key of a dict, which may be a variable of CMake."""


def find_names(patterns: tuple[str, ...]) -> set[str]:
    """Returns the names of variables that files read."""
    names = set()
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            matches = READ.finditer(path.read_text(errors="replace"))
            names.update(match[1] or match[2] for match in matches)
    return names


def find_mistakes() -> Iterator[str]:
    """Yields a sentence for each variable without a description, and for each stale description."""
    run = find_names(RUN_SOURCES)
    build = find_names(BUILD_SOURCES) - run
    tests = find_names(TEST_SOURCES) - run - build
    for title, found, described in (
        ("RUN", run, RUN), ("BUILD", build, BUILD), ("TESTS", tests, TESTS)
    ):  # fmt: skip
        yield from (
            f"{name} has no description in {title}" for name in sorted(found - set(described))
        )
        yield from (f"{name} of {title} is not read" for name in sorted(set(described) - found))


def format_tables() -> str:
    """Returns the tables in Markdown."""
    lines = []
    for title, variables in (
        ("In a job", RUN),
        ("In a build", BUILD),
        ("In tests and benchmarks", TESTS),
    ):
        lines += [
            f"## {title}",
            "",
            "| variable | values | default | effect |",
            "| --- | --- | --- | --- |",
        ]
        for name, (values, default, effect) in sorted(variables.items()):
            lines.append(f"| `{name}` | {values} | {default} | {effect} |")
        lines.append("")
    return "\n".join(lines)


def insert_tables(text: str) -> str:
    """Returns the page's text with current tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{format_tables()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Updates the tables of environment variables.")
    parser.add_argument("--check", action="store_true", help="only check the page")
    check = parser.parse_args().check
    mistakes = list(find_mistakes())
    text = PAGE.read_text()
    if check:
        if insert_tables(text) != text:
            mistakes.append(f"{PAGE.name} is out of date: run python docs/configuration_table.py")
    else:
        PAGE.write_text(insert_tables(text))
    print("\n".join(mistakes), end="\n" if mistakes else "")
    return int(bool(mistakes))


if __name__ == "__main__":
    sys.exit(main())
