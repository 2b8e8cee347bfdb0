"""Answers that represent nothing: loops, copies of the prompt, foreign templates, ends at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.looping import (
    LEAST_CHARACTERS,
    Answer,
    Looks,
    ends_at_once,
    foreign,
    looks,
    nothing,
    repeats,
    repetition,
)

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None)

PROSE = (
    "The ferry to the island leaves at seven, and in October it is still dark then. Agnes had "
    "packed the seed catalogues, two jars of honey and the letter from the council, which she had "
    "not yet opened. The man who sold the tickets knew her by now. He asked whether the bridge "
    "would ever be built, and she said that they had been building it since she was a girl."
)
CODE = """
def shares(counters):
    if counters.steps <= 0:
        return ()
    return tuple(count / counters.steps for count in counters.accepted_per_position)


def mean_length(counters):
    return 1 + counters.accepted / counters.steps if counters.steps > 0 else None


def profile(counters):
    found = [1.0]
    for share in shares(counters):
        found.append(found[-1] + share)
    return tuple(found) if counters.steps > 0 else ()
"""
RECORDS = "[\n" + ",\n".join(
    f'  {{"id": {number}, "name": "{name}", '
    f'"street": "{street} {number * 7 % 83}", "paid": {paid}}}'
    for number, (name, street, paid) in enumerate(
        [
            ("Ines Weber", "Mill Lane", "true"), ("Tom Okafor", "Harbour Road", "false"),
            ("Lea Brandt", "Station Road", "true"), ("Juan Perez", "Church Street", "true"),
            ("Mia Novak", "Long Row", "false"), ("Ola Lund", "Park Street", "true"),
            ("Ada Rossi", "Hill View", "false"), ("Ben Katz", "Old Quay", "true"),
        ],
        start=311,
    )
) + "\n]"  # fmt: skip

words = st.text(alphabet="abcdefghijklmnopqrstuvwxyz", min_size=2, max_size=9)
units = st.lists(words, min_size=2, max_size=20).map(lambda found: " ".join(found) + ". ")


@pytest.mark.parametrize("text", [PROSE, CODE, RECORDS], ids=["prose", "code", "records"])
def test_text_that_says_something_new_is_no_loop(text: str) -> None:
    assert nothing(Answer(text=text, tokens=len(text) // 4, asked=len(text) // 4)) is None


@QUICK
@given(units, st.integers(0, 80))
def test_a_unit_for_ever_is_a_loop_whatever_stands_before_it(unit: str, before: int) -> None:
    text = PROSE[:before] + unit * (6 + 500 // len(unit))
    assert repeats(text) is not None


@QUICK
@given(units, st.integers(1, 4000))
def test_a_loop_that_counts_is_a_loop(unit: str, first: int) -> None:
    rounds = range(first, first + 6 + 600 // len(unit))
    assert repeats("".join(f"{number}. {unit}\n" for number in rounds)) is not None


@QUICK
@given(st.integers(0, 2**32))
def test_random_words_are_no_loop(seed: int) -> None:
    vocabulary = PROSE.split() + CODE.split()
    text = " ".join(random.Random(seed).choices(vocabulary, k=300))
    assert repeats(text) is None


def test_the_prompt_said_again_is_no_answer() -> None:
    said = repeats(PROSE, prompt=PROSE)
    assert said is not None
    assert "copied from the prompt" in said


def test_code_of_the_prompt_said_again_is_no_answer_whatever_numbers_it_has() -> None:
    asked = "Rewrite this function.\n\ndef middle(a, x, lo=0, hi=None):\n    if lo < 0:\n"
    asked += "        raise ValueError(x)\n    while lo < hi:\n        mid = (lo + hi) // 2\n"
    asked += "        lo = mid + 1 if a[mid] < x else mid - 1\n    return lo\n"
    assert repetition(asked[asked.index("def") :], asked).copied > 0.99


def test_a_few_words_of_the_prompt_are_an_answer() -> None:
    assert repeats(CODE, prompt=f"Explain this function:\n{CODE[:120]}") is None


def test_of_a_text_of_a_few_words_nothing_is_said() -> None:
    assert repeats(("ha " * LEAST_CHARACTERS)[: LEAST_CHARACTERS - 2]) is None


@QUICK
@given(st.text(max_size=400), st.text(max_size=200))
def test_shares_are_shares_for_any_text(text: str, prompt: str) -> None:
    found = repetition(text, prompt)
    assert 0 <= found.round <= 1
    assert 0 <= found.copied <= 1


@QUICK
@given(units)
def test_more_rounds_are_never_less_of_a_circle(unit: str) -> None:
    few, many = (repetition(PROSE + unit * count).round for count in (8, 16))
    assert many >= few


def test_tokens_of_a_template_as_text_are_named() -> None:
    said = foreign("yes<|im_end|>\n<|im_start|>user\nand now?<|im_end|>")
    assert said is not None
    assert "<|im_end|>" in said


def test_a_text_about_templates_is_none_of_them() -> None:
    assert foreign("A turn ends with <|im_end|> in ChatML.") is None
    assert foreign("<|im_end|> and <|im_end|>", prompt="What is <|im_end|>?") is None


@pytest.mark.parametrize(
    ("text", "tokens", "asked", "ends"),
    [
        ("Yes.", 3, 96, True),
        ("Yes.", 96, 96, True),  # an end of text that was ignored has no text
        (PROSE, 96, 96, False),
        ("Yes.", 3, 8, False),  # no more was asked for
        ("", 0, 96, True),
    ],
)
def test_an_answer_that_ends_before_it_began(
    text: str, tokens: int, asked: int, ends: bool
) -> None:
    assert (ends_at_once(Answer(text=text, tokens=tokens, asked=asked)) is not None) is ends


def test_a_load_is_doubtful_from_a_fifth_of_its_answers_on() -> None:
    sound, loop = Answer(text=PROSE), Answer(text="and so on " * 40)
    assert not looks([sound] * 6).doubtful
    assert not looks([sound] * 5 + [loop]).doubtful
    found = looks([sound] * 4 + [loop] * 2)
    assert found.doubtful
    assert (found.count, found.of) == (2, 6)
    assert "circle" in found.why
    assert looks([loop]).doubtful


def test_a_setting_is_the_cause_only_where_chance_is_not() -> None:
    clean, all_loop = Looks(count=0, of=6), Looks(count=6, of=6)
    assert all_loop.caused(clean)
    assert Looks(count=5, of=6).caused(clean)
    assert not Looks(count=3, of=6).caused(clean)  # one in eleven by chance
    assert not Looks(count=1, of=1).caused(clean)
    assert not all_loop.caused(Looks(count=3, of=6))  # the reference loops as well
    assert not all_loop.caused(Looks(count=0, of=0))
