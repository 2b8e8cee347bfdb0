"""What a sequence of repeats says against its own median: drift, two speeds, tails, a cold start.

Every test has two conditions: chance hardly explains what is seen, and what is seen is large enough
to matter. All work on logarithms of speeds, so that effects are shares of the speed: -0.1 is a
tenth slower, or nearly. How often they are right and wrong is measured in `benchmarks/coverage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeper.core.stats import Doubt, normal_quantile

Values = NDArray[np.float64]

LEAST_VALUES = 5
"""Of fewer repeats nothing is said."""
_LONGEST = 400
"""Longer sequences are cut into so many stretches, each by its median, to look for a drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """How strong evidence must be, in probabilities, robust standard deviations and shares.

    `drift_p` is the two-sided level of the trend test, `drift_share` the least change from the
    first to the last value. A cold start lies `cold_sigmas` and `cold_share` below what follows.
    Each of `apart` is a number of sigmas and a share that make an outlier, each of `modes` the most
    that two groups may leave of all squares, and the least share that they are apart.
    """

    drift_p: float
    drift_share: float
    cold_sigmas: float
    cold_share: float
    apart: tuple[tuple[float, float], ...]
    modes: tuple[tuple[float, float], ...]


DOUBTFUL = Levels(
    drift_p=0.01,
    drift_share=0.02,
    cold_sigmas=6.0,
    cold_share=0.03,
    apart=((10.0, 0.09), (5.0, 0.2)),
    modes=((0.15, 0.05), (0.2, 0.085)),
)
"""Enough for a doubt."""

SUSPICIOUS = Levels(
    drift_p=0.05,
    drift_share=0.015,
    cold_sigmas=4.0,
    cold_share=0.02,
    apart=((5.0, 0.04),),
    modes=((0.2, 0.03),),
)
"""Enough to look on for longer before a number is believed."""


def doubts_of(
    values: Sequence[float],
    *,
    before: Sequence[float] = (),
    gaps: Sequence[Sequence[float]] = (),
    levels: Levels = DOUBTFUL,
) -> tuple[Doubt, ...]:
    """Return what the speeds of repeats, in the order of time, say against their own median.

    `before` are the speeds of warm-up requests, in the order of time: their settled part is further
    evidence of tails. `gaps` are the times between pieces of text of each repeat, in s. Of fewer
    than five values nothing is said.

    Raises ValueError for speeds that are not finite or not above 0.
    """
    logs, earlier = _logs(values), _logs(before)
    if len(logs) < LEAST_VALUES:
        return ()
    doubts = []
    cold = cold_start(logs, levels)
    if cold:
        doubts.append(Doubt.WARMING)
    if drifting(logs[cold:], levels):
        doubts.append(Doubt.DRIFTING)
    everything = _with_earlier(logs, earlier)
    if bimodal(logs, levels) or repeated(everything, levels):
        doubts.append(Doubt.BIMODAL)
    if len(outliers(everything, levels)) or stalled(gaps):
        doubts.append(Doubt.OUTLIERS)
    return tuple(doubts)


def drifting(logs: Values, levels: Levels = DOUBTFUL) -> bool:
    """Tell whether values rise or fall over time.

    The Mann-Kendall test by the normal approximation, corrected for ties (Mann 1945; Kendall 1975,
    Rank Correlation Methods): z = (|S| - 1) / sqrt(var S), S the sum of the signs of all later
    values minus earlier ones. The size of the effect is the Theil-Sen slope (Sen 1968), the median
    of the slopes of all pairs, times the length.
    """
    if len(logs) > _LONGEST:
        logs = np.array([np.median(each) for each in np.array_split(logs, _LONGEST)])
    n = len(logs)
    if n < LEAST_VALUES:
        return False
    earlier, later = np.triu_indices(n, 1)
    differences = logs[later] - logs[earlier]
    score = float(np.sign(differences).sum())
    _, counts = np.unique(logs, return_counts=True)
    ties = float((counts * (counts - 1) * (2 * counts + 5)).sum())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0:
        return False
    z = max(abs(score) - 1, 0) / math.sqrt(variance)
    change = abs(float(np.median(differences / (later - earlier)))) * (n - 1)
    return z > normal_quantile(1 - levels.drift_p / 2) and change >= levels.drift_share


def cold_start(logs: Values, levels: Levels = DOUBTFUL) -> int:
    """Return how many of the first values, at most a third of all, lie below what follows.

    For the first k: how far their highest lies under the median of the rest, as a share, and in
    robust standard deviations of the rest over sqrt(k).
    """
    n = len(logs)
    for k in range(n // 3, 0, -1):
        rest = logs[k:]
        below = float(np.median(rest) - logs[:k].max())
        if below > max(levels.cold_share, levels.cold_sigmas * robust_sigma(rest) / math.sqrt(k)):
            return k
    return 0


def bimodal(logs: Values, levels: Levels = DOUBTFUL) -> bool:
    """Tell whether the values fall into two groups, each of 15 % of them at least.

    Of all cuts of the ordered values the one that leaves the least squares within both groups. The
    share of all squares that it leaves is the criterion (Engelman & Hartigan 1969, Percentage
    points of a test for clusters): a normal distribution leaves 0.36, a uniform one 0.25.
    """
    n = len(logs)
    least = max(2, math.ceil(n * 0.15))
    ordered = np.sort(logs) - np.mean(logs)
    total = float((ordered**2).sum())
    if n < 2 * least or total <= 0:
        return False
    sizes = np.arange(least, n - least + 1)
    low = np.cumsum(ordered)[sizes - 1] / sizes
    high = -low * sizes / (n - sizes)
    between = sizes * low**2 + (n - sizes) * high**2
    best = int(np.argmax(between))
    within, apart = 1 - float(between[best]) / total, float(high[best] - low[best])
    return any(within < most and apart >= share for most, share in levels.modes)


def outliers(logs: Values, levels: Levels = DOUBTFUL) -> Values:
    """Return how far off those values are that are far from the median, by sigmas and as a share.

    The sigma is the median absolute deviation times 1.4826 (Iglewicz & Hoaglin 1993, How to Detect
    and Handle Outliers). Empty for fewer than five values.
    """
    if len(logs) < LEAST_VALUES:
        return logs[:0]
    off = logs - np.median(logs)
    sigma = robust_sigma(logs)
    return off[np.abs(off) > min(max(share, sigmas * sigma) for sigmas, share in levels.apart)]


def repeated(logs: Values, levels: Levels = DOUBTFUL) -> bool:
    """Tell whether outliers are not alone: two or more on one side agree on another speed.

    They agree when they lie within a third of their distance from the median.
    """
    off = outliers(logs, levels)
    return any(
        len(side) >= 2 and float(np.ptp(side)) < float(np.abs(side).min()) / 3
        for side in (off[off < 0], off[off > 0])
    )


_BLOCKS = 8
_LEAST_GAPS = 16
_STALL = 1.3
_STALLED_SHARE = 0.02


def stalled(gaps: Sequence[Sequence[float]]) -> bool:
    """Tell whether stretches within answers took far longer than the same stretch of the others.

    Each answer's gaps are cut into eight stretches of equal count; one is stalled where its mean
    gap is 1.3 times the median of the same stretch over all answers, so that what every answer
    does (becoming slower with its length) counts for nothing. Two of them, and 2 % of all, are
    enough. Of fewer than five answers, or of answers of fewer than 128 gaps, nothing is said.
    """
    rows = [
        [float(np.mean(block)) for block in np.array_split(np.asarray(each, dtype=float), _BLOCKS)]
        for each in gaps
        if len(each) >= _BLOCKS * _LEAST_GAPS
    ]
    if len(rows) < LEAST_VALUES:
        return False
    table = np.asarray(rows)
    slow = int((table > _STALL * np.median(table, axis=0)).sum())
    return slow >= max(2, _STALLED_SHARE * table.size)


def robust_sigma(logs: Values) -> float:
    """Return the standard deviation that the median absolute deviation stands for."""
    if len(logs) == 0:
        return 0.0
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))


_NOISIER = 1.5


def _with_earlier(logs: Values, earlier: Values) -> Values:
    """Return the values with those of the warm-up from where it had settled, about one median.

    Warm-up answers are shorter, and so of another speed and often of more noise: each kind is set
    about its own median, which takes four values at least, and a warm-up of more than 1.5 times
    the sigma of the others is brought down to that.
    """
    for k in range(len(earlier) - 3, 0, -1):
        rest = earlier[k:]
        if earlier[:k].max() < np.median(rest) - max(0.03, 3 * robust_sigma(rest)):
            earlier = rest
            break
    about = logs - np.median(logs)
    if len(earlier) < 4:
        return about
    ours, theirs = robust_sigma(logs), robust_sigma(earlier)
    scale = min(_NOISIER * ours / theirs, 1.0) if theirs > 0 else 1.0
    return np.concatenate([(earlier - np.median(earlier)) * scale, about])


def _logs(values: Sequence[float]) -> Values:
    array = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"speeds must be finite and above 0, got {list(values)}")
    return np.log(array)
