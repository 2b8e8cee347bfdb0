"""llama.cpp's server: its flags, its memory, and what its endings mean.

Serves with the `llama-server` binary or a fork's, or with the same server inside the `xllamacpp`
wheel through `sweeper.engines.llamacpp_wheel`, which takes the same flags. What it prints is read
in `sweeper.engines.llamacpp_log`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sweeper.core.architecture import value_bits
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
from sweeper.engines.llamacpp_log import (
    MIB,
    Allocation,
    Reading,
    Trouble,
    asked_for_no_layers,
    milestone,
    read,
    speculation_was_wanted,
)
from sweeper.engines.metrics import draft_counters

KV_BITS: dict[str, float] = {
    "f32": 32, "f16": 16, "bf16": 16,
    "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
"""Bits a cached value takes, block scales included. Forks have more types; see `footprint`."""

_DEFAULT_UBATCH = 512
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
        return milestone(line)

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return sizes, windows, devices, versions and drafts, summed over buffers."""
        return read(log).evidence()

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of a llama.cpp server means: the phase decides, the text refines."""
        return _ending(read(log), death)

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        return _diagnosis(read(log), exit_code)

    def contradiction(
        self, settings: LlamaCppSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:
        """Return in what way that matters the running engine is not what was asked for."""
        return _contradiction(settings, facts, props)

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


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


# --- what a log means -------------------------------------------------------------------------

_SIGKILL, _SIGINT, _SIGTERM = 9, 2, 15
_CRASHES = (4, 6, 7, 8, 11)
_WAITED = re.compile(r"(?:after|in) ?(\d+(?:\.\d+)?)")
_FLAG = re.compile(r"(?:argument|value for):? *\"?(-[\w-]+)")
_LONGEST_CAUSE = 500
_DEAD_DRAFT_TOKENS = 32
_DEAD_DRAFT_SHARE = 0.02

_MEMORY_NAMES = {
    Phase.WEIGHTS: (InfeasibleName.OOM_WEIGHTS, "the weights", "weights"),
    Phase.CONTEXT: (InfeasibleName.OOM_KV_CACHE, "the KV cache", "kv"),
    Phase.KV: (InfeasibleName.OOM_KV_CACHE, "the KV cache", "kv"),
    Phase.COMPUTE: (InfeasibleName.OOM_COMPUTE, "the compute buffers", "compute"),
    Phase.WARMUP: (InfeasibleName.OOM_COMPUTE, "the warm-up", "compute"),
}

_HOST: tuple[tuple[Trouble, HostFaultName, str], ...] = (
    (Trouble.NO_ENGINE, HostFaultName.ENGINE_NOT_FOUND,
     "the engine is not installed where the study points, or cannot be loaded there"),
    (Trouble.DRIVER, HostFaultName.DRIVER_MISMATCH,
     "the GPU driver does not fit this build of the engine"),
    (Trouble.TOOLCHAIN, HostFaultName.TOOLCHAIN_JIT_FAILURE,
     "the kernels of this build cannot be compiled on this host"),
    (Trouble.DISK, HostFaultName.DISK_FULL, "the disk is full"),
    (Trouble.MODEL_FILE, HostFaultName.MODEL_NOT_FOUND_OR_GATED,
     "the model file is missing, not to be had, or damaged"),
)  # fmt: skip

_POINT: tuple[tuple[Trouble, InfeasibleName, Phase, str, Mapping[str, Scalar]], ...] = (
    (Trouble.ARGUMENT, InfeasibleName.BAD_ARGUMENT, Phase.ARGS,
     "this build does not know one of the flags or values", {}),
    (Trouble.FLASH_FOR_V, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.CONTEXT,
     "a quantised V cache needs flash attention", {"flash_attn": "on"}),
    (Trouble.NO_MTP, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "the model has no layers for this kind of speculation", {"spec_type": "none"}),
    (Trouble.ARCHITECTURE, InfeasibleName.MODEL_UNSUPPORTED_ARCH, Phase.WEIGHTS,
     "this build does not know the model's architecture or format", {}),
    (Trouble.COMBINATION, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.CONTEXT,
     "the model or the build does not support this combination", {}),
    (Trouble.DRAFT_REFUSED, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "the draft does not go with this model", {"spec_type": "none"}),
    # Also said, and no matter then, while it measures what a draft would take.
    (Trouble.NEEDS_TARGET, InfeasibleName.UNSUPPORTED_COMBINATION, Phase.DRAFT,
     "a draft model cannot serve by itself, or this build cannot use it", {"spec_type": "none"}),
)  # fmt: skip


def _finding(
    reading: Reading, explanation: str, cause: str | None = None, *,
    facts: Mapping[str, Scalar] | None = None, phase: Phase | None = None,
    try_next: Mapping[str, Scalar] | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        phase=phase if phase is not None else reading.reached,
        cause=(reading.cause if cause is None else cause)[:_LONGEST_CAUSE],
        explanation=explanation,
        facts=Pairs(facts or {}),
        try_next=Pairs(try_next or {}),
    )


def _ending(reading: Reading, death: Death) -> Failure:
    """Return what an end means: the phase decides, the text refines, the exit code is last."""
    served = death.was_ready or reading.ready
    if death.ended is Ended.NOT_STARTED:
        return _no_engine(death.detail)
    port = reading.at_all(Trouble.PORT)
    if death.ended is Ended.PORT_TAKEN or port is not None:
        return Broken(
            name=BrokenName.PORT_IN_USE,
            finding=_finding(
                reading, "another process holds the port", port.line if port else death.detail
            ),
        )
    judges: tuple[Callable[[Reading, Death], Failure | None], ...] = (
        (_memory, _no_thread, _killed, _no_driver, _request)
        if served
        else (_contended, _memory, _no_thread, _killed, _host, _point, _template, _unsaid_memory)
    )
    for judge in judges:
        if (verdict := judge(reading, death)) is not None:
            return verdict
    gave_up = None if served else reading.at_all(Trouble.GAVE_UP)
    if death.ended is Ended.LATE or gave_up is not None:
        return _late(reading, death, gave_up.line if gave_up else None)
    if death.ended is Ended.SILENT:
        return Broken(
            name=BrokenName.HANG_RUNTIME,
            finding=_finding(
                reading,
                f"the server lives, but went silent: {death.detail}",
                phase=Phase.SERVING,
            ),
        )
    if death.ended is Ended.LIVES:
        return Broken(
            name=BrokenName.HTTP_500,
            finding=_finding(
                reading,
                f"the server answered a request with an error: {death.detail}",
                phase=Phase.SERVING,
            ),
        )
    return _crash(reading, death, served=served)


def _diagnosis(reading: Reading, exit_code: int | None) -> Diagnosis:
    """Return what a log alone means; a server that was asked to stop had come up before."""
    signal = _signal(exit_code)
    if not reading.ours and signal not in _CRASHES:
        if exit_code in (126, 127):
            return _no_engine(reading.last_line or f"the program could not run ({exit_code})")
        return Broken(
            name=BrokenName.UNKNOWN,
            finding=_finding(
                reading,
                "this does not read like a log of llama.cpp's server",
                reading.cause if reading.cause.isprintable() else "",
                phase=Phase.SPAWN,
            ),
        )
    death = Death(
        ended=Ended.EXITED, after_s=0.0, was_ready=reading.ready, exit_code=exit_code
    )  # fmt: skip
    stopped = reading.up and (exit_code == 0 or signal in (_SIGINT, _SIGTERM))
    if not (exit_code is None or stopped) or _is_fatal(reading):
        return _ending(reading, death)
    for judge in (_failed_request, _unfit):
        if (verdict := judge(reading)) is not None:
            return verdict
    if reading.up:
        survived = reading.survived
        return Nothing(
            finding=_finding(
                reading,
                "it came up and served"
                + ("; what was refused on the way was survived" if survived else ""),
                survived.line if survived else "",
                facts=_survived_facts(reading),
                phase=Phase.READY,
            )
        )
    return _unfinished(reading)


_LATER = (Trouble.DRAFT_REFUSED, Trouble.NEEDS_TARGET)
"""What a boot may say and still come up: fatal only if it is known to have ended."""


def _is_fatal(reading: Reading) -> bool:
    """Tell whether the log itself shows an end."""
    always = (Trouble.PORT, Trouble.ABORT, Trouble.DEVICE_ERROR, Trouble.KILLED_FOR_RAM)
    if reading.allocation is not None or reading.at_all(*always) is not None:
        return True
    booting = (
        *(trouble for trouble, *_ in _HOST),
        *(trouble for trouble, *_ in _POINT if trouble not in _LATER),
        Trouble.EXITING, Trouble.TEMPLATE, Trouble.DEVICE_FULL, Trouble.GAVE_UP,
    )  # fmt: skip
    if reading.before_ready(Trouble.DRIVER) is not None and not reading.gpu_found:
        return True
    return not reading.up and reading.before_ready(*booting) is not None


def _unfinished(reading: Reading) -> Diagnosis:
    """A log that shows neither an end nor a server that came up."""
    if (loading := reading.at_all(Trouble.STILL_LOADING)) is not None:
        return Broken(
            name=BrokenName.HANG_BOOT,
            finding=_finding(
                reading, "it only ever said that the model is still loading", loading.line
            ),
        )
    if (unsaid := _unsaid_memory(reading, _GONE)) is not None:
        return unsaid
    # An excerpt that complains of nothing that matters, or of what was survived.
    if reading.began and reading.survived is None:
        return Broken(
            name=BrokenName.UNKNOWN,
            finding=_finding(
                reading,
                "the log ends before the server was ready, and nothing in it says why; the last "
                f"phase it reached was {reading.reached.value}",
            ),
        )
    return Nothing(
        finding=_finding(
            reading,
            "nothing in this log keeps the server from serving",
            "",
            facts=_survived_facts(reading),
        )
    )  # fmt: skip


def _survived_facts(reading: Reading) -> Mapping[str, Scalar]:
    facts: dict[str, Scalar] = {}
    if reading.survived is not None and reading.survived.size_bytes is not None:
        facts["required_bytes"] = round(reading.survived.size_bytes)
    if (window := reading.number("effective_context_tokens")) is not None:
        facts["window_tokens"] = window
    return facts


# --- memory


def _memory(reading: Reading, death: Death) -> Failure | None:
    held = reading.allocation
    if held is None:
        return None
    name, what, kind, phase = _kind_of(reading, held, death)
    limit = reading.limit_bytes if reading.limit_bytes is not None else death.limit_bytes
    used = reading.used_bytes if reading.used_bytes is not None else death.peak_bytes
    facts: dict[str, Scalar] = {"kind": kind}
    free = None
    if limit is not None:
        facts["limit_bytes"] = limit
        free = max(limit - used, 0) if used is not None else None
    elif not held.on_host:
        free = reading.free_bytes(held.device)
    if free is not None:
        facts["free_bytes"] = free
    if held.device is not None:
        facts["device"] = int(held.device) if held.device.isdigit() else held.device
    said = ""
    required = held.size_bytes
    if required is not None:
        facts["required_bytes"] = round(required)
        said = f": {required / MIB:.1f} MiB were asked for"
        if free is not None:
            said += f" where {free / MIB:.1f} MiB were free"
            if required > free:
                facts["shortfall_bytes"] = round(required - free)
                said += f", {(required - free) / MIB:.1f} MiB too few"
    for fact in ("context_tokens", "ubatch_tokens"):
        if (number := reading.number(fact)) is not None:
            facts[fact] = number
    return Infeasible(
        name=name,
        finding=_finding(
            reading,
            f"memory ran out for {what}{said}",
            held.line,
            facts=facts,
            phase=phase,
            try_next=_with_less(reading, name, required, free),
        ),
    )


def _kind_of(
    reading: Reading, held: Allocation, death: Death
) -> tuple[InfeasibleName, str, str, Phase]:
    excerpt = held.phase.order < Phase.WEIGHTS.order and held.kind is None
    if death.was_ready or held.after_ready or (excerpt and held.in_pool and not held.drafting):
        return InfeasibleName.OOM_RUNTIME, "a request", "runtime", Phase.SERVING
    if held.drafting:
        part = _MEMORY_NAMES[held.kind][1] if held.kind in _MEMORY_NAMES else "the context"
        what = f"{part} of the draft"
        return InfeasibleName.OOM_DRAFT_HEAD, what, "draft", Phase.DRAFT
    phase = held.kind if held.kind is not None else held.phase
    if phase not in _MEMORY_NAMES:
        phase = Phase.WEIGHTS
    name, what, kind = _MEMORY_NAMES[phase]
    by_limit = held.by_limit or death.limit_bytes is not None or reading.limit_bytes is not None
    if phase is Phase.WEIGHTS and held.on_host and not by_limit:
        # Without a limit on address space only a machine that has no memory left refuses this.
        return InfeasibleName.HOST_RAM_OOM, "the weights in host RAM", "host", Phase.WEIGHTS
    return name, what, kind, Phase.KV if phase is Phase.CONTEXT else phase


def _with_less(
    reading: Reading, name: InfeasibleName, required: float | None, free: int | None
) -> Mapping[str, Scalar]:
    """Return settings that ask for less of what ran out."""
    context = reading.number("context_tokens")
    share = free / required if free is not None and required else 0.5
    share = share if 0 < share < 1 else 0.5
    ubatch = reading.number("ubatch_tokens") or _DEFAULT_UBATCH
    match name:
        case InfeasibleName.OOM_KV_CACHE:
            if context is not None:
                return {"context": max(int(context * share) // 256 * 256, 256)}
            return {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
        case InfeasibleName.OOM_COMPUTE | InfeasibleName.OOM_RUNTIME:
            return {"ubatch": max(ubatch // 2, 32)}
        case InfeasibleName.OOM_WEIGHTS:
            held = reading.allocation
            if held is not None and held.on_host:
                return {}
            layers = reading.number("layers")
            if layers is not None and free is not None:
                return {"gpu_layers": int(layers * share)}
            return {"gpu_layers": "auto", "fit": "on"}
        case InfeasibleName.OOM_DRAFT_HEAD:
            if required is not None and "fit" in reading.facts:
                # Fitting does not count all that a draft takes; its own margin is 1 GiB.
                mib = math.ceil(required / MIB)
                return {"fit_target_mib": mib if mib > 1024 else mib + 1024}
            if context is not None:
                return {"context": max(context // 2 // 256 * 256, 256)}
            return {"fit": "on", "spec_type": "none"}
        case InfeasibleName.HOST_RAM_OOM:
            return {"mmap": True, "cache_ram_mib": 0}
        case _:
            return {}


def _contended(reading: Reading, death: Death) -> Failure | None:
    """A GPU without room for even a driver context is full of somebody else's memory."""
    del death
    seen = reading.before_ready(Trouble.DEVICE_FULL)
    if seen is None:
        return None
    return Broken(
        name=BrokenName.GPU_MEMORY_CONTENDED,
        finding=_finding(
            reading, "the GPU was full before the engine asked for anything", seen.line,
            phase=Phase.DEVICE,
        ),
    )  # fmt: skip


def _no_thread(reading: Reading, death: Death) -> Failure | None:
    """A thread needs address space for its stack: under a limit, its lack is a lack of memory."""
    seen = reading.at_all(Trouble.NO_THREAD)
    if seen is None or (death.limit_bytes is None and reading.limit_bytes is None):
        return None
    serving = death.was_ready or reading.ready
    return Infeasible(
        name=InfeasibleName.OOM_RUNTIME if serving else InfeasibleName.OOM_COMPUTE,
        finding=_finding(
            reading,
            "memory ran out for the stack of a thread",
            seen.line,
            facts={"limit_bytes": death.limit_bytes or reading.limit_bytes},
            phase=Phase.SERVING if serving else None,
        ),
    )


def _killed(reading: Reading, death: Death) -> Failure | None:
    """The kernel's killer leaves only a signal; it takes a line that says so to blame memory."""
    seen = reading.at_all(Trouble.KILLED_FOR_RAM)
    if seen is None and _signal(death.exit_code) == _SIGKILL:
        seen = reading.at_all(Trouble.CACHE_OVER_LIMIT)
    evidence = seen.line if seen is not None else ""
    if not evidence and "oom" in death.detail.lower():
        evidence = death.detail
    if not evidence:
        return None
    return Infeasible(
        name=InfeasibleName.HOST_RAM_OOM,
        finding=_finding(
            reading,
            "the kernel killed the server because host RAM had run out",
            evidence,
            facts={"kind": "host"},
            phase=Phase.SERVING if reading.ready else None,
            try_next={"cache_ram_mib": 0},
        ),
    )


def _unsaid_memory(reading: Reading, death: Death) -> Failure | None:
    """A boot that dies right after moving layers off the GPU ran out of memory, unsaid."""
    seen = reading.before_ready(Trouble.MISSING_SUPPORT)
    if seen is None or death.ended is not Ended.EXITED or "device CPU but" not in seen.line:
        return None
    name = InfeasibleName.OOM_DRAFT_HEAD if reading.drafting else InfeasibleName.OOM_COMPUTE
    return Infeasible(
        name=name,
        finding=_finding(
            reading,
            "a layer was left in host RAM for want of GPU memory, and the boot ended there",
            seen.line,
            facts={"kind": "draft" if reading.drafting else "compute"},
            phase=Phase.DRAFT if reading.drafting else Phase.COMPUTE,
            try_next=_with_less(reading, name, None, None),
        ),
    )


# --- the host, the point, the engine


def _no_driver(reading: Reading, death: Death) -> Failure | None:
    """A GPU build whose driver does not fit may serve from the CPU: no point measures the GPU."""
    if reading.gpu_found or reading.before_ready(Trouble.DRIVER) is None:
        return None
    return _host(reading, death)


def _host(reading: Reading, death: Death) -> Failure | None:
    if death.exit_code in (126, 127) and not reading.ours:
        return _no_engine(reading.cause or f"the program could not run ({death.exit_code})")
    for trouble, name, explanation in _HOST:
        if (seen := reading.before_ready(trouble)) is not None:
            return HostFault(name=name, finding=_finding(reading, explanation, seen.line))
    return None


def _point(reading: Reading, death: Death) -> Failure | None:
    if reading.up and death.exit_code is None:
        return None
    for trouble, name, phase, explanation, try_next in _POINT:
        if (seen := reading.before_ready(trouble)) is not None:
            drafting = reading.drafting and phase is Phase.CONTEXT
            flag = _FLAG.search(seen.line) if trouble is Trouble.ARGUMENT else None
            return Infeasible(
                name=name,
                finding=_finding(
                    reading,
                    explanation,
                    seen.line,
                    facts={} if flag is None else {"flag": flag[1]},
                    phase=Phase.DRAFT if drafting else phase,
                    try_next=try_next,
                ),
            )
    return None


def _template(reading: Reading, death: Death) -> Failure | None:
    del death
    seen = reading.at_all(Trouble.TEMPLATE)
    if seen is None:
        return None
    return Broken(
        name=BrokenName.CHAT_TEMPLATE_FAILURE,
        finding=_finding(
            reading,
            "the model's chat template cannot be used",
            seen.line,
            phase=Phase.SERVING if reading.ready else None,
            try_next={"jinja": False},
        ),
    )


def _request(reading: Reading, death: Death) -> Failure | None:
    """A server that lives and was brought to an error by a template."""
    if death.ended is not Ended.LIVES or (Trouble.TEMPLATE, True) not in reading.seen:
        return None
    return _template(reading, death)


def _late(reading: Reading, death: Death, gave_up: str | None) -> Failure:
    silent = reading.phase.order <= Phase.SPAWN.order and gave_up is None
    waited = _WAITED.search(gave_up) if gave_up is not None else None
    what = (
        "whoever started it stopped waiting for it"
        if gave_up is not None
        else f"it was not ready after {death.after_s:.0f} s"
    )
    return Broken(
        name=BrokenName.HANG_BOOT if silent else BrokenName.BOOT_TIMEOUT,
        finding=_finding(
            reading,
            f"{what}; the last phase it reached was {reading.reached.value}",
            gave_up,
            facts={} if waited is None else {"timeout_s": float(waited[1])},
        ),
    )


def _crash(reading: Reading, death: Death, *, served: bool) -> Failure:
    how = _exit_in_words(death.exit_code)
    error = reading.at_all(Trouble.DEVICE_ERROR, Trouble.ABORT)
    cause = error.line if error is not None else None
    # An excerpt that knows no boot, of a kernel that failed: kernels run for requests.
    excerpt = reading.phase is Phase.SPAWN and reading.at_all(Trouble.DEVICE_ERROR) is not None
    if served or reading.served or excerpt:
        return Broken(
            name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
            finding=_finding(
                reading, f"the server {how} while it was serving", cause, phase=Phase.SERVING
            ),
        )
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=_finding(reading, f"the server {how} before it was ready", cause),
    )


# --- it serves, but


def _failed_request(reading: Reading) -> Failure | None:
    if (Trouble.TEMPLATE, True) in reading.seen:
        return _template(reading, _ALIVE)
    seen = reading.at_all(Trouble.FAILED_REQUEST)
    if seen is None:
        return None
    needed = reading.number("needed_ubatch_tokens")
    return Broken(
        name=BrokenName.HTTP_500,
        finding=_finding(
            reading,
            "the server answered a request with an error",
            seen.line,
            facts={} if needed is None else {"needed_ubatch_tokens": needed},
            phase=Phase.SERVING,
            try_next={} if needed is None else {"ubatch": needed, "batch": needed},
        ),
    )


def _unfit(reading: Reading) -> Unfit | None:
    """Return what a server that came up says of not being what it seems."""
    facts = reading.facts
    if (dead := _dead_drafts(reading.evidence())) is not None:
        return dead
    refused = reading.at_all(Trouble.REFUSED_PROMPT)
    # A server that answered more than it refused refused cleanly.
    if refused is not None and reading.counts[Trouble.REFUSED_PROMPT] >= reading.served:
        window = reading.number("refused_window_tokens")
        window = window if window is not None else reading.number("effective_context_tokens")
        prompt = reading.number("prompt_tokens")
        return _unfit_as(
            UnfitName.HTTP_400_CONTEXT,
            "a prompt did not fit the window that is served",
            refused.line,
            phase=Phase.SERVING,
            facts={"prompt_tokens": prompt, "window_tokens": window},
            try_next={} if prompt is None else {"context": _round_up(prompt + 1, 256)},
        )
    if (seen := reading.at_all(Trouble.CONTEXT_CAPPED)) is not None:
        trained = facts.get("trained_context_tokens")
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            "each slot holds only as much as the model was trained on",
            seen.line,
            phase=Phase.READY,
            facts={"asked_tokens": facts.get("capped_from_tokens"), "window_tokens": trained},
            try_next={"context": trained},
        )
    if (seen := reading.at_all(Trouble.CONTEXT_REDUCED)) is not None:
        fits = facts.get("fit_context_tokens")
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            "the context was reduced to fit the memory",
            seen.line,
            phase=Phase.READY,
            facts={"asked_tokens": facts.get("fit_from_tokens"), "window_tokens": fits},
            try_next={"context": fits, "fit": "off"},
        )
    off = reading.at_all(Trouble.SPECULATION_OFF, Trouble.DRAFT_REFUSED)
    if off is None and speculation_was_wanted(reading):
        off = reading.at_all(Trouble.NO_SPECULATION)
    if off is not None:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "it serves without speculation",
            off.line,
        )
    ignored = reading.at_all(Trouble.DEVICE_INIT, Trouble.GPU_IGNORED)
    if ignored is not None and not reading.gpu_found:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "it serves without a GPU",
            ignored.line,
        )
    if facts.get("offloaded_layers") == 0 and not asked_for_no_layers(reading):
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "there is a GPU, and no layer of the model is on it",
            f"offloaded 0/{facts['all_layers']} layers to GPU",
            phase=Phase.READY,
        )
    if reading.survived is not None and not reading.survived.drafting:
        some, layers = reading.number("offloaded_layers"), reading.number("all_layers")
        if some is not None and layers is not None and some < layers and reading.ready:
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"memory was refused, and it came up with {some} of {layers} layers on the GPU",
                reading.survived.line,
                phase=Phase.READY,
                facts={"offloaded_layers": some, "all_layers": layers},
            )
    if (seen := reading.at_all(Trouble.FLASH_ELSEWHERE)) is not None:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "flash attention does not run on the device of its layers",
            seen.line,
            phase=Phase.READY,
            try_next={"cache_type_k": "f16", "cache_type_v": "f16"},
        )
    return None


def _dead_drafts(facts: Pairs) -> Unfit | None:
    drafted, accepted = facts.get("drafted_tokens"), facts.get("accepted_tokens")
    if not isinstance(drafted, int) or not isinstance(accepted, int):
        return None
    if drafted < _DEAD_DRAFT_TOKENS or accepted > drafted * _DEAD_DRAFT_SHARE:
        return None
    return _unfit_as(
        UnfitName.DRAFT_INEFFECTIVE,
        f"of {drafted} drafted tokens {accepted} were accepted",
        f"draft acceptance: {accepted} accepted / {drafted} generated",
        phase=Phase.SERVING,
        facts={"drafted_tokens": drafted, "accepted_tokens": accepted},
        try_next={"spec_type": "none"},
    )


def _unfit_as(
    name: UnfitName,
    explanation: str,
    cause: str,
    *,
    facts: Mapping[str, Scalar] | None = None,
    try_next: Mapping[str, Scalar] | None = None,
    phase: Phase = Phase.READY,
) -> Unfit:
    known = {key: value for key, value in (facts or {}).items() if value is not None}
    tries = {key: value for key, value in (try_next or {}).items() if value is not None}
    return Unfit(
        name=name,
        finding=Finding(
            phase=phase,
            cause=cause,
            explanation=explanation,
            facts=Pairs(known),
            try_next=Pairs(tries),
        ),
    )


# --- asked against effective


def _contradiction(settings: LlamaCppSettings, facts: Pairs, props: str | None) -> Unfit | None:
    """Return the first difference that matters, the gravest kind first.

    A window that was rounded up is more than was asked for, and a draft clamped to what its model
    was trained on is what any longer one would have been: neither matters. A window capped to the
    training context does: the objective is the window, and the one that was asked for is not there.
    """
    page = _properties(props)
    asked = settings.context if settings.kv_unified else settings.context // settings.parallel
    windows = [
        window
        for window in (page.get("n_ctx"), facts.get("effective_context_tokens"))
        if isinstance(window, int) and not isinstance(window, bool) and window > 0
    ]
    if windows and min(windows) < asked:
        return _unfit_as(
            UnfitName.SILENT_CONTEXT_TRUNCATION,
            f"a window of {asked} tokens was asked for, and {min(windows)} are served",
            f"n_ctx_slot = {min(windows)}",
            phase=Phase.READY,
            facts={"asked_tokens": asked, "window_tokens": min(windows)},
            try_next={"context": min(windows) * (1 if settings.kv_unified else settings.parallel)},
        )
    if settings.speculates:
        off = facts.get("speculation_off")
        if off or facts.get("speculation") == "none" or _says_no_drafts(settings, page):
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"{settings.spec_type} was asked for, and it serves without speculation",
                str(off or "no implementations specified for speculative decoding"),
                phase=Phase.READY,
            )
        if (dead := _dead_drafts(facts)) is not None:
            return dead
    if (fallback := _layers_missing(settings, facts)) is not None:
        return fallback
    if settings.flash_attn == "on" and facts.get("flash_attention") == "disabled":
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            "flash attention was asked for, and it is disabled",
            "Flash Attention disabled",
            phase=Phase.READY,
        )
    for side, kind in (("k", settings.cache_type_k), ("v", settings.cache_type_v)):
        real = str(facts.get(f"kv_type_{side}", kind)).lower()
        # A fork's own types print under names of their own.
        if real != kind.lower() and {real, kind.lower()} <= KV_BITS.keys():
            return _unfit_as(
                UnfitName.SILENT_FALLBACK,
                f"the {side.upper()} cache was to be {kind}, and is {real}",
                f"{side.upper()} ({real})",
                phase=Phase.READY,
            )
    slots = page.get("total_slots", facts.get("slots"))
    if isinstance(slots, int) and 0 < slots < settings.parallel:
        return _unfit_as(
            UnfitName.DEGRADED_CAPACITY,
            f"{settings.parallel} slots were asked for, and {slots} are there",
            f"n_slots = {slots}",
            phase=Phase.READY,
            facts={"asked_slots": settings.parallel, "slots": slots},
        )
    return None


def _layers_missing(settings: LlamaCppSettings, facts: Pairs) -> Unfit | None:
    asked = settings.gpu_layers
    if asked is None or asked in {"auto", 0}:
        return None
    wanted = asked if isinstance(asked, int) else None
    if facts.get("gpu_ignored") is True:
        return _unfit_as(
            UnfitName.SILENT_FALLBACK,
            f"{asked} layers were asked for on the GPU, and it serves without a GPU",
            "no usable GPU found",
            phase=Phase.READY,
        )
    some, layers = facts.get("offloaded_layers"), facts.get("all_layers")
    if not isinstance(some, int) or not isinstance(layers, int):
        return None
    if some >= (layers if wanted is None else min(wanted, layers)):
        return None
    return _unfit_as(
        UnfitName.SILENT_FALLBACK,
        f"{asked} layers were asked for on the GPU, and {some} of {layers} are there",
        f"offloaded {some}/{layers} layers to GPU",
        phase=Phase.READY,
        facts={"offloaded_layers": some, "all_layers": layers},
    )


def _says_no_drafts(settings: LlamaCppSettings, page: Mapping[str, Scalar]) -> bool:
    """Older builds said so of every server whose drafts come from n-grams."""
    ngrams = any(kind.startswith("ngram") for kind in settings.spec_kinds)
    return page.get("speculative") is False and not ngrams


def _properties(props: str | None) -> Mapping[str, Scalar]:
    """Return what the properties page says of a slot; nothing for a page that is not one."""
    try:
        page = json.loads(props) if props else {}
    except json.JSONDecodeError:
        return {}
    if not isinstance(page, dict):
        return {}
    slot = page.get("default_generation_settings")
    found = {**page, **(slot if isinstance(slot, dict) else {})}
    names = ("n_ctx", "speculative", "total_slots")
    return {name: found[name] for name in names if isinstance(found.get(name), bool | int)}


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


_GONE = Death(ended=Ended.EXITED, after_s=0.0, was_ready=False)
_ALIVE = Death(ended=Ended.LIVES, after_s=0.0, was_ready=True)


def _signal(code: int | None) -> int | None:
    """Return the signal that an exit code tells of, as a process says it or as a shell does."""
    if code is None:
        return None
    return -code if code < 0 else code - 128 if 128 < code < 160 else None


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    signal = _signal(code)
    return f"exited with code {code}" if signal is None else f"was killed by signal {signal}"
