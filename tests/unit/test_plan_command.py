"""``python -m fsdp_c plan``: output, exit status and messages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import fork_server
import pytest
from releases import has

from fsdp_c._tools import plan_command


def run_plan(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return fork_server.run_module("fsdp_c", "plan", *arguments, cwd=cwd)


def test_plan_command_prints_table_and_sets_exit_status(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "user.py").write_text(
        "import torch.nn as nn\n"
        "def model():\n"
        "    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))\n"
    )
    completed = run_plan(
        "user:model", "2x4", "--batch", "2x64", "--memory", "1GiB", "--param-dtype", "bfloat16",
        "--plot", "memory.png", cwd=tmp_path,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    # From 2.15 on, gradients are reduced in the dtype of the sharded parameter.
    reduced = "float32" if has("2.15") else "bfloat16"
    assert re.search(
        rf"^0-3 +4 x Sequential .*float32/bfloat16/{reduced} +2x4 ", completed.stdout, re.M
    )
    assert "it fits into 1.0 GiB" in completed.stdout and (tmp_path / "memory.png").exists()
    assert run_plan("user:model", "8", "--memory", "1KiB", cwd=tmp_path).returncode == 1
    failed = run_plan("user:nothing", "8", cwd=tmp_path)
    assert failed.returncode == 2 and "user has no function or class 'nothing'" in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("eight",), "ranks are a number, 8, or replicas by ranks to shard over, 2x4, not 'eight'"),
        (("8", "--param-dtype", "bf17"), "argument --param-dtype: torch has no dtype 'bf17'"),
        (("8", "--device", "gpu"), "device is a torch.device or its name"),
        (("8", "--optimizer", "LBFGS"), "cannot measure the memory of LBFGS"),
        (("8", "--microbatches", "0"), "microbatches is positive, not 0"),
        (("8", "--batch", "tokens=2x8:int64", "2x8"), "have names or none, not '2x8'"),
        (("8", "--batch", "99999999999x99999999:int64"), "cannot make a tensor '99999999999x9999"),
        (("8", "--batch", "2x8:qint8"), "the batch's sizes and dtypes: NotImplementedError: "),
        (("8", "--batch", "2x-8"), "a batch is SHAPE[:DTYPE], as in 2x2048:int64, not '2x-8'"),
        (("8", "--batch", "x=2x8", "x=4x8"), "two tensors of the batch have the name 'x'"),
    ],
)
def test_plan_command_with_invalid_argument_exits_with_message(
    arguments: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_command.main(["test_plan:LargeVocabulary", *arguments])
    assert caught.value.code == 2 and match in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torch.nn:Linear", "torch.nn:Linear() raises TypeError: Linear.__init__()"),
        (".nn:Linear", "the model is package.module:name, or hf:path/config.json or "),
    ],
)
def test_plan_command_with_failing_constructor_or_relative_module_exits_with_message(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_command.main([model, "8"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_plan_command_with_module_that_raises_exits_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan_raises.py").write_text("undefined")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as caught:
        plan_command.main(["plan_raises:Model", "8"])
    assert caught.value.code == 2
    assert "the import of plan_raises raises NameError: name 'undefi" in capsys.readouterr().err


def test_plan_command_passes_named_tensors_and_advice_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["8", "--batch", "tokens=2x8:int64", "--ranks-per-node", "4", "--memory", "1GiB"]
    assert plan_command.main(["test_plan:LargeVocabulary", *arguments]) == 0
    output = capsys.readouterr().out
    assert "activations" in output and "unknown" not in output
    assert "the model is sharded over 2 nodes of 4 ranks" in output
    arguments = ["2x4", "--microbatches", "3"]
    assert plan_command.main(["test_plan:LargeVocabulary", *arguments]) == 0
    assert "all-reduce gradients after each of 3 microbatches" in capsys.readouterr().out
