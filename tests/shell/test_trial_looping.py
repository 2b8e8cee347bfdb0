"""Attempts whose answers go round in circles: doubted, or unfit where the setting is the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.shell.conftest import MARK, SHORT, fake_job

from sweeper.core.known import Known, known_from
from sweeper.core.objectives import counted_tok_s, values_of
from sweeper.core.outcome import Attempt, Measured, Unfit, UnfitName
from sweeper.core.pairs import Pairs
from sweeper.core.sample import Purpose
from sweeper.core.space import Axis
from sweeper.core.standing import front_among
from sweeper.core.stats import Doubt
from sweeper.core.workload import Repeats, Workload
from sweeper.server import Registry
from sweeper.trial import attempt

Boot = Callable[..., Attempt]

TEXTS = replace(
    SHORT, prompt="", prompts=("Once upon a time", "In the beginning", "def main():"),
    max_tokens=96, repeats=Repeats(warmup_min=1, warmup_max=1, least=6, most=6, interval=None),
)  # fmt: skip
AXES = (
    Axis(name="n_max", values=(0, 8), ordered=True, sets=("n_max",)),
    Axis(name="ending", values=("none", "looping"), ordered=False, sets=("ending",)),
)


@pytest.fixture
def boot(tmp_path: Path, registry: Registry, mark: str) -> Boot:
    def booted(
        number: int, *, n_max: int = 0, ending: str = "none", known: Known | None = None,
        workload: Workload = TEXTS,
    ) -> Attempt:  # fmt: skip
        job = fake_job(axes=AXES, workload=workload, env=Pairs({MARK: mark}), context=1024)
        folder = tmp_path / str(number)
        folder.mkdir()
        return attempt(
            job, Pairs(n_max=n_max, ending=ending), number=number, trial=number, folder=folder,
            registry=registry, watch=lambda _: None, known=known,
        )  # fmt: skip

    return booted


def _known(*attempts: Attempt) -> Known:
    return known_from(
        attempts, None, weights=str(attempts[0].model["sha256"]), reference=attempts[0].point
    )


def test_each_prompt_is_asked_in_turn_with_the_same_seed_however_long_the_warm_up(
    boot: Boot,
) -> None:
    longer = replace(TEXTS, repeats=replace(TEXTS.repeats, warmup_min=0, warmup_max=1))
    asked = []
    for number, workload in enumerate((TEXTS, longer), start=1):
        made = boot(number, workload=workload)
        measured = [each for each in made.samples if each.purpose is Purpose.MEASURE]
        assert [each.prompt for each in measured] == [0, 1, 2, 0, 1, 2]
        assert {each.prompt for each in made.samples if each.purpose is Purpose.WARMUP} <= {0}
        asked.append([(each.seed, each.asked_tokens) for each in measured])
    assert asked[0] == asked[1]


def test_a_sound_answer_raises_no_such_doubt(boot: Boot) -> None:
    made = boot(1, n_max=8)
    assert isinstance(made.outcome, Measured)
    assert Doubt.LOOPING not in made.outcome.decode_tok_s.doubts
    assert (made.outcome.figures[0].answers, made.outcome.figures[0].looping) == (6, 0)


def test_what_loops_beside_a_reference_that_loops_too_is_doubted_and_wins_by_no_draft(
    boot: Boot,
) -> None:
    plain = boot(1, ending="looping")
    drafting = boot(2, n_max=8, ending="looping", known=_known(plain))
    assert isinstance(plain.outcome, Measured)
    assert isinstance(drafting.outcome, Measured)
    for each in (plain.outcome, drafting.outcome):
        assert Doubt.LOOPING in each.decode_tok_s.doubts
        assert each.figures[0].looping == 6
    assert any("represent nothing" in note for note in drafting.notes)
    assert counted_tok_s(plain.outcome) == plain.outcome.decode_tok_s.median
    # All eight drafts of a step are accepted, which yields nine tokens of it.
    assert drafting.outcome.drafts is not None
    assert drafting.outcome.drafts.acceptance == 1.0
    gain = drafting.outcome.decode_tok_s.median / counted_tok_s(drafting.outcome)
    assert gain == pytest.approx(9, rel=0.1)
    assert values_of(drafting.outcome, ("speed",)) == (counted_tok_s(drafting.outcome),)
    # A step of drafts takes longer than a plain one, so that is slower than without any.
    assert [each.number for each in front_among([plain, drafting])] == [1]


def test_what_loops_where_the_reference_does_not_is_unfit(boot: Boot) -> None:
    reference = boot(1)
    made = boot(2, n_max=8, ending="looping", known=_known(reference))
    assert isinstance(made.outcome, Unfit)
    assert made.outcome.name is UnfitName.GARBAGE_OUTPUT
    assert "attempt 1" in made.outcome.finding.explanation
    assert dict(made.outcome.finding.facts) == {"looping_answers": 6, "answers": 6}


def test_a_reference_of_another_workload_says_nothing_of_the_cause(boot: Boot) -> None:
    reference = boot(1, workload=replace(TEXTS, name="other"))
    made = boot(2, n_max=8, ending="looping", known=_known(reference))
    assert isinstance(made.outcome, Measured)
    assert Doubt.LOOPING in made.outcome.decode_tok_s.doubts
