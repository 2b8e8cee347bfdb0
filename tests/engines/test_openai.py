"""Any OpenAI-compatible server: its template, its signs, and real boots of the fake through it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sweeper.core.launch import Attach, Death, Ended, Launch, Phase
from sweeper.core.outcome import Attempt, HostFault, Infeasible, Measured, Unfit, name
from sweeper.core.pairs import Pairs, Point
from sweeper.core.sample import DraftCounters
from sweeper.core.space import Axis, Space
from sweeper.core.typed import FieldError
from sweeper.core.workload import Repeats, Workload
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.openai import OpenAi
from sweeper.server import Registry, free_port
from sweeper.trial import Job, attempt

MODEL = ModelFacts(
    name="demo", path="/models/demo", served_name="demo", size_bytes=2**30, sha256="0" * 64
)
CONF = Path(__file__).parents[2] / "conf" / "engine"
OPTIONS = EngineOptions(python="/opt/python", binary="/opt/server", boot_timeout_s=30.0)


def launched(params: dict[str, Any], /, **swept: Any) -> Launch:
    engine = OpenAi(params)
    launch = engine.launch(engine.settings({**params, **swept}), MODEL, OPTIONS, 8011)
    assert isinstance(launch, Launch)
    return launch


def argv(*command: Any, values: dict[str, Any] | None = None, **swept: Any) -> list[str]:
    """Return the command line of a template, without the program and the port at its start."""
    params = {"command": ["run", "{port}", *command], "values": values or {}}
    return list(launched(params, **swept).argv[2:])


def refused(params: dict[str, Any], /, **swept: Any) -> FieldError:
    with pytest.raises(FieldError) as error:
        launched(params, **swept)
    return error.value


def died(*, was_ready: bool = False, code: int | None = 1, ended: Ended = Ended.EXITED) -> Death:
    return Death(ended=ended, after_s=3.0, was_ready=was_ready, exit_code=code)


def verdict(*log: str, engine: OpenAi | None = None, death: Death | None = None) -> str:
    judge = engine if engine is not None else OpenAi()
    return name(judge.verdict(death if death is not None else died(), log))


# ---- The template ------------------------------------------------------------------------------


def test_every_placeholder_of_sweepers_own_is_filled() -> None:
    launch = launched(
        {
            "command": [
                "{binary}", "{python}", "{host}:{port}", "{model}", "{served_name}", "{context}",
            ],
            "context": 8192,
        }
    )  # fmt: skip
    assert launch.argv == (
        "/opt/server", "/opt/python", "127.0.0.1:8011", "/models/demo", "demo", "8192",
    )  # fmt: skip


def test_an_axis_fills_a_placeholder_of_its_name_over_the_value_of_the_study() -> None:
    assert argv("--kv={kv}", values={"kv": "f16"}) == ["--kv=f16"]
    assert argv("--kv={kv}", values={"kv": "f16"}, kv="q8_0") == ["--kv=q8_0"]
    assert argv("--kv={kv}", kv="q8_0") == ["--kv=q8_0"]


def test_an_argument_whose_placeholder_is_null_is_left_out() -> None:
    assert argv("--kv={kv}", "--x", values={"kv": None}) == ["--x"]
    assert argv("{draft_model}", "last") == ["last"]


def test_a_group_is_left_out_whole_where_a_placeholder_is_null_or_false() -> None:
    group = ["--draft", "{kind}", "--n", "{n}"]
    assert argv(group, kind="mtp", n=3) == ["--draft", "mtp", "--n", "3"]
    assert argv(group, kind="mtp", n=None) == []
    assert argv(group, kind=False, n=3) == []
    assert argv(group, kind="mtp", n=0) == ["--draft", "mtp", "--n", "0"]


def test_a_group_with_true_is_a_switch() -> None:
    assert argv(["--flash", "{flash}"], flash=True) == ["--flash"]
    assert argv(["--flash={flash}"], flash=True) == ["--flash=true"]
    assert argv(["--flash", "{flash}"], flash=False) == []


def test_a_null_that_would_leave_a_flag_without_its_value_is_refused() -> None:
    error = refused({"command": ["run", "{port}", "--kv", "{kv}"]}, kv=None)
    assert error.key == "kv"
    assert '[--kv, "{kv}"]' in error.message


def test_doubled_braces_are_braces() -> None:
    assert argv('--config={{"n": {n}}}', n=3) == ['--config={"n": 3}']


@pytest.mark.parametrize(
    "argument", ['{"n": 3}', "{n!r}", "{n:>3}", "{n.real}", "{n[0]}", "{}", "{", "}", "{0}"]
)
def test_what_is_no_plain_placeholder_is_refused_with_how_to_write_a_brace(argument: str) -> None:
    error = refused({"command": ["run", "{port}", argument], "values": {"n": 3}})
    assert error.key == "command[2]"
    assert "{{ and }}" in error.message


def test_numbers_in_a_template_are_arguments() -> None:
    assert argv("--tp", 2, 0.5) == ["--tp", "2", "0.5"]


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_value_is_one_argument_as_it_is_whatever_is_in_it(value: str) -> None:
    assert argv("{x}", "--y={x}", x=value) == [value, f"--y={value}"]


def test_a_misspelt_placeholder_is_answered_with_the_one_that_was_meant() -> None:
    error = refused({"command": ["run", "{port}", "--ctx={contxt}"]})
    assert error.key == "command[2]"
    assert "{contxt}" in error.message
    assert "did you mean context" in error.message


def test_an_axis_that_fills_nothing_is_refused_with_the_name_that_was_meant() -> None:
    error = refused({"command": ["run", "{port}", "--kv={kv_type}"]}, kv_typ="f16")
    assert error.key == "kv_typ"
    assert "did you mean kv_type" in error.message


def test_a_value_that_fills_nothing_is_refused() -> None:
    assert refused({"command": ["run", "{port}"], "values": {"a": 1}}).key == "values.a"


@pytest.mark.parametrize("mine", ["port", "host", "model", "python", "served_name"])
def test_what_sweeper_fills_cannot_be_set(mine: str) -> None:
    assert refused({"command": ["run", "{port}", f"{{{mine}}}"]}, **{mine: "x"}).key == mine
    params = {"command": ["run", "{port}"], "values": {mine: "x"}}
    assert refused(params).key == f"values.{mine}"


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({}, "command"),
        ({"command": ["run"]}, "command"),
        ({"command": "run --port {port}"}, "command"),
        ({"command": ["run", "{port}", True]}, "command[2]"),
        ({"command": ["run", ["--port", "{port}", "{x}"]], "values": {"x": None}}, "command"),
        ({"command": ["sh", "-c", "run {port}"]}, "command"),
        ({"command": ["env", "bash", "-lc", "run {port}"]}, "command"),
        ({"command": ["run", "{port}"], "context": 1}, "context"),
        ({"command": ["run", "{port}", "{x}"], "values": {"x": "a\0b"}}, "command[2]"),
        ({"command": ["run", "{port}"], "url": "http://127.0.0.1:1"}, "url"),
        ({"command": ["run", "{port}"], "health_path": "health"}, "health_path"),
        ({"command": ["run", "{port}"], "ready": "("}, "ready"),
        ({"command": ["run", "{port}"], "tokenize_path": None}, "tokenize_path"),
        (
            {"command": ["run", "{port}"], "milestones": [{"phase": "wights", "pattern": "x"}]},
            "milestones[0].phase",
        ),
        (
            {"command": ["run", "{port}"], "signs": [{"pattern": "x", "outcome": "oom"}]},
            "signs[0].outcome",
        ),
        (
            {
                "command": ["run", "{port}"],
                "signs": [{"pattern": "x", "outcome": "oom_kv_cache", "phase": "kv"}],
            },
            "signs[0].phase",
        ),
        ({"command": ["run", "{port}"], "facts": {"a": "no group"}}, "facts.a"),
        ({"command": ["run", "{port}"], "counters": {"drafted": "x"}}, "counters.steps"),
        ({"command": ["run", "{port}"], "counters": {"draftd": "x"}}, "counters.draftd"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(params: dict[str, Any], key: str) -> None:
    assert refused(params).key == key


def test_an_axis_cannot_change_how_the_engine_talks() -> None:
    error = refused({"command": ["run", "{port}"]}, health_path="/other")
    assert error.key == "health_path"


def test_the_names_an_axis_may_set_are_those_of_the_template() -> None:
    bound = OpenAi().for_study({"command": ["run", "{port}", "{a}", ["{b}"]], "values": {"c": 1}})
    names = bound.setting_names()
    assert {"context", "a", "b", "c"} <= set(names)
    assert not {"port", "host", "model"} & set(names)


def test_the_port_argument_is_named_only_where_a_recipe_can_replace_it() -> None:
    assert launched({"command": ["run", "--port", "{port}"]}).port_argument == 2
    assert launched({"command": ["run", "--port={port}"]}).port_argument is None
    assert launched({"command": ["run", "{port}", "{port}"]}).port_argument is None
    numbers = {"command": ["run", "8011", "{port}"]}
    assert launched(numbers).port_argument == 2


def test_a_program_that_is_not_there_is_found_out_before_a_boot() -> None:
    missing = OpenAi({"command": ["no-such-program-here", "{port}"]}).find(EngineOptions())
    assert isinstance(missing, HostFault)
    assert "no-such-program-here" in missing.finding.explanation
    there = OpenAi({"command": [sys.executable, "{port}"]})
    assert there.find(EngineOptions()) == EngineOptions()
    assert isinstance(OpenAi({"command": ["{binary}"]}).find(EngineOptions()), HostFault)
    assert OpenAi({"command": ["{python}"]}).find(EngineOptions()) == EngineOptions()


def test_footprints_of_different_values_say_nothing_of_each_other() -> None:
    params = {"command": ["run", "{port}", "{kv}"]}
    engine = OpenAi(params)

    def footprint(context: int, kv: str) -> Any:
        return engine.footprint(engine.settings({**params, "context": context, "kv": kv}), MODEL)

    assert footprint(8192, "a").needs_at_least(footprint(4096, "a"))
    assert not footprint(4096, "a").needs_at_least(footprint(8192, "a"))
    assert not footprint(8192, "b").needs_at_least(footprint(4096, "a"))


# ---- The address -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000", "http://localhost:8000/", "https://10.1.2.3", "http://[::1]:80",
        "http://192.168.0.9:8000/engine", "http://172.16.0.1:1", "http://[fd00::1]:8000",
    ],
)  # fmt: skip
def test_a_near_address_is_attached_to(url: str) -> None:
    engine = OpenAi({"url": url})
    attach = engine.launch(engine.settings({"url": url}), MODEL, OPTIONS, 1)
    assert attach == Attach(base_url=url.rstrip("/"), health_path="/health")


@pytest.mark.parametrize(
    "url",
    [
        "http://8.8.8.8:80", "http://example.org", "http://user:pw@127.0.0.1:1", "ftp://127.0.0.1",
        "http://127.0.0.1:8000/v1", "http://127.0.0.1:99999", "http://169.254.169.254", "http://",
        "http://0.0.0.0:8000", "http://127.0.0.1/?a=b", "http://127.0.0.1 :80", "127.0.0.1:8000",
        "http://example.org\\@127.0.0.1", "http://2130706433", "http://[::ffff:8.8.8.8]:1",
        "http://127.0.0.1.example.org", "http://127.0.0.1\n.example.org", "http://172.32.0.1", "",
    ],
)  # fmt: skip
def test_any_other_address_is_refused(url: str) -> None:
    with pytest.raises(FieldError) as error:
        OpenAi({"url": url}).settings({"url": url})
    assert error.value.key == "url"


def test_a_password_in_an_address_is_not_repeated_in_the_message() -> None:
    url = "http://me:hunter2@127.0.0.1"
    with pytest.raises(FieldError) as error:
        OpenAi({"url": url}).settings({"url": url})
    assert "hunter2" not in str(error.value)


# ---- The log -----------------------------------------------------------------------------------

STAGED = OpenAi(
    {
        "ready": "^up$",
        "milestones": [
            {"phase": "weights", "pattern": "^weights"},
            {"phase": "kv", "pattern": "^pool"},
            {"phase": "capture", "pattern": "^graphs"},
        ],
        "signs": [
            {"phase": "kv", "pattern": "pool is empty", "outcome": "oom_kv_cache"},
            {"pattern": "flux inverted", "outcome": "unsupported_combination"},
        ],
        "facts": {"engine_version": r"^version (\S+)", "pool_tokens": r"#tokens: ([\d,]+)"},
        "counters": {
            "steps": "x:steps_total", "drafted": "x:drafted_total", "accepted": "x:accepted_total",
            "accepted_per_position": "x:at_total",
        },
    }
)  # fmt: skip
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.50 GiB is free."  # noqa: E501


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (["weights", OOM], "oom_weights"),
        (["weights", "pool", OOM], "oom_kv_cache"),
        (["weights", "pool", "graphs", OOM], "oom_cudagraph_capture"),
        (["weights", "pool", "graphs", "up", OOM], "oom_runtime"),
        ([OOM], "oom_compute"),
        (["weights", OOM, "pool", "Segmentation fault"], "engine_crash"),
        (["weights", OOM, "pool", "weights of the draft", "dead"], "engine_crash"),
        (["weights", "pool", "the pool is empty"], "oom_kv_cache"),
        (["weights", "the pool is empty"], "engine_crash"),
        (["flux inverted"], "unsupported_combination"),
        (["up", "dead"], "engine_died_mid_benchmark"),
        (["up", "error: unrecognized arguments: --x"], "engine_died_mid_benchmark"),
    ],
)
def test_the_phase_decides_and_the_text_refines(log: list[str], expected: str) -> None:
    assert verdict(*log, engine=STAGED) == expected


def test_the_numbers_of_an_allocation_that_failed_are_facts() -> None:
    failure = STAGED.verdict(died(), ["weights", OOM])
    assert isinstance(failure, Infeasible)
    assert failure.finding.facts["required_bytes"] == 2 * 2**30
    assert failure.finding.facts["free_bytes"] == 1536 * 2**20


def test_out_of_memory_without_milestones_says_that_its_use_is_not_known() -> None:
    failure = OpenAi().verdict(died(), [OOM])
    assert "not known" in failure.finding.explanation


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("launch_server.py: error: unrecognized arguments: --warp 9", "bad_argument"),
        ("error: argument --dtype: invalid choice: 'f17'", "bad_argument"),
        ("/opt/venv/bin/python: No module named sglang", "engine_not_found"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("RuntimeError: unable to write to file </dev/shm/x>: No space left on device",
         "shm_exhausted"),
        ("error: CUDA driver version is insufficient for CUDA runtime version", "driver_mismatch"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/model.gguf'",
         "model_not_found_or_gated"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/proc/cpuset'", "engine_crash"),
        ("MemoryError", "host_ram_oom"),
        ("Killed", "engine_crash"),
        ("anything else", "engine_crash"),
    ],
)  # fmt: skip
def test_words_that_every_engine_shares_are_known_without_a_study(line: str, expected: str) -> None:
    assert verdict("starting", line) == expected


def test_a_kill_is_a_crash_that_names_what_it_may_have_been() -> None:
    failure = OpenAi().verdict(died(code=-9), ["loading"])
    assert name(failure) == "engine_crash"
    assert "out of memory" in failure.finding.explanation


def test_a_late_boot_is_late_whatever_it_complained_of() -> None:
    late = died(ended=Ended.LATE, code=None)
    assert verdict(OOM, death=late) == "boot_timeout"
    assert verdict(death=late) == "hang_boot"
    assert verdict("flux inverted", engine=STAGED, death=late) == "unsupported_combination"


def test_a_living_server_that_names_its_memory_is_out_of_it() -> None:
    def complaint(detail: str) -> Death:
        return Death(ended=Ended.LIVES, after_s=9.0, was_ready=True, detail=detail)

    assert verdict("up", engine=STAGED, death=complaint("CUDA out of memory")) == "oom_runtime"
    assert verdict("up", OOM, engine=STAGED, death=complaint("error 500")) == "oom_runtime"
    assert verdict(OOM, "up", engine=STAGED, death=complaint("error 500")) == "http_500"
    assert verdict(OOM, death=complaint("error 500")) == "http_500"


def test_old_words_are_no_cause_of_a_death_long_after() -> None:
    served = died(was_ready=True)
    assert verdict(OOM, *["ok"] * 500, "gone", death=served) == "engine_died_mid_benchmark"
    assert verdict(*["ok"] * 500, OOM, "gone", death=served) == "oom_runtime"


def test_what_the_studys_patterns_read_is_evidence() -> None:
    facts = STAGED.evidence(["version 0.5.9 (x)", "#tokens: 12,345", "version 0.0"])
    assert facts == Pairs(engine_version="0.5.9", pool_tokens=12345)


def test_a_smaller_window_than_asked_is_a_contradiction() -> None:
    settings = STAGED.settings(
        {**{n: getattr(STAGED.dialect, n) for n in ("ready", "milestones", "signs", "facts")},
         "counters": STAGED.dialect.counters, "command": ["run", "{port}"], "context": 8192}
    )  # fmt: skip
    models = '{"data": [{"id": "demo", "max_model_len": 4096}]}'
    found = STAGED.contradiction(settings, Pairs(), models)
    assert isinstance(found, Unfit)
    assert name(found) == "degraded_capacity"
    for fine in (None, "", "[]", "{", "not json", '{"data": [{}]}', models.replace("4096", "8192")):
        assert STAGED.contradiction(settings, Pairs(), fine) is None
    props = '{"default_generation_settings": {"n_ctx": 512}}'
    assert STAGED.contradiction(settings, Pairs(), props) is not None


def test_the_counters_that_the_study_names_are_read_and_summed() -> None:
    page = (
        'x:steps_total{dp="0"} 3\nx:steps_total{dp="1"} 4\nx:drafted_total 20\nx:accepted_total 9\n'
        'x:at_total{position="1"} 3\nx:at_total{position="0"} 6\n'
    )
    assert STAGED.draft_counters(page) == DraftCounters(
        steps=7, drafted=20, accepted=9, accepted_per_position=(6, 3)
    )
    assert STAGED.draft_counters("x:steps_total 3\n") is None
    assert STAGED.draft_counters("<html>not {metrics") is None
    assert STAGED.draft_counters("x:steps_total NaN\nx:drafted_total 1\n") is None


def test_a_foreign_death_is_told_from_its_signs_alone() -> None:
    assert name(STAGED.diagnose(["hello"], None)) == "unknown"
    assert name(STAGED.diagnose(["weights", "up"], None)) == "none"
    assert name(STAGED.diagnose(["weights", OOM], None)) == "oom_weights"
    assert STAGED.milestone("pool of 5") is Phase.KV


# ---- Configs that ship -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sglang", "ik_llama", "apptainer"])
def test_the_examples_in_the_shipped_config_make_command_lines(kind: str) -> None:
    text = (CONF / "openai.yaml").read_text()
    block = next(part for part in text.split("# --- ")[1:] if kind in part.lower())
    lines = [line.removeprefix("# ").removeprefix("#") for line in block.splitlines()[1:]]
    params = yaml.safe_load("\n".join(lines))["params"]
    launch = launched(params)
    assert "127.0.0.1" in " ".join(launch.argv)
    assert not [each for each in launch.argv if "{" in each or each == "None"]


def test_the_defaults_named_in_the_shipped_config_are_the_defaults() -> None:
    text = (CONF / "openai.yaml").read_text()
    engine = OpenAi({"command": ["run", "{port}"]})
    settings = engine.settings({"command": ["run", "{port}"]})
    reference = text.split("# --- ")[0]
    stated = dict(re.findall(r"^#   (\w+): +(.+?)(?: +#.*)?$", reference, re.MULTILINE))
    assert set(stated) == {*type(settings).__dataclass_fields__}
    for key, value in stated.items():
        if key != "command":
            default, said = getattr(settings, key), yaml.safe_load(value)
            assert default == said or (not default and not said), key


# ---- The real thing ----------------------------------------------------------------------------

FAKE_COMMAND = [
    "{python}", "-m", "sweeper.engines.fake_server", ["--port", "{port}"],
    ["--context", "{context}"], ["--model", "{served_name}"], ["--n-max", "{n_max}"],
    ["--ending", "{ending}"], "--time-scale=50", "--capacity-mib={capacity}",
]  # fmt: skip
FAKE_PARAMS: dict[str, Any] = {
    "command": FAKE_COMMAND,
    "values": {"n_max": 0, "ending": None, "capacity": 1024},
    "ready": "^fake: ready on ",
    "milestones": [
        {"phase": "weights", "pattern": "^fake: loading weights"},
        {"phase": "kv", "pattern": "^fake: allocating kv_cache"},
        {"phase": "compute", "pattern": "^fake: allocating compute"},
    ],
    "signs": [{"phase": "kv", "pattern": "cannot allocate .* MiB", "outcome": "oom_kv_cache"}],
    "facts": {"engine_version": r"^fake: engine \S+ (\S+)"},
    "counters": {
        "steps": "fake:spec_decode_num_drafts_total",
        "drafted": "fake:spec_decode_num_draft_tokens_total",
        "accepted": "fake:spec_decode_num_accepted_tokens_total",
        "accepted_per_position": "fake:spec_decode_num_accepted_tokens_per_pos_total",
    },
}
SHORT = Workload(
    name="short", prompt="Once upon a time there was", max_tokens=16, proof_answer_tokens=8,
    repeats=Repeats(least=2, most=2, warmup_min=1, warmup_max=1),
    request_timeout_s=60.0, silence_timeout_s=30.0,
)  # fmt: skip


def attempted(folder: Path, params: dict[str, Any], **swept: Any) -> Attempt:
    """Return an attempt at one point of a study of these parameters, with a real process."""
    engine: Engine = OpenAi().for_study(params)
    job = Job(
        study="template",
        engine=engine,
        params=params,
        options=EngineOptions(python=sys.executable, boot_timeout_s=30.0, stop_timeout_s=5.0),
        models={None: MODEL},
        space=Space(
            axes=tuple(
                Axis(name=each, values=(value,), ordered=False, sets=(each,))
                for each, value in swept.items()
            )
        ),
        workload=SHORT,
        hardware=Pairs(hardware="invented"),
        host=Pairs(cpu="any"),
    )
    return attempt(
        job, Point(swept), number=1, trial=0, folder=folder,
        registry=Registry(folder / "started.json"), watch=lambda _: None,
    )  # fmt: skip


def test_a_server_from_a_template_is_booted_proven_and_measured(tmp_path: Path) -> None:
    done = attempted(tmp_path, FAKE_PARAMS, context=512, n_max=4)
    assert isinstance(done.outcome, Measured), done.outcome
    assert done.outcome.context.window_tokens == 512
    assert done.outcome.drafts is not None
    assert done.outcome.drafts.drafted > 0
    assert done.engine["engine_version"] == "1.0"
    assert done.port_argument is not None
    assert done.argv[done.port_argument - 1] == "--port"


def test_a_context_that_does_not_fit_is_what_the_studys_sign_calls_it(tmp_path: Path) -> None:
    done = attempted(tmp_path, FAKE_PARAMS, context=65536)
    assert name(done.outcome) == "oom_kv_cache"


def test_an_end_that_the_study_does_not_know_stays_a_crash(tmp_path: Path) -> None:
    done = attempted(tmp_path, FAKE_PARAMS, context=512, ending="segfault-boot")
    assert name(done.outcome) == "engine_crash"


def test_a_wrong_flag_in_a_template_is_a_bad_argument(tmp_path: Path) -> None:
    params = {**FAKE_PARAMS, "command": [*FAKE_COMMAND, "--warp", "9"]}
    assert name(attempted(tmp_path, params, context=512).outcome) == "bad_argument"


@contextlib.contextmanager
def somebody_elses(*flags: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run the fake server as a person would, and yield its port once it is ready."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "sweeper.engines.fake_server", "--port", str(port),
         "--time-scale", "50", "--model", "demo", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while "ready on" not in (line := process.stdout.readline()):
            assert line, "it ended before it was ready"
        yield port, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_running_server_is_measured_and_left_running(tmp_path: Path) -> None:
    with somebody_elses("--context", "512") as (port, process):
        url = f"http://127.0.0.1:{port}"
        done = attempted(tmp_path, {"url": url}, context=512)
        assert isinstance(done.outcome, Measured), done.outcome
        assert done.outcome.context.window_tokens == 512
        assert done.engine["attached_to"] == url
        assert done.argv == ()
        assert process.poll() is None


def test_a_context_beyond_a_running_servers_window_is_not_proven(tmp_path: Path) -> None:
    with somebody_elses("--context", "256") as (port, _):
        done = attempted(tmp_path, {"url": f"http://127.0.0.1:{port}"}, context=1024)
    assert name(done.outcome) in ("http_400_context", "degraded_capacity")


def test_a_running_server_that_dies_is_said_to_be_gone(tmp_path: Path) -> None:
    with somebody_elses("--context", "512", "--ending", "crash-serving") as (port, _):
        done = attempted(tmp_path, {"url": f"http://127.0.0.1:{port}"}, context=512)
    assert name(done.outcome) == "engine_died_mid_benchmark"


def test_an_address_where_nothing_answers_says_so(tmp_path: Path) -> None:
    done = attempted(tmp_path, {"url": f"http://127.0.0.1:{free_port()}"}, context=512)
    assert isinstance(done.outcome, HostFault)
    assert "nothing answers" in done.outcome.finding.cause
