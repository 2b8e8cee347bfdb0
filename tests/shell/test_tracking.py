from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.examples import (
    broken_attempt,
    fake_engine_facts,
    host_fault_attempt,
    measured_attempt,
    oom_attempt,
    unfit_attempt,
)

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.record.attempts import ENGINE_LOG, Attempts
from sweeper.record.tracking import (
    LOG_LIMIT_BYTES,
    FinalReport,
    Progress,
    Tracking,
    checked_uri,
    head_and_tail,
    metrics_of,
    note_of,
)

# MLflow 3.17 uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

PATIENCE_S = 300.0
FACTS = Pairs(engine="vllm", model="qwen3.6-27b", hardware="rtx4090", seed=7)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return one store for all tests: to migrate a new one takes six seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/ml runs/mlflow.db"


@pytest.fixture
def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture
def study(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[Attempt], Path]:
    attempts = Attempts(tmp_path / "attempts")

    def put(attempt: Attempt) -> Path:
        (attempts.begin(attempt.number) / ENGINE_LOG).write_text("loading\nready\n")
        return attempts.commit(attempt)

    return put


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which the tracking warned of anything."""
    yield
    warned = [each.getMessage() for each in caplog.records if each.name.startswith("sweeper")]
    assert warned == []


def runs_of(client: Any, study: str) -> list[Any]:
    experiment = client.get_experiment_by_name(study)
    return list(client.search_runs([experiment.experiment_id]))


def parent_of(client: Any, study: str) -> Any:
    (parent,) = (run for run in runs_of(client, study) if run.data.tags["sweeper.role"] == "parent")
    return parent


def run_of(client: Any, study: str, number: int) -> Any:
    (run,) = (
        run for run in runs_of(client, study) if run.data.tags.get("sweeper.attempt") == str(number)
    )
    return run


def artifacts_of(client: Any, run: Any, folder: str | None = None) -> set[str]:
    return {each.path for each in client.list_artifacts(run.info.run_id, folder)}


def logged(uri: str, study: str, *attempts: tuple[Attempt, Path]) -> int:
    tracking = Tracking.open(uri, study, FACTS)
    for attempt, folder in attempts:
        tracking.attempt(attempt, folder)
    return tracking.close(PATIENCE_S)


def test_importing_the_module_does_not_import_mlflow() -> None:
    script = "import sys, sweeper.record.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.usefixtures("quiet")
def test_a_measured_attempt_is_a_run_with_its_point_figures_and_files(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    attempt = measured_attempt(1, context=32768, started_at="2026-11-29T18:00:00+01:00")
    assert logged(uri, study, (attempt, commit(attempt))) == 0
    run = run_of(client, study, 1)
    assert run.data.params == {"context": "32768", "n_max": "3", "cache_type_k": "f16"}
    assert run.data.metrics == metrics_of(attempt)
    assert run.data.metrics["peak_memory_gib"] == 18.0
    assert run.data.metrics["ttft_ms"] == pytest.approx(210.0)
    tags = run.data.tags
    assert tags["mlflow.parentRunId"] == parent_of(client, study).info.run_id
    assert (tags["outcome"], tags["outcome_kind"]) == ("measured", "measured")
    assert (tags["engine"], tags["model"], tags["hardware"]) == ("vllm", "qwen3.6-27b", "rtx4090")
    assert tags["on_front"] == "false"
    assert "simulated" not in tags
    assert "40.0 tok/s" in tags["mlflow.note.content"]
    assert run.info.status == "FINISHED"
    assert run.info.start_time == 1795971600000  # 17:00 UTC
    assert run.info.end_time - run.info.start_time == 95500
    assert artifacts_of(client, run) == {"attempt.json", "engine.log"}


@pytest.mark.usefixtures("quiet")
def test_a_failed_attempt_has_no_figures_that_it_did_not_show(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    oom, broken = oom_attempt(1), broken_attempt(2)
    assert logged(uri, study, (oom, commit(oom)), (broken, commit(broken))) == 0
    first, second = run_of(client, study, 1), run_of(client, study, 2)
    assert first.data.metrics == {"shortfall_mib": 1536.0}
    assert first.data.tags["outcome"] == "oom_kv_cache"
    assert first.data.tags["phase"] == "kv"
    assert "1536 MiB larger" in first.data.tags["mlflow.note.content"]
    assert first.info.status == "FINISHED"
    assert second.data.metrics == {}
    assert second.info.status == "FAILED"


@pytest.mark.usefixtures("quiet")
def test_a_second_process_continues_the_same_parent_and_writes_no_attempt_twice(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    one, two = measured_attempt(1), oom_attempt(2)
    folders = commit(one), commit(two)
    assert logged(uri, study, (one, folders[0])) == 0
    before = parent_of(client, study)
    assert before.info.status == "FINISHED"
    assert logged(uri, study, (one, folders[0]), (two, folders[1])) == 0
    after = parent_of(client, study)
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert len(runs_of(client, study)) == 3


@pytest.mark.usefixtures("quiet")
def test_runs_that_a_killed_process_left_running_are_completed(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    attempt = measured_attempt(1)
    folder = commit(attempt)
    assert logged(uri, study) == 0
    parent = parent_of(client, study)
    client.update_run(parent.info.run_id, status="RUNNING")
    half = client.create_run(
        parent.info.experiment_id,
        tags={"mlflow.parentRunId": parent.info.run_id, "sweeper.attempt": "1"},
    )
    assert logged(uri, study, (attempt, folder)) == 0
    run = run_of(client, study, 1)
    assert run.info.run_id == half.info.run_id
    assert run.info.status == "FINISHED"
    assert artifacts_of(client, run) == {"attempt.json", "engine.log"}
    assert parent_of(client, study).info.run_id == parent.info.run_id


@pytest.mark.usefixtures("quiet")
def test_the_front_tag_follows_the_front_also_after_a_restart(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    one, two = measured_attempt(1), measured_attempt(2, decode_tok_s=60.0)
    tracking = Tracking.open(uri, study, FACTS)
    tracking.attempt(one, commit(one))
    tracking.front([1])
    assert tracking.close(PATIENCE_S) == 0
    assert run_of(client, study, 1).data.tags["on_front"] == "true"
    tracking = Tracking.open(uri, study, FACTS)
    tracking.front([2])
    tracking.attempt(two, commit(two))
    assert tracking.close(PATIENCE_S) == 0
    assert run_of(client, study, 1).data.tags["on_front"] == "false"
    assert run_of(client, study, 2).data.tags["on_front"] == "true"


@pytest.mark.usefixtures("quiet")
def test_the_parent_shows_how_the_study_went_and_what_it_found(
    uri: str, client: Any, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "run.sh").write_text("#!/bin/sh\n")
    picture = tmp_path / "front.png"
    picture.write_bytes(b"png")
    report = FinalReport(
        front_rows=[{"attempt": 1, "decode_tok_s": 40.0, "acceptance": None}],
        files=[picture, tmp_path / "missing.html"],
        recipes=recipes,
        tags=Pairs(stopped_by="budget"),
    )
    for _ in range(2):  # A resumed study reports again, and the table must not grow.
        tracking = Tracking.open(uri, study, FACTS)
        for number, best in ((1, None), (2, 40.0)):
            tracking.progress(
                Progress(
                    attempt=number,
                    boots=number,
                    infeasible_boots=1,
                    front_size=number - 1,
                    hypervolume=0.0,
                    best_decode_tok_s=best,
                )
            )
        tracking.finish(report)
        assert tracking.close(PATIENCE_S) == 0
    parent = parent_of(client, study)
    assert parent.info.run_name == study
    assert parent.data.tags["seed"] == "7"
    assert parent.data.tags["stopped_by"] == "budget"
    assert parent.data.metrics["boots"] == 2
    assert "best_proven_context_tokens" not in parent.data.metrics
    history = client.get_metric_history(parent.info.run_id, "best_decode_tok_s")
    assert {(each.step, each.value) for each in history} == {(2, 40.0)}
    assert artifacts_of(client, parent) == {"front.json", "front.png", "recipes"}
    assert artifacts_of(client, parent, "recipes") == {"recipes/run.sh"}
    experiment = client.get_experiment_by_name(study)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # load_table looks nowhere else.
    table = client.load_table(experiment.experiment_id, "front.json", [parent.info.run_id])
    assert list(table.columns) == ["attempt", "decode_tok_s", "acceptance"]
    assert table["decode_tok_s"].tolist() == [40.0]


@pytest.mark.usefixtures("quiet")
def test_a_simulated_run_says_so(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    attempt = measured_attempt(1, engine=fake_engine_facts())
    assert logged(uri, study, (attempt, commit(attempt))) == 0
    tags = run_of(client, study, 1).data.tags
    assert tags["simulated"] == "true"
    assert tags["mlflow.note.content"].startswith("**SIMULATED**")


def test_artifacts_lie_beside_the_database(uri: str, client: Any, study: str) -> None:
    assert logged(uri, study) == 0
    beside = Path(uri.removeprefix("sqlite:///")).parent / "artifacts" / study
    assert client.get_experiment_by_name(study).artifact_location == beside.as_uri()


def test_names_that_mlflow_forbids_are_made_allowed(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    attempt = replace(oom_attempt(1), point=Pairs({"acc%": 1}))
    assert logged(uri, study, (attempt, commit(attempt))) == 0
    assert run_of(client, study, 1).data.params == {"acc_": "1"}


def test_a_store_that_cannot_be_opened_costs_one_warning_and_no_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, commit: Callable[[Attempt], Path]
) -> None:
    (tmp_path / "file").write_text("in the way")
    attempt = measured_attempt(1)
    tracking = Tracking.open(f"sqlite:///{tmp_path}/file/mlflow.db", "s", FACTS)
    tracking.attempt(attempt, commit(attempt))
    tracking.front([1])
    assert tracking.close(PATIENCE_S, status="KILLED") == 4
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "could not open the store: FileExistsError" in warnings[0].getMessage()
    assert "attempts on disk are complete" in warnings[0].getMessage()


def test_what_comes_after_the_end_is_counted_not_raised(uri: str, study: str) -> None:
    tracking = Tracking.open(uri, study, FACTS)
    assert tracking.close(PATIENCE_S) == 0
    tracking.front([1])
    assert tracking.close(PATIENCE_S) == 1


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        ("file:./mlruns", "mlruns/mlflow.db"),
        ("./mlruns", "mlruns/mlflow.db"),
        ("mlruns", "mlruns/mlflow.db"),
        ("", "mlruns/mlflow.db"),
        ("file:///data/mlruns", "/data/mlruns/mlflow.db"),
        ("/data/my.db", "/data/my.db"),
        ("sqlite://", "mlruns/mlflow.db"),
        ("sqlite:///:memory:", "mlruns/mlflow.db"),
    ],
)
def test_a_store_that_mlflow_refuses_is_refused_first_with_what_to_write(
    given: str, advised: str
) -> None:
    with pytest.raises(ValueError, match="write sqlite:") as caught:
        Tracking.open(given, "s", FACTS)
    assert f"sqlite:///{Path.cwd() / advised}" in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["http://gpu-box:5000", "postgresql+psycopg2://db/x", "sqlite:////data/mlflow.db"]
)
def test_a_store_that_mlflow_takes_is_taken_as_it_is(uri: str) -> None:
    assert checked_uri(uri) == uri


def test_a_relative_database_is_made_absolute() -> None:
    assert checked_uri("sqlite:///runs/mlflow.db") == f"sqlite:///{Path.cwd()}/runs/mlflow.db"


def test_a_long_log_keeps_whole_lines_of_both_ends_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / ENGINE_LOG
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(200_000)))
    short = head_and_tail(path)
    assert len(short) < LOG_LIMIT_BYTES + 300
    lines = [line for line in short.decode().splitlines() if line]
    assert (lines[0], lines[-1]) == ("line 000000", "line 199999")
    (said,) = (line for line in lines if not line.startswith("line "))
    kept = sum(len(line) + 1 for line in lines if line != said)
    assert f"{path.stat().st_size - kept:,} of 2,400,000 bytes left out" in said


def test_a_figure_that_is_not_finite_is_absent() -> None:
    attempt = broken_attempt(1)
    timings = replace(attempt.timings, boot_s=math.inf)
    assert metrics_of(replace(attempt, timings=timings)) == {}


@pytest.mark.parametrize(
    "attempt", [oom_attempt(), unfit_attempt(), broken_attempt(), host_fault_attempt()]
)
def test_the_note_of_a_failure_explains_it(attempt: Attempt) -> None:
    assert not hasattr(attempt.outcome, "decode_tok_s")
    finding = attempt.outcome.finding
    assert finding.explanation in note_of(attempt)
    assert finding.cause in note_of(attempt)
