"""``load_full_state_dict`` passes extra states to modules as ``nn.Module.load_state_dict`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from safetensors_writer import write

from fsdp_c import fully_shard, load_full_state_dict


class WithState(nn.Linear):
    """A layer whose extra state is ``state``."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make_pair(state: Any) -> nn.Module:
    return nn.Sequential(WithState(state), WithState(state))


PAIRS = {
    "tensor of another size": (torch.zeros(3), torch.ones(5)),
    "tensor of another dtype": (torch.zeros(2, dtype=torch.int64), torch.tensor([1.5, 2.5])),
    "dict for tensor": (torch.ones(2), {"x": 1}),
    "tensor for dict": ({"x": 1}, torch.ones(2)),
    "tensor for None": (None, torch.ones(2)),
    "None for tensor": (torch.ones(2), None),
    "slice of tensor": (torch.zeros(2), torch.arange(9.0)[3:5]),
}
"""The extra state of the model, and that of the source."""


@pytest.mark.parametrize(("own", "loaded"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("shared_file", [False, True])
def test_load_sets_extra_state_as_torch_does(
    single_group: int, tmp_path: Path, own: Any, loaded: Any, shared_file: bool
) -> None:
    model, reference = fully_shard(make_pair(own)), make_pair(own)
    full: dict[str, Any] = make_pair(own).state_dict() | {"0._extra_state": loaded}
    reference.load_state_dict(full)
    source: Any = full
    if shared_file:
        if not all(isinstance(value, torch.Tensor) for value in full.values()):
            pytest.skip("a file has only tensors")
        full = {name: value.clone() for name, value in full.items()}
        source = write(tmp_path / "model.safetensors", full)
    load_full_state_dict(model, source, shared_file=shared_file)
    for layer, reference_layer in zip(model, reference, strict=True):
        found, expected = layer.state, reference_layer.state
        assert type(found) is type(expected)
        if isinstance(found, torch.Tensor):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        else:
            assert found == expected


@pytest.mark.parametrize("state", [1, None, torch.ones(1)], ids=str)
def test_load_reports_missing_extra_state_that_equals_another(fake_group: int, state: Any) -> None:
    model = fully_shard(make_pair(state))
    full = make_pair(state).state_dict()
    del full["1._extra_state"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1._extra_state"'):
        load_full_state_dict(model, full)
    keys = load_full_state_dict(model, full, strict=False)
    assert keys.missing_keys == ["1._extra_state"]


class WithNone(nn.Linear):
    """A layer whose state dict has an entry None that is no extra state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = None


def test_load_of_tensor_for_entry_that_is_none_in_the_model_raises(fake_group: int) -> None:
    full = dict(nn.Linear(2, 2).state_dict()) | {"scale": torch.ones(1)}
    with pytest.raises(RuntimeError, match="scale: a tensor in the checkpoint, none in the model"):
        load_full_state_dict(fully_shard(WithNone(2, 2)), full)
