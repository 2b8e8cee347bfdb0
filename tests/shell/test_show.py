"""What `show` tells of studies on disk: conditions, files, and leaderboards that compare fairly."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.examples import (
    fake_engine_facts,
    measured_attempt,
    oom_attempt,
    unsupported_attempt,
)

from sweeper.cli import OK, WRONG_INPUT, main
from sweeper.core.outcome import Attempt, Figures, Measured
from sweeper.core.pairs import Pairs
from sweeper.core.stats import summarise
from sweeper.places import ConfError
from sweeper.record.attempts import Attempts
from sweeper.show import (
    as_csv,
    board_json,
    board_notes,
    board_of,
    board_rows,
    board_tables,
    chosen,
    load_on,
    rows_of,
    write_parquet,
)

HOST = Pairs(gpu="RTX 5090 Laptop", gpu_memory_bytes=24 * 2**30, gpu_driver="580.1")
WORKLOAD = Pairs(name="short", digest="d" * 16, schema=2)


def on(study: str, number: int, speed: float, **changes: Any) -> Attempt:
    """Return a measured attempt of a study, on the same machine and workload as all others."""
    facts = {"host": HOST, "workload": WORKLOAD, **changes}
    return measured_attempt(number, decode_tok_s=speed, study=study, **facts)


STUDIES = {
    "moe": [
        on("moe", 1, 240.0, context=32768), on("moe", 2, 230.0, context=262144),
        oom_attempt(3, context=524288),
    ],
    "dense": [on("dense", 1, 75.0, engine=Pairs(name="llamacpp", engine_version="b9900"))],
    "never": [],
    "broken": [oom_attempt(1), unsupported_attempt(2)],
}  # fmt: skip


# ---- Conditions ---------------------------------------------------------------------------------

MIXED = [
    measured_attempt(1, decode_tok_s=60.0, context=8192, n_max=2),
    measured_attempt(2, decode_tok_s=40.0, context=131072, cache_type="q8_0"),
    oom_attempt(3),
    unsupported_attempt(4),
]


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("", [1, 2, 3, 4]),
        ("kind=measured", [1, 2]),
        ("kind=measured n_max>=3", [2]),
        ("kind=measured and context>=128K", [2]),
        ("context>128K", [3]),
        ("context<=8192, kind=measured", [1]),
        ("speed>50", [1]),
        ("decode_tok_s=null", [3, 4]),
        ("on_front=true", [1, 2]),
        ("on_front=true cache_type_k!=f16", [2]),
        ("outcome~OOM", [3]),
        ("explanation~'flash attention'", [4]),
        ("number>1 number<4", [2, 3]),
        ("study=mixed", [1, 2, 3, 4]),
    ],
)
def test_conditions_choose_rows(where: str, numbers: list[int]) -> None:
    rows = chosen(rows_of({"mixed": MIXED}), where)
    assert [row["attempt"] for row in rows] == numbers


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("knd=measured", "no trial has a column knd (did you mean kind?)"),
        ("measured", "cannot read `measured`"),
        ("kind=measured or n_max=2", "cannot read `or n_max=2`"),
        ("kind>measured", "compares with what is no number"),
        ("n_max>=", "cannot read `n_max>=`"),
    ],
)
def test_a_wrong_condition_is_refused_with_what_to_write(where: str, words: str) -> None:
    with pytest.raises(ConfError) as refused:
        chosen(rows_of({"mixed": MIXED}), where)
    assert words in str(refused.value)
    assert str(refused.value).startswith("show.where: ")


@given(st.text(max_size=40))
def test_any_text_is_conditions_or_an_error_for_people(where: str) -> None:
    # Any other error is a bug.
    with contextlib.suppress(ConfError):
        chosen(rows_of({"mixed": MIXED[:1]}), where)


# ---- Files --------------------------------------------------------------------------------------


def test_rows_as_csv_can_be_read_again() -> None:
    attempts = [measured_attempt(1, cache_type='a,"b"\nc'), oom_attempt(2)]
    rows = rows_of({"x": attempts})
    read = list(csv.DictReader(StringIO(as_csv(rows))))
    assert [each["attempt"] for each in read] == ["1", "2"]
    assert read[0]["cache_type_k"] == 'a,"b"\nc'
    assert read[1]["decode_tok_s"] == ""
    assert read[0]["on_front"] == "true"
    assert float(read[0]["decode_tok_s_low"]) == rows[0]["decode_tok_s_low"]
    assert as_csv([]) == ""


def test_rows_as_parquet_keep_their_types(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    rows = rows_of({"one": MIXED, "two": [measured_attempt(1, cache_type="f16")]})
    write_parquet(rows, tmp_path / "x.parquet")
    table = pq.read_table(tmp_path / "x.parquet").to_pydict()
    assert table["study"] == ["one"] * 4 + ["two"]
    assert table["decode_tok_s"][:3] == [60.0, 40.0, None]
    assert table["on_front"][0] is True
    mixed = [{"a": 1, "b": 1}, {"a": "x", "b": 1.5}, {"a": None, "b": None}]
    write_parquet(mixed, tmp_path / "y.parquet")
    assert pq.read_table(tmp_path / "y.parquet").to_pydict() == {
        "a": ["1", "x", None], "b": [1.0, 1.5, None],
    }  # fmt: skip


# ---- Leaderboards -------------------------------------------------------------------------------


def test_the_best_of_each_study_are_ranked_by_speed_with_what_each_is_best_at() -> None:
    board = board_of(STUDIES, name="all")
    rows = board_rows(board)
    assert [(row["rank"], row["study"], row["attempt"]) for row in rows] == [
        (1, "moe", 1), (2, "moe", 2), (3, "dense", 1),
    ]  # fmt: skip
    assert "fastest" in rows[0]["best_at"]
    assert "longest" in rows[1]["best_at"]
    assert [row["unbeaten"] for row in rows] == [True, True, False]
    assert rows[0]["memory_mib"] == 19 * 1024
    assert rows[0]["decode_tok_s_low"] < 240 < rows[0]["decode_tok_s_high"]
    assert (board.not_run, list(board.without_result)) == (("never",), ["broken"])
    notes = "\n".join(board_notes(board))
    assert "never: not run yet; start it: python -m sweeper +study=never" in notes
    assert "broken: none of its 2 boots was measured" in notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": HOST.with_(gpu="A100")}, "GPU RTX 5090 Laptop against A100"),
        ({"workload": WORKLOAD.with_(digest="e" * 16)}, "workload digest"),
        ({"workload": WORKLOAD.with_(schema=1)}, "schema of the measurement 2 against 1"),
        ({"engine": fake_engine_facts()}, "simulated engine"),
    ],
)
def test_what_cannot_be_compared_is_not_ranked_unless_asked_for(
    changes: dict[str, Any], words: str
) -> None:
    studies = {**STUDIES, "other": [on("other", 1, 500.0, **changes)]}
    board = board_of(studies, name="all")
    assert board.reference == "moe"
    assert [each.study for each in board.ranked] == ["moe", "moe", "dense"]
    assert [each.study for each in board.apart] == ["other"]
    assert words in "\n".join(board_notes(board))
    document = board_json(board, board_rows(board))
    assert any(words in said for said in document["apart"][0]["differs"])
    assert document["apart"][0]["rank"] is None

    mixed = board_of(studies, name="all", mix=True)
    assert [each.study for each in mixed.ranked] == ["other", "moe", "moe", "dense"]
    assert words in "\n".join(board_notes(mixed))


def test_the_odd_one_stands_apart_even_if_it_comes_first() -> None:
    odd = {"odd": [on("odd", 1, 900.0, host=HOST.with_(gpu="H200"))]}
    board = board_of({**odd, **STUDIES}, name="all")
    assert board.reference == "moe"
    assert [each.study for each in board.apart] == ["odd"]


def test_a_workload_measured_beside_another_counts_by_its_name_and_that_is_said() -> None:
    own = on("own", 1, 50.0, workload=Pairs(name="story", digest="a" * 16, schema=2))
    assert isinstance(own.outcome, Measured)
    story = Figures(
        workload="story", prompt_length=None, streams=1, decode_tok_s=summarise([50.0] * 6),
        ttft_s=own.outcome.ttft_s,
    )  # fmt: skip
    own = replace(own, outcome=replace(own.outcome, figures=(story,)))
    beside = on("beside", 1, 240.0)
    assert isinstance(beside.outcome, Measured)
    also = replace(story, decode_tok_s=summarise([180.0] * 6))
    figures = (*beside.outcome.figures, also)
    beside = replace(beside, outcome=replace(beside.outcome, figures=figures))
    without = on("without", 1, 999.0)

    board = board_of(
        {"own": [own], "beside": [beside], "without": [without]}, name="all", workload="story"
    )
    assert [(each.study, each.load.decode_tok_s.median) for each in board.ranked] == [
        ("beside", 180.0), ("own", 50.0),
    ]  # fmt: skip
    assert "by its name alone" in "\n".join(board_notes(board))
    assert "add also=[story]" in board.without_result["without"]
    # Acceptance was counted while another workload was measured.
    assert board_rows(board)[0]["acceptance"] is None


def test_a_record_without_loads_is_what_its_study_compares_by() -> None:
    attempt = on("x", 1, 42.0)
    assert isinstance(attempt.outcome, Measured)
    bare = replace(attempt, outcome=replace(attempt.outcome, figures=()))
    load = load_on(bare, None)
    assert load is not None
    assert load.decode_tok_s.median == 42.0
    assert load_on(bare, "other") is None
    assert load_on(oom_attempt(1), None) is None


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_board_fits_its_terminal(width: int) -> None:
    board = board_of(
        {**STUDIES, "odd": [on("odd", 1, 9.0, host=HOST.with_(gpu="H200"))]}, name="all"
    )
    out = StringIO()
    console = Console(file=out, width=width, color_system=None)
    for table in board_tables(board, board_rows(board), width):
        console.print(table)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("240" in line for line in lines)
    assert "not ranked" in out.getvalue()


# ---- On the command line ------------------------------------------------------------------------


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a folder with two studies on disk."""
    monkeypatch.delenv("SWEEPER_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "studies"
    made = {"fake_demo": MIXED, "other": [on("other", 1, 30.0), on("other", 2, 20.0, n_max=1)]}
    for study, attempts in made.items():
        store = Attempts(folder / study / "attempts")
        for each in attempts:
            store.begin(each.number)
            store.commit(replace(each, study=study))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == OK
    return capsys.readouterr().out


def test_a_study_is_shown_in_every_form(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("+study=fake_demo", f"studies_dir={studies}")
    found = json.loads(said(capsys, *here, "output=json", "show.where=kind=measured n_max>=3"))
    assert [row["attempt"] for row in found["trials"]] == [2]
    assert [row["attempt"] for row in found["front"]] == [2]
    assert list(json.loads(said(capsys, *here, "output=json", "show.rows=front"))) == [
        "study", "front",
    ]  # fmt: skip
    lines = said(capsys, *here, "output=csv").splitlines()
    assert len(lines) == 5
    assert len(said(capsys, *here, "output=csv", "show.rows=front").splitlines()) == 3
    assert said(capsys, *here, "output=csv", "show.to=x.csv") == "x.csv\n"
    assert Path("x.csv").read_text().splitlines() == lines
    text = said(capsys, *here, "show.where='outcome~oom'")
    assert "oom_kv_cache" in text
    assert "unsupported" not in text


def test_several_studies_are_ranked_or_listed(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("show.studies=[fake_demo,other]", f"studies_dir={studies}")
    assert "not ranked" in said(capsys, *both)
    assert "not ranked" not in said(capsys, *both, "show.mix=true")
    rows = list(csv.DictReader(StringIO(said(capsys, *both, "output=csv", "show.rows=trials"))))
    assert [row["study"] for row in rows] == ["fake_demo"] * 4 + ["other"] * 2
    beside = ("+study=fake_demo", "show.studies=[other]", f"studies_dir={studies}", "output=json")
    board = json.loads(said(capsys, *beside))
    assert {row["study"] for row in (*board["ranked"], *board["apart"])} == {"fake_demo", "other"}
    assert "attempts of other" in said(capsys, *both, "show.rows=trials").replace("\n", " ")


def test_a_leaderboard_names_what_was_not_run(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "+study=leaderboard_24g", f"studies_dir={studies}")
    assert "nothing to rank" in text
    assert "qwen35b_mtp: not run yet" in text


def test_the_report_can_be_written_again_from_disk(
    studies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = said(capsys, "+study=fake_demo", f"studies_dir={studies}", "output=report")
    assert str(studies / "fake_demo" / "report.html") in printed
    assert (studies / "fake_demo" / "report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+study=fake_demo", "output=parquet"], "show.to=trials.parquet"),
        (["+study=fake_demo", "output=csv", "show.to=/no/such/x.csv"], "No such file"),
        (["+study=fake_demo", "show.rows=all"], "all is not one of trials, front, board"),
        (["show.studies=[othr]"], "there is no study othr"),
        (["show.studies=[othr]"], "did you mean other?"),
        (["show.studies=[other]", "output=report"], "output=report is of one study"),
    ],
)
def test_what_cannot_be_shown_is_said(
    studies: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["show", *arguments, f"studies_dir={studies}"]) == WRONG_INPUT
    complained = capsys.readouterr()
    assert complained.out == ""
    assert words in complained.err


def test_a_damaged_record_is_named(studies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(studies / "other", studies / "torn")
    (studies / "torn" / "attempts" / "0001" / "attempt.json").write_text("{")
    assert main(["show", "show.studies=[torn]", f"studies_dir={studies}"]) == WRONG_INPUT
    assert "0001" in capsys.readouterr().err
