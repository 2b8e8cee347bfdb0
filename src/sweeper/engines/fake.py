"""The simulated engine's adapter: what fake_server's flags mean and what its last words meant."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, assert_never

from sweeper.core.evidence import Role
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
    UnfitName,
)
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.sample import DraftCounters
from sweeper.core.space import suggestion
from sweeper.core.typed import FieldError, build
from sweeper.engines import EngineOptions, ModelFacts, Wire
from sweeper.engines.fake_server import ENDINGS, HOST, MIB, NAME, VERSION, Options, needed_bytes
from sweeper.engines.metrics import draft_counters


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """What the simulated engine can be told; each is a flag of fake_server with dashes.

    The device is invented as well: `capacity_mib` is all it has, `weights_mib`, `draft_mib` (only
    with `n_max` above 0), `kv_kib_per_token` and `compute_mib` (for a batch of 512) are taken from
    it. `draft_cost` is the share of a step that each drafted token adds, `time_scale` divides all
    waiting, `ending_after` is how many completions go well before the ending. Chats answer with
    `reasoning_tokens` of thoughts first. `memory_spread_mib` is the standard deviation from boot to
    boot of what it needs; with a `boots_file`, in which it counts its boots, what each one needs
    is drawn by its number and the seed, so that a series of boots can be repeated.
    """

    context: int = Options.context
    kv_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    n_max: int = Options.n_max
    batch: int = Options.batch
    flash_attn: Literal["on", "off"] = "on"
    capacity_mib: float = Options.capacity_mib
    weights_mib: float = Options.weights_mib
    kv_kib_per_token: float = Options.kv_kib_per_token
    draft_mib: float = Options.draft_mib
    compute_mib: float = Options.compute_mib
    decode_tok_s: float = Options.decode_tok_s
    prefill_tok_s: float = Options.prefill_tok_s
    acceptance: float = Options.acceptance
    draft_cost: float = Options.draft_cost
    boot_s: float = Options.boot_s
    time_scale: float = Options.time_scale
    seed: int = Options.seed
    ending: str = Options.ending
    ending_after: int = Options.ending_after
    runtime_oom_tokens: int = Options.runtime_oom_tokens
    reasoning_tokens: int = Options.reasoning_tokens
    memory_spread_mib: float = Options.memory_spread_mib
    boots_file: str = Options.boots_file

    def __post_init__(self) -> None:
        for name in ("capacity_mib", "decode_tok_s", "prefill_tok_s", "time_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise FieldError(name, f"must be above 0, got {getattr(self, name)}")
        for name in ("context", "batch"):
            if getattr(self, name) < 1:
                raise FieldError(name, f"must be at least 1, got {getattr(self, name)}")
        for name in (
            "n_max",
            "weights_mib",
            "kv_kib_per_token",
            "draft_mib",
            "compute_mib",
            "draft_cost",
            "boot_s",
            "ending_after",
            "runtime_oom_tokens",
            "reasoning_tokens",
            "memory_spread_mib",
        ):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise FieldError(name, f"must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.acceptance <= 1:
            raise FieldError("acceptance", f"must be from 0 to 1, got {self.acceptance}")
        if self.ending not in ENDINGS:
            raise FieldError(
                "ending",
                f"must be a known ending, got {self.ending}"
                f"{suggestion(self.ending, tuple(ENDINGS))}",
            )


class Fake:
    """The engine with invented figures: for demonstrations, and for trying what uses engines."""

    name = NAME
    simulated = True
    roles: Mapping[str, Role] = MappingProxyType(
        {
            "context": Role.CONTEXT,
            "kv_type": Role.KV_DTYPE,
            "n_max": Role.DRAFT_LENGTH,
            "batch": Role.PREFILL_CHUNK,
            "flash_attn": Role.BACKEND,
        }
    )
    wire = Wire(
        completion_extras=Pairs(cache_prompt=False, ignore_eos=True),
        cached_extras=Pairs(cache_prompt=True),
        scoring="prompt_logprobs",
    )

    def settings(self, params: Mapping[str, Any]) -> FakeSettings:
        """Return the settings, checked; raises FieldError naming the wrong one."""
        return build(FakeSettings, params)

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set."""
        return tuple(field.name for field in dataclasses.fields(FakeSettings))

    def context_tokens(self, settings: FakeSettings) -> int:
        """Return the context length that these settings ask for, in tokens."""
        return settings.context

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options with a Python in them: this one, unless another is named."""
        if options.python is not None:
            return options
        return dataclasses.replace(options, python=sys.executable)

    def footprint(self, settings: FakeSettings, model: ModelFacts) -> Footprint:  # noqa: ARG002
        """Return the very sizes that the server will allocate, in bytes."""
        sizes = needed_bytes(
            context=settings.context,
            kv_type=settings.kv_type,
            n_max=settings.n_max,
            batch=settings.batch,
            weights_mib=settings.weights_mib,
            kv_kib_per_token=settings.kv_kib_per_token,
            draft_mib=settings.draft_mib,
            compute_mib=settings.compute_mib,
        )
        # Two configurations of different devices say nothing about each other.
        return Footprint(parts=Pairs(sizes), alike=Pairs(capacity_mib=settings.capacity_mib))

    def launch(
        self, settings: FakeSettings, model: ModelFacts, options: EngineOptions, port: int
    ) -> Launch:
        """Return the process of fake_server with every setting as a flag."""
        python = options.python if options.python is not None else sys.executable
        flags: list[str] = ["--port", str(port), "--model", model.served_name]
        for name in self.setting_names():
            flags += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
        program = (python, "-m", "sweeper.engines.fake_server")
        return Launch(
            argv=(*program, *flags, *options.extra_args),
            port_argument=len(program) + flags.index("--port") + 1,
            env=options.env,
            host=HOST,
            port=port,
            health_path=self.wire.health_path,
            boot_timeout_s=options.boot_timeout_s,
            stop_timeout_s=options.stop_timeout_s,
            memory_limit_bytes=options.memory_limit_bytes,
        )

    def milestone(self, line: str) -> Phase | None:
        """Return the phase that this line opens; a line may hold a whole progress bar."""
        opened = [
            phase
            for part in _parts([line])
            for beginning, phase in _MILESTONES
            if part.startswith(beginning)
        ]
        return opened[-1] if opened else None

    def told(self, line: str) -> tuple[int, int] | None:
        """Return how much of the weights is loaded, in percent."""
        found = re.findall(r"fake: loading weights (\d{1,3})%", line)
        return (int(found[-1]), 100) if found else None

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return the facts that a log shows, always with `simulated` and `engine_version`."""
        facts: dict[str, Scalar] = {"engine_version": VERSION, "simulated": True}
        for line in _parts(log):
            if found := re.fullmatch(r"fake: engine \S+ (\S+)", line):
                facts["engine_version"] = found[1]
            elif found := re.fullmatch(r"fake: settings (.*)", line):
                facts |= _settings_facts(found[1])
            elif found := re.fullmatch(r"fake: projected bytes .* capacity=(\d+)", line):
                facts["capacity_bytes"] = int(found[1])
            elif found := re.fullmatch(rf"fake: (\w+) buffer size = {_MIB_FIGURE} MiB", line):
                facts[f"{found[1]}_bytes"] = _bytes(found[2])
            elif found := re.fullmatch(r"fake: kv_cache pool holds (\d{1,18}) tokens", line):
                facts["kv_pool_tokens"] = int(found[1])
            elif line == _UNSPECULATIVE:
                facts["speculation"] = "off"
        sizes = [facts.get(f"{kind}_bytes") for kind in ("weights", "draft", "kv_cache", "compute")]
        if sizes[-1] is not None:  # the last one that it allocates
            facts["used_bytes"] = sum(size for size in sizes if isinstance(size, int))
        return Pairs(facts)

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end means: by how the process ended, how far it came, and its words."""
        reading = _read(list(log))
        match death.ended:
            case Ended.NOT_STARTED:
                return HostFault(
                    name=HostFaultName.ENGINE_NOT_FOUND,
                    finding=Finding(
                        phase=Phase.SPAWN,
                        cause=death.detail or "the process could not be started",
                        explanation="The Python that runs the simulated engine cannot be started.",
                    ),
                )
            case Ended.PORT_TAKEN:
                return _port_in_use(reading.phase, death.detail or "the port belongs to another")
            case Ended.LATE:
                return _late(death, reading)
            case Ended.SILENT:
                return Broken(
                    name=BrokenName.HANG_RUNTIME,
                    finding=Finding(
                        phase=Phase.SERVING,
                        cause=death.detail or "silence",
                        explanation=f"The server lives, but went silent: {death.detail}.",
                    ),
                )
            case Ended.LIVES:
                return Broken(
                    name=BrokenName.HTTP_500,
                    finding=Finding(
                        phase=Phase.SERVING,
                        cause=death.detail or "an error without words",
                        explanation="The server lives, but answered a request with an error.",
                    ),
                )
            case Ended.EXITED:
                # The log can know of readiness that no probe has seen yet.
                if death.was_ready or reading.phase.order >= Phase.READY.order:
                    return _died_serving(death, reading)
                return _died_booting(death, reading)
            case _:
                assert_never(death.ended)

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
        self, settings: FakeSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:  # fmt: skip
        """Return in what way that matters the running engine is not what was asked for."""
        del props
        pool = facts.get("kv_pool_tokens")
        if settings.n_max > 0 and facts.get("speculation") == "off":
            return Unfit(
                name=UnfitName.SILENT_FALLBACK,
                finding=Finding(
                    phase=Phase.READY,
                    cause=_UNSPECULATIVE,
                    explanation=f"Drafts of {settings.n_max} tokens were asked for, "
                    "and it serves without speculation.",
                    facts=Pairs(n_max=0),
                    try_next=Pairs(n_max=0),
                ),
            )
        if isinstance(pool, int) and pool < settings.context:
            return Unfit(
                name=UnfitName.DEGRADED_CAPACITY,
                finding=Finding(
                    phase=Phase.READY,
                    cause=f"fake: kv_cache pool holds {pool} tokens",
                    explanation=f"The pool of KV cache holds {pool} tokens, "
                    f"which is less than the window of {settings.context}.",
                    facts=Pairs(kv_pool_tokens=pool, context_tokens=settings.context),
                    try_next=Pairs(context=pool) if pool > 0 else Pairs(),
                ),
            )
        return None

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return speculation's counters; None for a server that does not speculate."""
        return draft_counters(metrics, "fake:")


# ---- Reading the log ---------------------------------------------------------------------------

_MILESTONES = (
    ("fake: engine ", Phase.SPAWN),
    ("fake: settings ", Phase.CONFIG),
    ("fake: opening device", Phase.DEVICE),
    ("fake: loading weights", Phase.WEIGHTS),
    ("fake: loading draft", Phase.WEIGHTS),
    ("fake: profiling memory", Phase.PROFILING),
    ("fake: allocating kv_cache", Phase.KV),
    ("fake: allocating compute", Phase.COMPUTE),
    ("fake: capturing graphs", Phase.CAPTURE),
    ("fake: warming up", Phase.WARMUP),
    ("fake: ready on ", Phase.READY),
    ("fake: request ", Phase.SERVING),
)

_MIB = r"\d{1,15}(?:\.\d{1,15})?"
_MIB_FIGURE = rf"({_MIB})"
_CANNOT_ALLOCATE = (
    rf"cannot allocate {_MIB_FIGURE} MiB for (\w+)(?: of (\d+) tokens)?, "
    rf"{_MIB_FIGURE} MiB free of {_MIB_FIGURE} MiB"
)

_OOM_BY_KIND = {
    "weights": (Phase.WEIGHTS, InfeasibleName.OOM_WEIGHTS),
    "draft": (Phase.WEIGHTS, InfeasibleName.OOM_DRAFT_HEAD),
    "activations": (Phase.PROFILING, InfeasibleName.OOM_ACTIVATION_PROFILING),
    "kv_cache": (Phase.KV, InfeasibleName.OOM_KV_CACHE),
    "compute": (Phase.COMPUTE, InfeasibleName.OOM_COMPUTE),
    "graphs": (Phase.CAPTURE, InfeasibleName.OOM_CUDAGRAPH_CAPTURE),
}

_PORT_IN_USE = "Another process listens on the port that this engine was to have."
_UNSPECULATIVE = "fake: warning: speculation was not initialised, serving without it"
_HOST_MEMORY_LOW = "fake: host memory low: killed by the out-of-memory killer"
_KILLED = (-9, 137, None)
"""Exit codes of what was killed: as a signal, as a shell says it, and where none is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """What a line means in the phase it stands in.

    Groups of the pattern fill the explanation and become facts: a number is an integer, and a
    `*_mib` a `*_bytes`. `judged` is the phase of the finding, where the log does not open it.
    """

    phase: Phase
    pattern: str
    name: InfeasibleName | BrokenName | HostFaultName
    explanation: str
    try_next: Pairs = Pairs()
    judged: Phase | None = None


_SIGNS = (
    _Sign(
        phase=Phase.SPAWN,
        # Arguments are read before anything is opened.
        judged=Phase.ARGS,
        pattern=r"error: (?:unknown )?argument:? (?P<argument>\S+?)(?::.*)?",
        name=InfeasibleName.BAD_ARGUMENT,
        explanation="The engine does not accept {argument} on its command line.",
    ),
    _Sign(
        phase=Phase.SPAWN,
        pattern=r"fake: cannot bind \S+: Address already in use",
        name=BrokenName.PORT_IN_USE,
        explanation=_PORT_IN_USE,
    ),
    _Sign(
        phase=Phase.CONFIG,
        pattern=r"fake: error: quantised KV cache needs flash attention",
        name=InfeasibleName.UNSUPPORTED_COMBINATION,
        explanation="A quantised KV cache works with flash attention only.",
        try_next=Pairs(flash_attn="on"),
    ),
    _Sign(
        phase=Phase.CONFIG,
        pattern=r"fake: error: model architecture (?P<architecture>\S+) is not known",
        name=InfeasibleName.MODEL_UNSUPPORTED_ARCH,
        explanation="This engine cannot run models of the architecture {architecture}.",
    ),
    _Sign(
        phase=Phase.CONFIG,
        pattern=r"fake: driver version mismatch",
        name=HostFaultName.DRIVER_MISMATCH,
        explanation="The driver does not match, which no configuration can cure: "
        "update it or reboot the host.",
    ),
    _Sign(
        phase=Phase.CONFIG,
        pattern=r"fake: model not found: (?P<model>.+)",
        name=HostFaultName.MODEL_NOT_FOUND_OR_GATED,
        explanation="The model {model} is not there: check its path.",
    ),
    _Sign(
        phase=Phase.DEVICE,
        pattern=rf"fake: error: device is in use by others: (?P<free_mib>{_MIB}) MiB free "
        rf"of (?P<capacity_mib>{_MIB}) MiB",
        name=BrokenName.GPU_MEMORY_CONTENDED,
        explanation="Other processes hold the memory of the device: "
        "{free_mib} MiB are left of {capacity_mib} MiB.",
    ),
    _Sign(
        phase=Phase.DEVICE,
        pattern=r"fake: error: no space left in shared memory for (?P<workers>\d+) worker",
        name=BrokenName.SHM_EXHAUSTED,
        explanation="Shared memory is used up: enlarge /dev/shm or remove what was left in it.",
    ),
    _Sign(
        phase=Phase.WEIGHTS,
        pattern=r"fake: error: cannot unpack weights: no space left on disk",
        name=HostFaultName.DISK_FULL,
        explanation="The disk is full, which no configuration can cure: make room on it.",
    ),
    _Sign(
        phase=Phase.PROFILING,
        pattern=r"fake: error: cache of compiled graphs is damaged: graph (?P<graph>\d+)",
        name=BrokenName.COMPILE_CACHE_CORRUPT,
        explanation="The cache of compiled graphs is damaged at graph {graph}: remove it.",
    ),
    _Sign(
        phase=Phase.KV,
        pattern=r"fake: error: (?P<sequences>\d+) sequences at once exceed (?P<blocks>\d+) blocks",
        name=InfeasibleName.CAPACITY_MAX_NUM_SEQS,
        explanation="The KV cache has {blocks} blocks, too few for {sequences} sequences at once.",
    ),
    _Sign(
        phase=Phase.WARMUP,
        pattern=r"fake: error: cannot compile a kernel: there is no (?P<compiler>\S+)",
        name=HostFaultName.TOOLCHAIN_JIT_FAILURE,
        explanation="Kernels are compiled by {compiler}, and it is not there: install it.",
    ),
    _Sign(
        phase=Phase.WARMUP,
        pattern=r"fake: error: chat template ends inside of a block",
        name=BrokenName.CHAT_TEMPLATE_FAILURE,
        explanation="The chat template of the model cannot be read.",
    ),
)

_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A log read once: how far it came and what it said since, and what it had been told.

    Only `since` can hold the cause of an end: a complaint that the boot went past was survived.
    `settings` and `projected_bytes` are empty where the log does not show them.
    """

    phase: Phase
    since: tuple[str, ...]
    lines: tuple[str, ...]
    settings: Mapping[str, Scalar]
    projected_bytes: Mapping[str, int]


def _parts(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log, those of its progress bars one by one, without blank ones."""
    for line in log:
        for part in re.split(r"[\r\n]+", line):
            if part.strip():
                yield part.strip()


def _read(log: Iterable[str]) -> _Reading:
    phase = Phase.SPAWN
    lines: list[str] = []
    since: list[str] = []
    settings: dict[str, Scalar] = {}
    projected: dict[str, int] = {}
    for line in _parts(log):
        lines.append(line)
        opened = next((each for start, each in _MILESTONES if line.startswith(start)), None)
        if opened is not None:
            # With several requests at once a line of one may come after the last words of another.
            if opened is not phase:
                since.clear()
            phase = opened
        else:
            since.append(line)
        if found := re.fullmatch(r"fake: settings (.*)", line):
            settings |= _settings_facts(found[1])
        elif found := re.fullmatch(r"fake: projected bytes (.*)", line):
            projected |= {name: int(size) for name, size in _assignments(found[1])}
    return _Reading(
        phase=phase,
        since=tuple(since),
        lines=tuple(lines),
        settings=settings,
        projected_bytes=projected,
    )


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def _settings_facts(text: str) -> dict[str, Scalar]:
    """Return the settings line's facts, with the unit of the context in its name."""
    facts: dict[str, Scalar] = {}
    for name, value in _assignments(text):
        if name == "context":
            facts["context_tokens"] = int(value)
        elif name == "kv_bytes_per_token":
            facts[name] = float(value)
        else:
            facts[name] = int(value) if value.isdecimal() else value
    return facts


def _bytes(mib: str) -> int:
    return round(float(mib) * MIB)


# ---- Verdicts ----------------------------------------------------------------------------------


def _port_in_use(phase: Phase, cause: str) -> Failure:
    return Broken(
        name=BrokenName.PORT_IN_USE,
        finding=Finding(
            phase=phase,
            cause=cause,
            explanation=_PORT_IN_USE,
        ),
    )


def _late(death: Death, reading: _Reading) -> Failure:
    silent = reading.phase is Phase.SPAWN
    last = reading.lines[-1] if reading.lines else "it printed nothing"
    return Broken(
        name=BrokenName.HANG_BOOT if silent else BrokenName.BOOT_TIMEOUT,
        finding=Finding(
            phase=reading.phase,
            cause=last,
            explanation=(
                f"The boot never began in {death.after_s:.0f} s."
                if silent
                else f"The boot was still in the phase {reading.phase} after {death.after_s:.0f} s."
            ),
            facts=Pairs(waited_s=death.after_s),
        ),
    )


def _died_booting(death: Death, reading: _Reading) -> Failure:
    """Return why a process ended before it was ready: the first cause in its last phase."""
    for line in reading.since:
        failure = _known_cause(line, reading)
        if failure is not None and death.exit_code != 0:
            return failure
    if _HOST_MEMORY_LOW in reading.since and death.exit_code in _KILLED:
        return Infeasible(
            name=InfeasibleName.HOST_RAM_OOM,
            finding=Finding(
                phase=reading.phase,
                cause=_HOST_MEMORY_LOW,
                explanation="The host ran out of memory, and its kernel killed the process.",
            ),
        )
    if death.limit_bytes is not None and any(
        re.match(r"MemoryError\b", line) for line in reading.since
    ):
        return Infeasible(
            name=InfeasibleName.HOST_RAM_OOM,
            finding=Finding(
                phase=reading.phase,
                cause="MemoryError",
                explanation="The process met the limit that the study sets on its address space.",
                facts=Pairs(limit_bytes=death.limit_bytes),
            ),
        )
    return Broken(
        name=BrokenName.ENGINE_CRASH,
        finding=Finding(
            phase=reading.phase,
            cause=_last_words(reading),
            explanation=(
                f"The engine {_ended_how(death)} in the phase {reading.phase}, before it was ready,"
                " and nothing in its log says why that should be the configuration's fault."
            ),
            facts=_exit_facts(death),
        ),
    )


def _died_serving(death: Death, reading: _Reading) -> Failure:
    """Return why a process ended after it was ready."""
    for line in reading.since:
        if found := re.fullmatch(rf"fake: out of memory at runtime: {_CANNOT_ALLOCATE}", line):
            prompt_tokens = int(found[3]) if found[3] is not None else None
            facts = _memory_facts(found)
            largest: int | None = None
            if prompt_tokens is not None:
                facts = facts.with_(prompt_tokens=prompt_tokens)
                # The need of a prefill grows with its tokens, so what was free held this many.
                needed = float(found[1])
                largest = math.floor(prompt_tokens * float(found[4]) / needed) if needed else None
            return Infeasible(
                name=InfeasibleName.OOM_RUNTIME,
                finding=Finding(
                    phase=Phase.SERVING,
                    cause=line,
                    explanation="It booted, but a prompt needed more memory than was left then.",
                    facts=facts,
                    try_next=Pairs(context=largest) if largest else Pairs(),
                ),
            )
    return Broken(
        name=BrokenName.ENGINE_DIED_MID_BENCHMARK,
        finding=Finding(
            phase=Phase.SERVING,
            cause=_last_words(reading),
            explanation=f"The engine {_ended_how(death)} after it was ready.",
            facts=_exit_facts(death),
        ),
    )


def _known_cause(line: str, reading: _Reading) -> Failure | None:
    """Return what this line means in the phase it stands in; None if nothing there."""
    if found := re.fullmatch(rf"fake: {_CANNOT_ALLOCATE}", line):
        return _out_of_memory(found, line, reading)
    for sign in _SIGNS:
        if sign.phase is reading.phase and (found := re.fullmatch(sign.pattern, line)):
            said = found.groupdict()
            finding = Finding(
                phase=sign.judged or sign.phase,
                cause=line,
                explanation=sign.explanation.format(**said),
                facts=Pairs(dict(_fact(*each) for each in said.items())),
                try_next=sign.try_next,
            )
            return _named(sign.name, finding)
    return None


def _fact(name: str, said: str) -> tuple[str, Scalar]:
    if name.endswith("_mib"):
        return f"{name.removesuffix('_mib')}_bytes", _bytes(said)
    return name, int(said) if re.fullmatch(r"[0-9]{1,18}", said) else said


def _named(name: InfeasibleName | BrokenName | HostFaultName, finding: Finding) -> Failure:
    match name:
        case InfeasibleName():
            return Infeasible(name=name, finding=finding)
        case BrokenName():
            return Broken(name=name, finding=finding)
        case HostFaultName():
            return HostFault(name=name, finding=finding)
        case _:
            assert_never(name)


def _out_of_memory(found: re.Match[str], line: str, reading: _Reading) -> Failure | None:
    kind = found[2]
    if kind not in _OOM_BY_KIND:
        return None
    phase, name = _OOM_BY_KIND[kind]
    if phase is not reading.phase:
        return None  # the words of a phase that has passed, or that has not come
    return Infeasible(
        name=name,
        finding=Finding(
            phase=phase,
            cause=line,
            explanation=(
                f"The {kind.replace('_', ' ')} needs {found[1]} MiB "
                f"where {found[4]} MiB are left of {found[5]} MiB."
            ),
            facts=_memory_facts(found),
            try_next=_what_would_fit(kind, reading),
        ),
    )


def _memory_facts(found: re.Match[str]) -> Pairs:
    required, free = _bytes(found[1]), _bytes(found[4])
    return Pairs(
        required_bytes=required,
        free_bytes=free,
        shortfall_bytes=required - free,
        capacity_bytes=_bytes(found[5]),
    )


def _what_would_fit(kind: str, reading: _Reading) -> Pairs:
    """Return one setting that makes everything fit, as far as the log tells the sizes."""
    needed = reading.projected_bytes
    if kind not in needed:
        return Pairs()  # a need that the engine itself finds out only then
    if not {"weights", "draft", "kv_cache", "compute", "capacity"} <= needed.keys():
        return Pairs()
    spare = needed["capacity"] - sum(size for part, size in needed.items() if part != "capacity")
    if kind == "draft" and spare + needed["draft"] >= 0:
        return Pairs(n_max=0)
    batch = reading.settings.get("batch")
    if kind == "compute" and isinstance(batch, int) and needed["compute"] > 0:
        smaller = math.floor(batch * (spare + needed["compute"]) / needed["compute"]) // 32 * 32
        if smaller > 0:
            return Pairs(batch=smaller)
    per_token = reading.settings.get("kv_bytes_per_token")
    if kind != "weights" and isinstance(per_token, float) and per_token > 0:
        context = _largest_context(spare + needed["kv_cache"], per_token)
        if context > 0:
            return Pairs(context=context)
    return Pairs()


def _largest_context(room_bytes: int, bytes_per_token: float) -> int:
    """Return the most tokens whose KV cache fits the room, at least 0."""
    context = max(0, math.floor(room_bytes / bytes_per_token))
    # The division may round up by one; what the server will compute decides.
    while context > 0 and math.ceil(context * bytes_per_token) > room_bytes:
        context -= 1
    return context


def _last_words(reading: _Reading) -> str:
    """Return the line that names an exception, else the last line, of what was said last."""
    said = [line for line in reading.since if re.match(r"\w+(?:Error|Exception)\b", line)]
    if said:
        return said[0]
    return reading.lines[-1] if reading.lines else "it printed nothing"


def _ended_how(death: Death) -> str:
    code = death.exit_code
    if code is None:
        return "ended"
    if code < 0:
        return f"was ended by {_SIGNAL_NAMES.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


def _exit_facts(death: Death) -> Pairs:
    return Pairs() if death.exit_code is None else Pairs(exit_code=death.exit_code)
