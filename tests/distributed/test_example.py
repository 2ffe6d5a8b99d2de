"""The training example on two gloo ranks, in a small configuration.

One run and the interrupted runs use torchrun, as users do, and one uses plain python. All other
runs use forked ranks. Only the interrupted runs start new interpreters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import forked_python
import pytest
from launch import RanksFailed, run_ranks

pytestmark = pytest.mark.xdist_group("example")  # the tests share launches
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# With faulthandler, a rank that dies by a signal prints its stacks.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
}
STEPS = 6
# Dropout makes a resumed run depend on the random state. The uneven width gives padded shards.
TINY = (
    f"--device cpu --steps {STEPS} --save-every 3 --validate-every 3 --batch 2 --layers 2 "
    "--width 30 --heads 2 --context 32 --text-bytes 300000 --sample-bytes 8 --dropout 0.1 "
    "--lr 0.01 --compare 1"
).split()
PRECISIONS = {"fp32": [], "bf16": ["--bf16"]}


@dataclass
class RunResult:
    """Result of a run, as of ``subprocess.run``. ``stderr`` of forked ranks that fail includes
    stdout."""

    returncode: int
    stdout: str
    stderr: str


def launch(*arguments: object, ranks: int = 2, by_command: bool = False) -> RunResult:
    """Runs the example to its end in forked ranks.

    ``by_command``: by the command of users, which is torchrun, or plain python on one rank.
    """
    words = [*TINY, *map(str, arguments)]
    if by_command:
        prefix = TORCHRUN if ranks == 2 else []
        command = [forked_python.make_program(), *prefix, str(SCRIPT), *words]
        result = subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
        )
        return RunResult(result.returncode, result.stdout, result.stderr)
    try:
        texts = run_ranks(SCRIPT, ranks, words, timeout=240)
    except RanksFailed as failed:
        # A rank that succeeded has 0, and one that was still running has None.
        returncode = next((report.returncode for report in failed.reports if report.returncode), 1)
        output = "".join(report.output for report in failed.reports)
        return RunResult(returncode, output, output)
    return RunResult(0, texts[0], "")


def rank_errors(result: RunResult) -> str:
    """Returns the error stream without the traceback that torchrun appends."""
    return result.stderr.partition("\nTraceback (most recent call last)")[0]


def losses(out: Path) -> dict[str, Any]:
    """Returns the losses of a finished run: hexadecimal floats and a digest of the weights."""
    return json.loads((out / "losses.json").read_text())


class Runs:
    """Uninterrupted runs by implementation and precision, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[Path, str] = {}

    def get(self, impl: str, precision: str) -> Path:
        out = self.folder / f"{impl}-{precision}"
        if out not in self.printed:
            words = ("--impl", impl, "--out", out, *PRECISIONS[precision])
            result = launch(*words, by_command=(impl, precision) == ("fsdp_c", "fp32"))
            assert result.returncode == 0, rank_errors(result)
            self.printed[out] = result.stdout
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_example_losses_match_torch(runs: Runs, precision: str) -> None:
    by_fsdp_c, by_torch = (losses(runs.get(impl, precision)) for impl in ("fsdp_c", "torch"))
    assert len(by_fsdp_c["train"]) == STEPS
    assert list(by_fsdp_c["validation"]) == ["3", "6"]
    assert by_fsdp_c == by_torch


def test_example_losses_differ_between_precisions(runs: Runs) -> None:
    """If they were equal, test_example_losses_match_torch would pass with any arithmetic."""
    fp32, bf16 = (losses(runs.get("torch", precision)) for precision in PRECISIONS)
    for key in ("train", "gradient_norm", "validation", "weights_sha256"):
        assert fp32[key] != bf16[key], key


def test_example_training_lowers_the_loss(runs: Runs) -> None:
    written = losses(runs.get("fsdp_c", "fp32"))
    first, *_, last = map(float.fromhex, written["train"])
    assert 5.4 < first < 5.7  # an untrained model predicts 256 bytes uniformly: ln 256 = 5.545
    assert last < first - 0.3


@pytest.mark.parametrize(
    ("writer", "reader", "precision"),
    [
        ("torch", "torch", "bf16"),
        ("fsdp_c", "fsdp_c", "fp32"),
        ("fsdp_c", "fsdp_c", "bf16"),
        ("torch", "fsdp_c", "bf16"),
    ],
)
def test_resumed_example_run_equals_an_uninterrupted_one(
    runs: Runs, writer: str, reader: str, precision: str, tmp_path: Path
) -> None:
    uninterrupted = runs.get(writer, precision)
    # The checkpoint was saved after a validation, whose forward leaves the root unsharded.
    halfway = uninterrupted / "checkpoints" / "step_000003"
    more = PRECISIONS[precision]
    result = launch("--impl", reader, "--out", tmp_path, "--resume", halfway, *more)
    assert result.returncode == 0, rank_errors(result)
    assert "after step 3." in result.stdout
    assert losses(tmp_path) == losses(uninterrupted)


def test_example_prints_and_writes_its_results(runs: Runs) -> None:
    out = runs.get("fsdp_c", "fp32")
    for heading in ("Sample:", "Final loss", "tokens/s", "Peak memory"):
        assert heading in runs.printed[out]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["impl"] == "fsdp_c"
    assert summary["tokens_per_second"] > 0
    assert len(summary["peak_memory_mib"]) == 2 and min(summary["peak_memory_mib"]) > 50
    assert summary["final_loss"] == float.fromhex(losses(out)["train"][-1])
    for picture in ("curve.png", "steps.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG\r\n")
    assert "of communication is hidden" in runs.printed[out]


def test_example_without_torchrun_resumes_the_newest_complete_checkpoint(
    tmp_path: Path,
) -> None:
    first = launch("--impl", "torch", "--out", tmp_path, ranks=1, by_command=True)
    assert first.returncode == 0, rank_errors(first)
    assert "on 1 x cpu" in first.stdout
    uninterrupted = losses(tmp_path)
    (tmp_path / "checkpoints" / "step_000006" / "run.json").unlink()  # as if cut off while saving
    words = [*TINY, "--impl", "torch", "--out", str(tmp_path), "--resume"]
    (tmp_path / "losses.json").unlink()
    second = fork_server.run_script(SCRIPT, *words, env=ENVIRONMENT)
    assert second.returncode == 0, second.stderr
    assert "after step 3." in second.stdout
    assert losses(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "no checkpoint to resume from in"),
        (["--resume", "nowhere"], "nowhere is not a checkpoint"),
        (["--impl", "fairscale"], "invalid choice: 'fairscale'"),
        (["--width", "31"], "--width 31 is not a multiple of --heads 2"),
        (["--steps", "0"], "0 is not above zero"),
        (["--text-bytes", "10"], "too little Python source below"),
    ],
)
def test_example_with_invalid_arguments_prints_one_error_line(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = launch("--impl", "torch", "--out", tmp_path, *arguments, ranks=1)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("train_gpt: error: ")
    assert result.stderr.count("\n") == 1


def test_example_keeps_the_checkpoints_of_an_earlier_run(runs: Runs) -> None:
    out = runs.get("torch", "fp32")
    result = launch("--impl", "torch", "--out", out, ranks=1)
    assert result.returncode == 2
    assert f"{out} has checkpoints: pass --resume or another --out" in result.stderr
    assert (out / "checkpoints" / "step_000006" / "run.json").is_file()


def test_example_resumed_with_other_settings_reports_the_differences(
    runs: Runs, tmp_path: Path
) -> None:
    halfway = runs.get("torch", "fp32") / "checkpoints" / "step_000003"
    result = launch("--impl", "torch", "--out", tmp_path, "--resume", halfway, "--bf16", ranks=1)
    assert result.returncode == 2
    assert (
        "belongs to a different run: bf16 was False, now True; ranks was 2, now 1" in result.stderr
    )


@pytest.mark.parametrize("impl", ["fsdp_c", "torch"])
def test_interrupted_example_ends_both_ranks_with_a_short_message(
    impl: str, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        *TORCHRUN,
        str(SCRIPT),
        *TINY,
        "--impl",
        impl,
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--save-every", "100000"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as in a terminal
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Training with")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert "Interrupted." in out
    assert process.returncode != 0
    # torchrun prints a traceback for the signal; the script must not add one.
    assert "train_gpt.py" not in err
