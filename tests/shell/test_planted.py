"""Whole runs of the protocol on the fake engine: planted engines never win, the front is measured
again, and what dies in the proof of its context is asked how much it holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shell.conftest import SHORT, Sweeper, fake_job

from sweeper.core.known import known_from
from sweeper.core.outcome import Attempt, Infeasible, InfeasibleName, Measured, Unfit, name
from sweeper.core.pairs import Pairs
from sweeper.core.sample import Purpose
from sweeper.core.standing import Fall, fallen, front_among, unconfirmed
from sweeper.core.workload import Repeats, Workload
from sweeper.record.attempts import Attempts
from sweeper.server import Registry
from sweeper.trial import Job, attempt

PLANTED = (
    "garbage", "empty-answer", "token-salad", "late-garbage", "dead-draft", "silent-fallback",
    "truncated-context", "silent-truncation", "degraded-capacity", "degraded-throughput",
)  # fmt: skip

STUDY = """# @package _global_
defaults:
  - override /engine: fake
  - override /model: fake
  - override /workload: short
  - override /tracking: "off"
name: planted
engine:
  boot_timeout_s: 20
  params: {{context: 512, n_max: 4, ending_after: 6, boot_s: 0, time_scale: 100}}
space:
  ending: {{choices: [none, {planted}]}}
enqueue: [{{ending: none}}]
sampler: {{name: random}}
retries: 0
"""


def attempts_of(sweeper: Sweeper) -> list[Attempt]:
    return Attempts(sweeper.attempts).all()


@pytest.fixture
def tried(tmp_path: Path, mark: str) -> Any:
    counts = iter(range(1, 100))

    def make(job: Job, point: Pairs | None = None, **more: Any) -> Attempt:
        folder = tmp_path / str(next(counts))
        folder.mkdir()
        return attempt(
            job, point if point is not None else Pairs(context=512), number=1, trial=0,
            folder=folder, registry=Registry(folder / "started.json"),
            watch=lambda _progress: None, **more,
        )  # fmt: skip

    return make


def test_a_planted_engine_never_reaches_a_front(sweeper: Sweeper) -> None:
    study = sweeper.folder / "conf" / "study" / "planted.yaml"
    study.parent.mkdir(parents=True)
    study.write_text(STUDY.format(planted=", ".join(PLANTED)))
    sweeper.study = "planted"
    done = sweeper(f"budget.boots={len(PLANTED) + 1}", "workload.max_tokens=64", "confirm.rounds=1")
    assert done.returncode == 0, done.stderr
    ended = {str(each.point["ending"]): name(each.outcome) for each in attempts_of(sweeper)}
    assert set(ended) == {"none", *PLANTED}
    assert [ending for ending, named in ended.items() if named == "measured"] == ["none"]
    (row,) = json.loads((sweeper.studies / "planted" / "front.json").read_text())
    assert row["ending"] == "none"


def test_the_front_is_booted_afresh_and_the_confirmed_figure_is_reported(sweeper: Sweeper) -> None:
    done = sweeper("budget.boots=4", "confirm.rounds=1", "confirm.boots=6")
    assert done.returncode == 0, done.stderr
    attempts = attempts_of(sweeper)
    search = [each for each in attempts if each.confirms is None]
    again = [each for each in attempts if each.confirms is not None]
    assert len(search) == 4
    assert {each.point for each in again} >= {each.point for each in front_among(attempts)}
    assert unconfirmed(attempts) == ()
    assert all(each.confirms is not None for each in front_among(attempts))
    assert "to measure the front again" in done.stdout
    # A second run has nothing left to do, and confirms nothing twice.
    assert sweeper("budget.boots=4", "confirm.rounds=1").returncode == 0
    assert len(attempts_of(sweeper)) == len(attempts)


def test_wrong_answers_of_the_same_weights_do_not_win(tried: Any) -> None:
    sound = [
        replace(tried(fake_job(n_max=n), Pairs(context=512)), number=n + 1, point=Pairs(n_max=n))
        for n in (0, 1)
    ]
    known = known_from(sound, front_among(sound), weights=str(sound[0].model["sha256"]))
    assert known.reference is not None
    assert known.reference.trusted
    wrong = tried(fake_job(n_max=2, kv_type="q8_0", ending="wrong-answers"), known=known)
    assert isinstance(wrong.outcome, Unfit), wrong.outcome
    assert wrong.outcome.finding.facts["reference"] == 1
    # Come first, there is nobody to compare it with: it falls when the others agree.
    first = replace(tried(fake_job(n_max=2, kv_type="q8_0", ending="wrong-answers")), number=9)
    assert isinstance(first.outcome, Measured)
    first = replace(first, point=Pairs(n_max=2))
    assert 9 not in [each.number for each in front_among([first, *sound])]
    falls = [each.fall for each in fallen([first, *sound]) if each.attempt.number == 9]
    assert falls in ([], [Fall.UNSOUND])


# ---- The proof of context -----------------------------------------------------------------------


def test_an_engine_that_dies_in_the_proof_is_asked_on_fresh_boots_how_much_it_holds(
    tried: Any,
) -> None:
    job = replace(fake_job(ending="oom-runtime", runtime_oom_tokens=200), proof_boots=3)
    made = tried(job)
    assert isinstance(made.outcome, Infeasible)
    assert made.outcome.name is InfeasibleName.OOM_RUNTIME
    facts = made.outcome.finding.facts
    # 512 died, 256 died (248 of them prompt), 128 lived, 192 lived.
    assert (facts["largest_proven_tokens"], facts["dead_at_tokens"]) == (192, 256)
    none = tried(replace(job, proof_boots=0)).outcome.finding.facts
    assert "largest_proven_tokens" not in none
    assert none["dead_at_tokens"] == 512


def test_a_server_that_refuses_its_window_says_how_much_it_holds(tried: Any) -> None:
    made = tried(fake_job(ending="truncated-context"))
    assert name(made.outcome) == "http_400_context"
    held = made.outcome.finding.facts["largest_proven_tokens"]
    assert 256 - 512 / 64 <= held <= 256


def test_a_conversation_can_grow_to_the_window_turn_by_turn(tried: Any) -> None:
    made = tried(fake_job(workload=replace(SHORT, proof_turns=4)))
    turns = [each for each in made.samples if each.purpose is Purpose.PROOF and each.run]
    assert [each.run for each in turns] == [1, 2, 3, 4]
    assert [each.prompt_tokens for each in turns] == [126, 252, 378, 504]


# ---- Several loads on one boot ------------------------------------------------------------------

FEW = Repeats(warmup_min=1, warmup_max=1, least=2, most=2)


def test_one_boot_serves_several_workloads_each_with_its_own_figures(tried: Any) -> None:
    ladder = Workload(
        name="ladder", prompt_tokens=(16, 64, 4096), max_tokens=24, proof_answer_tokens=8,
        repeats=FEW, cached_runs=1,
    )  # fmt: skip
    crowd = Workload(
        name="crowd", prompt="Count the boats", streams=(1, 3), max_tokens=24,
        proof_answer_tokens=8, repeats=FEW,
    )  # fmt: skip
    made = tried(replace(fake_job(), also=(ladder, crowd)))
    assert isinstance(made.outcome, Measured)
    found = [(each.workload, each.prompt_length, each.streams) for each in made.outcome.figures]
    assert found == [
        ("short", None, 1), ("ladder", 16, 1), ("ladder", 64, 1), ("crowd", None, 1),
        ("crowd", None, 3),
    ]  # fmt: skip
    by_load = dict(zip(found, made.outcome.figures, strict=True))
    assert by_load["ladder", 64, 1].cached_ttft_s is not None
    assert by_load["crowd", None, 1].total_tok_s is None
    three = by_load["crowd", None, 3]
    assert three.total_tok_s is not None
    assert three.total_tok_s.median > three.decode_tok_s.median
    exact = [each for each in made.samples if each.prompt_length == 64 and each.workload]
    assert {each.prompt_tokens for each in exact if each.purpose is Purpose.MEASURE} == {64}
    assert made.outcome.decode_tok_s == made.outcome.figures[0].decode_tok_s


def test_what_cannot_reach_the_front_is_measured_no_further(tried: Any) -> None:
    long = replace(SHORT, repeats=Repeats(warmup_min=2, warmup_max=6, least=9, most=20))
    fast = tried(fake_job(decode_tok_s=500.0, workload=long), known=known_from([], (), weights=""))
    assert isinstance(fast.outcome, Measured)
    known = known_from([fast], front_among([fast]), weights=str(fast.model["sha256"]))
    slow = tried(
        replace(fake_job(decode_tok_s=20.0, workload=long), also=(replace(SHORT, name="more"),)),
        known=known,
    )
    assert isinstance(slow.outcome, Measured)
    assert [each.ended for each in slow.outcome.figures] == ["raced"]
    assert slow.outcome.decode_tok_s.n < 9


def test_a_workload_that_no_window_holds_is_said_and_not_measured(tried: Any) -> None:
    huge = Workload(
        name="huge", prompt_tokens=(4096,), max_tokens=8, proof_answer_tokens=8, repeats=FEW
    )
    made = tried(replace(fake_job(), also=(huge,)))
    assert isinstance(made.outcome, Measured)
    assert any("huge" in note for note in made.notes)
    alone = tried(fake_job(workload=huge))
    assert name(alone.outcome) == "degraded_capacity"
