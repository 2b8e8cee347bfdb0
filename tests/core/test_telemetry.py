from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.telemetry import CardReading, Reading, Telemetry, telemetry


def over(*cards: dict[str, Any], step_s: float = 1.0) -> list[Reading]:
    """Return readings of one card, a step apart, with these figures of it."""
    return [
        Reading(at_s=100.0 + i * step_s, cards=(CardReading(index=0, **card),))
        for i, card in enumerate(cards)
    ]


def test_nothing_read_is_nothing_known() -> None:
    assert telemetry([]) == Telemetry(seconds=0.0)
    assert telemetry([Reading(at_s=5.0), Reading(at_s=7.5)]) == Telemetry(seconds=2.5)
    assert not telemetry([Reading(at_s=5.0)]).saw_gpu


def test_energy_is_what_the_cards_counter_says() -> None:
    found = telemetry(
        over(
            {"energy_j": 1000.0, "power_w": 1.0},
            {"energy_j": 1300.0, "power_w": 1.0},
            {"energy_j": 1500.0, "power_w": 1.0},
        )
    )
    assert (found.gpu_energy_j, found.gpu_power_w) == (500.0, 250.0)


@pytest.mark.parametrize("counter", [None, 7.0])
def test_without_a_counter_that_moves_energy_is_the_area_under_the_power(
    counter: float | None,
) -> None:
    found = telemetry(
        over(
            {"power_w": 100.0, "energy_j": counter},
            {"power_w": 300.0, "energy_j": counter},
            {"power_w": 300.0, "energy_j": counter},
        )
    )
    assert (found.gpu_energy_j, found.gpu_power_w) == (500.0, 250.0)


def test_a_counter_that_moves_in_steps_is_not_believed_over_a_moment() -> None:
    found = telemetry(
        over({"power_w": 100.0, "energy_j": 0.0}, {"power_w": 100.0, "energy_j": 99.0}, step_s=0.2)
    )
    assert found.gpu_energy_j == pytest.approx(20.0)


def test_one_reading_has_a_power_and_no_energy() -> None:
    found = telemetry(over({"power_w": 90.0, "energy_j": 5.0}))
    assert (found.seconds, found.gpu_power_w, found.gpu_energy_j) == (0.0, 90.0, None)


def test_power_and_memory_of_several_cards_are_added_and_the_slowest_clock_counts() -> None:
    def pair(*of: tuple[int, float, float]) -> tuple[CardReading, ...]:
        return tuple(
            CardReading(
                index=i, used_bytes=used, power_w=100.0, clock_mhz=clock, temperature_c=heat
            )
            for i, (used, clock, heat) in enumerate(of)
        )

    found = telemetry(
        [
            Reading(at_s=0.0, cards=pair((10, 1900.0, 60.0), (20, 1500.0, 61.0))),
            Reading(at_s=1.0, cards=pair((15, 1700.0, 70.0), (25, 1980.0, 65.0))),
            Reading(at_s=2.0, cards=pair((12, 1980.0, 69.0), (20, 1980.0, 66.0))),
        ]
    )
    assert found.gpu_peak_bytes == 40
    assert (found.gpu_power_w, found.gpu_energy_j) == (200.0, 400.0)
    assert found.gpu_temperature_c == 70.0
    assert clocks_of(found) == (1700.0,) * 3
    assert found.saw_gpu


def clocks_of(found: Telemetry) -> tuple[float | None, float | None, float | None]:
    return (found.gpu_clock_min_mhz, found.gpu_clock_median_mhz, found.gpu_clock_max_mhz)


def test_clocks_before_and_after_the_work_say_nothing_of_it() -> None:
    fast, slow, slower = {"clock_mhz": 1980.0}, {"clock_mhz": 1500.0}, {"clock_mhz": 1400.0}
    assert clocks_of(telemetry(over(fast, slow, slower, slow, fast))) == (1400.0, 1500.0, 1500.0)
    assert clocks_of(telemetry(over(fast, slow))) == (1500.0, 1740.0, 1980.0), "all there is"
    assert clocks_of(telemetry(over(slow, {}, {}, fast))) == (1500.0, 1740.0, 1980.0)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    cards = (CardReading(index=0, used_bytes=10, power_w=50.0), CardReading(index=1))
    found = telemetry([Reading(at_s=0.0, cards=cards), Reading(at_s=1.0, cards=cards)])
    assert (found.gpu_peak_bytes, found.gpu_power_w, found.gpu_energy_j) == (None, None, None)


def test_clocks_held_down_at_any_moment_are_told_once_each() -> None:
    found = telemetry(
        over(
            {"throttle_reasons": frozenset({"thermal_sw", "power_cap"})},
            {"throttle_reasons": frozenset({"power_cap"})},
            {},
        )
    )
    assert found.throttle_reasons == ("power_cap", "thermal_sw")


def test_the_time_of_others_is_what_neither_the_engine_nor_we_used() -> None:
    def at(seconds: float, engine: float, own: float, busy: float, stolen: float) -> Reading:
        return Reading(
            at_s=seconds, engine_cpu_s=engine, own_cpu_s=own, busy_s=busy, stolen_s=stolen,
            all_s=1000.0 + 4 * seconds,
        )  # fmt: skip

    found = telemetry([at(0.0, 0.0, 3.0, 500.0, 7.0), at(10.0, 20.0, 4.0, 525.0, 9.0)])
    assert found.engine_cpu_s == 20.0
    assert found.steal_share == pytest.approx(2 / 40)
    assert found.others_share == pytest.approx((25 - 20 - 1) / 40)


def test_without_the_engines_time_that_of_others_is_not_known() -> None:
    readings = [
        Reading(at_s=float(i), own_cpu_s=1.0, busy_s=10.0 + i, stolen_s=0.0, all_s=20.0 + 2 * i)
        for i in range(2)
    ]
    found = telemetry(readings)
    assert (found.others_share, found.engine_cpu_s, found.steal_share) == (None, None, 0.0)


def test_an_engine_that_ended_keeps_its_peak() -> None:
    readings = [
        Reading(at_s=0.0, engine_rss_bytes=100, engine_cpu_s=0.0),
        Reading(at_s=1.0, engine_rss_bytes=300, engine_cpu_s=0.5),
        Reading(at_s=2.0, engine_rss_bytes=None, engine_cpu_s=0.5),
    ]
    found = telemetry(readings)
    assert (found.engine_rss_peak_bytes, found.engine_cpu_s) == (300, 0.5)


amounts = st.none() | st.floats(0, 1e6)
card_readings = st.builds(
    CardReading,
    index=st.integers(0, 3),
    used_bytes=st.none() | st.integers(0, 2**40),
    power_w=amounts,
    energy_j=amounts,
    temperature_c=amounts,
    clock_mhz=amounts,
)


@st.composite
def any_readings(draw: st.DrawFn) -> list[Reading]:
    moments = sorted(draw(st.lists(st.floats(0, 1e6), max_size=6)))
    return [
        draw(
            st.builds(
                Reading,
                at_s=st.just(moment),
                cards=st.lists(card_readings, max_size=3, unique_by=lambda card: card.index).map(
                    tuple
                ),
                gpu_other_processes=st.none() | st.integers(0, 9),
                engine_rss_bytes=st.none() | st.integers(0, 2**40),
                engine_cpu_s=amounts,
                own_cpu_s=amounts,
                busy_s=amounts,
                stolen_s=amounts,
                all_s=amounts,
            )
        )
        for moment in moments
    ]


@settings(max_examples=60, deadline=None)
@given(any_readings())
def test_whatever_is_read_no_figure_is_negative_and_shares_are_shares(
    readings: list[Reading],
) -> None:
    found = telemetry(readings)
    for field in fields(found):
        figure = getattr(found, field.name)
        if isinstance(figure, int | float):
            assert figure >= 0, field.name
    for share in (found.steal_share, found.others_share):
        assert share is None or share <= 1
    if found.gpu_clock_median_mhz is not None:
        assert found.gpu_clock_min_mhz is not None
        assert found.gpu_clock_max_mhz is not None
        assert found.gpu_clock_min_mhz <= found.gpu_clock_median_mhz <= found.gpu_clock_max_mhz
