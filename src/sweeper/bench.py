"""Sends completions and times them: the only load generator.

Tokens are counted by the server's usage, never by frames: under speculation one frame can carry
several tokens. Times are the client's, on a monotonic clock. What can go wrong with a request is
a value; what it means is decided elsewhere.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.prose import prose
from sweeper.core.sample import Purpose, Sample
from sweeper.core.workload import Workload
from sweeper.engines import Wire


class RequestTrouble(enum.StrEnum):
    """How a request can fail to become a sample."""

    CONTEXT_EXCEEDED = "context_exceeded"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    ERROR_IN_STREAM = "error_in_stream"
    EMPTY_ANSWER = "empty_answer"
    NO_USAGE = "no_usage"
    CONNECTION_LOST = "connection_lost"
    SILENCE = "silence"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A request that did not become a sample: what happened, and what the server said."""

    trouble: RequestTrouble
    detail: str
    status: int | None = None
    server: Pairs = Pairs()


class Client:
    """A single stream of requests to one engine."""

    def __init__(self, base_url: str, wire: Wire, served_name: str, workload: Workload) -> None:
        self._wire = wire
        self._served_name = served_name
        self._workload = workload
        self._http = httpx.Client(
            base_url=base_url,
            # A proxy from the environment must not stand between us and loopback.
            trust_env=False,
            timeout=httpx.Timeout(
                workload.request_timeout_s, read=workload.silence_timeout_s, connect=10.0
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def tokens(self, seed: int, count: int) -> tuple[int, ...] | RequestFailure:
        """Return exactly `count` tokens of varied text, cut by the server's own tokenizer."""
        assert self._wire.tokenize_path is not None
        sentences = max(count // 12, 4)
        while True:
            body = {
                self._wire.tokenize_text_key: prose(seed, sentences),
                **self._wire.tokenize_extras,
            }
            try:
                answer = self._http.post(self._wire.tokenize_path, json=body)
            except httpx.HTTPError as error:
                return _transport(error)
            if answer.status_code != httpx.codes.OK:
                return _refused(answer.status_code, answer.text)
            found = answer.json().get(self._wire.tokenize_tokens_key)
            if not isinstance(found, list) or not found:
                return RequestFailure(
                    trouble=RequestTrouble.SERVER_ERROR,
                    detail=f"the tokenizer answered {answer.text[:200]}",
                )
            if len(found) >= count:
                return tuple(int(token) for token in found[:count])
            sentences = sentences * count // len(found) + 8

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        purpose: Purpose,
        timeout_s: float | None = None,
    ) -> Sample | RequestFailure:
        """Stream one completion and return its timing, or how it failed.

        `timeout_s` replaces the workload's limits on the whole request and on silence.
        """
        workload = self._workload
        body: dict[str, Any] = {
            "model": self._served_name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._wire.completion_extras,
            **workload.request,
        }
        if workload.seed is not None:
            body["seed"] = workload.seed
        began = time.perf_counter()
        try:
            with self._http.stream(
                "POST",
                self._wire.completions_path,
                json=body,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    return _refused(answer.status_code, answer.text)
                limit_s = self._workload.request_timeout_s if timeout_s is None else timeout_s
                return self._sample(answer, purpose, began, limit_s)
        except httpx.HTTPError as error:
            return _transport(error)

    def _sample(
        self, answer: httpx.Response, purpose: Purpose, began: float, limit_s: float
    ) -> Sample | RequestFailure:
        first: float | None = None
        last = began
        frames = 0
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        server: dict[str, Scalar] = {}
        finish = ""
        for now, frame in _frames(answer):
            if now - began > limit_s:
                return RequestFailure(
                    trouble=RequestTrouble.SILENCE,
                    detail=f"no end after {now - began:.0f} s",
                )
            if "error" in frame:
                return RequestFailure(
                    trouble=RequestTrouble.ERROR_IN_STREAM,
                    detail=json.dumps(frame["error"])[:500],
                )
            if isinstance(frame.get("usage"), dict):
                usage = frame["usage"]
            if isinstance(frame.get("timings"), dict):
                server = {
                    name: value
                    for name, value in frame["timings"].items()
                    if isinstance(value, int | float | str)
                }
            for choice in frame.get("choices", ()):
                if text := choice.get("text"):
                    pieces.append(text)
                    frames += 1
                    first = now if first is None else first
                    last = now
                finish = choice.get("finish_reason") or finish
        ended = time.perf_counter()
        if "completion_tokens" not in usage or "prompt_tokens" not in usage:
            return RequestFailure(
                trouble=RequestTrouble.NO_USAGE,
                detail="the stream ended without saying how many tokens it was",
            )
        if first is None or usage["completion_tokens"] == 0:
            return RequestFailure(
                trouble=RequestTrouble.EMPTY_ANSWER,
                detail=f"{usage['completion_tokens']} tokens and no text (finish: {finish or '-'})",
            )
        return Sample(
            purpose=purpose,
            prompt_tokens=int(usage["prompt_tokens"]),
            completion_tokens=int(usage["completion_tokens"]),
            ttft_s=first - began,
            decode_s=last - first,
            total_s=ended - began,
            frames=frames,
            finish_reason=finish,
            text="".join(pieces),
            server=Pairs(server),
        )

    def page(self, path: str | None) -> str | None:
        """Return the text of a GET, None where there is no such page."""
        if path is None:
            return None
        try:
            answer = self._http.get(path)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == httpx.codes.OK else None


def _frames(answer: httpx.Response) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield every frame of a server-sent event stream with the moment it was seen."""
    for line in _lines(answer):
        # A line that comes is a sign of life; its time is taken before it is parsed.
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            frame = json.loads(data)
        except ValueError:  # not JSON, or not UTF-8
            frame = {"error": f"not JSON: {data[:200].decode(errors='replace')}"}
        if isinstance(frame, dict):
            yield now, frame


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Yield the lines of a stream as they come, ended by line feeds only.

    For httpx U+2028 and its like end a line too, and JSON may hold them as they are.
    """
    rest = b""
    for chunk in answer.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _refused(status: int, text: str) -> RequestFailure:
    facts: dict[str, Scalar] = {}
    words = text
    try:
        error = json.loads(text).get("error", {})
    except (json.JSONDecodeError, AttributeError):
        error = {}
    if isinstance(error, dict):
        words = str(error.get("message", text))
        facts = {
            name: value
            for name, value in error.items()
            if name in ("n_prompt_tokens", "n_ctx", "type") and isinstance(value, int | str)
        }
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        trouble = RequestTrouble.SERVER_ERROR
    elif "context" in words.lower() and ("exceed" in words.lower() or "maximum" in words.lower()):
        trouble = RequestTrouble.CONTEXT_EXCEEDED
    else:
        trouble = RequestTrouble.CLIENT_ERROR
    return RequestFailure(trouble=trouble, detail=words[:500], status=status, server=Pairs(facts))


def _transport(error: httpx.HTTPError) -> RequestFailure:
    if isinstance(error, httpx.ReadTimeout):
        return RequestFailure(
            trouble=RequestTrouble.SILENCE, detail="nothing was heard for the whole silence limit"
        )
    return RequestFailure(
        trouble=RequestTrouble.CONNECTION_LOST,
        detail=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
    )
