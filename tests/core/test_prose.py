"""Prompts of any length: repeatable, varied, and without a beginning in common."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.prose import prose

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=25)

seeds = st.integers(-(2**63), 2**63)
lengths = st.integers(0, 30)


@QUICK
@given(seeds, lengths)
def test_the_same_seed_writes_the_same_text(seed: int, sentences: int) -> None:
    assert prose(seed, sentences) == prose(seed, sentences)


@QUICK
@given(seeds, lengths, lengths)
def test_a_longer_text_continues_the_shorter_one(seed: int, one: int, more: int) -> None:
    assert prose(seed, one + more).startswith(prose(seed, one))


@QUICK
@given(seeds, lengths)
def test_a_text_has_the_sentences_asked_for_after_its_opening(seed: int, sentences: int) -> None:
    assert prose(seed, sentences).count(".") == sentences + 1


def test_different_seeds_differ_from_the_second_word_on() -> None:
    openings = {" ".join(prose(seed, 1).split()[:2]) for seed in range(2000)}
    assert len(openings) > 1990


def test_a_text_is_plain_and_varied() -> None:
    text = prose(1, 400)
    assert text.isascii()
    assert "\n" not in text
    sentences = text.split(". ")
    assert len(set(sentences)) == len(sentences)
