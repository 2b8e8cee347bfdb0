"""What a study maximises: speed against context, and quality where it is asked for."""

from __future__ import annotations

import math

from sweeper.core.outcome import Attempt, Measured

SPEED, CONTEXT, QUALITY = "speed", "context", "quality"
OBJECTIVES = (SPEED, CONTEXT, QUALITY)
"""Decode tokens/s (median), the proven window in tokens, and the mean log-probability of the fixed
text in nats a token, which is below 0 and better the nearer it is to 0."""

_KEY = "objectives"
_UNKNOWN_QUALITY = -100.0
"""Of a measurement whose engine could not say: worse than any text of a working model."""


def described(objectives: tuple[str, ...]) -> str:
    """Return the objectives as an attempt keeps them, in the facts of its workload."""
    return ", ".join(objectives)


def objectives_of(attempt: Attempt) -> tuple[str, ...]:
    """Return what the study of an attempt maximises; the first two where it does not say."""
    kept = attempt.workload.get(_KEY)
    return tuple(kept.split(", ")) if isinstance(kept, str) and kept else OBJECTIVES[:2]


def values_of(measured: Measured, objectives: tuple[str, ...]) -> tuple[float, ...]:
    """Return the values of a measurement, in the order of the objectives; all finite."""
    found = {
        SPEED: measured.decode_tok_s.median,
        CONTEXT: float(measured.context.window_tokens),
        QUALITY: _UNKNOWN_QUALITY,
    }
    if measured.quality is not None and measured.quality.mean_logprob is not None:
        found[QUALITY] = max(measured.quality.mean_logprob, _UNKNOWN_QUALITY)
    values = tuple(found[name] for name in objectives)
    assert all(math.isfinite(each) for each in values)
    return values
