"""Points as rows of small integers: what the models of the search compute with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from sweeper.core.evidence import Role
from sweeper.core.pairs import Scalar, text
from sweeper.core.space import AxisRef, Condition, Space

Codes = NDArray[np.int16]
"""One row a point, one column an axis: the index of its value, or the number of values there are
where the axis is not active."""
Floats = NDArray[np.float64]

_WHOLE = 1 << 19
"""Spaces up to this many combinations are held whole; larger ones are sampled."""
_SAMPLED = 1 << 17
_LEVELS = 33
"""Into how many levels a continuous or very long axis is cut."""


@dataclass(frozen=True, kw_only=True)
class CodedAxis:
    """An axis as the models see it.

    `numbers` are the values as numbers where all of them are (NaN where inactive), else None;
    `place` their position on [0, 1] in the order of the axis, for ordered axes.
    """

    name: str
    role: Role
    ordered: bool
    values: tuple[Scalar, ...]
    distribution: BaseDistribution
    by_index: bool
    conditional: bool

    @property
    def size(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def numbers(self) -> Floats | None:
        """The values as numbers, with NaN for the inactive code; None if they are no numbers."""
        found = [_number(value) for value in self.values]
        if any(value is None for value in found):
            return None
        return np.array([*found, np.nan], dtype=np.float64)

    @property
    def place(self) -> Floats:
        """The position of each value on [0, 1], by rank; the inactive code is far from all."""
        last = max(self.size - 1, 1)
        return np.array([*(index / last for index in range(self.size)), -3.0])

    def code(self, raw: object) -> int:
        """Return the code of a value as Optuna stores it; raises ValueError if there is none."""
        if self.by_index:
            index = int(raw)  # type: ignore[call-overload]
            if not 0 <= index < self.size:
                raise ValueError(f"{self.name} has no value number {index}")
            return int(index)
        if isinstance(self.distribution, CategoricalDistribution):
            for index, value in enumerate(self.values):
                if value == raw and isinstance(value, bool) == isinstance(raw, bool):
                    return index
            raise ValueError(f"{self.name} has no value {raw!r}")
        numbers = self.numbers
        assert numbers is not None
        return int(np.argmin(np.abs(numbers[:-1] - float(raw))))  # type: ignore[arg-type]

    def raw(self, code: int) -> Scalar:
        """Return the value that Optuna stores for a code."""
        return int(code) if self.by_index else self.values[code]


def _number(value: Scalar) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(str(value))
    except ValueError:
        return None


@dataclass(kw_only=True)
class CodedSpace:
    """Axes and the points that may be proposed.

    `whole` tells whether `points` are all there are; if not, they are a sample. `settle` brings
    rows of active codes into their final form and drops those that are not allowed.
    """

    axes: tuple[CodedAxis, ...]
    points: Codes
    whole: bool
    settle: Callable[[Codes], Codes]
    _weights: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights = [1]
        for axis in self.axes[:0:-1]:
            # Wraps around in spaces beyond 2**63 points: two of those seen may in theory collide.
            weights.append(weights[-1] * (axis.size + 1) % (2**63 - 25))
        self._weights = np.array(weights[::-1], dtype=np.int64)

    def keys(self, codes: Codes) -> NDArray[np.int64]:
        """Return one number a row, equal for equal points."""
        with np.errstate(over="ignore"):
            return codes.astype(np.int64) @ self._weights

    def encode(self, params: Mapping[str, object]) -> Codes | None:
        """Return the row of Optuna parameters, or None where a value is not of this space."""
        row = np.empty(len(self.axes), dtype=np.int16)
        for column, axis in enumerate(self.axes):
            if axis.name not in params:
                row[column] = axis.size
                continue
            try:
                row[column] = axis.code(params[axis.name])
            except (TypeError, ValueError):
                return None
        return row

    def params(self, row: Codes) -> dict[str, Scalar]:
        """Return the Optuna parameters of a row, active axes only."""
        return {
            axis.name: axis.raw(int(code))
            for axis, code in zip(self.axes, row, strict=True)
            if code < axis.size
        }

    def described(self, row: Codes) -> str:
        """Return the point in words."""
        return " ".join(
            f"{axis.name}={text(axis.values[code])}"
            for axis, code in zip(self.axes, row, strict=True)
            if code < axis.size
        )

    def of_role(self, *roles: Role) -> list[int]:
        """Return the columns that play one of these roles."""
        return [index for index, axis in enumerate(self.axes) if axis.role in roles]


def from_space(space: Space, roles: Mapping[str, Role], seed: int) -> CodedSpace:
    """Return a declared space in codes, without the points that a rule forbids.

    Raises ValueError for a role of an axis that is not there.
    """
    names = [axis.name for axis in space.axes]
    for name in roles:
        if name not in names:
            raise ValueError(f"a role is given to {name}, which is no axis of the space")
    axes = tuple(
        CodedAxis(
            name=axis.name,
            role=roles.get(axis.name, Role.OTHER),
            ordered=axis.ordered,
            values=axis.values,
            distribution=(
                IntDistribution(0, len(axis.values) - 1)
                if axis.ordered
                else CategoricalDistribution(axis.values)
            ),
            by_index=axis.ordered,
            conditional=bool(axis.when),
        )
        for axis in space.axes
    )
    filters: list[tuple[int | None, tuple[Condition, ...]]] = [
        (index, axis.when) for index, axis in enumerate(space.axes) if axis.when
    ]
    rules = [rule.forbid for rule in space.rules]

    def settle(codes: Codes) -> Codes:
        for index, conditions in filters:
            assert index is not None
            active = _all_hold(conditions, axes, codes)
            codes[~active, index] = axes[index].size
        keep = np.ones(len(codes), dtype=bool)
        for conditions in rules:
            keep &= ~_all_hold(conditions, axes, codes)
        return codes[keep]

    return _built(axes, settle, seed)


def _all_hold(
    conditions: Sequence[Condition], axes: tuple[CodedAxis, ...], codes: Codes
) -> NDArray[np.bool_]:
    """Evaluate conditions on every row, asking once for each combination of what they read."""
    names = [axis.name for axis in axes]
    result = np.ones(len(codes), dtype=bool)
    for condition in conditions:
        columns = [names.index(name) for name in condition.axes()]
        table = np.zeros([axes[column].size + 1 for column in columns], dtype=bool)
        for combination in itertools.product(*(range(axes[c].size + 1) for c in columns)):
            values = {
                axes[column].name: axes[column].values[code]
                for column, code in zip(columns, combination, strict=True)
                if code < axes[column].size
            }
            table[combination] = condition.holds(values)
        result &= table[tuple(codes[:, column] for column in columns)]
        if isinstance(condition.operand, AxisRef):
            assert len(columns) == 2
    return result


def from_points(axes: tuple[CodedAxis, ...], points: Codes) -> CodedSpace:
    """Return a space that consists of exactly these rows."""
    space = CodedSpace(axes=axes, points=points, whole=True, settle=lambda codes: codes)
    keys = np.sort(space.keys(points))

    def settle(codes: Codes) -> Codes:
        asked = space.keys(codes)
        at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        there: Codes = codes[keys[at] == asked]
        return there

    space.settle = settle
    return space


def _built(axes: tuple[CodedAxis, ...], settle: Callable[[Codes], Codes], seed: int) -> CodedSpace:
    sizes = [axis.size for axis in axes]
    total = 1
    for size in sizes:
        total *= size

    if total <= _WHOLE:
        drawn = _product(sizes)
    else:
        generator = np.random.default_rng(seed)
        drawn = np.stack([generator.integers(size, size=_SAMPLED) for size in sizes], axis=1)
    codes = settle(drawn.astype(np.int16))
    space = CodedSpace(axes=axes, points=codes, whole=total <= _WHOLE, settle=settle)
    # An axis that is not active gives the same point for each of its values.
    _, first = np.unique(space.keys(codes), return_index=True)
    space.points = codes[np.sort(first)]
    return space


def _product(sizes: Sequence[int]) -> Codes:
    grids = np.meshgrid(*(np.arange(size, dtype=np.int16) for size in sizes), indexing="ij")
    return np.stack([grid.ravel() for grid in grids], axis=1)


# --- spaces that are seen only through their trials ---------------------------------------------


def from_trials(
    seen: Sequence[tuple[Mapping[str, object], Mapping[str, BaseDistribution]]],
    roles: Mapping[str, Role],
    seed: int,
) -> CodedSpace | None:
    """Return the space that trials have shown so far, or None if they have shown nothing.

    Optuna's spaces are defined by running: which axes there are, and which of them depend on
    others, shows only in the trials. An axis that was missing in some of them is taken to hang on
    the one axis whose value has so far told whether it is there.
    """
    latest: dict[str, BaseDistribution] = {}
    for _, distributions in seen:
        latest.update(distributions)
    if not latest:
        return None
    axes = tuple(
        _axis_of(name, latest[name], roles.get(name, Role.OTHER), seen) for name in sorted(latest)
    )
    switches = dict(_switches(axes, seen))

    def settle(codes: Codes) -> Codes:
        # Twice, for a switch may itself hang on another one.
        for _ in range(2):
            for column, (by, without) in switches.items():
                codes[without[codes[:, by]], column] = axes[column].size
        return codes

    return _built(axes, settle, seed)


def _axis_of(
    name: str,
    distribution: BaseDistribution,
    role: Role,
    seen: Sequence[tuple[Mapping[str, object], Mapping[str, BaseDistribution]]],
) -> CodedAxis:
    conditional = any(name not in params for params, _ in seen)
    values: tuple[Scalar, ...]
    match distribution:
        case CategoricalDistribution(choices=choices):
            values, ordered = tuple(choices), False
        case IntDistribution(low=low, high=high, log=log, step=step):
            ordered = True
            count = (high - low) // step + 1
            if count <= _LEVELS:
                values = tuple(range(low, high + 1, step))
            elif log:
                values = tuple(
                    sorted({round(v) for v in np.geomspace(low, high, _LEVELS).tolist()})
                )
            else:
                steps = np.unique(np.linspace(0, count - 1, _LEVELS).round().astype(int))
                values = tuple(low + int(each) * step for each in steps)
        case FloatDistribution(low=low_f, high=high_f, log=log, step=step_f):
            ordered = True
            if step_f is not None and (high_f - low_f) / step_f < _LEVELS:
                count = round((high_f - low_f) / step_f) + 1
                values = tuple(low_f + index * step_f for index in range(count))
            elif log:
                values = tuple(np.geomspace(low_f, high_f, _LEVELS).tolist())
                values = (low_f, *values[1:-1], high_f)
            elif step_f is not None:
                count = round((high_f - low_f) / step_f) + 1
                picks = np.unique(np.linspace(0, count - 1, _LEVELS).round().astype(int))
                values = tuple(low_f + int(each) * step_f for each in picks)
            else:
                values = tuple(np.linspace(low_f, high_f, _LEVELS).tolist())
        case _:
            raise ValueError(f"{name}: {type(distribution).__name__} is not known to this sampler")
    return CodedAxis(
        name=name,
        role=role,
        ordered=ordered,
        values=tuple(dict.fromkeys(values)),
        distribution=distribution,
        by_index=False,
        conditional=conditional,
    )


def _switches(
    axes: tuple[CodedAxis, ...],
    seen: Sequence[tuple[Mapping[str, object], Mapping[str, BaseDistribution]]],
) -> Iterator[tuple[int, tuple[int, NDArray[np.bool_]]]]:
    for column, axis in enumerate(axes):
        if not axis.conditional:
            continue
        best: tuple[tuple[int, int], int, NDArray[np.bool_]] | None = None
        for by, other in enumerate(axes):
            if by == column:
                continue
            present = np.zeros(other.size + 1, dtype=int)
            absent = np.zeros(other.size + 1, dtype=int)
            for params, _ in seen:
                code = other.code(params[other.name]) if other.name in params else other.size
                (present if axis.name in params else absent)[code] += 1
            # Of several that tell equally well, the one with the fewest values.
            rank = int(np.minimum(present, absent).sum()), other.size
            if best is None or rank < best[0]:
                best = rank, by, absent > present
        if best is not None:
            yield column, (best[1], best[2])
