"""gpu_check.sh on the simulated accelerator, and its reports of failing steps.

Steps that need CUDA are skipped and listed as such. All other steps run, so that they do not break
unnoticed on machines without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import forked_python
import pytest

GPU = Path(__file__).resolve().parent
WORKERS = GPU / "workers"
STEPS = (
    "facts build races parity kernels jit csan graphs scripts compiled memcheck initcheck "
    "bandwidth host gpt traces"
)
ON_CUDA_ONLY = {"jit", "memcheck", "initcheck", "csan", "graphs"}
LINE = re.compile(r"(PASS|FAIL|SKIP) (\w+) +([\d.]+) s  (.+)")

pytestmark = pytest.mark.timeout(900)


@dataclass
class CheckResult:
    """Files and exit status of one run of gpu_check.sh."""

    status: int
    lines: dict[str, tuple[str, str]]
    """Maps each step to its verdict and its summary line."""
    last_line: str
    results: dict[str, Any]
    log: str


def run_gpu_check(out: Path, only: str = STEPS, **environment: str) -> CheckResult:
    env = os.environ | {"OUT": str(out), "PYTHON": forked_python.make_program()} | environment
    command = [str(GPU / "gpu_check.sh"), "--device", "sim", "--only", only]
    completed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert completed.stderr == "", (out / "log.txt").read_text()
    *lines, last_line = (out / "summary.txt").read_text().splitlines()
    assert completed.stdout.splitlines() == [*lines, last_line]
    matches = [LINE.fullmatch(line) for line in lines]
    return CheckResult(
        completed.returncode,
        {match[2]: (match[1], match[4]) for match in matches if match is not None},
        last_line,
        json.loads((out / "results.json").read_text()),
        (out / "log.txt").read_text(),
    )


@pytest.fixture(scope="module")
def complete_check(tmp_path_factory: pytest.TempPathFactory) -> CheckResult:
    simulated = GPU.parent / "accelerator/workers/simulated_build.py"
    built = fork_server.run_script(simulated)  # takes minutes if not yet built
    assert built.returncode == 0, built.stderr
    return run_gpu_check(tmp_path_factory.mktemp("gpu_check"))


@pytest.mark.xdist_group("gpu_check")
def test_gpu_check_on_simulated_device_passes_all_steps_that_do_not_need_cuda(
    complete_check: CheckResult,
) -> None:
    verdicts = {step: verdict for step, (verdict, _) in complete_check.lines.items()}
    expected = {step: "SKIP" if step in ON_CUDA_ONLY else "PASS" for step in STEPS.split()}
    assert verdicts == expected, complete_check.log
    assert complete_check.status == 0
    assert complete_check.last_line.startswith("11 PASS, 0 FAIL, 5 SKIP in ")


@pytest.mark.xdist_group("gpu_check")
def test_gpu_check_skipped_steps_report_reason(complete_check: CheckResult) -> None:
    reasons = {line for verdict, line in complete_check.lines.values() if verdict == "SKIP"}
    assert reasons == {"needs CUDA"}


@pytest.mark.xdist_group("gpu_check")
def test_gpu_check_results_file_contains_measurements_of_all_steps(
    complete_check: CheckResult,
) -> None:
    assert list(complete_check.results) == STEPS.split()
    races = complete_check.results["races"]
    assert len(races["digests"]) > 25
    assert set(races["digests"]["hsdp_partial, C++ group"]) == {"torch", "fsdp_c"}
    # Each control removes a wait. The races step must detect it under torch and under fsdp_c.
    assert all(control["detected"] for control in races["controls"].values())
    assert races["controls"]["waits of fsdp_c"]["detected"] >= 4
    assert complete_check.results["bandwidth"]["kernels"]
    assert set(complete_check.results["gpt"]["sizes"]["small"]["ms"]) == {"torch", "fsdp_c"}
    (comparison,) = complete_check.results["scripts"]["comparisons"].values()
    assert comparison["verdict"] == "equal" and set(comparison["ms"]) == {"torch", "fsdp_c"}
    assert len(complete_check.results["compiled"]["results"]["fsdp_c"]["losses"]) == 2


@pytest.mark.xdist_group("gpu_check")
@pytest.mark.parametrize("native", [False, True])
def test_synchronous_collective_of_simulated_group_returns_no_work(native: bool) -> None:
    """NCCL returns a null Work, and both groups must do the same."""
    script = f"""if True:
        import loop_group, torch
        import torch._C._distributed_c10d as c10d
        import torch.distributed as dist
        from outcome import start_device

        device = start_device()
        loop_group.join(8, device, native={native})
        row = torch.ones(4, device=device)
        for asynchronous in (False, True):
            options = c10d.AllgatherOptions()
            options.asyncOp = asynchronous
            rows = torch.empty(32, device=device)
            work = dist.group.WORLD._allgather_base(rows, row, options)
            if work is not None:
                work.wait()
            print(work is None, rows.cpu().sum().item())
    """
    folders = ("gpu", "accelerator")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env = os.environ | {"GPU_CHECK_DEVICE": "sim", "PYTHONPATH": os.pathsep.join(path)}
    completed = fork_server.run_code(script, env)
    assert completed.stdout.splitlines() == ["True 32.0", "False 32.0"], completed.stderr


def test_simulated_groups_in_python_and_in_cpp_give_equal_bits(tmp_path: Path) -> None:
    env = os.environ | {"GPU_CHECK_DEVICE": "cpu"}
    folders = ("gpu", "parity")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env["PYTHONPATH"] = os.pathsep.join(path)
    digests = []
    for options in ([], ["--native"]):
        file = tmp_path / f"{len(options)}.json"
        arguments = ["fsdp_c", str(file), *options, "--variants", "mixed", "hsdp_partial"]
        completed = fork_server.run_script(WORKERS / "race.py", *arguments, env=env)
        assert completed.returncode == 0, completed.stderr
        digests.append(json.loads(file.read_text())["digests"])
    assert digests[0] == digests[1]
    assert len(digests[0]["mixed"]["0"]) == 16


@pytest.mark.parametrize(("calls", "failures"), [(0, ["fsdp_c: NCCL was not called"]), (9, [])])
def test_merge_results_of_races_reports_failure_only_without_nccl_calls(
    calls: int, failures: list[str]
) -> None:
    script = f"""if True:
        import json, races
        result = {{"digests": {{}}, "findings": {{}}, "inner": {calls}}}
        print(json.dumps(races.merge_results([("fsdp_c", result)])[1]))
    """
    path = [
        str(GPU.parents[1]),
        *(str(GPU.parent / name / "workers") for name in ("gpu", "accelerator")),
    ]
    env = os.environ | {"GPU_CHECK_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(path)}
    completed = fork_server.run_code(script, env)
    assert json.loads(completed.stdout) == failures, completed.stderr


@pytest.mark.parametrize(
    ("broken_step", "message"),
    [
        ("kernels=fail", "exit status 3: deliberate failure"),
        ("kernels=hang", "killed, or stopped after 4 s; last line: no output"),
    ],
)
def test_gpu_check_failing_step_is_reported_and_next_step_runs(
    tmp_path: Path, broken_step: str, message: str
) -> None:
    only = "kernels memcheck"
    result = run_gpu_check(tmp_path, only, GPU_CHECK_BREAK=broken_step, GPU_CHECK_LIMIT="4")
    assert result.lines == {"kernels": ("FAIL", message), "memcheck": ("SKIP", "needs CUDA")}
    assert result.last_line.endswith("; failed: kernels")
    assert result.status == 1


def test_gpu_check_hanging_step_ends_within_time_limit(tmp_path: Path) -> None:
    result = run_gpu_check(
        tmp_path, "kernels memcheck", GPU_CHECK_BREAK="kernels=hang", GPU_CHECK_SECONDS="5"
    )
    assert result.lines["kernels"][0] == "FAIL"
    assert result.lines["memcheck"] == ("FAIL", "no time left")


RECORDING_PYTHON = """#!/bin/bash
# Records when a step begins and ends. Only summary.py runs. The steps races and parity take long.
[ -n "${GPU_CHECK_STEP:-}" ] || exec "$REAL_PYTHON" "$@"
echo "begin $GPU_CHECK_STEP" >> "$RECORD"
case $GPU_CHECK_STEP in races | parity) sleep 2 ;; esac
echo "end $GPU_CHECK_STEP" >> "$RECORD"
"""


@pytest.mark.parametrize("device", ["cuda", "sim"])
def test_gpu_check_runs_memcheck_and_initcheck_after_races_and_parity(
    tmp_path: Path, device: str
) -> None:
    """On CUDA the steps races and parity run at the same time."""
    python, record = tmp_path / "python", tmp_path / "record"
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    env = os.environ | {"PYTHON": str(python), "REAL_PYTHON": sys.executable}
    env |= {"RECORD": str(record), "OUT": str(tmp_path)}
    subprocess.run([str(GPU / "gpu_check.sh"), "--device", device], env=env, capture_output=True)
    times = record.read_text().splitlines()
    assert len(times) == 2 * len(STEPS.split())
    first = min(times.index(f"begin {step}") for step in ("memcheck", "initcheck"))
    last = max(times.index(f"end {step}") for step in ("races", "parity"))
    assert last < first


def test_gpu_check_step_limits_fit_into_time_limit() -> None:
    """The steps of a function run one after another, and the functions at the same time."""
    script = (GPU / "gpu_check.sh").read_text()
    limits = re.findall(r"^ *(?:cuda_)?step (\w+) (\d+) ", script, re.M)
    assert sorted(name for name, _ in limits) == sorted(STEPS.split())
    functions = re.findall(r"^check_\w+\(\) \{\n(.*?)^\}", script, re.M | re.S)
    sums = [sum(map(int, re.findall(r"step \w+ (\d+) ", body))) for body in functions]
    assert len(sums) == 4
    assert sum(int(limit) for _, limit in limits) - sum(sums) + max(sums) <= 580


def test_gpu_check_bandwidth_goal_excludes_transfers_that_fit_into_cache() -> None:
    script = """if True:
        import bandwidth
        works = [bandwidth.Work("", size, print) for size in (20_000_000, 100_000_000)]
        print([bandwidth.is_below_goal(work, 0.7) for work in works])
        print([bandwidth.is_below_goal(work, 0.9) for work in works])
    """
    env = os.environ | {"GPU_CHECK_DEVICE": "cpu", "PYTHONPATH": str(WORKERS)}
    completed = fork_server.run_code(script, env)
    assert completed.stdout.splitlines() == ["[False, True]", "[False, False]"], completed.stderr


def test_scripts_step_omits_libraries_that_are_not_installed() -> None:
    script = """if True:
        import importlib.util
        import scripts
        for installed in ((), ("transformers",)):
            importlib.util.find_spec = lambda name: name if name in installed else None
            commands = scripts.make_scripts()
            print(sorted(commands))
            print(all("--device cuda" in " ".join(commands[name]) for name in scripts.EXAMPLES))
    """
    env = os.environ | {"GPU_CHECK_DEVICE": "cuda", "PYTHONPATH": str(WORKERS)}
    completed = fork_server.run_code(script, env)
    examples = ["lora.py", "train_gpt.py", "vision.py"]
    with_library = sorted([*examples, "finetune_hf.py", "transformers"])
    expected = [f"{examples}", "True", f"{with_library}", "True"]
    assert completed.stdout.splitlines() == expected, completed.stderr


def test_gpu_check_summary_of_step_without_result_reports_fail(tmp_path: Path) -> None:
    """A process that exits with status 0 before it writes its result counts as failed."""
    env = os.environ | {"OUT": str(tmp_path), "GPU_CHECK_WORK": str(tmp_path)}
    command = [sys.executable, str(WORKERS / "summary.py"), "quiet", "0", "10", "0"]
    completed = subprocess.run(command, env=env, capture_output=True, text=True)
    assert completed.stdout.startswith("FAIL quiet")


def test_check_kernels_reports_only_the_wrong_unpack() -> None:
    """The kernel of unpack writes one byte less per slot."""
    script = textwrap.dedent(
        """
        import kernel_library as library, check_kernels
        right = library.Backend.unpack
        def short(self, gathered, rank_bytes, world, slots, stream=0):
            if self is fake:
                for slot in slots:
                    slot.bytes = max(slot.bytes - 1, 0)
            right(self, gathered, rank_bytes, world, slots, stream)
        library.Backend.unpack = short
        fake = library.cuda()
        library.cuda = lambda: fake
        print("\\n".join(check_kernels.differences(8, bare=False)))
        """
    )
    env = os.environ | {"GPU_CHECK_DEVICE": "sim", "PYTHONPATH": str(WORKERS)}
    completed = fork_server.run_code(script, env)
    kinds = set(re.findall(r"^(\w+), seed ", completed.stdout, re.M))
    assert kinds == {"unpack"}, completed.stdout + completed.stderr


@pytest.mark.parametrize(("wrong", "messages"), [(False, []), (True, ["pack", "mixed", "uneven"])])
def test_check_kernels_and_check_jit_report_differences_only_if_driver_skips_work(
    tmp_path: Path, wrong: bool, messages: list[str]
) -> None:
    """Runs the comparisons of both scripts on a driver that executes the kernels on the CPU. With
    ``wrong=True`` the driver omits the last block of each launch."""
    folder = GPU.parent / "c/fake_cuda"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command += [f"-I{folder}", f"-I{GPU.parents[1] / 'csrc'}", str(folder / "driver.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "libcuda.so")], check=True)
    script = textwrap.dedent(
        f"""
        import ctypes
        import check_jit, check_kernels, kernel_library, loop_group, variants
        from fsdp_c._runtime import jit
        from outcome import start_device

        driver = ctypes.CDLL({str(tmp_path / "libcuda.so")!r})
        driver.omit_last_block({int(wrong)})
        kernels, address = kernel_library.jit(
            jit.load_kernels(driver, b"\x7fELF of no machine")
        )
        check_jit.TRAININGS = ("mixed", "uneven")
        device = start_device()
        loop_group.join(variants.WORLD, device)
        driver.take_launches()
        found = check_kernels.differences(4, False, kernels)[:1]
        found += check_jit.differing_trainings(device, address)
        assert driver.take_launches() > 50
        print("FOUND", *found, sep="\\n")
        """
    )
    folders = ("gpu", "parity")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env = os.environ | {"GPU_CHECK_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(path)}
    completed = fork_server.run_code(script, env)
    lines = completed.stdout.partition("FOUND\n")[2].splitlines()
    assert completed.returncode == 0, completed.stderr
    assert len(lines) == len(messages), lines
    assert all(word in line for word, line in zip(messages, lines))


def test_gpu_check_graphs_step_reports_replay_without_effect() -> None:
    """Runs graphs.py with a fake CUDA graph that reruns the captured step, or does nothing."""
    script = textwrap.dedent(
        """
        import contextlib, functools
        import graphs, loop_group, race, torch, variants
        from outcome import start_device

        step, last = graphs.step, []
        def recorded_step(*arguments):
            last[:] = [functools.partial(step, *arguments)]
            step(*arguments)
        graphs.step = recorded_step
        class Graph:
            def replay(self):
                if self.runs:
                    last[0]()
        torch.cuda.CUDAGraph = Graph
        torch.cuda.graph = lambda graph: contextlib.nullcontext()
        device = start_device()
        for name in ("Stream", "stream", "current_stream", "synchronize"):
            setattr(torch.cuda, name, getattr(torch.sim, name))
        loop_group.join(variants.WORLD, device)
        tools = race.make_tools("fsdp_c", device)
        for Graph.runs, name in ((True, "mixed"), (True, "hsdp"), (False, "mixed")):
            print(name, graphs.run_case(tools, graphs.CASES[name]))
        """
    )
    folders = ("gpu", "accelerator", "parity")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env = os.environ | {"GPU_CHECK_DEVICE": "sim", "PYTHONPATH": os.pathsep.join(path)}
    completed = fork_server.run_code(script, env)
    assert completed.stdout.splitlines() == ["mixed equal", "hsdp equal", "mixed differs"], (
        completed.stderr
    )


# ---- drop_waits.c --------------------------------------------------------------------------------

RUNTIME = """
int calls;
int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags) {
    (void)stream; (void)event; (void)flags;
    return ++calls;
}
"""
CALLER = """
int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags);
int wait_once(void) { return cudaStreamWaitEvent(0, 0, 0) + 0; }
"""


def _compile_library(source: str, target: Path, *options: str) -> None:
    target.parent.mkdir(exist_ok=True)
    file = target.with_suffix(".c")
    file.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-O0", str(file), "-o", str(target), *options]
    subprocess.run(command, check=True)


def test_drop_waits_skips_one_wait_of_extension(tmp_path: Path) -> None:
    """The shim precedes a runtime with versioned symbols, loaded with RTLD_LOCAL as torch does."""
    runtime, versions = tmp_path / "libcudart.so.13", tmp_path / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    _compile_library(
        RUNTIME, runtime, f"-Wl,--version-script={versions}", "-Wl,-soname,libcudart.so.13"
    )
    extension = tmp_path / "fsdp_c" / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    other_library = tmp_path / "torch" / "libc10_cuda.so"
    for library in (extension, other_library):
        _compile_library(CALLER, library, str(runtime), f"-Wl,-rpath,{tmp_path}")
    script = textwrap.dedent(
        f"""
        import ctypes, sys
        sys.path.insert(0, {str(WORKERS)!r})
        extension = ctypes.CDLL({str(extension)!r})
        other = ctypes.CDLL({str(other_library)!r})
        shim = ctypes.CDLL(None)
        shim.drop_wait(ctypes.c_long(1))
        print([extension.wait_once() for _ in range(3)], other.wait_once(), shim.count_waits())
        """
    )
    shim = tmp_path / "drop_waits.so"
    _compile_library((WORKERS / "drop_waits.c").read_text(), shim, "-ldl")
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    # The second wait is dropped: the runtime does not count it.
    assert completed.stdout == "[1, 0, 2] 3 3\n", completed.stderr
