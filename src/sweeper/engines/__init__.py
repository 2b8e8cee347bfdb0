"""The Engine protocol: all that sweeper asks of an inference engine, and where engines are found.

An adapter knows; it does not *do*. It turns settings into a command line, and what a process
printed into a verdict, without starting, waiting for, or calling anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from sweeper.core.architecture import Architecture, CannotTell, from_facts
from sweeper.core.evidence import Role
from sweeper.core.launch import Attach, Death, Launch, Phase
from sweeper.core.memory import Estimate, Footprint, estimate_of
from sweeper.core.outcome import Diagnosis, Failure, Unfit
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.sample import DraftCounters
from sweeper.core.space import suggestion

ENTRY_POINTS = "sweeper.engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model to be served: where it is, and what its own files say of it.

    `facts` are an adapter's reading of the files (layers, KV heads, trained context); `draft_path`
    is the draft model of speculation, where the study names one.
    """

    name: str
    path: str
    served_name: str
    size_bytes: int
    sha256: str
    facts: Pairs = Pairs()
    draft_path: str | None = None
    draft_size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a study says of the engine beside its settings: where it is and how it is started.

    `binary` and `python` are paths found before the study starts. `env` is added to the engine's
    environment, `prefix` goes before its command line (a container, a wrapper that applies
    patches), `extra_args` to the end of it. With `detached` the server runs outside the process
    tree of what is started, and `stop_command` makes sure it is gone: `docker rm -f NAME`.
    """

    binary: str | None = None
    python: str | None = None
    env: Pairs = Pairs()
    prefix: tuple[str, ...] = ()
    detached: bool = False
    stop_command: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    boot_timeout_s: float = 600.0
    first_request_timeout_s: float = 600.0
    stop_timeout_s: float = 10.0
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How to talk to the engine over HTTP; paths start with a slash, None where it has no such.

    `completion_extras` are added to every measuring request (ignore the end of text, keep the
    prompt cache out); `cached_extras` replace some of them where the prompt cache is what is
    measured. `cache_variables` name the environment variables of folders that the engine
    caches compiled code in: each study gets its own. `tokenize_text_key` and
    `tokenize_tokens_key` name the fields of the tokenizer endpoint, `tokenize_special_key` the one
    that says whether the beginning of text and its like are put around it.

    `scoring` is how the engine tells the probabilities of a given text, None where it cannot: of
    all tokens of a prompt at once (`prompt_logprobs`, as vLLM has it), or of the next token, which
    a bias makes it sample (`next_token`, as llama.cpp's own endpoint does). `scoring_path` is where
    it is asked; None: where completions are.
    """

    health_path: str = "/health"
    completions_path: str = "/v1/completions"
    chat_path: str = "/v1/chat/completions"
    metrics_path: str | None = "/metrics"
    props_path: str | None = None
    cache_variables: tuple[str, ...] = ()
    tokenize_path: str | None = "/tokenize"
    tokenize_text_key: str = "prompt"
    tokenize_tokens_key: str = "tokens"
    tokenize_special_key: str | None = None
    tokenize_extras: Pairs = Pairs()
    completion_extras: Pairs = Pairs()
    cached_extras: Pairs = Pairs()
    scoring: Literal["prompt_logprobs", "next_token"] | None = None
    scoring_path: str | None = None


class Engine(Protocol):
    """What an adapter offers. Every method is pure, but for `find`, which looks at this host."""

    name: str
    simulated: bool
    """True for an engine whose figures are invented; every record of it says so."""
    wire: Wire

    def settings(self, params: Mapping[str, Any]) -> Any:
        """Return the engine's own frozen settings; raises FieldError naming the wrong one."""
        ...

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set."""
        ...

    def context_tokens(self, settings: Any) -> int:
        """Return the context length that these settings ask for, in tokens."""
        ...

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options with every program found on this host, or why none is there."""
        ...

    def footprint(self, settings: Any, model: ModelFacts) -> Footprint:
        """Return what these settings ask of memory, from what is known before a boot."""
        ...

    def launch(
        self, settings: Any, model: ModelFacts, options: EngineOptions, port: int
    ) -> Launch | Attach:
        """Return the one process that serves the model with these settings, or where one is."""
        ...

    def milestone(self, line: str) -> Phase | None:
        """Return the phase that this line of the log opens, if it opens one."""
        ...

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return the facts that a log shows, by name with the unit in it."""
        ...

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end of an engine means, from its log and how the process ended.

        The log may be long: it is read once, from top to bottom, and not kept.
        """
        ...

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process.

        `exit_code` is negative for a signal, None where it is not known or the process lives. A
        log of an engine that came up is Nothing; one of another program is Broken as unknown.
        """
        ...

    def contradiction(self, settings: Any, facts: Pairs, props: str | None) -> Unfit | None:
        """Return in what way that matters the running engine is not what was asked for.

        `facts` is the evidence of its log, `props` the text of its properties page, if it has one.
        """
        ...

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return speculation's counters from the metrics page; None where it counts none."""
        ...


@runtime_checkable
class Described(Protocol):
    """An adapter that learns from the study how its engine talks, before all else."""

    def for_study(self, params: Mapping[str, Any]) -> Engine:
        """Return the adapter for the engine that these parameters describe; raises FieldError."""
        ...


@runtime_checkable
class Estimating(Protocol):
    """An adapter that knows how much its engine needs, not only what needs more."""

    def estimate(self, settings: Any, model: ModelFacts) -> Estimate:
        """Return what these settings need of memory by component, before any boot."""
        ...

    def shown(self, settings: Any, evidence: Pairs) -> Pairs:
        """Return the components that a boot printed in bytes, by the names of the estimate."""
        ...


@runtime_checkable
class Sharing(Protocol):
    """An adapter whose engine is told how much of a card it may take."""

    def share(self, settings: Any) -> float:
        """Return the share of a card's memory that these settings let the engine take."""
        ...


@runtime_checkable
class Choosy(Protocol):
    """An adapter that can tell from a model's facts that it will not be served in some way."""

    def refusal(self, settings: Any, model: ModelFacts) -> str | None:
        """Return in words why this model is not served with these settings, None if it may be."""
        ...


@runtime_checkable
class Telling(Protocol):
    """An adapter whose engine says how much of a phase of its boot is done."""

    def told(self, line: str) -> tuple[int, int] | None:
        """Return how many of how many parts are done, as this line says; (43, 100) for 43 %."""
        ...


@runtime_checkable
class Templated(Protocol):
    """An adapter whose engine serves a chat without the model's template, by another one."""

    def foreign_template(self, facts: Pairs, props: str | None) -> str | None:
        """Return what shows that chats go through a template that is not the model's, or None.

        `facts` is the evidence of its log, `props` the text of its properties page, if it has one.
        """
        ...


def foreign_template(engine: Engine, facts: Pairs, props: str | None) -> str | None:
    """Return what shows that chats go through a template that is not the model's, or None."""
    return engine.foreign_template(facts, props) if isinstance(engine, Templated) else None


def without_template(workload: str, model: str) -> str:
    """Return in words that a chat is asked of a model without a template, and what to do."""
    return (
        f"workload {workload} asks a chat, and {model} has no chat template: a server refuses that "
        "or takes a template that the model does not know, and the answers represent nothing; ask "
        "plain completions (workload.api=completion, or a workload that does), or give the engine "
        "a template (engine.extra_args=[--chat-template,NAME])"
    )


def capacity_of(engine: Engine, settings: Any, device_memory_bytes: float) -> float:
    """Return the part of a card's memory that the engine takes with these settings, in bytes."""
    share = engine.share(settings) if isinstance(engine, Sharing) else 1.0
    return share * device_memory_bytes


def refusal_of(engine: Engine, settings: Any, model: ModelFacts) -> str | None:
    """Return in words why a model is not served with these settings, None if it may be."""
    return engine.refusal(settings, model) if isinstance(engine, Choosy) else None


def no_draft_layers(model: ModelFacts) -> str | None:
    """Return that the model cannot draft by itself, where its facts say so."""
    if model.facts.get("draft_layers") != 0:
        return None
    return (
        "the checkpoint has no draft layers (draft_layers is 0), so the model cannot draft for "
        "itself"
    )


@runtime_checkable
class Knowing(Protocol):
    """An adapter that says what its settings do to an engine, which a search can build upon."""

    roles: Mapping[str, Role]
    """By the name of the setting; those without one are other."""


def role_of(engine: Engine, setting: str) -> Role:
    """Return what a setting does to the engine, `other` where nobody says."""
    return engine.roles.get(setting, Role.OTHER) if isinstance(engine, Knowing) else Role.OTHER


def told(engine: Engine, line: str) -> tuple[int, int] | None:
    """Return how many of how many parts of a phase are done, where a line of the log says so."""
    found = engine.told(line) if isinstance(engine, Telling) else None
    return found if found is not None and 0 <= found[0] <= found[1] and found[1] > 0 else None


@runtime_checkable
class Clocked(Protocol):
    """An adapter whose engine keeps the time of its requests on its metrics page."""

    def clocks(self, metrics: str) -> Pairs:
        """Return sums since the engine started: `requests`, and `decode_s` and `ttft_s` of them.

        `decode_s` runs from the first token of a request to its last. Empty where it keeps none.
        """
        ...


def estimated(engine: Engine, settings: Any, model: ModelFacts) -> Estimate:
    """Return what these settings need of memory by component, each with its spread."""
    if isinstance(engine, Estimating):
        return engine.estimate(settings, model)
    return estimate_of(engine.footprint(settings, model))


def shown(engine: Engine, settings: Any, evidence: Pairs) -> Pairs:
    """Return the components that a boot printed in bytes, by the names of the estimate."""
    if isinstance(engine, Estimating):
        return engine.shown(settings, evidence)
    sizes = {name: size for name, size in evidence.items() if name.endswith("_bytes")}
    return Pairs({name.removesuffix("_bytes"): size for name, size in sizes.items()})


def architecture_of(model: ModelFacts) -> Architecture | None:
    """Return what the model's caches hold, None where its facts do not tell."""
    try:
        return from_facts(model.facts)
    except CannotTell:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandParts:
    """A recorded command line taken apart, for recipes that are no command line.

    The words from `start` on start the engine (a container or a wrapper stands before it), those
    from `flags_at` on are its flags: `flags` has each of them with its values, as recorded.
    """

    start: int
    flags_at: int
    model: str
    served_name: str
    flags: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The engine in a container: a public image, None where none is known, and what starts it."""

    image: str | None
    entrypoint: tuple[str, ...]


@runtime_checkable
class Deployable(Protocol):
    """An adapter that knows other ways to deploy its engine than by its command line.

    `recipe_forms` are the formats of recipes that are made for this engine, beside those for any;
    `runtime` is its name in sparkrun, `setting_notes` what its settings are for, in a few words.
    """

    recipe_forms: frozenset[str]
    runtime: str
    setting_notes: Mapping[str, str]

    def command_parts(self, argv: tuple[str, ...]) -> CommandParts | None:
        """Return a command line of this engine taken apart; None where it is none that we made."""
        ...

    def container(self, parts: CommandParts, argv: tuple[str, ...], facts: Pairs) -> Container:
        """Return the engine's own image for this command; `facts` are the engine's and the host's.

        The host's have `gpu` where it has a card.
        """
        ...


def engine_names() -> tuple[str, ...]:
    """Return the names of all installed adapters."""
    from importlib.metadata import entry_points

    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINTS)}))


def load_engine(name: str, params: Mapping[str, Any] | None = None) -> Engine:
    """Return the adapter of that name, for a study with these parameters if they are given.

    Raises LookupError naming the adapters there are, and FieldError for a parameter that
    describes the engine wrongly.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            engine: Engine = point.load()()
            if params is not None and isinstance(engine, Described):
                return engine.for_study(params)
            return engine
    raise LookupError(f"there is no engine called {name}{suggestion(name, engine_names())}")


__all__ = [
    "ENTRY_POINTS",
    "Choosy",
    "Clocked",
    "CommandParts",
    "Container",
    "Deployable",
    "Described",
    "Engine",
    "EngineOptions",
    "Estimating",
    "Knowing",
    "ModelFacts",
    "Scalar",
    "Sharing",
    "Telling",
    "Templated",
    "Wire",
    "architecture_of",
    "capacity_of",
    "engine_names",
    "estimated",
    "foreign_template",
    "load_engine",
    "no_draft_layers",
    "refusal_of",
    "role_of",
    "shown",
    "told",
    "without_template",
]
