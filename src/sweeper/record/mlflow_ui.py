"""The MLflow UI on a study: as lean as it goes, and opened where the trials are."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sqlite3
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from pathlib import Path

import psutil

from sweeper.record.mlflow_design import TRIALS, view_address
from sweeper.record.tracking import without_password

READY_WITHIN_S = 120.0
_POLL_S = 0.2


def ui_command(uri: str, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command and environment of the MLflow UI, as lean as it goes.

    MLflow's defaults start 16 processes and take 3 GB; these settings start 2 and take 0.5 GB.
    """
    command = (
        sys.executable, "-m", "mlflow", "server",
        "--backend-store-uri", uri,
        "--host", "127.0.0.1",
        "--port", str(port),
        "--workers", "1",
        # Ctrl-C reaches the server twice, from the terminal and from MLflow: it complains of that.
        "--uvicorn-opts", "--log-level critical --timeout-graceful-shutdown 1",
    )  # fmt: skip
    return command, {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }


def local_link(uri: str, port: int, study: str, sweep: str) -> str:
    """Return the address of a study's trials in the UI on a local database."""
    path = uri.removeprefix("sqlite:///")
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store,
    ):
        found = store.execute(
            "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'active'",
            (study,),
        ).fetchone()
        if found is not None:
            tags = store.execute(
                "SELECT key, 1 FROM experiment_tags WHERE experiment_id = ?", found
            )
            return link(f"http://127.0.0.1:{port}", str(found[0]), dict(tags), sweep)
    return f"http://127.0.0.1:{port}"


def is_behind(uri: str, study: str, sweep: str, attempts: int) -> bool:
    """Tell whether a local database lacks attempts of a sweep, or has it running still."""
    path = uri.removeprefix("sqlite:///")
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
            runs = dict(
                store.execute(
                    "SELECT r.run_uuid, r.status FROM runs r "
                    "JOIN experiments e ON e.experiment_id = r.experiment_id "
                    "JOIN tags t ON t.run_uuid = r.run_uuid "
                    "WHERE e.name = ? AND e.lifecycle_stage = 'active' "
                    "AND r.lifecycle_stage = 'active' "
                    "AND t.key = 'sweeper.sweep' AND t.value = ?",
                    (study, sweep),
                )
            )
    except sqlite3.Error:
        return True
    return len(runs) < attempts + 1 or "RUNNING" in runs.values()


def remote_link(uri: str, study: str, sweep: str, *, timeout_s: float = 10.0) -> str:
    """Return the address of a study's trials on a tracking server, without its password.

    Where the server cannot be asked it is the server's own address.
    """
    parts = urllib.parse.urlsplit(uri)
    address = without_password(uri.rstrip("/")).replace("***@", "")
    if parts.scheme not in ("http", "https"):
        return address
    query = urllib.parse.urlencode({"experiment_name": study})
    request = urllib.request.Request(  # noqa: S310 - http or https, as seen above
        f"{address}/api/2.0/mlflow/experiments/get-by-name?{query}", headers=_credentials(parts)
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            experiment = json.load(answer)["experiment"]
    except (OSError, ValueError, KeyError):
        return address
    tags = {each["key"]: each["value"] for each in experiment.get("tags", ())}
    return link(address, experiment["experiment_id"], tags, sweep)


def link(address: str, experiment: str, tags: dict[str, object], sweep: str) -> str:
    """Return the address that opens an experiment on the right columns, of this sweep if it can."""
    key = f"{TRIALS}-{sweep}"
    if f"mlflow.sharedViewState.{key}" not in tags:
        key = TRIALS
    return f"{address}/{view_address(experiment, key)}"


def _credentials(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the header that MLflow itself would send: from the environment, else the address."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if token:
        return {"Authorization": f"Bearer {token}"}
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or parts.username
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD") or parts.password
    if not user:
        return {}
    pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this loopback port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def announce_when_ready(port: int, url: str, *, open_it: bool) -> None:
    """Start a small process that says when the UI is ready, opens it if asked, and ends.

    To be called just before this process becomes the server: it is what the other one watches.
    """
    server = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Twice, so that the one that waits is nobody's child: the server would not ask for its end.
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    try:
        if _is_ready(port, server):
            print(f"MLflow is ready: {url}", file=sys.stderr, flush=True)
            if open_it:
                open_browser(url)
    except KeyboardInterrupt:
        pass
    finally:
        os._exit(0)


def _is_ready(port: int, server: int) -> bool:
    """Wait for the server; False once its process is gone or the time is up."""
    deadline = time.monotonic() + READY_WITHIN_S
    # No proxy stands between us and loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            time.sleep(_POLL_S)
    return False


def open_browser(url: str) -> None:
    """Open an address in the user's browser."""
    webbrowser.open(url)


def store_path(uri: str) -> Path:
    """Return the file of a local database."""
    return Path(uri.removeprefix("sqlite:///"))
