"""The decisions of a measurement: when it is warm, when it is enough, when it is lost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.protocol import Finished, MeasureStep, Noise, Repetition, WarmUpStep
from sweeper.core.stats import Doubt, summarise
from sweeper.core.workload import Repeats

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=60)

REPEATS = Repeats()
WARM = [100.0] * REPEATS.warmup_min
NOISE = Noise(cv=0.01, dof=60)

speeds = st.floats(1.0, 1000.0)
repeats = st.builds(
    lambda least, more, warm, warmer, interval, racing: Repeats(
        least=least, most=least + more, warmup_min=warm, warmup_max=warm + warmer,
        interval=interval, racing=racing,
    ),
    st.integers(1, 12), st.integers(0, 12), st.integers(0, 6), st.integers(0, 6),
    st.none() | st.floats(0.001, 0.1), st.booleans(),
)  # fmt: skip
noises = st.none() | st.builds(Noise, cv=st.floats(0.0, 0.1), dof=st.integers(1, 1000))


def around(speed: float, n: int, *, noise: float = 0.01, seed: int = 0) -> list[float]:
    chance = np.random.default_rng(seed)
    return [float(speed * math.exp(chance.normal(0, noise))) for _ in range(n)]


def measured_to_the_end(
    repetition: Repetition, source: list[float]
) -> tuple[list[float], list[float], Finished]:
    warm: list[float] = []
    timed: list[float] = []
    for speed in source:
        match repetition.next(warm, timed):
            case WarmUpStep():
                warm.append(speed)
            case MeasureStep():
                timed.append(speed)
            case Finished() as ended:
                return warm, timed, ended
    raise AssertionError("never finished")


# --- for all speeds ---------------------------------------------------------------------------


@QUICK
@given(repeats, noises, st.none() | speeds, st.lists(speeds, min_size=40, max_size=40))
def test_it_ends_within_its_limits_whatever_is_measured(
    limits: Repeats, noise: Noise | None, bar: float | None, source: list[float]
) -> None:
    repetition = Repetition(limits, noise=noise, bar=bar)
    warm, timed, ended = measured_to_the_end(repetition, source)
    assert len(warm) <= limits.warmup_max
    assert 1 <= len(timed) <= limits.most
    if ended is Finished.MOST:
        assert len(timed) == limits.most
    if ended in (Finished.RACED, Finished.AHEAD):
        assert limits.racing
        assert bar is not None
    if ended is Finished.TIGHT:
        assert len(timed) >= limits.least
        assert limits.interval is not None
        found = repetition.summary(timed)
        assert Doubt.TOO_FEW not in found.doubts
        assert found.high <= found.median * (1 + limits.interval)
        assert found.low >= found.median * (1 - limits.interval)
    assert repetition.next(warm, timed) is ended


@QUICK
@given(
    repeats,
    st.none() | st.builds(Noise, cv=st.floats(0.001, 0.05), dof=st.integers(1, 100)),
    st.floats(10.0, 1000.0),
    st.lists(st.floats(0.9, 1.1), min_size=40, max_size=40),
    st.floats(1e-3, 1e3),
)
def test_the_unit_of_the_speeds_does_not_matter(
    limits: Repeats, noise: Noise | None, bar: float, shares: list[float], unit: float
) -> None:
    # A power of two, so that every product is exact.
    unit = 2.0 ** round(math.log2(unit))
    source = [bar * share for share in shares]
    one = measured_to_the_end(Repetition(limits, noise=noise, bar=bar), source)
    other = measured_to_the_end(
        Repetition(limits, noise=noise, bar=bar * unit), [each * unit for each in source]
    )
    assert (len(one[0]), len(one[1]), one[2]) == (len(other[0]), len(other[1]), other[2])


@QUICK
@given(noises, st.lists(speeds, max_size=12), st.lists(speeds, min_size=1, max_size=20))
def test_what_can_be_raced_is_raced_by_every_higher_bar(
    noise: Noise | None, warm: list[float], timed: list[float]
) -> None:
    raced = [
        Repetition(REPEATS, noise=noise, bar=bar).next(warm, timed) is Finished.RACED
        for bar in (1.0, 10.0, 100.0, 1000.0, 10000.0)
    ]
    assert raced == sorted(raced)


# --- warm-up ----------------------------------------------------------------------------------


def test_it_warms_up_first_and_for_as_long_as_the_speed_rises() -> None:
    repetition = Repetition(REPEATS)
    rising = [60.0, 65.0, 70.0, 75.0, 80.0, 85.0, 90.0, 95.0]
    assert repetition.next([], []) == WarmUpStep()
    assert repetition.next(rising, []) == WarmUpStep()
    assert repetition.next([*rising, 100.0, 100.0, 100.0, 100.0], []) == MeasureStep()


def test_a_server_that_is_warm_warms_up_no_longer_than_it_must() -> None:
    assert Repetition(REPEATS).next(WARM[1:], []) == WarmUpStep()
    assert Repetition(REPEATS).next(WARM, []) == MeasureStep()
    assert Repetition(replace(REPEATS, warmup_min=0, warmup_max=0)).next([], []) == MeasureStep()
    one = Repetition(replace(REPEATS, warmup_min=0, warmup_max=1))
    assert one.next([], []) == MeasureStep()


def test_a_falling_speed_is_no_warm_up() -> None:
    assert Repetition(REPEATS).steady([100.0, 95.0, 90.0, 85.0])


def test_a_rise_within_the_noise_is_none() -> None:
    rise = [100.0, 104.0, 103.0, 107.0]
    assert not Repetition(REPEATS, noise=Noise(cv=0.005, dof=50)).steady(rise)
    assert Repetition(REPEATS, noise=Noise(cv=0.05, dof=50)).steady(rise)
    scattered = [100.0, 112.0, 96.0, 109.0, 98.0, 106.0, 111.0]
    assert Repetition(REPEATS).steady(scattered)


def test_a_warm_up_without_end_is_doubted() -> None:
    never = [50.0 * 1.05**i for i in range(REPEATS.warmup_max)]
    repetition = Repetition(REPEATS)
    assert repetition.next(never, []) == MeasureStep()
    assert repetition.doubts(never, around(90, 9)) == (Doubt.WARMING,)
    assert repetition.doubts(WARM, around(100, 9)) == ()


# --- enough -----------------------------------------------------------------------------------


def test_a_narrow_interval_ends_it() -> None:
    steady = around(100, 9, noise=0.002)
    assert Repetition(REPEATS).next(WARM, steady[:-1]) == MeasureStep()
    assert Repetition(REPEATS).next(WARM, steady) is Finished.TIGHT


def test_without_an_interval_all_repeats_are_made() -> None:
    every = Repetition(replace(REPEATS, interval=None))
    assert every.next(WARM, [100.0] * 19) == MeasureStep()
    assert every.next(WARM, [100.0] * 20) is Finished.MOST


def test_a_suspicious_sequence_is_looked_at_for_longer() -> None:
    odd = [100.0, 100.1, 99.9, 100.2, 70.0, 99.8, 100.0, 100.1, 99.9]
    assert Repetition(REPEATS).next(WARM, odd) == MeasureStep()


# --- the race ---------------------------------------------------------------------------------


def test_without_a_bar_nothing_is_raced() -> None:
    for bar in (None, 0.0):
        assert Repetition(REPEATS, noise=NOISE, bar=bar).next([1.0, 1.0], []) == WarmUpStep()
        assert Repetition(REPEATS, noise=NOISE, bar=bar).next(WARM, [1.0]) == MeasureStep()


def test_what_is_far_below_costs_two_short_answers_and_a_third() -> None:
    repetition = Repetition(REPEATS, noise=NOISE, bar=100.0)
    assert repetition.next([50.0], []) == WarmUpStep()
    assert repetition.next([50.0, 51.0], []) == MeasureStep(short=True)
    assert repetition.next([50.0, 51.0], [50.0]) is Finished.RACED
    found = repetition.summary([50.0], repetition.doubts([50.0, 51.0], [50.0]), warmup=[50.0, 51.0])
    assert found.short
    assert found.doubts == (Doubt.TOO_FEW,)


def test_one_slow_short_answer_loses_nothing() -> None:
    assert Repetition(REPEATS, noise=NOISE, bar=100.0).next([30.0, 99.0], []) == WarmUpStep()


def test_a_short_answer_that_is_as_fast_after_all_is_measured_on() -> None:
    repetition = Repetition(REPEATS, noise=NOISE, bar=100.0)
    assert repetition.next([50.0, 51.0], [102.0]) == MeasureStep()
    assert not repetition.summary([102.0, 101.0], warmup=[50.0, 51.0]).short


def test_a_server_that_may_still_be_cold_is_not_given_up() -> None:
    repetition = Repetition(REPEATS, noise=NOISE, bar=100.0)
    assert repetition.next([80.0, 80.0], []) == WarmUpStep()
    assert repetition.next([80.0] * 4, []) == MeasureStep(short=True)
    assert repetition.next([70.0, 74.0, 78.0, 82.0], []) == WarmUpStep()


def test_answers_as_long_as_the_warm_up_need_no_margin_for_their_length() -> None:
    slower = [94.0] * 4
    assert Repetition(REPEATS, noise=NOISE, bar=100.0).next(slower, []) == WarmUpStep()
    same = Repetition(REPEATS, noise=NOISE, bar=100.0, max_tokens=96)
    assert same.next(slower, []) == MeasureStep(short=True)
    assert not same.summary([94.0], warmup=slower).short


def test_one_repeat_is_enough_where_the_noise_is_known() -> None:
    warm = [94.0] * 6
    known = Repetition(REPEATS, noise=NOISE, bar=100.0)
    assert known.next(warm, [94.0]) is Finished.RACED
    assert known.next(warm, [99.9]) == MeasureStep()
    assert Repetition(REPEATS, bar=100.0).next(warm, [94.0]) == MeasureStep()
    assert (
        Repetition(replace(REPEATS, racing=False), noise=NOISE, bar=100.0).next(warm, [94.0])
        == MeasureStep()
    )


def test_one_repeat_that_is_odd_beside_the_warm_up_is_not_believed_alone() -> None:
    assert Repetition(REPEATS, noise=NOISE, bar=100.0).next(WARM, [60.0]) == MeasureStep()
    assert Repetition(REPEATS, noise=NOISE, bar=100.0).next(WARM, [60.0, 100.0]) == MeasureStep()


def test_noise_of_its_own_counts_where_it_is_larger() -> None:
    wild = [94.0, 80.0, 97.0, 107.0]
    assert Repetition(REPEATS, noise=NOISE, bar=105.0).next(WARM, wild) == MeasureStep()
    calm = [95.0, 95.5, 94.5, 95.0]
    assert Repetition(REPEATS, noise=NOISE, bar=105.0).next(WARM, calm) is Finished.RACED
    assert Repetition(REPEATS, bar=105.0).next(WARM, calm) is Finished.RACED


def test_what_reaches_the_front_for_certain_need_not_be_measured_closely() -> None:
    wide = [100.0, 103.0, 98.0, 101.0, 99.0, 102.0]
    assert Repetition(REPEATS, noise=NOISE, bar=90.0).next(WARM, wide) is Finished.AHEAD
    assert Repetition(REPEATS, noise=NOISE, bar=90.0).next(WARM, wide[:5]) == MeasureStep()
    assert Repetition(REPEATS, noise=NOISE, bar=0.0).next(WARM, wide) is Finished.AHEAD
    assert Repetition(REPEATS, noise=NOISE).next(WARM, wide) == MeasureStep()


def test_the_race_rarely_loses_what_is_better() -> None:
    limits = replace(REPEATS, interval=0.001)
    lost = 0
    tries = 300
    for seed in range(tries):
        repetition = Repetition(limits, noise=NOISE, bar=100.0)
        lost += measured_to_the_end(repetition, around(100.3, 60, seed=seed))[2] is Finished.RACED
    assert lost / tries <= 1 - limits.confidence


@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02])
def test_looking_again_and_again_keeps_the_coverage(noise: float) -> None:
    tries = 400
    covered = 0
    for seed in range(tries):
        repetition = Repetition(REPEATS)
        _, timed, _ = measured_to_the_end(repetition, around(100, 60, noise=noise, seed=seed))
        found = repetition.summary(timed)
        covered += found.low <= 100 <= found.high
    assert covered / tries >= 0.93


# --- noise ------------------------------------------------------------------------------------


def test_the_noise_of_several_attempts_is_pooled_about_their_own_means() -> None:
    found = Noise.pooled([around(100, 10, seed=1), around(500, 10, seed=2), around(7, 10, seed=3)])
    assert found is not None
    assert found.dof == 27
    assert found.cv == pytest.approx(0.01, rel=0.4)


def test_attempts_that_are_few_or_doubtful_say_nothing_of_the_noise() -> None:
    good = around(100, 9)
    fast_and_slow = [100.0, 70.0] * 5
    assert Noise.pooled([[100.0], [100.0, 50.0], fast_and_slow]) is None
    assert Noise.pooled([good, [100.0, 50.0], fast_and_slow]) == Noise.pooled([good])
    assert Noise.pooled([]) is None


def test_a_summary_keeps_its_own_doubts_and_those_it_is_given() -> None:
    timed = [100.0, 150.0, 100.0]
    found = Repetition(REPEATS).summary(timed, [Doubt.THROTTLED, Doubt.WIDE, Doubt.THROTTLED])
    assert found.doubts == (Doubt.TOO_FEW, Doubt.WIDE, Doubt.THROTTLED)
    assert replace(found, doubts=()) == replace(summarise(timed), doubts=())


def test_every_ending_has_words() -> None:
    assert len({each.words for each in Finished}) == len(Finished)
