"""Reading safetensors files: what a file says is checked before it is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_writer import write, write_header

from fsdp_c.safetensors import DTYPES, SafetensorsFile, SafetensorsIndex, open_safetensors


class TestFile:
    @pytest.mark.parametrize("pad", range(8))
    def test_gives_back_every_dtype_at_any_alignment(self, tmp_path: Path, pad: int) -> None:
        tensors = {
            name: torch.arange(6).to(dtype).view(2, 3)
            if dtype.itemsize > 1 or dtype == torch.uint8
            else torch.tensor([[1, 0, 1]]).to(dtype)
            for name, dtype in DTYPES.items()
            if not dtype.is_complex
        }
        found = SafetensorsFile(write(tmp_path / "a", tensors, pad))
        assert set(found) == set(tensors) and len(found) == len(tensors)
        for name, tensor in tensors.items():
            assert found.facts(name) == (tensor.dtype, tensor.shape)
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        tensors = {"s": torch.tensor(3.5).view(()), "e": torch.zeros(0, 4)}
        header = {
            "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
            "e": {"dtype": "F32", "shape": [0, 4], "data_offsets": [4, 4]},
        }
        raw = bytes(torch.tensor([3.5]).view(torch.uint8).tolist())
        found = SafetensorsFile(write_header(tmp_path / "a", header, raw))
        assert torch.equal(found["s"], tensors["s"])
        assert found["e"].shape == (0, 4)

    def test_names_come_in_the_order_of_the_bytes(self, tmp_path: Path) -> None:
        header = {
            "late": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
            "early": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        }
        assert list(SafetensorsFile(write_header(tmp_path / "a", header))) == ["early", "late"]

    @pytest.mark.parametrize(
        ("entry", "match"),
        [
            (3, "incomplete"),
            ({}, "incomplete"),
            ({"dtype": "F32", "shape": [1], "data_offsets": [0]}, "incomplete"),
            ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype 'F99'"),
            ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "no list of sizes"),
            ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "no list of sizes"),
            ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit bytes 0 to 4"),
            ({"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, "does not fit"),
            ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "does not fit"),
        ],
    )
    def test_entries_that_cannot_be_true(self, tmp_path: Path, entry: Any, match: str) -> None:
        path = write_header(tmp_path / "a", {"weight": entry})
        with pytest.raises(ValueError, match=f"is not a safetensors file: .*'weight'.*{match}"):
            SafetensorsFile(path)

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            (b"", "header cannot be 0 bytes"),
            (b"\xff" * 8, "header cannot be"),
            (b"\x05" + b"\0" * 7 + b"{}", "header cannot be 5"),
            (b"\x02" + b"\0" * 7 + b"{]", "no JSON"),
            (b"\x02" + b"\0" * 7 + b"[]", "no JSON object"),
        ],
    )
    def test_files_that_are_something_else(
        self, tmp_path: Path, content: bytes, match: str
    ) -> None:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=match):
            SafetensorsFile(tmp_path / "a")

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=40), st.integers(0, 60))
    def test_no_bytes_make_it_fail_otherwise(
        self, tmp_path_factory: Any, text: bytes, length: int
    ) -> None:
        path = tmp_path_factory.mktemp("f") / "a"
        path.write_bytes(length.to_bytes(8, "little") + text)
        try:
            found = SafetensorsFile(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert [found[name] for name in found] == []


class TestIndex:
    def test_finds_tensors_in_their_files(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2), "unused": torch.ones(1)})
        write(tmp_path / "two.safetensors", {"b": torch.zeros(3)})
        places = {"b": "two.safetensors", "a": "one.safetensors"}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
        for path in (index, tmp_path):
            found = open_safetensors(path)
            assert list(found) == ["a", "b"] and len(found) == 2
            assert torch.equal(found["b"], torch.zeros(3))
            assert found.facts("a") == (torch.float32, (2,))

    def test_a_tensor_that_is_not_where_it_should_be(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2)})
        index = tmp_path / "i.json"
        index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
        with pytest.raises(ValueError, match=r"places 'b' in one\.safetensors"):
            SafetensorsIndex(index)

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}'])
    def test_something_else(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "i.json").write_text(text)
        with pytest.raises(ValueError, match="not an index"):
            SafetensorsIndex(tmp_path / "i.json")


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert list(open_safetensors(tmp_path)) == ["a"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors file in"):
        open_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_safetensors(tmp_path / "a.safetensors")
