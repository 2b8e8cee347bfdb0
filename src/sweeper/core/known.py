"""What a study has found out by now, as far as it decides how the next point is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeper.core.looping import Looks
from sweeper.core.objectives import counted_low_tok_s
from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Scalar
from sweeper.core.protocol import Noise, within_prompts
from sweeper.core.quality import GREEDY_PROMPTS
from sweeper.core.sample import Purpose

_ALIKE_CHARACTERS = 16
"""About four tokens: what a quantised cache still answers like an exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A member of the front: its window in tokens, and the lower bound of its decode tokens/s.

    That which it counts with: where its answers loop, accepted drafts do not.
    """

    window_tokens: int
    low_tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The greedy answers of the same weights in another configuration.

    `trusted` where the study names that configuration, or another one answers alike: else the one
    that answers otherwise could as well be the reference.

    `looks` is how its measured answers to the compared workload look, of this digest; None where
    nobody looked.
    """

    attempt: int
    answers: tuple[str, ...]
    trusted: bool = False
    workload: str = ""
    looks: Looks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The front so far, how much repeats differ here, and what sound answers look like.

    `rivals` None: nothing is raced, every number is made as tight as asked. `best_logprob` is the
    best mean log-probability of the fixed text in the study so far.
    """

    rivals: tuple[Rival, ...] | None = None
    noise: Noise | None = None
    reference: Reference | None = None
    best_logprob: float | None = None

    def bar(self, window_tokens: int) -> float | None:
        """Return the decode tokens/s that a point with this window must beat to reach the front.

        0 where there is nothing to beat, None where there is no race.
        """
        if self.rivals is None:
            return None
        return max(
            (each.low_tok_s for each in self.rivals if each.window_tokens >= window_tokens),
            default=0.0,
        )


def known_from(
    attempts: Sequence[Attempt],
    front: Iterable[Attempt] | None,
    *,
    weights: str,
    reference: Mapping[str, Scalar] | None = None,
) -> Known:
    """Return what the attempts of a study tell about measuring a point with these weights.

    Without a `front` nothing is raced. `weights` is the checksum of the model's file. The reference
    is the first measured attempt of the same weights at the values of `reference`, or the first of
    all where none are given.
    """
    measured = [each for each in attempts if isinstance(each.outcome, Measured)]
    return Known(
        rivals=None if front is None else tuple(_rival(each) for each in front),
        noise=Noise.pooled([compared_speeds(each) for each in measured]),
        reference=_reference(measured, weights, reference),
        best_logprob=max(
            (
                each.outcome.quality.mean_logprob
                for each in measured
                if isinstance(each.outcome, Measured)
                and each.outcome.quality is not None
                and each.outcome.quality.mean_logprob is not None
            ),
            default=None,
        ),
    )


def compared_speeds(attempt: Attempt) -> list[float]:
    """Return the decode speeds of the measured requests of an attempt's compared load.

    Each beside those of the same prompt: that prompts differ is no noise.
    """
    if not isinstance(attempt.outcome, Measured) or not attempt.outcome.figures:
        return []
    first = attempt.outcome.figures[0]
    found = [
        (each.prompt, each.decode_tok_s)
        for each in attempt.samples
        if each.purpose is Purpose.MEASURE
        and (each.workload, each.prompt_length, each.streams)
        == (first.workload, first.prompt_length, first.streams)
        and each.decode_tok_s is not None
    ]
    asked = Counter(prompt for prompt, _ in found)
    if len(asked) > 1:
        # A prompt that was asked once says nothing of noise.
        found = [(prompt, speed) for prompt, speed in found if asked[prompt] > 1]
    return within_prompts([speed for _, speed in found], [prompt for prompt, _ in found])


def answers_of(attempt: Attempt) -> tuple[str, ...]:
    """Return the greedy answers to the guard's questions, as given before the measurement."""
    given = [each.text for each in attempt.samples if each.purpose is Purpose.GUARD]
    return tuple(given[: len(GREEDY_PROMPTS)])


def _rival(attempt: Attempt) -> Rival:
    assert isinstance(attempt.outcome, Measured)
    return Rival(
        window_tokens=attempt.outcome.context.window_tokens,
        low_tok_s=counted_low_tok_s(attempt.outcome),
    )


def _reference(
    measured: Sequence[Attempt], weights: str, values: Mapping[str, Scalar] | None
) -> Reference | None:
    same = [each for each in measured if each.model.get("sha256") == weights and answers_of(each)]
    for each in same:
        if values is not None and any(
            each.point.get(name) != value for name, value in values.items()
        ):
            continue
        answers = answers_of(each)
        return Reference(
            attempt=each.number,
            answers=answers,
            trusted=values is not None
            or any(alike(answers, answers_of(other)) for other in same if other is not each),
            workload=str(each.workload.get("digest", "")),
            looks=_looks(each),
        )
    return None


def _looks(attempt: Attempt) -> Looks | None:
    assert isinstance(attempt.outcome, Measured)
    for first in attempt.outcome.figures[:1]:
        if first.answers is not None and first.looping is not None:
            return Looks(count=first.looping, of=first.answers)
    return None


def alike(some: Sequence[str], others: Sequence[str]) -> bool:
    """Tell whether two sets of greedy answers begin in the same way, in most of the questions."""
    pairs = list(zip(some, others, strict=False))
    same = sum(
        one[:_ALIKE_CHARACTERS] == other[:_ALIKE_CHARACTERS] and bool(one) for one, other in pairs
    )
    return bool(pairs) and same * 2 >= len(pairs)
