"""Where MLflow is to be opened: on which experiment, on which columns, with whose credentials."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sweeper.record.mlflow_ui import is_behind, is_free, link, local_link, remote_link, ui_command
from sweeper.record.sync import KILLED, remember_end, sweep_of

VIEW = "mlflow.sharedViewState.trials"


class Server(HTTPServer):
    """A tracking server that knows one experiment, and who asked."""

    asked: list[tuple[str, str | None]]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append((self.path, self.headers["Authorization"]))
        known = self.path.endswith("experiment_name=mine")
        body = {"experiment": {"experiment_id": "7", "tags": [{"key": VIEW, "value": ""}]}}
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body if known else {}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for each in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{each}", raising=False)
    with Server(("127.0.0.1", 0), _Handler) as made:
        made.asked = []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_remote_study_is_linked_by_its_experiment_and_view(server: Server) -> None:
    uri = f"http://127.0.0.1:{server.server_port}"
    assert remote_link(uri, "mine", "") == (
        f"{uri}/#/experiments/7/runs?workflowType=machine_learning&viewStateShareKey=trials"
    )
    assert server.asked[-1][1] is None
    assert remote_link(uri, "other", "") == uri


def test_credentials_come_from_the_environment_and_are_not_in_the_link(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.server_port
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    remote_link(f"http://127.0.0.1:{port}", "mine", "")
    assert server.asked[-1][1] == "Basic bWU6c2VjcmV0"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token")
    said = remote_link(f"http://me:secret@127.0.0.1:{port}/", "mine", "")
    assert server.asked[-1][1] == "Bearer token"
    assert said.startswith(f"http://127.0.0.1:{port}/#/experiments/7/")


def test_a_server_that_does_not_answer_is_named_by_its_address_without_its_password() -> None:
    assert remote_link("http://me:secret@127.0.0.1:9/", "mine", "") == "http://127.0.0.1:9"


def test_of_several_sweeps_the_view_of_the_own_one_is_opened() -> None:
    tags: dict[str, object] = {VIEW: "", f"{VIEW}-bbbb": ""}
    assert link("http://h", "1", tags, "bbbb").endswith("viewStateShareKey=trials-bbbb")
    assert link("http://h", "1", tags, "aaaa").endswith("viewStateShareKey=trials")


def test_a_local_store_that_holds_less_than_the_folder_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    uri = f"sqlite:///{path}"
    assert is_behind(uri, "mine", "aaaa", 1)
    with sqlite3.connect(path) as store:
        store.executescript(
            """
            CREATE TABLE experiments (experiment_id, name, lifecycle_stage);
            CREATE TABLE experiment_tags (experiment_id, key);
            CREATE TABLE runs (run_uuid, experiment_id, status, lifecycle_stage);
            CREATE TABLE tags (run_uuid, key, value);
            INSERT INTO experiments VALUES (3, 'mine', 'active');
            INSERT INTO runs VALUES ('study', 3, 'RUNNING', 'active');
            INSERT INTO runs VALUES ('one', 3, 'FINISHED', 'active');
            INSERT INTO tags VALUES ('study', 'sweeper.sweep', 'aaaa');
            INSERT INTO tags VALUES ('one', 'sweeper.sweep', 'aaaa');
            """
        )
    assert is_behind(uri, "mine", "aaaa", 1)  # Its run still says that it goes on.
    with sqlite3.connect(path) as store:
        store.execute("UPDATE runs SET status = 'FINISHED'")
    store.close()
    assert not is_behind(uri, "mine", "aaaa", 1)
    assert is_behind(uri, "mine", "aaaa", 2)
    assert is_behind(uri, "mine", "bbbb", 1)
    assert local_link(uri, 5000, "mine", "aaaa").startswith(
        "http://127.0.0.1:5000/#/experiments/3/"
    )
    assert local_link(uri, 5000, "other", "aaaa") == "http://127.0.0.1:5000"


def test_a_port_that_somebody_has_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_free(taken.getsockname()[1])


def test_the_ui_is_lean_and_listens_on_loopback_only() -> None:
    command, environment = ui_command("sqlite:////a.db", 5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--workers") + 1] == "1"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_a_sweep_keeps_its_name_and_its_end(tmp_path: Path) -> None:
    first = sweep_of(tmp_path)
    remember_end(tmp_path, *KILLED)
    kept = sweep_of(tmp_path)
    assert (kept["sweep"], kept["status"]) == (first["sweep"], "KILLED")
    (tmp_path / "other").mkdir()
    assert sweep_of(tmp_path / "other")["sweep"] != first["sweep"]
