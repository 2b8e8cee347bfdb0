"""What boots showed: memory beside what was thought of it, drafts by position, speed by depth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sweeper.core.acceptance import profile, shares
from sweeper.core.memory import estimate_of
from sweeper.core.outcome import Attempt, Figures, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.sample import Purpose
from sweeper.core.stats import Summary
from sweeper.core.typed import FieldError
from sweeper.engines import Sharing, estimated, shown
from sweeper.job import Job

WHOLE = "whole engine"
"""The name of what the whole engine took at its peak, beside the sum of all estimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSeen:
    """One component of one boot's memory, in bytes: as it was thought before, and as printed."""

    attempt: int
    part: str
    predicted: float
    spread: float
    observed: float

    @property
    def within(self) -> bool:
        """Whether it came out within two standard deviations of what was thought."""
        return abs(self.observed - self.predicted) <= 2 * self.spread


def parts_seen(attempts: Iterable[Attempt], job: Job | None = None) -> tuple[PartSeen, ...]:
    """Return every component of memory that was both estimated and printed, above 0.

    With the `job` that made the attempts the estimates are the engine's own; without it, its
    footprint, with the spread that such have.
    """
    found: list[PartSeen] = []
    for each in attempts:
        if each.confirms is not None:
            continue
        sizes, printed = _thought_and_printed(each, job)
        for name, value in printed.items():
            together = [sizes[part] for part in name.split("+") if part in sizes]
            if not together or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            predicted = sum(mean for mean, _ in together)
            if predicted > 0 and value > 0:
                found.append(
                    PartSeen(
                        attempt=each.number,
                        part=name.replace("+", " + "),
                        predicted=predicted,
                        spread=sum(spread**2 for _, spread in together) ** 0.5,
                        observed=float(value),
                    )
                )
        whole = _whole(each, job)
        if whole is not None and sizes:
            found.append(
                PartSeen(
                    attempt=each.number,
                    part=WHOLE,
                    predicted=sum(mean for mean, _ in sizes.values()),
                    spread=sum(spread**2 for _, spread in sizes.values()) ** 0.5,
                    observed=float(whole),
                )
            )
    return tuple(found)


def _thought_and_printed(
    attempt: Attempt, job: Job | None
) -> tuple[dict[str, tuple[float, float]], Mapping[str, object]]:
    estimate = estimate_of(attempt.footprint)
    printed = Pairs(
        {
            name.removesuffix("_bytes"): value
            for name, value in attempt.engine.items()
            if name.endswith("_bytes")
        }
    )
    if job is not None:
        try:
            settings = job.settings(attempt.point)
            estimate = estimated(job.engine, settings, job.model(attempt.point))
            printed = shown(job.engine, settings, attempt.engine)
        except (FieldError, LookupError):
            pass  # made when the study had other settings: what is recorded must do
    return {name: (size.mean, size.spread) for name, size in estimate.parts}, printed


def _whole(attempt: Attempt, job: Job | None) -> int | None:
    """Return what the engine took at its peak, where that says something of its need."""
    if not isinstance(attempt.outcome, Measured) or attempt.engine.get("simulated") is True:
        return None
    if job is not None and isinstance(job.engine, Sharing):
        return None  # it takes the share of the card that it is told to, whatever it needs
    telemetry = attempt.outcome.telemetry
    if telemetry is not None and telemetry.gpu_engine_bytes is not None:
        return telemetry.gpu_engine_bytes
    return attempt.outcome.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsSeen:
    """Speculation of one attempt: the share accepted at each position, and what steps yield.

    `yields[n]` are the tokens a step would give with drafts of n tokens, from 0 upwards.
    """

    attempt: int
    label: str
    shares: tuple[float, ...]
    yields: tuple[float, ...]
    acceptance: float | None


def drafts_seen(attempts: Sequence[Attempt], labels: Mapping[int, str]) -> tuple[DraftsSeen, ...]:
    """Return the drafts of those attempts whose engine counted them by position."""
    return tuple(
        DraftsSeen(
            attempt=each.number,
            label=labels[each.number],
            shares=shares(drafts),
            yields=profile(drafts),
            acceptance=drafts.acceptance,
        )
        for each in attempts
        if isinstance(each.outcome, Measured)
        and (drafts := each.outcome.drafts) is not None
        and shares(drafts)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Decode speed after so many tokens; without a summary it is a single answer."""

    tokens: int
    tok_s: float
    summary: Summary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthsSeen:
    """Decode speed of one attempt by depth, a single stream, shallowest first."""

    attempt: int
    label: str
    depths: tuple[Depth, ...]


def depths_seen(attempts: Sequence[Attempt], labels: Mapping[int, str]) -> tuple[DepthsSeen, ...]:
    """Return the speed by depth of those attempts that were seen at two depths or more."""
    found = []
    for each in attempts:
        if not isinstance(each.outcome, Measured):
            continue
        depths = {
            tokens: Depth(tokens=tokens, tok_s=load.decode_tok_s.median, summary=load.decode_tok_s)
            for load in each.outcome.figures
            if load.streams == 1 and (tokens := depth_of(each, load)) is not None
        }
        proof = each.outcome.context
        if proof.decode_tok_s is not None and proof.prompt_tokens not in depths:
            depths[proof.prompt_tokens] = Depth(
                tokens=proof.prompt_tokens, tok_s=proof.decode_tok_s, summary=None
            )
        if len(depths) > 1:
            ordered = tuple(depths[tokens] for tokens in sorted(depths))
            found.append(DepthsSeen(attempt=each.number, label=labels[each.number], depths=ordered))
    return tuple(found)


def depth_of(attempt: Attempt, load: Figures) -> int | None:
    """Return how many tokens the prompts of a load had, as the server counted them."""
    counted = [
        each.prompt_tokens
        for each in attempt.samples
        if each.purpose is Purpose.MEASURE
        and (each.workload, each.prompt_length, each.streams)
        == (load.workload, load.prompt_length, load.streams)
    ]
    return round(statistics.median(counted)) if counted else load.prompt_length
