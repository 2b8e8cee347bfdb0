"""Which attempt speaks for a point, what is measured again, and what falls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import broken_attempt, measured_attempt, oom_attempt

from sweeper.core.known import Known, Rival, alike, answers_of, known_from
from sweeper.core.outcome import Attempt, Measured
from sweeper.core.quality import GREEDY_PROMPTS
from sweeper.core.sample import Purpose, Sample
from sweeper.core.standing import (
    Fall,
    fallen,
    front_among,
    is_contended,
    reliability_of,
    standing,
    unconfirmed,
    unsound_among,
    unsure,
)
from sweeper.core.stats import Doubt


def numbers(attempts: tuple[Attempt, ...]) -> list[int]:
    return [each.number for each in attempts]


def contended(attempt: Attempt) -> Attempt:
    outcome = attempt.outcome
    assert isinstance(outcome, Measured)
    speed = replace(outcome.decode_tok_s, doubts=(Doubt.CONTENDED,))
    return replace(attempt, outcome=replace(outcome, decode_tok_s=speed))


def answering(attempt: Attempt, words: str) -> Attempt:
    """Return the attempt with these greedy answers, before and after its measurement."""
    answer = Sample(
        purpose=Purpose.GUARD, prompt_tokens=8, completion_tokens=48, ttft_s=0.1, decode_s=1.0,
        total_s=1.1, frames=48, finish_reason="length", text=words,
    )  # fmt: skip
    asked = (answer,) * len(GREEDY_PROMPTS)
    return replace(attempt, samples=(*asked, *attempt.samples, *asked))


FAST: dict[str, Any] = {"context": 4096, "n_max": 3}
LONG: dict[str, Any] = {"context": 65536, "n_max": 3}


def test_the_last_attempt_at_a_point_speaks_for_it() -> None:
    two = [measured_attempt(1, decode_tok_s=40.0), measured_attempt(2, decode_tok_s=44.0)]
    assert numbers(standing(two)) == [2]


def test_what_was_disturbed_never_replaces_what_was_not() -> None:
    quiet, busy = measured_attempt(1), contended(measured_attempt(2))
    assert is_contended(busy)
    assert not is_contended(quiet)
    assert numbers(standing([quiet, busy])) == [1]
    assert numbers(standing([busy, quiet])) == [1]
    assert numbers(standing([busy])) == [2]


def test_a_point_that_failed_at_last_stands_for_nothing_and_a_crash_changes_nothing() -> None:
    worked = measured_attempt(1)
    failed = replace(oom_attempt(2), point=worked.point)
    crashed = replace(broken_attempt(2), point=worked.point)
    assert standing([worked, failed]) == ()
    assert numbers(standing([worked, crashed])) == [1]


def test_what_was_measured_again_is_reported_and_both_are_kept() -> None:
    search = [measured_attempt(1, decode_tok_s=60.0, **FAST), measured_attempt(2, **LONG)]
    assert numbers(unconfirmed(search)) == [1, 2]
    again = measured_attempt(3, decode_tok_s=57.0, confirms=1, **FAST)
    assert numbers(front_among([*search, again])) == [3, 2]
    assert numbers(unconfirmed([*search, again])) == [2]
    assert fallen([*search, again]) == ()


def test_of_several_confirmations_the_one_in_the_middle_counts() -> None:
    search = measured_attempt(1, decode_tok_s=60.0)
    again = [
        measured_attempt(number, decode_tok_s=speed, confirms=1)
        for number, speed in ((2, 50.0), (3, 58.0), (4, 56.0))
    ]
    assert numbers(standing([search, *again])) == [4]
    assert numbers(standing([search, *again[:2]])) == [2]


def test_a_member_that_does_not_hold_is_dropped_and_said() -> None:
    lucky = measured_attempt(1, decode_tok_s=60.0, **FAST)
    steady = measured_attempt(2, decode_tok_s=50.0, **LONG)
    slower = measured_attempt(3, decode_tok_s=45.0, confirms=1, **FAST)
    (fall,) = fallen([lucky, steady, slower])
    assert (fall.attempt.number, fall.fall) == (1, Fall.SLOWER)
    assert "45.0 tok/s instead of 60.0" in fall.explanation
    gone = replace(oom_attempt(3, confirms=1), point=lucky.point)
    (fall,) = fallen([lucky, steady, gone])
    assert (fall.fall, "oom_kv_cache" in fall.explanation) == (Fall.FLAKY, True)
    assert "1 of 2 boots" in fall.explanation
    assert numbers(front_among([lucky, steady, gone])) == [2]


def test_a_crash_while_confirming_drops_nothing() -> None:
    member = measured_attempt(1, **FAST)
    crash = replace(broken_attempt(2, confirms=1), point=member.point)
    assert numbers(front_among([member, crash])) == [1]
    assert fallen([member, crash]) == ()


def test_answers_that_no_other_configuration_gives_never_reach_the_front() -> None:
    sound = [
        answering(measured_attempt(n, decode_tok_s=40.0 + n, n_max=n), "The sun rises in the east")
        for n in (1, 2)
    ]
    fast = answering(measured_attempt(9, decode_tok_s=99.0, n_max=9), "fox tree lamp fox lamp fox")
    for order in ([fast, *sound], [*sound, fast]):
        assert numbers(unsound_among(order)) == [9]
        assert 9 not in numbers(front_among(order))
        assert [each.fall for each in fallen(order)] == [Fall.UNSOUND]


def test_one_against_one_says_nothing_of_who_is_right() -> None:
    two = [
        answering(measured_attempt(1, n_max=1), "The sun rises in the east"),
        answering(measured_attempt(2, n_max=2), "fox tree lamp fox lamp fox"),
    ]
    assert unsound_among(two) == ()


def test_other_weights_may_answer_otherwise() -> None:
    ours = [answering(measured_attempt(n, n_max=n), "The sun rises in the east") for n in (1, 2)]
    other = answering(measured_attempt(3, n_max=3), "A lamp was lit that evening.")
    other = replace(other, model=other.model.with_(sha256="f" * 64))
    assert unsound_among([*ours, other]) == ()


@given(st.lists(st.floats(10, 100), min_size=1, max_size=8), st.randoms())
def test_the_order_in_which_attempts_are_given_changes_nothing(
    speeds: list[float], random: Any
) -> None:
    everyone = [
        measured_attempt(n, decode_tok_s=speed, n_max=n % 3) for n, speed in enumerate(speeds, 1)
    ]
    mixed = list(everyone)
    random.shuffle(mixed)
    assert standing(mixed) == standing(everyone)
    assert {each.point for each in standing(everyone)} == {each.point for each in everyone}


# ---- What is known ------------------------------------------------------------------------------


def test_the_bar_is_the_lower_bound_of_the_best_rival_with_at_least_this_window() -> None:
    known = Known(
        rivals=(
            Rival(window_tokens=4096, low_tok_s=60.0),
            Rival(window_tokens=32768, low_tok_s=40.0),
        )
    )
    assert known.bar(4096) == 60.0
    assert known.bar(4097) == 40.0
    assert known.bar(32769) == 0.0  # a race with nobody
    assert Known().bar(4096) is None  # no race


def test_the_reference_is_trusted_where_another_configuration_answers_alike() -> None:
    first = answering(measured_attempt(1, n_max=1), "The sun rises in the east")
    second = answering(measured_attempt(2, n_max=2), "The sun rises in the east, and")
    weights = str(first.model["sha256"])
    alone = known_from([first], (), weights=weights).reference
    assert alone is not None
    assert (alone.attempt, alone.trusted) == (1, False)
    both = known_from([first, second], (), weights=weights).reference
    assert both is not None
    assert both.trusted
    named = known_from([first, second], (), weights=weights, reference={"n_max": 2}).reference
    assert named is not None
    assert (named.attempt, named.trusted) == (2, True)
    assert known_from([first], (), weights="0" * 64).reference is None


def test_what_the_study_knows_is_read_off_its_attempts() -> None:
    one = measured_attempt(1)
    known = known_from([one, oom_attempt(2)], [one], weights=str(one.model["sha256"]))
    assert known.best_logprob == pytest.approx(-2.1)
    assert known.noise is not None
    assert 0 < known.noise.cv < 0.1
    assert [each.window_tokens for each in known.rivals or ()] == [32768 - 16]
    assert known.reference is None  # it was asked nothing


def test_answers_are_those_given_before_the_measurement() -> None:
    one = answering(measured_attempt(1), "yes")
    assert answers_of(one) == ("yes",) * len(GREEDY_PROMPTS)
    assert alike(answers_of(one), answers_of(one))
    assert not alike((), ())


# ---- Members that leave little memory ----------------------------------------------------------

LIMIT = 1000 * 2**20


def leaving(attempt: Attempt, left_mib: float) -> Attempt:
    """Return the attempt under a limit of 1000 MiB, of which so much was left."""
    outcome = attempt.outcome
    assert isinstance(outcome, Measured)
    peak = LIMIT - round(left_mib * 2**20)
    return replace(attempt, outcome=replace(outcome, peak_bytes=peak), memory_limit_bytes=LIMIT)


def test_what_leaves_nothing_is_measured_and_not_on_the_front() -> None:
    edge = leaving(measured_attempt(1, decode_tok_s=90.0, **FAST), 0.0)
    roomy = leaving(measured_attempt(2, decode_tok_s=50.0, **LONG), 300.0)
    assert numbers(standing([edge, roomy])) == [1, 2]
    assert numbers(front_among([edge, roomy])) == [2]
    (fall,) = fallen([edge, roomy])
    assert (fall.attempt.number, fall.fall) == (1, Fall.EDGE)
    assert "to the limit: 0.0 MiB, 1 of 1 boots" in fall.explanation


def test_the_wish_of_the_study_is_kept_with_its_attempts_and_the_last_one_counts() -> None:
    little = leaving(measured_attempt(1, decode_tok_s=90.0, **FAST), 200.0)
    roomy = leaving(measured_attempt(2, decode_tok_s=50.0, **LONG), 300.0)

    def wishing(size: int | None) -> Attempt:
        return replace(roomy, workload=roomy.workload.with_(memory_left_bytes=size))

    assert numbers(front_among([little, wishing(None)])) == [1, 2]
    assert numbers(front_among([little, wishing(256 * 2**20)])) == [2]
    (fall,) = fallen([little, wishing(256 * 2**20)])
    assert fall.fall is Fall.SHORT
    edge = leaving(measured_attempt(1, decode_tok_s=90.0, **FAST), 0.0)
    assert numbers(front_among([edge, wishing(0)])) == [1, 2]


def test_the_unsure_member_that_boots_quickest_is_booted_next() -> None:
    slow = leaving(measured_attempt(1, decode_tok_s=90.0, **FAST), 2.0)
    quick = leaving(measured_attempt(2, decode_tok_s=50.0, **LONG), 2.0)
    quick = replace(quick, timings=replace(quick.timings, boot_s=1.0))
    assert unsure([slow, quick]) == quick
    assert unsure([leaving(each, 300.0) for each in (slow, quick)]) is None


def test_a_brief_boot_says_whether_it_works_and_its_speed_counts_for_nothing() -> None:
    member = leaving(measured_attempt(1, decode_tok_s=60.0, **FAST), 2.0)
    brief = leaving(measured_attempt(2, decode_tok_s=20.0, confirms=1, brief=True, **FAST), 2.0)
    assert numbers(standing([member, brief])) == [1]
    assert numbers(unconfirmed([member, brief])) == [1]
    hold = reliability_of([member, brief])[member.point]
    assert (hold.held, hold.boots) == (2, 2)
    out = replace(oom_attempt(3, confirms=1, brief=True), point=member.point)
    assert front_among([member, brief, out]) == ()
    (fall,) = fallen([member, brief, out])
    assert (fall.fall, "2 of 3 boots" in fall.explanation) == (Fall.FLAKY, True)
