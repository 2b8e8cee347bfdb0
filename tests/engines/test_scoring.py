"""How probable a server finds a text: the two ways of asking, as real servers answered them.

`wire/` holds the recorded exchanges: `llamacpp_next_token.json` of llama.cpp with Gemma 3 270M and
n-gram speculation, `vllm_prompt_logprobs.json` of vLLM 0.32 with random weights.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engines.test_fake import running

from sweeper.core.quality import (
    GREEDY_PROMPTS,
    SCORED_TEXT,
    SCORED_TOKENS,
    agreement,
    collapsed,
    degenerate,
)
from sweeper.engines import Wire
from sweeper.engines.fake import Fake
from sweeper.engines.fake_server import BROKEN_LOGPROB_LOSS, LOGPROB_LOSS
from sweeper.engines.llamacpp import LlamaCpp
from sweeper.engines.vllm import Vllm
from sweeper.scoring import NO_PROBABILITY, fixed_text_logprob, logprobs, mean_logprob, tokenize

RECORDED = Path(__file__).parent / "wire"
WATER = [2, 17390, 104264, 657, 236743, 236770, 236771, 236771, 10674]
"""`Water boils at 100 degrees` with its beginning of text, as Gemma's tokenizer cuts it."""


class Replay:
    """Answers as a server was recorded; anything else is asked of it in vain."""

    def __init__(self, name: str) -> None:
        self.exchanges: list[dict[str, Any]] = json.loads((RECORDED / name).read_text())

    def __call__(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        for each in self.exchanges:
            if (each["path"], each["request"]) == (path, body):
                answer: dict[str, Any] = each["answer"]
                return answer
        return None

    def with_answers(self, change: Callable[[dict[str, Any]], None]) -> Replay:
        other = copy.deepcopy(self)
        for each in other.exchanges:
            change(each["answer"])
        return other


def post_to(client: httpx.Client) -> Callable[[str, dict[str, Any]], dict[str, Any] | None]:
    def post(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = client.post(path, json=body)
        return answer.json() if answer.status_code == 200 else None

    return post


LLAMACPP = Replay("llamacpp_next_token.json")
VLLM = Replay("vllm_prompt_logprobs.json")
VLLM_TOKENS = [84, 468, 263, 299]


def test_llamacpp_says_the_text_token_by_token() -> None:
    found = logprobs(LLAMACPP, LlamaCpp().wire, "m", WATER, scored=4)
    assert found == pytest.approx([-0.209632, -0.016425, -0.019297, -0.739419], abs=1e-6)
    mean = mean_logprob(LLAMACPP, LlamaCpp().wire, "m", WATER, scored=4)
    assert mean == pytest.approx(-0.246193, abs=1e-6)


def test_vllm_tells_the_whole_prompt_at_once() -> None:
    found = logprobs(VLLM, Vllm().wire, "t", VLLM_TOKENS)
    assert found == pytest.approx([-22.639414, -20.121157, -28.012467], abs=1e-6)
    assert mean_logprob(VLLM, Vllm().wire, "t", VLLM_TOKENS, scored=1) == pytest.approx(-28.012467)


def test_a_server_that_cannot_say_is_unknown_and_no_error() -> None:
    assert mean_logprob(lambda *_: None, LlamaCpp().wire, "m", WATER) is None
    assert mean_logprob(lambda *_: {}, Vllm().wire, "m", WATER) is None
    assert mean_logprob(LLAMACPP, Wire(), "m", WATER) is None
    assert fixed_text_logprob(LLAMACPP, Wire(), "m", 4096) is None
    assert mean_logprob(LLAMACPP, LlamaCpp().wire, "m", WATER[:1]) is None
    assert tokenize(lambda *_: {"tokens": ["a"]}, LlamaCpp().wire, "a") is None
    assert tokenize(lambda *_: {"tokens": [1]}, Wire(tokenize_path=None), "a") is None


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": ["x"]},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {}, {}, {}]}]},
        {"choices": [{"prompt_logprobs": [None, {"468": {"logprob": "much"}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"468": {"logprob": 3.0}}] * 2}]},
        {"completion_probabilities": []},
        {"completion_probabilities": [3]},
        {"completion_probabilities": [{"id": 7, "logprob": -1.0}]},
        {"completion_probabilities": [{"probs": [{"tok_str": " a", "prob": 0.5}]}]},
    ],
)
@pytest.mark.parametrize("wire", [LlamaCpp().wire, Vllm().wire], ids=["next", "prompt"])
def test_an_answer_of_another_shape_is_unknown(answer: dict[str, Any], wire: Wire) -> None:
    assert mean_logprob(lambda *_: answer, wire, "m", VLLM_TOKENS) is None


def test_a_bias_that_is_not_heeded_is_unknown() -> None:
    def another_token(answer: dict[str, Any]) -> None:
        answer["completion_probabilities"][0]["id"] = 5

    wire = LlamaCpp().wire
    assert mean_logprob(LLAMACPP.with_answers(another_token), wire, "m", WATER, scored=4) is None


def test_probabilities_from_after_the_bias_are_unknown() -> None:
    def certain(answer: dict[str, Any]) -> None:
        answer["completion_probabilities"][0]["logprob"] = 0.0

    wire = LlamaCpp().wire
    assert mean_logprob(LLAMACPP.with_answers(certain), wire, "m", WATER, scored=4) is None


def test_a_model_that_computes_no_numbers_has_no_probability_at_all() -> None:
    """As llama.cpp answers with NaN in a norm: null, and a token that no bias could force."""

    def not_a_number(answer: dict[str, Any]) -> None:
        answer["completion_probabilities"][0] |= {"id": 30, "logprob": None}

    wire = LlamaCpp().wire
    found = mean_logprob(LLAMACPP.with_answers(not_a_number), wire, "m", WATER, scored=4)
    assert found == NO_PROBABILITY

    def nan(answer: dict[str, Any]) -> None:
        answer["choices"][0]["prompt_logprobs"][2]["263"]["logprob"] = math.nan

    found = mean_logprob(VLLM.with_answers(nan), Vllm().wire, "t", VLLM_TOKENS)
    assert found is not None
    assert found < -3000


def test_the_text_is_cut_by_the_servers_tokenizer_with_what_begins_a_text() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def post(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        asked.append((path, body))
        if path == "/tokenize":
            return {"tokens": list(range(200))}
        (token, _), *_ = body["logit_bias"]
        return {"completion_probabilities": [{"id": token, "logprob": -2.0}]}

    assert fixed_text_logprob(post, LlamaCpp().wire, "m", 161) == -2.0
    path, body = asked[0]
    assert (path, body) == ("/tokenize", {"content": SCORED_TEXT, "add_special": True})
    told = [body for path, body in asked if path == "/completion"]
    assert len(told) == SCORED_TOKENS
    assert [len(body["prompt"]) for body in told] == list(range(160 - SCORED_TOKENS, 160))
    # Each prompt is the one before and the token that it was made to say: the cache holds it.
    for before, body in pairwise(told):
        assert body["prompt"] == [*before["prompt"], before["logit_bias"][0][0]]
    assert [body["cache_prompt"] for body in told] == [False] + [True] * (SCORED_TOKENS - 1)
    assert fixed_text_logprob(post, LlamaCpp().wire, "m", 160) is None


# ---- The simulated engine ----------------------------------------------------------------------


def _asked(**params: Any) -> tuple[float | None, list[str], list[list[int]]]:
    """Return the fixed text's log-probability and the greedy answers, with their tokens."""
    wire = Fake().wire
    with running(**params) as server:
        post = post_to(server.client)
        answers = []
        for prompt in GREEDY_PROMPTS:
            body = {"prompt": prompt, "max_tokens": 48, "temperature": 0.0}
            answer = post(wire.completions_path, body)
            assert answer is not None
            answers.append(str(answer["choices"][0]["text"]))
        tokens = [tokenize(post, wire, answer) for answer in answers]
        assert None not in tokens
        return (
            fixed_text_logprob(post, wire, "demo", 4096),
            answers,
            [each for each in tokens if each is not None],
        )


def test_the_simulated_engine_answers_alike_whatever_its_settings() -> None:
    score, answers, reference = _asked()
    assert score is not None
    assert -3 < score < -1
    assert [degenerate(each) for each in answers] == [None] * 3
    assert _asked(n_max=4, acceptance=0.9, seed=3) == (score, answers, reference)
    for kv_type in ("q8_0", "q4_0"):
        other, same, _ = _asked(kv_type=kv_type)
        assert same == answers
        assert other == pytest.approx(score - LOGPROB_LOSS[kv_type])


def test_wrong_answers_are_right_until_the_cache_is_quantised() -> None:
    sound = _asked()
    assert _asked(ending="wrong-answers") == sound
    score, answers, tokens = _asked(ending="wrong-answers", kv_type="q8_0")
    assert score == pytest.approx((sound[0] or 0) - BROKEN_LOGPROB_LOSS - LOGPROB_LOSS["q8_0"])
    found = agreement(sound[2], tokens)
    assert found is not None
    assert found.tokens < 4
    assert collapsed(answers) is None


def test_a_salad_and_one_token_are_broken_by_themselves() -> None:
    for ending in ("token-salad", "garbage"):
        score, answers, _ = _asked(ending=ending)
        assert score is not None
        assert score < -8
        assert all(degenerate(each) is not None for each in answers)


def test_late_garbage_begins_when_it_is_told() -> None:
    wire = Fake().wire
    with running(ending="late-garbage", ending_after=6) as server:
        post = post_to(server.client)

        def texts() -> list[str]:
            bodies = [{"prompt": prompt, "max_tokens": 48} for prompt in GREEDY_PROMPTS]
            answers = [post(wire.completions_path, body) or {} for body in bodies]
            return [answer["choices"][0]["text"] for answer in answers]

        first = texts()
        assert texts() == first
        last = texts()
    assert set(last) == {" the" * 48}
    assert collapsed(first) is None
    assert "'the '" in str(collapsed(last))


def test_probabilities_of_a_prompt_are_refused_in_a_stream() -> None:
    with running() as server:
        body = {"prompt": "a b", "prompt_logprobs": 0, "stream": True}
        assert server.client.post("/v1/completions", json=body).status_code == 400
