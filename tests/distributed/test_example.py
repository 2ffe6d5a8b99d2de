"""The demo on two gloo ranks, in a tiny configuration: one run, and those that are interrupted, the
way a user runs it, by torchrun's module, and the others in forked ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import RanksFailed, run_ranks

pytestmark = pytest.mark.xdist_group("example")  # they share launches
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# A rank that dies of a signal leaves its stacks in the output.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
}
STEPS = 6
# Dropout makes a resumed run depend on the random state, the uneven width on padded shards.
TINY = (
    f"--device cpu --steps {STEPS} --save-every 3 --validate-every 3 --batch 2 --layers 2 "
    "--width 30 --heads 2 --context 32 --text-bytes 300000 --sample-bytes 8 --dropout 0.1 "
    "--lr 0.01 --compare 1"
).split()
PRECISIONS = {"fp32": [], "bf16": ["--bf16"]}


@dataclass
class Done:
    """How a run ended, as ``subprocess.run`` tells it; ``stderr`` may have all that was written."""

    returncode: int
    stdout: str
    stderr: str


def launch(*arguments: object, ranks: int = 2, fresh: bool = False) -> Done:
    """Run the example to its end in forked ranks; ``fresh``: by torchrun, or on one rank as plain
    python does, in interpreters that begin with it."""
    words = [*TINY, *map(str, arguments)]
    if fresh:
        prefix = TORCHRUN if ranks == 2 else [sys.executable]
        command = [*prefix, str(SCRIPT), *words]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
        return Done(done.returncode, done.stdout, done.stderr)
    try:
        texts = run_ranks(SCRIPT, ranks, words, timeout=240)
    except RanksFailed as failed:
        report = failed.reports[0]
        return Done(report.returncode or 0, report.output, report.output)
    return Done(0, texts[0], "")


def written_by_ranks(done: Done) -> str:
    """The error stream without torchrun's own traceback, which follows and says nothing."""
    return done.stderr.partition("\nTraceback (most recent call last)")[0]


def losses(out: Path) -> dict[str, object]:
    """Return a finished run's losses as written: hexadecimal floats and a digest of the weights."""
    return json.loads((out / "losses.json").read_text())


class Runs:
    """Uninterrupted runs by implementation and precision, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[Path, str] = {}

    def get(self, impl: str, precision: str) -> Path:
        out = self.folder / f"{impl}-{precision}"
        if out not in self.printed:
            fresh = (impl, precision) == ("fsdp_c", "fp32")
            done = launch("--impl", impl, "--out", out, *PRECISIONS[precision], fresh=fresh)
            assert done.returncode == 0, written_by_ranks(done)
            self.printed[out] = done.stdout
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_both_implementations_give_the_same_bits(runs: Runs, precision: str) -> None:
    ours, stock = (losses(runs.get(impl, precision)) for impl in ("fsdp_c", "torch"))
    assert len(ours["train"]) == STEPS
    assert list(ours["validation"]) == ["3", "6"]
    assert ours == stock


def test_losses_distinguish_what_differs(runs: Runs) -> None:
    """The control of the test above: where the arithmetic differs, the files differ."""
    fp32, bf16 = (losses(runs.get("torch", precision)) for precision in PRECISIONS)
    for key in ("train", "gradient_norm", "validation", "weights_sha256"):
        assert fp32[key] != bf16[key], key


def test_training_lowers_the_loss(runs: Runs) -> None:
    written = losses(runs.get("fsdp_c", "fp32"))
    first, *_, last = map(float.fromhex, written["train"])
    assert 5.4 < first < 5.7  # an untrained model spreads over 256 bytes: ln 256 = 5.545
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
def test_a_resumed_run_equals_an_uninterrupted_one(
    runs: Runs, writer: str, reader: str, precision: str, tmp_path: Path
) -> None:
    whole = runs.get(writer, precision)
    # Saved right after a validation, whose forward leaves the root module gathered.
    halfway = whole / "checkpoints" / "step_000003"
    more = PRECISIONS[precision]
    done = launch("--impl", reader, "--out", tmp_path, "--resume", halfway, *more)
    assert done.returncode == 0, written_by_ranks(done)
    assert "after step 3." in done.stdout
    assert losses(tmp_path) == losses(whole)


def test_a_run_prints_and_writes_its_results(runs: Runs) -> None:
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


def test_without_torchrun_it_is_one_process_and_resumes_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    first = launch("--impl", "torch", "--out", tmp_path, ranks=1, fresh=True)
    assert first.returncode == 0, written_by_ranks(first)
    assert "on 1 x cpu" in first.stdout
    uninterrupted = losses(tmp_path)
    (tmp_path / "checkpoints" / "step_000006" / "run.json").unlink()  # as if cut off while saving
    second = launch("--impl", "torch", "--out", tmp_path, "--resume", ranks=1, fresh=True)
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
        (["--text", "nowhere"], "no Python source to train on below nowhere"),
    ],
)
def test_a_bad_command_line_is_one_line_of_error(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = launch("--impl", "torch", "--out", tmp_path, *arguments, ranks=1)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("train_gpt: error: ")
    assert done.stderr.count("\n") == 1


def test_resuming_with_other_settings_names_the_differences(runs: Runs, tmp_path: Path) -> None:
    halfway = runs.get("torch", "fp32") / "checkpoints" / "step_000003"
    done = launch("--impl", "torch", "--out", tmp_path, "--resume", halfway, "--bf16", ranks=1)
    assert done.returncode == 2
    assert "belongs to a different run: bf16 was False, now True; ranks was 2, now 1" in done.stderr


@pytest.mark.parametrize("impl", ["fsdp_c", "torch"])
def test_ctrl_c_ends_both_ranks_with_a_short_message(impl: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, str(SCRIPT), *TINY, "--impl", impl, "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--steps", "100000", "--save-every", "100000"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a terminal gives it
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Training with")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert "Interrupted." in out
    assert process.returncode != 0
    # torchrun reports the signal with its own traceback; the script adds none.
    assert "train_gpt.py" not in err
