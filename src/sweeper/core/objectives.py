"""What a study maximises: speed against context, and quality where it is asked for."""

from __future__ import annotations

import math

from sweeper.core.acceptance import mean_length
from sweeper.core.outcome import Attempt, Figures, Measured
from sweeper.core.stats import Doubt

SPEED, CONTEXT, QUALITY = "speed", "context", "quality"
OBJECTIVES = (SPEED, CONTEXT, QUALITY)
"""Decode tokens/s (the median, as far as it counts), the proven window in tokens, and the mean
log-probability of the fixed text in nats a token, which is below 0 and better the nearer to 0."""

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


def draft_gain(measured: Measured | Figures) -> float:
    """Return how many times faster drafts made a measurement that does not count so; else 1.

    Drafts guess text that goes round in circles perfectly, and text that anybody wants far less
    often. So where the answers are `looping`, a measurement counts as if no draft had been
    accepted: each step yields one token then. Tokens a step are the decoded tokens over those that
    were not accepted drafts; where the tokens were not kept, those of a step with a draft.
    """
    drafts = measured.drafts
    if Doubt.LOOPING not in measured.decode_tok_s.doubts or drafts is None or drafts.accepted <= 0:
        return 1.0
    first: Figures | None
    match measured:
        case Figures():
            first = measured
        case Measured(figures=figures):
            first = figures[0] if figures else None
    if first is not None and first.tokens is not None and first.answers is not None:
        decoded = first.tokens - first.answers
        if decoded > drafts.accepted:
            return decoded / (decoded - drafts.accepted)
    return mean_length(drafts) or 1.0


def counted_tok_s(measured: Measured | Figures) -> float:
    """Return the decode tokens/s that a measurement counts with wherever it is ranked."""
    return measured.decode_tok_s.median / draft_gain(measured)


def counted_low_tok_s(measured: Measured | Figures) -> float:
    """Return the lower bound of the decode tokens/s that a measurement counts with."""
    return measured.decode_tok_s.low / draft_gain(measured)


def why_counted(measured: Measured | Figures) -> str | None:
    """Return in words why a measurement counts with less than it was measured; None: it does not.

    As a part of a sentence, without capital and full stop.
    """
    gain = draft_gain(measured)
    if gain <= 1:
        return None
    return (
        f"its answers go round in circles, which drafts guess too well: it counts with "
        f"{counted_tok_s(measured):.1f} tok/s, as if none had been accepted"
    )


def values_of(measured: Measured, objectives: tuple[str, ...]) -> tuple[float, ...]:
    """Return the values of a measurement, in the order of the objectives; all finite."""
    found = {
        SPEED: counted_tok_s(measured),
        CONTEXT: float(measured.context.window_tokens),
        QUALITY: _UNKNOWN_QUALITY,
    }
    if measured.quality is not None and measured.quality.mean_logprob is not None:
        found[QUALITY] = max(measured.quality.mean_logprob, _UNKNOWN_QUALITY)
    values = tuple(found[name] for name in objectives)
    assert all(math.isfinite(each) for each in values)
    return values
