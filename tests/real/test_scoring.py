"""Scoring, greedy answers and acceptance on real servers, started by their adapters.

The models are tiny and their weights are random: what is compared is a server with itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_hf import write_tiny_hf

from sweeper.core import acceptance
from sweeper.core.pairs import Pairs
from sweeper.core.quality import GREEDY_PROMPTS, agreement
from sweeper.core.sample import DraftCounters
from sweeper.engines import Engine, EngineOptions, ModelFacts
from sweeper.engines.llamacpp import LlamaCpp
from sweeper.engines.vllm import Vllm
from sweeper.scoring import Post, fixed_text_logprob, logprobs, tokenize
from sweeper.server import Registry, Server, free_port, serving

ROOT = Path(__file__).parents[2]
ANSWER_TOKENS = 64


class Asked:
    """What a server with these settings said, and counted while it did."""

    def __init__(self, engine: Engine, url: str) -> None:
        wire = engine.wire
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:

            def post(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
                answer = client.post(path, json=body)
                return answer.json() if answer.status_code == 200 else None

            def counters() -> DraftCounters | None:
                assert wire.metrics_path is not None
                return engine.draft_counters(client.get(wire.metrics_path).text)

            self.post: Post = post
            before = counters()
            self.mean = fixed_text_logprob(post, wire, "tiny", 1024)
            self.after_scoring = counters()
            assert self.after_scoring == before, "scoring may not speculate"
            self.completion_tokens = 0
            self.reported = [0, 0]
            self.answers: list[list[int]] = []
            for prompt in GREEDY_PROMPTS:
                body = {
                    "model": "tiny",
                    "prompt": prompt,
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 0.0,
                    **wire.completion_extras,
                }
                answer = post(wire.completions_path, body)
                assert answer is not None
                self.completion_tokens += answer["usage"]["completion_tokens"]
                timings = answer.get("timings", {})
                self.reported[0] += timings.get("draft_n", 0)
                self.reported[1] += timings.get("draft_n_accepted", 0)
                tokens = tokenize(post, wire, answer["choices"][0]["text"])
                assert tokens is not None
                self.answers.append(tokens)
            after = counters()
            self.drafts = None if after is None or before is None else after.since(before)
            special = tokenize(post, wire, "the same text", special=True)
            assert special is not None
            self.scored = logprobs(post, wire, "tiny", special)
            self.special = special
            self.likeliest = self._likeliest(wire.scoring)

    def _likeliest(self, how: str | None) -> list[float]:
        """Return the log-probability of every token after the first, told as the server can."""
        found = []
        for position in range(1, len(self.special)):
            prompt, token = self.special[:position], self.special[position]
            if how == "next_token":
                body: dict[str, Any] = {"prompt": prompt, "n_predict": 1, "n_probs": 512}
                answer = self.post("/completion", {**body, "cache_prompt": False})
                assert answer is not None
                told = answer["completion_probabilities"][0]["top_logprobs"]
                found += [each["logprob"] for each in told if each["id"] == token]
        return found


@contextlib.contextmanager
def asked(
    engine: Engine, settings: dict[str, Any], model: Path, options: EngineOptions, folder: Path
) -> Iterator[Asked]:
    folder.mkdir(exist_ok=True)
    facts = ModelFacts(
        name="tiny", path=str(model), served_name="tiny", size_bytes=1, sha256="0" * 64
    )
    found = engine.find(options)
    assert isinstance(found, EngineOptions), found
    launch = engine.launch(engine.settings(settings), facts, found, free_port())
    log: list[str] = []
    with serving(
        launch,
        log_path=folder / "engine.log",
        registry=Registry(folder / "started.json"),
        watch=log.append,
    ) as started:
        assert isinstance(started.result, Server), log[-20:]
        yield Asked(engine, started.result.base_url)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEPER_CACHE", str(tmp_path / "cache"))


def _same_with_and_without_speculation(plain: Asked, speculating: Asked) -> None:
    assert plain.mean is not None
    assert speculating.mean == pytest.approx(plain.mean, rel=0.01)
    found = agreement(plain.answers, speculating.answers)
    assert found is not None
    assert found.tokens >= 4
    drafts = speculating.drafts
    assert drafts is not None
    assert acceptance.consistent(drafts) is None
    assert drafts.accepted > 0
    told = {"completion_tokens": speculating.completion_tokens, "requests": len(GREEDY_PROMPTS)}
    assert acceptance.identity(drafts, **told) is None
    thrice = DraftCounters(
        steps=3 * drafts.steps, drafted=3 * drafts.drafted, accepted=3 * drafts.accepted
    )
    if drafts.steps + drafts.accepted > 0.6 * speculating.completion_tokens:
        assert acceptance.identity(thrice, **told) is not None
    assert acceptance.profile(drafts)[-1] == pytest.approx(acceptance.mean_length(drafts))


@pytest.mark.llamacpp
def test_a_real_llamacpp_scores_alike_with_and_without_speculation(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context_length=4096)
    options = EngineOptions(memory_limit_bytes=None)
    shared = {"context": 1024, "threads": 1, "threads_http": 2}
    drafting = {"spec_type": "ngram-simple", "ngram_size": 4, "n_max": 8}
    engine = LlamaCpp()
    with asked(engine, shared, model, options, tmp_path / "plain") as plain:
        # What a bias made it say has the probability that it has among all tokens.
        assert plain.scored == pytest.approx(plain.likeliest, abs=0.05)
    with asked(engine, {**shared, **drafting}, model, options, tmp_path / "drafting") as other:
        _same_with_and_without_speculation(plain, other)
        assert other.drafts is not None
        assert acceptance.from_timings(*other.reported, other.drafts) is None


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_real_vllm_scores_alike_with_and_without_speculation(tmp_path: Path) -> None:
    python = os.environ.get(
        "SWEEPER_VLLM_PYTHON", str(ROOT / ".engines" / "vllm" / "bin" / "python")
    )
    if not Path(python).exists():
        pytest.skip(f"there is no vLLM: {python} does not exist; `make engines` builds it")
    model = write_tiny_hf(tmp_path / "tiny", context_length=4096)
    options = EngineOptions(
        python=python,
        env=Pairs(HF_HUB_OFFLINE="1", VLLM_CACHE_ROOT=str(tmp_path / "engine_cache")),
    )
    shared = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 8 * 2**20,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    drafting = {
        "spec_method": "ngram",
        "spec_extra": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "n_max": 4,
    }
    engine = Vllm()
    with asked(engine, shared, model, options, tmp_path / "plain") as plain:
        pass
    with asked(engine, {**shared, **drafting}, model, options, tmp_path / "drafting") as other:
        _same_with_and_without_speculation(plain, other)
