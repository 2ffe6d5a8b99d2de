"""The small examples run for three steps, with the same weights under torch and under fsdp_c."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from launch import RanksFailed, run_ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("finetune_hf", "hsdp_tp", "lora", "resume", "train_gpt", "vision")
MAX_LINES = 120
TINY = ["--device", "cpu", "--steps", "3"]
TEXT = ["--text-bytes", "300000", "--context", "16"]
GPT = [*TEXT, *["--layers", "2", "--width", "24", "--heads", "2"]]
CLOSING_LINES = ["Final loss", "Throughput", "Peak memory", "Time", "Weights"]


def launch(script: str, ranks: int, *arguments: object) -> str:
    """Runs an example in forked ranks and returns the output of rank 0."""
    words = [*TINY, *map(str, arguments)]
    output: str = run_ranks(EXAMPLES / f"{script}.py", ranks, words, timeout=240)[0]
    return output


def digest_of_weights(output: str) -> str:
    """Returns the digest in the closing lines, which must be complete and in order."""
    headings = "|".join(CLOSING_LINES)
    assert re.findall(rf"^({headings})  ", output, re.M) == CLOSING_LINES, output
    match = re.search(r"^Weights +sha256 (\w{16})$", output, re.M)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_script_has_at_most_120_lines(script: str) -> None:
    assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("script", SCRIPTS)
def test_example_script_help_lists_implementations(script: str) -> None:
    output = launch(script, 1, "--help")
    assert output.startswith(f"usage: {script}.py")
    assert "--impl {fsdp_c,torch}" in output


@pytest.mark.parametrize(
    ("script", "ranks", "arguments"),
    [
        ("lora", 2, GPT),
        ("hsdp_tp", 4, [*GPT, "--mesh", "1x2x2"]),
        ("hsdp_tp", 4, [*GPT, "--mesh", "2x2x1"]),
        ("vision", 2, ["--size", "8", "--width", "8", "--batch", "4", "--bf16"]),
    ],
    ids=["lora", "hsdp_tp 1x2x2", "hsdp_tp 2x2x1", "vision"],
)
def test_example_script_trains_the_same_weights_as_torch(
    script: str, ranks: int, arguments: list[str]
) -> None:
    digests = [
        digest_of_weights(launch(script, ranks, "--impl", i, *arguments))
        for i in ("torch", "fsdp_c")
    ]
    assert digests[0] == digests[1]


def test_throughput_of_hsdp_tp_counts_tokens_of_tensor_parallel_ranks_once() -> None:
    output = launch("hsdp_tp", 2, *GPT, "--mesh", "1x1x2", "--batch", 4, "--microbatches", 2)
    match = re.search(r"^Throughput +([\d,]+) tokens/s on 2 ranks \((\d+) ms", output, re.M)
    assert match is not None
    tokens_of_step = int(match[1].replace(",", "")) * int(match[2]) / 1000
    context, batch, microbatches = 16, 4, 2
    expected = context * batch * microbatches
    assert tokens_of_step == pytest.approx(expected, rel=0.2)  # the duration is rounded to ms


def test_loss_of_hsdp_tp_is_the_mean_of_its_microbatches() -> None:
    def loss(steps: int, microbatches: int) -> float:
        sizes = ["--steps", steps, "--microbatches", microbatches]
        output = launch("hsdp_tp", 1, *GPT, "--mesh", "1x1x1", "--lr", 0, *sizes)
        return float(output.split("Final loss")[1].split()[0])

    first, second = loss(1, 1), loss(2, 1)
    assert first != second
    assert loss(1, 2) == pytest.approx((first + second) / 2, abs=1e-4)


@pytest.mark.parametrize("mesh", ["1x1x1x", "ax1x1x1", "1x²x1", "1x1"])
def test_hsdp_tp_with_invalid_mesh_prints_the_expected_form(mesh: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        launch("hsdp_tp", 1, *GPT, "--mesh", mesh)
    expected = f"--mesh is REPLICASxSHARDSxTENSOR, such as 1x2x2, not {mesh}"
    assert expected in failed.value.reports[0].output


def test_digest_of_weights_depends_on_the_training() -> None:
    """If it did not, test_example_script_trains_the_same_weights_as_torch would prove nothing."""
    digests = {
        digest_of_weights(launch("lora", 2, *GPT, "--lr", rate)) for rate in ("0.01", "0.02")
    }
    assert len(digests) == 2


def test_adapters_file_has_unsharded_adapters_and_nothing_else(tmp_path: Path) -> None:
    import torch

    file = tmp_path / "adapters.pt"
    launch("lora", 2, *GPT, "--rank", 3, "--steps", 1, "--out", file)
    adapters = torch.load(file)
    assert len(adapters) == 2 * 4 * 2  # two matrices for four linear layers of two blocks
    assert all("lora_" in name and 3 in value.shape for name, value in adapters.items())
    assert any(value.count_nonzero() for name, value in adapters.items() if "lora_b" in name)


def test_checkpoint_of_four_ranks_resumes_on_two_with_the_same_weights(tmp_path: Path) -> None:
    saved = launch("resume", 4, *GPT, "--out", tmp_path)
    resumed = launch("resume", 2, *GPT, "--out", tmp_path, "--steps", 6)
    match = re.search(r"^Resumed on 2 ranks after step 3: weights sha256 (\w{16})$", resumed, re.M)
    assert match is not None and match[1] == digest_of_weights(saved)
    assert digest_of_weights(resumed) != digest_of_weights(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000006"]
    with pytest.raises(RanksFailed, match="has 6 steps already: increase --steps"):
        launch("resume", 1, *GPT, "--out", tmp_path, "--steps", 6)


def test_example_with_impl_torch_refuses_a_redirected_fully_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsdp_c

    monkeypatch.syspath_prepend(EXAMPLES)
    import job

    fsdp_c.install()
    try:
        with pytest.raises(job.UsageError, match="unset FSDP_C"):
            job.select_fully_shard("torch")
        monkeypatch.setitem(sys.modules, "_fsdp_c_compare_observer", sys)
        assert job.select_fully_shard("torch")
    finally:
        fsdp_c.uninstall()


def test_resume_with_other_settings_names_the_recorded_ones(tmp_path: Path) -> None:
    launch("resume", 1, *GPT, "--out", tmp_path, "--steps", 1)
    with pytest.raises(RanksFailed, match="is of a run with --width 24: pass it, or another --out"):
        launch("resume", 1, *GPT, "--out", tmp_path, "--width", 32)


@pytest.mark.parametrize("script", ["lora", "resume", "train_gpt"])
def test_example_with_an_invalid_out_fails_before_training(script: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if script == "lora":
        out.mkdir()
    else:
        out.touch()
    with pytest.raises(RanksFailed) as failed:
        launch(script, 2, *GPT, "--out", out)
    output = failed.value.reports[0].output
    assert f"{script}: error: --out {out}: " in output
    assert "Training" not in output


def test_newest_checkpoint_has_the_largest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import job

    names = ("step_999999", "step_1000000", "step_2000000.unfinished")
    assert job.find_newest(map(Path, names)) == Path("step_1000000")
    assert job.find_newest([]) is None


def test_digest_of_weights_accepts_bfloat16_and_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn as nn

    monkeypatch.syspath_prepend(EXAMPLES)
    from progress import weights_digest

    model = nn.BatchNorm1d(2)  # with a scalar, the number of batches
    full = weights_digest(model)
    assert weights_digest(model.bfloat16()) != full


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_finetune_hf_without_transformers_names_the_missing_library() -> None:
    with pytest.raises(RanksFailed) as failed:
        launch("finetune_hf", 1, *TEXT)
    lines = failed.value.reports[0].output.splitlines()
    assert lines == ["finetune_hf: error: transformers is not installed: pip install transformers"]


def test_finetune_hf_trains_the_same_weights_as_torch_and_saves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    from progress import weights_digest

    outputs = [
        launch("finetune_hf", 2, *TEXT, "--impl", impl, "--out", tmp_path / impl)
        for impl in ("torch", "fsdp_c")
    ]
    assert digest_of_weights(outputs[0]) == digest_of_weights(outputs[1])
    load = transformers.AutoModelForCausalLM.from_pretrained
    for folder in (tmp_path / "torch", tmp_path / "fsdp_c"):
        model, report = load(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert weights_digest(model)[:16] == digest_of_weights(outputs[0])
