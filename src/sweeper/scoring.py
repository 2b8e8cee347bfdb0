"""How probable a served model finds a fixed text: the mean log-probability of its tokens.

A server that has lost its way finds plain English as improbable as anything else, however fast it
answers. Engines differ in how they can be asked, which the adapter's `Wire` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sweeper.core.quality import SCORED_TEXT, SCORED_TEXT_TOKENS, SCORED_TOKENS
from sweeper.engines import Wire

Post: TypeAlias = Callable[[str, dict[str, Any]], dict[str, Any] | None]
"""Sends a JSON body to a path and returns the JSON object that comes back; None for no such."""

NO_PROBABILITY = -9999.0
"""Stands for a log-probability that is no number, or minus infinity: a model that computes NaN."""
_FORCE = 1000.0
"""Added to the logit of the token that is to be sampled: more than logits differ by."""
_CERTAIN = -1e-6


def tokenize(post: Post, wire: Wire, text: str, *, special: bool = False) -> list[int] | None:
    """Return the tokens of a text by the server's own tokenizer, None where it has none.

    With `special` the beginning of text and its like come with it, as the model expects them of a
    prompt; without, an answer's tokens are its own.
    """
    if wire.tokenize_path is None:
        return None
    body: dict[str, Any] = {wire.tokenize_text_key: text, **wire.tokenize_extras}
    if wire.tokenize_special_key is not None:
        body[wire.tokenize_special_key] = special
    answer = post(wire.tokenize_path, body)
    found = None if answer is None else answer.get(wire.tokenize_tokens_key)
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        return None
    return found


def fixed_text_logprob(post: Post, wire: Wire, served_name: str, window: int) -> float | None:
    """Return the mean log-probability of the fixed text of `sweeper.core.quality`, in nats a token.

    None where the engine cannot say, or where its window in tokens does not hold the text.
    """
    if wire.scoring is None:
        return None
    tokens = tokenize(post, wire, SCORED_TEXT, special=True)
    if tokens is None or window <= len(tokens[:SCORED_TEXT_TOKENS]):
        return None
    return mean_logprob(post, wire, served_name, tokens[:SCORED_TEXT_TOKENS])


def mean_logprob(
    post: Post,
    wire: Wire,
    served_name: str,
    token_ids: Sequence[int],
    *,
    scored: int = SCORED_TOKENS,
) -> float | None:
    """Return the mean natural logarithm of the probability of the last `scored` tokens of a text.

    Each token's probability is that after all tokens before it, the first token has none. None
    where the engine cannot say, or says something that is no probability; NO_PROBABILITY counts
    for each token of which the model itself computes none. The same tokens of the same text are
    scored in every way of asking.
    """
    if wire.scoring is None or len(token_ids) < 2 or scored < 1:
        return None
    found = logprobs(post, wire, served_name, token_ids, scored=scored)
    if not found or any(each > -_CERTAIN for each in found):
        return None
    if all(each > _CERTAIN for each in found):
        return None  # a server that reports the token it was made to say as certain
    return math.fsum(found) / len(found)


def logprobs(
    post: Post,
    wire: Wire,
    served_name: str,
    token_ids: Sequence[int],
    *,
    scored: int = SCORED_TOKENS,
) -> list[float] | None:
    """Return the natural log-probability of each of the last `scored` tokens, None if unknown."""
    first = max(1, len(token_ids) - scored)
    match wire.scoring:
        case "prompt_logprobs":
            return _of_prompt(post, wire, served_name, token_ids, first)
        case "next_token":
            return _token_by_token(post, wire, token_ids, first)
        case None:
            return None


def _of_prompt(
    post: Post, wire: Wire, served_name: str, token_ids: Sequence[int], first: int
) -> list[float] | None:
    """Ask for the log-probabilities of the prompt: one request, one prefill."""
    body = {
        "model": served_name,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,  # no others beside the prompt's own token
    }
    answer = post(wire.scoring_path or wire.completions_path, body)
    if answer is None:
        return None
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return None
    told = choices[0].get("prompt_logprobs")
    if not isinstance(told, list) or len(told) != len(token_ids):
        return None
    found = []
    for token, entry in zip(token_ids[first:], told[first:], strict=True):
        own = entry.get(str(token)) if isinstance(entry, Mapping) else None
        value = _logprob(own) if isinstance(own, Mapping) else None
        if value is None:
            return None
        found.append(value)
    return found


def _token_by_token(
    post: Post, wire: Wire, token_ids: Sequence[int], first: int
) -> list[float] | None:
    """Have the server say the text, a token a request, and tell how probable each one was.

    A bias makes it sample the text's token; the probability that it reports is the model's, from
    before the bias. The prompt grows by the token just sampled, so its cache holds all but that.
    """
    found = []
    for position in range(first, len(token_ids)):
        token = token_ids[position]
        body = {
            "prompt": list(token_ids[:position]),
            "n_predict": 1,
            "n_probs": 1,
            "temperature": 0.0,
            "logit_bias": [[token, _FORCE]],
            # Nothing of earlier requests: what is reused changes the last digits.
            "cache_prompt": position > first,
        }
        answer = post(wire.scoring_path or wire.completions_path, body)
        value = _sampled(answer, token)
        if value is None:
            return None
        found.append(value)
    return found


def _sampled(answer: dict[str, Any] | None, token: int) -> float | None:
    """Return the log-probability of the one token of an answer, None if it is another token.

    Where the model computes no numbers no token can be forced on it: that is an answer as well.
    """
    told = None if answer is None else answer.get("completion_probabilities")
    if not isinstance(told, list) or len(told) != 1 or not isinstance(told[0], Mapping):
        return None
    value = _logprob(told[0])
    return value if told[0].get("id") == token or value == NO_PROBABILITY else None


def _logprob(told: Mapping[str, Any]) -> float | None:
    """Return the log-probability that is told, None where none is."""
    if "logprob" not in told:
        return None
    value = told["logprob"]
    if value is None:  # how JSON says that it is no number
        return NO_PROBABILITY
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return max(float(value), NO_PROBABILITY) if not math.isnan(value) else NO_PROBABILITY


__all__ = [
    "NO_PROBABILITY",
    "Post",
    "fixed_text_logprob",
    "logprobs",
    "mean_logprob",
    "tokenize",
]
