"""Configurations that boot sometimes: booted again, off the front, said everywhere."""

from __future__ import annotations

import json
from typing import Any

from tests.shell.conftest import Sweeper

from sweeper.core.outcome import Attempt, Measured
from sweeper.record.attempts import Attempts

STUDY = """# @package _global_
defaults:
  - override /engine: fake
  - override /model: fake
  - override /workload: short
  - override /tracking: "off"
name: flaky
hardware: {{device_memory: {capacity}MiB}}
engine:
  params: {{
    weights_mib: 400, kv_kib_per_token: 64, compute_mib: 100, capacity_mib: {capacity},
    memory_spread_mib: {spread}, boots_file: "{folder}/boots", boot_s: 0, time_scale: 100,
  }}
space: {{context: [2048, 4096, 8192]}}
budget: {{boots: 3}}
confirm: {{boots: 6}}
"""
"""Three points: 400 MiB of weights, 100 of compute, and 128, 256 or 512 of cache."""


def attempts_of(sweeper: Sweeper) -> list[Attempt]:
    return Attempts(sweeper.attempts).all()


def varying(sweeper: Sweeper, *, spread: float, capacity: float) -> None:
    """Write the study for a card of this size whose memory varies in a way that repeats itself."""
    path = sweeper.folder / "conf/study/flaky.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(STUDY.format(capacity=capacity, spread=spread, folder=sweeper.folder))
    sweeper.study = "flaky"


def run(sweeper: Sweeper, *more: str) -> dict[str, Any]:
    done = sweeper("output=json", "confirm.rounds=1", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_point_that_boots_sometimes_is_no_winner_and_the_next_one_takes_its_place(
    sweeper: Sweeper,
) -> None:
    # The longest context needs 1012 MiB on average: as often too much as not.
    varying(sweeper, spread=12, capacity=1012)
    found = run(sweeper, "confirm.checks=6", "seed=3")
    everyone = attempts_of(sweeper)
    longest = [each for each in everyone if each.point["context"] == 8192]
    assert len(longest) >= 1
    assert not any(row["context"] == 8192 for row in found["front"])
    assert [row["context"] for row in found["front"]] == [4096]
    (winner,) = found["front"]
    assert winner["holds"] == "reliable"
    assert winner["boots_held"] == winner["boots"] >= 2
    assert 200 < winner["memory_left_mib"] < 320


def test_a_small_margin_is_tried_again_and_said_in_report_recipe_and_table(
    sweeper: Sweeper,
) -> None:
    # 8 MiB are left on average, where boots differ by 3.
    varying(sweeper, spread=3, capacity=1020)
    found = run(sweeper, "confirm.checks=3")
    brief = [each for each in attempts_of(sweeper) if each.brief]
    assert brief
    assert all(each.confirms is not None for each in brief)
    longest = [each for each in attempts_of(sweeper) if each.point["context"] == 8192]
    held = sum(isinstance(each.outcome, Measured) for each in longest)
    folder = sweeper.studies / sweeper.study
    report = (folder / "report.md").read_text()
    said = f"{held} of {len(longest)} boots"
    assert said in report
    if held == len(longest):
        recipes = "\n".join(path.read_text() for path in (folder / "recipes").glob("*.sh"))
        assert said in recipes
    table = sweeper("show").stdout
    assert "boots" in table
    assert any(row["boots"] > 2 for row in found["front"]) or found["fallen"]


def test_without_a_wish_a_lucky_edge_stays_on_the_front_and_is_said_to_be_one(
    sweeper: Sweeper,
) -> None:
    varying(sweeper, spread=0, capacity=1012)
    found = run(sweeper, "limits=[]")
    longest = next(row for row in found["front"] if row["context"] == 8192)
    assert longest["memory_left_mib"] == 0.0
    with_wish = sweeper("plan", "limits=[{of:speed}]")
    assert with_wish.returncode == 2
    assert "limits[0]: must be {of: memory_left" in with_wish.stderr


def test_the_same_boots_without_spread_end_equally(sweeper: Sweeper) -> None:
    varying(sweeper, spread=0, capacity=1100)
    found = run(sweeper)
    assert {row["holds"] for row in found["front"]} == {"reliable"}
    assert not [each for each in attempts_of(sweeper) if each.brief]
