"""Evidence of a boot: what it refuses, and that it survives a round through JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.evidence import Evidence, Need, Prior

QUICK = settings(deadline=None, max_examples=60)

sizes = st.none() | st.floats(0, 1e12)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    return Evidence(
        outcome=draw(st.sampled_from(["measured", "oom_kv_cache", "unsupported_combination"])),
        kind=draw(st.sampled_from(["measured", "infeasible"])),
        phase=draw(st.sampled_from([None, "kv", "ready"])),
        shortfall_bytes=draw(sizes),
        shortfall_at_least=draw(st.booleans()),
        weights_bytes=draw(sizes),
        kv_bytes_per_token=draw(sizes),
        acceptance=tuple(draw(st.lists(st.floats(0, 1), max_size=5))),
        step_s=draw(sizes),
        decode_tok_s=draw(sizes),
    )


@QUICK
@given(evidences())
def test_evidence_survives_a_round_through_json(evidence: Evidence) -> None:
    assert Evidence.from_json(json.loads(json.dumps(evidence.as_json()))) == evidence


@QUICK
@given(evidences())
def test_a_step_yields_one_token_and_the_accepted_drafts(evidence: Evidence) -> None:
    assert 1 <= evidence.tokens_per_step <= 1 + len(evidence.acceptance)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, True])
def test_a_size_that_is_no_size_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="weights_bytes"):
        Evidence(outcome="measured", kind="measured", weights_bytes=value)


def test_an_acceptance_that_is_no_share_is_refused() -> None:
    with pytest.raises(ValueError, match="shares"):
        Evidence(outcome="measured", kind="measured", acceptance=(1.2,))


@pytest.mark.parametrize("document", [{}, {"outcome": "measured"}, {"outcome": 1, "kind": "x"}])
def test_a_document_without_its_ending_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="evidence needs"):
        Evidence.from_json(document)


def test_a_document_with_unknown_facts_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_bytes"):
        Evidence.from_json({"outcome": "measured", "kind": "measured", "weight_bytes": 1})


@pytest.mark.parametrize(
    "part", [("engine", 1.0, 0.0), ("kv", -1.0, 0.0), ("kv", 1.0, math.nan), ("kv", math.inf, 1.0)]
)
def test_a_need_of_no_component_or_no_size_is_refused(part: tuple[str, float, float]) -> None:
    with pytest.raises(ValueError, match=part[0]):
        Need(point=(("ctx", "1"),), parts=(part,))


@pytest.mark.parametrize("cost", [0.0, -0.1, 1.5, math.nan])
def test_a_cost_of_drafts_that_is_no_share_is_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="draft_cost"):
        Prior(draft_cost=cost)
