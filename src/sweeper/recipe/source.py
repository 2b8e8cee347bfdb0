"""What a recipe is made from: the attempt, the adapter of its engine, and what stands beside it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.reliability import Reliability
from sweeper.engines import CommandParts, Deployable, Engine, Wire, load_engine
from sweeper.recipe.quoting import RecipeError, comment

DEFAULT_PORT = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One measured attempt, and the attempts of its study that a recipe may tell of.

    `front` are those that none other beats, `failed` those that could not work; either may be
    empty. `health_path` is where the server says that it is ready. `hold` says whether the point
    works every time, `boots` are the numbers of all its attempts.
    """

    attempt: Attempt
    measured: Measured
    study_folder: Path
    health_path: str
    front: tuple[Attempt, ...] = ()
    failed: tuple[Attempt, ...] = ()
    hold: Reliability | None = None
    boots: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the recipe: study and attempt."""
        return f"{self.attempt.study}-{self.attempt.number:04d}"

    @property
    def engine_name(self) -> str:
        """The name of the engine's adapter."""
        return str(self.attempt.engine.get("name") or "")

    @property
    def wire(self) -> Wire:
        """How the engine talks, as far as its adapter knows without the study."""
        adapter = adapter_of(self.engine_name)
        return Wire() if adapter is None else adapter.wire

    @property
    def deployable(self) -> Deployable | None:
        """The adapter, if it knows more of its engine than the command line."""
        adapter = adapter_of(self.engine_name)
        return adapter if isinstance(adapter, Deployable) else None

    @property
    def parts(self) -> CommandParts | None:
        """The command taken apart, if the adapter can."""
        return None if self.deployable is None else self.deployable.command_parts(self.attempt.argv)

    @property
    def served_name(self) -> str:
        """The name of the model in requests."""
        parts = self.parts
        if parts is not None and parts.served_name:
            return parts.served_name
        # A model's variant is told after a colon.
        return str(self.attempt.model.get("name") or "").partition(":")[0]

    @property
    def hidden(self) -> tuple[str, ...]:
        """The names of the variables whose values are not kept, since they are secret."""
        return tuple(name for name, value in self.attempt.env.items() if lost(value))

    @property
    def env(self) -> Pairs:
        """The environment without what is hidden."""
        return Pairs({name: v for name, v in self.attempt.env.items() if name not in self.hidden})

    @property
    def paths(self) -> tuple[str, ...]:
        """The absolute paths of the model's files, the draft's among them."""
        found = (self.attempt.model.get("path"), self.attempt.model.get("draft_path"))
        return tuple(each for each in found if isinstance(each, str) and each.startswith("/"))

    @property
    def facts(self) -> Pairs:
        """The facts of the engine and of the host together."""
        return Pairs({**self.attempt.host, **self.attempt.engine})

    @property
    def has_gpu(self) -> bool:
        """Whether the host had a card."""
        return self.attempt.host.get("gpu") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a recipe starts, and in words what of it is not as it was measured.

    `port_argument` is the index of the port in `argv`, None where it is no argument of its own.
    `switches` are the flags of `argv` that have no value, where the format cannot tell.
    `values` are for the template alone.
    """

    argv: tuple[str, ...]
    port_argument: int | None
    env: Pairs
    memory_limit_bytes: int | None
    differs: tuple[str, ...]
    switches: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def adapter_of(name: str) -> Engine | None:
    """Return the adapter of an engine; None where it is not installed here."""
    try:
        return load_engine(name)
    except LookupError:
        return None


def lost(value: Scalar) -> bool:
    """Tell whether the record holds stars in the place of this value, or of a part of it."""
    return isinstance(value, str) and re.search(r"(?:^|=|:\s|://)\*\*\*(?:$|@)", value) is not None


def with_port(source: Source) -> tuple[str, ...]:
    """Return the command with the default port, where the port is an argument of its own."""
    argv, at = source.attempt.argv, source.attempt.port_argument
    return argv if at is None else (*argv[:at], str(DEFAULT_PORT), *argv[at + 1 :])


def port_difference(source: Source) -> tuple[str, ...]:
    """Return in words that the port is another one than was measured."""
    at = source.attempt.port_argument
    if at is None:
        return ()
    return (f"the port: {DEFAULT_PORT}, measured on {source.attempt.argv[at]}",)


def limit_difference(source: Source) -> tuple[str, ...]:
    """Return in words that the measurement's limit on address space is not set."""
    limit = source.attempt.memory_limit_bytes
    if limit is None:
        return ()
    return (
        f"no limit on address space; the measurement ran under {limit / 2**20:,.0f} MiB, which "
        "this format has no word for",
    )


def needs_port(source: Source, why: str) -> int:
    """Return the index of the port; raises RecipeError where it is no argument of its own."""
    if source.attempt.port_argument is None:
        raise RecipeError(
            f"the port of attempt {source.attempt.number} is no argument of its own in its "
            f"command, and {why}; use format shell or systemd"
        )
    return source.attempt.port_argument


def needs_parts(source: Source, what: str) -> CommandParts:
    """Return the command taken apart; raises RecipeError where it cannot be."""
    parts = source.parts
    if parts is None:
        raise RecipeError(
            f"the command of attempt {source.attempt.number} ({comment(source.engine_name)}) "
            f"cannot be taken apart into flags, and {what}; use format shell or systemd"
        )
    return parts


def model_mount(path: str) -> str:
    """Return the folder that a container must see for a model's file or folder to be whole.

    A GGUF model may be in several files of one folder; the files of a folder in the Hugging Face
    cache are links into its repository's folder.
    """
    pure = PurePosixPath(path)
    for each in pure.parents:
        if each.name.startswith("models--") and "snapshots" in pure.parts:
            return str(each)
    return str(pure.parent if pure.suffix else pure)


_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{7,40})")


def hub_model(path: str) -> tuple[str, str] | None:
    """Return repository and revision of a model in the Hugging Face cache, None elsewhere."""
    found = _SNAPSHOT.search(path)
    return None if found is None else (f"{found[1]}/{found[2]}", found[3])


def container_words(argv: tuple[str, ...]) -> bool:
    """Tell whether a command starts a container."""
    return PurePosixPath(argv[0]).name in ("docker", "podman") and "run" in argv[1:3]
