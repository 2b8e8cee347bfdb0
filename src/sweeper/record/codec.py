"""Attempts to JSON and back, exactly, with secrets left out.

An attempt is two files: a JSON object with all but its samples, and its samples as JSON Lines, a
head with the schema first and then one sample a line, so that any tool can read them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs, Scalar

SCHEMA = 2
"""The version of the layout; a reader refuses every other."""

SAMPLES = "sweeper samples"
"""What the head of a file of samples says it is."""

HIDDEN = "***"
"""What stands in the place of a secret."""


class CodecError(ValueError):
    """Data that is not an attempt; `path` is the place of the mistake, as in `outcome.name`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path or 'attempt'}: {message}")
        self.path = path
        self.message = message


def encode_attempt(attempt: Attempt, secrets: Iterable[str] = ()) -> dict[str, Any]:
    """Return the attempt as JSON-ready data, without the secrets in its env and argv.

    `secrets` are further values to hide wherever they stand, as in what an engine printed.
    Every field is written, defaults too. Numbers that JSON has no word for are written as
    `{"float": "nan"}`, so that the file stays strict JSON.
    """
    values = (*secret_values(attempt), *secrets)
    encoded: dict[str, Any] = _scrubbed(_encoded_fields(redacted(attempt)), values)
    return {"schema": SCHEMA, **encoded}


def samples_to_lines(encoded: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Take the samples out of an encoded attempt and yield them as a head and one line each."""
    samples = encoded.pop("samples")
    yield {
        "schema": SCHEMA,
        "what": SAMPLES,
        "study": encoded["study"],
        "attempt": encoded["number"],
        "samples": len(samples),
    }
    yield from samples


def samples_from_lines(lines: Iterable[str]) -> list[Any]:
    """Return the encoded samples of a file that `samples_to_lines` made.

    Raises CodecError for a line that is no JSON, another kind of file, another schema, or fewer
    samples than the head says.
    """
    found: list[Any] = []
    head: Any = None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise CodecError(f"line {number}", f"is no JSON: {error}") from error
        if head is None:
            head = entry
        else:
            found.append(entry)
    if not isinstance(head, Mapping) or head.get("what") != SAMPLES:
        raise CodecError("line 1", f"must be the head of a file of {SAMPLES}")
    if head.get("schema") != SCHEMA:
        raise CodecError(
            "line 1", f"has schema {head.get('schema')!r}; this sweeper reads {SCHEMA}"
        )
    if head.get("samples") != len(found):
        raise CodecError(
            "line 1", f"promises {head.get('samples')} samples, and {len(found)} follow"
        )
    return found


def decode_attempt(data: Mapping[str, Any]) -> Attempt:
    """Return the attempt that `encode_attempt` wrote.

    Raises CodecError for another schema and for an unknown, missing or mistyped key, naming it.
    """
    fields = {key: value for key, value in readable(data).items() if key != "schema"}
    return typing.cast(Attempt, _decoded_fields(fields, Attempt, ""))


def readable(data: Any) -> Mapping[str, Any]:
    """Return the data if it is an object of the schema read here; raises CodecError."""
    if not isinstance(data, Mapping):
        raise CodecError("", f"must be an object, got {type(data).__name__}")
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise CodecError(
            "schema",
            f"this sweeper reads schema {SCHEMA}, the record says {schema!r}; "
            "read it with the version of sweeper that wrote it",
        )
    return data


def secret_values(attempt: Attempt, inherited: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the secrets that an engine knew: of its env, its argv, and what it inherited.

    Engines print their arguments and, when they die, much else. Values that are short or a plain
    word are left out: hiding every `1` or every `default` would hide the log, and the names that
    a record is made of.
    """
    values = [
        str(value)
        for name, value in attempt.env.items()
        if _safe_value(name, value) == HIDDEN and value != HIDDEN
    ]
    for part, safe in zip(attempt.argv, redact_argv(attempt.argv), strict=True):
        if safe == HIDDEN:
            values.append(part)
        elif safe.endswith(HIDDEN) and not part.endswith(HIDDEN):
            values.append(part[len(safe) - len(HIDDEN) :])
    values += [value for name, value in (inherited or {}).items() if looks_secret(name)]
    return tuple(
        {
            value
            for value in values
            if len(value) >= _SHORTEST_SECRET and not re.fullmatch(r"[A-Za-z_]+", value)
        }
    )


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Return the text with every secret hidden, the longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _scrubbed(value: Any, secrets: tuple[str, ...]) -> Any:
    if not secrets:
        return value
    if isinstance(value, str):
        return scrub(value, secrets)
    if isinstance(value, list):
        return [_scrubbed(each, secrets) for each in value]
    if isinstance(value, dict):
        return {key: _scrubbed(each, secrets) for key, each in value.items()}
    return value


def redacted(attempt: Attempt) -> Attempt:
    """Return the attempt as it may be kept: secrets in env and argv replaced by `***`."""
    return dataclasses.replace(attempt, env=redact(attempt.env), argv=redact_argv(attempt.argv))


# --- secrets -------------------------------------------------------------------------------------

_SECRET_WORDS = frozenset(
    {
        *("SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "CREDENTIAL", "CREDENTIALS"),
        *("AUTH", "AUTHORIZATION", "APIKEY"),
    }
)
# These two are secrets only as the last word: HF_TOKEN is one, kv_key_bits and token_count are not.
_SECRET_LAST_WORDS = frozenset({"TOKEN", "KEY"})
# ... and not where the words before say that a piece of text is meant, as in --eos-token, or a
# rate, as in --kv-kib-per-token.
_TEXT_TOKENS = frozenset(
    {
        *("BOS", "EOS", "EOT", "PAD", "UNK", "SEP", "CLS", "MASK", "STOP"),
        *("IMAGE", "AUDIO", "VIDEO", "PER"),
    }
)
_SHORTEST_SECRET = 6
_NAMES_A_FILE = frozenset({"FILE", "PATH", "DIR"})
_SECRET_SHORT_OPTIONS = frozenset({"-hft"})
"""Short options that no word gives away: llama.cpp's -hft is its --hf-token."""

_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
_NAME_AND_VALUE = re.compile(
    r"(?P<name>-{0,2}[A-Za-z][\w.\-]*)(?P<sep>=|:\s+)(?P<value>.*)", re.DOTALL
)
_OPTION = re.compile(r"--.*|-[A-Za-z]{1,4}", re.DOTALL)


def looks_secret(name: str) -> bool:
    """Tell whether a name (HF_TOKEN, --api-key, dbPassword) is that of a secret."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Z]+", spaced.upper()) if word]
    if not words or words[-1] in _NAMES_A_FILE:
        return False
    if _SECRET_WORDS.intersection(words):
        return True
    return words[-1] in _SECRET_LAST_WORDS and not _TEXT_TOKENS.intersection(words)


def redact(pairs: Pairs) -> Pairs:
    """Return the pairs with the values of secret names, and passwords in URLs, hidden."""
    return Pairs({name: _safe_value(name, value) for name, value in pairs.items()})


def _safe_value(name: str, value: Scalar) -> Scalar:
    if value is None or isinstance(value, bool):
        return value  # That a secret is switched on or absent is not the secret.
    if looks_secret(name):
        return HIDDEN
    return _without_password(value) if isinstance(value, str) else value


def _without_password(text: str) -> str:
    return _URL_PASSWORD.sub(HIDDEN, text)


def redact_argv(argv: Iterable[str]) -> tuple[str, ...]:
    """Return the command line with secrets hidden.

    Hides `--api-key VALUE` (all values up to the next option: vLLM takes several),
    `--api-key=VALUE`, `NAME=VALUE`, `Authorization: VALUE` and passwords in URLs.
    """
    safe: list[str] = []
    hiding = False
    for part in argv:
        if hiding and not _OPTION.fullmatch(part):
            safe.append(HIDDEN)
            continue
        match = _NAME_AND_VALUE.fullmatch(part)
        if match is not None:
            hiding = False
            secret = match["name"] in _SECRET_SHORT_OPTIONS or looks_secret(match["name"])
            safe.append(
                f"{match['name']}{match['sep']}{HIDDEN}" if secret else _without_password(part)
            )
            continue
        hiding = part in _SECRET_SHORT_OPTIONS or (part.startswith("-") and looks_secret(part))
        safe.append(part if hiding else _without_password(part))
    return tuple(safe)


# --- values to JSON ------------------------------------------------------------------------------


def _encoded(value: Any, hint: Any) -> Any:
    if isinstance(value, Pairs):
        return {name: _encoded(each, Scalar) for name, each in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encoded(each, typing.get_args(hint)[0]) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = {"type": type(value).__name__} if len(_dataclass_options(hint)) > 1 else {}
        return {**tag, **_encoded_fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _encoded_fields(value: Any) -> dict[str, Any]:
    return {
        name: _encoded(getattr(value, name), hint) for name, hint in _hints(value.__class__).items()
    }


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with their types resolved, in order of declaration."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one type that is none."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _dataclass_options(hint: Any) -> dict[str, Any]:
    options: tuple[Any, ...] = _options(hint)
    return {each.__name__: each for each in options if _is_dataclass(each)}


def _is_dataclass(option: Any) -> bool:
    # Through a bool, because the type guard would forget that this is a class.
    return dataclasses.is_dataclass(option)


# --- JSON to values ------------------------------------------------------------------------------


def _decoded(data: Any, hint: Any, path: str) -> Any:
    options = _options(hint)
    if data is None and type(None) in options:
        return None
    if Pairs in options:
        return _decoded_pairs(data, path)
    if _dataclass_options(hint):
        return _decoded_dataclass(data, hint, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise _mistyped(path, "a list", data)
        inner = typing.get_args(hint)[0]
        return tuple(_decoded(each, inner, f"{path}[{i}]") for i, each in enumerate(data))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            known = ", ".join(str(member.value) for member in hint)
            raise CodecError(path, f"{data!r} is not one of: {known}") from None
    return _decoded_scalar(data, options, path)


def _decoded_scalar(data: Any, options: tuple[Any, ...], path: str) -> Any:
    if isinstance(data, Mapping) and float in options and set(data) == {"float"}:
        if data["float"] in ("nan", "inf", "-inf"):
            return float(data["float"])
        raise CodecError(f"{path}.float", f"must be nan, inf or -inf, got {data['float']!r}")
    # An int will do for a float, as in Python's own types, and stays the int that was written.
    accepted = {*options, int} if float in options else set(options)
    if type(data) not in accepted:
        said = " or ".join("null" if each is type(None) else each.__name__ for each in options)
        raise _mistyped(path, said, data)
    return data


def _decoded_pairs(data: Any, path: str) -> Pairs:
    if not isinstance(data, Mapping):
        raise _mistyped(path, "an object", data)
    scalar = _options(Scalar)
    return Pairs(
        {name: _decoded_scalar(each, scalar, _join(path, name)) for name, each in data.items()}
    )


def _decoded_dataclass(data: Any, hint: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise _mistyped(path, "an object", data)
    choices = _dataclass_options(hint)
    if len(choices) == 1:
        (cls,) = choices.values()
        return _decoded_fields(data, cls, path)
    tag = data.get("type")
    if tag not in choices:
        raise CodecError(_join(path, "type"), f"{tag!r} is not one of: {', '.join(choices)}")
    fields = {key: value for key, value in data.items() if key != "type"}
    return _decoded_fields(fields, choices[tag], path)


def _decoded_fields(data: Mapping[str, Any], cls: Any, path: str) -> Any:
    hints = _hints(cls)
    for key in data:
        if key not in hints:
            raise CodecError(
                _join(path, key), f"is not a field of {cls.__name__} in schema {SCHEMA}"
            )
    for field in dataclasses.fields(cls):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in data and not has_default:
            raise CodecError(_join(path, field.name), f"is missing; {cls.__name__} needs it")
    values = {key: _decoded(each, hints[key], _join(path, key)) for key, each in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise CodecError(path, str(error)) from error


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else str(key)


def _mistyped(path: str, wanted: str, got: Any) -> CodecError:
    shown = repr(got)
    return CodecError(path, f"must be {wanted}, got {shown[:80]}{'…' if len(shown) > 80 else ''}")
