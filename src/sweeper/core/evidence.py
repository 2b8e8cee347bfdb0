"""What one boot printed, as far as it got: the facts a search learns from."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


class Role(enum.StrEnum):
    """What an axis does to an engine, whatever the engine calls it."""

    WEIGHTS = "weights"
    """Which weights are loaded: their size decides memory and the floor of the step time."""
    KV_DTYPE = "kv_dtype"
    CONTEXT = "context"
    DRAFT_LENGTH = "draft_length"
    DRAFT_METHOD = "draft_method"
    GRAPHS = "graphs"
    """Which CUDA graphs are captured."""
    MEMORY_FRACTION = "memory_fraction"
    """The share of the device that the engine may plan with; what is left serves the rest."""
    PREFILL_CHUNK = "prefill_chunk"
    SEQUENCES = "sequences"
    """How many sequences may be scheduled at once from one pool of KV blocks."""
    PARALLEL = "parallel"
    """How many slots are served at once, each with a window of its own."""
    BACKEND = "backend"
    OTHER = "other"


_TEXTS = ("outcome", "kind", "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a boot showed; None where it did not come that far or did not say.

    `outcome` is a name of the closed set of endings (`oom_kv_cache`), `kind` its kind
    (`measured`, `infeasible`, `unfit`), `phase` the last phase reached. Sizes are in bytes, times
    in seconds. `shortfall_at_least` tells that the shortfall is only a lower bound, as when one
    allocation of several failed. `acceptance[i]` is the unconditional share of drafts of which at
    least i + 1 tokens were accepted, so an engine gains `sum(acceptance)` tokens per step.
    """

    outcome: str
    kind: str
    phase: str | None = None
    shortfall_bytes: float | None = None
    shortfall_at_least: bool = False
    weights_bytes: float | None = None
    kv_bytes_per_token: float | None = None
    draft_bytes: float | None = None
    compute_bytes: float | None = None
    graph_bytes: float | None = None
    kv_pool_tokens: float | None = None
    estimated_context_tokens: float | None = None
    acceptance: tuple[float, ...] = ()
    step_s: float | None = None
    boot_s: float | None = None
    total_s: float | None = None
    decode_tok_s: float | None = None
    proven_context_tokens: float | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is None:
                continue
            # `not value >= 0`: NaN is neither, and would poison every model that reads it.
            if isinstance(value, bool) or not value >= 0 or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
        if not all(0 <= share <= 1 for share in self.acceptance):
            raise ValueError(f"acceptance must be shares from 0 to 1, got {self.acceptance}")

    @property
    def tokens_per_step(self) -> float:
        """The expected tokens of one step: the one that is always won, and the accepted drafts.

        Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
        """
        return 1.0 + sum(self.acceptance)

    def as_json(self) -> dict[str, Any]:
        """Return the evidence as JSON-ready data, without what is not known."""
        document: dict[str, Any] = {"outcome": self.outcome, "kind": self.kind}
        if self.phase is not None:
            document["phase"] = self.phase
        if self.shortfall_at_least:
            document["shortfall_at_least"] = True
        document.update({n: getattr(self, n) for n in _NUMBERS if getattr(self, n) is not None})
        if self.acceptance:
            document["acceptance"] = list(self.acceptance)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Evidence:
        """Read what `as_json` wrote; raises ValueError on what it cannot have written."""
        unknown = sorted(set(document) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"evidence has no {', '.join(unknown)}")
        for name in ("outcome", "kind"):
            if not isinstance(document.get(name), str):
                told = f"evidence needs its {name} as text, got {document.get(name)!r}"
                raise ValueError(told)  # noqa: TRY004 - wrong data, not a wrong call
        named = {name: value for name, value in document.items() if name != "acceptance"}
        return cls(**named, acceptance=tuple(document.get("acceptance", ())))


_NUMBERS = tuple(
    field.name
    for field in fields(Evidence)
    if field.name not in (*_TEXTS, "shortfall_at_least", "acceptance")
)


COMPONENTS = ("weights", "kv", "draft", "compute", "graphs", "overhead")
"""What a search tells apart of the memory of a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one point is thought to need of memory before any boot.

    `point` maps the names of its active axes to values as text. `parts` are components of
    `COMPONENTS`, each with the mean and the standard deviation of its size in bytes.
    """

    point: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, float, float], ...]

    def __post_init__(self) -> None:
        for component, mean, spread in self.parts:
            if component not in COMPONENTS:
                raise ValueError(f"{component} is none of {', '.join(COMPONENTS)}")
            if not all(math.isfinite(each) and each >= 0 for each in (mean, spread)):
                raise ValueError(f"{component} must be finite and at least 0: {mean!r}, {spread!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is known before any boot, from the card and from the model's own files.

    Every part may be missing. The mappings go from the text of an axis value to bytes. `needs` are
    examples of what points need: some hundred, drawn from all over the space, tell how each axis
    moves each component, and how sure that is. `draft_cost` is what verifying one drafted token is
    thought to cost, as a share of a step without drafts, give or take a factor of 1.6.
    """

    capacity_bytes: float | None = None
    weights_bytes: tuple[tuple[str, float], ...] = ()
    kv_bytes_per_token: tuple[tuple[str, float], ...] = ()
    needs: tuple[Need, ...] = ()
    draft_cost: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.draft_cost <= 1:
            raise ValueError(f"draft_cost must be a share above 0, got {self.draft_cost!r}")
