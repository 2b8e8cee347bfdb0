"""What a measurement counts with where its answers go round in circles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import measured_attempt

from sweeper.core.known import known_from
from sweeper.core.objectives import counted_tok_s, draft_gain, values_of, why_counted
from sweeper.core.outcome import Attempt, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.sample import DraftCounters
from sweeper.core.standing import front_among
from sweeper.core.stats import Doubt
from sweeper.recipe import PICKS
from sweeper.report import front_rows

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None)


def looping(
    attempt: Attempt, *, steps: int, accepted: int, tokens: int | None = None, answers: int = 6
) -> Attempt:
    """Return the attempt with answers that loop and these counters."""
    assert isinstance(attempt.outcome, Measured)
    speed = replace(attempt.outcome.decode_tok_s, doubts=(Doubt.LOOPING,))
    drafts = DraftCounters(steps=steps, drafted=max(accepted, 1), accepted=accepted)
    first, *others = attempt.outcome.figures
    first = replace(
        first, decode_tok_s=speed, drafts=drafts, tokens=tokens, answers=answers, looping=answers
    )
    outcome = replace(attempt.outcome, decode_tok_s=speed, drafts=drafts, figures=(first, *others))
    return replace(attempt, outcome=outcome)


def outcome_of(attempt: Attempt) -> Measured:
    assert isinstance(attempt.outcome, Measured)
    return attempt.outcome


def test_without_the_doubt_drafts_count_in_full() -> None:
    sound = outcome_of(measured_attempt())
    assert draft_gain(sound) == 1
    assert counted_tok_s(sound) == sound.decode_tok_s.median
    assert why_counted(sound) is None


def test_steps_without_a_draft_are_counted_from_the_tokens() -> None:
    # 576 tokens of 6 answers: 570 decoded, 380 of them accepted drafts, so 190 steps: 3 each.
    found = outcome_of(looping(measured_attempt(), steps=20, accepted=380, tokens=576))
    assert draft_gain(found) == pytest.approx(3)
    assert counted_tok_s(found) == pytest.approx(found.decode_tok_s.median / 3)
    said = why_counted(found)
    assert said is not None
    assert f"{counted_tok_s(found):.1f} tok/s" in said


def test_where_tokens_were_not_kept_the_steps_with_a_draft_tell() -> None:
    assert draft_gain(outcome_of(looping(measured_attempt(), steps=100, accepted=300))) == 4


@QUICK
@given(st.integers(1, 500), st.integers(0, 4000), st.integers(12, 4000))
def test_it_never_counts_with_more_than_was_measured(
    steps: int, accepted: int, tokens: int
) -> None:
    found = outcome_of(looping(measured_attempt(), steps=steps, accepted=accepted, tokens=tokens))
    assert 0 < counted_tok_s(found) <= found.decode_tok_s.median
    assert values_of(found, ("speed", "context"))[0] == counted_tok_s(found)


def test_fast_nonsense_is_on_no_front_sets_no_bar_and_is_not_picked() -> None:
    plain = replace(measured_attempt(1, decode_tok_s=43), point=Pairs(n_max=0))
    fast = looping(measured_attempt(2, decode_tok_s=129), steps=100, accepted=300)
    fast = replace(fast, point=Pairs(n_max=16))
    assert [each.number for each in front_among([plain, fast])] == [1]
    bar = known_from([plain, fast], [fast], weights="").bar(1024)
    assert bar == pytest.approx(outcome_of(fast).decode_tok_s.low / 4)
    assert PICKS["fastest"]([fast, plain]) == [plain]


def test_a_front_of_loops_says_with_what_and_why_each_counts() -> None:
    (row,) = front_rows([looping(measured_attempt(1), steps=100, accepted=100)])
    assert row["counted_tok_s"] == row["decode_tok_s"] / 2
    assert "circles" in row["why_counted"]
