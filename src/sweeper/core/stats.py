"""Samples to a summary with its interval, and the closed set of doubts about it."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sweeper.core.telemetry import Telemetry


class Doubt(enum.StrEnum):
    """A reason to trust a number less; printing it is someone else's job."""

    TOO_FEW = "too_few"
    """Too few samples for the interval to reach the asked confidence."""
    WIDE = "wide"
    """The interval is wider than a tenth of the median."""
    WARMING = "warming"
    """The server never became steady, or was slower at the beginning of what was measured."""
    DRIFTING = "drifting"
    """The samples rise or fall from the first to the last, by more than chance and 2 %."""
    BIMODAL = "bimodal"
    """The samples fall into two groups with little between them ("five fast, four slow")."""
    OUTLIERS = "outliers"
    """Some samples, or stretches within answers, are far from all others: a heavy tail."""
    THROTTLED = "throttled"
    """The hardware held its clocks down: heat, a power brake, or clocks that did not hold."""
    CONTENDED = "contended"
    """Something else used the machine meanwhile, or the hypervisor took its time away."""
    EARLY_STOP = "early_stop"
    """Answers ended long before the tokens that were asked for."""
    CLOCKS_DISAGREE = "clocks_disagree"
    """The server's own timing differs from the client's by more than 3 %."""
    ACCEPTANCE_DISAGREES = "acceptance_disagrees"
    """Speculation's counters, the tokens answered and the speed do not fit each other."""
    LOOPING = "looping"
    """Answers repeat themselves or the prompt, or are none: drafts guess such text too well."""


_EXPLAINED = {
    Doubt.TOO_FEW: "too few repeats for the stated confidence",
    Doubt.WIDE: "the interval is wider than a tenth of the median",
    Doubt.WARMING: "the server was still becoming faster",
    Doubt.DRIFTING: "the speed drifted while it was measured",
    Doubt.BIMODAL: "the runs fall into a fast and a slow group",
    Doubt.OUTLIERS: "some runs are far slower or faster than the others",
    Doubt.THROTTLED: "the hardware held its clocks down",
    Doubt.CONTENDED: "something else used the machine meanwhile",
    Doubt.EARLY_STOP: "answers ended long before they were as long as asked",
    Doubt.CLOCKS_DISAGREE: "the server's own timing differs by more than 3 %",
    Doubt.ACCEPTANCE_DISAGREES: "accepted drafts, tokens and speed do not fit each other",
    Doubt.LOOPING: "answers go round in circles or are none, so accepted drafts do not count",
}


def explained(doubt: Doubt) -> str:
    """Return a doubt as one short sentence for people, without capital and full stop."""
    return _EXPLAINED[doubt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A median with everything needed to judge it.

    `low` and `high` bound the median with probability `confidence` (the coverage actually
    reached, which few samples keep below what was `asked`). `spread` is the interquartile range.
    All in the unit of the samples. `short`: the samples are of answers shorter than the workload's,
    enough to see that the configuration cannot reach the front, and no more.

    `summarise(samples, confidence=asked)` gives every figure again.
    """

    n: int
    median: float
    low: float
    high: float
    confidence: float
    spread: float
    method: str
    doubts: tuple[Doubt, ...] = ()
    asked: float = 0.95
    short: bool = False


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
        asked=confidence,
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


def normal_cdf(x: float) -> float:
    """Return the probability that a standard normal value is below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal distribution at 0 < p < 1."""
    return statistics.NormalDist().inv_cdf(p)


def student_quantile(p: float, dof: int) -> float:
    """Return the quantile of Student's t with a whole number of degrees of freedom, at 0 < p < 1.

    The distribution function is the finite sum of Abramowitz & Stegun, 26.7.3 and 26.7.4, inverted
    by bisection to twelve digits; from 400 degrees of freedom on, the expansion 26.7.5 is as good.

    Raises ValueError for a p or degrees of freedom outside their range.
    """
    if not 0 < p < 1 or dof < 1:
        raise ValueError(f"no quantile at p = {p} with {dof} degrees of freedom")
    if p < 0.5:
        return -student_quantile(1 - p, dof)
    if dof >= 400:
        x = normal_quantile(p)
        return float(x + (x**3 + x) / (4 * dof) + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * dof**2))
    low, high = 0.0, 1.0
    while _student_within(high, dof) < 2 * p - 1:
        low, high = high, high * 2
    while high - low > 1e-12 * max(high, 1.0):
        middle = (low + high) / 2
        if _student_within(middle, dof) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_within(t: float, dof: int) -> float:
    """Return P(|T| < t) for t >= 0."""
    theta = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    if dof % 2:
        term, total = cosine, 0.0
        for i in range(1, dof, 2):
            total += term
            term *= cosine**2 * (i + 1) / (i + 2)
        return 2 / math.pi * (theta + sine * total)
    term, total = 1.0, 0.0
    for i in range(0, dof, 2):
        total += term
        term *= cosine**2 * (i + 1) / (i + 2)
    return sine * total


_HELD_DOWN = frozenset({"thermal_sw", "thermal_hw", "hw_slowdown", "power_brake"})
_STEADY_CLOCK = 0.9
_STOLEN = 0.02
_OTHERS = 0.15


def telemetry_doubts(
    telemetry: Telemetry, *, gpu_processes_before: int | None = None
) -> tuple[Doubt, ...]:
    """Return what the machine did that makes a number taken meanwhile doubtful.

    THROTTLED: heat, a hardware slowdown or a power brake held the clocks down, or half of the time
    the clock was more than a tenth below the highest that was seen. A power cap alone is no doubt,
    nor are the clocks that come of it: a card under load at its power limit runs at what the limit
    allows, faster whenever the load is lighter, and will do so tomorrow.

    CONTENDED: the hypervisor took more than 2 % of the processors' time, other processes used more
    than 15 % of it, or there were more other processes on the GPU than `gpu_processes_before`
    (None: not known; a desktop's are always there, so they alone are no doubt).

    What the machine cannot tell raises no doubt.
    """
    doubts = []
    median, highest = telemetry.gpu_clock_median_mhz, telemetry.gpu_clock_max_mhz
    unsteady = (
        median is not None
        and highest is not None
        and median < highest * _STEADY_CLOCK
        # At its power limit a card goes faster whenever the load is lighter.
        and telemetry.throttle_reasons != ("power_cap",)
    )
    if unsteady or _HELD_DOWN.intersection(telemetry.throttle_reasons):
        doubts.append(Doubt.THROTTLED)
    stolen, others = telemetry.steal_share, telemetry.others_share
    processes = telemetry.gpu_other_processes
    if (
        (stolen is not None and stolen > _STOLEN)
        or (others is not None and others > _OTHERS)
        or (
            processes is not None
            and gpu_processes_before is not None
            and processes > gpu_processes_before
        )
    ):
        doubts.append(Doubt.CONTENDED)
    return tuple(doubts)
