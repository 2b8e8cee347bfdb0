"""A chat that is asked of a model without a chat template: refused before a boot, or an outcome."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shell.conftest import MODEL, SHORT, fake_job
from tests.tiny_gguf import write_tiny_gguf

from sweeper.conf import load
from sweeper.core.pairs import Pairs
from sweeper.engines import foreign_template, load_engine
from sweeper.gguf_header import GgufHeader
from sweeper.models import ModelChoice, gguf_facts, resolve_models
from sweeper.orchestrate import StudyError, prepare
from sweeper.places import conf_dirs
from sweeper.plan import make_plan
from sweeper.trial import Job

CHAT = replace(SHORT, name="talk", api="chat")
CHATML = (
    "{%- for message in messages -%}\n  {{- '<|im_start|>' + message.role + '\n' + message.content "
    "+ '<|im_end|>\n' -}}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n  "
    "{{- '<|im_start|>assistant\n' -}}\n{%- endif -%}"
)
"""What `/props` of llama.cpp has for a model without a template."""


def _job(*, template: bool | None, workload: Any = CHAT, **options: Any) -> Job:
    job = fake_job(workload=workload)
    facts = Pairs() if template is None else Pairs(chat_template=template)
    return replace(
        job, models={None: replace(MODEL, facts=facts)}, options=replace(job.options, **options)
    )


def test_a_chat_of_a_model_without_a_template_says_what_to_do() -> None:
    said = _job(template=False).without_template()
    assert said is not None
    for part in ("talk", "demo", "workload.api=completion", "--chat-template"):
        assert part in said


def test_where_there_is_one_or_nobody_knows_or_no_chat_is_asked_nothing_is_said() -> None:
    assert _job(template=True).without_template() is None
    assert _job(template=None).without_template() is None
    assert _job(template=False, workload=SHORT).without_template() is None


@pytest.mark.parametrize(
    "options",
    [
        {"extra_args": ("--chat-template", "gemma")},
        {"extra_args": ("--chat-template-file=chat.jinja",)},
        {"env": Pairs(LLAMA_ARG_CHAT_TEMPLATE="gemma")},
        {"prefix": ("docker", "run", "-e", "X", "--chat-template", "a")},
    ],
)
def test_a_template_that_the_study_brings_is_one(options: dict[str, Any]) -> None:
    assert _job(template=False, **options).without_template() is None


def test_arguments_of_a_template_are_none() -> None:
    said = _job(template=False, extra_args=("--chat-template-kwargs", "{}")).without_template()
    assert said is not None


def test_a_template_in_each_request_is_one() -> None:
    asked = replace(CHAT, request=Pairs(chat_template="{{ messages }}"))
    assert _job(template=False, workload=asked).without_template() is None


@pytest.mark.parametrize("api", ["completion", "chat"])
def test_a_study_is_refused_in_plan_and_before_a_run(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    loaded = load(
        ["study=fake_demo", f"model.path={tmp_path}", f"workload.api={api}", "plan.points=1",
         "sampler.name=random"],
        conf_dirs(),
    )  # fmt: skip
    problems = " ".join(make_plan(loaded, [])["problems"])
    if api == "completion":
        assert "chat template" not in problems
        assert prepare(loaded).workload.api == "completion"
        return
    assert "has no chat template" in problems
    with pytest.raises(StudyError, match="has no chat template"):
        prepare(loaded)


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({"tokenizer_config.json": {"chat_template": "{{ messages }}"}}, True),
        ({"tokenizer_config.json": {"bos_token": "<s>"}}, False),
        ({"tokenizer_config.json": {}, "chat_template.jinja": "{{ messages }}"}, True),
        ({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "x"}}, True),
        ({"tokenizer_config.json": {}, "tekken.json": {}}, None),  # it has its own built in
        ({}, None),
    ],
)
def test_a_folder_of_weights_tells_by_its_tokenizer(
    files: dict[str, Any], known: bool | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (model,) = resolve_models(ModelChoice(name="m", path=str(tmp_path))).values()
    assert model.facts.get("chat_template") is known


def test_a_gguf_tells_by_its_metadata(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", layers=1)
    (model,) = resolve_models(ModelChoice(name="m", path=str(path))).values()
    assert model.facts["chat_template"] is True
    bare = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2"}
    header = GgufHeader(version=3, metadata=bare, array_lengths={}, tensors=(), data_bytes=0)
    assert gguf_facts(header)["chat_template"] is False


def test_a_server_that_fell_back_says_so_on_its_page_or_in_its_log() -> None:
    engine = load_engine("llamacpp")
    page = json.dumps({"chat_template": CHATML, "eos_token": "<eos>"})
    assert foreign_template(engine, Pairs(), page) is not None
    own = json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"})
    assert foreign_template(engine, Pairs(), own) is None
    other = json.dumps({"chat_template": "{{ messages }}", "eos_token": "<eos>"})
    assert foreign_template(engine, Pairs(), other) is None
    assert foreign_template(engine, Pairs(), None) is None
    log = [
        "W srv  load_model: the chat template that comes with this model is not yet supported, "
        "falling back to chatml. This may cause the model to output suboptimal responses"
    ]
    assert foreign_template(engine, engine.evidence(log), None) is not None


def test_an_engine_that_shows_no_template_is_not_accused() -> None:
    assert foreign_template(load_engine("fake"), Pairs(), "{}") is None
