"""The closed set of endings: what a trial can come to, each as a value of its own type."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from sweeper.core.launch import Phase
from sweeper.core.memory import Footprint
from sweeper.core.pairs import Pairs, Point
from sweeper.core.sample import DraftCounters, Sample
from sweeper.core.stats import Summary
from sweeper.core.telemetry import Telemetry


class InfeasibleName(enum.StrEnum):
    """The point asks for more than there is, or for what does not exist."""

    OOM_WEIGHTS = "oom_weights"
    OOM_DRAFT_HEAD = "oom_draft_head"
    OOM_KV_CACHE = "oom_kv_cache"
    OOM_ACTIVATION_PROFILING = "oom_activation_profiling"
    OOM_CUDAGRAPH_CAPTURE = "oom_cudagraph_capture"
    OOM_COMPUTE = "oom_compute"
    OOM_RUNTIME = "oom_runtime"
    HOST_RAM_OOM = "host_ram_oom"
    CAPACITY_MAX_NUM_SEQS = "capacity_max_num_seqs"
    UNSUPPORTED_COMBINATION = "unsupported_combination"
    MODEL_UNSUPPORTED_ARCH = "model_unsupported_arch"
    BAD_ARGUMENT = "bad_argument"

    @property
    def is_memory(self) -> bool:
        """Whether asking for less memory would cure it."""
        return "oom" in self.value


class UnfitName(enum.StrEnum):
    """It serves, but must not win."""

    GARBAGE_OUTPUT = "garbage_output"
    DRAFT_INEFFECTIVE = "draft_ineffective"
    SILENT_FALLBACK = "silent_fallback"
    SILENT_CONTEXT_TRUNCATION = "silent_context_truncation"
    DEGRADED_THROUGHPUT = "degraded_throughput"
    DEGRADED_CAPACITY = "degraded_capacity"
    HTTP_400_CONTEXT = "http_400_context"


class BrokenName(enum.StrEnum):
    """Not known to be the point's fault: it may be retried and teaches nothing."""

    GPU_MEMORY_CONTENDED = "gpu_memory_contended"
    PORT_IN_USE = "port_in_use"
    ENGINE_CRASH = "engine_crash"
    ENGINE_DIED_MID_BENCHMARK = "engine_died_mid_benchmark"
    HANG_BOOT = "hang_boot"
    HANG_RUNTIME = "hang_runtime"
    BOOT_TIMEOUT = "boot_timeout"
    HTTP_500 = "http_500"
    COMPILE_CACHE_CORRUPT = "compile_cache_corrupt"
    SHM_EXHAUSTED = "shm_exhausted"
    CHAT_TEMPLATE_FAILURE = "chat_template_failure"
    UNKNOWN = "unknown"


class HostFaultName(enum.StrEnum):
    """No point can work: the study stops and says what to do."""

    DRIVER_MISMATCH = "driver_mismatch"
    TOOLCHAIN_JIT_FAILURE = "toolchain_jit_failure"
    MODEL_NOT_FOUND_OR_GATED = "model_not_found_or_gated"
    DISK_FULL = "disk_full"
    ENGINE_NOT_FOUND = "engine_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Why an ending was named as it was.

    `cause` is the engine's own first line of it, `explanation` one sentence for a person,
    `facts` the numbers read (`*_bytes`, `*_tokens`), `try_next` settings that may work instead.
    """

    phase: Phase
    cause: str
    explanation: str
    facts: Pairs = Pairs()
    try_next: Pairs = Pairs()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenContext:
    """How much context a real prompt and its answer filled, against what was configured.

    Token counts are the server's. `reserved_tokens` are the last ones of the window, where the
    engine ended the answer by itself: under speculation it keeps room for a draft. `refuses_more`
    tells whether one token more than the window was refused cleanly; None where not tried.
    """

    configured_tokens: int
    proven_tokens: int
    prompt_tokens: int
    completion_tokens: int
    prefill_tok_s: float
    decode_tok_s: float | None
    reserved_tokens: int = 0
    refuses_more: bool | None = None

    @property
    def window_tokens(self) -> int:
        """The window that was shown to work: the objective, equal for equal windows."""
        return self.proven_tokens + self.reserved_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one load came to: so many streams of one kind of prompt, as `workload` asks them.

    Speeds are of one stream, but for `total_tok_s`, which is all streams' tokens over the time of
    a round of them together. `itl_s` is the time between pieces of text, one median a request,
    `itl_p99_s` the 99th percentile of all gaps. `ended` says why no more repeats were made.
    `cached_ttft_s` is the time to the first token of a prompt that the server had just read.
    `tokens` is how many were generated while the telemetry was watched, `server` the engine's own
    sums over the same requests where it keeps them (`requests`, `decode_s`, `ttft_s`). Of `answers`
    measured answers `looping` represent nothing; None where nobody looked.
    """

    workload: str
    prompt_length: int | None
    streams: int
    decode_tok_s: Summary
    ttft_s: Summary
    prefill_tok_s: Summary | None = None
    total_tok_s: Summary | None = None
    itl_s: Summary | None = None
    itl_p99_s: float | None = None
    cached_ttft_s: Summary | None = None
    drafts: DraftCounters | None = None
    telemetry: Telemetry | None = None
    ended: str = ""
    tokens: int | None = None
    server: Pairs = Pairs()
    answers: int | None = None
    looping: int | None = None

    @property
    def joules_per_token(self) -> float | None:
        """The energy of the cards over the tokens generated meanwhile; None where unknown."""
        energy = None if self.telemetry is None else self.telemetry.gpu_energy_j
        return energy / self.tokens if energy is not None and self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How sound the answers are, beside the same weights in the reference configuration.

    `prefix_share` is how much of the reference's greedy answer is answered token by token in the
    same way, in 0..1, and `prefix_tokens` the same as a count; `reference` the attempt that it is
    compared with, None for the reference itself. `end_prefix_share` compares the answer at the end
    of the attempt with the one at its beginning. `mean_logprob` is the mean natural logarithm of
    the probability of each token of a fixed text, None where the engine cannot say.
    """

    reference: int | None = None
    prefix_tokens: int | None = None
    prefix_share: float | None = None
    end_prefix_share: float | None = None
    mean_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """It booted, held its context with real tokens, and was timed.

    The first figures are those of the load that the search compares; `figures` has every load's.
    `ready_bytes` is what the engine held when it was ready, counted as `peak_bytes` is, and
    `ready_device_bytes` what was in use on its cards then, by all programs.
    """

    decode_tok_s: Summary
    ttft_s: Summary
    context: ProvenContext
    prefill_tok_s: Summary | None = None
    drafts: DraftCounters | None = None
    peak_bytes: int | None = None
    figures: tuple[Figures, ...] = ()
    telemetry: Telemetry | None = None
    quality: Quality | None = None
    ready_bytes: int | None = None
    ready_device_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """The point cannot work here; the search learns from it."""

    name: InfeasibleName
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """The point serves, but what it serves must not win."""

    name: UnfitName
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Something went wrong that is not known to be the point's fault."""

    name: BrokenName
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFault:
    """Nothing can work on this host until a person mends it."""

    name: HostFaultName
    finding: Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Nothing happened: a log of an engine that came up, whatever it complained of on the way."""

    finding: Finding


Failure: TypeAlias = Infeasible | Unfit | Broken | HostFault
Outcome: TypeAlias = Measured | Failure
Diagnosis: TypeAlias = Failure | Nothing
"""What a log alone can tell."""


def kind(outcome: Outcome | Nothing) -> str:
    """Return the kind of an outcome in one word, as used in tags and tables."""
    match outcome:
        case Measured():
            return "measured"
        case Infeasible():
            return "infeasible"
        case Unfit():
            return "unfit"
        case Broken():
            return "broken"
        case HostFault():
            return "host_fault"
        case Nothing():
            return "none"


def name(outcome: Outcome | Nothing) -> str:
    """Return the exact name of an outcome, one of the closed set."""
    match outcome:
        case Measured():
            return "measured"
        case Nothing():
            return "none"
        case _:
            return outcome.name.value


def ran_out(outcome: Outcome) -> bool:
    """Tell whether an attempt ended for lack of memory."""
    return isinstance(outcome, Infeasible) and outcome.name.is_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of an attempt went, in seconds; None for what was not reached."""

    boot_s: float | None
    prove_s: float | None
    measure_s: float | None
    stop_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One boot of one point, and all that is needed to judge, repeat and export it.

    `number` counts the boots of the study from 1; `trial` is the number the search knows it by.
    `engine`, `model`, `host` and `workload` hold the facts that make two attempts comparable.
    `port_argument` is the index of the port in `argv`: the one argument a recipe may replace.
    `confirms` is the attempt whose number was measured again after the search, None in the search.
    `brief` then says that it was booted only to see whether it works again: nothing was repeated
    often enough for a figure of its own.
    """

    study: str
    number: int
    trial: int
    started_at: str
    point: Point
    outcome: Outcome
    argv: tuple[str, ...]
    env: Pairs
    memory_limit_bytes: int | None
    footprint: Footprint
    timings: Timings
    engine: Pairs
    model: Pairs
    host: Pairs
    workload: Pairs
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()
    port_argument: int | None = None
    confirms: int | None = None
    brief: bool = False
