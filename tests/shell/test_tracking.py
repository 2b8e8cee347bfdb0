from __future__ import annotations

import base64
import json
import logging
import math
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
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
from sweeper.record.mlflow_design import (
    LOG_LIMIT_BYTES,
    ended_ms,
    head_and_tail,
    metrics_of,
    note_of,
    run_name,
    views,
)
from sweeper.record.mlflow_store import Store, Subject
from sweeper.record.tracking import (
    FinalReport,
    Progress,
    Tracking,
    checked_uri,
    without_password,
)

# MLflow 3.17 uses what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

PATIENCE_S = 300.0
AXES = ("context", "cache_type_k", "n_max")
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


def study_run_of(client: Any, study: str) -> Any:
    (found,) = (run for run in runs_of(client, study) if run.data.tags["kind"] == "study")
    return found


def run_of(client: Any, study: str, number: int) -> Any:
    (run,) = (
        run for run in runs_of(client, study) if run.data.tags.get("sweeper.attempt") == str(number)
    )
    return run


def artifacts_of(client: Any, run: Any, folder: str | None = None) -> set[str]:
    return {each.path for each in client.list_artifacts(run.info.run_id, folder)}


def logged(uri: str, study: str, *attempts: tuple[Attempt, Path]) -> int:
    tracking = Tracking.open(uri, study, FACTS, axes=AXES)
    for attempt, folder in attempts:
        tracking.attempt(attempt, folder)
    return tracking.close(PATIENCE_S)


def test_importing_the_module_does_not_import_mlflow() -> None:
    script = "import sys, sweeper.record.sync; sys.exit('mlflow' in sys.modules)"
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
    assert "mlflow.parentRunId" not in tags  # Nested runs are shown collapsed.
    assert run.info.run_name == "0001 32768 f16 3"
    assert (tags["study"], tags["outcome"], tags["kind"]) == (study, "measured", "measured")
    assert (tags["engine"], tags["model"], tags["hardware"]) == ("vllm", "qwen3.6-27b", "rtx4090")
    assert (tags["on_front"], tags["confirmed"]) == ("false", "false")
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
    assert "1536 MiB larger" in first.data.tags["reason"]
    note = first.data.tags["mlflow.note.content"]
    assert "1536 MiB larger" in note
    assert "loading\nready" in note  # the end of its log
    assert f"runs/{first.info.run_id}/artifacts/engine.log" in note
    assert first.info.status == "FAILED"
    assert second.data.metrics == {}
    assert second.info.status == "FAILED"


@pytest.mark.usefixtures("quiet")
def test_a_second_process_continues_the_same_study_and_writes_no_attempt_twice(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    one, two = measured_attempt(1), oom_attempt(2)
    folders = commit(one), commit(two)
    assert logged(uri, study, (one, folders[0])) == 0
    before = study_run_of(client, study)
    assert before.info.status == "FINISHED"
    assert logged(uri, study, (one, folders[0]), (two, folders[1])) == 0
    after = study_run_of(client, study)
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
    parent = study_run_of(client, study)
    client.update_run(parent.info.run_id, status="RUNNING")
    half = client.create_run(
        parent.info.experiment_id,
        tags={"sweeper.role": "attempt", "sweeper.attempt": "1", "sweeper.sweep": study},
    )
    assert logged(uri, study, (attempt, folder)) == 0
    run = run_of(client, study, 1)
    assert run.info.run_id == half.info.run_id
    assert run.info.status == "FINISHED"
    assert artifacts_of(client, run) == {"attempt.json", "engine.log"}
    assert study_run_of(client, study).info.run_id == parent.info.run_id


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
    tracking.front([2], [1, 2])
    tracking.attempt(two, commit(two))
    assert tracking.close(PATIENCE_S) == 0
    first, second = (run_of(client, study, number).data.tags for number in (1, 2))
    assert (first["on_front"], second["on_front"]) == ("false", "true")
    assert (first["confirmed"], second["confirmed"]) == ("true", "true")
    assert first["mlflow.runColor"] != second["mlflow.runColor"]


@pytest.mark.usefixtures("quiet")
def test_the_run_of_the_study_shows_how_the_study_went_and_what_it_found(
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
        folders=[recipes],
        host=Pairs(gpu="RTX 4090"),
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
                    at_ms=1000 * number,
                    best_decode_tok_s=best,
                )
            )
        tracking.finish(report)
        assert tracking.close(PATIENCE_S) == 0
    parent = study_run_of(client, study)
    assert parent.info.run_name == study
    assert parent.data.tags["seed"] == "7"
    assert parent.data.tags["stopped_by"] == "budget"
    assert parent.data.metrics["boots"] == 2
    assert "best_proven_context_tokens" not in parent.data.metrics
    history = client.get_metric_history(parent.info.run_id, "best_decode_tok_s")
    assert {(each.step, each.value) for each in history} == {(2, 40.0)}
    assert len(client.get_metric_history(parent.info.run_id, "boots")) == 2
    assert artifacts_of(client, parent) == {"front.json", "front.png", "host.json", "recipes"}
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
    assert "**SIMULATED**" in client.get_experiment_by_name(study).tags["mlflow.note.content"]


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
    tracking.drain(PATIENCE_S)
    assert tracking.close(PATIENCE_S, status="KILLED") == 4
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "could not open the store: FileExistsError" in warnings[0].getMessage()
    assert "attempts on disk are complete" in warnings[0].getMessage()


def test_a_store_that_was_away_gets_everything_once_it_is_back(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    tries: list[int] = []

    def opened() -> Store:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("connection refused")
        return Store.open(uri, study, Subject(study=study, sweep=study))

    attempt = measured_attempt(1)
    tracking = Tracking(opened)
    tracking.attempt(attempt, commit(attempt))
    assert not tracking.drain(PATIENCE_S)
    assert not tracking.drain(PATIENCE_S)  # It is left alone for a while, and not waited for.
    assert len(tries) == 1
    assert tracking.close(PATIENCE_S) == 0
    assert run_of(client, study, 1).data.metrics["decode_tok_s"] == 40.0
    assert tracking.added == 1
    assert tracking.seconds_per_attempt is not None


class Moody(Store):
    """A store that fails what it is told to, and says whether it is there."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self.done: list[int] = []

    def answers(self) -> bool:
        return self.there

    def mark(
        self,
        front: frozenset[int],
        confirmed: frozenset[int],
        holds: Mapping[int, tuple[str, str]],
    ) -> None:
        if 1 in front and not self.done:
            self.done.append(0)
            raise ValueError("no")
        self.done.append(max(front))

    def end(self, status: str) -> None:
        pass


def test_what_a_store_refuses_is_counted_and_the_rest_goes_on() -> None:
    store = Moody(there=True)
    tracking = Tracking(lambda: store)
    tracking.front([1])
    tracking.front([2])
    assert tracking.drain(PATIENCE_S)
    assert store.done == [0, 2]
    assert tracking.close(PATIENCE_S) == 1


def test_what_a_store_that_goes_away_missed_comes_first_when_it_is_back() -> None:
    store = Moody(there=False)
    tracking = Tracking(lambda: store)
    tracking.front([1])
    tracking.front([2])
    assert not tracking.drain(PATIENCE_S)
    assert store.done == [0]
    assert tracking.close(PATIENCE_S) == 0
    assert store.done == [0, 1, 2]


def test_nothing_is_done_but_while_the_caller_waits() -> None:
    opened: list[str] = []

    def open_it() -> Store:
        opened.append(threading.current_thread().name)
        return Moody(there=True)

    tracking = Tracking(open_it)
    tracking.front([2])
    assert not opened
    assert tracking.drain(PATIENCE_S)
    assert opened == ["mlflow"]
    assert tracking.close(PATIENCE_S) == 0


def test_two_sweeps_of_one_name_do_not_mix(
    uri: str, client: Any, study: str, commit: Callable[[Attempt], Path]
) -> None:
    for sweep, context in (("aaaa", 32768), ("bbbb", 65536)):
        attempt = measured_attempt(1, context=context)
        folder = commit(attempt)
        tracking = Tracking.open(uri, study, FACTS, sweep=sweep, axes=AXES)
        tracking.attempt(attempt, folder)
        assert tracking.close(PATIENCE_S) == 0
        folder.rename(folder.with_name(sweep))
    runs = runs_of(client, study)
    assert len(runs) == 4
    contexts = {
        run.data.tags["sweeper.sweep"]: run.data.params["context"]
        for run in runs
        if run.data.params
    }
    assert contexts == {"aaaa": "32768", "bbbb": "65536"}
    tags = client.get_experiment_by_name(study).tags
    assert {"mlflow.sharedViewState.trials", "mlflow.sharedViewState.trials-bbbb"} <= set(tags)


def test_a_run_whose_process_is_gone_is_ended_by_the_next_that_opens_the_experiment(
    uri: str, client: Any, study: str
) -> None:
    tracking = Tracking.open(uri, study, FACTS, sweep="aaaa")
    assert tracking.drain(PATIENCE_S)
    run = study_run_of(client, study)
    assert run.info.status == "RUNNING"
    host, pid, _ = run.data.tags["sweeper.process"].split()
    # A process of another time had this id.
    client.set_tag(run.info.run_id, "sweeper.process", f"{host} {pid} 12345.00")
    assert Tracking.open(uri, study, FACTS, sweep="bbbb").close(PATIENCE_S) == 0
    assert client.get_run(run.info.run_id).info.status == "KILLED"
    assert tracking.close(PATIENCE_S) == 0


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


def test_figures_of_further_loads_are_told_apart_by_their_names() -> None:
    figures = metrics_of(measured_attempt(1, decode_tok_s=40.0))
    assert figures["ladder/decode_tok_s_at_8192_tokens"] == 36.0
    assert not any("short" in key for key in figures)


def test_figures_are_rounded_to_what_a_table_can_show() -> None:
    attempt = measured_attempt(1, decode_tok_s=123.456789)
    assert metrics_of(attempt)["decode_tok_s"] == 123.46


def test_the_name_of_a_run_says_what_was_measured_again() -> None:
    again = measured_attempt(9, confirms=3)
    assert run_name(again, AXES) == "0009 again: 0003, 32768 f16 3"
    assert ended_ms(again) - ended_ms(measured_attempt(9)) == 0


def test_a_saved_view_holds_columns_order_and_charts_in_the_form_of_mlflow() -> None:
    made = views(("context", "acc%"))
    assert all(len(each) < 5000 for each in made.values())  # what MLflow's table can hold
    envelope = json.loads(made["trials"])
    assert set(envelope) == {"name", "createdAt", "updatedAt", "state"}
    packed = envelope["state"].removeprefix("deflate;")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert state["orderByKey"] == "metrics.`counted_tok_s`"
    assert state["selectedColumns"][0] == "metrics.`decode_tok_s`"
    assert state["selectedColumns"][-2:] == ["params.`context`", "params.`acc_`"]
    sections = {each["uuid"] for each in state["compareRunSections"]}
    assert {each["metricSectionId"] for each in state["compareRunCharts"]} == sections


def test_passwords_in_addresses_are_hidden() -> None:
    said = "cannot reach https://me:secret@server:5000/api and http://tok@h"
    assert without_password(said) == "cannot reach https://***@server:5000/api and http://***@h"
