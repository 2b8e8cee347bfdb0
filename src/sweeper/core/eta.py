"""How long a study will take from here: a number with its spread, from what its boots took so far.

Nothing here reads a clock: what took how long is told.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from sweeper.core.outcome import Attempt, Measured
from sweeper.core.protocol import Finished


class Kind(enum.Enum):
    """What decides how long an attempt takes: how far it came, and whether it was raced."""

    FAILED = enum.auto()
    """It never came to be measured."""
    RACED = enum.auto()
    """Measured until it could not reach the front any more."""
    FULL = enum.auto()
    """Measured until its number was good enough, or it was surely ahead."""
    AGAIN = enum.auto()
    """Measured again after the search, without a race."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The wall time of one attempt in seconds, from the end of the last one to its own.

    `measure_s` is the part of it that was spent on measuring, 0 where it did not come to that.
    """

    kind: Kind
    seconds: float
    measure_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The seconds left: the expectation, and an interval that holds the truth in 8 of 10 cases."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is still to come: boots of the search, the time they have, boots to confirm the front.

    `again` is how many boots will measure the front again as far as one can tell, None for
    unlimited time in `seconds`. `running_s` is how long the current attempt has been running, and
    `confirming` whether it is one of the confirmation.
    """

    boots: int
    again: int
    seconds: float | None = None
    running_s: float = 0.0
    confirming: bool = False


_FAILED_SHARE = 0.5
"""How many boots fail before anything is known; worth this many boots:"""
_FAILED_BOOTS = 3.0
_KEEN = 1.2
"""The mth measured attempt is no race with a probability of this times m to the power of minus:"""
_SATURATES = 0.95
_KEEN_WEIGHT = 2.0
_RACED = 0.3
"""How long a raced measurement takes beside a full one, before any was seen; and another one:"""
_AGAIN = 1.15
_FAILED = 0.6
"""How long what fails takes beside what is measured, without the measurement."""
_PRIOR_SPREAD = 0.35
"""The standard deviation of durations of one kind, as a share of their mean, likewise."""
_FIRST = 0.5
"""What the first boot counts beside the others: everything is cold."""
_Z = 1.28


def kind_of(attempt: Attempt) -> Kind:
    """Return how far an attempt came, as far as its length depends on it."""
    if attempt.confirms is not None:
        return Kind.AGAIN
    if attempt.timings.measure_s is None:
        return Kind.FAILED
    match attempt.outcome:
        case Measured(figures=(first, *_)) if first.ended == Finished.RACED:
            return Kind.RACED
        case _:
            return Kind.FULL


def time_left(spent: Sequence[Spent], plan: Plan) -> Left | None:
    """Return the time left, None before the first attempt has ended."""
    if not spent:
        return None
    lengths = _lengths(spent)
    shares = _shares(spent, plan.boots)
    mean = sum(shares[kind] * lengths[kind][0] for kind in shares)
    second = sum(shares[kind] * (lengths[kind][0] ** 2 + lengths[kind][1] ** 2) for kind in shares)
    spread = math.sqrt(max(second - mean**2, 0.0))
    search = [each.seconds for each in spent if each.kind is not Kind.AGAIN]
    known = max(len(search), 1)

    boots = float(plan.boots)
    again = float(plan.again)
    if plan.running_s > 0:
        # Of the one that is running, what those that took longer took beyond this.
        whole = lengths[Kind.AGAIN][0] if plan.confirming else mean
        rest = _rest(search, whole, plan.running_s)
        share = rest / whole if whole > 0 else 0.0
        if plan.confirming:
            again = max(again - 1, 0.0) + share
        elif boots >= 1:
            boots = boots - 1 + share
    searching, doubt = mean * boots, spread * math.sqrt(boots + 1.6 * boots**2 / known)
    if plan.seconds is not None and boots > 0:
        # The attempt that is running when time is up is finished.
        limit = plan.seconds + (mean + spread**2 / mean if mean > 0 else 0.0) / 2
        if searching > limit:
            searching, doubt = limit, min(doubt, mean / 2 + spread / 2)
    length, deviation = lengths[Kind.AGAIN]
    confirming = length * again
    # How many members the front will have is not known before the search ends.
    unsure = 0.0 if plan.confirming or not plan.boots else 0.35 * confirming
    doubt = math.hypot(doubt, unsure, deviation * math.sqrt(again), 0.1 * (searching + confirming))
    whole = searching + confirming
    return Left(
        seconds=whole,
        # Durations are skewed: more can be added than taken away.
        low=whole * math.exp(-_Z * doubt / whole) if whole > 0 else 0.0,
        high=whole + _Z * doubt,
    )


def expected_again(*, front: int, boots_done: int, boots_left: int, rounds: int, most: int) -> int:
    """Return how many boots will measure the front again, from its size by now.

    A front grows with the logarithm of the number of boots.
    """
    if rounds == 0 or most == 0:
        return 0
    grown = front
    if boots_left > 0:
        now, then = math.log1p(max(boots_done, 1)), math.log1p(max(boots_done, 1) + boots_left)
        grown = round((front + 1) * then / now)
    return min(most, rounds * max(grown, 1))


def _lengths(spent: Sequence[Spent]) -> dict[Kind, tuple[float, float]]:
    """Return the mean and the standard deviation of each kind's length, in seconds."""
    weights = [_FIRST if at == 0 and len(spent) > 1 else 1.0 for at in range(len(spent))]

    def mean(values: dict[int, float], guess: float | None, worth: float = 1.0) -> float | None:
        """Return the weighted mean, with the guess as one more value; None of nothing."""
        total = sum(weights[at] * value for at, value in values.items())
        count = sum(weights[at] for at in values)
        if guess is not None:
            total, count = total + worth * guess, count + worth
        return total / count if count else None

    def of(*kinds: Kind) -> dict[int, Spent]:
        return {at: each for at, each in enumerate(spent) if each.kind in kinds}

    measured = of(Kind.FULL, Kind.RACED, Kind.AGAIN)
    failed = {at: each.seconds for at, each in of(Kind.FAILED).items()}
    # Boot, proof and all else that a race does not shorten.
    fixed = mean({at: max(each.seconds - each.measure_s, 0) for at, each in measured.items()}, None)
    if fixed is None:
        usual = mean(failed, None)
        assert usual is not None
        fixed = usual / _FAILED
    parts = {
        kind: {at: each.measure_s for at, each in of(kind).items()}
        for kind in (Kind.FULL, Kind.RACED, Kind.AGAIN)
    }
    again, raced = mean(parts[Kind.AGAIN], None), mean(parts[Kind.RACED], None)
    guess = again / _AGAIN if again is not None else raced / _RACED if raced is not None else fixed
    full = mean(parts[Kind.FULL], None)
    full = guess if full is None else full
    means = {
        Kind.FAILED: mean(failed, _FAILED * fixed, 0.5),
        Kind.FULL: fixed + full,
        Kind.RACED: fixed + (mean(parts[Kind.RACED], _RACED * full, 0.5) or 0.0),
        Kind.AGAIN: fixed + (mean(parts[Kind.AGAIN], _AGAIN * full, 0.5) or 0.0),
    }
    found = {}
    for kind, length in means.items():
        assert length is not None
        values = [each.seconds for each in of(kind).values()]
        squares = sum((value - length) ** 2 for value in values) + (_PRIOR_SPREAD * length) ** 2
        found[kind] = length, math.sqrt(squares / (len(values) + 1))
    return found


def _shares(spent: Sequence[Spent], boots: int) -> dict[Kind, float]:
    """Return how often each kind is to be expected in the boots to come."""
    search = [each.kind for each in spent if each.kind is not Kind.AGAIN]
    failed = (search.count(Kind.FAILED) + _FAILED_SHARE * _FAILED_BOOTS) / (
        len(search) + _FAILED_BOOTS
    )
    # The more the front has, the more of what follows is raced: as for records, which grow rare.
    measured = len(search) - search.count(Kind.FAILED)
    so_far = sum(_rare(at) for at in range(1, measured + 1))
    keen = (search.count(Kind.FULL) + _KEEN * _KEEN_WEIGHT) / (so_far + _KEEN_WEIGHT)
    coming = max(round(boots * (1 - failed)), 1)
    full = sum(min(keen * _rare(measured + at), 1.0) for at in range(1, coming + 1)) / coming
    return {
        Kind.FAILED: failed,
        Kind.FULL: (1 - failed) * full,
        Kind.RACED: (1 - failed) * (1 - full),
    }


def _rare(measured: int) -> float:
    return float(measured**-_SATURATES)


def _rest(lengths: Sequence[float], mean: float, gone_s: float) -> float:
    """Return how much longer an attempt takes that has been running for so long."""
    longer = [each - gone_s for each in lengths if each > gone_s]
    usual = max(mean - gone_s, 0.1 * mean)
    return (sum(longer) + usual) / (len(longer) + 1)


__all__ = ["Kind", "Left", "Plan", "Spent", "expected_again", "kind_of", "time_left"]
