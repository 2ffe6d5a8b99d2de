"""Reading safetensors files: what a file says is checked before it is believed."""

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

import fsdp_c.safetensors
from fsdp_c.safetensors import SafetensorsFile, SafetensorsIndex, open_safetensors


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


class TestFile:
    @pytest.mark.parametrize("pad", range(8))
    def test_gives_back_every_dtype_at_any_alignment(self, tmp_path: Path, pad: int) -> None:
        tensors = {
            name: torch.arange(6).to(dtype).view(2, 3)
            if dtype.itemsize > 1 or dtype == torch.uint8
            else torch.tensor([[1, 0, 1]]).to(dtype)
            for name, dtype in DTYPES.items()
        }
        found = SafetensorsFile(write(tmp_path / "a", tensors, pad))
        assert set(found) == set(tensors) and len(found) == len(tensors)
        for name, tensor in tensors.items():
            assert found.facts(name) == (tensor.dtype, tensor.shape)
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
        with pytest.raises(KeyError):
            found["nothing"]

    def test_scalars_and_empty_tensors(self, tmp_path: Path) -> None:
        header = {
            "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
            "e": {"dtype": "F32", "shape": [0, 4], "data_offsets": [4, 4]},
        }
        raw = bytes(torch.tensor([3.5]).view(torch.uint8).tolist())
        found = SafetensorsFile(write_header(tmp_path / "a", header, raw))
        assert torch.equal(found["s"], torch.tensor(3.5))
        assert found["e"].shape == (0, 4)

    def test_names_come_in_the_order_of_the_bytes(self, tmp_path: Path) -> None:
        path = write_header(tmp_path / "a", {"late": entry(4, 8), "early": entry(0, 4)}, b"\0" * 8)
        assert list(SafetensorsFile(path)) == ["early", "late"]

    def test_tensors_are_on_the_cpu_whatever_the_default(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", {"a": torch.ones(3)})
        with torch.device("meta"):
            assert SafetensorsFile(path)["a"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        "wrong",
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
    def test_entries_that_cannot_be_true(self, tmp_path: Path, wrong: Any) -> None:
        path = write_header(tmp_path / "a", {"weight": wrong}, b"\0" * 4)
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
        ids=["overlap", "hole", "bytes left", "bytes before", "a name twice", "a key twice"],
    )
    def test_headers_that_do_not_say_exactly_what_is_there(
        self, tmp_path: Path, header: Any, length: int
    ) -> None:
        path = write_header(tmp_path / "a", header, b"\0" * length)
        with pytest.raises(ValueError, match=f"{path} is not a safetensors file: "):
            SafetensorsFile(path)

    @pytest.mark.parametrize(
        "header",
        [b"[" * 100_000, b'{"a":' * 100_000, b"{]", b"[]", b'{"\xff": 1}', b'{"a": NaN}'],
        ids=["lists", "objects", "no JSON", "no object", "no UTF-8", "NaN"],
    )
    def test_headers_that_are_something_else(self, tmp_path: Path, header: bytes) -> None:
        with pytest.raises(ValueError, match=r"is not a safetensors file: .*header"):
            SafetensorsFile(write_header(tmp_path / "a", header))

    @pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x05" + b"\0" * 7 + b"{}"])
    def test_files_that_are_something_else(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a safetensors file: .*header"):
            SafetensorsFile(tmp_path / "a")
        with pytest.raises(OSError, match=str(tmp_path)):
            SafetensorsFile(tmp_path)

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

    @pytest.mark.parametrize("kind", ["many tensors", "a long shape"])
    def test_a_large_header_takes_no_time(self, tmp_path: Path, kind: str) -> None:
        header: Any = {f"layers.{i}.{'weight' * 5}": entry(4 * i, 4 * i + 4) for i in range(15_000)}
        if kind == "a long shape":
            header = {"a": {"dtype": "U8", "shape": [2**40] * 100_000, "data_offsets": [0, 4]}}
        path = write_header(tmp_path / "a", header, b"\0" * 60_000)
        assert path.stat().st_size > 1_300_000
        start = time.process_time()
        try:
            found = SafetensorsFile(path)
            assert len([found.facts(name) for name in found]) == 15_000
        except ValueError:
            assert kind == "a long shape"
        assert time.process_time() - start < 2.5

    @pytest.mark.parametrize("library", [None, object])
    def test_the_library_is_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any
    ) -> None:
        path = write(tmp_path / "a", {"a": torch.ones(2)})
        monkeypatch.setattr(fsdp_c.safetensors, "safe_open", library)
        with pytest.raises(ImportError, match=r"pip install 'safetensors>=0\.6'"):
            open_safetensors(path)


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

    @pytest.mark.parametrize(
        "place", ["../one.safetensors", "/etc/passwd", "sub/../../one", "..", 3, None, "", "a\0b"]
    )
    def test_files_elsewhere_are_not_looked_at(self, tmp_path: Path, place: Any) -> None:
        write(tmp_path / "one.safetensors", {"a": torch.ones(2)})
        index = tmp_path / "folder" / "i.json"
        index.parent.mkdir()
        index.write_text(json.dumps({"weight_map": {"a": place}}))
        with pytest.raises(ValueError, match=r"places 'a' in .*, which is (not in its folder|no)"):
            SafetensorsIndex(index)

    def test_links_are_followed(self, tmp_path: Path) -> None:
        """As in Hugging Face's cache: names here, contents in a folder beside."""
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
