"""Immutable, hashable string-keyed mappings: what a value uses where others would use a dict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TypeAlias

Scalar: TypeAlias = bool | int | float | str | None
"""What an axis value, a setting or a fact may be: a JSON scalar."""


class Pairs(Mapping[str, Scalar]):
    """A frozen mapping of names to scalars, ordered by name, usable as a key and in a digest."""

    __slots__ = ("_canonical", "_items", "_lookup")

    def __init__(self, mapping: Mapping[str, Scalar] | None = None, /, **named: Scalar) -> None:
        merged: dict[str, Scalar] = {**(mapping or {}), **named}
        for name, value in merged.items():
            if not isinstance(name, str):
                raise TypeError(f"a name must be a string, got {name!r}")
            if value is not None and not isinstance(value, bool | int | float | str):
                raise TypeError(f"{name} must be a scalar, got {type(value).__name__}: {value!r}")
        self._items = tuple(sorted(merged.items(), key=lambda item: item[0]))
        self._lookup = dict(self._items)
        self._canonical: str | None = None

    def __getitem__(self, name: str) -> Scalar:
        return self._lookup[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lookup)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self.canonical())

    def __eq__(self, other: object) -> bool:
        # Through the canonical text, so that 1, 1.0 and True stay three different values.
        if isinstance(other, Pairs):
            return self.canonical() == other.canonical()
        return NotImplemented

    def __repr__(self) -> str:
        return f"Pairs({', '.join(f'{name}={value!r}' for name, value in self._items)})"

    def __str__(self) -> str:
        return " ".join(f"{name}={text(value)}" for name, value in self._items)

    def canonical(self) -> str:
        """Return the one JSON text of this mapping, equal for equal mappings."""
        # Written once: points are keys, looked up a thousand times while a search thinks.
        if self._canonical is None:
            self._canonical = json.dumps(
                self._lookup, sort_keys=True, separators=(",", ":"), ensure_ascii=True
            )
        return self._canonical

    def digest(self) -> str:
        """Return the first 16 hex digits of the SHA-256 of the canonical text."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:16]

    def with_(self, **named: Scalar) -> Pairs:
        """Return a copy in which the named entries are added or replaced."""
        return Pairs({**self._lookup, **named})


Point: TypeAlias = Pairs
"""One configuration of a space: the value of every axis that is active in it."""


def text(value: Scalar) -> str:
    """Return a scalar as a person writes it in YAML: null, true, 4096, f16."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)
