"""Every format of recipes, read by the programs that it is for, whatever stands in the command."""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import (
    broken_attempt,
    fake_engine_facts,
    measured_attempt,
    oom_attempt,
    unfit_attempt,
)

from sweeper.core.launch import Launch
from sweeper.core.outcome import Attempt
from sweeper.core.pairs import Pairs
from sweeper.engines import EngineOptions, ModelFacts, load_engine
from sweeper.recipe import (
    FORMATS,
    PICKS,
    Recipe,
    RecipeError,
    read_recipe,
    render,
    write_recipes,
)
from sweeper.recipe.block import MARK
from sweeper.recipe.parsing import preset_sections, shell_commands, systemd_unit, systemd_words
from sweeper.recipe.quoting import llama_swap, systemd
from sweeper.recipe.source import hub_model, model_mount

HOSTILE = (
    "two words",
    "'single'",
    '"double"',
    "$HOME ${HOME} $(HOME) $$ $(echo no) `echo no`",
    "${PORT} ${MODEL_ID} ${env.HOME}",
    "back\\slash\\",
    "a\nb\\\n#c\n",
    "\r\ttab",
    "Grüße 😀 \u2028 \x85",
    "\ufeff \uffff \x7f",
    '{"enable_thinking": false, "a": ["b c", "\'"]}',
    "",
    "~",
    "*",
    "!!",
    "# no comment",
    "; exit 3",
    ";",
    "&& exit 3",
    "50% %h %%",
    "{{ argument }} {% raw %} {{ .Values.x }}",
    "-n",
    "yes",
    "1.0",
    "null",
    "--> <!-- ```",
    "sweeper-recipe: {",
    "\x01\x1b[31m",
    " spaces around ",
)
HELM = tuple(each for each in HOSTILE if "\x85" not in each and "\ufeff" not in each)
NO_BRACES = tuple(each for each in HOSTILE if "{{" not in each)
CARD = Pairs(
    gpu="NVIDIA GeForce RTX 5090", gpu_driver="580.95", gpu_memory_bytes=24 * 2**30,
    cpu="EPYC", hardware="laptop",
)  # fmt: skip
SNAPSHOT = "/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca"
GENERIC = ("shell", "systemd", "compose", "helm", "llama-swap", "page")
FORMS = {
    "llamacpp": (*GENERIC, "llama-preset", "sparkrun"),
    "vllm": (*GENERIC, "vllm-yaml", "vllm-recipe", "sparkrun"),
}


def served(
    engine: str,
    *extra: str,
    params: dict[str, Any] | None = None,
    path: str = "/models/q w/qwen.gguf",
    name: str = "qwen",
    prefix: tuple[str, ...] = (),
    env: Pairs = Pairs(CUDA_VISIBLE_DEVICES="0"),
    **changes: Any,
) -> Attempt:
    """Return an attempt whose command is what the adapter starts, with these words after it."""
    adapter = load_engine(engine)
    model = ModelFacts(
        name=f"{name}:q4", path=path, served_name=name, size_bytes=17 * 2**30, sha256="ab" * 32
    )
    options = EngineOptions(
        binary="/opt/llama-server" if engine == "llamacpp" else None, python="/venv/bin/python",
        env=env,
    )  # fmt: skip
    launch = adapter.launch(adapter.settings(params or {}), model, options, 8011)
    assert isinstance(launch, Launch)
    launch = launch.wrapped(prefix, detached=bool(prefix), stop_command=())
    facts = Pairs(name=engine, engine_version="0.32.0")
    return replace(
        measured_attempt(), argv=(*launch.argv, *extra), env=launch.env,
        port_argument=launch.port_argument, engine=facts, host=CARD,
        model=Pairs(name=model.name, path=path, sha256=model.sha256, size_bytes=model.size_bytes),
        workload=Pairs(name="short", digest="0123456789abcdef"), **changes,
    )  # fmt: skip


def written(attempt: Attempt, form: str, folder: Path, **told: Any) -> Path:
    (path,) = write_recipes(
        [attempt], form=form, folder=folder, study_folder=Path("/studies/mine"), **told
    )
    return path


def reread(attempt: Attempt, form: str, folder: Path, **told: Any) -> Recipe:
    return read_recipe(written(attempt, form, folder, **told))


def ran(*command: str | Path, **changes: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **changes)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return str(done.stdout)


def installed(program: str) -> str:
    """Return the path of a program; the test that needs it is skipped where there is none."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"there is no {program} here")
    return found


def hostile_env() -> Pairs:
    """Return variables with every hostile value that all formats take in one."""
    taken = (each for each in HELM if "${env." not in each)
    return Pairs({f"V{i}": value for i, value in enumerate(taken)})


# --- what every format has in common ----------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "form"), [(engine, form) for engine, forms in FORMS.items() for form in forms]
)
def test_every_format_tells_what_was_measured_and_is_read_back(
    engine: str, form: str, tmp_path: Path
) -> None:
    attempt = served(engine, confirms=7)
    path = written(attempt, form, tmp_path)
    said = "\n".join(each.read_text() for each in (path.rglob("*") if path.is_dir() else [path])
                     if each.is_file())  # fmt: skip
    for each in (
        "decode 40.0 tok/s, 38.8 to 41.6", "qwen-mtp", "ab" * 32, "0.32.0", "580.95",
        "NVIDIA GeForce RTX 5090", "0123456789abcdef", "2026-11-29T17:01:00", "/studies/mine",
        "attempt 7 once more",
    ):  # fmt: skip
        assert each in said, each
    recipe = read_recipe(path)
    assert (recipe.form, recipe.study, recipe.attempt) == (form, "qwen-mtp", 1)
    assert recipe.measured.argv == attempt.argv
    assert recipe.measured.env == attempt.env
    assert recipe.decode_tok_s.median == 40.0
    assert (recipe.window_tokens, recipe.confirms) == (32752, 7)
    assert recipe.workload["digest"] == "0123456789abcdef"
    assert recipe.model["sha256"] == "ab" * 32
    assert (recipe.command is None) == (form == "page")
    assert recipe.differs() == ()
    assert not recipe.edited


@pytest.mark.parametrize("form", FORMATS)
def test_no_format_gives_a_secret_away(form: str, tmp_path: Path) -> None:
    engine = "vllm" if form.startswith("vllm") else "llamacpp"
    env = Pairs(HF_TOKEN="hf_abcdefgh", HTTPS_PROXY="http://me:hunter22@proxy:3128", A="kept")
    attempt = served(engine, "--api-key", "sk-verysecret", env=env)
    path = written(attempt, form, tmp_path)
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    said = "\n".join(each.read_text() for each in files)
    for secret in ("hf_abcdefgh", "hunter22", "sk-verysecret"):
        assert secret not in said
    for told in ("HF_TOKEN was set when", "HTTPS_PROXY was set when", "stands for a secret"):
        assert told in said.replace("\\_", "_")
    recipe = read_recipe(path)
    if recipe.command is not None:
        assert not {"HF_TOKEN", "HTTPS_PROXY"} & set(recipe.command.env)


@pytest.mark.parametrize("form", FORMATS)
def test_no_fact_leaves_its_comment_in_any_format(form: str, tmp_path: Path) -> None:
    evil = 'x\nexit 7\r\n- y: z\u2028\x85 --> `` ``` | " $(exit 7) %h {{ .x }} {% endraw %} \\'
    engine = "vllm" if form.startswith("vllm") else "llamacpp"
    facts = Pairs(name=evil, sha256=evil, cpu=evil, hardware=evil, gpu=evil, gpu_driver=evil)
    attempt = served(engine)
    attempt = replace(
        attempt, model=facts.with_(path="/m/x.gguf"), host=facts, workload=facts, point=facts,
        engine=attempt.engine.with_(engine_version=evil), started_at=evil,
    )  # fmt: skip
    recipe = reread(attempt, form, tmp_path, failed=[oom_attempt()], front=[attempt])
    assert recipe.differs() == ()
    assert recipe.point == facts
    path = recipe.path
    lines = (path / "values.yaml" if path.is_dir() else path).read_text().split("\n")
    block = [line for line in lines if line.startswith(("# " + MARK, "<!-- " + MARK))]
    assert len(block) == 1
    assert block[0].isascii()
    assert block[0].count(">") == (1 if form == "page" else 0)
    if form != "page":
        assert not [line for line in lines if re.match(r"\s*(exit 7|- y: z)", line)]


def test_a_format_that_is_not_for_an_engine_says_why(tmp_path: Path) -> None:
    for engine, form, why in (
        ("vllm", "llama-preset", "presets are read by llama-server"),
        ("llamacpp", "vllm-yaml", "read by vllm serve --config"),
        ("llamacpp", "vllm-recipe", "the shape of vLLM's own recipes"),
    ):
        with pytest.raises(RecipeError, match=why):
            written(served(engine), form, tmp_path)
    with pytest.raises(RecipeError, match="for it there are: shell, systemd, compose, helm"):
        written(replace(served("vllm"), engine=fake_engine_facts()), "sparkrun", tmp_path)


def test_an_engine_nobody_knows_more_of_has_the_formats_that_run_its_command(
    tmp_path: Path,
) -> None:
    attempt = replace(
        measured_attempt(), argv=("/opt/server", "--port", "8011", *HOSTILE), port_argument=2,
        engine=fake_engine_facts(),
    )  # fmt: skip
    for form in ("shell", "systemd", "compose", "llama-swap", "page"):
        assert reread(attempt, form, tmp_path).differs() == ()
        assert "SIMULATED" in (tmp_path / f"qwen-mtp-0001{FORMATS[form].suffix}").read_text()
    with pytest.raises(RecipeError, match="cannot be taken apart"):
        written(attempt, "helm", tmp_path)
    for form in ("compose", "llama-swap"):
        with pytest.raises(RecipeError, match="the port of attempt 1 is no argument of its own"):
            written(replace(attempt, port_argument=None), form, tmp_path)


def test_what_cannot_be_in_yaml_is_refused_and_kept_by_shell_and_systemd(tmp_path: Path) -> None:
    odd = b"/models/caf\xe9.gguf".decode("utf-8", "surrogateescape")
    attempt = served("llamacpp", path=odd)
    for form in ("compose", "helm", "llama-swap", "llama-preset", "sparkrun", "page"):
        with pytest.raises(RecipeError, match="holds bytes that are no UTF-8"):
            written(attempt, form, tmp_path)
    for form in ("shell", "systemd"):
        recipe = reread(attempt, form, tmp_path)
        assert recipe.command is not None
        assert odd in recipe.command.argv
        assert recipe.differs() == ()


def test_a_wrong_variable_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="A-B is no name of an environment variable"):
        written(replace(served("vllm"), env=Pairs({"A-B": "1"})), "systemd", tmp_path)


# --- shell ------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing_wrong_with_a_hostile_script(tmp_path: Path) -> None:
    shellcheck = installed("shellcheck")
    words = tuple(each for each in HOSTILE if "\uffff" not in each)
    attempt = served("llamacpp", *words, env=hostile_env(), memory_limit_bytes=2**34)
    ran(shellcheck, "--severity=warning", written(attempt, "shell", tmp_path))
    path = written(replace(attempt, port_argument=None), "shell", tmp_path)
    ran(shellcheck, "--severity=warning", path)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_words_are_read_as_a_shell_reads_them(words: list[str]) -> None:
    script = "# x\n\nexec \\\n  a" + "".join(f" \\\n  {shlex.quote(each)}" for each in words)
    assert list(shell_commands(script)) == [["exec", "a", *words]]


def test_bash_and_the_reading_agree_on_quotes_of_a_human() -> None:
    line = r"""a"b c"'d e'\ f \
      "x\"y\$z\\w\q" '' "" #not this"""
    assert list(shell_commands(line)) == [["ab cd e f", 'x"y$z\\w\\q', "", ""]]
    assert ran("bash", "-c", f"printf '%s|' {line}") == 'ab cd e f|x"y$z\\w\\q|||'


# --- systemd ----------------------------------------------------------------------------------


def test_a_unit_holds_every_word_of_a_hostile_command(tmp_path: Path) -> None:
    attempt = served("llamacpp", *HOSTILE, env=hostile_env(), memory_limit_bytes=2**34 + 5)
    recipe = reread(attempt, "systemd", tmp_path)
    assert recipe.command is not None
    assert recipe.command.on_port(8011) == attempt.argv
    assert recipe.command.env == attempt.env
    assert recipe.command.memory_limit_bytes == 2**34
    assert recipe.differs() == ()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_words_are_read_as_systemd_reads_them(words: list[str]) -> None:
    unit = "[Service]\nExecStart=/bin/x " + " ".join(systemd(each) for each in words)
    assert systemd_unit(unit).argv == ("/bin/x", *words)
    assert all(each.isprintable() for each in unit.replace("\n", ""))


def test_systemd_itself_accepts_the_unit(tmp_path: Path) -> None:
    analyze = installed("systemd-analyze")
    program = tmp_path / "my server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    attempt = served("llamacpp", *HOSTILE, env=hostile_env())
    attempt = replace(attempt, argv=(str(program), *attempt.argv[1:]))
    path = written(attempt, "systemd", tmp_path)
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_itself_reads_the_words_that_were_written(tmp_path: Path) -> None:
    """Its manager, asked to load units and start nothing, shows the words as it took them."""
    manager = next(
        (each for each in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd")
         if Path(each).exists()), None,
    )  # fmt: skip
    if manager is None:
        pytest.skip("there is no systemd here")
    attempt = served("llamacpp", *HOSTILE, env=hostile_env(), memory_limit_bytes=2**34)
    path = written(attempt, "systemd", tmp_path)
    # Apart, since nobody else can look into the folders of a test.
    with tempfile.TemporaryDirectory() as apart:
        dump = loaded_by(manager, path, Path(apart))
    _, _, unit = dump.partition(f"-> Unit {path.name}:")
    if not unit:
        pytest.skip("systemd cannot load units here")
    unit = unit.partition("\t-> Unit ")[0]
    shown = re.search(r"^\t*Command Line: (.*)$", unit, re.MULTILINE)
    assert shown is not None
    # Dollar signs it reads when it starts the program.
    expected = [each.replace("$", "$$") for each in attempt.argv[1:]]
    expected[expected.index("8011")] = "8080"
    assert dumped_words(shown[1]) == [attempt.argv[0], *expected]
    assert "LimitAS: 17179869184" in unit
    for name in ("V0", "V3", "V15"):
        assert f"Environment: {name}={attempt.env[name]}" in unit


def loaded_by(manager: str, unit: Path, folder: Path) -> str:
    """Return what systemd's manager tells of a unit that it has loaded from this folder."""
    folder.chmod(0o755)
    shutil.copy(unit, folder)
    runtime = folder / "runtime"
    runtime.mkdir()
    nobody = []
    if os.getuid() == 0:  # It does not do this as root.
        os.chown(runtime, 65534, 65534)
        nobody = [installed("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    runtime.chmod(0o700)
    done = subprocess.run(
        [*nobody, manager, "--test", "--user", f"--unit={unit.name}", "--no-pager"],
        env={"XDG_RUNTIME_DIR": str(runtime), "HOME": str(runtime), "PATH": os.environ["PATH"],
             "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True, timeout=60,
    )  # fmt: skip
    return done.stdout.decode("utf-8", "surrogateescape")


def dumped_words(line: str) -> list[str]:
    """Return the words of a command line as systemd's dump quotes them."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [
        bare or codecs.escape_decode(
            re.sub(r"\\([$`!])", r"\1", quoted).encode("utf-8", "surrogateescape")
        )[0].decode()
        for quoted, bare in words
    ]  # fmt: skip


def test_a_program_that_systemd_cannot_name_is_refused(tmp_path: Path) -> None:
    attempt = served("llamacpp")
    for program, why in (
        ("./server", "by its full path or name"),
        ("-server", "by its full path or name"),
        ("/opt/it's", "quotes, backslashes or control characters"),
        ("/opt/a\nb", "quotes, backslashes or control characters"),
    ):
        with pytest.raises(RecipeError, match=why):
            written(replace(attempt, argv=(program, *attempt.argv[1:])), "systemd", tmp_path)


@pytest.mark.parametrize("odd", ["\uffff", "\U0001fffe", "\ufdd0", "\udcff"])
def test_a_variable_that_systemd_would_ignore_is_refused(odd: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="V has a character that systemd takes in no variable"):
        written(served("vllm", env=Pairs(V=odd)), "systemd", tmp_path)


def test_a_unit_written_by_hand_is_read_by_systemds_rules() -> None:
    assert systemd_words(r"""a "b c" 'd\x41\u00e9' e\sf \t""") == ["a", "b c", "dAé", "e f", "\t"]
    found = systemd_unit(
        "# ExecStart=/no\n[Service]\nExecStart = /bin/x a \\\n  b\nEnvironment=A=1 'B=2 %%'\n"
        "Environment=A=3\n"
    )
    assert found.argv == ("/bin/x", "a", "b")
    assert found.env == {"A": "3", "B": "2 %"}


# --- compose ----------------------------------------------------------------------------------


def interpolated(said: str) -> str:
    """Return text as Compose interpolates it where no variable is set."""
    left = re.sub(r"\$\$", "\0", said)
    assert not re.search(r"\$(?:\w|\{)", left.replace("${SWEEPER_", "")), said
    return left.replace("\0", "$")


def test_compose_reads_the_words_that_were_written(tmp_path: Path) -> None:
    attempt = served("vllm", *HOSTILE, env=hostile_env())
    path = written(attempt, "compose", tmp_path)
    (service,) = yaml.safe_load(path.read_text())["services"].values()
    assert [interpolated(each) for each in service["command"]][-len(HOSTILE) :] == list(HOSTILE)
    assert {name: interpolated(each) for name, each in service["environment"].items()} == dict(
        attempt.env
    )
    assert service["command"][4:8] == ["--host", "0.0.0.0", "--port", "8080"]
    assert service["entrypoint"] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert service["ports"] == ["127.0.0.1:${SWEEPER_PORT:-8080}:8080"]
    assert service["image"] == "${SWEEPER_IMAGE:-vllm/vllm-openai:v0.32.0}"
    assert service["volumes"] == [
        {"type": "bind", "source": "/models/q w", "target": "/models/q w", "read_only": True}
    ]
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:8080/health"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert reread(attempt, "compose", tmp_path).differs() == ()


def test_compose_itself_reads_the_words_that_were_written(tmp_path: Path) -> None:
    compose = shutil.which("docker-compose")
    command = [compose] if compose is not None else [installed("docker"), "compose"]
    if compose is None and subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose here")
    attempt = served("vllm", *HOSTILE, env=hostile_env())
    path = written(attempt, "compose", tmp_path)
    shown = yaml.safe_load(ran(*command, "-f", path, "config", env={"PATH": os.environ["PATH"]}))
    (service,) = shown["services"].values()
    # What it shows is a file again, so its dollar signs are doubled.
    assert [each.replace("$$", "$") for each in service["command"]][-len(HOSTILE) :] == list(
        HOSTILE
    )
    assert {name: each.replace("$$", "$") for name, each in service["environment"].items()} == (
        dict(attempt.env)
    )


def test_without_a_card_none_is_reserved(tmp_path: Path) -> None:
    attempt = replace(served("llamacpp"), host=Pairs(cpu="EPYC"))
    (service,) = yaml.safe_load(written(attempt, "compose", tmp_path).read_text())[
        "services"
    ].values()
    assert "deploy" not in service
    assert service["image"] == "${SWEEPER_IMAGE:-ghcr.io/ggml-org/llama.cpp:server}"
    text = written(replace(served("vllm"), host=Pairs(cpu="EPYC")), "compose", tmp_path).read_text()
    assert "${SWEEPER_IMAGE:?set it" in text
    assert "there is no default" in text


def test_a_container_that_was_measured_is_the_one_that_compose_starts(tmp_path: Path) -> None:
    prefix = (
        "docker", "run", "--rm", "--gpus", "all", "--network=host", "-v", "/m:/m:ro", "-e",
        "A=b$c", "--shm-size", "8g", "--name", "x", "--oom-score-adj", "5", "me/vllm@sha256:0",
    )  # fmt: skip
    attempt = served("vllm", prefix=prefix, path="/m")
    path = written(attempt, "compose", tmp_path)
    (service,) = yaml.safe_load(path.read_text())["services"].values()
    assert service["image"] == "me/vllm@sha256:0"
    assert service["network_mode"] == "host"
    assert service["volumes"] == ["/m:/m:ro"]
    assert service["shm_size"] == "8g"
    assert service["environment"]["A"] == "b$$c"
    assert service["command"][:3] == [
        "/venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]
    assert "ports" not in service
    assert "not translated: --oom-score-adj 5" in path.read_text()
    assert reread(attempt, "helm", tmp_path).differs() == ()
    values = yaml.safe_load((tmp_path / "qwenmtp0001" / "values.yaml").read_text())
    assert values["image"] == {
        "repository": "me/vllm", "tag": "sha256:0", "pullPolicy": "IfNotPresent"
    }  # fmt: skip


# --- helm -------------------------------------------------------------------------------------


def kubernetes(said: str) -> str:
    """Return text as Kubernetes expands `$(NAME)` where no variable is set (third_party/expand)."""
    return re.sub(r"\$(\$|\([^)]*\))?", lambda found: "$" if found[1] == "$" else found[0], said)


def test_a_chart_holds_every_word_of_a_hostile_command(tmp_path: Path) -> None:
    attempt = served("vllm", *HELM, params={"tensor_parallel_size": 2}, env=hostile_env())
    path = written(attempt, "helm", tmp_path)
    values = yaml.safe_load((path / "values.yaml").read_text())
    assert [kubernetes(each) for each in values["args"]][-len(HELM) :] == list(HELM)
    assert {e["name"]: kubernetes(e["value"]) for e in values["env"]} == dict(attempt.env)
    assert values["gpus"] == 2
    assert values["image"] == {
        "repository": "vllm/vllm-openai", "tag": "v0.32.0", "pullPolicy": "IfNotPresent"
    }  # fmt: skip
    chart = yaml.safe_load((path / "Chart.yaml").read_text())
    manifest = yaml.safe_load((path / "OlaresManifest.yaml").read_text())
    # Olares wants one name for folder, chart, manifest and workload, of this form.
    assert path.name == chart["name"] == manifest["metadata"]["name"]
    assert re.fullmatch(r"[a-z][a-z0-9]{0,29}", path.name)
    assert manifest["workloadReplicas"] == {path.name: 1}
    assert values["workloads"] == {path.name: {"replicaCount": 1}}
    assert chart["annotations"]["sweeper-figures"].startswith("decode 40.0 tok/s")
    assert manifest["spec"]["accelerator"][0]["mode"] == "nvidia"


def test_helm_itself_renders_the_chart(tmp_path: Path) -> None:
    helm = installed("helm")
    attempt = served("vllm", *HELM, env=hostile_env())
    path = written(attempt, "helm", tmp_path)
    ran(helm, "lint", "--strict", path)
    shown = {each["kind"]: each for each in yaml.safe_load_all(ran(helm, "template", "x", path))}
    deployment = shown["Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [kubernetes(each) for each in container["args"]][-len(HELM) :] == list(HELM)
    assert {e["name"]: kubernetes(e["value"]) for e in container["env"]} == dict(attempt.env)


@pytest.mark.parametrize("odd", ["\x7f", "\x85", "\ufeff", "\uffff"])
def test_what_helm_cannot_pass_on_is_refused(odd: str, tmp_path: Path) -> None:
    for attempt in (served("vllm", odd), served("vllm", env=Pairs(A=odd))):
        with pytest.raises(RecipeError, match="a control character that helm cannot pass on"):
            written(attempt, "helm", tmp_path)


def test_a_chart_is_written_whole_over_an_older_one(tmp_path: Path) -> None:
    first = written(served("vllm"), "helm", tmp_path)
    (first / "stale").write_text("x")
    second = written(served("vllm", "--seed", "7"), "helm", tmp_path)
    assert first == second
    assert not (second / "stale").exists()
    assert list(tmp_path.iterdir()) == [second]
    recipe = read_recipe(second)
    assert (recipe.differs(), recipe.edited) == ((), False)


# --- llama-swap -------------------------------------------------------------------------------


def llama_swap_words(cmd: str) -> list[str]:
    """Return the words of a `cmd`, by llama-swap's order: comments, macros, lines, then quotes."""
    kept = [line for line in cmd.split("\n") if not line.strip().startswith("#")]
    cmd = "\n".join(kept).replace("${PORT}", "5800")
    assert not re.search(r"\$\{[a-zA-Z0-9_-]+\}", cmd), "it refuses unknown macros"
    assert not re.search(r"\$\{env\.\w+\}", cmd), "it reads the environment for these"
    lines = []
    for line in cmd.split("\n"):
        trimmed = line.strip()
        lines.append(trimmed[:-1] + " " if trimmed.endswith("\\") else line)
    return shlex.split("\n".join(lines))


def test_llama_swap_reads_the_words_that_were_written(tmp_path: Path) -> None:
    attempt = served("llamacpp", *HOSTILE, env=hostile_env())
    text = written(attempt, "llama-swap", tmp_path).read_text()
    (entry,) = yaml.safe_load(text)["models"].values()
    words = llama_swap_words(entry["cmd"])
    assert words == ["5800" if each == "8011" else each for each in attempt.argv]
    assert entry["proxy"] == "http://127.0.0.1:${PORT}"
    assert entry["checkEndpoint"] == "/health"
    assert dict(each.split("=", 1) for each in entry["env"]) == dict(attempt.env)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("a #\\'\"\n\r\t${}PORTenv.")))
def test_any_words_pass_through_llama_swap(words: list[str]) -> None:
    assert llama_swap_words(" ".join(["x", *(llama_swap(each) for each in words)])) == ["x", *words]


def test_a_variable_that_llama_swap_would_replace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="which llama-swap would replace"):
        written(served("llamacpp", env=Pairs(A="${env.HOME}")), "llama-swap", tmp_path)


# --- llama-server's presets -------------------------------------------------------------------


def test_a_preset_has_the_flags_that_were_measured(tmp_path: Path) -> None:
    attempt = served(
        "llamacpp", "--override-kv", "a=str:b c", "-ngl", "-1", "--no-warmup",
        params={"context": 32768, "spec_type": "draft-mtp", "n_max": 3, "kv_unified": False,
                "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    recipe = reread(attempt, "llama-preset", tmp_path)
    sections = preset_sections(recipe.path.read_text())
    assert set(sections) == {"default", "qwen"}
    assert sections["default"] == {"version": "1"}
    assert sections["qwen"] == {
        "model": "/models/q w/qwen.gguf", "ctx-size": "32768", "parallel": "1",
        "cache-type-k": "f16", "cache-type-v": "f16", "flash-attn": "auto", "fit": "off",
        "cache-ram": "0", "metrics": "true", "no-ui": "true", "verbosity": "4",
        "no-kv-unified": "true", "chat-template-kwargs": '{"enable_thinking": false}',
        "spec-type": "draft-mtp", "spec-draft-n-max": "3", "override-kv": "a=str:b c",
        "ngl": "-1", "no-warmup": "true",
    }  # fmt: skip
    assert recipe.command is not None
    # Started without a router, it is the measured command in another order.
    assert sorted(recipe.command.on_port(8011)) == sorted(attempt.argv)
    assert "-ngl" in recipe.command.argv


@pytest.mark.parametrize("value", ["a;b", "a#b", "a\nb", " a", "a\t", "\r"])
def test_what_a_preset_cannot_hold_is_refused(value: str, tmp_path: Path) -> None:
    attempt = served("llamacpp", params={"override_tensor": value})
    with pytest.raises(RecipeError, match=r"--override-tensor .* preset files cannot hold"):
        written(attempt, "llama-preset", tmp_path)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (("--lora", "a", "--lora", "b"), "given twice"),
        (("stray", "words"), "cannot be taken apart"),
        (("--x=1",), "more than one value"),
    ],
)
def test_flags_that_a_preset_cannot_hold_are_refused(
    extra: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=why):
        written(served("llamacpp", *extra), "llama-preset", tmp_path)


def test_a_value_that_begins_with_a_dash_stays_the_value_of_its_flag(tmp_path: Path) -> None:
    attempt = served("llamacpp", params={"override_tensor": "--metrics", "fit_target_mib": 5})
    recipe = reread(attempt, "llama-preset", tmp_path)
    assert preset_sections(recipe.path.read_text())["qwen"]["override-tensor"] == "--metrics"
    assert recipe.differs() == ()


def test_the_grammar_of_presets_is_that_of_llama_server() -> None:
    # What llama.cpp's own parser returns for this text.
    text = "a=1 ; c\r\n[ s ]\nb  =  x y # z\nc = \n;z\n\n[s2] # h\nd.e-f = 1;2\n[s2]\ng=$a\\\n"
    assert preset_sections(text) == {
        "default": {"a": "1"}, "s ": {"b": "x y", "c": ""}, "s2": {"g": "$a\\"}
    }  # fmt: skip
    with pytest.raises(RecipeError, match="line 2 is none that llama-server reads"):
        preset_sections("a = 1\n b = 2\n")


# --- vLLM's own -------------------------------------------------------------------------------


def as_vllm_loads(config: dict[str, Any]) -> list[str]:
    """Return the words that vLLM makes of a config (load_config_file in utils/argparse_utils)."""
    words: list[str] = []
    for key, value in config.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not False:
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return words


def test_a_vllm_config_has_the_flags_that_were_measured(tmp_path: Path) -> None:
    attempt = served(
        "vllm", "--hf-overrides", '{"a": "b\'c"}', "--lora-modules", "a=b c", "d=e",
        params={"max_model_len": 32768, "gpu_memory_utilization": 0.90, "spec_method": "mtp",
                "n_max": 3, "enforce_eager": True},
        path=SNAPSHOT,
    )  # fmt: skip
    config = yaml.safe_load(written(attempt, "vllm-yaml", tmp_path).read_text())
    assert as_vllm_loads(config) == [
        "8080" if each == "8011" else each for each in attempt.argv[3:]
    ]  # fmt: skip
    assert config["model"] == SNAPSHOT
    assert config["hf-overrides"] == '{"a": "b\'c"}'
    assert config["lora-modules"] == ["a=b c", "d=e"]


def test_hostile_values_stay_what_they_are_in_a_vllm_config(tmp_path: Path) -> None:
    values = [each for each in HOSTILE if not each.startswith("-")]
    words = [word for i, each in enumerate(values) for word in (f"--flag-{'x' * i}y", each)]
    attempt = served("vllm", *words)
    config = yaml.safe_load(written(attempt, "vllm-yaml", tmp_path).read_text())
    assert as_vllm_loads(config)[-len(words) :] == words
    with pytest.raises(RecipeError, match="--seed is given twice"):
        written(served("vllm", "--seed", "1", "--seed", "2"), "vllm-yaml", tmp_path)
    with pytest.raises(RecipeError, match="-q is a short flag"):
        written(served("vllm", "-q", "fp8"), "vllm-yaml", tmp_path)


VLLM_READS = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # before 0.30
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.loads(sys.stdin.read()):
    parsed = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
    read = {name: repr(value) for name, value in parsed.items() if name != "config"}
    print("read", json.dumps(read))
"""


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_vllm_itself_reads_a_config_as_the_measured_command(tmp_path: Path) -> None:
    python = os.environ.get("SWEEPER_VLLM_PYTHON") or str(
        Path(__file__).parents[2] / ".engines" / "vllm" / "bin" / "python"
    )
    if not Path(python).exists():
        pytest.skip("there is no vLLM here; `make engines` builds one")
    attempt = served(
        "vllm", "--hf-overrides", '{"a": "b\'c $x \\\\ é"}', "--chat-template", "{{ a }}\n# $HOME",
        params={"max_model_len": 32768, "gpu_memory_utilization": 0.90, "spec_method": "ngram",
                "n_max": 3, "enforce_eager": True, "compilation_config": {"mode": 0}},
        path=SNAPSHOT,
    )  # fmt: skip
    path = written(attempt, "vllm-yaml", tmp_path)
    measured = ["8080" if each == "8011" else each for each in attempt.argv[3:]]
    shown = ran(python, "-c", VLLM_READS, input=json.dumps([["--config", str(path)], measured]))
    by_config, by_command = (
        json.loads(line.removeprefix("read "))
        for line in shown.split("\n")
        if line.startswith("read ")
    )
    assert by_config["served_model_name"] == "['qwen']"
    assert by_config["port"] == "8080"
    assert by_config == by_command


def test_a_vllm_recipe_has_the_shape_of_the_public_ones(tmp_path: Path) -> None:
    attempt = served(
        "vllm", *HOSTILE, params={"max_model_len": 32768, "tensor_parallel_size": 2},
        path=SNAPSHOT, env=hostile_env(),
    )  # fmt: skip
    found = yaml.safe_load(
        written(attempt, "vllm-recipe", tmp_path, failed=[oom_attempt()]).read_text()
    )
    assert list(found)[:2] == ["meta", "model"]
    assert set(found) == {
        "meta", "model", "features", "opt_in_features", "variants", "compatible_strategies",
        "hardware_overrides", "strategy_overrides", "guide",
    }  # fmt: skip
    assert found["model"]["model_id"] == "Qwen/Qwen3-0.6B"
    assert found["model"]["min_vllm_version"] == "0.32.0"
    args = found["model"]["base_args"]
    assert args[-len(HOSTILE) :] == list(HOSTILE)
    assert not {"--tensor-parallel-size", "--host", "--port", "--model"} & set(args)
    assert found["variants"]["default"]["tp"] == 2
    assert found["model"]["base_env"] == dict(attempt.env)
    assert "decode 40.0 tok/s" in found["guide"]
    assert "oom" in found["guide"]


# --- sparkrun ---------------------------------------------------------------------------------


def test_sparkrun_renders_the_words_that_were_written(tmp_path: Path) -> None:
    attempt = served("vllm", *NO_BRACES, env=hostile_env(), path="/models/qwen")
    found = yaml.safe_load(written(attempt, "sparkrun", tmp_path).read_text())
    # Its `{port}` is the default's; what is in other braces is no placeholder of its.
    words = shlex.split(found["command"].replace("{port}", str(found["defaults"]["port"])))
    assert words[:4] == ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    assert words[-len(NO_BRACES) :] == list(NO_BRACES)
    assert found["env"] == dict(attempt.env)
    assert (found["runtime"], found["model"]) == ("vllm", "/models/qwen")
    assert found["container"] == "vllm/vllm-openai:v0.32.0"
    for wrong in (
        *(served("vllm", word) for word in ("{{ x }}", "{port}", "{model}")),
        served("vllm", env=Pairs(A="{launch.model_path}")),
    ):
        with pytest.raises(RecipeError, match="braces that sparkrun would replace"):
            written(wrong, "sparkrun", tmp_path)


# --- the page ---------------------------------------------------------------------------------


def test_a_page_tells_what_a_reader_asks(tmp_path: Path) -> None:
    attempt = served("llamacpp", params={"context": 32768}, memory_limit_bytes=2**34)
    longest = measured_attempt(9, decode_tok_s=30.0, context=65536)
    failed = [oom_attempt(), unfit_attempt(), broken_attempt(), broken_attempt(6)]
    text = written(attempt, "page", tmp_path, failed=failed, front=[attempt, longest]).read_text()
    for each in (
        "the fastest of them. The longest context is 65,520 tokens",
        "## Requirements", "| Engine | llamacpp 0.32.0 |", "17.00 GiB", "driver 580.95",
        "## Key parameters", "262144 ended as oom\\_kv\\_cache", "65536 does 30.0 tok/s",
        "tokens of the window; the KV cache grows with it",
        "## Measured", "| short |", "40.0 (38.8 to 41.6)",
        "curl -s http://127.0.0.1:8080/v1/chat/completions",
        "**engine\\_crash** (2 attempts", "1536 MiB larger", "Try `context=131072`",
        "measured once, in the search", "`/studies/mine`",
    ):  # fmt: skip
        assert each in text, each
    hand = written(replace(attempt, number=3), "page", tmp_path, front=[longest]).read_text()
    assert "chosen by hand" in hand


def test_the_commands_of_a_page_can_be_pasted(tmp_path: Path) -> None:
    text = (
        written(
            served("llamacpp", *HOSTILE, "````", env=hostile_env(), name="it's"), "page", tmp_path
        )
        .read_bytes()
        .decode()
    )
    opened = re.search(r"^(`{3,})sh$", text, re.MULTILINE)
    assert opened is not None
    start, request, *_ = (
        each.partition(f"\n{opened[1]}")[0] for each in text.split(f"{opened[1]}sh\n")[1:]
    )
    commands = list(shell_commands(start))
    assert commands[-1] == [
        *("8080" if each == "8011" else each for each in served(
            "llamacpp", *HOSTILE, "````", name="it's").argv)
    ]  # fmt: skip
    ((*_, body),) = shell_commands(request)
    assert json.loads(body)["model"] == "it's"


# --- reading ----------------------------------------------------------------------------------


EDITS: dict[str, list[tuple[Callable[[str], str], str]]] = {
    "shell": [
        (lambda text: text.replace("--ctx-size 4096 \\", "--ctx-size 8192 \\"),
         "4096 was measured after --ctx-size, and the file has 8192"),
        (lambda text: text.replace("  --metrics \\\n", ""),
         "--metrics was measured after 0, and the file does not have it"),
        (lambda text: text.replace("  --metrics", "  --mlock --metrics"),
         "the file has --mlock after 0, which was not measured"),
        (lambda text: text.replace("_DEVICES=0", "_DEVICES=1"),
         "CUDA_VISIBLE_DEVICES=0 was measured, and the file has 1"),
        (lambda text: text.replace("export CUDA", "export A='b c'\nexport CUDA"),
         "the file sets A=b c, which was not measured"),
        (lambda text: text.replace("ulimit -v 16777216", "ulimit -v 1048576"),
         "the limit on address space was 16,384 MiB, and the file has 1,024 MiB"),
    ],
    "systemd": [
        (lambda text: text.replace("--ctx-size 4096", "--ctx-size 8192"),
         "4096 was measured after --ctx-size, and the file has 8192"),
        (lambda text: text.replace("Environment=CUDA_VISIBLE_DEVICES=0\n", ""),
         "CUDA_VISIBLE_DEVICES=0 was measured, and the file does not set it"),
        (lambda text: text.replace("LimitAS=17179869184\n", ""),
         "the limit on address space was 16,384 MiB, and the file has none"),
    ],
    "llama-preset": [
        (lambda text: text.replace("ctx-size = 4096", "ctx-size = 8192"),
         "4096 was measured after --ctx-size, and the file has 8192"),
        (lambda text: text.replace("metrics = true", "metrics = false"),
         "the file has false after --metrics, which was not measured"),
        (lambda text: text.replace("metrics = true\n", "metrics = true\nmlock = true\n"),
         "the file has --mlock true after --metrics, which was not measured"),
    ],
    "compose": [
        (lambda text: text.replace('- "4096"', '- "8192"'),
         "4096 was measured after --ctx-size, and the file has 8192"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "edit", "said"),
    [(form, edit, said) for form, edits in EDITS.items() for edit, said in edits],
)
def test_a_changed_recipe_is_seen(
    form: str, edit: Callable[[str], str], said: str, tmp_path: Path
) -> None:
    path = written(served("llamacpp", memory_limit_bytes=2**34), form, tmp_path)
    text = path.read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    recipe = read_recipe(path)
    assert recipe.edited
    assert recipe.differs() == (said,)


def test_another_port_is_no_difference_and_other_lines_are_an_edit(tmp_path: Path) -> None:
    path = written(served("llamacpp"), "systemd", tmp_path)
    path.write_text(path.read_text().replace("--port 8080", "--port 9000"))
    recipe = read_recipe(path)
    assert recipe.differs() == ()
    assert recipe.edited
    assert recipe.command is not None
    assert recipe.command.on_port(9001)[8] == "9001"
    path.write_text(path.read_text() + "Nice=-5\n")
    assert read_recipe(path).edited


def test_a_script_with_a_word_put_before_its_port_still_has_one(tmp_path: Path) -> None:
    path = written(served("llamacpp"), "shell", tmp_path)
    path.write_text(path.read_text().replace("  --alias", "  --mlock --alias"))
    command = read_recipe(path).command
    assert command is not None
    assert command.on_port(1)[8:10] == ("--port", "1")


def test_what_is_no_recipe_is_told_from_one(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    with pytest.raises(RecipeError, match=r"x\.sh cannot be read: No such file"):
        read_recipe(path)
    for text, why in (
        ("exec x\n", "it has no line sweeper-recipe:"),
        ("# sweeper-recipe: {]\n", "is damaged"),
        ('# sweeper-recipe: {"schema": 99}\n', "another schema than 1"),
        ('# sweeper-recipe: {"schema": 1}\n', "it is damaged"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=why):
            read_recipe(path)
    good = written(served("llamacpp"), "shell", tmp_path)
    good.write_text(good.read_text().partition("exec \\")[0])
    with pytest.raises(RecipeError, match="no command in it"):
        read_recipe(good)


# --- which of the front -----------------------------------------------------------------------


def test_the_balanced_one_is_closest_to_the_fastest_and_the_longest() -> None:
    front = [
        measured_attempt(1, decode_tok_s=100.0, context=4096),
        measured_attempt(2, decode_tok_s=90.0, context=65536),
        measured_attempt(3, decode_tok_s=40.0, context=131072),
    ]
    assert [each.number for each in PICKS["balanced"](front)] == [2]
    assert [each.number for each in PICKS["balanced"](front[:1])] == [1]
    same = [replace(front[0], number=4), replace(front[0], number=5)]
    assert [each.number for each in PICKS["balanced"](same)] == [4]


# --- paths of models --------------------------------------------------------------------------


def test_a_container_sees_the_whole_model() -> None:
    assert model_mount("/m/x-00001-of-00003.gguf") == "/m"
    assert model_mount("/m/folder") == "/m/folder"
    assert model_mount(SNAPSHOT) == "/hub/models--Qwen--Qwen3-0.6B"
    assert hub_model(SNAPSHOT) == (
        "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"
    )  # fmt: skip
    assert hub_model("/m/folder") is None


def test_a_recipe_is_text_that_render_returns_too(tmp_path: Path) -> None:
    attempt = served("llamacpp")
    path = written(attempt, "shell", tmp_path)
    assert render(attempt, form="shell", study_folder=Path("/studies/mine")) == path.read_text()
    assert "kind: Deployment" in render(attempt, form="helm", study_folder=tmp_path)
