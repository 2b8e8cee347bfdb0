"""Whole runs of `python -m sweeper` on the fake engine, and what stops them."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.shell.conftest import Sweeper, engines_of, gone, wait_until

from sweeper.core.outcome import Attempt, HostFault, Measured
from sweeper.record.attempts import Attempts
from sweeper.server import free_port

SLOW = ("engine.params.boot_s=1000",)
"""Half a second for a boot: long enough to be stopped in."""


def recorded(sweeper: Sweeper) -> list[Attempt]:
    return Attempts(sweeper.attempts).all()


def written(sweeper: Sweeper) -> dict[str, int]:
    """Return when each attempt was written, by its folder."""
    files = sweeper.attempts.glob("*/attempt.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in files}


def json_of(done: subprocess.CompletedProcess[str]) -> Any:
    """Return the one JSON document that standard output must be, and nothing beside it."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_for_boot(sweeper: Sweeper, number: int) -> psutil.Process:
    """Return the engine of this attempt as soon as it has printed its first line."""
    log = sweeper.attempts / f".{number:04d}.partial" / "engine.log"
    wait_until(lambda: log.exists() and log.stat().st_size, f"the log of attempt {number}")
    (engine,) = engines_of(sweeper.mark)
    return engine


def nothing_is_half_done(sweeper: Sweeper) -> bool:
    return not list(sweeper.attempts.glob(".*")) and engines_of(sweeper.mark) == []


# ---- A study that ends well --------------------------------------------------------------------


def test_a_study_ends_with_a_front_and_says_where_things_are(finished: Sweeper) -> None:
    folder = finished.studies / finished.study
    assert "SIMULATED" in finished.printed
    assert "the budget of boots is spent: 6 boots in this run, 6 in all" in finished.printed
    assert str(folder / "report.html") in finished.printed
    front = json.loads((folder / "front.json").read_text())
    assert front
    assert {row["attempt"] for row in front} <= set(range(1, 7))
    assert (folder / "front.png").stat().st_size > 0
    assert nothing_is_half_done(finished)
    assert json.loads((folder / "started.json").read_text()) == {}


def test_the_attempts_of_a_study_are_whole_and_different(finished: Sweeper) -> None:
    attempts = recorded(finished)
    assert [each.number for each in attempts] == [1, 2, 3, 4, 5, 6]
    assert len({each.point for each in attempts}) == 6
    assert all(each.engine["simulated"] is True for each in attempts)
    assert all((finished.attempts / f"{n:04d}" / "engine.log").stat().st_size for n in range(1, 7))
    # The demonstration enqueues what works, what cannot fit, and the longest that does.
    assert [isinstance(each.outcome, Measured) for each in attempts[:3]] == [True, False, True]


def test_show_prints_the_front_and_the_trials(finished: Sweeper) -> None:
    shown = json_of(finished("show", "output=json"))
    assert [row["attempt"] for row in shown["trials"]] == [1, 2, 3, 4, 5, 6]
    front = [row["attempt"] for row in shown["front"]]
    assert sorted(front) == [row["attempt"] for row in shown["trials"] if row["on_front"]]
    assert "oom_kv_cache" in finished("show").stdout


def test_a_plan_after_a_run_knows_what_was_booted(finished: Sweeper) -> None:
    plan = json_of(finished("plan", "output=json"))
    assert plan["boots_done"] == 6
    assert plan["points_out_by_boots"]["booted already"] == 6
    assert any(reason.startswith("memory: ") for reason in plan["points_out_by_boots"])
    booted = [dict(each.point) for each in recorded(finished)]
    assert not any(each["point"] in booted for each in plan["first"])
    assert all(each["memory_needed_bytes"] > 400 * 2**20 for each in plan["first"])


def test_a_reader_of_show_that_goes_away_is_no_traceback(finished: Sweeper) -> None:
    for output in ("text", "json"):
        showing = finished.start("show", f"output={output}")
        assert showing.stdout is not None
        assert showing.stderr is not None
        showing.stdout.close()
        assert showing.stderr.read() == ""
        assert showing.wait() == 1


def test_export_writes_the_recipes_that_were_asked_for(finished: Sweeper) -> None:
    front = [row["attempt"] for row in json_of(finished("show", "output=json"))["front"]]
    (fastest,) = json_of(finished("export", "export.pick=fastest", "output=json"))["recipes"]
    assert Path(fastest).name == f"fake_demo-{front[0]:04d}.sh"
    assert "SIMULATED" in Path(fastest).read_text()
    infeasible = finished("export", "export.trial=2")
    assert infeasible.returncode == 2
    assert "attempt 2 was not measured" in infeasible.stderr


def test_the_recipe_of_a_winner_starts_and_answers(finished: Sweeper) -> None:
    (recipe, *_) = sorted((finished.studies / finished.study / "recipes").glob("*.sh"))
    port = free_port()
    serving = subprocess.Popen(
        ["bash", str(recipe)],
        env={**finished.environment(), "PORT": str(port)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        assert any(f"ready on http://127.0.0.1:{port}" in line for line in serving.stdout)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"prompt": "go", "max_tokens": 3},
            trust_env=False,
        )
        assert answer.json()["usage"]["completion_tokens"] == 3
        serving.terminate()
        assert serving.wait(timeout=20) == 0
    finally:
        serving.kill()
        serving.communicate()


def test_another_space_under_the_same_name_is_refused(finished: Sweeper) -> None:
    before = written(finished)
    refused = finished("budget.boots=7", "space.n_max=[0,2]", "workload.max_tokens=17")
    assert refused.returncode == 2
    assert "space.n_max was [0, 2, 4, 8] and is now [0, 2]" in refused.stderr
    assert "workload.max_tokens was 16 and is now 17" in refused.stderr
    assert "name=OTHER" in refused.stderr
    assert written(finished) == before


# ---- Going on ----------------------------------------------------------------------------------


def test_a_larger_budget_goes_on_where_the_study_ended(sweeper: Sweeper) -> None:
    first = json_of(sweeper("budget.boots=2", "output=json"))
    assert (first["attempts"], first["boots_of_this_run"]) == (2, 2)
    before = written(sweeper)
    again = json_of(sweeper("budget.boots=4", "output=json"))
    assert (again["attempts"], again["boots_of_this_run"]) == (4, 2)
    assert again["ended"] == "the budget of boots is spent"
    assert sum(again["outcomes"].values()) == 4
    assert written(sweeper).items() >= before.items()
    assert len({each.point for each in recorded(sweeper)}) == 4


def test_a_kill_in_the_middle_of_a_trial_loses_no_other_and_leaves_no_engine(
    sweeper: Sweeper,
) -> None:
    command = ("budget.boots=4", *SLOW)
    killed = sweeper.start(*command)
    engine = wait_for_boot(sweeper, 3)
    killed.kill()
    _, said = killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert engine.is_running(), "nobody was there to end it"
    before = written(sweeper)
    assert set(before) == {"0001", "0002"}
    again = sweeper(*command)
    assert again.returncode == 0, again.stderr
    assert "ended 1 engine processes that an earlier run left behind" in again.stderr
    assert gone(engine.pid)
    assert written(sweeper).items() > before.items()
    attempts = recorded(sweeper)
    assert len({each.point for each in attempts}) == len(attempts) == 4
    interrupted = re.search(r"\[3/4\] attempt 3: (.*)", said)
    assert interrupted is not None
    assert interrupted[1] == str(attempts[2].point), "the killed point is booted first"
    assert nothing_is_half_done(sweeper)


def test_ctrl_c_ends_the_engine_and_keeps_what_is_finished(sweeper: Sweeper) -> None:
    stopped = sweeper.start("budget.boots=5", *SLOW)
    engine = wait_for_boot(sweeper, 2)
    before = written(sweeper)
    stopped.send_signal(signal.SIGINT)
    said, complaints = stopped.communicate(timeout=60)
    assert stopped.returncode == 130, complaints
    assert "Traceback" not in complaints
    assert "go on     " in said
    assert said.rstrip().endswith(f"-m sweeper +study={sweeper.study}")
    assert gone(engine.pid)
    assert written(sweeper) == before
    assert len(before) == 1
    assert nothing_is_half_done(sweeper)


def test_a_second_run_at_the_same_time_is_refused_and_the_first_can_be_terminated(
    sweeper: Sweeper,
) -> None:
    # The boot lasts longer than the second run takes to be refused.
    running = sweeper.start("engine.params.boot_s=40000")
    engine = wait_for_boot(sweeper, 1)
    refused = sweeper("engine.params.boot_s=40000")
    assert refused.returncode == 2
    assert f"is being run by process {running.pid}" in refused.stderr
    assert engine.is_running()
    running.terminate()
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted: 0 boots in this run, 0 in all" in said
    assert gone(engine.pid)
    assert nothing_is_half_done(sweeper)


# ---- What no point can mend --------------------------------------------------------------------


def test_a_fault_of_the_host_stops_the_study(sweeper: Sweeper) -> None:
    stopped = sweeper("+engine.params.ending=host-fault", "output=json")
    assert stopped.returncode == 3, stopped.stderr
    said = json.loads(stopped.stdout)
    assert said["outcomes"] == {"host_fault": 1}
    assert "The driver does not match" in said["ended"]
    (attempt,) = recorded(sweeper)
    assert isinstance(attempt.outcome, HostFault)


def test_a_model_that_is_missing_is_said_before_anything_is_booted(sweeper: Sweeper) -> None:
    refused = sweeper("model.path=/nowhere/model.gguf")
    assert refused.returncode == 2
    assert "there is no file /nowhere/model.gguf" in refused.stderr
    assert recorded(sweeper) == []


# ---- MLflow ------------------------------------------------------------------------------------


def test_a_tracked_study_is_in_mlflow_and_prints_the_same(sweeper: Sweeper) -> None:
    store = sweeper.folder / "mlruns" / "mlflow.db"
    store.parent.mkdir()
    uri = f"tracking.uri=sqlite:///{store}"
    said = json_of(sweeper("tracking=local", uri, "budget.boots=2", "output=json"))
    assert (said["attempts"], said["tracking_failures"]) == (2, 0)
    with sqlite3.connect(store) as database:
        runs = database.execute("SELECT name, status FROM runs").fetchall()
    database.close()
    assert len(runs) == 3, "one for the study and one for each attempt"
    assert "RUNNING" not in {status for _, status in runs}


def test_a_store_that_mlflow_cannot_write_costs_no_trial(sweeper: Sweeper) -> None:
    uri = "tracking.uri=sqlite:////proc/x.db"
    said = json_of(sweeper("tracking=local", uri, "budget.boots=2", "output=json"))
    assert said["attempts"] == len(recorded(sweeper)) == 2
    assert said["tracking_failures"] > 0
