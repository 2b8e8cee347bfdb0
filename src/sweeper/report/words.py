"""Figures and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import text


def figure_text(value: float) -> str:
    """Return a measured figure with no more digits than it can carry."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )


def count_text(value: float) -> str:
    """Return a count with its thousands apart."""
    return f"{value:,.0f}"


def percent_text(value: float) -> str:
    """Return a share of 1 in percent, without the sign."""
    return f"{value * 100:.1f}"


def fact_text(value: object) -> str:
    """Return any fact as a person writes it."""
    return (
        text(value) if value is None or isinstance(value, bool | int | float | str) else str(value)
    )


def is_simulated(attempts: Iterable[Attempt]) -> bool:
    """Tell whether any of these figures was invented by a fake engine."""
    return any(attempt.engine.get("simulated") is True for attempt in attempts)


def subject_of(attempts: Sequence[Attempt]) -> str:
    """Return the study, engine and model that these attempts belong to, in one line."""
    if not attempts:
        return "a study without attempts"
    first = attempts[0]
    engine = " ".join(
        text(first.engine[key])
        for key in ("name", "engine_version")
        if first.engine.get(key) is not None
    )
    parts = [first.study, engine, fact_text(first.model.get("name", ""))]
    said = " · ".join(part for part in parts if part)
    return f"{said} · SIMULATED" if is_simulated(attempts) else said


def short_tokens(tokens: float) -> str:
    """Return a token count as people say it: 512, 4K, 1M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens >= size:
            return f"{tokens / size:.4g}{unit}"
    return f"{tokens:.4g}"


def ratio_ticks(reach: float) -> list[float]:
    """Return round ratios within so many doublings of 1: from three to nine of them."""
    for several in (
        (0.125, 0.25, 0.5, 1, 2, 4, 8),
        (0.35, 0.5, 0.7, 1, 1.4, 2, 2.8),
        (0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5),
        (0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15),
    ):
        shown = [each for each in several if abs(math.log2(each)) <= reach]
        if len(shown) > 4:
            return shown
    return [0.94, 0.96, 0.98, 1, 1.02, 1.04, 1.06]


def size_ticks(least: float, most: float) -> list[float]:
    """Return round sizes between two sizes, two at least: 1, 3, 10, 30 and so on, or closer."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for steps in ((1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [each for each in ticks if least <= each <= most]
        if len(ticks) > 2:
            return ticks
    return sorted({float(f"{least:.2g}"), float(f"{most:.2g}"), *ticks})
