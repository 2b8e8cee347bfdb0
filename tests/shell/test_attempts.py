from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples import broken_attempt, measured_attempt, oom_attempt

from sweeper.core.pairs import Pairs
from sweeper.record.attempts import ATTEMPT_JSON, ENGINE_LOG, Attempts, RecordError


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "studies" / "qwen" / "attempts")


def test_a_study_without_attempts_starts_at_one(attempts: Attempts) -> None:
    assert attempts.all() == []
    assert attempts.next_number() == 1


def test_a_committed_attempt_lies_whole_under_its_number(attempts: Attempts) -> None:
    working = attempts.begin(1)
    (working / ENGINE_LOG).write_text("loading\n")
    folder = attempts.commit(measured_attempt(1))
    assert folder == attempts.folder(1)
    assert (folder / ENGINE_LOG).read_text() == "loading\n"
    assert json.loads((folder / ATTEMPT_JSON).read_text())["schema"] == 2
    assert not working.exists()
    assert attempts.all() == [measured_attempt(1)]
    assert attempts.next_number() == 2


def test_attempts_come_back_in_order_of_their_numbers(attempts: Attempts) -> None:
    for each in (oom_attempt(12000), measured_attempt(2), broken_attempt(10)):
        attempts.begin(each.number)
        attempts.commit(each)
    assert [each.number for each in attempts.all()] == [2, 10, 12000]
    assert attempts.next_number() == 12001


def test_an_attempt_in_progress_is_not_an_attempt(attempts: Attempts) -> None:
    (attempts.begin(1) / ENGINE_LOG).write_text("loading")
    assert attempts.all() == []
    assert attempts.next_number() == 1
    assert not attempts.folder(1).exists()


def test_what_a_killed_process_left_is_cleared(attempts: Attempts) -> None:
    script = (
        "import os, pathlib, sys; from sweeper.record.attempts import Attempts; "
        "folder = Attempts(pathlib.Path(sys.argv[1])).begin(1); "
        "(folder / 'engine.log').write_text('old'); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(attempts.root)], check=False)
    assert killed.returncode == -9
    assert len(list(attempts.root.iterdir())) == 1
    assert list(attempts.begin(1).iterdir()) == []


def test_a_folder_that_another_owner_is_writing_is_not_cleared(attempts: Attempts) -> None:
    (attempts.begin(1) / ENGINE_LOG).write_text("mine")
    with pytest.raises(RecordError, match="is being written by another process"):
        Attempts(attempts.root).begin(1)
    attempts.commit(oom_attempt(1))
    assert (attempts.folder(1) / ENGINE_LOG).read_text() == "mine"


def test_beginning_again_starts_from_an_empty_folder(attempts: Attempts) -> None:
    (attempts.begin(1) / ENGINE_LOG).write_text("first try")
    assert list(attempts.begin(1).iterdir()) == []


def test_a_discarded_attempt_leaves_nothing(attempts: Attempts) -> None:
    attempts.begin(1)
    attempts.discard(1)
    attempts.discard(1)
    assert list(attempts.root.iterdir()) == []


def test_a_record_is_never_overwritten(attempts: Attempts) -> None:
    attempts.begin(1)
    attempts.commit(measured_attempt(1))
    with pytest.raises(RecordError, match="take the next number \\(2\\)"):
        attempts.begin(1)
    with pytest.raises(RecordError, match="recorded already"):
        attempts.commit(oom_attempt(1))
    assert attempts.all() == [measured_attempt(1)]


def test_what_cannot_be_written_is_not_half_recorded(attempts: Attempts) -> None:
    working = attempts.begin(1)
    (working / ATTEMPT_JSON).mkdir()
    with pytest.raises(RecordError, match="nothing was recorded under 0001"):
        attempts.commit(measured_attempt(1))
    assert attempts.all() == []


@pytest.mark.parametrize("damage", ['{"schema": 2', '{"schema": 9}', '{"schema": 2}', "[]"])
def test_a_damaged_record_stops_the_study_and_says_what_to_do(
    attempts: Attempts, damage: str
) -> None:
    attempts.begin(1)
    path = attempts.commit(measured_attempt(1)) / ATTEMPT_JSON
    path.write_text(damage)
    with pytest.raises(RecordError) as caught:
        attempts.all()
    assert str(path) in str(caught.value)
    assert "restore the file, or move" in str(caught.value)


def test_a_numbered_folder_without_a_record_is_an_error(attempts: Attempts) -> None:
    attempts.folder(3).mkdir(parents=True)
    with pytest.raises(RecordError, match="No such file"):
        attempts.all()


def test_a_record_under_another_number_is_an_error(attempts: Attempts) -> None:
    attempts.begin(1)
    attempts.commit(measured_attempt(1)).rename(attempts.folder(2))
    with pytest.raises(RecordError, match="says it is attempt 1, its folder says 2"):
        attempts.all()


def test_a_cause_that_was_not_utf8_survives(attempts: Attempts) -> None:
    attempt = oom_attempt(1, notes=(b"caf\xe9".decode(errors="surrogateescape"),))
    attempts.begin(1)
    attempts.commit(attempt)
    assert attempts.all() == [attempt]


def test_secrets_are_gone_from_everything_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_INHERITED_TOKEN", "inherited-secret-1")
    store = Attempts(tmp_path / "attempts")
    folder = store.begin(1)
    (folder / "engine.log").write_bytes(
        b"args: --api-key given-secret-2 \xff\r\nenv HF_TOKEN=from-env-3 inherited-secret-1\n"
    )
    attempt = broken_attempt(
        number=1,
        argv=("engine", "--api-key", "given-secret-2", "--port", "1"),
        env=Pairs(HF_TOKEN="from-env-3"),
        notes=("it said from-env-3 and inherited-secret-1",),
    )
    final = store.commit(attempt)
    stored = b"".join(path.read_bytes() for path in final.iterdir())
    for secret in (b"inherited-secret-1", b"given-secret-2", b"from-env-3"):
        assert secret not in stored
    assert (final / "engine.log").read_bytes() == (
        b"args: --api-key *** \xff\r\nenv HF_TOKEN=*** ***\n"
    )
    assert store.read(1).notes == ("it said *** and ***",)
