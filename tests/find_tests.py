"""The tests of a file: ``make test-for FILE=csrc/core/gather.c`` runs them.

    python tests/find_tests.py FILE...        prints the commands
    python tests/find_tests.py --run FILE...  runs them, and stops at the first that fails

A module is tested by the test files that are named like it: ``gather.c`` by ``test_gather.c`` and
``test_gather_extended.c``. ``TESTS_OF`` lists the others. Changes of a worker or of a file of
tests/harness are tested by the test files that import it, directly or through other workers.
``tests/unit/test_find_tests.py`` checks that each module has tests.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CLIP = ("test_clip", "test_behavior_clipping")
EXPLAIN = ("test_plan", "test_explain", "test_dry_run", "test_step_advice")
DRY_RUN = ("test_dry_run", "test_dry_run_boundary", "test_dry_run_model")
KERNELS = ("test_kernels", "test_casts", "test_find_cuda")
SHARED_MEMORY = ("test_shared_memory", "test_shm_collectives")
STEPS = ("test_behavior_training", "test_behavior_events", "test_behavior_groups")
STALL = ("test_stall", "test_stall_many_ranks", "test_stalled_ranks", "test_failure_trials")
GUARD = ("test_guard", "test_patch_sweep")

TESTS_OF = {
    # csrc/core and csrc/python
    "attributes": ("test_private_api", "test_private_surface"),
    "callbacks": ("test_gradient_callbacks", "test_private_api", *DRY_RUN),
    "check_initialized": ("test_uninitialized_objects",),
    "check_thread": ("test_two_threads", "test_reentry"),
    "comm_context": ("test_private_api", "test_behavior_groups"),
    "freed_modules": ("test_reference_counts", "test_lifetime"),
    "deferred_decref": ("test_fuzz", "test_reentry"),
    "dynamo": ("test_torch_tools", "test_tracing"),
    "errors": ("test_mistakes", "test_bad_input"),
    "extension": ("test_behavior_extensions", "test_subclass_parameters"),
    "group_attributes": ("test_private_api", "test_private_surface"),
    "recorder": STALL,
    "sequence": ("test_divergence",),
    "hook": ("test_private_surface", "test_guard"),
    "iteration_context": ("test_private_api", "test_behavior_groups"),
    "local_lists": ("test_launches", "test_optim"),
    "module": ("test_bind", "test_fuzz", *DRY_RUN),
    "objects": ("test_uninitialized_objects", "test_fuzz"),
    "param": ("test_patched_params", "test_private_surface"),
    "param_group": ("test_private_api", "test_private_surface", "test_behavior_groups"),
    "shard": ("test_replaced_shards", "test_behavior_state"),
    "slots": ("test_replaced_shards", "test_behavior_state"),
    "state": ("test_train", "test_reset", "test_reentry", "test_private_surface", *STEPS),
    "step": ("test_version_counters", *DRY_RUN),
    "transitions": (*GUARD, *STEPS),
    "tree": ("test_behavior_training",),
    "version_cache": GUARD,
    # csrc/dry_run
    "boundary": DRY_RUN,
    "boundary_device": DRY_RUN,
    "description": DRY_RUN,
    "model": DRY_RUN,
    "parse": DRY_RUN,
    "record": DRY_RUN,
    "unit": DRY_RUN,
    # csrc/bridge, csrc/transport
    "allocator": ("test_process_group_allocator", "test_symmetric_memory"),
    "autograd": ("test_behavior_backwards", "test_freed_models", "test_double_backward"),
    "bridge": ("test_sweep", "test_torch_tools"),
    "collective": ("test_shm_collectives", "test_process_groups"),
    "context_removal": SHARED_MEMORY,
    "device": ("test_source_rules", "test_reduce"),
    "error": ("test_sweep", "test_bad_input"),
    "exchange": SHARED_MEMORY,
    "gil": ("test_cuda_figures", "test_threaded_ranks", "test_train"),
    "hash": ("test_agreement", "test_label"),
    "group_negotiation": (*SHARED_MEMORY, "test_negotiation"),
    "memory": ("test_process_group_allocator", "test_pool"),
    "negotiation": (*SHARED_MEMORY, "test_model"),
    "op_tag": SHARED_MEMORY,
    "pg": ("test_process_groups", "test_shm_collectives"),
    "progress": ("test_shared_memory", "test_lifetime"),
    "pyobject": ("test_torch_tools", "test_reentry"),
    "shm": ("test_shared_memory",),
    "shm_all_reduce": (*SHARED_MEMORY, "test_replicate"),
    "shm_backend": SHARED_MEMORY,
    "shm_collective": SHARED_MEMORY,
    "shm_collective_state": SHARED_MEMORY,
    "shm_methods": SHARED_MEMORY,
    "shm_tag": SHARED_MEMORY,
    "op_label": ("test_shm_collective", "test_divergence"),
    "shm_transport": (*SHARED_MEMORY, "test_model"),
    "shm_work": SHARED_MEMORY,
    "stream": ("test_scenarios", "test_seeded_bugs"),
    "table": SHARED_MEMORY,
    "tensor": ("test_torch_tools", "test_version_counters"),
    "types": ("test_source_rules", "test_c_layers"),
    "wait": ("test_keyboard_interrupt", "test_lifetime"),
    "group_users": ("test_negotiation",),
    "capabilities": ("test_negotiation", "test_shared_memory"),
    "plans": ("test_negotiation", "test_divergence"),
    # csrc/kernels
    "backends": ("test_kernels", "test_jit"),
    "batch": KERNELS,
    "cast": KERNELS,
    "cast_cpu": KERNELS,
    "index": KERNELS,
    "kernels_cpu": KERNELS,
    "kernels_cuda": KERNELS,
    "kernels_jit": ("test_jit", "test_find_cuda"),
    "kernels_none": ("test_find_cuda",),
    "launcher": KERNELS,
    "lines": KERNELS,
    "norm": CLIP,
    "norm_cpu": CLIP,
    "checksum_cpu": ("test_checksum",),
    "pool_cpu": ("test_pool", "test_pool_pages"),
    "ring_cpu": ("test_ring",),
    "rtc": ("test_jit", "test_find_cuda"),
    # fsdp_c
    "auto_shard": ("test_wrap", "test_wrap_policy"),
    "budget": ("test_wrap_policy", "test_wrap"),
    "checks": ("test_wrap", "test_bad_input"),
    "collectives": ("test_process_groups", "test_subclass_parameters"),
    "destinations": ("test_load",),
    "grad_norm": ("test_clip", "test_behavior_clipping"),
    "lint_params": ("test_configuration_warnings",),
    "matching": ("test_load", "test_load_extra_state"),
    "model_checks": ("test_explain", "test_configuration_warnings"),
    "module_methods": ("test_bad_input", "test_torch215_methods", "test_torch_tools"),
    "module_tree": ("test_wrap_policy", "test_wrap"),
    "missing_members": ("test_torch_tools", "test_behavior_training"),
    "plan_hash": ("test_divergence",),
    "plan_store": ("test_model_comparison", "test_cuda_divergence"),
    "param_shard": ("test_param_template", "test_dtensor_construction"),
    "redirect": ("test_install", "test_dropin"),
    "replaced_shard": ("test_replaced_shards",),
    "roots": ("test_stall", "test_stall_monitor"),
    "typed_params": ("test_behavior_spmd_types", "test_param_template"),
    "weak_modules": ("test_reference_counts", "test_lifetime"),
    "unit_order": ("test_wrap", "test_wrap_policy"),
    "__init__": ("test_package_layers", "test_typing"),
    "__main__": ("test_install", "test_check"),
    "abi": ("test_check",),
    "byte_format": EXPLAIN,
    "advice": EXPLAIN,
    "bindings": ("test_bind",),
    "build_info": ("test_check", "test_wheel"),
    "dtensor_specs": ("test_dtensor_construction", "test_param_template"),
    "ema": ("test_contexts_and_ema",),
    "env": ("test_install", "test_shm_collectives"),
    "extensions": ("test_behavior_extensions", "test_subclass_parameters"),
    "fake_step": EXPLAIN,
    "fallback_transport": SHARED_MEMORY,
    "forward_hooks": ("test_private_surface", "test_reference_counts"),
    "fsdp_units": ("test_names", "test_contexts_and_ema"),
    "full_params": ("test_contexts_and_ema",),
    "full_tensors": ("test_full_params", "test_contexts_and_ema"),
    "fully_shard": ("test_bad_input", "test_mistakes", *STEPS),
    "generate": ("test_contexts_and_ema",),
    "hints": ("test_mistakes",),
    "init": ("test_bad_input", "test_undo", "test_keyboard_interrupt"),
    "lint": ("test_configuration_warnings",),
    "memory_plot": EXPLAIN,
    "meshes": ("test_process_groups", "test_undo"),
    "no_sync": ("test_contexts_and_ema",),
    "nvrtc": ("test_jit", "test_find_cuda"),
    "object_collectives": ("test_load", "test_contexts_and_ema_on_ranks"),
    "optimizer_memory": EXPLAIN,
    "optimizer_steps": ("test_version_counters", "test_optim"),
    "patches": ("test_undo", "test_install"),
    "compare_collectives": ("test_compare_observer",),
    "compare_digests": ("test_compare_observer",),
    "compare_report": ("test_compare",),
    "compare_results": ("test_compare",),
    "compare_runs": ("test_compare",),
    "plotting": ("test_timeline", "test_explain"),
    "policies": ("test_wrap_policy", "test_wrap"),
    "report": EXPLAIN,
    "script_loader": ("test_dropin", "test_compare"),
    "self_test": ("test_check",),
    "serialization": ("test_undo", "test_mistakes"),
    "shutdown": ("test_interpreter_exit",),
    "source": ("test_load", "test_load_extra_state", "test_safetensors"),
    "timeline_plot": ("test_timeline",),
    "torch_clipping": ("test_behavior_clipping", "test_clip"),
    "torch_releases": ("test_torch_tools", "test_behavior_training"),
    "trace_spans": ("test_timeline", "test_trace"),
    "transaction": ("test_undo", "test_keyboard_interrupt"),
    "transport": (*SHARED_MEMORY, "test_buckets"),
    "step_cost": EXPLAIN,
    "step_memory": EXPLAIN,
    "unit_bytes": EXPLAIN,
    "unit_sizes": ("test_wrap_policy", "test_wrap"),
    "version": ("test_check", "test_package_layers"),
    "records": (*STALL, "test_stall_monitor"),
    "stall_monitor": STALL,
    "stall_report": (*STALL, "test_stall_monitor"),
    "departures": ("test_divergence",),
    "other_groups": ("test_agreement", "test_replica_divergence"),
    "comparison_requests": ("test_divergence", "test_cuda_divergence"),
    "label_comparison": ("test_cuda_divergence", "test_cuda_checksums"),
    "zero_grad": ("test_behavior_zero_grad",),
}
"""Stem of a module -> stems of the test files that test it, where the names differ."""

SUBJECTS = (
    *("csrc/core/*.[ch]", "csrc/python/*.[ch]", "csrc/transport/*.[ch]", "csrc/kernels/*.*"),
    *("csrc/dry_run/*.[ch]", "csrc/bridge/*.*"),
    *("fsdp_c/**/*.py", "fsdp_c_autoload/*.py"),
)
"""Files that are modules. A module is named by its stem, whatever its folder."""


def modules() -> set[str]:
    """Returns the stems of all modules."""
    return {path.stem for pattern in SUBJECTS for path in ROOT.glob(pattern)}


@functools.cache
def all_test_files() -> dict[str, list[Path]]:
    """Maps the stem of each test file to its paths. A C test and a Python test may share a stem."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*")):
        if path.suffix in (".py", ".c"):
            found.setdefault(path.stem, []).append(path)
    return found


def tests_named_like(stem: str) -> list[str]:
    """Returns the stems of test files that are named like a module."""
    return [name for name in all_test_files() if re.fullmatch(rf"test_{stem}(?:_\w+)?", name)]


def tests_of_module(stem: str) -> list[Path]:
    """Returns the test files of a module, first those that are named like it."""
    names = (*tests_named_like(stem), *TESTS_OF.get(stem, ()))
    return [path for name in names for path in all_test_files().get(name, ())]


@functools.cache
def importers() -> dict[str, set[Path]]:
    """Maps the stem of each Python file of tests/ to the files of tests/ that import it."""
    found: dict[str, set[Path]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M):
            found.setdefault(name, set()).add(path)
    return found


def tests_that_import(path: Path) -> list[Path]:
    """Returns the test files that import a worker or a helper, directly or through others."""
    visited: set[Path] = set()
    waiting = [path]
    while waiting:
        for importer in importers().get(waiting.pop().stem, set()) - visited:
            visited.add(importer)
            waiting.append(importer)
    return sorted(found for found in visited if found.name.startswith("test_"))


def tests_for(path: Path) -> list[Path]:
    """Returns the test files of any source file."""
    path = path.resolve()
    if not path.is_relative_to(ROOT / "tests"):
        return tests_of_module(path.stem)
    if path.name.startswith("test_"):
        return [path]
    if path.suffix == ".py":
        return tests_that_import(path)
    if path.suffix == ".pml":
        return all_test_files()["test_model"]
    return all_test_files()["test_sim"] if path.name.startswith("sim") else []


def commands(paths: list[Path]) -> Iterator[list[str]]:
    """Yields the commands that run test files: one for the C tests, one for the Python tests."""
    tests = list(dict.fromkeys(test for path in paths for test in tests_for(path)))
    in_c = [test.stem for test in tests if test.suffix == ".c"]
    in_python = [str(test.relative_to(ROOT)) for test in tests if test.suffix == ".py"]
    if in_c:
        yield ["make", "-C", "tests/c", f"TESTS={' '.join(in_c)}"]
    if in_python:
        yield [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *in_python]


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints or runs the tests of source files.")
    parser.add_argument("--run", action="store_true", help="run the commands")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    for path in options.files:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    found = list(commands(options.files))
    if not found:
        parser.error("no test is named like these files, and tests/find_tests.py lists none")
    for command in found:
        print(shlex.join(command), flush=True)
        if options.run and subprocess.run(command, cwd=ROOT).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
