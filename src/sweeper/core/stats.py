"""Samples to a summary with its interval and its doubts."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


class Doubt(enum.StrEnum):
    """A reason to trust a number less; printing it is someone else's job."""

    TOO_FEW = "too_few"
    """Too few samples for the interval to reach the asked confidence."""
    WIDE = "wide"
    """The interval is wider than a tenth of the median."""
    CLOCKS_DISAGREE = "clocks_disagree"
    """The server's own timing differs from the client's by more than 3 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A median with everything needed to judge it.

    `low` and `high` bound the median with probability `confidence` (the coverage actually
    reached, which few samples keep below what was asked). `spread` is the interquartile range.
    All in the unit of the samples.
    """

    n: int
    median: float
    low: float
    high: float
    confidence: float
    spread: float
    method: str
    doubts: tuple[Doubt, ...] = ()


def summarise(samples: Sequence[float], *, confidence: float = 0.95) -> Summary:
    """Return the median with its exact, distribution-free order-statistic interval.

    The interval between the k-th smallest and the k-th largest of n samples covers the median
    with probability 1 - 2 P(Binomial(n, 1/2) < k) (David & Nagaraja, Order Statistics, 7.1).
    The largest k that still reaches `confidence` is used, else k = 1 and the doubt TOO_FEW.

    Raises ValueError for no samples or a sample that is not finite.
    """
    if not samples:
        raise ValueError("no samples to summarise")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError(f"samples must be finite, got {list(samples)}")
    ordered = sorted(samples)
    n = len(ordered)
    k = _rank(n, confidence)
    median = statistics.median(ordered)
    low, high = ordered[k - 1], ordered[n - k]
    reached = _coverage(n, k) if n > 1 else 0.0
    doubts = []
    if reached < confidence:
        doubts.append(Doubt.TOO_FEW)
    if high - low > abs(median) / 10:
        doubts.append(Doubt.WIDE)
    return Summary(
        n=n,
        median=median,
        low=low,
        high=high,
        confidence=reached,
        spread=_iqr(ordered),
        method="order-statistic",
        doubts=tuple(doubts),
    )


def _rank(n: int, confidence: float) -> int:
    """Return the largest k whose interval still covers with `confidence`, else 1."""
    k, tail = 1, 1
    while k < n // 2:
        tail += math.comb(n, k)
        if 1.0 - 2 * tail / 2**n < confidence:
            break
        k += 1
    return k


def _coverage(n: int, k: int) -> float:
    """Return the probability that the k-th smallest and k-th largest of n bracket the median."""
    # Divided as whole numbers: as floats, 2**n is too large from n = 1024 on.
    return float(1.0 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n)


def _iqr(ordered: Sequence[float]) -> float:
    if len(ordered) < 2:
        return 0.0
    first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
    return third - first
