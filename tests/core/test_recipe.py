"""Recipes: a script that runs exactly what was measured, whatever stands in its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import fake_engine_facts, measured_attempt, oom_attempt, unfit_attempt

from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.recipe import RecipeError, render, write_recipes

STUB = """\
#!{python} -IS
import json, os, resource, sys
print(json.dumps([sys.argv[1:], dict(os.environ), resource.getrlimit(resource.RLIMIT_AS)[0]]))
"""
HOSTILE = (
    "two words",
    "'single'",
    '"double"',
    "$HOME ${HOME} $(echo no) `echo no`",
    "back\\slash\\",
    "a\nb\n\nc\n",
    "\r\ttab",
    "Grüße 😀 \u2028 \x85",
    '{"enable_thinking": false, "a": ["b c", "\'"]}',
    "",
    "~",
    "*",
    "!!",
    "# no comment",
    "; exit 3",
    "&& exit 3",
    "{{ argument }} {% raw %}",
    "-n",
    "***x",
    "\x01\x1b[31m",
)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a program that prints its arguments, environment and limit, in an odd place."""
    path = tmp_path_factory.mktemp("a b'c$d") / "my server"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    return path


def script(attempt: Attempt) -> str:
    return render(attempt, form="shell", study_folder=Path("/studies/mine"))


def checked(text: str) -> str:
    """Return a script that bash has found to be whole."""
    done = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"")
    return text


def ran(text: str, **env: str) -> tuple[list[str], dict[str, str], int]:
    """Run a script and return the arguments, environment and limit that its program saw."""
    clean = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **env}
    done = subprocess.run(["bash", "-c", checked(text)], env=clean, capture_output=True, timeout=20)
    assert done.stderr == b""
    argv, environment, limit = json.loads(done.stdout)
    return argv, environment, limit


def serving(stub: Path, *arguments: str, **changes: Any) -> Attempt:
    argv = (str(stub), "--port", "8011", *arguments)
    return replace(measured_attempt(), argv=argv, port_argument=2, **changes)


def test_hostile_arguments_and_environments_arrive_as_they_were(stub: Path) -> None:
    env = Pairs({f"V{i}": value for i, value in enumerate(HOSTILE)})
    argv, environment, _ = ran(script(serving(stub, *HOSTILE, env=env)))
    assert argv == ["--port", "8080", *HOSTILE]
    assert {name: environment[name] for name in env} == dict(env)


@settings(deadline=None, max_examples=12)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_any_arguments_arrive_as_they_were(stub: Path, arguments: list[str]) -> None:
    argv, _, _ = ran(script(serving(stub, *arguments)))
    assert argv[2:] == arguments


def test_no_hostile_name_leaves_its_comment(stub: Path) -> None:
    for evil in ("x\nexit 7", "x\r\nexit 7", "x\u2028exit 7\x85exit 7", "$(exit 7)`exit 7`", "\\"):
        facts = Pairs(
            name=evil, sha256=evil, engine_version=evil, cpu=evil, hardware=evil, prompt=evil
        )
        attempt = serving(
            stub, model=facts, engine=facts, host=facts, workload=facts, point=facts,
            started_at=evil, study=evil,
        )  # fmt: skip
        text = render(attempt, form="shell", study_folder=Path(f"/studies/{evil}"))
        head = text[: text.index("set -euo pipefail")]
        assert all(line.startswith("#") for line in head.split("\n") if line)
        assert ran(text)[0] == ["--port", "8080"]


def test_the_port_is_replaced_and_no_other_equal_number(stub: Path) -> None:
    attempt = serving(stub, "--ctx-size", "8011", "8011")
    assert ran(script(attempt))[0] == ["--port", "8080", "--ctx-size", "8011", "8011"]
    assert ran(script(attempt), PORT="9")[0] == ["--port", "9", "--ctx-size", "8011", "8011"]


def test_a_port_in_the_environment_of_the_measurement_is_another_one(stub: Path) -> None:
    text = script(serving(stub, env=Pairs(PORT="1234")))
    for env, port in (({}, "8080"), ({"PORT": "9"}, "9")):
        argv, environment, _ = ran(text, **env)
        assert (argv, environment["PORT"]) == (["--port", port], "1234")


def test_a_command_without_a_port_of_its_own_stays_whole(stub: Path) -> None:
    attempt = replace(serving(stub), port_argument=None)
    assert ran(script(attempt), PORT="9")[0] == ["--port", "8011"]


def test_a_secret_is_named_but_not_exported(stub: Path) -> None:
    attempt = serving(stub, env=Pairs(HF_TOKEN="***", HTTPS_PROXY="http://***@proxy:3128", A="b"))
    text = script(attempt)
    _, environment, _ = ran(text, HF_TOKEN="mine")
    assert (environment["HF_TOKEN"], environment["A"]) == ("mine", "b")
    assert "HTTPS_PROXY" not in environment
    for name in ("HF_TOKEN", "HTTPS_PROXY"):
        assert f"# {name} was set when this was measured" in text
    assert "stands for a secret" not in text


@pytest.mark.parametrize("argument", ["***", "--api-key=***", "Authorization: ***"])
def test_a_secret_argument_is_pointed_out(stub: Path, argument: str) -> None:
    text = checked(script(serving(stub, argument)))
    assert "# *** in the command stands for a secret that is not kept" in text
    assert "stands for a secret" not in script(serving(stub, "a *** b", "x***"))


def test_a_memory_limit_becomes_a_ulimit(stub: Path) -> None:
    attempt = serving(stub, memory_limit_bytes=2**30 + 1000)
    assert "ulimit -v 1048576\n" in script(attempt)
    assert ran(script(attempt))[2] == 2**30
    assert "ulimit" not in script(serving(stub))


def test_what_was_measured_is_told_and_a_fake_says_that_it_is_one(stub: Path) -> None:
    text = script(serving(stub))
    assert "decode 40.0 tok/s" in text
    assert "attempt 1: cache_type_k=f16 context=32768 n_max=3" in text
    assert "SIMULATED" not in text
    assert "SIMULATED" in script(serving(stub, engine=fake_engine_facts()))


@pytest.mark.parametrize("attempt", [oom_attempt(), unfit_attempt()])
def test_an_attempt_that_was_not_measured_is_refused(attempt: Attempt) -> None:
    with pytest.raises(RecipeError, match=f"attempt {attempt.number} was not measured"):
        script(attempt)


def test_an_unknown_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe format dockr; there are: shell"):
        write_recipes([], form="dockr", folder=tmp_path, study_folder=tmp_path)


def test_recipes_are_files_that_can_be_run(stub: Path, tmp_path: Path) -> None:
    attempts = [serving(stub, "one", number=1), serving(stub, "two", number=12)]
    folder = tmp_path / "recipes"
    written = write_recipes(attempts, form="shell", folder=folder, study_folder=tmp_path)
    assert [each.name for each in written] == ["qwen-mtp-0001.sh", "qwen-mtp-0012.sh"]
    assert sorted(folder.iterdir()) == written  # and nothing partial
    done = subprocess.run([written[1]], capture_output=True, timeout=20)
    assert json.loads(done.stdout)[0] == ["--port", "8080", "two"]


def test_a_path_that_is_no_text_is_kept_byte_for_byte(stub: Path, tmp_path: Path) -> None:
    odd = b"/models/caf\xe9.gguf"
    attempt = serving(stub, odd.decode("utf-8", "surrogateescape"))
    (path,) = write_recipes([attempt], form="shell", folder=tmp_path, study_folder=tmp_path)
    assert odd in path.read_bytes()
