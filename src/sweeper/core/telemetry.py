"""What the machine did while a number was taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

_Number = TypeVar("_Number", int, float)

_COUNTER_FROM_S = 1.0
"""From this long on a card's energy counter, which moves in steps, beats its power readings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The machine over `seconds` of measurement; None for what cannot be known here, never zero.

    `gpu_*` are of the cards that the engine uses: memory in use at its peak by all processes, and
    what of it was in use before the engine was started,
    mean power of all cards together, energy over the time, the hottest temperature, clocks of the
    streaming multiprocessors of the slowest card while it works, why clocks were held down
    at any moment (`throttle_reasons`, empty where none was seen or none can be seen), and how many
    processes other than the engine's computed on them. `engine_*` are of the engine's process
    tree. `steal_share` and `others_share` are shares of all processors' time that the hypervisor
    took away, and that processes other than the engine's and ours used.
    """

    seconds: float
    gpu_peak_bytes: int | None = None
    gpu_before_bytes: int | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_temperature_c: float | None = None
    gpu_clock_min_mhz: float | None = None
    gpu_clock_median_mhz: float | None = None
    gpu_clock_max_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    gpu_other_processes: int | None = None
    engine_rss_peak_bytes: int | None = None
    engine_cpu_s: float | None = None
    steal_share: float | None = None
    others_share: float | None = None

    @property
    def gpu_engine_bytes(self) -> int | None:
        """What the engine itself took at its peak: more in use than before it was started.

        A desktop, or whatever else is on the card, is not the engine's need. The peak itself where
        nobody looked before.
        """
        if self.gpu_peak_bytes is None:
            return None
        return max(self.gpu_peak_bytes - (self.gpu_before_bytes or 0), 0)

    @property
    def saw_gpu(self) -> bool:
        """Whether anything is known of a card that the engine uses."""
        return any(
            figure is not None
            for figure in (self.gpu_peak_bytes, self.gpu_power_w, self.gpu_temperature_c)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """One card at one moment; None for what it does not tell.

    `index` is the card's number. `energy_j` counts from some moment in the past. `clock_mhz` is
    None while the card is idle: an idle card's clock says nothing of the speed of a busy one.
    """

    index: int
    used_bytes: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    throttle_reasons: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The machine at one moment, `at_s` on a monotonic clock; None for what it does not tell.

    `cards` are those that the engine uses, `gpu_other_processes` how many others compute on them.
    All `*_cpu_s` and the rest in seconds of processor time count upwards: the engine's tree, our
    own process, and of all processors together what was busy, stolen by the hypervisor, and all.
    """

    at_s: float
    cards: tuple[CardReading, ...] = ()
    gpu_other_processes: int | None = None
    engine_rss_bytes: int | None = None
    engine_cpu_s: float | None = None
    own_cpu_s: float | None = None
    busy_s: float | None = None
    stolen_s: float | None = None
    all_s: float | None = None


def telemetry(readings: Sequence[Reading]) -> Telemetry:
    """Return what readings, in order of time, come to; with none, nothing over zero seconds."""
    if not readings:
        return Telemetry(seconds=0.0)
    seconds = readings[-1].at_s - readings[0].at_s
    indexes = sorted({card.index for reading in readings for card in reading.cards})
    powers = [_mean_power_w(readings, index) for index in indexes]
    power_w = _total(powers)
    clocks = _clocks_mhz(readings[1:-1]) or _clocks_mhz(readings)
    reasons = {
        reason for reading in readings for card in reading.cards for reason in card.throttle_reasons
    }
    stolen_s = _grown(readings, lambda reading: reading.stolen_s)
    return Telemetry(
        seconds=seconds,
        gpu_peak_bytes=_highest(
            _total(card.used_bytes for card in each.cards) for each in readings
        ),
        gpu_power_w=power_w,
        gpu_energy_j=power_w * seconds if power_w is not None and seconds > 0 else None,
        gpu_temperature_c=_highest(card.temperature_c for each in readings for card in each.cards),
        gpu_clock_min_mhz=min(clocks, default=None),
        gpu_clock_median_mhz=statistics.median(clocks) if clocks else None,
        gpu_clock_max_mhz=max(clocks, default=None),
        throttle_reasons=tuple(sorted(reasons)),
        gpu_other_processes=_highest(each.gpu_other_processes for each in readings),
        engine_rss_peak_bytes=_highest(each.engine_rss_bytes for each in readings),
        engine_cpu_s=_grown(readings, lambda reading: reading.engine_cpu_s),
        steal_share=_share(stolen_s, readings),
        others_share=_share(_others_s(readings), readings),
    )


def _clocks_mhz(readings: Sequence[Reading]) -> list[float]:
    """Return the slowest card's clock at each moment.

    The first reading is made before any work and the last one after it, when a card that was held
    at its power limit runs fast: with others between them, these two say nothing of the work.
    """
    return [
        min(known)
        for reading in readings
        if (known := _known(card.clock_mhz for card in reading.cards))
    ]


def _mean_power_w(readings: Sequence[Reading], index: int) -> float | None:
    """Return a card's mean power: by its energy counter, else by its power readings."""
    moments = [
        (reading.at_s, card)
        for reading in readings
        for card in reading.cards
        if card.index == index
    ]
    counted = [(at_s, card.energy_j) for at_s, card in moments if card.energy_j is not None]
    if counted:
        (first_s, first_j), (last_s, last_j) = counted[0], counted[-1]
        # A counter that stands still or falls was reset, or is none.
        if last_s - first_s >= _COUNTER_FROM_S and last_j > first_j:
            return (last_j - first_j) / (last_s - first_s)
    powers = [(at_s, card.power_w) for at_s, card in moments if card.power_w is not None]
    if not powers:
        return None
    span_s = powers[-1][0] - powers[0][0]
    if span_s <= 0:
        return powers[-1][1]
    joules = sum((end_s - start_s) * (a + b) / 2 for (start_s, a), (end_s, b) in pairwise(powers))
    return joules / span_s


def _others_s(readings: Sequence[Reading]) -> float | None:
    """Return the processor time that neither the engine nor we used."""
    busy_s = _grown(readings, lambda reading: reading.busy_s)
    engine_s = _grown(readings, lambda reading: reading.engine_cpu_s)
    own_s = _grown(readings, lambda reading: reading.own_cpu_s)
    if busy_s is None or engine_s is None or own_s is None:
        return None
    # The kernel counts in ticks, and not all in the same moment.
    return max(busy_s - engine_s - own_s, 0.0)


def _share(part_s: float | None, readings: Sequence[Reading]) -> float | None:
    all_s = _grown(readings, lambda reading: reading.all_s)
    if part_s is None or all_s is None or all_s <= 0:
        return None
    return min(part_s / all_s, 1.0)


def _grown(readings: Sequence[Reading], value: Callable[[Reading], float | None]) -> float | None:
    """Return how much a counter grew; None unless it was read twice."""
    known = _known(value(reading) for reading in readings)
    return max(known[-1] - known[0], 0.0) if len(known) > 1 else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _highest(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum; None if there is nothing, or a part is not known."""
    everything = list(values)
    known = [value for value in everything if value is not None]
    return sum(known) if known and len(known) == len(everything) else None
