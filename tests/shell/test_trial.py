"""Attempts on the fake engine: a real process, a real socket, and every ending that it knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.shell.conftest import MARK, SHORT, engines_of, fake_job

from sweeper.bench import Client, RequestFailure, RequestTrouble
from sweeper.core.launch import Phase
from sweeper.core.outcome import (
    Attempt,
    Broken,
    BrokenName,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Measured,
    Unfit,
    UnfitName,
    kind,
    name,
)
from sweeper.core.pairs import Pairs
from sweeper.core.quality import GREEDY_PROMPTS
from sweeper.core.sample import Purpose, Sample
from sweeper.core.space import Axis
from sweeper.core.workload import Repeats, Workload
from sweeper.engines import Wire
from sweeper.engines.fake_server import ENDINGS, MIB, RUNTIME_BYTES_PER_TOKEN, needed_bytes
from sweeper.server import Registry
from sweeper.trial import Progress, attempt

CONTEXT = 512
ASKED = len(GREEDY_PROMPTS)
"""How many questions the guard asks; the scoring of its text is one request more."""
STAGES = ["boot", "first request", "guard", "prove", "warm up", "measure", "guard"]


def runs(warmup: int, measured: int) -> Workload:
    """Return the short workload with so many requests, whatever they show."""
    repeats = Repeats(
        warmup_min=warmup, warmup_max=warmup, least=measured, most=measured, interval=None
    )
    return replace(SHORT, repeats=repeats)


@dataclass(kw_only=True)
class Tried:
    """An attempt, and what could be seen while it went on."""

    attempt: Attempt
    stages: list[str]
    log: str

    @property
    def measured(self) -> Measured:
        assert isinstance(self.attempt.outcome, Measured), self.attempt.outcome
        return self.attempt.outcome

    @property
    def facts(self) -> Pairs:
        assert not isinstance(self.attempt.outcome, Measured), "it was measured"
        return self.attempt.outcome.finding.facts

    def samples(self, purpose: Purpose) -> list[Sample]:
        return [each for each in self.attempt.samples if each.purpose is purpose]


@dataclass(kw_only=True)
class Bench:
    """Makes attempts in a folder of its own and sees to it that none leaves a process."""

    folder: Path
    mark: str

    def __call__(self, *, point: Pairs | None = None, **job: Any) -> Tried:
        stages: list[str] = []

        def watch(progress: Progress) -> None:
            if progress.stage not in stages[-1:]:
                stages.append(progress.stage)

        done = attempt(
            fake_job(env=Pairs({MARK: self.mark}), **job),
            point if point is not None else Pairs(context=CONTEXT),
            number=7,
            trial=3,
            folder=self.folder,
            registry=Registry(self.folder / "started.json"),
            watch=watch,
        )
        assert engines_of(self.mark) == [], "the attempt left a process"
        log = self.folder / "engine.log"
        return Tried(attempt=done, stages=stages, log=log.read_text() if log.exists() else "")


@pytest.fixture
def tried(tmp_path: Path, mark: str) -> Bench:
    return Bench(folder=tmp_path, mark=mark)


# ---- A window smaller than a question ----------------------------------------------------------


def test_a_window_too_small_for_the_guard_is_measured_all_the_same(tried: Bench) -> None:
    found = tried(point=Pairs(context=12), workload=replace(SHORT, prompt="Hi", max_tokens=8))
    assert found.measured.context.window_tokens == 12
    assert found.samples(Purpose.GUARD) == []


# ---- Every ending is its own outcome -----------------------------------------------------------

LONG = replace(SHORT, max_tokens=64, silence_timeout_s=1.0)

OUTCOMES: dict[str, tuple[type, str, Phase | None]] = {
    "none": (Measured, "measured", None),
    "crash-boot": (Broken, "engine_crash", Phase.KV),
    "segfault-boot": (Broken, "engine_crash", Phase.WEIGHTS),
    "killed-boot": (Broken, "engine_crash", Phase.WEIGHTS),
    "host-ram": (Infeasible, "host_ram_oom", Phase.WEIGHTS),
    "hang-boot": (Broken, "hang_boot", Phase.SPAWN),
    "boot-timeout": (Broken, "boot_timeout", Phase.WEIGHTS),
    "exit0-boot": (Broken, "engine_crash", Phase.COMPUTE),
    "bad-argument": (Infeasible, "bad_argument", Phase.ARGS),
    "unsupported": (Infeasible, "unsupported_combination", Phase.CONFIG),
    "unsupported-arch": (Infeasible, "model_unsupported_arch", Phase.CONFIG),
    "host-fault": (HostFault, "driver_mismatch", Phase.CONFIG),
    "model-missing": (HostFault, "model_not_found_or_gated", Phase.CONFIG),
    "port-in-use": (Broken, "port_in_use", Phase.SPAWN),
    "contended": (Broken, "gpu_memory_contended", Phase.DEVICE),
    "shm": (Broken, "shm_exhausted", Phase.DEVICE),
    "disk-full": (HostFault, "disk_full", Phase.WEIGHTS),
    "oom-profiling": (Infeasible, "oom_activation_profiling", Phase.PROFILING),
    "cache-corrupt": (Broken, "compile_cache_corrupt", Phase.PROFILING),
    "max-seqs": (Infeasible, "capacity_max_num_seqs", Phase.KV),
    "oom-capture": (Infeasible, "oom_cudagraph_capture", Phase.CAPTURE),
    "jit": (HostFault, "toolchain_jit_failure", Phase.WARMUP),
    "chat-template": (Broken, "chat_template_failure", Phase.WARMUP),
    "crash-serving": (Broken, "engine_died_mid_benchmark", Phase.SERVING),
    "exit0-serving": (Broken, "engine_died_mid_benchmark", Phase.SERVING),
    "oom-runtime": (Infeasible, "oom_runtime", Phase.SERVING),
    "hang-serving": (Broken, "hang_runtime", Phase.SERVING),
    "http-500": (Broken, "http_500", Phase.SERVING),
    "http-422": (Broken, "unknown", Phase.SERVING),
    "empty-answer": (Unfit, "garbage_output", Phase.SERVING),
    "garbage": (Unfit, "garbage_output", Phase.SERVING),
    "token-salad": (Unfit, "garbage_output", Phase.SERVING),
    "late-garbage": (Unfit, "garbage_output", Phase.SERVING),
    "looping": (Measured, "measured", None),  # doubted: there is nobody to compare it with
    "wrong-answers": (Measured, "measured", None),  # there is nobody to compare them with
    "error-in-stream": (Broken, "http_500", Phase.SERVING),
    "truncated-context": (Unfit, "http_400_context", Phase.SERVING),
    "silent-truncation": (Unfit, "silent_context_truncation", Phase.SERVING),
    "silent-fallback": (Unfit, "silent_fallback", Phase.READY),
    "degraded-capacity": (Unfit, "degraded_capacity", Phase.READY),
    "degraded-throughput": (Unfit, "degraded_throughput", Phase.SERVING),
    "dead-draft": (Unfit, "draft_ineffective", Phase.SERVING),
    "ignores-sigterm": (Measured, "measured", None),
    "spawns-child": (Measured, "measured", None),
    "oom-words-but-lives": (Measured, "measured", None),
}

NEEDED: dict[str, dict[str, Any]] = {
    "hang-boot": {"boot_timeout_s": 1.0},
    # Long enough for its interpreter to start on a busy machine.
    "boot-timeout": {"boot_timeout_s": 3.0},
    "oom-runtime": {"runtime_oom_tokens": 100},
    "dead-draft": {"n_max": 4},
    "late-garbage": {"ending_after": 6},
    "silent-fallback": {"n_max": 4},
    "ignores-sigterm": {"stop_timeout_s": 0.3},
    "spawns-child": {"stop_timeout_s": 0.3},
}
"""What an ending needs beside its name to be seen, or to be seen soon."""


def test_the_table_of_outcomes_names_every_ending() -> None:
    assert set(OUTCOMES) == set(ENDINGS)


def test_every_name_of_the_closed_set_is_reached_in_this_file() -> None:
    names = {*InfeasibleName, *UnfitName, *BrokenName, *HostFaultName}
    by_ending = {named for _, named, _ in OUTCOMES.values()}
    by_memory = {named for _, named, _, _ in TOO_SMALL}
    assert by_ending | by_memory | {NOT_STARTED} == {"measured", *(each.value for each in names)}


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_comes_back_as_its_own_outcome(tried: Bench, ending: str) -> None:
    made = tried(ending=ending, workload=LONG, **NEEDED.get(ending, {}))
    outcome = made.attempt.outcome
    sort, named, phase = OUTCOMES[ending]
    assert (type(outcome), name(outcome)) == (sort, named), outcome
    if not isinstance(outcome, Measured):
        assert outcome.finding.phase is phase
        assert outcome.finding.cause
        assert outcome.finding.explanation
    served = phase in (None, Phase.READY, Phase.SERVING)
    assert (made.attempt.timings.boot_s is not None) is served
    assert (made.attempt.number, made.attempt.trial) == (7, 3)
    assert made.attempt.timings.stop_s is not None
    assert made.attempt.engine["simulated"] is True
    assert made.attempt.argv[made.attempt.argv.index("--ending") + 1] == ending


@pytest.mark.parametrize("ending", ["crash-serving", "http-500", "oom-runtime"])
def test_an_ending_in_the_measurement_is_told_from_one_in_the_proof(
    tried: Bench, ending: str
) -> None:
    # The overflow of the window is refused before it counts as a completion.
    prompt = "word " * 150
    made = tried(
        ending=ending, ending_after=4 + ASKED, runtime_oom_tokens=100,
        workload=replace(SHORT, prompt=prompt),
    )  # fmt: skip
    assert name(made.attempt.outcome) == OUTCOMES[ending][1]
    assert made.facts["failed_during"] == "measure"
    assert [each.purpose for each in made.attempt.samples] == [
        Purpose.FIRST, *[Purpose.GUARD] * ASKED, Purpose.PROOF, Purpose.WARMUP,
    ]  # fmt: skip
    assert made.stages == ["boot", "first request", "guard", "prove", "warm up", "measure"]
    assert made.attempt.timings.measure_s is not None


def test_what_is_silently_less_than_asked_for_says_by_how_much(tried: Bench) -> None:
    prompt = CONTEXT - SHORT.proof_answer_tokens
    half = CONTEXT // 2
    made = tried(ending="silent-truncation")
    assert dict(made.facts) == {"sent_tokens": prompt, "read_tokens": half}
    made = tried(ending="degraded-capacity")
    assert dict(made.facts) == {"kv_pool_tokens": half, "context_tokens": CONTEXT}
    assert made.attempt.engine["kv_pool_tokens"] == half


def test_a_fallback_from_no_speculation_is_none(tried: Bench) -> None:
    assert tried(ending="silent-fallback", n_max=0).measured.drafts is None


# ---- Memory that runs out ----------------------------------------------------------------------

PARTS = {"weights_mib": 400.0, "kv_kib_per_token": 64.0, "draft_mib": 64.0, "compute_mib": 100.0}


TOO_SMALL = (
    ("weights", "oom_weights", Phase.WEIGHTS, 300.5),
    ("draft", "oom_draft_head", Phase.WEIGHTS, 410.25),
    ("kv_cache", "oom_kv_cache", Phase.KV, 480.0),
    ("compute", "oom_compute", Phase.COMPUTE, 500.0),
)
"""Devices that hold all that is allocated before a part, and not the part."""


@pytest.mark.parametrize(("part", "named", "phase", "capacity_mib"), TOO_SMALL)
def test_what_does_not_fit_says_by_how_much(
    tried: Bench, part: str, named: str, phase: Phase, capacity_mib: float
) -> None:
    made = tried(capacity_mib=capacity_mib, n_max=2, batch=512, **PARTS)
    assert isinstance(made.attempt.outcome, Infeasible)
    assert made.attempt.outcome.name.value == named
    assert made.attempt.outcome.finding.phase is phase
    sizes = needed_bytes(context=CONTEXT, kv_type="f16", n_max=2, batch=512, **PARTS)
    before = list(sizes)[: list(sizes).index(part)]
    free = capacity_mib * MIB - sum(sizes[each] for each in before)
    assert made.facts["shortfall_bytes"] == sizes[part] - free
    assert dict(made.attempt.footprint.parts) == sizes


def test_a_prefill_that_does_not_fit_says_by_how_much(tried: Bench) -> None:
    made = tried(ending="oom-runtime", runtime_oom_tokens=200)
    prompt = CONTEXT - SHORT.proof_answer_tokens
    assert made.facts["prompt_tokens"] == prompt
    # The engine prints MiB with two digits.
    assert made.facts["shortfall_bytes"] == pytest.approx(
        (prompt - 200) * RUNTIME_BYTES_PER_TOKEN, abs=0.02 * MIB
    )


# ---- What is measured --------------------------------------------------------------------------


def test_the_proof_fills_the_window_exactly_and_more_is_refused(tried: Bench) -> None:
    made = tried()
    context = made.measured.context
    assert context.prompt_tokens == CONTEXT - SHORT.proof_answer_tokens
    assert context.completion_tokens == SHORT.proof_answer_tokens
    assert context.configured_tokens == context.proven_tokens == context.window_tokens == CONTEXT
    assert context.reserved_tokens == 0
    assert context.refuses_more is True
    assert made.measured.drafts is None
    assert made.attempt.notes == ()


def test_every_run_is_kept_and_the_warm_up_apart(tried: Bench) -> None:
    made = tried(workload=runs(2, 3))
    assert [each.purpose for each in made.attempt.samples] == [
        Purpose.FIRST, *[Purpose.GUARD] * ASKED, Purpose.PROOF, *[Purpose.WARMUP] * 2,
        *[Purpose.MEASURE] * 3, *[Purpose.GUARD] * ASKED,
    ]  # fmt: skip
    assert made.measured.decode_tok_s.n == made.measured.ttft_s.n == 3
    assert made.stages == STAGES


def test_a_measurement_without_a_warm_up_is_possible(tried: Bench) -> None:
    made = tried(workload=runs(0, 2), n_max=2)
    assert len(made.samples(Purpose.MEASURE)) == 2
    assert made.samples(Purpose.WARMUP) == []
    assert made.measured.drafts is not None


def test_tokens_are_counted_by_usage_and_not_by_frames(tried: Bench) -> None:
    made = tried(n_max=4, acceptance=0.9, workload=LONG)
    for sample in made.samples(Purpose.MEASURE):
        assert sample.completion_tokens == LONG.max_tokens
        assert 0 < sample.frames < sample.completion_tokens
        assert sample.decode_tok_s == pytest.approx((LONG.max_tokens - 1) / sample.decode_s)


def test_acceptance_is_what_the_engine_counted_while_it_was_measured(tried: Bench) -> None:
    made = tried(n_max=3, acceptance=0.6, workload=LONG)
    timed = made.samples(Purpose.MEASURE)
    drafts = made.measured.drafts
    assert drafts is not None
    assert drafts.drafted == sum(int(each.server["draft_n"] or 0) for each in timed) > 0
    assert drafts.accepted == sum(int(each.server["draft_n_accepted"] or 0) for each in timed)
    assert sum(drafts.accepted_per_position) == drafts.accepted
    # Of every step one token is the model's own, and the first of an answer is the prefill's.
    assert drafts.steps <= sum(each.frames - 1 for each in timed)


def test_speculation_proves_the_same_window(tried: Bench) -> None:
    made = tried(n_max=4)
    assert made.measured.context.window_tokens == CONTEXT


@pytest.mark.parametrize("context", [2, 32, 33])
def test_a_window_smaller_than_the_answer_is_still_proven(tried: Bench, context: int) -> None:
    made = tried(point=Pairs(context=context), workload=replace(SHORT, prompt="go"))
    if isinstance(made.attempt.outcome, Measured):
        assert made.measured.context.proven_tokens == context
    else:  # two tokens leave no answer that could be timed
        assert (kind(made.attempt.outcome), context) == ("unfit", 2)


def test_a_prompt_that_the_window_cannot_hold_is_unfit(tried: Bench) -> None:
    made = tried(point=Pairs(context=64), workload=replace(SHORT, prompt="word " * 100))
    assert name(made.attempt.outcome) == "http_400_context"
    assert made.facts["n_ctx"] == 64


def test_words_of_memory_in_the_log_of_a_living_engine_mean_nothing(tried: Bench) -> None:
    made = tried(ending="oom-words-but-lives")
    assert "CUDA out of memory" in made.log
    assert made.measured.context.proven_tokens == CONTEXT


def test_the_axes_of_the_point_reach_the_command_line(tried: Bench) -> None:
    axes = (
        Axis(name="window", values=(256, 512), ordered=True, sets=("context",)),
        Axis(name="cache", values=("f16", "q8_0"), ordered=False, sets=("kv_type",)),
    )
    made = tried(axes=axes, point=Pairs(window=256, cache="q8_0"))
    argv = made.attempt.argv
    assert argv[argv.index("--context") + 1] == "256"
    assert argv[argv.index("--kv-type") + 1] == "q8_0"
    assert made.attempt.port_argument is not None
    assert made.measured.context.proven_tokens == 256


NOT_STARTED = "engine_not_found"


@pytest.mark.parametrize("memory_limit_bytes", [None, 2**30])
def test_an_interpreter_that_is_missing_is_a_fault_of_the_host(
    tried: Bench, memory_limit_bytes: int | None
) -> None:
    made = tried(python="/nowhere/python", memory_limit_bytes=memory_limit_bytes)
    assert name(made.attempt.outcome) == NOT_STARTED
    assert made.attempt.timings.stop_s is None


def test_a_real_memory_limit_is_met_and_recorded(tried: Bench) -> None:
    made = tried(memory_limit_bytes=2**30)
    assert made.attempt.memory_limit_bytes == 2**30
    assert 0 < (made.measured.peak_bytes or 0) <= 2**30


def test_ctrl_c_in_an_attempt_ends_its_engine(tmp_path: Path, mark: str) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.stage == "prove":
            assert len(engines_of(mark)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(
            fake_job(env=Pairs({MARK: mark})),
            Pairs(context=CONTEXT),
            number=1,
            trial=0,
            folder=tmp_path,
            registry=Registry(tmp_path / "started.json"),
            watch=interrupt,
        )
    assert engines_of(mark) == []


# ---- Streams that the fake engine does not write -----------------------------------------------


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """Serve every POST with this stream of events, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def answer_to(body: str | bytes) -> Sample | RequestFailure:
    raw = body if isinstance(body, bytes) else body.encode()
    with answering(raw) as url, Client(url, Wire(), "demo", SHORT) as client:
        return client.complete("go", max_tokens=4, purpose=Purpose.MEASURE)


USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'


def test_a_line_separator_inside_a_text_does_not_end_its_frame() -> None:
    sample = answer_to(
        'data: {"choices": [{"text": "a\u2028b\u2029c\u0085d"}]}\n\n' + USAGE + "data: [DONE]\n\n"
    )
    assert isinstance(sample, Sample), sample
    assert (sample.text, sample.frames) == ("a\u2028b\u2029c\u0085d", 1)


def test_comments_and_carriage_returns_of_a_stream_are_read_over() -> None:
    sample = answer_to(
        ': alive\r\n\r\ndata: {"choices": [{"text": "a", "finish_reason": "length"}]}\r\n\r\n'
        + USAGE
        + "data: [DONE]\r\n\r\n"
    )
    assert isinstance(sample, Sample), sample
    assert (sample.text, sample.finish_reason) == ("a", "length")


def test_the_last_frame_counts_without_a_line_end() -> None:
    assert isinstance(answer_to('data: {"choices": [{"text": "a"}]}\n' + USAGE.strip()), Sample)


@pytest.mark.parametrize(
    ("body", "trouble"),
    [
        (b"data: {half\n\n", RequestTrouble.ERROR_IN_STREAM),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', RequestTrouble.ERROR_IN_STREAM),
        (b"data: [DONE]\n\n", RequestTrouble.NO_USAGE),
        (b"", RequestTrouble.NO_USAGE),
        (b'data: {"choices": [{"text": "a"}]}\n\n', RequestTrouble.NO_USAGE),
        (USAGE.encode(), RequestTrouble.EMPTY_ANSWER),
    ],
)
def test_a_stream_that_is_no_answer_is_a_failure(body: bytes, trouble: RequestTrouble) -> None:
    failure = answer_to(body)
    assert isinstance(failure, RequestFailure)
    assert failure.trouble is trouble


def test_nobody_at_the_address_is_a_lost_connection() -> None:
    with answering(b"") as url:
        pass
    with Client(url, Wire(), "demo", SHORT) as client:
        failure = client.complete("go", max_tokens=4, purpose=Purpose.MEASURE)
    assert isinstance(failure, RequestFailure)
    assert failure.trouble is RequestTrouble.CONNECTION_LOST
