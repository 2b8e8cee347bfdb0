"""llama.cpp's server: its flags, its memory, what it prints, and what its endings mean.

Serves with the `llama-server` binary, or with the same server inside the `xllamacpp` wheel
through `sweeper.engines.llamacpp_wheel`, which takes the same flags.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

from sweeper.core.launch import Death, Ended, Launch, Phase
from sweeper.core.memory import Footprint
from sweeper.core.outcome import (
    Broken,
    BrokenName,
    Diagnosis,
    Failure,
    Finding,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Nothing,
    Unfit,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError, build
from sweeper.engines import EngineOptions, ModelFacts, Wire

MIB = 2**20

KV_BITS: dict[str, float] = {
    "f32": 32, "f16": 16, "bf16": 16,
    "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
"""Bits a cached value takes, block scales included. Forks have more types; see `footprint`."""

_DEFAULT_BATCH = 2048
_DEFAULT_UBATCH = 512
_OWN_FLAGS = ("--host", "--port", "--model", "-m", "--alias", "-a", "--ctx-size", "-c")

_DRAFT_LENGTH_FLAG = {
    "ngram-simple": "--spec-ngram-simple-size-m",
    "ngram-map-k": "--spec-ngram-map-k-size-m",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-m",
    "ngram-mod": "--spec-ngram-mod-n-max",
}
_LOOKUP_LENGTH_FLAG = {
    "ngram-simple": "--spec-ngram-simple-size-n",
    "ngram-map-k": "--spec-ngram-map-k-size-n",
    "ngram-map-k4v": "--spec-ngram-map-k4v-size-n",
    "ngram-mod": "--spec-ngram-mod-n-match",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppSettings:
    """What a study may set or sweep; None leaves the engine's own default.

    `n_max` is the draft length, whatever kind of speculation `spec_type` names, and 0 switches
    speculation off. `ngram_size` is the number of tokens looked up by the n-gram kinds.
    """

    context: int = 4096
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: Literal["on", "off", "auto"] = "auto"
    batch: int | None = None
    ubatch: int | None = None
    parallel: int = 1
    gpu_layers: int | None = None
    n_cpu_moe: int | None = None
    threads: int | None = None
    threads_http: int | None = None
    spec_type: str = "none"
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    ngram_size: int | None = None
    mmap: bool = True
    repack: bool = True
    swa_full: bool = False
    fit: Literal["on", "off"] = "off"
    cache_ram_mib: int = 0
    chat_template_kwargs: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "context", "batch", "ubatch", "parallel", "threads", "threads_http", "ngram_size",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FieldError(name, f"must be at least 1, got {value}")
        for name in ("n_max", "n_min", "gpu_layers", "n_cpu_moe", "cache_ram_mib"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise FieldError(name, f"must not be negative, got {value}")
        if self.parallel > self.context:
            raise FieldError("parallel", f"is {self.parallel}, more than the context has tokens")
        if self.p_min is not None and not 0 <= self.p_min <= 1:
            raise FieldError("p_min", f"is a probability, got {self.p_min}")
        if self.n_max is not None and self.n_max > 0 and self.spec_type == "none":
            raise FieldError(
                "n_max",
                f"is {self.n_max}, but spec_type is none: name the kind of speculation, or set 0",
            )

    @property
    def speculates(self) -> bool:
        """Whether drafts are made at all."""
        return self.spec_type != "none" and (self.n_max is None or self.n_max > 0)


class LlamaCpp:
    """The adapter for llama.cpp's server and its forks."""

    name = "llamacpp"
    simulated = False
    wire = Wire(
        props_path="/props",
        tokenize_text_key="content",
        completion_extras=Pairs(cache_prompt=False, ignore_eos=True),
    )

    def settings(self, params: Mapping[str, Any]) -> LlamaCppSettings:
        """Return frozen settings from a study's parameters; raises FieldError."""
        return build(LlamaCppSettings, params)

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set."""
        return tuple(field.name for field in fields(LlamaCppSettings))

    def context_tokens(self, settings: LlamaCppSettings) -> int:
        """Return the window of one sequence: the context is shared by the parallel slots."""
        return settings.context // settings.parallel

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options with the server to start: the binary, else the wheel's."""
        if options.binary is not None:
            found = shutil.which(options.binary)
            if found is None:
                return _no_engine(f"engine.binary is {options.binary}, and no such program exists")
            return replace(options, binary=found)
        if options.python is None:
            found = shutil.which("llama-server")
            if found is not None:
                return replace(options, binary=found)
            if importlib.util.find_spec("xllamacpp") is not None:
                return replace(options, python=sys.executable)
            return _no_engine(
                "there is no llama-server on PATH and the xllamacpp wheel is not installed"
            )
        if not Path(options.python).exists():
            return _no_engine(f"engine.python is {options.python}, and no such file exists")
        return options

    def footprint(self, settings: LlamaCppSettings, model: ModelFacts) -> Footprint:
        """Return weights, KV cache, compute and output buffers in bytes, by llama.cpp's formulas.

        KV: two tensors a layer, heads x length x cells x bits; sliding-window layers hold the
        window plus one micro-batch, rounded up to 256 cells. Compute: the attention scores
        (micro-batch x context, times the heads in f32 without flash attention, in f16 once with
        it) plus activations. Output: one row of f32 logits for each token that is verified,
        twice (buffer and sampler).
        """
        ubatch = min(
            settings.ubatch if settings.ubatch is not None else _DEFAULT_UBATCH,
            settings.batch if settings.batch is not None else _DEFAULT_BATCH,
        )
        context = settings.context
        bits_k = KV_BITS.get(settings.cache_type_k.lower(), 16)
        bits_v = KV_BITS.get(settings.cache_type_v.lower(), 16)

        def fact(name: str, default: float = 0) -> float:
            value = model.facts.get(name)
            return value if isinstance(value, int | float) else default

        cell_bits = fact("key_length") * bits_k + fact("value_length") * bits_v
        window_cells = context
        if not settings.swa_full:
            cells = int(fact("window_tokens")) * settings.parallel + ubatch
            window_cells = min(context, _round_up(cells, 256))
        kv = (
            (fact("kv_heads_global") * context + fact("kv_heads_window") * window_cells)
            * cell_bits
            / 8
        )
        scores = ubatch * context * (2 if settings.flash_attn != "off" else 2 + 4 * fact("heads"))
        activations = ubatch * 4 * (fact("embedding_length") * 6 + fact("feed_forward_length") * 3)
        verified = settings.parallel * (1 + (settings.n_max or 0 if settings.speculates else 0))
        parts: dict[str, Scalar] = {
            "weights": model.size_bytes,
            "kv_cache": math.ceil(kv),
            "compute": math.ceil(scores + activations),
            "output": int(verified * fact("vocabulary") * 4 * 2),
        }
        if settings.speculates and model.draft_path is not None:
            parts["draft"] = model.draft_size_bytes
        return Footprint(
            parts=Pairs(parts),
            # What moves memory in a way the formulas do not know makes two boots incomparable.
            alike=Pairs(
                spec_type=settings.spec_type if settings.speculates else "none",
                engine_draft_length=settings.speculates and settings.n_max is None,
                threads=settings.threads,
                threads_http=settings.threads_http,
                # The formula knows the difference only where the heads are known.
                flash_attn=(
                    "stated"
                    if settings.flash_attn != "auto" and "heads" in model.facts
                    else settings.flash_attn
                ),
                unknown_kv_types=" ".join(
                    kind
                    for kind in (settings.cache_type_k, settings.cache_type_v)
                    if kind.lower() not in KV_BITS
                ),
                gpu_layers=settings.gpu_layers,
                n_cpu_moe=settings.n_cpu_moe,
                mmap=settings.mmap,
                repack=settings.repack,
                fit=settings.fit,
            ),
        )

    def launch(
        self, settings: LlamaCppSettings, model: ModelFacts, options: EngineOptions, port: int
    ) -> Launch:
        """Return the server process: its command line, environment and deadlines."""
        if options.binary is not None:
            program: tuple[str, ...] = (options.binary,)
        else:
            program = (
                options.python or sys.executable, "-m", "sweeper.engines.llamacpp_wheel",
            )  # fmt: skip
        env: dict[str, Scalar] = dict(options.env)
        if options.memory_limit_bytes is not None:
            # glibc reserves 64 MiB of address space for every thread's arena; under a limit on
            # address space those empty reservations would count as the model's memory.
            env.setdefault("MALLOC_ARENA_MAX", "1")
        for each in options.extra_args:
            if each.partition("=")[0] in _OWN_FLAGS:
                raise FieldError(
                    "extra_args",
                    f"names {each}, which sweeper sets itself: it binds to loopback, on a port "
                    "of its own, with the model of the study",
                )
        flags = _flags(settings, model, port)
        return Launch(
            argv=(*program, *flags, *options.extra_args),
            port_argument=len(program) + flags.index("--port") + 1,
            env=Pairs(env),
            host="127.0.0.1",
            port=port,
            health_path=self.wire.health_path,
            boot_timeout_s=options.boot_timeout_s,
            stop_timeout_s=options.stop_timeout_s,
            memory_limit_bytes=options.memory_limit_bytes,
        )

    def milestone(self, line: str) -> Phase | None:
        """Return the phase that this line opens; lines are matched by meaning, at any level."""
        return next((phase for phase, sign in _MILESTONES if sign.search(line)), None)

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return buffer sizes, the window, the version and what failed, summed over buffers."""
        sizes: dict[str, float] = {}
        facts: dict[str, Scalar] = {}
        for line in log:
            if found := _BUFFER.search(line):
                kind = found["kind"].lower().replace(" ", "_") + "_bytes"
                kind = {"model_bytes": "weights_bytes", "kv_bytes": "kv_cache_bytes"}.get(
                    kind, kind
                )
                sizes[kind] = sizes.get(kind, 0) + (_size(found.groupdict()) or 0)
            elif found := _SLOT_WINDOW.search(line):
                facts["effective_context_tokens"] = int(found["tokens"])
            elif found := _VERSION.search(line):
                # The first is the most telling: the wheel's own line comes before llama.cpp's.
                facts.setdefault("engine_version", (found["wheel"] or found["build"]).strip())
            elif found := _FLASH.search(line):
                facts["flash_attention"] = found["state"].lower()
        facts.update({name: round(size) for name, size in sizes.items()})
        return Pairs(facts)

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of a llama.cpp server means: the phase decides, the text refines."""
        reading = _read(list(log))
        if death.ended is Ended.NOT_STARTED:
            return _no_engine(death.detail)
        if death.ended is Ended.PORT_TAKEN or reading.port_taken:
            return Broken(
                name=BrokenName.PORT_IN_USE,
                finding=reading.finding(
                    "another process holds the port", reading.port_taken or death.detail
                ),
            )
        for judge in (_memory, _host, _point):
            if (verdict := judge(reading, death)) is not None:
                return verdict
        if death.ended is Ended.LATE:
            silent = reading.phase.order <= Phase.SPAWN.order
            return Broken(
                name=BrokenName.HANG_BOOT if silent else BrokenName.BOOT_TIMEOUT,
                finding=reading.finding(
                    f"it was not ready after {death.after_s:.0f} s; the last phase it reached was "
                    f"{reading.phase.value}",
                ),
            )
        if death.ended is Ended.LIVES:
            return Broken(
                name=BrokenName.HTTP_500,
                finding=reading.finding(
                    f"the server answered a request with an error: {death.detail}",
                    phase=Phase.SERVING,
                ),
            )
        how = _exit_in_words(death.exit_code)
        if death.was_ready:
            return Broken(
                name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
                finding=reading.finding(f"the server {how} while it was serving"),
            )
        return Broken(
            name=BrokenName.ENGINE_CRASH,
            finding=reading.finding(f"the server {how} before it was ready"),
        )

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        lines = list(log)
        phases = [phase for line in lines if (phase := self.milestone(line)) is not None]
        ready = Phase.READY in phases
        if ready and exit_code is None:
            return Nothing(
                finding=Finding(phase=Phase.READY, cause="", explanation="It came up and served.")
            )
        if not phases and exit_code is None:
            return Broken(
                name=BrokenName.UNKNOWN,
                finding=Finding(
                    phase=Phase.SPAWN,
                    cause="",
                    explanation="This does not read like a log of this engine.",
                ),
            )
        death = Death(ended=Ended.EXITED, after_s=0.0, was_ready=ready, exit_code=exit_code)
        return self.verdict(death, lines)

    def contradiction(
        self, settings: Any, facts: Pairs, props: str | None
    ) -> Unfit | None:  # fmt: skip
        """Return in what way that matters the running engine is not what was asked for."""
        del settings, facts, props
        return None

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return speculation's counters; None for a server that is too old to have them."""
        values: dict[str, float] = {}
        positions: dict[int, float] = {}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                short = sample.name.removeprefix("llamacpp:").removesuffix("_total")
                if short == "spec_decode_num_accepted_tokens_per_pos":
                    positions[int(sample.labels["position"])] = sample.value
                else:
                    values[short] = sample.value
        if "spec_decode_num_drafts" not in values:
            return None
        return DraftCounters(
            steps=int(values["spec_decode_num_drafts"]),
            drafted=int(values.get("spec_decode_num_draft_tokens", 0)),
            accepted=int(values.get("spec_decode_num_accepted_tokens", 0)),
            accepted_per_position=tuple(
                int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)
            ),
        )


def _flags(settings: LlamaCppSettings, model: ModelFacts, port: int) -> tuple[str, ...]:
    """Return the command line after the program, in llama-server's long names."""
    flags: list[str] = [
        "--model", model.path,
        "--alias", model.served_name,
        "--host", "127.0.0.1",
        "--port", str(port),
        "--ctx-size", str(settings.context),
        "--parallel", str(settings.parallel),
        "--cache-type-k", settings.cache_type_k,
        "--cache-type-v", settings.cache_type_v,
        "--flash-attn", settings.flash_attn,
        "--fit", settings.fit,
        "--cache-ram", str(settings.cache_ram_mib),
        "--metrics",
        "--no-ui",
        # Below this level llama.cpp does not print the sizes of its buffers.
        "--verbosity", "4",
    ]  # fmt: skip
    optional: tuple[tuple[str, Scalar], ...] = (
        ("--batch-size", settings.batch),
        ("--ubatch-size", settings.ubatch),
        ("--gpu-layers", settings.gpu_layers),
        ("--n-cpu-moe", settings.n_cpu_moe),
        ("--threads", settings.threads),
        ("--threads-batch", settings.threads),
        ("--threads-http", settings.threads_http),
        ("--chat-template-kwargs", settings.chat_template_kwargs),
    )
    for flag, value in optional:
        if value is not None:
            flags += [flag, str(value)]
    for flag, wanted in (
        ("--no-mmap", not settings.mmap),
        ("--no-repack", not settings.repack),
        ("--swa-full", settings.swa_full),
    ):
        if wanted:
            flags.append(flag)
    if settings.speculates:
        flags += ["--spec-type", settings.spec_type]
        if model.draft_path is not None:
            flags += ["--spec-draft-model", model.draft_path]
        length_flag = _DRAFT_LENGTH_FLAG.get(settings.spec_type, "--spec-draft-n-max")
        for flag, value in (
            (length_flag, settings.n_max),
            (_LOOKUP_LENGTH_FLAG.get(settings.spec_type, ""), settings.ngram_size),
            ("--spec-draft-n-min", settings.n_min),
            ("--spec-draft-p-min", settings.p_min),
        ):
            if flag and value is not None:
                flags += [flag, str(value)]
    return tuple(flags)


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


# --- reading the log -------------------------------------------------------------------------

_MILESTONES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.READY, re.compile(r"(?:server is )?listening on http|\bmodel loaded$")),
    (Phase.WARMUP, re.compile(r"warming up the model")),
    (Phase.COMPUTE, re.compile(r"reserving \.\.\.|reserve\w*: .*(?:compute|graph)|sched_reserve")),
    (Phase.KV, re.compile(r"constructing llama_context|llama_context: n_ctx\b|kv_cache")),
    (Phase.WEIGHTS, re.compile(r"loading model tensors|load_tensors|load_model: loading model|"
                               r"llama_model_load|print_info: file")),
    (Phase.CONFIG, re.compile(r"common_params_print_info|llama_server: (?:initializing|build)|"
                              r"build_info|system_info|system info")),
)  # fmt: skip

_BUFFER = re.compile(r"(?P<kind>model|KV|RS|compute|output) +buffer size += +(?P<mib>[\d.]+) MiB")
_SLOT_WINDOW = re.compile(r"n_ctx_slot = (?P<tokens>\d+)")
_VERSION = re.compile(
    r"^version: (?P<wheel>xllamacpp \S+)|"
    r"\b(?:build_info|build|version)\s*[:=]\s*(?P<build>b?\d[^,]*)"
)
_FLASH = re.compile(
    r"Flash Attention (?:was )?(?:set to )?(?P<state>enabled|disabled)", re.IGNORECASE
)

_ALLOCATION = (
    re.compile(r"insufficient memory \(attempted to allocate +(?P<mb>[\d.,]+) MB\)"),
    re.compile(r"allocating (?P<mib>[\d.,]+) MiB on device \S+: \w+ failed"),
    re.compile(r"failed to allocate \S+ buffer of size (?P<bytes>[\d,]+)"),
    re.compile(r"mmap failed: Cannot allocate memory|std::bad_alloc|bad allocation|"
               r"cannot allocate memory|[Oo]ut of memory|unable to allocate \S+ buffer|"
               r"failed to allocate buffer for|failed to allocate compute"),
)  # fmt: skip
_RECOVERED = re.compile(
    r"retrying without pipeline parallelism|retrying with smaller batch|normal during memory "
    r"fitting|find free space in the KV cache",
)
_KIND_OF_ALLOCATION: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.KV, re.compile(r"buffer for (?:kv|rs) cache")),
    (Phase.COMPUTE, re.compile(r"compute (?:pp |tg )?buffers?|graph_reserve|gallocr")),
    (Phase.WEIGHTS, re.compile(r"error loading model|failed to load model|model buffer")),
)
_ADDRESS_SPACE = re.compile(
    r"sweeper: address space in use at the failure: (?P<used>\d+) bytes, limit (?P<limit>\d+) bytes"
)
_NO_THREAD = re.compile(r"Resource temporarily unavailable|failed to create thread")
_PORT = re.compile(r"couldn't bind|address already in use", re.IGNORECASE)

_MEMORY_NAMES = {
    Phase.WEIGHTS: (InfeasibleName.OOM_WEIGHTS, "the weights"),
    Phase.KV: (InfeasibleName.OOM_KV_CACHE, "the KV cache"),
    Phase.COMPUTE: (InfeasibleName.OOM_COMPUTE, "the compute buffers"),
    Phase.WARMUP: (InfeasibleName.OOM_COMPUTE, "the warm-up"),
}

_HOST_SIGNS: tuple[tuple[re.Pattern[str], HostFaultName, str], ...] = (
    (
        re.compile(r"xllamacpp wheel is not installed"),
        HostFaultName.ENGINE_NOT_FOUND,
        "the engine is not installed where engine.python points",
    ),
    (
        re.compile(r"driver version is insufficient|no kernel image is available"),
        HostFaultName.DRIVER_MISMATCH,
        "the GPU driver does not fit this build of the engine",
    ),
    (
        re.compile(r"No space left on device"),
        HostFaultName.DISK_FULL,
        "the disk is full",
    ),
    (
        re.compile(
            r"failed to open GGUF|gguf_init_from_file|No such file|invalid magic|"
            r"tensor '.*' data is not within the file bounds|model is corrupted"
        ),
        HostFaultName.MODEL_NOT_FOUND_OR_GATED,
        "the model file is missing or damaged",
    ),
)

_POINT_SIGNS: tuple[tuple[re.Pattern[str], InfeasibleName, str], ...] = (
    (
        re.compile(r"invalid argument|error while handling argument|argument has been removed|"
                   r"unknown argument|[Uu]nsupported cache type"),
        InfeasibleName.BAD_ARGUMENT,
        "this build does not know one of the flags or values",
    ),
    (
        re.compile(r"quantized V cache (?:requires|was requested)|V cache quantization requires"),
        InfeasibleName.UNSUPPORTED_COMBINATION,
        "a quantised V cache needs flash attention",
    ),
    (
        re.compile(r"does not divide n_embd_head|does not support different K|not supported by "
                   r"this context|must match target model|requires flash_attn"),
        InfeasibleName.UNSUPPORTED_COMBINATION,
        "the model or the build does not support this combination",
    ),
    (
        re.compile(r"unknown model architecture|unsupported model architecture"),
        InfeasibleName.MODEL_UNSUPPORTED_ARCH,
        "this build does not know the model's architecture",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A log, read once from top to bottom."""

    lines: tuple[str, ...]
    phase: Phase
    allocation: int | None
    allocation_phase: Phase
    required_bytes: float | None
    used_bytes: int | None
    limit_bytes: int | None
    port_taken: str

    def finding(
        self, explanation: str, cause: str = "", *, facts: Mapping[str, Scalar] | None = None,
        phase: Phase | None = None,
    ) -> Finding:  # fmt: skip
        return Finding(
            phase=phase if phase is not None else self.phase,
            cause=cause or self.last_error(),
            explanation=explanation,
            facts=Pairs(facts or {}),
        )

    def last_error(self) -> str:
        marked = [
            line
            for line in self.lines
            if re.search(r"\bE \b|error|fail|abort", line, re.IGNORECASE)
        ]
        return (marked or list(self.lines) or [""])[-1].strip()


def _read(log: Sequence[str]) -> _Reading:
    phase, allocation_phase = Phase.SPAWN, Phase.SPAWN
    allocation: int | None = None
    required: float | None = None
    used: int | None = None
    limit: int | None = None
    port_taken = ""
    for index, line in enumerate(log):
        opened = next((each for each, sign in _MILESTONES if sign.search(line)), None)
        # Later stages print lines of earlier ones (a draft model loads after the target), so a
        # phase is only ever left for a later one.
        if opened is not None and opened.order > phase.order:
            phase = opened
            if phase is Phase.READY:
                # What was refused before it served was survived.
                allocation, required = None, None
        if _RECOVERED.search(line):
            allocation, required = None, None
            continue
        for sign in _ALLOCATION:
            if found := sign.search(line):
                if allocation is None:
                    allocation, allocation_phase = index, phase
                size = _size(found.groupdict())
                required = size if required is None else required
                break
        if allocation is not None:
            for each, sign in _KIND_OF_ALLOCATION:
                if sign.search(line) and index - allocation <= 3:
                    allocation_phase = each
                    break
        if found := _ADDRESS_SPACE.search(line):
            used, limit = int(found["used"]), int(found["limit"])
        if not port_taken and _PORT.search(line):
            port_taken = line.strip()
    return _Reading(
        lines=tuple(log),
        phase=phase,
        allocation=allocation,
        allocation_phase=allocation_phase,
        required_bytes=required,
        used_bytes=used,
        limit_bytes=limit,
        port_taken=port_taken,
    )


def _size(groups: Mapping[str, str]) -> float | None:
    for unit, scale in (("mb", MIB), ("mib", MIB), ("bytes", 1)):
        if unit in groups:
            with contextlib.suppress(ValueError):  # such as a lone dot in a torn line
                return float(groups[unit].replace(",", "")) * scale
    return None


def _memory(reading: _Reading, death: Death) -> Failure | None:
    if reading.allocation is None:
        return _no_thread(reading, death)
    if death.was_ready or reading.phase.order >= Phase.READY.order:
        name, what, phase = InfeasibleName.OOM_RUNTIME, "a request", Phase.SERVING
    else:
        phase = reading.allocation_phase
        if phase not in _MEMORY_NAMES:
            phase = Phase.WEIGHTS
        name, what = _MEMORY_NAMES[phase]
    limit = reading.limit_bytes if reading.limit_bytes is not None else death.limit_bytes
    used = reading.used_bytes if reading.used_bytes is not None else death.peak_bytes
    facts: dict[str, Scalar] = {}
    if limit is not None:
        facts["limit_bytes"] = limit
    if limit is not None and used is not None:
        facts["free_bytes"] = max(limit - used, 0)
    said = ""
    if reading.required_bytes is not None:
        facts["required_bytes"] = round(reading.required_bytes)
        said = f": {reading.required_bytes / MIB:.1f} MiB were asked for"
        free = facts.get("free_bytes")
        if isinstance(free, int):
            missing = reading.required_bytes - free
            said += f" where {free / MIB:.1f} MiB were free"
            if missing > 0:
                facts["shortfall_bytes"] = round(missing)
                said += f", {missing / MIB:.1f} MiB too few"
    return Infeasible(
        name=name,
        finding=reading.finding(
            f"memory ran out for {what}{said}",
            reading.lines[reading.allocation].strip(),
            facts=facts,
            phase=phase,
        ),
    )


def _no_thread(reading: _Reading, death: Death) -> Failure | None:
    """A thread needs address space for its stack: under a limit, its lack is a lack of memory."""
    if death.limit_bytes is None and reading.limit_bytes is None:
        return None
    line = next((each for each in reading.lines if _NO_THREAD.search(each)), None)
    if line is None:
        return None
    serving = death.was_ready or reading.phase.order >= Phase.READY.order
    return Infeasible(
        name=InfeasibleName.OOM_RUNTIME if serving else InfeasibleName.OOM_COMPUTE,
        finding=reading.finding(
            "memory ran out for the stack of a thread",
            line.strip(),
            facts={"limit_bytes": death.limit_bytes or reading.limit_bytes},
            phase=Phase.SERVING if serving else None,
        ),
    )


def _host(reading: _Reading, death: Death) -> Failure | None:
    if death.was_ready:
        return None
    for sign, name, explanation in _HOST_SIGNS:
        for line in reading.lines:
            if sign.search(line):
                return HostFault(name=name, finding=reading.finding(explanation, line.strip()))
    return None


def _point(reading: _Reading, death: Death) -> Failure | None:
    if death.was_ready:
        return None
    for sign, name, explanation in _POINT_SIGNS:
        for line in reading.lines:
            if sign.search(line):
                return Infeasible(name=name, finding=reading.finding(explanation, line.strip()))
    return None


def _no_engine(why: str) -> HostFault:
    return HostFault(
        name=HostFaultName.ENGINE_NOT_FOUND,
        finding=Finding(
            phase=Phase.SPAWN,
            cause=why,
            explanation=f"{why}; set engine.binary=/path/to/llama-server, or install the wheel: "
            "pip install xllamacpp",
        ),
    )


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
