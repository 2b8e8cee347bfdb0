"""Doubts about a sequence of repeats: what is there is seen, what is harmless is not."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.doubts import doubts_of, robust_sigma
from sweeper.core.stats import Doubt

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)

speeds = st.floats(1.0, 1000.0)


def around(speed: float, n: int, *, noise: float = 0.005, seed: int = 0) -> list[float]:
    chance = np.random.default_rng(seed)
    return [float(speed * math.exp(chance.normal(0, noise))) for _ in range(n)]


def quiet(n: int) -> list[float]:
    """Speeds whose scatter has no trend and no groups."""
    pattern = [100.0, 100.6, 99.5, 100.2, 99.8, 100.9, 99.2, 100.1, 99.9, 100.4]
    return [pattern[i % len(pattern)] for i in range(n)]


@pytest.mark.parametrize("n", [1, 5, 6, 9, 20, 300])
def test_small_scatter_is_no_doubt(n: int) -> None:
    assert doubts_of(quiet(n)) == ()
    assert doubts_of([100.0] * n) == ()


@QUICK
@given(st.lists(speeds, max_size=4), st.lists(speeds, max_size=12))
def test_of_few_values_nothing_is_said(values: list[float], before: list[float]) -> None:
    assert doubts_of(values, before=before) == ()


@QUICK
@given(st.lists(st.floats(0.995, 1.005), min_size=5, max_size=30))
def test_harmless_differences_are_never_doubted(shares: list[float]) -> None:
    assert doubts_of([100 * share for share in shares]) == ()


@QUICK
@given(st.lists(speeds, min_size=5, max_size=30), st.integers(-10, 10))
def test_the_unit_does_not_matter(values: list[float], power: int) -> None:
    assert doubts_of([each * 2.0**power for each in values]) == doubts_of(values)


@QUICK
@given(
    st.lists(speeds, min_size=5, max_size=30), st.lists(speeds, max_size=12),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_groups_and_tails_do_not_depend_on_the_order(
    values: list[float], before: list[float], chance: random.Random
) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    timeless = {Doubt.BIMODAL, Doubt.OUTLIERS}
    assert timeless.intersection(doubts_of(values, before=before)) == timeless.intersection(
        doubts_of(shuffled, before=before)
    )


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("n", [9, 20, 1000])
def test_a_drift_is_seen_in_both_directions(sign: int, n: int) -> None:
    drifting = [each * (1 + sign * 0.08 * i / n) for i, each in enumerate(quiet(n))]
    assert Doubt.DRIFTING in doubts_of(drifting)


def test_a_drift_too_small_to_matter_is_none() -> None:
    assert doubts_of([100 + 0.05 * i for i in range(20)]) == ()


@pytest.mark.parametrize("n", [6, 9, 20])
def test_a_cold_start_within_the_measurement_is_seen(n: int) -> None:
    assert doubts_of([80.0, 81.0, *quiet(n - 2)])[0] is Doubt.WARMING


def test_a_server_that_rose_and_is_steady_now_does_not_drift() -> None:
    assert Doubt.DRIFTING not in doubts_of([80.0, 86.0, 92.0, 97.0, *quiet(16)])


def test_five_fast_and_four_slow_are_two_speeds() -> None:
    fast, slow = around(100, 5), around(80, 4, seed=1)
    mixed = [fast[0], slow[0], fast[1], fast[2], slow[1], slow[2], fast[3], slow[3], fast[4]]
    assert Doubt.BIMODAL in doubts_of(mixed)


def test_two_that_agree_on_another_speed_are_a_second_one() -> None:
    values = quiet(20)
    values[7], values[13] = 70.0, 71.0
    assert set(doubts_of(values)) == {Doubt.BIMODAL, Doubt.OUTLIERS}
    values[13] = 40.0
    assert doubts_of(values) == (Doubt.OUTLIERS,)


@pytest.mark.parametrize("slower", [1.3, 3.0])
def test_one_run_far_off_is_an_outlier(slower: float) -> None:
    values = quiet(9)
    values[4] /= slower
    assert doubts_of(values) == (Doubt.OUTLIERS,)


def test_an_outlier_in_the_settled_warm_up_counts_and_a_cold_one_does_not() -> None:
    values = quiet(9)
    assert doubts_of(values, before=[103.0, 104.0, 103.5, 60.0, 104.2, 103.8]) == (Doubt.OUTLIERS,)
    assert doubts_of(values, before=[60.0, 70.0, 85.0, 103.5, 104.2, 103.8, 104.0]) == ()
    assert doubts_of(values, before=[150.0] * 6) == ()


def test_stalls_within_answers_are_outliers() -> None:
    chance = np.random.default_rng(3)
    gaps = [list(0.01 * (1 + 0.05 * chance.random(256))) for _ in range(9)]
    assert doubts_of(quiet(9), gaps=gaps) == ()
    for answer in gaps:  # what every answer does counts for nothing
        for i in range(200, 256):
            answer[i] *= 2
    assert doubts_of(quiet(9), gaps=gaps) == ()
    gaps[2][10] += 1.0
    gaps[6][100] += 1.0
    assert doubts_of(quiet(9), gaps=gaps) == (Doubt.OUTLIERS,)
    assert doubts_of(quiet(9), gaps=[answer[:100] for answer in gaps]) == ()


@pytest.mark.parametrize("values", [[1.0, 0.0] * 3, [1.0, -1.0] * 3, [1.0, math.nan] * 3])
def test_what_is_no_speed_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="speeds"):
        doubts_of(values)


def test_false_doubts_are_rare() -> None:
    chance = np.random.default_rng(11)
    tries = 400
    doubted = sum(
        bool(doubts_of([float(100 * (1 + 0.02 * each)) for each in chance.normal(size=20)]))
        for _ in range(tries)
    )
    assert doubted / tries <= 0.05


def test_the_robust_sigma_is_that_of_a_normal_distribution() -> None:
    values = np.random.default_rng(5).normal(0, 2, 20_000)
    assert robust_sigma(values) == pytest.approx(2, rel=0.03)
    assert robust_sigma(values[:0]) == 0
