"""What one request showed: rates that are None rather than wrong, counters that subtract."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.sample import DraftCounters, Purpose, Sample

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=40)

SAMPLE = Sample(
    purpose=Purpose.MEASURE,
    prompt_tokens=100,
    completion_tokens=11,
    ttft_s=0.5,
    decode_s=2.0,
    total_s=2.5,
    frames=11,
    finish_reason="length",
    text="words",
)
counts = st.integers(0, 1000)
counters = st.builds(
    DraftCounters,
    steps=counts,
    drafted=counts,
    accepted=counts,
    accepted_per_position=st.lists(counts, max_size=4).map(tuple),
)


def positions(counted: DraftCounters, width: int) -> list[int]:
    return [*counted.accepted_per_position, *[0] * width][:width]


@QUICK
@given(counters, counters)
def test_what_is_counted_since_a_reading_adds_up_to_the_later_one(
    before: DraftCounters, after: DraftCounters
) -> None:
    between = after.since(before)
    assert between.steps + before.steps == after.steps
    assert between.drafted + before.drafted == after.drafted
    assert between.accepted + before.accepted == after.accepted
    sums = [a + b for a, b in zip(positions(between, 4), positions(before, 4), strict=True)]
    assert sums == positions(after, 4)


@QUICK
@given(counters)
def test_nothing_is_counted_since_the_same_reading(counted: DraftCounters) -> None:
    between = counted.since(counted)
    assert (between.steps, between.drafted, between.accepted) == (0, 0, 0)
    assert not any(between.accepted_per_position)


@QUICK
@given(counters)
def test_acceptance_is_none_where_nothing_was_drafted(counted: DraftCounters) -> None:
    if counted.drafted == 0:
        assert counted.acceptance is None
    else:
        assert counted.acceptance == counted.accepted / counted.drafted


def test_no_accepted_token_is_an_acceptance_of_zero() -> None:
    assert DraftCounters(steps=5, drafted=10, accepted=0).acceptance == 0.0


def test_decoding_is_timed_after_the_first_token() -> None:
    assert SAMPLE.decode_tok_s == 5.0
    assert SAMPLE.prefill_tok_s == 200.0


@pytest.mark.parametrize(
    "changes", [{"completion_tokens": 1}, {"completion_tokens": 0}, {"decode_s": 0.0}]
)
def test_one_token_or_no_time_has_no_decoding_speed(changes: dict[str, float]) -> None:
    assert replace(SAMPLE, **changes).decode_tok_s is None  # type: ignore[arg-type]


def test_no_time_to_the_first_token_has_no_prefill_speed() -> None:
    assert replace(SAMPLE, ttft_s=0.0).prefill_tok_s is None
