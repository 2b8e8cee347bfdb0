"""Recipes that are booted and measured again: what holds, what does not, what cannot be told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import broken_attempt, measured_attempt, oom_attempt
from tests.shell.conftest import Sweeper

from sweeper.core.outcome import Measured
from sweeper.core.stats import Doubt
from sweeper.recipe import Recipe, read_recipe, write_recipes
from sweeper.record.attempts import Attempts
from sweeper.verify import Verdict, VerifyError, judged, verify


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    (path,) = write_recipes(
        [measured_attempt(1, **changes)], form="shell", folder=folder, study_folder=folder
    )
    return read_recipe(path)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe_of(tmp_path_factory.mktemp("recipe"))


def again(speed: float, *, context: int = 32768, doubts: tuple[Doubt, ...] = ()) -> Measured:
    outcome = measured_attempt(2, decode_tok_s=speed, context=context).outcome
    assert isinstance(outcome, Measured)
    return replace(outcome, decode_tok_s=replace(outcome.decode_tok_s, doubts=doubts))


def test_the_same_figure_again_passes(recipe: Recipe) -> None:
    found = judged(recipe, again(40.0))
    assert found.verdict is Verdict.PASS
    assert found.verdict.exit_code == 0
    assert found.as_json()["measured"]["decode_tok_s"][1] == 40.0
    assert any(line.startswith("PASS") for line in found.lines)


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (again(30.0), Verdict.FAIL),
        (again(30.0, doubts=(Doubt.CONTENDED,)), Verdict.INCONCLUSIVE),
        (again(55.0), Verdict.INCONCLUSIVE),
        (again(40.0, context=16384), Verdict.FAIL),
        (oom_attempt().outcome, Verdict.FAIL),
        (broken_attempt().outcome, Verdict.INCONCLUSIVE),
    ],
)
def test_each_other_outcome_has_its_verdict_and_a_reason(
    recipe: Recipe, outcome: Any, verdict: Verdict
) -> None:
    found = judged(recipe, outcome)
    assert found.verdict is verdict
    assert found.reasons
    assert found.reasons[0]
    json.dumps(found.as_json())


def test_on_another_machine_slower_is_no_failure(recipe: Recipe) -> None:
    found = judged(recipe, again(30.0), conditions=("measured elsewhere: GPU",))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "measured elsewhere: GPU" in found.reasons


@given(speed=st.floats(1, 1000))
def test_a_verdict_follows_from_the_two_intervals(recipe: Recipe, speed: float) -> None:
    old, new = recipe.decode_tok_s, again(speed).decode_tok_s
    verdict = judged(recipe, again(speed)).verdict
    apart = new.high < old.low or new.low > old.high
    if verdict is Verdict.FAIL:
        assert new.high < old.low
        assert new.median < old.median * 0.95
    if verdict is Verdict.PASS:
        assert not apart or abs(new.median / old.median - 1) <= 0.05
    if not apart:
        assert verdict is Verdict.PASS


def test_a_recipe_of_a_finished_study_is_measured_again(finished: Sweeper) -> None:
    (path, *_) = sorted((finished.studies / "fake_demo" / "recipes").glob("*.sh"))
    found = verify(path, watch=lambda _progress: None, boot_timeout_s=30.0)
    assert isinstance(found.outcome, Measured), found
    assert found.outcome.context.window_tokens == found.recipe.window_tokens
    # Loaded machines differ by more than the tolerance: what it may not say is that it broke.
    assert found.reasons


def test_a_tampered_recipe_fails_without_a_boot(finished: Sweeper, tmp_path: Path) -> None:
    (path, *_) = sorted((finished.studies / "fake_demo" / "recipes").glob("*.sh"))
    text = path.read_text()
    context = next(line for line in text.splitlines() if line.strip().startswith("--context "))
    tampered = path.with_name("tampered.sh")
    tampered.write_text(text.replace(context, "  --context 64 \\"))
    try:
        found = verify(tampered, watch=lambda _progress: pytest.fail("it was booted"))
    finally:
        tampered.unlink()
    assert found.verdict is Verdict.FAIL
    assert any("64" in reason for reason in found.reasons)
    assert found.outcome is None


def test_a_recipe_away_from_its_study_says_what_it_needs(finished: Sweeper, tmp_path: Path) -> None:
    (path, *_) = sorted((finished.studies / "fake_demo" / "recipes").glob("*.sh"))
    study = tmp_path / "moved"
    shutil.copytree(finished.studies / "fake_demo", study)
    (study / "study.json").rename(study / "gone.json")
    lonely = study / "recipes" / path.name
    text = lonely.read_text().replace(str(finished.studies / "fake_demo"), str(study))
    lonely.write_text(text)
    with pytest.raises(VerifyError, match="needed to measure by the same protocol"):
        verify(lonely, watch=lambda _progress: None)


def test_what_is_no_recipe_is_refused(tmp_path: Path) -> None:
    stranger = tmp_path / "start.sh"
    stranger.write_text("#!/bin/sh\nexec llama-server\n")
    with pytest.raises(VerifyError, match=r"start\.sh"):
        verify(stranger, watch=lambda _progress: None)


def test_the_verb_says_it_with_its_exit_code(finished: Sweeper) -> None:
    (path, *_) = sorted((finished.studies / "fake_demo" / "recipes").glob("*.sh"))
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "sweeper", "verify", str(path), "output=json"],
        capture_output=True, text=True, timeout=100, env=finished.environment(),
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert done.returncode == Verdict(said["verdict"]).exit_code
    wrong = subprocess.run(
        [sys.executable, "-m", "sweeper", "verify"],
        capture_output=True, text=True, timeout=100, env=finished.environment(),
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "verify takes one recipe" in wrong.stderr


@pytest.mark.parametrize("form", ["all", "page", "systemd"])
def test_recipes_are_exported_in_every_form_that_they_can_have(
    finished: Sweeper, form: str
) -> None:
    done = finished("export", f"format={form}", "pick=fastest", "output=json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert all(Path(each).exists() for each in said["recipes"])
    if form == "all":
        assert "llama-preset" in said["refused"]
        assert len(said["recipes"]) + len(said["refused"]) == 10


def test_two_endings_for_lack_of_memory_of_several_boots_are_a_failure(recipe: Recipe) -> None:
    out, works = oom_attempt().outcome, again(40.0)
    found = judged(recipe, out, works, out, works, works)
    assert (found.verdict, found.held, found.boots) == (Verdict.FAIL, 3, 5)
    assert found.reasons[0].startswith("it worked in 3 of 5 boots; oom_kv_cache")
    assert found.as_json()["boots_held"] == 3


def test_one_ending_for_lack_of_memory_of_five_boots_decides_nothing(recipe: Recipe) -> None:
    out, works = oom_attempt().outcome, again(40.0)
    found = judged(recipe, out, works, works, works, works)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "4 of 5 boots" in found.reasons[0]


def test_a_recipe_that_runs_out_of_memory_is_booted_again_before_it_fails(
    finished: Sweeper, tmp_path: Path
) -> None:
    """The same recipe on a card that was made to vary: every second boot or so fails."""
    (path, *_) = sorted((finished.studies / "fake_demo" / "recipes").glob("*.sh"))
    recipe = read_recipe(path)
    assert recipe.command is not None
    front = json.loads((finished.studies / "fake_demo" / "front.json").read_text())
    row = next(row for row in front if row["attempt"] == recipe.attempt)
    needs = 1024 - row["memory_left_mib"]
    argv = list(recipe.measured.argv)
    changed = {"--capacity-mib": f"{needs:.3f}", "--memory-spread-mib": "8.0",
               "--boots-file": str(tmp_path / "boots")}  # fmt: skip
    for flag, value in changed.items():
        argv[argv.index(flag) + 1] = value
    everyone = Attempts(finished.attempts).all()
    attempt = replace(next(a for a in everyone if a.number == recipe.attempt), argv=tuple(argv))
    study = tmp_path / "study"
    study.mkdir()
    shutil.copy(finished.studies / "fake_demo" / "study.json", study / "study.json")
    (varying,) = write_recipes([attempt], form="shell", folder=tmp_path, study_folder=study)
    found = verify(varying, watch=lambda _progress: None, boot_timeout_s=30.0)
    boots = len((tmp_path / "boots").read_text().splitlines())
    assert (found.boots, boots) == (5, 5)
    assert found.held is not None
    assert found.held < 5
    assert f"{found.held} of 5 boots" in found.reasons[0]
