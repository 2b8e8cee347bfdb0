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
    write_front_html,
    write_front_png,
)

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
    write_front_html(attempts, tmp_path / "front.html")
    png = (tmp_path / "front.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 1440
    assert (tmp_path / "front.html").read_text().endswith("</html>")


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
    write_front_html(STUDY, tmp_path / "front.html")
    page = read(tmp_path / "front.html")
    text = " ".join(" ".join(page.said).split())
    assert page.sources == []
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
    write_front_html(attempts, tmp_path / "evil.html")
    write_front_html(clean, tmp_path / "clean.html")
    assert "<script>alert(1)" not in (tmp_path / "evil.html").read_text()
    assert read(tmp_path / "evil.html").tags.count("script") == (
        read(tmp_path / "clean.html").tags.count("script")
    )


def test_the_hover_card_shows_the_point_and_its_figures(tmp_path: Path) -> None:
    write_front_html(STUDY, tmp_path / "front.html")
    page = (tmp_path / "front.html").read_text()
    cards = re.findall(r"attempt 2: 40\.0 tok[^\"]*", page)
    assert len(cards) == 1
    assert "cache_type_k = q8_0" in cards[0]
    assert "131,056 tokens proven of 131,072 configured" in cards[0]


def test_invented_figures_are_marked_on_the_page(tmp_path: Path) -> None:
    write_front_html([measured_attempt(1, engine=fake_engine_facts())], tmp_path / "front.html")
    assert "SIMULATED: a fake engine" in " ".join(read(tmp_path / "front.html").said)


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
