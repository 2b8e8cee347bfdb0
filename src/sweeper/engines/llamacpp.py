"""llama.cpp's server: its flags, its memory, and what its endings mean.

Serves with the `llama-server` binary or a fork's, or with the same server inside the `xllamacpp`
wheel through `sweeper.engines.llamacpp_wheel`, which takes the same flags. What it prints is read
in `sweeper.engines.llamacpp_log` and judged in `sweeper.engines.llamacpp_endings`, which are loaded
when there is a log: a plan reads none.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sweeper.core.architecture import value_bits
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
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.sample import DraftCounters
from sweeper.core.typed import FieldError, build
from sweeper.engines import (
    CommandParts,
    Container,
    EngineOptions,
    ModelFacts,
    Wire,
    llamacpp_memory,
    no_draft_layers,
)
from sweeper.engines.metrics import draft_counters

KV_BITS: dict[str, float] = {
    "f32": 32, "f16": 16, "bf16": 16,
    "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
"""Bits a cached value takes, block scales included. Forks have more types; see `footprint`."""

DEFAULT_UBATCH = 512
_OWN_FLAGS = ("--host", "--port", "--model", "-m", "--alias", "-a", "--ctx-size", "-c")

_NEWEST = 10**9
_SPELLINGS: Mapping[str, tuple[tuple[int, str], ...]] = {
    # What to say, from which upstream build on, newest first; "" where a build has no such flag.
    # Where a month is all that is known the build is that month's, so near it, state a version
    # on the safe side of the change.
    "flash_attn": ((6325, "--flash-attn"), (0, "-fa")),
    "fit": ((7410, "--fit"), (0, "")),
    "fit_target": ((7410, "--fit-target"), (0, "")),
    "cache_ram": ((6730, "--cache-ram"), (0, "")),
    "verbosity": ((7400, "--verbosity"), (0, "")),
    "ui": ((8900, "--no-ui"), (4900, "--no-webui"), (0, "")),
    "repack": ((5600, "--no-repack"), (0, "")),
    "kv_unified": ((6600, "--kv-unified"), (0, "")),
    "kv_split": ((7400, "--no-kv-unified"), (0, "")),
    "load_mode": ((11000, "--load-mode"), (0, "")),
    "layer_words": ((7700, "auto all"), (0, "")),
    "spec_type": ((7850, "--spec-type"), (0, "")),
    "draft_model": ((8970, "--spec-draft-model"), (0, "--model-draft")),
    "draft_length": ((8970, "--spec-draft-n-max"), (0, "--draft-max")),
    "draft_least": ((8970, "--spec-draft-n-min"), (0, "--draft-min")),
    "draft_p_min": ((8970, "--spec-draft-p-min"), (0, "--draft-p-min")),
    "draft_type_k": ((8970, "--spec-draft-type-k"), (0, "--cache-type-k-draft")),
    "draft_type_v": ((8970, "--spec-draft-type-v"), (0, "--cache-type-v-draft")),
    "draft_layers": ((8970, "--spec-draft-ngl"), (0, "--gpu-layers-draft")),
    "draft_sampling": ((9000, "--spec-draft-backend-sampling"), (0, "")),
    "ngram-simple length": ((8970, "--spec-ngram-simple-size-m"), (0, "--spec-ngram-size-m")),
    "ngram-map-k length": ((8970, "--spec-ngram-map-k-size-m"), (0, "--spec-ngram-size-m")),
    "ngram-map-k4v length": ((8970, "--spec-ngram-map-k4v-size-m"), (0, "--spec-ngram-size-m")),
    "ngram-mod length": ((8970, "--spec-ngram-mod-n-max"), (0, "--draft-max")),
    "ngram-simple lookup": ((8970, "--spec-ngram-simple-size-n"), (0, "--spec-ngram-size-n")),
    "ngram-map-k lookup": ((8970, "--spec-ngram-map-k-size-n"), (0, "--spec-ngram-size-n")),
    "ngram-map-k4v lookup": ((8970, "--spec-ngram-map-k4v-size-n"), (0, "--spec-ngram-size-n")),
    "ngram-mod lookup": ((8970, "--spec-ngram-mod-n-match"), (0, "--spec-ngram-size-n")),
    "ngram-mod least": ((8970, "--spec-ngram-mod-n-min"), (0, "--draft-min")),
}
_ALL_LAYERS = "999"


def _spelling(what: str, version: int | None) -> str:
    """Return the flag of a build, "" where it has none."""
    build_number = _NEWEST if version is None else version
    return next(flag for since, flag in _SPELLINGS[what] if build_number >= since)


Layers = int | Literal["auto", "all"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppSettings:
    """What a study may set or sweep; None leaves the engine's own default.

    `n_max` is the draft length, whatever kind of speculation `spec_type` names, and 0 switches
    speculation off; `spec_type` may list several kinds, with commas. `ngram_size` is the number of
    tokens looked up by the n-gram kinds. Cache types and kinds of speculation are free text, since
    forks have their own. `version` is the upstream build number that the server's flags are those
    of (6060 for b6060); None means the newest. `chat_template_kwargs` is JSON text or a mapping, as
    are the two that make a fork known: `cache_type_bits` says how many bits a value takes in a
    fork's own cache type, `flag_names` what a fork calls a flag, null for one that it lacks.
    `draft_gpu_layers` and the draft cache types are those of the draft or MTP context.
    """

    context: int = 4096
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: Literal["on", "off", "auto"] = "auto"
    batch: int | None = None
    ubatch: int | None = None
    parallel: int = 1
    kv_unified: bool | None = None
    gpu_layers: Layers = None
    n_cpu_moe: int | None = None
    override_tensor: str | None = None
    kv_offload: bool = True
    threads: int | None = None
    threads_batch: int | None = None
    threads_http: int | None = None
    spec_type: str = "none"
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    ngram_size: int | None = None
    draft_cache_type_k: str | None = None
    draft_cache_type_v: str | None = None
    draft_gpu_layers: Layers = None
    draft_backend_sampling: bool | None = None
    mmap: bool = True
    load_mode: str | None = None
    repack: bool = True
    swa_full: bool = False
    fit: Literal["on", "off"] = "off"
    fit_target_mib: int | None = None
    cache_ram_mib: int = 0
    jinja: bool | None = None
    chat_template_kwargs: str | Mapping[str, Scalar] | None = None
    version: int | None = None
    cache_type_bits: str | Mapping[str, Scalar] | None = None
    flag_names: str | Mapping[str, Scalar] | None = None

    def __post_init__(self) -> None:
        for name in (
            "context", "batch", "ubatch", "parallel", "threads", "threads_batch", "threads_http",
            "ngram_size", "version",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FieldError(name, f"must be at least 1, got {value}")
        for name in (
            "n_max", "n_min", "gpu_layers", "draft_gpu_layers", "n_cpu_moe", "cache_ram_mib",
            "fit_target_mib",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, int) and value < 0:
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
        if not self.mmap and self.load_mode is not None:
            raise FieldError("load_mode", "says how weights are read, and mmap: false does too")
        for name in ("chat_template_kwargs", "cache_type_bits", "flag_names"):
            value = getattr(self, name)
            if value is not None:
                # As text from here on: a mapping could be changed by whoever made it.
                object.__setattr__(self, name, _json(name, value))
        for kind, bits in self.own_cache_types.items():
            if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 64:
                raise FieldError(
                    "cache_type_bits", f"of {kind} must be bits a value, as 3.5, got {bits!r}"
                )
        for flag, own in self.own_flags.items():
            if not flag.startswith("-") or flag in _OWN_FLAGS:
                raise FieldError("flag_names", f"cannot rename {flag}: it is not a flag, or ours")
            if own is not None and not (isinstance(own, str) and own.startswith("-")):
                raise FieldError(
                    "flag_names", f"of {flag} must be a flag, or null to leave it out, got {own!r}"
                )

    @property
    def speculates(self) -> bool:
        """Whether drafts are made at all."""
        return self.spec_type != "none" and (self.n_max is None or self.n_max > 0)

    @property
    def own_cache_types(self) -> Mapping[str, Any]:
        """Bits a value of the cache types that only this fork has."""
        return _mapping(self.cache_type_bits)

    @property
    def own_flags(self) -> Mapping[str, Any]:
        """What this fork calls upstream's flags, None for those that it lacks."""
        return _mapping(self.flag_names)

    def cache_bits(self, kind: str) -> float | None:
        """Return the bits of a cached value of this type, None where that is not known."""
        if self.cache_type_bits is not None and kind in (own := self.own_cache_types):
            return float(own[kind])
        return value_bits(kind)

    @property
    def spec_kinds(self) -> tuple[str, ...]:
        """The kinds of speculation, as listed."""
        return tuple(kind.strip() for kind in self.spec_type.split(",") if kind.strip())


def _json(name: str, stated: str | Mapping[str, Scalar]) -> str:
    """Return a mapping as the JSON object that stands for it; a text as it is."""
    if not isinstance(stated, str):
        return json.dumps(dict(stated), ensure_ascii=False)
    try:
        parsed = json.loads(stated)
    except json.JSONDecodeError as error:
        raise FieldError(name, f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise FieldError(name, f"must be a JSON object, got {stated}")
    return stated


def _mapping(text: str | Mapping[str, Scalar] | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    return dict(json.loads(text)) if isinstance(text, str) else text


class LlamaCpp:
    """The adapter for llama.cpp's server and its forks."""

    name = "llamacpp"
    simulated = False
    roles: Mapping[str, Role] = MappingProxyType(
        {
            "context": Role.CONTEXT,
            "cache_type_k": Role.KV_DTYPE,
            "cache_type_v": Role.KV_DTYPE,
            "n_max": Role.DRAFT_LENGTH,
            "spec_type": Role.DRAFT_METHOD,
            "batch": Role.PREFILL_CHUNK,
            "ubatch": Role.PREFILL_CHUNK,
            "parallel": Role.PARALLEL,
            "flash_attn": Role.BACKEND,
        }
    )
    wire = Wire(
        props_path="/props",
        tokenize_text_key="content",
        tokenize_special_key="add_special",
        completion_extras=Pairs(cache_prompt=False, ignore_eos=True),
        cached_extras=Pairs(cache_prompt=True, ignore_eos=True),
        # The OpenAI endpoint has no probabilities of a token that is not among the likeliest.
        scoring="next_token",
        scoring_path="/completion",
    )
    recipe_forms = frozenset({"llama-preset", "sparkrun"})
    runtime = "llama-cpp"
    setting_notes: Mapping[str, str] = {
        "context": "tokens of the window; the KV cache grows with it",
        "cache_type_k": "type of the cached keys; fewer bits leave room for more context",
        "cache_type_v": "type of the cached values; fewer bits leave room for more context",
        "flash_attn": "attention without a table of scores, which saves memory",
        "batch": "tokens of a prompt that are taken at once",
        "ubatch": "tokens that are computed at once; more make the compute buffer larger",
        "gpu_layers": "layers on the card",
        "n_cpu_moe": "layers whose experts stay in the memory of the host",
        "threads": "threads that generate; more than the cores there are slow it down",
        "spec_type": "the kind of speculation",
        "n_max": "tokens drafted at a time; more pay off as long as they are accepted",
        "p_min": "probability below which drafting stops",
    }

    def command_parts(self, argv: tuple[str, ...]) -> CommandParts | None:
        """Return the program, the model and the flags of a command that `launch` made."""
        return _parts(argv)

    def container(self, parts: CommandParts, argv: tuple[str, ...], facts: Pairs) -> Container:
        """Return llama.cpp's own server image (docs/docker.md), of the build if it is known."""
        del parts, argv
        build = facts.get("engine_build")
        kind = "server" if facts.get("gpu") is None else "server-cuda"
        tag = f"{kind}-b{build}" if isinstance(build, int) and build > 0 else kind
        return Container(
            image=f"ghcr.io/ggml-org/llama.cpp:{tag}", entrypoint=("/app/llama-server",)
        )

    def settings(self, params: Mapping[str, Any]) -> LlamaCppSettings:
        """Return frozen settings from a study's parameters; raises FieldError."""
        return build(LlamaCppSettings, params)

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set."""
        return tuple(field.name for field in fields(LlamaCppSettings))

    def context_tokens(self, settings: LlamaCppSettings) -> int:
        """Return the window of one sequence: the slots share the context, or each may take it."""
        return settings.context if settings.kv_unified else settings.context // settings.parallel

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options with the server to start: the binary, else the wheel's."""
        if options.binary is not None:
            found = shutil.which(options.binary)
            if found is None and options.prefix:
                return options  # a program in a container is not on this host
            if found is None:
                return no_engine(f"engine.binary is {options.binary}, and no such program exists")
            return replace(options, binary=found)
        if options.python is None:
            found = shutil.which("llama-server")
            if found is not None:
                return replace(options, binary=found)
            if importlib.util.find_spec("xllamacpp") is not None:
                return replace(options, python=sys.executable)
            return no_engine(
                "there is no llama-server on PATH and the xllamacpp wheel is not installed"
            )
        if not Path(options.python).exists():
            return no_engine(f"engine.python is {options.python}, and no such file exists")
        return options

    def footprint(self, settings: LlamaCppSettings, model: ModelFacts) -> Footprint:
        """Return weights, KV cache, compute and output buffers in bytes, by llama.cpp's formulas.

        They are in `sweeper.engines.llamacpp_memory`; recurrent states count as KV cache.
        """
        caches = llamacpp_memory.cache_parts(settings, model)
        parts: dict[str, Scalar] = {
            "weights": model.size_bytes,
            "kv_cache": math.ceil(caches["kv_cache"] + caches["state"]),
            "compute": math.ceil(llamacpp_memory.compute_bytes(settings, model)),
            "output": llamacpp_memory.output_bytes(settings, model),
        }
        if llamacpp_memory.drafts_by_itself(settings):
            parts["draft_kv"] = math.ceil(caches["draft_kv"])
        if settings.speculates and model.draft_path is not None:
            parts["draft"] = model.draft_size_bytes
        return Footprint(
            parts=Pairs(parts),
            # What moves memory in a way the formulas do not know makes two boots incomparable.
            alike=Pairs(
                spec_type=settings.spec_type if settings.speculates else "none",
                engine_draft_length=settings.speculates and settings.n_max is None,
                threads=f"{text(settings.threads)} {text(settings.threads_batch)}",
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
                    if settings.cache_bits(kind) is None
                ),
                gpu_layers=settings.gpu_layers,
                n_cpu_moe=settings.n_cpu_moe,
                override_tensor=settings.override_tensor,
                kv_offload=settings.kv_offload,
                draft_cache=f"{settings.draft_cache_type_k} {settings.draft_cache_type_v}",
                draft_gpu_layers=settings.draft_gpu_layers,
                mmap=settings.mmap,
                load_mode=settings.load_mode,
                version=settings.version,
                repack=settings.repack,
                fit=settings.fit,
            ),
        )

    def estimate(self, settings: LlamaCppSettings, model: ModelFacts) -> Estimate:
        """Return what these settings need of memory by component, before any boot."""
        return llamacpp_memory.estimate(settings, model)

    def shown(self, settings: LlamaCppSettings, evidence: Pairs) -> Pairs:  # noqa: ARG002
        """Return the components that a boot printed in bytes, by the names of the estimate."""
        return llamacpp_memory.shown(evidence)

    def refusal(self, settings: LlamaCppSettings, model: ModelFacts) -> str | None:
        """Return why the file cannot be served so: it has no draft layers to draft with."""
        if llamacpp_memory.drafts_by_itself(settings) and model.draft_path is None:
            return no_draft_layers(model)
        return None

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
            # From this size on a block is mapped by itself. Unless set, it grows with what was
            # freed, and a table of some MiB then finds a hole in the heap or makes it longer.
            env.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
            # Without a store of freed blocks for each thread, which makes the holes in the heap
            # depend on the order in which threads ran: 3 MiB more or less for one boot.
            env.setdefault("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
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
        from sweeper.engines.llamacpp_log import milestone

        return milestone(line)

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return sizes, windows, devices, versions and drafts, summed over buffers."""
        from sweeper.engines.llamacpp_log import read

        return read(log).evidence()

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of a llama.cpp server means: the phase decides, the text refines."""
        from sweeper.engines.llamacpp_endings import ending
        from sweeper.engines.llamacpp_log import read

        return ending(read(log), death)

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        from sweeper.engines.llamacpp_endings import diagnosis
        from sweeper.engines.llamacpp_log import read

        return diagnosis(read(log), exit_code)

    def contradiction(
        self, settings: LlamaCppSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:
        """Return in what way that matters the running engine is not what was asked for."""
        from sweeper.engines.llamacpp_endings import contradiction

        return contradiction(settings, facts, props)

    def foreign_template(self, facts: Pairs, props: str | None) -> str | None:
        """Return what shows that the server fell back to ChatML, None where nothing does."""
        from sweeper.engines.llamacpp_endings import foreign_template

        return foreign_template(facts, props)

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return speculation's counters; None for a server that is too old to have them."""
        return draft_counters(metrics, "llamacpp:")


def _flags(settings: LlamaCppSettings, model: ModelFacts, port: int) -> tuple[str, ...]:
    """Return the command line after the program, in the long names of the server's build."""
    version = settings.version
    pairs: list[tuple[str, Scalar]] = [
        ("--model", model.path),
        ("--alias", model.served_name),
        ("--host", "127.0.0.1"),
        ("--port", port),
        ("--ctx-size", settings.context),
        ("--parallel", settings.parallel),
        ("--cache-type-k", settings.cache_type_k),
        ("--cache-type-v", settings.cache_type_v),
        *_flash_attention(settings),
        (_spelling("fit", version), settings.fit),
        (_spelling("cache_ram", version), settings.cache_ram_mib),
        ("--metrics", True),
        (_spelling("ui", version), True),
        # Below this level newer builds do not print the sizes of their buffers.
        (_spelling("verbosity", version), 4),
        ("--batch-size", settings.batch),
        ("--ubatch-size", settings.ubatch),
        ("--gpu-layers", _layers(settings.gpu_layers, version)),
        ("--n-cpu-moe", settings.n_cpu_moe),
        ("--override-tensor", settings.override_tensor),
        ("--no-kv-offload", not settings.kv_offload),
        (_spelling("kv_unified", version), settings.kv_unified is True),
        (_spelling("kv_split", version), settings.kv_unified is False),
        (_spelling("fit_target", version), settings.fit_target_mib),
        ("--threads", settings.threads),
        (
            "--threads-batch",
            settings.threads if settings.threads_batch is None else settings.threads_batch,
        ),
        ("--threads-http", settings.threads_http),
        ("--jinja", settings.jinja is True),
        ("--no-jinja", settings.jinja is False),
        ("--chat-template-kwargs", _text_or_none(settings.chat_template_kwargs)),
        *_load_mode(settings),
        (_spelling("repack", version), not settings.repack),
        ("--swa-full", settings.swa_full),
        *(_speculation(settings, model) if settings.speculates else ()),
    ]
    flags: list[str] = []
    renamed = settings.own_flags
    for upstream, value in pairs:
        flag = renamed.get(upstream, upstream)
        # Nothing is said for a flag that this build lacks, a switch that is off, or no value.
        if flag and value is not None and value is not False and flag not in flags:
            flags += [flag] if value is True else [flag, str(value)]
    return tuple(flags)


_SWITCHES = frozenset(
    {
        *("--metrics", "--no-ui", "--no-webui", "--no-kv-offload", "--kv-unified"),
        *("--no-kv-unified", "--jinja", "--no-jinja", "--no-repack", "--swa-full", "--no-mmap"),
        *("--mlock", "-fa", "--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling"),
    }
)
"""The flags of `_flags` that take no value."""
_TEXTS = frozenset({"--alias", "--model", "--chat-template-kwargs", "--override-tensor"})
"""The flags of `_flags` whose value may begin with a dash."""


def _parts(argv: tuple[str, ...]) -> CommandParts | None:
    if "--model" not in argv[1:]:
        return None
    flags_at = argv.index("--model", 1)
    wheel = argv[max(0, flags_at - 2) : flags_at] == ("-m", "sweeper.engines.llamacpp_wheel")
    flags: list[tuple[str, ...]] = []
    words = iter(argv[flags_at:])
    following = next(words, None)
    while following is not None:
        flag, following = following, next(words, None)
        if not flag.startswith("-") or re.fullmatch(r"-[\d.]+", flag):
            return None
        takes_it = following is not None and (
            flag in _TEXTS or not re.match(r"--?[A-Za-z]", following)
        )
        if flag not in _SWITCHES and takes_it and following is not None:
            flags.append((flag, following))
            following = next(words, None)
        else:
            flags.append((flag,))
    named = {flag[0]: flag[1] for flag in flags if len(flag) == 2}
    return CommandParts(
        start=flags_at - (3 if wheel else 1),
        flags_at=flags_at,
        model=named["--model"],
        served_name=named.get("--alias", ""),
        flags=tuple(flags),
    )


def _flash_attention(settings: LlamaCppSettings) -> tuple[tuple[str, Scalar], ...]:
    flag = _spelling("flash_attn", settings.version)
    if flag == "-fa":  # a bare switch: off is silence, and nothing is automatic
        return ((flag, settings.flash_attn == "on"),)
    return ((flag, settings.flash_attn),)


def _load_mode(settings: LlamaCppSettings) -> tuple[tuple[str, Scalar], ...]:
    mode = "none" if not settings.mmap else settings.load_mode
    flag = _spelling("load_mode", settings.version)
    if flag:
        return ((flag, mode),)
    return (
        ("--no-mmap", mode in ("none", "mlock")),
        ("--mlock", mode in ("mlock", "mmap+mlock")),
    )


def _layers(layers: Layers, version: int | None) -> Scalar:
    """Return a number of layers; older builds know no words, and take a large number for all."""
    if isinstance(layers, int) or layers is None or _spelling("layer_words", version):
        return layers
    return _ALL_LAYERS if layers == "all" else None


def _speculation(
    settings: LlamaCppSettings, model: ModelFacts
) -> tuple[tuple[str, Scalar], ...]:  # fmt: skip
    version = settings.version

    def own(kind: str, what: str, otherwise: str) -> str:
        name = f"{kind} {what}"
        return _spelling(name if name in _SPELLINGS else otherwise, version)

    lengths = [own(kind, "length", "draft_length") for kind in settings.spec_kinds]
    lookups = [
        _spelling(f"{kind} lookup", version)
        for kind in settings.spec_kinds
        if f"{kind} lookup" in _SPELLINGS
    ]
    least = [own(kind, "least", "draft_least") for kind in settings.spec_kinds]
    sampling = settings.draft_backend_sampling
    sampling_flag = _spelling("draft_sampling", version)
    return (
        (_spelling("spec_type", version), settings.spec_type),
        (_spelling("draft_model", version), model.draft_path),
        *((flag, settings.n_max) for flag in lengths),
        *((flag, settings.ngram_size) for flag in lookups),
        *((flag, settings.n_min) for flag in (*least, _spelling("draft_least", version))),
        (_spelling("draft_p_min", version), settings.p_min),
        (_spelling("draft_type_k", version), settings.draft_cache_type_k),
        (_spelling("draft_type_v", version), settings.draft_cache_type_v),
        (_spelling("draft_layers", version), _layers(settings.draft_gpu_layers, version)),
        (sampling_flag, sampling is True),
        (sampling_flag.replace("--", "--no-", 1), sampling is False),
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def no_engine(why: str) -> HostFault:
    """Return that the engine cannot be started for this reason, and what to do about it."""
    return HostFault(
        name=HostFaultName.ENGINE_NOT_FOUND,
        finding=Finding(
            phase=Phase.SPAWN,
            cause=why,
            explanation=f"{why}; set engine.binary=/path/to/llama-server, or install the wheel: "
            "pip install xllamacpp",
        ),
    )
