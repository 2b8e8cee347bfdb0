"""Whole attempts on a real vLLM, on the CPU.

The model is tiny and its weights are random: arguments, memory, context and speculation are real,
speed and text say nothing of any model. Every boot takes 10 to 40 seconds.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.tiny_hf import write_tiny_hf

from sweeper.conf import load
from sweeper.core.launch import Death, Phase
from sweeper.core.outcome import (
    Attempt,
    Broken,
    BrokenName,
    Infeasible,
    InfeasibleName,
    Measured,
)
from sweeper.core.pairs import Pairs, Point
from sweeper.core.sample import Purpose
from sweeper.orchestrate import prepare
from sweeper.places import conf_dirs
from sweeper.server import TOKEN_VARIABLE, Registry, serving
from sweeper.trial import Job, Progress, attempt

# Others may use the cores as well: a boot that takes twice as long is still a good boot.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODEL_TOKENS = 4096
POOL_TOKENS = 2048
FLOAT32_KV_BYTES_PER_TOKEN = 4096

STUDY = """
# @package _global_
defaults:
  - override /engine: vllm
name: tiny
model: {{ name: tiny, path: "{model}" }}
engine:
  python: "{python}"
  env: {{ HF_HUB_OFFLINE: "1", VLLM_CACHE_ROOT: "{engine_cache}" }}
  extra_args: {extra_args}
  params:
    dtype: float32
    kv_cache_memory_bytes: {pool_bytes}
    max_num_seqs: 1
    max_num_batched_tokens: 1024
    enforce_eager: true
    enable_prefix_caching: false
    spec_method: ngram
    spec_extra: {{ prompt_lookup_min: 2, prompt_lookup_max: 4 }}
space:
  max_model_len: [1024, 4096, 16384]
  n_max: [0, 4]
  kv_cache_dtype: {{ choices: [auto, q9_9] }}
workload: {{ max_tokens: 64, repeats: {{ least: 3, most: 3 }} }}
"""


@pytest.fixture(scope="module")
def python() -> str:
    """Return the interpreter of the environment that has vLLM."""
    path = os.environ.get("SWEEPER_VLLM_PYTHON", str(ROOT / ".engines" / "vllm" / "bin" / "python"))
    if not Path(path).exists():
        pytest.skip(
            f"there is no vLLM: {path} does not exist; `make engines` builds it, or "
            "SWEEPER_VLLM_PYTHON names the interpreter of an environment that has it"
        )
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", context_length=MODEL_TOKENS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def job(python: str, model: Path, tmp_path: Path) -> Job:
    return _job(python, model, tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    left = []
    for process in psutil.process_iter():
        try:
            if TOKEN_VARIABLE in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.name())
        except psutil.Error:
            continue
    assert left == []


def _job(python: str, model: Path, folder: Path, *, extra_args: tuple[str, ...] = ()) -> Job:
    studies = folder / "conf" / "study"
    studies.mkdir(parents=True, exist_ok=True)
    study = STUDY.format(
        model=model,
        # One for all tests: the engine needs 10 s to look at a model's code for the first time.
        engine_cache=model.parent / "engine_cache",
        python=python,
        extra_args=json.dumps(extra_args),
        pool_bytes=POOL_TOKENS * FLOAT32_KV_BYTES_PER_TOKEN,
    )
    (studies / "tiny.yaml").write_text(study.lstrip())
    return prepare(load(["+study=tiny"], conf_dirs(cwd=folder)))


def _attempt(
    job: Job, point: Point, folder: Path, watch: Callable[[Progress], None] = lambda _: None
) -> Attempt:
    return attempt(
        job,
        point,
        number=1,
        trial=0,
        folder=folder,
        registry=Registry(folder / "started.json"),
        watch=watch,
    )


def _point(*, max_model_len: int = 1024, n_max: int = 0, kv_cache_dtype: str = "auto") -> Point:
    return Pairs(max_model_len=max_model_len, n_max=n_max, kv_cache_dtype=kv_cache_dtype)


def test_a_real_vllm_is_measured_with_every_token_of_its_window(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(), tmp_path)
    assert isinstance(done.outcome, Measured), done.outcome
    context = done.outcome.context
    assert context.proven_tokens == context.configured_tokens == 1024
    assert context.reserved_tokens == 0
    assert context.refuses_more is True
    timed = [each for each in done.samples if each.purpose is Purpose.MEASURE]
    assert [each.completion_tokens for each in timed] == [64, 64, 64]
    assert done.outcome.decode_tok_s.n == 3
    assert done.outcome.drafts is None
    assert done.outcome.figures[0].server["requests"] == len(timed)
    assert done.engine["effective_context_tokens"] == 1024
    assert done.engine["kv_pool_tokens"] == POOL_TOKENS
    assert str(done.engine["engine_version"]).startswith("0.")


def test_a_real_vllm_speculates_and_its_counters_add_up(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(n_max=4), tmp_path)
    assert isinstance(done.outcome, Measured), done.outcome
    assert done.outcome.context.window_tokens == 1024
    drafts = done.outcome.drafts
    assert drafts is not None
    assert 0 < drafts.accepted <= drafts.drafted
    assert drafts.drafted <= 4 * drafts.steps
    assert len(drafts.accepted_per_position) == 4
    assert sum(drafts.accepted_per_position) == drafts.accepted
    # A token is a draft that was accepted or the one that each step makes itself; the first comes
    # from the prefill. What the last step accepts beyond the asked-for length is thrown away.
    timed = [each for each in done.samples if each.purpose is Purpose.MEASURE]
    assert [each.completion_tokens for each in timed] == [64, 64, 64]
    assert drafts.accepted + drafts.steps <= sum(64 - 1 + 4 for _ in timed)


def test_a_window_beyond_the_models_own_is_refused_and_the_models_limit_is_named(
    job: Job, tmp_path: Path
) -> None:
    done = _attempt(job, _point(max_model_len=16384), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.UNSUPPORTED_COMBINATION
    assert done.outcome.finding.phase is Phase.CONFIG
    assert str(MODEL_TOKENS) in done.outcome.finding.cause
    assert done.outcome.finding.try_next["max_model_len"] == MODEL_TOKENS


def test_a_pool_too_small_for_the_window_names_one_that_fits_and_that_one_serves(
    job: Job, tmp_path: Path
) -> None:
    refused = _attempt(job, _point(max_model_len=4096), tmp_path)
    assert isinstance(refused.outcome, Infeasible), refused.outcome
    assert refused.outcome.name is InfeasibleName.OOM_KV_CACHE
    assert refused.outcome.finding.phase is Phase.KV
    estimate = refused.outcome.finding.try_next["max_model_len"]
    assert isinstance(estimate, int)
    # The engine keeps one block of its pool for itself.
    assert POOL_TOKENS // 2 < estimate < POOL_TOKENS

    second = tmp_path / "second"
    second.mkdir()
    served = _attempt(job, _point(max_model_len=estimate), second)
    assert isinstance(served.outcome, Measured), served.outcome
    assert served.outcome.context.proven_tokens == estimate


def test_a_flag_that_does_not_exist_is_a_bad_argument(
    python: str, model: Path, tmp_path: Path
) -> None:
    job = _job(python, model, tmp_path, extra_args=("--no-such-flag",))
    done = _attempt(job, _point(), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.BAD_ARGUMENT
    assert done.outcome.finding.phase is Phase.ARGS
    assert "--no-such-flag" in done.outcome.finding.cause


def test_a_kv_type_that_does_not_exist_is_a_bad_argument(job: Job, tmp_path: Path) -> None:
    done = _attempt(job, _point(kv_cache_dtype="q9_9"), tmp_path)
    assert isinstance(done.outcome, Infeasible), done.outcome
    assert done.outcome.name is InfeasibleName.BAD_ARGUMENT
    assert done.outcome.finding.phase is Phase.ARGS
    assert "q9_9" in done.outcome.finding.cause


def test_a_worker_killed_while_it_measures_is_an_engine_that_died(job: Job, tmp_path: Path) -> None:
    killed = []

    def kill_once_measuring(progress: Progress) -> None:
        if progress.stage == "measure" and not killed:
            killed.append(_worker(tmp_path))
            killed[0].kill()

    done = _attempt(job, _point(), tmp_path, watch=kill_once_measuring)
    assert len(killed) == 1
    assert isinstance(done.outcome, Broken), done.outcome
    assert done.outcome.name is BrokenName.ENGINE_DIED_MID_BENCHMARK
    assert done.outcome.finding.phase is Phase.SERVING


def _worker(folder: Path) -> psutil.Process:
    """Return the process that computes, a grandchild of the one that was started."""
    (started,) = json.loads((folder / "started.json").read_text()).values()
    (found,) = (
        each
        for each in psutil.Process(started["pid"]).children(recursive=True)
        if "Worker" in " ".join(each.cmdline())
    )
    return found


def test_a_port_that_is_taken_ends_in_port_in_use_and_never_in_a_server(
    job: Job, tmp_path: Path
) -> None:
    log: list[str] = []
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        point = _point()
        launch = job.launch(point, held.getsockname()[1])
        with serving(
            launch,
            log_path=tmp_path / "engine.log",
            registry=Registry(tmp_path / "started.json"),
            watch=log.append,
        ) as started:
            assert isinstance(started.result, Death)
            verdict = job.engine.verdict(started.result, log)
    assert isinstance(verdict, Broken)
    assert verdict.name is BrokenName.PORT_IN_USE
