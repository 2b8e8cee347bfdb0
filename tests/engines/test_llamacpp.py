"""The llama.cpp adapter, purely: its flags, its memory, and what its logs mean."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.launch import Death, Ended, Phase
from sweeper.core.memory import Footprint
from sweeper.core.outcome import BrokenName, HostFault, Infeasible, Nothing, Unfit, kind, name
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.contract import EngineContract
from sweeper.engines.llamacpp import KV_BITS, LlamaCpp, LlamaCppSettings
from sweeper.engines.llamacpp_log import MIB, read

LLAMA = LlamaCpp()
LOGS = Path(__file__).parent / "logs" / "llamacpp"
GEMMA = ModelFacts(
    name="gemma",
    path="/models/gemma.gguf",
    served_name="gemma",
    size_bytes=253_000_000,
    sha256="0" * 64,
    facts=Pairs(
        layers=18,
        kv_heads_global=3,
        kv_heads_window=15,
        window_tokens=512,
        key_length=256,
        value_length=256,
        heads=4,
        embedding_length=640,
        feed_forward_length=2048,
        vocabulary=262_144,
    ),
)
# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)


def log_of(log: str) -> list[str]:
    return (LOGS / f"{log}.log").read_text(encoding="utf-8").split("\n")


def exited(code: int | None, *, was_ready: bool = False, limit_bytes: int | None = None) -> Death:
    return Death(
        ended=Ended.EXITED, after_s=1.0, was_ready=was_ready, exit_code=code,
        limit_bytes=limit_bytes,
    )  # fmt: skip


def lives(detail: str = "HTTP 500: Compute error.") -> Death:
    return Death(ended=Ended.LIVES, after_s=9.0, was_ready=True, detail=detail)


# ---- What every adapter promises ---------------------------------------------------------------


class TestTheContract(EngineContract):
    def engine(self) -> Engine:
        return LlamaCpp()

    def good_log(self) -> Sequence[str]:
        return log_of("ok")

    def endings(self) -> Iterable[tuple[Death, Sequence[str], str]]:
        for log, code, limit_kib, ending, _ in REAL:
            limit = None if limit_kib is None else limit_kib * 1024
            yield exited(code, limit_bytes=limit), log_of(log), ending


# ---- Settings and flags ------------------------------------------------------------------------


def flags(model: ModelFacts = GEMMA, **params: Any) -> list[str]:
    options = EngineOptions(binary="llama-server")
    return list(LLAMA.launch(LLAMA.settings(params), model, options, 8011).argv[1:])


def value(argv: list[str], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_the_adapter_is_an_engine_that_invents_nothing() -> None:
    engine: Engine = LLAMA
    assert not engine.simulated
    assert set(LLAMA.setting_names()) == set(LlamaCppSettings.__annotations__)


def test_what_is_not_set_is_left_to_the_engine() -> None:
    argv = flags()
    for flag in (
        "--batch-size", "--ubatch-size", "--gpu-layers", "--n-cpu-moe", "--threads",
        "--threads-batch", "--threads-http", "--chat-template-kwargs", "--load-mode", "--no-repack",
        "--swa-full", "--override-tensor", "--fit-target", "--jinja", "--no-jinja",
    ):  # fmt: skip
        assert flag not in argv
    assert not [flag for flag in argv if flag.startswith("--spec")]


def test_what_is_set_becomes_a_flag() -> None:
    argv = flags(
        context=2048, cache_type_k="q8_0", cache_type_v="q4_0", flash_attn="on", batch=64,
        ubatch=32, parallel=2, gpu_layers=0, n_cpu_moe=0, threads=3, threads_http=2, mmap=False,
        repack=False, swa_full=True, fit="on", cache_ram_mib=8, chat_template_kwargs='{"a": "b c"}',
    )  # fmt: skip
    expected = {
        "--model": "/models/gemma.gguf", "--alias": "gemma", "--host": "127.0.0.1",
        "--port": "8011", "--ctx-size": "2048", "--cache-type-k": "q8_0", "--cache-type-v": "q4_0",
        "--flash-attn": "on", "--batch-size": "64", "--ubatch-size": "32", "--parallel": "2",
        "--gpu-layers": "0", "--n-cpu-moe": "0", "--threads": "3", "--threads-batch": "3",
        "--threads-http": "2", "--fit": "on", "--cache-ram": "8",
        "--chat-template-kwargs": '{"a": "b c"}',
    }  # fmt: skip
    assert {flag: value(argv, flag) for flag in expected} == expected
    assert {"--no-repack", "--swa-full", "--metrics"} <= set(argv)
    assert value(argv, "--load-mode") == "none"


def test_the_default_command_line_is_what_every_recipe_shows() -> None:
    assert flags() == [
        "--model", "/models/gemma.gguf", "--alias", "gemma", "--host", "127.0.0.1",
        "--port", "8011", "--ctx-size", "4096", "--parallel", "1", "--cache-type-k", "f16",
        "--cache-type-v", "f16", "--flash-attn", "auto", "--fit", "off", "--cache-ram", "0",
        "--metrics", "--no-ui", "--verbosity", "4",
    ]  # fmt: skip


def test_layers_may_be_a_number_or_a_word_and_tensors_may_stay_behind() -> None:
    assert value(flags(gpu_layers="all"), "--gpu-layers") == "all"
    assert value(flags(gpu_layers="auto"), "--gpu-layers") == "auto"
    assert value(flags(gpu_layers=0), "--gpu-layers") == "0"
    argv = flags(override_tensor="exps=CPU", fit="on", fit_target_mib=2048, kv_offload=False)
    assert value(argv, "--override-tensor") == "exps=CPU"
    assert value(argv, "--fit-target") == "2048"
    assert "--no-kv-offload" in argv


def test_a_draft_has_its_own_cache_types_layers_and_sampling() -> None:
    argv = flags(
        spec_type="draft-mtp", n_max=3, draft_cache_type_k="q8_0", draft_cache_type_v="turbo3",
        draft_gpu_layers="all", draft_backend_sampling=False,
    )  # fmt: skip
    assert value(argv, "--spec-draft-type-k") == "q8_0"
    assert value(argv, "--spec-draft-type-v") == "turbo3"
    assert value(argv, "--spec-draft-ngl") == "all"
    assert "--no-spec-draft-backend-sampling" in argv
    assert "--spec-draft-backend-sampling" in flags(
        spec_type="draft-eagle3", draft_backend_sampling=True
    )


def test_kinds_of_speculation_may_be_combined() -> None:
    argv = flags(spec_type="draft-dflash,ngram-mod", n_max=6)
    assert value(argv, "--spec-type") == "draft-dflash,ngram-mod"
    assert value(argv, "--spec-draft-n-max") == value(argv, "--spec-ngram-mod-n-max") == "6"


@pytest.mark.parametrize(
    ("kwargs", "rendered"),
    [
        ({"enable_thinking": False, "level": "low"}, '{"enable_thinking": false, "level": "low"}'),
        ('{"nested": {"a": [1]}}', '{"nested": {"a": [1]}}'),
    ],
)
def test_arguments_of_the_template_are_text_or_a_mapping(kwargs: Any, rendered: str) -> None:
    argv = flags(chat_template_kwargs=kwargs)
    assert value(argv, "--chat-template-kwargs") == rendered
    assert hash(LLAMA.settings({"chat_template_kwargs": kwargs})) is not None


def test_a_build_of_2025_is_spoken_to_in_its_own_flags() -> None:
    draft = ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=1, sha256="", draft_path="/d"
    )
    argv = flags(
        draft, version=6060, spec_type="draft-simple", n_max=8, n_min=1, p_min=0.5,
        flash_attn="on", mmap=False, gpu_layers="all", draft_gpu_layers=99,
        draft_cache_type_k="q4_0",
    )  # fmt: skip
    assert value(argv, "--model-draft") == "/d"
    assert (value(argv, "--draft-max"), value(argv, "--draft-min")) == ("8", "1")
    assert value(argv, "--draft-p-min") == "0.5"
    assert value(argv, "--gpu-layers-draft") == "99"
    assert value(argv, "--cache-type-k-draft") == "q4_0"
    assert value(argv, "--gpu-layers") == "999"
    assert {"-fa", "--no-mmap", "--no-webui"} <= set(argv)
    assert not {"--fit", "--load-mode", "--cache-ram", "--spec-type", "--no-ui", "on"} & set(argv)
    assert not [flag for flag in argv if flag.startswith("--spec")]
    assert "-fa" not in flags(version=6060, flash_attn="off")


def test_between_the_two_the_flags_of_their_time_are_used() -> None:
    argv = flags(version=8500, spec_type="ngram-simple", n_max=8, ngram_size=12, fit="on")
    assert value(argv, "--spec-type") == "ngram-simple"
    assert (value(argv, "--spec-ngram-size-m"), value(argv, "--spec-ngram-size-n")) == ("8", "12")
    assert value(argv, "--fit") == "on"
    assert value(flags(version=11434, mmap=False), "--load-mode") == "none"
    assert "--no-mmap" in flags(version=9000, mmap=False)
    assert "--mlock" in flags(version=9000, load_mode="mmap+mlock")


@pytest.mark.parametrize(
    ("spec_type", "length", "lookup"),
    [
        ("ngram-simple", "--spec-ngram-simple-size-m", "--spec-ngram-simple-size-n"),
        ("ngram-map-k", "--spec-ngram-map-k-size-m", "--spec-ngram-map-k-size-n"),
        ("ngram-map-k4v", "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-size-n"),
        ("ngram-mod", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match"),
        ("draft-simple", "--spec-draft-n-max", None),
        ("mtp", "--spec-draft-n-max", None),
        ("draft-dflash", "--spec-draft-n-max", None),
        ("a-forks-own", "--spec-draft-n-max", None),
    ],
)
def test_each_kind_of_speculation_has_its_own_name_for_the_draft_length(
    spec_type: str, length: str, lookup: str | None
) -> None:
    argv = flags(spec_type=spec_type, n_max=7, ngram_size=5, n_min=0, p_min=0.25)
    assert value(argv, "--spec-type") == spec_type
    assert value(argv, length) == "7"
    assert argv.count("5") == (lookup is not None)
    assert lookup is None or value(argv, lookup) == "5"
    assert (value(argv, "--spec-draft-n-min"), value(argv, "--spec-draft-p-min")) == ("0", "0.25")


def test_a_draft_length_of_zero_is_no_speculation_and_none_is_the_engines_own() -> None:
    assert not [each for each in flags(spec_type="mtp", n_max=0) if each.startswith("--spec")]
    own = [each for each in flags(spec_type="mtp") if each.startswith("--spec")]
    assert own == ["--spec-type"]


def test_a_draft_model_is_named_only_where_drafts_are_made() -> None:
    draft = ModelFacts(
        name="m", path="/m", served_name="m", size_bytes=1, sha256="", draft_path="/d",
        draft_size_bytes=9,
    )  # fmt: skip
    assert value(flags(draft, spec_type="draft-simple", n_max=2), "--spec-draft-model") == "/d"
    assert "/d" not in flags(draft, spec_type="draft-simple", n_max=0)
    with_draft = LLAMA.settings({"spec_type": "draft-simple", "n_max": 2})
    assert LLAMA.footprint(with_draft, draft).bytes_of("draft") == 9
    assert LLAMA.footprint(LlamaCppSettings(), draft).bytes_of("draft") == 0


def test_the_launch_carries_the_options_of_the_study() -> None:
    options = EngineOptions(
        python="/py", env=Pairs(A="b"), extra_args=("--seed", "7"), boot_timeout_s=3.0,
        stop_timeout_s=2.0,
    )  # fmt: skip
    launch = LLAMA.launch(LlamaCppSettings(), GEMMA, options, 8011)
    assert launch.argv[:3] == ("/py", "-m", "sweeper.engines.llamacpp_wheel")
    assert launch.argv[-2:] == ("--seed", "7")
    assert launch.port_argument is not None
    assert launch.argv[launch.port_argument - 1 : launch.port_argument + 1] == ("--port", "8011")
    assert (launch.env, launch.boot_timeout_s, launch.stop_timeout_s) == (Pairs(A="b"), 3.0, 2.0)


def test_under_a_limit_arenas_do_not_count_as_memory_unless_the_study_says_so() -> None:
    def env(**stated: str) -> Pairs:
        options = EngineOptions(binary="x", memory_limit_bytes=2**30, env=Pairs(**stated))
        return LLAMA.launch(LlamaCppSettings(), GEMMA, options, 1).env

    assert env() == Pairs(
        MALLOC_ARENA_MAX="1",
        MALLOC_MMAP_THRESHOLD_="131072",
        GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )
    stated = {
        "MALLOC_ARENA_MAX": "4",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7",
    }
    assert env(**stated) == Pairs(**stated)
    assert LLAMA.launch(LlamaCppSettings(), GEMMA, EngineOptions(binary="x"), 1).env == Pairs()


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"context": 0}, "context"),
        ({"ubatch": 0}, "ubatch"),
        ({"parallel": 0}, "parallel"),
        ({"parallel": 3, "context": 2}, "parallel"),
        ({"threads_http": 0}, "threads_http"),
        ({"p_min": 1.5}, "p_min"),
        ({"n_max": -1}, "n_max"),
        ({"n_max": 4}, "n_max"),
        ({"gpu_layers": -1}, "gpu_layers"),
        ({"flash_attn": True}, "flash_attn"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"cache_type_q": "f16"}, "cache_type_q"),
        ({"spec_type": None}, "spec_type"),
        ({"gpu_layers": "some"}, "gpu_layers"),
        ({"draft_gpu_layers": -2}, "draft_gpu_layers"),
        ({"mmap": False, "load_mode": "dio"}, "load_mode"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "{no"}, "chat_template_kwargs"),
        ({"version": 0}, "version"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(params: dict[str, Any], key: str) -> None:
    with pytest.raises(FieldError) as refused:
        LLAMA.settings(params)
    assert refused.value.key == key


def test_the_slots_share_the_context() -> None:
    assert LLAMA.context_tokens(LlamaCppSettings(context=8192, parallel=4)) == 2048
    assert LLAMA.context_tokens(LlamaCppSettings(context=8192, parallel=4, kv_unified=True)) == 8192


def test_a_program_that_is_not_there_is_a_fault_of_the_host(tmp_path: Path) -> None:
    for options in (
        EngineOptions(binary=str(tmp_path / "no-server")),
        EngineOptions(python=str(tmp_path / "no-python")),
    ):
        fault = LLAMA.find(options)
        assert isinstance(fault, HostFault)
        assert name(fault) == "engine_not_found"
        assert str(tmp_path) in fault.finding.explanation
    assert LLAMA.find(EngineOptions(python=sys.executable)) == EngineOptions(python=sys.executable)
    found = LLAMA.find(EngineOptions(binary="sh"))
    assert isinstance(found, EngineOptions)
    assert found.binary is not None
    assert Path(found.binary).is_absolute()


# ---- The footprint -----------------------------------------------------------------------------


def footprint(**params: Any) -> Footprint:
    return LLAMA.footprint(LLAMA.settings(params), GEMMA)


@pytest.mark.parametrize(
    ("params", "printed_mib"),
    [
        ({"context": 8192, "ubatch": 512}, 24 + 15),
        ({"context": 4096, "ubatch": 128}, 12 + 11.25),
        ({"context": 32768, "cache_type_k": "q4_0", "cache_type_v": "q4_0"}, 27.0 + 4.22),
        ({"context": 256, "ubatch": 512}, 0.75 + 3.75),
        ({"context": 8192, "swa_full": True}, 24 + 120),
    ],
)
def test_the_kv_cache_is_what_the_engine_printed(
    params: dict[str, Any], printed_mib: float
) -> None:
    kv_mib = footprint(**params).bytes_of("kv_cache") / MIB
    assert kv_mib == pytest.approx(printed_mib, abs=0.01)


some_params = st.fixed_dictionaries(
    {
        "context": st.integers(4, 300_000),
        "ubatch": st.integers(1, 8192),
        "n_max": st.integers(0, 64),
        "spec_type": st.just("ngram-simple"),
        "parallel": st.integers(1, 4),
        "flash_attn": st.sampled_from(["on", "off"]),
        "cache_type_k": st.sampled_from(sorted(KV_BITS)),
        "cache_type_v": st.sampled_from(sorted(KV_BITS)),
        "swa_full": st.booleans(),
    }
)


def test_a_micro_batch_is_never_larger_than_the_batch() -> None:
    assert footprint(batch=128, ubatch=512) == footprint(batch=128, ubatch=128)
    assert footprint(batch=128).needs_at_least(footprint(batch=64))


def test_boots_with_other_numbers_of_threads_are_not_compared() -> None:
    assert not footprint(threads=64).needs_at_least(footprint(threads=1))


@pytest.mark.parametrize("argument", ["--host", "--host=0.0.0.0", "--port", "-m", "-c"])
def test_an_extra_argument_that_is_ours_to_set_is_refused(argument: str) -> None:
    options = EngineOptions(python="python", extra_args=(argument,))
    with pytest.raises(FieldError, match="extra_args"):
        LLAMA.launch(LlamaCppSettings(), GEMMA, options, 1)


def test_an_allocation_that_the_boot_survived_is_not_what_killed_it_later() -> None:
    log = [
        "E ggml_aligned_malloc: insufficient memory (attempted to allocate  31.00 MB)",
        "I srv  init: listening on http://127.0.0.1:1",
    ]
    death = Death(ended=Ended.EXITED, after_s=9, was_ready=True, exit_code=-11)
    assert LLAMA.verdict(death, log).name is BrokenName.ENGINE_DIED_MID_BENCHMARK


def test_a_torn_number_in_a_log_is_no_number() -> None:
    log = ["E ggml_aligned_malloc: insufficient memory (attempted to allocate . MB)"]
    death = Death(ended=Ended.EXITED, after_s=1, was_ready=False, exit_code=1)
    assert LLAMA.verdict(death, log).finding.facts.get("required_bytes") is None


@QUICK
@given(some_params, st.sampled_from(["context", "n_max", "ubatch"]), st.integers(0, 5000))
def test_asking_for_more_of_anything_never_needs_less(
    params: dict[str, Any], setting: str, more: int
) -> None:
    if setting == "n_max":
        params["n_max"] += 1  # from none to some is a step between what is not alike
    larger = footprint(**{**params, setting: params[setting] + more})
    assert larger.needs_at_least(footprint(**params))


@QUICK
@given(some_params)
def test_fewer_bits_never_need_more(params: dict[str, Any]) -> None:
    for side in ("cache_type_k", "cache_type_v"):
        several = [
            footprint(**{**params, side: each}).bytes_of("kv_cache")
            for each in ("q4_0", "q5_0", "q8_0", "f16", "f32")
        ]
        assert several == sorted(several)


def test_attention_without_flash_and_full_windows_need_more() -> None:
    on, off = footprint(flash_attn="on"), footprint(flash_attn="off")
    assert off.needs_at_least(on)
    assert not on.needs_at_least(off)
    assert footprint(context=32768, swa_full=True).needs_at_least(footprint(context=32768))


@pytest.mark.parametrize(
    "params",
    [
        {"spec_type": "ngram-simple", "n_max": 1},
        {"flash_attn": "on"},
        {"gpu_layers": 3},
        {"n_cpu_moe": 1},
        {"mmap": False},
        {"repack": False},
        {"fit": "on"},
        {"cache_type_k": "tbq3_0"},
        {"override_tensor": "exps=CPU"},
        {"load_mode": "dio"},
    ],
)
def test_what_moves_memory_in_an_unknown_way_is_never_compared(params: dict[str, Any]) -> None:
    huge, plain = footprint(context=10**6, **params), footprint(context=1)
    assert not huge.needs_at_least(plain)
    assert not plain.needs_at_least(huge)


def test_a_model_without_facts_still_has_its_weights() -> None:
    bare = ModelFacts(name="m", path="/m", served_name="m", size_bytes=77, sha256="")
    needs = LLAMA.footprint(LlamaCppSettings(), bare)
    assert (needs.bytes_of("weights"), needs.bytes_of("kv_cache")) == (77, 0)


# ---- Evidence and milestones -------------------------------------------------------------------


def test_a_log_shows_what_was_allocated() -> None:
    assert dict(LLAMA.evidence(log_of("ok"))) == {
        "engine_version": "b0-unknown",
        "weights_bytes": round(1.63 * MIB),
        "weights_host_bytes": round(1.63 * MIB),
        "kv_cache_bytes": 16 * MIB,
        "kv_cache_host_bytes": 16 * MIB,
        "kv_type_k": "f16",
        "kv_type_v": "f16",
        "kv_k_bytes": 8 * MIB,
        "kv_v_bytes": 8 * MIB,
        "kv_cells": 4096,
        "compute_bytes": round(6.64 * MIB),
        "compute_host_bytes": round(6.64 * MIB),
        "output_bytes": 0,
        "context_tokens": 4096,
        "ubatch_tokens": 512,
        "trained_context_tokens": 4096,
        "layers": 4,
        "slots": 1,
        "effective_context_tokens": 4096,
        "flash_attention": "enabled",
        "speculation": "none",
    }


def test_buffers_of_a_kind_are_summed_and_the_wheels_own_version_wins() -> None:
    log = [
        "version: xllamacpp 2026.10 (llama.cpp b9999)",
        "build_info: b0-unknown",
        "I llama_kv_cache:        CPU KV buffer size =    24.00 MiB",
        "I llama_kv_cache:        CPU KV buffer size =    15.00 MiB",
        "I llama_memory:          CPU RS buffer size =     2.50 MiB",
    ]
    facts = LLAMA.evidence(log)
    assert facts["engine_version"] == "xllamacpp 2026.10"
    assert (facts["kv_cache_bytes"], facts["rs_bytes"]) == (39 * MIB, round(2.5 * MIB))


def test_a_boot_opens_its_phases_in_order() -> None:
    opened = [phase for line in log_of("ok") if (phase := LLAMA.milestone(line)) is not None]
    first = list(dict.fromkeys(opened))
    assert first == [
        Phase.CONFIG, Phase.WEIGHTS, Phase.CONTEXT, Phase.KV, Phase.COMPUTE, Phase.WARMUP,
        Phase.READY,
    ]  # fmt: skip


# ---- Verdicts on real logs ---------------------------------------------------------------------

ABORT = -signal.SIGABRT
REAL = [
    # log, exit code, limit in KiB, name, phase
    ("oom_weights", 1, 400_000, "oom_weights", Phase.WEIGHTS),
    ("oom_kv_cache", 1, 700_000, "oom_kv_cache", Phase.KV),
    ("oom_compute", 1, 700_000, "oom_compute", Phase.COMPUTE),
    ("oom_vocabulary", 1, 150_000, "oom_weights", Phase.WEIGHTS),
    ("oom_mmap", 1, 200_000, "oom_weights", Phase.WEIGHTS),
    ("oom_context", 1, 190_000, "oom_compute", Phase.COMPUTE),
    ("abort_assert", ABORT, 180_000, "oom_compute", Phase.COMPUTE),
    ("abort_bad_alloc", ABORT, 200_000, "oom_compute", Phase.COMPUTE),
    ("abort_http_thread", ABORT, 230_000, "oom_compute", Phase.CONFIG),
    ("abort_openmp_thread", 1, 340_000, "oom_compute", Phase.WARMUP),
    ("abort_other_thread", ABORT, 320_000, "oom_runtime", Phase.SERVING),
    ("quantised_v_without_fa", 1, None, "unsupported_combination", Phase.CONTEXT),
    ("missing_model", 1, None, "model_not_found_or_gated", None),
    ("corrupt_model", 1, None, "model_not_found_or_gated", None),
    ("bad_flag", 1, None, "bad_argument", Phase.ARGS),
    ("bad_kv_type", 1, None, "bad_argument", Phase.ARGS),
    ("port_in_use", 1, None, "port_in_use", None),
    ("gpu_oom_weights", 1, None, "oom_weights", Phase.WEIGHTS),
    ("gpu_bad_flag", 1, None, "bad_argument", Phase.ARGS),
    ("gpu_h200_bad_flag", 1, None, "bad_argument", Phase.ARGS),
    ("gpu_h200_bad_kv_type", 1, None, "bad_argument", Phase.ARGS),
    ("gpu_h200_quantised_v_without_fa", 1, None, "unsupported_combination", Phase.CONTEXT),
    ("gpu_h200_cut_model", 1, None, "model_not_found_or_gated", Phase.WEIGHTS),
    ("gpu_h200_no_mtp_layers", 1, None, "unsupported_combination", Phase.DRAFT),
    ("gpu_h200_oom_kv", 1, None, "oom_kv_cache", Phase.KV),
    ("gpu_h200_oom_compute", 1, None, "oom_compute", Phase.COMPUTE),
    ("gpu_h200_oom_weights", 1, None, "oom_weights", Phase.WEIGHTS),
]
SERVED = [
    "ok", "gpu_ok", "gpu_cpu_moe", "gpu_fit", "gpu_some_layers", "gpu_one_slot", "gpu_128k",
    "gpu_h200_fit_serves",
]  # fmt: skip


def test_an_ending_for_a_stack_names_what_was_asked_for_and_the_limit() -> None:
    said = "sweeper: limit on the address space 478150656 bytes, stack of a thread 1048576 bytes"
    log = [said, *log_of("abort_other_thread")]
    failure = LLAMA.verdict(exited(ABORT, limit_bytes=478150656), log)
    assert failure.finding.explanation == (
        "memory ran out for the stack of a thread: 1.0 MiB were asked for under the limit of "
        "456 MiB on the address space"
    )
    assert failure.finding.facts.get("required_bytes") == 2**20
    assert failure.finding.facts.get("limit_bytes") == 478150656
    # The limit is known from the log alone as well, the stack of another program's thread never.
    alone = LLAMA.diagnose(log, ABORT)
    assert alone.finding.facts.get("limit_bytes") == 478150656
    failure = LLAMA.verdict(exited(ABORT, limit_bytes=2**29), log_of("abort_other_thread"))
    assert failure.finding.explanation == (
        "memory ran out for the stack of a thread under the limit of 512 MiB on the address space"
    )


def test_every_log_that_ends_has_its_verdict_here() -> None:
    ending = {path.stem for path in LOGS.glob("*.log")} - {*SERVED, "draft_vocab_mismatch"}
    assert {each[0] for each in REAL} == ending


@pytest.mark.parametrize(("log", "code", "limit_kib", "ending", "phase"), REAL)
def test_a_real_log_is_named_by_its_phase_and_its_words(
    log: str, code: int, limit_kib: int | None, ending: str, phase: Phase | None
) -> None:
    limit_bytes = None if limit_kib is None else limit_kib * 1024
    death = exited(code, limit_bytes=limit_bytes)
    failure = LLAMA.verdict(death, log_of(log))
    assert name(failure) == ending
    assert phase in (None, failure.finding.phase)
    assert failure.finding.cause
    assert failure.finding.cause in "\n".join(log_of(log))
    assert failure.finding.facts.get("limit_bytes") == limit_bytes
    assert LLAMA.verdict(death, log_of(log)) == failure


@pytest.mark.parametrize(
    ("log", "required", "used", "limit"),
    [
        ("oom_weights", 233_316_864, 401_477_632, 409_600_000),
        ("oom_kv_cache", 536_870_912, 339_439_616, 716_800_000),
        ("oom_compute", 1_386_446_880, 339_496_960, 716_800_000),
    ],
)
def test_a_buffer_that_did_not_fit_tells_how_much_was_missing(
    log: str, required: int, used: int, limit: int
) -> None:
    finding = LLAMA.verdict(exited(1, limit_bytes=limit), log_of(log)).finding
    shown = {key: value for key, value in finding.facts.items() if key.endswith("_bytes")}
    assert finding.facts["kind"] == log.removeprefix("oom_").removesuffix("_cache")
    assert shown == {
        "required_bytes": required,
        "limit_bytes": limit,
        "free_bytes": limit - used,
        "shortfall_bytes": required - (limit - used),
    }
    assert f"{required / MIB:.1f} MiB were asked for" in finding.explanation
    assert "too few" in finding.explanation


@pytest.mark.parametrize("log", ["abort_http_thread", "abort_openmp_thread", "abort_other_thread"])
def test_without_a_limit_a_missing_thread_is_not_blamed_on_memory(log: str) -> None:
    assert kind(LLAMA.verdict(exited(ABORT), log_of(log))) == "broken"


# ---- Logs alone --------------------------------------------------------------------------------

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases_llamacpp.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_log_alone_is_named_in_outcome_phase_and_facts(case: dict[str, Any]) -> None:
    found = LLAMA.diagnose(case["log"].split("\n"), case["exit"])
    assert name(found) == case["outcome"]
    assert case["phase"] in (None, found.finding.phase)
    assert case["facts"].items() <= dict(found.finding.facts).items()
    assert found.finding.explanation


def in_another_dress(line: str, at: int) -> str:
    """The same line as a build with prefixes says it, in colour, behind a wrapper's name."""
    prefixes = ("llama-swap-1  | ", "0.01.002.003 E ", "\x1b[31mE\x1b[0m ", "")
    return f"{prefixes[at % 4]}{line}\r"


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["outcome"] != "unknown"], ids=lambda case: case["id"]
)
def test_prefixes_colours_and_wrappers_change_nothing(case: dict[str, Any]) -> None:
    dressed = [in_another_dress(line, at) for at, line in enumerate(case["log"].split("\n"))]
    assert name(LLAMA.diagnose(dressed, case["exit"])) == case["outcome"]


@pytest.mark.parametrize("log", SERVED)
def test_a_real_log_of_a_server_that_came_up_is_nothing(log: str) -> None:
    for code in (None, 0, -signal.SIGTERM, 143):
        found = LLAMA.diagnose(log_of(log), code)
        assert isinstance(found, Nothing)
        assert found.finding.phase is Phase.READY


@pytest.mark.parametrize(("log", "code", "limit_kib", "ending", "phase"), REAL)
def test_a_real_ending_reads_the_same_when_nothing_but_the_log_is_known(
    log: str, code: int, limit_kib: int | None, ending: str, phase: Phase | None
) -> None:
    if "abort_" in log:
        return  # without a limit a missing thread is not blamed on memory
    found = LLAMA.diagnose(log_of(log), code)
    assert name(found) == ending
    assert phase in (None, found.finding.phase)


def test_a_draft_that_does_not_fit_its_target_is_a_silent_fallback() -> None:
    found = LLAMA.diagnose(log_of("draft_vocab_mismatch"), None)
    assert (kind(found), name(found)) == ("unfit", "silent_fallback")


def test_a_log_is_streamed_and_what_is_kept_does_not_grow() -> None:
    def endless() -> Iterator[str]:
        yield from log_of("gpu_ok")
        served = [line for line in log_of("gpu_ok") if "slot" in line]
        yield from itertools.islice(itertools.cycle(served), 20_000)
        yield "x" * 10_000_000

    reading = read(endless())
    assert reading.ready
    assert len(reading.last_line) < 5000
    assert len(reading.facts) + len(reading.seen) + len(reading.counts) < 60


def test_what_ran_out_says_what_to_try() -> None:
    boot = [
        "I   - CUDA0   : NVIDIA GeForce RTX 4090 (24080 MiB, 20000 MiB free)",
        "I load_tensors: loading model tensors, this can take a while...",
        "I load_tensors:        CUDA0 model buffer size = 14000.00 MiB",
        "I llama_context: constructing llama_context",
        "I llama_context: n_ctx                 = 131072",
        "I llama_context: n_ubatch              = 1024",
    ]
    refused = "E x: allocating {} MiB on device 0: cudaMalloc failed: out of memory"
    kv = LLAMA.diagnose(
        [*boot, refused.format("12000.00"), "E y: failed to allocate buffer for kv cache"], 1
    ).finding
    assert kv.facts["free_bytes"] == 6000 * MIB
    assert kv.facts["shortfall_bytes"] == 6000 * MIB
    assert dict(kv.try_next) == {"context": 65536}
    compute = LLAMA.diagnose(
        [*boot, refused.format("9000.00"), "E y: failed to allocate compute pp buffers"], 1
    ).finding
    assert dict(compute.try_next) == {"ubatch": 512}
    fitted = "I common_fit_params: successfully fit params to free device memory"
    draft = LLAMA.diagnose(
        [fitted, refused.format("1500.50"), "E srv: failed to create MTP context"], 1
    ).finding
    assert dict(draft.try_next) == {"fit_target_mib": 1501}


# ---- Evidence of GPUs, fitting and forks -------------------------------------------------------


def test_sizes_are_summed_over_devices_and_over_classes_of_device() -> None:
    facts = LLAMA.evidence([
        "ggml_cuda_init: found 2 CUDA devices (Total VRAM: 48160 MiB):",
        "load_from_file_impl: using device CUDA0 (NVIDIA A) (0000:01:00.0) - 20000 MiB free",
        "load_from_file_impl: using device CUDA1 (NVIDIA A) (0000:02:00.0) - 22000 MiB free",
        "load_tensors: loading model tensors, this can take a while... (mmap = true)",
        "load_tensors: offloaded 40/65 layers to GPU",
        "load_tensors:        CUDA0 model buffer size =  8000.00 MiB",
        "load_tensors:        CUDA1 model buffer size =  7000.00 MiB",
        "load_tensors:   CPU_Mapped model buffer size =  9000.00 MiB",
        "llama_context: constructing llama_context",
        "llama_context:  CUDA_Host  output buffer size =     1.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =   100.00 MiB",
        "llama_kv_cache: size =  100.00 MiB (  8192 cells,  40 layers,  1/1 seqs), "
        "K (q8_0):   60.00 MiB, V (q4_0):   40.00 MiB",
        "draft acceptance = 0.50000 (   10 accepted /    20 generated), mean len =  2.50",
        "draft acceptance = 0.25000 (    5 accepted /    20 generated), mean len =  1.50",
    ])  # fmt: skip
    expected = {
        "weights_bytes": 24000 * MIB, "weights_gpu_bytes": 15000 * MIB,
        "weights_host_bytes": 9000 * MIB, "output_host_bytes": MIB, "kv_cache_gpu_bytes": 100 * MIB,
        "kv_type_k": "q8_0", "kv_type_v": "q4_0", "kv_cells": 8192, "offloaded_layers": 40,
        "all_layers": 65, "device_free_bytes": 42000 * MIB,
        "devices": "CUDA0: NVIDIA A; CUDA1: NVIDIA A",
        "drafted_tokens": 40, "accepted_tokens": 15, "acceptance": 0.375, "mean_draft_tokens": 1.5,
    }  # fmt: skip
    assert {key: facts.get(key) for key in expected} == expected


def test_what_fitting_measured_is_not_counted_again() -> None:
    context = [
        "llama_context: constructing llama_context",
        "llama_kv_cache:      CUDA0 KV buffer size =   100.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    50.00 MiB",
    ]
    load = [
        "load_tensors: loading model tensors, this can take a while...",
        "load_tensors:        CUDA0 model buffer size =  8000.00 MiB",
    ]
    decided = [
        "fit_impl: projected to use 9000 MiB of device memory vs. 8800 MiB of free device memory",
        "fit_impl: context size reduced from 65536 to 40960 -> need 300 MiB less memory in total",
        "common_fit_params: successfully fit params to free device memory",
    ]  # fmt: skip
    draft = [
        "common_speculative_init_result: creating MTP draft context against the target model 'x'",
        "llama_context: constructing llama_context",
        "llama_kv_cache:      CUDA0 KV buffer size =     7.00 MiB",
    ]
    facts = LLAMA.evidence([*load, *context, *decided, *load, *context, *draft])
    expected = {
        "weights_bytes": 8000 * MIB, "kv_cache_bytes": 100 * MIB, "compute_bytes": 50 * MIB,
        "draft_kv_cache_bytes": 7 * MIB, "fit": "fitted", "fit_projected_bytes": 9000 * MIB,
        "fit_free_bytes": 8800 * MIB, "fit_from_tokens": 65536, "fit_context_tokens": 40960,
    }  # fmt: skip
    assert {key: facts.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("line", "version", "build"),
    [
        ("build: 6060 (9c35706b) with cc (GCC) 13.2 for x86_64", "6060 (9c35706b) with cc", 6060),
        ("0.00.001.000 I srv llama_server: build_info: b11434-0c1e570", "b11434-0c1e570", 11434),
        ("version: 0.1.0-dev (build 10437, commit 16d222fc5)", "0.1.0-dev (build 10437", 10437),
        ("version: turbo-fork 1.2 (deadbeef)", "turbo-fork 1.2 (deadbeef)", None),
    ],
)
def test_a_version_is_read_from_any_build_and_from_forks(
    line: str, version: str, build: int | None
) -> None:
    facts = LLAMA.evidence([line])
    assert str(facts["engine_version"]).startswith(version)
    assert facts.get("engine_build") == build


# ---- Asked against effective -------------------------------------------------------------------


def props(n_ctx: int, **more: Any) -> str:
    slot = {"n_ctx": n_ctx, **{key: more.pop(key) for key in ("speculative",) if key in more}}
    return json.dumps({"default_generation_settings": slot, **more})


@pytest.mark.parametrize(
    ("params", "facts", "page", "ending"),
    [
        ({"context": 8192}, {"effective_context_tokens": 4096}, None, "silent_context_truncation"),
        ({"context": 8192}, {}, props(2048), "silent_context_truncation"),
        ({"context": 8192, "parallel": 2}, {"effective_context_tokens": 4096}, props(4096), None),
        ({"context": 5000}, {"effective_context_tokens": 5120}, props(5120), None),
        ({"context": 4096, "parallel": 2, "kv_unified": True}, {}, props(2048),
         "silent_context_truncation"),
        ({"spec_type": "draft-mtp"}, {"speculation_off": "failed to init"}, None,
         "silent_fallback"),
        ({"spec_type": "draft-mtp"}, {"speculation": "none"}, None, "silent_fallback"),
        ({"spec_type": "draft-mtp"}, {"speculation": "draft-mtp"}, props(4096), None),
        ({"spec_type": "draft-mtp"}, {}, props(4096, speculative=False), "silent_fallback"),
        ({"spec_type": "ngram-mod"}, {}, props(4096, speculative=False), None),
        ({"spec_type": "draft-mtp"}, {"drafted_tokens": 400, "accepted_tokens": 0}, None,
         "draft_ineffective"),
        ({}, {"speculation": "none"}, None, None),
        ({"gpu_layers": 99}, {"offloaded_layers": 33, "all_layers": 33}, None, None),
        ({"gpu_layers": "all"}, {"offloaded_layers": 20, "all_layers": 33}, None,
         "silent_fallback"),
        ({"gpu_layers": 24}, {"offloaded_layers": 24, "all_layers": 33}, None, None),
        ({"gpu_layers": 24}, {"offloaded_layers": 0, "all_layers": 33}, None, "silent_fallback"),
        ({"gpu_layers": "auto"}, {"offloaded_layers": 0, "all_layers": 33}, None, None),
        ({"gpu_layers": 24}, {"gpu_ignored": True}, None, "silent_fallback"),
        ({"gpu_layers": 0}, {"gpu_ignored": True}, None, None),
        ({"flash_attn": "on"}, {"flash_attention": "disabled"}, None, "silent_fallback"),
        ({"flash_attn": "auto"}, {"flash_attention": "disabled"}, None, None),
        ({"cache_type_v": "q8_0"}, {"kv_type_v": "f16"}, None, "silent_fallback"),
        ({"cache_type_v": "turbo3"}, {"kv_type_v": "tbq3_0"}, None, None),
        ({"parallel": 4}, {}, props(4096, total_slots=1), "degraded_capacity"),
        ({}, {}, "not a page", None),
        ({}, {}, "[1]", None),
    ],
)  # fmt: skip
def test_what_runs_is_compared_with_what_was_asked_for(
    params: dict[str, Any], facts: dict[str, Any], page: str | None, ending: str | None
) -> None:
    found = LLAMA.contradiction(LLAMA.settings(params), Pairs(facts), page)
    assert (None if found is None else name(found)) == ending
    assert found is None or (isinstance(found, Unfit) and found.finding.explanation)


@pytest.mark.parametrize("log", ["ok", "gpu_ok", "gpu_one_slot"])
def test_a_real_boot_contradicts_nothing_that_it_was_asked_for(log: str) -> None:
    window = re.search(r"n_ctx_slot = (\d+)", "\n".join(log_of(log)))
    assert window is not None
    asked = LLAMA.settings({"context": int(window[1]), "flash_attn": "auto"})
    assert LLAMA.contradiction(asked, LLAMA.evidence(log_of(log)), props(int(window[1]))) is None


# ---- Verdicts while it serves ------------------------------------------------------------------

RUNTIME_OOM = [
    "0.08.585.434 E ggml_aligned_malloc: insufficient memory (attempted to allocate  31.00 MB)",
    "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 32505856",
    "E output_reserve: failed to allocate output buffer of size 31.00 MiB",
    "E decode: could not reserve space for batch with 31 outputs",
    "E srv        decode: Compute error. off = 0, n_batch = 2048, ret = -2",
]
FULL_CACHE = "W decode: failed to find free space in the KV cache, retrying with smaller batch size"


def test_a_server_that_lives_but_ran_out_of_memory_is_oom_at_runtime() -> None:
    failure = LLAMA.verdict(lives(), [*log_of("ok"), *RUNTIME_OOM])
    assert isinstance(failure, Infeasible)
    assert (name(failure), failure.finding.phase) == ("oom_runtime", Phase.SERVING)
    assert failure.finding.facts["required_bytes"] == 31 * MIB
    assert failure.finding.cause == RUNTIME_OOM[0]


def test_a_server_that_lives_and_had_memory_enough_failed_its_request() -> None:
    failure = LLAMA.verdict(lives("HTTP 500: broken"), log_of("ok"))
    assert (name(failure), failure.finding.phase) == ("http_500", Phase.SERVING)
    assert "HTTP 500: broken" in failure.finding.explanation


def test_what_the_engine_recovered_from_does_not_count() -> None:
    recovered = [*log_of("ok"), RUNTIME_OOM[0], FULL_CACHE]
    assert name(LLAMA.verdict(lives(), recovered)) == "http_500"
    assert name(LLAMA.verdict(exited(1, was_ready=True), recovered)) == "engine_died_mid_benchmark"
    # But what came after does.
    assert name(LLAMA.verdict(lives(), [*recovered, *RUNTIME_OOM])) == "oom_runtime"
    fitting = "E common_fit_params: failed to allocate, which is normal during memory fitting"
    assert name(LLAMA.verdict(exited(-11), [RUNTIME_OOM[1], fitting])) == "engine_crash"


@pytest.mark.parametrize(("code", "words"), [(0, "code 0"), (1, "code 1"), (-11, "signal 11")])
def test_an_end_after_readiness_is_a_death_in_the_benchmark(code: int, words: str) -> None:
    failure = LLAMA.verdict(exited(code, was_ready=True), log_of("ok"))
    assert name(failure) == "engine_died_mid_benchmark"
    assert words in failure.finding.explanation


def test_a_segfault_while_booting_is_a_crash_in_its_phase() -> None:
    log = log_of("ok")
    log = log[: next(i for i, line in enumerate(log) if "sched_reserve" in line)]
    failure = LLAMA.verdict(exited(-signal.SIGSEGV), log)
    assert (name(failure), failure.finding.phase) == ("engine_crash", Phase.KV)
    assert "killed by signal 11" in failure.finding.explanation


def test_words_of_the_host_after_readiness_decide_nothing() -> None:
    log = [*log_of("ok"), "E srv: No such file", "E srv: invalid argument: x"]
    assert name(LLAMA.verdict(exited(1, was_ready=True), log)) == "engine_died_mid_benchmark"


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("E ggml_cuda_init: CUDA driver version is insufficient for", "driver_mismatch"),
        ("E llama: write failed: No space left on device", "disk_full"),
        ("E load: unknown model architecture: 'qwen9'", "model_unsupported_arch"),
        ("E init: type q5_0 with block size 32 does not divide n_embd_head_k=40",
         "unsupported_combination"),
        ("E alloc: allocating 100.00 MiB on device 0: cudaMalloc failed: out of memory",
         "oom_weights"),
    ],
)  # fmt: skip
def test_a_telling_line_of_a_boot_is_the_cause(line: str, ending: str) -> None:
    failure = LLAMA.verdict(exited(1), ["I srv: loading model", line, "E srv: exiting"])
    assert (name(failure), failure.finding.cause) == (ending, line)


def test_a_boot_that_never_began_hangs_and_one_that_had_begun_is_late() -> None:
    late = Death(ended=Ended.LATE, after_s=60.0, was_ready=False)
    assert name(LLAMA.verdict(late, [])) == "hang_boot"
    log = log_of("ok")[:60]
    failure = LLAMA.verdict(late, log)
    assert (name(failure), failure.finding.phase) == ("boot_timeout", Phase.WEIGHTS)


def test_a_taken_port_and_a_missing_program_need_no_log() -> None:
    taken = Death(ended=Ended.PORT_TAKEN, after_s=0.1, was_ready=False, detail="pid 7 listens")
    assert name(LLAMA.verdict(taken, [])) == "port_in_use"
    missing = Death(ended=Ended.NOT_STARTED, after_s=0.0, was_ready=False, detail="no such file")
    failure = LLAMA.verdict(missing, [])
    assert (name(failure), failure.finding.cause) == ("engine_not_found", "no such file")


@QUICK
@given(
    st.sampled_from(list(Ended)),
    st.booleans(),
    st.none() | st.integers(-64, 255),
    st.none() | st.just(2**30),
    st.lists(
        st.sampled_from([*RUNTIME_OOM, FULL_CACHE, *log_of("oom_compute")[-12:], "", "\r"])
        | st.text(max_size=40)
    ),
)
def test_any_end_with_any_log_has_a_verdict(
    ended: Ended, was_ready: bool, code: int | None, limit: int | None, log: list[str]
) -> None:
    death = Death(ended=ended, after_s=1.0, was_ready=was_ready, exit_code=code, limit_bytes=limit)
    failure = LLAMA.verdict(death, log)
    assert kind(failure) in ("infeasible", "broken", "host_fault")
    assert failure.finding.explanation
    if ended is Ended.LIVES and was_ready:
        assert name(failure) in ("http_500", "oom_runtime", "port_in_use")
    LLAMA.evidence(log)


# ---- Speculation's counters --------------------------------------------------------------------

METRICS = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 12
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 5
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 20
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total 9
# TYPE llamacpp:spec_decode_num_accepted_tokens_per_pos_total counter
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 1
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 5
"""


def test_the_counters_of_speculation_are_read_from_the_metrics() -> None:
    assert LLAMA.draft_counters(METRICS) == DraftCounters(
        steps=5, drafted=20, accepted=9, accepted_per_position=(5, 0, 1)
    )


def test_a_server_that_counts_no_drafts_has_no_counters() -> None:
    assert LLAMA.draft_counters("") is None
    assert LLAMA.draft_counters("\n".join(METRICS.split("\n")[:3]) + "\n") is None
