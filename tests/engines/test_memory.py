"""What engines take of memory, against what they printed, and what published setups needed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_architecture import NEMOTRON_3_NANO, QWEN3_NEXT

from sweeper.core.architecture import from_facts
from sweeper.core.architecture_hf import from_hf_config, hf_facts
from sweeper.core.memory import Boot, MemoryModel, Size, excess
from sweeper.core.pairs import Pairs
from sweeper.engines import ModelFacts, estimated, load_engine, shown
from sweeper.engines.llamacpp import LlamaCpp
from sweeper.engines.vllm import Vllm
from sweeper.engines.vllm_memory import hybrid_block, request_bytes

GIB = 2**30
LOGS = Path(__file__).parent / "logs"
VLLM, LLAMA = Vllm(), LlamaCpp()
QUICK = settings(deadline=None, max_examples=60)


def model(facts: Pairs, **more: Any) -> ModelFacts:
    size = facts.get("weights_bytes", 0)
    assert isinstance(size, int)
    return ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=size, sha256="", facts=facts, **more
    )


# ---- vLLM --------------------------------------------------------------------------------------


def test_the_pool_of_a_hybrid_is_dealt_as_the_engine_printed_it() -> None:
    # A real boot of a hybrid of 40 layers, every fourth of which attends, with one draft layer.
    log = (LOGS / "vllm" / "ok_mtp.log").read_text(encoding="utf-8")
    block = re.search(r"attention block size to (\d+) tokens", log)
    padding = re.search(r"Padding mamba page size by ([\d.]+)%", log)
    pool = re.search(r"Available KV cache memory: ([\d.]+) GiB", log)
    at_once = re.search(r"Maximum concurrency for 8,192 tokens per request: ([\d.]+)x", log)
    assert block
    assert padding
    assert pool
    assert at_once
    hybrid = from_hf_config({**QWEN3_NEXT, "num_hidden_layers": 40, "mtp_num_hidden_layers": 1})
    tokens, page = hybrid_block(hybrid, 16, drafts=2)
    state = hybrid.recurrent.layer_bytes(state_bits=16, conv_bits=16, more_taps=2)
    assert tokens == int(block[1])
    assert 100 * (page - state) / state == pytest.approx(float(padding[1]), abs=0.01)
    a_request = request_bytes(hybrid, 8192, 16, drafts=2, own_drafts=True)
    assert float(pool[1]) * GIB / a_request == pytest.approx(float(at_once[1]), rel=1e-3)


def test_the_hybrid_with_six_attention_layers_takes_3_20_kib_a_token_at_fp8() -> None:
    # 3.00 KiB are keys and values. The 23 states of 2.04 MiB are kept in the same pool: a block
    # is made as long as one state (4,176 tokens), and a request takes 63 blocks of 6 layers for
    # its tokens and 4 for the states, 67 x 6 x 4,176 x 512 bytes.
    nano = from_hf_config(NEMOTRON_3_NANO)
    a_request = request_bytes(nano, 262_144, 8)
    assert hybrid_block(nano, 8) == (4176, 4176 * 512)
    assert a_request == 67 * 6 * 4176 * 512
    assert a_request / 262_144 / 1024 == pytest.approx(3.20, abs=0.005)
    assert a_request < GIB


def test_a_plain_model_takes_whole_blocks_and_a_window_with_a_batch_beside_it() -> None:
    plain = from_facts(Pairs(layers=2, kv_heads=4, key_length=8, value_length=8))
    assert request_bytes(plain, 17, 16) == 32 * plain.kv_bytes_per_token(16)
    window = from_facts(
        Pairs(layers=2, window_layers=1, window_tokens=100, kv_heads=4, key_length=8,
              value_length=8)
    )  # fmt: skip
    a_layer = 4 * 16 * 2
    assert request_bytes(window, 4096, 16, batched_tokens=512) == a_layer * (4096 + 100 + 512)


def test_a_checkpoint_that_asks_for_fp8_has_an_fp8_cache_by_default() -> None:
    nano = model(hf_facts(NEMOTRON_3_NANO).with_(weights_bytes=19 * 10**9))
    auto, fp8, bf16 = (
        VLLM.estimate(VLLM.settings({"max_model_len": 262_144, "kv_cache_dtype": kind}), nano)
        for kind in ("auto", "fp8", "bfloat16")
    )
    assert auto == fp8
    assert fp8.part("kv_cache").mean < GIB < bf16.part("kv_cache").mean


def test_the_draft_head_that_does_not_fit_is_seen_to_lack_room() -> None:
    # Published: 16.87 GiB loaded, of which the head has 2.37, on a card of 23.42 GiB at 0.97.
    facts = hf_facts({**QWEN3_NEXT, "num_hidden_layers": 64, "mtp_num_hidden_layers": 1}).with_(
        weights_bytes=round(23.0 * GIB), draft_weights_bytes=round(2.37 * GIB),
        vocabulary=248_320, embedding_length=5120,
    )  # fmt: skip
    params = {"max_model_len": 75_000, "max_num_seqs": 1, "enforce_eager": True}
    drafting = VLLM.estimate(
        VLLM.settings({**params, "spec_method": "mtp", "n_max": 1}), model(facts)
    )
    without = VLLM.estimate(VLLM.settings(params), model(facts))
    assert drafting.part("draft_weights").mean == round(2.37 * GIB)
    assert without.part("draft_weights").mean == 0
    assert drafting.part("kv_cache").mean > without.part("kv_cache").mean
    assert excess(drafting, 23.42 * 0.97 * GIB).fits < excess(without, 23.42 * 0.97 * GIB).fits


def test_eager_has_no_graphs_and_a_short_list_has_few() -> None:
    nano = model(hf_facts(NEMOTRON_3_NANO))
    eager, few, usual = (
        VLLM.estimate(VLLM.settings(params), nano).part("graphs").mean
        for params in (
            {"enforce_eager": True},
            {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": "1,2,4"},
            {},
        )
    )
    assert eager == 0
    assert 0 < few < usual / 20


def test_what_a_vllm_boot_printed_corrects_its_components() -> None:
    asked = VLLM.settings({"max_model_len": 8192})
    log = (LOGS / "vllm" / "ok.log").read_text(encoding="utf-8").split("\n")
    printed = shown(VLLM, asked, VLLM.evidence(log))
    assert {"weights+draft_weights", "kv_cache", "graphs"} <= set(printed)
    before = VLLM.estimate(asked, model(Pairs(weights_bytes=20 * GIB, kv_bytes_per_token=98_304)))
    after = MemoryModel.of([Boot(estimate=before, shown=printed)]).corrected(before)
    assert after.spread < before.spread
    weights = printed["weights+draft_weights"]
    assert isinstance(weights, float | int)
    assert abs(after.part("weights").mean - weights) < abs(before.part("weights").mean - weights)


RANDOM_15B = Pairs(
    architecture="Qwen3MoeForCausalLM", draft_layers=0, embedding_length=2048,
    feed_forward_length=6144, heads=32, key_length=128, value_length=128, kv_heads_global=96,
    kv_heads_window=0, kv_layers=24, layers=24, window_layers=0, trained_context_tokens=262_144,
    vocabulary=151_936, weights_bytes=16_267_000_000,
)  # fmt: skip
"""A qwen3moe of 24 layers and 128 experts, of random weights, made fp8 while it is loaded."""


@pytest.mark.parametrize(
    ("pool_gib", "params"),
    [
        (5.46, {}),
        (5.46, {"kv_cache_dtype": "fp8"}),
        (5.74, {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        (5.96, {"enforce_eager": True}),
        (4.98, {"gpu_memory_utilization": 0.9}),
    ],
)
def test_the_pool_that_vllm_had_on_an_h200_is_foreseen(
    pool_gib: float, params: dict[str, Any]
) -> None:
    """What vLLM 0.24 printed as available for the cache; all but 24 GiB of the card were held."""
    asked = VLLM.settings({"max_model_len": 8192, "quantization": "fp8", **params})
    needs = VLLM.estimate(asked, model(RANDOM_15B))
    left = VLLM.share(asked) * 24 * GIB - needs.mean + needs.part("kv_cache").mean
    assert abs(left - pool_gib * GIB) < 0.01 * 24 * GIB


# ---- llama.cpp ---------------------------------------------------------------------------------

# Qwen3.6-35B-A3B with its draft layer: 40 layers, every fourth attends with 2 heads of 256.
QWEN_35B = hf_facts(
    {**QWEN3_NEXT, "num_hidden_layers": 40, "mtp_num_hidden_layers": 1, "vocab_size": 248_320}
).with_(architecture="qwen35moe", weights_bytes=17_200_000_000)
LAPTOP = 23.42 * GIB


def test_published_boots_of_a_draft_layer_on_a_24_gb_card_are_told_apart() -> None:
    def fits(weights: int, kv: str) -> float:
        asked = LLAMA.settings({
            "context": 262_144, "cache_type_k": kv, "cache_type_v": kv, "flash_attn": "on",
            "spec_type": "draft-mtp", "n_max": 3, "parallel": 1,
        })  # fmt: skip
        needs = LLAMA.estimate(asked, model(QWEN_35B.with_(weights_bytes=weights)))
        return excess(needs, LAPTOP).fits

    assert fits(17_200_000_000, "q4_0") > 0.9
    # The larger file loads, and fails at the KV cache.
    assert fits(22_000_000_000, "f16") < 0.01


def test_the_longest_context_of_the_published_setup_needs_about_21_9_gb() -> None:
    asked = LLAMA.settings({
        "context": 262_144, "cache_type_k": "q4_0", "cache_type_v": "q4_0", "flash_attn": "on",
        "spec_type": "draft-mtp", "n_max": 3, "parallel": 1,
    })  # fmt: skip
    needs = LLAMA.estimate(asked, model(QWEN_35B))
    assert needs.part("kv_cache").mean == 262_144 * 10 * 2 * 2 * 256 * 4.5 / 8
    assert needs.part("draft_kv").mean == 262_144 * 2 * 2 * 256 * 2
    assert abs(needs.mean - 21.9e9) < 2 * needs.spread
    assert needs.mean == pytest.approx(21.9e9, rel=0.1)


def test_states_are_kept_for_each_slot_and_each_draft_to_go_back() -> None:
    def state(**params: Any) -> float:
        return LLAMA.estimate(LLAMA.settings(params), model(QWEN_35B)).part("state").mean

    one = 30 * (128 * 4096 + 3 * 8192) * 4
    assert state() == one
    assert state(parallel=4, context=4096) == 4 * one
    assert state(spec_type="draft-mtp", n_max=3) == 4 * one
    assert state(spec_type="ngram-simple", n_max=3) == one


def test_layers_left_to_the_processor_are_not_on_the_card() -> None:
    whole, half, experts = (
        LLAMA.estimate(LLAMA.settings(params), model(QWEN_35B)).part("weights")
        for params in ({"gpu_layers": 41}, {"gpu_layers": 20}, {"n_cpu_moe": 20})
    )
    assert half.mean == pytest.approx(whole.mean * 20 / 41)
    assert whole.mean > experts.mean > whole.mean / 4
    assert experts.spread / experts.mean > whole.spread / whole.mean


def test_experts_left_to_the_processor_leave_the_whole_cache_on_the_card() -> None:
    def cache(**params: Any) -> Size:
        return LLAMA.estimate(LLAMA.settings({"context": 131_072, **params}), model(QWEN_35B)).part(
            "kv_cache"
        )

    whole = cache(gpu_layers="all")
    assert cache(gpu_layers="all", n_cpu_moe=20) == whole
    assert cache(gpu_layers="all", override_tensor="exps=CPU") == whole
    assert cache(gpu_layers=20).mean == pytest.approx(whole.mean * 20 / 41)


RANDOM_30B = Pairs(
    architecture="qwen3moe", embedding_bytes=175_030_272, embedding_length=2048,
    feed_forward_length=6144, heads=32, key_length=128, value_length=128, kv_heads_global=192,
    kv_heads_window=0, kv_layers=48, layers=48, window_layers=0, output_bytes=175_030_272,
    trained_context_tokens=262_144, vocabulary=151_936, weights_bytes=17_218_297_856,
)  # fmt: skip
"""A qwen3moe of 48 layers and 128 experts in Q4_0, of random weights."""


@pytest.mark.parametrize(
    ("in_use_mib", "params"),
    [
        (17_715, {"flash_attn": "on", "parallel": 4}),
        (17_715, {"flash_attn": "on"}),
        (17_357, {"flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
        (18_207, {"flash_attn": "off"}),
        (17_992, {"flash_attn": "on", "batch": 4096, "ubatch": 2048}),
        (29_358, {"flash_attn": "on", "context": 131_072}),
        (15_206, {"flash_attn": "on", "n_cpu_moe": 8}),
        (10_025, {"flash_attn": "on", "n_cpu_moe": 24}),
        (9_042, {"flash_attn": "on", "gpu_layers": 24}),
    ],
)
def test_what_llama_cpp_took_of_an_h200_is_foreseen(
    in_use_mib: int, params: dict[str, Any]
) -> None:
    """Bytes in use on the card when the server was ready (llama.cpp b11434, one boot each)."""
    asked = LLAMA.settings({"context": 8192, "gpu_layers": "all", **params})
    error = LLAMA.estimate(asked, model(RANDOM_30B)).mean - in_use_mib * 2**20
    assert abs(error) < 0.0125 * 24 * GIB


def test_a_log_of_llama_cpp_shows_components_by_name() -> None:
    evidence = Pairs(weights_bytes=1, kv_cache_bytes=2, draft_kv_cache_bytes=3, rs_bytes=4, x=5)
    assert dict(shown(LLAMA, LLAMA.settings({}), evidence)) == {
        "weights+draft_weights": 1, "kv_cache": 2, "draft_kv": 3, "state": 4,
    }  # fmt: skip


some = st.fixed_dictionaries({
    "context": st.integers(64, 300_000),
    "ubatch": st.integers(1, 4096),
    "n_max": st.integers(1, 16),
    "parallel": st.integers(1, 8),
    "cache_type_k": st.sampled_from(["q4_0", "q8_0", "f16"]),
    "spec_type": st.sampled_from(["draft-mtp", "ngram-simple"]),
})  # fmt: skip


@QUICK
@given(some, st.sampled_from(["context", "ubatch", "n_max", "parallel"]), st.integers(0, 60))
def test_asking_for_more_never_needs_less(params: dict[str, Any], name: str, more: int) -> None:
    less, greater = (
        LLAMA.estimate(LLAMA.settings(each), model(QWEN_35B))
        for each in (params, {**params, name: params[name] + more})
    )
    assert all(greater.part(part).mean >= size.mean for part, size in less.parts)
    footprints = [
        LLAMA.footprint(LLAMA.settings(each), model(QWEN_35B))
        for each in (params, {**params, name: params[name] + more})
    ]
    assert footprints[1].needs_at_least(footprints[0])


# ---- Any engine --------------------------------------------------------------------------------


def test_an_engine_that_knows_no_spread_is_estimated_from_its_footprint() -> None:
    fake = load_engine("fake")
    asked = fake.settings({"n_max": 2})
    needs = estimated(fake, asked, model(Pairs()))
    assert needs.mean == fake.footprint(asked, model(Pairs())).total_bytes
    assert needs.spread > 0
    printed = shown(fake, asked, Pairs(weights_bytes=7, capacity_bytes=9, simulated=True))
    assert dict(printed) == {"weights": 7, "capacity": 9}


def test_a_model_without_facts_has_an_estimate_that_is_not_sure() -> None:
    bare = replace(model(Pairs()), size_bytes=GIB)
    for engine, params in ((LLAMA, {"context": 32_768}), (VLLM, {"max_model_len": 32_768})):
        needs = estimated(engine, engine.settings(params), bare)
        assert needs.part("weights").mean == GIB
        assert needs.part("kv_cache").mean == 0
        assert needs.part("kv_cache").spread > GIB
