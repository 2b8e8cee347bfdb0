"""What each axis did: every value beside its matches, with how little may be behind it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeper.core.objectives import counted_tok_s
from sweeper.core.outcome import Attempt, Infeasible, Measured
from sweeper.core.pairs import Pairs, Point, Scalar
from sweeper.core.standing import standing
from sweeper.report.front import axes_of

LEAST_COMPARISONS = 4
"""Below so many comparisons no interval is given: a bootstrap of two values knows nothing."""
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What became of the points with one value of one axis.

    `ratio` is the geometric mean, over the `comparisons`, of a point's decode speed over the median
    of its matches; `low` and `high` hold it with 95 % (bootstrap), None where comparisons are too
    few. `exact` of the comparisons are with points that differ in this axis alone.
    """

    axis: str
    value: Scalar
    boots: int
    measured: int
    out_of_memory: int
    failed_otherwise: int
    comparisons: int
    exact: int
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """Whether the value makes a difference: by its interval, from exact matches mostly."""
        return (
            self.low is not None
            and self.high is not None
            and not self.low <= 1 <= self.high
            and 2 * self.exact >= self.comparisons
        )

    @property
    def mixed(self) -> bool:
        """Whether most comparisons are with points that differ in another axis as well."""
        return 2 * self.exact < self.comparisons


def effects_of(attempts: Iterable[Attempt]) -> tuple[Effect, ...]:
    """Return the effect of every value of every axis that took several values, axis by axis.

    A point is compared with those that have another value of the axis and the same of all others,
    or, where there are none, that differ in one other axis as well.
    """
    everyone = list(attempts)
    speeds = {
        each.point: counted_tok_s(each.outcome)
        for each in standing(everyone)
        if isinstance(each.outcome, Measured) and each.outcome.decode_tok_s.median > 0
    }
    first = [each for each in everyone if each.confirms is None]
    found: list[Effect] = []
    for axis in axes_of(first):
        values = _values(first, axis)
        if len(values) > 1:
            found += [_effect(axis, value, first, speeds) for value in values]
    return tuple(found)


def _values(attempts: Sequence[Attempt], axis: str) -> list[Scalar]:
    """Return the different values of an axis: numbers by size, anything else by its text."""
    # Through Pairs, because there 1 and true are different values.
    values = list(
        {Pairs(v=each.point[axis]): each.point[axis] for each in attempts if axis in each.point}
        .values()
    )  # fmt: skip
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        return sorted(values)  # type: ignore[type-var]
    return sorted(values, key=str)


def _effect(
    axis: str, value: Scalar, attempts: Sequence[Attempt], speeds: Mapping[Point, float]
) -> Effect:
    here = [each for each in attempts if _has(each.point, axis, value)]
    outcomes = [each.outcome for each in here]
    ratios, exact = _ratios(axis, value, speeds)
    low, high = _bootstrap(ratios)
    memory = sum(isinstance(each, Infeasible) and each.name.is_memory for each in outcomes)
    measured = sum(isinstance(each, Measured) for each in outcomes)
    return Effect(
        axis=axis,
        value=value,
        boots=len(here),
        measured=measured,
        out_of_memory=memory,
        failed_otherwise=len(here) - measured - memory,
        comparisons=len(ratios),
        exact=exact,
        ratio=math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None,
        low=low,
        high=high,
    )


def _has(point: Point, axis: str, value: Scalar) -> bool:
    return axis in point and Pairs(v=point[axis]) == Pairs(v=value)


def _ratios(axis: str, value: Scalar, speeds: Mapping[Point, float]) -> tuple[list[float], int]:
    """Return each point's speed over the median of its matches, and how many match exactly."""
    ratios, exact = [], 0
    for point, speed in speeds.items():
        if not _has(point, axis, value):
            continue
        matches: dict[int, list[float]] = {0: [], 1: []}
        for other, its_speed in speeds.items():
            if axis not in other or _has(other, axis, value):
                continue
            away = _differing(point, other, besides=axis)
            if away in matches:
                matches[away].append(its_speed)
        nearest = matches[0] or matches[1]
        if nearest:
            ratios.append(speed / statistics.median(nearest))
            exact += bool(matches[0])
    return ratios, exact


def _differing(one: Point, other: Point, *, besides: str) -> int:
    names = {*one, *other} - {besides}
    return sum(
        name not in one or name not in other or Pairs(v=one[name]) != Pairs(v=other[name])
        for name in names
    )


def _bootstrap(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the percentile interval of the geometric mean; the same for the same ratios."""
    if len(ratios) < LEAST_COMPARISONS:
        return None, None
    import numpy as np

    logs = np.log(np.array(ratios))
    drawn = np.random.default_rng(0).integers(len(logs), size=(_RESAMPLES, len(logs)))
    low, high = np.exp(np.quantile(logs[drawn].mean(axis=1), (0.025, 0.975)))
    return float(low), float(high)
