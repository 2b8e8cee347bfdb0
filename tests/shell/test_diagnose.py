"""`diagnose`: any log file, by any path, of any size."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.diagnose import as_signal, diagnose, lines_of

LOGS = Path(__file__).parents[1] / "engines" / "logs" / "llamacpp"


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "sweeper", "diagnose", *arguments],
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def test_a_log_that_somebody_else_made_is_named_with_numbers_and_words() -> None:
    said = run(str(LOGS / "oom_kv_cache.log"), "engine=llamacpp", "exit_code=1", "output=json")
    found = json.loads(said.stdout)
    assert (found["outcome"], found["kind"], found["phase"]) == (
        "oom_kv_cache", "infeasible", "kv",
    )  # fmt: skip
    assert found["facts"]["required_bytes"] == 512 * 2**20
    assert found["explanation"]
    assert set(found) >= {"outcome", "kind", "phase", "facts", "explanation", "try_next"}
    assert said.returncode == 0


def test_standard_input_is_read_where_the_path_is_a_dash() -> None:
    log = (LOGS / "oom_kv_cache.log").read_bytes()
    said = run("-", "engine=llamacpp", "output=json", "exit_code=1", stdin=log)
    assert json.loads(said.stdout)["outcome"] == "oom_kv_cache"


def test_an_engine_is_recognised_by_its_log() -> None:
    found = diagnose(str(LOGS / "oom_compute.log"), engine_name=None, exit_code=1)
    assert (found["engine"], found["outcome"]) == ("llamacpp", "oom_compute")


def test_a_log_of_an_engine_that_came_up_is_nothing() -> None:
    found = diagnose(str(LOGS / "ok.log"), engine_name="llamacpp", exit_code=None)
    assert (found["outcome"], found["kind"], found["phase"]) == ("none", "none", "ready")


@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 64, b"dear diary\n" * 50, b"\0" * 99])
@pytest.mark.parametrize("engine", ["llamacpp", None])
def test_what_is_no_log_of_an_engine_is_unknown(
    tmp_path: Path, content: bytes, engine: str | None
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    found = diagnose(str(path), engine_name=engine, exit_code=None)
    assert (found["outcome"], found["kind"]) == ("unknown", "broken")


def test_a_log_much_larger_than_memory_is_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write((LOGS / "ok.log").read_bytes())
        file.write(b"x" * (150 * 2**20))  # one line without an end
        file.write(b"\n" + (LOGS / "oom_kv_cache.log").read_bytes())
    limit = 256 * 2**20
    said = subprocess.run(
        [sys.executable, "-m", "sweeper", "diagnose", str(path), "engine=llamacpp", "exit_code=1"],
        capture_output=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout


def test_a_missing_log_is_said_without_a_traceback() -> None:
    said = run("/nowhere/at/all.log", "engine=llamacpp")
    assert said.returncode == 2
    assert b"/nowhere/at/all.log: No such file" in said.stderr
    assert b"Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a.log", "engine=vlm"), b"engine: vlm is not one of"),
        (("a.log", "exit_code=one"), b"exit_code: one is not a whole number"),
        (("a.log", "b.log"), b"got 2 logs"),
        ((), b"got 0 logs"),
        (("a.log", "output=xml"), b"output: xml is not one of"),
    ],
)
def test_a_wrong_word_is_refused(arguments: tuple[str, ...], words: bytes) -> None:
    said = run(*arguments)
    assert said.returncode == 2
    assert words in said.stderr


@pytest.mark.parametrize(
    ("code", "meant"), [(137, -9), (139, -11), (1, 1), (0, 0), (-9, -9), (255, 255)]
)
def test_a_shells_exit_code_of_a_signal_is_that_signal(code: int, meant: int) -> None:
    assert as_signal(code) == meant


@given(st.binary(max_size=300))
def test_every_line_of_any_file_is_yielded_once_and_in_order(content: bytes) -> None:
    text = content.decode("utf-8", errors="replace").replace("\r", "\n")
    assert list(lines_of(io.BytesIO(content))) == [line for line in text.split("\n") if line]
