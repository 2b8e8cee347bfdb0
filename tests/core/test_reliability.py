"""How likely a point boots again: margins, the spread from boot to boot, and what is said of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import broken_attempt, measured_attempt, oom_attempt

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.reliability import (
    CERTAIN,
    CONFIDENCE,
    Hold,
    Reliability,
    Spread,
    boot_decides,
    margin_words,
    reliabilities,
    rooms_of,
    spread_of,
)
from sweeper.core.stats import normal_cdf

QUICK = settings(deadline=None, max_examples=60)
LIMIT = 1000 * 2**20
MIB = 2**20


def boot(number: int, left_mib: float, *, n_max: int = 3, **changes: Any) -> Attempt:
    """Return a boot under a limit of 1000 MiB that left so much of it."""
    attempt = measured_attempt(number, n_max=n_max, memory_limit_bytes=LIMIT, **changes)
    outcome = attempt.outcome
    assert isinstance(outcome, Measured)
    return replace(attempt, outcome=replace(outcome, peak_bytes=LIMIT - round(left_mib * MIB)))


def failure(number: int, *, n_max: int = 3) -> Attempt:
    return replace(oom_attempt(number), point=measured_attempt(n_max=n_max).point)


def found(*attempts: Attempt, **wish: float) -> Reliability:
    """Return what is known of the point of the first attempt."""
    return reliabilities(attempts, **wish)[attempts[0].point]


# ---- Which memory ------------------------------------------------------------------------------


def test_the_limit_of_the_study_counts_before_the_card_and_the_host() -> None:
    (room,) = rooms_of(boot(1, 12.0))
    assert (room.of, room.left_bytes, room.limit_bytes) == ("the limit", 12 * MIB, LIMIT)
    card = measured_attempt(host=Pairs(gpu="any", gpu_memory_bytes=24 * 2**30, memory_bytes=2**40))
    (room,) = rooms_of(card)
    assert (room.of, room.left_bytes) == ("the card", 5 * 2**30)  # its telemetry saw 19 GiB
    two = replace(card, host=card.host.with_(gpu_count=2))
    assert rooms_of(two) == ()  # which of them is the tightest is not known
    host = measured_attempt(host=Pairs(memory_bytes=64 * 2**30, cgroup_memory_bytes=20 * 2**30))
    (room,) = rooms_of(host)
    assert (room.of, room.left_bytes) == ("the host's memory", 2 * 2**30)


def test_an_engine_that_gives_the_cache_what_is_left_has_room_in_it_beyond_one_window() -> None:
    facts = Pairs(name="vllm", kv_cache_bytes=10 * 2**30, max_concurrency=1.25)
    host = Pairs(gpu="any", gpu_memory_bytes=24 * 2**30)
    of = {room.of: room.left_bytes for room in rooms_of(measured_attempt(engine=facts, host=host))}
    assert of == {"the card": 5 * 2**30, "the KV pool": 2 * 2**30}
    chosen = measured_attempt(engine=facts.with_(autofit_max_model_len=65536), host=host)
    assert [room.of for room in rooms_of(chosen)] == ["the card"]


def test_what_was_not_measured_left_nothing_that_counts() -> None:
    assert rooms_of(oom_attempt()) == ()
    assert rooms_of(measured_attempt()) == ()


# ---- Whether it works again --------------------------------------------------------------------


def test_a_comfortable_margin_needs_no_further_boot() -> None:
    hold = found(boot(1, 250.0))
    assert hold.hold is Hold.RELIABLE
    assert hold.may_win
    assert margin_words(hold) == "to the limit: 250 MiB, 1 of 1 boots"


def test_nothing_left_is_the_edge_whatever_the_spread() -> None:
    hold = found(boot(1, 0.0))
    assert (hold.hold, hold.may_win) == (Hold.EDGE, False)


def test_a_small_margin_is_not_known_to_hold_until_boots_are_seen_to_agree() -> None:
    once = found(boot(1, 3.0))
    assert (once.hold, once.may_win) == (Hold.UNSURE, True)
    assert "the next one works with" in margin_words(once)
    agreeing = found(boot(1, 3.0), boot(2, 3.02), boot(3, 2.98))
    assert (agreeing.hold, agreeing.held, agreeing.boots) == (Hold.RELIABLE, 3, 3)
    apart = found(boot(1, 3.0), boot(2, 9.0), boot(3, 1.0), boot(4, 14.0), boot(5, 0.5))
    assert apart.hold in (Hold.UNSURE, Hold.EDGE)


def test_how_much_boots_differ_is_learnt_from_other_points_too() -> None:
    others = [
        boot(10 * n + k, 200.0 + 30 * n + shift, n_max=n)
        for n in (4, 5, 6)
        for k, shift in enumerate((-20.0, 20.0))
    ]
    alone, beside = found(boot(1, 30.0)), found(boot(1, 30.0), *others)
    assert alone.sure is not None
    assert beside.sure is not None
    assert beside.sure < alone.sure
    assert spread_of(others) == pytest.approx(27 * MIB, rel=0.35)
    assert spread_of([boot(1, 30.0)]) is None  # no boot was repeated


def test_one_ending_for_lack_of_memory_is_flaky_and_a_crash_is_not() -> None:
    hold = found(boot(1, 300.0), failure(2), boot(3, 310.0))
    assert (hold.hold, hold.held, hold.boots) == (Hold.FLAKY, 2, 3)
    assert not hold.may_win
    assert "2 of 3 boots" in margin_words(hold)
    crash = replace(broken_attempt(2), point=measured_attempt().point)
    assert found(boot(1, 300.0), crash).hold is Hold.RELIABLE


def test_what_a_study_asks_to_be_left_is_held_against_the_least_of_all_boots() -> None:
    boots = boot(1, 300.0), boot(2, 290.0)
    assert found(*boots, least_left_bytes=290 * MIB).hold is Hold.RELIABLE
    assert found(*boots, least_left_bytes=291 * MIB).hold is Hold.SHORT
    assert found(boot(1, 0.5), least_left_bytes=0).hold is Hold.RELIABLE
    assert found(boot(1, 0.5), failure(2), least_left_bytes=0).hold is Hold.FLAKY


def test_where_memory_is_not_known_nothing_is_claimed_and_nothing_forbidden() -> None:
    hold = found(measured_attempt(1))
    assert (hold.hold, hold.may_win, hold.chance) == (Hold.UNKNOWN, True, None)
    assert margin_words(hold) == "memory left is not known, 1 of 1 boots"


def test_points_that_never_worked_have_no_reliability() -> None:
    assert reliabilities([oom_attempt(1), broken_attempt(2)]) == {}


margins = st.lists(st.floats(0.0, 400.0), min_size=1, max_size=5)


@QUICK
@given(margins, st.floats(0.5, 100.0))
def test_more_room_never_makes_a_point_less_likely_to_boot(left: list[float], more: float) -> None:
    near = found(*(boot(n, each) for n, each in enumerate(left, 1)))
    far = found(*(boot(n, each + more) for n, each in enumerate(left, 1)))
    assert near.chance is not None
    assert far.chance is not None
    assert far.sure is not None
    assert near.sure is not None
    assert far.chance >= near.chance - 1e-9
    assert far.sure >= near.sure - 1e-9
    assert 0 <= near.sure <= 1


@QUICK
@given(margins, st.integers(1, 3))
def test_failures_only_lower_the_chance(left: list[float], failures: int) -> None:
    boots = [boot(n, each) for n, each in enumerate(left, 1)]
    failed = [failure(50 + n) for n in range(failures)]
    whole, with_failures = found(*boots), found(*boots, *failed)
    assert whole.chance is not None
    assert with_failures.chance is not None
    assert with_failures.chance <= whole.chance + 1e-9
    assert with_failures.hold is Hold.FLAKY


@QUICK
@given(st.lists(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=5), max_size=6))
def test_the_spread_is_a_distribution_whose_quantiles_grow(groups: list[list[float]]) -> None:
    spread = Spread.of(groups)
    assert math.isclose(sum(spread.weights), 1.0)
    assert spread.quantile(0.1) <= spread.quantile(0.5) <= spread.quantile(0.9)


@pytest.mark.parametrize("deviation_mib", [2.0, 10.0, 30.0])
def test_what_is_called_reliable_is_reliable_in_nine_cases_of_ten(deviation_mib: float) -> None:
    """400 points at all distances from the limit, each booted until the test has an answer."""
    draw = random.Random(7)
    reliable: list[float] = []
    for _ in range(400):
        # Four other points that were booted twice tell how much boots differ.
        others = [
            boot(1000 + 2 * n + k, 500 + draw.gauss(0, deviation_mib), n_max=100 + n)
            for n in range(4)
            for k in range(2)
        ]
        margin = draw.uniform(-1, 4) * deviation_mib
        boots: list[Attempt] = []
        while len(boots) < 6:
            left = draw.gauss(margin, deviation_mib)
            boots.append(boot(len(boots) + 1, left) if left >= 0 else failure(len(boots) + 1))
            if not isinstance(boots[0].outcome, Measured):
                break
            hold = found(*boots, *others)
            if hold.hold is not Hold.UNSURE:
                truth = normal_cdf(margin / deviation_mib)
                reliable += [truth] if hold.hold is Hold.RELIABLE else []
                break
    assert len(reliable) > 50
    wrong = sum(truth < CERTAIN for truth in reliable)
    expected = (1 - CONFIDENCE) * len(reliable)
    assert wrong <= expected + 2 * math.sqrt(expected * CONFIDENCE)  # by chance it may be more


def test_the_boot_alone_decides_where_next_to_nothing_is_taken_later() -> None:
    def grown(mib: float) -> Attempt:
        attempt = boot(1, 20.0)
        outcome = attempt.outcome
        assert isinstance(outcome, Measured)
        assert outcome.peak_bytes is not None
        ready = outcome.peak_bytes - round(mib * MIB)
        return replace(attempt, outcome=replace(outcome, ready_bytes=ready))

    assert boot_decides(grown(0.0))
    assert boot_decides(grown(2.0))
    assert not boot_decides(grown(2.1))
    assert not boot_decides(boot(1, 20.0))  # what it held when it was ready is not known
    assert not boot_decides(measured_attempt(1))
