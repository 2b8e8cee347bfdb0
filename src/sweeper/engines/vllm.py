"""vLLM's OpenAI-compatible server: its flags, its memory, and how it is spoken to.

Flags as in vLLM 0.24 to 0.33. What the server prints is read in `sweeper.engines.vllm_log` and
judged in `sweeper.engines.vllm_endings`, which are loaded when there is a log: a plan reads none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from sweeper.core.evidence import Role
from sweeper.core.launch import Death, Launch, Phase
from sweeper.core.memory import Estimate, Footprint
from sweeper.core.outcome import (
    Diagnosis,
    Failure,
    Finding,
    HostFault,
    HostFaultName,
    Unfit,
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
                    return no_engine(f"engine.{key} is {wanted}, and no such program exists")
                return (
                    replace(options, binary=found)
                    if key == "binary"
                    else replace(options, python=found)
                )
        if importlib.util.find_spec("vllm") is not None:
            return replace(options, python=sys.executable)
        found = shutil.which("vllm")
        if found is None:
            return no_engine("vLLM is not installed here and there is no vllm on PATH")
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
        # Late, as below: it compiles many regular expressions, and a plan reads no logs.
        from sweeper.engines.vllm_log import milestone

        return milestone(line)

    def told(self, line: str) -> tuple[int, int] | None:
        """Return how many shards are loaded or graphs captured, by the bar that shows it."""
        from sweeper.engines.vllm_log import told

        return told(line)

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return sizes, the window, the version and what really runs, of the last boot."""
        from sweeper.engines.vllm_log import evidence

        return evidence(log)

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of a vLLM server means: the phase decides, the text refines."""
        from sweeper.engines.vllm_endings import verdict

        return verdict(death, log)

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        from sweeper.engines.vllm_endings import diagnosis

        return diagnosis(log, exit_code)

    def contradiction(
        self, settings: VllmSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:  # fmt: skip
        """Return in what way that matters the running engine is not what was asked for."""
        del props
        from sweeper.engines.vllm_endings import contradiction

        return contradiction(settings, facts)

    def clocks(self, metrics: str) -> Pairs:
        """Return the engine's own times of its requests, summed over engines."""
        # Late: the library brings an HTTP server, and a plan reads no metrics.
        from prometheus_client.parser import text_string_to_metric_families

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


def no_engine(why: str) -> HostFault:
    """Return that there is no engine where the study points, and what to set."""
    return HostFault(
        name=HostFaultName.ENGINE_NOT_FOUND,
        finding=Finding(
            phase=Phase.SPAWN,
            cause=why,
            explanation=f"{why}; set engine.python to the interpreter of an environment that has "
            "vLLM, or engine.binary to a vllm command",
        ),
    )
