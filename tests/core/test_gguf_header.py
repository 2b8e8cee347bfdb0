"""Our reader of GGUF headers, against the format's own package, and on files that are not whole."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_gguf import write_tiny_gguf

from sweeper.core.pairs import Pairs
from sweeper.gguf_header import GgufError, read_gguf_header
from sweeper.models import gguf_facts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", layers=2)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "some.gguf"


def written(path: Path, architecture: str, tensors: int = 1, **values: Any) -> Path:
    """Write a small GGUF; a double underscore in a name stands for a dot."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in values.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for index in range(tensors):
        writer.add_tensor(f"t{index}", np.zeros((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def facts_of(path: Path, architecture: str, **values: Any) -> Pairs:
    return gguf_facts(read_gguf_header(written(path, architecture, **values)))


# ---- Against the format's own package ----------------------------------------------------------


def test_the_package_of_the_format_reads_the_same(tiny: Path) -> None:
    header, reader = read_gguf_header(tiny), gguf.GGUFReader(tiny)
    assert header.version == 3
    assert list(header.tensor_names) == [each.name for each in reader.tensors]
    assert header.data_bytes == tiny.stat().st_size - reader.data_offset
    assert [(each.kind, each.shape, each.size_bytes) for each in header.tensors] == [
        (int(each.tensor_type), tuple(each.shape.tolist()), each.n_bytes) for each in reader.tensors
    ]
    theirs = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    ours = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in header.metadata.items()
    }
    assert ours == theirs
    arrays = {name: len(value) for name, value in theirs.items() if isinstance(value, list)}
    assert header.array_lengths == arrays


def test_every_type_of_value_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "all.gguf"), "all")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 2**16 - 1)
    writer.add_int16("i16", -(2**15))
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "Grüße 😀")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["a", "", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = read_gguf_header(tmp_path / "all.gguf").metadata
    theirs = {
        name: field.contents()
        for name, field in gguf.GGUFReader(tmp_path / "all.gguf").fields.items()
        if not name.startswith("GGUF.")
    }
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in ours.items()} == theirs
    assert (ours["u64"], ours["i64"], ours["yes"], ours["no"]) == (2**64 - 1, -(2**63), True, False)


@pytest.mark.parametrize("vocabulary", [["x" * (i % 7) for i in range(5000)], list(range(5000))])
def test_a_long_array_is_passed_over_but_counted(tmp_path: Path, vocabulary: list[Any]) -> None:
    path = written(tmp_path / "long.gguf", "llama", vocabulary=vocabulary, after=7)
    header = read_gguf_header(path)
    assert header.array_lengths["llama.vocabulary"] == 5000
    assert "llama.vocabulary" not in header.metadata
    assert header.metadata["llama.after"] == 7
    assert header.tensor_names == ("t0",)
    assert header.data_bytes == 4 * 8 * 4


# ---- Files that are not whole, or not GGUF -----------------------------------------------------


def test_a_header_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path / "whole.gguf", "llama",
        name="Grüße", ratio=0.5, flag=True, words=["a", "bc"], numbers=[1, 2, 3],
        long=list(range(4100)), long_words=["w"] * 4100, tensors=2,
    )  # fmt: skip
    whole = path.read_bytes()
    end = len(whole) - read_gguf_header(path).data_bytes
    # Few places inside the two long arrays, which are as good as each other; the padding
    # before the first tensor holds nothing that could be missed.
    tail = end - 400
    places = [*range(0, 300, 3), *range(300, tail, 4999), *range(tail, end - 31, 7)]
    cut = tmp_path / "cut.gguf"
    for place in places:
        cut.write_bytes(whole[:place])
        with pytest.raises(GgufError):
            read_gguf_header(cut)
    cut.write_bytes(whole[:end])
    assert read_gguf_header(cut).data_bytes == 0


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + bytes(64), b"PK\x03\x04", bytes(64)])
def test_what_does_not_start_like_a_gguf_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.gguf").write_bytes(content)
    with pytest.raises(GgufError, match="does not start with GGUF"):
        read_gguf_header(tmp_path / "no.gguf")


def head(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HUGE = 2**64 - 1
ALIGNMENT = b"general.alignment"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (head(version=1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is not supported"),
        (head(pairs=1) + pair(b"k", 13, b""), "k has the unknown type 13"),
        (head(pairs=HUGE), "ends within its header"),
        (head(tensors=HUGE), "ends within its header"),
        (head(pairs=1) + struct.pack("<Q", HUGE) + b"key", "ends within its header"),
        (head(pairs=1) + pair(b"k", 8, struct.pack("<Q", HUGE)), "ends within its header"),
        (head(pairs=1) + pair(b"k", 9, struct.pack("<IQ", 4, HUGE)), "ends within its header"),
        (head(pairs=2) + pair(b"k", 9, struct.pack("<IQ", 4, HUGE)), "ends within its header"),
        (head(pairs=1) + pair(b"k", 9, struct.pack("<IQQ", 8, HUGE, HUGE)), "ends within"),
        (head(pairs=1) + pair(b"k", 9, struct.pack("<IQ", 9, 5000)), "unsupported type 9"),
        (head(pairs=1) + pair(b"k", 9, struct.pack("<IQ", 9, 1) * 9000), "nests arrays"),
        (head(pairs=1) + pair(ALIGNMENT, 4, struct.pack("<I", 0)), "alignment is 0"),
        (head(pairs=1) + pair(ALIGNMENT, 6, struct.pack("<f", 32.0)), "alignment is 32.0"),
        (head(pairs=1) + pair(ALIGNMENT, 8, struct.pack("<Q", 1) + b"x"), "alignment is 'x'"),
        (head(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2), "ends within"),
        (head(tensors=1) + struct.pack("<QI", 0, 2**32 - 1), "ends within its header"),
    ],
)
def test_a_damaged_header_is_refused_with_what_is_wrong(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=message):
        read_gguf_header(tmp_path / "bad.gguf")


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_file_with_wrong_bytes_is_read_or_refused(
    tiny: Path, scratch: Path, data: st.DataObject
) -> None:
    content = bytearray(tiny.read_bytes()[:4000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 600) | st.integers(0, len(content) - 8))
        width = data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    scratch.write_bytes(content)
    try:
        header = read_gguf_header(scratch)
    except GgufError:
        return
    assert header.data_bytes >= 0


# ---- Facts -------------------------------------------------------------------------------------

BASE = {
    "block_count": 6,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "context_length": 4096,
    "attention__head_count": 8,
}


def test_the_facts_of_a_plain_model(tiny: Path) -> None:
    facts = gguf_facts(read_gguf_header(tiny))
    assert dict(facts) == {
        "architecture": "llama", "layers": 2, "embedding_length": 64, "feed_forward_length": 128,
        "trained_context_tokens": 4096, "vocabulary": 512, "heads": 4, "kv_heads_global": 8,
        "kv_heads_window": 0, "key_length": 64, "value_length": 64, "kv_layers": 2,
        "window_layers": 0, "draft_layers": 0, "draft_weights_bytes": 0,
        "chat_template": True,
            "weights_bytes": read_gguf_header(tiny).data_bytes,
        "embedding_bytes": 512 * 64 * 4, "output_bytes": 512 * 64 * 4,
    }  # fmt: skip


def test_without_other_words_every_head_has_its_own_kv(tmp_path: Path) -> None:
    facts = facts_of(tmp_path / "m.gguf", "llama", **BASE)
    assert (facts["kv_heads_global"], facts["key_length"], facts["value_length"]) == (48, 8, 8)
    assert "window_tokens" not in facts
    assert "vocabulary" not in facts


def test_grouped_heads_and_stated_lengths_count(tmp_path: Path) -> None:
    stated = {"head_count_kv": 2, "key_length": 192, "value_length": 128}
    facts = facts_of(
        tmp_path / "m.gguf", "llama", **BASE, **{f"attention__{k}": v for k, v in stated.items()}
    )
    assert (facts["kv_heads_global"], facts["key_length"], facts["value_length"]) == (12, 192, 128)


def test_heads_that_differ_from_layer_to_layer_are_summed(tmp_path: Path) -> None:
    base = {**BASE, "attention__head_count": [8, 4, 8, 4, 8, 4]}
    facts = facts_of(
        tmp_path / "m.gguf", "deci", **base, attention__head_count_kv=[1, 0, 2, 0, 3, 0]
    )
    assert (facts["heads"], facts["kv_heads_global"], facts["kv_heads_window"]) == (8, 6, 0)
    assert facts["key_length"] == 8


@pytest.mark.parametrize(
    ("architecture", "pattern", "sliding"),
    [
        ("gemma2", None, [0, 2, 4]),
        ("gemma3", None, [0, 1, 2, 3, 4]),
        ("cohere2", None, [0, 1, 2, 4, 5]),
        ("unheard-of", None, []),
        ("gemma3", 3, [0, 1, 3, 4]),
        ("gpt-oss", 2, [0, 2, 4]),
        ("gemma4", [True, False, False, True, True, False], [0, 3, 4]),
        ("mimo", [1, 0, 0, 1, 1, 0], [0, 3, 4]),
    ],
)
def test_layers_with_a_window_are_counted_apart(
    tmp_path: Path, architecture: str, pattern: Any, sliding: list[int]
) -> None:
    kv = [1, 2, 4, 8, 16, 32]  # each layer has a bit of its own in the sums
    more = {} if pattern is None else {"attention__sliding_window_pattern": pattern}
    facts = facts_of(
        tmp_path / "m.gguf", architecture, **BASE, **more,
        attention__head_count_kv=kv, attention__sliding_window=512,
    )  # fmt: skip
    assert facts["kv_heads_window"] == sum(kv[layer] for layer in sliding)
    assert facts["kv_heads_global"] == sum(kv) - sum(kv[layer] for layer in sliding)
    assert facts["window_tokens"] == 512


@pytest.mark.parametrize("window", [None, 0])
def test_a_pattern_without_a_window_slides_nowhere(tmp_path: Path, window: int | None) -> None:
    more = {} if window is None else {"attention__sliding_window": window}
    facts = facts_of(tmp_path / "m.gguf", "gemma3", **BASE, **more)
    assert (facts["kv_heads_global"], facts["kv_heads_window"]) == (48, 0)


@pytest.mark.parametrize("missing", [(), *itertools.combinations(BASE, 1), tuple(BASE)])
def test_a_file_that_says_little_has_few_facts(tmp_path: Path, missing: tuple[str, ...]) -> None:
    said = {name: value for name, value in BASE.items() if name not in missing}
    facts = facts_of(tmp_path / "m.gguf", "llama", **said)
    assert facts["weights_bytes"] == 128
    assert ("layers" in facts) == ("block_count" in said)
    needed = {"block_count", "attention__head_count", "embedding_length"}
    assert ("kv_heads_global" in facts) == (needed <= {*said})
    assert None not in facts.values()
