"""Configurations that boot sometimes: booted again, off the front, said everywhere."""

from __future__ import annotations

import json
from typing import Any

from tests.shell.conftest import Sweeper

from sweeper.core.outcome import Attempt, name
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
    seed: {seed},
  }}
space: {{context: [{contexts}]}}
enqueue: [{{context: 8192}}]
budget: {{boots: {boots}}}
"""
"""400 MiB of weights, 100 of compute, and 256 or 512 of cache; the longest is booted first."""


def attempts_of(sweeper: Sweeper) -> list[Attempt]:
    return Attempts(sweeper.attempts).all()


def varying(
    sweeper: Sweeper, *, spread: float, capacity: float, seed: int = 0, contexts: str = "8192"
) -> None:
    """Write the study for a card of this size whose memory varies in a way that repeats itself."""
    path = sweeper.folder / "conf/study/flaky.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        STUDY.format(
            capacity=capacity,
            spread=spread,
            folder=sweeper.folder,
            seed=seed,
            contexts=contexts,
            boots=len(contexts.split(",")),
        )
    )
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
    # The longer context needs 1012 MiB on average: all there is. With this seed its first boot
    # needs 12 MiB less, and each that follows some more.
    varying(sweeper, spread=12, capacity=1012, seed=216, contexts="4096, 8192")
    found = run(sweeper)
    (winner,) = found["front"]
    assert (winner["context"], winner["holds"]) == (4096, "reliable")
    assert winner["boots_held"] == winner["boots"] == 2
    (fell,) = found["fallen"]
    assert fell["why"] == "flaky"
    assert fell["words"] == "it worked in 1 of 2 boots, and ended as oom_compute in the other"
    longest = [each for each in attempts_of(sweeper) if each.point["context"] == 8192]
    assert [name(each.outcome) for each in longest] == ["measured", "oom_compute"]


def test_a_small_margin_is_tried_again_and_said_in_report_recipe_and_table(
    sweeper: Sweeper,
) -> None:
    # Of 1017 MiB 5 are left on average, where boots differ by 3: with this seed none fails.
    varying(sweeper, spread=3, capacity=1017, seed=1)
    found = run(sweeper, "confirm.checks=3")
    attempts = attempts_of(sweeper)
    assert [(each.confirms, each.brief) for each in attempts[:3]] == [
        (None, False), (1, False), (2, True),
    ]  # fmt: skip
    folder = sweeper.studies / sweeper.study
    said = f"{len(attempts)} of {len(attempts)} boots"
    recipes = "\n".join(path.read_text() for path in (folder / "recipes").glob("*.sh"))
    behind = ", ".join(str(each.number) for each in attempts)
    assert f"{said}, the next one works with" in recipes
    assert f"(attempts {behind})" in recipes
    assert "lower context first" in recipes
    assert said in (folder / "report.md").read_text()
    (row,) = found["front"]
    assert (row["boots"], row["holds"]) == (len(attempts), "unsure")
    assert f"{len(attempts)}/{len(attempts)} unsure" in sweeper("show").stdout
    assert (
        "attempt 2 may not boot every time" in sweeper("limits=[{of:memory_left,ge:auto}]").stdout
    )
    exported = sweeper("export", "format=systemd")
    assert f"{said}, the next one works with" in exported.stderr
    unit = next((folder / "recipes").glob("*.service")).read_text()
    assert "StartLimitBurst=3" in unit
    assert "Few restarts, on purpose" in unit


def test_without_a_wish_a_lucky_edge_stays_on_the_front_and_is_said_to_be_one(
    sweeper: Sweeper,
) -> None:
    varying(sweeper, spread=0, capacity=1012)
    found = run(sweeper, "limits=[]")
    (row,) = found["front"]
    assert (row["memory_left_mib"], row["holds"]) == (0.0, "reliable")
    assert "a winner may boot by luck" in sweeper("plan", "limits=[]").stdout
    with_wish = sweeper("plan", "limits=[{of:speed}]")
    assert with_wish.returncode == 2
    assert "limits[0]: must be {of: memory_left" in with_wish.stderr


def test_the_same_boots_without_spread_end_equally(sweeper: Sweeper) -> None:
    varying(sweeper, spread=0, capacity=1100)
    found = run(sweeper)
    assert {row["holds"] for row in found["front"]} == {"reliable"}
    assert not [each for each in attempts_of(sweeper) if each.brief]
