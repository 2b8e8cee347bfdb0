"""Several prompts a workload: what differs between them is no doubt about a number."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.core.protocol import (
    Finished,
    MeasureStep,
    Noise,
    Repetition,
    within_prompts,
)
from sweeper.core.stats import Doubt
from sweeper.core.workload import Repeats, Workload

# No deadline: on a busy machine, time says nothing.
QUICK = settings(deadline=None)

THREE = Workload(name="three", prompts=("one", "two", "three"), max_tokens=8, proof_answer_tokens=4)
REPEATS = Repeats(least=6, most=24, warmup_min=0, warmup_max=0)
FACTORS = (1.0, 1.4, 0.99)


def speeds(count: int, *, drift: float = 0.0, seed: int = 1) -> list[float]:
    """Return speeds of three prompts that differ, with 0.5 % of noise and a drift over all."""
    noise = random.Random(seed)
    return [
        40 * FACTORS[i % 3] * noise.gauss(1, 0.005) * (1 + drift * i / count) for i in range(count)
    ]


def test_prompts_that_differ_raise_no_doubt_and_a_drift_within_them_does() -> None:
    by_prompt = Repetition(REPEATS, prompts=3)
    assert by_prompt.doubts([], speeds(18)) == ()
    assert Doubt.BIMODAL in Repetition(REPEATS).doubts([], speeds(18))  # taken for one prompt
    assert Doubt.DRIFTING in by_prompt.doubts([], speeds(18, drift=-0.2))


def test_decisions_fall_after_whole_rounds_of_the_prompts() -> None:
    slow = Repetition(REPEATS, noise=Noise(cv=0.005, dof=50), bar=100.0, prompts=3)
    few = speeds(3)
    assert slow.next([], few[:1]) == MeasureStep()
    assert slow.next([], few[:2]) == MeasureStep()
    assert slow.next([], few) is Finished.RACED
    tight = Repetition(replace(REPEATS, interval=0.9), prompts=3)
    assert tight.next([], speeds(7)) == MeasureStep()
    assert tight.next([], speeds(9)) is Finished.TIGHT


@QUICK
@given(st.lists(st.floats(1, 1000), min_size=1, max_size=30))
def test_of_one_prompt_speeds_stay_as_they_are(found: list[float]) -> None:
    assert within_prompts(found, [0] * len(found)) == found


@QUICK
@given(st.integers(6, 60), st.integers(0, 1000))
def test_within_prompts_keeps_the_noise_and_drops_the_difference(count: int, seed: int) -> None:
    found = within_prompts(speeds(count, seed=seed), [i % 3 for i in range(count)])
    assert max(found) / min(found) < 1.06  # the prompts are 40 % apart, their noise 0.5 %


def test_the_noise_within_prompts_is_estimated_without_bias() -> None:
    spreads = [
        statistics.variance(within_prompts(speeds(6, seed=seed), [0, 1, 2, 0, 1, 2]))
        for seed in range(400)
    ]
    assert statistics.fmean(spreads) ** 0.5 / 40 == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": "one"}, "both given"),
        ({"prompts": ("one", " ")}, "must be a text"),
        ({"prompts": ("one", "one")}, "twice"),
        ({"prompt_tokens": (8,)}, "both given"),
    ],
)
def test_prompts_that_cannot_be_asked_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(THREE, **changes)  # type: ignore[arg-type]


def test_a_workload_of_one_prompt_keeps_the_digest_it_had() -> None:
    one = replace(THREE, prompts=(), prompt="one")
    assert "prompts" not in one.described()
    assert one.texts == ("one",)
    assert THREE.digest() != replace(THREE, prompts=("one", "two", "four")).digest()
