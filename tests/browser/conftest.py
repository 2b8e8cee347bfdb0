"""What the browser's tests share: a browser, an MLflow server, and a study in it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.chromium import Chromium
from tests.browser.simulated import STUDY, write_study

from sweeper.cli import main
from sweeper.server import free_port

SCREENSHOTS = Path(__file__).parent / "screenshots"
DEADLINE_S = 90.0
BOOTS = 9
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    """Yield a browser in which MLflow was opened before; skip where there is none."""
    binary = next((found for each in NAMES if (found := shutil.which(each))), None)
    if binary is None:
        pytest.skip(f"no browser was found ({', '.join(NAMES)}); Debian: apt install chromium")
    with Chromium(binary) as running:
        # MLflow opens its assistant by itself the first time that a browser sees it, and only then.
        running.call(
            "Page.addScriptToEvaluateOnNewDocument",
            source="try { localStorage.setItem("
            "'mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true') } catch {}",
        )
        yield running


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of studies with a simulated one in it."""
    folder = tmp_path_factory.mktemp("studies")
    write_study(folder, boots=BOOTS)
    return folder


@pytest.fixture(scope="module")
def link(studies: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address that `ui` says when it is ready; it is ended by Ctrl-C, as by a person."""
    folder = tmp_path_factory.mktemp("ui")
    log = folder / "log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "sweeper", "ui", f"+study={STUDY}", f"studies_dir={studies}",
                "tracking=local", f"tracking.uri=sqlite:///{folder}/mlflow.db",
                f"ui.port={free_port()}",
            ],
            cwd=folder, stdout=said, stderr=said, start_new_session=True,
            # A shell that runs the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it takes no lock
        )  # fmt: skip
        try:
            yield _ready(process, log)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0, log.read_text()
            assert "Traceback" not in log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = re.search(r"MLflow is ready: (\S+)\n", log.read_text())
        if found is not None:
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    pytest.fail(f"the UI was not ready within {DEADLINE_S:.0f} s: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def server(link: str) -> str:
    """Return the address of the tracking server that the UI is as well."""
    return link.partition("/#")[0]


def sweeper(verb: str, studies: Path, *overrides: str) -> str:
    """Return what a verb prints about the simulated study.

    In this process, where mlflow is imported already.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([verb, f"+study={STUDY}", f"studies_dir={studies}", *overrides])
    assert code == 0, said.getvalue()
    return said.getvalue()
