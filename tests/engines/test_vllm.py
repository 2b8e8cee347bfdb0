"""The vLLM adapter, purely: its flags, its memory, and what its logs mean."""

# ruff: noqa: E501 - the engine's lines are as long as they are

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.launch import Death, Ended, Launch, Phase
from sweeper.core.outcome import HostFault, Infeasible, Nothing, Outcome, kind, name
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.vllm import Vllm, VllmSettings
from sweeper.engines.vllm_endings import GIB

VLLM = Vllm()
HERE = Path(__file__).parent
LOGS = HERE / "logs" / "vllm"
CPU_LOGS = HERE / "logs" / "vllm_cpu"
MIB = 2**20
MODEL = ModelFacts(
    name="m",
    path="/models/m",
    served_name="m",
    size_bytes=8 * GIB,
    sha256="",
    facts=Pairs(
        kv_heads_global=32, key_length=128, value_length=128, embedding_length=2048,
        feed_forward_length=8192, vocabulary=32_000,
    ),
)  # fmt: skip
QUICK = settings(deadline=None, max_examples=60)


def log_of(log: str, folder: Path = LOGS) -> list[str]:
    return (folder / f"{log}.log").read_text(encoding="utf-8").split("\n")


def exited(code: int | None, *, was_ready: bool = False) -> Death:
    return Death(ended=Ended.EXITED, after_s=1.0, was_ready=was_ready, exit_code=code)


def launched(
    model: ModelFacts = MODEL, options: EngineOptions | None = None, **params: Any
) -> Launch:
    options = options or EngineOptions(python="/venv/bin/python")
    return VLLM.launch(VLLM.settings(params), model, options, 8011)


def flags(model: ModelFacts = MODEL, **params: Any) -> list[str]:
    return list(launched(model, **params).argv)


def value(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


# ---- Settings and flags ------------------------------------------------------------------------


def test_the_adapter_is_an_engine_that_invents_nothing() -> None:
    engine: Engine = VLLM
    assert not engine.simulated
    assert set(VLLM.setting_names()) == set(VllmSettings.__annotations__)


def test_what_is_not_set_is_left_to_the_engine() -> None:
    assert flags() == [
        "/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m",
        "--served-model-name", "m", "--host", "127.0.0.1", "--port", "8011",
        "--no-enable-prefix-caching",
    ]  # fmt: skip


def test_repeats_are_not_answered_from_a_cache_of_prefixes_unless_a_study_wants_it() -> None:
    assert "--no-enable-prefix-caching" in flags(max_model_len=1)
    assert "--enable-prefix-caching" in flags(enable_prefix_caching=True)
    assert not [each for each in flags(enable_prefix_caching=None) if "prefix" in each]


def test_what_is_set_becomes_a_flag() -> None:
    argv = flags(
        max_model_len=8192, quantization="fp8", dtype="bfloat16", load_format="dummy",
        kv_cache_dtype="fp8_e4m3", gpu_memory_utilization=0.9, kv_cache_memory_bytes=2**31,
        max_num_seqs=4, max_num_batched_tokens=2048, attention_backend="FLASH_ATTN",
        moe_backend="triton", tensor_parallel_size=2, pipeline_parallel_size=1,
        reasoning_parser="a", tool_call_parser="b", seed=0, enforce_eager=True,
        language_model_only=True, trust_remote_code=True, enable_prefix_caching=False,
        enable_chunked_prefill=True,
    )  # fmt: skip
    expected = {
        "--max-model-len": "8192", "--quantization": "fp8", "--dtype": "bfloat16",
        "--load-format": "dummy", "--kv-cache-dtype": "fp8_e4m3",
        "--gpu-memory-utilization": "0.9", "--kv-cache-memory-bytes": "2147483648",
        "--max-num-seqs": "4", "--max-num-batched-tokens": "2048",
        "--attention-backend": "FLASH_ATTN", "--moe-backend": "triton",
        "--tensor-parallel-size": "2", "--pipeline-parallel-size": "1",
        "--reasoning-parser": "a", "--tool-call-parser": "b", "--seed": "0",
    }  # fmt: skip
    assert {flag: value(argv, flag) for flag in expected} == expected
    assert {
        "--enforce-eager", "--language-model-only", "--trust-remote-code",
        "--no-enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice",
    } <= set(argv)  # fmt: skip


def test_code_of_a_model_is_trusted_only_when_asked() -> None:
    assert "--trust-remote-code" not in flags(max_model_len=1)


def test_the_window_may_be_left_to_the_engine() -> None:
    assert value(flags(max_model_len="auto"), "--max-model-len") == "auto"
    assert VLLM.context_tokens(VLLM.settings({"max_model_len": "auto"})) == 0
    assert VLLM.context_tokens(VLLM.settings({})) == 0
    assert VLLM.context_tokens(VLLM.settings({"max_model_len": 4096})) == 4096


def test_all_that_shapes_graphs_is_one_flag_with_sorted_keys() -> None:
    argv = flags(
        cudagraph_mode="full_and_piecewise", cudagraph_capture_sizes="4, 1,2",
        compilation_config={"pass_config": {"b": 1, "a": [2]}, "mode": 3},
    )  # fmt: skip
    assert argv.count("--compilation-config") == 1
    assert value(argv, "--compilation-config") == (
        '{"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL_AND_PIECEWISE", '
        '"mode": 3, "pass_config": {"a": [2], "b": 1}}'
    )
    assert value(flags(cudagraph_capture_sizes=[8, 4], cudagraph_mode=2), "--compilation-config")


@pytest.mark.parametrize(
    ("given_as", "kept"), [(0, "NONE"), (1, "PIECEWISE"), ("2", "FULL"), ("none", "NONE")]
)
def test_a_graph_mode_is_a_name_or_a_number(given_as: int | str, kept: str) -> None:
    assert VLLM.settings({"cudagraph_mode": given_as}).cudagraph_mode == kept


@pytest.mark.parametrize("sizes", [[4, 2, 1], "1,2,4", "[1, 2, 4]", "4,4,2,1"])
def test_capture_sizes_are_a_list_or_a_text(sizes: Any) -> None:
    assert VLLM.settings({"cudagraph_capture_sizes": sizes}).capture_sizes == (1, 2, 4)


def test_speculation_is_one_flag_too() -> None:
    argv = flags(spec_method="ngram", n_max=3, spec_extra={"prompt_lookup_max": 5})
    assert value(argv, "--speculative-config") == (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    )
    as_text = flags(spec_method="ngram", n_max=3, spec_extra='{"prompt_lookup_max": 5}')
    assert as_text == argv


def test_a_draft_length_of_zero_is_no_speculation_and_none_is_the_engines_own() -> None:
    assert "--speculative-config" not in flags(spec_method="mtp", n_max=0)
    assert "--speculative-config" not in flags(spec_method="none", n_max=0)
    assert value(flags(spec_method="mtp"), "--speculative-config") == '{"method": "mtp"}'


def test_a_draft_model_is_named_only_where_there_is_a_use_for_it() -> None:
    draft = ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=1, sha256="", draft_path="/d",
        draft_size_bytes=9,
    )  # fmt: skip
    eagle = value(flags(draft, spec_method="eagle3", n_max=2), "--speculative-config")
    assert eagle is not None
    assert json.loads(eagle)["model"] == "/d"
    assert "/d" not in " ".join(flags(draft, spec_method="ngram", n_max=2))
    own = value(flags(draft, spec_model="org/x", n_max=2), "--speculative-config")
    assert own is not None
    assert json.loads(own)["model"] == "org/x"
    with_draft = VLLM.settings({"spec_method": "eagle3", "n_max": 2})
    assert VLLM.footprint(with_draft, draft).bytes_of("draft") == 9
    assert VLLM.footprint(VLLM.settings({}), draft).bytes_of("draft") == 0


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"max_model_len": "long"}, "max_model_len"),
        ({"max_model_length": 1}, "max_model_length"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"quantization": ""}, "quantization"),
        ({"seed": -1}, "seed"),
        ({"n_max": -1}, "n_max"),
        ({"n_max": 2}, "n_max"),
        ({"n_max": 2, "spec_method": "none"}, "n_max"),
        ({"cudagraph_mode": "SOME"}, "cudagraph_mode"),
        ({"cudagraph_mode": 3}, "cudagraph_mode"),
        ({"cudagraph_mode": True}, "cudagraph_mode"),
        ({"cudagraph_capture_sizes": "1,x"}, "cudagraph_capture_sizes"),
        ({"cudagraph_capture_sizes": ""}, "cudagraph_capture_sizes"),
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes"),
        ({"cudagraph_capture_sizes": [0]}, "cudagraph_capture_sizes"),
        (
            {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4},
            "max_cudagraph_capture_size",
        ),
        ({"compilation_config": "{"}, "compilation_config"),
        ({"compilation_config": "[1]"}, "compilation_config"),
        ({"compilation_config": {"x": {1, 2}}}, "compilation_config"),
        (
            {"compilation_config": {"cudagraph_mode": "FULL"}, "cudagraph_mode": 1},
            "compilation_config",
        ),
        ({"spec_method": "mtp", "spec_extra": {"num_speculative_tokens": 2}}, "spec_extra"),
        ({"kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e5m2", "quantization": "fbgemm_fp8"}, "kv_cache_dtype"),
        ({"spec_method": "mtp", "n_max": 4, "max_num_batched_tokens": 4}, "n_max"),
        (
            {"spec_method": "dflash", "n_max": 9, "max_num_batched_tokens": 64, "max_num_seqs": 8},
            "n_max",
        ),
        (
            {
                "spec_method": "draft_model", "n_max": 2, "max_num_batched_tokens": 16,
                "max_num_seqs": 16,
            },
            "n_max",
        ),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(params: dict[str, Any], key: str) -> None:
    with pytest.raises(FieldError) as error:
        VLLM.settings(params)
    assert error.value.key == key


@pytest.mark.parametrize(
    "params",
    [
        {"kv_cache_dtype": "fp8_e5m2", "quantization": "awq"},
        {"spec_method": "mtp", "n_max": 4, "max_num_batched_tokens": 5, "max_num_seqs": 64},
        {"spec_method": "dflash", "n_max": 9, "max_num_batched_tokens": 65, "max_num_seqs": 8},
        {"spec_method": "mtp", "n_max": 2, "max_num_seqs": 6, "cudagraph_capture_sizes": "1,2,4"},
        {"spec_method": "of_the_future", "n_max": 1},
    ],
)
def test_what_may_work_is_not_refused(params: dict[str, Any]) -> None:
    assert VLLM.settings(params)


def test_settings_are_values() -> None:
    params = {"compilation_config": {"a": 1}, "spec_method": "mtp", "spec_extra": {"b": [1]}}
    one, two = VLLM.settings(params), VLLM.settings(params)
    assert one == two
    assert hash(one) == hash(two)


def test_the_launch_carries_the_options_of_the_study() -> None:
    options = EngineOptions(
        python="/v/bin/python", env=Pairs(A="1", DO_NOT_TRACK="0"), extra_args=("--x", "y"),
        boot_timeout_s=7.0, stop_timeout_s=3.0,
    )  # fmt: skip
    launch = launched(options=options)
    assert launch.argv[-2:] == ("--x", "y")
    assert dict(launch.env) == {"A": "1", "DO_NOT_TRACK": "0", "VLLM_NO_USAGE_STATS": "1"}
    assert (launch.boot_timeout_s, launch.stop_timeout_s) == (7.0, 3.0)
    assert launch.port_argument is not None
    assert launch.argv[launch.port_argument] == "8011"


def test_a_command_serves_the_model_as_its_argument() -> None:
    argv = launched(options=EngineOptions(binary="/v/bin/vllm")).argv
    assert argv[:3] == ("/v/bin/vllm", "serve", "/models/m")
    assert "--model" not in argv


@pytest.mark.parametrize(
    "extra", ["--host", "--port=1", "--model", "--served_model_name=x", "--por", "--uds", "--seed"]
)
def test_no_extra_argument_takes_what_sweeper_sets(extra: str) -> None:
    with pytest.raises(FieldError) as error:
        launched(options=EngineOptions(python="p", extra_args=(extra, "0")), seed=1)
    assert error.value.key == "extra_args"


def test_an_engine_that_is_not_there_is_a_fault_of_the_host() -> None:
    for options in (EngineOptions(binary="/no/vllm"), EngineOptions(python="/no/python")):
        fault = VLLM.find(options)
        assert isinstance(fault, HostFault)
        assert name(fault) == "engine_not_found"
    found = VLLM.find(EngineOptions(python=sys.executable))
    assert found == EngineOptions(python=sys.executable)


# ---- Memory ------------------------------------------------------------------------------------


def test_the_footprint_counts_what_grows() -> None:
    print_ = VLLM.footprint(VLLM.settings({"max_model_len": 1000, "kv_cache_dtype": "fp8"}), MODEL)
    assert print_.bytes_of("weights") == 8 * GIB
    assert print_.bytes_of("kv_cache") == 1000 * 32 * 256
    wide = VLLM.footprint(VLLM.settings({"max_model_len": 1000}), MODEL)
    assert wide.bytes_of("kv_cache") == 2 * print_.bytes_of("kv_cache")
    assert wide.needs_at_least(print_)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"max_model_len": 4096}, {"max_model_len": 8192}),
        ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 8192}),
        ({"max_num_seqs": 1}, {"max_num_seqs": 8}),
        ({"cudagraph_capture_sizes": "1,2"}, {"cudagraph_capture_sizes": "1,2,64"}),
        ({"enforce_eager": True}, {"cudagraph_capture_sizes": "1"}),
    ],
)
def test_more_of_one_thing_needs_no_less_memory(less: Any, more: Any) -> None:
    for model in (MODEL, ModelFacts(name="x", path="/x", served_name="x", size_bytes=1, sha256="")):
        small = VLLM.footprint(VLLM.settings(less), model)
        large = VLLM.footprint(VLLM.settings(more), model)
        assert large.needs_at_least(small)
        assert not small.needs_at_least(large)


@pytest.mark.parametrize(
    "params",
    [
        {"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 2**30},
        {"tensor_parallel_size": 2}, {"quantization": "awq"}, {"spec_method": "mtp"},
        {"max_model_len": "auto"}, {"kv_cache_dtype": "turbo"}, {"attention_backend": "X"},
    ],
)  # fmt: skip
def test_what_moves_the_share_of_the_card_makes_two_points_incomparable(params: Any) -> None:
    base = VLLM.footprint(VLLM.settings({"max_model_len": 4096}), MODEL)
    other = VLLM.footprint(VLLM.settings({"max_model_len": 8192, **params}), MODEL)
    assert not other.needs_at_least(base)


# ---- What a boot shows -------------------------------------------------------------------------

PREFIXES = (
    "",
    "(EngineCore pid=6282) INFO 11-29 16:39:34 [gpu_worker.py:1] ",
    "(EngineCore_DP0 pid=9) INFO 01-02 03:04:05 [x.py:77] ",
    "(VllmWorker rank=0 pid=12) INFO 05-06 07:08:09 [gpu_worker.py:227] ",
    "(Worker_TP1_EP1 pid=4) \x1b[32mINFO\x1b[0m 05-06 07:08:09 [a.py:2] ",
    "vllm-1  | (APIServer pid=1) INFO 11-29 16:39:34 [b.py:3] ",
    "INFO 06-17 20:29:46 ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("vLLM API server version 0.9.2.dev121+g4c8f64faa", {"engine_version": "0.9.2.dev121+g4c8f64faa"}),
        ("Initializing a V1 LLM engine (v0.31.1) with config: x", {"engine_version": "0.31.1"}),
        ("Model loading took 65.45 GiB memory and 0.958233 seconds", {"weights_bytes": round(65.45 * GIB)}),
        ("Model loading took 14.2 GiB and 9.1 seconds", {"weights_bytes": round(14.2 * GIB)}),
        ("Loading model weights took 3.0 GB", {"weights_bytes": 3 * GIB}),
        ("Available KV cache memory: 5.46 GiB", {"kv_cache_bytes": round(5.46 * GIB)}),
        ("Available KV cache memory: -0.58 GiB", {"kv_cache_bytes": round(-0.58 * GIB)}),
        (
            "Initial free memory 20.0 GiB, reserved 512.00 MiB memory for KV Cache as specified by "
            "kv_cache_memory_bytes config and skipped memory profiling.",
            {"kv_cache_bytes": 512 * MIB},
        ),
        ("GPU KV cache size: 1,661,269 tokens", {"kv_pool_tokens": 1_661_269}),
        (
            "CPU KV cache size: 2,048 tokens, Maximum concurrency for 1,024 tokens per request: 2.00x",
            {"kv_pool_tokens": 2048, "max_concurrency": 2.0, "effective_context_tokens": 1024},
        ),
        (
            "GPU + host KV cache size: 1,048 tokens, Maximum concurrency for 524 tokens per request: 2.00x",
            {"kv_pool_tokens": 1048, "max_concurrency": 2.0, "effective_context_tokens": 524},
        ),
        ("Estimated CUDA graph memory: 0.73 GiB total", {"graph_estimate_bytes": round(0.73 * GIB)}),
        ("Graph capturing finished in 15 secs, took 0.41 GiB", {"graph_pool_bytes": round(0.41 * GIB)}),
        (
            "CUDA graph pool memory: 0.2 GiB (actual), 0.22 GiB (estimated), difference: 0.02 GiB (7.7%).",
            {"graph_pool_bytes": round(0.2 * GIB), "graph_estimate_bytes": round(0.22 * GIB)},
        ),
        (
            "Memory profiling takes 3.2 seconds. Total non KV cache memory: 17.40GiB; torch peak memory "
            "increase: 1.25GiB; total consumed (from mem_get_info): 16.9GiB; weights memory: 15.15GiB.",
            {"activation_peak_bytes": round(1.25 * GIB), "non_kv_bytes": round(17.4 * GIB)},
        ),
        (
            "Free memory on device (22.9/23.5 GiB) on startup. Desired GPU memory utilization is (0.9, "
            "21.2 GiB). Actual usage is 15.5 GiB for consumed memory (weights + non-torch), 1.5 GiB for "
            "peak activation, and 0.4 GiB for CUDAGraph memory. Replace gpu_memory_utilization config "
            "with --kv-cache-memory=4026531840 (3.75 GiB) to fit into requested memory.",
            {
                "activation_peak_bytes": round(1.5 * GIB), "graph_pool_bytes": round(0.4 * GIB),
                "suggested_kv_cache_memory": 4026531840,
            },
        ),
        (
            "Based on the available memory, the estimated maximum model length is 108768. Try",
            {"estimated_max_model_len": 108768},
        ),
        (
            "Auto-fit max_model_len: reduced from 262144 to 97,280 to fit in available KV cache memory (9 GiB)",
            {"autofit_max_model_len": 97280, "effective_context_tokens": 97280},
        ),
        (
            "Auto-fit max_model_len: full model context length 32768 fits in available KV cache memory (9 GiB)",
            {"autofit_max_model_len": 32768, "effective_context_tokens": 32768},
        ),
        ("Overriding num_gpu_blocks=7001 with num_gpu_blocks_override=64", {"num_gpu_blocks": 64}),
        ("# GPU blocks: 1,204, # CPU blocks: 512", {"num_gpu_blocks": 1204}),
        (
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
            {"attention_backend": "FLASH_ATTN"},
        ),
        ("Using TRITON Fp8 MoE backend out of potential backends: ['TRITON'].", {"moe_backend": "TRITON"}),
        ("Using V2 Model Runner", {"model_runner": "V2"}),
    ],
)  # fmt: skip
def test_the_numbers_of_a_boot_are_read_whatever_stands_before_them(
    prefix: str, line: str, facts: dict[str, Any]
) -> None:
    assert dict(VLLM.evidence([prefix + line])) == facts


def test_a_whole_boot_is_read() -> None:
    facts = VLLM.evidence(log_of("ok_mtp"))
    assert {
        "engine_version": "0.24.0", "spec_method": "mtp", "spec_tokens": 2,
        "effective_context_tokens": 8192, "kv_pool_tokens": 1_661_269, "max_concurrency": 202.79,
        "attention_backend": "FLASH_ATTN", "moe_backend": "TRITON", "kv_cache_dtype": "auto",
        "cudagraph_mode": "FULL_AND_PIECEWISE", "largest_captured": 498,
    }.items() <= facts.items()  # fmt: skip
    assert VLLM.evidence(log_of("ok_eager"))["cudagraph_mode"] == "NONE"
    assert VLLM.evidence(log_of("ok_fp8_kv"))["kv_cache_dtype"] == "fp8"


def test_of_several_workers_the_one_with_least_room_counts() -> None:
    log = [f"Available KV cache memory: {gib} GiB" for gib in ("3.5", "2.5", "3.0")]
    log += [f"Model loading took {gib} GiB memory and 1.0 seconds" for gib in ("7.0", "7.5")]
    facts = VLLM.evidence(log)
    assert facts["kv_cache_bytes"] == round(2.5 * GIB)
    assert facts["weights_bytes"] == round(7.5 * GIB)


def test_a_boot_opens_its_phases_in_order() -> None:
    phases: list[Phase] = []
    for line in log_of("ok_mtp"):
        opened = VLLM.milestone(line)
        if opened is not None and opened not in phases:
            phases.append(opened)
    assert phases == [
        Phase.CONFIG, Phase.DEVICE, Phase.WEIGHTS, Phase.DRAFT, Phase.PROFILING, Phase.KV,
        Phase.CAPTURE, Phase.WARMUP, Phase.READY, Phase.SERVING,
    ]  # fmt: skip


def test_counters_of_speculation_are_summed_over_engines() -> None:
    page = "\n".join(
        f'vllm:spec_decode_{metric}{{engine="{engine}"{labels}}} {number}'
        for engine in (0, 1)
        for metric, labels, number in (
            ("num_drafts_total", "", 10),
            ("num_draft_tokens_total", "", 20),
            ("num_accepted_tokens_total", "", 13),
            ("num_accepted_tokens_per_pos_total", ',position="0"', 9),
            ("num_accepted_tokens_per_pos_total", ',position="1"', 4),
        )
    )
    assert VLLM.draft_counters(page + "\n") == DraftCounters(
        steps=20, drafted=40, accepted=26, accepted_per_position=(18, 8)
    )
    assert VLLM.draft_counters("vllm:num_requests_running 0\n") is None


# ---- What a log means: real logs ---------------------------------------------------------------


def real_logs() -> Iterator[Any]:
    for folder in (LOGS, CPU_LOGS):
        for line in (folder / "expected.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            log = row["log"].removesuffix(".log")
            yield pytest.param(folder, row, id=f"{folder.name}-{log}")


@pytest.mark.parametrize(("folder", "row"), list(real_logs()))
def test_a_real_log_is_read_right(folder: Path, row: dict[str, Any]) -> None:
    log, code = log_of(row["log"].removesuffix(".log"), folder), row["exit_code"]
    right = (row["outcome"], row["phase"])
    diagnosis = VLLM.diagnose(log, code)
    assert (name(diagnosis), diagnosis.finding.phase.value) == right
    if not isinstance(diagnosis, Nothing) and code is not None:
        verdict = VLLM.verdict(exited(code, was_ready=row["phase"] == "serving"), log)
        assert (name(verdict), verdict.finding.phase.value) == right


def test_every_real_log_has_its_right_answer_written_down() -> None:
    for folder in (LOGS, CPU_LOGS):
        rows = (folder / "expected.jsonl").read_text(encoding="utf-8").splitlines()
        named = sorted(json.loads(each)["log"] for each in rows)
        assert named == sorted(each.name for each in folder.glob("*.log"))


@pytest.mark.parametrize(
    ("log", "code", "ending", "phase"),
    [
        ("ok_stopped", None, "none", "ready"),
        ("ok", -15, "none", "ready"),
        ("ok", 1, "engine_died_mid_benchmark", "serving"),
        ("oom_capture", 0, "oom_cudagraph_capture", "capture"),
    ],
)
def test_the_exit_code_is_weighed_with_a_real_log(
    log: str, code: int | None, ending: str, phase: str
) -> None:
    diagnosis = VLLM.diagnose(log_of(log), code)
    assert (name(diagnosis), diagnosis.finding.phase.value) == (ending, phase)


def silent(*, was_ready: bool = True) -> Death:
    return Death(ended=Ended.SILENT, after_s=120.0, was_ready=was_ready, detail="nothing was heard")


def test_a_request_that_fills_the_whole_pool_waits_for_ever() -> None:
    log = log_of("waits_for_ever")
    assert "Running: 0 reqs, Waiting: 1 reqs" in log[-2]
    for outcome in (VLLM.verdict(silent(), log), VLLM.diagnose(log, None)):
        assert (name(outcome), kind(outcome)) == ("degraded_capacity", "unfit")
        finding = outcome.finding
        assert finding.phase is Phase.SERVING
        assert finding.facts == Pairs(waiting=1, kv_pool_tokens=119_264)
        assert finding.try_next == Pairs(max_model_len=116_864)
        assert "equally large" in finding.explanation
        assert "Waiting: 1 reqs" in finding.cause


def test_a_damaged_file_a_killed_worker_and_a_pool_too_large_name_their_cause() -> None:
    killed = VLLM.diagnose(log_of("killed_worker", CPU_LOGS), 0).finding
    assert "died unexpectedly (exit code: -9)" in killed.cause
    pool = VLLM.diagnose(log_of("kv_beyond_memory", CPU_LOGS), 1).finding.facts
    assert pool["requested_bytes"] == 500 * GIB
    assert pool["free_bytes"] == round(9.61 * GIB)
    assert pool["shortfall_bytes"] == 500 * GIB - round(9.61 * GIB)
    weights = VLLM.diagnose(log_of("limit_weights", CPU_LOGS), 1).finding
    assert weights.facts["requested_bytes"] == 134_217_728
    assert (
        VLLM.diagnose(log_of("limit_kv", CPU_LOGS), 1).finding.facts["requested_bytes"] == 3 * GIB
    )


def test_a_boot_on_a_cpu_shows_its_pool_too() -> None:
    log = log_of("limit_kv", CPU_LOGS)
    opened = {phase for line in log if (phase := VLLM.milestone(line)) is not None}
    assert {Phase.WEIGHTS, Phase.KV} <= opened
    assert VLLM.evidence(log)["kv_cache_bytes"] == 3 * GIB


def test_the_numbers_of_a_real_log_lead_on() -> None:
    small = VLLM.diagnose(log_of("oom_kv_cache"), 1).finding
    assert small.try_next == Pairs(max_model_len=108768)
    assert small.facts["shortfall_bytes"] == round(12.0 * GIB) - round(4.98 * GIB)
    graphs = VLLM.diagnose(log_of("oom_capture"), 1).finding
    assert graphs.facts["requested_bytes"] == 124 * MIB
    assert graphs.try_next == Pairs(gpu_memory_utilization=0.97)
    assert "CUDA out of memory" in graphs.cause


def test_a_log_cut_at_any_line_has_an_answer() -> None:
    log = log_of("oom_capture")
    for end in range(0, len(log), 5):
        for code in (None, 0, 1, -9):
            assert VLLM.diagnose(log[:end], code).finding.explanation


# ---- What a log means: reported endings, and every failure that the engine can print -----------


def exit_code_of(words: str) -> int | None:
    """Return the exit code that the words of a report imply; None for a process that lives.

    A number is taken as it is, `killed` is signal 9, words of going on are no exit at all, and
    every other way of ending is a plain failure.
    """
    if (found := re.search(r"exit (?:status|code) (-?\d+)", words)) is not None:
        return int(found[1])
    if "killed" in words and "port" not in words:
        return -9
    lives = r"continues|serves|keeps|healthy|hangs|deploys|for (?:all|every) requests?|restarts"
    return None if re.search(lives, words) else 1


def cases() -> Iterator[Any]:
    for line in (HERE / "cases_vllm.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        yield pytest.param(case, id=case["id"].replace(" ", "-"))


@pytest.mark.parametrize("case", list(cases()))
def test_a_reported_ending_gets_its_name(case: dict[str, Any]) -> None:
    diagnosis = VLLM.diagnose(case["log"].split("\n"), exit_code_of(case["exit"]))
    # Some reports cannot be named from their log alone: those must not be guessed.
    assert name(diagnosis) == case.get("read_as", case["outcome"])
    facts = diagnosis.finding.facts
    for key, expected in case.get("facts", {}).items():
        assert facts[key] == pytest.approx(expected, abs=2)
    if kind(diagnosis) == "infeasible":
        assert diagnosis.finding.cause in case["log"]


BOOT = {
    "config": "(APIServer pid=1) INFO 01-01 00:00:00 [utils.py:1] non-default args: {'model': 'm', "
    "'max_num_batched_tokens': 64, 'gpu_memory_utilization': 0.95}",
    "device": "(EngineCore pid=2) INFO 01-01 00:00:01 [core.py:1] Initializing a V1 LLM engine (v0.33.0)",
    "weights": "(EngineCore pid=2) INFO 01-01 00:00:02 [gpu_model_runner.py:1] Starting to load model m...",
    "draft": "(EngineCore pid=2) INFO 01-01 00:00:03 [gpu_model_runner.py:1] Loading drafter model...",
    "profiling": "(EngineCore pid=2) INFO 01-01 00:00:04 [x.py:1] Model loading took 9.0 GiB memory and 1.0 seconds",
    "kv": "(EngineCore pid=2) INFO 01-01 00:00:05 [x.py:1] Available KV cache memory: 2.97 GiB",
    "capture": "\rCapturing CUDA graphs (decode, FULL):  20%|##  | 7/35 [00:00<00:03]",
    "warmup": "(EngineCore pid=2) INFO 01-01 00:00:09 [core.py:1] init engine (profile, create kv cache, warmup model) took 8 s",
    "ready": "(APIServer pid=1) INFO:     Application startup complete.",
}  # fmt: skip


def boot_to(phase: str) -> list[str]:
    """Return the lines of a boot that came as far as this phase."""
    lines: list[str] = []
    for each, line in BOOT.items():
        if each == "draft" and phase != "draft":
            continue
        lines.append(line)
        if each == phase:
            break
    return lines


WRAPPED = (
    "(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231] EngineCore failed to start.",
    "(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231] Traceback (most recent call last):",
    '(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231]   File "/v/core.py", line 9, in run',
    "(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231]     raise ValueError(",
    "(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231] {}",
    "(APIServer pid=1) Traceback (most recent call last):",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {{'EngineCore_0': 1}}",
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total "
    "capacity of 20.00 GiB of which 100.00 MiB is free. Including non-PyTorch memory, this process "
    "has 19.9 GiB memory in use."
)


def failed(phase: str, cause: str) -> list[str]:
    return [*boot_to(phase), *(line.format(cause) for line in WRAPPED)]


@pytest.mark.parametrize(
    ("phase", "ending", "shown"),
    [
        ("weights", "oom_weights", "weights"),
        ("draft", "oom_draft_head", "draft"),
        ("profiling", "oom_activation_profiling", "profiling"),
        ("kv", "oom_kv_cache", "kv"),
        ("capture", "oom_cudagraph_capture", "capture"),
        ("warmup", "oom_activation_profiling", "warmup"),
        ("ready", "oom_runtime", "serving"),
    ],
)
def test_the_same_words_mean_what_their_phase_says(phase: str, ending: str, shown: str) -> None:
    outcome = VLLM.diagnose(failed(phase, OOM), 1)
    assert (name(outcome), outcome.finding.phase.value) == (ending, shown)
    facts = outcome.finding.facts
    assert facts["requested_bytes"] == 300 * MIB
    assert facts["shortfall_bytes"] == 200 * MIB
    assert outcome.finding.cause.startswith("torch.OutOfMemoryError")
    assert ("gpu_memory_utilization" in outcome.finding.try_next) == (
        shown in ("capture", "warmup", "serving")
    )


@pytest.mark.parametrize(
    ("frame", "ending"),
    [
        ("self.drafter.load_model(self.model)", "oom_draft_head"),
        ("self.speculator.load_model(self.model)", "oom_draft_head"),
        ("available = self.model_executor.determine_available_memory()", "oom_activation_profiling"),
        ("cuda_graph_memory = self.model_runner.capture_model()", "oom_cudagraph_capture"),
        ("logits = self._dummy_sampler_run(hidden_states)", "oom_activation_profiling"),
        ("self.model = model_loader.load_model(", "oom_weights"),
        ("kv_caches = self.initialize_kv_cache_tensors(config)", "oom_kv_cache"),
    ],
)  # fmt: skip
def test_a_traceback_says_where_it_was_if_no_line_of_the_boot_does(frame: str, ending: str) -> None:
    log = [boot_to("device")[-1], *(line.format(OOM) for line in WRAPPED)]
    log.insert(4, f"(EngineCore pid=2) ERROR 01-01 00:01:00 [core.py:1231]     {frame}")
    assert name(VLLM.diagnose(log, 1)) == ending


SIGNS = [
    # The card, the host and the model.
    ("device", "ValueError: Free memory on device cuda:1 (3.0/24.0 GiB) on startup is less than desired GPU memory utilization (0.5, 12.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.", "gpu_memory_contended", "device", {"gpu_memory_utilization": 0.12}),
    ("profiling", "AssertionError: Error in memory profiling. Initial free memory 10.0 GiB, current free memory 11.5 GiB. This happens when other processes release memory", "gpu_memory_contended", "profiling", {}),
    ("config", "OSError: org/none is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'", "model_not_found_or_gated", "config", {}),
    ("weights", "RuntimeError: Cannot find any model weights with `/models/m`", "model_not_found_or_gated", "config", {}),
    ("weights", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "model_not_found_or_gated", "weights", {}),
    ("profiling", "ImportError: kernels.of.somebody is required for this quantization", "unsupported_combination", "profiling", {}),
    ("weights", "ValueError: Available memory on node 0 (1.0/2.0 GiB) on kv cache allocation is less than requested memory for kv (3.0 GiB).", "oom_kv_cache", "kv", {}),
    ("weights", "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)", "driver_mismatch", "weights", {}),
    ("device", "RuntimeError: Failed to infer device type, please set the environment variable", "driver_mismatch", "device", {}),
    ("profiling", "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", "driver_mismatch", "profiling", {}),
    ("profiling", "RuntimeError: Ninja build failed. Ninja output:", "toolchain_jit_failure", "profiling", {}),
    ("profiling", "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error", "toolchain_jit_failure", "profiling", {}),
    ("profiling", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable", "toolchain_jit_failure", "profiling", {}),
    ("profiling", "OSError: [Errno 28] No space left on device: '/cache/vllm/torch_compile_cache/a'", "disk_full", "profiling", {}),
    ("device", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_11aa'", "shm_exhausted", "device", {}),
    ("profiling", "RuntimeError: vLLM failed to compile the model. The most likely reason for this is that a previous compilation failed, leading to a corrupted compilation artifact.", "compile_cache_corrupt", "profiling", {}),
    ("config", "OSError: [Errno 98] Address already in use", "port_in_use", "config", {}),
    ("weights", "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.", "host_ram_oom", "weights", {}),
    # Room for the KV cache, the states, the batch.
    ("kv", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.", "oom_kv_cache", "kv", {}),
    ("kv", "ValueError: To serve at least one request with the model's max seq len (65536), (8.0 GiB KV cache is needed, which is larger than the available KV cache memory (2.97 GiB). Based on the available memory, the estimated maximum model length is 24320. Try increasing `gpu_memory_utilization`", "oom_kv_cache", "kv", {"max_model_len": 24320}),
    ("kv", "ValueError: To serve at least one request with the model's max seq len (65536), (8.0 GiB KV cache is needed, which is larger than the available KV cache memory (0.01 GiB). Try increasing `gpu_memory_utilization`", "oom_kv_cache", "kv", {}),
    ("kv", "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try increasing `gpu_memory_utilization`.", "oom_kv_cache", "kv", {}),
    ("kv", "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (11,328). Try increasing `gpu_memory_utilization`", "oom_kv_cache", "kv", {"max_model_len": 11328}),
    ("kv", "ValueError: max_num_seqs (64) exceeds available Mamba cache blocks (17). Each decode sequence requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 17 or increase gpu_memory_utilization.", "capacity_max_num_seqs", "capture", {"max_num_seqs": 17}),
    ("capture", "RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.", "oom_activation_profiling", "warmup", {}),
    # What is refused.
    ("config", "ValueError: max_num_scheduled_tokens is set to -6 based on the speculative decoding settings, which does not allow any tokens to be scheduled. Increase max_num_batched_tokens to accommodate the additional draft token slots", "unsupported_combination", "config", {"max_num_batched_tokens": 71}),
    ("config", "ValueError: VllmConfig does not have enough slots to schedule a token and support the speculative decoding settings. Got max_num_batched_tokens=4 and num_lookahead_tokens=7.", "unsupported_combination", "config", {"max_num_batched_tokens": 8}),
    ("config", "ValueError: num_speculative_tokens:7 must be divisible by n_predict=3", "unsupported_combination", "config", {"n_max": 6}),
    ("config", "ValueError: customized max_cudagraph_capture_size(=64) should be consistent with the max value of cudagraph_capture_sizes(=32)", "unsupported_combination", "config", {}),
    ("config", "ValueError: num_speculative_tokens must be provided with speculative model unless the draft model config contains an n_predict parameter.", "unsupported_combination", "config", {}),
    ("config", "ValueError: User-specified max_model_len (40960) is greater than the derived max_model_len (max_position_embeddings=32768 or model_max_length=None in model's config.json).", "unsupported_combination", "config", {"max_model_len": 32768}),
    ("config", "ValueError: World size (4) is larger than the number of available GPUs (1) in this node.", "unsupported_combination", "config", {}),
    ("weights", "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=80). Reasons: {{FLASH_ATTN: [kv_cache_dtype not supported]}}.", "unsupported_combination", "weights", {}),
    ("weights", "ValueError: fp8_e5m2 kv-cache is not supported with fp8 checkpoints.", "unsupported_combination", "weights", {}),
    ("weights", "NotImplementedError: this layer is for other cards", "unsupported_combination", "weights", {}),
    ("kv", "AssertionError", "unsupported_combination", "kv", {}),
    ("config", "ValueError: Model architectures ['ExampleForCausalLM'] are not supported for now.", "model_unsupported_arch", "config", {}),
    ("config", "ValueError: Unknown quantization method: fp3. Must be one of ['awq', 'fp8'].", "bad_argument", "config", {}),
    # What is nobody's fault.
    ("capture", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "engine_crash", "capture", {}),
    ("weights", "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error", "engine_crash", "weights", {}),
    ("profiling", "AttributeError: 'NoneType' object has no attribute 'shape'", "engine_crash", "profiling", {}),
    ("device", "TimeoutError: Timed out waiting for engine core processes to start. Waited 600s (configured by VLLM_ENGINE_READY_TIMEOUT_S).", "boot_timeout", "device", {}),
    ("profiling", "TimeoutError: RPC call to determine_available_memory timed out.", "hang_boot", "profiling", {}),
]  # fmt: skip


@pytest.mark.parametrize("wrap", ["bare", "wrapped", "worker"])
@pytest.mark.parametrize("sign", SIGNS)
def test_a_failure_of_a_boot_is_named_by_its_first_cause(
    wrap: str, sign: tuple[str, str, str, str, dict[str, Any]]
) -> None:
    phase, line, ending, shown, try_next = sign
    line = line.replace("{{", "{").replace("}}", "}")
    match wrap:
        case "bare":
            log = [*boot_to(phase), line]
        case "worker":
            worker = "(Worker_TP1 pid=77) ERROR 01-01 00:01:00 [multiproc_executor.py:1] "
            log = [
                *boot_to(phase),
                worker + "WorkerProc failed to start.",
                worker + "Traceback (most recent call last):",
                worker + '  File "/v/worker.py", line 1, in main',
                worker + line,
                *(
                    each.format("RuntimeError: Worker failed, see stack trace above")
                    for each in WRAPPED[:-1]
                ),
                "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause "
                "above. Failed core proc(s): {}",
            ]
        case _:
            log = [*boot_to(phase), *(each.replace("{}", line) for each in WRAPPED)]
    for code in (1, 0):
        outcome = VLLM.diagnose(log, code)
        assert (name(outcome), outcome.finding.phase.value) == (ending, shown)
        assert line[:60] in outcome.finding.cause
        assert dict(outcome.finding.try_next) == try_next


@pytest.mark.parametrize(
    ("lines", "code", "ending"),
    [
        (["usage: vllm [-h]", "vllm: error: unrecognized arguments: --x 1"], 2, "bad_argument"),
        (["usage: api_server.py", "api_server.py: error: argument --seed: invalid int value: 'a'"], 2, "bad_argument"),
        (["/v/bin/python: Error while finding module specification for 'vllm.entrypoints.openai.api_server' (ModuleNotFoundError: No module named 'vllm')"], 1, "engine_not_found"),
        (["importlib.metadata.PackageNotFoundError: No package metadata was found for vllm"], 1, "engine_not_found"),
        (["pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig", "kv_cache_dtype", "  Input should be 'auto' or 'fp8' [type=literal_error, input_value='fp9']"], 1, "bad_argument"),
    ],
)  # fmt: skip
def test_a_command_line_that_is_refused_is_named(lines: list[str], code: int, ending: str) -> None:
    outcome = VLLM.diagnose(lines, code)
    assert name(outcome) == ending
    assert name(VLLM.verdict(exited(code), lines)) == ending


FATAL = (
    "(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] EngineCore encountered a fatal error.",
    "(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] Traceback (most recent call last):",
    '(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1]   File "/v/x.py", line 1, in execute_model',
)
DEAD = (
    "(APIServer pid=1) ERROR 01-01 00:09:00 [async_llm.py:1] vllm.v1.engine.exceptions."
    "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    '(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal '
    "Server Error",
    "(APIServer pid=1) INFO:     Shutting down",
)


@pytest.mark.parametrize(
    ("cause", "ending"),
    [
        (OOM, "oom_runtime"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "engine_died_mid_benchmark"),
        ("KeyError: 'req-17'", "engine_died_mid_benchmark"),
        ("AssertionError", "engine_died_mid_benchmark"),
        ("ValueError: this is not supported with that", "engine_died_mid_benchmark"),
        ("TimeoutError: RPC call to sample_tokens timed out.", "hang_runtime"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", [0, 1, None])
def test_what_kills_a_running_engine_is_named_whatever_its_exit_code(
    code: int | None, cause: str, ending: str
) -> None:
    fatal = f"(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] {cause}"
    outcome = VLLM.diagnose([*boot_to("ready"), *FATAL, fatal, *DEAD], code)
    assert (name(outcome), outcome.finding.phase) == (ending, Phase.SERVING)
    assert cause[:30] in outcome.finding.cause


def test_a_request_refused_long_ago_is_not_why_the_engine_died() -> None:
    log = [
        *boot_to("ready"),
        "(APIServer pid=1) ERROR 01-01 00:02:00 [serving.py:1] ValueError: prompt is empty",
        *FATAL,
        "(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] KeyError: 'req-3'",
        *DEAD,
    ]
    assert "req-3" in VLLM.diagnose(log, 0).finding.cause


@pytest.mark.parametrize(
    "line",
    [
        "INFO [model_runner.py:1] If out-of-memory error occurs during cudagraph capture, consider decreasing `gpu_memory_utilization`",
        "(EngineCore pid=2) INFO 01-01 00:00:10 [gpu_worker.py:1] Free memory on device (22.9/23.5 GiB) on startup. Desired GPU memory utilization is (0.9, 21.2 GiB). Actual usage is 15 GiB",
        "(EngineCore pid=2) INFO 01-01 00:00:10 [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging",
        "(EngineCore pid=2) WARNING 01-01 00:00:10 [x.py:1] Model Runner V2 does not yet support this; using the V1 model runner",
        "(APIServer pid=1) INFO 01-01 00:00:10 [utils.py:1] Port 8000 is already in use, trying port 8001",
        "(EngineCore pid=2) WARNING 01-01 00:00:10 [kv_cache.py:1] Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify that k/v_scale scaling factors are properly set in the checkpoint.",
        "(APIServer pid=1) WARNING 01-01 00:00:10 [x.py:1] User-specified max_model_len (9) is greater than the derived max_model_len (x=8 or model_max_length=8 in model's config.json).",
        "[rank0]:[W1129 16:56:28.46 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called",
        "(EngineCore pid=2) DEBUG 01-01 00:00:10 [x.py:1] CUDA out of memory would be raised here",
    ],
)  # fmt: skip
def test_what_the_engine_survives_decides_nothing(line: str) -> None:
    boot = boot_to("ready")
    for log in ([*boot[:-1], line, boot[-1]], [*boot, line], [*boot[:5], line, *boot[5:]]):
        assert isinstance(VLLM.diagnose(log, None), Nothing)


def test_an_error_before_a_later_phase_was_survived() -> None:
    error = "(EngineCore pid=2) ERROR 01-01 00:00:02 [x.py:1] RuntimeError: CUDA error: odd"
    boot = boot_to("ready")
    assert isinstance(VLLM.diagnose([*boot[:3], error, *boot[3:]], None), Nothing)


STATS = "(APIServer pid=1) INFO 01-01 00:05:00 [loggers.py:1] Engine 000: Avg prompt throughput: {} tokens/s, Avg generation throughput: {} tokens/s, Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: 1.2%"
POOL = "(EngineCore pid=2) INFO 01-01 00:00:05 [x.py:1] GPU KV cache size: {} tokens, Maximum concurrency for {} tokens per request: {}x"
SPEC = "(APIServer pid=1) INFO 01-01 00:05:00 [metrics.py:1] SpecDecoding metrics: "


@pytest.mark.parametrize(
    ("lines", "ending"),
    [
        ([STATS.format("9.0", "80.1", 1, 0)], "none"),
        ([STATS.format("0.0", "0.0", 0, 0)] * 3, "none"),
        ([STATS.format("0.0", "0.0", 1, 0)], "none"),
        ([STATS.format("0.0", "0.0", 2, 5)] * 3, "hang_runtime"),
        ([STATS.format("0.0", "0.0", 0, 4)], "hang_runtime"),
        ([STATS.format("0.0", "0.0", 0, 4), STATS.format("5.0", "7.0", 4, 0)], "none"),
        ([SPEC + "Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 900 tokens, Per-position acceptance rate: 0.000, Avg Draft acceptance rate: 0.0%"], "draft_ineffective"),
        ([SPEC + "Draft acceptance rate: 0.0%, Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 400 tokens"], "draft_ineffective"),
        ([SPEC + "Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 8 tokens, Avg Draft acceptance rate: 0.0%"], "none"),
        ([SPEC + "Mean acceptance length: 2.9, Accepted: 190 tokens, Drafted: 200 tokens, Avg Draft acceptance rate: 95.0%"], "none"),
        ([SPEC + "Mean acceptance length: 2.9, Avg Draft acceptance rate: 95.0%", SPEC + "Mean acceptance length: 1.8, Avg Draft acceptance rate: 40.0%"], "none"),
        (["(EngineCore pid=2) INFO 01-01 00:06:00 [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds."] * 3, "hang_runtime"),
        (['(APIServer pid=1) INFO:     127.0.0.1:9 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'], "http_500"),
        (["(APIServer pid=1) ERROR 01-01 00:05:00 [serving.py:1] ValueError: This model's maximum context length is 8,192 tokens. However, your prompt contains at least 9,001 input tokens, which exceeds this limit even without any output tokens."], "http_400_context"),
        (["(APIServer pid=1) ERROR 01-01 00:05:00 [serving.py:1] jinja2.exceptions.TemplateError: Conversation roles must alternate"], "chat_template_failure"),
    ],
)  # fmt: skip
def test_a_service_that_lives_is_judged_by_what_it_prints(lines: list[str], ending: str) -> None:
    outcome = VLLM.diagnose([*boot_to("ready"), *lines], None)
    assert name(outcome) == ending


def test_graphs_that_were_cut_matter_only_to_batches_that_are_larger() -> None:
    cut = "(APIServer pid=1) WARNING 01-01 00:00:01 [vllm.py:1] Truncating max_cudagraph_capture_size to 8"
    asked = "(APIServer pid=1) INFO 01-01 00:00:00 [utils.py:1] non-default args: {{'max_num_seqs': {}}}"
    wide = VLLM.diagnose([asked.format(16), cut, *boot_to("ready")], None)
    narrow = VLLM.diagnose([asked.format(8), cut, *boot_to("ready")], None)
    assert (name(wide), name(narrow)) == ("degraded_throughput", "none")


@pytest.mark.parametrize(
    "log",
    [
        [],
        [""],
        ["\x00\x01\x02\xff" * 20, "\x7fELF"],
        ["nginx: [emerg] bind() failed", "Traceback (most recent call last):", "ValueError: x"],
        ["ggml_cuda_init: found 1 CUDA devices", "llama_model_load: error loading model: CUDA error: out of memory"],
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", [None, 1])
def test_an_empty_a_binary_and_a_foreign_log_say_nothing(log: list[str], code: int | None) -> None:
    assert name(VLLM.diagnose(log, code)) == "unknown"


def test_a_boot_in_progress_is_no_trouble() -> None:
    for phase in BOOT:
        outcome = VLLM.diagnose(boot_to(phase), None)
        assert isinstance(outcome, Nothing)


def test_a_boot_that_ends_without_a_word_is_a_crash() -> None:
    assert name(VLLM.diagnose(boot_to("capture"), -11)) == "engine_crash"
    assert name(VLLM.diagnose(boot_to("weights"), -9)) == "engine_crash"
    assert name(VLLM.diagnose(boot_to("weights"), -7)) == "shm_exhausted"


@pytest.mark.parametrize(
    ("line", "code", "ending"),
    [
        ("RuntimeError: Error 803: system has unsupported display driver / cuda driver combination", 1, "driver_mismatch"),
        ("ptxas fatal   : Value 'sm_199a' is not defined for option 'gpu-name'", 1, "toolchain_jit_failure"),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", 1, "toolchain_jit_failure"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", 1, "toolchain_jit_failure"),
        ("/tmp/x/main.c:5:10: fatal error: Python.h: No such file or directory", 1, "toolchain_jit_failure"),
        ("RuntimeError: Data processing error: IO Error: No space left on device (os error 28)", 1, "disk_full"),
        ("node1:12:99 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-aB (size 9637888)", 1, "shm_exhausted"),
        ("RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE", 1, "port_in_use"),
        ("(VllmWorker rank=0 pid=3) ERROR x [x.py:1] triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376", 1, "unsupported_combination"),
        ("(EngineCore pid=3) ERROR 01-01 00:00:00 [x.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: -6), shutting down executor.", 1, "engine_died_mid_benchmark"),
        ("(EngineCore pid=3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 MiB. Of the allocated memory 7 GiB is allocated by PyTorch, with 74.00 MiB allocated in private pools (e.g., CUDA Graphs)", 1, "oom_cudagraph_capture"),
        ("(EngineCore pid=3) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 MiB.", None, "oom_runtime"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 21.20 GiB already allocated; 1.00 GiB free; 22 GiB reserved in total by PyTorch)", 1, "oom_weights"),
        ("(APIServer pid=3) INFO x [metrics.py:1] SpecDecoding metrics: Mean acceptance length: 1.00", None, "draft_ineffective"),
        ("(EngineCore pid=3) WARNING 01-01 00:00:00 [x.py:1] Speculative decoding is disabled for this model", None, "silent_fallback"),
        ("(EngineCore pid=3) INFO 01-01 00:00:00 [x.py:1] Maximum concurrency for 131,072 tokens per request: 0.42x", None, "degraded_capacity"),
        ("This model's maximum context length is 4096 tokens. However, your prompt contains 90000 characters (more than 65536 characters, which is the upper bound for 4096 input tokens).", None, "http_400_context"),
        ("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (904 in the messages, 4096 in the completion).", None, "http_400_context"),
        ("Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 5 reqs, Waiting: 0 reqs, GPU KV cache usage: 31.0%", None, "hang_runtime"),
    ],
)  # fmt: skip
def test_a_single_line_is_enough_where_it_says_enough(
    line: str, code: int | None, ending: str
) -> None:
    assert name(VLLM.diagnose([line], code)) == ending


@pytest.mark.parametrize(
    ("phase", "ending"),
    [
        ("weights", "oom_weights"),
        ("profiling", "oom_activation_profiling"),
        ("kv", "oom_kv_cache"),
    ],
)
def test_the_hosts_memory_is_the_devices_own_where_the_device_is_a_cpu(
    phase: str, ending: str
) -> None:
    line = "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    on_a_card = failed(phase, line)
    on_a_cpu = [
        each.replace("(v0.33.0)", "(v0.33.0) with config: device_config=cpu, x")
        for each in on_a_card
    ]
    for log, expected in ((on_a_card, "host_ram_oom"), (on_a_cpu, ending)):
        outcome = VLLM.diagnose(log, 1)
        assert name(outcome) == expected
        assert outcome.finding.facts["requested_bytes"] == 4096


def test_a_worker_that_is_gone_without_an_exit_code_is_no_cause() -> None:
    line = "(EngineCore pid=2) ERROR 01-01 00:00:09 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: {}), shutting down executor."
    assert name(VLLM.diagnose([line.format("-9")], 1)) == "engine_died_mid_benchmark"
    assert name(VLLM.diagnose([line.format("None")], 1)) == "unknown"


def test_older_words_of_the_allocator_are_read_too() -> None:
    line = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 21.20 GiB already allocated; 1.00 GiB free; 22 GiB reserved)"
    facts = VLLM.diagnose([*boot_to("kv"), line], 1).finding.facts
    assert facts == Pairs(
        requested_bytes=2 * GIB, free_bytes=GIB, total_bytes=round(23.65 * GIB),
        shortfall_bytes=GIB,
    )  # fmt: skip


def test_the_last_boot_of_a_log_is_the_one_that_counts() -> None:
    first = failed("weights", OOM)
    assert name(VLLM.diagnose([*first, *failed("capture", OOM)], 1)) == "oom_cudagraph_capture"
    assert name(VLLM.diagnose([*first, *boot_to("weights")], None)) == "oom_weights"


def test_progress_bars_and_colours_hide_nothing() -> None:
    bar = "\r".join(f"Capturing CUDA graphs (decode, FULL): {i}%|#| {i}/35" for i in range(9))
    log = [*boot_to("kv"), f"{bar}\x1b[31mCUDA out of memory. Tried to allocate 2.00 MiB.\x1b[0m"]
    assert name(VLLM.diagnose(log, 1)) == "oom_cudagraph_capture"


def test_a_long_log_is_read_as_it_comes_and_not_kept() -> None:
    def endless() -> Iterator[str]:
        yield from boot_to("ready")
        for i in range(20_000):
            yield f'(APIServer pid=1) INFO:     127.0.0.1:{i} - "POST /v1/completions HTTP/1.1" 200 OK'
        yield from (*FATAL, f"(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] {OOM}")

    assert name(VLLM.diagnose(endless(), 0)) == "oom_runtime"


# ---- How the supervisor saw it -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "log", "ending"),
    [
        (Death(ended=Ended.LATE, after_s=600.0, was_ready=False), [], "hang_boot"),
        (Death(ended=Ended.LATE, after_s=600.0, was_ready=False), boot_to("profiling"), "boot_timeout"),
        (Death(ended=Ended.PORT_TAKEN, after_s=1.0, was_ready=False, detail="x"), [], "port_in_use"),
        (Death(ended=Ended.NOT_STARTED, after_s=0.0, was_ready=False, detail="x"), [], "engine_not_found"),
        (Death(ended=Ended.LIVES, after_s=9.0, was_ready=True, detail="HTTP 500"), boot_to("ready"), "http_500"),
        (Death(ended=Ended.LIVES, after_s=9.0, was_ready=True, detail="HTTP 400: This model's maximum context length is 64 tokens. However, your prompt contains 70 input tokens"), boot_to("ready"), "http_400_context"),
        (Death(ended=Ended.LIVES, after_s=9.0, was_ready=True, detail="lost"), [*boot_to("ready"), *FATAL, "(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] " + OOM], "oom_runtime"),
        (silent(), [], "hang_runtime"),
        (silent(was_ready=False), boot_to("ready"), "hang_runtime"),
        (silent(), [*boot_to("ready"), STATS.format("0.0", "0.0", 1, 3)], "hang_runtime"),
        (silent(), [*boot_to("ready"), STATS.format("9.0", "0.1", 0, 2)], "degraded_capacity"),
        (silent(), [*boot_to("kv"), POOL.format(9000, 1024, "8.79"), BOOT["ready"], STATS.format("0.0", "0.0", 0, 2)], "hang_runtime"),
        (silent(), [*boot_to("kv"), POOL.format(1040, 1024, "1.02"), BOOT["ready"], STATS.format("0.0", "0.0", 0, 2)], "degraded_capacity"),
        (silent(), [*boot_to("ready"), *FATAL, "(EngineCore pid=2) ERROR 01-01 00:09:00 [core.py:1] " + OOM], "oom_runtime"),
        (exited(0, was_ready=True), boot_to("ready"), "engine_died_mid_benchmark"),
        (exited(1), [], "unknown"),
        (exited(1), boot_to("weights"), "engine_crash"),
    ],
)  # fmt: skip
def test_a_death_is_judged_with_what_the_supervisor_saw(
    death: Death, log: list[str], ending: str
) -> None:
    assert name(VLLM.verdict(death, log)) == ending


# ---- What runs against what was asked ----------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "facts", "ending"),
    [
        ({"max_model_len": 8192}, {"effective_context_tokens": 8192}, None),
        ({"max_model_len": 8192}, {"effective_context_tokens": 4096}, "silent_context_truncation"),
        ({"max_model_len": "auto"}, {"effective_context_tokens": 4096}, None),
        ({}, {"max_concurrency": 0.8}, "degraded_capacity"),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, None),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "auto"}, "silent_fallback"),
        ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "fp8"}, None),
        ({"spec_method": "mtp", "n_max": 2}, {"spec_method": "none"}, "silent_fallback"),
        ({"spec_method": "mtp", "n_max": 0}, {"spec_method": "none"}, None),
        ({"spec_method": "mtp", "n_max": 2}, {"spec_method": "mtp", "spec_tokens": 1}, "silent_fallback"),
        ({"spec_method": "qwen3_next_mtp", "n_max": 2}, {"spec_method": "mtp", "spec_tokens": 2}, None),
        ({"attention_backend": "flash_attn"}, {"attention_backend": "FLASH_ATTN"}, None),
        ({"attention_backend": "FLASHINFER"}, {"attention_backend": "FLASH_ATTN"}, "silent_fallback"),
        ({"attention_backend": "TRITON_ATTN"}, {"attention_backend": "FLASH_ATTN", "attention_backends": "FLASH_ATTN TRITON_ATTN"}, None),
        ({"cudagraph_mode": "FULL"}, {"cudagraph_mode": "PIECEWISE"}, "silent_fallback"),
        ({"cudagraph_mode": "FULL", "enforce_eager": True}, {"cudagraph_mode": "NONE"}, None),
        ({"max_cudagraph_capture_size": 6}, {"capture_truncated_to": 4}, "degraded_throughput"),
        ({"max_num_seqs": 2, "max_cudagraph_capture_size": 6}, {"capture_truncated_to": 4}, None),
        ({"max_num_seqs": 6, "spec_method": "mtp", "n_max": 3}, {"capture_truncated_to": 4}, "degraded_throughput"),
        ({"max_num_seqs": 256}, {"capture_capped_to": 208}, "silent_fallback"),
        ({}, {}, None),
    ],
)  # fmt: skip
def test_what_runs_must_be_what_was_asked_for(
    params: dict[str, Any], facts: dict[str, Any], ending: str | None
) -> None:
    unfit = VLLM.contradiction(VLLM.settings(params), Pairs(facts), None)
    assert (None if unfit is None else name(unfit)) == ending


@pytest.mark.parametrize(
    ("log", "params"),
    [
        ("ok", {"max_model_len": 8192, "quantization": "fp8"}),
        ("ok_fp8_kv", {"max_model_len": 8192, "kv_cache_dtype": "fp8"}),
        ("ok_mtp", {"max_model_len": 8192, "spec_method": "mtp", "n_max": 2}),
        ("ok_decode_graphs", {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        ("ok_eager", {"enforce_eager": True, "attention_backend": "FLASH_ATTN"}),
    ],
)
def test_a_real_boot_that_did_as_it_was_told_contradicts_nothing(log: str, params: Any) -> None:
    facts = VLLM.evidence(log_of(log))
    assert VLLM.contradiction(VLLM.settings(params), facts, None) is None


# ---- Any log at all ----------------------------------------------------------------------------

WORDS = (
    "CUDA out of memory", "Tried to allocate . GiB", "Tried to allocate 1,.2 MiB", "Traceback",
    "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] ", "ValueError: ", "max_num_seqs (",
    "max_num_scheduled_tokens is set to -9 which does not allow", "n_predict=0", "KV cache size:",
    "1 validation error for X", "Value error, ", "\r", "\x1b[31m", "EngineDeadError",
    "Application startup complete", "(0.0/0.0 GiB) on startup is less than desired GPU memory "
    "utilization (., 1 GiB)", "Free memory on device", "Mean acceptance length: .", "{", "(((",
    "must be divisible by n_predict=0", "num_speculative_tokens:4 ", "Worker failed with error '",
)  # fmt: skip


@QUICK
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map("".join), max_size=10))
def test_any_lines_have_an_answer_and_never_an_exception(lines: list[str]) -> None:
    for code in (None, 0, 1, 2, -9):
        outcome = VLLM.diagnose(lines, code)
        assert outcome.finding.explanation
        assert Pairs(dict(outcome.finding.facts)) == outcome.finding.facts
    VLLM.evidence(lines)
    for ended in Ended:
        death = Death(ended=ended, after_s=1.0, was_ready=False, exit_code=None)
        verdict: Outcome = VLLM.verdict(death, lines)
        assert name(verdict)


def test_memory_is_told_from_other_limits() -> None:
    outcome = VLLM.diagnose(failed("kv", OOM), 1)
    assert isinstance(outcome, Infeasible)
    assert outcome.name.is_memory


def test_the_engines_own_clocks_are_summed_over_its_engines() -> None:
    page = "".join(
        f"""vllm:request_decode_time_seconds_sum{{engine="{engine}"}} {decode}
vllm:request_decode_time_seconds_count{{engine="{engine}"}} {requests}
vllm:time_to_first_token_seconds_sum{{engine="{engine}"}} 0.5
vllm:num_requests_running{{engine="{engine}"}} 1.0
"""
        for engine, decode, requests in ((0, 2.5, 3), (1, 1.5, 1))
    )
    assert dict(Vllm().clocks(page)) == {"decode_s": 4.0, "requests": 4.0, "ttft_s": 1.0}
    assert dict(Vllm().clocks("")) == {}
