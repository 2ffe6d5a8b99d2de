"""The visit itself: visit.sh on the simulated accelerator, and what becomes of broken steps.

What needs CUDA is skipped there by name; the rest runs, so that it is in order when a GPU is.
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

import pytest

GPU = Path(__file__).resolve().parent
WORKERS = GPU / "workers"
STEPS = "facts build kernels jit memcheck initcheck races parity graphs bandwidth host gpt traces"
ON_CUDA_ONLY = {"jit", "memcheck", "initcheck", "graphs"}
LINE = re.compile(r"(PASS|FAIL|SKIP) (\w+) +([\d.]+) s  (.+)")

pytestmark = pytest.mark.timeout(900)


@dataclass
class Visit:
    """What a visit left behind."""

    status: int
    lines: dict[str, tuple[str, str]]
    """By step: the verdict, and what it said."""
    end: str
    results: dict[str, Any]
    log: str


def visit(out: Path, only: str = STEPS, **environment: str) -> Visit:
    env = os.environ | {"OUT": str(out), "PYTHON": sys.executable} | environment
    command = [str(GPU / "visit.sh"), "--device", "sim", "--only", only]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert done.stderr == "", (out / "log.txt").read_text()
    *lines, end = (out / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines() == [*lines, end]
    found = [LINE.fullmatch(line) for line in lines]
    return Visit(
        done.returncode,
        {match[2]: (match[1], match[4]) for match in found if match is not None},
        end,
        json.loads((out / "results.json").read_text()),
        (out / "log.txt").read_text(),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Visit:
    simulated = GPU.parent / "accelerator/workers/simulated_build.py"
    subprocess.run([sys.executable, str(simulated)], check=True)  # minutes, where it is not there
    return visit(tmp_path_factory.mktemp("visit"))


@pytest.mark.xdist_group("visit")
def test_all_that_can_run_without_cuda_passes(whole: Visit) -> None:
    verdicts = {step: verdict for step, (verdict, _) in whole.lines.items()}
    expected = {step: "SKIP" if step in ON_CUDA_ONLY else "PASS" for step in STEPS.split()}
    assert verdicts == expected, whole.log
    assert whole.status == 0
    assert whole.end.startswith("9 PASS, 0 FAIL, 4 SKIP in ")


@pytest.mark.xdist_group("visit")
def test_what_is_skipped_says_why(whole: Visit) -> None:
    reasons = {said for verdict, said in whole.lines.values() if verdict == "SKIP"}
    assert reasons == {"needs CUDA"}


@pytest.mark.xdist_group("visit")
def test_all_numbers_are_in_one_file(whole: Visit) -> None:
    assert list(whole.results) == STEPS.split()
    races = whole.results["races"]
    assert len(races["digests"]) > 25
    # A race that is there is seen: in stock, in ours, and where ours leaves out a wait.
    assert all(control["shown"] for control in races["controls"].values())
    assert races["controls"]["waits of ours"]["shown"] >= 4
    assert whole.results["bandwidth"]["kernels"]
    assert set(whole.results["gpt"]["ms"]) == {"torch", "fsdp_c"}


@pytest.mark.parametrize(
    ("breakage", "said"),
    [
        ("kernels=fail", "exit status 3: broken on purpose"),
        ("kernels=hang", "stopped after 4 s; last line: it printed nothing"),
    ],
)
def test_a_broken_step_is_reported_and_the_next_one_runs(
    tmp_path: Path, breakage: str, said: str
) -> None:
    only = "kernels memcheck"
    found = visit(tmp_path, only, VISIT_BREAK=breakage, VISIT_LIMIT="4")
    assert found.lines == {"kernels": ("FAIL", said), "memcheck": ("SKIP", "needs CUDA")}
    assert found.end.endswith("; failed: kernels")
    assert found.status == 1


def test_a_visit_ends_in_time(tmp_path: Path) -> None:
    found = visit(tmp_path, "kernels memcheck", VISIT_BREAK="kernels=hang", VISIT_SECONDS="5")
    assert found.lines["kernels"][0] == "FAIL"
    assert found.lines["memcheck"] == ("FAIL", "no time was left for it")


def test_a_step_that_ends_without_a_word_has_failed(tmp_path: Path) -> None:
    """An exit in the middle, with status 0."""
    env = os.environ | {"OUT": str(tmp_path), "VISIT_WORK": str(tmp_path)}
    command = [sys.executable, str(WORKERS / "summary.py"), "quiet", "0", "10", "0"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.startswith("FAIL quiet")


def test_kernels_that_are_wrong_are_found(tmp_path: Path) -> None:
    """The comparison bites: a byte that is not written, and one too many."""
    script = textwrap.dedent(
        """
        import kernel_library as library, check_kernels, ctypes
        right = library.Backend.unpack
        def short(self, rows, row_bytes, world, columns, stream=0):
            if self is fake:
                for column in columns:
                    column.bytes = max(column.bytes - 1, 0)
            right(self, rows, row_bytes, world, columns, stream)
        library.Backend.unpack = short
        fake = library.cuda()
        library.cuda = lambda: fake
        print("\\n".join(check_kernels.differences(8, bare=False)))
        """
    )
    env = os.environ | {"VISIT_DEVICE": "sim", "PYTHONPATH": str(WORKERS)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "unpack, seed " in done.stdout, done.stderr
    assert "pack, seed " not in re.sub("unpack", "", done.stdout)


@pytest.mark.parametrize(("wrong", "said"), [(False, []), (True, ["pack", "mixed", "uneven"])])
def test_kernels_of_nvrtc_are_compared(tmp_path: Path, wrong: bool, said: list[str]) -> None:
    """check_jit.py on a driver that runs their source on this processor, or leaves out a part."""
    folder = GPU.parent / "c/fake_cuda"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command += [f"-I{folder}", f"-I{GPU.parents[1] / 'csrc'}", str(folder / "driver.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "libcuda.so")], check=True)
    script = textwrap.dedent(
        f"""
        import ctypes
        import check_jit, check_kernels, kernel_library, loop_group, variants
        from fsdp_c import jit
        from outcome import start_device

        driver = ctypes.CDLL({str(tmp_path / "libcuda.so")!r})
        driver.skew({int(wrong)})
        kernels, address = kernel_library.jit(*jit.load(driver, b"\x7fELF of no machine"))
        check_jit.TRAININGS = ("mixed", "uneven")
        device = start_device()
        loop_group.join(variants.WORLD, device)
        driver.take_launches()
        found = check_kernels.differences(4, False, kernels)[:1]
        found += check_jit.trained_apart(device, address)
        assert driver.take_launches() > 50
        print("FOUND", *found, sep="\\n")
        """
    )
    folders = ("gpu", "parity")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env = os.environ | {"VISIT_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    lines = done.stdout.partition("FOUND\n")[2].splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == len(said), lines
    assert all(word in line for word, line in zip(said, lines))


def test_a_graph_that_does_not_run_is_found() -> None:
    """graphs.py, with graphs that run their step again, or do not, in the place of CUDA's."""
    script = textwrap.dedent(
        """
        import contextlib, functools
        import graphs, loop_group, race, torch, variants
        from outcome import start_device

        step, last = graphs.step, []
        def noted(*arguments):
            last[:] = [functools.partial(step, *arguments)]
            step(*arguments)
        graphs.step = noted
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
        stage = race.make_stage("fsdp_c", device)
        for Graph.runs, name in ((True, "mixed"), (True, "hsdp"), (False, "mixed")):
            print(name, graphs.attempt(stage, graphs.JOBS[name]))
        """
    )
    folders = ("gpu", "accelerator", "parity")
    path = [str(GPU.parents[1]), *(str(GPU.parent / name / "workers") for name in folders)]
    env = os.environ | {"VISIT_DEVICE": "sim", "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["mixed equal", "hsdp equal", "mixed differs"], done.stderr


# ---- drop_waits.c --------------------------------------------------------------------------------

RUNTIME = """
int seen;
int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags) {
    (void)stream; (void)event; (void)flags;
    return ++seen;
}
"""
CALLER = """
int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags);
int wait_once(void) { return cudaStreamWaitEvent(0, 0, 0) + 0; }
"""


def _library(source: str, target: Path, *options: str) -> None:
    target.parent.mkdir(exist_ok=True)
    file = target.with_suffix(".c")
    file.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-O0", str(file), "-o", str(target), *options]
    subprocess.run(command, check=True)


def test_one_wait_of_the_extension_is_left_out(tmp_path: Path) -> None:
    """In front of a runtime with versioned symbols, loaded privately, as torch loads CUDA's."""
    runtime, versions = tmp_path / "libcudart.so.13", tmp_path / "versions"
    versions.write_text("libcudart.so.13 { global: *; };\n")
    _library(RUNTIME, runtime, f"-Wl,--version-script={versions}", "-Wl,-soname,libcudart.so.13")
    ours = tmp_path / "fsdp_c" / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    others = tmp_path / "torch" / "libc10_cuda.so"
    for one in (ours, others):
        _library(CALLER, one, str(runtime), f"-Wl,-rpath,{tmp_path}")
    script = textwrap.dedent(
        f"""
        import ctypes, sys
        sys.path.insert(0, {str(WORKERS)!r})
        ours, others = (ctypes.CDLL(path) for path in ({str(ours)!r}, {str(others)!r}))
        shim = ctypes.CDLL(None)
        shim.visit_drop(ctypes.c_long(1))
        print([ours.wait_once() for _ in range(3)], others.wait_once(), shim.visit_waits())
        """
    )
    shim = tmp_path / "drop_waits.so"
    _library((WORKERS / "drop_waits.c").read_text(), shim, "-ldl")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    # The second one is left out: the runtime has not seen it.
    assert done.stdout == "[1, 0, 2] 3 3\n", done.stderr
