"""Reads the headers of safetensors files: names, types and sizes of tensors, not the weights.

Format: https://huggingface.co/docs/safetensors: eight bytes with the length of a JSON header,
the header, the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_LONGEST_HEADER: Final = 100_000_000  # the limit of the format's own reader


class SafetensorsError(ValueError):
    """A file that is not a safetensors file."""


def tensor_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the size in bytes of each tensor; raises SafetensorsError."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= _LONGEST_HEADER:
            raise SafetensorsError(f"{path} does not start with the length of a header")
        raw = file.read(length)
    if len(raw) < length:
        raise SafetensorsError(f"{path} ends within its header")
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise SafetensorsError(f"{path} has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise SafetensorsError(f"{path} has a header that lists no tensors")
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, _size(path, name, tensor)


def _size(path: Path, name: str, tensor: Any) -> int:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(isinstance(each, int) and not isinstance(each, bool) for each in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise SafetensorsError(f"{path} does not say where the tensor {name} is")
    return int(offsets[1] - offsets[0])


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights of a Hugging Face folder.

    A repository may carry the same weights twice; those that the index names, else the one file
    of the usual name, are what engines load.
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        files = tuple(folder / name for name in sorted(set(named)))
        if files and all(each.is_file() for each in files):
            return files
    single = folder / "model.safetensors"
    return (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
