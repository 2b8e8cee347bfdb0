from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from tests.examples import (
    attempt_of,
    broken_attempt,
    fake_engine_facts,
    host_fault_attempt,
    measured_attempt,
    oom_attempt,
    unfit_attempt,
    unsupported_attempt,
)

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.core.standing import front_among
from sweeper.report import (
    configured_context,
    front_rows,
    front_table,
    hypervolume_of,
    is_simulated,
    reference_point,
    trial_rows,
    trials_table,
    write_front_png,
    write_markdown,
    write_page,
    write_report,
)
from sweeper.report.charts import charts_of
from sweeper.report.content import Report, effect_words, report_of
from sweeper.report.effects import Effect, effects_of
from sweeper.report.markdown import escaped
from sweeper.report.seen import WHOLE, depths_seen, drafts_seen, parts_seen
from sweeper.report.words import ratio_ticks, size_ticks

STUDY = [
    measured_attempt(1, decode_tok_s=60.0, context=8192, n_max=2),
    measured_attempt(2, decode_tok_s=40.0, context=131072, cache_type="q8_0"),
    measured_attempt(3, decode_tok_s=35.0, context=32768),
    oom_attempt(4),
    oom_attempt(5),
    unsupported_attempt(6),
    unfit_attempt(7),
    broken_attempt(8),
    host_fault_attempt(9, point=Pairs(n_max=1)),
]


def shown(table: Table, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue().splitlines()


def test_the_front_is_what_nothing_beats_fastest_first() -> None:
    assert [each.number for each in front_among(STUDY)] == [1, 2]


def test_equally_good_attempts_are_all_on_the_front() -> None:
    both = [measured_attempt(1), measured_attempt(2, cache_type="q8_0")]
    assert [each.number for each in front_among(both)] == [1, 2]


def test_a_study_without_measurements_has_no_front_and_no_hypervolume() -> None:
    failed = [oom_attempt(1), broken_attempt(2)]
    assert front_among(failed) == ()
    assert reference_point(failed) is None
    assert hypervolume_of(failed) == 0.0


def test_one_point_alone_spans_one_octave_below_it() -> None:
    alone = [measured_attempt(1, decode_tok_s=40.0, proven=4096)]
    assert reference_point(alone) == (0.0, 11.0)
    assert hypervolume_of(alone) == pytest.approx(40.0)


def test_the_hypervolume_counts_octaves_of_context_at_each_speed() -> None:
    two = [
        measured_attempt(1, decode_tok_s=60.0, proven=4096),
        measured_attempt(2, decode_tok_s=40.0, proven=16384, n_max=1),
    ]
    assert hypervolume_of(two) == pytest.approx(60.0 * 1 + 40.0 * 2)
    assert hypervolume_of([*two, measured_attempt(3, decode_tok_s=30.0, proven=8192, n_max=2)]) == (
        pytest.approx(hypervolume_of(two))
    )


def test_a_context_that_was_not_proven_at_all_counts_for_nothing() -> None:
    assert front_among([measured_attempt(1, proven=0)]) == ()
    assert hypervolume_of([measured_attempt(1, proven=0)]) == 0.0


def test_front_rows_have_equal_keys_with_units_and_none_for_what_is_not_there() -> None:
    first, second = front_rows(STUDY)
    assert first.keys() == second.keys()
    assert first["attempt"] == 1
    assert first["decode_tok_s_low"] < first["decode_tok_s"] < first["decode_tok_s_high"]
    assert first["ttft_ms"] == pytest.approx(210.0)
    assert first["peak_memory_mib"] == 18 * 1024
    assert second["acceptance"] == pytest.approx(0.7)


def test_trial_rows_tell_every_attempt_in_order() -> None:
    rows = trial_rows(reversed(STUDY))
    assert [row["attempt"] for row in rows] == list(range(1, 10))
    assert [row["on_front"] for row in rows][:4] == [True, True, False, False]
    assert rows[3]["outcome"] == "oom_kv_cache"
    assert rows[3]["phase"] == "kv"
    assert rows[3]["decode_tok_s"] is None
    assert rows[8]["context"] is None


def test_the_context_of_a_failure_is_read_from_its_point_or_its_facts() -> None:
    assert configured_context(oom_attempt(context=8192)) == 8192
    nameless = oom_attempt()
    assert configured_context(replace(nameless, point=Pairs(n_max=1))) is None
    assert configured_context(STUDY[0]) == 8192


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("table", [front_table, trials_table])
def test_a_table_fits_its_width_and_breaks_no_number(table: object, width: int) -> None:
    assert table is front_table or table is trials_table
    lines = shown(table(STUDY, width=width), width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    assert any("60.0" in line for line in lines)


def test_a_front_table_at_80_columns_shows_units_and_says_what_it_left_out() -> None:
    text = "\n".join(shown(front_table(STUDY, width=80), 80))
    assert "tok/s" in text
    assert "tokens" in text
    assert "131,056" in text
    assert "left out at 80 columns: " in text
    assert "left out" not in "\n".join(shown(front_table(STUDY, width=200), 200))


def test_settings_that_never_change_are_said_once() -> None:
    same = [measured_attempt(1, context=8192), measured_attempt(2, context=16384)]
    lines = shown(trials_table(same, width=120), 120)
    assert "all: cache_type_k=f16 n_max=3" in [line.rstrip() for line in lines]


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    attempts = [measured_attempt(n, cache_type=f"[red]{n}") for n in (1, 2)]
    assert "[red]1" in "\n".join(shown(trials_table(attempts, width=120), 120))


def test_a_study_without_attempts_has_tables_that_say_so() -> None:
    assert "nothing measured" in "\n".join(shown(front_table([]), 80))
    assert "none yet" in "\n".join(shown(trials_table([]), 80))


def test_invented_figures_are_marked_in_tables() -> None:
    simulated = [measured_attempt(1, engine=fake_engine_facts())]
    assert is_simulated(simulated)
    assert not is_simulated(STUDY)
    assert "SIMULATED" in "\n".join(shown(front_table(simulated), 80))


@pytest.mark.parametrize(
    "attempts",
    [
        STUDY,
        [],
        STUDY[3:],
        STUDY[:1],
        [measured_attempt(n, engine=fake_engine_facts()) for n in range(1, 6)],
        [measured_attempt(n, context=1000 * n, decode_tok_s=90.0 - n) for n in range(1, 40)],
        [measured_attempt(1, decode_tok_s=1e-9)],
        [attempt_of(STUDY[0].outcome, point=Pairs(), number=1)],
    ],
    ids=[
        "mixed",
        "empty",
        "all failed",
        "one",
        "simulated",
        "crowded",
        "hardly any speed",
        "no axes",
    ],
)
def test_every_study_gives_a_picture_and_a_page(attempts: list[Attempt], tmp_path: Path) -> None:
    write_front_png(attempts, tmp_path / "front.png")
    write_page(attempts, tmp_path / "report.html")
    png = (tmp_path / "front.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 1440
    assert (tmp_path / "report.html").read_text().rstrip().endswith("</html>")


class Words(HTMLParser):
    """Collects the tags and the text of a page, the scripts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["script"]:
            self.said.append(data)


def read(path: Path) -> Words:
    words = Words()
    words.feed(path.read_text())
    return words


def test_the_page_explains_every_failure_and_needs_no_network(tmp_path: Path) -> None:
    write_page(STUDY, tmp_path / "report.html")
    page = read(tmp_path / "report.html")
    text = " ".join(" ".join(page.said).split())
    assert all(each.startswith("#") for each in page.sources)
    assert text.count("1536 MiB larger than what is left") == 2
    assert "try next: context=131072" in text
    assert "The answer repeats one token 64 times." in text
    assert "The disk is full" in text
    assert "SIMULATED" not in text


def test_nothing_an_engine_prints_becomes_part_of_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>"
    attempts = [
        measured_attempt(1, study=evil, cache_type=evil),
        oom_attempt(2, study=evil, model=Pairs(name=evil)),
    ]
    clean = [measured_attempt(1), oom_attempt(2)]
    write_page(attempts, tmp_path / "evil.html")
    write_page(clean, tmp_path / "clean.html")
    assert "<script>alert(1)" not in (tmp_path / "evil.html").read_text()
    assert read(tmp_path / "evil.html").tags.count("script") == (
        read(tmp_path / "clean.html").tags.count("script")
    )


def test_the_hover_card_shows_the_point_and_its_figures(tmp_path: Path) -> None:
    write_page(STUDY, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    cards = re.findall(r"attempt 2: 40\.0 tok[^\"]*", page)
    assert len(cards) == 1
    assert "cache_type_k = q8_0" in cards[0]
    assert "131,056 tokens proven of 131,072 configured" in cards[0]


def test_invented_figures_are_marked_on_the_page(tmp_path: Path) -> None:
    write_page([measured_attempt(1, engine=fake_engine_facts())], tmp_path / "report.html")
    assert "SIMULATED: a fake engine" in " ".join(read(tmp_path / "report.html").said)


def test_importing_the_report_imports_no_plotting_library() -> None:
    script = (
        "import sys, sweeper.report; "
        "sys.exit(bool({'matplotlib', 'plotly', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_reference_is_finite_for_the_smallest_context() -> None:
    reference = reference_point([measured_attempt(1, proven=1)])
    assert reference is not None
    assert all(map(math.isfinite, reference))


# ---- The report's content -----------------------------------------------------------------------


def swept(**factors: float) -> list[Attempt]:
    """Return a whole grid of measured attempts whose speed is the product of these factors."""
    found = []
    for context in (8192, 16384, 32768, 65536):
        for n_max in (0, 3):
            for cache in ("f16", "q8_0"):
                speed = 40.0 * factors.get(f"n{n_max}", 1.0) * factors.get(cache, 1.0)
                number = len(found) + 1
                found.append(
                    measured_attempt(
                        number, decode_tok_s=speed, context=context, n_max=n_max, cache_type=cache
                    )
                )
    return found


def effect(found: tuple[Effect, ...], axis: str, value: object) -> Effect:
    (one,) = (each for each in found if (each.axis, each.value) == (axis, value))
    return one


def test_an_axis_that_doubles_the_speed_is_said_to_and_one_that_does_nothing_is_not() -> None:
    found = effects_of(swept(n3=2.0))
    fast = effect(found, "n_max", 3)
    assert fast.ratio == pytest.approx(2.0)
    assert (fast.comparisons, fast.exact, fast.clear) == (8, 8, True)
    assert "× 2.00" in effect_words(fast)
    same = effect(found, "cache_type_k", "q8_0")
    assert same.ratio == pytest.approx(1.0)
    assert "no clear difference" in effect_words(same)


def test_few_comparisons_have_no_interval_and_say_so() -> None:
    few = [measured_attempt(1, n_max=0), measured_attempt(2, n_max=3, decode_tok_s=80.0)]
    found = effect(effects_of(few), "n_max", 3)
    assert found.ratio == pytest.approx(2.0)
    assert (found.low, found.high, found.clear) == (None, None, False)
    assert "no interval" in effect_words(found)


def test_what_failed_is_counted_with_its_value_and_compared_with_nothing() -> None:
    found = effects_of([*swept(), oom_attempt(20), unsupported_attempt(21)])
    assert effect(found, "context", 262144).out_of_memory == 1
    assert effect(found, "context", 262144).ratio is None
    assert effect(found, "n_max", 2).failed_otherwise == 1
    assert effect_words(effect(found, "n_max", 2)) == "nothing to compare with"


def test_effects_are_the_same_for_the_same_attempts_in_any_order() -> None:
    attempts = swept(n3=1.3, q8_0=0.9)
    assert effects_of(attempts) == effects_of(reversed(attempts))


def test_memory_that_was_printed_stands_beside_what_was_thought_of_it() -> None:
    attempt = measured_attempt(
        1, engine=Pairs(name="vllm", weights_bytes=17 * 2**30, kv_cache_bytes=2 * 2**30)
    )
    parts = {each.part: each for each in parts_seen([attempt])}
    assert parts["weights"].predicted == 16 * 2**30
    assert parts["weights"].observed == 17 * 2**30
    assert not parts["weights"].within or parts["weights"].spread > 2**28
    assert parts["kv_cache"].within
    assert parts[WHOLE].observed == 19 * 2**30
    simulated = replace(attempt, engine=attempt.engine.with_(simulated=True))
    assert WHOLE not in {each.part for each in parts_seen([simulated])}


def test_one_boot_tells_what_every_shorter_draft_would_yield() -> None:
    (drafts,) = drafts_seen([measured_attempt(1)], {1: "#1"})
    assert drafts.shares == (0.9, 0.7, 0.5)
    assert drafts.yields == pytest.approx((1.0, 1.9, 2.6, 3.1))


def test_speed_by_depth_has_every_length_and_the_proof_as_a_single_answer() -> None:
    (depths,) = depths_seen([measured_attempt(1)], {1: "#1"})
    assert [each.tokens for each in depths.depths] == [512, 8192, 32752 - 128]
    assert [each.summary is None for each in depths.depths] == [False, False, True]


def everything() -> Report:
    return report_of([*STUDY, *swept(n3=1.5)[3:]])


def test_a_report_has_every_section_that_its_attempts_allow(tmp_path: Path) -> None:
    write_page([*STUDY, *(replace(e, number=e.number + 20) for e in swept())], tmp_path / "r.html")
    text = " ".join(" ".join(read(tmp_path / "r.html").said).split())
    for words in (
        "The front", "What each axis did", "Memory: thought and shown", "Drafts by position",
        "Speed by depth and load", "Power and machine", "What could not be measured",
        "Protocol and host", "Recipes", "Do it again", "python -m sweeper +study=qwen-mtp",
        "RTX 4090", "--ctx-size", "power_cap",
    ):  # fmt: skip
        assert words in text, words


def test_every_chart_says_the_unit_of_each_axis() -> None:
    charts = charts_of(everything())
    assert charts.keys() == {"front", "effects", "memory", "drafts", "depths"}
    for name, chart in charts.items():
        for axis in ("xaxis", "yaxis"):
            if (name, axis) != ("effects", "yaxis"):  # its ticks are names
                assert re.search(r"\(.+\)$", chart["layout"][axis]["title"]["text"]), name


def test_every_doubt_of_a_report_is_explained() -> None:
    found = {row[0]: row for row in everything().doubts.rows}
    assert "the interval is wider than a tenth of the median" not in found
    for row in found.values():
        assert len(row[1]) > 10
        assert row[2].startswith("#")


def test_a_report_is_markdown_too_and_its_pictures_are_there(tmp_path: Path) -> None:
    evil = "a|b `c` <img src=x> *d*"
    attempts = [*STUDY, measured_attempt(30, decode_tok_s=90.0, cache_type=evil)]
    write_markdown(attempts, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == 5
    for each in pictures:
        assert (tmp_path / each).read_bytes().startswith(b"\x89PNG")
    assert "<img" not in text
    assert escaped(evil) in text
    heads = [line for line in text.splitlines() if line.startswith("|--")]
    assert len(heads) > 5


def test_a_picture_without_data_is_not_left_from_an_earlier_report(tmp_path: Path) -> None:
    write_markdown(STUDY, tmp_path / "report.md")
    assert (tmp_path / "report" / "drafts.png").exists()
    write_markdown(STUDY[3:], tmp_path / "report.md")
    assert not (tmp_path / "report" / "drafts.png").exists()
    assert "drafts.png" not in (tmp_path / "report.md").read_text()


def test_a_study_leaves_a_page_a_picture_and_markdown(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"identity": {"space.context": {"values": [1, 2]}}}')
    picture, page = write_report(STUDY, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "space.context" in page.read_text()
    assert (tmp_path / "report.md").exists()


def test_a_log_line_that_was_no_text_breaks_no_report(tmp_path: Path) -> None:
    attempts = [measured_attempt(2, cache_type="$x_{1}$\udcff"), oom_attempt(3)]
    write_report(attempts, tmp_path)
    assert "$x_{1}$" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("reach", [0.02, 0.1, 0.2, 0.5, 1.0, 2.0, 3.5])
def test_ratios_have_round_ticks_on_both_sides_of_one(reach: float) -> None:
    ticks = ratio_ticks(reach)
    assert 1 in ticks
    assert 5 <= len(ticks) <= 9
    assert any(abs(math.log2(each)) <= reach * 2 for each in ticks if each != 1)


@pytest.mark.parametrize(("least", "most"), [(1, 1e5), (14_000, 20_000), (300, 310), (0.2, 3)])
def test_sizes_have_at_least_two_ticks_within_reach(least: float, most: float) -> None:
    ticks = size_ticks(least, most)
    assert 2 <= len(ticks) <= 14
    assert all(least * 0.9 <= each <= most * 1.1 for each in ticks)
