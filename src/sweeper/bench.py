"""Asks an engine for completions and times them: the only load generator.

Tokens are counted by the server's usage, never by frames: under speculation one frame can carry
several tokens. Times are the client's, on a monotonic clock. What can go wrong with a request is
a value; what it means is decided elsewhere.

Timed requests share one thread, however many there are: it waits for all of their sockets, takes
what has arrived together with its time, and only then reads it. With a thread for each, the one
that happens to run delays the clocks of all others (`benchmarks/client_accuracy`). HTTP is spoken
by httpx; for timed requests by h11, the part of httpx that needs no thread and no socket.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import hashlib
import json
import selectors
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeGuard

import h11
import httpx

from sweeper.core.pairs import Pairs, Scalar
from sweeper.core.prose import prose
from sweeper.core.sample import Purpose, Sample
from sweeper.core.workload import Load, Workload
from sweeper.engines import Wire

_CONNECT_TIMEOUT_S = 10.0
_LOOK_S = 0.25
"""How often streams that say nothing are looked at, whether they have been silent for too long."""
_SETTLE_S = 0.05
"""The kernel opens connections before the server has taken them: time for that to happen."""
_KEEPALIVE_S = 2.0
"""Servers close idle connections after five seconds, some of them as the next request comes."""


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
    """Asks one engine for one workload, by one stream or by several at once.

    `began` is the moment of `time.perf_counter` that `Sample.began_s` counts from; without it, the
    moment the client was made. `salt` changes every generated prefix and prompt: a server that
    has been measured before may still hold those of last time in its cache.
    """

    def __init__(
        self,
        base_url: str,
        wire: Wire,
        served_name: str,
        workload: Workload,
        *,
        began: float | None = None,
        salt: str = "",
    ) -> None:
        self._wire = wire
        self._served_name = served_name
        self._workload = workload
        self._began = time.perf_counter() if began is None else began
        self._salt = salt
        self._tokens_per_sentence = 12.0
        self._http = httpx.Client(
            base_url=base_url,
            # A proxy from the environment must not stand between us and loopback.
            trust_env=False,
            timeout=httpx.Timeout(
                workload.request_timeout_s,
                read=workload.silence_timeout_s,
                connect=_CONNECT_TIMEOUT_S,
            ),
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S),
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

    # --- texts of exact length ----------------------------------------------------------------

    def tokenize(
        self, text: str, *, special: bool = False
    ) -> tuple[int, ...] | RequestFailure | None:
        """Return the server's own tokens of a text; None where it has no tokenizer to ask.

        With `special` those that begin every prompt of this model come first, where the server
        can be asked for them.
        """
        if self._wire.tokenize_path is None:
            return None
        body: dict[str, Any] = {self._wire.tokenize_text_key: text, **self._wire.tokenize_extras}
        if self._wire.tokenize_special_key is not None:
            body[self._wire.tokenize_special_key] = special
        try:
            answer = self._http.post(self._wire.tokenize_path, json=body)
        except httpx.HTTPError as error:
            return _transport(error)
        if answer.status_code != httpx.codes.OK:
            return _refused(answer.status_code, answer.text)
        try:
            said = answer.json()
        except ValueError:
            said = None
        found = said.get(self._wire.tokenize_tokens_key) if isinstance(said, dict) else None
        if not isinstance(found, list) or not all(_is_count(each) for each in found):
            return RequestFailure(
                trouble=RequestTrouble.SERVER_ERROR,
                detail=f"the tokenizer answered {answer.text[:200]}",
            )
        return tuple(found)

    def tokens(self, seed: int, count: int) -> tuple[int, ...] | RequestFailure:
        """Return exactly `count` tokens of varied text, cut by the server's own tokenizer.

        Texts of different seeds differ from their first words on.
        """
        while True:
            # A little more than is needed: sentences are not all of one length.
            sentences = int(count / self._tokens_per_sentence * 1.03) + 4
            # Sent as tokens a prompt is taken as it is: what begins every prompt must be in it.
            found = self.tokenize(prose(seed, sentences), special=True)
            if isinstance(found, RequestFailure):
                return found
            if not found:
                return RequestFailure(
                    trouble=RequestTrouble.CLIENT_ERROR,
                    detail="a prompt of an exact length needs the server's own tokenizer, and "
                    + ("it made no tokens" if found is not None else "it has no address for it"),
                )
            # What this server makes of a sentence is learnt once, for all texts to come.
            self._tokens_per_sentence = len(found) / (sentences + 1)
            if len(found) >= count:
                return found[:count]

    # --- requests -----------------------------------------------------------------------------

    def ask(
        self,
        load: Load,
        *,
        run: int,
        purpose: Purpose,
        max_tokens: int,
        cached: bool = False,
        prompt: int = 0,
    ) -> tuple[Sample, ...] | RequestFailure:
        """Ask what the load says, all streams at the same moment, and return a sample of each.

        `prompt` counts through the workload's prompts, and after the last begins again. Prompts
        are made before any clock starts. With the workload's `fresh_prefix` each begins
        with words of its own. With `cached` all rounds of a load ask the same and the server may
        use its prompt cache: the first such round fills it. If one stream fails, the others are
        cut off and its failure is what the round came to.
        """
        workload, wire = self._workload, self._wire
        extras = {**wire.completion_extras, **(wire.cached_extras if cached else {})}
        if not workload.ignore_eos:
            extras.pop("ignore_eos", None)
        exchanges = []
        which = prompt % len(workload.texts) if workload.texts else 0
        for stream in range(load.streams):
            fresh = workload.fresh_prefix and not cached
            number = _number(
                self._salt, workload.name, workload.seed, load.prompt_tokens, load.streams, stream,
                *((purpose.value, run) if fresh else ()),
            )  # fmt: skip
            seed = None if workload.seed is None else workload.seed + run * load.streams + stream
            if load.prompt_tokens is not None:
                tokens = self.tokens(number, load.prompt_tokens)
                if isinstance(tokens, RequestFailure):
                    return tokens
                asked: dict[str, Any] = {"prompt": tokens}
            else:
                text = workload.texts[which]
                if fresh:
                    text = f"Request {number}.\n\n{text}"
                asked = (
                    {"messages": [{"role": "user", "content": text}]}
                    if workload.api == "chat"
                    else {"prompt": text}
                )
            if workload.api == "chat" and workload.chat_template:
                asked["chat_template_kwargs"] = dict(workload.chat_template)
            exchanges.append(
                self._exchange(
                    wire.chat_path if workload.api == "chat" else wire.completions_path,
                    {
                        **asked, **self._common(max_tokens, workload.temperature, seed), **extras,
                        **workload.request,
                    },
                    blank=_Blank(
                        purpose=purpose, workload=workload.name, prompt_length=load.prompt_tokens,
                        streams=load.streams, run=run, stream=stream, seed=seed, prompt=which,
                        asked_tokens=max_tokens,
                    ),
                )
            )  # fmt: skip
        return _performed(exchanges)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        purpose: Purpose,
        timeout_s: float | None = None,
        temperature: float | None = None,
        extras: Pairs = Pairs(),
    ) -> Sample | RequestFailure:
        """Stream one plain completion of this prompt and return its timing, or how it failed.

        `timeout_s` replaces the workload's limits on the whole request and on silence,
        `temperature` the workload's, and `extras` any field. The end of text is ignored wherever
        the engine can, whatever the workload says: a probe is asked for its full length.
        """
        workload = self._workload
        exchange = self._exchange(
            self._wire.completions_path,
            {
                "prompt": prompt,
                **self._common(
                    max_tokens,
                    workload.temperature if temperature is None else temperature,
                    workload.seed,
                ),
                **self._wire.completion_extras,
                **workload.request,
                **extras,
            },
            blank=_Blank(
                purpose=purpose, workload=workload.name,
                prompt_length=None if isinstance(prompt, str) else len(prompt),
                streams=1, run=0, stream=0, seed=workload.seed,
                asked_tokens=max_tokens,
            ),
            timeout_s=timeout_s,
        )  # fmt: skip
        result = _performed([exchange])
        return result if isinstance(result, RequestFailure) else result[0]

    def page(self, path: str | None) -> str | None:
        """Return the text of a GET, None where there is no such page."""
        if path is None:
            return None
        try:
            answer = self._http.get(path)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == httpx.codes.OK else None

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the JSON object that a POST is answered with, None where there is none."""
        try:
            answer = self._http.post(path, json=body)
            said = answer.json() if answer.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def _common(self, max_tokens: int, temperature: float, seed: int | None) -> dict[str, Any]:
        return {
            "model": self._served_name,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if seed is None else {"seed": seed}),
        }

    def _exchange(
        self, path: str, body: Mapping[str, Any], *, blank: _Blank, timeout_s: float | None = None
    ) -> _Exchange:
        workload = self._workload
        request = self._http.build_request(
            "POST",
            path,
            content=json.dumps(body).encode(),
            headers={
                "content-type": "application/json",
                "accept-encoding": "identity",
                # A server with few threads would hold one for a connection that says no more.
                "connection": "close",
            },
        )
        return _Exchange(
            request,
            blank=blank,
            limit_s=workload.request_timeout_s if timeout_s is None else timeout_s,
            silence_s=workload.silence_timeout_s if timeout_s is None else timeout_s,
            zero=self._began,
        )


# --- one request on its way, and several together -----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blank:
    """What is known of a sample before it is asked for."""

    purpose: Purpose
    workload: str
    prompt_length: int | None
    streams: int
    run: int
    stream: int
    seed: int | None
    asked_tokens: int
    prompt: int = 0


class _Exchange:
    """One request on a connection of its own; once it is open, nothing here waits."""

    def __init__(
        self,
        request: httpx.Request,
        *,
        blank: _Blank,
        limit_s: float,
        silence_s: float,
        zero: float,
    ) -> None:
        self._url = request.url
        self._blank = blank
        self._limit_s = limit_s
        self._silence_s = silence_s
        self._zero = zero
        self._began = 0.0
        self._heard = 0.0
        if self._url.userinfo:
            login = httpx.BasicAuth(self._url.username, self._url.password)
            request = next(login.auth_flow(request))
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
        parts = (
            h11.Request(
                method=request.method,
                target=self._url.raw_path,
                headers=[(name.lower(), value) for name, value in request.headers.raw],
            ),
            h11.Data(data=request.content),
            h11.EndOfMessage(),
        )
        self._unsent = memoryview(b"".join(self._http.send(part) or b"" for part in parts))
        self._status = httpx.codes.OK.value
        self._refusal = b""
        self._rest = b""
        self._story = _Story()
        self.socket: socket.socket | None = None
        self.result: Sample | RequestFailure | None = None

    def open(self) -> None:
        """Open the connection, so that no clock has to wait for it."""
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        try:
            self.socket = socket.create_connection((self._url.host, port), _CONNECT_TIMEOUT_S)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._url.scheme == "https":
                self.socket = httpx.create_ssl_context().wrap_socket(
                    self.socket, server_hostname=self._url.host
                )
            self.socket.setblocking(False)
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        """Close the connection; a server that is still answering stops then."""
        if self.socket is not None:
            self.socket.close()

    def begin(self) -> bool:
        """Start the clock and send what can go at once; return whether there is more to be sent."""
        self._began = self._heard = time.perf_counter()
        return self.push()

    def push(self) -> bool:
        """Send on; return whether there is more to be sent."""
        assert self.socket is not None
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            # A server that refuses need not read to the end; its answer tells.
            self._unsent = memoryview(b"")
        return False

    def pull(self) -> list[bytes]:
        """Return what has arrived, an empty piece for the end of the connection."""
        assert self.socket is not None
        pieces: list[bytes] = []
        try:
            while True:
                pieces.append(self.socket.recv(2**18))
                # Behind a TLS socket there may be more that no selector knows of.
                if not pieces[-1] or not isinstance(self.socket, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._lost(error)
        return pieces

    def read(self, now: float, pieces: list[bytes]) -> None:
        """Read what arrived at this moment; afterwards `result` may be there."""
        self._heard = now
        try:
            for piece in pieces:
                self._http.receive_data(piece)
                while self.result is None:
                    event = self._http.next_event()
                    if event is h11.NEED_DATA or event is h11.PAUSED:
                        break
                    self._event(now, event)
        except h11.RemoteProtocolError as error:
            self._lost(error)

    def check(self, now: float) -> None:
        """End the request if it has taken too long, or nothing has come for too long."""
        if self.result is not None:
            return
        if now - self._began > self._limit_s:
            self._silent(f"no end after {now - self._began:.0f} s")
        elif now - self._heard > self._silence_s:
            self._silent(f"nothing was heard for {now - self._heard:.0f} s")

    def _event(self, now: float, event: object) -> None:
        match event:
            case h11.Response(status_code=status):
                self._status = status
            case h11.Data(data=data) if self._status != httpx.codes.OK:
                self._refusal += data
            case h11.Data(data=data):
                # Lines end by line feeds only: for httpx U+2028 and its like end one too, and
                # JSON may hold them as they are.
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._tell(now, lines)
            case h11.EndOfMessage() if self._status != httpx.codes.OK:
                self.result = _refused(self._status, self._refusal.decode(errors="replace"))
            case h11.EndOfMessage():
                self._tell(now, [self._rest])
                self._finish(now)
            case _:  # 1xx, or a connection that ended after its message
                pass

    def _tell(self, now: float, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._story.take(now, line)
        # Some servers keep the connection after the last word.
        if self._story.done or self._story.failure is not None:
            self._finish(now)

    def _finish(self, now: float) -> None:
        if self.result is None:
            self.result = self._story.sample(
                self._blank, began=self._began, ended=now, zero=self._zero
            )

    def _lost(self, error: Exception) -> None:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if self.result is None:
            self.result = RequestFailure(trouble=RequestTrouble.CONNECTION_LOST, detail=said)

    def _silent(self, detail: str) -> None:
        self.result = RequestFailure(trouble=RequestTrouble.SILENCE, detail=detail)


def _performed(exchanges: Sequence[_Exchange]) -> tuple[Sample, ...] | RequestFailure:
    """Perform a round and return its samples in order, or the first failure there was.

    Whatever ends it, Ctrl-C too, closes every connection.
    """
    with contextlib.ExitStack() as stack:
        for exchange in exchanges:
            stack.callback(exchange.close)
            exchange.open()
            if isinstance(exchange.result, RequestFailure):
                return exchange.result
        if len(exchanges) > 1:
            time.sleep(_SETTLE_S)
        stack.enter_context(_no_garbage_collection())
        selector = stack.enter_context(selectors.DefaultSelector())
        unsent = [exchange.begin() for exchange in exchanges]
        for exchange, more in zip(exchanges, unsent, strict=True):
            assert exchange.socket is not None
            wishes = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            selector.register(exchange.socket, wishes, exchange)
        waiting = list(exchanges)
        looked = time.perf_counter()
        while waiting:
            arrived: list[tuple[_Exchange, float, list[bytes]]] = []
            for key, ready in selector.select(_LOOK_S):
                exchange = key.data
                if ready & selectors.EVENT_READ:
                    pieces = exchange.pull()
                    arrived.append((exchange, time.perf_counter(), pieces))
                elif not exchange.push():
                    selector.modify(key.fileobj, selectors.EVENT_READ, exchange)
            for exchange, now, pieces in arrived:
                exchange.read(now, pieces)
            now = time.perf_counter()
            if looked + _LOOK_S <= now:
                looked = now
                for exchange in waiting:
                    exchange.check(now)
            for exchange in [each for each in waiting if each.result is not None]:
                if isinstance(exchange.result, RequestFailure):
                    return exchange.result
                assert exchange.socket is not None
                selector.unregister(exchange.socket)
                exchange.close()
                waiting.remove(exchange)
    return tuple(each.result for each in exchanges if isinstance(each.result, Sample))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from stopping every thread in the middle of a round."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- what a stream says -------------------------------------------------------------------------


class _Story:
    """A stream of events as it unfolds: its text with its times, its counts, its end."""

    def __init__(self) -> None:
        self.failure: RequestFailure | None = None
        self.done = False
        self._first: float | None = None
        self._last_text = 0.0
        self._last = 0.0
        self._gaps: list[float] = []
        self._pieces: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._server: dict[str, Scalar] = {}
        self._finish = ""
        self._other = ""

    def take(self, now: float, line: bytes) -> None:
        """Read one line that arrived at this moment."""
        if self.done or self.failure is not None:
            return
        # llama.cpp has had streams that say `error: {...}`.
        if line.startswith((b"data:", b"error:")):
            kind, _, data = line.partition(b":")
            data = data.strip()
        else:
            if not self._other and line.lstrip().startswith(b"{"):
                self._other = line.decode(errors="replace")[:500]
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            frame = json.loads(data)
        except ValueError:  # not JSON, or not UTF-8
            frame = {"error": f"not JSON: {data[:200].decode(errors='replace')}"}
        if not isinstance(frame, dict):
            return
        if kind == b"error" or frame.get("error"):
            self.failure = RequestFailure(
                trouble=RequestTrouble.ERROR_IN_STREAM,
                detail=json.dumps(frame.get("error", frame))[:500],
            )
            return
        self._frame(now, frame)

    def _frame(self, now: float, frame: Mapping[str, Any]) -> None:
        if isinstance(frame.get("usage"), dict):
            self._usage = frame["usage"]
        if isinstance(frame.get("timings"), dict):
            self._server.update(
                (name, value)
                for name, value in frame["timings"].items()
                if isinstance(value, int | float | str)
            )
        choices = frame.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            # Some tokens have no text, such as an end that was to be ignored: the last frame is
            # the end of decoding, whether it has text or not.
            self._last = now
            if text := _text(choice):
                if self._first is None:
                    self._first = now
                else:
                    self._gaps.append(now - self._last_text)
                self._last_text = now
                self._pieces.append(text)
            self._finish = str(choice.get("finish_reason") or self._finish)

    def sample(
        self, blank: _Blank, *, began: float, ended: float, zero: float
    ) -> Sample | RequestFailure:
        """Return what was heard as a sample, or why it is none."""
        if self.failure is not None:
            return self.failure
        made, read = self._usage.get("completion_tokens"), self._usage.get("prompt_tokens")
        if not _is_count(made) or not _is_count(read):
            said = f": {self._other}" if self._other else ""
            return RequestFailure(
                trouble=RequestTrouble.NO_USAGE,
                detail=f"the stream ended without saying how many tokens it was{said}",
            )
        if self._first is None or made == 0:
            return RequestFailure(
                trouble=RequestTrouble.EMPTY_ANSWER,
                detail=f"{made} tokens and no text (finish: {self._finish or '-'})",
            )
        details = self._usage.get("prompt_tokens_details")
        kept = details.get("cached_tokens") if isinstance(details, dict) else None
        if _is_count(kept):
            self._server["cached_tokens"] = kept
        return Sample(
            purpose=blank.purpose,
            prompt_tokens=read,
            completion_tokens=made,
            ttft_s=self._first - began,
            decode_s=self._last - self._first,
            total_s=ended - began,
            frames=len(self._pieces),
            finish_reason=self._finish,
            text="".join(self._pieces),
            server=Pairs(self._server),
            workload=blank.workload,
            prompt_length=blank.prompt_length,
            streams=blank.streams,
            run=blank.run,
            stream=blank.stream,
            seed=blank.seed,
            prompt=blank.prompt,
            asked_tokens=blank.asked_tokens,
            began_s=began - zero,
            gaps_s=tuple(self._gaps),
        )


def _text(choice: Mapping[str, Any]) -> str:
    """Return all that a frame's choice adds to an answer: thoughts and tool calls are answers too.

    A server that sends its thoughts under the old and the new name sends them once.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return _word(choice.get("text"))
    thoughts = _word(delta.get("reasoning_content")) or _word(delta.get("reasoning"))
    calls = delta.get("tool_calls")
    called = [
        _word(each["function"].get("name")) + _word(each["function"].get("arguments"))
        for each in (calls if isinstance(calls, list) else ())
        if isinstance(each, dict) and isinstance(each.get("function"), dict)
    ]
    return "".join([thoughts, _word(delta.get("content")), *called])


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(*parts: object) -> int:
    """Return a number of twelve digits, another one for other parts."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return 10**11 + int.from_bytes(digest[:8], "big") % (9 * 10**11)


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
