"""A workload is data: which loads it means in which window, and what cannot be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.pairs import Pairs
from sweeper.core.workload import Load, Repeats, Workload

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None, max_examples=100)

TALK = Workload(name="talk", prompt="Tell", max_tokens=8, proof_answer_tokens=4)
LENGTHS = replace(TALK, prompt="", prompt_tokens=(64, 512))
lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=5, unique=True).map(tuple)


def lengths_of(workload: Workload, window: int) -> list[int | None]:
    return [each.prompt_tokens for each in workload.loads(window)]


def test_a_prompt_is_one_load_for_each_number_of_streams() -> None:
    assert list(TALK.loads(100)) == [Load()]
    assert [each.streams for each in replace(TALK, streams=(4, 1)).loads(100)] == [4, 1]


def test_every_length_is_asked_by_every_number_of_streams() -> None:
    loads = list(replace(LENGTHS, streams=(1, 2)).loads(4096))
    assert loads == [
        Load(prompt_tokens=64, streams=1), Load(prompt_tokens=64, streams=2),
        Load(prompt_tokens=512, streams=1), Load(prompt_tokens=512, streams=2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("window", "expected"),
    [(4096, [64, 512]), (514, [64, 512]), (513, [64]), (66, [64]), (65, []), (1, [])],
)
def test_what_does_not_fit_beside_an_answer_is_left_out(window: int, expected: list[int]) -> None:
    assert lengths_of(LENGTHS, window) == expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (100_008, [64, 512, 2048, 8192, 32768, 100_000]),
        # A step so close to the end would tell nothing new.
        (8208, [64, 512, 2048, 8200]),
        (520, [64, 512]),
        (519, [64, 511]),
        (60, [52]),
        (9, [1]),
        (8, []),
    ],
)
def test_a_ladder_goes_up_to_the_window(window: int, expected: list[int]) -> None:
    assert lengths_of(replace(LENGTHS, to_window=True), window) == expected


@QUICK
@given(lengths, st.booleans(), st.integers(2, 200), st.integers(1, 10**6))
def test_every_load_fits_its_window_with_its_answer_and_comes_once(
    prompts: tuple[int, ...], to_window: bool, answer: int, window: int
) -> None:
    workload = replace(LENGTHS, prompt_tokens=prompts, to_window=to_window, max_tokens=answer)
    loads = list(workload.loads(window))
    assert len(set(loads)) == len(loads)
    for load in loads:
        assert load.prompt_tokens is not None
        assert load.prompt_tokens >= 1
        assert load.prompt_tokens + workload.answer_tokens(load, window) <= window
        assert 2 <= workload.answer_tokens(load, window) <= answer
    if to_window and window > answer:
        assert max(each.prompt_tokens or 0 for each in loads) == window - answer


def test_an_answer_leaves_half_of_a_small_window_to_a_prompt_of_unknown_length() -> None:
    assert [TALK.answer_tokens(Load(), window) for window in (100, 16, 10, 2)] == [8, 8, 5, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": " \n"}, "^prompt: must be a text"),
        ({"prompt_tokens": (5,)}, "^prompt: and prompt_tokens are both given"),
        ({"to_window": True}, "^to_window: needs prompt_tokens"),
        ({"prompt": "", "prompt_tokens": (5,), "api": "chat"}, "^prompt_tokens: only a plain"),
        ({"prompt": "", "prompt_tokens": (5, 0)}, "^prompt_tokens: must be whole numbers above 0"),
        ({"api": "talk"}, "^api: must be completion or chat, got talk"),
        ({"chat_template": Pairs(enable_thinking=True)}, "^chat_template: only a chat"),
        ({"streams": ()}, "^streams: must name at least one"),
        ({"streams": (2, 2)}, "^streams: must be .* each different"),
        ({"max_tokens": 1}, "^max_tokens: must be at least 2, got 1"),
        ({"proof_answer_tokens": 0}, "^proof_answer_tokens: must"),
        ({"cached_runs": -1}, "^cached_runs: must"),
        ({"proof_turns": -1}, "^proof_turns: must"),
        ({"minutes": 0.0}, "^minutes: must be above 0"),
        ({"minutes": float("nan")}, "^minutes: must be above 0"),
        ({"temperature": float("inf")}, "^temperature: must"),
        ({"silence_timeout_s": 0.0}, "^silence_timeout_s: must be a number of seconds above 0"),
        ({"request": Pairs(temperature=1)}, "^request.temperature: belongs in workload.temp"),
        ({"request": Pairs(messages="x")}, "^request.messages: is made of workload.prompt"),
    ],
)
def test_what_cannot_be_measured_cannot_be_built(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TALK, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"least": 0}, "^repeats.least: must be at least 1, got 0"),
        ({"least": 30}, r"^repeats.most: must be at least repeats.least \(30\), got 20"),
        ({"warmup_min": 99}, r"^repeats.warmup_max: must be at least repeats.warmup_min \(99\)"),
        ({"warmup_tokens": 1}, "^repeats.warmup_tokens: must"),
        ({"interval": 0.0}, "^repeats.interval: must be a share"),
        ({"interval": float("nan")}, "^repeats.interval: must be a share"),
        ({"confidence": 0.5}, "^repeats.confidence: must be above 0.5"),
    ],
)
def test_repeats_that_cannot_be_made_cannot_be_built(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Repeats(**changes)


def test_any_change_of_a_workload_changes_its_digest() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"prompt": "Say"}, {"max_tokens": 9}, {"temperature": 0.5}, {"seed": None},
        {"request": Pairs(top_k=1)}, {"request": Pairs(top_k=True)}, {"streams": (2,)},
        {"repeats": Repeats(most=21)}, {"api": "chat"}, {"ignore_eos": False},
    )  # fmt: skip
    digests = {each.digest() for each in (TALK, *(replace(TALK, **each) for each in changes))}
    assert len(digests) == 1 + len(changes)
