"""Readers of safetensors files and of their index validate headers before they use them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_writer import DTYPES, write, write_header

import fsdp_c._checkpoint.safetensors
from fsdp_c._checkpoint.safetensors import SafetensorsFile, SafetensorsIndex, open_safetensors


def entry(begin: int, end: int) -> dict[str, Any]:
    """Returns a valid header entry of a U8 tensor at these byte offsets."""
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


class TestFile:
    @pytest.mark.parametrize("pad", range(8))
    def test_safetensors_file_with_any_dtype_and_alignment_returns_saved_tensors(
        self, tmp_path: Path, pad: int
    ) -> None:
        tensors = {
            name: torch.arange(6).to(dtype).view(2, 3)
            if dtype.itemsize > 1 or dtype == torch.uint8
            else torch.tensor([[1, 0, 1]]).to(dtype)
            for name, dtype in DTYPES.items()
        }
        loaded = SafetensorsFile(write(tmp_path / "a", tensors, pad))
        assert set(loaded) == set(tensors) and len(loaded) == len(tensors)
        for name, tensor in tensors.items():
            assert loaded.get_dtype_and_shape(name) == (tensor.dtype, tensor.shape)
            assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
            assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
        with pytest.raises(KeyError):
            loaded["nothing"]

    def test_safetensors_file_with_scalar_and_empty_tensor_returns_them(
        self, tmp_path: Path
    ) -> None:
        header = {
            "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
            "e": {"dtype": "F32", "shape": [0, 4], "data_offsets": [4, 4]},
        }
        raw = bytes(torch.tensor([3.5]).view(torch.uint8).tolist())
        loaded = SafetensorsFile(write_header(tmp_path / "a", header, raw))
        assert torch.equal(loaded["s"], torch.tensor(3.5))
        assert loaded["e"].shape == (0, 4)

    def test_safetensors_file_iterates_names_in_order_of_data_offsets(self, tmp_path: Path) -> None:
        path = write_header(tmp_path / "a", {"late": entry(4, 8), "early": entry(0, 4)}, b"\0" * 8)
        assert list(SafetensorsFile(path)) == ["early", "late"]

    def test_safetensors_tensors_are_on_cpu_for_any_default_device(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", {"a": torch.ones(3)})
        with torch.device("meta"):
            assert SafetensorsFile(path)["a"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        "invalid_entry",
        [
            3,
            {},
            {"dtype": "F32", "shape": [1], "data_offsets": [0]},
            {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
            {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": {"1": 1}, "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
            {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]},
        ],
    )
    def test_safetensors_header_with_invalid_entry_raises(
        self, tmp_path: Path, invalid_entry: Any
    ) -> None:
        path = write_header(tmp_path / "a", {"weight": invalid_entry}, b"\0" * 4)
        with pytest.raises(ValueError, match=f"{path} is not a safetensors file: .*header"):
            SafetensorsFile(path)

    @pytest.mark.parametrize(
        ("header", "length"),
        [
            ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
            ({"a": entry(0, 4), "b": entry(8, 12)}, 12),
            ({"a": entry(0, 4)}, 12),
            ({"a": entry(4, 12)}, 12),
            (b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), 4),
            (b'{"a": {"dtype": "U8", "shape": [4], "shape": [4], "data_offsets": [0, 4]}}', 4),
        ],
        ids=["overlap", "gap", "bytes after", "bytes before", "duplicate name", "duplicate key"],
    )
    def test_safetensors_header_with_gap_overlap_or_duplicate_key_raises(
        self, tmp_path: Path, header: Any, length: int
    ) -> None:
        path = write_header(tmp_path / "a", header, b"\0" * length)
        with pytest.raises(ValueError, match=f"{path} is not a safetensors file: "):
            SafetensorsFile(path)

    @pytest.mark.parametrize(
        "header",
        [b"[" * 100_000, b'{"a":' * 100_000, b"{]", b"[]", b'{"\xff": 1}', b'{"a": NaN}'],
        ids=["nested lists", "nested objects", "no JSON", "no object", "no UTF-8", "NaN"],
    )
    def test_safetensors_header_that_is_not_a_json_object_raises(
        self, tmp_path: Path, header: bytes
    ) -> None:
        with pytest.raises(ValueError, match=r"is not a safetensors file: .*header"):
            SafetensorsFile(write_header(tmp_path / "a", header))

    @pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"{}"])
    def test_safetensors_file_without_valid_header_length_raises(
        self, tmp_path: Path, content: bytes
    ) -> None:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a safetensors file: .*header"):
            SafetensorsFile(tmp_path / "a")

    def test_safetensors_file_that_is_a_folder_raises(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=str(tmp_path)):
            SafetensorsFile(tmp_path)

    @settings(max_examples=200)
    @given(st.binary(max_size=40), st.integers(0, 60))
    def test_safetensors_file_of_random_bytes_raises_only_value_error(
        self, tmp_path_factory: Any, text: bytes, length: int
    ) -> None:
        path = tmp_path_factory.mktemp("f") / "a"
        path.write_bytes(length.to_bytes(8, "little") + text)
        try:
            loaded = SafetensorsFile(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert [loaded[name] for name in loaded] == []

    @pytest.mark.parametrize("kind", ["many tensors", "long shape"])
    def test_large_safetensors_header_is_read_in_less_than_2_5_cpu_seconds(
        self, tmp_path: Path, kind: str
    ) -> None:
        header: Any = {f"layers.{i}.{'weight' * 5}": entry(4 * i, 4 * i + 4) for i in range(15_000)}
        if kind == "long shape":
            header = {"a": {"dtype": "U8", "shape": [2**40] * 100_000, "data_offsets": [0, 4]}}
        path = write_header(tmp_path / "a", header, b"\0" * 60_000)
        assert path.stat().st_size > 1_300_000
        start = time.process_time()
        try:
            loaded = SafetensorsFile(path)
            assert len([loaded.get_dtype_and_shape(name) for name in loaded]) == 15_000
        except ValueError:
            assert kind == "long shape"
        assert time.process_time() - start < 2.5

    @pytest.mark.parametrize("library", [None, object])
    def test_missing_or_old_safetensors_library_raises_with_pip_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any
    ) -> None:
        path = write(tmp_path / "a", {"a": torch.ones(2)})
        monkeypatch.setattr(fsdp_c._checkpoint.safetensors, "safe_open", library)
        with pytest.raises(ImportError, match=r"pip install 'safetensors>=0\.6'"):
            open_safetensors(path)


class TestIndex:
    def test_safetensors_index_finds_tensors_in_their_files(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2), "unused": torch.ones(1)})
        write(tmp_path / "two.safetensors", {"b": torch.zeros(3)})
        weight_map = {"b": "two.safetensors", "a": "one.safetensors"}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        for path in (index, tmp_path):
            loaded = open_safetensors(path)
            assert list(loaded) == ["a", "b"] and len(loaded) == 2
            assert torch.equal(loaded["b"], torch.zeros(3))
            assert loaded.get_dtype_and_shape("a") == (torch.float32, (2,))

    def test_safetensors_index_naming_file_without_tensor_raises(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2)})
        index = tmp_path / "i.json"
        index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
        with pytest.raises(ValueError, match=r"places 'b' in one\.safetensors"):
            SafetensorsIndex(index)

    @pytest.mark.parametrize(
        ("file", "reason"),
        [
            ("../one.safetensors", "not in its folder"),
            ("/etc/passwd", "not in its folder"),
            ("sub/../../one", "not in its folder"),
            ("..", "not in its folder"),
            (3, "not a file name"),
            (None, "not a file name"),
            ("", "not a file name"),
            ("a\0b", "not a file name"),
        ],
    )
    def test_safetensors_index_with_invalid_file_name_raises(
        self, tmp_path: Path, file: Any, reason: str
    ) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2)})
        index = tmp_path / "folder" / "i.json"
        index.parent.mkdir()
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(ValueError, match=rf"places 'a' in .*, which is {reason}$"):
            SafetensorsIndex(index)

    def test_safetensors_index_and_files_that_are_symbolic_links_load(self, tmp_path: Path) -> None:
        """Hugging Face's cache stores contents in ``blobs`` and links to them in ``snapshots``."""
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot" / "sub").mkdir(parents=True)
        blob = write(tmp_path / "blobs" / "123", {"a": torch.ones(2)})
        (tmp_path / "snapshot" / "sub" / "one.safetensors").symlink_to(blob)
        (tmp_path / "blobs" / "456").write_text(
            json.dumps({"weight_map": {"a": "sub/one.safetensors"}})
        )
        index = tmp_path / "snapshot" / "model.safetensors.index.json"
        index.symlink_to(tmp_path / "blobs" / "456")
        assert torch.equal(open_safetensors(index.parent)["a"], torch.ones(2))

    @pytest.mark.parametrize(
        "text", ["", "{}", "[]", '{"weight_map": 3}', "[" * 100_000, "\x00\xff"], ids=range(6)
    )
    def test_json_file_that_is_not_a_safetensors_index_raises(
        self, tmp_path: Path, text: str
    ) -> None:
        (tmp_path / "i.json").write_text(text)
        with pytest.raises(ValueError, match="not an index"):
            SafetensorsIndex(tmp_path / "i.json")


def test_open_safetensors_of_folder_opens_its_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert list(open_safetensors(tmp_path)) == ["a"]


def test_open_safetensors_of_path_without_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors file in"):
        open_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_safetensors(tmp_path / "a.safetensors")


def test_open_safetensors_of_folder_prefers_model_to_variants(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16.safetensors", {"a": torch.ones(2, dtype=torch.float16)})
    write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    (tmp_path / "._model.safetensors").write_bytes(b"\0" * 64)
    assert open_safetensors(tmp_path)["a"].dtype == torch.float32
    index = {"weight_map": {"b": "model.safetensors"}}
    for name in ("model.fp16.safetensors.index.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(json.dumps(index).replace('"b"', '"a"'))
    assert isinstance(open_safetensors(tmp_path), SafetensorsIndex)


def test_open_safetensors_of_folder_prefers_model_to_another_index(tmp_path: Path) -> None:
    for name in ("adapter", "model"):
        write(tmp_path / f"{name}.safetensors", {name: torch.ones(2)})
    index = {"weight_map": {"adapter": "adapter.safetensors"}}
    (tmp_path / "adapter.safetensors.index.json").write_text(json.dumps(index))
    assert list(open_safetensors(tmp_path)) == ["model"]


@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.index.json"])
def test_open_safetensors_of_folder_with_several_checkpoints_raises(
    tmp_path: Path, suffix: str
) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {name: torch.ones(2)})
        text = json.dumps({"weight_map": {name: f"{name}.safetensors"}})
        if suffix.endswith("json"):
            (tmp_path / f"{name}{suffix}").write_text(text)
    with pytest.raises(ValueError, match=f"several checkpoints: one{suffix}, two{suffix}; pass"):
        open_safetensors(tmp_path)


def test_open_safetensors_of_empty_path_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="path is empty"):
        open_safetensors("")
    assert list(open_safetensors(".")) == ["a"]
