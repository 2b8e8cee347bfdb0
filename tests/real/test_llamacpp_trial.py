"""Whole attempts on the real llama.cpp server of the xllamacpp wheel.

The model is tiny and its weights are random: memory, context and speculation are real, speed and
text say nothing of any model.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest
from tests.tiny_gguf import write_tiny_gguf

from sweeper.conf import load
from sweeper.core.launch import Phase
from sweeper.core.outcome import (
    Attempt,
    HostFault,
    HostFaultName,
    Infeasible,
    InfeasibleName,
    Measured,
    Unfit,
    UnfitName,
)
from sweeper.core.pairs import Pairs, Point
from sweeper.core.sample import Purpose
from sweeper.orchestrate import StudyError, prepare
from sweeper.places import conf_dirs
from sweeper.recipe import write_recipes
from sweeper.server import Registry, free_port
from sweeper.trial import Job, attempt

pytestmark = pytest.mark.llamacpp

MARK = "SWEEPER_TEST_FOLDER"
STUDY = """
# @package _global_
defaults:
  - override /engine: llamacpp
name: tiny
model: {{ name: tiny, path: {model} }}
hardware: {{ memory_limit: {limit} }}
engine:
  params: {{ threads: 1, threads_http: 2, spec_type: ngram-simple, ngram_size: 4 }}
space:
  context: [256, 1024, 131072]
  n_max: [0, 8]
  flash_attn: ["on", "off"]
  kv_type: {{ choices: [f16, q8_0], sets: [cache_type_k, cache_type_v] }}
workload: {{ max_tokens: 64, repeats: {{ least: 3, most: 3 }} }}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, context_length=131072)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEPER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def job(model: Path, tmp_path: Path, cache: Path) -> Job:
    del cache
    return _job(model, tmp_path, limit="540MiB")


def _job(model: Path, folder: Path, *, limit: str, overrides: Sequence[str] = ()) -> Job:
    studies = folder / "conf" / "study"
    studies.mkdir(parents=True, exist_ok=True)
    (studies / "tiny.yaml").write_text(STUDY.format(model=model, limit=limit).lstrip())
    mark = f"+engine.env.{MARK}='{folder}'"
    return prepare(load(["+study=tiny", mark, *overrides], conf_dirs(cwd=folder)))


def _attempt(job: Job, point: Point, folder: Path) -> Attempt:
    return attempt(
        job,
        point,
        number=1,
        trial=0,
        folder=folder,
        registry=Registry(folder / "started.json"),
        watch=lambda _: None,
    )


def _point(
    *, context: int = 256, n_max: int = 0, flash_attn: str = "on", kv_type: str = "f16"
) -> Point:
    return Pairs(context=context, n_max=n_max, flash_attn=flash_attn, kv_type=kv_type)


def _engines_left(folder: Path) -> list[int]:
    """Return the processes that carry this test's mark; others may run engines beside us."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder):
                left.append(process.pid)
        except psutil.Error:
            continue
    return left


def test_a_real_server_is_measured_with_every_token_of_its_window(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(context=1024), tmp_path)
    assert isinstance(done.outcome, Measured), done.outcome
    context = done.outcome.context
    assert context.proven_tokens == context.window_tokens == context.configured_tokens == 1024
    assert context.refuses_more is True
    timed = [each for each in done.samples if each.purpose is Purpose.MEASURE]
    assert [each.completion_tokens for each in timed] == [64, 64, 64]
    assert all(each.server["predicted_n"] == each.completion_tokens for each in timed)
    assert done.outcome.decode_tok_s.n == 3
    assert done.engine["effective_context_tokens"] == 1024
    assert str(done.engine["engine_version"]).startswith("xllamacpp")
    assert _engines_left(tmp_path) == []


def test_the_kv_cache_that_the_engine_prints_is_the_one_that_was_predicted(
    job: Job, tmp_path: Path
) -> None:
    done = _attempt(job, _point(context=1024, kv_type="q8_0"), tmp_path)
    assert isinstance(done.outcome, Measured), done.outcome
    assert done.engine["kv_cache_bytes"] == pytest.approx(
        done.footprint.bytes_of("kv_cache"), rel=0.01
    )


def test_a_real_server_speculates_and_counts_it(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(context=1024, n_max=8), tmp_path)
    assert isinstance(done.outcome, Measured), done.outcome
    drafts = done.outcome.drafts
    assert drafts is not None
    assert 0 < drafts.accepted <= drafts.drafted
    assert sum(drafts.accepted_per_position) == drafts.accepted
    timed = [each for each in done.samples if each.purpose is Purpose.MEASURE]
    said = sum(int(each.server.get("draft_n_accepted") or 0) for each in timed)
    assert said == drafts.accepted


def test_a_context_beyond_the_limit_really_runs_out_of_memory_for_the_kv_cache(
    job: Job, tmp_path: Path
) -> None:
    done = _attempt(job, _point(context=131072), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.OOM_KV_CACHE
    facts = done.outcome.finding.facts
    assert facts["limit_bytes"] == 540 * 2**20
    required, free, missing = (
        facts["required_bytes"], facts["free_bytes"], facts["shortfall_bytes"],
    )  # fmt: skip
    assert isinstance(required, int)
    assert isinstance(free, int)
    assert missing == required - free > 0
    assert _engines_left(tmp_path) == []


def test_weights_beyond_the_limit_really_run_out_of_memory(tmp_path: Path, cache: Path) -> None:
    del cache
    large = write_tiny_gguf(
        tmp_path / "large.gguf", layers=8, embedding=512, feed_forward=4096, heads=8
    )
    job = _job(
        large, tmp_path, limit="235MiB", overrides=["+engine.params.mmap=false", "enqueue=[]"]
    )
    done = _attempt(job, _point(), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.OOM_WEIGHTS
    assert done.outcome.finding.phase is Phase.WEIGHTS


def test_buffers_beyond_the_limit_really_run_out_of_memory_for_compute(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    del cache
    wide = ["+engine.params.batch=8192", "+engine.params.ubatch=8192", "space.context=[8192]"]
    job = _job(model, tmp_path, limit="540MiB", overrides=wide)
    done = _attempt(job, _point(context=8192, flash_attn="off"), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.OOM_COMPUTE
    assert done.outcome.finding.facts["required_bytes"] > done.outcome.finding.facts["free_bytes"]


def test_a_model_that_is_cut_off_is_a_fault_of_the_host_and_not_of_the_point(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    del cache
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-100_000])
    done = _attempt(_job(cut, tmp_path, limit="540MiB"), _point(), tmp_path)
    assert isinstance(done.outcome, HostFault), done.outcome
    assert done.outcome.name is HostFaultName.MODEL_NOT_FOUND_OR_GATED


def test_a_missing_model_is_refused_before_anything_boots(tmp_path: Path, cache: Path) -> None:
    del cache
    with pytest.raises(StudyError, match="there is no file"):
        _job(tmp_path / "nowhere.gguf", tmp_path, limit="540MiB")


def test_a_draft_of_another_vocabulary_serves_without_speculation_and_must_not_win(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    del cache
    other = write_tiny_gguf(tmp_path / "other.gguf", vocab_size=2048)
    job = _job(
        model, tmp_path, limit="900MiB",
        overrides=[f"model.draft_path={other}", "engine.params.spec_type=draft-simple"],
    )  # fmt: skip
    done = _attempt(job, _point(context=1024, n_max=8), tmp_path)
    assert isinstance(done.outcome, Unfit), done.outcome
    assert done.outcome.name in (UnfitName.SILENT_FALLBACK, UnfitName.DRAFT_INEFFECTIVE)


def test_a_quantised_cache_without_flash_attention_is_an_unsupported_combination(
    job: Job, tmp_path: Path
) -> None:
    done = _attempt(job, _point(flash_attn="off", kv_type="q8_0"), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.UNSUPPORTED_COMBINATION


def test_a_prompt_that_does_not_fit_the_window_makes_the_point_unfit(
    job: Job, tmp_path: Path
) -> None:
    done = _attempt(job, _point(context=256), tmp_path)
    assert isinstance(done.outcome, Unfit), done.outcome
    assert done.outcome.name is UnfitName.HTTP_400_CONTEXT
    assert "workload's prompt" in done.outcome.finding.explanation


def test_the_exported_script_starts_what_was_measured_and_answers(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(context=1024, n_max=8), tmp_path)
    (script,) = write_recipes(
        [done], form="shell", folder=tmp_path / "recipes", study_folder=tmp_path
    )
    port = free_port()
    process = subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                break
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"prompt": "Once", "max_tokens": 8},
            timeout=30,
            trust_env=False,
        )
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        process.kill()
        process.communicate()
