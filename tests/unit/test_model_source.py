"""The models that ``python -m fsdp_c plan hf:...`` creates from configurations of transformers.

Tests that need transformers are skipped where it is missing. In its environment, run
``PYTHONPATH=. .../python -m pytest tests/unit/test_model_source.py``.
"""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_c
from fsdp_c._tools import plan_command
from fsdp_c._tools.model_source import make_model

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
}
T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 500}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TOKENS = ["input_ids=2x16:int64"]
LABELED = [*TOKENS, "labels=2x16:int64"]
BF16 = ["--param-dtype", "bfloat16"]
"""On fake tensors, the expert layers of transformers support bfloat16 only."""

CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[str], list[str], int]] = {
    "LlamaForCausalLM": (DECODER, LABELED, [], 3),
    "Qwen3ForCausalLM": (DECODER, LABELED, [], 3),
    "MixtralForCausalLM": (DECODER | {"num_local_experts": 4}, LABELED, BF16, 3),
    "T5ForConditionalGeneration": (T5 | {"decoder_start_token_id": 0}, LABELED, [], 4),
    "ViTForImageClassification": (VIT, ["pixel_values=2x3x32x32"], [], 3),
}
"""Class -> (configuration, batch, further arguments, units besides the root)."""


@needs_transformers
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_plan_command_accepts_configuration_of_each_model_class(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, batch, arguments, units = CONFIGURATIONS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings | {"architectures": [name]}))
    assert plan_command.main([f"hf:{path}", "8", *arguments, "--batch", *batch]) == 0
    output = capsys.readouterr().out
    assert f"{name} " in output and "unknown" not in output
    explanation = fsdp_c.plan(make_model(f"hf:{path}"), world_size=8, file=io.StringIO())
    assert len(explanation.units) == units + 1


@needs_transformers
def test_hf_class_with_json_text_or_folder_makes_the_same_model(tmp_path: Path) -> None:
    text = json.dumps(DECODER)
    (tmp_path / "config.json").write_text(json.dumps(DECODER | {"model_type": "llama"}))
    by_text = make_model(f"hf:LlamaForCausalLM:{text}")
    by_folder = make_model(f"hf:LlamaForCausalLM:{tmp_path}")
    assert {p.device.type for p in by_text.parameters()} == {"meta"}
    shapes = {name: param.shape for name, param in by_text.named_parameters()}
    assert shapes == {name: param.shape for name, param in by_folder.named_parameters()}
    assert type(make_model(f"hf:{tmp_path}")).__name__ == "LlamaModel"


@needs_transformers
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("hf:NoSuchModel:{}", "transformers has no class 'NoSuchModel'"),
        ("hf:{}", "has no 'architectures' and no 'model_type': use hf:Class:{}"),
        ("hf:{1}", "is not JSON"),
        ("hf:AutoModel:{}", "hf:AutoModel:{} raises AttributeError: "),
    ],
)
def test_plan_of_invalid_hf_configuration_exits_with_message(
    name: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_command.main([name, "8"])
    assert caught.value.code == 2 and match in capsys.readouterr().err


@needs_transformers
def test_plan_of_missing_hf_configuration_file_exits_with_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan_command.main(["hf:nowhere/config.json", "8"])
    assert "No such file or directory: 'nowhere/config.json'" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_plan_of_hf_configuration_without_transformers_names_the_missing_library(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan_command.main(["hf:config.json", "8"])
    assert "hf: needs transformers: pip install transformers" in capsys.readouterr().err


def test_model_without_hf_prefix_is_imported() -> None:
    assert isinstance(make_model("torch.nn:Identity"), torch.nn.Identity)
    with pytest.raises(ValueError, match=r"the model is package\.module:name, or hf:path"):
        make_model("torch.nn.Identity")
