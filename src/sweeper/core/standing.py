"""Which attempt speaks for a point, once it was measured more than once, and which may not win."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeper.core.front import Entry, pareto_front
from sweeper.core.known import alike, answers_of
from sweeper.core.objectives import objectives_of, values_of
from sweeper.core.outcome import (
    Attempt,
    Broken,
    HostFault,
    Infeasible,
    Measured,
    Unfit,
    name,
    ran_out,
)
from sweeper.core.pairs import Point
from sweeper.core.reliability import (
    ENOUGH_BOOTS,
    Hold,
    Reliability,
    margin_words,
    mib,
    reliabilities,
)
from sweeper.core.stats import Doubt


class Fall(enum.StrEnum):
    """Why a point that was on the front is on it no longer."""

    NOT_CONFIRMED = "not_confirmed"
    """Measured again, it could not do what it had done."""
    SLOWER = "slower"
    """Measured again it is slower, and others beat it."""
    UNSOUND = "unsound"
    """It answers otherwise than the same weights in other configurations, which agree."""
    FLAKY = "flaky"
    """It works in some boots and runs out of memory in others."""
    EDGE = "edge"
    """It leaves so little memory that it does not work 19 times of 20."""
    SHORT = "short"
    """It leaves less memory than the study asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallen:
    """A point that lost its place: the attempt that had won it, why, and that in words."""

    attempt: Attempt
    fall: Fall
    explanation: str


def standing(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return, for each point that counts as measured, the one attempt that speaks for it.

    What was measured again after the search counts instead of what the search saw; of several such
    the one in the middle. A measurement on a contended machine never replaces one on a quiet
    machine. A point whose last word is that it cannot work, that ran out of memory in any of its
    boots, or whose answers are unsound, has none.
    """
    everyone = list(attempts)
    unsound = {each.number for each in unsound_among(everyone)}
    found = []
    for several in _by_point(everyone).values():
        spokesman = _speaks(several)
        if spokesman is not None and spokesman.number not in unsound:
            found.append(spokesman)
    return tuple(sorted(found, key=lambda each: each.number))


def front_among(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the attempts that stand and that none other beats in all objectives, fastest first.

    The objectives are those of the study: the median of decode tokens/s and the window in tokens
    that was proven, and quality where the study says so. Of what stands, points that are known not
    to boot 19 times of 20, or that leave less memory than the study asks for, are not on it.
    """
    everyone = list(attempts)
    holds = reliability_of(everyone)
    return _front(each for each in standing(everyone) if holds[each.point].may_win)


def reliability_of(attempts: Iterable[Attempt]) -> Mapping[Point, Reliability]:
    """Return how likely each measured point works again, by what its study asks to be left.

    The wish is kept with each attempt; that of the last one counts.
    """
    everyone = list(attempts)
    last = max(everyone, key=lambda each: each.number, default=None)
    least = None if last is None else last.workload.get(LEAST_LEFT)
    return reliabilities(
        everyone,
        least_left_bytes=least
        if isinstance(least, int | float) and not isinstance(least, bool)
        else None,
    )


def unsure(attempts: Iterable[Attempt]) -> Attempt | None:
    """Return the member of the front to boot once more, to see whether it works every time.

    None where no member's margin is small, or each was booted often enough. Of several the one
    that boots quickest; of equal ones the fastest.
    """
    everyone = list(attempts)
    holds = reliability_of(everyone)
    waiting = [
        each
        for each in front_among(everyone)
        if holds[each.point].hold is Hold.UNSURE and holds[each.point].boots < ENOUGH_BOOTS
    ]
    return min(waiting, key=lambda each: each.timings.boot_s or 0.0, default=None)


LEAST_LEFT = "memory_left_bytes"
"""Under which name an attempt keeps, among its workload's facts, what its study asks to be left."""


def unconfirmed(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the members of the front that were not measured again yet, fastest first."""
    everyone = list(attempts)
    again = {each.point for each in everyone if each.confirms is not None and not each.brief}
    return tuple(each for each in front_among(everyone) if each.point not in again)


def fallen(attempts: Iterable[Attempt]) -> tuple[Fallen, ...]:
    """Return the points that the search had put on the front and that did not stay there."""
    everyone = list(attempts)
    first = [each for each in everyone if each.confirms is None]
    spokesmen = (_speaks(several) for several in _by_point(first).values())
    before = _front(each for each in spokesmen if each is not None)
    now = {each.point for each in front_among(everyone)}
    unsound = {each.number for each in unsound_among(everyone)}
    holds = reliability_of(everyone)
    found = []
    for each in before:
        if each.point in now:
            continue
        again = [
            other
            for other in everyone
            if other.confirms and not other.brief and other.point == each.point
        ]
        hold = holds[each.point]
        if each.number in unsound:
            found.append(
                Fallen(
                    attempt=each,
                    fall=Fall.UNSOUND,
                    explanation="its greedy answers differ from those of the same weights in "
                    "other configurations, which agree among themselves",
                )
            )
        elif not hold.may_win:
            found.append(
                Fallen(
                    attempt=each, fall=_FALLS[hold.hold], explanation=_why_not(hold, everyone, each)
                )
            )
        elif again and not any(isinstance(other.outcome, Measured) for other in again):
            last = again[-1].outcome
            found.append(
                Fallen(
                    attempt=each,
                    fall=Fall.NOT_CONFIRMED,
                    explanation=f"measured again it ended as {name(last)}",
                )
            )
        elif again:
            speaks = _speaks([each, *again])
            assert speaks is not None
            assert isinstance(each.outcome, Measured)
            assert isinstance(speaks.outcome, Measured)
            found.append(
                Fallen(
                    attempt=each,
                    fall=Fall.SLOWER,
                    explanation=f"measured again it did {speaks.outcome.decode_tok_s.median:.1f} "
                    f"tok/s instead of {each.outcome.decode_tok_s.median:.1f}, and others beat it",
                )
            )
    return tuple(found)


_FALLS = {Hold.FLAKY: Fall.FLAKY, Hold.EDGE: Fall.EDGE, Hold.SHORT: Fall.SHORT}


def _why_not(hold: Reliability, everyone: Sequence[Attempt], fell: Attempt) -> str:
    match hold.hold:
        case Hold.FLAKY:
            endings = [
                name(each.outcome)
                for each in everyone
                if each.point == fell.point and isinstance(each.outcome, Infeasible)
            ]
            return (
                f"it worked in {hold.held} of {hold.boots} boots, and ended as {endings[-1]} in "
                "the other" + ("s" if hold.boots - hold.held > 1 else "")
            )
        case Hold.SHORT:
            return f"it leaves less memory than `limits` asks for ({margin_words(hold)})"
        case _:
            return (
                f"it leaves too little memory to boot 19 times of 20 ({margin_words(hold)}; from "
                f"boot to boot it differs by {mib(hold.spread_bytes or 0.0)}, one standard "
                "deviation)"
            )


def unsound_among(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    """Return the measured attempts whose greedy answers no other configuration gives.

    Only where at least two others of the same weights agree with each other: one against one says
    nothing of who is right.
    """
    groups: dict[object, list[Attempt]] = {}
    for each in attempts:
        if isinstance(each.outcome, Measured) and answers_of(each):
            groups.setdefault(each.model.get("sha256"), []).append(each)
    found = []
    for group in groups.values():
        for each in group:
            others = [other for other in group if other.point != each.point]
            if any(alike(answers_of(each), answers_of(other)) for other in others):
                continue
            agree = any(
                one.point != other.point and alike(answers_of(one), answers_of(other))
                for index, one in enumerate(others)
                for other in others[index + 1 :]
            )
            if agree:
                found.append(each)
    return tuple(found)


def is_contended(attempt: Attempt) -> bool:
    """Tell whether an attempt was measured while the machine had other work."""
    return (
        isinstance(attempt.outcome, Measured)
        and Doubt.CONTENDED in attempt.outcome.decode_tok_s.doubts
    )


def _front(attempts: Iterable[Attempt]) -> tuple[Attempt, ...]:
    members = [
        (each, each.outcome)
        for each in attempts
        if isinstance(each.outcome, Measured) and each.outcome.context.proven_tokens > 0
    ]
    entries = (
        Entry(label=index, objectives=values_of(result, objectives_of(each)))
        for index, (each, result) in enumerate(members)
    )
    return tuple(members[entry.label][0] for entry in pareto_front(entries))


def _by_point(attempts: Iterable[Attempt]) -> dict[Point, list[Attempt]]:
    found: dict[Point, list[Attempt]] = {}
    for each in sorted(attempts, key=lambda each: each.number):
        found.setdefault(each.point, []).append(each)
    return found


def _speaks(several: Sequence[Attempt]) -> Attempt | None:
    """Return which of several attempts at one point speaks for it, if one does."""
    if any(ran_out(each.outcome) for each in several):
        return None  # once is enough: nobody wants a recipe that starts most of the time
    telling = [
        each
        for each in several
        if not each.brief and not isinstance(each.outcome, Broken | HostFault)
    ]
    again = [each for each in telling if each.confirms is not None]
    if again:
        measured = [each for each in again if isinstance(each.outcome, Measured)]
        return _middle(measured) if measured else None
    if not telling or isinstance(telling[-1].outcome, Infeasible | Unfit):
        return None
    measured = [each for each in telling if isinstance(each.outcome, Measured)]
    quiet = [each for each in measured if not is_contended(each)]
    return (quiet or measured)[-1]


def _middle(measured: Sequence[Attempt]) -> Attempt:
    """Return the attempt with the median speed, the slower one of two in the middle."""

    def speed(attempt: Attempt) -> float:
        assert isinstance(attempt.outcome, Measured)
        return attempt.outcome.decode_tok_s.median

    return sorted(measured, key=speed)[(len(measured) - 1) // 2]
