"""Axes, points and declared rules: what may be combined, and why not."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sweeper.core.pairs import Pairs, Point, Scalar, text

Op: TypeAlias = Literal["in", "not_in", "lt", "le", "gt", "ge"]
OPS: tuple[Op, ...] = ("in", "not_in", "lt", "le", "gt", "ge")


class SpaceError(ValueError):
    """A mistake in a declared space; `key` is the place of it, as in `space.context.range`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRef:
    """The value of another axis, as the right-hand side of a comparison."""

    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A test of one axis: `axis op operand`.

    `in` and `not_in` take a tuple of scalars, the others a number or another axis. An axis that
    is not active in a point satisfies no condition: what is not there cannot be compared.
    """

    axis: str
    op: Op
    operand: tuple[Scalar, ...] | AxisRef | float

    def __post_init__(self) -> None:
        if self.op not in OPS or (self.op in ("in", "not_in")) != isinstance(self.operand, tuple):
            raise ValueError(f"{self.op} cannot compare with {self.operand!r}")

    def holds(self, values: Mapping[str, Scalar]) -> bool:
        """Tell whether the condition is true of these axis values."""
        if self.axis not in values:
            return False
        left = values[self.axis]
        if isinstance(self.operand, tuple):
            found = _among(left, self.operand)
            return found if self.op == "in" else not found
        right: Scalar
        if isinstance(self.operand, AxisRef):
            if self.operand.axis not in values:
                return False
            right = values[self.operand.axis]
        else:
            right = self.operand
        if not (_is_number(left) and _is_number(right)):
            return False
        assert isinstance(left, int | float)
        assert isinstance(right, int | float)
        match self.op:
            case "lt":
                return left < right
            case "le":
                return left <= right
            case "gt":
                return left > right
            case "ge":
                return left >= right
            case _:
                raise AssertionError(f"{self.op} cannot compare with {self.operand!r}")

    def axes(self) -> tuple[str, ...]:
        """Return the names of the axes this condition reads."""
        if isinstance(self.operand, AxisRef):
            return (self.axis, self.operand.axis)
        return (self.axis,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension of a space.

    `values` are in their order of meaning where `ordered` is true. `sets` names the engine
    settings that take the value. The axis is active only in points where all of `when` hold.
    """

    name: str
    values: tuple[Scalar, ...]
    ordered: bool
    sets: tuple[str, ...]
    when: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if not self.values:
            raise SpaceError(f"space.{self.name}", "has no values")
        for value in self.values:
            if isinstance(value, float) and not math.isfinite(value):
                raise SpaceError(f"space.{self.name}", f"has a value that is no number: {value}")
        # 1 and 1.0 are one answer, 1 and True are two; see `_among`.
        if len({(isinstance(value, bool), value) for value in self.values}) != len(self.values):
            raise SpaceError(f"space.{self.name}", f"names a value twice: {list(self.values)}")

    def active(self, values: Mapping[str, Scalar]) -> bool:
        """Tell whether this axis takes part in a point with these values."""
        return all(condition.holds(values) for condition in self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A combination that cannot work or is not wanted: forbidden where all conditions hold."""

    reason: str
    forbid: tuple[Condition, ...]

    def forbids(self, values: Mapping[str, Scalar]) -> bool:
        """Tell whether a point with these values falls under the rule."""
        return all(condition.holds(values) for condition in self.forbid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The declared axes and rules. Axes come in an order in which every `when` looks back.

    Raises SpaceError when an axis is declared twice, or a condition reads an axis that is
    missing or waits, through other conditions, for itself.
    """

    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        if not self.axes:
            raise SpaceError("space", "declares no axis; name at least one")
        names = [axis.name for axis in self.axes]
        for axis in self.axes:
            if names.count(axis.name) > 1:
                raise SpaceError(f"space.{axis.name}", "is declared twice")
            for condition in axis.when:
                for name in condition.axes():
                    _known(name, names, f"space.{axis.name}.when")
        for index, rule in enumerate(self.rules):
            if not rule.forbid:
                raise SpaceError(f"rules[{index}].forbid", "names no axis, so it would forbid all")
            for condition in rule.forbid:
                for name in condition.axes():
                    _known(name, names, f"rules[{index}].forbid")
        object.__setattr__(self, "axes", _in_order(self.axes))

    def points(self) -> Iterator[Point]:
        """Yield every point that the conditions allow and no rule forbids, in a fixed order."""
        for values in self._assignments(0, {}):
            if not any(rule.forbids(values) for rule in self.rules):
                yield Pairs(values)

    def declared(self) -> Iterator[Mapping[str, Scalar]]:
        """Yield the values of every point that the conditions allow, ruled out or not."""
        yield from self._assignments(0, {})

    def _assignments(self, depth: int, values: dict[str, Scalar]) -> Iterator[dict[str, Scalar]]:
        if depth == len(self.axes):
            yield values
            return
        axis = self.axes[depth]
        if not axis.active(values):
            yield from self._assignments(depth + 1, values)
            return
        for value in axis.values:
            yield from self._assignments(depth + 1, {**values, axis.name: value})

    def declared_size(self) -> int:
        """Return the number of points the conditions allow, before any rule."""
        return sum(1 for _ in self._assignments(0, {}))

    def refused_by(self, point: Mapping[str, Scalar]) -> Rule | None:
        """Return the first declared rule that forbids the point, if one does."""
        return next((rule for rule in self.rules if rule.forbids(point)), None)

    def checked(self, values: Mapping[str, Scalar], key: str) -> Point:
        """Return the values as a point of this space; `key` names their place in an error.

        A value comes back as its axis declares it: 2048.0 as 2048, where that is the value.
        """
        names = [axis.name for axis in self.axes]
        point: dict[str, Scalar] = {}
        for name in values:
            _known(name, names, key)
        for axis in self.axes:
            if not axis.active(values):
                if axis.name in values:
                    raise SpaceError(
                        f"{key}.{axis.name}", "is given, but its `when` does not hold here"
                    )
                continue
            if axis.name not in values:
                raise SpaceError(key, f"gives no value for {axis.name}")
            same = [each for each in axis.values if _among(values[axis.name], (each,))]
            if not same:
                allowed = ", ".join(text(value) for value in axis.values)
                raise SpaceError(
                    f"{key}.{axis.name}",
                    f"{text(values[axis.name])} is not one of its values: {allowed}",
                )
            point[axis.name] = same[0]
        return Pairs(point)

    def digest(self) -> str:
        """Return 16 hex digits that change when any axis, value, condition or rule changes."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[
            :16
        ]

    def described(self) -> dict[str, object]:
        """Return the space as JSON-ready data, to be stored beside a study and compared."""
        return {
            "axes": {
                axis.name: {
                    "values": list(axis.values),
                    "ordered": axis.ordered,
                    "sets": list(axis.sets),
                    "when": [_described(condition) for condition in axis.when],
                }
                for axis in self.axes
            },
            "rules": [
                {"reason": rule.reason, "forbid": [_described(each) for each in rule.forbid]}
                for rule in self.rules
            ],
        }


def _described(condition: Condition) -> list[object]:
    match condition.operand:
        case AxisRef(axis=name):
            operand: object = {"axis": name}
        case tuple() as several:
            operand = list(several)
        case number:
            operand = number
    return [condition.axis, condition.op, operand]


def _known(name: str, names: Sequence[str], key: str) -> None:
    if name not in names:
        raise SpaceError(
            key, f"names an axis that is not declared: {name}{suggestion(name, names)}"
        )


def suggestion(name: str, names: Sequence[str]) -> str:
    """Return the tail of an error message: the nearest known name, or all of them."""
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f" (did you mean {near[0]}?)"
    return f" (there are: {', '.join(sorted(names))})" if names else ""


def _in_order(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return the axes so that each comes after those its conditions read."""
    placed: list[Axis] = []
    waiting = list(axes)
    while waiting:
        names = {axis.name for axis in placed}
        ready = [
            axis
            for axis in waiting
            if all(name in names for condition in axis.when for name in condition.axes())
        ]
        if not ready:
            stuck = ", ".join(axis.name for axis in waiting)
            raise SpaceError(f"space.{waiting[0].name}.when", f"waits for itself through: {stuck}")
        placed.append(ready[0])
        waiting.remove(ready[0])
    return tuple(placed)


def _among(value: Scalar, values: Sequence[Scalar]) -> bool:
    # 1 == True in Python, but a boolean and a number are different answers here.
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
