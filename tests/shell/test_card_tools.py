"""The tools that record studies on a card, as far as they need none."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sweeper.core.pairs import Pairs
from sweeper.core.space import Axis, Space
from sweeper.replay import read_table

ROOT = Path(__file__).resolve().parents[2]
SPACE = Space(
    axes=(
        Axis(name="context", values=(16, 32, 64, 128), ordered=True, sets=("context",)),
        Axis(name="ubatch", values=(1, 2, 4, 8), ordered=True, sets=("ubatch",)),
        Axis(name="n_max", values=(0, 8), ordered=True, sets=("n_max",)),
    )
)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    for folder in ("search", "card"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    names = ("record", "record_gpu", "bring_home")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_every_point_is_booted_once_and_twenty_three_times(tools: dict[str, ModuleType]) -> None:
    order = tools["record_gpu"]._order(SPACE, Counter())

    booted = Counter(order)
    assert set(booted) == set(SPACE.points())
    assert Counter(booted.values()) == {1: 12, 3: 20}


def test_the_last_axis_is_walked_slowest(tools: dict[str, ModuleType]) -> None:
    lengths = [point["n_max"] for point in tools["record_gpu"]._order(SPACE, Counter())]

    assert lengths == sorted(lengths, key=(0, 8).index)


def test_a_run_that_was_cut_goes_on_with_what_is_left(tools: dict[str, ModuleType]) -> None:
    whole = tools["record_gpu"]._order(SPACE, Counter())

    done, left = whole[:17], tools["record_gpu"]._order(SPACE, Counter(whole[:17]))

    assert Counter(done) + Counter(left) == Counter(whole)


def _row(point: dict[str, Any], **evidence: Any) -> str:
    return json.dumps({"point": point, "outcome": evidence["outcome"], "evidence": evidence})


def test_a_recording_becomes_a_table_of_the_first_boot_of_each_point(
    tools: dict[str, ModuleType], tmp_path: Path
) -> None:
    space = {
        "axes": {
            "context": {"role": "context", "ordered": True, "values": [1024, 2048]},
            "flash_attn": {"role": "backend", "ordered": False, "values": ["on", "off"]},
        },
        "known": {"capacity_gib": 24.0},
    }
    small, large = ({"context": size, "flash_attn": "on"} for size in (1024, 2048))
    (tmp_path / "space.json").write_text(json.dumps(space))
    (tmp_path / "boots.jsonl").write_text(
        "\n".join([
            _row(small, outcome="measured", phase="ready", decode_tok_s=400.0, ready_gib=9.5),
            _row(small, outcome="measured", phase="ready", decode_tok_s=300.0),
            _row(large, outcome="oom_kv_cache", phase="kv", shortfall_gib=1.5),
        ])
    )  # fmt: skip

    tools["record_gpu"].table(tmp_path, "recorded", tmp_path / "tables")

    table = read_table(tmp_path / "tables" / "recorded.csv.gz")
    assert [each.outcome for each in table.evidence] == ["measured", "oom_kv_cache"]
    assert table.decode_tok_s[0] == 400.0
    assert table.evidence[1].shortfall_bytes == 1.5 * 2**30
    assert table.prior.capacity_bytes == 24 * 2**30


def test_a_log_keeps_its_end_and_the_first_of_what_repeats(tools: dict[str, ModuleType]) -> None:
    chatter = [f"slot 0 | task {number} | launch" for number in range(500)]
    counted = [f"draft acceptance = 0.{number}" for number in range(3)]
    lines = ["begin", *chatter[:400], *counted, *chatter[400:], "end"]

    kept = tools["bring_home"].trimmed(lines)

    assert kept[:3] == ["begin", *chatter[:2]]
    assert [line for line in kept if "acceptance" in line] == counted
    assert kept[-1] == "end"
    assert len(kept) < 60
    gone = sum(int(line.split()[1]) for line in kept if line.startswith("... "))
    assert gone + len([line for line in kept if not line.startswith("... ")]) == len(lines)


def test_points_are_named_in_one_line(tools: dict[str, ModuleType]) -> None:
    said = tools["record_gpu"].text_of(Pairs(context=1024, flash_attn="on"))
    assert said == "context=1024 flash_attn=on"
