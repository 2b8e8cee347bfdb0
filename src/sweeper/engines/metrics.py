"""What engines' metrics pages have in common."""

from __future__ import annotations

from sweeper.core.sample import DraftCounters

_COUNTERS = "spec_decode_num_"


def draft_counters(metrics: str, prefix: str) -> DraftCounters | None:
    """Return speculation's counters under the names of vLLM, which llama.cpp has as well.

    `prefix` is what stands before the names (`vllm:`). Summed over engines; None where there are
    none.
    """
    # Late: the library brings an HTTP server, and a plan reads no metrics.
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            short = sample.name.removeprefix(prefix).removesuffix("_total")
            if short == f"{_COUNTERS}accepted_tokens_per_pos":
                at = int(sample.labels["position"])
                positions[at] = positions.get(at, 0) + sample.value
            elif short.startswith(_COUNTERS):
                values[short] = values.get(short, 0) + sample.value
    if f"{_COUNTERS}drafts" not in values:
        return None
    return DraftCounters(
        steps=int(values[f"{_COUNTERS}drafts"]),
        drafted=int(values.get(f"{_COUNTERS}draft_tokens", 0)),
        accepted=int(values.get(f"{_COUNTERS}accepted_tokens", 0)),
        accepted_per_position=tuple(
            int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)
        ),
    )
