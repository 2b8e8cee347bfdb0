"""A model that is only described: planned like any other, and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeper.conf import Loaded, load
from sweeper.core.architecture import FACTS
from sweeper.core.memory import excess
from sweeper.engines import estimated
from sweeper.models import described_models
from sweeper.orchestrate import StudyError, prepare
from sweeper.places import conf_dirs
from sweeper.plan import make_plan, plan_text

MODEL = """\
defaults: [none, _self_]
name: nano
facts: {layers: 52, kv_layers: 6, kv_heads: 2, key_length: 128, value_length: 128,
        state_layers: 23, state_values: 524288, conv_width: 6144, conv_taps: 3, state_bits: 32,
        weights_bytes: 19000000000, draft_layers: 0}
"""
STUDY = """\
# @package _global_
defaults: [{override /engine: llamacpp}, {override /model: nano}]
name: described
space: {context: [4096, 262144]}
engine: {python: /bin/sh, params: {flash_attn: "on"}}
hardware: {memory_limit: 20GiB}
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    for name, text in (("model/nano", MODEL), ("study/described", STUDY)):
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SWEEPER_CONF", raising=False)
    return load(["study=described"], conf_dirs())


def test_a_plan_needs_no_weights_and_says_so(loaded: Loaded) -> None:
    plan = make_plan(loaded, [])
    assert "names no file" in plan["problems"][0]
    assert "(planned from model.facts)" in plan_text(plan)
    parts = {each["point"]["context"]: each["memory_parts_bytes"] for each in plan["first"]}
    assert parts[262_144]["weights"] == 19_000_000_000
    states = 23 * (524_288 + 3 * 6144) * 4
    assert parts[262_144]["kv_cache"] == 262_144 * 6 * 2 * 2 * 128 * 2 + states


def test_a_run_needs_them_and_says_what_to_do(loaded: Loaded) -> None:
    with pytest.raises(StudyError, match=r"model nano is described .*set model\.path="):
        prepare(loaded)


def test_a_point_of_it_has_an_estimate(loaded: Loaded) -> None:
    models, _ = described_models(loaded.model)
    settings = loaded.engine.settings({"context": 262_144, "flash_attn": "on"})
    needs = estimated(loaded.engine, settings, models[None])
    assert needs.part("kv_cache").mean == 262_144 * 6 * 2 * 2 * 128 * 2
    assert excess(needs, 16 * 2**30).fits < 0.01
    assert excess(needs, 24 * 2**30).fits > 0.99


def test_every_fact_is_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert all(f"| `{name}` | {meaning} |" in docs for name, meaning in FACTS.items())
