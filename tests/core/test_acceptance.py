"""Speculation read off its counters: what holds for any of them, and for simulated drafting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core import acceptance
from sweeper.core.sample import DraftCounters

chances = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@st.composite
def counters(draw: st.DrawFn) -> DraftCounters:
    """Draw counters as an engine can have them: no position more often than one before it."""
    steps = draw(st.integers(0, 5000))
    at: list[int] = []
    for _ in range(draw(st.integers(0, 10))):
        at.append(draw(st.integers(0, at[-1] if at else steps)))
    accepted = sum(at)
    drafted = draw(st.integers(accepted, accepted + 10 * steps))
    return DraftCounters(
        steps=steps, drafted=drafted, accepted=accepted, accepted_per_position=tuple(at)
    )


class Drafting:
    """One server that drafts `n` tokens a step and accepts position i with chance i."""

    def __init__(self, chance: Sequence[float], n: int, seed: int) -> None:
        self._chance = chance
        self._n = n
        self._luck = random.Random(seed)
        self.steps = self.drafted = self.accepted = self.tokens = self.requests = 0
        self._at = [0] * n
        self.reported = [0, 0]

    def answer(self, wanted: int, *, undrafted: float = 0.0, overshoots: bool = False) -> None:
        """Answer one request of so many tokens; a share of the steps finds nothing to draft."""
        self.requests += 1
        made = 1
        while made < wanted:
            room = wanted - made if overshoots else wanted - made - 1
            n = min(self._n, room)
            if n == 0 or self._luck.random() < undrafted:
                made += 1
                continue
            taken = 0
            while taken < n and self._luck.random() < self._chance[taken]:
                self._at[taken] += 1
                taken += 1
            self.steps += 1
            self.drafted += n
            self.accepted += taken
            self.reported[0] += n
            self.reported[1] += taken
            made += taken + 1
        self.tokens += wanted

    @property
    def counters(self) -> DraftCounters:
        return DraftCounters(
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_per_position=tuple(self._at),
        )


@given(counters())
def test_an_engines_counters_are_consistent_and_their_figures_within_bounds(
    counted: DraftCounters,
) -> None:
    assert acceptance.consistent(counted) is None
    length = acceptance.mean_length(counted)
    shares = acceptance.shares(counted)
    assert all(0 <= share <= 1 for share in shares)
    assert list(shares) == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 for share in acceptance.conditional_shares(counted))
    if counted.steps == 0:
        assert (length, shares, acceptance.profile(counted)) == (None, (), ())
        return
    assert length is not None
    assert length >= 1
    profile = acceptance.profile(counted)
    assert len(profile) == len(counted.accepted_per_position) + 1
    assert profile[0] == 1
    assert list(profile) == sorted(profile)
    assert profile[-1] == pytest.approx(length)
    for n, tokens in enumerate(profile):
        assert acceptance.tokens_per_step(counted, n) == pytest.approx(tokens)
        assert tokens <= n + 1 + 1e-9
    assert acceptance.tokens_per_step(counted, len(profile)) is None


@given(counters())
def test_the_chain_of_conditional_shares_is_the_unconditional_one(counted: DraftCounters) -> None:
    product = 1.0
    shares = acceptance.shares(counted)
    for share, conditional in zip(shares, acceptance.conditional_shares(counted), strict=False):
        product *= conditional
        assert product == pytest.approx(share)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(chances, st.integers(0, 10**6))
def test_a_long_drafts_profile_tells_every_shorter_draft(chance: list[float], seed: int) -> None:
    """The derived tokens a step of a short draft are those that the short draft really makes."""
    longest = Drafting(chance, len(chance), seed)
    for _ in range(20):
        longest.answer(300)
    for n in range(1, len(chance)):
        derived = acceptance.tokens_per_step(longest.counters, n)
        shorter = Drafting(chance, n, seed + n)
        for _ in range(20):
            shorter.answer(300)
        seen = acceptance.mean_length(shorter.counters)
        assert derived is not None
        assert seen is not None
        # Both are means of at least 6000 / 9 steps of at most n + 1 tokens.
        steps = min(longest.steps, shorter.steps)
        assert abs(derived - seen) < 5 * (n / 2) * (2 / steps) ** 0.5 + 8 * n / steps


@settings(max_examples=60, deadline=None)
@given(
    chances,
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.booleans(),
    st.lists(st.integers(64, 200), min_size=1, max_size=20),
)
def test_honest_counters_agree_with_the_tokens_that_were_answered(
    chance: list[float], seed: int, undrafted: float, overshoots: bool, lengths: list[int]
) -> None:
    server = Drafting(chance, len(chance), seed)
    for wanted in lengths:
        server.answer(wanted, undrafted=undrafted, overshoots=overshoots)
    told = {"completion_tokens": server.tokens, "requests": server.requests}
    assert acceptance.identity(server.counters, **told) is None
    assert acceptance.from_timings(*server.reported, server.counters) is None
    if undrafted == 0:
        assert acceptance.identity(server.counters, **told, every_step_drafts=True) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.3, 1), min_size=2, max_size=6), st.integers(0, 10**6))
def test_counters_that_count_twice_or_not_at_all_contradict_the_tokens(
    chance: list[float], seed: int
) -> None:
    server = Drafting(chance, len(chance), seed)
    for _ in range(5):
        server.answer(200)
    counted = server.counters
    told = {"completion_tokens": server.tokens, "requests": server.requests}
    twice = DraftCounters(
        steps=2 * counted.steps,
        drafted=2 * counted.drafted,
        accepted=2 * counted.accepted,
        accepted_per_position=tuple(2 * each for each in counted.accepted_per_position),
    )
    over = acceptance.identity(twice, **told)
    assert over == pytest.approx(1.0, abs=0.1)
    half = DraftCounters(steps=counted.steps // 2, drafted=counted.drafted // 2, accepted=0)
    under = acceptance.identity(half, **told, every_step_drafts=True)
    assert under is not None
    assert under < 0
    # Where steps without a draft are not counted, too few cannot be told from them.
    assert acceptance.identity(half, **told) is None
    assert acceptance.from_timings(*server.reported, twice) == pytest.approx(0.5)


def test_where_nothing_was_drafted_there_is_nothing_to_contradict() -> None:
    nothing = DraftCounters(steps=0, drafted=0, accepted=0)
    assert acceptance.identity(nothing, completion_tokens=500, requests=5) is None
    assert acceptance.mean_length(nothing) is None
    assert acceptance.speed_identity(nothing, decode_tok_s=50, gap_s=0.02) is None
    assert acceptance.worth_verifying(nothing, draft_cost=0.1) is None
    assert acceptance.from_timings(0, 0, nothing) is None


def test_a_dead_draft_has_a_mean_length_of_one_and_is_best_left_out() -> None:
    dead = DraftCounters(steps=100, drafted=300, accepted=0, accepted_per_position=(0, 0, 0))
    assert acceptance.mean_length(dead) == 1
    assert acceptance.profile(dead) == (1, 1, 1, 1)
    assert acceptance.worth_verifying(dead, draft_cost=0.0) == 0


def test_the_best_length_weighs_what_a_token_yields_against_what_it_costs() -> None:
    """A per-position profile as a model with one head for the next tokens has it."""
    counted = DraftCounters(
        steps=1000, drafted=4000, accepted=2310, accepted_per_position=(850, 650, 480, 330)
    )
    assert acceptance.profile(counted) == pytest.approx((1, 1.85, 2.5, 2.98, 3.31))
    assert acceptance.worth_verifying(counted, draft_cost=0.0) == 4
    assert acceptance.worth_verifying(counted, draft_cost=0.2) == 3
    assert acceptance.worth_verifying(counted, draft_cost=0.9) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (DraftCounters(steps=-1, drafted=0, accepted=0), "backwards"),
        (DraftCounters(steps=2, drafted=2, accepted=3), "3 tokens were accepted of 2"),
        (
            DraftCounters(steps=2, drafted=4, accepted=2, accepted_per_position=(3, -1)),
            "position's counter went backwards",
        ),
        (
            DraftCounters(steps=2, drafted=4, accepted=3, accepted_per_position=(1, 2)),
            "more often than one before",
        ),
        (
            DraftCounters(steps=2, drafted=4, accepted=3, accepted_per_position=(2, 0)),
            "add up to 2 accepted tokens, and 3",
        ),
    ],
)
def test_counters_that_cannot_be_are_named(wrong: DraftCounters, words: str) -> None:
    assert words in str(acceptance.consistent(wrong))


@given(st.floats(1, 6), st.floats(0.001, 1))
def test_a_speed_between_a_token_and_a_step_for_each_piece_is_explained(
    held: float, gap_s: float
) -> None:
    counted = DraftCounters(steps=100, drafted=500, accepted=300)  # four tokens a step
    found = acceptance.speed_identity(counted, decode_tok_s=held / gap_s, gap_s=gap_s)
    if held > 4 * 1.1001:
        assert found == pytest.approx(held / 4 - 1, rel=1e-6)
    elif held < 4 * 1.0999:
        assert found is None
    strict = acceptance.speed_identity(
        counted, decode_tok_s=held / gap_s, gap_s=gap_s, piece_is_step=True
    )
    if held < 4 * 0.8999:
        assert strict == pytest.approx(held / 4 - 1, rel=1e-6)


def test_a_negative_draft_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        acceptance.tokens_per_step(DraftCounters(steps=1, drafted=1, accepted=0), -1)
