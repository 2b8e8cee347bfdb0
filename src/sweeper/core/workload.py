"""What is asked of a server while it is measured, as data."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass

from sweeper.core.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A benchmark: one prompt, answered several times by a single stream, and a context proof.

    `max_tokens` is the length of each answer; `warmup_runs` come first and are kept apart;
    `proof_answer_tokens` is how many tokens of the window the answer of the proof takes.
    `request` holds further fields of every request. Times in seconds.
    """

    name: str
    prompt: str
    max_tokens: int
    warmup_runs: int
    runs: int
    proof_answer_tokens: int
    temperature: float = 0.0
    seed: int | None = 0
    request: Pairs = Pairs()
    request_timeout_s: float = 600.0
    silence_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("prompt: must not be empty")
        for name, least in (
            ("max_tokens", 2), ("warmup_runs", 0), ("runs", 1), ("proof_answer_tokens", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, got {getattr(self, name)}")

        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: must be 0 or more, got {self.temperature}")

    def described(self) -> dict[str, object]:
        """Return the workload as JSON-ready data."""
        return {**asdict(self), "request": dict(self.request)}

    def digest(self) -> str:
        """Return 16 hex digits that change with anything that changes the numbers."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[
            :16
        ]
