"""The headers of safetensors files, whole and not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny_hf import write_tiny_hf

from sweeper.safetensors_header import SafetensorsError, tensor_sizes, weight_files


def written(path: Path, header: object, data: int = 0) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


def test_the_sizes_of_tensors_are_read_without_them(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf")
    sizes = dict(tensor_sizes(folder / "model.safetensors"))
    assert sizes["model.embed_tokens.weight"] == 512 * 64 * 4
    assert sizes["model.layers.0.self_attn.k_proj.weight"] == 4 * 64 * 64 * 4
    assert "__metadata__" not in sizes
    size = (folder / "model.safetensors").stat().st_size
    assert size - 10_000 < sum(sizes.values()) < size


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not start with the length"),
        (bytes(8), "does not start with the length"),
        (b"\xff" * 8, "does not start with the length"),
        ((99).to_bytes(8, "little") + b"{}", "ends within its header"),
        ((2).to_bytes(8, "little") + b"{{", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "lists no tensors"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SafetensorsError, match=says):
        list(tensor_sizes(tmp_path / "x"))


@pytest.mark.parametrize(
    "tensor",
    [None, {}, {"data_offsets": [1]}, {"data_offsets": [2, 1]}, {"data_offsets": [0, "1"]}],
)
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, tensor: object) -> None:
    with pytest.raises(SafetensorsError, match="where the tensor t is"):
        list(tensor_sizes(written(tmp_path / "x", {"t": tensor})))


def test_the_weights_that_an_index_names_are_those_that_count(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        written(tmp_path / name, {})
    assert [each.name for each in weight_files(tmp_path)] == [
        "consolidated.safetensors", "model-1.safetensors", "model-2.safetensors",
    ]  # fmt: skip
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    assert len(weight_files(tmp_path)) == 3
    index.write_text(json.dumps({"weight_map": {"a": "model-2.safetensors",
                                                "b": "model-1.safetensors"}}))  # fmt: skip
    assert [each.name for each in weight_files(tmp_path)] == [
        "model-1.safetensors", "model-2.safetensors",
    ]  # fmt: skip
    index.unlink()
    written(tmp_path / "model.safetensors", {})
    assert [each.name for each in weight_files(tmp_path)] == ["model.safetensors"]
