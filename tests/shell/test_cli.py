"""The command line: what it says, what it refuses, and what it costs to ask it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeper import __version__
from sweeper.cli import VERBS, main
from sweeper.places import GROUPS

HEAVY = (
    "hydra",
    "omegaconf",
    "mlflow",
    "optuna",
    "pandas",
    "matplotlib",
    "plotly",
    "rich",
    "httpx",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, so that only the shipped configs are found."""
    monkeypatch.delenv("SWEEPER_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["plan", "--help"]])
def test_help_names_verbs_studies_and_groups(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(arguments) == 0
    words = capsys.readouterr().out
    for each in (*VERBS, "quickstart", "fake_demo", "llamacpp", "fake", "+study="):
        assert each in words
    assert all(group in words for group in GROUPS if group != "study")


def test_help_names_the_studies_of_the_folder_it_is_called_in(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "conf" / "study").mkdir(parents=True)
    (here / "conf" / "study" / "my_own.yaml").touch()
    assert main(["--help"]) == 0
    words = capsys.readouterr().out
    assert "my_own" in words
    assert "quickstart" in words


def test_help_loads_nothing_that_takes_time(here: Path) -> None:
    script = (
        "import sys; from sweeper.cli import main; main(['--help']); "
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert done.stderr.strip() == "[]"
    assert "verbs" in done.stdout


@pytest.mark.usefixtures("here")
def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sweeper {__version__}\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shwo"], "did you mean show?"),
        (["dance"], "dance: there is no such verb"),
        (["show", "--verbose"], "--verbose: there is no such option"),
        (["-x"], "-x: there is no such option"),
        (["show", "--config-dir"], "--config-dir needs a folder after it"),
        (["show", "--config-dir", "nowhere"], "there is no such folder"),
        (["--config-dir=nowhere"], "there is no such folder"),
        ([], "no study was chosen: add +study=NAME"),
        (["plan", "+study=fake_dmo"], "did you mean fake_demo?"),
        (["plan", "+study=fake_demo", "budget.boot=3"], "did you mean boots?"),
        (["plan", "+study=fake_demo", "engine.params.contxt=3"], "there is no engine.params"),
        (["plan", "+study=fake_demo", "output=xml"], "xml is not one of text, json"),
        (["export", "+study=fake_demo"], "has no measured attempt to export"),
        (["export", "+study=fake_demo", "export.trial=4"], "has no attempt 4"),
        (["ui", "+study=fake_demo"], "tracking is off for this study"),
        (["ui", "+study=fake_demo", "tracking=local"], "there is no store"),
    ],
)
def test_a_mistake_is_a_short_letter_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sweeper: ")
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.usefixtures("here")
def test_a_study_of_which_nothing_was_run_is_shown_as_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "+study=fake_demo"]) == 0
    assert (
        "no attempts yet; start it: python -m sweeper +study=fake_demo" in capsys.readouterr().out
    )
    assert main(["show", "+study=fake_demo", "output=json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["study"], shown["front"], shown["trials"]) == ("fake_demo", [], [])


def test_a_plan_boots_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+study=fake_demo", "output=json", "plan.points=3"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["engine"] == "fake"
    assert plan["points_declared"] == plan["points_left"] + sum(plan["points_out_by_rule"].values())
    assert [each["point"]["context"] for each in plan["first"]] == [4096, 16384, 32768]
    assert not (here / "studies").exists()
    assert main(["plan", "+study=fake_demo"]) == 0
    assert "points declared" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_plan_names_no_point_twice(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["space.context=[2048]", "space.kv_type.choices=[f16]", "space.batch=[128]", "enqueue=[]"]
    assert main(["plan", "+study=fake_demo", "output=json", "plan.points=20", *few]) == 0
    plan = json.loads(capsys.readouterr().out)
    named = [json.dumps(each["point"]) for each in plan["first"]]
    assert len(named) == len(set(named)) == plan["points_left"]


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "+study=fake_demo", "output=json"]])
def test_a_reader_that_has_gone_is_no_traceback(here: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sweeper", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=here,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
