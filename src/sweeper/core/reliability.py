"""How likely a configuration boots again: what its boots left of memory, and how much that varies.

That a point was measured, even twice, does not make it work every time: a search for speed and
context ends up at the last MiB, and memory in use differs from boot to boot. What a boot leaves is
taken as normal about the point's own mean with a standard deviation that all points share, a boot
with less than nothing left fails, and the question is whether the point works at least 19 times of
20. The shared deviation is learnt from points that were booted more than once; before that it is
a guess of wide spread. A comfortable margin answers the question by itself, a small one needs more
boots, which makes the test sequential (Wald 1945): it ends when the answer is known, and a test
that looks only at a posterior may stop at any moment (Berger 1985, section 7.7).
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sweeper.core.outcome import Attempt, Measured, ran_out
from sweeper.core.pairs import Point
from sweeper.core.stats import normal_cdf

CERTAIN: Final = 0.95
"""A point is reliable when it works in at least this share of boots: 19 of 20."""
CONFIDENCE: Final = 0.9
"""How sure that must be, or that it is not so, before the question is closed."""
_AT_CERTAIN: Final = 1.6448536269514722
"""The quantile of the standard normal distribution at CERTAIN."""

USUAL_SHARE: Final = 0.003
"""The standard deviation from boot to boot as a share of the limit, before any boot was repeated:
its median, and below how many times that much it is two thirds of the time."""
_USUAL_FACTOR: Final = 4.0
_SHARES: Final = tuple(10 ** (exponent / 10) for exponent in range(-60, -5))
"""The deviations considered, as shares of the limit: from a millionth to a quarter."""
_STEPS: Final = tuple(step / 8 for step in range(-40, 41))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a boot left of one kind of memory, in bytes, and how much of it there is in all.

    `grown_bytes` is what was taken only after the engine was ready, None where that is not known.
    """

    of: str
    left_bytes: float
    limit_bytes: float
    grown_bytes: float | None = None

    @property
    def share(self) -> float:
        """What is left as a share of the limit."""
        return self.left_bytes / self.limit_bytes


def rooms_of(attempt: Attempt) -> tuple[Room, ...]:
    """Return what a measured attempt left of each memory whose limit is known.

    The engine's own figures count where it gives both (`used_bytes`, `capacity_bytes`), then the
    limit of the study, then the memory of the one card in use, else that of the host. An engine
    that gives its KV pool all that is left also has room in that pool beyond one full window
    (`kv_cache_bytes`, `max_concurrency`). Of several cards the tightest is not known, and nothing
    is said.
    """
    outcome = attempt.outcome
    if not isinstance(outcome, Measured):
        return ()
    rooms = []
    used = _number(attempt.engine.get("used_bytes"))
    capacity = _number(attempt.engine.get("capacity_bytes"))
    card = _number(attempt.host.get("gpu_memory_bytes"))
    telemetry = outcome.telemetry
    on_card = None if telemetry is None else telemetry.gpu_peak_bytes
    if used is not None and capacity:
        rooms.append(_room("the device", capacity, used, ready=used))
    elif attempt.memory_limit_bytes is not None and outcome.peak_bytes is not None:
        limit, peak = attempt.memory_limit_bytes, outcome.peak_bytes
        rooms.append(_room("the limit", limit, peak, ready=outcome.ready_bytes))
    elif card and on_card is not None and attempt.host.get("gpu_count", 1) == 1:
        rooms.append(_room("the card", card, on_card, ready=outcome.ready_device_bytes))
    elif not card and outcome.peak_bytes is not None:
        sizes = (
            _number(attempt.host.get(name)) for name in ("memory_bytes", "cgroup_memory_bytes")
        )
        host = min((size for size in sizes if size), default=None)
        if host is not None:
            peak, ready = outcome.peak_bytes, outcome.ready_bytes
            rooms.append(_room("the host's memory", host, peak, ready=ready))
    pool = _number(attempt.engine.get("kv_cache_bytes"))
    windows = _number(attempt.engine.get("max_concurrency"))
    # An engine that chose the window by its pool has none to spare, and needs none.
    if pool and windows and windows >= 1 and "autofit_max_model_len" not in attempt.engine:
        rooms.append(_room("the KV pool", pool, pool / windows, ready=pool / windows))
    return tuple(rooms)


def _room(of: str, limit: float, taken: float, *, ready: float | None) -> Room:
    grown = None if ready is None else max(taken - ready, 0.0)
    return Room(of=of, left_bytes=limit - taken, limit_bytes=limit, grown_bytes=grown)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


@dataclass(frozen=True, slots=True)
class Spread:
    """What is known of the standard deviation from boot to boot, as shares of the limit.

    `weights` are the probabilities of `_SHARES`.
    """

    weights: tuple[float, ...]

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Spread:
        """Return what these groups show, each the shares left by the boots of one point.

        A group of n boots with sum of squares S about its mean has the likelihood
        s^-(n-1) exp(-S / (2 s^2)); groups of one boot say nothing.
        """
        free, squares = 0, 0.0
        for group in groups:
            if len(group) < 2:
                continue
            mean = sum(group) / len(group)
            free += len(group) - 1
            squares += sum((left - mean) ** 2 for left in group)
        logs = [
            -0.5 * (math.log(share / USUAL_SHARE) / math.log(_USUAL_FACTOR)) ** 2
            - free * math.log(share)
            - squares / (2 * share**2)
            for share in _SHARES
        ]
        return cls(_normalised(logs))

    def quantile(self, probability: float) -> float:
        """Return the share of the limit that the deviation is below with this probability."""
        total = 0.0
        for share, weight in zip(_SHARES, self.weights, strict=True):
            total += weight
            if total >= probability:
                return share
        return _SHARES[-1]


class Hold(enum.StrEnum):
    """Whether a point that was measured works every time."""

    RELIABLE = "reliable"
    """It works at least 19 times of 20, with 90 % confidence."""
    UNSURE = "unsure"
    """Not known yet: its margin is small beside what memory differs from boot to boot."""
    EDGE = "edge"
    """It worked whenever it was booted, and is known not to work 19 times of 20."""
    SHORT = "short"
    """It leaves less than the study asks for."""
    FLAKY = "flaky"
    """It worked, and it ran out of memory, with the same settings."""
    UNKNOWN = "unknown"
    """Neither its use of memory nor the limit is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What the boots of one point say of the next one.

    `held` of `boots` worked; boots that failed for reasons other than memory are not counted.
    `room` is the tightest memory: the least that any boot left of it, None where unknown.
    `spread_bytes` is the median of what is believed of the standard deviation from boot to boot.
    `chance` is the expected probability that the next boot works, `sure` the probability that the
    point works at least 19 times of 20.
    """

    held: int
    boots: int
    hold: Hold
    room: Room | None = None
    spread_bytes: float | None = None
    chance: float | None = None
    sure: float | None = None

    @property
    def may_win(self) -> bool:
        """Whether the point may be on the front."""
        return self.hold not in (Hold.FLAKY, Hold.EDGE, Hold.SHORT)


def margin_words(found: Reliability) -> str:
    """Return the margin of a point in a few words: `to the limit: 1 MiB, 3 of 8 boots`."""
    boots = f"{found.held} of {found.boots} boots"
    if found.room is None:
        return f"memory left is not known, {boots}"
    said = f"to {found.room.of}: {mib(found.room.left_bytes)}, {boots}"
    if found.hold is Hold.UNSURE and found.chance is not None:
        said += f", the next one works with {found.chance:.0%}"
    return said


def mib(size: float) -> str:
    """Return a number of bytes in MiB, with a digit after the point where it is small."""
    number = size / 2**20
    if abs(number) < 10:
        return f"{number:.1f} MiB"
    return f"{number:,.0f} MiB" if abs(number) < 10_000 else f"{number / 1024:,.1f} GiB"


def least_left(attempt: Attempt) -> float | None:
    """Return what an attempt left of the memory that it left least of, in bytes; None: unknown."""
    return min((room.left_bytes for room in rooms_of(attempt)), default=None)


_GROWN_SHARE: Final = 0.1


def boot_decides(attempt: Attempt) -> bool:
    """Tell whether an attempt took next to all of its memory before it was ready.

    What came later is less than a tenth of what was left: whether the point works then shows
    without a proof of its context.
    """
    rooms = rooms_of(attempt)
    return bool(rooms) and all(
        room.grown_bytes is not None and room.grown_bytes <= _GROWN_SHARE * room.left_bytes
        for room in rooms
    )


ENOUGH_BOOTS: Final = 6
"""After so many boots of one point without an answer its expected chance decides."""


def reliabilities(
    attempts: Iterable[Attempt], *, least_left_bytes: float | None = None
) -> Mapping[Point, Reliability]:
    """Return, for each point that was measured, how likely it works again.

    `least_left_bytes` is what the study wants to be left: None asks for 19 boots of 20, a number
    for so many bytes beside that, and 0 for nothing but that no boot has failed.
    """
    everyone = list(attempts)
    boots: dict[Point, list[Attempt]] = {}
    for attempt in everyone:
        boots.setdefault(attempt.point, []).append(attempt)
    known = {
        point: several
        for point, several in boots.items()
        if any(isinstance(attempt.outcome, Measured) for attempt in several)
    }
    rooms = {
        point: [rooms_of(attempt) for attempt in several if isinstance(attempt.outcome, Measured)]
        for point, several in known.items()
    }
    kinds = {room.of for found in rooms.values() for several in found for room in several}
    spreads = {
        kind: Spread.of(_shares(found, kind) for found in rooms.values()) for kind in sorted(kinds)
    }
    return {
        point: _reliability(several, rooms[point], spreads, least_left_bytes)
        for point, several in known.items()
    }


def spread_of(attempts: Iterable[Attempt]) -> float | None:
    """Return the standard deviation from boot to boot in bytes; None where none is known.

    The median of what is believed of it, of the tightest kind of memory; known only where a point
    was measured more than once.
    """
    # Points that were measured once say nothing of it, and they are nearly all.
    measured: dict[Point, list[Attempt]] = {}
    for attempt in attempts:
        if isinstance(attempt.outcome, Measured):
            measured.setdefault(attempt.point, []).append(attempt)
    repeated = [each for several in measured.values() if len(several) > 1 for each in several]
    found = [
        each
        for each in reliabilities(repeated).values()
        if each.spread_bytes is not None and each.room is not None
    ]
    tightest = min(found, key=lambda each: each.room.share if each.room else 1.0, default=None)
    return None if tightest is None else tightest.spread_bytes


def _shares(found: Iterable[Iterable[Room]], kind: str) -> list[float]:
    return [room.share for several in found for room in several if room.of == kind]


def _reliability(
    several: Sequence[Attempt],
    rooms: Sequence[Sequence[Room]],
    spreads: Mapping[str, Spread],
    least_left_bytes: float | None,
) -> Reliability:
    held = sum(isinstance(attempt.outcome, Measured) for attempt in several)
    failed = sum(ran_out(attempt.outcome) for attempt in several)
    tightest: Reliability | None = None
    for kind, spread in spreads.items():
        here = [room for found in rooms for room in found if room.of == kind]
        if not here:
            continue
        shares = tuple(room.share for room in here)
        chance, sure = _chances(shares, held - len(shares), failed, spread)
        least = min(here, key=lambda room: room.left_bytes)
        found = Reliability(
            held=held, boots=held + failed, room=least, chance=chance, sure=sure,
            spread_bytes=spread.quantile(0.5) * least.limit_bytes,
            hold=_hold(
                least, boots=held + failed, failed=failed, chance=chance, sure=sure,
                least=least_left_bytes,
            ),
        )  # fmt: skip
        if tightest is None or (found.sure or 0.0) < (tightest.sure or 0.0):
            tightest = found
    if tightest is not None:
        return tightest
    return Reliability(held=held, boots=held + failed, hold=Hold.FLAKY if failed else Hold.UNKNOWN)


def _hold(
    room: Room, *, boots: int, failed: int, chance: float, sure: float, least: float | None
) -> Hold:
    if failed:
        return Hold.FLAKY
    if least is not None and room.left_bytes < least:
        return Hold.SHORT
    if sure >= CONFIDENCE or least == 0:
        return Hold.RELIABLE
    if sure <= 1 - CONFIDENCE or (boots >= ENOUGH_BOOTS and chance < CERTAIN):
        return Hold.EDGE
    return Hold.UNSURE


@functools.lru_cache(maxsize=4096)
def _chances(
    shares: tuple[float, ...], unseen: int, failed: int, spread: Spread
) -> tuple[float, float]:
    """Return the expected chance of the next boot, and how sure it is at least CERTAIN.

    For each deviation s the margin in deviations, t, is normal about mean / s with variance 1 / n;
    each boot that failed has the likelihood P(Z > t), each that held without a figure P(Z < t).
    """
    n, mean = len(shares), sum(shares) / len(shares)
    logs, chances, sures = [], [], []
    for share, weight in zip(_SHARES, spread.weights, strict=True):
        if weight < 1e-9:
            continue
        about, root = mean / share, math.sqrt(n)
        if not unseen and not failed:
            logs.append(math.log(weight))
            chances.append(normal_cdf(about / math.sqrt(1 + 1 / n)))
            sures.append(normal_cdf((about - _AT_CERTAIN) * root))
            continue
        total = chance = sure = 0.0
        for step in _STEPS:
            t = about + step / root
            works = normal_cdf(t)
            density = math.exp(-step * step / 2) * works**unseen * normal_cdf(-t) ** failed
            total += density
            chance += density * works
            sure += density * (t >= _AT_CERTAIN)
        if total > 0:
            logs.append(math.log(weight) + math.log(total))
            chances.append(chance / total)
            sures.append(sure / total)
    if not logs:  # so far from anything thought possible that only the counts are left
        return (n + unseen + 1) / (n + unseen + failed + 2), 0.0
    weights = _normalised(logs)
    return (
        sum(weight * chance for weight, chance in zip(weights, chances, strict=True)),
        sum(weight * sure for weight, sure in zip(weights, sures, strict=True)),
    )


def _normalised(logs: Sequence[float]) -> tuple[float, ...]:
    most = max(logs)
    weights = [math.exp(log - most) for log in logs]
    total = sum(weights)
    return tuple(weight / total for weight in weights)
