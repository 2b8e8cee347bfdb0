"""A recipe read back: what was measured, what its file starts, and in what the two differ."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

from sweeper.core.pairs import Pairs
from sweeper.recipe.block import body_digest, find_block
from sweeper.recipe.parsing import (
    PORT_VARIABLE,
    Found,
    preset_sections,
    shell_script,
    systemd_unit,
)
from sweeper.recipe.quoting import RecipeError, comment, plain
from sweeper.recipe.rendering import SINGLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something that is started: words, environment, and a limit on address space in bytes.

    `port_argument` is the index of the port in `argv`, None where it is no word of its own.
    """

    argv: tuple[str, ...]
    port_argument: int | None
    env: Pairs
    memory_limit_bytes: int | None

    def on_port(self, port: int) -> tuple[str, ...]:
        """Return the words with this port; raises RecipeError where the port is no word."""
        at = self.port_argument
        if at is None:
            raise RecipeError("the port of this command is no argument of its own")
        return (*self.argv[:at], str(port), *self.argv[at + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A measured figure, in its own unit, with the interval that holds its median."""

    median: float
    low: float
    high: float
    n: int
    confidence: float
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe: what was `measured`, what was `exported`, and what the file starts now (`command`).

    `command` is None for a format that is not read back (a page). `edited` says whether any of the
    file but its own line for programs was changed since it was written, comments too. Facts of
    engine, model and host are as recorded; secrets are `***`.
    """

    path: Path
    form: str
    study: str
    study_folder: str
    attempt: int
    trial: int
    confirms: int | None
    measured_at: str
    point: Pairs
    measured: Command
    exported: Command
    command: Command | None
    edited: bool
    health_path: str
    prompt_length: int | None
    streams: int
    decode_tok_s: Interval
    ttft_s: Interval
    window_tokens: int
    proven_tokens: int
    configured_tokens: int
    workload: Pairs
    engine: Pairs
    model: Pairs
    host: Pairs

    def differs(self) -> tuple[str, ...]:
        """Return in words what the file starts otherwise than was exported; () where nothing.

        The port is not compared, as it is whoever's who starts it.
        """
        if self.command is None:
            return ()
        return (
            *_argv_differences(self.exported, self.command),
            *_env_differences(self.exported.env, self.command.env),
            *_limit_differences(self.exported, self.command),
        )


def read_recipe(path: Path) -> Recipe:
    """Return the recipe in this file or folder.

    Raises RecipeError where there is none, it is damaged, or what it starts cannot be read.
    """
    try:
        files = _files(path)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        block = find_block(files)
        return _recipe(path, block, files)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RecipeError(
            f"{path}: it is damaged ({type(error).__name__}: {error}); export it again"
        ) from None


def _files(path: Path) -> dict[str, str]:
    if path.is_dir():
        return {
            each.relative_to(path).as_posix(): _text(each)
            for each in sorted(path.rglob("*"))
            if each.is_file()
        }
    return {SINGLE: _text(path)}


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _recipe(path: Path, block: Mapping[str, Any], files: Mapping[str, str]) -> Recipe:
    form = str(block["form"])
    exported = _command(block["exported"])
    return Recipe(
        path=path,
        form=form,
        study=block["study"],
        study_folder=block["study_folder"],
        attempt=block["attempt"],
        trial=block["trial"],
        confirms=block["confirms"],
        measured_at=block["measured_at"],
        point=Pairs(block["point"]),
        measured=_command(block),
        exported=exported,
        command=_started(form, files, exported, tuple(block["exported"]["switches"])),
        edited=body_digest(files) != block["body_sha256"],
        health_path=block["health_path"],
        prompt_length=block["figures"]["prompt_length"],
        streams=block["figures"]["streams"],
        decode_tok_s=_interval(block["figures"]["decode_tok_s"]),
        ttft_s=_interval(block["figures"]["ttft_s"]),
        window_tokens=block["window_tokens"],
        proven_tokens=block["proven_tokens"],
        configured_tokens=block["configured_tokens"],
        workload=Pairs(block["workload"]),
        engine=Pairs(block["engine"]),
        model=Pairs(block["model"]),
        host=Pairs(block["host"]),
    )


def _command(said: Mapping[str, Any]) -> Command:
    return Command(
        argv=tuple(said["argv"]),
        port_argument=said["port_argument"],
        env=Pairs(said["env"]),
        memory_limit_bytes=said["memory_limit_bytes"],
    )


def _interval(said: Mapping[str, Any]) -> Interval:
    return Interval(
        median=float(said["median"]),
        low=float(said["low"]),
        high=float(said["high"]),
        n=int(said["n"]),
        confidence=float(said["confidence"]),
        doubts=tuple(said["doubts"]),
    )


# --- what the file starts ---------------------------------------------------------------------


def _started(
    form: str, files: Mapping[str, str], exported: Command, switches: tuple[str, ...]
) -> Command | None:
    said = files.get(SINGLE, "")
    match form:
        case "shell":
            return _of(shell_script(said), exported, placeholder=PORT_VARIABLE)
        case "systemd":
            return _of(systemd_unit(said), exported)
        case "llama-preset":
            return _preset(said, exported, switches)
        case "vllm-yaml":
            return _vllm(_mapping(said), exported)
        case "compose":
            return _of(_compose(_mapping(said)), exported)
        case "helm":
            return _of(_chart(_mapping(files["values.yaml"])), exported)
        case "llama-swap":
            return _of(_swap(_mapping(said)), exported, placeholder="${PORT}")
        case "sparkrun":
            return _of(_spark(_mapping(said)), exported, placeholder="{port}")
        case "vllm-recipe":
            model = _mapping(said)["model"]
            env = {name: plain(value) for name, value in (model.get("base_env") or {}).items()}
            found = Found(argv=tuple(map(plain, model["base_args"])), env=env)
            return _of(found, exported)
        case _:
            return None


def _of(found: Found, exported: Command, *, placeholder: str = "") -> Command:
    """Return what was found as a command, with the recorded port in the place of a placeholder."""
    argv = found.argv
    if not argv:
        raise RecipeError("there is no command in it; export it again")
    at = exported.port_argument
    if at is not None:
        port = exported.argv[at]
        if placeholder and placeholder in argv:
            # The nearest one, if words were put in or taken out before it.
            places = [i for i, each in enumerate(argv) if each == placeholder]
            at = min(places, key=lambda place: abs(place - (exported.port_argument or 0)))
            argv = (*argv[:at], port, *argv[at + 1 :])
        elif at >= len(argv) or argv[at - 1] != exported.argv[at - 1]:
            flag = exported.argv[at - 1]
            at = argv.index(flag) + 1 if flag in argv[:-1] else None
    return Command(
        argv=argv,
        port_argument=at,
        env=Pairs(found.env),
        memory_limit_bytes=found.memory_limit_bytes,
    )


def _preset(said: str, exported: Command, switches: tuple[str, ...]) -> Command:
    """Return the command that the preset stands for: the program's words, then its flags."""
    sections = preset_sections(said)
    keys = {
        key: value
        for name, several in sections.items()
        if name != "default"
        for key, value in several.items()
        if key != "version"
    }
    first = next(
        (i for i, each in enumerate(exported.argv) if i > 0 and each.startswith("--")), 1
    )  # fmt: skip
    spelled = {each.lstrip("-"): each for each in exported.argv if each.startswith("-")}
    words: list[str] = []
    for key, value in keys.items():
        flag = spelled.get(key, f"--{key}")
        if flag in switches and value in ("true", "on", "enabled", "1"):
            words.append(flag)
        else:
            words += [flag, value]
    # The router's own: name, address and port.
    tail = exported.argv[-6:]
    return Command(
        argv=(*exported.argv[:first], *words, *tail),
        port_argument=first + len(words) + 5,
        # The environment is set where the router is started, which is not in this file.
        env=exported.env,
        memory_limit_bytes=None,
    )


def _vllm(config: Mapping[str, Any], exported: Command) -> Command:
    words: list[str] = []
    for key, value in config.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if value is not True:
            words += [plain(each) for each in (value if isinstance(value, list) else [value])]
    return Command(
        argv=("vllm", "serve", *words),
        port_argument=words.index("--port") + 3 if "--port" in words[:-1] else None,
        env=exported.env,
        memory_limit_bytes=None,
    )


def _mapping(said: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(said)
    except yaml.YAMLError as error:
        raise RecipeError(f"it is no YAML: {comment(error)}") from None
    if not isinstance(found, Mapping):
        raise RecipeError("it is no mapping of YAML; export it again")
    return found


def _single(value: object) -> str:
    return str(value).replace("$$", "$")


def _compose(config: Mapping[str, Any]) -> Found:
    (service,) = config["services"].values()
    words = (*(service.get("entrypoint") or ()), *service["command"])
    return Found(
        argv=tuple(_single(each) for each in words),
        env={name: _single(v) for name, v in (service.get("environment") or {}).items()},
    )


def _chart(values: Mapping[str, Any]) -> Found:
    return Found(
        argv=tuple(_single(each) for each in (*values["command"], *values["args"])),
        env={each["name"]: _single(each["value"]) for each in values["env"]},
    )


def _swap(config: Mapping[str, Any]) -> Found:
    (entry,) = config["models"].values()
    pairs = (each.partition("=") for each in entry.get("env") or ())
    return Found(
        argv=tuple(shlex.split(entry["cmd"])), env={name: value for name, _, value in pairs}
    )


def _spark(config: Mapping[str, Any]) -> Found:
    return Found(
        argv=tuple(shlex.split(config["command"])),
        env={name: plain(value) for name, value in (config.get("env") or {}).items()},
    )


# --- differences ------------------------------------------------------------------------------


def _argv_differences(one: Command, other: Command) -> list[str]:
    ours, theirs = _without_port(one), _without_port(other)
    found = []
    for kind, i, j, k, m in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        after = f" after {comment(ours[i - 1])}" if i > 0 else ""
        was, now = (_said(words) for words in (ours[i:j], theirs[k:m]))
        match kind:
            case "replace":
                found.append(f"{was} was measured{after}, and the file has {now}")
            case "delete":
                found.append(f"{was} was measured{after}, and the file does not have it")
            case _:
                found.append(f"the file has {now}{after}, which was not measured")
    return found


def _without_port(command: Command) -> list[str]:
    return [
        "(port)" if at == command.port_argument else each for at, each in enumerate(command.argv)
    ]


def _said(words: list[str]) -> str:
    return comment(shlex.join(words))


def _env_differences(one: Pairs, other: Pairs) -> list[str]:
    ours = {name: plain(value) for name, value in one.items()}
    theirs = {name: plain(value) for name, value in other.items()}
    found = []
    for name in sorted({*ours, *theirs}):
        was, now = ours.get(name), theirs.get(name)
        if was == now:
            continue
        if was is None:
            found.append(f"the file sets {comment(name)}={comment(now)}, which was not measured")
        elif now is None:
            found.append(
                f"{comment(name)}={comment(was)} was measured, and the file does not set it"
            )
        else:
            found.append(
                f"{comment(name)}={comment(was)} was measured, and the file has {comment(now)}"
            )
    return found


def _limit_differences(one: Command, other: Command) -> list[str]:
    was, now = one.memory_limit_bytes, other.memory_limit_bytes
    # Written in whole KiB.
    if (None if was is None else was // 1024) == (None if now is None else now // 1024):
        return []
    said = ["none" if each is None else f"{each / 2**20:,.0f} MiB" for each in (was, now)]
    return [f"the limit on address space was {said[0]}, and the file has {said[1]}"]
