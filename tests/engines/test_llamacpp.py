"""The llama.cpp adapter, purely: its flags, its memory, and what its logs mean."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.launch import Death, Ended, Phase
from sweeper.core.memory import Footprint
from sweeper.core.outcome import BrokenName, HostFault, Infeasible, kind, name
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.llamacpp import KV_BITS, MIB, LlamaCpp, LlamaCppSettings

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
        "--threads-batch", "--threads-http", "--chat-template-kwargs", "--no-mmap", "--no-repack",
        "--swa-full",
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
    assert {"--no-mmap", "--no-repack", "--swa-full", "--metrics"} <= set(argv)


@pytest.mark.parametrize(
    ("spec_type", "length", "lookup"),
    [
        ("ngram-simple", "--spec-ngram-simple-size-m", "--spec-ngram-simple-size-n"),
        ("ngram-map-k", "--spec-ngram-map-k-size-m", "--spec-ngram-map-k-size-n"),
        ("ngram-map-k4v", "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-size-n"),
        ("ngram-mod", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match"),
        ("draft-simple", "--spec-draft-n-max", None),
        ("mtp", "--spec-draft-n-max", None),
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

    assert env() == Pairs(MALLOC_ARENA_MAX="1")
    assert env(MALLOC_ARENA_MAX="4") == Pairs(MALLOC_ARENA_MAX="4")


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
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(params: dict[str, Any], key: str) -> None:
    with pytest.raises(FieldError) as refused:
        LLAMA.settings(params)
    assert refused.value.key == key


def test_the_slots_share_the_context() -> None:
    assert LLAMA.context_tokens(LlamaCppSettings(context=8192, parallel=4)) == 2048


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
        "kv_cache_bytes": 16 * MIB,
        "compute_bytes": round(6.64 * MIB),
        "output_bytes": 0,
        "effective_context_tokens": 4096,
        "flash_attention": "enabled",
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
        Phase.CONFIG, Phase.WEIGHTS, Phase.KV, Phase.COMPUTE, Phase.WARMUP, Phase.READY,
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
    ("quantised_v_without_fa", 1, None, "unsupported_combination", None),
    ("missing_model", 1, None, "model_not_found_or_gated", None),
    ("corrupt_model", 1, None, "model_not_found_or_gated", None),
    ("bad_flag", 1, None, "bad_argument", Phase.SPAWN),
    ("bad_kv_type", 1, None, "bad_argument", Phase.SPAWN),
    ("port_in_use", 1, None, "port_in_use", None),
]


def test_every_log_that_ends_has_its_verdict_here() -> None:
    ending = {path.stem for path in LOGS.glob("*.log")} - {"ok", "draft_vocab_mismatch"}
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
    ("log", "required_mib", "used", "limit"),
    [
        ("oom_weights", 222.51, 401_477_632, 409_600_000),
        ("oom_kv_cache", 512.0, 339_439_616, 716_800_000),
        ("oom_compute", 1322.22, 339_496_960, 716_800_000),
    ],
)
def test_a_buffer_that_did_not_fit_tells_how_much_was_missing(
    log: str, required_mib: float, used: int, limit: int
) -> None:
    finding = LLAMA.verdict(exited(1, limit_bytes=limit), log_of(log)).finding
    required = round(required_mib * MIB)
    assert dict(finding.facts) == {
        "required_bytes": required,
        "limit_bytes": limit,
        "free_bytes": limit - used,
        "shortfall_bytes": required - (limit - used),
    }
    assert f"{required_mib:.1f} MiB were asked for" in finding.explanation
    assert "too few" in finding.explanation


@pytest.mark.parametrize("log", ["abort_http_thread", "abort_openmp_thread", "abort_other_thread"])
def test_without_a_limit_a_missing_thread_is_not_blamed_on_memory(log: str) -> None:
    assert kind(LLAMA.verdict(exited(ABORT), log_of(log))) == "broken"


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
