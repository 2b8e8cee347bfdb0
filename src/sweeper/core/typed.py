"""Untyped mappings to frozen dataclasses, with errors a person can act on."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from sweeper.core.space import suggestion

T = TypeVar("T")


class FieldError(ValueError):
    """A wrong setting; `key` is its name, `message` what is wrong and what would be right."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


def build(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """Return an instance of the dataclass `cls` with fields from the mapping, types checked.

    Understands None, bool, int, float (an int will do), str, Literal, unions of these, tuples of
    one of them, and `Mapping[str, ...]`. Raises FieldError for an unknown, missing or mistyped
    field, and passes on the FieldError of the dataclass's own checks.
    """
    assert dataclasses.is_dataclass(cls)
    hints = _hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    for key in mapping:
        if key not in names:
            raise FieldError(key, f"is not a setting of this engine{suggestion(key, names)}")
    values = {key: _checked(key, value, hints[key]) for key, value in mapping.items()}
    for field in dataclasses.fields(cls):
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and field.name not in values:
            raise FieldError(field.name, "is required and has no default")
    return typing.cast(T, cls(**values))


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Return the types of a class's fields, which take a millisecond to make out."""
    return typing.get_type_hints(cls)


def _checked(key: str, value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for option in arguments:
            try:
                return _checked(key, value, option)
            except FieldError:
                continue
        raise _wrong(key, value, hint)
    if origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in arguments):
            return value
        raise _wrong(key, value, hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(key, value, hint)
        return tuple(_checked(f"{key}[{i}]", each, arguments[0]) for i, each in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(key, value, hint)
        return {
            str(name): _checked(f"{key}.{name}", each, arguments[1]) for name, each in value.items()
        }
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, bool):
        raise _wrong(key, value, hint)
    if isinstance(value, hint):
        return value
    raise _wrong(key, value, hint)


def _wrong(key: str, value: Any, hint: Any) -> FieldError:
    note = ""
    if isinstance(value, bool):
        note = " (YAML reads on, off, yes and no as booleans: put them in quotes)"
    return FieldError(key, f"must be {_said(hint)}, got {value!r}{note}")


def _said(hint: Any) -> str:
    """Return a type as a person says it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_said(option) for option in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(option) for option in arguments)
    if origin is tuple:
        return f"a list of {_said(arguments[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(hint, "null" if hint is type(None) else getattr(hint, "__name__", str(hint)))
