"""What models keep for their tokens, from published configs and from headers of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_gguf import kv_bytes_per_token, write_tiny_gguf

from sweeper.core.architecture import (
    FACTS,
    VALUE_BITS,
    Architecture,
    Cached,
    CannotTell,
    Recurrent,
    from_facts,
    value_bits,
    weights_of,
)
from sweeper.core.architecture_gguf import from_gguf
from sweeper.core.architecture_hf import from_hf_config, hf_facts
from sweeper.core.pairs import Pairs
from sweeper.gguf_header import read_gguf_header
from sweeper.models import gguf_facts

KIB, GIB = 2**10, 2**30

# ---- Published configs -------------------------------------------------------------------------

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
NEMOTRON_3_NANO: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 2688, "expand": 2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32",
    "quantization_config": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
GEMMA_3_270M: dict[str, Any] = {
    "model_type": "gemma3_text", "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 640, "sliding_window": 512,
}  # fmt: skip


def test_a_token_of_llama_3_8b_takes_128_kib_at_16_bits() -> None:
    llama = from_hf_config(LLAMA_3_8B)
    assert llama.kv_bytes_per_token(16) == 128 * KIB
    assert llama.kv_bytes(8192, 16) == GIB
    assert llama.kv_bytes_per_token(8.5, 4.5) == 128 * KIB * (8.5 + 4.5) / 32
    assert (llama.state_bytes(), llama.draft_kv_bytes(8192, 16)) == (0, 0)


def test_latent_attention_keeps_the_latent_and_its_rotary_part() -> None:
    deepseek = from_hf_config(DEEPSEEK_V3)
    assert deepseek.kv_bytes_per_token(16) == (512 + 64) * 61 * 2
    assert deepseek.draft_kv_bytes(1, 16) == (512 + 64) * 2
    assert hf_facts(DEEPSEEK_V3)["quantization"] == "fp8"


def test_in_a_hybrid_only_every_fourth_layer_keeps_tokens() -> None:
    hybrid = from_hf_config(QWEN3_NEXT)
    assert (hybrid.full.layers, hybrid.recurrent.layers) == (12, 36)
    assert hybrid.kv_bytes_per_token(16) == 12 * 2 * 2 * 256 * 2
    # As llama.cpp counts it: d_state x d_inner, and 3 x (d_inner + 2 x groups x d_state).
    assert hybrid.state_bytes(state_bits=32) == 36 * (128 * 4096 + 3 * 8192) * 4


def test_six_of_52_layers_of_the_nvfp4_hybrid_keep_tokens() -> None:
    nano = from_hf_config(NEMOTRON_3_NANO)
    assert (nano.layers, nano.full.layers, nano.recurrent.layers) == (52, 6, 23)
    # 6 layers x keys and values x 2 heads x 128 x 1 byte. vLLM's pool takes 3.20 KiB, since it
    # keeps the states in blocks of the same pool: see tests/engines/test_memory.py.
    assert nano.kv_bytes_per_token(8) == 3 * KIB
    assert nano.kv_bytes(262_144, 8) + nano.state_bytes() < GIB
    assert nano.state_bits == 32
    assert nano.draft == Cached()
    facts = hf_facts(NEMOTRON_3_NANO)
    assert (facts["quantization"], facts["kv_cache_bits"]) == ("nvfp4", 8)
    assert facts["draft_layers"] == 0


def test_a_window_keeps_no_more_than_it_holds() -> None:
    gpt = from_hf_config(GPT_OSS_20B)
    a_layer = 2 * 8 * 64 * 2
    assert gpt.kv_bytes(100, 16) == 24 * 100 * a_layer
    assert gpt.kv_bytes(10_000, 16) == 12 * a_layer * (10_000 + 128)
    assert gpt.kv_bytes_per_token(16) == 12 * a_layer


def test_the_same_model_is_the_same_from_either_format() -> None:
    metadata = {
        "general.architecture": "gemma3", "gemma3.block_count": 18,
        "gemma3.attention.head_count": 4, "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 256, "gemma3.attention.value_length": 256,
        "gemma3.attention.sliding_window": 512, "gemma3.embedding_length": 640,
    }  # fmt: skip
    gemma = from_gguf(metadata)
    assert gemma == from_hf_config(GEMMA_3_270M)
    # What llama.cpp prints for a context of 8,192 with a micro-batch of 512: 24 and 15 MiB.
    assert gemma.kv_bytes(8192, 16, window_tokens=1024) == (24 + 15) * 2**20


@pytest.mark.parametrize(
    ("config", "full", "window", "recurrent"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}, 13, 13, 0),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 35, "sliding_window": 512,
          "num_kv_shared_layers": 15}, 4, 16, 0),
        ({"model_type": "gemma4_text", "num_hidden_layers": 30, "sliding_window": 512}, 5, 25, 0),
        ({"model_type": "mistral", "sliding_window": 4096}, 0, 32, 0),
        ({"model_type": "mistral", "sliding_window": None}, 32, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False,
          "max_window_layers": 28}, 32, 0, 0),
        ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": True,
          "max_window_layers": 28}, 28, 4, 0),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, 8, 24, 0),
        ({"model_type": "exaone4", "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
         8, 24, 0),
        ({"model_type": "mimo_v2_flash", "sliding_window": 128,
          "hybrid_layer_pattern": [0, 1, 1, 1] * 8}, 8, 24, 0),
        ({"model_type": "lfm2", "full_attn_idxs": [2, 5], "conv_L_cache": 3}, 2, 0, 30),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4,
          "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}, 4, 0, 28),
        ({"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128,
          "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4},
         3, 0, 29),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64,
          "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}, 32, 0, 32),
        ({"model_type": "kimi_linear", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
          "linear_attn_config": {"full_attn_layers": [4, 8], "num_heads": 32, "head_dim": 128,
                                 "short_conv_kernel_size": 4}}, 2, 0, 30),
        ({"model_type": "mamba2", "num_heads": 80, "head_dim": 64, "state_size": 128,
          "n_groups": 1, "conv_kernel": 4}, 0, 0, 32),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"],
          "attention_window_size": 2048, "lru_width": 2560, "conv1d_width": 4}, 0, 10, 22),
        ({"model_type": "minimax", "attn_type_list": ([0] * 7 + [1]) * 4}, 4, 0, 28),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 8,
          "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
          "conv_kernel": 4}, 8, 0, 8),
    ],
)  # fmt: skip
def test_each_layer_keeps_what_its_kind_keeps(
    config: dict[str, Any], full: int, window: int, recurrent: int
) -> None:
    usual = {
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "hidden_size": 2048,
    }  # fmt: skip
    read = from_hf_config({**usual, **config})
    assert (read.full.layers, read.window.layers, read.recurrent.layers) == (
        full, window, recurrent,
    )  # fmt: skip
    assert (read.recurrent.layer_bytes() > 0) == (recurrent > 0)


def test_the_part_for_text_of_a_larger_config_counts() -> None:
    inner = {key: value for key, value in LLAMA_3_8B.items() if key != "architectures"}
    for wrapped in (
        {"model_type": "llava", "text_config": inner, "hidden_size": 1},
        {"model_type": "x_omni", "thinker_config": {"text_config": inner}},
        {"model_type": "nano_vl", "llm_config": inner, "vision_config": {"num_hidden_layers": 3}},
    ):
        assert from_hf_config(wrapped) == from_hf_config(LLAMA_3_8B)


def test_heads_and_lengths_may_differ_between_layers() -> None:
    gemma4 = from_hf_config({
        "model_type": "gemma4_text", "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "attention_k_eq_v": True, "num_global_key_value_heads": 2, "sliding_window": 1024,
        "hidden_size": 2816,
    })  # fmt: skip
    assert (gemma4.full.heads, gemma4.full.key_length) == (5 * 2, 512)
    assert (gemma4.window.heads, gemma4.window.key_length) == (25 * 8, 256)
    mimo = from_hf_config({
        "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8,
        "hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 128,
    })  # fmt: skip
    assert mimo.full == Cached(layers=1, heads=4, key_length=192, value_length=128)
    assert mimo.window == Cached(layers=3, heads=24, key_length=192, value_length=128)
    pruned = from_hf_config({
        "model_type": "nemotron-nas", "num_hidden_layers": 3, "num_attention_heads": 64,
        "hidden_size": 8192, "block_configs": [
            {"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}},
            {"attention": {"n_heads_in_group": 16}},
        ],
    })  # fmt: skip
    assert pruned.full.heads == 8 + 0 + 4


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_draft_layers_have_a_cache_like_those_of_the_model(name: str) -> None:
    drafting = from_hf_config({**QWEN3_NEXT, name: 2})
    assert drafting.draft == Cached(layers=2, heads=4, key_length=256, value_length=256)
    assert drafting.draft_kv_bytes(1000, 16) == 1000 * 2 * 2 * 2 * 256 * 2
    assert drafting.kv_bytes_per_token(16) == from_hf_config(QWEN3_NEXT).kv_bytes_per_token(16)


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_key_value_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "head_dim"),
        ({**LLAMA_3_8B, "layer_types": ["full_attention"]}, "1 layers, and has 32"),
        ({**LLAMA_3_8B, "layer_types": ["holographic"] * 32}, "holographic"),
        ({**LLAMA_3_8B, "hybrid_override_pattern": "?" * 32}, r"kind \?"),
        ({**LLAMA_3_8B, "sliding_window": 512}, "in which layers"),
        ({**LLAMA_3_8B, "layer_types": ["sliding_attention"] * 32}, "how long it is"),
        ({**LLAMA_3_8B, "mamba_d_state": 16}, "which layers attend"),
        ({**LLAMA_3_8B, "layer_types": ["mamba"] * 32}, "ssm_state_size"),
        ({**LLAMA_3_8B, "kv_lora_rank": 512}, "latent keys"),
        ({**LLAMA_3_8B, "model_type": "longcat_flash"}, "longcat_flash"),
        ({**LLAMA_3_8B, "is_encoder_decoder": True}, "encoder"),
        ({**LLAMA_3_8B, "num_key_value_heads": [8, 8]}, "KV heads of 2 layers"),
    ],
)
def test_what_a_config_does_not_tell_is_not_guessed(config: dict[str, Any], lacks: str) -> None:
    with pytest.raises(CannotTell, match=lacks):
        from_hf_config(config)
    facts = hf_facts(config)
    assert "kv_heads_global" not in facts
    assert facts.get("layers") == config.get("num_hidden_layers")


# ---- Cache types -------------------------------------------------------------------------------


def test_bits_count_the_scales_of_a_block() -> None:
    known = {"q4_0": 4.5, "q5_1": 6, "q8_0": 8.5, "q5_0": 5.5, "q4_1": 5, "iq4_nl": 4.5,
             "f16": 16, "bf16": 16, "f32": 32, "nvfp4": 4.5}  # fmt: skip
    assert {kind: value_bits(kind) for kind in known} == known
    assert {value_bits(kind) for kind in ("fp8", "fp8_e5m2", "fp8_e4m3", "INT8")} == {8}
    assert value_bits("turbo3") is None
    for kind, quantised in (("q4_0", "Q4_0"), ("q5_1", "Q5_1"), ("q8_0", "Q8_0")):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantised]]
        assert size * 8 / block == known[kind]


# ---- GGUF --------------------------------------------------------------------------------------


def metadata(architecture: str, **values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "block_count": 8, "embedding_length": 1024, "attention.head_count": 8,
        "attention.head_count_kv": 2, "attention.key_length": 128, "attention.value_length": 128,
    }  # fmt: skip
    stated = {**usual, **{name.replace("__", "."): value for name, value in values.items()}}
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{name}": value for name, value in stated.items() if value is not None},
    }


SSM = {"ssm__conv_kernel": 4, "ssm__inner_size": 4096, "ssm__state_size": 128,
       "ssm__group_count": 16}  # fmt: skip


def test_a_hybrid_in_a_gguf_keeps_tokens_in_every_fourth_layer_and_drafts_in_the_last() -> None:
    read = from_gguf(metadata("qwen35moe", block_count=41, nextn_predict_layers=1, **SSM))
    assert (read.layers, read.full.layers, read.recurrent.layers, read.draft.layers) == (
        40, 10, 30, 1,
    )  # fmt: skip
    assert read.recurrent == Recurrent(
        layers=30, state_values=128 * 4096, conv_width=4096 + 2 * 16 * 128, conv_taps=3
    )
    assert read.draft.heads == 2


@pytest.mark.parametrize(
    ("values", "full", "window", "recurrent"),
    [
        (metadata("llama"), 8, 0, 0),
        (metadata("nemotron_h", attention__head_count_kv=(0, 0, 2, 0, 0, 0, 2, 0),
                  feed_forward_length=(0, 9, 0, 9, 0, 9, 0, 9), **SSM), 2, 0, 2),
        (metadata("granitehybrid", attention__head_count_kv=(0, 0, 0, 2) * 2, **SSM), 2, 0, 6),
        (metadata("falcon-h1", **SSM), 8, 0, 8),
        (metadata("mamba2", attention__head_count=None, attention__head_count_kv=None, **SSM),
         0, 0, 8),
        (metadata("lfm2", attention__head_count_kv=(0, 2) * 4, shortconv__l_cache=3), 4, 0, 4),
        (metadata("kimi-linear", attention__head_count_kv=(0, 0, 0, 2) * 2, kda__head_dim=128,
                  ssm__conv_kernel=4), 2, 0, 6),
        (metadata("qwen3next", full_attention_interval=2, **SSM), 4, 0, 4),
        (metadata("minimax-01", attention__recurrent_layers=(True,) * 7 + (False,), **SSM),
         1, 0, 7),
        (metadata("gemma3n", attention__sliding_window=512, attention__shared_kv_layers=3), 1, 4,
         0),
        (metadata("gpt-oss", attention__sliding_window=128), 4, 4, 0),
        (metadata("smallthinker", attention__sliding_window=128), 2, 6, 0),
    ],
)  # fmt: skip
def test_each_layer_of_a_gguf_keeps_what_its_kind_keeps(
    values: dict[str, Any], full: int, window: int, recurrent: int
) -> None:
    read = from_gguf(values)
    assert (read.full.layers, read.window.layers, read.recurrent.layers) == (
        full, window, recurrent,
    )  # fmt: skip
    assert from_facts(read.facts()) == read


def test_latent_keys_in_a_gguf_keep_no_values() -> None:
    read = from_gguf(
        metadata(
            "deepseek2", block_count=62, nextn_predict_layers=1, attention__head_count_kv=1,
            attention__key_length=576, attention__value_length=512, attention__key_length_mla=192,
            attention__value_length_mla=128, attention__kv_lora_rank=512,
        )
    )  # fmt: skip
    assert read == from_hf_config(DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("values", "lacks"),
    [
        ({"general.architecture": "llama"}, "block_count"),
        (metadata("rwkv7", wkv__head_size=64), "rwkv7"),
        (metadata("new", **SSM), "which layers keep it"),
        (metadata("mamba", ssm__conv_kernel=4), "size of its state"),
        (metadata("llama", attention__head_count_kv=(2, 2)), "KV heads of 2 layers"),
        (metadata("llama", attention__head_count=None, attention__head_count_kv=None), "heads"),
        (metadata("llama", attention__key_length=None, embedding_length=None), "length of a key"),
    ],
)
def test_what_a_gguf_does_not_tell_is_not_guessed(values: dict[str, Any], lacks: str) -> None:
    with pytest.raises(CannotTell, match=lacks):
        from_gguf(values)


def test_a_real_file_tells_its_cache_and_its_weights(tmp_path: Path) -> None:
    header = read_gguf_header(write_tiny_gguf(tmp_path / "tiny.gguf"))
    facts = gguf_facts(header)
    assert from_facts(facts).kv_bytes_per_token(16) == kv_bytes_per_token()
    assert facts["weights_bytes"] == sum(each.size_bytes for each in header.tensors)
    assert set(facts) <= set(FACTS)


def test_the_weights_of_a_gguf_are_split_and_quantised_sizes_are_exact(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen35moe")
    writer.add_uint32("qwen35moe.block_count", 2)
    writer.add_uint32("qwen35moe.nextn_predict_layers", 1)
    for name, kind in (
        ("token_embd.weight", "Q4_0"), ("output.weight", "Q6_K"), ("blk.0.ffn_up.weight", "Q5_1"),
        ("blk.1.ffn_up.weight", "Q8_0"), ("blk.1.nextn.eh_proj.weight", "IQ4_NL"),
    ):  # fmt: skip
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        raw = np.zeros((4, 256 // block * size), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(tmp_path / "m.gguf")
    theirs = {each.name: each.n_bytes for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert {each.name: each.size_bytes for each in header.tensors} == theirs
    facts = gguf_facts(header)
    assert facts["weights_bytes"] == sum(theirs.values())
    assert facts["draft_weights_bytes"] == (
        theirs["blk.1.ffn_up.weight"] + theirs["blk.1.nextn.eh_proj.weight"]
    )
    assert facts["embedding_bytes"] == theirs["token_embd.weight"]
    assert facts["output_bytes"] == theirs["output.weight"]


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("model.layers.61.mlp.up_proj.weight", True),
        ("model.layers.60.mlp.up_proj.weight", False),
        ("mtp.layers.0.mlp.up_proj.weight", True),
        ("model.mtp_block.norm.weight", True),
        ("vision_tower.encoder.layers.70.mlp.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_tensors_past_the_last_layer_are_the_drafts(name: str, drafts: bool) -> None:
    weights = weights_of([(name, 7)], 61)
    assert (weights.draft_bytes, weights.main_bytes) == ((7, 0) if drafts else (0, 7))


# ---- Facts -------------------------------------------------------------------------------------

counts = st.integers(0, 80)


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    window = draw(st.booleans())
    states = draw(st.booleans())
    full_layers, window_layers = draw(st.integers(1, 60)), draw(counts) if window else 0
    state_layers = draw(st.integers(1, 60)) if states else 0
    key, value = draw(st.integers(1, 600)), draw(st.integers(0, 600))
    drafts = draw(st.integers(0, 3))

    def cached(layers: int) -> Cached:
        heads = layers * draw(st.integers(1, 16))
        return Cached(
            layers=layers,
            heads=heads,
            key_length=key if heads else 0,
            value_length=value if heads else 0,
        )

    return Architecture(
        layers=full_layers + window_layers + state_layers + draw(counts),
        full=cached(full_layers),
        window=cached(window_layers),
        window_tokens=draw(st.integers(1, 10_000)) if window else 0,
        recurrent=Recurrent(
            layers=state_layers, state_values=draw(st.integers(1, 10**6)), conv_width=9, conv_taps=3
        )
        if states
        else Recurrent(),
        draft=cached(drafts),
        state_bits=draw(st.sampled_from([None, 16, 32])),
    )


@given(architectures())
def test_facts_say_all_that_an_architecture_is(architecture: Architecture) -> None:
    facts = architecture.facts()
    assert from_facts(facts) == architecture
    assert set(facts) <= set(FACTS)


@given(architectures(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_more_context_never_takes_less(architecture: Architecture, tokens: int, more: int) -> None:
    bits = [4.5, 5, 5.5, 6, 8, 8.5, 16, 32]
    sizes = [architecture.kv_bytes(tokens, each) for each in bits]
    assert sizes == sorted(sizes)
    assert architecture.kv_bytes(tokens + more, 16) >= architecture.kv_bytes(tokens, 16)
    assert architecture.draft_kv_bytes(tokens + more, 16) >= architecture.draft_kv_bytes(tokens, 16)
    # Once the windows are full each token takes the same.
    edge = max(tokens, architecture.window_tokens)
    grown = architecture.kv_bytes(edge + 1, 16) - architecture.kv_bytes(edge, 16)
    assert grown == pytest.approx(architecture.kv_bytes_per_token(16))


def test_a_person_may_state_layers_and_heads() -> None:
    stated = Pairs(layers=52, kv_layers=6, kv_heads=2, key_length=128, value_length=128)
    assert from_facts(stated).kv_bytes_per_token(8) == 3 * KIB
    assert from_facts(Pairs(layers=2, kv_heads=4, key_length=8, value_length=8)).full.heads == 8
    window = Pairs(
        layers=18, window_layers=15, window_tokens=512, kv_heads=1, key_length=256, value_length=256
    )
    assert from_facts(window) == from_hf_config(GEMMA_3_270M)
    drafting = from_facts(stated.with_(draft_layers=1))
    assert drafting.draft == Cached(layers=1, heads=2, key_length=128, value_length=128)
    assert from_facts(Pairs(kv_bytes_per_token=128 * KIB)).kv_bytes_per_token(8) == 64 * KIB


@pytest.mark.parametrize(
    ("facts", "lacks"),
    [
        (Pairs(), "kv_heads_global"),
        (Pairs(kv_heads=2, key_length=1, value_length=1), "kv_heads_global"),
        (Pairs(kv_heads_global=2), "key_length"),
        (Pairs(kv_heads_global=3, kv_heads=2, kv_layers=2, key_length=1, value_length=1), "is not"),
        (Pairs(kv_heads_global=3, kv_heads_window=2, key_length=1, value_length=1), "window_tok"),
        (Pairs(kv_heads_global=3, window_layers=2, key_length=1, value_length=1), "kv_heads_win"),
        (Pairs(layers=2, kv_heads=2, window_layers=3, key_length=1, value_length=1), "fewer"),
        (Pairs(layers=2, kv_heads=1, state_layers=1, key_length=1, value_length=1), "state_values"),
        (Pairs(kv_heads_global=3, draft_layers=1, key_length=1, value_length=1), "draft_kv_heads"),
    ],
)
def test_facts_that_lack_something_say_what(facts: Pairs, lacks: str) -> None:
    with pytest.raises(CannotTell, match=lacks):
        from_facts(facts)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="heads must not be negative"):
        Cached(heads=-1)
    with pytest.raises(ValueError, match="window_tokens"):
        Architecture(window=Cached(layers=1, heads=1, key_length=1))
    assert all(bits > 0 for bits in VALUE_BITS.values())
