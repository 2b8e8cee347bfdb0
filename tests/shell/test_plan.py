"""What `plan` tells before anything is booted: memory by axis, time, and a picture of what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.examples import measured_attempt, oom_attempt

from sweeper.cli import OK, WRONG_INPUT, main
from sweeper.conf import Loaded, load
from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.places import conf_dirs
from sweeper.plan import make_plan, plan_text, span_text
from sweeper.plan_picture import picture_words, region_of, write_plan_png

MIB = 2**20
CARD = "hardware.device_memory=1GiB"
# Where no model of the search is asked, a plan costs little.
FEW = ("sampler.name=random", "plan.points=4")


@pytest.fixture(autouse=True)
def _an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWEEPER_CONF", raising=False)
    monkeypatch.chdir(tmp_path)


def loaded(*overrides: str) -> Loaded:
    return load(["study=fake_demo", *FEW, *overrides], conf_dirs())


def point(**changes: Any) -> Pairs:
    return Pairs(context=4096, kv_type="f16", n_max=0, batch=512, flash_attn="on").with_(**changes)


def booted() -> list[Attempt]:
    """Return three boots of the demonstration: two that were measured, one that was too large."""
    first, second = (measured_attempt(n, study="fake_demo") for n in (1, 2))
    return [
        replace(first, point=point()),
        replace(second, point=point(context=8192, kv_type="q8_0")),
        replace(oom_attempt(3, study="fake_demo"), point=point(context=32768)),
    ]


def test_each_value_of_each_axis_has_its_price_in_memory() -> None:
    by_axis = make_plan(loaded(), [])["memory_by_axis"]
    assert by_axis["at"]["context"] == 4096
    context = {each["value"]: each for each in by_axis["axes"]["context"]}
    assert context[2048]["adds_bytes"] == 0
    # 64 KiB a token of an f16 cache.
    assert context[32768]["adds_bytes"] == (32768 - 2048) * 64 * 1024
    assert 0 < context[32768]["adds_spread_bytes"] < context[32768]["adds_bytes"]
    drafts = {each["value"]: each["adds_bytes"] for each in by_axis["axes"]["n_max"]}
    assert drafts == {0: 0, 2: 64 * MIB, 4: 64 * MIB, 8: 64 * MIB}
    assert {each["adds_bytes"] for each in by_axis["axes"]["flash_attn"]} == {0}
    text = plan_text(make_plan(loaded(), []))
    assert "n_max: 0, 2 +64 MiB" in text
    assert "flash_attn:" not in text, "an axis that moves no memory is not listed"


def test_time_before_the_first_boot_is_an_assumption_and_says_so() -> None:
    found = make_plan(loaded(), [])["duration"]
    assert (found["attempts"], found["boots_left"]) == (0, 16)
    assert found["low_s"] < found["seconds"] < found["high_s"]
    assert found["assumed"]["decode_tok_s"] == 40.0
    assert "assumed, nothing was booted yet" in plan_text(make_plan(loaded(), []))
    slower = make_plan(loaded("plan.assumed.boot_s=600"), [])["duration"]
    assert slower["seconds"] > 2 * found["seconds"]


def test_time_after_some_boots_is_that_of_the_study_itself() -> None:
    plan = make_plan(loaded(), booted())
    found = plan["duration"]
    assert (found["attempts"], found["boots_left"], found["assumed"]) == (3, 13, None)
    # Two took 95.5 s and one 12.5 s.
    assert 13 * 12.5 < found["seconds"] < 20 * 95.5
    assert "from the 3 attempts so far" in plan_text(plan)
    spent = make_plan(loaded("budget.boots=3", "confirm.rounds=0"), booted())["duration"]
    assert (spent["boots_left"], spent["seconds"]) == (0, 0)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (20_000, "5.6 h")]
)
def test_spans_of_time_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert span_text(seconds) == words


def test_what_boots_printed_corrects_the_estimates() -> None:
    before = make_plan(loaded(CARD), [])
    printed = [
        replace(each, engine=Pairs(name="fake", weights_bytes=500 * MIB)) for each in booted()
    ]
    after = make_plan(loaded(CARD), printed)
    assert "before any boot" in plan_text(before)
    assert "corrected by 3 boots" in plan_text(after)
    assert after["points_by_fit"]["likely"] < before["points_by_fit"]["likely"]


def test_the_first_boots_say_why_and_by_which_command() -> None:
    first = make_plan(loaded(), [])["first"]
    assert [each["point"]["context"] for each in first][:3] == [4096, 16384, 32768]
    assert all(each["command"] for each in first)
    assert "guess" in first[0]["why"]
    assert f"({first[0]['why']})" in plan_text(make_plan(loaded(), []))


# ---- The picture --------------------------------------------------------------------------------


def test_the_picture_has_context_against_the_axis_that_takes_most_memory() -> None:
    here = loaded(CARD)
    region = region_of(here, make_plan(here, booted()), booted())
    assert region.x == "context"
    assert region.y in ("batch", "kv_type")
    assert region.xs == (2048, 4096, 8192, 16384, 32768)
    assert sum(seen.points for seen in region.cells.values()) == 360
    assert sum(seen.ruled_out for seen in region.cells.values()) == 120
    small, large = (sum(region.cells[at].fits) for at in ((0, 0), (4, 0)))
    assert small > large
    marks = [what for _, what in region.marks]
    assert marks[:3] == ["measured", "measured", "memory"]
    assert marks[3:] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("space={context: [2048, 4096]}", "rules=[]", "enqueue=[]"),
        ("space={kv_type: {choices: [f16, q8_0], ordered: false}}", "rules=[]", "enqueue=[]"),
    ],
    ids=["no card stated", "one axis", "no context"],
)
def test_every_space_has_a_picture(overrides: tuple[str, ...], tmp_path: Path) -> None:
    if overrides:
        (tmp_path / "conf" / "study").mkdir(parents=True)
        space, *rest = overrides
        lines = [
            "# @package _global_", "defaults:", "  - override /engine: fake",
            "  - override /model: fake", '  - override /tracking: "off"', "name: mine",
        ]  # fmt: skip
        lines += [space.replace("=", ": ", 1), *(each.replace("=", ": ") for each in rest)]
        (tmp_path / "conf" / "study" / "mine.yaml").write_text("\n".join(lines))
        here = load(["study=mine", *FEW], conf_dirs())
    else:
        here = loaded()
    plan = make_plan(here, [])
    write_plan_png(
        region_of(here, plan, []), tmp_path / "plan.png", title="$a$", subtitle="with memory"
    )
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "+study=fake_demo", *FEW, "output=json"]
    assert main([*asked, "plan.png=auto"]) == OK
    plan = json.loads(capsys.readouterr().out)
    assert plan["png"] == str(tmp_path / "studies" / "fake_demo" / "plan.png")
    assert Path(plan["png"]).stat().st_size > 5000
    assert main(asked) == OK
    assert "png" not in json.loads(capsys.readouterr().out)
    (tmp_path / "file").touch()
    assert main([*asked, "plan.png=file/plan.png"]) == WRONG_INPUT
    assert "plan.png: " in capsys.readouterr().err


def test_a_wrong_assumption_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+study=fake_demo", "plan.assumed.decode_tok_s=0"]) == WRONG_INPUT
    assert "plan.assumed.decode_tok_s: must be more than 0" in capsys.readouterr().err


def test_nothing_is_said_of_what_fits_where_the_size_of_the_weights_is_unknown() -> None:
    named = loaded(CARD, "model=none")
    plan = make_plan(named, [])
    assert plan["weights_known"] is False
    assert plan["points_by_fit"] is None
    assert not any("fits" in each for each in plan["first"])
    text = plan_text(plan)
    assert "the size of unnamed is not known" in text
    assert "model.facts.weights_bytes" in text
    assert "fits with" not in text
    assert "weights not counted" in picture_words(region_of(named, plan, []))
    sized = loaded(CARD, "model=none", "+model.facts.weights_bytes=100000000")
    assert make_plan(sized, [])["weights_known"] is True
