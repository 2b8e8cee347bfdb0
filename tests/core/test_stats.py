"""Summaries: the interval holds what it promises, and says so where it cannot."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.stats import (
    Doubt,
    explained,
    normal_quantile,
    student_quantile,
    summarise,
    telemetry_doubts,
)
from sweeper.core.telemetry import Telemetry

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=50)

samples = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)


@QUICK
@given(samples, st.floats(0.5, 0.999))
def test_the_interval_contains_the_median_and_comes_from_the_samples(
    values: list[float], confidence: float
) -> None:
    summary = summarise(values, confidence=confidence)
    assert summary.low <= summary.median <= summary.high
    assert summary.low in values
    assert summary.high in values
    assert summary.median == statistics.median(values)
    assert summary.n == len(values)
    assert 0 <= summary.spread <= max(values) - min(values)
    assert 0 <= summary.confidence <= 1


@QUICK
@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(
    values: list[float], chance: random.Random
) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    assert summarise(shuffled) == summarise(values)


@QUICK
@given(samples, st.floats(0.5, 0.999))
def test_the_confidence_is_reached_or_doubted(values: list[float], confidence: float) -> None:
    summary = summarise(values, confidence=confidence)
    assert (summary.confidence < confidence) == (Doubt.TOO_FEW in summary.doubts)
    if Doubt.TOO_FEW in summary.doubts:
        assert (summary.low, summary.high) == (min(values), max(values))


@pytest.mark.parametrize("n", range(1, 6))
def test_fewer_than_six_samples_are_too_few_for_95_percent(n: int) -> None:
    summary = summarise([float(i) for i in range(n)])
    assert Doubt.TOO_FEW in summary.doubts
    # Two samples fall on the same side of the median half of the time, and so on.
    assert summary.confidence == pytest.approx(1 - 2.0 ** (1 - n))


def test_six_samples_reach_95_percent_by_their_extremes() -> None:
    summary = summarise([3.0, 1.0, 6.0, 5.0, 2.0, 4.0])
    assert (summary.low, summary.high) == (1.0, 6.0)
    assert summary.confidence == pytest.approx(1 - 2 / 64)
    assert Doubt.TOO_FEW not in summary.doubts


@pytest.mark.parametrize(("n", "low", "high"), [(9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_the_ranks_are_those_of_the_published_tables(n: int, low: int, high: int) -> None:
    # Conover, Practical Nonparametric Statistics, table A3 at p = 0.5.
    summary = summarise([float(i) for i in range(1, n + 1)])
    assert (summary.low, summary.high) == (low, high)


@pytest.mark.parametrize("n", [6, 9, 25])
def test_the_interval_covers_the_true_median_as_often_as_it_says(n: int) -> None:
    source = random.Random(7)
    tries = 2000
    covered = 0
    for _ in range(tries):
        # Skewed on purpose: the interval needs no normal distribution. Its median is 1.
        summary = summarise([source.lognormvariate(0, 1) for _ in range(n)])
        covered += summary.low <= 1.0 <= summary.high
    standard_error = (summary.confidence * (1 - summary.confidence) / tries) ** 0.5
    assert covered / tries == pytest.approx(summary.confidence, abs=4 * standard_error)


def test_thousands_of_samples_are_summarised_too() -> None:
    summary = summarise([float(i) for i in range(3000)])
    assert 0.95 <= summary.confidence < 0.96
    assert summary.high - summary.low == pytest.approx(1.96 * 3000**0.5, rel=0.05)


def test_an_interval_wider_than_a_tenth_of_the_median_is_wide() -> None:
    assert summarise([100.0] * 5 + [109.0] * 5).doubts == ()
    assert summarise([100.0] * 5 + [120.0] * 5).doubts == (Doubt.WIDE,)
    assert Doubt.WIDE in summarise([-100.0] * 5 + [-120.0] * 5).doubts


def test_one_sample_is_its_own_median_and_certain_of_nothing() -> None:
    summary = summarise([4.0])
    assert (summary.low, summary.median, summary.high, summary.confidence) == (4, 4, 4, 0)
    assert summary.spread == 0


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_nothing_and_no_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        summarise(values)


@QUICK
@given(samples, st.floats(0.5, 0.999))
def test_a_summary_can_be_computed_again_from_the_samples_and_itself(
    values: list[float], confidence: float
) -> None:
    found = summarise(values, confidence=confidence)
    assert summarise(values, confidence=found.asked) == found


def test_every_doubt_is_explained_in_a_sentence_of_its_own() -> None:
    assert len({explained(doubt) for doubt in Doubt}) == len(Doubt)


@pytest.mark.parametrize(
    ("p", "dof", "t"),
    [(0.975, 1, 12.7062), (0.95, 2, 2.91999), (0.975, 9, 2.26216), (0.995, 30, 2.75000),
     (0.99, 120, 2.35782), (0.975, 1000, 1.96234), (0.5, 7, 0.0)],
)  # fmt: skip
def test_students_quantiles_are_those_of_the_tables(p: float, dof: int, t: float) -> None:
    assert student_quantile(p, dof) == pytest.approx(t, abs=1e-4)
    assert student_quantile(1 - p, dof) == pytest.approx(-t, abs=1e-4)


@QUICK
@given(st.floats(0.01, 0.99), st.integers(1, 2000))
def test_students_quantiles_rise_and_are_wider_than_the_normal_ones(p: float, dof: int) -> None:
    assert student_quantile(p + 0.005, dof) > student_quantile(p, dof)
    assert abs(student_quantile(p, dof)) >= abs(normal_quantile(p)) - 1e-6


@pytest.mark.parametrize(("p", "dof"), [(0.0, 5), (1.0, 5), (0.5, 0)])
def test_no_quantile_exists_outside_the_range(p: float, dof: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(p, dof)


QUIET = Telemetry(seconds=60.0)


def test_a_machine_that_tells_nothing_raises_no_doubt() -> None:
    assert telemetry_doubts(QUIET) == ()


@pytest.mark.parametrize("reason", ["thermal_sw", "thermal_hw", "hw_slowdown", "power_brake"])
def test_clocks_held_down_by_the_hardware_are_throttling(reason: str) -> None:
    assert telemetry_doubts(replace(QUIET, throttle_reasons=("power_cap", reason))) == (
        Doubt.THROTTLED,
    )


def test_clocks_that_do_not_hold_are_throttling_and_a_power_cap_alone_is_not() -> None:
    steady = replace(QUIET, gpu_clock_median_mhz=1900.0, gpu_clock_max_mhz=1980.0)
    assert telemetry_doubts(steady) == ()
    lower = replace(steady, gpu_clock_median_mhz=1500.0)
    assert telemetry_doubts(lower) == (Doubt.THROTTLED,)
    assert telemetry_doubts(replace(lower, throttle_reasons=("power_cap",))) == ()


def test_a_machine_that_others_use_is_contended() -> None:
    assert telemetry_doubts(replace(QUIET, steal_share=0.01, others_share=0.1)) == ()
    assert telemetry_doubts(replace(QUIET, steal_share=0.03)) == (Doubt.CONTENDED,)
    assert telemetry_doubts(replace(QUIET, others_share=0.2)) == (Doubt.CONTENDED,)


def test_only_new_processes_on_the_gpu_are_contention() -> None:
    desktop = replace(QUIET, gpu_other_processes=2)
    assert telemetry_doubts(desktop) == ()
    assert telemetry_doubts(desktop, gpu_processes_before=2) == ()
    assert telemetry_doubts(desktop, gpu_processes_before=1) == (Doubt.CONTENDED,)
