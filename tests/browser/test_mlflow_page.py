"""What a person sees who opens MLflow after a study, by a link or on their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.browser.chromium import Chromium
from tests.browser.conftest import BOOTS, SCREENSHOTS, sweeper
from tests.browser.simulated import STUDY, simulated_attempts

from sweeper.core.outcome import Measured

pytestmark = pytest.mark.browser

NOT_OURS = ("/users/current", "favicon", "ResizeObserver loop")
"""What MLflow's own page asks its own server for in vain, and a notice of its layout."""


def complaints(browser: Chromium) -> list[Any]:
    return [
        each
        for each in browser.complaints
        if not any(part in each.url or part in each.text for part in NOT_OURS)
    ]


def follow(browser: Chromium, words: str) -> None:
    """Go where a link with these words leads; MLflow opens those of a description in a new tab."""
    browser.open(
        browser.wait(
            "(a => a && a.href)([...document.querySelectorAll('a')]"
            f".find(a => a.innerText.trim() === {words!r}))"
        )
    )


@pytest.fixture
def client(server: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server)


def contents(client: Any, study: str) -> Any:
    """Return all that a server holds of the study, without what differs by time and chance."""
    experiment = client.get_experiment_by_name(study)
    runs = client.search_runs([experiment.experiment_id])
    said = {
        run.info.run_name: {
            "metrics": run.data.metrics,
            "params": run.data.params,
            "tags": {
                key: value for key, value in run.data.tags.items() if key != "sweeper.process"
            },
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time),
            "files": sorted(each.path for each in client.list_artifacts(run.info.run_id)),
        }
        for run in runs
    }
    (whole,) = (run for run in runs if run.data.tags["kind"] == "study")
    said[study]["steps"] = [
        (each.step, each.value, each.timestamp)
        for each in client.get_metric_history(whole.info.run_id, "best_decode_tok_s")
    ]
    assert len(said) == len(runs)
    return experiment.tags, said


def test_a_server_gets_every_attempt_once_however_often_it_is_synced(
    server: str, studies: Path, tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    shutil.copytree(studies / STUDY, tmp_path / "other")
    other = ("name=other", "tracking=server", "output=json")
    first = json.loads(sweeper("sync", tmp_path, *other))
    before = contents(client, "other")
    assert first["added"] == first["attempts"] == len(before[1]) - 1
    assert first["failures"] == 0
    statuses = {name: run["status"] for name, run in before[1].items()}
    assert statuses.pop("other") == "KILLED"  # Nobody has said how it ended.
    assert set(statuses.values()) == {"FINISHED", "FAILED"}
    again = json.loads(sweeper("sync", tmp_path, *other))
    assert (again["added"], again["failures"]) == (0, 0)
    assert contents(client, "other") == before
    # The store of the UI itself, written without a server, holds the same.
    here = contents(client, STUDY)[1]
    assert {name: run["metrics"] for name, run in here.items() if name != STUDY} == {
        name: run["metrics"] for name, run in before[1].items() if name != "other"
    }
    url = json.loads(sweeper("ui", tmp_path, *other))["url"]
    assert url.startswith(f"{server}/#/experiments/")
    assert url.endswith("viewStateShareKey=trials")


def test_the_link_opens_on_the_trials_with_their_values_fastest_first(
    browser: Chromium, link: str
) -> None:
    browser.open(link)
    measured = [each for each in simulated_attempts(BOOTS) if isinstance(each.outcome, Measured)]
    fastest = max(measured, key=lambda each: each.outcome.decode_tok_s.median)
    columns = ("decode_tok_s", "proven_context_tokens", "acceptance", "outcome", "on_front")
    browser.wait_for_text(*columns, "context", "kv_type", "Trials, fastest first")
    browser.wait_for_text(f"{fastest.outcome.decode_tok_s.median:g}", "8192", "q8_0")
    first = browser.evaluate(
        "[...document.querySelectorAll('.ag-row[row-index=\"0\"]')].map(e => e.innerText).join()"
    )
    browser.screenshot(SCREENSHOTS / "mlflow_trials.png")
    assert f"{fastest.outcome.decode_tok_s.median:g}" in first
    assert complaints(browser) == []


def test_the_charts_show_the_front_and_how_the_search_went(browser: Chromium, link: str) -> None:
    browser.open(f"{link}&compareRunsMode=CHART")
    browser.wait_for_text("The front: decode speed", "proven_context_tokens vs. decode_tok_s")
    # Two clouds of points at least are drawn before one scrolls.
    browser.wait("document.querySelectorAll('.scatterlayer .point').length > 10")
    browser.screenshot(SCREENSHOTS / "mlflow_charts.png")
    assert complaints(browser) == []


def test_what_failed_says_why_within_one_click_from_the_trials(
    browser: Chromium, link: str
) -> None:
    browser.open(link)
    follow(browser, "failed")
    browser.wait_for_text("What failed, and why", "oom_kv_cache", "The kv cache needs")
    browser.screenshot(SCREENSHOTS / "mlflow_failed.png")
    assert complaints(browser) == []


def test_the_page_of_a_failed_trial_explains_it_at_the_top(
    browser: Chromium, link: str, server: str, client: Any
) -> None:
    experiment = client.get_experiment_by_name(STUDY).experiment_id
    run = client.search_runs([experiment], "tags.outcome = 'oom_kv_cache'")[0]
    browser.open(f"{server}/#/experiments/{experiment}/runs/{run.info.run_id}")
    browser.wait_for_text("oom_kv_cache", "The kv cache needs", "shortfall_mib", "Failed")
    browser.screenshot(SCREENSHOTS / "mlflow_failed_trial.png")
    assert complaints(browser) == []


def test_the_report_and_the_recipes_are_one_click_from_the_trials(
    browser: Chromium, link: str
) -> None:
    browser.open(link)
    follow(browser, "report")
    browser.wait_for_text("report.html", "front.json", "recipes")
    browser.wait("document.querySelector('iframe') !== null")
    browser.screenshot(SCREENSHOTS / "mlflow_report.png")
    browser.open(link)
    follow(browser, "recipes")
    browser.wait_for_text(f"{STUDY}-00")
    browser.screenshot(SCREENSHOTS / "mlflow_recipes.png")


def test_who_comes_without_the_link_finds_the_views_one_click_away(
    browser: Chromium, link: str, server: str, client: Any
) -> None:
    experiment = client.get_experiment_by_name(STUDY).experiment_id
    browser.open(f"{server}/#/experiments/{experiment}")
    browser.wait_for_text("SIMULATED", "charts", "trials")
    follow(browser, "trials")
    browser.wait_for_text("decode_tok_s", "proven_context_tokens", "kv_type")
