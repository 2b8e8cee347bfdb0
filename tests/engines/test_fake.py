"""The simulated engine: its adapter as pure functions, and its server as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sweeper.core.launch import Death, Ended, Phase
from sweeper.core.outcome import Broken, HostFault, Infeasible, kind, name
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.fake import Fake, FakeSettings
from sweeper.engines.fake_server import MIB, Options, tokenize

FAKE = Fake()
MODEL = ModelFacts(
    name="demo", path="/models/demo", served_name="demo", size_bytes=0, sha256="0" * 64
)
FAST = {"time_scale": 1e6}
TEN = {"max_tokens": 10}


def argv(**params: Any) -> tuple[str, ...]:
    """Return the command line of these settings, on a port of the system's choice."""
    options = FAKE.find(EngineOptions())
    assert isinstance(options, EngineOptions)
    return FAKE.launch(FAKE.settings({**FAST, **params}), MODEL, options, port=0).argv


def run_to_end(command: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return the exit code and the log of a process that ends by itself."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
    return done.returncode, done.stdout.decode().split("\n")


def exited(code: int | None, *, was_ready: bool = False, limit_bytes: int | None = None) -> Death:
    return Death(
        ended=Ended.EXITED,
        after_s=1.0,
        was_ready=was_ready,
        exit_code=code,
        limit_bytes=limit_bytes,
    )


@dataclass
class Running:
    """A server that is ready, with what it printed until then."""

    process: subprocess.Popen[str]
    client: httpx.Client
    log: list[str]

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, without the [DONE] that must be the last."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def wait(self) -> tuple[int, list[str]]:
        """Return the exit code and the whole log of a server that has ended or is about to."""
        rest, _ = self.process.communicate(timeout=20)
        return self.process.returncode, [*self.log, *rest.split("\n")]


@contextlib.contextmanager
def running(*, until: str = "ready on http://", **params: Any) -> Iterator[Running]:
    """Start a server, wait for the line that names its address, and kill its group at the end."""
    process = subprocess.Popen(
        argv(**params),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        log: list[str] = []
        address = None
        while address is None:
            line = process.stdout.readline()
            assert line, f"ended before it was ready: {log}"
            log.append(line.rstrip("\n"))
            address = re.match(rf"fake: {until}(127\.0\.0\.1:\d+)", line)
        with httpx.Client(base_url=f"http://{address[1]}", timeout=20, trust_env=False) as client:
            yield Running(process=process, client=client, log=log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def texts(events: list[dict[str, Any]]) -> list[str]:
    """Return the pieces of text of a stream of completions."""
    return [
        event["choices"][0]["text"]
        for event in events
        if event["choices"] and event["choices"][0]["text"]
    ]


# ---- Settings, footprint and launch ------------------------------------------------------------


def test_the_adapter_is_an_engine_and_says_that_it_is_simulated() -> None:
    engine: Engine = FAKE
    assert engine.simulated
    assert engine.evidence([])["simulated"] is True
    assert engine.evidence([])["engine_version"] == "1.0"


def test_every_setting_is_a_flag_of_the_server_with_the_same_default() -> None:
    for setting in FAKE.setting_names():
        assert getattr(FakeSettings(), setting) == getattr(Options, setting)
    assert {*FAKE.setting_names(), "port", "model"} == set(Options.__annotations__)


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"context": 0}, "context"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"weights_mib": float("nan")}, "weights_mib"),
        ({"kv_type": "f8"}, "kv_type"),
        ({"flash_attn": True}, "flash_attn"),
        ({"ending": "crash-bot"}, "ending"),
        ({"contxt": 1}, "contxt"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(params: dict[str, Any], key: str) -> None:
    with pytest.raises(FieldError) as refused:
        FAKE.settings(params)
    assert refused.value.key == key


def test_a_misspelt_ending_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(FieldError, match="did you mean crash-boot"):
        FAKE.settings({"ending": "crash-bot"})


def test_a_named_python_stays_and_a_missing_one_is_this_one() -> None:
    named = EngineOptions(python="/opt/python")
    assert FAKE.find(named) == named
    found = FAKE.find(EngineOptions())
    assert isinstance(found, EngineOptions)
    assert found.python is not None


def test_the_launch_carries_the_options_of_the_study() -> None:
    options = EngineOptions(
        python="py",
        env=Pairs(A="b"),
        extra_args=("--seed", "7"),
        boot_timeout_s=3.0,
        stop_timeout_s=2.0,
        memory_limit_bytes=2**31,
    )
    launch = FAKE.launch(FakeSettings(context=100), MODEL, options, port=8000)
    assert launch.argv[:3] == ("py", "-m", "sweeper.engines.fake_server")
    assert launch.argv[-2:] == ("--seed", "7")
    assert launch.argv[launch.argv.index("--context") + 1] == "100"
    assert launch.base_url == "http://127.0.0.1:8000"
    assert (launch.env, launch.boot_timeout_s, launch.stop_timeout_s) == (Pairs(A="b"), 3.0, 2.0)
    assert launch.memory_limit_bytes == 2**31


sizes = st.floats(0, 4096, allow_nan=False)
some_settings = st.builds(
    FakeSettings,
    context=st.integers(1, 300_000),
    kv_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
    n_max=st.integers(0, 8),
    batch=st.integers(1, 4096),
    weights_mib=sizes,
    kv_kib_per_token=sizes,
    draft_mib=sizes,
    compute_mib=sizes,
)


@given(
    some_settings,
    st.sampled_from(["context", "n_max", "batch", "weights_mib", "draft_mib", "compute_mib"]),
    st.integers(0, 1000),
)
def test_asking_for_more_of_anything_never_needs_less(
    settings: FakeSettings, setting: str, more: int
) -> None:
    params = {each: getattr(settings, each) for each in FAKE.setting_names()}
    larger = FAKE.settings({**params, setting: params[setting] + more})
    assert FAKE.footprint(larger, MODEL).needs_at_least(FAKE.footprint(settings, MODEL))


@given(some_settings)
def test_a_smaller_kv_type_never_needs_more(settings: FakeSettings) -> None:
    params = {each: getattr(settings, each) for each in FAKE.setting_names()}
    sizes_by_type = [
        FAKE.footprint(FAKE.settings({**params, "kv_type": kv_type}), MODEL).bytes_of("kv_cache")
        for kv_type in ("q4_0", "q8_0", "f16")
    ]
    assert sizes_by_type == sorted(sizes_by_type)


def test_a_draft_model_is_only_loaded_for_speculation() -> None:
    without = FAKE.footprint(FakeSettings(n_max=0, draft_mib=64.0), MODEL)
    assert without.bytes_of("draft") == 0
    assert (
        FAKE.footprint(FakeSettings(n_max=1, draft_mib=64.0), MODEL).bytes_of("draft") == 64 * MIB
    )


def test_different_devices_are_never_compared() -> None:
    small = FAKE.footprint(FakeSettings(capacity_mib=512.0), MODEL)
    assert not FAKE.footprint(FakeSettings(), MODEL).needs_at_least(small)


@given(st.text(), st.text())
def test_the_tokens_of_a_text_and_its_continuation_add_up(one: str, other: str) -> None:
    continued = " word" + other
    assert tokenize(one.rstrip() + continued) == tokenize(one.rstrip()) + tokenize(continued)


# ---- Boots that end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "code", "ending", "phase"),
    [
        ({"weights_mib": 2000.0}, 1, "oom_weights", Phase.WEIGHTS),
        ({"n_max": 2, "draft_mib": 900.0}, 1, "oom_draft_head", Phase.WEIGHTS),
        ({"context": 16384}, 1, "oom_kv_cache", Phase.KV),
        ({"compute_mib": 512.0}, 1, "oom_compute", Phase.COMPUTE),
        ({"kv_type": "q8_0", "flash_attn": "off"}, 1, "unsupported_combination", Phase.CONFIG),
        ({"ending": "unsupported"}, 1, "unsupported_combination", Phase.CONFIG),
        ({"ending": "bad-argument"}, 1, "bad_argument", Phase.ARGS),
        ({"ending": "host-fault"}, 1, "driver_mismatch", Phase.CONFIG),
        ({"ending": "model-missing"}, 1, "model_not_found_or_gated", Phase.CONFIG),
        ({"ending": "port-in-use"}, 1, "port_in_use", Phase.SPAWN),
        ({"ending": "crash-boot"}, 1, "engine_crash", Phase.KV),
        ({"ending": "segfault-boot"}, -signal.SIGSEGV, "engine_crash", Phase.WEIGHTS),
        ({"ending": "killed-boot"}, -signal.SIGKILL, "engine_crash", Phase.WEIGHTS),
        ({"ending": "exit0-boot"}, 0, "engine_crash", Phase.COMPUTE),
        ({"ending": "host-ram"}, -signal.SIGKILL, "host_ram_oom", Phase.WEIGHTS),
        ({"ending": "unsupported-arch"}, 1, "model_unsupported_arch", Phase.CONFIG),
        ({"ending": "contended"}, 1, "gpu_memory_contended", Phase.DEVICE),
        ({"ending": "shm"}, 1, "shm_exhausted", Phase.DEVICE),
        ({"ending": "disk-full"}, 1, "disk_full", Phase.WEIGHTS),
        ({"ending": "oom-profiling"}, 1, "oom_activation_profiling", Phase.PROFILING),
        ({"ending": "cache-corrupt"}, 1, "compile_cache_corrupt", Phase.PROFILING),
        ({"ending": "max-seqs"}, 1, "capacity_max_num_seqs", Phase.KV),
        ({"ending": "oom-capture"}, 1, "oom_cudagraph_capture", Phase.CAPTURE),
        ({"ending": "jit"}, 1, "toolchain_jit_failure", Phase.WARMUP),
        ({"ending": "chat-template"}, 1, "chat_template_failure", Phase.WARMUP),
    ],
)
def test_a_boot_that_ends_is_named_by_its_phase_and_its_words(
    params: dict[str, Any], code: int, ending: str, phase: Phase
) -> None:
    exit_code, log = run_to_end(argv(**params))
    assert exit_code == code
    failure = FAKE.verdict(exited(exit_code), log)
    assert (name(failure), failure.finding.phase) == (ending, phase)
    assert failure.finding.cause in "\n".join(log)
    assert failure.finding.explanation.endswith(".")
    # An adapter is pure: the same log gives the same verdict.
    assert FAKE.verdict(exited(exit_code), log) == failure


@hypothesis_settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(20_000, 300_000),
    st.sampled_from(["f16", "q8_0", "q4_0"]),
    st.floats(60.0, 90.0),
    st.integers(0, 3),
)
def test_a_kv_cache_that_is_too_large_names_the_largest_context_that_fits(
    context: int, kv_type: str, kv_kib_per_token: float, n_max: int
) -> None:
    params = {
        "context": context * 2,
        "kv_type": kv_type,
        "kv_kib_per_token": kv_kib_per_token,
        "n_max": n_max,
    }
    code, log = run_to_end(argv(**params))
    failure = FAKE.verdict(exited(code), log)
    assert isinstance(failure, Infeasible)
    fits = failure.finding.try_next["context"]
    assert isinstance(fits, int)

    def total(context_tokens: int) -> float:
        settings = FAKE.settings({**params, "context": context_tokens})
        return FAKE.footprint(settings, MODEL).total_bytes

    assert total(fits) <= Options.capacity_mib * MIB < total(fits + 1)
    facts = failure.finding.facts
    asked = FAKE.footprint(FAKE.settings(params), MODEL).bytes_of("kv_cache")
    assert facts["required_bytes"] == pytest.approx(asked, abs=0.006 * MIB)
    assert facts["capacity_bytes"] == Options.capacity_mib * MIB
    assert isinstance(facts["required_bytes"], int)
    assert isinstance(facts["free_bytes"], int)
    assert facts["shortfall_bytes"] == facts["required_bytes"] - facts["free_bytes"]


def test_what_to_try_next_cures_each_kind_of_memory_ending() -> None:
    wishes: list[dict[str, Any]] = [
        {"n_max": 2, "draft_mib": 900.0},
        {"context": 16384},
        {"batch": 4096},
        {"context": 9980, "compute_mib": 10.0, "batch": 16},
    ]
    for params in wishes:
        code, log = run_to_end(argv(**params))
        cure = dict(FAKE.verdict(exited(code), log).finding.try_next)
        assert cure, params
        with running(**{**params, **cure}):
            pass  # it became ready


def test_an_unknown_flag_is_refused_with_its_name_and_exit_code_1() -> None:
    code, log = run_to_end((*argv(), "--speculate-harder", "3"))
    assert (code, log[0]) == (1, "error: unknown argument: --speculate-harder")
    failure = FAKE.verdict(exited(code), log)
    assert name(failure) == "bad_argument"
    assert failure.finding.facts["argument"] == "--speculate-harder"


def test_a_flag_of_the_wrong_type_is_a_bad_argument_too() -> None:
    code, log = run_to_end((*argv(), "--context", "many"))
    failure = FAKE.verdict(exited(code), log)
    assert (code, name(failure)) == (1, "bad_argument")
    assert failure.finding.facts["argument"] == "--context"


def test_a_port_that_another_process_holds_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        code, log = run_to_end((*argv(), "--port", port))
    assert code == 1
    assert name(FAKE.verdict(exited(code), log)) == "port_in_use"


def test_a_crash_is_explained_by_the_line_that_names_its_exception() -> None:
    code, log = run_to_end(argv(ending="crash-boot"))
    cause = FAKE.verdict(exited(code), log).finding.cause
    assert cause == "RuntimeError: device-side assertion failed"


# ---- Verdicts, purely --------------------------------------------------------------------------

BOOTED = ["fake: engine fake 1.0", "fake: ready on http://127.0.0.1:1"]
OOM_LINE = "fake: cannot allocate 9.00 MiB for kv_cache, 4.00 MiB free of 10.00 MiB"


def test_a_kill_without_evidence_is_not_blamed_on_memory() -> None:
    failure = FAKE.verdict(exited(-9), ["fake: engine fake 1.0", "fake: loading weights 25%"])
    assert name(failure) == "engine_crash"
    assert "SIGKILL" in failure.finding.explanation


def test_a_kill_is_blamed_on_host_memory_by_the_line_that_says_so_and_not_by_it_alone() -> None:
    low = "fake: host memory low: killed by the out-of-memory killer"
    log = ["fake: engine fake 1.0", "fake: loading weights 75%", low]
    assert name(FAKE.verdict(exited(-9), log)) == "host_ram_oom"
    assert name(FAKE.verdict(exited(-11), log)) == "engine_crash"
    # It was survived: the boot went on.
    assert name(FAKE.verdict(exited(-9), [*log, "fake: allocating kv_cache"])) == "engine_crash"
    assert name(FAKE.diagnose(log, 137)) == "host_ram_oom"


@pytest.mark.parametrize(
    ("phase", "line", "named", "facts"),
    [
        (
            "fake: opening device",
            "fake: error: device is in use by others: 16.00 MiB free of 1024.00 MiB",
            "gpu_memory_contended",
            {"free_bytes": 16 * MIB, "capacity_bytes": 1024 * MIB},
        ),
        (
            "fake: allocating kv_cache",
            "fake: error: 256 sequences at once exceed 128 blocks",
            "capacity_max_num_seqs",
            {"sequences": 256, "blocks": 128},
        ),
        (
            "fake: profiling memory",
            "fake: cannot allocate 9.00 MiB for activations, 4.00 MiB free of 10.00 MiB",
            "oom_activation_profiling",
            {
                "required_bytes": 9 * MIB,
                "free_bytes": 4 * MIB,
                "shortfall_bytes": 5 * MIB,
                "capacity_bytes": 10 * MIB,
            },
        ),
    ],
)
def test_words_mean_something_in_their_own_phase_only(
    phase: str, line: str, named: str, facts: dict[str, Any]
) -> None:
    failure = FAKE.verdict(exited(1), ["fake: engine fake 1.0", phase, line])
    assert (name(failure), dict(failure.finding.facts)) == (named, facts)
    for other in ("fake: engine fake 1.0", "fake: warming up", phase + "\nfake: capturing graphs"):
        assert name(FAKE.verdict(exited(1), [other, line])) == "engine_crash"


def test_what_runs_is_held_against_what_was_asked_for() -> None:
    settings = FAKE.settings({"context": 512, "n_max": 2})
    log = ["fake: engine fake 1.0", "fake: kv_cache pool holds 512 tokens"]
    assert FAKE.contradiction(settings, FAKE.evidence(log), None) is None
    log.append("fake: warning: speculation was not initialised, serving without it")
    unfit = FAKE.contradiction(settings, FAKE.evidence(log), None)
    assert unfit is not None
    assert (name(unfit), unfit.finding.cause) == ("silent_fallback", log[-1])
    assert FAKE.contradiction(FAKE.settings({"context": 512}), FAKE.evidence(log), None) is None
    smaller = FAKE.contradiction(FAKE.settings({"context": 513}), FAKE.evidence(log), None)
    assert smaller is not None
    assert (name(smaller), smaller.finding.try_next["context"]) == ("degraded_capacity", 512)


def test_a_memory_error_under_a_limit_is_blamed_on_host_memory() -> None:
    log = ["fake: engine fake 1.0", "Traceback (most recent call last):", "MemoryError"]
    assert name(FAKE.verdict(exited(1, limit_bytes=10**8), log)) == "host_ram_oom"
    assert name(FAKE.verdict(exited(1), log)) == "engine_crash"


def test_a_boot_that_never_began_hangs_and_one_that_had_begun_is_late() -> None:
    late = Death(ended=Ended.LATE, after_s=60.0, was_ready=False)
    assert name(FAKE.verdict(late, [])) == "hang_boot"
    assert name(FAKE.verdict(late, ["fake: engine fake 1.0"])) == "hang_boot"
    loading = FAKE.verdict(late, ["fake: engine fake 1.0", "fake: loading weights 0%\r"])
    assert (name(loading), loading.finding.phase) == ("boot_timeout", Phase.WEIGHTS)


def test_a_taken_port_and_a_missing_program_need_no_log() -> None:
    taken = Death(ended=Ended.PORT_TAKEN, after_s=0.1, was_ready=False, detail="pid 7 listens")
    assert isinstance(FAKE.verdict(taken, []), Broken)
    missing = Death(ended=Ended.NOT_STARTED, after_s=0.0, was_ready=False, detail="no such file")
    failure = FAKE.verdict(missing, [])
    assert isinstance(failure, HostFault)
    assert (name(failure), failure.finding.cause) == ("engine_not_found", "no such file")


@pytest.mark.parametrize("code", [0, 1, -9, -11, None])
def test_an_end_after_readiness_is_a_death_in_the_benchmark(code: int | None) -> None:
    assert name(FAKE.verdict(exited(code, was_ready=True), BOOTED)) == "engine_died_mid_benchmark"
    # Even if no probe had seen it ready before it was gone.
    assert name(FAKE.verdict(exited(code), BOOTED)) == "engine_died_mid_benchmark"


def test_words_of_memory_that_the_boot_went_past_decide_nothing() -> None:
    survived = ["fake: allocating kv_cache", OOM_LINE, "fake: allocating compute"]
    assert name(FAKE.verdict(exited(1), survived)) == "engine_crash"
    fatal = FAKE.verdict(exited(1), ["fake: allocating kv_cache", OOM_LINE])
    assert name(fatal) == "oom_kv_cache"
    wrong_phase = ["fake: allocating compute", OOM_LINE]
    assert name(FAKE.verdict(exited(1), wrong_phase)) == "engine_crash"
    warned = ["fake: allocating compute", "fake: warning: CUDA out of memory, retrying"]
    assert name(FAKE.verdict(exited(-11), warned)) == "engine_crash"


def test_a_cause_is_found_behind_a_progress_bar() -> None:
    words = "fake: loading weights 0%\rfake: cannot allocate 9.00 MiB for weights, "
    words += "4.00 MiB free of 10.00 MiB"
    failure = FAKE.verdict(exited(1), [words])
    assert name(failure) == "oom_weights"
    assert failure.finding.facts["shortfall_bytes"] == 5 * MIB
    assert FAKE.milestone(words) is Phase.WEIGHTS
    assert FAKE.milestone("fake: something else") is None


@given(
    st.sampled_from(list(Ended)),
    st.booleans(),
    st.none() | st.integers(-64, 255),
    st.lists(
        st.sampled_from([*BOOTED, OOM_LINE, "fake: driver version mismatch", "error: x", "", "\r"])
        | st.text(max_size=40)
    ),
)
def test_any_end_with_any_log_has_a_verdict(
    ended: Ended, was_ready: bool, code: int | None, log: list[str]
) -> None:
    # Where it lives, what its answer said is all the evidence there need be.
    detail = "HTTP 500" if ended is Ended.LIVES else ""
    death = Death(ended=ended, after_s=1.0, was_ready=was_ready, exit_code=code, detail=detail)
    failure = FAKE.verdict(death, log)
    assert kind(failure) in ("infeasible", "broken", "host_fault")
    assert failure.finding.cause
    if ended is Ended.LIVES:
        assert name(failure) == "http_500" or (
            isinstance(failure, Infeasible) and failure.name.is_memory
        )
    assert FAKE.evidence(log)["simulated"] is True


# ---- The server, ready -------------------------------------------------------------------------


def test_what_the_server_prints_is_what_the_footprint_predicts() -> None:
    params: dict[str, Any] = {
        "context": 3001,
        "kv_type": "q8_0",
        "n_max": 2,
        "batch": 100,
        "weights_mib": 77.7,
    }
    with running(**params) as server:
        seen = FAKE.evidence(server.log)
    footprint = FAKE.footprint(FAKE.settings(params), MODEL)
    for part in footprint.parts:
        assert seen[f"{part}_bytes"] == pytest.approx(footprint.bytes_of(part), abs=0.006 * MIB)
    assert (seen["context_tokens"], seen["kv_type"], seen["n_max"]) == (3001, "q8_0", 2)
    phases = [phase for line in server.log if (phase := FAKE.milestone(line)) is not None]
    assert phases == sorted(phases, key=lambda phase: phase.order)
    assert phases[-1] is Phase.READY


def test_a_boot_that_hangs_has_an_open_socket_that_says_503() -> None:
    with running(until="listening on ", ending="hang-boot") as server:
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/v1/completions", json={"prompt": "go"}).status_code == 503
        server.process.terminate()
        code, log = server.wait()
    assert code == 0
    late = Death(ended=Ended.LATE, after_s=60.0, was_ready=False)
    assert name(FAKE.verdict(late, log)) == "hang_boot"


def test_usage_counts_every_token_of_a_stream_under_speculation() -> None:
    with running(n_max=3, acceptance=0.6) as server:
        prompt = "count these seven words if you can"
        events = server.stream(prompt=prompt, max_tokens=50)
        tokenized = server.client.post("/tokenize", json={"prompt": "".join(texts(events))}).json()
        metrics = server.client.get("/metrics").text
    usage, timings = events[-1]["usage"], events[-1]["timings"]
    assert usage == {"prompt_tokens": 7, "completion_tokens": 50, "total_tokens": 57}
    assert tokenized["count"] == len(tokenized["tokens"]) == 50
    pieces = texts(events)
    assert len(tokenize(pieces[0])) == 1
    assert max(len(tokenize(piece)) for piece in pieces) > 1
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == (
        "length"
    )

    counters = FAKE.draft_counters(metrics)
    assert counters is not None
    assert counters.accepted == sum(counters.accepted_per_position) == 50 - len(pieces)
    assert list(counters.accepted_per_position) == sorted(
        counters.accepted_per_position, reverse=True
    )
    assert (timings["prompt_n"], timings["predicted_n"]) == (7, 50)
    assert timings["draft_n"] == counters.drafted
    assert timings["draft_n_accepted"] == counters.accepted


def test_speculation_changes_the_frames_but_not_the_text() -> None:
    with running() as plain, running(n_max=4, acceptance=0.9) as speculating:
        one = texts(plain.stream(prompt="tell me", max_tokens=40))
        other = texts(speculating.stream(prompt="tell me", max_tokens=40))
        metrics = plain.client.get("/metrics").text
    assert "".join(one) == "".join(other)
    assert len(other) < len(one) == 40
    assert FAKE.draft_counters(metrics) is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (
            {"acceptance": 1.0},
            DraftCounters(steps=4, drafted=8, accepted=8, accepted_per_position=(4, 4)),
        ),
        (
            {"acceptance": 1.0, "ending": "dead-draft"},
            # Of twelve single tokens the last has no room for a draft, the one before for one.
            DraftCounters(steps=11, drafted=21, accepted=0, accepted_per_position=(0, 0)),
        ),
    ],
)
def test_drafts_are_counted_step_by_step(params: dict[str, Any], expected: DraftCounters) -> None:
    with running(n_max=2, **params) as server:
        server.stream(prompt="go", max_tokens=13)
        assert FAKE.draft_counters(server.client.get("/metrics").text) == expected


def test_a_prompt_of_tokens_is_the_prompt_of_its_text() -> None:
    with running() as server:
        tokens = server.client.post("/tokenize", json={"prompt": "the same text"}).json()["tokens"]
        by_text = server.client.post("/v1/completions", json={"prompt": "the same text"} | TEN)
        by_tokens = server.client.post("/v1/completions", json={"prompt": tokens} | TEN)
    assert by_text.json()["choices"] == by_tokens.json()["choices"]
    assert by_tokens.json()["usage"]["prompt_tokens"] == len(tokens) == 3


def test_a_conversation_is_streamed_with_its_role_before_its_text() -> None:
    with running() as server:
        messages = [{"role": "user", "content": "hello there"}]
        path = "/v1/chat/completions"
        events = server.stream(path, messages=messages, max_tokens=5)
        whole = server.client.post(path, json={"messages": messages, "max_tokens": 5}).json()
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta.get("content", "") for delta in deltas)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert whole["usage"] == events[-1]["usage"]


def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers() -> None:
    with running(context=64) as server:
        refused = server.client.post("/v1/completions", json={"prompt": [1] * 64} | TEN)
        barely = server.client.post("/v1/completions", json={"prompt": [1] * 63} | TEN)
        beyond = server.client.post("/v1/completions", json={"prompt": [1] * 60} | TEN)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (64, 64)
    assert barely.json()["usage"]["completion_tokens"] == 1
    # The window ends the answer before its ten tokens do.
    assert beyond.json()["usage"]["total_tokens"] == 64
    assert beyond.json()["choices"][0]["finish_reason"] == "length"


def test_what_is_no_request_is_refused_and_the_server_lives() -> None:
    with running() as server:
        for body in ("[]", "no json", '{"prompt": ""}', '{"prompt": [1, "a"]}', '{"prompt": 3}'):
            refused = server.client.post("/v1/completions", content=body)
            assert (refused.status_code, "error" in refused.json()) == (400, True)
        refused = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
        assert refused.status_code == 400
        assert server.client.get("/nowhere").status_code == 404
        assert server.client.get("/v1/completions").status_code == 405
        port = server.client.base_url.port
        with socket.create_connection(("127.0.0.1", port or 0), timeout=20) as sock:
            sock.sendall(b"not http\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 400"
        assert server.client.get("/health").status_code == 200


# ---- Endings while it serves -------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "code"), [("crash-serving", 1), ("exit0-serving", 0)])
def test_a_server_can_die_in_the_middle_of_its_second_stream(ending: str, code: int) -> None:
    with running(ending=ending, ending_after=1) as server:
        assert len(texts(server.stream(prompt="one", max_tokens=8))) == 8
        with pytest.raises(httpx.RemoteProtocolError):
            server.stream(prompt="two", max_tokens=8)
        exit_code, log = server.wait()
    assert exit_code == code
    failure = FAKE.verdict(exited(exit_code, was_ready=True), log)
    assert (name(failure), failure.finding.phase) == ("engine_died_mid_benchmark", Phase.SERVING)


def test_a_long_prefill_can_run_out_of_memory_and_a_shorter_one_works() -> None:
    with running(ending="oom-runtime", runtime_oom_tokens=100) as server:
        assert server.stream(prompt=[1] * 100, max_tokens=2)
        with pytest.raises(httpx.RemoteProtocolError):
            server.stream(prompt=[1] * 101, max_tokens=2)
        code, log = server.wait()
    failure = FAKE.verdict(exited(code, was_ready=True), log)
    assert (code, name(failure)) == (1, "oom_runtime")
    assert failure.finding.facts["prompt_tokens"] == 101
    assert failure.finding.try_next["context"] in (99, 100)


def test_endings_of_single_answers_are_what_they_say() -> None:
    prompt: dict[str, Any] = {"prompt": "go", "max_tokens": 6}
    with running(ending="http-500") as server:
        refused = server.client.post("/v1/completions", json=prompt)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, 500)
    with running(ending="empty-answer") as server:
        events = server.stream(**prompt)
        assert (texts(events), events[-1]["usage"]["completion_tokens"]) == ([], 0)
    with running(ending="garbage") as server:
        assert texts(server.stream(**prompt)) == ["!"] * 6
    with running(ending="error-in-stream") as server:
        body = {**prompt, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert response.status_code == 200
        assert "error" in json.loads(lines[-1].removeprefix("data: "))
    with running(ending="truncated-context", context=100) as server:
        assert FAKE.evidence(server.log)["context_tokens"] == 100
        refused = server.client.post("/v1/completions", json={"prompt": [1] * 50})
        assert refused.json()["error"]["n_ctx"] == 50
    with running(ending="silent-truncation", context=100) as server:
        for sent, read in ((40, 40), (50, 50), (51, 50), (99, 50), (101, 50)):
            answer = server.client.post("/v1/completions", json={"prompt": [1] * sent} | TEN)
            assert answer.json()["usage"]["prompt_tokens"] == read
    with running(ending="http-422") as server:
        assert server.client.post("/v1/completions", json=prompt).status_code == 422
        assert server.client.get("/health").status_code == 200
    with running(ending="degraded-throughput") as server:
        events = server.stream(**prompt)
        assert (len(texts(events)), events[-1]["usage"]["completion_tokens"]) == (1, 1)
    with running(ending="silent-fallback", n_max=2) as server:
        assert len(texts(server.stream(**prompt))) == 6
        assert FAKE.draft_counters(server.client.get("/metrics").text) is None
    with running(ending="degraded-capacity", context=100) as server:
        assert FAKE.evidence(server.log)["kv_pool_tokens"] == 50
    with running(ending="oom-words-but-lives") as server:
        assert any("CUDA out of memory" in line for line in server.log)
        assert len(texts(server.stream(**prompt))) == 6


def test_a_server_can_hang_after_its_headers_while_its_health_is_good() -> None:
    with running(ending="hang-serving") as server:
        body = {"prompt": "go", "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert server.client.get("/health").status_code == 200


def test_sigterm_ends_a_server_with_0_unless_it_ignores_it() -> None:
    with running() as server:
        server.process.terminate()
        assert server.wait()[0] == 0
    with running(ending="ignores-sigterm") as server:
        server.process.terminate()
        assert server.client.get("/health").status_code == 200
        server.process.kill()
        assert server.wait()[0] == -signal.SIGKILL


def test_a_child_outlives_its_server_until_its_group_is_killed() -> None:
    with running(ending="spawns-child") as server:
        server.process.terminate()
        assert server.process.wait(20) == 0
        os.killpg(server.process.pid, 0)  # raises where nobody is left in the group
        os.killpg(server.process.pid, signal.SIGKILL)
        # The child holds the other end of this pipe, so its end is the child's.
        assert server.process.stdout is not None
        assert "stopping" in server.process.stdout.read()
