"""Raw measurements: what one request showed, before anything is summarised."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sweeper.core.pairs import Pairs


class Purpose(enum.StrEnum):
    """Why a request was sent."""

    FIRST = "first"
    PROOF = "proof"
    OVERFLOW = "overflow"
    WARMUP = "warmup"
    MEASURE = "measure"
    CACHED = "cached"
    GUARD = "guard"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounters:
    """Speculation as the engine counts it, cumulative or over an interval.

    `steps` is the number of verification steps, `drafted` and `accepted` are tokens,
    `accepted_per_position[i]` counts the steps in which position i of the draft was accepted.
    """

    steps: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...] = ()

    def since(self, before: DraftCounters) -> DraftCounters:
        """Return what was counted between an earlier reading and this one."""
        width = max(len(self.accepted_per_position), len(before.accepted_per_position))
        here = self.accepted_per_position + (0,) * (width - len(self.accepted_per_position))
        there = before.accepted_per_position + (0,) * (width - len(before.accepted_per_position))
        return DraftCounters(
            steps=self.steps - before.steps,
            drafted=self.drafted - before.drafted,
            accepted=self.accepted - before.accepted,
            accepted_per_position=tuple(a - b for a, b in zip(here, there, strict=True)),
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens, in 0..1; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One streamed completion. Tokens from the server's usage, times on a monotonic clock, in s.

    `ttft_s` runs from the request to the first text, `decode_s` from there to the last text;
    `gaps_s` are the times between one piece of text and the next: under speculation one piece can
    carry several tokens. `began_s` counts from the beginning of the attempt. `server` keeps the
    engine's own figures for the same request.

    `workload`, `prompt_length` (None: the workload's own prompt) and `streams` say which load the
    request belongs to, `run` and `stream` which of its requests it is, `prompt` which of the
    workload's prompts was asked, from 0 on. `asked_tokens` is how long the answer was to be at
    most, None where it was not kept.
    """

    purpose: Purpose
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_s: float
    total_s: float
    frames: int
    finish_reason: str
    text: str
    server: Pairs = Pairs()
    workload: str = ""
    prompt_length: int | None = None
    streams: int = 1
    run: int = 0
    stream: int = 0
    seed: int | None = None
    began_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    prompt: int = 0
    asked_tokens: int | None = None

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first over the time after the first; None for one token or no time."""
        if self.completion_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.completion_tokens - 1) / self.decode_s

    @property
    def prefill_tok_s(self) -> float | None:
        """Prompt tokens over the time to the first token; None where no time passed."""
        return self.prompt_tokens / self.ttft_s if self.ttft_s > 0 else None
