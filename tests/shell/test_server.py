from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.shell.conftest import (
    MARK,
    MODEL,
    engines_of,
    fake_launch,
    gone,
    python_launch,
    wait_until,
)

from sweeper.core.launch import Death, Ended, Launch
from sweeper.core.pairs import Pairs
from sweeper.engines import EngineOptions
from sweeper.engines.fake import Fake
from sweeper.server import (
    TOKEN_VARIABLE,
    Registry,
    Server,
    free_port,
    serving,
    terminating_as_interrupt,
)


def nobody_listens(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def end_of(launch: Launch, tmp_path: Path, registry: Registry) -> tuple[Death, list[str]]:
    """Return how an engine that never becomes ready ended, and the lines of its log."""
    lines: list[str] = []
    log_path = tmp_path / "engine.log"
    with serving(launch, log_path=log_path, registry=registry, watch=lines.append) as started:
        assert isinstance(started.result, Death), "it became a server"
        death = started.result
    return death, lines


def registered(tmp_path: Path) -> dict[str, dict[str, float | int | None]]:
    path = tmp_path / "started.json"
    entries: dict[str, dict[str, float | int | None]] = (
        json.loads(path.read_text()) if path.exists() else {}
    )
    return entries


def ignore(_line: str) -> None:
    pass


# ---- A server that is up, and how it goes ------------------------------------------------------


def test_a_ready_engine_answers_and_is_gone_after_the_block(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark)
    log_path = tmp_path / "engine.log"
    with serving(launch, log_path=log_path, registry=registry, watch=ignore) as started:
        server = started.result
        assert isinstance(server, Server)
        assert server.alive()
        assert server.ready_after_s > 0
        assert (server.peak_bytes() or 0) > 2**20
        assert server.death(wait_s=0.0) is None
        url = f"{server.base_url}/v1/models"
        assert httpx.get(url, trust_env=False).json()["data"][0]["id"] == MODEL.served_name
        (engine,) = engines_of(mark)
        token = engine.environ()[TOKEN_VARIABLE]
        assert registered(tmp_path)[token]["pid"] == engine.pid
        assert os.getpgid(engine.pid) == engine.pid, "it has a group of its own"
    assert gone(engine.pid)
    assert nobody_listens(launch.port)
    assert started.stopped is not None
    assert not started.stopped.killed
    assert registered(tmp_path) == {}
    assert "ready on" in log_path.read_text()


def test_a_child_of_the_engine_is_gone_with_it(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, ending="spawns-child", stop_timeout_s=0.5)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        assert isinstance(started.result, Server)
        family = [process.pid for process in engines_of(mark)]
        assert len(family) == 2
    assert all(gone(pid) for pid in family)
    assert started.stopped is not None
    assert started.stopped.killed


def test_a_child_whose_parent_has_died_already_is_gone_too(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, ending="spawns-child", stop_timeout_s=0.5)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        assert isinstance(started.result, Server)
        [engine] = [each for each in engines_of(mark) if os.getpgid(each.pid) == each.pid]
        engine.kill()
        death = started.result.death(wait_s=10.0)
        assert death is not None
        assert (death.ended, death.exit_code) == (Ended.EXITED, -signal.SIGKILL)
        assert death.was_ready
        assert len(engines_of(mark)) == 1
    assert engines_of(mark) == []


def test_an_engine_that_ignores_sigterm_is_killed(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, ending="ignores-sigterm", stop_timeout_s=0.3)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        (engine,) = engines_of(mark)
    assert gone(engine.pid)
    assert started.stopped is not None
    assert started.stopped.killed
    assert registered(tmp_path) == {}


def test_an_exception_in_the_block_ends_the_engine_and_passes_on(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    def interrupted() -> None:
        log_path = tmp_path / "engine.log"
        with serving(fake_launch(mark), log_path=log_path, registry=registry, watch=ignore):
            assert len(engines_of(mark)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert engines_of(mark) == []
    assert registered(tmp_path) == {}


# ---- An engine that does not come up -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("crash-boot", 1),
        ("segfault-boot", -signal.SIGSEGV),
        ("killed-boot", -signal.SIGKILL),
        ("exit0-boot", 0),
        ("bad-argument", 1),
    ],
)
def test_an_engine_that_dies_at_boot_is_a_death_with_its_exit_code(
    tmp_path: Path, registry: Registry, mark: str, ending: str, exit_code: int
) -> None:
    death, lines = end_of(fake_launch(mark, ending=ending), tmp_path, registry)
    assert (death.ended, death.exit_code) == (Ended.EXITED, exit_code)
    assert not death.was_ready
    assert lines
    assert lines == (tmp_path / "engine.log").read_text().replace("\r", "\n").split("\n")[:-1]
    assert registered(tmp_path) == {}


def test_an_engine_that_hangs_at_boot_is_late_and_ended(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, ending="hang-boot", boot_timeout_s=0.8)
    death, lines = end_of(launch, tmp_path, registry)
    assert (death.ended, death.exit_code) == (Ended.LATE, None)
    assert death.after_s >= launch.boot_timeout_s
    assert "not ready" in lines[-1]
    assert nobody_listens(launch.port)


@pytest.mark.parametrize("memory_limit_bytes", [None, 2**30])
def test_a_program_that_does_not_exist_is_not_started(
    tmp_path: Path, registry: Registry, memory_limit_bytes: int | None
) -> None:
    launch = Launch(
        argv=("/nowhere/engine", "--port", "1"),
        env=Pairs(),
        host="127.0.0.1",
        port=1,
        health_path="/health",
        boot_timeout_s=1.0,
        memory_limit_bytes=memory_limit_bytes,
    )
    death, lines = end_of(launch, tmp_path, registry)
    assert (death.ended, death.exit_code) == (Ended.NOT_STARTED, None)
    assert "/nowhere/engine" in death.detail
    assert lines == []
    assert registered(tmp_path) == {}


@pytest.fixture
def foreigner() -> Iterator[int]:
    """Yield the port of a ready server that nobody here started through sweeper."""
    options = Fake().find(EngineOptions())
    assert isinstance(options, EngineOptions)
    port = free_port()
    process = subprocess.Popen(
        Fake().launch(Fake().settings({}), MODEL, options, port).argv,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any("ready on" in line for line in process.stdout)
    yield port
    process.kill()
    process.communicate()


def test_a_foreign_server_on_the_port_is_never_taken_for_ours(
    tmp_path: Path, registry: Registry, mark: str, foreigner: int
) -> None:
    death, lines = end_of(fake_launch(mark, port=foreigner), tmp_path, registry)
    assert (death.ended, death.exit_code) in {(Ended.PORT_TAKEN, None), (Ended.EXITED, 1)}
    if death.ended is Ended.EXITED:
        assert "cannot bind" in lines[-1]
    assert not nobody_listens(foreigner), "the foreign server was left alone"


def test_a_foreign_server_is_seen_even_while_ours_keeps_silent(
    tmp_path: Path, registry: Registry, mark: str, foreigner: int
) -> None:
    launch = python_launch(mark, "import signal; signal.pause()", port=foreigner)
    death, _ = end_of(launch, tmp_path, registry)
    assert death.ended is Ended.PORT_TAKEN
    assert str(foreigner) in death.detail
    assert not nobody_listens(foreigner)


def test_a_proxy_of_the_environment_does_not_stand_before_loopback(
    tmp_path: Path, registry: Registry, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with serving(
        fake_launch(mark), log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        assert isinstance(started.result, Server)


# ---- What it prints ----------------------------------------------------------------------------


def test_a_carriage_return_ends_a_line(tmp_path: Path, registry: Registry, mark: str) -> None:
    script = r"import sys; sys.stdout.write('one\rtwo\r\n\nthree\nno end')"
    _, lines = end_of(python_launch(mark, script), tmp_path, registry)
    assert lines == ["one", "two", "three", "no end"]


def test_a_character_written_in_two_halves_is_read_whole(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    seen = tmp_path / "seen"
    # The second half is written only after the first has been read.
    script = (
        "import os, pathlib\n"
        r"os.write(1, b'first\ncaf\xc3')" + "\n"
        f"while not pathlib.Path({str(seen)!r}).exists(): pass\n"
        r"os.write(1, b'\xa9\n')"
    )
    lines: list[str] = []

    def watch(line: str) -> None:
        lines.append(line)
        seen.touch()

    launch = python_launch(mark, script)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=watch
    ) as started:
        assert isinstance(started.result, Death)
    assert lines == ["first", "café"]


def test_bytes_that_are_no_text_do_not_stop_the_reading(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    script = r"import os; os.write(1, b'\xff\xfe broken\nwhole\n')"
    _, lines = end_of(python_launch(mark, script), tmp_path, registry)
    assert lines == ["\ufffd\ufffd broken", "whole"]


# ---- The memory limit --------------------------------------------------------------------------


def test_the_memory_limit_is_the_most_that_the_process_can_map(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    script = "block = bytearray(300 * 2**20); print('allocated', len(block))"
    within, lines = end_of(
        python_launch(mark, script, memory_limit_bytes=600 * 2**20), tmp_path, registry
    )
    assert (within.exit_code, lines) == (0, [f"allocated {300 * 2**20}"])
    assert within.limit_bytes == 600 * 2**20
    beyond, lines = end_of(
        python_launch(mark, script, memory_limit_bytes=200 * 2**20), tmp_path, registry
    )
    assert (beyond.exit_code, lines[-1]) == (1, "MemoryError")


def test_the_limited_engine_is_the_process_that_was_started(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = fake_launch(mark, memory_limit_bytes=2**30)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        assert isinstance(started.result, Server)
        (engine,) = engines_of(mark)
        assert engine.cmdline() == list(launch.argv)
        ready, peak = started.result.ready_bytes, started.result.peak_bytes()
        assert ready is not None
        assert peak is not None
        assert started.result.limit_bytes == 2**30
        assert 0 < ready <= peak <= 2**30


# ---- What a killed orchestrator leaves ---------------------------------------------------------

ORCHESTRATOR = """
import pathlib, signal, sys
from tests.shell.conftest import fake_launch
from sweeper.server import Registry, Server, serving
launch = fake_launch(sys.argv[2], ending="spawns-child")
folder = pathlib.Path(sys.argv[1])
registry = Registry(folder / "started.json")
with serving(launch, log_path=folder / "log", registry=registry, watch=lambda line: None) as up:
    assert isinstance(up.result, Server)
    print("up", launch.port, flush=True)
    signal.pause()
"""


def test_what_a_killed_orchestrator_left_is_reaped_with_its_children(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), mark],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert orchestrator.stdout is not None
    words = orchestrator.stdout.readline().split()
    assert words[:1] == ["up"]
    orchestrator.kill()
    orchestrator.communicate()
    left = {process.pid for process in engines_of(mark)}
    assert len(left) == 2
    assert set(registry.reap()) == left
    assert all(gone(pid) for pid in left)
    assert nobody_listens(int(words[1]))
    assert registered(tmp_path) == {}
    assert registry.reap() == ()


@pytest.fixture
def sleeper(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does nothing, under the token `known`."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark, TOKEN_VARIABLE: "known"},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_an_engine_announced_but_never_confirmed_is_found_by_its_token(
    tmp_path: Path, registry: Registry, sleeper: subprocess.Popen[bytes]
) -> None:
    registry.announce("known")
    assert registered(tmp_path)["known"]["pid"] is None
    assert registry.reap() == (sleeper.pid,)
    assert sleeper.wait() == -signal.SIGKILL


def test_a_confirmed_engine_is_found_by_its_pid_and_start(
    registry: Registry, sleeper: subprocess.Popen[bytes]
) -> None:
    registry.announce("another token")
    registry.confirm("another token", sleeper.pid)
    assert registry.reap() == (sleeper.pid,)


def test_a_reused_pid_is_left_alone(
    tmp_path: Path, registry: Registry, sleeper: subprocess.Popen[bytes]
) -> None:
    before = psutil.Process(sleeper.pid).create_time() - 100.0
    entry = {"another token": {"pid": sleeper.pid, "created": before}}
    (tmp_path / "started.json").write_text(json.dumps(entry))
    assert registry.reap() == ()
    assert sleeper.poll() is None
    assert registered(tmp_path) == {}


def test_forgetting_one_engine_keeps_the_others(tmp_path: Path, registry: Registry) -> None:
    registry.announce("one")
    registry.announce("other")
    registry.forget("one")
    registry.forget("one")
    assert set(registered(tmp_path)) == {"other"}


# ---- SIGTERM to us -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_act_as_ctrl_c_inside_and_as_before_outside(
    number: signal.Signals,
) -> None:
    found = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), terminating_as_interrupt():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, found)


def test_the_innermost_is_told_of_a_hangup() -> None:
    told: list[str] = []
    found = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            terminating_as_interrupt(),
            terminating_as_interrupt(lambda: told.append("hangup")),
        ):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, found)
    assert told == ["hangup"]


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    found = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminating_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, found)


def test_sigterm_to_an_orchestrator_ends_its_engine(tmp_path: Path, mark: str) -> None:
    script = ORCHESTRATOR.replace(
        "with serving(", "from sweeper.server import terminating_as_interrupt\nwith "
        "terminating_as_interrupt(), serving("
    ).replace('ending="spawns-child"', "")  # fmt: skip
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), mark],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert orchestrator.stdout is not None
    assert orchestrator.stdout.readline().startswith("up")
    (engine,) = engines_of(mark)
    orchestrator.terminate()
    _, complaint = orchestrator.communicate(timeout=20)
    assert "KeyboardInterrupt" in complaint
    assert wait_until(lambda: gone(engine.pid), "the engine to be gone", deadline_s=1.0)
    assert registered(tmp_path) == {}


# ---- Servers outside our process tree ----------------------------------------------------------

# What the client of a container engine does: the server is somebody else's child, without our
# environment, and the client stays until it ends.
CONTAINER = """
import os, subprocess, sys, time
env = {k: v for k, v in os.environ.items() if k != "SWEEPER_LAUNCH"}
starter = (
    "import os, subprocess, sys;"
    "p = subprocess.Popen(sys.argv[2:], start_new_session=True);"
    "open(sys.argv[1], 'w').write(str(p.pid)); os._exit(0)"
)
subprocess.run([sys.executable, "-c", starter, sys.argv[1], *sys.argv[2:]], env=env, check=True)
pid = int(open(sys.argv[1]).read())
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.02)
"""
REMOVE = """
import os, signal, sys
try:
    os.kill(int(open(sys.argv[1]).read()), signal.SIGKILL)
except (OSError, ValueError):
    sys.exit(1)
"""


def contained(tmp_path: Path, mark: str) -> Launch:
    (tmp_path / "container.py").write_text(CONTAINER)
    (tmp_path / "remove.py").write_text(REMOVE)
    pid = str(tmp_path / "{port}.pid")
    return fake_launch(mark, stop_timeout_s=0.3).wrapped(
        (sys.executable, str(tmp_path / "container.py"), pid),
        detached=True,
        stop_command=(sys.executable, str(tmp_path / "remove.py"), pid),
    )


def test_a_server_in_a_container_is_ours_and_its_command_removes_it(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = contained(tmp_path, mark)
    assert str(launch.port) in launch.argv[2]
    assert launch.argv[launch.port_argument or 0] == str(launch.port)
    with serving(
        launch, log_path=tmp_path / "engine.log", registry=registry, watch=ignore
    ) as started:
        assert isinstance(started.result, Server)
        assert httpx.get(f"{started.result.base_url}/health", trust_env=False).status_code == 200
    assert nobody_listens(launch.port)
    assert engines_of(mark) == []
    assert registered(tmp_path) == {}


def test_a_container_that_a_killed_run_left_is_removed_by_its_command(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = contained(tmp_path, mark)
    left = subprocess.Popen(launch.argv[3:], env={**os.environ, MARK: mark})
    (tmp_path / f"{launch.port}.pid").write_text(str(left.pid))
    registry.announce("killed", launch.stop_command)
    registry.reap()
    assert left.wait(timeout=10) == -signal.SIGKILL
    assert registered(tmp_path) == {}


def test_a_stranger_on_the_port_of_a_container_is_not_taken_for_it(
    tmp_path: Path, registry: Registry, mark: str
) -> None:
    launch = contained(tmp_path, mark)
    stranger = fake_launch(mark, port=launch.port)
    with (
        serving(
            stranger, log_path=tmp_path / "one.log", registry=Registry(tmp_path / "1"), watch=ignore
        ) as first,
        serving(launch, log_path=tmp_path / "two.log", registry=registry, watch=ignore) as second,
    ):
        assert isinstance(first.result, Server)
        assert isinstance(second.result, Death)
