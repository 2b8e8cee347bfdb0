"""vLLM's OpenAI-compatible server: its flags, its memory, what it prints, what its endings mean.

Flags as in vLLM 0.24 to 0.33; log lines are read by meaning, since their wording, their process
prefix and their file names move between versions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from sweeper.core.evidence import Role
from sweeper.core.launch import Death, Ended, Launch, Phase
from sweeper.core.memory import Estimate, Footprint
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
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError, build
from sweeper.engines import (
    CommandParts,
    Container,
    EngineOptions,
    ModelFacts,
    Wire,
    architecture_of,
    no_draft_layers,
    vllm_memory,
)
from sweeper.engines.metrics import draft_counters

GIB = 2**30

CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
"""What the graphs are captured for; the first three are also known as 0, 1 and 2."""

_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_OWN_FLAGS = ("--host", "--port", "--model", "--model-tag", "--served-model-name", "--uds")
_OWN_UTILIZATION = 0.92
"""The engine's default memory fraction; 0.9 before 0.20."""
_FP8_FAMILY = ("fp8", "nvfp4", "modelopt")
_NO_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")
_PARALLEL_DRAFTS = ("dflash", "dspark")
_SPEC_KEYS = {
    "method": "spec_method",
    "num_speculative_tokens": "n_max",
    "model": "spec_model",
}
_AT_LEAST_ONE = (
    "kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens",
    "max_cudagraph_capture_size", "tensor_parallel_size", "pipeline_parallel_size",
)  # fmt: skip
_TEXTS = (
    "quantization", "dtype", "load_format", "kv_cache_dtype", "spec_method", "spec_model",
    "attention_backend", "moe_backend", "reasoning_parser", "tool_call_parser",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What a study may set or sweep; None leaves the engine's own default.

    `max_model_len` is the window in tokens, or `auto`: as long as fits, read off the boot. `n_max`
    is the draft length, whatever `spec_method` names, and 0 switches speculation off. Capture
    sizes are a list, or for an axis a text such as "1,2,4"; `compilation_config` and `spec_extra`
    are mappings merged into the engine's JSON flags, or JSON text; both are kept as text.
    """

    max_model_len: int | Literal["auto"] | None = None
    quantization: str | None = None
    dtype: str | None = None
    load_format: str | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    cudagraph_mode: int | str | None = None
    cudagraph_capture_sizes: tuple[int, ...] | int | str | None = None
    max_cudagraph_capture_size: int | None = None
    compilation_config: Mapping[str, object] | str | None = None
    enforce_eager: bool = False
    spec_method: str | None = None
    n_max: int | None = None
    spec_model: str | None = None
    spec_extra: Mapping[str, object] | str | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    # A sweep sends the same prompts again and again: a cache of their prefixes, which the engine
    # has by default, would answer the repeats from memory and flatter the time to the first token.
    enable_prefix_caching: bool | None = False
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    language_model_only: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    trust_remote_code: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FieldError(name, f"must be at least 1, got {value}")
        for name in _TEXTS:
            if getattr(self, name) == "":
                raise FieldError(name, "must not be empty; null leaves the engine's default")
        if isinstance(self.max_model_len, int) and self.max_model_len < 1:
            raise FieldError(
                "max_model_len", f"must be at least 1 token, or auto, got {self.max_model_len}"
            )
        utilization = self.gpu_memory_utilization
        if utilization is not None and not 0 < utilization <= 1:
            raise FieldError(
                "gpu_memory_utilization",
                f"is a fraction of the card, above 0 and at most 1, got {utilization}",
            )
        if self.n_max is not None and self.n_max < 0:
            raise FieldError("n_max", f"must not be negative, got {self.n_max}")
        if self.seed is not None and self.seed < 0:
            raise FieldError("seed", f"must not be negative, got {self.seed}")
        # The class is frozen; what a study may write in several ways is kept in one.
        put = object.__setattr__
        put(self, "cudagraph_mode", _graph_mode(self.cudagraph_mode))
        put(self, "cudagraph_capture_sizes", _sizes(self.cudagraph_capture_sizes))
        put(self, "compilation_config", _json_text("compilation_config", self.compilation_config))
        put(self, "spec_extra", _json_text("spec_extra", self.spec_extra))
        self._check_graphs()
        self._check_speculation()
        kv, weights = self.kv_cache_dtype or "", self.quantization or ""
        if kv.lower() == "fp8_e5m2" and "fp8" in weights.lower():
            raise FieldError(
                "kv_cache_dtype",
                f"is {kv}, which the engine refuses with weights in {weights}: take fp8_e4m3",
            )

    def _check_graphs(self) -> None:
        extra = _mapping(self.compilation_config)
        for key in ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
            if key in extra and getattr(self, key) is not None:
                raise FieldError(
                    "compilation_config", f"names {key}, which is set on its own as well"
                )
        sizes, largest = self.capture_sizes, self.max_cudagraph_capture_size
        if sizes and largest is not None and largest != sizes[-1]:
            raise FieldError(
                "max_cudagraph_capture_size",
                f"is {largest}, but the largest of cudagraph_capture_sizes is {sizes[-1]}: "
                "make them equal, or set one of them",
            )

    def _check_speculation(self) -> None:
        for key in _mapping(self.spec_extra):
            if key in _SPEC_KEYS:
                raise FieldError("spec_extra", f"names {key}: set {_SPEC_KEYS[key]} instead")
        if self.n_max and not self.speculates:
            raise FieldError(
                "n_max",
                f"is {self.n_max}, but spec_method is none: name the kind of speculation, or set 0",
            )
        tokens, drafts = self.max_num_batched_tokens, self.n_max
        if not self.speculates or tokens is None or drafts is None:
            return
        slots = self._slots_per_sequence(drafts)
        # Without max_num_seqs the engine's own default is larger than 1: refuse what is certain.
        room = tokens - slots * (self.max_num_seqs or 1)
        if room <= 0 or tokens <= drafts:
            needed = max(slots * (self.max_num_seqs or 1), drafts) + 1
            raise FieldError(
                "n_max",
                f"is {drafts}: with max_num_batched_tokens {tokens} no token could be scheduled "
                f"beside the drafts; set max_num_batched_tokens to {needed} or more",
            )

    def _slots_per_sequence(self, drafts: int) -> int:
        """Return the rows that one sequence's drafts take in the batch, at least."""
        parallel = (
            self.spec_method in _PARALLEL_DRAFTS
            or _mapping(self.spec_extra).get("parallel_drafting") is True
        )
        return (drafts - 1 if parallel else 0) + (self.spec_method == "draft_model")

    @property
    def speculates(self) -> bool:
        """Whether drafts are made at all."""
        named = self.spec_model is not None or self.spec_method not in (None, "none")
        return named and self.spec_method != "none" and self.n_max != 0

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """The batch sizes that graphs are captured for, ascending; empty: the engine's own."""
        sizes = self.cudagraph_capture_sizes
        return sizes if isinstance(sizes, tuple) else ()

    @property
    def largest_capture(self) -> int | None:
        """The largest batch with a graph, as far as it was asked for; 0 for none."""
        if self.enforce_eager or self.cudagraph_mode == "NONE":
            return 0
        return self.capture_sizes[-1] if self.capture_sizes else self.max_cudagraph_capture_size


def _graph_mode(mode: int | str | None) -> str | None:
    if mode is None:
        return None
    known = ", ".join(CUDAGRAPH_MODES)
    if isinstance(mode, int) or mode.strip().isdigit():
        if int(mode) > 2 or int(mode) < 0:
            raise FieldError("cudagraph_mode", f"as a number is 0, 1 or 2, got {mode} ({known})")
        return CUDAGRAPH_MODES[int(mode)]
    if mode.strip().upper() not in CUDAGRAPH_MODES:
        raise FieldError("cudagraph_mode", f"must be one of {known}, got {mode!r}")
    return mode.strip().upper()


def _sizes(sizes: tuple[int, ...] | int | str | None) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if isinstance(sizes, int):
        sizes = (sizes,)
    if isinstance(sizes, str):
        parts = [part.strip() for part in sizes.strip("[] ").split(",")]
        if not all(part.isdigit() for part in parts):
            raise FieldError(
                "cudagraph_capture_sizes",
                f'must be whole numbers, as a list or as "1,2,4", got {sizes!r}',
            )
        sizes = tuple(int(part) for part in parts)
    if not sizes or min(sizes) < 1:
        raise FieldError(
            "cudagraph_capture_sizes",
            f"must name sizes of at least 1, got {list(sizes)}; enforce_eager captures none",
        )
    return tuple(sorted(set(sizes)))


def _json_text(name: str, value: Mapping[str, object] | str | None) -> str | None:
    if value is None:
        return None
    text = None
    with contextlib.suppress(TypeError, ValueError):
        read = json.loads(value) if isinstance(value, str) else dict(value)
        text = json.dumps(read, sort_keys=True) if isinstance(read, dict) else None
    if text is None:
        raise FieldError(name, f"must be a mapping, or JSON text of one, got {value!r}")
    return None if text == "{}" else text


def _mapping(text: Mapping[str, object] | str | None) -> dict[str, object]:
    if text is None:
        return {}
    return dict(json.loads(text)) if isinstance(text, str) else dict(text)


_CLOCKS = {
    "request_decode_time_seconds_sum": "decode_s",
    "request_decode_time_seconds_count": "requests",
    "time_to_first_token_seconds_sum": "ttft_s",
}
"""Histograms of which the sums are read, by the name that `clocks` gives them."""


class Vllm:
    """The adapter for vLLM's server, on any device that it runs on."""

    name = "vllm"
    simulated = False
    roles: Mapping[str, Role] = MappingProxyType(
        {
            "max_model_len": Role.CONTEXT,
            "kv_cache_dtype": Role.KV_DTYPE,
            "n_max": Role.DRAFT_LENGTH,
            "spec_method": Role.DRAFT_METHOD,
            "quantization": Role.WEIGHTS,
            "gpu_memory_utilization": Role.MEMORY_FRACTION,
            "max_num_seqs": Role.SEQUENCES,
            "max_num_batched_tokens": Role.PREFILL_CHUNK,
            "cudagraph_mode": Role.GRAPHS,
            "cudagraph_capture_sizes": Role.GRAPHS,
            "max_cudagraph_capture_size": Role.GRAPHS,
            "enforce_eager": Role.GRAPHS,
            "attention_backend": Role.BACKEND,
            "moe_backend": Role.BACKEND,
        }
    )
    wire = Wire(
        # A cache that several studies share may hold what an interrupted one left half written.
        cache_variables=("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        completion_extras=Pairs(ignore_eos=True),
        tokenize_special_key="add_special_tokens",
        scoring="prompt_logprobs",
    )
    recipe_forms = frozenset({"vllm-yaml", "vllm-recipe", "sparkrun"})
    runtime = "vllm"
    setting_notes: Mapping[str, str] = {
        "max_model_len": "tokens of the window; the KV pool must hold it",
        "kv_cache_dtype": "type of the cached keys and values; 8 bits hold twice the context of 16",
        "gpu_memory_utilization": "share of the card that is taken; what is left over serves peaks",
        "max_num_seqs": "requests at once; more take graphs and memory",
        "max_num_batched_tokens": "tokens computed at once; more need more memory for activations",
        "cudagraph_mode": "what runs from captured graphs: faster, and captures take memory",
        "cudagraph_capture_sizes": "batches that graphs are captured for; each takes memory",
        "enforce_eager": "no graphs: slower, and less memory",
        "spec_method": "the kind of speculation",
        "n_max": "tokens drafted at a time; more pay off as long as they are accepted",
        "attention_backend": "the attention kernels",
        "moe_backend": "the kernels of the experts",
    }

    def command_parts(self, argv: tuple[str, ...]) -> CommandParts | None:
        """Return the program, the model and the flags of a command that `launch` made."""
        return _parts(argv)

    def container(self, parts: CommandParts, argv: tuple[str, ...], facts: Pairs) -> Container:
        """Return vLLM's own image of this version (docs.vllm.ai, deployment/docker), for cards."""
        version = str(facts.get("engine_version") or "")
        plain = re.fullmatch(r"\d+\.\d+\.\d+(?:\.post\d+)?", version)
        image = f"vllm/vllm-openai:{f'v{version}' if plain else 'latest'}"
        serve = argv[parts.flags_at - 2] == "serve"
        return Container(
            image=None if facts.get("gpu") is None else image,
            entrypoint=("vllm", "serve", parts.model)
            if serve
            else ("python3", "-m", "vllm.entrypoints.openai.api_server"),
        )

    def settings(self, params: Mapping[str, Any]) -> VllmSettings:
        """Return frozen settings from a study's parameters; raises FieldError."""
        return build(VllmSettings, params)

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set."""
        return tuple(each.name for each in fields(VllmSettings))

    def context_tokens(self, settings: VllmSettings) -> int:
        """Return the window asked for; 0 where the engine chooses it, to be read off the boot."""
        return settings.max_model_len if isinstance(settings.max_model_len, int) else 0

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options with the program to start: the binary, else an interpreter."""
        for key in ("binary", "python"):
            wanted = getattr(options, key)
            if wanted is not None:
                found = shutil.which(wanted)
                if found is None and options.prefix:
                    return options  # a program in a container is not on this host
                if found is None:
                    return _no_engine(f"engine.{key} is {wanted}, and no such program exists")
                return (
                    replace(options, binary=found)
                    if key == "binary"
                    else replace(options, python=found)
                )
        if importlib.util.find_spec("vllm") is not None:
            return replace(options, python=sys.executable)
        found = shutil.which("vllm")
        if found is None:
            return _no_engine("vLLM is not installed here and there is no vllm on PATH")
        return replace(options, binary=found)

    def footprint(self, settings: VllmSettings, model: ModelFacts) -> Footprint:
        """Return weights, KV cache, activations, sampler and graphs in bytes, as rough estimates.

        Each grows with the true need. Where the model's files do not tell the size of a token, a
        token counts as one byte: it still orders configurations. Memory is bounded from two
        sides here (the share of the card, the pool that is left of it), so what moves the share
        makes two configurations incomparable.
        """

        def fact(name: str, default: float = 0) -> float:
            value = model.facts.get(name)
            known = isinstance(value, int | float) and not isinstance(value, bool)
            return float(value) if known and value is not None else default

        kv_bits = vllm_memory.kv_bits_of(settings.kv_cache_dtype, model.facts)
        window = settings.max_model_len
        kept = window if isinstance(window, int) else 0
        kv = kept * fact("kv_bytes_per_token") * (kv_bits or 16) / 16
        architecture = architecture_of(model)
        if not kv:
            kv = float(kept)
            if architecture is not None:
                kv = architecture.kv_bytes(kept, kv_bits or 16)
                if vllm_memory.drafts_by_itself(settings):
                    kv += architecture.draft_kv_bytes(kept, kv_bits or 16)
        tokens = settings.max_num_batched_tokens or 0
        row = 2 * (fact("embedding_length") * 6 + fact("feed_forward_length") * 3)
        drafts = (settings.n_max or 0) if settings.speculates else 0
        sampled = (settings.max_num_seqs or 0) * (1 + drafts)
        captured = settings.largest_capture or 0
        parts: dict[str, Scalar] = {
            "weights": model.size_bytes,
            "kv_cache": math.ceil(kv),
            "compute": math.ceil(tokens * (row or 1)),
            "sampler": math.ceil(sampled * (fact("vocabulary") * 4 or 1)),
            "graphs": math.ceil(captured * (fact("embedding_length") * 2 or 1)),
        }
        if settings.speculates and self._draft_model(settings, model) is not None:
            parts["draft"] = model.draft_size_bytes
        same = (
            "gpu_memory_utilization", "kv_cache_memory_bytes", "tensor_parallel_size",
            "pipeline_parallel_size", "quantization", "dtype", "attention_backend", "moe_backend",
            "enable_prefix_caching", "enable_chunked_prefill", "language_model_only",
            "cudagraph_mode", "compilation_config", "spec_extra",
        )  # fmt: skip
        return Footprint(
            parts=Pairs(parts),
            alike=Pairs(
                {
                    **{name: getattr(settings, name) for name in same},
                    "spec_method": settings.spec_method if settings.speculates else "none",
                    "spec_model": settings.spec_model if settings.speculates else None,
                    "window": "stated" if isinstance(window, int) else window,
                    "kv_cache_dtype": None if kv_bits is not None else settings.kv_cache_dtype,
                    "own_batched_tokens": settings.max_num_batched_tokens is None,
                    "own_num_seqs": settings.max_num_seqs is None,
                    "own_captures": settings.largest_capture is None,
                    "own_draft_length": settings.speculates and settings.n_max is None,
                }
            ),
        )

    def estimate(self, settings: VllmSettings, model: ModelFacts) -> Estimate:
        """Return what these settings need of memory by component, before any boot."""
        return vllm_memory.estimate(settings, model)

    def share(self, settings: VllmSettings) -> float:
        """Return the memory fraction, the engine's own where none is set; 1 for a stated pool."""
        if settings.kv_cache_memory_bytes is not None:
            return 1.0
        stated = settings.gpu_memory_utilization
        return stated if stated is not None else _OWN_UTILIZATION

    def refusal(self, settings: VllmSettings, model: ModelFacts) -> str | None:
        """Return why the checkpoint cannot be served so: no draft layers, or its kind of cache."""
        if vllm_memory.drafts_by_itself(settings) and settings.spec_model is None:
            return no_draft_layers(model)
        weights = str(model.facts.get("quantization", "")).lower()
        if (settings.kv_cache_dtype or "").lower() == "fp8_e5m2" and any(
            kind in weights for kind in _FP8_FAMILY
        ):
            return (
                f"the engine refuses an fp8_e5m2 cache with checkpoints of the fp8 family, and "
                f"this one is {weights}: take fp8_e4m3"
            )
        return None

    def shown(self, settings: VllmSettings, evidence: Pairs) -> Pairs:
        """Return the components that a boot printed in bytes, by the names of the estimate."""
        return vllm_memory.shown(settings, evidence)

    def launch(
        self, settings: VllmSettings, model: ModelFacts, options: EngineOptions, port: int
    ) -> Launch:
        """Return the server process: its command line, environment and deadlines."""
        if options.binary is not None:
            program: tuple[str, ...] = (options.binary, "serve", model.path)
        else:
            program = (
                options.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                "--model", model.path,
            )  # fmt: skip
        flags = self._flags(settings, model, port)
        for each in options.extra_args:
            _check_extra(each, flags)
        return Launch(
            argv=(*program, *flags, *options.extra_args),
            port_argument=len(program) + flags.index("--port") + 1,
            env=Pairs({**_QUIET, **options.env}),
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

    def told(self, line: str) -> tuple[int, int] | None:
        """Return how many shards are loaded or graphs captured, by the bar that shows it."""
        found = _BAR.search(line)
        return None if found is None else (int(found[1]), int(found[2]))

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return sizes, the window, the version and what really runs, of the last boot."""
        facts = _Facts()
        for line in _lines(log):
            facts.read(line)
        return facts.pairs()

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of a vLLM server means: the phase decides, the text refines."""
        if death.ended is Ended.NOT_STARTED:
            return _no_engine(death.detail)
        reading = _read([death.detail] if death.ended is Ended.LIVES else [], log)
        if death.was_ready:
            reading.up = True
        if death.ended is Ended.PORT_TAKEN:
            return Broken(
                name=BrokenName.PORT_IN_USE,
                finding=reading.finding("another process holds the port", death.detail),
            )
        lives = death.ended is Ended.LIVES
        if death.ended is Ended.SILENT:
            return _silent(reading, death.detail)
        if (failure := _named(reading, lives=lives)) is not None:
            return failure
        if death.ended is Ended.LATE:
            silent = reading.phase is Phase.SPAWN
            stuck = silent or reading.waits_at_the_end or reading.shm_waits > 1
            return Broken(
                name=BrokenName.HANG_BOOT if stuck else BrokenName.BOOT_TIMEOUT,
                finding=reading.finding(
                    f"it was not ready after {death.after_s:.0f} s; the last phase it reached was "
                    f"{reading.phase.value}",
                    reading.last,
                ),
            )
        if lives:
            return Broken(
                name=BrokenName.HTTP_500,
                finding=reading.finding(
                    f"the server answered a request with an error: {death.detail}",
                    reading.last_error or death.detail,
                    phase=Phase.SERVING,
                ),
            )
        return _unexplained(reading, death.exit_code)

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        reading = _read([], log)
        if reading.foreign and not reading.marked:
            return _unknown(reading, "this reads like the log of another program")
        lives = exit_code is None
        if (failure := _named(reading, lives=lives)) is not None:
            return failure
        if lives:
            if reading.waits_at_the_end:
                return Broken(
                    name=BrokenName.HANG_BOOT,
                    finding=reading.finding(
                        "it waits for its engine process, and nothing came after", reading.last
                    ),
                )
            if not reading.marked:
                return _unknown(reading, "this does not read like a log of this engine")
            return Nothing(finding=reading.settled())
        if reading.up and exit_code in _TOLD_TO_STOP and (reading.stopped or exit_code != 0):
            return Nothing(finding=reading.settled())
        if not reading.marked and not reading.compiling:
            return _unknown(reading, "this does not read like a log of this engine")
        return _unexplained(reading, exit_code)

    def contradiction(
        self, settings: VllmSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:  # fmt: skip
        """Return in what way that matters the running engine is not what was asked for."""
        del props
        for judge in (_context_of, _kv_dtype_of, _speculation_of, _backend_of, _graphs_of):
            if (found := judge(settings, facts)) is not None:
                name, said, numbers = found
                return Unfit(
                    name=name,
                    finding=Finding(
                        phase=Phase.READY, cause=said, explanation=said, facts=Pairs(numbers)
                    ),
                )
        return None

    def clocks(self, metrics: str) -> Pairs:
        """Return the engine's own times of its requests, summed over engines."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if (name := _CLOCKS.get(sample.name.removeprefix("vllm:"))) is not None:
                    found[name] = found.get(name, 0.0) + sample.value
        return Pairs(found)

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return speculation's counters, summed over engines; None where there are none."""
        return draft_counters(metrics, "vllm:")

    def _draft_model(self, settings: VllmSettings, model: ModelFacts) -> str | None:
        if settings.spec_model is not None:
            return settings.spec_model
        return None if settings.spec_method in _NO_DRAFT_MODEL else model.draft_path

    def _flags(self, settings: VllmSettings, model: ModelFacts, port: int) -> tuple[str, ...]:
        """Return the command line after the program and the model."""
        flags: list[str] = [
            "--served-model-name", model.served_name,
            "--host", "127.0.0.1",
            "--port", str(port),
        ]  # fmt: skip
        valued: tuple[tuple[str, Scalar], ...] = (
            ("--max-model-len", settings.max_model_len),
            ("--quantization", settings.quantization),
            ("--dtype", settings.dtype),
            ("--load-format", settings.load_format),
            ("--kv-cache-dtype", settings.kv_cache_dtype),
            ("--gpu-memory-utilization", settings.gpu_memory_utilization),
            ("--kv-cache-memory-bytes", settings.kv_cache_memory_bytes),
            ("--max-num-seqs", settings.max_num_seqs),
            ("--max-num-batched-tokens", settings.max_num_batched_tokens),
            ("--compilation-config", self._compilation(settings)),
            ("--speculative-config", self._speculation(settings, model)),
            ("--attention-backend", settings.attention_backend),
            ("--moe-backend", settings.moe_backend),
            ("--tensor-parallel-size", settings.tensor_parallel_size),
            ("--pipeline-parallel-size", settings.pipeline_parallel_size),
            ("--reasoning-parser", settings.reasoning_parser),
            ("--tool-call-parser", settings.tool_call_parser),
            ("--seed", settings.seed),
        )
        for flag, value in valued:
            if value is not None:
                flags += [flag, str(value)]
        switches: tuple[tuple[str, bool | None], ...] = (
            ("--enforce-eager", settings.enforce_eager or None),
            ("--language-model-only", settings.language_model_only or None),
            ("--trust-remote-code", settings.trust_remote_code or None),
            ("--enable-auto-tool-choice", settings.tool_call_parser is not None or None),
            ("--enable-prefix-caching", settings.enable_prefix_caching),
            ("--enable-chunked-prefill", settings.enable_chunked_prefill),
        )
        for flag, wanted in switches:
            if wanted is not None:
                flags.append(flag if wanted else f"--no-{flag.removeprefix('--')}")
        return tuple(flags)

    def _compilation(self, settings: VllmSettings) -> str | None:
        merged = _mapping(settings.compilation_config)
        if settings.cudagraph_mode is not None:
            merged["cudagraph_mode"] = settings.cudagraph_mode
        if settings.capture_sizes:
            merged["cudagraph_capture_sizes"] = list(settings.capture_sizes)
        if settings.max_cudagraph_capture_size is not None:
            merged["max_cudagraph_capture_size"] = settings.max_cudagraph_capture_size
        return json.dumps(merged, sort_keys=True) if merged else None

    def _speculation(self, settings: VllmSettings, model: ModelFacts) -> str | None:
        if not settings.speculates:
            return None
        merged = _mapping(settings.spec_extra)
        for key, value in (
            ("method", settings.spec_method),
            ("num_speculative_tokens", settings.n_max),
            ("model", self._draft_model(settings, model)),
        ):
            if value is not None:
                merged[key] = value
        return json.dumps(merged, sort_keys=True)


def _parts(argv: tuple[str, ...]) -> CommandParts | None:
    if "--served-model-name" not in argv[3:]:
        return None
    at = argv.index("--served-model-name", 3)
    serve = argv[at - 2] == "serve"
    if not serve and argv[at - 4 : at - 1] != (
        "-m", "vllm.entrypoints.openai.api_server", "--model",
    ):  # fmt: skip
        return None
    flags_at = at if serve else at - 2
    flags: list[tuple[str, ...]] = []
    for word in argv[flags_at:]:
        if re.match(r"--?[A-Za-z]", word):
            flags.append((word,))
        elif flags:
            flags[-1] = (*flags[-1], word)
    return CommandParts(
        start=at - (3 if serve else 5),
        flags_at=flags_at,
        model=argv[at - 1],
        served_name=argv[at + 1],
        flags=tuple(flags),
    )


def _check_extra(argument: str, flags: tuple[str, ...]) -> None:
    """Refuse an extra argument that names, in full or cut short, a flag that is set already."""
    named = argument.partition("=")[0].replace("_", "-")
    if not named.startswith("--") or len(named) < 4:
        return
    for own in _OWN_FLAGS:
        # The engine's parser takes a flag that is cut short.
        if own == named or (own.startswith(named) and len(named) > 4):
            raise FieldError(
                "extra_args",
                f"names {argument}, which sweeper sets itself: it binds to loopback, on a port "
                "of its own, with the model of the study",
            )
    if named in flags:
        raise FieldError(
            "extra_args", f"names {argument}, which engine.params or an axis sets already"
        )


def _no_engine(why: str) -> HostFault:
    return HostFault(
        name=HostFaultName.ENGINE_NOT_FOUND,
        finding=Finding(
            phase=Phase.SPAWN,
            cause=why,
            explanation=f"{why}; set engine.python to the interpreter of an environment that has "
            "vLLM, or engine.binary to a vllm command",
        ),
    )


# --- lines ------------------------------------------------------------------------------------

_LONGEST_LINE = 20_000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LEVEL = re.compile(r"(?:^|[\s)|\]])(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?=:?\s)")
_LOGGER = re.compile(r"\[[\w./-]+:\d+\] ?|\[[\w-]+\.py\] ?")
_PROCESS = re.compile(r"^(?:\([\w :=.-]*(?:pid|rank)[=:]? ?\d+[\w :=.-]*\)\s?)+")
_MARK = re.compile(
    r"\bv?LLM\b|vllm[:./ ]|VLLM_|EngineCore|APIServer|AsyncLLM|Worker_(?:TP|PP|DP|EP)\d|VllmWorker|"
    r"api_server|KV cache|kv_cache|[Cc][Uu][Dd][Aa] ?[Gg]raph|max_num_(?:seqs|batched|scheduled)|"
    r"max_model_len|num_speculative|SpecDecoding|Avg (?:prompt|generation) throughput|"
    r"shared memory broadcast|(?:Loading|Capturing|Starting to load) .*(?:shard|graph|model)|"
    r"attention backend|torch\.(?:cuda\.)?OutOfMemoryError|Application startup|"
    r"maximum context length|chat template|core engine proc|module or parameter named|"
    r"cache blocks|Free memory on device|memory profiling|\[\w+\.py(?::\d+)?\]"
)
_KIN = re.compile(
    r"torch|[Nn][Cc][Cc][Ll]|CUDA|cuda|[Zz][Mm][Qq]|[Tt]riton|nvcc|ninja|\[Errno \d+\]|EADDRINUSE|"
    r"transformers|safetensors|pydantic|flashinfer|/dev/shm|[Bb]us error|uvicorn|uvloop"
)
"""What this engine is built on: enough to believe a failure, not enough to believe a success."""
_FOREIGN = re.compile(
    r"\bggml_|llama_(?:model|context|kv|init)|\bllama-server|\bslot +\w+_|sglang|\bollama\b|"
    r"\[TensorRT|text-generation-launcher"
)


def _lines(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log without colours; a progress bar's states are lines of their own."""
    for raw in log:
        line = raw[:_LONGEST_LINE]
        if "\x1b" in line:
            line = _ANSI.sub("", line)
        if "\r" in line or "\n" in line:
            yield from (part for part in re.split(r"[\r\n]+", line) if part)
        else:
            yield line


def _level(line: str) -> str:
    found = _LEVEL.search(line, 0, 160)
    return found[1] if found else ""


def _body(line: str) -> str:
    """Return what a line says, without the process and the logger that said it."""
    found = _LOGGER.search(line, 0, 200)
    if found is not None and _level(line[: found.start() + 1]):
        return line[found.end() :].strip()
    return _PROCESS.sub("", line).strip()


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # such as a lone dot in a torn line
        return None


_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_AMOUNT = r"(-?[\d.,]*\d)\s*([KMGT]?)(?:\[?i?B\]?|b)?"


def _size(number: str, unit: str) -> int | None:
    value = _number(number)
    return None if value is None else round(value * _SCALE[unit.upper()])


# --- phases -----------------------------------------------------------------------------------

_MILESTONES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.READY, re.compile(r"Application startup complete|Uvicorn running on")),
    (Phase.SERVING, re.compile(r"Avg (?:prompt|generation) throughput|SpecDecoding metrics|"
                               r'"(?:GET|POST) /\S* HTTP/')),
    (Phase.WARMUP, re.compile(r"init engine \(|warming up sampler|Starting vLLM (?:API )?server")),
    # The estimate of the graphs' memory is made while profiling, before there is a KV cache.
    (Phase.PROFILING, re.compile(r"Profiling CUDA ?graph|Estimated CUDA ?graph memory|"
                                 r"Model loading took|Loading model weights took|"
                                 r"Memory profiling|torch\.compile took|Dynamo bytecode transform|"
                                 r"Initial profiling|profiling/warmup run")),
    (Phase.CAPTURE, re.compile(r"Capturing CUDA ?graph|Capturing cudagraphs|"
                               r"Graph capturing finished|CUDA ?graph pool memory")),
    (Phase.KV, re.compile(r"Available KV cache memory|KV cache size:|Maximum concurrency for|"
                          r"memory for KV Cache as specified|Auto-fit max_model_len|"
                          r"Explicitly set \(.*for KV cache|"
                          r"Overriding num_gpu_blocks|# (?:GPU|CPU|cuda) blocks:")),
    (Phase.DRAFT, re.compile(r"Loading (?:the )?(?:drafter|draft model|speculator)")),
    (Phase.WEIGHTS, re.compile(r"Starting to load model|Loading (?:safetensors|pt|model) (?:"
                               r"checkpoint )?(?:shards|weights|from)|Loading weights took|"
                               r"Failed to load model|[Uu]sing \w+ (?:attention )?backend out of|"
                               r"checkpoint shards:")),
    (Phase.DEVICE, re.compile(r"Initializing a V\d LLM engine|Initializing an LLM engine|"
                              r"world_size=\d+ rank=\d+|rank \d+ in world size|"
                              r"Using V2 Model Runner")),
    (Phase.CONFIG, re.compile(r"non-default args|vLLM API server version|Resolved architecture|"
                              r"[█▄▀] +version \d")),
)  # fmt: skip

_BAR = re.compile(r"\d%(?:\|[^|]*| Completed ?)\| *(\d{1,9})/(\d{1,9}) \[")
"""`Capturing CUDA graphs (decode, FULL):  51%|█████▏    | 18/35 [` and
`Loading safetensors checkpoint shards:  25% Completed | 1/4 [`."""

_BOOT = (
    Phase.SPAWN, Phase.ARGS, Phase.CONFIG, Phase.DEVICE, Phase.WEIGHTS, Phase.DRAFT,
    Phase.PROFILING, Phase.KV, Phase.CAPTURE, Phase.WARMUP, Phase.READY, Phase.SERVING,
)  # fmt: skip
"""The phases in this engine's order: it loads the drafter with the weights, before profiling."""

_PLACES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (Phase.PROFILING, re.compile(r"profile_run|determine_available_memory|profile_cudagraph|"
                                 r"memory_profiling")),
    (Phase.CAPTURE, re.compile(r"capture_model|capture_cudagraphs?|_warmup_and_capture|"
                               r"capture_graphs?\b|[Gg]raph (?:\w+ )?capture|cudagraph capture")),
    (Phase.WARMUP, re.compile(r"_dummy_sampler_run|warming up sampler|compile_or_warm_up_model|"
                              r"kernel_warmup|warmup_kernels")),
    (Phase.DRAFT, re.compile(r"(?:drafter|speculator|proposer|draft_model|draft_worker)\.load|"
                             r"load_(?:draft|drafter|speculator|eagle|mtp)\w*|MultiTokenPredictor|"
                             r"\w+MTP\b")),
    (Phase.WEIGHTS, re.compile(r"load_model|initialize_model|create_weights|load_weights|"
                               r"process_weights_after_loading|model_loader")),
    (Phase.KV, re.compile(r"get_kv_cache_config|initialize_kv_cache|allocate_kv_cache|"
                          r"unify_kv_cache|initialize_from_config|_check_enough_kv|kv_cache_spec")),
    (Phase.DEVICE, re.compile(r"init_device|MemorySnapshot|request_memory")),
    (Phase.SERVING, re.compile(r"execute_model|_process_engine_step|sample_tokens|run_busy_loop")),
    (Phase.CONFIG, re.compile(r"create_engine_config|create_model_config|create_speculative_config|"
                              r"(?:Vllm|Model|Speculative|Cache|Scheduler|Parallel)Config\b")),
)  # fmt: skip
"""Where a traceback was, by the functions in it; the first that is found is the innermost."""


def _place(text: str) -> Phase | None:
    return next((phase for phase, sign in _PLACES if sign.search(text)), None)


# --- signs of failure -------------------------------------------------------------------------

_Name: TypeAlias = InfeasibleName | UnfitName | BrokenName | HostFaultName
_Open: TypeAlias = Literal["memory", "fault", "hang", "exception"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """What a line means; `name` may be left open to the phase.

    `boot_only` signs mean nothing once it serves, `raised_only` ones only in an exception.
    """

    name: _Name | _Open
    pattern: re.Pattern[str]
    why: str
    phase: Phase | None = None
    boot_only: bool = False
    raised_only: bool = False


def _sign(
    name: _Name | _Open, pattern: str, why: str, *,
    phase: Phase | None = None, boot: bool = False, raised: bool = False,
) -> _Sign:  # fmt: skip
    return _Sign(
        name=name, pattern=re.compile(pattern), why=why, phase=phase, boot_only=boot,
        raised_only=raised,
    )  # fmt: skip


_SIGNS: tuple[_Sign, ...] = (
    _sign(HostFaultName.ENGINE_NOT_FOUND,
          r"No module named '?vllm\b|[Nn]o package metadata was found for vllm|"
          r"PackageNotFoundError: vllm|vllm: (?:command )?not found|\.so\S*: undefined symbol",
          "the engine is not installed, or not whole, where it was looked for", phase=Phase.SPAWN),
    _sign(HostFaultName.DRIVER_MISMATCH,
          r"compiled with an unsupported toolchain|device kernel image is invalid|"
          r"no kernel image is available|driver version is insufficient|"
          r"driver on your system is too old|cudaErrorInsufficientDriver|"
          r"forward compatibility was attempted|CUDA driver initialization failed|"
          r"Driver/library version mismatch|system not yet initialized|"
          r"lib(?:cuda|cudart|cublas\w*|nv\w+)\.so\S* cannot open|Failed to infer device type|"
          r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|"
          r"CUDA unknown error|unsupported display driver|Failed to initialize NVML|"
          r"NVMLError_(?:LibRmVersionMismatch|DriverNotLoaded|LibraryNotFound)",
          "the GPU driver does not fit this build of the engine"),
    _sign(BrokenName.SHM_EXHAUSTED,
          r"insufficient shared memory|/dev/shm.*(?:No space|full|too small)|"
          r"(?:No space left|Errno 28).*(?:/dev/shm|psm_|shared memory|shm)|"
          r"(?:unable|failed|[Ee]rror|could not)\b.*(?:open|allocat|resiz|writ|creat|truncat|map)"
          r"\w*.*\bshared memory|shared memory.*(?:exhausted|No space left)|\bBus error|SIGBUS",
          "the shared memory between the engine's processes is used up"),
    _sign(HostFaultName.DISK_FULL,
          r"No space left on device|\[Errno 28\]|os error 28|"
          r"[Nn]ot enough (?:free )?(?:disk )?space|"
          r"Disk quota exceeded",
          "the disk is full"),
    _sign(HostFaultName.TOOLCHAIN_JIT_FAILURE,
          r"(?:[Cc]ould not find|[Cc]annot find|needs?|requires?|no|missing|without) `?'?\"?nvcc|"
          r"nvcc['\"`]?:? (?:is )?(?:not found|fatal|error|command not found|No such)|"
          r"Command .*(?:gcc|g\+\+|nvcc|cicc).* returned non-zero|GLIBC\w*_[\d.]+.? not found|"
          r"No such file or directory: '[^']*nvcc|ninja: (?:build stopped|error|fatal)|"
          r"[Nn]inja build failed|[Nn]inja is required|Command .*ninja.* (?:returned|died)|"
          r"Error building extension|CUDA_HOME (?:environment variable )?is not set|"
          r"Failed to find (?:a )?C compiler|fatal error: \S+\.h(?:pp)?\b|"
          r"\.(?:cu|cuh|cc|cpp|c|h)[:(]\d+\S* (?:fatal )?error|"
          r"ptxas (?:fatal|error)|PTXASError|ptxas.*(?:failed|not defined)|"
          r"NVRTC_ERROR|nvrtc: error|"
          r"JIT (?:build|compil\w+) (?:needs|fail\w*|error)",
          "a kernel could not be compiled on this host: its compiler is missing or too old"),
    _sign(BrokenName.COMPILE_CACHE_CORRUPT,
          r"vLLM failed to compile the model|corrupted compilation artifact|"
          r"(?:compile|compilation|torch_compile|inductor|aot)\w*[ _](?:cache|artifact).*"
          r"(?:corrupt|truncated|EOFError|Unpickling|invalid load key)",
          "the cache of compiled graphs is damaged: remove the torch_compile_cache folder",
          phase=Phase.PROFILING),
    _sign(HostFaultName.MODEL_NOT_FOUND_OR_GATED,
          r"SafetensorError|[Ee]rror while deserializing header|HeaderTooLarge|"
          r"MetadataIncompleteBuffer",
          "a file of the model's weights is damaged", phase=Phase.WEIGHTS, boot=True),
    _sign(HostFaultName.MODEL_NOT_FOUND_OR_GATED,
          r"gated repo|GatedRepoError|[Aa]ccess to model .* is restricted|"
          r"\b40[13] Client Error|RepositoryNotFoundError|"
          r"Repository Not Found|not a valid model identifier|is not a local folder|"
          r"LocalEntryNotFoundError|EntryNotFoundError|[Cc]ouldn't connect to|OfflineModeIsEnabled|"
          r"[Cc]annot find any model weights|does not appear to have a file named|"
          r"no file named .*(?:safetensors|bin|json)|Incorrect path_or_model_id|"
          r"HFValidationError|Invalid repository ID or local directory|"
          r"Can't load (?:the )?(?:configuration|tokenizer|config)|"
          r"No such file or directory: .*(?:config\.json|safetensors|tokenizer|\.gguf)",
          "the model is missing, damaged, or not open to this user", phase=Phase.CONFIG, boot=True),
    _sign(BrokenName.PORT_IN_USE,
          r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]|[Pp]ort \d+ is (?:already )?in use",
          "another process holds the port"),
    _sign(BrokenName.GPU_MEMORY_CONTENDED,
          r"Free memory on device.*(?:is less than|less than desired|below)",
          "other processes hold the card's memory", phase=Phase.DEVICE, boot=True),
    _sign(BrokenName.GPU_MEMORY_CONTENDED,
          r"Error in memory profiling|[Ii]nitial free memory .*current free memory",
          "other processes freed the card's memory while the engine measured it",
          phase=Phase.PROFILING, boot=True),
    _sign(InfeasibleName.CAPACITY_MAX_NUM_SEQS,
          r"max_num_seqs.*(?:exceeds?|larger than|more than|greater than).*"
          r"(?:[Mm]amba|state|cache) (?:cache )?blocks",
          "more sequences were asked for than there are state blocks", phase=Phase.CAPTURE,
          boot=True),
    _sign(InfeasibleName.OOM_KV_CACHE,
          r"No available memory for the cache blocks|KV cache is needed|"
          r"To serve at least one request with|larger than the available KV cache memory|"
          r"maximum number of tokens that can be stored in (?:the )?KV cache|"
          r"is less than requested memory for kv|[Cc]annot auto-fit max_model_len|"
          r"not enough (?:GPU )?memory .*even a single token",
          "the KV cache that is left room for does not hold the window", phase=Phase.KV,
          boot=True),
    _sign(InfeasibleName.HOST_RAM_OOM,
          r"DefaultCPUAllocator|[Cc]annot allocate memory|(?<!OutOf)\bMemoryError\b|"
          r"std::bad_alloc|oom-?kill|OOMKilled|Out of memory: Killed|node running low on memory|"
          r"ray\.exceptions\.OutOfMemoryError|Memory cgroup out of memory",
          "the host's memory ran out"),
    _sign("memory",
          r"CUDA out of (?:memory|\W)|HIP out of memory|XPU out of memory|Tried to allocate|"
          r"OutOfMemoryError|CUDA error: out of memory|cudaErrorMemoryAllocation|"
          r"not enough GPU memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
          r"CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory|"
          r"UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
          "memory ran out"),
    _sign(InfeasibleName.MODEL_UNSUPPORTED_ARCH,
          r"[Mm]odel architectures? .*(?:not supported|failed to be inspected)|"
          r"does not recognize this architecture|has no vLLM implementation|"
          r"[Uu]nsupported model (?:type|architecture)|[Uu]nrecognized model in|"
          r"[Uu]nknown model architecture",
          "this build does not know the model's architecture", phase=Phase.CONFIG, boot=True),
    _sign(InfeasibleName.BAD_ARGUMENT,
          r"(?:^|[\s/])(?:vllm|api_server|serve|python\d?|__main__|main)\b[\w. -]*: error: |"
          r"^error: (?:unrecognized arguments|argument )|\binvalid choice: ",
          "this build does not know one of the flags or values", phase=Phase.ARGS, boot=True),
    _sign(InfeasibleName.BAD_ARGUMENT,
          r"Input should be|Extra inputs are not permitted|Unexpected keyword argument \[|"
          r"Config\.__init__\(\) got an unexpected keyword|"
          r"Field required|unable to parse string|Invalid JSON|"
          r"Unknown (?:quantization|attention|speculative|load|kv|KV|backend)|"
          r"Invalid (?:attention |moe )?backend|is not a valid \w*(?:Backend|Enum|Mode)\b|"
          r"(?:dtype|quantization|load_format) must be one of",
          "the engine does not take one of the values", phase=Phase.CONFIG, boot=True,
          raised=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"max_num_scheduled_tokens is set to -?\d+.*not allow|"
          r"does not have enough slots to schedule|must be divisible by|"
          r"should be consistent with the max value of|num_speculative_tokens must be provided|"
          r"User-specified max_model_len|is greater than the derived max_model_len|"
          r"larger than the (?:number of )?available GPUs|invalid device ordinal|"
          r"[Cc]annot find the config file for|max_num_batched_tokens .*is smaller than|"
          r"must be greater than or equal to max_num_seqs",
          "the engine refuses this combination of settings", phase=Phase.CONFIG, boot=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"No valid attention backend|no module or parameter named|"
          r"both a multiple of|[Oo]ut ?[Oo]f ?[Rr]esources?: |out of resource: shared memory|"
          r"is not supported (?:with|for|on|by|in|when)|(?:does|do|are|is) not (?:yet )?support|"
          r"not (?:yet )?(?:supported|implemented)|only supports?\b|[Uu]nsupported|"
          r"[Ii]ncompatible|not compatible|mutually exclusive|"
          r"cannot be used (?:with|together|when)|"
          r"not divisible by|[Rr]equires? (?:compute capability|CUDA capability)|"
          r"[Mm]inimum capability|conflicts? with|Please (?:pip )?install |"
          r"should have the same vocabulary size",
          "the engine, the model or the card does not support this combination", boot=True,
          raised=True),
    _sign(InfeasibleName.UNSUPPORTED_COMBINATION,
          r"(?:ImportError|ModuleNotFoundError): .* is required (?:for|to|by)\b",
          "the engine lacks a package that these settings need", boot=True, raised=True),
    _sign(BrokenName.BOOT_TIMEOUT,
          r"Timed out waiting for engine (?:core )?processes|Engine (?:core )?process\w* did not "
          r"(?:start|become ready)",
          "the engine's own deadline for its boot passed", boot=True),
    _sign("hang",
          r"RPC call to \S+ timed out|execute_model timed out|Watchdog caught collective operation",
          "the engine's processes stopped answering each other"),
    _sign("fault",
          r"illegal (?:memory access|instruction|address)|cudaErrorIllegal|misaligned address|"
          r"device-side assert|unspecified launch failure|cudaErrorLaunch|CUBLAS_STATUS_|"
          r"CUDNN_STATUS_|NCCL error|ncclUnhandled|ncclSystemError|ncclInternalError|CUDA error|"
          r"HIP error|Segmentation fault|SIGSEGV|SIGABRT|Fatal Python error|uncorrectable ECC|"
          r"fallen off the bus|[Cc]ore dumped",
          "the card or the process failed"),
)  # fmt: skip
"""Signs of failure by meaning; the first that a line carries is the one it means."""

_SURVIVED = re.compile(
    r"If (?:an )?out-of-memory error occurs|[Tt]rying (?:port|another)|using port|[Ff]alling back|"
    r"\bretrying\b|will be ignored"
)
"""What the engine says of a trouble that it gets around."""

_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?(?P<type>[A-Z]\w*(?:Error|Exception))\b(?::\s*(?P<text>.*)|.*)$"
)
_WRAPPER = re.compile(
    r"EngineCore failed to start|See root cause above|See stack trace|EngineDeadError|"
    r"WorkerProc (?:initialization failed|hit an exception|failed)|check the stack trace above|"
    r"Frontend process failed|[Ee]xecutor failed|died unexpectedly|died with exit code|"
    r"EngineCore encountered a|EngineGenerateError|CancelledError|cancelled|BrokenPipeError|"
    r"ConnectionResetError|KeyboardInterrupt|SystemExit|engine dead|engine is (?:dead|not running)|"
    r"Background loop has errored|ProcessRaisedException|ProcessExitedException"
)
_INNER = re.compile(r"Worker failed with error ['\"](?P<inner>.+?)['\"]?(?:, please check|$)")
_DIED = re.compile(
    r"EngineCore encountered a|EngineDeadError|EngineGenerateError|engine dead|"
    r"Background loop has errored|Dumping (?:scheduler stats|input data)|AsyncEngineDeadError"
)
_BOOT_FAILED = re.compile(
    r"EngineCore failed to start|initialization failed|Frontend process failed during|"
    r"during engine core initialization"
)
_RESTART = re.compile(r"non-default args|vLLM API server version|[█▄▀] +version \d|^\$ \S*vllm")
_TRACEBACK = "Traceback (most recent call last)"
_COMPILING = re.compile(r"^(?:\[\d+/\d+\])? ?:?\S*\b(?:nvcc|c\+\+|g\+\+|cicc|ptxas)\b.* -")
_WAITING = re.compile(r"Waiting for \d+ local, \d+ remote core engine proc")
_SHM_WAIT = re.compile(r"[Nn]o available shared memory broadcast block")
_HTTP_500 = re.compile(r'HTTP/\d(?:\.\d)?" 50\d')
_SHUTDOWN = re.compile(r"shutdown triggered|[Rr]eceived signal|[Tt]rigger received|got SIGTERM")
_TOLD_TO_STOP = (0, -2, -15, 130, 143)

_CONTEXT_400 = re.compile(
    r"maximum context length (?:is|of) ([\d,]+)|"
    r"longer than the maximum model length of ([\d,]+)|"
    r"exceeds? (?:the )?(?:model's )?max(?:imum)?[_ ]model[_ ]len(?:gth)?"
)
_CHAT_TEMPLATE = re.compile(
    r"chat template is no longer allowed|must provide a chat template|ChatTemplateResolutionError|"
    r"jinja2?\.exceptions\.\w+|TemplateSyntaxError|[Cc]hat template .*(?:error|fail|invalid|not)"
    r"(?!.*content format)"
)
_STATS = re.compile(
    r"Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs?,(?: Swapped: \d+ reqs?,)? (?:Waiting|Pending): (\d+) reqs?"
)
_MEAN_LENGTH = re.compile(r"[Mm]ean acceptance length: ([\d.]+)")
_DRAFT_RATE = re.compile(r"[Dd]raft acceptance rate: ([\d.]+)%")
_DRAFTED = re.compile(r"Drafted: ([\d,]+) tokens")
_TRUNCATED = re.compile(r"Truncating max_cudagraph_capture_size to ([\d,]+)")
_CAPPED = re.compile(r"[Cc]apping cudagraph capture sizes from max ([\d,]+) to ([\d,]+)")
_UNSPECULATIVE = re.compile(
    r"[Ss]peculative decoding (?:is|was|will be) (?:disabled|ignored|turned off)|"
    r"[Dd]isabling speculative decoding|without speculative decoding"
)
_WORKER_GONE = re.compile(
    # Without an exit code it is what a worker that refused its settings leaves behind.
    r"(?:Worker proc|[Ee]ngine core proc(?:ess)?) \S+ died unexpectedly(?! \(exit code: None)"
)
_WORKER_KILLED = re.compile(r"died unexpectedly \(exit code: -\d+\)")
_LEAST_DRAFTED = 50


# --- facts ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Facts:
    """What a log tells of the engine, gathered line by line; a new boot begins anew."""

    found: dict[str, Scalar] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        for word, pattern, names in _FACTS:
            if word in line and (match := pattern.search(line)) is not None:
                self._take(names, match)
        if "non-default args" in line or "_config=" in line:
            self._configuration(line)
        if " backend" in line and (match := _BACKEND.search(line)) is not None:
            self._backend(match)

    def _take(self, names: tuple[str, ...], match: re.Match[str]) -> None:
        """Keep the groups of a match by name: sizes are two groups, numbers and words one."""
        groups = list(match.groups())
        for name in names:
            value: Scalar
            if name.endswith("_bytes"):
                number, unit = groups.pop(0), groups.pop(0)
                value = None if number is None else _size(number, unit or "")
            else:
                word = groups.pop(0)
                value = word if word is None or name in _WORDS else _number(word)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer() and name not in _FRACTIONS:
                value = int(value)
            before = self.found.get(name)
            if name in _LEAST_OF and isinstance(before, int | float):
                value = min(before, float(value)) if isinstance(value, int | float) else value
            elif name in _MOST_OF and isinstance(before, int | float):
                value = max(before, float(value)) if isinstance(value, int | float) else value
            elif name in _FIRST_OF and before is not None:
                continue
            if isinstance(value, float) and name.endswith("_bytes"):
                value = round(value)
            self.found[name] = value

    def _configuration(self, line: str) -> None:
        for name, pattern in _ASKED:
            if (match := pattern.search(line)) is not None:
                number = _number(match[1])
                if number is not None:
                    self.asked[name] = number
        if "speculative_config=None" in line:
            self.found["spec_method"] = "none"
        for name, pattern in _RUNNING:
            if (match := pattern.search(line)) is not None:
                word = match[1].strip("'\"")
                if word != "None":
                    self.found[name] = int(word) if word.isdigit() else word

    def _backend(self, match: re.Match[str]) -> None:
        name, kind = match["name"].upper(), match["kind"] or ""
        if "MoE" in kind:
            self.found.setdefault("moe_backend", name)
        elif "attention" in kind.lower() and name not in self.backends:
            self.backends.append(name)

    def pairs(self) -> Pairs:
        """Return the facts, with the window that is in effect."""
        facts = dict(self.found)
        window = next(
            (
                facts[name]
                for name in ("_concurrency_tokens", "autofit_max_model_len", "_sequence_tokens",
                             "_first_window_tokens")
                if name in facts
            ),
            None,
        )  # fmt: skip
        if window is not None:
            facts["effective_context_tokens"] = window
        if self.backends:
            facts["attention_backend"] = self.backends[0]
            if len(self.backends) > 1:
                facts["attention_backends"] = " ".join(self.backends)
        return Pairs({name: value for name, value in facts.items() if not name.startswith("_")})

    def number(self, name: str) -> float | None:
        """Return what was asked for, or what runs, as a number."""
        if name in self.asked:
            return self.asked[name]
        value = self.found.get(name)
        return float(value) if isinstance(value, int | float) else None


_WORDS = ("engine_version", "linear_kernel", "cudagraph_mode", "model_runner")
_FRACTIONS = ("max_concurrency",)
_LEAST_OF = ("kv_cache_bytes", "kv_pool_tokens", "max_concurrency", "num_gpu_blocks")
"""Of several workers, the one with least room decides."""
_MOST_OF = ("weights_bytes", "graph_pool_bytes", "graph_estimate_bytes", "activation_peak_bytes")
_FIRST_OF = ("engine_version", "_first_window_tokens", "linear_kernel")

_FACTS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (word, re.compile(pattern), names)
    for word, pattern, names in (
        ("ersion", r"(?:[█▄▀] +version|API server version:?) v?(\d[\w.+-]*)", ("engine_version",)),
        ("LLM engine (v", r"LLM engine \(v(\d[\w.+-]*)\)", ("engine_version",)),
        ("odel loading took", r"Model loading took " + _AMOUNT, ("weights_bytes",)),
        ("weights took", r"Loading model weights took " + _AMOUNT, ("weights_bytes",)),
        ("Available KV cache", r"Available KV cache memory: " + _AMOUNT, ("kv_cache_bytes",)),
        ("Explicitly set", r"Explicitly set \(([\d.]*\d) ?/ ?[\d.]+\) ([KMGT]?)i?B for KV cache",
         ("kv_cache_bytes",)),
        ("reserved", r"reserved " + _AMOUNT + r" memory for KV Cache", ("kv_cache_bytes",)),
        ("KV cache size:", r"KV cache size: ([\d,]+) tokens", ("kv_pool_tokens",)),
        ("aximum concurrency for",
         r"[Mm]aximum concurrency for ([\d,]+) tokens per request: ([\d.,]+) ?x",
         ("_concurrency_tokens", "max_concurrency")),
        ("graph memory", r"Estimated CUDA ?graph memory: " + _AMOUNT, ("graph_estimate_bytes",)),
        ("graph memory: ", r"\(largest=(\d+)\)", ("largest_captured",)),
        ("graph pool", r"CUDA ?graph pool memory: " + _AMOUNT + r" \(actual\), " + _AMOUNT,
         ("graph_pool_bytes", "graph_estimate_bytes")),
        ("raph capturing finished", r"Graph capturing finished in [\d.]+ secs?, took " + _AMOUNT,
         ("graph_pool_bytes",)),
        ("peak memory increase", r"torch peak memory increase: " + _AMOUNT,
         ("activation_peak_bytes",)),
        ("peak activation", _AMOUNT + r" for peak activation", ("activation_peak_bytes",)),
        ("for CUDAGraph memory", _AMOUNT + r" for CUDAGraph memory", ("graph_pool_bytes",)),
        ("--kv-cache-memory=", r"--kv-cache-memory(?:-bytes)?=(-?\d+)",
         ("suggested_kv_cache_memory",)),
        ("non KV cache memory", r"[Tt]otal non KV cache memory: " + _AMOUNT, ("non_kv_bytes",)),
        ("maximum model length", r"estimated maximum model length is ([\d,]*\d)",
         ("estimated_max_model_len",)),
        ("uto-fit max_model_len", r"Auto-fit max_model_len: reduced from [\d,]+ to ([\d,]+)",
         ("autofit_max_model_len",)),
        ("uto-fit max_model_len", r"full model context length ([\d,]+) fits",
         ("autofit_max_model_len",)),
        ("blocks", r"# (?:GPU|CPU|cuda) blocks: ([\d,]+)", ("num_gpu_blocks",)),
        ("num_gpu_blocks", r"num_gpu_blocks(?:=| is:? )\d+ with num_gpu_blocks_override=(\d+)",
         ("num_gpu_blocks",)),
        ("Using max model len", r"Using max model len ([\d,]+)", ("_first_window_tokens",)),
        ("Selected", r"Selected (\w*Kernel) for", ("linear_kernel",)),
        ("FlashAttention version", r"Using FlashAttention version (\d+)",
         ("flash_attention_version",)),
        ("cudagraph_mode", r"setting cudagraph_mode(?:=| to )(?:CUDAGraphMode\.)?(\w+)",
         ("cudagraph_mode",)),
        ("Model Runner", r"Using (V2) Model Runner", ("model_runner",)),
        ("max_cudagraph_capture_size", r"Truncating max_cudagraph_capture_size to ([\d,]+)",
         ("capture_truncated_to",)),
        ("cudagraph capture sizes",
         r"[Cc]apping cudagraph capture sizes from max [\d,]+ to ([\d,]+)", ("capture_capped_to",)),
        ("init engine", r"init engine \(.*\) took ([\d.]+) s", ("engine_init_s",)),
        ("batched_tokens", r"enabled with max_num_batched_tokens=([\d,]+)",
         ("max_num_batched_tokens",)),
        ("gpu-memory-utilization", r"current --gpu-memory-utilization=([\d.]*\d)",
         ("gpu_memory_utilization",)),
    )
)  # fmt: skip

_BACKEND = re.compile(
    r"Using (?:AttentionBackendEnum\.)?(?P<name>\w+) "
    r"(?P<kind>attention|Attention|(?:\w+ )*MoE)? ?backend\b"
)
_ASKED = tuple(
    (name, re.compile(rf"'{name}': ([\d.]+)"))
    for name in (
        "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
        "num_speculative_tokens",
    )
)  # fmt: skip
_RUNNING = (
    ("_sequence_tokens", re.compile(r"[ (]max_seq_len=(\d+)")),
    ("kv_cache_dtype", re.compile(r"[ (]kv_cache_dtype=([\w'\".]+)")),
    ("quantization", re.compile(r"[ (]quantization=([\w'\"-]+)")),
    ("spec_method", re.compile(r"speculative_config=SpeculativeConfig\(method='(\w+)'")),
    ("spec_tokens", re.compile(r"num_spec(?:ulative)?_tokens=(\d+)")),
    ("cudagraph_mode", re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+)")),
    ("max_capture_size", re.compile(r"'max_cudagraph_capture_size': (\d+)")),
)


# --- reading the log --------------------------------------------------------------------------


@dataclass(slots=True)
class _Cause:
    """The first line that says why, and what stood around it."""

    sign: _Sign
    line: str
    then: Phase
    up: bool
    trace: str
    after: list[str] = field(default_factory=list)
    exception: str = ""

    def text(self) -> str:
        return "\n".join((self.trace, self.line, *self.after))


@dataclass(slots=True)
class _Memory:
    """What the allocator said of one allocation, in bytes."""

    requested: int | None = None
    free: int | None = None
    total: int | None = None

    def read(self, line: str) -> None:
        if self.requested is None and (found := _TRIED.search(line)) is not None:
            self.requested = _size(found[1], found[2])
        if self.total is None and (found := _CAPACITY.search(line)) is not None:
            # Older wording has the same numbers in other groups.
            number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
            self.total = _size(number, unit)
            number, unit = (found[5], found[6]) if found[5] else (found[7], found[8])
            self.free = _size(number, unit)


_TRIED = re.compile(r"[Tt]ried to allocate " + _AMOUNT)
_CAPACITY = re.compile(
    rf"(?:total capacity of {_AMOUNT}|{_AMOUNT} total capacity;).*?"
    rf"(?:of which {_AMOUNT} is free|; {_AMOUNT} free)"
)


@dataclass(slots=True)
class _Reading:
    """A log, read once from top to bottom, keeping what decides."""

    facts: _Facts = field(default_factory=_Facts)
    phase: Phase = Phase.SPAWN
    up: bool = False
    marked: bool = False
    kin: bool = False
    foreign: bool = False
    stopped: bool = False
    boot_failed: str = ""
    died: str = ""
    cause: _Cause | None = None
    survived: _Cause | None = None
    earlier: tuple[_Cause | None, Phase, bool, str] | None = None
    memory: _Memory = field(default_factory=_Memory)
    last: str = ""
    last_error: str = ""
    compiling: str = ""
    waits_at_the_end: bool = False
    shm_waits: int = 0
    idle_waits: int = 0
    stats_line: str = ""
    stats: tuple[float, ...] = ()
    http_500: str = ""
    context_400: str = ""
    chat_template: str = ""
    observed: str = ""
    unspeculative: str = ""
    worker_gone: str = ""
    on_cpu: bool = False
    booted: bool = False
    drafts: list[tuple[float, str]] = field(default_factory=list)
    drafted: int | None = None
    in_trace: bool = False
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=150))
    validation_lines: int = 0
    after_fatal: bool = False

    def feed(self, line: str) -> None:
        """Take one line."""
        if not line.strip():
            return
        level = _level(line)
        if not self.marked:
            self.marked = _MARK.search(line) is not None
            self.kin = self.kin or _KIN.search(line) is not None
            self.foreign = self.foreign or _FOREIGN.search(line) is not None
        quiet = level in ("DEBUG", "INFO", "WARNING")
        if self.up and quiet and not any(word in line for word in _TELLING):
            # A served log may be long, and nearly all of it is this.
            self._moved_on(line)
            return
        if _RESTART.search(line) and (self.cause is not None or self.died or self.stopped):
            self._begin_again()
        self.facts.read(line)
        low = line.lower()
        if any(word in low for word in _STEPS):
            self._milestone(line)
        self._observe(line)
        self._moved_on(line)
        if self.stopped:
            # Told to stop, its processes complain of each other's end.
            return
        if not quiet and "Warning:" not in line and "[W" not in line[:40]:
            self._complaint(line, level, low)
        elif self.cause is not None and len(self.cause.after) < 4:
            self.cause.after.append("")

    def _begin_again(self) -> None:
        if self.cause is not None or self.died:
            self.earlier = (self.cause, self.phase, self.up, self.died)
        self.phase, self.up, self.stopped = Phase.SPAWN, False, False
        self.cause = self.survived = None
        self.died = self.boot_failed = ""
        self.facts = _Facts()
        self.memory = _Memory()
        self.trace.clear()

    def _milestone(self, line: str) -> None:
        opened = next((phase for phase, sign in _MILESTONES if sign.search(line)), None)
        if opened is None or _BOOT.index(opened) <= _BOOT.index(self.phase):
            return
        # In an excerpt the text of a failure may come before the line that places it.
        unplaced = self.phase is Phase.SPAWN
        self.phase = opened
        serves = opened in (Phase.READY, Phase.SERVING)
        if self.cause is not None:
            if unplaced and not serves:
                self.cause.then = opened
            elif not self.boot_failed and not self.cause.up and not self.died:
                self.survived, self.cause = (None if serves else self.cause), None
        if serves:
            self.up = True
            self.booted = self.booted or opened is Phase.READY
            self.survived = None

    def _moved_on(self, line: str) -> None:
        """Keep whether the log ends in waiting: for a process, for a block, for a request."""
        self.last = line
        self.waits_at_the_end = _WAITING.search(line) is not None
        if _SHM_WAIT.search(line):
            self.shm_waits += 1
        elif not self.waits_at_the_end and '"GET ' not in line:
            self.shm_waits = 0

    def _observe(self, line: str) -> None:
        if "Avg prompt" in line and (found := _STATS.search(line)) is not None:
            self.stats = tuple(float(each) for each in found.groups())
            prompt, generated, running, waiting = self.stats
            stuck = prompt == 0 and generated == 0 and running + waiting > 0
            # With sequences running, one such interval may be a long prefill; an excerpt that
            # shows nothing else was cut out because of it.
            sure = running == 0 or not self.booted
            self.idle_waits = self.idle_waits + (2 if sure else 1) if stuck else 0
            self.stats_line = line
        if "cceptance" in line:
            self._drafting(line)
        if not self.http_500 and _HTTP_500.search(line):
            self.http_500 = line
        if not self.context_400 and "model" in line and "User-specified" not in line:
            self.context_400 = line if _CONTEXT_400.search(line) else ""
        if not self.chat_template and "emplate" in line and _CHAT_TEMPLATE.search(line):
            self.chat_template = line
        if (
            not self.observed
            and "capture" in line
            and (_TRUNCATED.search(line) or _CAPPED.search(line))
        ):
            self.observed = line
        if not self.on_cpu and "device_config=cpu" in line:
            self.on_cpu = True
        if not self.unspeculative and "peculative" in line and _UNSPECULATIVE.search(line):
            self.unspeculative = line
        if not self.worker_gone and "died" in line and _WORKER_GONE.search(line):
            self.worker_gone = line
        if not self.stopped and self.up and _SHUTDOWN.search(line):
            self.stopped = True
        if any(word in line for word in _COMPILERS) and _COMPILING.search(_body(line)):
            self.compiling = line

    def _drafting(self, line: str) -> None:
        rate, length = _DRAFT_RATE.search(line), _MEAN_LENGTH.search(line)
        if rate is not None:
            share = (_number(rate[1]) or 0.0) / 100
        elif length is not None:
            share = max(0.0, (_number(length[1]) or 1.0) - 1)
        else:
            return
        if (counted := _DRAFTED.search(line)) is not None:
            self.drafted = (self.drafted or 0) + int(_number(counted[1]) or 0)
        # The best and the last interval tell all that is judged.
        best = max(self.drafts, key=lambda each: each[0], default=(share, line))
        best = max(best, (share, line), key=lambda each: each[0])
        self.drafts = [best, (share, line)]

    def _complaint(self, line: str, level: str, low: str) -> None:
        """Take a line that may say why, at no level or at that of an error."""
        match = _LOGGER.search(line, 0, 200) if level else None
        raw = line[match.end() :] if match is not None else _PROCESS.sub("", line)
        body = raw.strip()
        if self.cause is not None:
            if len(self.cause.after) < 4:
                self.cause.after.append(body[:300])
            if self.cause.sign.name == "memory":
                self.memory.read(line)
        expected = self.in_trace or self.validation_lines > 0
        if not expected and not any(word in low for word in _TROUBLES):
            return
        if _TRACEBACK in line:
            self.in_trace = True
            self.trace.clear()
            return
        if _DIED.search(body):
            self._death(body)
        if _BOOT_FAILED.search(body) and not self.boot_failed:
            self.boot_failed = body
        if self.validation_lines > 0 and raw.startswith(" "):
            self.validation_lines -= 1
            self._try(body.removeprefix("Value error, "), body, raised="ValidationError")
            return
        if self.in_trace and raw.startswith(" "):
            self.trace.append(body[:200])
            return
        found = _EXCEPTION.match(body)
        if found is not None:
            self.in_trace = False
            if "validation error" in body:
                self.validation_lines = 8
        raised = found["type"] if found is not None else ""
        if raised or level in ("ERROR", "CRITICAL"):
            self.last_error = body
        inner = _INNER.search(body)
        self._try(inner["inner"] if inner else body, body, raised=raised or level)
        if found is not None:
            self.trace.clear()

    def _death(self, body: str) -> None:
        during_boot = self.boot_failed or (
            self.phase is not Phase.SPAWN and not self.up and "Dead" in body
        )
        if during_boot or self.died:
            return
        self.died = body
        self.up = True
        if _BOOT.index(self.phase) < _BOOT.index(Phase.SERVING):
            self.phase = Phase.SERVING
        # What a single request complained of before is not why the engine died.
        if self.cause is not None and self.cause.sign.name == "exception":
            self.cause = None

    def _try(self, text: str, body: str, *, raised: str) -> None:
        """Take this as the cause if it is one and none came before it."""
        again = (
            self.cause is not None
            # A KV cache that is too small ends a boot: what follows is another attempt's.
            and self.cause.sign.name is InfeasibleName.OOM_KV_CACHE
            and _MEMORY_SIGN.pattern.search(text) is not None
        )
        open_cause = self.cause is None or again or self.cause.sign.name == "exception"
        if not open_cause or _SURVIVED.search(text):
            return
        sign = next(
            (
                each
                for each in _SIGNS
                if not (each.boot_only and self.up)
                and not (each.raised_only and not raised)
                and each.pattern.search(text)
            ),
            None,
        )
        if sign is not None and sign.name is HostFaultName.DISK_FULL and self._shares_memory():
            sign = _SHM_SIGN
        if self.on_cpu and sign is not None and "DefaultCPUAllocator" in text:
            # The host's memory is the device's own here, so the phase tells what it was for.
            sign = _MEMORY_SIGN
        if sign is None:
            if self.cause is not None or raised in ("", "ERROR", "CRITICAL"):
                return
            if _WRAPPER.search(body) or (raised == "ValidationError" and text.startswith("For ")):
                return
            sign = _EXCEPTION_SIGN
        elif self.cause is not None and not again and not self.after_exception(sign):
            return
        self.cause = _Cause(
            sign=sign,
            line=body[:600],
            then=self.phase,
            up=self.up,
            trace="\n".join(self.trace),
            exception=raised,
        )
        if sign.name == "memory":
            self.memory = _Memory()
            self.memory.read(text)

    def after_exception(self, sign: _Sign) -> bool:
        """Tell whether a sign says more than the nameless exception before it."""
        assert self.cause is not None
        generic = self.cause.sign.name == "exception"
        return generic and sign.name not in (BrokenName.PORT_IN_USE, "fault", "hang")

    def _shares_memory(self) -> bool:
        return any("shared_memory" in each or "shm" in each for each in self.trace)

    def recall(self) -> None:
        """Go back to the failure of an earlier boot in the same log, if this one shows none."""
        if self.cause is None and not self.died and self.earlier is not None:
            self.cause, self.phase, self.up, self.died = self.earlier

    def finding(
        self, explanation: str, cause: str = "", *, phase: Phase | None = None,
        facts: Mapping[str, Scalar] | None = None, try_next: Mapping[str, Scalar] | None = None,
    ) -> Finding:  # fmt: skip
        return Finding(
            phase=phase if phase is not None else self._phase(),
            cause=_body(cause)[:600] if cause else "",
            explanation=explanation,
            facts=Pairs(facts or {}),
            try_next=Pairs(try_next or {}),
        )

    def _phase(self) -> Phase:
        return Phase.SERVING if self.up else self.phase

    def settled(self) -> Finding:
        """Return the finding of a log without trouble."""
        if self.up:
            return Finding(phase=Phase.READY, cause="", explanation="It came up and served.")
        return Finding(
            phase=self.phase, cause="", explanation="As far as the log goes, nothing went wrong."
        )


_COMPILERS = ("nvcc", "c++", "g++", "cicc", "ptxas")
_STEPS = (
    "application startup", "uvicorn running", "throughput", "specdecoding", "http/", "init engine",
    "warming up", "starting", "graph", "model loading", "weights", "profiling", "torch.compile",
    "dynamo", "kv cache", "concurrency", "auto-fit", "overriding", "blocks:", "drafter", "draft",
    "speculator", "loading", "load model", "backend", "initializing", "world_size", "world size",
    "model runner", "non-default", "server version", "resolved arch", "version",
)  # fmt: skip
"""Words, one of which is in every line that opens a phase: finding words is what is fast."""
_TROUBLES = (
    "error", "fail", "exception", "memory", "not", "n't", "unable", "support", "invalid",
    "incompatib", "incomplete", "no ", "cuda", "driver", "bus", "space", "nvcc", "ninja", "ptx",
    "nvrtc", "compil", "gated", "address", "in use", "less", "exceed", "cache", "alloc",
    "architecture", "choice", "must", "should", "require", "conflict", "exclusive", "divisible",
    "resource", "time", "watchdog", "seg", "sig", "nccl", "ecc", "fallen", "dump", "unknown",
    "unexpected", "extra inputs", "than", "missing", "corrupt", "oom", "kill", "restricted",
    "recogniz", "glibc", "multiple of", "capability", "install", "quota", "illegal", "align",
    "assert", "launch", "input", "undefined", "shm", "errno", "offline", "header", "inuse",
    "user-specified", "vocabulary", "encountered", "dead", "died", "traceback", "need", "without",
    "maximum", "result_",
)  # fmt: skip
"""Likewise for every line that may say why an engine failed."""
_TELLING = (
    "throughput", "cceptance", "shared memory", "non-default args", "server version", "emplate",
    "context length", "model length", "max_model_len", '" 50', "hutdown", "hutting", "signal",
    "capture", "core engine proc", "version ", "died unexpectedly", "peculative decoding",
)  # fmt: skip
"""Words of the lines that still matter once it serves."""
_MEMORY_SIGN = next(each for each in _SIGNS if each.name == "memory")
_SHM_SIGN = next(each for each in _SIGNS if each.name is BrokenName.SHM_EXHAUSTED)
_EXCEPTION_SIGN = _sign("exception", r"", "the engine refused to start")


def _read(first: Iterable[str], log: Iterable[str]) -> _Reading:
    reading = _Reading()
    for line in _lines(log):
        reading.feed(line)
    for line in _lines(first):
        reading.feed(line)
    reading.recall()
    return reading


# --- judging ----------------------------------------------------------------------------------

_MEMORY_NAMES: dict[Phase, tuple[InfeasibleName, str]] = {
    Phase.DRAFT: (InfeasibleName.OOM_DRAFT_HEAD, "the draft model"),
    Phase.PROFILING: (InfeasibleName.OOM_ACTIVATION_PROFILING, "the profiling run"),
    Phase.KV: (InfeasibleName.OOM_KV_CACHE, "the KV cache"),
    Phase.CAPTURE: (InfeasibleName.OOM_CUDAGRAPH_CAPTURE, "the CUDA graphs"),
    Phase.WARMUP: (InfeasibleName.OOM_ACTIVATION_PROFILING, "the warm-up"),
    Phase.SERVING: (InfeasibleName.OOM_RUNTIME, "a request"),
}
_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError", "ValidationError")
_PARAMETER = re.compile(r"KeyError: ['\"][\w.]*\.(?:\w*weight\w*|\w*scale\w*|\w*bias|\d+\.\w+)")


def _ending(name: _Name, finding: Finding) -> Failure:
    match name:
        case InfeasibleName():
            return Infeasible(name=name, finding=finding)
        case UnfitName():
            return Unfit(name=name, finding=finding)
        case BrokenName():
            return Broken(name=name, finding=finding)
        case HostFaultName():
            return HostFault(name=name, finding=finding)


def _unknown(reading: _Reading, why: str) -> Broken:
    return Broken(
        name=BrokenName.UNKNOWN, finding=reading.finding(why, reading.last_error or reading.last)
    )


def _named(reading: _Reading, *, lives: bool) -> Failure | None:
    """Return what the log gives a name to: its first cause, a dead engine, or a bad service."""
    cause = reading.cause
    if cause is None and not lives:
        cause = reading.survived
    if (failure := _caused(reading, cause, lives=lives)) is not None:
        return failure
    if lives and (failure := _service(reading)) is not None:
        return failure
    if cause is not None and reading.marked and not cause.up:
        return _refusal(reading, cause)
    return None


def _caused(reading: _Reading, cause: _Cause | None, *, lives: bool) -> Failure | None:
    """Return what a cause with a name means, or an engine that died without one."""
    if cause is not None and cause.sign.name != "exception":
        certain = isinstance(cause.sign.name, HostFaultName)
        if certain or reading.marked or reading.kin:
            return _by_sign(reading, cause, lives=lives)
    if reading.died:
        said = cause.line if cause is not None else reading.worker_gone or reading.died
        if _WORKER_KILLED.search(reading.worker_gone):
            said = reading.worker_gone
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=reading.finding(
                "the engine behind the server died while it was serving", said,
                phase=Phase.SERVING,
            ),
        )  # fmt: skip
    return None


def _by_sign(reading: _Reading, cause: _Cause, *, lives: bool) -> Failure:
    sign = cause.sign
    if cause.up:
        phase = Phase.SERVING
    elif sign.phase is not None:
        phase = sign.phase
    else:
        phase = _place(cause.text()) or cause.then
    match sign.name:
        case "memory":
            return _memory(reading, cause, phase, lives=lives)
        case "fault":
            # An excerpt that shows nothing of a boot was most likely cut from a running server.
            unseen = phase is Phase.SPAWN and not reading.boot_failed
            served = cause.up or unseen or phase is Phase.SERVING
            name = BrokenName.ENGINE_DIED_MID_BENCHMARK if served else BrokenName.ENGINE_CRASH
            phase = Phase.SERVING if served else phase
            return _ending(name, reading.finding(sign.why, cause.line, phase=phase))
        case "hang":
            unseen = phase is Phase.SPAWN and not reading.boot_failed
            served = cause.up or unseen or phase is Phase.SERVING
            name = BrokenName.HANG_RUNTIME if served else BrokenName.HANG_BOOT
            phase = Phase.SERVING if served else phase
            return _ending(name, reading.finding(sign.why, cause.line, phase=phase))
        case "exception":
            return _refusal(reading, cause)
        case _:
            if isinstance(sign.name, InfeasibleName) and phase is Phase.SPAWN:
                phase = Phase.CONFIG
            facts, try_next = _numbers(reading, cause)
            return _ending(
                sign.name,
                reading.finding(
                    sign.why + _said(facts), cause.line, phase=phase, facts=facts,
                    try_next=try_next,
                ),
            )  # fmt: skip


def _refusal(reading: _Reading, cause: _Cause) -> Failure:
    """Return what an exception of a boot means that no sign names."""
    phase = _place(cause.text()) or cause.then
    deliberate = cause.exception in _REFUSALS or _PARAMETER.search(cause.line) is not None
    if deliberate:
        return Infeasible(
            name=InfeasibleName.UNSUPPORTED_COMBINATION,
            finding=reading.finding(
                "the engine refuses this combination of settings", cause.line, phase=phase
            ),
        )
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=reading.finding("the engine failed before it was ready", cause.line, phase=phase),
    )


def _memory(reading: _Reading, cause: _Cause, phase: Phase, *, lives: bool) -> Failure:
    if phase in (Phase.READY, Phase.SERVING):
        phase = Phase.SERVING
    elif re.search(r"_dummy_sampler_run|warming up sampler", cause.text()):
        # The sampler's sorting is a peak of activations, wherever it is tried.
        phase = phase if phase is Phase.PROFILING else Phase.WARMUP
    elif phase is Phase.SPAWN and "Failed to load model" not in cause.line:
        # Nothing of a boot is in sight: what still lives was serving, and graphs come late.
        if lives:
            phase = Phase.SERVING
        elif "allocated in private pools" in cause.text():
            phase = Phase.CAPTURE
    name, what = _MEMORY_NAMES.get(phase, (InfeasibleName.OOM_WEIGHTS, "the weights"))
    if name is InfeasibleName.OOM_WEIGHTS:
        phase = Phase.WEIGHTS
    asked = reading.memory
    sizes = {
        "requested_bytes": asked.requested,
        "free_bytes": asked.free,
        "total_bytes": asked.total,
    }
    facts: dict[str, Scalar] = {key: size for key, size in sizes.items() if size is not None}
    said = ""
    try_next: dict[str, Scalar] = {}
    if asked.requested is not None:
        said = f": {asked.requested / GIB:.2f} GiB were asked for"
        if asked.free is not None:
            missing = asked.requested - asked.free
            said += f" where {asked.free / GIB:.2f} GiB were free"
            if missing > 0:
                facts["shortfall_bytes"] = missing
            share = reading.facts.number("gpu_memory_utilization")
            # Once the KV pool is there, a smaller share of the card leaves more beside it.
            pooled = phase in (Phase.CAPTURE, Phase.WARMUP, Phase.SERVING)
            if pooled and share is not None and asked.total and missing > 0:
                lower = math.floor(100 * (share - missing / asked.total - 0.005)) / 100
                if lower > 0:
                    try_next["gpu_memory_utilization"] = lower
    return Infeasible(
        name=name,
        finding=reading.finding(
            f"memory ran out for {what}{said}", cause.line, phase=phase, facts=facts,
            try_next=try_next,
        ),
    )  # fmt: skip


def _said(facts: Mapping[str, Scalar]) -> str:
    """Return the numbers that explain a refusal, in words."""
    needed, there = facts.get("kv_needed_bytes"), facts.get("kv_available_bytes")
    if isinstance(needed, int) and isinstance(there, int):
        return f": {needed / GIB:.2f} GiB are needed and {there / GIB:.2f} GiB are there"
    free, wanted = facts.get("free_bytes"), facts.get("desired_bytes", facts.get("requested_bytes"))
    if isinstance(free, int) and isinstance(wanted, int):
        return f": {free / GIB:.2f} GiB were free and {wanted / GIB:.2f} GiB were wanted"
    return ""


# Each takes the text of a cause and what the log told before it; numbers in bytes and tokens.

_FREE_ON_START = re.compile(
    rf"\({_AMOUNT}? ?/ ?{_AMOUNT}\).*?utilization \(([\d.]*\d), {_AMOUNT}\)"
)
_FREE_ON_NODE = re.compile(
    rf"memory on node \d+ \({_AMOUNT}? ?/ ?{_AMOUNT}\).*?requested memory for kv \({_AMOUNT}\)"
)
_PROFILE_FREE = re.compile(rf"[Ii]nitial free memory {_AMOUNT}.*?current free memory {_AMOUNT}")
_NEEDED = re.compile(rf"\(?{_AMOUNT} KV cache is needed.*?KV cache memory \({_AMOUNT}\)")
_WINDOW_ASKED = re.compile(r"max seq(?:uence)? len(?:gth)? \(([\d,]+)\)")
_ESTIMATE = re.compile(
    r"estimated maximum model length is ([\d,]*\d)|can be stored in (?:the )?KV cache \(([\d,]+)\)"
)
_SEQUENCES = re.compile(r"max_num_seqs \(?=?([\d,]+)\)?.*?\(([\d,]+)\)")
_AT_MOST = re.compile(r"max_num_seqs to at most ([\d,]+)")
_SCHEDULED = re.compile(r"max_num_scheduled_tokens is set to (-?\d+)")
_SLOTS = re.compile(r"max_num_batched_tokens=(\d+).*?num_lookahead_tokens=(\d+)")
_DIVISIBLE = re.compile(r"num_speculative_tokens:? ?=?(\d+) must be divisible by n_predict=(\d+)")
_DERIVED = re.compile(r"max_model_len \((\d+)\).*?\(\w+=([\d.]+)")
_MULTIPLE = re.compile(r"multiple of (\d+) .*? and (\d+) \(tensor_parallel")
_PORT = re.compile(r"(?:[:,] ?|port )(\d{2,5})\b(?!\d|\.\d)")
_STATUS = re.compile(r"\b(40[134]) Client Error")
_PROGRESS = re.compile(r"Capturing CUDA ?graphs?.*?(\d+)/(\d+)")


def _numbers(reading: _Reading, cause: _Cause) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return the numbers that a refusal states, and the settings that they make worth a try."""
    text = "\n".join((cause.line, *cause.after))
    facts: dict[str, Scalar] = {}
    following: dict[str, Scalar] = {}

    def whole(word: str) -> int:
        return int(_number(word) or 0)

    if (found := _FREE_ON_START.search(text)) is not None:
        unit = found[2] or found[4]
        free, total = _size(found[1], unit), _size(found[3], found[4])
        facts.update(
            free_bytes=free, total_bytes=total, gpu_memory_utilization=_number(found[5]),
            desired_bytes=_size(found[6], found[7]),
        )  # fmt: skip
        if free is not None and total:
            following["gpu_memory_utilization"] = math.floor(100 * free / total) / 100
            wanted = facts["desired_bytes"]
            if isinstance(wanted, int) and wanted > free:
                facts["shortfall_bytes"] = wanted - free
    if (found := _FREE_ON_NODE.search(text)) is not None:
        free, requested = _size(found[1], found[2] or found[4]), _size(found[5], found[6])
        facts.update(
            requested_bytes=requested, free_bytes=free, total_bytes=_size(found[3], found[4])
        )
        if free is not None and requested is not None and requested > free:
            facts["shortfall_bytes"] = requested - free
    if cause.sign.name is InfeasibleName.HOST_RAM_OOM and (found := _TRIED.search(text)):
        facts["requested_bytes"] = _size(found[1], found[2])
    if (found := _PROFILE_FREE.search(text)) is not None:
        facts["initial_free_bytes"] = _size(found[1], found[2])
        facts["current_free_bytes"] = _size(found[3], found[4])
    if cause.sign.name is InfeasibleName.OOM_KV_CACHE:
        if (found := _WINDOW_ASKED.search(text)) is not None:
            facts["requested_max_model_len"] = whole(found[1])
        if (found := _NEEDED.search(text)) is not None:
            needed, there = _size(found[1], found[2]), _size(found[3], found[4])
            facts.update(kv_needed_bytes=needed, kv_available_bytes=there)
            if needed is not None and there is not None:
                facts["shortfall_bytes"] = needed - there
        elif "kv_cache_bytes" in reading.facts.found:
            facts["kv_available_bytes"] = reading.facts.found["kv_cache_bytes"]
        if (found := _ESTIMATE.search(text)) is not None:
            estimate = whole(found[1] or found[2])
            facts["estimated_max_model_len"] = estimate
            if estimate > 0:
                following["max_model_len"] = estimate
    if cause.sign.name is InfeasibleName.CAPACITY_MAX_NUM_SEQS:
        if (found := _SEQUENCES.search(text)) is not None:
            facts.update(max_num_seqs=whole(found[1]), mamba_blocks=whole(found[2]))
            following["max_num_seqs"] = whole(found[2])
        if (found := _AT_MOST.search(text)) is not None:
            facts["suggested_max_num_seqs"] = following["max_num_seqs"] = whole(found[1])
        if not following.get("max_num_seqs"):
            following.pop("max_num_seqs", None)
    if (found := _SCHEDULED.search(text)) is not None:
        lacking = 1 - int(found[1])
        facts.update(max_num_scheduled_tokens=int(found[1]), missing_batched_tokens=lacking)
        tokens = reading.facts.number("max_num_batched_tokens")
        if tokens is not None:
            following["max_num_batched_tokens"] = int(tokens) + lacking
    if (found := _SLOTS.search(text)) is not None:
        facts.update(max_num_batched_tokens=int(found[1]), num_lookahead_tokens=int(found[2]))
        following["max_num_batched_tokens"] = max(int(found[1]), int(found[2])) + 1
    if (found := _DIVISIBLE.search(text)) is not None:
        drafts, layers = int(found[1]), int(found[2])
        facts.update(num_speculative_tokens=drafts, n_predict=layers)
        if layers > 0:
            following["n_max"] = max(drafts // layers, 1) * layers
    if "derived max_model_len" in text and (found := _DERIVED.search(text)) is not None:
        facts.update(requested_max_model_len=int(found[1]), derived_max_model_len=whole(found[2]))
        following["max_model_len"] = whole(found[2])
    if (found := _MULTIPLE.search(text)) is not None:
        facts.update(spec_plus_one=int(found[1]), tensor_parallel_size=int(found[2]))
    if cause.sign.name is BrokenName.PORT_IN_USE and (found := _PORT.search(text)) is not None:
        facts["port"] = int(found[1])
    if (found := _STATUS.search(text)) is not None:
        facts["http"] = int(found[1])
    if (found := _PROGRESS.search(cause.line)) is not None:
        facts.update(captured=int(found[1]), to_capture=int(found[2]))
    return {key: value for key, value in facts.items() if value is not None}, following


# --- a service that lives ---------------------------------------------------------------------

_LIMIT = re.compile(r"(?:maximum context length (?:is|of)|maximum model length of) ([\d,]+)")
_PROMPT = re.compile(
    r"(?<!upper bound for )\b(\d[\d,]*) (?:input|prompt) tokens|"
    r"\(?([\d,]+) in the (?:messages|prompt)|"
    r"prompt \(length ([\d,]+)\)"
)
_ANSWER = re.compile(
    r"too large: ([\d,]+)|requested ([\d,]+) output tokens|([\d,]+) in the completion"
)
_CHARACTERS = re.compile(r"contains ([\d,]+) characters")


def _service(reading: _Reading) -> Failure | None:
    """Return what is wrong with an engine that lives and has not failed."""
    if reading.chat_template:
        return Broken(
            name=BrokenName.CHAT_TEMPLATE_FAILURE,
            finding=reading.finding(
                "it serves, but the model's chat template cannot be used", reading.chat_template,
                phase=Phase.SERVING,
            ),
        )  # fmt: skip
    if reading.context_400:
        return _too_long(reading)
    if reading.drafts:
        (best, _), (final, line) = reading.drafts
        if best >= 0.2 and final <= min(0.05, best / 5):
            return Unfit(
                name=UnfitName.GARBAGE_OUTPUT,
                finding=reading.finding(
                    f"drafts were accepted at {best:.0%} and then at {final:.0%}: what it writes "
                    "has most likely broken down",
                    line, phase=Phase.SERVING,
                    facts={"best_acceptance": best, "last_acceptance": final},
                ),
            )  # fmt: skip
        enough = reading.drafted is None or reading.drafted >= _LEAST_DRAFTED
        if best <= 0.03 and enough:
            return Unfit(
                name=UnfitName.DRAFT_INEFFECTIVE,
                finding=reading.finding(
                    f"tokens are drafted, and {best:.1%} of them are accepted",
                    line, phase=Phase.SERVING, facts={"acceptance": best},
                ),
            )  # fmt: skip
    if reading.idle_waits and (never := _never_scheduled(reading)) is not None:
        return never
    stuck = reading.shm_waits >= (2 if reading.up or reading.phase is Phase.SPAWN else 5)
    if reading.idle_waits >= 2 or stuck:
        boot = stuck and not reading.up and reading.phase is not Phase.SPAWN
        _, generated, running, waiting = reading.stats or (0.0, 0.0, 0.0, 0.0)
        return Broken(
            name=BrokenName.HANG_BOOT if boot else BrokenName.HANG_RUNTIME,
            finding=reading.finding(
                "its processes wait for each other"
                if stuck
                else f"{waiting + running:.0f} requests are open and no token moves",
                reading.last if stuck else reading.stats_line,
                phase=None if boot else Phase.SERVING,
                facts={} if stuck else {
                    "running": int(running), "waiting": int(waiting), "gen_tok_s": generated,
                },
            ),
        )  # fmt: skip
    if reading.http_500:
        return Broken(
            name=BrokenName.HTTP_500,
            finding=reading.finding(
                "the server answered a request with an error",
                reading.last_error or reading.http_500, phase=Phase.SERVING,
            ),
        )  # fmt: skip
    return _reduced(reading)


_FILLED = 0.98
"""A window above this share of the KV pool may never be filled; one of this share may."""
_BLOCK_TOKENS = 16


def _silent(reading: _Reading, detail: str) -> Failure:
    """Return what it means that an engine lives, and sent nothing for as long as it may."""
    if (failure := _caused(reading, reading.cause, lives=True)) is not None:
        return failure
    if (never := _never_scheduled(reading, silent=True)) is not None:
        return never
    return Broken(
        name=BrokenName.HANG_RUNTIME,
        finding=reading.finding(
            "it lives, and sent nothing for as long as it may be silent",
            reading.stats_line or detail, phase=Phase.SERVING,
        ),
    )  # fmt: skip


def _never_scheduled(reading: _Reading, *, silent: bool = False) -> Unfit | None:
    """Return that a request waits for ever for a KV pool that it would fill to the last block.

    The log has to show that the window is as large as the pool, or not to show otherwise where
    the engine was seen to be silent.
    """
    *_, running, waiting = reading.stats or (0.0, 0.0)
    if running > 0 or waiting < 1:
        return None
    pool = reading.facts.number("kv_pool_tokens")
    window = _fact(reading.facts.pairs(), "effective_context_tokens")
    known = pool is not None and window is not None
    if not (known or silent):
        return None
    facts: dict[str, Scalar] = {"waiting": int(waiting)}
    following: dict[str, Scalar] = {}
    why = "most likely the window is as large as the KV pool"
    if pool is not None:
        facts["kv_pool_tokens"] = int(pool)
        smaller = int(pool * _FILLED) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if window is not None and window <= smaller:
            return None
        if smaller > 0:
            following["max_model_len"] = smaller
        if window is not None:
            why = f"the window ({window:.0f} tokens) and the KV pool ({pool:.0f}) are equally large"
    return Unfit(
        name=UnfitName.DEGRADED_CAPACITY,
        finding=reading.finding(
            f"the scheduler never runs the request: {why}, and a request that fills the window "
            "cannot be scheduled",
            reading.stats_line, phase=Phase.SERVING, facts=facts, try_next=following,
        ),
    )  # fmt: skip


def _too_long(reading: _Reading) -> Unfit:
    text = reading.context_400
    facts: dict[str, Scalar] = {}
    for key, pattern in (
        ("max_context_tokens", _LIMIT), ("input_tokens", _PROMPT), ("max_tokens", _ANSWER),
        ("input_characters", _CHARACTERS),
    ):  # fmt: skip
        if (found := pattern.search(text)) is not None:
            word = next(each for each in found.groups() if each is not None)
            facts[key] = int(_number(word) or 0)
    window, prompt = facts.get("max_context_tokens"), facts.get("input_tokens")
    if isinstance(window, int) and isinstance(prompt, int):
        facts["feasible_max_tokens"] = max(window - prompt, 0)
    return Unfit(
        name=UnfitName.HTTP_400_CONTEXT,
        finding=reading.finding(
            "a request was longer than the window that is served", text, phase=Phase.SERVING,
            facts=facts,
        ),
    )  # fmt: skip


def _reduced(reading: _Reading) -> Unfit | None:
    """Return in what the engine says to run less than it was asked for."""
    if reading.unspeculative:
        return Unfit(
            name=UnfitName.SILENT_FALLBACK,
            finding=reading.finding(
                "it serves without the speculation that was asked for", reading.unspeculative,
                phase=Phase.READY,
            ),
        )  # fmt: skip
    sequences = reading.facts.found.get("max_concurrency")
    if isinstance(sequences, int | float) and 0 < sequences < 1:
        return Unfit(
            name=UnfitName.DEGRADED_CAPACITY,
            finding=reading.finding(
                f"the KV cache holds {sequences:.2f} sequences of the full window", "",
                phase=Phase.READY, facts={"max_concurrency": sequences},
            ),
        )  # fmt: skip
    said = reading.observed
    if not said:
        return None
    found = _CAPPED.search(said) or _TRUNCATED.search(said)
    assert found is not None
    effective = int(_number(found[found.re.groups]) or 0)
    batch = reading.facts.number("max_num_seqs")
    drafts = reading.facts.number("num_speculative_tokens") or 0
    if batch is not None and effective >= batch * (1 + drafts):
        return None
    facts: dict[str, Scalar] = {"effective_capture": effective}
    if found.re is _CAPPED:
        facts["requested_capture"] = int(_number(found[1]) or 0)
    return Unfit(
        name=UnfitName.SILENT_FALLBACK
        if found.re is _CAPPED
        else UnfitName.DEGRADED_THROUGHPUT,
        finding=reading.finding(
            f"CUDA graphs are captured for batches up to {effective} only: larger ones run "
            "without",
            said, phase=Phase.READY, facts=facts,
        ),
    )  # fmt: skip


def _unexplained(reading: _Reading, code: int | None) -> Failure:
    """Return what an end means of which the log says nothing."""
    how = _exit_in_words(code)
    said = reading.last_error or reading.last
    if code in (-7, 135):
        return Broken(
            name=BrokenName.SHM_EXHAUSTED,
            finding=reading.finding(f"the server {how}: shared memory was used up", said),
        )
    # The executor watches over its workers once it is ready.
    gone = reading.worker_gone and reading.phase is Phase.SPAWN and not reading.boot_failed
    if reading.up or gone:
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=reading.finding(
                f"the server {how} while it was serving",
                reading.worker_gone or said,
                phase=Phase.SERVING,
            ),
        )
    if reading.compiling and reading.last == reading.compiling:
        return HostFault(
            name=HostFaultName.TOOLCHAIN_JIT_FAILURE,
            finding=reading.finding(
                f"the server {how} while it compiled a kernel", reading.compiling
            ),
        )
    killed = code is not None and (code < 0 or code in (134, 137, 139))
    if not killed and (reading.boot_failed or reading.phase is Phase.SPAWN):
        return _unknown(
            reading, f"the server {how} before it was ready, and the log does not hold the cause"
        )
    memory = ": the host may have run out of memory" if code in (-9, 137) else ""
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=reading.finding(f"the server {how} before it was ready{memory}", said),
    )


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


# --- what runs against what was asked ---------------------------------------------------------

_Differs: TypeAlias = tuple[UnfitName, str, dict[str, Scalar]]


def _fact(facts: Pairs, name: str) -> float | None:
    value = facts.get(name)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and value is not None else None


def _context_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    asked, runs = settings.max_model_len, _fact(facts, "effective_context_tokens")
    if isinstance(asked, int) and runs is not None and runs < asked:
        return (
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            f"a window of {asked} tokens was asked for, and {runs:.0f} are served",
            {"effective_context_tokens": int(runs), "requested_context_tokens": asked},
        )
    pool = _fact(facts, "kv_pool_tokens")
    concurrency = _fact(facts, "max_concurrency")
    if concurrency is not None and concurrency < 1:
        return (
            UnfitName.DEGRADED_CAPACITY,
            f"the KV cache holds {concurrency:.2f} sequences of the full window",
            {"max_concurrency": concurrency, "kv_pool_tokens": None if pool is None else int(pool)},
        )
    return None


def _kv_dtype_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    def same(kind: str) -> str:
        return {"fp8": "fp8_e4m3", "half": "float16"}.get(kind.lower(), kind.lower())

    asked, runs = settings.kv_cache_dtype, facts.get("kv_cache_dtype")
    if asked is None or asked.lower() == "auto" or not isinstance(runs, str):
        return None
    if same(asked) == same(runs):
        return None
    return (
        UnfitName.SILENT_FALLBACK,
        f"a KV cache of {asked} was asked for, and {runs} is in effect",
        {"kv_cache_dtype": runs},
    )


def _speculation_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    runs = facts.get("spec_method")
    if not settings.speculates or runs is None:
        return None
    if runs == "none":
        return (
            UnfitName.SILENT_FALLBACK,
            f"speculation by {settings.spec_method} was asked for, and none is in effect",
            {"spec_method": runs},
        )
    drafts = _fact(facts, "spec_tokens")
    if settings.n_max is not None and drafts is not None and drafts != settings.n_max:
        return (
            UnfitName.SILENT_FALLBACK,
            f"drafts of {settings.n_max} tokens were asked for, and {drafts:.0f} are made",
            {"spec_tokens": int(drafts)},
        )
    return None


def _backend_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    def plain(name: str) -> str:
        return name.upper().replace("-", "_").removesuffix("_VLLM_V1")

    asked = settings.attention_backend
    runs = str(facts.get("attention_backends") or facts.get("attention_backend") or "")
    if asked is None or asked.lower() == "auto" or not runs:
        return None
    if plain(asked) in [plain(each) for each in runs.split()]:
        return None
    return (
        UnfitName.SILENT_FALLBACK,
        f"attention by {asked} was asked for, and {runs} is in effect",
        {"attention_backend": runs},
    )


def _graphs_of(settings: VllmSettings, facts: Pairs) -> _Differs | None:
    if settings.largest_capture == 0:
        return None
    mode = facts.get("cudagraph_mode")
    if settings.cudagraph_mode is not None and mode not in (None, settings.cudagraph_mode):
        return (
            UnfitName.SILENT_FALLBACK,
            f"graphs of {settings.cudagraph_mode} were asked for, and {mode} is in effect",
            {"cudagraph_mode": mode},
        )
    capped = _fact(facts, "capture_capped_to")
    cut = _fact(facts, "capture_truncated_to")
    effective = min((each for each in (capped, cut) if each is not None), default=None)
    if effective is None:
        return None
    wanted = settings.largest_capture
    if settings.max_num_seqs is not None:
        # A graph larger than the largest batch is never used.
        drafts = (settings.n_max or 0) if settings.speculates else 0
        batch = settings.max_num_seqs * (1 + drafts)
        wanted = batch if wanted is None else min(wanted, batch)
    if wanted is None or effective >= wanted:
        return None
    return (
        UnfitName.DEGRADED_THROUGHPUT if effective == cut else UnfitName.SILENT_FALLBACK,
        f"graphs for batches up to {wanted} were asked for, and {effective:.0f} is the largest",
        {"effective_capture": int(effective), "requested_capture": wanted},
    )
