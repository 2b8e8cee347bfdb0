"""Any OpenAI-compatible server, started by a command template in YAML, or attached to as it runs.

What other adapters know of their engine, here the study says: what the command line is, which
lines of the log open a phase, which words mean which ending. What it does not say is not guessed:
an unknown end stays a crash, with the last words of the log.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import math
import re
import shutil
import string
import sys
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, assert_never

from sweeper.core.evidence import Role
from sweeper.core.launch import Attach, Death, Ended, Launch, Phase
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
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.sample import DraftCounters
from sweeper.core.space import suggestion
from sweeper.core.typed import FieldError, build
from sweeper.engines import EngineOptions, ModelFacts, Wire, architecture_of

HOST = "127.0.0.1"

FILLED = ("port", "host", "model", "draft_model", "served_name", "python", "binary")
"""Placeholders that sweeper fills; `context` is filled as well, and is a setting."""

Argument: TypeAlias = str | int | float
Template: TypeAlias = tuple[Argument | tuple[Argument, ...], ...]

_COUNTERS = ("steps", "drafted", "accepted", "accepted_per_position")
_PATHS = (
    "health_path", "completions_path", "chat_path", "metrics_path", "props_path", "tokenize_path",
)  # fmt: skip
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox")
_PRIVATE = tuple(
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
_TAIL_LINES = 200


# ---- Settings ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How an engine talks, in HTTP and in its log: the same for every point of a study.

    `milestones` are `{phase, pattern}`: the line that opens a phase; `ready` is the pattern of the
    phase ready. `signs` are `{pattern, outcome}`, with a `phase` where the words mean this there
    only. `facts` maps names (`engine_version`, `kv_cache_bytes`) to patterns with one group.
    `counters` names the metrics that count `steps`, `drafted`, `accepted` and, if there is one,
    `accepted_per_position`. `request` is added to every measuring request.
    """

    health_path: str = "/health"
    completions_path: str = "/v1/completions"
    chat_path: str = "/v1/chat/completions"
    metrics_path: str | None = "/metrics"
    props_path: str | None = "/v1/models"
    tokenize_path: str = "/tokenize"
    tokenize_text_key: str = "prompt"
    tokenize_tokens_key: str = "tokens"
    tokenize_extras: Mapping[str, Scalar] = Pairs()
    request: Mapping[str, Scalar] = Pairs()
    cache_variables: tuple[str, ...] = ()
    ready: str | None = None
    milestones: tuple[Mapping[str, str], ...] = ()
    signs: tuple[Mapping[str, str], ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokenize_extras", "request", "facts", "counters"):
            object.__setattr__(self, name, Pairs(getattr(self, name)))
        for name in ("milestones", "signs"):
            object.__setattr__(self, name, tuple(Pairs(each) for each in getattr(self, name)))
        for name in _PATHS:
            path = getattr(self, name)
            if path is not None and not path.startswith("/"):
                raise FieldError(name, f"must start with a slash, got {path}")
        if self.ready is not None:
            _pattern("ready", self.ready)
        opened = {Phase.SPAWN, Phase.READY, Phase.SERVING}
        for i, each in enumerate(self.milestones):
            key = f"milestones[{i}]"
            _only_keys(key, each, needed=("phase", "pattern"))
            opened.add(_phase(f"{key}.phase", each["phase"]))
            _pattern(f"{key}.pattern", each["pattern"])
        for i, each in enumerate(self.signs):
            key = f"signs[{i}]"
            _only_keys(key, each, needed=("pattern", "outcome"), optional=("phase",))
            _pattern(f"{key}.pattern", each["pattern"])
            _outcome_name(f"{key}.outcome", each["outcome"])
            if "phase" in each and _phase(f"{key}.phase", each["phase"]) not in opened:
                raise FieldError(f"{key}.phase", f"{each['phase']} is opened by no milestone")
        for name, pattern in self.facts.items():
            if _pattern(f"facts.{name}", pattern).groups != 1:
                raise FieldError(f"facts.{name}", "must have one group: (...) around what is read")
        for name in self.counters:
            if name not in _COUNTERS:
                raise FieldError(
                    f"counters.{name}", f"is no counter of drafts{suggestion(name, _COUNTERS)}"
                )
        for name in _COUNTERS[:3]:
            if self.counters and name not in self.counters:
                raise FieldError(f"counters.{name}", "is missing: without it the others say little")

    def wire(self) -> Wire:
        """Return the HTTP half of it."""
        return Wire(
            health_path=self.health_path,
            completions_path=self.completions_path,
            chat_path=self.chat_path,
            metrics_path=self.metrics_path,
            props_path=self.props_path,
            cache_variables=self.cache_variables,
            tokenize_path=self.tokenize_path,
            tokenize_text_key=self.tokenize_text_key,
            tokenize_tokens_key=self.tokenize_tokens_key,
            tokenize_extras=Pairs(self.tokenize_extras),
            completion_extras=Pairs(self.request),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings(Dialect):
    """One configuration: a command template with its values, or the address of a running server.

    Each argument of `command` may hold `{name}` placeholders; `{{` and `}}` are braces. An argument
    with a placeholder that is null is left out. An element that is a list is a group: left out
    whole if a placeholder in it is null or false, and one that is true and an argument of its own
    vanishes, so that `[--flag, "{name}"]` is a switch for true and false.
    """

    context: int = 4096
    command: Template = ()
    url: str | None = None
    values: Mapping[str, Scalar] = Pairs()

    def __post_init__(self) -> None:
        Dialect.__post_init__(self)  # super() does not know a class that slots made anew
        object.__setattr__(self, "values", Pairs(self.values))
        if self.context < 2:
            raise FieldError("context", f"must be at least 2, got {self.context}")
        if self.url is not None and self.command:
            raise FieldError("url", "is of a running server, so command would never run: give one")
        if self.url is not None:
            object.__setattr__(self, "url", _checked_url(self.url))
        elif not self.command:
            raise FieldError("command", "is needed to start a server, or url to attach to one")
        used = _placeholders(self.command)
        for name in self.values:
            _check_free_name(f"values.{name}", name)
            if name not in used:
                raise FieldError(f"values.{name}", _unused(name, used))
        known = (*FILLED, "context", *self.values)
        for name, place in used.items():
            if name not in known:
                raise FieldError(
                    place,
                    f"{{{name}}} is not known{suggestion(name, known)}; give it under values, or "
                    f"an axis that sets {name}",
                )
        if self.command and "port" not in used:
            raise FieldError("command", "has no {port}: sweeper chooses a free one for every boot")


_FIELDS = tuple(each.name for each in fields(OpenAiSettings))
_DIALECT = tuple(each.name for each in fields(Dialect))


def _only_keys(
    key: str, given: Mapping[str, str], *, needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    for name in given:
        if name not in (*needed, *optional):
            raise FieldError(
                f"{key}.{name}", f"is not a key of it{suggestion(name, (*needed, *optional))}"
            )
    for name in needed:
        if name not in given:
            raise FieldError(f"{key}.{name}", "is missing")


def _pattern(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FieldError(key, f"is not a regular expression: {error}: {pattern}") from None


def _phase(key: str, name: str) -> Phase:
    names = tuple(each.value for each in Phase)
    if name not in names:
        raise FieldError(key, f"{name} is not a phase{suggestion(name, names)}")
    return Phase(name)


_ENDINGS: tuple[type[InfeasibleName | BrokenName | HostFaultName], ...] = (
    InfeasibleName, BrokenName, HostFaultName,
)  # fmt: skip


def _outcome_name(key: str, name: str) -> InfeasibleName | BrokenName | HostFaultName:
    for kind in _ENDINGS:
        for each in kind:
            if each.value == name:
                return each
    names = tuple(each.value for kind in _ENDINGS for each in kind)
    raise FieldError(key, f"{name} is not an ending{suggestion(name, names)}")


def _checked_url(url: str) -> str:
    """Return the base address without a slash at its end; raises FieldError for a wrong one."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise FieldError("url", f"must be plain letters without spaces, got {url!r}")
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise FieldError("url", f"is not an address: {error}") from None
    if "@" in parts.netloc:
        # Not repeated here: what stands before the @ may be a password.
        raise FieldError("url", "must not hold a user or a password: it is written to records")
    if parts.scheme not in ("http", "https") or not host:
        raise FieldError("url", f"must look like http://127.0.0.1:8000, got {url}")
    if parts.query or parts.fragment:
        raise FieldError("url", f"must end with the port or a path, got {url}")
    if not _is_near(host):
        raise FieldError(
            "url",
            f"{host} is neither this machine nor a private address (10., 172.16-31., 192.168., "
            "fc00::); write an address, not a name",
        )
    if re.search(r"/v1/?$", parts.path):
        raise FieldError("url", f"must be given without /v1, which is in the paths, got {url}")
    return url.rstrip("/")


def _is_near(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(address in network for network in _PRIVATE)


# ---- The command template ----------------------------------------------------------------------


def _pieces(argument: Argument, place: str) -> tuple[tuple[str, str | None], ...]:
    """Return the argument as literal text and, after each, the placeholder's name or None."""
    pieces = []
    hint = "write {{ and }} for braces that are meant"
    try:
        for literal, name, spec, conversion in string.Formatter().parse(str(argument)):
            if name is not None and (spec or conversion or not name.isidentifier()):
                raise FieldError(place, f"{{{name}...}} is not a placeholder; {hint}")
            pieces.append((literal, name))
    except ValueError as error:
        if isinstance(error, FieldError):
            raise
        raise FieldError(place, f"{argument}: {error}; {hint}") from None
    return tuple(pieces)


def _names(argument: Argument, place: str) -> tuple[str, ...]:
    return tuple(name for _, name in _pieces(argument, place) if name is not None)


def _placeholders(command: Template) -> dict[str, str]:
    """Return every placeholder of a template, with the place where it comes first."""
    found: dict[str, str] = {}
    for i, element in enumerate(command):
        for argument in element if isinstance(element, tuple) else (element,):
            for name in _names(argument, f"command[{i}]"):
                found.setdefault(name, f"command[{i}]")
    return found


def _check_free_name(key: str, name: str) -> None:
    if name in (*FILLED, *_FIELDS):
        raise FieldError(key, f"cannot be set here: {name} is filled by sweeper or a setting")
    if not name.isidentifier():
        raise FieldError(key, "must be a name of letters, digits and underscores")


def _unused(name: str, used: Iterable[str]) -> str:
    free = [each for each in used if each not in FILLED]
    return (
        f"is neither a setting of this engine nor a placeholder in command, so it would change "
        f"nothing{suggestion(name, (*free, *_FIELDS))}"
    )


def _rendered(command: Template, values: Mapping[str, Scalar]) -> Iterator[tuple[str, bool]]:
    """Yield every argument that is not left out, and whether the port is in it."""
    for i, element in enumerate(command):
        place = f"command[{i}]"
        if isinstance(element, tuple):
            names = [name for each in element for name in _names(each, place)]
            if any(values[name] is None or values[name] is False for name in names):
                continue
            for each in element:
                alone = _alone(each, place)
                if alone is None or values[alone] is not True:
                    yield _filled(each, values, place)
            continue
        missing = next((name for name in _names(element, place) if values[name] is None), None)
        if missing is None:
            yield _filled(element, values, place)
            continue
        before = command[i - 1] if i else ""
        if (
            _alone(element, place)
            and isinstance(before, str)
            and re.fullmatch(r"-[^={}]*", before) is not None
        ):
            raise FieldError(
                missing,
                f"is null, which would leave {before} without its value: write it as a group, "
                f'- [{before}, "{{{missing}}}"]',
            )


def _alone(argument: Argument, place: str) -> str | None:
    """Return the placeholder that is the whole argument, None where there is more or none."""
    match _pieces(argument, place):
        case (("", name),):
            return name
        case _:
            return None


def _filled(argument: Argument, values: Mapping[str, Scalar], place: str) -> tuple[str, bool]:
    pieces = _pieces(argument, place)
    filled = "".join(
        literal + ("" if name is None else text(values[name])) for literal, name in pieces
    )
    if "\0" in filled:
        raise FieldError(place, "holds a null character, which no argument can")
    return filled, any(name == "port" for _, name in pieces)


def _refuse_shell(argv: Sequence[str]) -> None:
    for program, option in itertools.pairwise(argv):
        if Path(program).name in _SHELLS and re.fullmatch(r"-[a-z]*c[a-z]*", option):
            raise FieldError(
                "command",
                f"starts a shell ({program} {option}), which would read values as commands: name "
                "the program itself, put its environment under engine.env, or write a script file",
            )


# ---- The adapter -------------------------------------------------------------------------------


class OpenAi:
    """The adapter for whatever serves the OpenAI API.

    A study's own is made by `for_study`, since it is the study that says how its engine talks.
    """

    name = "openai"
    simulated = False
    roles: Mapping[str, Role] = MappingProxyType({"context": Role.CONTEXT})

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        given = params if params is not None else {}
        self.dialect = build(
            Dialect, {name: value for name, value in given.items() if name in _DIALECT}
        )
        self.wire = self.dialect.wire()
        # An axis may still give what is missing, so only the shape of these is looked at here.
        self._command = build(_CommandOnly, {"command": given.get("command", ())}).command
        self._url = given.get("url")
        named = given.get("values", {})
        self._free_names = tuple(
            dict.fromkeys(
                name
                for name in (
                    *_placeholders(self._command),
                    *(str(each) for each in (named if isinstance(named, Mapping) else {})),
                )
                if name not in (*FILLED, *_FIELDS)
            )
        )
        self._milestones = (
            *(
                (Phase(each["phase"]), re.compile(each["pattern"]))
                for each in self.dialect.milestones
            ),
            *(
                ((Phase.READY, re.compile(self.dialect.ready)),)
                if self.dialect.ready is not None
                else ()
            ),
        )
        self._signs = tuple(
            _Sign(
                re.compile(each["pattern"]),
                _outcome_name("signs", each["outcome"]),
                "the study knows these words as a sign of it",
                phase=Phase(each["phase"]) if "phase" in each else None,
                own=True,
            )
            for each in self.dialect.signs
        )
        self._facts = tuple(
            (name, re.compile(pattern)) for name, pattern in self.dialect.facts.items()
        )

    def for_study(self, params: Mapping[str, Any]) -> OpenAi:
        """Return the adapter for the engine that these parameters describe; raises FieldError."""
        return OpenAi(params)

    def settings(self, params: Mapping[str, Any]) -> OpenAiSettings:
        """Return the settings, checked; a name that is no setting fills the placeholder."""
        known = {name: value for name, value in params.items() if name in _FIELDS}
        free = {name: value for name, value in params.items() if name not in _FIELDS}
        used = _placeholders(build(_CommandOnly, {"command": params.get("command", ())}).command)
        for name, value in free.items():
            _check_free_name(name, name)
            if name not in used:
                raise FieldError(name, _unused(name, used))
            if value is not None and not isinstance(value, bool | int | float | str):
                raise FieldError(name, f"must be text, a number, true, false or null, got {value}")
        if free:
            known["values"] = {**known.get("values", {}), **free}
        settings = build(OpenAiSettings, known)
        for name in _DIALECT:
            if getattr(settings, name) != getattr(self.dialect, name):
                raise FieldError(name, "describes the engine for a whole study: no axis can set it")
        return settings

    def setting_names(self) -> tuple[str, ...]:
        """Return the names that an axis may set: settings, and the template's placeholders."""
        return (*_FIELDS, *self._free_names)

    def context_tokens(self, settings: OpenAiSettings) -> int:
        """Return the context length that these settings ask for, in tokens."""
        return settings.context

    def find(self, options: EngineOptions) -> EngineOptions | Failure:
        """Return the options if the template's program is on this host, or why it is not."""
        if not self._command:
            return options
        first = self._command[0]
        program = str(first[0] if isinstance(first, tuple) else first)
        if program == "{python}":
            program = options.python if options.python is not None else sys.executable
        elif program == "{binary}":
            if options.binary is None:
                return _not_found("command starts with {binary}, and engine.binary is null")
            program = options.binary
        elif _names(program, "command[0]"):
            return options  # only a boot can tell what a placeholder names
        if shutil.which(program) is None:
            return _not_found(f"there is no program {program}")
        return options

    def footprint(self, settings: OpenAiSettings, model: ModelFacts) -> Footprint:
        """Return weights, draft and an f16 KV cache in bytes; all else must be alike.

        Of an unknown engine only this is known: more context never takes less memory. Where the
        model's heads are unknown a token counts one byte, which orders and does not measure.
        """
        architecture = architecture_of(model)
        kv = float(settings.context)
        if architecture is not None:
            # Whether the engine makes use of windows is not known either.
            kv = max(architecture.kv_bytes(kv, 16, window_tokens=kv), kv)
        return Footprint(
            parts=Pairs(
                weights=model.size_bytes,
                draft=model.draft_size_bytes,
                kv_cache=math.ceil(kv),
            ),
            alike=Pairs(
                {
                    "url": settings.url,
                    **{f"values.{name}": value for name, value in settings.values.items()},
                }
            ),
        )

    def launch(
        self, settings: OpenAiSettings, model: ModelFacts, options: EngineOptions, port: int
    ) -> Launch | Attach:
        """Return the process of the template with every placeholder filled, or where one runs."""
        if settings.url is not None:
            return Attach(base_url=settings.url, health_path=settings.health_path)
        used = _placeholders(settings.command)
        if "binary" in used and options.binary is None:
            raise FieldError(used["binary"], "asks for {binary}, and engine.binary is null")
        values: dict[str, Scalar] = {
            **settings.values,
            "context": settings.context,
            "port": port,
            "host": HOST,
            "model": model.path,
            "draft_model": model.draft_path,
            "served_name": model.served_name,
            "python": options.python if options.python is not None else sys.executable,
            "binary": options.binary,
        }
        rendered = list(_rendered(settings.command, values))
        argv = tuple(argument for argument, _ in rendered)
        ports = [i for i, (_, has_port) in enumerate(rendered) if has_port]
        if not ports:
            raise FieldError("command", "leaves {port} out here: put it outside of the group")
        _refuse_shell(argv)
        return Launch(
            argv=(*argv, *options.extra_args),
            # A recipe may replace the port only where it is all of one argument and nowhere else.
            port_argument=ports[0] if len(ports) == 1 and argv[ports[0]] == str(port) else None,
            env=options.env,
            host=HOST,
            port=port,
            health_path=settings.health_path,
            boot_timeout_s=options.boot_timeout_s,
            stop_timeout_s=options.stop_timeout_s,
            memory_limit_bytes=options.memory_limit_bytes,
        )

    def milestone(self, line: str) -> Phase | None:
        """Return the phase that this line opens, as the study's patterns say."""
        return next((phase for phase, sign in self._milestones if sign.search(line)), None)

    def evidence(self, log: Iterable[str]) -> Pairs:
        """Return what the study's patterns read in a log, each where it comes first."""
        facts: dict[str, Scalar] = {}
        for line in log:
            for name, pattern in self._facts:
                if name not in facts and (found := pattern.search(line)) and found[1] is not None:
                    # A version is no number: 0.10 is not 0.1.
                    is_version = name.endswith("version")
                    facts[name] = found[1].strip() if is_version else _number_or_text(found[1])
        return Pairs(facts)

    def verdict(self, death: Death, log: Iterable[str]) -> Failure:
        """Return what the end means, claiming no more than the log and the exit show."""
        reading = self._read(log)
        match death.ended:
            case Ended.NOT_STARTED:
                return _not_found(death.detail or "the process could not be started")
            case Ended.PORT_TAKEN:
                return _failure(
                    BrokenName.PORT_IN_USE, reading.phase, death.detail, "another process has it"
                )
            case Ended.LATE:
                return reading.signed(death, own_only=True) or _late(death, reading)
            case Ended.SILENT:
                return reading.signed(death) or _failure(
                    BrokenName.HANG_RUNTIME,
                    Phase.SERVING,
                    death.detail or "silence",
                    f"the server lives, but went silent: {death.detail}",
                )
            case Ended.LIVES:
                told = self._read([death.detail], phase=Phase.SERVING)
                return (
                    told.signed(death)
                    or (reading.signed(death) if reading.phase.order >= Phase.READY.order else None)
                    or _failure(
                        BrokenName.HTTP_500,
                        Phase.SERVING,
                        death.detail,
                        "the server lives, but answered a request with an error",
                    )
                )
            case Ended.EXITED:
                return reading.signed(death) or _died(death, reading, attached=bool(self._url))
            case _:
                assert_never(death.ended)

    def diagnose(self, log: Iterable[str], exit_code: int | None) -> Diagnosis:
        """Return what a log means when nothing else is known of the process."""
        reading = self._read(log)
        ready = reading.phase.order >= Phase.READY.order
        if ready and exit_code is None:
            return Nothing(
                finding=Finding(phase=Phase.READY, cause="", explanation="It came up and served.")
            )
        death = Death(ended=Ended.EXITED, after_s=0.0, was_ready=ready, exit_code=exit_code)
        if (signed := reading.signed(death)) is not None:
            return signed
        if reading.phase is Phase.SPAWN and exit_code is None:
            return _failure(
                BrokenName.UNKNOWN, Phase.SPAWN, "", "nothing in this log is known to the study"
            )
        return _died(death, reading, attached=False)

    def contradiction(
        self, settings: OpenAiSettings, facts: Pairs, props: str | None
    ) -> Unfit | None:
        """Return that the window is smaller than asked, where the engine says so; else None."""
        said = [facts.get("effective_context_tokens"), *_windows(props)]
        for window in said:
            if isinstance(window, int) and not isinstance(window, bool) and window > 0:
                if window >= settings.context:
                    return None
                return Unfit(
                    name=UnfitName.DEGRADED_CAPACITY,
                    finding=Finding(
                        phase=Phase.READY,
                        cause=f"window of {window} tokens",
                        explanation=f"It serves a window of {window:,} tokens, where "
                        f"{settings.context:,} were asked for.",
                        facts=Pairs(
                            effective_context_tokens=window, asked_context_tokens=settings.context
                        ),
                    ),
                )
        return None

    def draft_counters(self, metrics: str) -> DraftCounters | None:
        """Return the counters that the study names, summed over labels; None without them."""
        if not self.dialect.counters:
            return None
        # Late: the library brings an HTTP server, and a plan reads no metrics.
        from prometheus_client.parser import text_string_to_metric_families

        key_of = {name.removesuffix("_total"): key for key, name in self.dialect.counters.items()}
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        # A page that is no metrics page counts nothing.
        with contextlib.suppress(ValueError, OverflowError):
            for family in text_string_to_metric_families(metrics):
                for sample in family.samples:
                    key = key_of.get(sample.name.removesuffix("_total"))
                    if key == "accepted_per_position":
                        at = int(sample.labels.get("position", -1))
                        if 0 <= at < 1000:
                            positions[at] = positions.get(at, 0) + int(sample.value)
                    elif key is not None:
                        totals[key] = totals.get(key, 0) + int(sample.value)
        if not {"steps", "drafted", "accepted"} <= totals.keys():
            return None
        return DraftCounters(
            steps=totals["steps"],
            drafted=totals["drafted"],
            accepted=totals["accepted"],
            accepted_per_position=tuple(
                positions.get(i, 0) for i in range(max(positions, default=-1) + 1)
            ),
        )

    def _read(self, log: Iterable[str], *, phase: Phase = Phase.SPAWN) -> _Reading:
        seen: list[_Seen] = []
        tail: list[str] = []
        count = 0
        for count, line in enumerate(log, 1):
            opened = self.milestone(line)
            # Several workers print the same lines: a phase is only ever left for a later one.
            if opened is not None and opened.order > phase.order:
                phase = opened
                seen.clear()  # what came before was survived
            tail = [*tail[-4:], line] if line.strip() else tail
            found = {each.sign for each in seen}
            seen += [
                _Seen(sign, line.strip(), count, phase)
                for sign in (*self._signs, *_GENERIC)
                if sign not in found
                and (sign.phase is None or sign.phase is phase)
                and sign.pattern.search(line)
            ]
        order = {sign: i for i, sign in enumerate((*self._signs, *_GENERIC))}
        return _Reading(
            phase=phase,
            lines=count,
            tail=tuple(each.strip() for each in tail),
            seen=tuple(sorted(seen, key=lambda each: order[each.sign])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommandOnly:
    command: Template = ()


# ---- Signs and verdicts ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Sign:
    """Words that mean an ending; `outcome` None is memory, of which the phase says the name."""

    pattern: re.Pattern[str]
    outcome: InfeasibleName | BrokenName | HostFaultName | None
    explanation: str
    phase: Phase | None = None
    own: bool = False
    boot_only: bool = True


@dataclass(frozen=True, slots=True)
class _Seen:
    sign: _Sign
    line: str
    at: int
    phase: Phase


_GENERIC = (
    _Sign(
        re.compile(r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]"),
        BrokenName.PORT_IN_USE,
        "another process has the port",
    ),
    _Sign(
        re.compile(
            r"(?:CUDA|HIP|XPU) (?:error: )?out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
            r"|cudaErrorMemoryAllocation|cudaMalloc failed: out of memory"
            r"|CUBLAS_STATUS_ALLOC_FAILED"
        ),
        None,
        "the device ran out of memory",
        boot_only=False,
    ),
    _Sign(
        re.compile(
            r"^MemoryError\b|std::bad_alloc|DefaultCPUAllocator: can't allocate memory"
            r"|Cannot allocate memory|Out of memory: Killed process|oom[-_]kill"
        ),
        InfeasibleName.HOST_RAM_OOM,
        "the host ran out of memory",
        boot_only=False,
    ),
    _Sign(
        re.compile(
            r"error: (?:unrecognized arguments|argument \S+: (?:invalid|expected)"
            r"|ambiguous option|invalid argument|unknown argument|unexpected argument)"
            r"|[Uu]nknown (?:option|flag)\b|no such option|unrecognized option"
        ),
        InfeasibleName.BAD_ARGUMENT,
        "the engine does not accept an argument of the command line",
    ),
    _Sign(
        re.compile(r"^\S*python\S*: No module named|^\S*python\S*: can't open file"),
        HostFaultName.ENGINE_NOT_FOUND,
        "the program that the command names is not installed there",
    ),
    _Sign(
        re.compile(r"No space left on device.*/dev/shm|/dev/shm.*No space left on device"),
        BrokenName.SHM_EXHAUSTED,
        "shared memory is used up",
    ),
    _Sign(
        re.compile(r"No space left on device"),
        HostFaultName.DISK_FULL,
        "the disk is full: free some space",
    ),
    _Sign(
        re.compile(r"CUDA driver version is insufficient"),
        HostFaultName.DRIVER_MISMATCH,
        "the driver is too old for this build of the engine: update one of them",
    ),
    _Sign(
        re.compile(
            r"(?:No such file or directory|FileNotFoundError).*"
            r"(?:\.gguf|\.safetensors|/config\.json|/tokenizer)"
            r"|GatedRepoError|RepositoryNotFoundError|is not a valid model identifier"
        ),
        HostFaultName.MODEL_NOT_FOUND_OR_GATED,
        "the model, or a file of it, is not there or not open to you",
    ),
    # Which file it was, and whose fault, is not known.
    _Sign(
        re.compile(r"No such file or directory|FileNotFoundError"),
        BrokenName.ENGINE_CRASH,
        "a file that it looked for is not there",
    ),
)

_MEMORY_BY_PHASE = {
    Phase.WEIGHTS: InfeasibleName.OOM_WEIGHTS,
    Phase.PROFILING: InfeasibleName.OOM_ACTIVATION_PROFILING,
    Phase.CONTEXT: InfeasibleName.OOM_KV_CACHE,
    Phase.KV: InfeasibleName.OOM_KV_CACHE,
    Phase.COMPUTE: InfeasibleName.OOM_COMPUTE,
    Phase.DRAFT: InfeasibleName.OOM_DRAFT_HEAD,
    Phase.CAPTURE: InfeasibleName.OOM_CUDAGRAPH_CAPTURE,
    Phase.WARMUP: InfeasibleName.OOM_COMPUTE,
}
_TORCH_SIZES = {
    "required_bytes": re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB)"),
    "capacity_bytes": re.compile(r"total capacity of ([\d.]+) ([KMG]iB)"),
    "free_bytes": re.compile(r"of which ([\d.]+) ([KMG]iB) is free"),
}
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A log read once: how far it came, its last words, and the signs since its last phase."""

    phase: Phase
    lines: int
    tail: tuple[str, ...]
    seen: tuple[_Seen, ...]

    @property
    def last_words(self) -> str:
        """The line that names an error among the last ones, else the last."""
        telling = re.compile(r"error|exception|abort|fail", re.IGNORECASE)
        named = [each for each in self.tail if telling.search(each)]
        return (named or list(self.tail) or ["it printed nothing"])[-1][:2000]

    def signed(self, death: Death, *, own_only: bool = False) -> Failure | None:
        """Return the ending that a sign in the log stands for, None where there is none."""
        served = death.was_ready or self.phase.order >= Phase.READY.order
        for each in self.seen:
            if each.sign.own:
                return _sign_failure(each, served=served)
            if own_only or (served and each.sign.boot_only):
                continue
            # Where no pattern tells when it was ready, old words may be of a boot that survived.
            unsure = served and self.phase.order < Phase.READY.order
            if not (unsure and each.at < self.lines - _TAIL_LINES):
                return _sign_failure(each, served=served)
        return None


def _sign_failure(seen: _Seen, *, served: bool) -> Failure:
    outcome, phase, explanation = seen.sign.outcome, seen.phase, seen.sign.explanation
    if served and phase.order < Phase.READY.order:
        phase = Phase.SERVING
    if outcome is None:
        if served:
            outcome = InfeasibleName.OOM_RUNTIME
            explanation += " while it served"
        elif phase in _MEMORY_BY_PHASE:
            outcome = _MEMORY_BY_PHASE[phase]
            explanation += f" in the phase {phase}"
        else:
            # The closed set has no name for memory of an unknown use; this one says the least.
            outcome = InfeasibleName.OOM_COMPUTE
            explanation += (
                " before it was ready; for what is not known, as no milestone of the study tells "
                "the phase"
            )
    facts: dict[str, Scalar] = {}
    for name, pattern in _TORCH_SIZES.items():
        if found := pattern.search(seen.line):
            with contextlib.suppress(ValueError):  # such as a lone dot in a torn line
                facts[name] = round(float(found[1]) * _UNITS[found[2]])
    return _failure(outcome, phase, seen.line, explanation, Pairs(facts))


def _failure(
    name: InfeasibleName | BrokenName | HostFaultName,
    phase: Phase,
    cause: str,
    explanation: str,
    facts: Pairs = Pairs(),
) -> Failure:
    finding = Finding(
        phase=phase,
        cause=cause[:2000],
        explanation=explanation[0].upper() + explanation[1:] + ".",
        facts=facts,
    )
    match name:
        case InfeasibleName():
            return Infeasible(name=name, finding=finding)
        case BrokenName():
            return Broken(name=name, finding=finding)
        case HostFaultName():
            return HostFault(name=name, finding=finding)
        case _:
            assert_never(name)


def _not_found(why: str) -> Failure:
    return _failure(
        HostFaultName.ENGINE_NOT_FOUND,
        Phase.SPAWN,
        why,
        f"{why}; correct engine.params.command (or url), or start what it names",
    )


def _late(death: Death, reading: _Reading) -> Failure:
    silent = reading.lines == 0
    return _failure(
        BrokenName.HANG_BOOT if silent else BrokenName.BOOT_TIMEOUT,
        reading.phase,
        reading.last_words,
        f"it was not ready after {death.after_s:.0f} s"
        + (" and printed nothing" if silent else f"; the last phase seen was {reading.phase}"),
        Pairs(waited_s=death.after_s),
    )


def _died(death: Death, reading: _Reading, *, attached: bool) -> Failure:
    code = death.exit_code
    served = death.was_ready or reading.phase.order >= Phase.READY.order
    if attached:
        how = "is gone: the server that was attached to answers no longer"
    elif code is None:
        how = "ended"
    elif code < 0:
        how = f"was ended by signal {-code}"
    else:
        how = f"exited with code {code}"
    if code in (-9, 137):
        how += ", as the kernel does when the host runs out of memory, or a person with kill -9"
    return _failure(
        BrokenName.ENGINE_DIED_MID_BENCHMARK if served else BrokenName.ENGINE_CRASH,
        Phase.SERVING if served else reading.phase,
        death.detail if attached else reading.last_words,
        f"the engine {how}" + (" after it was ready" if served else " before it was ready"),
        Pairs() if code is None else Pairs(exit_code=code),
    )


# ---- Small readers -----------------------------------------------------------------------------


def _number_or_text(said: str) -> Scalar:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(said.replace(",", ""))
            if math.isfinite(number):
                return number
    return said.strip()


def _windows(props: str | None) -> Iterator[Any]:
    """Yield the context that a page of models (vLLM, SGLang) or props (llama.cpp) names."""
    try:
        page = json.loads(props) if props is not None else None
    except (ValueError, RecursionError):
        return
    if not isinstance(page, dict):
        return
    models = page.get("data")
    if isinstance(models, list) and models and isinstance(models[0], dict):
        yield models[0].get("max_model_len")
    defaults = page.get("default_generation_settings")
    if isinstance(defaults, dict):
        yield defaults.get("n_ctx")


__all__ = ["FILLED", "Dialect", "OpenAi", "OpenAiSettings"]
