"""What a search is told: the evidence of a boot, the roles of axes, what is known beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping

from sweeper.core.acceptance import mean_length, shares
from sweeper.core.evidence import Evidence, Need, Prior, Role
from sweeper.core.memory import Boot, MemoryModel
from sweeper.core.objectives import counted_tok_s, draft_gain
from sweeper.core.outcome import Attempt, Infeasible, Measured, kind, name
from sweeper.core.pairs import Pairs, Scalar, text
from sweeper.core.space import Axis, Space
from sweeper.core.typed import FieldError
from sweeper.engines import Engine, capacity_of, estimated, role_of, shown
from sweeper.job import MODEL_VARIANT, Job

_ESTIMATES = ("estimated_max_model_len", "largest_proven_tokens")
"""Facts of a failed boot that say which window would have fitted."""
_ON_A_PROCESSOR = 0.3
"""What verifying a drafted token costs where arithmetic is what a step waits for, as a share."""
_EXAMPLES = 200
"""How many points are asked what they need, so that it is known what moves what."""
_COMPONENTS = {
    "weights": "weights",
    "kv_cache": "kv",
    "state": "kv",
    # Logits of each token that is verified: what a longer draft costs.
    "output": "draft",
    "compute": "compute",
    "workspace": "compute",
    "graphs": "graphs",
}
"""The components of an estimate, as a search tells them apart; `draft_...` are of the draft."""


def roles_of(space: Space, engine: Engine) -> dict[str, Role]:
    """Return what each axis does to the engine: what the first of its settings does that is known.

    An axis that chooses the file of the model chooses its weights.
    """
    found = {}
    for axis in space.axes:
        if MODEL_VARIANT in axis.sets:
            found[axis.name] = Role.WEIGHTS
            continue
        known = (role_of(engine, setting) for setting in axis.sets)
        found[axis.name] = next((each for each in known if each is not Role.OTHER), Role.OTHER)
    return found


def evidence_of(attempt: Attempt, job: Job) -> Evidence:
    """Return what one attempt showed, as far as it came."""
    try:
        settings = job.settings(attempt.point)
    except FieldError:
        return Evidence(outcome=name(attempt.outcome), kind=kind(attempt.outcome))
    sizes = shown(job.engine, settings, attempt.engine)
    draft = _number(sizes, "draft")
    weights = _number(sizes, "weights", "weights+draft_weights")
    window = job.engine.context_tokens(settings)
    cache = _number(sizes, "kv_cache")
    outcome = attempt.outcome
    found: dict[str, float | None] = {
        "weights_bytes": weights,
        "kv_bytes_per_token": cache / window if cache and window else None,
        "draft_bytes": draft,
        "compute_bytes": _number(sizes, "compute"),
        "graph_bytes": _number(sizes, "graphs"),
        "kv_pool_tokens": _number(attempt.engine, "kv_pool_tokens"),
        "boot_s": attempt.timings.boot_s,
        "total_s": attempt.timings.total_s,
    }
    acceptance: tuple[float, ...] = ()
    if isinstance(outcome, Measured):
        found["decode_tok_s"] = counted_tok_s(outcome)
        found["proven_context_tokens"] = float(outcome.context.window_tokens)
        length = 1.0
        # What drafts make of text that goes round in circles says nothing of any other text.
        circles = draft_gain(outcome) > 1
        if outcome.drafts is not None and outcome.drafts.drafted > 0 and not circles:
            acceptance = _falling(shares(outcome.drafts))
            length = mean_length(outcome.drafts) or 1.0
        found["step_s"] = length / counted_tok_s(outcome)
        phase = None
    else:
        facts = outcome.finding.facts
        phase = outcome.finding.phase.value
        found["shortfall_bytes"] = _number(facts, "shortfall_bytes")
        found["estimated_context_tokens"] = _number(facts, *_ESTIMATES)
    return Evidence(
        outcome=name(outcome),
        kind=kind(outcome),
        phase=phase,
        # Most engines say what the allocation that failed was short of, not all that was to come;
        # one that says how much it has for its cache knows the rest already.
        shortfall_at_least=isinstance(outcome, Infeasible)
        and "kv_available_bytes" not in outcome.finding.facts,
        acceptance=acceptance,
        **{key: value for key, value in found.items() if value is not None and value >= 0},
    )


def learnt_from(job: Job, attempts: Iterable[Attempt]) -> MemoryModel:
    """Return how estimates of memory are to be corrected, by what boots have printed."""
    boots = []
    for each in attempts:
        try:
            settings = job.settings(each.point)
            boots.append(
                Boot(
                    estimate=estimated(job.engine, settings, job.model(each.point)),
                    shown=shown(job.engine, settings, each.engine),
                )
            )
        except (FieldError, LookupError):
            continue  # of a study that has changed since
    return MemoryModel.of(boots)


def prior_of(
    space: Space,
    job: Job,
    *,
    device_memory_bytes: float | None,
    on_a_processor: bool = False,
    earlier: Iterable[Attempt] = (),
) -> Prior:
    """Return what is known before any boot: the card, and what the model's own files say.

    `on_a_processor` tells that there is no card.

    What attempts of an earlier study printed of the same model counts instead of what its files
    say.
    """
    roles = roles_of(space, job.engine)
    weights: dict[str, float] = {}
    caches: dict[str, float] = {}
    capacity: float | None = None
    for axis in space.axes:
        for value in axis.values:
            # A point that has all its other axes at their first values stands for the value.
            point = _point_with(space, axis, value)
            if point is None:
                continue
            try:
                settings, model = job.settings(point), job.model(point)
            except FieldError:
                continue
            if device_memory_bytes is not None and capacity is None:
                capacity = capacity_of(job.engine, settings, device_memory_bytes)
            if roles[axis.name] is Role.WEIGHTS and model.size_bytes > 0:
                weights[text(value)] = float(model.size_bytes)
            window = job.engine.context_tokens(settings)
            if roles[axis.name] is Role.KV_DTYPE and window > 0:
                cache = estimated(job.engine, settings, model).part("kv_cache")
                if cache.mean > 0:
                    caches[text(value)] = cache.mean / window
    earlier = list(earlier)
    for attempt in earlier:
        evidence = evidence_of(attempt, job)
        for axis in space.axes:
            if axis.name not in attempt.point:
                continue
            value = text(attempt.point[axis.name])
            if value in weights and evidence.weights_bytes is not None:
                weights[value] = evidence.weights_bytes
            if value in caches and evidence.kv_bytes_per_token is not None:
                caches[value] = evidence.kv_bytes_per_token
    fraction = any(role is Role.MEMORY_FRACTION for role in roles.values())
    return Prior(
        capacity_bytes=device_memory_bytes if fraction else capacity,
        weights_bytes=tuple(weights.items()),
        kv_bytes_per_token=tuple(caches.items()),
        needs=tuple(_needs(space, job, learnt_from(job, earlier))),
        **({"draft_cost": _ON_A_PROCESSOR} if on_a_processor else {}),
    )


def _needs(space: Space, job: Job, learnt: MemoryModel) -> Iterator[Need]:
    """Yield what some points of all corners of a space are thought to need."""
    chance = random.Random(0)  # noqa: S311 - not for secrets
    asked: set[Pairs] = set()
    for _ in range(_EXAMPLES):
        values: dict[str, Scalar] = {}
        for axis in space.axes:
            if axis.active(values):
                values[axis.name] = chance.choice(axis.values)
        point = Pairs(values)
        if point in asked or space.refused_by(values) is not None:
            continue
        asked.add(point)
        try:
            needed = estimated(job.engine, job.settings(point), job.model(point))
        except (FieldError, LookupError):
            continue
        sizes: dict[str, tuple[float, float]] = {}
        for part, size in learnt.corrected(needed).parts:
            component = _component(part)
            mean, spread = sizes.get(component, (0.0, 0.0))
            # No size is negative: one that may be far more is not as likely to be far less.
            sure = min(size.spread, size.mean) if size.mean > 0 else size.spread
            sizes[component] = mean + size.mean, math.hypot(spread, sure)
        if sizes.get("weights", (0.0, 0.0))[0] == 0:
            sizes.pop("weights", None)  # nobody said how large they are
        yield Need(
            point=tuple((axis, text(value)) for axis, value in values.items()),
            parts=tuple((each, mean, spread) for each, (mean, spread) in sizes.items()),
        )


def _component(part: str) -> str:
    if part.startswith("draft"):
        return "draft"
    return _COMPONENTS.get(part, "overhead")


def _point_with(space: Space, axis: Axis, value: Scalar) -> Pairs | None:
    """Return a point that has this value, with the first value of every other active axis."""
    values: dict[str, Scalar] = {}
    for each in space.axes:
        if each.active(values):
            values[each.name] = value if each is axis else each.values[0]
    return Pairs(values) if axis.name in values else None


def _number(facts: Mapping[str, Scalar], *names: str) -> float | None:
    for each in names:
        value = facts.get(each)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _falling(found: tuple[float, ...]) -> tuple[float, ...]:
    """Return shares that never rise and stay within 0 and 1, as counters read apart may not."""
    result: list[float] = []
    for share in found:
        result.append(min(max(share, 0.0), result[-1] if result else 1.0))
    return tuple(result)
