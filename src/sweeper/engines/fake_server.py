"""A simulated inference engine: a real process and a real loopback socket, with invented figures.

Its speed, its memory limit and the way it ends are stated on its command line, so that everything
built upon engines can be tried without one: `python -m sweeper.engines.fake_server --port 8080`.
It allocates nothing and computes nothing; it only prints, sleeps and answers as an engine would.

The standard library only, and little of it: this file is started hundreds of times by the tests.
"""

from __future__ import annotations

import argparse
import binascii
import contextlib
import errno
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple, NoReturn

NAME = "fake"
VERSION = "1.0"
HOST = "127.0.0.1"
MIB = 2**20
KIB = 2**10

KV_SCALE = {"f16": 1.0, "q8_0": 8.5 / 16, "q4_0": 4.5 / 16}
"""Bytes of a KV cache of each type, relative to f16 (block formats of llama.cpp)."""

RUNTIME_BYTES_PER_TOKEN = 16 * KIB
"""What `oom-runtime` pretends that one token of a prefill needs."""

ENDINGS = {
    "none": "boots and serves well, unless the memory numbers say otherwise",
    "crash-boot": "exits 1 with a traceback after its KV cache was allocated",
    "segfault-boot": "kills itself with SIGSEGV while loading weights",
    "killed-boot": "kills itself with SIGKILL while loading weights",
    "host-ram": "says that host memory is low and is killed while loading weights",
    "hang-boot": "opens its socket and then neither prints nor becomes ready",
    "boot-timeout": "loads and loads, prints how far it is, and never becomes ready",
    "exit0-boot": "exits 0 before it is ready",
    "bad-argument": "refuses its command line",
    "unsupported": "refuses the combination of its settings",
    "unsupported-arch": "does not know the architecture of its model",
    "host-fault": "finds the wrong driver",
    "model-missing": "does not find its model",
    "port-in-use": "finds its port taken",
    "contended": "finds the memory of its device taken by others",
    "shm": "finds no shared memory for its workers",
    "disk-full": "finds no room on the disk for its weights",
    "oom-profiling": "runs out of memory for activations while it profiles",
    "cache-corrupt": "finds its cache of compiled graphs damaged",
    "max-seqs": "has fewer blocks of KV cache than sequences to serve at once",
    "oom-capture": "runs out of memory while it captures graphs",
    "jit": "finds no compiler for its kernels",
    "chat-template": "cannot read the chat template of its model",
    "crash-serving": "exits 1 in the middle of a stream",
    "exit0-serving": "exits 0 in the middle of a stream",
    "oom-runtime": "runs out of memory in a prefill of more than --runtime-oom-tokens tokens",
    "hang-serving": "answers with headers and then with nothing, for ever",
    "http-500": "answers completions with status 500",
    "http-422": "answers completions with status 422, and gives no reason",
    "empty-answer": "answers with status 200 and no tokens",
    "garbage": "repeats one token",
    "late-garbage": "answers well until --ending-after completions, and then repeats one word",
    "looping": "goes round in a circle of 16 words in every answer, which drafts guess perfectly",
    "token-salad": "answers with words of all scripts thrown together, and bytes that are no text",
    "wrong-answers": "answers something else as soon as its KV cache is quantised",
    "error-in-stream": "sends an error object in the middle of a stream of status 200",
    "truncated-context": "serves half of the context that it prints, without a word",
    "silent-truncation": "reads the last half of its context only, and answers without a word",
    "silent-fallback": "serves without the speculation that it was asked for",
    "degraded-capacity": "has a pool of KV cache for half of its context",
    "degraded-throughput": "ends every answer after one token",
    "dead-draft": "drafts tokens and never accepts one",
    "ignores-sigterm": "serves well and goes away only when killed",
    "spawns-child": "starts a process in its group that outlives it and ignores SIGTERM",
    "oom-words-but-lives": "prints `CUDA out of memory` in a warning and serves well",
}
"""Every way to end, by the name that --ending takes."""


class Options(argparse.Namespace):
    """The flags with their types and defaults; FakeSettings takes its defaults from here.

    A flag is the name with dashes. Sizes of memory are those of the invented device. `draft_cost`
    is the share of a step without speculation that each drafted token adds to a step;
    `time_scale` divides all waiting; `ending_after` is how many completions are served well
    before an ending that happens in one. So many tokens of a chat's answer are
    `reasoning_tokens`, unless its template is told `enable_thinking: false`. From boot to boot it
    needs more or less, by `memory_spread_mib`, one standard deviation: drawn by chance, or by the
    seed and the number of the boot where it may count them in a `boots_file`.
    """

    port: int = 0
    model: str = "fake"
    context: int = 4096
    kv_type: str = "f16"
    n_max: int = 0
    batch: int = 512
    flash_attn: str = "on"
    capacity_mib: float = 1024.0
    weights_mib: float = 400.0
    kv_kib_per_token: float = 64.0
    draft_mib: float = 64.0
    compute_mib: float = 100.0
    decode_tok_s: float = 50.0
    prefill_tok_s: float = 2000.0
    acceptance: float = 0.7
    draft_cost: float = 0.1
    boot_s: float = 0.0
    time_scale: float = 1.0
    seed: int = 0
    ending: str = "none"
    ending_after: int = 0
    runtime_oom_tokens: int = 1024
    reasoning_tokens: int = 0
    memory_spread_mib: float = 0.0
    boots_file: str = ""


# ---- What is simulated, as pure functions ------------------------------------------------------


def kv_bytes_per_token(*, kv_kib_per_token: float, kv_type: str) -> float:
    """Return the bytes of KV cache that one token of context takes."""
    return kv_kib_per_token * KIB * KV_SCALE[kv_type]


def needed_bytes(
    *,
    context: int,
    kv_type: str,
    n_max: int,
    batch: int,
    weights_mib: float,
    kv_kib_per_token: float,
    draft_mib: float,
    compute_mib: float,
) -> dict[str, int]:
    """Return what a configuration needs of the invented device, in the order of allocation.

    The one source of these sizes, for the server and for the adapter that predicts it. Without
    speculation (`n_max` 0) no draft model is loaded.
    """
    per_token = kv_bytes_per_token(kv_kib_per_token=kv_kib_per_token, kv_type=kv_type)
    return {
        "weights": math.ceil(weights_mib * MIB),
        "draft": math.ceil(draft_mib * MIB) if n_max > 0 else 0,
        "kv_cache": math.ceil(context * per_token),
        "compute": math.ceil(compute_mib * MIB * batch / 512),
    }


def conflict(*, kv_type: str, flash_attn: str) -> str | None:
    """Return why these settings cannot be combined, None where they can."""
    if kv_type != "f16" and flash_attn == "off":
        return "quantised KV cache needs flash attention"
    return None


class Step(NamedTuple):
    """One step of decoding: the tokens it yields, of which `accepted` of `drafted` were drafts."""

    tokens: int
    drafted: int
    accepted: int


def decode_steps(
    wanted_tokens: int, *, n_max: int, acceptance: float, rng: random.Random
) -> Iterator[Step]:
    """Yield the steps that make exactly the wanted tokens, the one of the prefill first.

    A position is accepted with the given probability if all before it were; one token is the
    model's own, so no more is drafted than can still be used.
    """
    left = wanted_tokens
    if left > 0:
        yield Step(1, 0, 0)
        left -= 1
    while left > 0:
        drafted = min(n_max, left - 1)
        accepted = 0
        while accepted < drafted and rng.random() < acceptance:
            accepted += 1
        yield Step(accepted + 1, drafted, accepted)
        left -= accepted + 1


WORDS = tuple(
    f" {word}"
    for word in (
        "a about after all and any are as at be because before boat bread by can cat cloud cold "
        "come day do dog door early evening every far field find fire for from garden give go "
        "green had hand has have high hill home hour house in into is it keep lake last late "
        "leaf light like long make many more morning near new night no not of old on one open "
        "or other out over paper people quiet rain read river road run sea see small snow some "
        "song stone sun table that the their then there they this time to tree two under up wall "
        "warm was water way we were when where which while wind window with wood word year you"
    ).split()
)
"""The vocabulary that answers are written in; the token of a word here is its index."""


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts have in common from their beginning on."""
    for index, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return index
    return min(len(one), len(other))


SALAD = (
    " the", "ord", " ination", " Вен", "та", "苹", " 果", "кан", " дида", ")))", "##otein", "ニュ",
    " تس", "علي", "नम", " ते", "ไทย", "\ufffd\ufffd", "ליל", " ה", "\ufffd", "ეხ", " 령", "하",
    " été", "λόγ", "\x02", "<0x9F>",
)  # fmt: skip
"""Pieces of tokens drawn by chance from a vocabulary of many languages."""

_BROKEN_WORDS = {"garbage": ("!",), "late-garbage": (" the",), "token-salad": SALAD}
"""What the endings that break an answer are written in."""

_CIRCLE = 16
"""Words of a loop: so many that three short answers of them are no collapse."""

LOGPROB_LOSS = {"f16": 0.0, "q8_0": 0.005, "q4_0": 0.08}
"""Nats a token that a text seems less probable with a KV cache of each type."""
BROKEN_LOGPROB_LOSS = 7.0

_PIECE = re.compile(r"\s*\S+|\s+")
_WORD_TOKENS = {word: token for token, word in enumerate(WORDS)}


def tokenize(text: str) -> list[int]:
    """Return one token for each word with the space before it, the same for the same word.

    The tokens of a text and of one that continues it after a space are those of the whole.
    """
    return [
        # Words outside the vocabulary get ids above it; two may share one, which nobody minds.
        _WORD_TOKENS[piece]
        if piece in _WORD_TOKENS
        else 1000 + binascii.crc32(piece.encode("utf-8", "surrogatepass")) % 31000
        for piece in _PIECE.findall(text)
    ]


# ---- Talking to the log and leaving ------------------------------------------------------------


def say(text: str, end: str = "\n") -> None:
    """Print in one unbuffered write: safe among threads, in a signal handler, and before a kill."""
    try:
        os.write(1, (text + end).encode())
    except BrokenPipeError:
        return  # whoever read the log has gone; serving goes on


def leave(code: int, *lines: str) -> NoReturn:
    """Print the lines and end the whole process at once, whichever thread this is."""
    for line in lines:
        say(line)
    os._exit(code)


def kill_self(number: signal.Signals) -> NoReturn:
    """End this process by a signal that it cannot survive."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a simulated crash leaves no core file
    os.kill(os.getpid(), number)
    os._exit(1)


def sleep_until(moment_s: float) -> None:
    """Sleep until the monotonic clock shows the moment; no time at all if it has passed."""
    while (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(left_s)


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "fake_engine.py", line 1, in step',
    "    device.synchronise()",
    "RuntimeError: device-side assertion failed",
)


# ---- HTTP --------------------------------------------------------------------------------------

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    422: "Unprocessable Entity",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_BODY_LIMIT_BYTES = 256 * MIB


class Refused(Exception):
    """A request that gets an error answer; `fields` join its JSON error object."""

    def __init__(self, status: int, kind: str, message: str, **fields: object) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"code": status, "message": message, "type": kind, **fields}


class Unreadable(Exception):
    """Bytes that are no HTTP request; the connection cannot go on."""


class Request(NamedTuple):
    """One HTTP request, read whole."""

    method: str
    path: str
    body: bytes
    keep_alive: bool
    arrived_s: float
    """When its first line was there: what comes after counts as the engine's own time."""


def event(data: str) -> bytes:
    """Return one event of a stream as one chunk."""
    frame = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(frame), frame)


class Connection:
    """One client's connection: reads requests, writes answers whole or in chunks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._reader: IO[bytes] = sock.makefile("rb")

    def next_request(self) -> Request | None:
        """Return the next request, None at the end of the connection; raises Unreadable."""
        line = self._line()
        while line == b"\r\n":
            line = self._line()
        if not line:
            return None
        arrived_s = time.monotonic()
        words = line.decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Unreadable("not a request line")
        headers: dict[str, str] = {}
        while (line := self._line()) not in (b"\r\n", b"\n"):
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or len(headers) > 200:
                raise Unreadable("not a header")
            headers[name.strip().lower()] = value.strip()
        if "transfer-encoding" in headers:
            raise Unreadable("a request body must have a length")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > _BODY_LIMIT_BYTES:
            raise Unreadable("not a length that can be served")
        if headers.get("expect", "").lower() == "100-continue":
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._reader.read(int(length))
        if len(body) < int(length):
            return None
        wish = headers.get("connection", "").lower()
        keep_alive = wish != "close" and (words[2] != "HTTP/1.0" or wish == "keep-alive")
        return Request(words[0], words[1].partition("?")[0], body, keep_alive, arrived_s)

    def _line(self) -> bytes:
        line = self._reader.readline(65537)
        if len(line) > 65536:
            raise Unreadable("a line that never ends")
        return line

    def answer(self, status: int, payload: bytes, kind: str = "application/json") -> None:
        """Send a whole answer in one write."""
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
        head += f"Content-Length: {len(payload)}\r\n\r\n"
        self._sock.sendall(head.encode("latin-1") + payload)

    def answer_json(self, status: int, payload: object) -> None:
        """Send a whole JSON answer."""
        self.answer(status, json.dumps(payload).encode())

    def start_stream(self) -> None:
        """Send the headers of a stream of events."""
        self._sock.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def send_event(self, data: str) -> None:
        """Send one event as one chunk."""
        self.send(event(data))

    def send(self, ready: bytes) -> None:
        """Send what is ready to go, in one write."""
        self._sock.sendall(ready)

    def end_stream(self) -> None:
        """Send the last chunk; the connection can be used again."""
        self._sock.sendall(b"0\r\n\r\n")

    def wait_for_end(self) -> None:
        """Return when the client has gone."""
        self._reader.read()


# ---- The engine --------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a completion request asks for, checked."""

    prompt: tuple[int, ...]
    wanted_tokens: int
    chat: bool
    stream: bool
    include_usage: bool
    cache_prompt: bool
    prompt_logprobs: bool
    reasoning_tokens: int
    arrived_s: float


_REMEMBERED_PROMPTS = 64


class Server:
    """The state of one process: its options, its counters, and whether it has loaded."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.loaded = threading.Event()
        self._lock = threading.Lock()
        self._remembered: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED_PROMPTS)
        self._requests = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._drafts = 0
        self._drafted = 0
        self._accepted = 0
        self._n_max = 0 if options.ending == "silent-fallback" else options.n_max
        self._accepted_at = [0] * self._n_max

    @property
    def window_tokens(self) -> int:
        """The context that is really served."""
        halved = self.options.ending == "truncated-context"
        return self.options.context // 2 if halved else self.options.context

    def accept_forever(self, listener: socket.socket) -> None:
        """Serve every connection in a thread of its own."""
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=self._converse, args=(sock,), daemon=True).start()

    def _converse(self, sock: socket.socket) -> None:
        with sock:
            try:
                connection = Connection(sock)
                while (request := connection.next_request()) is not None:
                    try:
                        self._respond(connection, request)
                    except Refused as refused:
                        connection.answer_json(refused.status, {"error": refused.error})
                    if not request.keep_alive:
                        return
            except Unreadable as unreadable:
                error = Refused(400, "invalid_request_error", str(unreadable)).error
                with contextlib.suppress(OSError):
                    connection.answer_json(400, {"error": error})
            except OSError:
                return  # the client has gone, which is its right

    def _respond(self, connection: Connection, request: Request) -> None:
        routes = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat_completions),
        }
        if request.path not in routes:
            raise Refused(404, "not_found_error", f"there is no {request.path}")
        method, handler = routes[request.path]
        if request.method != method:
            raise Refused(405, "invalid_request_error", f"{request.path} takes {method}")
        if not self.loaded.is_set():
            raise Refused(503, "unavailable_error", "loading model")
        handler(connection, request)

    def _health(self, connection: Connection, request: Request) -> None:
        connection.answer_json(200, {"status": "ok"})

    def _models(self, connection: Connection, request: Request) -> None:
        model = {"id": self.options.model, "object": "model", "owned_by": NAME}
        connection.answer_json(200, {"object": "list", "data": [model]})

    def _tokenize(self, connection: Connection, request: Request) -> None:
        text = _json_object(request).get("prompt")
        if not isinstance(text, str):
            raise Refused(400, "invalid_request_error", "prompt must be a text")
        tokens = tokenize(text)
        connection.answer_json(200, {"tokens": tokens, "count": len(tokens)})

    def _metrics(self, connection: Connection, request: Request) -> None:
        with self._lock:
            counters: list[tuple[str, list[tuple[str, int]]]] = [
                ("prompt_tokens_total", [("", self._prompt_tokens)]),
                ("generation_tokens_total", [("", self._generated_tokens)]),
            ]
            if self._n_max > 0:
                counters += [
                    ("spec_decode_num_drafts_total", [("", self._drafts)]),
                    ("spec_decode_num_draft_tokens_total", [("", self._drafted)]),
                    ("spec_decode_num_accepted_tokens_total", [("", self._accepted)]),
                    (
                        "spec_decode_num_accepted_tokens_per_pos_total",
                        [(f'{{position="{i}"}}', n) for i, n in enumerate(self._accepted_at)],
                    ),
                ]
        lines = []
        for name, samples in counters:
            lines.append(f"# HELP fake:{name} Simulated.\n# TYPE fake:{name} counter\n")
            lines += [f"fake:{name}{labels} {value}\n" for labels, value in samples]
        kind = "text/plain; version=0.0.4; charset=utf-8"
        connection.answer(200, "".join(lines).encode(), kind)

    def _completions(self, connection: Connection, request: Request) -> None:
        body = _json_object(request)
        prompt = _prompt(body.get("prompt"))
        self._complete(connection, self._asked(request, body, prompt, chat=False))

    def _chat_completions(self, connection: Connection, request: Request) -> None:
        body = _json_object(request)
        prompt = _chat_prompt(body.get("messages"))
        self._complete(connection, self._asked(request, body, prompt, chat=True))

    def _asked(
        self, request: Request, body: dict[str, Any], prompt: list[int], *, chat: bool
    ) -> Answer:
        """Return the request checked against the window; raises Refused."""
        if len(prompt) >= self.window_tokens and self.options.ending != "silent-truncation":
            raise Refused(
                400,
                "exceed_context_size_error",
                f"the request of {len(prompt)} tokens exceeds the available context size "
                f"of {self.window_tokens} tokens",
                n_prompt_tokens=len(prompt),
                n_ctx=self.window_tokens,
            )
        if self.options.ending == "silent-truncation":
            prompt = prompt[-max(self.window_tokens // 2, 1) :]
        room = self.window_tokens - len(prompt)
        most = body.get("max_completion_tokens", body.get("max_tokens"))
        if most is None:
            most = room
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise Refused(400, "invalid_request_error", f"max_tokens cannot be {most!r}")
        stream_options = body.get("stream_options") or {}
        if not isinstance(stream_options, dict):
            raise Refused(400, "invalid_request_error", "stream_options must be an object")
        template = body.get("chat_template_kwargs") or {}
        if not isinstance(template, dict):
            raise Refused(400, "invalid_request_error", "chat_template_kwargs must be an object")
        if body.get("prompt_logprobs") is not None and body.get("stream"):
            raise Refused(400, "invalid_request_error", "prompt_logprobs: not in a stream")
        thinks = chat and template.get("enable_thinking", True) is not False
        return Answer(
            prompt=tuple(prompt),
            wanted_tokens=min(most, room),
            chat=chat,
            stream=bool(body.get("stream")),
            include_usage=bool(stream_options.get("include_usage")),
            cache_prompt=body.get("cache_prompt") is True,
            prompt_logprobs=body.get("prompt_logprobs") is not None,
            reasoning_tokens=self.options.reasoning_tokens if thinks else 0,
            arrived_s=request.arrived_s,
        )

    def _complete(self, connection: Connection, asked: Answer) -> None:
        options = self.options
        with self._lock:
            number = self._requests
            self._requests += 1
            self._prompt_tokens += len(asked.prompt)
        say(f"fake: request {number + 1} with {len(asked.prompt)} prompt tokens")
        ending = options.ending if number >= options.ending_after else "none"
        if ending == "http-500":
            raise Refused(500, "server_error", "simulated internal error")
        if ending == "http-422":
            raise Refused(422, "unprocessable_error", "the request cannot be processed")
        if ending == "hang-serving":
            connection.start_stream()
            connection.wait_for_end()
            raise ConnectionResetError
        short = {"empty-answer": 0, "degraded-throughput": 1}
        wanted_tokens = min(asked.wanted_tokens, short.get(ending, asked.wanted_tokens))

        started_s = asked.arrived_s
        cached = self._cached_tokens(asked)
        prefill_s = (len(asked.prompt) - cached) / options.prefill_tok_s / options.time_scale
        if ending == "oom-runtime" and len(asked.prompt) > options.runtime_oom_tokens:
            sleep_until(started_s + prefill_s / 2)
            leave(1, self._runtime_oom(len(asked.prompt)))

        # What is to be said is thought of in the middle of the prefill, not at once: requests that
        # come at the same moment get their times before anything takes the processor from them.
        sleep_until(started_s + prefill_s / 2)
        # The text depends on model and prompt alone, as with greedy decoding: speculation loses
        # nothing, and neither does a KV cache that is not broken.
        request = binascii.crc32(repr(asked.prompt).encode())
        writer = random.Random(f"text {options.model} {request} {self._corruption(ending)}")
        words = _BROKEN_WORDS.get(ending, WORDS)
        spoken: Iterator[str]
        if ending == "looping":
            spoken = itertools.cycle([writer.choice(words) for _ in range(_CIRCLE)])
        else:
            spoken = (writer.choice(words) for _ in itertools.count())
        acceptance = {"dead-draft": 0.0, "looping": 1.0}.get(options.ending, options.acceptance)
        luck = random.Random(f"drafts {options.seed} {request} {wanted_tokens}")
        reply = Reply(connection, asked, model=options.model, number=number)
        if asked.stream:
            connection.start_stream()
        # Each token has its moment, whenever the one before it really went out: what a busy
        # machine delays once does not delay all that follows. It is written before that moment.
        due_s = started_s + prefill_s
        prefilled_s: float | None = None
        made = drafted = accepted = 0
        for index, step in enumerate(
            decode_steps(wanted_tokens, n_max=self._n_max, acceptance=acceptance, rng=luck)
        ):
            if index > 0:  # the first token is the prefill's own
                cost = (1 + options.draft_cost * step.drafted) / options.decode_tok_s
                due_s += cost / options.time_scale
            ready = reply.piece(
                "".join(itertools.islice(spoken, step.tokens)),
                thought=made < asked.reasoning_tokens,
            )
            sleep_until(due_s)
            if prefilled_s is None:
                prefilled_s = time.monotonic()
            reply.add(ready)
            made += step.tokens
            drafted += step.drafted
            accepted += step.accepted
            self._count(step)
            if 2 * made >= wanted_tokens and self._struck(ending, reply):
                return
        if prefilled_s is None:
            sleep_until(due_s)
            prefilled_s = time.monotonic()
        if self._struck(ending, reply):
            return
        finished_s = time.monotonic()

        usage: dict[str, Any] = {
            "prompt_tokens": len(asked.prompt),
            "completion_tokens": made,
            "total_tokens": len(asked.prompt) + made,
        }
        timings: dict[str, int | float] = {
            "prompt_n": len(asked.prompt) - cached,
            "prompt_ms": (prefilled_s - started_s) * 1000,
            # Moments of the clock that all processes of a machine share, to tell whose a delay is.
            "arrived_at_s": started_s,
            "first_at_s": prefilled_s,
            # As in llama.cpp, the first token is counted here and its time in the prompt's.
            "predicted_n": made,
            "predicted_ms": (finished_s - prefilled_s) * 1000,
        }
        if asked.cache_prompt:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            timings["cache_n"] = cached
        if drafted > 0:
            timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
        logprobs = self._prompt_logprobs(asked.prompt, ending) if asked.prompt_logprobs else None
        reply.finish("stop" if ending in short else "length", usage, timings, logprobs)

    def _corruption(self, ending: str) -> str:
        """Return what makes the answers others than those of the same weights, "" for nothing."""
        kv_type = self.options.kv_type
        return kv_type if ending == "wrong-answers" and kv_type != "f16" else ""

    def _prompt_logprobs(
        self, prompt: Sequence[int], ending: str
    ) -> list[dict[str, dict[str, object]] | None]:
        """Return how probable each token of the prompt is, in nats, as vLLM tells it.

        The same for the same model and prompt; less by a little for a smaller KV type, and by
        much for an ending that breaks the answers. The first token has none.
        """
        loss = LOGPROB_LOSS[self.options.kv_type]
        if ending in _BROKEN_WORDS or self._corruption(ending):
            loss += BROKEN_LOGPROB_LOSS
        told: list[dict[str, dict[str, object]] | None] = [None]
        for position, token in enumerate(prompt[1:], 1):
            drawn = binascii.crc32(f"{self.options.model} {position} {token}".encode()) / 2**32
            told.append({str(token): {"logprob": -4 * drawn - loss, "rank": 1}})
        return told

    def _cached_tokens(self, asked: Answer) -> int:
        """Return how much of the prompt need not be read again, and remember the prompt."""
        with self._lock:
            remembered = tuple(self._remembered)
            self._remembered.append(asked.prompt)
        if not asked.cache_prompt:
            return 0
        known = max((common_prefix(asked.prompt, each) for each in remembered), default=0)
        return min(known, len(asked.prompt) - 1)  # the last token is read for its successor

    def _count(self, step: Step) -> None:
        with self._lock:
            self._generated_tokens += step.tokens
            if step.drafted > 0:
                self._drafts += 1
                self._drafted += step.drafted
                self._accepted += step.accepted
                for position in range(step.accepted):
                    self._accepted_at[position] += 1

    def _struck(self, ending: str, reply: Reply) -> bool:
        """Carry out an ending in the middle of an answer; True if the answer has ended by it."""
        if ending == "crash-serving":
            leave(1, *TRACEBACK)
        if ending == "exit0-serving":
            leave(0, "fake: shutting down")
        if ending == "error-in-stream":
            reply.fail({"code": 500, "message": "simulated failure", "type": "server_error"})
            return True
        return False

    def _runtime_oom(self, prompt_tokens: int) -> str:
        options = self.options
        needed = prompt_tokens * RUNTIME_BYTES_PER_TOKEN
        free = options.runtime_oom_tokens * RUNTIME_BYTES_PER_TOKEN
        return (
            f"fake: out of memory at runtime: cannot allocate {needed / MIB:.2f} MiB "
            f"for prefill of {prompt_tokens} tokens, {free / MIB:.2f} MiB free "
            f"of {options.capacity_mib:.2f} MiB"
        )


class Reply:
    """One answer on its way: sent piece by piece in a stream, or gathered and sent whole."""

    def __init__(self, connection: Connection, asked: Answer, *, model: str, number: int) -> None:
        self._connection = connection
        self._asked = asked
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._head = {
            "id": f"fake-{number}",
            "object": (
                ("chat.completion.chunk" if asked.stream else "chat.completion")
                if asked.chat
                else "text_completion"
            ),
            "created": int(time.time()),
            "model": model,
        }

    def piece(self, text: str, *, thought: bool) -> bytes:
        """Return a piece of the answer ready to be sent; nothing where all goes out at once."""
        (self._thoughts if thought else self._texts).append(text)
        if not self._asked.stream:
            return b""
        if not self._asked.chat:
            return event(json.dumps(self._choice(None, {"text": text})))
        part = {"reasoning_content" if thought else "content": text}
        ready = event(json.dumps(self._choice(None, {"delta": part})))
        if len(self._texts) + len(self._thoughts) > 1:
            return ready
        opening = {"delta": {"role": "assistant", "content": ""}}
        return event(json.dumps(self._choice(None, opening))) + ready

    def add(self, ready: bytes) -> None:
        """Send a piece in one write."""
        if ready:
            self._connection.send(ready)

    def finish(
        self,
        reason: str,
        usage: dict[str, Any],
        timings: dict[str, int | float],
        prompt_logprobs: list[dict[str, dict[str, object]] | None] | None = None,
    ) -> None:
        """Send what ends a good answer; usage and timings go with the last object."""
        if not self._asked.stream:
            text = "".join(self._texts)
            said: dict[str, Any] = {"role": "assistant", "content": text}
            if self._thoughts:
                said["reasoning_content"] = "".join(self._thoughts)
            message = {"message": said}
            part: dict[str, Any] = message if self._asked.chat else {"text": text}
            if prompt_logprobs is not None:
                part["prompt_logprobs"] = prompt_logprobs
            whole = self._choice(reason, part)
            self._connection.answer_json(200, {**whole, "usage": usage, "timings": timings})
            return
        last = self._choice(reason, {"delta": {}} if self._asked.chat else {"text": ""})
        if self._asked.include_usage:
            self._send(last)
            self._send({**self._head, "choices": [], "usage": usage, "timings": timings})
        else:
            self._send({**last, "timings": timings})
        self._connection.send_event("[DONE]")
        self._connection.end_stream()

    def fail(self, error: dict[str, object]) -> None:
        """Send an error where a status can no longer say it."""
        if not self._asked.stream:
            self._connection.answer_json(200, {"error": error})
            return
        self._send({"error": error})
        self._connection.end_stream()

    def _choice(self, reason: str | None, part: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": 0, **part, "finish_reason": reason}]}

    def _send(self, event: dict[str, Any]) -> None:
        self._connection.send_event(json.dumps(event))


def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body)
    except ValueError as error:
        raise Refused(400, "invalid_request_error", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "invalid_request_error", "the body must be a JSON object")
    return body


def _prompt(prompt: object) -> list[int]:
    """Return the tokens of a prompt given as text or as tokens."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = tokenize(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
    else:
        raise Refused(400, "invalid_request_error", "prompt must be a text or a list of tokens")
    if not tokens:
        raise Refused(400, "invalid_request_error", "prompt must not be empty")
    return tokens


def _chat_prompt(messages: object) -> list[int]:
    """Return the tokens of a conversation, with the role before each message."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "invalid_request_error", "messages must be a list and not empty")
    parts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if _is_object(part))
        if not isinstance(content, str):
            raise Refused(400, "invalid_request_error", "a message needs a content of text")
        parts.append(f" <|{message.get('role', 'user')}|> {content}")
    return tokenize("".join(parts) + " <|assistant|>")


def _is_object(part: object) -> bool:
    return isinstance(part, dict)


# ---- The boot ----------------------------------------------------------------------------------


class Boot:
    """The phases of a boot in order, each printed, spread over `boot_s` from its beginning."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._started_s = time.monotonic()
        self._free_bytes = math.floor(options.capacity_mib * MIB)
        self._needed = needed_bytes(
            context=options.context,
            kv_type=options.kv_type,
            n_max=options.n_max,
            batch=options.batch,
            weights_mib=options.weights_mib,
            kv_kib_per_token=options.kv_kib_per_token,
            draft_mib=options.draft_mib,
            compute_mib=options.compute_mib,
        )
        if options.memory_spread_mib > 0:
            more = _drawn(options) * options.memory_spread_mib * MIB
            self._needed["compute"] = max(self._needed["compute"] + round(more), 0)

    def check(self) -> None:
        """Print the settings and what they need, or leave if they cannot work."""
        options = self._options
        per_token = kv_bytes_per_token(
            kv_kib_per_token=options.kv_kib_per_token, kv_type=options.kv_type
        )
        say(
            f"fake: settings context={options.context} kv_type={options.kv_type} "
            f"n_max={options.n_max} batch={options.batch} flash_attn={options.flash_attn} "
            f"kv_bytes_per_token={per_token}"
        )
        sizes = " ".join(f"{kind}={size}" for kind, size in self._needed.items())
        say(f"fake: projected bytes {sizes} capacity={self._free_bytes}")
        wrong = conflict(kv_type=options.kv_type, flash_attn=options.flash_attn)
        if options.ending == "unsupported":
            wrong = "quantised KV cache needs flash attention"
        if wrong is not None:
            leave(1, f"fake: error: {wrong}")
        self._may_end("unsupported-arch", "fake: error: model architecture fake-next is not known")
        if options.ending == "host-fault":
            leave(1, "fake: driver version mismatch")
        if options.ending == "model-missing":
            leave(1, f"fake: model not found: {options.model}")
        say("fake: opening device")
        free_mib = options.capacity_mib / 64
        self._may_end(
            "contended",
            f"fake: error: device is in use by others: {free_mib:.2f} MiB free "
            f"of {options.capacity_mib:.2f} MiB",
        )
        self._may_end("shm", "fake: error: no space left in shared memory for 1 worker")

    def load(self) -> None:
        """Go through the phases that take memory and time."""
        options = self._options
        say("fake: loading weights 0%", end="\r")
        self._allocate("weights")
        for share, percent in ((0.2, 25), (0.35, 50), (0.5, 75), (0.6, 100)):
            self._until(share)
            say(f"fake: loading weights {percent}%", end="\n" if percent == 100 else "\r")
            if percent == 50 and options.ending == "segfault-boot":
                kill_self(signal.SIGSEGV)
            if percent == 75 and options.ending == "killed-boot":
                kill_self(signal.SIGKILL)
            if percent == 75 and options.ending == "host-ram":
                say("fake: host memory low: killed by the out-of-memory killer")
                kill_self(signal.SIGKILL)
            if percent == 75 and options.ending == "boot-timeout":
                self._load_for_ever()
        self._may_end("disk-full", "fake: error: cannot unpack weights: no space left on disk")
        if self._needed["draft"] > 0:
            say("fake: loading draft")
            self._allocate("draft")
            if options.ending == "silent-fallback":
                say("fake: warning: speculation was not initialised, serving without it")
        say("fake: profiling memory")
        self._may_end("oom-profiling", self._too_large("activations", self._free_bytes + 64 * MIB))
        self._may_end("cache-corrupt", "fake: error: cache of compiled graphs is damaged: graph 3")
        self._until(0.7)
        say("fake: allocating kv_cache")
        self._may_end("max-seqs", "fake: error: 256 sequences at once exceed 128 blocks")
        self._allocate("kv_cache")
        pool_tokens = options.context // (2 if options.ending == "degraded-capacity" else 1)
        say(f"fake: kv_cache pool holds {pool_tokens} tokens")
        if options.ending == "crash-boot":
            leave(1, *TRACEBACK)
        self._until(0.8)
        say("fake: allocating compute")
        if options.ending == "oom-words-but-lives":
            say("fake: warning: CUDA out of memory, retrying with a smaller scratch buffer")
        self._allocate("compute")
        if options.ending == "exit0-boot":
            leave(0)
        say("fake: capturing graphs")
        self._may_end("oom-capture", self._too_large("graphs", self._free_bytes + 64 * MIB))
        self._until(0.9)
        say("fake: warming up")
        self._may_end("jit", "fake: error: cannot compile a kernel: there is no fakecc")
        self._may_end("chat-template", "fake: error: chat template ends inside of a block")
        self._until(1.0)

    def _until(self, share: float) -> None:
        options = self._options
        sleep_until(self._started_s + share * options.boot_s / options.time_scale)

    def _may_end(self, ending: str, words: str) -> None:
        """Leave with these words if this is how it is to end."""
        if self._options.ending == ending:
            leave(1, words)

    def _load_for_ever(self) -> NoReturn:
        block = 0
        while True:
            block += 1
            say(f"fake: loading weights 75%, block {block}", end="\r")
            time.sleep(0.1)

    def _too_large(self, kind: str, size: int) -> str:
        return (
            f"fake: cannot allocate {size / MIB:.2f} MiB for {kind}, "
            f"{self._free_bytes / MIB:.2f} MiB free "
            f"of {self._options.capacity_mib:.2f} MiB"
        )

    def _allocate(self, kind: str) -> None:
        size = self._needed[kind]
        if size > self._free_bytes:
            leave(1, self._too_large(kind, size))
        self._free_bytes -= size
        say(f"fake: {kind} buffer size = {size / MIB:.2f} MiB")


def _drawn(options: Options) -> float:
    """Return by how many standard deviations this boot needs more than usual."""
    if not options.boots_file:
        return random.Random().gauss(0, 1)
    from pathlib import Path  # only here: every import is paid for at each start

    with Path(options.boots_file).open("a+", encoding="ascii") as file:
        file.write("boot\n")
        file.seek(0)
        boot = len(file.readlines())
    return random.Random(f"{options.seed}:{boot}").gauss(0, 1)


class Parser(argparse.ArgumentParser):
    """A parser that refuses as inference engines do: one line and exit code 1."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave."""
        leave(1, f"error: {message}")


def parse(arguments: Sequence[str]) -> Options:
    """Return the flags, typed; leaves with exit code 1 for one that is unknown or mistyped."""
    parser = Parser(
        prog="python -m sweeper.engines.fake_server", description=__doc__, allow_abbrev=False
    )
    choices: dict[str, Iterable[str]] = {
        "kv_type": KV_SCALE,
        "flash_attn": ("on", "off"),
        "ending": ENDINGS,
    }
    for name in Options.__annotations__:
        default = getattr(Options, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=type(default),
            default=default,
            choices=tuple(choices[name]) if name in choices else None,
            help=f"default {default}",
        )
    options, unknown = parser.parse_known_args(arguments, Options())
    if options.ending == "bad-argument":
        unknown.append("--no-such-flag")
    if unknown:
        parser.error(f"unknown argument: {unknown[0]}")
    return options


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback port; leaves if the port cannot be had."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        refuse_to_bind(port, error.errno or errno.EIO)
    return listener


def refuse_to_bind(port: int, number: int) -> NoReturn:
    """Leave as one whose port cannot be had."""
    leave(1, f"fake: cannot bind {HOST}:{port}: {os.strerror(number)}")


def spawn_child() -> None:
    """Start a process in this group that ignores SIGTERM, holding nothing but its place."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.alarm(600)  # nobody's forgotten test leaves it behind for ever
        while True:
            signal.pause()
    say(f"fake: started worker process {child}")


def main(arguments: Sequence[str]) -> NoReturn:
    """Boot, serve until a signal, and leave."""
    options = parse(arguments)
    say(f"fake: engine {NAME} {VERSION}")
    if options.ending == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: leave(0, "fake: stopping"))
    signal.signal(signal.SIGINT, lambda *_: leave(0, "fake: stopping"))
    if options.ending == "spawns-child":
        spawn_child()  # before the socket and the threads, so that it inherits neither
    if options.ending == "port-in-use":
        refuse_to_bind(options.port, errno.EADDRINUSE)
    listener = listen(options.port)
    port = listener.getsockname()[1]
    say(f"fake: listening on {HOST}:{port}, not ready")
    server = Server(options)
    threading.Thread(target=server.accept_forever, args=(listener,), daemon=True).start()
    while options.ending == "hang-boot":
        signal.pause()
    boot = Boot(options)
    boot.check()
    boot.load()
    server.loaded.set()
    say(f"fake: ready on http://{HOST}:{port}")
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
