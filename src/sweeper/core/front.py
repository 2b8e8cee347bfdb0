"""Dominance, the Pareto front and its hypervolume. Every objective is maximised."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[Label]):
    """A labelled vector of objectives, each one finite and to be maximised."""

    label: Label
    objectives: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ValueError("an entry needs at least one objective")
        if not all(math.isfinite(value) for value in self.objectives):
            raise ValueError(f"objectives must be finite, got {self.objectives}")


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether `one` is at least as good everywhere and better somewhere."""
    return all(a >= b for a, b in zip(one, other, strict=True)) and any(
        a > b for a, b in zip(one, other, strict=True)
    )


def pareto_front(entries: Iterable[Entry[Label]]) -> tuple[Entry[Label], ...]:
    """Return the entries that no other dominates, best first objective first.

    Of entries with equal objectives all stay: they are equally good answers.
    """
    everyone = sorted(entries, key=lambda entry: entry.objectives, reverse=True)
    front: list[Entry[Label]] = []
    for entry in everyone:
        # Sorted in descending lexicographic order, nothing later can dominate what came before.
        if not any(dominates(kept.objectives, entry.objectives) for kept in front):
            front.append(entry)
    return tuple(front)


def hypervolume(points: Iterable[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the volume that the points dominate above the reference, in any dimension.

    Points at or below the reference in some objective add nothing. Exact, by slicing along the
    last objective (While et al. 2006, "A faster algorithm for calculating hypervolume");
    O(n log n) in two dimensions.
    """
    above = [
        tuple(a - r for a, r in zip(point, reference, strict=True))
        for point in points
        if all(a > r for a, r in zip(point, reference, strict=True))
    ]
    return _volume(above, len(reference))


def _volume(points: list[tuple[float, ...]], dimensions: int) -> float:
    if not points:
        return 0.0
    if dimensions == 1:
        return max(point[0] for point in points)
    if dimensions == 2:
        total, height = 0.0, 0.0
        for x, y in sorted(points, reverse=True):
            if y > height:
                total += x * (y - height)
                height = y
        return total
    total = 0.0
    levels = sorted({point[-1] for point in points})
    below = 0.0
    for level in levels:
        slab = [point[:-1] for point in points if point[-1] >= level]
        total += (level - below) * _volume(slab, dimensions - 1)
        below = level
    return total
