"""What the shell's tests share: waiting with a deadline, the fake engine's jobs, whole runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from sweeper.core.launch import Launch
from sweeper.core.pairs import Pairs
from sweeper.core.space import Axis, Space
from sweeper.core.workload import Repeats, Workload
from sweeper.engines import EngineOptions, ModelFacts
from sweeper.engines.fake import Fake
from sweeper.server import TOKEN_VARIABLE, Registry, free_port
from sweeper.trial import Job

MARK = "SWEEPER_TEST"
"""Set in the environment of all that a test starts, so that no other's process is taken for it."""

FAST: dict[str, Any] = {"boot_s": 0.0, "time_scale": 50.0}

MODEL = ModelFacts(
    name="demo", path="/models/demo", served_name="demo", size_bytes=0, sha256="0" * 64
)

SHORT = Workload(
    name="short", prompt="Once upon a time there was", max_tokens=16,
    repeats=Repeats(warmup_min=1, warmup_max=1, least=2, most=2),
    proof_answer_tokens=8, request_timeout_s=60.0, silence_timeout_s=30.0,
)  # fmt: skip


def wait_until(done: Callable[[], Any], what: str, *, deadline_s: float = 30.0) -> Any:
    """Return what `done` returns once that is true; fail when the deadline passes first."""
    deadline = time.monotonic() + deadline_s
    while not (found := done()):
        if time.monotonic() >= deadline:
            pytest.fail(f"waited {deadline_s:.0f} s in vain for: {what}")
        time.sleep(0.01)
    return found


def gone(pid: int) -> bool:
    """Tell whether no process with this id runs; a zombie runs no more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def engines_of(mark: str) -> list[psutil.Process]:
    """Return every living process that sweeper started under this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get(MARK) == mark and TOKEN_VARIABLE in environment:
            found.append(process)
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """Yield a mark for a test's processes; fail if one of them is left, and end it."""
    own = uuid.uuid4().hex
    yield own
    left = engines_of(own)
    for process in left:
        process.kill()
    assert not left, "the test left engines behind"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "started.json")


def fake_launch(mark: str, *, port: int | None = None, **params: Any) -> Launch:
    """Return the fake engine's process for these settings; timeouts are options of their own."""
    limits = {
        name: params.pop(name)
        for name in ("boot_timeout_s", "stop_timeout_s", "memory_limit_bytes")
        if name in params
    }
    options = EngineOptions(env=Pairs({MARK: mark}), **{"boot_timeout_s": 30.0, **limits})
    fake = Fake()
    settings = fake.settings({**FAST, **params})
    return fake.launch(settings, MODEL, options, port if port is not None else free_port())


def python_launch(mark: str, script: str, *, port: int | None = None, **changes: Any) -> Launch:
    """Return a process that runs a few lines of Python."""
    fields: dict[str, Any] = {"boot_timeout_s": 30.0, **changes}
    return Launch(
        argv=(sys.executable, "-c", script),
        env=Pairs({MARK: mark}),
        host="127.0.0.1",
        port=port if port is not None else free_port(),
        health_path="/health",
        **fields,
    )


def fake_job(
    *,
    axes: tuple[Axis, ...] = (
        Axis(name="context", values=(512,), ordered=True, sets=("context",)),
    ),
    workload: Workload = SHORT,
    env: Pairs | None = None,
    boot_timeout_s: float = 30.0,
    stop_timeout_s: float = 5.0,
    python: str | None = None,
    memory_limit_bytes: int | None = None,
    space: Space | None = None,
    **params: Any,
) -> Job:
    """Return a job on the fake engine; what is no part of a job is a setting of the engine."""
    options = EngineOptions(
        python=python if python is not None else sys.executable,
        env=env if env is not None else Pairs(),
        boot_timeout_s=boot_timeout_s,
        stop_timeout_s=stop_timeout_s,
        first_request_timeout_s=workload.silence_timeout_s,
        memory_limit_bytes=memory_limit_bytes,
    )
    return Job(
        study="shell",
        engine=Fake(),
        params={**FAST, **params},
        options=options,
        models={None: MODEL},
        space=space if space is not None else Space(axes=axes),
        workload=workload,
        hardware=Pairs(hardware="invented"),
        host=Pairs(cpu="any"),
    )


SMALL = (
    "workload.repeats.least=2",
    "workload.repeats.most=2",
    "workload.repeats.warmup_max=1",
    "workload.max_tokens=16",
    "workload.proof_answer_tokens=8",
    "confirm.rounds=0",
    "engine.params.boot_s=0",
    "engine.params.time_scale=100",
)
"""Overrides that make the demonstration study quick."""


@dataclass(kw_only=True)
class Sweeper:
    """`python -m sweeper` in a folder of its own, with a mark on all that it starts."""

    folder: Path
    mark: str
    study: str = "fake_demo"
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    printed: str = ""
    """What the run of the `finished` study printed."""

    @property
    def studies(self) -> Path:
        return self.folder / "studies"

    @property
    def attempts(self) -> Path:
        return self.studies / self.study / "attempts"

    def command(self, *arguments: str) -> list[str]:
        """Return the command line; a verb comes first, or an override."""
        verb = [arguments[0]] if arguments and "=" not in arguments[0] else []
        rest = arguments[len(verb) :]
        return [
            sys.executable, "-m", "sweeper", *verb, f"+study={self.study}",
            f"studies_dir={self.studies}", *SMALL, *rest,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "SWEEPER_CONF"}
        return {
            **kept,
            MARK: self.mark,
            "SWEEPER_CACHE": str(self.folder / "cache"),
            "COLUMNS": "200",
        }

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run to the end and return the exit code and both outputs."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it and return the process; it is killed at the end if it still runs."""
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that runs the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it takes no lock
        )
        self.running.append(process)
        return process

    def close(self) -> None:
        """End what a failed test left, sweeper and engines."""
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()
        left = engines_of(self.mark)
        for each in left:
            each.kill()
        assert not left, "the test left engines behind"


@pytest.fixture
def sweeper(tmp_path: Path) -> Iterator[Sweeper]:
    """Yield a sweeper with a folder of its own; fail if an engine is left behind."""
    made = Sweeper(folder=tmp_path, mark=uuid.uuid4().hex)
    yield made
    made.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeper]:
    """Yield a sweeper whose study has ended, for tests that only read it."""
    made = Sweeper(folder=tmp_path_factory.mktemp("finished"), mark=uuid.uuid4().hex)
    done = made("budget.boots=6")
    assert done.returncode == 0, done.stderr
    made.printed = done.stdout
    yield made
    made.close()
