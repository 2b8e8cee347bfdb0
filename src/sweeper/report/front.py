"""Attempts to rows: the front, and every trial; what of them differs and what does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from sweeper.core.front import hypervolume
from sweeper.core.objectives import counted_tok_s, why_counted
from sweeper.core.outcome import Attempt, Measured, kind, name
from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.reliability import Reliability
from sweeper.core.standing import front_among, reliability_of

_MIB = 2**20

CONTEXT_NAMES = (
    "context",
    "context_tokens",
    "ctx",
    "ctx_size",
    "n_ctx",
    "max_model_len",
    "configured_tokens",
)
"""Where the context that a failed attempt asked for is looked up: in its point, then its facts."""


# --- the front -----------------------------------------------------------------------------------


def measured_of(attempts: Iterable[Attempt]) -> list[tuple[Attempt, Measured]]:
    """Return the attempts that were measured and proved some context, with their figures."""
    return [
        (attempt, attempt.outcome)
        for attempt in attempts
        if isinstance(attempt.outcome, Measured) and attempt.outcome.context.proven_tokens > 0
    ]


def reference_point(attempts: Iterable[Attempt]) -> tuple[float, float] | None:
    """Return where the hypervolume starts: no speed, half the smallest proven context.

    In (tok/s, log2 tokens); None where nothing was measured.
    """
    contexts = [
        result.context.window_tokens
        for attempt, result in measured_of(attempts)
        if not attempt.brief
    ]
    return (0.0, math.log2(min(contexts)) - 1) if contexts else None


def hypervolume_of(attempts: Iterable[Attempt]) -> float:
    """Return the hypervolume of the measured attempts, in tok/s x log2 tokens; 0 for none."""
    everyone = list(attempts)
    reference = reference_point(everyone)
    if reference is None:
        return 0.0
    return hypervolume(
        (
            (counted_tok_s(result), math.log2(result.context.window_tokens))
            for _, result in measured_of(front_among(everyone))
        ),
        reference,
    )


def axes_of(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Return the names of all axes that occur in these attempts, sorted."""
    return tuple(sorted({axis for attempt in attempts for axis in attempt.point}))


def configured_context(attempt: Attempt) -> int | None:
    """Return the context an attempt asked for, in tokens, as far as its record tells."""
    if isinstance(attempt.outcome, Measured):
        return attempt.outcome.context.configured_tokens
    for place in (attempt.point, attempt.outcome.finding.facts):
        for each in CONTEXT_NAMES:
            value = place.get(each)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


# --- rows ----------------------------------------------------------------------------------------


def front_rows(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return the front as rows with equal keys, fastest first; None for what is not there."""
    everyone = list(attempts)
    front = front_among(everyone)
    axes = axes_of(front)
    holds = reliability_of(everyone)
    return [
        measured_row(attempt, result, axes, holds[attempt.point])
        for attempt, result in measured_of(front)
    ]


def measured_row(
    attempt: Attempt, result: Measured, axes: Sequence[str], hold: Reliability | None = None
) -> dict[str, Any]:
    """Return a measured attempt as a row: these axes, and its figures with their units.

    `hold` is what all boots of its point say of the next one.
    """
    room = None if hold is None else hold.room
    speed, prefill, peak = result.decode_tok_s, result.prefill_tok_s, result.peak_bytes
    quality = result.quality
    return {
        "attempt": attempt.number,
        **{axis: attempt.point.get(axis) for axis in axes},
        "decode_tok_s": speed.median,
        "decode_tok_s_low": speed.low,
        "decode_tok_s_high": speed.high,
        "counted_tok_s": counted_tok_s(result),
        "proven_context_tokens": result.context.proven_tokens,
        "acceptance": result.drafts.acceptance if result.drafts is not None else None,
        "ttft_ms": result.ttft_s.median * 1000,
        "prefill_tok_s": prefill.median if prefill is not None else None,
        "peak_memory_mib": peak / _MIB if peak is not None else None,
        "memory_left_mib": None if room is None else room.left_bytes / _MIB,
        "boots_held": None if hold is None else hold.held,
        "boots": None if hold is None else hold.boots,
        "holds": None if hold is None else hold.hold.value,
        "chance": None if hold is None else hold.chance,
        "joules_per_token": result.figures[0].joules_per_token if result.figures else None,
        "mean_logprob": quality.mean_logprob if quality is not None else None,
        "confirms": attempt.confirms,
        "doubts": ", ".join(speed.doubts),
        "why_counted": why_counted(result),
    }


def trial_rows(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Return every attempt as a row with equal keys, in order; None for what is not there."""
    everyone = sorted(attempts, key=lambda attempt: attempt.number)
    axes = axes_of(everyone)
    front = {attempt.number for attempt in front_among(everyone)}
    return [_trial_row(attempt, axes, attempt.number in front) for attempt in everyone]


def _trial_row(attempt: Attempt, axes: Sequence[str], on_front: bool) -> dict[str, Any]:
    outcome = attempt.outcome
    measured = outcome if isinstance(outcome, Measured) else None
    finding = None if isinstance(outcome, Measured) else outcome.finding
    return {
        "attempt": attempt.number,
        "outcome": name(outcome),
        "outcome_kind": kind(outcome),
        "phase": finding.phase.value if finding is not None else None,
        **{axis: attempt.point.get(axis) for axis in axes},
        "decode_tok_s": measured.decode_tok_s.median if measured is not None else None,
        "proven_context_tokens": measured.context.proven_tokens if measured is not None else None,
        "boot_s": attempt.timings.boot_s,
        "total_s": attempt.timings.total_s,
        "on_front": on_front,
        "explanation": finding.explanation if finding is not None else "",
    }


def varied(attempts: Sequence[Attempt]) -> tuple[tuple[str, ...], Pairs]:
    """Return the axes that differ between these attempts, and the settings that do not."""
    if len(attempts) < 2:
        return axes_of(attempts), Pairs()
    same = Pairs(
        {
            axis: attempts[0].point[axis]
            for axis in attempts[0].point
            if all(_holds(attempt, axis, attempts[0].point[axis]) for attempt in attempts)
        }
    )
    return tuple(axis for axis in axes_of(attempts) if axis not in same), same


def _holds(attempt: Attempt, axis: str, value: Scalar) -> bool:
    # Through Pairs, because there 1 and true are different values.
    return axis in attempt.point and Pairs({axis: attempt.point[axis]}) == Pairs({axis: value})
