"""How much a configuration needs, how sure that is, and how boots correct both."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.memory import (
    Boot,
    Estimate,
    Footprint,
    MemoryModel,
    Size,
    estimate_of,
    excess,
)
from sweeper.core.pairs import Pairs

GIB = float(2**30)
NAMES = ("weights", "kv_cache", "compute", "graphs")
QUICK = settings(deadline=None, max_examples=100)

gib = st.floats(0, 40).map(lambda size: size * GIB)
sizes = st.builds(Size, mean=gib, spread=st.floats(0.001, 3).map(lambda spread: spread * GIB))
estimates = st.dictionaries(st.sampled_from(NAMES), sizes, min_size=1).map(Estimate.of)


@st.composite
def boots(draw: st.DrawFn) -> Boot:
    estimate = draw(estimates)
    shown = {name: draw(gib) for name, _ in estimate.parts if draw(st.booleans())}
    fitted = draw(st.sampled_from([None, True, False]))
    return Boot(
        estimate=estimate,
        shown=Pairs(shown),
        capacity=draw(gib),
        fitted=fitted,
        shortfall=draw(gib) if fitted is False and draw(st.booleans()) else None,
        exact=draw(st.booleans()),
    )


def of(**parts: tuple[float, float]) -> Estimate:
    return Estimate.of({n: Size(mean=m * GIB, spread=s * GIB) for n, (m, s) in parts.items()})


# ---- Estimates ---------------------------------------------------------------------------------


def test_an_excess_has_a_mean_a_spread_and_a_probability() -> None:
    needs = of(weights=(17, 3), kv_cache=(5, 4))
    over = excess(needs, 20 * GIB)
    assert (over.mean / GIB, over.spread / GIB) == (2, 5)
    assert over.fits == pytest.approx(0.3446, abs=1e-4)
    assert excess(needs, 22 * GIB).fits == 0.5
    assert excess(needs, 22 * GIB, capacity_spread=12 * GIB).spread == pytest.approx(13 * GIB)


def test_what_is_certain_fits_or_does_not() -> None:
    certain = of(weights=(17, 0))
    assert (excess(certain, 17 * GIB).fits, excess(certain, 16 * GIB).fits) == (1, 0)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_size_is_a_size(wrong: float) -> None:
    with pytest.raises(ValueError, match="size must not be negative"):
        Size(mean=wrong)
    with pytest.raises(ValueError, match="spread must not be negative"):
        Size(mean=1, spread=wrong)
    with pytest.raises(ValueError, match="named twice"):
        Estimate(parts=(("a", Size(mean=1)), ("a", Size(mean=1))))


def test_a_footprint_is_an_estimate_of_its_parts() -> None:
    needs = estimate_of(Footprint(parts=Pairs(weights=100, kv_cache=10, anything=4)))
    assert needs.mean == 114
    assert needs.part("weights").spread / 100 < needs.part("anything").spread / 4
    assert needs.part("absent") == Size(mean=0)


@QUICK
@given(estimates, gib, gib)
def test_more_room_fits_no_less(needs: Estimate, capacity: float, more: float) -> None:
    assert 0 <= excess(needs, capacity).fits <= excess(needs, capacity + more).fits <= 1


# ---- Corrections -------------------------------------------------------------------------------


def test_a_component_that_a_boot_printed_is_known_elsewhere_too() -> None:
    small, large = of(weights=(10, 1), compute=(1, 0.5)), of(weights=(20, 2), compute=(1, 0.5))
    seen = MemoryModel().learned(Boot(estimate=small, shown=Pairs(weights=11 * GIB)))
    after = seen.corrected(large)
    assert after.part("weights").mean == pytest.approx(22 * GIB, rel=0.01)
    assert after.part("weights").spread < large.part("weights").spread / 2
    assert after.part("compute") == large.part("compute")


def test_a_sum_is_split_by_how_unsure_its_parts_were() -> None:
    asked = of(weights=(10, 0.1), draft=(2, 1))
    seen = MemoryModel().learned(Boot(estimate=asked, shown=Pairs({"weights+draft": 13 * GIB})))
    after = seen.corrected(asked)
    assert after.part("draft").mean == pytest.approx(3 * GIB, rel=0.05)
    assert after.mean == pytest.approx(13 * GIB, rel=0.01)
    # The sum is known far better than its parts are.
    assert after.spread < after.part("draft").spread


def test_a_known_shortfall_fixes_the_sum_and_one_at_least_bounds_it() -> None:
    asked = of(weights=(10, 0.1), overhead=(1, 1))
    lacking = Boot(
        estimate=asked, shown=Pairs(weights=10 * GIB), capacity=11 * GIB, fitted=False,
        shortfall=2 * GIB,
    )  # fmt: skip
    at_least = MemoryModel().learned(lacking).corrected(asked)
    assert at_least.mean > 13 * GIB
    fixed = Boot(
        estimate=asked, shown=lacking.shown, capacity=11 * GIB, fitted=False, shortfall=2 * GIB,
        exact=True,
    )  # fmt: skip
    known = MemoryModel().learned(fixed).corrected(asked)
    assert known.mean == pytest.approx(13 * GIB, rel=0.02)
    assert known.spread < at_least.spread


def test_a_boot_that_fitted_bounds_the_need_from_above_and_one_that_did_not_from_below() -> None:
    asked = of(weights=(10, 0.1), overhead=(2, 1))
    fitted = MemoryModel().learned(Boot(estimate=asked, capacity=11 * GIB, fitted=True))
    failed = MemoryModel().learned(Boot(estimate=asked, capacity=13 * GIB, fitted=False))
    assert fitted.corrected(asked).mean < asked.mean < failed.corrected(asked).mean
    room = MemoryModel().learned(Boot(estimate=asked, capacity=99 * GIB, fitted=True))
    assert room.corrected(asked).mean == pytest.approx(asked.mean)
    assert MemoryModel().learned(Boot(estimate=asked)).corrected(asked) == asked


def test_a_boot_far_from_what_was_thought_is_believed() -> None:
    asked = of(weights=(10, 0.1))
    shown = MemoryModel().learned(Boot(estimate=asked, shown=Pairs(weights=30 * GIB)))
    assert shown.corrected(asked).mean > 25 * GIB
    failed = MemoryModel().learned(Boot(estimate=asked, capacity=30 * GIB, fitted=False))
    assert excess(failed.corrected(asked), 20 * GIB).fits < 0.01


def test_a_component_that_is_certain_learns_nothing() -> None:
    asked = of(weights=(10, 0))
    assert MemoryModel.of([Boot(estimate=asked, shown=Pairs(weights=11 * GIB))]).corrected(
        asked
    ) == Estimate(parts=asked.parts, shared=0.0)


@QUICK
@given(st.lists(boots(), max_size=6), boots(), estimates)
def test_no_boot_makes_an_estimate_less_sure(
    before: list[Boot], more: Boot, asked: Estimate
) -> None:
    model = MemoryModel.of(before)
    once, twice = model.corrected(asked), model.learned(more).corrected(asked)
    slack = 1 + 1e-6 * GIB
    assert twice.spread <= once.spread + slack
    assert once.spread <= asked.spread + slack
    for (_, late), (_, early) in zip(twice.parts, once.parts, strict=True):
        assert late.spread <= early.spread + slack
        assert late.mean >= 0


@QUICK
@given(estimates, st.integers(1, 8))
def test_every_boot_that_prints_all_makes_an_estimate_surer(asked: Estimate, count: int) -> None:
    shown = Pairs({name: size.mean for name, size in asked.parts})
    spreads = [
        MemoryModel.of([Boot(estimate=asked, shown=shown)] * n).corrected(asked).spread
        for n in range(count + 1)
    ]
    assert spreads == sorted(spreads, reverse=True)
    # Never surer than one configuration tells of another.
    assert spreads[-1] >= 0.19 * asked.spread


def test_the_spread_is_about_how_far_off_corrected_estimates_are() -> None:
    rng = random.Random(7)
    misses = []
    for _ in range(200):
        off = {name: rng.gauss(0, 1) for name in NAMES}

        def asked() -> Estimate:
            return Estimate.of({
                name: Size(mean=rng.uniform(1, 20) * GIB, spread=rng.uniform(0.1, 1) * GIB)
                for name in NAMES
            })  # fmt: skip

        def needs(each: Estimate, off: dict[str, float] = off) -> dict[str, float]:
            return {
                name: size.mean + size.spread * (0.98 * off[name] + 0.2 * rng.gauss(0, 1))
                for name, size in each.parts
            }

        model = MemoryModel()
        for _ in range(8):
            each = asked()
            real = needs(each)
            capacity = each.mean + rng.gauss(0, 1) * GIB
            model = model.learned(
                Boot(
                    estimate=each,
                    shown=Pairs({name: real[name] for name in rng.sample(NAMES, 2)}),
                    capacity=capacity,
                    fitted=sum(real.values()) <= capacity,
                )
            )
        last = asked()
        after = model.corrected(last)
        misses.append((sum(needs(last).values()) - after.mean) / after.spread)
    assert abs(statistics.fmean(misses)) < 0.25
    assert 0.8 < statistics.pstdev(misses) < 1.25
